"""Which of two changes came later, without clocks that agree (pure): a hybrid logical clock.

A stamp is the wall clock's time, a counter, and the name of who gave it. A member's next stamp is later than every
stamp that it gave or saw before, whatever its wall clock did meanwhile: a clock that was put back goes on from where
it was. So a change made by somebody who had seen another always counts as the later one, and of two that knew nothing
of each other the wall clocks decide, or else the names, at each member alike.

Source: Kulkarni et al., "Logical Physical Clocks", 2014.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MOST_AHEAD_S: Final = 86_400
"""Stamps further ahead of our own clock are refused: beyond a day it is a clock that nobody set, and it would drag
those of all others along. Less would refuse a member whose time zone is wrong."""
MOST_COUNTER: Final = 2**32
"""Largest counter: changes within one millisecond, or while a clock stands still."""


class Stamp(NamedTuple):
    """When an entry was changed, and by whom; later ones are greater."""

    ms: int  #: since the epoch, by the latest wall clock that its giver knew of
    counter: int  #: tells those of the same `ms` apart
    node: str  #: member that gave it

    def ahead(self, now_s: float) -> bool:
        """Return whether it lies further in the future of `now_s` (seconds since the epoch) than any sound clock."""
        return self.ms > (now_s + MOST_AHEAD_S) * 1000


class Clock:
    """Gives the stamps of one member. One thread."""

    def __init__(self, node: str, last: Stamp | None = None) -> None:
        self._node: Final = node
        self._last = (0, -1) if last is None else last[:2]

    @property
    def last(self) -> Stamp:
        """The latest stamp given or seen, as one of our own; to be kept for the next life."""
        ms, counter = self._last
        return Stamp(ms, max(counter, 0), self._node)

    def next(self, now_s: float) -> Stamp:
        """Return a stamp for a change made at `now_s`, seconds since the epoch."""
        ms, counter = self._last
        now_ms = int(now_s * 1000)
        self._last = (now_ms, 0) if now_ms > ms else (ms, counter + 1)
        return Stamp(*self._last, self._node)

    def saw(self, stamp: Stamp) -> None:
        """Go on after `stamp`, which another member gave."""
        self._last = max(self._last, stamp[:2])
