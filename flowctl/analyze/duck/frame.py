"""DataFrames of Spark on DuckDB: a SELECT, and the Python functions between two of them.

A frame is text until its rows are asked for; steps nest as subqueries, which DuckDB takes apart again. Spark's hints of
where rows go (`repartition`, `broadcast`) mean nothing here. Sums of whole numbers are wider than 64 bits up to where
rows leave: there they fit, or the query fails.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowctl.analyze.duck.functions import Column, col, expr, quoted, sorted_by
from flowctl.analyze.engine import EngineError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_JOINS = {"left_semi": "SEMI", "left_anti": "ANTI", "full_outer": "FULL"}


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


@dataclass(slots=True)
class Observation:
    """Figures of a frame, for `DataFrame.observe`."""

    get: dict[str, Any] = field(default_factory=dict)


def _of(item: Any) -> Column:
    return item if isinstance(item, Column) else col(item)


def _as(item: Column) -> str:
    if item.inlined:
        return item.sql
    return f"{item.sql} AS {quoted(item.name)}" if item.name else item.sql


def _flat(items: Iterable[Any]) -> list[Any]:
    return [one for item in items for one in (item if isinstance(item, (list, tuple)) else [item])]


@dataclass(frozen=True, slots=True, eq=False)
class DataFrame:
    """Rows that a query gives."""

    sparkSession: Any  # a `DuckSession`
    sql: str
    names: tuple[str, ...] | None = None  # of the columns; None: the database knows
    sources: Mapping[str, Any] = field(default_factory=dict)  # tables and datasets of Arrow, by the names in the query

    @property
    def columns(self) -> list[str]:
        return list(self.sparkSession.schema(self) if self.names is None else self.names)

    def _next(self, sql: str, names: Iterable[str] | None, *others: DataFrame) -> DataFrame:
        sources = {name: one for frame in (self, *others) for name, one in frame.sources.items()}
        return DataFrame(self.sparkSession, sql, None if names is None else tuple(names), sources)

    def select(self, *items: Any) -> DataFrame:
        parts: list[Column] = []
        for item in _flat(items):
            parts += map(col, self.columns) if isinstance(item, str) and item == "*" else [_of(item)]
        return self._selected(parts, "")

    def _selected(self, parts: Sequence[Column], more: str) -> DataFrame:
        names = [name for item in parts for name in (item.fields if item.inlined else (item.name,))]
        known = all(item.fields if item.inlined else item.name for item in parts)
        sql = f"SELECT {', '.join(map(_as, parts))} FROM ({self.sql}) {more}"
        return self._next(sql, names if known else None)

    def selectExpr(self, *texts: str) -> DataFrame:
        found: DataFrame = self.sparkSession.of_text(f"SELECT {', '.join(texts)} FROM rows", {"rows": self})
        return found

    def withColumns(self, columns: Mapping[str, Column]) -> DataFrame:
        there = self.columns
        changed = ", ".join(_as(item.alias(name)) for name, item in columns.items() if name in there)
        every = f"* REPLACE ({changed})" if changed else "*"
        new = [item.alias(name) for name, item in columns.items() if name not in there]
        sql = f"SELECT {', '.join([every, *map(_as, new)])} FROM ({self.sql})"
        return self._next(sql, (*there, *(item.name for item in new)))

    def withColumn(self, name: str, column: Column) -> DataFrame:
        return self.withColumns({name: column})

    def withColumnRenamed(self, old: str, new: str) -> DataFrame:
        return self.select(*(col(name).alias(new if name == old else name) for name in self.columns))

    def drop(self, *names: str) -> DataFrame:
        return self.select(*(name for name in self.columns if name not in names))

    def filter(self, condition: Column) -> DataFrame:
        return self._next(f"SELECT * FROM ({self.sql}) WHERE {condition.sql}", self.names)

    where = filter

    def groupBy(self, *items: Any) -> GroupedData:
        keys = [_of(item) for item in _flat(items)]
        more = f"GROUP BY {', '.join(str(place + 1) for place in range(len(keys)))}" if keys else ""
        return GroupedData(self, keys, more)

    def groupingSets(self, sets: Sequence[Sequence[str]], *items: Any) -> GroupedData:
        groups = ", ".join(f"({', '.join(map(quoted, group))})" for group in sets)
        return GroupedData(self, [_of(item) for item in items], f"GROUP BY GROUPING SETS ({groups})")

    def agg(self, *items: Column) -> DataFrame:
        return self.groupBy().agg(*items)

    def join(self, other: DataFrame, on: str | Sequence[str], how: str = "inner") -> DataFrame:
        keys = [on] if isinstance(on, str) else list(on)
        using = f"USING ({', '.join(map(quoted, keys))})"
        sql = f"FROM ({self.sql}) AS _l {_JOINS.get(how, how)} JOIN ({other.sql}) AS _r {using}"
        left = [name for name in self.columns if name not in keys]
        if how in ("left_semi", "left_anti"):
            return self._next(f"SELECT _l.* {sql}", self.names, other)
        right = [name for name in other.columns if name not in keys]
        names = [*keys, *left, *right]
        parts = (*map(quoted, keys), *(f"_l.{quoted(name)}" for name in left), *(f"_r.{quoted(x)}" for x in right))
        return self._next(f"SELECT {', '.join(parts)} {sql}", names, other)

    def union(self, other: DataFrame) -> DataFrame:
        return self._next(f"({self.sql}) UNION ALL ({other.sql})", self.names, other)

    def unionByName(self, other: DataFrame, *, allowMissingColumns: bool = False) -> DataFrame:
        ours, theirs = self.columns, other.columns
        names = [*ours, *(name for name in theirs if name not in ours)]
        if {*ours} != {*theirs} and not allowMissingColumns:
            raise ValueError(f"columns differ: {sorted({*ours} ^ {*theirs})}")
        return self._next(f"({self.sql}) UNION ALL BY NAME ({other.sql})", names, other)

    def distinct(self) -> DataFrame:
        return self._next(f"SELECT DISTINCT * FROM ({self.sql})", self.names)

    def orderBy(self, *items: Any) -> DataFrame:
        return self._next(f"SELECT * FROM ({self.sql}) ORDER BY {sorted_by(_flat(items))}", self.names)

    sort = sortWithinPartitions = orderBy

    def limit(self, count: int) -> DataFrame:
        return self._next(f"SELECT * FROM ({self.sql}) LIMIT {count}", self.names)

    def repartition(self, *_: Any) -> DataFrame:
        return self

    coalesce = repartition

    def fillna(self, values: Mapping[str, Any]) -> DataFrame:
        from flowctl.analyze.duck.functions import coalesce, lit

        return self.withColumns({name: coalesce(name, lit(value)) for name, value in values.items()})

    def persist(self) -> DataFrame:
        """Make the rows now, and keep them up to the end of the run."""
        kept: DataFrame = self.sparkSession.kept(self)
        return kept

    cache = localCheckpoint = persist

    def observe(self, observation: Observation, *items: Column) -> DataFrame:
        kept = self.persist()
        observation.get = kept.agg(*items).collect()[0].asDict()
        return kept

    def mapInArrow(self, make: Callable[[Iterator[Any]], Iterator[Any]], ddl: str) -> DataFrame:
        """Return what a Python function makes of all rows: here and now, in one call."""
        rows = iter(self.toArrow().to_batches())

        def made() -> Iterator[Any]:
            yield from make(rows)

        return _of_table(self, made(), ddl)

    def toArrow(self) -> pa.Table:
        return self.sparkSession.arrow(self)

    def toPandas(self) -> pd.DataFrame:
        return self.toArrow().to_pandas()

    def collect(self) -> list[Row]:
        found = self.toArrow()
        kind = type("Row", (Row,), {"names": tuple(found.column_names)})
        columns = [
            [_plain(value) for value in column.to_pylist()] if column.num_chunks else [] for column in found.columns
        ]
        return [kind(row) for row in zip(*columns, strict=True)]

    def first(self) -> Row | None:
        return next(iter(self.limit(1).collect()), None)

    def head(self, count: int) -> list[Row]:
        return self.limit(count).collect()

    def count(self) -> int:
        return int(self.agg(expr("count(*) as count")).collect()[0][0])

    def save(self, columns: Mapping[str, str], path: str, *by: str) -> None:
        """Write these columns in these types as Parquet, in folders by the columns `by`."""
        self.sparkSession.write(self, columns, path, by)


def _plain(value: Any) -> Any:
    """Return a struct as a tuple, and a time without its zone, as rows of Spark have them."""
    if isinstance(value, dict):
        return tuple(value.values())
    return value.replace(tzinfo=None) if isinstance(value, dt.datetime) else value


def _of_table(frame: DataFrame, batches: Iterable[Any], ddl: str) -> DataFrame:
    import pyarrow as pa

    from flowctl.analyze.job import arrow_schema

    schema = arrow_schema(dict(item.replace("`", "").split(" ", 1) for item in ddl.split(", ")))
    try:
        tables = [pa.Table.from_batches([batch]).select(schema.names).cast(schema) for batch in batches]
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise DuckError(f"DuckDB failed: in Python: {type(error).__name__}: {line}"[:400]) from error
    rows = pa.concat_tables(tables) if tables else schema.empty_table()
    found: DataFrame = frame.sparkSession.createDataFrame(rows)
    return found


@dataclass(frozen=True, slots=True)
class GroupedData:
    """Rows of a frame by groups."""

    frame: DataFrame
    keys: Sequence[Column]
    more: str  # of the query

    def agg(self, *items: Column) -> DataFrame:
        return self.frame._selected([*self.keys, *items], self.more)  # noqa: SLF001 - the other half of a frame

    def count(self) -> DataFrame:
        return self.agg(expr("count(*) as count"))

    def applyInArrow(self, make: Callable[[Any], Any], ddl: str) -> DataFrame:
        """Return what a Python function makes of the rows of each group."""
        names = [item.name for item in self.keys]
        rows = self.frame.orderBy(*self.keys).toArrow()
        keys = zip(*(rows[name].to_pylist() for name in names), strict=True)

        def made() -> Iterator[Any]:
            begin = 0
            for _, group in itertools.groupby(keys):
                length = sum(1 for _ in group)
                yield from make(rows.slice(begin, length)).to_batches()
                begin += length

        return _of_table(self.frame, made(), ddl)
