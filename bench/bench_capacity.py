"""How good the capacity model is: two crowds are measured, a larger one is predicted from them, and then measured too.

``python bench/bench_capacity.py [--counts 200,400,800] [--seconds 20] [--bit-rate 2.5M]``: starts `flowctl serve live`
with ``--events`` for each crowd, loads it with `flowctl load` on the same machine, and writes what it found as a file
that `flowctl analyze capacity --measurements` reads: bench/results/capacity.json. The last point is not used for the
fit; how far the prediction is off is printed, and `analyze capacity` states it again from the same file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flowctl.capacitymodel import Measurement, error_of, fit
from flowctl.units import parse_bit_rate
from machine import RESULTS, machine
from processes import cpu_seconds, free_port, process, raise_open_files, resident_bytes, wait_for_port


def one_point(viewers: int, seconds: float, bit_rate: str, slow_share: float) -> Measurement:
    """Return what a server took with so many viewers."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="flowctl-capacity-") as folder:
        serve = [sys.executable, "-m", "flowctl", "serve", "live", "--port", str(port), "--events", folder]
        log = Path(folder, "server.log").open("w", encoding="utf-8")  # noqa: SIM115 - ends with the folder
        with log, process(serve, stdout=subprocess.DEVNULL, stderr=log) as server:
            wait_for_port(port, server)
            idle = resident_bytes([server.pid])
            load = [sys.executable, "-m", "flowctl", "load", f"rtmp://127.0.0.1:{port}/live/x", "--publishers", "1"]
            load += ["--viewers", str(viewers), "--duration", f"{seconds:g}s", "--bit-rate", bit_rate, "--json"]
            if slow_share:
                load += ["--profile", f"slow@1M:{slow_share:.0%}"]
            with process(load, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as crowd:
                time.sleep(seconds * 0.3)  # until all have joined
                used, began = cpu_seconds([server.pid]), time.monotonic()
                time.sleep(seconds * 0.55)
                used = cpu_seconds([server.pid]) - used
                took = time.monotonic() - began
                rss = resident_bytes([server.pid])
                result: dict[str, Any] = json.loads(crowd.communicate(timeout=seconds + 60)[0])
    healthy = result["profiles"]["healthy"]
    return Measurement(
        viewers=viewers,
        bit_rate=parse_bit_rate(bit_rate),
        cpu_us_per_s=round(used / took * 1e6),
        memory_bytes=rss,
        idle_memory_bytes=idle,
        p99_ms=healthy["p99_ms"],
        slow_share=slow_share,
    )


def main() -> None:
    """Measure, predict, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="200,400,800")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--bit-rate", default="2.5M")
    parser.add_argument("--slow-share", type=float, default=0.0)
    options = parser.parse_args()
    raise_open_files()
    points = []
    for count in map(int, options.counts.split(",")):
        point = one_point(count, options.seconds, options.bit_rate, options.slow_share)
        points.append(point)
        print(json.dumps(point.as_dict()), flush=True)
    model = fit(points[:-1])
    last = points[-1]
    if last.saturated:
        print(f"{last.viewers} viewers had a p99 of {last.p99_ms} ms: no room on this machine, the error says nothing")
    predicted = model.cpu_us_per_s(last.viewers, last.bit_rate, last.slow_share)
    error = error_of(model, last)
    memory = model.memory_bytes(last.viewers)
    print(f"{last.viewers} viewers: predicted {predicted / 1e6:.3f} s/s of processor time, ", end="")
    print(f"measured {last.cpu_us_per_s / 1e6:.3f}, error {error:+.1%}; memory {memory / last.memory_bytes - 1:+.1%}")
    path = RESULTS / "capacity.json"
    path.parent.mkdir(exist_ok=True)
    text = {"machine": machine(), "seconds": options.seconds, "points": [point.as_dict() for point in points]}
    path.write_text(json.dumps(text, indent=1) + "\n", "utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
