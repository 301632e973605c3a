"""Deferred jobs: work that any thread may ask for and that one thread, the owner of a connection, carries out.

Theory of operation. A `DeferredProcessor` is the to-do list of one loop thread. A connection owns a `Registration`,
and the registration owns a few `Job` objects, made once. `Registration.schedule(job)` puts the job on the list of the
processor that the registration is bound to *now*; which one that is may change (`Registration.migrate`), which is why
callers never talk to a processor themselves.

- The list is intrusive: a job carries its own links. Scheduling and revoking are O(1) and allocate no node, so a
  server that is out of breath is not made to breathe harder by its own bookkeeping.
- Each scheduling gets the next number of its processor. A round serves the numbers that existed when it began, so a
  job that schedules itself in its own run waits for the next round: one busy connection cannot keep the loop from
  polling the others (the guard against saturation). No second list is needed, and a job taken into the running round
  can still be revoked or moved like any other.
- A registration that is not bound, or is on hold between two threads, keeps its jobs pending by itself, in order.

Locks: `Registration._lock`, then `DeferredProcessor._lock`, never two of a kind at once. Nothing of the user's runs
under them: callbacks, `wake` and `on_error` are called with both released. A caller may hold locks of its own when
it calls `schedule`, `revoke` or `release`, as long as its jobs' callbacks never need the reverse order.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

from flowctl.core.loop.faults import ErrorHook, log_error
from flowctl.core.loop.jobs import Job, Purpose
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.loop.processor import DeferredProcessor, DeferredStatistics
from flowctl.errors import ClosedError, LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MAX_JOBS_PER_REGISTRATION",
    "DeferredProcessor",
    "DeferredStatistics",
    "ErrorHook",
    "Job",
    "Purpose",
    "Registration",
    "log_error",
]

#: Most jobs one registration may make. A connection has three or four (flush, input, close); a number that grows is
#: a leak: somebody makes a job per event instead of one per purpose.
MAX_JOBS_PER_REGISTRATION: Final = 64

_by_sequence = attrgetter("sequence")


def _do_nothing() -> None:
    """Stand in for the callback of a released job, so that the job no longer keeps its connection alive."""


class Registration:
    """A connection's seat at a `DeferredProcessor`: its jobs, and where they run at present.

    Life: made unbound; `bind` (done by `PollGroup.add_pollable`), `migrate` any number of times, perhaps `unbind` and
    `bind` again, at last `release`. Jobs may be scheduled at every stage. All methods may be called from any thread
    unless they say otherwise.

    Args:
        lock: to use instead of one of its own: that of the connection, under which nothing else may be locked.
    """

    __slots__ = ("_held", "_jobs", "_late_count", "_lock", "_order", "_processor", "_released", "_target", "leaving")

    def __init__(self, lock: OwnedLock | None = None) -> None:
        self._lock: Final = lock or OwnedLock()
        self._processor: DeferredProcessor | None = None  # guarded by _lock
        self._held = True  # pending jobs stay here instead of on the processor's list  # guarded by _lock
        self._released = False  # guarded by _lock
        # Every job made, for release and migrate. A tuple: most connections have one job, and never a second.
        self._jobs: tuple[Job, ...] = ()  # guarded by _lock
        self._order = 0  # number of the newest job kept here  # guarded by _lock
        self._late_count = 0  # schedule calls after release  # guarded by _lock
        self._target: tuple[DeferredProcessor, bool] | None = None  # destination and its hold  # guarded by _lock
        #: A migration waits for the running job to end. Set under `_lock`, read by the old processor under its own.
        self.leaving = False

    # --- jobs ----------------------------------------------------------------------------------------------------

    def job(self, callback: Callable[[], bool | None], name: str = "") -> Job:
        """Make a job of this registration; once per purpose, not per use.

        Args:
            callback: the work; runs on the thread of the processor bound at that time, with no lock held. Returning
                True asks for another round; anything else does not. Its exceptions are reported and contained.
            name: for reports. Empty: the callback's own name.

        Raises:
            LocalProtocolError: more than `MAX_JOBS_PER_REGISTRATION` jobs.
            ClosedError: the registration is released.
        """
        with self._lock:
            if self._released:
                raise ClosedError("the registration is released")
            if sum(isinstance(job.purpose, str) for job in self._jobs) >= MAX_JOBS_PER_REGISTRATION:
                raise LocalProtocolError(f"a registration has at most {MAX_JOBS_PER_REGISTRATION} jobs")
            job = Job(self, callback, name or getattr(callback, "__qualname__", "job"))
            self._jobs = (*self._jobs, job)
            return job

    def run_soon(self, callback: Callable[[], bool | None], purpose: Purpose) -> bool:
        """Schedule the job for `purpose`, which is made when it is first needed; else as `schedule`.

        For what most connections never do: a job and its callback are 160 bytes.

        Args:
            callback: as for `job`; the one given first stays.
            purpose: one of a fixed set, made once. These jobs do not count against `MAX_JOBS_PER_REGISTRATION`.

        Returns:
            As `schedule`.
        """
        with self._lock:
            job = next((job for job in self._jobs if job.purpose is purpose), None)
            if job is None:
                job = Job(self, callback, purpose)
                if not self._released:
                    self._jobs = (*self._jobs, job)
        return self._schedule(job, unless_revoked=False)

    def schedule(self, job: Job) -> bool:
        """Make `job` run once, soon, on the owning thread; it is woken if it sleeps.

        Idempotent while the job is pending; nothing is allocated for it. Whatever the caller did before this call is
        visible to the run that follows it. After `release` the call is ignored and counted (`late_schedule_count`):
        a publisher must not be punished with an exception because one of its viewers has just left.

        Returns:
            True if the job became pending by this call. False if it was pending already, or after `release`.

        Raises:
            LocalProtocolError: `job` belongs to another registration.
        """
        if job.registration is not self:
            raise LocalProtocolError(f"{job!r} belongs to another registration")
        # Read without a lock on purpose: a job that is still pending at this instant has not begun, so the run to
        # come sees all that the caller did. This keeps the common case (a viewer is already marked for the next
        # flush) at a tenth of the price. `pending` never turns False on the way between two processors.
        if job.pending:
            return False
        return self._schedule(job, unless_revoked=False)

    def schedule_again(self, job: Job) -> bool:
        """Schedule a `job` that has just returned True, unless it was revoked during that run; for the processor."""
        return self._schedule(job, unless_revoked=True)

    def _schedule(self, job: Job, *, unless_revoked: bool) -> bool:
        with self._lock:
            if self._released:
                self._late_count += not unless_revoked
                return False
            if job.pending or (unless_revoked and job.revoked):
                return False
            processor = self._processor
            if processor is None or self._held:
                self._keep_locked(job)
                return True
            must_wake = processor.append(job)
        if must_wake:
            processor.wake_up()
        return True

    def revoke(self, job: Job) -> bool:
        """Take back a scheduled `job`, at any moment, also when the running round has already reached out for it.

        A callback that has begun is not stopped; but if it returns True it is not scheduled again.

        Returns:
            True if the job was pending and now will not run. False if it was not pending (it may be running).

        Raises:
            LocalProtocolError: `job` belongs to another registration.
        """
        if job.registration is not self:
            raise LocalProtocolError(f"{job!r} belongs to another registration")
        with self._lock:
            return self._revoke_locked(job)

    def release(self) -> None:
        """Revoke every job and detach from the processor for good; idempotent.

        The callbacks are dropped, so that the cycle connection, registration, job, connection is cut and the memory
        is free without the garbage collector. A callback that is running at the moment (called from another thread)
        ends normally.
        """
        with self._lock:
            for job in self._jobs:
                self._revoke_locked(job)
                job.callback = _do_nothing
            self._jobs = ()
            self._processor = None
            self._released = self._held = True
            self._target, self.leaving = None, False

    # --- where they run ------------------------------------------------------------------------------------------

    def bind(self, processor: DeferredProcessor, *, hold: bool = False) -> None:
        """Attach to `processor`; jobs scheduled before move to it in order.

        Args:
            processor: whose thread runs the jobs from now on.
            hold: keep pending jobs here until `activate`: the owner has something to do on the new thread first.

        Raises:
            LocalProtocolError: bound already (`migrate` moves a bound one).
            ClosedError: the registration is released.
        """
        with self._lock:
            if self._processor is not None:
                raise LocalProtocolError("the registration is bound already; use migrate()")
            self._check_not_released_locked()
            must_wake = self._settle_locked(processor, hold=hold)
        if must_wake:
            processor.wake_up()

    def activate(self) -> None:
        """End the hold of `bind` or `migrate`: hand the pending jobs to the processor. Not on hold: no effect."""
        with self._lock:
            processor = self._processor
            if processor is None or not self._held:
                return
            must_wake = self._settle_locked(processor, hold=False)
        if must_wake:
            processor.wake_up()

    def unbind(self) -> None:
        """Detach from the processor; pending jobs stay pending here, in order, for the next `bind`.

        Call it on the processor's thread: a job that runs at this moment goes on running there. Not bound: no effect.
        """
        with self._lock:
            self._take_back_locked()
            self._processor = None
            self._target, self.leaving = None, False

    def migrate(self, other: DeferredProcessor, *, hold: bool = False) -> bool:
        """Move to `other` with all pending jobs, in order and exactly once each, while others keep scheduling.

        Jobs that the running round of the old processor has not begun move too. No job of a registration ever runs
        on two threads at once: if one runs at this moment (on another thread, or because this call comes from inside
        it), the move is carried out when it ends, before any further job of this registration. A later call replaces
        a move that still waits.

        Args:
            other: the destination. The present one: no effect, but for `hold`.
            hold: see `bind`.

        Returns:
            True if the move is done. False if it waits for a running job.

        Raises:
            ClosedError: the registration is released.
        """
        with self._lock:
            self._check_not_released_locked()
            processor = self._processor
            self._target, self.leaving = (other, hold), True
            if processor is not None and processor.is_running(self):
                return False
            must_wake = self._move_locked(other, hold=hold)
        if must_wake:
            other.wake_up()
        return True

    def finish_migration(self) -> None:
        """Carry out a move that waited for the running job; called by the processor when that job has ended."""
        with self._lock:
            if self._target is None:
                self.leaving = False
                return
            other, hold = self._target
            must_wake = self._move_locked(other, hold=hold)
        if must_wake:
            other.wake_up()

    @property
    def processor(self) -> DeferredProcessor | None:
        """The processor that runs the jobs at present; None before `bind` and after `unbind` or `release`."""
        with self._lock:
            return self._processor

    @property
    def released(self) -> bool:
        """True after `release`."""
        with self._lock:
            return self._released

    @property
    def late_schedule_count(self) -> int:
        """How many times `schedule` was called after `release`."""
        with self._lock:
            return self._late_count

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _check_not_released_locked(self) -> None:
        self._lock.assert_owned()
        if self._released:
            raise ClosedError("the registration is released")

    def _keep_locked(self, job: Job) -> None:
        """Make `job` pending here, behind what is pending here already."""
        self._lock.assert_owned()
        self._order += 1
        job.sequence = self._order
        job.pending = True

    def _revoke_locked(self, job: Job) -> bool:
        self._lock.assert_owned()
        was_pending = job.pending
        if self._held or self._processor is None:
            job.revoked = True
            job.pending = False
            return was_pending
        return self._processor.remove(job)

    def _take_back_locked(self) -> None:
        """Bring pending jobs from the processor's list back here; on hold they are here already."""
        self._lock.assert_owned()
        if self._processor is not None and not self._held:
            for job in self._processor.take_out(self._jobs):
                self._keep_locked(job)
        self._held = True

    def _settle_locked(self, processor: DeferredProcessor, *, hold: bool) -> bool:
        """Point to `processor` and hand over what is kept here unless on hold; True if it must be woken."""
        self._lock.assert_owned()
        self._processor = processor
        self._held = hold
        if hold:
            return False
        return processor.put_in(sorted((job for job in self._jobs if job.pending), key=_by_sequence))

    def _move_locked(self, other: DeferredProcessor, *, hold: bool) -> bool:
        """Arrive at `other`; True if it must be woken."""
        self._lock.assert_owned()
        self._target, self.leaving = None, False
        if other is not self._processor or hold:
            self._take_back_locked()
        elif not self._held:
            return False  # it is where it should be
        return self._settle_locked(other, hold=hold)
