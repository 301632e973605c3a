"""AMF0: the value format of RTMP commands and metadata, its layout and its decoder.

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

How it works: `_Reader` holds the octets and the tables, and a table of functions indexed by marker reads one body each.
Members are read by one loop that does numbers, strings and booleans, nearly all there is, on the spot. An index or an
`unpack_from` beyond the end raises, and this is the check for truncation; it is mapped to `RemoteProtocolError` in one
place. Slices do not raise, so what follows a slice is compared with the end. Encoding is in `amf0_writer`.

Where implementations disagree: an ECMA array ends at 00 00 09 whatever its count says (the count is wrong in practice,
the end marker is always there); a member of the empty name is a member unless marker 09 follows; of two members of one
name the later wins; references count objects, typed objects, ECMA and strict arrays in the order of their first octet,
over the whole message; all AVM+ values of a message share one set of AMF3 tables (as in Apache BlazeDS and Red5).

Source: AMF0 specification (Adobe, 2007), sections 1.3 and 2; AVM+ in 3.1. See `amf_limits` for limits and bad UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NoReturn, TypeAlias

from flowctl.errors import LocalProtocolError, RemoteProtocolError
from flowctl.rtmp.amf.amf0_writer import encode
from flowctl.rtmp.amf.amf3_reader import Amf3Reader
from flowctl.rtmp.amf.limits import DEFAULT_LIMITS, AmfLimits, Meter, Table, as_bytes, truncated
from flowctl.rtmp.amf.values import (
    UNDEFINED,
    UNSUPPORTED,
    AmfValue,
    AvmPlus,
    Date,
    EcmaArray,
    TypedObject,
    Undefined,
    Xml,
)

__all__ = ["decode", "decode_one", "encode"]

# Markers, AMF0 2.1. Those that only the table of readers mentions have no name.
_NUMBER: Final = 0x00
_BOOLEAN: Final = 0x01
_STRING: Final = 0x02
_OBJECT_END: Final = 0x09

_unpack_double = struct.Struct(">d").unpack_from
_unpack_u32 = struct.Struct(">I").unpack_from
_unpack_date = struct.Struct(">dh").unpack_from


def decode(data: bytes | bytearray | memoryview, limits: AmfLimits = DEFAULT_LIMITS) -> list[AmfValue]:
    """Decode the whole of `data`, a sequence of AMF0 values such as the payload of a command message.

    Args:
        data: the octets; empty data is an empty sequence.
        limits: what the whole sequence may cost.

    Returns:
        The values in order; see `flowctl.rtmp.amf.values` for the types. Values of one message that refer to one object
        hold the same Python object.

    Raises:
        RemoteProtocolError: with code ``amf-truncated``, ``amf-unknown-marker``, ``amf-reserved-marker`` (movie clip
            and record set, which the specification reserves), ``amf-unexpected-object-end``, ``amf-bad-reference``,
            ``amf-cyclic-reference``, or, within AVM+, ``amf-bad-traits`` or ``amf-externalizable``.
        LimitExceededError: ``amf_depth``, ``amf_nodes``, ``amf_string_bytes`` or ``amf_repeated_bytes``.
    """
    reader = _Reader(as_bytes(data), Meter(limits))
    values = []
    pos = 0
    try:
        while pos < reader.end:
            reader.meter.take(1)
            value, pos = _READERS[reader.data[pos]](reader, pos + 1, 0)
            values.append(value)
    except (IndexError, struct.error):
        raise truncated("AMF0") from None
    return values


def decode_one(
    data: bytes | bytearray | memoryview, offset: int = 0, limits: AmfLimits = DEFAULT_LIMITS
) -> tuple[AmfValue, int]:
    """Decode the one value that begins at `offset`.

    To decode a sequence use `decode`: here the reference tables begin anew, and data other than bytes is copied whole.

    Args:
        data: the octets.
        offset: where the value's marker is, 0 or more.
        limits: what the value may cost.

    Returns:
        The value, and the offset of the octet after it.

    Raises:
        RemoteProtocolError: as `decode`; no octet at `offset` is ``amf-truncated``.
        LimitExceededError: as `decode`.
        LocalProtocolError: `offset` is negative.
    """
    if offset < 0:
        raise LocalProtocolError(f"offset is {offset}, allowed is 0 or more")
    reader = _Reader(as_bytes(data), Meter(limits))
    reader.meter.take(1)
    try:
        return _READERS[reader.data[offset]](reader, offset + 1, 0)
    except (IndexError, struct.error):
        raise truncated("AMF0") from None


class _Reader:
    """The octets of one message and its reference tables.

    Attributes:
        data: the octets.
        end: how many there are.
        meter: the account of the message, shared with the AMF3 reader.
        table: objects and arrays by reference index, AMF0 2.9.
        amf3: reads AVM+ values; made at the first one, then kept, because they share its tables.
    """

    __slots__ = ("amf3", "data", "end", "meter", "table")

    def __init__(self, data: bytes, meter: Meter) -> None:
        self.data = data
        self.end = len(data)
        self.meter = meter
        self.table: Table = []
        self.amf3: Amf3Reader | None = None

    def text(self, pos: int, length: int, maximum: int) -> tuple[str, int]:
        """Read `length` octets of UTF-8 at `pos`, at most `maximum`; return the text and the position after it."""
        stop = pos + length
        if stop > self.end:  # first, so that a length without the data is never reported as a limit
            raise truncated("AMF0")
        self.meter.check_length(length, maximum)
        raw = self.data[pos:stop]
        try:
            return raw.decode(), stop
        except UnicodeDecodeError:
            return self.meter.repair(raw, maximum), stop

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
                raise meter.over(room)
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


_Read: TypeAlias = Callable[[_Reader, int, int], tuple[AmfValue, int]]
"""Reads the body of one marker: the reader, the position after the marker, the level of the container around it (0 for
none); returns the value and the position after it. Who calls it has paid for the value's own node."""


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


