"""AMF3: the value format of ActionScript 3, its layout, and how to decode it.

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

How it works: `amf3_reader` decodes and `amf3_writer` encodes one message at a time; here is what callers use of them.

Where it could be guessed, it is not: an externalizable object has no length, so without its class the rest of the
message has no meaning; the message is refused (``amf-externalizable``). A reference under a marker of another type is
taken for what it refers to. Of two members of one name the later wins.

Source: AMF3 specification (Adobe, 2013), sections 1.3 and 3; traits in 3.12. See `amf_limits` for limits and bad UTF-8.
"""

from __future__ import annotations

import struct

from flowctl.errors import LocalProtocolError
from flowctl.rtmp.amf.amf3_reader import Amf3Reader, read_u29
from flowctl.rtmp.amf.amf3_writer import encode, encode_u29
from flowctl.rtmp.amf.limits import DEFAULT_LIMITS, AmfLimits, Meter, as_bytes, truncated
from flowctl.rtmp.amf.values import AmfValue

__all__ = ["decode", "decode_one", "decode_u29", "encode", "encode_u29"]


def decode(data: bytes | bytearray | memoryview, limits: AmfLimits = DEFAULT_LIMITS) -> list[AmfValue]:
    """Decode the whole of `data`, a sequence of AMF3 values that share their reference tables.

    Args:
        data: the octets; empty data is an empty sequence.
        limits: what the whole sequence may cost.

    Returns:
        The values in order; see `flowctl.rtmp.amf.values` for the types. Values of one message that refer to one object
        hold the same Python object.

    Raises:
        RemoteProtocolError: with code ``amf-truncated``, ``amf-unknown-marker``, ``amf-bad-reference``,
            ``amf-cyclic-reference``, ``amf-bad-traits`` or ``amf-externalizable``.
        LimitExceededError: ``amf_depth``, ``amf_nodes``, ``amf_string_bytes`` or ``amf_repeated_bytes``.
    """
    meter = Meter(limits)
    reader = Amf3Reader(as_bytes(data), meter)
    values = []
    pos = 0
    try:
        while pos < reader.end:
            meter.take(1)
            value, pos = reader.value(pos, 0)
            values.append(value)
    except (IndexError, struct.error):
        raise truncated("AMF3") from None
    return values


def decode_one(
    data: bytes | bytearray | memoryview, offset: int = 0, limits: AmfLimits = DEFAULT_LIMITS
) -> tuple[AmfValue, int]:
    """Decode the one value that begins at `offset`, with reference tables of its own.

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
    meter = Meter(limits)
    meter.take(1)
    try:
        return Amf3Reader(as_bytes(data), meter).value(offset, 0)
    except (IndexError, struct.error):
        raise truncated("AMF3") from None


def decode_u29(data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[int, int]:
    """Decode the U29 at `offset`; return its value, 0..2^29-1, and the offset after it (AMF3 1.3.1).

    Raises:
        RemoteProtocolError: the data ends within it (``amf-truncated``).
        LocalProtocolError: `offset` is negative.
    """
    if offset < 0:
        raise LocalProtocolError(f"offset is {offset}, allowed is 0 or more")
    try:
        return read_u29(data, offset)
    except IndexError:
        raise truncated("AMF3") from None
