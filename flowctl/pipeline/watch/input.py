"""Which files a batch of `flowctl analyze watch` is made of, and what of them cannot be used.

Spark reads a stream of files without saying which, and passes over files that it cannot read (``ignoreCorruptFiles``;
else one truncated file would end the stream). Its checkpoint tells: ``offsets/N`` has the last entry of the source's
log that batch N covers, and ``sources/0`` is that log, one JSON line per file. With these names the files are looked
at once more. Footers come first, some tenths of a millisecond each, because no ban may come of a file that cannot be
used: of a copy of one that was read before, of a newer format, of another table. Spark has added up the evidence of
such a file by then; so what it was is added up once more, kept beside the checkpoint, and subtracted from the sums of
its windows for as long as these change (`take_back`). Without such files, the rule, that costs nothing.

Rows are looked at *after* the batch's bans are written: what does not fit is counted by reason, named, and written to
the quarantine, and that costs no ban any time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.pipeline.tables.checks import CHECKS, Check, reason_of
from flowctl.pipeline.tables.footers import facts_of
from flowctl.pipeline.tables.place import Place, local_path
from flowctl.pipeline.tables.preflight import COPY
from flowctl.pipeline.watch.state import BatchRecord
from flowctl.telemetry.schema import FLOW_EVENTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AHEAD: Final = "ts: ahead of the watcher's clock"
"""A node whose clock is ahead would make the records of all others late."""
_COMPACT_EVERY: Final = 10
"""Spark's default: each tenth entry of the log holds all before it."""


@dataclass(frozen=True, slots=True)
class Offsets:
    """What the checkpoint says of a batch.

    Args:
        last: last entry of the source's log that it covers; -1: none.
        at_ms: when it was planned, milliseconds since the epoch; the same when it is run again.
        watermark_ms: as of then; the next batch takes nothing that is older.
    """

    last: int
    at_ms: int
    watermark_ms: int = 0


def offsets_of(place: Place, batch: int) -> Offsets:
    """Return what the checkpoint says of `batch`; none for batches that are not there."""
    text = place.read_text(f"offsets/{batch}") if batch >= 0 else None
    lines = (text or "").splitlines()
    if len(lines) < 3:
        return Offsets(-1, 0)
    source = json.loads(lines[2])
    last = source["logOffset"] if isinstance(source, dict) else source
    planned = json.loads(lines[1])
    return Offsets(int(last), int(planned["batchTimestampMs"]), int(planned.get("batchWatermarkMs", 0)))


def files_of(place: Place, batch: int) -> list[str]:
    """Return the addresses of the files that `batch` is made of.

    Args:
        place: the checkpoint.
        batch: number of the batch.
    """
    first, last = offsets_of(place, batch - 1).last, offsets_of(place, batch).last
    found: dict[str, None] = {}
    for entry in range(first + 1, last + 1):
        for line in _entry(place, entry):
            if line.startswith("{"):
                value = json.loads(line)
                if first < value["batchId"] <= last:
                    found[str(value["path"])] = None
    return list(found)


def _entry(place: Place, entry: int) -> Iterator[str]:
    """Yield the lines of an entry of the source's log, line by line: a compacted one has a line for every file ever."""
    name = f"sources/0/{entry}.compact" if (entry + 1) % _COMPACT_EVERY == 0 else f"sources/0/{entry}"
    local = local_path(place.path(name))
    if local is None:
        yield from (place.read_text(name) or "").splitlines()
    elif local.exists():
        with local.open(encoding="utf-8") as file:
            yield from file


