"""Options of the jobs of ``flowctl analyze``, each said once: its kind, its help, and what is made of it.

A command takes those of a group (`shared`) beside its own. One that is not given is None, and then the job's own
default counts: no default is written down here but in the text of the help.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from flowctl.errors import ConfigError
from flowctl.units import parse_bit_rate, parse_duration, parse_share, parse_size

Command = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Setting:
    """An option.

    Args:
        kind: type of its value on the command line.
        help: of it.
        metavar: name of its value. None: that of the type.
        read: (value, name of the option) -> what the job takes.
        field: of the job's options. "": as the option is called.
        bounds: least value and the like, as typer takes them.
        named: field that has the name of the file. "": none.
    """

    kind: Any
    help: str
    metavar: str | None = None
    read: Callable[[Any, str], Any] = lambda value, _: value
    field: str = ""
    bounds: Mapping[str, Any] | None = None
    named: str = ""


Group = Mapping[str, Setting]


def _text(path: Path, option: str) -> str:
    """Return what a file holds."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}", hint="is it a text file of yours?") from error


def number(text: str, option: str) -> int:
    """Return a whole number written like ``10M``, ``500k`` or ``1234``.

    Raises:
        ConfigError: it is none.
    """
    factors = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
    factor = factors.get(text[-1:].lower(), 1)
    digits = text if factor == 1 else text[:-1]
    whole, _, rest = digits.partition(".")
    if not (whole.isascii() and whole.isdecimal() and len(digits) <= 12 and (not rest or rest.isdecimal())):
        raise ConfigError(f"{option} is {text!r}, allowed is a number", hint="write it like 10M, 500k or 1234")
    return round(float(digits) * factor)


def _networks(values: list[str], option: str) -> Any:
    from flowctl.pipeline.records.addresses import parse_networks

    return tuple(parse_networks(values, option))


def _moment_s(text: str, _: str) -> float:
    from flowctl.server.bans import parse_utc

    return parse_utc(text).timestamp()


def read_weights(path: Path | None, threshold: float | None) -> Any:
    """Return the weights of a file, or the defaults; `threshold` wins over both.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
    """
    from dataclasses import replace

    from flowctl.pipeline.abuse.weights import Weights, parse_weights

    found = Weights() if path is None else parse_weights(_text(path, "--weights"), str(path))
    return found if threshold is None else replace(found, threshold=threshold)


