"""``flowctl analyze abuse``: whom to keep out or to slow down, from what each address did, and the list of it.

Theory of operation. `flowctl.pipeline.jobs.evidence` says what each event is evidence of, and who behaves at each
address.
Evidence is summed per address and kind, each piece halved for every `Weights.half_life_s` of age up to now, and the sum
is divided by one plus the hours in which connections of that address behaved (`flowctl.pipeline.jobs.weights` has the
reasons). What reaches the driver are the bans, up to a number that was asked for.

Sums are of whole numbers (millionths of an occurrence), so that the result is the same in whichever order rows come.

What is said of an address, `verdict`:

- ``ban``: nobody behaves there, and what harms is enough.
- ``shared``: it would be enough, but others behave there: new connections are limited, and nobody is kept out.
- ``limit``: enough, but only with evidence that never bans (`weights.MILD`): the same.
- ``subnet_ban``: as ban, covered by that of its whole subnet, where nearly all are abusive and nobody honest was seen.
- ``allowed``, ``no_address``: it would be one of these, but it is on the allow list, or no address was recorded.
- ``watch``: half of it; ``ok``: less.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.addresses import Network
from flowctl.errors import ConfigError
from flowctl.pipeline.jobs.evidence import evidence, halved, harmful, points, proves, standing, starts_of
from flowctl.pipeline.jobs.weights import Weights
from flowctl.pipeline.tables import addresses, io
from flowctl.pipeline.tables.accounts import JobResult
from flowctl.pipeline.tables.banfile import BANS_FILE, locked, read_bans
from flowctl.pipeline.tables.place import Place
from flowctl.server.bans import MOST_BANS, Ban, BanAction, merge_bans, render

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
    "people",  # connections that are open and behave
    "connections",
    "addresses",  # seen in a subnet; 1 for an address
    "abusive_addresses",
    "evidence",  # JSON: kind -> decayed number of occurrences
    "first_seen",
    "last_seen",
    "verdict",
    "action",  # ban or limit, as the list has it; null: not on it by itself
    "banned",
)
"""Columns of `abuse_scores`; one row per address, of IPv6 per /64, and per subnet with an abusive one of these."""
ACTIONS: Final = {"ban": BanAction.BAN, "shared": BanAction.LIMIT, "limit": BanAction.LIMIT}
"""Verdicts that make a line of the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbuseOptions:
    """How to judge.

    Args:
        weights: of evidence.
        allow: networks that are neither banned nor limited: trusted proxies, monitors.
        private: whether loopback and private networks are judged as any other. False: they are allowed.
        most_bans: bans and limits that this job makes at most; bans first, and of these the highest scores.
        replace_bans: whether the list that is there is replaced. False: its bans that last are kept.
        now_s: time of the judgement, seconds since the epoch: evidence ages up to it and bans begin at it. None: now.
        truth: path of a table of planted addresses (``address``, ``kind``, ``abuser``, ``honest``), to tell how many
            were found. None: none.
    """

    weights: Weights = field(default_factory=Weights)
    allow: tuple[Network, ...] = ()
    private: bool = False
    most_bans: int = 10_000
    now_s: float | None = None
    truth: str | None = None
    replace_bans: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.most_bans <= MOST_BANS:
            raise ConfigError(f"--max-bans is {self.most_bans}, allowed is 1 to {MOST_BANS}")

    @property
    def spared(self) -> tuple[Network, ...]:
        """All networks that are neither banned nor limited."""
        return self.allow if self.private else (*self.allow, *addresses.PRIVATE)


def sums(found: DataFrame, weights: Weights, now_us: int) -> DataFrame:
    """Add up the evidence per address and kind.

    Args:
        found: of `evidence`.
        weights: for the half-life.
        now_us: up to when it ages, microseconds since the epoch.

    Returns:
        One row per address and kind (null: none): micro (aged amount, millionths), opened, first_seen, last_seen.
    """
    left = halved(f.lit(now_us) - f.unix_micros("ts"), weights)
    return found.groupBy("address", "kind").agg(
        f.sum((f.col("amount") * left * MICRO).cast("bigint")).alias("micro"),
        f.sum("opened").alias("opened"),
        f.min("ts").alias("first_seen"),
        f.max("ts").alias("last_seen"),
    )


