"""``flowctl analyze abuse``: whom to keep out or to slow down, from what each address did, and the list of it.

`evidence` keeps what the records of each hour say, `scores` makes verdicts of it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from flowctl.analyze.abuse.evidence import EVIDENCE
from flowctl.analyze.abuse.scores import ACTIONS, SCORE_COLUMNS, AbuseRules, all_scores, begin_us
from flowctl.analyze.abuse.weights import Weights
from flowctl.analyze.job import AnalysisJob, JobAnswer
from flowctl.analyze.models import run_text
from flowctl.analyze.options import AbuseOptions
from flowctl.analyze.records import addresses
from flowctl.charts.words import plural, span
from flowctl.core.server.bans import MOST_EVIDENCE, Ban, BanAction, fitting, merge_bans, parse_lines, render
from flowctl.errors import ConfigError

if TYPE_CHECKING:
    from flowctl.analyze.job import Parts

BANS_FILE: Final = "bans.jsonl"
_WORDS: Final = {"ban": "", "shared": "shared: ", "limit": "limited: "}


def _bans(rows: Sequence[Mapping[str, Any]], weights: Weights, begin_s: float) -> list[Ban]:
    """Return the bans of rows of scores; one of which none can be made must not cost the others."""
    bans = []
    for row in rows:
        score = max(row["score"], weights.threshold)  # of a shared address it is divided by all who behave there
        length_s = min(weights.longest_ban_s, weights.ban_s * score / weights.threshold)  # the higher, the longer
        told = {name: value for name, value in json.loads(row["evidence"]).items() if value}
        heaviest = sorted(told, key=lambda name: (-told[name] * weights.of(name), name))[:MOST_EVIDENCE]
        with contextlib.suppress(ConfigError, ValueError, OverflowError):
            ban = Ban(
                cidr=row["cidr"],
                action=ACTIONS[row["verdict"]],
                reason=f"{_WORDS[row['verdict']]}{next(iter(heaviest), '')}",
                score=row["score"],
                evidence={name: told[name] for name in heaviest},
                expires=datetime.fromtimestamp(begin_s + length_s, UTC),
            )
            bans.append(ban)
    return bans


def merge_lists(there: str, made: str, options: AbuseOptions, warn: Callable[[str], None] = lambda _: None) -> str:
    """Return what the ban list holds after this job: others write to it as well, and none ends a ban of another."""
    if options.replace_bans:
        return made
    # By the clock of the bans: with `now_s` in the past what lasted then is kept, and the server knows the time.
    now_s = time.time() if options.now_s is None else options.now_s
    try:
        merged = merge_bans(parse_lines(there, BANS_FILE), parse_lines(made), now_s, options.allow)
        fits = fitting(merged)
    except ConfigError as error:
        told = f"the ban list that is there cannot be read, so it is not replaced: {error}"
        raise ConfigError(told, hint="mend or move the file, or begin a new list with --replace-bans") from error
    if left := len(merged) - len(fits):
        warn(
            f"{left} of {len(merged)} bans and limits are not on the list, which is full: those with the lowest scores"
        )
    return render(fits)


def answer(parts: Parts, options: AbuseOptions) -> JobAnswer:
    begin_s = time.time() if options.now_s is None else options.now_s
    last_s = parts.newest.timestamp() if parts.newest is not None else 0.0
    weights, most = options.weights, options.most_bans
    seen_us, now_us = int(last_s * 1e6), int(begin_s * 1e6)
    allowed = options.allow if options.private else (*options.allow, *addresses.PRIVATE)
    rules = AbuseRules(weights=weights, seen_us=seen_us, now_us=now_us, since_us=begin_us(parts), spared=allowed)
    table = all_scores(parts, rules)
    parts.write("abuse_scores", table, SCORE_COLUMNS)
    if isinstance(table, pd.DataFrame):
        verdicts, listed = table.groupby(["kind", "verdict"]).size().to_dict(), table[table["action"].notna()]
    else:
        scores = {"scores": parts.result("abuse_scores")}
        counted = run_text("SELECT kind, verdict, count(*) AS count FROM scores GROUP BY kind, verdict", scores)
        verdicts = {(kind, verdict): count for kind, verdict, count in counted.collect()}
        best = "SELECT * FROM scores WHERE action IS NOT NULL ORDER BY action, score DESC, cidr LIMIT :most"
        listed = run_text(best, scores, most=most).toArrow().to_pandas()
    listed = listed.sort_values(["action", "score", "cidr"], ascending=[True, False, True]).head(most)
    bans = _bans(listed.to_dict("records"), weights, begin_s)
    fits = fitting(merge_bans((), bans, begin_s, options.allow))
    parts.write_text(BANS_FILE, render(fits))
    limits = sum(ban.action is BanAction.LIMIT for ban in fits)
    wanted = sum(count for (_, verdict), count in verdicts.items() if verdict in ACTIONS)
    summary: dict[str, Any] = {
        "bans": len(fits) - limits,
        "limits": limits,
        "bans_left_out": wanted - len(listed) + len(bans) - len(fits),
        "bans_invalid": len(listed) - len(bans),
        "verdicts": {f"{kind}_{verdict}": count for (kind, verdict), count in sorted(verdicts.items())},
        "data_ends_s_ago": round(begin_s - last_s),
    }
    warnings = []
    if (spared := verdicts.get(("address", "allowed"), 0)) and not options.private:
        warnings.append(
            f"{plural(spared, 'address', 'addresses')} with enough evidence are neither banned nor limited: loopback "
            "and private networks are allowed, as is what --allow names; --judge-private judges them as any other"
        )
    if last_s and begin_s - last_s > weights.half_life_s:
        warnings.append(
            f"the records end {span(begin_s - last_s)} ago, and evidence is halved every "
            f"{span(weights.half_life_s)} up to now; --now TIME judges as at another time"
        )
    return JobAnswer(summary=summary, warnings=warnings)


JOB: Final = AnalysisJob(
    name="abuse",
    parts=(EVIDENCE,),
    results=("abuse_scores", BANS_FILE),
    answer=answer,
    options=AbuseOptions,
    merge={BANS_FILE: merge_lists},
)
