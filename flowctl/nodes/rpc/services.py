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
import typing
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from flowctl.core.text.printable import short
from flowctl.errors import LocalProtocolError, RpcError
from flowctl.nodes.rpc.arguments import adapter_of, fault_of, schema_of, strict_adapter_of
from flowctl.nodes.rpc.commands import Handler, HandlerKind, kind_of
from flowctl.nodes.rpc.streams import closing
from flowctl.nodes.rpc.wire.frames import WRONG_ARGUMENT

WRONG_REPLY: Final = "WRONG_REPLY"
"""Code of a reply that is not what its method says."""
_MANY: Final = (AsyncIterator, AsyncGenerator, AsyncIterable, typing.AsyncIterator, typing.AsyncIterable)
_NOTHING: Final = type(None)


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one type are written as a part.

    Raises:
        LocalProtocolError: it has no form in JSON.
    """

    kind: Any  #: bytes, str, `None` where there is no value, or what Pydantic knows
    schema: dict[str, Any] | None = field(init=False, default=None)  #: of JSON; None: it is none

    def __post_init__(self) -> None:
        try:
            plain = self.kind in {bytes, str, _NOTHING}
        except TypeError as error:
            raise LocalProtocolError(f"{short(self.kind)} has no form in JSON: {error}") from error
        schema = None if plain else schema_of(self.kind)
        if _is_open(self.kind):
            raise LocalProtocolError(f"{short(self.kind)} is of any type, a service says of which")
        object.__setattr__(self, "schema", schema)

    @property
    def count(self) -> int:
        """How many parts a value has."""
        return int(self.kind is not _NOTHING)

    def parts(self, value: Any) -> list[bytes]:
        """Return a value as it is sent."""
        if self.kind is _NOTHING:
            return []
        if self.schema is None:
            if isinstance(value, (bytearray, memoryview)) and self.kind is bytes:
                return [bytes(value)]
            if not isinstance(value, self.kind):
                told = f"{short(value)} is of type {type(value).__name__}, it must be {self.kind.__name__}"
                raise LocalProtocolError(told)
            return [value.encode() if isinstance(value, str) else bytes(value)]
        try:
            return [adapter_of(self.kind).dump_json(value, by_alias=True, round_trip=True)]
        except ValueError as error:  # such as octets in the place of text
            raise LocalProtocolError(f"{short(value)} cannot be written as JSON: {error}") from error

    def value(self, parts: list[bytes], what: str, code: str) -> Any:
        """Return what was sent; an `RpcError` with `code` says that it is something else."""
        if len(parts) != self.count:
            raise RpcError(f"{what} has {len(parts)} parts, it must have {self.count}", code=code)
        if self.kind is _NOTHING:
            return None
        if self.kind is bytes:
            return parts[0]
        strict = code == WRONG_ARGUMENT.decode()  # who answers may know more than who asked
        try:
            if self.kind is str:
                return parts[0].decode()
            value = (strict_adapter_of if strict else adapter_of)(self.kind).validate_json(parts[0])
        except Exception as error:  # noqa: BLE001  (also what a `__post_init__` raises: the value is wrong)
            raise RpcError(f"{what}: {fault_of(error)}", code=code) from None
        if value is None and is_dataclass(self.kind):
            raise RpcError(f"{what}: it is null", code=code)
        return value


def _is_open(kind: Any) -> bool:
    """Return whether a type has variables in it, which nothing says of what they stand for."""
    return isinstance(kind, TypeVar) or bool(getattr(kind, "__parameters__", ()))


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service: what it takes and what it answers, each once or many times."""

    name: str
    signature: inspect.Signature  #: without the object
    takes: Form
    answers: Form
    streams: bool
    uploads: bool  #: it takes many

    @property
    def shown(self) -> dict[str, Any]:
        """What it takes, as `rpc.describe` tells it."""
        json: dict[str, Any] = {} if self.takes.schema is None else {"json": self.takes.schema}
        if self.uploads:
            return {"parts": [0, 0], "items": {"parts": [self.takes.count] * 2, **json}}
        return {"parts": [self.takes.count] * 2, **json}

    def sent(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[list[bytes], dict[str, Any]]:
        """Return parts and options of a call; a TypeError says that its service has it in another way."""
        bound = self.signature.bind(*given, **named)
        bound.apply_defaults()
        values = bound.arguments.values()
        if self.uploads:
            return [], {"items": self._written(*values)}
        return (self.takes.parts(*values) if values else []), {}

    async def _written(self, items: AsyncIterable[Any]) -> AsyncIterator[list[bytes]]:
        if not hasattr(items, "__aiter__"):
            raise LocalProtocolError(f"{self.name} takes an asynchronous iterator, not {type(items).__name__}")
        each = aiter(items)
        async with closing(each):
            async for item in each:
                yield self.takes.parts(item)

    async def _read(self, items: AsyncIterator[list[bytes]]) -> AsyncIterator[Any]:
        async for parts in items:
            yield self.takes.value(parts, f"an item of {self.name}", WRONG_ARGUMENT.decode())

    def handler(self, implementation: object) -> Handler:
        """Return the handler of a command that calls the method of an object."""
        call: Handler | None = getattr(implementation, self.name, None)
        if call is None:
            raise LocalProtocolError(
                f"{type(implementation).__name__} has no method {self.name}, which its service has"
            )
        read = partial(self.takes.value, what=self.name, code=WRONG_ARGUMENT.decode())

        def given(message: Any) -> tuple[Any, ...]:
            if self.uploads:
                return (self._read(message.items()),)
            value = read(message.data)
            return (value,) if self.takes.count else ()

        def plain(message: Any) -> Any:
            value = call(*given(message))
            # One that returns a coroutine is refused where it is called, with a hint.
            return value if inspect.iscoroutine(value) else self.answers.parts(value)

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
        if self.uploads and kind is HandlerKind.PLAIN:
            raise LocalProtocolError(f"{self.name} must be a coroutine function, as it takes many values")
        made: Any = {HandlerKind.PLAIN: plain, HandlerKind.COROUTINE: coroutine, HandlerKind.STREAM: stream}[kind]
        made.__doc__ = inspect.getdoc(call)
        return made  # type: ignore[no-any-return]  # one of three


def methods_of(service: type[Any]) -> list[Method]:
    """Return the methods of a service, those without an underscore in front.

    Raises:
        LocalProtocolError: it has none, or one takes more than a value, or says not what it takes and answers.
    """
    found = []
    for name in sorted(name for name in dir(service) if not name.startswith("_")):
        where, function = f"{service.__name__}.{name}", inspect.getattr_static(service, name)
        if isinstance(function, (staticmethod, classmethod, property)):
            raise LocalProtocolError(f"{where} is a {type(function).__name__}, a service has methods of its object")
        if inspect.isfunction(function):
            found.append(_method_of(where, name, function))
    if not found:
        raise LocalProtocolError(f"{short(service)} has no methods", hint="derive a service from typing.Protocol")
    return found


def _method_of(where: str, name: str, function: Any) -> Method:
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        hint = "types of a service stand at the top of a module"
        raise LocalProtocolError(f"{where}: {error}", hint=hint) from error
    _, *parameters = inspect.signature(function).parameters.values()
    plain = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    if len(parameters) > 1 or any(item.kind not in plain for item in parameters):
        raise LocalProtocolError(f"{where} takes more than one value", hint="give it a dataclass with all of them")
    missing = [item.name for item in parameters if item.name not in hints]
    if missing or "return" not in hints:
        raise LocalProtocolError(f"{where} has no type for {', '.join(missing) or 'what it answers'}")
    answers, streams = _each_of(hints["return"])
    takes, uploads = _each_of(hints[parameters[0].name] if parameters else _NOTHING)
    try:
        return Method(name, inspect.Signature(parameters), Form(takes), Form(answers), streams, uploads)
    except LocalProtocolError as error:
        raise LocalProtocolError(f"{where}: {error}") from error


def _each_of(kind: Any) -> tuple[Any, bool]:
    """Return the type of what an iterator yields, and that it is one; else the type."""
    many = get_origin(kind) in _MANY or any(kind is each for each in _MANY)
    return (next(iter(get_args(kind)), TypeVar("T")), True) if many else (kind, False)


def stub_of(
    service: type[Any],
    category: str,
    call: Callable[..., Any],
    stream: Callable[..., AsyncIterator[list[bytes]]],
) -> Any:
    """Return an object with the methods of a service; `call` and `stream` are given a command and its parts."""

    async def ask(method: Method, command: str, /, *given: Any, **named: Any) -> Any:
        arguments, options = method.sent(given, named)
        parts = await call(command, *arguments, **options)
        return method.answers.value(parts, f"the reply to {command}", WRONG_REPLY)

    async def follow(method: Method, command: str, /, *given: Any, **named: Any) -> AsyncIterator[Any]:
        arguments, options = method.sent(given, named)
        async with aclosing(stream(command, *arguments, **options)) as items:  # type: ignore[type-var]  # a generator
            async for parts in items:
                yield method.answers.value(parts, f"an item of {command}", WRONG_REPLY)

    methods = methods_of(service)
    body = {each.name: partial(follow if each.streams else ask, each, f"{category}.{each.name}") for each in methods}
    return type(f"{service.__name__}Stub", (), {name: staticmethod(item) for name, item in body.items()})()
