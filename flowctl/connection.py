"""A connection: a socket, its Receiver and its Sender on a poll group; and the session, the application's end of it.

A session is told what happens on its connection, and asks it for what it wants: the two know each other, so they stand
together. `Session` is the class to derive a server from. What the framework itself calls of a connection, and how that
lives and ends, is in `flowctl.core.connecting`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, Final

from flowctl.core.connecting.core import ConnectionCore
from flowctl.core.connecting.host import ConnectionHost
from flowctl.core.connecting.secure import SecureCore
from flowctl.core.fanout.following import FollowPlace
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.limits import NO_LIMITS, Limits
from flowctl.core.flow.policy import DropPolicy
from flowctl.core.flow.renditionbook import RenditionBook
from flowctl.core.flow.state import MessageClass, SendState, StateChange
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.loop.tls import TlsSocket
from flowctl.core.loop.work import NO_WORK_LIMITS, WorkLimits
from flowctl.core.outgoing.streamlog import Wire
from flowctl.core.sending.contract import SendResult
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import ClosedError, LimitExceededError, ReentryError
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.receiver import DEFAULT_CAPACITY_BYTES, InputResult
from flowctl.sender import Sender


class Session:
    """One peer of a server. Derive from it and override what is needed; each method may be a coroutine function.

    Methods run on the thread of the connection's poll group, so they need no lock between them; the exception is
    `send_state_changed`. While a coroutine of `opened` or `received` runs, input is not read: a slow handler slows its
    peer down instead of filling memory. While any coroutine runs, the connection stays on its thread; it is cancelled
    when the connection ends. What a handler raises, be it no `Exception` (CancelledError, SystemExit), is reported and
    ends this connection with reason INTERNAL, and nothing else; so does a coroutine that somebody else cancels. A
    `RemoteProtocolError` ends it as the peer's fault, without a report.

    Attributes:
        connection: set before `opened` is called.
        pinned: whether the connection stays on the thread where it began; set it where a session shares state with what
            else lives there.
        user_agent: what the peer calls itself; empty: it does not say.
        harmless: whether a connection that ends so says nothing against its peer.
    """

    __slots__ = ("connection",)

    connection: Connection
    # What speaks a protocol for it, is called in its place, and calls it; a name that no subclass has by chance.
    __protocol__: Session | None = None
    # What is said where admission refuses a connection: too many are there; its address is banned. Empty: nothing.
    __refusals__: ClassVar[tuple[bytes, bytes]] = (b"", b"")
    pinned: ClassVar[bool] = False
    user_agent: str = ""
    harmless: bool = False

    def __accepted_at__(self, address: tuple[str, int]) -> None:
        """Note the address of ours that the connection was accepted at, before it is `opened`."""

    @property
    def asked_count(self) -> tuple[int, int] | None:
        """Commands and control messages that the peer has sent, where these count. None: they do not. Any thread."""
        return None

    def record_columns(self, now: float) -> dict[str, Any]:
        """Return what the session adds to the record of its connection, by column. Any thread."""
        del now
        return {}

    @property
    def protocol(self) -> str:
        """What the peer speaks, such as ``rtmp``, for lists of connections. Any thread."""
        return ""

    @property
    def role(self) -> str:
        """What the peer does, such as ``viewer``; empty: nothing yet. Any thread."""
        return ""

    @property
    def is_node(self) -> bool:
        """Whether the peer is another server, whose own peers are counted there. Any thread."""
        return False

    def streams(self) -> list[str]:
        """Return the names of the streams in which the peer takes part. Any thread."""
        return []

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

    @property
    def gives_back(self) -> float:
        """How much of what its connection took of its address's rate of new ones it gives back at its end."""
        return 0.0

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Note an edge of the Sender's state. Under the Sender's lock: see `flowctl.Frontend`."""

    def ledger_entry(self, entry: LedgerEntry) -> None:
        """Note a change of state, an episode of drops, a pause or the close, soon after it happened."""

    def work_exceeded(self, error: LimitExceededError, *, ends: bool) -> None:
        """The peer takes more of the thread than `WorkLimits` allow, or at a rate that is not allowed: it is slowed.

        Args:
            error: names the limit, what was measured, such as the share of the thread, and what is allowed.
            ends: it has gone on for so long that the connection is being ended.
        """

    def timer(self, now: float) -> None:
        """Do what was asked for with `Connection.set_timer`."""

    def last_words(self, reason: CloseReason, details: str) -> bytes:
        """Return what the peer is still told at the end, behind a message it has begun to get. Default: nothing.

        It is called before `closed`. What is queued is dropped for `reason` all the same, and a peer that has words to
        get is not reset at once: it has the time in which a socket lingers to take them, up to 30 s while it takes
        something, and `close_deadline_s` of its Sender where it does not.
        """
        del reason, details
        return b""

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


_ENDED_SESSION: Final = Session()
"""Session of a connection that is over."""


class Connection:
    """One peer's connection. It lives on one poll group at a time: see `live_on`.

    Args:
        sock: connected stream socket; owned by the connection from now on.
        session: the application's end.
        limits: of the Sender.
        policy: of the Sender.
        settings: of the Sender.
        deferred: of the Sender.
        options: set on the socket.
        capacity_bytes: most input kept for a session that needs more to go on.
        clock: monotonic seconds; the clock of the poll groups.
        peer: address and port of the other end. None: ask the socket, which no longer knows if the peer has gone.
        on_closed: told with the connection, on its thread, after the session: for a list of connections.
        on_released: told with the connection, on its thread, when its socket is closed: for a count of sockets.
        make_sender: makes its Sender, arguments as of `Sender`; for one that is recorded.
        work_limits: how much of the thread its input may take.
        first_input: what another has read from the socket already.

    Attributes:
        number: no other connection of the server has it.
        peer: address and port of the other end.
        now: returns the time in seconds, on the clock of the poll groups.
        opened_at: when it was made, in such seconds.
        work: how much work the peer has caused so far.
        sender: what is sent to the peer goes through it.
        receiver: reads what the peer sends, and hands it to the session.
        place: where it follows a stream log; kept by that. None: it follows none.
        renditions: what it followed of sets, kept by them. None: nothing.
        core: what the framework calls of it, and no application: see `flowctl.core.connecting`.
    """

    __slots__ = ("core", "now", "number", "opened_at", "peer", "place", "receiver", "renditions", "sender", "work")

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        *,
        limits: Limits = NO_LIMITS,
        policy: DropPolicy | None = None,
        settings: SenderSettings | None = None,
        deferred: bool = True,
        options: SocketOptions | None = None,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        clock: Callable[[], float] = time.monotonic,
        peer: tuple[str, int] | None = None,
        on_closed: Callable[[Connection], None] | None = None,
        on_released: Callable[[Connection], None] | None = None,
        make_sender: Callable[..., Sender] = Sender,
        work_limits: WorkLimits = NO_WORK_LIMITS,
        first_input: bytes = b"",
    ) -> None:
        handler = session.__protocol__ or session
        make_core = ConnectionCore if TlsSocket.of(sock) is None else SecureCore
        options = options or SocketOptions()
        self.now: Final = clock
        self.place: FollowPlace | None = None
        self.renditions: RenditionBook | None = None
        self.core: Final = make_core(
            self, sock, session, handler, options, clock, peer, work_limits, on_closed, on_released
        )
        self.number: Final = self.core.host.number
        self.peer: Final = self.core.host.peer
        self.opened_at: Final = self.core.opened_at
        self.work: Final = self.core.work
        handler.connection = session.connection = self
        self.sender: Final = make_sender(
            self.core.host, sock, limits=limits, policy=policy, frontend=self.core, settings=settings, deferred=deferred
        )
        self.receiver: Final = self.core.serve(self.sender, capacity_bytes, first_input)

    # -- life

    def live_on(self, group: PollGroup) -> None:
        """Begin to live on `group`: its thread calls the session's `opened`, soon. Any thread, once.

        Raises:
            ClosedError: the group is stopping.
        """
        group.add_pollable(self.core, self.core.host.registration)

    def close(self, reason: CloseReason = CloseReason.KICKED, details: str = "") -> None:
        """End the connection soon, dropping what is queued. Any thread; the first reason counts."""
        self.core.terminate(reason, details)

    def close_after_flush(self, details: str = "", *, reason: CloseReason = CloseReason.FINISHED) -> None:
        """Send what is queued, then end with `reason`; give up after the Sender's close deadline. Any thread."""
        self.core.close_after_flush(reason, details)

    @property
    def ended(self) -> tuple[CloseReason, str] | None:
        """Why the connection ended, or is about to. None: it is open."""
        return self.core.ending

    @property
    def group(self) -> PollGroup | None:
        """Where it lives. None: on no group yet, on the way between two, or it is over."""
        return self.core.group

    # -- output

    @property
    def writable(self) -> bool:
        """Whether all that was sent to this peer alone has been taken by the kernel. Any thread; see `drained`."""
        return self.sender.drained

    def when_drained(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call on the connection's own thread once all that was sent to this peer alone has been taken. Any thread.

        For sending more than a peer should have queued: send a part, and the next one when this is called. It is called
        once; never, where the connection ends before.
        """
        self.sender.when_drained(lambda taken: taken and self.call_soon(callback, *args))

    async def drained(self) -> None:
        """Wait until all that was sent to this peer alone has been taken by the kernel. Any thread with a loop.

        It always gives the loop a turn, so that a coroutine that sends to a fast peer leaves others their time. What is
        read from a followed stream log is not waited for. How long a peer may take is for the Sender's times to say
        (`stuck_s`, and the age of what waits).

        Raises:
            ClosedError: the connection ended, and something that was sent is lost.
        """
        loop, thread = asyncio.get_running_loop(), get_ident()
        outcome: asyncio.Future[bool] = loop.create_future()

        def set_outcome(taken: bool) -> None:  # noqa: FBT001 - what a waiter of a Sender is given
            if not outcome.done():
                outcome.set_result(taken)

        def wake(taken: bool) -> None:  # noqa: FBT001 - as above
            if get_ident() == thread:
                set_outcome(taken)  # at once: before the end of the connection cancels its coroutines
            else:
                with suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
                    loop.call_soon_threadsafe(set_outcome, taken)

        self.sender.when_drained(wake)
        try:
            await asyncio.sleep(0)
            taken = await outcome
        finally:
            self.sender.forget_drained(wake)
        if not taken:
            reason, details = self.ended or (CloseReason.INTERNAL, "its Sender has ended")
            raise ClosedError(
                f"{self} ended before all that was sent was taken: {reason.value}: {details}",
                hint="there is nobody left to send to",
            )

    # -- input

    def pause_input(self, owner: Hashable, reason: str, *, control_bytes: int = 0) -> bool:
        """Hold input on behalf of `owner` and enter it in the ledger; as `Receiver.pause`. Any thread.

        Allowed from `send_state_changed`. What `Receiver.pause` is called for directly is counted, but not in the
        ledger.

        Returns:
            True if `owner` did not hold input before.
        """
        if not self.receiver.pause(owner, reason, control_bytes=control_bytes):
            return False
        self._note(LedgerKind.PAUSE, f"input paused: {reason}")
        return True

    def resume_input(self, owner: Hashable) -> bool:
        """End the hold of `owner` and enter it in the ledger; as `Receiver.resume`. Any thread.

        Returns:
            True if `owner` held input.
        """
        hold = self.receiver.resume(owner)
        if hold is None:
            return False
        self._note(LedgerKind.RESUME, f"input resumed: {hold.reason}", duration_s=self.now() - hold.since)
        return True

    def _note(self, kind: LedgerKind, why: str, *, duration_s: float = 0.0) -> None:
        """Add an entry to the ledger; on the connection's own thread where another Sender's handler asks for it."""
        try:
            self.sender.note(kind, why, duration_s=duration_s)
        except ReentryError:
            self.call_soon(partial(self.sender.note, kind, why, duration_s=duration_s))

    def gather_input(self, wanted: bool) -> None:  # noqa: FBT001 - one argument, and the only one
        """Let input wait for up to 36 ms where its thread is busy with such input, or not. Owning thread.

        For peers that send small messages all the time and wait for no answer, as publishers do: what comes close
        together is then read, handled and passed on together, at a fraction of the cost.
        """
        self.core.gather_input(wanted)

    def turn_over(self) -> bool:
        """Return whether the session has had the thread for as long as one turn of input may take; owning thread.

        A session that has much to do with what it was given looks at it now and then, gives the thread back with
        `InputResult` BLOCK and the bytes it has consumed, and asks with `Receiver.trigger_input` to go on later.
        """
        group = self.core.group
        return group is None or self.now() >= group.work.turn_ends_at

    # -- its thread

    def set_timer(self, when: float | None) -> None:
        """Call the session's `timer` at `when`, instead of an earlier wish. None: not at all. Owning thread."""
        self.core.set_timer(when)

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> bool:
        """Call on the connection's own thread, soon and in order, also when it moves to another. Any thread.

        An exception of `callback` is reported and ends the connection, like that of a handler.

        Returns:
            False if the connection is over or about to end: it is not called then, nor if the end comes first.

        Raises:
            LocalProtocolError: 16384 calls wait. The peer has no part in it, and goes on being served.
        """
        return self.core.call_soon(callback, *args)

    def run_coroutine(
        self, coroutine: Coroutine[Any, Any, Any], where: str, then: Callable[[], object] | None = None
    ) -> None:
        """Run a coroutine of the session's, as those of its handlers are run. Owning thread.

        Args:
            coroutine: it is cancelled when the connection ends; what it raises ends the connection.
            where: what it is of, for the report of an exception.
            then: called on the connection's thread when it has ended well.
        """
        self.core.start(self.core.group, coroutine, where, then)

    # -- what it is

    @property
    def session(self) -> Session:
        """The application's end. Once the connection is over, a `Session` that does nothing."""
        session = self.core.session
        return session if isinstance(session, Session) else _ENDED_SESSION

    @property
    def secure(self) -> bool:
        """Whether it speaks TLS."""
        return isinstance(self.core, SecureCore)

    def window_bytes(self) -> int | None:
        """Return the room in the peer's receive buffer, as it last told; None: not known. Any thread."""
        line = self.core.host.line_figures()
        return None if line is None else line.window_bytes

    def delay_ms(self) -> float:
        """Return how far behind the peer is: the age of the oldest that it has not taken, here or in the kernel.

        See `flowctl.core.flow.meters`. Any thread.
        """
        return self.sender.sample_delay(self.core.host.kernel_bytes())

    def why(self) -> str:
        """Return the Sender's `why`, the rendition, and whether input is slowed as too much work. Any thread."""
        parts, now = [self.sender.why()], self.now()
        if self.renditions is not None and (words := self.renditions.describe(now)):
            parts.append(words)
        if self.work.slowed(now):
            parts.append(f"input slowed, it took {self.work.work_s:.3g} s of the thread's time")
        return "; ".join(parts)

    def __str__(self) -> str:
        """Return number and peer, for logs."""
        return self.core.describe()


def connection_of(sender: Sender) -> Connection | None:
    """Return the connection whose Sender it is. None: it is over, or there is none. Any thread."""
    host = sender.host
    owner: Connection | None = host.owner if isinstance(host, ConnectionHost) else None
    return owner