SPARK: Final[Group] = {
    "master": Setting(str, "local[N], spark://host:port, yarn, k8s://... Default: local[*].", "URL"),
    "conf": Setting(list[str], "Setting of Spark. Repeatable.", "KEY=VALUE"),
    "driver_memory": Setting(str, "Memory of Spark's driver, which is all of it when local. Default: 2g.", "SIZE"),
    "json": Setting(bool, "Write the result as one JSON object."),
}
WINDOW: Final[Group] = {
    "since": Setting(str, "Only records since so long ago, like 2h, 90m or 7d.", "TIME"),
    "from_": Setting(str, "Only records from this moment on, like 2026-03-01T12:30 (UTC).", "TIME"),
    "to": Setting(str, "Only records before this moment.", "TIME"),
}
BANS: Final[Group] = {
    "weights": Setting(Path, "TOML; flowctl analyze abuse --print-weights shows the defaults.", "FILE"),
    "threshold": Setting(float, "Score from which on an address is banned. Default: 10."),
    "allow": Setting(list[str], "Never ban or limit these: your proxies and monitors. Repeatable.", "CIDR", _networks),
    "judge_private": Setting(
        bool, "Judge loopback and private networks too. Default: they are allowed.", field="private"
    ),
    "max_bans": Setting(
        int, "Bans of this job at most, the highest scores. Default: 10000.", field="most_bans", bounds={"min": 1}
    ),
    "replace_bans": Setting(bool, "Begin a new list. Default: bans of the list there that last are kept."),
}
OF_JOBS: Final[Mapping[str, Group]] = {
    "abuse": {
        **BANS,
        "now": Setting(str, "Judge as at TIME (UTC). Default: now.", "TIME", _moment_s, "now_s"),
        "truth": Setting(str, "Planted addresses (OUT/_truth/addresses.parquet): print what was found.", "PATH"),
    },
    "whatif": {
        "grid": Setting(
            Path, "What to try, TOML. Default: some 50 choices around the present.", "FILE", _text, named="grid_name"
        ),
        "objective": Setting(
            str,
            "What to ask for: balanced (fewest honest viewers cut, then the least sum of delay, memory and lost key "
            'frames), or like "disconnects<=1% then delay_p95". Default: balanced.',
            "TEXT",
        ),
        "source": Setting(str, "flights, samples, or auto: flights if any. Default: auto.", "NAME"),
        "cut": Setting(
            str, "How much trouble of a viewer's hour is tried. Default: 2m.", "TIME", parse_duration, "cut_s"
        ),
        "extend": Setting(
            str,
            "Added for a viewer that was cut: its stall again, then the last 10 s again and again. Default: 30s.",
            "TIME",
            parse_duration,
            "extend_s",
        ),
        "most": Setting(
            int, "Evaluate so many viewers, a random sample of more. 0: all. Default: 2000.", "N", bounds={"min": 0}
        ),
    },
    "capacity": {
        "measurements": Setting(
            Path,
            "Crowds that were measured: JSON of flowctl load --json, or bench/results/capacity.json.",
            "FILE",
            _text,
            named="measurements_name",
        ),
        "viewers": Setting(str, "The crowd to be carried. Default: 1M.", "N", number),
        "bit_rate": Setting(str, "Of the stream. Default: as recorded.", "RATE", parse_bit_rate),
        "slow_share": Setting(str, "Viewers that do not keep up, like 5%. Default: as recorded.", "SHARE", parse_share),
        "busy": Setting(str, "Of a thread that may be used. Default: 70%.", "SHARE", parse_share),
        "memory": Setting(str, "Memory of a node. Default: any.", "SIZE", parse_size, "memory_bytes"),
        "headroom": Setting(
            str, "Of each node of a fleet, kept free while all live. Default: 20%.", "SHARE", parse_share
        ),
    },
}
"""Name of a job -> options that only it has."""
OF_ALL: Final[Mapping[str, Group]] = {
    "abuse": BANS,
    "whatif": {"objective": OF_JOBS["whatif"]["objective"]},
    "capacity": {name: OF_JOBS["capacity"][name] for name in ("viewers", "measurements")},
}
"""Of these, those that `all` takes too."""


def shared(*groups: Group) -> Callable[[Command], Command]:
    """Return a decorator that gives a command, which takes ``**values``, the options of groups.

    Args:
        groups: in the order of the help.
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        parameters = [
            item.replace(annotation=hints[item.name])
            for item in inspect.signature(command).parameters.values()
            if item.kind is not item.VAR_KEYWORD
        ]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, item))
            for group in groups
            for name, item in group.items()
        ]

        def called(*arguments: Any, **values: Any) -> None:
            command(*arguments, **values)

        called.__doc__ = command.__doc__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer goes by
        called.__annotations__ = {item.name: item.annotation for item in parameters}
        return called

    return decorate


def _annotation(name: str, item: Setting) -> Any:
    option = typer.Option(_option(name), metavar=item.metavar, help=item.help, **(item.bounds or {}))
    return Annotated[item.kind | None, option]


def _option(name: str) -> str:
    return f"--{name.rstrip('_').replace('_', '-')}"


def given(values: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """Return the fields of a job's options that somebody gave.

    Args:
        values: of the command line.
        group: of the job.

    Raises:
        ConfigError: a value is not allowed, or a file cannot be read.
    """
    found = {}
    for name, item in group.items():
        if values.get(name) is not None:
            found[item.field or name] = item.read(values[name], _option(name))
            found |= {item.named: str(values[name])} if item.named else {}
    threshold = found.pop("threshold", None)
    if "weights" in found or threshold is not None:
        found["weights"] = read_weights(found.get("weights"), threshold)
    return found
