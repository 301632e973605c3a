"""``flowctl analyze watch``: bans while it happens, from the files that servers finish every few seconds.

Theory of operation. A structured stream reads files as they appear. `flowctl.pipeline.evidence` turns records into
evidence, which is added up per address in windows that overlap by half, so that what happens across the end of one is
whole in the next. Spark keeps the sums (its state) and gives back, at each trigger, those that have changed; whoever
is at or above the threshold is banned in the same batch. So a ban leaves within one trigger of the evidence.

Exactly once: Spark's checkpoint makes a batch the same when it is run again, and `flowctl.pipeline.watch_state` makes
running it again harmless. Bounded: state lives until the watermark has passed a window's end, a trigger takes at most
`WatchOptions.most_files` files, and only bans come to this process. Records that are later than the watermark are not
counted as evidence; their number is shown.

What differs from `flowctl analyze abuse`: nothing ages within a window, addresses only (no subnets), and standing is
that within the window, so the threshold is reached by what is done in a minute and not in a day.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.bans import MOST_BANS
from flowctl.errors import ConfigError
from flowctl.pipeline import addresses
from flowctl.pipeline.abuse import ban_of
from flowctl.pipeline.accounts import Accounts, JobResult
from flowctl.pipeline.addresses import Network
from flowctl.pipeline.checks import any_of
from flowctl.pipeline.evidence import evidence, points, standing_hours
from flowctl.pipeline.place import Place
from flowctl.pipeline.watch_input import files_of, look, offsets_of, row_checks
from flowctl.pipeline.watch_state import BatchRecord, WatchState
from flowctl.pipeline.weights import Weights
from flowctl.telemetry.schema import FLOW_EVENTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MOST_FILES: Final = 500
"""Files of a trigger: a minute of 80 nodes that write every 10 s; a backlog is worked off in batches of that."""
STATE_PARTITIONS: Final = "4"
"""Each is a file per batch; the number is fixed with a checkpoint's first batch. Enough for a million addresses."""
_FAR_FUTURE_US: Final = 4_102_444_800_000_000
"""Year 2100: the check against a clock that is ahead is made with the batch's own time instead, which replays."""
_POLL_S: Final = 0.2

Tell = Callable[[str], None]
"""Given a line for people about each batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How to watch.

    Args:
        trigger_s: time between two looks for new files, 0.1 to 3600 s.
        window_s: length of a window, 1 to 86,400 s.
        watermark_s: how much later than the newest record one may come, 0 to 86,400 s; also how far ahead of this
            machine's clock one may be.
        checkpoint: folder of Spark's checkpoint. None: ``OUT/_checkpoint``.
        once: work off what is there, then end.
        most_files: files per trigger.
        weights: of evidence.
        allow: networks that are never banned.
        most_bans: longest ban list.
    """

    trigger_s: float = 5.0
    window_s: float = 60.0
    watermark_s: float = 120.0
    checkpoint: str | None = None
    once: bool = False
    most_files: int = MOST_FILES
    weights: Weights = field(default_factory=Weights)
    allow: tuple[Network, ...] = ()
    most_bans: int = 10_000

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("--trigger", self.trigger_s, 0.1, 3600),
            ("--window", self.window_s, 1, 86_400),
            ("--watermark", self.watermark_s, 0, 86_400),
            ("--max-files", self.most_files, 1, 100_000),
            ("--max-bans", self.most_bans, 1, MOST_BANS),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value:g}, allowed is {low:g} to {high:g}")


def windowed(found: DataFrame, options: WatchOptions) -> DataFrame:
    """Return the scores of addresses in windows; works on a stream and on a table alike.

    Args:
        found: of `evidence`; a stream has its watermark already.
        options: windows, weights.

    Returns:
        One row per window and address: window, address, score, last_seen, and n0, n1 ...: occurrences of each of
        `counted_kinds`. Sums of fixed columns instead of a map of kinds, because a stream can have one aggregation
        only.
    """
    window = f.window("ts", f"{options.window_s} seconds", f"{options.window_s / 2} seconds")
    known = counted_kinds(options.weights)
    counts = [
        f.sum(f.when(f.col("kind") == kind, f.col("amount")).otherwise(0)).alias(f"n{number}")
        for number, kind in enumerate(known)
    ]
    # Whole numbers, so that the sum does not depend on the order of files.
    weighed = (f.col("amount") * points(options.weights) * 1000).cast("bigint")
    summed = found.groupBy(window.alias("window"), "address").agg(
        f.sum(weighed).alias("milli_points"),
        f.sum("good_ms").alias("good_ms"),
        f.sum("begun").alias("begun"),
        f.sum("ended").alias("ended"),
        f.max("ts").alias("last_seen"),
        *counts,
    )
    score = f.round(f.col("milli_points") / 1000 / (1 + standing_hours(options.weights)), 3)
    return summed.select("window", "address", score.alias("score"), "last_seen", *(f"n{n}" for n in range(len(known))))


def counted_kinds(weights: Weights) -> list[str]:
    """Return the kinds of evidence that are told apart: all with a name of their own that weigh anything."""
    return [name for name, value in weights.points.items() if value and not name.endswith(".*")]


