"""Accounts of rows, and the words in which Spark's errors and a job's result are told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from py4j.protocol import Py4JError

from flowctl.cli.analyze.common import session_options, text
from flowctl.errors import ConfigError, InternalError
from flowctl.pipeline.spark.session import (
    GENERATED_FROM_BYTES,
    SessionOptions,
    check_available,
    generate_code,
    one_line,
    settings_of,
)
from flowctl.pipeline.tables.accounts import Accounts, JobResult
from flowctl.pipeline.tables.preflight import judge

FACTS = st.lists(
    st.tuples(
        st.sampled_from([None, "empty file", "wrong types"]),
        st.integers(0, 1000),
        st.sampled_from(["uid 1", "uid 2", "uid 3", None]),
    ),
    max_size=30,
)


@given(FACTS, st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=200)
def test_accounts_when_settled_have_every_row_of_every_file_once(files, nulls, negatives):
    """Rows in = rows out + quarantined for any mixture of good files, bad ones, copies and bad rows."""
    facts = [
        (f"f{number:02}", problem, "why", rows, 10, identity, [], None)
        for number, (problem, rows, identity) in enumerate(files)
    ]
    found = judge(facts, "flow_events")
    accounts = found.accounts
    assert accounts.rows_in == sum(rows for _, rows, _ in files)
    assert accounts.files_in == found.good + accounts.files_quarantined == len(files)
    left = accounts.rows_in - accounts.rows_quarantined
    bad = {"a: null": min(nulls, left)}
    bad["b: negative"] = min(negatives, left - bad["a: null"])
    accounts.settle(left - sum(bad.values()), bad)
    accounts.check()


def test_accounts_when_a_row_is_missing_are_an_error_with_the_figures():
    """A job that loses a row does not end well."""
    accounts = Accounts(table="flow_events", rows_in=10)
    accounts.settle(8, {"x: null": 1})
    with pytest.raises(InternalError, match="10 rows in, but 8 out and 1 quarantined"):
        JobResult(name="sessions", accounts=[accounts]).check()


def test_line_when_files_cannot_be_read_says_that_their_rows_are_unknown():
    """Nothing claims to know how many rows a broken file held."""
    accounts = Accounts(table="t", files_in=2, files_quarantined=1, files_by_reason={"empty file": 1}, rows_in=3)
    accounts.files_unknown_rows = 1
    accounts.settle(3, {})
    line = accounts.line()
    assert line.startswith("t: 2 files, rows in 3 = out 3 + quarantined 0; files put aside: empty file 1")
    assert "1 files cannot be read: their rows are unknown" in line


TRACE = """An error occurred while calling o42.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:1)
Caused by: java.io.IOException: No space left on device
\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)
\t... 42 more
"""


def test_error_when_of_spark_is_one_line_with_its_cause():
    """No stack trace and no name of a class: what was done, and what happened."""
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
    """Java does not start with two collectors; and that of a cluster's driver is nobody's business but its owner's."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", named)
    found = settings_of(SessionOptions(master=master), Path("log4j.properties"))
    assert ("+UseParallelGC" in found["spark.driver.extraJavaOptions"]) is chosen


def test_settings_when_given_win_and_others_are_ours():
    """UTC, adaptive, quiet, without pages; on this machine nothing listens elsewhere."""
    found = settings_of(SessionOptions(conf={"spark.sql.adaptive.enabled": "false", "spark.x": "1"}))
    assert found["spark.master"] == "local[*]"
    assert (found["spark.sql.session.timeZone"], found["spark.ui.enabled"]) == ("UTC", "false")
    assert (found["spark.sql.adaptive.enabled"], found["spark.x"]) == ("false", "1")
    assert found["spark.driver.host"] == "127.0.0.1"
    assert "spark.driver.host" not in settings_of(SessionOptions(master="spark://cluster.example:7077"))


@pytest.mark.parametrize(
    ("conf", "memory"), [(["spark.x"], "1g"), (["x=1"], "1g"), ([], "much"), ([], "0g"), ([], "2")]
)
def test_options_when_wrong_are_named(conf, memory):
    """A setting without a value, one that is none of Spark's, and a size that is none are refused."""
    with pytest.raises(ConfigError, match=r"--conf is|--driver-memory is"):
        session_options(None, conf, memory, "sessions")


def test_pyspark_when_missing_says_what_to_install(monkeypatch):
    """Without the extra, the error names the packages and the hint the command."""
    monkeypatch.setattr("flowctl.pipeline.spark.session.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pyspark, pyarrow, pandas") as caught:
        check_available()
    assert caught.value.hint == "in flowctl's source folder: pip install '.[pipeline]'"


def test_figures_when_nested_are_read_as_words():
    """A summary is one line for people."""
    assert (
        text({"sessions": 3, "blame": {"none": 2, "policy": 1}, "x": 0.5})
        == "sessions 3, blame (none 2, policy 1), x 0.5"
    )


class Conf(dict):
    """Settings of a session that nobody else has."""

    set = dict.__setitem__


def conf_of(size_bytes, **chosen):
    """Return the settings of a session that was opened with `chosen` and has read a table of this size."""
    conf = Conf({"spark.sql.codegen.factoryMode": "FALLBACK"} | settings_of(SessionOptions(conf=chosen)))
    generate_code(SimpleNamespace(conf=conf), size_bytes)
    return conf["spark.sql.codegen.factoryMode"], conf.get("spark.sql.codegen.wholeStage")


def test_code_when_the_data_is_small_is_not_generated():
    """Compiling takes longer than it saves; from 8 MiB on it pays."""
    assert conf_of(GENERATED_FROM_BYTES - 1) == ("NO_CODEGEN", "false")
    assert conf_of(GENERATED_FROM_BYTES) == ("FALLBACK", "true")


@pytest.mark.parametrize(
    ("name", "chosen", "expected"),
    [
        ("wholeStage", "true", ("FALLBACK", "true")),
        ("wholeStage", "false", ("FALLBACK", "false")),
        ("factoryMode", "CODEGEN_ONLY", ("CODEGEN_ONLY", None)),
    ],
)
def test_code_when_somebody_has_chosen_is_left_to_them(name, chosen, expected):
    """Where one of the two settings was given, neither is changed, whatever the size."""
    for size_bytes in (0, GENERATED_FROM_BYTES):
        assert conf_of(size_bytes, **{f"spark.sql.codegen.{name}": chosen}) == expected
