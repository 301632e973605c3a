"""Whether a figure that was sampled over time is flat: a straight line through the second half of its samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

SURE_ERRORS: Final = 3.0
"""A slope of fewer standard errors than this may be chance: a figure that swings is not one that grows."""
_FEWEST: Final = 4
"""Samples in the half that is looked at; a line through fewer has no error that would mean anything."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trend:
    """A line through samples.

    Args:
        allowed_per_min: largest slope that counts as flat.
    """

    mean: float
    slope_per_min: float
    error_per_min: float
    allowed_per_min: float

    @property
    def flat(self) -> bool:
        """Whether it does not rise, or by so little that it may be chance or does not matter."""
        surely = self.slope_per_min > SURE_ERRORS * self.error_per_min
        return not (surely and self.slope_per_min > self.allowed_per_min)


def second_half(times_s: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the samples of the second half of the time: the first may still be filling caches."""
    middle = (times_s[0] + times_s[-1]) / 2
    pairs = [pair for pair in zip(times_s, values, strict=True) if pair[0] >= middle]
    return [time for time, _ in pairs], [value for _, value in pairs]


def trend(times_s: Sequence[float], values: Sequence[float], *, share: float, least: float) -> Trend:
    """Return the line through the second half of samples (least squares)."""
    late_s, late = second_half(times_s, values)
    count = len(late)
    if count < _FEWEST:
        raise ValueError(f"{count} samples in the second half, a line takes {_FEWEST}")
    minutes = [time / 60 for time in late_s]
    mean_minute, mean = sum(minutes) / count, sum(late) / count
    spread = sum((minute - mean_minute) ** 2 for minute in minutes)
    slope = sum((minute - mean_minute) * (value - mean) for minute, value in zip(minutes, late, strict=True)) / spread
    rest = sum(
        (value - mean - slope * (minute - mean_minute)) ** 2 for minute, value in zip(minutes, late, strict=True)
    )
    error = math.sqrt(rest / (count - 2) / spread)
    return Trend(mean=mean, slope_per_min=slope, error_per_min=error, allowed_per_min=max(share * abs(mean), least))
