"""``flowctl analyze all`` and its jobs one by one: each is the runner with that job."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from flowctl.analyze.options import JobOption
from flowctl.cli.analyze.common import Events, Out, check_apart, options_of, show, started
from flowctl.cli.analyze.options import OF_ALL, OF_JOBS, SPARK, WINDOW, Command, given, shared
from flowctl.core.text.output import say

_ENDS: Final = """

Exit status: 0 done; 1 a job failed; 2 wrong use, or nothing to read; 130 or 143 ended by a signal, with the earlier
results as they were.
"""
_HELP: Final = {
    "all": "Run every job, and write report.html. What is new is read, and results in DIR are replaced. A job that "
    "fails costs only those that need it.",
    "sessions": "One row per connection. Time in each state, drops, delay, stalls, and whose fault it was.",
    "experience": "What viewers felt, and how publishers sent. By stream, application, network, agent and node.",
    "fleet": "How each stream and each network fared, minute by minute.",
    "abuse": "Score addresses and networks, and write bans.jsonl. What they did is in abuse_scores.",
    "whatif": "Try limits and policies on recorded viewers, and recommend. Writes DIR/limits.toml for "
    "serve live --limits.",
    "capacity": "Say what a node carries, and how many nodes a crowd takes. A node is fitted to what was measured; "
    "which resource ends it is told. Without EVENTS it goes by --measurements.",
    "report": "Write report.html anew, of the results in DIR. It takes no EVENTS: no records are read.",
}
_SKIP: Final = {"skip": JobOption("Leave this job out. Repeatable.", "JOB", many=True)}


def _run(name: str, events: str | None, out: str, values: dict[str, Any]) -> None:
    """Run a job, or all of them, and show the result. What is wrong is told before Java is started."""
    from flowctl.analyze.spark.session import check_available
    from flowctl.cli.errors import FAILED

    check_available()
    from flowctl.analyze.records.listing import list_records
    from flowctl.analyze.records.place import RecordPlace
    from flowctl.analyze.records.window import parse_window
    from flowctl.analyze.run import SUMMARY_FILE, job_of, run
    from flowctl.errors import ConfigError

    jobs = _jobs(values["skip"] or []) if name == "all" else [name]
    if events is not None:
        check_apart(events, out)
    window = parse_window(dt.datetime.now(dt.UTC), **{field: values.get(field) for field in WINDOW})
    wanted = {job: given(values, group) for job, group in OF_JOBS.items() if job in jobs}
    options = {job: replace(job_of(job).options(), **found) for job, found in wanted.items() if found}
    listing = size_bytes = None
    settings = options_of(values, name).conf
    if events is not None:
        listing = list_records(events, window.with_day_before(), settings)
        size_bytes = sum(file.size_bytes for file in listing.files)
    elif name == "report" and not RecordPlace(out, settings, make=False).exists(SUMMARY_FILE):
        raise ConfigError(f"{out} has no results", hint=f"make them: flowctl analyze all EVENTS --out {out}")
    with started(name, values, size_bytes, out) as (start, progress):
        result = run(start, events, out, jobs, options, window, progress.say, listing)
    if jobs == [name] and result.errors:
        raise result.errors[name]
    show(result, as_json=bool(values["json"]))
    if result.failed:
        raise typer.Exit(FAILED)


def _jobs(skip: list[str]) -> list[str]:
    from flowctl.analyze.run import JOBS
    from flowctl.errors import ConfigError

    for name in skip:
        if name not in JOBS:
            raise ConfigError(f"--skip {name}: there is no such job", hint=f"the jobs are {', '.join(JOBS)}")
    return [name for name in JOBS if name not in skip]


def _print_weights(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with the option's value
    from flowctl.analyze.abuse.weights import Weights

    if wanted:
        say(Weights().render(), end="")
        raise typer.Exit


_Print = Annotated[
    bool, typer.Option("--print-weights", is_eager=True, callback=_print_weights, help="Write the default weights.")
]
_Maybe = Annotated[str | None, typer.Argument(metavar="[EVENTS]", help="Folder that a server wrote with --events.")]


def _command(name: str) -> Command:
    def job(events: Events, *, out: Out, **values: Any) -> None:
        _run(name, events, out, values)

    def abuse(events: Events, *, out: Out, print_weights: _Print = False, **values: Any) -> None:
        del print_weights  # its callback has ended the command
        _run(name, events, out, values)

    def capacity(events: _Maybe = None, *, out: Out, **values: Any) -> None:
        _run(name, events, out, values)

    def report(*, out: Out, **values: Any) -> None:
        _run(name, None, out, values)

    others: dict[str, Command] = {"abuse": abuse, "capacity": capacity, "report": report}
    command = others.get(name, job)
    command.__doc__ = _HELP[name] + _ENDS
    groups = [_SKIP, OF_ALL] if name == "all" else [OF_JOBS.get(name, {})]
    return shared(*groups, *([] if name == "report" else [WINDOW]), SPARK)(command)


COMMANDS: Final = {name: _command(name) for name in _HELP}
"""Name -> command, in the order of the help; `all` is what most want."""
