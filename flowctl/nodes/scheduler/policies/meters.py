"""Meters: how many messages and bytes in the last minute (pure)."""

from __future__ import annotations

from typing import Final

BUCKET_S: Final = 5.0
BUCKETS: Final = 12
"""Number of buckets, of five seconds each: the last minute, to within five seconds, in constant memory."""


class MinuteMeter:
    """Messages and bytes of the last minute. Not locked: its owner has one thread, or a lock.

    What is told for a time before that of an earlier call counts for the later time: a meter never goes back.
    """

    __slots__ = ("_bytes", "_messages", "_number", "total_bytes", "total_messages")

    def __init__(self) -> None:
        self._messages = [0] * BUCKETS
        self._bytes = [0] * BUCKETS
        self._number: int | None = None  # of the bucket that is being filled
        self.total_messages = 0
        self.total_bytes = 0

    def count(self, now: float, size_bytes: int = 0) -> None:
        place = self._advance(now)
        self._messages[place] += 1
        self._bytes[place] += size_bytes
        self.total_messages += 1
        self.total_bytes += size_bytes

    def per_minute(self, now: float) -> tuple[int, int]:
        self._advance(now)
        return sum(self._messages), sum(self._bytes)

    def _advance(self, now: float) -> int:
        number = int(now // BUCKET_S)
        if self._number is None:
            self._number = number
        elif number > self._number:
            for passed in range(max(self._number + 1, number - BUCKETS + 1), number + 1):
                self._messages[passed % BUCKETS] = self._bytes[passed % BUCKETS] = 0
            self._number = number
        return self._number % BUCKETS
