"""Finds flights in record files, and reads the rows of one of them; what they mean is the business of `records.flight`.

Of two files that are copies of each other (``flowctl.uid``) one is read. A file that is no whole Parquet file, or is of
another table, is named, and nothing is read: a flight with a part missing cannot be replayed anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowctl.core.text.extras import require_extra
from flowctl.errors import ConfigError, DamagedFlightError
from flowctl.records.telemetry.schema import FLIGHT, METADATA_PREFIX, FlightKind, Kind

if TYPE_CHECKING:
    import pyarrow as pa

_SUFFIX: Final = ".parquet"
_BATCH_ROWS: Final = 65_536
_MOST_FILES: Final = 20_000
"""Most files of a folder, two days of one in ten seconds; Spark is for more."""
_MOST_FLIGHTS: Final = 200_000
"""Most flights in a list, some 100 MB."""
_MOST_ROWS: Final = 2_002_000
"""Most rows read of one flight: a few more than a recorder writes, so that its reader can refuse it."""
_MOST_FILE_ROWS: Final = 10_000_000
"""Most rows of one file: a hundred times what a recorder writes."""
_MOST_FOOTER_BYTES: Final = 16 * 1024 * 1024
"""Largest footer of a file: a recorder's has some KiB, and takes many times its size in memory."""
_MOST_GROUP_BYTES: Final = 512 * 1024 * 1024
"""Largest row group in memory: a recorder's has some 5 MB."""
_MOST_TEXT_BYTES: Final = 64 * 1024 * 1024
"""Most text in one batch: a few bytes in a file can stand for very much of it."""
_ROWS_PER_BYTE: Final = 1
_MOST_LOOSE_ROWS: Final = 50_000
"""Most rows of a file by its size, and beside it: a recorder's have 2 to 13 bytes each, and each takes its time to
replay. A file in which many are alike could say an hour's work in some kB."""
_TEXT_PER_BYTE: Final = 64
_MOST_LOOSE_TEXT_BYTES: Final = 16 * 1024 * 1024
"""The same for its text, written out: of a recorder's files some 13 bytes come of each."""
_ROWS_AT_ONCE: Final = 500_000
"""Most rows of several flights in memory at a time, some 300 MB; one flight alone may have more."""
_NODE_AT: Final = FLIGHT.names.index("node")
_CONN_AT: Final = FLIGHT.names.index("conn_id")
_LIST_COLUMNS: Final = [
    "ts",
    "node",
    "conn_id",
    "peer_ip",
    "role",
    "app",
    "stream",
    "offset_us",
    "kind",
    "dropped_messages",
    "reason",
]


def most_rows(size_bytes: int) -> int:
    """Return how many rows a file of flights of that size may have."""
    return _ROWS_PER_BYTE * size_bytes + _MOST_LOOSE_ROWS


@dataclass(slots=True)
class FlightSummary:
    """One flight in a list."""

    node: str
    conn_id: int
    peer_ip: str = ""
    role: str = ""
    stream: str = ""
    began_at: str = ""
    duration_s: float = 0.0
    rows: int = 0
    transitions: int = 0
    dropped_messages: int = 0
    close_reason: str = ""  # why the connection ended. "": it was open when the flight ended.
    end: str = ""


Damaged = dict[Path, DamagedFlightError]
"""Files that cannot be read, with the reason: they are passed over, and their reader tells."""


def flight_files(path: Path, damaged: Damaged | None = None) -> list[Path]:
    """Return the record files of the table `flight` at `path`, without copies."""
    if path.is_dir():
        root = path / FLIGHT.name if (path / FLIGHT.name).is_dir() else path
        found = sorted(
            item
            for item in root.rglob(f"*{_SUFFIX}")
            if not any(part.startswith((".", "_")) for part in item.relative_to(root).parts)
        )
    elif path.is_file():
        found = [path]
    else:
        raise ConfigError(f"{path} is not there", hint="give a file of flights, or the folder of --events")
    if not found:
        raise ConfigError(f"{path} holds no flights", hint="record some: flowctl serve live --events DIR")
    if len(found) > _MOST_FILES:
        raise ConfigError(
            f"{path} holds {len(found)} files, {_MOST_FILES} are read at most", hint="name one hour of it"
        )
    seen: dict[str, Path] = {}
    inside = path.resolve() if path.is_dir() else None
    for item in found:
        try:
            _check_place(item, inside)
            seen.setdefault(_uid_of(item), item)
        except DamagedFlightError as error:
            if damaged is None:
                raise
            damaged[item] = error
    return list(seen.values())


