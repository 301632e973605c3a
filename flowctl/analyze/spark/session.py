"""Starts and ends a Spark session: settings that fit the data, quiet logs, errors in one line.

Java's output goes to a log file: while Spark starts it, standard output and standard error of this process are that
file, which Java inherits. A user of ``flowctl analyze`` sees an error in one line and the name of that file. Java ends
with this process, by whatever way that ends, because it waits for the end of its standard input. Everything that Spark
takes as a setting can be set; what is given wins over what is chosen here.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.engine import SPARK, EngineError, check_available
from flowctl.analyze.spark.java import Java, find_java, java_option
from flowctl.core.text.files import umask
from flowctl.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG4J: Final = """
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c{1}: %m%n%ex
"""
KEPT_LOGS: Final = 10
"""Most folders of Java's logs that are kept among a user's temporary files: of failed runs, and of running ones."""
_TEMPORARY: Final = "tmp"
"""Folder, in that of the log, for temporary files of Java such as blocks of shuffles."""
_MASTER: Final = re.compile(
    r"local(\[(\*|[1-9]\d*)(, *\d+)?\])?|local-cluster\[.+\]|spark://.+:\d+|sc://.+|yarn|k8s://.+", re.DOTALL
)
"""Values for where Spark runs, see "Master URLs" in its documentation."""
_CHOSEN: Final = "spark.flowctl.chosen"
"""Setting that names the settings chosen by the user, which `fit` leaves alone."""
PARTITION_BYTES: Final = 12 << 20
"""Input per partition of a shuffle: two tasks fit into the 2 GiB of the driver whatever the data."""
MAX_PARTITIONS: Final = 4096
LARGE_FROM_BYTES: Final = 8 << 20
"""Size of records from which code is generated, some 100,000 rows. Without generated code, 4,000 rows took two thirds
of the processor time; 300,000 rows (25 MB) took more."""
SMALL_JAVA_BYTES: Final = 32 << 20
"""Size of records below which Java's second compiler costs more than it saves. `sessions` and `abuse` of 5,000 events
in a day: 30 s of processor time without it, 55 s with it. Long runs are two to three times faster with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How to start Spark; a ``spark-defaults.conf`` does not change `master`, so a job stays here by default."""

    master: str | None = None  # ``local[2]``, ``spark://host:port``, ``yarn`` ...; None: ``spark.master``, ``local[*]``
    conf: Mapping[str, str] = field(default_factory=dict)  # settings of Spark, which win over everything chosen here
    size_bytes: int | None = None  # of the records, as far as known; for little, Java compiles in a hurry
    log_file: Path | None = None  # where Java's output goes; None: a file of its own


class SparkError(EngineError):
    """Spark could not do what it was asked; the message has the cause in one line, the hint names the log."""


def fitting(size_bytes: int, cores: int) -> dict[str, str]:
    """Return the settings that fit records of that size, as they lie there, where so many cores work at a time."""
    large = size_bytes >= LARGE_FROM_BYTES
    partitions = min(MAX_PARTITIONS, max(cores, -(-size_bytes // PARTITION_BYTES))) if large else 1
    return {
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.sql.adaptive.enabled": str(large).lower(),
        "spark.sql.codegen.wholeStage": str(large).lower(),
        "spark.sql.codegen.factoryMode": "FALLBACK" if large else "NO_CODEGEN",
    }


def fit(spark: SparkSession, size_bytes: int) -> None:
    """Give a session the settings that fit records of that size, but for those that somebody chose."""
    chosen = (spark.conf.get(_CHOSEN, "") or "").split()
    for name, value in fitting(size_bytes, parallelism(spark)).items():
        if name not in chosen:
            spark.conf.set(name, value)


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks run at a time."""
    if (context := context_of(spark)) is not None:
        return int(context.defaultParallelism)
    told = spark.conf.get("spark.default.parallelism", None)
    return int(told) if told else _partitions(spark)


