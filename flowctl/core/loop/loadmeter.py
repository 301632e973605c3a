"""How busy a loop thread is: the share of time its handlers run, smoothed, and the longest of them.

Handler time on the wall clock, not processor time: a thread that waits for the interpreter lock or for a slow system
call serves its peers no better than one that computes, and it is the peers' view that placement needs.

For processor time, multiply handler time by `LoadMeter.processor_share`, which is measured four
times a second: the thread's own clock is a system call, which at each turn of many small ones is a fifth of their cost.

One thread writes; others may read: each figure is one attribute, so a reader sees at worst the figures of two
neighbouring turns side by side.
"""

from __future__ import annotations

import time
from math import exp
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

#: Time over which the busy fraction forgets: a burst of one key frame must not move connections between groups, a
#: stream that starts should. Unix load averages take 60 s at the shortest, which is too slow to place a new publisher.
SMOOTHING_S: Final = 5.0

#: Handler time is gathered this long before it is folded into the average: one exp() per window, not per handler.
WINDOW_S: Final = 0.25

#: A window with this share of handler time had no room: who waited in it, waited for the thread.
STRAINED_BUSY: Final = 0.9

#: Weight of the newest window in the processor share: it follows within a second, and one window decides nothing.
_SHARE_SMOOTHING: Final = 0.25

#: For so long after such a window the thread still works off what it left, and delays say nothing about a peer.
STRAIN_S: Final = 3.0


class LoadMeter:
    def __init__(self, now: float, processor_time: Callable[[], float] = time.thread_time) -> None:
        self._processor_time: Final = processor_time
        self._processor_s: float | None = None  # at the end of the last window. None: there was none
        self.processor_share = 1.0  #: processor time over handler time of late, 0 to 1
        self._window_from = now
        self._busy_s = 0.0  # handler time since then
        self._fraction = 0.0
        self._strained_until = now
        self.turns = 0  #: handlers run
        self.longest_turn_s = 0.0  #: of them the longest since the start

    def count_turn(self, began: float, ended: float) -> None:
        """Count a handler that ran from `began` to `ended`, seconds; owning thread only."""
        self.turns += 1
        took = ended - began
        self._busy_s += took
        if took > self.longest_turn_s:  # noqa: PLR1730 - a call less for each handler
            self.longest_turn_s = took
        if ended - self._window_from >= WINDOW_S:
            self._end_window(ended)

    def _end_window(self, ended: float) -> None:
        self._fraction = self.busy_fraction(ended)
        if self._busy_s >= STRAINED_BUSY * (ended - self._window_from):
            self._strained_until = ended + STRAIN_S
        before, self._processor_s = self._processor_s, self._processor_time()
        if before is not None and self._busy_s > 0:
            # What the loop does between handlers is in it too, which is little where it matters.
            share = min((self._processor_s - before) / self._busy_s, 1.0)
            self.processor_share += _SHARE_SMOOTHING * (share - self.processor_share)
        self._window_from = ended
        self._busy_s = 0.0

    def busy_fraction(self, now: float) -> float:
        """Return the smoothed share of time, 0 to 1, that handlers ran up to `now`; changes nothing, any thread.

        A thread that has been idle since its last handler is seen to be: the wait until `now` counts, from a window on.
        """
        elapsed = now - self._window_from
        if elapsed < WINDOW_S:
            return self._fraction
        weight = 1.0 - exp(-elapsed / SMOOTHING_S)
        return self._fraction + weight * (min(1.0, self._busy_s / elapsed) - self._fraction)

    def strained(self, now: float) -> bool:
        return now < self._strained_until
