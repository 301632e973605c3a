"""Starts and ends a Spark session: settings that fit the jobs, quiet logs, errors in one line, and no process left.

The Java process is started here, not by Spark's own builder, for one reason: its output goes to a log file. Spark and
Java print banners, warnings and stack traces; a user of ``flowctl analyze`` sees an error in one line and the name of
that file. Everything that Spark takes as a setting can be set; what is given wins over what is chosen here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowctl.errors import ConfigError, FlowctlError
from flowctl.pipeline.spark.classarchive import java_option
from flowctl.pipeline.spark.java import Java, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_DRIVER_MEMORY: Final = "2g"
"""Of Java. Jobs collect next to nothing, so it does not grow with the data; when local, it is that of all work."""
DEFAULT_SHUFFLE_PARTITIONS: Final = 17  # an odd number tells it from one that somebody chose
"""For data that nothing is known of; adaptive execution joins small ones. Jobs set it by the size of their input."""
EXTRA_HINT: Final = "in flowctl's source folder: pip install '.[pipeline]'"
_LOG4J: Final = """
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c{1}: %m%n%ex
"""
_STOP_TIMEOUT_S: Final = 20
_FOLDER: Final = "flowctl-spark-"
"""Begin of the names of folders for Java's log, among the temporary files; the number of the process follows."""
_KEPT_LOGS: Final = 5
"""Logs of failed runs that are kept, of each user."""
_KEPT_S: Final = 7 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How to start Spark.

    Args:
        master: ``local[*]``, ``local[2]``, ``spark://host:port``, ``yarn``, ``k8s://...``. None: what `conf` says
            as ``spark.master``, else ``local[*]``. A ``spark-defaults.conf`` does not change it: a job started
            without ``--master`` stays on this machine.
        app_name: name shown in Spark's own pages.
        conf: settings of Spark, which win over everything chosen here.
        driver_memory: heap of the driver's Java, like ``2g``.
        shuffle_partitions: of joins and aggregations. None: `DEFAULT_SHUFFLE_PARTITIONS`, and jobs choose by data.
        ui: whether Spark's own pages are served (on the address of the driver).
        log_file: where Java's output goes. None: a file of its own in the folder for temporary files.
    """

    master: str | None = None
    app_name: str = "flowctl"
    conf: Mapping[str, str] = field(default_factory=dict)
    driver_memory: str = DEFAULT_DRIVER_MEMORY
    shuffle_partitions: int | None = None
    ui: bool = False
    log_file: Path | None = None


class SparkError(FlowctlError):
    """Spark could not do what it was asked; the message has the cause in one line, the hint names the log."""


def check_available() -> None:
    """See to it that PySpark and what goes with it are installed.

    Raises:
        ConfigError: a package of the extra ``pipeline`` is missing.
    """
    missing = [name for name in ("pyspark", "pyarrow", "pandas") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the pipeline needs what is not installed: {', '.join(missing)}", hint=EXTRA_HINT)


def settings_of(options: SessionOptions, log4j: Path | None = None, java: Java | None = None) -> dict[str, str]:
    """Return every setting of Spark that follows from `options`.

    Args:
        options: how to start it.
        log4j: file with the settings of Java's log. None: Spark's own.
        java: that is to run it; its class archive is used, if there is one. None: not known.
    """
    master = options.master or options.conf.get("spark.master", "local[*]")
    settings = {
        "spark.app.name": options.app_name,
        "spark.master": master,
        "spark.driver.memory": options.driver_memory,
        "spark.sql.shuffle.partitions": str(options.shuffle_partitions or DEFAULT_SHUFFLE_PARTITIONS),
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        # Python reads times as UTC only if the machine's zone does not come in between.
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # 96 bit times, an old default, have no statistics in the footers.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.parquet.compression.codec": "zstd",
        # A recorder writes many files of some hundred kB; opening one costs about as much as reading so much.
        "spark.sql.files.openCostInBytes": str(1 << 20),
        # Java does not compile methods of more than 8000 bytes, and Spark makes such of wide aggregations; with this it
        # cuts them in parts instead.
        "spark.sql.codegen.hugeMethodLimit": "8000",
        # Sums by (node, conn_id) lie right for a join by (node, conn_id, record): no second shuffle.
        "spark.sql.requireAllClusterKeysForCoPartition": "false",
        # For small data it takes longer to compile code for a query than to do without, see `generate_code`.
        **({} if _CODE.keys() & options.conf.keys() else _CODE),
        "spark.ui.enabled": "true" if options.ui else "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
    }
    if log4j is not None:
        own = f"-Dlog4j2.configurationFile=file:{log4j} -Duser.timezone=UTC"
        others = _java_options(options.conf)
        archive = "" if java is None else java_option(java, others)
        settings["spark.driver.extraJavaOptions"] = own + _collector(master, others) + archive
        settings["spark.executor.extraJavaOptions"] = "-Duser.timezone=UTC"
    if master.startswith("local") or "//127.0.0.1" in master or "//localhost" in master:
        # On this machine alone: nothing listens elsewhere, and a host name that does not resolve does no harm.
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        settings |= {"spark.pyspark.python": sys.executable, "spark.pyspark.driver.python": sys.executable}
    return settings | dict(options.conf)


def _java_options(conf: Mapping[str, str]) -> str:
    """Return what the user, or the environment, has Java told besides."""
    return " ".join(
        (conf.get("spark.driver.defaultJavaOptions", ""), *(os.environ.get(name, "") for name in _JAVA_OPTIONS))
    )


def _collector(master: str, others: str) -> str:
    """Return the option of Java that names the collector for work on this machine; nothing where somebody named one.

    Work in batches needs no short pauses: the collector made for throughput takes a twentieth less time than Java's own
    choice, and a fifth less memory (`sessions`, 10 million events, two cores). Java does not start with two of them.
    """
    return "" if re.search(r"-XX:\+Use\w*GC\b", others) or not master.startswith("local") else " -XX:+UseParallelGC"


_JAVA_OPTIONS: Final = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
_own: dict[str, Any] = {}
"""The Java process that this module started and its log; empty while there is none. One per process, as Spark has."""


PARTITION_BYTES: Final = 12 << 20
"""Of input per partition of a shuffle: some 120,000 connections, whose sums and names (a hash join, which cannot spill)
take some 150 MB together, so that two tasks fit into the 2 GiB of the driver whatever the data."""
MAX_PARTITIONS: Final = 4096


@contextlib.contextmanager
def partitions_for(spark: SparkSession, size_bytes: int) -> Iterator[None]:
    """Within this context shuffles have as many partitions as fit the data, if nobody has chosen a number.

    Args:
        spark: session.
        size_bytes: of the input, as it lies there.
    """
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    if before != str(DEFAULT_SHUFFLE_PARTITIONS):
        yield
        return
    wanted = min(MAX_PARTITIONS, max(spark.sparkContext.defaultParallelism, -(-size_bytes // PARTITION_BYTES)))
    spark.conf.set(name, str(wanted))
    try:
        yield
    finally:
        spark.conf.set(name, before)


GENERATED_FROM_BYTES: Final = 8 << 20
"""Of a table, as its files are: some 100,000 events. `sessions`, `abuse` and `fleet` on two cores, 4,000 events: 33 s
and 48 s of processor time, against 44 s and 68 s with generated code; 300,000 events (25 MB): as long either way."""
_WHOLE_STAGE: Final = "spark.sql.codegen.wholeStage"
_FACTORY: Final = "spark.sql.codegen.factoryMode"
_CODE: Final = {_WHOLE_STAGE: "false", _FACTORY: "NO_CODEGEN"}


def generate_code(spark: SparkSession, size_bytes: int) -> None:
    """Have queries compiled from here on if the data is worth it, and nobody has chosen otherwise.

    Args:
        spark: session.
        size_bytes: of a table that is read or made, as its files are.
    """
    if size_bytes >= GENERATED_FROM_BYTES and spark.conf.get(_FACTORY) == _CODE[_FACTORY]:
        spark.conf.set(_WHOLE_STAGE, "true")
        spark.conf.set(_FACTORY, "FALLBACK")


def log_path() -> Path | None:
    """Return where the output of the running Java goes; None while none runs that was started here."""
    return _own.get("log")


def open_session(options: SessionOptions | None = None) -> SparkSession:
    """Start Spark, or return the session that runs in this process already.

    Args:
        options: how. None: all defaults.

    Raises:
        ConfigError: PySpark or Java is missing, or a setting is wrong.
        SparkError: it did not start.
    """
    options = options or SessionOptions()
    check_available()
    # It says at each use that it was not tested with pandas 3; what is used of both here is.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    remove_old_logs(Path(tempfile.gettempdir()), time.time())
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
    log = options.log_file or folder / "spark.log"
    log4j = folder / "log4j2.properties"
    log4j.write_text(_LOG4J, encoding="ascii")
    _own.update(log=log, folder=folder)
    with mapped_errors():
        return _start(settings_of(options, log4j, java), log)


def remove_old_logs(folder: Path, now_s: float) -> None:
    """Remove what failed runs have left: all but the newest five, and what is older than a week.

    The folder of a process that is still there stays, and one without a number that changed within the last hour.

    Args:
        folder: where temporary files are.
        now_s: seconds since the epoch.
    """
    own = []
    for path in folder.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                log = path / "spark.log"
                own.append((log.stat().st_mtime if log.is_file() else status.st_mtime, path))
    for number, (changed_s, path) in enumerate(sorted(own, reverse=True)):
        age_s = now_s - changed_s
        if not _in_use(path, age_s) and (age_s > _KEPT_S or number >= _KEPT_LOGS):
            shutil.rmtree(path, ignore_errors=True)


def _in_use(path: Path, age_s: float) -> bool:
    """Return whether the run that a folder belongs to may still go on."""
    found = re.match(rf"{_FOLDER}(\d{{1,9}})-", path.name)
    if found is None:
        return age_s < 3_600
    try:
        os.kill(int(found.group(1)), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _start(settings: Mapping[str, str], log: Path) -> SparkSession:
    """Launch Java with its output in `log`, and return the session."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    if settings["spark.master"].startswith("local"):
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # The workers' Python: spark-submit would read the setting, here it is this variable only.
    os.environ.setdefault("PYSPARK_PYTHON", settings.get("spark.pyspark.python", "python3"))
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    if SparkContext._gateway is None:  # noqa: SLF001 - no public way to say where Java writes
        with log.open("ab") as file:
            gateway = launch_gateway(conf, {"stdout": file, "stderr": subprocess.STDOUT})  # type: ignore[no-untyped-call]  # it has no types
    else:
        gateway = SparkContext._gateway  # noqa: SLF001 - no public way
    _own["process"] = getattr(gateway, "proc", None)
    context = SparkContext(gateway=gateway, conf=conf)
    return SparkSession(context)


