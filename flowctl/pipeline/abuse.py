"""``flowctl analyze abuse``: whom to keep out, from what each address did, and the ban list that the server loads.

Theory of operation. `flowctl.pipeline.evidence` says what each event is evidence of. It is summed per address and
kind, each piece halved for every `Weights.half_life_s` of age, and the sum is divided by one plus the hours in which
connections of that address behaved (`flowctl.pipeline.weights` has the reasons). Two aggregations, the second one
over a few rows per address; what reaches the driver are the bans, up to a number that was asked for.

Sums are of whole numbers (millionths of an occurrence), so that the result is the same in whichever order rows come.

Nobody is banned on weak grounds: not who is on the allow list, not a hash or a network where an address should be,
and a whole subnet only where nearly all of its addresses are abusive by themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.bans import MOST_BANS, Ban, merge_bans, render
from flowctl.errors import ConfigError
from flowctl.pipeline import addresses, io
from flowctl.pipeline.accounts import JobResult
from flowctl.pipeline.addresses import Network
from flowctl.pipeline.banfile import BANS_FILE, locked, read_bans
from flowctl.pipeline.evidence import evidence, points, standing_hours
from flowctl.pipeline.place import Place
from flowctl.pipeline.weights import Weights

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MICRO: Final = 1_000_000
SCORE_COLUMNS: Final = (
    "kind",  # address or subnet
    "address",  # as recorded; of a subnet: its network
    "cidr",  # what a ban would name; null: nothing can be banned
    "subnet",
    "score",
    "points",  # before it is divided by standing
    "standing_hours",
    "connections",
    "addresses",  # seen in a subnet; 1 for an address
    "abusive_addresses",
    "evidence",  # JSON: kind -> decayed number of occurrences
    "first_seen",
    "last_seen",
    "verdict",  # ban, subnet_ban (covered by that of its subnet), allowed, no_address, shared, watch, ok
    "banned",
)
"""Columns of `abuse_scores`; one row per address that was seen, and one per subnet with an abusive address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbuseOptions:
    """How to judge.

    Args:
        weights: of evidence.
        allow: networks that are never banned.
        most_bans: bans that this job makes at most; the highest scores are taken.
        replace_bans: whether the list that is there is replaced. False: its bans that last are kept.
        now_s: time of the judgement, seconds since the epoch: evidence ages up to it and bans begin at it. None:
            evidence ages up to the end of the data, and bans begin when the job runs.
        truth: path of a table of planted addresses (``address``, ``abuser``), to tell how many were found. None: none.
    """

    weights: Weights = field(default_factory=Weights)
    allow: tuple[Network, ...] = ()
    most_bans: int = 10_000
    now_s: float | None = None
    truth: str | None = None
    replace_bans: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.most_bans <= MOST_BANS:
            raise ConfigError(f"--max-bans is {self.most_bans}, allowed is 1 to {MOST_BANS}")


def sums(found: DataFrame, weights: Weights, now_us: int | None) -> DataFrame:
    """Add up the evidence per address and kind.

    Args:
        found: of `evidence`.
        weights: for the half-life.
        now_us: up to when it ages, microseconds since the epoch. None: nothing ages.

    Returns:
        One row per address and kind (null: only standing): amount (plain), micro (decayed, millionths), good_ms and
        begun and ended (decayed alike), opened, first_seen, last_seen.
    """
    if now_us is None:
        left: Column = f.lit(1.0)
    else:
        # What is newer than now, by a clock that is ahead, counts as now.
        age_s = f.greatest(f.lit(0), f.lit(now_us) - f.unix_micros("ts")) / 1e6
        left = f.pow(f.lit(0.5), age_s / weights.half_life_s)

    def aged(name: str, scale: int) -> Column:
        return f.sum((f.col(name) * left * scale).cast("bigint"))

    return found.groupBy("address", "kind").agg(
        f.sum("amount").alias("amount"),
        aged("amount", MICRO).alias("micro"),
        aged("good_ms", 1).alias("good_ms"),
        aged("begun", MICRO).alias("begun"),
        aged("ended", MICRO).alias("ended"),
        f.sum("opened").alias("opened"),
        f.min("ts").alias("first_seen"),
        f.max("ts").alias("last_seen"),
    )


