"""``capacity``: how many viewers a node carries, how much memory it needs for them, and how many nodes a fleet takes.

Theory of operation. A node model (`flowctl.pipeline.capacity.model`) is fitted to measurements. Where a file of them is
given, these; else the recorded busy share of the servers' threads in ``flow_samples``, where crowds were large enough
to say something; else the reference measurements that come with flowctl (`flowctl.pipeline.capacity.reference`), and
the answer begins with saying that they are of another machine. Then a crowd is simulated, a row per viewer, with
Spark's built-in functions alone: each viewer's link, session and noise follow from a hash of its number and the seed,
so that the same crowd comes out on any cluster. Viewers are dealt to nodes; a node's processor time is the sum over its
viewers, plus what the joins of that second cost. This is done for a row of sizes of a node; the answer is the largest
size at which 95 % of the nodes are below the wanted busy share, and the delay that the model gives there is below the
bound.

How far that reaches: no size above `flowctl.pipeline.capacity.model.MOST_REACH` times the largest measured crowd is
tried, and an answer that would be larger is told as "at least". What was not measured (memory, delay) is null in table
and summary.

How sure that is: the model's own residual (twice its root mean square) gives the range of the answer; and where there
are measurements of several crowds, the largest is predicted from the others, and that error is stated beside it.

The fleet: what nodes, streams and networks were loaded with, and the plan for the wanted crowd, are in
`flowctl.pipeline.jobs.loads`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.errors import ConfigError
from flowctl.pipeline.capacity.answer import JOIN_WRITES, CapacityOptions, basis_of, carried, summary_of
from flowctl.pipeline.capacity.model import MOST_REACH, Measurement, NodeModel
from flowctl.pipeline.jobs import loads
from flowctl.pipeline.tables.accounts import JobResult
from flowctl.pipeline.tables.io import read_optional, write_quarantine, write_table
from flowctl.telemetry.schema import CLASS_NAMES, VIEWING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

STEPS: Final = 12
"""Sizes of a node that are tried: a tenth of the model's own answer apart around it."""
MOST_NODES: Final = 100
"""Nodes simulated per size: enough for a 95 % quantile of them, and a bound of the work."""
QUEUE_S: Final = 2.0
"""Of a stream, so much waits for a slow viewer on average: what the low mark of age lets stay."""
LEAST_WINDOW_VIEWERS: Final = 5
"""A second with fewer viewers says more about the idle server than about them."""
MOST_BUSY: Final = 0.95
"""A thread that is busier is full: what it did then is less than what its viewers needed."""

CAPACITY_DDL: Final = (
    "viewers bigint, nodes bigint, busy double, busy_p95 double, busy_low double, busy_high double, p99_ms double, "
    "memory_bytes bigint, joins_per_s double, fits boolean"
)
"""Columns of ``capacity``. Grain: one size of a node. `busy_low`, `busy_high`: `busy_p95` -+ two residuals. `p99_ms`
and `memory_bytes` are null where nobody measured them."""


def windows(samples: DataFrame) -> DataFrame:
    """Return what the servers' threads did, by node and ten seconds.

    Args:
        samples: of table ``flow_samples``.

    Returns:
        `viewers` (mean), `bit_rate`, `busy` (of all threads together: shares of the groups cannot be told apart, so the
        largest is taken), `slow_share`. Grain: a node and ten seconds with viewers.
    """
    accepted = sum((f.col(f"accepted_bytes_{name}") for name in CLASS_NAMES), start=f.lit(0))
    seconds = f.col("interval_ms") / 1000
    playing = f.col("role").isin(*VIEWING) & f.col("thread_busy").isNotNull() & (f.col("interval_ms") > 0)
    return (
        samples.where(playing)
        .withColumn("window", (f.col("ts").cast("double") / 10).cast("bigint"))
        .groupBy("node", "window")
        .agg(
            (f.sum(seconds) / 10).alias("viewers"),
            (f.sum(accepted) * 8 / f.sum(seconds)).alias("bit_rate"),
            f.max("thread_busy").alias("busy"),
            f.avg((f.col("state") != "READY").cast("double")).alias("slow_share"),
        )
    )


def recorded(found: DataFrame) -> list[Measurement]:
    """Return the windows as measurements, averaged over steps of a tenth more viewers: some dozen rows."""
    return [_measured(row) for row in _steps(found).orderBy("step").collect()]


def recorded_of_nodes(found: DataFrame) -> dict[str, list[Measurement]]:
    """Return the same by node."""
    points: dict[str, list[Measurement]] = {}
    for row in _steps(found, "node").orderBy("node", "step").collect():
        points.setdefault(row["node"], []).append(_measured(row))
    return points


