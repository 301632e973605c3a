"""What a file of records is: whether it fits its table, how many rows it has, and which of them cannot be used.

A footer holds the schema, the number of rows, and for each column of each row group the smallest and largest value and
the number of nulls: that answers most checks (see `checks`) from the last octets of a file. Columns with a check that
it leaves open are read, in pieces. Needs nothing of Spark, so that it runs in threads and in Spark's workers.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from flowctl.pipeline.records.checks import CHECKS, Bounds, Check, Times, reasons
from flowctl.pipeline.records.window import Hour, begin_of
from flowctl.telemetry.schema import ARROW_TYPES, FORMAT, METADATA_PREFIX, TABLES, Kind, Table

TAIL_BYTES: Final = 1 << 16
"""Read at once: a footer of a file of 100 columns and one row group has some 20 kB."""
MAX_FOOTER_BYTES: Final = 64 << 20
"""A footer that says it is larger is not believed: memory follows what is there, not what is announced."""
MAGIC: Final = b"PAR1"
BATCH_ROWS: Final = 1 << 16
HOUR_US: Final = 3_600_000_000
DAY_US: Final = 24 * HOUR_US
_ARROW_WANTED: Final = {
    Kind.TIMESTAMP: ("timestamp[us, tz=", "timestamp[ms, tz="),
    Kind.INT: ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
    Kind.REAL: ("double", "float"),
    Kind.TEXT: ("string", "large_string", "dictionary<values=string"),
    Kind.FLAG: ("bool",),
}
"""Types of a file that are read as the type of the table, by Spark too, without losing anything."""


class Facts(NamedTuple):
    """What is known of a file.

    Attributes:
        path: of it, as the file system names it.
        problem: why it is put aside whole. None: it is used.
        detail: more of it.
        rows: that it has. None: it has no footer.
        size_bytes: of it.
        identity: the same for copies.
        format: of its records.
        node: whose they are, where its statistics tell of one only.
        first_seq: least `seq`; None where they do not tell.
        last_seq: largest.
        recorded: whether a recorder wrote it, so that its `seq` is in order.
        newest_us: time of its newest record.
        reasons: rows that cannot be used, by reason.
    """

    path: str
    problem: str | None = None
    detail: str | None = None
    rows: int | None = None
    size_bytes: int = 0
    identity: str = ""
    format: int = FORMAT
    node: str | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    recorded: bool = False
    newest_us: int | None = None
    reasons: dict[str, int] = {}  # noqa: RUF012 - never changed


FACTS_DDL: Final = (
    "path string, problem string, detail string, rows bigint, size_bytes bigint, identity string, format int, "
    "node string, first_seq bigint, last_seq bigint, recorded boolean, newest_us bigint, reasons map<string, bigint>"
)
"""The same as Spark has it."""


def facts_of(system: Any, path: str, table_name: str, hour: Hour | None, now_us: int) -> Facts:
    """Return the facts of a file, never raising for what is wrong with it.

    Args:
        system: file system of `pyarrow.fs`.
        path: of the file on it.
        table_name: which table it should hold.
        hour: of the folder that it lies in. None: it lies in none of an hour.
        now_us: time of the run, microseconds since the epoch.
    """
    size_bytes = 0
    try:
        with system.open_input_file(path) as source:
            size_bytes = source.size()
            return _facts(source, path, size_bytes, TABLES[table_name], hour, now_us)
    except OSError as error:
        problem = "not Parquet or damaged" if size_bytes else "unreadable file"
        return Facts(path, problem, _short(error), None, size_bytes)
    except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds; whatever it is, the file is put aside
        return Facts(path, "not Parquet or damaged", _short(error), None, size_bytes)


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def _facts(source: Any, path: str, size_bytes: int, table: Table, hour: Hour | None, now_us: int) -> Facts:
    """Return the facts of an open file.

    Raises:
        Exception: it cannot be understood.
    """
    if size_bytes == 0:
        return Facts(path, "empty file", "0 bytes")
    tail = read_tail(source, size_bytes)
    if tail[-4:] != MAGIC:
        return Facts(path, "truncated or not Parquet", "it does not end as a Parquet file does", None, size_bytes)
    footer = pq.read_metadata(pa.BufferReader(tail))
    room = size_bytes - int.from_bytes(tail[-8:-4], "little") - 8
    columns, whole = _bounds(footer, table, room)
    metadata = {key.decode("utf-8", "replace"): value for key, value in (footer.metadata or {}).items()}
    uid = metadata.get(f"{METADATA_PREFIX}uid", b"").decode("utf-8", "replace")
    number = _format(metadata, columns)
    first_seq, last_seq = _span(columns, "seq")
    nodes = _span(columns, "node")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    # The uid is not enough: tools that split a file keep its metadata in each part.
    told = f"uid {uid}, {footer.num_rows} rows, seq {first_seq} to {last_seq}"
    facts = Facts(
        path=path,
        rows=footer.num_rows,
        size_bytes=size_bytes,
        identity=told if uid else f"{size_bytes} {hashlib.sha256(tail[-length:]).hexdigest()}",
        format=number or FORMAT,
        node=nodes[0] if nodes[0] == nodes[1] else None,
        first_seq=first_seq,
        last_seq=last_seq,
        recorded=bool(uid),
        newest_us=_span(columns, "ts")[1],
    )
    problem, detail = _problem(footer, table, metadata, number)
    if problem is None and not whole:
        problem, detail = "damaged", "a part of it is missing: its footer speaks of more than is there"
    if problem is not None:
        return facts._replace(problem=problem, detail=detail)
    times = times_of(hour, facts.format, now_us)
    open_ = [check for check in CHECKS[table.name] if not _proved(check, columns, times)]
    bad = Counter[str]()
    for _, reason in checked(source, footer, table, open_, times) if open_ else ():
        bad.update(reason.drop_null().to_pylist())
    newest = facts.newest_us
    return facts._replace(reasons=dict(bad), newest_us=min(newest, now_us) if bad and newest is not None else newest)


def times_of(hour: Hour | None, number: int, now_us: int) -> Times:
    """Return when records of a file may be from: format 3 has every row in its hour, older ones go on until rotated."""
    if hour is None:
        return Times(now_us)
    begin_us = int(begin_of(hour).timestamp()) * 1_000_000
    if number >= FORMAT:
        return Times(now_us, begin_us, begin_us + HOUR_US)
    day_us = begin_us // DAY_US * DAY_US
    return Times(now_us, day_us - DAY_US, day_us + 2 * DAY_US)


def read_tail(source: Any, size_bytes: int) -> bytes:
    """Return the last octets of an open file, the whole footer among them."""

    def last(count: int) -> bytes:
        source.seek(max(0, size_bytes - count), os.SEEK_SET)
        return bytes(source.read(min(size_bytes, count)))

    tail = last(TAIL_BYTES)
    if len(tail) >= 8 and tail[-4:] == MAGIC:
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if len(tail) < length <= min(size_bytes, MAX_FOOTER_BYTES):
            tail = last(length)
    return tail


def checked(
    source: Any, footer: Any, table: Table, checks: Sequence[Check], times: Times, columns: Sequence[str] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield the rows of an open file in pieces, in the types of the table, and why each of them cannot be used.

    Args:
        source: the file.
        footer: of it.
        table: that it holds.
        checks: to make.
        times: see `Times`.
        columns: to read. None: those of `checks`.
    """
    names = list(dict.fromkeys(check.column for check in checks)) if columns is None else list(columns)
    there = set(footer.schema.to_arrow_schema().names)
    kinds = {column.name: ARROW[column.kind] for column in table.columns}
    file = pq.ParquetFile(source, metadata=footer, pre_buffer=False)
    for batch in file.iter_batches(BATCH_ROWS, columns=[name for name in names if name in there], use_threads=False):
        found = {name: batch.column(name).cast(kinds[name]) for name in batch.schema.names}
        # A column that is not there is null in every row.
        rows = pa.table({name: found.get(name, pa.nulls(batch.num_rows, kinds[name])) for name in names})
        yield rows, reasons(rows, checks, times)


