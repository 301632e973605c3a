"""Arguments of operations: how each is written, read and checked (pure).

A value comes as JSON has it (text, number, truth value) or as text from a command line; both are read by the same
reader of its kind, which names what is wrong, what is allowed, and how one would write it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from flowctl.core.flow.limits import parse_marks, parse_target_delay
from flowctl.core.server.bans import parse_utc
from flowctl.core.text.addresses import parse_network
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError
from flowctl.units import parse_duration

MOST_TEXT: Final = 200
"""Longest text of an argument, characters: a reason stands in a line of the log."""
_MOST_DIGITS: Final = 18
MOST_DURATION_S: Final = 10 * 365 * 86_400.0
"""Longest duration: ten years; what is meant to last longer lasts until it is taken back."""


class ArgumentKind(NamedTuple):
    """How values of one kind are written."""

    word: str  # stands for a value in help and tables: NETWORK
    read: Callable[[object, str], Any]  # returns the value of what was given; the second argument is the name
    flag: bool = False  # whether it is yes or no, on a command line by being there
    # The same as JSON Schema, as far as that can say it, for descriptions of the API.
    schema: Mapping[str, Any] = MappingProxyType({"type": "string", "maxLength": MOST_TEXT})


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    name: str
    kind: ArgumentKind
    what: str
    default: Any = None
    required: bool = False
    first: bool = False  # whether it may stand on a command line without its name
    hidden: bool = False  # whether programs give it, and the help of a command leaves it out


def read_arguments(operation: str, arguments: Sequence[Argument], given: Mapping[str, object]) -> dict[str, Any]:
    names = [argument.name for argument in arguments]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            listed = f"it has {', '.join(names)}" if names else "it has none"
            raise ConfigError(
                f"{operation}: unknown argument {short(name)}",
                hint=f"did you mean {near[0]}? {listed}" if near else listed,
            )
    values = {}
    for argument in arguments:
        value = given.get(argument.name)
        if value is None:
            if argument.required:
                raise ConfigError(
                    f"{operation}: {argument.name} is missing", hint=f"{argument.kind.word}: {argument.what}"
                )
            values[argument.name] = argument.default
        else:
            values[argument.name] = argument.kind.read(value, argument.name)
    return values


def number(low: int, high: int) -> ArgumentKind:
    def read(value: object, name: str) -> int:
        text = str(value) if type(value) is int else value
        digits = isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
        if not digits or not low <= int(str(text)) <= high:
            raise ConfigError(f"{name} is {short(value)}, it must be a whole number from {low} to {high}")
        return int(str(text))

    most = min(high, 10**_MOST_DIGITS - 1)
    return ArgumentKind("NUMBER", read, schema={"type": "integer", "minimum": low, "maximum": most})


def text(most: int = MOST_TEXT) -> ArgumentKind:
    def read(value: object, name: str) -> str:
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise ConfigError(f"{name} is {short(value)}, it must be up to {most} characters that can be printed")
        return value

    return ArgumentKind("TEXT", read, schema={"type": "string", "maxLength": most})


def choice(*words: str) -> ArgumentKind:
    def read(value: object, name: str) -> str:
        if not isinstance(value, str) or value not in words:
            raise ConfigError(f"{name} is {short(value)}, it must be {' or '.join(words)}")
        return value

    return ArgumentKind("|".join(words), read, schema={"type": "string", "enum": list(words)})


def duration(most_s: float = MOST_DURATION_S) -> ArgumentKind:
    """Return the kind of durations, in seconds: ``90``, ``10min``, ``2h``, ``7d``."""

    def read(value: object, name: str) -> float:
        if type(value) in {int, float}:
            seconds = float(str(value))
        elif isinstance(value, str):
            seconds = parse_duration(value, name)
        else:
            seconds = -1.0
        if not 0 <= seconds <= most_s:
            raise ConfigError(
                f"{name} is {short(value)}, it must be a duration of 0 to {most_s:g} s",
                hint="write it like 10min or 7d",
            )
        return seconds

    return ArgumentKind("DURATION", read, schema={"type": ["number", "string"], "minimum": 0, "maximum": most_s})


def parsed(word: str, parse: Callable[[str, str], object], allowed: str, hint: str) -> ArgumentKind:
    """Return the kind of texts that `parse(text, name for errors)` takes; the value is the text itself."""

    def read(value: object, name: str) -> str:
        if not isinstance(value, str) or len(value) > MOST_TEXT:
            raise ConfigError(f"{name} is {short(value)}, it must be {allowed}", hint=hint)
        parse(value, name)
        return value

    return ArgumentKind(word, read)


def _check_moment(value: str, name: str) -> None:
    try:
        parse_utc(value)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{name} is {short(value)}, it must be a time in UTC", hint=_LIKE_MOMENT) from error


def _read_flag(value: object, name: str) -> bool:
    truth = _FLAGS.get(value) if isinstance(value, str) else value
    if not isinstance(truth, bool):
        raise ConfigError(f"{name} is {short(value)}, it must be yes or no (true or false)")
    return truth


def _read_network(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise ConfigError(f"{name} is {short(value)}, it must be an address or a network", hint="like 203.0.113.7")
    return str(parse_network(value, name, exact=True))


_FLAGS: Final = {"yes": True, "no": False, "true": True, "false": False}
_LIKE_MOMENT: Final = "like 2026-01-31T12:00:00Z"
FLAG: Final = ArgumentKind("yes|no", _read_flag, flag=True, schema={"type": "boolean"})
MOMENT: Final = parsed("TIME", _check_moment, "a time in UTC", _LIKE_MOMENT)
NETWORK: Final = ArgumentKind("NETWORK", _read_network)
"""Networks in their canonical form; an address is a network of one."""
MARKS: Final = parsed("BYTES,MESSAGES,AGE", parse_marks, "bytes,messages,age", "like 2MiB,2048,4s")
"""Marks of limits; whether they go together is seen when all are there."""
TARGET_DELAY: Final = parsed("auto|off|DURATION", parse_target_delay, "auto, off or a duration", "like 1500ms")
