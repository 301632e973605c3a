"""A session: what an application does with one connection. This is the class to derive a server from."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from flowctl.errors import LimitExceededError
from flowctl.flow.ledger import LedgerEntry
from flowctl.flow.state import MessageClass, SendState, StateChange
from flowctl.outgoing.streamlog import Wire
from flowctl.reasons import CloseReason
from flowctl.receiver import InputResult
from flowctl.sending.types import SendResult

if TYPE_CHECKING:
    from flowctl.connection import Connection


class Session:
    """One peer of a server. Derive from it and override what is needed; each method may be a coroutine function.

    Methods run on the thread of the connection's poll group, so they need no lock between them; the exception is
    `send_state_changed`. While a coroutine of `opened` or `received` runs, input is not read: a slow handler slows its
    peer down instead of filling memory. While any coroutine runs, the connection stays on its thread; it is cancelled
    when the connection ends. What a handler raises, be it no `Exception`
    (CancelledError, SystemExit), is reported and ends this connection with reason INTERNAL, and nothing else; so does a
    coroutine that somebody else cancels. A `RemoteProtocolError` ends it as the peer's fault, without a report.

    Attributes:
        connection: set before `opened` is called.
    """

    __slots__ = ("connection",)

    connection: Connection

    def opened(self) -> Awaitable[None] | None:
        """The connection is there; the first call."""

    def received(self, data: memoryview) -> Awaitable[int | None] | InputResult | int | None:
        """Take input.

        Args:
            data: everything not consumed yet, oldest first. Valid during the call; a coroutine gets a copy.

        Returns:
            The number of bytes consumed: the rest is offered again together with what comes next. None: all of it.
            An `InputResult` says it in full.
        """

    def received_control(self, data: memoryview) -> InputResult | int | None:
        """Take input while output is overloaded; only protocol control may be acted upon. Not a coroutine.

        Called instead of `received` while the application has paused input with a grant for control. The default
        leaves everything for `received`: once the Receiver's buffer is full, no more is read until input is resumed.
        """
        del data
        return 0

    def input_resumed(self) -> None:
        """Go on with what the session itself has set aside: input was triggered or resumed and none is kept."""

    def peer_ended(self) -> bool:
        """Decide what the end of the peer's stream means; return True to go on sending, False (default) to close."""
        return False

    def behaves(self) -> bool:
        """Return whether a ban of its address leaves this open connection alone. Any thread.

        What breaks a limit is ended for that, so the default is True: a ban keeps newcomers out, and who is in stays.
        Return False for what has not begun to take part yet, or to have bans end all connections.
        """
        return True

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Note an edge of the Sender's state. Under the Sender's lock: see `flowctl.Frontend`."""

    def ledger_entry(self, entry: LedgerEntry) -> None:
        """Note a change of state, an episode of drops, a pause or the close, soon after it happened."""

    def work_exceeded(self, error: LimitExceededError, *, ends: bool) -> None:
        """The peer takes more of the thread than `WorkLimits` allow: its input is slowed down.

        Args:
            error: names the limit, the share of the thread that was measured, and the one allowed.
            ends: it has gone on for so long that the connection is being ended.
        """

    def timer(self, now: float) -> None:
        """Do what was asked for with `Connection.set_timer`."""

    def closed(self, reason: CloseReason, details: str) -> Awaitable[None] | None:
        """The connection is over, and why; the last call, exactly once."""

    def send(
        self, data: Wire, message_class: MessageClass = MessageClass.DATA, *, droppable: bool | None = None
    ) -> SendResult:
        """Send one message; shorthand for ``connection.sender.send``. Any thread.

        Args:
            data: the message as it goes to the socket, not empty; what is no `bytes` is copied.
            message_class: what it is to the drop policy.
            droppable: whether the policy may drop it. None: all classes but CONTROL and HEADER; see `Sender.send` for
                frames.
        """
        return self.connection.sender.send(data, message_class, droppable=droppable)

    def close(self, details: str = "") -> None:
        """End the connection now, dropping what is queued; shorthand for ``connection.close``. Any thread."""
        self.connection.close(CloseReason.KICKED, details)

    def close_after_flush(self, details: str = "") -> None:
        """Send what is queued, then end; shorthand for ``connection.close_after_flush``. Any thread."""
        self.connection.close_after_flush(details)
