"""Frames of a server, which are not masked: the same octets for every client, so a message is framed once for all."""

from __future__ import annotations

import struct
import zlib
from typing import Final

from flowctl.errors import LocalProtocolError

Octets = bytes | bytearray | memoryview
TEXT: Final = 0x81
BINARY: Final = 0x82
CLOSE: Final = 0x88
PING: Final = 0x89
PONG: Final = 0x8A
"""First octets of frames that are whole messages (RFC 6455 section 5.2)."""
_DEFLATED: Final = 0x40
"""Bit of the first octet that says that the message is deflated (RFC 7692 section 6)."""
SHORT: Final = 126
LONG: Final = 127
"""Values of the length octet that announce a length of two and of eight octets behind it."""
REASON_BYTES: Final = 123
"""Longest reason of a close frame: a control frame has 125 octets, the code takes two."""
DEFLATED_FROM_BYTES: Final = 256
"""Payloads below are not worth it: without the window of the messages before, 100 octets of JSON become 80."""
_SYNC_TAIL_BYTES: Final = 4
"""Empty block at the end of a flush, which is left out (RFC 7692 section 7.2.1)."""
_RESERVED: Final = frozenset({1004, 1005, 1006})
_CODES: Final = (range(1000, 1015), range(3000, 5000))
"""Codes that a close frame may carry (RFC 6455 section 7.4, and what is registered since)."""


def frame(payload: bytes, first: int = BINARY) -> bytes:
    size = len(payload)
    if size < SHORT:
        return bytes((first, size)) + payload
    if size <= 0xFFFF:
        return struct.pack(">BBH", first, SHORT, size) + payload
    return struct.pack(">BBQ", first, LONG, size) + payload


def deflated_frame(plain: bytes) -> bytes:
    """Return a frame with its payload deflated, no window kept; as it is where that is not worth it."""
    payload = plain[2 if plain[1] < SHORT else 4 if plain[1] == SHORT else 10 :]
    if len(payload) < DEFLATED_FROM_BYTES:
        return plain
    # A window as long as the payload: for a short one zlib would clear 256 KiB, ten times the work of deflating it.
    bits = min(len(payload).bit_length(), zlib.MAX_WBITS)
    deflater = zlib.compressobj(wbits=-bits, memLevel=min(bits - 6, zlib.DEF_MEM_LEVEL))
    deflated = deflater.compress(payload) + deflater.flush(zlib.Z_SYNC_FLUSH)
    deflated = deflated[:-_SYNC_TAIL_BYTES]
    return frame(deflated, plain[0] | _DEFLATED) if len(deflated) < len(payload) else plain


def message_frame(message: str | Octets) -> tuple[bytes, int]:
    """Return payload and first octet of a message: text for `str`, binary for what is octets."""
    if isinstance(message, str):
        return message.encode(), TEXT
    if not isinstance(message, Octets):
        raise LocalProtocolError(
            f"a message is str or bytes, not {type(message).__name__}", hint="json.dumps() gives str"
        )
    return bytes(message), BINARY


def close_frame(code: int, reason: str = "") -> bytes:
    """Return a close frame; a reason that is too long is cut between two characters."""
    text = reason.encode(errors="replace")[:REASON_BYTES].decode(errors="ignore").encode()
    return frame(struct.pack(">H", code) + text, CLOSE)


def may_be_sent(code: int) -> bool:
    return code not in _RESERVED and any(code in codes for codes in _CODES)
