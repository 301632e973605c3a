"""The to-do list of one loop thread, run in rounds: see `flowctl.deferred` for the theory.

A round serves the numbers that the list had given out when the round began. So no second list is needed for "the
batch", and a job of the running round can be revoked or moved to another thread like any other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from flowctl.core.loop.faults import ErrorHook, log_error, report
from flowctl.core.loop.jobs import Job, JobList, JobOwner
from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_by_sequence = attrgetter("sequence")


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredStatistics:
    """What a `DeferredProcessor` did so far; all are counts of jobs unless the name says otherwise.

    At any moment ``scheduled + moved_in == run + revoked + moved_out + pending``.
    """

    scheduled: int  #: accepted by `Registration.schedule` or asked for by a job that returned True
    moved_in: int  #: brought by a registration that was bound or migrated here
    moved_out: int  #: taken along by a registration that was unbound or migrated away
    run: int  #: callbacks begun
    failed: int  #: callbacks that raised; part of `run`
    revoked: int  #: taken off the list before they ran, releases included
    pending: int  #: on the list now
    rounds: int  #: rounds begun
    wakes: int  #: times the loop was woken


MAX_JOBS_PER_ROUND: Final = 128
"""Most jobs of one round on a loop, which then looks at its descriptors and timers: a thousand who connect at once
schedule as many jobs of 60 us each, and a stream that is due in the middle of them must not wait for all."""
_ALL: Final = sys.maxsize
_NO_JOB: Final = -1
"""A sequence number below that of any job: the round has nothing to run."""


class DeferredProcessor:
    """The deferred jobs of one loop thread, run in rounds.

    Args:
        wake: makes the owning thread call `run_round` soon. Called from any thread, once per idle period: after it,
            not again until a round has returned False. It must neither block nor call back into this module.
        on_error: told of every exception that a job (or `wake`) raises. None: `log_error`.
    """

    def __init__(self, wake: Callable[[], None], on_error: ErrorHook | None = None) -> None:
        self._wake: Final = wake
        self._on_error: Final = log_error if on_error is None else on_error
        self._lock: Final = OwnedLock()
        self._jobs: Final = JobList()  # pending jobs, next to run first  # guarded by _lock
        self._running: Job | None = None  # its callback is on the owning thread's stack  # guarded by _lock
        self._in_round = False  # guarded by _lock
        self._awake = False  # a round is running or promised: no wake needed  # guarded by _lock
        self._scheduled_count = 0  # guarded by _lock
        self._moved_in_count = 0  # guarded by _lock
        self._moved_out_count = 0  # guarded by _lock
        self._run_count = 0  # guarded by _lock
        self._failed_count = 0  # guarded by _lock
        self._revoked_count = 0  # guarded by _lock
        self._round_count = 0  # guarded by _lock
        self._wake_count = 0  # guarded by _lock

    # --- the owning thread ---------------------------------------------------------------------------------------

    def run_round(self, most_jobs: int = _ALL, over: Callable[[], bool] = _never) -> bool:
        """Run the jobs that were scheduled when the round began, in order; owning thread only.

        A job that is scheduled during the round, by itself or by anybody, waits for the next one. A job that returns
        True is scheduled again, unless it was revoked or released meanwhile. What a job raises, whatever it is, goes
        to `on_error` and the round goes on.

        Args:
            most_jobs: the round ends after so many, 1 or more; the others are the first ones of the next round.
            over: asked after each job whether the round has taken too long; it ends then as after `most_jobs`.

        Returns:
            True if jobs are left: the caller must call again soon and must not sleep in its poll first. False if
            none is: the next `schedule` will wake it.

        Raises:
            LocalProtocolError: called from inside a job, or from two threads.
        """
        with self._lock:
            if self._in_round:
                raise LocalProtocolError("run_round called while a round is running")
            self._in_round = self._awake = True
            self._round_count += 1
            last_of_round = self._jobs.newest
        room = most_jobs
        try:
            while (job := self._next_job(last_of_round if room else _NO_JOB)) is not None:
                room -= 1
                try:
                    again = job.callback() is True
                except BaseException as error:  # noqa: BLE001  (one failing job must not stop the batch)
                    self._job_failed(job, error)
                else:
                    if again:
                        job.registration.schedule_again(job)
                if over():
                    room = 0
        finally:
            # Also where Ctrl-C strikes between two jobs, on a main thread: the next schedule() then wakes as usual.
            with self._lock:
                interrupted, self._running = self._running, None
                self._in_round = False
                self._awake = left = self._jobs.first is not None and interrupted is None
            if interrupted is not None and interrupted.registration.leaving:
                interrupted.registration.finish_migration()
        return left

    def _next_job(self, last_of_round: int) -> Job | None:
        """Take the next job of the round off the list and mark it running; None at the end of the round."""
        while True:
            with self._lock:
                finished, self._running = self._running, None
                moving = finished.registration if finished is not None and finished.registration.leaving else None
                if moving is None:
                    job = self._jobs.first
                    if job is None or job.sequence > last_of_round:
                        return None
                    self._jobs.unlink(job)
                    job.pending = job.revoked = False
                    self._running = job
                    self._run_count += 1
                    return job
            # The registration of the job that just ended asked to leave; its next job must already run elsewhere.
            moving.finish_migration()

    def _job_failed(self, job: Job, error: BaseException) -> None:
        with self._lock:
            self._failed_count += 1
        report(self._on_error, f"job {job.name!r}", error)

    # --- the registrations, each with its own lock held ----------------------------------------------------------

    def append(self, job: Job) -> bool:
        """Put `job` at the end of the list; for `Registration`, with its lock held.

        Returns:
            True if the caller must call `wake_up` once it has released its lock.
        """
        with self._lock:
            self._jobs.append(job)
            self._scheduled_count += 1
            return not self._awake and self._claim_wake_locked()

    def remove(self, job: Job) -> bool:
        """Take `job` off the list and tell whether it was on it; for `Registration`, with its lock held."""
        with self._lock:
            job.revoked = True
            if not job.pending:
                return False
            self._jobs.unlink(job)
            job.pending = False
            self._revoked_count += 1
            return True

    def put_in(self, jobs: list[Job]) -> bool:
        """Append pending `jobs`, in order, that their registration kept; returns what `append` does."""
        with self._lock:
            for job in jobs:
                self._jobs.append(job)
            self._moved_in_count += len(jobs)
            return bool(jobs) and not self._awake and self._claim_wake_locked()

    def take_out(self, jobs: Sequence[Job]) -> list[Job]:
        """Take those of `jobs` that are pending off the list and return them, oldest first; they stay pending.

        The running round is no obstacle: what it has not begun is on the list like everything else.
        """
        with self._lock:
            pending = sorted((job for job in jobs if job.pending), key=_by_sequence)
            for job in pending:
                self._jobs.unlink(job)
            self._moved_out_count += len(pending)
            return pending

    def is_running(self, registration: JobOwner) -> bool:
        """Tell whether a job of `registration` is on the owning thread's stack, and if so have it call back.

        For `Registration.migrate`, which has set `Registration.leaving` before: the check and the look at `leaving`
        after the job happen under one lock, so that either this returns False or `finish_migration` follows.
        """
        with self._lock:
            return self._running is not None and self._running.registration is registration

    def wake_up(self) -> None:
        """Call `wake`; with no lock held. If it fails, a later `schedule` tries again."""
        try:
            self._wake()
        except BaseException as error:  # noqa: BLE001  (a closed loop must not fail its caller)
            with self._lock:
                self._awake = False
            report(self._on_error, "wake of the deferred processor", error)

    # --- everybody -----------------------------------------------------------------------------------------------

    def statistics(self) -> DeferredStatistics:
        """Return a frozen snapshot, consistent in itself; O(1), any thread."""
        with self._lock:
            return DeferredStatistics(
                scheduled=self._scheduled_count,
                moved_in=self._moved_in_count,
                moved_out=self._moved_out_count,
                run=self._run_count,
                failed=self._failed_count,
                revoked=self._revoked_count,
                pending=self._jobs.count,
                rounds=self._round_count,
                wakes=self._wake_count,
            )

    def _claim_wake_locked(self) -> bool:
        """Promise the wake that the caller will call, unless that was promised already."""
        self._lock.assert_owned()
        self._awake = True
        self._wake_count += 1
        return True
