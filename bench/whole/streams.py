"""Many small streams: what a stream of 600 kbit/s with one viewer costs flowctl and nginx-rtmp, which take turns.

Publishers are in one process and viewers in another, so that the server's processor time, user and system, is its own.
The delay of a frame is from its stamp to its arrival as the kernel noted it, of all viewers, or of 50 of them. Beside
other work on the machine processor time is fairly sound and delays are not: what counts is the ratio of lines that
were measured one after the other. ``python bench streams`` measures for some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from compare import rivals
from kit import processes
from kit.machine import PROGRAMS
from kit.tables import print_rows, table

STREAMS: Final = (1, 50, 200)
SERVERS: Final = ("flowctl", "nginx-rtmp")
_MEASURED: Final = 50
"""Viewers that measure, at most; the others of 200 are a crowd that discards what it reads."""
_FPS: Final = 30
_PRIORITY: Final = 1
"""Of server, publishers and viewers alike, in real time, where the system allows it (sched(7)): what else runs on the
machine must not decide when a frame is sent. All of them together fill less than a core."""
_CONNECT_S: Final = 0.02
"""Head start per stream: for the publishers to connect, and for the server's caches to fill."""

QUICK: Final[dict[str, Any]] = {"streams": (2,), "servers": ("flowctl",), "repeat": 1, "window_s": 1.0, "settle_s": 0.5}
"""Arguments of `run` for a look at whether it works."""


def measure(name: str, streams: int, *, bit_rate: int, window_s: float, settle_s: float) -> dict[str, Any]:
    """Run one server with so many streams of one viewer each, and return what it cost."""
    connect_s = 1.0 + streams * _CONNECT_S
    duration_s = connect_s + settle_s + window_s + 30.0
    settings = rivals.Settings(viewers=2 * streams, bit_rate=bit_rate, duration_s=duration_s)
    with rivals.CONTENDERS[name].start(settings) as running:
        url = f"rtmp://127.0.0.1:{running.port}/live/bench"
        publish = [
            sys.executable,
            str(PROGRAMS / "publishers.py"),
            url,
            "--streams",
            str(streams),
            "--fps",
            str(_FPS),
        ]
        publish += ["--bit-rate", str(bit_rate), "--duration", str(duration_s)]
        with processes.process(publish, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as publishers:
            time.sleep(connect_s + settle_s)
            figures = _watch(running, url, streams, window_s, publishers.pid)
    return {"server": name, "streams": streams, **figures}


def _watch(running: rivals.Running, url: str, streams: int, window_s: float, publishers: int) -> dict[str, Any]:
    """Send one viewer to each stream and measure the server meanwhile."""
    measured = min(streams, _MEASURED)
    reader = [sys.executable, "-m", "compare.reader", url, "--viewers", str(measured), "--streams", str(streams)]
    crowd = [sys.executable, str(PROGRAMS / "crowd.py"), "--port", str(running.port), "--streams", str(streams)]
    crowd += ["--viewers", str(streams - measured), "--measure-every", str(streams)]
    with contextlib.ExitStack() as stack:
        viewers = []
        for command in [reader, crowd] if streams > measured else [reader]:
            command += ["--window", str(window_s)]
            started = processes.process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            viewers.append(stack.enter_context(started))
            processes.read_json(viewers[-1])
        for child in viewers:
            processes.tell(child, "go")
        cpu, publishing, idle = (
            processes.cpu_seconds(running.pids),
            processes.cpu_seconds([publishers]),
            processes.idle_seconds(),
        )
        began = time.monotonic()
        time.sleep(window_s - min(0.5, window_s / 4))
        used, took = processes.cpu_seconds(running.pids) - cpu, time.monotonic() - began
        publishing, idle = processes.cpu_seconds([publishers]) - publishing, processes.idle_seconds() - idle
        read = processes.read_json(viewers[0])
    delivered = read["frames"] / (measured * window_s * _FPS)
    if not delivered:
        raise RuntimeError("no frame came")
    return {
        # Where the publishers were kept from sending, less was carried: the cost is that of a second of media.
        "cpu_ms_per_stream_s": used / took / streams / delivered * 1000,
        "delivered_share": delivered,
        "server_share": used / took,
        "delay_p50_ms": read["delay_p50_ms"],
        "delay_p99_ms": read["delay_p99_ms"],
        "frames": read["frames"],
        "missing": read["missing"],
        "lost": read["lost"],
        "lag_p99_ms": read["lag_p99_ms"],
        "publishers_share": publishing / took,
        "idle_share": idle / took / (os.cpu_count() or 1),
    }


def run(
    *,
    streams: tuple[int, ...] = STREAMS,
    servers: tuple[str, ...] = SERVERS,
    repeat: int = 3,
    bit_rate: int = 600_000,
    window_s: float = 6.0,
    settle_s: float = 2.5,
) -> list[dict[str, Any]]:
    """Measure, servers in turn, and return the medians with each server's cost over that of nginx-rtmp beside it."""
    processes.raise_open_files()
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    present = [name for name in servers if not rivals.CONTENDERS[name].absent()]
    rows = []
    for count in streams:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in present}
        for repetition in range(repeat):
            for name in present if repetition % 2 == 0 else present[::-1]:
                figures = measure(name, count, bit_rate=bit_rate, window_s=window_s, settle_s=settle_s)
                found[name].append(figures)
                print(f"# {figures}", file=sys.stderr, flush=True)
        rows += [_merged(found[name], found.get("nginx-rtmp")) for name in present]
    return rows


def _merged(figures: list[dict[str, Any]], beside: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return one row for the repetitions: medians, and the largest of what must not vanish in one."""
    row: dict[str, Any] = {}
    for key, value in figures[0].items():
        values = [figure[key] for figure in figures if figure[key] is not None]
        merge = max if key in ("missing", "lost") else statistics.median
        row[key] = value if isinstance(value, str) else merge(values) if values else None
    ratios = [
        ours["cpu_ms_per_stream_s"] / theirs["cpu_ms_per_stream_s"]
        for ours, theirs in zip(figures, beside or [], strict=False)
    ]
    return {**row, "times_nginx_rtmp": statistics.median(ratios) if ratios else None}


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the columns and words of the table."""
    return [
        {
            "server": row["server"],
            "streams": row["streams"],
            "ms per stream and s": row["cpu_ms_per_stream_s"],
            "x nginx-rtmp": row["times_nginx_rtmp"],
            "core percent": row["server_share"] * 100,
            "delay p50 ms": row["delay_p50_ms"],
            "delay p99 ms": row["delay_p99_ms"],
            "reader's lag p99 ms": row["lag_p99_ms"],
            "delivered percent": row["delivered_share"] * 100,
            "missing": row["missing"],
            "idle percent": row["idle_share"] * 100,
        }
        for row in rows
    ]


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Return the part of the document: the table."""
    del images
    versions = rivals.versions()
    beside = f"\n\nCompared with nginx-rtmp {versions['nginx-rtmp']}, one worker." if "nginx-rtmp" in versions else ""
    return table(shown(rows)) + beside


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--only", action="append", choices=list(rivals.CONTENDERS), help="server; repeatable")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--bit-rate", type=int, default=600_000)
    parser.add_argument("--window", type=float, default=6.0, help="measured seconds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = run(
        streams=tuple(arguments.streams),
        servers=tuple(arguments.only or SERVERS),
        repeat=arguments.repeat,
        bit_rate=arguments.bit_rate,
        window_s=arguments.window,
    )
    if arguments.json:
        print_rows(rows, as_json=True)
    else:
        print(table(shown(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
