"""The events as live surfaces count them.

What is counted here are the records on their way to the files, after the recorder has taken them off its queue. So a
number in the figures of a server and in a report over the files is the same number; what was lost is in neither, and
is counted apart (`RecorderStatistics`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from flowctl.core.loop.locks import OwnedLock
from flowctl.records.telemetry.schema import FLOW_EVENTS, EventName, Row

_EVENT, _AXIS = map(FLOW_EVENTS.row_names.index, ("event", "axis"))
_MOST_KINDS: Final = 1024
"""Different names counted of one kind; the names are ours, so more would be a fault of ours, and is bounded too."""
_OTHERS: Final = "(others)"


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedSnapshot:
    """Running counters since the recorder began, by name."""

    events: Mapping[str, int] = field(default_factory=dict)
    limit_hits: Mapping[str, int] = field(default_factory=dict)


class Feed:
    """The counters; the recorder shows it every event. `snapshot`: any thread."""

    def __init__(self) -> None:
        self._lock = OwnedLock()
        self._events: Counter[str] = Counter()  # guarded by _lock
        self._limit_hits: Counter[str] = Counter()  # guarded by _lock

    def count_rows(self, rows: list[Row]) -> None:
        """Count these events. The recorder's thread."""
        with self._lock:
            for row in rows:
                _add(self._events, row[_EVENT])
                if row[_EVENT] == EventName.LIMIT_HIT.value:
                    _add(self._limit_hits, row[_AXIS])

    def snapshot(self) -> FeedSnapshot:
        with self._lock:
            return FeedSnapshot(events=dict(self._events), limit_hits=dict(self._limit_hits))


def _add(counter: Counter[str], name: str | None) -> None:
    key = name or _OTHERS
    counter[key if key in counter or len(counter) < _MOST_KINDS else _OTHERS] += 1
