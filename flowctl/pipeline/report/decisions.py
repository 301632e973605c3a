"""The second half of the report: what to do about it. Limits, bans, nodes, and the streams and networks concerned.

Tables of choices and scores are as wide as their job makes them; what is shown here are the columns that a decision
needs, and the whole table lies beside the page. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowctl.charts.page import Figure
from flowctl.charts.pictures import MOST_BARS, Bar, Bars, Dot, Dots, Lines, Series
from flowctl.pipeline.report.answers import left_out, missing, plural
from flowctl.pipeline.report.data import Cut, ReportData, Row, number
from flowctl.pipeline.report.pictures import count, ms, percent, seconds, size, words

_PRESENT: Final = "in force"
_RECOMMENDED: Final = "recommended"


@dataclass(frozen=True, slots=True)
class Shown:
    """A table of the page.

    Args:
        heads: of the columns.
        rows: plain texts.
        note: how much of it is left out, or how to read it.
        wordy: whether its last column is text.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    wordy: bool = False


def first_of(row: Row, *names: str) -> Any:
    """Return the first value of these columns that is there."""
    return next((row[name] for name in names if row.get(name) is not None), None)


# ------------------------------------------------------------------------------------------------ limits


def front(data: ReportData) -> Figure | None:
    """Return the choices of limits: disconnects against delay, memory as the size of a dot; None: there are none."""
    rows = () if data.choices is None else data.choices.rows
    dots = [dot for row in rows if (dot := _dot(row)) is not None]
    if not dots:
        return None
    marked = [dot for dot in dots if dot.label]
    said = ". ".join(dot.title.replace("\n", ", ") for dot in marked) or f"{len(dots)} choices"
    shape = Dots(
        name="front",
        title="Disconnects against delay, by choice of limits",
        description=said,
        dots=dots,
        x_label="viewers disconnected",
        y_label="delay, p95",
        x_text=percent,
        y_text=ms,
    )
    legend = [
        ("on the front: nothing else is better in every respect", "var(--s1)"),
        ("beaten by another choice", "var(--quiet)"),
        (_PRESENT, "var(--s4)"),
        (_RECOMMENDED, "var(--s3)"),
    ]
    return Figure(shape, legend=legend, note="The area of a dot is the memory that the choice needs.")


def _dot(row: Row) -> Dot | None:
    x, y = number(row.get("disconnected_share")), number(row.get("delay_p95_ms"))
    if x is None or y is None:
        return None
    memory = number(_memory(row)) or 0.0
    label = " and ".join(_marks(row))
    on_front = bool(row.get("on_front"))
    paint = "var(--s1)" if on_front else "var(--quiet)"
    if row.get("recommended"):
        paint = "var(--s3)"
    elif row.get("in_force"):
        paint = "var(--s4)"
    name = f"{label}: {choice_text(row)}" if label else choice_text(row)
    title = f"{name}\ndisconnected: {percent(x)}\ndelay p95: {ms(y)}\nmemory: {size(memory)}"
    return Dot(x, y, memory, title, paint, label, on_front)


def _marks(row: Row) -> list[str]:
    return [name for key, name in (("recommended", _RECOMMENDED), ("in_force", _PRESENT)) if row.get(key)]


def _memory(row: Row) -> Any:
    return first_of(row, "memory_peak_bytes", "memory_p95_bytes", "memory_mean_bytes")


def choice_text(row: Row) -> str:
    """Return a choice as one writes it down: limits, policy, target delay."""
    text = first_of(row, "choice", "limits", "choice_id")
    return words(text, 160)


