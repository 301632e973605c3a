"""The items of a stream that we asked for, between the node's thread and the loop that takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final


class Incoming:
    """What has come of a stream and was not taken. `put` and `end` on the node's thread, the rest on the taker's loop.

    Attributes:
        failure: code and text, once it has failed.
        ended: whether nothing comes any more.
    """

    __slots__ = ("_allowed", "_here", "_items", "_loop", "_wake", "ended", "failure")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, here: bool, credit: int) -> None:
        self._loop: Final = loop
        self._here: Final = here
        self._allowed = credit  # the node's thread only
        self._items: deque[list[bytes]] = deque()  # any thread: each operation is one of a deque
        self._wake: asyncio.Future[None] | None = None  # the taker's loop only
        self.failure: list[bytes] | None = None
        self.ended = False

    def allow(self, count: int) -> None:
        """Let more items come."""
        self._allowed += count

    def put(self, parts: list[bytes]) -> bool:
        """Take an item; False: it was not allowed to come."""
        if not self._allowed:
            return False
        self._allowed -= 1
        self._items.append(parts)
        self._do(self._notify)
        return True

    def end(self, ok: bool, data: list[bytes]) -> None:  # noqa: FBT001  (as the callback of a reply)
        """Take the end: parts of a last item, or code and text of a failure."""
        if ok and data:
            self._items.append(data)
        self._do(self._end, None if ok else data)

    async def take(self) -> list[bytes] | None:
        """Return the next item, when there is one; None: it has ended, and `failure` says how."""
        while not self._items:
            if self.ended:
                return None
            self._wake = self._loop.create_future()
            await self._wake
        return self._items.popleft()

    def _end(self, failure: list[bytes] | None) -> None:
        self.failure = failure
        self.ended = True
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _do(self, what: Callable[..., object], *args: object) -> None:
        if self._here:
            what(*args)
        else:
            with suppress(RuntimeError):  # the taker's loop is closed
                self._loop.call_soon_threadsafe(what, *args)
