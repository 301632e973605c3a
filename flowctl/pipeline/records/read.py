"""Reads the records of hours: rows that can be used, the others put aside with their reason, and accounts of both.

First each file is looked at (`footers`): in threads of this process if they are few, else on Spark's workers. After
that everything is known: which files are put aside whole, which are copies of others, and how many rows of the rest
cannot be used, so that accounts need no pass of their own. Files of which every row can be used, which are nearly all,
are read by Spark as they are, with no check in the way. The others (a row is bad, or the file lies outside the folder
of an hour) are read by Arrow in Spark's workers, row by row.

The driver keeps some 1.6 kB of each file while the hours are read, 32 MB for 20,000 of them. Rows never come to it.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from flowctl.errors import ConfigError
from flowctl.pipeline.records import old
from flowctl.pipeline.records.accounts import Accounts
from flowctl.pipeline.records.checks import CHECKS
from flowctl.pipeline.records.footers import FACTS_DDL, Facts, checked, facts_of, times_of
from flowctl.pipeline.records.window import Hour
from flowctl.telemetry.schema import FORMAT, TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flowctl.pipeline.records.listing import File, Listing

DRIVER_FILES: Final = 256
DRIVER_BYTES: Final = 256 << 20
"""So many files of so many octets are looked at here: a job of Spark takes longer to start than that takes."""
FILES_PER_TASK: Final = 500
"""Some seconds of work, so that a lost worker repeats little."""
SMALL_FILE_BYTES: Final = 1 << 20
MOST_NAMED: Final = 32
"""More files than these are named by their folders, see `Read.table`: Spark lists up to so many without a job."""
SETTLED_NS: Final = 3_600 * 10**9
"""An hour into which no file came for so long gets none while it is read."""
MANY_FILES: Final = 10_000
"""So many files that are small on average are worth a warning: opening one costs more than what it holds."""
TWICE_HINT: Final = "were files joined or rewritten beside the old ones? Take one of the two away"
_MADE_OF_OLD: Final = ("flow_closes", "flow_opens")
_OLD_SAMPLES: Final = "step string, "
"""Of format 1: the step of a ladder on which a viewer was."""
QUARANTINE_DDL: Final = "file string, reason string, row string, date string, hour string"
QUARANTINE_FILES_DDL: Final = (
    "path string, reason string, detail string, rows bigint, size bigint, date string, hour string"
)


@dataclass(frozen=True, slots=True)
class _Good:
    """A file that is used.

    Args:
        file: as listed.
        facts: of it.
    """

    file: File
    facts: Facts

    @property
    def plain(self) -> bool:
        """Whether Spark can read it as it is."""
        return self.file.in_place and not self.facts.reasons


@dataclass(slots=True)
class Read:
    """The records of some hours: a `flowctl.pipeline.job.Records`.

    Args:
        spark: session.
        listing: of the records.
        now_us: time of the run, microseconds since the epoch.
        accounts: of each hour and table that has files; complete at once.
        identities: of the files that are used, path -> identity: what copies of a file have in common. A later run is
            given those of the hours that it does not read again.
        quarantine: what is put aside, tables by name; ``<table>`` has rows (`file`, `reason`, `row`), ``<table>_files``
            files (`path`, `reason`, `detail`, `rows`, `size`); both have `date` and `hour`. Nothing: not in it. Lazy.
        newest: time of the newest record that can be used.
        size_bytes: of the usable files.
        warnings: lines for the person who started the job.
    """

    spark: SparkSession
    listing: Listing
    now_us: int
    accounts: dict[tuple[Hour, str], Accounts] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)
    quarantine: dict[str, DataFrame] = field(default_factory=dict)
    newest: dt.datetime | None = None
    size_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    _good: dict[str, list[_Good]] = field(default_factory=dict)
    _frames: dict[str, DataFrame] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Return whether there is any usable file of that table: nothing is read."""
        return bool(self._good.get(name)) or (name in _MADE_OF_OLD and bool(self._old("flow_events")))

    def _old(self, name: str) -> list[_Good]:
        return [good for good in self._good.get(name, ()) if good.facts.format < FORMAT]

    def table(self, name: str) -> DataFrame:
        """Return a table, all its columns, and `date` and `hour` beside; see `Records.table`."""
        if name not in self._frames:
            frames = [self._of_old(name)]
            new = [good for good in self._good.get(name, ()) if good.facts.format >= FORMAT or name != "flow_events"]
            if new or frames == [None]:
                frames.append(self._scan(name, new))
            self._frames[name] = reduce(DataFrame.unionByName, filter(None, frames))
        return self._frames[name]

    def _of_old(self, name: str) -> DataFrame | None:
        """Return what old records say of a table that is written otherwise today; None: nothing."""
        events = self._old("flow_events")
        if not events or name not in (*_MADE_OF_OLD, "flow_events"):
            return None
        told = self._scan("flow_events", events)
        if name == "flow_events":
            return old.events(told)
        samples = self._old("flow_samples")
        sampled = self._scan("flow_samples", samples, _OLD_SAMPLES) if samples else None
        return old.connections(told, sampled, ended=name == "flow_closes")

    def enter(self, looked: Iterable[tuple[File, Facts]], used: Collection[str]) -> None:
        """Enter what is known of files, by path: of copies the first is used.

        Args:
            looked: files and their facts.
            used: identities of files that other hours have used.

        Raises:
            ConfigError: records are there twice.
        """
        seen = set(used)
        bad: dict[str, list[tuple[Any, ...]]] = {}
        for file, found in looked:
            facts = found
            if facts.problem is None and facts.identity in seen:
                facts = facts._replace(problem="copy", detail=f"the same as another file: {facts.identity}")
            account = self.accounts.setdefault((file.hour, file.table), Accounts(table=file.table))
            account.enter(facts.problem, facts.rows, facts.reasons)
            if facts.problem is not None:
                row = (file.path, facts.problem, facts.detail, facts.rows, facts.size_bytes, *file.hour)
                bad.setdefault(file.table, []).append(row)
                continue
            seen.add(facts.identity)
            self.identities[file.path] = facts.identity
            self.size_bytes += facts.size_bytes
            self._good.setdefault(file.table, []).append(_Good(file, facts))
        for table, rows in bad.items():
            self.quarantine[f"{table}_files"] = self.spark.createDataFrame(rows, QUARANTINE_FILES_DDL)
        for table, goods in self._good.items():
            if odd := [good for good in goods if good.facts.reasons]:
                self.quarantine[table] = self._in_workers(odd, _quarantined, QUARANTINE_DDL)
            self._check_distinct(table, goods)
        newest = [good.facts.newest_us for goods in self._good.values() for good in goods if good.facts.newest_us]
        self.newest = dt.datetime.fromtimestamp(max(newest) / 1e6, dt.UTC) if newest else None
        self._warn(bad)

    def _warn(self, bad: dict[str, list[tuple[Any, ...]]]) -> None:
        for table, rows in bad.items():
            if table not in self._good:
                path, _, detail, *_ = rows[0]
                self.warnings.append(
                    f"{table} is left out: none of its {len(rows)} files can be used, the first is {path}: {detail}"
                )
        for table, goods in self._good.items():
            mean = sum(good.file.size_bytes for good in goods) // len(goods)
            if len(goods) > MANY_FILES and mean < SMALL_FILE_BYTES:
                self.warnings.append(
                    f"{table}: {len(goods)} files of {mean} bytes on average; a job spends its time with opening them: "
                    "join them, by hour, or let the recorder rotate less often"
                )

    def _scan(self, table: str, goods: Sequence[_Good], more: str = "") -> DataFrame:
        """Return the rows of files that can be used, with columns that files have beside those of today (`more`)."""
        schema = f"{TABLES[table].spark_ddl}, {more}date string, hour string"
        storage = self.listing.storage
        frames = []
        if plain := self._named(table, [good.file for good in goods if good.plain]):
            reader = self.spark.read.schema(schema).option("basePath", storage.uri(storage.path(table)))
            frames.append(reader.option("pathGlobFilter", "*.parquet").parquet(*map(_escaped, plain)))
        if odd := [good for good in goods if not good.plain]:
            frames.append(self._in_workers(odd, _usable, f"{TABLES[table].spark_ddl}, date string, hour string"))
        if not frames:
            return self.spark.createDataFrame([], schema)
        return frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1], allowMissingColumns=True)

    def _named(self, table: str, files: Sequence[File]) -> list[str]:
        """Return what Spark is given to read these files: each, or the folders of hours that have no others.

        Thousands of names take it minutes. Where a file may still come, each is named, so that no row is read that
        is in no account.
        """
        storage, before_ns = self.listing.storage, self.now_us * 1_000 - SETTLED_NS
        there = [file for file in self.listing.files if file.table == table]
        counts = Counter(file.hour for file in there)
        open_ = {file.hour for file in there if file.mtime_ns > before_ns}
        used = Counter(file.hour for file in files)
        whole = {hour for hour, count in used.items() if count == counts[hour] and hour not in open_}
        if len(files) <= MOST_NAMED or not all(file.in_place for file in there):
            whole = set()
        folders = [storage.path(f"{table}/date={date}/hour={hour}") for date, hour in sorted(whole)]
        return [storage.uri(path) for path in (*folders, *(storage.name(x.path) for x in files if x.hour not in whole))]

    def _in_workers(self, goods: Sequence[_Good], rows_of: Callable[..., Iterator[Any]], ddl: str) -> DataFrame:
        """Return rows that Spark's workers make of files."""
        rows = [(good.facts.path, good.file.in_place, good.facts.format, *good.file.hour) for good in goods]
        files = self.spark.createDataFrame(rows, "path string, in_place boolean, format int, date string, hour string")
        table, system, now_us = goods[0].file.table, self.listing.storage.system, self.now_us

        def made(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                for path, in_place, number, *hour in zip(*batch.to_pydict().values(), strict=True):
                    times = times_of((hour[0], hour[1]) if in_place else None, number, now_us)
                    with system.open_input_file(path) as source:
                        checks, names = CHECKS[table], TABLES[table].names
                        for rows, why in checked(source, pq.read_metadata(source), TABLES[table], checks, times, names):
                            yield from rows_of(rows, why, path, *hour)

        return files.repartition(max(1, min(len(rows), self.spark.sparkContext.defaultParallelism))).mapInArrow(
            made, ddl
        )

    def _check_distinct(self, table: str, goods: Sequence[_Good]) -> None:
        """See to it that no record is there twice in files that are no copies of each other.

        Raises:
            ConfigError: one is; names it and its files. Which of two rows is right nobody can tell, and jobs that add
                up would count both.
        """
        paths = meeting([good.facts for good in goods])
        if not paths:
            return
        meet = [good for good in goods if good.facts.path in paths]
        twice = self._scan(table, meet).groupBy("node", "seq").count().filter(f.col("count") > 1)
        told = twice.agg(f.sum(f.col("count") - 1).alias("more"), f.min(f.struct("node", "seq")).alias("first")).first()
        if told is None or not told["more"]:
            return
        node, seq = told["first"]
        names = [good.file.path for good in meet if _may_hold(good.facts, node, seq)]
        raise ConfigError(
            f"{table}: some records are there twice (same node and seq, in files that are no copies of each other): "
            f"{told['more']}, the first is {seq} of node {node} in {', '.join(names[:3])}",
            hint=TWICE_HINT,
        )


def read_hours(
    spark: SparkSession,
    listing: Listing,
    hours: Iterable[Hour],
    *,
    now_us: int | None = None,
    used: Collection[str] = (),
) -> Read:
    """Read the records of some hours.

    Args:
        spark: session.
        listing: see `list_records`.
        hours: which to read.
        now_us: time of the run, microseconds since the epoch. None: now.
        used: identities of files that other hours of earlier runs have used: copies of them are left out.

    Raises:
        ConfigError: records are there twice, in files that are no copies of each other, or there are files, none of
            them can be used, and none was in earlier runs.
    """
    read = Read(spark, listing, time.time_ns() // 1_000 if now_us is None else now_us, warnings=list(listing.warnings))
    files = listing.of(hours)
    read.enter(zip(files, _look(read, files), strict=True), used)
    if files and not read.identities and not used:
        reasons = sum((Counter(account.files_by_reason) for account in read.accounts.values()), Counter[str]())
        told = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
        raise ConfigError(
            f"{listing.root}: none of its {len(files)} files can be used ({told}); {read.warnings[-1]}",
            hint="is it a folder that a server wrote with --events?",
        )
    return read


def _look(read: Read, files: Sequence[File]) -> list[Facts]:
    """Return the facts of files, in their order."""
    storage, now_us = read.listing.storage, read.now_us
    rows = [(storage.name(file.path), file.table, *(file.hour if file.in_place else (None, None))) for file in files]
    system = storage.system

    def look(row: Sequence[Any]) -> Facts:
        path, table, *hour = row
        return facts_of(system, path, table, (hour[0], hour[1]) if hour[0] else None, now_us)

    if len(files) <= DRIVER_FILES and sum(file.size_bytes for file in files) <= DRIVER_BYTES:
        with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:
            return list(pool.map(look, rows))

    def looked(batches: Iterator[Any]) -> Iterator[Any]:
        schema = pa.schema([(name, _FACTS_TYPES[name]) for name in Facts._fields])
        for batch in batches:
            found = [look(row)._asdict() for row in zip(*batch.to_pydict().values(), strict=True)]
            yield pa.RecordBatch.from_pylist([row | {"reasons": [*row["reasons"].items()]} for row in found], schema)

    frame = read.spark.createDataFrame(rows, "path string, table string, date string, hour string")
    slices = max(read.spark.sparkContext.defaultParallelism, len(rows) // FILES_PER_TASK)
    table = frame.repartition(slices).mapInArrow(looked, FACTS_DDL).toArrow()
    of_path = {row["path"]: Facts(**row | {"reasons": dict(row["reasons"])}) for row in table.to_pylist()}
    return [of_path[row[0]] for row in rows]


_FACTS_TYPES: Final = {
    **dict.fromkeys(("path", "problem", "detail", "identity", "node"), pa.string()),
    **dict.fromkeys(("rows", "size_bytes", "first_seq", "last_seq", "newest_us"), pa.int64()),
    "format": pa.int32(),
    "recorded": pa.bool_(),
    "reasons": pa.map_(pa.string(), pa.int64()),
}


def _usable(rows: Any, why: Any, _: str, date: str, hour: str) -> Iterator[Any]:
    """Yield the rows that can be used, with the hour that they are counted in."""
    good = rows.filter(pc.is_null(why))
    for name, value in (("date", date), ("hour", hour)):
        good = good.append_column(name, pa.array([value] * good.num_rows, pa.string()))
    yield from good.to_batches()


def _quarantined(rows: Any, why: Any, path: str, date: str, hour: str) -> Iterator[Any]:
    """Yield the rows that cannot."""
    bad = rows.filter(pc.is_valid(why)).to_pylist()
    made = [
        {"file": path, "reason": reason, "row": json.dumps(row, default=str), "date": date, "hour": hour}
        for row, reason in zip(bad, why.drop_null().to_pylist(), strict=True)
    ]
    names = ("file", "reason", "row", "date", "hour")
    yield pa.RecordBatch.from_pylist(made, pa.schema([(name, pa.string()) for name in names]))


def _escaped(address: str) -> str:
    """Return an address whose name is taken letter by letter: to Spark ``[``, ``{``, ``*`` and ``?`` are patterns."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", address)


def meeting(files: Sequence[Facts]) -> set[str]:
    """Return the files that may hold a record that another one holds as well, by path.

    (`node`, `seq`) names a record of a table. A recorder's files follow each other, so the ranges of `seq` of a node's
    files do not meet; where they do, somebody rewrote files and left the old ones, or two servers have the same name.
    Files that no recorder wrote mix nodes, meet everywhere and hold nothing twice: alone they are no reason to look.

    Args:
        files: of one table.
    """
    if not any(facts.recorded for facts in files):
        return set()
    of_node: dict[str, list[tuple[int, int, str]]] = {}
    for node, first, last, path in ((facts.node, facts.first_seq, facts.last_seq, facts.path) for facts in files):
        if node is None or first is None or last is None:
            return {facts.path for facts in files} if len(files) > 1 else set()
        of_node.setdefault(node, []).append((first, last, path))
    found: set[str] = set()
    for spans in of_node.values():
        spans.sort()
        end, holder = spans[0][1:]
        for first, last, path in spans[1:]:
            if first <= end:
                found |= {path, holder}
            if last > end:
                end, holder = last, path
    return found


def _may_hold(facts: Facts, node: str, seq: int) -> bool:
    """Return whether a file may hold that record, as far as its statistics tell."""
    within = facts.first_seq is None or facts.last_seq is None or facts.first_seq <= seq <= facts.last_seq
    return facts.node in (None, node) and within
