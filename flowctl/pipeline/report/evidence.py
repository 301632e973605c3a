"""What the answers rest on: tables and pictures of the page, said as data (pure).

A column of a table is written ``head|column|kind``; `_KINDS` has what kinds there are. A column of which no row has
anything is left out, so a table of another version shows less instead of failing. States have colours that grow darker
as they grow worse, so that they are told apart without telling colours apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from flowctl.charts.page import Figure
from flowctl.charts.pictures import MOST_BARS, Bar, Bars, Dot, Dots, Layer, Lines, Series, Stack
from flowctl.charts.words import figure, ms, number, percent, plural, rate, share, size, span, whole, words
from flowctl.pipeline.report.answers import FULL, choice_text, evidence_text
from flowctl.pipeline.report.found import STATES, Found, Row

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
    "limit": "limited",
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

_KINDS: Final[Mapping[str, Callable[[Any], str]]] = {
    "n": figure, "%": percent, "ms": ms, "s": span, "B": size, "bps": rate, "text": words,
    "word": lambda value: WORDS.get(str(value), words(value, 24)),
    "yes": lambda value: "yes" if value else "no",
    "evidence": evidence_text,
}  # fmt: skip
_FELT: Final = (
    *("viewers|viewers|n", "most at once|peak_viewers|n", "start failures|start_failures/attempts|part"),
    *("left before start|exits_before_start/attempts|part", "first frame p50|first_frame_p50_ms|ms"),
    *(
        "p95|first_frame_p95_ms|ms",
        "pictures|picture_share|%",
        "delay p50|delay_p50_ms|ms",
        "delay p95|delay_p95_ms|ms",
    ),
    *("stalled|stall_ratio|%", "beyond target delay|late_share|%", "bit rate|bit_rate|bps", "frames/s|frames_per_s|n"),
    *("in trouble|troubled/plays|part", "watched|play_s|s"),
)
_TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "all": ("All viewers", "of|key|text", *_FELT),
    "stream": ("Streams", "stream|key|text", *_FELT),
    "application": ("Applications", "application|key|text", *_FELT),
    "network": ("Networks", "network|key|text", *_FELT),
    "node": ("Nodes", "node|key|text", *_FELT),
    "agent": ("Players, by what they call themselves", "player|key|text", *_FELT),
    "ingest": (
        *("Publishers: how streams came in", "stream|stream|text", "health|health|text", "for|duration_s|s"),
        *("bit rate|bit_rate|bps", "frames/s|frames_per_s|n", "key frames apart|key_interval_ms|ms"),
        *("at most|key_interval_max_ms|ms", "gaps|gap_count|n", "in all|gap_ms|ms", "the longest|gap_max_ms|ms"),
        *("jitter|jitter_ms|ms", "came back|reconnects|n", "node|node|text"),
    ),
    "worst": (
        *("The viewers that were worst off", "address|peer_ip|text", "stream|stream|text", "there for|duration_s|s"),
        *("pictures|picture_share|%", "its line, of the stream|line_of_stream|%", "in trouble|trouble_ms|ms"),
        *("worst state|worst_state|text", "delay p99|delay_p99_ms|ms", "blame|blame|word", "end|close_reason|text"),
        *("node|node|text", "connection|conn_id|text", "agent|agent|text"),
    ),
    "whatif_choices": (
        *("All choices of limits, as figures", "choice|choice|text", "which|which|text"),
        *("disconnected|disconnected/viewers|part", "delay p50|delay_p50_ms|ms", "delay p95|delay_p95_ms|ms"),
        *("delay p99|delay_p99_ms|ms", "memory|memory_peak_bytes|B", "dropped|dropped_share|%"),
        "assumed|assumed_share|%",
    ),
    "abuse_scores": (
        *("Who behaved badly", "address or subnet|cidr|text", "score|score|n", "banned|verdict|word"),
        *("connections|connections|n", "behaved for|standing_s|s", "evidence|evidence|evidence"),
    ),
    "bans": (
        *("The ban list", "address or subnet|cidr|text", "score|score|n", "action|action|text"),
        *("until|expires|text", "evidence|evidence|evidence"),
    ),
    "capacity_nodes": (
        *("What each node carries", "node|node|text", "carries|carries_viewers|n", "known from|carries_from|text"),
        *("at its peak|viewers_peak|n", "load|load_peak|%", "on average|viewers_mean|n", "recorded for|recorded_s|s"),
        *("a viewer takes|bit_rate|bps", "thread busy|busy_peak|%"),
    ),
    "capacity_streams": (
        *("Streams: worth having at an edge?", "stream|stream|text", "node|node|text", "on average|viewers_mean|n"),
        *("at its peak|viewers_peak|n", "a viewer takes|bit_rate|bps", "worth it|worth_following|yes"),
        "saves|saved_bit_rate|bps",
    ),
    "accounts": (
        *("Records", "table|table|text", "files|files_in|n", "rows in|rows_in|n", "rows out|rows_out|n"),
        *("rows set aside|rows_quarantined|n", "files set aside|files_quarantined|n"),
    ),
}
"""Name of a table -> its title, and its columns."""
_NOTES: Final = {
    "all": "As in CTA-2066. A stall is seen from the server: a viewer took nothing for half a second while something "
    "waited; a player that plays from its buffer meanwhile shows none.",
    "whatif_choices": "Delay and drops are of the recorded time; assumed is what was tried beyond it.",
    "abuse_scores": "Evidence is halved with each half-life of its age; good behaviour counts for an address.",
}  # fmt: skip
DIMENSIONS: Final = ("stream", "application", "network", "node", "agent")
"""By what viewers are told apart, in the order of the page."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A table as it stands on the page."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    kind: str = "words"


