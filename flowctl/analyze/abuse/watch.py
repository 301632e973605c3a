"""``flowctl analyze watch``: bans while it happens, from the files that servers finish every few seconds.

Theory of operation. A structured stream is the alarm, and the job `abuse` is the judge. The stream adds up the points
of each address in windows that overlap by half. Where a sum reaches the threshold, the job runs over the records of the
last day, in a folder of its own, and what its list says of the addresses of the alarm is merged into the list of the
server. So sums need not be exact: an alarm for nothing costs a look and bans nobody. Where the job cannot work in its
folder, the alarm waits, and later ones behind it.

Spark remembers which files a batch has, and its state as of each; a batch is done when the ban list is written. Killed
before, it is run and judged again as of the same moment, and merged once more, which changes nothing.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.analyze.abuse.evidence import with_evidence
from flowctl.analyze.abuse.job import BANS_FILE, JOB, merge_lists
from flowctl.analyze.abuse.weights import Weights
from flowctl.analyze.job import JobNote, JobState
from flowctl.analyze.options import AbuseOptions, WatchOptions
from flowctl.analyze.records.listing import RecordsError
from flowctl.analyze.records.place import RecordPlace, Storage, literal
from flowctl.analyze.records.window import Window
from flowctl.analyze.run import AllResult
from flowctl.analyze.run import run as run_jobs
from flowctl.analyze.spark.session import parallelism
from flowctl.core.server.bans import Ban, BanList, parse_lines, render
from flowctl.errors import ConfigError, FlowctlError
from flowctl.records.telemetry.schema import FLOW_CLOSES, FLOW_EVENTS, FORMAT, SPARK_TYPES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SOURCE: Final = "watch"
"""Source of its bans, as the list names it: `AbuseOptions.replace_bans` spares them."""
JUDGE_FOLDER: Final = "_watch"
"""Folder of the judge, in that of the results."""
LOOK_BACK: Final = dt.timedelta(days=1)
"""Time whose records say what else the address of an alarm did, and what behaves there."""
MOST_STATE_PARTITIONS: Final = 8
"""Most partitions of the state: each is a task and a file per batch; fixed with a checkpoint's first batch."""
_POLL_S: Final = 0.2
_TABLES: Final = (FLOW_CLOSES, FLOW_EVENTS)
Tell = Callable[[str], None]
"""Function that shows a line to the user."""


def points(weights: Weights) -> Column:
    group = f.concat(f.substring_index("kind", ".", 1), f.lit(".*"))
    table = f.create_map(*(f.lit(part) for name, value in weights.points.items() for part in (name, float(value))))
    return f.col("amount") * f.coalesce(f.try_element_at(table, "kind"), f.try_element_at(table, group), f.lit(0.0))


def windowed(raw: DataFrame, options: WatchOptions) -> DataFrame:
    """Return the points of addresses in windows: window, address, points, last_seen."""
    # The time of the batch, not of now: a batch that is run again filters the same rows. What is older is not for
    # the judge to read, nor what is a day ahead, and its window may begin at no time that there is.
    now, weights, day = f.current_timestamp(), options.judge.weights, f.make_dt_interval(days=f.lit(1))
    rows = raw.where(f.col("ts").between(now - day, now + day) & (f.col("peer_ip") != ""))
    found = with_evidence(rows.withColumn("ts", f.least("ts", now)), weights)
    found = found.select("ts", "address", points(weights).alias("points")).where(f.col("points") > 0)
    window = f.window("ts", f"{options.window_s} seconds", f"{options.window_s / 2} seconds").alias("window")
    late = found.withWatermark("ts", f"{options.watermark_s} seconds").groupBy(window, "address")
    return late.agg(f.sum("points").alias("points"), f.max("ts").alias("last_seen"))


def merge_into(
    place: RecordPlace, own: Sequence[Ban], judge: AbuseOptions, *, anew: bool = False, tell: Tell = lambda _: None
) -> None:
    """Merge bans of the watch into the list of a folder; those that have expired go."""
    made = render(replace(ban, source=SOURCE) for ban in own)
    judge = replace(judge, now_s=None, replace_bans=False)
    place.change_text(BANS_FILE, lambda there: merge_lists(_own(there) if anew else there, made, judge, tell))


