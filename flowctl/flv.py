"""FLV without I/O: an incremental reader that is handed bytes, and a writer that hands bytes out.

How it works: an FLV file is a header and then tags, each followed by its own size (a pointer for reading backwards).
The body of a tag is the body of an RTMP message of the same type, so HTTP-FLV and recording need no conversion.

The reader is a machine of four states that waits for a known number of octets in each:

    HEADER (9) -> SKIP (what DataOffset says beyond 9) -> BACK_POINTER (4) -> TAG (11 + body) -> BACK_POINTER -> ...

A tag is handed out as soon as its body is complete, without waiting for the back pointer, because live streams are cut
anywhere. FLV has no sync word: once a length is wrong, everything behind it is garbage. The reader therefore says at
which byte it noticed, and takes nothing more; guessing a new start could hand out invented tags.

Source: Adobe Flash Video File Format Specification 10.1, annex E.2 to E.4.
"""

from __future__ import annotations

import enum
import struct
from typing import BinaryIO, Final, NamedTuple, NoReturn, Protocol

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError

TAG_AUDIO: Final = 8
TAG_VIDEO: Final = 9
TAG_SCRIPT: Final = 18
"""Tag types (E.4.1); the numbers are those of the RTMP messages, AMF0 data for a script tag."""

HEADER_BYTES: Final = 9
TAG_HEADER_BYTES: Final = 11
BACK_POINTER_BYTES: Final = 4

MAX_TAG_BYTES: Final = 10 * 1024 * 1024
"""Largest body the reader takes. The format allows 16 MiB - 1; this is the limit for RTMP media messages as well."""

MAX_UNFINISHED_BYTES: Final = 16 * 1024 * 1024
"""Most octets that the reader keeps between two calls."""

MAX_DATA_OFFSET_BYTES: Final = 4096
"""Largest header the reader skips. Every file of version 1 says 9; a hostile 4 GiB would mean silence for hours."""

_MAX_BODY_BYTES: Final = 0xFFFFFF  # DataSize is UI24
_MAX_TIMESTAMP: Final = 0xFFFFFFFF  # TimestampExtended and Timestamp together
_MEDIA_TYPES: Final = frozenset({TAG_AUDIO, TAG_VIDEO, TAG_SCRIPT})
_FILTER_BIT: Final = 0x20  # E.4.1: the body is encrypted
_TYPE_MASK: Final = 0x1F
_HAS_AUDIO, _HAS_VIDEO = 4, 1  # E.2 TypeFlags
_FROM_END: Final = 2  # `seek` counts from the end

_FILE_HEADER: Final = struct.Struct(">3sBBI")
# Type and size in one word, timestamp with its extension behind it in the next, stream id always 0.
_TAG_HEADER: Final = struct.Struct(">II3x")
_BACK_POINTER: Final = struct.Struct(">I")


class FlvTag(NamedTuple):
    """One tag.

    Its timestamp is the decoding time in milliseconds, 0 to 2^32 - 1. The format calls it signed, and FFmpeg reads the
    upper half as negative; here it is the RTMP clock, which is unsigned and wraps.
    """

    type_id: int  # 8 audio, 9 video, 18 script data
    timestamp: int
    payload: bytes


class FlvHeader(NamedTuple):
    """The file header."""

    version: int
    audio: bool  # whether such tags are announced; often wrong in live streams: go by the tags
    video: bool
    data_offset: int  # octets before the first back pointer, 9 in version 1


class SupportsWrite(Protocol):
    """What `FlvWriter` needs of a file: `write`, taking all of the bytes."""

    def write(self, data: bytes, /) -> object:
        """Take all of `data`."""


def header(audio: bool, video: bool) -> bytes:  # noqa: FBT001 - both are needed and named by the format itself
    """Return the 13 octets in front of the first tag: file header and the back pointer of no tag.

    Shape: "FLV", version 1, flags, DataOffset 9 (4 octets), PreviousTagSize 0 (4 octets). Source: E.2, E.3.
    """
    flags = (_HAS_AUDIO if audio else 0) | (_HAS_VIDEO if video else 0)
    return _FILE_HEADER.pack(b"FLV", 1, flags, HEADER_BYTES) + _BACK_POINTER.pack(0)


