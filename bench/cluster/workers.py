"""Workers: what a viewer costs two processes on one port, beside one process.

All are ``flowctl serve live``, and take turns, several times; processor time is user and system time of all of their
processes, the supervisor's too. One publisher, whose stream half of the viewers get by way of another worker. Then many
streams of one viewer each, half of which cross over: what following costs per stream. Frames that viewers miss, and
delays from the stamp to the arrival as the kernel noted it. ``python bench workers`` measures for some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from typing import Any, Final

from compare import measure, rivals
from kit import processes
from kit.tables import print_rows, table
from whole import streams

ONE: Final = "one process"
SERVERS: Final = (ONE, "two workers")
ON_REQUEST: Final = ("two groups",)
"""One process with two poll groups, which share the interpreter's lock."""
VIEWERS: Final = (1000, 3000)
STREAMS: Final = 50
_PRIORITY: Final = 1
"""Of all processes alike, in real time, where the system allows it: what else runs must not decide when one has a
turn."""

QUICK: Final[dict[str, Any]] = {
    "viewers": (6,),
    "servers": ("two workers",),
    "streams_count": 0,
    "repeat": 1,
    "window_s": 0.8,
    "settle_s": 0.3,
}
"""Arguments of `run` for a look at whether it works."""


def run(
    *,
    viewers: tuple[int, ...] = VIEWERS,
    servers: tuple[str, ...] = SERVERS,
    streams_count: int = STREAMS,
    bit_rate: int = 600_000,
    repeat: int = 2,
    window_s: float = 5.0,
    settle_s: float = 2.5,
) -> list[dict[str, Any]]:
    """Measure, servers in turn; return medians, with each cost over that of one process in the same turn."""
    processes.raise_open_files()
    with contextlib.suppress(OSError):  # inherited by all that is started, see `whole.streams`
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    rows = []
    for count in viewers:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for turn in range(repeat):
            for name in servers if turn % 2 == 0 else servers[::-1]:
                told = rivals.Settings(viewers=count, bit_rate=bit_rate, settle_s=settle_s)
                figures = measure.measure(rivals.CONTENDERS[name], told, window_s=window_s, measured=20)
                found[name].append({**figures, "cost": figures["cpu_us_per_viewer_s"]})
                print(f"# {name}, {count} viewers: {figures}", file=sys.stderr, flush=True)
        rows += [_row(name, f"1 x {count}", figures, found) for name, figures in found.items()]
    if streams_count:
        found = {name: [] for name in servers}
        for turn in range(repeat):
            for name in servers if turn % 2 == 0 else servers[::-1]:
                figures = streams.measure(name, streams_count, bit_rate=bit_rate, window_s=window_s, settle_s=settle_s)
                figures |= {"cost": figures["cpu_ms_per_stream_s"] * 1000, "doubts": []}
                found[name].append(figures)
                print(f"# {figures}", file=sys.stderr, flush=True)
        rows += [_row(name, f"{streams_count} x 1", figures, found) for name, figures in found.items()]
    return rows


def _row(name: str, load: str, figures: list[dict[str, Any]], found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of one server's turns, the most of what must not vanish in one, and ratios turn by turn."""
    ratios = [ours["cost"] / one["cost"] for ours, one in zip(figures, found.get(ONE, []), strict=False)]
    middle = {
        name: statistics.median(item[name] for item in figures) for name in ("cost", "delay_p50_ms", "idle_share")
    }
    return {
        "server": name,
        "streams_x_viewers": load,
        "us_per_viewer_and_s": middle["cost"],
        "times_one_process": statistics.median(ratios) if ratios else None,
        "delay_p50_ms": middle["delay_p50_ms"],
        "delay_p99_ms": statistics.median(item["delay_p99_ms"] for item in figures),
        "frames_missing": max(item["missing"] for item in figures),
        "viewers_lost": max(item["lost"] for item in figures),
        "idle_share": middle["idle_share"],
        "doubts": "; ".join(sorted({doubt for item in figures for doubt in item["doubts"]})),
    }


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the columns and words of the table."""
    return [
        {
            "server": row["server"],
            "streams x viewers": row["streams_x_viewers"],
            "us per viewer and s": row["us_per_viewer_and_s"],
            "x one process": row["times_one_process"],
            "delay p50 ms": row["delay_p50_ms"],
            "delay p99 ms": row["delay_p99_ms"],
            "frames missing": row["frames_missing"],
            "viewers lost": row["viewers_lost"],
            "idle percent": row["idle_share"] * 100,
            "what was full": row["doubts"],
        }
        for row in rows
    ]


def document(rows: list[dict[str, Any]], images: Any) -> str:
    """Return the part of the document: the table."""
    del images
    return table(shown(rows))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--viewers", type=int, nargs="*", default=list(VIEWERS))
    parser.add_argument("--streams", type=int, default=STREAMS, help="streams of one viewer each; 0: none")
    parser.add_argument("--only", action="append", choices=SERVERS + ON_REQUEST, help="server; repeatable")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--bit-rate", type=int, default=600_000)
    parser.add_argument("--window", type=float, default=5.0, help="measured seconds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = run(
        viewers=tuple(arguments.viewers),
        servers=tuple(arguments.only or SERVERS),
        streams_count=arguments.streams,
        bit_rate=arguments.bit_rate,
        repeat=arguments.repeat,
        window_s=arguments.window,
    )
    if arguments.json:
        print_rows(rows, as_json=True)
    else:
        print(table(shown(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
