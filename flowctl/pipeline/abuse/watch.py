"""``flowctl analyze watch``: bans while it happens, from the files that servers finish every few seconds.

Theory of operation. A structured stream reads the files of `flow_closes` and `flow_events` as they appear. `evidence`
says what their records are evidence of, the same as for `abuse`; a record that was seen before (of a copied file) is
dropped; its points are added up per address in windows that overlap by half, so that what happens across the end of
one is whole in the next. Spark keeps these sums and the names of records (its state) and gives back, at each trigger,
the sums that have changed. An address whose sum is at or above the threshold is judged in the same batch, as `abuse`
would judge it by the records of the last day (`scores`): what it did, and who else behaves there.

Exactly once. Spark remembers in its checkpoint which files a batch has, and its state as of each batch; a batch is done
when the ban list is written. Killed before, it is run again with the same files and the same state, and the list is
merged (`flowctl.server.bans.merge_bans`): the same bans once more change nothing. So nothing is kept beside the
checkpoint and the list itself. Bounded: state goes when the watermark has passed, a trigger takes at most
`WatchOptions.most_files` files, and only bans come to this process.

What differs from `flowctl analyze abuse`: addresses only (no subnets), and the threshold has to be reached by what is
done in a minute before anything is said; a ban begins with the evidence and not with the look at it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.errors import ConfigError, FlowctlError
from flowctl.pipeline.abuse.evidence import made, pieces
from flowctl.pipeline.abuse.job import BANS_FILE, AbuseOptions, bans_from, bans_of_text
from flowctl.pipeline.abuse.scores import ACTIONS, MICRO, address_scores, halved, points
from flowctl.pipeline.job import JobNote, JobState
from flowctl.pipeline.records import addresses
from flowctl.pipeline.records.accounts import Accounts
from flowctl.pipeline.records.footers import facts_of
from flowctl.pipeline.records.place import Storage
from flowctl.server.bans import MOST_BYTES, Ban, merge_bans, render
from flowctl.telemetry.schema import FLOW_CLOSES, FLOW_EVENTS, FLOW_OPENS, FORMAT, METADATA_PREFIX, SPARK_TYPES, Table
from flowctl.text.files import write_text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SOURCE: Final = "watch"
"""As which the list names its bans: they are kept by `WatchOptions.replace_bans`, and counted for its length."""
LOOK_BACK_S: Final = 86_400
"""Files that were finished within that time are asked who behaves at an address that may be banned."""
MOST_STATE_PARTITIONS: Final = 8
"""Each is a task and a file per batch, so more of them than cores cost time; fixed with a checkpoint's first batch."""
_POLL_S: Final = 0.2
_REMEMBERED_NS: Final = 3_600 * 10**9
"""Files that are an hour older than the newest one are not looked at again."""
_TABLES: Final = (FLOW_CLOSES, FLOW_EVENTS)
_OLDEST: Final = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
Tell = Callable[[str], None]
"""Given a line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How to watch.

    Args:
        judge: how to judge; its `now_s` and `truth` do not count, and `replace_bans` spares the bans of the watch.
        trigger_s: time between two looks for new files, 0.1 to 3600 s.
        window_s: length of a window, 1 to 86,400 s.
        watermark_s: how much later than the newest record one may come, 0 to 86,400 s; also how far ahead of this
            machine's clock one may be: a node whose clock is ahead would make the records of all others late.
        checkpoint: folder of Spark's checkpoint. None: ``OUT/_checkpoint``.
        once: work off what is there, then end.
        most_files: files per trigger: 500 are a minute of 40 nodes that write two every 10 s.
    """

    judge: AbuseOptions = field(default_factory=AbuseOptions)
    trigger_s: float = 5.0
    window_s: float = 60.0
    watermark_s: float = 120.0
    checkpoint: str | None = None
    once: bool = False
    most_files: int = 500

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("--trigger", self.trigger_s, 0.1, 3600),
            ("--window", self.window_s, 1, 86_400),
            ("--watermark", self.watermark_s, 0, 86_400),
            ("--max-files", self.most_files, 1, 100_000),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value:g}, allowed is {low:g} to {high:g}")


