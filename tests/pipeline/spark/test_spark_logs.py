"""Folders of Java's log, and what a file that went away is told as: no session is started here."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JError

from flowctl.pipeline.records.place import s3_options
from flowctl.pipeline.spark.session import SparkError, mapped_errors, remove_old_logs

NOW_S = 1_800_000_000.0
DAY_S = 86_400


def log_of(root, name, age_s):
    path = root / f"flowctl-spark-{name}"
    path.mkdir()
    (path / "spark.log").write_text("x", "utf-8")
    os.utime(path / "spark.log", (NOW_S - age_s, NOW_S - age_s))
    return path


def test_logs_when_a_run_begins_are_the_newest_five_and_at_most_a_week_old(tmp_path):
    """Folders of processes that are gone are removed beyond the fifth and after a week; those of running ones stay."""
    gone = 999_999_999  # above the largest number that Linux gives a process
    recent = [log_of(tmp_path, f"{gone}-{number}", number * 60) for number in range(7)]
    old = log_of(tmp_path, f"{gone}-old", 8 * DAY_S)
    running = log_of(tmp_path, f"{os.getpid()}-x", 30 * DAY_S)
    (tmp_path / "other").mkdir()
    remove_old_logs(tmp_path, NOW_S)
    assert [path.exists() for path in recent] == [True] * 5 + [False] * 2
    assert (old.exists(), running.exists(), (tmp_path / "other").exists()) == (False, True, True)


def test_logs_when_a_folder_has_no_number_are_left_for_an_hour(tmp_path):
    """Of a folder that does not say whose it is, only age tells; it may be in use."""
    for number in range(5):
        log_of(tmp_path, f"999999999-{number}", 0)
    fresh, stale = log_of(tmp_path, "abc", 60), log_of(tmp_path, "abd", 7_200)
    remove_old_logs(tmp_path, NOW_S)
    assert (fresh.exists(), stale.exists()) == (True, False)


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
