"""What waits, in turns by who sent it (pure): oldest first, but nobody's second before everybody's first.

Theory of operation. Each sender has a line of its own, in the order of arrival, and the lines take turns: one whose
first has left goes behind the others. With one sender, or with one job of each, that is the order of arrival. Who sends
more than is done makes his own line longer and nobody else's: what another one sends waits for one job of each line.
All is O(1) but `newest_of_most`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Final, Generic, Protocol, TypeVar


class Sent(Protocol):
    """What may wait."""

    number: int  #: no other one that waits has it

    @property
    def sender(self) -> Hashable:
        """Whose it is."""


S = TypeVar("S", bound=Sent)


class Turns(Generic[S]):
    """What waits, in the order in which its turns come."""

    __slots__ = ("_count", "_lines")

    def __init__(self) -> None:
        self._lines: Final[OrderedDict[Hashable, OrderedDict[int, S]]] = OrderedDict()  # none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[S]:
        """Yield all, each line in its order."""
        for line in self._lines.values():
            yield from line.values()

    def __contains__(self, item: S) -> bool:
        line = self._lines.get(item.sender)
        return line is not None and line.get(item.number) is item

    def head(self) -> S | None:
        """Return what is next; None: nothing waits."""
        for line in self._lines.values():
            return next(iter(line.values()))
        return None

    def add(self, item: S) -> None:
        """Put `item` at the end of the line of its sender."""
        line = self._lines.get(item.sender)
        if line is None:
            line = self._lines[item.sender] = OrderedDict()
        line[item.number] = item
        self._count += 1

    def remove(self, item: S) -> None:
        """Take `item` out, from wherever it stands; if it is the head, the turn is the next sender's."""
        line = self._lines[item.sender]
        is_head = self.head() is item
        del line[item.number]
        self._count -= 1
        if not line:
            del self._lines[item.sender]
        elif is_head:
            self._lines.move_to_end(item.sender)

    def above_share(self, sender: Hashable) -> bool:
        """Return whether one more of `sender` is above its share, which is the same for all that have some waiting."""
        line = self._lines.get(sender)
        mine, senders = (len(line), len(self._lines)) if line else (0, len(self._lines) + 1)
        return (mine + 1) * senders > self._count

    def newest_of_most(self) -> S:
        """Return the newest of the sender that has most waiting; something must wait. O(senders)."""
        line = max(self._lines.values(), key=len)
        return next(reversed(line.values()))
