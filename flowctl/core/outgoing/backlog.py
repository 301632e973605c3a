"""A Sender's own messages: the control lane, and a plain queue of what is sent to this peer alone (pure).

The control lane is never refused and never thinned; it has a small limit of its own, so that a peer cannot make us
queue replies without end. Everything else goes through the other queue: the policy decides when a message is offered,
and what may be dropped can be thrown away later. A queue knows nothing of pictures that refer to each other. Frames
that may be dropped go through a stream log, also where they are for one peer alone: what follows from the loss of one
is decided in `flowctl.core.outgoing.cursor`, and nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, Generic, NoReturn, TypeVar

from flowctl.core.flow.counts import Tally
from flowctl.core.flow.policy import DROPPABLE_MASK, Headroom
from flowctl.core.flow.state import MessageClass
from flowctl.errors import LocalProtocolError
from flowctl.reasons import DropReason

Item = tuple[MessageClass, bytes, float]
"""(class, wire, waiting since in seconds): what every `peek` returns."""
OwnItem = tuple[MessageClass, bytes, float, bool]
"""(class, wire, waiting since in seconds, whether the message may be dropped): an item of a peer's own queue."""
_Item = TypeVar("_Item", Item, OwnItem)

_DEQUE_FROM_MESSAGES: Final = 256
"""Length from which a queue is a deque, whose first item is removed in constant time. A shorter one is a list: most
hold a ping, or the three headers of a key frame, for as long as their peer is stalled, and a deque takes 760 bytes at
least."""


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
        """Time since which the first message waits, in seconds; only while there is one."""
        return self._items[0][2]

    def push(self, item: _Item) -> None:
        if len(self._items) == _DEQUE_FROM_MESSAGES:
            self._items = deque(self._items)
        self._items.append(item)
        size = len(item[1])
        self.size_bytes += size
        self.tally.add(item[0], size)

    def peek(self, most: int, budget_bytes: int) -> tuple[list[_Item], int]:
        """Return the next messages, at most `most` and none after `budget_bytes`, and their size."""
        items: list[_Item] = []
        size = 0
        for item in self._items:
            if len(items) >= most or size >= budget_bytes:
                break
            items.append(item)
            size += len(item[1])
        return items, size

    def pass_messages(self, count: int) -> int:
        """Remove the first messages, `count` of them at most; return how many there were to remove."""
        items, tally = self._items, self.tally
        count = min(count, len(items))
        for item in islice(items, count):
            size = len(item[1])
            self.size_bytes -= size
            tally.subtract(item[0], size)
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


NO_MESSAGES: Final[MessageQueue[Any]] = MessageQueue()
"""In place of an empty queue, which takes 300 bytes and more: nothing a thousand idle viewers should pay for. All share
it, so a message is pushed to another one: ``queue or MessageQueue()``."""
_HEADER: Final = MessageClass.HEADER
_CONTROL: Final = MessageClass.CONTROL
NEEDED: Final = frozenset({MessageClass.KEY, MessageClass.INTER})
"""Classes of frames that others refer to: after the loss of one nothing decodes until the next key frame."""


