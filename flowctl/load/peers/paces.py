"""How fast a slow client reads: a pace says how many bytes it may take now, and when it may take more (pure).

A pace is a line of a rate that may change with time (`RatePace`), or a rhythm of reading and not reading. It knows no
socket and no clock; the viewer hands it the time.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from flowctl.wire.client.throttle import LOOK_S, MAX_RATE, MIN_RATE

UNLIMITED: Final = 1 << 30
"""Allowance of a pace that has no limit at present."""


class ReadPace(Protocol):
    """When and how much a client reads. Times are seconds of any steady clock."""

    def allowance(self, now: float) -> int:
        """Return how many bytes may be read now; 0 for none."""
        ...

    def note_read(self, count: int, now: float) -> None:
        """Note that `count` bytes were read."""
        ...

    def wake_at(self, now: float) -> float | None:
        """Return when to ask for an allowance again, given that there is none now. None: never again."""
        ...


@dataclass(slots=True)
class Sawtooth:
    """Rises evenly from one rate to another, falls back at once, and so on."""

    low: float
    high: float
    period_s: float
    look_s: float = LOOK_S

    def rate_at(self, elapsed_s: float) -> float:
        return self.low + (self.high - self.low) * (elapsed_s % self.period_s) / self.period_s

    def carried_bits(self, elapsed_s: float) -> float:
        periods, left_s = divmod(elapsed_s, self.period_s)
        whole = periods * self.period_s * (self.low + self.high) / 2
        return whole + left_s * (self.low + self.rate_at(left_s)) / 2


@dataclass(slots=True)
class Trace:
    """Rates from a recording, each until the next one; from the end it begins again."""

    steps: Sequence[tuple[float, float]]  # seconds and bits per second, from 0 on
    length_s: float
    look_s: float = LOOK_S
    _times: list[float] = field(init=False)
    _sums: list[float] = field(init=False)  # bits up to each of the times, and to the end

    def __post_init__(self) -> None:
        self._times = [seconds for seconds, _ in self.steps]
        ends = [*self._times[1:], self.length_s]
        areas = ((end - begin) * rate for (begin, rate), end in zip(self.steps, ends, strict=True))
        self._sums = list(itertools.accumulate(areas, initial=0.0))

    @property
    def mean_rate(self) -> float:
        return self._sums[-1] / self.length_s

    def _step(self, place_s: float) -> int:
        return bisect.bisect_right(self._times, place_s) - 1

    def rate_at(self, elapsed_s: float) -> float:
        return self.steps[self._step(elapsed_s % self.length_s)][1]

    def carried_bits(self, elapsed_s: float) -> float:
        rounds, place_s = divmod(elapsed_s, self.length_s)
        step = self._step(place_s)
        return rounds * self._sums[-1] + self._sums[step] + (place_s - self._times[step]) * self.steps[step][1]


@dataclass(slots=True, eq=False)
class RhythmPace:
    """Reads without limit for a while, then not at all for a while, and so on; with an endless pause, never again."""

    on_s: float
    off_s: float
    began: float

    def allowance(self, now: float) -> int:
        return UNLIMITED if (now - self.began) % (self.on_s + self.off_s) < self.on_s else 0

    def note_read(self, count: int, now: float) -> None:
        """Do nothing: there is no rate."""

    def wake_at(self, now: float) -> float | None:
        later_s = (self.on_s + self.off_s) - (now - self.began) % (self.on_s + self.off_s)
        return now + later_s if later_s < math.inf else None


def parse_trace(text: str) -> Trace:
    """Return the trace that CSV lines ``seconds,bit_rate`` describe; a first line that is no pair of numbers is a head.

    The last rate holds as long as the one before it, or one second where there is only one.
    """
    steps: list[tuple[float, float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            seconds, rate = (float(cell) for cell in cells)
        except ValueError:
            if number == 1:
                continue
            raise ValueError(f"line {number} is not seconds,bit_rate") from None
        if not (0 <= seconds <= 86_400) or (steps and seconds <= steps[-1][0]) or (not steps and seconds != 0):
            raise ValueError(f"line {number}: the seconds must rise, from 0 to at most 86400")
        if not (rate == 0 or MIN_RATE <= rate <= MAX_RATE):
            raise ValueError(f"line {number}: a rate is 0 or {MIN_RATE} to {MAX_RATE} bit/s")
        steps.append((seconds, rate))
    if not steps:
        raise ValueError("there is no line of seconds,bit_rate")
    if all(rate == 0 for _, rate in steps):
        raise ValueError("all rates are 0: use stall or never-read")
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(steps)]
    return Trace(steps, steps[-1][0] + (gaps[-1] if gaps else 1.0))
