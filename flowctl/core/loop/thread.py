"""One daemon thread that runs one event loop, from its first turn to the closed loop.

Apart from `PollGroup` so that what goes on inside a loop (connections, jobs, deadlines) and what carries it (thread,
start, orderly end) can each be read alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from flowctl.core.loop.faults import report
from flowctl.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowctl.core.loop.faults import ErrorHook

#: A new thread reaches the first turn of its loop within milliseconds; this long means that the machine is stuck.
_START_LIMIT_S: Final = 10.0

#: What tasks left on the loop get to end after they were cancelled, when `stop` gave no time or it is used up.
_TASKS_GRACE_S: Final = 0.1


def default_loop_factory() -> asyncio.AbstractEventLoop:
    """Return a new uvloop, or asyncio's own loop where uvloop is not installed (Windows, PyPy)."""
    try:
        import uvloop  # noqa: PLC0415  (an optional dependency: only who starts a loop pays for the import)
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread:
    """A loop and its thread, which runs until `stop`: whatever a task raises or does to the loop, the others go on."""

    __slots__ = ("_ending", "_on_closed", "_on_end", "_on_error", "_thread", "end_at", "loop", "thread_id")

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[[], None],
        on_error: ErrorHook,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self.loop: Final = loop
        self.thread_id: int | None = None  #: set before `start` returns
        self.end_at = 0.0  #: `time.monotonic()` until when tasks may wind up; set by `stop`
        self._ending = False  # `stop` was called
        self._on_end: Final = on_end
        self._on_closed: Final = on_closed
        self._on_error: Final = on_error
        # A daemon: a handler that hangs must not keep the process from ending after stop() gave up on it.
        self._thread: Final = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        running = threading.Event()
        self.loop.call_soon(running.set)
        self._thread.start()
        if not running.wait(_START_LIMIT_S):
            raise InternalError(f"the loop of thread {self._thread.name!r} did not start within {_START_LIMIT_S:g} s")

    def stop(self) -> None:
        """End the loop after this turn; on its thread."""
        self._ending = True
        self.loop.stop()

    def join(self, deadline_s: float) -> bool:
        self._thread.join(max(0.0, deadline_s))
        return not self._thread.is_alive()

    def _main(self) -> None:
        self.thread_id = threading.get_ident()
        try:
            while not (self._ending or self.loop.is_closed()):
                try:
                    self.loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:
                    # Loops let these two out of a task that the application has made; what was queued is still there.
                    report(self._on_error, "task", error)
        except BaseException as error:  # noqa: BLE001  (a loop that is broken ends its thread, not unnoticed)
            escaped = InternalError(f"the loop of thread {self._thread.name!r} was ended by {error!r}")
            escaped.__cause__ = error
            report(self._on_error, "loop thread", escaped)
        finally:
            self._on_end()
            self._close()
            self._on_closed()

    def _close(self) -> None:
        """Cancel the tasks left, give them until `end_at` to wind up, and close the loop."""
        try:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                wait_s = max(_TASKS_GRACE_S, self.end_at - time.monotonic())
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=wait_s))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        except BaseException as error:  # noqa: BLE001  (whatever a task does at the end, the loop must be closed)
            report(self._on_error, "end of the loop", error)
        finally:
            with suppress(RuntimeError):
                self.loop.close()
