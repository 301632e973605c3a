"""Laptop: `flowctl analyze all` of a day, on DuckDB and on Spark, as cold processes: the first run, and one again.

A day is what ``tests/kits/synth`` makes of 210,000 closes and events: 140,008 sessions, 509,599 records, and with
``--samples-s 60`` 1,172,052 samples beside (their viewers in trouble are tried by the what-if, which takes most of the
time). Other sizes say where Spark overtakes. Time is that of the process from its start to its end, Java and all;
processor time and memory are of the process and those that it began.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kit.machine import HERE
from kit.processes import environment
from kit.tables import table

DAY: Final = "210k"
TIMEOUT_S: Final = 3600.0
QUICK: Final[dict[str, Any]] = {"events": ("2k",), "sampled": ()}
"""Arguments of `run` for a look at whether it works."""


def run(
    events: Sequence[str] = (DAY, "2M"), sampled: Sequence[str] = (DAY,), engines: Sequence[str] = ("duckdb", "spark")
) -> list[dict[str, Any]]:
    """Return a row per day, engine and run."""
    rows = []
    days = [(count, ()) for count in events] + [(count, ("--samples-s", "60")) for count in sampled]
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        for number, (count, more) in enumerate(days):
            records = Path(folder) / f"day{number}"
            make(records, "--events", count, *more)
            size = sum(path.stat().st_size for path in records.rglob("*.parquet"))
            for engine in engines:
                out = Path(folder) / f"{engine}{number}"
                for which in ("first", "again"):
                    done = analyze("all", records, "--out", out, "--engine", engine)
                    jobs = json.loads(done.pop("shown"))["jobs"]
                    told = {"sessions": jobs["sessions"]["summary"]["sessions"], "MB": round(size / 1e6)}
                    rows.append({**told, "samples": bool(more), "engine": engine, "run": which, **done})
                shutil.rmtree(out)
            shutil.rmtree(records)
    return rows


def make(*words: object) -> None:
    """Make records."""
    path = {"PYTHONPATH": os.pathsep.join([str(HERE.parent / "tests" / "kits"), environment().get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "synth", *map(str, words)]
    subprocess.run(command, check=True, env=environment() | path, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)


def analyze(*words: object) -> dict[str, Any]:
    """Run a command of ``flowctl analyze``; return what it took."""
    command = [sys.executable, "-m", "flowctl", "analyze", *map(str, words), "--json"]
    measured = [sys.executable, __file__, "--child", *command]
    done = subprocess.run(measured, capture_output=True, text=True, check=False, env=environment(), timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[3:])}: {done.stderr[-400:]}")
    shown, _, figures = done.stdout.rstrip().rpartition("\n")
    return {**json.loads(figures), "shown": shown}


def child(command: Sequence[str]) -> int:
    """Run a command, and write a line of what it took behind its output."""
    begun = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = {"wall, s": round(time.monotonic() - begun, 2), "processor, s": round(used.ru_utime + used.ru_stime, 2)}
    print(json.dumps(took | {"largest process, MB": used.ru_maxrss >> 10}))
    return status


def main() -> None:
    """Run and print."""
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", nargs="*", default=[DAY], help="days without samples, like 210k 2M")
    parser.add_argument("--sampled", nargs="*", default=[], help="days with samples")
    parser.add_argument("--engine", nargs="*", default=["duckdb", "spark"])
    given = parser.parse_args()
    print(table(run(given.events, given.sampled, given.engine)))


if __name__ == "__main__":
    main()
