"""The Python values that stand for ActionScript values in AMF0 and AMF3.

How it works: where Python has a type that loses nothing, that type is used: number is `float`, AMF3 integer is
`int`, boolean is `bool`, string is `str`, null is `None`, an anonymous AMF0 object is a `dict` in wire order, a strict
array is a `list`, an AMF3 ByteArray is `bytes`. Where it would lose something (which marker it was, a class name, a
time zone), one of the small classes below keeps it, so that what was decoded is encoded again with the same markers.

Nothing here is interpreted. In particular `Xml` is text that is carried and never parsed: an entity declared in it is
never expanded and a file it names is never opened.

Sources: AMF0 specification (Adobe, 2007) section 2; AMF3 specification (Adobe, 2013) section 3.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

AmfValue: TypeAlias = Any
"""Any value of this module or of the Python types named above. It is `Any` and not a union because the containers are
invariant: a `dict[str, float]`, which is a perfectly good object, would not be a `dict[str, AmfValue]`."""


class Undefined(enum.Enum):
    """The two values that carry no data; both are false, as undefined is in ActionScript.

    They are members of an enumeration because a member is one object per process, also after copy and pickle, so
    ``value is UNDEFINED`` is safe, and because type checkers narrow on it.
    """

    UNDEFINED = "undefined"
    UNSUPPORTED = "unsupported"

    def __bool__(self) -> Literal[False]:
        """Be false, so that ``connect.get("app") or default`` works whether app is missing, null or undefined."""
        return False

    def __repr__(self) -> str:
        return self.name


UNDEFINED: Final = Undefined.UNDEFINED
"""The undefined type: AMF0 marker 0x06 (2.8), AMF3 marker 0x00 (3.2). Some iOS publishers send it in connect."""

UNSUPPORTED: Final = Undefined.UNSUPPORTED
"""AMF0 marker 0x0D (2.15): the sender had a value that cannot be serialised. AMF3 has no such marker."""


class EcmaArray(dict[str, AmfValue]):
    """An AMF0 ECMA (associative) array, marker 0x08 (AMF0 2.10). It is a `dict`, so readers need not tell it apart.

    The count is a hint that senders get wrong: Flash and FMLE announce 0, others one too many (ossrs/srs #852). It is
    kept to be looked at; it is not used to decode, and encoding writes the true number of members.
    It takes no part in comparison.
    """

    __slots__ = ("count",)

    def __init__(
        self, properties: Mapping[str, AmfValue] | Iterable[tuple[str, AmfValue]] = (), count: int | None = None
    ) -> None:
        super().__init__(properties)
        self.count = count

    def __repr__(self) -> str:
        return f"EcmaArray({dict.__repr__(self)}, count={self.count})"


@dataclass(frozen=True, slots=True)
class Date:
    """A point in time: AMF0 marker 0x0B (2.13), AMF3 marker 0x08 (3.10).

    Attributes:
        ms: milliseconds since 1970-01-01 UTC; any double, also infinite or not a number, since peers do send those.
        tz: the AMF0 time zone in minutes, -32768..32767. Reserved by the specification, 0 in practice; AMF3 has none.
    """

    ms: float
    tz: int = 0


@dataclass(frozen=True, slots=True)
class Xml:
    """An XML document as text, never parsed: AMF0 marker 0x0F (2.17), AMF3 markers 0x07 (3.9) and 0x0B (3.13).

    Attributes:
        e4x: False for the legacy XMLDocument class, True for the E4X XML class. AMF0 knows only the former.
    """

    text: str
    e4x: bool = False


@dataclass(slots=True)
class TypedObject:
    """An AMF0 object of a registered class, marker 0x10 (2.18).

    Attributes:
        class_name: the alias under which the class was registered, up to 65535 octets of UTF-8.
        properties: the members, in wire order.
    """

    class_name: str
    properties: dict[str, AmfValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AvmPlus:
    """One AMF3 value inside AMF0 data, marker 0x11 (AMF0 3.1). RTMP message types 15 and 17 carry their values so.

    Attributes:
        value: what the AMF3 decoder read, or what the AMF3 encoder shall write.
    """

    value: AmfValue


@dataclass(slots=True)
class Amf3Array:
    """An AMF3 array, marker 0x09 (3.11), which has a dense and an associative part at once.

    Attributes:
        assoc: the members with names, in wire order. The empty name cannot be sent: on the wire it ends the part.
    """

    dense: list[AmfValue] = field(default_factory=list)
    assoc: dict[str, AmfValue] = field(default_factory=dict)


@dataclass(slots=True)
class Amf3Object:
    """An AMF3 object, marker 0x0A (3.12).

    Attributes:
        class_name: the alias of its class; empty for an anonymous object.
        sealed: the names of the members that its class declares, in wire order.
        dynamic: whether it may have members beyond `sealed`.
        properties: all members, sealed and dynamic, in wire order.
    """

    class_name: str = ""
    sealed: tuple[str, ...] = ()
    dynamic: bool = True
    properties: dict[str, AmfValue] = field(default_factory=dict)


@dataclass(slots=True)
class IntVector:
    """An AMF3 vector of 32-bit signed integers, marker 0x0D (3.15)."""

    values: list[int] = field(default_factory=list)
    fixed: bool = False


@dataclass(slots=True)
class UintVector:
    """An AMF3 vector of 32-bit unsigned integers, marker 0x0E (3.15)."""

    values: list[int] = field(default_factory=list)
    fixed: bool = False


@dataclass(slots=True)
class DoubleVector:
    """An AMF3 vector of doubles, marker 0x0F (3.15)."""

    values: list[float] = field(default_factory=list)
    fixed: bool = False


@dataclass(slots=True)
class ObjectVector:
    """An AMF3 vector of objects, marker 0x10 (3.15).

    Attributes:
        type_name: the class all members share; empty or "*" where there is none.
    """

    values: list[AmfValue] = field(default_factory=list)
    type_name: str = ""
    fixed: bool = False


@dataclass(slots=True)
class Dictionary:
    """An AMF3 dictionary, marker 0x11 (3.16).

    Attributes:
        entries: pairs of key and value in wire order. It is no `dict`: a key may be any value, also an unhashable one.
        weak_keys: whether the sender held its keys by weak references.
    """

    entries: list[tuple[AmfValue, AmfValue]] = field(default_factory=list)
    weak_keys: bool = False


_PLAIN: Final = frozenset({str, float, bool, int, bytes, type(None)})


def simplify(value: AmfValue) -> AmfValue:
    """Return `value` with AMF3 and class wrappers taken off, so that commands in AMF3 read like commands in AMF0.

    `AvmPlus` gives its content, `TypedObject`, `EcmaArray` and `Amf3Object` a plain `dict`, `Amf3Array` a `list` (a
    `dict` when it has an associative part, with the dense members under "0", "1" and so on, as ActionScript indexes
    them), vectors a `list`, `Dictionary` a `list` of [key, value]. Everything else, `UNDEFINED` included, is unchanged.
    """
    if type(value) in _PLAIN:  # nearly all members of a command
        return value
    if isinstance(value, AvmPlus):
        return simplify(value.value)
    if isinstance(value, TypedObject | Amf3Object):
        value = value.properties
    elif isinstance(value, Amf3Array):
        if not value.assoc:
            return [simplify(item) for item in value.dense]
        value = {str(index): item for index, item in enumerate(value.dense)} | value.assoc
    elif isinstance(value, Dictionary):
        return [[simplify(key), simplify(item)] for key, item in value.entries]
    elif isinstance(value, IntVector | UintVector | DoubleVector | ObjectVector):
        return [simplify(item) for item in value.values]
    if isinstance(value, dict):
        return {name: simplify(item) for name, item in value.items()}
    if isinstance(value, list):
        return [simplify(item) for item in value]
    return value
