"""``flowctl analyze abuse``: whom to keep out or to slow down, from what each address did, and the list of it.

`evidence` keeps what the records of each hour say, `scores` makes verdicts of it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
from pyspark.sql import functions as f

from flowctl.addresses import Network
from flowctl.errors import ConfigError
from flowctl.pipeline.abuse.evidence import EVIDENCE
from flowctl.pipeline.abuse.scores import ACTIONS, SCORE_COLUMNS, Rules, all_scores
from flowctl.pipeline.abuse.weights import Weights
from flowctl.pipeline.job import Answer, Job
from flowctl.pipeline.records import addresses
from flowctl.server.bans import MOST_BANS, Ban, BanAction, BanList, merge_bans, render

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flowctl.pipeline.job import Parts

BANS_FILE: Final = "bans.jsonl"
_WORDS: Final = {"ban": "", "shared": "shared: ", "limit": "limited: "}


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


def _bans(rows: Sequence[Mapping[str, Any]], weights: Weights, begin_s: float) -> list[Ban]:
    """Return the bans of rows of scores; one of which none can be made must not cost the others."""
    bans = []
    for row in rows:
        score = max(row["score"], weights.threshold)  # of a shared address it is divided by all who behave there
        length_s = min(weights.longest_ban_s, weights.ban_s * score / weights.threshold)  # the higher, the longer
        told = {name: value for name, value in json.loads(row["evidence"]).items() if value}
        worst = max(told, key=lambda name: (told[name] * weights.of(name), name), default="")
        with contextlib.suppress(ConfigError, ValueError, OverflowError):
            ban = Ban(
                cidr=row["cidr"],
                action=ACTIONS[row["verdict"]],
                reason=f"{_WORDS[row['verdict']]}{worst}",
                score=row["score"],
                evidence=told,
                expires=datetime.fromtimestamp(begin_s + length_s, UTC),
            )
            bans.append(ban)
    return bans


def merge_lists(there: str, made: str, options: AbuseOptions) -> str:
    """Return what the ban list holds after this job: others write to it as well, and none ends a ban of another.

    Raises:
        ConfigError: it cannot be read. It is never written over: somebody may have made a typing error in it.
    """
    if options.replace_bans:
        return made
    # By the clock of the bans: with `now_s` in the past what lasted then is kept, and the server knows the time.
    now_s = time.time() if options.now_s is None else options.now_s
    try:
        kept = BanList.parse(there, BANS_FILE).bans
    except ConfigError as error:
        told = f"the ban list that is there cannot be read, so it is not replaced: {error}"
        raise ConfigError(told, hint="mend or move the file, or begin a new list with --replace-bans") from error
    return render(merge_bans(kept, BanList.parse(made).bans, now_s, options.allow))


def found_of(scores: DataFrame, truth: str) -> dict[str, Any]:
    """Return how many of the planted abusers were found, and what honest ones got.

    An address may have both behind it. Found is an abuser whose address is banned or limited. Honest are addresses with
    anybody honest behind them: planted ones who look bad, those beside an abuser, and all others.
    """
    planted = scores.sparkSession.read.parquet(truth).withColumnRenamed("kind", "who")
    judged = scores.where(f.col("kind") == "address").join(planted, "address", "full_outer")
    others: dict[str, Any] = {"who": "ordinary", "abuser": False, "honest": True}
    groups = (
        judged.fillna(others)
        .groupBy(*others)
        .agg(
            f.count("*").alias("all"),
            f.count_if(f.col("verdict").isin("ban", "subnet_ban")).alias("banned"),
            f.count_if(f.col("verdict").isin("shared", "limit")).alias("limited"),
        )
    )
    rows = groups.orderBy(*others).toArrow().to_pandas()
    rows["found"] = rows["banned"] + rows["limited"]
    abusers, honest = rows[rows["abuser"]], rows[rows["honest"]]
    alone = abusers[~abusers["honest"]]
    figures = {
        "abusive_addresses": abusers["all"],
        "found": abusers["found"],
        "alone": alone["all"],
        "alone_banned": alone["banned"],
        "alone_limited": alone["limited"],
        "honest_addresses": honest["all"],
        "honest_banned": honest["banned"],
    }
    sums = {name: int(column.sum()) for name, column in figures.items()}
    by_kind = {
        f"{row.who}{' beside others' if row.abuser and row.honest else ''}": (
            f"{row.banned} banned and {row.limited} limited of {row.all}"
        )
        for row in rows.itertuples()
    }
    return sums | {"found_share": sums["found"] / max(sums["abusive_addresses"], 1), "by_kind": by_kind}


def answer(parts: Parts, options: AbuseOptions) -> Answer:
    """Judge the addresses; write ``abuse_scores`` and ``bans.jsonl``."""
    begin_s = time.time() if options.now_s is None else options.now_s
    last_s = parts.newest.timestamp() if parts.newest is not None else 0.0
    weights, most = options.weights, options.most_bans
    rules = Rules(weights=weights, seen_us=int(last_s * 1e6), now_us=int(begin_s * 1e6), spared=options.spared)
    table = all_scores(parts, rules)
    parts.write("abuse_scores", table, SCORE_COLUMNS)
    if isinstance(table, pd.DataFrame):
        verdicts, listed = table.groupby(["kind", "verdict"]).size().to_dict(), table[table["action"].notna()]
    else:
        scores = parts.result("abuse_scores")
        verdicts = {
            (kind, verdict): count for kind, verdict, count in scores.groupBy("kind", "verdict").count().collect()
        }
        best = scores.where(f.col("action").isNotNull()).orderBy("action", f.desc("score"), "cidr")
        listed = best.limit(most).toArrow().to_pandas()
    listed = listed.sort_values(["action", "score", "cidr"], ascending=[True, False, True]).head(most)
    bans = _bans(listed.to_dict("records"), weights, begin_s)
    parts.write_text(BANS_FILE, render(merge_bans((), bans, begin_s, options.allow)))
    limits = sum(ban.action is BanAction.LIMIT for ban in bans)
    wanted = sum(count for (_, verdict), count in verdicts.items() if verdict in ACTIONS)
    summary: dict[str, Any] = {
        "bans": len(bans) - limits,
        "limits": limits,
        "bans_left_out": wanted - len(listed),
        "bans_invalid": len(listed) - len(bans),
        "verdicts": {f"{kind}_{verdict}": count for (kind, verdict), count in sorted(verdicts.items())},
        "data_ends_s_ago": round(begin_s - last_s),
    }
    if options.truth is not None:
        summary["truth"] = found_of(parts.result("abuse_scores"), options.truth)
    warnings = []
    if last_s and begin_s - last_s > weights.half_life_s:
        warnings.append(
            f"the records end {(begin_s - last_s) / 3600:.0f} hours ago, and evidence is halved every "
            f"{weights.half_life_s / 3600:g} hours up to now; --now TIME judges as at another time"
        )
    return Answer(summary=summary, warnings=warnings)


JOB: Final = Job(
    name="abuse",
    parts=(EVIDENCE,),
    results=("abuse_scores", BANS_FILE),
    answer=answer,
    options=AbuseOptions,
    merge={BANS_FILE: merge_lists},
)
