"""Which files a batch of `flowctl analyze watch` is made of, and what of them cannot be used.

Spark reads a stream of files without saying which, and passes over files that it cannot read (``ignoreCorruptFiles``;
else one truncated file would end the stream). Its checkpoint tells: ``offsets/N`` has the last entry of the source's
log that batch N covers, and ``sources/0`` is that log, one JSON line per file. With these names the files are looked
at once more, by their footers and by a pass over the columns that checks need, *after* the batch's bans are written:
what cannot be used is counted by reason, named, and written to the quarantine, and that costs no ban any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.pipeline.checks import CHECKS, Check, reason_of
from flowctl.pipeline.footers import facts_of
from flowctl.pipeline.place import Place, local_path
from flowctl.pipeline.watch_state import BatchRecord
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
    """

    last: int
    at_ms: int


def offsets_of(place: Place, batch: int) -> Offsets:
    """Return what the checkpoint says of `batch`; none for batches that are not there."""
    text = place.read_text(f"offsets/{batch}") if batch >= 0 else None
    lines = (text or "").splitlines()
    if len(lines) < 3:
        return Offsets(-1, 0)
    source = json.loads(lines[2])
    last = source["logOffset"] if isinstance(source, dict) else source
    return Offsets(int(last), int(json.loads(lines[1])["batchTimestampMs"]))


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


def look(spark: SparkSession, record: BatchRecord, paths: list[str], at_ms: int, ahead_s: float, out: str) -> None:
    """Enter into `record` what the files of its batch held; write what cannot be used below ``OUT/quarantine``.

    Args:
        spark: session.
        record: of the batch.
        paths: its files.
        at_ms: when the batch was planned.
        ahead_s: how far ahead of that a record may be.
        out: folder of results.
    """
    facts = list(facts_of(sorted(paths), FLOW_EVENTS.name, at_ms * 1000))
    good = []
    for path, problem, _, rows, *_ in facts:
        record.files += 1
        record.rows_in += rows or 0
        if problem is None:
            good.append(path)
            continue
        record.bad_files.append((path, problem))
        if rows:
            record.by_reason[f"file: {problem}"] = record.by_reason.get(f"file: {problem}", 0) + rows
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
