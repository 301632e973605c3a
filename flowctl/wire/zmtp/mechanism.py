"""How two sides of ZMTP get to know each other: NULL, which proves nothing, and CURVE (RFC 26; pure but for its dice).

A mechanism is handed the commands of its peer, in their order, until it is `done`; from then on it turns messages into
octets and frames into messages. Who is let in is asked in the middle: the key is proven by then, and the peer has been
told nothing that it may rely on.

CURVE keeps the passive listener, the man in the middle and replays away: each side proves its long-term key, messages
are encrypted with keys of this connection alone, whose nonces only grow. What a listener needs for it goes to its peer
and comes back in a cookie, sealed with a key that no other connection has: one that was recorded would open the same
keys again, and with them the same nonces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import nacl.bindings as sodium
from nacl.exceptions import CryptoError
from nacl.utils import random as random_bytes

from flowctl.errors import RemoteProtocolError
from flowctl.wire.zmtp import frames as wire

NULL: Final = b"NULL"
CURVE: Final = b"CURVE"
KEY_BYTES: Final = 32

_HELLO_BYTES: Final = 194
_WELCOME_BYTES: Final = 160
_COOKIE_BYTES: Final = 96
_VOUCH_BYTES: Final = 80
_SHORT_NONCE: Final = 8
_LONG_NONCE: Final = 16
_BOX_BYTES: Final = 16
"""What a box adds: its authenticator."""
_MOST_NONCE: Final = (1 << 64) - 1
_MESSAGE: Final = wire.command_body(b"MESSAGE")
SEALED_BYTES: Final = len(_MESSAGE) + _SHORT_NONCE + 1 + _BOX_BYTES
"""Octets that encryption adds to a frame: ``MESSAGE`` and its length, a nonce, flags, an authenticator."""

Properties = Mapping[bytes, bytes]
Admit = Callable[[bytes, Properties], Properties]
"""Called with the key that a peer has proven (32 octets; empty: none) and what it says of itself; returns what is said
of us. Raises `RefusedError`."""


class RefusedError(Exception):
    """A peer is not let in.

    Args:
        told: the code that it is told, such as ``400``, after which a peer of ZeroMQ does not come again. Empty: it is
            told nothing, and comes again.
    """

    def __init__(self, told: bytes = b"") -> None:
        super().__init__(told)
        self.told: Final = told


class Mechanism(Protocol):
    """One side of one connection."""

    @property
    def name(self) -> bytes: ...

    as_server: bool
    done: bool
    key: bytes  #: that the peer has proven, 32 octets; empty: none
    said: Properties  #: by the peer of itself, by names in small letters

    def begin(self) -> bytes:
        """Return what follows the greeting at once; empty: nothing."""

    def take(self, name: bytes, data: bytes) -> bytes:
        """Take a command of the handshake; return the octets that answer it."""

    def seal(self, frames: Sequence[bytes]) -> bytes:
        """Return the octets of a message."""

    def seal_command(self, body: bytes) -> bytes:
        """Return the octets of a command after the handshake."""

    def open(self, flags: int, body: bytes) -> tuple[int, bytes]:
        """Return flags and body of a frame after the handshake, as its peer has meant it."""


class Null:
    """The mechanism without keys. A side that admits answers; the other one speaks first."""

    __slots__ = ("_admit", "_own", "as_server", "done", "key", "said")
    name: Final = NULL

    def __init__(self, own: Properties, admit: Admit | None = None) -> None:
        self._own, self._admit = own, admit
        self.as_server = self.done = False
        self.key = b""
        self.said: Properties = {}

    def begin(self) -> bytes:
        return b"" if self._admit is not None else wire.command(wire.READY, wire.properties(self._own))

    def take(self, name: bytes, data: bytes) -> bytes:
        if name != wire.READY or self.done:
            raise _unexpected(name)
        self.said = wire.read_properties(data)
        answer = b""
        if self._admit is not None:
            answer = wire.command(wire.READY, wire.properties({**self._own, **self._admit(b"", self.said)}))
        self.done = True
        return answer

    def seal(self, frames: Sequence[bytes]) -> bytes:
        return wire.message(frames)

    def seal_command(self, body: bytes) -> bytes:
        return wire.frame(body, wire.COMMAND)

    def open(self, flags: int, body: bytes) -> tuple[int, bytes]:
        return flags, body


class _Curve:
    """What both sides of CURVE do once they know each other."""

    __slots__ = ("_inward", "_last_inward", "_last_outward", "_outward", "_shared", "as_server", "done", "key", "said")
    name: Final = CURVE

    def __init__(self, *, as_server: bool) -> None:
        self.as_server, self.done = as_server, False
        self.key = b""
        self.said: Properties = {}
        self._shared = b""  # of the keys of this connection
        sides = (b"CurveZMQMESSAGEC", b"CurveZMQMESSAGES")
        self._inward, self._outward = sides if as_server else sides[::-1]
        self._last_inward = self._last_outward = 0

    def _next_nonce(self) -> bytes:
        self._last_outward += 1
        return self._last_outward.to_bytes(_SHORT_NONCE, "big")

    def _check_nonce(self, nonce: bytes) -> None:
        number = int.from_bytes(nonce, "big")
        if number <= self._last_inward:
            raise RemoteProtocolError("a nonce of CURVE was used before", code="zmtp-nonce")
        self._last_inward = number

    def seal(self, frames: Sequence[bytes]) -> bytes:
        last = len(frames) - 1
        return b"".join([self._sealed(body, wire.MORE if at < last else 0) for at, body in enumerate(frames)])

    def seal_command(self, body: bytes) -> bytes:
        return self._sealed(body, _COMMAND_INSIDE)

    def _sealed(self, body: bytes, flags: int) -> bytes:
        nonce = self._next_nonce()
        box = sodium.crypto_box_afternm(bytes((flags,)) + body, self._outward + nonce, self._shared)
        return wire.frame(_MESSAGE + nonce + box)

    def open(self, flags: int, body: bytes) -> tuple[int, bytes]:
        start = len(_MESSAGE)
        if flags or body[:start] != _MESSAGE or len(body) < SEALED_BYTES:
            raise RemoteProtocolError("a frame of a peer of CURVE is not encrypted", code="zmtp-plain")
        nonce = body[start : start + _SHORT_NONCE]
        self._check_nonce(nonce)
        plain = _opened(body[start + _SHORT_NONCE :], self._inward + nonce, self._shared)
        inside = plain[0]
        if inside & ~(wire.MORE | _COMMAND_INSIDE):
            raise RemoteProtocolError(f"an encrypted frame has the flags {inside}", code="zmtp-flags")
        return (inside & wire.MORE) | (wire.COMMAND if inside & _COMMAND_INSIDE else 0), plain[1:]


_COMMAND_INSIDE: Final = 2
"""Bit of a command among the flags inside a box, as libzmq has it."""


class CurveClient(_Curve):
    """The side that dials: it knows the key of its listener."""

    __slots__ = ("_beforehand", "_own", "_public", "_secret", "_server", "_short_public", "_short_secret")

    def __init__(self, own: Properties, public: bytes, secret: bytes, server: bytes) -> None:
        super().__init__(as_server=False)
        self._own, self._public, self._secret, self._server = own, public, secret, server
        self._short_public, self._short_secret = sodium.crypto_box_keypair()
        self._beforehand = _agreed(server, self._short_secret)

    def begin(self) -> bytes:
        nonce = self._next_nonce()
        box = sodium.crypto_box_afternm(bytes(64), b"CurveZMQHELLO---" + nonce, self._beforehand)
        return wire.command(b"HELLO", b"\x01\0" + bytes(72) + self._short_public + nonce + box)

    def take(self, name: bytes, data: bytes) -> bytes:
        if name == b"WELCOME" and not self._shared:
            return self._welcomed(data)
        if name == wire.READY and self._shared and not self.done:
            nonce, box = data[:_SHORT_NONCE], data[_SHORT_NONCE:]
            self._check_nonce(nonce)
            self.said = wire.read_properties(_opened(box, b"CurveZMQREADY---" + nonce, self._shared))
            self.key, self.done = self._server, True
            return b""
        raise _unexpected(name)

    def _welcomed(self, data: bytes) -> bytes:
        if len(data) != _WELCOME_BYTES:
            raise _unexpected(b"WELCOME")
        nonce, box = data[:_LONG_NONCE], data[_LONG_NONCE:]
        plain = _opened(box, b"WELCOME-" + nonce, self._beforehand)
        passing, cookie = plain[:KEY_BYTES], plain[KEY_BYTES:]
        self._shared = _agreed(passing, self._short_secret)
        vouch_nonce, nonce = random_bytes(_LONG_NONCE), self._next_nonce()
        vouch = sodium.crypto_box(self._short_public + self._server, b"VOUCH---" + vouch_nonce, passing, self._secret)
        plain = self._public + vouch_nonce + vouch + wire.properties(self._own)
        box = sodium.crypto_box_afternm(plain, b"CurveZMQINITIATE" + nonce, self._shared)
        return wire.command(b"INITIATE", cookie + nonce + box)


class CurveServer(_Curve):
    """The side that listens."""

    __slots__ = ("_admit", "_cookie_key", "_own", "_public", "_secret", "_short_public")

    def __init__(self, own: Properties, public: bytes, secret: bytes, admit: Admit) -> None:
        super().__init__(as_server=True)
        self._own, self._public, self._secret, self._admit = own, public, secret, admit
        self._cookie_key = random_bytes(KEY_BYTES)
        self._short_public = b""  # that the peer has said first, and repeats

    def begin(self) -> bytes:
        return b""

    def take(self, name: bytes, data: bytes) -> bytes:
        if name == b"HELLO" and not self._short_public:
            return self._welcome(data)
        if name == b"INITIATE" and self._short_public and not self.done:
            return self._ready(data)
        raise _unexpected(name)

    def _welcome(self, data: bytes) -> bytes:
        if len(data) != _HELLO_BYTES or data[0] != 1:
            raise RemoteProtocolError("a peer says HELLO in another way than CURVE 1.0", code="zmtp-hello")
        public, nonce, box = data[74:106], data[106:114], data[114:]
        self._check_nonce(nonce)
        beforehand = _agreed(public, self._secret)
        _opened(box, b"CurveZMQHELLO---" + nonce, beforehand)
        self._short_public = public
        passing_public, passing_secret = sodium.crypto_box_keypair()
        cookie_nonce, nonce = random_bytes(_LONG_NONCE), random_bytes(_LONG_NONCE)
        sealed = sodium.crypto_secretbox(public + passing_secret, b"COOKIE--" + cookie_nonce, self._cookie_key)
        plain = passing_public + cookie_nonce + sealed
        return wire.command(b"WELCOME", nonce + sodium.crypto_box_afternm(plain, b"WELCOME-" + nonce, beforehand))

    def _ready(self, data: bytes) -> bytes:
        cookie, nonce, box = data[:_COOKIE_BYTES], data[_COOKIE_BYTES:][:_SHORT_NONCE], data[_COOKIE_BYTES + 8 :]
        try:
            plain = sodium.crypto_secretbox_open(
                cookie[_LONG_NONCE:], b"COOKIE--" + cookie[:_LONG_NONCE], self._cookie_key
            )
        except (CryptoError, ValueError) as error:
            raise RemoteProtocolError("a peer shows a cookie that is none of ours", code="zmtp-cookie") from error
        public, passing_secret = plain[:KEY_BYTES], plain[KEY_BYTES:]
        self._check_nonce(nonce)
        shared = _agreed(public, passing_secret)
        plain = _opened(box, b"CurveZMQINITIATE" + nonce, shared)
        key, vouch_nonce = plain[:KEY_BYTES], plain[KEY_BYTES : KEY_BYTES + _LONG_NONCE]
        vouch_end = KEY_BYTES + _LONG_NONCE + _VOUCH_BYTES
        if len(plain) < vouch_end or public != self._short_public:
            raise RemoteProtocolError("a peer of CURVE says INITIATE for another connection", code="zmtp-initiate")
        vouched = _opened(
            plain[KEY_BYTES + _LONG_NONCE : vouch_end], b"VOUCH---" + vouch_nonce, _agreed(key, passing_secret)
        )
        if vouched != public + self._public:
            raise RemoteProtocolError("a peer does not prove the key that it claims", code="zmtp-vouch")
        said = wire.read_properties(plain[vouch_end:])
        told = {**self._own, **self._admit(key, said)}
        self._shared, self.key, self.said, self.done = shared, key, said, True
        nonce = self._next_nonce()
        box = sodium.crypto_box_afternm(wire.properties(told), b"CurveZMQREADY---" + nonce, shared)
        return wire.command(wire.READY, nonce + box)


def _agreed(public: bytes, secret: bytes) -> bytes:
    """Return the key that two sides share; a public key of low order would make it known to anybody."""
    try:
        return sodium.crypto_box_beforenm(public, secret)
    except (CryptoError, RuntimeError) as error:
        raise RemoteProtocolError("a peer of CURVE has a key that is none", code="zmtp-key") from error


def _opened(box: bytes, nonce: bytes, shared: bytes) -> bytes:
    try:
        return sodium.crypto_box_open_afternm(box, nonce, shared)
    except (CryptoError, ValueError) as error:
        raise RemoteProtocolError("a box of CURVE cannot be opened: the keys differ", code="zmtp-box") from error


def _unexpected(name: bytes) -> RemoteProtocolError:
    return RemoteProtocolError(f"{name[:20]!r} is said where it has no place", code="zmtp-handshake")