def address_scores(summed: DataFrame, options: AbuseOptions) -> DataFrame:
    """Return the score of every address.

    Args:
        summed: of `sums`.
        options: weights, allow list.

    Returns:
        `SCORE_COLUMNS`, one row per address; `verdict` not yet with what subnets change.
    """
    weights = options.weights
    weighed = (f.col("micro") * points(weights)).cast("bigint")
    entry = f.when(f.col("kind").isNotNull(), f.struct("kind", f.round(f.col("micro") / MICRO, 3).alias("amount")))
    grouped = (
        summed.groupBy("address")
        .agg(
            f.sum(weighed).alias("weighed"),
            f.sum("good_ms").alias("good_ms"),
            (f.sum("begun") / MICRO).alias("begun"),
            (f.sum("ended") / MICRO).alias("ended"),
            f.sum("opened").alias("connections"),
            f.min("first_seen").alias("first_seen"),
            f.max("last_seen").alias("last_seen"),
            # A few dozen kinds at most; sorted, so that the text is the same each time.
            f.to_json(f.map_from_entries(f.sort_array(f.collect_list(entry)))).alias("evidence"),
        )
        .withColumn("standing_hours", standing_hours(weights))
        .withColumn("points", f.col("weighed") / MICRO)
        .withColumn("score", f.col("points") / (1 + f.col("standing_hours")))
        .withColumn("digits", addresses.digits(f.col("address")))
    )
    return grouped.select(
        f.lit("address").alias("kind"),
        "address",
        addresses.cidr(f.col("address"), f.col("digits")).alias("cidr"),
        addresses.subnet(f.col("address"), f.col("digits")).alias("subnet"),
        f.round("score", 3).alias("score"),
        f.round("points", 3).alias("points"),
        f.round("standing_hours", 3).alias("standing_hours"),
        "connections",
        f.lit(1).cast("bigint").alias("addresses"),
        (f.round("score", 3) >= weights.threshold).cast("bigint").alias("abusive_addresses"),
        "evidence",
        "first_seen",
        "last_seen",
        _verdict(options).alias("verdict"),
    ).withColumn("banned", f.col("verdict") == "ban")


def _verdict(options: AbuseOptions) -> Column:
    score, threshold = f.round("score", 3), options.weights.threshold
    nobody = f.col("digits").isNull() | addresses.is_cut(f.col("address"), f.col("digits"))
    high = (
        f.when(addresses.lies_in(f.col("digits"), options.allow), "allowed").when(nobody, "no_address").otherwise("ban")
    )
    return (
        f.when(score >= threshold, high)
        .when(f.col("points") >= threshold, "shared")  # enough for a ban, were it not for all who behave there
        .when(score >= threshold / 2, "watch")
        .otherwise("ok")
    )


def subnet_scores(scores: DataFrame, options: AbuseOptions) -> DataFrame:
    """Return the score of every subnet that has an abusive address.

    A subnet is banned as a whole if at least `Weights.subnet_addresses` of its addresses, and at least
    `Weights.subnet_share` of those seen, are to be banned themselves: then what is left is not worth telling apart, and
    the next address of it will be abusive too. One allowed address in it, and it is not banned.

    Returns:
        `SCORE_COLUMNS`, one row per subnet.
    """
    weights = options.weights
    banned, allowed = f.count_if(f.col("verdict") == "ban"), f.count_if(f.col("verdict") == "allowed")
    share = f.col("abusive_addresses") / f.col("addresses")
    enough = (f.col("abusive_addresses") >= weights.subnet_addresses) & (share >= weights.subnet_share)
    whole = enough & (f.col("allowed") == 0) & ~_touches(options.allow)
    counts = f.struct("addresses", "abusive_addresses")
    return (
        scores.where(f.col("subnet").isNotNull())
        .groupBy("subnet")
        .agg(
            f.sum((f.col("points") * 1000).cast("bigint")).alias("milli_points"),
            f.sum((f.col("standing_hours") * 1000).cast("bigint")).alias("milli_hours"),
            f.sum("connections").alias("connections"),
            f.count("*").alias("addresses"),
            banned.alias("abusive_addresses"),
            allowed.alias("allowed"),
            f.min("first_seen").alias("first_seen"),
            f.max("last_seen").alias("last_seen"),
        )
        .where((f.col("abusive_addresses") > 0) | (f.col("allowed") > 0))
        .withColumn("points", f.col("milli_points") / 1000)
        .withColumn("standing_hours", f.col("milli_hours") / 1000)
        .select(
            f.lit("subnet").alias("kind"),
            f.col("subnet").alias("address"),
            f.col("subnet").alias("cidr"),
            "subnet",
            f.round(f.col("points") / (1 + f.col("standing_hours")), 3).alias("score"),
            "points",
            "standing_hours",
            "connections",
            "addresses",
            "abusive_addresses",
            f.to_json(counts).alias("evidence"),
            "first_seen",
            "last_seen",
            f.when(whole, "ban").when(f.col("allowed") > 0, "allowed").otherwise("ok").alias("verdict"),
        )
        .withColumn("banned", f.col("verdict") == "ban")
    )


