"""A price list over WebSockets: what a client and message cost, beside websockets.broadcast and aiohttp.

Run ``python bench websockets``. Each server is a process of its own, and so is the crowd; both others run on uvloop.
Three questions: what a message to a client costs the server, in processor time, delay and memory, without and with
permessage-deflate; what becomes of a server when a tenth of its clients read nothing; what 10,000 clients take.
Messages come 20 a second, evenly or five at once (a market that moves four times a second), for 100 keys. Servers take
turns, twice, and the least processor time counts. *flowctl* is the default, *flowctl 100 ms* a longer flush interval.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kit.machine import PROGRAMS
from kit.processes import cpu_seconds, process, raise_open_files, read_json, resident_bytes, tell
from kit.tables import table

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
RATE: Final = 20.0
SERVERS: Final = {
    "flowctl": ["flowctl"],
    "flowctl 100 ms": ["flowctl", "--flush", "0.1"],
    "websockets": ["websockets"],
    "aiohttp": ["aiohttp"],
    "bare loop": ["bare"],
}
OTHERS: Final = ("websockets", "aiohttp")
STALLED: Final = {
    "flowctl, keys": ["flowctl"],
    "flowctl, keys, never cut": ["flowctl", "--patient"],
    "flowctl, no keys": ["flowctl", "--no-keys"],
    "websockets.broadcast": ["websockets", "--ping"],
    "aiohttp, each awaited": ["aiohttp"],
    "aiohttp, a task for each": ["aiohttp", "--tasks"],
}
_STALLED_SIZE: Final = 8000
"""Octets: what stalled clients are behind with has to be more than the kernel keeps for them, within a minute."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Messages of one round."""

    size: int
    burst: int
    count: int
    rate: float = RATE

    @property
    def label(self) -> str:
        """What a table says of it."""
        return f"{self.size} bytes, {f'{self.burst} at once' if self.burst > 1 else 'evenly'}"


def socket_bytes() -> int:
    """Return what TCP sockets of the whole machine hold."""
    line = next(line for line in Path("/proc/net/sockstat").read_text("ascii").splitlines() if line.startswith("TCP:"))
    return int(line.split()[-1]) * _PAGE


class Pair:
    """A server and its crowd."""

    def __init__(self, server: subprocess.Popen[str], crowd: subprocess.Popen[str], clients: int) -> None:
        self.server, self.crowd, self.clients = server, crowd, clients
        time.sleep(0.5)
        idle = cpu_seconds([server.pid])
        time.sleep(0.5)
        self.idle_share = 2 * (cpu_seconds([server.pid]) - idle)

    def measure(self, load: Load) -> dict[str, Any]:
        """Publish the messages of a round, and return what they cost."""
        began, used = time.monotonic(), cpu_seconds([self.server.pid])
        of_crowd = cpu_seconds([self.crowd.pid])
        figures, _ = self.publish(load, 4 * load.count / load.rate + 10)
        took_s = time.monotonic() - began
        cpu_s = cpu_seconds([self.server.pid]) - used
        return {
            "cpu_us": (cpu_s - self.idle_share * took_s) / self.clients / load.count * 1e6,
            "core_percent": 100 * cpu_s / took_s,
            "crowd_percent": 100 * (cpu_seconds([self.crowd.pid]) - of_crowd) / took_s,
            "complete_percent": 100 * figures["complete"] / self.clients,
            "bytes_per_message": figures["bytes_per_client"] / load.count,
            **{key: figures[key] for key in ("complete", "delay_p50_ms", "delay_p99_ms")},
        }

    def publish(self, load: Load, within_s: float) -> tuple[dict[str, Any], list[int]]:
        """Publish the messages; return the crowd's figures, and the server's memory, second by second."""
        tell(self.crowd, json.dumps({"count": load.count, "within_s": within_s}))
        tell(self.server, json.dumps(asdict(load)))
        memory = []
        for _ in range(int(load.count / load.rate)):
            time.sleep(1.0)
            memory.append(resident_bytes([self.server.pid]))
        read_json(self.server)  # which may have taken longer
        memory.append(resident_bytes([self.server.pid]))
        return read_json(self.crowd), memory


