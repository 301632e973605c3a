"""Pipeline: `sessions` on Spark beside DuckDB, at 1, 10 and 100 million events, and what else is claimed of the jobs.

Run ``python bench pipeline --events 1M --events 10M``. Records come from ``tests/kits/synth``; a size counts its
closes and events together, and the rows say how many of each there were. Both engines get two threads, take turns, and
do the same work: every row of closes and of opens is checked, both write `sessions` and who was open, hour by hour, as
Parquet (zstd), find who still is, and count. That the tables are the same is checked value by value (`pipeline.same`)
on every size up to 10 million. Spark also looks at every footer for what is wrong with a file, and keeps accounts. Time
is that of the job once the session is up; a first run also pays for what Java compiles, and both are told.

Each measurement is a process and is kept as soon as it is made (``bench/results/pipeline-parts.json``), so that an
interrupted run goes on where it was; ``--fresh`` begins anew. For 100 million events 40 GB of disk are asked for.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kit.machine import HERE, RESULTS, machine
from kit.processes import environment
from kit.tables import table
from pipeline import more as more_claims
from pipeline.same import difference

UNITS: Final = {"k": 1_000, "M": 1_000_000}
DEFAULT_EVENTS: Final = ("1M", "10M")
HEAP: Final = "2g"
"""The same for all sizes: a driver that kept something per row would not get through with it."""
DUCKDB_MEMORY: Final = "16GB"
"""As much as it likes on the machine of the figures: it groups in memory, where Spark writes its shuffle to disk."""
SEED: Final = 1
TABLES: Final = ("flow_closes", "flow_opens", "flow_events")
"""What is made. A size counts closes and events; connections that are open, which `sessions` reads too, come beside."""
DISK_BYTES_PER_EVENT: Final = 400
"""Records take 196, measured at 200 thousand; tables, shuffle and spill are estimated: a bound, no figure."""
CHECKED_EVENTS: Final = 10_000_000
"""Tables of more events than that are compared by their sums only: both would have to fit in memory to be sorted."""
TIMEOUT_S: Final = 3 * 3600
PARTS: Final = RESULTS / "pipeline-parts.json"
REPEAT: Final = {100_000_000: 1}
"""Turns of each engine by size; two where nothing is said."""
RUNS: Final = {100_000_000: 2}
"""Runs in each turn, of which the last one counts; three where nothing is said: Java compiles for a minute or so."""


def count_of(text: str) -> int:
    """Return the number that ``10M`` stands for."""
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdigit() or not int(number):
        raise SystemExit(f"error: {text!r} is no number of events\nhint: 200k, 1M, 10M, 100M")
    return int(number) * unit


class Parts:
    """Measurements made so far, in a file that is written after each."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self._path = path
        known = json.loads(path.read_text("utf-8")) if path.exists() and not fresh else {}
        # Figures of other code are not taken over.
        self._parts: dict[str, Any] = known.get("parts", {}) if known.get("commit") == machine()["commit"] else {}

    def get(self, name: str, measure: Any) -> dict[str, Any]:
        if name not in self._parts:
            print(f"  {name} ...", file=sys.stderr, flush=True)
            self._parts[name] = measure()
            self._path.parent.mkdir(exist_ok=True)
            kept = {"commit": machine()["commit"], "parts": self._parts}
            self._path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        part: dict[str, Any] = self._parts[name]
        return part


