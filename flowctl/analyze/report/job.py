"""``flowctl analyze report``: from the results of the other jobs to one HTML page.

A job that failed or was not run has no figures on it: old figures beside new ones would be a lie. The summary has the
answers, and the figures over viewers with their errors, for `flowctl.analyze.compare`.
"""

from __future__ import annotations

from typing import Any, Final

from flowctl.analyze.job import AnalysisJob, JobAnswer, Parts
from flowctl.analyze.record import RECORD_FILE
from flowctl.analyze.report.answers import answers
from flowctl.analyze.report.found import FORMAT, ReportFindings, json_of
from flowctl.analyze.report.gather import Tables, gather
from flowctl.analyze.report.page import render

REPORT_FILE: Final = "report.html"


def answer(parts: Parts, _: Any = None) -> JobAnswer:
    tables = Tables(parts.place, since=parts.since, until=parts.until)
    jobs = {name: note.as_dict() for name, note in parts.notes.items()}
    # Alone it is given none: the record knows them.
    events = parts.events or str(json_of(parts.place.read_text(RECORD_FILE)).get("events") or "")
    bounds = [f"{word} {at:%Y-%m-%d %H:%M} UTC" for word, at in (("from", parts.since), ("to", parts.until)) if at]
    found = gather(tables, events, jobs, parts.accounts, " ".join(bounds))
    parts.write_text(REPORT_FILE, render(found))
    return JobAnswer(summary={"answers": [item._asdict() for item in answers(found)], "figures": figures(found)})


def figures(found: ReportFindings) -> dict[str, Any]:
    """Return what a later comparison needs: figures over viewers with errors, and each viewer's troubles."""
    return {
        "format": FORMAT,
        "events": found.events,
        "window": found.window,
        "totals": found.totals,
        "measures": found.measures,
        "in_force": next((row.get("choice") for row in found.rows("whatif_choices") if row.get("in_force")), None),
        "groups": {
            name: {str(row["key"]): [row.get("troubled"), row.get("plays")] for row in found.rows(name) if row["key"]}
            for name in ("stream", "network", "node")
        },
    }


JOB: Final = AnalysisJob(name="report", parts=(), results=(REPORT_FILE,), answer=answer)
