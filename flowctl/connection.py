"""A connection: a socket, its Receiver and its Sender on a poll group; and the session, the application's end of it.

A session is told what happens on its connection, and asks it for what it wants: the two know each other, so they stand
together. `Session` is the class to derive a server from.

The connection is the only glue between sockets and the rest. It is the Sender's host (flush requests, deadlines,
writability become jobs, deadlines and watches of its group) and the Receiver's reader. Everything of it runs on the
thread of its group, which may change (`PollGroup.migrate`): the Sender then leaves the fan-out of the old thread and
enters that of the new one at the same byte. What other threads want is therefore always a job of the registration,
which moves along, and never a call posted to a group.

How it ends: any code that finds a reason calls `terminate`; the first reason counts. A job on the owning thread
then closes Sender and Receiver and calls the session's `closed` exactly once. The socket is reset where the peer does
not read, or the kernel would keep its buffers for minutes; otherwise it lingers, until the peer has ended too
(`flowctl.core.loop.lingering`), and that long the connection stays on its group.

A peer may leave while nothing of it is read. A reset ends the connection at once. The end of its stream is what the
session decides upon when it has taken all that came before; but where somebody holds input, it is taken as a sign that
the peer has left, unless it goes on taking what it is sent, or a coroutine of the session still works for it.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, Final

from flowctl.core.fanout.following import FollowPlace
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.limits import NO_LIMITS, Limits
from flowctl.core.flow.policy import DropPolicy
from flowctl.core.flow.renditionbook import RenditionBook
from flowctl.core.flow.sharedstall import StallSpan
from flowctl.core.flow.state import MessageClass, SendState, StateChange
from flowctl.core.loop.coroutines import Coroutines
from flowctl.core.loop.faults import as_exception, log_error, report
from flowctl.core.loop.jobs import Purpose
from flowctl.core.loop.lingering import Lingering, Part, write_parts
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.loop.sockets import (
    LineFigures,
    SocketOptions,
    acknowledge,
    close_socket,
    drop_socket,
    end_output,
    limit_received,
    limit_unsent,
    line_figures,
    peer_name,
    unacknowledged_bytes,
)
from flowctl.core.loop.tls import HANDSHAKE_S, TlsSocket
from flowctl.core.loop.work import NO_WORK_LIMITS, TURN_S, Overrun, WorkAccount, WorkLimits
from flowctl.core.outgoing.streamlog import Wire
from flowctl.core.sending.contract import SendResult
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.text.addresses import address_key, join_host_port
from flowctl.deferred import Registration
from flowctl.errors import (
    BrokenError,
    ClosedError,
    FlowctlError,
    InternalError,
    LimitExceededError,
    LocalProtocolError,
    ReentryError,
    RemoteProtocolError,
)
from flowctl.pollgroup import GroupState, PollGroup
from flowctl.reasons import CloseReason
from flowctl.receiver import ALL, BLOCK, DEFAULT_CAPACITY_BYTES, DONE, NEED_MORE, InputResult, InputVerdict, Receiver
from flowctl.sender import Sender

_numbers = itertools.count(1)
"""Numbers of connections; see `number_from`."""
_NEVER: Final = float("inf")
_OPENING: Final = object()
"""Owner of the hold while `opened` runs: unequal to any value of the application's."""
_CLOSE: Final = Purpose("close")
_LEDGER: Final = Purpose("ledger")
_DEADLINE: Final = Purpose("deadline")
_CALLS: Final = Purpose("calls")
_SECURE: Final = Purpose("TLS output")
_SECURE_INPUT: Final = Purpose("TLS input")
_SLOWED: Final = object()
"""Owner of the hold while the peer has used up its share of the thread, or its rate."""
HELD_END_S: Final = 5.0
"""Time for which held input is still worked on after its peer has ended its stream: what has come may fill the kernel's
buffer, megabytes, and be let in slowly; long enough for all that a peer says in good faith and then half-closes."""
_SLOWED_END_S: Final = 0.5
"""Time for the held input of a slowed peer after its end: it sent more than it may, and takes nothing any more."""
_HELD_LOOK_S: Final = 0.5
"""Time to the next look where input happened not to be held."""
_LATE_S: Final = 0.25
"""Delay of a timer from which our own thread was late: what the peer has sent meanwhile is read before it."""
_EXPLAINED: Final = frozenset(
    {CloseReason.PROTOCOL_ERROR, CloseReason.LIMIT_HIT, CloseReason.HANDSHAKE_TIMEOUT, CloseReason.IDLE}
)
"""Close reasons for which the session has usually queued an answer that says what was wrong."""
_IDLE_LIMITS: Final = frozenset({"first_command_s", "first_media_s", "media_silence_s", "ping_silence_s"})
"""Limits that say that a peer does nothing, rather than too much."""
INPUT_BYTES_PER_VIEWER_S: Final = 28_000
"""Input, in bytes per second, that is as much work as serving one viewer. Measured: receiving and publishing 10 Mbit/s
takes 1.24 % of a core, a viewer 0.027 %; so such a publisher weighs like 45 viewers."""
_LEAST_MEAN_S: Final = 1.0
"""Shortest time over which a rate is taken: a handshake is no stream."""
MAX_CALLS: Final = 16 * 1024
"""Most calls that wait for a connection's thread, a few megabytes: seconds in which a neighbour's handler blocks it."""