def _own(text: str) -> str:
    """Return the lines of the watch; none of a text that cannot be read."""
    try:
        return render(ban for ban in parse_lines(text) if ban.source == SOURCE)
    except ConfigError:
        return ""


class Watch:
    """A running watch, see `run`; batches come on a thread of Spark's, everything else is called by one thread."""

    def __init__(
        self, spark: SparkSession, events: str, out: str, options: WatchOptions, tell: Tell, stop: threading.Event
    ) -> None:
        self._spark, self._events, self._options, self._tell = spark, events.rstrip("/"), options, tell
        self._stop = stop
        self._place: Final = RecordPlace(out)
        merge_into(self._place, [], options.judge, anew=options.judge.replace_bans)
        self._accounts: Sequence[Mapping[str, Any]] = ()  # of the newest judgement
        # The sums in a checkpoint are of these windows and weights; with others, the stream begins anew.
        state = repr((FORMAT, "alarms", options.window_s, sorted(options.judge.weights.points.items())))
        kept = hashlib.blake2b(state.encode(), digest_size=4)
        self.checkpoint: Final = f"{options.checkpoint or f'{out}/_checkpoint'}/{kept.hexdigest()}"
        self.counts: Final = dict.fromkeys(("batches", "late", "judgements"), 0)
        self.failure: Exception | None = None  # what ended the stream, before Spark wrapped it into texts
        self._seen_batch = -1

    def start(self) -> StreamingQuery:
        spark, options = self._spark, self._options
        partitions = min(MOST_STATE_PARTITIONS, parallelism(spark))
        spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        # A batch without files would only throw old windows out, which the next one does as well.
        spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        kinds = {column.name: SPARK_TYPES[column.kind] for table in _TABLES for column in table.columns}
        reader = spark.readStream.schema(", ".join(f"`{name}` {kind}" for name, kind in kinds.items()))
        for name, value in {
            "recursiveFileLookup": "true",
            "pathGlobFilter": "*.parquet",
            "ignoreCorruptFiles": "true",  # one would end the stream
            "ignoreMissingFiles": "true",
            "maxFilesPerTrigger": str(options.most_files),
        }.items():
            reader = reader.option(name, value)
        raw = reader.parquet(f"{literal(self._events)}/{{{','.join(table.name for table in _TABLES)}}}")
        writer = windowed(raw, options).writeStream.outputMode("update").option("checkpointLocation", self.checkpoint)
        often = f"{options.trigger_s} seconds"
        writer = writer.trigger(availableNow=True) if options.once else writer.trigger(processingTime=often)
        return writer.foreachBatch(self._batch).start()

    def _batch(self, frame: DataFrame, number: int) -> None:
        """Ban for what a batch changed, and keep what goes wrong with it: Spark makes a long text of it."""
        del number
        try:
            judge, now_us = self._options.judge, int(time.time() * 1e6)
            age = f.greatest(f.lit(0), f.lit(now_us) - f.unix_micros("last_seen"))
            left = f.pow(f.lit(0.5), age / (judge.weights.half_life_s * 1e6))
            loud = frame.where(f.round(f.col("points") * left, 3) >= judge.weights.threshold)
            worst = loud.orderBy(f.desc("points"), "address").limit(judge.most_bans)
            rows = worst.select("address", "last_seen").collect()
            who = {row["address"] for row in rows}
            bans = self._bans(who, max(row["last_seen"].timestamp() for row in rows)) if rows else []
            merge_into(self._place, bans, judge, tell=self._tell)
        except Exception as error:
            self.failure = error
            raise

    def _bans(self, who: set[str], now_s: float) -> list[Ban]:
        """Return what the job `abuse` says of some addresses, by all records of the last day."""
        judge = replace(self._options.judge, now_s=now_s, replace_bans=True)
        since = dt.datetime.fromtimestamp(now_s, dt.UTC) - LOOK_BACK
        where = RecordPlace(self._place.path(JUDGE_FOLDER))
        result = self._judged(where.folder, judge, Window(since=since))
        if result is None:
            return []
        self.counts["judgements"] += 1
        self._accounts = result.accounts
        made = BanList.parse(where.read_text(BANS_FILE) or "")
        found = (made.match(address.removesuffix("/64"), now_s) for address in who)
        return list({(ban.cidr, ban.action): ban for ban in found if ban is not None}.values())

    def _judged(self, folder: str, judge: AbuseOptions, window: Window) -> AllResult | None:
        """Run the job, again and again where it cannot work in its folder; None: the records are of no use to it."""
        told = False
        while True:
            try:
                result = run_jobs(self._spark, self._events, folder, [JOB], {JOB.name: judge}, window)
                for error in result.errors.values():
                    raise error
            except RecordsError as error:  # no restart would mend them
                self._tell(f"warning: nobody is banned for this alarm: {error}")
                return None
            except ConfigError as error:
                if not told:
                    self._tell(f"warning: nobody is banned until this alarm can be judged: {error}")
                told = True
                if self._options.once or self._stop.wait(self._options.trigger_s):
                    raise
            else:
                return result

    def note_progress(self, query: StreamingQuery) -> None:
        """Count what batches had that have ended since the last call, and tell of them."""
        for progress in query.recentProgress:
            if progress["batchId"] <= self._seen_batch or not progress["numInputRows"]:
                continue  # an idle trigger is reported too, under the number of the batch to come
            self._seen_batch = progress["batchId"]
            late = sum(int(item["numRowsDroppedByWatermark"]) for item in progress["stateOperators"])
            self.counts["batches"] += 1
            self.counts["late"] += late
            rows, bans = progress["numInputRows"], len(self._bans_of_watch())
            self._tell(f"batch {self._seen_batch}: {rows} rows, {late} too late; {bans} bans and limits")

    def _bans_of_watch(self) -> list[Ban]:
        return list(parse_lines(_own(self._place.read_text(BANS_FILE) or "")))

    def result(self) -> JobNote:
        summary = self.counts | {"bans": len(self._bans_of_watch()), "accounts": list(self._accounts)}
        outputs = {BANS_FILE: self._place.path(BANS_FILE), "checkpoint": self.checkpoint}
        return JobNote("watch", JobState.DONE, summary=summary, outputs=outputs)


