"""``flowctl analyze all`` and its jobs one by one: each is the runner with that job."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from flowctl.cli.analyze.common import Events, Out, check_apart, session_options, show, started
from flowctl.cli.analyze.options import OF_ALL, OF_JOBS, SPARK, WINDOW, Command, Group, given, read_weights, shared
from flowctl.text.output import say

_ENDS: Final = """

Exit status: 0 done; 1 a job failed; 2 wrong use, or nothing to read; 130 or 143 ended by a signal, with the earlier
results as they were.
"""
_HELP: Final = {
    "all": "Run every job, and write report.html: what is new is read, and results in DIR are replaced. A job that "
    "fails costs only those that need it.",
    "sessions": "One row per connection: time in each state, drops, delay, stalls, and whose fault it was.",
    "experience": "What viewers felt, by stream, application, network, agent and node; and how publishers sent.",
    "fleet": "How each stream and each network fared, minute by minute.",
    "abuse": "Score addresses and networks by what they did, and write abuse_scores and bans.jsonl.",
    "whatif": "Try limits and policies on recorded viewers, and recommend: DIR/limits.toml for serve live --limits.",
    "capacity": "Fit a node to what was measured, simulate a crowd, and say how many viewers a node carries, and how "
    "many nodes a crowd takes. Without EVENTS it goes by --measurements.",
    "report": "Write report.html of the results in DIR. No records are read.",
}


def _run(name: str, jobs: Sequence[str], events: str | None, out: str, values: dict[str, Any], groups: Any) -> None:
    """Run jobs and show the result.

    Raises:
        ConfigError: an option is wrong, or there is nothing to read.
        FlowctlError: the only job failed.
        typer.Exit: one of several failed.
    """
    from flowctl.cli.errors import FAILED
    from flowctl.pipeline.spark.session import check_available

    check_available()
    from flowctl.pipeline.records.listing import list_records
    from flowctl.pipeline.records.window import parse_window
    from flowctl.pipeline.run import run

    if events is not None:
        check_apart(events, out)
    now = dt.datetime.now(dt.UTC)
    window = parse_window(now, since=values.get("since"), begin=values.get("from_"), end=values.get("to"))
    options = {job: given(values, groups.get(job, {})) for job in jobs}
    size_bytes = None
    if events is not None and name != "report":  # before Java is started for nothing
        files = list_records(
            events, window, session_options(None, values["conf"], values["driver_memory"], name).conf
        ).files
        size_bytes = sum(file.size_bytes for file in files)
    with started(name, values, size_bytes) as (spark, progress):
        result = run(spark, events, out, jobs, options, window, progress.say)
    if jobs == [name] and result.errors:
        raise result.errors[name]
    show(result, as_json=bool(values["json"]))
    if result.failed:
        raise typer.Exit(FAILED)


def _every(
    events: Events,
    *,
    out: Out,
    skip: Annotated[list[str] | None, typer.Option(metavar="JOB", help="Leave this job out. Repeatable.")] = None,
    **values: Any,
) -> None:
    from flowctl.errors import ConfigError
    from flowctl.pipeline.run import JOBS

    for name in skip or []:
        if name not in JOBS:
            raise ConfigError(f"--skip {name}: there is no such job", hint=f"the jobs are {', '.join(JOBS)}")
    _run("all", [name for name in JOBS if name not in (skip or [])], events, out, values, OF_ALL)


def _of_job(name: str) -> Command:
    def command(events: Events, *, out: Out, **values: Any) -> None:
        _run(name, [name], events, out, values, OF_JOBS)

    return command


def _abuse(
    events: Annotated[str | None, typer.Argument(metavar="EVENTS", help="Folder that a server wrote.")] = None,
    *,
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="Folder of the results.")] = None,
    print_weights: Annotated[
        bool, typer.Option("--print-weights", help="Write the weights in force, and end.")
    ] = False,
    **values: Any,
) -> None:
    from flowctl.errors import ConfigError

    if print_weights:
        say(read_weights(values["weights"], values["threshold"]).render(), end="")
        return
    if events is None or out is None:
        missing = "EVENTS is" if events is None else "--out is"
        raise ConfigError(f"{missing} missing", hint="flowctl analyze abuse EVENTS --out DIR")
    _run("abuse", ["abuse"], events, out, values, OF_JOBS)


def _capacity(
    events: Annotated[str | None, typer.Argument(metavar="[EVENTS]", help="Folder that a server wrote.")] = None,
    *,
    out: Out,
    **values: Any,
) -> None:
    _run("capacity", ["capacity"], events, out, values, OF_JOBS)


def _report(events: Events, *, out: Out, **values: Any) -> None:
    _run("report", ["report"], events, out, values, {})


def _command(name: str) -> Command:
    """Return the command of a job with all its options."""
    command = {"all": _every, "abuse": _abuse, "capacity": _capacity, "report": _report}.get(name) or _of_job(name)
    command.__doc__ = _HELP[name] + _ENDS
    groups: list[Group] = list(OF_ALL.values()) if name == "all" else [OF_JOBS.get(name, {})]
    return shared(*groups, *([] if name == "report" else [WINDOW]), SPARK)(command)


COMMANDS: Final = {name: _command(name) for name in _HELP}
