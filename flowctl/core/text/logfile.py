"""A log file that is begun anew when it is large, and each day, and found again when somebody else has moved it.

Several processes may write one file: the workers of a server, or a server and the one that takes its place. Each writes
whole lines at its end (O_APPEND). The one that finds the file too large, or of another day, renames it under a lock;
all others find another file, or none, at the path before their next line, and open that. So it works with logrotate in
each of its ways: a moved file needs no signal, though SIGUSR1 has it looked for at once, and an emptied one
(``copytruncate``) is written to from its beginning.

What keeps lines from the file is told on standard error, once until it has passed. The server waits for none of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowctl.core.folders.folders import opened_folder
from flowctl.core.text.logwriter import DescriptorTarget
from flowctl.errors import ConfigError

_MODE: Final = 0o640
"""Mode of a new file: addresses of peers are in it, which are the owner's and a group's of operators to read."""
_DAY_S: Final = 86_400
_ROTATED: Final = re.compile(r"\.\d{8}-\d{6}-\d{6}")
"""End of the name of a file that was rotated: its time, local as its day is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFileOptions:
    """Where the log goes, and how much of it is kept.

    Args:
        path: the file. None: the log goes to standard error.
        max_bytes: a file that has so many is renamed, and so is that of another day; 0: this is left to others.
        keep: renamed files that stay, the newest; 0: all.
    """

    path: Path | None = None
    max_bytes: int = 100 * 1024 * 1024
    keep: int = 14

    def __post_init__(self) -> None:
        if self.max_bytes < 0 or self.keep < 0:
            raise ConfigError(f"max_bytes is {self.max_bytes} and keep {self.keep}, they must be 0 or more")


_WRITE: Final = "cannot be written"
_LOOK: Final = "cannot be rotated or opened again"


class LogFile:
    """The target of a `LineWriter` that is a file. Opened by any thread, used by the writer's."""

    def __init__(self, path: Path, options: LogFileOptions) -> None:
        self._path: Final = path.resolve()  # of a link, what it leads to is rotated
        self._options: Final = options
        try:
            self._output: Final = DescriptorTarget(_opened(self._path))
        except OSError as error:
            raise ConfigError(
                f"cannot write the log file {self._path}: {error.strerror}",
                hint="name a file in a folder that the server may write to; a service has one by LogsDirectory=",
            ) from error
        self._told: dict[str, str] = {}  # by what cannot be done: why

    def write(self, lines: Sequence[bytes]) -> OSError | None:
        error = self._output.write(lines)
        if error is not None:
            self._tell(_WRITE, error)
        elif any(lines):
            self._told.pop(_WRITE, None)
        return error

    def look(self) -> None:
        try:
            status = self._status()
            if status is None or not os.path.samestat(status, os.fstat(self._output.descriptor)):
                self._open_again()
            elif self._is_full(status):
                self._rotate()
        except OSError as error:
            self._tell(_LOOK, error)
        else:
            self._told.pop(_LOOK, None)

    def close(self) -> None:
        os.close(self._output.descriptor)

    def _status(self) -> os.stat_result | None:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat()
        return None

    def _is_full(self, status: os.stat_result) -> bool:
        most = self._options.max_bytes
        if not most or not status.st_size:
            return False
        now = time.time()
        shift_s = time.localtime(now).tm_gmtoff
        return status.st_size >= most or (status.st_mtime + shift_s) // _DAY_S != (now + shift_s) // _DAY_S

    def _rotate(self) -> None:
        locked = self._output.descriptor
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another process is at it
        try:
            status = self._status()
            if status is not None and os.path.samestat(status, os.fstat(locked)) and self._is_full(status):
                now = time.time()
                ending = f".{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now % 1 * 1e6):06}"
                self._path.rename(self._path.with_name(self._path.name + ending))
                self._open_again()
                self._remove_old()
        finally:
            fcntl.flock(locked, fcntl.LOCK_UN)

    def _open_again(self) -> None:
        """Open what is at the path, or a new file; where that cannot be, lines go on to the one that was moved."""
        descriptor = _opened(self._path)
        os.dup2(descriptor, self._output.descriptor, inheritable=False)
        os.close(descriptor)

    def _remove_old(self) -> None:
        name = self._path.name
        rotated = [
            item
            for item in self._path.parent.iterdir()
            if item.name.startswith(name) and _ROTATED.fullmatch(item.name, len(name))
        ]
        for item in sorted(rotated)[: -self._options.keep] if self._options.keep else ():
            item.unlink(missing_ok=True)

    def _tell(self, what: str, error: OSError) -> None:
        why = error.strerror or str(error)
        if why != self._told.get(what):
            self._told[what] = why
            with contextlib.suppress(OSError):
                if select.select((), (2,), (), 0)[1]:  # else it is read by nobody, and would be waited for
                    os.write(2, f"error: the log file {self._path} {what}: {why}\n".encode(errors="backslashreplace"))


def _opened(path: Path) -> int:
    # Without O_NONBLOCK a pipe without a reader would be waited for. The path has no links: one put there later, by
    # somebody who may write to a folder of it, would have lines of the log in any file of this user.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW
    with opened_folder(path.parent, None) as folder:
        descriptor = os.open(path.name, flags, _MODE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no regular file")
    return descriptor
