"""Between the thread that receives a stream and the one that writes it: a queue with a limit in bytes.

The receiving thread never waits. Where the disk takes less than comes, the queue fills, and from then on everything is
left out until a key frame fits in again: counted, and told to the writer at the place where it is missing. So a slow
disk costs the recording a part, and the server nothing: its connection is read as fast as before.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, NamedTuple, TypeAlias

from flowctl.flow.state import MessageClass
from flowctl.rtmp.media.media import inspect

QUEUE_BYTES: Final = 64 << 20
"""What waits for the disk of one stream: 20 s at 25 Mbit/s."""
_MESSAGE_BYTES: Final = 200
"""Counted for each message beside its payload: objects have a size, and a million empty ones are no small queue."""


class Came(NamedTuple):
    """A message."""

    type_id: int
    timestamp: int
    payload: bytes


class Began(NamedTuple):
    """A publication begins, perhaps behind another one."""


class Ended(NamedTuple):
    """The publication has ended."""

    why: str


class Left(NamedTuple):
    """Here something was left out, because the queue was full."""

    message_count: int
    size_bytes: int


Item: TypeAlias = Came | Began | Ended | Left


class Intake:
    """The queue; a `Sink` of `flowctl.cluster.follow`.

    Args:
        limit_bytes: most that waits.
    """

    __slots__ = ("_closed", "_items", "_left_bytes", "_left_count", "_limit_bytes", "_lock", "_ready", "_size_bytes")

    def __init__(self, limit_bytes: int = QUEUE_BYTES) -> None:
        self._limit_bytes: Final = limit_bytes
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._items: deque[Item] = deque()  # guarded by _lock
        self._size_bytes = 0  # guarded by _lock
        self._left_count = 0  # guarded by _lock
        self._left_bytes = 0  # guarded by _lock
        self._closed = False  # guarded by _lock

    # -- the thread that receives

    def begin(self, now: float) -> None:
        """A publication begins."""
        del now
        self._put(Began())

    def take(self, type_id: int, timestamp: int, payload: bytes, now: float) -> None:
        """Take a message, or leave it out where there is no room."""
        del now
        cost = len(payload) + _MESSAGE_BYTES
        with self._lock:
            room = self._limit_bytes - self._size_bytes
            if self._left_count:
                # Not at once where one message has room again: half of the queue, so that losses are few and whole.
                key = inspect(type_id, payload).message_class is MessageClass.KEY
                refused = not key or room < self._limit_bytes // 2
            else:
                refused = cost > room
            if refused:
                self._left_count += 1
                self._left_bytes += len(payload)
                return
            self._tell_left_locked()
            self._items.append(Came(type_id, timestamp, payload))
            self._size_bytes += cost
            self._ready.notify()

    def end(self, why: str) -> None:
        """The publication has ended."""
        self._put(Ended(why))

    def close(self) -> None:
        """Nothing comes any more. Any thread."""
        with self._lock:
            self._closed = True
            self._ready.notify()

    # -- the thread that writes

    def get(self, timeout_s: float) -> list[Item] | None:
        """Return what has come, waiting for it at most for `timeout_s`. None: all was given, and nothing comes."""
        with self._lock:
            if not self._items and not self._closed:
                self._ready.wait(timeout_s)
            if self._closed:
                self._tell_left_locked()
            if not self._items:
                return None if self._closed else []
            items = list(self._items)
            self._items.clear()
            self._size_bytes = 0
            return items

    def _put(self, item: Item) -> None:
        """Append a word of the stream; there are few of them."""
        with self._lock:
            self._tell_left_locked()
            self._items.append(item)
            self._ready.notify()

    def _tell_left_locked(self) -> None:
        if self._left_count:
            self._items.append(Left(self._left_count, self._left_bytes))
            self._left_count = self._left_bytes = 0
