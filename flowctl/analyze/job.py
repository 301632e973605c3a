"""What a job of the pipeline is: parts, made of the records of an hour, and an answer, made of the parts.

Theory of operation. Records never change once their hour is over, and answers are asked for again and again. So a job
says what it keeps of an hour (`JobPart`: a table, made by a query), and how its results follow from the
parts of all hours in a window (`AnalysisJob.answer`). Everything else is the runner's (`flowctl.analyze.run`). A part
is made of one hour's records without a look at another's; what lasts longer (a connection, an address) is put together
by the answer.
"""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from flowctl.analyze.engine import DUCKDB, running
from flowctl.analyze.models import run_text
from flowctl.analyze.records.place import literal
from flowctl.analyze.records.window import Hour, Window, end_of, hour_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from flowctl.analyze.records.place import RecordPlace
    from flowctl.analyze.records.read import Read

    Records = Read

BY_HOUR: Final = {"date": "string", "hour": "string"}
"""Columns beside those of each part."""


@dataclass(frozen=True, slots=True)
class JobPart:
    """A table that is kept of each hour."""

    name: str  # of the table and its folder; unique over all jobs
    columns: dict[str, str]  # name -> type of Spark, in order; the contract. `date` and `hour` come beside, as texts.
    # (`Records`, options of the job) -> rows, with `columns` and `date` and `hour`. One query, lazy.
    make: Callable[[Records, Any], DataFrame]
    # Names of the tables of records that it needs; where none of them has a file, the part is empty
    reads: tuple[str, ...]
    # Options -> text; parts that were made with another text are made again. Marks and weights that are in the rows
    # belong in it; those that only the answer uses do not.
    depends: Callable[[Any], str] = lambda _: ""
    result: bool = False  # whether the table is one of the results too, which people read: then it lies in OUT itself
    version: int = 1  # counted up when `make` changes its meaning: parts of an earlier one are made again
    # Hours before the end of a window, 24 at most, that are read and that answers are given at least
    looks_back_h: int = 0

    def made_with(self, options: Any) -> str:
        return digest(repr((self.version, list(self.columns.items()), self.depends(options))))

    @property
    def has_sketches(self) -> bool:
        return "binary" in self.columns.values()

    def folder(self, hour: Hour | None = None) -> str:
        base = self.name if self.result else f"parts/{self.name}"
        return base if hour is None else f"{base}/date={hour[0]}/hour={hour[1]}"


@dataclass(slots=True, kw_only=True)
class Parts:
    """What an answer is made of."""

    session: Callable[[], SparkSession]  # starts Spark where it does not run yet
    place: RecordPlace  # where all results lie, those of earlier jobs and runs too
    staging: RecordPlace  # where its results are made, before they are renamed
    since: dt.datetime | None  # begin of the window, an hour's, UTC; None: all there is
    until: dt.datetime | None  # its end, exclusive
    newest: dt.datetime | None  # time of the newest record that was used; None: there is none
    heard: Mapping[str, dt.datetime]  # by node: time of its newest record in any table, where files tell
    small: bool  # the parts are small enough (some MB) for pandas in this process
    events: str  # folder of the records, to name it
    accounts: Sequence[Mapping[str, Any]]  # of each table over the hours of the window
    notes: Mapping[str, JobNote]  # what became of the jobs of this run so far
    hours: Mapping[str, tuple[JobPart, Sequence[Hour]]]  # parts by name, and the hours in which they have rows
    before: Mapping[str, Sequence[Hour]]  # of each part, earlier hours in which it has rows
    tell: Callable[[str], None]  # shows how far an answer is

    @property
    def spark(self) -> SparkSession:
        return self.session()

    def table(self, name: str) -> DataFrame:
        """Return the rows of a part in the window, and where it looks back; of any job, now or before; may be empty."""
        part, hours = self.hours[name]
        schema = _ddl(part.columns | BY_HOUR)
        if not hours:
            return self.spark.createDataFrame([], schema)
        if running() == DUCKDB:
            files = [f"{path}/{file}" for path in map(part.folder, hours) for file in self.place.names(path)]
            paths = [self.place.storage.path(file) for file in files]
            return cast("DataFrame", cast(Any, self.spark).files(paths, part.columns, tuple(BY_HOUR)))
        reader = self.spark.read.schema(schema).option("basePath", self.place.path(part.folder()))
        found: DataFrame = reader.parquet(*(literal(self.place.path(part.folder(hour))) for hour in hours))
        return found

    def pandas(self, name: str) -> pd.DataFrame:
        """Return the same by pyarrow, without a query of Spark; only where `small`."""
        return self.arrow(name).to_pandas()

    def arrow(
        self,
        name: str,
        columns: Sequence[str] | None = None,
        where: pa.dataset.Expression | None = None,
        *,
        before: bool = False,
    ) -> pa.Table:
        """Return some columns of it, or all and `BY_HOUR`, likewise."""
        import pyarrow as pa
        from pyarrow import dataset

        part, hours = self.hours[name]
        hours = [*(self.before[name] if before else ()), *hours]
        storage, schema = self.place.storage, arrow_schema(part.columns | BY_HOUR)
        if not hours:
            return schema.empty_table().select(list(columns or schema.names))
        base, by_hour = storage.path(part.folder()), pa.schema([schema.field(column) for column in BY_HOUR])
        folders = [part.folder(hour) for hour in hours]
        files = [storage.path(f"{folder}/{file}") for folder in folders for file in self.place.names(folder)]
        rows = dataset.dataset(
            files, schema, "parquet", storage.system, dataset.HivePartitioning(by_hour), partition_base_dir=base
        )
        return rows.to_table(None if columns is None else list(columns), filter=where)

    def result(self, name: str) -> DataFrame:
        """Return a table that this job has written (`write`), or one that an earlier job or run has."""
        place = self.staging if self.staging.exists(name) else self.place
        path = place.path(name)
        return self.spark.read.parquet(path if running() == DUCKDB else literal(path))

    def day_before(self) -> Parts | None:
        """Return the same hours of the day before; None: none is kept, or the window is of more than a day."""
        end = self.until or (self.newest and end_of(hour_of(self.newest)))
        if self.since is None or end is None or end - self.since > dt.timedelta(hours=25):  # --since 24h has 25
            return None
        since, until = (moment - dt.timedelta(days=1) for moment in (self.since, end))
        window = Window(since, until)
        hours = {
            name: (part, [hour for hour in self.before[name] if window.meets(hour)])
            for name, (part, _) in self.hours.items()
        }
        if not any(there for _, there in hours.values()):
            return None
        return replace(self, since=since, until=until, newest=until, hours=hours, before=dict.fromkeys(hours, ()))

    def write(self, name: str, frame: DataFrame | pd.DataFrame | pa.Table, columns: Mapping[str, str]) -> str:
        """Write a result table (Parquet, zstd) with these columns and types, and return its path."""
        import pyarrow as pa
        from pyarrow import parquet

        path, storage = self.staging.path(name), self.staging.storage
        if hasattr(frame, "toArrow"):
            save(frame, columns, path)
            return path
        if not isinstance(frame, pa.Table):
            frame = pa.Table.from_pandas(frame[list(columns)], arrow_schema(columns), preserve_index=False)
        storage.system.create_dir(storage.path(name))
        file = storage.path(f"{name}/part-00000.zstd.parquet")
        parquet.write_table(frame, file, compression="zstd", filesystem=storage.system)
        return path

    def write_text(self, name: str, text: str) -> str:
        self.staging.write_text(name, text)
        return self.staging.path(name)