def number_from(first: int) -> None:
    """Give connections numbers from `first` on, so that several processes that are one server share none.

    Before the first connection is made.
    """
    global _numbers  # noqa: PLW0603 - of the process, as the connections are
    _numbers = itertools.count(first)


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
        """The peer takes more of the thread than `WorkLimits` allow, or than `Connection.slow` was told: it is slowed.

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
    """One peer's connection; a pollable.

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
        work: how much work the peer has caused so far.
    """

    __slots__ = (
        "_calls",
        "_coroutines",
        "_ending",
        "_farewell",
        "_flush_job",
        "_gathers",
        "_handler",
        "_held_end",
        "_holds",
        "_home",
        "_lingering",
        "_lock",
        "_notsent_lowat_bytes",
        "_on_closed",
        "_on_released",
        "_opened",
        "_over",
        "_protocol_due",
        "_received_later",
        "_receiving",
        "_secure",
        "_sender_due",
        "_slowed_until",
        "_sock",
        "_timer_due",
        "_wished_due",
        "clock",
        "group",
        "number",
        "opened_at",
        "peer",
        "place",
        "receiver",
        "registration",
        "renditions",
        "sender",
        "session",
        "work",
    )

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
        options = options or SocketOptions()
        options.apply(sock)
        self._notsent_lowat_bytes = options.notsent_lowat_bytes
        self._sock = sock
        self._secure = TlsSocket.of(sock)  # the same socket, where it speaks TLS
        # Shared with Registration and Receiver: it is held for a few assignments at a time, and a lock is 110 bytes.
        self._lock = OwnedLock()
        self.number: Final = next(_numbers)
        self.peer: Final = peer or peer_name(sock)
        self.clock: Final = clock
        self.session: Session = session  # `_ENDED_SESSION` once it is over: the session holds its connection
        self._handler: Session = session.__protocol__ or session  # who is called about octets and the end; likewise
        self.group: PollGroup | None = None  # where it lives; None on the way between two groups
        self._home: PollGroup | None = None  # where it lived last, to report to
        self.place: FollowPlace | None = None  # where it follows a log; kept by flowctl.core.fanout.following
        self.renditions: RenditionBook | None = None  # what it followed of sets; kept by flowctl.streamset
        self.opened_at: Final = clock()
        self.work: Final = WorkAccount(work_limits, self.opened_at)
        self.registration: Final = Registration(self._lock)
        self._flush_job: Final = self.registration.job(self._flush, "flush")
        # What the one deadline of the group stands for.
        self._sender_due = self._timer_due = self._protocol_due = self._slowed_until = _NEVER
        self._opened = False
        self._over = False  # the end has begun: everything is being taken down, once
        self._lingering: Lingering | None = None  # the socket waits for the peer's end; all else is over
        # When to look again at a peer that ended its stream while input is held, what it had taken by then, and whether
        # it is slowed down.
        self._held_end: tuple[float, int, bool] | None = None
        self._wished_due = _NEVER  # a deadline that another thread asked for; guarded by _lock
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] | None = None  # guarded by _lock
        self._holds: dict[Hashable, tuple[str, float]] | None = None  # who paused input, since; guarded by _lock
        self._ending: tuple[CloseReason, str] | None = None  # the first reason; guarded by _lock
        self._farewell: tuple[CloseReason, str] | None = None  # of close_after_flush; guarded by _lock
        self._on_closed = on_closed
        self._on_released = on_released
        self._coroutines: Coroutines | None = None  # made by the first; most sessions have none
        self._gathers = False  # input may wait a little
        self._receiving = False  # a coroutine of `received` runs
        self._received_later: Final = inspect.iscoroutinefunction(self._handler.received)
        self._handler.connection = session.connection = self
        if self._secure is not None:
            if not self._secure.established:
                self._secure.handshake_by = self.opened_at + HANDSHAKE_S
            self._secure.on_kept = self._secure_kept
        self.sender: Final = make_sender(
            self, sock, limits=limits, policy=policy, frontend=self, settings=settings, deferred=deferred
        )
        self.receiver: Final = Receiver(
            self.registration,
            self,
            sock.recv_into if self._secure is None else partial(self._read_secure, self._secure),
            capacity_bytes=capacity_bytes,
            clock=clock,
            lock=self._lock,
            first_input=first_input,
        )

    # -- life

    def close(self, reason: CloseReason = CloseReason.KICKED, details: str = "") -> None:
        """End the connection soon, dropping what is queued. Any thread; the first reason counts."""
        self.terminate(reason, details)

    def close_after_flush(self, details: str = "", *, reason: CloseReason = CloseReason.FINISHED) -> None:
        """Send what is queued, then end with `reason`; give up after the Sender's close deadline. Any thread."""
        with self._lock:
            first = self._farewell is None
            if first:
                self._farewell = (reason, details)
        try:
            self.sender.close_after_flush()
        except ReentryError:
            with self._lock:
                self._farewell = None if first else self._farewell
            raise

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
                f"{self.describe()} ended before all that was sent was taken: {reason.value}: {details}",
                hint="there is nobody left to send to",
            )

    def terminate(self, reason: CloseReason, details: str) -> None:
        """Do what `close` does; the Sender calls it too."""
        with self._lock:
            if self._ending is not None:
                return
            if reason is CloseReason.FINISHED and self._farewell is not None:
                reason, details = self._farewell
            self._ending = (reason, details)
        self.registration.run_soon(self._finish, _CLOSE)

    def abandon(self, details: str) -> None:
        """End a connection that is on no group and that no group will take again: its groups have stopped."""
        if self.group is None:
            self.terminate(CloseReason.SHUTDOWN, details)
            self._finish()

    def leave_to_parent(self) -> None:
        """Close this process's copy of the socket, in a forked child: the connection is the parent's."""
        drop_socket(self._sock)

    @property
    def secure(self) -> bool:
        """Whether it speaks TLS."""
        return self._secure is not None

    @property
    def ended(self) -> tuple[CloseReason, str] | None:
        """Why the connection ended, or is about to. None: it is open."""
        return self._ending

    def attached(self, group: PollGroup) -> None:
        """Begin to live on `group`; called by the group."""
        self.group = self._home = group
        group.work.enter(self.work, address_key(self.peer[0]), self.clock())
        try:
            self.receiver.attached(group)
            if not self.receiver.reading:
                self.reading_changed(False)
            if self.place is not None:
                self.place.enter(group)
        except BaseException as error:  # noqa: BLE001 - the group would drop the connection without closing it
            self._handler_failed("attaching", error)
            return
        self._arm()
        if not self._opened:
            self._opened = True
            self._call_session(group, self._handler.opened, "opened")
            if self._secure is not None and not self._secure.server_side:
                self._secure_input()  # the client speaks first
        if self.sender.blocked:
            self.want_writable(True)
        elif self._secure is not None:
            self._watch_secure()

    def detached(self, group: PollGroup) -> None:
        """Stop living on `group`; called by the group."""
        if self.place is not None:
            self.place.leave()
        group.work.leave(self.work, address_key(self.peer[0]), self.clock())
        if self._over:
            self.group = None
            if self._lingering is not None:
                self._lingering.stop()
                self._release(reset=False)
            return
        self.receiver.detached()
        group.unwatch_input(self._sock)
        group.unwatch_output(self._sock)
        group.deadlines.remove(self)
        if group.state is not GroupState.RUNNING:
            self.terminate(CloseReason.SHUTDOWN, f"poll group {group.name} stopped")
            self._finish()
        self.group = None

    def _finish(self) -> None:
        """The one place where a connection ends, on its thread; nothing in here may keep the rest from happening."""
        if self._over or self._ending is None:
            return
        self._over = True
        reason, details = self._ending
        group = self.group
        abortive = reason.abortive
        if reason in _EXPLAINED:
            self._run_guarded("flush", self.sender.flush)  # the answer that says what was wrong, as far as it goes
        if reason in _EXPLAINED or reason is CloseReason.PEER_CLOSED:
            # A peer that does not read does not read the reason either, nor the end of the stream behind it.
            abortive = abortive or self.sender.state is not SendState.READY
        words = self._last_words(reason, details)
        self._run_guarded("close", self.sender.close, reason, details)
        unsaid: list[Part] = []
        if words:
            unsaid, abortive = self._say_last(words)
        self._run_guarded("ledger_entry", self._read_ledger)
        self._run_guarded("close", self.receiver.close)
        if self._coroutines is not None:
            self._coroutines.cancel()
        if self.place is not None:
            self._run_guarded("leaving the stream", self.place.leave)
        if group is not None:
            group.unwatch_input(self._sock)
            group.unwatch_output(self._sock)
            group.deadlines.remove(self)
        running = group is not None and group.state is GroupState.RUNNING
        if not abortive and group is not None and running and (unsaid or not end_output(self._sock)):
            self._run_guarded("lingering", self._linger, group, unsaid, bool(words))
        lingers = self._lingering is not None
        if not lingers:
            if group is not None:
                group.remove_pollable(self)
            close_socket(self._sock, abortive=abortive)
        self._call_session(group, self.session.closed, "closed", reason, details)
        self.registration.release()
        if self._on_closed is not None:
            self._run_guarded("on_closed", self._on_closed, self)
        if not lingers and self._on_released is not None:
            self._run_guarded("on_released", self._on_released, self)
        self._cut_references()

    def _cut_references(self) -> None:
        """Cut circles of references, so that an ended connection is freed at once and not by the garbage collector."""
        self.sender.let_go()
        self.receiver.let_go()
        self.session = self._handler = _ENDED_SESSION
        self.place = self._on_closed = None
        with self._lock:
            self._calls = None
        if self._coroutines is not None and self._coroutines.let_go():
            self._coroutines = None

    def _last_words(self, reason: CloseReason, details: str) -> bytes:
        if self._secure is not None and not self._secure.established:
            return b""  # they cannot be said
        try:
            return self._handler.last_words(reason, details)
        except BaseException as error:  # noqa: BLE001 - as for every step of the end
            self.handler_failed("last_words", error)
            return b""

    def _say_last(self, words: bytes) -> tuple[list[Part], bool]:
        """Write the rest of the message in flight, and `words`; return what is left, and whether it is broken."""
        parts: list[Part] = [part for part in (self.sender.unfinished, words) if part]
        try:
            write_parts(self._sock, parts)
        except OSError:
            return [], True
        return parts, False

    def _linger(self, group: PollGroup, unsaid: list[Part], told: bool) -> None:  # noqa: FBT001 - of `_finish`
        with self._lock:
            farewell = self._farewell
        # A peer that was to get all that was queued, or is told why, may pause as long before it takes the last of it.
        unread_s = self.sender.settings.close_deadline_s or _NEVER if farewell is not None or told else 0.0
        self._lingering = Lingering(self._sock, group, self._end_linger, unread_s, unsaid)

    def _end_linger(self, reset: bool) -> None:  # noqa: FBT001 - the signature of `Lingering`
        """End the lingering: the socket need not be kept any more."""
        group = self.group
        self._release(reset=reset)
        if group is not None:
            group.remove_pollable(self)

    def _release(self, *, reset: bool) -> None:
        self._lingering = None
        close_socket(self._sock, abortive=reset)
        if self._on_released is not None:
            self._run_guarded("on_released", self._on_released, self)

    @property
    def delivered(self) -> bool:
        """Whether the connection is over and the peer's kernel has all that it was sent. Any thread.

        Its end takes several steps on its own thread: between them the socket neither lingers nor is it closed.
        """
        lingering = self._lingering
        return self.fileno() == -1 or (lingering is not None and lingering.delivered)

    def _run_guarded(self, where: str, step: Callable[..., object], *args: Any) -> None:
        """Run a step of the end; whatever it raises, the other steps follow."""
        try:
            step(*args)
        except BaseException as error:  # noqa: BLE001 - a socket must not stay open for it, nor `closed` be left out
            self.handler_failed(where, error)

    # -- input: the Receiver's handler

    def pause_input(self, owner: Hashable, reason: str, *, control_bytes: int = 0) -> bool:
        """Hold input on behalf of `owner` and enter it in the ledger; as `Receiver.pause`. Any thread.

        Allowed from `send_state_changed`. What `Receiver.pause` is called for directly is counted, but not in the
        ledger.

        Returns:
            True if `owner` did not hold input before.
        """
        if not self.receiver.pause(owner, reason, control_bytes=control_bytes):
            return False
        with self._lock:
            if self._holds is None:
                self._holds = {}
            self._holds[owner] = (reason, self.clock())
        self._add_to_ledger(LedgerKind.PAUSE, f"input paused: {reason}")
        return True

    def resume_input(self, owner: Hashable) -> bool:
        """End the hold of `owner` and enter it in the ledger; as `Receiver.resume`. Any thread.

        Returns:
            True if `owner` held input.
        """
        if not self.receiver.resume(owner):
            return False
        with self._lock:
            reason, since = (self._holds or {}).pop(owner, ("", self.clock()))
            if not self._holds:
                self._holds = None
        self._add_to_ledger(LedgerKind.RESUME, f"input resumed: {reason}", duration_s=self.clock() - since)
        return True

    def _add_to_ledger(self, kind: LedgerKind, why: str, *, duration_s: float = 0.0) -> None:
        """Add an entry to the ledger; on the connection's own thread where another Sender's handler asks for it."""
        try:
            self.sender.note(kind, why, duration_s=duration_s)
        except ReentryError:
            self.call_soon(partial(self.sender.note, kind, why, duration_s=duration_s))

    def gather_input(self, wanted: bool) -> None:  # noqa: FBT001 - as `want_writable`
        """Let input wait for up to 36 ms where its thread is busy with such input, or not. Owning thread.

        For peers that send small messages all the time and wait for no answer, as publishers do: what comes close
        together is then read, handled and passed on together, at a fraction of the cost.
        """
        if wanted is not self._gathers:
            self._gathers = wanted
            if self.receiver.reading:
                self.reading_changed(True)

    def process_input(self, data: memoryview, *, control_only: bool) -> InputResult:
        """Hand input to the session, and charge the peer with the time that takes."""
        if self._ending is not None:
            return DONE
        if self._receiving:
            return InputResult(InputVerdict.BLOCK, 0)  # one at a time: its end triggers input
        if self.work.turn_over:
            self.receiver.trigger_input()  # at the tail, for the next turn of the loop
            return InputResult(InputVerdict.BLOCK, 0)
        began = self._begin_turn()
        try:
            result = self._hand_to_session(data, control_only=control_only)
        finally:
            took_s = self._charge(began)
        if took_s >= TURN_S and (
            result.verdict is InputVerdict.DONE
            or (result.verdict is InputVerdict.NEED_MORE and result.consumed_bytes in (ALL, len(data)))
        ):
            self.receiver.trigger_input()  # what has come meanwhile is for the next turn, however much it is
            return InputResult(InputVerdict.BLOCK, result.consumed_bytes)
        return result

    def _begin_turn(self) -> float:
        """Let a turn of the session's code on the peer's behalf begin; return the time."""
        now, group = self.clock(), self.group
        if group is not None:
            group.work.turn_ends_at = now + TURN_S
        return now

    def _charge(self, began: float) -> float:
        """Charge the peer with the work since `began`, slow or end the connection if that is too much; return the time.

        What is charged is processor time: on a machine that is busy with something else no peer pays for the waiting.
        """
        now, group = self.clock(), self.group
        share = 1.0 if group is None else group.processor_share()
        overrun = self.work.charge((now - began) * share, now)
        if overrun is not None and self.ended is None:
            self.slow(overrun, "work")
        return now - began

    def slow(self, overrun: Overrun, reason: str) -> None:
        """Read nothing more of a peer that takes more than it may until it may go on, or end it. Owning thread.

        Args:
            overrun: what it took too much of.
            reason: as of `Receiver.pause`.
        """
        if overrun.begins:
            limit_received(self._sock)
        if overrun.begins or overrun.ends:
            try:
                self.session.work_exceeded(overrun.error, ends=overrun.ends)
            except BaseException as error:  # noqa: BLE001 - as for every handler
                self._handler_failed("work_exceeded", error)
        if overrun.ends:
            self.terminate(CloseReason.LIMIT_HIT, str(overrun.error))
            return
        before = self._slowed_until
        self._slowed_until = overrun.resumes_at if before == _NEVER else max(before, overrun.resumes_at)
        self.receiver.pause(_SLOWED, reason)  # too often for the ledger
        if self._held_end is not None and not self._held_end[2]:
            self._held_end = (min(self._held_end[0], self.clock() + _SLOWED_END_S), self._held_end[1], True)
        self._arm()

    def acknowledge(self) -> None:
        """Have the kernel acknowledge at once what has come, and not with what is sent next. Owning thread.

        For as long as a peer says things one after the other: one that leaves Nagle's algorithm on, as FFmpeg and
        librtmp do, keeps back each small write until the one before is acknowledged, and the kernel takes 40 ms for
        that where no answer is due.
        """
        acknowledge(self._sock)

    def turn_over(self) -> bool:
        """Return whether the session has had the thread for as long as one turn of input may take; owning thread.

        A session that has much to do with what it was given looks at it now and then, gives the thread back with
        `InputResult` BLOCK and the bytes it has consumed, and asks with `Receiver.trigger_input` to go on later.
        """
        group = self.group
        return group is None or self.clock() >= group.work.turn_ends_at

    def _hand_to_session(self, data: memoryview, *, control_only: bool) -> InputResult:
        session, size = self._handler, len(data)
        if not size:
            session.input_resumed()
            return NEED_MORE
        if control_only:
            return as_result(session.received_control(data), size)
        group = self.group
        if self._received_later and group is not None:
            coroutine: Any = session.received(memoryview(bytes(data)))
            self._receiving = True
            self._start(group, coroutine, "received", self._received_all, size)
            return BLOCK
        answer: Any = session.received(data)
        return DONE if answer is DONE else as_result(answer, size)

    def _received_all(self) -> None:
        self._receiving = False
        self.receiver.trigger_input()

    def process_eof(self) -> None:
        """The peer ended its stream."""
        try:
            stays = self.session.peer_ended()
        except BaseException as error:  # noqa: BLE001 - otherwise a connection that is not read would stay for ever
            self._handler_failed("peer_ended", error)
            return
        if not stays:
            self.terminate(CloseReason.PEER_CLOSED, "")

    def process_error(self, error: Exception) -> None:
        """Reading failed, or the input was wrong."""
        reason, details = reason_for(error)
        if reason is CloseReason.INTERNAL:
            self.handler_failed("received", error)
        self.terminate(reason, details)

    def reading_changed(self, wanted: bool) -> None:  # noqa: FBT001 - the Receiver's signature
        """Watch the socket for input, or for the peer's end alone."""
        group = self.group
        if group is None:
            return
        if wanted:
            group.watch_input(self._sock, self.receiver.input_ready, gather=self._gathers)
            if self._secure is not None:
                self._watch_secure()
                if self._secure.pending_input():
                    self.registration.run_soon(self.receiver.input_ready, _SECURE_INPUT)
        elif self._secure is not None and not self._secure.established:
            # What is to be sent waits for the handshake, and may be what the hold is about.
            group.watch_input(self._sock, self._secure_input)
        else:
            group.watch_end(self._sock, self._peer_ended)

    def _peer_ended(self, broken: bool) -> None:  # noqa: FBT001 - the signature of `watch_end`
        """The peer has ended its stream, or the connection is broken, while it is not read."""
        if broken:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.terminate(CloseReason.PEER_RESET, os.strerror(code))
            else:
                self.terminate(CloseReason.PEER_CLOSED, "")
        elif self._held_end is None and not self.receiver.over:
            slowed = self._slowed_until != _NEVER
            wait_s = _SLOWED_END_S if slowed else HELD_END_S
            self._held_end = (self.clock() + wait_s, self.taken_bytes(), slowed)
            self._arm()

    def taken_bytes(self) -> int:
        """Return what the peer's kernel has acknowledged so far. Any thread."""
        return self.sender.statistics().bytes_sent - unacknowledged_bytes(self._sock)

    def _look_at_held_end(self, now: float, before_bytes: int, slowed: bool) -> None:  # noqa: FBT001 - of `_held_end`
        """End a connection whose input is held although its peer has left."""
        self._held_end = None
        if self.receiver.over:
            return
        taken_bytes = self.taken_bytes()
        if taken_bytes > before_bytes or (self._coroutines is not None and self._coroutines.running):
            self._held_end = (now + HELD_END_S, taken_bytes, slowed)
        elif slowed or self.receiver.paused:
            self.terminate(CloseReason.PEER_CLOSED, "it left while its input was " + ("slowed" if slowed else "held"))
        else:  # the session itself waits for something; or this is between two holds
            self._held_end = (now + _HELD_LOOK_S, taken_bytes, slowed)

    # -- output: the Sender's host and frontend

    def now(self) -> float:
        """Return the time in seconds."""
        return self.clock()

    def in_thread(self) -> bool:
        """Return whether the caller may do what belongs to the owning thread; between two groups no thread may."""
        group = self.group
        return group is not None and group.in_thread()

    def wrote(self, size_bytes: int) -> None:
        """Count what the kernel has taken."""
        group = self.group
        if group is not None:
            group.bytes_out += size_bytes

    def kernel_bytes(self) -> int:
        """Return what the kernel has taken and the peer has not acknowledged."""
        return unacknowledged_bytes(self._sock)

    def limit_unsent(self, size_bytes: int) -> None:
        """Have the kernel take less, or as much as usual, ahead of what it sends."""
        most_bytes = self._notsent_lowat_bytes
        limit_unsent(self._sock, min(size_bytes or most_bytes, most_bytes or size_bytes))

    def line_figures(self) -> LineFigures | None:
        """Return what the kernel knows of the line to the peer; None: nothing, or it is that of a proxy. Any thread."""
        return line_figures(self._sock) if self.peer == peer_name(self._sock) else None

    def window_bytes(self) -> int | None:
        """Return the room in the peer's receive buffer, as it last told; None: not known. Any thread."""
        line = self.line_figures()
        return None if line is None else line.window_bytes

    def strained(self) -> bool:
        """Return whether the thread of the group had no room a moment ago."""
        group = self.group
        return group is not None and group.strained()

    def shared_stall(self) -> StallSpan | None:
        """Return when most viewers of the group stopped last, and up to when. None: never."""
        group = self.group
        return None if group is None else group.stall.span(group.now())

    def request_flush(self) -> None:
        """Flush soon on the owning thread."""
        self.registration.schedule(self._flush_job)

    def _flush(self) -> None:
        self.sender.flush()

    def want_writable(self, wanted: bool) -> None:  # noqa: FBT001 - the protocol's signature
        """Watch, or stop watching, the socket for output."""
        group = self.group
        if group is None or self._over:
            return
        if self._secure is not None:
            self._secure.write_waits = wanted
            self._watch_secure()
        elif wanted:
            group.watch_output(self._sock, self.sender.writable)
        else:
            group.rest_output(self._sock)

    # -- TLS: the handshake, and what else its socket waits for

    def _read_secure(self, sock: TlsSocket, buffer: memoryview) -> int:
        if not sock.established:
            return self._step_of_handshake(sock, buffer)
        began = self.clock()
        try:
            count = sock.recv_into(buffer)
        except BlockingIOError:
            self._charge(began)  # what held no data is work all the same
            if sock.read_wants_write:
                self._watch_secure()
            raise
        if sock.pending_input():  # the descriptor does not tell of it
            self.registration.run_soon(self.receiver.input_ready, _SECURE_INPUT)
        return count

    def _step_of_handshake(self, sock: TlsSocket, buffer: memoryview) -> int:
        """Go on with the handshake: it is the peer's work, and waits where there is no time for it in this turn."""
        group = self.group
        if group is not None and sock.server_side and (group.work.handshakes_wait or self.work.turn_over):
            raise BlockingIOError  # it stays readable: the loop asks again in its next turn
        began = self._begin_turn()
        try:
            return sock.recv_into(buffer)
        finally:
            took_s = self._charge(began)
            if group is not None:
                group.work.handshake(took_s)
            if sock.established:
                sock.handshake_by = _NEVER
                self._arm()
            self._watch_secure()

    def _secure_input(self) -> None:
        """Go on with reading; while input is held, with the handshake alone."""
        sock = self._secure
        if sock is None or self._over or self.receiver.reading:
            self.receiver.input_ready()
            return
        try:
            self._step_of_handshake(sock, memoryview(bytearray()))
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, RemoteProtocolError) as error:
            self.process_error(error)
            return
        if sock.established:
            self.reading_changed(self.receiver.reading)
        else:
            self.terminate(CloseReason.PEER_CLOSED, "")

    def _secure_kept(self) -> None:
        self.registration.run_soon(self._watch_secure, _SECURE)

    def _watch_secure(self) -> None:
        """Watch the socket for output while TLS waits for that, or the Sender does and TLS can help it."""
        group, sock = self.group, self._secure
        if group is None or sock is None or self._over:
            return
        reads = self.receiver.reading or not sock.established  # else its wish waits for the end of the hold
        if (sock.read_wants_write and reads) or (sock.established and (sock.kept_bytes or sock.write_waits)):
            group.watch_output(sock, self._secure_writable)
        else:
            group.unwatch_output(sock)

    def _secure_writable(self) -> None:
        """The kernel takes more: go on with what waits for it, in the order in which it came."""
        sock = self._secure
        if sock is None:
            return
        if sock.read_wants_write:
            self._secure_input()
        try:
            free = sock.push()
        except OSError as error:
            self.sender.broken(error.with_traceback(None))
            return
        if free and sock.write_waits:
            self.sender.writable()
        self._watch_secure()

    # -- output: what else the Sender asks of its host

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Hand an edge to the session; under the Sender's lock."""
        try:
            self.session.send_state_changed(state, change)
        except Exception:
            raise
        except BaseException as error:
            raise as_exception(error) from error  # the Sender contains exceptions only

    def ledger_grew(self) -> None:
        """Read the ledger soon."""
        self.registration.run_soon(self._read_ledger, _LEDGER)

    def _read_ledger(self) -> None:
        for entry in self.sender.unread_ledger():
            try:
                self.session.ledger_entry(entry)
            except BaseException as error:  # noqa: BLE001 - neither the other entries nor the end may be lost for it
                self._handler_failed("ledger_entry", error)

    # -- deadlines

    def set_deadline(self, when: float) -> None:
        """Tick the Sender at `when`. Any thread."""
        group = self.group
        if group is not None and group.in_thread():
            self._set_sender_due(when)
            return
        with self._lock:
            self._wished_due = min(self._wished_due, when)
        self.registration.run_soon(self._take_wish, _DEADLINE)

    def _take_wish(self) -> None:
        with self._lock:
            when, self._wished_due = self._wished_due, _NEVER
        self._set_sender_due(when)

    def _set_sender_due(self, when: float) -> None:
        if when < self._sender_due:
            self._sender_due = when
            self._arm()

    def set_timer(self, when: float | None) -> None:
        """Call the session's `timer` at `when`, instead of an earlier wish. None: not at all. Owning thread."""
        due = _NEVER if when is None else when
        if due != self._timer_due:
            self._timer_due = due
            self._arm()

    def set_protocol_timer(self, when: float | None) -> None:
        """Do the same for what speaks the session's protocol: the session has the other one for itself."""
        self._protocol_due = _NEVER if when is None else when
        self._arm()

    def _arm(self) -> None:
        group = self.group
        if group is None or self._over:
            return
        when = min(self._sender_due, self._timer_due, self._protocol_due, self._slowed_until)
        if self._held_end is not None:
            when = min(when, self._held_end[0])
        if self._secure is not None:
            when = min(when, self._secure.handshake_by)
        if when < _NEVER:
            group.deadlines.set(self, when)
        else:
            group.deadlines.remove(self)

    def deadline_due(self, now: float) -> None:
        """Call what is due; called by the group."""
        if now >= self._sender_due:
            self._sender_due = _NEVER
            self.sender.tick()
        if now >= self._slowed_until:
            self._slowed_until = _NEVER
            self.receiver.resume(_SLOWED)
        if self._secure is not None and now >= self._secure.handshake_by:
            self._secure.handshake_by = _NEVER
            self.terminate(CloseReason.HANDSHAKE_TIMEOUT, f"the TLS handshake took more than {HANDSHAKE_S:g} s")
        late = now - min(self._timer_due, self._protocol_due) >= _LATE_S
        if late and self.receiver.reading:
            self.receiver.input_ready()  # the session may have been about to say that nothing has come
        if not (late and self.work.turn_over):  # its input is for the next turn, so is this
            if now >= self._protocol_due:
                self._protocol_due = _NEVER
                self._call_timer(self._handler, now)
            if now >= self._timer_due:
                self._timer_due = _NEVER
                self._call_timer(self.session, now)
        if self._held_end is not None and now >= self._held_end[0]:
            self._look_at_held_end(now, *self._held_end[1:])
        self._arm()

    def _call_timer(self, session: Session, now: float) -> None:
        if self.ended is not None:
            return
        began = self._begin_turn()
        try:
            session.timer(now)
        except BaseException as error:  # noqa: BLE001 - as for input: the session's error is the connection's end
            self._handler_failed("timer", error)
        finally:
            self._charge(began)

    # -- what it is

    def why(self) -> str:
        """Return the Sender's `why`, the rendition, and whether input is slowed as too much work. Any thread."""
        parts, now = [self.sender.why()], self.clock()
        if self.renditions is not None and (words := self.renditions.describe(now)):
            parts.append(words)
        if self.work.slowed(now):
            parts.append(f"input slowed, it took {self.work.work_s:.3g} s of the thread's time")
        return "; ".join(parts)

    def delay_ms(self) -> float:
        """Return how far behind the peer is: the age of the oldest that it has not taken, here or in the kernel.

        See `flowctl.core.flow.meters`. Any thread.
        """
        return self.sender.sample_delay(unacknowledged_bytes(self._sock))

    def load(self) -> float:
        """Return how much work this connection is, in viewers of a stream, for placing and rebalancing. Any thread.

        Serving is counted as 1; what it sends us counts by its mean rate, since a publisher's media is parsed and
        inspected message by message.
        """
        open_s = max(self.clock() - self.opened_at, _LEAST_MEAN_S)
        return 1.0 + self.receiver.bytes_in / open_s / INPUT_BYTES_PER_VIEWER_S

    def movable(self) -> bool:
        """Return whether the connection may go to another thread: not while a coroutine runs on this one. Any thread.

        Otherwise two threads would work for one session. Nor while its socket lingers, nor where it is pinned.
        """
        coroutines = self._coroutines  # read once: the end of the connection lets it go
        running = coroutines is not None and coroutines.running
        return not (self._over or running or self.session.pinned)

    def describe(self) -> str:
        """Return number and peer, for logs."""
        return f"connection {self.number} ({join_host_port(*self.peer)})"

    def fileno(self) -> int:
        """Return the descriptor of the socket, -1 once it is closed."""
        return self._sock.fileno()

    # -- calling the session

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> bool:
        """Call on the connection's own thread, soon and in order, also when it moves to another. Any thread.

        An exception of `callback` is reported and ends the connection, like that of a handler.

        Returns:
            False if the connection is over or about to end: it is not called then, nor if the end comes first.

        Raises:
            LocalProtocolError: `MAX_CALLS` calls wait. The peer has no part in it, and goes on being served.
        """
        with self._lock:
            if self._ending is not None:
                return False
            if self._calls is None:
                self._calls = deque()
            if len(self._calls) >= MAX_CALLS:
                raise LocalProtocolError(
                    f"call_soon of {self.describe()}: {MAX_CALLS} calls wait for its thread already",
                    hint="a handler blocks the thread, or calls are asked for faster than they run: wait for some",
                )
            self._calls.append((callback, args))
        self.registration.run_soon(self._run_calls, _CALLS)
        return True

    def _run_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, None
        for callback, args in calls or ():
            if self.ended is not None:
                return
            try:
                callback(*args)
            except BaseException as error:  # noqa: BLE001 - as for every handler
                self._handler_failed(getattr(callback, "__name__", "call"), error)

    def handler_failed(self, where: str, error: BaseException) -> None:
        """Report that a handler of the session raised. Any thread."""
        what = f"{where} of {self.describe()}"
        if self._home is not None:
            self._home.report(what, error)
        else:
            report(log_error, what, error)  # it has not been on a group yet

    def _handler_failed(self, where: str, error: BaseException) -> None:
        """End the connection for what a handler raised; report it unless it is the peer's fault."""
        if self._over and isinstance(error, ClosedError):
            return  # a coroutine that was told, as it waited, that the connection is over
        reason, details = handler_reason(error)
        if reason is CloseReason.INTERNAL:
            self.handler_failed(where, error)
        self.terminate(reason, details)

    def run_coroutine(
        self, coroutine: Coroutine[Any, Any, Any], where: str, then: Callable[[], object] | None = None
    ) -> None:
        """Run a coroutine of the session's, as those of its handlers are run. Owning thread.

        Args:
            coroutine: it is cancelled when the connection ends; what it raises ends the connection.
            where: what it is of, for the report of an exception.
            then: called on the connection's thread when it has ended well.
        """
        if self.group is None:
            coroutine.close()
        else:
            self._start(self.group, coroutine, where, then)

    def _start(
        self,
        group: PollGroup,
        coroutine: Coroutine[Any, Any, Any],
        where: str,
        then: Callable[[], object] | None = None,
        offered_bytes: int = 0,
    ) -> None:
        if self._coroutines is None:
            self._coroutines = Coroutines(self._handler_failed)
            if self._over:  # one of `closed`, which the end of its loop may cancel
                self._coroutines.cancel()
        self._coroutines.start(group.loop, coroutine, where, then, offered_bytes)

    def _call_session(self, group: PollGroup | None, method: Callable[..., Any], where: str, *args: Any) -> None:
        """Call a method of the session that may be a coroutine function; contain its exception."""
        try:
            answer = method(*args)
            if not inspect.iscoroutine(answer):
                return
            if group is None:  # abandoned: there is no loop left to run it on
                answer.close()
            elif where == "opened":
                self.receiver.pause(_OPENING, "opening")
                self._start(group, answer, where, lambda: self.receiver.resume(_OPENING))
            else:
                self._start(group, answer, where)
        except BaseException as error:  # noqa: BLE001 - one session's fault must not cost the others their thread
            self._handler_failed(where, error)


