"""Finds out which frames of one track never came, from the timestamps of those that did (pure).

Frames with stamps carry a number, and what is missing between them is exact. Real recordings have timestamps only: a
step that is longer than one and a half usual ones hides frames, and how many is their quotient. The usual step is the
mean of the short ones so far, so it is exact for a constant frame rate after a few frames, however the milliseconds
were rounded; for a variable frame rate the count is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowctl.wire.client.pace import signed_difference

_LONG: Final = 1.5
"""Steps above this share of the usual one hide a frame. Rounding to ms makes 33 and 34 of one frame rate, and 21 and
22 ms of AAC at 48 kHz, far from 1.5."""

MAX_MISSING: Final = 1_000_000
"""No gap counts for more: a publisher that comes back with another clock is no loss of a million frames."""


@dataclass(slots=True)
class GapFinder:
    """Counts the frames of one track that are missing between those that came."""

    _timestamp: int | None = None  # of the last frame
    _steps: int = 0  # steps that count as usual
    _steps_ms: int = 0

    def frame(self, timestamp: int) -> int:
        """Take one frame; return how many are missing just before it."""
        before, self._timestamp = self._timestamp, timestamp
        step_ms = 0 if before is None else signed_difference(timestamp, before)
        if step_ms <= 0:
            return 0
        if self._steps and step_ms > _LONG * self._steps_ms / self._steps:
            return min(round(step_ms * self._steps / self._steps_ms) - 1, MAX_MISSING)
        self._steps += 1
        self._steps_ms += step_ms
        return 0
