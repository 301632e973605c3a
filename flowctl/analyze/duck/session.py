"""A database in this process for one run: reading and writing Parquet, queries, errors in one line.

Threads have cursors of their own; what they share are macros and the tables of `DataFrame.persist`. What does not fit
into memory goes to a folder of the run. Names are those that jobs call on a session of Spark.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb

from flowctl.analyze.duck.dialect import translated
from flowctl.analyze.duck.frame import DataFrame, DuckError
from flowctl.analyze.duck.macros import MACROS, TYPES
from flowctl.analyze.engine import duckdb_bytes, machine_bytes

ROW_GROUP: Final = 122_880
_PIECE_ROWS: Final = 1 << 16
"""Rows that leave at a time where they are taken piece by piece."""
_GONE: Final = re.compile(r"No files found|[Cc]annot open file")
_GONE_HINT: Final = (
    "a file went away while it was read: the recorder removes its oldest files at events_max of disk; "
    "copy the folder first, or raise events_max"
)


class DuckSession:
    """An open database, in memory."""

    def __init__(self) -> None:
        memory = f"{duckdb_bytes(machine_bytes()) >> 20}MiB"  # by itself it takes 80 % of what is there
        settings: dict[str, Any] = {"threads": self.defaultParallelism, "memory_limit": memory}
        settings |= {"enable_external_file_cache": False}  # a file that is damaged later would be the one that was read
        # Nothing is fetched from the network: what is used comes with the package.
        settings |= {"preserve_insertion_order": False, "autoinstall_known_extensions": False}
        self._database = duckdb.connect(":memory:", config=settings)
        self._database.execute(";".join(f"CREATE MACRO spark_{name}{body}" for name, body in MACROS.items()))
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._running: set[Any] = set()  # guarded by _lock
        self._kept: dict[str, DataFrame] = {}  # by the query; guarded by _lock

    def spill_to(self, folder: str) -> None:
        """Say where rows go that do not fit into memory."""
        self._database.execute(f"SET temp_directory = {_text(folder)}")

    # -- what a session of Spark has

    @property
    def sparkContext(self) -> DuckSession:
        return self

    @property
    def catalog(self) -> DuckSession:
        return self

    @property
    def defaultParallelism(self) -> int:
        return len(os.sched_getaffinity(0))

    def cancelAllJobs(self) -> None:
        with self._lock:
            for cursor in self._running:
                cursor.interrupt()

    def clearCache(self) -> None:
        """Forget the rows that were kept."""
        with self._lock:
            self._kept.clear()
        with self._cursor({}) as cursor:
            for (name,) in cursor.execute("SELECT table_name FROM duckdb_tables()").fetchall():
                cursor.execute(f"DROP TABLE {quoted(name)}")

    @property
    def read(self) -> DuckSession:
        return self

    def parquet(self, path: str) -> DataFrame:
        from pyarrow import dataset

        return self._of_arrow(dataset.dataset(path, format="parquet"))

    def stop(self) -> None:
        self._database.close()

    def createDataFrame(self, rows: Any, ddl: str | None = None) -> DataFrame:
        """Return rows, tuples with a schema or a table of Arrow or pandas, as a frame."""
        import pyarrow as pa

        from flowctl.analyze.job import arrow_schema

        if ddl is not None:
            kinds = dict(item.replace("`", "").split(" ", 1) for item in ddl.split(", "))
            columns = list(zip(*rows, strict=True)) or [()] * len(kinds)
            rows = pa.table(dict(zip(kinds, map(list, columns), strict=True)), arrow_schema(kinds))
        elif not isinstance(rows, pa.Table):
            rows = pa.Table.from_pandas(rows, preserve_index=False)
        return self._of_arrow(rows)

    def of_text(self, text: str, inputs: Mapping[str, DataFrame]) -> DataFrame:
        """Return the rows of a query of Spark; see `flowctl.analyze.models`."""
        named = ", ".join(f"{quoted(name)} AS NOT MATERIALIZED ({frame.sql})" for name, frame in inputs.items())
        sources = {name: one for frame in inputs.values() for name, one in frame.sources.items()}
        return DataFrame(self, f"WITH {named} {translated(f'SELECT * FROM ({text})')}", sources)

    def _of_arrow(self, rows: Any) -> DataFrame:
        name = f"_rows{next(self._numbers)}"
        kinds = {field.name: str(field.type) for field in rows.schema}
        parts = (
            f"make_timestamp(epoch_us({quoted(x)})) AS {quoted(x)}" if kind.startswith("timestamp") else quoted(x)
            for x, kind in kinds.items()
        )
        return DataFrame(self, f"SELECT {', '.join(parts)} FROM {name}", {name: rows})

    # -- Parquet

    def files(self, files: Sequence[str], kinds: Mapping[str, str], by: Sequence[str] = ()) -> DataFrame:
        """Return rows of files on this machine; a column that a file lacks is null, `by` are of its folders."""
        # A backslash cannot be written in a pattern: whatever stands there is taken for it.
        names = ", ".join(_text(re.sub(r"([\[*?{])", r"[\1]", file).replace("\\", "?")) for file in files)
        contract = ", ".join(
            f"{_text(name)}: {{name: {_text(name)}, type: '{_stored(kind)}', default_value: NULL}}"
            for name, kind in kinds.items()
        )
        parts = [
            f"make_timestamp(epoch_us({quoted(name)})) AS {quoted(name)}" if kind == "timestamp" else quoted(name)
            for name, kind in kinds.items()
        ]
        for place, name in enumerate(by):
            inner = "".join(f"/{other}=[^/]*" for other in by[place + 1 :])
            parts.append(f"regexp_extract(filename, '/{name}=([^/]*){inner}/[^/]*$', 1) AS {quoted(name)}")
        source = f"read_parquet([{names}], schema = MAP {{{contract}}}, filename = true)"
        return DataFrame(self, f"SELECT {', '.join(parts)} FROM {source}")

    def write(self, frame: DataFrame, columns: Mapping[str, str], path: str, by: Sequence[str]) -> None:
        there = self.schema(frame)
        parts = [*(_written(name, kind, there[name]) for name, kind in columns.items()), *map(quoted, by)]
        options = f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROW_GROUP}"
        Path(path).mkdir(0o777, parents=True, exist_ok=True)
        if by:
            options += f", PARTITION_BY ({', '.join(map(quoted, by))}), FILENAME_PATTERN 'part-{{uuid}}.zstd'"
            options += ", OVERWRITE_OR_IGNORE"
        target = path if by else f"{path}/part-00000.zstd.parquet"
        with self._cursor(frame.sources) as cursor:
            cursor.execute(f"COPY (SELECT {', '.join(parts)} FROM ({frame.sql})) TO {_text(target)} ({options})")

    # -- queries

    def schema(self, frame: DataFrame) -> dict[str, str]:
        """Return the columns of a frame and their types."""
        with self._cursor(frame.sources) as cursor:
            return {row[0]: row[1] for row in cursor.execute(f"DESCRIBE {frame.sql}").fetchall()}

    def arrow(self, frame: DataFrame) -> Any:
        with self._cursor(frame.sources) as cursor:
            return _typed(cursor.execute(f"SELECT * FROM ({frame.sql})").to_arrow_table())

    def pieces(self, frame: DataFrame) -> Iterator[Any]:
        """Yield the rows as tables, as they come: what sorts them uses the disk where memory is short."""
        import pyarrow as pa

        with self._cursor(frame.sources) as cursor:
            for batch in cursor.execute(f"SELECT * FROM ({frame.sql})").to_arrow_reader(_PIECE_ROWS):
                yield _typed(pa.Table.from_batches([batch]))

    def kept(self, frame: DataFrame) -> DataFrame:
        """Make a table of a frame's rows; of a query of files alone there is one for all that ask."""
        with self._lock:
            if (found := self._kept.get(frame.sql)) is not None:
                return found
        name = f"_kept{next(self._numbers)}"
        with self._cursor(frame.sources) as cursor:
            cursor.execute(f"CREATE TABLE {name} AS {frame.sql}")
        kept = DataFrame(self, f"SELECT * FROM {name}")
        if not frame.sources:
            with self._lock:
                self._kept[frame.sql] = kept
        return kept

    @contextlib.contextmanager
    def _cursor(self, sources: Mapping[str, Any]) -> Iterator[Any]:
        cursor = self._database.cursor()
        with self._lock:
            self._running.add(cursor)
        try:
            for name, rows in sources.items():
                cursor.register(name, rows)
            yield cursor
        finally:
            with self._lock:
                self._running.discard(cursor)
            cursor.close()


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def type_of(kind: str) -> str:
    """Return the type here of a type of Spark."""
    if kind.startswith("array<"):
        return f"{type_of(kind[6:-1])}[]"
    if kind.startswith("map<"):
        return f"MAP({', '.join(map(type_of, kind[4:-1].split(',')))})"
    return TYPES[kind]


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _stored(kind: str) -> str:
    return "TIMESTAMPTZ" if kind == "timestamp" else type_of(kind)


