"""Who is written where not all can be: an address that has many places gives way to one that has fewer (pure).

The number of recordings and playlists is limited. While there are free places, the first to come has one. Then a
stream of an address that has fewer than the address that has most takes the newest place of that one. An address is an
IPv4 address or a /64 of IPv6, and its network (/24, /48) may have `NETWORK_TIMES` as many, as with penalties. So many
addresses of one network, or an address that publishes as much as it may, keep no other one from being written, and a
studio that is alone has all places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from flowctl.errors import LimitExceededError
from flowctl.live.judging.penalties import NETWORK_TIMES, networks_of

_Key = TypeVar("_Key", bound=Hashable)


class Places(Generic[_Key]):
    """The places of one process. Not locked: its owner has one thread."""

    def __init__(self) -> None:
        self._units: dict[_Key, tuple[str, ...]] = {}  # address and network of each, in the order in which they came
        self._counts: Counter[str] = Counter()
        self._heaviest: tuple[_Key, float] | None = None  # who gives way next, and its weight. None: not known

    def __len__(self) -> int:
        return len(self._units)

    def take(self, key: _Key, address: str, most: int) -> _Key | None:
        """Give `key` a place of `most`; return what gives way for it. None: nothing has to.

        `address`: of its publisher; empty: of none, since it comes from another server, and then it is one by itself.

        Raises:
            LimitExceededError: all are taken, and no address has more of them than this one.
        """
        units = networks_of(address) or (f"{key}",)
        victim = None
        if key not in self._units and len(self._units) >= most:
            if self._heaviest is None:
                found = max(reversed(self._units), key=lambda item: self._weight(self._units[item]))
                self._heaviest = found, self._weight(self._units[found])
            victim, weight = self._heaviest
            if weight <= self._weight(units, 1):
                why = f"{most} recordings and playlists are written, and no address has more of them than this one"
                raise LimitExceededError("written_streams", len(self._units) + 1, most, why)
            self.free(victim)
        self.free(key)
        self._units[key] = units
        self._counts.update(units)
        self._heaviest = None
        return victim

    def free(self, key: _Key) -> None:
        """Give a place back. Harmless for what has none."""
        units = self._units.pop(key, None)
        if units is not None:
            self._counts = self._counts - Counter(units)
            self._heaviest = None

    def _weight(self, units: tuple[str, ...], more: int = 0) -> float:
        own, *wide = (self._counts[unit] + more for unit in units)
        return max(own, *(count / NETWORK_TIMES for count in wide)) if wide else own