def close_session(spark: SparkSession | None, *, patience_s: float = _STOP_TIMEOUT_S) -> None:
    """Stop Spark and end its Java process; done already: nothing.

    Args:
        spark: the session. None: only the process that was started here.
        patience_s: how long Java may take to end before it is killed, in seconds.
    """
    from pyspark import SparkContext

    if spark is not None:
        with contextlib.suppress(Exception):
            spark.stop()
    process = _own.pop("process", None)
    if not _own.pop("failed", False) and "folder" in _own:
        shutil.rmtree(_own.pop("folder"), ignore_errors=True)  # the log of what went well interests nobody
    gateway = SparkContext._gateway  # noqa: SLF001 - no public way
    if process is None or gateway is None:
        return
    with contextlib.suppress(Exception):
        gateway.shutdown()
    SparkContext._gateway = None  # noqa: SLF001 - no public way
    SparkContext._jvm = None  # noqa: SLF001 - no public way
    with contextlib.suppress(OSError):
        process.stdin.close()  # what Java waits for
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def session(options: SessionOptions | None = None) -> Iterator[SparkSession]:
    """Start Spark, map the errors of what is done with it, and leave no process behind, also after Ctrl-C.

    Raises:
        ConfigError: see `open_session`.
        SparkError: Spark failed in between.
    """
    spark = None
    try:
        spark = open_session(options)
        with mapped_errors():
            yield spark
    finally:
        close_session(spark)


