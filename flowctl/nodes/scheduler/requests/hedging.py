"""Hedging: a question that is not answered in time is asked of another peer too, and the first answer counts.

The delay is a quantile of what answers took lately, so that few questions are asked twice; a budget bounds how many
may be when everything is slow. Source: Dean, Barroso, The Tail at Scale, 2013; gRPC's hedging (gRFC A6).
"""

from __future__ import annotations

from math import exp2, log2
from typing import Final

from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policies.budget import RetryBudget

_LEAST_S: Final = 1 / 8192
"""Latencies below an eighth of a millisecond count as this: no decision depends on less."""
_PER_OCTAVE: Final = 8
"""Buckets per doubling of the latency: a quantile is at most 9 % too high."""
_BUCKETS: Final = 22 * _PER_OCTAVE
"""Number of buckets, up to nine minutes; longer latencies are in the last one."""
_HALVED_AT_COUNT: Final = 2000
"""Count at which all counts are halved: the last thousand latencies have half of the weight."""
_REUSES_PER_QUANTILE: Final = 32
"""Further latencies for which a quantile once computed is returned, before it is computed again."""


class LatencyQuantile:
    """A quantile of recent latencies, in buckets whose widths grow with them: constant memory."""

    __slots__ = ("_counts", "_found", "_least_count", "_quantile", "_since", "_total")

    def __init__(self, quantile: float, least_count: int = 20) -> None:
        self._quantile, self._least_count = quantile, least_count
        self._counts = [0] * _BUCKETS
        self._total = 0
        self._found: float | None = None
        self._since = _REUSES_PER_QUANTILE

    def observe(self, latency_s: float) -> None:
        place = int(log2(latency_s / _LEAST_S) * _PER_OCTAVE) if latency_s > _LEAST_S else 0
        self._counts[min(place, _BUCKETS - 1)] += 1
        self._total += 1
        self._since += 1
        if self._total >= _HALVED_AT_COUNT:
            self._counts = [count // 2 for count in self._counts]
            self._total = sum(self._counts)

    def value_s(self) -> float | None:
        """Return the upper edge of the bucket in which the quantile is, in seconds. None: too few are known."""
        if self._total < self._least_count:
            return None
        if self._since >= _REUSES_PER_QUANTILE or self._found is None:
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


class Hedging:
    """What all hedged requests of a scheduler share: when, how many, and what it has cost.

    Used in callbacks of one scheduler, which run one at a time; it has no lock.

    Attributes:
        first_count: requests begun.
        further_count: further tries sent, hedges and repetitions.
        duplicate_count: requests that a peer was still working on when another had answered: work for nothing.
    """

    def __init__(
        self, quantile: float = 0.95, *, at_once: int = 1, most: int = 2, budget: RetryBudget | None = None
    ) -> None:
        if not 0 < quantile < 1:
            raise ConfigError(f"quantile is {quantile}, it must be more than 0 and less than 1")
        if at_once < 1:
            raise ConfigError(f"at_once is {at_once}, it must be 1 or more")
        if most < at_once:
            raise ConfigError(f"most is {most}, it must be at_once ({at_once}) or more")
        self.at_once = at_once
        self.most = most
        self.budget = RetryBudget() if budget is None else budget
        self.latencies = LatencyQuantile(quantile)
        self.first_count = 0
        self.further_count = 0
        self.duplicate_count = 0

    def delay_s(self) -> float | None:
        """Return after how many seconds without an answer another peer is asked. None: not known yet, so not."""
        return self.latencies.value_s()
