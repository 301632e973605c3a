"""Makes of old records (formats 1 and 2) what servers write today: closes, connections that are open, and fewer events.

Old servers wrote what a connection was as events: opened, handshake, commands, changes of state, closed. Here they are
added up per connection, over all hours that are read together, into one row with the columns of `flow_closes`, counted
in the hour of its end; or of `flow_opens`, in the hour of its last event, where there is no end.

What hours that are read one by one cannot know of a connection that lasted longer: what its events in the hours before
told. Its close has the totals by class and reason, the times in states, its whole duration and what it sent, so these
are right anyway; how often it changed its state, paused and hit limits, and what samples saw, is then that of its last
hour. A first run over old records reads all hours together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.reasons import RECORDED_DROPS, DropReason
from flowctl.telemetry.schema import (
    CLASS_NAMES,
    FLOW_CLOSES,
    FLOW_EVENTS,
    RECORDED,
    SPARK_TYPES,
    STATE_NAMES,
    EventName,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEYS: Final = ("node", "conn_id")
STALL_MS: Final = 500.0
"""A peer that takes nothing for so long while something waits shows a still picture: players buffer about a second."""
BUSY: Final = 0.9
"""A thread that is busy for so much of the time has no room for bursts."""
LONGEST_MS: Final = 60_000.0
"""Longest interval of a sample: the sampler rests for 30 s at most."""
_STATES: Final = ("READY", "OVERLOADED", "SOFT_LIMIT", "HARD_LIMIT")
_PICTURES: Final = ("key", "inter", "disposable")
_NEEDED: Final = ("key", "inter", "audio")
_NO_LOSS: Final = (DropReason.CLOSED.value, DropReason.UNFOLLOWED.value, DropReason.REQUESTED.value)
_NAMED: Final = ("peer_ip", "peer_port", "role", "app", "stream")
_SHARES: Final = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
ACCURACY: Final = 1000
"""Of `approx_percentile`: a quantile is off by 0.1 % of the samples at most."""


def events(old: DataFrame) -> DataFrame:
    """Return those events that servers write today, in today's columns.

    Args:
        old: rows of `flow_events` of formats 1 and 2, with `date` and `hour`.
    """
    count = f.get_json_object(f.when(_is(EventName.CONN_REFUSED), f.col("detail")), "$.count").cast("bigint")
    frame = old.filter(f.col("event").isin(*sorted(RECORDED))).withColumn("count", f.coalesce("count", count))
    return frame.select(*FLOW_EVENTS.names, "date", "hour")


def connections(old: DataFrame, samples: DataFrame | None, *, ended: bool) -> DataFrame:
    """Return one row per connection, the columns of `flow_closes`, `date` and `hour`.

    Args:
        old: rows of `flow_events` of formats 1 and 2, with `date` and `hour`.
        samples: rows of `flow_samples` of these formats, and `step`. None: there are none.
        ended: whether those that ended are wanted, or those that did not.
    """
    told = old.filter(f.col("conn_id") != 0)
    frame = _event_sums(told).filter(f.col("close").isNotNull() if ended else f.col("close").isNull())
    columns = _of_events()
    if samples is not None:
        sampled = samples.filter(f.col("conn_id") != 0)
        frame = frame.join(_sample_sums(sampled), list(KEYS), "left").join(
            _left_sums(told, sampled), list(KEYS), "left"
        )
        columns |= _of_samples(columns)
    frame = frame.withColumn("told", f.from_json("close.detail", _detail_ddl()))
    nothing = f.lit(None)
    return frame.select(
        *(
            columns.get(item.name, nothing).cast(SPARK_TYPES[item.kind]).alias(item.name)
            for item in FLOW_CLOSES.columns
        ),
        "end.date",
        "end.hour",
    )


def _is(*names: EventName) -> Column:
    return f.col("event").isin(*(name.value for name in names))


def _of(condition: Column, value: str) -> Column:
    return f.when(condition, f.col(value))


def _sum_ms(value: Column) -> Column:
    """Add up milliseconds as whole microseconds: a sum of floats depends on the order in which tasks bring them."""
    return f.sum(f.round(value * 1e3).cast("bigint")) / 1e3


def _event_sums(told: DataFrame) -> DataFrame:
    """Sum up the events of each connection."""
    edge = _is(EventName.STATE_CHANGED)
    old, new = (
        f.array_position(f.array(*map(f.lit, _STATES)), f.when(edge, f.col(name))) - 1
        for name in ("state_from", "state_to")
    )
    close = _is(EventName.CONN_CLOSED)
    began = _is(EventName.PLAY_STARTED, EventName.PUBLISH_STARTED)
    asks = (_is(EventName.COMMAND) & f.col("reason").isin("play", "publish")) | began
    naming = _is(EventName.CONN_OPENED, EventName.COMMAND, EventName.BANNED) | began | close
    # A close tells most, then what names a stream; a command only if it does.
    rank = f.when(close, 3).when(began | f.col("stream").isNotNull(), 2).otherwise(1)
    whole = f.struct("reason", "detail", "dropped_messages", "dropped_bytes", "axis", "ts")
    return told.groupBy(*KEYS).agg(
        f.max("seq").alias("last_seq"),
        f.min("ts").alias("first_ts"),
        f.min(_of(_is(EventName.CONN_OPENED), "ts")).alias("opened_ts"),
        f.max_by(f.struct("ts", "date", "hour"), f.struct(close, "ts", "seq")).alias("end"),
        f.max_by(f.struct(*_NAMED), f.when(naming, f.struct(rank, "seq"))).alias("named"),
        f.max_by(whole, f.when(close, f.col("seq"))).alias("close"),
        f.max(_of(_is(EventName.HANDSHAKE_DONE), "value")).alias("handshake_ms"),
        f.min(_of(asks, "ts")).alias("asked_ts"),
        f.min(_of(began, "ts")).alias("began_ts"),
        f.min(_of(began, "value")).alias("startup_ms"),
        *(_sum_ms(_of(old == rank_, "state_ms")).alias(f"seen_{name}_ms") for rank_, name in enumerate(STATE_NAMES)),
        *(f.count_if((new == rank_) & (old < rank_)).alias(f"episodes_{name}") for rank_, name in _WORSE),
        f.count_if((old == 0) & (new == 3)).alias("hard_at_once"),
        f.count_if(new == 0).alias("recoveries"),
        _sum_ms(_of(new == 0, "value")).alias("recover_ms"),
        f.max(_of(new == 0, "value")).alias("recover_max_ms"),
        f.max(f.when(edge, f.struct("ts", new.alias("rank")))).alias("last_edge"),
        f.max(_of(old == 0, "ts")).alias("left_ts"),
        f.max(_of(old == 0, "sent_bytes")).alias("left_sent"),
        f.count_if(_is(EventName.PICTURES_LATE)).alias("late_episodes"),
        f.count_if(_is(EventName.RETURNED)).alias("returns"),
        f.count_if(_is(EventName.INPUT_PAUSED)).alias("input_pauses"),
        _sum_ms(_of(_is(EventName.INPUT_RESUMED), "value")).alias("input_paused_ms"),
        f.count_if(_is(EventName.LIMIT_HIT)).alias("limit_hits"),
        f.count_if(f.col("event").isin(*sorted(RECORDED))).alias("events_count"),
        f.max("sent_bytes").alias("sent_bytes"),
        f.sum(_of(_is(EventName.DROPPED), "dropped_bytes")).alias("seen_dropped_bytes"),
        f.max_by("rtt_us", _of(f.col("rtt_us").isNotNull(), "seq")).alias("rtt_us"),
        *_delays("e"),
    )


_WORSE: Final = tuple(enumerate(STATE_NAMES))[1:]


def _delays(prefix: str) -> list[Column]:
    """Return quantiles and largest of the delay, over events (of those in trouble) or samples."""
    shares = [share for _, share in _SHARES]
    quantiles = f.percentile_approx("viewer_delay_ms", shares, ACCURACY).alias(f"{prefix}_delays")
    return [quantiles, f.max("viewer_delay_ms").alias(f"{prefix}_delay_max")]


def _of_events() -> dict[str, Column]:
    """Return the columns that events tell, over `_event_sums` and the parsed detail of the close (``told``)."""
    began, end = f.coalesce("opened_ts", "first_ts"), f.col("end.ts")
    whole = f.col("told.dropped").isNotNull()
    in_last = {name: f.coalesce(f.col("last_edge.rank"), f.lit(0)) == rank for rank, name in enumerate(STATE_NAMES)}
    rest_ms = f.greatest(f.lit(0.0), _ms(f.coalesce("last_edge.ts", began), end))
    found: dict[str, Column] = {
        **{name: f.col(name) for name in ("node", "conn_id", "handshake_ms", *_COUNTED, "sent_bytes", "rtt_us")},
        **{name: f.col(f"named.{name}") for name in _NAMED},
        **{name: f.coalesce(name, f.lit(0.0)) for name in ("recover_ms", "recover_max_ms", "input_paused_ms")},
        **{f"episodes_{name}": f.col(f"episodes_{name}") for _, name in _WORSE},
        "ts": end,
        "seq": f.col("last_seq"),
        "agent": f.col("told.agent"),
        "opened_at": began,
        # Of the monotonic clock, where it is told: that on the wall can be set back meanwhile.
        "duration_s": f.coalesce("told.connected_s", f.greatest(f.lit(0.0), _ms(began, end) / 1e3)),
        "reason": f.col("close.reason"),
        "code": f.col("told.code"),
        "limit_name": f.coalesce("told.limit", "close.axis"),
        "asked_ms": f.greatest(f.lit(0.0), _ms(began, f.col("asked_ts"))),
        "startup_ms": f.coalesce("startup_ms", f.greatest(f.lit(0.0), _ms(began, f.col("began_ts")))),
        "edges_missed": f.coalesce("told.edges_missed", f.lit(0)),
        "dropped_bytes": f.coalesce("close.dropped_bytes", "seen_dropped_bytes", f.lit(0)),
        "lost_messages": f.when(whole, _sum_of(_dropped(reason, name) for reason in _LOSSES for name in _NEEDED)),
        "unrecovered_ms": f.coalesce(
            f.col("told.trouble_s") * 1e3, f.when(f.col("last_edge.rank") > 0, _ms(f.col("left_ts"), end))
        ),
        "unrecovered_bytes": f.coalesce(
            "told.trouble_sent_bytes", f.when(f.col("last_edge.rank") > 0, f.col("sent_bytes") - f.col("left_sent"))
        ),
        "delay_max_ms": f.col("e_delay_max"),
    }
    for rank, name in enumerate(STATE_NAMES):
        seen = f.coalesce(f"seen_{name}_ms", f.lit(0.0)) + f.when(in_last[name], rest_ms).otherwise(0.0)
        said = f.coalesce(f.col(f"told.states_ms.{_STATES[rank]}"), f.lit(0.0))
        found[f"time_{name}_ms"] = f.when(f.col("told.states_ms").isNotNull(), said).otherwise(seen)
    for name in CLASS_NAMES:
        accepted = f.when(f.col("told.accepted").isNotNull(), f.coalesce(f"told.accepted.{name}", f.lit(0)))
        dropped = f.when(whole, _sum_of(_dropped(reason, name) for reason in RECORDED_DROPS))
        found |= {f"accepted_messages_{name}": accepted, f"dropped_messages_{name}": dropped}
        found[f"sent_messages_{name}"] = f.coalesce(f"told.sent.{name}", f.greatest(f.lit(0), accepted - dropped))
    for reason in DropReason:
        found[f"dropped_by_{reason.name.lower()}"] = f.when(whole, _of_reason(reason.value, CLASS_NAMES))
    muted = f.when(_dropped(DropReason.REFUSED.value, "key") > 0, _of_reason(DropReason.REFUSED.value, _PICTURES))
    not_missed = _sum_of((f.coalesce(muted, f.lit(0)), *(_of_reason(reason, _PICTURES) for reason in _NO_LOSS[:2])))
    found["pictures_wanted"] = _sum_of(found[f"accepted_messages_{name}"] for name in _PICTURES) - not_missed
    found["pictures_sent"] = _sum_of(found[f"sent_messages_{name}"] for name in _PICTURES)
    for index, (name, _) in enumerate(_SHARES):
        found[f"delay_{name}_ms"] = f.get("e_delays", f.lit(index))
    return found


_COUNTED: Final = (
    *("hard_at_once", "recoveries", "late_episodes", "returns", "input_pauses", "limit_hits", "events_count"),
)
_LOSSES: Final = tuple(reason for reason in RECORDED_DROPS if reason not in _NO_LOSS)


def _ms(begin: Column, end: Column) -> Column:
    return (f.unix_micros(end) - f.unix_micros(begin)) / 1e3


def _sum_of(parts: Iterable[Column]) -> Column:
    return reduce(lambda first, second: first + second, parts)


def _dropped(reason: str, name: str) -> Column:
    return f.coalesce(f.col(f"told.dropped.`{reason}`.{name}"), f.lit(0))


def _of_reason(reason: str, names: tuple[str, ...]) -> Column:
    return _sum_of(_dropped(reason, name) for name in names)


def _sample_sums(samples: DataFrame) -> DataFrame:
    """Sum up the samples of each connection."""
    accepted, dropped = _sum_of(_each("accepted_bytes")), _sum_of(_each("dropped_messages"))
    stalled, still = f.coalesce("stalled_ms", f.lit(0.0)), f.col("stalled_ms") >= STALL_MS
    measured = _trouble() & f.col("drain_bytes_per_s").isNotNull()
    return samples.groupBy(*KEYS).agg(
        f.count("*").alias("s_rows"),
        _sum_ms(f.col("interval_ms")).alias("s_ms"),
        _sum_ms(_of(_trouble(), "interval_ms")).alias("s_trouble_ms"),
        f.sum(accepted).alias("s_accepted_bytes"),
        f.sum(f.when(~_trouble() & (stalled == 0), dropped)).alias("s_unforced"),
        _sum_ms(f.when(still, f.least("stalled_ms", "interval_ms"))).alias("s_stall_ms"),
        # A stall passes the mark in exactly one of the samples that see it.
        f.count_if(still & (f.col("stalled_ms") < f.col("interval_ms") + STALL_MS)).alias("s_stall_count"),
        *(f.sum(f"{what}_messages_{name}").alias(f"s_{what}_{name}") for what in _FLOWS for name in CLASS_NAMES),
        f.sum(f.when(measured, f.col("drain_bytes_per_s") * f.col("interval_ms") / 1e3).cast("bigint")).alias("s_line"),
        f.sum(f.when(measured, accepted)).alias("s_line_stream"),
        (f.sum(f.col("viewer_delay_ms") * f.col("interval_ms")) / f.sum("interval_ms")).alias("s_delay_mean"),
        *_delays("s"),
    )


_FLOWS: Final = ("accepted", "sent", "dropped")


def _trouble() -> Column:
    whole = f.coalesce("picture_share", f.lit(1.0)) < 1
    return (f.col("state") != "READY") | whole | (f.coalesce("step", f.lit("FULL")) != "FULL")


def _each(begin: str) -> list[Column]:
    return [f.col(f"{begin}_{name}") for name in CLASS_NAMES]


def _left_sums(told: DataFrame, samples: DataFrame) -> DataFrame:
    """Sum up the samples in whose interval READY was left, and not come back to: they show what the cause was."""
    us, second = f.unix_micros("ts"), 1_000_000
    edges = told.filter(_is(EventName.STATE_CHANGED) & (f.col("state_from") == "READY"))
    left = edges.select(*KEYS, us.alias("left_us"), f.floor(us / second).alias("second"))
    began = us - (f.least("interval_ms", f.lit(LONGEST_MS)) * 1e3).cast("bigint")
    ours = f.coalesce("strained", f.lit(False)) | (f.coalesce("thread_busy", f.lit(0.0)) >= BUSY)
    rows = samples.filter(_trouble()).select(
        *(*KEYS, "seq", "interval_ms", ours.alias("ours"), us.alias("until_us"), began.alias("began_us")),
        _sum_of(_each("accepted_bytes")).alias("accepted_bytes"),
        f.explode(f.sequence(f.floor(began / second), f.floor(us / second))).alias("second"),
    )
    within = (left["left_us"] > rows["began_us"]) & (left["left_us"] <= rows["until_us"])
    same = [rows[name] == left[name] for name in (*KEYS, "second")]
    found = rows.join(left, [*same, within], "left_semi").dropDuplicates([*KEYS, "seq"])
    return found.groupBy(*KEYS).agg(
        _sum_ms(f.col("interval_ms")).alias("left_ms"),
        _sum_ms(_of(f.col("ours"), "interval_ms")).alias("left_server_ms"),
        f.sum("accepted_bytes").alias("left_bytes"),
    )


def _of_samples(told: dict[str, Column]) -> dict[str, Column]:
    """Return the columns that samples tell, and those that they tell where the close does not; see `_sample_sums`."""
    any_ = f.col("s_rows").isNotNull()
    found = {
        "samples_count": f.col("s_rows"),
        "sampled_ms": f.col("s_ms"),
        "accepted_bytes": f.col("s_accepted_bytes"),
        "delay_max_ms": f.coalesce("s_delay_max", told["delay_max_ms"]),
        "delay_mean_ms": f.col("s_delay_mean"),
        "stall_count": f.col("s_stall_count"),
        "stall_ms": f.when(any_, f.coalesce("s_stall_ms", f.lit(0.0))),
        "trouble_ms": f.when(any_, f.coalesce("s_trouble_ms", f.lit(0.0))),
        "line_bytes": f.col("s_line"),
        "line_stream_bytes": f.col("s_line_stream"),
        "unforced_drops": f.when(any_, f.coalesce("s_unforced", f.lit(0))),
        "lost_messages": f.coalesce(told["lost_messages"], _sum_of(f.col(f"s_dropped_{name}") for name in _NEEDED)),
        **{name: f.col(name) for name in ("left_ms", "left_bytes")},
        "left_server_ms": f.when(f.col("left_ms").isNotNull(), f.coalesce("left_server_ms", f.lit(0.0))),
    }
    for index, (name, _) in enumerate(_SHARES):
        found[f"delay_{name}_ms"] = f.coalesce(f.get("s_delays", f.lit(index)), told[f"delay_{name}_ms"])
    for what in _FLOWS:
        for name in CLASS_NAMES:
            column = f"{what}_messages_{name}"
            found[column] = f.coalesce(told[column], f.col(f"s_{what}_{name}"))
    return found


def _detail_ddl() -> str:
    """Return the form of `detail` of a close, as `from_json` reads it."""
    counts = "struct<" + ", ".join(f"{name}: bigint" for name in CLASS_NAMES) + ">"
    reasons = ", ".join(f"`{reason}`: {counts}" for reason in RECORDED_DROPS)
    states = ", ".join(f"{state}: double" for state in _STATES)
    return (
        f"accepted {counts}, sent {counts}, dropped struct<{reasons}>, states_ms struct<{states}>, connected_s double, "
        "agent string, `limit` string, code string, edges_missed bigint, trouble_s double, trouble_sent_bytes bigint"
    )
