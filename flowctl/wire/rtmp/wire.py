"""What one RTMP message is, its type ids, and the constants of the chunk format that reader and writer share.

A *message* is the unit of the protocol: type, timestamp, message stream id (msid) and payload. On the wire it is cut
into *chunks* that travel on a *chunk stream* (csid), so that a long video frame does not hold up the audio behind it.
The chunk reader and the chunk writer know nothing of each other; both know this file.
"""

from __future__ import annotations

from typing import Final

from flowctl.errors import LocalProtocolError

# Message types of Adobe RTMP 1.0: protocol control (section 5.4), user control (6.2), commands and media (7.1).
TYPE_SET_CHUNK_SIZE: Final = 1
TYPE_ABORT: Final = 2
TYPE_ACK: Final = 3
TYPE_USER_CONTROL: Final = 4
TYPE_WINDOW_ACK_SIZE: Final = 5
TYPE_PEER_BANDWIDTH: Final = 6
TYPE_AUDIO: Final = 8
TYPE_VIDEO: Final = 9
TYPE_DATA_AMF3: Final = 15
TYPE_SHARED_AMF3: Final = 16
TYPE_COMMAND_AMF3: Final = 17
TYPE_DATA_AMF0: Final = 18
TYPE_SHARED_AMF0: Final = 19
TYPE_COMMAND_AMF0: Final = 20
TYPE_AGGREGATE: Final = 22

CONTROL_CSID: Final = 2
"""Chunk stream that section 5.4 reserves for protocol control; some cameras use 3 to 6, so readers accept any."""

CSID_MIN: Final = 2
CSID_MAX: Final = 65599
"""Largest csid of the three-octet basic header: 64 + 255 + 255 * 256 (section 5.3.1.1)."""

CSID_LONG: Final = 64
"""Lowest csid whose basic header takes more than one octet (section 5.3.1.1)."""

DEFAULT_CHUNK_SIZE: Final = 128
"""Chunk size of both directions until a Set Chunk Size says otherwise (section 5.4.1)."""

EXTENDED: Final = 0xFFFFFF
"""Value of the 24-bit timestamp field that announces a 32-bit extended timestamp (section 5.3.1.3)."""

CLOCK_MASK: Final = 0xFFFFFFFF
"""Timestamps are 32 bit and wrap after 49.7 days (section 4); all arithmetic on them is modulo 2^32."""
CLOCK_HALF: Final = 1 << 31
"""A timestamp ahead by this much or more is behind instead: a difference is taken on its shorter side."""

LENGTH_MAX: Final = 0xFFFFFF
"""Largest payload that the 24-bit length field can state."""


class Message:
    """One complete RTMP message, read from or to be cut into chunks; plain data.

    A class with slots instead of a dataclass: a reader makes one per audio and video frame, and a frozen dataclass
    takes three times as long to build.
    """

    __slots__ = ("csid", "msid", "payload", "timestamp", "type_id")

    def __init__(self, csid: int, timestamp: int, type_id: int, msid: int, payload: bytes) -> None:
        self.csid = csid
        self.timestamp = timestamp
        self.type_id = type_id
        self.msid = msid
        self.payload = payload

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (
            self.type_id == other.type_id
            and self.timestamp == other.timestamp
            and self.msid == other.msid
            and self.csid == other.csid
            and self.payload == other.payload
        )

    # Attributes may be changed, so a hash would change under a set's feet.
    __hash__ = None  # type: ignore[assignment]  # typeshed declares object.__hash__ as a method; None is the idiom

    def __repr__(self) -> str:
        """Show the length and the first octets only: a log line must survive a 10 MiB key frame."""
        head = self.payload[:16].hex()
        more = "..." if len(self.payload) > 16 else ""
        return (
            f"Message(csid={self.csid}, timestamp={self.timestamp}, type_id={self.type_id}, msid={self.msid}, "
            f"payload={len(self.payload)} bytes {head}{more})"
        )


def signed_difference(later: int, earlier: int) -> int:
    """Return `later` - `earlier` on the 32-bit clock, in -2^31..2^31-1 ms."""
    return (later - earlier + CLOCK_HALF & CLOCK_MASK) - CLOCK_HALF


def basic_header(fmt: int, csid: int) -> bytes:
    """Return the shortest basic header for a chunk of type `fmt` (0..3) on chunk stream `csid` (2..65599).

    Byte layout (Adobe RTMP 1.0 section 5.3.1.1): ``fmt:2 csid:6``; csid 64..319 is ``fmt:2 0:6`` and csid - 64;
    csid 320..65599 is ``fmt:2 1:6`` and csid - 64 in two octets, the low one first.
    """
    if not CSID_MIN <= csid <= CSID_MAX:
        raise LocalProtocolError(f"csid is {csid}, allowed is {CSID_MIN} to {CSID_MAX}")
    if csid < CSID_LONG:
        return bytes((fmt << 6 | csid,))
    offset = csid - CSID_LONG
    if offset < 256:
        return bytes((fmt << 6, offset))
    return bytes((fmt << 6 | 1, offset & 0xFF, offset >> 8))