def engine(name: str, events: Path, out: Path, **arguments: Any) -> dict[str, Any]:
    """Run one engine in a process of its own (`pipeline.engines`) and return what it measured."""
    command = [sys.executable, "-m", "pipeline.engines", name, str(events), str(out), json.dumps(arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def make(events: Path, count: int, scratch: Path) -> dict[str, Any]:
    """Make the records with `synth`, unless they are there whole, and return time and size of closes and events."""
    done = events / "_bench.json"  # a name with "_" is no data
    if not done.exists():
        shutil.rmtree(events, ignore_errors=True)
        found = engine("synth", events, scratch, count=count, seed=SEED, heap=HEAP, conf=conf_of(scratch))
        done.write_text(json.dumps(found), "utf-8")
    files = [path for table in TABLES for path in (events / table).rglob("*.parquet")]
    made: dict[str, Any] = json.loads(done.read_text("utf-8"))
    return {**made, "files": len(files), "bytes": sum(path.stat().st_size for path in files)}


def conf_of(scratch: Path) -> dict[str, str]:
    """Return settings that keep everything that Spark writes within `scratch`."""
    return {"spark.local.dir": str(scratch / "local")}


def size_row(count: int, folder: Path, parts: Parts, *, repeat: int, heap: str) -> dict[str, Any]:
    events, scratch, name = folder / f"events-{count}", folder / "scratch", f"{count}"
    need = count * DISK_BYTES_PER_EVENT
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < need:
        raise RuntimeError(f"{count} events take up to {need / 1e9:.0f} GB in {folder}, which has less; see --folder")
    made = parts.get(f"{name}/synth", lambda: make(events, count, scratch))
    if not (events / "_bench.json").exists():  # a part of an earlier run whose data is gone
        make(events, count, scratch)
    spark, duck = [], []
    runs = RUNS.get(count, 3)
    options: dict[str, Any] = {"job": "sessions", "heap": heap, "runs": runs, "conf": conf_of(scratch)}
    for turn in range(repeat):
        out = folder / f"out-{count}"
        spark.append(
            parts.get(f"{name}/spark/{turn}", lambda: engine("spark", events, out / "spark", **options))  # noqa: B023 - called at once, within this turn of the loop
        )
        limits = {"memory": DUCKDB_MEMORY, "runs": runs}
        duck.append(
            parts.get(f"{name}/duckdb/{turn}", lambda: engine("duckdb", events, out / "duckdb", **limits))  # noqa: B023 - called at once, within this turn of the loop
        )
    same = parts.get(f"{name}/same", lambda: compare(spark[-1], duck[-1], whole=count <= CHECKED_EVENTS))
    return as_row(count, made, spark, duck, same)


def compare(spark: dict[str, Any], duck: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    """Return whether both wrote the same tables."""
    for name in ("sessions_open", "open_sessions", "sessions"):
        found = difference(spark["outputs"][name], duck["outputs"][name], whole=whole)
        if found["difference"]:
            raise RuntimeError(f"Spark and DuckDB made different tables {name}: {found['difference']}")
    return found


def as_row(
    count: int, made: dict[str, Any], spark: list[dict[str, Any]], duck: list[dict[str, Any]], same: dict[str, Any]
) -> dict[str, Any]:
    """Return the figures of one size: medians over the turns of what each engine did in a warm process."""
    turns = {"spark": spark, "duckdb": duck}
    time = {
        f"{name}_{first}{what}": statistics.median(turn["runs"][number][what] for turn in made_by)
        for name, made_by in turns.items()
        for first, number in (("", -1), ("first_", 0))
        for what in ("wall_s", "cpu_s")
    }
    return {
        "kind": "sessions",
        "events": count,
        "closes": made["result"]["flow_closes"],
        "events_between": made["result"]["flow_events"],
        "sessions": same["rows"],
        "files": made["files"],
        "data_bytes": made["bytes"],
        "synth_s": made["wall_s"],
        **time,
        "ratio": time["spark_cpu_s"] / time["duckdb_cpu_s"],
        "ratio_first": time["spark_first_cpu_s"] / time["duckdb_first_cpu_s"],
        "jvm_peak_bytes": max(turn["jvm_peak_bytes"] for turn in spark),
        "heap_old_bytes": max(turn["heap_old_bytes"] for turn in spark),
        "python_peak_bytes": max(turn["python_peak_bytes"] for turn in spark),
        "duckdb_peak_bytes": max(turn["peak_bytes"] for turn in duck),
        "same": "every value" if same["whole"] else "rows and sums",
    }


def run(
    *,
    events: Sequence[str] = DEFAULT_EVENTS,
    folder: Path | None = None,
    repeat: int = 2,
    heap: str = HEAP,
    fresh: bool = False,
    more: bool = True,
) -> list[dict[str, Any]]:
    """Measure."""
    folder = folder or Path(os.environ.get("FLOWCTL_CACHE", HERE / ".cache")) / "pipeline"
    parts = Parts(PARTS, fresh=fresh)
    rows = [
        size_row(count, folder, parts, repeat=min(repeat, REPEAT.get(count, repeat)), heap=heap)
        for count in sorted({count_of(text) for text in events})
    ]
    largest = max((row["events"] for row in rows if row["events"] <= CHECKED_EVENTS), default=None)
    if more and largest is not None:
        rows += more_claims.rows(folder / f"events-{largest}", folder, largest, parts, engine)
    return rows


QUICK: Final[dict[str, Any]] = {"events": ("200k",), "repeat": 1, "more": False}
"""What `run` is called with for a look at whether it works."""


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows as they go to the screen: those of `sessions`."""
    return [in_words(row) for row in rows if row["kind"] == "sessions"]


def in_words(row: dict[str, Any]) -> dict[str, Any]:
    """Return one size as a reader would write it."""
    megabyte = 1 << 20
    return {
        "events": row["events"],
        "sessions": row["sessions"],
        "files, MB": round(row["data_bytes"] / megabyte),
        "processor: Spark, s": row["spark_cpu_s"],
        "DuckDB, s": row["duckdb_cpu_s"],
        "ratio": round(row["ratio"], 2),
        "first runs: Spark, s": row["spark_first_cpu_s"],
        "DuckDB, s ": row["duckdb_first_cpu_s"],
        "ratio ": round(row["ratio_first"], 2),
        "wall: Spark, s": row["spark_wall_s"],
        "DuckDB, s  ": row["duckdb_wall_s"],
        "JVM at most, MB": round(row["jvm_peak_bytes"] / megabyte),
        "heap kept, MB": round(row["heap_old_bytes"] / megabyte),
        "DuckDB at most, MB": round(row["duckdb_peak_bytes"] / megabyte),
        "compared": row["same"],
    }


def document(rows: list[dict[str, Any]], images: Path) -> str:  # noqa: ARG001 - it has no picture
    """Return the part of the document: sizes, how time grows, and the other claims."""
    sizes = [row for row in rows if row["kind"] == "sessions"]
    text = table(shown(rows))
    grown = [
        f"from {one['events']:,} to {other['events']:,} events (times {other['events'] / one['events']:.0f}): "
        f"Spark times {other['spark_cpu_s'] / one['spark_cpu_s']:.1f}, "
        f"DuckDB times {other['duckdb_cpu_s'] / one['duckdb_cpu_s']:.1f}"
        for one, other in itertools.pairwise(sizes)
    ]
    if grown:
        text += "\n\nGrowth: " + "; ".join(grown) + "."
    others = [{key: value for key, value in row.items() if key != "kind"} for row in rows if row["kind"] == "more"]
    return text + (f"\n\n{table(others)}" if others else "")


def main() -> None:
    """Measure and print; keep the rows where ``bench/run.py --render pipeline`` finds them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", action="append", metavar="N", help="1M, 10M, 100M; may be repeated")
    parser.add_argument("--folder", type=Path, help="for events and outputs; default: bench/.cache/pipeline")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--heap", default=HEAP)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--only-sessions", action="store_true", help="leave the other claims out")
    arguments = parser.parse_args()
    rows = run(
        events=arguments.events or DEFAULT_EVENTS,
        folder=arguments.folder,
        repeat=arguments.repeat,
        heap=arguments.heap,
        fresh=arguments.fresh,
        more=not arguments.only_sessions,
    )
    record = {
        "name": "pipeline",
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": rows,
        "command": shlex.join(["python", "bench", "pipeline", *sys.argv[1:]]),
    }
    (RESULTS / "pipeline.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(document(rows, Path()))


if __name__ == "__main__":
    main()
