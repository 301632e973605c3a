"""Skims RTMP: which frames came, read from chunk headers and the first octets of each message, the rest unseen (pure).

How it works: a message that lies whole in the piece, as most do, costs one header read and one look-up: its first
octets are the key of a table, shared by all viewers of a process, that says what frame this is (key frame, number and
time of its stamp). So a frame is looked into once, however many viewers receive it. What does not fit this path (a
message cut by the end of the piece, extended timestamps, control) is given to a `ChunkReader` that keeps first octets.
"""

from __future__ import annotations

import struct
from typing import Final

from flowctl.wire.client.measure import MediaFrame, Skimmed, describe
from flowctl.wire.media.stamp import STAMPED_HEAD_BYTES
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.stream import ChunkStream
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import (
    CLOCK_MASK,
    CSID_LONG,
    EXTENDED,
    TYPE_AUDIO,
    TYPE_DATA_AMF0,
    TYPE_DATA_AMF3,
    TYPE_VIDEO,
    Message,
)

HEAD_BYTES: Final = STAMPED_HEAD_BYTES
"""Octets that are looked at of a message; the smallest chunk size is 128."""

_MEDIA: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO, TYPE_DATA_AMF0, TYPE_DATA_AMF3})
_KNOWN_MAX: Final = 8192
_LONGEST_HEADER: Final = 12

_TYPE1: Final = 0x40
_TYPE2: Final = 0x80
_TYPE3: Final = 0xC0
"""Lowest first octet of a header of type 3."""

_WORD: Final = struct.Struct(">I").unpack_from
_LITTLE: Final = struct.Struct("<I").unpack_from


class FrameBook:
    """Frames by their first octets, which say all that counts; shared by the viewers of a process."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        # type and first octets -> frame. Emptied when it is full: the frames of a moment are what counts.
        self.known: dict[tuple[int, bytes], MediaFrame] = {}

    def of(self, type_id: int, body: bytes) -> MediaFrame:
        key = (type_id, body[:HEAD_BYTES])
        return self.known.get(key) or self.learn(key)

    def learn(self, key: tuple[int, bytes]) -> MediaFrame:
        if len(self.known) >= _KNOWN_MAX:
            self.known.clear()
        frame = self.known[key] = describe(inspect(*key), key[1])
        return frame


class Skimmer:
    """Reads one connection's chunk stream; hand it everything from the end of the handshake on with `skim`."""

    __slots__ = ("_book", "_lanes", "_media", "_reader", "control")

    def __init__(self, book: FrameBook, limits: WireLimits) -> None:
        self._reader = ChunkReader(limits, head_bytes=HEAD_BYTES)
        self._book = book
        # First octet of a header -> its chunk stream, of those that have carried media and whose id takes one octet:
        # they are the ones that the quick way is for.
        self._lanes: dict[int, ChunkStream] = {}
        self._media: list[Skimmed] = []  # what the piece has completed so far; empty between pieces
        self.control: list[Message] = []  # what came and is not media, whole; the reader empties the list

    @property
    def unfinished_bytes(self) -> int:
        """Octets held in messages that have begun and not ended."""
        return self._reader.unfinished_bytes

    def skim(self, data: bytes | bytearray | memoryview) -> list[Skimmed]:
        """Read one piece; return (timestamp, frame) of each media message that it completed, in order."""
        completed = self._reader.feed_around(data, self._pass_whole)
        if completed:
            self._keep_frames(completed)
        media, self._media = self._media, []
        return media

    def _pass_whole(self, view: memoryview, at: int, completed: list[Message]) -> int:
        """Read media messages that lie whole in the piece, one after the other, after those in `completed`."""
        if completed:
            self._keep_frames(completed)
        lanes, media = self._lanes, self._media
        size = self._reader.chunk_size
        known = self._book.known
        end = len(view)
        while end - at > _LONGEST_HEADER:
            first = view[at]
            stream = lanes.get(first)
            if stream is None or stream.missing:
                break
            field = _WORD(view, at)[0] & EXTENDED
            if first < _TYPE2:
                word = _WORD(view, at + 4)[0]
                length = word >> 8
                type_id = word & 0xFF
                body = at + 8 if first >= _TYPE1 else at + 12
            else:
                length, type_id = stream.length, stream.type_id
                body = at + 4
                if first >= _TYPE3:
                    if stream.extended:
                        break
                    field = stream.delta
                    body = at + 1
            if field == EXTENDED or type_id not in _MEDIA:
                break
            after = body + length
            if length > size:
                chunks = (length - 1) // size
                after += chunks
                # Message after message is whole and in one row if every header where one must be is that of this
                # chunk stream; anything else is left to the reader.
                if after > end or view[body + size : after : size + 1] != stream.type3 * chunks:
                    break
            elif after > end:
                break
            if first >= _TYPE1:
                timestamp = (stream.timestamp + field) & CLOCK_MASK
            else:
                timestamp = field
                stream.msid = _LITTLE(view, at + 8)[0]
            stream.delta = field
            stream.timestamp = timestamp
            stream.length = length
            stream.type_id = type_id
            stream.extended = False
            stream.extended_value = field
            head = view[body : body + HEAD_BYTES] if length >= HEAD_BYTES else view[body : body + length]
            key = (type_id, head.tobytes())
            media.append((timestamp, known.get(key) or self._book.learn(key)))
            at = after
        return at

    def _keep_frames(self, completed: list[Message]) -> None:
        for message in completed:
            if message.type_id not in _MEDIA:
                self.control.append(message)
                continue
            csid = message.csid
            if csid < CSID_LONG and csid not in self._lanes:
                stream = self._reader.chunk_stream(csid)
                if stream is not None:
                    self._lanes.update(dict.fromkeys((csid, _TYPE1 | csid, _TYPE2 | csid, _TYPE3 | csid), stream))
            self._media.append((message.timestamp, self._book.of(message.type_id, message.payload)))
        completed.clear()
