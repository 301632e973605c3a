"""What a command takes: a number of parts, or one part that is a dataclass or a model of Pydantic, in JSON.

It is checked before the handler runs; what does not fit is told to the caller as `WRONG_ARGUMENT`, with a text that
names the field and what is allowed, and `rpc.describe` shows it. Pydantic is loaded where a command takes a type, or a
value of one is sent, and nowhere else.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from flowctl.core.text.printable import printable, short
from flowctl.errors import LocalProtocolError, RpcError
from flowctl.nodes.rpc.commands import Handler, HandlerKind, kind_of
from flowctl.nodes.rpc.wire.frames import WRONG_ARGUMENT

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails


Takes: TypeAlias = "int | tuple[int, int] | type[Any]"
"""What a command takes: a number of parts, the least and the most of them, or the type of its one part."""

MOST_FAULTS: Final = 3
"""Wrong fields that one error text names."""
MOST_LISTED: Final = 1000
"""With more wrong fields only their number is told: Pydantic lists all, which takes a second for 250,000 of them."""


class Arguments:
    """Checks what one command takes."""

    def __init__(self, command: str, takes: Takes) -> None:
        self._command: Final = command
        self._adapter: TypeAdapter[Any] | None = None
        self._known = ""  # fields of a dataclass, for texts
        self.shown: dict[str, Any] = {"parts": [1, 1]}  #: as `rpc.describe` tells it
        kind: Any = takes
        if _is_type(kind):
            try:
                self.shown["json"] = schema_of(kind)
            except LocalProtocolError as error:
                raise LocalProtocolError(f"{command} takes what cannot be sent: {error}") from error
            self._adapter = strict_adapter_of(kind)
            if _is_plain_dataclass(kind):
                schema = self.shown["json"]  # where a field is of its own type, the type is among "$defs"
                schema = schema.get("$defs", {}).get(getattr(kind, "__name__", ""), schema)
                self._known = ", ".join(sorted({*schema.get("properties", ()), *(item.name for item in fields(kind))}))
            bounds: list[Any] = [1, 1]
        else:
            bounds = list(kind) if isinstance(kind, tuple) else [kind, kind]
            if len(bounds) != 2 or {type(item) for item in bounds} != {int} or not 0 <= bounds[0] <= bounds[1]:
                raise LocalProtocolError(
                    f"{command} takes {kind!r}, it must be a number of parts, the least and the most of them, "
                    "a dataclass or a model of Pydantic"
                )
            self.shown["parts"] = bounds
        self._least, self._most = bounds

    def read(self, parts: list[bytes]) -> tuple[Any, ...]:
        """Return the handler's arguments beside the message: the value where the command takes a type, else nothing."""
        if not self._least <= len(parts) <= self._most:
            allowed = str(self._least) if self._most == self._least else f"{self._least} to {self._most}"
            raise self._wrong(f"it takes {allowed} part{'' if self._most == 1 else 's'}, {len(parts)} came")
        return () if self._adapter is None else (self._value(self._adapter, parts[0]),)

    def _value(self, adapter: TypeAdapter[Any], part: bytes) -> Any:
        from pydantic import ValidationError  # noqa: PLC0415 - see the head of the file

        try:
            value = adapter.validate_json(part)
        except ValidationError as error:
            if error.error_count() > MOST_LISTED:
                raise self._wrong(f"{error.error_count()} values are wrong") from None
            faults = error.errors(include_url=False, include_context=False)
            texts = [self._fault(fault) for fault in faults[:MOST_FAULTS]]
            more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
            raise self._wrong("; ".join(texts) + more) from None
        if value is None:
            raise self._wrong("Input should be an object (it is None)")
        return value

    def _fault(self, fault: ErrorDetails) -> str:
        """Return what is wrong with one field, with the given value where that is short."""
        place, kind, given = fault["loc"], fault["type"], fault["input"]
        name = printable(".".join(map(str, place)))  # keys of a mapping are in it
        if kind == "unexpected_keyword_argument":
            return f"{short(name)} is no field" + (f", it has {self._known}" if len(place) == 1 else "")
        came = "" if kind == "missing" or isinstance(given, (dict, list, bytes)) else f" (it is {short(given)})"
        return f"{name}: {fault['msg']}{came}" if name else f"{fault['msg']}{came}"

    def _wrong(self, why: str) -> RpcError:
        return RpcError(f"{self._command}: {why}", code=WRONG_ARGUMENT.decode())

    def checked(self, handler: Handler) -> Handler:
        """Return a handler of the same kind that is given a message, and runs `handler` with what was read from it."""
        call, read = handler, self.read

        @wraps(handler)
        def plain(message: Any) -> Any:
            return call(message, *read(message.data))

        @wraps(handler)
        async def coroutine(message: Any) -> Any:
            return await call(message, *read(message.data))

        @wraps(handler)
        async def stream(message: Any) -> Any:
            async with aclosing(call(message, *read(message.data))) as items:
                async for item in items:
                    yield item

        kind = kind_of(handler)
        return {HandlerKind.PLAIN: plain, HandlerKind.COROUTINE: coroutine, HandlerKind.STREAM: stream}[kind]


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - see the head of the file

    return TypeAdapter(kind)


@cache
def strict_adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return one that refuses fields that a dataclass has not, in all dataclasses in it as well; it lets None pass."""
    from pydantic import ConfigDict, TypeAdapter  # noqa: PLC0415 - see the head of the file

    if not _is_plain_dataclass(kind):
        return adapter_of(kind)
    return TypeAdapter(kind | None, config=ConfigDict(extra="forbid"))  # a dataclass alone is given no configuration


@cache
def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    from pydantic import PydanticUserError  # noqa: PLC0415 - see the head of the file

    try:
        return adapter_of(kind).json_schema()
    except (PydanticUserError, TypeError, NameError) as error:
        raise LocalProtocolError(f"{short(kind)} has no form in JSON: {error}") from error


def fault_of(error: Exception) -> str:
    """Return what is wrong with a value, its first fault if there are several."""
    from pydantic import ValidationError  # noqa: PLC0415 - see the head of the file

    if isinstance(error, UnicodeDecodeError):
        return "it is no text in UTF-8"
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {short(str(error))}"
    if error.error_count() > MOST_LISTED:
        return f"{error.error_count()} values are wrong"
    fault = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, fault["loc"]))
    return f"{short(place)}: {fault['msg']}" if place else fault["msg"]


def _is_plain_dataclass(kind: Any) -> bool:
    return is_dataclass(kind) and not hasattr(kind, "__pydantic_config__")  # what is Pydantic's decides itself


def as_json(value: object) -> bytes | None:
    """Return a value of a dataclass or a model as a part; None: it is neither."""
    kind: Any = type(value)
    return adapter_of(kind).dump_json(value, by_alias=True) if _is_type(kind) else None


def _is_type(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "model_fields"))
