"""``fleet``: how each stream fared on each node, minute by minute, and how each network did over the whole time.

Theory of operation. Two aggregations follow each other. The first makes *viewer minutes*: one row per viewer and
minute, of its samples. The second sums them up by stream, node and minute, so that a quantile of delay is one over
viewers (each counts once with its mean) and not over samples. A minute lies in one hour, so rows of hours add up.

A viewer that was never sampled has viewer minutes of its session instead, which is spread evenly over the time in which
it played: right over that time, and blurred within it. So has one that was, in hours whose samples are not there. The
minutes of an hour that such a session fills have all the same of it: up to the answer, that hour is one row.
`source` says which it was. Joins are plays that began in the minute, leaves are viewers whose connection ended in it.
Networks are those of `experience`, all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.engine import Observation
from flowctl.analyze.engine import functions as f
from flowctl.analyze.job import AnalysisJob, JobAnswer, JobPart
from flowctl.analyze.records.expressions import added, summed, zero
from flowctl.analyze.records.window import begin_of
from flowctl.analyze.viewers import experience
from flowctl.analyze.viewers.experience import quantile, sketch
from flowctl.analyze.viewers.sessions import WORST_STATES, seen_sessions, still_open, viewing
from flowctl.records.telemetry.schema import CLASS_NAMES, STATE_NAMES, VIEWING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column, DataFrame

    from flowctl.analyze.job import Parts, Records

MINUTE_US: Final = 60_000_000
KEYS: Final = ("app", "stream", "node", "minute")
_SUMS: Final = (
    *("viewers_seen", "joins", "leaves", "us", "sampled_us", "known_us", "shown_us"),
    *(f"{name}_us" for name in STATE_NAMES),
    *("accepted_messages", "dropped_messages", "sent_bytes", "missed"),
)
_OF_STREAM: Final = {"app": "string", "stream": "string", "node": "string", "minute": "timestamp"}
PART_COLUMNS: Final[dict[str, str]] = {
    **_OF_STREAM, "span": "int", **dict.fromkeys(_SUMS, "bigint"), "delays": "binary",
}  # fmt: skip
"""A row is of one minute, or stands for each of `span` minutes from `minute` on."""
STREAM_COLUMNS: Final[dict[str, str]] = {
    **_OF_STREAM,
    "viewers": "double",
    "viewers_seen": "bigint",
    **{f"share_{name}": "double" for name in STATE_NAMES},
    **{f"delay_{name}_ms": "double" for name in ("p50", "p95", "p99")},
    **dict.fromkeys(("accepted_messages", "dropped_messages"), "bigint"),
    **dict.fromkeys(("drop_ratio", "picture_share"), "double"),
    **dict.fromkeys(("sent_bytes", "joins", "leaves"), "bigint"),
    "source": "string",
}
"""Contract of ``fleet_streams``. Grain: one stream, node and minute. `viewers`: mean by time."""
SUBNET_COLUMNS: Final[dict[str, str]] = {"subnet": "string", **experience.FIGURES}
"""Contract of ``fleet_subnets``. Grain: one /24 or /48; "": addresses that are hashes."""


def _all(what: str) -> Column:
    return added(f"{what}_messages_{name}" for name in CLASS_NAMES)


def sampled(samples: DataFrame) -> DataFrame:
    """Sum up the samples of each viewer and minute; every interval counts in the minute in which it ends."""
    us = f.round(f.col("interval_ms") * 1e3).cast("bigint")
    known = f.when(f.col("picture_share").isNotNull(), us)
    states = zip(STATE_NAMES, WORST_STATES, strict=True)
    sums = {
        "us": us,
        "sampled_us": us,
        "known_us": known,
        "shown_us": f.round(f.col("picture_share") * us),
        **{f"{name}_us": f.when(f.col("state") == state, us) for name, state in states},
        "accepted_messages": _all("accepted"),
        "dropped_messages": _all("dropped"),
        "sent_bytes": f.col("sent_bytes"),
    }
    delay_ms = f.col("viewer_delay_ms")
    minute, hour = f.date_trunc("minute", "ts").alias("minute"), ("conn_id", "date", "hour")
    rows = samples.filter(f.col("role").isin(*VIEWING)).select(
        *KEYS[:3], minute, *hour,
        *(value.cast("bigint").alias(name) for name, value in sums.items()),
        (delay_ms * us).alias("weighed"), f.when(delay_ms.isNotNull(), us * 1.0).alias("weights"),
    )  # fmt: skip
    mean = f.try_divide(f.sum("weighed"), f.sum("weights")).cast("float").alias("delay_ms")
    none = {"span": f.lit(1), "viewers_seen": f.lit(1), **dict.fromkeys(("joins", "leaves", "missed"), f.lit(0))}
    return summed(rows.groupBy(*KEYS, *hour), sums, mean).withColumns(none).drop("conn_id")


def spread(sessions: DataFrame, sampled: Callable[[Column], Column], *more: str) -> DataFrame:
    """Make the same rows of sessions: comings and goings of all, and the minutes of those without samples."""
    until, number, ours = f.unix_micros("seen_at"), f.col("number"), f.col("alone")
    watched = sessions.filter(viewing() & f.col("play_s").isNotNull()).select(
        *KEYS[:3], *more, "picture_share", "delay_p50_ms", "sent_bytes", "dropped_messages",
        *(f"time_{name}_ms" for name in STATE_NAMES),
        _all("accepted").alias("accepted_messages"), f.col("closed_at").isNotNull().alias("gone"),
        (zero("samples_count") == 0).alias("never"),
        until.alias("until"), (until - (f.col("play_s") * 1e6).cast("bigint")).alias("began"),
    )  # fmt: skip
    first, last = (f.floor(f.col(name) / MINUTE_US) for name in ("began", "until"))
    begin_hour, end_hour, hour = (f.floor(minute / 60) for minute in (first, last, number))
    apart = (f.sequence(first, begin_hour * 60 + 59), f.sequence(end_hour * 60, last))
    between = f.sequence((begin_hour + 1) * 60, (end_hour - 1) * 60, f.lit(60))
    every = f.when(end_hour - begin_hour < 2, f.sequence(first, last)).otherwise(f.concat(apart[0], between, apart[1]))
    whole = f.col("never") | ~sampled(first) | ~sampled(last) | (last - first >= 60)
    numbers = f.when(whole, every).otherwise(f.array_distinct(f.array(first, last)))
    begin = number * MINUTE_US
    us = f.when(ours, f.least("until", begin + MINUTE_US) - f.greatest("began", begin))
    part = f.coalesce(f.try_divide("us", f.col("until") - f.col("began")), f.col("us") * 0)
    rows = watched.select("*", f.explode(numbers).alias("number"))
    rows = rows.withColumn("alone", f.col("never") | ~sampled(number))
    rows = rows.filter(ours | number.isin(first, last)).withColumn("us", us).withColumn("part", part)
    told = {
        "us": f.col("us"),
        "known_us": f.when(f.col("picture_share").isNotNull(), f.col("us")),
        "shown_us": f.col("picture_share") * f.col("us"),
        **{f"{name}_us": f.col(f"time_{name}_ms") * 1e3 * f.col("part") for name in STATE_NAMES},
        **{name: f.col(name) * f.col("part") for name in ("accepted_messages", "dropped_messages", "sent_bytes")},
        "viewers_seen": ours,
        "joins": number == first,
        "leaves": (number == last) & f.col("gone"),
        "sampled_us": f.lit(0),
        "missed": ~f.col("never") & (number == first) & ~(sampled(first) & sampled(last)),
    }
    return rows.select(
        *KEYS[:3], f.timestamp_micros(begin).alias("minute"), *more,
        f.when((hour > begin_hour) & (hour < end_hour), 60).otherwise(1).alias("span"),
        *(f.round(value.cast("double")).cast("bigint").alias(name) for name, value in told.items()),
        f.when(ours, f.col("delay_p50_ms")).cast("float").alias("delay_ms"),
    )  # fmt: skip


def minutes(records: Records, _: Any = None) -> DataFrame:
    hours = [int(begin_of(hour).timestamp()) // 3600 for hour in records.hours("flow_samples")]
    rows = spread(seen_sessions(records), lambda number: f.floor(number / 60).isin(hours), "date", "hour")
    if records.has("flow_samples"):
        rows = rows.unionByName(sampled(records.table("flow_samples")))
    return summed(rows.groupBy(*KEYS, "span", "date", "hour"), _SUMS, sketch("delay_ms").alias("delays"))


def streams(parts: Parts) -> DataFrame:
    """Return the table ``fleet_streams``: `STREAM_COLUMNS`, and `missed`, viewers whose samples are not there."""
    sampled = any(account["table"] == "flow_samples" and account["rows_out"] for account in parts.accounts)
    there = spread(still_open(parts), lambda _: f.lit(sampled)).groupBy(*KEYS, "span")
    still = summed(there, _SUMS, sketch("delay_ms").alias("delays"))
    kept = parts.table("minutes").select(*PART_COLUMNS).unionByName(still.select(*PART_COLUMNS))
    each = f.explode(f.sequence(f.lit(0).cast("bigint"), f.col("span").cast("bigint") - 1)).alias("_later")
    kept = kept.withColumn("_later", each)
    minute = f.timestamp_micros(f.unix_micros("minute") + f.col("_later") * MINUTE_US).alias("minute")
    kept = kept.select(*KEYS[:3], minute, *_SUMS, "delays")
    states = added(f"{name}_us" for name in STATE_NAMES)
    own = {
        "viewers": zero("us") / MINUTE_US,
        **{f"share_{name}": f.try_divide(zero(f"{name}_us"), states) for name in STATE_NAMES},
        **{f"delay_p{of}_ms": quantile("delays", of / 100) for of in (50, 95, 99)},
        "drop_ratio": f.try_divide("dropped_messages", "accepted_messages"),
        "picture_share": f.try_divide("shown_us", "known_us"),
        "source": f.when(zero("sampled_us") == 0, "sessions").when(zero("us") == f.col("sampled_us"), "samples"),
    }
    own["source"] = f.coalesce(own["source"], f.lit("both"))
    return summed(kept.groupBy(*KEYS), _SUMS, f.kll_merge_agg_float("delays").alias("delays")).select(
        *(own.get(name, f.col(name)).alias(name) for name in (*STREAM_COLUMNS, "missed"))
    )


def answer(parts: Parts, _: Any = None) -> JobAnswer:
    subnets = experience.by_value(parts, ["network"]).select(
        f.col("key").alias("subnet"), *experience.figures().values()
    )
    counts = {"minutes": Observation(), "networks": Observation()}
    rows, missed = f.count("*").alias("rows"), f.sum("missed").alias("missed")
    parts.write("fleet_streams", streams(parts).observe(counts["minutes"], rows, missed), STREAM_COLUMNS)
    parts.write("fleet_subnets", subnets.observe(counts["networks"], rows), SUBNET_COLUMNS)
    summary = {name: told.get["rows"] for name, told in counts.items()}
    if not (lost := counts["minutes"].get["missed"]):
        return JobAnswer(summary=summary)
    line = f"samples of {lost} viewers are not there: their minutes are their sessions', spread evenly"
    return JobAnswer(summary=summary, warnings=[line])


JOB: Final = AnalysisJob(
    name="fleet",
    parts=(JobPart("minutes", PART_COLUMNS, minutes, ("flow_closes", "flow_samples"), version=3),),
    uses=("sessions", "open_sessions", "felt"),
    results=("fleet_streams", "fleet_subnets"),
    answer=answer,
)
