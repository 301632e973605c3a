"""The runner: reads the records that are new, makes the parts of their hours, then the answers of all jobs.

Theory of operation. What was read is remembered in ``OUT/record.json``: of each hour its files, and with what its parts
were made. A run lists the files, finds the hours of which a part is missing or wrong (files came or changed, or it was
made with other options), reads only those, all in one query per part, and gives the new folders of hours the places of
the earlier ones. Then the answers are made of the parts of all hours in the window, in a folder of their own; results
are renamed when all is done, and ``summary.json`` is written last: who finds a summary finds all that it names. A run
that is killed leaves earlier results whole; the next one makes again what the record does not know.

Files that only went away change nothing: a recorder removes its oldest ones, and what was learnt from them stays.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import hashlib
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from flowctl.errors import ConfigError, FlowctlError
from flowctl.pipeline.job import Job, JobNote, JobState, Part
from flowctl.pipeline.records.listing import File, Listing, list_records
from flowctl.pipeline.records.place import Place
from flowctl.pipeline.records.read import Read, read_hours
from flowctl.pipeline.records.window import Hour, Window, begin_of, hour_of
from flowctl.pipeline.spark.session import fit, mapped_errors
from flowctl.printable import foreign

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

JOBS: Final = {
    "sessions": "flowctl.pipeline.viewers.sessions",
    "experience": "flowctl.pipeline.viewers.experience",
    "fleet": "flowctl.pipeline.viewers.fleet",
    "abuse": "flowctl.pipeline.abuse.job",
    "whatif": "flowctl.pipeline.whatif.job",
    "capacity": "flowctl.pipeline.capacity.job",
    "report": "flowctl.pipeline.report.job",
}
"""Name of a job -> the module with its `JOB`, in the order in which their answers are made."""
SUMMARY_FILE: Final = "summary.json"
RECORD_FILE: Final = "record.json"
FORMAT: Final = 2
"""Of both files; counted up when a key goes or changes its meaning."""
PARTS: Final = "parts"
"""Folder of the parts that are no results."""
QUARANTINE: Final = "quarantine"
PARTS_AT_A_TIME: Final = 2
"""While one is planned, which one core does, another can be computed."""
SMALL_BYTES: Final = 32 << 20
"""Parts of so much, as they lie on disk, are some 200 MB in pandas at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllResult:
    """What a run did.

    Args:
        jobs: by name, in the order in which they ran.
        outputs: name -> path, of all results.
        accounts: of each table over the hours of the window: files and rows, in, out and quarantined.
        hours: how many hours the answers rest on.
        hours_read: of these, whose records were read in this run.
        window: its bounds as texts, "" where it has none.
        warnings: of the run as a whole.
        errors: of jobs that failed.
    """

    jobs: Mapping[str, JobNote]
    outputs: Mapping[str, str]
    accounts: Sequence[Mapping[str, Any]]
    hours: int
    hours_read: int
    window: Mapping[str, str]
    warnings: Sequence[str]
    errors: Mapping[str, FlowctlError]

    @property
    def failed(self) -> list[str]:
        """Names of the jobs that failed."""
        return [name for name, note in self.jobs.items() if note.state is JobState.FAILED]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return {
            "format": FORMAT,
            "passed": not self.failed,
            "failed": self.failed,
            "hours": self.hours,
            "hours_read": self.hours_read,
            "window": dict(self.window),
            "warnings": list(self.warnings),
            "accounts": [dict(item) for item in self.accounts],
            "outputs": dict(self.outputs),
            "jobs": {name: note.as_dict() for name, note in self.jobs.items()},
        }


@dataclass(slots=True)
class Known:
    """What is remembered of an hour.

    Args:
        files: digest of each file that was used -> its identity, "" where it was put aside.
        parts: name -> with what it was made (`_Wanted.made_with`; "": files came since) and its size in bytes (0: it
            has no row).
        accounts: table -> figures.
        newest: time of the newest record, ISO 8601; "": not known.
    """

    files: dict[str, str] = field(default_factory=dict)
    parts: dict[str, list[Any]] = field(default_factory=dict)
    accounts: dict[str, dict[str, Any]] = field(default_factory=dict)
    newest: str = ""


