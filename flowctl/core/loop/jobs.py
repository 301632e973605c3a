"""A deferred job, and the list of them that needs no memory of its own.

The list is intrusive: a job carries its own links, so appending and unlinking are O(1) and allocate nothing, and a
job can be taken out of the middle without a search. The price is that a job is on one list at most, which is just
what "pending or not" means. Neither class locks; the owner of a list guards it (see `flowctl.deferred`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol


class JobOwner(Protocol):
    """What a processor asks of the registration that made a job; see `flowctl.deferred.Registration`."""

    leaving: bool  #: it waits for the end of its running job, to move to another thread

    def schedule_again(self, job: Job) -> bool:
        """Schedule a job that has just returned True."""

    def finish_migration(self) -> None:
        """Move: its running job has ended."""


class Purpose:
    """What a job is for that is made when it is first needed; see `flowctl.deferred.Registration.run_soon`.

    Jobs are found by the purpose itself, an object, and not by its name: whatever an application calls its own jobs,
    they are never taken for another's.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name: Final = name


class Job:
    """One piece of deferred work, made once by `Registration.job` and scheduled any number of times.

    A job is pending from the moment it is scheduled until its callback begins, is revoked, or its registration is
    released. The links and marks belong to the lists: outside this module only `name`, `callback` and `pending` are
    of interest, and none is to be assigned.
    """

    __slots__ = ("callback", "next_job", "pending", "previous_job", "purpose", "registration", "revoked", "sequence")

    def __init__(self, registration: JobOwner, callback: Callable[[], bool | None], purpose: Purpose | str) -> None:
        self.registration: Final = registration
        self.callback = callback  # replaced once, by release()
        #: What `Registration.run_soon` finds it by; a mere name if it was made by `Registration.job`.
        self.purpose: Final = purpose
        # The rest changes under the lock of the job's keeper: its processor, or its registration while that is
        # unbound or on hold. `pending` alone is also read without (see Registration.schedule).
        self.pending = False
        self.revoked = False  # revoked since the last run began: a True from that run no longer counts
        self.sequence = 0  # place in its keeper's order
        self.next_job: Job | None = None
        self.previous_job: Job | None = None

    @property
    def name(self) -> str:
        """For reports; many jobs share a name."""
        return self.purpose.name if isinstance(self.purpose, Purpose) else self.purpose

    def __repr__(self) -> str:
        return f"<Job {self.name!r}{' pending' if self.pending else ''}>"


class JobList:
    """A doubly linked list of jobs, oldest first, numbered in the order of their arrival."""

    __slots__ = ("_last", "count", "first", "newest")

    def __init__(self) -> None:
        self.first: Job | None = None  #: the oldest; None when empty
        self._last: Job | None = None
        self.newest = 0  #: number given to the newest arrival, also when it has left; never goes back
        self.count = 0  #: jobs on the list

    def append(self, job: Job) -> None:
        """Put `job`, which is on no list, at the end; gives it the next number and makes it pending."""
        self.newest = job.sequence = self.newest + 1
        job.pending = True
        last = self._last
        job.previous_job = last
        if last is None:
            self.first = job
        else:
            last.next_job = job
        self._last = job
        self.count += 1

    def unlink(self, job: Job) -> None:
        """Take `job`, which is on this list, off it. Its `pending` is left to the caller: it may only be moving."""
        previous_job, next_job = job.previous_job, job.next_job
        if previous_job is None:
            self.first = next_job
        else:
            previous_job.next_job = next_job
        if next_job is None:
            self._last = previous_job
        else:
            next_job.previous_job = previous_job
        # Cleared so that a job that is through keeps no chain of its former neighbours alive.
        job.previous_job = job.next_job = None
        self.count -= 1
