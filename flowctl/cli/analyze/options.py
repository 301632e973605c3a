"""Options of the jobs of ``flowctl analyze``, each said once: field of the job's options -> option of the command line.

A command takes those of some groups beside its own. One that is not given is None, and then the job's own default
counts: no default is written down here but in the text of the help.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, get_type_hints

import typer

from flowctl.errors import ConfigError
from flowctl.units import parse_bit_rate, parse_duration, parse_share, parse_size

Command = Callable[..., None]


class Setting(NamedTuple):
    """An option.

    Args:
        read: (value, name of the option) -> what the job takes; or a mapping, if that is more fields than one.
        name: of the option; "": as the field, without the unit.
    """

    help: str
    metavar: str = ""
    read: Callable[[Any, str], Any] = lambda value, _: value
    name: str = ""
    many: bool = False

    def option(self, field: str) -> str:
        """Return what is written on the command line for a field."""
        return "--" + (self.name or field.removesuffix("_s").removesuffix("_bytes").replace("_", "-"))

    def annotation(self, field: str) -> Any:
        """Return the type of its value, with what typer has to know."""
        kind: Any = list[str] if self.many else str if self.metavar else bool
        return Annotated[kind | None, typer.Option(self.option(field), metavar=self.metavar or None, help=self.help)]


Group = Mapping[str, Setting]


def _text(path: str, option: str) -> str:
    """Return what a file holds."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}", hint="is it a text file of yours?") from error


def _named(path: str, option: str) -> dict[str, str]:
    """Return what a file holds, and its name for errors."""
    field = option[2:]
    return {field: _text(path, option), f"{field}_name": path}


