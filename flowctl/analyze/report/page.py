"""The report of the pipeline as one HTML page (pure): sections said as data, and one renderer.

What to do comes first, each answer with how sure it is; then what viewers felt; then what the answers rest on;
bookkeeping last: what was read, by which job, and what could not be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from flowctl.analyze.report.answers import answers, recorded
from flowctl.analyze.report.evidence import TABLES, bars, cells_of, delays, front, note_of, states
from flowctl.analyze.report.found import MEASURES, ReportFindings, measured
from flowctl.charts.page import Figure, figures, page, table, text, tiles
from flowctl.charts.words import figure, size, span, words

STYLE: Final = """
:root{--calm:#e9e8e3}@media(prefers-color-scheme:dark){:root{--calm:#2b2b28}}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0 20px;font-size:13px}nav a{color:var(--soft)}
.part{margin:0 0 34px}.part>h2{font-size:19px;margin:0 0 6px}.part>p{max-width:78ch}
.part>section,.part .plots{margin-top:14px}.plots>section:only-child{max-width:660px}
.advice{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}
.advice section{margin:0;display:flex;flex-direction:column;gap:6px;overflow-wrap:anywhere}.advice p{margin:0}
.advice h3{font-size:13px;font-weight:500;color:var(--soft);margin:0}.advice .do{color:var(--ink);font-weight:600}
.advice .sure{font-size:13px;border-top:1px solid var(--edge);padding-top:6px;margin-top:auto}
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


def paragraph(line: str) -> str:
    """Return a text as a paragraph; "" for none."""
    return f"<p>{text(line, 2000)}</p>" if line else ""


def _do(found: ReportFindings) -> str:
    """Return what was recorded, and the answers in their boxes, each under its question."""
    drawn = []
    for item in answers(found):
        sure = f'<p class="sure"><b>How sure?</b> {text(item.sure, 2000)}</p>' if item.sure else ""
        inner = f'<h3>{text(_ASKED[item.about])}</h3><p class="do">{text(item.do, 2000)}</p>{paragraph(item.why)}{sure}'
        drawn.append(f'<section class="{_KINDS[item.kind]}">{inner}</section>')
    return f'{paragraph(recorded(found))}<div class="advice">{"".join(drawn)}</div>'


def _table(found: ReportFindings, name: str) -> str:
    """Return a table in its box, one that is folded opened on demand; "" without rows."""
    shown, cells, note = TABLES[name], cells_of(found, name), note_of(found, name)
    if not cells:
        return ""
    inner = (f'<p class="note">{text(note, 600)}</p>' if note else "") + table(*cells, kind="words")
    if shown.folded:
        return f"<section><details><summary>{text(shown.title)}</summary>{inner}</details></section>"
    return f"<section><h3>{text(shown.title)}</h3>{inner}</section>"


def _felt(found: ReportFindings) -> str:
    totals, known = found.totals or {}, found.measures
    figured = [
        (item.words, measured(name, known[name])) for name, item in MEASURES.items() if item.tile and name in known
    ]
    first = [("viewers", figure(totals.get("viewers"))), ("watched, all together", span(totals.get("play_s")))]
    return tiles([*first, *figured, ("sent", size(totals.get("sent_bytes")))]) if "viewers" in totals else ""


class Section(NamedTuple):
    """A part of the page."""

    title: str
    job: str  # whose results it shows; where there are none it says why
    pictures: Sequence[
        str | Callable[[ReportFindings], Figure | None]
    ] = ()  # drawn of it: bars of a table, or a function
    tables: Sequence[str] = ()
    first: Callable[[ReportFindings], str] = lambda _: ""


SECTIONS: Final = {
    "do": Section("What to do", "", first=_do),
    "felt": Section(
        "What viewers felt", "sessions", (delays, "pictures"),
        ("all", "stream", "application", "network", "node", "agent"), _felt,
    ),
    "trouble": Section(
        "When was trouble, and whose fault was it?", "sessions", (states, "blames", "closes"),
        ("worst", "ingest"),
    ),
    "limits": Section("What does the choice of limits rest on?", "whatif", (front,), ("whatif_choices",)),
    "bans": Section("Who behaved badly?", "abuse", (), ("abuse_scores",)),
    "capacity": Section(
        "How full are the nodes?", "capacity", ("capacity_nodes",),
        ("capacity_nodes",), lambda found: paragraph(str(found.summary("capacity").get("answer") or "")),
    ),
    "read": Section(
        "What was read, and what could not be used?", "", (), ("accounts", "aside", "jobs", "unread"),
        lambda found: "" if found.rows("aside") else paragraph("Nothing was set aside."),
    ),
}  # fmt: skip
"""Name of a section, for links -> what it shows, in the order of the page."""


def render(found: ReportFindings) -> str:
    """Return the page."""
    links = "".join(f'<a href="#{name}">{text(section.title)}</a>' for name, section in SECTIONS.items())
    window = f" {words(found.window, 100)}," if found.window else ""
    said = f"{text(window)} analyzed at {found.made_at:%Y-%m-%d %H:%M:%S} UTC"
    header = (
        f"<header><h1>What the servers saw</h1><p>Records of <code>{text(found.events, 500)}</code>,{said}</p></header>"
    )
    footer = "<footer><p>Figures: the tables beside this page. Made by <code>flowctl analyze</code>.</p></footer>"
    parts = [_section(found, name, section) for name, section in SECTIONS.items()]
    body = [header, f"<nav>{links}</nav>", _failed(found), *parts, footer]
    return page(f"What the servers saw: {found.events}", body, style=STYLE)


def _section(found: ReportFindings, name: str, section: Section) -> str:
    drawn = [bars(found, item) if isinstance(item, str) else item(found) for item in section.pictures]
    parts = [section.first(found), figures((item for item in drawn if item is not None), level=3)]
    parts += [_table(found, item) for item in section.tables]
    inner = "".join(parts) or paragraph(found.why_not(section.job))
    return f'<div class="part" id="{name}"><h2>{text(section.title)}</h2>{inner}</div>'


def _failed(found: ReportFindings) -> str:
    """Return what failed, before any figure."""
    failed = [(name, note) for name, note in found.jobs.items() if note.get("state") == "failed"]
    told = [(name, f"{note.get('message')} {note.get('hint') or ''}") for name, note in failed]
    items = "".join(f'<li><b class="no">✕ {text(name)}</b> {text(why, 800)}</li>' for name, why in told)
    title = "<h3>These jobs failed; what they would have told is missing</h3>"
    return f'<section class="bad">{title}<ul>{items}</ul></section>' if items else ""
