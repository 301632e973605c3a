"""``flowctl analyze abuse``: whom to keep out or to slow down, from what each address did, and the list of it.

`evidence` keeps what the records of each hour say, `scores` makes verdicts of it; only bans come to this process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Observation
from pyspark.sql import functions as f

from flowctl.addresses import Network
from flowctl.errors import ConfigError
from flowctl.pipeline.abuse.evidence import EVIDENCE
from flowctl.pipeline.abuse.scores import ACTIONS, SCORE_COLUMNS, VERDICTS, all_scores
from flowctl.pipeline.abuse.weights import Weights
from flowctl.pipeline.job import Answer, Job
from flowctl.pipeline.records import addresses
from flowctl.server.bans import MOST_BANS, Ban, BanAction, BanList, merge_bans, render

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flowctl.pipeline.job import Parts

BANS_FILE: Final = "bans.jsonl"
_HINT: Final = "mend or move the file, or begin a new list with --replace-bans"


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


def bans_from(
    rows: Iterable[tuple[dict[str, Any], float]], weights: Weights, source: str = ""
) -> tuple[list[Ban], int]:
    """Return the bans of rows of scores, and of how many none can be made: one odd row must not cost all others.

    Args:
        rows: each with the second since the epoch at which its ban begins.
        weights: for the length: the higher the score, the longer.
        source: who made them.
    """
    bans, invalid = [], 0
    for row, begin_s in rows:
        score = max(row["score"], weights.threshold)  # of a shared address it is divided by all who behave there
        length_s = min(weights.longest_ban_s, weights.ban_s * score / weights.threshold)
        told = {name: value for name, value in json.loads(row["evidence"]).items() if value}
        worst = max(told, key=lambda name: (told[name] * weights.of(name), name), default="")
        try:
            ban = Ban(
                cidr=row["cidr"],
                action=ACTIONS[row["verdict"]],
                reason=f"{_WORDS[row['verdict']]}{worst}",
                score=row["score"],
                evidence=told,
                expires=datetime.fromtimestamp(begin_s + length_s, UTC),
                source=source,
            )
        except (ConfigError, ValueError, OverflowError):
            invalid += 1
        else:
            bans.append(ban)
    return bans, invalid


_WORDS: Final = {"ban": "", "shared": "shared: ", "limit": "limited: "}


def bans_of_text(text: str, where: str = BANS_FILE) -> list[Ban]:
    """Return the bans of the list that is there.

    Raises:
        ConfigError: it cannot be read. It is never written over: somebody may have made a typing error in it.
    """
    try:
        return BanList.parse(text, where).bans
    except ConfigError as error:
        raise ConfigError(
            f"the ban list that is there cannot be read, so it is not replaced: {error}", hint=_HINT
        ) from error


def merge_lists(there: str, made: str, options: AbuseOptions) -> str:
    """Return what the ban list holds after this job: others write to it as well, and none ends a ban of another."""
    if options.replace_bans:
        return made
    # By the clock of the bans: with `now_s` in the past what lasted then is kept, and the server knows the time.
    now_s = time.time() if options.now_s is None else options.now_s
    return render(merge_bans(bans_of_text(there), BanList.parse(made).bans, now_s, options.allow))


def found_of(scores: DataFrame, truth: str) -> dict[str, Any]:
    """Return how many of the planted abusers were found, and what honest ones got.

    An address may have both behind it. Found is an abuser whose address is banned or limited. Honest are addresses with
    anybody honest behind them: planted ones who look bad, those beside an abuser, and all others.
    """
    written = scores.sparkSession.read.parquet(truth).withColumnRenamed("address", "written")
    planted = (
        addresses.with_unit(written, "written")
        .groupBy("address")
        .agg(f.min("kind").alias("planted_kind"), f.max("abuser").alias("abuser"), f.max("honest").alias("honest"))
    )
    judged = scores.where(f.col("kind") == "address").select("address", "verdict")
    banned, limited = f.col("verdict").isin("ban", "subnet_ban"), f.col("verdict").isin("shared", "limit")
    groups = (
        planted.join(judged, "address", "full_outer")
        .groupBy(
            f.coalesce("planted_kind", f.lit("ordinary")).alias("planted_kind"),
            f.coalesce("abuser", f.lit(False)).alias("abuser"),
            f.coalesce("honest", f.lit(True)).alias("honest"),
        )
        .agg(f.count("*").alias("all"), f.count_if(banned).alias("banned"), f.count_if(limited).alias("limited"))
    )
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


_COUNTS: Final = {f"{kind}_{verdict}": (kind, verdict) for kind in ("address", "subnet") for verdict in VERDICTS}


def answer(parts: Parts, options: AbuseOptions) -> Answer:
    """Judge the addresses; write ``abuse_scores`` and ``bans.jsonl``."""
    begin_s = time.time() if options.now_s is None else options.now_s
    last_s = parts.newest.timestamp() if parts.newest is not None else 0.0
    weights, told = options.weights, Observation()
    table = all_scores(parts.table(EVIDENCE.name), weights, options.spared, int(last_s * 1e6), int(begin_s * 1e6))
    counts = [
        f.count_if((f.col("kind") == kind) & (f.col("verdict") == verdict)).alias(name)
        for name, (kind, verdict) in _COUNTS.items()
    ]
    scores = parts.spark.read.parquet(parts.write("abuse_scores", table.observe(told, *counts), SCORE_COLUMNS))
    verdicts = {name: count for name, count in told.get.items() if count}
    wanted = sum(count for name, count in verdicts.items() if _COUNTS[name][1] in ACTIONS)
    rows = []
    if wanted:
        best = scores.where(f.col("action").isNotNull()).orderBy("action", f.desc("score"), "cidr")
        rows = best.limit(options.most_bans).collect()
    bans, invalid = bans_from(((row.asDict(), begin_s) for row in rows), weights)
    parts.write_text(BANS_FILE, render(merge_bans((), bans, begin_s, options.allow)))
    limits = sum(ban.action is BanAction.LIMIT for ban in bans)
    result = Answer(
        summary={
            "bans": len(bans) - limits,
            "limits": limits,
            "bans_left_out": wanted - len(rows),
            "bans_invalid": invalid,
            "verdicts": verdicts,
            "data_ends_s_ago": round(begin_s - last_s),
        }
    )
    if last_s and begin_s - last_s > weights.half_life_s:
        result.warnings.append(
            f"the records end {(begin_s - last_s) / 3600:.0f} hours ago, and evidence is halved every "
            f"{weights.half_life_s / 3600:g} hours up to now; --now TIME judges as at another time"
        )
    if options.truth is not None:
        result.summary["truth"] = found_of(scores, options.truth)
    return result


JOB: Final = Job(
    name="abuse",
    parts=(EVIDENCE,),
    results=("abuse_scores", BANS_FILE),
    answer=answer,
    options=AbuseOptions,
    merge={BANS_FILE: merge_lists},
)
