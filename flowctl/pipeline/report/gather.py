"""From the tables of the jobs to the figures of the report: sums in Spark first, only bounded rows to the driver.

Every function takes a DataFrame and returns plain rows: one row of totals, a row per word of a closed set, at most
`MOST_MOMENTS` places along time, or the first `MOST_ROWS` of a table with its length. Ties are broken by names, so that
the same tables give the same page. Columns that a table does not have (it comes from an older version, or from
elsewhere) are taken as null: the page then shows less, instead of nothing.

Quantiles over viewers are `percentile_approx` at an accuracy of 1000: the value returned stands within 0.1 % of the
wanted rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructField

from flowctl.pipeline.report.data import LEAST_STAY_S, PICTURE_CLASSES, SHARES, STATES, Cut, Row
from flowctl.reasons import SLOW_ENDS
from flowctl.telemetry.schema import CLASS_NAMES, VIEWING

MOST_ROWS: Final = 20
"""Rows of a table on the page: what a person reads. The whole table lies beside as Parquet."""

MOST_MOMENTS: Final = 120
"""Places along time: each is five pixels of a wide picture."""

MOST_WORDS: Final = 16
"""Reasons in a picture; they are a closed set, but a file from elsewhere may hold any text."""

_ACCURACY: Final = 1000


def column(frame: DataFrame, name: str, kind: str = "double") -> Column:
    """Return a column as `kind`; nulls if the table has none of that name."""
    found = f.col(f"`{name}`") if name in frame.columns else f.lit(None)
    return found.cast(kind)


def viewers_of(sessions: DataFrame) -> DataFrame:
    """Return the connections that played."""
    return sessions.where(column(sessions, "role", "string").isin(*VIEWING))


def trouble_ms(frame: DataFrame) -> Column:
    """Return how long a connection was not READY, ms."""
    parts = [f.coalesce(column(frame, f"time_{state}_ms"), f.lit(0.0)) for state in STATES[1:]]
    return parts[0] + parts[1] + parts[2]


def in_trouble(frame: DataFrame) -> Column:
    """Return whether a connection was in trouble (see `blame`); of a table without blames, whether it left READY."""
    if "blame" in frame.columns:
        return f.coalesce(f.col("blame"), f.lit("unknown")) != f.lit("none")
    worst = f.coalesce(column(frame, "worst_state", "string"), f.lit("READY"))
    return worst != f.lit("READY")


def _count_if(condition: Column) -> Column:
    return f.count_if(f.coalesce(condition, f.lit(False)))


def _sum(frame: DataFrame, name: str) -> Column:
    return f.coalesce(f.sum(column(frame, name)), f.lit(0.0))


def _quantile(frame: DataFrame, name: str, share: float, where: Column | None = None) -> Column:
    values = column(frame, name) if where is None else f.when(where, column(frame, name))
    return f.percentile_approx(values, share, _ACCURACY)


def whole(sessions: DataFrame) -> tuple[Row, datetime | None, datetime | None]:
    """Return the totals over all connections, when the first began and when the last ended.

    Returns:
        One row: connections, open, viewers, troubled, worst_<state>, cut_slow, play_ms, trouble_ms, recoveries,
        troubled_picture_share (mean), troubled_line_of_stream (median), recover_mean_ms, returns_to_live, paused,
        accepted_messages, dropped_messages, dropped_bytes, sent_bytes, stall_count, stall_ratio, startup_p50_ms,
        startup_p95_ms, exits_before_start, delay_p50_of_p50_ms, delay_p95_of_p95_ms; the figures from viewers on are of
        viewers alone.
    """
    all_of = sessions.agg(
        f.count("*").alias("connections"),
        _count_if(column(sessions, "closed_by", "string") == "open").alias("open"),
        _sum(sessions, "sent_bytes").alias("sent_bytes"),
        _count_if(column(sessions, "limit_hits") > 0).alias("limit_hitters"),
        # Text, and parsed here: `collect` would give the driver's own zone.
        f.unix_micros(f.min(column(sessions, "opened_at", "timestamp"))).alias("began_us"),
        f.unix_micros(
            f.max(f.coalesce(column(sessions, "closed_at", "timestamp"), column(sessions, "opened_at", "timestamp")))
        ).alias("ended_us"),
    ).first()
    found: dict[str, Any] = {} if all_of is None else all_of.asDict()
    began_us, ended_us = found.pop("began_us", None), found.pop("ended_us", None)
    viewers = viewers_of(sessions)
    row = viewers.agg(*_viewer_totals(viewers)).first()
    return {**found, **({} if row is None else row.asDict())}, moment_of(began_us), moment_of(ended_us)


def moment_of(micros: int | None) -> datetime | None:
    """Return a moment in UTC from microseconds since the epoch; None: there is none, or no calendar holds it."""
    from datetime import UTC, timedelta

    if micros is None:
        return None
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
    except OverflowError:
        return None


def _viewer_totals(viewers: DataFrame) -> list[Column]:
    troubled = in_trouble(viewers)
    worst = column(viewers, "worst_state", "string")
    accepted = sum(
        (f.coalesce(column(viewers, f"accepted_messages_{name}"), f.lit(0.0)) for name in CLASS_NAMES), f.lit(0.0)
    )
    return [
        f.count("*").alias("viewers"),
        _count_if(troubled).alias("troubled"),
        # Of these, so that they add up to no more: everybody is overloaded for a moment now and then.
        _count_if(troubled & (worst == "OVERLOADED")).alias("worst_overloaded"),
        _count_if(troubled & (worst == "SOFT_LIMIT")).alias("worst_soft"),
        _count_if(troubled & (worst == "HARD_LIMIT")).alias("worst_hard"),
        _count_if(column(viewers, "close_reason", "string").isin(*SLOW_ENDS)).alias("cut_slow"),
        (_sum(viewers, "duration_s") * 1000).alias("play_ms"),
        f.sum(trouble_ms(viewers)).alias("trouble_ms"),
        f.avg(f.when(troubled, column(viewers, "picture_share"))).alias("troubled_picture_share"),
        _quantile(viewers, "line_of_stream", 0.5, troubled).alias("troubled_line_of_stream"),
        _sum(viewers, "recoveries").alias("recoveries"),
        # The mean over recoveries, not over viewers: one that recovers often counts often.
        f.try_divide(
            f.sum(column(viewers, "recover_mean_ms") * column(viewers, "recoveries")), _sum(viewers, "recoveries")
        ).alias("recover_mean_ms"),
        _sum(viewers, "returns_to_live").alias("returns_to_live"),
        _count_if(column(viewers, "input_pauses") > 0).alias("paused"),
        f.sum(accepted).alias("accepted_messages"),
        _sum(viewers, "dropped_messages").alias("dropped_messages"),
        _sum(viewers, "dropped_bytes").alias("dropped_bytes"),
        _sum(viewers, "stall_count").alias("stall_count"),
        f.try_divide(f.sum(column(viewers, "stall_ms")), _sum(viewers, "duration_s") * 1000).alias("stall_ratio"),
        _quantile(viewers, "startup_ms", 0.5).alias("startup_p50_ms"),
        _quantile(viewers, "startup_ms", 0.95).alias("startup_p95_ms"),
        _count_if(column(viewers, "exit_before_start", "boolean")).alias("exits_before_start"),
        _quantile(viewers, "delay_p50_ms", 0.5, stayed(viewers)).alias("delay_p50_of_p50_ms"),
        _quantile(viewers, "delay_p95_ms", 0.95, stayed(viewers)).alias("delay_p95_of_p95_ms"),
        _count_if(~stayed(viewers)).alias("too_short"),
    ]


def rows_of(frame: DataFrame) -> list[Row]:
    """Return the rows of a frame that is known to be small."""
    return [row.asDict() for row in frame.collect()]


def nodes(sessions: DataFrame) -> tuple[list[Row], int]:
    """Return the nodes with the most connections (node, connections, viewers), and how many nodes there are."""
    role = column(sessions, "role", "string")
    by_node = sessions.groupBy("node").agg(
        f.count("*").alias("connections"), _count_if(role.isin(*VIEWING)).alias("viewers")
    )
    return rows_of(by_node.orderBy(f.desc("connections"), "node").limit(MOST_ROWS)), by_node.count()


def closes(sessions: DataFrame) -> list[Row]:
    """Return how connections ended: (reason, closed_by, connections), the most frequent first."""
    reason = f.coalesce(column(sessions, "close_reason", "string"), f.lit("still open"))
    by = f.coalesce(column(sessions, "closed_by", "string"), f.lit("open"))
    counted = sessions.groupBy(reason.alias("reason"), by.alias("closed_by")).agg(f.count("*").alias("connections"))
    return rows_of(counted.orderBy(f.desc("connections"), "reason", "closed_by").limit(MOST_WORDS))


def blames(sessions: DataFrame) -> list[Row]:
    """Return whose fault it was: (blame, viewers, trouble_ms) over viewers that were ever in trouble."""
    viewers = viewers_of(sessions)
    troubled = viewers.where(in_trouble(viewers)).groupBy(
        f.coalesce(column(viewers, "blame", "string"), f.lit("unknown")).alias("blame")
    )
    counted = troubled.agg(f.count("*").alias("viewers"), f.sum(trouble_ms(viewers)).alias("trouble_ms"))
    return rows_of(counted.orderBy(f.desc("viewers"), "blame").limit(MOST_WORDS))


def drops(sessions: DataFrame) -> list[Row]:
    """Return what viewers were not sent: (class, accepted_messages, dropped_messages), in the order of the classes."""
    viewers = viewers_of(sessions)
    sums = viewers.agg(
        *(
            _sum(viewers, f"{what}_messages_{name}").alias(f"{what}_{name}")
            for what in ("accepted", "dropped")
            for name in CLASS_NAMES
        )
    ).first()
    if sums is None:
        return []
    return [
        {
            "class": name,
            "accepted_messages": int(sums[f"accepted_{name}"]),
            "dropped_messages": int(sums[f"dropped_{name}"]),
        }
        for name in CLASS_NAMES
    ]


def picture_shares(sessions: DataFrame) -> list[Row]:
    """Return how the share of the pictures is spread: (least, viewers), from all to none; least None: not known."""
    viewers = viewers_of(sessions)
    share = column(viewers, "picture_share")
    least = f.coalesce(*(f.when(share >= mark, f.lit(mark)) for mark in PICTURE_CLASSES))
    counted = viewers.where(stayed(viewers)).groupBy(least.alias("least")).agg(f.count("*").alias("viewers"))
    return rows_of(counted.orderBy(f.desc_nulls_last("least")))


def stayed(viewers: DataFrame) -> Column:
    """Return whether a viewer was there for long enough to enter distributions over viewers."""
    return f.coalesce(column(viewers, "duration_s") >= LEAST_STAY_S, f.lit(False))


def delay_curves(sessions: DataFrame) -> dict[str, Sequence[float | None]]:
    """Return for each quantile of a viewer's delay its distribution over the viewers that stayed; {}: nobody did."""
    viewers = viewers_of(sessions)
    viewers = viewers.where(stayed(viewers))
    names = ("delay_p50_ms", "delay_p95_ms", "delay_p99_ms")
    shares = [float(share) for share in SHARES]
    row = viewers.agg(
        *(f.percentile_approx(column(viewers, name), shares, _ACCURACY).alias(name) for name in names)
    ).first()
    return {} if row is None else {name: list(row[name]) for name in names if row[name] is not None}


