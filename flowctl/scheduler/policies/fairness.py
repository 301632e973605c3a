"""Fairness: in which order waiting demands (senders) are offered channels (pure).

Each rule gives a demand a *key* when it is queued; the demand with the least key is next, of equal keys the one that
came first. A key never changes while its demand waits, so that the queue is one heap whatever the rule, and declining
an offer costs nobody his place.

No rule lets a demand wait for ever: keys of later demands grow without bound (with time, or with what was served), so
that only a bounded number of them can come before any one that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Final

from flowctl.errors import ConfigError

MOST_PRIORITY: Final = 10
"""Priorities beyond this, or below its negative, count as it: what bounds the wait of the others is the difference."""
_MOST_CLASSES: Final = 1024
"""Classes remembered, those that queued last; the name of a class may come from a peer."""


class FirstComeFirstServed:
    """Demands in the order in which they came, whatever their priority."""

    def key(self, sender: object, priority: int, now: float) -> float:
        """Return the same for all: of equal keys the first that came is next."""
        return 0.0

    def served(self, sender: object, key: float, count: int) -> None:
        """Do nothing: the order does not depend on what was served."""


class Ageing:
    """Demands by priority, where each step of priority is worth so many seconds of waiting.

    A demand of priority 3 is treated as one of priority 0 that came ``3 * step_s`` earlier. So it is served first
    among those that came within that time, and later ones can pass a demand for ``2 * MOST_PRIORITY * step_s`` at most.

    Args:
        step_s: seconds that one step of priority is worth, more than 0.

    Raises:
        ConfigError: `step_s` is out of range.
    """

    def __init__(self, step_s: float = 1.0) -> None:
        if not 0 < step_s < float("inf"):
            raise ConfigError(f"step_s is {step_s}, it must be more than 0 and finite")
        self._step_s = step_s

    def key(self, sender: object, priority: int, now: float) -> float:
        """Return when a demand of priority 0 would have had to come to have the same turn, in seconds."""
        return now - max(-MOST_PRIORITY, min(MOST_PRIORITY, priority)) * self._step_s

    def served(self, sender: object, key: float, count: int) -> None:
        """Do nothing: the order does not depend on what was served."""


class WeightedFair:
    """Classes of demands share the messages by weight, however many demands each class queues.

    Start-time fair queueing: each class has a clock that advances by ``1 / weight`` per message, and the class whose
    clock is furthest behind is next. A class that was idle starts at the clock of those that were not: it cannot save
    up turns. Source: Goyal, Vin, Cheng, Start-time Fair Queueing, 1996, section 2.

    Args:
        class_of: returns the class of a demand.
        weights: of classes, more than 0 each; a class that is not named has weight 1.

    Raises:
        ConfigError: a weight is out of range.
    """

    def __init__(self, class_of: Callable[[object], Hashable], weights: Mapping[Hashable, float] | None = None) -> None:
        self._class_of = class_of
        self._weights = dict(weights or {})
        for name, weight in self._weights.items():
            if not 0 < weight < float("inf"):
                raise ConfigError(f"the weight of class {name!r} is {weight}, it must be more than 0 and finite")
        self._now = 0.0  # the virtual time: key of what was served last
        self._next: dict[Hashable, float] = {}  # by class: the key of its next demand, unless the virtual time is later

    def key(self, sender: object, priority: int, now: float) -> float:
        """Return the virtual time at which the turn of this demand begins."""
        name = self._class_of(sender)
        key = max(self._now, self._next.pop(name, 0.0))
        self._next[name] = key + 1 / self._weights.get(name, 1.0)  # put last, so that the first is the least recent
        if len(self._next) > _MOST_CLASSES:
            del self._next[next(iter(self._next))]
        return key

    def served(self, sender: object, key: float, count: int) -> None:
        """Charge a class for what one of its demands sent.

        Args:
            sender: the demand.
            key: its key.
            count: messages sent in its turn, 0 or more; the first was charged when the demand was queued.
        """
        self._now = max(self._now, key)
        if count > 1:
            name = self._class_of(sender)
            if name in self._next:
                self._next[name] = max(self._now, self._next[name]) + (count - 1) / self._weights.get(name, 1.0)
