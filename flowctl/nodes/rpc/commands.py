"""What a node can be asked: categories and their commands, as they were added."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from flowctl.errors import LocalProtocolError
from flowctl.nodes.rpc.access.access import Access, AuthLevel

if TYPE_CHECKING:
    from flowctl.nodes.rpc.jobs.slots import CategoryLane

Handler: TypeAlias = "Callable[..., Any]"
"""Called with a `Message`, and with the value where its command takes a type."""


class HandlerKind(enum.Enum):
    """How a handler runs."""

    PLAIN = "plain"  #: a function, on a worker thread
    COROUTINE = "coroutine"  #: on the node's loop
    STREAM = "stream"  #: an asynchronous generator, on the node's loop


@dataclass(slots=True, eq=False)
class Category:
    """A category of commands."""

    name: str
    access: Access
    lane: CategoryLane
    running_count: int = 0  #: handlers of it that wait on the loop
    running_bytes: int = 0  #: octets of the messages that those were given


class RpcCommand:
    """A command, or a request command.

    Attributes:
        takes: what it takes, as `rpc.describe` shows it; None: anything.
    """

    __slots__ = ("category", "count", "handler", "is_request", "kind", "takes")

    def __init__(
        self, category: Category, handler: Handler, *, is_request: bool, takes: dict[str, Any] | None = None
    ) -> None:
        self.category: Final = category
        self.handler: Final = handler
        self.is_request: Final = is_request
        self.kind: Final = kind_of(handler)
        self.takes: Final = takes
        self.count = 0


def kind_of(handler: object) -> HandlerKind:
    """Return how a handler runs: a function, a method, an object that is called, any of them with arguments given."""
    while isinstance(handler, partial):
        handler = handler.func
    if not (inspect.isfunction(handler) or inspect.ismethod(handler)):
        handler = getattr(type(handler), "__call__", handler)  # noqa: B004  (what is called, not whether it can be)
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
