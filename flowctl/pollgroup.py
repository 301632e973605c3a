"""A poll group: one thread, one loop, one deferred processor, and the connections that live on it.

Theory of operation. A connection (a *pollable*) belongs to one group at a time. All its handlers, readiness callbacks,
deferred jobs and deadlines run on that group's thread, so they need no lock between them. Being placed on a group
takes two steps on two threads: the caller of `PollGroup.add_pollable` binds the connection's registration to the
group's processor, so that work can be scheduled from then on; the group's thread then calls ``attached``, and only
after that lets the work run. `migrate` is the same between two groups: ``detached`` on the old thread, the
registration moves with its jobs, ``attached`` on the new thread, then the jobs. Between the two calls nothing of the
connection runs anywhere.

The loop itself, and what runs on it, is in `LoopCore`.
"""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.loop.core import LoopCore
from flowctl.loop.faults import ErrorHook, log_error
from flowctl.loop.placement import Placement, Pollable, PollGroupStatistics, is_movable, load_of
from flowctl.loop.thread import LoopThread, default_loop_factory
from flowctl.loop.work import WorkBook

if TYPE_CHECKING:
    from flowctl.deferred import Registration

__all__ = ["GroupState", "LoopFactory", "PollGroup", "PollGroupStatistics", "Pollable", "default_loop_factory"]

#: Makes the loop of a group.
LoopFactory = Callable[[], asyncio.AbstractEventLoop]

#: One receive buffer per group, lent to each connection for the length of one handler. One read of a socket gives at
#: most what its receive buffer holds, 128 KiB by Linux's default (tcp_rmem), and autotuning goes higher.
DEFAULT_SCRATCH_BYTES: Final = 256 * 1024

#: Rounds that jobs scheduled by ``detached`` get when a group stops; a job that always wants another must not hold it.
_LAST_ROUNDS: Final = 16


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


