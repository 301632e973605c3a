"""From evidence to verdicts: aged sums, standing, the scores of addresses and subnets (DataFrame -> DataFrame).

Evidence is summed per address and kind, each piece halved for every `Weights.half_life_s` of age, and the sum is
divided by one plus the hours in which connections of that address behaved (`flowctl.pipeline.abuse.weights` has the
reasons). Sums are of whole numbers (millionths of an occurrence), so that the result is the same in whichever order
rows come; evidence ages as the newest of its minute.

What is said of an address, `verdict`:

- ``ban``: nobody behaves there, and what harms is enough.
- ``shared``: it would be enough, but others behave there: new connections are limited, and nobody is kept out.
- ``limit``: enough, but only with evidence that never bans (`weights.MILD`): the same.
- ``subnet_ban``: as ban, covered by that of its whole subnet, where nearly all are abusive and nobody honest was seen.
- ``allowed``, ``no_address``: it would be one of these, but it is on the allow list, or no address was recorded.
- ``watch``: half of it; ``ok``: less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.addresses import Network
from flowctl.pipeline.abuse.weights import Weights
from flowctl.pipeline.records import addresses
from flowctl.server.bans import BanAction
from flowctl.server.guilt import PROOF
from flowctl.telemetry.schema import OPENS_EVERY_S

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MICRO: Final = 1_000_000
SCORE_COLUMNS: Final = {
    "kind": "string",  # address or subnet
    "address": "string",  # as recorded; of a subnet: its network
    "cidr": "string",  # what a ban would name; null: nothing can be banned
    "subnet": "string",
    "score": "double",
    "points": "double",  # before it is divided by standing
    "standing_hours": "double",
    "people": "bigint",  # connections that are open and behave
    "connections": "bigint",
    "addresses": "bigint",  # seen in a subnet; 1 for an address
    "abusive_addresses": "bigint",
    "evidence": "string",  # JSON: kind -> decayed number of occurrences
    "first_seen": "timestamp",
    "last_seen": "timestamp",
    "verdict": "string",
    "action": "string",  # ban or limit, as the list has it; null: not on it by itself
    "banned": "boolean",
}
"""Columns of `abuse_scores`; one row per address, of IPv6 per /64, and per subnet with an abusive one of these."""
ACTIONS: Final = {"ban": BanAction.BAN, "shared": BanAction.LIMIT, "limit": BanAction.LIMIT}
"""Verdicts that make a line of the list."""
VERDICTS: Final = (*ACTIONS, "subnet_ban", "allowed", "no_address", "watch", "ok")
_SILENT_S: Final = OPENS_EVERY_S + 60
"""A connection that is open has a row each `OPENS_EVERY_S`, in a file some seconds later; without, it has gone."""


def halved(age_us: Column, weights: Weights) -> Column:
    """Return what is left of a piece of that age; what is newer than now, by a clock that is ahead, is of now."""
    return f.pow(f.lit(0.5), f.greatest(f.lit(0), age_us) / (weights.half_life_s * 1e6))


def points(weights: Weights) -> Column:
    """Return the points of one occurrence of ``kind``."""
    group = f.concat(f.substring_index("kind", ".", 1), f.lit(".*"))
    table = f.create_map(*(f.lit(part) for name, value in weights.points.items() for part in (name, float(value))))
    return f.coalesce(f.try_element_at(table, f.col("kind")), f.try_element_at(table, group), f.lit(0.0))


def _one_of(kinds: Sequence[str]) -> Column:
    return f.coalesce(f.col("kind").isin(list(kinds)), f.lit(False))


def harmful(weights: Weights) -> Column:
    """Return whether evidence of ``kind`` can lead to a ban; other evidence leads to a limit at most."""
    return _one_of([name for name in weights.points if weights.bans(name)])


def sums(found: DataFrame, weights: Weights, now_us: int) -> DataFrame:
    """Add up the evidence of part `evidence` per address and kind, aged up to `now_us`, microseconds since the epoch.

    Returns:
        address, kind (null: none), micro (aged amount, millionths), opened, first_seen, last_seen.
    """
    left = halved(f.lit(now_us) - f.unix_micros("last_seen"), weights)
    grouped = found.where(f.col("address").isNotNull()).groupBy("address", "kind")
    return grouped.agg(
        f.sum((f.col("amount") * left * MICRO).cast("bigint")).alias("micro"),
        f.sum("opened").alias("opened"),
        *(f.min("first_seen").alias("first_seen"), f.max("last_seen").alias("last_seen")),
    )


def standing(found: DataFrame, weights: Weights, seen_us: int, now_us: int) -> DataFrame:
    """Return who behaves at each address.

    A connection counts with the time for which it played or published, if it did nothing that bans and was not cut. One
    that is open counts up to the end of the data, and as one who is there now if it has played for `Weights.settled_s`.
    One whose server went away, so that nobody told its end, counts up to when it was last seen.

    Args:
        found: of part `evidence`.
        weights: for half-life and marks.
        seen_us: end of the data, microseconds since the epoch.
        now_us: up to when standing ages.

    Returns:
        One row per address where anybody has behaved: address, people (there now), standing_hours (aged), open
        (connections whose end is not known).
    """
    seen = f.unix_micros("last_seen")
    starts = found.where(f.col("address").isNull()).groupBy("node").agg(f.max(seen).alias("started_us"))
    single = found.where(f.col("conn_id").isNotNull() & f.col("address").isNotNull())
    connections = single.groupBy("node", "conn_id", "address").agg(
        f.sum("opened").alias("ended"),
        f.max("good_ms").alias("good_ms"),
        f.max(f.unix_micros("begun")).alias("begun_us"),
        f.max(f.when(f.col("begun").isNotNull(), seen)).alias("open_us"),
        f.max(f.when(f.col("opened") > 0, seen)).alias("ended_us"),
        f.max(harmful(weights)).alias("harmful"),
    )
    frame = connections.join(f.broadcast(starts), "node", "left")
    ended, known, behaved = f.col("ended") > 0, f.col("open_us").isNotNull(), ~f.col("harmful")
    silent = f.col("open_us") < seen_us - int(_SILENT_S * 1e6)
    gone = silent | f.coalesce(f.col("open_us") < f.col("started_us"), f.lit(False))
    lasted_ms = (f.when(gone, f.col("open_us")).otherwise(f.lit(seen_us)) - f.col("begun_us")) / 1000
    ms = f.when(ended, f.col("good_ms")).when(known, f.greatest(lasted_ms, f.lit(weights.play_s * 1000)))
    ms = f.when(behaved, f.coalesce(ms, f.lit(0))).otherwise(0)
    until_us = f.when(ended, f.col("ended_us")).when(gone, f.col("open_us")).otherwise(f.lit(seen_us))
    there = behaved & ~ended & known & ~gone & (lasted_ms >= weights.settled_s * 1000)

    def aged(duration_ms: Column, end_us: Column) -> Column:  # whole, so that the sum does not depend on the order
        return (duration_ms * halved(f.lit(now_us) - end_us, weights)).cast("bigint").alias("standing_ms")

    one = (there.cast("bigint").alias("people"), (~ended & known).cast("bigint").alias("open"))
    none = (f.lit(0).cast("bigint").alias("people"), f.lit(0).cast("bigint").alias("open"))
    many = found.where(f.col("conn_id").isNull() & (f.col("good_ms") > 0))
    each = frame.select("address", aged(ms, until_us), *one)
    summed = each.unionByName(many.select("address", aged(f.col("good_ms"), seen), *none)).groupBy("address")
    hours = (f.sum("standing_ms") / 3_600_000).alias("standing_hours")
    return summed.agg(f.sum("people").alias("people"), f.sum("open").alias("open"), hours)


def is_shared(weights: Weights) -> Column:
    """Return whether anybody behaves at an address, by ``people`` and ``standing_hours``."""
    return (f.col("people") > 0) | (f.col("standing_hours") >= weights.shared_hours)


def address_scores(
    found: DataFrame, weights: Weights, spared: tuple[Network, ...], seen_us: int, now_us: int
) -> DataFrame:
    """Return the score of every address.

    Args:
        found: of part `evidence`.
        weights: of evidence.
        spared: networks that are neither banned nor limited.
        seen_us: end of the data, microseconds since the epoch.
        now_us: up to when evidence and standing age.

    Returns:
        `SCORE_COLUMNS` without the last two, one row per address; `verdict` not yet with what subnets change.
    """
    behaving = standing(found, weights, min(seen_us, now_us), now_us)
    frame = sums(found, weights, now_us).join(behaving, "address", "left")
    frame = frame.fillna({"people": 0, "open": 0, "standing_hours": 0.0})
    one = f.lit(int(weights.threshold * MICRO))  # of a shared address one kind counts as that of one offender
    whole = (f.col("micro") * points(weights)).cast("bigint")
    weighed = f.when(is_shared(weights), f.least(whole, one)).otherwise(whole)
    entry = f.when(f.col("kind").isNotNull(), f.struct("kind", f.round(f.col("micro") / MICRO, 3).alias("amount")))
    proofs = [name for name, value in weights.points.items() if weights.bans(name) and value >= PROOF]

    def part(which: Column) -> Column:
        return f.coalesce(f.sum(f.when(which, weighed)), f.lit(0)) / MICRO

    grouped = (
        frame.groupBy("address", "people", "open", "standing_hours")
        .agg(
            part(f.lit(True)).alias("points"),
            part(harmful(weights)).alias("harm"),
            part(_one_of(proofs)).alias("proof"),
            (f.sum("opened") + f.first("open")).alias("connections"),
            f.min("first_seen").alias("first_seen"),
            f.max("last_seen").alias("last_seen"),
            # A few dozen kinds at most; sorted, so that the text is the same each time.
            f.to_json(f.map_from_entries(f.sort_array(f.collect_list(entry)))).alias("evidence"),
        )
        .withColumn("score", f.round(f.col("points") / (1 + f.col("standing_hours")), 3))
        .withColumn("digits", addresses.unit_digits(f.col("address")))
        .withColumn("verdict", verdict(weights, spared))
    )
    return grouped.select(
        f.lit("address").alias("kind"),
        "address",
        addresses.cidr(f.col("address"), f.col("digits")).alias("cidr"),
        addresses.subnet(f.col("address"), f.col("digits")).alias("subnet"),
        "score",
        *(f.round(name, 3).alias(name) for name in ("points", "standing_hours")),
        *("people", "connections"),
        f.lit(1).cast("bigint").alias("addresses"),
        (f.col("verdict") == "ban").cast("bigint").alias("abusive_addresses"),
        *("evidence", "first_seen", "last_seen", "verdict"),
    )


def verdict(weights: Weights, spared: tuple[Network, ...]) -> Column:
    """Return what is said of an address, by address, digits, people, standing_hours, points, harm, proof and score."""
    threshold = weights.threshold
    divided = f.round(f.col("harm") / (1 + f.col("standing_hours")), 3)
    enough = f.col("score") >= threshold
    found = (
        f.when(is_shared(weights), f.when(enough | (f.col("proof") >= threshold), "shared"))
        .when(divided >= threshold, "ban")
        .when(enough, "limit")
    )
    spare = f.when(addresses.lies_in(f.col("digits"), spared), "allowed").when(f.col("digits").isNull(), "no_address")
    return (
        f.when(found.isNotNull(), f.coalesce(spare, found))
        .when(f.col("score") >= threshold / 2, "watch")
        .otherwise("ok")
    )


def subnet_scores(scores: DataFrame, weights: Weights, spared: tuple[Network, ...]) -> DataFrame:
    """Return the score of every subnet that has an abusive address, as `address_scores`.

    A subnet is banned as a whole if at least `Weights.subnet_addresses` of its addresses, and at least
    `Weights.subnet_share` of those seen, are to be banned themselves, and nobody behaved in it: then what is left is
    not worth telling apart, and the next address of it will be abusive too. One allowed address in it, and it is not.
    """
    share = f.col("abusive_addresses") / f.col("addresses")
    enough = (f.col("abusive_addresses") >= weights.subnet_addresses) & (share >= weights.subnet_share)
    nobody = (f.col("people") == 0) & (f.col("milli_hours") == 0)
    whole = enough & nobody & (f.col("allowed") == 0) & ~_touches(spared)
    return (
        scores.where(f.col("subnet").isNotNull())
        .groupBy("subnet")
        .agg(
            f.sum((f.col("points") * 1000).cast("bigint")).alias("milli_points"),
            f.sum(f.ceil(f.col("standing_hours") * 1000)).alias("milli_hours"),
            *(f.sum(name).alias(name) for name in ("people", "connections", "addresses", "abusive_addresses")),
            f.count_if(f.col("verdict") == "allowed").alias("allowed"),
            *(f.min("first_seen").alias("first_seen"), f.max("last_seen").alias("last_seen")),
        )
        .where((f.col("abusive_addresses") > 0) | (f.col("allowed") > 0))
        .withColumns({"points": f.col("milli_points") / 1000, "standing_hours": f.col("milli_hours") / 1000})
        .select(
            f.lit("subnet").alias("kind"),
            *(f.col("subnet").alias(name) for name in ("address", "cidr", "subnet")),
            f.round(f.col("points") / (1 + f.col("standing_hours")), 3).alias("score"),
            *("points", "standing_hours", "people", "connections", "addresses", "abusive_addresses"),
            f.to_json(f.struct("addresses", "abusive_addresses")).alias("evidence"),
            *("first_seen", "last_seen"),
            f.when(whole, "ban").when(f.col("allowed") > 0, "allowed").otherwise("ok").alias("verdict"),
        )
    )


def _touches(spared: tuple[Network, ...]) -> Column:
    """Return whether a spared network lies within ``subnet``: banning it would ban that.

    That it holds the subnet is told by the addresses in it, which are allowed.
    """
    within = {
        str(network.supernet(new_prefix=length))
        for network in spared
        if network.prefixlen >= (length := 24 if network.version == 4 else 48)
    }
    return f.col("subnet").isin(sorted(within))


def all_scores(found: DataFrame, weights: Weights, spared: tuple[Network, ...], seen_us: int, now_us: int) -> DataFrame:
    """Return the scores of addresses and subnets: `SCORE_COLUMNS`; see `address_scores`."""
    scores = address_scores(found, weights, spared, seen_us, now_us)
    subnets = subnet_scores(scores, weights, spared)
    # Few subnets are banned whole, so this join is a broadcast, and addresses stay where they are.
    whole = f.broadcast(subnets.where(f.col("verdict") == "ban").select("subnet", f.lit(True).alias("covered")))
    covered = (f.col("verdict") == "ban") & f.coalesce("covered", f.lit(False))
    said = f.when(covered, "subnet_ban").otherwise(f.col("verdict"))
    both = scores.join(whole, "subnet", "left").withColumn("verdict", said).drop("covered").unionByName(subnets)
    table = f.create_map(*(f.lit(text) for name, action in ACTIONS.items() for text in (name, action.value)))
    action = {"action": f.try_element_at(table, f.col("verdict")), "banned": f.col("verdict") == "ban"}
    return both.withColumns(action).select(*SCORE_COLUMNS)


def attackers(found: DataFrame, seen_us: int, weights: Weights | None = None) -> tuple[DataFrame, DataFrame]:
    """Return whom the rules call attackers: what limits do to them is no reason for other limits.

    Args:
        found: of part `evidence`.
        seen_us: end of the data, microseconds since the epoch.
        weights: None: the defaults.

    Returns:
        Connections with evidence that bans and is more than being slow (node, conn_id), one row each; and the addresses
        (as of `addresses.with_unit`) that would be banned at the end of the data, wherever they are (address).
    """
    weights = weights or Weights()
    direct = found.where(harmful(weights) & (f.col("kind") != "deaf_close") & f.col("conn_id").isNotNull())
    scores = address_scores(found, weights, (), seen_us, seen_us)
    return direct.select("node", "conn_id").distinct(), scores.where(f.col("verdict") == "ban").select("address")
