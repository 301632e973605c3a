"""``flowctl analyze watch``: bans while it happens, from the files that servers finish every few seconds.

Theory of operation. A structured stream reads files as they appear. `flowctl.pipeline.jobs.evidence` turns records into
evidence, which is added up per address in windows that overlap by half, so that what happens across the end of one is
whole in the next. Spark keeps the sums (its state) and gives back, at each trigger, those that have changed; a reader
that is at or above the threshold is looked at closer, in the records of the last day: who else behaves at that address?
Then it is banned, or limited, in the same batch. So a ban leaves within one trigger of the evidence.

Exactly once: Spark's checkpoint makes a batch the same when it is run again, and `flowctl.pipeline.watch.state` makes
running it again harmless. Bounded: state lives until the watermark has passed a window's end, a trigger takes at most
`WatchOptions.most_files` files, and only bans come to this process. Records that are later than the watermark are not
counted as evidence; their number is shown.

What differs from `flowctl analyze abuse`: addresses only (no subnets), all evidence of a window ages as its newest
does, and the threshold is reached by what is done in a minute and not in a day.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.errors import ConfigError, FlowctlError
from flowctl.pipeline.jobs.abuse import bans_from
from flowctl.pipeline.tables.accounts import Accounts, JobResult
from flowctl.pipeline.tables.banfile import BANS_FILE
from flowctl.pipeline.tables.place import Place
from flowctl.pipeline.watch.input import files_of, forget, judge_files, look_at_rows, offsets_of, take_back, taken_back
from flowctl.pipeline.watch.rules import (
    LOOK_BACK_S,
    WatchOptions,
    behaving,
    candidates,
    found_in,
    to_ban,
    windowed,
    without,
)
from flowctl.pipeline.watch.state import BatchRecord, WatchState
from flowctl.telemetry.schema import FLOW_EVENTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MOST_STATE_PARTITIONS: Final = 8
"""Each is a task and a file per batch, so more of them than cores cost time; fixed with a checkpoint's first batch."""
_POLL_S: Final = 0.2
_UNREAD: Final = ("unreadable file", "empty file")
"""Problems of files of which Spark can have read nothing."""

Tell = Callable[[str], None]
"""Given a line for people about each batch."""