def _touches(allow: tuple[Network, ...]) -> Column:
    """Return whether an allowed network lies within ``subnet``: banning it would ban that."""
    found = f.lit(False)
    for network in allow:
        length = 24 if network.version == 4 else 48
        if network.prefixlen >= length:
            digits = addresses.digits(f.lit(str(network.network_address)))
            found |= f.col("subnet") == addresses.subnet(f.lit(str(network.network_address)), digits)
    return f.coalesce(found, f.lit(False))


def all_scores(events: DataFrame, options: AbuseOptions, now_us: int) -> DataFrame:
    """Return the scores of addresses and subnets: `SCORE_COLUMNS`."""
    scores = address_scores(sums(evidence(events, options.weights), options.weights, now_us), options)
    subnets = subnet_scores(scores, options)
    # Few subnets are banned whole, so this join is a broadcast, and addresses stay where they are.
    whole = f.broadcast(subnets.where("banned").select("subnet", f.lit(True).alias("covered")))
    covered = f.col("banned") & f.coalesce(f.col("covered"), f.lit(False))
    joined = scores.join(whole, "subnet", "left").withColumn(
        "verdict", f.when(covered, "subnet_ban").otherwise(f.col("verdict"))
    )
    return joined.select(*SCORE_COLUMNS).unionByName(subnets.select(*SCORE_COLUMNS))


def bans_of(scores: DataFrame, options: AbuseOptions, begin_s: float) -> tuple[list[Ban], int, int]:
    """Return the ban list, the highest scores first, how many bans did not fit, and how many could not be made.

    Args:
        scores: of `all_scores`.
        options: weights, length of the list.
        begin_s: when the bans begin, seconds since the epoch.
    """
    wanted = scores.where(f.col("verdict") == "ban")
    rows = wanted.orderBy(f.desc("score"), "cidr").limit(options.most_bans).collect()
    left_out = wanted.count() - len(rows) if len(rows) == options.most_bans else 0
    bans, invalid = bans_from(((row.asDict(), begin_s) for row in rows), options.weights)
    return bans, left_out, invalid


def bans_from(rows: Iterable[tuple[dict[str, Any], float]], weights: Weights) -> tuple[list[Ban], int]:
    """Return the bans of rows, and how many rows no ban can be made of.

    What records hold is not always what a server wrote: one odd row must not cost the bans of all others.

    Args:
        rows: each as `ban_of` takes it, and when its ban begins, seconds since the epoch.
        weights: for the length.
    """
    bans, invalid = [], 0
    for row, begin_s in rows:
        try:
            bans.append(ban_of(row, weights, begin_s))
        except (ConfigError, ValueError, OverflowError):
            invalid += 1
    return bans, invalid


def ban_of(row: dict[str, Any], weights: Weights, begin_s: float) -> Ban:
    """Return the ban of a row with cidr, score and evidence (JSON); the higher the score, the longer."""
    length_s = min(weights.longest_ban_s, weights.ban_s * row["score"] / weights.threshold)
    expires = datetime.fromtimestamp(begin_s + length_s, UTC)
    told = {name: value for name, value in json.loads(row["evidence"]).items() if value}
    return Ban(cidr=row["cidr"], score=row["score"], evidence=told, expires=expires)


