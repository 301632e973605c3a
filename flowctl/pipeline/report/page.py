"""The report of the pipeline as one HTML page (pure).

Answers come first: who was slow and why, which limits would be better, whom to keep out, how many viewers a node
carries. Then what they rest on: how late viewers were, what happened, which streams and networks. Bookkeeping is last:
what was read, by which job, and what could not be used. Each answer is a sentence first, then a picture, then a table.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

from flowctl.charts.page import Figure, figures, page, table, text, tiles
from flowctl.pipeline.report import answers, decisions, fleets, pictures
from flowctl.pipeline.report.data import Cut, JobState, ReportData, whole_number
from flowctl.pipeline.report.pictures import count, ms, percent, seconds, size, words
from flowctl.printable import printable
from flowctl.units import format_duration

MORE_STYLE: Final = """
:root{--calm:#e9e8e3}@media(prefers-color-scheme:dark){:root{--calm:#2b2b28}}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0 20px;font-size:13px}nav a{color:var(--soft)}
.part{margin:0 0 30px}.part>h2{font-size:19px;margin:0 0 4px}.part>p{max-width:78ch;color:var(--ink)}
.part section{margin-top:14px}.plots>section:only-child{max-width:660px}
.part .plots{margin:14px 0 0}.part .plots section{margin:0}
.off>p{color:var(--muted)}
pre{background:var(--paper);border:1px solid var(--edge);border-radius:6px;padding:10px 12px;overflow-x:auto;margin:0;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,monospace}
.worst td:nth-child(10){white-space:normal;min-width:230px}
.figures th{white-space:normal;overflow-wrap:anywhere}.figures thead th{white-space:nowrap}
""".strip()

_FOOTER: Final = (
    "Figures are those of the tables beside this page, which were made from the records of the servers. "
    "Made by <code>flowctl analyze</code>."
)

_PARTS: Final = (
    ("slow", "Who was slow, and why?"),
    ("limits", "Which limits would be better?"),
    ("out", "Whom to keep out?"),
    ("capacity", "How many viewers does a node carry, and how many nodes?"),
    ("late", "How late were viewers?"),
    ("happened", "What happened?"),
    ("fleet", "Which streams and networks?"),
    ("unused", "What was read, and what could not be used?"),
)


def render(data: ReportData) -> str:
    """Return the page."""
    bodies = {
        "happened": _happened(data),
        "slow": _slow(data),
        "late": _late(data),
        "limits": _limits(data),
        "out": _out(data),
        "capacity": _capacity(data),
        "fleet": _fleet(data),
        "unused": _unused(data),
    }
    parts = [_part(name, title, *bodies[name]) for name, title in _PARTS]
    links = "".join(f'<a href="#{name}">{text(title)}</a>' for name, title in _PARTS)
    header = (
        f"<header><h1>What the servers saw</h1><p>Records of <code>{text(data.events, 500)}</code>, "
        f"analyzed at {data.made_at:%Y-%m-%d %H:%M:%S} UTC</p></header>"
    )
    footer = f"<footer><p>{_FOOTER}</p></footer>"
    body = [header, f"<nav>{links}</nav>", _failed(data), *parts, footer]
    return page(f"What the servers saw: {data.events}", body, style=MORE_STYLE)


def _part(name: str, title: str, answer: str, inner: Sequence[str], *, off: bool = False) -> str:
    """Return one question with its answer; `inner` is HTML already."""
    shown = [item for item in inner if item]
    kind = "part off" if off or not shown else "part"
    return "\n".join(
        [f'<div class="{kind}" id="{name}"><h2>{text(title)}</h2><p>{text(answer, 4000)}</p>', *shown, "</div>"]
    )


def _plots(found: Iterable[Figure | None]) -> str:
    return figures((item for item in found if item is not None), level=3)


def _box(title: str, inner: str, note: str = "") -> str:
    """Return a box with a title; `inner` is HTML already."""
    said = f'<p class="note">{text(note, 600)}</p>' if note else ""
    return f"<section><h3>{text(title)}</h3>{said}{inner}</section>"


_Part = tuple[str, Sequence[str]]


def _happened(data: ReportData) -> _Part:
    return answers.happened(data), [_tiles(data), _nodes(data)]


def _failed(data: ReportData) -> str:
    """Return what failed, before any figure."""
    failed = [note for note in data.jobs.values() if note.state is JobState.FAILED]
    if not failed:
        return ""
    items = "".join(
        f'<li><b class="no">✕ {text(note.name)}</b> {text(f"{note.message} {note.hint}", 800)}</li>' for note in failed
    )
    title = "These jobs failed; what they would have told is missing"
    return f'<section class="bad"><h3>{title}</h3><ul>{items}</ul></section>'


def _tiles(data: ReportData) -> str:
    """Return the few figures that one looks for first."""
    whole = data.whole
    if whole is None:
        return ""
    viewers = whole_number(whole.get("viewers"))
    troubled = whole_number(whole.get("troubled"))
    return tiles(
        [
            ("connections", count(whole.get("connections"))),
            ("of them viewers", count(viewers)),
            ("viewers that kept up all the time", percent((viewers - troubled) / viewers) if viewers else "-"),
            ("viewers disconnected for being slow", count(whole.get("cut_slow"))),
            ("delay: p95 of the viewers' p95", ms(whole.get("delay_p95_of_p95_ms"))),
            ("sent to viewers and publishers", size(whole.get("sent_bytes"))),
        ]
    )


def _jobs(data: ReportData) -> str:
    rows = []
    for note in data.jobs.values():
        if note.name == "report":
            continue  # it reads what the others have left, and is not done while this is written
        took = "-" if note.took_s is None else format_duration(note.took_s)
        for item in note.accounts or [{}]:
            figures = [count(item.get(name)) for name in ("files_in", "rows_in", "rows_out", "rows_quarantined")]
            rows.append([note.name, note.state.value, took, words(item.get("table")), *figures])
    heads = ("job", "state", "took", "table read", "files", "rows in", "rows out", "rows set aside")
    return _box("What was read", table(heads, rows, kind="words figures")) if rows else ""


def _nodes(data: ReportData) -> str:
    nodes = [[words(row.get("node")), count(row.get("connections")), count(row.get("viewers"))] for row in data.nodes]
    more = answers.left_out(Cut(data.nodes, data.node_count), "nodes")
    shown = table(("node", "connections", "viewers"), nodes)
    folded = f"<section><details><summary>The nodes</summary>{shown}<p>{text(more)}</p></details></section>"
    return folded if nodes else ""


def _slow(data: ReportData) -> _Part:
    found = (
        pictures.picture_shares(data),
        pictures.states_over_time(data),
        pictures.blame_shares(data),
        pictures.drops_by_class(data),
        pictures.ends(data),
    )
    return answers.slow(data), [_plots(found), _worst(data)]


_WORST_HEADS: Final = (
    "address", "stream", "there for", "pictures", "its line", "not READY", "worst state", "delay p99", "blame",
    "what was done about it", "agent", "node", "connection",
)  # fmt: skip


def _worst(data: ReportData) -> str:
    cut = data.worst
    if cut is None or not cut.rows:
        return ""
    rows = [
        [
            words(row.get("peer_ip"), 48),
            words("/".join(str(row[name]) for name in ("app", "stream") if row.get(name)), 48),
            seconds(row.get("duration_s")),
            percent(row.get("picture_share")),
            percent(row.get("line_of_stream")),
            ms(row.get("trouble_ms")),
            words(row.get("worst_state"), 16),
            ms(row.get("delay_p99_ms")),
            pictures.BLAME_WORDS.get(str(row.get("blame")), words(row.get("blame"), 24)),
            answers.viewer_done(row),
            words(row.get("user_agent"), 48),
            words(row.get("node"), 32),
            words(row.get("conn_id"), 24),
        ]
        for row in cut.rows
    ]
    said = "Pictures: what share of them it was sent. Its line: what it carries, of the rate of the stream."
    note = " ".join(filter(None, [said, answers.left_out(cut, "viewers in trouble")]))
    return _box("The viewers that were worst off", table(_WORST_HEADS, rows, kind="words worst"), note)


def _late(data: ReportData) -> _Part:
    return answers.late(data), [_plots((pictures.delay_distribution(data), pictures.delays_over_time(data)))]


def _limits(data: ReportData) -> _Part:
    toml = data.limits_toml
    paste = f"<pre>{html.escape(_lines(toml))}</pre>" if toml else ""
    note = "Save it as limits.toml; flowctl serve live --limits limits.toml reads it again whenever it changes."
    shown = [
        _plots([decisions.front(data)]),
        _box("To paste into the server's configuration", paste, note) if paste else "",
    ]
    return decisions.better_limits(data), [*shown, _folded("All choices, as figures", decisions.choices(data))]


def _lines(toml: str) -> str:
    """Return a file of several lines as it is, but for what cannot be printed and what is far too long."""
    return "\n".join(printable(line[:500]) for line in toml.split("\n")[:200])


def _cut_box(title: str, found: decisions.Shown | None) -> str:
    if found is None or not found.rows:
        return ""
    return _box(title, table(found.heads, found.rows, kind="words" if found.wordy else "figures"), found.note)


def _folded(title: str, found: decisions.Shown | None) -> str:
    """Return a long table that is opened on demand."""
    if found is None or not found.rows:
        return ""
    note = f"<p>{text(found.note, 600)}</p>" if found.note else ""
    return (
        f"<section><details><summary>{text(title)}</summary>{note}{table(found.heads, found.rows)}</details></section>"
    )


def _out(data: ReportData) -> _Part:
    shown = [
        _plots([decisions.score_bars(data)]),
        _cut_box("Scores and their evidence", decisions.scores(data)),
        _cut_box("The ban list", decisions.bans(data)),
    ]
    return answers.keep_out(data), shown


def _capacity(data: ReportData) -> _Part:
    shown = [
        _plots([decisions.capacity_curve(data), fleets.node_bars(data), fleets.stream_bars(data)]),
        _cut_box("Nodes: what each carries, and its load at its peak", fleets.nodes(data)),
        _cut_box("Streams: worth having at an edge?", fleets.streams(data)),
        _cut_box("Where viewers are, as far as records know", fleets.places(data)),
        _folded("Sizes of a node that were tried", decisions.capacity(data)),
    ]
    fleet = fleets.answer(data)
    return f"{fleet} One node: {decisions.carries(data)}" if fleet else decisions.carries(data), shown


def _fleet(data: ReportData) -> _Part:
    shown = [_cut_box("Streams", decisions.streams(data)), _cut_box("Networks", decisions.subnets(data))]
    return decisions.fleet(data), shown


def _unused(data: ReportData) -> _Part:
    rows = [[row["reason"], row["table"], count(row["rows"]), count(row["files"])] for row in data.set_aside()]
    shown = _box("Set aside", table(("reason", "table", "rows", "files"), rows, kind="words figures")) if rows else ""
    return answers.unused(data), [shown, _jobs(data)]
