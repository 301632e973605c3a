"""``flowctl analyze report``: from the results of the other jobs to one HTML page.

A job that failed or was not run has no figures on it, even if an earlier run has left its tables: old figures beside
new ones would be a lie. The summary of this job has the answers, and the figures over viewers with their errors, which
is what `flowctl.pipeline.compare` needs of a run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from flowctl.pipeline.job import Answer, Job, Parts
from flowctl.pipeline.report import gather
from flowctl.pipeline.report.answers import answers
from flowctl.pipeline.report.found import Cut, Found, Row, json_of
from flowctl.pipeline.report.page import render
from flowctl.printable import foreign

REPORT_FILE: Final = "report.html"
FIGURES: Final = 1
"""Counted up when a figure of the summary changes its meaning: such runs cannot be compared."""
_TABLES: Final[Mapping[str, tuple[str, tuple[str, ...], int, str]]] = {
    "whatif_choices": ("whatif", ("recommended", "in_force", "on_front"), 200, ""),
    "abuse_scores": ("abuse", ("banned", "score"), gather.MOST_ROWS, "points"),
    "capacity_nodes": ("capacity", ("load_peak",), gather.MOST_ROWS, ""),
    "capacity_streams": ("capacity", ("viewers_mean",), gather.MOST_ROWS, ""),
    "ingest": ("experience", ("gap_ms", "reconnects", "key_interval_max_ms"), gather.MOST_ROWS, ""),
}
"""Table -> job, what its first rows are the largest of, how many, column that must be above 0."""
_COMPARED: Final = ("stream", "network", "node")


def answer(parts: Parts, _: Any = None) -> Answer:
    """Write the page."""
    tables = gather.Tables(parts.staging.folder, parts.place.folder, since=parts.since, until=parts.until)
    jobs = {name: note.as_dict() for name, note in parts.notes.items()}
    before = json_of(tables.text("summary.json")).get("jobs")
    bounds = [f"{word} {at:%Y-%m-%d %H:%M} UTC" for word, at in (("from", parts.since), ("to", parts.until)) if at]
    found = collect(tables, parts.events, jobs or dict(before or {}), parts.accounts, " ".join(bounds))
    page = render(found)
    parts.write_text(REPORT_FILE, page)
    told = [asdict(item) for item in answers(found)]
    return Answer(summary={"answers": told, "figures": figures(found), "bytes": len(page.encode())})


def collect(
    tables: gather.Tables, events: str, jobs: Mapping[str, Any], accounts: Sequence[Row] = (), window: str = ""
) -> Found:
    """Return the figures of all results. A table that cannot be read costs its own section, with the reason."""
    missing: dict[str, str] = {}

    def read(job: str, name: str, take: Callable[[], Any], otherwise: Any) -> Any:
        if jobs and jobs.get(job, {}).get("state") != "done":
            return otherwise
        try:
            return take()
        except Exception as error:  # noqa: BLE001 - a table may be broken in any way, and must not cost the others
            missing[name] = foreign(f"{type(error).__name__}: {error}", 300)
            return otherwise

    found: dict[str, Cut] = {}
    for name, (job, order, most, where) in _TABLES.items():
        cuts = read(job, name, functools.partial(tables.top, name, order, most, where), {})
        found |= dict.fromkeys([name], cuts[""]) if cuts else {}
    found |= read("experience", "experience", lambda: tables.top("experience", ("viewers", "plays"), by="by"), {})
    bans = read("abuse", "bans.jsonl", lambda: tables.text("bans.jsonl"), None)
    if bans is not None:
        found["bans"] = gather.bans_of(bans)
    sessions = read("sessions", "sessions", lambda: gather.sessions_of(tables), None)
    return Found(
        events=events,
        made_at=datetime.now(UTC),
        window=window,
        jobs=jobs,
        accounts=accounts,
        totals=None if sessions is None else sessions.totals(),
        measures={} if sessions is None else sessions.measures(),
        curves={} if sessions is None else sessions.curves(),
        tables=found | ({} if sessions is None else sessions.tables()),
        limits_toml=read("whatif", "limits.toml", lambda: tables.text("limits.toml"), None),
        **read("fleet", "fleet_streams", lambda: gather.over_time(tables), {}),
        missing=missing,
    )


def figures(found: Found) -> dict[str, Any]:
    """Return what a later comparison needs: figures over viewers with errors, and who was how often in trouble."""
    in_force = next((row.get("choice") for row in found.rows("whatif_choices") if row.get("in_force")), None)
    return {
        "format": FIGURES,
        "events": found.events,
        "window": found.window,
        "totals": found.totals,
        "measures": {name: asdict(item) for name, item in found.measures.items()},
        "in_force": in_force,
        "groups": {
            name: {
                str(row["key"]): [row.get("troubled"), row.get("plays")] for row in found.rows(name) if row.get("key")
            }
            for name in _COMPARED
        },
    }


JOB: Final = Job(name="report", parts=(), results=(REPORT_FILE,), answer=answer)