ARROW: Final = {
    kind: pa.timestamp("us", tz="UTC") if kind is Kind.TIMESTAMP else pa.type_for_alias(name)
    for kind, name in ARROW_TYPES.items()
}
"""Types of the tables in Arrow."""


def _bounds(footer: Any, table: Table, room: int) -> tuple[dict[str, list[Bounds]], bool]:
    """Return what a footer says of each column, by row group, and whether all that it speaks of is there.

    Args:
        footer: of the file.
        table: whose columns are wanted.
        room: octets before it: a file that lost its beginning has fewer than its footer speaks of.
    """
    names = footer.schema.names
    times = {column.name for column in table.columns if column.kind is Kind.TIMESTAMP}
    found: dict[str, list[Bounds]] = {name: [] for name in names}
    whole = True
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for index, name in enumerate(names[: group.num_columns]):
            chunk = group.column(index)
            begin = chunk.dictionary_page_offset or chunk.data_page_offset
            whole = whole and begin + chunk.total_compressed_size <= room
            said = chunk.statistics if name in table.names and group.num_rows else None
            nulls = said.null_count if said is not None and said.has_null_count else None
            if said is None or not said.has_min_max:
                low, high = None, None
            elif name in times and said.physical_type == "INT64":  # its raw values: not every one is a time of Python
                factor = 1000 if "milliseconds" in str(said.logical_type) else 1
                low, high = said.min_raw * factor, said.max_raw * factor
            else:
                low, high = said.min, said.max
            if group.num_rows:
                found[name].append(Bounds(group.num_rows, nulls, low, high))
    return found, whole


