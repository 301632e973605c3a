"""Record files: batches of rows become Parquet files that are either whole or not there.

Theory of operation. Rows are kept in memory until a file of them is due: after `rotate_s`, or when they take
`file_bytes`; rows of two hours are two files. A file is written to a hidden name beside its place, brought to the disk
(fsync), and renamed: a crash loses what was in memory. A file that cannot be written leaves its rows in memory for the
next attempt, up to a bound; beyond that the oldest are lost and counted. What a node's files may take on the disk is
bounded: the oldest go, by the number in their names, for clocks are set. Files of other nodes are not touched.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import re
import time
import uuid
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from flowctl.core.folders.folders import LINK_HINT, opened_folder, replacing_below, resolve_folder, sync_folder
from flowctl.errors import ConfigError
from flowctl.records.telemetry.options import EventsOptions
from flowctl.records.telemetry.schema import ARROW_TYPES, FORMAT, METADATA_PREFIX, Kind, Table

if TYPE_CHECKING:
    import pyarrow as pa

_log: Final = structlog.get_logger("flowctl.telemetry")

SUFFIX: Final = ".parquet"
_TEMPORARY: Final = ".part"
_ORPHAN_AGE_S: Final = 300.0
"""Age at which a hidden file has no writer any more: writing one takes a fraction of a second."""
_LOG_EVERY_S: Final = 60.0
"""Least time between two log lines about failures."""
_RETRY_AFTER_S: Final = 2.0
"""Time after a failure before the disk is tried again."""
_ROW_GROUP: Final = 131_072
"""Rows per row group: a file has one, up to the bound of the queue; readers split large files by groups."""
_STATISTICS: Final = frozenset({"ts", "node", "seq", "conn_id", "event", "kind", "state"})
"""Columns by which readers skip row groups; for other columns a smallest and largest value is of no use."""
_HOUR_US: Final = 3_600_000_000
_ROWS_PER_BATCH: Final = 256
"""This many rows are turned into columns together: a hundred columns cost 1.3 ms each time, and 6 us per row."""
_CELL_BYTES: Final = 8
"""Estimated size of a value in a column, for rows that are not columns yet."""
_EXTRA_REMOVED_SHARE: Final = 0.05
"""Share of the disk space that is freed beyond need when it is used up, so that not every new file removes one."""


class Block(Protocol):
    """Many records at once, as columns."""

    @property
    def rows(self) -> int:
        """Number of records."""

    def arrays(self) -> list[Any]:
        """Return a pyarrow array per column, `node` and `seq` left out. The recorder's thread."""

    def absorb(self, other: object) -> bool:
        """Take what a later block has as well; return whether it was taken. The recorder's thread."""


