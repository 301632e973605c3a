"""What handlers raise, contained: one connection's fault is one connection's.

Handlers, jobs, timers and hooks may raise anything, also what is no `Exception`: CancelledError of a task that was
cancelled, SystemExit of a library that gives up, KeyboardInterrupt raised by hand. On the thread of a poll group none
of them means more than that this handler has failed: the others on the thread go on. Ctrl-C is raised by the
interpreter on the main thread only, and a process is ended from there; see `flowctl.core.server.signals`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from flowctl.errors import LocalProtocolError

#: Told where something failed and with what; called with no lock held. What it raises itself is logged.
ErrorHook = Callable[[str, Exception], None]

_log = logging.getLogger("flowctl.loop")


def log_error(where: str, error: Exception) -> None:
    """Write `error` with its traceback to the standard logger ``flowctl.core.loop``: the default error hook."""
    _log.error("%s failed", where, exc_info=error)


def as_exception(error: BaseException) -> Exception:
    """Return `error`, or an exception that stands for it where it is none: hooks are promised an `Exception`."""
    if isinstance(error, Exception):
        return error
    contained = LocalProtocolError(
        f"a handler raised {error!r}, which ends neither a thread nor the process",
        hint="close the connection, or stop the server from the main thread",
    )
    contained.__cause__ = error
    return contained


def report(hook: ErrorHook, where: str, error: BaseException) -> None:
    """Tell `hook` of `error`; never raises, since what called it must go on."""
    try:
        hook(where, as_exception(error))
    except BaseException as failure:  # noqa: BLE001  (a hook that fails must cost no more than its line)
        with suppress(BaseException):
            log_error(f"the error hook, told of {where}: {error!r},", as_exception(failure))
