"""``whatif``: which limits would have been better for the viewers that were recorded message by message.

Theory of operation. Of each hour a bounded sample of viewers is kept, with what can matter of each
(`flowctl.analyze.whatif.stretches`); nothing of the grid is in it. The answer takes the sample of the whole window,
leaves out attackers, and runs the server's own Sender over those in trouble for every choice (`trials`), as many as the
time allows that it is given (`beside`). What would have followed a cut is drawn from stalls that ended (`survival`).
Figures are estimated from who was tried (`estimates`); one choice is advised, or none (`recommend`). How many viewers
there were is exact up to `WhatifOptions.most`; of more it follows from how small the smallest hashes are (Beyer et al.,
2007: to 2 % at 2000).
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.job import AnalysisJob, JobAnswer, JobPart, Parts
from flowctl.analyze.options import WhatifOptions
from flowctl.analyze.whatif.beside import try_beside
from flowctl.analyze.whatif.estimates import Estimate, estimates, sums_of
from flowctl.analyze.whatif.grid import DEFAULT_IN_FORCE, default_grid, in_force, levels_of, parse_grid
from flowctl.analyze.whatif.recommend import BALANCED_WORDS, Pick, costs, mark_front, recommend
from flowctl.analyze.whatif.stretches import COUNTED, NO_VIEWER, SERVER, STRETCH_COLUMNS, stretches
from flowctl.analyze.whatif.trials import (
    CALM,
    CUT,
    DELAY,
    DROPS,
    HONEST_SHARE,
    PEAK,
    Lives,
    Sums,
    Trial,
    Viewer,
    in_turn,
    stratum_of,
)
from flowctl.core.flow.limits import target_marks
from flowctl.core.flow.limitsfile import LimitsFile, render
from flowctl.core.flow.state import MessageClass
from flowctl.core.flow.timing import most_wait_s, target_s
from flowctl.core.text.printable import foreign
from flowctl.reasons import SLOW_ENDS
from flowctl.records.flight.whatif.types import Choice, bucket_ms, marks_text, quantile_ms
from flowctl.records.telemetry.schema import CLASS_NAMES

if TYPE_CHECKING:
    import pandas as pd


FEW_REFUSED: Final = 20
"""Least viewers in trouble for a share: with fewer, one more or less is over five percent."""
STRETCHES: Final = "whatif_stretches"
RECORD: Final = (
    "not known: no viewer has a flight (flowctl serve live --events FOLDER records them, but with --flights 0)"
)
"""What there is to say of limits where no viewer was recorded message by message."""
RANGED: Final = ("disconnected", "honest_disconnected", "dropped_share", "delay_p95_ms")
ENDS: Final = ("low", "high")
SET_WORDS: Final = (
    "renditions were tried on viewers in trouble only: of the others nobody knows what their lines carry beyond what "
    "they were sent; other renditions look like the recorded one, larger or smaller"
)
"""What must be known where a grid has renditions."""
CHOICE_COLUMNS: Final[dict[str, str]] = {
    "choice_id": "int",
    **dict.fromkeys(("choice", "policy", "soft", "hard", "low", "hard_policy", "target_delay"), "string"),
    **dict.fromkeys(("soft_too_long_s", "stuck_s", "return_after_s"), "double"),
    **dict.fromkeys(("in_force", "on_front", "recommended"), "boolean"),
    "viewers": "bigint",
    "disconnected": "bigint",
    "disconnected_share": "double",
    "honest_disconnected": "bigint",
    "honest_disconnected_share": "double",
    "offered_messages": "bigint",
    "dropped_messages": "bigint",
    "dropped_share": "double",
    **{f"dropped_messages_{name}": "bigint" for name in CLASS_NAMES},
    **dict.fromkeys(("key_share", "delay_p50_ms", "delay_p95_ms", "delay_p99_ms", "delay_max_ms"), "double"),
    **dict.fromkeys(("stall_share", "ready_share"), "double"),
    "memory_peak_bytes": "bigint",
    "memory_mean_bytes": "double",
    **dict.fromkeys(("sent_bytes", "edges", "returns"), "bigint"),
    **dict.fromkeys(("missed_share", "join_ms", "assumed_share", "sampled_share"), "double"),
    **dict.fromkeys([f"{name}_{end}" for name in RANGED for end in ENDS], "double"),
}
"""Contract of ``whatif_choices``. Grain: one choice over all viewers. `..._low`, `..._high`: where the figure is nine
times of ten, by chance and by what nobody has seen; the figure itself lies between them. `missed_share`: of what
viewers should have had, after a cut too. `join_ms`: mean time to the first picture of viewers in trouble."""


# -- the sample


@dataclass(slots=True)
class Sample:
    """The viewers of the window."""

    viewers: Sequence[Viewer]
    heads: pd.DataFrame
    # what servers said of their limits up to the end of the window: time, `SERVER`, detail
    starts: Sequence[tuple[Any, str, str | None]]
    ended: Counter[str]  # how many viewers ended in all, by why
    recorded: int
    share: float
    attackers: int


_TOLD: Final = ("at", "source", "settings")
_VIEWER: Final = ["picked", "node", "conn_id"]
_HEAD: Final = (*_VIEWER, "address", "at", "source", "reason", "settings", "close_reason")


def sample_of(parts: Parts, options: WhatifOptions) -> Sample:
    from pyarrow.dataset import field

    rows = parts.arrow(STRETCHES, _HEAD, field("source") == "flight").to_pandas()
    keys = rows[_VIEWER].drop_duplicates().sort_values(_VIEWER)
    keys = keys.head(options.most) if options.most else keys
    heads = rows.merge(keys, on=_VIEWER)
    honest = _without_attackers(parts, heads)
    count, left = (len(some[["node", "conn_id"]].drop_duplicates()) for some in (heads, honest))
    recorded = _recorded(keys, options.most)
    told = parts.arrow(STRETCHES, _TOLD, field("source") == SERVER, before=True).to_pylist()
    ended: Counter[str] = Counter()
    for row in parts.arrow(STRETCHES, ("close_reason", "calm"), field("source") == COUNTED).to_pylist():
        ended[str(row["close_reason"])] += dict(row["calm"])["viewers"]
    return Sample(
        viewers=_viewers(parts, honest[honest["reason"].isna()]),
        heads=honest,
        starts=[tuple(row[name] for name in _TOLD) for row in told],
        ended=ended,
        recorded=recorded,
        share=min(count / recorded, 1.0) if recorded else 1.0,
        attackers=count - left,
    )


def _without_attackers(parts: Parts, heads: pd.DataFrame) -> pd.DataFrame:
    """Return the viewers of whom the rules of ``abuse`` do not say that they attack."""
    from flowctl.analyze.abuse.scores import attackers

    if heads.empty:
        return heads
    newest_us = int(parts.newest.timestamp() * 1e6) if parts.newest is not None else 0
    direct, banned = attackers(parts, set(heads["address"].dropna()), newest_us)
    pairs = zip(heads["node"], heads["conn_id"], heads["address"], strict=True)
    return heads[[(node, number) not in direct and who not in banned for node, number, who in pairs]]


def _recorded(keys: pd.DataFrame, most: int) -> int:
    """Return how many viewers there were, by the largest of the smallest hashes where not all were kept."""
    if not most or len(keys) < most or most < 2:
        return len(keys)
    share = int(keys["picked"].iloc[-1]) / 2**60
    return max(round((most - 1) / share), most) if share else most


def _viewers(parts: Parts, who: pd.DataFrame) -> list[Viewer]:
    from pyarrow.dataset import field

    wanted = field("picked").isin(who["picked"].unique().tolist()) & (field("source") == "flight")
    rows = parts.arrow(STRETCHES, where=wanted & field("reason").is_null()).to_pylist() if len(who) else []
    known = {*zip(who["node"], who["conn_id"], strict=True)}
    rows = [row for row in rows if (row["node"], row["conn_id"]) in known]
    return grouped(sorted(rows, key=lambda row: [row[name] for name in (*_VIEWER, "at")]))


def grouped(rows: Iterable[Mapping[str, Any]]) -> list[Viewer]:
    """Return the viewers of stretches that are in the order of viewers and times."""
    found = [list(group) for _, group in itertools.groupby(rows, key=lambda row: (row["node"], row["conn_id"]))]
    return [Viewer(stratum_of(some), some) for some in found]


# -- choices


@dataclass(slots=True)
class Advice:
    """What the trials of a sample come to."""

    rows: list[dict[str, Any]]
    pick: Pick
    tried: int  # viewers in trouble that were tried
    troubled: int  # viewers whom a kernel ever refused anything
    damaged: int
    made: int  # trials
    wanted: int


def advise(
    viewers: Sequence[Viewer],
    choices: Sequence[Choice],
    options: WhatifOptions,
    *,
    trials: int | None = None,
    sampled_share: float = 1.0,
    told: Callable[[int, int], None] = lambda *_: None,
) -> Advice:
    """Try the choices on viewers and return what comes of it.

    The first choice is in force. `trials`: make so many and look at no clock; None: as many as the time allows.
    `told` is called with how many trials are done, and of how many.
    """
    firsts = [viewer.rows[0] for viewer in viewers]
    lives = Lives(
        [us for row in firsts for us in row["stalls"] or ()], [row["stay_us"] or 0 for row in firsts], options.extend_s
    )
    turns = list(in_turn(viewers))[:trials]
    work = [(n, viewers[who].rows, lives.draw(viewers[who].rows, draw)) for n, (who, draw) in enumerate(turns)]
    budget_s = inf if trials is not None or options.thorough else options.budget_s
    done = try_beside(work, choices, budget_s, lambda count: told(count, len(turns)))
    of_viewer: dict[int, list[Trial]] = {}
    broken = {turns[number][0] for number, trial in done.items() if trial is None}
    for number, trial in sorted(done.items()):
        if trial is not None and turns[number][0] not in broken:
            of_viewer.setdefault(turns[number][0], []).append(trial)
    calm = Sums()
    for viewer in viewers:
        if viewer.stratum == CALM:
            calm.update(sums_of(viewer.rows))
    strata = [viewers[who].stratum for who in of_viewer]
    sizes = Counter(viewer.stratum for number, viewer in enumerate(viewers) if number not in broken)
    del sizes[CALM]
    for stratum in [stratum for stratum in sizes if strata and stratum not in strata]:
        sizes[strata[0]] += sizes.pop(stratum)  # there was no time for any of it
    needs = stream_needs(viewers)
    on_time_s = target_s(choices[0].limits.target_delay_ms, needs[2])
    found = estimates(calm, sizes, strata, list(of_viewer.values()), len(choices), on_time_s)
    unseen = any(low != high for _, _, ((low, high), *_) in work[: len(done)])
    rows = [
        _row(number, choice, one, sampled_share, options.extend_s if unseen and number else 0.0)
        for number, (choice, one) in enumerate(zip(choices, found, strict=True))
    ]
    if all(in_force(row["settings"]) == choices[0] for row in firsts):
        _count(rows[0], found[0], [viewer for number, viewer in enumerate(viewers) if number not in broken])
    for row, on_front in zip(rows, mark_front(rows), strict=True):
        row["on_front"] = on_front
    # A limits file cannot say another policy than the one in force, nor renditions; and it needs room for its wait.
    fit = [
        number
        for number, choice in enumerate(choices)
        if not number or (choice.policy == choices[0].policy and not choice.renditions and has_room(choice, needs))
    ]
    fitting = [rows[number] for number in fit], [found[number] for number in fit]
    pick = recommend(*fitting, options.objective, len(of_viewer))
    return Advice(rows, pick, len(of_viewer), sum(sizes.values()), len(broken), len(done), len(turns))


Needs = tuple[float, float, float]
"""Bytes and messages a second, and seconds between key frames, of the largest stream."""


def stream_needs(viewers: Sequence[Viewer]) -> Needs:
    most: Needs = (0.0, 0.0, 0.0)
    for row in (row for viewer in viewers for row in viewer.rows if row["at_us"]):
        seconds = (row["at_us"][-1] - row["at_us"][row["given"] or 0]) / 1e6
        told = list(zip(row["at_us"], row["what"], row["bytes"], strict=True))[row["given"] or 0 :]
        sizes = [size for _, what, size in told if what >= 0]
        keys = [at / 1e6 for at, what, _ in told if what == MessageClass.KEY]
        if seconds >= 1.0:
            gop_s = statistics.median(b - a for a, b in itertools.pairwise(keys)) if len(keys) > 1 else 0.0
            most = max(most, (sum(sizes) / seconds, len(sizes) / seconds, gop_s))
    return most


def has_room(choice: Choice, needs: Needs) -> bool:
    """Return whether the hard marks hold what comes in a picture's wait, as docs/how-to/set-limits.md asks."""
    rate, messages, gop_s = needs
    wait_s = target_s(choice.limits.target_delay_ms, gop_s)
    return not rate or not wait_s or most_wait_s(choice.limits, rate, messages) >= wait_s