@dataclass(slots=True)
class _Wanted:
    """A part that this run needs, and the options of its job."""

    part: Part
    options: Any

    @property
    def made_with(self) -> str:
        part = self.part
        return _digest(repr((part.version, part.at, list(part.columns.items()), part.depends(self.options))))

    @property
    def folder(self) -> str:
        return self.part.name if self.part.result else f"{PARTS}/{self.part.name}"


@dataclass(slots=True)
class PartTables:
    """What an answer is made of, see `flowctl.pipeline.job.Parts`."""

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
    _place: Place
    _staging: Place
    _wanted: Mapping[str, _Wanted]
    _hours: Mapping[str, Sequence[Hour]]

    def table(self, part: str) -> DataFrame:
        """Return the rows of a part in the window."""
        from pyspark.sql import functions as f

        one, hours = self._wanted[part], self._hours[part]
        schema = f"{_ddl(one.part.columns)}, date string, hour string"
        if not hours:
            return self.spark.createDataFrame([], schema)
        base = self._place.path(one.folder)
        paths = [f"{base}/{_partition(hour)}" for hour in hours]
        frame = self.spark.read.schema(schema).option("basePath", base).parquet(*paths)
        if one.part.at and self.since is not None:
            frame = frame.filter(f.col(one.part.at) >= f.lit(self.since))
        if one.part.at and self.until is not None:
            frame = frame.filter(f.col(one.part.at) < f.lit(self.until))
        return frame

    def pandas(self, part: str) -> pd.DataFrame:
        """Return the same by pyarrow."""
        import pyarrow as pa
        from pyarrow import dataset

        one, storage = self._wanted[part], self._place.storage
        schema = _arrow(one.part.columns)
        for name in ("date", "hour"):
            schema = schema.append(pa.field(name, pa.string()))
        if not self._hours[part]:
            return schema.empty_table().to_pandas()
        base = storage.path(one.folder)
        lies = (f"{base}/{_partition(hour)}" for hour in self._hours[part])
        files = [path for folder in lies for path in _files(self._place, folder)]
        by_hour = dataset.HivePartitioning(pa.schema([("date", pa.string()), ("hour", pa.string())]))
        found = dataset.dataset(
            files, schema, "parquet", storage.system, by_hour, partition_base_dir=base, exclude_invalid_files=False
        )
        kept = None
        for bound, after in ((self.since, True), (self.until, False)):
            if one.part.at and bound is not None:
                at, moment = dataset.field(one.part.at), pa.scalar(bound, pa.timestamp("us", tz="UTC"))
                inside = at >= moment if after else at < moment
                kept = inside if kept is None else kept & inside
        return found.to_table(filter=kept).to_pandas()

    def result(self, name: str) -> DataFrame:
        """Return a table that this job has written, or one that an earlier job or run has."""
        place = self._staging if self._staging.exists(name) else self._place
        return self.spark.read.parquet(place.path(name))

    def write(self, name: str, frame: DataFrame | pd.DataFrame, columns: Mapping[str, str]) -> str:
        """Write a result table."""
        import pyarrow as pa
        from pyarrow import parquet
        from pyspark.sql import DataFrame

        path = self._staging.path(name)
        if isinstance(frame, DataFrame):
            _columns(frame, columns).write.mode("overwrite").parquet(path)
            return path
        table = pa.Table.from_pandas(frame[list(columns)], _arrow(columns), preserve_index=False)
        self._staging.delete(name)
        self._staging.storage.system.create_dir(self._staging.storage.path(name))
        file = f"{self._staging.storage.path(name)}/part-00000.zstd.parquet"
        parquet.write_table(
            table.replace_schema_metadata(None), file, compression="zstd", filesystem=self._staging.storage.system
        )
        return path

    def write_text(self, name: str, text: str) -> str:
        """Write a text file among the results."""
        self._staging.write_text(name, text)
        return self._staging.path(name)


def _columns(frame: DataFrame, columns: Mapping[str, str], *more: str) -> DataFrame:
    """Return a frame with these columns, of these types, and more as they are."""
    from pyspark.sql import functions as f

    return frame.select(*(f.col(name).cast(kind).alias(name) for name, kind in columns.items()), *more)


def _ddl(columns: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())


