"""Chunks in, messages out: the receiving half of the RTMP chunk stream (Adobe RTMP 1.0 section 5.3).

Theory of operation. The input is cut anywhere; the reader is always in one of two states. It either expects a chunk
header, whose first octets may lie in `_tail` because the last piece ended in the middle of it, or it is inside a
chunk and knows how many payload octets are still to come (`_chunk_left`). Each chunk stream keeps what later headers
may leave out (timestamp, delta, length, type, msid) and the message in progress.

Speed. A frame of 200 kB in chunks of 128 octets has 1600 headers, nearly all of them the same single octet. Nothing
is done per chunk: the reader computes where the headers of this message must be if no other chunk stream cuts in,
compares all of them with one strided slice, and removes them with one strided deletion. Both are loops in C.
What does not match (another chunk stream, a repeated type 1 header) is one header read the slow way.

Memory follows the octets received, never a length or chunk size that was announced: a message in progress is a
growing buffer, and all of them together are limited (`WireLimits.unfinished_bytes`). The buffer holds copies, not
views, so one octet of an unfinished message never keeps a whole piece of input alive.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Literal

from flowctl.errors import ConfigError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.chunk.stream import NO_BODY, ChunkStream
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.wire import (
    CLOCK_MASK,
    DEFAULT_CHUNK_SIZE,
    EXTENDED,
    TYPE_ABORT,
    TYPE_AUDIO,
    TYPE_DATA_AMF0,
    TYPE_DATA_AMF3,
    TYPE_SET_CHUNK_SIZE,
    TYPE_VIDEO,
    Message,
)

_HEADER_MAX: Final = 3 + 11 + 4
"""Octets of the longest header: basic, message, extended timestamp."""

_MESSAGE_HEADER: Final = (11, 7, 3, 0)
"""Octets of the message header by chunk type (section 5.3.1.2)."""

_TYPE_0_BYTES: Final = 12
"""Octets of a type 0 header with a basic header of one octet."""

_RUN_MAX: Final = 128
"""Most type 3 headers compared in one go. Where two chunk streams alternate, most of what was compared is compared
again after the next header; without this bound that is quadratic in the length of the piece."""

# The 24-bit fields are read as 32-bit words together with the octet before or after them.
_WORD: Final = struct.Struct(">I").unpack_from
_TWO_WORDS: Final = struct.Struct(">II").unpack_from
_WORD_LITTLE: Final = struct.Struct("<I").unpack_from

_DEFAULT_LIMITS: Final = WireLimits()

_SEARCHED_STREAMS: Final = 8
"""Most chunk streams that are searched one after the other, before a table is used; clients use three to five."""

_HEAD_TYPES: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO, TYPE_DATA_AMF0, TYPE_DATA_AMF3})
"""Message types whose first octets are kept where `head_bytes` is set."""

_MEDIA: Final = (TYPE_AUDIO, TYPE_VIDEO)

_NO_STREAM: Final = ChunkStream(0, b"\0")
"""Stands for the current chunk stream while there is none; shared, never written to."""


class ChunkReader:
    """Turns the octets after the handshake into messages; hand it pieces of any size with `feed`.

    Set Chunk Size and Abort act on the reader itself and are returned like any other message. The peer's chunk size
    has no influence on ours.

    Taken as real peers send it: a chunk stream opened by a type 1 or 2 header (missing fields are zero); a type 1, 2
    or 0 header that repeats the message in progress; extended timestamps in type 3 chunks repeated, left out, or as
    four zero octets (decided per chunk stream at the first occasion, then remembered); 24-bit fields of 0xFFFFFF
    with a small extended timestamp; deltas that are negative modulo 2^32; control messages on any chunk stream;
    messages without payload.
    """

    __slots__ = (
        "_chunk_left",  # payload octets still to come of the current chunk; 0: a header is expected
        "_current",  # ChunkStream of the current chunk
        "_extended_absolute",
        "_head_bytes",
        "_limits",
        "_more_streams",  # csid -> ChunkStream: those beyond _SEARCHED_STREAMS; None as long as there are none
        "_streams",  # the chunk streams opened first, in a tuple: for the three of a player, a dict is 150 octets more
        "_tail",  # octets of a header that is not complete yet; less than _HEADER_MAX
        "_type0_delta",  # whether a type 0 timestamp counts as the delta of a following type 3 chunk
        "bytes_received",
        "chunk_size",
        "completed_before_fault",
        "failed",
        "unfinished_bytes",
    )

    def __init__(
        self,
        limits: WireLimits = _DEFAULT_LIMITS,
        *,
        type3_after_type0: Literal["delta", "zero"] = "delta",
        extended_delta: Literal["delta", "absolute"] = "delta",
        head_bytes: int = 0,
    ) -> None:
        if type3_after_type0 not in ("delta", "zero"):
            raise ConfigError(f"type3_after_type0 is {type3_after_type0!r}, allowed is 'delta' or 'zero'")
        if extended_delta not in ("delta", "absolute"):
            raise ConfigError(f"extended_delta is {extended_delta!r}, allowed is 'delta' or 'absolute'")
        self._limits = limits
        self._type0_delta = type3_after_type0 == "delta"
        self._extended_absolute = extended_delta == "absolute"
        self._head_bytes = head_bytes
        self._streams: tuple[ChunkStream, ...] = ()
        self._more_streams: dict[int, ChunkStream] | None = None
        self._current = _NO_STREAM
        self._chunk_left = 0
        self._tail = b""
        self.chunk_size = DEFAULT_CHUNK_SIZE
        """Octets of payload that the peer puts into a chunk; it changes with its Set Chunk Size."""
        self.bytes_received = 0
        """Octets fed so far, headers included; acknowledgements report it modulo 2^32."""
        self.unfinished_bytes = 0
        """Payload octets held in messages that have begun and not ended."""
        self.failed = False
        """Whether `feed` has raised. A reader cannot recover: where the next chunk begins is not known any more."""
        self.completed_before_fault: tuple[Message, ...] = ()
        """After a fault: messages of the same piece that came before it, which `feed` could not return."""

    @property
    def chunk_streams(self) -> int:
        return len(self._streams) + len(self._more_streams or ())

    def chunk_stream(self, csid: int) -> ChunkStream | None:
        """Return the state of a chunk stream. None: the peer has not opened it."""
        for stream in self._streams:
            if stream.csid == csid:
                return stream
        return None if self._more_streams is None else self._more_streams.get(csid)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Read one piece of input and return the messages that it completed, in the order of their last octets."""
        self._check_sound()
        completed: list[Message] = []
        self.bytes_received += len(data)
        try:
            self._read(memoryview(data), completed)
        except RemoteProtocolError:
            self._give_up(completed)
            raise
        return completed

    def feed_around(
        self, data: bytes | bytearray | memoryview, pass_over: Callable[[memoryview, int, list[Message]], int]
    ) -> list[Message]:
        """Read one piece as `feed` does, except for the messages that the caller passes over."""
        self._check_sound()
        completed: list[Message] = []
        self.bytes_received += len(data)
        try:
            view, at = memoryview(data), 0
            if self._tail:
                view, at = self._read_split_header(view, completed)
            end = len(view)
            while at < end:
                if self._chunk_left:
                    at = self._read_payload(view, at, end, completed)
                    continue
                after = pass_over(view, at, completed)
                if after == at:
                    after = self._read_header(view, at, end)
                    if after < 0:
                        self._tail = bytes(view[at:])
                        break
                    if self._current.missing == 0:
                        self._complete(self._current, b"", completed)
                at = after
        except RemoteProtocolError:
            self._give_up(completed)
            raise
        return completed

    def _check_sound(self) -> None:
        if self.failed:
            raise LocalProtocolError("this chunk reader has failed and cannot go on")

    def _give_up(self, completed: list[Message]) -> None:
        """Forget everything after a fault, except what the piece had completed before it."""
        # The exception itself is not kept: its traceback refers to this object and to the caller's buffer.
        self.failed = True
        self.completed_before_fault = tuple(completed)
        # Nothing will ever complete: a closing connection should not hold up to 16 MiB until it is collected.
        self._streams, self._more_streams = (), None
        self._current = _NO_STREAM
        self._tail = b""
        self.unfinished_bytes = 0

    def _read(self, view: memoryview, completed: list[Message]) -> None:
        at = 0
        if self._tail:
            view, at = self._read_split_header(view, completed)
        end = len(view)
        while at < end:
            if self._chunk_left:
                at = self._read_payload(view, at, end, completed)
                continue
            after = self._read_whole(view, at, end, completed)
            if after == at:
                after = self._read_header(view, at, end)
                if after < 0:
                    self._tail = bytes(view[at:])
                    return
                if self._current.missing == 0:
                    self._complete(self._current, b"", completed)
            at = after

    def _read_whole(self, view: memoryview, at: int, end: int, completed: list[Message]) -> int:
        """Read sound and pictures that come whole, in a chunk with a header of type 0 or 1; return where to go on.

        Nearly every message of an encoder with large chunks. What is unusual in any way is left to `_read_header`.
        """
        most = min(self.chunk_size, self._limits.media_message_bytes)
        while end - at > _TYPE_0_BYTES:
            first, word = _TWO_WORDS(view, at)
            fmt, csid, field, length, type_id = first >> 30, first >> 24 & 63, first & EXTENDED, word >> 8, word & 0xFF
            start = at + 8 if fmt else at + _TYPE_0_BYTES
            for stream in self._streams:  # none has the 0 or 1 that begins a basic header of two octets or three
                if stream.csid == csid:
                    break
            else:
                return at
            if fmt > 1 or field == EXTENDED or type_id not in _MEDIA or not 0 < length <= most or stream.missing:
                return at
            if start + length > end:
                return at
            if fmt:
                stream.delta, stream.timestamp = field, stream.timestamp + field & CLOCK_MASK
            else:
                stream.msid = _WORD_LITTLE(view, at + 8)[0]
                stream.delta, stream.timestamp = field if self._type0_delta else 0, field
            stream.length, stream.type_id, stream.extended, stream.extended_value = length, type_id, False, field
            at = start + length
            completed.append(Message(csid, stream.timestamp, type_id, stream.msid, view[start:at].tobytes()))
        return at

    def _read_split_header(self, view: memoryview, completed: list[Message]) -> tuple[memoryview, int]:
        """Read the header whose first octets are in `_tail`; return the input and where to go on in it.

        Only the header is put together, not the piece: joining tail and piece would copy 64 KiB for 18 octets.
        """
        tail = self._tail
        joint = memoryview(tail + bytes(view[:_HEADER_MAX]))
        after = self._read_header(joint, 0, len(joint))
        if after < 0:
            self._tail = bytes(joint)
            return view, len(view)
        self._tail = b""
        if self._current.missing == 0:
            self._complete(self._current, b"", completed)
        at = after - len(tail)
        if at < 0:
            # The tail was kept because it looked like an extended timestamp, and turned out to be payload.
            return memoryview(tail[after:] + bytes(view)), 0
        return view, at

    # ------------------------------------------------------------------ headers

    def _read_header(self, data: memoryview, at: int, end: int) -> int:
        """Read the chunk header at `at`; return the position after it, or -1 if `end` comes first.

        Afterwards `_current` and `_chunk_left` describe the chunk's payload. Nothing is changed when -1 is returned.
        """
        first = data[at]
        csid = first & 0x3F
        last = at  # position of the last octet of the basic header
        if csid < 2:
            last += csid + 1
            if last >= end:
                return -1
            csid = 64 + data[at + 1] + (data[last] << 8 if csid else 0)
        if first >= 0xC0:
            stream = self.chunk_stream(csid)
            if stream is None:
                raise RemoteProtocolError(
                    f"type 3 chunk on chunk stream {csid}, which has none before it to refer to", code="chunk-no-header"
                )
            return self._read_type3(stream, data, last + 1, end)
        return self._read_full(csid, data, at, last, end)

    def _read_full(self, csid: int, data: memoryview, at: int, last: int, end: int) -> int:
        """Read the fields of a type 0, 1 or 2 header whose basic header is at `at` to `last`; -1: incomplete."""
        fmt = data[at] >> 6
        after = last + 1 + _MESSAGE_HEADER[fmt]
        if after > end:
            return -1
        # The first word begins with the last octet of the basic header, which the mask removes.
        if fmt < 2:
            field, word = _TWO_WORDS(data, last)
            field &= EXTENDED
        else:
            field, word = _WORD(data, last)[0] & EXTENDED, 0
        extended = field == EXTENDED
        if extended:
            if after + 4 > end:
                return -1
            field = _WORD(data, after)[0]
            after += 4
        stream = self.chunk_stream(csid)
        if stream is None:
            stream = self._open_chunk_stream(csid, bytes(data[at : last + 1]))
        length, type_id, msid = stream.length, stream.type_id, stream.msid
        if fmt < 2:
            length, type_id = word >> 8, word & 0xFF
            if fmt == 0:
                msid = _WORD_LITTLE(data, last + 8)[0]
        if stream.missing:
            self._read_repeated(stream, fmt, field, length, type_id, msid, extended=extended)
        else:
            # No limit is below that of control messages, so most headers need no second look.
            if length > self._limits.control_message_bytes:
                self._limits.check_message(type_id, length)
            stream.length = stream.missing = length
            stream.type_id = type_id
            stream.msid = msid
            if fmt == 0:
                stream.set_type0_clock(field, counts_as_delta=self._type0_delta)
            elif extended and self._extended_absolute:
                stream.advance((field - stream.timestamp) & CLOCK_MASK)
            else:
                stream.advance(field)
        stream.extended = extended
        stream.extended_value = field
        self._begin_chunk(stream)
        return after

    def _read_repeated(
        self, stream: ChunkStream, fmt: int, field: int, length: int, type_id: int, msid: int, *, extended: bool
    ) -> None:
        """Read a header with fields in the middle of a message, which it must not change."""
        stream.continue_with(fmt, field, length, type_id, msid)
        if fmt and not (extended and self._extended_absolute):
            stream.delta = field

    def _read_type3(self, stream: ChunkStream, data: memoryview, at: int, end: int) -> int:
        """Read a type 3 header, which has no fields but perhaps an extended timestamp at `at`; -1: incomplete."""
        if stream.extended:
            present = stream.extended_in_type3
            if present is None:
                present = stream.extended_follows(bytes(data[at : min(at + 4, end)]))
            if present is None or (present and at + 4 > end):
                return -1
            stream.extended_in_type3 = present
            if present:
                at += 4
        if stream.missing == 0:
            # Only here: a type 3 chunk inside a message must not add the delta again.
            stream.advance(stream.delta)
            stream.missing = stream.length
        self._begin_chunk(stream)
        return at

    def _open_chunk_stream(self, csid: int, basic: bytes) -> ChunkStream:
        maximum = self._limits.chunk_streams
        if self.chunk_streams >= maximum:
            raise LimitExceededError("chunk_streams", maximum + 1, maximum)
        stream = ChunkStream(csid, basic)
        if len(self._streams) < _SEARCHED_STREAMS:
            self._streams = (*self._streams, stream)
        elif self._more_streams is None:
            self._more_streams = {csid: stream}
        else:
            self._more_streams[csid] = stream
        return stream

    def _begin_chunk(self, stream: ChunkStream) -> None:
        self._current = stream
        missing, size = stream.missing, self.chunk_size
        self._chunk_left = missing if missing < size else size  # noqa: FURB136 - a call less for each chunk

    # ------------------------------------------------------------------ payload

    def _read_payload(self, data: memoryview, at: int, end: int, completed: list[Message]) -> int:
        """Read payload of the current chunk, and of the chunks after it that continue the same message."""
        stream = self._current
        left = self._chunk_left
        available = end - at
        if available < left or (available == left and left < stream.missing):
            self._keep(stream, data[at:end], available)
            self._chunk_left = left - available
            return end
        if left < stream.missing:
            return at + self._read_run(stream, data[at:end], completed)
        self._chunk_left = 0
        after = at + left
        if stream.body:
            self._finish(stream, data[at:after], completed)
        else:
            stream.missing = 0
            self._complete(stream, bytes(data[at:after]), completed)
        return after

    def _read_run(self, stream: ChunkStream, data: memoryview, completed: list[Message]) -> int:
        """Read the rest of this chunk and all type 3 chunks that follow it without interruption."""
        left = self._chunk_left
        size = self.chunk_size
        header = len(stream.type3)
        if stream.extended and stream.extended_in_type3:
            header += 4
        unit = header + size
        later = stream.missing - left
        chunks = -(-later // size)  # type 3 chunks that the message still needs
        take = stream.missing + chunks * header
        if take > len(data):
            take = len(data)
            chunks, rest = divmod(take - left, unit)
            if rest < header:
                take -= rest  # an incomplete header is for the next piece
            else:
                chunks += 1
        if data[left] != stream.type3[0] or (stream.extended and stream.extended_in_type3 is None):
            same = 0  # also: the header that decides about extended timestamps is read on its own
        else:
            same = _count_same(data[left:take], stream.type3, unit, min(chunks, _RUN_MAX))
        if same < chunks:
            chunks = same
            take = left + chunks * unit
        payload = take - chunks * header
        self._chunk_left = min(chunks * size, later) + left - payload
        base = len(stream.body)
        self._keep(stream, data[:take], payload)
        if chunks:
            # Each pass removes one octet of every header, so the next octets lie one nearer to each other. Joining
            # slices of the input saves a copy, but is slower below chunks of 4 KiB and only 10 % faster above.
            for octet in range(header):
                del stream.body[base + left :: unit - octet]
        if stream.missing == 0:
            self._finish(stream, b"", completed)
        return take

    def _keep(self, stream: ChunkStream, data: memoryview, payload: int) -> None:
        """Append `data`, of which `payload` octets are payload, to the message in progress."""
        if self._head_bytes and stream.type_id in _HEAD_TYPES and self.chunk_size >= self._head_bytes:
            # The head lies in the first chunk, so none of the headers in `data` is in it. No limit is looked at: all
            # that is held is a head for each chunk stream.
            stream.missing -= payload
            missing = self._head_bytes - len(stream.body)
            if missing > 0:
                head = data[:missing]
                self.unfinished_bytes += len(head)
                stream.body = stream.body + head  # never in place: `NO_BODY` is shared
            return
        held = self.unfinished_bytes + payload
        if held > self._limits.unfinished_bytes:
            raise LimitExceededError("unfinished_bytes", held, self._limits.unfinished_bytes)
        self.unfinished_bytes = held
        stream.missing -= payload
        if stream.body is NO_BODY:
            stream.body = bytearray(data)
        else:
            stream.body += data

    def _finish(self, stream: ChunkStream, rest: bytes | memoryview, completed: list[Message]) -> None:
        """Complete the message in progress with `rest`, its last octets."""
        if self._head_bytes and stream.type_id in _HEAD_TYPES:
            rest = rest[: max(self._head_bytes - len(stream.body), 0)]
        payload = b"".join((stream.body, rest))
        self.unfinished_bytes -= stream.discard()
        self._complete(stream, payload, completed)

    def _complete(self, stream: ChunkStream, payload: bytes, completed: list[Message]) -> None:
        if stream.type_id <= TYPE_ABORT:  # media has higher numbers, and one test
            if stream.type_id == TYPE_SET_CHUNK_SIZE:
                self._set_chunk_size(payload)
            elif stream.type_id == TYPE_ABORT:
                self._abort(payload)
        completed.append(Message(stream.csid, stream.timestamp, stream.type_id, stream.msid, payload))

    # ------------------------------------------------------------------ messages to the reader itself

    def _set_chunk_size(self, body: bytes) -> None:
        """Apply the peer's Set Chunk Size: four octets, of which the first bit must be zero (section 5.4.1)."""
        size = int.from_bytes(body[:4], "big")
        if len(body) < 4 or size == 0:
            raise RemoteProtocolError(
                f"Set Chunk Size of {len(body)} bytes says {size}; it needs 4 bytes and at least 1",
                code="set-chunk-size",
            )
        self._limits.check_chunk_size(size)
        self.chunk_size = size

    def _abort(self, body: bytes) -> None:
        """Discard the message in progress on the chunk stream that the body names (section 5.4.2).

        An Abort for a chunk stream with nothing in progress is no fault.
        """
        if len(body) < 4:
            raise RemoteProtocolError(f"Abort has {len(body)} bytes, it needs 4", code="abort")
        stream = self.chunk_stream(int.from_bytes(body[:4], "big"))
        if stream is not None:
            self.unfinished_bytes -= stream.discard()


def _count_same(data: memoryview, basic: bytes, unit: int, count: int) -> int:
    """Count how many of the first `count` headers, one every `unit` octets from the start of `data`, equal `basic`."""
    for position, octet in enumerate(basic):
        headers = bytes(data[position : count * unit : unit])
        # lstrip stops at the first octet that differs, and runs in C.
        count = len(headers) - len(headers.lstrip(bytes((octet,))))
    return count
