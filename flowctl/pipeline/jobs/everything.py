"""``flowctl analyze all``: all jobs in one Spark session, then the report; results replace the earlier ones whole.

Theory of operation. The jobs run one after another (side by side they would compete for the same cores), each into a
staging folder within the output folder. One that fails is noted with its error and costs the others nothing, but for
those that read its tables. Then the report is made of what there is, the outputs take the place of the earlier ones by
renaming, and the summary is written last: who finds a summary finds all that it names. A run that is interrupted or
killed leaves the earlier results as they were.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyspark.sql import SparkSession

from flowctl.errors import ConfigError, FlowctlError
from flowctl.pipeline.report import job as report
from flowctl.pipeline.report.data import JobNote, JobState
from flowctl.pipeline.spark.session import mapped_errors
from flowctl.pipeline.tables.accounts import JobResult
from flowctl.pipeline.tables.banfile import BANS_FILE, locked, read_bans
from flowctl.pipeline.tables.place import Place
from flowctl.printable import foreign
from flowctl.server.bans import merge_bans, render

Runner = Callable[[SparkSession, str, str, Any], JobResult]


@dataclass(frozen=True, slots=True)
class Step:
    """One job of the run.

    Args:
        name: as on the command line.
        module: where its ``run`` is.
        outputs: what it leaves in the folder, files and folders of tables.
    """

    name: str
    module: str
    outputs: tuple[str, ...]

    def runner(self) -> Runner:
        """Return its function; loading it here makes a module that is broken one failed job."""
        found: Runner = importlib.import_module(self.module).run
        return found


STEPS: Final = (
    Step("sessions", "flowctl.pipeline.jobs.sessions", ("sessions",)),
    Step("fleet", "flowctl.pipeline.jobs.fleet", ("fleet_streams", "fleet_subnets")),
    Step("abuse", "flowctl.pipeline.jobs.abuse", ("abuse_scores", "bans.jsonl")),
    Step("whatif", "flowctl.pipeline.jobs.whatif", ("whatif_choices", "whatif_viewers", "limits.toml")),
    Step(
        "capacity",
        "flowctl.pipeline.jobs.capacity",
        ("capacity", "capacity_nodes", "capacity_streams", "capacity_places"),
    ),
)
"""In this order: later jobs may read the tables of earlier ones."""

SHARED_OUTPUTS: Final = ("quarantine",)
"""Left by any job that reads records; belongs to the run as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllOptions:
    """Options of a run of all jobs.

    Args:
        options: name of a job -> its options; a job that is not there runs with its defaults.
        skip: names of jobs that are not run; what earlier runs have left of them is left alone.
        steps: jobs and their order, for tests.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()
    steps: Sequence[Step] = STEPS


@dataclass(frozen=True, slots=True)
class AllResult:
    """What a run of all jobs did.

    Args:
        jobs: by name, in the order in which they ran; the report is the last.
        outputs: name -> path, of all that is there now.
        report: where the page is. None: it could not be made.
    """

    jobs: Mapping[str, JobNote]
    outputs: Mapping[str, str]
    report: str | None

    @property
    def failed(self) -> list[str]:
        """Names of the jobs that failed."""
        return [name for name, note in self.jobs.items() if note.state is JobState.FAILED]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return {
            "passed": not self.failed,
            "failed": self.failed,
            "report": self.report,
            "outputs": dict(self.outputs),
            "jobs": {name: note.as_dict() for name, note in self.jobs.items()},
        }


Watcher = Callable[[str, JobNote | None], None]
"""Told of each job: its name with None when it begins, and with what became of it when it ends."""


def _unwatched(name: str, note: JobNote | None) -> None:
    """Tell nobody."""


def run(
    spark: SparkSession,
    events: str,
    out: str,
    options: AllOptions | None = None,
    watch: Watcher = _unwatched,
) -> AllResult:
    """Run all jobs and write the report.

    Args:
        spark: session; all jobs share it.
        events: folder of the records.
        out: folder of the results; made if it is missing.
        options: see `AllOptions`. None: all defaults.
        watch: see `Watcher`.

    Returns:
        What became of each job; those that failed are told, not raised.

    Raises:
        ConfigError: `out` cannot be written, or its ban list cannot be read.
        FlowctlError: the results cannot be moved to `out`.
    """
    options = options or AllOptions()
    place = Place(spark, out)
    if _keeps_bans(options):
        read_bans(place)  # one that cannot be read is told before hours of work, not after them
    place.clear_staging()
    staging = place.staging()
    try:
        jobs = {
            step.name: _run_step(step, spark, events, staging, options, watch)
            for step in options.steps
            if step.name not in options.skip
        }
        watch("report", None)
        made = _report(spark, events, staging, jobs)
        jobs["report"] = made
        watch("report", made)
        jobs = {name: _moved(note, staging, place) for name, note in jobs.items()}
        jobs = _adopt_bans(place, staging, options, jobs)
        _adopt(place, staging, options.steps, jobs)
        report.write_notes(place, events, jobs)
    finally:
        staging.remove()
    outputs = {name: path for note in jobs.values() for name, path in note.outputs.items()}
    page = place.path(report.REPORT_FILE) if made.state is JobState.DONE else None
    return AllResult(jobs, {**outputs, "summary": place.path(report.SUMMARY_FILE)}, page)


def _run_step(
    step: Step, spark: SparkSession, events: str, staging: Place, options: AllOptions, watch: Watcher
) -> JobNote:
    """Run one job; whatever goes wrong with it is its result."""
    watch(step.name, None)
    note = _attempt(
        step.name,
        lambda: step.runner()(spark, events, staging.folder, options.options.get(step.name) or _defaults(step)),
    )
    if note.state is JobState.FAILED:
        for name in step.outputs:  # half of a table is none
            staging.delete(name)
    watch(step.name, note)
    return note


def _defaults(step: Step) -> Any:
    """Return the options of a job that nobody gave any: None, which each ``run`` takes for all defaults."""
    del step
    return None


def _attempt(name: str, work: Callable[[], JobResult]) -> JobNote:
    """Do a job and return what became of it. A signal is no failure: it ends the run."""
    begun = time.monotonic()
    try:
        with mapped_errors():
            result = work()
        result.check()
    except FlowctlError as error:
        return _failure(name, str(error), error.hint, begun)
    except Exception as error:  # noqa: BLE001 - a job may fail in any way, and none may cost the others
        kind = type(error).__name__
        return _failure(name, f"{kind}: {_first_line(error)}", "run it alone with --debug to see where", begun)
    return report.note_of(result, round(time.monotonic() - begun, 3))


def _first_line(error: Exception) -> str:
    return foreign((str(error).strip().splitlines() or [""])[0], 300)


def _failure(name: str, message: str, hint: str | None, begun: float) -> JobNote:
    return JobNote(name, JobState.FAILED, message, hint or "", took_s=round(time.monotonic() - begun, 3))


def _report(spark: SparkSession, events: str, staging: Place, jobs: Mapping[str, JobNote]) -> JobNote:
    """Make the page of what is in the staging folder."""
    running = JobNote("report", JobState.DONE)
    return _attempt(
        "report",
        lambda: report.run(spark, events, staging.folder, report.ReportOptions(jobs={**jobs, "report": running})),
    )


def _moved(note: JobNote, staging: Place, place: Place) -> JobNote:
    """Return a note whose paths are those at which the outputs will be, in its outputs and in its summary."""

    def moved(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(staging.folder, place.folder)
        if isinstance(value, Mapping):
            return {key: moved(item) for key, item in value.items()}
        return [moved(item) for item in value] if isinstance(value, list | tuple) else value

    return replace(note, outputs=moved(note.outputs), summary=moved(note.summary))


def _keeps_bans(options: AllOptions) -> bool:
    """Whether a job runs that makes a ban list, and bans of the list that is there are to be kept."""
    makes = any(BANS_FILE in step.outputs for step in options.steps if step.name not in options.skip)
    return makes and not getattr(options.options.get("abuse"), "replace_bans", False)


def _adopt_bans(place: Place, staging: Place, options: AllOptions, jobs: Mapping[str, JobNote]) -> dict[str, JobNote]:
    """Put the bans that were made on the list that is there: a watch, or a person, may have written to it meanwhile.

    Returns:
        What became of the jobs: whose list could not be put there has failed.
    """
    if BANS_FILE not in staging.names() or not _keeps_bans(options):
        return dict(jobs)
    allow = getattr(options.options.get("abuse"), "allow", ())
    try:
        with locked(place.folder):
            there = read_bans(place)
            if there:
                staging.write_text(BANS_FILE, render(merge_bans(there, read_bans(staging), time.time(), allow)))
            place.adopt(staging, BANS_FILE)
    except ConfigError as error:
        staging.delete(BANS_FILE)
        makers = {step.name for step in options.steps if BANS_FILE in step.outputs} & set(jobs)
        failed = {name: _failure(name, str(error), error.hint, time.monotonic()) for name in makers}
        return {**jobs, **failed}
    return dict(jobs)


def _adopt(place: Place, staging: Place, steps: Sequence[Step], jobs: Mapping[str, JobNote]) -> None:
    """Give the outputs their names, the page last, and delete what this run has no longer.

    What an earlier run has left of a job that failed now stays: a ban list that a server watches is better old than
    gone.
    """
    staged = staging.names()
    bans = {BANS_FILE} if place.exists(BANS_FILE) and BANS_FILE not in staged else set()  # adopted already
    for name in sorted(staged, key=lambda item: item == report.REPORT_FILE):
        place.adopt(staging, name)
    done = {step.name for step in steps if step.name in jobs and jobs[step.name].state is JobState.DONE}
    gone = {name for step in steps if step.name in done for name in step.outputs} - set(staged) - bans
    if len(done) == len(steps):
        gone |= set(SHARED_OUTPUTS) - set(staged)
    for name in sorted(gone):
        place.delete(name)
