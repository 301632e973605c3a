"""What streams that are written share, places, memory and time; and which of them gives way when there is too little.

Places. The number of recordings and playlists is limited. While there are free places, the first to come has one. Then
a stream of an address that has fewer than the address that has most takes the newest place of that one; of several that
have most, of any. An address is an IPv4 address or a /64 of IPv6, and its network (/24, /48) may have `NETWORK_TIMES`
as many, as with penalties; within a network the address that has most gives way first. So many addresses of one
network, or an address that publishes as much as it may, keep no other one from being written, and a studio that is
alone has all places.

Memory. A stream holds the messages that wait for the disk, or for the end of what they become, and what was made
of them. What is written of one stream in two ways holds the same messages: they count once. Limits of one stream bound
each; this bounds the sum. It is added up whenever a part of the limit has come, and once a second. Above the limit the
streams that hold most are cut until `_LOW_SHARE` of it is left: their queues and what is open of their files are let
go. They may go on once that is so.

Time. The processor time that it takes to write a stream is measured. What its bytes do not account for is charged to
its publisher's address: parts and files of tiny streams cost as much as those of others. Where that is more than a
share of a core, streams of the address that is charged most give way, the dearest first, until `_LOW_SHARE` of it is
left; an address that is alone takes it from nobody. They begin again once what they took is free, and so does all else
of their addresses.

What is freed lies in between what is not, in the heap of the C library, and is given back to the system after a peak.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from math import exp
from random import Random
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from flowctl.core.server.heap import trim_heap
from flowctl.errors import LimitExceededError
from flowctl.live.judging.penalties import NETWORK_TIMES, networks_of
from flowctl.units import format_size

_Key = TypeVar("_Key", bound=Hashable)

_STEPS: Final = 32
"""Parts of the limit: once each has come, it is looked whether that is too much."""
_LOW_SHARE: Final = 0.8
_GIVE_BACK_BYTES: Final = 32 << 20
"""What has been let go since the heap was looked at, from which it is worth a look."""
_WINDOW_S: Final = 10.0
"""Time over which what a stream takes is averaged: beginning one costs more than going on with it."""
_LEAST_LOOK_S: Final = 0.5
_REST_S: Final = 10.0
"""Least time for which a stream that gave way is not begun again, as one that was cut for its memory."""
_FORGOTTEN_S: Final = 300.0
"""Time for which an address is held to what its streams took, so that another name is no way around it."""


class Holder(Protocol):
    """One stream that is written."""

    @property
    def name(self) -> str:
        """Of the stream."""

    @property
    def held_bytes(self) -> int:
        """What it holds. Any thread."""

    def cut(self, why: str) -> None:
        """Let go of it, and hold nothing until `go_on`."""

    def go_on(self) -> None:
        """Hold again what comes."""


class StreamMemory:
    """The memory of all streams of one process; the thread that receives them, unless something else is said."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes: Final = limit_bytes
        self._low_bytes: Final = int(limit_bytes * _LOW_SHARE)
        self.holders: tuple[Holder, ...] = ()  # replaced as a whole, by any thread
        self._cut: set[Holder] = set()
        self._come_bytes = 0  # since it was looked at
        self._most_bytes = 0  # that were held since the heap was trimmed
        self.due = False  # it is to be trimmed in any case; the main thread

    def note(self, size_bytes: int) -> None:
        """Note that so much has come."""
        self._come_bytes += size_bytes
        if self._come_bytes * _STEPS >= self._limit_bytes:
            self.look()

    def look(self) -> None:
        """Cut the streams that hold most if all hold too much; let those that were cut go on if they do not."""
        self._come_bytes = 0
        held = {holder: holder.held_bytes for holder in self.holders}
        total = sum(held.values())
        self._most_bytes = max(self._most_bytes, total)
        if total <= self._low_bytes:
            for holder in self._cut:
                holder.go_on()
            self._cut.clear()
        if total <= self._limit_bytes:
            return
        self._cut &= held.keys()
        left = total - sum(held[holder] for holder in self._cut)  # they are about to let go
        for holder in sorted(held.keys() - self._cut, key=lambda item: held[item], reverse=True):
            if left <= self._low_bytes:
                break
            left -= held[holder]
            self._cut.add(holder)
            holder.cut(
                f"{format_size(total)} are held of all streams, more than {format_size(self._limit_bytes)},"
                f" and {format_size(held[holder])} of this one"
            )

    def give_back(self) -> None:
        """Give the system what the heap has free, if much was let go. The main thread; it takes milliseconds."""
        total = sum(holder.held_bytes for holder in self.holders)
        if self.due or self._most_bytes - total >= _GIVE_BACK_BYTES:
            self._most_bytes, self.due = total, False
            trim_heap()