def _row(number: int, choice: Choice, one: Estimate, sampled_share: float, unseen_s: float) -> dict[str, Any]:
    """Return the row of a choice; `unseen_s`: how long stalls may go on that nobody saw end, if its limits allow it."""
    delay = {int(name[len(DELAY) :]): us / 1e6 for name, us in one.totals.items() if name.startswith(DELAY)}
    row = {
        **_settings(number, choice),
        **_shares(Counter(one.totals)),
        **_quantiles(delay),
        "sampled_share": sampled_share,
    }
    late = one.delay_p95_ms
    if unseen_s:
        ends_s = ((choice.limits.age_ms.hard or 0) / 1000, choice.stuck_s, unseen_s)
        late = (late[0], max(late[1], 1000 * min(filter(None, ends_s))))
    for name, ends in zip(RANGED, (one.cut, one.honest_cut, one.dropped_share, late), strict=True):
        row |= {f"{name}_{end}": get(value, row[name]) for end, get, value in zip(ENDS, (min, max), ends, strict=True)}
    return row


def _count(row: dict[str, Any], one: Estimate, viewers: Sequence[Viewer]) -> None:
    """Have the row of the choice in force say how many were cut under it, in place of what trials made of them."""
    cut, tried = (
        sum(viewer.rows[-1]["close_reason"] in SLOW_ENDS for viewer in viewers),
        one.totals.get("disconnected", 0),
    )
    honest = round(cut * one.totals["honest_disconnected"] / tried) if tried else cut
    for name, count, of in (("disconnected", cut, "viewers"), ("honest_disconnected", honest, "honest")):
        ends = dict.fromkeys((f"{name}_{end}" for end in ENDS), float(count))
        row |= {name: count, f"{name}_share": count / one.totals[of], **ends}


