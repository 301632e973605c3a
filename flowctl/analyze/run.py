"""The runner: reads the records that are new, makes the parts of their hours, then the answers of all jobs.

Theory of operation. ``OUT/record.json`` remembers of which files each part of an hour was made
(`flowctl.analyze.record`). A run makes those hours anew, whole, whose files are others or of which a part is missing or
was made with other options: one query per part. Parts are made beside and renamed; the record gives up those that they
replace before, and names them after. Answers are made of the parts of all hours in the window; ``summary.json`` gives
up the results of a job before they change. So a run that is killed leaves nothing that is named and not there.

An answer is kept where all that it follows from is as it was, and its results lie there as they were written; never
where others write them too (`AnalysisJob.merge`), or where it tells of other jobs. Spark is started when a step needs
it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import functools
import importlib
import inspect
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from flowctl.analyze.engine import DUCKDB, EngineChoice, EngineError, mapped_errors, running
from flowctl.analyze.job import BY_HOUR, AnalysisJob, JobNote, JobPart, JobState, Parts, digest, save
from flowctl.analyze.record import (
    RECORD_FILE,
    RECORD_FORMAT,
    KnownHour,
    MadePart,
    compared,
    made_of_other,
    packed,
    read_json,
    read_record,
)
from flowctl.analyze.records import checks, footers
from flowctl.analyze.records.footers import DAMAGED, UNREADABLE, Facts
from flowctl.analyze.records.listing import File, Listing, RecordsError, list_records
from flowctl.analyze.records.place import RecordPlace, local_path, resolved
from flowctl.analyze.records.read import Read, check_any, judged, look
from flowctl.analyze.records.window import Hour, Window, begin_of, end_of
from flowctl.core.text.files import sync
from flowctl.core.text.printable import foreign
from flowctl.errors import ConfigError, FlowctlError
from flowctl.records.telemetry import schema
from flowctl.units import format_count

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOBS: Final = {
    "sessions": "flowctl.analyze.viewers.sessions",
    "experience": "flowctl.analyze.viewers.experience",
    "fleet": "flowctl.analyze.viewers.fleet",
    "abuse": "flowctl.analyze.abuse.job",
    "whatif": "flowctl.analyze.whatif.job",
    "capacity": "flowctl.analyze.capacity.job",
    "report": "flowctl.analyze.report.job",
}
"""Name of a job -> the module with its `JOB`, in the order in which their answers are made."""
SUMMARY_FILE: Final = "summary.json"
FORMAT: Final = 2
"""Format of the summary, raised when a key goes or changes its meaning."""
QUARANTINE: Final = "quarantine"
_ASIDE: Final = {"rows": "bigint", "size": "bigint"}
"""Types of columns of what is put aside; others are texts."""
ALL: Final = ""
"""Stands among the parts of an hour for its accounts and what is put aside."""
MOST_DAMAGED: Final = 8
"""Most damaged files of a run: more of them mean that the disk fails."""
AT_A_TIME: Final = 2
"""Parts, or answers, that are made at a time: one is planned, by one core, while another is computed."""
_OF_DUCKDB: Final = " duckdb"
"""Ends `MadePart.made_with` of parts with sketches, which are another thing there than Spark's."""
BATCH_BYTES: Final = 128 << 20
"""Most size of records of which DuckDB makes parts at a time, whole hours: its lists of values cannot go to the disk.
Those of 1.4 GB at once did not fit into 1 GiB."""
SMALL_BYTES: Final = 32 << 20
"""Largest size on disk of parts that pandas is used for: they take 200 MB of memory at most."""


_Of = TypeVar("_Of")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllResult:
    """Results of a run."""

    jobs: Mapping[str, JobNote]  # by name, in the order in which they ran
    outputs: Mapping[str, str]  # name -> path, of all results
    accounts: Sequence[Mapping[str, Any]]  # of each table over the hours of the window
    hours: int  # that the answers rest on
    hours_read: int  # of these, in this run
    window: Mapping[str, str]  # begin of the first of these hours, end of the last; "": there are none
    warnings: Sequence[str]  # of the run as a whole
    errors: Mapping[str, FlowctlError]  # of jobs that failed
    engine: Mapping[str, str] = field(default_factory=dict)  # its name, and why it was that one

    @property
    def failed(self) -> list[str]:
        return [name for name, note in self.jobs.items() if note.state is JobState.FAILED]

    def as_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__ if name != "errors"}
        jobs = {name: note.as_dict() for name, note in self.jobs.items()}
        return {"format": FORMAT, "passed": not self.failed, "failed": self.failed, **found, "jobs": jobs}


