"""Check AMF0 without building values: what is passed on as it came need only be safe for a later decoder.

``onMetaData`` of a recorded film has an index of its key frames, arrays of tens of thousands of numbers. To decode it
would make an object of each; a walk makes none, and passes an array of numbers in one step whatever its length.
"""

from __future__ import annotations

import struct
from typing import Final

from flowctl.errors import LimitExceededError
from flowctl.rtmp.amf.limits import AmfLimits, truncated

# Octets behind the marker of values that have a fixed size: number, boolean, null, undefined, date, unsupported.
_SIZES: Final = {0x00: 8, 0x01: 1, 0x05: 0, 0x06: 0, 0x0B: 10, 0x0D: 0}
_STRING, _OBJECT, _ECMA_ARRAY, _OBJECT_END, _STRICT_ARRAY, _TYPED_OBJECT = 0x02, 0x03, 0x08, 0x09, 0x0A, 0x10
_LONG: Final = frozenset({0x0C, 0x0F})  # long string, XML document

_NUMBER_OCTETS: Final = 9
_SEQUENCE, _MEMBERS = -2, -1
"""What is being walked instead of a strict array, of which it is the number of values left."""

_unpack_u16 = struct.Struct(">H").unpack_from
_unpack_u32 = struct.Struct(">I").unpack_from


def walk(data: bytes, limits: AmfLimits) -> bool:
    """Check a sequence of AMF0 values: nothing is cut off, nothing is nested too deep, and they are not too many.

    Linear in the octets, in constant memory but for `AmfLimits.depth`. Strings may have any length that fits.

    Args:
        data: the octets.
        limits: `depth` and `nodes` count.

    Returns:
        False: a reference, AMF3 or an unknown marker is among them, of which only decoding tells what it is.

    Raises:
        RemoteProtocolError: code ``amf-truncated``.
        LimitExceededError: ``amf_depth`` or ``amf_nodes``.
    """
    end, pos, room = len(data), 0, limits.nodes
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
                if len(outer) > limits.depth:
                    raise LimitExceededError("amf_depth", len(outer), limits.depth)
            elif pos < 0:
                return False
            if room < 0:
                raise LimitExceededError("amf_nodes", limits.nodes - room, limits.nodes)
    except (IndexError, struct.error):
        raise truncated("AMF0") from None
    if pos > end:
        raise truncated("AMF0")
    return True


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
