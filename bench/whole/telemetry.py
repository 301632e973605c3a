"""What recording costs: processor time of the live server per viewer and second, with records and without.

The same publisher and crowd as in `whole/fanout.py`, on a server of each kind in turn, several times, so that whatever
else the machine does meets all of them alike. Files are really written: to a temporary folder, which is measured and
removed. Two figures tell the cost: the difference between the servers, which holds everything and all noise of the
machine, and the processor time of the two threads that record, which holds neither the records that poll groups queue
nor what threads cost each other. The window begins after the file of the joins was written: joins cost more records
than viewing does, and a window of some seconds would be about them. ``python bench telemetry --viewers 1000``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from kit.machine import PROGRAMS
from kit.processes import cpu_seconds, process, raise_open_files, read_json, resident_bytes, tell
from kit.tables import print_rows, table

KINDS: Final[dict[str, list[str]]] = {
    "no records": [],
    "events": ["--no-samples"],
    "events and samples": [],
}
"""What is recorded, and the options for it."""
_LAST_FILE_S: Final = 12.0
"""A file is finished after 10 s: twice that holds at least one for each table."""
_JOINED_S: Final = 24.0
"""Who plays is told of ten seconds after the join, and then each five minutes: the file of that is due ten seconds
later, and is the last one that is about joins."""


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one kind once and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(PROGRAMS / "live_server.py"), *KINDS[name]]
        command += [] if name == "no records" else ["--events", folder, "--flights", "0"]
        with process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            port = int(read_json(server)["port"])
            base = resident_bytes([server.pid])
            publish = [sys.executable, str(PROGRAMS / "publisher.py"), f"rtmp://127.0.0.1:{port}/live/bench"]
            publish += ["--bit-rate", str(arguments.bit_rate), "--duration", str(arguments.window + 120)]
            with process(publish, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
                time.sleep(1.0)
                figures = watch(server, port, base, arguments)
        files = [path.stat().st_size for path in Path(folder).rglob("*.parquet")]
        load = os.getloadavg()[0]
        return {"name": name, **figures, "files": len(files), "file_bytes": sum(files), "load_average": load}


def watch(server: subprocess.Popen[str], port: int, base: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Send the crowd to the server and measure it meanwhile, all of it and the threads that record."""
    command = [sys.executable, str(PROGRAMS / "crowd.py"), "--port", str(port), "--viewers", str(arguments.viewers)]
    command += ["--window", str(arguments.window), "--settle", str(arguments.settle)]
    with process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
        ready = read_json(crowd)
        tell(crowd, "go")
        cpu, began, before = cpu_seconds([server.pid]), time.monotonic(), recording_s(server)
        time.sleep(max(arguments.window - 0.5, 0.5))
        used, took, after = cpu_seconds([server.pid]) - cpu, time.monotonic() - began, recording_s(server)
        memory = resident_bytes([server.pid]) - base
        figures = read_json(crowd)
    scale = 1e6 / took / max(figures["viewers"], 1)
    return {
        "cpu_us_per_viewer_s": used * scale,
        "threads_us_per_viewer_s": (after - before) * scale,
        "memory_kb_per_viewer": memory / max(figures["viewers"], 1) / 1000,
        "playing": ready["playing"],
        **figures,
    }


def recording_s(server: subprocess.Popen[str]) -> float:
    """Return the processor time that the threads of the recorder and of the sampler have used, in seconds."""
    tell(server, "rounds")
    found = read_json(server)
    return float(found.get("recorder_cpu_s", 0.0)) + float(found.get("sampler_cpu_s", 0.0))


def run(arguments: argparse.Namespace | None = None) -> list[dict[str, Any]]:
    """Run all kinds in turn, several times; return the medians, and the cost beside the server without records."""
    arguments = arguments or parse([])
    raise_open_files()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in KINDS}
    for repetition in range(arguments.repeat):
        for name in list(KINDS)[:: -1 if repetition % 2 else 1]:  # there and back, against a drift of the machine
            figures = measure(name, arguments)
            results[name].append(figures)
            print(f"# {repetition + 1}/{arguments.repeat} {json.dumps(figures)}", file=sys.stderr, flush=True)
    plain = [figures["cpu_us_per_viewer_s"] for figures in results["no records"]]
    rows = []
    for name, found in results.items():
        used = [figures["cpu_us_per_viewer_s"] for figures in found]
        # Of each repetition by itself: its runs are neighbours in time.
        ratios = [mine / without for mine, without in zip(used, plain, strict=True) if without]
        row: dict[str, Any] = {"records": name, "viewers": arguments.viewers, "bit_rate": arguments.bit_rate}
        row["cpu_us_per_viewer_s"] = round(statistics.median(used), 1)
        row["ratio"] = round(statistics.median(ratios), 3) if ratios else None
        row["ratio_least"] = round(min(ratios), 3) if ratios else None
        row["ratio_most"] = round(max(ratios), 3) if ratios else None
        row["cost_us_per_viewer_s"] = round(statistics.median(used) - statistics.median(plain), 1)
        threads = statistics.median(figures["threads_us_per_viewer_s"] for figures in found)
        row["threads_us_per_viewer_s"] = round(threads, 1)
        row["threads_share"] = round(threads / statistics.median(used), 4)
        for key in ("delay_p99_ms", "memory_kb_per_viewer", "files", "file_bytes", "load_average"):
            values = [figures[key] for figures in found if figures[key] is not None]
            row[key] = round(statistics.median(values), 1) if values else None
        for key in ("missing", "lost"):  # of all runs: a median would hide the run that lost some
            row[key] = sum(figures[key] for figures in found)
        rows.append(row)
    return rows


SHOWN: Final = {
    "records": "records",
    "cpu_us_per_viewer_s": "us per viewer and s",
    "ratio": "ratio",
    "ratio_least": "least",
    "ratio_most": "most",
    "threads_us_per_viewer_s": "of it two threads",
    "threads_share": "share",
    "delay_p99_ms": "p99 ms",
    "memory_kb_per_viewer": "kB per viewer",
    "missing": "missing",
    "lost": "lost",
    "load_average": "load average",
}
"""What of a row is shown, and under which head."""


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows as they go to the screen and into the document."""
    return [{head: row[key] for key, head in SHOWN.items()} for row in rows]


def document(rows: list[dict[str, Any]], images: Path) -> str:  # noqa: ARG001 - every bench's is called with both
    """Return the part of the document; there is no picture for `images`."""
    first = rows[0]
    return (
        f"{first['viewers']} viewers, {first['bit_rate'] / 1e6:g} Mbit/s, medians. `least` and `most` are the ratios "
        "of single repetitions,\n`missing` and `lost` (frames, viewers) the sums of all runs, `load average` that of "
        f"the machine, the bench included.\n\n{table(shown(rows))}"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--viewers", type=int, default=1000)
    parser.add_argument("--bit-rate", type=int, default=2_500_000)
    parser.add_argument("--window", type=float, default=2 * _LAST_FILE_S, help="measured seconds per run")
    parser.add_argument("--settle", type=float, default=_JOINED_S, help="seconds between the last join and the window")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


QUICK: Final[dict[str, Any]] = {
    "arguments": parse(["--viewers", "20", "--window", "1", "--settle", "1", "--repeat", "1"])
}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    arguments = parse()
    rows = run(arguments)
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
