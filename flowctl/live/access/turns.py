"""Turns on one loop: some at once; of those who wait each key in turn, so that one who asks much waits for itself."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Final

from flowctl.errors import LimitExceededError


class Turns:
    """Gives turns out; everything on the thread of one loop."""

    def __init__(self, at_once: int, waiting: int, of_key: int) -> None:
        self._free = at_once
        self._most_waiting: Final = waiting
        self._most_of_key: Final = of_key
        self._waiting_count = 0
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, key: str) -> None:
        """Wait for a turn, which is to be given back."""
        if self._free:
            self._free -= 1
            return
        if self._waiting_count >= self._most_waiting:
            raise LimitExceededError("hook_questions", self._waiting_count + 1, self._most_waiting)
        if len(self._queues.get(key, ())) >= self._most_of_key:
            raise LimitExceededError("hook_questions", self._most_of_key + 1, self._most_of_key)
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(turn)
        self._waiting_count += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given while it was being cancelled
                self.give()
            raise
        finally:
            self._waiting_count -= 1

    def give(self) -> None:
        """Give a turn back: to the oldest that waits of the key that waits longest."""
        while self._queues:
            key, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[key] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
