"""``capacity`` for a fleet: what nodes, streams and networks were loaded with, and what nodes a wanted crowd takes.

Theory of operation. Samples are summed up by windows of ten seconds, the same that the node model is fitted to. The
*peak* of a node, a stream or a place is its window with the most viewers at once (a viewer who was there for half of it
is half a viewer). The plan (`flowctl.pipeline.capacity.plan`) is made for the fleet's own peak: which streams are
worth following follows from their shares of the viewers in that window.

What a node carries is fitted to its own windows where its crowds carry an answer, else to what the whole job's answer
rests on; `carries_from` says which.

Where: a *place* is a region that the user named for a network, else the network (/16 of IPv4, /32 of IPv6), else
``unknown``. Round trips are in the records only of viewers in trouble, so `rtt_ms` is theirs.

Sums are of whole numbers, so that the order in which tasks bring them does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.pipeline.capacity import plan as planning
from flowctl.pipeline.capacity.answer import basis_of, carried
from flowctl.pipeline.capacity.model import MOST_REACH
from flowctl.pipeline.tables.addresses import digits, lies_in, wide_network
from flowctl.pipeline.tables.io import write_table
from flowctl.telemetry.schema import CLASS_NAMES, VIEWING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from flowctl.pipeline.capacity.answer import Basis, CapacityOptions
    from flowctl.pipeline.capacity.model import Measurement

WINDOW_S: Final = 10
MOST_STREAMS: Final = 10_000
"""Streams that the plan looks at one by one; with more, the smallest are not followed."""
MOST_PLACES: Final = 1_000
"""Places that the plan looks at."""
UNKNOWN: Final = "unknown"
"""Place of an address that is none: a hash, or no address was recorded."""

NODE_COLUMNS: Final[dict[str, str]] = {
    "node": "string",
    "carries_viewers": "bigint",
    "carries_from": "string",
    "carries_at_least": "boolean",
    "viewers_peak": "double",
    "load_peak": "double",
    "peak_at": "timestamp",
    "viewers_mean": "double",
    "viewers_recorded": "bigint",
    "recorded_s": "double",
    "streams": "bigint",
    "bit_rate": "double",
    "peak_bit_rate": "double",
    "busy_peak": "double",
    "trouble_share": "double",
}
"""Contract of ``capacity_nodes``. Grain: one node. `load_peak`: `viewers_peak` of `carries_viewers`. `bit_rate`: of one
viewer; `peak_bit_rate`: of all in the busiest window. `recorded_s`: of windows with viewers."""
STREAM_COLUMNS: Final[dict[str, str]] = {
    "app": "string",
    "stream": "string",
    "node": "string",
    "viewers_peak": "double",
    "viewers_mean": "double",
    "watched_s": "double",
    "bit_rate": "double",
    "follower_viewers": "double",
    "worth_following": "boolean",
    "saved_bit_rate": "double",
}
"""Contract of ``capacity_streams``. Grain: one stream at one node. `viewers_mean`: while anybody watched. Worth
following: on average more viewers than a follower costs. `saved_bit_rate`: what an origin sends less then."""
PLACE_COLUMNS: Final[dict[str, str]] = {
    "place": "string",
    "place_from": "string",
    "node": "string",
    "nodes": "bigint",
    "addresses": "bigint",
    "viewers_peak": "double",
    "viewers_share": "double",
    "trouble_share": "double",
    "rtt_ms": "double",
    "viewers_wanted": "double",
    "edges_filled": "double",
    "own_edges": "bigint",
}
"""Contract of ``capacity_places``. Grain: one region, network or ``unknown``. `node`: that served most of it.
`viewers_wanted`: its part of the wanted crowd at its own peak; `edges_filled`: edges that this takes, `own_edges`: the
whole ones of these. Null where nothing is planned."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer for one node, which that for the fleet rests on.

    Args:
        best: viewers that a node carries. None: no size that was tried keeps what was asked for.
        basis: what it was fitted to.
        points: what was recorded, by node.
    """

    best: int | None
    basis: Basis
    points: Mapping[str, list[Measurement]]


def ddl_of(columns: dict[str, str]) -> str:
    """Return the columns of a contract as Spark reads them."""
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def _whole(value: Column) -> Column:
    return f.sum(f.round(value).cast("bigint"))


def viewing(samples: DataFrame) -> DataFrame:
    """Return the samples of viewers with `window`, `ms` and `accepted` (bytes), and what is summed up of them."""
    accepted = reduce(lambda one, two: one + two, (f.col(f"accepted_bytes_{name}") for name in CLASS_NAMES))
    playing = samples.where(f.col("role").isin(*VIEWING) & (f.col("interval_ms") > 0))
    return playing.select(
        "node", "conn_id", "app", "stream", "rtt_us", "thread_busy",
        f.coalesce("peer_ip", f.lit("")).alias("peer_ip"),
        (f.col("ts").cast("double") / WINDOW_S).cast("bigint").alias("window"),
        f.col("interval_ms").alias("ms"),
        accepted.alias("accepted"),
        f.when(f.col("state") != "READY", f.col("interval_ms")).otherwise(0.0).alias("trouble_ms"),
    )  # fmt: skip


def stream_windows(found: DataFrame) -> DataFrame:
    """Return sums by stream, node and window: `ms`, `accepted`, `trouble_ms`, `busy` (the largest)."""
    return found.groupBy("app", "stream", "node", "window").agg(
        _whole(f.col("ms")).alias("ms"),
        f.sum("accepted").alias("accepted"),
        _whole(f.col("trouble_ms")).alias("trouble_ms"),
        f.max("thread_busy").alias("busy"),
    )


_VIEWERS: Final = "ms / 10000"
"""Viewers at once, of the milliseconds that were watched in a window."""


def by_node(windows: DataFrame, found: DataFrame) -> list[dict[str, Any]]:
    """Return what each node was loaded with, by name: `NODE_COLUMNS` without what it carries."""
    sums = windows.groupBy("node", "window").agg(
        f.sum("ms").alias("ms"),
        f.sum("accepted").alias("accepted"),
        f.sum("trouble_ms").alias("trouble_ms"),
        f.max("busy").alias("busy"),
    )
    loads = sums.groupBy("node").agg(
        f.expr(f"max({_VIEWERS})").alias("viewers_peak"),
        # Of equal peaks the first: the largest of (viewers, -window).
        f.expr("max(struct(ms, -window)).col2").alias("peak_window"),
        f.expr("avg(ms) / 10000").alias("viewers_mean"),
        (f.count("*") * float(WINDOW_S)).alias("recorded_s"),
        f.expr("sum(accepted) * 8000 / sum(ms)").alias("bit_rate"),
        f.expr(f"max(accepted) * 8 / {WINDOW_S}").alias("peak_bit_rate"),
        f.max("busy").alias("busy_peak"),
        f.expr("sum(trouble_ms) / sum(ms)").alias("trouble_share"),
    )
    streams = windows.select("node", "app", "stream").distinct().groupBy("node").agg(f.count("*").alias("streams"))
    viewers = found.select("node", "conn_id").distinct().groupBy("node").agg(f.count("*").alias("viewers_recorded"))
    rows = loads.join(streams, "node").join(viewers, "node").orderBy("node").collect()
    return [row.asDict() for row in rows]


def by_stream(windows: DataFrame) -> DataFrame:
    """Return `STREAM_COLUMNS`."""
    follower = f.lit(planning.FOLLOWER_VIEWERS)
    return (
        windows.groupBy("app", "stream", "node")
        .agg(
            f.expr(f"max({_VIEWERS})").alias("viewers_peak"),
            f.expr("avg(ms) / 10000").alias("viewers_mean"),
            (f.count("*") * float(WINDOW_S)).alias("watched_s"),
            f.expr("sum(accepted) * 8000 / sum(ms)").alias("bit_rate"),
        )
        .withColumns({"follower_viewers": follower, "worth_following": f.col("viewers_mean") > follower})
        .withColumn("saved_bit_rate", f.greatest(f.col("viewers_mean") - 1, f.lit(0.0)) * f.col("bit_rate"))
        .select(*(f.col(name).cast(kind).alias(name) for name, kind in STREAM_COLUMNS.items()))
    )


def with_place(frame: DataFrame, options: CapacityOptions) -> DataFrame:
    """Add `place` and `place_from` of `peer_ip`."""
    frame = frame.withColumn("who", f.regexp_replace("peer_ip", "/(24|48)$", "")).withColumn(
        "hex", digits(f.col("who"))
    )
    regions = [f.when(lies_in(f.col("hex"), [network]), name) for network, name in options.regions]
    region = f.coalesce(*regions) if regions else f.lit(None).cast("string")
    frame = frame.withColumn("region", region).withColumn("wide", wide_network(f.col("who"), f.col("hex")))
    kind = f.when(f.col("region").isNotNull(), "region").when(f.col("wide").isNotNull(), "network").otherwise(UNKNOWN)
    place = f.coalesce("region", "wide", f.lit(UNKNOWN))
    return frame.withColumns({"place": place, "place_from": kind}).drop("who", "hex", "region", "wide")


def by_place(found: DataFrame, options: CapacityOptions) -> list[dict[str, Any]]:
    """Return the places with the most viewers, the largest first: `PLACE_COLUMNS` without what is planned for them."""
    # By address first: telling where an address is costs more than all the rest.
    addresses = with_place(found.select("peer_ip").distinct(), options)
    sums = (
        found.groupBy("peer_ip", "node", "window")
        .agg(
            _whole(f.col("ms")).alias("ms"),
            _whole(f.col("trouble_ms")).alias("trouble_ms"),
            f.sum("rtt_us").alias("rtt_us"),
            f.count("rtt_us").alias("rtts"),
        )
        .join(addresses, "peer_ip")
    )
    peaks = sums.groupBy("place", "window").agg(f.sum("ms").alias("ms"))
    peaks = peaks.groupBy("place").agg(f.expr(f"max({_VIEWERS})").alias("viewers_peak"))
    names = ("ms", "trouble_ms", "rtt_us", "rtts")
    served = sums.groupBy("place", "place_from", "node").agg(*(f.sum(name).alias(name) for name in names))
    totals = served.groupBy("place", "place_from").agg(
        f.expr("max(struct(ms, node)).node").alias("node"),
        f.count("*").alias("nodes"),
        f.sum("ms").alias("ms"),
        f.expr("sum(trouble_ms) / sum(ms)").alias("trouble_share"),
        f.expr("try_divide(sum(rtt_us) / 1000, sum(rtts))").alias("rtt_ms"),
    )
    counted = addresses.groupBy("place").agg(f.count("*").alias("addresses"))
    whole = f.expr("ms / sum(ms) OVER ()").alias("viewers_share")
    rows = (
        totals.join(peaks, "place")
        .join(counted, "place")
        .select("*", whole)
        .orderBy(f.desc("viewers_peak"), "place")
        .limit(MOST_PLACES)
        .collect()
    )
    return [row.asDict() for row in rows]


def peak_of(windows: DataFrame) -> tuple[float, list[float]]:
    """Return the fleet's viewers at its peak, and the share of each stream watched then, the largest first."""
    window = windows.groupBy("window").agg(f.sum("ms").alias("ms")).orderBy(f.desc("ms"), "window").first()
    if window is None or not window["ms"]:
        return 0.0, []
    streams = windows.where(f.col("window") == window["window"]).groupBy("app", "stream").agg(f.sum("ms").alias("ms"))
    rows = streams.orderBy(f.desc("ms"), "app", "stream").limit(MOST_STREAMS).collect()
    return window["ms"] / 10_000, [row["ms"] / window["ms"] for row in rows]


