"""Which numbers of a sender were seen (pure): the highest, and the runs below it that were not.

Theory of operation. A sender counts its messages up, and most arrive; so the numbers that did *not* come are few, and
neighbours. They are kept as intervals: memory and time go with the gaps, not with the messages, and a jump of a million
is one gap.

The number of gaps is limited, because a sender can make as many as it likes. What happens at the limit is the owner's
choice:

- `WhenFull.REFUSE`, for a sender that numbers its messages to us one by one: what would open one gap more is not taken.
  It is not acknowledged either, so it comes again when gaps have closed. Nothing is lost, nothing is doubled.
- `WhenFull.FORGET`, for a sender that counts the messages to all its peers together, whose gaps never close: the lowest
  gap is forgotten. What is below it may have been seen or not (`NumberVerdict.OLD`): it is not handed on, and it is not
  acknowledged, so that its sender learns that it has failed.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

MAX_GAPS: Final = 1024
"""Gaps remembered of one sender: 16 KiB to 100 KiB of memory. A link that loses one message in five of a window of 4096
makes 650 at a time."""


class WhenFull(enum.Enum):
    """What is done with a number that would open one gap too many."""

    REFUSE = "refuse"
    FORGET = "forget"


class NumberVerdict(enum.Enum):
    NEW = "new"  #: not seen
    SEEN = "seen"  #: seen before
    OLD = "old"  #: below what is remembered
    FULL = "full"  #: new, but it would open one gap too many


@dataclass(slots=True, eq=False)
class SeenNumbers:
    """The numbers of one sender that were seen."""

    _when_full: WhenFull = WhenFull.REFUSE
    _max_gaps: int = MAX_GAPS
    _firsts: list[int] = field(default_factory=list)  #: first number of each gap, ascending
    _lasts: list[int] = field(default_factory=list)
    _old_is_seen: bool = True  #: numbers below the floor were all seen, or declared so
    highest: int = -1
    floor: int = 0  #: numbers below it are not told apart any more, or are known to be done with

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """First and last number of each run that was not seen, ascending."""
        return list(zip(self._firsts, self._lasts, strict=True))

    def judge(self, number: int) -> NumberVerdict:
        """Return what is known of `number`; O(log gaps), nothing changes."""
        if number > self.highest:
            opens = number > self.highest + 1 and number > self.floor
            full = opens and len(self._firsts) >= self._max_gaps and self._when_full is WhenFull.REFUSE
            return NumberVerdict.FULL if full else NumberVerdict.NEW
        index = bisect_right(self._firsts, number) - 1
        if index >= 0 and number <= self._lasts[index]:
            splits = self._firsts[index] < number < self._lasts[index]
            full = splits and len(self._firsts) >= self._max_gaps and self._when_full is WhenFull.REFUSE
            return NumberVerdict.FULL if full else NumberVerdict.NEW
        return NumberVerdict.OLD if number < self.floor and not self._old_is_seen else NumberVerdict.SEEN

    def first_time(self, number: int) -> bool:
        """Note that `number` was seen, and return whether that is the first time; O(gaps)."""
        if self.judge(number) is not NumberVerdict.NEW:
            return False
        if number == self.highest + 1:
            self.highest = number
        elif number > self.highest:
            first = max(self.highest + 1, self.floor)
            if first < number:
                self._firsts.append(first)
                self._lasts.append(number - 1)
            self.highest = number
        else:
            self._split(bisect_right(self._firsts, number) - 1, number)
        if len(self._firsts) > self._max_gaps:
            self._forget_lowest()
        return True

    def settle(self, floor: int) -> bool:
        """Note that numbers below `floor` are done with, seen or not; return whether that closed a gap."""
        if floor <= self.floor:
            return False
        self.floor = floor
        changed = floor > self.highest + 1
        self.highest = max(self.highest, floor - 1)
        while self._firsts and self._firsts[0] < floor:
            changed = True
            if self._lasts[0] >= floor:
                self._firsts[0] = floor
                break
            del self._firsts[0], self._lasts[0]
        return changed

    def forget_from(self, number: int) -> None:
        """Forget what was seen from `number` on."""
        while self._firsts and self._firsts[-1] >= number:
            del self._firsts[-1], self._lasts[-1]
        if self._firsts and self._lasts[-1] >= number - 1:  # what is left above this gap is nothing
            del self._lasts[-1]
            self.highest = self._firsts.pop() - 1
        self.highest = min(self.highest, number - 1)
        self.floor = min(self.floor, number)

    def restore(self, runs: Iterable[tuple[int, int]], old_below: int = 0) -> None:
        """Start with the numbers that were seen in an earlier life."""
        if old_below:
            self.floor, self._old_is_seen = old_below, False
        for first, last in runs:
            if first > self.highest + 1:
                self._firsts.append(self.highest + 1)
                self._lasts.append(first - 1)
            self.highest = max(self.highest, last)
        while len(self._firsts) > self._max_gaps:
            self._forget_lowest()

    def _split(self, index: int, number: int) -> None:
        first, last = self._firsts[index], self._lasts[index]
        if first == last:
            del self._firsts[index], self._lasts[index]
        elif number == first:
            self._firsts[index] = number + 1
        elif number == last:
            self._lasts[index] = number - 1
        else:
            self._lasts[index] = number - 1
            self._firsts.insert(index + 1, number + 1)
            self._lasts.insert(index + 1, last)

    def _forget_lowest(self) -> None:
        self.floor = self._lasts[0] + 1
        self._old_is_seen = False
        del self._firsts[0], self._lasts[0]
