"""The runner: reads the records that are new, makes the parts of their hours, then the answers of all jobs.

Theory of operation. What was read is remembered in ``OUT/record.json``: where the records lie, of each hour its files,
and with what its parts were made. A run lists the files, finds the hours of which a part is missing or wrong (files
came or changed, or it was made with other options), reads only those, all in one query per part, and gives the new
folders of hours the places of the earlier ones. Then the answers are made of the parts of all hours in the window, in a
folder of their own; results are renamed when all is done, and ``summary.json`` is written last: who finds a summary
finds all that it names. A run that is killed leaves earlier results whole; the next one makes again what the record
does not know.

Files that only went away change nothing: a recorder removes its oldest ones, and what was learnt from them stays. Where
new ones come to such an hour, it is not made again: their parts are put beside its own, in files named for what they
were made of. Such files that the record does not know are of a killed run, and go before others are put there.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import importlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from flowctl.errors import ConfigError, FlowctlError
from flowctl.pipeline.job import BY_HOUR, Job, JobNote, JobState, Part, Parts, digest, save
from flowctl.pipeline.records.listing import File, Listing, list_records
from flowctl.pipeline.records.place import Place, resolved
from flowctl.pipeline.records.read import Read, read_hours
from flowctl.pipeline.records.window import ODD_HOUR, Hour, Window, begin_of, end_of, hour_of
from flowctl.pipeline.spark.session import fit, mapped_errors
from flowctl.printable import foreign

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
QUARANTINE: Final = "quarantine"
_ADDED: Final = "added-"
"""Begin of the names of files that were put beside those of a part."""
_NAME: Final = 16
"""Digits of the digest of a file that stand for its name; its size follows."""
PARTS_AT_A_TIME: Final = 2
"""While one is planned, which one core does, another can be computed."""
SMALL_BYTES: Final = 32 << 20
"""Parts of so much, as they lie on disk, are some 200 MB in pandas at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllResult:
    """What a run did."""

    jobs: Mapping[str, JobNote]  # by name, in the order in which they ran
    outputs: Mapping[str, str]  # name -> path, of all results
    accounts: Sequence[Mapping[str, Any]]  # of each table over the hours of the window
    hours: int  # that the answers rest on
    hours_read: int  # of these, in this run
    window: Mapping[str, str]  # begin of the first of these hours, end of the last; "": there are none
    warnings: Sequence[str]  # of the run as a whole
    errors: Mapping[str, FlowctlError]  # of jobs that failed

    @property
    def failed(self) -> list[str]:
        """Names of the jobs that failed."""
        return [name for name, note in self.jobs.items() if note.state is JobState.FAILED]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        found = {name: getattr(self, name) for name in self.__slots__ if name != "errors"}
        jobs = {name: note.as_dict() for name, note in self.jobs.items()}
        return {"format": FORMAT, "passed": not self.failed, "failed": self.failed, **found, "jobs": jobs}


@dataclass(slots=True)
class Known:
    """What is remembered of an hour."""

    files: dict[str, str] = field(default_factory=dict)  # digest of each -> its identity, "" where it was put aside
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)  # with what it was made, "": files came; octets
    accounts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by table
    newest: str = ""  # time of the newest record, ISO 8601; "": not known
    added: list[str] = field(default_factory=list)  # names of what was put beside the parts

    def gone(self, files: Iterable[str]) -> set[str]:
        """Return the names of files of which none of these, by their digests, has the name."""
        return {name[:_NAME] for name in self.files} - {name[:_NAME] for name in files}