def _read_null(_reader: _Reader, pos: int, _depth: int) -> tuple[None, int]:
    return None, pos


def _read_undefined(_reader: _Reader, pos: int, _depth: int) -> tuple[Undefined, int]:
    return UNDEFINED, pos


def _read_unsupported(_reader: _Reader, pos: int, _depth: int) -> tuple[Undefined, int]:
    return UNSUPPORTED, pos


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
    reader.meter.take(count)
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


def _read_avm_plus(reader: _Reader, pos: int, depth: int) -> tuple[AvmPlus, int]:
    if reader.amf3 is None:
        reader.amf3 = Amf3Reader(reader.data, reader.meter)
    value, pos = reader.amf3.value(pos, depth)
    return AvmPlus(value), pos


def _refuse_object_end(_reader: _Reader, pos: int, _depth: int) -> NoReturn:
    raise RemoteProtocolError(
        f"AMF0 object end at octet {pos - 1}, where a value has to be", code="amf-unexpected-object-end"
    )


def _refuse_reserved(reader: _Reader, pos: int, _depth: int) -> NoReturn:
    raise RemoteProtocolError(
        f"AMF0 marker 0x{reader.data[pos - 1]:02x} at octet {pos - 1} is reserved (movie clip and record set)",
        code="amf-reserved-marker",
    )


def _refuse_unknown(reader: _Reader, pos: int, _depth: int) -> NoReturn:
    raise RemoteProtocolError(
        f"AMF0 has no marker 0x{reader.data[pos - 1]:02x} (octet {pos - 1})", code="amf-unknown-marker"
    )


# Indexed by marker, all 256, so that a lookup cannot fail and an IndexError can only mean the end of the data.
_READERS: Final[tuple[_Read, ...]] = (
    _read_number,
    _read_boolean,
    _read_string,
    _read_object,
    _refuse_reserved,  # movie clip, AMF0 2.6
    _read_null,
    _read_undefined,
    _read_reference,
    _read_ecma_array,
    _refuse_object_end,
    _read_strict_array,
    _read_date,
    _read_long_string,
    _read_unsupported,
    _refuse_reserved,  # record set, AMF0 2.16
    _read_xml,
    _read_typed_object,
    _read_avm_plus,
) + (_refuse_unknown,) * (256 - 18)
