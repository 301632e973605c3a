"""What a file of records is: whether it fits its table, how many rows it has, and which of them cannot be used.

A footer has the smallest and largest value of each column, which answers most checks (see `checks`); columns with a
check that it leaves open are read, in pieces. Needs nothing of Spark: it runs in threads and in Spark's workers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flowctl.analyze.records.checks import WORDED, Bounds, Check, checks_of, reasons
from flowctl.analyze.records.window import Hour
from flowctl.records.telemetry.flightfiles import most_rows
from flowctl.records.telemetry.schema import ARROW_TYPES, FLIGHT, FORMAT, METADATA_PREFIX, TABLES, Kind

BATCH_ROWS: Final = 1 << 16
MOST_UNPACKED_BYTES: Final = 256 << 20
"""Largest column of a row group that is read: a hundred times what a recorder writes, and what fits into memory."""
MOST_ROWS: Final = 100_000_000
"""Most rows of a file: a thousand times what a recorder writes. A row like the one before takes nothing in a file, so
a few octets could take days to read."""
MOST_FOOTER_BYTES: Final = 16 << 20
"""Largest footer: a recorder's has some KiB, and takes many times its size in memory."""
_MOST_WORD_CHARS: Final = 64
"""Characters of a text that are compared with words, all of which are shorter."""
_FITTING: Final = {
    Kind.TIMESTAMP: ("timestamp[us, tz=", "timestamp[ms, tz="),
    Kind.INT: ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
    Kind.REAL: ("double", "float"),
    Kind.TEXT: ("string", "large_string", "dictionary<values=string"),
    Kind.FLAG: ("bool",),
}
"""Types in a file that are read, by Spark too, as the type of the table without loss."""
CODECS: Final = frozenset({"UNCOMPRESSED", "SNAPPY", "GZIP", "LZ4", "ZSTD"})
"""Compressions that Spark reads by itself."""
UNREADABLE: Final = "unreadable file"
"""Problem of a file that cannot be opened now, but may be later."""
STRANGE: Final = "no file of the folder"
"""Problem of a path that is not opened: a pipe, a device, a link that leads out of the folder."""
DAMAGED: Final = "damaged"
"""Problem of a file with a sound footer and pages that cannot be read."""
_ARROW: Final = {
    kind: pa.timestamp("us", tz="UTC") if kind is Kind.TIMESTAMP else pa.type_for_alias(name)
    for kind, name in ARROW_TYPES.items()
}


class Facts(NamedTuple):
    """Facts about a file."""

    path: str  # as the file system names it
    problem: str | None = None  # why it is put aside whole; None: it is used
    detail: str | None = None  # more of it
    rows: int | None = None  # None: it has no footer
    size_bytes: int = 0
    identity: str = ""  # the same for copies
    node: str | None = None  # whose they are, where its statistics tell of one only
    first_seq: int | None = None  # least `seq`; None where they do not tell
    last_seq: int | None = None
    recorded: bool = False  # a recorder wrote it, so that its `seq` is in order
    newest_us: int | None = None  # time of its newest record that can be used; None: nothing tells
    misspelt: bool = False  # it has a column whose name differs from one of the table in case alone
    reasons: dict[str, int] = {}  # noqa: RUF012 - never changed; rows that cannot be used, by reason

    @property
    def usable(self) -> bool:
        return self.problem is None and sum(self.reasons.values()) < (self.rows or 0)


def facts_of(system: Any, path: str, table: str, hour: Hour | None, now_us: int, *, whole: bool = False) -> Facts:
    """Return the facts of a file, never raising for what is wrong with it."""
    size_bytes = None
    try:
        with system.open_input_file(path) as source:
            if (size_bytes := source.size()) == 0:
                return Facts(path, "empty file", "0 bytes")
            file = opened(source, table)
            facts, columns = _footer(file, source, Facts(path, size_bytes=size_bytes), table)
            if facts.problem is None:
                checks = checks_of(table, hour, now_us)
                checks = tuple(check for check in checks if not _proved(check, columns))
                if name := _bomb(file.metadata, {check.column for check in checks}):
                    detail = f"{name} unpacks to more than {MOST_UNPACKED_BYTES >> 20} MiB"
                    return facts._replace(problem="too large unpacked", detail=detail)
                facts = _looked(facts, file, table, checks)
                if whole and (damage := _damage(file, table)):
                    return facts._replace(problem=DAMAGED, detail=damage)
            return facts
    except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds; whatever it is, the file is put aside
        problem = UNREADABLE if size_bytes is None else "not Parquet or damaged"
        return Facts(path, problem, _line(error), size_bytes=size_bytes or 0)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _damage(file: Any, table: str) -> str | None:
    """Return why some rows of an open file cannot be read; None: all can, or the system is at fault."""
    try:
        for piece in pieces(file, table, TABLES[table].names):
            piece.validate(full=True)  # DuckDB reads no text that is not UTF-8
    except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds
        return None if getattr(error, "errno", None) else _line(error)
    return None


