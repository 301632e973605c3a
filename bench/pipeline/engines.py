"""Children of `whole/pipeline.py`: one process measures one engine on one data set and prints a JSON line.

``python -m pipeline.engines ENGINE EVENTS OUT ARGUMENTS``. A process per measurement, because memory that a
process has taken once it seldom gives back: the peak of a run is only its own in a fresh process. Both engines get
two threads, read the same files, check their rows and write the same tables of Parquet (zstd) by hour. Processor time
is that of Java and Python together, Java's compilers and collector included.
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kits"))  # `synth`
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


def timed(work: Callable[[], Any], *pids: int) -> dict[str, Any]:
    """Run `work`; return wall time, processor time of this process and others, and what `work` returned."""
    every: tuple[int | str, ...] = ("self", *pids)
    began, used = time.monotonic(), sum(processor_s(pid) for pid in every)
    result = work()
    spent = sum(processor_s(pid) for pid in every) - used
    return {"wall_s": time.monotonic() - began, "cpu_s": spent, "result": result}


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
    from flowctl.analyze.spark.session import SessionOptions, session

    return session(SessionOptions(master=f"local[{THREADS}]", conf={"spark.driver.memory": heap, **conf}))


def spark_job(events: str, out: str, *, job: str, heap: str, runs: int, conf: dict[str, str]) -> dict[str, Any]:
    """Run a job as ``flowctl analyze`` does, `runs` times in one session; the first one pays for compiling.

    Each run has an empty folder, or it would find that it has read everything.
    """
    import shutil

    from flowctl.analyze.run import run

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
            "outputs": {"open_sessions": f"{out}/parts/open_sessions", **result.outputs},
        }


def duckdb_sessions(events: str, out: str, *, memory: str, runs: int) -> dict[str, Any]:
    """Make the tables of `sessions` with DuckDB (`pipeline.sql`)."""
    import shutil

    import duckdb

    from flowctl.analyze.viewers.sessions import COLUMNS, MADE_COLUMNS, OPEN_COLUMNS
    from pipeline.sql import checks_sql, open_rows, rows_of, sessions_sql, still_open

    connection = duckdb.connect()
    connection.execute(f"set threads={THREADS}")
    connection.execute(f"set memory_limit='{memory}'")
    connection.execute(f"set temp_directory='{out}/spill'")
    connection.execute("set timezone='UTC'")
    by_hour = "format parquet, compression zstd, partition_by (date, hour)"
    closed = sessions_sql(rows_of(events, "flow_closes"), tuple(COLUMNS))
    opened = sessions_sql(open_rows(events), tuple(MADE_COLUMNS))

    def work() -> None:
        for name in ("flow_closes", "flow_opens"):
            ((rows, bad),) = connection.execute(checks_sql(events, name)).fetchall()
            if bad:
                raise RuntimeError(f"{bad} of {rows} rows of {name} fail a check")
        connection.execute(f"copy ({closed}) to '{out}/sessions' ({by_hour})")
        connection.execute(f"copy ({opened}) to '{out}/open_sessions' ({by_hour})")
        (Path(out) / "sessions_open").mkdir()
        still = f"{out}/sessions_open/part-0.parquet"
        latest = still_open(out, tuple(OPEN_COLUMNS))
        connection.execute(f"copy ({latest}) to '{still}' (format parquet, compression zstd)")
        tables = " union all by name ".join(
            f"select blame, closed_by, peer_ip from read_parquet('{out}/{name}/**/*.parquet')"
            for name in ("sessions", "sessions_open")
        )
        count = "count(*), countif(closed_by = 'open'), countif(peer_ip is null)"
        connection.execute(f"select blame, {count} from ({tables}) group by blame").fetchall()

    done = []
    for _ in range(runs):
        shutil.rmtree(out, ignore_errors=True)
        Path(out).mkdir(parents=True)
        found = timed(work)
        found.pop("result")
        done.append(found)
    return {
        "runs": done,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "outputs": {name: f"{out}/{name}" for name in ("sessions", "sessions_open", "open_sessions")},
    }


def synth(events: str, _: str, *, count: int, seed: int, heap: str, conf: dict[str, str]) -> dict[str, Any]:
    from synth.make import make
    from synth.people import SynthOptions

    with open_spark(heap, conf) as spark:
        pid = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())  # noqa: SLF001 - as above
        found = timed(lambda: make(spark, events, SynthOptions(events=count, seed=seed)), pid)
        return {**found, "jvm_peak_bytes": peak_bytes(pid)}


def abuse(events: str, out: str, *, heap: str, conf: dict[str, str]) -> dict[str, Any]:
    """Judge the addresses and say how many of the planted ones were found."""
    from synth.make import found as found_in
    from synth.people import SynthOptions

    from flowctl.analyze.abuse.job import JOB
    from flowctl.analyze.options import AbuseOptions
    from flowctl.analyze.run import run

    made = SynthOptions()  # evidence ages to now, and this is when the data end
    options = AbuseOptions(now_s=made.start_s + made.days * 86_400)
    with open_spark(heap, conf) as spark:
        found = timed(lambda: run(spark, events, out, [JOB], {JOB.name: options}))
        return {**found, "result": found_in(spark, found["result"].outputs["abuse_scores"], events)}


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
