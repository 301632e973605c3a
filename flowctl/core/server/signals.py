"""Signals of a server: those that end it are something to wait for, and no other one ends it.

SIGINT, SIGTERM and SIGQUIT end a server in order. SIGHUP, SIGUSR1 and SIGUSR2 would kill it where nobody handles them;
here they are handed to the waiting thread, or named in the log and ignored.

A handler that is written in Python runs between any two steps of the main thread, also while that thread holds a lock.
Setting a `threading.Event` there waits for ever if the main thread is inside `Event.wait` at that moment: both need the
event's lock, and it cannot be taken twice. A handler may therefore do no more than assign an attribute. That alone is
not enough: where the signal comes after the interpreter has looked for signals and before the wait has begun, the wait
sleeps on. So it is a read from a socket to which the interpreter's own handler, in C, writes the number of each signal.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Final, Self

_log: Final = logging.getLogger("flowctl.signals")
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_OTHER_SIGNALS: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Other signals that would kill the process; one that an application handles itself is left to it."""
_READ_BYTES: Final = 64
"""Octets read at a time, one per signal; the rest is read the next time."""
_NO_SIGNAL: Final = b"\0"
"""Octet that is no number of a signal: it only wakes the wait."""


class EndSignals:
    """Within this context SIGINT, SIGTERM and SIGQUIT end nothing by themselves; `wait` tells that one of them came.

    SIGHUP, SIGUSR1 and SIGUSR2 end nothing either, unless they had a handler already, which is left in force. On
    leaving the context, the handlers of before are in force again. Main thread.
    """

    __slots__ = ("_ended", "_reader", "_undo", "_woken", "_writer", "calls")

    def __init__(self) -> None:
        self.calls: Mapping[int, Callable[[], None]] = {}
        """What `wait` calls, by number of the signal: on the main thread, outside of the handler. Others are logged."""
        self._ended = False
        self._woken = False
        self._reader: socket.socket | None = None  # None: outside of the context
        self._writer: socket.socket | None = None  # likewise
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            reader, writer = map(stack.enter_context, socket.socketpair())
            writer.setblocking(False)
            # A full socket is no loss: it says that there is something to look at, and `_note` has noted the rest.
            before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            stack.callback(signal.set_wakeup_fd, before)
            for number in _ENDING:
                stack.callback(signal.signal, number, signal.signal(number, self._note))
            for number in _OTHER_SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    stack.callback(signal.signal, number, signal.signal(number, self._wake))
            self._reader, self._writer, self._undo = reader, writer, stack.pop_all()
        return self

    def end(self) -> None:
        """Let `wait` return as if a signal had come: the server has ended by itself. Any thread, no signal handler."""
        self._ended = True
        self.wake()

    def wake(self) -> None:
        """Let `wait` return before its time, without an end. Any thread, no signal handler."""
        self._woken = True
        writer = self._writer
        if writer is not None:
            with contextlib.suppress(OSError):  # full: there is something to look at; closed: nobody waits any more
                writer.send(_NO_SIGNAL)

    def __exit__(self, *exc_info: object) -> None:
        self._reader = self._writer = None
        self._undo.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; between any two steps of the main thread, so that no lock may be taken here."""
        del number, frame
        self._ended = True

    def _wake(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: that the signal has a handler keeps it from killing, and its number wakes the wait."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for one of the signals that end, or for `wake`; return whether a signal has come since the beginning."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended and not self._woken and self._reader is not None:
            left_s = None if end is None else end - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self._reader.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                numbers = self._reader.recv(_READ_BYTES)  # also those of signals that others handle
                for number in numbers:
                    self._take(number)
        self._woken = False  # who wakes has put what is to be looked at in its place before
        return self._ended

    def _take(self, number: int) -> None:
        if number == _NO_SIGNAL[0]:
            return
        if number in _ENDING:
            self._ended = True
            _log.info("%s: ending in order", signal.Signals(number).name)
        elif signal.getsignal(number) != self._wake:
            return  # of the application
        elif number in self.calls:
            self.calls[number]()
        else:
            _log.info("%s: there is nothing to do, it is ignored", signal.Signals(number).name)
