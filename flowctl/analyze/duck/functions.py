"""Columns and functions of Spark as text of DuckDB's SQL.

A `Column` is a piece of SQL with the name of what it gives. Most functions have the same name in DuckDB, or are a macro
(`macros.py`): `__getattr__` makes calls of them. What is left has a form of its own.
"""

from __future__ import annotations

import datetime as dt
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from flowctl.analyze.duck.macros import MACROS, TYPES

_TEXTS: Final = {
    "concat_ws": (0,), "date_trunc": (0,), "lpad": (2,), "regexp_extract": (1,), "split": (1,),
    "substring_index": (1,), "translate": (1, 2),
}  # fmt: skip
"""Places of arguments that are texts where they are str; others are names of columns."""
_MACRO: Final = re.compile(rf"\b({'|'.join(MACROS)})(?=\()")
_names = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A value of each row."""

    sql: str
    name: str = ""
    order: str = ""  # where it is one to sort by
    fields: tuple[str, ...] = ()  # of a struct, or of an array of such; empty: not known
    inlined: bool = False  # it becomes these, a column each

    def alias(self, name: str) -> Column:
        return replace(self, name=name)

    def cast(self, kind: str) -> Column:
        if self.sql == "NULL" or kind not in ("bigint", "int", "double"):
            return Column(f"CAST({self.sql} AS {type_of(kind)})", self.name)
        number = f"spark_{'double' if kind == 'double' else 'bigint'}({self.sql})"
        return Column(f"CAST({number} AS INTEGER)" if kind == "int" else number, self.name)

    def over(self, window: WindowSpec) -> Column:
        return Column(f"{self.sql} OVER ({window.sql})", self.name)

    def when(self, condition: Column, value: Any) -> Column:
        return Column(f"{self.sql.removesuffix(' END')} WHEN {condition.sql} THEN {_value(value)} END")

    def otherwise(self, value: Any) -> Column:
        return Column(f"{self.sql.removesuffix(' END')} ELSE {_value(value)} END")

    def isin(self, *values: Any) -> Column:
        values = tuple(values[0]) if len(values) == 1 and isinstance(values[0], (list, tuple, set)) else values
        return Column(f"({self.sql} IN ({', '.join(map(_value, values))}))" if values else "FALSE")

    def isNull(self) -> Column:
        return Column(f"({self.sql} IS NULL)")

    def isNotNull(self) -> Column:
        return Column(f"({self.sql} IS NOT NULL)")

    def eqNullSafe(self, other: Any) -> Column:
        return Column(f"({self.sql} IS NOT DISTINCT FROM {_value(other)})")

    def between(self, low: Any, high: Any) -> Column:
        return Column(f"({self.sql} BETWEEN {_value(low)} AND {_value(high)})")

    def contains(self, text: Any) -> Column:
        return Column(f"contains({self.sql}, {_value(text)})")

    def startswith(self, text: Any) -> Column:
        return Column(f"starts_with({self.sql}, {_value(text)})")

    def endswith(self, text: Any) -> Column:
        return Column(f"suffix({self.sql}, {_value(text)})")

    def rlike(self, pattern: str) -> Column:
        return Column(f"regexp_matches({self.sql}, {_value(pattern)})")

    def asc(self) -> Column:
        return replace(self, order="ASC NULLS FIRST")

    def desc(self) -> Column:
        return replace(self, order="DESC NULLS LAST")

    def _with(self, sign: str, other: Any) -> Column:
        return Column(f"({self.sql} {sign} {_value(other)})")

    def _behind(self, sign: str, other: Any) -> Column:
        return Column(f"({_value(other)} {sign} {self.sql})")

    def __invert__(self) -> Column:
        return Column(f"(NOT {self.sql})")

    def __neg__(self) -> Column:
        return Column(f"(-{self.sql})")

    def __eq__(self, other: object) -> Column:  # type: ignore[override]  # as those of Spark
        return self._with("=", other)

    def __ne__(self, other: object) -> Column:  # type: ignore[override]  # as those of Spark
        return self._with("<>", other)

    def __bool__(self) -> bool:
        raise TypeError("a column has no truth: use & | ~")

    __hash__ = None  # type: ignore[assignment]  # its equality is an expression


def _operator(name: str, sign: str) -> None:
    setattr(Column, f"__{name}__", lambda self, other: self._with(sign, other))
    setattr(Column, f"__r{name}__", lambda self, other: self._behind(sign, other))


for _name, _sign in {
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "AND",
    "or": "OR",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "mod": "%",
}.items():
    _operator(_name, _sign)


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """The rows that a function of a window sees."""

    by: str = ""
    order: str = ""
    rows: str = ""

    @property
    def sql(self) -> str:
        return f"{self.by} {self.order} {self.rows}"

    def orderBy(self, *columns: Any) -> WindowSpec:
        return replace(self, order=f"ORDER BY {sorted_by(columns)}")

    def rowsBetween(self, first: int, last: int) -> WindowSpec:
        words = {Window.unboundedPreceding: "UNBOUNDED PRECEDING", 0: "CURRENT ROW"}
        words |= {Window.unboundedFollowing: "UNBOUNDED FOLLOWING"}
        return replace(self, rows=f"ROWS BETWEEN {words[first]} AND {words[last]}")


class Window:
    """Makes a `WindowSpec`."""

    unboundedPreceding, currentRow, unboundedFollowing = -(1 << 63), 0, (1 << 63) - 1

    @staticmethod
    def partitionBy(*columns: Any) -> WindowSpec:
        return WindowSpec(by=f"PARTITION BY {', '.join(_sql(item) for item in columns)}")


def type_of(kind: str) -> str:
    """Return the type here of a type of Spark."""
    if kind.startswith("array<"):
        return f"{type_of(kind[6:-1])}[]"
    if kind.startswith("map<"):
        return f"MAP({', '.join(map(type_of, kind[4:-1].split(',')))})"
    return TYPES[kind]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def sorted_by(columns: Any) -> str:
    parts = (item if isinstance(item, Column) else col(item) for item in columns)
    return ", ".join(f"{item.sql} {item.order or item.asc().order}" for item in parts)


def _value(value: Any) -> str:
    """Return a value, or a column, as SQL."""
    match value:
        case Column():
            return value.sql
        case None:
            return "NULL"
        case bool():
            return str(value).upper()
        case float():  # without an exponent it is a decimal
            text = repr(value)
            return text if "e" in text else f"{text}e0"
        case int():
            return str(value)
        case dt.datetime():
            moment = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
            return f"make_timestamp({(moment - dt.datetime.fromtimestamp(0, dt.UTC)) // dt.timedelta(microseconds=1)})"
        case _:
            return "'" + str(value).replace("'", "''") + "'"


def _sql(item: Any) -> str:
    """Return an argument as SQL: a text is the name of a column."""
    return quoted(item) if isinstance(item, str) else _value(item)


def col(name: str) -> Column:
    return Column(quoted(name), name)


def lit(value: Any) -> Column:
    return value if isinstance(value, Column) else Column(_value(value))


def expr(text: str) -> Column:
    """Return an expression of Spark's SQL, as far as jobs have such."""
    text, _, name = text.partition(" as ")
    text = re.sub(r"\b(\d+)L\b", r"\1", text.replace("`", '"'))
    return Column(_MACRO.sub(r"spark_\1", text), name.strip("`") or text.strip('"'))


