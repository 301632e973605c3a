"""Pacing: delay and cost of few and many viewers, with the flush interval that follows the cost and with a fixed one.

Run ``python bench pacing``. One stream of 2.5 Mbit/s, the live server with one poll group; the two ways take
turns. The interval is the one at the end of the measured window.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any, Final

from kit.machine import PROGRAMS
from kit.processes import cpu_seconds, process, raise_open_files, read_json, tell
from kit.tables import table

COUNTS: Final = (1, 10, 100, 1000)
_SETTLE_S: Final = 5.0
"""Longer than the interval needs to come down after the joining."""
_BEFORE_END_S: Final = 0.2


def measure(viewers: int, window_s: float, *, fixed: bool) -> dict[str, float]:
    """Return the figures of one run."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, str(PROGRAMS / "live_server.py"), *(["--fixed"] if fixed else [])]
    with process(command, **pipes) as server:
        url = f"rtmp://127.0.0.1:{read_json(server)['port']}/live/bench"
        publish = [sys.executable, str(PROGRAMS / "publisher.py"), url, "--duration", str(window_s + 60)]
        with process(publish, stderr=subprocess.DEVNULL):
            time.sleep(1.0)
            crowd = [sys.executable, str(PROGRAMS / "crowd.py"), "--port", url.split(":")[2].partition("/")[0]]
            crowd += ["--viewers", str(viewers), "--window", str(window_s), "--settle", str(_SETTLE_S)]
            crowd += ["--measure-every", str(max(viewers // 20, 1))]
            with process(crowd, **pipes) as readers:
                read_json(readers)
                before, began = cpu_seconds([server.pid]), time.monotonic()
                tell(readers, "go")
                time.sleep(window_s - _BEFORE_END_S)  # a fan-out goes with its last viewer
                used_s = (cpu_seconds([server.pid]) - before) / (time.monotonic() - began)
                tell(server, "rounds")
                interval_s = read_json(server)["interval_s"]
                figures = read_json(readers)
    return {
        "interval_ms": interval_s * 1000,
        "core_percent": used_s * 100,
        "p50_ms": figures["delay_p50_ms"],
        "p99_ms": figures["delay_p99_ms"],
        "missing": figures["missing"],
    }


def run(*, quick: bool = False, window_s: float = 6.0, repeat: int = 3) -> list[dict[str, Any]]:
    """Measure all counts of viewers."""
    raise_open_files()
    if quick:
        window_s, repeat = 1.0, 1
    rows = []
    for viewers in COUNTS[:2] if quick else COUNTS:
        found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for _ in range(repeat):
            for fixed, runs in found.items():
                runs.append(measure(viewers, window_s, fixed=fixed))
        for fixed, runs in found.items():
            row: dict[str, Any] = {"viewers": viewers, "interval": "fixed" if fixed else "follows the cost"}
            row |= {name: round(statistics.median(item[name] for item in runs), 1) for name in runs[0]}
            rows.append(row)
    return rows


QUICK: Final[dict[str, Any]] = {"quick": True}
"""What `run` is called with for a look at whether it works."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--window", type=float, default=6.0, help="measured seconds per run")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    print(table(run(quick=arguments.quick, window_s=arguments.window, repeat=arguments.repeat)))


if __name__ == "__main__":
    main()
