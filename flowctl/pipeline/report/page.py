"""The report of the pipeline as one HTML page (pure).

What to do comes first, each answer with how sure it is; then what viewers felt; then what the answers rest on;
bookkeeping last: what was read, by which job, and what could not be used.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

from flowctl.charts.page import Figure, figures, page, table, text, tiles
from flowctl.charts.words import figure, ms, percent, share, size, span, words
from flowctl.pipeline.report.answers import Advice, answers, recorded
from flowctl.pipeline.report.evidence import DIMENSIONS, Shown, bars, delays, front, shown, states
from flowctl.pipeline.report.found import Found
from flowctl.printable import printable

STYLE: Final = """
:root{--calm:#e9e8e3}@media(prefers-color-scheme:dark){:root{--calm:#2b2b28}}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0 20px;font-size:13px}nav a{color:var(--soft)}
.part{margin:0 0 34px}.part>h2{font-size:19px;margin:0 0 6px}.part>p{max-width:78ch}
.part>section,.part .plots{margin-top:14px}.plots>section:only-child{max-width:660px}
.advice{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}
.advice section{margin:0;display:flex;flex-direction:column;gap:6px;overflow-wrap:anywhere}.advice p{margin:0}
.advice h3{font-size:13px;font-weight:500;color:var(--soft);margin:0}.advice .do{color:var(--ink);font-weight:600}
.advice .sure{font-size:13px;border-top:1px solid var(--edge);padding-top:6px;margin-top:auto}
pre{background:var(--paper);border:1px solid var(--edge);border-radius:6px;padding:10px 12px;overflow-x:auto;margin:0;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,monospace}
""".strip()
_KINDS: Final = {"act": "bad", "fine": "good", "unknown": "doubt"}
_ASKED: Final = {
    "limits": "Which limits?",
    "bans": "Whom to keep out?",
    "capacity": "How many more viewers?",
    "calls": "Whom to call?",
    "network": "Whom to call? A network",
    "publisher": "Whom to call? A publisher",
    "node": "Whom to call? Who looks after a node",
}
PARTS: Final = {
    "do": "What to do",
    "felt": "What viewers felt",
    "trouble": "When was trouble, and whose fault was it?",
    "limits": "What does the choice of limits rest on?",
    "bans": "Who behaved badly?",
    "capacity": "How full are the nodes?",
    "read": "What was read, and what could not be used?",
}


def render(found: Found) -> str:
    """Return the page."""
    inner = {"do": _do, "felt": _felt, "trouble": _trouble, "limits": _limits, "bans": _bans, "capacity": _capacity,
             "read": _read}  # fmt: skip
    links = "".join(f'<a href="#{name}">{text(title)}</a>' for name, title in PARTS.items())
    window = f" {words(found.window, 100)}," if found.window else ""
    said = f"{text(window)} analyzed at {found.made_at:%Y-%m-%d %H:%M:%S} UTC"
    header = (
        f"<header><h1>What the servers saw</h1><p>Records of <code>{text(found.events, 500)}</code>,{said}</p></header>"
    )
    parts = [
        "\n".join(
            [f'<div class="part" id="{name}"><h2>{text(title)}</h2>', *filter(None, inner[name](found)), "</div>"]
        )
        for name, title in PARTS.items()
    ]
    footer = "<footer><p>Figures: the tables beside this page. Made by <code>flowctl analyze</code>.</p></footer>"
    body = [header, f"<nav>{links}</nav>", _failed(found), *parts, footer]
    return page(f"What the servers saw: {found.events}", body, style=STYLE)


def card(about: str, item: Advice) -> str:
    """Return an answer in its box, under a heading."""
    why = f"<p>{text(item.why, 2000)}</p>" if item.why else ""
    sure = f'<p class="sure"><b>How sure?</b> {text(item.sure, 2000)}</p>' if item.sure else ""
    do = f'<p class="do">{text(item.do, 2000)}</p>'
    return f'<section class="{_KINDS[item.kind]}"><h3>{text(about)}</h3>{do}{why}{sure}</section>'


def _do(found: Found) -> Sequence[str]:
    cards = "".join(card(_ASKED[item.about], item) for item in answers(found))
    return [_said(recorded(found)), f'<div class="advice">{cards}</div>']


def _said(line: str) -> str:
    return f"<p>{text(line, 2000)}</p>" if line else ""


def _failed(found: Found) -> str:
    """Return what failed, before any figure."""
    failed = [(name, note) for name, note in found.jobs.items() if note.get("state") == "failed"]
    told = [(name, f"{note.get('message')} {note.get('hint') or ''}") for name, note in failed]
    items = "".join(f'<li><b class="no">✕ {text(name)}</b> {text(why, 800)}</li>' for name, why in told)
    title = "<h3>These jobs failed; what they would have told is missing</h3>"
    return f'<section class="bad">{title}<ul>{items}</ul></section>' if items else ""


def _felt(found: Found) -> Sequence[str]:
    totals, known = found.totals, found.measures
    if totals is None:
        return [_said(found.why_not("sessions"))]
    parts = [
        (label, share(known[name].part, known[name].n, brief=True))
        for label, name in (
            ("of the attempts failed to start", "start_failures"),
            ("of the viewers had a stall", "stalled"),
            ("of the viewers were in trouble", "troubled"),
            ("were disconnected for being slow", "cut_slow"),
        )
        if name in known
    ]
    values = [
        (label, show(known[name].value))
        for label, name, show in (
            ("to the first frame, median", "first_frame_p50_ms", ms),
            ("of the pictures were delivered", "picture_share", percent),
            ("delay: p95 of the viewers' p95", "delay_p95_ms", ms),
        )
        if name in known
    ]
    whole = [("viewers", figure(totals.get("viewers"))), ("watched, all together", span(totals.get("play_s")))]
    drawn = (delays(found), bars(found, "pictures"))
    tables = [_box(shown(found, name), folded=name not in ("stream", "network")) for name in DIMENSIONS]
    return [
        tiles([*whole, *parts, *values, ("sent", size(totals.get("sent_bytes")))]),
        _plots(drawn),
        _box(shown(found, "all")),
        *tables,
    ]


def _trouble(found: Found) -> Sequence[str]:
    drawn = (states(found), *(bars(found, name) for name in ("blames", "drops", "closes")))
    return (
        [_plots(drawn), _box(shown(found, "worst")), _box(shown(found, "ingest"))]
        if found.totals
        else [_said(found.why_not("sessions"))]
    )


def _limits(found: Found) -> Sequence[str]:
    lines = "\n".join(printable(line[:500]) for line in (found.limits_toml or "").split("\n")[:200])
    note = "Save it as limits.toml: flowctl serve live --limits limits.toml reads it again whenever it changes."
    title = f'<h3>To paste into the server\'s configuration</h3><p class="note">{note}</p>'
    pasted = f"<section>{title}<pre>{html.escape(lines)}</pre></section>"
    parts = [
        _plots([front(found)]),
        pasted if found.limits_toml else "",
        _box(shown(found, "whatif_choices"), folded=True),
    ]
    return parts if any(parts) else [_said(found.why_not("whatif"))]


def _bans(found: Found) -> Sequence[str]:
    parts = [_box(shown(found, "abuse_scores")), _box(shown(found, "bans"))]
    nobody = (
        "Nobody: there is no evidence against any address."
        if "abuse_scores" in found.tables
        else found.why_not("abuse")
    )
    return parts if any(parts) else [_said(nobody)]


def _capacity(found: Found) -> Sequence[str]:
    said = found.summary("capacity")
    fleet = said.get("fleet")
    told = [said.get("answer"), fleet.get("answer") if isinstance(fleet, dict) else None]
    tables = [_box(shown(found, f"capacity_{name}")) for name in ("nodes", "streams")]
    parts = [*(_said(words(line, 1500)) for line in told if line), _plots([bars(found, "capacity_nodes")]), *tables]
    return parts if any(parts) else [_said(found.why_not("capacity"))]


def _read(found: Found) -> Sequence[str]:
    aside = [
        [words(reason, 100), words(item.get("table")), what, figure(often)]
        for item in found.accounts
        for what, name in (("rows", "by_reason"), ("files", "files_by_reason"))
        for reason, often in (item.get(name) or {}).items()
    ]
    jobs = [
        [
            words(name),
            words(note.get("state")),
            span(note.get("took_s")),
            "; ".join(map(str, note.get("warnings") or ())) or "-",
        ]
        for name, note in found.jobs.items()
    ]
    unread = [[words(name), words(why, 300)] for name, why in found.missing.items()]
    return [
        _box(shown(found, "accounts", found.accounts)) or _said("Not known: no job has said what it read."),
        _box(Shown("Set aside", ("reason", "table", "of", "how many"), aside))
        if aside
        else _said("Nothing was set aside."),
        _box(Shown("Jobs", ("job", "state", "took", "what it warns of"), jobs)) if jobs else "",
        _box(Shown("Tables that could not be read", ("table", "why"), unread)) if unread else "",
    ]


def _plots(found: Iterable[Figure | None]) -> str:
    return figures((item for item in found if item is not None), level=3)


def _box(found: Shown | None, *, folded: bool = False) -> str:
    """Return a table in its box; one that is folded is opened on demand. "" if there is none."""
    if found is None:
        return ""
    note = f'<p class="note">{text(found.note, 600)}</p>' if found.note else ""
    inner = note + table(found.heads, found.rows, kind=found.kind)
    if folded:
        return f"<section><details><summary>{text(found.title)}</summary>{inner}</details></section>"
    return f"<section><h3>{text(found.title)}</h3>{inner}</section>"
