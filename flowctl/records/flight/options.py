"""Which connections of a server are recorded (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from flowctl.core.text.addresses import Network, parse_network
from flowctl.errors import ConfigError

_MOST_NETWORKS: Final = 256
"""Networks are compared one by one with each newcomer's address, at half a microsecond each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlightOptions:
    """Which connections are recorded; immutable."""

    share: float = 1.0  # of the connections, as far as `most_at_once` allows
    addresses: tuple[Network, ...] = field(default=())
    # connections recorded at a time; each costs 1.3 to 2.1 ms of processor time per second more than one that keeps up
    # in a cohort (docs/benchmarks.md), and 0.8 kB a second on the disk, so that 20 are 3 % of a core and 1.4 GB a day
    most_at_once: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"the share of recorded connections is {self.share:g}, it must be 0 to 1 (100%)")
        if len(self.addresses) > _MOST_NETWORKS:
            raise ConfigError(f"the flights name {len(self.addresses)} networks, {_MOST_NETWORKS} are allowed")
        if not 1 <= self.most_at_once <= 100_000:
            raise ConfigError(
                f"flights_at_once is {self.most_at_once}, it must be 1 to 100000", hint="flights = 0 records none"
            )


def parse_networks(text: str, field: str = "addresses") -> tuple[Network, ...]:
    """Return the networks in ``127.0.0.9,10.0.0.0/8``; an address is a network of one."""
    return tuple(parse_network(part.strip(), field) for part in text.split(",") if part.strip())
