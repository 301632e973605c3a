"""Texts of SQL mean on DuckDB what they mean on Spark, also where numbers are negative, texts odd and values null."""

from __future__ import annotations

import datetime as dt
import math

import pytest

from flowctl.analyze.engine import DUCKDB, SPARK, mapped_errors, using
from flowctl.analyze.models import run_text
from flowctl.errors import FlowctlError
from flowctl.units import parse_size

pytestmark = pytest.mark.timeout(600)
DDL = "id bigint, n bigint, x double, flag boolean, text string, at timestamp"
NOON = dt.datetime(2026, 3, 1, 12, 0, 59, 999_999, tzinfo=dt.UTC)
ROWS = [
    (1, 0, 0.0, True, "192.0.2.1", NOON),
    (2, -7, -1.5, False, "2001:db8::7", NOON - dt.timedelta(days=20_000)),
    (3, None, None, None, None, None),
    (4, 1 << 53, 2.5, True, "", NOON + dt.timedelta(hours=13)),
    (5, 3, 0.49999999999999994, None, "Täst's \x00 $1 \\", NOON),
    (6, 7, 1e15 + 0.5, False, '{"a": 1.5, "b": -7}', NOON),
    (7, (1 << 60) + 1, -2.5, True, "::ffff:10.0.0.1", NOON),
    (8, 60, 3.999, True, "{}", NOON),
    (9, 5, 1e-300, False, "a.b..c.", NOON),
]
EXPRESSIONS = {
    "floor": "floor(x)",
    "ceil": "ceil(x / 7)",
    "cast of a number with a fraction": "CAST(x AS BIGINT)",
    "cast of a whole number": "CAST(n AS BIGINT)",
    "cast of a flag": "CAST(flag AS BIGINT)",
    "cast of a time": "CAST(at AS DOUBLE)",
    "text of a time": "concat(translate(CAST(at AS STRING), ' ', 'T'), 'Z')",
    "round": "round(x)",
    "quotient of whole numbers": "n / 2",
    "quotient by zero": "try_divide(1, n)",
    "power of two": "shiftright(n, 3)",
    "least": "least(n, x, 2)",
    "greatest": "greatest(CAST(NULL AS DOUBLE), x)",
    "no value that is the greatest": "greatest(CAST(NULL AS DOUBLE), CASE WHEN n < 0 THEN x END)",
    "first known": "coalesce(text, 'none')",
    "when": "CASE WHEN x < 0 THEN 'low' WHEN flag THEN 'true' ELSE 'rest' END",
    "when, without another": "CASE WHEN flag THEN n END",
    "not": "NOT (flag AND n > 1)",
    "among": "n IN (3, 7, -7)",
    "among none": "coalesce(n IN (NULL), false)",
    "null-safe": "text <=> CAST(NULL AS STRING)",
    "joined": "concat_ws('/', text, 'a')",
    "joined alone": r"concat_ws('', split(text, r'\.'))",
    "added texts": "concat(text, 'a')",
    "pieces": r"size(split(text, r'\.'))",
    "substring": "substring(text, 2, 3)",
    "up to": "substring_index(text, '.', 2)",
    "replaced": "regexp_replace(text, '(?i)^::FFFF:([0-9.]+)$', '$1')",
    "every one replaced": r"regexp_replace(text, r'[^\w.-]', '_')",
    "found": "regexp_extract(text, '^[A-Za-z][A-Za-z0-9._-]{0,23}', 0)",
    "fits": r"text RLIKE r'^\d+\.'",
    "small letters": "lower(text)",
    "length": "length(text)",
    "begins": "startswith(text, '::')",
    "contains": "contains(text, '$1')",
    "padded": "lpad(text, 4, '0')",
    "of hexadecimal": "conv(lower(hex(CASE WHEN n > 0 THEN n END)), 16, 10)",
    "translated": "translate(text, 'ab0', 'ba9')",
    "minute": "unix_micros(date_trunc('minute', at))",
    "microseconds": "unix_micros(at)",
    "time of microseconds": "unix_micros(timestamp_micros(unix_micros(at) + 1))",
    "time of seconds": "unix_micros(timestamp_seconds(unix_micros(at) / 1e6))",
    "sequence": "size(sequence(1, CASE WHEN n BETWEEN 1 AND 60 THEN n END))",
    "filtered": r"size(filter(split(text, r'\.'), part -> part <> ''))",
    "changed": r"concat_ws('-', transform(split(text, r'\.'), part -> lpad(part, 2, '0')))",
    "repeated": "concat_ws('', array_repeat('0', CASE WHEN n = 7 THEN 7 ELSE 0 END))",
    "taken": r"get(split(text, r'\.'), 0)",
    "same each": "size(array_distinct(array(n, 3)))",
    "hashed": "CAST(conv(substring(md5(concat(text, ' ', n)), 1, 15), 16, 10) AS BIGINT)",
    "as JSON": "to_json(named_struct('a', n, 'b', flag, 'c', text, 'd', CAST(at AS STRING)))",
    "of a map": "map_values(map('viewers', n))",
}


