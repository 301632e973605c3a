"""What carries messages to the other end of a connection, and from there.

Between processes that is a connection of ZMTP over the framework's own Connection and Sender, within one it is the
other end itself (`inproc.py`).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from flowctl.connection import Connection
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import SendState
from flowctl.core.loop.sockets import notice_dead_peer
from flowctl.core.sending.contract import SendResult
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.text.addresses import join_host_port, plain_address
from flowctl.pollgroup import PollGroup
from flowctl.reasons import SLOW_ENDS, CloseReason
from flowctl.wire.zmtp.mechanism import Mechanism, Properties
from flowctl.wire.zmtp.peer import SILENT, Heartbeat, ZmtpLimits
from flowctl.wire.zmtp.session import ZmtpSession

MOST_UNFINISHED_BYTES: Final = 256 << 20
"""Bytes that are kept of messages that have not come wholly, of all links of a node or messenger."""
_CREDENTIALS: Final = struct.Struct("iII")
"""Process, user and group of a peer, as Linux tells them (``struct ucred``)."""


_CUTS: Final = frozenset({*SLOW_ENDS, CloseReason.IDLE.value})


def why_cut(reason: CloseReason, details: str) -> str:
    """Return why we have cut a peer that took nothing or said nothing; empty: it ended in another way."""
    silent = reason is CloseReason.PROTOCOL_ERROR and SILENT in details
    return f"{reason.value}: {details}" if silent or reason.value in _CUTS else ""


class UnfinishedRoom:
    """What is kept of messages that have not come wholly, of all links of one owner; the thread of its group."""

    def __init__(self) -> None:
        self._most_bytes: Final = MOST_UNFINISHED_BYTES
        self._held: Final[dict[ZmtpLink, int]] = {}
        self._total_bytes = 0

    def note(self, link: ZmtpLink, size_bytes: int) -> None:
        """Note how much is kept of a link's; where it is too much for all together, end the one that has most."""
        self._total_bytes += size_bytes - self._held.pop(link, 0)
        if size_bytes:
            self._held[link] = size_bytes
        while self._total_bytes > self._most_bytes:
            most = max(self._held, key=self._held.__getitem__)
            self._total_bytes -= self._held.pop(most)
            most.end("it has most of what came of messages that are not whole, which is too much for all together")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """How connections of ZMTP are made.

    Args:
        limits: of what may wait for one peer, beyond what the system holds for it.
        messages: of what comes.
        dead_after_s: time without a word after which a peer counts as dead, in seconds; it is asked after half of it.
        line_dead_after_s: time after which the system takes a line for dead whose other end acknowledges nothing.
        room: shared by all links of an owner.
    """

    limits: Limits
    messages: ZmtpLimits
    dead_after_s: float = 30.0
    line_dead_after_s: float = 30.0
    room: UnfinishedRoom = field(default_factory=UnfinishedRoom)


class Link(Protocol):
    """The way to a peer; the thread of its group."""

    @property
    def drained(self) -> bool:
        """Whether nothing that was sent waits here for the peer."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait here for the peer."""

    @property
    def state(self) -> SendState:
        """How much it can take."""

    @property
    def address(self) -> str:
        """Of the peer, for logs."""

    @property
    def key(self) -> bytes:
        """The key that the peer has proven, 32 octets; empty: none."""

    @property
    def said(self) -> Properties:
        """What the peer says of itself, by names in small letters."""

    @property
    def odd_count(self) -> int:
        """Messages of too many parts, which were thrown away."""

    def send_message(self, frames: Sequence[bytes], *, droppable: bool = False) -> SendResult | None:
        """Send a message; return what became of it. None: it goes with others that are on their way."""

    def when_drained(self, callback: Callable[[bool], object]) -> None:
        """Call once nothing waits (True), or the way has ended (False); on any thread."""

    def hold(self, why: str) -> None:
        """Take no more of the peer's messages; it stays connected."""

    def end(self, why: str, linger_s: float = 0.0) -> None:
        """End it, once what was sent is on its way or after that time."""

    def cut(self) -> None:
        """End it at once, so that the peer comes again."""

    def why(self) -> str:
        """Return in a line how it is with what is sent."""


class ZmtpLink(ZmtpSession):
    """A connection of ZMTP to or from a peer, with what its mechanism knows of it."""

    __slots__ = ("_options",)

    def __init__(
        self,
        options: LinkOptions,
        mechanism: Mechanism,
        message: Callable[[list[bytes]], object],
        known: Callable[[], object],
        gone: Callable[[CloseReason, str], object],
    ) -> None:
        heartbeat = Heartbeat(each_s=options.dead_after_s / 2, dead_s=options.dead_after_s)
        super().__init__(mechanism, message, known, gone, limits=options.messages, heartbeat=heartbeat)
        self._options: Final = options

    def live_on(self, group: PollGroup, sock: socket.socket) -> None:
        options = self._options
        if sock.family != socket.AF_UNIX:
            notice_dead_peer(sock, options.line_dead_after_s)
        settings = SenderSettings(stuck_s=options.dead_after_s, soft_too_long_s=0.0)
        connection = Connection(
            *(sock, self),
            limits=options.limits,
            settings=settings,
            deferred=False,
            clock=group.clock,
            peer=_peer_of(sock),
        )
        connection.live_on(group)

    def unfinished_changed(self, size_bytes: int) -> None:
        self._options.room.note(self, size_bytes)

    # --- Link ----------------------------------------------------------------------------------------------------

    @property
    def waiting_bytes(self) -> int:
        return self.connection.sender.load().size_bytes

    @property
    def state(self) -> SendState:
        return self.connection.sender.state

    @property
    def address(self) -> str:
        host, port = self.connection.peer
        return join_host_port(host, port) if port else host

    @property
    def key(self) -> bytes:
        return self.zmtp.mechanism.key

    @property
    def said(self) -> Properties:
        return self.zmtp.mechanism.said

    @property
    def odd_count(self) -> int:
        return self.zmtp.too_long_count

    def hold(self, why: str) -> None:
        self.connection.receiver.pause(self, why)

    def end(self, why: str, linger_s: float = 0.0) -> None:
        group = self.connection.group
        if linger_s > 0 and group is not None:
            self.close_after_flush(why)
            group.call_later(linger_s, self.close, why)
        else:
            self.close(why)

    def cut(self) -> None:
        self.close("another connection of its identity goes on")

    def why(self) -> str:
        return self.connection.why()


def _peer_of(sock: socket.socket) -> tuple[str, int] | None:
    """Return address and port of a peer; of a Unix socket its user, group and process, as ZeroMQ writes them."""
    try:
        if sock.family == socket.AF_UNIX:
            told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            process, user, group = _CREDENTIALS.unpack(told)
            return f"localhost:{user}:{group}:{process}", 0
        host, port, *_ = sock.getpeername()
    except OSError:
        return None
    return plain_address(host), port