class PollGroup(LoopCore):
    """One thread with one loop, one `DeferredProcessor`, and the pollables that live on it.

    Args:
        name: of the group and its thread, for logs and statistics.
        loop_factory: makes the loop. None: uvloop where it is installed, else asyncio's own.
        clock: monotonic seconds, for deadlines, load figures and `PollGroup.now`.
        on_error: told of every exception of a handler; what it raises itself is logged. None:
            `flowctl.deferred.log_error`.
        scratch_bytes: size of the shared receive buffer, 4 KiB or more.
    """

    __slots__ = (
        "_ended",
        "_left",
        "_loop_factory",
        "_placements",
        "_state",
        "_thread",
        "_weight",
        "bytes_in",
        "bytes_out",
        "scratch",
        "work",
    )

    def __init__(
        self,
        name: str,
        *,
        loop_factory: LoopFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_error: ErrorHook | None = None,
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
    ) -> None:
        if scratch_bytes < 4096:
            raise LocalProtocolError(f"scratch_bytes is {scratch_bytes}; it must be at least 4096")
        super().__init__(name, clock, log_error if on_error is None else on_error)
        self._loop_factory: Final = default_loop_factory if loop_factory is None else loop_factory
        #: Shared receive buffer: any code on this thread may fill it; none may keep a view of it.
        self.scratch: Final = memoryview(bytearray(scratch_bytes))
        #: Connections add to these on this thread; any thread may read them.
        self.bytes_in = 0
        self.bytes_out = 0
        #: What the peers of the connections here make this thread do; this thread only.
        self.work: Final = WorkBook(self._next_turn)
        self._state = GroupState.NEW  # guarded by _lock
        self._placements: dict[int, Placement] = {}  # by id(pollable)  # guarded by _lock
        self._weight = 0.0  # sum of the placements' weights  # guarded by _lock
        self._ended: Final = threading.Event()  # the group has stopped; for stop() of a loop that is not ours
        self._thread: LoopThread | None = None  # set by start(); None on a loop that is not ours
        self._left = False  # the pollables were told to leave; this group's thread only

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
            self._thread = LoopThread(self.name, loop, self._end, self._report)
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
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
    ) -> Self:
        """Return a running group on the loop that runs in the calling thread, for tests and command-line tools.

        `stop` then leaves thread and loop alone. Arguments as for the class.

        Raises:
            RuntimeError: no loop runs in this thread.
        """
        loop = asyncio.get_running_loop()
        group = cls(name, clock=clock, on_error=on_error, scratch_bytes=scratch_bytes)
        group._advance(_Input.START)
        group._use_loop(loop)
        group._enter()
        group._advance(_Input.STARTED)
        return group

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Detach every pollable, run what jobs that leaves, and end loop and thread; idempotent.

        New pollables are refused from the first moment. It does not wait for connections to drain: close them before
        (``close_after_flush``), then stop. Called from a handler of this very group it only sets the end going.

        Args:
            deadline_s: how long to wait for the thread, 0 or more. When a handler hangs for longer, the daemon
                thread is left behind.

        Returns:
            True if the group has stopped. False if it has not yet.
        """
        state = self._advance(_Input.STOP)
        if state is GroupState.STOPPED:
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
        placement = Placement(pollable, registration, load_of(pollable, self._report), self.clock())
        self._accept(placement)
        try:
            registration.bind(self.processor, hold=True)
        except BaseException:
            self._forget(placement)
            raise
        self._post_attach(placement)

    def remove_pollable(self, pollable: Pollable) -> bool:
        """Take `pollable` off this group: ``pollable.detached(group)`` on its thread, then unbind; any thread.

        On the group's own thread all of it is done when this returns; from another thread it is queued. Jobs still
        pending stay with the registration; `Registration.release` gets rid of them.

        Returns:
            True if the pollable was here. False if not, for example because it has just moved to another group.
        """
        with self._lock:
            placement = self._placements.get(id(pollable))
        if placement is None or not self._forget(placement):
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
        with self._lock:
            placement = self._placements.get(id(pollable))
        if placement is None:
            return False
        if other is not self:
            self._post(self._move, placement, other)
        return True

    def pollables(self) -> list[Placement]:
        """Return the placements of this moment, oldest first; for rebalancing and inspection, any thread."""
        with self._lock:
            return list(self._placements.values())

    def refresh_weight(self) -> float:
        """Ask every pollable for its load and return the sum; O(n), any thread."""
        loads = [(placement, load_of(placement.pollable, self._report)) for placement in self.pollables()]
        with self._lock:
            for placement, load in loads:
                if not placement.gone:
                    self._weight += load - placement.weight
                    placement.weight = load
            return self._weight

    def statistics(self) -> PollGroupStatistics:
        """Return a frozen snapshot; O(1), any thread."""
        with self._lock:
            pollables, weight, errors = len(self._placements), self._weight, self._error_count
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

    def _next_turn(self, callback: Callable[[], None]) -> None:
        """Call back in the loop's next turn; not at all once there is none."""
        with suppress(ClosedError):
            self._post(callback)

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
        with self._lock:
            placements = list(self._placements.values())
            self._placements.clear()
            self._weight = 0.0
            for placement in placements:
                placement.gone = True
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

    def _accept(self, placement: Placement) -> None:
        """Enter `placement` in the books, so that it counts for placing others before it is attached."""
        with self._lock:
            if self._state is not GroupState.RUNNING:
                kind = LocalProtocolError if self._state is GroupState.NEW else ClosedError
                raise kind(f"poll group {self.name!r} is {self._state.value}, not running")
            if id(placement.pollable) in self._placements:
                raise LocalProtocolError(f"the pollable is on poll group {self.name!r} already")
            self._placements[id(placement.pollable)] = placement
            self._weight += placement.weight

    def _forget(self, placement: Placement) -> bool:
        """Take `placement` out of the books; False if somebody else did."""
        with self._lock:
            if placement.gone:
                return False
            placement.gone = True
            del self._placements[id(placement.pollable)]
            # Starts from a clean zero when empty: sums of floats drift.
            self._weight = self._weight - placement.weight if self._placements else 0.0
            return True

    def _post_attach(self, placement: Placement) -> None:
        try:
            self._post(self._attach, placement)
        except ClosedError:
            # The group stopped since `_accept`; it found the placement in its books and called `detached`.
            placement.registration.unbind()

    def _attach(self, placement: Placement) -> None:
        if placement.gone:
            return
        placement.attached = True
        if self._guarded(placement.pollable.attached, self):
            placement.registration.activate()
        elif self._forget(placement):
            self._detach(placement)

    def _detach(self, placement: Placement) -> None:
        self._guarded(placement.pollable.detached, self)
        placement.registration.unbind()

    def _move(self, placement: Placement, other: PollGroup) -> None:
        """Carry out `migrate`; a callback of the loop, so that no handler of the pollable is on the stack."""
        if other.state is not GroupState.RUNNING:
            self._report(f"move to poll group {other.name!r}", ClosedError(f"it is {other.state.value}"))
            return
        if not is_movable(placement.pollable, self._report):
            return
        if not self._forget(placement):
            return  # removed meanwhile
        self._guarded(placement.pollable.detached, self)
        registration = placement.registration
        # It is entered in the other group's books only now that nothing of it runs here: somebody who finds it there
        # may remove it at once. Should the other group have stopped in between, it comes back.
        for group in (other, self):
            if registration.released:
                return  # by `detached`, or meanwhile: there is nobody to be moved
            moved = Placement(placement.pollable, registration, placement.weight, group.clock())
            try:
                registration.migrate(group.processor, hold=True)
                group._accept(moved)  # noqa: SLF001  (the same class, another group)
            except (ClosedError, LocalProtocolError) as error:
                self._report(f"move to poll group {group.name!r}", error)
            else:
                group._post_attach(moved)  # noqa: SLF001  (the same class, another group)
                return
        registration.unbind()
