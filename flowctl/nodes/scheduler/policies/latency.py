"""What an answer of a peer is expected to take: a moving average that is sensitive to peaks (pure).

Source: Finagle, "Power of Two Choices + Peak EWMA": a latency above the average becomes the average at once, one below
pulls it down slowly. A peer that stalls is noticed with the first answer, and trusted again with time.
"""

from __future__ import annotations

from math import exp
from typing import Final

DECAY_S: Final = 10.0
"""Time in which the weight of old latencies falls to 1/e; Finagle's default."""


class PeakEwma:
    """The average of one peer.

    Attributes:
        average_s: as of the last latency, in seconds.
    """

    __slots__ = ("_at", "average_s")

    def __init__(self) -> None:
        self.average_s = 0.0
        self._at = 0.0

    def observe(self, latency_s: float, now: float) -> None:
        if latency_s >= self.average_s:
            self.average_s = latency_s
        else:
            weight = exp((self._at - now) / DECAY_S)
            self.average_s = self.average_s * weight + latency_s * (1 - weight)
        self._at = now

    def fading_s(self, now: float) -> float:
        """Return the average less what time has taken from it: a peer that is not asked would else never be again."""
        return self.average_s * exp((self._at - now) / DECAY_S)
