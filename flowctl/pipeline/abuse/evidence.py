"""What a record says about its address: evidence against it, and who behaves there. Kept per hour as part `evidence`.

`flowctl analyze abuse` and `flowctl analyze watch` share this, so that both see the same evidence in the same record.
Each record is judged alone: the end of a connection (`flow_closes`) tells how long it was open, and what it took since
it left READY; an event (`flow_events`) tells of a limit that was hit, or of refusals. So a stream needs only sums.

Standing is the other side (`flowctl.pipeline.abuse.scores.standing`): connections that play or publish and were not
cut. Those that begin and end within an hour and did nothing are summed per minute; those that standing must follow
(open, from an hour before, or over a limit) are kept one by one, by `node` and `conn_id`. One that has not played for
`flowctl.telemetry.schema.OPENS_FIRST_S` is not known to be there.

An address is one of `addresses.with_unit`: of IPv6 it is the /64.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.pipeline.abuse.weights import BEFORE_PLAYING, Weights
from flowctl.pipeline.job import Part
from flowctl.pipeline.records import addresses
from flowctl.reasons import SLOW_ENDS, CloseReason
from flowctl.telemetry.schema import OPENS_FIRST_S, EventName, Role

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from flowctl.pipeline.job import Records

_EVENTS: Final = (EventName.CONN_REFUSED.value, EventName.LIMIT_HIT.value, EventName.SERVER_STARTED.value)
_OF_BOTH: Final = ("ts", "node", "conn_id", "peer_ip", "role", "reason")
_OF_EVENTS: Final = ("event", "axis", "count")
_OF_CLOSES: Final = ("code", "handshake_ms", "duration_s", "limit_hits", "unrecovered_ms", "unrecovered_bytes")
_BEFORE_HANDSHAKE: Final = ("not-rtmp", "tls-on-plain-port", "rtmpe", "real-ip-prefix")
"""Codes of protocol errors of the handshake."""
_LEFT: Final = (CloseReason.PEER_CLOSED.value, CloseReason.PEER_RESET.value)
_BAD: Final = ("deaf_close", "protocol_error", "short_connection")
"""Ends of connections that are no good standing."""
_MOST_AMOUNT: Final = 1_000_000
"""Refusals that one record may sum up."""
_CLOCK_S: Final = 60
"""What a clock may have been set by while a connection that began in this hour was open."""

COLUMNS: Final = {
    "minute": "timestamp",
    "address": "string",  # null: of a server: `last_seen` is when its process began
    "kind": "string",  # of evidence; null: none
    "node": "string",  # with conn_id: where standing follows the connection; null: of many
    "conn_id": "bigint",
    "amount": "bigint",  # occurrences
    "opened": "bigint",  # connections that have ended
    "good_ms": "bigint",  # for how long those that ended well were open
    "begun": "timestamp",  # of one that was still open at the end of the hour: when it began to play or publish
    "first_seen": "timestamp",
    "last_seen": "timestamp",
}
"""One row per address, kind and minute, and per connection where it is kept one by one."""


def pieces(rows: DataFrame, weights: Weights, *more: str) -> DataFrame:
    """Return what records say about their addresses, one row each; works on a stream and on a table alike.

    Args:
        rows: `flow_closes` and `flow_events` in one: the columns of both, those of the other table null.
        weights: for the marks that make a connection short, or deaf.
        more: further columns to keep.

    Returns:
        ts, address, kind, node and conn_id (null where standing need not follow it), amount, opened, good_ms.
    """
    started, closed = f.col("event") == EventName.SERVER_STARTED.value, f.col("event").isNull()
    ours = closed | f.col("event").isin(*_EVENTS)
    frame = rows.where(ours & (started | (f.col("peer_ip") != ""))).withColumn("kind", _kind(weights))
    bad = f.coalesce(f.col("kind").isin(*_BAD), f.lit(False))
    good = closed & ~bad & (f.coalesce("role", f.lit(Role.UNKNOWN.value)) != Role.UNKNOWN.value)
    amount = f.least(f.greatest(f.coalesce("count", f.lit(1)), f.lit(1)), f.lit(_MOST_AMOUNT))
    in_hour_s = f.unix_timestamp("ts") - f.unix_timestamp(f.date_trunc("hour", "ts"))
    long = f.col("duration_s") + _CLOCK_S >= in_hour_s  # it may be open in the part of an hour before
    serious = ~f.col("kind").isin(*BEFORE_PLAYING) & ~f.col("kind").startswith("refused.")
    followed = [started, serious, good & (long | (f.col("limit_hits") > 0))]
    good_ms = f.when(good, f.greatest(f.col("duration_s") * 1000, f.lit(0))).otherwise(0)
    return (
        addresses.with_unit(frame, "peer_ip")
        .withColumn("followed", reduce(or_, (f.coalesce(item, f.lit(False)) for item in followed)))
        .select(
            *more,
            "ts",
            f.when(closed | ~started, f.col("address")).alias("address"),
            "kind",
            f.when(f.col("followed"), f.col("node")).alias("node"),
            f.when(f.col("followed"), f.col("conn_id")).alias("conn_id"),
            f.when(f.col("kind").isNotNull(), amount).otherwise(0).cast("bigint").alias("amount"),
            closed.cast("bigint").alias("opened"),
            good_ms.cast("bigint").alias("good_ms"),
        )
    )


def _still_open(opens: DataFrame, closes: DataFrame) -> DataFrame:
    """Return the connections of an hour that play or publish and have not ended in it, one row each, as `COLUMNS`."""
    at = f.unix_micros("ts")
    played_us = (f.col("duration_s") * 1000 - f.col("asked_ms")) * 1000
    begun_us = at - f.greatest(f.coalesce(played_us, f.lit(0.0)), f.lit(OPENS_FIRST_S * 1e6)).cast("bigint")
    names = ("date", "hour", "node", "conn_id", "peer_ip")
    told = opens.where(f.col("peer_ip") != "").select(*names, at.alias("us"), begun_us.alias("begun_us"))
    ended = closes.where(f.col("duration_s") >= OPENS_FIRST_S).select(*names)
    last = told.unionByName(ended, allowMissingColumns=True).groupBy(*names)
    counts = (f.count("*").alias("rows"), f.count("us").alias("open"))
    frame = last.agg(*counts, f.max("us").alias("us"), f.min("begun_us").alias("begun_us"))
    when, zero = f.timestamp_micros("us"), f.lit(0).cast("bigint")
    return addresses.with_unit(frame.where(f.col("rows") == f.col("open")), "peer_ip").select(
        *("date", "hour", f.date_trunc("minute", when).alias("minute"), "address"),
        *(f.lit(None).cast("string").alias("kind"), "node", "conn_id"),
        *(zero.alias(name) for name in ("amount", "opened", "good_ms")),
        *(f.timestamp_micros("begun_us").alias("begun"), when.alias("first_seen"), when.alias("last_seen")),
    )


def made(closes: DataFrame, opens: DataFrame, events: DataFrame, weights: Weights) -> DataFrame:
    """Return the rows of the part, with `date` and `hour`, of the records of one or more hours."""
    hour = ("date", "hour")
    ended = closes.select(*hour, *_OF_BOTH, *_OF_CLOSES)
    rows = ended.unionByName(events.select(*hour, *_OF_BOTH, *_OF_EVENTS), allowMissingColumns=True)
    keys = (*hour, f.date_trunc("minute", "ts").alias("minute"), "address", "kind", "node", "conn_id")
    found = pieces(rows, weights, *hour).groupBy(*keys)
    summed = found.agg(
        *(f.sum(name).alias(name) for name in ("amount", "opened", "good_ms")),
        f.lit(None).cast("timestamp").alias("begun"),
        *(f.min("ts").alias("first_seen"), f.max("ts").alias("last_seen")),
    )
    return summed.unionByName(_still_open(opens, closes)).select(*COLUMNS, *hour)


def _make(records: Records, options: Any) -> DataFrame:
    closes, opens, events = map(records.table, EVIDENCE.reads)
    return made(closes, opens, events, options.weights)


EVIDENCE: Final = Part(
    name="evidence",
    columns=COLUMNS,
    at="minute",
    make=_make,
    reads=("flow_closes", "flow_opens", "flow_events"),
    depends=lambda options: f"{options.weights.short_s:g} {options.weights.deaf_bytes_per_s:g}",
)


def _kind(weights: Weights) -> Column:
    """Return the kind of evidence that a record is; null: none."""
    event, reason = f.col("event"), f.col("reason")
    broken = f.when(_shook_hands(), "protocol_error").otherwise("not_rtmp")
    closed = (
        f.when(reason == CloseReason.HANDSHAKE_TIMEOUT.value, "handshake_timeout")
        .when(reason == CloseReason.PROTOCOL_ERROR.value, broken)
        .when(reason == CloseReason.AUTH_REFUSED.value, "auth_refused")
        .when(reason.isin(*SLOW_ENDS), f.when(_deaf(weights), "deaf_close").otherwise("slow_close"))
        .when(reason.isin(*_LEFT), _left(weights))
    )
    limit = f.concat(f.lit("limit_hit."), f.coalesce("axis", f.lit("unknown")))
    refused = f.concat(f.lit("refused."), f.coalesce(reason, f.lit("unknown")))
    return (
        f.when(event == EventName.LIMIT_HIT.value, limit)
        .when(event == EventName.CONN_REFUSED.value, refused)
        .when(event.isNull(), closed)
    )


def _shook_hands() -> Column:
    """Return whether a protocol error came after the handshake; where the record does not tell, it did not."""
    code = f.col("code")
    said = code.isNotNull() & ~code.isin(*_BEFORE_HANDSHAKE) & ~f.coalesce(code.startswith("handshake"), f.lit(False))
    return said | f.coalesce(f.col("role") != Role.UNKNOWN.value, f.lit(False)) | f.col("handshake_ms").isNotNull()


def _deaf(weights: Weights) -> Column:
    """Return whether a connection that was cut as slow took nothing while it was in trouble.

    The kernel's buffers are full by then, so even the first octet says that somebody read. Where the record does not
    tell, only a connection that was *stuck* counts: for that reason nothing was taken for seconds.
    """
    trouble_ms, taken = f.col("unrecovered_ms"), f.col("unrecovered_bytes")
    slow = taken < f.greatest(trouble_ms, f.lit(1000.0)) / 1000 * weights.deaf_bytes_per_s
    known = trouble_ms.isNotNull() & taken.isNotNull()
    return f.when(known, slow).otherwise(f.col("reason") == CloseReason.STUCK.value)


def _left(weights: Weights) -> Column:
    """Return the kind of a connection that the peer has ended: one that did nothing, a short one, or none."""
    idle = f.coalesce(f.col("role") == Role.UNKNOWN.value, f.lit(True))
    return f.when(idle, "fruitless_connection").when(f.col("duration_s") < weights.short_s, "short_connection")
