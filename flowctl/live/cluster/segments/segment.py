"""A segment: some seconds of a live stream as one object, the same octets wherever it is cut (pure).

An object is an id and a body. The id says which stream, where in it, what comes next, and the SHA-256 of the body, so
a node with an id from one peer can tell whether an object from any other is what it names. The body holds the headers
that a decoder has to know at its beginning, and the messages with their times counted from the segment's start: a
stream that a server has moved on its timeline (`flowctl.live.stream.Stream`) gives the same bodies as the one that was
published.

A place in a stream is a `Position`. Its timeline stands for one publication, so that a stream that is published again
and begins at 0 again does not hide behind its former life. Positions grow with time, and each segment names the one
behind it: what is missing between two segments is known without having seen it.

Octets, all numbers big-endian. Id: version 1 | timeline u32 | start_ms u64 | part u16 | what follows u8 | next
start_ms u64 | messages u32 | body octets u32 | SHA-256, 32 | length of the name u8 | name in UTF-8. Body: version 1 |
headers u16 | each: type u8, length u32, payload | messages u32 | each: type u8, milliseconds behind the start u32,
length u32, payload. Object: octets of the id u16 | id | body. There is one way to write each, and no other is read.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.url import is_path
from flowctl.wire.rtmp.wire import CLOCK_MASK, TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_DATA_AMF3, TYPE_VIDEO

NAME_BYTES: Final = 255
"""Longest name of a stream, ``app/stream``, that an id can hold."""
OBJECT_BYTES: Final = 2_000_000
"""Largest object, as of the diffusion protocol (`flowctl.nodes.diffusion.policy.Policy`)."""
BODY_BYTES: Final = OBJECT_BYTES - 512
"""Largest body: the id stands before it."""
PART_BYTES: Final = 1_048_576
"""Size at which a segment is cut, so that an origin that dies in the middle costs little that was fetched."""
HEADERS: Final = 64
"""Headers in one segment: as many as a server keeps of a publisher."""
MESSAGES: Final = 4096
"""Messages in one segment. Encoders send 30 to 300 a second. A node passes on a whole segment at once, and with more
messages in it all other streams would wait: of 65,535, as one publisher sends in seven seconds, for more than one."""

_TYPES: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO, TYPE_DATA_AMF0, TYPE_DATA_AMF3})
_VERSION: Final = 1
_ID: Final = struct.Struct(">BIQHBQII32sB")
_HEADS: Final = struct.Struct(">BH")
_HEADER: Final = struct.Struct(">BI")
_LENGTH: Final = struct.Struct(">H")
_COUNT: Final = struct.Struct(">I")
_MESSAGE: Final = struct.Struct(">BII")
FRAME_BYTES: Final = _MESSAGE.size
"""Octets that a message takes in a body beside its payload."""
ID_BYTES: Final = _ID.size + NAME_BYTES
"""Longest id."""


class Frame(NamedTuple):
    """One message of a stream."""

    type_id: int  #: RTMP message type: audio, video or data
    timestamp: int
    payload: bytes


Header = tuple[int, bytes]
"""Type and payload of a message that a decoder needs first."""


class Position(NamedTuple):
    """Where a segment begins; grows with time."""

    timeline: int  #: number of its publication; a later one has a larger number
    start_ms: int  #: time of its first picture, or of its first message where there is none; does not wrap
    part: int  #: 0, and 1 and more for what was cut without a key frame, only because it was long


class Sequel(enum.IntEnum):
    """What follows a segment."""

    KEY = 0
    """Another that a decoder can start with, at `SegmentId.next_ms`."""
    PART = 1
    """The next part of the same group of pictures."""
    END = 2
    """Nothing: the publication has ended."""


def following(position: Position, then: Sequel, next_ms: int) -> Position | None:
    timeline, start_ms, part = position
    if then is Sequel.END:
        return None
    return Position(timeline, next_ms, 0) if then is Sequel.KEY else Position(timeline, start_ms, part + 1)


def _refuse(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"a segment cannot be read: {what}", code="segment")


@dataclass(frozen=True, slots=True, order=True)
class SegmentId:
    """The name of a segment; ordered by time."""

    position: Position
    then: Sequel
    next_ms: int  #: start of the segment behind it, where that begins with a key frame; else 0
    count: int
    size_bytes: int
    digest: bytes
    stream: str

    @property
    def next(self) -> Position | None:
        return following(self.position, self.then, self.next_ms)

    def encode(self) -> bytes:
        """Return its octets; those of an earlier segment of a stream sort before those of a later one."""
        name = self.stream.encode()
        if not 0 < len(name) <= NAME_BYTES:
            raise LocalProtocolError(
                f"the name of a stream has {len(name)} bytes, segments can have 1 to {NAME_BYTES}",
                hint="publish it under a shorter name",
            )
        timeline, start_ms, part = self.position
        head = (_VERSION, timeline, start_ms, part, self.then, self.next_ms, self.count, self.size_bytes, self.digest)
        return _ID.pack(*head, len(name)) + name

    @classmethod
    def decode(cls, data: bytes) -> Self:
        if len(data) <= _ID.size:
            raise _refuse(f"its id has {len(data)} bytes, there are more than {_ID.size}")
        version, timeline, start_ms, part, then, next_ms, count, size_bytes, digest, length = _ID.unpack_from(data)
        if version != _VERSION:
            raise _refuse(f"its id has version {version}, known is {_VERSION}")
        if length != len(data) - _ID.size:
            raise _refuse(f"its name has {len(data) - _ID.size} bytes, the id says {length}")
        try:
            stream, what = data[_ID.size :].decode(), Sequel(then)
        except ValueError as error:
            raise _refuse(str(error)) from error
        if not is_path(stream):
            raise _refuse("no stream can have its name")
        if what is Sequel.KEY and next_ms <= start_ms:
            raise _refuse(f"it begins at {start_ms} ms, and what comes behind it at {next_ms} ms")
        if what is not Sequel.KEY and next_ms:
            raise _refuse(f"nothing begins behind it, but its id says at {next_ms} ms")
        if not 0 < count <= MESSAGES or not 0 < size_bytes <= BODY_BYTES:
            raise _refuse(f"it has {count} messages in {size_bytes} bytes, allowed are {MESSAGES} in {BODY_BYTES}")
        return cls(Position(timeline, start_ms, part), what, next_ms, count, size_bytes, digest, stream)

    def __str__(self) -> str:
        timeline, start_ms, part = self.position
        return f"{self.stream}@{timeline}:{start_ms}+{part}:{self.digest[:4].hex()}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment that was decoded, or is to be encoded."""

    id: SegmentId
    headers: tuple[Header, ...]  #: what a decoder has to know first, in the order in which they came
    frames: tuple[Frame, ...]  #: its messages, one or more, with the times at which they were published

    @classmethod
    def decode(cls, data: bytes) -> Self:
        octets = id_of(data)
        name, body = SegmentId.decode(octets), data[_LENGTH.size + len(octets) :]
        if len(body) != name.size_bytes or hashlib.sha256(body).digest() != name.digest:
            raise RemoteProtocolError(f"{name} came with a body that is not the one it names", code="segment-hash")
        headers, frames = decode_body(body, name.position.start_ms & CLOCK_MASK)
        if len(frames) != name.count:
            raise _refuse(f"{name} has {len(frames)} messages, its id says {name.count}")
        return cls(name, headers, frames)


