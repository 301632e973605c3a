"""What nodes, streams and networks were loaded with in an hour, from samples, in sums of fixed size.

Theory of operation. Samples of viewers are summed up by windows of ten seconds, node and stream; the *peak* of a node
or stream is its window with the most viewers at once (one who was there for half of it is half a viewer). Of the
windows of a node those with about the same crowd (a tenth more each step) become one row, which is what the node model
is fitted to. Of addresses the windows are minutes, as only then telling where an address is costs less than the rest.
Sums are of whole numbers, so that the order in which tasks bring them does not matter.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.pipeline.job import Part
from flowctl.pipeline.records.addresses import digits, lies_in, wide_network
from flowctl.telemetry.schema import CLASS_NAMES, VIEWING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from flowctl.pipeline.job import Records

WINDOW_S: Final = 10
MINUTE_S: Final = 60
LEAST_WINDOW_VIEWERS: Final = 5
"""A window with fewer viewers says more about the idle server than about them: `step` is -1."""
MOST_BUSY: Final = 0.95
"""A thread that is busier is full: what it did then is less than what its viewers needed."""
UNKNOWN: Final = "unknown"
"""Place of an address that is none: a hash, or no address was recorded."""

LOAD_COLUMNS: Final[dict[str, str]] = {
    "kind": "string",  # fleet, node, stream, place
    **dict.fromkeys(("node", "app", "stream", "place", "place_from"), "string"),
    "step": "int",  # of a node: logarithm of its viewers to the base of 1.1; -1: nothing to fit to
    "peak_at": "timestamp",
    **dict.fromkeys(("windows", "ms", "peak_ms", "accepted", "peak_accepted", "trouble_ms", "busy_ppm"), "bigint"),
    **dict.fromkeys(("peak_busy_ppm", "rtt_us", "rtts"), "bigint"),
}
"""Contract of the part. Grain: an hour and the fleet, a node and size of its crowd, a stream at a node, or a place at a
node. `ms`: watched by all viewers; `peak_ms`: in the window with most; `busy_ppm`: of the busiest thread, sum over
windows."""
_NAMES: Final = ("node", "app", "stream", "place", "place_from")


def _whole(value: Column) -> Column:
    return f.sum(f.round(value).cast("bigint"))


def _most(by: str) -> Column:
    """Return (`by`, -window) of the window with most; of equal ones the first."""
    return f.max(f.struct(f.col(by).alias("most"), (-f.col("window")).alias("window")))


def loads(records: Records, regions: Any) -> DataFrame:
    """Return the rows of the part, with `date` and `hour`.

    Args:
        records: of one or more hours.
        regions: (network, region), the narrowest first.
    """
    accepted = reduce(lambda one, two: one + two, (f.col(f"accepted_bytes_{name}") for name in CLASS_NAMES))
    samples = records.table("flow_samples")
    found = samples.where(f.col("role").isin(*VIEWING) & (f.col("interval_ms") > 0)).select(
        "date", "hour", "node", "app", "stream", "rtt_us",
        f.round(f.col("thread_busy") * 1e6).alias("busy"),
        f.coalesce("peer_ip", f.lit("")).alias("peer_ip"),
        f.unix_timestamp("ts").alias("seconds"),
        f.col("interval_ms").alias("ms"),
        accepted.alias("accepted"),
        f.when(f.col("state") != "READY", f.col("interval_ms")).otherwise(0.0).alias("trouble_ms"),
    )  # fmt: skip
    windows = found.groupBy(
        "date", "hour", f.floor(f.col("seconds") / WINDOW_S).alias("window"), "node", "app", "stream"
    ).agg(
        _whole(f.col("ms")).alias("ms"),
        _whole(f.col("accepted")).alias("accepted"),
        _whole(f.col("trouble_ms")).alias("trouble_ms"),
        f.max("busy").cast("bigint").alias("busy"),
    )
    kinds = (_of_fleet(windows), _of_nodes(windows), _of_streams(windows), _of_places(found, regions))
    return reduce(lambda one, two: one.unionByName(two), (_shaped(kind, frame) for kind, frame in kinds))


def _shaped(kind: str, frame: DataFrame) -> DataFrame:
    """Return the columns of the contract; those that a kind does not have are null."""
    at = f.timestamp_seconds(-f.col("peak.window") * (MINUTE_S if kind == "place" else WINDOW_S))
    made = {"kind": f.lit(kind), "peak_at": at, "peak_ms": f.col("peak.most")}
    columns = {name: f.col(name) if name in frame.columns else f.lit(None) for name in LOAD_COLUMNS} | made
    return frame.select(*(columns[name].cast(to).alias(name) for name, to in LOAD_COLUMNS.items()), "date", "hour")


def _summed(frame: DataFrame, *keys: str) -> DataFrame:
    """Add windows up."""
    return frame.groupBy("date", "hour", *keys).agg(
        f.count("*").alias("windows"),
        _most("ms").alias("peak"),
        *(f.sum(name).alias(name) for name in ("ms", "accepted", "trouble_ms")),
        f.max("accepted").alias("peak_accepted"),
        f.sum("busy").alias("busy_ppm"),
        f.max("busy").alias("peak_busy_ppm"),
    )


def _by_window(windows: DataFrame, *keys: str) -> DataFrame:
    sums = (f.sum(name).alias(name) for name in ("ms", "accepted", "trouble_ms"))
    return windows.groupBy("date", "hour", "window", *keys).agg(*sums, f.max("busy").alias("busy"))


def _of_fleet(windows: DataFrame) -> tuple[str, DataFrame]:
    return "fleet", _summed(_by_window(windows))


def _of_nodes(windows: DataFrame) -> tuple[str, DataFrame]:
    viewers = f.col("ms") / (WINDOW_S * 1000)
    usable = (viewers >= LEAST_WINDOW_VIEWERS) & (f.col("accepted") > 0)
    usable &= (f.col("busy") > 0) & (f.col("busy") <= MOST_BUSY * 1e6)
    step = f.when(usable, f.floor(f.log(viewers) / math.log(1.1))).otherwise(-1)
    return "node", _summed(_by_window(windows, "node").withColumn("step", step), "node", "step")


def _of_streams(windows: DataFrame) -> tuple[str, DataFrame]:
    return "stream", _summed(windows, "node", "app", "stream")


def _of_places(found: DataFrame, regions: Any) -> tuple[str, DataFrame]:
    minutes = found.groupBy(
        "date", "hour", f.floor(f.col("seconds") / MINUTE_S).alias("window"), "node", "peer_ip"
    ).agg(
        _whole(f.col("ms")).alias("ms"),
        _whole(f.col("trouble_ms")).alias("trouble_ms"),
        f.sum("rtt_us").alias("rtt_us"),
        f.count("rtt_us").alias("rtts"),
    )
    names = ("ms", "trouble_ms", "rtt_us", "rtts")
    placed = with_place(minutes, regions).groupBy("date", "hour", "window", "node", "place", "place_from")
    summed = placed.agg(*(f.sum(name).alias(name) for name in names))
    keys = ("date", "hour", "node", "place", "place_from")
    return "place", summed.groupBy(*keys).agg(_most("ms").alias("peak"), *(f.sum(name).alias(name) for name in names))


def with_place(frame: DataFrame, regions: Any) -> DataFrame:
    """Add `place` and `place_from` of `peer_ip`: a region, else the network of a provider, else `UNKNOWN`."""
    frame = frame.withColumn("who", f.regexp_replace("peer_ip", "/(24|48)$", ""))
    frame = frame.withColumn("hex", digits(f.col("who")))
    named = [f.when(lies_in(f.col("hex"), [network]), name) for network, name in regions]
    region = f.coalesce(*named) if named else f.lit(None).cast("string")
    frame = frame.withColumn("region", region).withColumn("wide", wide_network(f.col("who"), f.col("hex")))
    kind = f.when(f.col("region").isNotNull(), "region").when(f.col("wide").isNotNull(), "network").otherwise(UNKNOWN)
    place = f.coalesce("region", "wide", f.lit(UNKNOWN))
    return frame.withColumns({"place": place, "place_from": kind}).drop("who", "hex", "region", "wide")


LOADS: Final = Part(
    name="loads",
    columns=LOAD_COLUMNS,
    at="",
    make=lambda records, options: loads(records, options.regions),
    reads=("flow_samples",),
    depends=lambda options: " ".join(f"{network} {name};" for network, name in options.regions),
)
