"""How an SQLite file of ours is opened, and what its errors mean.

It is made for its owner alone, says what it is of, and is checked; what is not ours, or damaged, is left as it is. Each
has a write-ahead log with ``synchronous=FULL``: what was committed survives the end of the process (``kill -9``) and a
power cut.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowctl.core.text.printable import short
from flowctl.errors import StoreError

_SPARE_BYTES: Final = 256 << 10
"""Room that is left on a disk: for removals, which are written as well before they give any back."""
_PAGES_BACK: Final = 32
"""Unused pages of the file that are given back at once where room is short: half of that room, if all are moved."""
_WRITE_LOG: Final = "PRAGMA wal_checkpoint(TRUNCATE)"
_CODES: Final = {
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_CORRUPT: "damaged",
    sqlite3.SQLITE_NOTADB: "damaged",
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_LOCKED: "busy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteForm:
    """What the file of one kind of store is."""

    title: str  #: of the store, for messages
    application: int  #: says whose file it is (``file`` shows it)
    version: int  #: of its tables; in the file as its ``user_version``
    schema: str  #: statements that make the tables of a new file
    made_with: tuple[str, ...] = ()  #: pragmas that a file has from its beginning: setting them again would write
    settings: tuple[str, ...] = ()  #: pragmas beside those that all have
    exclusive: bool = False  #: no other process may read it while it is open
    busy_s: float = 5.0  #: how long another process that has it is waited for
    hints: Mapping[str, str]  #: by code of a `StoreError`


def sqlite_code(error: sqlite3.Error) -> str:
    """Return the code of the `StoreError` that an error of SQLite is; ``"path"`` where it is none of the others."""
    return _CODES.get((getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF, "path")


def store_error(form: SqliteForm, path: Path, why: str, code: str) -> StoreError:
    return StoreError(f"{form.title} {path} {why}", code=code, hint=form.hints.get(code))


def open_sqlite(path: Path, form: SqliteForm) -> sqlite3.Connection:
    """Open a file, and make it where there is none; the thread that opens it need not be the one that uses it.

    Raises:
        StoreError: it cannot be opened, or is damaged, of another program or version; it is as it was.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # only this user may read what is in it
    except OSError as error:
        raise store_error(form, path, f"cannot be used: {error.strerror}", "path") from error
    # None: transactions are ours to begin.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=form.busy_s)
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        try:
            _set_up(path, form, connection)
        except sqlite3.Error as error:
            code = sqlite_code(error)
            why = "is open in another process" if code == "busy" else f"cannot be used: {error}"
            raise store_error(form, path, why, code) from error
        undo.pop_all()
    return connection


def room_for(connection: sqlite3.Connection, path: Path, wanted_bytes: int = 0) -> int:
    """Return how many octets may be written, as far as `wanted_bytes` is concerned: each takes room in log and file.

    `path` is where the file really is, for the log is beside it.

    A log that has filled the disk can never be written into the file: then nothing gives room back, no removal either.
    So where room gets short the log is written there, while that can be done and nobody reads it, and some of the
    file's unused pages are given back. Outside of transactions. Where the system does not tell, there is room: what is
    wrong SQLite will say.
    """
    try:
        room = _room(path)
        if room >= wanted_bytes:
            return room
        patience_ms = connection.execute("PRAGMA busy_timeout").fetchone()[0]
        connection.execute("PRAGMA busy_timeout = 0")
        with contextlib.suppress(sqlite3.Error):
            connection.execute(_WRITE_LOG).fetchall()
            # As a script: `execute` takes one step of a statement without columns, which is one page.
            connection.executescript(f"PRAGMA incremental_vacuum({_PAGES_BACK}); {_WRITE_LOG}")
        connection.execute(f"PRAGMA busy_timeout = {patience_ms}")
        return _room(path)
    except (OSError, sqlite3.Error):
        return wanted_bytes


def _room(path: Path) -> int:
    of_disk = os.statvfs(path)
    log_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        log_bytes = path.with_name(f"{path.name}-wal").stat().st_size
    return (of_disk.f_bavail * of_disk.f_frsize - log_bytes - _SPARE_BYTES) // 2


def _set_up(path: Path, form: SqliteForm, connection: sqlite3.Connection) -> None:
    """Check what is there before anything is changed; then make the tables of a new file."""

    def number(of: str) -> int:
        return int(connection.execute(of).fetchone()[0])

    tables = "SELECT count(*) FROM sqlite_schema"
    if form.exclusive:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    is_new = not number(tables)
    if not is_new:
        if number("PRAGMA application_id") != form.application:
            raise store_error(form, path, "is a database of another program", "foreign")
        if (version := number("PRAGMA user_version")) != form.version:
            raise store_error(form, path, f"has version {version}, this flowctl knows {form.version}", "version")
        fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if fault != "ok":
            raise store_error(form, path, f"is damaged: {short(fault)}", "damaged")
    for setting in (*(form.made_with if is_new else ()), *form.settings, "journal_mode = WAL", "synchronous = FULL"):
        connection.execute(f"PRAGMA {setting}")
    if not (is_new or form.exclusive):
        return  # nothing is written: another program may have a transaction open
    connection.execute("BEGIN EXCLUSIVE")
    if not number(tables):
        for statement in form.schema.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {form.application}")
        connection.execute(f"PRAGMA user_version = {form.version}")
    connection.execute("COMMIT")
