"""Hedging: a question that is not answered in time is asked of another peer too, and the first answer counts.

The delay is a quantile of what answers took lately, so that few questions are asked twice; a budget bounds how many
may be when everything is slow. Source: Dean, Barroso, The Tail at Scale, 2013; gRPC's hedging (gRFC A6).
"""

from __future__ import annotations

from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policies.budget import RetryBudget
from flowctl.nodes.scheduler.policies.quantile import LatencyQuantile


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
