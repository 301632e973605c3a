"""Who comes when and from where in synthetic records: one row per connection, and where each of its episodes lies.

Theory of operation. Time is cut into *waves* of equal length; each *client* comes once in each, and that is a *visit*
of one or more connections. `spark.range` numbers the visits, and all that is random is a hash of such a number and the
seed, never `rand`: nothing depends on how Spark cuts the work, and there is no shuffle, no sort and no Python.

Times within a connection are whole microseconds of the monotonic clock (``*_us``), so that sums are exact.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import functions as f

from flowctl.records.telemetry.schema import CONN_NUMBER_BITS
from synth.worlds import BY_NAME, PUBLISHER, WORLDS, World

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MOST_EVENTS: Final = 100_000_000_000
"""Most events, a terabyte or so: with more, identities would not fit."""
MOST_CLIENTS: Final = 16_000_000
WAVES: Final = 8
"""Visits per client, unless there are more visits than that."""
CLIENTS_PER_STREAM: Final = 200
VISITS_PER_TASK: Final = 100_000
CONNECTION_BITS: Final = 8
HARD_US: Final = 100_000
"""Time in HARD_LIMIT before the connection is ended for it."""
REST_US: Final = 90e6
"""Pause of a publisher: longer than `BACK_S` of `ingest`, so that it begins a new broadcast."""
_BLOCK: Final = 256 * 254
"""Addresses of a /16 without those that end with 0 or 255: worlds share none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthOptions:
    """Size, time and seed of synthetic records."""

    events: int = 100_000  # about how many closes and events, together
    seed: int = 1  # of everything that is random
    days: float = 1.0  # time in which connections begin
    start_s: int = 1_767_225_600  # its begin, seconds since the epoch (UTC)
    worlds: tuple[str, ...] = tuple(world.name for world in WORLDS)
    nodes: int = 4  # servers
    samples_s: float | None = None  # interval of `flow_samples`; None: not made, and closes tell what ten seconds saw

    def __post_init__(self) -> None:
        bounds = {"events": (1, MOST_EVENTS), "days": (0.01, 366), "nodes": (1, 1000), "samples_s": (1, 3600)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value:g}, allowed is {low:g} to {high:g}")
        unknown = ", ".join(sorted(set(self.worlds) - set(BY_NAME)))
        if unknown or not self.worlds:
            raise ValueError(f"there is no {unknown or 'world'}, only {', '.join(BY_NAME)}")

    @property
    def interval_us(self) -> int:
        return int((self.samples_s or 10.0) * 1e6)


