"""The report of the pipeline as one HTML page (pure): sections said as data, and one template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from flowctl.analyze.report.answers import answers, recorded
from flowctl.analyze.report.evidence import TABLES, bars, cells_of, delays, front, note_of, states
from flowctl.analyze.report.found import MEASURES, ReportFindings, measured
from flowctl.charts.page import Figure, page
from flowctl.charts.words import figure, size, span

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


class Section(NamedTuple):
    """A part of the page; a picture is the bars of a table, or what a function draws."""

    title: str
    job: str  # whose results it shows; where there are none it says why
    pictures: Sequence[str | Callable[[ReportFindings], Figure | None]] = ()
    tables: Sequence[str] = ()


SECTIONS: Final = {
    "do": Section("What to do", ""),
    "felt": Section(
        "What viewers felt", "sessions", (delays, "pictures"),
        ("all", "stream", "application", "network", "node", "agent"),
    ),
    "trouble": Section(
        "When was trouble, and whose fault was it?", "sessions", (states, "blames", "closes"),
        ("worst", "ingest"),
    ),
    "limits": Section("What does the choice of limits rest on?", "whatif", (front,), ("whatif_choices",)),
    "bans": Section("Who behaved badly?", "abuse", (), ("abuse_scores",)),
    "capacity": Section("How full are the nodes?", "capacity", ("capacity_nodes",), ("capacity_nodes",)),
    "read": Section(
        "What was read, and what could not be used?", "", (), ("accounts", "aside", "jobs", "unread"),
    ),
}  # fmt: skip
"""Name of a section, for links -> what it shows, in the order of the page."""


def render(found: ReportFindings) -> str:
    failed = [(name, note) for name, note in found.jobs.items() if note.get("state") == "failed"]
    return page(
        "analyze/report/report.html",
        title=f"What the servers saw: {found.events}",
        found=found,
        failed=[(name, f"{note.get('message')} {note.get('hint') or ''}") for name, note in failed],
        sections=[_section(found, name, section) for name, section in SECTIONS.items()],
    )


def _section(found: ReportFindings, name: str, section: Section) -> dict[str, Any]:
    """Return what a section shows; where that is nothing, why."""
    drawn = [bars(found, item) if isinstance(item, str) else item(found) for item in section.pictures]
    said = {
        "do": recorded(found),
        "capacity": str(found.summary("capacity").get("answer") or ""),
        "read": "" if found.rows("aside") else "Nothing was set aside.",
    }
    made: dict[str, Any] = {
        "said": said.get(name),
        "advice": [(_ASKED[item.about], _KINDS[item.kind], item) for item in answers(found)] if name == "do" else (),
        "tiles": _tiles(found) if name == "felt" else (),
        "figures": [item for item in drawn if item is not None],
        "tables": [table for item in section.tables if (table := _table(found, item))],
    }
    made["said"] = made["said"] if any(made.values()) else found.why_not(section.job)
    return {"name": name, "title": section.title, **made}


def _table(found: ReportFindings, name: str) -> dict[str, Any] | None:
    shown, cells = TABLES[name], cells_of(found, name)
    if cells is None:
        return None
    heads, rows = cells
    return {"title": shown.title, "folded": shown.folded, "note": note_of(found, name), "heads": heads, "rows": rows}


def _tiles(found: ReportFindings) -> list[tuple[str, str]]:
    totals, known = found.totals or {}, found.measures
    if "viewers" not in totals:
        return []
    figured = [
        (item.words, measured(name, known[name])) for name, item in MEASURES.items() if item.tile and name in known
    ]
    first = [("viewers", figure(totals.get("viewers"))), ("watched, all together", span(totals.get("play_s")))]
    return [*first, *figured, ("sent", size(totals.get("sent_bytes")))]
