"""Soak: minutes of a thousand viewers that come, go, lag and stall; is what the server holds flat?

``python bench soak --minutes 10`` starts the live server, sends ``flowctl load`` to it, and samples the server
every second: resident memory, descriptors, queued bytes, caches, Python's memory. A straight line is put through the
second half of each figure; it is flat if it does not surely rise by more than the stated slope. Exit status 1: it rose.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from flowctl.charts import page
from flowctl.charts.pictures import COLOURS, Lines, Series, highest, thin
from kit import charts, processes
from kit.machine import PROGRAMS, RESULTS
from kit.tables import table
from kit.trend import trend

CHART: Final = "soak.svg"
SAMPLES: Final = RESULTS / "soak-samples.json"
PROFILES: Final = ("healthy:80%", "churn@5s:10%", "slow@300k:5%", "pause@3s/6s:3%", "stall@2s:2%")
"""Of a stream of 600 kbit/s: half of it is what the slow ones take."""
_RAMP_PER_S: Final = 200.0
_LOAD_END_S: Final = 60.0
"""For the load tester to close its viewers and write its summary."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that is watched.

    Args:
        least: rise per minute that is allowed in any case, in the unit of the table.
    """

    key: str
    name: str
    scale: float
    share: float
    least: float


FIGURES: Final = (
    Figure(key="rss_bytes", name="resident memory, MB", scale=1e6, share=0.002, least=0.1),
    Figure(key="fds", name="descriptors", scale=1, share=0.005, least=1.0),
    Figure(key="queue_bytes", name="queued for all viewers, MB", scale=1e6, share=0.02, least=0.5),
    Figure(key="cache_bytes", name="GOP cache, MB", scale=1e6, share=0.02, least=0.05),
    Figure(key="blocks", name="Python memory blocks, thousands", scale=1e3, share=0.005, least=0.5),
)
"""Memory: a fifth of a percent per minute is about the least that five minutes of swinging figures can tell from none.
What is queued swings with the slow viewers, so it is given more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A soak.

    Args:
        every_s: time between two samples.
    """

    seconds: float = 600.0
    viewers: int = 1000
    bit_rate: int = 600_000
    every_s: float = 1.0
    profiles: tuple[str, ...] = PROFILES


SHORT: Final = Settings(seconds=6.0, viewers=40, every_s=0.5)


@contextlib.contextmanager
def crowd(port: int, settings: Settings, summary: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the load tester for the time of the block; it publishes as well, and writes its summary into a file."""
    ramp_s = min(settings.viewers / _RAMP_PER_S, settings.seconds / 4)
    command = [sys.executable, "-m", "flowctl", "load", f"rtmp://127.0.0.1:{port}/live/soak", "--publishers", "1"]
    command += ["--viewers", str(settings.viewers), "--bit-rate", str(settings.bit_rate)]
    command += [item for profile in settings.profiles for item in ("--profile", profile)]
    command += ["--ramp", f"{ramp_s:g}s", "--duration", f"{max(settings.seconds - ramp_s, 1):g}s", "--json"]
    with summary.open("w", encoding="utf-8") as out, processes.process(command, stdout=out) as child:
        yield child


def soak(settings: Settings) -> dict[str, Any]:
    """Run a soak."""
    processes.raise_open_files()
    RESULTS.mkdir(exist_ok=True)
    summary = RESULTS / "soak-load.json"
    command = [sys.executable, str(PROGRAMS / "live_server.py")]
    with processes.process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        port = int(processes.read_json(server)["port"])
        with crowd(port, settings, summary) as child:
            samples = list(_samples(server, child, settings))
            try:
                status = child.wait(_LOAD_END_S)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"the load tester is not done {_LOAD_END_S:g} s after its time") from None
    if status:
        raise RuntimeError(f"flowctl load ended with status {status}")
    return {"samples": samples, "load": json.loads(summary.read_text("utf-8"))}


def _samples(
    server: subprocess.Popen[str], child: subprocess.Popen[str], settings: Settings
) -> Iterator[dict[str, Any]]:
    """Sample the server until the time is over; say once a minute how it is."""
    began = time.monotonic()
    number = 0
    while (due := (number + 1) * settings.every_s) <= settings.seconds:
        time.sleep(max(0.0, began + due - time.monotonic()))
        if child.poll() is not None:
            return
        asked = time.monotonic()
        processes.tell(server, "all")
        figures = processes.read_json(server)
        sample = {
            **figures,
            "at_s": round(asked - began, 3),
            "asking_s": round(time.monotonic() - asked, 4),
            "rss_bytes": processes.resident_bytes([server.pid]),
            "fds": processes.descriptors(server.pid),
            "cpu_s": processes.cpu_seconds([server.pid]),
        }
        yield sample
        number += 1
        if number % max(round(60 / settings.every_s), 1) == 0:
            text = ", ".join(f"{figure.name} {sample[figure.key] / figure.scale:.1f}" for figure in FIGURES)
            print(f"# {sample['at_s']:.0f} s, {sample['connections']} connections: {text}", file=sys.stderr, flush=True)


