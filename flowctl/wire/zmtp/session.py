"""A connection of ZMTP on a poll group: the peer of `peer.py` over the framework's own Connection and Sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from flowctl.connection import Session
from flowctl.core.flow.state import MessageClass, SendState
from flowctl.core.sending.contract import SendResult
from flowctl.errors import LimitExceededError
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.receiver import DONE, InputResult, InputVerdict
from flowctl.wire.zmtp.mechanism import Mechanism, RefusedError
from flowctl.wire.zmtp.peer import Heartbeat, ZmtpLimits, ZmtpPeer

HANDSHAKE_S: Final = 10.0
"""Time for greeting and handshake."""
_TURN_S: Final = 0.0005
"""Time for which the input of one connection may hold the thread: shorter than the turn of a connection of media, since
others wait for answers."""
_GATHERED_BYTES: Final = 32 * 1024
"""Octets that the handling of one piece of input may gather before they are sent: more saves no system call."""


class ZmtpSession(Session):
    """One side of a connection; methods on its group's thread.

    What is sent while input is handled, or in one turn of the loop, is gathered, and goes out as one: a hundred
    requests, or their answers, take one system call. The first of a turn goes at once (``deferred=False``): it may be
    alone, and if not, the peer begins while others are made; unless the thread knows that more come (`many_follow`).

    Args:
        mechanism: how the peer is got to know.
        message: called with the parts of each message.
        known: called once the handshake is over.
        gone: called at the end with its reason, also where there was no handshake.
        limits: of messages.
        heartbeat: None: a silent peer is not asked.
    """

    __slots__ = ("_gathered", "_gathered_bytes", "_gone", "_turn_ends", "_turn_ends_at", "_unfinished_bytes", "zmtp")
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
            stops=self._turn_over,
            behind=lambda: not self.connection.sender.drained,
        )
        self._gone: Final = gone
        self._gathered: list[bytes] | None = None  # while input is handled, or until the turn of the loop ends
        self._gathered_bytes = self._unfinished_bytes = 0
        self._turn_ends = False  # that is to be told
        self._turn_ends_at = 0.0  # of the handling of input

    @property
    def protocol(self) -> str:
        return "zmtp"

    def send_message(self, frames: Sequence[bytes], *, droppable: bool = False) -> SendResult | None:
        """Send a message, or have it sent with what is gathered (None); once the peer is known."""
        octets, sender = self.zmtp.octets_of(frames), self.connection.sender
        group, gathers = self.connection.group, self._gathered is not None
        if not gathers and group is not None:
            gathers = group.many_follow
            self._gather_rest(group)
        if gathers and not droppable and sender.state is SendState.READY and len(octets) < _GATHERED_BYTES:
            self._gather(octets)
            return None
        self._flush()  # nothing overtakes, or its nonce would come too early
        return sender.send(octets, MessageClass.DATA, droppable=droppable)

    @property
    def drained(self) -> bool:
        """Whether nothing that was sent waits for the kernel."""
        return self.connection.sender.drained

    def when_drained(self, callback: Callable[[bool], object]) -> None:
        """Call once nothing waits (True), or the Sender has ended (False); see `Sender.when_drained`."""
        self._flush()
        self.connection.sender.when_drained(callback)

    def opened(self) -> None:
        self.connection.set_timer(self.connection.now() + HANDSHAKE_S)
        self.zmtp.begin()

    def close(self, details: str = "") -> None:
        self._flush()  # the kernel may take it still
        super().close(details)

    def close_after_flush(self, details: str = "") -> None:
        self._flush()
        super().close_after_flush(details)

    def received(self, data: memoryview) -> InputResult:
        connection, zmtp, was_open = self.connection, self.zmtp, self.zmtp.open
        self._gathered = self._gathered or []
        self._turn_ends_at = connection.now() + _TURN_S
        try:
            taken = zmtp.receive(data, connection.now())
            if zmtp.unfinished_bytes != self._unfinished_bytes:
                self._unfinished_bytes = zmtp.unfinished_bytes
                self.unfinished_changed(self._unfinished_bytes)
        except RefusedError as error:
            self._flush()
            if error.told:
                connection.close_after_flush("not let in", reason=CloseReason.AUTH_REFUSED)
            # Who is told nothing has the rest of the time for a handshake, unheard, and comes again after that.
            return InputResult(InputVerdict.BLOCK)
        finally:
            self._end_gathering()
            if zmtp.open and not was_open:
                zmtp.asked_at = connection.now()
                self._look()
        if connection.ended is not None:
            return InputResult(InputVerdict.BLOCK)
        if taken < len(data) and self._turn_over():
            connection.receiver.trigger_input()
            return InputResult(InputVerdict.BLOCK, taken)
        return InputResult(InputVerdict.NEED_MORE, taken) if taken < len(data) else DONE

    def unfinished_changed(self, size_bytes: int) -> None:
        """Note how much is kept of a message that has not come wholly; for subclasses."""

    def timer(self, now: float) -> None:
        if not self.zmtp.open:
            raise LimitExceededError("handshake_time_s", now - self.connection.opened_at, HANDSHAKE_S)
        if self.connection.receiver.paused:  # whom we do not hear is not silent
            self.zmtp.heard_at = now
        self._look()

    def closed(self, reason: CloseReason, details: str) -> None:
        self.unfinished_changed(0)
        self._gone(reason, details)

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _turn_over(self) -> bool:
        connection = self.connection
        return connection.ended is not None or connection.now() >= self._turn_ends_at

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

    def _gather_rest(self, group: PollGroup) -> None:
        """Gather what is sent in the rest of this turn of the loop."""
        self._gathered = []
        if not self._turn_ends:
            self._turn_ends = True
            group.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_ends = False
        self._end_gathering()

    def _end_gathering(self) -> None:
        gathered, self._gathered = self._gathered, None
        self._send_gathered(gathered)

    def _flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._send_gathered(gathered)

    def _send_gathered(self, gathered: list[bytes] | None) -> None:
        self._gathered_bytes = 0
        if gathered:
            self.connection.sender.send(b"".join(gathered), MessageClass.DATA, droppable=False)