def found_of(spark: SparkSession, scores: DataFrame, truth: str) -> dict[str, Any]:
    """Return how many of the planted abusers were found, and how many others were banned.

    Args:
        spark: session.
        scores: of `all_scores`.
        truth: path of a table with ``address``, ``kind`` and ``abuser``.
    """
    planted = spark.read.parquet(truth).select("address", f.col("kind").alias("planted_kind"), "abuser")
    banned = scores.where((f.col("kind") == "address") & f.col("verdict").isin("ban", "subnet_ban")).select("address")
    joined = planted.join(banned.withColumn("banned", f.lit(True)), "address", "full_outer")
    kind = f.coalesce("planted_kind", f.lit("ordinary"))
    groups = joined.groupBy(kind.alias("planted_kind"), "abuser").agg(
        f.count("*").alias("all"), f.count_if("banned").alias("banned")
    )
    rows = groups.orderBy("planted_kind").collect()
    abusers = [row for row in rows if row["abuser"]]
    honest = [row for row in rows if row["abuser"] is False]
    planted_abusers, found = sum(row["all"] for row in abusers), sum(row["banned"] for row in abusers)
    planted_honest, wrong = sum(row["all"] for row in honest), sum(row["banned"] for row in honest)
    return {
        "planted_abusers": planted_abusers,
        "found": found,
        "found_share": found / planted_abusers if planted_abusers else None,
        "planted_honest": planted_honest,
        "banned_honest": wrong,
        "false_share": wrong / planted_honest if planted_honest else None,
        "banned_ordinary": sum(row["banned"] for row in rows if row["abuser"] is None),
        "by_kind": {row["planted_kind"]: f"{row['banned']} of {row['all']}" for row in (*abusers, *honest)},
    }


def run(spark: SparkSession, events: str, out: str, options: AbuseOptions | None = None) -> JobResult:
    """Judge the addresses of the events below `events`; write ``abuse_scores`` and ``bans.jsonl`` below `out`.

    Args:
        spark: session.
        events: folder that the server wrote.
        out: folder for the results.
        options: how to judge. None: all defaults.

    Returns:
        `summary` has the counts by verdict, the bans, and with `AbuseOptions.truth` what was found.

    Raises:
        ConfigError: there are no events, or `out` cannot be written.
    """
    options = options or AbuseOptions()
    place = Place(spark, out)
    if not options.replace_bans:
        read_bans(place)  # one that cannot be read is told before the work, not after it
    source = io.read_table(spark, events, "flow_events", count="later")
    # One pass over one column: ages need the end of the data, and the accounts the number of rows.
    ends = source.frame.agg(f.count("*").alias("rows"), f.unix_micros(f.max("ts")).alias("last_us")).first()
    rows, last_us = (0, 0) if ends is None else (ends["rows"], int(ends["last_us"] or 0))
    source.settle(rows)
    now_us = last_us if options.now_s is None else int(options.now_s * 1e6)
    path = io.write_table(all_scores(source.frame, options, now_us), place.path("abuse_scores"))
    scores = spark.read.parquet(path)
    begin_s = time.time() if options.now_s is None else options.now_s
    bans, left_out, invalid = bans_of(scores, options, begin_s)
    kept = _write_bans(place, bans, options, begin_s)
    verdicts = {f"{row['kind']}_{row['verdict']}": row["count"] for row in _by_verdict(scores)}
    summary: dict[str, Any] = {"bans": len(bans), "bans_left_out": left_out, "verdicts": verdicts}
    summary |= {"bans_kept": kept, "bans_invalid": invalid}
    summary["data_ends_s_ago"] = round(begin_s - last_us / 1e6)
    if options.truth is not None:
        summary["truth"] = found_of(spark, scores, options.truth)
    outputs = {"abuse_scores": path, BANS_FILE: place.path(BANS_FILE), **io.write_quarantine(spark, source, out)}
    return JobResult(name="abuse", accounts=[source.accounts], outputs=outputs, summary=summary)


def _write_bans(place: Place, bans: list[Ban], options: AbuseOptions, now_s: float) -> int:
    """Write the ban list, and return how many bans of the list that was there are kept beside these."""
    with locked(place.folder):
        there = [] if options.replace_bans else read_bans(place)
        # By the clock of the bans: with `now_s` in the past what lasted then is kept, and the server knows the time.
        listed = merge_bans(there, bans, now_s, options.allow)
        place.write_text(BANS_FILE, render(listed))
    return len({ban.cidr for ban in listed} - {ban.cidr for ban in bans})


def _by_verdict(scores: DataFrame) -> list[Any]:
    return scores.groupBy("kind", "verdict").count().orderBy("kind", "verdict").collect()