def typed(frame: DataFrame, columns: Mapping[str, str], *more: str) -> DataFrame:
    casts = [f"CAST(`{name}` AS {kind}) AS `{name}`" for name, kind in columns.items()]
    return run_text(f"SELECT {', '.join([*casts, *(f'`{name}`' for name in more)])} FROM rows", {"rows": frame})


def save(frame: DataFrame, columns: Mapping[str, str], path: str, *by: str) -> None:
    """Write a table with these columns, of these types, in folders by some columns more.

    Only texts have dictionaries: of numbers they are given up after most of the work (a third of the processor time of
    `sessions`).
    """
    if running() == DUCKDB:
        cast(Any, frame).save(columns, path, *by)
        return
    options = {f"parquet.enable.dictionary#{name}": kind == "string" for name, kind in columns.items()}
    typed(frame, columns, *by).write.options(**options).partitionBy(*by).parquet(path, mode="overwrite")


def _ddl(columns: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())


def arrow_schema(columns: Mapping[str, str]) -> Any:
    """Return columns as a schema of pyarrow; of usual types without Spark's parser, which is Java."""
    import pyarrow as pa

    plain = {"string": "string", "bigint": "int64", "int": "int32", "double": "float64", "boolean": "bool_"}
    known = {kind: getattr(pa, name)() for kind, name in plain.items()} | {"timestamp": pa.timestamp("us", "UTC")}
    known |= {f"array<{kind}>": pa.list_(item) for kind, item in known.items()}
    known["map<string,bigint>"] = pa.map_(pa.string(), pa.int64())
    if running() == DUCKDB:  # there a sketch is a list, see `flowctl.analyze.duck.macros`
        known["binary"] = pa.list_(pa.float32())
    if known.keys() >= {*columns.values()}:
        return pa.schema([(name, known[kind]) for name, kind in columns.items()])
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    return to_arrow_schema(cast(StructType, StructType.fromDDL(_ddl(columns))), timezone="UTC")


def digest(text: str) -> str:
    """Return a short text that stands for a longer one."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(slots=True, kw_only=True)
class JobAnswer:
    """What a job answers."""

    summary: dict[str, Any] = field(default_factory=dict)  # a few figures, as JSON takes them
    warnings: list[str] = field(default_factory=list)  # what is not known, what was assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisJob:
    """A job."""

    name: str  # as on the command line
    tries: bool = False  # its answer takes as long as it is given, and comes after those that count
    parts: tuple[JobPart, ...]  # that it makes
    uses: tuple[str, ...] = ()  # names of parts of other jobs that its answer reads; they are made as well
    # Names of all tables and files that its answer writes; one that it does not write is deleted
    results: tuple[str, ...]
    answer: Callable[[Parts, Any], JobAnswer]  # (parts, options) -> answer
    options: Callable[[], Any] = lambda: None  # makes the default options
    # Name of a result that others write too (a ban list) -> (text that is there, text that was made, options, what is
    # told warnings) -> text. Called with both when results are renamed, where no other writer comes in between; and
    # before all work with "" as what was made, so that a text that cannot be read (`ConfigError`) is told at once.
    merge: Mapping[str, Callable[[str, str, Any, Callable[[str], None]], str]] = field(default_factory=dict)


class JobState(enum.StrEnum):
    """What became of a job."""

    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class JobNote:
    """What became of one job: for ``summary.json``, the report and ``--json``."""

    name: str
    state: JobState
    message: str = ""  # why it failed, one line
    hint: str = ""  # what can be done about that
    took_s: float | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)  # name of a result -> path
    warnings: tuple[str, ...] = ()  # for the person who started it
    hours: int = 0  # that its answer rests on
    window: Mapping[str, str] = field(default_factory=dict)  # begin of the first of these, end of the last
    made_of: str = ""  # digest of what its answer follows from, and of the results as they were written; "": not kept

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["name"]
        return found
