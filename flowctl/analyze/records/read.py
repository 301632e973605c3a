"""Reads the records of hours: rows that can be used, the others put aside with their reason, and accounts of both.

First each file is looked at (`footers`), in threads if they are few, else on Spark's workers: then it is known which
are put aside whole and how many rows of the rest cannot be used. Files of which every row can be used, nearly all, are
read by Spark as they are; the others by Arrow in Spark's workers, each row checked again. Rows never come to the
driver.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import pyarrow as pa

from flowctl.analyze.engine import DUCKDB, running
from flowctl.analyze.models import run_text
from flowctl.analyze.records.accounts import Accounts
from flowctl.analyze.records.checks import checks_of, reasons
from flowctl.analyze.records.footers import DAMAGED, STRANGE, Facts, facts_of, opened, pieces
from flowctl.analyze.records.listing import RecordsError
from flowctl.analyze.records.place import literal
from flowctl.analyze.records.window import ODD_HOUR, Hour, end_of
from flowctl.analyze.spark.session import parallelism
from flowctl.core.text.printable import foreign
from flowctl.records.telemetry.schema import SPARK_TYPES, TABLES, Column, Kind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flowctl.analyze.records.listing import File, Listing

THREADS: Final = 8
"""Footers that are read at a time: a store answers each in some ten milliseconds."""
DRIVER_FILES: Final = 256
DRIVER_BYTES: Final = 256 << 20
"""Most octets, in `DRIVER_FILES` files at most, that are checked here: a job of Spark takes longer to start."""
FILES_PER_TASK: Final = 500
"""Files per task, some seconds of work: little is repeated when a worker is lost."""
MOST_NAMED: Final = 32
"""Most files that Spark is given by name, see `Read._named`: it lists up to so many without a job."""
SETTLED_NS: Final = 3_600 * 10**9
"""Time without a new file after which an hour is complete."""
_FOUR_DIGITS_US: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""Times of the years 1 to 9999."""
_BESIDE: Final = "date string, hour string"
_FILES_DDL: Final = f"path string, reason string, detail string, rows bigint, size bigint, {_BESIDE}"


class _Good(NamedTuple):
    """A file that is used, as it is listed, and what is known of it."""

    file: File
    facts: Facts


