"""What was said of networks, in an SQLite file: it outlives the server, also one that is killed while it writes.

One transaction for each change, in a write-ahead log that is synced: after a crash the file has all of a change or
nothing of it. One process has the file at a time (an exclusive lock, which the kernel takes back from a process that
dies); the supervisor of several workers has it for all of them.

A file that is damaged is put aside under another name, told of with a hint, and begun anew: a server that does not
start because of its ban list would be worse, and what can still be read from the damaged file is not lost. A file of a
later version is left alone, and the server does not start.

SQLite does not see that its file is removed, replaced or written over while it is open: what it writes then is gone
with the process. Nobody else may write here, so what the system says of the file and its log is as we have left it,
or somebody has been there (`whole`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import structlog

from flowctl.errors import ConfigError
from flowctl.live.bans.words import Word, WordPlace, place_text

_log: Final = structlog.get_logger("flowctl.live")
VERSION: Final = 2
"""Of the tables below; in the file as its ``user_version``."""
_APPLICATION: Final = 0x666C6F77
"""Says whose file it is (``file`` shows it); "flow" in ASCII."""
_SCHEMA: Final = (
    "CREATE TABLE words (place TEXT PRIMARY KEY, word TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE clock (seen REAL NOT NULL)",
    "INSERT INTO clock VALUES (0)",
    f"PRAGMA user_version = {VERSION}",
    f"PRAGMA application_id = {_APPLICATION}",
)
_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_BUSY_S: Final = 2.0
"""How long another process that has the file is waited for: one that is being restarted ends within it."""


class BanStore:
    """The file. One thread at a time."""

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self.path: Final = path
        self._wall: Final = wall
        self._left: list[object] = []  # what `_look` saw after our last change; empty: it is not open
        self._database = self._opened()

    def read(self) -> tuple[list[Word], float]:
        """Return all words, those that are over too, and when they were written last, in seconds since the epoch."""
        found, wrong = [], 0
        with self._mapped():
            rows = self._database.execute("SELECT word FROM words").fetchall()
            seen = self._database.execute("SELECT seen FROM clock").fetchone()
        for (line,) in rows:
            try:
                found.append(Word.read(line))
            except ConfigError:  # written by hand, or by another program
                wrong += 1
        if wrong:
            hint = "look at its table words with sqlite3 while the server is not running"
            _log.warning(
                "ban store: some rows are no bans, they do not count", file=str(self.path), rows=wrong, hint=hint
            )
        return found, float(seen[0]) if seen else 0.0

    def write(self, changed: Mapping[WordPlace, Word | None], seen: float, *, anew: bool = False) -> None:
        """Enter words, and take those out whose place has none now, all of it or nothing; `anew`: and all others."""
        with self._mapped(), self._changing():
            if anew:
                self._database.execute("DELETE FROM words")
            gone = [(place_text(place),) for place, word in changed.items() if word is None]
            put = [(place_text(place), word.line()) for place, word in changed.items() if word is not None]
            self._database.executemany("DELETE FROM words WHERE place = ?", gone)
            self._database.executemany("INSERT OR REPLACE INTO words VALUES (?, ?)", put)
            self._database.execute("UPDATE clock SET seen = ?", (seen,))

    def whole(self) -> bool:
        """Return whether file and log are where and what they were after the last change; some calls of ``stat``."""
        return bool(self._left) and self._look() == self._left

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    def mend(self) -> None:
        """Put the file, which is damaged or another, aside, and begin a new one."""
        fault = "it was damaged" if self.whole() else "it was removed, replaced or written over"
        self._left = []
        self._put_aside(f"{fault} while the server ran")
        self.close()  # after that: SQLite puts its log into the file that has the name
        self._database = self._opened()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        if not self.whole():
            raise OSError(errno.EUCLEAN, "it was removed, replaced or written over", str(self.path))
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                yield
        finally:
            self._left = self._look()

    def _look(self) -> list[object]:
        """Return what the system says of the file and its log, which SQLite has where links lead."""
        real = os.path.realpath(self.path)
        found: list[object] = [real]
        for ending in ("", "-wal"):
            with contextlib.suppress(OSError):
                now = Path(f"{real}{ending}").stat()
                found.append((now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns))
        return found

    def _opened(self) -> sqlite3.Connection:
        try:
            return self._open()
        except sqlite3.DatabaseError as error:
            if _code(error) not in _DAMAGED:
                raise self._unusable(error) from error
            self._put_aside(str(error))
        try:
            return self._open()
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _open(self) -> sqlite3.Connection:
        try:  # addresses of people: for the user of the server alone
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise ConfigError(
                f"ban_store: {self.path} cannot be used: {error.strerror}",
                hint="name a file in a folder of the server's",
            ) from error
        # Made by the starting thread and used by another one after that.
        database = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._set_up(database)
        except BaseException:
            database.close()
            raise
        self._left = self._look()
        return database

    def _set_up(self, database: sqlite3.Connection) -> None:
        """Lock the file, and make or check its tables; raises as `_open`."""
        for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            database.execute(f"PRAGMA {setting}")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and database.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise ConfigError(f"ban_store: {self.path} is a database of another program", hint="name a file of its own")
        if tables and version != VERSION:
            raise ConfigError(
                f"ban_store: {self.path} has version {version}, this flowctl knows {VERSION}",
                hint="use the flowctl that wrote it, or name another file",
            )
        with database:
            database.execute("BEGIN EXCLUSIVE")
            if not tables:
                for statement in _SCHEMA:
                    database.execute(statement)
        found = database.execute("PRAGMA quick_check(1)").fetchone()
        if found != ("ok",):
            fault = sqlite3.DatabaseError(str(found[0]))
            fault.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise fault

    def _put_aside(self, fault: str) -> None:
        """Rename the damaged file, with its log."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._wall()))
        aside = Path(f"{self.path}.damaged-{stamp}")
        number = 1
        while aside.exists():
            number += 1
            aside = Path(f"{self.path}.damaged-{stamp}-{number}")
        for ending in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{ending}").rename(f"{aside}{ending}")
        _log.error(
            "ban store is damaged, it is begun anew, and what is left of it put aside",
            file=str(self.path),
            fault=fault,
            aside=str(aside),
            hint=f"sqlite3 {aside} .recover shows what can still be read; ban again whom it names",
        )

    def _unusable(self, error: sqlite3.Error) -> ConfigError:
        if _code(error) == sqlite3.SQLITE_BUSY:
            return ConfigError(
                f"ban_store: another process has {self.path}",
                hint="give each server its own; servers of a fleet (--fleet) have the same bans",
            )
        return ConfigError(f"ban_store: {self.path} cannot be used: {error}", hint="check owner, permissions and disk")

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if _code(error) in _DAMAGED:
                number = errno.EUCLEAN
            else:
                number = errno.ENOSPC if _code(error) == sqlite3.SQLITE_FULL else errno.EIO
            raise OSError(number, str(error), str(self.path)) from error


def _code(error: sqlite3.Error) -> int:
    """Return the primary result code (the lower 8 bits of the extended one); 0: the error has none."""
    return (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
