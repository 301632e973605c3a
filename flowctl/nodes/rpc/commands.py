"""What a node can be asked: categories and their commands, as they were added, and as `rpc.describe` tells them."""

from __future__ import annotations

import enum
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from flowctl.core.text.printable import short
from flowctl.errors import LocalProtocolError
from flowctl.nodes.rpc.access.access import Access, AuthLevel
from flowctl.nodes.rpc.jobs.slots import CategoryLane

Handler: TypeAlias = "Callable[..., Any]"
"""Called with a `Message`, and with the value where its command takes a type."""

MOST_DESCRIBED_BYTES: Final = 900_000
"""Size of one description at most: it must stay below the limit of a message, so the rest is left out."""
_MOST_SUMMARY: Final = 120


def check_name(what: str, name: object) -> None:
    """See that `name` is ``category.command``: nodes take others for words of theirs, such as ``BYE``."""
    category, dot, _ = name.partition(".") if isinstance(name, str) else ("", "", "")
    if not (category and dot):
        raise LocalProtocolError(f"{what} {short(name)} must be category.command, a text")


class HandlerKind(enum.Enum):
    PLAIN = "plain"  #: a function, on a worker thread
    COROUTINE = "coroutine"  #: on the node's loop
    STREAM = "stream"  #: an asynchronous generator, on the node's loop


@dataclass(slots=True, eq=False)
class Category:
    name: str
    access: Access
    lane: CategoryLane
    running_count: int = 0  #: its handlers that wait on the loop
    running_bytes: int = 0  #: octets of the messages that those were given


@dataclass(slots=True, eq=False)
class RpcCommand:
    category: Category
    handler: Handler
    is_request: bool
    takes: dict[str, Any] | None = None  #: what it takes, as `rpc.describe` shows it; None: anything
    kind: HandlerKind = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.kind = kind_of(self.handler)


def kind_of(handler: object) -> HandlerKind:
    """Return how a handler runs: a function, a method, an object that is called, any of them with arguments given."""
    while isinstance(handler, partial):
        handler = handler.func
    if not (inspect.isfunction(handler) or inspect.ismethod(handler)):
        handler = getattr(type(handler), "__call__", handler)  # noqa: B004  (what is called, not whether it can be)
    if inspect.isgeneratorfunction(handler):
        name = getattr(handler, "__qualname__", handler)
        raise LocalProtocolError(f"{name} yields, and is a plain function", hint="make it an async def")
    if inspect.isasyncgenfunction(handler):
        return HandlerKind.STREAM
    return HandlerKind.COROUTINE if inspect.iscoroutinefunction(handler) else HandlerKind.PLAIN


def access_of(access: Access | AuthLevel | str) -> Access:
    """Return what a category asks, given as such, as a level or as the name of one."""
    if isinstance(access, Access):
        return access
    if isinstance(access, AuthLevel):
        return Access(access)
    try:
        return Access(AuthLevel[access.upper()])
    except (KeyError, AttributeError):
        raise LocalProtocolError(f"access is {access!r}, it must be an Access or one of none, basic, admin") from None


def described(commands: Mapping[bytes, RpcCommand], aliases: Mapping[bytes, bytes]) -> str:
    """Return commands, those that the caller may call, with aliases, as JSON.

    ``{"commands": [{"name": ..., "kind": "command" | "request" | "stream", "access": "none" | ..., "summary": ...}]}``
    in the order of their names; the summary is the first line of the handler's docstring. An alias has ``alias_of``,
    and what was added with `takes` has that: ``{"parts": [least, most]}``, and of a type its JSON schema as ``json``.
    """
    entries: list[str] = []
    left = MOST_DESCRIBED_BYTES
    for name, command in sorted(commands.items()):
        entry: dict[str, Any] = {
            "name": name.decode(),
            "kind": "stream" if command.kind is HandlerKind.STREAM else "request" if command.is_request else "command",
            "access": command.category.access.auth.name.lower(),
            "summary": (inspect.getdoc(command.handler) or "").partition("\n")[0][:_MOST_SUMMARY],
        }
        if name in aliases:
            entry["alias_of"] = aliases[name].decode()
        if command.takes is not None:
            entry["takes"] = command.takes
        text = json.dumps(entry)
        left -= len(text) + 2
        if left < 0:
            break
        entries.append(text)
    return f'{{"commands": [{", ".join(entries)}]}}'