class Places(Generic[_Key]):
    """The places of one process. Not locked: its owner has one thread.

    Args:
        what: who has them, in words.
        rng: dice.
    """

    def __init__(self, what: str = "recordings and playlists are written", rng: Random | None = None) -> None:
        self._what: Final = what
        self._rng: Final = rng or Random()
        self._units: dict[_Key, tuple[str, ...]] = {}  # address and network of each, in the order in which they came
        self._counts: Counter[str] = Counter()
        self._heaviest: _Key | None = None  # who gives way next. None: not known

    def __len__(self) -> int:
        return len(self._units)

    def take(self, key: _Key, address: str, most: int) -> _Key | None:
        """Give `key` a place of `most`; return what gives way for it. None: nothing has to.

        `address`: of its publisher; empty: of none, since it comes from another server, and then it is one by itself.

        Raises:
            LimitExceededError: all are taken, and no address has more of them than this one.
        """
        units = _units_of(key, address)
        victim = None
        if key not in self._units and len(self._units) >= most:
            if self._heaviest is None:
                self._heaviest = self._choose()
            victim = self._heaviest
            gone = self._units[victim]
            if self._weight(gone) <= self._weight(units, [unit not in gone for unit in units]):  # in its place
                why = f"{most} {self._what}, and no address has more of them than this one"
                raise LimitExceededError("written_streams", len(self._units) + 1, most, why)
            self.free(victim)
        self.free(key)
        self._units[key] = units
        self._counts.update(units)
        self._heaviest = None
        return victim

    def _choose(self) -> _Key:
        """Return the newest stream of an address that has most; of several such any: first come, all would stay."""
        most = max(map(self._weight, set(self._units.values())))
        newest = {units: key for key, units in self._units.items() if self._weight(units) == most}
        return self._rng.choice(list(newest.values()))

    def free(self, key: _Key) -> None:
        """Give a place back. Harmless for what has none."""
        units = self._units.pop(key, None)
        if units is not None:
            self._counts = self._counts - Counter(units)
            self._heaviest = None

    def _weight(self, units: tuple[str, ...], more: Iterable[int] = repeat(0)) -> tuple[float, float]:
        own, *wide = (self._counts[unit] + one for unit, one in zip(units, more, strict=False))
        return max(own, *(count / NETWORK_TIMES for count in wide)) if wide else own, own


@dataclass(slots=True)
class _Charged:
    """One stream that is charged; a share is of one core."""

    spent_s: float
    share: float
    units: tuple[str, ...] = ()  # its address, and the network of that


class _Resting(NamedTuple):
    """One stream that gave way."""

    unit: str
    share: float
    at: float
    why: str


