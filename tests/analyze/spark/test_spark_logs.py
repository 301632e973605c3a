"""Folders of Java's log, and what a file that went away is told as: and where Spark's blocks lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JError

from flowctl.analyze.records.place import s3_options
from flowctl.analyze.spark.session import (
    KEPT_LOGS,
    SessionOptions,
    SparkError,
    log_folder,
    mapped_errors,
    settings_of,
)


def test_logs_when_a_run_begins_are_the_newest_ten(tmp_path, monkeypatch):
    at_work = log_folder(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    folders = [log_folder(tmp_path) for _ in range(KEPT_LOGS - 1)]
    for number, folder in enumerate([at_work, *folders]):
        (folder / "spark.log").write_text("x", "utf-8")
        os.utime(folder, (number, number))
    (tmp_path / "other").mkdir()
    new = [log_folder(tmp_path), log_folder(tmp_path)]
    assert {*tmp_path.iterdir()} == {at_work, *folders[1:], *new, tmp_path / "other"}


def test_temporary_files_when_their_process_was_killed_go_with_the_next_run(tmp_path, monkeypatch):
    at_work = log_folder(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    killed = log_folder(tmp_path)
    (tmp_path / "home").mkdir()
    link = killed.with_name(f"{killed.name[:-1]}9")
    link.symlink_to(tmp_path / "home")
    for folder in (at_work, killed, link):
        (folder / "tmp").mkdir()
    (killed / "spark.log").write_text("x", "utf-8")
    assert log_folder(tmp_path).stat().st_mode & 0o777 == 0o700
    assert [path.exists() for path in (at_work / "tmp", killed / "tmp", tmp_path / "home/tmp")] == [True, False, True]
    assert (killed / "spark.log").exists()


@pytest.mark.parametrize("named", [False, True])
def test_blocks_when_somebody_says_where_lie_there(monkeypatch, named):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Djava.io.tmpdir=/big" if named else "")
    found = settings_of(SessionOptions(), Path("/a/log4j.properties"))
    assert "spark.local.dir" not in found
    assert ("-Djava.io.tmpdir=/a/tmp" in found["spark.driver.extraJavaOptions"]) is not named


def test_error_when_a_file_went_away_says_who_removes_files():
    words = "java.io.FileNotFoundException: File file:/e/a.parquet does not exist"
    with pytest.raises(SparkError) as caught, mapped_errors():
        raise Py4JError(words)
    assert "events_max" in caught.value.hint
    assert "went away while it was read" in caught.value.hint


def test_store_when_spark_was_told_of_one_is_the_same_for_footers():
    from pyarrow.fs import S3FileSystem

    environment = {"AWS_ENDPOINT_URL": "http://e.example:9", "AWS_REGION": "eu-1", "AWS_SECRET_ACCESS_KEY": "secret"}
    settings = environment | {"spark.hadoop.fs.s3a.endpoint": "s3.example.net", "spark.hadoop.fs.s3a.secret.key": "x"}
    assert s3_options({}) == {}
    assert s3_options(environment) == {"endpoint_override": "e.example:9", "scheme": "http", "region": "eu-1"}
    found = s3_options(settings)
    assert found == {"endpoint_override": "s3.example.net", "scheme": "https", "region": "eu-1"}
    made = S3FileSystem(**found).__reduce__()[1][0]
    assert {name: made[name] for name in found} == found
