"""The application's handlers: called on the messenger's thread, waited for where they are coroutines, and contained."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias

from flowctl.pollgroup import PollGroup

Handler: TypeAlias = Callable[..., object]
"""Called with the messenger, and with what it is about; may be a coroutine function."""


class Handlers:
    """Calls handlers of one messenger, which is their first argument."""

    def __init__(self, messenger: object, group: Callable[[], PollGroup]) -> None:
        self._messenger: Final = messenger
        self._group: Final = group
        self.error_count = 0  #: exceptions of handlers, contained
        self.tasks: Final[set[asyncio.Task[None]]] = set()  #: coroutines of handlers that run

    def call(self, what: str, handler: Handler, *args: object) -> None:
        """Call a handler that decides nothing."""
        try:
            result = handler(self._messenger, *args)
        except BaseException as error:  # noqa: BLE001  (a handler's fault is its own)
            self.error_count += 1
            self._group().report(what, error)
            return
        if inspect.isawaitable(result):
            self.spawn(self._finish(what, result), result)

    async def _finish(self, what: str, result: Awaitable[object]) -> None:
        try:
            await result
        except BaseException as error:  # noqa: BLE001  (a handler's fault is its own)
            self.error_count += 1
            self._group().report(what, error)

    def spawn(self, work: Coroutine[Any, Any, None], waits_for: object) -> asyncio.Task[None]:
        """Run `work`, which awaits what a handler has returned."""
        task = self._group().loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if inspect.iscoroutine(waits_for):  # a task that is cancelled before it begins would never look at it
            task.add_done_callback(lambda _: waits_for.close())
        return task
