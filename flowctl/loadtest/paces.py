"""How fast a slow client reads: a pace says how many bytes it may take now, and when it may take more (pure).

A pace is a token bucket whose rate may change with time, or a rhythm of reading and not reading. It knows no socket and
no clock; the viewer hands it the time. What a pace allows in one go is at most a burst of `BURST_S`, so that the server
sees a steady trickle and not one gulp a second.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Final, Protocol

from flowctl.client.throttle import BURST_S, MAX_RATE, MIN_RATE

UNLIMITED: Final = 1 << 30
"""What a pace answers when there is no limit at present."""

_LEAST_BURST_BYTES: Final = 512
_LONGEST_LOOK_S: Final = 0.25
"""A rate that changes is looked at this often, however long the wait at the present one would be."""

_LEAST_WAIT_S: Final = 0.005


class Pace(Protocol):
    """When and how much a client reads. Times are seconds of any steady clock."""

    def allowance(self, now: float) -> int:
        """Return how many bytes may be read now; 0 for none."""
        ...

    def took(self, count: int, now: float) -> None:
        """Note that `count` bytes were read."""
        ...

    def wake_at(self, now: float) -> float | None:
        """Return when to ask for an allowance again, given that there is none now. None: never again."""
        ...


class Rate(Protocol):
    """A rate that depends on the time since reading began."""

    def at(self, elapsed_s: float) -> float:
        """Return bits per second, 0 or more."""
        ...


class Constant:
    """One rate for ever.

    Args:
        rate: bits per second.
    """

    __slots__ = ("_rate",)

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def at(self, elapsed_s: float) -> float:
        """Return the rate."""
        return self._rate


class Sawtooth:
    """Rises evenly from one rate to another, falls back at once, and so on.

    Args:
        low: bits per second at the beginning of a period.
        high: bits per second at its end.
        period_s: length of a period.
    """

    __slots__ = ("_high", "_low", "_period_s")

    def __init__(self, low: float, high: float, period_s: float) -> None:
        self._low = low
        self._high = high
        self._period_s = period_s

    def at(self, elapsed_s: float) -> float:
        """Return the rate at `elapsed_s`."""
        return self._low + (self._high - self._low) * (elapsed_s % self._period_s) / self._period_s


class Trace:
    """Rates from a recording, each until the next one; from the end it begins again.

    Args:
        steps: (seconds, bits per second), seconds rising from 0.
        length_s: after which it begins again, more than the last of the seconds.
    """

    __slots__ = ("_length_s", "_rates", "_times")

    def __init__(self, steps: Sequence[tuple[float, float]], length_s: float) -> None:
        self._times = [seconds for seconds, _ in steps]
        self._rates = [rate for _, rate in steps]
        self._length_s = length_s

    @property
    def mean_rate(self) -> float:
        """Bits per second over the whole recording."""
        ends = [*self._times[1:], self._length_s]
        spans = zip(self._times, ends, self._rates, strict=True)
        return sum((end - begin) * rate for begin, end, rate in spans) / self._length_s

    def at(self, elapsed_s: float) -> float:
        """Return the rate at `elapsed_s`."""
        return self._rates[bisect.bisect_right(self._times, elapsed_s % self._length_s) - 1]


class RatePace:
    """A token bucket filled at a rate.

    Args:
        rate: the rate by time.
        now: when reading begins.
    """

    __slots__ = ("_at", "_began", "_rate", "_tokens")

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._began = now
        self._at = now
        self._tokens = float(_LEAST_BURST_BYTES)

    def _fill(self, now: float) -> float:
        """Add what has come since the last call; return the present rate in bytes per second."""
        rate_bytes = self._rate.at((self._at + now) / 2 - self._began) / 8
        burst = max(rate_bytes * BURST_S, _LEAST_BURST_BYTES)
        self._tokens = min(self._tokens + (now - self._at) * rate_bytes, burst)
        self._at = now
        return rate_bytes

    def allowance(self, now: float) -> int:
        """Return what is in the bucket, 0 while it is in debt."""
        self._fill(now)
        return max(int(self._tokens), 0)

    def took(self, count: int, now: float) -> None:
        """Take `count` bytes out of the bucket; it may fall into debt, since what was read cannot be given back."""
        self._tokens -= count

    def wake_at(self, now: float) -> float | None:
        """Return when half a burst is there, or sooner, to look at a rate that changes."""
        rate_bytes = self._fill(now)
        wanted = max(rate_bytes * BURST_S, _LEAST_BURST_BYTES) / 2 - self._tokens
        wait_s = wanted / rate_bytes if rate_bytes > 0 else _LONGEST_LOOK_S
        return now + min(max(wait_s, _LEAST_WAIT_S), _LONGEST_LOOK_S)


class RhythmPace:
    """Reads without limit for a while, then not at all for a while, and so on.

    Args:
        on_s: seconds of reading, more than 0.
        off_s: seconds without.
        now: when reading begins.
    """

    __slots__ = ("_began", "_on_s", "_period_s")

    def __init__(self, on_s: float, off_s: float, now: float) -> None:
        self._on_s = on_s
        self._period_s = on_s + off_s
        self._began = now

    def allowance(self, now: float) -> int:
        """Return whether it is time to read."""
        return UNLIMITED if (now - self._began) % self._period_s < self._on_s else 0

    def took(self, count: int, now: float) -> None:
        """Do nothing: there is no rate."""

    def wake_at(self, now: float) -> float | None:
        """Return when the next time of reading begins."""
        return now + self._period_s - (now - self._began) % self._period_s


class StallPace:
    """Reads without limit, and from some moment on never again.

    Args:
        stall_at: that moment.
    """

    __slots__ = ("_stall_at",)

    def __init__(self, stall_at: float) -> None:
        self._stall_at = stall_at

    def allowance(self, now: float) -> int:
        """Return whether the moment is still to come."""
        return UNLIMITED if now < self._stall_at else 0

    def took(self, count: int, now: float) -> None:
        """Do nothing: there is no rate."""

    def wake_at(self, now: float) -> float | None:
        """Return None: it does not read again."""
        return None


def parse_trace(text: str) -> Trace:
    """Return the trace that CSV lines ``seconds,bit_rate`` describe; a first line that is no pair of numbers is a head.

    The last rate holds as long as the one before it, or one second where there is only one.

    Raises:
        ValueError: there are no steps, times do not rise from 0, or a rate is out of range; says which line.
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
