"""Makes records of any size: seeded, the same however Spark cuts the work, with worlds planted in it, and their truth.

Theory of operation. `worlds` declares who comes, `people` makes connections of that, `tables` their records. Below
``_truth`` lies the table ``addresses``: who abuses, and who only looks so. Files hold rows of all nodes and in no
order, and have no ``flowctl.*`` metadata, because Spark cannot write any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Observation
from pyspark.sql import functions as f

from flowctl.analyze.job import JobNote, JobState
from flowctl.analyze.records import addresses
from flowctl.analyze.records.place import RecordPlace, local_path
from flowctl.analyze.run import locked
from flowctl.analyze.synth.people import Cast, SynthOptions, connections, plan
from flowctl.analyze.synth.tables import closes, events, opens, samples, server_events
from flowctl.errors import ConfigError
from flowctl.records.telemetry.schema import FLOW_CLOSES, FLOW_EVENTS, FLOW_OPENS, FLOW_SAMPLES, TABLES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TRUTH_FOLDER: Final = "_truth"
"""Folder of the truth, below the data: no job reads a name with ``_`` as data."""
MARKER: Final = "_synth.txt"
"""Says that the tables of a folder were made here; written before them, so that half of a set is known as such."""


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
    at_address = addresses.with_unit(told.distinct(), "written").groupBy("address")
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


def run(spark: SparkSession | Callable[[], SparkSession], out: str, options: SynthOptions | None = None) -> JobNote:
    """Make the data below `out`, as a recorder writes it, and what was planted beside it: all, or nothing."""
    options = options or SynthOptions()
    cast = plan(options)
    settings = {}
    if not callable(spark) or local_path(out) is None:
        spark = spark() if callable(spark) else spark
        settings = dict(spark.sparkContext.getConf().getAll())
    place = RecordPlace(out, settings)
    _check(place, replace=options.replace)
    with locked(place):
        place.clear_staging()
        spark = spark() if callable(spark) else spark
        staging = place.staging()
        try:
            return _make(spark, place, staging, options, cast)
        finally:
            staging.remove()


def _make(spark: SparkSession, place: RecordPlace, staging: RecordPlace, options: SynthOptions, cast: Cast) -> JobNote:
    summary: dict[str, Any] = {"clients": cast.clients, "worlds": [crowd.world.name for crowd in cast.crowds]}
    outputs = {}
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
    for name, frame in tables(spark, options, cast).items():
        told = Observation()
        rows = frame.observe(told, f.count("*").alias("rows"))
        # Small row groups: a task has a writer open for each of its hours, and each holds a row group in memory.
        writer = rows.write.partitionBy("date", "hour").option("parquet.block.size", 32 << 20)
        writer.parquet(staging.path(name))
        summary[name] = told.get["rows"]
        outputs[name] = place.path(name)
    if options.truth:
        path = f"{TRUTH_FOLDER}/addresses.parquet"
        truth(spark, options, cast).coalesce(1).write.parquet(staging.path(path))
        outputs["truth of addresses"] = place.path(path)
    place.write_text(MARKER, "Made by flowctl analyze synth.\n")
    for name in (TRUTH_FOLDER, *TABLES):  # samples or truth of other data must not stay beside these
        place.delete(name)
        if staging.exists(name):
            place.adopt(staging, name)
    return JobNote("synth", JobState.DONE, summary=summary, outputs=outputs)


def _check(place: RecordPlace, *, replace: bool) -> None:
    """See to it that nothing is lost in `place`."""
    there = [name for name in TABLES if place.exists(name)]
    marked = place.exists(MARKER) or place.exists(TRUTH_FOLDER)

    def made(name: str) -> bool:
        files = (path.rpartition("/")[2] for path, _ in place.storage.walk(name))
        return marked and all(file.startswith("part-") for file in files if file.endswith(".parquet"))

    if recorded := [name for name in there if not made(name)]:
        message = f"{place.folder} has {', '.join(recorded)} that synth did not make"
        raise ConfigError(message, hint="name a new folder, like `synthetic`")
    if there and not replace:
        message = f"{place.folder} has data of an earlier run"
        raise ConfigError(message, hint="name a new folder, or give --replace to make it anew")