def _settings(number: int, choice: Choice) -> dict[str, Any]:
    limits = choice.limits
    return {
        "choice_id": number,
        "choice": str(choice),
        "policy": choice.policy,
        **{name: marks_text(limits, level) for level, name in enumerate(("low", "soft", "hard"))},
        "hard_policy": limits.hard_policy.value,
        "target_delay": target_marks(limits),
        "soft_too_long_s": float(choice.soft_too_long_s),
        "stuck_s": float(choice.stuck_s),
        "return_after_s": float(choice.return_after_s),
        "in_force": number == 0,
        "recommended": False,
    }


def _shares(total: Counter[str]) -> dict[str, Any]:
    def share(part: str, whole: str, none: float = 0.0) -> float:
        return total[part] / total[whole] if total[whole] else none

    total["dropped_messages"] = sum(total[name] for name in DROPS)
    total |= {name: round(total[name]) for name in ("disconnected", "honest_disconnected")}  # shares are of these
    copied = ("viewers", "disconnected", "honest_disconnected", "offered_messages", "sent_bytes", "edges", "returns")
    return {
        **{name: round(total[name]) for name in (*copied, PEAK, *DROPS, "dropped_messages")},
        "disconnected_share": share("disconnected", "viewers"),
        "honest_disconnected_share": share("honest_disconnected", "honest"),
        "dropped_share": share("dropped_messages", "offered_messages"),
        "missed_share": share("missed", "wanted"),
        "key_share": share("key_sent", "key_offered", none=1.0),
        "stall_share": share("stall_us", "watched_us"),
        "assumed_share": share("assumed_us", "watched_us"),
        "ready_share": share("ready_us", "watched_us"),
        "memory_mean_bytes": share("memory_mean_bytes", "viewers"),
        "join_ms": share("join_us", "joins") / 1000,
    }


