"""Which peers may connect: none that is banned; connections in all, per address, and new ones per address and second.

A network that the ban list limits has one bucket of its own, whichever of its addresses comes.

An address is an IPv4 address or the /64 of an IPv6 one (`core.text.addresses`). The rate is a token bucket per address.
Addresses are kept in the order in which they were last seen, so that what memory they may take is freed from the front,
without a search, however many addresses a flood comes from.
"""

from __future__ import annotations

import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Final, Protocol

from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outcomes.bucket import TokenBucket
from flowctl.core.server.bans import LIMITED_BURST, LIMITED_NEW_PER_S, NO_BANS, Ban, BanAction, BanList, utc_text
from flowctl.core.text.addresses import address_key
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError, LimitExceededError

_RESERVED_DESCRIPTORS: Final = 256
"""Descriptors kept for what is no connection of media: loops, logs, files, hooks, and the 128 connections of the admin
surface, so that a flood of viewers keeps no operator out; never more than a quarter of all."""
_MOST_ADDRESSES: Final = 65_536
"""Addresses whose rate is remembered; beyond it those seen longest ago are forgotten."""
BANNED: Final = "banned"
"""Name under which connections refused by the ban list are counted, beside the names of limits."""
LIMITED: Final = "limited"
"""Name under which connections of a network that the ban list limits are counted, when they come beyond its rate."""
MORE_FILES: Final = "raise the limit of open files: LimitNOFILE= of the service, or ulimit -n"
"""What may be done where descriptors are short."""
_EVICTION_LOOKS: Final = 64
"""Addresses looked at to make room for one: bounds the time that an accepted connection costs."""


