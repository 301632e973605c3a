"""Recordings as fragmented MP4: what a decoder gets out of them is what was published, frame by frame."""

from __future__ import annotations

import os

import av
import pytest
from remux_kit import Bench, Disk, checksums, moved, pictures_of, source

from flowctl.core.flow.state import MessageClass
from flowctl.live.remux.container import DecodeTimes, Mp4Form, transport
from flowctl.live.remux.course import Unit
from flowctl.live.remux.files import recover
from flowctl.live.remux.flvform import whole_bytes
from flowctl.live.remux.writer import RecorderState


@pytest.mark.parametrize("recipe", ["plain", "b_frames", "hevc", "silent"])
def test_mp4_when_decoded_has_every_frame_at_its_time(tmp_path, sample, recipe):
    path, tags = sample(recipe)
    bench = Bench(tmp_path, Mp4Form)
    bench.feed(moved(tags, 4_000_000_000))
    bench.end()
    assert bench.files == ["live-room.mp4"]
    got, published = pictures_of(tmp_path / "live-room.mp4"), pictures_of(path)
    assert checksums(got) == checksums(published)
    first = min(frames[0][0] for frames in published.values() if frames)
    for kind, frames in published.items():
        apart = [abs(a - (b - first)) for (a, _), (b, _) in zip(got[kind], frames, strict=True)]
        assert max(apart, default=0) <= 0.07, kind  # what B-frames delay the first picture


def test_mp4_when_rotated_begins_each_file_at_a_key_frame(tmp_path, sample):
    path, tags = sample("b_frames")
    bench = Bench(tmp_path, Mp4Form, max_s=1.0)
    bench.feed(tags)
    bench.recorder.finish("stopped")
    assert len(bench.finished) == 3
    got = [checksum for item in bench.finished for checksum in checksums(pictures_of(item.path))["video"]]
    assert got == checksums(pictures_of(path))["video"]


def test_mp4_when_killed_is_decoded_as_it_is_and_after_recovery(tmp_path, sample):
    _, tags = sample("plain")
    bench = Bench(tmp_path, Mp4Form)
    bench.feed(tags)
    os.close(bench.recorder._file._number)
    part = tmp_path / "live-room.mp4.part"
    pictures = checksums(pictures_of(part))["video"]
    assert len(pictures) == 75  # five of six groups: the last one was not complete
    whole = part.read_bytes()
    part.write_bytes(whole[:-7])
    assert recover(tmp_path, whole_bytes) == [tmp_path / "live-room.mp4"]
    assert checksums(pictures_of(tmp_path / "live-room.mp4"))["video"] == pictures[:60]


def test_mp4_when_the_picture_changes_its_size_is_two_files(tmp_path, sample):
    (first, tags), (second, others) = sample("plain"), sample("larger")
    bench = Bench(tmp_path, Mp4Form)
    bench.feed(tags)
    bench.feed(moved(others, 3000))
    bench.end()
    assert [checksums(pictures_of(item.path))["video"] for item in bench.finished] == [
        checksums(pictures_of(path))["video"] for path in (first, second)
    ]


def test_mp4_when_sound_begins_later_is_two_files(tmp_path, sample):
    _, tags = sample("plain")
    bench = Bench(tmp_path, Mp4Form)
    bench.feed([tag for tag in tags if tag.type_id != 8 or tag.timestamp >= 1500])
    bench.end()
    assert [item.why for item in bench.finished] == ["its tracks changed", "the stream ended"]
    assert [bool(pictures_of(item.path)["audio"]) for item in bench.finished] == [False, True]


