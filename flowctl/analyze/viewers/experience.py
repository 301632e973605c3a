"""``experience``: what viewers felt, in the words of CTA-2066, by stream, application, network, agent, node and role.

Of each hour, sums and sketches are kept per value of each dimension (part `felt`): sums are of whole numbers, and
sketches of KLL merge. The answer adds sessions that are still open, keeps of each dimension the values with the most
viewers (`MOST_VALUES_PER_DIMENSION`), and puts all others into one row. Attempts are all that asked to play, plays
those that were given media. A distribution has each viewer once, without those that stayed less than `LEAST_STAY_S`;
ratios are sum over sum. Up to `SKETCH_K` viewers a percentile is exact; beyond, its rank is `RANK_ERROR` off at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.engine import Observation, Window
from flowctl.analyze.engine import functions as f
from flowctl.analyze.job import AnalysisJob, JobAnswer, JobPart, typed
from flowctl.analyze.records.addresses import subnet, unit_digits, with_unit
from flowctl.analyze.records.expressions import added, summed, zero
from flowctl.analyze.viewers import ingest
from flowctl.analyze.viewers.sessions import seen_sessions, still_open, viewing
from flowctl.reasons import SLOW_ENDS
from flowctl.records.telemetry.schema import CLASS_NAMES, CONN_NUMBER_BITS, OPENS_EVERY_S, STATE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

    from flowctl.analyze.job import Parts

LEAST_STAY_S: Final = 2.0
"""Least stay of a viewer: before, it has had little but the group of pictures that everybody is given at once."""
MOST_VALUES_PER_DIMENSION: Final = 100
"""Most values of a dimension that have a row of their own."""
FEW: Final = 20
"""Viewers below which figures are few: their 95th percentile is the worst of them."""
DIMENSIONS: Final = ("all", "stream", "application", "network", "agent", "node", "role")
"""Dimensions by which figures are summed up."""
SKETCH_K: Final = 1000
RANK_ERROR: Final = 2.296 / SKETCH_K**0.9723
"""Rank error of a KLL sketch with that k: 0.28 %."""
FAMILIES: Final = {
    "obs": "OBS", "lavf": "FFmpeg", "ffmpeg": "FFmpeg", "vlc": "VLC", "mpv": "mpv", "gstreamer": "GStreamer",
    "edg": "Edge", "opr/": "Opera", "firefox/": "Firefox", "chrome/": "Chrome", "safari/": "Safari", "curl": "curl",
}  # fmt: skip
"""Part of an agent's text, in small letters -> its family; the order matters, for browsers name each other."""

_WHO: Final = ("peer_ip", "app", "stream", "agent", "node", "role")
_SKETCHES: Final = {"first_frames": "first_frame_ms", "delays": "delay_p50_ms"}
_COUNTS: Final = (
    *("viewers", "attempts", "plays", "start_failures", "exits_before_start", "troubled", "cut_slow", "play_ms"),
    *("stall_count", "stall_ms", "stall_play_ms", "late_ms", "target_ms", "pictures_wanted", "pictures_sent"),
    *("switches", "set_ms", "smaller_ms"),
    *("sent_bytes", "rated_bytes", "rated_ms", "framed_pictures", "framed_ms", "accepted_messages"),
    *("dropped_messages", *(f"{name}_ms" for name in STATE_NAMES)),
)
PART_COLUMNS: Final[dict[str, str]] = {
    "by": "string", "key": "string", **dict.fromkeys(_COUNTS, "bigint"), **dict.fromkeys(_SKETCHES, "binary"),
}  # fmt: skip
FIGURES: Final[dict[str, str]] = {
    **dict.fromkeys(("viewers", "attempts", "plays", "start_failures", "exits_before_start"), "bigint"),
    **dict.fromkeys(("stall_count", "troubled", "cut_slow", "switches"), "bigint"),
    **dict.fromkeys(("accepted_messages", "dropped_messages", "sent_bytes"), "bigint"),
    "few": "boolean",
    **dict.fromkeys(("rank_error", "first_frame_p50_ms", "first_frame_p95_ms"), "double"),
    **dict.fromkeys(("delay_p50_ms", "delay_p95_ms", "delay_p99_ms", "picture_share", "late_share"), "double"),
    **dict.fromkeys(("stall_ratio", "bit_rate", "frames_per_s", "play_hours", "drop_ratio"), "double"),
    "smaller_rendition_share": "double",
    **{f"share_{name}": "double" for name in STATE_NAMES},
}
COLUMNS: Final[dict[str, str]] = {
    "by": "string", "key": "string", "keys": "bigint", **FIGURES, "peak_viewers": "bigint", "peak_at": "timestamp",
}  # fmt: skip
"""Contract of ``experience``. Grain: one value of one dimension; key "": not known, null: all that have no row."""