class Watch:
    """A running watch.

    Args:
        spark: session.
        events: folder that servers write to.
        out: folder of the results.
        options: how.
        tell: given a line about each batch.

    Raises:
        ConfigError: `out` cannot be used, has a ban list that cannot be read, or belongs to another checkpoint.
    """

    def __init__(self, spark: SparkSession, events: str, out: Path, options: WatchOptions, tell: Tell) -> None:
        self._spark = spark
        self._path = f"{events.rstrip('/')}/{FLOW_EVENTS.name}"
        self._out = out
        self._options = options
        self._tell = tell
        self._checkpoint = Place(spark, options.checkpoint or str(out / "_checkpoint"))
        self._lock = threading.Lock()  # batches come on a thread of Spark's, late rows are noted by the main thread
        self._state = WatchState(out, options.most_bans, options.allow, replace_bans=options.replace_bans)
        self.failure: Exception | None = None  # what ended the stream, before Spark wrapped it into texts
        self._seen_batch = -1

    def start(self) -> StreamingQuery:
        """Start the stream and return it."""
        spark, options = self._spark, self._options
        known = self._query_id()
        self._state.claim(known)
        for name, value in {
            "spark.sql.shuffle.partitions": str(min(MOST_STATE_PARTITIONS, spark.sparkContext.defaultParallelism)),
            # A batch without files would only throw old windows out, which the next one does as well.
            "spark.sql.streaming.noDataMicroBatches.enabled": "false",
            "spark.sql.streaming.minBatchesToRetain": "10",
        }.items():
            spark.conf.set(name, value)
        stream = self._stream()
        writer = stream.writeStream.outputMode("update").option("checkpointLocation", self._checkpoint.folder)
        writer = (
            writer.trigger(availableNow=True)
            if options.once
            else writer.trigger(processingTime=f"{options.trigger_s} seconds")
        )
        query = writer.foreachBatch(self._batch).start()
        if known is None:
            self._state.own(str(query.id))
        return query

    def _query_id(self) -> str | None:
        """Return the identity of the stream that the checkpoint belongs to; None: it is new."""
        import json

        text = self._checkpoint.read_text("metadata")
        return None if text is None else str(json.loads(text)["id"])

    def _stream(self) -> DataFrame:
        """Return who has which score, as it changes."""
        raw = (
            self._raw(self._spark.readStream)
            .option("recursiveFileLookup", "true")
            .option("pathGlobFilter", "*.parquet")
            .option("maxFilesPerTrigger", self._options.most_files)
            .parquet(self._path)
        )
        found = found_in(raw, f.current_timestamp(), self._options)
        return windowed(found.withWatermark("ts", f"{self._options.watermark_s} seconds"), self._options)

    def _raw(self, reader: Any) -> Any:
        """Return a reader of records that passes over what it cannot read; `judge_files` finds and names it.

        Else one truncated file would end the stream.
        """
        schema = reader.schema(FLOW_EVENTS.spark_ddl)
        return schema.option("ignoreCorruptFiles", "true").option("ignoreMissingFiles", "true")

    def _batch(self, frame: DataFrame, number: int) -> None:
        """Take what a batch changed, and keep what goes wrong with it: Spark makes a long text of it."""
        try:
            self._take(frame, number)
        except Exception as error:
            self.failure = error
            raise

    def _take(self, frame: DataFrame, number: int) -> None:
        """Judge files, then write bans, then look at rows."""
        options, at = self._options, offsets_of(self._checkpoint, number)
        record = BatchRecord(number)
        with self._lock:
            known = self._state.known(number)
        good = judge_files(record, files_of(self._checkpoint, number), known, at.at_ms)
        rows = self._judged(self._counting(frame, record, at.at_ms), at.at_ms)
        record.bans, record.bans_invalid = bans_from(((row, row["last_seen_s"]) for row in rows), options.weights)
        with self._lock:
            new = self._state.enter(record, time.time())
        look_at_rows(self._spark, record, good, at.at_ms, options.watermark_s, str(self._out))
        with self._lock:
            self._state.enter(record, time.time())
        bad = record.rows_in - record.rows_out
        self._tell(
            f"batch {number}: {record.files} files, rows in {record.rows_in} = out {record.rows_out}"
            f" + quarantined {bad}{_named(record)}; {new} new bans, {len(self._state.bans(time.time()))} in all"
        )

    def _judged(self, sums: DataFrame, at_ms: int) -> list[dict[str, Any]]:
        """Return who is to be banned or limited; the few who may be are looked up in the records of a day."""
        spark, options = self._spark, self._options
        found = candidates(sums, options, at_ms * 1000)
        rows = found.collect()
        if not rows:
            return []
        since = dt.datetime.fromtimestamp(at_ms / 1000 - LOOK_BACK_S, dt.UTC)
        recent = (
            self._raw(spark.read)
            .option("recursiveFileLookup", "true")
            .option("pathGlobFilter", "*.parquet")
            .option("timeZone", "UTC")
            .option("modifiedAfter", f"{since:%Y-%m-%dT%H:%M:%S}")
            .parquet(self._path)
        )
        kept = spark.createDataFrame(rows, found.schema)  # what the batch adds up is not added up twice
        behaves = behaving(recent, kept, options, max(row["last_seen_us"] for row in rows))
        return [row.asDict() for row in to_ban(kept, behaves, options).collect()]

    def _counting(self, frame: DataFrame, record: BatchRecord, at_ms: int) -> DataFrame:
        """Return the sums without the evidence of files that must not count: of this batch, and of those before."""
        late_ms = offsets_of(self._checkpoint, record.batch - 1).watermark_ms  # what Spark dropped as late in this one
        paths = [path for path, problem in record.bad_files if problem not in _UNREAD]
        if paths:
            now = f.timestamp_millis(f.lit(at_ms))
            found = found_in(self._raw(self._spark.read).parquet(*paths), now, self._options)
            sums = windowed(found, self._options).where(f.unix_millis("window.end") > late_ms)
            record.taken_back_until_ms = take_back(sums, self._checkpoint, record.batch)
        with self._lock:
            live, over = self._state.taken_back(late_ms)
        for number in over:
            forget(self._checkpoint, number)
            self._state.forget_taken_back(number)
        live = [number for number in live if number != record.batch]
        live += [record.batch] if record.taken_back_until_ms is not None else []
        back = taken_back(self._spark, self._checkpoint, live)
        return frame if back is None else without(frame, back, self._options)

    def note_progress(self, query: StreamingQuery) -> None:
        """Note the rows that came too late, of batches that have ended since the last call."""
        for progress in query.recentProgress:
            number = int(progress["batchId"])
            if number <= self._seen_batch:
                continue
            late = sum(int(item["numRowsDroppedByWatermark"]) for item in progress["stateOperators"])
            with self._lock:
                self._state.note_late(number, late)
            if late:
                self._tell(f"batch {number}: {late} rows came later than the watermark and were not counted")
            if progress["numInputRows"]:  # an idle trigger is reported too, under the number of the batch to come
                self._seen_batch = number

    def expire(self) -> None:
        """Take bans that have expired off the list."""
        with self._lock:
            self._state.write_bans(time.time())

    def result(self) -> JobResult:
        """Return what all batches so far resulted in."""
        with self._lock:
            totals = self._state.totals()
            bans = len(self._state.bans(time.time()))
            kept = self._state.others(time.time())
        accounts = Accounts(
            table=FLOW_EVENTS.name,
            files_in=totals["files"],
            files_quarantined=totals["bad_files"],
            rows_in=totals["rows_in"],
            rows_out=totals["rows_out"],
            rows_quarantined=totals["rows_quarantined"],
            by_reason=totals["by_reason"],
            files_by_reason=totals["files_by_reason"],
            files_unknown_rows=totals["files_unknown_rows"],
            settled=True,
        )
        outputs = {BANS_FILE: str(self._out / BANS_FILE), "checkpoint": self._checkpoint.folder}
        summary = {"bans": bans, "bans_kept": kept, "bans_invalid": totals["bans_invalid"]}
        summary |= {"batches": totals["batches"], "late": totals["late"]}
        return JobResult(name="watch", accounts=[accounts], outputs=outputs, summary=summary)


