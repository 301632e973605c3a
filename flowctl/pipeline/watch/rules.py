"""The rules of `flowctl analyze watch`: its options, the sums of windows, who is banned (DataFrame -> DataFrame)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.addresses import Network
from flowctl.errors import ConfigError
from flowctl.pipeline.jobs.abuse import ACTIONS, is_shared, verdict
from flowctl.pipeline.jobs.evidence import evidence, halved, points, standing, starts_of
from flowctl.pipeline.jobs.weights import Weights
from flowctl.pipeline.tables import addresses
from flowctl.pipeline.tables.checks import any_of
from flowctl.pipeline.watch.input import row_checks
from flowctl.server.bans import MOST_BANS
from flowctl.server.guilt import PROOF

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MOST_FILES: Final = 500
"""Files of a trigger: a minute of 80 nodes that write every 10 s; a backlog is worked off in batches of that."""
_FAR_FUTURE_US: Final = 4_102_444_800_000_000
"""Year 2100: the check against a clock that is ahead is made with the batch's own time instead, which replays."""
LOOK_BACK_S: Final = 86_400
"""Files that were finished within that time are asked who behaves at an address that may be banned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How to watch.

    Args:
        trigger_s: time between two looks for new files, 0.1 to 3600 s.
        window_s: length of a window, 1 to 86,400 s.
        watermark_s: how much later than the newest record one may come, 0 to 86,400 s; also how far ahead of this
            machine's clock one may be.
        checkpoint: folder of Spark's checkpoint. None: ``OUT/_checkpoint``.
        once: work off what is there, then end.
        most_files: files per trigger.
        weights: of evidence.
        allow: networks that are neither banned nor limited.
        private: whether loopback and private networks are judged as any other. False: they are allowed.
        most_bans: bans of the watch at most; the highest scores are taken.
        replace_bans: whether the ban list that is there at the start is given up. False: its bans that last are kept.
    """

    trigger_s: float = 5.0
    window_s: float = 60.0
    watermark_s: float = 120.0
    checkpoint: str | None = None
    once: bool = False
    most_files: int = MOST_FILES
    weights: Weights = field(default_factory=Weights)
    allow: tuple[Network, ...] = ()
    private: bool = False
    most_bans: int = 10_000
    replace_bans: bool = False

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("--trigger", self.trigger_s, 0.1, 3600),
            ("--window", self.window_s, 1, 86_400),
            ("--watermark", self.watermark_s, 0, 86_400),
            ("--max-files", self.most_files, 1, 100_000),
            ("--max-bans", self.most_bans, 1, MOST_BANS),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value:g}, allowed is {low:g} to {high:g}")

    @property
    def spared(self) -> tuple[Network, ...]:
        """All networks that are neither banned nor limited."""
        return self.allow if self.private else (*self.allow, *addresses.PRIVATE)


def found_in(raw: DataFrame, now: Column, options: WatchOptions) -> DataFrame:
    """Return the evidence of the rows that fit.

    Args:
        raw: `flow_events` as read.
        now: time of the batch, not of now: a batch that is run again must filter the same rows.
        options: watermark, weights.
    """
    ahead = now + f.make_dt_interval(secs=f.lit(options.watermark_s))
    fits = raw.where(~f.expr(any_of(row_checks(), _FAR_FUTURE_US))).where(f.col("ts") <= ahead)
    return evidence(fits, options.weights)


def windowed(found: DataFrame, options: WatchOptions) -> DataFrame:
    """Return the sums of addresses in windows; works on a stream and on a table alike.

    Args:
        found: of `evidence`; a stream has its watermark already.
        options: windows, weights.

    Returns:
        One row per window and address: window, address, milli_points, last_seen, and n0, n1 ...: occurrences of each of
        `counted_kinds`. Sums of whole numbers, so that a part can be taken back; of
        fixed columns instead of a map of kinds, because a stream can have one aggregation only.
    """
    window = f.window("ts", f"{options.window_s} seconds", f"{options.window_s / 2} seconds")
    known = counted_kinds(options.weights)
    counts = [
        f.sum(f.when(f.col("kind") == kind, f.col("amount")).otherwise(0)).alias(f"n{number}")
        for number, kind in enumerate(known)
    ]
    # Whole numbers, so that the sum does not depend on the order of files.
    weighed = (f.col("amount") * points(options.weights) * 1000).cast("bigint")
    return found.groupBy(window.alias("window"), "address").agg(
        f.sum(weighed).alias("milli_points"),
        f.max("ts").alias("last_seen"),
        *counts,
    )


def counted_kinds(weights: Weights) -> list[str]:
    """Return the kinds of evidence that are told apart: all with a name of their own that weigh anything."""
    return [name for name, value in weights.points.items() if value and not name.endswith(".*")]


