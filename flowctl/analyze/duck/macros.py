"""Functions of Spark that DuckDB lacks or means otherwise, as macros named ``spark_<name>``.

A macro with several bodies goes by the types of its arguments. Times are TIMESTAMP, in UTC: functions of TIMESTAMPTZ
ask a calendar for every value. What Spark keeps as a sketch of quantiles is the list of all values here
(FLOAT[]): exact, and small enough for what one machine is given.
"""

from __future__ import annotations

from typing import Final

TYPES: Final = {
    "string": "VARCHAR", "bigint": "BIGINT", "int": "INTEGER", "double": "DOUBLE", "float": "FLOAT",
    "boolean": "BOOLEAN", "timestamp": "TIMESTAMP", "binary": "FLOAT[]",
}  # fmt: skip
"""Type of Spark -> type here."""

LAST: Final = (1 << 63) - 1

MACROS: Final = {
    "array_distinct": "(l) AS list_distinct(l) || CASE WHEN list_count(l) < len(l) THEN [NULL] ELSE [] END",
    "array_repeat": "(x, n) AS list_transform(range(CAST(n AS BIGINT)), lambda _i: x)",
    # Texts are tried: what `when` keeps from rows may be asked of them all the same.
    # Of a number with a fraction Spark's casts take the whole part, and DuckDB's the nearest.
    "bigint": """(x BIGINT) AS x, (x DOUBLE) AS CAST(trunc(x) AS BIGINT), (x HUGEINT) AS CAST(x AS BIGINT),
        (x BOOLEAN) AS CAST(x AS BIGINT), (x VARCHAR) AS TRY_CAST(x AS BIGINT)""",
    "ceil": "(x) AS CAST(ceil(x) AS BIGINT)",
    "concat_ws": "(s, x VARCHAR) AS coalesce(x, ''), (s, x VARCHAR[]) AS coalesce(array_to_string(x, s), '')",
    "conv": "(x, a, b) AS CAST(CAST('0x' || x AS BIGINT) AS VARCHAR)",  # of base 16 to base 10
    "double": "(x DOUBLE) AS x, (x TIMESTAMP) AS epoch_us(x) / 1e6, (x BOOLEAN) AS CAST(x AS DOUBLE), "
    "(x VARCHAR) AS TRY_CAST(x AS DOUBLE)",
    "floor": "(x) AS CAST(floor(x) AS BIGINT)",
    "from_json": "(x, t) AS TRY_CAST(TRY_CAST(x AS JSON) AS MAP(VARCHAR, DOUBLE))",
    "get": "(l, i) AS l[i + 1]",
    "kll_merge_agg_float": "(x) AS list_sort(flatten(list(x) FILTER (WHERE x IS NOT NULL)))",
    "kll_sketch_agg_float": "(x, k) AS list(x) FILTER (WHERE x IS NOT NULL)",  # sorted once, by the merge
    "kll_sketch_get_n_float": "(x) AS len(x)",
    # The rank of the library that Spark uses, Apache DataSketches: inclusive, rounded to seven digits.
    "kll_sketch_get_quantile_float": "(x, q) AS x[CAST(ceil(round(q * len(x), 7)) AS BIGINT)]",
    "log": "(x) AS ln(x)",
    "nvl": "(a, b) AS coalesce(a, b)",
    "sequence": "(a, b) AS generate_series(a, b), (a, b, c) AS generate_series(a, b, c)",
    "shiftright": "(x, n) AS x >> n",
    "size": "(l) AS len(l)",
    "split": "(x, p) AS str_split_regex(x, p)",
    "substring_index": "(x, d, n) AS array_to_string(str_split(x, d)[1:n], d)",
    "timestamp_micros": "(x) AS make_timestamp(CAST(x AS BIGINT))",
    "timestamp_seconds": "(x) AS make_timestamp(CAST(x * 1000000 AS BIGINT))",
    # Without nulls; what is no number in quotes: only that of a name stands before a colon without a backslash.
    "to_json": r"""(x) AS regexp_replace(CAST(json_merge_patch('{}', to_json(x)) AS VARCHAR),
        '([a-z0-9_]":)(NaN|-?Infinity)([,}])', '\1"\2"\3', 'g')""",
    "try_sum": f"(x) AS CAST(CASE WHEN sum(x) <= {LAST} THEN sum(x) END AS BIGINT)",
    "try_divide": "(a, b) AS CASE WHEN b <> 0 THEN a / b END",
    "unix_micros": "(x) AS epoch_us(x)",
    "unix_timestamp": "(x) AS epoch_us(x) // 1000000",
}  # fmt: skip
"""Name -> parameters and body."""