def _footer(file: Any, source: Any, facts: Facts, table: str) -> tuple[Facts, dict[str, Bounds]]:
    """Return what the footer of an open file tells, and its statistics of each column."""
    footer = file.metadata
    metadata = {key.decode("utf-8", "replace"): value for key, value in (footer.metadata or {}).items()}
    uid = metadata.get(f"{METADATA_PREFIX}uid", b"").decode("utf-8", "replace")
    begin = facts.size_bytes - footer.serialized_size - 8
    columns, end, codecs = _bounds(footer, table)
    nothing = Bounds(0, 0, None, None)
    seq, node, ts = (columns.get(name, nothing) for name in ("seq", "node", "ts"))
    # The uid is not enough: tools that split a file keep its metadata in each part.
    identity = f"uid {uid}, {footer.num_rows} rows, seq {seq.low} to {seq.high}"
    if not uid:
        source.seek(begin)
        identity = f"{facts.size_bytes} {hashlib.sha256(source.read()).hexdigest()}"
    number = metadata.get(f"{METADATA_PREFIX}format")
    problem, detail = _problem(file.schema_arrow, table, metadata.get(f"{METADATA_PREFIX}table"))
    if number not in (None, str(FORMAT).encode()):  # a tool may have dropped the metadata
        problem, detail = "other format", f"format {number!r}, this flowctl reads {FORMAT}"
    if problem is None and not codecs <= CODECS:
        problem, detail = "unknown codec", f"it is compressed by {', '.join(sorted(codecs - CODECS))}"
    most = min(MOST_ROWS, most_rows(facts.size_bytes)) if table == FLIGHT.name else MOST_ROWS
    if problem is None and footer.num_rows > most:
        problem, detail = "too many rows", f"it has {footer.num_rows} rows, {most} are read at most"
    if problem is None and end > begin:
        problem, detail = "not Parquet or damaged", "a part of it is missing: its footer speaks of more than is there"
    facts = facts._replace(
        problem=problem,
        detail=detail and detail[:300],
        rows=footer.num_rows,
        identity=identity,
        node=node.low if node.low == node.high else None,
        first_seq=seq.low,
        last_seq=seq.high,
        recorded=bool(uid),
        misspelt=any(name.lower() in TABLES[table].names and name != name.lower() for name in file.schema_arrow.names),
        newest_us=ts.high,
    )
    return facts, columns