def _quantiles(delay: Mapping[int, float]) -> dict[str, float]:
    pairs = sorted(delay.items())
    found = {f"delay_p{percent}_ms": quantile_ms(pairs, percent / 100) for percent in (50, 95, 99)}
    return {**found, "delay_max_ms": bucket_ms(pairs[-1][0]) if pairs else 0.0}


# -- the answer


def answer(parts: Parts, options: WhatifOptions) -> JobAnswer:
    """Try the grid on the sample; write ``whatif_choices`` and ``limits.toml``.

    With no viewer in the sample there is nothing to write, and an earlier ``limits.toml`` stays: a server may read it.
    """
    sample = sample_of(parts, options)
    present, levels = _in_force(sample), _viewer_levels(sample.starts)
    choices = default_grid(present or DEFAULT_IN_FORCE)
    if options.grid is not None:
        choices = parse_grid(options.grid, options.grid_name, present or DEFAULT_IN_FORCE)
    if not sample.viewers:
        return _nothing(parts, sample, options)
    found = advise(
        sample.viewers,
        choices,
        options,
        sampled_share=sample.share,
        told=lambda done, of: parts.tell(f"whatif: {done} of {of} trials"),
    )
    rows, pick = found.rows, found.pick
    summary, warnings = _said(sample, found, options)
    summary |= {"levels": levels}
    summary["in_force"] = "of the records" if present else "not in the records; the defaults are taken"
    if levels:
        warnings.insert(0, f"whatif: {level_words(levels)}")
    if any(choice.renditions for choice in choices):
        warnings.append(f"whatif: {SET_WORDS}")
    chosen = rows[pick.row["choice_id"]]
    chosen["recommended"] = True
    if not (pick.known or chosen["in_force"]):
        summary["widen"] = settings_text(choices[chosen["choice_id"]])
        pick = pick._replace(why=f"{pick.why}: {summary['widen']}")
    if pick.known or not chosen["in_force"]:
        pick = pick._replace(why=f"{pick.why}{promised(chosen)}{_rests_on(summary)}")
    who = f"{len(sample.viewers)} recorded viewers"
    who += f", a random sample of {sample.share:.2%} of them" if sample.share < 1 else ""
    text = limits_text(choices[chosen["choice_id"]], pick, rows[0], options.objective, who, levels)
    parts.write_text("limits.toml", text)
    summary |= {"recommended": chosen["choice"], "why": pick.why, "bounds_kept": pick.kept, "known": pick.known}
    import pandas as pd

    parts.write("whatif_choices", pd.DataFrame(rows, columns=list(CHOICE_COLUMNS)), CHOICE_COLUMNS)
    return JobAnswer(summary=summary, warnings=warnings)


