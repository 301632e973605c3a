"""What waits, in the order of arrival, of which one sender takes up no more than a few places at a time (pure).

Theory of operation. One line holds what waits, oldest first, but at most `MOST_IN_LINE` of any sender; what it has sent
beyond them waits behind it, and each that leaves the line lets the next one in at its end. So the order is that of
arrival as long as nobody sends many at once, and always with one sender; and one that sends without end keeps another
one's waiting for no more than those few. All is O(1) but `newest_of_most`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar

MOST_IN_LINE: Final = 4
"""Of one sender. Each that a flood has in the line is one that others wait for: with 16, the 99th percentile of others'
calls of plain functions was twice that with 4, and with 1 half of it; but then the order of arrival means nothing."""


class Sent(Protocol):
    """What may wait."""

    number: int  #: no other one that waits has it

    @property
    def sender(self) -> Hashable:
        """Whose it is."""


S = TypeVar("S", bound=Sent)


class SenderTurns(Generic[S]):
    """What waits, in the order in which its turns come."""

    __slots__ = ("_count", "_line", "_of_sender")

    def __init__(self) -> None:
        self._line: Final[OrderedDict[int, S]] = OrderedDict()
        # All that waits of each sender, none empty, oldest first: the first `MOST_IN_LINE` of them are in the line.
        self._of_sender: Final[dict[Hashable, OrderedDict[int, S]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[S]:
        """Yield all, those of each sender in its order."""
        for own in self._of_sender.values():
            yield from own.values()

    def __contains__(self, item: S) -> bool:
        own = self._of_sender.get(item.sender)
        return own is not None and own.get(item.number) is item

    def head(self) -> S | None:
        """Return what is next; None: nothing waits."""
        return next(iter(self._line.values()), None)

    def add(self, item: S) -> None:
        """Put `item` at the end."""
        own = self._of_sender.get(item.sender)
        if own is None:
            own = self._of_sender[item.sender] = OrderedDict()
        own[item.number] = item
        if len(own) <= MOST_IN_LINE:
            self._line[item.number] = item
        self._count += 1

    def remove(self, item: S) -> None:
        """Take `item` out, from wherever it stands; one of its sender's that waits behind the line comes in for it."""
        own = self._of_sender[item.sender]
        del own[item.number]
        self._count -= 1
        if not own:
            del self._of_sender[item.sender]
        if self._line.pop(item.number, None) is not None:
            for following in islice(own.values(), MOST_IN_LINE - 1, MOST_IN_LINE):
                self._line[following.number] = following

    def above_share(self, sender: Hashable) -> bool:
        """Return whether one more of `sender` is above its share, which is the same for all that have some waiting."""
        own, senders = self._of_sender.get(sender), len(self._of_sender)
        mine = 0 if own is None else len(own)
        return (mine + 1) * (senders + (own is None)) > self._count

    def newest_of_most(self) -> S:
        """Return the newest of the sender that has most waiting; something must wait. O(senders)."""
        own = max(self._of_sender.values(), key=len)
        return next(reversed(own.values()))