def better_limits(data: ReportData) -> str:
    """Return which limits would be better, why, and what they change."""
    if data.choices is None:
        return missing(data, "whatif")
    if not data.choices.rows:
        return "Not known: there were no viewers that a choice could have changed anything for."
    chosen = next((row for row in data.choices.rows if row.get("recommended")), None)
    present = next((row for row in data.choices.rows if row.get("in_force")), None)
    if chosen is None:
        return f"{plural(data.choices.total, 'choice')} were tried; none meets what was asked for."
    if present is not None and present.get("recommended"):
        best = f"None: of {plural(data.choices.total, 'choice')} the one in force is the best ({choice_text(chosen)})."
        return " ".join(filter(None, [best, _audiences(data.job("whatif").summary)]))
    said = [f"Of {plural(data.choices.total, 'choice')} this one: {choice_text(chosen)}."]
    if present is not None:
        changes = (
            ("viewers disconnected", "disconnected_share", percent),
            ("p95 of the delay", "delay_p95_ms", ms),
            ("p99", "delay_p99_ms", ms),
            ("dropped", "dropped_share", percent),
            ("memory of one viewer, at most", "memory_peak_bytes", size),
        )
        told = [
            f"{what} {show(present.get(name))} \N{RIGHTWARDS ARROW} {show(chosen.get(name))}"
            for what, name, show in changes
            if number(present.get(name)) is not None and number(chosen.get(name)) is not None
        ]
        said.append(f"Against the one in force: {'; '.join(told)}." if told else "")
    said += [_objective(data.job("whatif").summary), _audiences(data.job("whatif").summary)]
    return " ".join(part for part in said if part)


def _audiences(summary: Row) -> str:
    """Return that some viewers had a target delay or policy of their own, which no choice has; "" if none had."""
    found = summary.get("audiences")
    if not found:
        return ""
    return (
        f"Audiences had a target delay or policy of their own ({words(found, 200)}): here their viewers were judged "
        "with those of each choice, and they keep their own under any limits file."
    )


def _objective(summary: Row) -> str:
    """Return what was asked for and why this choice is the answer, as the job tells it; "" if it does not."""
    asked, why = summary.get("objective"), summary.get("why")
    if asked is None or why is None:
        return ""
    kept = "" if summary.get("bounds_kept") in (None, True) else " No choice keeps all bounds that were asked for."
    return f"Asked for: {words(asked, 200)}; chosen for the {words(why, 300)}.{kept}"


def choices(data: ReportData) -> Shown | None:
    """Return the choices as a table; None: there are none."""
    cut = data.choices
    if cut is None:
        return None
    heads = (
        "choice",
        "",
        "disconnected",
        "delay p50",
        "delay p95",
        "delay p99",
        "memory",
        "dropped",
        "assumed",
        "on the front",
    )
    rows = [
        [
            choice_text(row),
            ", ".join(_marks(row)),
            percent(row.get("disconnected_share")),
            ms(row.get("delay_p50_ms")),
            ms(row.get("delay_p95_ms")),
            ms(row.get("delay_p99_ms")),
            size(_memory(row)),
            _dropped(row),
            percent(row.get("assumed_share")),
            "yes" if row.get("on_front") else "",
        ]
        for row in cut.rows
    ]
    more = "Delay, drops and states are of the recorded time; assumed is what was tried beyond it, to see who is cut."
    return Shown(heads, rows, f"{left_out(cut, 'choices')} {more}".strip())


def _dropped(row: Row) -> str:
    share = row.get("dropped_share")
    return percent(share) if share is not None else count(row.get("dropped_messages"))


# ------------------------------------------------------------------------------------------------ abuse


def score_bars(data: ReportData) -> Figure | None:
    """Return the highest scores; None: nobody has any."""
    rows = () if data.scores is None else data.scores.rows
    scored = [row for row in rows if (number(row.get("score")) or 0.0) > 0]
    if not scored:
        return None
    bars = [
        Bar(
            words(_who(row), 48),
            number(row.get("score")) or 0.0,
            f"{number(row.get('score')):,.1f}{' (banned)' if row.get('banned') else ''}",
            "var(--s6)" if row.get("banned") else "var(--quiet)",
        )
        for row in scored[:MOST_BARS]
    ]
    said = ". ".join(f"{bar.label}: {bar.text}" for bar in bars)
    shape = Bars(name="scores", title="Who behaved worst?", description=said, bars=bars)
    return Figure(shape, legend=[("on the ban list", "var(--s6)"), ("not on it", "var(--quiet)")])


