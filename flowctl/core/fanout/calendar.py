"""When viewers that lag are looked at next: by the clock, and by how far their log has grown (pure)."""

from __future__ import annotations

import heapq
import itertools
from math import inf
from typing import Final, Generic, TypeVar

from flowctl.core.flow.limits import OFF_MARK

_T = TypeVar("_T")

SLOT_S: Final = 0.02
"""Length of a slot: a tenth of the usual time between two turns, and 50 calls a second however many viewers lag."""

_MOST_STALE: Final = 4
"""Ratio of places in the heaps to watched items from which the heaps are built anew."""


class TurnCalendar(Generic[_T]):
    """When items have their next turn, in slots, so that one timer serves all of them; each has one time at most."""

    __slots__ = ("_slots", "_slots_of")

    def __init__(self) -> None:
        self._slots: dict[int, dict[_T, None]] = {}
        self._slots_of: dict[_T, int] = {}

    def __len__(self) -> int:
        return len(self._slots_of)

    def put(self, item: _T, at: float) -> None:
        """Have `item`, which is not in here, due at `at`, in seconds, or up to a slot later."""
        slot = int(at / SLOT_S) + 1
        self._slots_of[item] = slot
        self._slots.setdefault(slot, {})[item] = None

    def remove(self, item: _T) -> None:
        """Forget `item`; harmless when it is not in here."""
        slot = self._slots_of.pop(item, None)
        if slot is not None:
            items = self._slots[slot]
            del items[item]
            if not items:
                del self._slots[slot]

    def take_due(self, now: float) -> list[_T]:
        """Remove and return the items that are due by now, first ones first."""
        due: list[_T] = []
        for slot in sorted(slot for slot in self._slots if slot * SLOT_S <= now):
            due += self._slots.pop(slot)
        for item in due:
            del self._slots_of[item]
        return due

    @property
    def next_at(self) -> float:
        """When the next item is due, in seconds; inf: there is none."""
        return min(self._slots) * SLOT_S if self._slots else inf

    def clear(self) -> None:
        self._slots.clear()
        self._slots_of.clear()


class Crossings(Generic[_T]):
    """Items that wait for a log to reach an offset or a sequence number, where their next limit can be crossed.

    An item is watched at one pair of places at a time. Watching it again, or forgetting it, leaves its old places in
    the heaps; they are recognised by their number and thrown away when they come up.
    """

    __slots__ = ("_by_offset", "_by_sequence", "_numbers", "_ticket", "next_offset", "next_sequence")

    def __init__(self) -> None:
        self._numbers: dict[_T, tuple[int, int, int]] = {}  # item -> (ticket, offset, sequence)
        self._by_offset: list[tuple[int, int, _T]] = []
        self._by_sequence: list[tuple[int, int, _T]] = []
        self._ticket = itertools.count()
        self.next_offset = OFF_MARK
        self.next_sequence = OFF_MARK

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, item: _T) -> bool:
        return item in self._numbers

    def watch(self, item: _T, offset: int, sequence: int) -> None:
        """Report `item` once the log has reached `offset` or `sequence`; `OFF_MARK` for never."""
        if offset >= OFF_MARK and sequence >= OFF_MARK:
            self.forget(item)
            return
        ticket = next(self._ticket)
        self._numbers[item] = (ticket, offset, sequence)
        # The ticket comes second in the tuples and is unique, so items are never compared.
        heapq.heappush(self._by_offset, (offset, ticket, item))
        heapq.heappush(self._by_sequence, (sequence, ticket, item))
        if max(len(self._by_offset), len(self._by_sequence)) > _MOST_STALE * len(self._numbers) + 16:
            self._rebuild()
        self._find_next()

    def forget(self, item: _T) -> None:
        """Report `item` no more; harmless when it is not watched."""
        self._numbers.pop(item, None)
        if not self._numbers:  # what is stale would keep items alive until somebody is watched again
            self._by_offset.clear()
            self._by_sequence.clear()
            self.next_offset = self.next_sequence = OFF_MARK

    def due(self, offset: int, sequence: int) -> list[_T]:
        """Return the items whose place the log has reached; they are not watched any more."""
        items: list[_T] = []
        for heap, reached in ((self._by_offset, offset), (self._by_sequence, sequence)):
            while heap and heap[0][0] <= reached:
                _, ticket, item = heapq.heappop(heap)
                if self._numbers.get(item, (-1,))[0] == ticket:
                    del self._numbers[item]
                    items.append(item)
        self._find_next()
        return items

    def _find_next(self) -> None:
        for heap in (self._by_offset, self._by_sequence):
            while heap and self._numbers.get(heap[0][2], (-1,))[0] != heap[0][1]:
                heapq.heappop(heap)
        self.next_offset = self._by_offset[0][0] if self._by_offset else OFF_MARK
        self.next_sequence = self._by_sequence[0][0] if self._by_sequence else OFF_MARK

    def _rebuild(self) -> None:
        self._by_offset = [(offset, ticket, item) for item, (ticket, offset, _) in self._numbers.items()]
        self._by_sequence = [(sequence, ticket, item) for item, (ticket, _, sequence) in self._numbers.items()]
        heapq.heapify(self._by_offset)
        heapq.heapify(self._by_sequence)
