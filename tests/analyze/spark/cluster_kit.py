"""A Spark standalone cluster on loopback for tests: master and workers from the pyspark package, as processes.

`open_cluster` starts them and ends them. Every process is started in a session (process group) of its own, because a
worker starts executors, which have to go with it; what is ended is always such a group, by its id, and nothing is ever
looked for by name. Ports are chosen by the system (port 0) and read from the logs, so that two runs can stand side by
side; the REST gateway of the master, which has a fixed port, is off.

Waiting is bounded everywhere: by `PATIENCE_S` for a start, by `JOB_S` for a job. A cluster that does not come up fails
with the end of its log, and not with a time-out alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowctl.analyze.spark.java import find_java, java_option

HERE = Path(__file__).parent
DRIVER = HERE / "cluster_driver.py"
PATIENCE_S = 60.0
"""A JVM on a machine that is busy with other tests needs seconds to start; only a cluster that hangs needs a minute."""
JOB_S = 900.0
"""Seconds on a quiet machine; the rest is for one that runs other tests at the same time."""
TERM_S = 10.0
DAEMON_MB = 256
"""Heap of master and worker: they only keep the books. The executors have theirs beside it."""
WORKER_MB = 1024
EXECUTOR_MB = 768
QUANTILES = {f"first_frame_p{of}_ms": ("first_frame_ms", of / 100) for of in (50, 95)} | {
    f"delay_p{of}_ms": ("delay_p50_ms", of / 100) for of in (50, 95, 99)
}
"""Column that a sketch tells -> what it is a quantile of, and which one."""


@dataclass
class Daemon:
    """One process of the cluster.

    Attributes:
        process: leader of its own process group.
    """

    name: str
    process: subprocess.Popen
    log: Path

    def text(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the first match in the log as soon as there is one."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if found := re.search(pattern, self.text()):
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(f"{self.name}: no {pattern!r} in its log, which ends:\n{self.text()[-2000:]}")

    def kill(self) -> None:
        """End it as a machine ends whose power is cut: the executors that it started go with it, without a word."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(TERM_S)

    def stop(self) -> None:
        """End it in order, or by force after `TERM_S`; then whatever of its group is left."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(TERM_S)
        self.kill()


@dataclass
class Cluster:
    """A running cluster.

    Attributes:
        url: of the master, ``spark://127.0.0.1:PORT``.
    """

    url: str
    master: Daemon
    workers: list[Daemon]
    folder: Path = field(default_factory=Path)


def spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def java_options() -> str:
    before = os.environ.get("JDK_JAVA_OPTIONS", "")
    return f"{before} -XX:+UseSerialGC{java_option(find_java(), before)}"


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of master and workers: loopback only, small heaps, nothing written outside of `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_", "PYTHON"))}
    return {
        **kept,
        "SPARK_HOME": str(spark_home()),
        "JDK_JAVA_OPTIONS": java_options(),  # that the executors inherit
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_PUBLIC_DNS": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_DAEMON_MEMORY": f"{DAEMON_MB}m",
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
        # Without heartbeats for this long a worker counts as dead; a killed one is noticed at once, by its connection.
        "SPARK_DAEMON_JAVA_OPTS": "-Dspark.worker.timeout=20",
    }


def start(name: str, folder: Path, *arguments: str) -> Daemon:
    log = folder / f"{name}.log"
    command = [str(spark_home() / "bin" / "spark-class"), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment(folder),
            start_new_session=True,
        )
    return Daemon(name, process, log)


@contextlib.contextmanager
def open_cluster(folder: Path, workers: int = 2) -> Iterator[Cluster]:
    folder.mkdir(parents=True, exist_ok=True)
    daemons: list[Daemon] = []
    try:
        common = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        master = start("master", folder, "org.apache.spark.deploy.master.Master", *common)
        daemons.append(master)
        url = master.wait_for(r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")[1]
        size = ("--cores", "1", "--memory", f"{WORKER_MB}m")
        for number in range(workers):
            work = ("--work-dir", str(folder / f"work{number}"))
            kind = "org.apache.spark.deploy.worker.Worker"
            daemons.append(start(f"worker{number}", folder, kind, *common, *size, *work, url))
        for worker in daemons[1:]:
            worker.wait_for("Successfully registered with master")
        yield Cluster(url, master, daemons[1:], folder)
    finally:
        for daemon in reversed(daemons):  # the master last: workers take leave of it
            daemon.stop()


def drive(master: str, folder: Path, **arguments: Any) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    path = os.pathsep.join([str(HERE.parents[1] / "kits"), os.environ.get("PYTHONPATH", "")])
    log = folder / "driver.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, DRIVER, master, json.dumps({"folder": str(folder), **arguments})],
            stdout=subprocess.PIPE,
            stderr=output,
            cwd=folder,
            env={**kept, "SPARK_LOCAL_IP": "127.0.0.1", "TMPDIR": str(folder), "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            answer, _ = child.communicate(timeout=JOB_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # its JVM too, if it left one
            child.wait(TERM_S)
    ended = log.read_text("utf-8", errors="replace")[-3000:]
    assert child.returncode == 0, f"the driver ended with {child.returncode}:\n{ended}"
    return json.loads(answer.decode().splitlines()[-1])


def rows_of(path: str | Path) -> list[tuple[Any, ...]]:
    """Return the rows of an output table, sorted, the names of its columns first.

    Order is no property of a table: tasks write their parts side by side. Values are compared as they are, floats too.
    """
    import pyarrow.dataset

    table = pyarrow.dataset.dataset(str(path), format="parquet", partitioning="hive").to_table()
    names = sorted(table.column_names)
    columns = [table.column(name).to_pylist() for name in names]
    return [tuple(names), *sorted(zip(*columns, strict=True), key=repr)]


def without_sketches(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return rows of `rows_of` without the quantiles of those whose ``rank_error`` says that they are not exact."""
    names, *values = rows
    if "rank_error" not in names:
        return rows
    error = names.index("rank_error")
    guessed = [name in QUANTILES for name in names]
    kept = [tuple(None if row[error] and guess else v for v, guess in zip(row, guessed, strict=True)) for row in values]
    return [names, *sorted(kept, key=repr)]


def difference(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]]) -> str:
    if left == right or (repr(left) == repr(right)):  # repr: NaN equals NaN here
        return ""
    if left[0] != right[0]:
        return f"columns differ: {sorted(set(left[0]) ^ set(right[0]))}"
    if len(left) != len(right):
        return f"{len(left) - 1} rows on one side, {len(right) - 1} on the other"
    for one, other in zip(left[1:], right[1:], strict=True):
        if repr(one) != repr(other):
            cells = zip(left[0], one, other, strict=True)
            return "; ".join(f"{name}: {a!r} and {b!r}" for name, a, b in cells if repr(a) != repr(b))
    return ""
