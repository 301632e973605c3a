"""The digests by which Flash players and servers recognise each other in the RTMP handshake.

Adobe's specification knows the simple handshake only: random octets and their echo. Since Flash Player 9.0.115 there
is a second one, found out by the authors of rtmpd and librtmp and since then in every server: C1 and S1 carry an
HMAC-SHA256 over themselves at a position that depends on their content, and C2 and S2 answer with a second HMAC, keyed
by the first. Players that sent a digest play H.264 only if the server answers with one. It proves nothing about
identity (all keys are public), so a wrong digest makes a handshake simple, not refused.

Byte layout of C1 and S1 (1536 octets): time (4), version (4, zero in the simple handshake), and two blocks of 764. In
schema 0 the key block comes first and the digest block is at 772, in schema 1 the digest block is at 8. A digest block
begins with four octets whose sum modulo 728 is the position of the digest in what follows them. The numbering of the
schemas is that of SRS. The key block matters to RTMPE alone and is left random.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, NamedTuple

PACKET_BYTES: Final = 1536
"""Length of C1, C2, S1 and S2 (Adobe RTMP 1.0 section 5.2)."""

DIGEST_BYTES: Final = 32

SCHEMAS: Final = (0, 1)
_BLOCK: Final = (772, 8)
"""Where the digest block of each schema begins."""
_POSITIONS: Final = 764 - 4 - DIGEST_BYTES

_SECRET: Final = bytes.fromhex("f0eec24a8068bee82e00d0d1029e7e576eec5d2d29806fab93b8e636cfeb31ae")
CLIENT_KEY: Final = b"Genuine Adobe Flash Player 001"
SERVER_KEY: Final = b"Genuine Adobe Flash Media Server 001"
"""The names sign C1 and S1; name and secret together key the answers S2 and C2. Published since 2009 in librtmp."""


class Digest(NamedTuple):
    schema: int
    offset: int
    value: bytes


def find_digest(packet: bytes, key: bytes) -> Digest | None:
    for schema in SCHEMAS:
        offset = _offset(packet, schema)
        value = packet[offset : offset + DIGEST_BYTES]
        if hmac.compare_digest(value, _sign(packet, offset, key)):
            return Digest(schema, offset, value)
    return None


def with_digest(packet: bytes, schema: int, key: bytes) -> tuple[bytes, bytes]:
    offset = _offset(packet, schema)
    value = _sign(packet, offset, key)
    return packet[:offset] + value + packet[offset + DIGEST_BYTES :], value


def answer(digest: bytes, key: bytes, noise: bytes) -> bytes:
    return noise + _answer_digest(digest, key, noise)


def is_answer(packet: bytes, digest: bytes, key: bytes) -> bool:
    """Tell whether `packet` (S2 or C2) answers `digest`; arguments as `answer`."""
    noise, found = packet[:-DIGEST_BYTES], packet[-DIGEST_BYTES:]
    return hmac.compare_digest(found, _answer_digest(digest, key, noise))


def _offset(packet: bytes, schema: int) -> int:
    block = _BLOCK[schema]
    return sum(packet[block : block + 4]) % _POSITIONS + block + 4


def _sign(packet: bytes, offset: int, key: bytes) -> bytes:
    return hmac.digest(key, packet[:offset] + packet[offset + DIGEST_BYTES :], hashlib.sha256)


def _answer_digest(digest: bytes, key: bytes, noise: bytes) -> bytes:
    return hmac.digest(hmac.digest(key + _SECRET, digest, hashlib.sha256), noise, hashlib.sha256)
