"""Bans and liftings in an SQLite file, which outlives the server, even one that is killed while it writes.

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

from flowctl.core.text.sqlitefile import SqliteForm, open_sqlite, room_for, sqlite_code
from flowctl.errors import ConfigError, StoreError
from flowctl.live.bans.words import Word, WordPlace, place_text

_log: Final = structlog.get_logger("flowctl.live")
_FORM: Final = SqliteForm(
    title="ban_store:",
    application=0x666C6F77,  # "flow" in ASCII
    version=2,
    schema="""
        CREATE TABLE words (place TEXT PRIMARY KEY, word TEXT NOT NULL) WITHOUT ROWID;
        CREATE TABLE clock (seen REAL NOT NULL);
        INSERT INTO clock VALUES (0)
    """,
    exclusive=True,
    busy_s=2.0,  # one that is being restarted ends within it
    hints={
        "path": "name a file in a folder of the server's; check owner, permissions and disk",
        "full": "check owner, permissions and disk",
        "foreign": "name a file of its own",
        "version": "use the flowctl that wrote it, or name another file",
        "busy": "give each server its own; servers of a fleet (--fleet) have the same bans",
    },
)


class BanStore:
    """The file. One thread at a time."""

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self.path: Final = path
        self._wall: Final = wall
        self._left: list[object] = []  # what `_look` saw after our last change; empty: it is not open
        self.reopen()

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
        """Return whether file and log are unchanged since the last write; some calls of ``stat``."""
        return bool(self._left) and self._look() == self._left

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    def reopen(self) -> None:
        """Take the file again that was closed; another process may have had it meanwhile."""
        self._database = self._opened()

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
        room_for(self._database, Path(os.path.realpath(self.path)))
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
            try:
                database = open_sqlite(self.path, _FORM)
            except StoreError as error:
                if error.code != "damaged":
                    raise
                self._put_aside(str(error))
                database = open_sqlite(self.path, _FORM)
        except StoreError as error:
            raise ConfigError(str(error), hint=error.hint) from error
        self._left = self._look()
        return database

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

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            number = {"damaged": errno.EUCLEAN, "full": errno.ENOSPC}.get(sqlite_code(error), errno.EIO)
            raise OSError(number, str(error), str(self.path)) from error
