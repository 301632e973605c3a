"""RPC: requests per second, latency, growth with connections and a flood, beside zmq.asyncio, RPyC and a bare loop.

Run ``python bench rpc``, two to three minutes. Server and client are two processes on loopback. All but RPyC speak the
same frames; **bare** is a loop of pyzmq that waits in ZeroMQ and does nothing else, the ceiling of what Python can do
over it. Contenders take turns in each repetition; medians are shown. Server, client and the threads of ZeroMQ in both
share the machine, so the processor time of the server per request says more than the rate where cores are few.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kit import processes
from kit.machine import HERE
from kit.tables import print_rows, titled

CONTENDERS: Final = {
    "flowctl, async handlers": "async",
    "flowctl, sync handlers": "sync",
    "zmq.asyncio": "zmq.asyncio",
    "RPyC": "rpyc",
    "bare pyzmq": "bare",
}
BESIDE: Final = "zmq.asyncio"
CALLERS: Final = (1, 10, 100)
CONNECTIONS: Final = (10, 100, 1000)
VICTIMS: Final = 10
"""Peers that ask little while another one floods."""
FLOODS: Final = ("requests", "unread", "malformed")
GROWING: Final = ("flowctl, async handlers", "zmq.asyncio")
"""Those that are measured with many connections and in a flood: RPyC has a thread for each."""
CALM: Final = "calm"
ELSEWHERE: Final = "flood at another server"

Key = tuple[str, str, str]


def available() -> dict[str, str]:
    """Return the contenders that can be run here."""
    return {
        name: kind
        for name, kind in CONTENDERS.items()
        if kind != "rpyc" or importlib.util.find_spec("rpyc") is not None
    }


class Places:
    """Addresses for servers: a free port of loopback each, or a file."""

    def __init__(self, folder: str, *, ipc: bool) -> None:
        self._folder = folder
        self._ipc = ipc
        self._count = 0

    def next(self) -> str:
        """Return an address that is free."""
        self._count += 1
        return f"ipc://{self._folder}/{self._count}" if self._ipc else f"tcp://127.0.0.1:{processes.free_port()}"


@contextlib.contextmanager
def program(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run one of the programs of `rpc` for the time of the block."""
    command = [sys.executable, "-m", f"rpc.{name}", *arguments]
    with processes.process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HERE) as child:
        yield child


@contextlib.contextmanager
def server(kind: str, address: str) -> Iterator[subprocess.Popen[str]]:
    """Run a server for the time of the block, which begins when it listens."""
    with program("server", kind, address) as child:
        processes.read_json(child)
        yield child


def ask(child: subprocess.Popen[str], **task: Any) -> dict[str, Any]:
    """Let a program do a task, and return its answer."""
    processes.tell(child, json.dumps(task))
    return processes.read_json(child)


Found = dict[Key, list[dict[str, Any]]]


def measure_calls(name: str, kind: str, places: Places, callers: Sequence[int], window_s: float, found: Found) -> None:
    """Measure one contender with each number of callers."""
    address = places.next()
    with server(kind, address) as serving, program("callers", kind, address, str(serving.pid)) as calling:
        for count in callers:
            answer = ask(calling, callers=count, seconds=window_s)
            found.setdefault(("callers", f"{count:,}", name), []).append(answer)


def measure_growth(name: str, kind: str, places: Places, counts: Sequence[int], window_s: float, found: Found) -> None:
    """Measure one contender with each number of connections, in a fresh server each."""
    for count in counts:
        address = places.next()
        with server(kind, address) as serving, program("peers", address, str(serving.pid)) as peers:
            answer = ask(peers, do="connect", count=count)
            answer |= ask(peers, do="round", seconds=window_s)
            found.setdefault(("connections", f"{count:,}", name), []).append(answer)


def measure_flood(name: str, kind: str, places: Places, floods: Sequence[str], window_s: float, found: Found) -> None:
    """Measure what peers see that ask little, alone and while another one floods."""
    address, other = places.next(), places.next()
    with (
        server(kind, address) as serving,
        server("bare", other),
        program("peers", address, str(serving.pid)) as peers,
    ):
        ask(peers, do="connect", count=VICTIMS)
        for flood in (CALM, ELSEWHERE, *floods):
            with contextlib.ExitStack() as stack:
                if flood != CALM:
                    target = other if flood == ELSEWHERE else address
                    what = "requests" if flood == ELSEWHERE else flood
                    processes.read_json(stack.enter_context(program("flood", what, target)))
                answer = ask(peers, do="calm", seconds=window_s)
            found.setdefault(("flood", flood, name), []).append(answer)