def shown(found: Found, name: str, rows: Sequence[Row] | None = None) -> Shown | None:
    """Return a table of `_TABLES` as text; None: there are no rows."""
    told = [_derived(row) for row in (found.rows(name) if rows is None else rows)]
    if not told:
        return None
    title, *columns = _TABLES[name]
    cells = {head: [_cell(row, column, kind) for row in told] for head, column, kind in (c.split("|") for c in columns)}
    heads = [head for place, (head, column) in enumerate(cells.items()) if not place or set(column) != {"-"}]
    left = found.tables[name].left_out("rows") if name in found.tables else ""
    note = " ".join(filter(None, (left, _NOTES.get(name, ""))))
    return Shown(title, heads, list(zip(*(cells[head] for head in heads), strict=True)), note)


def _cell(row: Row, column: str, kind: str) -> str:
    if kind == "part":
        part, of = (row.get(name) for name in column.split("/"))
        return share(part, of, brief=True) if whole(of) else "-"
    return _KINDS[kind](row.get(column))


def _derived(row: Row) -> dict[str, Any]:
    """Return a row with what no table has as a column."""
    stream = "/".join(str(row[name]) for name in ("app", "stream") if row.get(name))
    hours, played = number(row.get("standing_hours")), number(row.get("play_hours"))
    key = f"all others ({whole(row.get('keys')):,})" if row.get("keys") and row.get("key") is None else row.get("key")
    return {
        **row,
        "key": "not known" if key == "" else key,
        "stream": stream or None,
        "choice": choice_text(row),
        "which": _marks(row) or ("on the front" if row.get("on_front") else None),
        "standing_s": None if hours is None else hours * 3600,
        "play_s": None if played is None else played * 3600,
        "cidr": row.get("cidr") or row.get("address") or row.get("subnet"),
    }


def _marks(row: Row) -> str:
    return " and ".join(name.replace("_", " ") for name in ("recommended", "in_force") if row.get(name))


def bars(found: Found, name: str) -> Figure | None:
    """Return a table of counts as bars; None: there are none."""
    rows = [row for row in found.rows(name) if _BARS[name][1](row)[1]][: MOST_BARS - 1]
    title, look, note = _BARS[name]
    drawn = [Bar(words(label, 48), value, text, paint) for row in rows for label, value, text, paint in [look(row)]]
    if not drawn:
        return None
    if name == "capacity_nodes":  # as long as nodes are full, not as long as the fullest is
        drawn.insert(0, Bar("full", 1.0, "100 %", "var(--quiet)"))
    said = ". ".join(f"{bar.label}: {bar.text}" for bar in drawn)
    return Figure(Bars(name=name.replace("_", "-"), title=title, description=said, bars=drawn), note=note)


_Look = Callable[[Row], tuple[Any, float, str, str]]


def _counted(name: str, paints: Mapping[str, str]) -> _Look:
    def look(row: Row) -> tuple[Any, float, str, str]:
        word = str(row.get(name))
        return (
            WORDS.get(word, word),
            float(whole(row.get("count"))),
            figure(row.get("count")),
            paints.get(word, "var(--s7)"),
        )

    return look


def _end(row: Row) -> tuple[Any, float, str, str]:
    paint = {"peer": "var(--s1)", "server": "var(--s2)"}.get(str(row.get("closed_by")), "var(--s7)")
    text = f"{figure(row.get('count'))} (by {words(row.get('closed_by'), 12)})"
    return row.get("close_reason"), float(whole(row.get("count"))), text, paint


