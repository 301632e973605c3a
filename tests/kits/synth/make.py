"""Makes records of any size, the same however Spark cuts the work, with worlds planted in them, and their truth.

Theory of operation. `worlds` declares who comes, `people` makes connections of that, `tables` their records. Below
``_truth`` lies the table ``addresses``: who abuses, and who only looks so. Files hold rows of all nodes and in no
order, and have no ``flowctl.*`` metadata, because Spark cannot write any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Observation
from pyspark.sql import functions as f

from flowctl.analyze.records import addresses
from flowctl.records.telemetry.schema import FLOW_CLOSES, FLOW_EVENTS, FLOW_OPENS, FLOW_SAMPLES
from synth.people import Cast, SynthOptions, connections, plan
from synth.tables import closes, events, opens, samples, server_events

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TRUTH: Final = "_truth/addresses.parquet"
"""Table of the truth, below the records: no job reads a name with ``_`` as data."""


def tables(spark: SparkSession, options: SynthOptions, cast: Cast) -> dict[str, DataFrame]:
    frame = connections(spark, options, cast)
    made = {
        FLOW_CLOSES.name: closes(frame, options),
        FLOW_OPENS.name: opens(frame, options),
        FLOW_EVENTS.name: events(frame).unionByName(server_events(spark, options)),
    }
    return made | ({FLOW_SAMPLES.name: samples(frame, options)} if options.samples_s is not None else {})


def truth(spark: SparkSession, options: SynthOptions, cast: Cast) -> DataFrame:
    """Return who was planted at which address; of several kinds at one, the abuser's."""
    told = connections(spark, options, cast).select(
        f.col("peer_ip").alias("written"), "abuser", f.when(~f.col("plain"), f.col("name")).alias("name")
    )
    kind = f.coalesce(f.min(f.when(f.col("abuser"), f.col("name"))), f.min("name")).alias("kind")
    at_address = addresses.with_unit(told.distinct().withColumnRenamed("written", "peer_ip")).groupBy("address")
    by_address = at_address.agg(kind, f.max("abuser").alias("abuser"), f.max(~f.col("abuser")).alias("honest"))
    return by_address.where(f.col("kind").isNotNull())


_SETTINGS: Final = {
    # Rows come in the order of time: a task has few hours, and keeps a file open for each, so that none is sorted.
    "spark.sql.maxConcurrentOutputFileWriters": "200",
    # One method for 32 columns is longer than what Java compiles (8000 bytes); without whole stages each column
    # is a method of its own. Measured: 3.4 instead of 12 s of processor time for a million events.
    "spark.sql.codegen.wholeStage": "false",
    # Interpreted, what several columns share would be computed for each of them.
    "spark.sql.codegen.factoryMode": "FALLBACK",
}
"""They stay; jobs in the same session choose theirs (`session.fit`)."""


def make(spark: SparkSession, out: str, options: SynthOptions | None = None) -> dict[str, int]:
    """Make the records below the new folder `out`, and what was planted beside them; return the rows of each table."""
    options = options or SynthOptions()
    cast = plan(options)
    made = {}
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
    for name, frame in tables(spark, options, cast).items():
        told = Observation()
        rows = frame.observe(told, f.count("*").alias("rows"))
        # Small row groups: a task has a writer open for each of its hours, and each holds a row group in memory.
        writer = rows.write.partitionBy("date", "hour").option("parquet.block.size", 32 << 20)
        writer.parquet(f"{out}/{name}")
        made[name] = told.get["rows"]
    truth(spark, options, cast).coalesce(1).write.parquet(f"{out}/{TRUTH}")
    return made


def found(spark: Any, scores: str, planted: str) -> dict[str, Any]:
    """Return how many planted abusers were banned or limited, and what honest ones got; an address may have both."""
    who = spark.read.parquet(f"{planted}/{TRUTH}").withColumnRenamed("kind", "who")
    judged = spark.read.parquet(scores).where("kind = 'address'").join(who, "address", "full_outer")
    others: dict[str, Any] = {"who": "ordinary", "abuser": False, "honest": True}
    counts = (
        judged.fillna(others)
        .groupBy(*others)
        .agg(
            f.count("*").alias("all"),
            f.count_if(f.col("verdict").isin("ban", "subnet_ban")).alias("banned"),
            f.count_if(f.col("verdict").isin("shared", "limit")).alias("limited"),
        )
    )
    rows = counts.orderBy(*others).toArrow().to_pandas()
    abusers, honest, alone = rows[rows["abuser"]], rows[rows["honest"]], rows[rows["abuser"] & ~rows["honest"]]
    sums = {
        "abusive_addresses": abusers["all"].sum(),
        "found": abusers[["banned", "limited"]].to_numpy().sum(),
        "alone": alone["all"].sum(),
        "alone_found": alone[["banned", "limited"]].to_numpy().sum(),
        "honest_addresses": honest["all"].sum(),
        "honest_banned": honest["banned"].sum(),
    }
    by_kind = {
        f"{row.who}{' beside others' if row.abuser and row.honest else ''}": (
            f"{row.banned} banned and {row.limited} limited of {row.all}"
        )
        for row in rows.itertuples()
    }
    return {name: int(value) for name, value in sums.items()} | {"by_kind": by_kind}
