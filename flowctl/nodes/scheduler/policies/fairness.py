"""Fairness by class: classes of senders share the messages by weight, however many senders each has (pure)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

from flowctl.errors import ConfigError

_MOST_CLASSES: Final = 1024
"""Classes that are remembered, those that queued last; the name of a class may come from a peer."""


class WeightedFair:
    """A `Fairness` by start-time fair queueing.

    Each class has a clock that advances by ``1 / weight`` per message, and the class whose clock is furthest behind is
    next. A class that was idle starts at the clock of those that were not: it cannot save up turns. Within a class the
    first that came is next; priorities count for nothing. No sender waits for ever: the clocks of the others pass its
    own. Source: Goyal, Vin, Cheng, Start-time Fair Queueing, 1996, section 2.
    """

    def __init__(self, class_of: Callable[[Any], Hashable], weights: Mapping[Any, float] | None = None) -> None:
        self._class_of = class_of
        self._weights = dict(weights or {})
        for name, weight in self._weights.items():
            if not 0 < weight < float("inf"):
                raise ConfigError(f"the weight of class {name!r} is {weight}, it must be more than 0 and finite")
        self._clock = 0.0  # of what was served last
        self._next: dict[Hashable, float] = {}  # by class: where its next sender stands, unless the clock is later

    def place(self, sender: Any, priority: int, number: int) -> float:
        name = self._class_of(sender)
        place = max(self._clock, self._next.pop(name, 0.0))
        self._next[name] = place + 1 / self._weights.get(name, 1.0)  # put last: the first is the least recent
        if len(self._next) > _MOST_CLASSES:
            del self._next[next(iter(self._next))]
        return place

    def size(self, open_count: int, behind_count: int) -> int:
        return 1 if behind_count else open_count

    def served(self, sender: Any, place: float, sent_count: int) -> None:
        """Charge the class of `sender` for what it sent in its turn; the first message was charged with its place."""
        self._clock = max(self._clock, place)
        if sent_count > 1:
            name = self._class_of(sender)
            if name in self._next:
                more = (sent_count - 1) / self._weights.get(name, 1.0)
                self._next[name] = max(self._clock, self._next[name]) + more
