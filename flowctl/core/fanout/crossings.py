"""Which lagging viewers to look at when a log has grown: ordered by where their next limit can be crossed (pure)."""

from __future__ import annotations

import heapq
import itertools
from typing import Final, Generic, TypeVar

from flowctl.core.flow.limits import OFF_MARK

_T = TypeVar("_T")

_MOST_STALE: Final = 4
"""Ratio of places in the heaps to watched items from which the heaps are built anew."""


class Crossings(Generic[_T]):
    """Items that wait for a log to reach an offset or a sequence number, whichever comes first.

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
