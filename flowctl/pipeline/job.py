"""What a job of the pipeline is: parts, made of the records of an hour, and an answer, made of the parts.

Theory of operation. Records are large and never change once their hour is over; answers are asked for again and again.
So each job says what it needs to keep of an hour's records (`Part`: a table, made by DataFrame functions, one folder
per hour), and how its results follow from the parts of all hours in a window (`Job.answer`). Everything else is the
runner's (`flowctl.pipeline.run`): which files there are, which of their rows can be used, which hours are new or have
changed and are made again whole, what the window leaves out, that results replace earlier ones whole, and accounts.

A part has to be a *sum over hours*: made of one hour's records without a look at another's, so that parts of many hours
are simply all their rows. What lasts longer than an hour (a connection, an address) is put together by the answer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import datetime as dt

    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession


class Records(Protocol):
    """The records of one or more hours: files that can be used, rows that passed the checks, in format 3.

    Attributes:
        spark: session.
    """

    spark: SparkSession

    def table(self, name: str) -> DataFrame:
        """Return a table of `flowctl.telemetry.schema.TABLES`, all its columns, and `date` and `hour` (texts) beside.

        A table of which there is nothing is empty, with its schema. Lazy; asked for twice, it is the same frame.
        """

    def has(self, name: str) -> bool:
        """Return whether there is any usable file of that table: nothing is read."""


@dataclass(frozen=True, slots=True)
class Part:
    """A table that is kept of each hour.

    Args:
        name: of the table and its folder; unique over all jobs.
        columns: name -> type of Spark, in order; the contract. `date` and `hour` come beside, as texts.
        at: column with the time of a row, by which a window is cut exactly; "": rows are of their whole hour.
        make: (records, options of the job) -> rows, with `columns` and `date` and `hour`. One query, lazy.
        reads: names of the tables of records that it needs; where none of them has a file, the part is empty.
        depends: options -> text; parts that were made with another text are made again. Marks and weights that are in
            the rows belong in it; those that only the answer uses do not.
        result: whether the table is one of the results too, which people read: then it lies in OUT itself.
        version: counted up when `make` changes its meaning: parts of an earlier one are made again.
    """

    name: str
    columns: Mapping[str, str]
    at: str
    make: Callable[[Records, Any], DataFrame]
    reads: tuple[str, ...]
    depends: Callable[[Any], str] = lambda _: ""
    result: bool = False
    version: int = 1


class Parts(Protocol):
    """What an answer is made of.

    Attributes:
        spark: session.
        out: folder for its results: in the making, renamed when all is done. `write` and `write_text` go there.
        since: begin of the window, UTC; None: all there is.
        until: its end, exclusive; None: all there is.
        newest: time of the newest record that was used; None: there is none.
        small: whether the parts are small enough (some MB) for pandas in this process.
        events: folder of the records, to name it.
        folder: where all results lie, those of earlier jobs and runs too.
        accounts: of each table over the hours of the window: files and rows, in, out and quarantined.
        notes: what became of the jobs of this run so far.
    """

    spark: SparkSession
    out: str
    since: dt.datetime | None
    until: dt.datetime | None
    newest: dt.datetime | None
    small: bool
    events: str
    folder: str
    accounts: Sequence[Mapping[str, Any]]
    notes: Mapping[str, JobNote]

    def table(self, part: str) -> DataFrame:
        """Return the rows of a part in the window, of any job that runs in this run or ran before; may be empty."""

    def pandas(self, part: str) -> pd.DataFrame:
        """Return the same by pyarrow, without a query of Spark; only where `small`."""

    def result(self, name: str) -> DataFrame:
        """Return a table that an earlier job of this run has written (`write`)."""

    def write(self, name: str, frame: DataFrame | pd.DataFrame, columns: Mapping[str, str]) -> str:
        """Write a result table (Parquet, zstd) with these columns and types, and return its path."""

    def write_text(self, name: str, text: str) -> str:
        """Write a text file among the results, whole or not at all, and return its path."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a job answers.

    Args:
        summary: in a few figures, as JSON takes them; the report and ``--json`` show it.
        warnings: lines for the person who started the job: what is not known, what was assumed.
    """

    summary: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job.

    Args:
        name: as on the command line.
        parts: that it makes.
        uses: names of parts of other jobs that its answer reads; they are made as well.
        results: names of all tables and files that its answer writes; one that it does not write is deleted.
        answer: (parts, options) -> answer.
        options: makes the default options.
        merge: name of a result that others write too (a ban list) -> (text that is there, text that was made, options)
            -> text. Called with both when results are renamed, where no other writer comes in between; and before all
            work with "" as what was made, so that a text that cannot be read (`ConfigError`) is told at once.
    """

    name: str
    parts: tuple[Part, ...]
    uses: tuple[str, ...] = ()
    results: tuple[str, ...]
    answer: Callable[[Parts, Any], Answer]
    options: Callable[[], Any] = lambda: None
    merge: Mapping[str, Callable[[str, str, Any], str]] = field(default_factory=dict)


class JobState(enum.Enum):
    """What became of a job."""

    DONE = "done"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class JobNote:
    """What became of one job: for ``summary.json``, the report and ``--json``.

    Args:
        name: of the job.
        state: what became of it.
        message: why it failed, one line.
        hint: what can be done about that.
        took_s: how long its parts and its answer took, seconds. None: unknown.
        summary: its own summary; empty: unknown.
        outputs: name of a result -> path.
        warnings: lines for the person who started it.
    """

    name: str
    state: JobState
    message: str = ""
    hint: str = ""
    took_s: float | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return {
            "state": self.state.value,
            "message": self.message,
            "hint": self.hint,
            "took_s": self.took_s,
            "summary": dict(self.summary),
            "outputs": dict(self.outputs),
            "warnings": list(self.warnings),
        }
