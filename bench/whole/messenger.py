"""Messenger: acknowledged messages per second between two processes, in memory and durable, beside zmq.asyncio.

Run ``python bench messenger``, a minute. **zmq.asyncio** is a DEALER and a ROUTER as pyzmq has them for asyncio: the
ROUTER answers each message with its number and that is all: no one sends again, nobody knows what was there before.
**durable** has a SQLite file on both sides: a message is on the disk before it is sent, and noted as received on the
disk before it is acknowledged. Contenders take turns in each repetition; medians are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kit import processes
from kit.machine import HERE
from kit.tables import print_rows, titled
from whole.rpc import Found, Places, ask, median, ratio

CONTENDERS: Final = {"flowctl, memory": "memory", "flowctl, durable": "durable", "zmq.asyncio": "zmq.asyncio"}
BESIDE: Final = "zmq.asyncio"
CONNECTIONS: Final = (10, 100, 1000)
PAIR: Final = "two processes"


@contextlib.contextmanager
def program(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run one of the programs of `messenger` for the time of the block."""
    command = [sys.executable, "-m", *words]
    with processes.process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HERE) as child:
        yield child


@contextlib.contextmanager
def server(kind: str, address: str, folder: str) -> Iterator[subprocess.Popen[str]]:
    """Run a server for the time of the block, which begins when it listens; its file is new."""
    with program("messenger.server", kind, address, *store(kind, folder, "server")) as child:
        processes.read_json(child)
        yield child


def store(kind: str, folder: str, name: str) -> list[str]:
    """Return the path of a new file, where a program is to have one."""
    return [str(Path(tempfile.mkdtemp(dir=folder), name))] if kind == "durable" else []


def measure_pair(name: str, kind: str, places: Places, folder: str, window_s: float, found: Found) -> None:
    """Measure one sender and one receiver."""
    address = places.next()
    with (
        server(kind, address, folder) as serving,
        program("messenger.sender", kind, address, str(serving.pid), *store(kind, folder, "sender")) as sending,
    ):
        ask(sending, seconds=window_s / 4)  # to connect, and to learn what the other end understands
        found.setdefault(("pair", PAIR, name), []).append(ask(sending, seconds=window_s))


def measure_growth(
    name: str, kind: str, places: Places, folder: str, counts: Sequence[int], window_s: float, found: Found
) -> None:
    """Measure a receiver with each number of connections, a fresh one each."""
    for count in counts:
        address = places.next()
        with (
            server(kind, address, folder) as serving,
            program("messenger.peers", address, str(serving.pid)) as peers,
        ):
            answer = ask(peers, do="connect", count=count)
            answer |= ask(peers, do="round", seconds=window_s)
            found.setdefault(("connections", f"{count:,}", name), []).append(answer)


def run(
    *, repeats: int = 3, window_s: float = 2.0, connections: Sequence[int] = CONNECTIONS, ipc: bool = False
) -> list[dict[str, Any]]:
    """Measure all contenders in turn, several times."""
    processes.raise_open_files()
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        places = Places(folder, ipc=ipc)
        for turn in range(repeats):
            for name, kind in list(CONTENDERS.items())[:: -1 if turn % 2 else 1]:
                measure_pair(name, kind, places, folder, window_s, found)
                measure_growth(name, kind, places, folder, connections, window_s / 2, found)
    return rows_of(found)


def rows_of(found: Found) -> list[dict[str, Any]]:
    """Return the medians as rows, with their ratios."""
    rows = []
    for part, case in dict.fromkeys((part, case) for part, case, _ in found):
        for name in CONTENDERS:
            answers = found[part, case, name]
            row: dict[str, Any] = {"part": part, "case": case, "server": name}
            row |= {key: median(answers, key) for key in ("per_s", "p50_ms", "p99_ms", "server_us", "client_us")}
            row["kb_each"] = median(answers, "kb_each")
            row["failed"] = max(answer["failed"] for answer in answers)
            row["to_zmq_asyncio"] = ratio(row["per_s"], median(found[part, case, BESIDE], "per_s"))
            rows.append(row)
    return rows


_COMMON: Final = {
    "server": "messenger",
    "per_s": "acknowledged per s",
    "to_zmq_asyncio": "to zmq.asyncio",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "server_us": "receiver us each",
}
HEADS: Final = {
    "pair": {**_COMMON, "client_us": "sender us each", "failed": "failed"},
    "connections": {"case": "connections", **_COMMON, "kb_each": "receiver kB per connection", "failed": "failed"},
}
TITLES: Final = {
    "pair": "One sender, one receiver, 1000 messages of 64 bytes unacknowledged",
    "connections": "Connections of raw sockets, 10 messages unacknowledged in all",
}


def document(rows: list[dict[str, Any]], _images: object = None) -> str:
    """Return the part of the document: a table for each of what is measured."""
    return titled(TITLES, HEADS, rows)


QUICK: Final[dict[str, Any]] = {"repeats": 1, "window_s": 0.4, "connections": (10, 100)}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="of everything; medians are shown (default 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement (default 2)")
    parser.add_argument("--no-growth", action="store_true", help="leave out the numbers of connections")
    parser.add_argument("--ipc", action="store_true", help="sockets in a folder instead of TCP on loopback")
    parser.add_argument("--quick", action="store_true", help="some seconds")
    parser.add_argument("--json", action="store_true", help="every row instead of the tables")
    arguments = parser.parse_args()
    options: dict[str, Any] = {"repeats": arguments.repeats, "window_s": arguments.seconds}
    options |= QUICK if arguments.quick else {}
    if arguments.no_growth:
        options["connections"] = ()
    rows = run(ipc=arguments.ipc, **options)
    if arguments.json:
        print_rows(rows, as_json=True)
    else:
        sys.stdout.write(document(rows) + "\n")


if __name__ == "__main__":
    main()