def to_ban(scores: DataFrame, options: WatchOptions) -> DataFrame:
    """Return who is to be banned, with cidr, score, last_seen_s and evidence (JSON).

    Args:
        scores: of `windowed`.
        options: threshold, allow list, length of the list.
    """
    known = counted_kinds(options.weights)
    pairs = [f.struct(f.lit(kind).alias("key"), f.col(f"n{n}").alias("value")) for n, kind in enumerate(known)]
    told = f.map_from_entries(f.filter(f.array(*pairs), lambda pair: pair["value"] > 0))
    digits = addresses.digits(f.col("address"))
    nobody = digits.isNull() | addresses.is_cut(f.col("address"), digits)
    return (
        scores.where(f.col("score") >= options.weights.threshold)
        .where(~nobody & ~addresses.lies_in(digits, options.allow))
        .orderBy(f.desc("score"), "address", "window")
        .limit(options.most_bans)
        .select(
            addresses.cidr(f.col("address"), digits).alias("cidr"),
            "score",
            (f.unix_micros("last_seen") / 1e6).alias("last_seen_s"),
            f.to_json(told).alias("evidence"),
        )
    )


class Watch:
    """A running watch.

    Args:
        spark: session.
        events: folder that servers write to.
        out: folder of the results.
        options: how.
        tell: given a line about each batch.

    Raises:
        ConfigError: `out` cannot be used, or belongs to another checkpoint.
    """

    def __init__(self, spark: SparkSession, events: str, out: Path, options: WatchOptions, tell: Tell) -> None:
        self._spark = spark
        self._path = f"{events.rstrip('/')}/{FLOW_EVENTS.name}"
        self._out = out
        self._options = options
        self._tell = tell
        self._checkpoint = Place(spark, options.checkpoint or str(out / "_checkpoint"))
        self._lock = threading.Lock()  # batches come on a thread of Spark's, late rows are noted by the main thread
        self._state = WatchState(out, options.most_bans)
        self._seen_batch = -1

    def start(self) -> StreamingQuery:
        """Start the stream and return it."""
        spark, options = self._spark, self._options
        known = self._query_id()
        self._state.claim(known)
        for name, value in {
            "spark.sql.shuffle.partitions": STATE_PARTITIONS,
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
        options = self._options
        raw = (
            self._spark.readStream.schema(FLOW_EVENTS.spark_ddl)
            .option("recursiveFileLookup", "true")
            .option("pathGlobFilter", "*.parquet")
            .option("maxFilesPerTrigger", options.most_files)
            # Else one truncated file ends the stream; `look` finds and names what was passed over.
            .option("ignoreCorruptFiles", "true")
            .option("ignoreMissingFiles", "true")
            .parquet(self._path)
        )
        # The time of the batch, not of now: a batch that is run again must filter the same rows.
        ahead = f.current_timestamp() + f.make_dt_interval(secs=f.lit(options.watermark_s))
        fits = raw.where(~f.expr(any_of(row_checks(), _FAR_FUTURE_US))).where(f.col("ts") <= ahead)
        found = evidence(fits, options.weights).withWatermark("ts", f"{options.watermark_s} seconds")
        return windowed(found, options)

    def _batch(self, frame: DataFrame, number: int) -> None:
        """Take what a batch changed: bans first, then what of its files could not be used."""
        options = self._options
        rows = [row.asDict() for row in to_ban(frame, options).collect()]
        bans = [ban_of(row, options.weights, row["last_seen_s"]) for row in rows]
        record = BatchRecord(number, bans)
        with self._lock:
            new = self._state.enter(record, time.time())
        paths = files_of(self._checkpoint, number)
        at_ms = offsets_of(self._checkpoint, number).at_ms
        look(self._spark, record, paths, at_ms, options.watermark_s, str(self._out))
        with self._lock:
            self._state.enter(record, time.time())
        bad = record.rows_in - record.rows_out
        self._tell(
            f"batch {number}: {record.files} files, rows in {record.rows_in} = out {record.rows_out}"
            f" + quarantined {bad}{_named(record)}; {new} new bans, {len(self._state.bans(time.time()))} in all"
        )

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
        accounts = Accounts(
            table=FLOW_EVENTS.name,
            files_in=totals["files"],
            files_quarantined=totals["bad_files"],
            rows_in=totals["rows_in"],
            rows_out=totals["rows_out"],
            rows_quarantined=totals["rows_quarantined"],
            by_reason=totals["by_reason"],
            settled=True,
        )
        outputs = {"bans.jsonl": str(self._out / "bans.jsonl"), "checkpoint": self._checkpoint.folder}
        summary = {"bans": bans, "batches": totals["batches"], "late": totals["late"]}
        return JobResult(name="watch", accounts=[accounts], outputs=outputs, summary=summary)


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
    from flowctl.pipeline.io import has_table

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
            query.awaitTermination()  # raises what ended it
    finally:
        query.stop()
        watch.note_progress(query)
    return watch.result()
