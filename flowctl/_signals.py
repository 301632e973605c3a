"""SIGINT and SIGTERM as something to wait for: how the main thread of a server learns that it is to end. SIGHUP beside.

A handler that is written in Python runs between any two steps of the main thread, also while that thread holds a lock.
Setting a `threading.Event` there waits for ever if the main thread is inside `Event.wait` at that moment: both need the
event's lock, and it cannot be taken twice. A handler may therefore do no more than assign an attribute. That alone is
not enough: where the signal comes after the interpreter has looked for signals and before the wait has begun, the wait
sleeps on. So it is a read from a socket to which the interpreter's own handler, in C, writes the number of each signal.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, Self

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)
_READ_BYTES: Final = 64
"""One octet per signal; what is left over is read the next time."""


@contextlib.contextmanager
def on_hangup(callback: Callable[[], None]) -> Iterator[None]:
    """Within this context SIGHUP calls `callback`, instead of ending the program. Main thread.

    Args:
        callback: runs between any two steps of the main thread, so it may take no lock.
    """

    def call(number: int, frame: FrameType | None) -> None:
        del number, frame
        callback()

    before = signal.signal(signal.SIGHUP, call)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class EndSignals:
    """Within this context SIGINT and SIGTERM end nothing by themselves; `wait` tells that one of them came.

    On leaving it, the handlers of before are in force again. Main thread.

    Raises:
        ValueError: entered on another thread than the main one, to which the interpreter gives no signals.
    """

    __slots__ = ("_ended", "_reader", "_undo")

    def __init__(self) -> None:
        self._ended = False
        self._reader: socket.socket | None = None  # None: outside of the context
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            reader, writer = map(stack.enter_context, socket.socketpair())
            writer.setblocking(False)
            # A full socket is no loss: it says that there is something to look at, and `_note` has noted the rest.
            before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            stack.callback(signal.set_wakeup_fd, before)
            for number in _NUMBERS:
                stack.callback(signal.signal, number, signal.signal(number, self._note))
            self._reader, self._undo = reader, stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._reader = None
        self._undo.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Take note of a signal; between any two steps of the main thread, so that no lock may be taken here."""
        del number, frame
        self._ended = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for one of the signals; return whether one has come since the context was entered.

        Args:
            timeout_s: how long to wait at most, more than 0. None: without end.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended and self._reader is not None:
            left_s = None if end is None else end - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self._reader.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                numbers = self._reader.recv(_READ_BYTES)  # also those of signals that others handle
                if any(number in numbers for number in _NUMBERS):
                    self._ended = True
        return self._ended
