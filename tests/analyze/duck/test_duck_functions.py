"""Functions and frames of DuckDB mean what Spark's mean, also where numbers are negative, texts odd and values null."""

from __future__ import annotations

import datetime as dt
import math

import pytest

from flowctl.analyze.engine import DUCKDB, SPARK, Observation, Window, mapped_errors, using
from flowctl.analyze.engine import functions as f
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
    "floor": lambda: f.floor(f.col("x")),
    "ceil": lambda: f.ceil(f.col("x") / 7),
    "cast of a number with a fraction": lambda: f.col("x").cast("bigint"),
    "cast of a whole number": lambda: f.col("n").cast("bigint"),
    "cast of a flag": lambda: f.col("flag").cast("bigint"),
    "cast of a time": lambda: f.col("at").cast("double"),
    "round": lambda: f.round(f.col("x")),
    "quotient of whole numbers": lambda: f.col("n") / 2,
    "quotient by zero": lambda: f.try_divide(f.lit(1), "n"),
    "rest": lambda: f.pmod("n", f.lit(5)),
    "power of two": lambda: f.shiftright("n", 3),
    "least": lambda: f.least("n", "x", f.lit(2)),
    "greatest": lambda: f.greatest(f.lit(None).cast("double"), "x"),
    "no value that is the greatest": lambda: f.greatest(f.lit(None).cast("double"), f.when(f.col("n") < 0, f.col("x"))),
    "first known": lambda: f.coalesce("text", f.lit("none")),
    "when": lambda: f.when(f.col("x") < 0, "low").when(f.col("flag"), "true").otherwise("rest"),
    "when, without another": lambda: f.when(f.col("flag"), f.col("n")),
    "not": lambda: ~(f.col("flag") & (f.col("n") > 1)),
    "among": lambda: f.col("n").isin(3, 7, -7),
    "among none": lambda: f.coalesce(f.col("n").isin([]), f.lit(False)),
    "null-safe": lambda: f.col("text").eqNullSafe(f.lit(None).cast("string")),
    "joined": lambda: f.concat_ws("/", "text", f.lit("a")),
    "joined alone": lambda: f.concat_ws("", f.split("text", r"\.")),
    "added texts": lambda: f.concat("text", f.lit("a")),
    "pieces": lambda: f.size(f.split("text", r"\.")),
    "substring": lambda: f.substring("text", 2, 3),
    "up to": lambda: f.substring_index("text", ".", 2),
    "replaced": lambda: f.regexp_replace("text", "(?i)^::FFFF:([0-9.]+)$", "$1"),
    "every one replaced": lambda: f.regexp_replace("text", r"[^\w.-]", "_"),
    "found": lambda: f.regexp_extract("text", "^[A-Za-z][A-Za-z0-9._-]{0,23}", 0),
    "fits": lambda: f.col("text").rlike(r"^\d+\."),
    "small letters": lambda: f.lower("text"),
    "length": lambda: f.length("text"),
    "begins": lambda: f.col("text").startswith("::"),
    "contains": lambda: f.col("text").contains("$1"),
    "padded": lambda: f.lpad("text", 4, "0"),
    "hexadecimal": lambda: f.hex(f.when(f.col("n") > 0, f.col("n"))),
    "of hexadecimal": lambda: f.conv(f.lower(f.hex(f.when(f.col("n") > 0, f.col("n")))), 16, 10),
    "translated": lambda: f.translate("text", "ab0", "ba9"),
    "sum of a map": lambda: f.aggregate(
        f.map_values(f.from_json("text", "map<string,double>")), f.lit(0.0), lambda one, other: one + other
    ),
    "minute": lambda: f.unix_micros(f.date_trunc("minute", "at")),
    "microseconds": lambda: f.unix_micros("at"),
    "second": lambda: f.unix_timestamp("at"),
    "time of microseconds": lambda: f.unix_micros(f.timestamp_micros(f.unix_micros("at") + 1)),
    "later": lambda: f.unix_micros(f.col("at") + f.make_dt_interval(secs=f.lit(1.5))),
    "sequence": lambda: f.size(f.sequence(f.lit(1), f.when(f.col("n").between(1, 60), f.col("n")))),
    "filtered": lambda: f.size(f.filter(f.split("text", r"\."), lambda part: part != "")),
    "changed": lambda: f.concat_ws("-", f.transform(f.split("text", r"\."), lambda part: f.lpad(part, 2, "0"))),
    "repeated": lambda: f.concat_ws("", f.array_repeat(f.lit("0"), f.when(f.col("n") == 7, 7).otherwise(0))),
    "taken": lambda: f.get(f.split("text", r"\."), f.lit(0)),
    "same each": lambda: f.size(f.array_distinct(f.array("n", f.lit(3)))),
    "least of a list": lambda: f.array_min(f.array("n", f.lit(3))),
}