def _partitions(spark: SparkSession) -> int:
    parts = spark.range(1 << 16).selectExpr("spark_partition_id() as part").selectExpr("max(part) as last")
    return int(parts.collect()[0]["last"]) + 1


def context_of(spark: SparkSession) -> Any:
    """Return what a session of Spark Connect has not: the context, in this process."""
    return getattr(spark, "sparkContext", None)


def settings_in(spark: SparkSession) -> dict[str, str]:
    context = context_of(spark)
    return dict(spark.conf.getAll if context is None else context.getConf().getAll())


def cancel(spark: SparkSession) -> None:
    context = context_of(spark)
    spark.interruptAll() if context is None else context.cancelAllJobs()


def settings_of(options: SessionOptions, log4j: Path | None = None, java: Java | None = None) -> dict[str, str]:
    """Return every setting of Spark that follows from `options`, the log's own settings and the Java that is to run."""
    master = options.master or options.conf.get("spark.master", "local[*]")
    if not _MASTER.fullmatch(master):
        raise ConfigError(
            f"--master is {master!r}, which is no place where Spark runs",
            hint="allowed are local[N], spark://HOST:PORT, sc://HOST:PORT, yarn and k8s://URL",
        )
    settings = {
        "spark.app.name": "flowctl",
        "spark.master": master,
        # Jobs collect next to nothing, so it does not grow with the data; when local, it is that of all work.
        "spark.driver.memory": "2g",
        "spark.sql.session.timeZone": "UTC",
        # Columns are named exactly: a file may have another `Stream` beside `stream`.
        "spark.sql.caseSensitive": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # 96 bit times, an old default, have no statistics in the footers.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
        # A recorder writes many files of some hundred kB; opening one costs about as much as reading so much.
        "spark.sql.files.openCostInBytes": str(1 << 20),
        # A job of Spark to list folders takes longer than listing hundreds of hours here.
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000",
        # Java does not compile methods of more than 8000 bytes, and Spark makes such of wide aggregations; with this it
        # cuts them in parts instead.
        "spark.sql.codegen.hugeMethodLimit": "8000",
        # Sketches of quantiles are objects, and an aggregation of more than 128 groups of them sorts its input, which
        # takes three times as long. So many groups of them, of a few kB at most, fit the memory of a task.
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "20000",
        # Spark asks Java several times per expression to remember which line of Python it came from.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        # Sums by (node, conn_id) lie right for a join by (node, conn_id, record): no second shuffle.
        "spark.sql.requireAllClusterKeysForCoPartition": "false",
        "spark.ui.enabled": "false",
        # Hadoop sets the rights of files by a mask of its own, not by that of the process.
        "spark.hadoop.fs.permissions.umask-mode": f"{umask():03o}",
        **fitting(0, 1),
        _CHOSEN: " ".join(options.conf),
    }
    local = master.startswith("local")
    if log4j is not None:
        own = f"-Dlog4j2.configurationFile=file:{log4j} -Duser.timezone=UTC"
        names = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
        given = (options.conf.get("spark.driver.defaultJavaOptions", ""), *(os.environ.get(name, "") for name in names))
        others = " ".join(given)
        # Work in batches needs no short pauses: the parallel collector takes a twentieth less time than Java's own
        # choice, and a fifth less memory (`sessions`, 10 million events, two cores); with little to collect, one thread
        # takes a twentieth less again. Java does not start with two of them.
        small = options.size_bytes is not None and options.size_bytes < SMALL_JAVA_BYTES
        if "-Djava.io.tmpdir" not in others:  # where spark.local.dir is not set either: shuffles are for nobody's eyes
            own += f" -Djava.io.tmpdir={log4j.parent / _TEMPORARY}"
        if local and not re.search(r"-XX:\+Use\w*GC\b", others):
            own += f" -XX:+Use{'Serial' if small else 'Parallel'}GC"
        if local and small and "Tiered" not in others:
            own += " -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"  # whose own is 48 MB: too little for Spark
        settings["spark.driver.extraJavaOptions"] = own + ("" if java is None else java_option(java, others))
        settings["spark.executor.extraJavaOptions"] = "-Duser.timezone=UTC"
    if local or "//127.0.0.1" in master or "//localhost" in master:
        # On this machine alone: nothing listens elsewhere, and a host name that does not resolve does no harm.
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        settings |= {"spark.pyspark.python": sys.executable, "spark.pyspark.driver.python": sys.executable}
    if local and not master.startswith("local-cluster"):
        # Every user of this machine reaches the driver's ports, and Java makes objects of what is sent there. Spark
        # makes the secret itself, so that it stands on no command line; a cluster's has to be on its workers as well.
        settings["spark.authenticate"] = "true"
    return settings | dict(options.conf)


