"""Java is found where it usually is, asked for its version, and installed or told of where it is missing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from flowctl.analyze.spark import setup
from flowctl.analyze.spark.java import Java, find_java, parse_version
from flowctl.errors import ConfigError


def fake(home, text):
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    program.chmod(0o755)
    return home


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_411"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ("command not found", None),
        ("", None),
    ],
)
def test_version_when_printed_in_any_style_is_its_first_number(text, version):
    assert parse_version(text) == version


def test_java_when_the_home_is_too_old_is_looked_for_elsewhere(tmp_path):
    old = fake(tmp_path / "old", 'java version "1.8.0_411"')
    fake(tmp_path / "jvm" / "eleven", 'openjdk version "11.0.2"')
    new = fake(tmp_path / "jvm" / "java-21", 'openjdk version "21.0.1"')
    found = find_java({"JAVA_HOME": str(old), "PATH": ""}, (f"{tmp_path}/jvm/*",))
    assert found == Java(home=new, version=21)


def test_java_when_missing_says_what_was_found_and_what_to_do(tmp_path):
    old = fake(tmp_path / "old", 'openjdk version "11.0.2"')
    broken = fake(tmp_path / "jvm" / "broken", "oops")
    with pytest.raises(ConfigError, match=r"Java 17 or newer") as caught:
        find_java({"JAVA_HOME": str(old), "PATH": ""}, (f"{tmp_path}/jvm/*",))
    assert f"{old} (version 11)" in str(caught.value)
    assert f"{broken} (does not run)" in str(caught.value)
    assert "openjdk-17-jre-headless" in caught.value.hint
    assert "make setup-pipeline" in caught.value.hint
    assert "--engine duckdb" in caught.value.hint


@contextlib.contextmanager
def closed(folder):
    """Within this context this process may not enter a folder, root neither."""
    user = os.geteuid()
    folder.chmod(0)
    try:
        if not user:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_java_when_the_home_may_not_be_entered_is_looked_for_elsewhere(tmp_path):
    other = fake(tmp_path / "other", 'openjdk version "21.0.1"')
    with tempfile.TemporaryDirectory() as open_to_all:
        Path(open_to_all).chmod(0o755)
        good = fake(Path(open_to_all) / "java-17", 'openjdk version "17.0.1"')
        with closed(other):
            found = find_java({"JAVA_HOME": str(other), "PATH": ""}, (f"{open_to_all}/*",))
    assert found == Java(home=good, version=17)


def missing_until(monkeypatch, installed):
    """Let there be no Java until apt-get was run; return the list of commands that are run."""
    commands = []

    def find():
        if not any("install" in command for command in commands) or not installed:
            raise ConfigError("no Java", hint="get one")
        return Java(home=Path(setup.shutil.which("sh")), version=17)

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0 if installed else 100, "", "E: no such package\n")

    monkeypatch.setattr(setup, "find_java", find)
    monkeypatch.setattr(setup.subprocess, "run", run)
    monkeypatch.setattr(setup, "make_archive", lambda java: f"told of {java.version}")
    return commands


def test_setup_when_it_may_installs_the_package(monkeypatch, capsys):
    commands = missing_until(monkeypatch, installed=True)
    monkeypatch.setattr(setup, "may_install", lambda: True)
    assert setup.main() == 0
    assert "openjdk-17-jre-headless" in commands[-1]
    assert "--no-install-recommends" in commands[-1]
    told = capsys.readouterr().out
    assert "can run, with Java 17" in told
    assert "twice as long: told of 17" in told


def test_setup_when_the_package_cannot_be_had_says_so(monkeypatch, capsys):
    missing_until(monkeypatch, installed=False)
    monkeypatch.setattr(setup, "may_install", lambda: True)
    assert setup.main() == 1
    assert "E: no such package" in capsys.readouterr().err


def test_setup_when_it_may_not_changes_nothing(monkeypatch, capsys):
    commands = missing_until(monkeypatch, installed=True)
    monkeypatch.setattr(setup, "may_install", lambda: False)
    assert setup.main() == 1
    assert commands == []
    assert "hint: get one" in capsys.readouterr().err