def _arrow(columns: Mapping[str, str]) -> Any:
    """Return columns as a schema of pyarrow."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    return to_arrow_schema(cast(StructType, StructType.fromDDL(_ddl(columns))), timezone="UTC")


def _files(place: Place, folder: str) -> list[str]:
    """Return the files of data in a folder, and none where there is no folder."""
    from pyarrow import fs

    found = place.storage.system.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    return sorted(info.path for info in found if info.base_name.endswith(".parquet") and info.base_name[0] not in "._")


def _partition(hour: Hour) -> str:
    return f"date={hour[0]}/hour={hour[1]}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def run(
    spark: SparkSession,
    events: str | None,
    out: str,
    jobs: Sequence[Job | str],
    options: Mapping[str, Any] | None = None,
    window: Window | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> AllResult:
    """Run jobs: read what is new, make its parts, then the answers.

    Args:
        spark: session; all jobs share it.
        events: folder of the records. None: there are none, for a job that goes without.
        out: folder of the results; made if it is missing.
        jobs: themselves or their names in `JOBS`; those whose parts they use need not be among them.
        options: name of a job -> its options, or a mapping of those that are not as by default.
        window: None: all there is.
        tell: told what is being done.

    Returns:
        What became of each job; those that failed are told, not raised. ``summary.json`` says the same; after a run of
        one job also what it said of the others.

    Raises:
        ConfigError: `out` cannot be written, another run is at work in it, or there are no records.
        FlowctlError: the results cannot be moved to `out`.
    """
    settings = dict(spark.sparkContext.getConf().getAll())
    listing = None
    if events is not None and list(jobs) != ["report"]:  # before a folder is made for results of nothing
        listing = list_records(events, window, settings)
    place = Place(out, settings)
    with _alone(place):
        place.clear_staging()
        staging = place.staging()
        try:
            work = _Run(spark, events, listing, place, staging, window or Window(), tell, dict(options or {}))
            return work.all(jobs)
        finally:
            staging.remove()


@contextlib.contextmanager
def _alone(place: Place) -> Iterator[None]:
    """Within this context no other run on this machine works in a folder; on a store there is no lock."""
    if place.storage.prefix:
        yield
        return
    number = os.open(place.path("_lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            hint = "wait until it has ended, or name another folder with --out"
            raise ConfigError(f"another run is at work in {place.folder}", hint=hint) from error
        yield
    finally:
        os.close(number)


@dataclass(slots=True)
class _Run:
    """One run; the steps in the order in which they are done."""

    spark: SparkSession
    events: str | None
    listing: Listing | None
    place: Place
    staging: Place
    window: Window
    tell: Callable[[str], None]
    options: dict[str, Any]
    known: dict[Hour, Known] = field(default_factory=dict)
    wanted: dict[str, _Wanted] = field(default_factory=dict)
    errors: dict[str, FlowctlError] = field(default_factory=dict)  # of jobs
    broken: dict[str, FlowctlError] = field(default_factory=dict)  # of parts
    read: set[Hour] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)

    def all(self, names: Sequence[Job | str]) -> AllResult:
        """Do everything; see `run`."""
        jobs = self._load(names)
        for job in jobs:
            for name, merge in job.merge.items():
                merge(self.place.read_text(name) or "", "", self.options[job.name])
        self.known = _remembered(self.place)
        if self.listing is not None:
            self._read(self.listing)
        hours = sorted(hour for hour in self.known if self.window.meets(hour))
        if self.listing is not None and not hours:
            where = " in the window" if self.window != Window() else ""
            raise ConfigError(f"{self.events} has no records{where}", hint="is it the folder of --events of a server?")
        earlier = _read_json(self.place, SUMMARY_FILE).get("jobs", {}) if len(names) == 1 else {}
        notes = {name: JobNote(name, **{**item, "state": JobState(item["state"])}) for name, item in earlier.items()}
        ran = [name if isinstance(name, str) else name.name for name in names]
        for name in ran:
            found = next((job for job in jobs if job.name == name), None)
            notes[name] = self._failure(name, 0.0) if found is None else self._answer(found, hours, notes)
        result = self._result({name: notes[name] for name in ran}, hours)
        summary = result.as_dict() | {"jobs": {name: note.as_dict() for name, note in notes.items()}}
        self.place.write_text(SUMMARY_FILE, json.dumps(summary, indent=1, default=str) + "\n")
        return result

    def _load(self, names: Sequence[Job | str]) -> list[Job]:
        """Return the jobs, find their options and the parts that they make and use; one that is broken has failed."""
        jobs = []
        for name in names:
            with self._kept_as(name if isinstance(name, str) else name.name, self.errors):
                jobs.append(_loaded(name) if isinstance(name, str) else name)
                self._want(jobs[-1], [part.name for part in jobs[-1].parts])
        for job in jobs:
            for use in set(job.uses) - self.wanted.keys():
                with self._kept_as(job.name, self.errors):
                    self._want(_owner(use), [use])
        return jobs

    def _want(self, job: Job, parts: Sequence[str]) -> None:
        given = self.options.get(job.name) or {}
        if isinstance(given, Mapping):
            given = replace(job.options(), **given) if given else job.options()
        self.options[job.name] = given
        self.wanted |= {part.name: _Wanted(part, given) for part in job.parts if part.name in parts}

    @contextlib.contextmanager
    def _kept_as(self, name: str, errors: dict[str, FlowctlError]) -> Iterator[None]:
        """Within this context whatever goes wrong is the error of that job or part: none may cost the others."""
        try:
            with mapped_errors():
                yield
        except Exception as error:  # noqa: BLE001 - it may fail in any way; a signal is no failure, and ends the run
            errors[name] = told = _told(error)
            if told is not error:
                told.__cause__ = error  # for --debug

    def _read(self, listing: Listing) -> None:
        """Make parts of the hours that are new or have changed."""
        files: dict[Hour, list[File]] = {}
        for file in listing.files:
            files.setdefault(file.hour, []).append(file)
        came = {hour for hour, there in files.items() if {*map(_digest_of, there)} - self._of(hour).files.keys()}
        groups: dict[tuple[Hour, ...], dict[str, _Wanted]] = {}
        for name, one in self.wanted.items():
            other = {hour for hour in files if self._of(hour).parts.get(name, [""])[0] != one.made_with}
            if hours := tuple(sorted(came | other)):
                groups.setdefault(hours, {})[name] = one
        for hours, wanted in groups.items():
            self.tell(f"records of {len(hours)} hours")
            used = {item for hour in self.known.keys() - set(hours) for item in self.known[hour].files.values()}
            records = read_hours(self.spark, listing, hours, used=used - {""})
            fit(self.spark, records.size_bytes)
            self.warnings += records.warnings
            self._remember(records, self._make(records, wanted), {hour: files[hour] for hour in hours})

    def _of(self, hour: Hour) -> Known:
        return self.known.get(hour) or Known()

    def _make(self, records: Read, wanted: Mapping[str, _Wanted]) -> dict[str, _Wanted]:
        """Write parts to the staging folder, in one query each, and return those that could be made."""
        for account in records.accounts.values():
            account.check()
        for name, frame in records.quarantine.items():
            frame.write.partitionBy("date", "hour").parquet(self.staging.path(f"{QUARANTINE}/{name}"))
        with ThreadPoolExecutor(PARTS_AT_A_TIME) as pool:
            list(pool.map(lambda item: self._write(item[0], item[1], records), wanted.items()))
        return {name: one for name, one in wanted.items() if name not in self.broken}

    def _write(self, name: str, one: _Wanted, records: Read) -> None:
        self.tell(name)
        with self._kept_as(name, self.broken):
            rows = _columns(one.part.make(records, one.options), one.part.columns, "date", "hour")
            rows.write.partitionBy("date", "hour").parquet(self.staging.path(one.folder))

    def _remember(self, records: Read, made: Mapping[str, _Wanted], files: Mapping[Hour, Sequence[File]]) -> None:
        """Give the parts of hours their places, and write down what they were made of."""
        for hour, there in files.items():
            known = self.known.setdefault(hour, Known())
            now = {_digest_of(file): records.identities.get(file.path, "") for file in there}
            if gone := len(known.files.keys() - now.keys()):
                self.warnings.append(f"{' '.join(hour)}: it is read again, and {gone} of its files are there no more")
            if now.keys() - known.files.keys():
                known.parts = {name: ["", size] for name, (_, size) in known.parts.items()}
            known.files = now
            known.accounts = {table: item.as_dict() for (of, table), item in records.accounts.items() if of == hour}
            newest = records.newest
            known.newest = newest.isoformat() if newest is not None and hour_of(newest) == hour else ""
            for name, one in made.items():
                known.parts[name] = [one.made_with, self._adopt(one.folder, hour)]
            for name in {*self.place.names(QUARANTINE), *self.staging.names(QUARANTINE)}:
                self._adopt(f"{QUARANTINE}/{name}", hour)
        # What is left of them is a folder without rows, which an answer that looks here first would take for the table.
        for name in (QUARANTINE, *(one.folder for one in made.values())):
            self.staging.delete(name)
        self.read |= files.keys()
        hours = {" ".join(hour): asdict(known) for hour, known in sorted(self.known.items())}
        self.place.write_text(RECORD_FILE, json.dumps({"format": FORMAT, "hours": hours}))

    def _adopt(self, folder: str, hour: Hour) -> int:
        """Give a folder of an hour its place, and return its size; 0: it has no row, and there is none."""
        name = f"{folder}/{_partition(hour)}"
        if not self.staging.exists(name):
            self.place.delete(name)
            return 0
        self.place.adopt(self.staging, name)
        files = _files(self.place, self.place.storage.path(name))
        return sum(info.size or 0 for info in self.place.storage.system.get_file_info(files))

    def _answer(self, job: Job, hours: Sequence[Hour], notes: Mapping[str, JobNote]) -> JobNote:
        """Make a job's answer and give its results their places; whatever goes wrong with it is its result."""
        self.tell(job.name)
        begun = time.monotonic()
        needed = (*(part.name for part in job.parts), *job.uses)
        for name in needed:
            if name in self.broken:
                error = self.broken[name]
                self.errors.setdefault(job.name, type(error)(f"no {name}: {error}", hint=error.hint))
        note = JobNote(job.name, JobState.FAILED)
        if job.name not in self.errors:
            with self._kept_as(job.name, self.errors):
                answer = job.answer(self._parts(needed, hours, notes), self.options[job.name])
                warnings = (*self._missing(needed, hours), *answer.warnings)
                outputs = self._adopt_results(job)
                note = JobNote(job.name, JobState.DONE, "", "", None, answer.summary, outputs, warnings)
        took_s = round(time.monotonic() - begun, 3)
        if job.name not in self.errors:
            return replace(note, took_s=took_s)
        for name in job.results:
            self.staging.delete(name)
        return self._failure(job.name, took_s)

    def _failure(self, name: str, took_s: float) -> JobNote:
        return JobNote(name, JobState.FAILED, str(self.errors[name]), self.errors[name].hint or "", took_s)

    def _parts(self, names: Sequence[str], hours: Sequence[Hour], notes: Mapping[str, JobNote]) -> PartTables:
        lies = {name: [hour for hour in hours if self.known[hour].parts.get(name, ["", 0])[1]] for name in names}
        size_bytes = sum(self.known[hour].parts[name][1] for name, there in lies.items() for hour in there)
        fit(self.spark, size_bytes)
        newest = None
        if hours:
            text = self.known[hours[-1]].newest
            newest = dt.datetime.fromisoformat(text) if text else begin_of(hours[-1]) + dt.timedelta(hours=1)
            newest = min(newest, self.window.until or newest)
        return PartTables(
            self.spark,
            self.staging.folder,
            self.window.since,
            self.window.until,
            newest,
            size_bytes <= SMALL_BYTES,
            self.events or "",
            self.place.folder,
            self._accounts(hours),
            notes,
            self.place,
            self.staging,
            self.wanted,
            lies,
        )

    def _missing(self, names: Sequence[str], hours: Sequence[Hour]) -> list[str]:
        """Return what to say of parts that are not as they are wanted, and cannot be made: their records are gone."""
        lines = []
        for name in names:
            other = sum(self.known[hour].parts.get(name, [""])[0] != self.wanted[name].made_with for hour in hours)
            if other:
                of = f"{other} of {len(hours)} hours"
                lines.append(f"{name} is missing, or was made with other options, of {of} whose records are gone")
        return lines

    def _adopt_results(self, job: Job) -> dict[str, str]:
        """Give the results of a job their places, delete those that it has no longer, and return where they are."""
        there = set(self.staging.names())
        parts = [part.name for part in job.parts if part.result]  # have their places
        for name in set(job.results) - set(parts):
            self._adopt_result(job, name) if name in there else self.place.delete(name)
        names = dict.fromkeys((*parts, *job.results))
        return {name: self.place.path(name) for name in names if self.place.exists(name)}

    def _adopt_result(self, job: Job, name: str) -> None:
        if name not in job.merge:
            self.place.adopt(self.staging, name)
            return
        with _locked(self.place):
            made = self.staging.read_text(name) or ""
            text = job.merge[name](self.place.read_text(name) or "", made, self.options[job.name])
            self.place.write_text(name, text)

    def _result(self, notes: Mapping[str, JobNote], hours: Sequence[Hour]) -> AllResult:
        outputs = {name: path for note in notes.values() for name, path in note.outputs.items()}
        quarantined = self.place.names(QUARANTINE)
        outputs |= {f"{QUARANTINE}/{name}": self.place.path(f"{QUARANTINE}/{name}") for name in quarantined}
        window = {"since": self.window.since, "until": self.window.until}
        return AllResult(
            jobs=notes,
            outputs=outputs,
            accounts=self._accounts(hours),
            hours=len(hours),
            hours_read=len(self.read & set(hours)),
            window={name: moment.isoformat() if moment else "" for name, moment in window.items()},
            warnings=self.warnings,
            errors={name: self.errors[name] for name in notes if name in self.errors},
        )

    def _accounts(self, hours: Sequence[Hour]) -> list[dict[str, Any]]:
        """Return the accounts of each table, added up over hours."""
        sums: dict[str, dict[str, Any]] = {}
        for hour in hours:
            for table, figures in self.known[hour].accounts.items():
                sums[table] = _sum(sums.get(table, {}), figures)
        return list(sums.values())


