"""Messages in, chunks out: the sending half of the RTMP chunk stream (Adobe RTMP 1.0 section 5.3).

Two ways, for two uses. `ChunkWriter` remembers what it sent on each chunk stream and leaves out of the next header
what the peer can infer: for one connection's commands, control messages and published media. `serialise` keeps no
state: every message gets a full header, so the same octets can be sent to any number of viewers that joined at
different times. They must not share a chunk stream: a header that leaves something out refers to the last message on
the wire, from either side.
"""

from __future__ import annotations

import struct
from typing import Final

from flowctl.errors import LocalProtocolError
from flowctl.wire.rtmp.limits import CHUNK_SIZE_CEILING
from flowctl.wire.rtmp.wire import (
    CLOCK_MASK,
    CONTROL_CSID,
    CSID_LONG,
    DEFAULT_CHUNK_SIZE,
    EXTENDED,
    LENGTH_MAX,
    TYPE_SET_CHUNK_SIZE,
    Message,
    basic_header,
)

_MSID_MAX: Final = 0xFFFFFFFF
_TWO_WORDS: Final = struct.Struct(">II").pack

_NO_DELTA: Final = -1
"""Delta after a type 0 header. The specification says that a type 3 chunk then adds the type 0 timestamp, several
receivers add nothing. No delta equals this one, so we never send what they disagree on."""


def serialise(
    type_id: int, msid: int, timestamp: int, payload: bytes | memoryview, csid: int, chunk_size: int
) -> bytes:
    """Return one message as a type 0 chunk and the type 3 chunks that continue it.

    The payload is copied once. An extended timestamp is repeated in every type 3 chunk, as section 5.3.1.3 asks:
    FFmpeg and GStreamer lose the stream after 4 h 40 min without it.
    """
    timestamp &= CLOCK_MASK
    length = len(payload)
    if timestamp < EXTENDED and 2 <= csid < CSID_LONG and 0 < length <= chunk_size:
        # Nearly every message: one chunk, and a header of fixed size.
        if length > LENGTH_MAX or not 0 <= type_id <= 0xFF or not 0 <= msid <= _MSID_MAX:
            _check_fields(length, type_id, msid)
        header = _TWO_WORDS(csid << 24 | timestamp, length << 8 | type_id)
        return b"".join((header, msid.to_bytes(4, "little"), payload))
    if timestamp < EXTENDED:
        header = basic_header(0, csid) + _type0_fields(timestamp, len(payload), type_id, msid)
        return _cut(header, payload, basic_header(3, csid), chunk_size)
    extended = timestamp.to_bytes(4, "big")
    header = basic_header(0, csid) + _type0_fields(EXTENDED, len(payload), type_id, msid) + extended
    return _cut(header, payload, basic_header(3, csid) + extended, chunk_size)


def deserialise(wire: bytes, chunk_size: int) -> tuple[int, int, bytes]:
    """Return type id, timestamp and body of one message that `serialise` has made, on a chunk stream below 64."""
    timestamp, length = int.from_bytes(wire[1:4], "big"), int.from_bytes(wire[4:7], "big")
    at, between = 12, 1  # behind the header; octets between two chunks
    if timestamp == EXTENDED:
        timestamp, at, between = int.from_bytes(wire[12:16], "big"), 16, 5
    if length <= chunk_size:
        return wire[7], timestamp, wire[at : at + length]
    pieces = []
    while length > 0:
        pieces.append(wire[at : at + min(chunk_size, length)])
        at, length = at + chunk_size + between, length - chunk_size
    return wire[7], timestamp, b"".join(pieces)


class _SentHeader:
    """What the peer can infer about the next message of one chunk stream."""

    __slots__ = (
        "delta",  # int: of the last message, ms; _NO_DELTA after a type 0 header
        "length",  # int: payload octets of the last message
        "msid",  # int: of the last message
        "timestamp",  # int: of the last message
        "type_id",  # int: of the last message
    )

    def __init__(self) -> None:
        self.delta = _NO_DELTA
        self.length = -1
        self.msid = -1
        self.timestamp = 0
        self.type_id = -1