def _nothing(parts: Parts, sample: Sample, options: WhatifOptions) -> JobAnswer:
    """Return what counts tell where no viewer was recorded message by message."""
    ended = sum(sample.ended.values())
    slow = {reason: count for reason, count in sorted(sample.ended.items()) if reason in SLOW_ENDS}
    summary: dict[str, Any] = {"viewers": ended, "viewers_cut": sum(slow.values()), "objective": options.objective}
    if ended:
        by = ", ".join(f"{count} by {reason}" for reason, count in slow.items())
        why = f"of {ended} viewers {sum(slow.values())} were cut for being slow{f' ({by})' if by else ''}; "
        summary["why"] = f"{why}what other limits would have done is {RECORD}"
    else:
        summary["why"] = "there is no viewer to try other limits on"
    if earlier := parts.place.read_text("limits.toml"):
        parts.write_text("limits.toml", earlier)
        summary["why"] += "; limits.toml is that of an earlier run"
    return JobAnswer(summary=summary, warnings=[f"whatif: {summary['why']}"])


def settings_text(choice: Choice) -> str:
    """Return the options of ``flowctl serve live`` that set a choice."""
    soft, hard = (marks_text(choice.limits, level).replace(" ", "") for level in (1, 2))
    words = [f"--soft {soft}", f"--hard {hard}", f"--target-delay {target_marks(choice.limits)}"]
    words.append(f"--stuck {choice.stuck_s:g}s")
    return " ".join(words)


def promised(row: Mapping[str, Any]) -> str:
    """Return what is promised of a choice: ranges in which its figures are nine times of ten."""
    low, high = (round(row[f"disconnected_{end}"]) for end in ENDS)
    cut = f"{low}" if low == high else f"{low} to {high}"
    dropped, delay = (
        " to ".join(dict.fromkeys(show(row[f"{name}_{end}"]) for end in ENDS))
        for name, show in (("dropped_share", "{:.1%}".format), ("delay_p95_ms", "{:.0f}".format))
    )
    return (
        f"; the same viewers again: {cut} of {row['viewers']} cut, {dropped} of the messages left out, p95 of the "
        f"delay {delay} ms"
    )


def _rests_on(summary: Mapping[str, Any]) -> str:
    """Return what a promise must say with it: on how few it rests, and what of it was not seen."""
    said, troubled, cut = "", summary["viewers_troubled"], summary["viewers_cut"]
    if troubled < FEW_REFUSED:
        said += f"; this rests on {troubled} viewer{'s' * (troubled != 1)} in trouble"
    if cut:
        said += (
            f"; {cut} of {summary['viewers']} viewers were cut while recorded, and what they would have had then is "
            "drawn from stalls that ended"
        )
    return said


