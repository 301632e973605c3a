"""The RTMP handshake, both ends (Adobe RTMP 1.0 section 5.2), simple and with digests.

Theory of operation. Each side sends three packets: one octet of version (C0, S0), 1536 octets of time and noise (C1,
S1), and 1536 octets that answer the other's noise (C2, S2). A handshake object is handed whatever was received and
returns what to send now; octets that follow the last packet are kept for the chunk reader in `leftover`. It holds at
most one packet and the piece in hand.

The digests are in no specification: since Flash Player 9.0.115 C1 and S1 carry an HMAC-SHA256 over themselves, and C2
and S2 a second one, keyed by the first. Players that sent one play H.264 only if the server answers with one. All keys
are public, so it proves nothing, and a wrong digest makes a handshake simple, not refused. C1 and S1 are time (4),
version (4, zero in the simple handshake) and two blocks of 764; the digest block is at 772 in schema 0 and at 8 in
schema 1 (as SRS counts them). Four octets begin it, whose sum modulo 728 is where in the rest the digest is. The other
block is RTMPE's, and left random.

Both ends do the same: send a first packet, answer the other's, and check the answer. What differs is data (`_Role`):
who goes first, which names sign the digests, and what is made of the version octet.

What the server makes of the version octet: 3 is RTMP. 0 to 2, 4, 5, 7 and 10 to 31 are answered with 3 and go on, as
section 5.2.2 asks of versions that are not recognised. 6, 8 and 9 are RTMPE and its successors: refused, because the
client would encrypt what follows. 0x16 is the first octet of TLS. The rest, from 32 up, are refused as another
protocol: 32 is where printable characters begin, and the specification keeps RTMP out of them for this purpose.

The answers C2 and S2 are not enforced. Encoders that echo the wrong packet are in use, and nothing depends on it;
`verified` says whether the answer was right.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import random
import secrets
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from flowctl.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.wire import CLOCK_MASK

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
    noise, signature = packet[:-DIGEST_BYTES], packet[-DIGEST_BYTES:]
    return hmac.compare_digest(signature, _answer_digest(digest, key, noise))


def _offset(packet: bytes, schema: int) -> int:
    block = _BLOCK[schema]
    return sum(packet[block : block + 4]) % _POSITIONS + block + 4


def _sign(packet: bytes, offset: int, key: bytes) -> bytes:
    return hmac.digest(key, packet[:offset] + packet[offset + DIGEST_BYTES :], hashlib.sha256)


def _answer_digest(digest: bytes, key: bytes, noise: bytes) -> bytes:
    return hmac.digest(hmac.digest(key + _SECRET, digest, hashlib.sha256), noise, hashlib.sha256)


Style = Literal["simple", "digest"]

VERSION: Final = 3

_RTMPE_VERSIONS: Final = frozenset({6, 8, 9})
_TLS_HANDSHAKE: Final = 0x16
_TLS_ALERT: Final = 0x15
_FIRST_PRINTABLE: Final = 32

_REAL_IP: Final = 0xF3
"""First octet of a prefix in which go-oryx states the client's address; `flowctl.core.server.proxyheader` reads it."""

_SERVER_VERSION: Final = bytes((4, 5, 0, 1))
_CLIENT_VERSION: Final = bytes((9, 0, 124, 2))
"""Versions in S1 and C1 of the digest handshake: any that is not zero, and for C1 one from 9.0.115 on (FFmpeg's)."""

_CLIENT_SCHEMA: Final = 1
"""Schema of our C1: the one that FFmpeg and librtmp send."""


class _Step(enum.Enum):
    VERSION = enum.auto()
    FIRST = enum.auto()  # C1 or S1
    ANSWER = enum.auto()  # C2 or S2
    DONE = enum.auto()


class _Role(NamedTuple):
    """What tells the two ends apart."""

    goes_first: bool  # whether this end sends its first packet before it has received one
    key: bytes  # name that signs this end's digests
    peer_key: bytes  # name that signs the other end's
    version: bytes  # octets 4 to 8 of a first packet that carries a digest
    check_version: Callable[[int], None]  # refuses the other end's version octet


_STUN: Final = b"\x21\x12\xa4\x42"
"""Magic cookie of RFC 8489, behind type and length, which stand behind a length of two octets in RFC 4571."""


def is_stun(data: bytes) -> bool:
    """Return whether input begins as STUN: a page has browsers take any port for a TURN server's, or another peer's."""
    return _STUN in data[4:10] and data[0] < VERSION


def _check_client_version(version: int) -> None:
    """Refuse a client that speaks something else; see the theory of operation."""
    if version in _RTMPE_VERSIONS:
        raise RemoteProtocolError(
            f"version {version} is encrypted RTMP (RTMPE), which is not supported", code="rtmpe", hint="use rtmps://"
        )
    if version == _TLS_HANDSHAKE:
        raise RemoteProtocolError(
            "this is TLS on the port for plain RTMP", code="tls-on-plain-port", hint="use rtmp:// or the RTMPS port"
        )
    if version == _REAL_IP:
        raise RemoteProtocolError("a real-IP prefix from an address that is no trusted proxy", code="real-ip-prefix")
    if version >= _FIRST_PRINTABLE:
        raise RemoteProtocolError(f"first byte is 0x{version:02x}, RTMP begins with 0x03", code="not-rtmp")


def _check_server_version(version: int) -> None:
    """Refuse a server that does not answer with our version."""
    if version == _TLS_ALERT:
        raise RemoteProtocolError("the server speaks TLS", code="tls-on-plain-port", hint="use rtmps://")
    if version != VERSION:
        raise RemoteProtocolError(f"the server answers version {version}, not {VERSION}", code="handshake-version")


