"""Coroutines that are begun at once, and become tasks of their loop only if they have to wait.

Theory of operation. A task costs 4 us, most of it for being queued before its first step and after its last one. Most
handlers never wait, so they are run up to where they first would; only what is left then becomes a task. (This is what
`asyncio.eager_task_factory` does from Python 3.12 on, which makes a task all the same.) While it is begun, a stand-in
is the current task: ``asyncio.timeout()`` and ``TaskGroup`` keep the task they were entered in, to cancel it later.
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task  # documented, for those who bring tasks of their own
from collections.abc import Coroutine
from contextvars import copy_context
from typing import Any, Final, cast


def begin(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run a coroutine up to where it first waits; on the thread of the loop.

    It has a copy of the context, as a task has. Where a task runs already, it steps aside meanwhile.
    """
    stand_in = _TaskStandIn()
    task = cast("asyncio.Task[None]", stand_in)
    context = copy_context()
    before = asyncio.current_task(loop)
    if before is not None:
        _leave_task(loop, before)
    _enter_task(loop, task)
    try:
        waits_for = context.run(coroutine.send, None)
    except StopIteration:
        return None
    finally:
        _leave_task(loop, task)
        if before is not None:
            _enter_task(loop, before)
    return stand_in.become(loop.create_task(_StartedCoroutine(coroutine, waits_for), context=context))


class _StartedCoroutine(Coroutine[Any, Any, None]):
    """What is left of a coroutine that has begun: it waits for something already.

    A class and not a coroutine around it, because it has to be cancelled where it waits, even before the first step of
    its task.
    """

    __slots__ = ("_coroutine", "_told", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: object) -> None:
        self._coroutine: Final = coroutine
        self._waits_for = waits_for
        self._told = False

    def send(self, value: Any) -> Any:
        """Tell what it waits for at first, then go on."""
        if self._told:
            return self._coroutine.send(value)
        self._told = True
        waits_for, self._waits_for = self._waits_for, None
        return waits_for

    def throw(self, *error: Any) -> Any:
        self._told = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        raise TypeError("only a task goes on with a coroutine that has begun")


class _TaskStandIn:
    """Stands for the task that a coroutine may become."""

    __slots__ = ("__weakref__", "_cancelled_count", "_task")

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._cancelled_count = 0

    def become(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Be that task from now on; it was cancelled as often as this one."""
        self._task = task
        for _ in range(self._cancelled_count):
            task.cancel()
        return task

    def cancel(self, msg: Any = None) -> bool:
        if self._task is not None:
            return self._task.cancel(msg)
        self._cancelled_count += 1
        return True

    def cancelling(self) -> int:
        return self._cancelled_count if self._task is None else self._task.cancelling()

    def uncancel(self) -> int:
        if self._task is not None:
            return self._task.uncancel()
        self._cancelled_count = max(0, self._cancelled_count - 1)
        return self._cancelled_count

    def __getattr__(self, name: str) -> Any:
        """Return what else a task has, once there is one."""
        if self._task is None:
            raise AttributeError(f"a coroutine that has not waited yet has no {name}")
        return getattr(self._task, name)
