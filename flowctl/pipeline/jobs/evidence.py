"""What an event says about its address: evidence against it, one row at a time; and who behaves there, by connection.

`flowctl analyze abuse` and `flowctl analyze watch` share this, so that both see the same evidence in the same record.
Each row is judged alone, without its connection's other rows: a stream of events then needs no state but sums. What
judging needs from the past of a connection, the recorder has put into its last record (`conn_closed`): how long it
was connected, and what it took since it left READY.

Standing is the other side (`standing`): connections that play or publish and were not cut, the open ones among them,
which have no last record. It needs all rows of a connection, so `watch` looks it up for the few addresses that it is
about to ban.

An address is a `flowctl.pipeline.tables.addresses.unit`: of IPv6 it is the /64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.pipeline.jobs.weights import Weights
from flowctl.pipeline.tables import addresses
from flowctl.reasons import SLOW_ENDS, CloseReason
from flowctl.server.guilt import PROOF
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
_BEFORE_HANDSHAKE: Final = ("not-rtmp", "tls-on-plain-port", "rtmpe", "real-ip-prefix")
"""Codes of protocol errors of the handshake."""
_LEFT: Final = (CloseReason.PEER_CLOSED, CloseReason.PEER_RESET)
_MOST_AMOUNT: Final = 1_000_000
"""Refusals that one record may sum up: a number in a text column could be anything."""
_TOTALS: Final = "connected_s double, trouble_s double, trouble_sent_bytes double, count bigint, code string"


def evidence(events: DataFrame, weights: Weights) -> DataFrame:
    """Return what the events say about their addresses.

    Args:
        events: `flow_events`.
        weights: for the marks that make a connection short, or deaf.

    Returns:
        One row per event that says anything: ts, node, conn_id; address; kind of evidence and amount (kind null: none);
        opened: 1 where a connection was; for its standing: begun (it plays or publishes now), closed, and good_ms (how
        long one that has ended well was connected).
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
    return (
        addresses.with_unit(frame, "peer_ip")
        .withColumn("kind", _kind(weights))
        .select(
            "ts",
            "node",
            "conn_id",
            "address",
            "kind",
            f.when(f.col("kind").isNotNull(), amount).otherwise(0).cast("bigint").alias("amount"),
            (f.col("event") == EventName.CONN_OPENED.value).cast("bigint").alias("opened"),
            begun.alias("begun"),
            closed.alias("closed"),
            f.greatest(good, f.lit(0)).cast("bigint").alias("good_ms"),
        )
    )


def standing(found: DataFrame, starts: DataFrame, weights: Weights, seen_us: int, now_us: int) -> DataFrame:
    """Return who behaves at each address.

    A connection counts with the time for which it played or published, if it did nothing that bans and was not cut. One
    that is open counts up to the end of the data, and as one who is there now if it has played for `Weights.settled_s`.
    One that was open when its server went away, so that nobody told its end, counts with `Weights.play_s`.

    Args:
        found: of `evidence`.
        starts: node, started_us: when the newest process of each node began.
        weights: for half-life and marks.
        seen_us: end of the data, microseconds since the epoch.
        now_us: up to when standing ages.

    Returns:
        One row per address where anybody has behaved: address, people (there now), standing_hours (aged).
    """
    us = f.unix_micros("ts")
    connections = found.groupBy("node", "conn_id", "address").agg(
        f.min(f.when(f.col("begun"), us)).alias("begun_us"),
        f.max(f.when(f.col("closed"), us)).alias("closed_us"),
        f.max("good_ms").alias("good_ms"),  # not the sum: a close that is there twice is one
        f.max(harmful(weights)).alias("harmful"),
    )
    frame = connections.where(~f.coalesce("harmful", f.lit(False))).join(f.broadcast(starts), "node", "left")
    told, begun = f.col("closed_us").isNotNull(), f.col("begun_us").isNotNull()
    gone = f.coalesce(f.col("begun_us") < f.col("started_us"), f.lit(False))
    lasted_ms = f.greatest(f.lit(0), f.lit(seen_us) - f.col("begun_us")) / 1000
    open_ = ~told & begun & ~gone
    settled = open_ & (lasted_ms >= weights.settled_s * 1000)
    known_ms = f.greatest(lasted_ms, f.lit(weights.play_s * 1000))
    until_us = f.when(told, f.col("closed_us")).when(gone, f.col("begun_us")).otherwise(f.lit(seen_us))
    ms = f.when(told, f.col("good_ms")).when(gone, weights.play_s * 1000).when(begun, known_ms).otherwise(0)
    # Whole milliseconds, so that the sum does not depend on the order.
    aged = (ms * halved(f.lit(now_us) - until_us, weights)).cast("bigint")
    summed = frame.groupBy("address").agg(f.count_if(settled).alias("people"), f.sum(aged).alias("standing_ms"))
    return summed.select("address", "people", (f.col("standing_ms") / 3_600_000).alias("standing_hours"))


