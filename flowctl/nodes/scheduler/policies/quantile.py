"""A quantile of recent latencies, in constant memory (pure): when to send the same question to a second peer."""

from __future__ import annotations

from math import exp2, log2
from typing import Final

_LEAST_S: Final = 1 / 8192
"""Latencies below this are taken as this: nothing is decided about less than an eighth of a millisecond."""
_PER_OCTAVE: Final = 8
"""Buckets per doubling: a quantile is at most 9 % too high."""
_BUCKETS: Final = 22 * _PER_OCTAVE
"""Up to nine minutes; later ones are in the last."""
_WINDOW: Final = 2000
"""When so many are counted, all counts are halved: half of what is known is of the last thousand."""
_REUSED: Final = 32
"""A quantile found is returned for so many more latencies before it is looked for again."""


class LatencyQuantile:
    """Latencies in buckets whose widths grow with them."""

    __slots__ = ("_counts", "_found", "_least_count", "_quantile", "_since", "_total")

    def __init__(self, quantile: float, least_count: int = 20) -> None:
        self._quantile, self._least_count = quantile, least_count
        self._counts = [0] * _BUCKETS
        self._total = 0
        self._found: float | None = None
        self._since = _REUSED

    def observe(self, latency_s: float) -> None:
        place = int(log2(latency_s / _LEAST_S) * _PER_OCTAVE) if latency_s > _LEAST_S else 0
        self._counts[min(place, _BUCKETS - 1)] += 1
        self._total += 1
        self._since += 1
        if self._total >= _WINDOW:
            self._counts = [count // 2 for count in self._counts]
            self._total = sum(self._counts)

    def value_s(self) -> float | None:
        """Return the upper edge of the bucket in which the quantile is, in seconds. None: too few are known."""
        if self._total < self._least_count:
            return None
        if self._since >= _REUSED or self._found is None:
            self._found, self._since = self._look(), 0
        return self._found

    def _look(self) -> float:
        below = self._quantile * self._total
        seen = 0
        for place, count in enumerate(self._counts):
            seen += count
            if seen >= below and count:
                return _LEAST_S * exp2((place + 1) / _PER_OCTAVE)
        return _LEAST_S * exp2(_BUCKETS / _PER_OCTAVE)
