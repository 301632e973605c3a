"""A deferred job, and the list of them that needs no memory of its own.

The list is intrusive: a job carries its own links, so appending and unlinking are O(1) and allocate nothing, and a
job can be taken out of the middle without a search. The price is that a job is on one list at most, which is just
what "pending or not" means. Neither class locks; whoever owns a list guards it (see `flowctl.deferred`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flowctl.deferred import Registration

#: Told where something failed and with what; must not raise. It is called with no lock held.
ErrorHook = Callable[[str, Exception], None]

_log = logging.getLogger("flowctl.loop")


def log_error(where: str, error: Exception) -> None:
    """Write `error` with its traceback to the standard logger ``flowctl.loop``: the default error hook.

    Args:
        where: what was being done, for example ``"job 'flush'"``.
        error: what it raised.
    """
    _log.error("%s failed", where, exc_info=error)


class Job:
    """One piece of deferred work, made once by `Registration.job` and scheduled any number of times.

    A job is pending from the moment it is scheduled until its callback begins, is revoked, or its registration is
    released. The links and marks belong to the lists: outside this module only `name`, `callback` and `pending` are
    of interest, and none is to be assigned.
    """

    __slots__ = ("callback", "name", "next_job", "pending", "previous_job", "registration", "revoked", "sequence")

    def __init__(self, registration: Registration, callback: Callable[[], bool | None], name: str) -> None:
        self.registration: Final = registration
        self.callback = callback  # replaced once, by release()
        self.name: Final = name  # for reports; many jobs share a name
        # The rest changes under the lock of whoever keeps the job: its processor, or its registration while that is
        # unbound or on hold. `pending` alone is also read without (see Registration.schedule).
        self.pending = False
        self.revoked = False  # revoked since the last run began: a True from that run no longer counts
        self.sequence = 0  # place in the order of whoever keeps the job
        self.next_job: Job | None = None
        self.previous_job: Job | None = None

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
