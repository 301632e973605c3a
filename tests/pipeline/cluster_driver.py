"""The other half of cluster_kit.py: a program that opens a session on a master and runs one task there.

``python cluster_driver.py TASK MASTER ARGUMENTS``, with the arguments as a JSON object; the last line of its output is
a JSON object too. It is no test: it runs in a process of its own, because there is one SparkContext to a process.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from cluster_kit import EXECUTOR_MB

from flowctl.pipeline.spark import SessionOptions, session
from flowctl.pipeline.synth_plan import SynthOptions

KILL_AFTER_TASKS = 3
"""Tasks of the stage that have to be finished: their results lie on either worker, and so are lost with one of them."""
CONF = {
    "spark.executor.memory": f"{EXECUTOR_MB}m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    # Several tasks even on the small data of a test, so that both workers have work and results have to be merged.
    "spark.sql.files.maxPartitionBytes": "200000",
    "spark.sql.files.openCostInBytes": "50000",
}


def options(master: str, conf: dict[str, str]) -> SessionOptions:
    """Return how every task opens its session."""
    return SessionOptions(master=master, driver_memory="512m", shuffle_partitions=4, conf={**CONF, **conf})


GRID = 'soft = ["256KiB,256,1s", "1MiB,1024,2s"]\ntarget_delay = ["auto", "off"]\n'
"""Few choices, few viewers and their first minute: what is compared is where it is computed, not how long it takes."""


def run_job(spark: Any, name: str, events: str, out: str) -> dict[str, Any]:
    """Run one job as the command line does, what-if on a small grid; return its accounts and outputs."""
    module = importlib.import_module(f"flowctl.pipeline.{name}")
    chosen = None
    if name == "whatif":
        chosen = module.WhatifOptions(grid=GRID, cut_s=60.0, most=24)
    elif name == "abuse":  # a time of its own, or the second run would judge older evidence
        chosen = module.AbuseOptions(now_s=SynthOptions().start_s + 86_400)
    elif name == "capacity":
        chosen = module.CapacityOptions(viewers=20_000)
    result = module.run(spark, events, out, chosen)
    result.check()
    return result.as_dict()


def synth(master: str, *, out: str, **fields: Any) -> dict[str, Any]:
    """Make events; `fields` are those of `SynthOptions`."""
    from flowctl.pipeline.synth import run

    with session(options(master, {})) as spark:
        return run(spark, "", out, SynthOptions(**fields)).as_dict()


GENERATED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "CODEGEN_ONLY"}
"""Queries compiled, as those of much data; the reference on this machine is made without, as those of little are."""


def tables(master: str, *, events: str, out: str, jobs: list[str], flights: str) -> dict[str, Any]:
    """Run jobs one after the other in one session, and what-if over `flights` as well."""
    with session(options(master, {} if master.startswith("local") else GENERATED)) as spark:
        done = {name: run_job(spark, name, events, out) for name in jobs}
        done["flights"] = run_job(spark, "whatif", flights, f"{out}/flights")
        # Counted at the end: a second executor may come later than the first job begins. The driver is listed too.
        executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
        return {"executors": executors, "jobs": done}


def kill_worker(master: str, *, events: str, out: str, name: str, group: int) -> dict[str, Any]:
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

    with session(options(master, {})) as spark:
        watcher = threading.Thread(target=watch, args=(spark.sparkContext.statusTracker(),))
        watcher.start()
        try:
            done = run_job(spark, name, events, out)
        finally:
            over.set()
            watcher.join()
    return {"killed": killed, "jobs": {name: done}}


def where(master: str, *, archive: str, python: str) -> dict[str, Any]:
    """Ship `archive` ("": nothing) and return from where workers that run `python` import flowctl, and what it says."""
    from pyspark.sql import functions
    from pyspark.sql.types import StringType

    def place(_: int) -> str:
        import flowctl.units
        from flowctl.limits import Limits

        return f"{flowctl.units.__file__} {Limits.parse('1MiB,1024,2s')}"

    shipped = {"spark.submit.pyFiles": archive} if archive else {}
    with session(options(master, {**shipped, "spark.pyspark.python": python})) as spark:
        column = functions.udf(place, StringType())(functions.col("id"))
        rows = spark.range(0, 8, 1, 4).select(column.alias("place")).distinct().collect()
        return {"places": sorted(row.place for row in rows)}


def main() -> None:
    """Run what the command line names and print its answer."""
    task, master, arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tasks = {"synth": synth, "tables": tables, "kill_worker": kill_worker, "where": where}
    answer = tasks[task](master, **json.loads(arguments))
    sys.stdout.write(json.dumps(answer, default=str) + "\n")


if __name__ == "__main__":
    main()
