"""Runs benchmarks and prints their figures as tables: ``python bench/run.py [NAME ...] [--list]``.

A benchmark is a file ``bench_NAME.py`` beside this one with a function ``run()`` that takes no arguments that must be
given and returns rows: dictionaries with the same keys. Its docstring says what is measured and beside what. All rows
are also written to ``bench/results/NAME.json``, with machine and time, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PREFIX = "bench_"


def names() -> list[str]:
    """Return the names of all benchmarks, sorted."""
    return sorted(path.stem.removeprefix(PREFIX) for path in HERE.glob(f"{PREFIX}*.py"))


def load(name: str) -> ModuleType:
    """Import a benchmark.

    Raises:
        SystemExit: there is none of that name, or it has no `run`.
    """
    if name not in names():
        raise SystemExit(f"error: no benchmark {name!r}\nhint: there are {', '.join(names())}")
    module = importlib.import_module(PREFIX + name)
    if not callable(getattr(module, "run", None)):
        raise SystemExit(f"error: bench/{PREFIX}{name}.py has no run()")
    return module


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text("utf-8").splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit that is measured, with a plus sign where files were changed; empty outside of a checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def shown(value: object) -> str:
    """Return a value for a table: three significant digits are all that such figures are good for."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table, which also reads well on a terminal; numbers to the right."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[shown(row.get(head, "")) for head in heads] for row in rows]
    widths = [max(len(line[index]) for line in [heads, *cells]) for index in range(len(heads))]
    numeric = [all(isinstance(row.get(head, 0), int | float) for row in rows) for head in heads]

    def line(parts: list[str]) -> str:
        padded = [
            part.rjust(width) if right else part.ljust(width)
            for part, width, right in zip(parts, widths, numeric, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    return "\n".join([line(heads), f"| {' | '.join(rule)} |", *map(line, cells)])


def measure(name: str) -> None:
    """Run one benchmark, print its table, keep its rows."""
    module = load(name)
    first_line = (module.__doc__ or name).strip().splitlines()[0]
    print(f"\n## {name}: {first_line}\n", flush=True)
    begun = time.monotonic()
    rows: list[dict[str, Any]] = module.run()
    print(table(rows))
    print(f"\n({time.monotonic() - begun:.0f} s)", flush=True)
    RESULTS.mkdir(exist_ok=True)
    record = {
        "name": name,
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": rows,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def main() -> int:
    """Run what was asked for; a benchmark that fails does not keep the others from running."""
    parser = argparse.ArgumentParser(description="Run benchmarks and print their figures.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all")
    parser.add_argument("--list", action="store_true", help="list them and end")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(names()))
        return 0
    for name in arguments.names:
        load(name)
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))
    failed = []
    for name in arguments.names or names():
        try:
            measure(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an hour of figures must not be lost to one mistake
            failed.append(name)
            print(f"{name} failed: {error!r}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
