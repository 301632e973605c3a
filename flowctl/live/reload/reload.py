"""Limits and bans from files, taken by a server that runs: looks at both files each second, and hands on what changed.

A thread of its own looks, because reading and parsing may take long (a hundred thousand bans take seconds) and a poll
group must not. While it parses it rests after each millisecond of work: the interpreter runs one thread at a time, and
one that comes back from a system call would wait up to 5 ms for it, a thousand times per round of a fan-out.

What is wrong with a file is told once per change, and stays visible in `Reload.status`. What was valid before stays in
force.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from flowctl.errors import ConfigError
from flowctl.flow import limitsfile
from flowctl.flow.limitsfile import LimitsFile, parse_limits_file
from flowctl.live.reload.watchfile import FileStatus, WatchedFile
from flowctl.server import bans as bans_format
from flowctl.server.bans import BanList

_log: Final = structlog.get_logger("flowctl.live")
_POLL_S: Final = 1.0
"""Between two looks: a change is in force about a second after the rename, for two `stat` per second."""
_REST_S: Final = 0.004
"""Rest after a millisecond of parsing: leaves four fifths of the interpreter to the server."""
_JOIN_S: Final = 5.0


def _rest() -> None:
    time.sleep(_REST_S)


class Reload:
    """Watches the files of a server.

    Args:
        apply_limits: takes a new limits file; raises ConfigError where it does not go with the server's settings.
        apply_bans: takes a new ban list.
        limits: limits file. None: there is none.
        bans: ban file; need not be there yet. None: there is none.
        poll_s: time between two looks, seconds, more than 0.
        on_error: told of exceptions that are our own fault, with where they were raised.
    """

    def __init__(
        self,
        apply_limits: Callable[[LimitsFile], None],
        apply_bans: Callable[[BanList], None],
        *,
        limits: Path | None = None,
        bans: Path | None = None,
        poll_s: float = _POLL_S,
        on_error: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self._apply_limits = apply_limits
        self._apply_bans = apply_bans
        self._files: Final[dict[str, WatchedFile]] = {}
        if limits is not None:
            self._files["limits"] = WatchedFile(limits, self._take_limits, limitsfile.MOST_BYTES)
        if bans is not None:
            self._files["bans"] = WatchedFile(bans, self._take_bans, bans_format.MOST_BYTES)
        self._poll_s: Final = poll_s
        self._on_error = on_error
        # Of all that wakes a thread only this may be used in a signal handler: its `put` takes no lock of Python's.
        self._wishes: Final[queue.SimpleQueue[bool]] = queue.SimpleQueue()  # True: look now; False: end
        self._thread: threading.Thread | None = None

    @property
    def watching(self) -> bool:
        """Whether there is any file to look at."""
        return bool(self._files)

    @property
    def status(self) -> dict[str, FileStatus]:
        """How it stands with each file: ``limits``, ``bans``. Any thread."""
        return {name: file.status for name, file in self._files.items()}

    def read_first(self) -> None:
        """Read all files before the server starts. The starting thread.

        Raises:
            ConfigError: a file is not valid, or there is no limits file. A ban file may come later.
        """
        for name, file in self._files.items():
            if not file.read() and name == "limits":
                raise ConfigError(f"{file.path}: there is no such file", hint="make one, or leave --limits out")
            if not file.status.there:
                _log.warning("there is no such file yet, it is watched for", file=str(file.path), what=name)

    def start(self) -> None:
        """Begin to watch, on a thread of its own; does nothing where there is no file to watch."""
        if self._files and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flowctl-reload", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Watch no longer; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wishes.put(False)
            thread.join(_JOIN_S)

    def look_now(self) -> None:
        """Look at the files at once instead of within a second. Any thread, and signal handlers."""
        self._wishes.put(True)

    def _run(self) -> None:
        while self._wait():
            self._look()

    def _wait(self) -> bool:
        """Wait for the next look; return False when it is time to end."""
        try:
            return self._wishes.get(timeout=self._poll_s)
        except queue.Empty:
            return True

    def _look(self) -> None:
        for name, file in self._files.items():
            there = file.status.there
            try:
                file.read()
            except ConfigError as error:
                what = f"{name} file is not valid, what was before stays in force"
                _log.error(what, fault=str(error), **({"hint": error.hint} if error.hint else {}))
            except Exception as error:  # noqa: BLE001 - a bug in applying one file must not end the watching of all
                if self._on_error is not None:
                    self._on_error(f"reading the {name} file again", error)
            if there and not file.status.there:
                _log.warning(f"{name} file has gone, what it said stays in force", file=str(file.path))

    def _take_limits(self, text: str, where: str) -> None:
        file = parse_limits_file(text, where)
        try:
            self._apply_limits(file)
        except ConfigError as error:  # by itself it is valid, but not together with the server's other settings
            raise ConfigError(f"{where}: {error}", hint=error.hint) from error

    def _take_bans(self, text: str, where: str) -> None:
        rest = None if self._thread is None else _rest  # before the start there is nobody to make room for
        self._apply_bans(BanList.parse(text, where, rest=rest))
