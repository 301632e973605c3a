"""What several commands share: settings in front of the command, set-up of the log, JSON output, address argument."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flowctl.core.text.output import say

CaFile = Annotated[
    Path | None,
    typer.Option("--ca-file", metavar="PEM", help="For rtmps: trust these authorities instead of the system's."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="For rtmps: take any certificate. For tests alone.")]


@dataclass(slots=True)
class Settings:
    """Options that stand in front of the command."""

    log_level: str = "info"


settings = Settings()
"""Those of this process; the application's callback fills them in before a command runs."""


def given(context: typer.Context, parameter: str) -> bool:
    """Return whether the parameter of that name stands on the command line, and is not just its default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def set_up_log(*, as_json: bool = False, level: str | None = None) -> None:
    """Send the log to standard error."""
    from flowctl import log

    log.configure(settings.log_level if level is None else level, json=as_json)


def print_json(value: Any) -> None:
    """Write one line of JSON to standard output, at once, for programs that read along."""
    say(json.dumps(value, ensure_ascii=False, separators=(", ", ": ")))


def optional_duration(text: str | None, field: str) -> float | None:
    """Return the seconds that an option stands for, None if it was not given."""
    from flowctl.units import parse_duration

    return None if text is None else parse_duration(text, field)


def optional_rate(text: str | None, field: str) -> int | None:
    """Return the bits per second that an option stands for, None if it was not given."""
    from flowctl.units import parse_bit_rate

    return None if text is None else parse_bit_rate(text, field)
