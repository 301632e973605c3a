"""Timers: jobs that are submitted again and again (pure; deadlines and time come from the node).

A timer is due at multiples of its interval after it was begun. What was missed, because the machine was busy or asleep,
is not made up for: the next time is the next multiple, so there are no bursts. By default a timer is squelched: it is
passed over while its last job waits or runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NewType

from flowctl.core.loop.deadlines import Deadlines
from flowctl.errors import ConfigError

SHORTEST_S: Final = 0.001
"""The shortest interval, the resolution of the loop's own timers."""

LONGEST_S: Final = 366 * 86_400.0
"""The longest interval, a year: no loop takes any number."""

TimerID = NewType("TimerID", int)
"""Names a timer of one node; never used again."""


class Timer:
    """One timer. All methods on the node's thread, but for `run` and `cancel`."""

    def __init__(
        self, job: Callable[[], object], interval_s: float, *, squelch: bool, submit: Callable[[Timer], bool]
    ) -> None:
        if not SHORTEST_S <= interval_s <= LONGEST_S:
            raise ConfigError(f"interval_s is {interval_s}, it must be {SHORTEST_S:g} to {LONGEST_S:.0f} s")
        self._job: Callable[[], object] | None = job  # None once it is cancelled
        self._interval_s: Final = interval_s
        self._squelch: Final = squelch
        self._submit: Final = submit
        self._outstanding = 0  # jobs that were submitted and have not ended
        self._when = 0.0
        self._deadlines: Deadlines | None = None  # from `begin` on

    @property
    def cancelled(self) -> bool:
        return self._job is None

    def begin(self, deadlines: Deadlines, now: float) -> None:
        """Be due after one interval; no effect once it is cancelled."""
        if not self.cancelled:
            self._deadlines = deadlines
            self._when = now + self._interval_s
            deadlines.set(self, self._when)

    def deadline_due(self, now: float) -> None:
        if self.cancelled or self._deadlines is None:
            return
        missed = int((now - self._when) / self._interval_s)
        self._when += (missed + 1) * self._interval_s
        self._deadlines.set(self, self._when)
        if not (self._squelch and self._outstanding):
            self._outstanding += 1
            if not self._submit(self):
                self._outstanding -= 1

    def end(self) -> None:
        if self._deadlines is not None:
            self._deadlines.remove(self)

    def run(self) -> None:
        """Do the job, on whatever thread; nothing if it was cancelled since it was submitted."""
        job = self._job
        if job is not None:
            job()

    def ended(self) -> None:
        self._outstanding -= 1

    def cancel(self) -> None:
        """Do nothing any more, and keep nothing of the job; any thread, idempotent. A job that runs goes on."""
        self._job = None
