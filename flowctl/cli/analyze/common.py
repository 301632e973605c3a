"""What the commands of ``flowctl analyze`` share: arguments, engines with their progress, a check of folders."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from flowctl.cli.common import print_json
from flowctl.cli.errors import TerminatedError, complain, terminable
from flowctl.core.text.output import say
from flowctl.core.text.printable import foreign
from flowctl.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flowctl.analyze.engine import EngineChoice
    from flowctl.analyze.run import AllResult
    from flowctl.analyze.spark.progress import Progress
    from flowctl.analyze.spark.session import SessionOptions

Events = Annotated[str, typer.Argument(metavar="EVENTS", help="Folder that a server wrote with --events.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of the results; tables in it are replaced.")]


def options_of(values: Mapping[str, Any], job: str, size_bytes: int | None = None) -> SessionOptions:
    """Return how to start Spark for a job on records of that size; of the values those of `options.SPARK` count."""
    from flowctl.analyze.spark.session import SessionOptions

    settings = {"spark.app.name": f"flowctl {job}"}
    if memory := values["driver_memory"]:
        if not re.fullmatch(r"[1-9]\d{0,6}[kmgt]", memory.lower()):
            raise ConfigError(f"--driver-memory is {memory!r}, allowed is a size as Java has it, like 2g or 512m")
        settings["spark.driver.memory"] = memory
    for text in values["conf"] or []:
        key, separator, value = text.partition("=")
        if not separator or not key.startswith("spark."):
            told = f"--conf is {text!r}, it must be a setting of Spark and its value"
            raise ConfigError(told, hint="write it like --conf spark.executor.memory=4g")
        settings[key] = value
    where = values["master"] or os.environ.get("FLOWCTL_MASTER") or None
    return SessionOptions(master=where, conf=settings, size_bytes=size_bytes)


def engine_of(values: Mapping[str, Any], size_bytes: int | None, *places: str) -> EngineChoice:
    """Return which engine runs, and say so; `places`: records, if they are read, and results."""
    from flowctl.analyze.engine import check_available, choose
    from flowctl.analyze.record import read_json
    from flowctl.analyze.records.place import RecordPlace, local_path
    from flowctl.analyze.run import FORMAT, SUMMARY_FILE
    from flowctl.analyze.spark.session import is_submitted

    names = {"master": "--master", "conf": "--conf", "driver_memory": "--driver-memory", "tables": "--tables"}
    of_spark = [option for name, option in names.items() if values.get(name)]
    if os.environ.get("FLOWCTL_MASTER") and values["engine"] is None:
        of_spark.append("FLOWCTL_MASTER")
    if is_submitted() and values["engine"] is None:
        of_spark.append("spark-submit")
    local = all(local_path(place) is not None for place in places)
    earlier = read_json(RecordPlace(places[-1], make=False), SUMMARY_FILE, FORMAT).get("engine") if local else {}
    choice = choose(
        values["engine"], size_bytes=size_bytes, local=local, of_spark=of_spark, earlier=(earlier or {}).get("name", "")
    )
    check_available(choice.name)
    if size_bytes is not None:
        say(choice.line(), to_stderr=True)
    return choice


@contextlib.contextmanager
def started(
    name: str, values: Mapping[str, Any], size_bytes: int | None = None, out: str = "", engine: str = "spark"
) -> Iterator[tuple[Callable[[], SparkSession], Progress]]:
    """Give what starts the engine, with progress on standard error; end in order with signals, leave no process."""
    from flowctl.analyze.engine import SPARK, check_available, using
    from flowctl.analyze.spark.progress import Progress

    check_available(engine)
    with contextlib.ExitStack() as stack:
        if engine == SPARK:
            from flowctl.analyze.spark.session import session, settings_of

            options = options_of(values, name, size_bytes)
            settings_of(options)
            _silence()
        stack.enter_context(using(engine))
        stack.enter_context(_private())
        stack.enter_context(terminable())
        progress = stack.enter_context(Progress(name))

        def start() -> SparkSession:
            if engine != SPARK:
                from flowctl.analyze.duck.session import session as database

                return cast("SparkSession", stack.enter_context(database()))
            progress.say("starting Java")
            spark = stack.enter_context(session(options))
            progress.watch(spark, name)
            return spark

        try:
            yield start, progress
        except (KeyboardInterrupt, TerminatedError):
            if out:
                say(f"stopped: what is in {out} is whole, and nothing half made is among it", to_stderr=True)
            raise


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Within this context others than the user's group may read nothing new: it has the addresses that records have.

    Java and its workers inherit it. A user's own mask that allows less stays.
    """
    from flowctl.core.text.files import umask

    before = os.umask(umask() | 0o027)
    try:
        yield
    finally:
        os.umask(before)


def _silence() -> None:
    """Have py4j and PySpark write no stack traces: a signal may end Java first, and what fails is told in one line."""
    import logging

    from pyspark.accumulators import AccumulatorTCPServer, AccumulatorUnixServer

    logging.getLogger().addHandler(logging.NullHandler())
    for server in (AccumulatorTCPServer, AccumulatorUnixServer):
        server.handle_error = lambda *_: None  # type: ignore[method-assign]


def check_apart(events: str, out: str) -> None:
    """See to it that results do not get among the records, nor records among the results, which are replaced."""
    from flowctl.analyze.records.place import resolved

    there, wanted = (f"{resolved(text).rstrip('/')}/" for text in (events, out))
    if wanted.startswith(there) or there.startswith(wanted):
        raise ConfigError(
            f"--out {out} and the folder of the records, {events}, are the same or lie in each other: "
            "results would get among the records, or take their place",
            hint="name a folder beside that of the records; it is made if it is not there",
        )


def show(result: AllResult, *, as_json: bool) -> None:
    """Write what a run did: data to standard output, warnings and failures to standard error."""
    from flowctl.analyze.said import lines

    warnings = [*result.warnings, *(line for note in result.jobs.values() for line in note.warnings)]
    for line in dict.fromkeys(warnings):
        say(f"warning: {foreign(line, 1000)}", to_stderr=True)  # names of files may hold line breaks
    for name in result.failed:
        complain(f"{name}: {result.jobs[name].message}", result.jobs[name].hint or None)
    if as_json:
        print_json(result.as_dict())
    else:
        say("\n".join(lines(result)))
