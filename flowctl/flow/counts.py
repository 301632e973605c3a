"""Message and byte counts by class, the currency of every statistic: accepted = sent + dropped + queued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, sub
from typing import Final

from flowctl.flow.state import CLASS_COUNT, MessageClass


@dataclass(frozen=True, slots=True)
class Counts:
    """A frozen count per message class (index: `MessageClass`).

    Args:
        messages: number of messages by class.
        sizes_bytes: payload bytes by class.
    """

    messages: tuple[int, ...] = (0,) * CLASS_COUNT
    sizes_bytes: tuple[int, ...] = (0,) * CLASS_COUNT

    @property
    def total_messages(self) -> int:
        """Messages of all classes."""
        return sum(self.messages)

    @property
    def total_bytes(self) -> int:
        """Bytes of all classes."""
        return sum(self.sizes_bytes)

    @property
    def figures(self) -> Figures:
        """Messages by class, then bytes by class."""
        return (*self.messages, *self.sizes_bytes)

    def of(self, message_class: MessageClass) -> int:
        """Return the number of messages of one class."""
        return self.messages[message_class]

    def __add__(self, other: Counts) -> Counts:
        if other is NO_COUNTS:
            return self
        return Counts(
            tuple(map(add, self.messages, other.messages)), tuple(map(add, self.sizes_bytes, other.sizes_bytes))
        )

    def __sub__(self, other: Counts) -> Counts:
        if other is NO_COUNTS:
            return self
        return Counts(
            tuple(map(sub, self.messages, other.messages)), tuple(map(sub, self.sizes_bytes, other.sizes_bytes))
        )

    def by_name(self) -> dict[str, int]:
        """Return the message counts that are not zero, by class name in lower case."""
        return {item.name.lower(): self.messages[item] for item in MessageClass if self.messages[item]}


NO_COUNTS = Counts()


@lru_cache(1024)
def shared(counts: Counts) -> Counts:
    """Return one object for all counts that are equal to `counts`, while few different ones are asked for.

    What viewers of one stream were sent before it is nearly always the same, and 272 bytes for each to keep.
    """
    return counts


Figures = tuple[int, ...]
"""Numbers of messages by class, then the sizes: what is added up most often, as one row."""
NO_FIGURES: Final[Figures] = (0,) * (2 * CLASS_COUNT)


class Tally(list[int]):
    """A running count per class; its owner guards it.

    One list with the numbers of messages, then the sizes: each viewer has two or three, and an object with two lists
    is 272 bytes instead of 184.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(NO_FIGURES)

    @property
    def messages(self) -> list[int]:
        """Number of messages by class; a copy."""
        return self[:CLASS_COUNT]

    @property
    def sizes(self) -> list[int]:
        """Bytes by class; a copy."""
        return self[CLASS_COUNT:]

    def add(self, message_class: MessageClass, size_bytes: int) -> None:
        """Count one message."""
        self[message_class] += 1
        self[message_class + CLASS_COUNT] += size_bytes

    def take_back(self, message_class: MessageClass, size_bytes: int) -> None:
        """Count one message less."""
        self[message_class] -= 1
        self[message_class + CLASS_COUNT] -= size_bytes

    def add_all(self, messages: Sequence[int], sizes: Sequence[int]) -> None:
        """Count a whole column of numbers by class."""
        for index in range(CLASS_COUNT):
            self[index] += messages[index]
            self[index + CLASS_COUNT] += sizes[index]

    def frozen(self) -> Counts:
        """Return the present counts."""
        return Counts(tuple(self[:CLASS_COUNT]), tuple(self[CLASS_COUNT:]))


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum of several counts."""
    result = NO_COUNTS
    for item in counts:
        result += item
    return result