def _written(name: str, kind: str, there: str) -> str:
    value = quoted(name)
    if kind == "timestamp":
        value = f"make_timestamptz(epoch_us({value}))" if there == "TIMESTAMP" else f"CAST({value} AS TIMESTAMPTZ)"
    elif kind in ("bigint", "int") and there in ("DOUBLE", "FLOAT"):
        value = f"CAST(trunc({value}) AS {type_of(kind)})"
    else:
        value = f"CAST({value} AS {type_of(kind)})"
    return f"{value} AS {quoted(name)}"


@contextlib.contextmanager
def session() -> Iterator[DuckSession]:
    """Open a database, map the errors of what is done with it, and close it."""
    found = DuckSession()
    try:
        with mapped_errors():
            yield found
    finally:
        found.stop()


@contextlib.contextmanager
def mapped_errors() -> Iterator[None]:
    """Within this context errors of DuckDB become a `DuckError` in one line."""
    try:
        yield
    except duckdb.Error as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:400]
        raise DuckError(f"DuckDB failed: {line}", hint=_GONE_HINT if _GONE.search(line) else None) from error


def _typed(found: Any) -> Any:
    """Return a table of Arrow with times of a zone, and sums of 64 bits."""
    import pyarrow as pa

    fields = []
    for field in found.schema:
        kind = pa.timestamp("us", "UTC") if field.type == pa.timestamp("us") else field.type
        fields.append(field.with_type(pa.int64() if pa.types.is_decimal(kind) else kind))  # a wide sum
    try:
        return found.cast(pa.schema(fields))
    except pa.ArrowInvalid as error:
        raise DuckError(f"DuckDB failed: a sum does not fit 64 bits: {error}") from error
