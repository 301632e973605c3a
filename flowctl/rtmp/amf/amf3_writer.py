"""Encoding of Python values as AMF3; the layout is described in `amf3`, which is where callers import `encode` from.

How it works: `Amf3Writer` collects the parts of a message in a list, and a table of functions indexed by Python type
writes one value each. Strings and traits that were written before are referred to, as every writer of AMF3 does, and
as every reader must keep those tables. Objects are never referred to: each is written out where it occurs, so that a
reader gets a tree, whatever our caller shares between its values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from flowctl.errors import LocalProtocolError
from flowctl.rtmp.amf.limits import MAX_DEPTH, MAX_ENCODED_NODES
from flowctl.rtmp.amf.values import (
    Amf3Array,
    Amf3Object,
    AmfValue,
    AvmPlus,
    Date,
    Dictionary,
    DoubleVector,
    EcmaArray,
    IntVector,
    ObjectVector,
    TypedObject,
    UintVector,
    Undefined,
    Xml,
)

U29_MAX: Final = (1 << 29) - 1
"""Largest number that four octets of U29 hold (AMF3 1.3.1)."""

INT_MIN: Final = -(1 << 28)
INT_MAX: Final = (1 << 28) - 1
"""What the integer type holds (AMF3 3.6); an `int` beyond is written as a double, as ActionScript does."""

_pack_double = struct.Struct(">Bd").pack
_pack_date = struct.Struct(">BBd").pack


def encode(*values: AmfValue) -> bytes:
    """Encode `values`, one after the other and with shared reference tables, as AMF3.

    `int` becomes an integer where 29 bits hold it and a double elsewhere, `list` and `tuple` a dense array, `dict` an
    anonymous dynamic object. Of what only AMF0 has, `EcmaArray` becomes an associative array, `TypedObject` an object
    with sealed members, `AvmPlus` its content, `UNSUPPORTED` undefined; the zone of a `Date` is not written.

    Raises:
        LocalProtocolError: a value has no AMF3 form, a name is no `str` or is empty, an object lacks a sealed member,
            names one twice, or has an undeclared one without being dynamic, a text has a lone surrogate, a number does
            not fit, or the structure is deeper than 128 levels (a value that contains itself is), or has more than 2^20
            values.
    """
    writer = Amf3Writer([])
    try:
        for value in values:
            writer.value(value, 0)
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"not encodable as AMF3: {error}") from error
    return b"".join(writer.parts)


def encode_u29(value: int) -> bytes:
    """Return `value` (0..2^29-1) in 1 to 4 octets: 7 bits in each of the first three, 8 in the fourth (AMF3 1.3.1).

    Raises:
        LocalProtocolError: `value` is outside.
    """
    if 0 <= value < 0x80:
        return bytes((value,))
    if 0 <= value < 0x4000:
        return bytes((value >> 7 | 0x80, value & 0x7F))
    if 0 <= value < 0x200000:
        return bytes((value >> 14 | 0x80, value >> 7 & 0x7F | 0x80, value & 0x7F))
    if 0 <= value <= U29_MAX:
        return bytes((value >> 22 | 0x80, value >> 15 & 0x7F | 0x80, value >> 8 & 0x7F | 0x80, value & 0xFF))
    raise LocalProtocolError(f"{value} does not fit the 29 bits of an AMF3 length or index")


class Amf3Writer:
    """The encoded parts of one message and its reference tables.

    Args:
        parts: where to append what is written; the AMF0 encoder passes its own.

    Attributes:
        parts: the same.
        room: values that may still be written.
    """

    __slots__ = ("_strings", "_traits", "parts", "room")

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts
        self.room = MAX_ENCODED_NODES
        self._strings: dict[str, int] = {}  # text -> index in the string table of the reader
        self._traits: dict[tuple[str, tuple[str, ...], bool], int] = {}  # class, sealed, dynamic -> index

    def value(self, value: AmfValue, depth: int) -> None:
        """Write `value`, which is in a container of level `depth` (0 for none)."""
        (_WRITERS.get(type(value)) or _inherited_writer(value))(self, value, depth)

    def enter(self, count: int, depth: int) -> None:
        """Begin a container of `count` values at level `depth`."""
        self.room -= count
        if depth > MAX_DEPTH or self.room < 0:
            raise LocalProtocolError(
                f"AMF3 structure beyond {MAX_DEPTH} levels or {MAX_ENCODED_NODES} values; does it contain itself?"
            )

    def string(self, text: str) -> None:
        """Write a string without its marker: its index if it was written before. The empty one has no index."""
        if not isinstance(text, str):
            raise LocalProtocolError(f"AMF names are str, not {type(text).__name__}")
        index = self._strings.get(text)
        if index is not None:
            self.parts.append(encode_u29(index << 1))
            return
        if text:
            self._strings[text] = len(self._strings)
        self.octets(text.encode())

    def octets(self, raw: bytes | bytearray) -> None:
        """Write a length with the mark of an inline value, and `raw`."""
        self.parts.append(encode_u29(len(raw) << 1 | 1))
        self.parts.append(raw if type(raw) is bytes else bytes(raw))

    def traits(self, class_name: str, sealed: tuple[str, ...], *, dynamic: bool) -> None:
        """Write the head of an object: its class's traits, or their index if they were written before."""
        key = (class_name, sealed, dynamic)
        index = self._traits.get(key)
        if index is not None:
            self.parts.append(encode_u29(index << 2 | 0b01))
            return
        self._traits[key] = len(self._traits)
        self.parts.append(encode_u29(len(sealed) << 4 | dynamic << 3 | 0b011))
        self.string(class_name)
        for name in sealed:
            self.string(name)

    def members(self, members: Mapping[str, AmfValue], depth: int) -> None:
        """Write named members of a container at level `depth`, and the empty name that ends them."""
        for name, value in members.items():
            if name == "":
                raise LocalProtocolError("AMF3 cannot send a member of the empty name: it marks the end of members")
            self.string(name)
            self.value(value, depth)
        self.parts.append(b"\x01")