def tag(type_id: int, timestamp: int, payload: bytes | memoryview) -> bytes:
    """Return one tag with the back pointer that follows it.

    Shape: type (1 octet), body size (3), timestamp bits 0-23 (3), bits 24-31 (1), stream id 0 (3), body, 11 + body
    size (4). Source: E.4.1.
    """
    size = len(payload)
    if type_id not in _MEDIA_TYPES:
        raise LocalProtocolError(f"type_id {type_id} is no FLV tag type: 8, 9 or 18")
    if size > _MAX_BODY_BYTES:
        raise LocalProtocolError(f"payload of {size} bytes does not fit an FLV tag: at most {_MAX_BODY_BYTES}")
    if not 0 <= timestamp <= _MAX_TIMESTAMP:
        raise LocalProtocolError(f"timestamp {timestamp} is not in 0..{_MAX_TIMESTAMP}")
    time_word = (timestamp & 0xFFFFFF) << 8 | timestamp >> 24
    return b"".join(
        (_TAG_HEADER.pack(type_id << 24 | size, time_word), payload, _BACK_POINTER.pack(TAG_HEADER_BYTES + size))
    )


class FlvWriter:
    """Writes a file header, then tags, to anything with a `write` method; opens, flushes and closes nothing."""

    __slots__ = ("_header", "_size_bytes", "_target", "_types", "tags_written")

    def __init__(self, target: SupportsWrite, *, audio: bool = True, video: bool = True) -> None:
        self._target = target
        # Written with the first tag and not here, so that a recording that never begins leaves an empty file.
        self._header = header(audio, video)
        self._size_bytes = 0  # written so far
        self._types: set[int] = set()  # of the tags
        self.tags_written = 0
        """Tags given to the target so far."""

    def write(self, type_id: int, timestamp: int, payload: bytes | memoryview) -> None:
        """Write one tag; arguments, errors and shape as `tag`. Nothing is written when it raises."""
        data = tag(type_id, timestamp, payload)
        if self._header:
            data, self._header = self._header + data, b""
        self._target.write(data)
        self._size_bytes += len(data)
        self._types.add(type_id)
        self.tags_written += 1

    def correct_header(self, file: BinaryIO) -> None:
        """Have the header announce the tags that were written to `file`, which can seek and is left at its end."""
        if self.tags_written:
            file.seek(-self._size_bytes, _FROM_END)
            file.write(header(TAG_AUDIO in self._types, TAG_VIDEO in self._types))
            file.seek(0, _FROM_END)


class _State(enum.Enum):
    """What the reader waits for."""

    HEADER = "file header"
    SKIP = "rest of the file header"
    BACK_POINTER = "size of the previous tag"
    TAG = "tag"


