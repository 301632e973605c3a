"""Makes event data of any size: seeded, the same however Spark cuts the work, with planted slow viewers and abusers.

Theory of operation. `flowctl.pipeline.synth.plan` has the script. Here, `spark.range` numbers the visits in the order
of time, hashes of that number say who comes and which variant happens, and one broadcast join with the steps of that
variant makes the events. No shuffle, no sort, no Python: a task writes the rows of its own span of time, so memory
does not grow with the data, and the same seed gives the same rows with any number of tasks.

What differs from the files of a recorder: a file holds rows of all nodes, in order of visits and not of time, belongs
to the hour in which its visits began, and has no ``flowctl.*`` keys in its metadata, because Spark cannot write any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.errors import ConfigError
from flowctl.pipeline.spark.session import generate_code
from flowctl.pipeline.synth.kinds import FIRST_ABUSER, KINDS
from flowctl.pipeline.synth.plan import Cast, SynthOptions, plan, steps_by_key
from flowctl.pipeline.synth.samples import samples
from flowctl.pipeline.synth.steps import HEAD_MS
from flowctl.pipeline.synth.visits import (
    CONNECTION_BITS,
    address,
    bytes_per_second,
    connection_times,
    kind_of,
    visits,
)
from flowctl.pipeline.tables import addresses
from flowctl.pipeline.tables.accounts import JobResult
from flowctl.pipeline.tables.place import Place
from flowctl.telemetry.schema import CONN_NUMBER_BITS, FLOW_EVENTS, SPARK_TYPES, TABLES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TRUTH_FOLDER: Final = "_truth/planted.parquet"
"""Below the data; a name with ``_`` is not data, so no job reads it by accident."""
MARKER: Final = "_synth.txt"
"""Says that the tables of a folder were made here; written before them, so that half of a set is known as such."""
SEQUENCE_BITS: Final = 12
"""A visit has fewer events than 4096, so `seq` is unique."""
_EVENT_BYTES: Final = 85
"""One event in a file, on average."""
_MADE: Final = (FLOW_EVENTS.name, "flow_samples")
_SOFT_BYTES: Final = 2 << 20
_HARD_BYTES: Final = 4 << 20
_HARD_AGE_MS: Final = 8000.0
_SOFT_AGE_MS: Final = 4000.0
_DEAF_TAKEN_BYTES: Final = 180_000
"""What buffers of both kernels take for a peer that reads nothing."""
_VIDEO_PER_S: Final = 30
_AUDIO_PER_S: Final = 43


def steps(spark: SparkSession) -> DataFrame:
    """Return the script as a table: one row per step of every variant, `key` as in `visits`; some 16,000 rows."""
    rows = []
    counts: dict[int, int] = {}
    for key, variant, step in steps_by_key():
        number = counts[key] = counts.get(key, -1) + 1
        drops = sum(item.drops for item in variant.steps if item.event == "dropped")
        rows.append(
            (
                key, number, step.connection, variant.connections, step.event, step.old, step.new, step.cause,
                step.axis, step.reason, step.value, step.limit, step.head_ms, step.place, step.before, step.since,
                step.fill, step.drops and (drops if step.event == "conn_closed" else 1), drops, step.taken,
                variant.least_s, variant.most_s, variant.gap_s, variant.link, variant.role,
            )
        )  # fmt: skip
    return spark.createDataFrame(
        rows,
        "key int, number int, connection int, connections int, event string, state_from string, state_to string, "
        "cause string, axis string, reason string, step_value double, step_limit double, head_ms double, place double, "
        "before double, since double, fill double, drops int, all_drops int, taken boolean, least_s double, "
        "most_s double, gap_s double, link double, role string",
    )


def timed(frame: DataFrame) -> DataFrame:
    """Add when the event was, and the edge before it, as offsets from the begin of the connection: at_us, before_us."""
    body = f.col("length_us") - f.lit(int(HEAD_MS * 1000))
    at = f.lit(int(HEAD_MS * 1000)) + (body * f.col("place")).cast("bigint")
    before = f.lit(int(HEAD_MS * 1000)) + (body * f.col("before")).cast("bigint")
    head = (f.col("head_ms") * f.col("far")).cast("bigint") * 1000
    since = f.lit(int(HEAD_MS * 1000)) + (body * f.col("since")).cast("bigint")
    frame = frame.withColumn("since_us", since)
    return frame.withColumn("at_us", f.when(f.col("place").isNull(), head).otherwise(at)).withColumn(
        "before_us", f.when(f.col("before") < 0, f.lit(0)).otherwise(before)
    )


def events(spark: SparkSession, options: SynthOptions, cast: Cast) -> DataFrame:
    """Return the events.

    Returns:
        The columns of `FLOW_EVENTS`, and date and hour of the visit's begin; one row per event.
    """
    joined = visits(spark, options, cast).join(f.broadcast(steps(spark)), "key")
    frame = timed(bytes_per_second(connection_times(joined, options, cast)))
    columns = {column.name: f.lit(None) for column in FLOW_EVENTS.columns} | _identity() | _figures() | _closing()
    named = [columns[column.name].cast(SPARK_TYPES[column.kind]).alias(column.name) for column in FLOW_EVENTS.columns]
    begun = f.timestamp_micros("begun_us")
    return frame.select(*named, f.to_date(begun).alias("date"), f.date_format(begun, "HH").alias("hour"))


def _identity() -> dict[str, Column]:
    """Return who, when and what."""
    visit = f.col("visit")
    plays = f.col("role") != "unknown"
    number = f.shiftleft(visit, CONNECTION_BITS) + f.col("connection")
    first = f.shiftleft(f.floor(f.col("begun_us") / 86_400_000_000) * 86_400, CONN_NUMBER_BITS)
    role = f.when(f.col("head_ms").isNotNull() & (f.col("head_ms") < 55) & plays, "unknown").otherwise(f.col("role"))
    named = role != "unknown"
    return {
        "ts": f.timestamp_micros(f.col("opened_us") + f.col("at_us")),
        "node": f.col("node"),
        "seq": f.shiftleft(visit, SEQUENCE_BITS) + f.col("number"),
        "conn_id": f.when(f.col("event") == "conn_refused", f.lit(0)).otherwise(first + number),
        "peer_ip": f.col("peer_ip"),
        "peer_port": f.col("peer_port") + f.col("connection"),
        "role": role,
        "app": f.when(named, "live"),
        "stream": f.when(named, f.concat(f.lit("stream"), f.col("stream_number").cast("string"))),
        **{name: f.col(name) for name in ("event", "state_from", "state_to", "cause", "axis", "reason")},
    }


def _dropped_per_episode() -> Column:
    """Return the bytes that one episode of drops removes: what the stream has and the link has not, in a part of it."""
    rest = f.greatest(f.lit(0.05), 1 - f.col("link"))
    return (
        f.col("bytes_per_s") * rest * f.col("length_us") / 1e6 / f.greatest(f.col("all_drops"), f.lit(1)) * 0.4
    ).cast("bigint")


def _taken() -> Column:
    """Return the bytes that the kernel has taken since the connection was opened; a deaf peer's stop at its buffers."""
    plays = f.col("role") == "play"
    all_taken = (f.col("bytes_per_s") * f.col("link") * f.col("at_us") / 1e6).cast("bigint")
    return f.when(plays & (f.col("link") == 0), f.lit(_DEAF_TAKEN_BYTES)).otherwise(3_500 + all_taken)


