"""A connection: a socket, its Receiver and its Sender, and the session that uses them, on a poll group.

This is the only glue between sockets and the rest. The connection is the Sender's host (flush requests, deadlines,
writability become jobs, deadlines and watches of its group) and the Receiver's reader. Everything of it runs on the
thread of its group, which may change (`PollGroup.migrate`): the Sender then leaves the fan-out of the old thread and
enters that of the new one at the same byte.

How it ends: whoever finds a reason calls `terminate`; the first reason counts. A job on the owning thread then closes
Sender and Receiver, takes the connection off its group, closes the socket (with a reset where the peer does not read,
or the kernel would keep its buffers for minutes), and calls the session's `closed` exactly once.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from flowctl._locks import OwnedLock
from flowctl.deferred import Registration
from flowctl.errors import BrokenError, ClosedError, InternalError, LimitExceededError, RemoteProtocolError
from flowctl.fanouts import FollowPlace
from flowctl.flow import SendState, StateChange
from flowctl.limits import NO_LIMITS, Limits
from flowctl.policy import DropPolicy
from flowctl.pollgroup import GroupState, PollGroup
from flowctl.reasons import CloseReason
from flowctl.receiver import ALL, BLOCK, DEFAULT_CAPACITY_BYTES, DONE, InputResult, Receiver, Verdict
from flowctl.sender import Sender
from flowctl.sender_types import SenderSettings
from flowctl.session import Session
from flowctl.sockets import SocketOptions, close_socket, peer_name

_numbers = itertools.count(1)
_NEVER: Final = float("inf")


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
        on_closed: told with the connection, on its thread, after the session: for whoever keeps the list.
    """

    __slots__ = (
        "_close_job",
        "_ending",
        "_farewell",
        "_flush_job",
        "_ledger_job",
        "_lock",
        "_on_closed",
        "_opened",
        "_over",
        "_sender_due",
        "_sock",
        "_timer_due",
        "clock",
        "group",
        "number",
        "opened_at",
        "peer",
        "place",
        "receiver",
        "registration",
        "sender",
        "session",
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
        on_closed: Callable[[Connection], None] | None = None,
    ) -> None:
        (options or SocketOptions()).apply(sock)
        self._sock = sock
        self._lock = OwnedLock()
        self.number: Final = next(_numbers)
        self.peer: Final = peer_name(sock)
        self.clock: Final = clock
        self.session: Final = session
        self.group: PollGroup | None = None  # where it lives; None on the way between two groups
        self.place: FollowPlace | None = None  # where it follows a log; kept by flowctl.fanouts
        self.opened_at: Final = clock()
        self.registration: Final = Registration()
        self._flush_job: Final = self.registration.job(self._flush, "flush")
        self._close_job: Final = self.registration.job(self._finish, "close")
        self._ledger_job: Final = self.registration.job(self._read_ledger, "ledger")
        self._sender_due = self._timer_due = _NEVER  # what the one deadline of the group stands for
        self._opened = False
        self._over = False  # `closed` was called
        self._ending: tuple[CloseReason, str] | None = None  # the first reason; guarded by _lock
        self._farewell: tuple[CloseReason, str] | None = None  # of close_after_flush; guarded by _lock
        self._on_closed = on_closed
        session.connection = self
        self.sender: Final = Sender(
            self, sock, limits=limits, policy=policy, frontend=self, settings=settings, deferred=deferred
        )
        self.receiver: Final = Receiver(
            self.registration,
            self,
            sock.recv_into,
            self._watch_input,
            capacity_bytes=capacity_bytes,
            clock=clock,
        )

    # -- life

    def close(self, reason: CloseReason = CloseReason.KICKED, details: str = "") -> None:
        """End the connection soon, dropping what is queued. Any thread; the first reason counts."""
        self.terminate(reason, details)

    def close_after_flush(self, details: str = "", *, reason: CloseReason = CloseReason.FINISHED) -> None:
        """Send what is queued, then end with `reason`; give up after the Sender's close deadline. Any thread."""
        with self._lock:
            if self._farewell is None:
                self._farewell = (reason, details)
        self.sender.close_after_flush()

    def terminate(self, reason: CloseReason, details: str) -> None:
        """Do what `close` does; the Sender calls it too."""
        with self._lock:
            if self._ending is not None:
                return
            if reason is CloseReason.FINISHED and self._farewell is not None:
                reason, details = self._farewell
            self._ending = (reason, details)
        try:
            self.registration.schedule(self._close_job)
        except ClosedError:
            return  # over already

    @property
    def ended(self) -> tuple[CloseReason, str] | None:
        """Why the connection ended, or is about to. None: it is open."""
        return self._ending

    def attached(self, group: PollGroup) -> None:
        """Begin to live on `group`; called by the group."""
        self.group = group
        self.receiver.attached(group)
        self._arm()
        if self.place is not None:
            self.place.enter(group)
        if not self._opened:
            self._opened = True
            self._call(self.session.opened, "opened")
        if self.sender.blocked:
            self.want_writable(True)

    def detached(self, group: PollGroup) -> None:
        """Stop living on `group`; called by the group."""
        if self.place is not None:
            self.place.leave()
        if self._over:
            self.group = None
            return
        self.receiver.detached()
        group.unwatch_output(self._sock.fileno())
        group.deadlines.remove(self)
        stopping = group.state is not GroupState.RUNNING
        if stopping:
            self.terminate(CloseReason.SHUTDOWN, f"poll group {group.name} stopped")
            self._finish()
        self.group = None

    def _finish(self) -> None:
        """The one place where a connection ends, on its thread."""
        if self._over or self._ending is None:
            return
        self._over = True
        reason, details = self._ending
        self.sender.close(reason, details)
        self._read_ledger()
        self.receiver.close()
        group = self.group
        if group is not None:
            group.unwatch_output(self._sock.fileno())
            group.deadlines.remove(self)
            group.remove_pollable(self)
        close_socket(self._sock, abortive=reason.abortive)
        self._call(self.session.closed, "closed", reason, details)
        self.registration.release()
        if self._on_closed is not None:
            self._on_closed(self)

    # -- input: the Receiver's handler

    def process_input(self, data: memoryview, *, control_only: bool) -> InputResult:
        """Hand input to the session."""
        if self._ending is not None:
            return InputResult(Verdict.DONE)
        session = self.session
        if not data:
            session.input_resumed()
            return InputResult(Verdict.NEED_MORE, 0)
        if control_only:
            return _as_result(session.received_control(data), len(data))
        if inspect.iscoroutinefunction(session.received):
            coroutine: Any = session.received(memoryview(bytes(data)))
            self._start(self._take_later(coroutine, len(data)))
            return BLOCK
        answer: Any = session.received(data)
        return _as_result(answer, len(data))

    async def _take_later(self, coroutine: Awaitable[int | None], size: int) -> None:
        """Run a coroutine of `received`; input goes on when it is done."""
        consumed = await coroutine
        rest = size - consumed if isinstance(consumed, int) else 0
        if rest:
            raise InternalError(
                f"a coroutine of received() must consume all {size} bytes, it left {rest}",
                hint="keep what is incomplete in the session, or make received() a plain function",
            )
        self.receiver.trigger_input()

    def process_eof(self) -> None:
        """The peer ended its stream."""
        if not self.session.peer_ended():
            self.terminate(CloseReason.PEER_CLOSED, "")

    def process_error(self, error: Exception) -> None:
        """Reading failed, or the input was wrong."""
        reason, details = reason_for(error)
        if reason is CloseReason.INTERNAL:
            self.handler_failed("received", error)
        # The Sender may hold an answer that says what was wrong: let it go out first, as far as it goes.
        if reason in {CloseReason.PROTOCOL_ERROR, CloseReason.LIMIT_HIT, CloseReason.HANDSHAKE_TIMEOUT}:
            self.sender.flush()
        self.terminate(reason, details)

    def _watch_input(self, wanted: bool) -> None:  # noqa: FBT001 - the Receiver's signature
        group = self.group
        if group is None:
            return
        if wanted:
            group.watch_input(self._sock.fileno(), self.receiver.input_ready)
        else:
            group.unwatch_input(self._sock.fileno())

    # -- output: the Sender's host and frontend

    def now(self) -> float:
        """Return the time in seconds."""
        return self.clock()

    def in_thread(self) -> bool:
        """Return whether the caller may do what belongs to the owning thread."""
        group = self.group
        return group is None or group.in_thread()

    def request_flush(self) -> None:
        """Flush soon on the owning thread."""
        self._schedule(self._flush_job)

    def _flush(self) -> None:
        self.sender.flush()

    def want_writable(self, wanted: bool) -> None:  # noqa: FBT001 - the protocol's signature
        """Watch, or stop watching, the socket for output."""
        group = self.group
        if group is None or self._over:
            return
        if wanted:
            group.watch_output(self._sock.fileno(), self.sender.writable)
        else:
            group.unwatch_output(self._sock.fileno())

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Hand an edge to the session; under the Sender's lock."""
        self.session.send_state_changed(state, change)

    def ledger_grew(self) -> None:
        """Read the ledger soon."""
        self._schedule(self._ledger_job)

    def _read_ledger(self) -> None:
        for entry in self.sender.unread_ledger():
            self.session.ledger_entry(entry)

    def handler_failed(self, where: str, error: Exception) -> None:
        """Report that a handler of the session raised."""
        group = self.group
        if group is not None:
            group.report(f"{where} of {self.describe()}", error)

    def _schedule(self, job: Any) -> None:
        try:
            self.registration.schedule(job)
        except ClosedError:
            return  # over: nothing is flushed or read any more

    # -- deadlines

    def set_deadline(self, when: float) -> None:
        """Tick the Sender at `when`. Any thread."""
        group = self.group
        if group is None or group.in_thread():
            self._set_sender_due(when)
        else:
            group.call_soon(self._set_sender_due, when)

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

    def _arm(self) -> None:
        group = self.group
        if group is None or self._over:
            return
        when = min(self._sender_due, self._timer_due)
        if when < _NEVER:
            group.deadlines.set(self, when)
        else:
            group.deadlines.remove(self)

    def deadline_due(self, now: float) -> None:
        """Tick whoever is due; called by the group."""
        if now >= self._sender_due:
            self._sender_due = _NEVER
            self.sender.tick()
        if now >= self._timer_due:
            self._timer_due = _NEVER
            try:
                self.session.timer(now)
            except Exception as error:  # noqa: BLE001 - as for input: the session's error is the connection's end
                self.process_error(error)
        self._arm()

    # -- what it is

    def describe(self) -> str:
        """Return number and peer, for logs."""
        return f"connection {self.number} ({self.peer[0]}:{self.peer[1]})"

    def fileno(self) -> int:
        """Return the descriptor of the socket, -1 once it is closed."""
        return self._sock.fileno()

    # -- calling the session

    def _call(self, method: Callable[..., Any], where: str, *args: Any) -> None:
        """Call a method of the session that may be a coroutine function; contain its exception."""
        try:
            answer = method(*args)
            if inspect.iscoroutine(answer):
                self._start(answer)
        except Exception as error:  # noqa: BLE001 - one session's fault must not cost the others their thread
            self.handler_failed(where, error)
            self.terminate(*reason_for(error))

    def _start(self, coroutine: Any) -> None:
        """Run a coroutine of the session on the group's loop."""
        group = self.group
        if group is None:
            coroutine.close()
            return
        task = group.loop.create_task(coroutine)
        _tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        _tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if isinstance(error, Exception):
                self.process_error(error)


_tasks: set[asyncio.Task[Any]] = set()
"""Running coroutines of sessions: a loop holds its tasks only weakly."""


def reason_for(error: Exception) -> tuple[CloseReason, str]:
    """Return the close reason and details that `error` stands for."""
    if isinstance(error, LimitExceededError):
        timeout = error.limit == "handshake_time_s"
        return (CloseReason.HANDSHAKE_TIMEOUT if timeout else CloseReason.LIMIT_HIT), str(error)
    if isinstance(error, RemoteProtocolError):
        return CloseReason.PROTOCOL_ERROR, f"{error.code}: {error}"
    if isinstance(error, (BrokenError, OSError)):
        return CloseReason.PEER_RESET, str(error)
    return CloseReason.INTERNAL, f"{type(error).__name__}: {error}"


def _as_result(answer: InputResult | int | None, size: int) -> InputResult:
    if answer is None:
        return DONE
    if isinstance(answer, InputResult):
        return answer
    return InputResult(Verdict.NEED_MORE, ALL if answer == size else answer)
