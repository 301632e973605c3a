"""Files of recordings: whole under their name or not there, and found again after a crash."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import threading

import pytest
from remux_kit import Bench, moved, source, tags_of

from flowctl.errors import ConfigError
from flowctl.live.remux.files import DiskRoom, NameTemplate, PartFile, lock_file, recover
from flowctl.live.remux.flvform import whole_bytes
from flowctl.live.remux.writer import RETRY_S, RecorderState


def recorded(folder):
    """Return the path of a part that holds a recording nobody finished, and forget its lock."""
    bench = Bench(folder)
    bench.feed(source(2))
    os.close(bench.recorder._file._number)
    return folder / "live-room.flv.part"


@pytest.mark.parametrize("cut", [0, 1, 3, 14, 15, 16, 500])
def test_recover_when_a_file_was_left_behind_finishes_what_is_whole(tmp_path, cut):
    part = recorded(tmp_path)
    data = part.read_bytes()
    part.write_bytes(data[: len(data) - cut])
    assert recover(tmp_path, whole_bytes) == [tmp_path / "live-room.flv"]
    kept = (tmp_path / "live-room.flv").read_bytes()
    assert data.startswith(kept)
    assert len(data) - len(kept) < cut + 5000
    assert tags_of(tmp_path / "live-room.flv")
    assert not part.exists()


def test_recover_when_a_file_ends_in_rubbish_cuts_that_off(tmp_path):
    part = recorded(tmp_path)
    data = part.read_bytes()
    for rubbish in (bytes(5000), random.Random(1).randbytes(5000), b"\x09\x00\x00\x01" + bytes(4000)):
        part.write_bytes(data + rubbish)
        assert recover(tmp_path, whole_bytes) == [tmp_path / "live-room.flv"]
        assert (tmp_path / "live-room.flv").read_bytes() == data
        (tmp_path / "live-room.flv").unlink()


def test_recover_when_a_file_holds_no_media_removes_it(tmp_path):
    for content in (b"", b"FLV\x01\x05\x00\x00\x00\x09\x00\x00\x00\x00"):
        part = tmp_path / "a.flv.part"
        part.write_bytes(content)
        assert recover(tmp_path, whole_bytes) == []
        assert part.exists()  # somebody may have made it just now
        os.utime(part, (1000.0, 1000.0))
        assert recover(tmp_path, whole_bytes) == []
        assert list(tmp_path.iterdir()) == []


def test_recover_when_files_are_not_ours_leaves_them_alone(tmp_path):
    (tmp_path / "download.zip.part").write_bytes(b"PK")
    (tmp_path / "b.flv.part").write_bytes(b"no flv at all")
    other = tmp_path / "elsewhere"
    other.write_bytes(b"FLV")
    (tmp_path / "c.flv.part").symlink_to(other)
    before = sorted(tmp_path.iterdir())
    with recorded(tmp_path).open("rb") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        assert recover(tmp_path, whole_bytes) == []
        assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "live-room.flv.part"])


def test_recover_when_the_name_is_taken_finds_another(tmp_path):
    recorded(tmp_path)
    (tmp_path / "live-room.flv").write_bytes(b"x")
    assert recover(tmp_path, whole_bytes) == [tmp_path / "live-room-2.flv"]


def test_append_when_the_disk_takes_a_part_leaves_nothing_of_it(tmp_path, monkeypatch):
    file = PartFile(tmp_path / "a.flv")
    file.append(b"whole")
    real = os.write

    def write(number, data):
        if len(data) <= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(number, bytes(data[:3]))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        file.append(b"torn in two")
    monkeypatch.undo()
    file.append(b" again")
    assert file.finish() == tmp_path / "a.flv"
    assert (tmp_path / "a.flv").read_bytes() == b"whole again"


def test_finish_when_nothing_was_written_leaves_no_file(tmp_path):
    assert PartFile(tmp_path / "a.flv").finish() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "template",
    ["", "/abs/{time}", "../{time}", "{app}//{time}", "{nothing}", "{app", "{app!r}", "{time:>9}", "a\nb", "."],
)
def test_template_when_it_is_no_name_is_refused(template):
    with pytest.raises(ConfigError) as caught:
        NameTemplate(template)
    assert caught.value.hint


def test_room_when_less_than_the_floor_is_free_is_none(tmp_path):
    DiskRoom(tmp_path, 100, lambda _: (100, 1000)).check()
    DiskRoom(tmp_path, 0, lambda _: (0, 1000)).check()
    with pytest.raises(OSError, match="less than 100"):
        DiskRoom(tmp_path, 100, lambda _: (99, 1000)).check()


def test_room_when_the_file_system_has_no_size_names_the_folder_and_the_cause(tmp_path):
    """As in /proc; and some that are mounted over a network tell none, and can be written to."""
    with pytest.raises(OSError, match=rf"it has no room at all, of which keep_free leaves some \(in {tmp_path}\)"):
        DiskRoom(tmp_path, 100, lambda _: (0, 0)).check()
    DiskRoom(tmp_path, 0, lambda _: (0, 0)).check()
    with pytest.raises(OSError, match=rf"99 B are free, less than 100 B \(in {tmp_path}\)"):
        DiskRoom(tmp_path, 100, lambda _: (99, 1000)).check()


def test_room_when_there_was_none_has_to_be_more(tmp_path):
    for free, floor in ((149, 100), (49, 0)):
        with pytest.raises(OSError, match="less than"):
            DiskRoom(tmp_path, floor, lambda _, free=free: (free, 1000)).check(again=True)
        DiskRoom(tmp_path, floor, lambda _, free=free: (free + 1, 1000)).check(again=True)


def test_room_when_inodes_are_short_is_none(tmp_path):
    """Small files take them: the share of a disk that is left free is that of its inodes, too."""
    DiskRoom(tmp_path, 100, lambda _: (500, 1000, 20, 200)).check()
    with pytest.raises(OSError, match="19 inodes are free, less than 20"):
        DiskRoom(tmp_path, 100, lambda _: (500, 1000, 19, 200)).check()
    with pytest.raises(OSError, match="inodes"):  # as for octets: there has to be more again
        DiskRoom(tmp_path, 100, lambda _: (500, 1000, 20, 200)).check(again=True)
    DiskRoom(tmp_path, 100, lambda _: (500, 1000, 0, 0)).check()  # a file system without a table of them


def test_file_when_it_is_made_is_for_its_user_and_group(tmp_path):
    before = os.umask(0o022)
    try:
        file = PartFile(tmp_path / "show.flv")
        file.append(b"media")
        assert stat.S_IMODE(file.finish().stat().st_mode) == 0o640
    finally:
        os.umask(before)


def test_finish_when_the_name_was_taken_meanwhile_writes_over_nothing(tmp_path):
    file = PartFile(tmp_path / "a.flv")
    file.append(b"new")
    (tmp_path / "a.flv").write_bytes(b"theirs")
    assert file.finish() == tmp_path / "a-2.flv"
    assert (tmp_path / "a.flv").read_bytes() == b"theirs"


def test_lock_when_another_user_has_put_a_pipe_in_its_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".room.lock")
    done = threading.Event()
    threading.Thread(target=lambda: (os.close(lock_file(tmp_path / ".room.lock")), done.set()), daemon=True).start()
    assert done.wait(10)


def test_lock_when_recovery_looks_at_the_file_is_waited_for(tmp_path, monkeypatch):
    """A recovery that has the new file open does not leave it without a lock: the next one would take it away."""
    from flowctl.live.remux import files

    made, looking = files._made, []

    def made_and_looked_at(folder, path):
        found = made(folder, path)
        number = os.open(found[1], os.O_RDWR)
        fcntl.flock(number, fcntl.LOCK_EX)
        timer = threading.Timer(0.05, os.close, (number,))
        timer.start()
        looking.append(timer)
        return found

    monkeypatch.setattr(files, "_made", made_and_looked_at)
    file = PartFile(tmp_path / "a.flv")
    looking[0].join()
    number = os.open(tmp_path / "a.flv.part", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(number)
    assert file.finish() is None


def test_room_when_the_folder_was_removed_is_that_of_its_place(tmp_path):
    bench = Bench(tmp_path / "gone" / "deeper", keep_free_bytes=1)
    bench.feed(source(2))
    bench.end()
    assert bench.files == ["live-room.flv"]


@pytest.mark.parametrize("name", ["", "live"])
def test_recording_when_a_link_takes_the_place_of_its_folder_is_interrupted_and_goes_on(tmp_path, name, capfd):
    folder, elsewhere = tmp_path / "recordings", tmp_path / "elsewhere"
    (elsewhere / "live").mkdir(parents=True)
    bench = Bench(folder, name="{app}/{stream}", max_s=2.0)
    tags = source(20)
    bench.feed(tags[: len(tags) // 2])
    (folder / name).rename(tmp_path / "moved")
    (folder / name).symlink_to(elsewhere)
    bench.feed(tags[len(tags) // 2 :])
    assert bench.figures.state is RecorderState.NO_ROOM
    assert bench.figures.why == f"{(folder / name)} is a link, and none is followed since the start"
    assert "put a folder in its place" in "".join(capfd.readouterr())
    assert [path for path in elsewhere.rglob("*") if path.is_file()] == []
    (folder / name).unlink()
    bench.clock.advance(RETRY_S)
    bench.feed(moved(tags, 20_000))
    assert bench.figures.state is RecorderState.RECORDING
    assert bench.files


def test_recover_when_a_link_takes_the_place_of_its_folder_changes_nothing_elsewhere(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    part = recorded(elsewhere)
    part.write_bytes(part.read_bytes()[:-5])
    before = part.read_bytes()
    (tmp_path / "recordings").symlink_to(elsewhere)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "live").symlink_to(elsewhere)
    for folder in ("recordings", "other"):
        assert recover(tmp_path / folder, whole_bytes) == []
    assert [path.read_bytes() for path in elsewhere.iterdir()] == [before]
