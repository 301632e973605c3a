"""What to do, and how sure that is: the opening of the report, as rules over facts (pure).

Each answer is an order, then what it would change or what was seen, then what it rests on. Facts are texts by name, and
a sentence that lacks one of its facts is left out (`flowctl.charts.words.sentences`): the first rule of a question
whose order can be said is the answer. Nothing stands out below `SURE_ENOUGH_TO_CALL` standard errors.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from flowctl.analyze.capacity.node import MEASURE
from flowctl.analyze.report.found import ReportFindings, Row, json_of
from flowctl.analyze.viewers.ingest import GAP_MAX_MS, GAP_SHARE, JITTER_MS, KEY_MAX_MS
from flowctl.charts.words import (
    FEW,
    count_of,
    figure,
    fill_template,
    number,
    percent,
    plural,
    sentences,
    share,
    span,
    standard_errors_between,
    value_text,
    words,
)

SURE_ENOUGH_TO_CALL: Final = 3.0
"""Standard errors from which a call is advised: chance makes one in 370, and a page has dozens of networks."""
LEAST_TROUBLED: Final = 5
"""Least viewers in trouble, of those that were looked at, for which a network or a thread is worth a call."""
LEAST_LATE_SHARE: Final = 0.01
"""Least share of the viewers of a node that its thread made slow, for which it is worth a look."""
WIDESPREAD: Final = 0.1
"""Share of plays in trouble above which something is to be done although nobody stands out."""
LEAST_BUSY: Final = 0.5
"""Least busy share of the busiest thread of a node, in its busiest ten seconds, for which another node is of use: one
that is late and less busy than that waits for something else."""
SPARE_NODE_SHARE: Final = 0.2
"""Share of each node that is kept free for the load of a node that dies, unless the job capacity says it."""
LEAST_DAYS: Final = 3
"""Least days of records for a trend of the daily peaks."""
SOON_S: Final = 15.0
"""Longest absence of an encoder that lost its connection; after a longer one somebody has begun anew."""
LEAST_BACK: Final = 3
"""Least returns within `SOON_S` for which a publisher is worth a call: one or two happen to every line."""
LEAST_MEASURED_S: Final = 10.0
"""Least time of publishing that is judged: in less, hardly a second key frame is due."""
MOST_NAMED: Final = 5
CHANGES: Final = {
    "p95 of the delay": "delay_p95_ms",
    "p99 of it": "delay_p99_ms",
    "dropped": "dropped_share",
    "memory of one viewer, at most": "memory_peak_bytes",
}
_SOURCES: Final = {"own records": "their own records", "records": "the records of all nodes"}
Facts = dict[str, Any]


class Advice(NamedTuple):
    """One answer."""

    about: str  # what is asked: limits, bans, capacity, calls, network, publisher, node
    kind: str  # "act", "fine" (nothing to do) or "unknown"
    do: str
    why: str = ""
    sure: str = ""


_LIMITS: Final = """
{viewers}.
They are a sample: {taken} of those recorded.
Tried were {tried_of} in trouble; ranges say how far off that may be.
{assumed_share} of what was tried is drawn, beyond what was recorded, from stalls that ended.
{ended} of them had been cut: what would have followed nobody has seen.
{few?}So few viewers show what limits do, not what they are worth.
Only {viewers_troubled} of those recorded were ever in trouble: all that limits do was seen of these.
{defaults?}Which limits were in force is not in the records: the defaults are taken for them.
Asked for: {objective}.
{bounds?}No choice keeps all bounds that were asked for.
Viewers with a target delay or policy of their own ({levels}) were judged with those of each choice, and keep \
their own.
"""
_BANS: Final = """
{recorded}
{known} made {fewest} or more.
Little evidence: {few} of them made fewer than 20.
Who else is behind an address and was not recorded is not known.
"""
_CAPACITY: Final = """
What {unknown} can carry is {measure}.
What a node carries comes from {sources}, for {known}.
Fitted to {measured_crowds} crowds of up to {largest_measured_viewers} viewers.
A load that was held out was missed by {error}.
Peaks are of ten seconds, of {recorded_s} in which a node had viewers.
"""
_LATE: Final = """
It came late for {part} of the viewers who were in trouble there.
No thread of it was busy for more than {busy} of the time.
"""
_OF_NODE: Final = """
{viewers} of that node.
{estimate?}Numbers of viewers are estimates from a sample.
Without samples a thread is never blamed.
"""
RULES: Final = (
    Advice("limits", "unknown", "{widen?}Not known: widen the limits for an hour, to {widen}, and look again.",
           "{why}.", _LIMITS),
    Advice("limits", "fine", "{best?}Keep the limits as they are: of {tried} none brings more than its error.",
           "{choice}.", _LIMITS),
    Advice("limits", "act",
           "{set?}Set the limits of limits.toml, which lies beside this page: that rests on {rests} in trouble.",
           "{choice}.\nThe same viewers would have had: {changes}.", _LIMITS),
    Advice("limits", "act", "{set?}Set the limits of limits.toml, which lies beside this page.",
           "{choice}.\nThe same viewers would have had: {changes}.", _LIMITS),
    Advice("limits", "unknown",
           "Leave the limits as they are: of {tried} that were tried none meets what was asked for.", "", _LIMITS),
    Advice("bans", "fine",
           "Keep nobody out: {spared} with enough evidence are allowed, being private, loopback or named by --allow.",
           "`flowctl analyze abuse --judge-private` judges private networks and loopback as any other.", "{recorded}"),
    Advice("bans", "fine", "Keep nobody out: of {many} with evidence against them none has enough.", "", "{recorded}"),
    Advice("bans", "act", "{order}: see bans.jsonl.", "{named}.", _BANS),
    Advice("capacity", "act",
           "Add a node, or move streams away from {full}: {left}.",
           "At its peak the fullest node, {fullest}, had {load} of what it carries.\n"
           "A thread of {hung} came late, and was busy: it counts as full, whatever it was taken to carry.\n"
           "{free} of each node are kept free.\n{next}", _CAPACITY),
    Advice("capacity", "unknown",
           "No node is known to be needed: {idle} seemed full, but no thread there was busy for more than {busy} of "
           "the time.",
           "{held?}Find what held up the threads there first: another node would be held up as well.\n"
           "At its peak the fullest node, {fullest}, had {load} of what a node was taken to carry.", _CAPACITY),
    Advice("capacity", "unknown",
           "Not known whether a node is needed: {idle} seemed full, and how busy its threads were was not recorded.",
           "At its peak the fullest node, {fullest}, had {load} of what a node was taken to carry.", _CAPACITY),
    Advice("capacity", "fine", "No node is needed now: there is room for {room}.",
           "At its peak the fullest node, {fullest}, had {load} of what it carries.\n"
           "{free} of each node are kept free.\n{next}", _CAPACITY),
    Advice("network", "act", "Call the operator of the network {name}.",
           "{part} of its viewers had trouble by their own link; of all others {others}.",
           "{viewers}, {errors} standard errors from the others; 3 are asked for.\n"
           "Only {few} viewers: the share may well be another one.\n"
           "{one?}All of the trouble is at one address: it may be the line of one house."),
    Advice("publisher", "act", "Call the publisher of {name}.",
           "{wrong}.\n{hashed?}Its name is known as a hash alone: it comes from {address} to the node {node}.",
           "Measured where it comes in, over {measured} of one connection."),
    Advice("node", "act", "{full?}Give the node {name} more processor, or fewer viewers.", _LATE, _OF_NODE),
    Advice("node", "act", "Find what held up the threads of the node {name}.",
           _LATE + "{waited?}Something else had its processor, or held it back: another program, a limit of the "
           "container, a call that blocks (a hook, a disk).", _OF_NODE),
    Advice("calls", "act",
           "{viewer_link?}Serve smaller renditions, or a lower bit rate: {widespread} had trouble, most by their own "
           "lines, and in no network more than elsewhere.",
           "{causes}.\nWith renditions each line is sent what it carries.", "{recorded}"),
    Advice("calls", "act",
           "{publisher_burst?}Have encoders send evenly: {widespread} had trouble, most by bursts of publishers, and "
           "no publisher stands out.", "{causes}.\nA constant bit rate and smaller key frames help.", "{recorded}"),
    Advice("calls", "act",
           "{server_loop?}Look at the threads of all nodes: {widespread} had trouble, most because a thread came late, "
           "and no node stands out.", "{causes}.", "{recorded}"),
    Advice("calls", "act",
           "{policy?}Look at the limits: {widespread} had trouble, most by limits and policy, and no line or thread "
           "was short.", "{causes}.", "{recorded}"),
    Advice("calls", "unknown", "Not known whom to call: {widespread} had trouble, and its cause is not known.", "",
           "{recorded}"),
    Advice("calls", "fine", "{enough?}Call nobody: no network, publisher or node stands out.",
           "{troubled} had trouble.\n{causes}.", "{recorded}"),
    Advice("calls", "unknown", "Not known whom to call: of {viewers} no network or node can stand out.",
           "{published?}No publisher stands out.\n{troubled} had trouble.\n{causes}.", "{recorded}"),
    Advice("calls", "fine", "{published?}Call nobody: no publisher stands out.", "",
           "Recorded: {published}, and no viewer."),
    *(Advice(about, "unknown", "{why_not}", "", _CAPACITY if about == "capacity" else "")
      for about in ("limits", "bans", "capacity", "calls")),
)  # fmt: skip
"""Answers to the questions, texts of `flowctl.charts.words.sentences`; the first whose order has its facts counts."""


def answers(findings: ReportFindings) -> list[Advice]:
    hung = threads(findings)
    late = {row["name"] for row in hung}
    said = [_said(about, facts(findings)) for about, facts in (("limits", limits), ("bans", bans))]
    said.append(_said("capacity", capacity(findings, late)))
    calls = list[Advice]()
    for about, items in (("network", networks(findings)), ("publisher", publishers(findings)), ("node", hung)):
        calls += [_said(about, facts) for facts in items[:MOST_NAMED]]
        if more := items[MOST_NAMED:]:
            calls.append(Advice(about, "act", f"And {plural(len(more), f'more {about}')}: see the tables."))
    missing = findings.why_not("experience" if findings.totals else "sessions")
    published = plural(findings.tables["ingest"].total, "publication") if findings.rows("ingest") else ""
    return said + (calls or [_said("calls", {**everywhere(findings), "published": published, "why_not": missing})])


def _said(about: str, facts: Facts) -> Advice:
    """Return the first rule about the question whose order has its facts."""
    rules = [rule for rule in RULES if rule.about == about and sentences(facts, rule.do)]
    return Advice(about, rules[0].kind, *(sentences(facts, text) for text in rules[0][2:]))


def _drawn(findings: ReportFindings) -> float:
    """Return the share of the sessions that were looked at one by one."""
    return number((findings.totals or {}).get("drawn_share")) or 1.0


def recorded(findings: ReportFindings) -> str:
    """Return how much was recorded, as one sentence; "" if that is unknown."""
    totals = findings.totals or {}
    viewers, drawn = number(totals.get("viewers")), _drawn(findings)
    facts = {
        "viewers": viewers is not None and plural(viewers, "viewer"),
        "span": span(totals.get("span_s")),
        "few": 0 < (viewers or 0) < FEW,
        "drawn": viewers is not None and drawn < 1 and percent(drawn),
        "listed": totals.get("listed") and plural(totals["listed"], "connection"),
    }
    return sentences(facts, _RECORDED)


_RECORDED: Final = """
Recorded: {viewers} in {span}.
{few?}That is few: read it as what happened to these, not as what will happen to others.
Curves and errors are of a random sample, {drawn}.
{listed} came from addresses to be kept out or limited: figures over viewers have these too, but whom to call and the \
worst off leave them out.
"""


def limits(findings: ReportFindings) -> Facts:
    rows, said = findings.rows("whatif_choices"), findings.summary("whatif")
    if not rows:
        why = said.get("why")
        return {"why_not": f"Not known: {words(why, 400)}." if why else findings.why_not("whatif")}
    chosen = next((row for row in rows if row.get("recommended")), None)
    present = next((row for row in rows if row.get("in_force")), None)
    row = chosen or rows[0]
    viewers, troubled = count_of(row.get("viewers")), number(said.get("viewers_troubled", FEW)) or 0.0
    tried, taken = count_of(said.get("viewers_tried")), number(row.get("sampled_share"))
    best, known = chosen is not None and bool(chosen.get("in_force")), said.get("known") is not False
    if best and not known and not said.get("widen"):
        return {"why_not": f"N{words(said.get('why'), 400)[1:]}."}
    facts: Facts = {
        "tried": plural(findings.tables["whatif_choices"].total, "choice"),
        "widen": not known and words(said.get("widen"), 300),
        "why": words(said.get("why"), 600),
        "best": best and known,
        "set": chosen is not None and not best,
        "choice": choice_text(row),
        "viewers": f"{plural(viewers, 'viewer')}, recorded message by message",
        "taken": taken is not None and taken < 1 and percent(taken),
        "tried_of": 0 < tried < troubled and f"{tried} of {plural(round(troubled), 'viewer')}",
        "assumed_share": row.get("assumed_share"),
        "ended": count_of(said.get("viewers_cut")) and plural(said["viewers_cut"], "viewer"),
        "rests": "viewers_troubled" in said and troubled < FEW and plural(troubled, "viewer"),
        "few": viewers < FEW,
        "viewers_troubled": viewers >= FEW and troubled < FEW and f"{troubled:.0f}",
        "defaults": str(said.get("in_force")).startswith("not in the records"),
        "objective": said.get("objective") and words(said["objective"], 200),
        "bounds": said.get("bounds_kept") is False,
        "levels": said.get("levels") and words(said["levels"], 200),
    }
    if present is not None:
        pairs = {"disconnected": [_cut(one) for one in (present, row)]}
        pairs |= {name: [_ranged(one, key) for one in (present, row)] for name, key in CHANGES.items()}
        facts["changes"] = "; ".join(f"{name} {' → '.join(pair)}" for name, pair in pairs.items() if "-" not in pair)
    return facts


def _cut(row: Row) -> str:
    low, high = (number(row.get(f"disconnected_{end}")) for end in ("low", "high"))
    if low is None or high is None or round(low) == round(high):
        return share(row.get("disconnected"), row.get("viewers"))
    return f"{low:.0f} to {high:.0f} of {count_of(row.get('viewers'))}"


def _ranged(row: Row, name: str) -> str:
    """Return a figure of a choice as the range in which it is nine times of ten, where there is one."""
    ends = [value_text(name, row.get(f"{name}_{end}")) for end in ("low", "high")]
    return value_text(name, row.get(name)) if "-" in ends else " to ".join(dict.fromkeys(ends))


def choice_text(row: Row) -> str:
    return words(row.get("choice") or row.get("choice_id"), 160)


def bans(findings: ReportFindings) -> Facts:
    scores, rows = findings.tables.get("abuse_scores"), findings.rows("bans")
    if scores is None and "bans" not in findings.tables:
        return {"why_not": findings.why_not("abuse")}
    facts: Facts = {"recorded": recorded(findings)}
    if not rows:
        spared = count_of((findings.summary("abuse").get("verdicts") or {}).get("address_allowed"))
        facts["spared"] = spared and plural(spared, "address", "addresses")
        return facts | {"many": plural(scores.total if scores else 0, "address or subnet", "addresses and subnets")}
    kinds, addresses = Counter(map(_kind, rows)), ("address or subnet", "addresses and subnets")
    banned = kinds.pop("banned", 0)
    orders = [f"keep out {plural(banned, *addresses)}"] if banned else []
    why = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(kinds.items()))
    orders += [f"limit new connections of {plural(sum(kinds.values()), *addresses)} ({why})"] if kinds else []
    order = " and ".join(orders)
    named = [f"{words(row.get('cidr'))}: {evidence_text(row.get('evidence'))}" for row in rows[:MOST_NAMED]]
    named += [f"and {len(rows) - MOST_NAMED:,} more"] if len(rows) > MOST_NAMED else []
    on_list = {row.get("cidr") for row in rows}
    made = [count_of(row.get("connections")) for row in findings.rows("abuse_scores") if row.get("cidr") in on_list]
    few = sum(count < FEW for count in made)
    return facts | {
        "order": order[:1].upper() + order[1:],
        "named": "; ".join(named),
        "known": "Each of them" if len(made) == len(rows) else "Each of those whose connections are known",
        "fewest": made and plural(min(made), "connection"),
        "few": few and str(few),
    }


def _kind(ban: Row) -> str:
    if ban.get("action") != "limit":
        return "banned"
    if ban.get("expires", "") is None or not (ban.get("score") or ban.get("evidence")):  # as `Ban.by_hand`
        return "set by hand"
    return "others behave there" if str(ban.get("reason")).startswith("shared") else "mild evidence only"


def evidence_text(value: Any) -> str:
    """Return evidence, a map or its JSON text, as one line: what and how often, the most frequent first."""
    items = (value if isinstance(value, Mapping) else json_of(str(value))).items()
    order = sorted(items, key=lambda item: (-(number(item[1]) or 0.0), str(item[0])))
    return ", ".join(f"{words(name)} {figure(amount)}" for name, amount in order[:8]) or "-"


def everywhere(findings: ReportFindings) -> Facts:
    """Return how many had trouble, and why, where nobody stands out."""
    totals = findings.totals or {}
    plays, troubled, viewers = (count_of(totals.get(name)) for name in ("plays", "troubled", "people"))
    counts = Counter({str(row.get("blame")): count_of(row.get("count")) for row in findings.rows("blames")})
    told = share(troubled, plays) + (" of plays" if plays >= FEW else " plays")
    widespread = troubled >= LEAST_TROUBLED and troubled > WIDESPREAD * plays
    parts = [
        f"{CAUSES.get(name, name)} {share(count, counts.total(), brief=True)}" for name, count in counts.most_common()
    ]
    facts: Facts = dict.fromkeys(CAUSES, False) | {
        "recorded": recorded(findings),
        "viewers": viewers and plural(viewers, "viewer"),
        "enough": viewers >= FEW,
        "troubled": troubled and told,
        "widespread": widespread and told,
        "causes": parts and f"By cause: {', '.join(parts)}",
    }
    return facts | {name: widespread for name, count in counts.most_common(1) if count}


CAUSES: Final = {
    "viewer_link": "the line of the viewer",
    "publisher_burst": "a burst of the publisher",
    "server_loop": "a thread that came late",
    "policy": "limits and policy",
}
"""Causes of trouble in sentences."""


def busiest(findings: ReportFindings) -> dict[str, float | None]:
    """Return by node how busy its busiest thread was in its busiest ten seconds; None: not recorded."""
    return {words(row.get("node"), 48): number(row.get("busy_peak")) for row in findings.rows("capacity_nodes")}


def capacity(findings: ReportFindings, hung: set[str]) -> Facts:
    """Return how many more viewers there is room for, and when the next node is needed; `hung` nodes have none.

    A node is full where its thread is busy, or its memory taken; one that is late and idle needs no node beside it.
    """
    said = findings.summary("capacity")
    everyone = {words(row.get("node"), 48): row for row in findings.rows("capacity_nodes")}
    rows = {name: row for name, row in everyone.items() if count_of(row.get("carries_viewers"))}
    sources = Counter(str(row.get("carries_from")) for row in rows.values())
    unknown, error = len(everyone) - len(rows), number(said.get("error_share"))
    kept = number(said.get("headroom_share"))
    free = SPARE_NODE_SHARE if kept is None else kept
    facts: Facts = {
        **said,
        "why_not": (said.get("answer") and words(said["answer"], 1500)) or findings.why_not("capacity"),
        "unknown": rows and unknown and plural(unknown, "node"),
        "measure": MEASURE,
        "known": rows and sources and plural(sources.total(), "node"),
        "sources": " and ".join(_SOURCES.get(name, words(name, 24)) for name in sorted(sources)),
        "error": error is not None and percent(abs(error)),
        "recorded_s": rows and span(max(number(row.get("recorded_s")) or 0.0 for row in rows.values())),
        "free": percent(free),
    }
    if not rows:
        facts |= dict.fromkeys(("measured_crowds", "error"))
    load = {name: number(row.get("load_peak")) or 0.0 for name, row in rows.items()}
    seem = [name for name in everyone if name in hung or load.get(name, 0.0) >= 1 - free]
    busy, memory = busiest(findings), said.get("ended_by") == "memory"
    full = [name for name in seem if (memory and name not in hung) or (busy[name] or 0.0) >= LEAST_BUSY]
    idle = [name for name in seem if name not in full]
    if not rows and not seem:
        return facts
    rest = {name: row for name, row in rows.items() if name not in seem}
    rooms = {
        name: int((1 - free) * count_of(row["carries_viewers"]) - (number(row.get("viewers_peak")) or 0.0))
        for name, row in rest.items()
    }
    least = {name: "at least " if row.get("carries_at_least") else "" for name, row in rest.items()}
    named = [f"{least[name]}{rooms[name]:,} on {name}" for name in sorted(rooms, key=rooms.__getitem__)]
    named = [*named[:MOST_NAMED], *([f"more on {len(named) - MOST_NAMED:,} others"] if named[MOST_NAMED:] else [])]
    room = " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]])).replace(" on ", " more viewers on ", 1)
    fullest = max(load, key=load.__getitem__, default="")
    beside = f"what others carry is {MEASURE}" if unknown and len(seem) < len(everyone) else "no node has room"
    shares = [amount for name in idle if (amount := busy[name]) is not None]
    return facts | {
        "left": f"there is room for {room}" if room else beside,
        "full": _named(full),
        "idle": _named(idle),
        "busy": len(shares) == len(idle) and shares and percent(max(shares)),
        "held": hung.intersection(idle),
        "hung": _named(sorted(hung.intersection(full))),
        "room": room,
        "fullest": fullest,
        "load": fullest and percent(load[fullest]),
        "next": rows and _next_node(findings.peaks, float(sum(rooms.values()))),
    }


def _named(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - MOST_NAMED:,} more" if nodes[MOST_NAMED:] else ""
    return ", ".join(nodes[:MOST_NAMED]) + more


def _next_node(peaks: Mapping[int, float], free: float) -> str:
    """Return when the next node is needed, by the trend of the daily peaks (least squares)."""
    if len(peaks) < LEAST_DAYS:
        unknown = "When the next one is needed is not known: that takes the peaks of"
        return f"{unknown} {LEAST_DAYS} whole days, and more is better."
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


def networks(findings: ReportFindings) -> list[Facts]:
    """Return the networks whose viewers have trouble by their link more often than all others, the clearest first."""
    links = {row["key"]: row for row in findings.rows("links")}
    troubled, viewers = sum(row["troubled"] for row in links.values()), count_of((findings.totals or {}).get("people"))
    drawn, clear = _drawn(findings), []
    for row in (links[row["key"]] for row in findings.rows("network") if row.get("key") in links):
        part = row["troubled"]
        of, others = max(row["viewers"], part), troubled - part
        seen = [count * drawn for count in (part, of, others, viewers - of)]  # what was not looked at makes no surer
        errors = standard_errors_between(*seen) if viewers > of else 0.0
        if seen[0] >= LEAST_TROUBLED and errors >= SURE_ENOUGH_TO_CALL:
            facts = {"name": words(row["key"]), "part": share(part, of), "others": share(others, viewers - of)}
            facts |= {"viewers": plural(of, "viewer"), "errors": f"{errors:.1f}", "few": of < FEW and str(of)}
            clear.append((errors, facts | {"one": row["addresses"] == 1}))
    return [facts for _, facts in sorted(clear, key=lambda item: -item[0])]


def publishers(findings: ReportFindings) -> list[Facts]:
    """Return the streams that come to us badly, the worst first, each with the worst of its publications."""
    streams: dict[str, list[Row]] = {}
    for row in findings.rows("ingest"):
        name = words("/".join(str(row[part]) for part in ("app", "stream") if row.get(part)))
        streams.setdefault(name, []).append({**row, "silent": int(row.get("health") == "no media")})
    told = []
    for name, rows in streams.items():
        long = [row for row in rows if (number(row.get("duration_s")) or 0.0) >= LEAST_MEASURED_S]
        aways_s = [number(row.get("away_s")) or 0.0 for row in rows]  # 0: its clock was set back
        back = {**rows[0], "back": sum(0 < away_s < SOON_S for away_s in aways_s)}
        worst = [
            (place, text, _most([*long, back] if of == "back" else long or [{}], of), of, mark)
            for place, (of, mark, text) in enumerate(_WRONG)
        ]
        bad = [(place, text, row) for place, text, row, of, mark in worst if (number(row.get(of)) or 0.0) > mark]
        if bad:
            line = "; ".join(fill_template(text, row) for _, text, row in bad)
            row = bad[0][2]
            facts: Facts = {"name": name, "wrong": line[0].upper() + line[1:], "measured": span(row.get("duration_s"))}
            facts |= {"hashed": str(row.get("stream")).startswith("h:"), "address": words(row.get("peer_ip"))}
            facts |= {"node": words(row.get("node"), 48)}
            told.append((bad[0][0], facts))
    return [facts for _, facts in sorted(told, key=lambda item: item[0])]


def _most(rows: Sequence[Row], column: str) -> Row:
    return max(rows, key=lambda row: number(row.get(column)) or 0.0)


_WRONG: Final = (
    ("silent", 0, "no media"),
    ("gap_share", GAP_SHARE, "no media for {gap_ms} in all"),
    ("gap_max_ms", GAP_MAX_MS, "no media for up to {gap_max_ms}"),
    ("back", LEAST_BACK - 1, "came back {back} times within seconds"),
    ("key_interval_max_ms", KEY_MAX_MS, "key frames up to {key_interval_max_ms} apart"),
    ("jitter_ms", JITTER_MS, "jitter {jitter_ms}"),
)
"""Columns of ``ingest``, the value above which each is worth a call, and its words; the worst first."""


def threads(findings: ReportFindings) -> list[Facts]:
    """Return the nodes whose own thread was what made viewers slow."""
    nodes: dict[str, Counter[str]] = {}
    for row in findings.rows("nodes"):
        nodes.setdefault(str(row.get("node")), Counter())[str(row.get("blame"))] += count_of(row.get("count"))
    told, busy, drawn = [], busiest(findings), _drawn(findings)
    for node, blames in sorted(nodes.items(), key=lambda item: -item[1]["server_loop"]):
        part, troubled = blames["server_loop"], blames.total() - blames["none"]
        enough = part * drawn >= LEAST_TROUBLED and part >= LEAST_LATE_SHARE * blames.total()
        if enough and part * 2 >= troubled:
            name = words(node, 48)
            most = busy.get(name)
            facts: Facts = {"name": name, "part": share(part, troubled), "viewers": plural(blames.total(), "viewer")}
            facts |= {"full": most is not None and most >= LEAST_BUSY, "busy": most is not None and percent(most)}
            told.append(facts | {"waited": most is not None, "estimate": drawn < 1})
    return told