class FlvReader:
    """Takes an FLV stream in pieces of any size and gives its tags.

    Memory follows what was received, not what a length announces, and is bounded by both limits. An error is raised
    when all tags before it were handed out, so the same stream gives the same tags however it is cut; it is raised
    again by every later call.
    """

    def __init__(self, *, check_back_pointers: bool = False) -> None:
        self._check_back_pointers = check_back_pointers
        self._buffer = bytearray()
        self._state = _State.HEADER
        self._need = HEADER_BYTES  # octets that must be there before a step can be made
        self._consumed = 0  # octets of the stream in front of the buffer
        self._last_tag_bytes = 0  # what the next back pointer has to say; 0 before the first tag
        self._last_type = TAG_SCRIPT
        self._error: RemoteProtocolError | None = None
        self.header: FlvHeader | None = None
        """The file header; None until it was read."""
        self.back_pointer_errors = 0
        """Back pointers that did not match their tag."""

    def feed(self, data: bytes | bytearray | memoryview) -> list[FlvTag]:
        """Return the tags that `data` completes, in order; their payloads are copies."""
        if self._error is not None:
            raise self._error
        tags: list[FlvTag] = []
        try:
            self._take_data(data, tags)
        except RemoteProtocolError as error:
            # Without its traceback, whose frames would keep the fed data alive.
            self._error = error.with_traceback(None)
            self._buffer.clear()
            if not tags:
                raise
        return tags

    def _take_data(self, data: bytes | bytearray | memoryview, tags: list[FlvTag]) -> None:
        """Add `data` to what is kept, read what is whole, keep the rest."""
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) >= self._need:
                with memoryview(buffer) as view:
                    done = self._parse(view, tags)
                # CPython moves only the start of a bytearray here, so many small steps stay linear.
                del buffer[:done]
        else:
            # The usual case: whole tags arrive, nothing is kept, nothing is copied twice.
            with memoryview(data) as view:
                done = self._parse(view, tags)
                buffer += view[done:]
        if len(buffer) > MAX_UNFINISHED_BYTES:
            _exceed("flv_unfinished_bytes", len(buffer), MAX_UNFINISHED_BYTES, self._consumed)

    def finish(self) -> None:
        """Say that the stream has ended; raises when it ended inside the header or a tag."""
        if self._error is not None:
            raise self._error
        if self._state is _State.BACK_POINTER or (self._state is _State.TAG and not self._buffer):
            return
        _fail(
            f"FLV ends inside a {self._state.value}: {len(self._buffer)} of {self._need} bytes",
            self._consumed,
            "flv-truncated",
        )

    def _parse(self, view: memoryview, tags: list[FlvTag]) -> int:
        """Make every step that `view` allows; return how many octets were dealt with."""
        at, end, start = 0, len(view), self._consumed
        while end - at >= self._need:
            if self._state is _State.TAG:
                at += self._read_tag(view, at, end, tags)
            elif self._state is _State.BACK_POINTER:
                self._read_back_pointer(_BACK_POINTER.unpack_from(view, at)[0])
                at += BACK_POINTER_BYTES
            elif self._state is _State.HEADER:
                self._read_header(view)
                at += HEADER_BYTES
            else:
                at += self._need
                self._expect(_State.BACK_POINTER, BACK_POINTER_BYTES)
            self._consumed = start + at
        return at

    def _expect(self, state: _State, need: int) -> None:
        self._state, self._need = state, need

    def _read_header(self, view: memoryview) -> None:
        signature, version, flags, data_offset = _FILE_HEADER.unpack_from(view)
        if signature != b"FLV":
            _fail(f"no FLV: starts with {signature!r}", 0, "flv-signature")
        if version != 1:
            _fail(f"FLV version {version} is not 1", 3, "flv-version")
        if data_offset < HEADER_BYTES:
            _fail(f"FLV DataOffset {data_offset} is less than {HEADER_BYTES}", 5, "flv-out-of-step")
        if data_offset > MAX_DATA_OFFSET_BYTES:
            _exceed("flv_data_offset_bytes", data_offset, MAX_DATA_OFFSET_BYTES, 5)
        self.header = FlvHeader(version, bool(flags & _HAS_AUDIO), bool(flags & _HAS_VIDEO), data_offset)
        self._expect(_State.SKIP, data_offset - HEADER_BYTES)

    def _read_back_pointer(self, value: int) -> None:
        if value != self._last_tag_bytes:
            self.back_pointer_errors += 1
            # A tag of unknown type is only believed to be one when its back pointer agrees: garbage read as a tag is
            # noticed here at the latest.
            if self._check_back_pointers or self._last_type not in _MEDIA_TYPES:
                _fail(
                    f"FLV out of step: {value} is not the size {self._last_tag_bytes} of the tag before",
                    self._consumed,
                    "flv-out-of-step",
                )
        self._expect(_State.TAG, TAG_HEADER_BYTES)

    def _read_tag(self, view: memoryview, at: int, end: int, tags: list[FlvTag]) -> int:
        """Read the tag at `at`, whose header is there; return its size, or 0 while the body is not."""
        word: int
        time_word: int
        word, time_word = _TAG_HEADER.unpack_from(view, at)
        size = word & _MAX_BODY_BYTES
        whole = TAG_HEADER_BYTES + size
        # Judged before its body is waited for.
        self._check_tag(word >> 24, size)
        if end - at < whole:
            self._need = whole
            return 0
        type_id = word >> 24 & _TYPE_MASK
        if type_id in _MEDIA_TYPES:
            timestamp = time_word >> 8 | (time_word & 0xFF) << 24
            tags.append(FlvTag(type_id, timestamp, bytes(view[at + TAG_HEADER_BYTES : at + whole])))
        self._last_tag_bytes, self._last_type = whole, type_id
        self._expect(_State.BACK_POINTER, BACK_POINTER_BYTES)
        return whole

    def _check_tag(self, type_octet: int, size: int) -> None:
        position = self._consumed
        if type_octet & ~(_FILTER_BIT | _TYPE_MASK):
            _fail(f"FLV out of step: tag type byte 0x{type_octet:02x}", position, "flv-out-of-step")
        if type_octet & _FILTER_BIT:
            _fail("FLV tag is encrypted (Filter bit), which is not supported", position, "flv-encrypted")
        if size > MAX_TAG_BYTES:
            _exceed("flv_tag_bytes", size, MAX_TAG_BYTES, position)


def _fail(message: str, position: int, code: str) -> NoReturn:
    raise RemoteProtocolError(f"{message} (at byte {position})", code=code)


def _exceed(limit: str, value: int, maximum: int, position: int) -> NoReturn:
    message = f"{limit} is {value}, the limit is {maximum} (at byte {position})"
    raise LimitExceededError(limit, value, maximum, message)
