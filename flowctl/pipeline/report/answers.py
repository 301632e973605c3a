"""What to do, and how sure that is: the opening of the report, as functions of small tables (pure).

Each answer is an order first, then what it would change or what was seen, then what it rests on: how many viewers, how
much was recorded, how much assumed. Where there is nothing to do, or nothing is known, it says that. Viewers are taken
as independent, which those of one stream at one moment are not: nothing stands out below `SURE` standard errors.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flowctl.charts.words import (
    FEW,
    apart,
    figure,
    filled,
    joined,
    ms,
    number,
    percent,
    plural,
    share,
    span,
    told,
    whole,
    words,
)
from flowctl.pipeline.report.found import Found, Row, json_of

SURE: Final = 3.0
"""Standard errors: chance does that once in 370 times, and a page has some dozen networks and nodes."""
LEAST_TROUBLED: Final = 5
"""Viewers in trouble from which a network or a thread is worth a call."""
SIGN_TEST: Final = 6
"""Viewers for whom limits make a difference, all to one side: chance alone does that once in 32 times."""
FULL: Final = 0.8
"""Of what a node carries: the rest is kept free for the death of another one."""
LEAST_DAYS: Final = 3
"""Of records for a trend of the daily peaks."""
MOST_NAMED: Final = 5
CHANGES: Final = {
    "p95 of the delay": "delay_p95_ms",
    "p99 of it": "delay_p99_ms",
    "dropped": "dropped_share",
    "memory of one viewer, at most": "memory_peak_bytes",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """One answer.

    Args:
        about: what is asked: limits, bans, capacity, calls, network, publisher, node.
        kind: "act", "fine" (nothing to do) or "unknown".
        do: what to do, one sentence.
        why: what it would change, or what was seen.
        sure: what that rests on.
    """

    about: str
    kind: str
    do: str
    why: str = ""
    sure: str = ""


def answers(found: Found) -> list[Advice]:
    """Return all answers, in the order of the page."""
    return [limits(found), bans(found), capacity(found), *calls(found)]


def recorded(found: Found) -> str:
    """Return how much was recorded, as one sentence; "" if that is unknown."""
    totals = found.totals or {}
    viewers = number(totals.get("viewers"))
    if viewers is None:
        return ""
    few = "That is few: read it as what happened to these, not as what will happen to others."
    drawn = number(totals.get("drawn_share")) or 1.0
    return joined(
        f"Recorded: {plural(viewers, 'viewer')} in {span(totals.get('span_s'))}.",
        few if 0 < viewers < FEW else "",
        f"Curves and errors are of a random sample, {percent(drawn)}." if drawn < 1 else "",
    )


def limits(found: Found) -> Advice:
    """Return which limits to set, and what they would have changed."""
    rows = found.rows("whatif_choices")
    if not rows:
        return Advice("limits", "unknown", found.why_not("whatif"))
    chosen = next((row for row in rows if row.get("recommended")), None)
    present = next((row for row in rows if row.get("in_force")), None)
    tried = plural(found.tables["whatif_choices"].total, "choice")
    sure = _sure_of_limits(found, chosen or rows[0], present)
    if chosen is None:
        none = f"Leave the limits as they are: of {tried} that were tried none meets what was asked for."
        return Advice("limits", "unknown", none, "", sure)
    what = f"{choice_text(chosen)}."
    if chosen.get("in_force"):
        return Advice(
            "limits", "fine", f"Leave the limits as they are: of {tried} the one in force is the best.", what, sure
        )
    if present is not None:
        cut = [share(row.get("disconnected"), row.get("viewers")) for row in (present, chosen)]
        both = {name: [told(column, row.get(column)) for row in (present, chosen)] for name, column in CHANGES.items()}
        pairs = {"disconnected": cut, **{name: pair for name, pair in both.items() if "-" not in pair}}
        listed = "; ".join(f"{name} {' → '.join(pair)}" for name, pair in pairs.items())
        what = f"{what} The same viewers would have had: {listed}."
    return Advice("limits", "act", "Set the limits of limits.toml, which lies beside this page.", what, sure)


def choice_text(row: Row) -> str:
    """Return a choice as one writes it down: limits, policy, target delay."""
    return words(row.get("choice") or row.get("choice_id"), 160)


def _sure_of_limits(found: Found, row: Row, present: Row | None) -> str:
    said, viewers = found.summary("whatif"), whole(row.get("viewers"))
    how = {"flight": ", recorded message by message", "samples": ", recorded second by second"}
    taken, assumed = number(row.get("sampled_share")), number(row.get("assumed_share"))
    moved = abs(whole(row.get("disconnected")) - whole((present or row).get("disconnected")))
    few = "So few viewers show what limits do, not what they are worth."
    chance = f"Only {plural(moved, 'viewer')} would have stayed or gone: for others it may be none."
    return joined(
        f"{plural(viewers, 'viewer')}{how.get(str(said.get('source')), '')}.",
        f"They are a sample: {percent(taken)} of those recorded." if taken is not None and taken < 1 else "",
        f"{percent(assumed)} of what was tried is assumed, beyond what was recorded." if assumed else "",
        few if viewers < FEW else chance if moved and moved < SIGN_TEST else "",
        f"Asked for: {words(said['objective'], 200)}." if said.get("objective") else "",
        "No choice keeps all bounds that were asked for." if said.get("bounds_kept") is False else "",
        f"Viewers with a target delay or policy of their own ({words(said['audiences'], 200)}) were judged with those "
        "of each choice, and keep their own." if said.get("audiences") else "",
    )  # fmt: skip


def bans(found: Found) -> Advice:
    """Return whom to keep out, and for what."""
    scores, listed = found.tables.get("abuse_scores"), found.tables.get("bans")
    if scores is None and listed is None:
        return Advice("bans", "unknown", found.why_not("abuse"))
    total = 0 if listed is None else listed.total
    if not total:
        many = plural(scores.total if scores else 0, "address or subnet", "addresses and subnets")
        none = f"Keep nobody out: of {many} with evidence against them none has enough."
        return Advice("bans", "fine", none, "", recorded(found))
    rows = found.rows("bans")
    kinds = [f"{figure(row.get('count'))} {row.get('kind')}" for row in found.rows("ban_kinds")]
    parts = f" ({', '.join(kinds)})" if kinds else ""
    named = [f"{words(row.get('cidr'))}: {evidence_text(row.get('evidence'))}" for row in rows[:MOST_NAMED]]
    more = [f"and {total - MOST_NAMED:,} more"] if total > MOST_NAMED else []
    tried = [whole(row.get("connections")) for row in found.rows("abuse_scores") if row.get("banned")]
    few = sum(made < FEW for made in tried)
    each = "Each of them" if total == len(rows) else f"Each of the first {len(tried)}"
    sure = joined(
        recorded(found),
        f"{each} made {plural(min(tried), 'connection')} or more." if tried else "",
        f"Little evidence: {few} of them made fewer than {FEW}." if few else "",
        "Who else is behind an address and was not recorded is not known.",
    )
    whom = plural(total, "address or subnet", "addresses and subnets")
    return Advice("bans", "act", f"Keep out {whom}{parts}: see bans.jsonl.", f"{'; '.join([*named, *more])}.", sure)


def evidence_text(value: Any) -> str:
    """Return evidence, a map or its JSON text, as one line: what and how often, the most frequent first."""
    items = (value if isinstance(value, Mapping) else json_of(str(value))).items()
    order = sorted(items, key=lambda item: (-(number(item[1]) or 0.0), str(item[0])))
    return ", ".join(f"{words(name)} {figure(amount)}" for name, amount in order[:8]) or "-"


def capacity(found: Found) -> Advice:
    """Return how many more viewers there is room for, and when the next node is needed."""
    said = found.summary("capacity")
    rows = [row for row in found.rows("capacity_nodes") if number(row.get("carries_viewers"))]
    sure = _sure_of_capacity(said, rows)
    if not rows:
        return Advice("capacity", "unknown", words(said.get("answer") or found.why_not("capacity"), 1500), "", sure)
    load = {words(row.get("node"), 48): number(row.get("load_peak")) or 0.0 for row in rows}
    peaks = ((whole(row["carries_viewers"]), number(row.get("viewers_peak")) or 0.0) for row in rows)
    free = sum(max(0.0, FULL * carries - peak) for carries, peak in peaks)
    least = "at least " if any(row.get("carries_at_least") for row in rows) else ""
    room = f"there is room for {least}{plural(int(free), 'more viewer')} on {plural(len(rows), 'node')}"
    fullest = max(load, key=load.__getitem__)
    why = joined(
        f"At its peak the fullest node, {fullest}, had {percent(load[fullest])} of what it carries.",
        f"{percent(1 - FULL)} of each node are kept free.",
        _next_node(found.peaks, free),
    )
    full = [name for name, part in load.items() if part >= FULL][:MOST_NAMED]
    do = f"Add a node, or move streams away from {', '.join(full)}" if full else "No node is needed now"
    return Advice("capacity", "act" if full else "fine", f"{do}: {room}.", why, sure)


def _next_node(peaks: Mapping[int, float], free: float) -> str:
    """Return when the next node is needed, by the trend of the daily peaks (least squares)."""
    if len(peaks) < LEAST_DAYS:
        unknown = "When the next one is needed is not known: that takes the peaks of"
        return f"{unknown} {LEAST_DAYS} days, and more is better."
    days = list(peaks)
    slope, begin = statistics.linear_regression(days, list(peaks.values()))
    rest = sum((peak - begin - slope * day) ** 2 for day, peak in peaks.items())
    error = (rest / (len(days) - 2) / (statistics.pvariance(days) * len(days))) ** 0.5
    if slope <= max(2 * error, 1e-9):
        return f"The peaks of {plural(len(days), 'day')} show no growth that is more than chance."
    return (
        f"Daily peaks grow by {figure(slope)} viewers a day: the next one is needed in {figure(free / slope)} days, "
        f"in {figure(free / (slope + 2 * error))} at the earliest ({plural(len(days), 'day')} recorded)."
    )


def _sure_of_capacity(said: Row, rows: list[Row]) -> str:
    source = said.get("fitted_to") or next((row.get("carries_from") for row in rows), None)
    error, seen = number(said.get("error_share")), sum(whole(row.get("viewers_recorded")) for row in rows)
    assumed = "What a node carries is ASSUMED: that of a reference machine, not yours (flowctl load measures yours)."
    fitted = "Fitted to {measured_crowds} crowds of up to {largest_measured_viewers} viewers."
    return joined(
        assumed if source == "reference" else f"What a node carries comes from {words(source, 24)}." if source else "",
        filled(fitted, said) if said.get("measured_crowds") else "",
        f"A load that was held out was missed by {percent(abs(error))}." if error is not None else "",
        f"Peaks are of {plural(seen, 'recorded viewer')}." if seen else "",
    )


def calls(found: Found) -> list[Advice]:
    """Return who is to be called: a network, a publisher, or who looks after a node; or that nobody is."""
    if found.totals is None:
        return [Advice("calls", "unknown", found.why_not("sessions"))]
    told: list[Advice] = []
    for items in map(list, (_networks(found, found.totals), _publishers(found), _threads(found))):
        told += items[:MOST_NAMED]
        if more := items[MOST_NAMED:]:
            about = more[0].about
            told.append(Advice(about, "act", f"And {plural(len(more), f'more {about}')}: see the tables."))
    nobody = Advice("calls", "fine", "Call nobody: no network, publisher or node stands out.", "", recorded(found))
    unknown = Advice("calls", "unknown", found.why_not("experience"))
    return told or [nobody if recorded(found) else unknown]


def _networks(found: Found, totals: Row) -> Iterator[Advice]:
    """Yield the networks whose viewers are more often in trouble than all others, the clearest first."""
    troubled, viewers = whole(totals.get("troubled")), whole(totals.get("plays"))
    told = []
    for row in found.rows("network"):
        part, of = whole(row.get("troubled")), max(whole(row.get("plays")), whole(row.get("troubled")))
        if row.get("key") and part >= LEAST_TROUBLED and viewers > of:
            told.append((apart(part, of, max(troubled - part, 0), viewers - of), part, of, words(row.get("key"))))
    for errors, part, of, name in sorted(told, reverse=True):
        if errors >= SURE:
            others = share(troubled - part, viewers - of)
            why = f"{share(part, of)} of its viewers were in trouble; of all others {others}."
            few = f" Only {of} viewers: the share may well be another one." if of < FEW else ""
            sure = f"{plural(of, 'viewer')}, {errors:.1f} standard errors from the others; {SURE:g} are asked for.{few}"
            yield Advice("network", "act", f"Call the operator of the network {name}.", why, sure)


def _publishers(found: Found) -> Iterator[Advice]:
    """Yield the streams that come to us badly, the worst first, each with the worst of its publications."""
    worst: dict[str, Row] = {}
    for row in found.rows("ingest"):
        if row.get("health") not in (None, "steady"):
            worst.setdefault(words("/".join(str(row[part]) for part in ("app", "stream") if row.get(part))), row)
    for name, row in worst.items():
        gaps, back = whole(row.get("gap_count")), whole(row.get("reconnects"))
        seen = {
            "no media": "no media" if row.get("health") == "no media" else "",
            "gaps": f"no media for {ms(row.get('gap_ms'))} in {plural(gaps, 'gap')}" if gaps else "",
            "came back": f"came back {plural(back, 'time')}" if back else "",
            "key frames far apart": f"key frames up to {ms(row.get('key_interval_max_ms'))} apart",
            "jitter": f"jitter {ms(row.get('jitter_ms'))}",
        }
        order = sorted(seen, key=lambda name: name != row.get("health"))  # the worst first
        told = "; ".join(seen[name] for name in order if seen[name] and "-" not in seen[name].split())
        why = f"{told[:1].upper()}{told[1:]}."
        sure = f"Measured where it comes in, over {span(row.get('duration_s'))} of one connection."
        yield Advice("publisher", "act", f"Call the publisher of {name}.", why, sure)


def _threads(found: Found) -> Iterator[Advice]:
    """Yield the nodes whose own thread was what made viewers slow."""
    nodes: dict[str, Counter[str]] = {}
    for row in found.rows("nodes"):
        nodes.setdefault(str(row.get("node")), Counter())[str(row.get("blame"))] += whole(row.get("count"))
    for node, blames in sorted(nodes.items(), key=lambda item: -item[1]["server_loop"]):
        part, troubled = blames["server_loop"], blames.total() - blames["none"]
        if part >= LEAST_TROUBLED and part * 2 >= troubled:
            do = f"Look at the thread of node {words(node, 48)}: give it more processor, or fewer viewers."
            why = f"It had no room for {share(part, troubled)} of the viewers who were in trouble there."
            sure = f"{plural(blames.total(), 'viewer')} of that node. Without samples a thread is never blamed."
            yield Advice("node", "act", do, why, sure)
