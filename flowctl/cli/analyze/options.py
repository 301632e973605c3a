"""Options of ``flowctl analyze``: those of the jobs (`flowctl.analyze.options`), of Spark, and of the window.

A command takes those of some groups beside its own. One that is not given is None, and then the job's own default
counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, get_type_hints

import typer

from flowctl.analyze import options
from flowctl.analyze.options import JobOption

Command = Callable[..., None]


Group = Mapping[str, JobOption]

SPARK: Final[Group] = {
    "master": JobOption("local[N], spark://host:port, sc://host:port, yarn, k8s://... Default: local[*].", "URL"),
    "conf": JobOption("Setting of Spark. Repeatable.", "KEY=VALUE", many=True),
    "driver_memory": JobOption("Memory of Spark's driver, which is all of it when local. Default: 2g.", "SIZE"),
    "json": JobOption("Write the result as one JSON object."),
}
ENGINE: Final[Group] = {
    "engine": JobOption("auto, duckdb or spark. Default: auto, which is duckdb for what fits memory here.", "NAME"),
    "tables": JobOption("Name the results in Spark's catalog, as tables of this database.", "DATABASE"),
}
WINDOW: Final[Group] = {
    "since": JobOption("Only records since so long ago, like 2h, 90m or 7d; whole hours, as all windows.", "TIME"),
    "begin": JobOption("Only records from this hour on, like 2026-03-01T12 (UTC).", "TIME", name="from"),
    "end": JobOption("Only records before this moment, to the end of the hour that it lies in.", "TIME", name="to"),
}
BANS: Final[Group] = options.BanOptions.settings()
WATCH: Final[Group] = options.WatchOptions.settings()
OF_JOBS: Final[Mapping[str, Group]] = {name: found.settings() for name, found in options.OF_JOBS.items()}
"""Options of each job, by its name."""
OF_ALL: Final[Group] = {
    **BANS,
    "objective": OF_JOBS["whatif"]["objective"],
    **{name: OF_JOBS["capacity"][name] for name in ("viewers", "measurements")},
}
"""Options that `all` takes too."""


def shared(*groups: Group) -> Callable[[Command], Command]:
    """Return a decorator that gives a command, which takes ``**values``, the options of groups, in that order."""

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        own = [item for item in inspect.signature(command).parameters.values() if item.kind is not item.VAR_KEYWORD]
        parameters = [item.replace(annotation=hints[item.name]) for item in own]
        parameters += [
            inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(field, item))
            for group in groups
            for field, item in group.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer goes by
        command.__annotations__ = {item.name: item.annotation for item in parameters}
        return command

    return decorate


def _annotation(field: str, item: JobOption) -> Any:
    kind: Any = list[str] if item.many else str if item.metavar else bool
    return Annotated[kind | None, typer.Option(item.option(field), metavar=item.metavar or None, help=item.help)]


def given(values: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """Return the fields of a job's options that were given on the command line."""
    found: dict[str, Any] = {}
    for field, item in group.items():
        if values.get(field) is not None:
            read = item.read(values[field], item.option(field))
            found |= read if isinstance(read, dict) else {field: read}
    return found