_Write: TypeAlias = Callable[[Amf3Writer, AmfValue, int], None]
"""Writes one value: the writer, the value, the level of the container around it."""


def _write_undefined(writer: Amf3Writer, _value: Undefined, _depth: int) -> None:
    writer.parts.append(b"\x00")


def _write_null(writer: Amf3Writer, _value: None, _depth: int) -> None:
    writer.parts.append(b"\x01")


def _write_boolean(writer: Amf3Writer, value: AmfValue, _depth: int) -> None:
    writer.parts.append(b"\x03" if value else b"\x02")


def _write_integer(writer: Amf3Writer, value: int, _depth: int) -> None:
    if INT_MIN <= value <= INT_MAX:
        writer.parts.append(b"\x04")
        writer.parts.append(encode_u29(value & U29_MAX))
    else:
        writer.parts.append(_pack_double(0x05, value))


def _write_double(writer: Amf3Writer, value: float, _depth: int) -> None:
    writer.parts.append(_pack_double(0x05, value))


def _write_string(writer: Amf3Writer, value: str, _depth: int) -> None:
    writer.parts.append(b"\x06")
    writer.string(value)


def _write_xml(writer: Amf3Writer, value: Xml, _depth: int) -> None:
    writer.parts.append(b"\x0b" if value.e4x else b"\x07")
    writer.octets(value.text.encode())


def _write_date(writer: Amf3Writer, value: Date, _depth: int) -> None:
    writer.parts.append(_pack_date(0x08, 0x01, value.ms))


def _write_byte_array(writer: Amf3Writer, value: bytes | bytearray, _depth: int) -> None:
    writer.parts.append(b"\x0c")
    writer.octets(value)


def _write_array(writer: Amf3Writer, value: Amf3Array, depth: int) -> None:
    depth += 1
    writer.enter(len(value.dense) + len(value.assoc), depth)
    writer.parts.append(b"\x09")
    writer.parts.append(encode_u29(len(value.dense) << 1 | 1))
    writer.members(value.assoc, depth)
    for item in value.dense:
        writer.value(item, depth)


def _write_list(writer: Amf3Writer, value: list[AmfValue] | tuple[AmfValue, ...], depth: int) -> None:
    _write_array(writer, Amf3Array(list(value)), depth)


def _write_ecma_array(writer: Amf3Writer, value: EcmaArray, depth: int) -> None:
    _write_array(writer, Amf3Array([], value), depth)