def reason_for(error: BaseException) -> tuple[CloseReason, str]:
    """Return the close reason and details that `error`, of a read or of flowctl's own tree, stands for."""
    if isinstance(error, LimitExceededError):
        if error.limit == "handshake_time_s":
            return CloseReason.HANDSHAKE_TIMEOUT, str(error)
        return (CloseReason.IDLE if error.limit in _IDLE_LIMITS else CloseReason.LIMIT_HIT), str(error)
    if isinstance(error, RemoteProtocolError):
        return CloseReason.PROTOCOL_ERROR, f"{error.code}: {error}"
    if isinstance(error, (BrokenError, OSError)):
        return CloseReason.PEER_RESET, str(error)
    return CloseReason.INTERNAL, f"{type(error).__name__}: {error}"


def handler_reason(error: BaseException) -> tuple[CloseReason, str]:
    """Return the same for what a handler raised: its OSError says nothing about this connection's socket."""
    if isinstance(error, FlowctlError):
        return reason_for(error)
    return CloseReason.INTERNAL, f"{type(error).__name__}: {error}"


def as_result(answer: object, size: int) -> InputResult:
    if answer is None:
        return DONE
    if isinstance(answer, InputResult):
        return answer
    if isinstance(answer, int):
        return InputResult(InputVerdict.NEED_MORE, ALL if answer == size else answer)
    if asyncio.iscoroutine(answer):
        answer.close()
    raise InternalError(
        f"received() returned {type(answer).__name__}, it must return a number of bytes, an InputResult or None",
        hint="declare a coroutine with async def",
    )