def family(agent: Column) -> Column:
    """Return the family of an agent: one of `FAMILIES`, else the first word of its name; "" without one."""
    small = f.lower(agent)
    known = (f.when(small.contains(part), f.lit(name)) for part, name in FAMILIES.items())
    return f.coalesce(*known, f.regexp_extract(agent, "^[A-Za-z][A-Za-z0-9._-]{0,23}", 0))


def _dimensions() -> dict[str, Column]:
    return {
        "all": f.lit("all"),
        "stream": f.concat_ws("/", "app", "stream"),
        "application": f.col("app"),
        "network": subnet(f.col("address"), f.col("digits")),
        "agent": family(f.col("agent")),
        "node": f.col("node"),
        "role": f.col("role"),
    }


def _keyed(names: Sequence[str]) -> Column:
    of = _dimensions()
    pairs = (f.struct(f.lit(name).alias("by"), f.coalesce(of[name], f.lit("")).alias("key")) for name in names)
    return f.inline(f.array(*pairs))


def _counts() -> dict[str, Column]:
    """Return the whole numbers that are added up over sessions; null adds nothing."""
    play_ms = f.round(f.col("play_s") * 1e3)
    flags = {
        "viewers": f.col("play_s").isNotNull() & (f.col("duration_s") >= LEAST_STAY_S),
        "attempts": f.col("asked_ms").isNotNull() | f.col("startup_ms").isNotNull(),
        "plays": f.col("startup_ms").isNotNull(),
        "start_failures": f.col("start_failure").isNotNull(),
        "exits_before_start": f.col("exit_before_start"),
        "troubled": f.col("blame") != "none",
        "cut_slow": f.col("close_reason").isin(*SLOW_ENDS),
    }
    return {
        **{name: f.when(flag, 1) for name, flag in flags.items()},
        "play_ms": play_ms,
        "stall_count": f.col("stall_count"),
        # A stall counts for at most as long as it was played: ratios of sums are shares, as those of sessions are.
        "stall_ms": f.round(f.col("stall_ratio") * play_ms),
        "stall_play_ms": f.when(f.col("stall_ratio").isNotNull(), play_ms),
        "late_ms": f.round(f.col("late_share") * f.col("sampled_ms")),
        "target_ms": f.when(f.col("late_share").isNotNull(), f.round("sampled_ms")),
        "pictures_wanted": f.when(f.col("picture_share").isNotNull(), f.col("pictures_wanted")),
        "pictures_sent": f.round(f.col("picture_share") * f.col("pictures_wanted")),
        "switches": f.col("switches"),
        "set_ms": f.when(f.col("smaller_rendition_share").isNotNull(), f.round(f.col("set_s") * 1e3)),
        "smaller_ms": f.round(f.col("smaller_rendition_share") * f.col("set_s") * 1e3),
        "sent_bytes": f.col("sent_bytes"),
        "rated_bytes": f.when(f.col("bit_rate").isNotNull(), f.col("sent_bytes")),
        "rated_ms": f.when(f.col("bit_rate").isNotNull(), play_ms),
        "framed_pictures": f.when(f.col("frames_per_s").isNotNull(), f.col("pictures_sent")),
        "framed_ms": f.when(f.col("frames_per_s").isNotNull(), play_ms),
        **{f"{name}_ms": f.round(f"time_{name}_ms") for name in STATE_NAMES},
        "accepted_messages": added(f"accepted_messages_{name}" for name in CLASS_NAMES),
        "dropped_messages": f.col("dropped_messages"),
    }


