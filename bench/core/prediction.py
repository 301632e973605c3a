"""How right a what-if is: what it says other limits would do to a crowd, beside what they really do to it.

``python bench prediction [--seconds 40] [--repeat 3]``. A live server of its own with limits A and a fixed crowd of
fifty viewers (lines of six rates, some that swing or pause, some that die), each with an address of its own; every
connection is recorded. The same under limits B. Then the records of each run are tried with both limits, as
``flowctl analyze whatif`` does, and set beside all real runs. Real runs of the same limits differ, so figures have a
lowest and a highest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flowctl.analyze.options import WhatifOptions
from flowctl.analyze.whatif.grid import in_force
from flowctl.analyze.whatif.job import advise
from flowctl.analyze.whatif.stretches import of_flight
from flowctl.analyze.whatif.trials import Viewer as Tried
from flowctl.analyze.whatif.trials import stratum_of
from flowctl.core.flow.limits import Limits
from flowctl.reasons import SLOW_ENDS
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.whatif.types import Choice
from flowctl.records.telemetry.flightfiles import flight_files, flights_rows, list_flights
from kit.processes import process, read_json
from kit.tables import print_rows

CROWD: Final = {
    "slow@300k": 4,
    "slow@600k": 5,
    "slow@900k": 5,
    "slow@1100k": 5,
    "slow@1300k": 4,
    "slow@1450k": 3,
    "sawtooth@300k-3M/6s": 6,
    "pause@3s/1500ms/64KiB": 5,
    "pause@4s/3s/64KiB": 5,
    "stall@5s/64KiB": 4,
    "vanish@8s": 2,
    "never-read": 2,
}
"""Of a stream of 1.5 Mbit/s: lines that carry a fifth of it to nearly all, lines that come and go, and dead ones."""
LIMITS: Final = {"A": ("256KiB,512,1s", "512KiB,1024,2s"), "B": ("1MiB,1024,2s", "2MiB,2048,4s")}
_TRIM_S: Final = 120.0

Viewer = list[dict[str, Any]]
"""Its stretches."""
Real = tuple[int, int]
"""(viewers cut, messages dropped)."""


def record(limits: tuple[str, str], seconds: float, folder: Path) -> list[Viewer]:
    """Run one server under the crowd; return the viewers that it recorded."""
    soft, hard = limits
    command = [sys.executable, "-m", "flowctl", "--log-level", "error", "serve", "live", "--port", "0", "--json"]
    command += ["--soft", soft, "--hard", hard, "--per-address", "0", "--new-per-address", "0"]
    command += ["--events", str(folder), "--flights", "100%", "--flights-at-once", "1000"]
    with process(command, stdout=subprocess.PIPE) as child:
        load = [sys.executable, "-m", "flowctl", "load", f"{read_json(child)['url']}live/crowd", "--no-table"]
        load += ["--viewers", str(sum(CROWD.values())), "--publishers", "1", "--bit-rate", "1.5M", "--ramp", "2s"]
        load += ["--duration", f"{seconds}s", "--spread-addresses", "--workers", "1", "--measure", "1"]
        for name, count in CROWD.items():
            load += ["--profile", f"{name}:{count}"]
        subprocess.run(load, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=seconds + 120, check=False)
        time.sleep(1.0)
    return list(viewers(folder))


def viewers(folder: Path) -> Iterator[Viewer]:
    """Yield the stretches of each viewer that was recorded in a folder."""
    files = flight_files(folder)
    for _, rows in flights_rows(files, list_flights(files)):
        flight = read_flights(rows)
        if flight.role == "play":
            empty: dict[str, Any] = dict.fromkeys(("calm", "recorded", "close_reason", "at_us", "stalls", "stay_us"))
            empty |= {
                "given": 0,
                "restart_bytes": 0,
                "ended_us": 0,
                "picked": len(rows),
                "settings": flight.rows[0].detail,
            }
            yield [empty | stretch for stretch in of_flight(rows, _TRIM_S)]


def real(run: Sequence[Viewer]) -> Real:
    """Return what really became of the viewers of a run."""
    told = [dict(stretches[-1]["recorded"] or ()) for stretches in run]
    cut = sum(stretches[-1]["close_reason"] in SLOW_ENDS for stretches in run)
    return cut, sum(count for one in told for name, count in one.items() if name.startswith("dropped"))


def foretold(run: Sequence[Viewer], choices: Sequence[Choice]) -> Sequence[Mapping[str, Any]]:
    """Return what a what-if says of each choice, the first of them in force."""
    seen = [Tried(stratum_of(rows), rows) for rows in run]
    return advise(seen, choices, WhatifOptions(thorough=True)).rows


def span(values: Sequence[int]) -> str:
    """Return the lowest and the highest of some figures."""
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def run(seconds: float = 40.0, repeat: int = 3, keep: Path | None = None) -> list[dict[str, Any]]:
    """Record all runs and return a row for each run that was tried and each limits that it was tried with."""
    with tempfile.TemporaryDirectory() as there:
        root = keep or Path(there)
        runs: dict[str, list[list[Viewer]]] = {name: [] for name in LIMITS}
        for number in range(1, repeat + 1):
            for name, limits in LIMITS.items():
                folder = root / f"{name}-{number}"
                runs[name].append(list(viewers(folder)) if folder.exists() else record(limits, seconds, folder))
        return [row for name in LIMITS for number in range(repeat) for row in _rows(name, number, runs)]


def _rows(name: str, number: int, runs: Mapping[str, Sequence[Sequence[Viewer]]]) -> Iterator[dict[str, Any]]:
    recorded = runs[name][number]
    present = in_force(recorded[0][0]["settings"])
    if present is None:
        raise SystemExit("a flight does not say what was in force")
    others = [name, *(other for other in LIMITS if other != name)]
    choices = [Choice(**{**_times(present), "limits": _limits(other, present.limits)}) for other in others]
    for other, said in zip(others, foretold(recorded, choices), strict=True):
        happened = [real(recorded)] if other == name else [real(run) for run in runs[other]]
        mean = [sum(pair[part] for pair in happened) / len(happened) for part in (0, 1)]
        yield {
            "recorded under": f"{name}, run {number + 1}",
            "tried": other,
            "cut": f"{said['disconnected_low']:.0f} to {said['disconnected_high']:.0f}",
            "really cut": span([cut for cut, _ in happened]),
            "left out": said["dropped_messages"],
            "really left out": span([count for _, count in happened]),
            "left out, off by %": round(100 * (said["dropped_messages"] / mean[1] - 1), 1) if mean[1] else None,
        }


def _limits(name: str, present: Limits) -> Limits:
    return Limits.parse(*LIMITS[name], target_delay_ms=present.target_delay_ms)


def _times(present: Choice) -> dict[str, Any]:
    names = ("policy", "soft_too_long_s", "stuck_s", "return_after_s")
    return {name: getattr(present, name) for name in names}


QUICK: Final[dict[str, Any]] = {"seconds": 5.0, "repeat": 1}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder of records: what is there is not recorded again")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args()
    rows = run(options.seconds, options.repeat, options.keep)
    print_rows(rows, as_json=options.json)


if __name__ == "__main__":
    main()
