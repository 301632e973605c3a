"""Folders of our own: found once, and never left by a link that came later."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from flowctl.core.folders.folders import check_folder, opened_folder, replacing_below, resolve_folder
from flowctl.errors import ConfigError


def written(folder, name="a"):
    with opened_folder(folder) as number, replacing_below(number, name, f".{name}", 0o600, sync=True) as file:
        file.write(b"ours")


def of_another(path, monkeypatch):
    """Have a link be another user's."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)


@pytest.mark.parametrize("swapped", ["", "below", "below/more"])
def test_folder_when_a_link_takes_its_place_is_not_left(tmp_path, swapped):
    root = tmp_path / "records"
    written(root / "below" / "more")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "below" / "more").mkdir(parents=True)
    place = root / swapped
    place.rename(tmp_path / "moved")
    place.symlink_to(elsewhere)
    for mode in (0o777, None):
        with pytest.raises(OSError, match=f"{place} is a link") as caught, opened_folder(root / "below" / "more", mode):
            raise AssertionError
        assert caught.value.errno == errno.ELOOP
    place.unlink()
    written(root / "below" / "more", "b")
    assert (root / "below" / "more" / "b").read_bytes() == b"ours"
    assert not [path for path in elsewhere.rglob("*") if path.is_file()]


def test_folder_when_it_is_away_is_made_again_where_that_is_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError), opened_folder(tmp_path / "a" / "b", None):
        raise AssertionError
    written(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "a").read_bytes() == b"ours"


def test_links_of_the_operator_when_they_are_there_at_the_start_are_followed(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "one").symlink_to("two/../disk")
    (tmp_path / "two").mkdir()
    (tmp_path / "three").symlink_to(tmp_path / "one")
    assert resolve_folder(tmp_path / "three" / "new", "out") == disk / "new"
    monkeypatch.chdir(tmp_path)
    assert resolve_folder(tmp_path.relative_to(tmp_path) / "one", "out") == disk


def test_links_when_they_go_in_a_circle_are_an_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="too many links"):
        resolve_folder(tmp_path / "a", "out")


def test_link_of_another_user_when_it_is_on_the_way_is_refused(tmp_path, monkeypatch):
    """Also behind a link of one's own; and before a server starts, it is told."""
    (tmp_path / "theirs").symlink_to("/etc")
    (tmp_path / "ours").symlink_to("theirs")
    of_another(tmp_path / "theirs", monkeypatch)
    for ask in (resolve_folder, check_folder):
        with pytest.raises(ConfigError, match="theirs is a link of another user") as caught:
            ask(tmp_path / "ours" / "records", "out")
        assert caught.value.hint


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="of Linux")
def test_folder_when_its_file_system_holds_no_files_is_refused(tmp_path):
    """Root may write to all of /proc, and no file can be made in it."""
    with pytest.raises(ConfigError, match="record_folder /proc/recordings: nothing can be written there"):
        check_folder(Path("/proc/recordings"), "record_folder")
    check_folder(tmp_path / "recordings", "record_folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_file_when_another_lies_in_its_way_is_new(tmp_path, make):
    """What is written does not go into a file that a link at its temporary name leads to."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"theirs")
    make(victim, tmp_path / ".a")
    written(tmp_path)
    assert victim.read_bytes() == b"theirs"
    assert (tmp_path / "a").read_bytes() == b"ours"


def test_file_when_a_pipe_lies_in_its_way_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".a")
    written(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"ours"


def test_file_when_writing_fails_leaves_nothing(tmp_path):
    (tmp_path / "a").write_bytes(b"before")
    with opened_folder(tmp_path) as number:
        writing = replacing_below(number, "a", ".a", 0o600)
        writing.__enter__().write(b"half")
        assert not writing.__exit__(OSError, OSError("no room"), None)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"before")]
