"""What the jobs can be asked for: each option once, as a field with its default, range, words and what its text means.

The command line makes its options of these fields (`flowctl.cli.analyze.options`); who calls a job gives the values.
It is loaded for ``flowctl --help``, so what a text needs to be read is loaded when one is given.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flowctl.core.server.bans import MOST_BANS, parse_utc
from flowctl.core.text.addresses import Network, parse_network
from flowctl.core.text.userfiles import text_of
from flowctl.errors import ConfigError
from flowctl.units import parse_bit_rate, parse_duration, parse_share, parse_size

if TYPE_CHECKING:
    from flowctl.analyze.abuse.weights import Weights

MOST_NETWORKS: Final = 200
"""Networks that an address may be compared with in one expression of Spark; beyond, plans take seconds to compile."""


class JobOption(NamedTuple):
    """An option of the command line."""

    help: str
    metavar: str = ""
    # (value, name of the option) -> what the job takes; or a mapping, if that is more fields than one
    read: Callable[[Any, str], Any] = lambda value, _: value
    name: str = ""  # of the option; "": as the field, without the unit
    many: bool = False

    def option(self, field: str) -> str:
        return "--" + (self.name or field.removesuffix("_s").removesuffix("_bytes").replace("_", "-"))


def option(
    default: Any,
    help: str,  # noqa: A002 - as typer calls it
    metavar: str = "",
    read: Callable[[Any, str], Any] = lambda value, _: value,
    *,
    name: str = "",
    many: bool = False,
    within: tuple[float, float] | None = None,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """Return a field that is an option of the command line too; `within`: least and most that is allowed."""
    metadata = {"setting": JobOption(help, metavar, read, name, many), "within": within}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a job; `ConfigError` where a value is out of its range."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, within = getattr(self, field.name), field.metadata.get("within")
            if within is not None and value is not None and not within[0] <= value <= within[1]:
                name = field.metadata["setting"].option(field.name)
                raise ConfigError(f"{name} is {value:g}, allowed is {within[0]:g} to {within[1]:g}")

    @classmethod
    def settings(cls) -> dict[str, JobOption]:
        fields = dataclasses.fields(cls)
        return {field.name: field.metadata["setting"] for field in fields if "setting" in field.metadata}


# -- what texts mean


def _text(path: str, option: str) -> str:
    try:
        return text_of(Path(path).read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}", hint="is it a text file of yours?") from error


def _named(path: str, option: str) -> dict[str, str]:
    field = option[2:]
    return {field: _text(path, option), f"{field}_name": path}


def number(text: str, option: str) -> int:
    """Return a whole number written like ``10M``, ``500k`` or ``1234``."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kmg]?)", text.lower(), re.ASCII)
    if found is None:
        raise ConfigError(f"{option} is {text!r}, allowed is a number", hint="write it like 10M, 500k or 1234")
    return round(float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]])


def parse_networks(texts: Sequence[str], option: str) -> tuple[Network, ...]:
    """Return the networks that `texts` name, an address meaning itself alone."""
    if len(texts) > MOST_NETWORKS:
        raise ConfigError(f"{option} was given {len(texts)} times, {MOST_NETWORKS} are allowed")
    return tuple(parse_network(text, option, exact=True) for text in texts)


def moment(text: str, option: str) -> float:
    """Return the seconds since the epoch of a time with its zone."""
    try:
        return parse_utc(text).timestamp()
    except ConfigError as error:
        told = f"{option} is {text[:60]!r}, it must be a time with its zone, not before 1970"
        raise ConfigError(told, hint=error.hint) from error


def _weights(path: str, option: str) -> Weights:
    from flowctl.analyze.abuse.weights import parse_weights

    return parse_weights(_text(path, option), path)


def _usual_weights() -> Weights:
    from flowctl.analyze.abuse.weights import Weights

    return Weights()


# -- the options


