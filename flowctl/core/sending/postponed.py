"""Calls that are put off until a lock is released: hooks and logs are the application's code as well, and may block."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

from flowctl.core.loop.faults import log_error, report
from flowctl.core.loop.locks import OwnedLock


class PostponedCalls(list[Callable[[], object]]):
    """Calls to be made once a lock is released, in their order; true while there are any. The lock guards it.

    They are made one after the other and not one inside of another: what a call puts off itself comes after those that
    were put off before. Where two threads have released the lock, each makes the calls that it finds.
    """

    __slots__ = ("_threads",)

    def __init__(self) -> None:
        super().__init__()
        self._threads: tuple[int, ...] = ()  # those that make them

    def run(self, lock: OwnedLock) -> None:
        """Make the calls; at the end of whatever may have put one off. Any thread.

        Does nothing inside of the lock, whose outermost holder does it, or inside of one of the calls.
        """
        if lock.owned():
            return
        me = get_ident()
        with lock:
            if me in self._threads:
                return
            self._threads = (*self._threads, me)
        while calls := self._next(lock, me):
            for call in calls:
                try:
                    call()
                except BaseException as error:  # noqa: BLE001 - a hook that raises must not cost the caller its turn
                    report(log_error, "a hook of the application", error)

    def _next(self, lock: OwnedLock, me: int) -> list[Callable[[], object]]:
        with lock:
            calls = [*self]
            self.clear()
            if not calls:
                self._threads = tuple(thread for thread in self._threads if thread != me)
            return calls
