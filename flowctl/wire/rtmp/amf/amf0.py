"""AMF0: the value format of RTMP commands and metadata, its layout, its reader, its writer, and a walk that checks it.

A value is one marker octet and a body whose form the marker gives; every number is big-endian:

    00 number        8-octet double                     0A strict array  count:4, count values
    01 boolean       1 octet, 0 is false                0B date          8-octet double ms, zone:2 (signed)
    02 string        length:2, UTF-8                    0C long string   length:4, UTF-8
    03 object        members                            0D unsupported   nothing
    05 null          nothing                            0F XML document  length:4, UTF-8
    06 undefined     nothing                            10 typed object  length:2, class name, members
    07 reference     index:2                            11 AVM+          one AMF3 value
    08 ECMA array    count:4, members
    members: any number of (length:2, UTF-8 name, value), then 00 00 09

How it is read: `_Reader` holds the octets and the tables, and a table of functions indexed by marker reads one body
each. Members are read by one loop that does numbers, strings and booleans, nearly all there is, on the spot.

Where implementations disagree: an ECMA array ends at 00 00 09 whatever its count says (the count is wrong in practice,
the end marker is always there); a member of the empty name is a member unless marker 09 follows; of two members of one
name the later wins; references count objects, typed objects, ECMA and strict arrays in the order of their first octet,
over the whole message; all AVM+ values of a message share one set of AMF3 tables (as in Apache BlazeDS and Red5).

How it is written: `_Writer` collects the parts of a message, and a table of functions indexed by Python type writes one
value each. Members are written by one loop, with the names that RTMP uses all the time encoded in advance. What we
write is what every known reader reads: no references (gortmplib and rtmfp-cpp refuse them), the true number of members
in front of an ECMA array, and 00 00 09 behind it.

How it is walked: what is passed on as it came need only be safe for a later decoder. ``onMetaData`` of a
recorded film has an index of its key frames, arrays of tens of thousands of numbers. To decode it would make an object
of each; `walk` makes none, and passes an array of numbers in one step whatever its length.

Source: AMF0 specification (Adobe, 2007), sections 1.3 and 2; AVM+ in 3.1. See `limits` for limits and bad UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final, NoReturn, TypeAlias

from flowctl.errors import LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.amf.amf3 import Amf3Reader
from flowctl.wire.rtmp.amf.limits import DEFAULT_LIMITS, MAX_NAME_BYTES, AmfLimits, Meter, Table, WriteMeter
from flowctl.wire.rtmp.amf.reading import MessageReader, Read, as_bytes, by_marker, constant, read_all, truncated
from flowctl.wire.rtmp.amf.values import UNDEFINED, UNSUPPORTED, AmfValue, Date, EcmaArray, TypedObject, Undefined, Xml

# Markers, AMF0 2.1 and 3.1.
_NUMBER: Final = 0x00
_BOOLEAN: Final = 0x01
_STRING: Final = 0x02
_OBJECT: Final = 0x03
_MOVIE_CLIP: Final = 0x04  # reserved, 2.6
_NULL: Final = 0x05
_UNDEFINED: Final = 0x06
_REFERENCE: Final = 0x07
_ECMA_ARRAY: Final = 0x08
_OBJECT_END: Final = 0x09
_STRICT_ARRAY: Final = 0x0A
_DATE: Final = 0x0B
_LONG_STRING: Final = 0x0C
_UNSUPPORTED: Final = 0x0D
_RECORD_SET: Final = 0x0E  # reserved, 2.16
_XML: Final = 0x0F
_TYPED_OBJECT: Final = 0x10
_AVM_PLUS: Final = 0x11

_unpack_double = struct.Struct(">d").unpack_from
_unpack_u16 = struct.Struct(">H").unpack_from
_unpack_u32 = struct.Struct(">I").unpack_from
_unpack_date = struct.Struct(">dh").unpack_from
_pack_number = struct.Struct(">Bd").pack
_pack_u16 = struct.Struct(">H").pack
_pack_marked_u16 = struct.Struct(">BH").pack
_pack_marked_u32 = struct.Struct(">BI").pack
_pack_date = struct.Struct(">Bdh").pack


def decode(data: bytes | bytearray | memoryview, limits: AmfLimits = DEFAULT_LIMITS) -> list[AmfValue]:
    """Decode the whole of `data`, a sequence of AMF0 values such as the payload of a command message."""
    return read_all(_Reader(as_bytes(data), Meter(limits)))


def encode(*values: AmfValue) -> bytes:
    """Encode `values`, one after the other, as AMF0.

    `int` becomes a number, `tuple` a strict array, `str` of more than 65535 octets a long string. Subclasses are
    written as the class they derive from. References are never written.
    """
    writer = _Writer()
    try:
        for value in values:
            writer.value(value, 0)
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"not encodable as AMF0: {error}") from error
    return b"".join(writer.parts)


def walk(data: bytes, limits: AmfLimits) -> bool:
    """Check a sequence of AMF0 values: nothing is cut off, nothing is nested too deep, and they are not too many.

    Linear in the octets, in constant memory but for `AmfLimits.depth`. Strings may have any length that fits.
    """
    meter = Meter(limits)
    end, pos, room = len(data), 0, meter.room
    left, outer = _SEQUENCE, list[int]()
    try:
        while True:
            if not left:
                left = outer.pop()
                continue
            if left == _MEMBERS:
                name_octets = _unpack_u16(data, pos)[0]
                pos += 2 + name_octets
                if not name_octets and data[pos] == _OBJECT_END:
                    pos += 1
                    left = outer.pop()
                    continue
            elif left > 0:
                left -= 1
            elif pos >= end:
                break
            marker = data[pos]
            room -= 1
            pos, inside = _pass(data, pos + 1, marker)
            if inside is not None:
                if inside > 0 and data[pos : pos + _NUMBER_OCTETS * inside : _NUMBER_OCTETS] == bytes(inside):
                    pos += _NUMBER_OCTETS * inside  # numbers and nothing else
                    room -= inside
                    inside = 0
                outer.append(left)
                left = inside
                meter.check_depth(len(outer))
            elif pos < 0:
                return False
            if room < 0:
                raise meter.nodes_error(room)
    except (IndexError, struct.error):
        raise truncated("AMF0") from None
    if pos > end:
        raise truncated("AMF0")
    return True


# ------------------------------------------------------------------------------------------------------ reading


class _Reader(MessageReader):
    """The octets of one message and its reference tables."""

    __slots__ = ("amf3", "table")
    format = "AMF0"

    def __init__(self, data: bytes, meter: Meter) -> None:
        super().__init__(data, meter)
        self.table: Table = []  # objects and arrays by reference index, AMF0 2.9
        # reads AVM+ values; made at the first one, then kept, because they share its tables.
        self.amf3: Amf3Reader | None = None

    def value(self, pos: int, depth: int) -> tuple[AmfValue, int]:
        return _READERS[self.data[pos]](self, pos + 1, depth)

    def members(self, pos: int, depth: int, out: dict[str, AmfValue]) -> int:
        """Read members into `out` up to and including 00 00 09; return the position after it.

        This is where the time goes: the three forms that nearly every member has are read here, not through the
        table, and the node count is kept in a local variable, which goes back to the meter around calls.
        """
        data = self.data
        meter = self.meter
        name_max = meter.name_max
        string_max = meter.string_max
        room = meter.room
        while True:
            start = pos + 2
            pos = start + (data[pos] << 8 | data[pos + 1])
            marker = data[pos]  # raises when the name is cut off, before the name is looked at
            if marker == _OBJECT_END and pos == start:
                break
            if pos - start > name_max:
                meter.check_length(pos - start, name_max)
            try:
                name = data[start:pos].decode()
            except UnicodeDecodeError:
                name = meter.repair(data[start:pos], name_max)
            pos += 1
            room -= 1
            if room < 0:
                raise meter.nodes_error(room)
            if marker == _NUMBER:
                out[name] = _unpack_double(data, pos)[0]
                pos += 8
            elif marker == _STRING:
                out[name], pos = self.text(pos + 2, data[pos] << 8 | data[pos + 1], string_max)
            elif marker == _BOOLEAN:
                out[name] = data[pos] != 0
                pos += 1
            else:
                meter.room = room
                out[name], pos = _READERS[marker](self, pos, depth)
                room = meter.room
        meter.room = room
        return pos + 1


def _read_number(reader: _Reader, pos: int, _depth: int) -> tuple[float, int]:
    return _unpack_double(reader.data, pos)[0], pos + 8


def _read_boolean(reader: _Reader, pos: int, _depth: int) -> tuple[bool, int]:
    return reader.data[pos] != 0, pos + 1


def _read_string(reader: _Reader, pos: int, _depth: int) -> tuple[str, int]:
    data = reader.data
    return reader.text(pos + 2, data[pos] << 8 | data[pos + 1], reader.meter.string_max)


def _read_long_string(reader: _Reader, pos: int, _depth: int) -> tuple[str, int]:
    return reader.text(pos + 4, _unpack_u32(reader.data, pos)[0], reader.meter.string_max)


def _read_xml(reader: _Reader, pos: int, depth: int) -> tuple[Xml, int]:
    text, pos = _read_long_string(reader, pos, depth)
    return Xml(text), pos


def _read_date(reader: _Reader, pos: int, _depth: int) -> tuple[Date, int]:
    return Date(*_unpack_date(reader.data, pos)), pos + 10


def _read_reference(reader: _Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    data = reader.data
    return reader.meter.resolve(reader.table, data[pos] << 8 | data[pos + 1], depth), pos + 2


def _read_object(reader: _Reader, pos: int, depth: int) -> tuple[dict[str, AmfValue], int]:
    mark = reader.meter.begin(pos, depth + 1)
    table = reader.table
    index = len(table)
    table.append(None)
    value: dict[str, AmfValue] = {}
    pos = reader.members(pos, depth + 1, value)
    table[index] = reader.meter.finish(mark, value, pos)
    return value, pos


def _read_ecma_array(reader: _Reader, pos: int, depth: int) -> tuple[EcmaArray, int]:
    mark = reader.meter.begin(pos, depth + 1)
    table = reader.table
    index = len(table)
    table.append(None)
    value = EcmaArray(count=_unpack_u32(reader.data, pos)[0])
    pos = reader.members(pos + 4, depth + 1, value)
    table[index] = reader.meter.finish(mark, value, pos)
    return value, pos


def _read_typed_object(reader: _Reader, pos: int, depth: int) -> tuple[TypedObject, int]:
    mark = reader.meter.begin(pos, depth + 1)
    table = reader.table
    index = len(table)
    table.append(None)
    data = reader.data
    class_name, pos = reader.text(pos + 2, data[pos] << 8 | data[pos + 1], reader.meter.name_max)
    value = TypedObject(class_name)
    pos = reader.members(pos, depth + 1, value.properties)
    table[index] = reader.meter.finish(mark, value, pos)
    return value, pos


def _read_strict_array(reader: _Reader, pos: int, depth: int) -> tuple[list[AmfValue], int]:
    depth += 1
    mark = reader.meter.begin(pos, depth)
    table = reader.table
    index = len(table)
    table.append(None)
    data = reader.data
    count = _unpack_u32(data, pos)[0]
    pos += 4
    if count > reader.end - pos:  # the smallest value is one octet, so the count promises more than there is
        raise truncated("AMF0")
    reader.meter.pay_for(count)
    value: list[AmfValue] = []
    append = value.append
    for _ in range(count):
        marker = data[pos]
        if marker == _NUMBER:  # keyframe indexes in metadata are long arrays of numbers
            append(_unpack_double(data, pos + 1)[0])
            pos += 9
        else:
            item, pos = _READERS[marker](reader, pos + 1, depth)
            append(item)
    table[index] = reader.meter.finish(mark, value, pos)
    return value, pos


def _read_avm_plus(reader: _Reader, pos: int, depth: int) -> tuple[AmfValue, int]:
    if reader.amf3 is None:
        reader.amf3 = Amf3Reader(reader.data, reader.meter)
    return reader.amf3.value(pos, depth)


def _refuse_object_end(_reader: _Reader, pos: int, _depth: int) -> NoReturn:
    raise RemoteProtocolError(
        f"AMF0 object end at byte {pos - 1}, where a value has to be", code="amf-unexpected-object-end"
    )


def _refuse_reserved(reader: _Reader, pos: int, _depth: int) -> NoReturn:
    raise RemoteProtocolError(
        f"AMF0 marker 0x{reader.data[pos - 1]:02x} at byte {pos - 1} is reserved (movie clip and record set)",
        code="amf-reserved-marker",
    )


def _refuse_unknown(reader: _Reader, pos: int, _depth: int) -> NoReturn:
    raise RemoteProtocolError(
        f"AMF0 has no marker 0x{reader.data[pos - 1]:02x} (byte {pos - 1})", code="amf-unknown-marker"
    )


_READERS: Final[tuple[Read[_Reader], ...]] = by_marker(
    {
        _NUMBER: _read_number,
        _BOOLEAN: _read_boolean,
        _STRING: _read_string,
        _OBJECT: _read_object,
        _MOVIE_CLIP: _refuse_reserved,
        _NULL: constant(None),
        _UNDEFINED: constant(UNDEFINED),
        _REFERENCE: _read_reference,
        _ECMA_ARRAY: _read_ecma_array,
        _OBJECT_END: _refuse_object_end,
        _STRICT_ARRAY: _read_strict_array,
        _DATE: _read_date,
        _LONG_STRING: _read_long_string,
        _UNSUPPORTED: constant(UNSUPPORTED),
        _RECORD_SET: _refuse_reserved,
        _XML: _read_xml,
        _TYPED_OBJECT: _read_typed_object,
        _AVM_PLUS: _read_avm_plus,
    },
    _refuse_unknown,
)


# ------------------------------------------------------------------------------------------------------ walking

_SIZES: Final = {_NUMBER: 8, _BOOLEAN: 1, _NULL: 0, _UNDEFINED: 0, _DATE: 10, _UNSUPPORTED: 0}
"""Octets behind the marker of values that have a fixed size."""
_LONG: Final = frozenset({_LONG_STRING, _XML})

_NUMBER_OCTETS: Final = 9
_SEQUENCE, _MEMBERS = -2, -1
"""What is being walked instead of a strict array, of which it is the number of values left."""


def _pass(data: bytes, pos: int, marker: int) -> tuple[int, int | None]:
    """Return the position behind a value, or, of a container, where its content begins and what that is.

    A position of -1 says that the marker is for a decoder.
    """
    size = _SIZES.get(marker)
    if size is not None:
        return pos + size, None
    if marker == _STRING:
        return pos + 2 + _unpack_u16(data, pos)[0], None
    if marker in _LONG:
        return pos + 4 + _unpack_u32(data, pos)[0], None
    if marker == _OBJECT:
        return pos, _MEMBERS
    if marker == _ECMA_ARRAY:
        return pos + 4, _MEMBERS
    if marker == _TYPED_OBJECT:
        return pos + 2 + _unpack_u16(data, pos)[0], _MEMBERS
    if marker == _STRICT_ARRAY:
        count = _unpack_u32(data, pos)[0]
        if count > len(data) - pos - 4:
            raise truncated("AMF0")
        return pos + 4, count
    return -1, None


# ------------------------------------------------------------------------------------------------------ writing

_MARK: Final = tuple(bytes((marker,)) for marker in range(_AVM_PLUS + 1))
"""Each marker as it is written."""
_END: Final = bytes((0, 0, _OBJECT_END))
_TRUE: Final = bytes((_BOOLEAN, 1))
_FALSE: Final = bytes((_BOOLEAN, 0))


def _encoded_name(name: str) -> bytes:
    if not isinstance(name, str):
        raise LocalProtocolError(f"AMF names are str, not {type(name).__name__}")
    raw = name.encode()
    if len(raw) > MAX_NAME_BYTES:
        raise LocalProtocolError(f"AMF0 name of {len(raw)} bytes, allowed are {MAX_NAME_BYTES}")
    return _pack_u16(len(raw)) + raw


# Names that are written all the time, ready for the wire: finding one takes a quarter of the time of encoding it. A
# fixed set and no cache, because a cache could be filled with names chosen by a peer. RTMP 7.2.1 and 7.2.2 (connect,
# onStatus), FLV 10.1 E.5 (onMetaData), Enhanced RTMP v2 (fourCcList and on).
_KNOWN_NAMES: Final[dict[str, bytes]] = {
    name: _encoded_name(name)
    for name in (
        *("app", "type", "flashVer", "swfUrl", "tcUrl", "pageUrl", "fpad", "capabilities", "audioCodecs"),
        *("videoCodecs", "videoFunction", "objectEncoding", "fourCcList", "capsEx", "fmsVer", "mode"),
        *("level", "code", "description", "details", "clientid", "data", "version", "encoder", "duration"),
        *("fileSize", "filesize", "width", "height", "framerate", "videocodecid", "videodatarate"),
        *("audiocodecid", "audiodatarate", "audiosamplerate", "audiosamplesize", "audiochannels", "stereo"),
        *("2.1", "3.1", "4.0", "4.1", "5.1", "7.1", "major_brand", "minor_version", "compatible_brands"),
    )
}


class _Writer:
    """The encoded parts of one message: a list takes a part in less time than a bytearray."""

    __slots__ = ("meter", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.meter = WriteMeter()

    def value(self, value: AmfValue, depth: int) -> None:
        (_WRITERS.get(type(value)) or _inherited(value))(self, value, depth)

    def members(self, members: Mapping[str, AmfValue], depth: int) -> None:
        self.meter.enter(len(members), depth)
        write = self.parts.append
        known = _KNOWN_NAMES.get
        for name, value in members.items():
            write(known(name) or _encoded_name(name))
            if type(value) is float:
                write(_pack_number(_NUMBER, value))
            else:
                (_WRITERS.get(type(value)) or _inherited(value))(self, value, depth)
        write(_END)


_Write: TypeAlias = Callable[[_Writer, AmfValue, int], None]
"""Writes one value: the writer, the value, the level of the container around it."""


def _write_number(writer: _Writer, value: float, _depth: int) -> None:
    writer.parts.append(_pack_number(_NUMBER, value))


def _write_boolean(writer: _Writer, value: AmfValue, _depth: int) -> None:
    writer.parts.append(_TRUE if value else _FALSE)


def _write_string(writer: _Writer, value: str, _depth: int) -> None:
    raw = value.encode()
    length = len(raw)
    writer.parts.append(
        _pack_marked_u16(_STRING, length) if length <= 0xFFFF else _pack_marked_u32(_LONG_STRING, length)
    )
    writer.parts.append(raw)


def _write_null(writer: _Writer, _value: None, _depth: int) -> None:
    writer.parts.append(_MARK[_NULL])


def _write_undefined(writer: _Writer, value: Undefined, _depth: int) -> None:
    writer.parts.append(_MARK[_UNDEFINED if value is UNDEFINED else _UNSUPPORTED])


def _write_object(writer: _Writer, value: dict[str, AmfValue], depth: int) -> None:
    writer.parts.append(_MARK[_OBJECT])
    writer.members(value, depth + 1)


def _write_ecma_array(writer: _Writer, value: EcmaArray, depth: int) -> None:
    # The true count, not the announced one: we do not pass on a wrong number.
    writer.parts.append(_pack_marked_u32(_ECMA_ARRAY, len(value)))
    writer.members(value, depth + 1)


def _write_typed_object(writer: _Writer, value: TypedObject, depth: int) -> None:
    writer.parts.append(_MARK[_TYPED_OBJECT])
    writer.parts.append(_encoded_name(value.class_name))
    writer.members(value.properties, depth + 1)


def _write_strict_array(writer: _Writer, value: list[AmfValue] | tuple[AmfValue, ...], depth: int) -> None:
    depth += 1
    writer.meter.enter(len(value), depth)
    writer.parts.append(_pack_marked_u32(_STRICT_ARRAY, len(value)))
    for item in value:
        (_WRITERS.get(type(item)) or _inherited(item))(writer, item, depth)


def _write_date(writer: _Writer, value: Date, _depth: int) -> None:
    writer.parts.append(_pack_date(_DATE, value.ms, value.tz))


def _write_xml(writer: _Writer, value: Xml, _depth: int) -> None:
    raw = value.text.encode()
    writer.parts.append(_pack_marked_u32(_XML, len(raw)))
    writer.parts.append(raw)


_WRITERS: Final[dict[type, _Write]] = {
    float: _write_number,
    int: _write_number,
    bool: _write_boolean,
    str: _write_string,
    type(None): _write_null,
    Undefined: _write_undefined,
    dict: _write_object,
    EcmaArray: _write_ecma_array,
    TypedObject: _write_typed_object,
    list: _write_strict_array,
    tuple: _write_strict_array,
    Date: _write_date,
    Xml: _write_xml,
}


def _inherited(value: AmfValue) -> _Write:
    """Return the writer of the nearest base class of `value`'s type; an IntEnum, say, is written as a number."""
    for base in type(value).__mro__:
        if base in _WRITERS:
            return _WRITERS[base]
    raise LocalProtocolError(f"{type(value).__name__} has no AMF0 form")
