"""Lists the files of records below a folder, by hour: one listing, which everything later goes by.

A file belongs to the hour that its folders name, ``date=YYYY-MM-DD/hour=HH`` right below those of the table. One that
lies elsewhere below the table is counted under `ODD_HOUR`, and put aside when it is read. Names that begin with ``.``
or ``_`` are not data, in folders and files.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from flowctl.analyze.records.place import Storage
from flowctl.analyze.records.window import ODD_HOUR, Hour, Window, begin_of
from flowctl.errors import ConfigError
from flowctl.records.telemetry.schema import TABLES

_IN_PLACE: Final = re.compile(r"date=(\d{4}-\d\d-\d\d)/hour=([01]\d|2[0-3])/[^/]+")
_HINT: Final = "give the folder that a server wrote with --events; it has folders flow_closes and flow_events"


class RecordsError(ConfigError):
    """There are no records where they were said to be, or they cannot be used as they are."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of records."""

    table: str  # in whose folder it lies
    hour: Hour  # that it belongs to
    path: str  # its address, as Spark takes it; on this machine its path
    size_bytes: int
    mtime_ns: int  # when it was changed, since the epoch; 0 where the store does not tell
    strange: str = ""  # why it is not opened; empty: it is

    @property
    def mark(self) -> str:
        """Value that changes with the file, and differs from those of other files of its hour."""
        return f"{self.table} {self.path.rpartition('/')[2]} {self.size_bytes} {self.mtime_ns}"


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder of records, by hour, table and path."""

    root: str
    storage: Storage
    files: tuple[File, ...]
    deep: frozenset[tuple[str, Hour]] = frozenset()  # tables and hours in whose folders are folders
    outside: frozenset[tuple[str, Hour]] = frozenset()  # tables and hours of files that are not in the window

    def hours(self) -> list[Hour]:
        return sorted({file.hour for file in self.files})

    def of(self, hours: Iterable[Hour]) -> list[File]:
        wanted = set(hours)
        return [file for file in self.files if file.hour in wanted]


def list_records(root: str, window: Window | None = None, settings: Mapping[str, str] | None = None) -> Listing:
    storage = Storage.of(root, settings)
    found, deep, outside = [], set(), set()
    for table in _tables(storage, root):
        for path, info in storage.walk(table):
            if (place := _IN_PLACE.match(path)) and place.end() < len(path):
                deep.add((table, (place[1], place[2])))
            if path.endswith(".parquet") and not any(name.startswith((".", "_")) for name in path.split("/")):
                hour = _hour(path)
                if window is None or window.meets(hour):
                    size, changed = info.size or 0, info.mtime_ns or 0
                    found.append(File(table, hour, storage.address(info.path), size, changed, storage.strange(info)))
                else:
                    outside.add((table, hour))
    files = sorted(found, key=lambda file: (file.hour, file.table, file.path))
    return Listing(root, storage, tuple(files), frozenset(deep), frozenset(outside))


def _hour(path: str) -> Hour:
    """Return the hour that folders name; `ODD_HOUR` where they do not, or there never was such a day."""
    if place := _IN_PLACE.fullmatch(path):
        with contextlib.suppress(ValueError):
            begin_of((place[1], place[2]))
            return place[1], place[2]
    return ODD_HOUR


def _tables(storage: Storage, root: str) -> list[str]:
    """Return the tables that have a folder, in the order of the contract."""
    if there := [name for name in TABLES if storage.is_folder(name)]:
        return there
    if not storage.is_folder(""):
        what = "is no folder" if storage.exists("") else "does not exist"
        raise RecordsError(f"{root} {what}, so there are no records", hint=_HINT)
    if root.rstrip("/").rpartition("/")[2] in TABLES:
        raise RecordsError(f"{root} is the folder of one table", hint="give the folder it is in")
    new = "a server that was just started writes its first file after some ten seconds"
    raise RecordsError(f"{root} has no records: none of {', '.join(TABLES)}", hint=f"{_HINT}; {new}")