@pytest.fixture(scope="module")
def engines(spark):
    from flowctl.analyze.duck.session import session

    with session() as database:
        yield {SPARK: spark, DUCKDB: database}


def on_both(engines, make):
    """Return what a function of a frame of the rows gives on each engine, as Spark's rows and as DuckDB's."""
    found = []
    for name, one in engines.items():
        with using(name):
            rows = make(one.createDataFrame(ROWS, DDL)).toArrow()
            found.append((rows.column_names, [tuple(row.values()) for row in rows.to_pylist()]))
    return found


@pytest.fixture(scope="module")
def values(engines):
    def make(frame):
        columns = (value().alias(f"c{place}") for place, value in enumerate(EXPRESSIONS.values()))
        return frame.select("id", *columns).orderBy("id")

    (_, spark_rows), (_, duck_rows) = on_both(engines, make)
    return spark_rows, duck_rows


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_function_when_values_are_odd_is_that_of_spark(values, name):
    place = 1 + [*EXPRESSIONS].index(name)
    told = [[row[place] for row in rows] for rows in values]
    assert told[0] == told[1]
    assert [type(value) for value in told[0]] == [type(value) for value in told[1]]
    assert any(value is not None for value in told[0]), "nothing is compared"


FRAMES = {
    "sorted": lambda rows: rows.select("id", "text").orderBy(f.desc("text"), "id"),
    "sorted up": lambda rows: rows.select("id", "x").orderBy("x", "id").limit(4),
    "counted": lambda rows: rows.groupBy("flag").agg(f.count("*").alias("all"), f.count("n").alias("known"),
                                                     f.count_if(f.col("x") > 0).alias("more"), f.max("at").alias("at"),
                                                     f.size(f.collect_set("text")).alias("texts")).orderBy("flag"),
    "summed": lambda rows: rows.where(f.col("id") != 7).groupBy().agg(f.sum("n").alias("n"), f.sum("id").alias("id")),
    "of nothing": lambda rows: rows.where(f.col("id") > 99).agg(f.sum("n").alias("n"), f.count("*").alias("all")),
    "sets": lambda rows: rows.groupingSets([["flag"], ["flag", "id"]], "flag", "id").agg(f.sum("x").alias("x"))
                             .orderBy("flag", "id"),
    "ranked": lambda rows: rows.select("id", f.row_number().over(
        Window.partitionBy("flag").orderBy(f.desc("n"), "id")).alias("rank"), f.lag("n").over(
        Window.partitionBy("flag").orderBy("n")).alias("before"), f.count("n").over(
        Window.partitionBy("flag").orderBy("id").rowsBetween(Window.unboundedPreceding, Window.currentRow)
        ).alias("so_far")).orderBy("id"),
    "exploded": lambda rows: rows.select("id", f.explode(f.split("text", r"\.")).alias("part")).orderBy("id", "part"),
    "inlined": lambda rows: rows.select("id", f.inline(f.array(
        f.struct(f.lit("a").alias("by"), f.col("n").alias("of")), f.struct(f.lit("b").alias("by"), f.lit(1).alias("of"))
        ))).orderBy("id", "by"),
    "semi": lambda rows: rows.join(rows.where(f.col("x") > 0).select("id"), ["id"], "left_semi")
                             .select("id").orderBy("id"),
    "anti": lambda rows: rows.join(rows.where(f.col("x") > 0).select("text"), "text", "left_anti")
                             .select("id").orderBy("id"),
    "left": lambda rows: rows.select("id", "n").join(rows.where(f.col("flag")).select("id", "x"), "id", "left")
                             .orderBy("id"),
    "both": lambda rows: rows.where(f.col("id") < 4).select("id", "n").join(
        rows.where(f.col("id") > 2).select("id", "x"), "id", "full_outer").fillna({"x": 0.5}).orderBy("id"),
    "by name": lambda rows: rows.select("id", "n").unionByName(rows.select("x", "id"), allowMissingColumns=True)
                                .orderBy("id", "n", "x"),
    "by place": lambda rows: rows.select("id", "n").union(rows.select("n", "id")).distinct().orderBy("id", "n"),
    "changed": lambda rows: rows.withColumns({"n": f.col("n") + 1, "m": f.col("n")}).drop("at", "text")
                                .withColumnRenamed("x", "y").orderBy("id"),
    "made in Python": lambda rows: rows.select("id").mapInArrow(lambda batches: batches, "id bigint").orderBy("id"),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMES)