def _span(columns: dict[str, list[Bounds]], name: str) -> tuple[Any, Any]:
    """Return the least and the largest value of a column; (None, None) if they are not known."""
    groups = columns.get(name)
    if not groups or any(bounds.low is None for bounds in groups):
        return None, None
    return min(bounds.low for bounds in groups), max(bounds.high for bounds in groups)


def _proved(check: Check, columns: dict[str, list[Bounds]], times: Times) -> bool:
    """Return whether the statistics of the file show that no row of it fails `check`.

    A column that is not there is null everywhere, which only required ones may not be.
    """
    return all(check.proved(bounds, times) for bounds in columns.get(check.column, ()))


def _format(metadata: dict[str, bytes], columns: dict[str, list[Bounds]]) -> int:
    """Return the format of a file's records; 0: what it says is no number. A tool may have dropped what it says."""
    said = metadata.get(f"{METADATA_PREFIX}format")
    if said is None:
        return FORMAT if "count" in columns or "event" not in columns else 1
    return int(said) if said.isdigit() else 0


def _problem(
    footer: Any, table: Table, metadata: dict[str, bytes], number: int | None
) -> tuple[str | None, str | None]:
    """Return why the whole file does not fit the table, and the details; (None, None) if it does."""
    named = metadata.get(f"{METADATA_PREFIX}table")
    if named is not None and named != table.name.encode():
        return "of another table", f"it says it holds {named.decode('utf-8', 'replace')!r}"
    if not number or number > FORMAT:
        written = metadata[f"{METADATA_PREFIX}format"].decode("utf-8", "replace")
        return "newer format", f"format {written[:20]!r}, this flowctl reads up to {FORMAT}"
    found = {field.name: str(field.type) for field in footer.schema.to_arrow_schema()}
    missing = [column.name for column in table.columns if not column.nullable and column.name not in found]
    if missing:
        return "foreign schema", f"it has no column {', '.join(missing[:5])}"
    wrong = [
        f"{column.name} is {found[column.name]}"
        for column in table.columns
        if column.name in found and not found[column.name].startswith(_ARROW_WANTED[column.kind])
    ]
    return ("wrong types", "; ".join(wrong[:5])) if wrong else (None, None)
