"""The RTMP handshake, both ends (Adobe RTMP 1.0 section 5.2), simple and with digests.

Theory of operation. Each side sends three packets: one octet of version (C0, S0), 1536 octets of time and noise (C1,
S1), and 1536 octets that answer the other's noise (C2, S2). A handshake object is handed whatever was received and
returns what to send now; octets that follow the last packet are kept for the chunk reader in `leftover`. It holds at
most one packet and the piece in hand.

What the server makes of the version octet: 3 is RTMP. 0 to 2, 4, 5, 7 and 10 to 31 are answered with 3 and go on, as
section 5.2.2 asks of versions that are not recognised. 6, 8 and 9 are RTMPE and its successors: refused, because the
client would encrypt what follows. 0x16 is the first octet of TLS. The rest, from 32 up, are refused as another
protocol: 32 is where printable characters begin, and the specification keeps RTMP out of them for this purpose.

The answers C2 and S2 are not enforced. Encoders that echo the wrong packet are in use, and nothing depends on it;
`verified` says whether the answer was right.
"""

from __future__ import annotations

import enum
import random
import secrets
from typing import Final, Literal

from flowctl.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from flowctl.rtmp.handshake.digest import (
    CLIENT_KEY,
    DIGEST_BYTES,
    PACKET_BYTES,
    SERVER_KEY,
    answer,
    find_digest,
    is_answer,
    with_digest,
)
from flowctl.rtmp.wire import CLOCK_MASK

Style = Literal["simple", "digest"]

VERSION: Final = 3

_RTMPE_VERSIONS: Final = frozenset({6, 8, 9})
_TLS_HANDSHAKE: Final = 0x16
_TLS_ALERT: Final = 0x15
_FIRST_PRINTABLE: Final = 32

_REAL_IP: Final = 0xF3
"""A prefix in which go-oryx says whom it speaks for; `flowctl.server.proxyheader` reads it where it may stand."""

_SERVER_VERSION: Final = bytes((4, 5, 0, 1))
_CLIENT_VERSION: Final = bytes((9, 0, 124, 2))
"""Versions in S1 and C1 of the digest handshake: any that is not zero, and for C1 one from 9.0.115 on (FFmpeg's)."""

_CLIENT_SCHEMA: Final = 1
"""Schema of our C1: the one that FFmpeg and librtmp send."""


class _Step(enum.Enum):
    """What a handshake is waiting for."""

    VERSION = enum.auto()
    FIRST = enum.auto()  # C1 or S1
    ANSWER = enum.auto()  # C2 or S2
    DONE = enum.auto()


class _Handshake:
    """What both ends have in common: the buffer, the random octets, and what is known when it is over.

    Attributes:
        done: whether all of the other side's packets have arrived.
        leftover: octets received after them; for the chunk reader.
        style: ``"digest"`` or ``"simple"``; None until the other side's first packet has arrived (server).
        verified: whether the other side's answer is the right one; None until it has arrived.
        failed: whether `receive` has raised a `RemoteProtocolError`; nothing can be done with it then.
    """

    def __init__(self, rng: random.Random | None, epoch_ms: int) -> None:
        self.done = False
        self.leftover = b""
        self.style: Style | None = None
        self.verified: bool | None = None
        self.failed = False
        self._random = secrets.token_bytes if rng is None else rng.randbytes
        self._time = (epoch_ms & CLOCK_MASK).to_bytes(4, "big")
        self._buffer = bytearray()
        self._step = _Step.VERSION
        self._sent = b""  # our C1 or S1, which the other side answers

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """Take what was received and return what to send now; b"": nothing.

        Args:
            data: the next octets, any number, copied.

        Raises:
            RemoteProtocolError: the other side does not speak this protocol; the class says which codes.
            LocalProtocolError: the handshake is done already, or has failed.
        """
        if self.done or self.failed:
            state = "is done: what follows is for the chunk reader" if self.done else "has failed"
            raise LocalProtocolError(f"the handshake {state}")
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
        if self._step is _Step.VERSION:
            return self._take_version()
        if self._step is _Step.DONE or len(self._buffer) < PACKET_BYTES:
            return None
        packet = self._take(PACKET_BYTES)
        if self._step is _Step.FIRST:
            self._step = _Step.ANSWER
            return self._take_first(packet)
        self.verified = self._is_answer(packet)
        self._step = _Step.DONE
        self.done = True
        self.leftover = bytes(self._buffer)
        self._buffer.clear()
        return b""

    def _take(self, count: int) -> bytes:
        octets = bytes(self._buffer[:count])
        del self._buffer[:count]
        return octets

    def _take_version(self) -> bytes | None:
        raise NotImplementedError

    def _take_first(self, packet: bytes) -> bytes:
        raise NotImplementedError

    def _is_answer(self, packet: bytes) -> bool:
        raise NotImplementedError


