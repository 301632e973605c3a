"""A service as one class of both sides: a Protocol whose methods are commands, with types for what goes and comes.

::

    class Shop(Protocol):
        async def price(self, order: Order) -> int: ...
        def prices(self, dish: str) -> AsyncIterator[Price]: ...

A server adds an object that has these methods (`RpcNode.add_service`), a caller gets one that has them too
(`RpcNode.service`) and calls them as if it were there. A method takes one value, or none: bytes and text go as they
are, all else as JSON, by Pydantic, which checks it on both sides. A peer that knows nothing of services calls the same
commands by their names, with the value as the one part.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, get_args, get_origin, get_type_hints

from flowctl.core.text.printable import short
from flowctl.errors import LocalProtocolError, RpcError
from flowctl.nodes.rpc.arguments import adapter_of
from flowctl.nodes.rpc.commands import Handler, HandlerKind, kind_of
from flowctl.nodes.rpc.wire.frames import WRONG_ARGUMENT

WRONG_REPLY: Final = "WRONG_REPLY"
"""Code of a reply that is not what its method says."""
_MANY: Final = (AsyncIterator, AsyncGenerator, AsyncIterable)
_NOTHING: Final = type(None)


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one type are written as a part."""

    kind: Any  #: bytes, str, `None` where there is no value, or what Pydantic knows

    def __post_init__(self) -> None:
        if self.kind not in {bytes, str, _NOTHING}:
            from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError  # noqa: PLC0415 - see `arguments`

            try:
                adapter_of(self.kind)
            except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as error:
                raise LocalProtocolError(f"{self.kind} has no form in JSON: {error}") from error

    def parts(self, value: Any) -> list[bytes]:
        """Return a value as it is sent."""
        if self.kind is _NOTHING:
            return []
        if self.kind in {bytes, str} and not isinstance(value, self.kind):
            raise LocalProtocolError(
                f"{short(value)} is of type {type(value).__name__}, it must be {self.kind.__name__}"
            )
        if self.kind is bytes:
            return [value]
        return [value.encode() if self.kind is str else adapter_of(self.kind).dump_json(value, by_alias=True)]

    def value(self, parts: list[bytes], what: str, code: str) -> Any:
        """Return what was sent; an `RpcError` with `code` says that it is something else."""
        if len(parts) != (self.kind is not _NOTHING):
            raise RpcError(f"{what} has {len(parts)} parts, it must have {int(self.kind is not _NOTHING)}", code=code)
        if self.kind is _NOTHING:
            return None
        if self.kind is bytes:
            return parts[0]
        try:
            return parts[0].decode() if self.kind is str else adapter_of(self.kind).validate_json(parts[0])
        except ValueError as error:  # that of Pydantic is one
            raise RpcError(f"{what}: {_told(error)}", code=code) from None