# -- what is added up


def weighed(raw: DataFrame, options: WatchOptions) -> DataFrame:
    """Return the evidence in records that weighs anything: ts, address, micro (points), opened, origin and seq.

    Args:
        raw: columns of `flow_closes` and `flow_events` in one.
        options: watermark, weights.
    """
    # The time of the batch, not of now: a batch that is run again filters the same rows.
    ahead = f.current_timestamp() + f.make_dt_interval(secs=f.lit(options.watermark_s))
    named = f.col("node").isNotNull() & f.col("seq").isNotNull() & f.col("conn_id").isNotNull()
    fits = raw.where(named & (f.col("ts") >= f.lit(_OLDEST)) & (f.col("ts") <= ahead))
    marked = fits.withColumns({"origin": f.col("node"), "file": f.col("_metadata.file_path")})
    found = pieces(marked, options.judge.weights, "origin", "seq", "file")
    micro = (f.col("amount") * points(options.judge.weights) * MICRO).cast("bigint")
    return found.withColumn("micro", micro).where((f.col("micro") > 0) & _usable())


def windowed(found: DataFrame, options: WatchOptions) -> DataFrame:
    """Return the points of addresses in windows: window, address, micro, last_seen."""
    window = f.window("ts", f"{options.window_s} seconds", f"{options.window_s / 2} seconds").alias("window")
    return found.groupBy(window, "address").agg(f.sum("micro").alias("micro"), f.max("ts").alias("last_seen"))


def enough(sums: DataFrame, options: WatchOptions, now_us: int) -> DataFrame:
    """Return the addresses with a window at or above the threshold, and when they were last seen, the worst first."""
    weights = options.judge.weights
    aged = f.col("micro") / MICRO * halved(f.lit(now_us) - f.unix_micros("last_seen"), weights)
    found = sums.withColumn("points", aged).where(f.col("points") >= weights.threshold)
    worst = found.groupBy("address").agg(f.max("points").alias("points"), f.max("last_seen").alias("last_seen"))
    return worst.orderBy(f.desc("points"), "address").limit(options.judge.most_bans)


def _usable() -> Column:
    """Return whether a ban may come of the file in ``file``."""
    return f.udf(problem_of, "string", useArrow=False)("file").isNull()


@functools.lru_cache(maxsize=4096)
def problem_of(address: str) -> str | None:
    """Return why no ban may come of a file, whatever its rows look like; None: it may. Runs in Spark's workers."""
    import pyarrow.parquet as pq

    storage = Storage.of(address)
    try:
        with storage.system.open_input_file(storage.base) as source:
            told = pq.read_metadata(source).metadata or {}
    except OSError:  # it has gone since
        return "unreadable file"
    table = told.get(f"{METADATA_PREFIX}table".encode())
    number = told.get(f"{METADATA_PREFIX}format".encode(), str(FORMAT).encode())
    if table is not None and f"/{table.decode('utf-8', 'replace')}/" not in address:
        return "of another table"
    return None if number == str(FORMAT).encode() else "of another format"


# -- the list