def run(
    spark: SparkSession,
    events: str | None,
    out: str,
    jobs: Sequence[Job | str],
    options: Mapping[str, Any] | None = None,
    window: Window | None = None,
    tell: Callable[[str], None] = lambda _: None,
    listing: Listing | None = None,
) -> AllResult:
    """Run jobs: read what is new, make its parts, then the answers; jobs that fail are told, not raised.

    Args:
        spark: session; all jobs share it.
        events: folder of the records. None: there are none, for a job that goes without.
        out: folder of the results; made if it is missing. ``summary.json`` in it says what is returned, and after a run
            of one job also what it said of the others.
        jobs: themselves or their names in `JOBS`; those whose parts they use need not be among them.
        options: name of a job -> its options, or a mapping of those that are not as by default.
        window: widened to whole hours. None: all there is.
        tell: told what is being done.
        listing: of `events` in that window, if they are listed already. None: they are listed here.

    Raises:
        ConfigError: `out` cannot be written, another run is at work in it, or there are no records.
        FlowctlError: the results cannot be moved to `out`.
    """
    settings = dict(spark.sparkContext.getConf().getAll())
    if listing is None and events is not None and list(jobs) != ["report"]:
        # Before a folder is made for results of nothing.
        listing = list_records(events, window, settings)
    place = Place(out, settings)
    with locked(place, "_lock", os.O_RDWR | os.O_CREAT, fcntl.LOCK_NB):
        place.clear_staging()
        staging = place.staging()
        try:
            whole = (window or Window()).whole()
            work = _Run(spark, events, listing, place, staging, whole, tell, dict(options or {}))
            if window not in (None, whole):
                bounds = (
                    f"{word} {at:%Y-%m-%d %H:%M}" for word, at in (("from", whole.since), ("to", whole.until)) if at
                )
                work.warnings.append(f"a window is of whole hours: this one goes {' '.join(bounds)} UTC")
            return work.all(jobs)
        finally:
            staging.remove()
            spark.catalog.clearCache()  # a path that is written anew would be taken for what it was


