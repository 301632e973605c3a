"""Which file descriptors a loop watches, and protection against the oldest trap of readiness loops.

A descriptor number outlives its socket. If a socket is closed while it is watched, the kernel forgets the watch, the
loop does not, and the next socket that gets the same number inherits it: asyncio then modifies a registration that
does not exist, uvloop believes that it is polling already. Both were tried: on either loop the new connection never
hears of input again, without any error. So the inode that a number stood for is remembered (every socket has its
own), and a watch left behind is removed, and reported as the bug it is, before the number is watched anew.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from flowctl.errors import ClosedError, InternalError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from flowctl._jobs import ErrorHook


class _Watch:
    __slots__ = ("inode", "input", "output")

    def __init__(self, inode: int) -> None:
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

    def watch_input(self, fd: int, callback: Callable[[], Any]) -> None:
        """Call `callback` while `fd` is readable (level-triggered); replaces an earlier callback.

        Raises:
            ClosedError: `fd` is negative or not open, that is, its socket was closed.
        """
        watch = self._watch(fd)
        try:
            self._loop.add_reader(fd, self._run, callback)
        except (OSError, ValueError) as error:
            self._drop(fd)
            raise ClosedError(f"cannot watch descriptor {fd}: {error}") from error
        watch.input = True

    def watch_output(self, fd: int, callback: Callable[[], Any]) -> None:
        """Call `callback` while `fd` is writable; else as `watch_input`."""
        watch = self._watch(fd)
        try:
            self._loop.add_writer(fd, self._run, callback)
        except (OSError, ValueError) as error:
            self._drop(fd)
            raise ClosedError(f"cannot watch descriptor {fd}: {error}") from error
        watch.output = True

    def unwatch_input(self, fd: int) -> bool:
        """Stop watching `fd` for input; its callback does not run any more, not even from this poll.

        Call it before the socket is closed. A descriptor that is not watched, or -1 of a closed socket: no effect.

        Returns:
            True if it was watched.
        """
        watch = self._watches.get(fd)
        if watch is None or not watch.input:
            return False
        watch.input = False
        self._loop.remove_reader(fd)
        if not watch.output:
            del self._watches[fd]
        return True

    def unwatch_output(self, fd: int) -> bool:
        """Stop watching `fd` for output; else as `unwatch_input`."""
        watch = self._watches.get(fd)
        if watch is None or not watch.output:
            return False
        watch.output = False
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

    def _watch(self, fd: int) -> _Watch:
        """Return the record of `fd`, after removing one that belongs to a socket closed before."""
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
            watch = self._watches[fd] = _Watch(inode)
        return watch

    def _drop(self, fd: int) -> None:
        if self._watches.pop(fd, None) is not None:
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
