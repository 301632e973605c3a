"""What the programs say outside of their log: the one place where text is written to standard output and error.

Control characters of others are shown as text (see `core.text.printable`). Standard output is for data, so a failure to
write there ends the command; on standard error there is nobody left to tell, so a failure is noted for the exit status.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from types import ModuleType
from typing import Final, TextIO

from flowctl.core.text.printable import printable
from flowctl.errors import FlowctlError

_stderr_errors: Final[list[str]] = []
"""Reason why text could not be written to standard error."""


def say(text: str, *, to_stderr: bool = False, end: str = "\n", stream: TextIO | None = None) -> None:
    shown = printable(text, lines=True) + end
    if not to_stderr and stream is None:
        _write_out(shown)
        return
    if log := _log():
        log.flush()  # in the order in which things happened
    try:
        _write(stream or sys.stderr, shown)
    except OSError as error:
        _stderr_errors.append(str(error.strerror or error))


def _write_out(text: str) -> None:
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise failure(error) from error


def failure(error: OSError) -> FlowctlError:
    """Return what to say when standard output could not be written to, which leads nowhere from now on."""
    drop(sys.stdout)
    if error.errno == errno.EBADF:
        return FlowctlError("standard output is closed", hint="open it, or send it to /dev/null")
    return FlowctlError(f"cannot write to standard output: {error.strerror or error}", hint="has its disk room?")


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def drop(stream: TextIO) -> None:
    """Let a stream lead nowhere: what is left in its buffer would fail once more when Python ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def lost() -> str | None:
    """Return why something could not be written to standard error, by `say` or by the log. None: all could."""
    if _stderr_errors:
        return _stderr_errors[-1]
    log = _log()
    if log is None:
        return None
    log.flush()
    error = log.write_error()
    return None if error is None else str(error.strerror or error)


def _log() -> ModuleType | None:
    # Not imported: a command that sets up no log shall not wait for one to be loaded.
    return sys.modules.get("flowctl.log")


def open_missing_streams() -> None:
    """Open /dev/null in the place of each standard stream that is closed, before anything else is opened.

    Otherwise the first sockets and files of the process would take these numbers, and what somebody writes to standard
    error would go to a peer. Standard output is opened for reading, so that who has data to write is told.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest number that is free, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - likewise
