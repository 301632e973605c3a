"""Makes of old records (formats 1 and 2) what servers write today: closes, connections that are open, and fewer events.

Old servers wrote what a connection was as events: opened, handshake, commands, changes of state, closed. Here they are
added up per connection, over all hours that are read together, into one row with the columns of `flow_closes`, counted
in the hour of its end; or of `flow_opens`, in the hour of its last event, where there is no end. Samples of those days
add delay, stalls and trouble. What else a close tells today is null.

What hours that are read one by one cannot know of a connection that lasted longer: what its events in the hours before
told. Its close has the totals by class and reason, the times in states, its whole duration and what it sent, so these
are right anyway; how often it changed its state, paused and hit limits, and what samples saw, is then that of its last
hour. A first run over old records reads all hours together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.analyze.records.checks import MOST_COUNT, MOST_REAL, MOST_S
from flowctl.analyze.records.expressions import added, not_negative, zero
from flowctl.core.flow.state import SendState
from flowctl.reasons import RECORDED_DROPS, DropReason
from flowctl.records.telemetry.schema import (
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

SAMPLES_DDL: Final = "step string, "
"""Column of samples of format 1 beside those of today: the step of a ladder on which a viewer was."""
KEYS: Final = ("node", "conn_id")
STALL_MS: Final = 500.0
"""A peer that takes nothing for so long while something waits shows a still picture: players buffer about a second."""
ACCURACY: Final = 1000
"""Of `approx_percentile`: a quantile is off by 0.1 % of the samples at most."""
_STATES: Final = tuple(state.name for state in SendState)
_WORSE: Final = tuple(enumerate(STATE_NAMES))[1:]
_PICTURES: Final = ("key", "inter", "disposable")
_NEEDED: Final = ("key", "inter", "audio")
_REFUSED: Final = DropReason.REFUSED.value
_NO_LOSS: Final = (DropReason.CLOSED.value, DropReason.UNFOLLOWED.value, DropReason.REQUESTED.value, _REFUSED)
_LOSSES: Final = tuple(reason for reason in RECORDED_DROPS if reason not in _NO_LOSS)
_NAMED: Final = ("peer_ip", "peer_port", "role", "app", "stream")
_SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_SAMPLED: Final = (
    *("samples_count", "sampled_ms", "trouble_ms", "accepted_bytes", "stall_ms", "stall_count", "delay_mean_ms"),
)
_SUMS: Final = (
    *("handshake_ms", "hard_at_once", "recoveries", "late_episodes", "returns", "input_pauses", "limit_hits"),
    *("events_count", "sent_bytes", "rtt_us", *(f"episodes_{name}" for _, name in _WORSE)),
)
"""Columns of a close that `_event_sums` has as they are."""


def events(old: DataFrame) -> DataFrame:
    """Return those events that servers write today, in today's columns."""
    count = f.get_json_object(_of(_is(EventName.CONN_REFUSED), "detail"), "$.count").try_cast("bigint")
    count = f.coalesce("count", _within(count, MOST_COUNT))
    frame = old.filter(f.col("event").isin(*sorted(RECORDED))).withColumn("count", count)
    return frame.select(*FLOW_EVENTS.names, "date", "hour")


def connections(old: DataFrame, samples: DataFrame | None, *, ended: bool) -> DataFrame:
    """Return one row per connection, the columns of `flow_closes`, `date` and `hour`."""
    told = old.filter(f.col("conn_id") != 0)
    frame = _event_sums(told).filter(f.col("close").isNotNull() if ended else f.col("close").isNull())
    columns = _of_events()
    if samples is not None:
        frame = frame.join(_sample_sums(samples.filter(f.col("conn_id") != 0)), list(KEYS), "left")
        columns |= _of_samples(columns)
    frame = frame.withColumn("told", f.from_json("close.detail", _detail_ddl()))
    kinds = {column.name: SPARK_TYPES[column.kind] for column in FLOW_CLOSES.columns}
    found = (columns.get(name, f.lit(None)).cast(kind).alias(name) for name, kind in kinds.items())
    return frame.select(*found, "end.date", "end.hour")


def _is(*names: EventName) -> Column:
    return f.col("event").isin(*(name.value for name in names))


def _of(condition: Column, value: str) -> Column:
    return f.when(condition, f.col(value))


def _sum_ms(value: Column | str) -> Column:
    """Add up milliseconds as whole microseconds: a sum of floats depends on the order in which tasks bring them."""
    return f.sum(f.round((f.col(value) if isinstance(value, str) else value) * 1e3).cast("bigint")) / 1e3


def _ms(begin: Column | str, end: Column | str) -> Column:
    """Return what lies between two moments, 0 where the clock was set back meanwhile."""
    return not_negative((f.unix_micros(end) - f.unix_micros(begin)) / 1e3)


def _within(value: Column, most: float) -> Column:
    """Return a number out of a `detail`, which nothing has checked; null where it cannot be right."""
    return f.when(value.between(0, most), value)


