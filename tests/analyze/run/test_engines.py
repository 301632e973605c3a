"""The engine of a run: which one is chosen and why, and what cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_kit import close, write_closes

from flowctl.analyze import engine
from flowctl.analyze.engine import MEMORY_BYTES, choose, machine_bytes
from flowctl.cli import main
from flowctl.errors import ConfigError

pytestmark = pytest.mark.timeout(900)  # starting Java on a machine that does much else takes minutes
SMALL = {"size_bytes": 63 << 20, "local": True, "of_spark": [], "memory_bytes": 8 << 30}
HELD = "1.0 GiB of 8.0 GiB of memory for its queries"


@pytest.mark.parametrize(
    ("asked", "given", "name", "why"),
    [
        (None, {}, "duckdb", f"63.0 MiB of records, on this machine; it takes up to {HELD}"),
        ("auto", {"size_bytes": None}, "duckdb", f"no records are read, on this machine; it takes up to {HELD}"),
        (
            *(None, {"size_bytes": MEMORY_BYTES // 2}, "spark"),
            f"512 MiB of records; up to 512 MiB it would be duckdb, with {HELD}",
        ),
        (
            *(None, {"size_bytes": 700 << 20, "memory_bytes": 1 << 30}, "duckdb"),
            (
                "700 MiB of records; beyond 324 MiB of 1.0 GiB of memory for its queries it uses the disk, and Spark "
                "would take 3.0 GiB"
            ),
        ),
        (None, {"local": False}, "spark", "records and results are not both in folders of this machine"),
        (None, {"of_spark": ["--master"]}, "spark", "--master is of Spark"),
        (None, {"of_spark": ["--conf", "--driver-memory"]}, "spark", "--conf and --driver-memory are of Spark"),
        (None, {"earlier": "spark"}, "spark", "the results so far are of Spark"),
        ("duckdb", {"earlier": "spark", "size_bytes": 1 << 40}, "duckdb", "asked for"),
        ("spark", {}, "spark", "asked for"),
    ],
)
def test_engine_when_chosen_says_why(asked, given, name, why):
    assert choose(asked, **{**SMALL, **given}) == (name, why)


@pytest.mark.parametrize(
    ("groups", "limits", "memory"),
    [
        ("0::/app.slice/one", {"app.slice/memory.max": "536870912", "app.slice/one/memory.max": "max"}, 512 << 20),
        ("0::/", {"memory.max": "805306368"}, 768 << 20),
        ("4:memory:/docker/ab\n0::/", {"memory/memory.limit_in_bytes": "268435456"}, 256 << 20),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/", {"memory.max": "max"}, None),
    ],
)
def test_memory_when_a_group_limits_it_is_that_of_the_group(groups, limits, memory, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, value in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    whole = machine_bytes(tmp_path / "nothing")
    assert machine_bytes(tmp_path) == (memory or whole)


def test_duckdb_leaves_python_its_memory_on_a_small_machine(monkeypatch):
    from flowctl.analyze.duck import session

    monkeypatch.setattr(session, "machine_bytes", lambda: 900 << 20)
    with session.session() as database:
        found = database.of_text(
            "SELECT current_setting('memory_limit') AS one FROM rows",
            {"rows": database.createDataFrame([(1,)], "a int")},
        )
        assert found.collect()[0]["one"] == "200.0 MiB"


def test_engine_when_duckdb_is_not_installed_is_spark_unless_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(engine, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: None)))
    assert choose(None, **SMALL) == ("spark", "the package duckdb is not installed")
    with pytest.raises(ConfigError, match="the package duckdb is not installed") as caught:
        choose("duckdb", **SMALL)
    assert "pip install '.[pipeline]'" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["s3a://bucket/events", "--out", "y", "--engine", "duckdb"], "not both in folders of this machine"),
        (["x", "--out", "s3a://bucket/y", "--engine", "duckdb"], "not both in folders of this machine"),
        (["x", "--out", "y", "--engine", "duckdb", "--master", "local[2]"], "--master is of Spark"),
        (["x", "--out", "y", "--engine", "duckdb", "--conf", "spark.a=b"], "--conf is of Spark"),
        (["x", "--out", "y", "--engine", "flink"], "allowed is auto, spark or duckdb"),
    ],
)
def test_engine_when_it_cannot_be_what_was_asked_for_is_wrong_use(words, told, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "all", *words]) == 2
    assert told in capsys.readouterr().err


def test_all_when_there_is_neither_java_nor_spark_answers(tmp_path):
    """A laptop with ``pip install`` alone: nothing of Spark is loaded, and no Java is looked for."""
    write_closes(tmp_path / "ev", [close(20, 1), close(21, 2)])
    code = (
        "import sys, importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'pyspark' else find(name, *a); "
        "from flowctl.cli import main; status = main(['analyze', 'all', *sys.argv[1:]]); "
        "sys.exit(status or bool({'pyspark', 'py4j'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "ev"), "--out", str(tmp_path / "out"), "--json"]
    environment = {**os.environ, "PATH": "", "JAVA_HOME": "/nowhere"}
    for read in (1, 0):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["passed"], found["hours_read"], found["engine"]["name"]) == (True, read, "duckdb")
        assert done.stderr.startswith(f"engine: duckdb ({found['engine']['why']})\n")


def test_duckdb_when_a_text_is_not_utf8_puts_its_file_aside(tmp_path):
    """A footer shows the first and the last text of a file; DuckDB refuses one between them, which Spark reads."""
    from flowctl.analyze.duck.session import session
    from flowctl.analyze.run import run

    write_closes(tmp_path / "ev", [close(20, 1)], "good")
    path = write_closes(tmp_path / "ev", [close(21, 2), close(22, 3), close(23, 4)], "odd")
    rows, texts = pq.read_table(path, partitioning=None), pa.array([b"a", b"m\xff", b"z"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    pq.write_table(rows.set_column(rows.column_names.index("stream"), "stream", texts), path)
    with engine.using("duckdb"), session() as database:
        result = run(database, str(tmp_path / "ev"), str(tmp_path / "out"), ["sessions"])
    assert (result.failed, result.jobs["sessions"].summary["sessions"]) == ([], 1)
    (line,) = result.warnings
    assert line.startswith(f"a damaged file is put aside: {path}: ")
    assert "UTF8" in line


def test_duckdb_when_records_are_many_makes_parts_of_some_hours_at_a_time(tmp_path, monkeypatch):
    """Parts of sketches are lists of all values, which do not go to the disk."""
    from flowctl.analyze import run as runner
    from flowctl.analyze.duck.session import session

    for hour in range(3):
        write_closes(
            tmp_path / "ev",
            [close(3600 * hour + 20, 2 * hour + 1), close(3600 * hour + 21, 2 * hour + 2)],
            hour=f"{12 + hour}",
        )
    entered: list[int] = []
    enter = runner.Read.enter
    monkeypatch.setattr(
        runner.Read, "enter", lambda self, judged: enter(self, seen := [*judged]) or entered.append(len(seen))
    )

    def rows(out):
        with engine.using("duckdb"), session() as database:
            result = runner.run(database, str(tmp_path / "ev"), str(tmp_path / out), ["experience"])
        assert result.failed == []
        return sorted(pq.read_table(result.outputs["experience"]).to_pylist(), key=lambda row: (row["by"], row["key"]))

    whole = rows("whole")
    assert entered == [3]
    monkeypatch.setattr(runner, "BATCH_BYTES", 1)
    assert rows("batches") == whole
    assert entered == [3, 1, 1, 1]


def test_sessions_when_more_of_a_close_is_wanted_are_joined_as_documented(tmp_path, monkeypatch):
    import duckdb

    from flowctl.analyze.duck.session import session
    from flowctl.analyze.run import run

    write_closes(tmp_path / "events", [close(20, 1, reason="stuck", sent_bytes=77), close(21, 2)])
    with engine.using("duckdb"), session() as database:
        run(database, str(tmp_path / "events"), str(tmp_path / "results"), ["sessions"])
    page = (Path(__file__).parents[3] / "docs/pipeline.md").read_text("utf-8")
    text = page.partition("```text\nSELECT sessions.*")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    rows = duckdb.sql(f"SELECT conn_id, close_reason, sent_bytes FROM (SELECT sessions.*{text})").fetchall()
    assert rows == [(1, "stuck", 77)]


def test_parts_with_sketches_when_another_engine_made_them_are_made_again_or_left_out(spark, tmp_path):
    """What a sketch is differs between engines: one is never read as the other, also where its records are gone."""
    from flowctl.analyze.duck.session import session
    from flowctl.analyze.run import run

    events, out = tmp_path / "ev", tmp_path / "out"
    write_closes(events, [close(20, 1), close(21, 2)])
    gone = write_closes(events, [close(3620, 3)], hour="13")

    def viewers(name, one):
        with engine.using(name):
            result = run(one, str(events), str(out), ["experience"])
        assert result.failed == []
        note = result.jobs["experience"]
        return result.hours_read, note.summary["viewers"], [line.split(",")[0] for line in note.warnings]

    with session() as database:
        assert viewers("spark", spark) == (2, 3, [])
        assert viewers("duckdb", database) == (2, 3, [])
        assert viewers("duckdb", database) == (0, 3, [])
        write_closes(events, [close(22, 4)], "late")
        gone.unlink()
        assert viewers("spark", spark) == (1, 3, ["felt is missing"])
        assert viewers("duckdb", database) == (1, 4, [])
