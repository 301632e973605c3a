"""What an agent keeps for its next life: the table, what of its server is the fleet's, and how far it had come.

One SQLite file, written in transactions: after a crash it says what was true at one moment. It is not forced onto the
disk at each change, because nothing depends on it: what a failure of power takes comes back from the other members.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any, Final

from flowctl.control.fleet.mirror import Held
from flowctl.control.fleet.stamp import Stamp
from flowctl.control.fleet.table import Entry, Table
from flowctl.control.fleet.wire import entry_of
from flowctl.errors import BusyError, ConfigError, FlowctlError, RemoteProtocolError

VERSION: Final = 1
"""Counted up when a table changes; a file of another version is refused, rather than guessed at."""
_TABLES: Final = ("entries", "known", "notes")


class Store:
    """The file of one agent. One thread."""

    def __init__(self, folder: Path) -> None:
        path = folder / "table.sqlite"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock: Final = (folder / "lock").open("wb")
        except OSError as error:
            raise ConfigError(f"folder {folder}: {error.strerror}", hint="name a folder of your own") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise BusyError(f"another agent runs in {folder}", hint="each member has a folder of its own") from error
        self._path: Final = path
        try:
            self._file: Final = sqlite3.connect(path, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.execute("PRAGMA journal_size_limit = 4194304")
            for table in _TABLES:
                self._file.execute(f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        except sqlite3.Error as error:
            self._lock.close()
            raise self._damaged(error) from error
        found = self.notes().get("file_version", VERSION)
        if found != VERSION:
            self.close()
            raise FlowctlError(f"{path} is of version {found}, this is {VERSION}", hint="move it away, or upgrade")

    def entries(self) -> list[tuple[str, Entry]]:
        """Return the entries of the table."""
        try:
            return [entry_of([key, *found]) for key, found in self._all("entries")]
        except (TypeError, ConfigError, RemoteProtocolError) as error:
            raise self._damaged(error) from error

    def known(self) -> dict[str, Held]:
        """Return what of the server is the fleet's."""
        try:
            return {key: Held(inf if ends is None else ends, *rest) for key, (ends, *rest) in self._all("known")}
        except (TypeError, ValueError) as error:
            raise self._damaged(error) from error

    def notes(self) -> dict[str, Any]:
        """Return the rest, by name."""
        return dict(self._all("notes"))

    def _all(self, table: str) -> list[tuple[str, Any]]:
        try:
            rows = self._file.execute(f"SELECT key, value FROM {table}")  # noqa: S608 - a name of ours
            return [(key, json.loads(text)) for key, text in rows]
        except (sqlite3.Error, ValueError) as error:
            raise self._damaged(error) from error

    def save(
        self,
        table: Table,
        keys: Iterable[str],
        known: Mapping[str, Held],
        touched: Iterable[str],
        notes: Mapping[str, Any],
    ) -> None:
        """Keep what has changed, all or nothing."""
        try:
            self._file.execute("BEGIN IMMEDIATE")
            try:
                for key in keys:
                    entry = table.get(key)
                    self._put("entries", key, None if entry is None else written(entry))
                for key in touched:
                    held = known.get(key)
                    self._put("known", key, None if held is None else [_finite(held.ends_s), *held[1:]])
                for name, value in {**notes, "file_version": VERSION}.items():
                    self._put("notes", name, value)
                self._file.execute("COMMIT")
            except BaseException:
                self._file.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise FlowctlError(f"cannot write {self._path}: {error}", hint="has the disk room?") from error

    def _put(self, table: str, key: str, value: Any) -> None:
        if value is None:
            self._file.execute(f"DELETE FROM {table} WHERE key = ?", (key,))  # noqa: S608 - a name of ours
        else:
            row = key, json.dumps(value)
            self._file.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", row)  # noqa: S608 - likewise

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
        self._lock.close()

    def _damaged(self, error: Exception) -> FlowctlError:
        return FlowctlError(
            f"{self._path} is damaged: {error}", hint="move it away: the agent gets the table from the other members"
        )


def written(entry: Entry) -> list[Any]:
    """Return an entry as JSON has it, as in messages but for the key."""
    return [*entry.stamp, _finite(entry.kept_until_s), entry.value]


def _finite(seconds: float) -> float | None:
    return None if seconds == inf else seconds


def stamp_of(found: Any) -> Stamp | None:
    """Return the stamp that a note holds. None: it holds none."""
    return Stamp(*found) if isinstance(found, list) and len(found) == 3 else None
