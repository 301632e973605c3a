"""The other half of cluster_kit.py: runs the jobs on a cluster, and to compare on this machine, on Spark and on DuckDB.

``python cluster_driver.py MASTER ARGUMENTS``, with the arguments as a JSON object; the last line of its output is one
too. It is no test: it runs in a process of its own, because there is one SparkContext to a process, and that of the
test session is ``local[2]``. Its sessions come one after the other in one Java, whose start costs more than most of
what is computed here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from cluster_kit import EXECUTOR_MB
from pyspark.sql import functions
from synth.make import make
from synth.people import SynthOptions

from flowctl.analyze import run as runner
from flowctl.analyze.abuse import job, watch
from flowctl.analyze.duck.session import session
from flowctl.analyze.engine import DUCKDB, running, using
from flowctl.analyze.models import run_text, text_of
from flowctl.analyze.records.addresses import with_unit
from flowctl.analyze.spark.session import SessionOptions, SparkError, mapped_errors, open_session
from flowctl.analyze.viewers import experience
from flowctl.analyze.viewers.sessions import MADE_COLUMNS, OPEN_COLUMNS

DAYS = 0.125
SYNTH = SynthOptions(
    events=6_000,
    seed=7,
    days=DAYS,
    samples_s=60.0,
    start_s=int(time.time() // 3600 * 3600 - DAYS * 86_400),  # evidence ages to now
)
"""Small, and still several files and tasks: what is compared is the way of adding up, not speed."""
NOW_S = SYNTH.start_s + DAYS * 86_400
CLOCK = SimpleNamespace(time=lambda: NOW_S, time_ns=lambda: int(NOW_S * 1e9), monotonic=time.monotonic)
"""Of the watch, to whose now evidence ages: it stands, so that one minutes later says the same to the last digit."""
KILL_AFTER_TASKS = 3
"""Tasks of the stage that have to be finished: their results lie on either worker, and so are lost with one of them."""
CONF = {
    "spark.executor.memory": f"{EXECUTOR_MB}m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    # Several tasks even on the small data of a test, so that both workers have work and results have to be merged.
    "spark.sql.files.maxPartitionBytes": "100000",
    "spark.sql.files.openCostInBytes": "50000",
}


GRID = 'soft = ["256KiB,256,1s", "1MiB,1024,2s"]\ntarget_delay = ["auto", "off"]\n'
"""Few choices, few viewers and their first minute: what is compared is where it is computed, not how long it takes."""


WHATIF = {"grid": GRID, "cut_s": 60.0, "most": 24, "thorough": True}
OPTIONS: dict[str, Any] = {"whatif": WHATIF, "abuse": {"now_s": NOW_S}, "capacity": {"viewers": 20_000}}


def run_jobs(spark: Any, names: list[str], events: str, out: str) -> dict[str, Any]:
    result = runner.run(spark, events, out, names, {name: OPTIONS[name] for name in names if name in OPTIONS})
    notes = {name: note.as_dict() for name, note in result.jobs.items()}
    assert not result.failed, {name: notes[name]["message"] for name in result.failed}
    return {"accounts": list(result.accounts), "outputs": dict(result.outputs), "notes": notes}


GENERATED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "CODEGEN_ONLY"}
"""Queries compiled, as those of much data; the reference on this machine is made without, as those of little are."""


@contextlib.contextmanager
def context(master: str, python: str, conf: dict[str, str]) -> Iterator[Any]:
    os.environ["PYSPARK_PYTHON"] = python
    ours = {"spark.pyspark.python": python, "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "4"}
    session = open_session(SessionOptions(master=master, conf=ours | conf))
    try:
        yield session
    finally:
        session.stop()


def tables(spark: Any, events: str, flights: str, out: str) -> dict[str, Any]:
    done = {
        "all": run_jobs(spark, list(runner.JOBS), events, out),
        "flights": run_jobs(spark, ["whatif"], flights, f"{out}/flights"),
    }
    if running() == DUCKDB:
        return {"jobs": done}
    watch.run(spark, events, f"{out}/watch", watch.WatchOptions(once=True))
    # Counted at the end: a second executor may come later than the first job begins. The driver is listed too.
    executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    return {"executors": executors, "jobs": done}


def shown(spark: Any, outputs: dict[str, str], out: str) -> None:
    seen = [spark.read.parquet(outputs[name]) for name in ("sessions", "sessions_open")]
    left = {name: kind for name, kind in MADE_COLUMNS.items() if name not in OPEN_COLUMNS}  # of no result
    nulls = (f"CAST(NULL AS {kind}) AS {name}" for name, kind in left.items())
    both = seen[0].unionByName(seen[1], allowMissingColumns=True).drop("date", "hour")
    once = both.selectExpr("*", *nulls, "'' AS date", "'' AS hour")
    keyed, _, _ = text_of("viewers/felt").rpartition("SELECT")
    text = f"{keyed} SELECT first_frame_ms, delay_ms AS delay_p50_ms, dimension AS `by`, value AS key FROM keyed"
    found = run_text(text, {"sessions": with_unit(once)}, least_stay_s=experience.LEAST_STAY_S)
    found.write.parquet(out)


def kill_worker(spark: Any, events: str, out: str, name: str, group: int) -> dict[str, Any]:
    """Run a job, and kill a worker and its executor (process group `group`) once some tasks of a stage are finished."""
    killed: dict[str, Any] = {}
    over = threading.Event()

    def watch(tracker: Any) -> None:
        while not over.is_set() and not killed:
            for stage in tracker.getActiveStageIds():
                found = tracker.getStageInfo(stage)
                if found and KILL_AFTER_TASKS <= found.numCompletedTasks < found.numTasks - 1:
                    os.killpg(group, signal.SIGKILL)
                    killed.update(finished=found.numCompletedTasks, tasks=found.numTasks)
                    return
            time.sleep(0.005)

    watcher = threading.Thread(target=watch, args=(spark.sparkContext.statusTracker(),))
    watcher.start()
    try:
        done = run_jobs(spark, [name], events, out)
    finally:
        over.set()
        watcher.join()
    return {"killed": killed, "jobs": {name: done}}


def where(spark: Any) -> dict[str, Any]:
    from pyspark.sql.types import StringType

    def place(_: int) -> str:
        import flowctl.units
        from flowctl.core.flow.limits import Limits

        return f"{flowctl.units.__file__} {Limits.parse('1MiB,1024,2s')}"

    column = functions.udf(place, StringType())(functions.col("id"))
    try:
        with mapped_errors():
            rows = spark.range(0, 8, 1, 4).select(column.alias("place")).distinct().collect()
    except SparkError as error:
        return {"error": str(error)}
    return {"places": sorted(row.place for row in rows)}


def everything(master: str, *, folder: str, flights: str, archive: str, python: str, group: int) -> dict[str, Any]:
    events, done = f"{folder}/events", {}
    # The session that ships code is the first: it is the start of Java that takes it.
    with context(master, python, {**CONF, "spark.submit.pyFiles": archive}) as spark:
        make(spark, events, SYNTH)
        done["shipped"] = where(spark)
        for name, value in GENERATED.items():
            spark.conf.set(name, value)
        done["remote"] = tables(spark, events, flights, f"{folder}/remote")
    # As few tasks as may be: on the cluster sums are put together from more. What the first session set is still set.
    with context("local[2]", sys.executable, {"spark.sql.files.maxPartitionBytes": "128m"}) as spark:
        done["local"] = tables(spark, events, flights, f"{folder}/local")
        shown(spark, done["local"]["jobs"]["all"]["outputs"], f"{folder}/shown")
    with using(DUCKDB), session() as database:
        done["duckdb"] = tables(database, events, flights, f"{folder}/duckdb")
    with context(master, python, {**CONF, "spark.submit.pyFiles": "", "spark.files": ""}) as spark:
        done["not shipped"] = where(spark)
        done["killed"] = kill_worker(spark, events, f"{folder}/after-kill", "sessions", group)
    return done


def main() -> None:
    watch.time = job.time = CLOCK
    master, arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    answer = everything(master, **json.loads(arguments))
    sys.stdout.write(json.dumps(answer, default=str) + "\n")


if __name__ == "__main__":
    main()
