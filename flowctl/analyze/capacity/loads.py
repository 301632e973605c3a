"""What the fleet and its nodes were loaded with in an hour, from samples, in sums of fixed size.

Theory of operation. Samples of viewers are summed up by windows of ten seconds and node; the *peak* of a node, or of
all together, is the window with the most viewers at once (one who was there for half of it is half a viewer). Of the
windows of a node those with about the same crowd (a tenth more each step) become one row, which is what the node model
is fitted to. Sums are of whole numbers, so that the order in which tasks bring them does not matter.
"""

from __future__ import annotations

import math
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.analyze.job import JobPart
from flowctl.analyze.records.expressions import summed
from flowctl.records.telemetry.schema import CLASS_NAMES, VIEWING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flowctl.analyze.job import Records

WINDOW_S: Final = 10
LEAST_WINDOW_VIEWERS: Final = 5
"""A window with fewer viewers says more about the idle server than about them: `step` is -1."""
MOST_BUSY: Final = 0.95
"""A thread that is busier is full: what it did then is less than what its viewers needed."""

_SUMS: Final = ("ms", "accepted", "trouble_ms")
LOAD_COLUMNS: Final[dict[str, str]] = {
    "node": "string",  # null: all of them together
    "step": "int",  # of a node: logarithm of its viewers to the base of 1.1; -1: nothing to fit to
    **dict.fromkeys(("windows", *_SUMS, "busy_ppm", "peak_ms", "peak_busy_ppm"), "bigint"),
}
"""Contract of the part. Grain: an hour and a node and size of its crowd, or all nodes. `ms`: watched by all viewers;
`peak_ms`: in the window with most; `busy_ppm`: of the busiest thread, sum over windows."""


def loads(records: Records, _: Any = None) -> DataFrame:
    samples = records.table("flow_samples").where(f.col("role").isin(*VIEWING) & (f.col("interval_ms") > 0))
    values = {
        "ms": f.col("interval_ms"),
        "accepted": reduce(add, (f.col(f"accepted_bytes_{name}") for name in CLASS_NAMES)),
        "trouble_ms": f.when(f.col("state") != "READY", f.col("interval_ms")).otherwise(0),
    }
    busiest = f.max("busy_ppm").alias("busy_ppm")
    window = f.floor(f.unix_timestamp("ts") / WINDOW_S).alias("window")
    rows = samples.select(
        "date", "hour", window, "node",
        *(f.round(value).cast("bigint").alias(name) for name, value in values.items()),
        f.round(f.col("thread_busy") * 1e6).cast("bigint").alias("busy_ppm"),
    )  # fmt: skip
    hour = ("date", "hour", "window")
    windows = summed(rows.groupBy(*hour, "node"), _SUMS, busiest)
    rows = summed(windows.groupingSets([hour, (*hour, "node")], *hour, "node"), _SUMS, busiest)
    viewers = f.col("ms") / (WINDOW_S * 1000)
    usable = f.col("node").isNotNull() & (viewers >= LEAST_WINDOW_VIEWERS) & (f.col("accepted") > 0)
    usable &= (f.col("busy_ppm") > 0) & (f.col("busy_ppm") <= MOST_BUSY * 1e6)
    step = f.when(usable, f.floor(f.log(viewers) / math.log(1.1))).otherwise(-1)
    peaks = (f.max(name).alias(f"peak_{name}") for name in ("ms", "busy_ppm"))
    groups = rows.groupBy("date", "hour", "node", step.alias("step"))
    return summed(groups, (*_SUMS, "busy_ppm"), f.count("*").alias("windows"), *peaks)


LOADS: Final = JobPart("loads", LOAD_COLUMNS, loads, ("flow_samples",), version=3)