@dataclass(slots=True)
class Read:
    """The records of some hours: a `flowctl.analyze.job.Records`.

    `quarantine` has tables by name: ``<table>`` of rows (`file`, `reason`, `row`), ``<table>_files`` of files (`path`,
    `reason`, `detail`, `rows`, `size`), both with `date` and `hour`; lazy. Of what nothing is put aside is not in it.
    """

    session: Callable[[], SparkSession]
    listing: Listing
    now_us: int  # time of the run, since the epoch
    known: frozenset[tuple[str, Hour]] = frozenset()  # tables and hours of which records were read before
    accounts: dict[tuple[Hour, str], Accounts] = field(default_factory=dict)  # of each hour and table that has files
    quarantine: dict[str, DataFrame] = field(default_factory=dict)
    newest: dict[Hour, dt.datetime] = field(default_factory=dict)  # time of the newest record that can be used
    # By hour and node: likewise, of files that are of one node, as those of a recorder are
    heard: dict[Hour, dict[str, dt.datetime]] = field(default_factory=dict)
    size_bytes: int = 0  # of the usable files
    warnings: list[str] = field(default_factory=list)  # for the person who started the job
    _good: dict[str, list[_Good]] = field(default_factory=dict)
    _frames: dict[str, DataFrame] = field(default_factory=dict)
    _entered: set[str] = field(default_factory=set)  # paths of files that were looked at

    @property
    def spark(self) -> SparkSession:
        return self.session()

    def has(self, name: str) -> bool:
        return bool(self._good.get(name))

    def hours(self, name: str) -> list[Hour]:
        """Return the hours that have a usable file of that table, or had; of files that are not read, those of any."""
        others = {(file.table, file.hour) for file in self.listing.files if file.path not in self._entered}
        found = {hour for table, hour in others | self.listing.outside | self.known if table == name}
        return sorted(found | {good.file.hour for good in self._good.get(name, ())})

    def table(self, name: str) -> DataFrame:
        """Return a table, all its columns, and `date` and `hour` beside; see `Records.table`."""
        if name not in self._frames:
            self._frames[name] = self._scan(name, self._good.get(name, ()))
        return self._frames[name]

    def damaged(self) -> dict[File, Facts]:
        """Read all pages of the usable files, and return those of which some cannot be."""
        files = [good.file for goods in self._good.values() for good in goods]
        return {file: facts for file, facts in look(self, files, whole=True) if facts.problem == DAMAGED}

    def enter(self, judged: Iterable[tuple[File, Facts]]) -> None:
        bad: dict[str, list[tuple[Any, ...]]] = {}
        for file, facts in judged:
            self._entered.add(file.path)
            account = self.accounts.setdefault((file.hour, file.table), Accounts(table=file.table))
            account.enter(facts.problem, facts.rows, facts.reasons)
            if facts.problem is not None:
                row = (file.path, facts.problem, facts.detail, facts.rows, facts.size_bytes, *file.hour)
                bad.setdefault(file.table, []).append(row)
                continue
            self.size_bytes += facts.size_bytes
            self._good.setdefault(file.table, []).append(_Good(file, facts))
        for table, rows in bad.items():
            self.quarantine[f"{table}_files"] = self.spark.createDataFrame(rows, _FILES_DDL)
            if table not in self._good:
                path, _, detail, *_ = rows[0]
                left = f"{table} is left out: none of its {len(rows)} files can be used, the first is {foreign(path)}: "
                self.warnings.append(f"{left}{foreign(detail)}")
        for table, goods in self._good.items():
            if odd := [good for good in goods if good.facts.reasons]:
                told = ", ".join(map(_told, TABLES[table].columns))
                text = f"""SELECT _file AS file, _why AS reason, to_json(named_struct({told})) AS `row`, date, hour
                    FROM checked WHERE _why IS NOT NULL"""
                self.quarantine[table] = run_text(text, {"checked": self._checked(table, odd)})
            self._check_distinct(table, goods)
            for file, facts in goods:
                newest = end_of(file.hour)  # of one that does not tell
                if facts.newest_us is not None:
                    newest = dt.datetime.fromtimestamp(facts.newest_us / 1e6, dt.UTC)
                if facts.usable:
                    self.newest[file.hour] = max(self.newest.get(file.hour, newest), newest)
                if facts.usable and facts.node is not None and facts.newest_us is not None:
                    heard = self.heard.setdefault(file.hour, {})
                    heard[facts.node] = max(heard.get(facts.node, newest), newest)

    def _scan(self, table: str, goods: Sequence[_Good]) -> DataFrame:
        schema = f"{TABLES[table].spark_ddl}, {_BESIDE}"
        odd = [good for good in goods if good.facts.reasons or (good.facts.misspelt and running() == DUCKDB)]
        if not goods:
            return self.spark.createDataFrame([], schema)
        frames = {}
        if plain := [good.file for good in goods if good not in odd]:
            frames["plain"] = self._plain(table, plain, schema)
        if odd:
            frames["checked"] = self._checked(table, odd)
        columns = ", ".join(f"`{name}`" for name in (*TABLES[table].names, "date", "hour"))
        which = {"plain": "", "checked": " WHERE _why IS NULL"}
        return run_text(" UNION ALL ".join(f"SELECT {columns} FROM {name}{which[name]}" for name in frames), frames)

    def _plain(self, table: str, files: Sequence[File], schema: str) -> DataFrame:
        """Return the rows of files of which every one can be used."""
        storage = self.listing.storage
        if running() == DUCKDB:
            kinds = {column.name: SPARK_TYPES[column.kind] for column in TABLES[table].columns}
            paths = [storage.name(file.path) for file in files]
            found: DataFrame = cast(Any, self.spark).files(paths, kinds, ("date", "hour"))
            return found
        reader = self.spark.read.schema(schema).option("basePath", storage.uri(storage.path(table)))
        reader = reader.option("pathGlobFilter", "*.parquet")
        return reader.parquet(*map(literal, self._named(table, files)))

    def _named(self, table: str, files: Sequence[File]) -> list[str]:
        """Return what Spark is given to read these files: each, or folders of hours that have nothing else.

        Thousands of names take it minutes. Where a file may still come, each is named, so that no row is read that
        is in no account.
        """
        storage, before_ns = self.listing.storage, self.now_us * 1_000 - SETTLED_NS
        there = [file for file in self.listing.files if file.table == table]
        whole: set[Hour] = set()
        if len(files) > MOST_NAMED:
            left = {file.hour for file in {*there} - {*files}}
            whole = {file.hour for file in files} - left - {file.hour for file in there if file.mtime_ns > before_ns}
            whole -= {hour for of, hour in self.listing.deep if of == table}
        folders = [storage.path(f"{table}/date={date}/hour={hour}") for date, hour in sorted(whole)]
        return [storage.uri(path) for path in (*folders, *(storage.name(x.path) for x in files if x.hour not in whole))]

    def _checked(self, table: str, goods: Sequence[_Good]) -> DataFrame:
        """Return all rows of files, with the file (`_file`) and why a row cannot be used (`_why`; null: it can)."""
        rows = [(good.facts.path, *good.file.hour) for good in goods]
        files = self.spark.createDataFrame(rows, f"path string, {_BESIDE}")
        system, now_us, names = self.listing.storage.system, self.now_us, TABLES[table].names

        def made(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                for path, date, hour in zip(*batch.to_pydict().values(), strict=True):
                    checks = checks_of(table, (date, hour), now_us)
                    with system.open_input_file(path) as source:
                        for piece in pieces(opened(source, table), table, names):
                            rows, why = piece, reasons(piece, checks)
                            for name, value in (("date", date), ("hour", hour), ("_file", path)):
                                rows = rows.append_column(name, pa.repeat(pa.scalar(value), piece.num_rows))
                            yield from rows.append_column("_why", why).to_batches()

        ddl = f"{TABLES[table].spark_ddl}, {_BESIDE}, _file string, _why string"
        tasks = max(1, min(len(rows), parallelism(self.spark)))
        text = f"SELECT /*+ REPARTITION({tasks}) */ * FROM files"
        return run_text(text, {"files": files}).mapInArrow(made, ddl)

    def _check_distinct(self, table: str, goods: Sequence[_Good]) -> None:
        """See to it that no record is there twice in files that are no copies of each other."""
        if not meeting([good.facts for good in goods]):
            return
        text = """SELECT sum(times - 1) AS more, min(named_struct('node', node, 'seq', seq)) AS first FROM (
            SELECT node, seq, count(*) AS times FROM rows GROUP BY node, seq HAVING count(*) > 1)"""
        (told,) = run_text(text, {"rows": self._scan(table, goods)}).collect()
        if not told["more"]:
            return
        node, seq = told["first"]
        names = [
            foreign(good.file.path)
            for good in goods
            if (good.facts.first_seq or 0) <= seq <= (good.facts.last_seq or seq)
        ]
        raise RecordsError(
            f"{table}: some records are there twice (same node and seq, in files that are no copies of each other): "
            f"{told['more']}, the first is {seq} of node {node} in {', '.join(names[:3])}",
            hint="were files joined or rewritten beside the old ones? Take one of the two away",
        )


def _told(column: Column) -> str:
    """Return a column of a row that is put aside; times as text, in microseconds where the year has no four digits."""
    value = f"`{column.name}`"
    if column.kind is Kind.TIMESTAMP:
        (first, last), us = _FOUR_DIGITS_US, f"unix_micros({value})"
        text = f"concat(translate(CAST({value} AS STRING), ' ', 'T'), 'Z')"
        value = f"CASE WHEN {us} BETWEEN {first} AND {last} THEN {text} ELSE CAST({us} AS STRING) END"
    return f"'{column.name}', {value}"


def judged(looked: Iterable[tuple[File, Facts]]) -> list[tuple[File, Facts]]:
    """Return files and their facts, by path, with those put aside whose hour nothing tells, and copies."""
    seen: set[tuple[Hour, str]] = set()  # by hour: rows of a copy in another hour are put aside for their time
    found = []
    for file, facts in looked:
        if file.hour == ODD_HOUR:
            facts = facts._replace(problem="outside of date=/hour= folders", detail="nothing tells its hour")  # noqa: PLW2901 - the same file, judged
        elif facts.problem is None and (file.hour, facts.identity) in seen:
            facts = facts._replace(problem="copy", detail=f"the same as another file: {facts.identity}")  # noqa: PLW2901 - likewise
        if facts.usable:
            seen.add((file.hour, facts.identity))
        found.append((file, facts))
    return found


def check_any(listing: Listing, judged: Sequence[tuple[File, Facts]]) -> None:
    if not judged or any(facts.problem is None for _, facts in judged):
        return
    counts = Counter(str(facts.problem) for _, facts in judged)
    told = ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()))
    file, facts = judged[0]
    raise RecordsError(
        f"{listing.root}: none of its {len(judged)} files can be used ({told}); "
        f"the first is {file.path}: {facts.detail}",
        hint="is it a folder that a server wrote with --events?",
    )


