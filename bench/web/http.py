"""Fan-out over HTTP: processor time per viewer and second of HTTP-FLV and WebSocket-FLV, beside RTMP.

One server, publisher and crowd of viewers on loopback in processes of their own for each measurement; the protocols
take turns, several times, so that what the machine does meanwhile meets all of them. Medians, and the ratio to RTMP,
are reported. ``python bench http --viewers 1000``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any, Final

from kit.machine import PROGRAMS
from kit.options import parse_crowd
from kit.processes import (
    cpu_seconds,
    free_port,
    process,
    raise_open_files,
    read_json,
    resident_bytes,
    tell,
    wait_for_port,
)
from kit.tables import print_rows

NAMES: Final = {"rtmp": "RTMP", "http": "HTTP-FLV", "ws": "WebSocket-FLV"}


def measure(scheme: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a server with a crowd of one protocol once, and return its figures."""
    port = free_port()
    serve = [sys.executable, "-m", "flowctl", "--log-level", "error", "serve", "live", "--port", "0", "--json"]
    serve += ["--per-address", "0", "--new-per-address", "0", "--http", f"127.0.0.1:{port}"]
    with process(serve, stdout=subprocess.PIPE) as server:
        rtmp = int(read_json(server)["port"])
        wait_for_port(port, server)
        base = resident_bytes([server.pid])
        publish = [sys.executable, str(PROGRAMS / "publisher.py"), f"rtmp://127.0.0.1:{rtmp}/live/bench"]
        publish += ["--bit-rate", str(arguments.bit_rate), "--duration", str(arguments.window + 120)]
        watch = [sys.executable, str(PROGRAMS / "crowd.py"), "--viewers", str(arguments.viewers), "--scheme", scheme]
        watch += ["--port", str(rtmp if scheme == "rtmp" else port), "--window", str(arguments.window), "--settle", "5"]
        with process(publish, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            time.sleep(1.5)
            with process(watch, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
                ready = read_json(crowd)
                tell(crowd, "go")
                cpu, began = cpu_seconds([server.pid]), time.monotonic()
                time.sleep(max(arguments.window - 0.5, 0.5))
                used, took = cpu_seconds([server.pid]) - cpu, time.monotonic() - began
                memory = resident_bytes([server.pid]) - base
                figures = read_json(crowd)
    viewers = max(figures["viewers"], 1)
    return {
        "playing": ready["playing"],
        "cpu_us_per_viewer_s": used / took / viewers * 1e6,
        "memory_kb_per_viewer": memory / viewers / 1000,
        **figures,
    }


def run(arguments: argparse.Namespace | None = None) -> list[dict[str, Any]]:
    """Run the protocols in turn, several times, and return the medians with ratios to RTMP's."""
    arguments = arguments or parse([])
    raise_open_files()
    results: dict[str, list[dict[str, Any]]] = {scheme: [] for scheme in NAMES}
    for repetition in range(arguments.repeat):
        for scheme, found in results.items():
            figures = measure(scheme, arguments)
            found.append(figures)
            print(f"# {repetition + 1}/{arguments.repeat} {scheme} {json.dumps(figures)}", file=sys.stderr, flush=True)
    rows = []
    for scheme, found in results.items():
        row: dict[str, Any] = {"protocol": NAMES[scheme], "viewers": found[0]["viewers"]}
        for key in ("cpu_us_per_viewer_s", "delay_p50_ms", "delay_p99_ms", "memory_kb_per_viewer", "missing", "lost"):
            values = [figures[key] for figures in found if figures[key] is not None]
            row[key] = round(statistics.median(values), 1) if values else None
        rows.append(row)
    usual = [figures["cpu_us_per_viewer_s"] for figures in results["rtmp"]]
    for row, found in zip(rows, results.values(), strict=True):
        pairs = zip(found, usual, strict=True)  # of one turn
        ratios = [figures["cpu_us_per_viewer_s"] / of_rtmp for figures, of_rtmp in pairs if of_rtmp]
        row["ratio_to_rtmp"] = round(statistics.median(ratios), 2) if ratios else None
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run."""
    return parse_crowd(argv, __doc__, viewers=1000, flush=False)


QUICK: Final[dict[str, Any]] = {"arguments": parse(["--viewers", "20", "--window", "1", "--repeat", "1"])}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    arguments = parse()
    print_rows(run(arguments), as_json=arguments.json)


if __name__ == "__main__":
    main()
