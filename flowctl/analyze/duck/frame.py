"""Rows that a query of DuckDB gives, with the names by which jobs ask a DataFrame of Spark for its rows.

A frame is text until then. Sums of whole numbers are wider than 64 bits up to where rows leave: there they fit, or the
query fails.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import duckdb

from flowctl.analyze.engine import EngineError

if TYPE_CHECKING:
    import pyarrow as pa


class DuckError(EngineError):
    """DuckDB could not do what it was asked; the message has the cause in one line."""


class Row(tuple[Any, ...]):
    """A row: its values in order, and by name."""

    __slots__ = ()
    names: tuple[str, ...] = ()

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.names.index(key) if isinstance(key, str) else key)

    def __getattr__(self, name: str) -> Any:
        if name not in self.names:
            raise AttributeError(name)
        return self[name]

    def asDict(self) -> dict[str, Any]:
        return dict(zip(self.names, self, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class DataFrame:
    """Rows that a query gives."""

    sparkSession: Any  # a `DuckSession`
    sql: str
    sources: Mapping[str, Any] = field(default_factory=dict)  # tables and datasets of Arrow, by the names in the query

    @property
    def columns(self) -> list[str]:
        return list(self.sparkSession.schema(self))

    def persist(self) -> DataFrame:
        """Make the rows now, and keep them up to the end of the run."""
        kept: DataFrame = self.sparkSession.kept(self)
        return kept

    def mapInArrow(self, make: Callable[[Iterator[Any]], Iterator[Any]], ddl: str) -> DataFrame:
        """Return what a Python function makes of all rows: here and now, in one call."""
        rows = (batch for piece in self.sparkSession.pieces(self) for batch in piece.to_batches())

        def made() -> Iterator[Any]:
            yield from make(rows)

        return self._made(made(), ddl)

    def groupBy(self, *names: str) -> Groups:
        return Groups(self, names)

    def _made(self, batches: Iterable[Any], ddl: str) -> DataFrame:
        import pyarrow as pa

        from flowctl.analyze.job import arrow_schema

        schema = arrow_schema(dict(item.replace("`", "").split(" ", 1) for item in ddl.split(", ")))
        try:
            tables = [pa.Table.from_batches([batch]).select(schema.names).cast(schema) for batch in batches]
        except (EngineError, duckdb.Error):
            raise
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0]
            raise DuckError(f"DuckDB failed: in Python: {type(error).__name__}: {line}"[:400]) from error
        found: DataFrame = self.sparkSession.createDataFrame(
            pa.concat_tables(tables) if tables else schema.empty_table()
        )
        return found

    def toArrow(self) -> pa.Table:
        found: pa.Table = self.sparkSession.arrow(self)
        return found

    def collect(self) -> list[Row]:
        found = self.toArrow()
        kind = type("Row", (Row,), {"names": tuple(found.column_names)})
        return [kind(map(_plain, row.values())) for row in found.to_pylist()]

    def save(self, columns: Mapping[str, str], path: str, *by: str) -> None:
        """Write these columns in these types as Parquet, in folders by the columns `by`."""
        self.sparkSession.write(self, columns, path, by)


def _plain(value: Any) -> Any:
    """Return a struct as a tuple, and a time without its zone, as rows of Spark have them."""
    if isinstance(value, dict):
        return tuple(value.values())
    return value.replace(tzinfo=None) if isinstance(value, dt.datetime) else value


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of a frame by the values of some columns."""

    frame: DataFrame
    names: tuple[str, ...]

    def applyInArrow(self, make: Callable[[Any], Any], ddl: str) -> DataFrame:
        """Return what a Python function makes of the rows of each group, of which one at a time is in memory."""
        import pyarrow as pa

        session, names = self.frame.sparkSession, ", ".join(self.names)
        rows = DataFrame(session, f"SELECT * FROM ({self.frame.sql}) ORDER BY {names}", self.frame.sources)

        def runs() -> Iterator[tuple[Any, pa.Table]]:
            for piece in session.pieces(rows):
                begin = 0
                for key, run in itertools.groupby(zip(*(piece[name].to_pylist() for name in self.names), strict=True)):
                    length = sum(1 for _ in run)
                    yield key, piece.slice(begin, length)
                    begin += length

        def made() -> Iterator[Any]:
            for _, group in itertools.groupby(runs(), key=lambda run: run[0]):
                yield from make(pa.concat_tables(part for _, part in group)).to_batches()

        return self.frame._made(made(), ddl)  # noqa: SLF001 - the other half of a frame