@pytest.fixture(scope="module")
def engines(spark):
    from flowctl.analyze.duck.session import session

    with session() as database:
        yield {SPARK: spark, DUCKDB: database}


def on_both(engines, text):
    """Return what a query of the rows gives on each engine: names of columns, and rows."""
    found = []
    for name, one in engines.items():
        with using(name):
            rows = run_text(text, {"rows": one.createDataFrame(ROWS, DDL)}).toArrow()
            found.append((rows.column_names, [tuple(row.values()) for row in rows.to_pylist()]))
    return found


@pytest.fixture(scope="module")
def values(engines):
    columns = ", ".join(f"{text} AS c{place}" for place, text in enumerate(EXPRESSIONS.values()))
    (_, spark_rows), (_, duck_rows) = on_both(engines, f"SELECT id, {columns} FROM rows ORDER BY id")
    return spark_rows, duck_rows


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_function_when_values_are_odd_is_that_of_spark(values, name):
    place = 1 + [*EXPRESSIONS].index(name)
    told = [[row[place] for row in rows] for rows in values]
    assert told[0] == told[1]
    assert [type(value) for value in told[0]] == [type(value) for value in told[1]]
    assert any(value is not None for value in told[0]), "nothing is compared"


QUERIES = {
    "sorted": "SELECT id, text FROM rows ORDER BY text DESC, id",
    "sorted up": "SELECT id, x FROM rows ORDER BY x, id LIMIT 4",
    "counted": """SELECT flag, count(*) AS all, count(n) AS known, count_if(x > 0) AS more, max(at) AS at,
        count(DISTINCT text) AS texts FROM rows GROUP BY flag ORDER BY flag""",
    "summed": "SELECT sum(n) AS n, sum(id) AS id FROM rows WHERE id <> 7",
    "of nothing": "SELECT sum(n) AS n, count(*) AS all FROM rows WHERE id > 99",
    "summed beyond 64 bits": "SELECT try_sum(n * 7) AS n, try_sum(id) AS id FROM rows WHERE id IN (7, 8)",
    "sets": "SELECT flag, id, sum(x) AS x FROM rows GROUP BY GROUPING SETS ((flag), (flag, id)) ORDER BY flag, id",
    "ranked": """SELECT id, row_number() OVER (PARTITION BY flag ORDER BY n DESC, id) AS place,
        lag(n) OVER (PARTITION BY flag ORDER BY n) AS before,
        count(n) OVER (PARTITION BY flag ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS so_far
        FROM rows ORDER BY id""",
    "exploded": r"SELECT id, explode(split(text, r'\.')) AS part FROM rows ORDER BY id, part",
    "inlined": """SELECT id, name, of FROM rows LATERAL VIEW inline(array(named_struct('name', 'a', 'of', n),
        named_struct('name', 'b', 'of', 1))) each AS name, of ORDER BY id, name""",
    "semi": "SELECT id FROM rows LEFT SEMI JOIN (SELECT id FROM rows WHERE x > 0) USING (id) ORDER BY id",
    "anti": "SELECT id FROM rows LEFT ANTI JOIN (SELECT text FROM rows WHERE x > 0) USING (text) ORDER BY id",
    "with hints": """SELECT * FROM (SELECT /*+ BROADCAST(few), REPARTITION(id) */ rows.* FROM rows
        LEFT SEMI JOIN (SELECT id FROM rows WHERE id < 3) AS few USING (id)) ORDER BY id""",
    "left": """SELECT id, n, y FROM rows LEFT JOIN (SELECT id, x AS y FROM rows WHERE flag) USING (id) ORDER BY id""",
    "both": """SELECT id, a.n, coalesce(b.x, 0.5e0) AS x FROM (SELECT id, n FROM rows WHERE id < 4) AS a
        FULL JOIN (SELECT id, x FROM rows WHERE id > 2) AS b USING (id) ORDER BY id""",
    "by place": """SELECT DISTINCT * FROM (SELECT id, n FROM rows UNION ALL SELECT n, id FROM rows) ORDER BY id, n""",
    "without": "SELECT * EXCEPT (at, text), n + 1 AS m FROM rows ORDER BY id",
    "largest of groups": """SELECT flag, max_by(id, named_struct('n', n, 'id', id)) AS id,
        min(named_struct('n', n, 'id', id)) AS least FROM rows WHERE n IS NOT NULL GROUP BY ALL ORDER BY flag""",
}


