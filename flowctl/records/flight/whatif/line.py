"""What the line of a recorded viewer carried, and what it would have carried for another choice (pure).

What the kernel was given less what it still holds is what the line has carried: between two looks a straight line where
it was refused something, else what it was given as it came, and the line would have carried as much as at its last
known rate: that of the time in which it was full, or, where a viewer that keeps up was looked at, of its bursts. So
there is one growing number, `carried`, and each choice takes its own bytes off it. Where nothing is known of the kernel
(samples), what was taken is what was carried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Final

from flowctl.core.flow.renditions import LineMeter
from flowctl.core.flow.state import MessageClass
from flowctl.records.flight.whatif.types import HELD, LEAST_KERNEL_BYTES, REFUSED, TAKEN, Event, RecordedViewer

_STRAIGHT_S: Final = 1.0
"""Longest time between two looks at a viewer that lags, which come twice a second; else it kept up in between."""
_RATE_S: Final = 1.0
"""Time over which a rate is measured: the last second in which the line was busy."""
_LEAST_RATE_S: Final = 0.08
"""Least time for a rate: two flush intervals."""
_IDLE_LINE_BYTES: Final = 1 << 24
"""Most that an idle line of unknown rate may have carried since the event before: more than a kernel holds."""


class RecordedLine:
    """The line of one recorded viewer, event by event."""

    __slots__ = (
        *("_carried", "_events", "_held", "_levels"),
        *("after", "carried", "held", "known", "lagging", "level", "writes"),
    )

    def __init__(self, viewer: RecordedViewer) -> None:
        events = self._events = viewer.events
        # whether the recording says what the kernel held
        self.known = any(what == HELD and size > 0 for _, what, size in events)
        if self.known:
            written = (size if what in (TAKEN, REFUSED) else 0 for _, what, size in events)
            before = [*accumulate(written, initial=0.0)][:-1]
            acknowledged = _acknowledged(events, before)
            self._held = [max(a - b, 0.0) for a, b in zip(before, acknowledged, strict=True)]
            self._carried = _carried(events, acknowledged, self._held, before)
            self._levels = _levels(events, self._held)
        else:
            largest = max((size for _, what, size in events if what in (TAKEN, REFUSED)), default=0)
            full = max(largest, LEAST_KERNEL_BYTES)
            self._carried, self._levels = _taken(events, full)
            self._held = [float(full) - (size if what in (TAKEN, REFUSED) else 0) for _, what, size in events]
        # what the kernel of the recorded viewer holds before the write of this event
        self.held = self.after = 0.0 if self.known else float(full)
        self.carried = 0.0  # what the line could have carried up to the present event, bytes
        self.level = inf  # how much the kernel takes before it refuses; inf: no end was seen yet
        self.lagging = self.writes = False  # whether the recorded viewer has not drained since its last EAGAIN

    def step(self, number: int) -> None:
        _, what, size = self._events[number]
        self.carried, self.held, self.level = self._carried[number], self._held[number], self._levels[number]
        self.after, self.writes = self.held, what in (TAKEN, REFUSED)
        if self.writes:
            self.lagging = what == REFUSED
            self.after += size


def _acknowledged(events: Sequence[Event], before: Sequence[float]) -> list[float]:
    """Return what the line had carried at each event, at most what was written `before` it."""
    looks = [number for number, (_, what, _) in enumerate(events) if what == HELD]
    found = [0.0] * len(events)
    since, start, blocked = min(before[looks[0]] - events[looks[0]][2], 0.0), 0, False
    for number in looks:
        until = max(before[number] - events[number][2], since)
        begin_s, seconds = events[start][0], events[number][0] - events[start][0]
        for place in range(start, number + 1):
            value = until
            blocked = events[place][1] == REFUSED if events[place][1] in (TAKEN, REFUSED) else blocked
            if seconds and (blocked or seconds <= _STRAIGHT_S):
                value = since + (until - since) * (events[place][0] - begin_s) / seconds
            found[place] = max(min(value, before[place]), since)
        since, start = until, number + 1
    value = since
    for number in range(start, len(events)):
        what = events[number][1]
        blocked = what == REFUSED if what in (TAKEN, REFUSED) else blocked
        found[number] = value = value if blocked else max(before[number], value)
    return found


def _carried(
    events: Sequence[Event], acknowledged: Sequence[float], held: Sequence[float], written: Sequence[float]
) -> list[float]:
    """Return what the line could have carried up to each event; its first known rate is that of the time before too."""
    steps: list[tuple[float, float | None, float | None]] = []  # (bytes carried, rate, seconds if idle for any)
    bursts, blocked, key_at = LineMeter(), events[0][1] == REFUSED, -inf
    busy: deque[tuple[float, float]] = deque()
    busy_s = busy_bytes = 0.0
    rate: float | None = None
    for number, (before, now) in enumerate(pairwise(acknowledged), 1):
        at, what, size = events[number]
        seconds, more = at - events[number - 1][0], now - before
        if what == HELD and not blocked:
            bursts.sample(at, int(written[number]), size, key_at)
            rate = bursts.evidence(at) or rate
        full = held[number] > 0 and blocked
        if full and seconds:
            busy.append((seconds, more))
            busy_s, busy_bytes = busy_s + seconds, busy_bytes + more
            while busy_s - busy[0][0] >= _RATE_S:
                first = busy.popleft()
                busy_s, busy_bytes = busy_s - first[0], busy_bytes - first[1]
            if busy_s >= _LEAST_RATE_S:
                rate = busy_bytes / busy_s
        steps.append((more, rate, None if full else seconds))
        if what in (TAKEN, REFUSED):
            blocked = what == REFUSED
        elif what == MessageClass.KEY:
            key_at = at
    first_rate = next((known for _, known, _ in steps if known is not None), None)
    total, found = 0.0, [0.0]
    for carried, known, idle_s in steps:
        able = known if known is not None else first_rate
        could = carried if idle_s is None else _IDLE_LINE_BYTES if able is None else able * idle_s
        total += max(carried, could)
        found.append(total)
    return found


def _levels(events: Sequence[Event], held: Sequence[float]) -> list[float]:
    """Return how much the kernel takes at each event before it refuses, as long as it was not told to take less."""
    level, lagging, found = inf, False, []
    for (_, what, size), holds in zip(events, held, strict=True):
        if what == REFUSED:
            level = max(holds + size, level if lagging else 0.0, 1.0)
        elif what == TAKEN and level < inf:
            level = max(holds + size, level)
        if what in (TAKEN, REFUSED):
            lagging = what == REFUSED
        found.append(level)
    return found


def _taken(events: Sequence[Event], full: float) -> tuple[list[float], list[float]]:
    """Return (carried, level) at each event where nothing is known of the kernel.

    While the viewer was refused, what was taken was carried. Else the line would have carried as much as it did since
    it was last refused first.
    """
    total, level, rate, last_at, since_at, taken = 0.0, inf, None, 0.0, 0.0, 0
    lagging, carried, levels = False, [], []
    for at, what, size in events:
        if what in (TAKEN, REFUSED):
            if lagging:
                taken += size
                rate = taken / (at - since_at) if at - since_at >= _LEAST_RATE_S else rate
            if what == REFUSED and not lagging:
                since_at, taken = at, 0
            idle = what == TAKEN
            level = inf if idle and rate is None else full
            total += max(size, int((rate or 0.0) * (at - last_at))) if idle else size
            lagging, last_at = what == REFUSED, at
        carried.append(total)
        levels.append(level)
    return carried, levels