def _told(error: Any) -> str:
    """Return what is wrong with a value, its first fault if there are several."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no text in UTF-8"
    faults = error.errors(include_url=False, include_context=False)
    place = ".".join(map(str, faults[0]["loc"]))
    return f"{short(place)}: {faults[0]['msg']}" if place else str(faults[0]["msg"])


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service: what it takes, and what it answers, once or many times."""

    name: str
    takes: Form
    answers: Form
    streams: bool

    @property
    def shown(self) -> dict[str, Any]:
        """What it takes, as `rpc.describe` tells it."""
        count = int(self.takes.kind is not _NOTHING)
        shown: dict[str, Any] = {"parts": [count, count]}
        if self.takes.kind not in {bytes, str, _NOTHING}:
            shown["json"] = adapter_of(self.takes.kind).json_schema()
        return shown

    def arguments(self, given: tuple[Any, ...]) -> list[bytes]:
        expected = int(self.takes.kind is not _NOTHING)
        if len(given) != expected:
            raise TypeError(f"{self.name}() takes {expected} argument{'s' * (expected != 1)}, {len(given)} were given")
        return self.takes.parts(*given) if given else []

    def handler(self, implementation: object) -> Handler:
        """Return the handler of a command that calls the method of an object."""
        call: Handler | None = getattr(implementation, self.name, None)
        if call is None:
            raise LocalProtocolError(
                f"{type(implementation).__name__} has no method {self.name}, which its service has"
            )
        read = partial(self.takes.value, what=self.name, code=WRONG_ARGUMENT.decode())

        def given(message: Any) -> tuple[Any, ...]:
            value = read(message.data)
            return () if self.takes.kind is _NOTHING else (value,)

        def plain(message: Any) -> list[bytes]:
            return self.answers.parts(call(*given(message)))

        async def coroutine(message: Any) -> list[bytes]:
            return self.answers.parts(await call(*given(message)))

        async def stream(message: Any) -> AsyncIterator[list[bytes]]:
            async with aclosing(call(*given(message))) as items:
                async for item in items:
                    yield self.answers.parts(item)

        kind = kind_of(call)
        if (kind is HandlerKind.STREAM) is not self.streams:
            raise LocalProtocolError(
                f"{self.name} must {'yield' if self.streams else 'answer once'}, as its service says",
                hint="an asynchronous generator answers many times: async def with yield",
            )
        made: Any = {HandlerKind.PLAIN: plain, HandlerKind.COROUTINE: coroutine, HandlerKind.STREAM: stream}[kind]
        made.__doc__ = inspect.getdoc(call)
        return made  # type: ignore[no-any-return]  # one of three


def methods_of(service: type[Any]) -> list[Method]:
    """Return the methods of a service, those without an underscore in front.

    Raises:
        LocalProtocolError: it has none, or one takes more than a value, or says not what it takes and answers.
    """
    found = []
    for name, function in inspect.getmembers(service, inspect.isfunction):
        if name.startswith("_"):
            continue
        where = f"{service.__name__}.{name}"
        try:
            hints = get_type_hints(function)
        except NameError as error:
            hint = "types of a service stand at the top of a module"
            raise LocalProtocolError(f"{where}: {error}", hint=hint) from error
        _, *parameters = inspect.signature(function).parameters.values()
        if len(parameters) > 1 or any(item.kind is not item.POSITIONAL_OR_KEYWORD for item in parameters):
            raise LocalProtocolError(f"{where} takes more than one value", hint="give it a dataclass with all of them")
        missing = [item.name for item in parameters if item.name not in hints]
        if missing or "return" not in hints:
            raise LocalProtocolError(f"{where} has no type for {', '.join(missing) or 'what it answers'}")
        answers = hints["return"]
        streams = get_origin(answers) in _MANY
        if streams:
            answers = get_args(answers)[0]
        takes = hints[parameters[0].name] if parameters else _NOTHING
        found.append(Method(name, Form(takes), Form(answers), streams))
    if not found:
        raise LocalProtocolError(f"{short(service)} has no methods", hint="derive a service from typing.Protocol")
    return found


def stub_of(
    service: type[Any],
    category: str,
    call: Callable[..., Any],
    stream: Callable[..., AsyncIterator[list[bytes]]],
) -> Any:
    """Return an object with the methods of a service; `call` and `stream` are given a command and its parts."""

    async def ask(method: Method, command: str, *given: Any) -> Any:
        parts = await call(command, *method.arguments(given))
        return method.answers.value(parts, f"the reply to {command}", WRONG_REPLY)

    async def follow(method: Method, command: str, *given: Any) -> AsyncIterator[Any]:
        async with aclosing(stream(command, *method.arguments(given))) as items:  # type: ignore[type-var]  # a generator
            async for parts in items:
                yield method.answers.value(parts, f"an item of {command}", WRONG_REPLY)

    methods = methods_of(service)
    body = {each.name: partial(follow if each.streams else ask, each, f"{category}.{each.name}") for each in methods}
    return type(f"{service.__name__}Stub", (), {name: staticmethod(item) for name, item in body.items()})()