@dataclass(slots=True, eq=False)
class _WaitingPart:
    """Rows that wait for their file: columns, or a block that is made into columns when the file is."""

    rows: int
    seq: int
    size_bytes: int  # of them as columns; estimated while they are none
    block: Block | None
    batch: pa.RecordBatch | None = None

    def by_hour(self) -> list[tuple[int, _WaitingPart]]:
        """Return the rows by hour since the epoch, each's own or its flight's, in the order in which they came.

        They were made columns before.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.batch is None:
            return []
        began_us = self.batch["ts"].cast(pa.int64())
        if "offset_us" in self.batch.schema.names:  # of a flight, which is one whole
            began_us = pc.subtract(began_us, self.batch["offset_us"])
        hours = pc.divide(began_us, _HOUR_US)
        found: list[int] = pc.unique(hours).to_pylist()
        if len(found) == 1:
            return [(found[0], self)]
        pieces = []
        for hour in found:
            batch = self.batch.filter(pc.equal(hours, hour))
            piece = _WaitingPart(batch.num_rows, 0, 0, None)
            piece.batch, piece.size_bytes = batch, self.size_bytes * batch.num_rows // self.rows
            pieces.append((hour, piece))
        pieces[0][1].size_bytes += self.size_bytes - sum(piece.size_bytes for _, piece in pieces)
        return pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Books:
    """Counts of the rows of one table, by what became of them."""

    files: int = 0
    written_rows: int = 0
    written_bytes: int = 0
    waiting_rows: int = 0
    lost_rows: int = 0  # given up because the disk did not take them for too long
    refused_rows: int = 0  # that do not fit the schema, which is a fault of ours
    failures: int = 0  # attempts to write a file that failed


def arrow_schema(table: Table, metadata: dict[str, str] | None = None) -> pa.Schema:
    import pyarrow as pa

    fields = [pa.field(item.name, arrow_type(item.kind), nullable=item.nullable) for item in table.columns]
    return pa.schema(fields, metadata={METADATA_PREFIX + key: value for key, value in (metadata or {}).items()})


def arrow_type(kind: Kind) -> pa.DataType:
    import pyarrow as pa

    return pa.timestamp("us", tz="UTC") if kind is Kind.TIMESTAMP else pa.type_for_alias(ARROW_TYPES[kind])


class RecordFiles:
    """The folder of one node's record files. The recorder's thread; `last_error` any."""

    def __init__(self, options: EventsOptions, start_us: int) -> None:
        self.options: Final = options
        self.start_us: Final = start_us
        self.last_error = ""  # the last reason why a file could not be written; "" while all is well
        self.removed_files = 0  # files removed because the node's share of the disk was used up
        self.number = 0  # of the next file, above that of all of this node that were there at the start
        self._root = Path(options.folder)  # links resolved by `prepare`
        self._name = re.compile(rf"(\.)?{re.escape(options.node)}-\d+-(\d+)\.parquet(?(1)\.part)")
        self._hours: dict[str, tuple[int, int]] = {}  # date=/hour= -> least number, bytes of our files in it
        self._own_bytes = 0
        self._left: list[Path] = []  # hidden files from before that are too young to belong to nobody
        self._said_at = float("-inf")
        self._untold = 0  # failures since the last line about them

    @staticmethod
    def now_us() -> int:
        return time.time_ns() // 1000

    def prepare(self) -> None:
        """Make the folder, remove what a crashed process of this node left, and take stock."""
        hint = "name a folder of your own"
        root = self._root = resolve_folder(self._root, "--events")
        try:
            with opened_folder(root, _FOLDER_MODE):
                pass
        except OSError as error:
            raise ConfigError(f"--events {root}: the folder cannot be made: {error.strerror}", hint=hint) from error
        if not os.access(root, os.W_OK | os.X_OK):
            raise ConfigError(f"--events {root}: the folder is not writable", hint=hint)
        self._hours, self._own_bytes, self._left = {}, 0, []
        for folder in root.glob("*/date=*/hour=*"):
            for number, size, path in self._files(folder):
                if path.name.startswith("."):
                    self._left.append(path)
                else:
                    self._note("/".join(folder.parts[-2:]), number, size)
                    self.number = max(self.number, number + 1)
        self.sweep()

    def sweep(self) -> None:
        """Remove the hidden files of this node that were there at the start, once nobody writes them any more."""
        old = time.time() - _ORPHAN_AGE_S
        left, self._left = self._left, []
        for path in left:
            with contextlib.suppress(OSError):  # gone meanwhile, or not ours to remove
                if path.lstat().st_mtime < old:
                    _remove(path)
                else:
                    self._left.append(path)

    def _files(self, folder: Path) -> Iterator[tuple[int, int, Path]]:
        """Yield number, bytes and path of this node's files in a folder, also of hidden ones."""
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if found := self._name.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        yield int(found[2]), entry.stat().st_size, Path(entry.path)

    def _note(self, hour: str, number: int, size: int) -> None:
        least, before = self._hours.get(hour, (number, 0))
        self._hours[hour] = min(least, number), before + size
        self._own_bytes += size

    def write(self, table: pa.Table, of: Table, hour_us: int) -> int:
        """Write one file, whole or not at all; return its size in bytes."""
        from pyarrow import parquet

        options = self.options
        when = dt.datetime.fromtimestamp(hour_us / 1e6, dt.UTC)
        hour = f"date={when:%Y-%m-%d}/hour={when:%H}"
        name = f"{options.node}-{self.start_us}-{self.number}{SUFFIX}"
        with opened_folder(self._root / of.name / hour, _FOLDER_MODE) as folder:
            with replacing_below(folder, name, f".{name}{_TEMPORARY}", _FILE_MODE, sync=True) as file:
                parquet.write_table(
                    table,
                    file,
                    compression="zstd",
                    row_group_size=_ROW_GROUP,
                    # Measured: 0.65 us per sample instead of 0.92 with dictionaries and statistics of all columns.
                    use_dictionary=[column.name for column in of.columns if column.kind is Kind.TEXT],
                    write_statistics=[name for name in of.names if name in _STATISTICS],
                    write_page_checksum=True,
                )
                size = file.tell()
            sync_folder(folder)  # the name is to outlive a crash of the machine as well
        self._note(hour, self.number, size)
        self.number += 1
        self.last_error = ""
        self._keep_within()
        return size

    def _keep_within(self) -> None:
        """Remove the oldest files of this node where they take more than their share of the disk."""
        most, removed, newest = self.options.max_bytes, 0, self.number - 1
        enough: float = most
        while most and self._hours and self._own_bytes > enough:
            hour = min(self._hours, key=lambda name: self._hours[name][0])
            if self._hours[hour][0] == newest:
                break
            self._own_bytes -= self._hours.pop(hour)[1]
            until = min((least for least, _ in self._hours.values()), default=newest)
            # What is there now: the operator may have removed some.
            files = [item for folder in self._root.glob(f"*/{hour}") for item in self._files(folder)]
            files = sorted(item for item in files if not item[2].name.startswith("."))
            self._own_bytes += sum(size for _, size, _ in files)
            for number, size, path in files:
                self._own_bytes -= size
                if number > until or number == newest or self._own_bytes + size <= enough:
                    self._note(hour, number, size)
                    continue
                enough = most * (1 - _EXTRA_REMOVED_SHARE)
                with contextlib.suppress(OSError):
                    _remove(path)
                    removed += 1
        if not removed:
            return
        self.removed_files += removed
        _log.info("oldest records removed", files=removed, kept_bytes=self._own_bytes, limit_bytes=most)

    def failed(self, of: Table, error: Exception, now: float) -> None:
        """A file could not be written, and log that, but not each time."""
        self.last_error = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
        self._untold += 1
        if now - self._said_at >= _LOG_EVERY_S:
            hint = {"hint": LINK_HINT} if getattr(error, "errno", 0) == errno.ELOOP else {}
            _log.error("records cannot be written", table=of.name, error=self.last_error, attempts=self._untold, **hint)
            self._said_at, self._untold = now, 0


