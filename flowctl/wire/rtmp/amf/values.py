"""The Python values that stand for ActionScript values in AMF0 and AMF3.

How it works: where Python has a type that loses nothing, that type is used: number is `float`, AMF3 integer is
`int`, boolean is `bool`, string is `str`, null is `None`, an anonymous object is a `dict` in wire order, an array is a
`list`, an AMF3 ByteArray is `bytes`. Where AMF0 would lose something (which marker it was, a class name, a time zone),
one of the small classes below keeps it, so that what was decoded is encoded again with the same markers. AMF3, which
is read and never written, keeps neither classes nor kinds of containers.

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
    """A point in time: AMF0 marker 0x0B (2.13), AMF3 marker 0x08 (3.10)."""

    ms: float  # milliseconds since 1970-01-01 UTC; any double, also infinite or not a number, since peers do send those
    # the AMF0 time zone in minutes, -32768..32767. Reserved by the specification, 0 in practice; AMF3 has none.
    tz: int = 0


@dataclass(frozen=True, slots=True)
class Xml:
    """An XML document as text, never parsed: AMF0 marker 0x0F (2.17), AMF3 markers 0x07 (3.9) and 0x0B (3.13)."""

    text: str


@dataclass(slots=True)
class TypedObject:
    """An AMF0 object of a registered class, marker 0x10 (2.18)."""

    class_name: str  # the alias under which the class was registered, up to 65535 octets of UTF-8
    properties: dict[str, AmfValue] = field(default_factory=dict)  # the members, in wire order


def simplify(value: AmfValue) -> AmfValue:
    """Return `value` without AMF's own containers: `TypedObject` and `EcmaArray` are plain dicts then.

    `bytes`, a ByteArray of AMF3, which AMF0 has no form for, become `UNSUPPORTED`. Everything else is unchanged.
    """
    if type(value) in _PLAIN:  # nearly all members of a command
        return value
    if isinstance(value, TypedObject):
        value = value.properties
    if isinstance(value, dict):
        return {name: simplify(item) for name, item in value.items()}
    if isinstance(value, list):
        return [simplify(item) for item in value]
    return UNSUPPORTED if isinstance(value, bytes) else value


_PLAIN: Final = frozenset({str, float, bool, int, type(None)})
