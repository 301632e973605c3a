"""What a fleet agrees on (pure): a table of bans and limits that any two members can merge, in any order, any often.

Theory of operation. An entry has a key: the network and the action of a ban, or the limits. Each change of it gives it
a later stamp (`stamp.py`), and of two versions of an entry the later one stays. That is all of merging, so it does not
matter who hears what from whom, in which order, or how often: members that have heard of the same changes hold the
same.

An entry that was lifted stays, without a value, for otherwise a member that missed this would bring the old version
back. So does one that was shortened. How long is written into the entry with the change (`kept_until_s`): as long as
the version before would have lasted, at most `MEMORY_S`. An entry that ended by itself needs no such memory: its older
versions have ended too.

A table holds the `MOST_ENTRIES` latest entries. That keeps merging what it is: an entry that is not among the latest of
one table is not among the latest of any that includes it. Two tables are compared by sums over their entries, in
`BUCKETS` parts, so that of a hundred thousand entries only a hundred are sent to find the one that differs.

Source, with the proof: Shapiro et al., "Conflict-free Replicated Data Types", 2011 (last writer wins).
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import inf
from typing import Final

from flowctl.control.fleet.stamp import Stamp
from flowctl.core.server.bans import MOST_BANS

MEMORY_S: Final = 30 * 86_400.0
"""How long it is remembered that an entry was lifted: longer than a machine is away for repair. A member that was away
for longer takes the table of the others in place of its own (`gossip.py`)."""
MOST_ENTRIES: Final = MOST_BANS
"""Entries of a table, lifted ones included: what one server's ban list holds."""
BUCKETS: Final = 1024
"""Parts in which tables are compared: a message of 16 KiB, and a hundred entries of a full table in each."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One version of what the fleet holds under a key.

    Args:
        stamp: when it was changed, and by whom.
        value: the text of a ban, a line of the ban file, or of the limits, a limits file. None: it was lifted.
        ends_s: when it ends by itself, seconds since the epoch; infinite: never. 0: it was lifted.
        kept_until_s: until when it is kept, so that no older version comes back; `ends_s` or later.
    """

    stamp: Stamp
    value: str | None
    ends_s: float
    kept_until_s: float

    def counts(self, now_s: float) -> bool:
        """Return whether it is in force at `now_s`, seconds since the epoch."""
        return self.value is not None and now_s < self.ends_s

    def after(self, other: Entry) -> bool:
        """Return whether it is the version that stays of the two.

        Two of one stamp and different contents are the work of a member that lost its memory; the rest of the order
        only sees to it that all members decide alike.
        """
        return self._order() > other._order()

    def _order(self) -> tuple[Stamp, bool, float, str]:
        return self.stamp, self.value is None, self.kept_until_s, self.value or ""


def version(stamp: Stamp, value: str | None, ends_s: float, before: Entry | None, now_s: float) -> Entry:
    """Return the next version of an entry, as the member that changes it writes it."""
    ends_s = 0.0 if value is None else ends_s
    held_s = 0.0 if before is None else min(before.kept_until_s, now_s + MEMORY_S)
    return Entry(stamp, value, ends_s, max(ends_s, held_s))


class Table:
    """The entries that one member holds. One thread.

    Attributes:
        sums: one number per bucket; members whose sums are equal hold the same entries.
        evicted_count: entries that had to go because there were more than `most`.
    """

    def __init__(self, entries: Iterable[tuple[str, Entry]] = (), most: int = MOST_ENTRIES) -> None:
        self._most: Final = most
        self._entries: dict[str, Entry] = {}
        self._buckets: list[set[str]] = [set() for _ in range(BUCKETS)]
        self.sums: list[int] = [0] * BUCKETS
        self.evicted_count = 0
        self.merge(entries, -inf)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def items(self) -> Iterable[tuple[str, Entry]]:
        """Return all entries with their keys."""
        return self._entries.items()

    def in_force(self, now_s: float) -> Iterator[tuple[str, Entry]]:
        return ((key, entry) for key, entry in self._entries.items() if entry.counts(now_s))

    def merge(self, entries: Iterable[tuple[str, Entry]], now_s: float) -> list[str]:
        """Take what is later than what is here; return the keys that changed."""
        changed: dict[str, bool] = {}  # whether the key was here before
        for key, entry in entries:
            own = self._entries.get(key)
            if now_s < entry.kept_until_s and (own is None or entry.after(own)):
                self._put(key, entry)
                changed.setdefault(key, own is not None)
        excess = len(self._entries) - self._most
        if excess > 0:
            oldest = heapq.nsmallest(excess, self._entries, key=lambda key: (self._entries[key].stamp, key))
            for key in oldest:
                self._drop(key)
                if changed.pop(key, True):
                    self.evicted_count += 1
                    changed[key] = True
        return list(changed)

    def replace(self, key: str, entry: Entry) -> None:
        """Put `entry` in place of the version that is here, although it is not later: that one is nowhere else."""
        self._put(key, entry)

    def forget(self, now_s: float) -> list[str]:
        """Drop what need not be kept any more at `now_s`, seconds since the epoch; return its keys."""
        gone = [key for key, entry in self._entries.items() if now_s >= entry.kept_until_s]
        for key in gone:
            self._drop(key)
        return gone

    def take_over(self, numbers: Iterable[int], stay: Container[str], than: Stamp) -> list[str]:
        """Drop from some buckets the entries that another member does not have; return their keys."""
        gone = [
            key
            for number in numbers
            for key in self._buckets[number]
            if key not in stay and self._entries[key].stamp <= than
        ]
        for key in gone:
            self._drop(key)
        return gone

    def root(self) -> str:
        """Return one text for the whole: equal where the entries are."""
        return blake2b(struct.pack(f"<{BUCKETS}Q", *self.sums), digest_size=16).hexdigest()

    def differing(self, sums: Sequence[int]) -> list[int]:
        """Return the numbers of the buckets whose sum is not that of another table."""
        return [number for number, sum_ in enumerate(self.sums) if sum_ != sums[number]]

    def bucket(self, number: int) -> list[tuple[str, Entry]]:
        return [(key, self._entries[key]) for key in sorted(self._buckets[number])]

    def _put(self, key: str, entry: Entry) -> None:
        self._drop(key)
        self._entries[key] = entry
        number = _bucket_of(key)
        self._buckets[number].add(key)
        self.sums[number] ^= _fingerprint(key, entry)

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            number = _bucket_of(key)
            self._buckets[number].discard(key)
            self.sums[number] ^= _fingerprint(key, entry)


@lru_cache(maxsize=4096)
def _bucket_of(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=2).digest(), "little") % BUCKETS


def _fingerprint(key: str, entry: Entry) -> int:
    """Return 64 bits that stand for one version of an entry."""
    text = f"{key}\0{entry.stamp}\0{entry.kept_until_s}\0{entry.value}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
