"""Lists the files of records below a folder, by hour: one listing, which everything later goes by.

A file belongs to the hour that its folders name, ``date=YYYY-MM-DD/hour=HH`` right below those of the table. A file
that lies elsewhere below the table is taken as well: it belongs to the hour of its earliest record, which its footer
tells; where it does not, to `ODD_HOUR`. Names that begin with ``.`` or ``_`` are not data, in folders and files.

A file costs the driver some 800 octets here: 15 MB for 20,000 of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from flowctl.errors import ConfigError
from flowctl.pipeline.records.place import Storage
from flowctl.pipeline.records.window import ODD_HOUR, Hour, Window, hour_of
from flowctl.telemetry.schema import TABLES

THREADS: Final = 8
"""Footers that are read at a time: a store answers each in some ten milliseconds."""
_IN_PLACE: Final = re.compile(r"date=(\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01]))/hour=([01]\d|2[0-3])/[^/]+")
_RECORDS_HINT: Final = "give the folder that a server wrote with --events; it has folders flow_closes and flow_events"


@dataclass(frozen=True, slots=True)
class File:
    """A file of records.

    Args:
        table: in whose folder it lies.
        hour: that it belongs to.
        path: its address, as Spark takes it; on this machine its path.
        size_bytes: of it.
        mtime_ns: when it was changed, since the epoch; 0 where the store does not tell.
        in_place: whether it lies in the folder of that hour.
    """

    table: str
    hour: Hour
    path: str
    size_bytes: int
    mtime_ns: int
    in_place: bool = True


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder of records.

    Args:
        root: the folder.
        storage: on which it lies.
        files: by hour, table and path.
        warnings: lines for the person who started the job.
    """

    root: str
    storage: Storage
    files: tuple[File, ...]
    warnings: tuple[str, ...] = field(default=())

    def hours(self) -> list[Hour]:
        """Return the hours that have files, in order."""
        return sorted({file.hour for file in self.files})

    def of(self, hours: Iterable[Hour]) -> list[File]:
        """Return the files of these hours."""
        wanted = set(hours)
        return [file for file in self.files if file.hour in wanted]


def list_records(root: str, window: Window | None = None, settings: Mapping[str, str] | None = None) -> Listing:
    """List the files of all tables.

    Args:
        root: folder that ``--events`` named, a path or an address.
        window: only hours some of which lies in it. None: all.
        settings: of Spark, which say where an S3 store is. None: as the environment says.

    Raises:
        ConfigError: `root` is not there, cannot be read, or has no table.
    """
    storage = Storage.of(root, settings)
    tables = _tables(storage, root)
    found: list[File] = []
    elsewhere: list[tuple[str, Any]] = []
    for table in tables:
        for path, info in storage.walk(table):
            names = path.split("/")
            if not path.endswith(".parquet") or any(name.startswith((".", "_")) for name in names):
                continue
            place = _IN_PLACE.fullmatch(path)
            if place is None:
                elsewhere.append((table, info))
                continue
            found.append(_file(storage, table, (place[1], place[2]), info))
    with ThreadPoolExecutor(THREADS) as pool:
        hours = list(pool.map(lambda item: _first_hour(storage, item[1].path), elsewhere))
    found += [
        _file(storage, table, hour, info, in_place=False) for (table, info), hour in zip(elsewhere, hours, strict=True)
    ]
    if window is not None:
        found = [file for file in found if window.meets(file.hour)]
    found.sort(key=lambda file: (file.hour, file.table, file.path))
    return Listing(root, storage, tuple(found), tuple(_warnings(hours)))


def _file(storage: Storage, table: str, hour: Hour, info: Any, *, in_place: bool = True) -> File:
    return File(table, hour, storage.address(info.path), info.size or 0, info.mtime_ns or 0, in_place)


def _tables(storage: Storage, root: str) -> tuple[str, ...]:
    """Return the tables that have a folder, in the order of the contract.

    Raises:
        ConfigError: there is none.
    """
    there = tuple(name for name in TABLES if storage.is_folder(name))
    if there:
        return there
    if not storage.is_folder(""):
        raise ConfigError(f"{root} does not exist, so there are no records", hint=_RECORDS_HINT)
    if root.rstrip("/").rpartition("/")[2] in TABLES:
        raise ConfigError(f"{root} is the folder of one table", hint="give the folder it is in")
    new = "a server that was just started writes its first file after some ten seconds"
    raise ConfigError(f"{root} has no records: none of {', '.join(TABLES)}", hint=f"{_RECORDS_HINT}; {new}")


def _first_hour(storage: Storage, path: str) -> Hour:
    """Return the hour of the earliest record of a file that lies in no folder of an hour."""
    try:
        with storage.system.open_input_file(path) as source:
            footer = pq.read_metadata(source)
        index = footer.schema.names.index("ts")
        groups = (footer.row_group(number) for number in range(footer.num_row_groups))
        return hour_of(min(group.column(index).statistics.min for group in groups if group.num_rows))
    except (OSError, ValueError, OverflowError, AttributeError, TypeError, pa.ArrowException):
        return ODD_HOUR  # whatever it is, it is looked at again, and put aside, when it is read


def _warnings(hours: list[Hour]) -> list[str]:
    lines = []
    if hours:
        lines.append(
            f"{len(hours)} files lie outside of date=/hour= folders: each is read with the hour of its first record"
        )
    if lost := hours.count(ODD_HOUR):
        lines.append(f"{lost} of them do not tell their hour, and are counted under {' '.join(ODD_HOUR)}")
    return lines