@contextlib.contextmanager
def _locked(place: Place) -> Iterator[None]:
    """Within this context no other writer on this machine changes a file that more than one write.

    The lock is on the folder, so no file is left; it goes with the process. On a store there is none.
    """
    if place.storage.prefix:
        yield
        return
    number = os.open(place.folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _loaded(name: str) -> Job:
    found: Job = importlib.import_module(JOBS[name]).JOB
    return found


def _owner(part: str) -> Job:
    """Return the job that makes a part.

    Raises:
        FlowctlError: there is none.
    """
    for name in JOBS:
        with contextlib.suppress(ImportError):
            job = _loaded(name)
            if part in [item.name for item in job.parts]:
                return job
    raise FlowctlError(f"no job makes {part}")


def _sum(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures by name, added up; texts as they are."""
    found = dict(one)
    for name, value in other.items():
        if isinstance(value, Mapping):
            found[name] = _sum(found.get(name, {}), value)
        else:
            found[name] = value if isinstance(value, str) else found.get(name, 0) + value
    return found


def _read_json(place: Place, name: str) -> dict[str, Any]:
    """Return an object of ours; empty where there is none, or one of another format."""
    try:
        with place.storage.system.open_input_stream(place.storage.path(name)) as stream:
            found = json.loads(stream.read())
        return found if found["format"] == FORMAT else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _remembered(place: Place) -> dict[Hour, Known]:
    """Return what is remembered of each hour."""
    hours = _read_json(place, RECORD_FILE).get("hours", {})
    return {(text[:10], text[11:]): Known(**item) for text, item in hours.items()}


def _digest_of(file: File) -> str:
    return _digest(f"{file.table} {file.path.rpartition('/')[2]} {file.size_bytes}")


def _told(error: Exception) -> FlowctlError:
    """Return what to say of an error of a job."""
    if isinstance(error, FlowctlError):
        return error
    line = foreign((str(error).strip().splitlines() or [""])[0], 300)
    if isinstance(error, OSError):
        return FlowctlError(line, hint="check that the disk has room and the folder is writable")
    return FlowctlError(f"{type(error).__name__}: {line}", hint="run it alone with --debug to see where")
