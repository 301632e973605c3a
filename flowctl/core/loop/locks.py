"""A lock that knows which thread holds it.

`x_locked` methods state in their name that the caller holds the lock; `OwnedLock.assert_owned` makes that statement
checked instead of hoped for. The Sender also asks `owned()` before it locks, to refuse a call from inside its own
notification instead of deadlocking or half-applying it.

How: CPython's re-entrant lock is written in C and keeps the owner anyway, so a subclass that only names its
`_is_owned` costs nothing on the way in and out. Measured on CPython 3.11, per uncontended ``with`` block: 170 ns; a
`threading.Lock` with an owner id stored beside it: 270 ns, because its ``__exit__`` is a Python method; even the bare
`threading.Lock`: 250-290 ns. Per check: `owned()` 17 ns,
`assert_owned()` 50 ns; comparing thread ids in Python 40 and 65 ns.
The price is that the lock is re-entrant; nothing here relies on that, and who must not re-enter asks `owned()` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Final

from flowctl.core.loop.faults import log_error, report
from flowctl.errors import InternalError

if TYPE_CHECKING:

    class _RLock:
        """What the C class offers; typeshed marks it final and leaves `_is_owned` out, though both are otherwise."""

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...  # noqa: FBT001, FBT002  (the C signature)
        def release(self) -> None: ...
        def __enter__(self) -> bool: ...
        def __exit__(self, *exc_info: object) -> None: ...
        def _is_owned(self) -> bool: ...
else:
    _RLock = type(threading.RLock())


HANDLERS: Final[dict[int, str]] = {}
"""Threads, by identifier, that are inside of application code that a Sender calls under its lock, and its name.

Each thread adds and removes its own entry. It is nearly always empty, so asking costs next to nothing (a
`threading.local`: 40 ns). It is one for all Senders, because a handler that calls *another* Sender waits for a lock
whose holder may wait for ours."""


class OwnedLock(_RLock):
    __slots__ = ()

    #: True if the calling thread holds the lock. The C method itself under a public name: no Python frame per call.
    owned = _RLock._is_owned  # noqa: SLF001  (our own base class)

    def assert_owned(self) -> None:
        """Do nothing if the calling thread holds this lock; the first line of every ``x_locked`` method."""
        if not self._is_owned():
            raise InternalError("a method that needs its lock was called by a thread that does not hold it")


class PostponingLock(OwnedLock):
    """A lock with calls that are made once it is released. It guards them."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: PostponedCalls | None = None  # None: there were never any

    def postpone(self, call: Callable[[], object]) -> None:
        self.assert_owned()
        if self.calls is None:
            self.calls = PostponedCalls()
        self.calls.append(call)

    def make_calls(self) -> None:
        """At the end of whatever may have put one off: see `PostponedCalls.run`. Any thread."""
        if self.calls is not None:
            self.calls.run(self)


class PostponedCalls(list[Callable[[], object]]):
    """Calls to be made once a lock is released, in their order; true while there are any. The lock guards it.

    Hooks and logs are the application's code as well, and may block.

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