def starts_of(events: DataFrame) -> DataFrame:
    """Return node, rows, last_us (of its newest record) and started_us (of its newest start; null: not recorded)."""
    us = f.unix_micros("ts")
    started = f.when(f.col("event") == EventName.SERVER_STARTED.value, us)
    return events.groupBy("node").agg(
        f.count("*").alias("rows"), f.max(us).alias("last_us"), f.max(started).alias("started_us")
    )


def halved(age_us: Column, weights: Weights) -> Column:
    """Return what is left of a piece of that age; what is newer than now, by a clock that is ahead, is of now."""
    return f.pow(f.lit(0.5), f.greatest(f.lit(0), age_us) / (weights.half_life_s * 1e6))


def _kind(weights: Weights) -> Column:
    """Return the kind of evidence that an event is; null: none."""
    reason = f.col("reason")
    closed = (
        f.when(reason == CloseReason.HANDSHAKE_TIMEOUT.value, "handshake_timeout")
        .when(
            reason == CloseReason.PROTOCOL_ERROR.value, f.when(_shook_hands(), "protocol_error").otherwise("not_rtmp")
        )
        .when(reason == CloseReason.AUTH_REFUSED.value, "auth_refused")
        .when(reason.isin(*SLOW_ENDS), f.when(_deaf(weights), "deaf_close").otherwise("slow_close"))
        .when(reason.isin([item.value for item in _LEFT]), _left(weights))
    )
    limit = f.concat(f.lit("limit_hit."), f.coalesce(f.col("axis"), f.lit("unknown")))
    refused = f.concat(f.lit("refused."), f.coalesce(reason, f.lit("unknown")))
    return (
        f.when(f.col("event") == EventName.LIMIT_HIT.value, limit)
        .when(f.col("event") == EventName.CONN_REFUSED.value, refused)
        .when(f.col("event") == EventName.CONN_CLOSED.value, closed)
    )


def _shook_hands() -> Column:
    """Return whether a protocol error came after the handshake; where the record does not tell, it did not."""
    code = f.col("totals.code")
    said = code.isNotNull() & ~code.isin(*_BEFORE_HANDSHAKE) & ~f.coalesce(code.startswith("handshake"), f.lit(False))
    return said | f.coalesce(f.col("role") != Role.UNKNOWN.value, f.lit(False))


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


def harmful(weights: Weights) -> Column:
    """Return whether evidence of ``kind`` can lead to a ban; other evidence leads to a limit at most."""
    return f.coalesce(f.col("kind").isin([name for name in weights.points if weights.bans(name)]), f.lit(False))


def proves(weights: Weights) -> Column:
    """Return whether one piece of evidence of ``kind`` is a proof."""
    proofs = [name for name, value in weights.points.items() if weights.bans(name) and value >= PROOF]
    return f.coalesce(f.col("kind").isin(proofs), f.lit(False))
