"""Smoothness: a thousand joins at once, key frames of 500 kB, a hundred streams, and what keeps the thread how long.

Each case runs a live server, its publishers and a crowd of viewers on loopback. A *round* brings all viewers of one
stream to one place. It is done in *turns*, between which the thread sees to everything else, so the longest turn is
what others have to wait for, and the longest handler the same for everything the thread does. All of them hold the
time for which the system gave the core to somebody else, the crowd above all.

Where a round takes longer than the flush interval, the next one begins when it ends, and holds more: then the machine
has no more to give, and the delay grows. ``python bench smooth --scale 0.1`` is a look at a tenth of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

from kit.machine import PROGRAMS
from kit.processes import cpu_seconds, process, raise_open_files, read_json, tell
from kit.tables import table

_START_S: Final = 3.0
"""Before the crowd comes, so that the GOP cache holds a whole group."""
_SETTLE_S: Final = 4.0
_BEFORE_END_S: Final = 0.2
_BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Case:
    """One thing that could keep the thread.

    Attributes:
        burst: whether all viewers connect at once, so that their joining is what is looked at.
    """

    name: str
    viewers: int
    publish: tuple[str, ...]
    streams: int = 0
    burst: bool = False


CASES: Final = (
    Case("1000 joins at once, cache of 600 kB", 1000, ("--bit-rate", "2500000"), burst=True),
    Case("key frames of 500 kB", 1000, ("--bit-rate", "4500000", "--key-frame-bytes", "500000")),
    Case("100 streams of 100 viewers", 10_000, ("--bit-rate", "200000"), streams=100),
)


def measure(case: Case, scale: float, window_s: float, groups: int) -> dict[str, Any]:
    """Run one case and return its row."""
    viewers, streams = max(int(case.viewers * scale), 20), max(int(case.streams * scale), 1) if case.streams else 0
    server_command = [sys.executable, str(PROGRAMS / "live_server.py"), "--groups", str(groups)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with process(server_command, **pipes) as server:
        port = int(read_json(server)["port"])
        publish = [sys.executable, str(PROGRAMS / ("publishers.py" if streams else "publisher.py"))]
        publish += [f"rtmp://127.0.0.1:{port}/live/bench", *case.publish, "--duration", str(window_s + 120)]
        publish += ["--streams", str(streams)] if streams else []
        with process(publish, stderr=subprocess.DEVNULL):
            time.sleep(_START_S)
            crowd_command = [sys.executable, str(PROGRAMS / "crowd.py"), "--port", str(port), "--viewers", str(viewers)]
            crowd_command += ["--window", str(window_s), "--settle", str(_SETTLE_S)]
            crowd_command += ["--streams", str(streams)] if streams else []
            crowd_command += ["--burst"] if case.burst else []
            with process(crowd_command, **pipes) as crowd:
                playing = read_json(crowd)["playing"]
                before, cpu = ask(server), cpu_seconds([server.pid])
                tell(crowd, "go")
                time.sleep(window_s - _BEFORE_END_S)  # a fan-out goes with its last viewer
                used_s, after = cpu_seconds([server.pid]) - cpu, ask(server)
                figures = read_json(crowd)
    joined = case.burst  # then the rounds of the joining are what counts, not those after it
    rounds = after["rounds_by_duration"] if joined else _differences(after, before)
    return {
        "case": case.name,
        "viewers": viewers,
        "groups": groups,
        "playing": playing,
        "lost": figures["lost"],
        "missing": figures["missing"],
        "p50_ms": figures["delay_p50_ms"],
        "p99_ms": figures["delay_p99_ms"],
        "core": round(used_s / (after["at_s"] - before["at_s"]), 2),
        "rounds": sum(rounds),
        "over_50_ms": sum(rounds[_BOUNDS_MS.index(50) + 1 :]),
        "longest_round_ms": after["longest_round_s"] * 1000,
        "longest_turn_ms": after["longest_turn_s"] * 1000,
        "longest_handler_ms": after["longest_handler_s"] * 1000,
        "left": after["left"] - (0 if joined else before["left"]),
    }


def ask(server: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the figures of the server's fan-outs."""
    tell(server, "rounds")
    return read_json(server)


def _differences(after: dict[str, Any], before: dict[str, Any]) -> list[int]:
    pairs = zip(after["rounds_by_duration"], before["rounds_by_duration"], strict=True)
    return [now - then for now, then in pairs]


QUICK: Final[dict[str, Any]] = {"quick": True}
"""Arguments of `run` for a look at whether it works."""


def run(*, quick: bool = False, scale: float = 1.0, window_s: float = 8.0, groups: int = 1) -> list[dict[str, Any]]:
    """Run all cases."""
    raise_open_files()
    if quick:
        scale, window_s = 0.02, 2.0
    return [measure(case, scale, window_s, groups) for case in CASES]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the viewers and streams")
    parser.add_argument("--window", type=float, default=8.0, help="measured seconds per case")
    parser.add_argument("--groups", type=int, default=1, help="poll groups of the server")
    parser.add_argument("--case", type=int, help="only this one, counted from 1")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    raise_open_files()
    cases = CASES if arguments.case is None else CASES[arguments.case - 1 : arguments.case]
    rows = []
    for case in cases:
        rows.append(measure(case, arguments.scale, arguments.window, arguments.groups))
        print(f"# {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    print(json.dumps(rows) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