@pytest.mark.parametrize("name", QUERIES)
def test_query_when_it_is_run_by_both_has_the_rows_of_spark(engines, name):
    (spark_names, spark_rows), (duck_names, duck_rows) = on_both(engines, QUERIES[name])
    assert spark_names == duck_names
    assert spark_rows == duck_rows
    assert spark_rows


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 100])
def test_quantile_when_a_sketch_has_every_value_is_that_of_spark(engines, count):
    told = ", ".join(
        f"kll_sketch_get_quantile_float(s, {share}e0) AS q{place}" for place, share in enumerate((0.5, 0.95, 0.99, 1.0))
    )
    text = f"""WITH many AS (SELECT explode(sequence(1, {count})) AS of FROM rows WHERE id = 1),
        one AS (SELECT kll_sketch_agg_float(CAST(of * 7 % {count} AS FLOAT), 1000) AS s FROM many),
        both AS (SELECT kll_merge_agg_float(s) AS s FROM (SELECT s FROM one UNION ALL SELECT s FROM one))
        SELECT kll_sketch_get_n_float(s) AS n, {told} FROM both"""
    (_, spark_rows), (_, duck_rows) = on_both(engines, text)
    assert spark_rows == duck_rows
    assert spark_rows[0][0] == 2 * count


@pytest.mark.parametrize("by", [(), ("flag", "id")])
def test_frame_when_python_makes_its_rows_has_those_of_spark(either, by):
    rows = either.createDataFrame(ROWS, DDL)
    if by:
        found = rows.groupBy(*by).applyInArrow(lambda table: table.select(["id", "x"]), "id bigint, x double")
    else:
        found = rows.mapInArrow(lambda batches: (batch.select(["id", "x"]) for batch in batches), "id bigint, x double")
    assert sorted(map(tuple, found.collect())) == sorted((row[0], row[2]) for row in ROWS)
    kept = found.persist()
    assert kept.columns == ["id", "x"]
    assert len(kept.collect()) == len(ROWS)


def test_duckdb_when_it_fails_says_so_in_one_line(engines):
    rows = engines[DUCKDB].createDataFrame(ROWS, DDL)
    with using(DUCKDB), pytest.raises(FlowctlError, match=r"^DuckDB failed: \w+ Error: [^\n]+$"), mapped_errors():
        run_text("SELECT nothing FROM rows", {"rows": rows}).collect()
    with pytest.raises(FlowctlError, match="in Python: ZeroDivisionError: "):
        rows.mapInArrow(lambda batches: iter([1 / math.floor(0.5) for _ in batches]), "id bigint")


def test_duckdb_when_a_sum_does_not_fit_fails_and_gives_no_other_number(engines):
    rows = engines[DUCKDB].createDataFrame([((1 << 62) + 1,)] * 2, "n bigint")
    with using(DUCKDB), pytest.raises(FlowctlError, match="a sum does not fit 64 bits"):
        run_text("SELECT sum(n) AS n FROM rows", {"rows": rows}).collect()


@pytest.mark.parametrize(("given_mib", "most_mib"), [(1024, 324), (1800, 900), (1 << 20, 1024)])
def test_memory_when_a_batch_system_or_a_container_gives_little_leaves_python_its_part(
    monkeypatch, given_mib, most_mib
):
    from flowctl.analyze.duck.session import session

    monkeypatch.setenv("SLURM_MEM_PER_NODE", f"{given_mib}")
    with session() as database:
        ((text,),) = database._database.execute("SELECT current_setting('memory_limit')").fetchall()
    assert 0.9 * most_mib < parse_size(text) / (1 << 20) <= most_mib