def _figures() -> dict[str, Column]:
    """Return loads, marks, drops and what the kernel says."""
    waits = f.col("fill") > 0
    age, size = f.col("fill") * _HARD_AGE_MS, f.col("fill") * _HARD_BYTES
    hard = f.col("state_to") == "HARD_LIMIT"
    on_bytes = f.col("axis") == "bytes"
    mark = f.when(on_bytes, f.when(hard, _HARD_BYTES).otherwise(_SOFT_BYTES)).otherwise(
        f.when(hard, _HARD_AGE_MS).otherwise(_SOFT_AGE_MS)
    )
    edge = f.col("before").isNotNull()
    drops = f.col("drops") > 0
    size_dropped = _dropped_per_episode() * f.col("drops")
    handshake = f.col("event") == "handshake_done"
    return {
        "state_ms": f.when(edge, (f.col("at_us") - f.col("before_us")) / 1000),
        "value": f.when(f.col("step_value") < 0, f.when(on_bytes, size).otherwise(age))
        .when(handshake, f.col("at_us") / 1000)
        .when(f.col("state_to") == "READY", (f.col("at_us") - f.col("since_us")) / 1000)
        .otherwise(f.col("step_value")),
        "limit": f.when(f.col("step_limit") < 0, mark).otherwise(f.col("step_limit")),
        "queued_bytes": f.when(waits, size),
        "queued_messages": f.when(waits, size / 4000),
        "queued_age_ms": f.when(waits, age),
        "dropped_messages": f.when(drops, size_dropped / 4000),
        "dropped_bytes": f.when(drops, size_dropped),
        "sent_bytes": f.when(edge | f.col("taken") | f.col("event").isin("dropped", "conn_closed"), _taken()),
        "rtt_us": f.when(f.col("taken"), f.col("far") * 12_000),
        "unsent_bytes": f.when(f.col("taken"), size / 20),
        "viewer_delay_ms": f.when(f.col("taken"), age + 200 * f.col("far")),
    }


