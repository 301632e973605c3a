"""The offset between two clocks, by what is delayed least on its way from one to the other (pure)."""

from __future__ import annotations

from math import inf


class LeastOffset:
    """The least offset of this window and the one before it, so of the last one to two windows.

    What a network delays comes late and never early: the message that came soonest tells how far the clocks are apart.
    Not the soonest of all time: a clock that is slow, that stops or that is set would never be followed.

    A window in which nothing came is none: after a silence, the offset from before it still counts for one window.
    """

    __slots__ = ("_began_at", "_least", "_least_before", "_window")

    def __init__(self, window: float) -> None:
        self._window = window
        self.restart()

    def restart(self) -> None:
        """Forget everything: another clock begins."""
        self._began_at = -inf
        self._least = self._least_before = inf

    def add(self, offset: float, now: float) -> None:
        """Take the offset of what comes at `now`: when it came less when it was sent."""
        if not 0 <= now - self._began_at < self._window:
            self._began_at, self._least_before, self._least = now, self._least, offset
        elif offset < self._least:
            self._least = offset

    @property
    def least(self) -> float:
        """The offset; infinite while nothing has come."""
        return min(self._least, self._least_before)
