"""Power of two choices: of two open peers drawn at random, the one that is expected to answer sooner (pure).

To take the best of all costs O(n), and sends everybody to the same peer at the same moment; the better of two avoids
the worst peers at O(1). Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001; as Finagle
and Envoy have it.
"""

from __future__ import annotations

from math import exp
from random import Random
from typing import Final

from flowctl.core.outcomes.pending import Outcome
from flowctl.nodes.scheduler.policy import PeerChannels

DECAY_S: Final = 10.0
"""Time in which the weight of old latencies falls to 1/e; Finagle's default."""
FAILURE_S: Final = 1.0
"""Least latency that a failed request counts as: the peer that fails fastest must not be preferred."""

_TELLING: Final = frozenset({Outcome.RESPONSE, Outcome.TIMEOUT, Outcome.REJECTED})


class PeakEwma:
    """What an answer of a peer is expected to take: an average that is sensitive to peaks.

    A latency above the average becomes the average at once, one below pulls it down slowly: a peer that stalls is
    noticed with the first answer, and trusted again with time. Source: Finagle, "Power of Two Choices + Peak EWMA".
    """

    __slots__ = ("_at", "average_s")

    def __init__(self) -> None:
        self.average_s = 0.0  #: as of the last latency, in seconds
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


class TwoChoices:
    """A `Choice` by least expected latency: peak EWMA times the messages in flight, the better of two."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._now = 0.0  # of the last outcome: what all have faded by since does not change who is better
        self._peers: list[PeerChannels] = []

    def add(self, peer: PeerChannels) -> None:
        self._peers.append(peer)

    def take(self) -> PeerChannels | None:
        peers = self._peers
        count = len(peers)
        if count < 2:
            return peers.pop() if count else None
        random = self._rng.random  # times faster than randrange; no peer notices what it lacks in evenness
        one, other = int(random() * count), int(random() * (count - 1))
        if other >= one:
            other += 1
        if self._cost(peers[other]) < self._cost(peers[one]):
            one = other
        last = peers.pop()
        if one == count - 1:
            return last
        taken, peers[one] = peers[one], last
        return taken

    def ended(self, peer: PeerChannels, outcome: Outcome, latency_s: float, now: float) -> None:
        self._now = now
        if outcome not in _TELLING:
            return  # nothing the peer did, or it will not be asked again
        average = peer.choice_state
        if average is None:
            average = peer.choice_state = PeakEwma()
        average.observe(latency_s if outcome is Outcome.RESPONSE else max(latency_s, FAILURE_S), now)

    def _cost(self, peer: PeerChannels) -> float:
        average: PeakEwma | None = peer.choice_state
        if average is None:  # nothing yet: to be asked once, and then no more until that has ended
            return peer.closed_count * 1e9
        return average.fading_s(self._now) * (peer.closed_count + 1)
