"""The tag of a request: 15 octets that the server echoes, and in which ours carry what travels with a request (pure).

======  =================================================================================
octets  what
======  =================================================================================
0-5     number of the request
6       items of a stream that may come before more credit is given; 0: one reply
7-10    time left until the deadline, in milliseconds
11-14   CRC-32 of the octets before
======  =================================================================================

To a node that does not know this form they are 15 arbitrary octets, as its own are. A tag of a foreign node passes for
ours once in four thousand million; it then has some deadline.
"""

from __future__ import annotations

from struct import Struct
from typing import Final
from zlib import crc32

TAG_BYTES: Final = 15
MOST_CREDIT: Final = 255
"""Most items that a tag can allow."""
NUMBERS: Final = 1 << 48
"""Requests are numbered modulo this."""
LONGEST_MS: Final = 0xFFFFFFFF
"""Seven weeks; a longer deadline travels as this one."""

_BODY: Final = Struct(">HIBI")
_WHOLE: Final = Struct(">HIBII")


def make_tag(number: int, left_s: float, credit: int = 0) -> bytes:
    """Return the tag of a request."""
    left_ms = int(left_s * 1000) if left_s * 1000 < LONGEST_MS else LONGEST_MS
    body = _BODY.pack(number >> 32, number & 0xFFFFFFFF, credit, left_ms)
    return body + crc32(body).to_bytes(4, "big")


def read_tag(tag: bytes) -> tuple[float, int] | None:
    """Return time left in seconds and credit of a tag in our form; None: it is a foreign one."""
    if len(tag) != TAG_BYTES:
        return None
    _, _, credit, left_ms, check = _WHOLE.unpack(tag)
    if crc32(tag[:11]) != check:
        return None
    return left_ms / 1000, credit
