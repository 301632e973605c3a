"""What the commands of ``flowctl analyze`` share: options of Spark, running a job with progress, showing its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowctl.text.output import say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flowctl.pipeline.spark.progress import Progress
    from flowctl.pipeline.spark.session import SessionOptions
    from flowctl.pipeline.tables.accounts import JobResult

Events = Annotated[str, typer.Argument(metavar="EVENTS", help="Folder that a server wrote with --events.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of the results; tables in it are replaced.")]
Master = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="local[N], spark://host:port, yarn, k8s://... Default: local[*].", envvar="FLOWCTL_MASTER"
    ),
]
Conf = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Setting of Spark. Repeatable.")]
Memory = Annotated[str, typer.Option(metavar="SIZE", help="Memory of Spark's driver, which is all of it when local.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write the result as one JSON object.")]

DEFAULT_MEMORY = "2g"


def session_options(master: str | None, conf: list[str] | None, memory: str, job: str) -> SessionOptions:
    """Return how to start Spark for a job.

    Raises:
        ConfigError: a setting has no ``=``, or a size is none.
    """
    import re

    from flowctl.errors import ConfigError
    from flowctl.pipeline.spark.session import SessionOptions

    settings = {}
    for text in conf or []:
        key, separator, value = text.partition("=")
        if not separator or not key.startswith("spark."):
            raise ConfigError(f"--conf is {text!r}, allowed is KEY=VALUE with a KEY that begins with spark.")
        settings[key] = value
    if not re.fullmatch(r"[1-9]\d{0,6}[kmgt]", memory.lower()):
        raise ConfigError(f"--driver-memory is {memory!r}, allowed is a size as Java has it, like 2g or 512m")
    return SessionOptions(master=master, conf=settings, driver_memory=memory, app_name=f"flowctl {job}")


def check_apart(events: str, out: str) -> None:
    """See to it that results do not get among the records, where the next job would read them.

    Args:
        events: folder of the records.
        out: of the results.

    Raises:
        ConfigError: they are the same, or `out` is in a table's folder.
    """
    from flowctl.errors import ConfigError
    from flowctl.pipeline.tables.place import local_path
    from flowctl.telemetry.schema import TABLES

    there, wanted = (
        text.rstrip("/") if (path := local_path(text)) is None else str(path.absolute().resolve())
        for text in (events, out)
    )
    if wanted == there or f"{wanted}/".startswith(tuple(f"{there}/{name}/" for name in TABLES)):
        raise ConfigError(
            f"--out {out} is a folder of the records: results would lie among them",
            hint="name another folder; it is made if it is not there",
        )


def run_job(
    name: str,
    job: Callable[[SparkSession, Progress], JobResult],
    options: SessionOptions,
    *,
    as_json: bool,
    folders: tuple[str, str] | None = None,
) -> JobResult:
    """Start Spark, run a job with its progress on standard error, write the result, leave no process.

    Args:
        name: of the job.
        job: called with the session and the progress.
        options: how to start Spark.
        as_json: one JSON object instead of lines.
        folders: of the records and of the results, where ``summary.json`` remembers the job for a later report. None:
            the job has no part in a report.

    Raises:
        ConfigError: the input or Spark's settings are wrong, or results would lie among the records.
        FlowctlError: Spark failed.
    """
    from flowctl.cli.errors import terminable
    from flowctl.pipeline.spark.progress import Progress
    from flowctl.pipeline.spark.session import session

    if folders is not None:
        check_apart(*folders)
    with terminable(), session(options) as spark, Progress(spark, name) as progress:
        begun = time.monotonic()
        result = job(spark, progress)
        result.check()
        if folders is not None:
            from flowctl.pipeline.report.job import keep_note

            keep_note(spark, *folders, result, round(time.monotonic() - begun, 3))
    show(result, as_json=as_json)
    return result


def show(result: JobResult, *, as_json: bool) -> None:
    """Write what a job did: data to standard output, warnings to standard error."""
    from flowctl.cli.common import print_json

    for account in result.accounts:
        for line in account.warnings:
            say(f"warning: {line}", to_stderr=True)
    if as_json:
        print_json(result.as_dict())
        return
    lines = [f"{result.name}: {text(result.summary)}"]
    lines += [f"  {account.line()}" for account in result.accounts]
    lines += [f"  {name}: {path}" for name, path in result.outputs.items()]
    say("\n".join(lines))


def text(value: Any) -> str:
    """Return a figure, or figures by name, as people read them."""
    if isinstance(value, dict):
        return ", ".join(
            f"{key} ({text(item)})" if isinstance(item, dict) else f"{key} {text(item)}" for key, item in value.items()
        )
    return f"{value:g}" if isinstance(value, float) else str(value)