def run(
    spark: SparkSession | Callable[[], SparkSession],
    events: str | None,
    out: str,
    jobs: Sequence[AnalysisJob | str],
    options: Mapping[str, Any] | None = None,
    window: Window | None = None,
    tell: Callable[[str], None] = lambda _: None,
    listing: Listing | None = None,
    engine: EngineChoice | None = None,
) -> AllResult:
    """Run jobs: read what is new, make its parts, then the answers; jobs that fail are told, not raised.

    `spark` is a session of the engine that runs (`flowctl.analyze.engine`), or starts one.
    """
    opened: list[SparkSession] = []
    opening = threading.Lock()

    def session() -> SparkSession:
        with opening:
            if not opened:
                opened.append(spark() if callable(spark) else spark)
                if running() == DUCKDB:
                    cast(Any, opened[0]).spill_to(staging.storage.path("spill"))
        return opened[0]

    settings = {}
    if running() != DUCKDB and (not callable(spark) or local_path(out) is None):
        settings = importlib.import_module("flowctl.analyze.spark.session").settings_in(session())
    if listing is None and events is not None:
        # Before a folder is made for results of nothing.
        listing = list_records(events, window and window.with_day_before(), settings)
    place = RecordPlace(out, settings)
    with locked(place):
        source, known = read_record(place)
        place.clear_staging()
        staging = place.staging()
        whole = (window or Window()).whole()
        work = _AnalysisRun(session, events, listing, place, staging, whole, tell, dict(options or {}), known)
        work.engine = (engine or EngineChoice(running(), "asked for"))._asdict()
        try:
            if window not in (None, whole):
                bounds = (
                    f"{word} {at:%Y-%m-%d %H:%M}" for word, at in (("from", whole.since), ("to", whole.until)) if at
                )
                work.warnings.append(f"a window is of whole hours: this one goes {' '.join(bounds)} UTC")
            return work.all(jobs, source)
        except Exception:
            raise
        except BaseException:  # a signal: what runs is given up
            for found in opened:
                with contextlib.suppress(Exception):
                    if running() != DUCKDB:
                        importlib.import_module("flowctl.analyze.spark.session").cancel(found)
            raise
        finally:
            staging.remove()
            for found in opened:
                with contextlib.suppress(Exception):  # a Java that has died says so where it was asked for something
                    found.catalog.clearCache()  # a path that is written anew would be taken for what it was