@contextlib.contextmanager
def open_pair(
    server: Sequence[str], clients: int, *crowd: str, program: str = "prices.py"
) -> Iterator[tuple[Pair, int]]:
    """Start a server and let the crowd connect; yields them with the memory that the server had before."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with process([sys.executable, str(PROGRAMS / program), *server], **pipes) as child:
        port = int(read_json(child)["port"])
        before = resident_bytes([child.pid])
        command = [sys.executable, str(PROGRAMS / "browsers.py"), str(port), "--clients", str(clients), *crowd]
        with process(command, **pipes) as readers:
            if read_json(readers)["connected"] != clients:
                raise RuntimeError("not all clients are connected")
            yield Pair(child, readers, clients), before


def measure_cost(server: str, clients: int, loads: Sequence[Load], *, deflate: bool) -> list[dict[str, Any]]:
    """Return what the rounds cost one server."""
    options = ["--deflate"] if deflate else []
    rows = []
    with open_pair([*SERVERS[server], *options], clients, *options) as (pair, before):
        for load in loads:
            row: dict[str, Any] = {"part": "deflate" if deflate else "cost", "server": server, "clients": clients}
            row |= {"messages": load.label, **pair.measure(load)}
            row["kb_per_client"] = (resident_bytes([pair.server.pid]) - before) / clients / 1000
            rows.append(row)
            print(f"# {json.dumps(row)}", file=sys.stderr, flush=True)
    return rows


def measure_stalled(name: str, clients: int, seconds: float) -> dict[str, Any]:
    """Return what becomes of one server, and of its healthy clients, when a tenth of all read nothing."""
    load = Load(size=_STALLED_SIZE, burst=5, count=int(RATE * seconds))
    with open_pair(STALLED[name], clients, "--stalled", str(clients // 10)) as (pair, before):
        start, in_kernel = resident_bytes([pair.server.pid]), socket_bytes()
        figures, memory = pair.publish(load, seconds + 30)
        in_kernel = socket_bytes() - in_kernel
        stdin = pair.crowd.stdin
        if stdin is not None:
            stdin.close()
        woken = read_json(pair.crowd)
    row = {"part": "stalled", "server": name, "clients": clients, "seconds": seconds}
    row |= {"connected_mb": (start - before) / 1e6, "grown_mb": (max(memory) - start) / 1e6}
    row["kernel_mb"] = in_kernel / 1e6
    row |= {"got_percent": 100 * figures["least"] / load.count, "delay_p99_ms": figures["delay_p99_ms"]}
    row["stalled_see"] = ", ".join(f"{why} ({count})" for why, count in sorted(woken["said"].items()))
    row["outdated"] = woken["outdated"]
    print(f"# {json.dumps(row)}", file=sys.stderr, flush=True)
    return row


def least(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of equal rounds the one with the least processor time."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("part", "clients", "messages", "server"))
        if key not in found or row["cpu_us"] < found[key]["cpu_us"]:
            found[key] = row
    return list(found.values())


def run(
    *,
    counts: Sequence[int] = (100, 1000, 5000),
    many: int = 10_000,
    repeat: int = 2,
    count: int = 60,
    stalled: int = 1000,
    stalled_s: float = 60.0,
    deflated: int = 1000,
) -> list[dict[str, Any]]:
    """Measure all three, and return the figures; 0 clients leave a part out."""
    raise_open_files()
    loads = [Load(size=size, burst=burst, count=count) for size, burst in ((100, 1), (100, 5), (1000, 5))]
    rows: list[dict[str, Any]] = []
    for _ in range(repeat):
        for clients in counts:
            for server in SERVERS:
                rows += measure_cost(server, clients, loads, deflate=False)
        for server in ("flowctl", *OTHERS) if deflated else ():
            rows += measure_cost(server, deflated, loads[1:], deflate=True)
    if many:
        rows += measure_cost("flowctl", many, loads, deflate=False)
    rows = least(rows)
    return rows + ([measure_stalled(name, stalled, stalled_s) for name in STALLED] if stalled else [])


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each number of clients and kind of message, with a column for each server."""
    found: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["clients"], row["messages"]), {})[row["server"]] = row["cpu_us"]
    lines = []
    for (clients, messages), cpu_us in found.items():
        if better := min((cpu_us[name] for name in OTHERS if name in cpu_us), default=None):
            line: dict[str, Any] = {"clients": clients, "messages": messages}
            line |= {f"{name}, us": cpu_us.get(name) for name in SERVERS}
            ours = ("flowctl", "flowctl 100 ms")
            lines.append(line | {f"{name} : better": cpu_us[name] / better for name in ours if name in cpu_us})
    return lines


def looked_at(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return delay, load, memory and completeness of the rounds of large messages, five at once."""
    heads = {"clients": "clients", "server": "server", "cpu_us": "us", "core_percent": "core %"}
    heads |= {"delay_p50_ms": "p50 ms", "delay_p99_ms": "p99 ms", "kb_per_client": "kB per client"}
    heads |= {"bytes_per_message": "bytes per message", "complete_percent": "clients with every message, %"}
    chosen = [row for row in rows if row["messages"] == "1000 bytes, 5 at once"]
    return [{head: row[key] for key, head in heads.items()} for row in sorted(chosen, key=lambda row: row["clients"])]


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Return the tables."""
    del images
    cost, deflated, stalled = ([row for row in rows if row["part"] == name] for name in ("cost", "deflate", "stalled"))
    text = [f"Processor time of the server per client and message:\n\n{table(compared(cost))}"] if cost else []
    for found, how in ((cost, "Not compressed"), (deflated, "All clients negotiate permessage-deflate")):
        if found:
            text.append(f"{how}; 1,000 bytes, five at once:\n\n{table(looked_at(found))}")
    heads = {"server": "server", "connected_mb": "connected, MB", "grown_mb": "grew by, MB"}
    heads |= {"kernel_mb": "kernel's buffers, MB", "got_percent": "healthy ones got, %"}
    heads |= {"delay_p99_ms": "their p99, ms", "stalled_see": "stalled ones see"}
    heads |= {"outdated": "outdated messages when one reads again"}
    if stalled:
        first = stalled[0]
        title = f"{first['clients']:,} clients, a tenth of them reads nothing, {first['seconds']:g} s"
        lines = [{head: row[key] for key, head in heads.items()} for row in stalled]
        text.append(f"{title}; messages of {_STALLED_SIZE:,} bytes:\n\n{table(lines)}")
    return "\n\n".join(text)


QUICK: Final[dict[str, Any]] = {
    "counts": (20,),
    "many": 0,
    "repeat": 1,
    "count": 10,
    "stalled": 20,
    "stalled_s": 1.0,
    "deflated": 0,
}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run what is asked for, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", dest="counts", type=int, nargs="*", default=[100, 1000, 5000])
    for name, default, text in (
        ("many", 0, "flowctl alone with so many clients"),
        ("repeat", 1, "turns of each server"),
        ("count", 60, "messages of a round"),
        ("deflated", 0, "clients that negotiate permessage-deflate"),
        ("stalled", 0, "clients, a tenth of which reads nothing"),
        ("stalled-s", 60, "for so many seconds"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    print(document(run(**vars(parser.parse_args())), Path()))


if __name__ == "__main__":
    main()