def _drop(row: Row) -> tuple[Any, float, str, str]:
    part, of = whole(row.get("dropped")), whole(row.get("accepted"))
    return row.get("class"), float(part), f"{part:,} ({percent(part / max(of, part, 1))})", "var(--s1)"


def _pictures(row: Row) -> tuple[Any, float, str, str]:
    labels = {
        1.0: ("all", "var(--s3)"),
        0.95: ("95 % and more", "var(--s4)"),
        0.8: ("80 to 95 %", "var(--s4)"),
        0.5: ("50 to 80 %", "var(--s2)"),
        0.0: ("less than half", "var(--s6)"),
    }
    label, paint = labels.get(row["picture_share"], ("not known", "var(--s7)"))
    return label, float(whole(row.get("count"))), figure(row.get("count")), paint


def _load(row: Row) -> tuple[Any, float, str, str]:
    load = number(row.get("load_peak")) or 0.0
    text = f"{percent(load)}: {figure(row.get('viewers_peak'))} of {figure(row.get('carries_viewers'))}"
    return row.get("node"), load, text, "var(--s2)" if load > FULL else "var(--s1)"


_BLAME_PAINTS: Final = {"viewer_link": "var(--s1)", "server_loop": "var(--s8)", "publisher_burst": "var(--s4)"}
_BARS: Final[Mapping[str, tuple[str, _Look, str]]] = {
    "blames": ("Whose fault was it?", _counted("blame", _BLAME_PAINTS), "Viewers in trouble, by the main cause."),
    "closes": ("How did connections end?", _end, ""),
    "drops": ("What was dropped?", _drop, "Messages, and their share of those published for these viewers."),
    "pictures": ("What share of the pictures did viewers get?", _pictures, "What they were sent, of what was theirs."),
    "capacity_nodes": ("How full was each node?", _load, "Viewers at its own peak, of those that it carries."),
}  # fmt: skip
"""Name of a table -> title, how a row is drawn (label, value, text, paint), note."""


def delays(found: Found) -> Figure | None:
    """Return how many viewers were how late; None: there are no figures."""
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


def states(found: Found) -> Figure | None:
    """Return how the time of viewers is shared by the states, place by place; None: there are no figures."""
    rows = found.moments
    if not rows:
        return None
    end_s = (number(rows[-1].get("at_s")) or 0.0) + found.moment_s
    unit_s, unit = (
        (60.0, "minutes") if end_s <= 4 * 3600 else (3600.0, "hours") if end_s <= 4 * 86400 else (86400.0, "days")
    )
    shares = {state: [number(row.get(state)) or 0.0 for row in rows] for state in STATES}
    trouble = [sum(shares[state][place] for state in STATES[1:]) for place in range(len(rows))]
    top = min(1.0, max(_SMALLEST_TOP, max(trouble) * 1.15))
    worst = max(range(len(rows)), key=trouble.__getitem__)

    def stamp(row: Row) -> str:
        at_s = number(row.get("at_s")) or 0.0
        return f"{found.moments_from + timedelta(seconds=at_s):%m-%d %H:%M}" if found.moments_from else f"{at_s:,.0f} s"

    shape = Stack(
        name="states",
        title="When were viewers in trouble?",
        description=f"At worst, at {stamp(rows[worst])}, {percent(trouble[worst])} of their time was not READY.",
        xs=[(number(row.get("at_s")) or 0.0) / unit_s for row in rows],
        x_end=end_s / unit_s,
        # Trouble at the bottom, where it can be compared; READY fills the rest of what is shown.
        layers=[Layer(STATE_WORDS[name], _PAINTS[name], shares[name]) for name in (*STATES[:0:-1], "ready")],
        y_top=top,
        x_label=f"{unit} since {found.moments_from:%Y-%m-%d %H:%M} UTC" if found.moments_from else unit,
        y_label="share of the viewers' time",
        y_text=percent,
        more=[f"viewers: {figure(row.get('viewers'))}" for row in rows],
    )
    heads = ("from (UTC)", "viewers", *STATE_WORDS.values(), "delay p50", "p95", "p99")
    late = ("delay_p50_ms", "delay_p95_ms", "delay_p99_ms")
    table = [
        [
            stamp(row),
            figure(row.get("viewers")),
            *(percent(row.get(s)) for s in STATES),
            *(ms(row.get(d)) for d in late),
        ]
        for row in rows
    ]
    note = "" if top == 1.0 else f"The axis ends at {percent(top)}; all that is not shown is READY."
    return Figure(shape, heads, table, [(STATE_WORDS[name], _PAINTS[name]) for name in STATES], note)


def front(found: Found) -> Figure | None:
    """Return all choices of limits as dots: who is disconnected against how late; None: there are none."""
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