def _check_place(path: Path, inside: Path | None) -> None:
    """See that a file may be opened: a pipe would be waited for, and a link may show what others put elsewhere."""
    if not path.is_file():
        raise DamagedFlightError(f"{path} is no regular file", hint="move it away")
    if inside is not None and not path.resolve().is_relative_to(inside):
        raise DamagedFlightError(f"{path} is behind a link that leads out of the folder", hint="name the file itself")
    try:
        with path.open("rb") as file:
            file.seek(-min(8, path.stat().st_size), 2)
            size_bytes = int.from_bytes(file.read(4), "little")
    except OSError as error:
        raise DamagedFlightError(f"{path} cannot be read: {error.strerror}", hint="look at its rights") from error
    if size_bytes > _MOST_FOOTER_BYTES and path.stat().st_size > _MOST_FOOTER_BYTES:
        raise DamagedFlightError(f"{path}: its footer has {size_bytes} bytes, {_MOST_FOOTER_BYTES} are read at most")


def _parquet() -> Any:
    require_extra("telemetry", "flight.parquet", "pyarrow")
    import pyarrow.parquet

    return pyarrow.parquet


def _uid_of(path: Path) -> str:
    """Return what two copies of a file have in common; see that it is one of ours."""
    parquet = _parquet()
    try:
        footer = parquet.read_metadata(path)
    except (OSError, ValueError) as error:  # of pyarrow: ArrowInvalid is a ValueError
        raise DamagedFlightError(
            f"{path} is not a whole Parquet file: {_first_line(error)}", hint="move it away; its flights are lost"
        ) from error
    missing = [name for name in FLIGHT.names if name not in footer.schema.names]
    if missing:
        raise DamagedFlightError(f"{path} has no column {missing[0]!r}: it is not of the table flight")
    _check_footer(path, footer)
    uid: bytes | None = (footer.metadata or {}).get(f"{METADATA_PREFIX}uid".encode())
    if uid is None:
        return str(path)
    # Tools that split a file keep its metadata: parts of one file have its uid and are no copies.
    ends = (
        [_ends_of(footer.row_group(group)) for group in (0, footer.num_row_groups - 1)] if footer.num_row_groups else []
    )
    return f"{uid.decode('utf-8', 'replace')} {footer.num_rows} {ends}"


def _check_footer(path: Path, footer: Any) -> None:
    """See that reading a file takes no more memory than one of ours would."""
    from flowctl.records.telemetry.writer import arrow_schema

    wanted = arrow_schema(FLIGHT)
    found = footer.schema.to_arrow_schema()
    for field in wanted:
        name, kind = field.name, found.field(field.name).type
        if kind != field.type:
            raise DamagedFlightError(f"{path}: column {name} is of type {kind}, it must be {field.type}")
    if footer.num_rows > _MOST_FILE_ROWS:
        raise DamagedFlightError(f"{path} has {footer.num_rows} rows, {_MOST_FILE_ROWS} are read at most")
    size_bytes = path.stat().st_size
    most = most_rows(size_bytes)
    if footer.num_rows > most:
        raise DamagedFlightError(
            f"{path} has {footer.num_rows} rows in {size_bytes} bytes, of so many {most} rows are read at most",
            hint="no recorder writes so many alike; move it away",
        )
    for number in range(footer.num_row_groups):
        if footer.row_group(number).total_byte_size > _MOST_GROUP_BYTES:
            raise DamagedFlightError(
                f"{path}: row group {number} has {footer.row_group(number).total_byte_size} bytes, "
                f"{_MOST_GROUP_BYTES} are read at most"
            )


def _ends_of(group: Any) -> tuple[int, int] | None:
    """Return the first and last `seq` of a row group. None: its footer does not tell."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == "seq" and column.is_stats_set and column.statistics.has_min_max:
            return column.statistics.min, column.statistics.max
    return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _batches(
    files: list[Path], columns: list[str], *, conn_ids: Collection[int] | None = None, damaged: Damaged | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of all files, those of some connections if they are named; bounded memory."""
    for path in files:
        if damaged is not None and path in damaged:
            continue
        try:
            yield from _batches_of(path, columns, conn_ids)
        except (OSError, ValueError) as error:
            told = DamagedFlightError(f"{path} cannot be read: {_first_line(error)}")
            if damaged is None:
                raise told from error
            damaged[path] = told


