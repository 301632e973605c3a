"""Healthy viewers beside slow ones: do they lose anything, does their delay rise, and what does a slow one cost?

A server in a process of its own, and `flowctl load`'s engine: first the healthy viewers alone, then beside as many slow
ones, on lines of 20 to 95 % of the stream's rate, several times in turn. Reported are the frames that the healthy ones
miss, their delay from the publisher's stamp (median and 99th percentile), its rise, and the server's processor time per
viewer: of the healthy ones alone, and of a slow one as what is used beyond that. ``python bench beside``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from typing import Any, Final

from flowctl.load.plan import LoadPlan
from flowctl.load.profiles import parse_crowd
from flowctl.load.results.figures import RunFigures
from flowctl.load.results.result import RunResult
from flowctl.load.run import run_load
from kit import processes
from kit.tables import print_rows

_STREAM: Final = "live/beside"
LINES_PERCENT: Final = (20, 50, 80, 85, 95)
"""What the lines of the slow viewers carry of the stream's rate; as many viewers on each."""


def serve() -> Any:
    """Start a server for the time of a block; it writes one JSON line when it is ready."""
    command = [sys.executable, "-m", "flowctl", "--log-level", "error", "serve", "live", "--port", "0", "--json"]
    command += ["--per-address", "0", "--new-per-address", "0"]
    return processes.process(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def measure(healthy: int, slow: int, bit_rate: int, seconds: float) -> RunResult:
    """Load a fresh server with viewers of both kinds."""
    crowd = [f"healthy:{healthy}"]
    for number, percent in enumerate(LINES_PERCENT):
        count = slow * (number + 1) // len(LINES_PERCENT) - slow * number // len(LINES_PERCENT)
        crowd += [f"slow@{bit_rate * percent // 100_000}k:{count}"] if count else []
    with serve() as server:
        ready = processes.read_json(server)
        plan = LoadPlan(
            url=f"{ready['url']}{_STREAM}",
            profiles=parse_crowd(crowd, healthy + slow),
            publishers=1,
            bit_rate=bit_rate,
            disposable_every=3,
            ramp_s=(healthy + slow) / 100,
            duration_s=seconds,
            spread_addresses=True,
            server_pid=ready["pid"],
        )
        return run_load(plan)


def run(
    healthy: int = 500, slow: int = 500, bit_rate: int = 600_000, seconds: float = 30.0, repeat: int = 3
) -> list[dict[str, Any]]:
    """Measure healthy viewers with and without slow ones in turn; return a row for each, medians of the runs."""
    processes.raise_open_files()
    found: dict[int, list[dict[str, float]]] = {0: [], slow: []}
    for _ in range(repeat):
        for count, runs in found.items():
            figures = RunFigures(measure(healthy, count, bit_rate, seconds))
            names = ("failed", "cut", "missing", "broken_restarts", "p50_ms", "p99_ms")
            values = {name: figures.value(name, "healthy") for name in names} | {"cpu_us": figures.cpu_us_per_viewer_s}
            runs.append({name: float("nan") if value is None else float(value) for name, value in values.items()})
    alone = statistics.median(item["p99_ms"] for item in found[0])
    of_healthy = statistics.median(item["cpu_us"] for item in found[0])
    rows = []
    for count, runs in found.items():
        p99 = statistics.median(item["p99_ms"] for item in runs)
        cost = statistics.median(item["cpu_us"] for item in runs)
        of_slow = (cost * (healthy + count) - of_healthy * healthy) / count if count else None
        rows.append(
            {
                "healthy": healthy,
                "slow": count,
                "missing": max(item["missing"] for item in runs),
                "cut": max(item["cut"] for item in runs),
                "failed": max(item["failed"] for item in runs),
                "p50_ms": round(statistics.median(item["p50_ms"] for item in runs), 1),
                "p99_ms": round(p99, 1),
                "p99_rise_ms": round(p99 - alone, 1),
                "healthy_us_per_s": round(of_healthy),
                "slow_us_per_s": None if of_slow is None else round(of_slow),
                "slow_per_healthy": None if of_slow is None else round(of_slow / of_healthy, 2),
            }
        )
    return rows


QUICK: Final[dict[str, Any]] = {"healthy": 5, "slow": 5, "seconds": 1.5, "repeat": 1}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=int, default=500)
    parser.add_argument("--slow", type=int, default=500)
    parser.add_argument("--bit-rate", type=int, default=600_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = run(arguments.healthy, arguments.slow, arguments.bit_rate, arguments.seconds, arguments.repeat)
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
