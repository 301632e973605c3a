"""Children of `whole/pipeline.py`: one process measures one engine on one data set and prints a JSON line.

``python -m pipeline.engines ENGINE EVENTS OUT ARGUMENTS``. A process per measurement, because memory that a
process has taken once it seldom gives back: the peak of a run is only its own in a fresh process. Both engines get
two threads, read the same files and write one table of Parquet (zstd).
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

THREADS: Final = 2
_TICK_S: Final = 0.05


def peak_bytes(pid: int | str = "self") -> int:
    """Return the largest resident memory that a process has had (Linux: ``VmHWM``)."""
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def processor_s(pid: int | str = "self") -> float:
    """Return user and system time of a process, with a resolution of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def timed(work: Callable[[], Any], pid: int | str) -> dict[str, Any]:
    """Run `work`; return wall and processor time of process `pid`, and what `work` returned."""
    began, used = time.monotonic(), processor_s(pid)
    result = work()
    return {"wall_s": time.monotonic() - began, "cpu_s": processor_s(pid) - used, "result": result}


class HeapWatch:
    """Samples what the heap of a JVM holds after a collection, for the time of a block; the largest counts.

    `used` jumps up and down with the collector; the figure that grows with what is *kept* is the one right after a
    collection, which the memory pools of the old generation report as ``CollectionUsage``.
    """

    def __init__(self, jvm: Any) -> None:
        self._pools = [
            pool
            for pool in jvm.java.lang.management.ManagementFactory.getMemoryPoolMXBeans()
            if "Old" in pool.getName() or "Tenured" in pool.getName()
        ]
        self.old_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_TICK_S * 10):
            found = [pool.getCollectionUsage() for pool in self._pools]
            self.old_bytes = max([self.old_bytes, *(int(usage.getUsed()) for usage in found if usage is not None)])


def open_spark(heap: str, conf: dict[str, str]) -> Any:
    """Return a context manager with a session of two cores."""
    from flowctl.pipeline.spark.session import SessionOptions, session

    return session(SessionOptions(master=f"local[{THREADS}]", driver_memory=heap, conf=conf))


def spark_job(events: str, out: str, *, job: str, heap: str, runs: int, conf: dict[str, str]) -> dict[str, Any]:
    """Run a job as ``flowctl analyze`` does, `runs` times in one session; the first one pays for compiling.

    Each run has an empty folder, or it would find that it has read everything.
    """
    import shutil

    from flowctl.pipeline.run import run

    with open_spark(heap, conf) as spark:
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - Spark has no public way to the process
        pid = int(jvm.java.lang.ProcessHandle.current().pid())
        done = []
        with HeapWatch(jvm) as heap_watch:
            for _ in range(runs):
                shutil.rmtree(out, ignore_errors=True)
                Path(out).mkdir(parents=True)
                found = timed(lambda: run(spark, events, out, [job]), pid)
                result = found.pop("result")
                if result.failed:
                    raise RuntimeError(str(result.errors))
                done.append(found)
        return {
            "runs": done,
            "jvm_peak_bytes": peak_bytes(pid),
            "heap_old_bytes": heap_watch.old_bytes,
            "python_peak_bytes": peak_bytes(),
            "summary": result.jobs[job].summary,
            "outputs": dict(result.outputs),
        }


def duckdb_sessions(events: str, out: str, *, memory: str, runs: int) -> dict[str, Any]:
    """Make the sessions table with DuckDB (`pipeline.sql`)."""
    import shutil

    import duckdb

    from pipeline.sql import sessions_sql

    target = Path(out) / "sessions"
    connection = duckdb.connect()
    connection.execute(f"set threads={THREADS}")
    connection.execute(f"set memory_limit='{memory}'")
    connection.execute(f"set temp_directory='{out}/spill'")
    connection.execute("set timezone='UTC'")
    query = sessions_sql(f"{events}/flow_closes/**/*.parquet")
    by_hour = "format parquet, compression zstd, partition_by (date, hour)"
    done = []
    for _ in range(runs):
        shutil.rmtree(out, ignore_errors=True)
        target.parent.mkdir(parents=True)
        found = timed(lambda: connection.execute(f"copy ({query}) to '{target}' ({by_hour})"), "self")
        found.pop("result")
        done.append(found)
    return {
        "runs": done,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "outputs": {"sessions": str(target)},
    }


def synth(events: str, _: str, *, count: int, seed: int, heap: str, conf: dict[str, str]) -> dict[str, Any]:
    """Make `count` events in the folder `events`."""
    from flowctl.pipeline.synth.job import run
    from flowctl.pipeline.synth.people import SynthOptions

    with open_spark(heap, conf) as spark:
        pid = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())  # noqa: SLF001 - as above
        found = timed(lambda: run(spark, events, SynthOptions(events=count, seed=seed)), pid)
        return {**found, "result": found["result"].summary, "jvm_peak_bytes": peak_bytes(pid)}


def abuse(events: str, out: str, *, truth: str, heap: str, conf: dict[str, str]) -> dict[str, Any]:
    """Judge the addresses and say how many of the planted ones were found."""
    from flowctl.pipeline.abuse.job import JOB, AbuseOptions
    from flowctl.pipeline.run import run
    from flowctl.pipeline.synth.people import SynthOptions

    made = SynthOptions()  # evidence ages to now, and this is when the data end
    options = AbuseOptions(truth=truth, now_s=made.start_s + made.days * 86_400)
    with open_spark(heap, conf) as spark:
        found = timed(lambda: run(spark, events, out, [JOB], {JOB.name: options}), "self")
        return {**found, "result": found["result"].jobs[JOB.name].summary}


ENGINES: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "spark": spark_job,
    "duckdb": duckdb_sessions,
    "synth": synth,
    "abuse": abuse,
}


def main() -> None:
    """Measure and print."""
    engine, events, out, arguments = sys.argv[1:]
    print(json.dumps(ENGINES[engine](events, out, **json.loads(arguments)), default=str))


if __name__ == "__main__":
    main()
