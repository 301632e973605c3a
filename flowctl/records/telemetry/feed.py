"""The events as live surfaces see them: running counters, and subscribers who are told of each.

What is counted here are the records on their way to the files, after the recorder has taken them off its queue. So a
number on a dashboard, in metrics and in a report over the files is the same number; what was lost is in neither, and
is counted apart (`RecorderStatistics`).
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.core.loop.locks import OwnedLock
from flowctl.records.telemetry.schema import FLOW_EVENTS, EventName, Row

_EVENT, _AXIS, _REASON, _STATE_TO, _VALUE, _DETAIL, _COUNT = map(
    FLOW_EVENTS.row_names.index, ("event", "axis", "reason", "state_to", "value", "detail", "count")
)
_MOST_KINDS: Final = 1024
"""Different names counted of one kind; the names are ours, so more would be a fault of ours, and is bounded too."""
_OTHERS: Final = "(others)"


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedSnapshot:
    """Running counters since the recorder began.

    Args:
        dropped: dropped messages by class, from the episodes of drops that have ended.
        lost: records that are known to be lost, as told by OVERFLOW events.
    """

    events: Mapping[str, int] = field(default_factory=dict)
    limit_hits: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    closes: Mapping[str, int] = field(default_factory=dict)
    states: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    lost: int = 0


class Subscription:
    """One who is told of events. Any thread.

    Args:
        feed: what it subscribed to.
        limit: most events kept for it; beyond that the oldest go, and are counted.
    """

    __slots__ = ("_feed", "_limit", "_lock", "_lost", "_queue")

    def __init__(self, feed: Feed, limit: int) -> None:
        self._feed = feed
        self._limit = limit
        self._lock = OwnedLock()
        self._queue: deque[Row] = deque()  # guarded by _lock
        self._lost = 0  # guarded by _lock

    def offer(self, rows: Iterable[Row]) -> None:
        """Append events; for the feed."""
        with self._lock:
            self._queue.extend(rows)
            while len(self._queue) > self._limit:
                self._queue.popleft()
                self._lost += 1

    def take(self) -> list[dict[str, Any]]:
        """Return the events since the last call, oldest first, by name of the column; never waits."""
        with self._lock:
            rows = list(self._queue)
            self._queue.clear()
        return [dict(zip(FLOW_EVENTS.row_names, row, strict=True)) for row in rows]

    @property
    def lost(self) -> int:
        """Events that were not kept because they were not taken in time."""
        with self._lock:
            return self._lost

    def cancel(self) -> None:
        """Be told no more."""
        self._feed.forget(self)


class Feed:
    """Counters and subscribers; the recorder shows it every event. `snapshot` and `subscribe`: any thread."""

    def __init__(self) -> None:
        self._lock = OwnedLock()
        self._subscribers: list[Subscription] = []  # guarded by _lock
        self._events: Counter[str] = Counter()  # guarded by _lock
        self._limit_hits: Counter[str] = Counter()  # guarded by _lock
        self._refused: Counter[str] = Counter()  # guarded by _lock
        self._closes: Counter[str] = Counter()  # guarded by _lock
        self._states: Counter[str] = Counter()  # guarded by _lock
        self._dropped: Counter[str] = Counter()  # guarded by _lock
        self._lost = 0  # guarded by _lock

    def subscribe(self, limit: int = 4096) -> Subscription:
        """Return a queue that gets every event from now on; `Subscription.cancel` ends it."""
        subscription = Subscription(self, limit)
        with self._lock:
            self._subscribers.append(subscription)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        """Tell `subscription` no more; harmless when it is unknown."""
        with self._lock:
            self._subscribers = [item for item in self._subscribers if item is not subscription]

    def take(self, rows: list[Row]) -> None:
        """Count events and hand them on. The recorder's thread."""
        with self._lock:
            for row in rows:
                self._count_locked(row)
            subscribers = list(self._subscribers)
        for subscription in subscribers:
            subscription.offer(rows)

    def _count_locked(self, row: Row) -> None:
        self._lock.assert_owned()
        name = row[_EVENT]
        _add(self._events, name)
        if name == EventName.LIMIT_HIT.value:
            _add(self._limit_hits, row[_AXIS])
        elif name == EventName.CONN_CLOSED.value:
            _add(self._closes, row[_REASON])
        elif name == EventName.STATE_CHANGED.value:
            _add(self._states, row[_STATE_TO])
        elif name == EventName.CONN_REFUSED.value:
            # One record may stand for several refusals of one address: see `Events.conn_refused`.
            _add(self._refused, row[_REASON], row[_COUNT] or 1)
        elif name == EventName.OVERFLOW.value:
            self._lost += int(row[_VALUE] or 0)
        elif name == EventName.DROPPED.value and row[_DETAIL]:
            for classes in json.loads(row[_DETAIL]).get("dropped", {}).values():
                for message_class, count in classes.items():
                    _add(self._dropped, message_class, count)

    def snapshot(self) -> FeedSnapshot:
        """Return the counters."""
        with self._lock:
            return FeedSnapshot(
                events=dict(self._events),
                limit_hits=dict(self._limit_hits),
                refused=dict(self._refused),
                closes=dict(self._closes),
                states=dict(self._states),
                dropped=dict(self._dropped),
                lost=self._lost,
            )


def _add(counter: Counter[str], name: str | None, count: int = 1) -> None:
    key = name or _OTHERS
    counter[key if key in counter or len(counter) < _MOST_KINDS else _OTHERS] += count