def _said(sample: Sample, found: Advice, options: WhatifOptions) -> tuple[dict[str, Any], list[str]]:
    told = sample.heads[sample.heads["reason"].notna()].sort_values(["node", "conn_id"])
    damaged = told[~told["reason"].isin(NO_VIEWER)]
    viewers = found.rows[0]["viewers"]
    summary: dict[str, Any] = {
        "viewers": viewers,
        "viewers_troubled": found.troubled,
        "viewers_tried": found.tried,
        "viewers_cut": sum(viewer.stratum == CUT for viewer in sample.viewers),
        "viewers_ended": sum(sample.ended.values()),
        "viewers_recorded": sample.recorded,
        "trials": found.made,
        "trials_wanted": found.wanted,
        "choices": len(found.rows),
        "objective": options.objective,
        "honest_share": HONEST_SHARE,
        "sampled_share": sample.share,
        "connections_not_viewers": len(told) - len(damaged),
        "connections_of_attackers": sample.attackers,
        "connections_not_evaluated": len(damaged) + found.damaged,
    }
    warnings = []
    if found.troubled < FEW_REFUSED:
        warnings.append(
            f"whatif: only {found.troubled} of {viewers} recorded viewers were ever in trouble, and what is advised "
            "rests on them, with ranges that are too narrow: record more (a larger --flights-at-once, or for longer)"
        )
    if sample.share < 1:
        warnings.append(
            f"whatif: {len(sample.viewers)} of about {sample.recorded} recorded viewers are a random sample (--most 0 "
            "takes all, for so much longer)"
        )
    if found.made < found.wanted:
        warnings.append(
            f"whatif: {found.made} of {found.wanted} trials were made in {options.budget_s:g} s, of {found.tried} of "
            f"{found.troubled} viewers in trouble; ranges say how far off that may be (--thorough makes all)"
        )
    if len(damaged) or found.damaged:
        first = f", the first: {damaged.iloc[0]['conn_id']}: {damaged.iloc[0]['reason']}" if len(damaged) else ""
        warnings.append(f"{len(damaged) + found.damaged} connections could not be evaluated{first}")
    return summary, warnings


def _in_force(sample: Sample) -> Choice | None:
    """Return the choice in force that the records tell: of the newest flight, start of a server or change of limits."""
    flights = sample.heads.dropna(subset=["settings"]).sort_values("at").drop_duplicates(["node", "conn_id"])
    told = [*flights[list(_TOLD)].itertuples(index=False, name=None), *sample.starts]
    told.sort(key=lambda row: row[0], reverse=True)
    return next((found for _, source, detail in told if (found := in_force(detail)) or source == SERVER), None)


def _viewer_levels(starts: Sequence[tuple[Any, str, str | None]]) -> str:
    return "; ".join(sorted({found for *_, detail in starts if (found := levels_of(detail))}))


def level_words(levels: str) -> str:
    """Return what must be known where servers had levels with a target delay or policy of their own."""
    return (
        f"levels had a target delay or policy of their own ({foreign(levels, 200)}); their viewers were judged "
        "with those of each choice, like all others, and keep their own under any limits file"
    )


def limits_text(
    choice: Choice, pick: Pick, present: Mapping[str, Any], objective: str, who: str, levels: str = ""
) -> str:
    """Return the limits file of the recommended choice, with the reason and what it costs as comments."""
    file = LimitsFile(
        limits=choice.limits,
        objective=objective,
        stuck_s=choice.stuck_s,
        soft_too_long_s=choice.soft_too_long_s,
        return_after_s=choice.return_after_s,
    )
    head = [
        f"Written by flowctl analyze whatif from {who}.",
        f"Objective: {objective}{BALANCED_WORDS if objective.strip() == 'balanced' else ''}",
        f"Why: {pick.why}.",
        *([f"Mind: {level_words(levels)}."] if levels else []),
        "Against the limits in force (in force -> recommended):",
        *(f"  {line}" for line in costs(pick.row, present)),
    ]
    return "".join(f"# {line}\n" for line in head) + render(file)


JOB: Final = AnalysisJob(
    name="whatif",
    tries=True,
    parts=(
        JobPart(
            name=STRETCHES,
            columns=STRETCH_COLUMNS,
            make=stretches,
            reads=("flight", "flow_closes", "flow_events"),
            depends=lambda options: f"{options.cut_s:g} {options.most}",
            version=3,
        ),
    ),
    uses=("evidence",),
    results=("whatif_choices", "limits.toml"),
    answer=answer,
    options=WhatifOptions,
)
