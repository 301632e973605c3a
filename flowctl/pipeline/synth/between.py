"""Synthetic `flow_events` and `flow_samples`: what happened between the begin and the end of connections.

Events are the script of the connection's kind, each at its place in time; those of servers are a few rows. Samples are
differences of the clocks that closes are made of (`whole.clocks`), so that they add up to the close.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from flowctl.pipeline.synth.people import DOWN_S, Cast, SynthOptions
from flowctl.pipeline.synth.whole import (
    alive,
    at_place,
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
from flowctl.telemetry.schema import CLASS_NAMES, FLOW_EVENTS, FLOW_SAMPLES, EventName

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SOFT_AGE_MS = 2000.0
HARD_BYTES = 8 << 20
SEQUENCE_BITS = 6
"""A connection has fewer events than 64."""


def events(frame: DataFrame, options: SynthOptions) -> DataFrame:
    """Return `flow_events` of connections (see `people.connections`), with ``date`` and ``hour``."""
    col, step = f.col, f.col("step")
    frame = frame.where(col("startup_us").isNotNull() | (f.size("limits") > 0))
    frame = frame.select("*", f.posexplode("script").alias("step_number", "step")).withColumns(
        {
            "seq": f.shiftleft("number", SEQUENCE_BITS) + col("step_number"),
            "at_us": f.when(col("refused"), 0).otherwise(event_at(step)).cast("bigint"),
            "conn_id": f.when(col("refused"), 0).otherwise(col("conn_id")),
        }
    )
    frame = clocks(alive(frame, options), "at_us", "now")
    at = partial(at_place, step)
    in_ready = col("leave_us") + f.when(step["episode"] == 0, col("lead_us")).otherwise(0)
    in_trouble = f.when(col("soft_us") > 0, col("soft_us")).otherwise(col("over_us"))
    to_hard = f.when(col("soft_us") > 0, col("soft_us") - col("hard_us")).otherwise(col("over_us"))
    to_hard = f.when(col("episodes") == 0, col("at_us")).otherwise(to_hard)
    share = f.greatest(f.lit(1), col("now_episodes") + 1)  # of what was dropped so far, the last episode's
    columns = identity(options) | {
        "event": f.when(col("refused"), EventName.CONN_REFUSED.value).otherwise(step["event"]),
        **{name: step[name] for name in ("state_from", "state_to", "cause")},
        "state_ms": at(leaves=in_ready, softens=col("over_us"), returns=in_trouble, hardens=to_hard) / 1000,
        "axis": f.coalesce(at(hits=col("hit.axis")), step["axis"]),
        "value": at(
            hits=col("hit.value"),
            softens=SOFT_AGE_MS + 20,
            hardens=HARD_BYTES + 3000.0,
            drops=col("now_soft") / 1000,
            returns=(col("over_us") + col("soft_us")) / 1000,
        ),
        "limit": at(hits=col("hit.limit"), softens=SOFT_AGE_MS, hardens=float(HARD_BYTES)),
        "queued_age_ms": at(softens=SOFT_AGE_MS + 20),
        "queued_bytes": at(hardens=HARD_BYTES + 3000),
        "dropped_messages": at(drops=messages("now", "dropped", "key", "inter", "audio") / share),
        "dropped_bytes": at(drops=octets("now", "dropped") / share),
        "sent_bytes": f.when(~col("refused"), octets("now", "sent")),
        "reason": f.coalesce(f.when(col("refused"), col("hit.axis")), at(drops=f.lit("thinned from the queue"))),
        "count": 1,
    }
    return told(frame, FLOW_EVENTS, columns)


def server_events(spark: SparkSession, options: SynthOptions, cast: Cast) -> DataFrame:
    """Return what servers say of themselves: their start, and the start after they died."""
    limits = {"messages": None, "bytes": f"{HARD_BYTES >> 1} {HARD_BYTES}", "age": "2s 8s"}
    worlds = [crowd.world for crowd in cast.crowds]
    nodes = [f"node-{number + 1}" for number in range(options.nodes)] + [world.node for world in worlds if world.node]
    starts = [(node, options.start_s - 60) for node in nodes]
    starts += [(world.node, options.middle_us // 1_000_000 + DOWN_S) for world in worlds if world.dies]
    rows = [(node, at_s, -1 - number) for number, (node, at_s) in enumerate(starts)]
    columns = {
        "ts": f.timestamp_seconds("at_s"),
        **{name: f.col(name) for name in ("node", "seq")},
        "conn_id": 0,
        "event": EventName.SERVER_STARTED.value,
        "detail": json.dumps({"limits": limits, "policy": "thin", "made_by": "flowctl analyze synth"}),
        "count": 1,
    }
    return told(spark.createDataFrame(rows, "node string, at_s bigint, seq bigint"), FLOW_EVENTS, columns)


def samples(frame: DataFrame, options: SynthOptions) -> DataFrame:
    """Return `flow_samples` of connections that play, one per interval and a shorter one at the end."""
    col, every = f.col, options.interval_us
    frame = frame.where((col("role") == "play") & col("startup_us").isNotNull())
    frame = frame.withColumn("sample", f.explode(f.sequence(f.lit(1), f.ceil(col("duration_us") / every)))).withColumns(
        {
            "at_us": f.least(col("duration_us"), col("sample") * every),
            "then_us": (col("sample") - 1) * every,
            "seq": f.shiftleft("number", 22) + col("sample"),
        }
    )
    frame = clocks(clocks(alive(frame, options), "at_us", "now"), "then_us", "then")
    rest, hard = col("now_rest"), col("now_hard") > 0
    soft = (col("soft_us") > 0) & (rest > col("leave_us") + col("over_us"))
    state = f.when(hard, "HARD_LIMIT").when(soft, "SOFT_LIMIT").when(rest > col("leave_us"), "OVERLOADED")
    # A viewer is as late as it was at worst in the interval.
    worse, bad = (grown("soft") + grown("hard") > 0), grown("over") > 0
    frame = frame.withColumns({"state": f.coalesce(state, f.lit("READY")), "span_us": col("at_us") - col("then_us")})
    waits = f.when(worse, delay_ms(2)).when(bad, delay_ms(1)).otherwise(0.0)
    trouble = col("state") != "READY"
    strained = col("strained") & trouble
    sent = octets("now", "sent") - octets("then", "sent")
    by_class = {
        f"{what}_{unit}_{item}": (messages("now", what, item) - messages("then", what, item))
        * (size_of(item) if unit == "bytes" else 1)
        for what in ("accepted", "sent", "dropped")
        for unit in ("messages", "bytes")
        for item in CLASS_NAMES
    }
    columns = identity(options) | by_class | {
        "interval_ms": col("span_us") / 1000,
        "state": col("state"),
        "picture_share": 1 - grown("lost") / f.greatest(f.lit(1), grown("whole")),
        "queued_bytes": waits * 1000 * rate_per_us(),
        "queued_messages": waits * 0.073,
        "queued_age_ms": waits,
        "stalled_ms": f.when(col("stalls") & soft, (rest - col("leave_us") - col("over_us")) / 1000).otherwise(0),
        "drain_bytes_per_s": f.when(trouble, 1e6 * sent / col("span_us")),
        "thread_busy": f.when(strained, 0.97).otherwise(0.2 + 0.1 * col("luck")),
        "strained": strained,
        "input_paused": False,
        "rtt_us": f.when(trouble, col("far") * 12_000),
        "unsent_bytes": f.when(trouble, 64_000),
        "viewer_delay_ms": f.when(worse | bad, waits).otherwise(delay_ms(0)),
        "sent_bytes": sent,
    }  # fmt: skip
    return told(frame, FLOW_SAMPLES, columns)


def grown(clock: str) -> Column:
    """Return how far a clock went in the interval."""
    return f.col(f"now_{clock}") - f.col(f"then_{clock}")