def _await(query: StreamingQuery, watch: Watch) -> None:
    """Wait for the end of the stream.

    Raises:
        FlowctlError: the stream failed; says why, where Spark would say where.
    """
    from flowctl.pipeline.spark.session import SparkError, one_line

    try:
        query.awaitTermination()
    except Exception as error:
        cause = watch.failure
        if isinstance(cause, FlowctlError):
            raise cause from error
        if cause is not None:
            raise SparkError(one_line(cause), hint="start it again: it goes on where it was") from error
        raise  # mapped by the session, as for every job


def _named(record: BatchRecord) -> str:
    """Return the first files that could not be used, for people."""
    shown = "; ".join(f"{path} ({reason})" for path, reason in record.bad_files[:3])
    more = len(record.bad_files) - 3
    return f"; unusable: {shown}{f' and {more} more' if more > 0 else ''}" if shown else ""


def run(
    spark: SparkSession,
    events: str,
    out: str,
    options: WatchOptions | None = None,
    *,
    stop: threading.Event | None = None,
    tell: Tell = lambda _: None,
) -> JobResult:
    """Watch the events below `events` until `stop` is set, or with `WatchOptions.once` until all files are read.

    Args:
        spark: session.
        events: folder that servers write to, anywhere Spark can read.
        out: folder of the results, on this machine, where the server watches ``bans.jsonl``.
        options: how. None: all defaults.
        stop: set to end in order. None: only an exception ends it.
        tell: given a line about each batch.

    Returns:
        Sums over all batches of this checkpoint, of earlier processes too.

    Raises:
        ConfigError: there are no events, or `out` cannot be used.
        FlowctlError: the stream failed.
    """
    from flowctl.pipeline.tables.io import has_table

    options = options or WatchOptions()
    stop = stop or threading.Event()
    said = False
    while not has_table(spark, events, FLOW_EVENTS.name):
        if options.once:
            raise ConfigError(f"{events} has no {FLOW_EVENTS.name}", hint="flowctl serve live --events DIR writes it")
        if not said:
            tell(f"waiting for {events}/{FLOW_EVENTS.name}")
        said = True
        if stop.wait(1.0):
            return JobResult(name="watch")
    watch = Watch(spark, events, Path(out), options, tell)
    query = watch.start()
    next_look = 0.0
    try:
        while query.isActive and not stop.wait(_POLL_S):
            watch.note_progress(query)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + 1.0
                watch.expire()
        if not stop.is_set():
            _await(query, watch)
    finally:
        query.stop()
        watch.note_progress(query)
    return watch.result()
