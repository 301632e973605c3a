"""The bit rate of a stream by message class, over the last seconds of its log (pure).

A log notes its totals once a second; the rate is the difference between now and the oldest note of the last twelve
seconds, long enough to hold several key frames of any usual stream. The cost per message is one comparison.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

NOTE_S: Final = 1.0
"""Time between two notes."""
NOTES: Final = 12
"""Notes that are kept."""
_LEAST_S: Final = 3.0
"""A rate over less than this says more about one burst than about the stream."""

Totals = tuple[int, ...]


class ClassRates:
    """Notes of a log's totals. Written by the publisher's thread, read by any: a note is one object, set at once.

    Attributes:
        due: when the next note is to be made, in seconds.
        bytes_per_s: rate of all classes at the last note; 0 while it is not known.
        by_class: the same by class; empty while it is not known.
    """

    __slots__ = ("_notes", "by_class", "bytes_per_s", "due", "messages_per_s")

    def __init__(self) -> None:
        self._notes: deque[tuple[float, Totals, Totals]] = deque(maxlen=NOTES)
        self.due = float("-inf")
        self.bytes_per_s = self.messages_per_s = 0.0
        self.by_class: Sequence[float] = ()

    @property
    def notes(self) -> tuple[tuple[float, Totals, Totals], ...]:
        """The notes kept, oldest first, as (time, messages, bytes); a copy. Any thread."""
        return tuple(self._notes)

    def note(self, now: float, counts: Totals, sizes: Totals) -> None:
        """Keep the totals of now; to be called when `due` has come."""
        if self._notes and now - self._notes[-1][0] > NOTES * NOTE_S:
            self.bytes_per_s = self.messages_per_s = 0.0
            self.by_class = ()
            self._notes.clear()  # what was published before a pause says nothing about what comes after it
        self._notes.append((now, counts, sizes))
        self.due = now + NOTE_S
        per_second = self.per_second(now, counts, sizes)
        if per_second is not None:
            self.messages_per_s, self.bytes_per_s = map(sum, per_second)
            self.by_class = per_second[0]

    def per_second(self, now: float, counts: Totals, sizes: Totals) -> tuple[list[float], list[float]] | None:
        """Return (messages, bytes) per second by class up to the totals of `now`; None: too short to tell."""
        try:
            began, first_counts, first_sizes = self._notes[0]
        except IndexError:
            return None
        seconds = now - began
        if seconds < _LEAST_S:
            return None
        return (
            [(after - before) / seconds for after, before in zip(counts, first_counts, strict=True)],
            [(after - before) / seconds for after, before in zip(sizes, first_sizes, strict=True)],
        )
