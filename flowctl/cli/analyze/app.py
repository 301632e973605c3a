"""``flowctl analyze``: jobs on the records of servers, each a command of its own; needs the extra ``pipeline``.

What a command needs of the extra is loaded when it runs, so that ``flowctl --help`` costs nothing of it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from flowctl.analyze.options import AbuseOptions, JobOption, WatchOptions
from flowctl.cli.analyze.common import Events, Out, check_apart, engine_of, options_of, show, started
from flowctl.cli.analyze.options import BANS, ENGINE, OF_ALL, OF_JOBS, SPARK, WATCH, WINDOW, Command, given, shared
from flowctl.cli.common import print_json
from flowctl.cli.errors import FAILED
from flowctl.core.text.output import say
from flowctl.errors import ConfigError

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
    """Run a job, or all of them, and show the result. What is wrong is told before an engine is started."""
    from flowctl.analyze.records.listing import list_records
    from flowctl.analyze.records.place import RecordPlace
    from flowctl.analyze.records.window import parse_window
    from flowctl.analyze.run import SUMMARY_FILE, job_of, run

    jobs = _jobs(values["skip"] or []) if name == "all" else [name]
    if events is not None:
        check_apart(events, out)
    places = (out,) if events is None else (events, out)
    engine_of(values, None, *places)  # what cannot be is told before records are looked for
    window = parse_window(dt.datetime.now(dt.UTC), **{field: values.get(field) for field in WINDOW})
    given_fields = {job: given(values, group) for job, group in OF_JOBS.items() if job in jobs}
    options = {job: replace(job_of(job).options(), **fields) for job, fields in given_fields.items() if fields}
    listing = size_bytes = None
    settings = options_of(values, name).conf
    if events is not None:
        listing = list_records(events, window.with_day_before(), settings)
        size_bytes = sum(file.size_bytes for file in listing.files)
    elif name == "report" and not RecordPlace(out, settings, make=False).exists(SUMMARY_FILE):
        raise ConfigError(f"{out} has no results", hint=f"make them: flowctl analyze all EVENTS --out {out}")
    engine = engine_of(values, size_bytes, *places)
    with started(name, values, size_bytes, out, engine.name) as (start, progress):
        result = run(start, events, out, jobs, options, window, progress.say, listing, engine)
        if values["tables"]:
            from flowctl.analyze.spark.tables import register

            register(start(), values["tables"], result.outputs)
    if jobs == [name] and result.errors:
        raise result.errors[name]
    show(result, as_json=bool(values["json"]))
    if result.failed:
        raise typer.Exit(FAILED)


def _jobs(skip: list[str]) -> list[str]:
    from flowctl.analyze.run import JOBS

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
    return shared(*groups, *([] if name == "report" else [WINDOW]), ENGINE, SPARK)(command)


COMMANDS: Final = {name: _command(name) for name in _HELP}
"""Name -> command, in the order of the help; `all` is what most want."""


def compare(
    before: Annotated[str, typer.Argument(metavar="OUT_A", help="Folder of results, of before.")],
    after: Annotated[str, typer.Argument(metavar="OUT_B", help="Folder of results, of after.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Write the result as one JSON object.")] = False,
) -> None:
    """Say what got better or worse from OUT_A to OUT_B. How sure that is, too; no records are read.

    Both are folders that `flowctl analyze all` wrote with --out. Exit status: 0 done; 2 wrong use, or results that
    cannot be compared: of another version, or without a figure that both have. What else there is, is written then too.
    """
    from flowctl.analyze import compare as runs

    comparison = runs.compare(before, after)
    if as_json:
        print_json(comparison.as_dict())
    else:
        say(comparison.as_text(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    if not comparison.known:
        told = f"{before} and {after} cannot be compared: no figure is known of enough viewers in both"
        raise ConfigError(told, hint="name runs in which viewers played and the jobs sessions and experience were done")


_ANSWER: Final = (
    "watch: {batches} batches, {judgements} alarms judged, {late} records too late; "
    "{bans} bans and limits of it in {list}"
)


@shared(WATCH, BANS, SPARK)
def watch(
    events: Events,
    *,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of bans.jsonl, which a server watches.")],
    **values: Any,
) -> None:
    """Watch events of servers and keep OUT/bans.jsonl fresh. A restart loses and repeats nothing.

    Ends in order with SIGINT or SIGTERM. Exit status: 0 ended; 1 it failed; 2 wrong use.
    """
    from flowctl.analyze.abuse.job import BANS_FILE
    from flowctl.analyze.abuse.watch import run
    from flowctl.analyze.records.place import RecordPlace

    check_apart(events, out)
    RecordPlace(out)  # before Java is started
    options = WatchOptions(**given(values, WATCH), judge=AbuseOptions(**given(values, BANS)))
    with started("watch", values) as (start, _):
        spark = start()
        with _signals() as stop:
            result = run(spark, events, out, options, stop=stop, tell=lambda line: say(line, to_stderr=True))
    if values["json"]:
        print_json(result.as_dict())
    else:
        say(_ANSWER.format(**result.summary, list=result.outputs[BANS_FILE]))


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Give an event that the first SIGINT or SIGTERM sets; the second one ends the process as signals do."""
    stop = threading.Event()
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for one, handler in before.items():
            signal.signal(one, handler)

    def end(*_: object) -> None:
        stop.set()
        restore()

    for one in before:
        signal.signal(one, end)
    try:
        yield stop
    finally:
        restore()


app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Turn the records of servers into decisions. Who was slow and why, which limits would be better, whom to keep "
    "out, how many viewers a node carries. Runs on DuckDB or Spark.",
)
for name, command in COMMANDS.items():
    app.command(name)(command)
app.command("compare")(compare)
app.command("watch")(watch)


def add_to(program: typer.Typer) -> None:
    program.add_typer(app, name="analyze")