@dataclass(frozen=True, slots=True)
class Crowd:
    """A world as it is made: its clients have the numbers from `first` on, the first `streams` of them publish."""

    world: World
    first: int
    clients: int
    streams: int
    first_address: int

    @property
    def last(self) -> int:
        """One after the number of its last client."""
        return self.first + self.clients

    @property
    def units(self) -> int:
        """Addresses (of IPv6: networks) of those who do not publish; publishers have one each after them."""
        return -(-(self.clients - self.streams) // self.world.crowd)


@dataclass(frozen=True, slots=True)
class Cast:
    """Clients and connections that follow from `SynthOptions`."""

    crowds: tuple[Crowd, ...]
    waves: int
    wave_s: float
    clients: int


def plan(options: SynthOptions) -> Cast:
    """Return how many come, so that about `options.events` rows are the result."""
    worlds = [BY_NAME[name] for name in dict.fromkeys(options.worlds)]
    weight = sum(world.weight for world in worlds)
    wanted = [options.events * world.weight / weight / _rows_per_visit(world) for world in worlds]
    waves = max(WAVES, -(-round(sum(wanted)) // MOST_CLIENTS))
    crowds, first, address = [], 0, 0
    for world, visits in zip(worlds, wanted, strict=True):
        clients = max(len(world.kinds) + 1 + world.placed, round(visits / waves))
        streams = max(1, clients // CLIENTS_PER_STREAM)
        crowds.append(Crowd(world, first, clients, streams, address))
        first += clients
        address += -(-(crowds[-1].units + streams) // _BLOCK) * _BLOCK
    return Cast(tuple(crowds), waves, options.days * 86400 / waves, first)


def _rows_per_visit(world: World) -> float:
    """Return closes and events of a visit on average, crowds being full."""
    share = sum(kind.share * kind.rows for kind in world.drawn) / sum(kind.share for kind in world.drawn)
    placed = sum(kind.placed * kind.rows for kind in world.kinds) / world.crowd
    return share * (1 - world.placed / world.crowd) + placed


def chance(options: SynthOptions, salt: str, *columns: str) -> Column:
    """Return a number from 0 to 1 (excluded) that depends on the seed, `salt` and `columns` alone."""
    hashed = f.xxhash64(f.lit(options.seed), f.lit(salt), *(f.col(name) for name in columns))
    return f.pmod(hashed, f.lit(1 << 40)) / f.lit(float(1 << 40))


def declared(spark: SparkSession, cast: Cast) -> tuple[DataFrame, DataFrame]:
    """Return the crowds, with the keys of their kinds; and the kinds by `key`, with their scripts."""
    members = [PUBLISHER] + [kind for world in WORLDS for kind in world.kinds]  # all: types are those of values
    keys = {kind: key for key, kind in enumerate(dict.fromkeys(members))}
    kinds = [{"key": key, **asdict(kind), "script": kind.script} for kind, key in keys.items()]
    for kind in kinds:
        kind["limits"] = [dict(zip(("axis", "value", "limit"), limit, strict=True)) for limit in kind["limits"]]
    crowds = [
        {
            **{name: getattr(crowd, name) for name in ("first", "last", "streams", "first_address", "units")},
            **{name: getattr(crowd.world, name) for name in ("crowd", "ipv6")},
            "world": crowd.world.name,
            "placed": [keys[kind] for kind in crowd.world.kinds for _ in range(kind.placed)],
            "one_each": [keys[kind] for kind in crowd.world.drawn],
            "drawn": [keys[kind] for kind in crowd.world.drawn for _ in range(round(kind.share * 10))],
        }
        for crowd in cast.crowds
    ]
    of_crowd, of_kind = (spark.createDataFrame(pa.Table.from_pylist(rows)) for rows in (crowds, kinds))
    return of_crowd.withColumn("placed", f.col("placed").cast("array<int>")), of_kind.drop("placed")


def connections(spark: SparkSession, options: SynthOptions, cast: Cast) -> DataFrame:
    """Return one row per connection: what it is (`declared`), who and when it was, and where its episodes lie.

    A connection has `lead_us` and then slices of `slice_us`, each with an episode at its end: `leave_us` in READY, then
    `over_us` and `soft_us`, whose last part may be `hard_us`.
    """
    visits = cast.clients * cast.waves
    tasks = max(1 if visits < 20_000 else spark.sparkContext.defaultParallelism, -(-visits // VISITS_PER_TASK))
    crowds, kinds = declared(spark, cast)
    frame = spark.range(0, visits, 1, tasks).withColumnRenamed("id", "visit")
    frame = frame.withColumn("client", f.col("visit") % cast.clients)
    of_crowd = (f.col("client") >= f.col("first")) & (f.col("client") < f.col("last"))
    frame = frame.join(f.broadcast(crowds), of_crowd).withColumn("inside", f.col("client") - f.col("first"))
    frame = frame.withColumn("key", _key(options)).join(f.broadcast(kinds), "key")
    frame = frame.withColumns(_of_visit(options, cast))
    frame = frame.withColumn("connection", f.explode(f.sequence(f.lit(0), f.col("connections").cast("int") - 1)))
    for columns in (_of_connection(options, cast), *_episodes(options)):
        frame = frame.withColumns(columns)
    return frame


def _key(options: SynthOptions) -> Column:
    """Return the key of a client's kind: of the first ones by their place, so that small sets have all kinds."""
    place = f.col("inside") - f.col("streams")
    in_crowd, after = place % f.col("crowd"), place - f.size("placed")

    def one(keys: str, number: Column) -> Column:
        return f.get(keys, number.cast("int"))

    return (
        f.when(place < 0, 0)
        .when(in_crowd < f.size("placed"), one("placed", in_crowd))
        .when(after < f.size("one_each"), one("one_each", after))
        .otherwise(one("drawn", chance(options, "kind", "client") * f.size("drawn")))
    )


def _of_visit(options: SynthOptions, cast: Cast) -> dict[str, Column]:
    # A random power is Zipf's law: the first stream has as many viewers as the next two, and so on.
    zipf = f.least(f.pow(f.col("streams") + 1.0, chance(options, "stream", "visit")) - 1, f.col("streams") - 1)
    wave = f.floor(f.col("visit") / cast.clients)
    return {
        "stream_number": f.when(f.col("role") == "publish", f.col("inside")).otherwise(zipf),
        "node": f.format_string("node-%d", (chance(options, "node", "visit") * options.nodes).cast("int") + 1),
        "begun_us": (f.lit(options.start_s * 1e6) + wave * (cast.wave_s * 1e6)).cast("bigint"),
        "far": f.pow(f.lit(10.0), chance(options, "rtt", "client") * 1.3),  # 1 to 20 times the shortest way
        "luck": chance(options, "luck", "visit"),
        "hit": f.get("limits", f.floor(chance(options, "limit", "visit") * f.size("limits")).cast("int")),
    }


def _of_connection(options: SynthOptions, cast: Cast) -> dict[str, Column]:
    """Return when it began and how long it lasted; visits that are longer than a wave are pressed together."""
    wave_us = cast.wave_s * 1e6
    spacing_us = (f.col("most_s") + f.col("gap_s")) * 1e6
    span_us = f.col("connections") * spacing_us
    # A publisher that comes back within a minute is one whose line failed: all of them rest at the end of a wave.
    rest_us = f.when(f.col("role") == "publish", min(wave_us / 2, max(wave_us / 10, REST_US))).otherwise(wave_us / 10)
    pressed = f.least(f.lit(1.0), (f.lit(wave_us) - rest_us) / span_us)
    late = chance(options, "begin", "visit") * (wave_us - span_us * pressed)
    begin = f.when(f.col("role") == "publish", 0).otherwise(late)
    opened = f.col("begun_us") + (begin + f.col("connection") * spacing_us * pressed).cast("bigint")
    luck = chance(options, "length", "visit", "connection")
    length_s = (f.col("least_s") + (f.col("most_s") - f.col("least_s")) * luck * luck) * pressed
    return {
        "opened_us": opened,
        "duration_us": f.greatest(f.lit(20_000), (length_s * 1e6).cast("bigint")),
        "peer_ip": _address(options),
        "peer_port": (1024 + chance(options, "port", "visit", "connection") * 60_000).cast("bigint"),
        "stream": f.concat_ws("-", "world", f.col("stream_number").cast("bigint").cast("string")),
    }


def _episodes(options: SynthOptions) -> list[dict[str, Column]]:
    """Return the identity, when media begins, the rate of the stream, and where states change; in steps."""
    col = f.col
    number = f.shiftleft("visit", CONNECTION_BITS) + col("connection")
    startup = (col("far") * 55_000).cast("bigint")
    trouble = (col("slice_us") * col("trouble")).cast("bigint")
    soft = (trouble * col("soft")).cast("bigint")
    hard = f.least(f.lit(HARD_US), f.floor(col("duration_us") / 100))
    return [
        {
            "number": number,
            "conn_id": (options.start_s << CONN_NUMBER_BITS) + number,
            "startup_us": f.when((col("role") != "unknown") & (startup < col("duration_us")), startup),
            "message_bytes": 1000 + f.pmod(f.xxhash64("stream"), f.lit(12_000)),
        },
        {"slice_us": f.coalesce(f.floor(f.try_divide(col("duration_us") - col("startup_us"), "episodes")), f.lit(0))},
        {
            "lead_us": col("duration_us") - col("slice_us") * col("episodes"),
            "leave_us": col("slice_us") - trouble,
            "over_us": trouble - soft,
            "soft_us": soft,
            "hard_us": f.when(col("hard") & col("startup_us").isNotNull(), hard).otherwise(0),
        },
    ]


def _address(options: SynthOptions) -> Column:
    """Return the address of a connection: of 240.0.0.0/4, which belongs to nobody, or of 2001:db8::/32."""
    col, publishes = f.col, f.col("role") == "publish"
    viewer = f.greatest(f.lit(0), col("inside") - col("streams"))
    unit, inside = f.floor(viewer / col("crowd")), viewer % col("crowd")
    moved = f.floor(chance(options, "address", "visit", "connection") * col("units"))
    place = f.when(publishes, col("units") + col("inside")).when(col("moves"), moved).otherwise(unit)
    host = f.when(col("moves"), 1 + col("connection") + 256 * f.pmod("visit", f.lit(255))).otherwise(1)
    hexed = (f.hex(part) for part in (1 + unit % 65_535, 1 + inside, host))
    six = f.lower(f.format_string("2001:db8:%s:%s::%s", *hexed))
    low, middle = (col("first_address") + place) % 254 + 1, f.floor((col("first_address") + place) / 254)
    bytes_ = (240 + f.floor(middle / 65_536) % 15, f.floor(middle / 256) % 256, middle % 256, low)
    four = f.concat_ws(".", *(byte.cast("bigint").cast("string") for byte in bytes_))
    return f.when(col("ipv6") & ~publishes, six).otherwise(four)
