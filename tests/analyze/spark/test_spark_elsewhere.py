"""Sessions that others have begun: programs of spark-submit, Spark Connect, and tables in the catalog of either."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow.parquet import read_table
from record_kit import close, write_closes

pytest.importorskip("pyspark")

import flowctl.__main__ as entry
from flowctl.analyze.spark.java import find_java
from flowctl.analyze.spark.session import SessionOptions, open_session
from flowctl.analyze.spark.tables import register
from flowctl.errors import ConfigError

pytestmark = [pytest.mark.timeout(900), pytest.mark.realtime]
PATIENCE_S = 120.0
"""A Java on a machine that is busy with other tests needs seconds to start; a minute and more only one that hangs."""
CONNECT = Path(importlib.util.find_spec("pyspark").origin).parent / "sbin" / "start-connect-server.sh"
SMALL = ("--conf", "spark.ui.enabled=false", "--conf", "spark.driver.memory=1g")


@pytest.fixture
def events(tmp_path):
    write_closes(tmp_path / "events", [close(hour, number) for hour in (20, 21) for number in range(hour * 9)])
    return tmp_path / "events"


def environment(folder):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    code = os.pathsep.join(filter(None, [str(Path(entry.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    own = {"PATH": path, "PYTHONPATH": code, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    return {
        **os.environ,
        **own,
        "JAVA_HOME": str(find_java().home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TMPDIR": str(folder),
    }


def ran(command, folder):
    """Run a command that ends with a summary; return that."""
    done = subprocess.run(
        [*map(str, command), "--json"], cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


def rows_of(out):
    return sorted(map(repr, read_table(out / "sessions").to_pylist()))


def sessions_of(out, events, *more, folder):
    words = ["analyze", "sessions", events, "--out", out, *more]
    return ran([sys.executable, entry.__file__, *words], folder)


def test_spark_submit_when_it_starts_the_command_has_its_own_settings_count(spark, events, tmp_path):
    out, words = tmp_path / "out", ("analyze", "sessions", events, "--out", tmp_path / "out", "--tables", "shop")
    master = ("--master", "local[1]", *SMALL, "--conf", f"spark.sql.warehouse.dir={tmp_path / 'warehouse'}")
    done = ran(["spark-submit", *master, entry.__file__, *words], tmp_path)
    assert done["engine"] == {"name": "spark", "why": "--tables and spark-submit are of Spark"}
    sessions_of(tmp_path / "duck", events, "--engine", "duckdb", folder=tmp_path)
    assert rows_of(out) == rows_of(tmp_path / "duck")
    assert done["jobs"]["sessions"]["summary"]["sessions"] == len(rows_of(out)) > 300


@contextlib.contextmanager
def connect_server(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--master", "local[2]", *SMALL, "--conf", f"spark.connect.grpc.binding.port={port}")
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [CONNECT, *options, "--conf", f"spark.sql.warehouse.dir={folder / 'warehouse'}"],
            env=environment(folder) | {"SPARK_NO_DAEMONIZE": "1", "SPARK_LOG_DIR": str(folder)},
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + PATIENCE_S
        while "Spark Connect server started" not in (told := (folder / "server.log").read_text(errors="replace")):
            assert server.poll() is None, told[-3000:]
            assert time.monotonic() < until, told[-3000:]
            time.sleep(0.2)
        yield f"sc://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)


def test_connect_when_it_runs_all_jobs_has_the_tables_of_a_session_here(spark, events, tmp_path):
    for name in ("grpc", "grpc_status", "zstandard"):
        pytest.importorskip(name, reason="pip install 'pyspark[connect]'")
    out = tmp_path / "out"
    with connect_server(tmp_path) as url:
        words = ["analyze", "all", events, "--out", out, "--master", url, "--tables", "shop"]
        done = ran([sys.executable, entry.__file__, *words], tmp_path)
    assert (done["failed"], done["engine"]["name"]) == ([], "spark")
    assert (out / "report.html").exists()
    sessions_of(tmp_path / "duck", events, "--engine", "duckdb", folder=tmp_path)
    assert rows_of(out) == rows_of(tmp_path / "duck")


def test_connect_when_its_packages_are_missing_says_which_to_install(monkeypatch):
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "grpc" else object())
    with pytest.raises(ConfigError, match="is of Spark Connect, for which grpc is not installed") as caught:
        open_session(SessionOptions(master="sc://10.0.0.1"))
    assert caught.value.hint == "pip install 'pyspark[connect]'"


def test_tables_when_registered_are_the_results_and_never_others(spark, tmp_path):
    first, second = tmp_path / "it's" / "first", tmp_path / "second"
    spark.range(3).write.parquet(str(first))
    outputs = {"first": str(first), "limits.toml": str(tmp_path / "limits.toml")}
    try:
        assert register(spark, "of_results", outputs) == ["of_results.first"]
        assert spark.table("of_results.first").count() == 3
        spark.range(5).selectExpr("id as other").write.parquet(str(first), mode="overwrite")
        register(spark, "of_results", outputs)
        assert [row["other"] for row in spark.table("of_results.first").orderBy("other").collect()] == [*range(5)]
        spark.range(1).write.parquet(str(second))
        with pytest.raises(ConfigError, match=r"of_results.first is a table already, of .*first"):
            register(spark, "of_results", {"first": str(second)})
        assert first.exists()
    finally:
        spark.sql("DROP DATABASE IF EXISTS of_results CASCADE")
