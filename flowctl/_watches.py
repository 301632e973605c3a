"""Which descriptors a loop watches, and protection against the oldest traps of readiness loops.

A descriptor number outlives its socket. If a socket is closed while it is watched, the kernel forgets the watch and
the loop does not. What follows was tried on asyncio (CPython 3.11) and uvloop 0.23:

- The next socket with the same number inherits the watch: asyncio modifies a registration that does not exist, uvloop
  believes that it is polling already. On either loop the new connection never hears of input, without any error.
- If the close comes before the loop has polled once, uvloop's libuv calls ``abort()``: epoll_ctl fails with an error
  that it does not expect, and the process with all its connections is gone.

Against the first, the inode that a number stood for is remembered (every socket has its own), and a watch left behind
is removed, and reported as the bug it is, before the number is watched anew. Against the second helps only that the
number stays open: uvloop puts off the close of a *socket object* that it watches until it is unwatched. So callers
hand in the socket itself; a bare number is accepted for pipes and the like, at the caller's own risk.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from flowctl.errors import ClosedError, InternalError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from flowctl._jobs import ErrorHook


class HasFileno(Protocol):
    """A socket, or anything else with a descriptor."""

    def fileno(self) -> int:
        """Return the descriptor's number, -1 when closed."""


class _Watch:
    __slots__ = ("inode", "input", "output", "source")

    def __init__(self, source: int | HasFileno, inode: int) -> None:
        self.source: Final = source  # what was watched first; finds the number of a socket that was closed since
        self.inode: Final = inode
        self.input = False
        self.output = False


class FdWatches:
    """The descriptors watched on one loop; only for that loop's thread.

    Args:
        loop: has `add_reader` and its kin.
        run: called with the callback each time a descriptor is ready; the group times and guards it there.
        on_error: told when a descriptor was closed while it was watched.
    """

    __slots__ = ("_loop", "_on_error", "_run", "_watches")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, run: Callable[[Callable[[], Any]], Any], on_error: ErrorHook
    ) -> None:
        self._loop: Final = loop
        self._run: Final = run
        self._on_error: Final = on_error
        self._watches: dict[int, _Watch] = {}

    def watch_input(self, source: int | HasFileno, callback: Callable[[], Any]) -> None:
        """Call `callback` while `source` is readable (level-triggered); replaces an earlier callback.

        Raises:
            ClosedError: `source` is closed.
        """
        fd, watch = self._watch(source)
        try:
            self._loop.add_reader(source, self._run, callback)
        except (OSError, ValueError) as error:
            self._drop(fd)
            raise ClosedError(f"cannot watch descriptor {fd}: {error}") from error
        watch.input = True

    def watch_output(self, source: int | HasFileno, callback: Callable[[], Any]) -> None:
        """Call `callback` while `source` is writable; else as `watch_input`."""
        fd, watch = self._watch(source)
        try:
            self._loop.add_writer(source, self._run, callback)
        except (OSError, ValueError) as error:
            self._drop(fd)
            raise ClosedError(f"cannot watch descriptor {fd}: {error}") from error
        watch.output = True

    def unwatch_input(self, source: int | HasFileno) -> bool:
        """Stop watching `source` for input; its callback does not run any more, not even from this poll.

        Call it before the socket is closed. What is not watched, or closed: no error.

        Returns:
            True if it was watched.
        """
        fd = self._number(source)
        watch = self._watches.get(fd)
        if watch is None or not watch.input:
            return False
        watch.input = False
        with suppress(OSError):  # asyncio's epoll_ctl, when the socket is closed already; the loop has forgotten it
            self._loop.remove_reader(fd)
        if not watch.output:
            del self._watches[fd]
        return True

    def unwatch_output(self, source: int | HasFileno) -> bool:
        """Stop watching `source` for output; else as `unwatch_input`."""
        fd = self._number(source)
        watch = self._watches.get(fd)
        if watch is None or not watch.output:
            return False
        watch.output = False
        with suppress(OSError):  # as in unwatch_input
            self._loop.remove_writer(fd)
        if not watch.input:
            del self._watches[fd]
        return True

    def clear(self) -> None:
        """Stop watching everything."""
        for fd in list(self._watches):
            self._drop(fd)

    def __len__(self) -> int:
        return len(self._watches)

    def _number(self, source: int | HasFileno) -> int:
        """Return the number of `source`, also of a socket that was closed while it was watched."""
        if isinstance(source, int):
            return source
        fd = source.fileno()
        if fd >= 0:
            return fd
        # Closed too early, a bug of the caller: here it may cost a search.
        return next((number for number, watch in self._watches.items() if watch.source is source), -1)

    def _watch(self, source: int | HasFileno) -> tuple[int, _Watch]:
        """Return number and record of `source`, after removing what a socket closed before has left behind."""
        fd = self._number(source)
        try:
            inode = os.fstat(fd).st_ino
        except (OSError, OverflowError) as error:
            self._drop(fd)
            raise ClosedError(f"cannot watch descriptor {fd}: {error}") from error
        watch = self._watches.get(fd)
        if watch is not None and watch.inode != inode:
            self._drop(fd)
            self._on_error(
                f"watch of descriptor {fd}", InternalError("the socket was closed while it was still watched")
            )
            watch = None
        if watch is None:
            watch = self._watches[fd] = _Watch(source, inode)
        return fd, watch

    def _drop(self, fd: int) -> None:
        if self._watches.pop(fd, None) is not None:
            with suppress(OSError):  # as in unwatch_input
                self._loop.remove_reader(fd)
            with suppress(OSError):
                self._loop.remove_writer(fd)