def test_mp4_when_the_picture_begins_later_is_two_files_and_all_sound(tmp_path, sample):
    """Its header comes at the end of a group of sound, of which it is none."""
    _, tags = sample("plain")
    begin_ms = next(tag.timestamp for tag in tags if tag.payload[:2] == b"\x17\1" and tag.timestamp > 900)
    headers = [tag for tag in tags if tag.payload[:2] == b"\x17\0"]
    bench = Bench(tmp_path, Mp4Form)
    bench.feed([tag for tag in tags if tag.type_id != 9 and tag.timestamp < begin_ms])
    bench.feed(moved(headers, begin_ms))
    bench.feed([tag for tag in tags if tag.timestamp >= begin_ms])
    bench.end()
    assert len(bench.files) == 2
    assert bench.figures.lost_messages == 0
    kinds = [{kind for kind, frames in pictures_of(tmp_path / name).items() if frames} for name in bench.files]
    assert sorted(map(sorted, kinds)) == [["audio"], ["audio", "video"]]


def test_mp4_when_the_disk_is_full_keeps_whole_fragments(tmp_path, sample):
    _, tags = sample("plain")
    bench = Bench(tmp_path, Mp4Form, disk=Disk(20_000))
    bench.feed(tags)
    assert bench.figures.state is RecorderState.NO_ROOM
    assert 0 < len(pictures_of(tmp_path / "live-room.mp4")["video"]) < 90
    assert bench.figures.lost_messages


def test_mp4_when_the_media_cannot_be_read_tells_and_goes_on(tmp_path):
    good = source(2)
    broken = [tag._replace(payload=tag.payload[:5] + b"\xff" * 20) if tag.type_id == 9 else tag for tag in source(2)]
    bench = Bench(tmp_path, Mp4Form)
    bench.begin()
    bench.feed(broken)
    bench.begin()
    bench.feed(good)
    bench.end()
    assert len(pictures_of(bench.finished[-1].path)["video"]) == 20


def later_decoded(tags, by_ms):
    """Return tags whose pictures are shown when they were, and decoded later: with negative composition times."""
    made = []
    for tag in tags:
        data = tag.payload
        if tag.type_id == 9 and not data[0] & 0x80 and data[1] == 1:
            time = int.from_bytes(data[2:5], "big", signed=True) - by_ms
            data = data[:2] + time.to_bytes(3, "big", signed=True) + data[5:]
            tag = tag._replace(timestamp=tag.timestamp + by_ms)  # noqa: PLW2901 - the same picture
        elif tag.type_id == 9 and data[0] & 0x8F in {0x81, 0x83}:
            coded = data[0] & 15 == 1
            time = (int.from_bytes(data[5:8], "big", signed=True) if coded else 0) - by_ms
            data = (
                bytes((data[0] & 0xF0 | 1,))
                + data[1:5]
                + time.to_bytes(3, "big", signed=True)
                + data[8 if coded else 5 :]
            )
            tag = tag._replace(timestamp=tag.timestamp + by_ms)  # noqa: PLW2901 - the same picture
        made.append(tag._replace(payload=data))
    return made


@pytest.mark.parametrize("recipe", ["b_frames", "hevc"])
@pytest.mark.parametrize("by_ms", [80, 200])
def test_mp4_when_composition_times_are_negative_has_every_frame(tmp_path, sample, recipe, by_ms):
    """Encoders that say so lose nothing: pictures are decoded earlier, and shown at their times."""
    path, tags = sample(recipe)
    bench = Bench(tmp_path, Mp4Form)
    bench.feed(later_decoded(tags, by_ms))
    bench.end()
    assert bench.figures.lost_messages == 0
    assert checksums(pictures_of(tmp_path / "live-room.mp4")) == checksums(pictures_of(path))


