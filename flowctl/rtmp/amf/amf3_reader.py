"""Decoding of AMF3 values; the layout and its rules are described in `amf3`, which is where callers decode from.

How it works: `Amf3Reader` holds the octets and the three reference tables of a message, and a table of functions
indexed by marker reads one body each, as in `amf0`. Going over the end raises IndexError or struct.error, and this is
the check for truncation; the entry points in `amf3` and `amf0` map it. A container enters the object table before its
members do, without an account, and gets its account when it is complete.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NoReturn, TypeAlias

from flowctl.errors import RemoteProtocolError
from flowctl.rtmp.amf.limits import Meter, Table, truncated
from flowctl.rtmp.amf.values import (
    UNDEFINED,
    Amf3Array,
    Amf3Object,
    AmfValue,
    Date,
    Dictionary,
    DoubleVector,
    IntVector,
    ObjectVector,
    UintVector,
    Undefined,
    Xml,
)

_INT_SIGN: Final = 1 << 28
"""The sign bit of an integer within its U29 (AMF3 3.6)."""

_unpack_double = struct.Struct(">d").unpack_from

_Traits: TypeAlias = tuple[str, tuple[str, ...], bool, int]
"""Class name, names of sealed members, dynamic, and the octets that all these names have when written out."""


def read_u29(data: bytes | bytearray | memoryview, pos: int) -> tuple[int, int]:
    """Read a U29: seven bits an octet, the top bit set while more follow; a fourth octet holds eight bits."""
    first = data[pos]
    if first < 0x80:
        return first, pos + 1
    second = data[pos + 1]
    if second < 0x80:
        return (first & 0x7F) << 7 | second, pos + 2
    third = data[pos + 2]
    if third < 0x80:
        return (first & 0x7F) << 14 | (second & 0x7F) << 7 | third, pos + 3
    return (first & 0x7F) << 22 | (second & 0x7F) << 15 | (third & 0x7F) << 8 | data[pos + 3], pos + 4


class Amf3Reader:
    """The octets of one message and its three reference tables.

    Args:
        data: the octets.
        meter: the account of the message.

    Attributes:
        data: the octets.
        end: how many there are.
        meter: the account of the message; the AMF0 decoder shares its own.
        objects: everything complex by index, in the order of first octets.
        traits: class descriptions by index.
    """

    __slots__ = ("_strings", "data", "end", "meter", "objects", "traits")

    def __init__(self, data: bytes, meter: Meter) -> None:
        self.data = data
        self.end = len(data)
        self.meter = meter
        self.objects: Table = []
        self.traits: list[_Traits] = []
        self._strings: list[tuple[str, int]] = []  # text and its octets of UTF-8; the empty string is never entered

    def value(self, pos: int, depth: int) -> tuple[AmfValue, int]:
        """Read the value at `pos`, whose own node has been paid for; return it and the position after it.

        Args:
            pos: where its marker is.
            depth: the level of the container around it, 0 for none.

        Raises:
            IndexError, struct.error: the data ends inside it; the entry points map this.
        """
        return _READERS[self.data[pos]](self, pos + 1, depth)

    def text(self, pos: int, length: int, maximum: int) -> tuple[str, int]:
        """Read `length` octets of UTF-8 at `pos`, at most `maximum`; return the text and its octets when sent on."""
        stop = pos + length
        if stop > self.end:  # first, so that a length without the data is never reported as a limit
            raise truncated("AMF3")
        self.meter.check_length(length, maximum)
        raw = self.data[pos:stop]
        try:
            return raw.decode(), length
        except UnicodeDecodeError:
            text = self.meter.repair(raw, maximum)
            return text, len(text.encode())

    def string(self, pos: int, maximum: int) -> tuple[str, int]:
        """Read a string without its marker, inline or by index, at most `maximum` octets long (AMF3 1.3.2)."""
        head, pos = read_u29(self.data, pos)
        if head & 1:
            if head == 1:
                return "", pos
            entry = self.text(pos, head >> 1, maximum)
            self._strings.append(entry)
            return entry[0], pos + (head >> 1)
        index = head >> 1
        if index >= len(self._strings):
            raise RemoteProtocolError(
                f"AMF3 reference to string {index}, there are {len(self._strings)} so far", code="amf-bad-reference"
            )
        text, octets = self._strings[index]
        self.meter.check_length(octets, maximum)
        self.meter.repeat(octets)
        return text, pos

    def members(self, pos: int, depth: int, out: dict[str, AmfValue]) -> int:
        """Read members into `out` up to and including the empty name; return the position after it."""
        data = self.data
        meter = self.meter
        name_max = meter.name_max
        while True:
            name, pos = self.string(pos, name_max)
            if not name:
                return pos
            meter.room -= 1
            if meter.room < 0:
                raise meter.over()
            out[name], pos = _READERS[data[pos]](self, pos + 1, depth)

    def expect(self, count: int, octets: int, pos: int) -> None:
        """Pay for `count` values, each of at least `octets` octets, that shall follow at `pos`.

        This is what keeps a count from costing more than the data: nothing is built before it passes.
        """
        if count * octets > self.end - pos:
            raise truncated("AMF3")
        self.meter.take(count)


_Read: TypeAlias = Callable[[Amf3Reader, int, int], tuple[AmfValue, int]]
"""Reads the body of one marker: the reader, the position after the marker, the level of the container around it (0 for
none); returns the value and the position after it."""


def _read_undefined(_reader: Amf3Reader, pos: int, _depth: int) -> tuple[Undefined, int]:
    return UNDEFINED, pos


def _read_null(_reader: Amf3Reader, pos: int, _depth: int) -> tuple[None, int]:
    return None, pos


def _read_false(_reader: Amf3Reader, pos: int, _depth: int) -> tuple[bool, int]:
    return False, pos


def _read_true(_reader: Amf3Reader, pos: int, _depth: int) -> tuple[bool, int]:
    return True, pos


def _read_integer(reader: Amf3Reader, pos: int, _depth: int) -> tuple[int, int]:
    value, pos = read_u29(reader.data, pos)
    return (value ^ _INT_SIGN) - _INT_SIGN, pos


def _read_double(reader: Amf3Reader, pos: int, _depth: int) -> tuple[float, int]:
    return _unpack_double(reader.data, pos)[0], pos + 8


def _read_string(reader: Amf3Reader, pos: int, _depth: int) -> tuple[str, int]:
    return reader.string(pos, reader.meter.string_max)


def _read_xml(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    e4x = reader.data[pos - 1] == 0x0B
    head, pos = read_u29(reader.data, pos)
    if not head & 1:
        return reader.meter.resolve(reader.objects, head >> 1, depth), pos
    text, octets = reader.text(pos, head >> 1, reader.meter.string_max)
    value = Xml(text, e4x)
    reader.objects.append((value, 0, octets, 0))
    return value, pos + (head >> 1)


def _read_date(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    head, pos = read_u29(reader.data, pos)
    if not head & 1:
        return reader.meter.resolve(reader.objects, head >> 1, depth), pos
    value = Date(_unpack_double(reader.data, pos)[0])
    reader.objects.append((value, 0, 9, 0))
    return value, pos + 8


def _read_byte_array(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    head, pos = read_u29(reader.data, pos)
    length = head >> 1
    if not head & 1:
        return reader.meter.resolve(reader.objects, length, depth), pos
    if pos + length > reader.end:
        raise truncated("AMF3")
    reader.meter.check_length(length, reader.meter.string_max)
    value = reader.data[pos : pos + length]
    reader.objects.append((value, 0, length, 0))
    return value, pos + length


def _read_array(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    head, pos = read_u29(reader.data, pos)
    if not head & 1:
        return reader.meter.resolve(reader.objects, head >> 1, depth), pos
    depth += 1
    mark = reader.meter.begin(pos, depth)
    index = len(reader.objects)
    reader.objects.append(None)
    value = Amf3Array()
    pos = reader.members(pos, depth, value.assoc)
    count = head >> 1
    reader.expect(count, 1, pos)
    for _ in range(count):
        item, pos = reader.value(pos, depth)
        value.dense.append(item)
    reader.objects[index] = reader.meter.finish(mark, value, pos)
    return value, pos


def _read_traits(reader: Amf3Reader, head: int, pos: int) -> tuple[_Traits, int]:
    """Read the traits that `head`, the U29 of an object, announces; return them and the position after them."""
    if head & 0b11 == 0b01:
        index = head >> 2
        if index >= len(reader.traits):
            raise RemoteProtocolError(
                f"AMF3 reference to traits {index}, there are {len(reader.traits)} so far", code="amf-bad-reference"
            )
        traits = reader.traits[index]
        reader.meter.repeat(traits[3])  # sent on as AMF0, every object carries its names
        return traits, pos
    name_max = reader.meter.name_max
    class_name, pos = reader.string(pos, name_max)
    if head & 0b100:
        raise RemoteProtocolError(
            f"AMF3 class {class_name[:64]!r} is externalizable: only the class itself knows its layout and length",
            code="amf-externalizable",
        )
    count = head >> 4
    # Each name announces a value, paid for here and given back below: the values are paid for with each object.
    reader.expect(count, 1, pos)
    reader.meter.room += count
    names = []
    for _ in range(count):
        name, pos = reader.string(pos, name_max)
        names.append(name)
    if len(set(names)) < count:
        # No class can declare a member twice. Such an object would keep the last value only, and be written out with
        # that value at each place of the name: at n levels of two equal names, 2^n values from n.
        raise RemoteProtocolError(
            f"AMF3 class {class_name[:64]!r} declares a member of one name twice", code="amf-bad-traits"
        )
    octets = len(class_name.encode()) + sum(len(name.encode()) for name in names)
    traits = (class_name, tuple(names), head & 0b1000 != 0, octets)
    reader.traits.append(traits)
    return traits, pos


def _read_object(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    head, pos = read_u29(reader.data, pos)
    if not head & 1:
        return reader.meter.resolve(reader.objects, head >> 1, depth), pos
    depth += 1
    mark = reader.meter.begin(pos, depth)
    index = len(reader.objects)
    reader.objects.append(None)
    (class_name, sealed, dynamic, _), pos = _read_traits(reader, head, pos)
    members: dict[str, AmfValue] = {}
    reader.expect(len(sealed), 1, pos)
    for name in sealed:
        members[name], pos = reader.value(pos, depth)
    if dynamic:
        pos = reader.members(pos, depth, members)
    value = Amf3Object(class_name, sealed, dynamic, members)
    reader.objects[index] = reader.meter.finish(mark, value, pos)
    return value, pos


# The three vectors of numbers by marker: class, octets of a number, its struct code.
_NUMBERS: Final[dict[int, tuple[Callable[..., IntVector | UintVector | DoubleVector], int, str]]] = {
    0x0D: (IntVector, 4, "i"),
    0x0E: (UintVector, 4, "I"),
    0x0F: (DoubleVector, 8, "d"),
}


def _read_number_vector(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    make, octets, code = _NUMBERS[reader.data[pos - 1]]
    head, pos = read_u29(reader.data, pos)
    if not head & 1:
        return reader.meter.resolve(reader.objects, head >> 1, depth), pos
    mark = reader.meter.begin(pos, depth + 1)
    fixed = reader.data[pos] != 0
    count = head >> 1
    reader.expect(count, octets, pos + 1)
    value = make(list(struct.unpack_from(f">{count}{code}", reader.data, pos + 1)), fixed)
    pos += 1 + count * octets
    reader.objects.append(reader.meter.finish(mark, value, pos))
    return value, pos


def _read_object_vector(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    head, pos = read_u29(reader.data, pos)
    if not head & 1:
        return reader.meter.resolve(reader.objects, head >> 1, depth), pos
    depth += 1
    mark = reader.meter.begin(pos, depth)
    index = len(reader.objects)
    reader.objects.append(None)
    fixed = reader.data[pos] != 0
    type_name, pos = reader.string(pos + 1, reader.meter.name_max)
    count = head >> 1
    reader.expect(count, 1, pos)
    value = ObjectVector([], type_name, fixed)
    for _ in range(count):
        item, pos = reader.value(pos, depth)
        value.values.append(item)
    reader.objects[index] = reader.meter.finish(mark, value, pos)
    return value, pos


def _read_dictionary(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    head, pos = read_u29(reader.data, pos)
    if not head & 1:
        return reader.meter.resolve(reader.objects, head >> 1, depth), pos
    depth += 1
    mark = reader.meter.begin(pos, depth)
    index = len(reader.objects)
    reader.objects.append(None)
    value = Dictionary([], reader.data[pos] != 0)
    pos += 1
    count = head >> 1
    reader.expect(2 * count, 1, pos)
    for _ in range(count):
        key, pos = reader.value(pos, depth)
        item, pos = reader.value(pos, depth)
        value.entries.append((key, item))
    reader.objects[index] = reader.meter.finish(mark, value, pos)
    return value, pos


def _refuse_unknown(reader: Amf3Reader, pos: int, _depth: int) -> NoReturn:
    raise RemoteProtocolError(
        f"AMF3 has no marker 0x{reader.data[pos - 1]:02x} (octet {pos - 1})", code="amf-unknown-marker"
    )


# Indexed by marker, all 256, so that a lookup cannot fail and an IndexError can only mean the end of the data.
_READERS: Final[tuple[_Read, ...]] = (
    _read_undefined,
    _read_null,
    _read_false,
    _read_true,
    _read_integer,
    _read_double,
    _read_string,
    _read_xml,
    _read_date,
    _read_array,
    _read_object,
    _read_xml,
    _read_byte_array,
    _read_number_vector,
    _read_number_vector,
    _read_number_vector,
    _read_object_vector,
    _read_dictionary,
) + (_refuse_unknown,) * (256 - 18)
