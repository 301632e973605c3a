"""Fair turns: waiting questions have their turn key by key, so that a client that asks much delays itself alone."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Final, Generic, TypeVar

from flowctl.errors import LimitExceededError

_T = TypeVar("_T")


class FairQueue(Generic[_T]):
    """Waiting items by key (pure): the oldest item of the key that waits longest comes first."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[_T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def count_of(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def put(self, key: str, item: _T) -> None:
        self._queues.setdefault(key, deque()).append(item)

    def pop(self) -> _T:
        """Return the next item; the following item of its key comes after those of the other keys."""
        key, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[key] = queue
        return item


class Turns:
    """Some turns at once on one loop, given out and back on its thread; others wait for theirs."""

    def __init__(self, at_once: int, waiting: int, of_key: int) -> None:
        self._free = at_once
        self._most_waiting: Final = waiting
        self._most_of_key: Final = of_key
        self._waiting_count = 0
        self._queue: Final[FairQueue[asyncio.Future[None]]] = FairQueue()

    async def acquire(self, key: str) -> None:
        if self._free:
            self._free -= 1
            return
        if self._waiting_count >= self._most_waiting:
            raise LimitExceededError("hook_questions", self._waiting_count + 1, self._most_waiting)
        if self._queue.count_of(key) >= self._most_of_key:
            raise LimitExceededError("hook_questions", self._most_of_key + 1, self._most_of_key)
        turn = asyncio.get_running_loop().create_future()
        self._queue.put(key, turn)
        self._waiting_count += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given while it was being cancelled
                self.release()
            raise
        finally:
            self._waiting_count -= 1

    def release(self) -> None:
        """Give a turn back; it passes to the next question that waits."""
        while self._queue:
            turn = self._queue.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
