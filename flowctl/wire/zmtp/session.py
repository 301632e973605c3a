"""A connection of ZMTP on a poll group: the peer of `peer.py` over the framework's own Connection and Sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from flowctl.connection import Session
from flowctl.core.flow.state import MessageClass
from flowctl.core.sending.contract import SendResult
from flowctl.errors import LimitExceededError
from flowctl.reasons import CloseReason
from flowctl.wire.zmtp.mechanism import Mechanism, RefusedError
from flowctl.wire.zmtp.peer import Heartbeat, ZmtpLimits, ZmtpPeer

HANDSHAKE_S: Final = 10.0
"""Time for greeting and handshake."""
_GATHERED_BYTES: Final = 32 * 1024
"""Octets that the handling of one piece of input may gather before they are sent: more saves no system call."""


class ZmtpSession(Session):
    """One side of a connection; methods on its group's thread.

    What is sent while input is handled is gathered, and goes out as one: of a hundred requests that came together the
    answers take one system call. Its Connection sends at once (``deferred=False``): a message that comes alone is not
    queued first.

    Args:
        mechanism: how the peer is got to know.
        message: called with the parts of each message.
        known: called once the handshake is over.
        gone: called at the end with its reason, also where there was no handshake.
        limits: of messages.
        heartbeat: None: a silent peer is not asked.
    """

    __slots__ = ("_gathered", "_gathered_bytes", "_gone", "_refused", "zmtp")
    pinned = True

    def __init__(
        self,
        mechanism: Mechanism,
        message: Callable[[list[bytes]], object],
        known: Callable[[], object],
        gone: Callable[[CloseReason, str], object],
        *,
        limits: ZmtpLimits,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.zmtp: Final = ZmtpPeer(mechanism, self._put, message, known, limits=limits, heartbeat=heartbeat)
        self._gone: Final = gone
        self._gathered: list[bytes] | None = None  # while input is handled
        self._gathered_bytes = 0
        self._refused = False

    @property
    def protocol(self) -> str:
        return "zmtp"

    def send_message(self, frames: Sequence[bytes], *, droppable: bool = False) -> SendResult | None:
        """Send a message, or have it sent with what is gathered (None); once the peer is known."""
        octets = self.zmtp.octets_of(frames)
        if self._gathered is not None and not droppable:
            self._gather(octets)
            return None
        return self.connection.sender.send(octets, MessageClass.DATA, droppable=droppable)

    def opened(self) -> None:
        self.connection.set_timer(self.connection.now() + HANDSHAKE_S)
        self.zmtp.begin()

    def received(self, data: memoryview) -> int:
        if self._refused:
            return len(data)
        self._gathered = []
        zmtp, was_open = self.zmtp, self.zmtp.open
        try:
            return zmtp.receive(data, self.connection.now())
        except RefusedError as error:
            self._refused = True
            self._flush()
            if error.told:
                self.connection.close_after_flush("not let in", reason=CloseReason.AUTH_REFUSED)
            return len(data)  # who is told nothing has the rest of the time for a handshake, and comes again after that
        finally:
            self._flush()
            self._gathered = None
            if zmtp.open and not was_open:
                self._look()

    def timer(self, now: float) -> None:
        if not self.zmtp.open:
            raise LimitExceededError("handshake_time_s", now - self.connection.opened_at, HANDSHAKE_S)
        self._look()

    def closed(self, reason: CloseReason, details: str) -> None:
        self._gone(reason, details)

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        due = self.zmtp.look(self.connection.now())
        self.connection.set_timer(due if due < float("inf") else None)

    def _put(self, octets: bytes) -> None:
        if self._gathered is not None:
            self._gather(octets)
        else:
            self.connection.sender.send(octets, MessageClass.DATA, droppable=False)

    def _gather(self, octets: bytes) -> None:
        gathered = self._gathered
        if gathered is not None:
            gathered.append(octets)
            self._gathered_bytes += len(octets)
            if self._gathered_bytes >= _GATHERED_BYTES:
                self._flush()

    def _flush(self) -> None:
        gathered = self._gathered
        if gathered:
            self.connection.sender.send(b"".join(gathered), MessageClass.DATA, droppable=False)
            gathered.clear()
            self._gathered_bytes = 0
