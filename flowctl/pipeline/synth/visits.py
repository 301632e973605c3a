"""Who comes when and from where in synthetic data: one row per visit, the times of its connections, their link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.pipeline.synth.kinds import FIRST_ABUSER, FIRST_SLOW, KINDS
from flowctl.pipeline.synth.plan import Cast, SynthOptions
from flowctl.pipeline.synth.steps import SLOTS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

VISITS_PER_TASK: Final = 150_000
"""About a million and a half events: some 50 MB of Parquet, a few seconds of work."""
CONNECTION_BITS: Final = 8


def chance(options: SynthOptions, salt: str, *columns: str) -> Column:
    """Return a number from 0 to 1 (excluded) that depends on the seed, `salt` and `columns` alone.

    A hash instead of `rand`, whose numbers depend on how the rows are spread over tasks.
    """
    hashed = f.xxhash64(f.lit(options.seed), f.lit(salt), *(f.col(name) for name in columns))
    return f.pmod(hashed, f.lit(1 << 40)) / f.lit(float(1 << 40))


def visits(spark: SparkSession, options: SynthOptions, cast: Cast) -> DataFrame:
    """Return the visits.

    Returns:
        One row per visit: visit, client, kind, key (of its variant), begun_us, and what the client is.
    """
    tasks = max(spark.sparkContext.defaultParallelism, -(-cast.visits // VISITS_PER_TASK))
    frame = spark.range(0, cast.visits, 1, tasks).withColumnRenamed("id", "visit")
    # Within a wave clients come in the order of their numbers, so numbers of visits are in the order of time.
    begun = f.col("visit") * f.lit(options.days * 86400e6 / cast.visits)
    return (
        frame.withColumn("client", f.col("visit") % cast.clients)
        .withColumn("kind", kind_of(options, cast))
        .withColumn("slot", (chance(options, "slot", "visit") * SLOTS).cast("int"))
        .select(
            "visit",
            "client",
            "kind",
            (f.col("kind") * SLOTS + f.col("slot")).alias("key"),
            (f.lit(options.start_s * 1_000_000) + begun).cast("bigint").alias("begun_us"),
            *_what_it_is(options, cast),
        )
    )


def kind_of(options: SynthOptions, cast: Cast) -> Column:
    """Return the number of the client's kind; the first clients are one of each, so that small sets have all."""
    among = chance(options, "kind", "client")
    chosen = f.lit(len(KINDS) - 1)
    for number in reversed(range(len(KINDS) - 1)):
        chosen = f.when(among < cast.shares[number], number).otherwise(chosen)
    wanted = [number for number in range(len(KINDS)) if _wanted(options, number)]
    first = f.element_at(f.array(*(f.lit(number) for number in wanted)), (f.col("client") + 1).cast("int"))
    return f.when(f.col("client") < len(wanted), first).otherwise(chosen)


def _wanted(options: SynthOptions, number: int) -> bool:
    """Whether at least one client of a kind is made: not where the options say that there are none."""
    return options.abusers > 0 if number >= FIRST_ABUSER else options.slow > 0 or number < FIRST_SLOW


def _what_it_is(options: SynthOptions, cast: Cast) -> list[Column]:
    """Return the columns of a visit that all of its events share."""
    number = (f.lit(float(cast.streams + 1)) ** chance(options, "stream", "visit")).cast("int") - 1
    # A random power is Zipf's law with exponent 1: the first stream has as many viewers as the next two, and so on.
    stream = f.when(f.col("kind") == 1, (f.col("client") % cast.streams).cast("int")).otherwise(number)
    return [
        address(cast).alias("peer_ip"),
        (1024 + chance(options, "port", "visit") * 60_000).cast("bigint").alias("peer_port"),
        f.format_string("node-%d", (chance(options, "node", "visit") * options.nodes).cast("int") + 1).alias("node"),
        stream.alias("stream_number"),
        chance(options, "place", "visit").alias("where_in_wave"),
        f.pow(f.lit(10.0), chance(options, "rtt", "client") * 1.3).alias("far"),  # 1 to 20 times the shortest way
    ]


