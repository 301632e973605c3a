"""The three parts that a session is made of: sums over its events, sums over its samples, and its one telling record.

Sums are numbers only, since Spark aggregates numbers in place in a hash table, and anything else (texts, lists,
quantile sketches) by sorting. Texts therefore come from one record of the connection, its close if there is one: the
sums name it by `seq`, which is unique within a node, and a join brings it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.pipeline.tables import delays
from flowctl.reasons import RECORDED_DROPS, DropReason
from flowctl.telemetry.schema import CLASS_NAMES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEYS: Final = ("node", "conn_id")
TELLING: Final = ("conn_opened", "command", "publish_started", "play_started", "banned", "conn_closed")
"""Events one of which names the connection's peer and stream; the later in this list, the better."""
RANK_BITS: Final = 60
"""`seq` counts microseconds since the epoch and records: far below."""
STALL_MS: Final = 500.0
"""A peer that takes nothing for so long while something waits shows a still picture: players buffer about a second."""
BUSY: Final = 0.9
"""A thread that is busy for so much of the time has no room for bursts: queues of all its viewers grow."""
STATE_WORDS: Final = {"ready": "READY", "overloaded": "OVERLOADED", "soft": "SOFT_LIMIT", "hard": "HARD_LIMIT"}
"""Names of columns, and of the states they are about; from best to worst, so that the order is a number."""


NOTHING_DROPPED: Final = """coalesce(contains(detail, '"dropped": {}') OR contains(detail, '"dropped":{}'), false)"""
"""Whether a close tells of no drops, in Spark's SQL. Within a text of JSON its quotes could not stand like that."""


def _number_sql(column: str) -> str:
    """Return the number of a state, 0 to 3, in Spark's SQL; null for steps (format 1) and where there is none."""
    cases = " ".join(f"WHEN '{state}' THEN {number}" for number, state in enumerate(STATE_WORDS.values()))
    return f"CASE {column} {cases} END"


def _telling_sql() -> str:
    """Return rank and `seq` of a record in one number, the larger the more telling, in Spark's SQL."""
    return f"shiftleft({rank_sql()}, {RANK_BITS}) + seq"


def rank_sql() -> str:
    """Return how telling a record is, 0 to 3, in Spark's SQL: 3 close, 2 names a stream, 1 any other of `TELLING`."""
    return (
        "CASE WHEN event = 'conn_closed' THEN 3L WHEN event IN ('publish_started', 'play_started') THEN 2L "
        f"WHEN event IN {TELLING!r} THEN 1L ELSE 0L END"
    )


def _if(condition: str, value: str, how: str, name: str) -> Column:
    return f.expr(f"{how}(CASE WHEN {condition} THEN {value} END)").alias(name)


def _sum_ms(condition: str, value: str, name: str) -> Column:
    """Add up milliseconds as whole microseconds: a sum of floats depends on the order in which tasks bring them."""
    return f.expr(f"sum(CASE WHEN {condition} THEN CAST(round({value} * 1e3D) AS BIGINT) END) / 1e3D").alias(name)


def _count(condition: str, name: str) -> Column:
    return f.expr(f"sum(CASE WHEN {condition} THEN 1L ELSE 0L END)").alias(name)


