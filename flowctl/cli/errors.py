"""How the command line ends: errors as ``error:`` and ``hint:`` lines on standard error, and the exit status."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

import typer

from flowctl.core.text.extras import missing_extra
from flowctl.core.text.output import drop, failure, lost, say
from flowctl.core.text.printable import printable
from flowctl.errors import ConfigError, FlowctlError

OK: Final = 0
FAILED: Final = 1
WRONG_USE: Final = 2
INTERRUPTED: Final = 130
"""Exit code after SIGINT, 128 + 2, as shells report it."""
TERMINATED: Final = 143
"""Exit code after SIGTERM, 128 + 15; SIGHUP and SIGQUIT end a command in the same way."""
READER_GONE: Final = 141
"""Exit code after SIGPIPE, 128 + 13, as of a program that writes to a pipe without a reader."""

_ONE_END_S: Final = 0.5
"""Time in which further signals to end are the same one: ``timeout`` sends two at once, and a second error while the
first is on its way out of a `threading` wait leaves the lock of that held for ever."""
_USAGE: Final = typer.BadParameter.__mro__[2]
"""Base class of all errors of use, ClickException: typer has it from click or, in newer versions, in itself."""


class TerminatedError(BaseException):
    """SIGTERM, SIGHUP or SIGQUIT, where it is to end a command like Ctrl-C.

    No KeyboardInterrupt: typer makes status 130 of those.
    """


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within this context SIGTERM, SIGHUP and SIGQUIT raise `TerminatedError` as SIGINT raises KeyboardInterrupt.

    SIGUSR1 and SIGUSR2, which would kill the process too, mean nothing. Main thread.
    """
    raised_at = float("-inf")

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        del number, frame
        if time.monotonic() - raised_at >= _ONE_END_S:
            raised_at = time.monotonic()
            raise TerminatedError

    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            stack.callback(signal.signal, number, signal.signal(number, terminate))
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            stack.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        yield


def run(app: typer.Typer, arguments: list[str]) -> int:
    """Run `app` and return the exit status; errors of the expected kinds become lines on standard error."""
    try:
        status = _run(app, arguments)
        sys.stdout.flush()  # what was written around `say`: help, media
    except BrokenPipeError:
        # Who read our output has gone, and knows.
        drop(sys.stdout)
        status = READER_GONE
    except OSError as error:
        status = _failed(failure(error))
    # Only the exit status can say that standard error took nothing.
    if lost() is not None:
        drop(sys.stderr)
        status = status or FAILED
    return status


def _run(app: typer.Typer, arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        status = app(arguments, prog_name="flowctl", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as error:  # what click makes of a broken pipe
        raise (error.__context__ if isinstance(error.__context__, BrokenPipeError) else error) from None
    except TerminatedError:
        return TERMINATED
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        return INTERRUPTED
    except FlowctlError as error:
        if debug:
            raise
        return _failed(error)
    except BrokenPipeError:
        raise
    except Exception as error:
        if debug and not isinstance(error, _USAGE):
            raise
        return _unforeseen(error, app, arguments)
    return status if isinstance(status, int) else OK


def _unforeseen(error: Exception, app: typer.Typer, arguments: list[str]) -> int:
    """Report an error that no command has words for: of use, of the installation, of the system, or a bug."""
    if isinstance(error, _USAGE):
        return _wrong_use(error, app, arguments)
    if isinstance(error, ModuleNotFoundError) and (lacking := missing_extra(error, _command_of(app, arguments))):
        return _failed(lacking)
    if isinstance(error, OSError):
        if error.errno == errno.EBADF and error.filename is None:
            raise error  # standard output, from text longer than its buffer
        return _failed(_of_the_system(error))
    complain(f"{type(error).__name__}: {error}", "this is a bug of flowctl; run it with --debug and report it")
    return FAILED


def _failed(error: FlowctlError) -> int:
    complain(str(error), error.hint)
    return WRONG_USE if isinstance(error, ConfigError) else FAILED


_OF_FILES: Final = {
    errno.EACCES: "you may not use it: name another place, or have its rights changed",
    errno.EPERM: "you may not use it: name another place, or have its rights changed",
    errno.EROFS: "it cannot be written to: name another place",
    errno.ENOSPC: "make room on its disk, or name another place",
    errno.EDQUOT: "your share of the disk is used up: make room, or name another place",
    errno.EISDIR: "name a file in it",
    errno.ENOTDIR: "a part of the path is a file",
    errno.ENOENT: "is the path right?",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.ENFILE: "the machine has no more open files",
    errno.EIO: "the disk, or what is mounted there, does not answer",
}


def _of_the_system(error: OSError) -> FlowctlError:
    """Return what to say of an error of the system that no command has words of its own for: it is no bug."""
    name = error.filename if error.filename is not None else ""
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    where = f"{name}: " if name != "" else ""
    return FlowctlError(f"{where}{error.strerror or error}", hint=_OF_FILES.get(error.errno or 0))


def complain(message: str, hint: str | None = None) -> None:
    """Write an error, and a hint if there is one, to standard error; addresses in it lose their secrets."""
    from flowctl.log import redact_text

    # A line each: an error may quote what a peer has said.
    say(f"error: {printable(redact_text(message))}", to_stderr=True)
    if hint:
        say(f"hint: {printable(redact_text(hint))}", to_stderr=True)


def _wrong_use(error: Exception, app: typer.Typer, arguments: list[str]) -> int:
    """Report an error of use as typer words it, with the way to the help as its hint."""
    format_message = getattr(error, "format_message", None)
    message = format_message() if callable(format_message) else str(error)
    if message.startswith("Usage:"):  # no command was given: the help is the message
        say(message, to_stderr=True)
    elif message:  # none is there where the help has been shown already
        complain(message.rstrip("."), f"{_command_of(app, arguments)} --help lists what there is")
    return WRONG_USE


def _command_of(app: typer.Typer, arguments: list[str]) -> str:
    """Return the command that was given, as far as it is one: ``flowctl rpc call``."""
    words = ["flowctl"]
    for argument in arguments:
        if argument in {command.name for command in app.registered_commands}:
            return " ".join([*words, argument])
        inner = next((group.typer_instance for group in app.registered_groups if group.name == argument), None)
        if inner is not None:
            words.append(argument)
            app = inner
    return " ".join(words)
