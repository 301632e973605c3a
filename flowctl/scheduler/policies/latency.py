"""What the next message to a peer is expected to cost: peak-sensitive moving average of its latency (pure).

Source: Finagle, "Power of Two Choices + Peak EWMA", as of 2023: a latency above the average becomes the average at
once, one below pulls it down slowly. A peer that stalls is noticed with the first answer, and trusted again with time.
"""

from __future__ import annotations

from math import exp
from typing import Final

DECAY_S: Final = 10.0
"""Time in which the weight of old latencies falls to 1/e; Finagle's default."""


class PeakEwma:
    """Latency and load of one peer.

    Attributes:
        in_flight: messages sent whose outcome has not come.
    """

    __slots__ = ("_at", "_average_s", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self._average_s = 0.0
        self._at = 0.0

    def sent(self) -> None:
        """Count a message that was sent."""
        self.in_flight += 1

    def ended(self, latency_s: float, now: float) -> None:
        """Count a message whose outcome came.

        Args:
            latency_s: time from its sending to its outcome, 0 or more; of one that failed, what it may be taken to
                have cost: never less than a good answer takes, or the peer that fails fastest is liked most.
            now: seconds on the caller's clock, never before those of an earlier call.
        """
        self.in_flight -= 1
        if latency_s >= self._average_s:
            self._average_s = latency_s
        else:
            weight = exp((self._at - now) / DECAY_S)
            self._average_s = self._average_s * weight + latency_s * (1 - weight)
        self._at = now

    def withdrawn(self) -> None:
        """Count a message that ended without saying anything about the peer."""
        self.in_flight -= 1

    @property
    def average_s(self) -> float:
        """The moving average as of the last outcome, in seconds; 0: no outcome has come yet."""
        return self._average_s

    def cost(self, now: float) -> float:
        """Return the average, fading with time, times the messages that would then be in flight.

        It fades because a peer that is not asked would else never be asked again. Before its first outcome a peer
        costs nothing while idle, and more than any other while its first message is under way.
        """
        if self._average_s == 0.0:
            return self.in_flight * 1e9
        return self._average_s * exp((self._at - now) / DECAY_S) * (self.in_flight + 1)