def look(read: Read, files: Sequence[File], *, whole: bool = False) -> list[tuple[File, Facts]]:
    storage, now_us = read.listing.storage, read.now_us
    system = storage.system
    rows = [(storage.name(file.path), file.table, file.hour, file.strange) for file in files]

    def look(row: tuple[str, str, Hour, str]) -> Facts:
        path, table, hour, strange = row
        return Facts(path, STRANGE, strange) if strange else facts_of(system, path, table, hour, now_us, whole=whole)

    few = len(files) <= DRIVER_FILES and sum(file.size_bytes for file in files) <= DRIVER_BYTES
    context = None if few or running() == DUCKDB else getattr(read.spark, "sparkContext", None)
    if context is None:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(zip(files, pool.map(look, rows), strict=True))
    slices = max(context.defaultParallelism, len(rows) // FILES_PER_TASK)
    return list(zip(files, context.parallelize(rows, slices).map(look).collect(), strict=True))


def meeting(files: Sequence[Facts]) -> bool:
    """Return whether one of the files may hold a record (node, seq) that another one holds as well.

    The ranges of `seq` of a recorder's files do not meet; files that no recorder wrote meet everywhere, and hold
    nothing twice.
    """
    if len(files) < 2 or not any(facts.recorded for facts in files):
        return False
    if any(facts.node is None or facts.last_seq is None for facts in files):
        return True
    spans = sorted((facts.node or "", facts.first_seq or 0, facts.last_seq or 0) for facts in files)
    return any(one[0] == other[0] and other[1] <= one[2] for one, other in pairwise(spans))