def open_files() -> int:
    """Return the limit of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def descriptor_limit() -> int:
    """Return how many connections the process may have by its limit of open files."""
    soft = open_files()
    return max(soft - min(_RESERVED_DESCRIPTORS, soft // 4), 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """Limits on accepting connections; 0 turns one off.

    Args:
        connections: connections in all. 0: what the limit of open files allows.
        connections_per_address: connections of one address; for IPv6, of one /64.
        new_per_address_and_s: rate at which one address may open connections; one of HTTP counts an eighth, and nothing
            where it was given a stream or a part of one.
        burst_per_address: how many it may open at once before the rate counts.
    """

    connections: int = 0
    connections_per_address: int = 64
    new_per_address_and_s: float = 20.0
    burst_per_address: int = 40

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("connections", "connections_per_address", "new_per_address_and_s", "burst_per_address"):
            if not getattr(self, name) >= 0:  # NaN is neither
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 (off) or more")


class ProvenNodes:
    """Addresses of connected nodes that have proven that they belong to us. Any thread."""

    def __init__(self) -> None:
        self._lock: Final = OwnedLock()
        self._counts: Counter[str] = Counter()  # guarded by _lock

    def enter(self, address: str) -> None:
        with self._lock:
            self._counts[address_key(address)] += 1

    def leave(self, address: str) -> None:
        with self._lock:
            self._counts[address_key(address)] -= 1
            self._counts = +self._counts

    def __contains__(self, address: object) -> bool:
        with self._lock:
            return bool(self._counts) and isinstance(address, str) and address_key(address) in self._counts


class OtherProcesses(Protocol):
    """The connections of other processes that are the same server; under the lock of `Admission`."""

    @property
    def processes(self) -> int:
        """The number of processes, this one included."""

    def enter(self, address: str) -> tuple[int, int]:
        """Count a connection of what counts as one address; return those of the others, in total and of the address."""

    def leave(self, address: str) -> None:
        """Count the connection no more."""


@dataclass(eq=False, slots=True)
class _Address:
    bucket: TokenBucket
    second: float  # when the running second of attempts began
    in_second: int = 0  # attempts in it
    connections: int = 0

    def attempt(self, now: float) -> None:
        if now - self.second >= 1.0:
            self.second = now
            self.in_second = 0
        self.in_second += 1


class Admission:
    """Counts connections and decides on new ones. Any thread."""

    def __init__(
        self,
        limits: AdmissionLimits,
        wall: Callable[[], float] = time.time,
        trusted: Container[str] = (),
        nodes: ProvenNodes | None = None,
    ) -> None:
        self.nodes: Final = nodes or ProvenNodes()
        self.limits = limits  # replaced as a whole; guarded by _lock
        self.bans: BanList = NO_BANS  # replaced as a whole by any thread
        self.others: OtherProcesses | None = None  # processes of the same server; set before the first connection
        self._wall: Final = wall
        self._trusted: Final = trusted
        self._most = limits.connections or descriptor_limit()  # guarded by _lock
        self._lock: Final = OwnedLock()
        self._connections = 0  # guarded by _lock
        self._refused: dict[str, int] = {}  # by name of the limit; guarded by _lock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()  # least recently seen first; guarded by _lock

    def set_limits(self, limits: AdmissionLimits) -> None:
        """Decide by other limits from now on; connections stay. Any thread."""
        with self._lock:
            self.limits, self._most = limits, limits.connections or descriptor_limit()

    @property
    def connections(self) -> int:
        with self._lock:
            return self._connections

    @property
    def most(self) -> int:
        """Connections that there may be."""
        with self._lock:
            return self._most

    @property
    def refused(self) -> dict[str, int]:
        """Connections refused so far, by name of the limit."""
        with self._lock:
            return dict(self._refused)

    def enter(self, address: str, now: float, cost: float = 1.0) -> None:
        ban = self.ban_of(address)
        if ban is not None and ban.action is BanAction.BAN:  # first of all: a banned address takes no memory
            with self._lock:
                self._refuse_locked(BANNED, ban.score, 0, f"banned: {describe_ban(ban)}")
        key, others = address_key(address), self.others
        ours = address in self.nodes
        with self._lock:
            entry = self._entry_locked(key, now)
            entry.attempt(now)
            if others is None:
                self._decide_locked(entry, ban, now, cost, ours=ours)
            else:  # counted first: of two processes that do this at the same time one sees the other
                total, of_address = others.enter(key)
                try:
                    self._decide_locked(entry, ban, now, cost, total, of_address, others.processes, ours=ours)
                except LimitExceededError:
                    others.leave(key)
                    raise
            entry.connections += 1
            self._connections += 1

    def _decide_locked(
        self,
        entry: _Address,
        ban: Ban | None,
        now: float,
        cost: float,
        total: int = 0,
        of_address: int = 0,
        share: int = 1,
        *,
        ours: bool,
    ) -> None:
        self._lock.assert_owned()
        limits = self.limits
        if not limits.connections:
            total = 0  # of open files each process has its own
        if self._connections + total >= self._most:
            why = None if limits.connections else f"there are descriptors for {self._most}: {MORE_FILES}"
            self._refuse_locked("connections", self._connections + total + 1, self._most, why)
        if ours:
            return
        most = limits.connections_per_address
        if most and entry.connections + of_address >= most:
            self._refuse_locked("connections_per_address", entry.connections + of_address + 1, most)
        if limits.new_per_address_and_s:
            rate, burst = limits.new_per_address_and_s / share, max(limits.burst_per_address, 1)
            self._take_token_locked(entry, "new_per_address_and_s", rate, burst, now, cost)
        if ban is not None:  # a bucket of its own beside that of the address
            network = self._entry_locked(f"limited {ban.cidr}", now)
            network.attempt(now)
            self._take_token_locked(network, LIMITED, LIMITED_NEW_PER_S / share, LIMITED_BURST, now, cost)

    def ban_of(self, address: str) -> Ban | None:
        """Return what the ban list says of `address` now, a ban or a limit. None: nothing."""
        ban = self.bans.match(address, self._wall())
        return None if ban is None or address in self._trusted or address in self.nodes else ban

    def leave(self, address: str) -> None:
        with self._lock:
            entry = self._addresses.get(address_key(address))
            if entry is not None and entry.connections:
                entry.connections -= 1
                self._connections -= 1
                if self.others is not None:
                    self.others.leave(address_key(address))

    def give_back(self, address: str, cost: float) -> None:
        """Give back what a connection took of the rate of its address, because it has borne fruit."""
        with self._lock:
            entry = self._addresses.get(address_key(address))
            if entry is not None:
                bucket = entry.bucket
                bucket.tokens = min(float(max(self.limits.burst_per_address, 1)), bucket.tokens + cost)

    def refuse(self, limit: str) -> None:
        """Count a connection that was refused before it could enter, by name of the limit."""
        with self._lock:
            self._refused[limit] = self._refused.get(limit, 0) + 1

    def _take_token_locked(self, entry: _Address, limit: str, rate: float, burst: int, now: float, cost: float) -> None:
        self._lock.assert_owned()
        if not entry.bucket.take_tokens(rate, float(burst), now, cost):
            message = (
                f"{limit}: {entry.in_second} attempts in this second, the limit is {rate:g} after a burst of {burst}"
            )
            self._refuse_locked(limit, entry.in_second, rate, message)

    def _refuse_locked(self, limit: str, value: float, most: float, message: str | None = None) -> None:
        self._lock.assert_owned()
        self._refused[limit] = self._refused.get(limit, 0) + 1
        raise LimitExceededError(limit, value, most, message)

    def _entry_locked(self, address: str, now: float) -> _Address:
        """Return the entry of `address`; where there are too many, the one seen longest ago makes room.

        An address with connections is passed over and counts as seen; as there are fewer connections than places
        (or else they are what takes the memory), one without is found after few steps on average.
        """
        self._lock.assert_owned()
        addresses = self._addresses
        entry = addresses.get(address)
        if entry is not None:
            addresses.move_to_end(address)
            return entry
        for _ in range(_EVICTION_LOOKS):
            if len(addresses) < _MOST_ADDRESSES:
                break
            oldest = next(iter(addresses))
            if addresses[oldest].connections:
                addresses.move_to_end(oldest)
            else:
                del addresses[oldest]
        entry = addresses[address] = _Address(TokenBucket(float(max(self.limits.burst_per_address, 1)), now), now)
        return entry


def describe_ban(ban: Ban) -> str:
    until = "until it is lifted" if ban.expires is None else f"until {utc_text(ban.expires)}"
    why = f", {ban.reason}" if ban.reason else ""
    return f"{ban.cidr}, score {ban.score:g}{why}, {until}"
