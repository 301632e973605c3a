"""Figures of the report from what other jobs have left: the tables of fleet, abuse, what-if and capacity.

Quantiles of delay that cover several rows of `fleet_streams` are those over viewers of the quantile of their stream and
minute: the p95 of a place along time is what 95 % of its viewers' streams did not exceed at their own p95. That is no
less than the true one as a rule, and needs no second look at the records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from flowctl.pipeline.report.data import STATES, Cut, Row, number
from flowctl.pipeline.report.gather import MOST_MOMENTS, MOST_ROWS, column, first_rows, moment_of, rows_of
from flowctl.telemetry.schema import VIEWING

MOST_CHOICES: Final = 200
"""Choices of limits on the page: all of them as dots, and a grid of more is a search, not a comparison."""

_SHARES: Final = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
_STEPS_S: Final = (
    *(2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600 * hours for hours in (1, 2, 4, 6, 12, 24, 48, 7 * 24, 30 * 24, 365 * 24)),
)
"""Lengths of a place along time: round ones, so that ticks fall between places."""

_LONGEST_MS: Final = 120_000.0
"""A sample counts for no more than so long: recorders make intervals of up to half a minute."""
FLEET_MINUTE_S: Final = 60
"""Grain of `fleet_streams`."""

Moments = tuple[datetime | None, float, Sequence[Row]]
"""When the first place begins, how long each is (seconds), and their rows (see `ReportData.moments`)."""


def moment_length_s(span_s: float) -> int:
    """Return the length of a place for a picture over `span_s` seconds: at most `MOST_MOMENTS` of them."""
    return next((step for step in _STEPS_S if span_s / step <= MOST_MOMENTS), _STEPS_S[-1])


def moments_of_samples(samples: DataFrame, began_at: datetime, moment_s: int) -> Moments:
    """Return the places along time of a short run, straight from the samples: a minute would be all there is of it.

    Args:
        samples: rows of `flow_samples` that passed the checks.
        began_at: where the first place begins.
        moment_s: length of a place, seconds.
    """
    begin_us, length_us = int(began_at.timestamp() * 1e6), moment_s * 1_000_000
    words = dict(zip(STATES, ("READY", "OVERLOADED", "SOFT_LIMIT", "HARD_LIMIT"), strict=True))
    # A sample stands for its interval, which may cross places, and on a busy server is longer than one.
    end_us = f.unix_micros("ts") - f.lit(begin_us)
    lasted_us = f.round(f.least(column(samples, "interval_ms"), f.lit(_LONGEST_MS)) * 1000).cast("bigint")
    start_us = f.greatest(end_us - lasted_us, f.lit(0))
    viewing = (
        samples.where(column(samples, "role", "string").isin(*VIEWING))
        .withColumn("end_us", end_us)
        .withColumn("start_us", start_us)
        .where("end_us > start_us")
        .withColumn("place", f.explode(f.expr(f"sequence(start_us div {length_us}, (end_us - 1) div {length_us})")))
        .withColumn("begin_us", f.col("place") * f.lit(length_us))
    )
    length = f.least("end_us", f.col("begin_us") + length_us) - f.greatest("start_us", "begin_us")
    summed = viewing.groupBy("place").agg(
        *(
            f.try_divide(f.sum(f.when(f.col("state") == word, length).otherwise(0)), f.sum(length)).alias(state)
            for state, word in words.items()
        ),
        f.approx_count_distinct(f.struct("node", "conn_id")).alias("viewers"),
        *(f.percentile_approx("viewer_delay_ms", share, 1000).alias(f"delay_{name}_ms") for name, share in _SHARES),
    )
    return began_at, float(moment_s), _placed(summed, moment_s)


def moments_of_fleet(streams: DataFrame) -> Moments:
    """Return the places along time from `fleet_streams`: a minute each, or several."""
    span = streams.agg(
        f.unix_micros(f.min("minute")).alias("first"), f.unix_micros(f.max("minute")).alias("last")
    ).first()
    began_at = None if span is None else moment_of(span["first"])
    if span is None or began_at is None:
        return None, float(FLEET_MINUTE_S), ()
    moment_s = max(FLEET_MINUTE_S, moment_length_s((span["last"] - span["first"]) / 1e6 + FLEET_MINUTE_S))
    place = f.floor((f.unix_micros("minute") - f.lit(span["first"])) / (moment_s * 1_000_000)).alias("place")
    weight = column(streams, "viewers")
    minutes = f.count_distinct("minute")
    summed = streams.groupBy(place).agg(
        *(
            f.try_divide(f.sum(column(streams, f"share_{state}") * weight), f.sum(weight)).alias(state)
            for state in STATES
        ),
        f.try_divide(f.sum(weight), minutes).alias("viewers"),
        *_weighted_delays(streams),
    )
    return began_at, float(moment_s), _placed(summed, moment_s)


def _placed(summed: DataFrame, moment_s: int) -> list[Row]:
    """Return the rows in order; clocks that are off may put some far away, of which `MOST_MOMENTS` are enough."""
    rows = rows_of(summed.where(f.col("place") >= 0).orderBy("place").limit(MOST_MOMENTS + 1))
    return [{"at_s": float(row["place"] * moment_s), **row} for row in rows]


def _weighted_delays(frame: DataFrame) -> list[Column]:
    """Return quantiles over viewers: `percentile` takes how often a value counts, here the viewers of the row."""
    often = f.greatest(f.lit(1), f.ceil(f.coalesce(column(frame, "viewers"), f.lit(0.0)))).cast("bigint")
    return [
        f.percentile(column(frame, f"delay_{name}_ms"), share, often).alias(f"delay_{name}_ms")
        for name, share in _SHARES
    ]


def streams(frame: DataFrame) -> Cut:
    """Return the streams that were watched longest: viewers (at most, in a minute), viewer_ms, shares and delays."""
    by_minute = frame.groupBy("app", "stream", "minute").agg(f.sum(column(frame, "viewers")).alias("viewers"))
    most = by_minute.groupBy("app", "stream").agg(f.max("viewers").alias("viewers"))
    weight = column(frame, "viewers")
    summed = frame.groupBy("app", "stream").agg(
        (f.sum(weight) * FLEET_MINUTE_S * 1000).alias("viewer_ms"),
        (1 - f.try_divide(f.sum(column(frame, "share_ready") * weight), f.sum(weight))).alias("trouble_share"),
        *_weighted_delays(frame),
        f.try_divide(f.sum(column(frame, "dropped_messages")), f.sum(column(frame, "accepted_messages"))).alias(
            "drop_share"
        ),
        f.try_divide(
            f.sum(column(frame, "picture_share") * weight),
            f.sum(f.when(column(frame, "picture_share").isNotNull(), weight)),
        ).alias("picture_share"),
        f.try_divide(f.sum(column(frame, "pictures_below_80")), f.sum(column(frame, "pictures_known"))).alias(
            "below_80_share"
        ),
    )
    same = [summed[name].eqNullSafe(most[name]) for name in ("app", "stream")]
    joined = summed.join(most, [same[0] & same[1]]).drop(most["app"], most["stream"])
    return first_rows(joined, [f.desc_nulls_last("viewer_ms"), f.asc("app"), f.asc("stream")])


def subnets(frame: DataFrame) -> Cut:
    """Return the networks whose viewers were in trouble longest: viewers (seen), shares and delays."""
    trouble = 1 - column(frame, "share_ready")
    chosen = frame.select(
        f.coalesce(column(frame, "subnet", "string"), f.lit("addresses not recorded")).alias("subnet"),
        column(frame, "viewers_seen").alias("viewers"),
        trouble.alias("trouble_share"),
        *(column(frame, f"delay_{name}_ms").alias(f"delay_{name}_ms") for name, _ in _SHARES),
        column(frame, "drop_ratio").alias("drop_share"),
        column(frame, "picture_share").alias("picture_share"),
        f.try_divide(column(frame, "pictures_below_80"), column(frame, "pictures_known")).alias("below_80_share"),
    )
    worst = f.coalesce(f.col("trouble_share") * f.col("viewers"), f.lit(0.0))
    return first_rows(chosen, [worst.desc(), f.desc_nulls_last("viewers"), f.asc("subnet")])


def scores(frame: DataFrame) -> Cut:
    """Return the highest scores; addresses of which there is no evidence at all are not counted.

    Those that are banned come first, then by score, then by name.
    """
    scored = frame.where(column(frame, "points") > 0)
    order = [f.desc_nulls_last(column(frame, "banned", "boolean")), f.desc_nulls_last(column(frame, "score"))]
    return first_rows(scored, [*order, column(frame, "cidr", "string"), column(frame, "address", "string")])


def bans(text: str) -> Cut:
    """Return the first lines of a ban list; what is no JSON object is passed over and counted as left out."""
    lines = [line for line in text.splitlines() if line.strip()]
    rows: list[Row] = []
    for line in lines:
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            rows.append(value)
    rows.sort(key=lambda row: -(number(row.get("score")) or 0.0))
    return Cut(rows[:MOST_ROWS], len(lines))


def choices(frame: DataFrame) -> Cut:
    """Return the choices of limits, the recommended one and the one in force first."""
    order = [
        f.desc_nulls_last(column(frame, "recommended", "boolean")),
        f.desc_nulls_last(column(frame, "in_force", "boolean")),
        f.desc_nulls_last(column(frame, "on_front", "boolean")),
        f.asc_nulls_last(column(frame, "disconnected_share")),
        f.asc_nulls_last(column(frame, "delay_p95_ms")),
    ]
    return first_rows(frame, order, MOST_CHOICES)


def largest(frame: DataFrame, by: str) -> Cut:
    """Return the rows of a table with the largest value of a column; ties are broken by all others, as text."""
    others = [f.asc(f.col(f"`{name}`").cast("string")) for name in frame.columns if name != by]
    return first_rows(frame, [f.desc_nulls_last(column(frame, by)), *others])


def capacity(frame: DataFrame) -> Cut:
    """Return the table of the job, which is small by itself."""
    return Cut(rows_of(frame.limit(MOST_CHOICES)), frame.count())