def rows_of(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per figure: its mean and slope in the second half, the slope allowed, and whether it is flat."""
    times_s = [sample["at_s"] for sample in samples]
    rows = []
    for figure in FIGURES:
        values = [sample[figure.key] / figure.scale for sample in samples]
        line = trend(times_s, values, share=figure.share, least=figure.least)
        rows.append(
            {
                "figure": figure.name,
                "mean": line.mean,
                "largest": max(values),
                "slope per minute": line.slope_per_min,
                "its error": line.error_per_min,
                "allowed": line.allowed_per_min,
                "flat": "yes" if line.flat else "NO",
            }
        )
    return rows


QUICK: Final[dict[str, Any]] = {"quick": True}
"""Arguments of `run` for a look at whether it works."""


def run(settings: Settings | None = None, *, quick: bool = False) -> list[dict[str, Any]]:
    """Run a soak and return whether each figure is flat."""
    found = soak(settings or (SHORT if quick else Settings()))
    if not quick:
        SAMPLES.write_text(json.dumps(found) + "\n", "utf-8")
    return rows_of(found["samples"])


def document(rows: list[dict[str, Any]], images: Path, source: Path = SAMPLES) -> str:
    """Draw the plot of the last samples, and return the part of the document: plot and table."""
    found = json.loads(source.read_text("utf-8"))
    alt = "Connections, resident memory, descriptors, queued bytes and memory blocks of the server over time"
    chart(found["samples"], images / CHART, alt)
    minutes = found["samples"][-1]["at_s"] / 60
    healthy = found["load"]["profiles"]["healthy"]
    closed = found["samples"][-1]["closed"]
    lines = [f"![{alt}](images/{CHART})", "", table(rows), ""]
    lines.append(f"{minutes:.0f} minutes; mean, slope and its standard error are of the second half.")
    lines.append(
        f"The {healthy['connections']:,} healthy viewers missed {healthy['missing']:,.0f} frames; "
        f"99 % of their frames came within {healthy['p99_ms']:.0f} ms."
    )
    if closed:
        reasons = ", ".join(
            f"{count:,} {reason}" for reason, count in sorted(closed.items(), key=lambda item: -item[1])
        )
        lines.append(f"Connections that ended meanwhile: {reasons}.")
    return "\n".join(lines)


def chart(samples: Sequence[dict[str, Any]], path: Path, alt: str) -> None:
    """Draw connections and every figure over time, one above the other."""
    panels = [("connections", [sample["connections"] for sample in samples])]
    panels += [(figure.name, [sample[figure.key] / figure.scale for sample in samples]) for figure in FIGURES]
    lines = []
    for place, (name, values) in enumerate(panels):
        points = thin([(sample["at_s"] / 60, value) for sample, value in zip(samples, values, strict=True)], highest)
        lines.append(
            Lines(
                name=f"soak-{place}",
                title=name,
                description=f"{name}: {values[0]:g} at first, {values[-1]:g} at last",
                series=[Series(name, points, place % COLOURS + 1)],
                x_label="minutes",
                y_label="",
            )
        )
    charts.save([page.Figure(item) for item in lines], path, alt)


def main() -> int:
    """Run, print, and say by the exit status whether all was flat."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--viewers", type=int, default=1000)
    parser.add_argument("--bit-rate", type=int, default=600_000)
    parser.add_argument("--profile", action="append", help="as in flowctl load; repeatable")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the samples")
    arguments = parser.parse_args()
    settings = Settings(
        seconds=arguments.minutes * 60,
        viewers=arguments.viewers,
        bit_rate=arguments.bit_rate,
        profiles=tuple(arguments.profile or PROFILES),
        every_s=1.0 if arguments.minutes >= 1 else 0.5,
    )
    found = soak(settings)
    SAMPLES.write_text(json.dumps(found) + "\n", "utf-8")
    rows = rows_of(found["samples"])
    if arguments.plot:
        chart(found["samples"], arguments.plot, "samples of a soak")
    print(table(rows))
    return 0 if all(row["flat"] == "yes" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
