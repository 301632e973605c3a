"""Processes that a server starts: fresh interpreters of the same program, that are handed their orders in memory.

The orders hold the credentials of the server, so they are in no file, no argument and no variable, but in memory that
has no name. A process is a fresh interpreter: a fork of a process with threads would begin with locks that nobody lets
go of. What it says in the end, should it end in disorder, stands in memory as well.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from flowctl.control.place import check_private, runtime_folder
from flowctl.core.text.printable import printable
from flowctl.errors import ConfigError, FlowctlError

_BOOT: Final = (
    "import importlib,json,sys;f=open(int(sys.argv[1]),'rb');b=json.loads(f.readline());sys.path[:]=b['path'];"
    "importlib.import_module(b['module']).main(b['pid'],b['words'],f)"
)
"""First lines of a child's program: it finds its modules where its parent does."""
_MOST_WORDS_CHARS: Final = 4000
"""Characters of a child's last words that are logged at most."""
_MOST_FOLDER_BYTES: Final = 80
"""Octets of the folder's path, which leaves a socket in it some 25 of the 107 that its path may have (unix(7))."""


class Child:
    """A process that was started.

    Args:
        module: has ``main(parent_pid, words_fd, orders)``, which the process calls; see `serve_orders`.
        orders: what is pickled for it.
        title: what stands behind the program in a list of processes.
        pass_fds: descriptors that it keeps, under the same numbers.

    Raises:
        ConfigError: the orders cannot be pickled.
        OSError: the process cannot be started.
    """

    def __init__(self, module: str, orders: object, title: str, pass_fds: Iterable[int]) -> None:
        body = pickle.dumps(orders)
        self._words_fd: Final = os.memfd_create("flowctl-words", os.MFD_CLOEXEC)
        head = {"path": sys.path, "pid": os.getpid(), "module": module, "words": self._words_fd}
        orders_fd = os.memfd_create("flowctl-orders", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(orders_fd), "wb") as file:
                file.write(json.dumps(head).encode() + b"\n" + body)
            os.lseek(orders_fd, 0, os.SEEK_SET)
            self.process: Final = subprocess.Popen(  # noqa: S603 - this very program
                [sys.executable, "-P", "-c", _BOOT, str(orders_fd), title],
                stdin=subprocess.DEVNULL,
                pass_fds=(orders_fd, self._words_fd, *pass_fds),
                process_group=0,  # what a terminal sends its group is the parent's to pass on
            )
        except OSError:
            os.close(self._words_fd)
            raise
        finally:
            os.close(orders_fd)
        self.pid: Final = self.process.pid

    def last_words(self) -> dict[str, Any]:
        return words_in(self._words_fd)

    def how_it_ended(self) -> dict[str, Any]:
        """Return its end in words, for the log. It has ended."""
        words = self.last_words()
        said = {key: words[key] for key in ("error", "hint", "stack") if words.get(key)}
        return {"pid": self.pid, "ended": end_in_words(self.process.wait()), **said}

    def signal(self, number: int) -> None:
        """Send a signal; harmless where the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self, patience_s: float) -> bool:
        """Wait for its end for that long, then kill it; return whether it has ended by itself."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        return True

    def close(self) -> None:
        """Let go of its last words."""
        os.close(self._words_fd)


def words_in(words_fd: int) -> dict[str, Any]:
    """Return what a child said in the end: ``error``, and maybe ``hint`` or where its threads were, ``stack``."""
    with contextlib.suppress(OSError):
        text = os.pread(words_fd, 64 * 1024, 0).decode(errors="replace")
        with contextlib.suppress(ValueError):
            words = json.loads(text)
            if isinstance(words, dict):
                return words
        if text:
            first, _, rest = printable(text[:_MOST_WORDS_CHARS], lines=True).partition("\n")
            return {"error": first, "stack": rest.strip("\n")}
    return {}


def end_in_words(code: int) -> str:
    """Return the end of a process in words, by its exit status as `subprocess` has it."""
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def serve_orders(words_fd: int, serve: Callable[[], None]) -> None:
    """Run what a child is for, and leave last words where that raises, or crashes."""
    words = os.fdopen(words_fd, "wb", buffering=0)
    faulthandler.enable(words)  # SIGABRT too, by which the parent asks where one hangs
    try:
        serve()
    except BaseException as error:
        words.write(json.dumps(_said(error)).encode())
        if not isinstance(error, FlowctlError):
            raise
        raise SystemExit(1) from error


def _said(error: BaseException) -> dict[str, Any]:
    if isinstance(error, FlowctlError):
        return {"error": str(error), "hint": error.hint, "config": isinstance(error, ConfigError)}
    last = traceback.format_exception_only(error)[-1].strip()
    place = traceback.extract_tb(error.__traceback__)
    return {"error": f"{last} ({place[-1].filename}:{place[-1].lineno})" if place else last, "hint": None}


def make_folder(kind: str) -> Path:
    """Return a folder for sockets between processes of a server, the user's alone; those of killed servers go."""
    base = runtime_folder()
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        check_private(base)
        for old in base.glob(f"{kind}-*"):
            if not _lives(old.name.removeprefix(f"{kind}-").partition("-")[0]):
                shutil.rmtree(old, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-", dir=base))
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder for the {kind} in {base}: {error.strerror or error}",
            hint="set XDG_RUNTIME_DIR to a folder of your own",
        ) from error
    if len(os.fsencode(made)) > _MOST_FOLDER_BYTES:
        made.rmdir()
        raise ConfigError(
            f"the path {made} is too long for sockets in it", hint="set XDG_RUNTIME_DIR or TMPDIR to a shorter one"
        )
    return made


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