def is_shared(weights: Weights) -> Column:
    """Return whether anybody behaves at an address, by ``people`` and ``standing_hours``."""
    return (f.col("people") > 0) | (f.col("standing_hours") >= weights.shared_hours)


def address_scores(summed: DataFrame, behaving: DataFrame, options: AbuseOptions) -> DataFrame:
    """Return the score of every address.

    Args:
        summed: of `sums`.
        behaving: of `standing`.
        options: weights, allow list.

    Returns:
        `SCORE_COLUMNS`, one row per address; `verdict` not yet with what subnets change.
    """
    weights = options.weights
    frame = summed.join(behaving, "address", "left").fillna({"people": 0, "standing_hours": 0.0})
    one = f.lit(int(weights.threshold * MICRO))  # of a shared address one kind counts as that of one offender
    whole = (f.col("micro") * points(weights)).cast("bigint")
    weighed = f.when(is_shared(weights), f.least(whole, one)).otherwise(whole)
    entry = f.when(f.col("kind").isNotNull(), f.struct("kind", f.round(f.col("micro") / MICRO, 3).alias("amount")))

    def part(which: Column) -> Column:
        return f.coalesce(f.sum(f.when(which, weighed)), f.lit(0)) / MICRO

    grouped = (
        frame.groupBy("address", "people", "standing_hours")
        .agg(
            part(f.lit(True)).alias("points"),
            part(harmful(weights)).alias("harm"),
            part(proves(weights)).alias("proof"),
            f.sum("opened").alias("connections"),
            f.min("first_seen").alias("first_seen"),
            f.max("last_seen").alias("last_seen"),
            # A few dozen kinds at most; sorted, so that the text is the same each time.
            f.to_json(f.map_from_entries(f.sort_array(f.collect_list(entry)))).alias("evidence"),
        )
        .withColumn("score", f.round(f.col("points") / (1 + f.col("standing_hours")), 3))
        .withColumn("digits", addresses.unit_digits(f.col("address")))
        .withColumn("verdict", verdict(weights, options.spared))
    )
    selected = grouped.select(
        f.lit("address").alias("kind"),
        "address",
        addresses.cidr(f.col("address"), f.col("digits")).alias("cidr"),
        addresses.subnet(f.col("address"), f.col("digits")).alias("subnet"),
        "score",
        f.round("points", 3).alias("points"),
        f.round("standing_hours", 3).alias("standing_hours"),
        "people",
        "connections",
        f.lit(1).cast("bigint").alias("addresses"),
        (f.col("verdict") == "ban").cast("bigint").alias("abusive_addresses"),
        "evidence",
        "first_seen",
        "last_seen",
        "verdict",
    )
    return acted(selected)


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


def acted(frame: DataFrame) -> DataFrame:
    """Add action and banned, which follow from ``verdict``."""
    action = f.lit(None).cast("string")
    for name, value in ACTIONS.items():
        action = f.when(f.col("verdict") == name, value.value).otherwise(action)
    return frame.withColumns({"action": action, "banned": f.col("verdict") == "ban"})


def subnet_scores(scores: DataFrame, options: AbuseOptions) -> DataFrame:
    """Return the score of every subnet that has an abusive address.

    A subnet is banned as a whole if at least `Weights.subnet_addresses` of its addresses, and at least
    `Weights.subnet_share` of those seen, are to be banned themselves, and nobody behaved in it: then what is left is
    not worth telling apart, and the next address of it will be abusive too. One allowed address in it, and it is not.

    Returns:
        `SCORE_COLUMNS`, one row per subnet.
    """
    weights = options.weights
    banned, allowed = f.count_if(f.col("verdict") == "ban"), f.count_if(f.col("verdict") == "allowed")
    share = f.col("abusive_addresses") / f.col("addresses")
    enough = (f.col("abusive_addresses") >= weights.subnet_addresses) & (share >= weights.subnet_share)
    nobody = (f.col("people") == 0) & (f.col("milli_hours") == 0)
    whole = enough & nobody & (f.col("allowed") == 0) & ~_touches(options.spared)
    counts = f.struct("addresses", "abusive_addresses")
    return acted(
        scores.where(f.col("subnet").isNotNull())
        .groupBy("subnet")
        .agg(
            f.sum((f.col("points") * 1000).cast("bigint")).alias("milli_points"),
            f.sum(f.ceil(f.col("standing_hours") * 1000)).alias("milli_hours"),
            f.sum("people").alias("people"),
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
            "people",
            "connections",
            "addresses",
            "abusive_addresses",
            f.to_json(counts).alias("evidence"),
            "first_seen",
            "last_seen",
            f.when(whole, "ban").when(f.col("allowed") > 0, "allowed").otherwise("ok").alias("verdict"),
        )
    )