def run(
    *,
    repeats: int = 3,
    window_s: float = 1.0,
    callers: Sequence[int] = CALLERS,
    connections: Sequence[int] = CONNECTIONS,
    floods: Sequence[str] = FLOODS,
    names: Sequence[str] | None = None,
    ipc: bool = False,
) -> list[dict[str, Any]]:
    """Measure all contenders in turn, several times."""
    processes.raise_open_files()
    contenders = {name: kind for name, kind in available().items() if names is None or name in names}
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        places = Places(folder, ipc=ipc)
        for turn in range(repeats):
            order = list(contenders.items())[:: -1 if turn % 2 else 1]
            for name, kind in order if callers else ():
                measure_calls(name, kind, places, callers, window_s, found)
            for name, kind in order:
                if name in GROWING:
                    measure_growth(name, kind, places, connections, window_s, found)
                    if floods:
                        measure_flood(name, kind, places, floods, 2 * window_s, found)
    return rows_of(found, contenders)


def median(answers: list[dict[str, Any]], key: str) -> float | None:
    """Return the median of a figure over the repetitions; None where there is none."""
    values = [answer[key] for answer in answers if answer.get(key) is not None]
    return statistics.median(values) if values else None


def ratio(value: float | None, beside: float | None) -> float | None:
    """Return one figure to another; None where one is missing."""
    return round(value / beside, 2) if value is not None and beside else None


def rows_of(found: Found, contenders: dict[str, str]) -> list[dict[str, Any]]:
    """Return the medians as rows, with their ratios."""
    rows = []
    places = {name: index for index, name in enumerate(contenders)}
    cases = list(dict.fromkeys((part, case) for part, case, _ in sorted(found, key=lambda key: key[0])))
    for part, case in cases:
        for name in sorted({key[2] for key in found if key[:2] == (part, case)}, key=places.__getitem__):
            answers = found[part, case, name]
            row: dict[str, Any] = {"part": part, "case": case, "server": name}
            row |= {key: median(answers, key) for key in ("per_s", "p50_ms", "p99_ms", "server_us", "client_us")}
            row["kb_each"] = median(answers, "kb_each")
            row["failed"] = max(answer["failed"] for answer in answers)
            row["to_zmq_asyncio"] = ratio(row["per_s"], median(found.get((part, case, BESIDE), []), "per_s"))
            row["p99_to_calm"] = ratio(row["p99_ms"], median(found.get((part, CALM, name), []), "p99_ms"))
            row["p99_to_elsewhere"] = ratio(row["p99_ms"], median(found.get((part, ELSEWHERE, name), []), "p99_ms"))
            rows.append(row)
    return rows


HEADS: Final = {
    "callers": {
        "case": "callers",
        "server": "server",
        "per_s": "requests per s",
        "to_zmq_asyncio": "to zmq.asyncio",
        "p50_ms": "p50 ms",
        "p99_ms": "p99 ms",
        "server_us": "server us each",
        "client_us": "client us each",
        "failed": "failed",
    },
    "connections": {
        "case": "connections",
        "server": "server",
        "per_s": "requests per s",
        "p50_ms": "p50 ms",
        "p99_ms": "p99 ms",
        "server_us": "server us each",
        "kb_each": "server kB per connection",
        "failed": "failed",
    },
    "flood": {
        "case": "flood",
        "server": "server",
        "p50_ms": "others' p50 ms",
        "p99_ms": "others' p99 ms",
        "p99_to_calm": "p99 to calm",
        "p99_to_elsewhere": "to elsewhere",
        "failed": "failed",
    },
}
TITLES: Final = {
    "callers": "Concurrent callers",
    "connections": "Connections, 10 requests under way",
    "flood": f"{VICTIMS} others that ask little while one peer floods",
}


def document(rows: list[dict[str, Any]], _images: object = None) -> str:
    """Return the part of the document: a table for each of what is measured."""
    return titled(TITLES, HEADS, rows)


QUICK: Final[dict[str, Any]] = {"repeats": 1, "window_s": 0.2, "connections": (10, 100)}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="of everything; medians are shown (default 3)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each measurement (default 1)")
    parser.add_argument("--parts", default=",".join(HEADS), help="which of callers, connections, flood; default: all")
    parser.add_argument("--servers", default=",".join(CONTENDERS.values()), help="which; default: all")
    parser.add_argument("--ipc", action="store_true", help="sockets in a folder instead of TCP on loopback")
    parser.add_argument("--quick", action="store_true", help="some seconds")
    parser.add_argument("--json", action="store_true", help="every row instead of the tables")
    arguments = parser.parse_args()
    options: dict[str, Any] = {"repeats": arguments.repeats, "window_s": arguments.seconds}
    options |= QUICK if arguments.quick else {}
    for part, key in (("callers", "callers"), ("connections", "connections"), ("flood", "floods")):
        if part not in arguments.parts.split(","):
            options[key] = ()
    kinds = arguments.servers.split(",")
    names = [name for name, kind in CONTENDERS.items() if kind in kinds]
    rows = run(names=names, ipc=arguments.ipc, **options)
    if arguments.json:
        print_rows(rows, as_json=True)
    else:
        sys.stdout.write(document(rows) + "\n")


if __name__ == "__main__":
    main()
