"""A retry budget: work done twice may be a share of the work done once, and no more (pure).

When peers fail, everybody tries again at once, and the tries bury what still works. A count per request cannot bound
that; a budget of all requests can. Source: Finagle's RetryBudget, gRPC's retry throttling (gRFC A6).
"""

from __future__ import annotations

from flowctl.errors import ConfigError


class RetryBudget:
    """A bucket of tokens: each first try puts a share of one in, each further try takes one out.

    Not locked: it belongs to the callbacks of one scheduler, which run one at a time, or has a lock of its owner's.
    """

    __slots__ = ("_at", "_least_per_s", "_most", "_share", "_tokens", "refused_count", "taken_count")

    def __init__(self, share: float = 0.2, least_per_s: float = 10.0, most: float = 100.0) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"share is {share}, it must be 0 to 1")
        if not 0 <= least_per_s < float("inf"):
            raise ConfigError(f"least_per_s is {least_per_s}, it must be 0 or more and finite")
        if not 1 <= most < float("inf"):
            raise ConfigError(f"most is {most}, it must be 1 or more and finite")
        self._share, self._least_per_s, self._most = share, least_per_s, most
        self._tokens = most
        self._at: float | None = None
        self.taken_count = 0  # further tries that were allowed
        self.refused_count = 0  # and that were not

    @property
    def tokens(self) -> float:
        return self._tokens

    def first_try(self) -> None:
        self._tokens = min(self._most, self._tokens + self._share)

    def take(self, now: float) -> bool:
        if self._at is None:
            self._at = now
        elif now > self._at:
            self._tokens = min(self._most, self._tokens + (now - self._at) * self._least_per_s)
            self._at = now
        if self._tokens < 1:
            self.refused_count += 1
            return False
        self._tokens -= 1
        self.taken_count += 1
        return True