def _closing() -> dict[str, Column]:
    """Return `detail`: totals of a connection that ends, in the form of the recorder; who a command is from."""
    seconds = f.col("length_us") / 1e6
    whole = seconds.cast("bigint")
    dropped = f.when(f.col("drops") > 0, (_dropped_per_episode() * f.col("drops") / 4000).cast("bigint")).otherwise(0)
    plays = f.col("role") == "play"
    key, inter, audio = whole / 2, whole * (_VIDEO_PER_S - 0.5), whole * _AUDIO_PER_S
    counts = [f.when(plays, part).otherwise(0).cast("bigint") for part in (key, inter, audio)]
    names = ("key", "inter", "audio")
    accepted = _json(dict(zip(names, counts, strict=True)))
    left = f.greatest(f.lit(0), counts[1] - dropped).cast("bigint")
    sent = _json(dict(zip(names, (counts[0], left, counts[2]), strict=True)))
    by_reason = f.concat(f.lit('{"thinned from the queue": '), _json({"inter": dropped}), f.lit("}"))
    totals = f.concat(
        f.lit('{"accepted": '), accepted, f.lit(', "sent": '), sent, f.lit(', "dropped": '),
        f.when(f.col("drops") > 0, by_reason).otherwise(f.lit("{}")),
        f.lit(', "connected_s": '), f.round(seconds, 3).cast("string"),
        f.when(f.col("reason") == "protocol error", ', "code": "chunk-type"').otherwise(""),
        f.when(f.col("since").isNotNull(), _trouble(seconds)).otherwise(f.lit("")), f.lit("}"),
    )  # fmt: skip
    return {"detail": f.when(f.col("event") == "conn_closed", totals)}


def _trouble(seconds: Column) -> Column:
    """Return how long the trouble had lasted in which a connection ended, and what the kernel took in it."""
    trouble_s = (seconds - HEAD_MS / 1000) * (1 - f.col("since"))
    taken = (f.col("bytes_per_s") * f.col("link") * trouble_s).cast("bigint").cast("string")
    lasted = f.round(trouble_s, 3).cast("string")
    return f.concat(f.lit(', "trouble_s": '), lasted, f.lit(', "trouble_sent_bytes": '), taken)


def _json(counts: dict[str, Column]) -> Column:
    """Return a JSON object with these counts; put together by hand, since `to_json` of a structure is far slower."""
    parts: list[Column] = []
    for number, (name, count) in enumerate(counts.items()):
        parts += [f.lit(f'{"{" if number == 0 else ", "}"{name}": '), count.cast("string")]
    return f.concat(*parts, f.lit("}"))


def planted(spark: SparkSession, options: SynthOptions, cast: Cast) -> DataFrame:
    """Return who was planted.

    Returns:
        address (of IPv6 its /64), kind, abuser (whether there is one), honest (whether there is anybody who is none);
        one row per address with an abuser, or with a client who is honest and looks bad.
    """
    names = f.element_at(f.array(*(f.lit(kind.name) for kind in KINDS)), f.col("kind") + 1)
    clients = spark.range(0, cast.clients).withColumnRenamed("id", "client").withColumn("kind", kind_of(options, cast))
    abuser = f.col("kind") >= FIRST_ABUSER
    told = clients.select(
        address(cast).alias("written"),
        f.when(f.col("kind") > 1, names).alias("name"),
        abuser.alias("abuser"),
    )
    return (
        addresses.with_unit(told, "written")
        .groupBy("address")
        .agg(
            # Of several the abuser's name.
            f.coalesce(f.min(f.when(f.col("abuser"), f.col("name"))), f.min("name")).alias("kind"),
            f.max("abuser").alias("abuser"),
            f.max(~f.col("abuser")).alias("honest"),
        )
        .where(f.col("kind").isNotNull())
    )