def address(cast: Cast) -> Column:
    """Return the address of a client.

    Most ordinary clients have one of their own in 240.0.0.0/8, which belongs to nobody, side by side; one in ten has
    IPv6; one in twenty comes through a proxy of 241.0.0.0/8. Phones share addresses of 100.64.0.0/10. Half of the
    abusers are in 198.18.0.0/15, where nobody else is. The others are among the honest: in the phones' addresses, in
    the /64 of an ordinary client, behind a proxy, or at an address of their own between ordinary ones, an eighth each.
    """
    client, among = f.col("client"), f.col("client") % 8
    many = f.col("kind").isin([number for number, kind in enumerate(KINDS) if kind.many])
    abuser = f.col("kind").isin([number for number, kind in enumerate(KINDS) if kind.abuser])
    rank = (client * f.lit((1.0 - cast.shares[FIRST_ABUSER - 1]) / 2)).cast("bigint")
    phones = _dotted("100.", client % cast.addresses, 64)
    proxy = _dotted("241.", client % cast.proxies, 0)
    neighbour = _ipv6(f.floor(client / 10) * 10 + 7, 0xBAD)
    return (
        f.when(many, phones)
        # The first clients are one of each kind: near each other they would share an address here.
        .when(abuser & (client % 2 == 0) & (client >= len(KINDS)), _dotted("198.", rank % 130_000, 18))
        .when(abuser & (among == 1), phones)
        .when(abuser & (among == 3), neighbour)
        .when(abuser & (among == 5), proxy)
        .when(~abuser & (client % 10 == 7), _ipv6(client, 0))
        .when(~abuser & (client % 20 == 3), proxy)
        .otherwise(_dotted("240.", client, 0))
    )


def _dotted(first: str, number: Column, base: int) -> Column:
    """Return an IPv4 address whose last byte is 1 to 254."""
    low, middle = number % 254 + 1, f.floor(number / 254)
    parts = [f.floor(middle / 256) + base, middle % 256, low]
    return f.concat(f.lit(first), f.concat_ws(".", *(part.cast("bigint").cast("string") for part in parts)))


def _ipv6(number: Column, more: int) -> Column:
    """Return an address of 2001:db8::/32 in its canonical form, one /48 for each client of a group.

    Args:
        number: of the client.
        more: added to the last 16 bits but one: another machine in its /64.
    """
    network, host = f.hex(number % 65_535 + 1), f.hex(f.floor(number / 65_535) + 1)
    machine = f"{more:x}:" if more else ""
    return f.lower(f.concat(f.lit("2001:db8:"), network, f.lit(f"::{machine}"), host))


def connection_times(frame: DataFrame, options: SynthOptions, cast: Cast) -> DataFrame:
    """Add when a connection began, and how long it lasted.

    Args:
        frame: visits joined with what tells of their connections: connection, connections, least_s, most_s, gap_s.
        options: for the seed.
        cast: for the length of waves.

    Returns:
        The same with opened_us (since the epoch) and length_us.
    """
    wave_us = f.lit(cast.wave_s * 1e6)
    spacing_s = f.col("most_s") + f.col("gap_s")
    span_s = f.col("connections") * spacing_s
    # Visits that are longer than a wave are pressed together: with few days and many events everybody is in a hurry.
    pressed = f.least(f.lit(1.0), f.lit(cast.wave_s * 0.95) / span_s)
    offset = (
        f.col("where_in_wave") * (wave_us - span_s * pressed * 1e6) + f.col("connection") * spacing_s * pressed * 1e6
    )
    luck = chance(options, "length", "visit", "connection")
    length = (f.col("least_s") + (f.col("most_s") - f.col("least_s")) * luck * luck) * pressed
    return frame.withColumn("opened_us", f.col("begun_us") + offset.cast("bigint")).withColumn(
        "length_us", f.greatest(f.lit(1_100_000), (length * 1e6).cast("bigint"))
    )


def bytes_per_second(frame: DataFrame) -> DataFrame:
    """Add bytes_per_s, the rate of the stream: 320 kbit/s to 3.5 Mbit/s, the same for all of its viewers."""
    return frame.withColumn("bytes_per_s", 40_000 + f.pmod(f.xxhash64("stream_number"), f.lit(400_000)))
