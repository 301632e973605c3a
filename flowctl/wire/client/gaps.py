"""Finds out which frames of one track never came, from what did come (pure).

Two ways. Stamped frames (see `flowctl.wire.media.stamp`) carry a number: what is missing is exact. Real recordings have
timestamps only: a step that is longer than one and a half usual ones hides frames, and how many is their quotient. The
usual step is the mean of the short ones so far, so it is exact for a constant frame rate after a few frames, however
the milliseconds were rounded; for a variable frame rate the count is an estimate.
"""

from __future__ import annotations

from typing import Final

from flowctl.wire.client.pace import signed_difference

_LONG: Final = 1.5
"""Steps above this share of the usual one hide a frame. Rounding to ms makes 33 and 34 of one frame rate, and 21 and
22 ms of AAC at 48 kHz, far from 1.5."""

_MAX_MISSING: Final = 1_000_000
"""No gap counts for more: a publisher that comes back with another clock is no loss of a million frames."""


class GapFinder:
    """Counts the frames of one track that are missing between those that came.

    Attributes:
        missing: frames that never came.
        stamped: whether the count comes from numbers, and is exact.
    """

    __slots__ = ("_number", "_steps", "_steps_ms", "_timestamp", "gaps", "missing", "stamped")

    def __init__(self) -> None:
        self._timestamp: int | None = None  # of the last frame
        self._number: int | None = None  # stamp of the last frame
        self._steps = 0  # steps that count as usual
        self._steps_ms = 0
        self.missing = 0
        self.gaps = 0
        self.stamped = False

    def frame(self, timestamp: int, number: int | None = None) -> int:
        """Take one frame; return how many are missing just before it."""
        if number is None:
            missing = self._by_time(timestamp)
        else:
            self.stamped = True
            missing = 0 if self._number is None else number - self._number - 1
            if not 0 <= missing <= _MAX_MISSING:
                missing = 0  # another publisher, who counts from 0
            self._number = number
        self._timestamp = timestamp
        if missing:
            self.missing += missing
            self.gaps += 1
        return missing

    def _by_time(self, timestamp: int) -> int:
        if self._timestamp is None:
            return 0
        step_ms = signed_difference(timestamp, self._timestamp)
        if step_ms <= 0:
            return 0
        if self._steps and step_ms > _LONG * self._steps_ms / self._steps:
            return min(round(step_ms * self._steps / self._steps_ms) - 1, _MAX_MISSING)
        self._steps += 1
        self._steps_ms += step_ms
        return 0
