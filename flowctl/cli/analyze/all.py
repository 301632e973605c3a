"""``flowctl analyze all``: every job on the records of servers, and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowctl.cli.analyze.abuse import Allow, JudgePrivate, MaxBans, ReplaceBans, Threshold, WeightsFile
from flowctl.cli.analyze.common import DEFAULT_MEMORY, AsJson, Conf, Events, Master, Memory, Out
from flowctl.text.output import say

if TYPE_CHECKING:
    from flowctl.pipeline.jobs.everything import AllOptions, AllResult
    from flowctl.pipeline.report.data import JobNote

_Objective = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help="For whatif: balanced (fewest honest viewers cut, then the rest together), or like "
        '"disconnects<=1% then delay_p95".',
    ),
]
_Skip = Annotated[list[str] | None, typer.Option(metavar="JOB", help="Leave this job out. Repeatable.")]


def command(
    events: Events,
    *,
    out: Out,
    skip: _Skip = None,
    weights: WeightsFile = None,
    allow: Allow = None,
    judge_private: JudgePrivate = False,
    threshold: Threshold = None,
    max_bans: MaxBans = 10_000,
    replace_bans: ReplaceBans = False,
    objective: _Objective = "balanced",
    master: Master = None,
    conf: Conf = None,
    driver_memory: Memory = DEFAULT_MEMORY,
    as_json: AsJson = False,
) -> None:
    """Run sessions, fleet, abuse, whatif and capacity, and write report.html; earlier results in DIR are replaced.

    A job that fails does not cost the others. Exit status: 0 done; 1 a job failed; 2 wrong use, or nothing to read;
    130 or 143 ended by a signal, with the earlier results as they were.
    """
    from flowctl.cli.analyze.common import check_apart, session_options
    from flowctl.cli.common import print_json
    from flowctl.cli.errors import FAILED, terminable
    from flowctl.pipeline.spark.session import check_available, session

    check_available()
    check_apart(events, out)
    from flowctl.pipeline.jobs import everything
    from flowctl.pipeline.spark.progress import Progress
    from flowctl.pipeline.tables.io import require_table

    options = _options(skip or [], objective, weights, allow, judge_private, threshold, max_bans, replace_bans)
    count = len(options.steps) - len(options.skip) + 1
    done: list[str] = []
    with (
        terminable(),
        session(session_options(master, conf, driver_memory, "all")) as spark,
        Progress(spark, "starting") as progress,
    ):
        require_table(spark, events, "flow_events")

        def watch(name: str, note: JobNote | None) -> None:
            if note is None:
                progress.say(f"{name} ({len(done) + 1} of {count})")
            else:
                done.append(name)

        result = everything.run(spark, events, out, options, watch)
    _warn(result)
    if as_json:
        print_json(result.as_dict())
    else:
        say("\n".join(lines(result)))
    if result.failed:
        raise typer.Exit(FAILED)


def _options(skip: list[str], objective: str, *abuse: Any) -> AllOptions:
    """Return which jobs run, and with what.

    Args:
        skip: names of jobs.
        objective: of what-if.
        abuse: file of weights, allowed networks, whether private ones are judged, threshold,
            most bans, whether the ban list is replaced.

    Raises:
        ConfigError: there is no such job, or an option of a job is wrong.
    """
    from flowctl.cli.analyze.abuse import read_weights
    from flowctl.errors import ConfigError
    from flowctl.pipeline.jobs.abuse import AbuseOptions
    from flowctl.pipeline.jobs.everything import STEPS, AllOptions
    from flowctl.pipeline.jobs.whatif import WhatifOptions
    from flowctl.pipeline.tables.addresses import parse_networks

    names = [step.name for step in STEPS]
    for name in skip:
        if name not in names:
            raise ConfigError(f"--skip {name}: there is no such job", hint=f"the jobs are {', '.join(names)}")
    weights, allow, private, threshold, most_bans, replace_bans = abuse
    judging = AbuseOptions(
        weights=read_weights(weights, threshold),
        allow=tuple(parse_networks(allow or [], "--allow")),
        private=private,
        most_bans=most_bans,
        replace_bans=replace_bans,
    )
    return AllOptions(options={"abuse": judging, "whatif": WhatifOptions(objective=objective)}, skip=frozenset(skip))


def _warn(result: AllResult) -> None:
    """Write what failed to standard error."""
    from flowctl.cli.errors import complain

    for name in result.failed:
        note = result.jobs[name]
        complain(f"{name}: {note.message}", note.hint or None)


def lines(result: AllResult) -> list[str]:
    """Return what each job did, with its accounts, and where the results are."""
    from flowctl.cli.analyze.common import text
    from flowctl.units import format_duration

    said = []
    for name, note in result.jobs.items():
        took = "" if note.took_s is None else f" after {format_duration(note.took_s)}"
        said.append(f"{name}: {note.state.value}{took}{': ' if note.summary else ''}{text(dict(note.summary))}")
        said += [f"  {account_line(account)}" for account in note.accounts]
    said += [f"{name}: {path}" for name, path in result.outputs.items() if name != "report"]
    return [*said, f"report: {result.report or 'none'}"]


def account_line(values: Any) -> str:
    """Return the accounts of a table as one line for people."""
    from flowctl.pipeline.tables.accounts import Accounts

    return Accounts(**values).line()