class ChunkWriter:
    """Turns messages into chunks for one connection, with the shortest header that cannot be misunderstood.

    A message gets a type 0 header if it is the first of its chunk stream, changes the message stream, or if its
    timestamp is behind the last one or 4 h 40 min ahead of it; type 1 if length or type change; type 2 if only the
    delta changes; else type 3. Extended timestamps therefore occur in type 0 headers only, and in the type 3 chunks
    that continue these: extended deltas are read as absolute timestamps by some receivers.
    """

    __slots__ = ("_chunk_size", "_sent")

    def __init__(self, chunk_size: int = DEFAULT_CHUNK_SIZE, *, full_headers: bool = False) -> None:
        _check_chunk_size(chunk_size)
        self._chunk_size = chunk_size
        self._sent: dict[int, _SentHeader] | None = None if full_headers else {}

    @property
    def chunk_size(self) -> int:
        return self._chunk_size

    def write(self, message: Message) -> bytes:
        """Return `message` as chunks, and remember it for the headers after it."""
        if self._sent is None:
            return serialise(
                message.type_id, message.msid, message.timestamp, message.payload, message.csid, self._chunk_size
            )
        timestamp = message.timestamp & CLOCK_MASK
        length = len(message.payload)
        type3 = basic_header(3, message.csid)
        sent = self._sent.get(message.csid)
        if sent is None:
            sent = _SentHeader()
        delta = (timestamp - sent.timestamp) & CLOCK_MASK
        if message.msid != sent.msid or delta >= EXTENDED:
            octets = serialise(
                message.type_id, message.msid, timestamp, message.payload, message.csid, self._chunk_size
            )
            delta = _NO_DELTA
        else:
            if length != sent.length or message.type_id != sent.type_id:
                _check_fields(length, message.type_id, message.msid)
                header = basic_header(1, message.csid) + (delta << 32 | length << 8 | message.type_id).to_bytes(
                    7, "big"
                )
            elif delta != sent.delta:
                header = basic_header(2, message.csid) + delta.to_bytes(3, "big")
            else:
                header = type3
            octets = _cut(header, message.payload, type3, self._chunk_size)
        # Only now: a message that was refused has not been sent.
        sent.delta, sent.length, sent.msid = delta, length, message.msid
        sent.timestamp, sent.type_id = timestamp, message.type_id
        self._sent[message.csid] = sent
        return octets

    def set_chunk_size(self, size: int) -> bytes:
        """Return a Set Chunk Size message and use `size` for every message after it."""
        _check_chunk_size(size)
        octets = self.write(Message(CONTROL_CSID, 0, TYPE_SET_CHUNK_SIZE, 0, size.to_bytes(4, "big")))
        self._chunk_size = size
        return octets


def _type0_fields(timestamp: int, length: int, type_id: int, msid: int) -> bytes:
    _check_fields(length, type_id, msid)
    return (timestamp << 32 | length << 8 | type_id).to_bytes(7, "big") + msid.to_bytes(4, "little")


def _check_fields(length: int, type_id: int, msid: int) -> None:
    if length > LENGTH_MAX or not 0 <= type_id <= 0xFF or not 0 <= msid <= _MSID_MAX:
        raise LocalProtocolError(
            f"message of type {type_id}, {length} bytes, msid {msid}: allowed is a type of 0 to 255, "
            f"up to {LENGTH_MAX} bytes and an msid of 0 to 2^32-1"
        )


def _check_chunk_size(size: int) -> None:
    if not 1 <= size <= CHUNK_SIZE_CEILING:
        raise LocalProtocolError(f"chunk size is {size}, allowed is 1 to {CHUNK_SIZE_CEILING}")


def _cut(header: bytes, payload: bytes | memoryview, separator: bytes, size: int) -> bytes:
    """Return `header` and `payload`, with `separator` after every `size` octets of payload that more follow."""
    if size < 1:
        _check_chunk_size(size)
    length = len(payload)
    if length <= size:
        return b"".join((header, payload))
    view = memoryview(payload)
    # One join copies everything once; the list holds header, slice, separator, slice, separator, slice ...
    parts: list[bytes | memoryview] = [separator] * (2 * -(-length // size))
    parts[0] = header
    parts[1::2] = [view[start : start + size] for start in range(0, length, size)]
    return b"".join(parts)