_WORST_COLUMNS: Final = (
    "node", "conn_id", "peer_ip", "app", "stream", "user_agent", "opened_at", "duration_s", "close_reason",
    "closed_by", "worst_state", "blame", "time_overloaded_ms", "time_soft_ms", "time_hard_ms", "dropped_messages",
    "dropped_bytes", "picture_share", "line_of_stream", "delay_p99_ms", "stall_ratio", "returns_to_live",
    "input_pauses",
)  # fmt: skip


def worst(sessions: DataFrame) -> Cut:
    """Return the viewers that were worst off, with how many were in trouble at all.

    Those that were disconnected for being slow come first, then by the time they were not READY, then by their delay.
    """
    viewers = viewers_of(sessions)
    troubled = viewers.where(in_trouble(viewers))
    chosen = troubled.select(
        *(f.col(name) for name in _WORST_COLUMNS if name in troubled.columns),
        trouble_ms(troubled).alias("trouble_ms"),
        column(troubled, "close_reason", "string").isin(*SLOW_ENDS).alias("cut_slow"),
    )
    return first_rows(
        chosen,
        [
            f.desc_nulls_last("cut_slow"),
            f.desc("trouble_ms"),
            f.desc_nulls_last(column(chosen, "delay_p99_ms")),
            f.asc("node"),
            f.asc("conn_id"),
        ],
    )


def first_rows(frame: DataFrame, order: Sequence[Column], most: int = MOST_ROWS) -> Cut:
    """Return the first rows in that order, and how many there are in all."""
    return Cut(rows_of(frame.orderBy(*order).limit(most)), frame.count())


def read(spark: SparkSession, path: str) -> DataFrame | None:
    """Return a table of the jobs; None: there is none at that place.

    Raises:
        Exception: what Spark raises where there is one that cannot be read.
    """
    from pyspark.errors import AnalysisException

    try:
        return spark.read.parquet(path)
    except AnalysisException as error:
        if error.getCondition() in {"PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"}:
            return None
        raise


def has(frame: DataFrame, *names: str) -> bool:
    """Return whether a table has all these columns."""
    fields: Sequence[StructField] = frame.schema.fields
    return set(names) <= {item.name for item in fields}
