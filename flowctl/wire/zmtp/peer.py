"""One side of one connection of ZMTP 3.1, without I/O: octets in, messages out, and the other way round.

`ZmtpPeer` is handed what comes, tells its owner of messages, and hands out what is to be sent, which has to go out in
that order: the nonces of CURVE only grow. It knows greeting, handshake (`mechanism.py`), frames, and heartbeats: a side
that has heard nothing for a while asks with PING, and says for how long it waits, after which its peer may take it for
dead. Sockets of ZeroMQ check that their types fit (a DEALER to a ROUTER); here the owner does, who is told what the
peer says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.errors import LimitExceededError, RemoteProtocolError
from flowctl.wire.zmtp import frames as wire
from flowctl.wire.zmtp.mechanism import CURVE, SEALED_BYTES, Mechanism, RefusedError

_KNOWN: Final = wire.MORE | wire.LONG | wire.COMMAND
_MOST_HANDSHAKE_BYTES: Final = 8192
"""Longest command of a handshake: what a peer says of itself is a part of it, and nobody is known yet."""
_LARGE_BYTES: Final = 8192
"""A longer frame that has come in part is kept here, a shorter one where input is read."""
_MOST_CONTEXT_BYTES: Final = 16
_PER_S: Final = 10
"""Units of the time in a PING per second."""
_MOST_TTL: Final = 0xFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmtpLimits:
    """What one message may be.

    Args:
        part_bytes: octets of one part, without what encryption adds; more ends the connection.
        parts: parts of one message; one that has more is thrown away, and counted.
    """

    part_bytes: int = 1 << 20
    parts: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """When a silent peer is asked, and when it counts as dead; in seconds.

    Args:
        each_s: silence after which it is asked.
        dead_s: silence after which it is dead; more than `each_s`. The peer is told, and may do the same.
    """

    each_s: float = 15.0
    dead_s: float = 30.0


class ZmtpPeer:
    """One side of one connection; one thread at a time.

    Args:
        mechanism: how the peer is got to know.
        send: called with octets for the peer.
        message: called with the parts of each message.
        handshaken: called once the peer is known, before its first message.
        limits: of messages.
        heartbeat: None: it is not asked.
    """

    __slots__ = (
        "_begun",
        "_flags",
        "_handshaken",
        "_heartbeat",
        "_limits",
        "_mechanism",
        "_message",
        "_missing",
        "_most_bytes",
        "_parts",
        "_send",
        "_stage",
        "_too_many",
        "asked_at",
        "heard_at",
        "peer_ttl_s",
        "refused",
        "too_long_count",
    )

    def __init__(
        self,
        mechanism: Mechanism,
        send: Callable[[bytes], object],
        message: Callable[[list[bytes]], object],
        handshaken: Callable[[], object],
        *,
        limits: ZmtpLimits,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._mechanism: Final = mechanism
        self._send: Final = send
        self._message: Final = message
        self._handshaken: Final = handshaken
        self._limits: Final = limits
        self._heartbeat: Final = heartbeat
        self._most_bytes = _MOST_HANDSHAKE_BYTES
        self._parts: list[bytes] = []
        self._begun: list[bytes] = []  # pieces of a large frame that has not come wholly
        self._missing = self._flags = 0  # octets of that one that are still to come, and its flags
        self._too_many = False  # parts of the message that comes
        self._stage = _GREETING
        self.too_long_count = 0  #: messages of too many parts, thrown away
        self.heard_at = 0.0  #: when something came last
        self.asked_at = 0.0  #: when it was asked last
        self.peer_ttl_s = 0.0  #: how long the peer wants us to wait for it when it is silent; 0: it has not said
        self.refused = b""  #: the code by which the peer has refused us

    @property
    def open(self) -> bool:
        """Whether the handshake is over, and messages may be sent."""
        return self._stage is _OPEN

    @property
    def mechanism(self) -> Mechanism:
        return self._mechanism

    def begin(self) -> None:
        """Say the greeting."""
        self._send(wire.greeting(self._mechanism.name, as_server=self._mechanism.as_server))

    def octets_of(self, frames: Sequence[bytes]) -> bytes:
        """Return the octets of a message; once `open`."""
        return self._mechanism.seal(frames)

    def receive(self, data: memoryview, now: float) -> int:
        """Take what has come; return how much. The rest, up to `_LARGE_BYTES`, is given again with what comes next.

        Raises:
            RemoteProtocolError: the peer has broken the protocol; the connection is over.
            LimitExceededError: a part is too long.
            RefusedError: the owner does not let it in; it was told what it is to be told.
        """
        self.heard_at = now
        at, size = 0, len(data)
        if self._stage is _GREETING:
            mechanism, as_server = wire.read_greeting(data)
            if size < wire.GREETING_BYTES:
                return 0
            self._check_mechanism(mechanism, as_server=as_server)
            self._stage, at = _HANDSHAKE, wire.GREETING_BYTES
            self._answer(self._mechanism.begin())
        if self._missing:
            at = self._take_more(data, at)
        most_bytes = self._most_bytes
        while size - at >= 2:
            flags, length, start = data[at], data[at + 1], at + 2
            if flags & wire.LONG:
                if size - at < 9:
                    break
                length, start = int.from_bytes(data[at + 1 : at + 9], "big"), at + 9
            if flags & ~_KNOWN or (flags & wire.COMMAND and flags & wire.MORE):
                raise RemoteProtocolError(f"a frame has the flags {flags:#04x}", code="zmtp-flags")
            if length > most_bytes:
                raise LimitExceededError("part_bytes", length, most_bytes)
            end = start + length
            if end > size:
                if length > _LARGE_BYTES:
                    self._flags, self._missing = flags, end - size
                    self._begun.append(bytes(data[start:]))
                    at = size
                break
            at = end
            self._take_frame(flags, bytes(data[start:end]))
            most_bytes = self._most_bytes
        return at

    def look(self, now: float) -> float:
        """Look whether the peer is silent, and ask it where it is; return when to look again.

        Raises:
            RemoteProtocolError: it has been silent for too long.
        """
        beat = self._heartbeat
        silent_s = now - self.heard_at
        if beat is None or not self.open:
            return float("inf")
        dead_s = min(beat.dead_s, self.peer_ttl_s or beat.dead_s)
        if silent_s >= dead_s:
            raise RemoteProtocolError(f"the peer has said nothing for {silent_s:.0f} s", code="zmtp-silence")
        if silent_s >= beat.each_s and now - self.asked_at >= beat.each_s:
            self.asked_at = now
            ttl = min(int(beat.dead_s * _PER_S), _MOST_TTL).to_bytes(2, "big")
            self._send(self._mechanism.seal_command(wire.command_body(wire.PING, ttl)))
        return min(self.heard_at + dead_s, max(self.asked_at, self.heard_at) + beat.each_s)

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _take_more(self, data: memoryview, at: int) -> int:
        """Take what has come of a large frame; return where it ends."""
        piece = bytes(data[at : at + self._missing])
        self._begun.append(piece)
        self._missing -= len(piece)
        if not self._missing:
            body = b"".join(self._begun)
            self._begun.clear()
            self._take_frame(self._flags, body)
        return at + len(piece)

    def _take_frame(self, flags: int, body: bytes) -> None:
        if self._stage is _OPEN:
            self._take(flags & ~wire.LONG, body)
        else:
            self._shake_hands(flags, body)

    def _check_mechanism(self, name: bytes, *, as_server: bool) -> None:
        own = self._mechanism
        if name != own.name:
            raise RemoteProtocolError(
                f"the peer speaks the mechanism {name[:20].decode('ascii', 'replace')}, here is {own.name.decode()}",
                code="zmtp-mechanism",
                hint="one side has a key of the other, and that one does not use keys, or the other way round",
            )
        if as_server and own.as_server:  # libzmq never says that it is one
            raise RemoteProtocolError("both sides of a connection listen", code="zmtp-mechanism")

    def _answer(self, octets: bytes) -> None:
        if octets:
            self._send(octets)

    def _shake_hands(self, flags: int, body: bytes) -> None:
        if flags & ~wire.LONG != wire.COMMAND:
            raise RemoteProtocolError("a message came before the handshake", code="zmtp-handshake")
        name, said = wire.read_command(body)
        if name == wire.ERROR:
            self.refused = said[1 : 1 + said[0]] if said else b""
            raise RemoteProtocolError(
                f"the peer refuses us: {self.refused[:40].decode('ascii', 'replace')}", code="zmtp-refused"
            )
        try:
            self._answer(self._mechanism.take(name, said))
        except RefusedError as error:
            if error.told:
                self._send(wire.command(wire.ERROR, bytes([len(error.told)]) + error.told))
            raise
        if self._mechanism.done:
            self._stage = _OPEN
            self._most_bytes = self._limits.part_bytes + (SEALED_BYTES if self._mechanism.name == CURVE else 0)
            self._handshaken()

    def _take(self, flags: int, body: bytes) -> None:
        flags, body = self._mechanism.open(flags, body)
        if flags & wire.COMMAND:
            self._heed(*wire.read_command(body))
            return
        parts = self._parts
        if len(parts) < self._limits.parts:
            parts.append(body)
        else:
            self._too_many = True
        if not flags & wire.MORE:
            self._parts = []
            if self._too_many:
                self._too_many = False
                self.too_long_count += 1
            else:
                self._message(parts)

    def _heed(self, name: bytes, data: bytes) -> None:
        if name == wire.PING:  # PONG, and commands of other sockets, such as SUBSCRIBE, need no answer
            if not 2 <= len(data) <= 2 + _MOST_CONTEXT_BYTES:
                raise RemoteProtocolError(f"a PING has {len(data)} bytes", code="zmtp-ping")
            self.peer_ttl_s = int.from_bytes(data[:2], "big") / _PER_S
            self._send(self._mechanism.seal_command(wire.command_body(wire.PONG, data[2:])))


_GREETING: Final = "greeting"
_HANDSHAKE: Final = "handshake"
_OPEN: Final = "open"
