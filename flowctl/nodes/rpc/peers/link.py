"""What carries messages to the other end of a connection, and from there.

Between processes that is a connection of ZMTP over the framework's own Connection and Sender, within one it is the
other end itself (`inproc.py`).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from flowctl.connection import Connection
from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.flow.state import SendState
from flowctl.core.sending.contract import SendResult
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.text.addresses import join_host_port, plain_address
from flowctl.nodes.rpc.peers.peer import MAX_MESSAGE_BYTES, MAX_PART_BYTES, MOST_FRAMES
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.wire.zmtp.mechanism import Mechanism
from flowctl.wire.zmtp.peer import Heartbeat, ZmtpLimits
from flowctl.wire.zmtp.session import ZmtpSession

DEAD_AFTER_S: Final = 30.0
"""Time without a word after which a peer counts as dead: as long as OxenMQ's heartbeats wait."""
HEARTBEAT: Final = Heartbeat(each_s=DEAD_AFTER_S / 2, dead_s=DEAD_AFTER_S)
PEER_LIMITS: Final = Limits(
    size=AxisLimits(soft=4 << 20, hard=16 << 20, name="size"),
    age_ms=AxisLimits(soft=10_000, hard=30_000, name="age_ms"),
    hard_policy=HardPolicy.HOLD,
)
"""What may wait for one peer, beyond what the system holds for it, before more is refused: longer than a request waits
for its answer nothing is of use."""
_SETTINGS: Final = SenderSettings(stuck_s=DEAD_AFTER_S, soft_too_long_s=0.0)
_MESSAGES: Final = ZmtpLimits(part_bytes=MAX_PART_BYTES, message_bytes=MAX_MESSAGE_BYTES, parts=MOST_FRAMES)
_CREDENTIALS: Final = struct.Struct("iII")
"""Process, user and group of a peer, as Linux tells them (``struct ucred``)."""


class Link(Protocol):
    """The way to a peer; the node's thread."""

    @property
    def drained(self) -> bool:
        """Whether nothing that was sent waits here for the peer."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait here for the peer."""

    @property
    def address(self) -> str:
        """Of the peer, for logs."""

    @property
    def odd_count(self) -> int:
        """Messages of too many parts, which were thrown away."""

    def send_message(self, frames: Sequence[bytes], *, droppable: bool = False) -> SendResult | None:
        """Send a message; return what became of it. None: it goes with others that are on their way."""

    def when_drained(self, callback: Callable[[bool], object]) -> None:
        """Call once nothing waits (True), or the way has ended (False); on any thread."""

    def end(self, why: str, linger_s: float = 0.0) -> None:
        """End it, once what was sent is on its way or after that time."""

    def cut(self) -> None:
        """End it at once, so that the peer comes again."""

    @property
    def state(self) -> SendState:
        """How much it can take."""

    def why(self) -> str:
        """Return in a line how it is with what is sent."""


class RpcSession(ZmtpSession):
    """A connection of ZMTP to or from a peer."""

    __slots__ = ()

    def __init__(
        self,
        mechanism: Mechanism,
        message: Callable[[list[bytes]], object],
        known: Callable[[], object],
        gone: Callable[[CloseReason, str], object],
    ) -> None:
        super().__init__(mechanism, message, known, gone, limits=_MESSAGES, heartbeat=HEARTBEAT)

    def live_on(self, group: PollGroup, sock: socket.socket, limits: Limits) -> None:
        connection = Connection(
            sock, self, limits=limits, settings=_SETTINGS, deferred=False, clock=group.clock, peer=_peer_of(sock)
        )
        connection.live_on(group)

    @property
    def state(self) -> SendState:
        return self.connection.sender.state

    @property
    def waiting_bytes(self) -> int:
        return self.connection.sender.load().size_bytes

    @property
    def address(self) -> str:
        host, port = self.connection.peer
        return join_host_port(host, port) if port else host

    @property
    def odd_count(self) -> int:
        return self.zmtp.too_long_count

    def end(self, why: str, linger_s: float = 0.0) -> None:
        group = self.connection.group
        if linger_s and group is not None:
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
