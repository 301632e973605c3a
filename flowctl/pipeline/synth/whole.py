"""Synthetic `flow_closes` and `flow_opens`: one row of what a connection was, or is by now, all columns from one clock.

Everything that grows is a function of the time since the connection was opened (`clocks`): so a row at its end, a row
of it open, and what happened between two samples come from the same arithmetic and add up to the last message.
What is published runs on the media clock, which a burst hurries; of it the part that is lost in trouble is dropped.
Messages of a class have one size in a stream, so that octets follow from counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.pipeline.synth.people import SURGE_US, SynthOptions
from flowctl.pipeline.synth.worlds import HARDENS, HITS
from flowctl.reasons import CloseReason
from flowctl.telemetry.schema import CLASS_NAMES, FLOW_CLOSES, OPENS_EVERY_S, OPENS_FIRST_S, SPARK_TYPES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from flowctl.telemetry.schema import Table

PER_S: Final = {"key": 0.5, "inter": 29.5, "audio": 43.0}
"""Messages of a stream per second."""
SIZES: Final = {"key": 12.0, "inter": 1.0, "audio": 0.1}
"""Of a message, in those of an inter frame."""
TARGET_MS: Final = 2000.0
DELAYS_MS: Final = (0.0, 900.0, 3500.0)
"""Behind live by queueing while READY, OVERLOADED, and worse."""


def clocks(frame: DataFrame, at: str, name: str) -> DataFrame:
    """Add how a connection stands at a time of it.

    Args:
        frame: see `connections`.
        at: column with the time since it was opened, us.
        name: begin of the columns' names.

    Returns:
        The same with ``<name>_episodes`` (over), ``_rest`` (into the next), ``_over``, ``_soft``, ``_hard`` (time in
        these states), ``_whole`` and ``_lost`` (media published for it, and the part that was dropped), ``_stalled``.
    """
    col, zero = f.col, f.lit(0)
    since = f.greatest(zero, col(at) - col("lead_us"))
    done = f.when(col("slice_us") > 0, f.floor(since / col("slice_us"))).otherwise(0)
    frame = frame.withColumn(f"{name}_episodes", f.least(done, col("episodes").cast("bigint")))
    frame = frame.withColumn(f"{name}_rest", since - col(f"{name}_episodes") * col("slice_us"))
    hard = f.greatest(zero, col(at) - col("duration_us") + col("hard_us"))
    soft = spent(name, col("leave_us") + col("over_us"), col("soft_us"))
    frame = frame.withColumns(
        {
            f"{name}_over": spent(name, col("leave_us"), col("over_us")),
            f"{name}_hard": hard,
            f"{name}_soft": f.when(col("soft_us") > 0, soft - hard).otherwise(0),
        }
    )
    trouble = col(f"{name}_over") + col(f"{name}_soft") + f.when(col("soft_us") > 0, hard).otherwise(0)
    media = f.when(col("startup_us").isNotNull(), f.greatest(zero, col(at) - col("startup_us"))).otherwise(0)
    surge = (col("burst") - 1) * spent(name, col("leave_us") - SURGE_US, col("slice_us") - col("leave_us") + SURGE_US)
    return frame.withColumns(
        {
            f"{name}_whole": (media + f.when(col("slice_us") > 0, f.greatest(zero, surge)).otherwise(0)).cast("bigint"),
            f"{name}_lost": (trouble * col("loss") * f.when(col("deaf"), 1).otherwise(col("burst"))).cast("bigint"),
            f"{name}_stalled": f.when(col("stalls"), col(f"{name}_soft")).otherwise(0),
        }
    )


def spent(name: str, begin: Column, length: Column) -> Column:
    """Return the time spent in the piece of all slices that begins at `begin` and is `length` long."""
    return f.col(f"{name}_episodes") * length + f.least(f.greatest(f.lit(0), f.col(f"{name}_rest") - begin), length)


def messages(name: str, what: str, item: str) -> Column:
    """Return the messages of class `item` that were accepted, sent or dropped by that clock: a whole number."""
    if item not in PER_S:
        return f.lit(0).cast("bigint")
    whole, lost = f.col(f"{name}_whole"), f.col(f"{name}_lost")
    lost = lost if item == "inter" else f.when(f.col("deaf"), lost).otherwise(0)
    rate = PER_S[item] / 1e6
    gone, kept = f.floor(lost * rate), f.floor((whole - lost) * rate)
    plays = f.col("role") == "play"
    return f.when(plays, {"accepted": gone + kept, "sent": kept, "dropped": gone}[what]).otherwise(0).cast("bigint")


def size_of(item: str) -> Column:
    """Return the octets of a message of that class."""
    return (f.col("message_bytes") * SIZES.get(item, 0.0)).cast("bigint")


def octets(name: str, what: str) -> Column:
    """Return the octets of all classes."""
    return sum((messages(name, what, item) * size_of(item) for item in PER_S), f.lit(0))


def closes(frame: DataFrame, options: SynthOptions) -> DataFrame:
    """Return `flow_closes` of connections (see `connections`), with ``date`` and ``hour``."""
    ended = frame.where(~f.col("refused")).withColumn("at_us", f.col("duration_us")).withColumn("seq", f.col("number"))
    return _whole(alive(ended, options), options, closing=True)


def opens(frame: DataFrame, options: SynthOptions) -> DataFrame:
    """Return `flow_opens` of the same."""
    first = f.col("startup_us") + int(OPENS_FIRST_S * 1e6)
    every = int(OPENS_EVERY_S * 1_000_000)
    there = frame.where((first < f.col("duration_us")) & ~f.col("refused"))
    number = f.explode(f.sequence(f.lit(0), f.floor((f.col("duration_us") - 1 - first) / every)))
    there = there.withColumn("opens", number).withColumn("at_us", first + f.col("opens") * every)
    there = there.withColumn("seq", f.shiftleft("number", 14) + f.col("opens"))
    return _whole(alive(there, options), options, closing=False)


def alive(frame: DataFrame, options: SynthOptions) -> DataFrame:
    """Leave out what a server that died did not live to tell; `at_us`: time of the row."""
    middle = options.middle_us
    return frame.where(~f.col("dies") | (f.col("opened_us") >= middle) | (f.col("opened_us") + f.col("at_us") < middle))


def wall(at: Column, options: SynthOptions) -> Column:
    """Return what the clock of the node shows at a time, both in us since the epoch."""
    return at + f.when(at >= options.middle_us, f.col("step_us")).otherwise(0)


def told(frame: DataFrame, table: Table, columns: dict[str, Column]) -> DataFrame:
    """Return the columns of a table and the folder of each row; those that are not given are null."""
    frame = frame.select(
        *(
            columns.get(column.name, f.lit(None)).cast(SPARK_TYPES[column.kind]).alias(column.name)
            for column in table.columns
        )
    )
    return frame.withColumns({"date": f.to_date("ts"), "hour": f.date_format("ts", "HH")})


def identity(at: Column, options: SynthOptions) -> dict[str, Column]:
    """Return who and when."""
    unknown = f.col("role") == "unknown"
    return {
        "ts": f.timestamp_micros(wall(f.col("opened_us") + at, options)),
        **{name: f.col(name) for name in ("node", "seq", "conn_id", "peer_ip", "peer_port", "role")},
        "app": f.when(~unknown, "live"),
        "stream": f.when(~unknown, f.col("stream")),
    }


def _whole(frame: DataFrame, options: SynthOptions, *, closing: bool) -> DataFrame:
    frame = _seen(clocks(frame, "at_us", "now"), options, closing=closing)
    reason = f.col("end") if closing else f.lit(None)
    columns = (
        identity(f.col("at_us"), options)
        | {
            "agent": f.when(f.col("role") == "publish", "FMLE/3.0").when(f.col("role") == "play", "LNX 9,0,124,2"),
            "opened_at": f.timestamp_micros(wall(f.col("opened_us"), options)),
            "duration_s": f.col("at_us") / 1e6,
            "reason": reason,
            "code": f.when(reason == CloseReason.PROTOCOL_ERROR.value, f.col("code")),
            "limit_name": f.when(reason == CloseReason.LIMIT_HIT.value, f.col("hit.axis")),
            "refusal": f.when(reason == CloseReason.AUTH_REFUSED.value, "key"),
            "handshake_ms": _reached(f.col("far") * 24, reason),
            "asked_ms": f.when(
                (f.col("role") != "unknown") | (f.col("end") == CloseReason.AUTH_REFUSED.value),
                _reached(f.col("far") * 48, reason),
            ),
            "startup_ms": f.when(f.col("startup_us") <= f.col("at_us"), f.col("startup_us") / 1000),
        }
        | _sender(closing=closing)
        | _sampled(options)
        | _ingest()
    )
    return told(frame, FLOW_CLOSES, columns)


def _reached(ms: Column, reason: Column) -> Column:
    """Return a time of the handshake; null where it did not come so far."""
    never = f.coalesce(reason == CloseReason.HANDSHAKE_TIMEOUT.value, f.lit(False)) | (f.col("code") == "not-rtmp")
    return f.when((ms * 1000 < f.col("at_us")) & ~f.coalesce(never, f.lit(False)), ms)


def _sender(*, closing: bool) -> dict[str, Column]:
    """Return what the books of a Sender have."""
    col = f.col
    times = {name: col(f"now_{clock}") for name, clock in (("overloaded", "over"), ("soft", "soft"), ("hard", "hard"))}
    back = col("recoveries")
    whole_ms = (col("over_us") + col("soft_us")) / 1000
    begun = col("now_episodes") + (col("now_rest") > col("leave_us")).cast("int")
    softened = col("now_episodes") + (col("now_rest") > col("leave_us") + col("over_us")).cast("int")
    at_once = ((col("now_hard") > 0) & (col("episodes") == 0)).cast("bigint")
    hit = (f.col("limits").isNotNull() & (f.size("limits") > 0)).cast("bigint") if closing else f.lit(0)
    rows = f.size(f.filter("script", lambda step: step["place"].isNotNull())) if closing else col("begun_rows")
    found = {
        **{f"time_{name}_ms": value / 1000 for name, value in times.items()},
        "time_ready_ms": (col("at_us") - sum(times.values(), f.lit(0))) / 1000,
        "episodes_overloaded": f.when(col("over_us") > 0, begun).otherwise(0),
        "episodes_soft": f.when(col("soft_us") > 0, softened).otherwise(0),
        "episodes_hard": (col("now_hard") > 0).cast("bigint"),
        "hard_at_once": at_once,
        "recoveries": back,
        "recover_ms": back * whole_ms,
        "recover_max_ms": f.when(back > 0, whole_ms).otherwise(0),
        **dict.fromkeys(("late_episodes", "returns", "input_pauses", "input_paused_ms", "edges_missed"), f.lit(0)),
        "limit_hits": hit,
        "events_count": f.when(col("startup_us").isNotNull() | (f.size("limits") > 0), rows).otherwise(0),
        **{
            f"{what}_messages_{item}": messages("now", what, item)
            for what in ("accepted", "sent", "dropped")
            for item in CLASS_NAMES
        },
        **{f"{what}_bytes": octets("now", what) for what in ("accepted", "sent", "dropped")},
        "pictures_wanted": sum((messages("now", "accepted", item) for item in ("key", "inter")), f.lit(0)),
        "pictures_sent": sum((messages("now", "sent", item) for item in ("key", "inter")), f.lit(0)),
        "lost_messages": sum((messages("now", "dropped", item) for item in PER_S), f.lit(0)),
    }
    reasons = [name for name in FLOW_CLOSES.names if name.startswith("dropped_by_")]
    found |= {name: found["lost_messages"] if name == "dropped_by_thinned" else f.lit(0) for name in reasons}
    return found | {
        "unrecovered_ms": f.when(col("left_at_us").isNotNull(), (col("at_us") - col("left_at_us")) / 1000),
        "unrecovered_bytes": f.when(col("left_at_us").isNotNull(), octets("now", "sent") - octets("then", "sent")),
    }


def _seen(frame: DataFrame, options: SynthOptions, *, closing: bool) -> DataFrame:
    """Add what samples saw: time by the state at their ends, and the samples in which READY was left for good."""
    col, zero = f.col, f.lit(0)
    every = options.interval_us
    never_back = col("cut").cast("int") if closing else zero
    frame = frame.withColumn("recoveries", f.greatest(zero, col("now_episodes") - never_back))
    trouble = col("over_us") + col("soft_us")
    in_last = (col("episodes") > 0) & (trouble > 0) & col("cut") & (col("now_episodes") == col("episodes"))
    left = (
        f.when(in_last, col("at_us") - trouble)
        .when((trouble > 0) & (col("now_rest") > col("leave_us")), col("at_us") - col("now_rest") + col("leave_us"))
        .when((col("now_hard") > 0) & (col("episodes") == 0), col("at_us") - col("now_hard"))
    )
    last = f.floor((col("at_us") - 1) / every) if closing else f.floor(col("at_us") / every)
    frame = frame.withColumns({"left_at_us": left, "then_us": f.coalesce(left, col("at_us")), "last_sample": last})
    frame = clocks(frame, "then_us", "then")
    frame = frame.withColumn("sampled_us", col("at_us") if closing else last * every)
    if not closing:
        begun = f.filter("script", lambda step: event_at(step) <= col("at_us"))
        frame = frame.withColumn("begun_rows", f.size(begun))
    nothing = f.struct(*(zero.cast("bigint").alias(name) for name in _SEEN))
    hardened = (col("episodes") == 0) & (col("now_hard") > 0)
    rest = (col("at_us") - col("last_sample") * every) if closing else zero
    frame = frame.withColumn("last_us", rest)
    at_once = f.struct(
        *(
            value.cast("bigint").alias(name)
            for name, value in zip(_SEEN, (zero, rest, rest, rest * rate_per_us()), strict=True)
        )
    )
    seen = f.when(hardened, at_once).when((col("slice_us") > 0) & (trouble > 0), _fold(options)).otherwise(nothing)
    return frame.withColumn("seen", seen)


_SEEN: Final = ("over", "soft", "left", "left_bytes")


def event_at(step: Column) -> Column:
    """Return when a step of a script happens, us since the connection was opened."""
    leave = f.col("leave_us")
    places = (leave, leave + f.col("over_us"), f.col("slice_us") - 1000, f.col("slice_us"))
    at = f.lit(0)
    for place, where in enumerate(places):
        at = f.when(step["place"] == place, where).otherwise(at)
    inside = f.col("lead_us") + step["episode"] * f.col("slice_us") + at
    hard = f.col("duration_us") - f.col("hard_us")
    return (
        f.when(step["place"] == HARDENS, hard)
        .when(step["place"] == HITS, f.floor(f.col("duration_us") / 2))
        .otherwise(inside)
    )


def rate_per_us() -> Column:
    """Return the octets that a stream has per microsecond of its media clock."""
    return sum((size_of(item) * (PER_S[item] / 1e6) for item in PER_S), f.lit(0.0))


def _fold(options: SynthOptions) -> Column:
    """Return what samples saw of all episodes, as a struct of `_SEEN`: us by state at their ends, then those left."""
    col, every = f.col, options.interval_us
    full = col("last_sample") * every

    def ends(begin: Column, end: Column) -> Column:
        """Return the time of the whole samples that end after `begin` and not after `end`."""
        count = f.floor(f.least(end, full) / every) - f.floor(f.least(begin, full) / every)
        return f.greatest(f.lit(0), count) * every

    def published(at: Column) -> Column:
        since = f.greatest(f.lit(0), at - col("lead_us"))
        done = f.least(f.floor(since / col("slice_us")), col("episodes").cast("bigint"))
        into = since - done * col("slice_us") - col("leave_us") + SURGE_US
        length = col("slice_us") - col("leave_us") + SURGE_US
        surge = done * length + f.least(f.greatest(f.lit(0), into), length)
        return f.greatest(f.lit(0), at - col("startup_us")) + (col("burst") - 1) * surge

    def add(sums: Column, number: Column) -> Column:
        begin = col("lead_us") + number * col("slice_us")
        leave, back = begin + col("leave_us"), begin + col("slice_us")
        soft = leave + col("over_us")
        stays = col("cut") & (number == col("episodes") - 1)
        low = f.floor(leave / every) * every
        high = f.least(low + every, full + col("last_us"))
        left = (high > leave) & (leave < col("at_us")) & ((high < back) | stays)
        final = f.when(stays & (col("now_episodes") == col("episodes")), col("last_us")).otherwise(0)
        softened = col("soft_us") > 0
        values = (
            sums["over"] + ends(leave, f.least(soft, back - 1)) + f.when(softened, 0).otherwise(final),
            sums["soft"] + f.when(softened, ends(soft, back - 1) + final).otherwise(0),
            sums["left"] + f.when(left, high - low).otherwise(0),
            sums["left_bytes"] + f.when(left, (published(high) - published(low)) * rate_per_us()).otherwise(0),
        )
        return f.struct(*(value.cast("bigint").alias(name) for name, value in zip(_SEEN, values, strict=True)))

    start = f.struct(*(f.lit(0).cast("bigint").alias(name) for name in _SEEN))
    return f.aggregate(f.sequence(f.lit(0), col("episodes") - 1), start, add)


def delay_ms(state: int) -> Column:
    """Return how far behind a viewer is: READY (0), OVERLOADED (1), or worse (2)."""
    return f.lit(DELAYS_MS[state]) * (0.5 + f.col("luck")) + f.col("far") * 30


def _sampled(options: SynthOptions) -> dict[str, Column]:
    """Return what samples saw; null where nothing is sampled."""
    col = f.col
    over, soft, whole = col("seen.over"), col("seen.soft"), col("sampled_us")
    plays = (col("role") == "play") & col("startup_us").isNotNull() & (whole > 0)
    ready = whole - over - soft

    def quantile(share: float) -> Column:
        return (
            f.when(ready >= share * whole, delay_ms(0))
            .when(ready + over >= share * whole, delay_ms(1))
            .otherwise(delay_ms(2))
        )

    late = sum(
        (f.when(delay_ms(state) > TARGET_MS, time).otherwise(0) for state, time in enumerate((ready, over, soft))),
        f.lit(0),
    )
    trouble = col("over_us") + col("soft_us")
    accepted, sent = octets("now", "accepted"), octets("now", "sent")
    share = (col("now_over") + col("now_soft")) / f.greatest(f.lit(1), col("now_whole"))
    lined = plays & (trouble > 0) & (over + soft > 0)
    found = {
        "sampled_ms": whole / 1000,
        **{f"delay_p{share}_ms": quantile(share / 100) for share in (50, 95, 99)},
        "delay_max_ms": f.when(soft > 0, delay_ms(2)).when(over > 0, delay_ms(1)).otherwise(delay_ms(0)),
        "delay_mean_ms": (ready * delay_ms(0) + over * delay_ms(1) + soft * delay_ms(2)) / whole,
        "target_delay_ms": f.lit(TARGET_MS),
        "late_ms": late / 1000,
        "stall_count": f.when(
            col("stalls"), col("now_episodes") + (col("now_stalled") > col("now_episodes") * col("soft_us")).cast("int")
        ).otherwise(0),
        "stall_ms": col("now_stalled") / 1000,
        "trouble_ms": (over + soft) / 1000,
        "left_ms": col("seen.left") / 1000,
        "left_server_ms": f.when(col("strained"), col("seen.left") / 1000).otherwise(0),
        "left_bytes": col("seen.left_bytes"),
        "unforced_drops": f.lit(0),
    }
    stream = (accepted * share).cast("bigint")
    return {name: f.when(plays, value) for name, value in found.items()} | {
        "samples_count": f.when(plays, f.ceil(whole / options.interval_us)).otherwise(0)
        if options.samples_s
        else f.lit(None),
        "line_bytes": f.when(lined, f.greatest(f.lit(0), stream - (accepted - sent))),
        "line_stream_bytes": f.when(lined, stream),
        "rtt_us": f.when(plays, col("far") * 12_000),
    }


def _ingest() -> dict[str, Column]:
    """Return what a publisher sent, by the time that it has published and was not silent."""
    col = f.col
    publishes = (col("role") == "publish") & (col("startup_us") <= col("at_us"))
    each_us = col("gap_each_s") * 1e6
    every = col("duration_us") / (col("gaps") + 1)
    gaps = f.least(f.floor(col("at_us") / every), col("gaps").cast("bigint"))
    live_us = f.greatest(f.lit(0), col("at_us") - col("startup_us") - gaps * each_us)
    pictures, audio = f.floor(live_us * 30 / 1e6), f.floor(live_us * 43 / 1e6)
    keys = f.floor(live_us / (col("key_s") * 1e6)) + 1
    inter = f.greatest(f.lit(0), pictures - keys)
    size = keys * size_of("key") + inter * size_of("inter") + audio * size_of("audio")
    found = {
        "ingest_bytes": size,
        "ingest_pictures": keys + inter,
        "ingest_key_frames": keys,
        "ingest_audio": audio,
        "key_interval_ms": f.when(keys > 1, col("key_s") * 1000),
        "key_interval_max_ms": f.when(keys > 1, col("key_s") * 1000 * 1.02),
        "gap_count": gaps,
        "gap_ms": gaps * each_us / 1000,
        "gap_max_ms": f.when(gaps > 0, each_us / 1000).otherwise(0),
        "jitter_ms": col("jitter_ms"),
    }
    return {name: f.when(publishes, value) for name, value in found.items()}