def _write_object(writer: Amf3Writer, value: Amf3Object, depth: int) -> None:
    depth += 1
    members = value.properties
    sealed = frozenset(value.sealed)
    if len(sealed) < len(value.sealed):
        raise LocalProtocolError(f"Amf3Object names a sealed member twice in {value.sealed}")
    if not sealed <= members.keys():
        raise LocalProtocolError(f"Amf3Object lacks the sealed members {sorted(sealed - members.keys())}")
    if not value.dynamic and len(members) > len(sealed):
        raise LocalProtocolError(f"Amf3Object is not dynamic, but has {sorted(members.keys() - sealed)} unsealed")
    writer.enter(len(members) + len(value.sealed), depth)
    writer.parts.append(b"\x0a")
    writer.traits(value.class_name, value.sealed, dynamic=value.dynamic)
    for name in value.sealed:
        writer.value(members[name], depth)
    if value.dynamic:
        writer.members({name: item for name, item in members.items() if name not in sealed}, depth)


def _write_dict(writer: Amf3Writer, value: dict[str, AmfValue], depth: int) -> None:
    _write_object(writer, Amf3Object(properties=value), depth)


def _write_typed_object(writer: Amf3Writer, value: TypedObject, depth: int) -> None:
    members = value.properties
    _write_object(writer, Amf3Object(value.class_name, tuple(members), dynamic=False, properties=members), depth)


def _write_numbers(
    writer: Amf3Writer, value: IntVector | UintVector | DoubleVector, depth: int, marker: int, code: str
) -> None:
    """Write a vector of numbers; `code` is the struct code of one."""
    writer.enter(len(value.values), depth + 1)
    writer.parts.append(bytes((marker,)) + encode_u29(len(value.values) << 1 | 1) + bytes((value.fixed,)))
    writer.parts.append(struct.pack(f">{len(value.values)}{code}", *value.values))


def _write_int_vector(writer: Amf3Writer, value: IntVector, depth: int) -> None:
    _write_numbers(writer, value, depth, 0x0D, "i")


def _write_uint_vector(writer: Amf3Writer, value: UintVector, depth: int) -> None:
    _write_numbers(writer, value, depth, 0x0E, "I")


def _write_double_vector(writer: Amf3Writer, value: DoubleVector, depth: int) -> None:
    _write_numbers(writer, value, depth, 0x0F, "d")


def _write_object_vector(writer: Amf3Writer, value: ObjectVector, depth: int) -> None:
    depth += 1
    writer.enter(len(value.values), depth)
    writer.parts.append(b"\x10" + encode_u29(len(value.values) << 1 | 1) + bytes((value.fixed,)))
    writer.string(value.type_name)
    for item in value.values:
        writer.value(item, depth)


def _write_dictionary(writer: Amf3Writer, value: Dictionary, depth: int) -> None:
    depth += 1
    writer.enter(2 * len(value.entries), depth)
    writer.parts.append(b"\x11" + encode_u29(len(value.entries) << 1 | 1) + bytes((value.weak_keys,)))
    for key, item in value.entries:
        writer.value(key, depth)
        writer.value(item, depth)


def _write_avm_plus(writer: Amf3Writer, value: AvmPlus, depth: int) -> None:
    writer.enter(0, depth + 1)  # wrappers around wrappers have to end somewhere too
    writer.value(value.value, depth + 1)


_WRITERS: Final[dict[type, _Write]] = {
    Undefined: _write_undefined,
    type(None): _write_null,
    bool: _write_boolean,
    int: _write_integer,
    float: _write_double,
    str: _write_string,
    Xml: _write_xml,
    Date: _write_date,
    bytes: _write_byte_array,
    bytearray: _write_byte_array,
    list: _write_list,
    tuple: _write_list,
    Amf3Array: _write_array,
    EcmaArray: _write_ecma_array,
    dict: _write_dict,
    Amf3Object: _write_object,
    TypedObject: _write_typed_object,
    IntVector: _write_int_vector,
    UintVector: _write_uint_vector,
    DoubleVector: _write_double_vector,
    ObjectVector: _write_object_vector,
    Dictionary: _write_dictionary,
    AvmPlus: _write_avm_plus,
}


def _inherited_writer(value: AmfValue) -> _Write:
    """Return the writer of the nearest base class of `value`'s type; an IntEnum, say, is written as an integer."""
    for base in type(value).__mro__:
        if base in _WRITERS:
            return _WRITERS[base]
    raise LocalProtocolError(f"{type(value).__name__} has no AMF3 form")
