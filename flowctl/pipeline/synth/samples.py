"""Synthetic samples: one row per connection that plays and interval, in step with its synthetic events.

The state at the end of an interval is that of the place in time that the events give the connection. Figures by
class follow the stream's rate and the viewer's link; they are not the sums of `conn_closed` to the last message,
because those are rounded once and these once per interval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from flowctl.pipeline.synth.kinds import KINDS
from flowctl.pipeline.synth.plan import Cast, SynthOptions
from flowctl.pipeline.synth.steps import HEAD_MS, SLOTS
from flowctl.pipeline.synth.visits import CONNECTION_BITS, bytes_per_second, chance, connection_times, visits
from flowctl.telemetry.schema import CONN_NUMBER_BITS, FLOW_SAMPLES, SPARK_TYPES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MOST_SAMPLES_BITS = 24
"""Samples of one connection: two months of one a quarter of a second."""
_SHARES = {"key": 0.25, "inter": 0.67, "audio": 0.08}
"""Of the stream's octets, by class."""
_PER_S = {"key": 0.5, "inter": 29.5, "audio": 43.0}


def _states(spark: SparkSession) -> DataFrame:
    """Return one row per connection of every variant that plays: key, connection, its times, and its edges in order."""
    rows = []
    for number, kind in enumerate(KINDS):
        slot = 0
        for variant in kind.variants:
            edges = [(step.place, step.new) for step in variant.steps if step.event == "state_changed"]
            for _ in range(variant.slots if variant.role == "play" else 0):
                rows += [
                    (
                        number * SLOTS + slot, connection, variant.connections, variant.least_s, variant.most_s,
                        variant.gap_s, variant.link, edges,
                    )
                    for connection in range(variant.connections)
                ]  # fmt: skip
                slot += 1
            slot += 0 if variant.role == "play" else variant.slots
    return spark.createDataFrame(
        rows,
        "key int, connection int, connections int, least_s double, most_s double, gap_s double, link double, "
        "edges array<struct<place: double, state: string>>",
    )


def samples(spark: SparkSession, options: SynthOptions, cast: Cast) -> DataFrame:
    """Return the samples.

    Returns:
        The columns of `FLOW_SAMPLES`, and date and hour of the visit's begin; one row per connection and interval, the
        last one shorter.
    """
    interval_us = int((options.samples_s or 1.0) * 1e6)
    frame = visits(spark, options, cast).join(f.broadcast(_states(spark)), "key")
    frame = bytes_per_second(connection_times(frame, options, cast))
    count = f.ceil(f.col("length_us") / interval_us).cast("int")
    frame = frame.withColumn("number", f.explode(f.sequence(f.lit(1), f.greatest(f.lit(1), count))))
    end = f.least(f.col("length_us"), f.col("number").cast("bigint") * interval_us)
    frame = frame.withColumn("end_us", end).withColumn(
        "span_us", end - (f.col("number").cast("bigint") - 1) * interval_us
    )
    place = (f.col("end_us") - HEAD_MS * 1000) / f.greatest(f.lit(1.0), f.col("length_us") - HEAD_MS * 1000)
    past = f.filter("edges", lambda edge: edge["place"] <= place)
    frame = frame.withColumn("state", f.coalesce(f.get(past, f.size(past) - 1)["state"], f.lit("READY")))
    columns = {column.name: f.lit(None) for column in FLOW_SAMPLES.columns} | _columns(options) | _by_class()
    named = [columns[column.name].cast(SPARK_TYPES[column.kind]).alias(column.name) for column in FLOW_SAMPLES.columns]
    begun = f.timestamp_micros("begun_us")
    return frame.select(*named, f.to_date(begun).alias("date"), f.date_format(begun, "HH").alias("hour"))


def _columns(options: SynthOptions) -> dict[str, Column]:
    """Return who, when, and how it stood."""
    number = f.shiftleft(f.col("visit"), CONNECTION_BITS) + f.col("connection")
    first = f.shiftleft(f.floor(f.col("begun_us") / 86_400_000_000) * 86_400, CONN_NUMBER_BITS)
    trouble = f.col("state") != "READY"
    luck = chance(options, "sample", "visit", "connection", "number")
    behind = f.when(f.col("state") == "OVERLOADED", 800.0).when(trouble, 3000.0) * (0.5 + luck)
    waiting = f.coalesce(behind, f.lit(0.0))
    return {
        "ts": f.timestamp_micros(f.col("opened_us") + f.col("end_us")),
        "node": f.col("node"),
        "seq": f.shiftleft(number, MOST_SAMPLES_BITS) + f.col("number"),
        "conn_id": first + number,
        "peer_ip": f.col("peer_ip"),
        "peer_port": f.col("peer_port") + f.col("connection"),
        "role": f.lit("play"),
        "app": f.lit("live"),
        "stream": f.concat(f.lit("stream"), f.col("stream_number").cast("string")),
        "interval_ms": f.col("span_us") / 1000,
        "state": f.col("state"),
        "step": f.lit(None).cast("string"),
        "picture_share": _sent_share(),
        "queued_bytes": waiting * f.col("bytes_per_s") / 1000,
        "queued_messages": waiting * 0.073,
        "queued_age_ms": waiting,
        "stalled_ms": f.when(trouble & (f.col("link") == 0), waiting).otherwise(0),
        "drain_bytes_per_s": f.when(trouble, f.col("bytes_per_s") * f.col("link")),
        "thread_busy": 0.2 + luck * 0.1,
        "strained": f.lit(False),
        "input_paused": f.lit(False),
        "rtt_us": f.when(trouble, f.col("far") * 12_000),
        "unsent_bytes": f.when(trouble, f.col("bytes_per_s") * 0.1),
        "viewer_delay_ms": waiting + f.col("far") * 30 + luck * 40,
        "sent_bytes": _sent_share() * f.col("bytes_per_s") * f.col("span_us") / 1e6,
    }


def _sent_share() -> Column:
    """Return which part of what was published was sent: all of it but in trouble."""
    return f.when(f.col("state") == "READY", 1.0).otherwise(f.col("link"))


def _by_class() -> dict[str, Column]:
    """Return accepted, sent and dropped by class; what is dropped are inter frames."""
    found: dict[str, Column] = {}
    seconds = f.col("span_us") / 1e6
    for column in FLOW_SAMPLES.names:
        what, _, rest = column.partition("_")
        unit, _, name = rest.partition("_")
        if what not in ("accepted", "sent", "dropped") or unit not in ("messages", "bytes") or not name:
            continue
        if name not in _SHARES:
            found[column] = f.lit(0)
            continue
        whole = _PER_S[name] * seconds if unit == "messages" else _SHARES[name] * f.col("bytes_per_s") * seconds
        lost = (1 - _sent_share()) if name == "inter" else f.lit(0.0)
        # The three are rounded so that accepted = sent + dropped holds where nothing is queued.
        accepted, dropped = whole.cast("bigint"), (whole * lost).cast("bigint")
        found[column] = {"accepted": accepted, "dropped": dropped, "sent": accepted - dropped}[what]
    return found
