"""A token bucket (pure): what may come at a rate, and so many at once after a pause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class TokenBucket:
    """Tokens that come at a rate up to a number. Not thread-safe."""

    tokens: float
    filled_at: float  # when they were counted last, in seconds

    def fill(self, rate_per_s: float, most: float, now: float) -> float:
        """Put in what has come since; return how many there are."""
        self.tokens = min(most, self.tokens + max(0.0, now - self.filled_at) * rate_per_s)
        self.filled_at = now
        return self.tokens

    def take_tokens(self, rate_per_s: float, most: float, now: float, count: float = 1.0) -> bool:
        if self.fill(rate_per_s, most, now) < count:
            return False
        self.tokens -= count
        return True
