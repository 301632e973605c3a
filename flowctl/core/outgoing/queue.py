"""A queue of messages in the order in which they go out, counted by class (pure)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

from flowctl.core.flow.counts import Tally
from flowctl.core.flow.state import MessageClass

Item = tuple[MessageClass, bytes, float]
"""(class, wire, waiting since in seconds): what every `peek` returns."""
OwnItem = tuple[MessageClass, bytes, float, bool]
"""The same, and whether the message may be dropped."""
_Item = TypeVar("_Item", Item, OwnItem)

_LONG: Final = 256
"""From this length on a queue is a deque, whose first item goes in constant time. Below it is a list: most hold a ping,
or the three headers of a key frame, for as long as their peer is stalled, and a deque takes 760 bytes at least."""


class MessageQueue(Generic[_Item]):
    """Messages of one peer that are not, or no longer, read from a log. Its length and sizes cost O(1)."""

    __slots__ = ("_items", "size_bytes", "tally")

    def __init__(self) -> None:
        self._items: list[_Item] | deque[_Item] = []
        self.size_bytes = 0
        self.tally = Tally()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[_Item]:
        return iter(self._items)

    @property
    def oldest_at(self) -> float:
        """Since when the first message waits, in seconds; only while there is one."""
        return self._items[0][2]

    def push(self, item: _Item) -> None:
        if len(self._items) == _LONG:
            self._items = deque(self._items)
        self._items.append(item)
        size = len(item[1])
        self.size_bytes += size
        self.tally.add(item[0], size)

    def pass_messages(self, count: int) -> int:
        """Remove the first messages, `count` of them at most; return how many there were to remove."""
        items, tally = self._items, self.tally
        count = min(count, len(items))
        for item in islice(items, count):
            size = len(item[1])
            self.size_bytes -= size
            tally.take_back(item[0], size)
        if isinstance(items, list):
            del items[:count]
        else:
            for _ in range(count):
                items.popleft()
        return count

    def drop(self, goes: Callable[[_Item], bool], lost: Tally, *, first: int | None = None) -> None:
        """Throw away the messages for which `goes` returns True, and count them in `lost`."""
        items = self._items
        self._items, self.size_bytes, self.tally = [], 0, Tally()
        for index, item in enumerate(items):
            if (first is None or index < first) and goes(item):
                lost.add(item[0], len(item[1]))
            else:
                self.push(item)