_SERVER: Final = _Role(
    goes_first=False,
    key=SERVER_KEY,
    peer_key=CLIENT_KEY,
    version=_SERVER_VERSION,
    check_version=_check_client_version,
)
_CLIENT: Final = _Role(
    goes_first=True,
    key=CLIENT_KEY,
    peer_key=SERVER_KEY,
    version=_CLIENT_VERSION,
    check_version=_check_server_version,
)


class Handshake:
    """One end of a handshake; made by `Handshake.server` or `Handshake.client`."""

    def __init__(self, role: _Role, style: Style | None, rng: random.Random | None, epoch_ms: int) -> None:
        self.done = False  # whether all of the other side's packets have arrived
        self.leftover = b""  # octets received after them; for the chunk reader
        # ``"digest"`` or ``"simple"``; None until the other side's first packet has arrived (server).
        self.style = style
        self.verified: bool | None = None  # whether the other side's answer is the right one; None until it has arrived
        self.failed = False  # whether `receive` has raised a `RemoteProtocolError`; nothing can be done with it then
        self._role = role
        self._random = secrets.token_bytes if rng is None else rng.randbytes
        self._time = (epoch_ms & CLOCK_MASK).to_bytes(4, "big")
        self._buffer = bytearray()
        self._step = _Step.VERSION
        self._sent = b""  # our C1 or S1, which the other side answers
        self._digest: bytes | None = None  # digest of our C1 or S1; None: it carries none

    @classmethod
    def server(cls, rng: random.Random | None = None, epoch_ms: int = 0) -> Handshake:
        """Return our end when a client has connected to us; arguments as for the class.

        A client without digest gets S2 as an exact echo of C1: the specification would have our own time in octets 4
        to 8, but StreamLabs and older clients compare all of it.

        Codes of the `RemoteProtocolError` that `receive` may raise: ``"rtmpe"``, ``"tls-on-plain-port"``,
        ``"not-rtmp"``, ``"real-ip-prefix"``.
        """
        return cls(_SERVER, None, rng, epoch_ms)

    @classmethod
    def client(cls, style: Style = "simple", rng: random.Random | None = None, epoch_ms: int = 0) -> Handshake:
        """Return our end when we have connected to a server; `start` it.

        Codes of the `RemoteProtocolError` that `receive` may raise: ``"handshake-version"``, ``"tls-on-plain-port"``.
        """
        if style not in ("simple", "digest"):
            raise ConfigError(f"style is {style!r}, allowed is 'simple' or 'digest'")
        return cls(_CLIENT, style, rng, epoch_ms)

    def start(self) -> bytes:
        """Return C0 and C1, which go first."""
        if self._sent or not self._role.goes_first:
            raise LocalProtocolError("the handshake was started already")
        return self._first_packet(_CLIENT_SCHEMA)

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """Read input of the peer; return the octets to send now, b"" for none."""
        if self.done or self.failed:
            state = "is done: what follows is for the chunk reader" if self.done else "has failed"
            raise LocalProtocolError(f"the handshake {state}")
        if self._role.goes_first and not self._sent:
            raise LocalProtocolError("the client goes first: call start()")
        self._buffer += data
        out = []
        try:
            while (octets := self._advance()) is not None:
                out.append(octets)
        except RemoteProtocolError:
            self.failed = True
            self._buffer.clear()
            raise
        return b"".join(out)

    def _advance(self) -> bytes | None:
        """Make one step and return what to send; None: it needs more input, or is done."""
        size = 1 if self._step is _Step.VERSION else PACKET_BYTES
        if self._step is _Step.DONE or len(self._buffer) < size:
            return None
        packet = bytes(self._buffer[:size])
        del self._buffer[:size]
        if self._step is _Step.VERSION:
            if is_stun(packet + self._buffer[:9]):
                raise RemoteProtocolError("this is STUN, RTMP begins with 0x03", code="not-rtmp")
            self._role.check_version(packet[0])
            self._step = _Step.FIRST
            return b""
        if self._step is _Step.FIRST:
            self._step = _Step.ANSWER
            return self._answer_first(packet)
        self.verified = self._is_answer(packet)
        self._step = _Step.DONE
        self.done = True
        self.leftover = bytes(self._buffer)
        self._buffer.clear()
        return b""

    def _first_packet(self, schema: int) -> bytes:
        signed = self.style == "digest"
        version = self._role.version if signed else bytes(4)
        self._sent = self._time + version + self._random(PACKET_BYTES - 8)
        if signed:
            self._sent, self._digest = with_digest(self._sent, schema, self._role.key)
        return bytes((VERSION,)) + self._sent

    def _answer_first(self, packet: bytes) -> bytes:
        """Return the answer to the other side's first packet, behind ours where the other side went first."""
        # A client without a digest of its own is answered without one; octets 4 to 8 of its packet say so.
        signs = self._digest is not None if self._role.goes_first else any(packet[4:8])
        digest = find_digest(packet, self._role.peer_key) if signs else None
        self.style = "simple" if digest is None else "digest"
        ours = b"" if self._role.goes_first else self._first_packet(0 if digest is None else digest.schema)
        if digest is None:
            self._digest = None
            return ours + packet
        return ours + answer(digest.value, self._role.key, self._random(PACKET_BYTES - DIGEST_BYTES))

    def _is_answer(self, packet: bytes) -> bool:
        if self._digest is not None:
            return is_answer(packet, self._digest, self._role.peer_key)
        # Octets 4 to 8 may hold the time at which the other side read our packet.
        return packet[:4] + packet[8:] == self._sent[:4] + self._sent[8:]
