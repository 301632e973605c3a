"""Settings of sessions, errors in one line, and what the command line says of both: no session is started here."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JError

from flowctl.analyze.engine import SPARK, check_available
from flowctl.analyze.said import figures
from flowctl.analyze.spark.session import (
    LARGE_FROM_BYTES,
    PARTITION_BYTES,
    SMALL_JAVA_BYTES,
    SessionOptions,
    fit,
    mapped_errors,
    one_line,
    session,
    settings_of,
)
from flowctl.cli.analyze.common import options_of
from flowctl.cli.errors import TerminatedError
from flowctl.errors import ConfigError

TRACE = """An error occurred while calling o42.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:1)
Caused by: java.io.IOException: No space left on device
\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)
\t... 42 more
"""


def test_error_when_of_spark_is_one_line_with_its_cause():
    line = one_line(Py4JError(TRACE))
    assert (
        line
        == "Spark failed: Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times No space left on device"
    )
    assert one_line(Py4JError("")) == "Spark failed: Py4JError"
    assert one_line(RuntimeError("no such thing")) == "RuntimeError: no such thing"
    assert len(one_line(Py4JError("x" * 9999))) <= 400


@pytest.mark.parametrize(
    ("master", "named", "chosen"),
    [
        ("local[2]", "", True),
        ("local[2]", "-Xmx1g -XX:+UseG1GC", False),
        ("local[2]", "-XX:+UseStringDeduplication", True),
        ("spark://cluster.example:7077", "", False),
    ],
)
def test_collector_when_one_is_named_elsewhere_is_not_chosen(monkeypatch, master, named, chosen):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", named)
    found = settings_of(SessionOptions(master=master), Path("log4j.properties"))
    assert ("+UseParallelGC" in found["spark.driver.extraJavaOptions"]) is chosen


def test_settings_when_given_win_and_others_are_ours():
    found = settings_of(SessionOptions(conf={"spark.sql.adaptive.enabled": "false", "spark.x": "1"}))
    assert found["spark.master"] == "local[*]"
    assert (found["spark.sql.session.timeZone"], found["spark.ui.enabled"]) == ("UTC", "false")
    assert (found["spark.sql.adaptive.enabled"], found["spark.x"]) == ("false", "1")
    assert found["spark.driver.host"] == "127.0.0.1"
    assert "spark.driver.host" not in settings_of(SessionOptions(master="spark://cluster.example:7077"))


@pytest.mark.parametrize(
    ("master", "conf", "asked"),
    [
        ("local", {}, "true"),
        ("local[2]", {}, "true"),
        ("local[*,3]", {}, "true"),
        ("local[2]", {"spark.authenticate": "false"}, "false"),
        ("local-cluster[2,1,1024]", {}, None),
        ("spark://127.0.0.1:7077", {}, None),
    ],
)
def test_secret_when_local_is_asked_for(master, conf, asked):
    """Where Spark makes it by itself, unless somebody chose otherwise; a cluster's owner gives one to all its parts."""
    assert settings_of(SessionOptions(master=master, conf=conf)).get("spark.authenticate") == asked


@pytest.mark.parametrize("master", ["nonsense://x", "local[0]", "local[", "spark://host", "", " yarn"])
def test_master_when_it_is_none_is_refused_before_java_is_asked(master):
    with pytest.raises(ConfigError, match="--master is") as caught:
        settings_of(SessionOptions(conf={"spark.master": master}))
    assert "local[N]" in caught.value.hint


@pytest.mark.parametrize(
    "master", ["local", "local[*,3]", "local-cluster[2,1,1024]", "spark://a:1,b:2", "k8s://https://h"]
)
def test_master_when_spark_has_it_is_taken(master):
    assert settings_of(SessionOptions(master=master))["spark.master"] == master


@pytest.mark.parametrize(
    ("conf", "memory"), [(["spark.x"], "1g"), (["x=1"], "1g"), ([], "much"), ([], "0g"), ([], "2")]
)
def test_options_when_wrong_are_named(conf, memory):
    with pytest.raises(ConfigError, match=r"--conf is|--driver-memory is"):
        options_of({"master": None, "conf": conf, "driver_memory": memory}, "sessions")


