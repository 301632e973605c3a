"""Message and byte counts by class, the currency of every statistic: accepted = sent + dropped + queued.

There are two shapes. Inside, a row of *figures*: the numbers of messages by class, then the sizes, in one flat row
that C adds up in one go; a `Tally` is one that still runs. Outside, `Counts`, which say what is which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import Final

from flowctl.core.flow.state import CLASS_COUNT, MessageClass
from flowctl.reasons import DropReason

Figures = tuple[int, ...]
"""Numbers of messages by class, then the sizes in bytes by class."""
NO_FIGURES: Final[Figures] = (0,) * (2 * CLASS_COUNT)
Balance = tuple[Figures, dict[DropReason, Figures], Figures]
"""(accepted, dropped by reason, queued) of one instant; what is in neither of the last two was sent."""


@dataclass(frozen=True, slots=True)
class Counts:
    """A frozen count per message class (index: `MessageClass`).

    Args:
        messages: number of messages by class.
        sizes_bytes: payload bytes by class.
    """

    messages: tuple[int, ...] = (0,) * CLASS_COUNT
    sizes_bytes: tuple[int, ...] = (0,) * CLASS_COUNT

    @classmethod
    def of_figures(cls, figures: Sequence[int]) -> Counts:
        return cls(tuple(figures[:CLASS_COUNT]), tuple(figures[CLASS_COUNT:])) if any(figures) else NO_COUNTS

    @property
    def figures(self) -> Figures:
        """These counts as a row of figures."""
        return (*self.messages, *self.sizes_bytes)

    @property
    def total_messages(self) -> int:
        return sum(self.messages)

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes_bytes)

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


NO_COUNTS: Final = Counts()


class Tally(list[int]):
    """A running row of figures; its owner guards it.

    It is the list itself: each viewer has two or three, and an object with two lists is 272 bytes instead of 184.
    """

    __slots__ = ()

    def __init__(self, figures: Iterable[int] = NO_FIGURES) -> None:
        super().__init__(figures)

    def add(self, message_class: MessageClass, size_bytes: int) -> None:
        self[message_class] += 1
        self[message_class + CLASS_COUNT] += size_bytes

    def subtract(self, message_class: MessageClass, size_bytes: int) -> None:
        self[message_class] -= 1
        self[message_class + CLASS_COUNT] -= size_bytes

    def add_figures(self, figures: Sequence[int]) -> None:
        self[:] = map(add, self, figures)

    def subtract_figures(self, figures: Sequence[int]) -> None:
        self[:] = map(sub, self, figures)

    def frozen(self) -> Counts:
        return Counts.of_figures(self)


def total(counts: Iterable[Counts]) -> Counts:
    result = NO_COUNTS
    for item in counts:
        result += item
    return result


def add_by_reason(to: dict[DropReason, Figures], more: Mapping[DropReason, Sequence[int]]) -> None:
    for reason, figures in more.items():
        to[reason] = tuple(map(add, to.get(reason, NO_FIGURES), figures))


def as_counts(balance: Balance) -> tuple[Counts, dict[DropReason, Counts], Counts]:
    """Return a balance as counts; reasons for which nothing was dropped are left out."""
    accepted, dropped, queued = balance
    lost = {reason: Counts.of_figures(figures) for reason, figures in dropped.items() if any(figures)}
    return Counts.of_figures(accepted), lost, Counts.of_figures(queued)