class ServerHandshake(_Handshake):
    """Our end of the handshake when a client has connected to us.

    A client without digest gets S2 as an exact echo of C1: the specification would have our own time in octets 4 to
    8, but StreamLabs and older clients compare all of it.

    Codes of the `RemoteProtocolError` that `receive` may raise: ``"rtmpe"``, ``"tls-on-plain-port"``, ``"not-rtmp"``,
    ``"real-ip-prefix"``.

    Args:
        rng: source of the noise; None: the system's. Give one to repeat a recorded run.
        epoch_ms: our clock, ms, taken modulo 2^32; what S1 says.
    """

    def __init__(self, rng: random.Random | None = None, epoch_ms: int = 0) -> None:
        super().__init__(rng, epoch_ms)
        self._digest: bytes | None = None  # of our S1; None: simple

    def _take_version(self) -> bytes | None:
        if not self._buffer:
            return None
        version = self._buffer[0]
        if version in _RTMPE_VERSIONS:
            raise RemoteProtocolError(
                f"version {version} is encrypted RTMP (RTMPE), which is not supported",
                code="rtmpe",
                hint="use rtmps://",
            )
        if version == _TLS_HANDSHAKE:
            raise RemoteProtocolError(
                "this is TLS on the port for plain RTMP", code="tls-on-plain-port", hint="use rtmp:// or the RTMPS port"
            )
        if version == _REAL_IP:
            raise RemoteProtocolError(
                "a real-IP prefix from an address that is no trusted proxy", code="real-ip-prefix"
            )
        if version >= _FIRST_PRINTABLE:
            raise RemoteProtocolError(f"first octet is 0x{version:02x}, RTMP begins with 0x03", code="not-rtmp")
        del self._buffer[0]
        self._step = _Step.FIRST
        return b""

    def _take_first(self, packet: bytes) -> bytes:
        digest = find_digest(packet, CLIENT_KEY) if any(packet[4:8]) else None
        if digest is None:
            self.style = "simple"
            self._sent = self._time + bytes(4) + self._random(PACKET_BYTES - 8)
            return bytes((VERSION,)) + self._sent + packet
        self.style = "digest"
        noise = self._time + _SERVER_VERSION + self._random(PACKET_BYTES - 8)
        self._sent, self._digest = with_digest(noise, digest.schema, SERVER_KEY)
        second = answer(digest.value, SERVER_KEY, self._random(PACKET_BYTES - DIGEST_BYTES))
        return bytes((VERSION,)) + self._sent + second

    def _is_answer(self, packet: bytes) -> bool:
        if self._digest is not None:
            return is_answer(packet, self._digest, CLIENT_KEY)
        # Octets 4 to 8 may hold the time at which the client read S1.
        return packet[:4] + packet[8:] == self._sent[:4] + self._sent[8:]


class ClientHandshake(_Handshake):
    """Our end of the handshake when we have connected to a server.

    Codes of the `RemoteProtocolError` that `receive` may raise: ``"handshake-version"``, ``"tls-on-plain-port"``.

    Args:
        style: ``"simple"``, or ``"digest"`` for servers that send H.264 only to clients that sign. A server that
            answers a digest without one is answered as a simple one.
        rng: source of the noise; None: the system's.
        epoch_ms: our clock, ms, taken modulo 2^32; what C1 says.

    Raises:
        ConfigError: `style` has another value.
    """

    def __init__(self, style: Style = "simple", rng: random.Random | None = None, epoch_ms: int = 0) -> None:
        if style not in ("simple", "digest"):
            raise ConfigError(f"style is {style!r}, allowed is 'simple' or 'digest'")
        super().__init__(rng, epoch_ms)
        self.style = style
        self._digest: bytes | None = None  # of our C1; None: simple

    def start(self) -> bytes:
        """Return C0 and C1, which go first.

        Raises:
            LocalProtocolError: it was called before.
        """
        if self._sent:
            raise LocalProtocolError("the handshake was started already")
        if self.style == "simple":
            self._sent = self._time + bytes(4) + self._random(PACKET_BYTES - 8)
        else:
            noise = self._time + _CLIENT_VERSION + self._random(PACKET_BYTES - 8)
            self._sent, self._digest = with_digest(noise, _CLIENT_SCHEMA, CLIENT_KEY)
        return bytes((VERSION,)) + self._sent

    def _take_version(self) -> bytes | None:
        if not self._sent:
            raise LocalProtocolError("the client goes first: call start()")
        if not self._buffer:
            return None
        version = self._buffer[0]
        if version == _TLS_ALERT:
            raise RemoteProtocolError("the server speaks TLS", code="tls-on-plain-port", hint="use rtmps://")
        if version != VERSION:
            raise RemoteProtocolError(f"the server answers version {version}, not {VERSION}", code="handshake-version")
        del self._buffer[0]
        self._step = _Step.FIRST
        return b""

    def _take_first(self, packet: bytes) -> bytes:
        digest = find_digest(packet, SERVER_KEY) if self._digest is not None else None
        if digest is None:
            self.style = "simple"
            self._digest = None
            return packet
        return answer(digest.value, CLIENT_KEY, self._random(PACKET_BYTES - DIGEST_BYTES))

    def _is_answer(self, packet: bytes) -> bool:
        if self._digest is not None:
            return is_answer(packet, self._digest, SERVER_KEY)
        return packet[:4] + packet[8:] == self._sent[:4] + self._sent[8:]
