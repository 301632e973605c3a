"""What a client sends: wsproto takes the frames apart, here they become messages, within limits.

wsproto knows no limits. They are enforced by an extension of its own kind, which sees the head of each frame before its
payload, and inflates: what is announced, inflated, or cut into pieces beyond measure is refused before it is kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import CloseConnection, Message, Ping, Pong
from wsproto.extensions import Extension
from wsproto.frame_protocol import CloseReason, Opcode, RsvBits

from flowctl.wire.websocket.frames import close_frame, may_be_sent

_PLAIN: Final = RsvBits(False, False, False)
_DEFLATED: Final = RsvBits(True, False, False)
_TAIL: Final = b"\0\0\xff\xff"
"""What a sender leaves out at the end of a deflated message (RFC 7692 section 7.2.2)."""
_MOST_FRAGMENTS: Final = 16 * 1024
"""Frames of one message: each costs as much work as a message of its own, and an empty one nothing of the limit."""
_MOST_PIECES: Final = 1024
"""Pieces of a message that are kept apart: a piece of two octets takes 56 bytes, and who sends slowly makes many."""
_WORDS: Final = {
    CloseReason.MESSAGE_TOO_BIG: "the message is larger than {} bytes",
    CloseReason.POLICY_VIOLATION: f"the message has more than {_MOST_FRAGMENTS} fragments",
    CloseReason.INVALID_FRAME_PAYLOAD_DATA: "the payload is not valid",
}
"""Reasons where wsproto says no more than that an extension, ours, refused the frame."""


class PeerClose(NamedTuple):
    """The client ends, or has broken the protocol so that it is to be ended."""

    code: int
    reason: str
    fault: bool  # the protocol is broken: `code` is what the client is told

    @property
    def answer(self) -> bytes:
        """The close frame that answers it: the same code (RFC 6455 section 5.5.1)."""
        return close_frame(self.code if may_be_sent(self.code) else 1000, self.reason if self.fault else "")


class _Limits(Extension):
    """Bounds what a message may announce, inflate to, and be cut into; inflates where that was agreed."""

    name = "flowctl-limits"

    def __init__(self, most_bytes: int, *, inflates: bool) -> None:
        self._most_bytes: Final = most_bytes
        self._inflates: Final = inflates
        self._inflater: Any = None  # zlib names no type for it; of the message under way
        self._data = False  # the frame under way belongs to a message
        self._announced_bytes = self._inflated_bytes = self._fragments = 0  # of the message under way

    def enabled(self) -> bool:
        return True

    def offer(self) -> bool:
        return False

    def frame_inbound_header(self, proto: Any, opcode: Opcode, rsv: RsvBits, payload_length: int) -> Any:
        del proto
        self._data = not opcode.iscontrol()
        if not self._data:
            return _PLAIN
        if opcode is not Opcode.CONTINUATION:
            self._announced_bytes = self._inflated_bytes = self._fragments = 0
            self._inflater = zlib.decompressobj(-zlib.MAX_WBITS) if self._inflates and rsv.rsv1 else None
        self._announced_bytes += payload_length
        self._fragments += 1
        most = self._most_bytes
        if self._inflater is not None:
            most += (most >> 8) + 256  # what does not compress grows a little
        if self._announced_bytes > most:
            return CloseReason.MESSAGE_TOO_BIG
        if self._fragments > _MOST_FRAGMENTS:
            return CloseReason.POLICY_VIOLATION
        return _DEFLATED if self._inflater is not None and opcode is not Opcode.CONTINUATION else _PLAIN

    def frame_inbound_payload_data(self, proto: Any, data: bytes) -> bytes | CloseReason:
        del proto
        return data if not self._data or self._inflater is None else self._inflate(data)

    def frame_inbound_complete(self, proto: Any, fin: bool) -> bytes | CloseReason | None:  # noqa: FBT001 - wsproto's
        del proto
        if not self._data or not fin or self._inflater is None:
            return None
        rest = b"" if self._inflater.eof else self._inflate(_TAIL)
        self._inflater = None
        return rest

    def _inflate(self, data: bytes) -> bytes | CloseReason:
        inflater, room = self._inflater, self._most_bytes - self._inflated_bytes
        inflated, behind = b"", data  # behind the last block; zlib would keep it, and copy all of it each time
        if not inflater.eof:
            try:
                inflated = inflater.decompress(data, room + 1)
            except zlib.error:
                return CloseReason.INVALID_FRAME_PAYLOAD_DATA
            behind = inflater.unused_data
        self._inflated_bytes += len(inflated)
        if len(inflated) > room:
            return CloseReason.MESSAGE_TOO_BIG
        return CloseReason.INVALID_FRAME_PAYLOAD_DATA if behind.strip(b"\0") else inflated


class FrameReader:
    """Turns the octets of one client into messages and control frames.

    Args:
        most_bytes: longest message, inflated; also the bound of what is kept of an incomplete one.
        inflates: permessage-deflate was agreed on, without context takeover.
    """

    __slots__ = ("_connection", "_most_bytes", "_pieces")

    def __init__(self, most_bytes: int, *, inflates: bool = False) -> None:
        self._most_bytes: Final = most_bytes
        self._connection: Final = Connection(ConnectionType.SERVER, [_Limits(most_bytes, inflates=inflates)])
        self._pieces: list[Any] = []  # of the message under way, all text or all octets

    def feed(self, data: bytes) -> None:
        self._connection.receive_data(data)

    def events(self) -> Iterator[str | bytes | Ping | Pong | PeerClose | None]:
        """Yield what has come, as far as it is asked for: the rest is kept for the next call.

        None stands for a part of a message. Nothing comes behind a `PeerClose`.
        """
        for event in self._connection.events():
            if isinstance(event, Message):
                data: Any = event.data  # octets of wsproto before 1.3 are a bytearray
                self._pieces.append(data if isinstance(data, str) else bytes(data))
                if event.message_finished or len(self._pieces) >= _MOST_PIECES:
                    self._pieces = [self._pieces[0][:0].join(self._pieces)]
                yield self._pieces.pop() if event.message_finished else None
            elif isinstance(event, CloseConnection):
                yield self._closed(event)
            elif isinstance(event, (Ping, Pong)):
                yield event

    def _closed(self, event: CloseConnection) -> PeerClose:
        fault = self._connection.state is ConnectionState.OPEN
        code, reason = int(event.code), event.reason or ""
        if fault and reason == "error in extension":
            reason = _WORDS.get(CloseReason(code), "reserved bits are set").format(self._most_bytes)
        return PeerClose(code, reason, fault)