@dataclass(frozen=True, slots=True, kw_only=True)
class BanOptions(Options):
    """Whom to ban, and where the bans go."""

    weights: Weights = option(  # noqa: RUF009 - it makes a field
        None,
        "TOML; flowctl analyze abuse --print-weights shows the defaults.",
        "FILE",
        _weights,
        factory=_usual_weights,
    )
    allow: tuple[Network, ...] = option(
        (), "Never ban or limit these: your proxies and monitors. Repeatable.", "CIDR", parse_networks, many=True
    )
    private: bool = option(
        default=False, help="Judge loopback and private networks too. Default: they are allowed.", name="judge-private"
    )
    most_bans: int = option(
        10_000,
        "Bans of this job at most, the highest scores. Default: 10000.",
        "N",
        number,
        name="max-bans",
        within=(1, MOST_BANS),
    )
    replace_bans: bool = option(
        default=False, help="Begin a new list. Default: bans of the list there that last are kept."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AbuseOptions(BanOptions):
    """How to judge: evidence ages up to `now_s`, and bans begin then; None: now."""

    now_s: float | None = option(None, "Judge as at TIME (UTC). Default: now.", "TIME", moment)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions(Options):
    """How to watch.

    `now_s` of `judge` does not count, and `replace_bans` spares the bans of the watch. A record of a clock
    that is ahead of this machine's, by a day at most, goes as of now: it would make the records of all others late.
    """

    judge: AbuseOptions = dataclasses.field(default_factory=AbuseOptions)
    checkpoint: str | None = option(None, "Of the stream. Default: OUT/_checkpoint.", "DIR")
    trigger_s: float = option(
        5.0, "Time between two looks for new files. Default: 5s.", "TIME", parse_duration, within=(0.1, 3600)
    )
    window_s: float = option(
        60.0, "Evidence is added up over so long. Default: 60s.", "TIME", parse_duration, within=(1, 86_400)
    )
    watermark_s: float = option(
        120.0, "How much later than the newest a record may come. Default: 2min.", "TIME", parse_duration,
        within=(0, 86_400),
    )  # fmt: skip
    once: bool = option(default=False, help="Work off what is there, and end.")
    # 500 are a minute of 40 nodes that write two every 10 s.
    most_files: int = option(500, "Files per trigger. Default: 500.", "N", number, name="max-files", within=(1, 1e5))


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatifOptions(Options):
    """What to try and what to ask for."""

    grid: str | None = option(None, "What to try, TOML. Default: some 20 choices around the present.", "FILE", _named)
    grid_name: str = "grid"
    objective: str = option(
        "balanced",
        "What to ask for: balanced (nothing worse; then fewest honest viewers cut, least missed, least delay), or like "
        '"disconnects<=1% then delay_p95". Default: balanced.',
        "TEXT",
    )
    cut_s: float = option(  # as long as the longest patience of usual limits, twice
        120.0, "How much trouble of a viewer's hour is tried. Default: 2m.", "TIME", parse_duration, within=(1, 3600)
    )
    extend_s: float = option(  # the default of `flowctl.records.flight.whatif` as well
        30.0,
        "Most time that is drawn after a cut: as its stall, the line and the stream may have gone on. Default: 30s.",
        "TIME",
        parse_duration,
        within=(0, 600),
    )
    most: int = option(  # a share of 1 % is then known to half a percent (two standard deviations)
        2_000, "Evaluate so many viewers, a random sample of more. 0: all. Default: 2000.", "N", number, within=(0, 1e7)
    )
    budget_s: float = option(
        10.0, "Time for trials; errors follow from how many were made. Default: 10s.", "TIME", parse_duration,
        within=(0.1, 86_400), name="budget",
    )  # fmt: skip
    thorough: bool = option(default=False, help="Make all trials, however long they take.")

    def __post_init__(self) -> None:
        from flowctl.analyze.whatif.recommend import parse_objective

        Options.__post_init__(self)
        parse_objective(self.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions(Options):
    """What crowd, and what a node may be asked."""

    measurements: str | None = option(
        None, "Crowds that were measured: JSON of flowctl load --json, or bench/results/capacity.json.", "FILE", _named
    )
    measurements_name: str = "measurements"
    viewers: int = option(1_000_000, "The crowd to be carried. Default: 1M.", "N", number, within=(1, 1e8))
    bit_rate: float | None = option(  # else 2.5 Mbit/s
        None, "Of the stream. Default: as recorded.", "RATE", parse_bit_rate, within=(1_000, 1e9)
    )
    slow_share: float | None = option(  # else 5 %
        None, "Viewers that do not keep up, like 5%. Default: as recorded.", "SHARE", parse_share, within=(0, 1)
    )
    busy: float = option(0.7, "Of a thread that may be used. Default: 70%.", "SHARE", parse_share, within=(0.01, 1))
    memory_bytes: int | None = option(None, "Memory of a node. Default: any.", "SIZE", parse_size, within=(1, 1e15))
    headroom: float = option(
        0.2, "Of each node of a fleet, kept free while all live. Default: 20%.", "SHARE", parse_share, within=(0, 0.9)
    )


OF_JOBS: Final[Mapping[str, type[Options]]] = {
    "abuse": AbuseOptions,
    "whatif": WhatifOptions,
    "capacity": CapacityOptions,
}
"""Name of a job -> its options."""