def _told(name: str, most: float = MOST_COUNT) -> Column:
    return _within(f.col(f"told.{name}"), most)


def _delays(prefix: str) -> list[Column]:
    """Return quantiles and largest of the delay, over events (of those in trouble) or samples."""
    quantiles = f.percentile_approx("viewer_delay_ms", list(_SHARES.values()), ACCURACY)
    return [quantiles.alias(f"{prefix}_delays"), f.max("viewer_delay_ms").alias(f"{prefix}_delay_max")]


def _event_sums(told: DataFrame) -> DataFrame:
    edge, close = _is(EventName.STATE_CHANGED), _is(EventName.CONN_CLOSED)
    ranks = f.array(*map(f.lit, _STATES))
    old, new = (f.array_position(ranks, _of(edge, name)) - 1 for name in ("state_from", "state_to"))
    began = _is(EventName.PLAY_STARTED, EventName.PUBLISH_STARTED)
    asks = (_is(EventName.COMMAND) & f.col("reason").isin("play", "publish")) | began
    naming = _is(EventName.CONN_OPENED, EventName.COMMAND, EventName.BANNED) | began | close
    # A close tells most, then what names a stream; a command only if it does.
    rank = f.when(close, 3).when(began | f.col("stream").isNotNull(), 2).otherwise(1)
    sums = {
        "last_seq": f.max("seq"),
        "opened_ts": f.min(_of(_is(EventName.CONN_OPENED), "ts")),
        "first_ts": f.min("ts"),
        "end": f.max_by(f.struct("ts", "date", "hour"), f.struct(close, "ts", "seq")),
        "named": f.max_by(f.struct(*_NAMED), f.when(naming, f.struct(rank, "seq"))),
        "close": f.max_by(f.struct("reason", "detail", "dropped_bytes", "axis"), _of(close, "seq")),
        "handshake_ms": f.max(_of(_is(EventName.HANDSHAKE_DONE), "value")),
        "asked_ts": f.min(_of(asks, "ts")),
        "began_ts": f.min(_of(began, "ts")),
        "startup_ms": f.min(_of(began, "value")),
        **{f"seen_{name}_ms": _sum_ms(_of(old == number, "state_ms")) for number, name in enumerate(STATE_NAMES)},
        **{f"episodes_{name}": f.count_if((new == number) & (old < number)) for number, name in _WORSE},
        "hard_at_once": f.count_if((old == 0) & (new == 3)),
        "recoveries": f.count_if(new == 0),
        "recover_ms": zero(_sum_ms(_of(new == 0, "value"))),
        "recover_max_ms": zero(f.max(_of(new == 0, "value"))),
        "last_edge": f.max(f.when(edge, f.struct("ts", new.alias("rank")))),
        "left_ts": f.max(_of(old == 0, "ts")),
        "left_sent": f.max(_of(old == 0, "sent_bytes")),
        "late_episodes": f.count_if(_is(EventName.PICTURES_LATE)),
        "returns": f.count_if(_is(EventName.RETURNED)),
        "input_pauses": f.count_if(_is(EventName.INPUT_PAUSED)),
        "input_paused_ms": zero(_sum_ms(_of(_is(EventName.INPUT_RESUMED), "value"))),
        "limit_hits": f.count_if(_is(EventName.LIMIT_HIT)),
        "events_count": f.count_if(f.col("event").isin(*sorted(RECORDED))),
        "sent_bytes": f.max("sent_bytes"),
        "seen_dropped_bytes": f.sum(_of(_is(EventName.DROPPED), "dropped_bytes")),
        "rtt_us": f.max_by("rtt_us", _of(f.col("rtt_us").isNotNull(), "seq")),
    }
    return told.groupBy(*KEYS).agg(*(value.alias(name) for name, value in sums.items()), *_delays("e"))


