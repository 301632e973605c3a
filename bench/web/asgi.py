"""A price list of a FastAPI application: what a client costs where uvicorn serves it, and where it is handed over.

Run ``python bench asgi``. Clients, messages and figures are those of `websockets`. uvicorn runs with uvloop and
httptools, and with each of its two protocols that are kept up: over wsproto, and over websockets without its own input
and output. The application sends to one client after the other, as FastAPI's documents have it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kit.processes import raise_open_files, resident_bytes
from kit.tables import titled
from web.websockets import Load, least, open_pair

SERVERS: Final = {
    "handed over to flowctl": "flowctl",
    "uvicorn, wsproto": "wsproto",
    "uvicorn, websockets": "websockets-sansio",
}


def measure(server: str, clients: int, loads: Sequence[Load]) -> list[dict[str, Any]]:
    """Return what the rounds cost one server."""
    rows = []
    with open_pair([SERVERS[server]], clients, program="shop.py") as (pair, before):
        memory = (resident_bytes([pair.server.pid]) - before) / clients / 1000
        for load in loads:
            row: dict[str, Any] = {"part": "asgi", "server": server, "clients": clients, "messages": load.label}
            rows.append({**row, **pair.measure(load), "kb_per_client": memory})
            print(f"# {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    return rows


def run(*, clients: int = 1000, repeat: int = 2, count: int = 60) -> list[dict[str, Any]]:
    """Measure the servers in turn, and return of equal rounds the one with the least processor time."""
    raise_open_files()
    loads = [Load(size=100, burst=burst, count=count) for burst in (1, 5)]
    return least([row for _ in range(repeat) for server in SERVERS for row in measure(server, clients, loads)])


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Return the table."""
    del images
    heads = {"server": "server", "messages": "messages", "cpu_us": "CPU, µs per client and message"}
    heads |= {"delay_p50_ms": "p50, ms", "delay_p99_ms": "p99, ms", "kb_per_client": "memory per client, kB"}
    return titled({"asgi": f"{rows[0]['clients']:,} clients"}, {"asgi": heads}, rows)


QUICK: Final[dict[str, Any]] = {"clients": 20, "repeat": 1, "count": 10}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run what is asked for, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=1, help="turns of each server")
    parser.add_argument("--count", type=int, default=60, help="messages of a round")
    print(document(run(**vars(parser.parse_args())), Path()))


if __name__ == "__main__":
    main()