def _touches(allow: tuple[Network, ...]) -> Column:
    """Return whether an allowed network lies within ``subnet``: banning it would ban that.

    That it holds the subnet is told by the addresses in it, which are allowed.
    """
    found = f.lit(False)
    for network in allow:
        length = 24 if network.version == 4 else 48
        if network.prefixlen >= length:
            found |= f.col("subnet") == str(network.supernet(new_prefix=length))
    return f.coalesce(found, f.lit(False))


def all_scores(events: DataFrame, starts: DataFrame, options: AbuseOptions, seen_us: int, now_us: int) -> DataFrame:
    """Return the scores of addresses and subnets: `SCORE_COLUMNS`.

    Args:
        events: `flow_events`.
        starts: of `starts_of`.
        options: see there.
        seen_us: end of the data, microseconds since the epoch.
        now_us: up to when evidence and standing age.
    """
    weights = options.weights
    found = evidence(events, weights)
    behaving = standing(found, starts, weights, min(seen_us, now_us), now_us)
    scores = address_scores(sums(found, weights, now_us), behaving, options)
    subnets = subnet_scores(scores, options)
    # Few subnets are banned whole, so this join is a broadcast, and addresses stay where they are.
    whole = f.broadcast(subnets.where("banned").select("subnet", f.lit(True).alias("covered")))
    covered = f.col("banned") & f.coalesce(f.col("covered"), f.lit(False))
    joined = scores.join(whole, "subnet", "left").withColumn(
        "verdict", f.when(covered, "subnet_ban").otherwise(f.col("verdict"))
    )
    return acted(joined).select(*SCORE_COLUMNS).unionByName(subnets.select(*SCORE_COLUMNS))


def bans_of(scores: DataFrame, options: AbuseOptions, begin_s: float) -> tuple[list[Ban], int, int]:
    """Return the list, bans before limits and the highest scores first, how many did not fit, and how many failed.

    Args:
        scores: of `all_scores`.
        options: weights, length of the list.
        begin_s: when the bans begin, seconds since the epoch.
    """
    wanted = scores.where(f.col("action").isNotNull())
    rows = wanted.orderBy("action", f.desc("score"), "cidr").limit(options.most_bans).collect()
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
    """Return the line of a row with cidr, verdict, score and evidence (JSON); the higher the score, the longer."""
    score = max(row["score"], weights.threshold)  # of a shared address it is divided by all who behave there
    length_s = min(weights.longest_ban_s, weights.ban_s * score / weights.threshold)
    told = {name: value for name, value in json.loads(row["evidence"]).items() if value}
    worst = max(told, key=lambda name: (told[name] * weights.of(name), name), default="")
    return Ban(
        cidr=row["cidr"],
        action=ACTIONS[row["verdict"]],
        reason=f"{_WORDS[row['verdict']]}{worst}",
        score=row["score"],
        evidence=told,
        expires=datetime.fromtimestamp(begin_s + length_s, UTC),
    )


_WORDS: Final = {"ban": "", "shared": "shared: ", "limit": "limited: "}


