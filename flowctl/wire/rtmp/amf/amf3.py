"""AMF3: the value format of ActionScript 3, its layout and its reader. We never write it: peers take AMF0.

A value is one marker octet and a body whose form the marker gives. Lengths, counts and indexes are U29: 1 to 4 octets
that hold 29 bits, of which the lowest says what the rest is: 1 an inline value's length or count, 0 an index into a
table of what came before in the message.

    00 undefined  01 null  02 false  03 true
    04 integer       U29, of which bit 28 is the sign
    05 double        8 octets, big-endian
    06 string        U29, UTF-8                                             indexes the string table
    07 XML document  U29, UTF-8                                             from here on: the object table
    08 date          U29, double ms
    09 array         U29 count, members, count values
    0A object        U29 traits (below), sealed values, members if dynamic
    0B XML           U29, UTF-8
    0C ByteArray     U29, octets
    0D 0E 0F vector  U29 count, fixed:1, count numbers of 4, 4, 8 octets (int, uint, double)
    10 vector        U29 count, fixed:1, type name (string), count values
    11 dictionary    U29 count, weak:1, count times key value, value
    members: any number of (name as string, value), then the empty string
    traits:  ..01 index into the traits table; c..cd011 inline: c sealed names, d dynamic: class name, c names;
             ..111 externalizable: class name, and then octets that only the class itself can read

How it is read: `Amf3Reader` holds the octets and the three reference tables of a message, and a table of functions
indexed by marker reads one body each. Values are plain: an object is a `dict` without its class, a vector a `list`, a
dictionary a `list` of [key, value], an array a `list`, or a `dict` where it has names (its other values under "0", "1"
and so on, as ActionScript indexes them). So a command in AMF3 reads like one in AMF0.

Where it could be guessed, it is not: an externalizable object has no length, so without its class the rest of the
message has no meaning; the message is refused (``amf-externalizable``). A reference under a marker of another type is
taken for what it refers to. Of two members of one name the later wins.

Source: AMF3 specification (Adobe, 2013), sections 1.3 and 3; traits in 3.12. See `limits` for limits and bad UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NoReturn, TypeAlias

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp.amf.limits import DEFAULT_LIMITS, AmfLimits, Meter, Table
from flowctl.wire.rtmp.amf.reading import MessageReader, Read, as_bytes, by_marker, constant, read_all, truncated
from flowctl.wire.rtmp.amf.values import UNDEFINED, AmfValue, Date, Xml

_INT_SIGN: Final = 1 << 28
"""The sign bit of an integer within its U29 (AMF3 3.6)."""

_unpack_double = struct.Struct(">d").unpack_from


def decode(data: bytes | bytearray | memoryview, limits: AmfLimits = DEFAULT_LIMITS) -> list[AmfValue]:
    """Decode the whole of `data`, a sequence of AMF3 values that share their reference tables; as `amf0.decode`."""
    return read_all(Amf3Reader(as_bytes(data), Meter(limits)))


_Traits: TypeAlias = tuple[tuple[str, ...], bool, int]
"""Names of sealed members, dynamic, and the octets that all names have when written out, that of the class too."""


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


class Amf3Reader(MessageReader):
    """The octets of one message and its three reference tables."""

    __slots__ = ("_strings", "objects", "traits")
    format = "AMF3"

    def __init__(self, data: bytes, meter: Meter) -> None:
        super().__init__(data, meter)
        # everything complex by index, in the order of first octets. A container enters it before its members do,
        # without an account, and gets its account when it is complete.
        self.objects: Table = []
        self.traits: list[_Traits] = []  # class descriptions by index
        self._strings: list[tuple[str, int]] = []  # text and its octets of UTF-8; the empty string is never entered

    def value(self, pos: int, depth: int) -> tuple[AmfValue, int]:
        return _READERS[self.data[pos]](self, pos + 1, depth)

    def string(self, pos: int, maximum: int) -> tuple[str, int]:
        """Read a string without its marker, inline or by index, at most `maximum` octets long (AMF3 1.3.2)."""
        head, pos = read_u29(self.data, pos)
        if head & 1:
            if head == 1:
                return "", pos
            text, pos = self.text(pos, head >> 1, maximum)
            self._strings.append((text, octets_of(text)))
            return text, pos
        index = head >> 1
        if index >= len(self._strings):
            raise RemoteProtocolError(
                f"AMF3 reference to string {index}, there are {len(self._strings)} so far", code="amf-bad-reference"
            )
        text, octets = self._strings[index]
        self.meter.check_length(octets, maximum)
        self.meter.pay_repeated(octets)
        return text, pos

    def members(self, pos: int, depth: int, out: dict[str, AmfValue]) -> int:
        while True:
            name, pos = self.string(pos, self.meter.name_max)
            if not name:
                return pos
            self.meter.pay_for(1)
            out[name], pos = self.value(pos, depth)

    def values(self, count: int, pos: int, depth: int) -> tuple[list[AmfValue], int]:
        self.expect(count, 1, pos)
        values = []
        for _ in range(count):
            value, pos = self.value(pos, depth)
            values.append(value)
        return values, pos

    def expect(self, count: int, octets: int, pos: int) -> None:
        """Pay for `count` values, each of at least `octets` octets, that shall follow at `pos`.

        This is what keeps a count from costing more than the data: nothing is built before it passes.
        """
        if count * octets > self.end - pos:
            raise truncated("AMF3")
        self.meter.pay_for(count)


def octets_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _read_integer(reader: Amf3Reader, pos: int, _depth: int) -> tuple[int, int]:
    value, pos = read_u29(reader.data, pos)
    return (value ^ _INT_SIGN) - _INT_SIGN, pos


def _read_double(reader: Amf3Reader, pos: int, _depth: int) -> tuple[float, int]:
    return _unpack_double(reader.data, pos)[0], pos + 8


def _read_string(reader: Amf3Reader, pos: int, _depth: int) -> tuple[str, int]:
    return reader.string(pos, reader.meter.string_max)


_ReadBody: TypeAlias = Callable[[Amf3Reader, int, int, int], tuple[AmfValue, int]]
"""Reads what follows the U29 of an inline value: the reader, the U29 without its lowest bit, the position, the level of
the value itself; returns the value and the position after it."""


def _leaf(read: _ReadBody) -> Read[Amf3Reader]:
    """Return what reads a value of the object table that contains no others, inline or by index."""

    def read_leaf(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
        head, start = read_u29(reader.data, pos)
        if not head & 1:
            return reader.meter.resolve(reader.objects, head >> 1, depth), start
        value, pos = read(reader, head >> 1, start, depth)
        octets = octets_of(value.text) if isinstance(value, Xml) else pos - start
        reader.objects.append((value, 0, octets, 0))
        return value, pos

    return read_leaf


def _container(read: _ReadBody) -> Read[Amf3Reader]:
    """Return what reads a value of the object table that contains others, inline or by index."""

    def read_container(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
        head, pos = read_u29(reader.data, pos)
        if not head & 1:
            return reader.meter.resolve(reader.objects, head >> 1, depth), pos
        mark = reader.meter.begin(pos, depth + 1)
        index = len(reader.objects)
        reader.objects.append(None)
        value, pos = read(reader, head >> 1, pos, depth + 1)
        reader.objects[index] = reader.meter.finish(mark, value, pos)
        return value, pos

    return read_container


def _read_xml(reader: Amf3Reader, length: int, pos: int, _depth: int) -> tuple[Xml, int]:
    text, pos = reader.text(pos, length, reader.meter.string_max)
    return Xml(text), pos


def _read_date(reader: Amf3Reader, _unused: int, pos: int, _depth: int) -> tuple[Date, int]:
    return Date(_unpack_double(reader.data, pos)[0]), pos + 8


def _read_byte_array(reader: Amf3Reader, length: int, pos: int, _depth: int) -> tuple[bytes, int]:
    if pos + length > reader.end:
        raise truncated("AMF3")
    reader.meter.check_length(length, reader.meter.string_max)
    return reader.data[pos : pos + length], pos + length


def _read_array(reader: Amf3Reader, count: int, pos: int, depth: int) -> tuple[AmfValue, int]:
    named: dict[str, AmfValue] = {}
    pos = reader.members(pos, depth, named)
    dense, pos = reader.values(count, pos, depth)
    return {str(index): item for index, item in enumerate(dense)} | named if named else dense, pos


def _read_traits(reader: Amf3Reader, head: int, pos: int) -> tuple[_Traits, int]:
    """Read the traits that `head`, the U29 of an object without its lowest bit, announces."""
    if not head & 0b1:
        index = head >> 1
        if index >= len(reader.traits):
            raise RemoteProtocolError(
                f"AMF3 reference to traits {index}, there are {len(reader.traits)} so far", code="amf-bad-reference"
            )
        traits = reader.traits[index]
        reader.meter.pay_repeated(traits[2])  # sent on as AMF0, every object carries its names
        return traits, pos
    name_max = reader.meter.name_max
    class_name, pos = reader.string(pos, name_max)
    if head & 0b10:
        raise RemoteProtocolError(
            f"AMF3 class {class_name[:64]!r} is externalizable: only the class itself knows its layout and length",
            code="amf-externalizable",
        )
    count = head >> 3
    # Each name announces a value, paid for here and given back below: the values are paid for with each object.
    reader.expect(count, 1, pos)
    reader.meter.room += count
    names = []
    for _ in range(count):
        name, pos = reader.string(pos, name_max)
        names.append(name)
    if len(set(names)) < count:  # no class can declare a member twice
        raise RemoteProtocolError(
            f"AMF3 class {class_name[:64]!r} declares a member of one name twice", code="amf-bad-traits"
        )
    traits = (tuple(names), head & 0b100 != 0, octets_of(class_name) + sum(map(octets_of, names)))
    reader.traits.append(traits)
    return traits, pos


def _read_object(reader: Amf3Reader, head: int, pos: int, depth: int) -> tuple[AmfValue, int]:
    (sealed, dynamic, _), pos = _read_traits(reader, head, pos)
    values, pos = reader.values(len(sealed), pos, depth)
    members = dict(zip(sealed, values, strict=True))
    if dynamic:
        pos = reader.members(pos, depth, members)
    return members, pos


def _number_vector(octets: int, code: str) -> Read[Amf3Reader]:
    """Return what reads a vector of numbers of that many octets and that code of `struct`."""

    def read(reader: Amf3Reader, count: int, pos: int, _depth: int) -> tuple[AmfValue, int]:
        reader.expect(count, octets, pos + 1)  # an octet says whether its length is fixed
        return list(struct.unpack_from(f">{count}{code}", reader.data, pos + 1)), pos + 1 + count * octets

    return _container(read)


def _read_object_vector(reader: Amf3Reader, count: int, pos: int, depth: int) -> tuple[AmfValue, int]:
    _, pos = reader.string(pos + 1, reader.meter.name_max)  # the name of the members' class
    return reader.values(count, pos, depth)


def _read_dictionary(reader: Amf3Reader, count: int, pos: int, depth: int) -> tuple[AmfValue, int]:
    if not count:
        return [], pos + 1
    mark = reader.meter.begin(pos, depth + 1)  # each pair is a list of its own, one level further down
    items, pos = reader.values(2 * count, pos + 1, depth + 1)  # an octet says whether keys are held weakly
    reader.meter.pay_for(count)
    pairs = [list(pair) for pair in zip(items[::2], items[1::2], strict=True)]
    reader.meter.finish(mark, pairs, pos)
    return pairs, pos


def _refuse_unknown(reader: Amf3Reader, pos: int, _depth: int) -> NoReturn:
    raise RemoteProtocolError(
        f"AMF3 has no marker 0x{reader.data[pos - 1]:02x} (byte {pos - 1})", code="amf-unknown-marker"
    )


# By marker, AMF3 3.1.
_READERS: Final[tuple[Read[Amf3Reader], ...]] = by_marker(
    {
        0x00: constant(UNDEFINED),
        0x01: constant(None),
        0x02: constant(False),
        0x03: constant(True),
        0x04: _read_integer,
        0x05: _read_double,
        0x06: _read_string,
        0x07: _leaf(_read_xml),
        0x08: _leaf(_read_date),
        0x09: _container(_read_array),
        0x0A: _container(_read_object),
        0x0B: _leaf(_read_xml),
        0x0C: _leaf(_read_byte_array),
        0x0D: _number_vector(4, "i"),
        0x0E: _number_vector(4, "I"),
        0x0F: _number_vector(8, "d"),
        0x10: _container(_read_object_vector),
        0x11: _container(_read_dictionary),
    },
    _refuse_unknown,
)
