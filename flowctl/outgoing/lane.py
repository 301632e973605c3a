"""A short queue of messages that go out before the rest, counted by class (pure)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from flowctl.flow.counts import Tally
from flowctl.flow.state import MessageClass

Item = tuple[MessageClass, bytes, float]
"""(class, wire, waiting since in seconds), as every `peek` of a queue returns it."""

_LONG: Final = 256
"""From so many messages on a lane is a deque, whose first item goes in constant time. Below it is a list: most lanes
hold the three headers of a key frame, for as long as their viewer is stalled, and a deque is 760 bytes at least."""


class Lane:
    """Messages of one viewer that are not, or no longer, read from a log. Its length and sizes cost O(1).

    Attributes:
        size_bytes: wire bytes of all messages.
        tally: what is in the lane by class.
    """

    __slots__ = ("_items", "size_bytes", "tally")

    def __init__(self) -> None:
        self._items: list[Item] | deque[Item] = []
        self.size_bytes = 0
        self.tally = Tally()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    @property
    def oldest_at(self) -> float:
        """Since when the first message waits, in seconds; only while there is one."""
        return self._items[0][2]

    def push(self, message_class: MessageClass, wire: bytes, since: float) -> None:
        """Append one message."""
        if len(self._items) == _LONG:
            self._items = deque(self._items)
        self._items.append((message_class, wire, since))
        self.size_bytes += len(wire)
        self.tally.add(message_class, len(wire))

    def pop(self) -> None:
        """Remove the first message."""
        items = self._items
        message_class, wire, _ = items.pop(0) if isinstance(items, list) else items.popleft()
        self.size_bytes -= len(wire)
        self.tally.take_back(message_class, len(wire))

    def has_any_but(self, kept: tuple[MessageClass, ...]) -> bool:
        """Return whether there is a message of a class that is not in `kept`."""
        return sum(self.tally.messages[item] for item in kept) < len(self._items)

    def drop_all_but(self, kept: tuple[MessageClass, ...], lost: Tally) -> None:
        """Throw away what is not of a class in `kept`, counting it in `lost`."""
        if not self.has_any_but(kept):
            return
        items = self._items
        self._items, self.size_bytes, self.tally = [], 0, Tally()
        for item in items:
            if item[0] in kept:
                self.push(*item)
            else:
                lost.add(item[0], len(item[1]))