def event_sums(events: DataFrame) -> DataFrame:
    """Sum up the events of each connection in one hash aggregation.

    Args:
        events: rows of `flow_events` that passed the checks.

    Returns:
        One row per (node, conn_id), the server itself (0) among them: counts, sums and extremes, numbers and times
        only; and the histogram of `viewer_delay_ms` (see `delays`).
    """
    came_back = "edge AND state_to = 0"
    columns = [
        f.count("*").alias("row_count"),
        f.min("ts").alias("first_ts"),
        f.max("ts").alias("last_ts"),
        f.max("telling").alias("best"),
        _if("event = 'conn_opened'", "ts", "min", "opened_ts"),
        _if("event = 'conn_closed'", "ts", "max", "closed_ts"),
        _if("event = 'play_started'", "ts", "min", "play_ts"),
        _if("event = 'play_started'", "value", "min", "play_value_ms"),
        _if("event = 'handshake_done'", "value", "max", "handshake_ms"),
        *(_sum_ms(f"state_from = {number}", "state_ms", f"{name}_ms") for number, name in enumerate(STATE_WORDS)),
        *(_packed(conditions, f"pack{number}") for number, conditions in enumerate(PACKS)),
        _count("event = 'limit_hit'", "limit_hits"),
        # The change back to READY says how long ago READY was left: one episode, however many states it went through.
        _sum_ms(came_back, "value", "recover_sum_ms"),
        _if(came_back, "value", "max", "recover_max_ms"),
        f.max("state_to").alias("worst"),
        # The last state and since when: its number in the two lowest bits.
        _if("edge", "shiftleft(unix_micros(ts), 2) + state_to", "max", "last_edge"),
        f.max("sent_bytes").alias("sent_bytes"),
        _if("event = 'conn_closed'", "dropped_messages", "max", "closed_dropped_messages"),
        _if("event = 'conn_closed'", "dropped_bytes", "max", "closed_dropped_bytes"),
        _if("event = 'dropped'", "dropped_messages", "sum", "seen_dropped_messages"),
        _if("event = 'dropped'", "dropped_bytes", "sum", "seen_dropped_bytes"),
        f.max("viewer_delay_ms").alias("e_delay_max_ms"),
        *delays.words("e"),
    ]
    prepared = events.select(
        *KEYS,
        *("ts", "event", "value", "state_ms", "sent_bytes", "dropped_messages", "dropped_bytes", "viewer_delay_ms"),
        f.expr("event = 'state_changed'").alias("edge"),
        f.expr(_number_sql("state_from")).alias("state_from"),
        f.expr(_number_sql("state_to")).alias("state_to"),
        f.expr(_telling_sql()).alias("telling"),
        *delays.prepared("viewer_delay_ms", "e"),
    )
    return prepared.groupBy(*KEYS).agg(*columns).withColumns(_unpacked()).drop(*(f"pack{n}" for n in range(len(PACKS))))


PACKS: Final = (
    {
        "episodes_overloaded": "state_to = 1 AND state_from = 0",
        "episodes_soft": "state_to = 2 AND state_from <> 3",
        "episodes_hard": "state_to = 3",
    },
    {
        "hard_at_once": "state_to = 3 AND state_from = 0",
        "recoveries_timed": "edge AND state_to = 0 AND value IS NOT NULL",
        "recoveries": "state_to = 0",
    },
    {
        "input_pauses": "event = 'input_paused'",
        "returns_to_live": "event = 'returned'",
        "episodes_late": "event = 'pictures_late'",
    },
)
"""Counts that share a sum, 21 bits each, and what they count; no connection has 2 million edges or pauses."""


def _packed(conditions: dict[str, str], name: str) -> Column:
    parts = (
        f"CASE WHEN {condition} THEN {1 << (delays.COUNTER_BITS * place)}L ELSE 0L END"
        for place, condition in enumerate(conditions.values())
    )
    return f.expr(f"sum({' + '.join(parts)})").alias(name)


def _unpacked() -> dict[str, Column]:
    return {
        name: f.expr(f"shiftright(pack{number}, {delays.COUNTER_BITS * place}) & {delays.MASK}L")
        for number, conditions in enumerate(PACKS)
        for place, name in enumerate(conditions)
    }


