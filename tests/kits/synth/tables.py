"""Synthetic `flow_closes`, `flow_opens`, `flow_events` and `flow_samples`: all columns of a row come from one clock.

Everything that grows is a function of the time since the connection was opened (`clocks`), so that closes, opens and
samples add up to the last message. Messages of a class have one size in a stream. What no job reads is null.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.reasons import CloseReason
from flowctl.records.telemetry.schema import (
    CLASS_NAMES,
    FLOW_CLOSES,
    FLOW_EVENTS,
    FLOW_SAMPLES,
    OPENS_EVERY_S,
    OPENS_FIRST_S,
    SPARK_TYPES,
    EventName,
)
from synth.people import SynthOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from flowctl.records.telemetry.schema import Table

PER_S: Final = {"key": 0.5, "inter": 29.5, "audio": 43.0}
"""Messages of a stream per second."""
SIZES: Final = {"key": 12.0, "inter": 1.0, "audio": 0.1}
"""Size of a message by class, relative to an inter frame."""
KEY_US: Final = 2_000_000
"""Distance of key frames."""
TARGET_MS: Final = 2000.0
DELAYS_MS: Final = (0.0, 900.0, 3500.0)
"""Delay by queueing while READY, OVERLOADED, and worse."""
LIMITS: Final = {"messages": None, "bytes": "4194304 8388608", "age": "2s 8s"}
"""Limits in force at all servers."""


def clocks(frame: DataFrame, at: str, name: str) -> DataFrame:
    """Add how a connection stands at a time of it."""
    col, zero = f.col, f.lit(0)
    since = f.greatest(zero, col(at) - col("lead_us"))
    done = f.when(col("slice_us") > 0, f.floor(since / col("slice_us"))).otherwise(0)
    done = f.least(done, (col("episodes") - col("cut").cast("int")).cast("bigint"))
    frame = frame.withColumn(f"{name}_episodes", f.greatest(zero, done))
    frame = frame.withColumn(f"{name}_rest", since - col(f"{name}_episodes") * col("slice_us"))

    def spent(begin: Column, length: Column) -> Column:
        """Return the time spent in the piece of all slices that begins at `begin` and is `length` long."""
        return col(f"{name}_episodes") * length + f.least(f.greatest(zero, col(f"{name}_rest") - begin), length)

    trouble = col("slice_us") - col("leave_us")
    hard = f.greatest(zero, col(at) - col("duration_us") + col("hard_us"))
    soft = spent(col("leave_us") + col("over_us"), col("soft_us"))
    media = f.greatest(zero, col(at) - col("startup_us"))
    found = {
        "over": spent(col("leave_us"), col("over_us")),
        "hard": hard,
        "soft": f.greatest(zero, soft - hard),
        "whole": f.when(col("startup_us").isNotNull(), media).otherwise(0).cast("bigint"),
        "lost": (spent(col("leave_us"), trouble) * col("loss")).cast("bigint"),
    }
    return frame.withColumns({f"{name}_{clock}": value for clock, value in found.items()})


def messages(name: str, what: str, *items: str) -> Column:
    """Return the messages of some classes that were accepted, sent or dropped by that clock: a whole number."""
    found = f.lit(0)
    for item in [item for item in items if item in PER_S]:
        lost = f.when((f.col("loss") == 1) | (item == "inter"), f.col(f"{name}_lost")).otherwise(0)
        rate = PER_S[item] / 1e6
        gone, kept = f.floor(lost * rate), f.floor((f.col(f"{name}_whole") - lost) * rate)
        found += {"accepted": gone + kept, "sent": kept, "dropped": gone}[what]
    return f.when(f.col("role") == "play", found).otherwise(0).cast("bigint")


def size_of(item: str) -> Column:
    return (f.col("message_bytes") * SIZES.get(item, 0.0)).cast("bigint")


def octets(name: str, what: str) -> Column:
    return sum((messages(name, what, item) * size_of(item) for item in PER_S), f.lit(0))


def rate_per_us() -> Column:
    return sum((size_of(item) * (PER_S[item] / 1e6) for item in PER_S), f.lit(0.0))


def delay_ms(state: int) -> Column:
    """Return how far behind a viewer is: READY (0), OVERLOADED (1), or worse (2)."""
    return f.lit(DELAYS_MS[state]) * (0.5 + f.col("luck")) + f.col("far") * 30


def event_at(step: Column) -> Column:
    begin = f.col("lead_us") + step["episode"] * f.col("slice_us")
    leave, back = begin + f.col("leave_us"), begin + f.col("slice_us")
    places = {
        "leaves": leave,
        "softens": leave + f.col("over_us"),
        "drops": back - 1000,
        "returns": back,
        "hardens": f.col("duration_us") - f.col("hard_us"),
        "hits": f.floor(f.col("duration_us") / 2),
    }
    return f.coalesce(*(f.when(step["place"] == name, at) for name, at in places.items()))


def closes(frame: DataFrame, options: SynthOptions) -> DataFrame:
    ended = frame.where(~f.col("refused")).withColumns({"at_us": f.col("duration_us"), "seq": f.col("number")})
    return _rows(ended, options)


def opens(frame: DataFrame, options: SynthOptions) -> DataFrame:
    first, every = f.col("startup_us") + int(OPENS_FIRST_S * 1e6), int(OPENS_EVERY_S * 1e6)
    there = frame.where((first < f.col("duration_us")) & ~f.col("refused"))
    there = there.withColumn(
        "row", f.explode(f.sequence(f.lit(0), f.floor((f.col("duration_us") - 1 - first) / every)))
    )
    numbers = {"at_us": first + f.col("row") * every, "seq": f.shiftleft("number", 14) + f.col("row")}
    return _rows(there.withColumns(numbers | {"end": f.lit(None).cast("string")}), options)


def events(frame: DataFrame) -> DataFrame:
    """Return `flow_events` of connections that play, publish or hit a limit; a script has fewer than 64."""
    col, step = f.col, f.col("step")
    frame = frame.where(col("startup_us").isNotNull() | (f.size("limits") > 0))
    frame = frame.select("*", f.posexplode("script").alias("row", "step")).withColumns(
        {
            "seq": f.shiftleft("number", 6) + col("row"),
            "at_us": f.when(col("refused"), 0).otherwise(event_at(step)).cast("bigint"),
            "conn_id": f.when(col("refused"), 0).otherwise(col("conn_id")),
        }
    )
    hits = step["place"] == "hits"
    columns = {
        "event": f.when(col("refused"), EventName.CONN_REFUSED.value).otherwise(step["event"]),
        **{name: step[name] for name in ("state_from", "state_to", "cause")},
        "axis": f.when(hits, col("hit.axis")).otherwise(step["axis"]),
        **{name: f.when(hits, col("hit")[name]) for name in ("value", "limit")},
        "reason": f.when(col("refused"), col("hit.axis")),
        "count": 1,
    }
    return table_rows(frame, FLOW_EVENTS, identity() | columns)


def server_events(spark: SparkSession, options: SynthOptions) -> DataFrame:
    """Return what servers say of themselves: their start."""
    rows = [(f"node-{number + 1}", options.start_s - 60, -1 - number) for number in range(options.nodes)]
    columns = {
        "ts": f.timestamp_seconds("at_s"),
        **{name: f.col(name) for name in ("node", "seq")},
        "conn_id": 0,
        "event": EventName.SERVER_STARTED.value,
        "detail": json.dumps({"limits": LIMITS, "policy": "thin", "made_by": "flowctl analyze synth"}),
        "count": 1,
    }
    return table_rows(spark.createDataFrame(rows, "node string, at_s bigint, seq bigint"), FLOW_EVENTS, columns)


def samples(frame: DataFrame, options: SynthOptions) -> DataFrame:
    """Return `flow_samples` of connections that play, one per interval and a shorter one at the end."""
    col, every = f.col, options.interval_us
    frame = frame.where((col("role") == "play") & col("startup_us").isNotNull())
    frame = frame.withColumn("row", f.explode(f.sequence(f.lit(1), f.ceil(col("duration_us") / every)))).withColumns(
        {
            "at_us": f.least(col("duration_us"), col("row") * every),
            "then_us": (col("row") - 1) * every,
            "seq": f.shiftleft("number", 22) + col("row"),
        }
    )
    frame = clocks(clocks(frame, "at_us", "now"), "then_us", "then")
    over, soft, hard, lost, whole = (
        col(f"now_{it}") - col(f"then_{it}") for it in ("over", "soft", "hard", "lost", "whole")
    )
    rest, span_us = col("now_rest"), col("at_us") - col("then_us")
    is_soft = (col("soft_us") > 0) & (rest > col("leave_us") + col("over_us"))
    state = f.when(col("now_hard") > 0, "HARD_LIMIT").when(is_soft, "SOFT_LIMIT")
    # A viewer is as late as it was at worst in the interval.
    waits = f.when(soft + hard > 0, delay_ms(2)).when(over > 0, delay_ms(1)).otherwise(0.0)
    columns = {
        "interval_ms": span_us / 1000,
        "state": state.when(rest > col("leave_us"), "OVERLOADED").otherwise("READY"),
        "picture_share": 1 - lost / f.greatest(f.lit(1), whole),
        "queued_bytes": waits * 1000 * rate_per_us(),
        "queued_age_ms": waits,
        "thread_busy": 0.2 + 0.1 * col("luck"),
        "viewer_delay_ms": f.when(waits > 0, waits).otherwise(delay_ms(0)),
        "sent_bytes": octets("now", "sent") - octets("then", "sent"),
    }
    for what in ("accepted", "sent", "dropped"):
        for item in CLASS_NAMES:
            count = messages("now", what, item) - messages("then", what, item)
            columns |= {f"{what}_messages_{item}": count, f"{what}_bytes_{item}": count * size_of(item)}
    return table_rows(frame, FLOW_SAMPLES, identity() | columns)


def table_rows(frame: DataFrame, table: Table, columns: Mapping[str, Any]) -> DataFrame:
    """Return the columns of a table and the folder of each row; those that are not given are null."""
    frame = frame.select(
        *(f.lit(columns.get(column.name)).cast(SPARK_TYPES[column.kind]).alias(column.name) for column in table.columns)
    )
    return frame.withColumns({"date": f.to_date("ts"), "hour": f.date_format("ts", "HH")})


def identity() -> dict[str, Column]:
    unknown = f.col("role") == "unknown"
    return {
        "ts": f.timestamp_micros(f.col("opened_us") + f.col("at_us")),
        **{name: f.col(name) for name in ("node", "seq", "conn_id", "peer_ip", "peer_port", "role")},
        "app": f.when(~unknown, "live"),
        "stream": f.when(~unknown, f.col("stream")),
    }


def _rows(frame: DataFrame, options: SynthOptions) -> DataFrame:
    """Return rows of connections as they are at `at_us`."""
    col = f.col
    frame = clocks(frame, "at_us", "now")
    at_once = (col("now_hard") > 0) & (col("episodes") == 0)
    gone = f.when(col("now_rest") > col("leave_us"), col("now_rest") - col("leave_us"))
    frame = frame.withColumns(
        {
            "at_once": at_once,
            "gone_us": f.when(at_once, col("now_hard")).otherwise(gone),
        }
    )
    watched = (col("role") == "play") & col("startup_us").isNotNull()
    sampled = {name: f.when(watched, value) for name, value in _sampled().items()}
    number = f.ceil(col("at_us") / options.interval_us) if options.samples_s else f.lit(None)
    sampled["samples_count"] = f.when(watched, number).otherwise(0 if options.samples_s else None)
    published = (col("role") == "publish") & (col("startup_us") <= col("at_us"))
    ingest = {name: f.when(published, value) for name, value in _ingest().items()}
    return table_rows(frame, FLOW_CLOSES, identity() | _known() | _sent() | sampled | ingest)


def _known() -> dict[str, Any]:
    """Return what is known of a connection without its media; a handshake may not have come so far."""
    col = f.col
    reasons = CloseReason.HANDSHAKE_TIMEOUT, CloseReason.PROTOCOL_ERROR, CloseReason.AUTH_REFUSED, CloseReason.LIMIT_HIT
    timeout, error, refused, hit = (f.coalesce(col("end") == reason.value, f.lit(False)) for reason in reasons)

    def if_reached(ms: Column) -> Column:
        return f.when((ms * 1000 < col("at_us")) & ~(timeout | error), ms)

    happened = f.size(f.filter("script", lambda step: event_at(step) <= col("at_us")))
    return {
        "agent": f.when(col("role") == "publish", "FMLE/3.0").when(col("role") == "play", "LNX 9,0,124,2"),
        "opened_at": f.timestamp_micros("opened_us"),
        "duration_s": col("at_us") / 1e6,
        "reason": col("end"),
        "code": f.when(error, "not-rtmp"),
        "limit_name": f.when(hit, col("hit.axis")),
        "refusal": f.when(refused, "key"),
        "handshake_ms": if_reached(col("far") * 24),
        "asked_ms": f.when((col("role") != "unknown") | refused, if_reached(col("far") * 48)),
        "startup_ms": f.when(col("startup_us") <= col("at_us"), col("startup_us") / 1000),
        "limit_hits": (f.size("limits") > 0).cast("bigint"),
        "events_count": f.when(col("startup_us").isNotNull() | (f.size("limits") > 0), happened).otherwise(0),
    }


def _sent() -> dict[str, Any]:
    col = f.col
    times = {"overloaded": col("now_over"), "soft": col("now_soft"), "hard": col("now_hard")}
    back, whole_ms = col("now_episodes"), (col("over_us") + col("soft_us")) / 1000
    left, softened = (
        (col("now_rest") > begin).cast("int") for begin in (col("leave_us"), col("leave_us") + col("over_us"))
    )
    lost, kinds = messages("now", "dropped", *PER_S), ("accepted", "sent", "dropped")
    taken = col("gone_us") * rate_per_us() * (1 - col("loss"))
    zeros = [name for name in FLOW_CLOSES.names if name.startswith("dropped_by_")]
    zeros += ["late_episodes", "returns", "input_pauses", "input_paused_ms", "edges_missed"]
    return {
        **dict.fromkeys(zeros, 0),
        "time_ready_ms": (col("at_us") - sum(times.values(), f.lit(0))) / 1000,
        **{f"time_{name}_ms": value / 1000 for name, value in times.items()},
        "episodes_overloaded": f.when(col("over_us") > 0, back + left).otherwise(0),
        "episodes_soft": f.when(col("soft_us") > 0, back + softened).otherwise(0),
        "episodes_hard": (col("now_hard") > 0).cast("bigint"),
        "hard_at_once": col("at_once").cast("bigint"),
        "recoveries": back,
        "recover_ms": back * whole_ms,
        "recover_max_ms": f.when(back > 0, whole_ms).otherwise(0),
        **{f"{what}_messages_{item}": messages("now", what, item) for what in kinds for item in CLASS_NAMES},
        **{f"{what}_bytes": octets("now", what) for what in kinds},
        "dropped_by_thinned": lost,
        "pictures_wanted": messages("now", "accepted", "key", "inter"),
        "pictures_sent": messages("now", "sent", "key", "inter"),
        "lost_messages": lost,
        "window_bytes": f.when(col("lost") | ~col("stalls"), 65_536).otherwise(0),
        "retransmits": f.when(col("lost"), 5).otherwise(0),
        "probes": f.lit(0),
        "unrecovered_ms": col("gone_us") / 1000,
        "unrecovered_bytes": f.when(col("gone_us").isNotNull(), f.least(octets("now", "sent"), taken)),
    }


def _sampled() -> dict[str, Any]:
    col = f.col
    whole, over, soft = col("at_us"), col("now_over"), col("now_soft") + col("now_hard")
    ready = whole - over - soft
    delays = [(delay_ms(state), time) for state, time in enumerate((ready, over, soft))]
    stalled = f.when(col("stalls"), col("now_soft")).otherwise(0)
    stream = octets("now", "accepted") * (over + soft) / f.greatest(f.lit(1), col("now_whole"))
    lined = f.when(over + soft > 0, stream)

    def delay_at(of: Column) -> Column:
        """Return the delay of that time, the least first."""
        return f.when(of <= ready, delay_ms(0)).when(of <= whole - soft, delay_ms(1)).otherwise(delay_ms(2))

    return {
        "sampled_ms": whole / 1000,
        **{f"delay_p{share}_ms": delay_at(whole * (share / 100)) for share in (50, 95, 99)},
        "delay_max_ms": delay_at(whole),
        "target_delay_ms": f.lit(TARGET_MS),
        "late_ms": sum((f.when(delay > TARGET_MS, time).otherwise(0) for delay, time in delays), f.lit(0)) / 1000,
        "stall_count": f.coalesce(f.ceil(f.try_divide(stalled, col("soft_us"))), f.lit(0)),
        "stall_ms": stalled / 1000,
        "trouble_ms": (over + soft) / 1000,
        "lag_ms": (over + soft) / 1000,
        "lag_server_ms": 0,
        "lag_burst_ms": 0,
        "unforced_drops": f.lit(0),
        "line_stream_bytes": lined,
        "line_bytes": f.when(lined > 0, f.greatest(f.lit(0), lined - octets("now", "dropped"))),
    }


def _ingest() -> dict[str, Any]:
    live_us = f.greatest(f.lit(0), f.col("at_us") - f.col("startup_us"))
    audio, keys = f.floor(live_us * 43 / 1e6), f.floor(live_us / KEY_US) + 1
    inter = f.greatest(f.lit(0), f.floor(live_us * 30 / 1e6) - keys)
    return {
        "ingest_bytes": keys * size_of("key") + inter * size_of("inter") + audio * size_of("audio"),
        "ingest_pictures": keys + inter,
        "ingest_key_frames": keys,
        "ingest_audio": audio,
        "key_interval_ms": f.when(keys > 1, KEY_US / 1000),
        "key_interval_max_ms": f.when(keys > 1, KEY_US / 1000 * 1.02),
        **dict.fromkeys(("gap_count", "gap_ms", "gap_max_ms"), 0),
        "jitter_ms": 3,
    }
