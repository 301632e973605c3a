"""How good the capacity model is: two crowds are measured, a larger one is predicted from them, and then measured too.

``python bench capacity [--counts 200,400,800] [--seconds 20] [--bit-rate 2.5M]``: starts `flowctl serve live`
with ``--events`` for each crowd, and loads it with `flowctl load` on the same machine. The last crowd is not used for
the fit; how far the prediction is off is said beside it. What `make bench ARGS=capacity` leaves in
bench/results/capacity.json, or ``--output FILE`` here, is what `flowctl analyze capacity --measurements` reads; the job
states the error again from the same file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from flowctl.analyze.capacity.node import Measurement, fit
from flowctl.errors import ConfigError
from flowctl.units import parse_bit_rate
from kit.machine import machine
from kit.processes import cpu_seconds, free_port, process, raise_open_files, resident_bytes, wait_for_port
from kit.tables import table

_FIRST_FILE_S: Final = 30.0
"""A file is finished after 10 s."""


def wait_for_records(folder: Path) -> None:
    """Return as soon as the server has written its first file of records."""
    end = time.monotonic() + _FIRST_FILE_S
    while not any(not path.name.startswith((".", "_")) for path in folder.rglob("*.parquet")):
        if time.monotonic() > end:
            raise RuntimeError(f"the server has written no file of records within {_FIRST_FILE_S:g} s")
        time.sleep(0.1)


def one_point(viewers: int, seconds: float, bit_rate: str, slow_share: float, rotate: str) -> Measurement:
    """Return what a server took with so many viewers."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="flowctl-capacity-") as folder:
        serve = [sys.executable, "-m", "flowctl", "serve", "live", "--port", str(port), "--events", folder]
        serve += ["--flights", "0"]
        serve += ["--set", f"events_rotate={rotate}"]
        log = Path(folder, "server.log").open("w", encoding="utf-8")  # noqa: SIM115 - ends with the folder
        with log, process(serve, stdout=subprocess.DEVNULL, stderr=log) as server:
            wait_for_port(port, server)
            wait_for_records(Path(folder))  # what writes files is loaded with the first one: more than all viewers take
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


QUICK: Final[dict[str, Any]] = {"counts": (10, 20), "seconds": 4.0, "rotate": "1s"}
"""Arguments of `run` for a look at whether it works: such crowds say nothing of larger ones."""


def run(
    counts: tuple[int, ...] = (200, 400, 800),
    seconds: float = 20.0,
    bit_rate: str = "2.5M",
    slow_share: float = 0.0,
    rotate: str = "10s",
) -> list[dict[str, Any]]:
    """Measure crowds one after the other, and predict the last of them from the others."""
    raise_open_files()
    points = []
    for count in counts:
        points.append(one_point(count, seconds, bit_rate, slow_share, rotate))
        print(f"# {json.dumps(points[-1].as_dict())}", file=sys.stderr, flush=True)
    rows = [
        {
            **point.as_dict(),
            "cpu_us_per_viewer_s": round(point.cpu_us_per_s / point.viewers, 1),
            "predicted_us_per_s": None,
            "error_share": None,
            "memory_error_share": None,
            "full": point.saturated,
        }
        for point in points
    ]
    rows[-1].update(_predicted(points[:-1], points[-1]))
    return rows


def _predicted(smaller: list[Measurement], last: Measurement) -> dict[str, Any]:
    """Return the columns that compare a crowd with what smaller ones say of it; nothing where there is no saying."""
    try:
        model = fit(smaller)
    except ConfigError as error:
        print(f"# no prediction: {error}", file=sys.stderr)
        return {}
    if last.saturated:
        print(f"# {last.viewers} viewers: p99 {last.p99_ms} ms, no room on this machine: no error", file=sys.stderr)
        return {}
    found: dict[str, Any] = {
        "predicted_us_per_s": round(last.cpu_us_per_s * (1 + model.error(last))),
        "error_share": round(model.error(last), 4),
    }
    if model.memory is not None and last.memory_bytes:
        found["memory_error_share"] = round(model.memory.of(last.viewers, last.bit_rate) / last.memory_bytes - 1, 4)
    return found


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Return the part of the document: the crowds, and how far the largest was from what the others say."""
    del images
    crowds = [
        {
            "viewers": row["viewers"],
            "Mbit/s": row["bit_rate"] / 1e6,
            "processor time, ms per s": row["cpu_us_per_s"] / 1000,
            "predicted": None if row["predicted_us_per_s"] is None else row["predicted_us_per_s"] / 1000,
            "us per viewer and s": row["cpu_us_per_viewer_s"],
            "delay p99 ms": row["p99_ms"],
            "memory MB": None if row["memory_bytes"] is None else row["memory_bytes"] / 1e6,
            "machine full": "yes" if row["full"] else "no",
        }
        for row in rows
    ]
    last = rows[-1]
    if last["error_share"] is None:
        return f"{table(crowds)}\n\nThe largest crowd could not be predicted: the machine had no room for the crowds."
    memory = "" if last["memory_error_share"] is None else f", memory by {last['memory_error_share']:+.1%}"
    return f"{table(crowds)}\n\nProcessor time of the largest crowd was missed by {last['error_share']:+.1%}{memory}."


def main() -> None:
    """Measure, predict, measure; print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="200,400,800")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--bit-rate", default="2.5M")
    parser.add_argument("--slow-share", type=float, default=0.0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the rows here, for --measurements")
    options = parser.parse_args()
    counts = tuple(map(int, options.counts.split(",")))
    rows = run(counts, options.seconds, options.bit_rate, options.slow_share)
    print(json.dumps(rows, indent=2) if options.json else document(rows, Path()))
    if options.output:
        options.output.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