def _batches_of(path: Path, columns: list[str], conn_ids: Collection[int] | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one file; `ts`, where it is asked for, is a time."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Texts stay in dictionaries until it is known how much they are written out.
    texts = [column.name for column in FLIGHT.columns if column.kind is Kind.TEXT and column.name in columns]
    size_bytes, row, text_bytes = path.stat().st_size, 0, 0
    most = _TEXT_PER_BYTE * size_bytes + _MOST_LOOSE_TEXT_BYTES
    with _parquet().ParquetFile(path, read_dictionary=texts) as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
            row, text_bytes = row + batch.num_rows, text_bytes + _texts_of(batch, texts)
            if text_bytes > most:
                raise ValueError(f"{text_bytes} bytes of text up to row {row}, of {size_bytes} {most} are read at most")
            for name in ("ts", "conn_id", "offset_us", "kind"):
                if name in columns and batch.column(name).null_count:
                    raise ValueError(f"column {name} has empty places")
            if conn_ids is None:
                yield batch
            else:
                yield batch.filter(pc.is_in(batch.column("conn_id"), pa.array(sorted(conn_ids), pa.int64())))


def _texts_of(batch: pa.RecordBatch, names: list[str]) -> int:
    """Return the bytes of text in a batch, which are not more than memory should hold."""
    import pyarrow.compute as pc

    total = 0
    for name in names:
        column = batch.column(name)
        lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
        total += pc.sum(lengths).as_py() or 0
    if total > _MOST_TEXT_BYTES:
        raise ValueError(f"{total} bytes of text in {batch.num_rows} rows, {_MOST_TEXT_BYTES} are read at most")
    return total


def flights_rows(
    files: list[Path], wanted: Sequence[FlightSummary], damaged: Damaged | None = None
) -> Iterator[tuple[FlightSummary, list[tuple[Any, ...]]]]:
    """Yield each of `wanted` with its rows: all columns in order, `ts` in us; files are read once for many flights."""
    start = 0
    while start < len(wanted):
        end, rows = start, 0
        while end < len(wanted) and (end == start or rows + wanted[end].rows <= _ROWS_AT_ONCE):
            rows += wanted[end].rows
            end += 1
        part = wanted[start:end]
        found: dict[tuple[str, int], list[tuple[Any, ...]]] = {(item.node, item.conn_id): [] for item in part}
        for row in _rows(files, {item.conn_id for item in part}, damaged):
            of_one = found.get((str(row[_NODE_AT]), int(row[_CONN_AT])))
            if of_one is not None and len(of_one) < _MOST_ROWS:
                of_one.append(row)
        for item in part:
            yield item, found.pop((item.node, item.conn_id))
        start = end


def _rows(files: list[Path], conn_ids: Collection[int], damaged: Damaged | None = None) -> Iterator[tuple[Any, ...]]:
    at = FLIGHT.names.index("ts")
    for batch in _batches(files, list(FLIGHT.names), conn_ids=conn_ids, damaged=damaged):
        try:
            columns = [batch.column(name) for name in FLIGHT.names]
            columns[at] = columns[at].cast("int64")
            lists = [column.to_pylist() for column in columns]
        except ValueError as error:
            raise DamagedFlightError(f"a column has another type: {_first_line(error)}") from error
        yield from zip(*lists, strict=True)


def list_flights(files: list[Path], damaged: Damaged | None = None) -> list[FlightSummary]:
    """Return the flights of the files, oldest first."""
    found: dict[tuple[str, int], FlightSummary] = {}
    for batch in _batches(files, _LIST_COLUMNS, damaged=damaged):
        for row in batch.to_pylist():
            key = str(row["node"]), int(row["conn_id"])
            summary = found.get(key)
            if summary is None:
                if len(found) >= _MOST_FLIGHTS:
                    raise ConfigError(f"there are more than {_MOST_FLIGHTS} flights", hint="name one hour of them")
                summary = found[key] = FlightSummary(*key)
            _add(summary, row)
    return sorted(found.values(), key=lambda item: (item.began_at, item.node, item.conn_id))


def _add(summary: FlightSummary, row: dict[str, Any]) -> None:
    summary.rows += 1
    summary.duration_s = max(summary.duration_s, row["offset_us"] / 1e6)
    summary.peer_ip = row["peer_ip"] or summary.peer_ip
    summary.role = row["role"] or summary.role
    if row["stream"]:
        summary.stream = f"{row['app'] or ''}/{row['stream']}"
    match row["kind"]:
        case FlightKind.BEGIN.value:
            summary.began_at = row["ts"].isoformat(timespec="milliseconds")
        case FlightKind.STATE.value:
            summary.transitions += 1
        case FlightKind.DROPPED.value:
            summary.dropped_messages += row["dropped_messages"] or 0
        case FlightKind.CLOSE.value:
            summary.close_reason = row["reason"] or ""
        case FlightKind.END.value:
            summary.end = row["reason"] or ""


def as_json(summary: FlightSummary) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in FlightSummary.__slots__}