_own: dict[str, Any] = {}
"""Log of the Java that was started here and its folder, and whether anything failed; one per process, as Spark has."""


def open_session(options: SessionOptions | None = None) -> SparkSession:
    """Start Spark, or return the session that runs in this process already."""
    options = options or SessionOptions()
    check_available(SPARK)
    # It says at each use that it was not tested with pandas 3; what is used of both here is.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    if (options.master or "").startswith(_CONNECT):
        return _connected(options)
    if _SUBMITTED in os.environ:
        return _submitted(options)
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    if "log" not in _own:
        folder = log_folder(Path(tempfile.gettempdir()))
        (folder / "log4j2.properties").write_text(_LOG4J, encoding="ascii")
        (folder / _TEMPORARY).mkdir()
        _own.update(folder=folder, log=options.log_file or folder / "spark.log")
        atexit.register(_forget)
    settings = settings_of(options, _own["folder"] / "log4j2.properties", java)
    if settings["spark.master"].startswith("local"):
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # The workers' Python: spark-submit would read the setting, here it is this variable only.
    os.environ.setdefault("PYSPARK_PYTHON", settings.get("spark.pyspark.python", "python3"))
    with mapped_errors(), _output_to(_own["log"]):
        return SparkSession.builder.config(map=dict[str, Any](settings)).getOrCreate()


_CONNECT: Final = "sc://"
_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""Variable of programs that spark-submit has started, which has started Java."""


def is_submitted() -> bool:
    return _SUBMITTED in os.environ


def _submitted(options: SessionOptions) -> SparkSession:
    """Return the session of a program that spark-submit has started, whose settings stay."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    with mapped_errors():
        SparkContext._ensure_initialized()  # noqa: SLF001 - else it knows no settings
        given = {name: value for name, value in SparkConf().getAll() if name != "spark.app.name"}
        options = replace(options, conf=given | dict(options.conf))
        return SparkSession.builder.config(map=dict[str, Any](settings_of(options))).getOrCreate()


def _connected(options: SessionOptions) -> SparkSession:
    """Return a session of Spark Connect: Java is elsewhere, and what belongs to its start cannot be set."""
    from pyspark.sql import SparkSession

    if missing := [name for name in ("grpc", "grpc_status", "zstandard") if importlib.util.find_spec(name) is None]:
        told = f"{options.master} is of Spark Connect, for which {', '.join(missing)} is not installed"
        raise ConfigError(told, hint="pip install 'pyspark[connect]'")
    settings = settings_of(options)
    logging.getLogger("SQLQueryContextLogger").disabled = True  # it writes each error with its stack, as JSON
    with mapped_errors():
        spark = SparkSession.builder.remote(options.master or "").getOrCreate()
        for name, value in settings.items():
            if name == _CHOSEN or (name.startswith("spark.sql.") and spark.conf.isModifiable(name)):
                spark.conf.set(name, value)
        return spark


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Within this context standard output and standard error are a file, also of processes that are begun in it."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with log.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        yield
    finally:
        sys.stderr.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


def _forget() -> None:
    """Remove what Java left among its temporary files, and the log of a session that ended well."""
    folder = _own["folder"]
    shutil.rmtree(folder / _TEMPORARY if _own.get("failed") else folder, ignore_errors=True)