class Backlog:
    """Control lane and own queue of one Sender. Not thread-safe: its Sender's lock guards it.

    Attributes:
        control: the control lane.
        dropped: what was refused or thrown away, by reason. None: nothing was.
    """

    __slots__ = ("_own", "accepted", "control", "dropped")

    def __init__(self) -> None:
        self.control: MessageQueue[Item] = NO_MESSAGES
        self._own: MessageQueue[OwnItem] = NO_MESSAGES
        self.accepted = Tally()
        self.dropped: dict[DropReason, Tally] | None = None

    def __len__(self) -> int:
        if self.control is NO_MESSAGES and self._own is NO_MESSAGES:
            return 0  # as for most, most of the time
        return len(self.control) + len(self._own)

    @property
    def own_load(self) -> tuple[int, int]:
        """(bytes, messages) of the own queue."""
        return self._own.size_bytes, len(self._own)

    @property
    def size_bytes(self) -> int:
        return self.control.size_bytes + self._own.size_bytes

    @property
    def oldest_at(self) -> float | None:
        """Enqueue time of the oldest queued message in seconds. None: nothing is queued."""
        return min((queue.oldest_at for queue in self.queues if queue), default=None)

    # -- offering

    def offer(
        self,
        wire: bytes,
        message_class: MessageClass,
        now: float,
        *,
        mask: int,
        held: bool = False,
        full: bool = False,
        droppable: bool | None,
    ) -> DropReason | None:
        """Queue one message unless it is refused; return why it is refused, or None."""
        self.accepted.add(message_class, len(wire))
        if message_class is _CONTROL:
            self.control = self.control or MessageQueue()
            self.control.push((message_class, wire, now))
            return None
        may_drop = bool(DROPPABLE_MASK >> message_class & 1) if droppable is None else droppable
        reason = None
        if (held or (full and may_drop)) and message_class is not _HEADER:
            reason = DropReason.HELD
        elif may_drop and mask >> message_class & 1:
            reason = DropReason.REFUSED
        if reason is not None:
            self._tally(reason).add(message_class, len(wire))
            return reason
        self._own = self._own or MessageQueue()
        self._own.push((message_class, wire, now, may_drop))
        return None

    # -- taking

    def peek(self, most: int, budget_bytes: int) -> list[Item | OwnItem]:
        """Return the next messages, control first: at most `most`, and none after `budget_bytes`."""
        items: list[Item | OwnItem] = []
        for queue in self.queues:
            more, size = queue.peek(most - len(items), budget_bytes)
            items += more
            budget_bytes -= size
        return items

    def pass_messages(self, count: int) -> None:
        """Remove the first `count` messages that `peek` returned: they are sent, or in flight."""
        count -= self.control.pass_messages(count)
        self._own.pass_messages(count)
        self.control, self._own = self.control or NO_MESSAGES, self._own or NO_MESSAGES

    # -- dropping

    def drop_droppable(self, reason: DropReason) -> None:
        self._drop(len(self._own), reason)

    def drop_oldest(self, room: Headroom, reason: DropReason) -> None:
        size, messages, first = *self.own_load, 0
        for _, wire, since, may_drop in self._own:
            if room.fits(size, messages, since):
                break
            first += 1
            size -= len(wire) * may_drop
            messages -= may_drop
        self._drop(first, reason)

    def _drop(self, first: int, reason: DropReason) -> None:
        """Drop what may be dropped of the first messages of the own queue."""
        lost = Tally()
        if self._own:
            self._own.drop(lambda item: item[3], lost, first=first)
            self._own = self._own or NO_MESSAGES
        self._lose(lost, reason)

    def drop_everything(self, reason: DropReason) -> None:
        """Drop both queues, whatever the class: the connection is over."""
        for queue in self.queues:
            self._lose(queue.tally, reason)
        self.control = self._own = NO_MESSAGES

    # -- accounts

    def _lose(self, lost: Tally, reason: DropReason) -> None:
        if any(lost):
            self._tally(reason).add_figures(lost)

    def _tally(self, reason: DropReason) -> Tally:
        if self.dropped is None:
            self.dropped = {}
        return self.dropped.setdefault(reason, Tally())

    @property
    def queues(self) -> tuple[MessageQueue[Item], MessageQueue[OwnItem]]:
        return self.control, self._own


def refuse_frame(message_class: MessageClass) -> NoReturn:
    """Refuse a frame of `NEEDED` that was to be sent to one peer and might be dropped."""
    raise LocalProtocolError(
        f"a {message_class.name} frame that may be dropped cannot be sent by itself: others refer to it",
        hint="append it to a StreamLog that the peer follows, one of its own if need be; or say droppable=False",
    )