def judge_files(record: BatchRecord, paths: list[str], known: Collection[str], at_ms: int) -> list[str]:
    """Enter into `record` what the footers of its files say; return those that can be used.

    Args:
        record: of the batch.
        paths: its files; of copies among them the first by name is used.
        known: identities of files of earlier batches.
        at_ms: when the batch was planned.
    """
    good: list[str] = []
    seen = set(known)
    for path, found, _, rows, _, identity, *_ in facts_of(sorted(paths), FLOW_EVENTS.name, at_ms * 1000):
        problem = COPY if found is None and identity is not None and identity in seen else found
        record.files += 1
        record.rows_in += rows or 0
        if problem is None:
            good.append(path)
            if identity is not None:
                seen.add(identity)
                record.identities.append(identity)
            continue
        record.bad_files.append((path, problem))
        record.files_unknown_rows += int(rows is None)
        if rows:
            record.by_reason[f"file: {problem}"] = record.by_reason.get(f"file: {problem}", 0) + rows
    record.rows_out = record.rows_in - sum(record.by_reason.values())
    return good


def take_back(sums: DataFrame, place: Place, batch: int) -> int | None:
    """Keep the evidence of files that must not count; return the end of its last window, None where there is none.

    Args:
        sums: of `flowctl.pipeline.watch.rules.windowed`, of those files.
        place: the checkpoint, which every worker reaches.
        batch: that had them; run again, it writes the same in the same place.
    """
    path = _taken_back_path(place, batch)
    sums.coalesce(1).write.mode("overwrite").parquet(path)
    last = sums.sparkSession.read.parquet(path).agg(f.unix_millis(f.max("window.end")).alias("last")).first()
    return None if last is None or last["last"] is None else int(last["last"])


def taken_back(spark: SparkSession, place: Place, batches: list[int]) -> DataFrame | None:
    """Return the evidence that batches have taken back; None: none has."""
    return spark.read.parquet(*(_taken_back_path(place, number) for number in batches)) if batches else None


def forget(place: Place, batch: int) -> None:
    """Delete what a batch has taken back."""
    place.delete(f"taken_back/batch={batch}")


def _taken_back_path(place: Place, batch: int) -> str:
    return place.path(f"taken_back/batch={batch}")


def look_at_rows(
    spark: SparkSession, record: BatchRecord, good: list[str], at_ms: int, ahead_s: float, out: str
) -> None:
    """Enter into `record` which rows of its files do not fit; write them below ``OUT/quarantine``.

    Args:
        spark: session.
        record: of the batch, after `judge_files`.
        good: its files that can be used.
        at_ms: when the batch was planned.
        ahead_s: how far ahead of that a record may be.
        out: folder of results.
    """
    if good:
        raw = spark.read.schema(FLOW_EVENTS.spark_ddl).option("ignoreMissingFiles", "true").parquet(*good)
        bad = refused(raw, at_ms, ahead_s)
        counts = {row["reason"]: row["count"] for row in bad.groupBy("reason").count().collect()}
        for reason, count in counts.items():
            record.by_reason[reason] = record.by_reason.get(reason, 0) + count
        if counts:
            path = f"{out}/quarantine/{FLOW_EVENTS.name}_watch/batch={record.batch}"
            bad.coalesce(1).write.mode("overwrite").parquet(path)
    record.rows_out = record.rows_in - sum(record.by_reason.values())


def row_checks() -> tuple[Check, ...]:
    """Return all checks of an event: none is proved by a footer, since a stream reads none."""
    return CHECKS[FLOW_EVENTS.name]


def refused(raw: DataFrame, at_ms: int, ahead_s: float) -> DataFrame:
    """Return the rows that do not fit: `file`, `reason`, `row` (JSON)."""
    ahead = f.col("ts") > f.timestamp_millis(f.lit(at_ms + int(ahead_s * 1000)))
    reason = f.coalesce(f.expr(reason_of(row_checks(), at_ms * 1000)), f.when(ahead, AHEAD))
    return raw.select(
        f.col("_metadata.file_path").alias("file"),
        reason.alias("reason"),
        f.to_json(f.struct(*FLOW_EVENTS.names)).alias("row"),
    ).where(f.col("reason").isNotNull())