def _steps(found: DataFrame, *keys: str) -> DataFrame:
    step = f.floor(f.log(f.col("viewers")) / math.log(1.1))
    usable = (f.col("viewers") >= LEAST_WINDOW_VIEWERS) & (f.col("bit_rate") > 0)
    usable &= (f.col("busy") > 0) & (f.col("busy") <= MOST_BUSY)
    columns = ("viewers", "bit_rate", "busy", "slow_share")
    return found.where(usable).groupBy(*keys, step.alias("step")).agg(*(f.avg(name).alias(name) for name in columns))


def _measured(row: Row) -> Measurement:
    return Measurement(
        viewers=round(row["viewers"]),
        bit_rate=row["bit_rate"],
        cpu_us_per_s=row["busy"] * 1e6,
        slow_share=min(row["slow_share"], 1.0),
    )


def crowd_of(samples: DataFrame) -> dict[str, float]:
    """Return `bit_rate`, `slow_share` and `session_s` of the recorded viewers; empty where there are none."""
    accepted = sum((f.col(f"accepted_bytes_{name}") for name in CLASS_NAMES), start=f.lit(0))
    viewer = (
        samples.where(f.col("role").isin(*VIEWING))
        .groupBy("node", "conn_id")
        .agg(
            f.sum(accepted).alias("accepted"),
            f.sum("interval_ms").alias("ms"),
            f.avg((f.col("state") != "READY").cast("double")).alias("troubled"),
        )
    )
    row = viewer.agg(
        (f.sum("accepted") * 8000 / f.sum("ms")).alias("bit_rate"),
        f.avg((f.col("troubled") > 0.1).cast("double")).alias("slow_share"),
        (f.avg("ms") / 1000).alias("session_s"),
    ).collect()[0]
    return {name: float(value) for name, value in row.asDict().items() if value}


# -- the simulated crowd


def _uniform(seed: int, salt: str) -> Column:
    """Return a number in (0, 1) that follows from the viewer's number, the size of the node, and the seed."""
    hashed = f.xxhash64(f.col("viewer"), f.col("size"), f.lit(seed), f.lit(salt))
    return (f.pmod(hashed, f.lit(1 << 52)).cast("double") + 0.5) / float(1 << 52)


def crowd(spark: SparkSession, sizes: list[int], options: CapacityOptions) -> DataFrame:
    """Return simulated viewers: `size` (of its node), `node`, `slow`, `noise`, `joins`. Grain: one viewer and size."""
    frames = []
    for size in sizes:
        nodes = min(max(math.ceil(options.viewers / size), 1), MOST_NODES)
        viewers = spark.range(nodes * size).select(f.col("id").alias("viewer"), f.lit(size).alias("size"))
        frames.append(viewers.withColumn("node", f.pmod("viewer", f.lit(nodes))))
    table = frames[0]
    for frame in frames[1:]:
        table = table.unionAll(frame)
    joins = _uniform(options.seed, "join") < 1.0 / (options.session_s or 1.0)
    # What a viewer costs differs by a tenth from one to the next (congestion, acknowledgements): a triangle around 1.
    noise = 1 + 0.2 * (_uniform(options.seed, "a") + _uniform(options.seed, "b") - 1)
    slow = _uniform(options.seed, "slow") < (options.slow_share or 0.0)
    return table.select("size", "node", slow.alias("slow"), noise.alias("noise"), joins.cast("int").alias("joins"))


def nodes_of(viewers: DataFrame, model: NodeModel, options: CapacityOptions) -> DataFrame:
    """Return `cpu_ns`, `joins`, `any_slow` of each simulated node. Grain: one size and node; sums are whole numbers."""
    bit_rate = options.bit_rate or 0.0
    one = model.viewer_us(bit_rate)
    slow_us = f.when(f.col("slow"), f.lit(1 + model.slow_more)).otherwise(f.lit(1.0))
    cpu = f.round(f.col("noise") * slow_us * one * 1000 + f.col("joins") * JOIN_WRITES * model.write_us * 1000)
    return viewers.groupBy("size", "node").agg(
        f.sum(cpu.cast("bigint")).alias("cpu_ns"),
        f.sum("joins").alias("joins"),
        f.max("slow").alias("any_slow"),
    )


