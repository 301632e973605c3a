"""Types of settings, looked at where they are made (pure): a wrong one is named at once, and not by what breaks later.

Type hints tell who checks types; who does not, and writes ``limits="1MiB,10"``, would learn of it from a handler that
fails for each connection. What is declared is compared with what is given, field by field; an int is a float too, and a
bool is neither.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from flowctl.core.text.printable import short
from flowctl.errors import ConfigError

Json: TypeAlias = dict[str, Any]
"""A JSON object."""


def check_fields(settings: Any) -> None:
    kind: Any = type(settings)
    for name, allowed in _declared(kind):
        check_type(f"{kind.__name__}.{name}", getattr(settings, name), *allowed)


def check_arguments(what: str, function: Any, given: Mapping[str, object]) -> None:
    """Compare the arguments of a call with their declared types."""
    for name, allowed in _checkable(typing.get_type_hints(function).items()):
        if name in given:
            check_type(f"{what}: {name}", given[name], *allowed)


def check_type(name: str, value: object, *allowed: Any) -> None:
    if isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool)):
        return
    names = [
        "None" if kind is type(None) else kind.__name__ for kind in allowed if kind is not int or float not in allowed
    ]
    parse = next((kind.__name__ for kind in allowed if isinstance(value, str) and hasattr(kind, "parse")), None)
    shown = short(value)
    raise ConfigError(
        f"{name} is {shown} ({type(value).__name__}), it must be {' or '.join(names)}",
        hint=None if parse is None else f"{parse}.parse({shown})",
    )


@functools.cache
def _declared(kind: Hashable) -> tuple[tuple[str, tuple[type, ...]], ...]:
    settings: Any = kind
    hints = typing.get_type_hints(settings)
    return tuple(_checkable((field.name, hints[field.name]) for field in dataclasses.fields(settings) if field.init))


def _checkable(hints: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, tuple[type, ...]]]:
    """Yield the names whose types a value can be checked against, with these types."""
    for name, hint in hints:
        allowed = tuple(_types(hint))
        if object not in allowed:
            yield name, allowed


def _types(hint: Any) -> Iterator[type]:
    """Yield the types of a hint; ``object`` for one that cannot be checked."""
    origin = typing.get_origin(hint)
    if origin in {typing.Union, types.UnionType}:
        for part in typing.get_args(hint):
            yield from _types(part)
    elif origin is not None:
        yield origin if isinstance(origin, type) else object
    elif hint is float:
        yield from (float, int)
    elif hint is None:
        yield type(None)
    elif isinstance(hint, type) and not getattr(hint, "_is_protocol", False):
        yield hint
    else:
        yield Callable if hint is Callable else object
