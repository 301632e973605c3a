"""What a reader remembers of one chunk stream: the fields that later headers leave out, and the message in progress.

The rules on which implementations disagree are methods here, one each: what a delta is added to, whether a type 3
chunk has an extended timestamp, and which full headers are allowed inside a message.
"""

from __future__ import annotations

from typing import Final

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp.wire import CLOCK_MASK

NO_BODY: Final = bytearray()
"""Stands for the body of every chunk stream without a message in progress, and is never changed: a connection that
plays has three chunk streams, and commands that come whole need no buffer."""


class ChunkStream:
    """The reading state of one chunk stream.

    Written by `wire.rtmp.chunk.reader.ChunkReader`, and by callers of its `feed_around` for what they pass over.
    """

    __slots__ = (
        "body",
        "csid",
        "delta",
        "extended",
        "extended_in_type3",
        "extended_value",
        "length",
        "missing",
        "msid",
        "timestamp",
        "type3",
        "type_id",
    )

    def __init__(self, csid: int, basic: bytes) -> None:
        self.csid = csid
        # A csid of 64 to 319 can be written in two octets or three: what continues a message is compared with the
        # form that this peer chose, and any other form is read the slow way.
        self.type3 = bytes((basic[0] | 0xC0,)) + basic[1:]
        """Basic header of its type 3 chunks."""
        self.timestamp = 0
        """Timestamp of the message in progress, or of the last one."""
        self.delta = 0
        """What a type 3 chunk that opens a message adds to the timestamp."""
        self.length = 0
        """Payload length by the last header that stated one."""
        self.type_id = 0
        """Message type by the last header that stated one."""
        self.msid = 0
        """Message stream id by the last type 0 header."""
        self.extended = False
        """Whether the last full header had an extended timestamp, so that type 3 chunks may have one too."""
        self.extended_value = 0
        """That extended timestamp as it stood on the wire."""
        self.extended_in_type3: bool | None = None
        """Whether this peer sends extended timestamps in type 3 chunks; None: not seen yet."""
        self.missing = 0
        """Payload octets still to come of the message in progress; 0: none is in progress."""
        self.body = NO_BODY
        """Payload octets received of the message in progress; replaced, not extended, while it is `NO_BODY`."""

    def set_type0_clock(self, timestamp: int, *, counts_as_delta: bool) -> None:
        self.timestamp = timestamp
        self.delta = timestamp if counts_as_delta else 0

    def advance(self, delta: int) -> None:
        """Move the clock by `delta` ms, for a header of type 1 to 3 that opens a message.

        Modulo 2^32, so a negative delta (0xFFFFFFF6 for -10, where audio and video share a chunk stream) and the wrap
        after 49.7 days need no case of their own.
        """
        self.delta = delta
        self.timestamp = (self.timestamp + delta) & CLOCK_MASK

    def extended_follows(self, seen: bytes) -> bool | None:
        """Tell whether the octets after a type 3 basic header are an extended timestamp.

        Section 5.3.1.3 wants the last one repeated. FFmpeg, FMLE and newer OBS do so, librtmp and older OBS leave it
        out, gortmplib fills in zeros; senders that keep the absolute timestamp of the message may repeat that. Octets
        that equal none of these are payload. The first octet that differs decides, so a peer that leaves the field
        out and then waits for our answer is not left hanging.
        """
        for value in (self.extended_value, self.timestamp, 0):
            if value.to_bytes(4, "big").startswith(seen):
                return True if len(seen) == 4 else None
        return False

    def continue_with(self, fmt: int, field: int, length: int, type_id: int, msid: int) -> None:
        """Accept a full header inside a message, if it describes that very message.

        Some senders repeat the type 1 header in every chunk. Its delta is not added again; it only counts for a type 3
        chunk that opens the next message.
        """
        same = length == self.length and type_id == self.type_id and msid == self.msid
        if not same or (fmt == 0 and field != self.timestamp):
            raise RemoteProtocolError(
                f"chunk stream {self.csid}: type {fmt} header for a message of type {type_id} and {length} bytes "
                f"inside one of type {self.type_id} and {self.length} bytes with {self.missing} to come",
                code="chunk-message-changed",
            )

    def discard(self) -> int:
        """Forget the message in progress, keep what its header said; return how many octets were held of it.

        The sender's next headers refer to the discarded one, so clock, length and type stay as they are.
        """
        held = len(self.body)
        self.body = NO_BODY
        self.missing = 0
        return held
