"""The pictures of the pipeline's report: each answers one question, in words as well, and has its table (pure).

What they are made of is bounded already (`reportdata`). States have colours that grow darker as they grow worse, so
that they are told apart without telling colours apart; a state has the same one in every picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from flowctl.charts.page import Figure
from flowctl.charts.pictures import MOST_BARS, Bar, Bars, Layer, Lines, Series, Stack
from flowctl.pipeline.report.data import (
    LEAST_STAY_S,
    PICTURE_CLASSES,
    SHARES,
    STATES,
    ReportData,
    Row,
    number,
    whole_number,
)
from flowctl.printable import foreign
from flowctl.units import format_duration, format_size

STATE_PAINTS: Final = {
    "ready": "var(--calm)",
    "overloaded": "var(--s4)",
    "soft": "var(--s2)",
    "hard": "var(--s6)",
}
STATE_WORDS: Final = {"ready": "READY", "overloaded": "OVERLOADED", "soft": "SOFT_LIMIT", "hard": "HARD_LIMIT"}

_CURVE_WORDS: Final = {
    "delay_p50_ms": ("its median delay", 1),
    "delay_p95_ms": ("its p95", 2),
    "delay_p99_ms": ("its p99", 6),
}

_MARKED_SHARES: Final = (50, 90, 95, 99, 100)
"""Percent of the viewers, in the table of delays."""

_LEAST_MS: Final = 0.1
"""Delays below are drawn there: a logarithmic axis has no 0."""

_SMALLEST_TOP: Final = 0.1
"""Upper end of the axis of shares where hardly anybody is in trouble: 10 %, so that little looks little."""


def count(value: object) -> str:
    """Return a count for people; "-" for what is none."""
    found = number(value)
    return "-" if found is None else f"{found:,.0f}"


def percent(value: object) -> str:
    """Return a share (0 to 1) for people; "-" for what is none. What is not nothing is never written as 0 %."""
    found = number(value)
    if found is None:
        return "-"
    if 0 < found < 0.0005:
        return "< 0.1 %"
    shown = found * 100
    return f"{shown:.0f} %" if shown in (0, 100) or shown >= 99.95 else f"{shown:.1f} %"


def ms(value: object) -> str:
    """Return milliseconds for people; "-" for what is none."""
    found = number(value)
    if found is None:
        return "-"
    return f"{found:.1f} ms" if 0 < found < 10 else format_duration(found / 1000)


def seconds(value: object) -> str:
    """Return seconds for people; "-" for what is none."""
    found = number(value)
    return "-" if found is None else ms(found * 1000)


def size(value: object) -> str:
    """Return bytes for people; "-" for what is none."""
    found = number(value)
    if found is None:
        return "-"
    return format_size(found) if found < 1024**4 else f"{found / 1024**4:,.1f} TiB"


def words(value: object, most: int = 60) -> str:
    """Return a text of a peer on one line, "-" for none and for a number that is none (NaN, infinity)."""
    found = "" if value is None or (isinstance(value, float) and number(value) is None) else foreign(value, most)
    return found or "-"


def _clock(data: ReportData, span_s: float) -> tuple[float, str]:
    """Return the unit of the time axis in seconds, and the label of the axis."""
    unit_s, unit = 1.0, "seconds"
    for least_s, wide_s, name in ((180, 60.0, "minutes"), (4 * 3600, 3600.0, "hours"), (4 * 86400, 86400.0, "days")):
        if span_s > least_s:
            unit_s, unit = wide_s, name
    began = data.moments_from
    return unit_s, f"{unit} since {began:%Y-%m-%d %H:%M:%S} UTC" if began else f"{unit} since the begin"


def _moments_end(data: ReportData, rows: Sequence[Row]) -> float:
    return (number(rows[-1].get("at_s")) or 0.0) + data.moment_s


def _stamp(data: ReportData, at_s: float) -> str:
    """Return a moment for a table: the clock, or seconds where the begin is unknown."""
    if data.moments_from is None:
        return f"{at_s:,.0f} s"
    return f"{data.moments_from + timedelta(seconds=at_s):%m-%d %H:%M:%S}"


def states_over_time(data: ReportData) -> Figure | None:
    """Return how the time of viewers is shared by the states, place by place; None: there are no figures."""
    rows = data.moments or ()
    if not rows:
        return None
    unit_s, label = _clock(data, _moments_end(data, rows))
    shares = {state: [number(row.get(state)) or 0.0 for row in rows] for state in STATES}
    trouble = [sum(shares[state][place] for state in STATES[1:]) for place in range(len(rows))]
    top = min(1.0, max(_SMALLEST_TOP, max(trouble) * 1.15))
    # Trouble at the bottom, where it can be compared; READY fills the rest of what is shown.
    layers = [Layer(STATE_WORDS[state], STATE_PAINTS[state], shares[state]) for state in (*STATES[:0:-1], "ready")]
    worst = max(range(len(rows)), key=trouble.__getitem__)
    at_worst = _stamp(data, number(rows[worst].get("at_s")) or 0.0)
    shape = Stack(
        name="states",
        title="When were viewers in trouble?",
        description=f"At worst, at {at_worst}, viewers spent {percent(trouble[worst])} of their time not READY.",
        xs=[(number(row.get("at_s")) or 0.0) / unit_s for row in rows],
        x_end=_moments_end(data, rows) / unit_s,
        layers=layers,
        y_top=top,
        x_label=label,
        y_label="share of the viewers' time",
        y_text=percent,
        more=[f"viewers: {count(row.get('viewers'))}" for row in rows],
    )
    table = [
        [
            _stamp(data, number(row.get("at_s")) or 0.0),
            count(row.get("viewers")),
            *(percent(row.get(state)) for state in STATES),
        ]
        for row in rows
    ]
    legend = [(STATE_WORDS[state], STATE_PAINTS[state]) for state in STATES]
    note = "" if top == 1.0 else f"The axis ends at {percent(top)}; all that is not shown is READY."
    return Figure(shape, ("from (UTC)", "viewers", *(STATE_WORDS[state] for state in STATES)), table, legend, note)


def picture_shares(data: ReportData) -> Figure | None:
    """Return how many viewers got what share of the pictures; None: there are no figures."""
    found = {number(row.get("least")): whole_number(row.get("viewers")) for row in data.picture_shares}
    total = sum(found.values())
    if not total or set(found) == {None}:
        return None
    bars = [
        Bar(label, float(found[least]), f"{count(found[least])} ({percent(found[least] / total)})", paint)
        for least, label, paint in _PICTURE_BARS
        if found.get(least)
    ]
    said = ". ".join(f"{bar.label}: {bar.text}" for bar in bars)
    shape = Bars(name="pictures", title="What share of the pictures did viewers get?", description=said, bars=bars)
    table = [[bar.label, bar.text] for bar in bars]
    note = f"Of viewers that were there for {LEAST_STAY_S:g} s or longer: what they were sent, of what was published."
    return Figure(shape, ("of the pictures", "viewers"), table, note=note)


_PICTURE_BARS: Final = (
    (PICTURE_CLASSES[0], "all", "var(--s3)"),
    (PICTURE_CLASSES[1], "95 % and more", "var(--s4)"),
    (PICTURE_CLASSES[2], "80 to 95 %", "var(--s4)"),
    (PICTURE_CLASSES[3], "50 to 80 %", "var(--s2)"),
    (PICTURE_CLASSES[4], "less than half", "var(--s6)"),
    (None, "not known", "var(--s7)"),
)


def delay_distribution(data: ReportData) -> Figure | None:
    """Return how many viewers were how late; None: there are no figures."""
    series, rows = [], []
    for name, (label, colour) in _CURVE_WORDS.items():
        values = [number(value) for value in data.delay_curves.get(name, ())]
        found = [value for value in values if value is not None]
        if len(found) != len(SHARES):
            continue
        points = [(max(value, _LEAST_MS), share * 100) for value, share in zip(found, SHARES, strict=True)]
        series.append(Series(label, points, colour))
        rows.append([label, *(ms(found[share]) for share in _MARKED_SHARES)])
    if not series:
        return None
    said = ". ".join(f"{row[0]}: at most {row[1]} for half of the viewers, {row[4]} for 99 percent" for row in rows)
    chart = Lines(
        name="delays",
        title="How was the delay spread?",
        description=said,
        series=series,
        x_label="delay in ms",
        y_label="viewers for whom it is at most that",
        x_log=True,
        y_top=100,
        y_text=lambda value: f"{value:.0f} %",
    )
    heads = ("of each viewer", *(f"{share} % of viewers" for share in _MARKED_SHARES))
    note = "A viewer's delay is our queue and the kernel's over the rate at which it takes: how far it is behind us."
    return Figure(chart, heads, rows, note=note)


def delays_over_time(data: ReportData) -> Figure | None:
    """Return the quantiles of the delay, place by place; None: there are no figures."""
    moments = data.moments or ()
    wanted = (("delay_p99_ms", "p99", 6), ("delay_p95_ms", "p95", 2), ("delay_p50_ms", "median", 1))
    unit_s, label = _clock(data, _moments_end(data, moments)) if moments else (1.0, "")
    series = []
    for name, title, colour in wanted:
        points = [
            ((number(row.get("at_s")) or 0.0) / unit_s, value)
            for row in moments
            if (value := number(row.get(name))) is not None
        ]
        if points:
            series.append(Series(title, points, colour))
    if not series:
        return None
    worst = {item.label: max(y for _, y in item.points) for item in series}
    chart = Lines(
        name="delays-over-time",
        title="Did the delay change?",
        description=". ".join(f"{name}: {ms(value)} at worst" for name, value in worst.items()),
        series=series,
        x_label=label,
        y_label="delay in ms",
    )
    rows = [
        [_stamp(data, number(row.get("at_s")) or 0.0), *(ms(row.get(name)) for name, _, _ in reversed(wanted))]
        for row in moments
    ]
    return Figure(chart, ("from (UTC)", "median", "p95", "p99"), rows)


def drops_by_class(data: ReportData) -> Figure | None:
    """Return what was dropped, by class of message; None: there are no figures."""
    rows = [row for row in data.drops if whole_number(row.get("accepted_messages")) or _dropped(row)]
    if not rows:
        return None
    bars = [
        Bar(words(row.get("class"), 20), float(_dropped(row)), f"{count(_dropped(row))} ({percent(_drop_share(row))})")
        for row in rows
    ]
    said = ". ".join(f"{bar.label}: {bar.text}" for bar in bars)
    shape = Bars(name="drops", title="What was dropped?", description=said, bars=bars)
    table = [
        [words(row.get("class"), 20), count(row.get("accepted_messages")), count(_dropped(row)), percent(share)]
        for row in rows
        for share in [_drop_share(row)]
    ]
    note = "Messages dropped, and their share of those that were published for these viewers, by class."
    return Figure(shape, ("class", "accepted", "dropped", "share dropped"), table, note=note)


def _dropped(row: Row) -> int:
    return whole_number(row.get("dropped_messages"))


def _drop_share(row: Row) -> float | None:
    accepted = whole_number(row.get("accepted_messages"))
    return _dropped(row) / accepted if accepted else None


def blame_shares(data: ReportData) -> Figure | None:
    """Return whose fault it was that viewers were slow; None: there are no figures."""
    rows = [row for row in data.blames if whole_number(row.get("viewers"))]
    if not rows:
        return None
    total = sum(whole_number(row.get("viewers")) for row in rows)
    paints = {"viewer_link": "var(--s1)", "server_loop": "var(--s8)", "publisher_burst": "var(--s4)"}
    bars = [
        Bar(
            BLAME_WORDS.get(str(row.get("blame")), words(row.get("blame"), 24)),
            float(whole_number(row.get("viewers"))),
            f"{count(row.get('viewers'))} ({percent(whole_number(row.get('viewers')) / total)})",
            paints.get(str(row.get("blame")), "var(--s7)"),
        )
        for row in rows
    ]
    said = ". ".join(f"{bar.label}: {bar.text}" for bar in bars)
    shape = Bars(name="blame", title="Whose fault was it?", description=said, bars=bars)
    table = [
        [bar.label, count(row.get("viewers")), ms(row.get("trouble_ms"))] for bar, row in zip(bars, rows, strict=True)
    ]
    note = "Viewers in trouble, by the cause that weighs most for each of them."
    return Figure(shape, ("cause", "viewers", "time not READY, all together"), table, note=note)


BLAME_WORDS: Final = {
    "none": "nobody's",
    "viewer_link": "the viewer's link",
    "server_loop": "the server's thread",
    "publisher_burst": "a burst of the publisher",
    "policy": "limits and policy",
}
"""The words of `sessions.blame` for people."""


def ends(data: ReportData) -> Figure | None:
    """Return how connections ended; None: there are no figures."""
    rows = data.closes
    if not rows:
        return None
    bars = [
        Bar(
            f"{words(row.get('reason'), 40)}",
            float(whole_number(row.get("connections"))),
            f"{count(row.get('connections'))} (by {words(row.get('closed_by'), 12)})",
            {"server": "var(--s2)", "peer": "var(--s1)"}.get(str(row.get("closed_by")), "var(--s7)"),
        )
        for row in rows
    ]
    said = ". ".join(f"{bar.label}: {bar.text}" for bar in bars[:MOST_BARS])
    shape = Bars(name="ends", title="How did connections end?", description=said, bars=bars)
    table = [
        [words(row.get("reason"), 80), words(row.get("closed_by"), 12), count(row.get("connections"))] for row in rows
    ]
    legend = [("by the peer", "var(--s1)"), ("by the server", "var(--s2)"), ("still open", "var(--s7)")]
    return Figure(shape, ("reason", "closed by", "connections"), table, legend)