def _who(row: Row) -> Any:
    return first_of(row, "cidr", "address", "peer_ip", "subnet")


def evidence_text(value: Any) -> str:
    """Return evidence, a map or its JSON text, as one line: what and how often, the most frequent first."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return words(value, 200)
    if not isinstance(value, Mapping):
        return "-"
    items = sorted(value.items(), key=lambda item: (-(number(item[1]) or 0.0), str(item[0])))
    return ", ".join(f"{words(name, 60)}: {_figure(amount)}" for name, amount in items[:8]) or "-"


def _figure(value: Any) -> str:
    found = number(value)
    return words(value, 40) if found is None else f"{found:,.0f}" if found == int(found) else f"{found:,.2f}"


VERDICT_WORDS: Final = {
    "ban": "banned",
    "subnet_ban": "banned with its subnet",
    "allowed": "on the allow list",
    "no_address": "no address to ban",
    "shared": "limited: others behave there",
    "limit": "limited",
    "watch": "no: not enough yet",
    "ok": "no",
}
"""The words of `abuse_scores.verdict` for people."""


def scores(data: ReportData) -> Shown | None:
    """Return the scores as a table; None: there are none."""
    cut = data.scores
    if cut is None:
        return None
    rows = [
        [
            words(_who(row), 60),
            _score(row),
            VERDICT_WORDS.get(str(row.get("verdict")), words(row.get("verdict"), 24)),
            count(row.get("connections")),
            seconds(None if (hours := number(row.get("standing_hours"))) is None else hours * 3600),
            evidence_text(row.get("evidence")),
        ]
        for row in cut.rows
    ]
    heads = ("address or subnet", "score", "banned", "connections", "time it behaved", "evidence")
    note = left_out(cut, "addresses and subnets with evidence against them")
    more = "Evidence is halved with each half-life of its age; time in which an address behaved counts for it."
    return Shown(heads, rows, f"{note} {more}".strip(), wordy=True)


def _score(row: Row) -> str:
    found = number(row.get("score"))
    return "-" if found is None else f"{found:,.2f}"


def bans(data: ReportData) -> Shown | None:
    """Return the ban list as a table; None: there is none."""
    cut = data.bans
    if cut is None:
        return None
    rows = [
        [
            words(row.get("cidr"), 60),
            _score(row),
            words(row.get("action") or "ban", 10),
            words(row.get("expires") or "never", 30),
            evidence_text(row.get("evidence")),
        ]
        for row in cut.rows
    ]
    return Shown(("address or subnet", "score", "action", "until", "evidence"), rows, left_out(cut, "bans"), wordy=True)


# ------------------------------------------------------------------------------------------------ capacity


def carries(data: ReportData) -> str:
    """Return how many viewers a node carries, and how sure that is."""
    if data.capacity is None:
        return missing(data, "capacity")
    summary = data.job("capacity").summary
    answer = first_of(summary, "answer", "in_words")
    if answer is not None:
        return words(answer, 1500)
    viewers = first_of(summary, "viewers_per_node")
    if viewers is None:
        return "The job capacity has left its table; its answer is not in the summary."
    said = f"A node carries {plural(viewers, 'viewer')}"
    memory = first_of(summary, "memory_bytes_per_node", "memory_per_node_bytes")
    if memory is not None:
        said += f" and needs {size(memory)} for them"
    error = number(first_of(summary, "error_share", "error"))
    return f"{said}." if error is None else f"{said}; against a real load test the error was {percent(abs(error))}."


def capacity_curve(data: ReportData) -> Figure | None:
    """Return how busy a node is by its viewers; None: there is no curve."""
    rows = () if data.capacity is None else data.capacity.rows
    points = _points(rows, "busy_p95")
    if len(points) < 2:
        return None
    edges = [_points(rows, name) for name in ("busy_low", "busy_high")]
    # The quiet lines first: the prediction is drawn over what it may be off by.
    series = [Series("by the residual of the fit", edge, 0) for edge in edges if edge]
    series.append(Series("predicted, for 95 % of the nodes", points, 1))
    chart = Lines(
        name="capacity-curve",
        title="How busy is a node?",
        description=f"{plural(points[0][0], 'viewer')}: {points[0][1]:.0f} % of the thread. "
        f"{plural(points[-1][0], 'viewer')}: {points[-1][1]:.0f} %",
        series=series,
        x_label="viewers of a node",
        y_label="of the time of a thread",
        y_text=lambda value: f"{value:.0f} %",
    )
    legend = [("predicted, for 95 % of the nodes", "var(--s1)")]
    if len(series) > 1:
        legend.append(("how far off, by the residual of the fit", "var(--quiet)"))
    return Figure(chart, legend=legend)


def _points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """Return a column over the number of viewers, in percent."""
    pairs = ((number(row.get("viewers")), number(row.get(name))) for row in rows)
    return sorted((x, y * 100) for x, y in pairs if x is not None and y is not None)


def capacity(data: ReportData) -> Shown | None:
    """Return the table of the job as it is, since its columns are its answer; None: there is none."""
    cut = data.capacity
    if cut is None or not cut.rows:
        return None
    heads = list(cut.rows[0])
    rows = [[_cell(name, row.get(name)) for name in heads] for row in cut.rows]
    return Shown([name.replace("_", " ") for name in heads], rows, left_out(cut, "rows"))


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    found = number(value)
    if found is None:
        return "-" if value is None else words(value, 200)
    if name.endswith("_bytes"):
        return size(found)
    if name.endswith("_ms"):
        return ms(found)
    if name.endswith("_share") or name.startswith("busy"):
        return percent(found)
    return f"{found:,.0f}" if found == int(found) else f"{found:,.3g}" if abs(found) < 1000 else f"{found:,.0f}"


# ------------------------------------------------------------------------------------------------ fleet


def fleet(data: ReportData) -> str:
    """Return how many streams and networks there are, and where the trouble was."""
    if data.streams is None and data.subnets is None:
        return missing(data, "fleet")
    said = []
    if data.streams is not None:
        said.append(f"{plural(data.streams.total, 'stream')}")
    if data.subnets is not None:
        said.append(f"{plural(data.subnets.total, 'network')}")
    worst = _worst(data.streams)
    return f"{' and '.join(said)}.{worst}"


def _worst(cut: Cut | None) -> str:
    rows = [] if cut is None else [row for row in cut.rows if (number(row.get("trouble_share")) or 0.0) > 0]
    if not rows:
        return ""
    row = max(rows, key=lambda item: number(item.get("trouble_share")) or 0.0)
    return (
        f" Of the streams shown, {words(row.get('stream'), 60)} had the largest share of trouble: "
        f"{percent(row.get('trouble_share'))} of its viewers' time."
    )


_FLEET_HEADS: Final = (
    *("viewers", "watched", "pictures", "below 80 %", "not READY"),
    *("delay p50", "delay p95", "delay p99", "dropped"),
)


def _fleet_cells(row: Row) -> list[str]:
    return [
        count(row.get("viewers")),
        ms(row.get("viewer_ms")),
        percent(row.get("picture_share")),
        percent(row.get("below_80_share")),
        percent(row.get("trouble_share")),
        ms(row.get("delay_p50_ms")),
        ms(row.get("delay_p95_ms")),
        ms(row.get("delay_p99_ms")),
        percent(row.get("drop_share")),
    ]


def streams(data: ReportData) -> Shown | None:
    """Return the streams as a table; None: there are none."""
    cut = data.streams
    if cut is None:
        return None
    rows = [
        [words("/".join(str(row[n]) for n in ("app", "stream") if row.get(n)), 60), *_fleet_cells(row)]
        for row in cut.rows
    ]
    return Shown(("stream", *_FLEET_HEADS), rows, left_out(cut, "streams"))


def subnets(data: ReportData) -> Shown | None:
    """Return the networks as a table; None: there are none."""
    cut = data.subnets
    if cut is None:
        return None
    rows = [[words(row.get("subnet"), 60), *_fleet_cells(row)] for row in cut.rows]
    return Shown(("network", *_FLEET_HEADS), rows, left_out(cut, "networks"))
