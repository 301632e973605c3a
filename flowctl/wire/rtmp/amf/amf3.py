"""AMF3: the value format of ActionScript 3, its layout, its reader and its writer.

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
indexed by marker reads one body each. A container enters the object table before its members do, without an account,
and gets its account when it is complete.

How it is written: `Amf3Writer` collects the parts of a message, and a table of functions indexed by Python type writes
one value each. Strings and traits that were written before are referred to, as every writer of AMF3 does, and as every
reader must keep those tables. Objects are never referred to: each is written out where it occurs, so that a reader gets
a tree, whatever our caller shares between its values.

Where it could be guessed, it is not: an externalizable object has no length, so without its class the rest of the
message has no meaning; the message is refused (``amf-externalizable``). A reference under a marker of another type is
taken for what it refers to. Of two members of one name the later wins.

Source: AMF3 specification (Adobe, 2013), sections 1.3 and 3; traits in 3.12. See `limits` for limits and bad UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final, NoReturn, TypeAlias

from flowctl.errors import LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.amf.codec import (
    as_bytes,
    by_marker,
    check_offset,
    constant,
    inherited,
    read_all,
    read_one,
    truncated,
    write_all,
)
from flowctl.wire.rtmp.amf.limits import DEFAULT_LIMITS, AmfLimits, Meter, Table, WriteMeter
from flowctl.wire.rtmp.amf.values import (
    UNDEFINED,
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

# Markers, AMF3 3.1.
_UNDEFINED: Final = 0x00
_NULL: Final = 0x01
_FALSE: Final = 0x02
_TRUE: Final = 0x03
_INTEGER: Final = 0x04
_DOUBLE: Final = 0x05
_STRING: Final = 0x06
_XML_DOCUMENT: Final = 0x07
_DATE: Final = 0x08
_ARRAY: Final = 0x09
_OBJECT: Final = 0x0A
_XML: Final = 0x0B
_BYTE_ARRAY: Final = 0x0C
_INT_VECTOR: Final = 0x0D
_UINT_VECTOR: Final = 0x0E
_DOUBLE_VECTOR: Final = 0x0F
_OBJECT_VECTOR: Final = 0x10
_DICTIONARY: Final = 0x11

U29_MAX: Final = (1 << 29) - 1
"""Largest number that four octets of U29 hold (AMF3 1.3.1)."""

INT_MIN: Final = -(1 << 28)
INT_MAX: Final = (1 << 28) - 1
"""What the integer type holds (AMF3 3.6); an `int` beyond is written as a double, as ActionScript does."""

_INT_SIGN: Final = 1 << 28
"""The sign bit of an integer within its U29 (AMF3 3.6)."""

_unpack_double = struct.Struct(">d").unpack_from
_pack_double = struct.Struct(">Bd").pack
_pack_date = struct.Struct(">BBd").pack


def decode(data: bytes | bytearray | memoryview, limits: AmfLimits = DEFAULT_LIMITS) -> list[AmfValue]:
    """Decode the whole of `data`, a sequence of AMF3 values that share their reference tables; as `amf0.decode`."""
    return read_all(Amf3Reader(as_bytes(data), Meter(limits)), "AMF3")


def decode_one(
    data: bytes | bytearray | memoryview, offset: int = 0, limits: AmfLimits = DEFAULT_LIMITS
) -> tuple[AmfValue, int]:
    """Decode the one value that begins at `offset`, with reference tables of its own; as `amf0.decode_one`."""
    return read_one(Amf3Reader(as_bytes(data), Meter(limits)), offset, "AMF3")


def decode_u29(data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[int, int]:
    """Decode the U29 at `offset`; return its value, 0..2^29-1, and the offset after it (AMF3 1.3.1)."""
    check_offset(offset)
    try:
        return read_u29(data, offset)
    except IndexError:
        raise truncated("AMF3") from None


def encode(*values: AmfValue) -> bytes:
    """Encode `values`, one after the other and with shared reference tables, as AMF3.

    `int` becomes an integer where 29 bits hold it and a double elsewhere, `list` and `tuple` a dense array, `dict` an
    anonymous dynamic object. Of what only AMF0 has, `EcmaArray` becomes an associative array, `TypedObject` an object
    with sealed members, `AvmPlus` its content, `UNSUPPORTED` undefined; the zone of a `Date` is not written.
    """
    return write_all(Amf3Writer([], WriteMeter()), values, "AMF3")


def encode_u29(value: int) -> bytes:
    """Return `value` (0..2^29-1) in 1 to 4 octets: 7 bits in each of the first three, 8 in the fourth (AMF3 1.3.1)."""
    if 0 <= value < 0x80:
        return bytes((value,))
    if 0 <= value < 0x4000:
        return bytes((value >> 7 | 0x80, value & 0x7F))
    if 0 <= value < 0x200000:
        return bytes((value >> 14 | 0x80, value >> 7 & 0x7F | 0x80, value & 0x7F))
    if 0 <= value <= U29_MAX:
        return bytes((value >> 22 | 0x80, value >> 15 & 0x7F | 0x80, value >> 8 & 0x7F | 0x80, value & 0xFF))
    raise LocalProtocolError(f"{value} does not fit the 29 bits of an AMF3 length or index")


# ------------------------------------------------------------------------------------------------------ reading

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

    Attributes:
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
        """Read the value at `pos`, whose own node has been paid for; return it and the position after it."""
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


def _read_integer(reader: Amf3Reader, pos: int, _depth: int) -> tuple[int, int]:
    value, pos = read_u29(reader.data, pos)
    return (value ^ _INT_SIGN) - _INT_SIGN, pos


def _read_double(reader: Amf3Reader, pos: int, _depth: int) -> tuple[float, int]:
    return _unpack_double(reader.data, pos)[0], pos + 8


def _read_string(reader: Amf3Reader, pos: int, _depth: int) -> tuple[str, int]:
    return reader.string(pos, reader.meter.string_max)


def _read_xml(reader: Amf3Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    e4x = reader.data[pos - 1] == _XML
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
    _INT_VECTOR: (IntVector, 4, "i"),
    _UINT_VECTOR: (UintVector, 4, "I"),
    _DOUBLE_VECTOR: (DoubleVector, 8, "d"),
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
        f"AMF3 has no marker 0x{reader.data[pos - 1]:02x} (byte {pos - 1})", code="amf-unknown-marker"
    )


_READERS: Final[tuple[_Read, ...]] = by_marker(
    {
        _UNDEFINED: constant(UNDEFINED),
        _NULL: constant(None),
        _FALSE: constant(False),
        _TRUE: constant(True),
        _INTEGER: _read_integer,
        _DOUBLE: _read_double,
        _STRING: _read_string,
        _XML_DOCUMENT: _read_xml,
        _DATE: _read_date,
        _ARRAY: _read_array,
        _OBJECT: _read_object,
        _XML: _read_xml,
        _BYTE_ARRAY: _read_byte_array,
        _INT_VECTOR: _read_number_vector,
        _UINT_VECTOR: _read_number_vector,
        _DOUBLE_VECTOR: _read_number_vector,
        _OBJECT_VECTOR: _read_object_vector,
        _DICTIONARY: _read_dictionary,
    },
    _refuse_unknown,
)


# ------------------------------------------------------------------------------------------------------ writing

_MARK: Final = tuple(bytes((marker,)) for marker in range(_DICTIONARY + 1))
"""Each marker as it is written."""
_INLINE: Final = 1
"""The U29 of a date that is no reference (AMF3 3.10)."""
_NO_NAME: Final = b"\x01"
"""The empty string, which ends members."""


class Amf3Writer:
    """The encoded parts of one message and its reference tables."""

    __slots__ = ("_strings", "_traits", "meter", "parts")

    def __init__(self, parts: list[bytes], meter: WriteMeter) -> None:
        self.parts = parts
        self.meter = meter
        self._strings: dict[str, int] = {}  # text -> index in the string table of the reader
        self._traits: dict[tuple[str, tuple[str, ...], bool], int] = {}  # class, sealed, dynamic -> index

    def value(self, value: AmfValue, depth: int) -> None:
        """Write `value`, which is in a container of level `depth` (0 for none)."""
        (_WRITERS.get(type(value)) or inherited(_WRITERS, value, "AMF3"))(self, value, depth)

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
        self.parts.append(_NO_NAME)


_Write: TypeAlias = Callable[[Amf3Writer, AmfValue, int], None]
"""Writes one value: the writer, the value, the level of the container around it."""


def _write_undefined(writer: Amf3Writer, _value: Undefined, _depth: int) -> None:
    writer.parts.append(_MARK[_UNDEFINED])


def _write_null(writer: Amf3Writer, _value: None, _depth: int) -> None:
    writer.parts.append(_MARK[_NULL])


def _write_boolean(writer: Amf3Writer, value: AmfValue, _depth: int) -> None:
    writer.parts.append(_MARK[_TRUE if value else _FALSE])


def _write_integer(writer: Amf3Writer, value: int, _depth: int) -> None:
    if INT_MIN <= value <= INT_MAX:
        writer.parts.append(_MARK[_INTEGER])
        writer.parts.append(encode_u29(value & U29_MAX))
    else:
        writer.parts.append(_pack_double(_DOUBLE, value))


def _write_double(writer: Amf3Writer, value: float, _depth: int) -> None:
    writer.parts.append(_pack_double(_DOUBLE, value))


def _write_string(writer: Amf3Writer, value: str, _depth: int) -> None:
    writer.parts.append(_MARK[_STRING])
    writer.string(value)


def _write_xml(writer: Amf3Writer, value: Xml, _depth: int) -> None:
    writer.parts.append(_MARK[_XML if value.e4x else _XML_DOCUMENT])
    writer.octets(value.text.encode())


def _write_date(writer: Amf3Writer, value: Date, _depth: int) -> None:
    writer.parts.append(_pack_date(_DATE, _INLINE, value.ms))


def _write_byte_array(writer: Amf3Writer, value: bytes | bytearray, _depth: int) -> None:
    writer.parts.append(_MARK[_BYTE_ARRAY])
    writer.octets(value)


def _write_array(writer: Amf3Writer, value: Amf3Array, depth: int) -> None:
    depth += 1
    writer.meter.enter(len(value.dense) + len(value.assoc), depth)
    writer.parts.append(_MARK[_ARRAY])
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
    writer.meter.enter(len(members) + len(value.sealed), depth)
    writer.parts.append(_MARK[_OBJECT])
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
    writer.meter.enter(len(value.values), depth + 1)
    writer.parts.append(_MARK[marker] + encode_u29(len(value.values) << 1 | 1) + bytes((value.fixed,)))
    writer.parts.append(struct.pack(f">{len(value.values)}{code}", *value.values))


def _write_int_vector(writer: Amf3Writer, value: IntVector, depth: int) -> None:
    _write_numbers(writer, value, depth, _INT_VECTOR, "i")


def _write_uint_vector(writer: Amf3Writer, value: UintVector, depth: int) -> None:
    _write_numbers(writer, value, depth, _UINT_VECTOR, "I")


def _write_double_vector(writer: Amf3Writer, value: DoubleVector, depth: int) -> None:
    _write_numbers(writer, value, depth, _DOUBLE_VECTOR, "d")


def _write_object_vector(writer: Amf3Writer, value: ObjectVector, depth: int) -> None:
    depth += 1
    writer.meter.enter(len(value.values), depth)
    writer.parts.append(_MARK[_OBJECT_VECTOR] + encode_u29(len(value.values) << 1 | 1) + bytes((value.fixed,)))
    writer.string(value.type_name)
    for item in value.values:
        writer.value(item, depth)


def _write_dictionary(writer: Amf3Writer, value: Dictionary, depth: int) -> None:
    depth += 1
    writer.meter.enter(2 * len(value.entries), depth)
    writer.parts.append(_MARK[_DICTIONARY] + encode_u29(len(value.entries) << 1 | 1) + bytes((value.weak_keys,)))
    for key, item in value.entries:
        writer.value(key, depth)
        writer.value(item, depth)


def _write_avm_plus(writer: Amf3Writer, value: AvmPlus, depth: int) -> None:
    writer.meter.enter(0, depth + 1)  # wrappers around wrappers have to end somewhere too
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
