"""What the flight recorder costs: processor time of the live server per recorded viewer and second, and bytes of disk.

A recorded viewer is served by itself, from a log of its own, and each call and answer is a row. So its cost is set
beside that of the same viewers without: no records at all; events and samples; and these with a flight of every
viewer, or of one in ten. The same publisher and crowd as in `whole/fanout.py`, the kinds in turn.
``python bench flight --viewers 200``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from kit.machine import PROGRAMS
from kit.processes import process, raise_open_files, read_json, resident_bytes
from kit.tables import print_rows
from whole.fanout import watch

KINDS: Final[dict[str, float | None]] = {
    "no records": None,
    "events and samples": 0.0,
    "and flights of 10 %": 0.1,
    "and flights of all": 1.0,
}
"""What is recorded, and the share of the viewers that has a flight. None: no events either."""


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one kind once and return its figures."""
    share = KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flowctl", "--log-level", "error", "serve", "live", "--port", "0", "--json"]
        command += ["--per-address", "0", "--new-per-address", "0"]
        if share is not None:
            command += ["--events", folder, "--flights", str(share), "--set", "flights_at_once=100000"]
        with process(command, stdout=subprocess.PIPE) as child:
            port = int(read_json(child)["port"])
            base = resident_bytes([child.pid])
            publish = [sys.executable, str(PROGRAMS / "publisher.py"), f"rtmp://127.0.0.1:{port}/live/bench"]
            publish += ["--bit-rate", str(arguments.bit_rate), "--duration", str(arguments.window + 120)]
            began = time.monotonic()
            with process(publish, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
                time.sleep(1.0)
                figures = watch(port, [child.pid], base, arguments, [])
        seconds = time.monotonic() - began
        sizes = [path.stat().st_size for path in Path(folder).glob("flight/**/*.parquet")]
        recorded = arguments.viewers * (share or 0.0)
        figures["flight_bytes_per_viewer_s"] = sum(sizes) / recorded / seconds if recorded else None
        return {"name": name, **figures}


def run(arguments: argparse.Namespace | None = None) -> list[dict[str, Any]]:
    """Run all kinds in turn, several times; return the medians, and the cost of a flight beside that of the records."""
    arguments = arguments or parse([])
    raise_open_files()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in KINDS}
    for repetition in range(arguments.repeat):
        for name in list(KINDS)[:: -1 if repetition % 2 else 1]:  # there and back, against a drift of the machine
            figures = measure(name, arguments)
            results[name].append(figures)
            print(f"# {repetition + 1}/{arguments.repeat} {json.dumps(figures)}", file=sys.stderr, flush=True)
    rows = []
    base = statistics.median(figures["cpu_us_per_viewer_s"] for figures in results["events and samples"])
    for name, found in results.items():
        used = statistics.median(figures["cpu_us_per_viewer_s"] for figures in found)
        share = KINDS[name]
        row: dict[str, Any] = {"records": name, "viewers": arguments.viewers, "bit_rate": arguments.bit_rate}
        row["cpu_us_per_viewer_s"] = round(used, 1)
        row["flight_us_per_recorded_viewer_s"] = round((used - base) / share, 1) if share else None
        for key in ("delay_p99_ms", "memory_kb_per_viewer", "missing", "lost", "flight_bytes_per_viewer_s"):
            values = [figures[key] for figures in found if figures[key] is not None]
            row[key] = round(statistics.median(values), 1) if values else None
        rows.append(row)
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument("--bit-rate", type=int, default=2_500_000)
    parser.add_argument("--window", type=float, default=12.0, help="measured seconds per run")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


QUICK: Final[dict[str, Any]] = {"arguments": parse(["--viewers", "20", "--window", "1", "--repeat", "1"])}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    arguments = parse()
    rows = run(arguments)
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
