"""When viewers that lag have their next turn: slots of 20 ms, so that one timer serves all of them (pure)."""

from __future__ import annotations

from math import inf
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

SLOT_S: Final = 0.02
"""Length of a slot: a tenth of the usual time between two turns, and 50 calls a second however many viewers lag."""


class TurnCalendar(Generic[_T]):
    """Items, each with at most one time at which it is due."""

    __slots__ = ("_slots", "_slots_of")

    def __init__(self) -> None:
        self._slots: dict[int, dict[_T, None]] = {}
        self._slots_of: dict[_T, int] = {}

    def __len__(self) -> int:
        return len(self._slots_of)

    def put(self, item: _T, at: float) -> None:
        """Have `item`, which is not in here, due at `at`, in seconds, or up to a slot later."""
        slot = int(at / SLOT_S) + 1
        self._slots_of[item] = slot
        self._slots.setdefault(slot, {})[item] = None

    def remove(self, item: _T) -> None:
        """Forget `item`; harmless when it is not in here."""
        slot = self._slots_of.pop(item, None)
        if slot is not None:
            items = self._slots[slot]
            del items[item]
            if not items:
                del self._slots[slot]

    def take_due(self, now: float) -> list[_T]:
        """Remove and return the items that are due by now, first ones first."""
        due: list[_T] = []
        for slot in sorted(slot for slot in self._slots if slot * SLOT_S <= now):
            due += self._slots.pop(slot)
        for item in due:
            del self._slots_of[item]
        return due

    @property
    def next_at(self) -> float:
        """When the next item is due, in seconds; inf: there is none."""
        return min(self._slots) * SLOT_S if self._slots else inf

    def clear(self) -> None:
        self._slots.clear()
        self._slots_of.clear()