@contextlib.contextmanager
def locked(place: Place, name: str, flags: int, wait: int = 0) -> Iterator[None]:
    """Within this context nothing else on this machine has that file or folder locked; on a store there is no lock.

    Raises:
        ConfigError: something has, and `wait` says that it is not waited for.
    """
    if place.storage.prefix:
        yield
        return
    number = os.open(place.path(name), flags, 0o666)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | wait)
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
    source: str = ""  # where the records lie, without links
    known: dict[Hour, Known] = field(default_factory=dict)
    wanted: dict[str, tuple[Part, Any]] = field(default_factory=dict)  # parts, and the options of their jobs
    errors: dict[str, FlowctlError] = field(default_factory=dict)  # of jobs
    broken: dict[str, FlowctlError] = field(default_factory=dict)  # of parts
    read: set[Hour] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)

    def all(self, asked: Sequence[Job | str]) -> AllResult:
        """Do everything; see `run`."""
        names = [item if isinstance(item, str) else item.name for item in asked]
        jobs = self._load(dict(zip(names, asked, strict=True)))
        for job in jobs.values():
            for name, merge in job.merge.items():
                merge(self.place.read_text(name) or "", "", self.options[job.name])
        record = _read_json(self.place, RECORD_FILE)
        self.known = {(text[:10], text[11:]): Known(**item) for text, item in record.get("hours", {}).items()}
        if self.listing is not None:
            self.source = resolved(self.listing.root)
            if (other := record.get("events", self.source)) != self.source:
                hint = f"name another folder with --out; if the records were moved, say so in {RECORD_FILE} there"
                raise ConfigError(f"{self.place.folder} has the results of other records, {other}", hint=hint)
            self._read(self.listing)
        hours = sorted(hour for hour in self.known if self.window.meets(hour))
        if self.listing is not None and not hours:
            where = " in the window" if self.window != Window() else ""
            raise ConfigError(f"{self.events} has no records{where}", hint="is it the folder of --events of a server?")
        earlier = _read_json(self.place, SUMMARY_FILE).get("jobs", {}) if len(names) == 1 else {}
        notes = {name: JobNote(name, **{**item, "state": JobState(item["state"])}) for name, item in earlier.items()}
        for name in names:
            notes[name] = self._answer(name, jobs.get(name), hours, notes)
        result = self._result({name: notes[name] for name in names}, hours)
        summary = result.as_dict() | {"jobs": {name: note.as_dict() for name, note in notes.items()}}
        self.place.write_text(SUMMARY_FILE, json.dumps(summary, indent=1, default=str) + "\n")
        return result

    def _load(self, asked: Mapping[str, Job | str]) -> dict[str, Job]:
        """Return the jobs, find their options and the parts that they make and use; one that is broken has failed."""
        jobs: dict[str, Job] = {}
        for name, item in asked.items():
            with self._kept_as(name, self.errors):
                jobs[name] = job_of(name) if isinstance(item, str) else item
                self._want(jobs[name], [part.name for part in jobs[name].parts])
        for job in jobs.values():
            for use in set(job.uses) - self.wanted.keys():
                with self._kept_as(job.name, self.errors):
                    self._want(_owner(use), [use])
        return jobs

    def _want(self, job: Job, parts: Sequence[str]) -> None:
        given = self.options.get(job.name) or {}
        if isinstance(given, Mapping):
            given = replace(job.options(), **given) if given else job.options()
        self.options[job.name] = given
        self.wanted |= {part.name: (part, given) for part in job.parts if part.name in parts}

    def _made_with(self, name: str) -> str:
        part, options = self.wanted[name]
        return part.made_with(options)

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
        before = {hour: self.known.get(hour) or Known() for hour in files}
        came = {hour for hour, there in files.items() if {*map(_digest_of, there)} - before[hour].files.keys()}
        kept = {hour for hour, there in files.items() if before[hour].gone(map(_digest_of, there))}
        for hour in sorted(came & kept):
            self._add(listing, hour, files[hour])
        groups: dict[tuple[Hour, ...], list[str]] = {}
        for name in self.wanted:
            other = {hour for hour in files if before[hour].parts.get(name, ("", 0))[0] != self._made_with(name)}
            stay = {hour for hour in kept if name in before[hour].parts}
            if hours := tuple(sorted((came | other) - stay)):
                groups.setdefault(hours, []).append(name)
        for hours, names in groups.items():
            self._read_hours(listing, names, {hour: files[hour] for hour in hours})

    def _add(self, listing: Listing, hour: Hour, there: Sequence[File]) -> None:
        """Put what new files of an hour tell beside what is known of it: others of its files are there no more."""
        known = self.known[hour]
        names = {name[:_NAME] for name in known.files}
        new = [file for file in there if _digest_of(file)[:_NAME] not in names]
        changed = sum(_digest_of(file) not in known.files for file in there) - len(new)
        self.warnings.append(
            f"{' '.join(hour)}: {len(known.gone(map(_digest_of, there)))} of its files are there no more, and what was "
            f"learnt of them stays; {len(new)} new ones are added, {changed} that were changed are not read again"
        )
        if new:
            self._read_hours(listing, [name for name in self.wanted if name in known.parts], {hour: new}, add=True)

    def _read_hours(
        self, listing: Listing, names: Sequence[str], files: Mapping[Hour, Sequence[File]], *, add: bool = False
    ) -> None:
        """Make parts of these files of hours: all that they have, or to be added."""
        self.tell(f"records of {len(files)} hours")
        others = self.known.keys() - (set() if add else files.keys())
        used = {item for hour in others for item in self.known[hour].files.values()}
        left = {*listing.of(files)} - {file for there in files.values() for file in there}
        records = read_hours(self.spark, listing, files, used=used - {""}, but=left)
        fit(self.spark, records.size_bytes)
        self.warnings += records.warnings
        self._make(records, names)
        self._remember(records, [name for name in names if name not in self.broken], files, add=add)

    def _make(self, records: Read, names: Sequence[str]) -> None:
        """Write what is put aside, and parts, in one query each, to the staging folder."""
        for name, frame in records.quarantine.items():
            frame.write.partitionBy("date", "hour").parquet(self.staging.path(f"{QUARANTINE}/{name}"))
        with ThreadPoolExecutor(PARTS_AT_A_TIME) as pool:
            list(pool.map(lambda name: self._write(name, records), names))

    def _write(self, name: str, records: Read) -> None:
        self.tell(name)
        part, options = self.wanted[name]
        with self._kept_as(name, self.broken):
            if any(map(records.has, part.reads)):
                save(part.make(records, options), part.columns, self.staging.path(part.folder()), *BY_HOUR)

    def _remember(self, records: Read, made: Sequence[str], files: Mapping[Hour, Sequence[File]], *, add: bool) -> None:
        """Give the parts of hours their places, and write down what they were made of."""
        quarantine = {*self.place.names(QUARANTINE), *self.staging.names(QUARANTINE)}
        for hour, there in files.items():
            known = self.known.setdefault(hour, Known())
            now = {_digest_of(file): records.identities.get(file.path, "") for file in there}
            gone, came = known.gone(now), now.keys() - known.files.keys()
            if gone and not add:
                line = f"{', '.join(made)} made without {len(gone)} of its files, which are there no more"
                self.warnings.append(f"{' '.join(hour)}: {line}")
            if came:
                known.parts = {
                    name: (made_with if add and name in made else "", size)
                    for name, (made_with, size) in known.parts.items()
                }
            known.files = known.files | now if gone else now
            accounts = {table: item.as_dict() for (of, table), item in records.accounts.items() if of == hour}
            if add:
                known.accounts |= {table: _sum(known.accounts.get(table, {}), item) for table, item in accounts.items()}
            elif not gone:
                known.accounts = accounts
            newest = records.newest.isoformat() if records.newest and hour_of(records.newest) == hour else ""
            known.newest = max(known.newest, newest) if gone else newest
            batch = digest(" ".join(sorted(now))) if add else ""
            for name in made:
                made_with = known.parts[name][0] if add else self._made_with(name)
                known.parts[name] = made_with, self._adopt(self.wanted[name][0].folder(hour), batch, known.added)
            if add or not gone:
                for name in quarantine:
                    self._adopt(f"{QUARANTINE}/{name}/date={hour[0]}/hour={hour[1]}", batch, known.added)
            known.added += [batch] if add else []
        # What is left of them is a folder without rows, which an answer that looks here first would take for the table.
        for name in (QUARANTINE, *(self.wanted[name][0].folder() for name in made)):
            self.staging.delete(name)
        self.read |= files.keys()
        hours = {" ".join(hour): asdict(known) for hour, known in sorted(self.known.items())}
        self.place.write_text(RECORD_FILE, json.dumps({"format": FORMAT, "events": self.source, "hours": hours}))

    def _adopt(self, folder: str, batch: str, added: Sequence[str]) -> int:
        """Give a folder of an hour its place, and return its size; 0: it has no row, and there is none.

        Args:
            folder: as it is called in the staging folder and in its place.
            batch: name of what is put beside the files that are there. Empty: it takes their place.
            added: names of what was put there before; what else was put there is of a killed run.
        """
        storage = self.place.storage
        if batch:
            for name in self.place.names(folder):
                if name.startswith(_ADDED) and name.split("-")[1] not in added:
                    self.place.delete(f"{folder}/{name}")
            for number, name in enumerate(self.staging.names(folder)):
                storage.system.create_dir(storage.path(folder), recursive=True)
                target = storage.path(f"{folder}/{_ADDED}{batch}-{number:05}.zstd.parquet")
                storage.system.move(self.staging.storage.path(f"{folder}/{name}"), target)
        elif self.staging.exists(folder):
            self.place.adopt(self.staging, folder)
        else:
            self.place.delete(folder)
            return 0
        files = [storage.path(f"{folder}/{name}") for name in self.place.names(folder)]
        return sum(info.size or 0 for info in storage.system.get_file_info(files))

    def _answer(self, name: str, job: Job | None, hours: Sequence[Hour], notes: Mapping[str, JobNote]) -> JobNote:
        """Make a job's answer and give its results their places; whatever goes wrong with it is its result."""
        self.tell(name)
        begun = time.monotonic()
        needed = () if job is None else (*(part.name for part in job.parts), *job.uses)
        for part in self.broken.keys() & needed:
            error = self.broken[part]
            self.errors.setdefault(name, type(error)(f"no {part}: {error}", hint=error.hint))
        note = JobNote(name, JobState.DONE)
        if job is not None and name not in self.errors:
            with self._kept_as(name, self.errors):
                answer = job.answer(self._parts(needed, hours, notes), self.options[name])
                warnings = (*self._missing(needed, hours), *answer.warnings)
                note = replace(note, summary=answer.summary, outputs=self._adopt_results(job), warnings=warnings)
        note = replace(note, took_s=round(time.monotonic() - begun, 3))
        if name not in self.errors:
            return note
        for result in () if job is None else job.results:
            self.staging.delete(result)
        error = self.errors[name]
        return JobNote(name, JobState.FAILED, str(error), error.hint or "", note.took_s)

    def _parts(self, names: Sequence[str], hours: Sequence[Hour], notes: Mapping[str, JobNote]) -> Parts:
        known = {hour: self.known[hour] for hour in hours}
        there = {name: [hour for hour in hours if known[hour].parts.get(name, ("", 0))[1]] for name in names}
        size_bytes = sum(known[hour].parts[name][1] for name, lies in there.items() for hour in lies)
        fit(self.spark, size_bytes)
        newest = None
        if hours:
            text = known[hours[-1]].newest
            newest = dt.datetime.fromisoformat(text) if text else end_of(hours[-1])
        return Parts(
            spark=self.spark,
            place=self.place,
            staging=self.staging,
            since=self.window.since,
            until=self.window.until,
            newest=newest,
            small=size_bytes <= SMALL_BYTES,
            events=self.events or "",
            accounts=self._accounts(hours),
            notes=notes,
            hours={name: (self.wanted[name][0], lies) for name, lies in there.items()},
        )

    def _missing(self, names: Sequence[str], hours: Sequence[Hour]) -> list[str]:
        """Return what to say of parts that are not as they are wanted, and cannot be made: their records are gone."""
        lines = []
        for name in names:
            made_with = self._made_with(name)
            if other := sum(self.known[hour].parts.get(name, [""])[0] != made_with for hour in hours):
                of = f"{other} of {len(hours)} hours"
                lines.append(f"{name} is missing, or was made with other options, of {of} whose records are gone")
        return lines

    def _adopt_results(self, job: Job) -> dict[str, str]:
        """Give the results of a job their places, delete those that it has no longer, and return where they are."""
        parts = [part.name for part in job.parts if part.result]  # have their places
        for name in set(job.results) - set(parts):
            if not self.staging.exists(name):
                self.place.delete(name)
            elif name not in job.merge:
                self.place.adopt(self.staging, name)
            else:  # the lock of its other writers is that of the folder
                with locked(self.place, "", os.O_RDONLY):
                    made = self.staging.read_text(name) or ""
                    text = job.merge[name](self.place.read_text(name) or "", made, self.options[job.name])
                    self.place.write_text(name, text)
        names = dict.fromkeys((*parts, *job.results))
        return {name: self.place.path(name) for name in names if self.place.exists(name)}

    def _result(self, notes: Mapping[str, JobNote], hours: Sequence[Hour]) -> AllResult:
        outputs = {name: path for note in notes.values() for name, path in note.outputs.items()}
        aside = [f"{QUARANTINE}/{name}" for name in self.place.names(QUARANTINE)]
        real = [hour for hour in hours if hour != ODD_HOUR]
        window = {"since": begin_of(real[0]), "until": end_of(real[-1])} if real else {}
        return AllResult(
            jobs=notes,
            outputs=outputs | {name: self.place.path(name) for name in aside},
            accounts=self._accounts(hours),
            hours=len(hours),
            hours_read=len(self.read & set(hours)),
            window={name: window[name].isoformat() if window else "" for name in ("since", "until")},
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


def job_of(name: str) -> Job:
    """Return the job of that name in `JOBS`; loads its module."""
    found: Job = importlib.import_module(JOBS[name]).JOB
    return found


def _owner(part: str) -> Job:
    """Return the job that makes a part."""
    return next(job for job in map(job_of, JOBS) if part in [item.name for item in job.parts])


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


def _digest_of(file: File) -> str:
    name = file.path.rpartition("/")[2]
    return f"{digest(f'{file.table} {name}')} {file.size_bytes}"


def _told(error: Exception) -> FlowctlError:
    """Return what to say of an error of a job."""
    if isinstance(error, FlowctlError):
        return error
    line = foreign((str(error).strip().splitlines() or [""])[0], 300)
    if isinstance(error, OSError):
        return FlowctlError(line, hint="check that the disk has room and the folder is writable")
    return FlowctlError(f"{type(error).__name__}: {line}", hint="run it alone with --debug to see where")