class WorkTime(Generic[_Key]):
    """The processor time of one process that bytes do not account for. Not locked: its owner has one thread."""

    def __init__(self, limit_share: float) -> None:
        self._limit: Final = limit_share
        self._low: Final = limit_share * _LOW_SHARE
        self._charged: dict[_Key, _Charged] = {}
        self._taken = 0.0  # by all of them, and what is set aside
        self._resting: dict[_Key, _Resting] = {}
        self._dearest: dict[str, _Resting] = {}  # of each address
        self._looked_at = 0.0

    def look(self, now: float, spent: Mapping[_Key, tuple[str, float]]) -> dict[_Key, str]:
        """Return what gives way and why; `spent`: of each stream the address, and the seconds to be charged so far."""
        passed_s = now - self._looked_at
        if passed_s < _LEAST_LOOK_S:
            return {}
        self._looked_at, weight = now, 1 - exp(-passed_s / _WINDOW_S)
        before, self._charged = self._charged, {}
        for key, (address, spent_s) in spent.items():
            units, charged = _units_of(key, address), before.get(key)
            if charged is None:  # what it took since the last look, when it was not there, counts from its first byte
                rest = self._rest_of(key, units)
                charged = _Charged(0.0, 0.0 if rest is None else self._resting.pop(key).share)
            elif charged.units[-1] != units[-1]:  # another network has the name now, and did not take it
                charged.share = 0.0
            charged.units = units
            charged.share += (max(spent_s - charged.spent_s, 0.0) / passed_s - charged.share) * weight
            charged.spent_s = spent_s
            self._charged[key] = charged
        self._taken = sum(charged.share for charged in self._charged.values())
        over = self._give_way(now) if self._taken > self._limit else {}
        self._resting = {key: rest for key, rest in self._resting.items() if now - rest.at < _FORGOTTEN_S}
        self._dearest = {rest.unit: rest for rest in sorted(self._resting.values(), key=lambda rest: rest.share)}
        return over

    def check(self, key: _Key, address: str, now: float) -> None:
        """See whether a stream may begin; what it took before is set aside for it.

        Raises:
            LimitExceededError: streams of its address gave way, and there is no time for it yet.
        """
        units = _units_of(key, address)
        rest = self._rest_of(key, units) or self._dearest.get(units[0])
        if rest is None:
            return
        share = min(rest.share, self._low)  # what takes more begins once it is alone
        if now - rest.at < _REST_S or self._taken + share > self._low:
            raise LimitExceededError("written_time", self._taken + share, self._low, rest.why)
        self._taken += share

    def _rest_of(self, key: _Key, units: tuple[str, ...]) -> _Resting | None:
        """Return what a stream took before; None where that was another address, which had its name then."""
        rest = self._resting.get(key)
        return rest if rest is not None and rest.unit == units[0] else None

    def _give_way(self, now: float) -> dict[_Key, str]:
        total, shares = self._taken, defaultdict[str, float](float)
        streams = Counter(charged.units[0] for charged in self._charged.values())
        for charged in self._charged.values():
            for unit in charged.units:
                shares[unit] += charged.share
        over: dict[_Key, str] = {}
        while self._taken > self._low and len(streams) > 1:
            victim = max(self._charged, key=lambda key: self._weight(self._charged[key], shares))
            gone = self._charged.pop(victim)
            own = gone.units[0]
            why = (
                f"streams take {total:.2f} of a core beyond what their bytes do, more than {self._limit:.2f},"
                f" and {shares[own]:.2f} of it those of its address"
            )
            over[victim] = why
            self._resting[victim] = _Resting(own, gone.share, now, why)
            self._taken -= gone.share
            streams = streams - Counter((own,))
            for unit in gone.units:
                shares[unit] -= gone.share
        return over

    def _weight(self, charged: _Charged, shares: Mapping[str, float]) -> tuple[float, float, float]:
        """Return how soon a stream gives way: of a network that takes much, its dearest address comes first."""
        own, *wide = (shares[unit] for unit in charged.units)
        return max(own, *(share / NETWORK_TIMES for share in wide)) if wide else own, own, charged.share


def _units_of(key: Hashable, address: str) -> tuple[str, ...]:
    """Return address and network of a publisher; of one by itself, since it comes from another server, its stream."""
    return networks_of(address) or (f"{key}",)