@contextlib.contextmanager
def mapped_errors() -> Iterator[None]:
    """Within this context errors of Spark and of the way to Java become a `SparkError` in one line.

    Raises:
        SparkError: the cause in one line, with where the log is.
    """
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, Py4JNetworkError) as error:
        _own["failed"] = True
        raise SparkError(one_line(error), hint=_hint(str(error))) from error


_GONE: Final = re.compile(r"FileNotFoundException|FILE_NOT_EXIST|NoSuchFileException|NoSuchFileError")


def _hint(told: str = "") -> str:
    if _GONE.search(told):
        return (
            "a file went away while it was read: the recorder removes its oldest files at events_max "
            "of disk; copy the folder first, or raise events_max"
        )
    log = log_path()
    return f"Spark's own log is {log}" if log is not None and log.exists() else "Spark's own log has more"


_CLASS: Final = re.compile(r"^(?:: )?(?:Caused by: )?(?:[a-z_$][\w$]*\.)+[A-Z][\w$]*(?:Exception|Error)?:\s*")
_NOISE: Final = ("at ", "An error occurred while calling ", "Driver stacktrace:", "Job aborted due to stage failure:")
"""Beginnings of lines that say where something was seen, not what happened."""
_LINE_LENGTH: Final = 400
_PYTHON_WORKER: Final = "An exception was thrown from the Python worker"
_PYTHON_ERROR: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt)(?:: .*)?$")
"""The last line of a Python traceback, which alone says what happened."""


def one_line(error: BaseException) -> str:
    """Return what an error of Spark says in one line of at most 400 characters, without a stack trace.

    The first line says what was being done ("error while reading file ..."), the innermost cause what happened; of an
    error in Python of a worker, the last line of its traceback does. An error that is not Spark's says so itself.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not isinstance(error, (PySparkException, Py4JError)):
        return f"{type(error).__name__}: {lines[0] if lines else 'no more is known'}"[:_LINE_LENGTH]
    if _PYTHON_WORKER in str(error):
        python = [line for line in lines if _PYTHON_ERROR.match(line) and not _CLASS.match(line)]
        if python:
            return f"Spark failed: in Python of a worker: {python[-1]}"[:_LINE_LENGTH]
    causes = [_CLASS.sub("", line) for line in lines if line.startswith("Caused by: ")]
    told = [_CLASS.sub("", line) for line in lines if not line.startswith((*_NOISE, "Caused by: "))]
    first = told[0] if told else type(error).__name__
    text = f"{first} {causes[-1]}" if causes and causes[-1] not in first else first
    return f"Spark failed: {text}"[:_LINE_LENGTH]
