"""What the answers rest on: tables and pictures of the page, said as data (pure).

A table is the names of columns of a result, which are the heads as well; the unit at the end of a name says how values
are written, and ``part/whole`` is a share. A column of which no row has anything is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from flowctl.analyze.report.answers import evidence_text
from flowctl.analyze.report.found import MEASURES, STATES, CutTable, ReportFindings, Row, json_of
from flowctl.charts.plots import Curve, Plot, joined
from flowctl.charts.words import (
    count_of,
    figure,
    fill_template,
    ms,
    number,
    percent,
    rate,
    share,
    size,
    span,
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
PAINTS: Final = dict(zip(STATES, ("calm", "s4", "s2", "s6"), strict=True))
_MOST_BARS: Final = 16
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
    most: int = 100  # rows


TABLES: Final[Mapping[str, Shown]] = {
    "all": Shown(
        "All viewers",
        _FELT,
        "As in CTA-2066, but all of it seen from the server. First frame: from a request until the first of the stream "
        "is ready to be sent. Delay ends when the system takes what is sent. A player's line and buffer come on top of "
        "both. A stall: a viewer took nothing for half a second while something waited; a player that plays from "
        "its buffer meanwhile shows none. The delay of each viewer is known in steps of 3 %: a percentile of it may be "
        "1.6 % off, up or down, however many viewers there are. Viewers are those who were there for 2 s or more; peak "
        "viewers are all at once, for however long.",
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
        "peer_ip network stream duration_s picture_share line_of_stream trouble_ms worst_state delay_p99_ms blame "
        "close_reason node conn_id agent",
    ),
    "sets": Shown(
        "Viewers of renditions, those first that were longest in a smaller one",
        "peer_ip stream duration_s saw why_smaller switches node conn_id agent",
        "The server chooses the largest rendition that a line carries. Why smaller: of the longest stay in one.",
        folded=True,
    ),
    "whatif_choices": Shown(
        "All choices of limits",
        "choice recommended in_force on_front disconnected/viewers delay_p50_ms delay_p95_ms delay_p99_ms "
        "memory_peak_bytes dropped_share assumed_share",
        "Assumed is the share of the time that was tried beyond what was recorded; delay and drops count it too.",
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


class Cell(NamedTuple):
    """One cell of a table: its text, what it is worth as a number, and its text of the day before."""

    text: str
    value: float | None = None
    before: str = ""


def shown(found: ReportFindings, name: str) -> dict[str, Any] | None:
    """Return a table of the page: heads (words, name, whether one chooses by it) and cells; None: it has no rows."""
    look, cut = TABLES[name], found.tables.get(name, CutTable())
    rows = cut.rows[: look.most]
    if not rows:
        return None
    cells = {column: [_cell(found, name, row, column) for row in rows] for column in look.columns.split()}
    there = [column for at, (column, of) in enumerate(cells.items()) if not at or {cell.text for cell in of} != {"-"}]
    heads = [
        (_UNIT.sub("", of.replace("per_s", "per_second")).replace("_", " "), of.replace("/", "_of_"), of in _CHOSEN_BY)
        for of in there
    ]
    told = f"The first {len(rows):,} of {cut.total:,} rows. " if cut.total > len(rows) else ""
    table = list(zip(*(cells[column] for column in there), strict=True))
    said = {"name": name, "title": look.title, "folded": look.folded, "note": f"{told}{look.note}".strip()}
    return said | {"heads": heads, "rows": table}


_CHOSEN_BY: Final = ("stream", "network", "agent", "node", "blame", "verdict", "health")
"""Columns with few values, by which people look at a part of a table."""
_UNIT: Final = re.compile("/.*|_(ms|s|bytes)$")


def _cell(found: ReportFindings, name: str, row: Row, column: str) -> Cell:
    earlier = found.before.get((name, str(row.get("key")))) if row.get("key") else None
    before = _text(earlier, column) if earlier and column != "key" else ""
    part, _, of = column.partition("/")
    value = None if isinstance(row.get(part), str) or part.endswith("_id") else number(row.get(part))
    if of and value is not None:
        value = value / (number(row.get(of)) or math.inf)
    return Cell(_text(row, column), None if value is None else float(f"{value:.9g}"), "" if before == "-" else before)


def _text(row: Row, column: str) -> str:
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
        "Of the pictures that were published while they watched.",
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


class Shot(NamedTuple):
    """A picture with its figures as a table: bars (label, per cent of the longest, text, colour), or a plot."""

    name: str  # unique on the page
    title: str
    description: str  # what is to be seen, for readers who cannot see it
    bars: Sequence[tuple[str, float, str, str]] = ()
    plot: Plot | None = None
    figures: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None  # heads and rows; None: as the plot has them
    note: str = ""
    command: str = ""  # that shows more


def bars(found: ReportFindings, name: str) -> Shot | None:
    """Return a table of counts as bars; None: there are none."""
    look, drawn = _BARS[name], []
    rows = [(row, value) for row in found.rows(name) if (value := number(row.get(look.value)))][:_MOST_BARS]
    # As long as nodes are full, not as long as the fullest is.
    most = max([value for _, value in rows] + [1.0] * (name == "capacity_nodes"), default=1.0)
    for row, value in rows:
        paint = look.paints.get(str(row.get(look.by)), "7") if look.by else "1"
        label = words(WORDS.get(str(row.get(look.label)), row.get(look.label)), 48)
        drawn.append((label, round(max(value / most, 0.003) * 100, 1), fill_template(look.text, row), f"s{paint}"))
    said = ". ".join(f"{label}: {text}" for label, _, text, _ in drawn)
    return Shot(name.replace("_", "-"), look.title, said, drawn, note=look.note) if drawn else None


def delays(found: ReportFindings) -> Shot | None:
    titles = {"delay_p50_ms": ("its median delay", 1), "delay_p95_ms": ("its p95", 2), "delay_p99_ms": ("its p99", 6)}
    there = {name: found.curves[name] for name in titles if found.curves.get(name)}
    if not there:
        return None
    xs, curves = joined({name: [(max(x, _LEAST_MS), y) for x, y in points] for name, points in there.items()})
    shares = (0.5, 0.9, 0.95, 0.99, 1)
    rows = [
        [titles[name][0], *(ms(next((x for x, y in points if y >= mark - 1e-9), None)) for mark in shares)]
        for name, points in there.items()
    ]
    target_ms = number((found.totals or {}).get("target_delay_ms"))
    plot = Plot(
        x_label="delay", x_unit="ms", xs=xs, x_log=True, tops={"share": 1.0},
        curves=[Curve(label=titles[of][0], paint=f"s{titles[of][1]}", values=ys, unit="share")
                for of, ys in curves.items()],
        marks=[("x", target_ms, f"target {ms(target_ms)}")] if target_ms else (),
    )  # fmt: skip
    said = ". ".join(f"{row[0]}: at most {row[1]} for half of the viewers, {row[4]} for 99 %" for row in rows)
    heads = ("of each viewer", *(f"{percent(mark)} of viewers" for mark in shares))
    note = "Up the page: the share of the viewers for whom it is at most that."
    return Shot("delays", "How late were viewers?", said, plot=plot, figures=(heads, rows), note=note)


def _over_time(
    found: ReportFindings, layers: Sequence[tuple[str, str, Sequence[float]]], unit: str, top: float
) -> Plot:
    """Return areas on top of each other; the last place along time is as long as the others."""
    xs = [number(row["from_s"]) or 0.0 for row in found.moments]
    curves = [Curve(label=of, paint=paint, values=[*ys, ys[-1]], unit=unit, draw="area") for of, paint, ys in layers]
    tops, ends = {unit: top} if top else None, [*xs, xs[-1] + found.moments[-1]["length_s"]]
    return Plot(x_label="time (UTC)", x_unit="time", xs=ends, stacked=True, tops=tops, curves=curves)


def figures_of(plot: Plot) -> tuple[list[str], list[list[str]]]:
    """Return what a plot draws as a table: heads and rows."""
    values = zip(plot.xs, *(curve.values for curve in plot.curves), strict=True)
    units = [plot.x_unit, *(curve.unit for curve in plot.curves)]
    rows = [[_WRITE[unit](value) for unit, value in zip(units, row, strict=True)] for row in values]
    return [plot.x_label, *(curve.label for curve in plot.curves)], rows[:-1] if plot.stacked else rows


def _stamp(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"


_WRITE: Final[Mapping[str, Callable[[Any], str]]] = {
    "time": _stamp, "count": figure, "share": percent, "ms": ms, "bytes": size, "bits": rate,
}  # fmt: skip


def crowd(found: ReportFindings) -> Shot | None:
    """Return how many viewers each stream had over time."""
    if not found.moments or not found.streams:
        return None
    paints = [*(f"s{number}" for number in (1, 2, 3, 4, 5, 6, 8)), "quiet"]
    layers = [(words(name, 40), paint, of) for (name, of), paint in zip(found.streams.items(), paints, strict=False)]
    at = max(found.moments, key=lambda row: number(row.get("viewers")) or 0.0)
    most = f"Most at {_stamp(at['from_s'])}: {figure(at.get('viewers'))}, the mean of {span(at['length_s'])}"
    said = f"{most}: of each minute, of the part from its first viewer to its last."
    plot = _over_time(found, layers, "count", 0.0)
    return Shot("crowd", "How many viewers had each stream?", said, plot=plot, note=said)


def states(found: ReportFindings) -> Shot | None:
    if not found.moments:
        return None
    shares = {state: [number(row.get(state)) or 0.0 for row in found.moments] for state in STATES}
    trouble = [sum(values) for values in zip(*(shares[state] for state in STATES[1:]), strict=True)]
    worst = max(trouble)
    top = min(1.0, max(_SMALLEST_TOP, worst * 1.15))
    # Trouble at the bottom, where it can be compared; READY fills the rest of what is shown.
    layers = [(STATE_WORDS[name], PAINTS[name], shares[name]) for name in (*STATES[:0:-1], "ready")]
    at = _stamp(found.moments[trouble.index(worst)]["from_s"])
    said = f"At worst, at {at}, {percent(worst)} of their time was not READY."
    note = "" if top == 1.0 else f" The axis ends at {percent(top)}; all that is not shown is READY."
    plot = _over_time(found, layers, "share", top)
    return Shot("states", "When were viewers in trouble?", said, plot=plot, note=f"{said}{note}")


def histories(found: ReportFindings) -> list[Shot]:
    """Return what happened to the viewers that were worst off, one by one."""
    shots = []
    paints = {word: PAINTS[state] for state, word in STATE_WORDS.items()}
    for place, line in enumerate(found.timelines):
        row, points = line.viewer, line.points.astype(object).where(line.points.notna(), None)
        curves = [
            Curve(label="queue", paint="s1", unit="bytes", values=points["queue"].tolist(), draw="line"),
            Curve(label="line", paint="s3", unit="bits", values=points["line"].tolist(), draw="line"),
            Curve(label="left out", paint="s8", unit="count", values=points["drops"].tolist(), draw="bars"),
        ]
        xs = points["at"].tolist()
        ends = [*(at for at, _ in line.states[1:]), xs[-1]]
        strip = [(at, end, paints.get(state, "calm")) for (at, state), end in zip(line.states, ends, strict=False)]
        plot = Plot(x_label="time (UTC)", x_unit="time", xs=xs, height=170, curves=curves, strip=strip)
        who, why = _text(row, "stream"), WORDS.get(str(row.get("blame")), words(row.get("blame")))
        changes = ", ".join(f"{_stamp(at)[11:]} {words(state, 20)}" for at, state in line.states[:12])
        shots.append(
            Shot(
                f"viewer-{place}", f"{words(row.get('peer_ip'))}, {who}: {why}, {words(row.get('close_reason'))}",
                f"{len(line.states)} states, {figure(points['drops'].sum())} messages left out", plot=plot,
                note=f"{changes}{' ...' if len(line.states) > 12 else ''}", command=line.command,
            )
        )  # fmt: skip
    return shots