def sum_by_dimension(sessions: DataFrame, *more: str, by: Sequence[str] = DIMENSIONS) -> DataFrame:
    """Sum up what viewers had (`PART_COLUMNS`), by the values of each dimension and by `more` columns of sessions."""
    stayed = f.col("duration_s") >= LEAST_STAY_S
    once = sessions.filter(viewing()).select(  # few columns: each later step copies them all
        *more, *_WHO,
        *(value.cast("bigint").alias(name) for name, value in _counts().items()),
        *(f.when(stayed, f.col(value)).cast("float").alias(name) for name, value in _SKETCHES.items()),
    )  # fmt: skip
    once = with_unit(once, "peer_ip").withColumn("digits", unit_digits(f.col("address")))  # a long one, used often
    once = once.select(*more, *_COUNTS, *_SKETCHES, _keyed(by))
    return summed(once.groupBy("by", "key", *more), _COUNTS, *(sketch(name).alias(name) for name in _SKETCHES))


def merged(rows: DataFrame, *more: Column) -> DataFrame:
    sketches = (f.kll_merge_agg_float(name).alias(name) for name in _SKETCHES)
    return summed(rows.groupBy("by", "key"), _COUNTS, *sketches, *more)


def sketch(name: str) -> Column:
    return f.kll_sketch_agg_float(name, f.lit(SKETCH_K))


def quantile(sketch: str, share: float) -> Column:
    known = f.kll_sketch_get_n_float(sketch) > 0
    return f.when(known, f.kll_sketch_get_quantile_float(sketch, f.lit(share))).cast("double")


def figures() -> dict[str, Column]:
    """Return `FIGURES` over rows of `PART_COLUMNS`: quotients of sums, and quantiles of sketches."""
    states = added(f"{name}_ms" for name in STATE_NAMES)
    own = {
        "few": zero("viewers") < FEW,
        **{f"first_frame_p{of}_ms": quantile("first_frames", of / 100) for of in (50, 95)},
        **{f"delay_p{of}_ms": quantile("delays", of / 100) for of in (50, 95, 99)},
        "rank_error": f.when(zero("viewers") > SKETCH_K, RANK_ERROR).otherwise(0.0),
        "picture_share": f.try_divide("pictures_sent", "pictures_wanted"),
        "late_share": f.try_divide("late_ms", "target_ms"),
        "stall_ratio": f.try_divide("stall_ms", "stall_play_ms"),
        "bit_rate": f.try_divide(f.col("rated_bytes") * 8e3, "rated_ms"),
        "frames_per_s": f.try_divide(f.col("framed_pictures") * 1e3, "framed_ms"),
        "smaller_rendition_share": f.try_divide("smaller_ms", "set_ms"),
        "play_hours": zero("play_ms") / 3.6e6,
        **{f"share_{name}": f.try_divide(zero(f"{name}_ms"), states) for name in STATE_NAMES},
        "drop_ratio": f.try_divide("dropped_messages", "accepted_messages"),
    }
    return {name: own.get(name, zero(name)).alias(name) for name in FIGURES}


def peaks(sessions: DataFrame, since_s: float) -> DataFrame:
    """Count how many watched at once, of all, each stream and each node: `peak_viewers`, and when first, `peak_at`."""
    began = f.greatest(f.floor(f.unix_micros("seen_at") / 1e6 - f.col("play_s")), f.lit(int(since_s)))
    moments = {1: began, -1: f.floor(f.unix_micros("until") / 1e6) + 1}
    steps = f.array(*(f.struct(at.alias("second"), f.lit(step).alias("step")) for step, at in moments.items()))
    keyed = sessions.filter(viewing() & f.col("play_s").isNotNull()).select(
        _keyed(("all", "stream", "node")), steps.alias("steps")
    )
    moves = keyed.select("by", "key", f.inline("steps")).groupBy("by", "key", "second").agg(f.sum("step").alias("step"))
    order = Window.partitionBy("by", "key").orderBy("second")
    present = moves.withColumn("present", f.sum("step").over(order))
    first = f.struct("present", (-f.col("second")).alias("earlier"))  # of seconds with as many
    peak_at = f.timestamp_seconds(f.max_by("second", first))
    return present.groupBy("by", "key").agg(f.max("present").alias("peak_viewers"), peak_at.alias("peak_at"))


