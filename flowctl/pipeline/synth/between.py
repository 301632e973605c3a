"""Synthetic `flow_events` and `flow_samples`: what happened between the begin and the end of connections.

Events are the script of the connection's kind, each at its place in time; those of servers are a few rows. Samples are
differences of the clocks that closes are made of (`whole.clocks`), so that they add up to the close.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from flowctl.pipeline.synth.people import DOWN_S, Cast, SynthOptions
from flowctl.pipeline.synth.whole import (
    alive,
    clocks,
    delay_ms,
    event_at,
    identity,
    messages,
    octets,
    rate_per_us,
    size_of,
    told,
)
from flowctl.pipeline.synth.worlds import HARDENS, HITS, LEAVES, RETURNS, SOFTENS
from flowctl.telemetry.schema import CLASS_NAMES, FLOW_EVENTS, FLOW_SAMPLES, EventName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SOFT_AGE_MS = 2000.0
HARD_BYTES = 8 << 20
SEQUENCE_BITS = 6
"""A connection has fewer events than 64."""


def events(frame: DataFrame, options: SynthOptions) -> DataFrame:
    """Return `flow_events` of connections (see `people.connections`), with ``date`` and ``hour``."""
    col = f.col
    script = f.when(col("startup_us").isNotNull() | (f.size("limits") > 0), col("script"))
    frame = frame.withColumns({"script": script}).select("*", f.posexplode("script").alias("step_number", "step"))
    frame = frame.withColumn("seq", f.shiftleft("number", SEQUENCE_BITS) + col("step_number"))
    step = col("step")
    at = f.when(col("refused"), 0).otherwise(event_at(step)).cast("bigint")
    frame = clocks(alive(frame.withColumn("at_us", at), options), "at_us", "now")
    place = step["place"]
    soft = f.when(col("soft_us") > 0, col("soft_us") - f.when(place == HARDENS, col("hard_us")).otherwise(0))
    before = col("leave_us") + f.when(step["episode"] == 0, col("lead_us")).otherwise(0)
    lasted = (
        f.when(place == LEAVES, before)
        .when(place == SOFTENS, col("over_us"))
        .when(place == RETURNS, f.coalesce(soft, col("over_us")))
        .when((place == HARDENS) & (col("episodes") == 0), col("at_us"))
        .when(place == HARDENS, f.coalesce(soft, col("over_us")))
    )
    trouble = f.when(place == RETURNS, (col("over_us") + col("soft_us")) / 1000)
    dropped = step["event"] == EventName.DROPPED.value
    lost = [messages("now", "dropped", item) for item in ("key", "inter", "audio")]
    count = sum(lost, f.lit(0)) / f.greatest(f.lit(1), col("now_episodes") + 1)
    size = octets("now", "dropped") / f.greatest(f.lit(1), col("now_episodes") + 1)
    columns = identity(col("at_us"), options) | {
        "conn_id": f.when(col("refused"), 0).otherwise(col("conn_id")),
        "event": f.when(col("refused"), EventName.CONN_REFUSED.value).otherwise(step["event"]),
        "state_from": step["old"],
        "state_to": step["new"],
        "state_ms": lasted / 1000,
        "cause": step["cause"],
        "axis": f.when(place == HITS, col("hit.axis")).otherwise(step["axis"]),
        "value": f.when(place == HITS, col("hit.value")).when(place == SOFTENS, SOFT_AGE_MS + 20)
        .when(place == HARDENS, HARD_BYTES + 3000.0).when(dropped, col("now_soft") / 1000).otherwise(trouble),
        "limit": f.when(place == HITS, col("hit.limit")).when(place == SOFTENS, SOFT_AGE_MS)
        .when(place == HARDENS, float(HARD_BYTES)),
        "queued_age_ms": f.when(place == SOFTENS, SOFT_AGE_MS + 20),
        "queued_bytes": f.when(place == HARDENS, HARD_BYTES + 3000),
        "dropped_messages": f.when(dropped, count),
        "dropped_bytes": f.when(dropped, size),
        "sent_bytes": f.when(~col("refused"), octets("now", "sent")),
        "reason": f.when(col("refused"), col("hit.axis")).when(dropped, "thinned from the queue"),
        "count": f.lit(1),
    }  # fmt: skip
    return told(frame, FLOW_EVENTS, columns)


def server_events(spark: SparkSession, options: SynthOptions, cast: Cast) -> DataFrame:
    """Return what servers say of themselves: their start, and the start after they died."""
    detail = json.dumps(
        {
            "limits": {"messages": None, "bytes": f"{HARD_BYTES >> 1} {HARD_BYTES}", "age": "2s 8s"},
            "policy": "thin",
            "made_by": "flowctl analyze synth",
        }
    )
    start = options.start_s - 60
    nodes = {f"node-{number + 1}": (start,) for number in range(options.nodes)}
    for world in (crowd.world for crowd in cast.crowds if crowd.world.node):
        again = (options.middle_us // 1_000_000 + DOWN_S,) if world.dies else ()
        nodes[world.node] = (start, *again)
    rows = [
        (dt.datetime.fromtimestamp(at, dt.UTC), node, -1 - number, 0, EventName.SERVER_STARTED.value, detail, 1)
        for node, starts in nodes.items()
        for number, at in enumerate(starts)
    ]
    names = ("ts", "node", "seq", "conn_id", "event", "detail", "count")
    types = ("timestamp", "string", "bigint", "bigint", "string", "string", "bigint")
    made = spark.createDataFrame(rows, ", ".join(f"`{name}` {kind}" for name, kind in zip(names, types, strict=True)))
    return told(made, FLOW_EVENTS, {name: f.col(name) for name in names})


def samples(frame: DataFrame, options: SynthOptions) -> DataFrame:
    """Return `flow_samples` of connections that play, one per interval and a shorter one at the end."""
    col, every = f.col, options.interval_us
    frame = frame.where((col("role") == "play") & col("startup_us").isNotNull())
    frame = frame.withColumn("sample", f.explode(f.sequence(f.lit(1), f.ceil(col("duration_us") / every))))
    frame = frame.withColumn("at_us", f.least(col("duration_us"), col("sample") * every))
    frame = alive(frame, options).withColumn("then_us", (col("sample") - 1) * every)
    frame = clocks(clocks(frame, "at_us", "now"), "then_us", "then")
    frame = frame.withColumn("seq", f.shiftleft("number", 22) + col("sample"))
    last = col("cut") & (col("now_episodes") == col("episodes")) & (col("episodes") > 0)
    rest = f.when(last, col("slice_us")).otherwise(col("now_rest"))
    soft = (col("soft_us") > 0) & (rest > col("leave_us") + col("over_us"))
    over = ~soft & (col("slice_us") > 0) & (rest > col("leave_us"))
    hard = col("now_hard") > 0
    behind = f.when(soft | hard, 2).when(over, 1).otherwise(0)
    frame = frame.withColumn("behind", behind).withColumn(
        "state", f.when(hard, "HARD_LIMIT").when(soft, "SOFT_LIMIT").when(over, "OVERLOADED").otherwise("READY")
    )
    trouble = col("behind") > 0
    waits = f.when(soft | hard, delay_ms(2)).when(over, delay_ms(1)).otherwise(0.0)
    span = col("at_us") - col("then_us")
    by_class = {
        f"{what}_{unit}_{item}": (messages("now", what, item) - messages("then", what, item))
        * (size_of(item) if unit == "bytes" else f.lit(1))
        for what in ("accepted", "sent", "dropped")
        for unit in ("messages", "bytes")
        for item in CLASS_NAMES
    }
    strained = col("strained") & trouble
    lost, whole = (col(f"now_{name}") - col(f"then_{name}") for name in ("lost", "whole"))
    columns = identity(col("at_us"), options) | by_class | {
        "interval_ms": span / 1000,
        "state": col("state"),
        "picture_share": 1 - lost / f.greatest(f.lit(1), whole),
        "queued_bytes": waits * 1000 * rate_per_us(),
        "queued_messages": waits * 0.073,
        "queued_age_ms": waits,
        "stalled_ms": f.when(col("stalls") & soft, (rest - col("leave_us") - col("over_us")) / 1000).otherwise(0),
        "drain_bytes_per_s": f.when(trouble, 1e6 * (octets("now", "sent") - octets("then", "sent")) / span),
        "thread_busy": f.when(strained, 0.97).otherwise(0.2 + 0.1 * col("luck")),
        "strained": strained,
        "input_paused": f.lit(False),
        "rtt_us": f.when(trouble, col("far") * 12_000),
        "unsent_bytes": f.when(trouble, 64_000),
        "viewer_delay_ms": f.when(soft | hard, delay_ms(2)).when(over, delay_ms(1)).otherwise(delay_ms(0)),
        "sent_bytes": octets("now", "sent") - octets("then", "sent"),
    }  # fmt: skip
    return told(frame, FLOW_SAMPLES, columns)
