"""Encoding of Python values as AMF0; the layout is described in `amf0`, which is where callers import `encode` from.

How it works: `_Writer` collects the parts of a message in a list, and a table of functions indexed by Python type
writes one value each. Members are written by one loop, with the names that RTMP uses all the time encoded in advance.

What we write is what every known reader reads: no references (gortmplib and rtmfp-cpp refuse them), the true number of
members in front of an ECMA array, and 00 00 09 behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from flowctl.errors import LocalProtocolError
from flowctl.rtmp.amf.amf3_writer import Amf3Writer
from flowctl.rtmp.amf.limits import MAX_DEPTH, MAX_ENCODED_NODES, MAX_NAME_BYTES
from flowctl.rtmp.amf.values import (
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

_NUMBER: Final = 0x00
_STRING: Final = 0x02
_END: Final = b"\x00\x00\x09"

_pack_number = struct.Struct(">Bd").pack
_pack_u16 = struct.Struct(">H").pack
_pack_marked_u16 = struct.Struct(">BH").pack
_pack_marked_u32 = struct.Struct(">BI").pack
_pack_date = struct.Struct(">Bdh").pack


def encode(*values: AmfValue) -> bytes:
    """Encode `values`, one after the other, as AMF0.

    `int` becomes a number, `tuple` a strict array, `str` of more than 65535 octets a long string. What only AMF3 has
    (`bytes`, `Amf3Object`, vectors and so on) is written as an AVM+ value, so everything that either decoder returns
    can be encoded. Subclasses are written as the class they derive from. References are never written.

    Raises:
        LocalProtocolError: a value has no AMF0 form, a name is no `str` or longer than 65535 octets, a text has a lone
            surrogate, a number does not fit, or the structure is deeper than 128 levels (a value that contains
            itself is), or has more than 2^20 values.
    """
    writer = _Writer()
    try:
        for value in values:
            writer.value(value, 0)
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"not encodable as AMF0: {error}") from error
    return b"".join(writer.parts)


def _encoded_name(name: str) -> bytes:
    """Return a member or class name as on the wire: 16-bit length, UTF-8."""
    if not isinstance(name, str):
        raise LocalProtocolError(f"AMF names are str, not {type(name).__name__}")
    raw = name.encode()
    if len(raw) > MAX_NAME_BYTES:
        raise LocalProtocolError(f"AMF0 name of {len(raw)} octets, allowed are {MAX_NAME_BYTES}")
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
    """The encoded parts of one message.

    Attributes:
        parts: what was written, joined at the end: a list takes a part in less time than a bytearray.
        room: values that may still be written.
        amf3: writes AVM+ values; kept for the message, because readers keep their AMF3 tables for it.
    """

    __slots__ = ("amf3", "parts", "room")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.room = MAX_ENCODED_NODES
        self.amf3: Amf3Writer | None = None

    def value(self, value: AmfValue, depth: int) -> None:
        """Write `value`, which is in a container of level `depth` (0 for none)."""
        (_WRITERS.get(type(value)) or _inherited_writer(value))(self, value, depth)

    def enter(self, count: int, depth: int) -> None:
        """Begin a container of `count` values at level `depth`."""
        self.room -= count
        if depth > MAX_DEPTH or self.room < 0:
            raise LocalProtocolError(
                f"AMF0 structure beyond {MAX_DEPTH} levels or {MAX_ENCODED_NODES} values; does it contain itself?"
            )

    def members(self, members: Mapping[str, AmfValue], depth: int) -> None:
        """Write the members of a container at level `depth`, and the end marker."""
        self.enter(len(members), depth)
        write = self.parts.append
        known = _KNOWN_NAMES.get
        for name, value in members.items():
            write(known(name) or _encoded_name(name))
            if type(value) is float:
                write(_pack_number(_NUMBER, value))
            else:
                (_WRITERS.get(type(value)) or _inherited_writer(value))(self, value, depth)
        write(_END)


_Write: TypeAlias = Callable[[_Writer, AmfValue, int], None]
"""Writes one value: the writer, the value, the level of the container around it."""


def _write_number(writer: _Writer, value: float, _depth: int) -> None:
    writer.parts.append(_pack_number(_NUMBER, value))


def _write_boolean(writer: _Writer, value: AmfValue, _depth: int) -> None:
    writer.parts.append(b"\x01\x01" if value else b"\x01\x00")


def _write_string(writer: _Writer, value: str, _depth: int) -> None:
    raw = value.encode()
    length = len(raw)
    writer.parts.append(_pack_marked_u16(_STRING, length) if length <= 0xFFFF else _pack_marked_u32(0x0C, length))
    writer.parts.append(raw)


def _write_null(writer: _Writer, _value: None, _depth: int) -> None:
    writer.parts.append(b"\x05")


def _write_undefined(writer: _Writer, value: Undefined, _depth: int) -> None:
    writer.parts.append(b"\x06" if value is UNDEFINED else b"\x0d")


def _write_object(writer: _Writer, value: dict[str, AmfValue], depth: int) -> None:
    writer.parts.append(b"\x03")
    writer.members(value, depth + 1)


def _write_ecma_array(writer: _Writer, value: EcmaArray, depth: int) -> None:
    # The true count, not the announced one: we do not pass on a wrong number.
    writer.parts.append(_pack_marked_u32(0x08, len(value)))
    writer.members(value, depth + 1)


def _write_typed_object(writer: _Writer, value: TypedObject, depth: int) -> None:
    writer.parts.append(b"\x10")
    writer.parts.append(_encoded_name(value.class_name))
    writer.members(value.properties, depth + 1)


def _write_strict_array(writer: _Writer, value: list[AmfValue] | tuple[AmfValue, ...], depth: int) -> None:
    depth += 1
    writer.enter(len(value), depth)
    writer.parts.append(_pack_marked_u32(0x0A, len(value)))
    for item in value:
        (_WRITERS.get(type(item)) or _inherited_writer(item))(writer, item, depth)


def _write_date(writer: _Writer, value: Date, _depth: int) -> None:
    writer.parts.append(_pack_date(0x0B, value.ms, value.tz))


def _write_xml(writer: _Writer, value: Xml, depth: int) -> None:
    if value.e4x:
        _write_in_avm_plus(writer, value, depth)
        return
    raw = value.text.encode()
    writer.parts.append(_pack_marked_u32(0x0F, len(raw)))
    writer.parts.append(raw)


def _write_avm_plus(writer: _Writer, value: AvmPlus, depth: int) -> None:
    _write_in_avm_plus(writer, value.value, depth)


def _write_in_avm_plus(writer: _Writer, value: AmfValue, depth: int) -> None:
    if writer.amf3 is None:
        writer.amf3 = Amf3Writer(writer.parts)
    writer.parts.append(b"\x11")
    writer.amf3.value(value, depth)


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
    AvmPlus: _write_avm_plus,
    bytes: _write_in_avm_plus,
    bytearray: _write_in_avm_plus,
    Amf3Array: _write_in_avm_plus,
    Amf3Object: _write_in_avm_plus,
    IntVector: _write_in_avm_plus,
    UintVector: _write_in_avm_plus,
    DoubleVector: _write_in_avm_plus,
    ObjectVector: _write_in_avm_plus,
    Dictionary: _write_in_avm_plus,
}


def _inherited_writer(value: AmfValue) -> _Write:
    """Return the writer of the nearest base class of `value`'s type; an IntEnum, say, is written as a number."""
    for base in type(value).__mro__:
        if base in _WRITERS:
            return _WRITERS[base]
    raise LocalProtocolError(f"{type(value).__name__} has no AMF0 form")
