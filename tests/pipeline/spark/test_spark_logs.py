"""Folders of Java's log, and what a file that went away is told as: no session is started here."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JError

from flowctl.pipeline.records.place import s3_options
from flowctl.pipeline.spark.session import KEPT_LOGS, SparkError, log_folder, mapped_errors


def test_logs_when_a_run_begins_are_the_newest_ten(tmp_path, monkeypatch):
    """A run has a folder of its own; older ones go beyond the tenth, others' and those of runs at work never."""
    at_work = log_folder(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    folders = [log_folder(tmp_path) for _ in range(KEPT_LOGS - 1)]
    for number, folder in enumerate([at_work, *folders]):
        (folder / "spark.log").write_text("x", "utf-8")
        os.utime(folder, (number, number))
    (tmp_path / "other").mkdir()
    new = [log_folder(tmp_path), log_folder(tmp_path)]
    assert {*tmp_path.iterdir()} == {at_work, *folders[1:], *new, tmp_path / "other"}


def test_error_when_a_file_went_away_says_who_removes_files():
    """The recorder removes its oldest files: the hint names its bound, not a log of Java."""
    words = "java.io.FileNotFoundException: File file:/e/a.parquet does not exist"
    with pytest.raises(SparkError) as caught, mapped_errors():
        raise Py4JError(words)
    assert "events_max" in caught.value.hint
    assert "went away while it was read" in caught.value.hint


def test_store_when_spark_was_told_of_one_is_the_same_for_footers():
    """Footers are read past Spark: endpoint and region go along, its own settings first; credentials never do."""
    from pyarrow.fs import S3FileSystem

    environment = {"AWS_ENDPOINT_URL": "http://e.example:9", "AWS_REGION": "eu-1", "AWS_SECRET_ACCESS_KEY": "secret"}
    settings = environment | {"spark.hadoop.fs.s3a.endpoint": "s3.example.net", "spark.hadoop.fs.s3a.secret.key": "x"}
    assert s3_options({}) == {}
    assert s3_options(environment) == {"endpoint_override": "e.example:9", "scheme": "http", "region": "eu-1"}
    found = s3_options(settings)
    assert found == {"endpoint_override": "s3.example.net", "scheme": "https", "region": "eu-1"}
    made = S3FileSystem(**found).__reduce__()[1][0]
    assert {name: made[name] for name in found} == found