class ListFile:
    """The ban list of a folder on this machine, which more than one may write: `abuse`, `all`, `watch`, and people.

    Who writes takes a lock on the folder, reads what is there, adds its own and replaces the file by rename. So none
    ends a ban of another, and a server that watches the file finds the old or the new list.

    Raises:
        ConfigError: the folder cannot be made, or the list cannot be read.
    """

    def __init__(self, folder: Path, options: AbuseOptions) -> None:
        self.path: Final = folder / BANS_FILE
        self._options: Final = options
        self._ends_s = 0.0  # when the next line expires, as of the last look
        self.own = self.others = 0  # lines of the watch, and of others, as of then
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to --out {folder}: {error.strerror}", hint="name a folder") from error
        if options.replace_bans:
            with _locked(folder), contextlib.suppress(ConfigError):
                self._write([ban for ban in self._read() if ban.source == SOURCE])
                return
            self.path.unlink()  # it cannot be read
        self.add([])

    def add(self, own: list[Ban]) -> None:
        """Merge bans of the watch into the list; take off what has expired.

        Raises:
            ConfigError: the list cannot be read. It is left as it is.
        """
        now_s = time.time()
        with _locked(self.path.parent):
            there = self._read()
            merged = merge_bans(there, own, now_s, self._options.allow)
            ours = sorted((ban for ban in merged if ban.source == SOURCE), key=lambda ban: (-ban.score, ban.cidr))
            listed = [ban for ban in merged if ban.source != SOURCE]
            self.others = len(listed)
            listed += ours[: self._options.most_bans]
            self.own = len(listed) - self.others
            if {ban.line() for ban in there} != {ban.line() for ban in listed}:
                self._write(listed)
        self._ends_s = min((ban.expires.timestamp() for ban in listed if ban.expires is not None), default=now_s + 1e9)

    def expire(self) -> None:
        """Take bans that have expired off the list."""
        if time.time() >= self._ends_s:
            self.add([])

    def _read(self) -> list[Ban]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            octets = file.read(MOST_BYTES + 1)
        return bans_of_text(octets.decode("utf-8", "replace"), str(self.path))

    def _write(self, bans: list[Ban]) -> None:
        write_text(self.path, render(bans))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within this context no other job on this machine changes the ban list of `folder`; it goes with the process."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


# -- the stream


