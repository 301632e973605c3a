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
        rows = iter(self.toArrow().to_batches())

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
        """Return what a Python function makes of the rows of each group."""
        session, names = self.frame.sparkSession, ", ".join(self.names)
        sql = f"SELECT * FROM ({self.frame.sql}) ORDER BY {names}"
        rows = DataFrame(session, sql, self.frame.sources).toArrow()
        keys = zip(*(rows[name].to_pylist() for name in self.names), strict=True)

        def made() -> Iterator[Any]:
            begin = 0
            for _, group in itertools.groupby(keys):
                length = sum(1 for _ in group)
                yield from make(rows.slice(begin, length)).to_batches()
                begin += length

        return self.frame._made(made(), ddl)  # noqa: SLF001 - the other half of a frame
