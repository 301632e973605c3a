"""What a server removes of its own files, and that it removes nothing else."""

from __future__ import annotations

import os
import time

from flowctl.live.remux.files import lock_file, recover
from flowctl.live.remux.flvform import whole_bytes
from flowctl.live.remux.retention import ENDED_S, RECORDING, remove_ended, remove_old

NOW = 1_800_000_000.0
NAME = "20270115T080000.123Z"


def put(path, age_s=0.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    os.utime(path, (NOW - age_s, NOW - age_s))
    return path


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_old_recordings_go_and_folders_that_they_leave_empty(tmp_path):
    old = [put(tmp_path / "live" / "a" / f"{NAME}{end}", 101) for end in (".flv", "-2.flv", ".mp4")]
    young = put(tmp_path / "live" / "b" / f"{NAME}.flv", 99)
    assert sorted(remove_old(tmp_path, 100.0, NOW)) == sorted(old)
    assert files(tmp_path) == [str(young.relative_to(tmp_path))]
    assert not (tmp_path / "live" / "a").exists()


def test_retention_when_other_files_lie_in_its_folder_leaves_them(tmp_path):
    outside = put(tmp_path / "outside" / "b" / f"{NAME}.flv", 1e6)
    folder = tmp_path / "recordings"
    for name in (
        f"{NAME}.flv",  # not in the folder of a stream
        f"live/{NAME}.flv",
        f"live/a/deep/{NAME}.flv",
        "live/a/holiday.flv",
        f"live/a/{NAME}.flv.part",
        f"live/a/{NAME}.mkv",
        f"live/a/my-{NAME}.flv",
    ):
        put(folder / name, 1e6)
    (folder / "live" / "link.flv").symlink_to(outside)
    (folder / "live" / "a" / "20270115T080000.124Z.flv").symlink_to(outside)
    (folder / "other").symlink_to(outside.parent.parent)
    before = files(folder)
    assert remove_old(folder, 1.0, NOW) == []
    assert files(folder) == before
    assert outside.exists()


def test_recovery_when_a_part_of_somebody_else_lies_there_leaves_it(tmp_path):
    download = put(tmp_path / "film.flv.part", 1e8)
    ours = put(tmp_path / "live" / "a" / f"{NAME}.flv.part")
    ours.write_bytes(b"")  # nothing in it is whole
    os.utime(ours, (NOW - 1e8, NOW - 1e8))
    assert recover(tmp_path, whole_bytes, RECORDING.fullmatch) == []
    assert download.exists()
    assert not ours.exists()


def test_hls_of_a_stream_that_has_ended_goes_after_its_time(tmp_path):
    names = ("room.m3u8", "room-17.m4s", "room-17.3.m4s", "room-17-init.mp4", "room-18.ts.part", ".room.lock")
    for name in names:
        put(tmp_path / "live" / name, ENDED_S + 1)
    others = ("room-b.m3u8", "room-b-17.ts", "room-17.txt", "x.ts", "room-17.mp4", "room-17.3.ts", "room-17-init.ts")
    other = [put(tmp_path / "live" / name, 1e6) for name in others]
    assert remove_ended(tmp_path, lambda name: name == "live/room", NOW) == ["live/room"]
    assert files(tmp_path) == sorted(str(path.relative_to(tmp_path)) for path in other)


def test_hls_of_a_set_goes_with_its_variants(tmp_path):
    for stem in ("show", "show%2b720", "show%2b360"):
        for name in (f"{stem}.m3u8", f"{stem}-17.m4s", f".{stem}.lock"):
            put(tmp_path / "live" / name, ENDED_S + 1)
    assert set(remove_ended(tmp_path, lambda name: name == "live/show", NOW)) == {"live/show"}
    assert files(tmp_path) == []


def test_hls_of_thousands_of_streams_goes_in_a_time_that_does_not_grow_with_their_square(tmp_path):
    (tmp_path / "live").mkdir()
    for number in range(3000):
        (tmp_path / "live" / f".room{number}.lock").touch()
    began_s = time.process_time()
    assert len(remove_ended(tmp_path, lambda _: True, time.time() + ENDED_S + 1)) == 3000
    assert time.process_time() - began_s < 2.0  # 0.2 s; 6 s where each is compared with each


def test_hls_when_it_is_written_or_young_or_not_ours_stays(tmp_path):
    for stem in ("written", "young", "theirs"):
        for name in (f"{stem}.m3u8", f"{stem}-17.ts", f".{stem}.lock"):
            put(tmp_path / "live" / name, 1e6)
    put(tmp_path / "live" / "young.m3u8", ENDED_S - 1)
    number = lock_file(tmp_path / "live" / ".written.lock")
    before = files(tmp_path)
    assert remove_ended(tmp_path, lambda name: name != "live/theirs", NOW) == []
    os.close(number)
    assert files(tmp_path) == before


def test_retention_when_a_link_takes_the_place_of_its_folder_removes_nothing_elsewhere(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    kept = [put(elsewhere / "live" / "a" / f"{NAME}.flv", 1e6), put(elsewhere / "live" / ".room.lock", 1e6)]
    folder = tmp_path / "recordings"
    folder.symlink_to(elsewhere)
    assert remove_old(folder, 1.0, NOW) == []
    assert remove_ended(folder, lambda _: True, NOW) == []
    assert all(path.exists() for path in kept)
