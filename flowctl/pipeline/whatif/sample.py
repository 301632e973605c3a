"""Which connections ``whatif`` evaluates: those that may be viewers, and of many a simple random sample.

Running fifty Senders over half an hour of a viewer takes seconds of a core; what comes out are shares, which a sample
of some thousand viewers tells as well as all of them do. Simple means that each has the same chance: nothing needs to
be weighted back, and viewers in trouble are in it as often as they are among all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from flowctl.telemetry.schema import VIEWING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def connections(rows: DataFrame) -> DataFrame:
    """Return the connections of `flight_rows` or `sample_rows`, and whether they may be viewers.

    Returns:
        One row per (node, conn_id): `watching`, false for one that was used for something else only. A flight whose
        connection never said what it is for has no role; it is looked at closer (`NO_VIEWER`).
    """
    watching = f.max(f.col("role").isin(*VIEWING))
    return rows.groupBy("node", "conn_id").agg(f.coalesce(watching, f.lit(True)).alias("watching"))


def sampled(found: DataFrame, most: int) -> DataFrame:
    """Return `most` of the connections that may be viewers, picked by a hash of what names them: node, conn_id."""
    picked = f.xxhash64("node", "conn_id")
    return found.where("watching").orderBy(picked, "node", "conn_id").limit(most).select("node", "conn_id")


def bounded(rows: DataFrame, most: int) -> tuple[DataFrame, int, int]:
    """Return the rows to evaluate, how many connections may be viewers, and how many were something else.

    Args:
        rows: of `flight_rows` or `sample_rows`.
        most: viewers to evaluate at most. 0: all.
    """
    found = connections(rows)
    counts = {row["watching"]: row["count"] for row in found.groupBy("watching").count().collect()}
    recorded, others = counts.get(True, 0), counts.get(False, 0)
    if 0 < most < recorded:
        keys = sampled(found, most)
    elif others:
        keys = found.where("watching").select("node", "conn_id")
    else:
        return rows, recorded, 0
    return rows.join(keys, ["node", "conn_id"], "left_semi"), recorded, others
