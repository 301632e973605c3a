"""What a connection is to its thread, its Sender and its Receiver. An application has `flowctl.connection.Connection`.

It is the glue between a socket and the rest: the Receiver's handler, what calls the session, and what lives on a poll
group; `ConnectionHost` is its output side, of which deadlines and watches are there too. Everything of it runs
on the thread of its group, which may change (`PollGroup.migrate`): the Sender then leaves the fan-out of the old thread
and enters that of the new one at the same byte. What other threads want is therefore always a job of the registration,
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

import inspect
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

from flowctl.core.connecting.contract import OVER, SessionHooks, as_result, handler_reason, reason_for
from flowctl.core.connecting.host import ConnectionHost
from flowctl.core.flow.state import SendState, StateChange
from flowctl.core.loop.coroutines import Coroutines
from flowctl.core.loop.faults import as_exception, log_error, report
from flowctl.core.loop.jobs import Purpose
from flowctl.core.loop.lingering import Lingering, Part, write_parts
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.loop.sockets import (
    SocketOptions,
    close_socket,
    end_output,
    limit_received,
)
from flowctl.core.loop.work import TURN_S, Overrun, WorkAccount, WorkLimits
from flowctl.core.text.addresses import address_key, join_host_port
from flowctl.errors import ClosedError, LocalProtocolError, ReentryError
from flowctl.pollgroup import GroupState, PollGroup
from flowctl.reasons import CloseReason
from flowctl.receiver import ALL, BLOCK, DONE, NEED_MORE, InputResult, InputVerdict, Receiver
from flowctl.sender import Sender

_T = TypeVar("_T")
_numbers = itertools.count(1)
"""Numbers of connections; see `number_from`."""
_NEVER: Final = float("inf")
_OPENING: Final = object()
"""Owner of the hold while `opened` runs: unequal to any value of the application's."""
_CLOSE: Final = Purpose("close")
_LEDGER: Final = Purpose("ledger")
_CALLS: Final = Purpose("calls")
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


