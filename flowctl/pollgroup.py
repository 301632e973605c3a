"""A poll group: one thread, one loop, one deferred processor, and the connections that live on it.

Theory of operation. A connection (a *pollable*) belongs to one group at a time. All its handlers, readiness callbacks,
deferred jobs and deadlines run on that group's thread, so they need no lock between them. Being placed on a group
takes two steps on two threads: the caller of `PollGroup.add_pollable` binds the connection's registration to the
group's processor, so that work can be scheduled from then on; the group's thread then calls ``attached``, and only
after that lets the work run. `migrate` is the same between two groups: ``detached`` on the old thread, the
registration moves with its jobs, ``attached`` on the new thread, then the jobs. Between the two calls nothing of the
connection runs anywhere.

The loop is asyncio's or uvloop's and is used for three things: readiness of descriptors (no transports: they hide
EAGAIN), `call_soon`, and one timer for all deadlines. A round of deferred jobs is a `call_soon` callback; when it
leaves work, the next one is queued at once, so that the loop polls without sleeping, and descriptors that became
ready get their turn in between. Every handler is run through `PollGroup._guarded`: it is timed, and whatever it raises
is reported and contained.
"""

from __future__ import annotations

import asyncio
import enum
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import structlog

from flowctl.core.flow.sharedstall import SharedStall
from flowctl.core.loop.deadlines import Deadlines
from flowctl.core.loop.faults import ErrorHook, log_error, report
from flowctl.core.loop.loadmeter import LoadMeter
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.loop.placement import Placement, Placements, is_movable, load_of
from flowctl.core.loop.processor import MAX_JOBS_PER_ROUND, DeferredProcessor, DeferredStatistics
from flowctl.core.loop.thread import LoopThread, default_loop_factory
from flowctl.core.loop.watches import FdWatches, HasFileno
from flowctl.core.loop.work import ThreadWork
from flowctl.errors import ClosedError, InternalError, LocalProtocolError

if TYPE_CHECKING:
    from flowctl.deferred import Registration

__all__ = ["GroupState", "LoopFactory", "PollGroup", "PollGroupStatistics", "Pollable", "default_loop_factory"]

#: Makes the loop of a group.
LoopFactory = Callable[[], asyncio.AbstractEventLoop]

#: One receive buffer per group, lent to each connection for the length of one handler. One read of a socket gives at
#: most what its receive buffer holds, 128 KiB by Linux's default (tcp_rmem), and autotuning goes higher.
SCRATCH_BYTES: Final = 256 * 1024

#: How long a round of jobs may go on before descriptors and timers get their turn: jobs are of some 60 us, but one
#: that goes on with the input of a peer that sends nothing but work takes 4 ms.
ROUND_S: Final = 0.008

#: Rounds that jobs scheduled by ``detached`` get when a group stops; a job that always wants another must not hold it.
_LAST_ROUNDS: Final = 16

_log: Final = structlog.get_logger("flowctl.live")


class GroupState(enum.Enum):
    """Where a group is in its life."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


class _Input(enum.Enum):
    START = "start"
    STARTED = "started"
    STOP = "stop"
    ENDED = "ended"


_TABLE: Final = {
    (GroupState.NEW, _Input.START): GroupState.STARTING,
    (GroupState.NEW, _Input.STOP): GroupState.STOPPED,
    (GroupState.STARTING, _Input.STARTED): GroupState.RUNNING,
    (GroupState.STARTING, _Input.ENDED): GroupState.STOPPED,
    (GroupState.RUNNING, _Input.STOP): GroupState.STOPPING,
    (GroupState.RUNNING, _Input.ENDED): GroupState.STOPPED,
    (GroupState.STOPPING, _Input.STOP): GroupState.STOPPING,
    (GroupState.STOPPING, _Input.ENDED): GroupState.STOPPED,
    (GroupState.STOPPED, _Input.STOP): GroupState.STOPPED,
}


class Pollable(Protocol):
    """A connection, or anything else that lives on the thread of one poll group at a time.

    It may also have a method ``load() -> float``: how much work it is, in units of an ordinary connection (a
    publisher with many viewers is more). It is asked when it is placed and at each rebalancing, from any thread, so
    it must only read counters. Without it every pollable weighs 1.

    And it may have a method ``movable() -> bool``, asked from any thread and again on its own thread: False leaves it
    where it is, because something of it (a coroutine) runs on this thread's loop and cannot be taken along.
    """

    def attached(self, group: PollGroup) -> None:
        """Start living on `group`, on its thread: watch descriptors, set deadlines. Jobs run only after this."""

    def detached(self, group: PollGroup) -> None:
        """Stop living on `group`, on its thread: unwatch descriptors, remove deadlines.

        Called once for each placement, also when ``attached`` was not reached because the pollable was removed or
        the group stopped first, or when ``attached`` raised. If ``group.state`` is not RUNNING the group is
        stopping and nothing else will own the pollable: it should close itself.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PollGroupStatistics:
    """One group at one moment; the figures of the running turn may be a turn apart."""

    name: str
    pollables: int  #: placed here, whether attached yet or not
    weight: float  #: sum of their loads when last asked
    busy_fraction: float  #: share of time, 0 to 1, that handlers ran, smoothed over 5 s
    turns: int  #: handlers run: readiness, rounds of deferred jobs, deadlines, `call_soon`
    longest_turn_s: float  #: the longest of them since the start
    errors: int  #: exceptions of handlers, contained
    bytes_in: int  #: received by its connections
    bytes_out: int  #: sent by its connections
    watched: int  #: file descriptors watched
    deadlines: int  #: owners with a deadline set
    deferred: DeferredStatistics  #: its deferred jobs