def test_mp4_when_a_later_group_reorders_more_has_decode_times_in_order(tmp_path, sample):
    """Such an encoder's first groups have no B-frames, and are decoded when they are shown; then some come."""
    (_, plain), (_, others) = sample("plain"), sample("b_frames")
    heads = [tag for tag in others if tag.type_id != 18 and tag.payload[1] == 0]
    delay_ms = next(int.from_bytes(tag.payload[2:5], "big") for tag in others if tag.type_id == 9 and tag not in heads)
    shown = [
        new._replace(timestamp=old.timestamp) for new, old in zip(later_decoded(others, delay_ms), others, strict=True)
    ]
    first, second = ([tag for tag in tags if tag.type_id != 18 and tag.payload[1] == 1] for tags in (plain, shown))
    bench = Bench(tmp_path, Mp4Form)
    bench.feed([*heads, *first, *moved(second, 3000)])
    bench.end()
    (item,) = bench.finished
    with av.open(str(item.path)) as container:
        times = [(packet.dts, packet.pts) for packet in container.demux(video=0) if packet.dts is not None]
    assert delay_ms > 0
    assert len(times) == sum(tag.type_id == 9 for tag in first + second)
    assert [dts for dts, _ in times] == sorted({dts for dts, _ in times})
    assert all(dts <= pts for dts, pts in times)


def test_decode_times_when_all_pictures_are_shown_later_are_the_publishers(sample):
    _, tags = sample("b_frames")
    tags = [tag for tag in tags if tag.type_id == 9 and tag.payload[1] == 1]
    later = [tag._replace(payload=tag.payload[:2] + b"\x00\x04\x00" + tag.payload[5:]) for tag in tags]
    units = [Unit(9, tag.timestamp, tag.payload, MessageClass.INTER) for tag in later]
    assert DecodeTimes().applied(units) == units


@pytest.mark.parametrize("recipe", ["plain", "b_frames", "hevc"])
@pytest.mark.parametrize("type_id", [8, 9])
@pytest.mark.parametrize("back_ms", [0, 20])
def test_mp4_when_a_time_comes_twice_has_every_frame(tmp_path, sample, recipe, type_id, back_ms):
    path, tags = sample(recipe)
    places = [at for at, tag in enumerate(tags) if tag.type_id == type_id and tag.timestamp > 1000]
    before, at = places[3:5]
    tags[at] = tags[at]._replace(timestamp=tags[before].timestamp - back_ms)
    bench = Bench(tmp_path, Mp4Form)
    bench.feed(tags)
    bench.end()
    assert bench.figures.lost_messages == 0
    assert checksums(pictures_of(tmp_path / "live-room.mp4")) == checksums(pictures_of(path))


@pytest.mark.parametrize("left_out", [8, 9])
def test_mp4_when_a_track_is_silent_for_a_while_is_one_file(tmp_path, sample, left_out):
    _, tags = sample("plain")
    bench = Bench(tmp_path, Mp4Form)
    bench.feed([tag for tag in tags if tag.type_id != left_out or not 700 <= tag.timestamp < 1900])
    bench.end()
    assert bench.files == ["live-room.mp4"]
    assert bench.figures.lost_messages == 0


def test_mp4_when_a_header_is_repeated_is_one_file(tmp_path, sample):
    """Some encoders repeat the header of one track alone: the tracks stay in their order, and in one file."""
    _, tags = sample("plain")
    head = next(tag for tag in tags if tag.type_id == 9)
    half = len(tags) // 2
    bench = Bench(tmp_path, Mp4Form)
    bench.feed([*tags[:half], head._replace(timestamp=tags[half].timestamp), *tags[half:]])
    bench.end()
    assert bench.files == ["live-room.mp4"]


def test_group_when_a_track_shows_itself_late_is_refused_in_words():
    filler = [Unit(18, at, b"\x02\x00\x01x" + bytes(60_000), MessageClass.DATA) for at in range(100)]
    sound = [Unit(8, 10 + at, b"\x2f" + bytes(400), MessageClass.AUDIO) for at in range(3)]
    picture = [Unit(9, 200 + at, b"\x12" + bytes(400), MessageClass.KEY) for at in range(3)]
    with pytest.raises(ValueError, match="mpegts cannot hold it"):
        transport((), [*sound, *filler, *picture], 0)
