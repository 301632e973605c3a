"""Files of results: links, devices and pipes in the place of a file."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from flowctl.core.text.files import check_target, held, umask, write_text
from flowctl.errors import ConfigError, FlowctlError


def test_result_when_the_name_is_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    check_target(pipe, "--report")
    write_text(pipe, "the report")
    reader.join()
    assert got == ["the report"]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_result_when_the_name_is_a_link(tmp_path):
    (tmp_path / "results").mkdir()
    link, target = tmp_path / "latest.html", tmp_path / "results" / "report.html"
    link.symlink_to(target)
    for text in ("the first", "the second"):
        check_target(link, "--report")
        write_text(link, text)
        assert target.read_text() == text
    assert link.is_symlink()


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "device", "second"])
def test_result_when_the_name_was_planted_by_another_user(tmp_path, monkeypatch, kind):
    mine, report = tmp_path / "mine", tmp_path / "report.html"
    mine.write_text("of the user")
    if kind == "pipe":
        os.mkfifo(report)
    elif kind == "second":  # a link of one's own that leads to one that is not
        (tmp_path / "theirs").symlink_to(mine)
        report.symlink_to("theirs")
    else:
        report.symlink_to({"link": mine, "dangling": tmp_path / "made", "device": Path("/dev/full")}[kind])
    theirs = os.lstat(tmp_path / "theirs" if kind == "second" else report).st_ino
    lstat = Path.lstat

    def looked_at(path):
        found = lstat(path)
        return os.stat_result([*found[:4], 65534, *found[5:]]) if found.st_ino == theirs else found

    monkeypatch.setattr(Path, "lstat", looked_at)
    check_target(report, "--report")
    write_text(report, "the report")
    assert (mine.read_text(), report.read_text()) == ("of the user", "the report")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / ("theirs" if kind == "second" else "report.html")).is_symlink()


def test_result_when_a_file_is_there_has_its_rights(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "x")
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
        (tmp_path / "a").chmod(0o604)
        write_text(tmp_path / "a", "y")
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o604
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["theirs", "link", "theirs/deeper"])
def test_result_when_another_user_put_the_folder_where_everybody_may_is_refused(monkeypatch, tmp_path, name):
    """Its owner could make a link of the temporary file, and have any file of ours overwritten; ours is well there."""
    shared = tmp_path / "shared"
    (shared / "theirs" / "deeper").mkdir(parents=True)
    shared.chmod(0o1777)
    (tmp_path / "ours").mkdir()
    (shared / "link").symlink_to(tmp_path / "ours")
    theirs = [(shared / name).lstat().st_ino for name in ("theirs", "link")]
    lstat = Path.lstat

    def looked_at(path):
        found = lstat(path)
        return os.stat_result([*found[:4], 65534, *found[5:]]) if found.st_ino in theirs else found

    monkeypatch.setattr(Path, "lstat", looked_at)
    with pytest.raises(ConfigError, match=r"--report .* is another user's, in a folder where everybody may write"):
        check_target(shared / name / "x", "--report")
    with pytest.raises(FlowctlError, match=r"cannot write .* is another user's"):
        write_text(shared / name / "x", "the report")
    with pytest.raises(FlowctlError, match=r"cannot lock .* is another user's"), held(shared / name / "x"):
        pass
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    for ours in (shared / "x", tmp_path / "ours" / "x"):
        check_target(ours, "--report")
        write_text(ours, "the report")
    shared.chmod(0o755)  # here only its owner can have put it
    write_text(shared / name / "x", "the report")


@pytest.mark.parametrize("known", [True, False])
def test_umask_when_read_stays_what_it_is(monkeypatch, known):
    before = os.umask(0o031)
    try:
        if known:
            monkeypatch.setattr("os.umask", lambda _: pytest.fail("it is changed"))
        else:
            monkeypatch.setattr(Path, "read_bytes", lambda path: b"Name:\t" + os.fsencode(path))
        assert umask() == 0o031
        monkeypatch.undo()
    finally:
        assert os.umask(before) == 0o031


def test_result_when_a_device_takes_nothing(tmp_path):
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with pytest.raises(FlowctlError, match=r"cannot write .*/full: No space left on device"):
        write_text(link, "the report")
    assert stat.S_ISCHR(link.stat().st_mode)
    assert link.is_symlink()


def test_target_when_its_folder_may_not_be_looked_into_is_wrong_use(monkeypatch, tmp_path):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.is_dir", refuse)
    with pytest.raises(ConfigError, match=r"--report .*run.html: Permission denied"):
        check_target(tmp_path / "run.html", "--report")