def what_carries(points: list[Measurement], whole: Basis, best: int, options: CapacityOptions) -> tuple[int, str, bool]:
    """Return what a node carries of the crowd that is asked about, from what, and whether it may be more.

    Args:
        points: that were recorded at the node.
        whole: what the answer of the whole job rests on.
        best: viewers per node of that answer.
        options: completed.
    """
    basis = basis_of(points, options)
    if basis.source != "records":  # its own crowds are too small: those of all nodes, or of the reference machine
        return best, whole.source, best >= MOST_REACH * whole.model.largest
    reach = MOST_REACH * basis.model.largest
    return max(1, int(min(carried(basis.model, options), reach))), "own records", carried(basis.model, options) >= reach


def write_loads(
    spark: SparkSession, samples: DataFrame, out: str, answer: Answer, options: CapacityOptions
) -> tuple[dict[str, str], dict[str, Any]]:
    """Write ``capacity_nodes``, ``capacity_streams`` and ``capacity_places``.

    Args:
        spark: session.
        samples: of table ``flow_samples``.
        out: folder of the results.
        answer: of the whole job.
        options: completed.

    Returns:
        Paths of the tables by name, and the summary, whose ``answer`` says it in words. Empty where nobody watched.
    """
    found = viewing(samples)
    windows = stream_windows(found).persist()
    try:
        nodes = by_node(windows, found)
        if not nodes:
            return {}, {}
        peak, shares = peak_of(windows)
        places = by_place(found, options)
        streams = by_stream(windows)
        outputs = {"capacity_streams": write_table(streams, f"{out}/capacity_streams")}
    finally:
        windows.unpersist()
    worth = spark.read.parquet(outputs["capacity_streams"]).where("worth_following").count()
    nodes = [_node_row(node, answer, options) for node in nodes]
    plan = None if answer.best is None else planning.plan_of(options.viewers, answer.best, options.headroom, shares)
    places = [_place_row(place, peak, plan, options) for place in places]
    for name, rows, columns in (
        ("capacity_nodes", nodes, NODE_COLUMNS),
        ("capacity_places", places, PLACE_COLUMNS),
    ):
        frame = spark.createDataFrame([tuple(row[key] for key in columns) for row in rows], ddl_of(columns))
        outputs[name] = write_table(frame, f"{out}/{name}", partitions=1)
    seen = {
        "viewers_recorded": sum(node["viewers_recorded"] for node in nodes),
        "viewers_peak": round(peak, 1),
        "recorded_s": max(node["recorded_s"] for node in nodes),
        "assumed_share": round(max(0.0, 1 - peak / options.viewers), 4),
        "streams_worth_following": worth,
        "carries_from": answer.basis.source,
    }
    present = planning.present_of(nodes, options.viewers)
    said = planning.answer_of(plan, seen, present, places)
    return outputs, {"answer": said, "plan": None if plan is None else plan.as_dict(), "present": present, "seen": seen}


