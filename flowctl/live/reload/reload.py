"""Settings, limits, bans and keys from files, taken by a server that runs: looks each second, hands on what changed.

A thread of its own looks, because reading and parsing may take long (a hundred thousand bans take seconds) and a poll
group must not. While it parses it rests after each millisecond of work: the interpreter runs one thread at a time, and
one that comes back from a system call would wait up to 5 ms for it, a thousand times per round of a fan-out.

What is wrong with a file is told once per change, and stays visible in `Reload.status`. What was valid before stays in
force.

What operators change while the server runs is done on the same thread (`Reload.run_job`), one thing after the other: so
neither a file nor a command comes between another's reading and writing.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from flowctl.core.flow.limitsfile import LimitsFile, parse_limits_file
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.server import bans as bans_format
from flowctl.core.server.bans import BanList
from flowctl.core.text.tomltext import MOST_BYTES
from flowctl.core.text.watchfile import FileStatus, WatchedFile
from flowctl.errors import BusyError, ClosedError, ConfigError

_log: Final = structlog.get_logger("flowctl.live")
_POLL_S: Final = 1.0
"""Time between two looks at the files: a change is in force a second after the rename, for two `stat` per second."""
_REST_S: Final = 0.004
"""Rest after a millisecond of parsing: it leaves four fifths of the interpreter to the server."""
_JOIN_S: Final = 5.0
DO_S: Final = 60.0
"""Time that a caller waits for its job: the longest ban list is read and written in half of it."""

_T = TypeVar("_T")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class _ReloadRequest(enum.Enum):
    LOOK = enum.auto()
    READ_ALL = enum.auto()  #: look though the file of settings is as it was: those that it names may have changed
    END = enum.auto()


def rest() -> None:
    time.sleep(_REST_S)


class Reload:
    """Watches the files of a server."""

    def __init__(
        self,
        apply_limits: Callable[[LimitsFile], None],
        apply_bans: Callable[[BanList], None],
        *,
        config: tuple[Path, str, Callable[[str, str], None]] | None = None,
        limits: Path | None = None,
        bans: Path | None = None,
        proofs: Callable[[], dict[str, WatchedFile]] = dict,
        also: Callable[[], object] | None = None,
        poll_s: float = _POLL_S,
        on_error: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self._apply_limits = apply_limits
        self._apply_bans = apply_bans
        self._files: Final[dict[str, WatchedFile]] = {}
        if config is not None:
            path, text, take = config
            self._files["config"] = WatchedFile(path, take, MOST_BYTES)
            self._files["config"].count_as_taken(text)
        if limits is not None:
            self._files["limits"] = WatchedFile(limits, self._apply_limits_text, MOST_BYTES)
        if bans is not None:
            self._files["bans"] = WatchedFile(bans, self._apply_bans_text, bans_format.MOST_BYTES)
        self._proofs: Final = proofs  # files that take what they say themselves
        self.on_proofs: Callable[[str, Path], object] | None = (
            None  # told which of them has changed; set before the start
        )
        self._also: Final = also
        self._poll_s: Final = poll_s
        self._on_error = on_error
        # The only way to wake a thread that is safe in a signal handler: its `put` takes no lock of Python's.
        self._requests: Final[queue.SimpleQueue[_ReloadRequest | _Job]] = queue.SimpleQueue()
        self._looked_at = time.monotonic()  # the thread's only, once it runs
        self._lock: Final = OwnedLock()
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._stopped = False  # guarded by _lock

    def _every_file(self) -> dict[str, WatchedFile]:
        return self._files | self._proofs()

    @property
    def watching(self) -> bool:
        return bool(self._every_file())

    @property
    def status(self) -> dict[str, FileStatus]:
        """How it stands with ``config``, ``limits``, ``bans``, ``keys`` and so on, those that are files. Any thread."""
        return {name: file.status for name, file in self._every_file().items()}

    def digest(self, name: str) -> str:
        """Return what tells the contents of a file from others that it had; empty: there is none. Any thread."""
        file = self._every_file().get(name)
        return "" if file is None else file.digest

    def read_first(self) -> None:
        """Read all files before the server starts. The starting thread."""
        for name, file in self._every_file().items():
            if not file.read() and name == "limits":
                raise ConfigError(f"{file.path}: there is no such file", hint="make one, or leave --limits out")
            if not file.status.there:
                _log.warning("there is no such file yet, it is watched for", file=str(file.path), what=name)

    def start(self) -> None:
        with self._lock:
            if self._stopped:
                raise ClosedError("the server is ending, nothing of it is changed any more")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flowctl-reload", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop watching the files, and run no more jobs; idempotent."""
        with self._lock:
            thread, self._thread, self._stopped = self._thread, None, True
        if thread is not None and thread is not threading.current_thread():
            self._requests.put(_ReloadRequest.END)
            thread.join(_JOIN_S)

    def look_now(self) -> None:
        """Look at the files at once instead of within a second, those that settings name too.

        Any thread, and signal handlers.
        """
        self._requests.put(_ReloadRequest.READ_ALL)

    def run_job(self, job: Callable[[], _T], timeout_s: float = DO_S) -> _T:
        """Run `job` on the thread of the files, after earlier jobs, and return its result.

        Any thread but those of the poll groups, which others would wait for.
        """
        if self._in_thread():
            return job()
        outcome: Future[_T] = Future()
        self.start()
        self._requests.put((job, outcome))
        with self._lock:
            if self._stopped and self._thread is None:  # stopped meanwhile: perhaps the thread will never get to it
                outcome.cancel()
        try:
            return outcome.result(timeout_s)
        except TimeoutError as error:
            if outcome.done():
                raise
            raise BusyError(f"the server has not come to it within {timeout_s:g} s", hint="look again later") from error
        except CancelledError as error:
            raise ClosedError("the server is ending, nothing of it is changed any more") from error

    def run_later(self, job: Callable[[], object]) -> None:
        """Run `job` on the thread of the files, soon; not at all once the server is ending. Any thread; never waits.

        What it raises is reported.
        """

        def run() -> None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - no caller waits for it
                if self._on_error is not None:
                    self._on_error("a job on the thread of the files", error)

        with contextlib.suppress(ClosedError):
            self.start()
            self._requests.put((run, Future()))

    def read_proofs(self, then: Callable[[], None]) -> None:
        """Read the files of keys that have changed at once, and call `then`. Any thread; never waits."""

        def look() -> None:
            self._look_at(self._proofs())
            then()

        self.run_later(look)

    def _in_thread(self) -> bool:
        with self._lock:
            return threading.current_thread() is self._thread

    def read_now(self) -> dict[str, bool]:
        """Look at all files, and return which of them had something new that was taken. For jobs of `run_job`."""
        before = {name: status.applied for name, status in self.status.items()}
        self._reread_all()
        if any(file.looks_empty for file in self._every_file().values()):
            self._look_at_files()  # it is meant to be empty, since somebody says that it is to be read
        return {name: status.applied > before.get(name, 0) for name, status in self.status.items()}

    def _run(self) -> None:
        for request in iter(self._next_request, _ReloadRequest.END):
            if isinstance(request, tuple):
                _run_job(*request)
            elif request is _ReloadRequest.READ_ALL:
                self._reread_all()
            else:
                self._look_at_files()
        while True:  # what was asked for too late
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            if isinstance(request, tuple):
                request[1].cancel()

    def _reread_all(self) -> None:
        if (config := self._files.get("config")) is not None:
            config.forget_contents()
        self._look_at_files()

    def _next_request(self) -> _ReloadRequest | _Job:
        """Wait for the next thing to be done: a look when it is due, however many jobs come meanwhile."""
        looks = self._files or self._also
        left_s = self._looked_at + self._poll_s - time.monotonic() if looks else None
        if left_s is not None and left_s <= 0:
            return _ReloadRequest.LOOK
        try:
            return self._requests.get(timeout=left_s)
        except queue.Empty:
            return _ReloadRequest.LOOK

    def _look_at_files(self) -> None:
        self._look_at(self._files)
        self._look_at(self._proofs())  # those of the settings that were just read
        if self._also is not None:
            try:
                self._also()
            except Exception as error:  # noqa: BLE001 - the watching of the files goes on
                if self._on_error is not None:
                    self._on_error("a look beside the files", error)
        self._looked_at = time.monotonic()

    def _look_at(self, files: dict[str, WatchedFile]) -> None:
        for name, file in files.items():
            there = file.status.there
            try:
                if file.read() and name not in self._files and self.on_proofs is not None:
                    self.on_proofs(name, file.path)
            except ConfigError as error:
                what = f"{name} file is not valid, what was before stays in force"
                _log.error(what, fault=str(error), **({"hint": error.hint} if error.hint else {}))
            except Exception as error:  # noqa: BLE001 - a bug in applying one file must not end the watching of all
                if self._on_error is not None:
                    self._on_error(f"reading the {name} file again", error)
            if there and not file.status.there:
                _log.warning(f"{name} file has gone, what it said stays in force", file=str(file.path))

    def _apply_limits_text(self, text: str, where: str) -> None:
        file = parse_limits_file(text, where)
        try:
            self._apply_limits(file)
        except ConfigError as error:  # by itself it is valid, but not together with the server's other settings
            raise ConfigError(f"{where}: {error}", hint=error.hint) from error

    def _apply_bans_text(self, text: str, where: str) -> None:
        # Before the start there is nobody to make room for.
        self._apply_bans(BanList.parse(text, where, rest=rest if self._in_thread() else None))


def _run_job(job: Callable[[], _T], outcome: Future[_T]) -> None:
    """Run a job, unless its caller has given it up, and keep what it returns or raises."""
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(job())
    except BaseException as error:  # noqa: BLE001 - it is the caller's
        outcome.set_exception(error)