def telling_records(events: DataFrame) -> DataFrame:
    """Take the records that can name a connection's peer and stream.

    Args:
        events: rows of `flow_events` that passed the checks.

    Returns:
        One row per such record: node, conn_id, best (its rank and `seq`, as in `event_sums`), peer_ip, peer_port, role,
        app, stream, close_reason, detail (of closes).
    """
    close = f.col("event") == "conn_closed"
    # A command tells more than its connection's opening only if it names a stream; all others are not moved about.
    wanted = f"event IN {TELLING!r} AND conn_id <> 0 AND (event <> 'command' OR coalesce(role, 'unknown') <> 'unknown')"
    return events.filter(wanted).select(
        *KEYS,
        f.expr(_telling_sql()).alias("best"),
        "peer_ip",
        "peer_port",
        "role",
        "app",
        "stream",
        f.when(close, f.col("reason")).alias("close_reason"),
        f.when(close, f.col("detail")).alias("detail"),
    )


def sample_sums(samples: DataFrame) -> DataFrame:
    """Sum up the samples of each connection in one hash aggregation.

    Args:
        samples: rows of `flow_samples` that passed the checks.

    Returns:
        One row per (node, conn_id): figures named ``s_...``, and the histogram of `viewer_delay_ms`.
    """
    trouble, accepted = _TROUBLE, _ACCEPTED
    dropped = " + ".join(f"dropped_messages_{name}" for name in CLASS_NAMES)
    columns = [
        f.count("*").alias("s_rows"),
        _sum_ms("true", "interval_ms", "s_ms"),
        _sum_ms(trouble, "interval_ms", "s_trouble_ms"),
        f.expr(f"sum({accepted})").alias("s_accepted_bytes"),
        f.expr(f"sum({dropped})").alias("s_dropped_messages"),
        _if(f"NOT {trouble} AND coalesce(stalled_ms, 0.0D) = 0.0D", f"({dropped})", "sum", "s_unforced_drops"),
        _sum_ms(f"stalled_ms >= {STALL_MS}D", "least(stalled_ms, interval_ms)", "s_stall_ms"),
        # A stall passes the mark in exactly one of the samples that see it.
        _count(f"stalled_ms >= {STALL_MS}D AND stalled_ms < {STALL_MS}D + interval_ms", "s_stall_count"),
        *(f.sum(f"accepted_messages_{name}").alias(f"s_accepted_{name}") for name in CLASS_NAMES),
        *(f.sum(f"dropped_messages_{name}").alias(f"s_dropped_{name}") for name in CLASS_NAMES),
        # Of the moments in which something always waited: what its line carries, and what was published meanwhile.
        f.expr(f"sum(CASE WHEN {_MEASURED} THEN CAST(drain_bytes_per_s * interval_ms AS BIGINT) END)").alias("s_line"),
        _if(_MEASURED, f"({accepted})", "sum", "s_line_stream"),
        f.max("viewer_delay_ms").alias("s_delay_max_ms"),
        *delays.words("s"),
    ]
    prepared = samples.filter(f.col("conn_id") != 0).select("*", *delays.prepared("viewer_delay_ms", "s"))
    return prepared.groupBy(*KEYS).agg(*columns)


_TROUBLE: Final = "(state <> 'READY' OR coalesce(picture_share, 1) < 1 OR coalesce(step, 'FULL') <> 'FULL')"
_MEASURED: Final = f"({_TROUBLE} AND drain_bytes_per_s IS NOT NULL)"
_OURS: Final = f"(coalesce(strained, false) OR coalesce(thread_busy, 0.0D) >= {BUSY}D)"
_ACCEPTED: Final = " + ".join(f"accepted_bytes_{name}" for name in CLASS_NAMES)