class Watch:
    """A running watch, see `run`; batches come on a thread of Spark's, everything else is called by one thread."""

    def __init__(self, spark: SparkSession, events: str, out: Path, options: WatchOptions, tell: Tell) -> None:
        self._spark = spark
        self._events = events.rstrip("/")
        self._options = options
        self._tell = tell
        self._storage = Storage.of(events, dict(spark.sparkContext.getConf().getAll()))
        self._list = ListFile(out, options.judge)
        # The sums in a checkpoint are of these windows and weights; with others, the stream begins anew.
        state = repr((FORMAT, options.window_s, sorted(options.judge.weights.points.items())))
        kept = hashlib.blake2b(state.encode(), digest_size=4)
        self.checkpoint: Final = f"{options.checkpoint or out / '_checkpoint'}/{kept.hexdigest()}"
        self.accounts: Final = Accounts(table="flow_closes and flow_events")  # of this process
        self.counts: Final = dict.fromkeys(("batches", "late", "repeated", "bans_invalid"), 0)
        self.failure: Exception | None = None  # what ended the stream, before Spark wrapped it into texts
        self._seen_batch = -1
        self._files: dict[str, tuple[int, str]] = {}  # that were looked at, those of the last hour: mtime, identity
        self._since_ns = _committed_ns(self.checkpoint)  # files that are older were looked at, by an earlier process

    def start(self) -> StreamingQuery:
        """Start the stream and return it."""
        spark, options = self._spark, self._options
        for name, value in {
            "spark.sql.shuffle.partitions": str(min(MOST_STATE_PARTITIONS, spark.sparkContext.defaultParallelism)),
            # A batch without files would only throw old windows out, which the next one does as well.
            "spark.sql.streaming.noDataMicroBatches.enabled": "false",
            "spark.sql.streaming.minBatchesToRetain": "10",
        }.items():
            spark.conf.set(name, value)
        names = ",".join(table.name for table in _TABLES)
        raw = _reader(spark.readStream, *_TABLES).option("maxFilesPerTrigger", options.most_files)
        found = weighed(raw.parquet(f"{self._events}/{{{names}}}"), options)
        late = found.withWatermark("ts", f"{options.watermark_s} seconds")
        # (node, seq) names a record of a table, and only ends of connections are counted as opened.
        once = late.dropDuplicates(["opened", "origin", "seq", "ts"])
        writer = windowed(once, options).writeStream.outputMode("update").option("checkpointLocation", self.checkpoint)
        often = f"{options.trigger_s} seconds"
        writer = writer.trigger(availableNow=True) if options.once else writer.trigger(processingTime=often)
        return writer.foreachBatch(self._batch).start()

    def _batch(self, frame: DataFrame, number: int) -> None:
        """Ban for what a batch changed, and keep what goes wrong with it: Spark makes a long text of it."""
        del number
        try:
            now_us = int(time.time() * 1e6)
            rows = enough(frame, self._options, now_us).collect()
            last_s = {row["address"]: row["last_seen"].timestamp() for row in rows}
            bans, invalid = self._judged(last_s, now_us) if last_s else ([], 0)
            self._list.add(bans)
            self.counts["bans_invalid"] += invalid
        except Exception as error:
            self.failure = error
            raise

    def _judged(self, last_s: dict[str, float], now_us: int) -> tuple[list[Ban], int]:
        """Return whom to ban or limit, and of how many no ban can be made: by all their records of the last day.

        Args:
            last_s: address -> when it was last seen in the stream, seconds since the epoch; its ban begins then.
            now_us: up to when evidence ages, microseconds since the epoch.
        """
        judge = self._options.judge
        closes, opens, events = (
            self._recent(table, sorted(last_s)) for table in (FLOW_CLOSES, FLOW_OPENS, FLOW_EVENTS)
        )
        found = made(closes, opens, events, judge.weights)
        scores = address_scores(found, judge.weights, judge.spared, int(max(last_s.values()) * 1e6), now_us)
        rows = scores.where(f.col("verdict").isin(*ACTIONS)).collect()
        return bans_from(((row.asDict(), last_s[row["address"]]) for row in rows), judge.weights, SOURCE)

    def _recent(self, table: Table, who: list[str]) -> DataFrame:
        """Return the records of the last day of some addresses, and the starts of servers, each once."""
        since = dt.datetime.fromtimestamp(time.time() - LOOK_BACK_S, dt.UTC)
        reader = _reader(self._spark.read, table).option("timeZone", "UTC")
        reader = reader.option("modifiedAfter", f"{since:%Y-%m-%dT%H:%M:%S}")
        there = self._storage.is_folder(table.name)
        path = f"{self._events}/{table.name}"
        raw = reader.parquet(path) if there else self._spark.createDataFrame([], table.spark_ddl)
        named = raw.withColumn("file", f.col("_metadata.file_path")) if there else raw.withColumn("file", f.lit(""))
        found = addresses.with_unit(named, "peer_ip").where(f.col("address").isin(who) | f.col("peer_ip").isNull())
        once = found.where(_usable()).dropDuplicates(["node", "seq"]).drop("address", "file")
        return once.withColumns({"date": f.lit(""), "hour": f.lit("")})  # all hours as one

    def note_progress(self, query: StreamingQuery) -> None:
        """Count what batches had that have ended since the last call, and tell of them."""
        for progress in query.recentProgress:
            if progress["batchId"] <= self._seen_batch or not progress["numInputRows"]:
                continue  # an idle trigger is reported too, under the number of the batch to come
            self._seen_batch = progress["batchId"]
            operators = progress["stateOperators"]
            late = sum(int(item["numRowsDroppedByWatermark"]) for item in operators)
            repeated = sum(int(item["customMetrics"].get("numDroppedDuplicateRows", 0)) for item in operators)
            for name, count in (("batches", 1), ("late", late), ("repeated", repeated)):
                self.counts[name] += count
            bad = self._look_at_files()
            self._tell(
                f"batch {self._seen_batch}: {progress['numInputRows']} rows, {late} too late, {repeated} seen before"
                f"{_named(bad)}; {self._list.own} bans and limits"
            )

    def _look_at_files(self) -> list[tuple[str, str]]:
        """Account for the files that have come since the last look; return those that cannot be used, and why."""
        came = [
            (table.name, info)
            for table in _TABLES
            if self._storage.is_folder(table.name)
            for name, info in self._storage.walk(table.name)
            if name.endswith(".parquet") and not any(part.startswith((".", "_")) for part in name.split("/"))
            if (info.mtime_ns or 0) > self._since_ns and info.path not in self._files
        ]
        bad = []
        seen = {identity for _, identity in self._files.values()}
        for table_name, info in came:
            facts = facts_of(self._storage.system, info.path, table_name, None, time.time_ns() // 1000)
            old = f"format {facts.format} is not watched" if facts.format != FORMAT else None
            problem = facts.problem or ("copy" if facts.identity in seen else old)
            seen.add(facts.identity)
            self._files[info.path] = info.mtime_ns or 0, facts.identity
            self.accounts.enter(problem, facts.rows, facts.reasons)
            if problem is not None:
                bad.append((info.path, problem))
        newest_ns = max((stamp_ns for stamp_ns, _ in self._files.values()), default=0)
        self._since_ns = max(self._since_ns, newest_ns - _REMEMBERED_NS)
        self._files = {path: item for path, item in self._files.items() if item[0] > self._since_ns}
        return bad

    def expire(self) -> None:
        """Take bans that have expired off the list."""
        self._list.expire()

    def result(self) -> JobNote:
        """Return what this process did."""
        summary = {"bans": self._list.own, "bans_kept": self._list.others, "accounts": [self.accounts.as_dict()]}
        outputs = {BANS_FILE: str(self._list.path), "checkpoint": self.checkpoint}
        return JobNote("watch", JobState.DONE, summary=self.counts | summary, outputs=outputs)


def _reader(reader: Any, *tables: Table) -> Any:
    """Return a reader of records that passes over files that it cannot read: one would end the stream."""
    columns = {column.name: SPARK_TYPES[column.kind] for table in tables for column in table.columns}
    ddl = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
    reader = reader.schema(ddl).option("recursiveFileLookup", "true").option("pathGlobFilter", "*.parquet")
    return reader.option("ignoreCorruptFiles", "true").option("ignoreMissingFiles", "true")


def _committed_ns(checkpoint: str) -> int:
    """Return when the last batch that is done was planned, nanoseconds since the epoch; 0: none is."""
    storage = Storage.of(checkpoint)
    if not storage.is_folder("commits"):
        return 0
    done = {path for path, _ in storage.walk("commits")}
    return max((info.mtime_ns or 0 for path, info in storage.walk("offsets") if path in done), default=0)


def _named(bad: list[tuple[str, str]]) -> str:
    """Return the first files that could not be used, for people."""
    shown = "; ".join(f"{path} ({reason})" for path, reason in bad[:3])
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    hint = "; hint: flowctl analyze abuse reads old formats" if any("not watched" in item[1] for item in bad) else ""
    return f"; unusable: {shown}{more}{hint}" if shown else ""


def run(
    spark: SparkSession,
    events: str,
    out: str,
    options: WatchOptions | None = None,
    *,
    stop: threading.Event | None = None,
    tell: Tell = lambda _: None,
) -> JobNote:
    """Watch the records below `events` until `stop` is set, or with `WatchOptions.once` until all files are read.

    Args:
        spark: session.
        events: folder that servers write to, anywhere Spark can read.
        out: folder of the results, on this machine, where the server watches ``bans.jsonl``.
        options: how. None: all defaults.
        stop: set to end in order. None: only an exception ends it.
        tell: given a line about each batch.

    Raises:
        ConfigError: there are no records, or `out` cannot be used.
        FlowctlError: the stream failed.
    """
    from flowctl.pipeline.spark.session import SparkError, one_line

    options = options or WatchOptions()
    stop = stop or threading.Event()
    watch = Watch(spark, events, Path(out), options, tell)
    storage = Storage.of(events)
    if options.once and not any(storage.is_folder(table.name) for table in _TABLES):
        names = " and no ".join(table.name for table in _TABLES)
        raise ConfigError(f"{events} has no {names}", hint="flowctl serve live --events DIR writes them")
    query = watch.start()
    next_look = 0.0
    try:
        while query.isActive and not stop.wait(_POLL_S):
            watch.note_progress(query)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + 1.0
                watch.expire()
        if not stop.is_set():
            query.awaitTermination()
    except Exception as error:
        if isinstance(watch.failure, FlowctlError):
            raise watch.failure from error
        if watch.failure is not None:
            raise SparkError(one_line(watch.failure), hint="start it again: it goes on where it was") from error
        raise  # mapped by the session, as for every job
    finally:
        query.stop()
        watch.note_progress(query)
    return watch.result()
