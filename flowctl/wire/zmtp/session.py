"""A connection of ZMTP on a poll group: the peer of `peer.py` over the framework's own Connection and Sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from flowctl.connection import Session
from flowctl.core.flow.state import MessageClass
from flowctl.core.sending.contract import SendResult
from flowctl.errors import LimitExceededError
from flowctl.reasons import CloseReason
from flowctl.receiver import DONE, InputResult, InputVerdict
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

    __slots__ = ("_gathered", "_gathered_bytes", "_gone", "zmtp")
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
        self.zmtp: Final = ZmtpPeer(
            *(mechanism, self._put, message, known),
            limits=limits,
            heartbeat=heartbeat,
            stops=lambda: self.connection.ended is not None or self.connection.turn_over(),
            behind=lambda: not self.connection.sender.drained,
        )
        self._gone: Final = gone
        self._gathered: list[bytes] | None = None  # while input is handled
        self._gathered_bytes = 0

    @property
    def protocol(self) -> str:
        return "zmtp"

    def send_message(self, frames: Sequence[bytes], *, droppable: bool = False) -> SendResult | None:
        """Send a message, or have it sent with what is gathered (None); once the peer is known."""
        octets = self.zmtp.octets_of(frames)
        if self._gathered is not None and not droppable:
            self._gather(octets)
            return None
        self._flush()  # nothing overtakes, or its nonce would come too early
        return self.connection.sender.send(octets, MessageClass.DATA, droppable=droppable)

    def opened(self) -> None:
        self.connection.set_timer(self.connection.now() + HANDSHAKE_S)
        self.zmtp.begin()

    def close_after_flush(self, details: str = "") -> None:
        self._flush()
        super().close_after_flush(details)

    def received(self, data: memoryview) -> InputResult:
        connection, zmtp, was_open = self.connection, self.zmtp, self.zmtp.open
        self._gathered = []
        try:
            taken = zmtp.receive(data, connection.now())
        except RefusedError as error:
            self._flush()
            if error.told:
                connection.close_after_flush("not let in", reason=CloseReason.AUTH_REFUSED)
            # Who is told nothing has the rest of the time for a handshake, unheard, and comes again after that.
            return InputResult(InputVerdict.BLOCK)
        finally:
            gathered, self._gathered = self._gathered, None
            self._send_gathered(gathered)
            if zmtp.open and not was_open:
                zmtp.asked_at = connection.now()
                self._look()
        if connection.ended is not None:
            return InputResult(InputVerdict.BLOCK)
        if taken < len(data) and connection.turn_over():
            connection.receiver.trigger_input()
            return InputResult(InputVerdict.BLOCK, taken)
        return InputResult(InputVerdict.NEED_MORE, taken) if taken < len(data) else DONE

    def timer(self, now: float) -> None:
        if not self.zmtp.open:
            raise LimitExceededError("handshake_time_s", now - self.connection.opened_at, HANDSHAKE_S)
        if self.connection.receiver.paused:  # whom we do not hear is not silent
            self.zmtp.heard_at = now
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
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._send_gathered(gathered)

    def _send_gathered(self, gathered: list[bytes]) -> None:
        self._gathered_bytes = 0
        if gathered:
            self.connection.sender.send(b"".join(gathered), MessageClass.DATA, droppable=False)
