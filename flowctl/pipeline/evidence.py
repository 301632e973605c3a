"""What an event says about its address: evidence against it, and hours of good standing for it; one row at a time.

`flowctl analyze abuse` and `flowctl analyze watch` share this, so that both see the same evidence in the same record.
Each row is judged alone, without its connection's other rows: a stream of events then needs no state but sums. What
judging needs from the past of a connection, the recorder has put into its last record (`conn_closed`): how long it
was connected, and what it took since it left READY.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.pipeline.weights import Weights
from flowctl.reasons import CloseReason
from flowctl.telemetry.schema import EventName, Role

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EVENTS: Final = (
    EventName.CONN_OPENED,
    EventName.CONN_REFUSED,
    EventName.CONN_CLOSED,
    EventName.LIMIT_HIT,
    EventName.PLAY_STARTED,
    EventName.PUBLISH_STARTED,
)
"""Events that say anything here. The many others, of states, samples and drops, are filtered out as they are read."""
COLUMNS: Final = ("ts", "node", "seq", "address", "kind", "amount", "good_ms", "opened", "begun", "ended")
_SLOW: Final = (
    CloseReason.HARD_LIMIT,
    CloseReason.STUCK,
    CloseReason.SOFT_TOO_LONG,
    CloseReason.LADDER,
    CloseReason.MEMORY_BUDGET,
)
_LEFT: Final = (CloseReason.PEER_CLOSED, CloseReason.PEER_RESET)
_MOST_AMOUNT: Final = 1_000_000
"""Refusals that one record may sum up: a number in a text column could be anything."""
_TOTALS: Final = "connected_s double, trouble_s double, trouble_sent_bytes double, count bigint"


def evidence(events: DataFrame, weights: Weights) -> DataFrame:
    """Return what the events say about their addresses.

    Args:
        events: `flow_events`.
        weights: for the marks that make a connection short, or deaf.

    Returns:
        One row per event that says anything: ts, node, seq; address; kind of evidence and amount (kind null: none); for
        its standing: good_ms (time of a connection that has ended well), and 1 where a connection was opened, where it
        began to play or publish (begun), and where one that did has ended (ended).
    """
    names = [item.value for item in EVENTS]
    frame = events.where(f.col("event").isin(names) & f.col("peer_ip").isNotNull() & (f.col("peer_ip") != ""))
    told = f.col("event").isin(EventName.CONN_CLOSED.value, EventName.CONN_REFUSED.value)
    frame = frame.withColumn("totals", f.from_json(f.when(told, f.col("detail")), _TOTALS))
    closed = f.col("event") == EventName.CONN_CLOSED.value
    took_part = closed & f.coalesce(f.col("role") != Role.UNKNOWN.value, f.lit(False))
    bad = f.coalesce(f.col("kind").isin("deaf_close", "protocol_error", "short_connection"), f.lit(False))
    good = f.when(took_part & ~bad, f.coalesce(f.col("totals.connected_s"), f.lit(0.0)) * 1000).otherwise(0)
    begun = f.col("event").isin(EventName.PLAY_STARTED.value, EventName.PUBLISH_STARTED.value)
    amount = f.least(f.greatest(f.coalesce(f.col("totals.count"), f.lit(1)), f.lit(1)), f.lit(_MOST_AMOUNT))
    return frame.withColumn("kind", _kind(weights)).select(
        "ts",
        "node",
        "seq",
        f.col("peer_ip").alias("address"),
        "kind",
        f.when(f.col("kind").isNotNull(), amount).otherwise(0).cast("bigint").alias("amount"),
        f.greatest(good, f.lit(0)).cast("bigint").alias("good_ms"),
        (f.col("event") == EventName.CONN_OPENED.value).cast("bigint").alias("opened"),
        begun.cast("bigint").alias("begun"),
        took_part.cast("bigint").alias("ended"),
    )


def _kind(weights: Weights) -> Column:
    """Return the kind of evidence that an event is; null: none."""
    reason = f.col("reason")
    closed = (
        f.when(reason == CloseReason.HANDSHAKE_TIMEOUT.value, "handshake_timeout")
        .when(reason == CloseReason.PROTOCOL_ERROR.value, "protocol_error")
        .when(reason == CloseReason.AUTH_REFUSED.value, "auth_refused")
        .when(reason.isin([item.value for item in _SLOW]), f.when(_deaf(weights), "deaf_close").otherwise("slow_close"))
        .when(reason.isin([item.value for item in _LEFT]), _left(weights))
    )
    limit = f.concat(f.lit("limit_hit."), f.coalesce(f.col("axis"), f.lit("unknown")))
    refused = f.concat(f.lit("refused."), f.coalesce(reason, f.lit("unknown")))
    return (
        f.when(f.col("event") == EventName.LIMIT_HIT.value, limit)
        .when(f.col("event") == EventName.CONN_REFUSED.value, refused)
        .when(f.col("event") == EventName.CONN_CLOSED.value, closed)
    )


def _deaf(weights: Weights) -> Column:
    """Return whether a connection that was cut as slow took nothing while it was in trouble.

    The kernel's buffers are full by then, so even the first octet says that somebody read. Where the record does not
    tell, only a connection that was *stuck* counts: for that reason nothing was taken for seconds.
    """
    trouble_s, taken = f.col("totals.trouble_s"), f.col("totals.trouble_sent_bytes")
    known = trouble_s.isNotNull() & taken.isNotNull()
    slow = taken < f.greatest(trouble_s, f.lit(1.0)) * weights.deaf_bytes_per_s
    return f.when(known, slow).otherwise(f.col("reason") == CloseReason.STUCK.value)


def _left(weights: Weights) -> Column:
    """Return the kind of a connection that the peer has ended: one that did nothing, a short one, or none."""
    idle = f.coalesce(f.col("role") == Role.UNKNOWN.value, f.lit(True))
    short = f.coalesce(f.col("totals.connected_s") < weights.short_s, f.lit(False))
    return f.when(idle, "fruitless_connection").when(short, "short_connection")


def points(weights: Weights) -> Column:
    """Return the points of one occurrence of ``kind``."""
    default = f.lit(0.0)
    for name, value in weights.points.items():
        if name.endswith(".*"):
            default = f.when(f.col("kind").startswith(name[:-1]), f.lit(float(value))).otherwise(default)
    named = [(name, value) for name, value in weights.points.items() if not name.endswith(".*")]
    table = f.create_map(*(f.lit(part) for name, value in named for part in (name, float(value))))
    return f.coalesce(f.try_element_at(table, f.col("kind")), default)


def standing_hours(weights: Weights) -> Column:
    """Return the hours of good standing of ``good_ms``, ``begun`` and ``ended``.

    Plays that have begun and not ended are viewers of whom more is not known yet: each counts a little. Without it, a
    crowd that joins from one address at once would have evidence (accidents) and no standing.
    """
    running = f.greatest(f.lit(0), f.col("begun") - f.col("ended")) * (weights.play_s * 1000)
    return (f.col("good_ms") + running) / 3_600_000