def test_frame_when_steps_follow_each_other_has_the_rows_of_spark(engines, name):
    (spark_names, spark_rows), (duck_names, duck_rows) = on_both(engines, FRAMES[name])
    assert spark_names == duck_names
    assert spark_rows == duck_rows
    assert spark_rows


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 100])
def test_quantile_when_a_sketch_has_every_value_is_that_of_spark(engines, count):
    shares = (0.5, 0.95, 0.99, 1.0)

    def make(rows):
        many = rows.where(f.col("id") == 1).select(f.explode(f.sequence(f.lit(1), f.lit(count))).alias("of"))
        values = many.select((f.col("of") * 7 % count).cast("float").alias("value"))
        sketches = values.agg(f.kll_sketch_agg_float("value", f.lit(1000)).alias("one"))
        both = sketches.union(sketches).agg(f.kll_merge_agg_float("one").alias("s"))
        told = (f.kll_sketch_get_quantile_float("s", f.lit(share)).alias(f"q{share}") for share in shares)
        return both.select(f.kll_sketch_get_n_float("s").alias("n"), *told)

    (_, spark_rows), (_, duck_rows) = on_both(engines, make)
    assert spark_rows == duck_rows
    assert spark_rows[0][0] == 2 * count


def test_frame_when_it_is_observed_tells_its_figures(either):
    told = Observation()
    kept = either.createDataFrame(ROWS, DDL).observe(told, f.count("*").alias("rows"), f.sum("id").alias("ids"))
    assert (len(kept.collect()), told.get) == (9, {"rows": 9, "ids": 45})


def test_duckdb_when_it_fails_says_so_in_one_line(engines):
    rows = engines[DUCKDB].createDataFrame(ROWS, DDL)
    with using(DUCKDB), pytest.raises(FlowctlError, match=r"^DuckDB failed: \w+ Error: [^\n]+$"), mapped_errors():
        rows.select("nothing").collect()
    with pytest.raises(FlowctlError, match="in Python: ZeroDivisionError: "):
        rows.mapInArrow(lambda batches: iter([1 / math.floor(0.5) for _ in batches]), "id bigint")


def test_duckdb_when_a_sum_does_not_fit_fails_and_gives_no_other_number(engines):
    rows = engines[DUCKDB].createDataFrame([((1 << 62) + 1,)] * 2, "n bigint")
    with using(DUCKDB), pytest.raises(FlowctlError, match="a sum does not fit 64 bits"):
        rows.agg(f.sum("n").alias("n")).collect()


@pytest.mark.parametrize(("given_mib", "most_mib"), [(1024, 512), (1 << 20, 1024)])
def test_memory_when_a_batch_system_or_a_container_gives_little_is_half_of_it(monkeypatch, given_mib, most_mib):
    from flowctl.analyze.duck.session import session

    monkeypatch.setenv("SLURM_MEM_PER_NODE", f"{given_mib}")
    with session() as database:
        ((text,),) = database._database.execute("SELECT current_setting('memory_limit')").fetchall()
    assert 0.9 * most_mib < parse_size(text) / (1 << 20) <= most_mib