def run(
    spark: SparkSession,
    events: str,
    out: str,
    options: WatchOptions | None = None,
    *,
    stop: threading.Event | None = None,
    tell: Tell = lambda _: None,
) -> JobNote:
    """Watch the records below `events` until `stop` is set, or with `WatchOptions.once` until all files are read."""
    from flowctl.analyze.spark.session import SparkError, one_line

    options, stop = options or WatchOptions(), stop or threading.Event()
    watch = Watch(spark, events, out.rstrip("/"), options, tell, stop)
    storage = Storage.of(events)
    if not any(storage.is_folder(table.name) for table in _TABLES):
        told = f"{events} has no {' and no '.join(table.name for table in _TABLES)}"
        if options.once:
            raise ConfigError(told, hint="flowctl serve live --events DIR writes them")
        tell(f"{told} yet: waiting for them")
    query = watch.start()
    try:
        try:
            while query.isActive and not stop.wait(_POLL_S):
                watch.note_progress(query)
            if not stop.is_set():
                query.awaitTermination()
        finally:
            query.stop()
            watch.note_progress(query)
    except Exception as error:
        # Who ends a service sends the signal to all its processes: Java is gone, and its batch comes again.
        if stop.is_set():
            return watch.result()
        if isinstance(watch.failure, FlowctlError):
            raise watch.failure from error
        if watch.failure is not None:
            raise SparkError(one_line(watch.failure), hint="start it again: it goes on where it was") from error
        raise  # mapped by the session, as for every job
    return watch.result()