def leaving_sums(events: DataFrame, samples: DataFrame) -> DataFrame:
    """Sum up the samples in whose interval READY was left, and not come back to: they show what the cause was.

    Only samples of trouble are moved, and only those that an edge falls into are kept.

    Args:
        events: rows of `flow_events` that passed the checks.
        samples: rows of `flow_samples` that did.

    Returns:
        One row per (node, conn_id) that has any: l_ms, l_ours_ms (where the thread had no room), l_accepted_bytes.
    """
    us = "unix_micros(ts)"
    left = events.filter("event = 'state_changed' AND state_from = 'READY' AND conn_id <> 0").select(
        *KEYS, f.expr(us).alias("left_us"), f.expr(f"{us} DIV 1000000").alias("second")
    )
    began = f"({us} - CAST(least(interval_ms, {LONGEST_MS}D) * 1e3D AS BIGINT))"
    rows = samples.filter(f"conn_id <> 0 AND {_TROUBLE}").select(
        *(*KEYS, "seq", "interval_ms"),
        f.expr(_OURS).alias("ours"),
        f.expr(_ACCEPTED).alias("accepted_bytes"),
        f.expr(us).alias("until_us"),
        f.expr(began).alias("began_us"),
        f.expr(f"explode(sequence({began} DIV 1000000, {us} DIV 1000000))").alias("second"),
    )
    within = f.expr("left_us > began_us AND left_us <= until_us")
    same = [rows[name] == left[name] for name in (*KEYS, "second")]
    found = rows.join(left, [*same, within], "left_semi").dropDuplicates([*KEYS, "seq"])
    return found.groupBy(*KEYS).agg(
        _sum_ms("true", "interval_ms", "l_ms"),
        _sum_ms("ours", "interval_ms", "l_ours_ms"),
        f.sum("accepted_bytes").alias("l_accepted_bytes"),
    )


LONGEST_MS: Final = 60_000.0
"""Longest interval of a sample: the sampler rests for 30 s at most."""


PICTURES: Final = ("key", "inter", "disposable")
_NOT_MISSED: Final = (DropReason.UNFOLLOWED.value, DropReason.CLOSED.value)


def pictures_not_missed_sql(told: str = "told.dropped.`{reason}`.`{name}`") -> str:
    """Return the pictures that a viewer was not sent and does not miss, in SQL: those queued when it left, or muted.

    Args:
        told: the count of one reason and class in the parsed close.
    """

    def of(reason: str) -> str:
        return " + ".join(f"coalesce({told.format(reason=reason, name=name)}, 0)" for name in PICTURES)

    # Of viewers that want pictures no policy for live media refuses key frames while it accepts anything else.
    muted = f"coalesce({told.format(reason=DropReason.REFUSED.value, name='key')}, 0) > 0"
    return f"{' + '.join(map(of, _NOT_MISSED))} + CASE WHEN {muted} THEN {of(DropReason.REFUSED.value)} ELSE 0 END"


def picture_share_sql(not_missed: str) -> str:
    """Return the share of the pictures that was sent, in SQL over the columns of a session; null: not known."""
    accepted, dropped = (" + ".join(f"{what}_messages_{name}" for name in PICTURES) for what in ("accepted", "dropped"))
    passed = f"({accepted} - ({not_missed}))"
    lost = f"({dropped} - ({not_missed}))"
    return f"CASE WHEN {passed} > 0 THEN greatest(0.0, least(1.0, 1.0 - {lost} / CAST({passed} AS DOUBLE))) END"


def _counts_ddl() -> str:
    return "STRUCT<" + ", ".join(f"`{name}`: BIGINT" for name in CLASS_NAMES) + ">"


def detail_ddl() -> str:
    """Return the form of `detail` of a close, as `from_json` reads it; see the recorder for what it holds."""
    reasons = ", ".join(f"`{reason}`: {_counts_ddl()}" for reason in RECORDED_DROPS)
    states = "STRUCT<READY: DOUBLE, OVERLOADED: DOUBLE, SOFT_LIMIT: DOUBLE, HARD_LIMIT: DOUBLE>"
    return f"accepted {_counts_ddl()}, dropped STRUCT<{reasons}>, states_ms {states}, agent STRING, connected_s DOUBLE"


def dropped_sql(name: str) -> str:
    """Return the messages of class `name` that were dropped, over the parsed ``told``, in Spark's SQL."""
    whole = " + ".join(f"coalesce(told.dropped.`{reason}`.`{name}`, 0L)" for reason in RECORDED_DROPS)
    return f"CASE WHEN nothing_dropped THEN 0L ELSE {whole} END"