def without(sums: DataFrame, back: DataFrame, options: WatchOptions) -> DataFrame:
    """Return the sums of windows without the part `back`: of files that must not count.

    Args:
        sums: of `windowed`.
        back: alike; several rows for one window and address are several parts.
        options: weights.
    """
    names = ["milli_points", *(f"n{number}" for number in range(len(counted_kinds(options.weights))))]
    parts = back.groupBy("window", "address").agg(*(f.sum(name).alias(f"back_{name}") for name in names))
    left = [(f.col(name) - f.coalesce(f.col(f"back_{name}"), f.lit(0))).alias(name) for name in names]
    return sums.join(parts, ["window", "address"], "left").select("window", "address", "last_seen", *left)


def candidates(sums: DataFrame, options: WatchOptions, at_us: int) -> DataFrame:
    """Return the windows whose evidence is enough, regardless of what else is at their addresses.

    Args:
        sums: of `windowed`.
        options: threshold, allow list, length of the list.
        at_us: up to when evidence ages, microseconds since the epoch.

    Returns:
        address, last_seen_us, evidence (JSON); points and harm, and the same with each kind as of one offender (capped,
        capped_proof): see `flowctl.pipeline.jobs.abuse`. The worst first.
    """
    weights, known = options.weights, counted_kinds(options.weights)
    left = halved(f.lit(at_us) - f.unix_micros("last_seen"), weights)
    each = {kind: f.col(f"n{number}") * f.lit(float(weights.of(kind))) * left for number, kind in enumerate(known)}
    most = f.lit(weights.threshold)

    def total(kinds: list[str], *, capped: bool) -> Column:
        parts = [f.least(each[kind], most) if capped else each[kind] for kind in kinds]
        return sum(parts, f.lit(0.0))

    harmful = [kind for kind in known if weights.bans(kind)]
    proofs = [kind for kind in harmful if weights.of(kind) >= PROOF]
    every = f.col("milli_points") / 1000 * left
    unnamed = f.least(f.greatest(every - total(known, capped=False), f.lit(0.0)), most)
    pairs = [f.struct(f.lit(kind).alias("key"), f.col(f"n{n}").alias("value")) for n, kind in enumerate(known)]
    told = f.map_from_entries(f.filter(f.array(*pairs), lambda pair: pair["value"] > 0))
    return (
        sums.select(
            "address",
            f.unix_micros("last_seen").alias("last_seen_us"),
            f.to_json(told).alias("evidence"),
            every.alias("points"),
            total(harmful, capped=False).alias("harm"),
            (total(known, capped=True) + unnamed).alias("capped"),
            total(proofs, capped=True).alias("capped_proof"),
        )
        .where(f.col("points") >= weights.threshold)
        .orderBy(f.desc("points"), "address", "last_seen_us")
        .limit(options.most_bans)
    )


def behaving(events: DataFrame, found: DataFrame, options: WatchOptions, now_us: int) -> DataFrame:
    """Return who behaves at the addresses of `found`: see `flowctl.pipeline.jobs.evidence.standing`.

    Args:
        events: `flow_events` of the last hours.
        found: of `candidates`.
        options: weights.
        now_us: when the evidence was, microseconds since the epoch.
    """
    wanted = f.broadcast(found.select("address").distinct())
    asked = evidence(events, options.weights).join(wanted, "address", "left_semi")
    return standing(asked, starts_of(events).select("node", "started_us"), options.weights, now_us, now_us)


def to_ban(found: DataFrame, behaves: DataFrame, options: WatchOptions) -> DataFrame:
    """Return who is to be banned or limited, with cidr, verdict, score, last_seen_s and evidence (JSON).

    Args:
        found: of `candidates`.
        behaves: of `behaving`.
        options: threshold, allow list.
    """
    weights = options.weights
    frame = found.join(behaves, "address", "left").fillna({"people": 0, "standing_hours": 0.0})
    digits = addresses.unit_digits(f.col("address"))
    frame = frame.withColumns(
        {
            "digits": digits,
            "points": f.when(is_shared(weights), f.col("capped")).otherwise(f.col("points")),
            "proof": f.col("capped_proof"),
        }
    ).withColumn("score", f.round(f.col("points") / (1 + f.col("standing_hours")), 3))
    return (
        frame.withColumn("verdict", verdict(weights, options.spared))
        .where(f.col("verdict").isin(*ACTIONS))
        .orderBy(f.desc("score"), "address", "last_seen_us")
        .select(
            addresses.cidr(f.col("address"), f.col("digits")).alias("cidr"),
            "verdict",
            "score",
            (f.col("last_seen_us") / 1e6).alias("last_seen_s"),
            "evidence",
        )
    )