def found_of(spark: SparkSession, scores: DataFrame, truth: str) -> dict[str, Any]:
    """Return how many of the planted abusers were found, and what honest ones got.

    An address may have both behind it. Found is an abuser whose address is banned or limited. Honest are addresses with
    anybody honest behind them: planted ones who look bad, those beside an abuser, and all others.

    Args:
        spark: session.
        scores: of `all_scores`.
        truth: path of a table with ``address``, ``kind``, ``abuser`` and ``honest``.
    """
    written = spark.read.parquet(truth).withColumnRenamed("address", "written")
    planted = (
        addresses.with_unit(written, "written")
        .groupBy("address")
        .agg(f.min("kind").alias("planted_kind"), f.max("abuser").alias("abuser"), f.max("honest").alias("honest"))
    )
    judged = scores.where(f.col("kind") == "address").select("address", "verdict")
    joined = planted.join(judged, "address", "full_outer")
    banned, limited = f.col("verdict").isin("ban", "subnet_ban"), f.col("verdict").isin("shared", "limit")
    groups = joined.groupBy(
        f.coalesce("planted_kind", f.lit("ordinary")).alias("planted_kind"),
        f.coalesce("abuser", f.lit(False)).alias("abuser"),
        f.coalesce("honest", f.lit(True)).alias("honest"),
    ).agg(f.count("*").alias("all"), f.count_if(banned).alias("banned"), f.count_if(limited).alias("limited"))
    rows = [row.asDict() for row in groups.orderBy("planted_kind", "abuser", "honest").collect()]

    def total(name: str, **which: bool) -> int:
        return sum(row[name] for row in rows if all(row[key] == value for key, value in which.items()))

    abusers, honest = total("all", abuser=True), total("all", honest=True)
    found = total("banned", abuser=True) + total("limited", abuser=True)
    return {
        "abusive_addresses": abusers,
        "found": found,
        "found_share": found / abusers if abusers else None,
        "alone": total("all", abuser=True, honest=False),
        "alone_banned": total("banned", abuser=True, honest=False),
        "alone_limited": total("limited", abuser=True, honest=False),
        "honest_addresses": honest,
        "honest_banned": total("banned", honest=True),
        "honest_beside_abusers": total("all", abuser=True, honest=True),
        "honest_beside_abusers_limited": total("limited", abuser=True, honest=True),
        "honest_alone_limited": total("limited", abuser=False, honest=True),
        "by_kind": {
            f"{row['planted_kind']}{' beside others' if row['abuser'] and row['honest'] else ''}": (
                f"{row['banned']} banned and {row['limited']} limited of {row['all']}"
            )
            for row in rows
        },
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
    # One pass over three columns: who is open needs the end of the data, and the accounts the number of rows.
    ends = starts_of(source.frame).collect()  # a row per server
    rows, last_us = sum(row["rows"] for row in ends), max((row["last_us"] for row in ends), default=0)
    source.settle(rows)
    begin_s = time.time() if options.now_s is None else options.now_s
    starts = spark.createDataFrame([(row["node"], row["started_us"]) for row in ends], "node string, started_us bigint")
    table = all_scores(source.frame, starts, options, last_us, int(begin_s * 1e6))
    path = io.write_table(table, place.path("abuse_scores"))
    scores = spark.read.parquet(path)
    bans, left_out, invalid = bans_of(scores, options, begin_s)
    kept = _write_bans(place, bans, options, begin_s)
    verdicts = {f"{row['kind']}_{row['verdict']}": row["count"] for row in _by_verdict(scores)}
    limits = sum(ban.action is BanAction.LIMIT for ban in bans)
    summary: dict[str, Any] = {"bans": len(bans) - limits, "limits": limits, "bans_left_out": left_out}
    summary["verdicts"] = verdicts
    summary |= {"bans_kept": kept, "bans_invalid": invalid}
    ago_s = summary["data_ends_s_ago"] = round(begin_s - last_us / 1e6)
    if last_us and ago_s > options.weights.half_life_s:
        source.accounts.warnings.append(
            f"the records end {ago_s / 3600:.0f} hours ago, and evidence is halved every "
            f"{options.weights.half_life_s / 3600:g} hours up to now; --now TIME judges as at another time"
        )
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
    return len({(ban.cidr, ban.action) for ban in listed} - {(ban.cidr, ban.action) for ban in bans})


def _by_verdict(scores: DataFrame) -> list[Any]:
    return scores.groupBy("kind", "verdict").count().orderBy("kind", "verdict").collect()
