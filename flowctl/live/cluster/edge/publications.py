"""Publications of one name: which there are, who has announced which, and which of them go on (pure).

Origins say by their clocks when a publication began (its timeline). Here publications have numbers, in the order in
which they were heard of; several timelines are one publication once somebody has seen that (`rename`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from flowctl.nodes.diffusion.objects import PeerId

NOWHERE: Final = 0
"""Number that belongs to no publication; those of publications are larger."""
SILENT_S: Final = 10.0
"""Time without an announcement after which a publication is over: twice as long as any segment takes."""
MOST_TIMELINES: Final = 64
"""Timelines whose publications are remembered."""


@dataclass(slots=True)
class Announcer:
    """An origin, with what it has announced."""

    number: int = NOWHERE
    ended: bool = False
    at: float = 0.0  #: when it was last announced, seconds
    numbers: set[int] = field(default_factory=set)


class Publications:
    """The publications of one name. Not locked: its owner has one thread."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by timeline
        self._last = NOWHERE
        self.announcers: dict[PeerId, Announcer] = {}

    def number_of(self, timeline: int, keep: Collection[int | None] = ()) -> int:
        number = self._numbers.get(timeline)
        if number is None:
            if len(self._numbers) >= MOST_TIMELINES:
                self._forget({*keep, *(announcer.number for announcer in self.announcers.values())})
            number = self._numbers[timeline] = self.next_number()
        return number

    def next_number(self) -> int:
        self._last += 1
        return self._last

    def _forget(self, keep: Collection[int | None]) -> None:
        """Forget the oldest timeline that is over: an encoder whose clock leaps makes many."""
        old = next((timeline for timeline, number in self._numbers.items() if number not in keep), None)
        if old is not None:
            number = self._numbers.pop(old)
            for announcer in self.announcers.values():
                announcer.numbers.discard(number)

    def note_announced(self, announcer: Announcer, number: int, now: float, *, ended: bool) -> None:
        announcer.number, announcer.ended, announcer.at = number, ended, now
        announcer.numbers.add(number)

    def lives(self, number: int, now: float) -> bool:
        return any(
            announcer.number == number and not announcer.ended and now - announcer.at < SILENT_S
            for announcer in self.announcers.values()
        )

    def best(self, now: float, *, but: int | None = None) -> int | None:
        numbers = [announcer.number for announcer in self.announcers.values() if announcer.number != but]
        living = (number for number in numbers if self.lives(number, now))
        return max(living, key=lambda number: (numbers.count(number), number), default=None)

    def is_had(self, number: int | None) -> bool:
        return any(number in announcer.numbers for announcer in self.announcers.values())

    def rename(self, number: int, to: int) -> None:
        """Call a publication by another number from now on: by one that it has too, or by a later one."""
        self._numbers = {key: to if value == number else value for key, value in self._numbers.items()}
        for announcer in self.announcers.values():
            announcer.number = to if announcer.number == number else announcer.number
            announcer.numbers = {to if known == number else known for known in announcer.numbers}