def _of_events() -> dict[str, Column]:
    """Return the columns that events tell, over `_event_sums` and the parsed detail of the close (``told``)."""
    end, last, lasted_s = f.col("end.ts"), f.col("last_edge.rank"), _told("connected_s", MOST_S)
    whole = f.col("told.dropped").isNotNull()
    # Of one that was opened in an hour that is not read, its close tells when.
    opened = f.coalesce("opened_ts", f.timestamp_micros(f.unix_micros(end) - (lasted_s * 1e6).cast("bigint")))
    there_ms = _ms(f.coalesce(opened, "first_ts"), end)
    # What a viewer has muted is refused by the same reason: sound, or pictures with their key frames, of nobody else.
    mutes_pictures = _of_reason(_REFUSED, ("key",)) > 0
    thinned = f.when(~mutes_pictures, _of_reason(_REFUSED, ("inter",))).otherwise(0)
    sent_since = f.when(last > 0, f.col("sent_bytes") - f.col("left_sent"))
    found: dict[str, Column] = {
        **{name: f.col(name) for name in (*KEYS, *_SUMS, "recover_ms", "recover_max_ms", "input_paused_ms")},
        **{name: f.col(f"named.{name}") for name in _NAMED},
        "ts": end,
        "seq": f.col("last_seq"),
        "agent": f.col("told.agent"),
        "opened_at": f.coalesce(opened, "first_ts"),
        # Of the monotonic clock, where it is told: that on the wall can be set back meanwhile.
        "duration_s": f.coalesce(lasted_s, there_ms / 1e3),
        "reason": f.col("close.reason"),
        "code": f.col("told.code"),
        "limit_name": f.coalesce("told.limit", "close.axis"),
        "asked_ms": _ms(opened, "asked_ts"),
        "startup_ms": f.coalesce("startup_ms", _ms(opened, "began_ts")),
        "edges_missed": zero(_told("edges_missed")),
        "dropped_bytes": f.coalesce("close.dropped_bytes", "seen_dropped_bytes", f.lit(0)),
        "lost_messages": f.when(whole, thinned + added(_of_reason(reason, _NEEDED) for reason in _LOSSES)),
        "unrecovered_ms": f.coalesce(_told("trouble_s", MOST_S) * 1e3, f.when(last > 0, _ms("left_ts", end))),
        "unrecovered_bytes": f.coalesce(_told("trouble_sent_bytes"), sent_since),
        "delay_max_ms": f.col("e_delay_max"),
        **{f"delay_{name}_ms": f.get("e_delays", f.lit(index)) for index, name in enumerate(_SHARES)},
        **{
            f"dropped_by_{item.name.lower()}": f.when(whole, _of_reason(item.value, CLASS_NAMES)) for item in DropReason
        },
    }
    rest_ms = f.coalesce(_ms("last_edge.ts", end), there_ms)
    for number, name in enumerate(STATE_NAMES):
        seen = zero(f"seen_{name}_ms") + f.when(zero(last) == number, rest_ms).otherwise(0.0)
        said = zero(_told(f"states_ms.{_STATES[number]}", MOST_REAL))
        found[f"time_{name}_ms"] = f.when(f.col("told.states_ms").isNotNull(), said).otherwise(seen)
    for name in CLASS_NAMES:
        accepted = f.when(f.col("told.accepted").isNotNull(), zero(_told(f"accepted.{name}")))
        dropped = f.when(whole, added(_of_reason(reason, (name,)) for reason in RECORDED_DROPS))
        found |= {f"accepted_messages_{name}": accepted, f"dropped_messages_{name}": dropped}
        found[f"sent_messages_{name}"] = f.coalesce(_told(f"sent.{name}"), not_negative(accepted - dropped))
    muted = f.when(mutes_pictures, _of_reason(_REFUSED, _PICTURES)).otherwise(0)
    not_missed = sum((_of_reason(reason, _PICTURES) for reason in _NO_LOSS[:2]), muted)
    found["pictures_wanted"] = sum((found[f"accepted_messages_{name}"] for name in _PICTURES), -not_missed)
    found["pictures_sent"] = sum((found[f"sent_messages_{name}"] for name in _PICTURES), f.lit(0))
    return found


def _of_reason(reason: str, names: Iterable[str]) -> Column:
    return added(_told(f"dropped.`{reason}`.{name}") for name in names)


def _sample_sums(samples: DataFrame) -> DataFrame:
    whole = f.coalesce("picture_share", f.lit(1.0)) < 1
    trouble = (f.col("state") != "READY") | whole | (f.coalesce("step", f.lit("FULL")) != "FULL")
    still = f.col("stalled_ms") >= STALL_MS
    sums = {
        "samples_count": f.count("*"),
        "sampled_ms": _sum_ms("interval_ms"),
        "trouble_ms": zero(_sum_ms(_of(trouble, "interval_ms"))),
        "accepted_bytes": f.sum(sum((f.col(f"accepted_bytes_{name}") for name in CLASS_NAMES), f.lit(0))),
        "stall_ms": zero(_sum_ms(f.when(still, f.least("stalled_ms", "interval_ms")))),
        # A stall passes the mark in exactly one of the samples that see it.
        "stall_count": f.count_if(still & (f.col("stalled_ms") < f.col("interval_ms") + STALL_MS)),
        "delay_mean_ms": f.sum(f.col("viewer_delay_ms") * f.col("interval_ms")) / f.sum("interval_ms"),
    }
    return samples.groupBy(*KEYS).agg(*(value.alias(name) for name, value in sums.items()), *_delays("s"))


def _of_samples(told: dict[str, Column]) -> dict[str, Column]:
    """Return the columns that samples tell, and those that they tell better than events, over `_sample_sums`."""
    found = {name: f.col(name) for name in _SAMPLED} | {"delay_max_ms": f.coalesce("s_delay_max", told["delay_max_ms"])}
    for index, name in enumerate(f"delay_{name}_ms" for name in _SHARES):
        found[name] = f.coalesce(f.get("s_delays", f.lit(index)), told[name])
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
