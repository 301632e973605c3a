"""Message and byte counts by class, the currency of every statistic: accepted = sent + dropped + queued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowctl.flow import CLASS_COUNT, MessageClass


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

    def of(self, message_class: MessageClass) -> int:
        """Return the number of messages of one class."""
        return self.messages[message_class]

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            tuple(a + b for a, b in zip(self.messages, other.messages, strict=True)),
            tuple(a + b for a, b in zip(self.sizes_bytes, other.sizes_bytes, strict=True)),
        )

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            tuple(a - b for a, b in zip(self.messages, other.messages, strict=True)),
            tuple(a - b for a, b in zip(self.sizes_bytes, other.sizes_bytes, strict=True)),
        )

    def by_name(self) -> dict[str, int]:
        """Return the message counts that are not zero, by class name in lower case."""
        return {item.name.lower(): self.messages[item] for item in MessageClass if self.messages[item]}


NO_COUNTS = Counts()


class Tally:
    """A running count per class; guarded by whoever owns it."""

    __slots__ = ("messages", "sizes")

    def __init__(self) -> None:
        self.messages = [0] * CLASS_COUNT
        self.sizes = [0] * CLASS_COUNT

    def add(self, message_class: MessageClass, size_bytes: int) -> None:
        """Count one message."""
        self.messages[message_class] += 1
        self.sizes[message_class] += size_bytes

    def remove(self, message_class: MessageClass, size_bytes: int) -> None:
        """Take back one message."""
        self.messages[message_class] -= 1
        self.sizes[message_class] -= size_bytes

    def add_all(self, messages: Sequence[int], sizes: Sequence[int]) -> None:
        """Count a whole column of numbers by class."""
        for index in range(CLASS_COUNT):
            self.messages[index] += messages[index]
            self.sizes[index] += sizes[index]

    def frozen(self) -> Counts:
        """Return the present counts."""
        return Counts(tuple(self.messages), tuple(self.sizes))


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum of several counts."""
    result = NO_COUNTS
    for item in counts:
        result += item
    return result
