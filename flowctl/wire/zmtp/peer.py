"""One side of one connection of ZMTP 3.1, without I/O: octets in, messages out, and the other way round.

`ZmtpPeer` is handed what comes, tells its owner of messages, and hands out what is to be sent, which has to go out in
that order: the nonces of CURVE only grow. It knows greeting, handshake (`mechanism.py`), frames, and heartbeats: each
side asks with PING at times, which has it answer, and says after which silence of its own it may be taken for dead.
Sockets of ZeroMQ check that their types fit (a DEALER to a ROUTER); here the owner does, who is told what the
peer says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.core.text.printable import short
from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
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
_MOST_TIMES: Final = 16
"""Times the parts that a message may have, after which the connection of one that does not end is over."""
_LOOK_EACH: Final = 64
"""Frames that are taken before the owner is asked whether to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmtpLimits:
    """What one message may be.

    Args:
        part_bytes: octets of one part, without what encryption adds; more ends the connection.
        message_bytes: octets of all parts of one message; more ends the connection.
        parts: parts of one message; one that has more is thrown away, and counted, and one that goes on and on
            (`_MOST_TIMES` as many) ends the connection.
    """

    part_bytes: int = 1 << 20
    message_bytes: int = 16 << 20
    parts: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """When a peer is asked, and when it counts as dead; in seconds.

    Args:
        each_s: time between two questions, also where it is not silent: it was told that we ask.
        dead_s: silence after which it is dead; more than `each_s`. It is told, and may do the same with us.
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
        stops: asked now and then while there is more: whether to take no more of it now.
        behind: whether what was sent waits for the peer to read: then it gets no PONG, which would wait too.
    """

    __slots__ = (
        "_begun",
        "_behind",
        "_flags",
        "_handshaken",
        "_heartbeat",
        "_limits",
        "_mechanism",
        "_message",
        "_message_bytes",
        "_missing",
        "_most_bytes",
        "_part_count",
        "_parts",
        "_plain",
        "_send",
        "_stage",
        "_stops",
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
        stops: Callable[[], bool] = lambda: False,
        behind: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stops: Final = stops
        self._behind: Final = behind
        self._mechanism: Final = mechanism
        self._send: Final = send
        self._message: Final = message
        self._handshaken: Final = handshaken
        self._limits: Final = limits
        self._heartbeat: Final = heartbeat
        self._most_bytes = _MOST_HANDSHAKE_BYTES
        self._parts: list[bytes] = []
        self._part_count = self._message_bytes = 0  # of the message that comes
        self._begun = bytearray()  # a large frame that has not come wholly
        self._missing = self._flags = 0  # octets of that one that are still to come, and its flags
        self._stage = _GREETING
        self._plain = False  # a frame is a part as it is
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
    def unfinished_bytes(self) -> int:
        """Bytes that are kept here of a message that has not come wholly."""
        return self._message_bytes + len(self._begun)

    @property
    def mechanism(self) -> Mechanism:
        return self._mechanism

    def begin(self) -> None:
        """Say the greeting."""
        self._send(wire.greeting(self._mechanism.name, as_server=self._mechanism.as_server))

    def octets_of(self, frames: Sequence[bytes]) -> bytes:
        """Return the octets of a message; once `open`, and to be sent before any other's."""
        if not self.open:
            raise LocalProtocolError("a message is sent before the handshake is over")
        return self._mechanism.seal(frames)

    def receive(self, data: memoryview, now: float) -> int:
        """Take what has come; return how much. The rest is given again: with what comes next, or later if `stops`.

        Raises:
            RemoteProtocolError: the peer has broken the protocol; the connection is over.
            LimitExceededError: a part, or a message, is too long.
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
        most_bytes, left = self._most_bytes, _LOOK_EACH
        while size - at >= 2:
            left -= 1
            if left <= 0:
                if self._stops():
                    break
                left = _LOOK_EACH
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
                    self._begun += data[start:]
                    at = size
                break
            at = end
            if self._plain and not flags & wire.COMMAND:
                self._take_part(flags, bytes(data[start:end]))
            else:
                self._take_frame(flags, bytes(data[start:end]))
                most_bytes = self._most_bytes
        return at

    def look(self, now: float) -> float:
        """Look whether the peer is silent, and ask it where it is; return when to look again.

        Raises:
            RemoteProtocolError: it has been silent for too long.
        """
        beat = self._heartbeat
        if beat is None or not self.open:
            return float("inf")
        dead_s = min(beat.dead_s, self.peer_ttl_s or beat.dead_s)
        if now - self.heard_at >= dead_s:
            raise RemoteProtocolError(f"{SILENT} {now - self.heard_at:.1f} s", code="zmtp-silence")
        if now - self.asked_at >= beat.each_s:
            self.asked_at = now
            ttl = min(int(beat.dead_s * _PER_S), _MOST_TTL).to_bytes(2, "big")
            self._send(self._mechanism.seal_command(wire.command_body(wire.PING, ttl)))
        return min(self.heard_at + dead_s, self.asked_at + beat.each_s)

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _take_more(self, data: memoryview, at: int) -> int:
        """Take what has come of a large frame; return where it ends."""
        end = min(at + self._missing, len(data))
        self._begun += data[at:end]
        self._missing -= end - at
        if not self._missing:
            body, self._begun = bytes(self._begun), bytearray()
            self._take_frame(self._flags, body)
        return end

    def _take_frame(self, flags: int, body: bytes) -> None:
        if self._stage is _OPEN:
            self._take(flags & ~wire.LONG, body)
        else:
            self._shake_hands(flags, body)

    def _check_mechanism(self, name: bytes, *, as_server: bool) -> None:
        own = self._mechanism
        if name != own.name:
            raise RemoteProtocolError(
                f"the peer speaks the mechanism {short(name.decode('ascii', 'replace'))}, here is {own.name.decode()}",
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
                f"the peer refuses us: {short(self.refused[:40].decode('ascii', 'replace'))}", code="zmtp-refused"
            )
        try:
            self._answer(self._mechanism.take(name, said))
        except RefusedError as error:
            if error.told:
                self._send(wire.command(wire.ERROR, bytes([len(error.told)]) + error.told))
            raise
        if self._mechanism.done:
            self._stage = _OPEN
            self._plain = self._mechanism.name != CURVE
            self._most_bytes = self._limits.part_bytes + (SEALED_BYTES if self._mechanism.name == CURVE else 0)
            self._handshaken()

    def _take(self, flags: int, body: bytes) -> None:
        flags, body = self._mechanism.open(flags, body)
        if flags & wire.COMMAND:
            self._heed(*wire.read_command(body))
        else:
            self._take_part(flags, body)

    def _take_part(self, flags: int, body: bytes) -> None:
        parts, limits = self._parts, self._limits
        parts.append(body)
        if not (flags & wire.MORE or self._part_count):
            self._parts = []
            self._message(parts)
            return
        self._part_count += 1
        self._message_bytes += len(body)
        if self._message_bytes > limits.message_bytes:
            raise LimitExceededError("message_bytes", self._message_bytes, limits.message_bytes)
        if self._part_count > limits.parts:
            parts.clear()
            if self._part_count > limits.parts * _MOST_TIMES:
                raise LimitExceededError("parts", self._part_count, limits.parts)
        if not flags & wire.MORE:
            too_many, self._parts = self._part_count > limits.parts, []
            self._part_count = self._message_bytes = 0
            self.too_long_count += too_many
            if not too_many:
                self._message(parts)

    def _heed(self, name: bytes, data: bytes) -> None:
        if name == wire.PING:  # PONG, and commands of other sockets, such as SUBSCRIBE, need no answer
            if not 2 <= len(data) <= 2 + _MOST_CONTEXT_BYTES:
                raise RemoteProtocolError(f"a PING has {len(data)} bytes", code="zmtp-ping")
            self.peer_ttl_s = int.from_bytes(data[:2], "big") / _PER_S
            if self._behind():
                return
            self._send(self._mechanism.seal_command(wire.command_body(wire.PONG, data[2:])))


SILENT: Final = "the peer has said nothing for"

_GREETING: Final = "greeting"
_HANDSHAKE: Final = "handshake"
_OPEN: Final = "open"
