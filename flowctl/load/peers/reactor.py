"""Readiness and timers for thousands of sockets on one loop, at the least cost per event.

How it works: all sockets are in one epoll object of our own, and that object is the only thing the loop watches. One
wake-up of the loop then serves every socket that is ready, without a callback of the loop for each. Timers are a heap
with one timer of the loop. The loop itself (uvloop or asyncio's own) stays free for coroutines.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import select
import time
from collections.abc import Callable
from typing import Final, Protocol

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
HANGUP: Final = select.EPOLLRDHUP
ENDED: Final = select.EPOLLHUP | select.EPOLLERR

_MOST_EVENTS: Final = 256
"""Most sockets served before the loop gets its turn: at 10 us each, 2.5 ms."""

TICK_S: Final = 0.01
LAG_S: Final = 0.05
"""Lateness of a tick above which it has spoilt delays, and is counted."""


class SocketHandler(Protocol):
    """The owner of a socket."""

    def ready(self, events: int, now: float) -> None:
        """Handle readiness of the socket: a mask of epoll events. Must not raise."""
        ...


class Reactor:
    """Serves sockets and timers on a running loop; not thread-safe.

    Attributes:
        max_lag_s: how late the latest tick was, since it was last asked for.
        lags: how many ticks came later than `LAG_S` so far.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._handlers: dict[int, SocketHandler] = {}
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._wake: asyncio.TimerHandle | None = None
        self._wake_at = float("inf")
        self._tick_at = 0.0
        self.max_lag_s = 0.0
        self.lags = 0
        loop.add_reader(self._epoll.fileno(), self._ready)

    def close(self) -> None:
        """Let go of the loop; sockets stay open."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        if self._wake is not None:
            self._wake.cancel()

    def add(self, fd: int, handler: SocketHandler, events: int) -> None:
        """Watch a socket."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def watch(self, fd: int, events: int) -> None:
        """Change what a socket is watched for; errors and resets always are."""
        self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        """Forget a socket, before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_at(self, when: float, call: Callable[[float], None]) -> None:
        """Call once at `when`, with the time; it cannot be revoked, so `call` has to check whether it is wanted."""
        heapq.heappush(self._timers, (when, next(self._order), call))
        if when < self._wake_at:
            self._arm(when)

    def start_ticks(self) -> None:
        """Begin to measure how late the loop is."""
        self._tick_at = time.monotonic() + TICK_S
        self.call_at(self._tick_at, self._tick)

    def _tick(self, now: float) -> None:
        lag_s = now - self._tick_at
        self.max_lag_s = max(self.max_lag_s, lag_s)
        self.lags += lag_s > LAG_S
        self._tick_at = now + TICK_S
        self.call_at(self._tick_at, self._tick)

    def _arm(self, when: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake_at = when
        # Loops count in their own clock, uvloop in whole milliseconds that lag behind: only the distance is meant.
        self._wake = self._loop.call_later(max(when - time.monotonic(), 0.0), self._run_timers)

    def _run_timers(self) -> None:
        self._wake = None
        self._wake_at = float("inf")
        timers = self._timers
        now = time.monotonic()
        last = next(self._order)  # what is added meanwhile is for the next round
        while timers and timers[0][0] <= now + 0.0005 and timers[0][1] < last:
            call = heapq.heappop(timers)[2]
            try:
                call(now)
            except Exception as error:  # noqa: BLE001 - one peer's mistake must not stop the clocks of all
                self._loop.call_exception_handler({"message": "a timer of a peer failed", "exception": error})
        if timers and timers[0][0] < self._wake_at:
            self._arm(timers[0][0])

    def _ready(self) -> None:
        handlers = self._handlers
        now = time.monotonic()
        for fd, events in self._epoll.poll(0, _MOST_EVENTS):
            handler = handlers.get(fd)
            if handler is not None:  # one before it may have closed it
                handler.ready(events, now)
