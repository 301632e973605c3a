"""How the command line ends: errors as ``error:`` and ``hint:`` lines on standard error, and the exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Final

import typer

from flowctl.errors import ConfigError, FlowctlError

OK: Final = 0
FAILED: Final = 1
WRONG_USE: Final = 2
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""
TERMINATED: Final = 143
"""128 + SIGTERM, likewise."""

_USAGE: Final = typer.BadParameter.__mro__[2]
"""ClickException, base of all errors of use: typer has it from click or, in newer versions, in itself."""


class TerminatedError(BaseException):
    """SIGTERM, where it is to end a command like Ctrl-C. No KeyboardInterrupt: typer makes status 130 of those."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within this context SIGTERM raises `TerminatedError` as SIGINT raises KeyboardInterrupt. Main thread."""

    def terminate(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(app: typer.Typer, arguments: list[str]) -> int:
    """Run `app` and return the exit status; errors of the expected kinds become lines on standard error.

    Args:
        app: the commands.
        arguments: without the program's name. ``--debug`` in front of the command shows tracebacks.
    """
    debug = "--debug" in arguments
    try:
        status = app(arguments, prog_name="flowctl", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    except TerminatedError:
        return TERMINATED
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        return INTERRUPTED
    except FlowctlError as error:
        if debug:
            raise
        complain(str(error), error.hint)
        return WRONG_USE if isinstance(error, ConfigError) else FAILED
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if isinstance(error, _USAGE):
            return _wrong_use(error, app, arguments)
        if debug:
            raise
        complain(f"{type(error).__name__}: {error}", "this is a bug of flowctl; run it with --debug and report it")
        return FAILED
    return status if isinstance(status, int) else OK


def complain(message: str, hint: str | None = None) -> None:
    """Write an error, and a hint if there is one, to standard error; addresses in it lose their secrets."""
    from flowctl.log import redact_text

    typer.echo(f"error: {redact_text(message)}", err=True)
    if hint:
        typer.echo(f"hint: {redact_text(hint)}", err=True)


def _wrong_use(error: Exception, app: typer.Typer, arguments: list[str]) -> int:
    """Report an error of use as typer words it, with the way to the help as its hint."""
    format_message = getattr(error, "format_message", None)
    message = format_message() if callable(format_message) else str(error)
    if message:  # none is there where no command was given; the help has been shown then
        commands = {command.name for command in app.registered_commands}
        given = next((argument for argument in arguments if argument in commands), None)
        complain(
            message.rstrip("."), f"{'flowctl' if given is None else f'flowctl {given}'} --help lists what there is"
        )
    return WRONG_USE
