"""What waits for its outcome: a table that gives each entry away once, and knows whose time is up.

Theory of operation. An entry leaves the table before anybody is told of its outcome, so that whatever the one who is
told does next (asks again, stops everything) meets a table without it. What arrives for a key that is gone is late or
repeated: it is counted, and nothing else happens.

Deadlines are kept in buckets of `QUANTUM_S`, a dict per bucket and a heap of the buckets. Adding and taking are O(1),
and an entry that was answered leaves nothing behind: a heap of entries would keep each until its time, which at tens
of thousands a second and fifteen seconds each is a million dead ones.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from math import ceil, inf
from typing import Final, Generic, TypeVar

from flowctl.errors import LocalProtocolError


class Outcome(enum.Enum):
    """How a request ends: in exactly one of these ways, whatever arrives for it afterwards."""

    RESPONSE = "response"  #: the peer answered
    TIMEOUT = "timeout"  #: its deadline passed
    DISCONNECTED = "disconnected"  #: the connection to the peer ended
    SHUTDOWN = "shutdown"  #: our side was stopped
    WITHDRAWN = "withdrawn"  #: our caller gave it up
    REJECTED = "rejected"  #: the peer, or a limit of ours, refused it


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

QUANTUM_S: Final = 1 / 64
"""Deadlines are rounded up to a multiple of this: far below what a network makes uncertain, a power of two for exact
arithmetic."""


class Pending(Generic[K, V]):
    """Entries that wait for their outcome, each given away once.

    Not locked: its owner has one thread, or a lock.

    Attributes:
        late_count: times that something arrived for a key that was not here (any more).
    """

    __slots__ = ("_buckets", "_entries", "_order", "late_count")

    def __init__(self) -> None:
        self._entries: dict[K, tuple[V, int | None]] = {}  # value and bucket; None: no deadline
        self._buckets: dict[int, dict[K, None]] = {}
        self._order: list[int] = []  # heap of bucket numbers; may hold emptied ones
        self.late_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def add(self, key: K, value: V, deadline: float | None = None) -> None:
        if key in self._entries:
            raise LocalProtocolError(f"{key!r} waits for its outcome already")
        if deadline is None or deadline == inf:
            self._entries[key] = (value, None)
            return
        number = ceil(deadline / QUANTUM_S)
        self._entries[key] = (value, number)
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets[number] = {key: None}
            heappush(self._order, number)
        else:
            bucket[key] = None

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def take(self, key: K) -> V | None:
        """Remove `key` and return its value. None: it is not here (any more), which is counted."""
        entry = self._entries.pop(key, None)
        if entry is None:
            self.late_count += 1
            return None
        value, number = entry
        if number is not None:
            bucket = self._buckets[number]
            del bucket[key]
            if not bucket:
                del self._buckets[number]  # its number stays in the heap until it comes up
                if number != self._order[0] and len(self._order) > 2 * len(self._buckets) + 64:
                    self._order = sorted(self._buckets)
        return value

    def take_due(self, now: float) -> list[tuple[K, V]]:
        """Remove and return those whose deadline has passed, earliest first."""
        due: list[tuple[K, V]] = []
        while self._order and self._order[0] * QUANTUM_S <= now:
            bucket = self._buckets.pop(heappop(self._order), None)
            due.extend((key, self._entries.pop(key)[0]) for key in bucket or ())
        return due

    def take_where(self, wanted: Callable[[K, V], bool]) -> list[tuple[K, V]]:
        """Remove and return those for which `wanted` is true, oldest first; O(n)."""
        pairs = [(key, value) for key, (value, _) in self._entries.items() if wanted(key, value)]
        for key, _ in pairs:
            self.take(key)
        return pairs

    def take_all(self) -> list[tuple[K, V]]:
        pairs = [(key, value) for key, (value, _) in self._entries.items()]
        self._entries.clear()
        self._buckets.clear()
        self._order.clear()
        return pairs

    def next_deadline(self) -> float | None:
        """Return when `take_due` next has something, in seconds on the caller's clock. None: never."""
        while self._order and self._order[0] not in self._buckets:
            heappop(self._order)
        return self._order[0] * QUANTUM_S if self._order else None