@contextlib.contextmanager
def locked(place: RecordPlace) -> Iterator[None]:
    """Keep other runs on this machine out of a folder of results; on a store there is no lock."""
    if place.storage.prefix:
        yield
        return
    path = place.path("_lock")
    try:  # a link would have a file made wherever it leads
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        told = f"cannot lock {path}: {error.strerror}"
        raise ConfigError(told, hint="if it is a link, or another user's, take it away") from error
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
class _AnalysisRun:
    """One run; the steps in the order in which they are done."""

    session: Callable[[], SparkSession]
    events: str | None
    listing: Listing | None
    place: RecordPlace
    staging: RecordPlace
    window: Window
    tell: Callable[[str], None]
    options: dict[str, Any]
    known: dict[Hour, KnownHour]
    source: str = ""  # where the records lie, without links
    summary: dict[str, Any] = field(default_factory=dict)  # of the run before, as it lies there
    wanted: dict[str, tuple[JobPart, Any]] = field(default_factory=dict)  # parts, and the options of their jobs
    errors: dict[str, FlowctlError] = field(default_factory=dict)  # of jobs
    broken: dict[str, FlowctlError] = field(default_factory=dict)  # of parts
    read: set[Hour] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    listed: dict[Hour, str] = field(default_factory=dict)  # digest of the files of each hour
    engine: dict[str, str] = field(default_factory=dict)
    noted: bool = False  # that hours have lost files is not yet in the record

    def all(self, asked: Sequence[AnalysisJob | str], source: str | None) -> AllResult:
        """Do everything, see `run`; `source`: where the records lay so far."""
        names = [item if isinstance(item, str) else item.name for item in asked]
        if self.listing is not None:
            self.source = resolved(self.listing.root)
            if source not in (None, self.source):
                hint = f"name another folder with --out; if the records were moved, say so in {RECORD_FILE} there"
                raise ConfigError(f"{self.place.folder} has the results of other records, {source}", hint=hint)
            self.listed = _listed(self.listing)
            self._note_gone(self.listing)
            if self._stale():
                with ThreadPoolExecutor(1) as pool:  # pandas and more, while Java starts
                    pool.submit(lambda: [job_of(name) for name in names if name in JOBS])
                    self.session()
        jobs = self._load(dict(zip(names, asked, strict=True)))
        folders = {part.folder().partition("/")[0] for part, _ in self.wanted.values()}
        self.place.check_ours({QUARANTINE, *folders, *(name for job in jobs.values() for name in job.results)})
        for job in jobs.values():
            for name, merge in job.merge.items():
                merge(self.place.read_text(name) or "", "", self.options[job.name], lambda _: None)
        last = [name for name, job in jobs.items() if not _needed(job)]  # they tell of the others
        tries = [name for name, job in jobs.items() if job.tries and last]
        parts = [part.name for name in tries for part in jobs[name].parts]
        held = {name: self.wanted.pop(name) for name in parts}  # what only they need is made behind what counts
        if self.listing is not None:
            self._read(self.listing)
        hours = sorted(hour for hour in self.known if self.window.meets(hour))
        if self.listing is not None and not hours:
            where = " in the window" if self.window != Window() else ""
            raise RecordsError(f"{self.events} has no records{where}", hint="is it the folder of --events of a server?")
        self.summary = read_json(self.place, SUMMARY_FILE, FORMAT)
        try:
            jobs_then = self.summary.get("jobs", {})
            earlier = {
                name: JobNote(name, **{**item, "state": JobState(item["state"])}) for name, item in jobs_then.items()
            }
        except (TypeError, ValueError, KeyError, AttributeError):  # of another flowctl, or by hand: it tells nothing
            self.summary, earlier = {}, {}
        notes = {name: note for name, note in earlier.items() if name not in names} if len(names) == 1 else {}

        def answers(some: Sequence[str]) -> None:
            so_far = dict(notes)
            _each(some, lambda name: self._answer(name, jobs.get(name), hours, so_far, earlier.get(name)), place)

        def place(note: JobNote) -> None:
            notes[note.name] = replace(self._placed(jobs.get(note.name), note, hours), **self._span(hours))

        answers([name for name in names if name not in (*last, *tries)])
        for name in tries:  # what was counted is told before them, and once more with them
            notes[name] = JobNote(name, JobState.DONE, summary={"why": "it is being tried; this page will tell"})
        answers(last if tries else ())
        self.wanted |= held
        if self.listing is not None and held:
            self._read(self.listing)
        answers(tries)
        answers(last)
        result = self._result({name: notes[name] for name in names}, hours)
        self._write_summary(result.as_dict() | {"jobs": {name: note.as_dict() for name, note in notes.items()}})
        return result

    def _write_summary(self, summary: Mapping[str, Any]) -> None:
        self.place.write_text(SUMMARY_FILE, json.dumps(summary, indent=1, default=str) + "\n")

    def _load(self, asked: Mapping[str, AnalysisJob | str]) -> dict[str, AnalysisJob]:
        jobs: dict[str, AnalysisJob] = {}
        for name, item in asked.items():
            with self._kept_as(name, self.errors):
                jobs[name] = job_of(name) if isinstance(item, str) else item
                self._want(jobs[name], [part.name for part in jobs[name].parts])
        for job in jobs.values():
            for use in set(job.uses) - self.wanted.keys():
                with self._kept_as(job.name, self.errors):
                    owner = next(job for job in map(job_of, JOBS) if use in [part.name for part in job.parts])
                    self._want(owner, [use])
        return jobs

    def _want(self, job: AnalysisJob, parts: Sequence[str]) -> None:
        given = self.options.get(job.name) or {}
        if isinstance(given, Mapping):
            given = replace(job.options(), **given) if given else job.options()
        self.options[job.name] = given
        self.wanted |= {part.name: (part, given) for part in job.parts if part.name in parts}

    def _made_with(self, name: str) -> str:
        part, options = self.wanted[name]
        made_with = part.made_with(options)
        return f"{made_with}{_OF_DUCKDB}" if part.has_sketches and running() == DUCKDB else made_with

    def _can_read(self, name: str, made: MadePart) -> bool:
        """Return whether a part is of the engine of this run, if its sketches are of one."""
        ours = made.made_with.endswith(_OF_DUCKDB) == (running() == DUCKDB)
        return ours or not self.wanted[name][0].has_sketches

    @contextlib.contextmanager
    def _kept_as(self, name: str, errors: dict[str, FlowctlError]) -> Iterator[None]:
        """Within this context whatever goes wrong is the error of that job or part: none may cost the others."""
        try:
            with mapped_errors():
                yield
        except FlowctlError as error:
            errors[name] = error
        except Exception as error:  # noqa: BLE001 - it may fail in any way; a signal is no failure, and ends the run
            line = foreign((str(error).strip().splitlines() or [""])[0], 300)
            if isinstance(error, OSError):
                told = FlowctlError(line, hint="check that the disk has room and the folder is writable")
            else:
                told = FlowctlError(f"{type(error).__name__}: {line}", hint="run it alone with --debug to see where")
            errors[name] = told
            told.__cause__ = error  # for --debug

    def _note_gone(self, listing: Listing) -> None:
        """Note which hours have lost files that they were made of: these stay as they are, whatever comes."""
        files: dict[Hour, list[File]] = {}
        for file in listing.files:
            files.setdefault(file.hour, []).append(file)
        for hour, known in self.known.items():
            if hour in files and known.listed != self.listed[hour]:
                gone, others = compared(known.files, files[hour])
                if gone:
                    known.listed, self.noted = self.listed[hour], True
                if gone and others:
                    self.warnings.append(
                        f"{' '.join(hour)}: {gone} of the files that it was made of are there no more, "
                        f"so it stays as it is; {others} others are left out"
                    )

    def _stale(self) -> dict[Hour, list[str]]:
        """Return what is to be made of each hour: parts by name, and `ALL` where its files are others."""
        found: dict[Hour, list[str]] = {}
        end = max((end_of(hour) for hour in self.listed if self.window.meets(hour)), default=None)
        for hour, listed in self.listed.items():
            inside, known = self.window.meets(hour), self.known.get(hour, KnownHour())
            names = [name for name in self.wanted if inside or (end and self._looks_back(name, hour, end))]
            if known.listed != listed and (inside or names):
                found[hour] = [ALL, *names]
            elif stale := [name for name in names if known.is_stale(name, self._made_with(name))]:
                found[hour] = stale
        return found

    def _forget_missing(self) -> None:
        """Forget of the record what no longer holds: parts that were removed, and files that could not be opened.

        And parts of another size, as a copy of the folder has them that was put back: they were made of other files.
        """
        storage, there = self.place.storage, dict[str, int]()
        for part, _ in self.wanted.values():
            if storage.is_folder(base := part.folder()):
                sizes = dict[str, int]()
                for path, info in storage.walk(base):
                    folder = f"{base}/{path.rpartition('/')[0]}"
                    hidden = path.rpartition("/")[2][:1] in {".", "_"}  # what Spark keeps beside its files
                    sizes[folder] = sizes.get(folder, 0) + (0 if hidden else info.size or 0)
                there |= sizes
        for hour, known in self.known.items():
            for name in self.wanted.keys() & known.parts.keys():
                folder = self.wanted[name][0].folder(hour)
                if there.get(folder, 0) == known.size_bytes(name):
                    continue
                if folder in there and known.made_of != known.listed:
                    self.warnings.append(
                        f"{' '.join(hour)}: {folder} is not what the record names, as if an old copy was put back, "
                        "and stays: some of the files that it was made of are there no more"
                    )
                elif folder in there or known.size_bytes(name):
                    del known.parts[name]
            unreadable = any(UNREADABLE in told["files_by_reason"] for told in known.accounts.values())
            if unreadable and known.made_of == known.listed:
                known.listed = ""

    def _read(self, listing: Listing) -> None:
        """Make parts of the hours that are new or have changed, without files that prove to be damaged."""
        self._forget_missing()
        if not (stale := self._stale()):
            if self.noted:
                self._write_record()
            return
        self.tell(f"records of {format_count(len(stale), 'hour')}")
        read = Read(self.session, listing, time.time_ns() // 1_000)
        looked = {file: self._as_known(file, facts) for file, facts in look(read, listing.of(stale))}
        told: list[str] = []
        while found := self._read_files(read, looked, stale):
            looked |= found
            for hour in {file.hour for file in found}:  # its accounts are others, too
                stale[hour] = [ALL, *(name for name in stale[hour] if name != ALL)]
            told += [f"{foreign(file.path)}: {foreign(facts.detail)}" for file, facts in found.items()]
            if len(told) > MOST_DAMAGED:
                raise FlowctlError(
                    f"{len(told)} files of records are damaged, and a run does without {MOST_DAMAGED} at most; "
                    f"the first is {told[0]}",
                    hint="is the disk failing? Put files of a copy in their place, or move them away",
                )
        self.warnings += [f"a damaged file is put aside: {line}" for line in told]

    def _as_known(self, file: File, facts: Facts) -> Facts:
        known = self.known.get(file.hour)
        if facts.problem is None and known is not None and file.mark in known.damaged:
            return facts._replace(problem=DAMAGED, detail="an earlier run found it so")
        return facts

    def _read_files(
        self, read: Read, files: Mapping[File, Facts], stale: Mapping[Hour, Sequence[str]]
    ) -> dict[File, Facts]:
        """Make parts of hours; return files that prove to be damaged, without which it is to be done again."""
        looked = judged(files.items())
        for name in chain.from_iterable(stale.values()):
            self.broken.pop(name, None)
        if not self.known:
            check_any(read.listing, looked)
        there: dict[Hour, list[tuple[File, Facts]]] = {}
        for file, facts in looked:
            there.setdefault(file.hour, []).append((file, facts))
        todo: dict[str, list[Hour]] = {}
        for hour, names in stale.items():
            for name in names:
                todo.setdefault(name, []).append(hour)
        groups: dict[tuple[Hour, ...], list[str]] = {}  # parts that are made of the same hours
        for name, hours in todo.items():
            groups.setdefault(tuple(hours), []).append(name)
        read_before = frozenset(
            (table, hour)
            for hour, known in self.known.items()
            for table, told in known.accounts.items()
            if told["rows_out"]
        )
        for group, names in [(some, names) for hours, names in groups.items() for some in _batches(hours, there)]:
            records = Read(read.session, read.listing, read.now_us, read_before)
            broken: dict[str, FlowctlError] = {}
            spark = self.session()
            with self._kept_as(ALL, broken):
                records.enter(item for hour in group for item in there[hour])
                self._fit(spark, records.size_bytes)
                self._make(records, names, broken)
            # Of what Spark cannot read it seldom names the file: dictionaries are looked up far from where it is known.
            damaged = records.damaged() if any(isinstance(error, EngineError) for error in broken.values()) else {}
            if ALL in broken and not damaged:
                raise broken[ALL]
            if not damaged:
                self.warnings += records.warnings
                self.broken |= broken
                self._give_places(records, [name for name in names if name not in broken], {h: there[h] for h in group})
            # What is left is no table, and an answer that looks here first would take it for one.
            for name in (QUARANTINE, *(self.wanted[name][0].folder() for name in names if name != ALL)):
                self.staging.delete(name)
            if damaged:
                return damaged
        return {}

    def _make(self, records: Read, names: Sequence[str], broken: dict[str, FlowctlError]) -> None:
        """Write what is put aside, and parts, in a query each, to the staging folder; parts that fail are `broken`."""
        for name, frame in records.quarantine.items() if ALL in names else ():
            columns = {column: _ASIDE.get(column, "string") for column in frame.columns if column not in BY_HOUR}
            save(frame, columns, self.staging.path(f"{QUARANTINE}/{name}"), *BY_HOUR)

        def write(name: str) -> None:
            part, options = self.wanted[name]
            with self._kept_as(name, broken):
                if any(map(records.has, part.reads)):
                    save(part.make(records, options), part.columns, self.staging.path(part.folder()), *BY_HOUR)

        _each([name for name in names if name != ALL], write)

    def _give_places(
        self, records: Read, names: Sequence[str], hours: Mapping[Hour, Sequence[tuple[File, Facts]]]
    ) -> None:
        """Put parts in the places of earlier ones, which the record gives up before, and names them after."""
        aside = sorted({*self.place.names(QUARANTINE), *self.staging.names(QUARANTINE)})
        sizes: dict[str, int] = {}
        gives_up = False
        for name, hour in product(names, hours):
            if name == ALL:
                folders = [f"{QUARANTINE}/{table}/date={hour[0]}/hour={hour[1]}" for table in aside]
            else:
                folders = [self.wanted[name][0].folder(hour)]
            sizes |= {folder: self._synced_bytes(folder) for folder in folders}
            known = self.known.setdefault(hour, KnownHour())
            gives_up |= bool(known.listed) if name == ALL else known.parts.pop(name, None) is not None
            known.listed = "" if name == ALL else known.listed
        if gives_up:
            self._write_record()
        for folder, size_bytes in sizes.items():
            if size_bytes:
                self.place.adopt(self.staging, folder)
            elif self.place.exists(folder):
                self.place.delete(folder)
        for name, (hour, files) in product(names, hours.items()):
            known = self.known[hour]
            self.read.add(hour)
            if name != ALL:
                part = self.wanted[name][0]
                known.parts[name] = MadePart(self._made_with(name), self.listed[hour], sizes[part.folder(hour)])
                continue
            known.listed = known.made_of = self.listed[hour]
            known.files = packed(file for file, facts in files if facts.problem is None)
            known.damaged = [file.mark for file, facts in files if facts.problem == DAMAGED]
            known.accounts = {table: item.as_dict() for (of, table), item in records.accounts.items() if of == hour}
            known.newest = records.newest[hour].isoformat() if hour in records.newest else ""
            known.heard = {node: at.isoformat() for node, at in records.heard.get(hour, {}).items()}
        self._write_record()

    def _synced_bytes(self, folder: str) -> int:
        """Return how large the new files of a folder are, once they are on the disk."""
        storage = self.staging.storage
        files = [storage.path(f"{folder}/{name}") for name in self.staging.names(folder)]
        for file in files if not storage.prefix else ():
            sync(Path(file))
        return sum(info.size or 0 for info in storage.system.get_file_info(files))

    def _write_record(self) -> None:
        hours = {" ".join(hour): asdict(known) for hour, known in sorted(self.known.items())}
        record = {"format": RECORD_FORMAT, "events": self.source, "hours": hours}
        self.place.write_text(RECORD_FILE, json.dumps(record))

    def _answer(
        self,
        name: str,
        job: AnalysisJob | None,
        hours: Sequence[Hour],
        notes: Mapping[str, JobNote],
        earlier: JobNote | None,
    ) -> JobNote:
        """Make a job's answer, or find that it is kept; whatever goes wrong with it is its result."""
        self.tell(name)
        begun = time.monotonic()
        needed = _needed(job) if job else ()
        others = self._others_of(notes, hours)
        self.warnings += others.values()
        for part in self.broken.keys() & needed:
            error = self.broken[part]
            self.errors.setdefault(name, type(error)(f"no {part}: {error}", hint=error.hint))
        note = JobNote(name, JobState.DONE)
        if job is not None and name not in self.errors:
            with self._kept_as(name, self.errors):
                if earlier is not None and earlier.made_of and earlier.made_of == self._made_of(job, hours):
                    return replace(earlier, outputs=self._outputs(job), took_s=0.0)
                told = {
                    of: replace(note, warnings=(*note.warnings, others[of]))
                    for of, note in notes.items()
                    if of in others
                }
                answer = job.answer(self._parts(needed, hours, {**notes, **told}), self.options[name])
                warnings = (*self._missing(needed, hours), *answer.warnings, *(() if needed else others.values()))
                note = replace(note, summary=answer.summary, warnings=warnings)
        return replace(note, took_s=round(time.monotonic() - begun, 3))

    def _placed(self, job: AnalysisJob | None, note: JobNote, hours: Sequence[Hour]) -> JobNote:
        """Give the results of an answer their places, in the thread that a signal ends; a kept one has them."""
        if job is not None and note.name not in self.errors and not note.made_of:
            with self._kept_as(note.name, self.errors):
                self._forget(note.name)
                self._adopt_results(job)
                note = replace(note, made_of=self._made_of(job, hours), outputs=self._outputs(job))
        if note.name not in self.errors:
            return note
        for result in () if job is None else job.results:
            self.staging.delete(result)
        error = self.errors[note.name]
        return JobNote(note.name, JobState.FAILED, str(error), error.hint or "", note.took_s)

    def _others_of(self, notes: Mapping[str, JobNote], hours: Sequence[Hour]) -> dict[str, str]:
        """Return what to say of jobs whose results are of other hours than this run, by name."""
        span = self._span(hours)
        lines = {}
        for name, note in notes.items():
            if note.state is JobState.DONE and note.window and {"hours": note.hours, "window": note.window} != span:
                bounds = f"from {note.window['since']} to {note.window['until']}"
                lines[name] = f"the results of {name} are of other hours: {note.hours}, {bounds}"
        return lines

    def _made_of(self, job: AnalysisJob, hours: Sequence[Hour]) -> str:
        """Return what tells an answer and its results, as they lie there, from any other; "": it is not to be kept."""
        needed = _needed(job)
        if job.merge or not needed or not _code():
            return ""
        known = [
            [
                item.newest,
                item.heard,
                item.accounts,
                [astuple(made) for made in map(item.parts.get, needed) if made],
            ]
            for item in map(self.known.__getitem__, hours)
        ]
        known += [
            [astuple(item.parts[name]) for name in needed if name in item.parts] for _, item in self._before(hours)
        ]
        wanted = [self._made_with(name) for name in needed]
        there = [self.place.state(name) for name in job.results]
        options = repr((self.window, self.options[job.name]))
        return digest(json.dumps((_code(), options, wanted, [*map(list, hours)], known, there)))

    def _with_rows(self, name: str, hours: Sequence[Hour]) -> list[Hour]:
        """Return in which of these hours, those of the window, and of those it looks back to, a part has rows."""
        made_with = self._made_with(name)
        before = (
            hour
            for hour, known in self._before(hours)
            if self._looks_back(name, hour, end_of(hours[-1]))
            if name in known.parts and known.parts[name].made_with == made_with  # another may have other columns
        )
        there = [hour for hour in (*before, *hours) if self.known[hour].size_bytes(name)]
        return [hour for hour in there if self._can_read(name, self.known[hour].parts[name])]

    def _looks_back(self, name: str, hour: Hour, end: dt.datetime) -> bool:
        """Return whether a part looks back to an hour from the end of the window."""
        most = dt.timedelta(hours=self.wanted[name][0].looks_back_h)
        return begin_of(hour) < end and end - begin_of(hour) <= most

    def _parts(self, names: Sequence[str], hours: Sequence[Hour], notes: Mapping[str, JobNote]) -> Parts:
        known = {hour: self.known[hour] for hour in hours}
        there = {name: self._with_rows(name, hours) for name in names}
        size_bytes = sum(self.known[hour].size_bytes(name) for name, lies in there.items() for hour in lies)
        newest = max((known[hour].newest for hour in hours), default="")
        heard = sorted((at, node) for hour in hours for node, at in known[hour].heard.items())

        def session() -> SparkSession:  # its settings are those of all answers, for another one is made beside
            self._fit(self.session(), sum(item.size_bytes(name) for item in known.values() for name in self.wanted))
            return self.session()

        return Parts(
            session=session,
            place=self.place,
            staging=self.staging,
            since=self.window.since,
            until=self.window.until,
            newest=dt.datetime.fromisoformat(newest) if newest else None,
            heard={node: dt.datetime.fromisoformat(at) for at, node in heard},
            small=size_bytes <= SMALL_BYTES,
            events=self.events or "",
            accounts=self._accounts(hours),
            notes=notes,
            hours={name: (self.wanted[name][0], lies) for name, lies in there.items()},
            before={name: self._earlier(name, hours) for name in names},
            tell=self.tell,
        )

    def _earlier(self, name: str, hours: Sequence[Hour]) -> list[Hour]:
        """Return the hours before these in which a part has rows; one made otherwise may have other columns."""
        made_with, before = self._made_with(name), self._before(hours)
        return [hour for hour, item in before if item.size_bytes(name) and item.parts[name].made_with == made_with]

    def _fit(self, spark: SparkSession, size_bytes: int) -> None:
        if running() != DUCKDB:
            from flowctl.analyze.spark.session import fit

            fit(spark, size_bytes)

    def _before(self, hours: Sequence[Hour]) -> list[tuple[Hour, KnownHour]]:
        return sorted((hour, known) for hour, known in self.known.items() if [hour] < [*hours[:1]])

    def _missing(self, names: Sequence[str], hours: Sequence[Hour]) -> list[str]:
        """Return what to say of parts that are not as they are wanted, and cannot be made: their records are gone."""
        lines = []
        for name in names:
            made_with = self._made_with(name)
            known = [self.known[hour] for hour in hours]
            other = sum(made_of_other(item.parts.get(name), item.made_of, made_with) for item in known)
            if other:
                of = f"{other} of {len(hours)} hours"
                how = "is missing, or was made of other files or with other options"
                lines.append(f"{name} {how}, of {of} whose records are gone")
        return lines

    def _outputs(self, job: AnalysisJob) -> dict[str, str]:
        names = dict.fromkeys((*(part.name for part in job.parts if part.result), *job.results))
        return {name: self.place.path(name) for name in names if self.place.exists(name)}

    def _forget(self, name: str) -> None:
        """Have the summary name no result of a job before they change, so that all that it names is always there."""
        if note := self.summary.get("jobs", {}).get(name):
            ended = JobNote(name, JobState.FAILED, "the run that made it anew was ended", "run it again")
            outputs = {
                result: path for result, path in self.summary["outputs"].items() if result not in note["outputs"]
            }
            jobs = self.summary["jobs"] | {name: ended.as_dict()}
            failed = [of for of, told in jobs.items() if told["state"] == JobState.FAILED]
            self.summary |= {"passed": False, "failed": failed, "outputs": outputs, "jobs": jobs}
            self._write_summary(self.summary)

    def _adopt_results(self, job: AnalysisJob) -> None:
        """Give the results of a job their places, but for parts, which have them; delete those it has no longer."""
        for name in set(job.results) - {part.name for part in job.parts}:
            if not self.staging.exists(name):
                self.place.delete(name)
            elif name not in job.merge:
                self.place.adopt(self.staging, name)
            else:
                self._merge_result(job, name)

    def _merge_result(self, job: AnalysisJob, name: str) -> None:
        merge, made, options = job.merge[name], self.staging.read_text(name) or "", self.options[job.name]
        self.place.change_text(name, lambda there: merge(there, made, options, self.warnings.append))

    def _result(self, notes: Mapping[str, JobNote], hours: Sequence[Hour]) -> AllResult:
        outputs = {name: path for note in notes.values() for name, path in note.outputs.items()}
        aside = [f"{QUARANTINE}/{name}" for name in self.place.names(QUARANTINE)]
        return AllResult(
            jobs=notes,
            outputs=outputs | {name: self.place.path(name) for name in aside},
            accounts=self._accounts(hours),
            **self._span(hours),
            hours_read=sum(bool(self.known[hour].newest) for hour in self.read & {*hours}),
            engine=self.engine,
            warnings=[*dict.fromkeys(self.warnings)],  # what was tried again says so twice
            errors={name: self.errors[name] for name in notes if name in self.errors},
        )

    def _span(self, hours: Sequence[Hour]) -> dict[str, Any]:
        """Return how many hours have records that can be used, and from when to when they are."""
        real = [hour for hour in hours if self.known[hour].newest]
        bounds = [begin_of(real[0]).isoformat(), end_of(real[-1]).isoformat()] if real else ["", ""]
        return {"hours": len(real), "window": dict(zip(("since", "until"), bounds, strict=True))}

    def _accounts(self, hours: Sequence[Hour]) -> list[dict[str, Any]]:
        sums: dict[str, dict[str, Any]] = {}
        for hour in hours:
            for table, figures in self.known[hour].accounts.items():
                sums[table] = _sum(sums.get(table, {}), figures)
        return list(sums.values())


def _each(names: Sequence[str], make: Callable[[str], _Of], then: Callable[[_Of], None] = lambda _: None) -> None:
    """Make something of each name, `AT_A_TIME` at a time; a signal is not kept waiting for what runs."""
    futures: dict[str, Future[_Of]] = {name: Future() for name in names}
    left = deque(names)

    def work() -> None:
        while left:
            with contextlib.suppress(IndexError):  # the other one was faster
                name = left.popleft()
                try:
                    futures[name].set_result(make(name))
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    futures[name].set_exception(error)

    for _ in names[:AT_A_TIME]:
        threading.Thread(target=work, daemon=True).start()
    try:
        for future in futures.values():
            then(future.result())
    finally:
        left.clear()


def _batches(hours: Sequence[Hour], there: Mapping[Hour, Sequence[tuple[File, Facts]]]) -> Iterator[tuple[Hour, ...]]:
    """Yield hours of which parts are made at a time, see `BATCH_BYTES`; Spark makes all in one query."""
    batch, size_bytes = list[Hour](), 0
    for hour in hours:
        more_bytes = sum(file.size_bytes for file, _ in there[hour])
        if batch and running() == DUCKDB and size_bytes + more_bytes > BATCH_BYTES:
            yield tuple(batch)
            batch, size_bytes = [], 0
        batch.append(hour)
        size_bytes += more_bytes
    yield tuple(batch)


def _needed(job: AnalysisJob) -> tuple[str, ...]:
    return *(part.name for part in job.parts), *job.uses


@functools.cache
def _checks() -> str:
    """Return what tells the checks of this flowctl from others: their text."""
    return digest("".join(map(inspect.getsource, (schema, footers, checks))))


@functools.cache
def _code() -> str:
    """Return what tells this flowctl from another: the files that it is loaded from; "": it is from none (a zip)."""
    files = sorted(path for kind in ("*.py", "*.sql") for path in Path(__file__).parents[1].rglob(kind))
    return digest(repr([(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files])) if files else ""


def job_of(name: str) -> AnalysisJob:
    found: AnalysisJob = importlib.import_module(JOBS[name]).JOB
    return found


def _sum(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures by name, added up; texts as they are."""
    found = dict(one)
    for name, value in other.items():
        if isinstance(value, Mapping):
            found[name] = _sum(found.get(name, {}), value)
        else:
            found[name] = value if isinstance(value, str) else found.get(name, 0) + value
    return found


def _listed(listing: Listing) -> dict[Hour, str]:
    """Return of each hour a digest of its files, and of how they are checked."""
    found: dict[Hour, list[str]] = {}
    for file in listing.files:
        found.setdefault(file.hour, []).append(file.mark)
    return {hour: digest("\n".join([_checks(), *sorted(files)])) for hour, files in found.items()}
