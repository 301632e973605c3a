"""Compares two tables of `sessions`, of Spark and of DuckDB: every value, or for the largest sizes rows and sums.

DuckDB does it, because tables of ten million rows and sixty columns are no work for Python. Floats are compared with
nine digits: a sum of floats depends on the order in which it is added up, and the two engines have another one each.
"""

from __future__ import annotations

from typing import Any, Final

DIGITS: Final = 9
KEYS: Final = ("node", "conn_id", "date", "hour")
"""Columns that tell rows apart; hours are those of the folders, where a table lies in such."""


def difference(left: str, right: str, *, whole: bool) -> dict[str, Any]:
    """Compare."""
    import duckdb

    connection = duckdb.connect()
    connection.execute("set threads=2; set enable_progress_bar=false")
    connection.execute("set timezone='UTC'")
    for name, path in (("a", left), ("b", right)):
        files = f"read_parquet('{path}/**/*.parquet', hive_partitioning = true, hive_types_autocast = false)"
        connection.execute(f"create view {name} as select * from {files}")
    kinds = {name: _kinds(connection, name) for name in ("a", "b")}
    rows = _one(connection, "select count(*) from a")
    found = ""
    if kinds["a"].keys() != kinds["b"].keys():
        found = f"columns {sorted(kinds['a'].keys() ^ kinds['b'].keys())} are on one side only"
    elif rows != _one(connection, "select count(*) from b"):
        found = f"{rows} rows on one side, {_one(connection, 'select count(*) from b')} on the other"
    else:
        found = _values(connection, kinds["a"]) if whole else _column_sums(connection, kinds["a"])
    return {"rows": rows, "whole": whole, "difference": found}


def _one(connection: Any, query: str) -> Any:
    return connection.execute(query).fetchone()[0]


def _kinds(connection: Any, table: str) -> dict[str, str]:
    return {row[0]: row[1] for row in connection.execute(f"describe {table}").fetchall()}


def _close(name: str) -> str:
    """Return the condition under which two floats count as the same."""
    a, b = f'a."{name}"', f'b."{name}"'
    return f"({a} is not distinct from {b} or abs({a} - {b}) <= 1e-{DIGITS} * greatest(abs({a}), abs({b})))"


def _values(connection: Any, kinds: dict[str, str]) -> str:
    """Join by key and count, column by column, the rows that differ."""
    keys = [name for name in kinds if name in KEYS]
    names = [name for name in kinds if name not in KEYS]
    same = {
        name: _close(name) if kinds[name] in {"DOUBLE", "FLOAT"} else f'a."{name}" is not distinct from b."{name}"'
        for name in names
    }
    counts = ", ".join(f"count(*) filter (not coalesce({condition}, false))" for condition in same.values())
    query = f"select count(*), {counts} from a join b using ({', '.join(keys)})"
    joined, *differ = connection.execute(query).fetchone()
    if joined != _one(connection, "select count(*) from a"):
        return f"only {joined} connections are in both"
    wrong = {name: count for name, count in zip(names, differ, strict=True) if count}
    return ", ".join(f"{name} in {count} rows" for name, count in wrong.items())


def _column_sums(connection: Any, kinds: dict[str, str]) -> str:
    for name, kind in kinds.items():
        number = any(word in kind for word in ("INT", "DOUBLE"))
        what = f'count("{name}")' + (f', sum("{name}"::double)' if number else "")
        one, other = (connection.execute(f"select {what} from {table}").fetchone() for table in ("a", "b"))
        if one[0] != other[0] or (number and abs((one[1] or 0) - (other[1] or 0)) > 1e-6 * abs(one[1] or 0)):
            return f"{name}: {one} and {other}"
    return ""