def object_of(name: SegmentId, body: bytes | memoryview) -> bytes:
    octets = name.encode()
    return b"".join((_LENGTH.pack(len(octets)), octets, body))


def id_of(data: bytes) -> bytes:
    """Return the octets of the id of an object, as it says itself: `Segment.decode` looks whether it is true."""
    size = int.from_bytes(data[: _LENGTH.size])
    if not 0 < size <= ID_BYTES or len(data) < _LENGTH.size + size:
        raise _refuse(f"an object of {len(data)} bytes has no id")
    return bytes(data[_LENGTH.size : _LENGTH.size + size])


def encode_body(headers: Iterable[Header], frames: Iterable[Frame], start: int) -> bytes:
    listed = tuple(headers)
    if len(listed) > HEADERS:
        raise LimitExceededError("segment_headers", len(listed), HEADERS)
    parts = [_HEADS.pack(_VERSION, len(listed))]
    for type_id, payload in listed:
        parts += _HEADER.pack(type_id, len(payload)), payload
    count_at, count = len(parts), 0
    parts.append(b"")
    for frame in frames:
        parts += _MESSAGE.pack(frame.type_id, (frame.timestamp - start) & CLOCK_MASK, len(frame.payload)), frame.payload
        count += 1
    parts[count_at] = _COUNT.pack(count)
    body = b"".join(parts)
    if len(body) > BODY_BYTES:
        raise LimitExceededError("segment_bytes", len(body), BODY_BYTES)
    return body


def decode_body(body: bytes, start: int) -> tuple[tuple[Header, ...], tuple[Frame, ...]]:
    if len(body) > BODY_BYTES:
        raise _refuse(f"it has {len(body)} bytes, allowed are {BODY_BYTES}")
    try:
        version, header_count = _HEADS.unpack_from(body)
        if version != _VERSION or header_count > HEADERS:
            raise _refuse(f"version {version} with {header_count} headers, known is {_VERSION} with up to {HEADERS}")
        at, headers = _HEADS.size, []
        for _ in range(header_count):
            type_id, size = _HEADER.unpack_from(body, at)
            at += _HEADER.size
            headers.append((_known(type_id), _slice(body, at, size)))
            at += size
        (count,) = _COUNT.unpack_from(body, at)
        at, frames = at + _COUNT.size, []
        if not 0 < count <= MESSAGES:
            raise _refuse(f"it has {count} messages, allowed are 1 to {MESSAGES}")
        for _ in range(count):
            type_id, behind_ms, size = _MESSAGE.unpack_from(body, at)
            at += _MESSAGE.size
            frames.append(Frame(_known(type_id), (start + behind_ms) & CLOCK_MASK, _slice(body, at, size)))
            at += size
    except struct.error as error:
        raise _refuse("it ends too early") from error
    if at != len(body):
        raise _refuse(f"{len(body) - at} bytes stand behind its end")
    if len(set(headers)) != len(headers):
        raise _refuse("it has a header twice")
    return tuple(headers), tuple(frames)


def _known(type_id: int) -> int:
    if type_id not in _TYPES:
        raise _refuse(f"it has a message of type {type_id}")
    return type_id


def _slice(body: bytes, at: int, size: int) -> bytes:
    if at + size > len(body):
        raise _refuse("it ends too early")
    return body[at : at + size]


def segment_of(
    stream: str, position: Position, headers: Iterable[Header], frames: Iterable[Frame], then: Sequel, next_ms: int = 0
) -> tuple[SegmentId, bytes]:
    """Return id and body of a segment; arguments as of `SegmentId` and `encode_body`."""
    listed = tuple(frames)
    body = encode_body(headers, listed, position.start_ms & CLOCK_MASK)
    digest = hashlib.sha256(body).digest()
    return SegmentId(position, then, next_ms, len(listed), len(body), digest, stream), body
