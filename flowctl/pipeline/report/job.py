"""``flowctl analyze report``: from the tables that the other jobs left in a folder to one HTML page in it.

The page holds what the tables hold and nothing that was computed elsewhere. A job that failed or was not run has no
figures on the page, even if an earlier run has left its tables: old figures beside new ones would be a lie. What became
of the jobs stands in ``summary.json``, which `flowctl analyze` keeps in the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from flowctl.errors import ConfigError
from flowctl.pipeline.report import gather, outcomes
from flowctl.pipeline.report.data import Cut, JobNote, JobState, ReportData
from flowctl.pipeline.report.page import render
from flowctl.pipeline.spark.session import one_line
from flowctl.pipeline.tables import io
from flowctl.pipeline.tables.accounts import JobResult
from flowctl.pipeline.tables.place import Place
from flowctl.printable import foreign

REPORT_FILE: Final = "report.html"
SUMMARY_FILE: Final = "summary.json"
SUMMARY_FORMAT: Final = 1
"""Counted up when a key goes or changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options of the job.

    Args:
        jobs: what became of the other jobs. None: as `SUMMARY_FILE` says; what it does not mention counts as done if
            its tables are there.
    """

    jobs: Mapping[str, JobNote] | None = None


def run(spark: SparkSession, events: str, out: str, options: ReportOptions | None = None) -> JobResult:
    """Write the page of what is in `out`, whole or not at all.

    Args:
        spark: session.
        events: folder of the records: named on the page; read only for pictures over a time of minutes, and only if
            it is still there.
        out: folder with the tables of the other jobs; the page goes there.
        options: see `ReportOptions`. None: all defaults.

    Returns:
        Summary: which sections have figures (`sections`), and `bytes` of the page.

    Raises:
        ConfigError: there is no table in `out`.
        FlowctlError: the page cannot be written.
    """
    options = options or ReportOptions()
    place = Place(spark, out)
    jobs = dict(read_notes(place) if options.jobs is None else options.jobs)
    data = collect_data(spark, place, events, jobs)
    found = sections_of(data)
    if not found and options.jobs is None:
        raise ConfigError(
            f"there is nothing to report on in {out}",
            hint=f"run `flowctl analyze all {events} --out {out}`, or a single job, first",
        )
    page = render(data)
    place.write_text(REPORT_FILE, page)
    return JobResult(
        name="report",
        outputs={"report": place.path(REPORT_FILE)},
        summary={"sections": found, "bytes": len(page.encode())},
    )


def read_notes(place: Place) -> dict[str, JobNote]:
    """Return what the summary beside the tables says of the jobs; {}: there is none that can be read."""
    text = place.read_text(SUMMARY_FILE)
    if text is None:
        return {}
    try:
        jobs = json.loads(text).get("jobs", {})
        return {str(name): JobNote.from_dict(str(name), values) for name, values in jobs.items()}
    except (ValueError, AttributeError, RecursionError):
        return {}


def write_notes(place: Place, events: str, jobs: Mapping[str, JobNote]) -> None:
    """Write the summary of all jobs, for machines and for later reports.

    Raises:
        FlowctlError: it cannot be written.
    """
    whole = {
        "format": SUMMARY_FORMAT,
        "events": events,
        "made_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "jobs": {name: note.as_dict() for name, note in jobs.items()},
    }
    place.write_text(SUMMARY_FILE, json.dumps(whole, ensure_ascii=False, indent=1, default=str) + "\n")


def note_of(result: JobResult, took_s: float | None = None) -> JobNote:
    """Return what a job that ended well is remembered by."""
    return JobNote(
        result.name,
        JobState.DONE,
        accounts=[item.as_dict() for item in result.accounts],
        took_s=took_s,
        summary=result.summary,
        outputs=result.outputs,
    )


def keep_note(spark: SparkSession, events: str, out: str, result: JobResult, took_s: float | None = None) -> None:
    """Enter a job that was run by itself into the summary of the folder, so that a later report knows of it.

    Raises:
        FlowctlError: the summary cannot be written.
    """
    place = Place(spark, out)
    write_notes(place, events, {**read_notes(place), result.name: note_of(result, took_s)})


def sections_of(data: ReportData) -> list[str]:
    """Return the jobs whose tables were found."""
    found = {
        "sessions": data.whole,
        "fleet": data.streams or data.subnets or data.moments,
        "abuse": data.scores or data.bans,
        "whatif": data.choices,
        "capacity": data.capacity,
    }
    return [name for name, part in found.items() if part is not None]


def collect_data(spark: SparkSession, place: Place, events: str, jobs: Mapping[str, JobNote]) -> ReportData:
    """Return the figures of all tables in a folder, those of jobs that failed left out.

    A table that cannot be read leaves its section empty, with the reason; the others are shown.
    """
    data = ReportData(events=events, made_at=datetime.now(UTC), jobs=jobs)
    takers: dict[str, Callable[[_Source, ReportData], ReportData]] = {
        "sessions": _take_sessions,
        "fleet": _take_fleet,
        "abuse": _take_abuse,
        "whatif": _take_whatif,
        "capacity": _take_capacity,
    }
    unreadable: dict[str, str] = {}
    for name, take in takers.items():
        if data.job(name).state is JobState.FAILED or (name not in jobs and jobs and _all_known(jobs)):
            continue
        try:
            data = take(_Source(spark, place, events), data)
        except Exception as error:  # noqa: BLE001 - any table may be broken in any way, and one must not cost the others
            unreadable[name] = foreign(one_line(error), 300)
    return replace(data, unreadable=unreadable)


def _all_known(jobs: Mapping[str, JobNote]) -> bool:
    """Return whether the notes are of a run of all jobs, after which a job that is not mentioned left no tables."""
    return "report" in jobs


@dataclass(frozen=True, slots=True)
class _Source:
    """Where tables and files are taken from."""

    spark: SparkSession
    place: Place
    events: str

    def table(self, name: str) -> DataFrame | None:
        """Return a table; None: there is none."""
        return gather.read(self.spark, self.place.path(name)) if self.place.exists(name) else None


def _take_sessions(source: _Source, data: ReportData) -> ReportData:
    sessions = source.table("sessions")
    if sessions is None:
        return data
    # Read once and asked some eight times: worth keeping, in memory where it fits and on disk where it does not.
    sessions = sessions.persist()
    try:
        whole, began_at, ended_at = gather.whole(sessions)
        nodes, node_count = gather.nodes(sessions)
        return replace(
            data,
            whole=whole,
            began_at=began_at,
            ended_at=ended_at,
            nodes=nodes,
            node_count=node_count,
            closes=gather.closes(sessions),
            blames=gather.blames(sessions),
            drops=gather.drops(sessions),
            picture_shares=gather.picture_shares(sessions),
            worst=gather.worst(sessions),
            delay_curves=gather.delay_curves(sessions),
        )
    finally:
        sessions.unpersist()


def _take_fleet(source: _Source, data: ReportData) -> ReportData:
    streams, subnets = source.table("fleet_streams"), source.table("fleet_subnets")
    if streams is not None:
        moments_from, moment_s, moments = _moments(source, data, streams)
        data = replace(
            data,
            moments_from=moments_from,
            moment_s=moment_s,
            moments=moments,
            streams=outcomes.streams(streams),
        )
    if subnets is not None:
        data = replace(data, subnets=outcomes.subnets(subnets))
    return data


def _moments(source: _Source, data: ReportData, streams: DataFrame) -> outcomes.Moments:
    """Return the figures over time: from the samples where a minute, the grain of `fleet_streams`, would be too coarse.

    Records that have gone since, or that are of another kind, are no reason to have no picture.
    """
    if data.began_at is not None and data.ended_at is not None:
        moment_s = outcomes.moment_length_s((data.ended_at - data.began_at).total_seconds())
        if moment_s < outcomes.FLEET_MINUTE_S and io.has_table(source.spark, source.events, "flow_samples"):
            try:
                samples = io.read_table(source.spark, source.events, "flow_samples", count="later").frame
                return outcomes.moments_of_samples(samples, data.began_at, moment_s)
            except ConfigError:
                pass
    return outcomes.moments_of_fleet(streams)


def _take_abuse(source: _Source, data: ReportData) -> ReportData:
    scores = source.table("abuse_scores")
    text = source.place.read_text("bans.jsonl")
    return replace(
        data,
        scores=None if scores is None else outcomes.scores(scores),
        bans=None if text is None else outcomes.bans(text),
    )


def _take_whatif(source: _Source, data: ReportData) -> ReportData:
    choices = source.table("whatif_choices")
    return replace(
        data,
        choices=None if choices is None else outcomes.choices(choices),
        limits_toml=source.place.read_text("limits.toml"),
    )


def _take_capacity(source: _Source, data: ReportData) -> ReportData:
    def largest(name: str, by: str) -> Cut | None:
        table = source.table(name)
        return None if table is None else outcomes.largest(table, by)

    table = source.table("capacity")
    return replace(
        data,
        capacity=None if table is None else outcomes.capacity(table),
        capacity_nodes=largest("capacity_nodes", "load_peak"),
        capacity_streams=largest("capacity_streams", "viewers_mean"),
        capacity_places=largest("capacity_places", "viewers_peak"),
    )