def run(spark: SparkSession, events_path: str, out: str, options: SynthOptions | None = None) -> JobResult:
    """Make the data below `out`, as a recorder would have written it, and who was planted beside it.

    Args:
        spark: session.
        events_path: not used; every job has it.
        out: folder; see `SynthOptions.replace`.
        options: what to make. None: all defaults.

    Returns:
        No accounts, since nothing is read; `summary` has the numbers of rows, clients and planted ones.

    Raises:
        ConfigError: `out` cannot be written, or holds tables that are not to be replaced.
    """
    del events_path
    options = options or SynthOptions()
    cast = plan(options)
    result = JobResult(name="synth")
    _clear(spark, Place(spark, out), replace=options.replace)
    generate_code(spark, options.events * _EVENT_BYTES)
    with _fast_settings(spark):
        path = f"{out}/{FLOW_EVENTS.name}"
        _write(events(spark, options, cast), path)
        result.outputs[FLOW_EVENTS.name] = path
        summary: dict[str, Any] = {"events": _rows(spark, path)}
        if options.samples_s is not None:
            path = f"{out}/flow_samples"
            _write(samples(spark, options, cast), path)
            result.outputs["flow_samples"] = path
            summary["samples"] = _rows(spark, path)
        if options.truth:
            path = f"{out}/{TRUTH_FOLDER}"
            planted(spark, options, cast).coalesce(1).write.mode("overwrite").parquet(path)
            result.outputs["planted"] = path
            groups = spark.read.parquet(path).groupBy("abuser", "honest").count().collect()
            found = {(row["abuser"], row["honest"]): row["count"] for row in groups}
            summary["planted_abusers"] = found.get((True, False), 0) + found.get((True, True), 0)
            summary["planted_beside_honest"] = found.get((True, True), 0)
            summary["planted_honest"] = found.get((False, True), 0)
    result.summary = summary | {"clients": cast.clients, "visits": cast.visits, "streams": cast.streams}
    return result


def _clear(spark: SparkSession, place: Place, *, replace: bool) -> None:
    """See to it that nothing is lost in `place`, take away what was made there before, and mark the folder.

    Records of a server cannot be made again, and the folder for them is named on the same command line.

    Raises:
        ConfigError: there are tables, and `replace` is not set or they were not made here.
    """
    there = [name for name in TABLES if place.exists(name)]
    marked = place.exists(MARKER) or place.exists(TRUTH_FOLDER)
    foreign = [name for name in there if not marked or name not in _MADE or not _is_made(spark, place.path(name))]
    if foreign:
        raise ConfigError(
            f"{place.folder} has {', '.join(foreign)} that synth did not make",
            hint="name a new folder, like `synthetic`",
        )
    if there and not replace:
        raise ConfigError(
            f"{place.folder} has data of an earlier run", hint="name a new folder, or give --replace to make it anew"
        )
    place.write_text(MARKER, "Made by flowctl analyze synth.\n")
    for name in (*there, TRUTH_FOLDER):  # samples or truth of other data must not stay beside these
        place.delete(name)


def _is_made(spark: SparkSession, path: str) -> bool:
    """Return whether all files of a table have names as Spark gives them; a recorder names its files by its node."""
    listed = spark.read.format("binaryFile").option("recursiveFileLookup", "true").option("pathGlobFilter", "*.parquet")
    return all(name.rpartition("/")[2].startswith("part-") for name in listed.load(path).inputFiles())


def _write(frame: DataFrame, path: str) -> None:
    # Small row groups: a task has a writer open for each of its hours, and each holds a row group in memory.
    frame.write.mode("overwrite").partitionBy("date", "hour").option("parquet.block.size", 32 << 20).parquet(path)


def _rows(spark: SparkSession, path: str) -> int:
    """Return the rows of a table; the footers say so, so no column is read."""
    return spark.read.parquet(path).count()


class _fast_settings:  # noqa: N801 - used as a function, like contextlib's own
    """Within this context Spark writes folders without sorting rows first, and compiles the projection in parts."""

    _SETTINGS: Final = {
        # Rows come in the order of time: a task has few hours, and keeps a file open for each.
        "spark.sql.maxConcurrentOutputFileWriters": "200",
        # One method for 32 columns is longer than what Java compiles (8000 bytes); without whole stages each column
        # is a method of its own. Measured: 3.4 instead of 12 s of processor time for a million events.
        "spark.sql.codegen.wholeStage": "false",
    }

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        for name, value in self._SETTINGS.items():
            self._before[name] = self._spark.conf.get(name, None)
            self._spark.conf.set(name, value)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                self._spark.conf.unset(name)
            else:
                self._spark.conf.set(name, value)