_FILE_MODE: Final = 0o640
"""Records say who watched what from where: for the server's owner, and for a group that analyses."""
_FOLDER_MODE: Final = 0o750


def _remove(path: Path) -> None:
    with opened_folder(path.parent, None) as folder:
        os.unlink(path.name, dir_fd=folder)


def _release_memory() -> None:
    """Give memory back that a file was made in: 14 MB at a thousand viewers, in a fraction of a millisecond."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


class TableWriter:
    """Gathers the rows of one table and makes files of them. The recorder's thread; `books` any."""

    def __init__(self, table: Table, files: RecordFiles) -> None:
        self.table: Final = table
        self._files: Final = files
        self._rows: list[tuple[Any, ...]] = []  # that are not in a part yet
        self._parts: list[_WaitingPart] = []
        self._bytes = 0
        self._waiting = 0
        self._first_at: float | None = None  # when the first of them came
        self._retry_at = float("-inf")
        self._failing = False  # the last attempt to write failed: only then are rows given up
        self._written_files = 0
        self._seq = files.start_us  # of the next row
        self._schema: pa.Schema | None = None
        self._lost = self._refused = self._failures = self._written = self._written_bytes = 0

    @property
    def books(self) -> Books:
        return Books(
            files=self._written_files,
            written_rows=self._written,
            written_bytes=self._written_bytes,
            waiting_rows=self._waiting,
            lost_rows=self._lost,
            refused_rows=self._refused,
            failures=self._failures,
        )

    @property
    def given_up_rows(self) -> int:
        """Rows that will be in no file: `lost_rows` and `refused_rows` of the books."""
        return self._lost + self._refused

    @property
    def rows_wait(self) -> bool:
        """Whether there is anything to make a file of."""
        return self._first_at is not None

    def warm_up(self) -> None:
        """Load what is needed to write, before the first file is due."""
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.parquet

        self._schema = arrow_schema(self.table)
        pa.array([0])  # the first list makes it load pandas as well, 0.3 s of the interpreter, if that is installed

    # -- rows come

    def add_rows(self, rows: list[tuple[Any, ...]]) -> None:
        """Take rows: the columns in order, without `node` and `seq`; they become columns many at a time."""
        self._rows += rows
        self._count_arrived(len(rows), self._cells_bytes(len(rows)))
        if len(self._rows) >= _ROWS_PER_BATCH or self._failing:  # rows are given up in small parts if the disk fails
            self._convert_rows()

    def _cells_bytes(self, rows: int) -> int:
        return rows * len(self.table.columns) * _CELL_BYTES

    def _convert_rows(self) -> None:
        """Make columns of the pending rows, without those that do not fit."""
        rows, self._rows = self._rows, []
        self._waiting -= len(rows)
        self._bytes -= self._cells_bytes(len(rows))
        try:
            arrays = self._arrays(rows)
        except Exception as error:  # noqa: BLE001 - which row is wrong shows below; the others must not be lost for it
            rows = [row for row in rows if self._fits(row, error)]
            if not rows:
                return
            arrays = self._arrays(rows)
        part = _WaitingPart(len(rows), self._seq, 0, None)
        self._convert_part(part, arrays)
        self._add_part(part)

    def _fits(self, row: tuple[Any, ...], error: Exception) -> bool:
        try:
            self._arrays([row])
        except Exception:  # noqa: BLE001 - as above
            if not self._refused:
                _log.error("a record does not fit its table", table=self.table.name, error=str(error)[:200])
            self._refused += 1
            return False
        return True

    def _arrays(self, rows: list[tuple[Any, ...]]) -> list[Any]:
        import pyarrow as pa

        schema = self._schema_of()
        fields = [field for field in schema if field.name not in {"node", "seq"}]
        columns = list(zip(*rows, strict=True))
        if len(columns) != len(fields):
            raise ValueError(
                f"a row has {len(columns)} columns, {self.table.name} has {len(fields)} besides node and seq"
            )
        arrays = [pa.array(column, field.type) for field, column in zip(fields, columns, strict=True)]
        for field, column in zip(fields, arrays, strict=True):
            if column.null_count and not field.nullable:
                raise ValueError(f"column {field.name} may not be empty")
        return arrays

    def add_block(self, block: Block) -> None:
        """Take many rows; they become columns when the file is made, all blocks of it in one go.

        Columns cost much by block and little by row, and what waits takes less memory as it is.
        """
        if not block.rows:
            return
        rows, size_bytes = block.rows, self._cells_bytes(block.rows)
        last = self._parts[-1] if self._parts else None
        # While the disk takes nothing, rows are given up a block at a time: blocks stay small then.
        if last is not None and last.block is not None and not self._failing and last.block.absorb(block):
            last.rows += rows
            last.size_bytes += size_bytes
            self._seq += rows
            self._count_arrived(rows, size_bytes)
        else:
            self._add_part(_WaitingPart(rows, self._seq, size_bytes, block))

    def _add_part(self, part: _WaitingPart) -> None:
        self._parts.append(part)
        self._seq += part.rows
        self._count_arrived(part.rows, part.size_bytes)

    def _convert_part(self, part: _WaitingPart, arrays: list[Any]) -> None:
        import pyarrow as pa

        node = pa.repeat(pa.scalar(self._files.options.node), part.rows)
        numbers = array("q", range(part.seq, part.seq + part.rows))  # a tenth of what a list costs
        seq = pa.Array.from_buffers(pa.int64(), part.rows, [None, pa.py_buffer(numbers)])
        batch = pa.RecordBatch.from_arrays([arrays[0], node, seq, *arrays[1:]], schema=self._schema_of())
        part.batch, part.block, part.size_bytes = batch, None, batch.nbytes

    def _count_arrived(self, rows: int, size_bytes: int) -> None:
        """Count rows that were added, and give up the oldest if the disk has failed for too long."""
        self._waiting += rows
        self._bytes += size_bytes
        if self._first_at is None:
            self._first_at = time.monotonic()
        while self._waiting > self._files.options.queue_rows and len(self._parts) > 1 and self._failing:
            self._lost += self._discount_part(self._parts.pop(0))

    def _discount_part(self, part: _WaitingPart) -> int:
        """Subtract a part that has gone from the counts; return its number of rows."""
        self._waiting -= part.rows
        self._bytes -= part.size_bytes
        return part.rows

    def _make_batches(self) -> None:
        """Make columns of all that waits."""
        if self._rows:
            self._convert_rows()
        for part in list(self._parts):
            if part.block is None:
                continue
            before = part.size_bytes
            try:
                arrays = part.block.arrays()
                self._convert_part(part, arrays)
            except Exception as error:  # noqa: BLE001 - a fault of ours, which the next attempt would meet again
                _log.error("records do not fit their table", table=self.table.name, error=str(error)[:200])
                self._parts.remove(part)
                self._refused += self._discount_part(part)
            else:
                self._bytes += part.size_bytes - before

    def _schema_of(self) -> pa.Schema:
        if self._schema is None:
            self._schema = arrow_schema(self.table)
        return self._schema

    # -- files

    def finish_if_due(self, now: float) -> None:
        """Make a file of what there is if it is time, or enough."""
        options = self._files.options
        if self._first_at is None or now < self._retry_at:
            return
        full = self._bytes >= options.file_bytes or self._waiting >= options.queue_rows
        if (full or now - self._first_at >= options.rotate_s) and self.finish():
            _release_memory()

    def finish(self) -> bool:
        """Make files of what there is, one for each hour that rows are of; return whether nothing is left."""
        import pyarrow as pa

        self._make_batches()
        hours: dict[int, list[_WaitingPart]] = {}
        for part in self._parts:
            for hour, piece in part.by_hour():
                hours.setdefault(hour, []).append(piece)
        self._parts = [part for hour in sorted(hours) for part in hours[hour]]
        for hour in sorted(hours):
            metadata = arrow_schema(self.table, self._metadata()).metadata
            now = time.monotonic()
            try:
                table = pa.Table.from_batches([part.batch for part in hours[hour]]).replace_schema_metadata(metadata)
                size = self._files.write(table, self.table, hour * _HOUR_US)
            except Exception as error:  # noqa: BLE001 - pyarrow has errors of its own beside OSError
                self._failures += 1
                self._failing = True
                self._retry_at = now + _RETRY_AFTER_S
                self._files.failed(self.table, error, now)
                return False
            del self._parts[: len(hours[hour])]
            self._written_files += 1
            self._written += sum(map(self._discount_part, hours[hour]))
            self._written_bytes += size
        self._first_at = None
        self._failing = False
        return True

    def _metadata(self) -> dict[str, str]:
        return {
            "table": self.table.name,
            "format": str(FORMAT),
            "node": self._files.options.node,
            "start": str(self._files.start_us),
            "number": str(self._files.number),
            "uid": uuid.uuid4().hex,
        }