def log_folder(temporary: Path) -> Path:
    """Make a folder of this user alone for Java's log and temporary files, and tidy up after those that have ended."""
    begin = f"flowctl-spark-{os.getuid()}-"
    made = Path(tempfile.mkdtemp(prefix=begin, suffix=f".{os.getpid()}", dir=temporary))
    with contextlib.suppress(OSError):  # another run removes them as well
        folders = sorted(temporary.glob(f"{begin}*"), key=os.path.getmtime)
        for old in folders:
            found = old.lstat()  # of a link the folder in it would be another
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not _is_ours(old.suffix[1:]):
                shutil.rmtree(old if old in folders[:-KEPT_LOGS] else old / _TEMPORARY, ignore_errors=True)
    return made


def _is_ours(number: str) -> bool:
    """Return whether a process of this user has this number."""
    try:
        os.kill(int(number), 0)
    except (ValueError, OverflowError, OSError):
        return False
    return True


@contextlib.contextmanager
def session(options: SessionOptions | None = None) -> Iterator[SparkSession]:
    """Start Spark, map the errors of what is done with it, and stop it, also after Ctrl-C."""
    spark = open_session(options)
    try:
        with mapped_errors():
            yield spark
    finally:
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):  # of a Java that has ended
            spark.stop()


@contextlib.contextmanager
def mapped_errors() -> Iterator[None]:
    """Within this context errors of Spark and of the way to Java become a `SparkError` in one line."""
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        yield
    except Exception as error:
        behind = error.__context__
        while isinstance(behind, Exception):
            behind = behind.__context__
        if behind is not None and not isinstance(behind, GeneratorExit):
            raise behind from None
        if not isinstance(error, (PySparkException, Py4JError, Py4JNetworkError)):
            raise
        _own["failed"] = True
        where = f"Spark's own log is {_own['log']}" if "log" in _own else "more is in the log of Spark"
        hint = _GONE_HINT if _GONE.search(str(error)) else where
        raise SparkError(one_line(error), hint=hint) from error


_GONE: Final = re.compile(r"FileNotFoundException|FILE_NOT_EXIST|NoSuchFileException|NoSuchFileError")


_GONE_HINT: Final = (
    "a file went away while it was read: the recorder removes its oldest files at events_max of disk; "
    "copy the folder first, or raise events_max"
)


_CLASS: Final = re.compile(r"^(?:: )?(?:Caused by: )?(?:[a-z_$][\w$]*\.)+[A-Z][\w$]*(?:Exception|Error)?:\s*")
_NOISE: Final = ("at ", "An error occurred while calling ", "Driver stacktrace:", "Job aborted due to stage failure:")
"""Beginnings of lines that say where something was seen, not what happened."""
_LINE_LENGTH: Final = 400
_PYTHON: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt)(?:: .*)?")
"""The last line of a Python traceback, which alone says what happened."""


def one_line(error: BaseException) -> str:
    """Return what an error of Spark says in one line of at most 400 characters, without a stack trace.

    The first line says what was being done, the innermost cause, or the last line of a worker's traceback, what
    happened.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not isinstance(error, (PySparkException, Py4JError)):
        return f"{type(error).__name__}: {lines[0] if lines else 'no more is known'}"[:_LINE_LENGTH]
    causes = [_CLASS.sub("", line) for line in lines if line.startswith("Caused by: ")]
    told = [_CLASS.sub("", line) for line in lines if not line.startswith((*_NOISE, "Caused by: "))]
    text = told[0] if told else type(error).__name__
    if causes and causes[-1] not in text:
        text = f"{text} {causes[-1]}"
    if "An exception was thrown from the Python worker" in str(error):
        python = [line for line in lines if _PYTHON.fullmatch(line) and not _CLASS.match(line)]
        text = f"in Python of a worker: {python[-1]}" if python else text
    return f"Spark failed: {text}"[:_LINE_LENGTH]
