"""What the answers rest on: tables and pictures of the page, said as data (pure).

A table is the names of columns of a result, which are the heads as well; the unit at the end of a name says how values
are written, and ``part/whole`` is a share. A column of which no row has anything is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

from flowctl.analyze.report.answers import choice_text, evidence_text
from flowctl.analyze.report.found import MEASURES, STATES, CutTable, ReportFindings, Row, json_of
from flowctl.charts.page import Figure
from flowctl.charts.pictures import MOST_BARS, Bar, Bars, Dot, Dots, Layer, Lines, Series, Stack
from flowctl.charts.words import (
    count_of,
    figure,
    fill_template,
    ms,
    number,
    percent,
    plural,
    share,
    size,
    value_text,
    words,
)

WORDS: Final = {
    "viewer_link": "the viewer's link",
    "server_loop": "the server's thread",
    "publisher_burst": "a burst of the publisher",
    "policy": "limits and policy",
    "ban": "banned",
    "subnet_ban": "banned with its subnet",
    "allowed": "on the allow list",
    "no_address": "no address to ban",
    "shared": "limited: others behave there",
    "limit": "limited: mild evidence only",
    "watch": "no: not enough yet",
    "ok": "no",
}
"""Words of blames and verdicts in the tables, for people."""
STATE_WORDS: Final = dict(zip(STATES, ("READY", "OVERLOADED", "SOFT_LIMIT", "HARD_LIMIT"), strict=True))
_PAINTS: Final = dict(zip(STATES, ("var(--calm)", "var(--s4)", "var(--s2)", "var(--s6)"), strict=True))
_LEAST_MS: Final = 0.1
"""Delays below are drawn there: a logarithmic axis has no 0."""
_SMALLEST_TOP: Final = 0.1
"""Upper end of the axis of shares where hardly anybody is in trouble: little looks little."""

_FELT: Final = " ".join(
    [
        "key viewers peak_viewers",
        *(f"{name}/{known.of}" if known.kind == "share" else name for name, known in MEASURES.items()),
        "play_hours",
    ]
)


class Shown(NamedTuple):
    """How a table stands on the page: its title, its columns, what one must know to read it, whether it is folded."""

    title: str
    columns: str
    note: str = ""
    folded: bool = False
    most: int = 20  # rows


TABLES: Final[Mapping[str, Shown]] = {
    "all": Shown(
        "All viewers",
        _FELT,
        "As in CTA-2066, but all of it seen from the server. First frame and delay end when the system takes what is "
        "sent, and a player adds its line and its buffer. A stall: a viewer took nothing for half a second while "
        "something waited; a player that plays from its buffer meanwhile shows none. The delay of each viewer is known "
        "in steps of 3 %: a percentile of it may be 1.6 % off, up or down, however many viewers there are. "
        "Viewers are those who were there for 2 s or more; peak viewers are all at once, for however long.",
    ),
    "stream": Shown("Streams", _FELT),
    "application": Shown("Applications", _FELT, folded=True),
    "network": Shown("Networks", _FELT),
    "node": Shown("Nodes", _FELT, folded=True),
    "agent": Shown("Players, by what they call themselves", _FELT, folded=True),
    "ingest": Shown(
        "Publishers: how streams came in",
        "stream health duration_s bit_rate frames_per_s key_interval_ms key_interval_max_ms gap_count gap_ms "
        "gap_max_ms jitter_ms reconnects node",
    ),
    "worst": Shown(
        "The viewers that were worst off",
        "peer_ip stream duration_s picture_share line_of_stream trouble_ms worst_state delay_p99_ms blame close_reason "
        "node conn_id agent",
    ),
    "sets": Shown(
        "Viewers of renditions, those first that were longest in a smaller one",
        "peer_ip stream duration_s saw why_smaller switches node conn_id agent",
        "The server chooses the largest rendition that a line carries. Why smaller: of the longest stay in one.",
        folded=True,
    ),
    "whatif_choices": Shown(
        "All choices of limits, as figures",
        "choice recommended in_force on_front disconnected/viewers delay_p50_ms delay_p95_ms delay_p99_ms "
        "memory_peak_bytes dropped_share assumed_share",
        "Assumed is the share of the time that was tried beyond what was recorded; delay and drops count it too.",
        folded=True,
        most=200,
    ),
    "abuse_scores": Shown(
        "Evidence against each",
        "cidr score verdict connections standing_hours evidence",
        "Evidence is halved with each half-life of its age; good behaviour counts for an address.",
    ),
    "capacity_nodes": Shown(
        "What each node carries",
        "node carries_viewers carries_from viewers_peak load_peak viewers_mean recorded_s bit_rate busy_peak",
    ),
    "accounts": Shown("Records", "table files_in rows_in rows_out rows_quarantined files_quarantined"),
    "aside": Shown("Set aside", "reason table of count"),
    "jobs": Shown("Jobs", "job state took_s warnings"),
    "unread": Shown("Tables that could not be read", "job why"),
}


def cells_of(found: ReportFindings, name: str) -> tuple[list[str], list[tuple[str, ...]]] | None:
    rows = found.rows(name)[: TABLES[name].most]
    cells = {column: [_cell(row, column) for row in rows] for column in TABLES[name].columns.split()}
    heads = [column for place, (column, texts) in enumerate(cells.items()) if not place or set(texts) != {"-"}]
    table = list(zip(*(cells[column] for column in heads), strict=True))
    words = [_UNIT.sub("", column.replace("per_s", "per_second")).replace("_", " ") for column in heads]
    return (words, table) if rows else None


_UNIT: Final = re.compile("/.*|_(ms|s|bytes)$")


def note_of(found: ReportFindings, name: str) -> str:
    """Return what one must know to read a table, and how much of it is not shown."""
    cut = found.tables.get(name, CutTable())
    shown = min(len(cut.rows), TABLES[name].most)
    left = cut.total - shown
    told = f"The first {shown:,} of {cut.total:,} rows. " if left > 0 else ""
    return f"{told}{TABLES[name].note}".strip()


def _cell(row: Row, column: str) -> str:
    part, _, of = column.partition("/")
    value = row.get(part)
    if of:
        return share(value, row.get(of), brief=True) if count_of(row.get(of)) else "-"
    if column == "key" and not value:
        return "not known" if value == "" else f"all others ({count_of(row.get('keys')):,})"
    if column == "stream" and row.get("app"):
        return words(f"{row['app']}/{value}")
    if column == "saw":
        return _saw(row)
    if column == "evidence":
        return evidence_text(value)
    text = value_text(column, value)
    return WORDS.get(str(value), text) if column in ("blame", "verdict") else text


def _saw(row: Row) -> str:
    """Return ``every picture, 92 % of the time in 720``, of a viewer of a set."""
    stays = json_of(row.get("renditions"))
    most = max(stays, key=lambda name: number(stays[name]) or 0.0, default="")
    pictures = number(row.get("picture_share"))
    all_s = sum(number(stay_s) or 0.0 for stay_s in stays.values())
    saw = "" if pictures is None else "every picture, " if pictures >= 1 else f"{percent(pictures)} of the pictures, "
    time_share = (number(stays.get(most)) or 0.0) / (all_s or 1.0)
    return f"{saw}{percent(time_share)} of the time in {words(most, 40)}" if most else "-"


def _marks(row: Row) -> str:
    return " and ".join(name.replace("_", " ") for name in ("recommended", "in_force") if row.get(name))


class _Barred(NamedTuple):
    """How a table of counts is drawn: columns of label and value, the text of a bar, its colour by a column."""

    title: str
    label: str
    value: str
    text: str
    by: str = ""
    paints: Mapping[str, str] = {}
    note: str = ""


_BARS: Final[Mapping[str, _Barred]] = {
    "pictures": _Barred(
        "What share of the pictures did viewers get?", "of", "count", "{count}", "of",
        {"all": "3", "95 % and more": "1", "80 to 95 %": "4", "50 to 80 %": "2", "less than half": "6"},
        "What they were sent, of what was theirs.",
    ),
    "blames": _Barred(
        "Whose fault was it?", "blame", "count", "{count}", "blame",
        {"viewer_link": "1", "server_loop": "8", "publisher_burst": "4"}, "Viewers in trouble, by the main cause.",
    ),
    "closes": _Barred(
        "How did connections end?", "close_reason", "count", "{count} (by {closed_by})", "closed_by",
        {"peer": "1", "server": "2"},
    ),
    "renditions": _Barred(
        "In which rendition were viewers of sets?", "rendition", "time_share", "{time_share}: {viewers} viewers",
        note="Share of the time of all of them; a viewer counts in each that it had.",
    ),
    "capacity_nodes": _Barred(
        "How full was each node?", "node", "load_peak", "{load_peak}: {viewers_peak} of {carries_viewers}",
        note="Viewers at its own peak, of those that it carries.",
    ),
}  # fmt: skip
"""Name of a table -> how it is drawn."""


def bars(found: ReportFindings, name: str) -> Figure | None:
    """Return a table of counts as bars; None: there are none."""
    look = _BARS[name]
    drawn = []
    for row in [row for row in found.rows(name) if number(row.get(look.value))][: MOST_BARS - 1]:
        paint = look.paints.get(str(row.get(look.by)), "7") if look.by else "1"
        label = words(WORDS.get(str(row.get(look.label)), row.get(look.label)), 48)
        drawn.append(Bar(label, number(row[look.value]) or 0.0, fill_template(look.text, row), f"var(--s{paint})"))
    if not drawn:
        return None
    if name == "capacity_nodes":  # as long as nodes are full, not as long as the fullest is
        drawn.insert(0, Bar("full", 1.0, "100 %", "var(--quiet)"))
    said = ". ".join(f"{bar.label}: {bar.text}" for bar in drawn)
    return Figure(Bars(name=name.replace("_", "-"), title=look.title, description=said, bars=drawn), note=look.note)


def delays(found: ReportFindings) -> Figure | None:
    titles = {"delay_p50_ms": ("its median delay", 1), "delay_p95_ms": ("its p95", 2), "delay_p99_ms": ("its p99", 6)}
    series = [
        Series(label, [(max(value, _LEAST_MS), part * 100) for value, part in found.curves[name]], colour, steps=True)
        for name, (label, colour) in titles.items()
        if found.curves.get(name)
    ]
    marks = (50, 90, 95, 99, 100)
    rows = [
        [one.label, *(ms(next((x for x, y in one.points if y >= mark - 1e-9), None)) for mark in marks)]
        for one in series
    ]
    said = ". ".join(f"{row[0]}: at most {row[1]} for half of the viewers, {row[4]} for 99 %" for row in rows)
    chart = Lines(
        name="delays", title="How late were viewers?", description=said, series=series, x_label="delay in ms",
        y_label="viewers for whom it is at most that", x_log=True, y_top=100, y_text=lambda value: f"{value:.0f} %",
    )  # fmt: skip
    return Figure(chart, ("of each viewer", *(f"{mark} % of viewers" for mark in marks)), rows) if series else None


def states(found: ReportFindings) -> Figure | None:
    rows = found.moments
    if not rows:
        return None
    begins_s, length_s = [number(row["from_s"]) or 0.0 for row in rows], rows[0]["length_s"]
    stamps = [f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M}" for at_s in begins_s]
    ends_s = [at_s + length_s - begins_s[0] for at_s in begins_s]
    unit_s, unit = next(item for item in _UNITS_S if ends_s[-1] > item[0] * 4 or item[0] == 60)
    shares = {state: [number(row.get(state)) or 0.0 for row in rows] for state in STATES}
    trouble = [sum(values) for values in zip(*(shares[state] for state in STATES[1:]), strict=True)]
    worst = max(trouble)
    top = min(1.0, max(_SMALLEST_TOP, worst * 1.15))
    chart = Stack(
        name="states",
        title="When were viewers in trouble?",
        description=f"At worst, at {stamps[trouble.index(worst)]}, {percent(worst)} of their time was not READY.",
        xs=[(end_s - length_s) / unit_s for end_s in ends_s],
        x_end=ends_s[-1] / unit_s,
        # Trouble at the bottom, where it can be compared; READY fills the rest of what is shown.
        layers=[Layer(STATE_WORDS[name], _PAINTS[name], shares[name]) for name in (*STATES[:0:-1], "ready")],
        y_top=top,
        x_label=f"{unit} since {stamps[0]} UTC",
        y_label="share of the viewers' time",
        y_text=percent,
        more=[f"viewers: {figure(row.get('viewers'))}" for row in rows],
    )
    cells = [
        [stamp, figure(row.get("viewers")), *(percent(row.get(name)) for name in STATES)]
        for stamp, row in zip(stamps, rows, strict=True)
    ]
    note = "" if top == 1.0 else f"The axis ends at {percent(top)}; all that is not shown is READY."
    legend = [(STATE_WORDS[name], _PAINTS[name]) for name in STATES]
    return Figure(chart, ("from (UTC)", "viewers", *STATE_WORDS.values()), cells, legend, note)


_UNITS_S: Final = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def front(found: ReportFindings) -> Figure | None:
    dots = []
    for row in found.rows("whatif_choices"):
        x, y, label = number(row.get("disconnected_share")), number(row.get("delay_p95_ms")), _marks(row)
        if x is None or y is None:
            continue
        memory = max(number(row.get("memory_peak_bytes")) or 0.0, 0.0)
        paint = "var(--s1)" if row.get("on_front") else "var(--quiet)"
        paint = "var(--s3)" if row.get("recommended") else "var(--s4)" if row.get("in_force") else paint
        said = f"disconnected: {percent(x)}\ndelay p95: {ms(y)}\nmemory: {size(memory)}"
        title = f"{label or 'choice'}: {choice_text(row)}\n{said}"
        dots.append(Dot(x, y, memory, title, paint, label, bool(row.get("on_front"))))
    if not dots:
        return None
    marked = [dot.title.replace("\n", ", ") for dot in dots if dot.label]
    chart = Dots(
        name="front", title="Which limits: disconnects against delay",
        description=". ".join([plural(len(dots), "choice"), *marked]), dots=dots, x_label="viewers disconnected",
        y_label="delay p95 in ms", x_text=percent,
    )  # fmt: skip
    legend = [("nothing else is better in every respect", "var(--s1)"), ("beaten by another choice", "var(--quiet)")]
    legend += [("in force", "var(--s4)"), ("recommended", "var(--s3)")]
    return Figure(chart, legend=legend, note="The area of a dot is the memory that the choice needs.")