def by_value(parts: Parts, by: Sequence[str] = DIMENSIONS) -> DataFrame:
    closed = parts.table("felt").filter(f.col("by").isin(*by))
    return merged(closed.select(*PART_COLUMNS).unionByName(sum_by_dimension(still_open(parts), by=by)))


def experience(parts: Parts) -> DataFrame:
    order = Window.partitionBy("by").orderBy(f.desc("viewers"), f.desc("attempts"), "key")
    has_row = f.row_number().over(order) <= MOST_VALUES_PER_DIMENSION
    ranked = by_value(parts).withColumn("key", f.when(has_row, f.col("key")))
    names = ("role", "app", "stream", "node", "play_s", "asked_ms", "peer_ip", "agent", "seen_at")
    life = f.shiftright("conn_id", CONN_NUMBER_BITS).alias("life")  # when its process started, in seconds
    sessions, still = parts.table("sessions"), still_open(parts)
    closed = sessions.withColumn("seen_at", f.col("closed_at")).select(*names, f.col("seen_at").alias("until"))
    lives = sessions.select("node", life).union(still.select("node", life)).groupBy("node")
    there = still.select(*names, life).join(f.broadcast(lives.agg(f.collect_set("life").alias("lives"))), "node")
    # One that is open is there until its next record would have come, but not beside the next life of its server.
    later = f.array_min(f.filter("lives", lambda start: start > f.col("life")))
    beyond = f.col("seen_at") + f.make_dt_interval(secs=f.lit(OPENS_EVERY_S))
    beyond = f.least(beyond, f.lit(parts.newest), f.timestamp_seconds(later - 1))
    there = there.select(*names, f.greatest("seen_at", beyond).alias("until"))
    peak = peaks(closed.unionByName(there), 0.0 if parts.since is None else parts.since.timestamp())
    top = merged(ranked, f.count("*").alias("keys")).join(peak, ["by", "key"], "left")
    return top.select("by", "key", "keys", *figures().values(), "peak_viewers", "peak_at")


def answer(parts: Parts, _: Any = None) -> JobAnswer:
    rows = typed(experience(parts), COLUMNS).toArrow()  # some hundred
    parts.write("experience", rows, COLUMNS)
    if earlier := parts.day_before():
        parts.write("experience_before", typed(experience(earlier), COLUMNS).toArrow(), COLUMNS)
    health = Observation()
    counts = (f.count_if(f.col("health") == word).alias(word) for word in ingest.HEALTH)
    parts.write("ingest", ingest.ingest(parts).observe(health, *counts), ingest.COLUMNS)
    whole = [row for row in rows.select(["by", "peak_viewers", *FIGURES]).to_pylist() if row.pop("by") == "all"]
    totals = whole[0].items() if whole else ()
    summary = {name: round(value, 4) if isinstance(value, float) else value for name, value in totals}
    publishers = {word: count for word, count in sorted(health.get.items()) if count}
    return JobAnswer(summary={**summary, "publishers": publishers})


JOB: Final = AnalysisJob(
    name="experience",
    parts=(
        JobPart(
            name="felt",
            columns=PART_COLUMNS,
            reads=("flow_closes",),
            make=lambda records, _: sum_by_dimension(seen_sessions(records), "date", "hour"),
        ),
    ),
    uses=("sessions", "open_sessions"),
    results=("experience", "experience_before", "ingest"),
    answer=answer,
)
