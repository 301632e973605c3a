"""Items of a stream on their way: those that may go out, and those that have come and were not taken yet.

Theory of operation. Nothing goes out that the other side has not allowed: it gives credit, an item uses one up. Who
takes items gives credit anew once half of it is used up, so a fast taker never waits for it, and a slow one holds no
more than that, in items and in bytes. Either side may be on a loop of its own: what comes from the connection is told
on the node's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from flowctl.errors import ClosedError
from flowctl.nodes.rpc.wire.frames import MOST_CREDIT

ITEMS_IN_A_ROW: Final = 32
"""Items of one stream that are made in one turn of a loop, where the other side has allowed many."""
_FIRST: Final = 4
"""Items that are allowed at first, before it is known how large they are."""
_MOST_BYTES: Final = 4 << 20
"""Bytes of a stream that may wait where it is taken, if its items are as large as the largest so far: then fewer than
its window are allowed, but one always is."""
_MOST_TOLD: Final = 10_000
"""Credits that wait for a loop that does not turn: no peer has cause to give so many."""


@asynccontextmanager
async def closing(items: object) -> AsyncIterator[None]:
    """Close an iterator at the end, if that can be."""
    try:
        yield
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


STREAM_CREDIT: Final = 32
"""Items of a stream that may be on their way: enough for a network of some milliseconds, and little to hold."""


@dataclass(slots=True, eq=False)
class _Told:
    """What is told on the node's thread, and awaited on a loop: the node's own (`here`), or another one."""

    loop: asyncio.AbstractEventLoop
    here: bool
    _wake: asyncio.Future[None] | None = None  #: the loop only

    def do(self, what: Callable[..., object], *args: object) -> None:
        """Do it on the loop."""
        if self.here:
            what(*args)
        else:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(what, *args)

    def notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def wait(self) -> None:
        self._wake = self.loop.create_future()
        await self._wake


@dataclass(slots=True, eq=False)
class Credit(_Told):
    """Items that may go out: `add` on the node's thread, `take` on the loop."""

    count: int = 0
    _told: deque[int] = field(default_factory=deque)  #: any thread: each operation is one of a deque
    _in_a_row: int = 0

    def add(self, count: int) -> None:
        self._told.append(count)
        if len(self._told) == 1:  # a flood of them costs the loop one turn
            self.do(self._add)
        elif len(self._told) > _MOST_TOLD:
            self._told.pop()

    async def take(self) -> None:
        """Use one up, once there is one; who has much gives the loop its turn once in a while."""
        self._in_a_row += 1
        if self._in_a_row % ITEMS_IN_A_ROW == 0:
            await asyncio.sleep(0)
        while not self.count:
            await self.wait()
        self.count -= 1

    def _add(self) -> None:
        while self._told:
            self.count = min(self.count + self._told.popleft(), MOST_CREDIT)
        self.notify()


@dataclass(slots=True, eq=False)
class IncomingStream(_Told):
    """What has come of a stream and was not taken yet: `allow`, `put` and `end` on the node's thread."""

    window: int = STREAM_CREDIT  #: items that may wait here, if they are small
    credit: int = field(init=False)  #: items that may still come; the node's thread only
    failure: list[bytes] | BaseException | None = None  #: code and text, or what was raised, once it has failed
    ended: bool = False  #: nothing comes any more
    _items: deque[list[bytes]] = field(default_factory=deque)  #: any thread: each operation is one of a deque
    _largest_bytes: int = 1  #: of what has come
    _awaited: int = field(init=False)  #: items that were allowed and not taken; the loop only

    def __post_init__(self) -> None:
        self.credit = self._awaited = min(self.window, _FIRST)

    def allow(self, count: int) -> None:
        self.credit += count

    def put(self, parts: list[bytes]) -> bool:
        """Take an item; False: it was not allowed to come."""
        if not self.credit:
            return False
        self.credit -= 1
        self._largest_bytes = max(self._largest_bytes, sum(map(len, parts)))
        self._items.append(parts)
        self.do(self.notify)
        return True

    def end(self, ok: bool, data: list[bytes]) -> None:  # noqa: FBT001  (as the callback of a reply)
        """Take the end: parts of a last item, or code and text of a failure."""
        if ok and data:
            self._items.append(data)
        self.do(self.fail, None if ok else data)

    def fail(self, failure: list[bytes] | BaseException | None) -> None:
        """Have it end, behind what has come, unless it has; the loop."""
        if not self.ended:
            self.failure = failure
            self.ended = True
            self.notify()

    def close(self) -> None:
        """Keep nothing that was not taken; who takes still learns that there is no more. The loop."""
        self._items.clear()
        self.fail(ClosedError("the request has ended, and its items with it"))

    async def items(self, allow: Callable[[int], object]) -> AsyncIterator[list[bytes]]:
        """Yield items until it has ended; `allow` has so many more come. Raises `failure` where it was raised."""
        while True:
            while not self._items:
                if self.ended:
                    if isinstance(self.failure, BaseException):
                        raise self.failure
                    return
                await self.wait()
            yield self._items.popleft()
            self._awaited -= 1
            most = max(1, min(self.window, _MOST_BYTES // self._largest_bytes))
            more = most - self._awaited
            if 2 * more >= most and not self.ended:
                self._awaited += more
                allow(more)
