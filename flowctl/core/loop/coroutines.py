"""The running coroutines of a connection's session: handlers may be plain functions or coroutine functions.

A coroutine runs as a task on the loop of the group where it began; what follows from its end is done by the
connection, on whatever thread that lives by then. Running coroutines are kept here, because a loop holds its tasks
only weakly, and cancelled when the connection ends: after `closed` nothing of a session runs any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from flowctl.core.loop.faults import as_exception
from flowctl.errors import InternalError


class Coroutines:
    __slots__ = ("_cancelled", "_failed", "_over", "_tasks")

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self._over = False  # nothing begins any more
        self._cancelled = False  # by `cancel`: a coroutine that is cancelled then has ended as it should
        self._tasks: set[asyncio.Task[None]] | None = None  # most sessions have none

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        where: str,
        then: Callable[[], object] | None = None,
        offered_bytes: int = 0,
    ) -> None:
        task = loop.create_task(_run(coroutine, offered_bytes))
        if self._tasks is None:
            self._tasks = set()
        self._tasks.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            coroutine.close()  # cancelled before its first step, it would be said never to have been awaited
            self._done(task, where, then)
            if self._over and not self._tasks:
                self._failed = _ignore  # the connection's, which holds us

        task.add_done_callback(done)

    @property
    def running(self) -> bool:
        return bool(self._tasks)

    def cancel(self) -> None:
        """Cancel all, on any thread; they notice at their next step."""
        self._cancelled = True
        for task in list(self._tasks or ()):
            with suppress(RuntimeError):  # its loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    def let_go(self) -> bool:
        """Forget the connection when the last coroutine has ended; return whether it has."""
        self._over = True
        return not self._tasks

    def _done(self, task: asyncio.Task[Any], where: str, then: Callable[[], object] | None) -> None:
        if self._tasks is not None:
            self._tasks.discard(task)
        if task.cancelled():
            if not self._cancelled:
                self._failed(where, asyncio.CancelledError("it was cancelled, and not by the end of its connection"))
            return
        error = task.exception()
        if error is not None:
            self._failed(where, error)
        elif then is not None:
            then()


def _ignore(where: str, error: BaseException) -> None:
    """Do nothing: no coroutine is left to fail."""


async def _run(coroutine: Coroutine[Any, Any, Any], offered_bytes: int) -> None:
    try:
        answer = await coroutine
    except (SystemExit, KeyboardInterrupt) as error:  # a loop would let these two out, and end
        raise as_exception(error) from error
    rest = offered_bytes - answer if offered_bytes and isinstance(answer, int) else 0
    if rest:
        raise InternalError(
            f"a coroutine of received() must consume all {offered_bytes} bytes, it left {rest}",
            hint="keep what is incomplete in the session, or make received() a plain function",
        )
