"""When to try again: longer each time, up to a limit, and not all at the same moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Final

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError

STEADY_S: Final = 10.0
"""Shortest life of a good connection, after whose end the next is made soon. One that ends sooner, though it brought
something, counts as a failed try: a server that lets go of us again and again is not asked ten times a second."""
_MOST_DOUBLINGS = 64  # beyond, any factor above 1 has long reached the limit; a power must not overflow


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Times between the tries of one thing.

    Args:
        most_s: longest wait, `first_s` or more.
        jitter: share of a wait that is left to chance, 0 to 1: the wait is between ``1 - jitter`` and 1 times its
            full length. Peers that lost the same server at the same moment must not come back at the same moment.
    """

    first_s: float = 0.25
    factor: float = 2.0
    most_s: float = 30.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.first_s > 0:
            raise ConfigError(f"first_s is {self.first_s}, it must be more than 0")
        if not self.factor >= 1:
            raise ConfigError(f"factor is {self.factor}, it must be 1 or more")
        if not self.most_s >= self.first_s:
            raise ConfigError(f"most_s is {self.most_s}, it must be first_s ({self.first_s}) or more")
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"jitter is {self.jitter}, it must be 0 to 1")

    def delay_s(self, tries: int, rng: Random) -> float:
        """Return how long to wait after `tries` tries, 1 or more, in seconds."""
        full = min(self.most_s, self.first_s * self.factor ** min(tries - 1, _MOST_DOUBLINGS))
        return full * (1 - self.jitter * rng.random())


@dataclass(slots=True)
class Redial:
    """When to connect again what is to stay connected: later after each connection that did not last (pure)."""

    backoff: Backoff
    rng: Random = field(default_factory=Random)
    tries: int = 0  # tries since a connection lasted, the present one included

    def begin(self) -> None:
        self.tries += 1

    def delay_s(self, lasted_s: float = 0.0) -> float:
        """Return how long to wait, now that a connection has ended that lasted so long; 0 if it was never made."""
        if lasted_s >= STEADY_S:
            self.tries = 0
        # One that was made and did not last counts as a try more: the peer that cut it may cut the next one too.
        return self.backoff.delay_s(max(self.tries + (lasted_s > 0), 1), self.rng)
