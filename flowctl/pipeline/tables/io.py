"""Reads and writes tables: what does not fit is put aside with its reason, and every row is accounted for.

Reading goes in two steps. First the footers of all files are looked at, side by side (`footers`): files that cannot be
used are put aside whole, copies are left out, and the number of rows of the rest is known without reading one. Then the
rows are read by a job, with the checks that the footers left open as a filter (`checks`). Rows that it lets through and
rows that it does not must add up to the number that the footers gave.

What the driver keeps: the list of addresses (some 150 octets each, so 150 MB for a million of files), and of the facts
only those of files that are put aside, up to `preflight.MAX_BAD_FILES`. Rows never come to the driver.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowctl.errors import ConfigError
from flowctl.pipeline.spark.session import generate_code, one_line
from flowctl.pipeline.tables.accounts import Accounts
from flowctl.pipeline.tables.checks import Check, any_of, open_checks, reason_of
from flowctl.pipeline.tables.footers import FACTS_DDL, facts_of, s3_options
from flowctl.pipeline.tables.overlaps import check_distinct, overlapping, spelt
from flowctl.pipeline.tables.place import Place, is_staging
from flowctl.pipeline.tables.preflight import COPY, COPY_DETAIL, Preflight, judge
from flowctl.telemetry.schema import TABLES, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DRIVER_FILES: Final = 256
"""So many footers are read in the driver, below a millisecond each."""
FILES_PER_TASK: Final = 2_000
"""Footers per task: some seconds of work, so that a lost worker repeats little."""
FILE_QUARANTINE_DDL: Final = "path string, reason string, detail string, rows bigint, size bigint"


@dataclass(slots=True)
class Input:
    """A table that was read.

    Args:
        frame: rows that passed all checks; columns of the table, in its order. Lazy.
        quarantined_frame: rows that did not; columns `file`, `reason`, `row` (JSON). Lazy, a pass of its own.
        accounts: files and rows. Complete at once, or after `settle` where the job counts the rows itself.
        bad_files: files put aside whole: path, reason, detail, rows, size.
        size_bytes: of the usable files.
        absent: whether none of its files could be used, so that `frame` is empty; only of `read_optional`.
    """

    frame: DataFrame
    quarantined_frame: DataFrame
    accounts: Accounts
    bad_files: list[tuple[Any, ...]] = field(default_factory=list)
    size_bytes: int = 0
    absent: bool = False

    def settle(self, rows_out: int) -> None:
        """Complete the accounts after the job counted the rows of `frame`; reads again only if some are missing.

        Args:
            rows_out: rows of `frame`.
        """
        good_files = self.accounts.rows_in - self.accounts.rows_quarantined
        bad = {} if rows_out == good_files else _counts(self.quarantined_frame)
        self.accounts.settle(rows_out, bad)
        self.accounts.check()


def _counts(quarantined: DataFrame) -> dict[str, int]:
    """Return how many rows were put aside, by reason: at most one row per check comes back."""
    return {row["reason"]: row["count"] for row in quarantined.groupBy("reason").count().collect()}


def table_path(root: str, table: str) -> str:
    """Return the folder of a table below `root`, whatever file system it is on."""
    return f"{root.rstrip('/')}/{table}"


def has_table(spark: SparkSession, root: str, table: str) -> bool:
    """Return whether `root` has a folder of that table.

    Raises:
        ConfigError: `root` is no address that Spark understands.
    """
    return _exists(spark, table_path(root, table))


_RECORDS_HINT: Final = "give the folder that a server wrote with --events; it has folders flow_events and flow_samples"


def require_table(spark: SparkSession, root: str, table: str) -> None:
    """See to it that `root` has a folder of that table.

    Raises:
        ConfigError: it has none; says whether `root` may be read, is there at all, is the table's own folder, or may be
            too new.
    """
    if has_table(spark, root, table):
        return
    if Path(root).is_dir() and not os.access(root, os.R_OK | os.X_OK):
        raise ConfigError(f"{root} cannot be read: permission denied", hint="run as who may read it, or ask its owner")
    if not _exists(spark, root):
        raise ConfigError(f"{root} does not exist, so there is no {table}", hint=_RECORDS_HINT)
    if root.rstrip("/").rpartition("/")[2] in TABLES:
        raise ConfigError(f"{root} has no {table}", hint="that is the folder of one table: give the one it is in")
    new = "a server that was just started writes its first file after some ten seconds"
    raise ConfigError(f"{root} has no {table}", hint=f"{_RECORDS_HINT}; {new}")


def _exists(spark: SparkSession, path: str) -> bool:
    from py4j.protocol import Py4JJavaError

    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - Hadoop's file systems have no Python surface
    try:
        place = jvm.org.apache.hadoop.fs.Path(path)
        return bool(place.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration()).exists(place))  # noqa: SLF001 - no public way
    except Py4JJavaError as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}") from error


def read_optional(
    spark: SparkSession, root: str, table: str, *, count: str = "scan", now_us: int | None = None
) -> Input | None:
    """Read a table that a job can do without: one that has no usable file is as good as none, and said so.

    Args:
        spark: as of `read_table`, as are the others.
        root: folder.
        table: name of the table.
        count: when rows are counted.
        now_us: time of the run.

    Returns:
        None: there is no such folder. `Input.absent`: nothing in it can be used; the accounts have its files and a
        warning, for the job to show.

    Raises:
        ConfigError: records are there twice.
    """
    if not has_table(spark, root, table):
        return None
    return _read(spark, root, table, count, now_us, optional=True)


def read_table(spark: SparkSession, root: str, table: str, *, count: str = "scan", now_us: int | None = None) -> Input:
    """Read a table of records.

    Args:
        spark: the session.
        root: folder that ``--events`` named; the table is a folder in it.
        table: name of the table, see `flowctl.telemetry.schema`.
        count: ``scan``: rows are counted by a pass over the few columns that checks need; the accounts are complete.
            ``later``: the job counts the rows it uses and calls `Input.settle`, which saves that pass.
        now_us: time of the run, microseconds since the epoch. None: now.

    Raises:
        ConfigError: there is no such folder, no file in it, none that can be used, or records are there twice in files
            that are no copies of each other.
    """
    return _read(spark, root, table, count, now_us, optional=False)


def _read(spark: SparkSession, root: str, table: str, count: str, now_us: int | None, *, optional: bool) -> Input:
    now_us = time.time_ns() // 1_000 if now_us is None else now_us
    definition = TABLES[table]
    path = table_path(root, table)
    raw, paths = _list(spark, root, path, definition, optional=optional)
    found = _preflight(spark, paths, table, now_us)
    accounts = found.accounts
    if found.good == 0 and optional:
        return _absent(
            raw, definition, found, f"none of its {len(paths)} files can be used" if paths else "it has no file"
        )
    if found.good == 0:
        reasons = ", ".join(f"{key}: {n}" for key, n in sorted(accounts.files_by_reason.items()))
        raise ConfigError(
            f"{path}: none of its {len(paths)} files can be used ({reasons}), the first is {found.bad[0][0]}: "
            f"{found.bad[0][2]}",
            hint="is it a folder that a server wrote with --events?",
        )
    generate_code(spark, found.size_bytes)
    usable = _without(raw, [str(row[0]) for row in found.bad])
    check_distinct(usable, found.meeting, table)
    checks = open_checks(table, found.unproven)
    frame = _good(usable, definition, checks, now_us)
    quarantined = _quarantined(usable, definition, checks, now_us)
    result = Input(frame, quarantined, accounts, found.bad, found.size_bytes)
    if count == "scan":
        result.settle(frame.count())
    return result


def _absent(raw: DataFrame, definition: Table, found: Preflight, why: str) -> Input:
    """Return an optional table of which nothing can be used."""
    from pyspark.sql import functions as f

    found.accounts.settle(0, {})
    found.accounts.warnings.append(f"{definition.name} is left out: {why}")
    frame = raw.select(*definition.names).limit(0)
    nothing = frame.select(*(f.lit("").alias(name) for name in ("file", "reason", "row")))
    return Input(frame, nothing, found.accounts, found.bad, 0, absent=True)


def _list(
    spark: SparkSession, root: str, path: str, definition: Table, *, optional: bool
) -> tuple[DataFrame, list[str]]:
    """Return the table as it lies there, and the addresses of its files: both of the same listing.

    Raises:
        ConfigError: nothing is there; no file, unless the table is optional.
    """
    require_table(spark, root, definition.name)
    # The folders' date= and hour= are left alone: they are no columns of the contract, and files beside them are
    # taken as well. Spark leaves out names that begin with . or _, which are files not yet complete.
    raw = (
        spark.read.schema(definition.spark_ddl)
        .option("recursiveFileLookup", "true")
        .option("pathGlobFilter", "*.parquet")
        .parquet(path)
    )
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - one call for all names, where the public one makes one for each
    text = str(jvm.org.apache.hadoop.util.StringUtils.join("\n", raw._jdf.inputFiles()))  # noqa: SLF001 - no public way
    if not text and optional:
        return spark.createDataFrame([], definition.spark_ddl), []
    if not text:
        raise ConfigError(
            f"{path} has no file", hint=f"{_RECORDS_HINT}; a file appears when the first interval is over"
        )
    return raw, text.split("\n")


def _preflight(spark: SparkSession, paths: list[str], table: str, now_us: int) -> Preflight:
    """Look at the footers of all files and return what became of them.

    Few files are looked at here: a job of Spark takes longer to start than they take to read.
    """
    if len(paths) <= DRIVER_FILES:
        return judge(list(facts_of(sorted(paths), table, now_us, _store(spark))), table)
    return _preflight_on_spark(spark, paths, table, now_us)


def _store(spark: SparkSession) -> dict[str, str]:
    """Return where an S3 store is that Spark was told of."""
    return s3_options(dict(os.environ) | dict(spark.sparkContext.getConf().getAll()))


def _preflight_on_spark(spark: SparkSession, paths: list[str], table: str, now_us: int) -> Preflight:
    """Look at the footers on Spark's workers; only sums and the files that are put aside come back."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    context = spark.sparkContext
    slices = max(context.defaultParallelism, len(paths) // FILES_PER_TASK)
    look = partial(facts_of, table_name=table, now_us=now_us, store=_store(spark))
    facts = spark.createDataFrame(context.parallelize(paths, slices).mapPartitions(look), FACTS_DDL)
    # The first by name is kept, so that a repeated run keeps the same one.
    rank = f.row_number().over(Window.partitionBy("identity").orderBy(f.col("problem").isNotNull(), "path"))
    copy = f.col("problem").isNull() & (f.col("rank") > 1)
    facts = (
        facts.withColumn("rank", rank)
        .withColumn("detail", f.when(copy, f.concat(f.lit(COPY_DETAIL), "identity")).otherwise(f.col("detail")))
        .withColumn("problem", f.when(copy, COPY).otherwise(f.col("problem")))
        .drop("rank", "identity")
        .persist()
    )
    try:
        sums = facts.groupBy("problem").agg(
            f.count("*").alias("files"),
            f.sum("rows").alias("rows"),
            f.sum("size").alias("size"),
            f.count_if(f.col("rows").isNull()).alias("unknown"),
        )
        result = Preflight(Accounts(table=table, files_in=len(paths)))
        for row in sums.collect():
            result.enter(row["problem"], row["files"], row["rows"] or 0, row["size"] or 0, row["unknown"])
        result.check()
        bad = facts.filter("problem is not null").select("path", "problem", "detail", "rows", "size")
        result.bad = sorted(tuple(row) for row in bad.collect())
        good = facts.filter("problem is null")
        open_ = good.select(f.explode("unproven").alias("key")).distinct()
        result.unproven = {row["key"] for row in open_.collect()}
        if good.filter("span.recorded").limit(1).count():
            # In order, so that the driver keeps only files whose range is not over.
            spans = good.filter("span is not null").select("path", "span").orderBy("span.first_seq", "path")
            result.meeting = overlapping((row["path"], tuple(row["span"])) for row in spans.toLocalIterator())
    finally:
        facts.unpersist()
    return result


def _without(raw: DataFrame, paths: list[str]) -> DataFrame:
    """Return `raw` without the files of `paths`, which Spark then does not open: it filters its list of files."""
    if not paths:
        return raw
    from pyspark.sql import functions as f

    # The list of files and the rows may spell an address differently.
    return raw.filter(~f.col("_metadata.file_path").isin(spelt(paths)))


def _good(raw: DataFrame, definition: Table, checks: tuple[Check, ...], now_us: int) -> DataFrame:
    from pyspark.sql import functions as f

    return raw.filter(~f.expr(any_of(checks, now_us))).select(*definition.names)


def _quarantined(raw: DataFrame, definition: Table, checks: tuple[Check, ...], now_us: int) -> DataFrame:
    from pyspark.sql import functions as f

    return raw.select(
        f.col("_metadata.file_path").alias("file"),
        f.expr(reason_of(checks, now_us)).alias("reason"),
        f.to_json(f.struct(*definition.names)).alias("row"),
    ).filter(f.col("reason").isNotNull())


def write_table(
    frame: DataFrame, path: str, *, partitions: int | None = None, options: Mapping[str, str] | None = None
) -> str:
    """Write a table as Parquet (zstd) in place of what is there, and return its path.

    Args:
        frame: what to write.
        path: folder of the table.
        partitions: number of files. None: as the plan has it.
        options: settings of the writer. None: none but the session's.
    """
    whole = frame if partitions is None else frame.coalesce(partitions)
    whole.write.mode("overwrite").options(**(options or {})).parquet(path)
    return path


def write_quarantine(spark: SparkSession, source: Input, out: str) -> dict[str, str]:
    """Write what was put aside below ``OUT/quarantine``, and return the paths by name; nothing to write: none.

    What an earlier run has left there of this table is deleted, unless the folder is one in the making, where only
    other jobs of the same run can have left something.

    Two tables: ``<table>`` with the rows (`file`, `reason`, `row`), ``<table>_files`` with the files.
    """
    outputs: dict[str, str] = {}
    table = source.accounts.table
    if not is_staging(out):
        place = Place(spark, out)
        for name in (table, f"{table}_files"):
            place.delete(f"quarantine/{name}")
    base = f"{out.rstrip('/')}/quarantine"
    if source.bad_files:
        files = spark.createDataFrame(source.bad_files, FILE_QUARANTINE_DDL)
        outputs[f"quarantine/{table}_files"] = write_table(files, f"{base}/{table}_files", partitions=1)
    whole_files = sum(count for key, count in source.accounts.by_reason.items() if key.startswith("file: "))
    if source.accounts.rows_quarantined > whole_files:
        outputs[f"quarantine/{table}"] = write_table(source.quarantined_frame, f"{base}/{table}")
    return outputs
