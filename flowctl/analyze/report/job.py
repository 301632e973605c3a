"""``flowctl analyze report``: from the results of the other jobs to one HTML page.

A job that failed or was not run has no figures on it: old figures beside new ones would be a lie. The summary has the
answers, and the figures over viewers with their errors, for `flowctl.analyze.compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from flowctl.analyze.job import AnalysisJob, JobAnswer, Parts
from flowctl.analyze.record import RECORD_FILE
from flowctl.analyze.report import evidence
from flowctl.analyze.report.answers import Advice, answers, recorded
from flowctl.analyze.report.found import FORMAT, MEASURES, ReportFindings, json_of, measured
from flowctl.analyze.report.gather import Tables, gather
from flowctl.charts.page import page
from flowctl.charts.words import count_of, figure, plural, share, size, span, value_text

_ASKED: Final = {
    "limits": "Which limits?",
    "bans": "Whom to keep out?",
    "capacity": "How many more viewers?",
    "calls": "Whom to call?",
}
CAUSES: Final = {
    "Viewers' own lines": (("limits", "network"), ("viewer_link", "policy")),
    "Streams that come to us badly": (("publisher",), ("publisher_burst",)),
    "Our own servers": (("capacity", "node"), ("server_loop",)),
    "Peers that mean harm": (("bans",), ()),
}
"""Cause of trouble -> the answers that are about it, and the blames of viewers that it is behind."""


class Section(NamedTuple):
    """A part of the page; a picture is the bars of a table, or what a function draws."""

    title: str
    job: str  # whose results it shows; where there are none it says why
    pictures: Sequence[str | Callable[[ReportFindings], evidence.Shot | None]] = ()
    tables: Sequence[str] = ()


SECTIONS: Final = {
    "do": Section("What to do", ""),
    "felt": Section(
        "What viewers felt", "sessions", (evidence.crowd, evidence.delays, "pictures", "renditions"),
        ("all", "sets", "stream", "application", "network", "node", "agent"),
    ),
    "trouble": Section(
        "When was trouble, and whose fault was it?", "sessions", (evidence.states, "blames", "closes"),
        ("ingest",),
    ),
    "worst": Section("Who was worst off, and what happened to them?", "sessions", (), ("worst",)),
    "limits": Section("What does the choice of limits rest on?", "whatif", (), ("whatif_choices",)),
    "bans": Section("Who behaved badly?", "abuse", (), ("abuse_scores",)),
    "capacity": Section("How full are the nodes?", "capacity", ("capacity_nodes",), ("capacity_nodes",)),
    "read": Section(
        "What was read, and what could not be used?", "", (), ("accounts", "aside", "jobs", "unread"),
    ),
}  # fmt: skip
"""Name of a section, for links -> what it shows, in the order of the page."""


def render(findings: ReportFindings) -> str:
    failed = [(name, note) for name, note in findings.jobs.items() if note.get("state") == "failed"]
    return page(
        "analyze/report/report.html",
        title=f"What the servers saw: {findings.events}",
        found=findings,
        figures_of=evidence.figures_of,
        failed=[(name, f"{note.get('message')} {note.get('hint') or ''}") for name, note in failed],
        sections=[_section(findings, name, section) for name, section in SECTIONS.items()],
    )


_STILL: Final = (
    "the time watched goes on until the server was last heard of; bytes, pictures and messages end with the last "
    "record of them, up to 5 minutes before."
)


def _section(findings: ReportFindings, name: str, section: Section) -> dict[str, Any]:
    """Return what a section shows; where that is nothing, why."""
    drawn = [evidence.bars(findings, item) if isinstance(item, str) else item(findings) for item in section.pictures]
    still = count_of(findings.summary("sessions").get("open"))
    said = {
        "do": recorded(findings),
        "felt": still and f"{plural(still, 'connection')} still open: {_STILL}",
        "capacity": str(findings.summary("capacity").get("answer") or ""),
        "read": "" if findings.rows("aside") else "Nothing was set aside.",
    }
    advised = answers(findings) if name == "do" else []
    made: dict[str, Any] = {
        "said": said.get(name),
        "causes": _causes(findings, advised),
        "quiet": [(kind, [(_ASKED[x.about], x) for x in advised if x.kind == kind])
                  for kind in ("fine", "unknown")] if advised else (),
        "tiles": _tiles(findings) if name == "felt" else (),
        "figures": [item for item in drawn if item] + (evidence.histories(findings) if name == "worst" else []),
        "tables": [table for item in section.tables if (table := evidence.shown(findings, item))],
    }  # fmt: skip
    made["said"] = made["said"] if any(made.values()) else findings.why_not(section.job)
    return {"name": name, "title": section.title, **made}


def _causes(findings: ReportFindings, advised: Sequence[Advice]) -> list[tuple[str, str, list[Advice]]]:
    """Return what is behind the trouble, how many viewers it has made, and the advice: what most suffer from first."""
    blames = {row.get("blame"): count_of(row.get("count")) for row in findings.rows("blames")}
    counts = {cause: sum(blames.get(blame, 0) for blame in behind) for cause, (_, behind) in CAUSES.items()}
    order, cards = sorted(CAUSES, key=lambda cause: -counts[cause]), []
    of_all = plural(sum(blames.values()), "viewer")
    for cause in order:
        about = CAUSES[cause][0] + ("calls",) * (cause == order[0])  # a call of nobody is about what most suffer from
        behind = f"behind {counts[cause]:,} of {of_all} in trouble" if counts[cause] else ""
        if advice := [item for item in advised if item.kind == "act" and item.about in about]:
            cards.append((cause, behind, advice))
    return cards


def _tiles(findings: ReportFindings) -> list[tuple[str, str, str]]:
    """Return the label, the value and the value of the day before of each figure that one looks for first."""
    totals, known, earlier = findings.totals or {}, findings.measures, findings.before.get(("all", "all"), {})
    if "viewers" not in totals:
        return []

    def before(name: str, of: str = "") -> str:
        if earlier.get(name) is None:
            return ""
        return share(earlier[name], earlier.get(of), brief=True) if of else value_text(name, earlier[name])

    figured = [
        (item.words, measured(name, known[name]), before(name, item.of if item.kind == "share" else ""))
        for name, item in MEASURES.items()
        if item.tile and name in known
    ]
    played = earlier.get("play_hours")
    return [
        ("viewers", figure(totals.get("viewers")), before("viewers")),
        ("watched, all together", span(totals.get("play_s")), span(played * 3600) if played else ""),
        *figured,
        ("sent", size(totals.get("sent_bytes")), before("sent_bytes")),
    ]


REPORT_FILE: Final = "report.html"


def answer(parts: Parts, _: Any = None) -> JobAnswer:
    tables = Tables(parts.place, since=parts.since, until=parts.until)
    jobs = {name: note.as_dict() for name, note in parts.notes.items()}
    # Alone it is given none: the record knows them.
    events = parts.events or str(json_of(parts.place.read_text(RECORD_FILE)).get("events") or "")
    bounds = [f"{word} {at:%Y-%m-%d %H:%M} UTC" for word, at in (("from", parts.since), ("to", parts.until)) if at]
    findings = gather(tables, events, jobs, parts.accounts, " ".join(bounds))
    parts.write_text(REPORT_FILE, render(findings))
    return JobAnswer(summary={"answers": [item._asdict() for item in answers(findings)], "figures": figures(findings)})


def figures(findings: ReportFindings) -> dict[str, Any]:
    """Return what a later comparison needs: figures over viewers with errors, and each viewer's troubles."""
    return {
        "format": FORMAT,
        "events": findings.events,
        "window": findings.window,
        "totals": findings.totals,
        "measures": findings.measures,
        "in_force": next((row.get("choice") for row in findings.rows("whatif_choices") if row.get("in_force")), None),
        "groups": {
            by: {str(row["key"]): [row.get("troubled"), row.get("plays")] for row in findings.rows(by) if row["key"]}
            for by in ("stream", "network", "node")
        },
    }


JOB: Final = AnalysisJob(name="report", parts=(), results=(REPORT_FILE,), answer=answer)