def when(condition: Column, value: Any) -> Column:
    return Column(f"CASE WHEN {condition.sql} THEN {_value(value)} END")


def desc(item: Any) -> Column:
    return (item if isinstance(item, Column) else col(item)).desc()


def broadcast(frame: Any) -> Any:
    return frame


def count(item: Any) -> Column:
    return Column("count(*)" if item == "*" else f"count({_sql(item)})")


def struct(*items: Any) -> Column:
    parts = [item if isinstance(item, Column) else col(item) for item in items]
    fields = ", ".join(f"{_value(item.name)}: {item.sql}" for item in parts)
    return Column(f"{{{fields}}}", fields=tuple(item.name for item in parts))


def array(*items: Any) -> Column:
    fields = items[0].fields if isinstance(items[0], Column) else ()
    return Column(f"[{', '.join(map(_sql, items))}]", fields=fields)


def explode(item: Any) -> Column:
    return Column(f"unnest({_sql(item)})")


def inline(item: Any) -> Column:
    fields = item.fields if isinstance(item, Column) else ()
    return Column(f"unnest({_sql(item)}, max_depth := 2)", fields=fields, inlined=True)


def create_map(*items: Any) -> Column:
    keys, values = (", ".join(map(_sql, items[begin::2])) for begin in (0, 1))
    return Column(f"map([{keys}], [{values}])")


def concat(*items: Any) -> Column:
    return Column(f"({' || '.join(map(_sql, items))})")  # null with one that is


def concat_ws(separator: str, *items: Any) -> Column:
    own = "spark_concat_ws" if len(items) == 1 else "concat_ws"
    return Column(f"{own}({_value(separator)}, {', '.join(map(_sql, items))})")


def regexp_replace(item: Any, pattern: str, by: str) -> Column:
    by = re.sub(r"\$(\d)", r"\\\1", by)
    return Column(f"regexp_replace({_sql(item)}, {_value(pattern)}, {_value(by)}, 'g')")


def from_json(item: Any, kind: str) -> Column:
    return Column(f"spark_from_json({_sql(item)}, {_value(kind)})")


def make_dt_interval(*, secs: Any) -> Column:
    return Column(f"to_microseconds(CAST({_sql(secs)} * 1e6 AS BIGINT))")


def row_number() -> Column:
    return Column("row_number()")


def _lambda(make: Callable[..., Any], count: int) -> Column:
    names = [f"_v{next(_names)}" for _ in range(count)]
    return Column(f"lambda {', '.join(names)}: {_value(make(*map(Column, names)))}")


def filter(item: Any, make: Callable[[Column], Column]) -> Column:
    return Column(f"list_filter({_sql(item)}, {_lambda(make, 1).sql})")


def transform(item: Any, make: Callable[[Column], Column]) -> Column:
    return Column(f"list_transform({_sql(item)}, {_lambda(make, 1).sql})")


def aggregate(item: Any, begin: Any, make: Callable[[Column, Column], Column]) -> Column:
    return Column(f"list_reduce({_sql(item)}, {_lambda(make, 2).sql}, {_sql(begin)})")


def _call(name: str, *arguments: Any) -> Column:
    texts = _TEXTS.get(name, ())
    own = f"spark_{name}" if name in MACROS else name
    parts = (_value(item) if place in texts else _sql(item) for place, item in enumerate(arguments))
    return Column(f"{own}({', '.join(parts)})")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return partial(_call, name)
