"""Timers: jobs that are submitted again and again (pure; deadlines and time come from the node).

A timer is due at multiples of its interval after it was added. What was missed, because the machine was busy or asleep,
is not made up for: the next time is the next multiple, so there are no bursts. By default a timer is squelched: it is
passed over while its last job waits or runs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Final, NewType, Protocol

from flowctl.errors import BusyError, ConfigError

MOST_TIMERS: Final = 100_000
"""Timers of a node, each some 500 octets: more are a leak."""

SHORTEST_S: Final = 0.001
"""The shortest interval, the resolution of the loop's own timers."""

TimerID = NewType("TimerID", int)
"""Names a timer of one node; never used again."""


class TimerDeadlines(Protocol):
    """What calls ``deadline_due(now)`` of a timer at its time: `flowctl.loop.deadlines.Deadlines`."""

    def set(self, owner: Timer, when: float) -> None:
        """Have it called at `when`."""

    def remove(self, owner: Timer) -> bool:
        """Have it not called."""


class Timer:
    """One timer; made by `Timers`.

    Attributes:
        job: what is submitted each time, and is told of the end of each by `ended`; None once it is cancelled.
        passed_over_count: times at which it was not submitted because the last job had not ended, or others had the
            time.
    """

    __slots__ = ("_deadlines", "_interval_s", "_outstanding", "_squelch", "_when", "job", "passed_over_count")

    def __init__(
        self, job: Callable[[Timer], bool], interval_s: float, deadlines: TimerDeadlines, now: float, *, squelch: bool
    ) -> None:
        self.job: Callable[[Timer], bool] | None = job
        self.passed_over_count = 0
        self._interval_s: Final = interval_s
        self._deadlines: Final = deadlines
        self._squelch: Final = squelch
        self._outstanding = 0  # jobs that were submitted and have not ended
        self._when = now + interval_s
        deadlines.set(self, self._when)

    def deadline_due(self, now: float) -> None:
        """Submit the job, unless it is squelched; and be due again."""
        job = self.job
        if job is None:
            return
        missed = int((now - self._when) / self._interval_s)
        self._when += (missed + 1) * self._interval_s
        self._deadlines.set(self, self._when)
        self.passed_over_count += missed
        if self._squelch and self._outstanding:
            self.passed_over_count += 1
            return
        self._outstanding += 1
        if not job(self):
            self._outstanding -= 1
            self.passed_over_count += 1

    def ended(self) -> None:
        """Take the end of a job of its, whatever came of it."""
        self._outstanding -= 1

    def cancel(self) -> None:
        """Be due no more, and keep nothing of the job; idempotent."""
        self.job = None
        self._deadlines.remove(self)


class Timers:
    """The timers of a node, by their names.

    Args:
        deadlines: calls them when they are due.
    """

    __slots__ = ("_deadlines", "_newest", "_timers")

    def __init__(self, deadlines: TimerDeadlines) -> None:
        self._deadlines: Final = deadlines
        self._timers: dict[TimerID, Timer] = {}
        self._newest = 0

    def __len__(self) -> int:
        return len(self._timers)

    def add(
        self,
        job: Callable[[Timer], bool],
        interval_s: float,
        now: float,
        *,
        squelch: bool = True,
        timer_id: TimerID | None = None,
    ) -> TimerID:
        """Add a timer, first due after one interval.

        Args:
            job: submits the job; False if there was no room for it. It calls `Timer.ended` when it has ended.
            interval_s: seconds between two times, `SHORTEST_S` or more.
            now: seconds on the clock of the deadlines.
            squelch: pass over a time while the last job waits or runs.
            timer_id: from `new_id`. None: a new one.

        Raises:
            ConfigError: the interval is out of range.
            BusyError: there are too many.
        """
        check_interval(interval_s)
        if len(self._timers) >= MOST_TIMERS:
            raise BusyError(f"there are {MOST_TIMERS} timers already", hint="cancel those that are not needed any more")
        name = self.new_id() if timer_id is None else timer_id
        self._timers[name] = Timer(job, interval_s, self._deadlines, now, squelch=squelch)
        return name

    def new_id(self) -> TimerID:
        """Return the name for a timer to be added."""
        self._newest += 1
        return TimerID(self._newest)

    def cancel(self, timer_id: TimerID) -> Timer | None:
        """Cancel a timer and return it; None, and no effect, if it is not there (any more)."""
        timer = self._timers.pop(timer_id, None)
        if timer is not None:
            timer.cancel()
        return timer

    def cancel_all(self) -> None:
        """Cancel all timers."""
        for timer_id in list(self._timers):
            self.cancel(timer_id)


def check_interval(interval_s: float) -> None:
    """Refuse an interval that no timer can have.

    Raises:
        ConfigError: it is less than `SHORTEST_S`, or not a number.
    """
    if not (isfinite(interval_s) and interval_s >= SHORTEST_S):
        raise ConfigError(f"interval_s is {interval_s}, it must be {SHORTEST_S:g} s or more")