def number(text: str, option: str) -> int:
    """Return a whole number written like ``10M``, ``500k`` or ``1234``."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kmg]?)", text.lower(), re.ASCII)
    if found is None:
        raise ConfigError(f"{option} is {text!r}, allowed is a number", hint="write it like 10M, 500k or 1234")
    return round(float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]])


def _networks(values: list[str], option: str) -> Any:
    from flowctl.analyze.records.addresses import parse_networks

    return tuple(parse_networks(values, option))


def moment(text: str, option: str) -> float:
    """Return the seconds since the epoch of a time with its zone."""
    from flowctl.core.server.bans import parse_utc

    try:
        return parse_utc(text).timestamp()
    except ConfigError as error:
        told = f"{option} is {text[:60]!r}, it must be a time with its zone, not before 1970"
        raise ConfigError(told, hint=error.hint) from error


def _planted(path: str, option: str) -> str:
    """Return the path of a table of planted addresses; one on this machine is looked at."""
    from pyarrow import ArrowException, dataset

    from flowctl.analyze.records.place import local_path

    if (place := local_path(path)) is not None:
        try:
            names = dataset.dataset(place, format="parquet").schema.names
        except (OSError, ArrowException) as error:
            told = f"{option} {path} cannot be read: {str(error).splitlines()[0]}"
            raise ConfigError(told, hint="synth writes it: OUT/_truth/addresses.parquet") from error
        if missing := {"address", "kind", "abuser", "honest"}.difference(names):
            raise ConfigError(f"{option} {path} has no planted addresses: {', '.join(sorted(missing))} is missing")
    return path


def _weights(path: str, option: str) -> Any:
    from flowctl.analyze.abuse.weights import parse_weights

    return parse_weights(_text(path, option), path)


SPARK: Final[Group] = {
    "master": Setting("local[N], spark://host:port, yarn, k8s://... Default: local[*].", "URL"),
    "conf": Setting("Setting of Spark. Repeatable.", "KEY=VALUE", many=True),
    "driver_memory": Setting("Memory of Spark's driver, which is all of it when local. Default: 2g.", "SIZE"),
    "json": Setting("Write the result as one JSON object."),
}
WINDOW: Final[Group] = {
    "since": Setting("Only records since so long ago, like 2h, 90m or 7d; whole hours, as all windows.", "TIME"),
    "begin": Setting("Only records from this hour on, like 2026-03-01T12 (UTC).", "TIME", name="from"),
    "end": Setting("Only records before this moment, to the end of the hour that it lies in.", "TIME", name="to"),
}
BANS: Final[Group] = {
    "weights": Setting("TOML; flowctl analyze abuse --print-weights shows the defaults.", "FILE", _weights),
    "allow": Setting("Never ban or limit these: your proxies and monitors. Repeatable.", "CIDR", _networks, many=True),
    "private": Setting("Judge loopback and private networks too. Default: they are allowed.", name="judge-private"),
    "most_bans": Setting("Bans of this job at most, the highest scores. Default: 10000.", "N", number, "max-bans"),
    "replace_bans": Setting("Begin a new list. Default: bans of the list there that last are kept."),
}
WATCH: Final[Group] = {
    "checkpoint": Setting("Of the stream. Default: OUT/_checkpoint.", "DIR"),
    "trigger_s": Setting("Time between two looks for new files. Default: 5s.", "TIME", parse_duration),
    "window_s": Setting("Evidence is added up over so long. Default: 60s.", "TIME", parse_duration),
    "watermark_s": Setting("How much later than the newest a record may come. Default: 2min.", "TIME", parse_duration),
    "once": Setting("Work off what is there, and end."),
    "most_files": Setting("Files per trigger. Default: 500.", "N", number, "max-files"),
}
OF_JOBS: Final[Mapping[str, Group]] = {
    "abuse": {
        **BANS,
        "now_s": Setting("Judge as at TIME (UTC). Default: now.", "TIME", moment),
        "truth": Setting("Planted addresses (OUT/_truth/addresses.parquet): print what was found.", "PATH", _planted),
    },
    "whatif": {
        "grid": Setting("What to try, TOML. Default: some 50 choices around the present.", "FILE", _named),
        "objective": Setting(
            "What to ask for: balanced (fewest honest viewers cut, then the least sum of delay, memory and lost key "
            'frames), or like "disconnects<=1% then delay_p95". Default: balanced.',
            "TEXT",
        ),
        "source": Setting("flights, samples, or auto: flights if any. Default: auto.", "NAME"),
        "cut_s": Setting("How much trouble of a viewer's hour is tried. Default: 2m.", "TIME", parse_duration),
        "extend_s": Setting(
            "Assumed of a viewer that was cut, and counted: its stall again, then the last 10 s over. Default: 30s.",
            "TIME",
            parse_duration,
        ),
        "most": Setting("Evaluate so many viewers, a random sample of more. 0: all. Default: 2000.", "N", number),
    },
    "capacity": {
        "measurements": Setting(
            "Crowds that were measured: JSON of flowctl load --json, or bench/results/capacity.json.", "FILE", _named
        ),
        "viewers": Setting("The crowd to be carried. Default: 1M.", "N", number),
        "bit_rate": Setting("Of the stream. Default: as recorded.", "RATE", parse_bit_rate),
        "slow_share": Setting("Viewers that do not keep up, like 5%. Default: as recorded.", "SHARE", parse_share),
        "busy": Setting("Of a thread that may be used. Default: 70%.", "SHARE", parse_share),
        "memory_bytes": Setting("Memory of a node. Default: any.", "SIZE", parse_size),
        "headroom": Setting("Of each node of a fleet, kept free while all live. Default: 20%.", "SHARE", parse_share),
    },
}
"""Name of a job -> its options."""
OF_ALL: Final[Group] = {
    **BANS,
    "objective": OF_JOBS["whatif"]["objective"],
    **{name: OF_JOBS["capacity"][name] for name in ("viewers", "measurements")},
}
"""Of these, those that `all` takes too."""


def shared(*groups: Group) -> Callable[[Command], Command]:
    """Return a decorator that gives a command, which takes ``**values``, the options of groups, in that order."""

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        own = [item for item in inspect.signature(command).parameters.values() if item.kind is not item.VAR_KEYWORD]
        parameters = [item.replace(annotation=hints[item.name]) for item in own]
        parameters += [
            inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=item.annotation(field))
            for group in groups
            for field, item in group.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer goes by
        command.__annotations__ = {item.name: item.annotation for item in parameters}
        return command

    return decorate


def given(values: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """Return the fields of a job's options that somebody gave."""
    found: dict[str, Any] = {}
    for field, item in group.items():
        if values.get(field) is not None:
            read = item.read(values[field], item.option(field))
            found |= read if isinstance(read, dict) else {field: read}
    return found