def _bounds(footer: Any, table: str) -> tuple[dict[str, Bounds], int, set[str]]:
    """Return what a footer says of each column, where the last of what it speaks of ends, and how that is packed."""
    times = {column.name for column in TABLES[table].columns if column.kind is Kind.TIMESTAMP}
    bounds: dict[str, Bounds] = {}
    end = 0
    codecs = set()
    groups = [group for number in range(footer.num_row_groups) if (group := footer.row_group(number)).num_rows]
    for index, name in enumerate(footer.schema.names):
        nulls: int | None = 0
        spans: list[tuple[Any, Any]] = []
        for chunk in (group.column(index) for group in groups if index < group.num_columns):
            codecs.add(chunk.compression)
            end = max(end, (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size)
            statistics = chunk.statistics if name in TABLES[table].names else None
            none = statistics.null_count if statistics is not None and statistics.has_null_count else None
            nulls = None if nulls is None or none is None else nulls + none
            if none == chunk.num_values:
                continue
            if statistics is None or not statistics.has_min_max:
                spans.append((None, None))
            elif name in times and statistics.physical_type == "INT64":  # raw values: not every one is a time of Python
                factor = 1000 if "milliseconds" in str(statistics.logical_type) else 1
                spans.append((statistics.min_raw * factor, statistics.max_raw * factor))
            else:
                spans.append((statistics.min, statistics.max))
        known = spans and all(low is not None for low, _ in spans)
        low, high = (min(low for low, _ in spans), max(high for _, high in spans)) if known else (None, None)
        bounds[name] = Bounds(footer.num_rows, nulls, low, high)
    return bounds, end, codecs


def _problem(schema: Any, table: str, named: bytes | None) -> tuple[str | None, str | None]:
    """Return why the whole file does not fit the table, and the details; (None, None) if it does."""
    if named is not None and named != table.encode():
        return "of another table", f"it says it holds {named.decode('utf-8', 'replace')!r}"
    columns = TABLES[table].columns
    types = {field.name: str(field.type) for field in schema}
    missing = [column.name for column in columns if not column.nullable and column.name not in types]
    if missing:
        return "foreign schema", f"it has no column {', '.join(missing[:5])}"
    there = ((column.name, types.get(column.name), _FITTING[column.kind]) for column in columns)
    wrong = [f"{name} is {kind}" for name, kind, fitting in there if kind and not kind.startswith(fitting)]
    return ("wrong types", "; ".join(wrong[:5])) if wrong else (None, None)


def _proved(check: Check, columns: dict[str, Bounds]) -> bool:
    """Return whether no row fails; a column that is not there is null, which only required ones may not be."""
    return check.column not in columns or check.proved(columns[check.column])


def _looked(facts: Facts, file: Any, table: str, checks: Sequence[Check]) -> Facts:
    bad = Counter[str]()
    names = dict.fromkeys(check.column for check in checks)
    for rows in pieces(file, table, list(names)) if checks else ():
        bad.update(reasons(rows, checks).drop_null().to_pylist())
    if not bad:
        return facts
    newest = []
    for rows in pieces(file, table, list(names | {"ts": None})):
        usable = rows["ts"].filter(pc.is_null(reasons(rows, checks)))
        newest.append(pc.max(usable.cast(pa.int64())).as_py())
    known = [moment for moment in newest if moment is not None]
    return facts._replace(reasons=dict(bad), newest_us=max(known, default=None))


def _bomb(footer: Any, names: Collection[str]) -> str | None:
    """Return one of the columns that unpacks to more than it should; None: none does."""
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    chunks = (group.column(index) for group in groups for index in range(group.num_columns))
    large = (chunk for chunk in chunks if chunk.total_uncompressed_size > MOST_UNPACKED_BYTES)
    return next((chunk.path_in_schema for chunk in large if chunk.path_in_schema in names), None)


def check_footer(source: Any) -> None:
    """See that the footer of an open file can be read, by what the last octets say of its length."""
    source.seek(max(source.size() - 8, 0))
    size_bytes = int.from_bytes(source.read(4), "little")
    source.seek(0)
    if MOST_FOOTER_BYTES < size_bytes < source.size():
        raise ValueError(f"its footer has {size_bytes} bytes, {MOST_FOOTER_BYTES} are read at most")


def opened(source: Any, table: str) -> Any:
    """Return a Parquet file whose columns of words are read as they are stored: one long text may stand in each row."""
    check_footer(source)
    footer = pq.read_metadata(source)
    words = [name for name in footer.schema.names if name in WORDED[table]]
    return pq.ParquetFile(
        source, metadata=footer, pre_buffer=False, read_dictionary=words, page_checksum_verification=True
    )


def _typed(values: Any, kind: Any) -> Any:
    """Return a column in a type of the table; of words, if stored as a dictionary, as much as tells them apart."""
    if not pa.types.is_dictionary(values.type):
        return values.cast(kind)
    words = pc.utf8_slice_codeunits(values.dictionary.cast(kind), 0, _MOST_WORD_CHARS)
    return pc.take(words, values.indices)


def pieces(file: Any, table: str, names: Sequence[str]) -> Iterator[Any]:
    """Yield the columns of an open Parquet file in pieces, in the types of the table; one that is not there is null."""
    kinds = {column.name: _ARROW[column.kind] for column in TABLES[table].columns}
    found = set(file.schema_arrow.names)
    there = [name for name in names if name in found]
    for batch in file.iter_batches(BATCH_ROWS, columns=there, use_threads=False):
        columns = {name: _typed(batch.column(name), kinds[name]) for name in there}
        yield pa.table({name: columns.get(name, pa.nulls(batch.num_rows, kinds[name])) for name in names})
