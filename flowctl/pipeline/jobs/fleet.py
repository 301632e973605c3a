"""``fleet``: how each stream fared on each node, minute by minute, and how each subnet did over the whole time.

Theory of operation. Two aggregations follow each other. The first makes *viewer minutes*: one row per viewer, stream
and minute, of the samples in it. The second sums viewer minutes up, by stream, node and minute, and by subnet. So a
quantile of delay is one over viewers (each counts once with its mean), and not over samples, where who was sampled more
often would count more; and a histogram of viewer minutes has small counts (see `delays`).

Without samples, viewer minutes are made of sessions: each is spread evenly over the minutes it lasted, its states,
drops and delay with it. That is right over a session's time and blurred within it; `source` says which it was.

Joins are plays that started in the minute, leaves are viewers whose connection ended in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.pipeline.jobs.sessions import sessions
from flowctl.pipeline.spark.session import partitions_for
from flowctl.pipeline.tables import delays
from flowctl.pipeline.tables.accounts import JobResult
from flowctl.pipeline.tables.addresses import digits, subnet
from flowctl.pipeline.tables.io import read_optional, read_table, write_quarantine, write_table
from flowctl.telemetry.schema import CLASS_NAMES, VIEWING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MAX_MINUTES: Final = 60 * 24 * 31
"""Over which a session is spread: a month; what lasted longer is cut there."""

PICTURE_MARKS: Final = (95, 80, 50)
"""Percent of the pictures: how many viewers got less than each is counted."""
_STATES: Final = (("ready", "READY"), ("overloaded", "OVERLOADED"), ("soft", "SOFT_LIMIT"), ("hard", "HARD_LIMIT"))

_FIGURES: Final[dict[str, str]] = {
    "viewers": "double",
    "viewers_seen": "bigint",
    **{f"share_{name}": "double" for name, _ in _STATES},
    **{f"delay_{name}_ms": "double" for name in ("p50", "p95", "p99", "max")},
    "accepted_messages": "bigint",
    "dropped_messages": "bigint",
    "drop_ratio": "double",
    "picture_share": "double",
    "pictures_known": "bigint",
    **{f"pictures_below_{mark}": "bigint" for mark in PICTURE_MARKS},
    "sent_bytes": "bigint",
    "joins": "bigint",
    "leaves": "bigint",
}
STREAM_COLUMNS: Final[dict[str, str]] = {
    "app": "string",
    "stream": "string",
    "node": "string",
    "minute": "timestamp",
    **_FIGURES,
    "source": "string",
}
"""Contract of ``fleet_streams``. Grain: one stream, node and minute. `viewers`: mean by time."""
SUBNET_COLUMNS: Final[dict[str, str]] = {"subnet": "string", **_FIGURES, "source": "string"}
"""Contract of ``fleet_subnets``. Grain: one /24 or /48. `viewers`: mean over the minutes in which there was one."""


def _exact(value: Column) -> Column:
    """Add up in whole thousandths: a sum of floats depends on the order in which tasks bring them."""
    return f.sum(f.round(value * 1e3).cast("bigint")) / 1e3


def viewer_minutes(samples: DataFrame) -> DataFrame:
    """Sum up the samples of each viewer and minute.

    Args:
        samples: rows of `flow_samples` that passed the checks.

    Returns:
        One row per app, stream, node, minute, conn_id and peer_ip: ms of each state (``ms``, ``ready_ms`` ...),
        accepted, dropped (messages), sent_bytes, delay_ms (mean), delay_max_ms and picture_share (mean).
    """
    accepted = " + ".join(f"accepted_messages_{name}" for name in CLASS_NAMES)
    dropped = " + ".join(f"dropped_messages_{name}" for name in CLASS_NAMES)
    return (
        samples.filter(f.col("role").isin(*VIEWING))
        # Every interval counts in the minute in which it ends.
        .groupBy("app", "stream", "node", f.date_trunc("minute", "ts").alias("minute"), "conn_id", "peer_ip")
        .agg(
            _exact(f.col("interval_ms")).alias("ms"),
            *(
                _exact(f.when(f.col("state") == state, f.col("interval_ms")).otherwise(0.0)).alias(f"{name}_ms")
                for name, state in _STATES
            ),
            f.expr(f"sum({accepted})").alias("accepted"),
            f.expr(f"sum({dropped})").alias("dropped"),
            f.sum("sent_bytes").alias("sent_bytes"),
            (_exact(f.col("viewer_delay_ms")) / f.count("viewer_delay_ms")).alias("delay_ms"),
            f.max("viewer_delay_ms").alias("delay_max_ms"),
            _mean("picture_share", "interval_ms"),
        )
    )


def _mean(name: str, weight: str) -> Column:
    """Return the mean by weight of a column; null where it is null throughout."""
    known = f.when(f.col(name).isNotNull(), f.col(weight))
    return f.try_divide(_exact(f.col(name) * f.col(weight)), _exact(known)).alias(name)


def spread_sessions(table: DataFrame) -> DataFrame:
    """Make viewer minutes of sessions, each spread evenly over the minutes it lasted.

    Args:
        table: sessions, see `flowctl.pipeline.jobs.sessions.COLUMNS`.

    Returns:
        As `viewer_minutes`.
    """
    accepted = " + ".join(f"coalesce(accepted_messages_{name}, 0L)" for name in CLASS_NAMES)
    watched = table.filter(f.col("role").isin(*VIEWING) & f.col("opened_at").isNotNull())
    minutes = watched.select(
        "app", "stream", "node", "conn_id", "peer_ip", "opened_at",
        (f.unix_micros("opened_at") / 1e3 + f.col("duration_s") * 1e3).alias("end_ms"),
        (f.unix_micros("opened_at") / 1e3).alias("begin_ms"),
        f.greatest(f.col("duration_s") * 1e3, f.lit(1.0)).alias("all_ms"),
        *(f.col(f"time_{name}_ms") for name, _ in _STATES),
        f.expr(accepted).alias("all_accepted"), "dropped_messages", f.col("sent_bytes").alias("all_sent"),
        f.col("delay_p50_ms").alias("delay_ms"), "delay_max_ms", "picture_share",
        f.explode(
            f.expr(
                "sequence(unix_seconds(opened_at) DIV 60, least(unix_seconds(opened_at) DIV 60 "
                f"+ {MAX_MINUTES}L, (unix_seconds(opened_at) + CAST(duration_s AS BIGINT)) DIV 60))"
            )
        ).alias("number"),
    )  # fmt: skip
    overlap = f.greatest(
        f.lit(0.0),
        f.least(f.col("end_ms"), (f.col("number") + 1) * 60e3) - f.greatest("begin_ms", f.col("number") * 60e3),
    )
    part = f.col("ms") / f.col("all_ms")
    return minutes.withColumn("ms", overlap).select(
        "app", "stream", "node", f.timestamp_seconds(f.col("number") * 60).alias("minute"), "conn_id", "peer_ip", "ms",
        *((f.col(f"time_{name}_ms") * part).alias(f"{name}_ms") for name, _ in _STATES),
        (f.col("all_accepted") * part).alias("accepted"),
        (f.col("dropped_messages") * part).alias("dropped"),
        (f.col("all_sent") * part).alias("sent_bytes"),
        "delay_ms",
        "delay_max_ms",
        "picture_share",
    )  # fmt: skip


def moves(events: DataFrame) -> DataFrame:
    """Count who came and went.

    Args:
        events: rows of `flow_events` that passed the checks.

    Returns:
        One row per app, stream, node, minute and peer_ip: joins, leaves.
    """
    came, went = f.col("event") == "play_started", f.col("event") == "conn_closed"
    return (
        events.filter((came | went) & f.col("role").isin(*VIEWING))
        .groupBy("app", "stream", "node", f.date_trunc("minute", "ts").alias("minute"), "peer_ip")
        .agg(f.count_if(came).alias("joins"), f.count_if(went).alias("leaves"))
    )


def _sums() -> list[Column]:
    return [
        _exact(f.col("ms")).alias("ms"),
        *(_exact(f.col(f"{name}_ms")).alias(f"{name}_ms") for name, _ in _STATES),
        _exact(f.col("accepted")).cast("bigint").alias("accepted_messages"),
        _exact(f.col("dropped")).cast("bigint").alias("dropped_messages"),
        _exact(f.col("sent_bytes")).cast("bigint").alias("sent_bytes"),
        f.max("delay_max_ms").alias("delay_max_ms"),
        _mean("picture_share", "ms"),
        f.count("picture_share").alias("pictures_known"),
        *(f.count_if(f.col("picture_share") < mark / 100).alias(f"pictures_below_{mark}") for mark in PICTURE_MARKS),
        *delays.words("d"),
    ]


def _figures(frame: DataFrame, columns: dict[str, str], source: str) -> DataFrame:
    """Turn sums into the columns of the contract."""
    states = " + ".join(f"{name}_ms" for name, _ in _STATES)
    frame = frame.withColumns({name: f.expr(text) for name, text in delays.totals("d").items()})
    frame = frame.withColumns(
        {
            **{
                f"share_{name}": f.expr(f"CASE WHEN {states} > 0 THEN {name}_ms / ({states}) END")
                for name, _ in _STATES
            },
            **{
                f"delay_{name}_ms": f.expr(delays.quantile_sql("d", share, "delay_max_ms"))
                for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
            },
            "drop_ratio": f.expr("CASE WHEN accepted_messages > 0 THEN dropped_messages / accepted_messages END"),
            **{
                name: f.coalesce(name, f.lit(0))
                for name in ("pictures_known", *(f"pictures_below_{mark}" for mark in PICTURE_MARKS))
            },
            "joins": f.coalesce("joins", f.lit(0)),
            "leaves": f.coalesce("leaves", f.lit(0)),
            "viewers": f.coalesce("viewers", f.lit(0.0)),
            "viewers_seen": f.coalesce("viewers_seen", f.lit(0)),
            "source": f.lit(source),
        }
    )
    return frame.select(*(f.col(name).cast(kind).alias(name) for name, kind in columns.items()))


def by_stream(minutes: DataFrame, moved: DataFrame, source: str) -> DataFrame:
    """Sum up viewer minutes by stream, node and minute.

    Args:
        minutes: see `viewer_minutes`.
        moved: see `moves`.
        source: ``samples`` or ``sessions``: what the minutes were made of.

    Returns:
        `STREAM_COLUMNS`.
    """
    keys = ["app", "stream", "node", "minute"]
    summed = (
        minutes.select("*", *delays.prepared("delay_ms", "d"))
        .groupBy(*keys)
        .agg((_exact(f.col("ms")) / 60e3).alias("viewers"), f.count("*").alias("viewers_seen"), *_sums())
    )
    counted = moved.groupBy(*keys).agg(f.sum("joins").alias("joins"), f.sum("leaves").alias("leaves"))
    # Minutes without a sample may have a leave, and the other way round.
    return _figures(_full_join(summed, counted, keys), STREAM_COLUMNS, source)


def _full_join(left: DataFrame, right: DataFrame, keys: list[str]) -> DataFrame:
    """Join so that what is missing on one side is kept, and a null key meets a null key."""
    renamed = right.select(
        *(f.col(name).alias(f"r_{name}") for name in keys), *(n for n in right.columns if n not in keys)
    )
    same = f.lit(True)
    for name in keys:
        same &= f.col(name).eqNullSafe(f.col(f"r_{name}"))
    joined = left.join(renamed, same, "full")
    there = f.col("viewers").isNotNull()
    return joined.withColumns({name: f.when(there, f.col(name)).otherwise(f.col(f"r_{name}")) for name in keys}).drop(
        *(f"r_{name}" for name in keys)
    )


def by_subnet(minutes: DataFrame, moved: DataFrame, source: str) -> DataFrame:
    """Sum up viewer minutes by subnet: /24 of IPv4, /48 of IPv6; addresses that are hashes are one row, subnet null.

    Args:
        minutes: see `viewer_minutes`.
        moved: see `moves`.
        source: see `by_stream`.

    Returns:
        `SUBNET_COLUMNS`.
    """
    # The name of the network is made once per viewer, not once per minute.
    viewers = minutes.groupBy("peer_ip", "node", "conn_id").agg(*_viewer_sums())
    network = subnet(f.col("peer_ip"), digits(f.col("peer_ip"))).alias("subnet")
    summed = (
        viewers.select(
            network, *(name for name in viewers.columns if name != "peer_ip"), *delays.prepared("delay_ms", "d")
        )
        .groupBy("subnet")
        .agg(f.count("*").alias("viewers_seen"), *_sums())
    )
    counted = (
        moved.groupBy("peer_ip").agg(f.sum("joins").alias("j"), f.sum("leaves").alias("l"))
        .select(network, "j", "l").groupBy("subnet").agg(f.sum("j").alias("joins"), f.sum("l").alias("leaves"))
    )  # fmt: skip
    busy = minutes.select("peer_ip", "minute").distinct().select(network, "minute").distinct()
    spans = busy.groupBy("subnet").agg((f.count("*") * 60e3).alias("span_ms"))
    summed = summed.join(spans.withColumnRenamed("subnet", "n"), f.col("subnet").eqNullSafe(f.col("n")), "left").drop(
        "n"
    )
    summed = summed.withColumn("viewers", f.col("ms") / f.col("span_ms"))
    return _figures(_full_join(summed, counted, ["subnet"]), SUBNET_COLUMNS, source)


def _viewer_sums() -> list[Column]:
    return [
        *(_exact(f.col(name)).alias(name) for name in ("ms", *(f"{name}_ms" for name, _ in _STATES))),
        *(_exact(f.col(name)).alias(name) for name in ("accepted", "dropped", "sent_bytes")),
        (_exact(f.col("delay_ms") * f.col("ms")) / _exact(f.when(f.col("delay_ms").isNotNull(), f.col("ms")))).alias(
            "delay_ms"
        ),
        f.max("delay_max_ms").alias("delay_max_ms"),
        _mean("picture_share", "ms"),
    ]


def run(spark: SparkSession, events: str, out: str, options: None = None) -> JobResult:
    """Read events and samples, and write ``fleet_streams``, ``fleet_subnets`` and what was put aside.

    Args:
        spark: session.
        events: folder that ``--events`` named.
        out: folder of the results.
        options: there are none.

    Raises:
        ConfigError: there are no events.
    """
    del options
    source = read_table(spark, events, "flow_events")
    inputs = [source]
    moved = moves(source.frame)
    sampled = read_optional(spark, events, "flow_samples")
    inputs += [] if sampled is None else [sampled]
    if sampled is not None and not sampled.absent:
        minutes, made_of = viewer_minutes(sampled.frame), "samples"
    else:
        minutes, made_of = spread_sessions(sessions(source.frame)), "sessions"
    result = JobResult(name="fleet", accounts=[item.accounts for item in inputs])
    with partitions_for(spark, sum(item.size_bytes for item in inputs)):
        streams = by_stream(minutes, moved, made_of)
        result.outputs["fleet_streams"] = write_table(streams, f"{out.rstrip('/')}/fleet_streams")
        subnets = by_subnet(minutes, moved, made_of)
        result.outputs["fleet_subnets"] = write_table(subnets, f"{out.rstrip('/')}/fleet_subnets")
    for item in inputs:
        result.outputs |= write_quarantine(spark, item, out)
    result.summary = _summary(spark, result.outputs, made_of)
    return result


def _summary(spark: SparkSession, outputs: dict[str, str], made_of: str) -> dict[str, object]:
    streams = spark.read.parquet(outputs["fleet_streams"])
    at_once = streams.groupBy("minute").agg(f.sum("viewers").alias("viewers"))
    most = at_once.agg(f.max("viewers")).first()
    names = streams.select("app", "stream").distinct().count()
    return {
        "streams": names,
        "subnets": spark.read.parquet(outputs["fleet_subnets"]).count(),
        "most_viewers": round(most[0] or 0.0, 1) if most is not None else 0.0,
        "source": made_of,
    }