class PollGroup:
    """One thread with one loop, one `DeferredProcessor`, and the pollables that live on it.

    Args:
        name: of the group and its thread, for logs and statistics.
        loop_factory: makes the loop. None: uvloop where it is installed, else asyncio's own.
        clock: monotonic seconds, for deadlines, load figures and `PollGroup.now`.
        on_error: told of every exception of a handler; what it raises itself is logged. None:
            `flowctl.deferred.log_error`.
    """

    def __init__(
        self,
        name: str,
        *,
        loop_factory: LoopFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_error: ErrorHook | None = None,
    ) -> None:
        self.name: Final = name
        self.clock: Final = clock
        self._on_error: Final = log_error if on_error is None else on_error
        self._lock: Final = OwnedLock()  # a leaf: nothing else is locked or called under it
        self._state = GroupState.NEW  # guarded by _lock
        self._error_count = 0  # guarded by _lock
        self._placements: Final[Placements[Pollable]] = Placements(name)
        #: Runs the jobs of the registrations placed here.
        self.processor: Final = DeferredProcessor(self._wake, self.report)
        #: One deadline per owner; this group's thread only.
        self.deadlines: Final = Deadlines(self._arm_timer, self.report)
        self._loop_factory: Final = default_loop_factory if loop_factory is None else loop_factory
        #: Shared receive buffer: any code on this thread may fill it; none may keep a view of it.
        self.scratch: Final = memoryview(bytearray(SCRATCH_BYTES))
        #: Connections add to these on this thread; any thread may read them.
        self.bytes_in = 0
        self.bytes_out = 0
        #: Stalls that most viewers here have at once; this thread only, but for its `span`.
        self.stall: Final = SharedStall(self._say_stall)
        #: What the peers of the connections here make this thread do; this thread only.
        self.work: Final = ThreadWork(self._next_turn)
        self._ended: Final = threading.Event()  # the group has stopped; for stop() of a loop that is not ours
        self._thread: LoopThread | None = None  # set by start(); None on a loop that is not ours
        #: Identifier of the group's thread; None until its loop runs.
        self.thread_id: int | None = None
        # Set once, before any other thread is let in:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watches: FdWatches | None = None
        # Only for the group's thread:
        self._meter: Final = LoadMeter(clock())
        self._timer: asyncio.TimerHandle | None = None  # the one timer, for `deadlines`
        self._depth = 0  # handlers on the stack
        #: Whether the handler that runs has more to do, of which each part may send: what is sent may be gathered.
        self.many_follow = False
        self._left = False  # the pollables were told to leave
        self._process_id: int | None = None  # of the process whose thread it is

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the group's own daemon thread and return when its loop runs.

        Raises:
            LocalProtocolError: started before.
            InternalError: the thread does not get going within 10 s.
        """
        self._advance(_Input.START)
        try:
            loop = self._loop_factory()
            self._thread = LoopThread(self.name, loop, self._end, self.report, self._forget_thread)
            self._use_loop(loop)
            loop.set_exception_handler(self._loop_exception)
            loop.call_soon(self._enter)
            self._thread.start()
        except BaseException:
            self._advance(_Input.ENDED)
            raise
        self._advance(_Input.STARTED)

    @classmethod
    def on_running_loop(
        cls,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: ErrorHook | None = None,
    ) -> Self:
        """Return a running group on the loop that runs in the calling thread, for tests and command-line tools.

        `stop` then leaves thread and loop alone. Arguments as for the class.

        Raises:
            RuntimeError: no loop runs in this thread.
        """
        loop = asyncio.get_running_loop()
        group = cls(name, clock=clock, on_error=on_error)
        group._advance(_Input.START)
        group._use_loop(loop)
        group._enter()
        group._advance(_Input.STARTED)
        return group

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Detach every pollable, run what jobs that leaves, and end loop and thread; idempotent.

        New pollables are refused from the first moment. It does not wait for connections to drain: close them before
        (``close_after_flush``), then stop. Called from a handler of this very group it only sets the end going. In a
        forked child there is nothing to stop.

        Args:
            deadline_s: how long to wait for the thread, 0 or more. When a handler hangs for longer, the daemon
                thread is left behind.

        Returns:
            True if the group has stopped. False if it has not yet.
        """
        if self.forked or self._advance(_Input.STOP) is GroupState.STOPPED:
            return True
        if self._thread is not None:
            self._thread.end_at = time.monotonic() + deadline_s
        try:
            if self._thread is None and self.in_thread() and not self._depth:
                self._end()
            else:
                self._post(self._end if self._thread is None else self._leave_and_stop_loop)
        except ClosedError:
            pass  # the thread is past the end of its loop already
        if self.in_thread():
            return self.state is GroupState.STOPPED
        return self._ended.wait(deadline_s) if self._thread is None else self._thread.join(deadline_s)

    @property
    def state(self) -> GroupState:
        """Where the group is in its life; any thread."""
        with self._lock:
            return self._state

    # --- what it is, any thread ----------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that started it; any thread.

        Its thread is in the parent, and its locks may be held for ever here: none is taken.
        """
        return self._process_id not in {None, os.getpid()}

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop.

        Raises:
            LocalProtocolError: the group was not started.
        """
        if self._loop is None:
            raise LocalProtocolError(f"poll group {self.name!r} was not started")
        return self._loop

    def in_thread(self) -> bool:
        """Tell whether the caller is on the group's thread."""
        return threading.get_ident() == self.thread_id

    def now(self) -> float:
        """Return the time on the group's clock, in seconds; any thread."""
        return self.clock()

    def processor_share(self) -> float:
        """Return the processor time of the thread over the time its handlers took, 0 to 1, of late; any thread.

        Time on the group's clock times this is about the processor time that was used in it, without a system call.
        """
        return self._meter.processor_share

    def busy_fraction(self) -> float:
        """Return the share of time, 0 to 1, that handlers ran in the last seconds; any thread."""
        return self._meter.busy_fraction(self.clock())

    def gather_pause_s(self) -> float:
        """Return for how long input that may wait does at present, in seconds; any thread."""
        return 0.0 if self._watches is None else self._watches.gather_pause_s

    def strained(self) -> bool:
        """Return whether the thread had no room a moment ago: what is late may be late by its fault; any thread."""
        return self._meter.strained(self.clock())

    def _say_stall(self, over: bool, count: int, served: int, lasted_s: float) -> None:  # noqa: FBT001 - as `SharedStall`
        if over:
            event = "most viewers go on" if count else "the viewers that had stopped are gone"
        else:
            at = time.strftime("%H:%M:%SZ", time.gmtime(time.time() - lasted_s))
            event = f"most viewers stopped at {at}: a shared line"
        _log.warning(event, stopped=count, viewers=served, lasted_s=round(lasted_s, 1), thread=self.name)

    def report(self, where: str, error: BaseException) -> None:
        """Count and report an exception that a handler raised; any thread, never raises.

        Args:
            where: what was being done, for example ``"received of connection 7"``.
            error: what it raised; what is no `Exception` is handed to the hook as one.
        """
        with self._lock:
            self._error_count += 1
        report(self._on_error, f"{self.name}: {where}", error)
        main = threading.current_thread() is threading.main_thread()
        if main and isinstance(error, KeyboardInterrupt) and self._loop is not None:
            # Ctrl-C where a group runs on the main thread: it ends its loop, but between two handlers.
            with suppress(RuntimeError):
                self._loop.call_soon(_raise, error)

    # --- pollables -----------------------------------------------------------------------------------------------

    def add_pollable(self, pollable: Pollable, registration: Registration) -> None:
        """Place `pollable` on this group; any thread.

        `registration` is bound to this group's processor before this returns. ``pollable.attached(group)`` is called
        on the group's thread afterwards, never from within this call; jobs scheduled before that wait for it.
        If ``attached`` raises, that is reported and the pollable removed again.

        Raises:
            LocalProtocolError: the pollable is here already, the registration is bound elsewhere, or the group was
                not started.
            ClosedError: the group is stopping, or the registration is released.
        """
        placement = Placement(pollable, registration, load_of(pollable, self.report), self.clock())
        self._accept(placement)
        try:
            registration.bind(self.processor, hold=True)
        except BaseException:
            self._placements.remove(placement)
            raise
        self._post_attach(placement)

    def remove_pollable(self, pollable: Pollable) -> bool:
        """Take `pollable` off this group: ``pollable.detached(group)`` on its thread, then unbind; any thread.

        On the group's own thread all of it is done when this returns; from another thread it is queued. Jobs still
        pending stay with the registration; `Registration.release` gets rid of them.

        Returns:
            True if the pollable was here. False if not, for example because it has just moved to another group.
        """
        placement = self._placements.find(pollable)
        if placement is None or not self._placements.remove(placement):
            return False
        if self.in_thread():
            self._detach(placement)
        else:
            try:
                self._post(self._detach, placement)
            except ClosedError:  # the loop ended meanwhile; there is no thread left to call it on
                placement.registration.unbind()
        return True

    def migrate(self, pollable: Pollable, other: PollGroup) -> bool:
        """Move `pollable` to `other` without losing or reordering a job; any thread.

        It is done at the next turn of this group's loop, never inside a handler: ``detached(self)`` on this thread,
        the registration moves with its pending jobs, ``attached(other)`` on the other thread, then the jobs. A pollable
        that is not ``movable()`` by then stays.

        Returns:
            True if the move is queued (or `other` is this group). False if the pollable is not here.
        """
        placement = self._placements.find(pollable)
        if placement is None:
            return False
        if other is not self:
            self._post(self._move, placement, other)
        return True

    def pollables(self) -> list[Placement[Pollable]]:
        """Return the placements of this moment, oldest first; for rebalancing and inspection, any thread."""
        return self._placements.all()

    def refresh_weight(self) -> float:
        """Ask every pollable for its load and return the sum; O(n), any thread."""
        return self._placements.refresh_weight(self.report)

    def statistics(self) -> PollGroupStatistics:
        """Return a frozen snapshot; O(1), any thread."""
        pollables, weight = self._placements.figures()
        with self._lock:
            errors = self._error_count
        return PollGroupStatistics(
            name=self.name,
            pollables=pollables,
            weight=weight,
            busy_fraction=self._meter.busy_fraction(self.clock()),
            turns=self._meter.turns,
            longest_turn_s=self._meter.longest_turn_s,
            errors=errors,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            watched=0 if self._watches is None else len(self._watches),
            deadlines=self.deadlines.count,
            deferred=self.processor.statistics(),
        )

    # --- work on the group's thread ------------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` with `args` on the group's thread, soon, in the order of the calls; any thread.

        Raises:
            LocalProtocolError: the group was not started.
            ClosedError: its loop is closed.
        """
        self._post(self._guarded, callback, *args)

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call `callback` with `args` after `delay_s` seconds; group's thread only.

        For the few timers of a group (a flush interval); connections use `deadlines`.

        Returns:
            A handle with ``cancel()``.

        Raises:
            LocalProtocolError: called on another thread.
        """
        self._check_thread("call_later")
        return self.loop.call_later(delay_s, self._guarded, callback, *args)

    def watch_input(self, source: int | HasFileno, callback: Callable[[], Any], *, gather: bool = False) -> None:
        """Call `callback` on each turn while `source` is readable; group's thread only. Replaces an earlier callback.

        Args:
            source: the socket itself: uvloop then keeps its number open until it is unwatched. Given a bare number
                that is closed too early, uvloop aborts the process.
            callback: run with no lock held.
            gather: whether input may wait for up to 36 ms where the thread is busy with such input, so that messages
                which are that close together are read at once.

        Raises:
            LocalProtocolError: called on another thread.
            ClosedError: `source` is closed.
        """
        self._watches_here("watch_input").watch_input(source, callback, gather=gather)

    def watch_end(self, source: int | HasFileno, callback: Callable[[bool], Any]) -> None:
        """Watch `source`, which is not read at present, for the end of its peer instead of for input.

        Costs nothing until it comes. Else as `watch_input`, which replaces it, and `unwatch_input`, which ends it.
        Where the system has no epoll nothing is ever told.

        Args:
            source: see `watch_input`.
            callback: called once with False when the peer has ended its stream, and once with True when nothing
                passes any more in either direction.
        """
        self._watches_here("watch_end").watch_end(source, callback)

    def watch_output(self, source: int | HasFileno, callback: Callable[[], Any]) -> None:
        """Call `callback` on each turn while `source` is writable; else as `watch_input`."""
        self._watches_here("watch_output").watch_output(source, callback)

    def unwatch_input(self, source: int | HasFileno) -> bool:
        """Stop watching `source` for input or the peer's end; no callback runs any more. Group's thread only.

        Call it before the socket is closed, for its number may belong to another socket the moment after. What is
        not watched, or closed already, is no error.

        Returns:
            True if it was watched.
        """
        return self._watches_here("unwatch_input").unwatch_input(source)

    def unwatch_output(self, source: int | HasFileno) -> bool:
        """Stop watching `source` for output; else as `unwatch_input`."""
        return self._watches_here("unwatch_output").unwatch_output(source)

    def rest_output(self, source: int | HasFileno) -> None:
        """Call nothing until `source` is watched for output again, which costs no system call then; it stays watched.

        Call `unwatch_output` before it is closed all the same.
        """
        self._watches_here("rest_output").rest_output(source)

    # --- life, inner steps ---------------------------------------------------------------------------------------

    def _advance(self, event: _Input) -> GroupState:
        with self._lock:
            state = _TABLE.get((self._state, event))
            if state is None:
                raise LocalProtocolError(f"poll group {self.name!r} is {self._state.value}: cannot {event.value}")
            self._state = state
            return state

    def _leave_and_stop_loop(self) -> None:
        self._leave()
        if self._thread is not None:
            self._thread.stop()

    def _end(self) -> None:
        """Last step on the group's thread, however the loop came to its end."""
        self._leave()
        self._advance(_Input.ENDED)
        self._ended.set()

    def _leave(self) -> None:
        """Detach all, run the jobs that this leaves, unbind all."""
        if self._left:
            return
        self._left = True
        if self.state is GroupState.RUNNING:
            self._advance(_Input.STOP)  # the loop ended by itself: refuse newcomers all the same
        placements = self._placements.close()
        for placement in placements:
            self._guarded(placement.pollable.detached, self)
        for _ in range(_LAST_ROUNDS):
            if not self.processor.run_round():
                break
        for placement in placements:
            placement.registration.unbind()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watches is not None:
            self._watches.clear()

    # --- pollables, inner steps ----------------------------------------------------------------------------------

    def _accept(self, placement: Placement[Pollable]) -> None:
        """Add `placement` to the lists, so that it counts for placing others before it is attached."""
        state = self.state
        if state is not GroupState.RUNNING:  # one that stops from now on finds it in the lists, or refuses it there
            kind = LocalProtocolError if state is GroupState.NEW else ClosedError
            raise kind(f"poll group {self.name!r} is {state.value}, not running")
        self._placements.enter(placement)

    def _post_attach(self, placement: Placement[Pollable]) -> None:
        try:
            self._post(self._attach, placement)
        except ClosedError:
            # The group stopped since `_accept`; it found the placement in its lists and called `detached`.
            placement.registration.unbind()

    def _attach(self, placement: Placement[Pollable]) -> None:
        if placement.gone:
            return
        placement.attached = True
        if self._guarded(placement.pollable.attached, self):
            placement.registration.activate()
        elif self._placements.remove(placement):
            self._detach(placement)

    def _detach(self, placement: Placement[Pollable]) -> None:
        self._guarded(placement.pollable.detached, self)
        placement.registration.unbind()

    def _move(self, placement: Placement[Pollable], other: PollGroup) -> None:
        """Carry out `migrate`; a callback of the loop, so that no handler of the pollable is on the stack."""
        if other.state is not GroupState.RUNNING:
            self.report(f"move to poll group {other.name!r}", ClosedError(f"it is {other.state.value}"))
            return
        if not is_movable(placement.pollable, self.report):
            return
        if not self._placements.remove(placement):
            return  # removed meanwhile
        self._guarded(placement.pollable.detached, self)
        registration = placement.registration
        # It is entered in the other group's lists only now that nothing of it runs here: somebody who finds it there
        # may remove it at once. Should the other group have stopped in between, it comes back.
        for group in (other, self):
            if registration.released:
                return  # by `detached`, or meanwhile: there is nothing to move
            moved = Placement(placement.pollable, registration, placement.weight, group.clock())
            try:
                registration.migrate(group.processor, hold=True)
                group._accept(moved)  # noqa: SLF001  (the same class, another group)
            except (ClosedError, LocalProtocolError) as error:
                self.report(f"move to poll group {group.name!r}", error)
            else:
                group._post_attach(moved)  # noqa: SLF001  (the same class, another group)
                return
        registration.unbind()

    # --- handlers, inner steps -----------------------------------------------------------------------------------

    def _use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process_id = os.getpid()
        self._loop = loop
        self._watches = FdWatches(
            loop, self._guarded, self.report, clock=self.clock, processor_share=self.processor_share
        )

    def _enter(self) -> None:
        """First step on the group's thread; a job scheduled before it was not heard by `_wake`."""
        self.thread_id = self.deadlines.thread_id = threading.get_ident()
        self.loop.call_soon(self._round)

    def _forget_thread(self) -> None:
        """Last step on the group's thread: the system gives its number to another one."""
        self.thread_id = self.deadlines.thread_id = None

    def _post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Queue a callback on the loop; the loop keeps the order of all calls, from whatever thread."""
        loop = self._loop or self.loop  # the property says what is wrong where there is none
        try:
            if threading.get_ident() == self.thread_id:
                loop.call_soon(callback, *args)  # spares the write to the wake-up pipe
            else:
                loop.call_soon_threadsafe(callback, *args)
        except RuntimeError as error:
            raise ClosedError(f"the loop of poll group {self.name!r} is closed") from error

    def _guarded(self, callback: Callable[..., Any], *args: Any) -> bool:
        """Run a handler: time it, report and contain what it raises; True if that is nothing."""
        began = self.clock()
        self._depth += 1
        try:
            callback(*args)
        except BaseException as error:  # noqa: BLE001  (one connection's fault must not cost the others their thread)
            self.report(getattr(callback, "__qualname__", "handler"), error)
            return False
        else:
            return True
        finally:
            self._depth -= 1
            if not self._depth:
                self._meter.count_turn(began, self.clock())

    def _loop_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take what asyncio would log: failures of tasks and of callbacks that are not ours."""
        error = context.get("exception")
        message = context.get("message", "event loop")
        self.report(message, error if isinstance(error, BaseException) else RuntimeError(message))

    def _wake(self) -> None:
        if self._loop is None:
            return  # not started: `_enter` begins with a round
        with suppress(ClosedError):  # stopped: the jobs stay pending with their registrations
            self._post(self._round)

    def _round(self) -> None:
        self._guarded(self._run_round)

    def _run_round(self) -> None:
        ends_at = self.clock() + ROUND_S
        if self.processor.run_round(MAX_JOBS_PER_ROUND, lambda: self.clock() >= ends_at):
            self.loop.call_soon(self._round)  # the poll in between does not sleep, because this is queued

    def _arm_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Rounded up to the next millisecond, the resolution of uvloop and epoll: rounded down it would strike too
        # early and spin until the time has really come.
        delay_s = math.ceil(max(0.0, when - self.clock()) * 1000) / 1000
        self._timer = self.loop.call_later(delay_s, self._deadlines_due)

    def _deadlines_due(self) -> None:
        self._timer = None
        self._guarded(self.deadlines.run_due, self.clock())

    def _watches_here(self, what: str) -> FdWatches:
        self._check_thread(what)
        if self._watches is None:  # thread_id is set after it, so this thread would not have come so far
            raise InternalError("a loop thread without a loop")
        return self._watches

    def _check_thread(self, what: str) -> None:
        if threading.get_ident() != self.thread_id:
            raise LocalProtocolError(f"{what} of poll group {self.name!r} was called on another thread")

    def _next_turn(self, callback: Callable[[], None]) -> None:
        """Call back in the loop's next turn; not at all once there is none."""
        with suppress(ClosedError):
            self._post(callback)


def _raise(error: BaseException) -> None:
    raise error
