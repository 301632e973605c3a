"""Stream and link of a viewer of which only samples are known, as they may have been (pure).

An interval of samples is kept as it was counted (`packed`), and its messages are made up when a viewer is tried, which
few are: messages are spread evenly over the interval, class by class; while the viewer was READY all was taken each 40
ms, else what was sent is spread over writes that met EAGAIN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from flowctl.core.flow.state import MessageClass
from flowctl.records.flight.whatif.types import MOST_EVENTS, REFUSED, TAKEN, Event, on_grid
from flowctl.records.telemetry.schema import CLASS_NAMES

NORMAL_MS: Final = 40.0
"""Delay of a viewer in no trouble where only samples say so, and how often it is written to: the flush interval."""
WRITES_PER_S: Final = 2
"""Writes made up per second of a viewer in trouble; of longer intervals at most `MOST_WRITES` each."""
MOST_WRITES: Final = 20
MOST_MESSAGE_BYTES: Final = (1 << 24) - 1
"""Largest message (RTMP 1.0, section 5.3.1.2.1): a trial would have to make what a false row says."""
MOST_MESSAGES: Final = 10_000
"""Most messages of a class and an interval."""
_KEY: Final = int(MessageClass.KEY)
_CLASSES: Final = len(CLASS_NAMES)
_WIDTH: Final = 3 + 2 * _CLASSES
"""Numbers of an interval: its length in microseconds, 1 if READY, bytes sent, messages and bytes of each class."""


def packed(rows: Sequence[Mapping[str, Any]], lengths: Sequence[float]) -> list[int]:
    """Return samples, and how many seconds each is of, as numbers to be kept."""
    found: list[int] = []
    for row, seconds in zip(rows, lengths, strict=True):
        found += (round(seconds * 1e6), int(row["state"] == "READY"), int(row["sent_bytes"] or 0))
        found += (min(int(row[f"accepted_messages_{name}"] or 0), MOST_MESSAGES) for name in CLASS_NAMES)
        found += (int(row[f"accepted_bytes_{name}"] or 0) for name in CLASS_NAMES)
    return found


def begin_s(intervals: Sequence[int]) -> float | None:
    """Return when the first of the events comes, in seconds since the begin of the intervals; None: of no message."""
    if not any(count for _, _, counts, _ in _each(intervals) for count in counts):
        return None
    us, taken, counts, _ = next(_each(intervals))
    first = [0.0 if item == _KEY else 0.5 / count for item, count in enumerate(counts) if count]
    return on_grid(us / 1e6 * min([*first, 1 / _writes(us / 1e6, ready=taken is None)]))


def made_up(intervals: Sequence[int]) -> list[Event]:
    """Return messages and writes of intervals, from the first of them on."""
    events: list[Event] = []
    at, queued = 0.0, 0
    for us, taken, counts, sizes in _each(intervals):
        seconds = us / 1e6
        pieces = _spread(counts, sizes, at, seconds)
        queued = max(queued, 0) + sum(size for _, _, size in pieces)
        writes = _writes(seconds, ready=taken is None)
        total = queued if taken is None else taken
        for number in range(writes):
            part = total * (number + 1) // writes - total * number // writes
            pieces.append(
                (on_grid(at + seconds * (number + 1) / writes), REFUSED if taken is not None else TAKEN, part)
            )
        events += sorted(pieces, key=lambda event: (event[0], event[1] < 0))
        queued = 0 if taken is None else queued - taken
        at += seconds
    began = events[0][0]
    return [(moment - began, what, size) for moment, what, size in events[:MOST_EVENTS]]


def _each(intervals: Sequence[int]) -> Iterator[tuple[int, int | None, Sequence[int], Sequence[int]]]:
    """Yield length, bytes sent (None: all there were), messages and bytes of each interval."""
    for first in range(0, len(intervals), _WIDTH):
        us, ready, taken, *counted = intervals[first : first + _WIDTH]
        yield us, None if ready else taken, counted[:_CLASSES], counted[_CLASSES:]


def _writes(seconds: float, *, ready: bool) -> int:
    return max(round(seconds * 1000 / NORMAL_MS) if ready else min(round(seconds * WRITES_PER_S), MOST_WRITES), 1)


def _spread(counts: Sequence[int], sizes: Sequence[int], at: float, seconds: float) -> list[Event]:
    """Return the messages of an interval, each class spread evenly, a key frame first of all."""
    events = []
    for item, (count, total) in enumerate(zip(counts, sizes, strict=True)):
        for number in range(count):
            size = total * (number + 1) // count - total * number // count
            place = number / count if item == _KEY else (number + 0.5) / count
            events.append((on_grid(at + seconds * place), item, min(max(size, 1), MOST_MESSAGE_BYTES)))
    return events