def table_of(nodes: DataFrame, model: NodeModel, options: CapacityOptions) -> list[dict[str, Any]]:
    """Return the rows of ``capacity``, one per size of a node."""
    busy = (f.col("cpu_ns") / 1e9) + model.idle_us / 1e6
    rows = (
        nodes.withColumn("busy", busy)
        .groupBy("size")
        .agg(
            f.count("*").alias("nodes"),
            f.percentile("busy", f.lit([0.5, 0.95])).alias("quantiles"),
            f.avg("joins").alias("joins"),
            f.max("any_slow").alias("any_slow"),
        )
        .orderBy("size")
        .collect()
    )
    found = []
    for row in rows:
        middle, high = row["quantiles"]
        # All slow viewers of a stream hold the same log: what the slowest holds is what all of them hold.
        queue = (options.bit_rate or 0.0) / 8 * QUEUE_S if row["any_slow"] else 0.0
        spread = 2 * model.residual
        known = model.memory_bytes(row["size"], options.bit_rate or 0.0)
        memory = None if known is None else round(known + queue)
        p99 = model.p99_ms(high)
        fits = high <= options.busy and (p99 is None or p99 <= options.p99_ms)
        fits = fits and (options.memory_bytes is None or (memory is not None and memory <= options.memory_bytes))
        found.append(
            {
                "viewers": row["size"],
                "nodes": math.ceil(options.viewers / row["size"]),
                "busy": middle,
                "busy_p95": high,
                "busy_low": high * (1 - spread),
                "busy_high": high * (1 + spread),
                "p99_ms": p99,
                "memory_bytes": memory,
                "joins_per_s": float(row["joins"]),
                "fits": fits,
            }
        )
    return found


def sizes_to_try(model: NodeModel, options: CapacityOptions) -> list[int]:
    """Return the sizes of a node to simulate: around the largest that the model gives, none beyond its reach."""
    reach = MOST_REACH * model.largest
    middle = min(carried(model, options), float(reach))
    shares = [0.5 + 0.7 * number / (STEPS - 1) for number in range(STEPS)]
    near = [0.94, 0.96, 0.98, 1.0, 1.02]
    return sorted({min(max(round(middle * share), 1), reach) for share in (*shares, *near)})


# -- the job


def run(spark: SparkSession, events: str | None, out: str, options: CapacityOptions | None = None) -> JobResult:
    """Fit, simulate, answer; write ``capacity``.

    Args:
        spark: session.
        events: folder that the server wrote with ``--events``. None: none is read.
        out: folder of the results.
        options: None: all defaults.

    Raises:
        ConfigError: the folder has no samples, the measurements tell nothing, or memory is asked for but not measured.
    """
    options = options or CapacityOptions()
    result = JobResult(name="capacity")
    points: list[Measurement] = []
    of_nodes: dict[str, list[Measurement]] = {}
    seen: dict[str, float] = {}
    source = None if events is None else read_optional(spark, events, "flow_samples")
    if source is not None:
        result.accounts.append(source.accounts)
        result.outputs.update(write_quarantine(spark, source, out))
        if not source.absent:
            found = windows(source.frame)
            points, of_nodes, seen = recorded(found), recorded_of_nodes(found), crowd_of(source.frame)
    elif events is not None and options.measurements is None:
        raise ConfigError(
            f"{events} has no flow_samples: there is nothing to fit a node to",
            hint="give the folder that a server wrote with --events, or --measurements FILE, or no folder: then the"
            " figures of the reference machine are taken",
        )
    basis = basis_of(points, options)
    options = _completed(options, seen)
    if options.memory_bytes is not None and basis.model.idle_memory_bytes is None:
        raise ConfigError(
            "a node's memory is to be kept, but what a viewer takes of it was not measured",
            hint="give --measurements of crowds of several sizes with memory (python bench capacity), or no --memory",
        )
    rows = _simulated(spark, basis.model, options)
    names = [part.split()[0] for part in CAPACITY_DDL.split(", ")]
    frame = spark.createDataFrame([tuple(row[name] for name in names) for row in rows], CAPACITY_DDL)
    result.outputs["capacity"] = write_table(frame, f"{out}/capacity", partitions=1)
    summary = summary_of(rows, basis, options)
    fleet: dict[str, Any] = {}
    if source is not None and not source.absent:
        answer = loads.Answer(summary["viewers_per_node"], basis, of_nodes)
        outputs, fleet = loads.write_loads(spark, source.frame, out, answer, options)
        result.outputs.update(outputs)
    result.summary = {"answer": summary.pop("answer"), "fleet": fleet or None, **summary}
    return result


def _simulated(spark: SparkSession, model: NodeModel, options: CapacityOptions) -> list[dict[str, Any]]:
    return table_of(nodes_of(crowd(spark, sizes_to_try(model, options), options), model, options), model, options)


def _completed(options: CapacityOptions, seen: dict[str, float]) -> CapacityOptions:
    """Return `options` with what was not given taken from the records, else from the usual."""

    def known(name: str, value: float | None, usual: float) -> float:
        return seen.get(name, usual) if value is None else value

    return replace(
        options,
        bit_rate=known("bit_rate", options.bit_rate, 2_500_000.0),
        slow_share=known("slow_share", options.slow_share, 0.05),
        session_s=known("session_s", options.session_s, 600.0),
    )
