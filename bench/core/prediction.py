"""How right advice is: real crowds, the limits advised for them set, the same crowds again.

``python bench prediction [--seconds 30] [--seeds 3] [--rounds 3]``. A live server of its own with limits of `BEGIN` and
a crowd of fifty viewers that a seed has drawn (lines of all rates, some that swing or pause, some that die), each with
an address of its own, all recorded. Then limits are advised as by ``flowctl analyze whatif``, set, and the same crowd
comes again; for so many rounds. Each row has what was promised of the limits, and what came. A seed draws the crowd,
not what the machine does beside it: two runs under the same limits differ by a viewer or two.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from flowctl.analyze.options import WhatifOptions
from flowctl.analyze.whatif.grid import default_grid, in_force
from flowctl.analyze.whatif.job import advise, settings_text
from flowctl.analyze.whatif.stretches import of_flight
from flowctl.analyze.whatif.trials import Viewer as Tried
from flowctl.analyze.whatif.trials import stratum_of
from flowctl.records.flight.reading import read_flights
from flowctl.records.telemetry.flightfiles import flight_files, flights_rows, list_flights
from kit.processes import process, read_json
from kit.tables import print_rows

BEGIN: Final = {
    "tight": "--soft 256KiB,512,1s --hard 512KiB,1024,2s",
    "no warning": "--soft 512KiB,1024,1s --hard 512KiB,1024,1s",
    "defaults": "",
}
"""What is in force at first."""
_TRIM_S: Final = 120.0
_SLACK: Final = 0.13
"""Delays are known to an eighth."""

Viewer = list[dict[str, Any]]
"""Its stretches."""


def crowd(seed: int) -> dict[str, int]:
    """Return how many viewers have which line, of a stream of 1.5 Mbit/s."""
    chance = random.Random(seed)
    kinds = {
        lambda: f"slow@{chance.randrange(3, 15) * 100}k": 5,
        lambda: f"sawtooth@{chance.randrange(2, 6) * 100}k-3M/{chance.randrange(4, 9)}s": 2,
        lambda: f"pause@{chance.randrange(3, 7)}s/{chance.randrange(5, 45) * 100}ms/64KiB": 4,
        lambda: f"stall@{chance.randrange(4, 12)}s/64KiB": 1,
    }
    lines: Counter[str] = Counter(healthy=chance.randrange(10, 20))
    while sum(lines.values()) < _VIEWERS:
        lines[chance.choices([*kinds], [*kinds.values()])[0]()] += chance.randrange(2, 5)
    return dict(lines)


_VIEWERS: Final = 48


def record(limits: str, lines: Mapping[str, int], seconds: float, folder: Path) -> list[Viewer]:
    """Run one server under the crowd; return the viewers that it recorded."""
    command = [sys.executable, "-m", "flowctl", "--log-level", "error", "serve", "live", "--port", "0", "--json"]
    command += [*limits.split(), "--per-address", "0", "--new-per-address", "0"]
    command += ["--events", str(folder), "--flights-at-once", "1000"]
    with process(command, stdout=subprocess.PIPE) as child:
        load = [sys.executable, "-m", "flowctl", "load", f"{read_json(child)['url']}live/crowd", "--no-table"]
        load += ["--viewers", str(sum(lines.values())), "--publishers", "1", "--bit-rate", "1.5M", "--ramp", "2s"]
        load += ["--duration", f"{seconds}s", "--spread-addresses", "--workers", "1", "--measure", "1"]
        for name, count in lines.items():
            load += [] if name == "healthy" else ["--profile", f"{name}:{count}"]
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


def rounds(begin: str, seed: int, count: int, seconds: float, root: Path) -> Iterator[dict[str, Any]]:
    """Yield what was promised of each limits and what came, from those in force at first to those advised last."""
    limits, advice, promised = BEGIN[begin], "", None
    for number in range(count):
        run = record(limits, crowd(seed), seconds, root / f"{begin} {seed} {number}".replace(" ", "-"))
        present = in_force(run[0][0]["settings"])
        if present is None:
            raise SystemExit("a flight does not say what was in force")
        grid = default_grid(present)
        found = advise([Tried(stratum_of(rows), rows) for rows in run], grid, WhatifOptions(thorough=True))
        yield {
            "began with": begin,
            "seed": seed,
            "round": number,
            "advice": advice or "in force",
            "limits": settings_text(present),
            **_told(promised, found.rows[0]),
        }
        promised, limits = found.pick.row, settings_text(grid[found.pick.row["choice_id"]])
        advice = "keep" if promised["in_force"] else "better" if found.pick.known else "widen and look"


def _told(promised: Mapping[str, Any] | None, came: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, name, factor, slack in (
        ("cut", "disconnected", 1, 0.0),
        ("left out, %", "dropped_share", 100, 0.0),
        ("p95 of the delay, ms", "delay_p95_ms", 1, _SLACK),
    ):
        value, ends = came[name], [(promised or {}).get(f"{name}_{end}", 0.0) for end in ("low", "high")]
        found[f"{word}: said"] = f"{factor * ends[0]:.3g} to {factor * ends[1]:.3g}" if promised else None
        found[word] = round(factor * value, 1)
        inside = ends[0] * (1 - slack) <= value <= ends[1] * (1 + slack)
        found[f"{word}: kept"] = inside if promised else None
    return found


def run(seconds: float = 30.0, seeds: int = 3, count: int = 3, keep: Path | None = None) -> list[dict[str, Any]]:
    """Return a row for each round of each crowd."""
    with tempfile.TemporaryDirectory() as there:
        rows = []
        for seed in range(1, seeds + 1):
            for begin in BEGIN:
                for row in rounds(begin, seed, count, seconds, keep or Path(there)):
                    print(row, file=sys.stderr)
                    rows.append(row)
        return rows


QUICK: Final[dict[str, Any]] = {"seconds": 5.0, "seeds": 1, "count": 2}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder for the records, which stay")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args()
    print_rows(run(options.seconds, options.seeds, options.rounds, options.keep), as_json=options.json)


if __name__ == "__main__":
    main()