class ConnectionCore:
    """The inside of one connection: a pollable, a deadline owner, an `InputHandler` and a `Frontend`.

    Arguments are those of `flowctl.connection.Connection`, its `owner`. The `handler` is called about octets, timers of
    the protocol and the last words: the session, or what speaks for it.
    """

    __slots__ = (
        *("_calls", "_coroutines", "_farewell", "_gathers", "_handler", "_held_end", "_home", "_lingering", "_lock"),
        *("_now", "_on_closed", "_on_released", "_protocol_due", "_receives", "_slowed_until", "_timer_due"),
        *("ending", "group", "host", "opened_at", "receiver", "session", "work"),
    )
    host_class: ClassVar[type[ConnectionHost]] = ConnectionHost
    receiver: Receiver

    def __init__(
        self,
        owner: Any,
        sock: socket.socket,
        session: SessionHooks,
        handler: SessionHooks,
        options: SocketOptions,
        clock: Callable[[], float],
        peer: tuple[str, int] | None,
        work_limits: WorkLimits,
        on_closed: Callable[[Any], None] | None,
        on_released: Callable[[Any], None] | None,
    ) -> None:
        self._now: Final = clock
        self.opened_at: Final = clock()
        self.session = session
        self._handler = handler
        # Shared with Registration and Receiver: it is held for a few assignments at a time, and a lock is 110 bytes.
        self._lock = OwnedLock()
        self.host: Final = self.host_class(next(_numbers), owner, self, sock, options, clock, peer, self._lock)
        self.group: PollGroup | None = None  # where it lives; None on the way between two groups
        self._home: PollGroup | None = None  # where it lived last, to report to
        self.work: Final = WorkAccount(work_limits, self.opened_at)
        # What the deadline of the group stands for.
        self._timer_due = self._protocol_due = self._slowed_until = _NEVER
        self._lingering: Lingering | None = None  # the socket waits for the peer's end; all else is over
        # When to look again at a peer that ended its stream while input is held, what it had taken by then, and whether
        # it is slowed down.
        self._held_end: tuple[float, int, bool] | None = None
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] | None = None  # guarded by _lock
        self.ending: tuple[CloseReason, str] | None = None  # the first reason; guarded by _lock
        self._farewell: tuple[CloseReason, str] | None = None  # of close_after_flush; guarded by _lock
        self._on_closed = on_closed
        self._on_released = on_released
        self._coroutines: Coroutines | None = None  # made by the first; most sessions have none
        self._gathers = False  # input may wait a little
        # Whether a coroutine of `received` runs. None: it is a plain function.
        self._receives = False if inspect.iscoroutinefunction(handler.received) else None

    def _reader(self) -> Callable[[memoryview], int]:
        return self.host.sock.recv_into

    def serve(self, sender: Sender, capacity_bytes: int, first_input: bytes) -> Receiver:
        """Be the host of `sender`, which was made for it, and handle the input of the Receiver that is returned."""
        self.host.sender = sender
        self.receiver = Receiver(
            self.host.registration,
            self,
            self._reader(),
            capacity_bytes=capacity_bytes,
            clock=self.host.now,
            lock=self._lock,
            first_input=first_input,
        )
        return self.receiver

    # -- life

    def close_after_flush(self, reason: CloseReason, details: str) -> None:
        """Send what is queued, then end with `reason`. Any thread."""
        with self._lock:
            first = self._farewell is None
            if first:
                self._farewell = (reason, details)
        try:
            self.host.sender.close_after_flush()
        except ReentryError:
            with self._lock:
                self._farewell = None if first else self._farewell
            raise

    def terminate(self, reason: CloseReason, details: str) -> None:
        """End the connection soon, dropping what is queued. Any thread; the first reason counts."""
        with self._lock:
            if self.ending is not None:
                return
            if reason is CloseReason.FINISHED and self._farewell is not None:
                reason, details = self._farewell
            self.ending = (reason, details)
        self.host.registration.run_soon(self._finish, _CLOSE)

    def abandon(self, details: str) -> None:
        """End a connection that is on no group and that no group will take again: its groups have stopped."""
        if self.group is None:
            self.terminate(CloseReason.SHUTDOWN, details)
            self._finish()

    def attached(self, group: PollGroup) -> None:
        """Begin to live on `group`; called by the group."""
        first = self._home is None
        self.group = self._home = group
        group.work.enter(self.work, address_key(self.host.peer[0]), self._now())
        self.host.attached(group)
        try:
            self.receiver.attached(group)
            if not self.receiver.reading:
                self.reading_changed(False)
            if self.host.owner.place is not None:
                self.host.owner.place.enter(group)
        except BaseException as error:  # noqa: BLE001 - the group would drop the connection without closing it
            self._handler_failed("attaching", error)
            return
        self._arm()
        if first:
            self._call_session(group, "opened", self._handler.opened)
        if self.host.sender.blocked:
            self.host.want_writable(True)

    def detached(self, group: PollGroup) -> None:
        """Stop living on `group`; called by the group."""
        group.work.leave(self.work, address_key(self.host.peer[0]), self._now())
        if self.host.over:
            self.group = self.host.group = None
            if self._lingering is not None:
                self._lingering.stop()
                self._end_linger(False)
            return
        if self.host.owner.place is not None:
            self.host.owner.place.leave()
        self.receiver.detached()
        self._unwatch(group)
        if group.state is not GroupState.RUNNING:
            self.terminate(CloseReason.SHUTDOWN, f"poll group {group.name} stopped")
            self._finish()
        self.group = self.host.group = None

    def _unwatch(self, group: PollGroup) -> None:
        self.host.unwatch(group)
        group.deadlines.remove(self)

    def _finish(self) -> None:
        """The one place where a connection ends, on its thread; nothing in here may keep the rest from happening."""
        if self.host.over or self.ending is None:
            return
        self.host.over = True
        reason, details = self.ending
        group = self.group
        abortive = reason.abortive
        if reason in _EXPLAINED:
            self._run_guarded("flush", self.host.sender.flush)  # the answer that says what was wrong, as far as it goes
        if reason in _EXPLAINED or reason is CloseReason.PEER_CLOSED:
            # A peer that does not read does not read the reason either, nor the end of the stream behind it.
            abortive = abortive or self.host.sender.state is not SendState.READY
        words = self._last_words(reason, details)
        self._run_guarded("close", self.host.sender.close, reason, details)
        unsaid: list[Part] = []
        if words:
            unsaid, abortive = self._say_last(words)
        self._run_guarded("ledger_entry", self._read_ledger)
        self._run_guarded("close", self.receiver.close)
        if self._coroutines is not None:
            self._coroutines.cancel()
        if self.host.owner.place is not None:
            self._run_guarded("leaving the stream", self.host.owner.place.leave)
        if group is not None:
            self._unwatch(group)
        running = group is not None and group.state is GroupState.RUNNING
        if not abortive and group is not None and running and (unsaid or not end_output(self.host.sock)):
            self._run_guarded("lingering", self._linger, group, unsaid, bool(words))
        lingers = self._lingering is not None
        if not lingers:
            if group is not None:
                group.remove_pollable(self)
            close_socket(self.host.sock, abortive=abortive)
        self._call_session(group, "closed", self.session.closed, reason, details)
        self.host.registration.release()
        self._run_guarded("on_closed", self._on_closed, self.host.owner)
        if not lingers:
            self._run_guarded("on_released", self._on_released, self.host.owner)
        self._cut_references()

    def _cut_references(self) -> None:
        """Cut circles of references, so that an ended connection is freed at once and not by the garbage collector."""
        self.host.sender.let_go()
        self.receiver.let_go()
        self.session = self._handler = OVER
        self.host.owner.place = self._on_closed = None
        if self._lingering is None:
            self.host.let_go()
        with self._lock:
            self._calls = None
        if self._coroutines is not None and self._coroutines.let_go():
            self._coroutines = None

    def _last_words(self, reason: CloseReason, details: str) -> bytes:
        return self._run_guarded("last_words", self._handler.last_words, reason, details) or b""

    def _say_last(self, words: bytes) -> tuple[list[Part], bool]:
        """Write the rest of the message in flight, and `words`; return what is left, and whether it is broken."""
        parts: list[Part] = [part for part in (self.host.sender.unfinished, words) if part]
        try:
            write_parts(self.host.sock, parts)
        except OSError:
            return [], True
        return parts, False

    def _linger(self, group: PollGroup, unsaid: list[Part], told: bool) -> None:  # noqa: FBT001 - of `_finish`
        with self._lock:
            farewell = self._farewell
        # A peer that was to get all that was queued, or is told why, may pause as long before it takes the last of it.
        unread_s = self.host.sender.settings.close_deadline_s or _NEVER if farewell is not None or told else 0.0
        self._lingering = Lingering(self.host.sock, group, self._end_linger, unread_s, unsaid)

    def _end_linger(self, reset: bool) -> None:  # noqa: FBT001 - the signature of `Lingering`
        """Close the socket that has lingered."""
        group, self._lingering = self.group, None
        close_socket(self.host.sock, abortive=reset)
        self._run_guarded("on_released", self._on_released, self.host.owner)
        self.host.let_go()
        if group is not None:
            group.remove_pollable(self)

    @property
    def delivered(self) -> bool:
        """Whether the connection is over and the peer's kernel has all that it was sent. Any thread.

        Its end takes several steps on its own thread: between them the socket neither lingers nor is it closed.
        """
        lingering = self._lingering
        return self.host.sock.fileno() == -1 or (lingering is not None and lingering.delivered)

    def _run_guarded(self, where: str, step: Callable[..., _T] | None, *args: Any) -> _T | None:
        """Run a step of the end, if there is one; whatever it raises, the other steps follow."""
        try:
            return None if step is None else step(*args)
        except BaseException as error:  # noqa: BLE001 - a socket must not stay open for it, nor `closed` be left out
            self.handler_failed(where, error)
            return None

    # -- input: the Receiver's handler

    def process_input(self, data: memoryview, *, control_only: bool) -> InputResult:
        """Hand input to the session, and charge the peer with the time that takes."""
        if self.ending is not None:
            return DONE
        if self._receives:
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
        now, group = self._now(), self.group
        if group is not None:
            group.work.turn_ends_at = now + TURN_S
        return now

    def _charge(self, began: float) -> float:
        """Charge the peer with the work since `began`, slow or end the connection if that is too much; return the time.

        What is charged is processor time: on a machine that is busy with something else no peer pays for the waiting.
        """
        now, group = self._now(), self.group
        share = 1.0 if group is None else group.processor_share()
        overrun = self.work.charge((now - began) * share, now)
        if overrun is not None and self.ending is None:
            self.slow(overrun, "work")
        return now - began

    def slow(self, overrun: Overrun, reason: str) -> None:
        """Read nothing more of a peer that takes more than it may until it may go on, or end it. Owning thread.

        Args:
            overrun: what it took too much of.
            reason: as of `Receiver.pause`.
        """
        if overrun.begins:
            limit_received(self.host.sock)
        if overrun.begins or overrun.ends:
            self._call("work_exceeded", self.session.work_exceeded, overrun.error, ends=overrun.ends)
        if overrun.ends:
            self.terminate(CloseReason.LIMIT_HIT, str(overrun.error))
            return
        before = self._slowed_until
        self._slowed_until = overrun.resumes_at if before == _NEVER else max(before, overrun.resumes_at)
        self.receiver.pause(_SLOWED, reason)  # too often for the ledger
        if self._held_end is not None and not self._held_end[2]:
            self._held_end = (min(self._held_end[0], self._now() + _SLOWED_END_S), self._held_end[1], True)
        self._arm()

    def gather_input(self, wanted: bool) -> None:  # noqa: FBT001 - as of Connection
        """Let input wait a little, or not: see `Connection.gather_input`."""
        if wanted is not self._gathers:
            self._gathers = wanted
            if self.receiver.reading:
                self.reading_changed(True)

    def _hand_to_session(self, data: memoryview, *, control_only: bool) -> InputResult:
        session, size = self._handler, len(data)
        if not size:
            session.input_resumed()
            return NEED_MORE
        if control_only:
            return as_result(session.received_control(data), size)
        if self._receives is not None and self.group is not None:
            coroutine: Any = session.received(memoryview(bytes(data)))
            self._receives = True
            self.start(self.group, coroutine, "received", self._received_all, size)
            return BLOCK
        answer: Any = session.received(data)
        return DONE if answer is DONE else as_result(answer, size)

    def _received_all(self) -> None:
        self._receives = False
        self.receiver.trigger_input()

    def process_eof(self) -> None:
        if not self._call("peer_ended", self.session.peer_ended):
            self.terminate(CloseReason.PEER_CLOSED, "")

    def process_error(self, error: Exception) -> None:
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
            group.watch_input(self.host.sock, self.receiver.input_ready, gather=self._gathers)
        else:
            group.watch_end(self.host.sock, self._peer_ended)

    def _peer_ended(self, broken: bool) -> None:  # noqa: FBT001 - the signature of `watch_end`
        """The peer has ended its stream, or the connection is broken, while it is not read."""
        if broken:
            code = self.host.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.terminate(CloseReason.PEER_RESET, os.strerror(code))
            else:
                self.terminate(CloseReason.PEER_CLOSED, "")
        elif self._held_end is None and not self.receiver.over:
            slowed = self._slowed_until != _NEVER
            wait_s = _SLOWED_END_S if slowed else HELD_END_S
            self._held_end = (self._now() + wait_s, self.host.taken_bytes(), slowed)
            self._arm()

    def _look_at_held_end(self, now: float, before_bytes: int, slowed: bool) -> None:  # noqa: FBT001 - of `_held_end`
        """End a connection whose input is held although its peer has left."""
        self._held_end = None
        if self.receiver.over:
            return
        taken_bytes = self.host.taken_bytes()
        if taken_bytes > before_bytes or (self._coroutines is not None and self._coroutines.running):
            self._held_end = (now + HELD_END_S, taken_bytes, slowed)
        elif slowed or self.receiver.paused:
            self.terminate(CloseReason.PEER_CLOSED, "it left while its input was " + ("slowed" if slowed else "held"))
        else:  # the session itself waits for something; or this is between two holds
            self._held_end = (now + _HELD_LOOK_S, taken_bytes, slowed)

    # -- the Sender's frontend, and its ledger

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Hand an edge to the session; under the Sender's lock."""
        try:
            self.session.send_state_changed(state, change)
        except Exception:
            raise
        except BaseException as error:
            raise as_exception(error) from error  # the Sender contains exceptions only

    def ledger_grew(self) -> None:
        self.host.registration.run_soon(self._read_ledger, _LEDGER)

    def _read_ledger(self) -> None:
        for entry in self.host.sender.unread_ledger():
            self._call("ledger_entry", self.session.ledger_entry, entry)

    # -- deadlines

    def set_timer(self, when: float | None) -> None:
        """Call the session's `timer` at `when`: see `Connection.set_timer`."""
        due = _NEVER if when is None else when
        if due != self._timer_due:
            self._timer_due = due
            self._arm()

    def set_protocol_timer(self, when: float | None) -> None:
        """Do the same for what speaks the session's protocol: the session has the other one for itself."""
        self._protocol_due = _NEVER if when is None else when
        self._arm()

    def _arm(self, at_latest: float = _NEVER) -> None:
        group = self.group
        if group is None or self.host.over:
            return
        when = min(self._timer_due, self._protocol_due, self._slowed_until, at_latest)
        if self._held_end is not None:
            when = min(when, self._held_end[0])
        if when < _NEVER:
            group.deadlines.set(self, when)
        else:
            group.deadlines.remove(self)

    def deadline_due(self, now: float) -> None:
        """Call what is due; called by the group."""
        if now >= self._slowed_until:
            self._slowed_until = _NEVER
            self.receiver.resume(_SLOWED)
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

    def _call_timer(self, session: SessionHooks, now: float) -> None:
        if self.ending is not None:
            return
        began = self._begin_turn()
        self._call("timer", session.timer, now)
        self._charge(began)

    # -- placing

    def load(self) -> float:
        """Return how much work this connection is, in viewers of a stream, for placing and rebalancing. Any thread.

        Serving is counted as 1; what it sends us counts by its mean rate, since a publisher's media is parsed and
        inspected message by message.
        """
        open_s = max(self._now() - self.opened_at, _LEAST_MEAN_S)
        return 1.0 + self.receiver.bytes_in / open_s / INPUT_BYTES_PER_VIEWER_S

    def movable(self) -> bool:
        """Return whether the connection may go to another thread: not while a coroutine runs on this one. Any thread.

        Otherwise two threads would work for one session. Nor while its socket lingers, nor where it is pinned.
        """
        coroutines = self._coroutines  # read once: the end of the connection lets it go
        running = coroutines is not None and coroutines.running
        return not (self.host.over or running or self.session.pinned)

    # -- calling the session

    def describe(self) -> str:
        return f"connection {self.host.number} ({join_host_port(*self.host.peer)})"

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> bool:
        """Call on the connection's own thread: see `Connection.call_soon`."""
        with self._lock:
            if self.ending is not None:
                return False
            if self._calls is None:
                self._calls = deque()
            if len(self._calls) >= MAX_CALLS:
                raise LocalProtocolError(
                    f"call_soon of {self.describe()}: {MAX_CALLS} calls wait for its thread already",
                    hint="a handler blocks the thread, or calls are asked for faster than they run: wait for some",
                )
            self._calls.append((callback, args))
        self.host.registration.run_soon(self._run_calls, _CALLS)
        return True

    def _run_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, None
        for callback, args in calls or ():
            if self.ending is not None:
                return
            self._call(getattr(callback, "__name__", "call"), callback, *args)

    def handler_failed(self, where: str, error: BaseException) -> None:
        """Report that a handler of the session raised. Any thread."""
        what = f"{where} of {self.describe()}"
        if self._home is not None:
            self._home.report(what, error)
        else:
            report(log_error, what, error)  # it has not been on a group yet

    def _handler_failed(self, where: str, error: BaseException) -> None:
        """End the connection for what a handler raised; report it unless it is the peer's fault."""
        if self.host.over and isinstance(error, ClosedError):
            return  # a coroutine that was told, as it waited, that the connection is over
        reason, details = handler_reason(error)
        if reason is CloseReason.INTERNAL:
            self.handler_failed(where, error)
        self.terminate(reason, details)

    def _call(self, where: str, method: Callable[..., _T], *args: Any, **options: Any) -> _T | None:
        """Call code of the application; what it raises ends the connection."""
        try:
            return method(*args, **options)
        except BaseException as error:  # noqa: BLE001 - one session's fault must not cost the others their thread
            self._handler_failed(where, error)
            return None

    def _call_session(self, group: PollGroup | None, where: str, method: Callable[..., Any], *args: Any) -> None:
        """Call a method of the session that may be a coroutine function."""
        answer, then = self._call(where, method, *args), None
        if not inspect.iscoroutine(answer):
            return
        if where == "opened":
            self.receiver.pause(_OPENING, "opening")
            then = partial(self.receiver.resume, _OPENING)
        self._call(where, self.start, group, answer, where, then)

    def start(
        self,
        group: PollGroup | None,
        coroutine: Coroutine[Any, Any, Any],
        where: str,
        then: Callable[[], object] | None = None,
        offered_bytes: int = 0,
    ) -> None:
        """Run a coroutine of the session's on the loop of `group`. None: no loop is left, and it is given up."""
        if group is None:
            coroutine.close()
            return
        if self._coroutines is None:
            self._coroutines = Coroutines(self._handler_failed)
            if self.host.over:  # one of `closed`, which the end of its loop may cancel
                self._coroutines.cancel()
        self._coroutines.start(group.loop, coroutine, where, then, offered_bytes)
