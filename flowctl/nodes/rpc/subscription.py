"""Subscriptions: who wants to be told of something, each for a time that he prolongs by asking again."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import BusyError, ConfigError

DURATION_S: Final = 1800.0
"""Duration of a subscription that is not prolonged."""
MOST_SUBSCRIBERS: Final = 100_000

C = TypeVar("C", bound=Hashable)
T = TypeVar("T")


class Subscription(Generic[C, T]):
    """The subscribers of one thing, with what each of them wants; any thread.

    Args:
        description: of the thing, for errors.
        duration_s: how long one is told after it asked last, more than 0.
        clock: monotonic seconds.

    Raises:
        ConfigError: `duration_s` is out of range.
    """

    __slots__ = ("_clock", "_duration_s", "_lock", "_subscribers", "description")

    def __init__(
        self, description: str, duration_s: float = DURATION_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not duration_s > 0:
            raise ConfigError(f"duration_s is {duration_s}, it must be more than 0")
        self.description: Final = description
        self._duration_s: Final = duration_s
        self._clock: Final = clock
        self._lock: Final = OwnedLock()  # a leaf: nothing is called under it but the clock
        self._subscribers: dict[C, tuple[float, T]] = {}  # until when, and what  # guarded by _lock

    def __len__(self) -> int:
        with self._lock:
            return len(self._subscribers)

    def subscribe(self, conn: C, data: T = None) -> bool:  # type: ignore[assignment]  # `T` of no data is None
        """Subscribe, or prolong a subscription.

        Args:
            conn: who.
            data: what he wants, for `publish`; compared with what he wanted before. None: nothing in particular.

        Returns:
            True if that is new: he was not subscribed, or wanted something else. False: it was prolonged.

        Raises:
            BusyError: there are too many.
        """
        now = self._clock()
        with self._lock:
            before = self._subscribers.pop(conn, None)  # in again at the end: the oldest are in front
            if before is None and len(self._subscribers) >= MOST_SUBSCRIBERS:
                self._remove_expired_locked(now)
                if len(self._subscribers) >= MOST_SUBSCRIBERS:
                    raise BusyError(f"{self.description} has {MOST_SUBSCRIBERS} subscribers, which is the limit")
            self._subscribers[conn] = (now + self._duration_s, data)
        return before is None or before[0] <= now or before[1] != data

    def unsubscribe(self, conn: C) -> bool:
        """End a subscription; return whether there was one."""
        with self._lock:
            return self._subscribers.pop(conn, None) is not None

    def publish(self, send: Callable[[C, T], object]) -> int:
        """Call `send` with each subscriber and what he wants, with no lock held; those whose time is up are removed.

        Returns:
            How many were told.
        """
        with self._lock:
            self._remove_expired_locked(self._clock())
            now_told = [(conn, data) for conn, (_, data) in self._subscribers.items()]
        for conn, data in now_told:
            send(conn, data)
        return len(now_told)

    def remove_expired(self) -> int:
        """Remove those whose time is up, as `publish` does; return how many."""
        with self._lock:
            return self._remove_expired_locked(self._clock())

    def _remove_expired_locked(self, now: float) -> int:
        self._lock.assert_owned()
        count = 0
        while self._subscribers:
            conn = next(iter(self._subscribers))
            if self._subscribers[conn][0] > now:
                break
            del self._subscribers[conn]
            count += 1
        return count
