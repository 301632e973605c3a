"""A file that is watched for changes of its contents.

A look costs one ``stat`` as long as nothing changed. A file that changed is read (never more than its limit of bytes)
and, if its contents are others than those read last, parsed. What cannot be read or parsed changes nothing: the last
valid contents stay in force, and `FileStatus` says what is wrong and where.

Writers should write beside the file and rename. One that writes in place is no danger, only late: half a file is
invalid, or it is valid and will be followed by the whole; in both cases the next look finds the rest. The moment in
which such a writer has emptied the file and not begun is told from a file that is meant to be empty by waiting: one
that turns up empty is taken when the look after finds it unchanged.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from flowctl.core.text.userfiles import without_mark
from flowctl.errors import ConfigError, FlowctlError

_FRESH_S: Final = 2.0
"""Age of a change below which the file is read once more, even if it looks the same: two changes within one tick of the
file system's clock (4 ms, or 2 s on FAT) have the same time."""

_Look = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStatus:
    """How it stands with a watched file."""

    path: str
    applied: int = 0
    invalid: int = 0
    fault: str = ""  # what is wrong with the present version, and where; empty: nothing, or there is no file
    there: bool = False
    hint: str = ""  # what can be done about the fault; empty: it says so itself, or there is none

    @property
    def state(self) -> str:
        """In a word: ``valid``, ``invalid`` or ``absent``."""
        if self.fault:
            return "invalid"
        return "valid" if self.there else "absent"


class WatchedFile:
    """A watched file, and the function that takes its contents. One thread at a time; `status` may be read by any."""

    def __init__(
        self,
        path: Path,
        take: Callable[[str, str], None],
        most_bytes: int,
        wall: Callable[[], float] = time.time,
        *,
        whole_lines: bool = False,
        errors: str = "strict",
    ) -> None:
        self.path: Final = path
        self._take = take
        self._most_bytes: Final = most_bytes
        self._wall = wall
        self._whole_lines: Final = whole_lines
        self._errors: Final = errors  # what becomes of octets that are no UTF-8, as of `bytes.decode`
        self._seen: _Look | None = None  # what `stat` said at the last look. None: there was no file
        self._last_look: _Look | None = None  # what `stat` said before the last reading. None: read in any case
        self._digest = b""  # digest of the contents that were read last
        self._taken = False  # whether it ever said anything that is in force
        self._blank: _Look | None = None  # what `stat` said of a file that turned up empty or cut, and is not taken yet
        self.status = FileStatus(path=str(path))  # how it stands; replaced as a whole

    def read(self) -> bool:
        """Look at the file, and pass on its contents if they are new; return whether they were taken."""
        try:
            data = self._changed_contents()
        except OSError as error:
            fault = f"{self.path}: cannot be read: {error.strerror or error}"
            if fault == self.status.fault:
                return False
            self._last_look, self._digest = None, b""  # once it can be read it counts as changed
            self._note_fault(fault, "check owner and permissions")
            raise ConfigError(fault, hint="check owner and permissions") from error
        if data is None:
            return False
        try:
            self._take(self._decoded(data), str(self.path))
        except Exception as error:
            self._note_fault(str(error), (error.hint or "") if isinstance(error, FlowctlError) else "")
            raise
        self._taken = True
        self.status = replace(self.status, fault="", hint="", applied=self.status.applied + 1)
        return True

    def changed(self) -> bool:
        """Return whether the file is another one than at the last look; it costs one ``stat``. Any thread."""
        try:
            return _look_of(self.path) != self._seen
        except OSError:
            return False  # what it said stays in force

    @property
    def digest(self) -> str:
        return self._digest.hex()

    @property
    def looks_empty(self) -> bool:
        """Whether the file turned up empty at the last look, and is taken as such by the next one."""
        return self._blank is not None

    def count_as_taken(self, text: str) -> None:
        """Count `text` as taken, which was read of the file by somebody else: only other contents are news."""
        self._digest, self._taken = hashlib.blake2b(text.encode()).digest(), True
        self.status = replace(self.status, there=True)

    def forget_contents(self) -> None:
        """Count the contents as new at the next reading: files that they name may have changed."""
        self._last_look, self._digest = None, b""

    def _changed_contents(self) -> bytes | None:
        """Return the contents, if they are others than at the last reading."""
        try:
            look = self._seen = _look_of(self.path)
        except FileNotFoundError:
            # One that vanished is not one that says nothing: what it said stays in force until it says something else.
            self._last_look, self._digest, self._blank, self._seen = None, b"", None, None
            self.status = replace(self.status, there=False, fault="", hint="")
            return None
        if not self.status.there:
            self.status = replace(self.status, there=True)
        if look == self._last_look:
            return None
        data = self._contents()
        fresh = self._wall() - look[0] / 1e9 < _FRESH_S
        self._last_look = None if fresh else look  # remembered only where a later change cannot look the same
        digest = hashlib.blake2b(data).digest()
        blank, self._blank = self._blank, None
        if digest == self._digest:
            return None
        # Before anything was taken there is nothing that an empty file could undo.
        cut = not data.strip() or (self._whole_lines and not data.endswith(b"\n"))
        if self._taken and cut and blank != look:
            self._last_look, self._blank = None, look
            return None
        self._digest = digest
        return data

    def _contents(self) -> bytes:
        # Not waiting for the other end, should it be a pipe: a thread that waits there cannot be ended.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError("it is no regular file")
        with os.fdopen(descriptor, "rb") as file:
            return without_mark(file.read(self._most_bytes + 1))

    def _decoded(self, data: bytes) -> str:
        if len(data) > self._most_bytes:
            raise ConfigError(f"{self.path}: it has more than {self._most_bytes} bytes")
        try:
            return data.decode("utf-8", self._errors)
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{self.path}, line {line}: not valid UTF-8") from error

    def _note_fault(self, fault: str, hint: str) -> None:
        self.status = replace(self.status, fault=fault, hint=hint, invalid=self.status.invalid + 1)


def _look_of(path: Path) -> _Look:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
