"""The archive of Java's classes: named by what it fits, made whole or not at all, used by whoever starts Spark."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from flowctl.analyze.spark import java as java_module
from flowctl.analyze.spark.java import Java, archive_path, find_java, java_option, make_archive
from flowctl.analyze.spark.session import SessionOptions, settings_of


@pytest.fixture
def java(tmp_path, monkeypatch):
    monkeypatch.setattr(java_module.sys, "prefix", str(tmp_path / "venv"))
    (tmp_path / "java").mkdir()
    (tmp_path / "java" / "release").write_text("17.0.1")
    return Java(home=tmp_path / "java", version=17)


def extra(java, conf=None):
    options = settings_of(SessionOptions(master="local[1]", conf=conf or {}), Path("log4j"), java)
    return options["spark.driver.extraJavaOptions"].split()


def test_archive_when_java_is_updated_is_another(java):
    """An archive that does not fit would be passed over at each start, so the build of Java is in its name."""
    before = archive_path(java)
    (java.home / "release").write_text("17.0.2")
    assert archive_path(java) != before


def test_option_when_there_is_an_archive_names_it(java, monkeypatch):
    assert java_option(java, "") == ""
    path = archive_path(java)
    path.parent.mkdir(parents=True)
    path.touch()
    assert f"-XX:SharedArchiveFile={path}" in extra(java)
    assert not any(
        "Archive" in word for word in extra(java, {"spark.driver.defaultJavaOptions": "-XX:SharedArchiveFile=a"})
    )
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-XX:ArchiveClassesAtExit=b")
    assert not any("Archive" in word for word in extra(java))


@pytest.mark.parametrize(
    ("status", "writes", "told"),
    [(1, True, "no room"), (0, False, "no room"), (None, True, "timed out"), (0, True, "")],
)
def test_make_when_it_fails_leaves_nothing(java, monkeypatch, status, writes, told):
    def run(command, **options):
        if writes:
            Path(command[-1]).write_text("classes")
        if status is None:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, status, "", "a warning\nno room\n")

    monkeypatch.setattr(java_module.subprocess, "run", run)
    assert told in make_archive(java)
    assert [path.name for path in archive_path(java).parent.iterdir()] == (
        [archive_path(java).name] if not told else []
    )


def test_make_when_there_is_one_of_another_build_takes_its_place(java, monkeypatch):
    """Some 180 MB that nobody would map again are not kept, but only once there is a new one."""
    old = archive_path(java)
    old.parent.mkdir(parents=True)
    old.touch()
    (java.home / "release").write_text("17.0.2")
    status = 1

    def run(command, **_):
        Path(command[-1]).write_text("classes")
        return subprocess.CompletedProcess(command, status, "", "")

    monkeypatch.setattr(java_module.subprocess, "run", run)
    assert "exit status 1" in make_archive(java)
    assert list(old.parent.iterdir()) == [old]
    status = 0
    assert make_archive(java) == ""
    assert list(old.parent.iterdir()) == [archive_path(java)]


def test_make_when_the_environment_cannot_be_written_says_so(java, tmp_path):
    (tmp_path / "venv").write_text("not a folder")
    assert "venv" in make_archive(java)


def test_session_when_there_is_an_archive_has_it_mapped(spark):
    path = archive_path(find_java())
    if not path.is_file():
        pytest.skip("no archive of Java's classes: make setup-pipeline")
    process = spark.sparkContext._gateway.proc
    assert str(path) in Path(f"/proc/{process.pid}/maps").read_text()