@pytest.mark.parametrize(
    ("conf", "memory", "settings"),
    [
        (None, None, ("flowctl fleet", "2g")),
        (["spark.sql.adaptive.enabled=true"], "512m", ("flowctl fleet", "512m")),
        (["spark.app.name=mine", "spark.driver.memory=3g"], "512m", ("mine", "3g")),
    ],
)
def test_options_when_given_are_settings_of_spark(conf, memory, settings):
    found = settings_of(options_of({"master": None, "conf": conf, "driver_memory": memory}, "fleet"))
    assert (found["spark.app.name"], found["spark.driver.memory"]) == settings


def test_pyspark_when_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr("flowctl.analyze.engine.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pyspark, pyarrow, pandas") as caught:
        check_available(SPARK)
    assert caught.value.hint == "in flowctl's source folder: pip install '.[pipeline]'"


def test_figures_when_nested_are_read_as_words():
    assert (
        figures({"sessions": 3, "blame": {"none": 2, "policy": 1}, "x": 0.5})
        == "sessions 3, blame (none 2, policy 1), x 0.5"
    )


class Conf(dict):
    """Settings of a session that nobody else has."""

    set = dict.__setitem__


def fitted(size_bytes, chosen=None):
    conf = Conf(settings_of(SessionOptions(conf=chosen or {})))
    fit(SimpleNamespace(conf=conf, sparkContext=SimpleNamespace(defaultParallelism=2)), size_bytes)
    return {name.removeprefix("spark.sql."): value for name, value in conf.items()}


def test_settings_when_data_is_little_or_much_fit_it():
    names = ("shuffle.partitions", "adaptive.enabled", "codegen.wholeStage", "codegen.factoryMode")
    little, much, more = (fitted(size) for size in (LARGE_FROM_BYTES - 1, LARGE_FROM_BYTES, 10 * PARTITION_BYTES))
    assert [little[name] for name in names] == ["1", "false", "false", "NO_CODEGEN"]
    assert [much[name] for name in names] == ["2", "true", "true", "FALLBACK"]
    assert more["shuffle.partitions"] == "10"


@pytest.mark.parametrize("size_bytes", [0, LARGE_FROM_BYTES])
def test_settings_when_somebody_has_chosen_are_left_to_them(size_bytes):
    chosen = {"codegen.wholeStage": "true", "adaptive.enabled": "false", "shuffle.partitions": "7"}
    found = fitted(size_bytes, {f"spark.sql.{name}": value for name, value in chosen.items()})
    assert (found["codegen.wholeStage"], found["adaptive.enabled"]) == ("true", "false")
    assert found["shuffle.partitions"] == "7"
    assert found["codegen.factoryMode"] == ("FALLBACK" if size_bytes else "NO_CODEGEN")


@pytest.mark.parametrize(
    ("size_bytes", "master", "named", "hurried"),
    [
        (SMALL_JAVA_BYTES - 1, "local[2]", "", True),
        (SMALL_JAVA_BYTES, "local[2]", "", False),
        (None, "local[2]", "", False),
        (0, "spark://cluster.example:7077", "", False),
        (0, "local[2]", "-XX:TieredStopAtLevel=4", False),
    ],
)
def test_compiler_when_records_are_few_is_the_first_alone(monkeypatch, size_bytes, master, named, hurried):
    """Only where the size is known and small, on this machine, and where nobody said otherwise."""
    monkeypatch.delenv("JDK_JAVA_OPTIONS", raising=False)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", named)
    found = settings_of(SessionOptions(master=master, size_bytes=size_bytes), Path("log4j.properties"))
    assert ("TieredStopAtLevel=1" in found["spark.driver.extraJavaOptions"]) is hurried


def test_session_when_java_has_ended_stops_without_a_word(monkeypatch):
    ended = SimpleNamespace(stop=lambda: warnings.warn("Unable to cleanly shutdown", RuntimeWarning, stacklevel=1))
    monkeypatch.setattr("flowctl.analyze.spark.session.open_session", lambda _: ended)
    with warnings.catch_warnings(record=True, action="always") as told, session():
        pass
    assert told == []


@pytest.mark.parametrize("tidying", [Py4JError("Java has gone"), KeyError("p")])
def test_signal_when_tidying_up_fails_behind_it_is_still_a_signal(tidying):
    def ended():
        with mapped_errors():
            try:
                raise TerminatedError
            finally:
                raise tidying

    with pytest.raises(TerminatedError):
        ended()
