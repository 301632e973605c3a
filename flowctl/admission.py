"""Who may connect: connections in all, per address, and new ones per address and second (pure)."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Final

from flowctl.errors import ConfigError, LimitExceededError

_RESERVED_DESCRIPTORS: Final = 64
"""Descriptors kept for everything that is not a connection: loops, logs, files."""
_MOST_ADDRESSES: Final = 65_536
"""Addresses remembered for their rate; beyond it those that are idle are forgotten."""


def descriptor_limit() -> int:
    """Return how many connections the process may have by its limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft - _RESERVED_DESCRIPTORS, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """Limits on accepting connections; 0 turns one off.

    Args:
        connections: connections in all. 0: what the limit of open files allows.
        connections_per_address: connections of one address.
        new_per_address_and_s: rate at which one address may open connections.
        burst_per_address: how many it may open at once before the rate counts.
    """

    connections: int = 0
    connections_per_address: int = 64
    new_per_address_and_s: float = 20.0
    burst_per_address: int = 40

    def __post_init__(self) -> None:
        for name in ("connections", "connections_per_address", "new_per_address_and_s", "burst_per_address"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 (off) or more")


class _Address:
    __slots__ = ("connections", "filled_at", "tokens")

    def __init__(self, tokens: float, now: float) -> None:
        self.connections = 0
        self.tokens = tokens
        self.filled_at = now


class Admission:
    """Counts connections and decides on new ones. One thread: the listener's, and `left` through it.

    Args:
        limits: see there.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.connections = 0
        self.refused: dict[str, int] = {}  # by name of the limit
        self._most = limits.connections or descriptor_limit()
        self._addresses: dict[str, _Address] = {}

    def enter(self, address: str, now: float) -> None:
        """Count a new connection of `address`.

        Raises:
            LimitExceededError: it may not connect; nothing was counted but the refusal.
        """
        limits = self.limits
        entry = self._addresses.get(address)
        if entry is None:
            self._forget_idle(now)
            entry = self._addresses[address] = _Address(float(max(limits.burst_per_address, 1)), now)
        if self.connections >= self._most:
            self._refuse("connections", self.connections + 1, self._most)
        most = limits.connections_per_address
        if most and entry.connections >= most:
            self._refuse("connections_per_address", entry.connections + 1, most)
        rate = limits.new_per_address_and_s
        if rate:
            burst = max(limits.burst_per_address, 1)
            entry.tokens = min(float(burst), entry.tokens + (now - entry.filled_at) * rate)
            entry.filled_at = now
            if entry.tokens < 1:
                self._refuse("new_per_address_and_s", rate + 1, rate)
            entry.tokens -= 1
        entry.connections += 1
        self.connections += 1

    def leave(self, address: str) -> None:
        """Count the end of a connection that had entered."""
        entry = self._addresses.get(address)
        if entry is not None and entry.connections:
            entry.connections -= 1
            self.connections -= 1

    def _refuse(self, limit: str, value: float, most: float) -> None:
        self.refused[limit] = self.refused.get(limit, 0) + 1
        raise LimitExceededError(limit, value, most)

    def _forget_idle(self, now: float) -> None:
        """Bound the memory of addresses: an address without connections and with a full bucket says nothing."""
        if len(self._addresses) < _MOST_ADDRESSES:
            return
        rate, burst = self.limits.new_per_address_and_s, self.limits.burst_per_address
        full_after_s = burst / rate if rate else 0.0
        for address, entry in list(self._addresses.items()):
            if not entry.connections and now - entry.filled_at >= full_after_s:
                del self._addresses[address]
        if len(self._addresses) >= _MOST_ADDRESSES:
            oldest = min(self._addresses, key=lambda key: (self._addresses[key].connections, key))
            if not self._addresses[oldest].connections:
                del self._addresses[oldest]