def _node_row(node: dict[str, Any], answer: Answer, options: CapacityOptions) -> dict[str, Any]:
    """Return a row of ``capacity_nodes``; what a node carries is null where nothing that was tried keeps the wish."""
    carries, source, at_least = None, answer.basis.source, False
    if answer.best is not None:
        points = answer.points.get(node["node"], [])
        carries, source, at_least = what_carries(points, answer.basis, answer.best, options)
    return {
        **node,
        "peak_at": datetime.fromtimestamp(-node["peak_window"] * WINDOW_S, UTC),
        "carries_viewers": carries,
        "carries_from": source,
        "carries_at_least": at_least,
        "load_peak": None if carries is None else node["viewers_peak"] / carries,
    }


def _place_row(
    place: dict[str, Any], peak: float, plan: planning.FleetPlan | None, options: CapacityOptions
) -> dict[str, Any]:
    """Return a row of ``capacity_places``."""
    wanted = options.viewers * place["viewers_peak"] / peak
    room = None
    if plan is not None and plan.edges:
        room = (plan.carries_viewers - plan.streams_followed) * (1 - options.headroom)
    filled = None if room is None or plan is None else wanted * plan.edge_viewers / plan.viewers / room
    own = None if filled is None else min(int(filled), plan.edges if plan else 0)
    return {**place, "viewers_wanted": wanted, "edges_filled": filled, "own_edges": own}
