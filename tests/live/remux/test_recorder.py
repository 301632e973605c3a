"""Recordings: when a file begins and ends, what is in it, and what happens when the disk takes no more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from remux_kit import Bench, Disk, moved, source, tags_of
from structlog.testing import capture_logs

from flowctl.core.flow.state import MessageClass
from flowctl.flv import FlvTag
from flowctl.live.remux.files import NameTemplate, recover
from flowctl.live.remux.flvform import whole_bytes
from flowctl.live.remux.intake import MessagesLost
from flowctl.live.remux.writer import RETRY_S, RecorderState
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.media.media import inspect


def media(tags):
    classes = [inspect(tag.type_id, tag.payload).message_class for tag in tags]
    return [tag for tag, kind in zip(tags, classes, strict=True) if kind is not MessageClass.HEADER]


def begins_decodable(path):
    """Whether a file has its headers first, and its first picture is a key frame."""
    tags = tags_of(path)
    kinds = [inspect(tag.type_id, tag.payload) for tag in tags]
    first = next(kind for kind in kinds if kind.kind == "video" and kind.packet == "coded")
    headers = {(kind.kind, kind.packet) for kind in kinds[:3]}
    return (
        first.message_class is MessageClass.KEY and ("video", "sequence_header") in headers and tags[0].timestamp == 0
    )


def test_file_when_a_stream_is_recorded_holds_its_messages_as_they_came(tmp_path):
    tags = source(3)
    bench = Bench(tmp_path)
    bench.begin()
    bench.feed(moved(tags, 5000))
    assert bench.files == ["live-room.flv.part"]
    bench.end()
    assert bench.files == ["live-room.flv"]
    assert media(tags_of(tmp_path / "live-room.flv")) == media(tags)
    assert bench.finished[0].why == "the stream ended"
    assert bench.figures.lost_messages == 0


def test_file_when_timestamps_wrap_goes_on(tmp_path):
    tags = source(3)
    bench = Bench(tmp_path)
    bench.feed(moved(tags, 0xFFFFFFFF - 1500))
    bench.recorder.finish("")
    assert media(tags_of(tmp_path / "live-room.flv")) == media(tags)


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"max_s": 2.0}, "its time was reached"), ({"max_bytes": 20_000}, "its size was reached")],
)
def test_files_when_rotated_begin_with_headers_and_a_key_frame(tmp_path, settings, why):
    tags = source(9)
    bench = Bench(tmp_path, **settings)
    bench.feed(tags)
    bench.recorder.finish("stopped")
    paths = [item.path for item in bench.finished]
    assert len(paths) >= 4
    assert [item.why for item in bench.finished[:-1]] == [why] * (len(paths) - 1)
    assert all(begins_decodable(path) for path in paths)
    assert [tag.payload for path in paths for tag in media(tags_of(path))] == [tag.payload for tag in media(tags)]


def test_files_when_the_publisher_restarts_are_two(tmp_path):
    bench = Bench(tmp_path)
    for round_ in range(2):
        bench.begin()
        bench.feed(moved(source(2), round_ * 2000))
    bench.end()
    assert [len(media(tags_of(item.path))) for item in bench.finished] == [len(media(source(2)))] * 2


@pytest.mark.parametrize("by_ms", [60_000, -8_000])
def test_files_when_the_clock_jumps_are_two(tmp_path, by_ms):
    first, second = source(2), [tag for tag in source(2) if tag.timestamp or tag.type_id == 9]
    bench = Bench(tmp_path)
    bench.feed(moved(first, 20_000))
    bench.feed(moved(second, 22_000 + by_ms))
    bench.end()
    assert len(bench.finished) == 2
    assert "timestamps went" in bench.finished[0].why
    assert max(tag.timestamp for tag in tags_of(bench.finished[0].path)) < 2_500
    assert max(tag.timestamp for tag in tags_of(bench.finished[1].path)) < 2_500


def test_files_when_the_codec_changes_are_two(tmp_path):
    bench = Bench(tmp_path)
    bench.feed(source(2, width=640, height=360))
    bench.feed(moved(source(2, width=320, height=180), 2000))
    bench.end()
    assert bench.finished[0].why == "its video changed"
    headers = [
        [tag.payload for tag in tags_of(item.path) if inspect(tag.type_id, tag.payload).packet == "sequence_header"]
        for item in bench.finished
    ]
    assert [len(found) for found in headers] == [2, 2]
    assert headers[0][0] != headers[1][0]


def test_files_when_the_disk_is_too_slow_are_cut_and_the_loss_is_counted(tmp_path):
    tags = source(4)
    half = next(i for i, tag in enumerate(tags) if tag.timestamp >= 1500)
    bench = Bench(tmp_path)
    bench.feed(tags[:half])
    bench.recorder.work([MessagesLost(7, 700)])
    bench.feed(tags[half:])
    bench.end()
    assert bench.finished[0].why == "the disk was too slow"
    assert begins_decodable(bench.finished[1].path)
    written = sum(len(media(tags_of(item.path))) for item in bench.finished)
    assert bench.figures.lost_messages == 7 + len(media(tags)) - written


def test_recording_when_the_disk_is_full_keeps_the_file_and_goes_on_when_there_is_room(tmp_path):
    tags = source(12)
    disk = Disk(30_000)
    bench = Bench(tmp_path, disk=disk)
    bench.feed([tag for tag in tags if tag.timestamp < 6000])
    assert bench.figures.state is RecorderState.NO_ROOM
    assert bench.figures.why == "No space left on device"
    assert bench.files == ["live-room.flv"]
    lost = bench.figures.lost_messages
    assert lost
    disk.free_bytes = 1 << 30
    bench.feed([tag for tag in tags if 6000 <= tag.timestamp < 8000])
    assert bench.files == ["live-room.flv"]  # it is not tried at each key frame
    bench.clock.advance(RETRY_S)
    bench.feed([tag for tag in tags if tag.timestamp >= 8000])
    bench.end()
    assert bench.files == ["live-room-2.flv", "live-room.flv"]
    assert begins_decodable(tmp_path / "live-room-2.flv")
    written = sum(len(media(tags_of(item.path))) for item in bench.finished)
    assert written + bench.figures.lost_messages == len(media(tags))
    assert bench.figures.lost_messages > lost
    assert bench.figures.why == ""


def test_recording_when_less_than_the_floor_is_free_waits(tmp_path):
    bench = Bench(tmp_path, keep_free_bytes=1 << 62)
    bench.feed(source(2))
    assert bench.figures.state is RecorderState.NO_ROOM
    assert bench.files == []


def test_recording_when_the_folder_goes_away_is_no_crash(tmp_path):
    folder = tmp_path / "here"
    folder.write_text("a file where a folder should be")
    bench = Bench(folder)
    bench.feed(source(1))
    assert bench.figures.state is RecorderState.NO_ROOM
    folder.unlink()
    bench.clock.advance(RETRY_S)
    bench.feed(moved(source(1), 1000))
    bench.end()
    assert [item.path for item in bench.finished] == [folder / "live-room.flv"]


def test_recording_when_its_folder_was_moved_says_where_to_look(tmp_path):
    """What was written is in the folder that was moved, under the name that it had there."""
    bench = Bench(tmp_path / "here")
    bench.feed(source(1))
    (tmp_path / "here").rename(tmp_path / "there")
    with capture_logs() as lines:
        bench.end()
    (line,) = [line for line in lines if line["event"] == "a recording could not be finished"]
    assert "where its folder is now" in line["hint"]
    assert (tmp_path / "there/live-room.flv.part").exists()


def test_recording_when_nothing_but_sound_comes_is_cut_anywhere(tmp_path):
    bench = Bench(tmp_path, max_s=1.0)
    bench.feed([tag for tag in source(4) if tag.type_id != 9])
    bench.end()
    assert len(bench.finished) >= 3


def test_recording_when_it_does_not_begin_with_a_key_frame_waits_for_one(tmp_path):
    tags = source(2)
    late = [
        tag for tag in tags if not 0 <= tag.timestamp < 500 or inspect(*tag[::2]).message_class is MessageClass.HEADER
    ]
    bench = Bench(tmp_path)
    bench.feed(late)
    bench.end()
    assert begins_decodable(tmp_path / "live-room.flv")
    assert bench.figures.lost_messages == 0


def test_names_when_they_are_taken_get_numbers(tmp_path):
    (tmp_path / "live-room.flv").write_bytes(b"of somebody else")
    bench = Bench(tmp_path)
    bench.feed(source(1))
    bench.end()
    assert bench.files == ["live-room-2.flv", "live-room.flv"]
    assert (tmp_path / "live-room.flv").read_bytes() == b"of somebody else"


@pytest.mark.parametrize(
    "name", ["../../etc/x", "..", ".", "/etc/passwd", "a\0b", "a\nb", ".hidden", "ü/é", "", "x" * 500]
)
@pytest.mark.parametrize("template", ["{app}/{stream}/{time}", "{app}-{stream}-{time}", "{stream}"])
def test_names_when_streams_are_called_badly_stay_below_the_folder(tmp_path, name, template):
    path = NameTemplate(template).path(name, name, 0.0)
    assert not path.is_absolute()
    assert len(path.parts) == template.count("/") + 1
    assert all(part not in ("", ".", "..") and not part.startswith(".") for part in path.parts)
    assert all(part.isascii() and part.isprintable() and len(part.encode()) <= 255 - 10 for part in path.parts)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_bytes(b"")


def test_messages_when_they_are_of_no_use_in_a_file_are_left_out(tmp_path):
    bench = Bench(tmp_path)
    bench.feed(source(1))
    metadata = b"\x02\x00\x09onCuePointx\x05"
    bench.feed([FlvTag(22, 900, b"x"), FlvTag(9, 900, b""), FlvTag(15, 950, b"\0" + metadata)])
    bench.end()
    assert tags_of(tmp_path / "live-room.flv")[-1] == FlvTag(18, 950, metadata)


def test_metadata_when_they_tell_the_length_of_the_publishers_film_tell_that_of_the_file(tmp_path):
    bench = Bench(tmp_path, max_s=2)
    told = amf0.encode("onMetaData", {"duration": 900.0, "width": 640.0, "filesize": 5e9})
    bench.feed([FlvTag(18, 0, told), *(tag for tag in source(3) if tag.type_id != 18)])
    part = tags_of(next(tmp_path.glob("*.part")))
    assert amf0.decode(part[0].payload) == ["onMetaData", {"duration": 0.0, "width": 640.0, "filesize": 0.0}]
    (first,) = (Path(file.path) for file in bench.finished)
    length_s = tags_of(first)[-1].timestamp / 1000
    values = amf0.decode(tags_of(first)[0].payload)[1]
    assert values == {"duration": length_s, "width": 640.0, "filesize": first.stat().st_size}
    assert 1.8 < length_s <= 2.0


def test_metadata_when_they_come_again_tell_the_length_of_the_file_each_time(tmp_path):
    """As of an encoder that came back: FFmpeg and mpegts.js go by the last that say it."""
    told = FlvTag(18, 0, amf0.encode("onMetaData", {"duration": 900.0, "filesize": 5e9}))
    cue = FlvTag(18, 1000, amf0.encode("onCuePoint", {"duration": 30.0}))
    tags = [tag for tag in source(3) if tag.type_id != 18]
    bench = Bench(tmp_path)
    bench.feed([told, *(tag for tag in tags if tag.timestamp < 1000)])
    bench.feed([told, *tags[:2], cue, *(tag for tag in tags if tag.timestamp >= 1000), told])
    bench.end()
    path = tmp_path / "live-room.flv"
    found = [amf0.decode(tag.payload) for tag in tags_of(path) if tag.type_id == 18]
    length = {"duration": tags_of(path)[-1].timestamp / 1000, "filesize": path.stat().st_size}
    assert [name for name, _ in found] == ["onMetaData", "onMetaData", "onCuePoint", "onMetaData"]
    assert [values for name, values in found if name == "onMetaData"] == [length] * 3
    assert found[2][1] == {"duration": 30.0}


def test_metadata_when_the_disk_did_not_take_them_are_no_part_of_the_file(tmp_path):
    told = FlvTag(18, 0, amf0.encode("onMetaData", {"duration": 900.0, "filesize": 5e9}))
    bench = Bench(tmp_path, disk=Disk(30_000))
    for tag in [told, *(tag for tag in source(4) if tag.type_id != 18)]:
        bench.feed([tag, told] if tag.timestamp else [tag])
    bench.end()
    tags = tags_of(tmp_path / "live-room.flv")
    lengths = [amf0.decode(tag.payload)[1]["filesize"] for tag in tags if tag.type_id == 18]
    assert len(lengths) > 2
    assert set(lengths) == {(tmp_path / "live-room.flv").stat().st_size}


@pytest.mark.parametrize("kept", [8, 9])
@pytest.mark.parametrize(
    "end", [Bench.end, lambda bench: (os.close(bench.recorder._file._number), recover(bench.folder, whole_bytes))]
)
def test_file_when_a_track_comes_late_or_never_has_the_header_of_what_is_in_it(tmp_path, kept, end):
    """What comes in the first piece shows only what is there by then."""
    tags = [tag for tag in source(3) if tag.type_id != 18]
    one, both = Bench(tmp_path / "one"), Bench(tmp_path / "both")
    one.feed([FlvTag(18, 0, amf0.encode("onMetaData", {"audiocodecid": 10.0, "videocodecid": 7.0}))])
    one.feed([tag for tag in tags if tag.type_id == kept])
    both.feed([tag for tag in tags if tag.type_id == kept or tag.timestamp >= 1500], at_once=1)
    flags = [next(bench.folder.glob("*.part")).read_bytes()[4] for bench in (one, both)]
    assert flags == [5, {8: 4, 9: 1}[kept]]
    for bench in (one, both):
        end(bench)
    flags = [(bench.folder / "live-room.flv").read_bytes()[4] for bench in (one, both)]
    assert flags == [{8: 4, 9: 1}[kept], 5]


@pytest.mark.parametrize("told", [{}, {"duration": "long"}, {"title": "\0\x08duration\0"}])
def test_metadata_when_they_tell_no_length_stay_as_they_are(tmp_path, told):
    bench = Bench(tmp_path)
    payload = amf0.encode("onMetaData", told)
    bench.feed([FlvTag(18, 0, payload), *(tag for tag in source(1) if tag.type_id != 18)])
    bench.end()
    assert tags_of(tmp_path / "live-room.flv")[0] == FlvTag(18, 0, payload)
