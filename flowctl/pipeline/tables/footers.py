"""What the footer of a Parquet file says of it: whether it fits a table, and what need not be looked at row by row.

A footer holds the schema, the number of rows, and for each column of each row group the smallest and largest value and
the number of nulls. So most checks of rows are answered without reading a row: where the smallest of `queued_bytes` in
a file is 0, no row of it has a negative one. What is not answered so is checked row by row (see `checks`).

Reads the last octets only. Runs inside Spark's Python workers, beside as many files as there are cores; needs pyarrow
and `flowctl.telemetry.schema`, and nothing else of Spark.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlparse

from flowctl.pipeline.tables.checks import CHECKS, MAX_AHEAD_S, MOST_COUNT, OLDEST_US, Check
from flowctl.telemetry.schema import FORMAT, METADATA_PREFIX, TABLES, Kind, Table

TAIL_BYTES: Final = 1 << 16
"""Read at once: a footer of a file of 70 columns and one row group has some 15 kB."""
MAX_FOOTER_BYTES: Final = 64 << 20
"""A footer that says it is larger is not believed: memory follows what is there, not what is announced."""
MAGIC: Final = b"PAR1"
DAY_US: Final = 86_400_000_000

FACTS_DDL: Final = (
    "path string, problem string, detail string, rows bigint, size bigint, identity string, unproven array<string>, "
    "span struct<first_node: string, last_node: string, first_seq: bigint, last_seq: bigint, recorded: boolean>"
)
"""Facts: one row per file. `problem` null: usable. `rows` null: no footer. `identity`: the same for copies."""

Span = tuple[str | None, str | None, int | None, int | None, bool]
"""Least and largest node and `seq` of a file, None where its statistics do not tell; whether a recorder wrote it."""
Facts = tuple[str, str | None, str | None, int | None, int, str | None, list[str], Span | None]

_DATE: Final = re.compile(r"/date=(\d{4}-\d{2}-\d{2})(?:/|$)")
_ARROW_WANTED: Final = {
    Kind.TIMESTAMP: ("timestamp[us, tz=", "timestamp[ms, tz="),
    Kind.INT: ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
    Kind.REAL: ("double", "float"),
    Kind.TEXT: ("string", "large_string", "dictionary<values=string"),
    Kind.FLAG: ("bool",),
}
"""Types of a file that Spark reads as the type of the table, without losing anything."""


def facts_of(
    paths: Iterable[str], table_name: str, now_us: int, store: Mapping[str, str] | None = None
) -> Iterator[Facts]:
    """Yield the facts of each file, never raising for what is wrong with one.

    Args:
        paths: addresses of files, as Spark writes them (``file:/...``, ``s3a://...``).
        table_name: which table they should hold.
        now_us: time of the check, microseconds since the epoch.
        store: where an S3 store is, see `s3_options`. None: as the environment says.
    """
    import pyarrow  # noqa: F401, ICN001 - where it is missing that is no fault of the files

    table = TABLES[table_name]
    for path in paths:
        try:
            size, tail = read_tail(path, store)
        except OSError as error:
            yield (path, "unreadable file", _short(error), None, 0, None, [], None)
            continue
        try:
            yield _facts(path, size, tail, table, now_us)
        except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds; whatever it is, the file is put aside
            yield (path, "not Parquet or damaged", _short(error), None, size, None, [], None)


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def _facts(path: str, size: int, tail: bytes, table: Table, now_us: int) -> Facts:
    """Return the facts of one file of `size` octets that ends with `tail`.

    Raises:
        Exception: its footer cannot be understood.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if size == 0:
        return (path, "empty file", "0 bytes", None, 0, None, [], None)
    if tail[-4:] != MAGIC:
        told = "it does not end as a Parquet file does"
        return (path, "truncated or not Parquet", told, None, size, None, [], None)
    footer = pq.read_metadata(pa.BufferReader(tail))
    rows = footer.num_rows
    span = _span(footer)
    identity = _identity(footer, tail, size, span)
    problem, detail = _problem(footer, table, size - int.from_bytes(tail[-8:-4], "little") - 8)
    if problem is not None:
        return (path, problem, detail, rows, size, identity, [], span)
    unproven = [
        check.key for check in CHECKS[table.name] if check.provable and not _proved(check, footer, path, now_us)
    ]
    return (path, None, None, rows, size, identity, unproven, span)


def read_tail(path: str, store: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Return the size of a file and its last octets, the whole footer among them.

    Local files are opened as such; others through `pyarrow.fs`, which knows ``s3://`` (``s3a://`` is the same to us),
    ``gs://``, ``abfs://`` and ``hdfs://``, with the credentials of the environment.

    Raises:
        OSError: it cannot be read, or its address is of an unknown kind.
    """
    with open_file(path, store) as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        tail = _last(file, size, TAIL_BYTES)
        if len(tail) >= 8 and tail[-4:] == MAGIC:
            footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
            if len(tail) < footer_bytes <= min(size, MAX_FOOTER_BYTES):
                tail = _last(file, size, footer_bytes)
        return size, tail


def _last(file: Any, size: int, count: int) -> bytes:
    file.seek(max(0, size - count))
    return bytes(file.read(min(size, count)))


def s3_options(settings: Mapping[str, str]) -> dict[str, str]:
    """Return where an S3 store is, as pyarrow's `S3FileSystem` takes it; empty: Amazon's, the region asked for.

    pyarrow does not know the settings of Hadoop, and takes no endpoint from the environment. Credentials are never
    among these: both sides find them in the environment, in ``~/.aws``, or in the role of the machine.

    Args:
        settings: of Spark (``spark.hadoop.fs.s3a.endpoint`` and ``....region``), and of the environment
            (``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, ``AWS_REGION``), which count where Spark's say nothing.
    """
    named = ("spark.hadoop.fs.s3a.endpoint", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next((settings[name] for name in named if settings.get(name)), "")
    if not endpoint:
        return {}
    secure = settings.get("spark.hadoop.fs.s3a.connection.ssl.enabled", "true") != "false"
    scheme, separator, host = endpoint.rpartition("://")
    found = {"endpoint_override": host.rstrip("/"), "scheme": scheme if separator else ("https" if secure else "http")}
    region = settings.get("spark.hadoop.fs.s3a.endpoint.region") or settings.get("AWS_REGION")
    return found | ({"region": region} if region else {})


def open_file(path: str, store: Mapping[str, str] | None = None) -> Any:
    """Open a file for reading, local or elsewhere.

    Args:
        path: its address.
        store: see `s3_options`.

    Raises:
        OSError: it cannot be read, or its address is of an unknown kind.
    """
    address = urlparse(path)
    if address.scheme in ("", "file"):
        return open(unquote(address.path) if address.scheme else path, "rb")  # noqa: PTH123 - it may be no Path
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, S3FileSystem

    try:
        if store and address.scheme in ("s3", "s3a", "s3n"):
            return S3FileSystem(**store).open_input_file(f"{address.netloc}{unquote(address.path)}")
        uri = path.replace("s3a://", "s3://", 1).replace("s3n://", "s3://", 1)
        system, name = FileSystem.from_uri(uri)
    except (ArrowException, ValueError) as error:
        raise OSError(f"files at {address.scheme}:// cannot be opened: {error}") from error
    return system.open_input_file(name)


def _span(footer: Any) -> Span:
    """Return which records a file holds, as far as its statistics tell."""
    node, seq = (_least_and_largest(footer, name) for name in ("node", "seq"))
    return (*node, *seq, _uid(footer) is not None)


def _least_and_largest(footer: Any, name: str) -> tuple[Any, Any]:
    """Return the least and the largest value of a column; (None, None) if they are not known."""
    if name not in footer.schema.names:
        return None, None
    index = footer.schema.names.index(name)
    lows, highs = [], []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        if group.num_rows == 0:
            continue
        statistics = group.column(index).statistics
        if statistics is None or not statistics.has_min_max:
            return None, None
        lows.append(statistics.min)
        highs.append(statistics.max)
    return (min(lows), max(highs)) if lows else (None, None)


def _uid(footer: Any) -> str | None:
    """Return what the recorder named a file; None: no recorder wrote it."""
    uid = (footer.metadata or {}).get(f"{METADATA_PREFIX}uid".encode())
    return str(uid.decode("utf-8", "replace")) if uid else None


def _identity(footer: Any, tail: bytes, size: int, span: Span) -> str:
    """Return what copies of a file have in common: uid and records, or else its size and its footer.

    The uid that its writer gave a file is not enough: tools that split a file keep its metadata in each part. So the
    number of rows, and the first and last `seq`, belong to it. A footer has the size and the range of values of every
    column chunk, so that two files of the same size and footer are copies but for deliberate forgery.
    """
    uid = _uid(footer)
    if uid is not None:
        return f"uid {uid}, {footer.num_rows} rows, seq {span[2]} to {span[3]}"
    length = int.from_bytes(tail[-8:-4], "little") + 8
    return f"{size} {hashlib.sha256(tail[-length:]).hexdigest()}"


def _problem(footer: Any, table: Table, room: int) -> tuple[str | None, str | None]:
    """Return why the whole file does not fit the table, and the details; (None, None) if it does.

    Args:
        footer: of the file.
        table: which it should hold.
        room: octets before the footer: a file that lost its beginning has fewer than its footer speaks of.
    """
    metadata = {key.decode("utf-8", "replace"): value for key, value in (footer.metadata or {}).items()}
    named = metadata.get(f"{METADATA_PREFIX}table")
    if named is not None and named != table.name.encode():
        return "of another table", f"it says it holds {named.decode('utf-8', 'replace')!r}"
    written = metadata.get(f"{METADATA_PREFIX}format", b"1")
    if not written.isdigit() or int(written) > FORMAT:
        return "newer format", f"format {written.decode('utf-8', 'replace')!r}, this flowctl reads up to {FORMAT}"
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for index in range(group.num_columns):
            chunk = group.column(index)
            begin = chunk.dictionary_page_offset or chunk.data_page_offset
            if begin + chunk.total_compressed_size > room:
                return "damaged", "a part of it is missing: its footer speaks of more than is there"
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


def _proved(check: Check, footer: Any, path: str, now_us: int) -> bool:
    """Return whether the statistics of the file show that no row of it fails `check`."""
    names = footer.schema.names
    if check.column not in names:
        return True  # a column that is not there is null everywhere, which only required ones may not be
    index = names.index(check.column)
    day = date_of(path)
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        if group.num_rows == 0:
            continue
        statistics = group.column(index).statistics
        if statistics is None:
            return False
        if check.what == "null":
            if not statistics.has_null_count or statistics.null_count:
                return False
        elif not _in_range(check, statistics, day, now_us):
            return False
    return True


def _in_range(check: Check, statistics: Any, day: int | None, now_us: int) -> bool:
    """Return whether the least and the largest value of a row group pass `check`."""
    if not statistics.has_min_max:
        # All of them null: nothing to fail. Otherwise nothing is known.
        return bool(statistics.num_values == 0)
    if check.what == "negative":
        return bool(statistics.min >= 0)
    if check.what == "too large":
        return bool(statistics.max < MOST_COUNT)
    low, high = _us(statistics.min), _us(statistics.max)
    if low is None or high is None:
        return False
    if check.what == "too old":
        return low >= OLDEST_US
    if check.what == "in the future":
        return high <= now_us + MAX_AHEAD_S * 1_000_000
    return day is None or (low >= day - DAY_US and high < day + 2 * DAY_US)


def _us(value: Any) -> int | None:
    """Return a time of the statistics as microseconds since the epoch; None if it is none."""
    if not isinstance(value, dt.datetime):
        return None
    moment = value if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)
    return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def date_of(path: str) -> int | None:
    """Return the day that a file's folder names, as the microsecond since the epoch at which it begins; None: none."""
    found = _DATE.search(unquote(path))
    if found is None:
        return None
    try:
        day = dt.date.fromisoformat(found.group(1))
    except ValueError:
        return None
    return (day - dt.date(1970, 1, 1)).days * DAY_US
