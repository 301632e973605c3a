"""HLS in a folder: segments that decode to what was published, few files, and a playlist that is true at any time."""

from __future__ import annotations

import io
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import av
import pytest
from remux_kit import checksums, moved, pictures_of, source

from flowctl.errors import ConfigError, FlowctlError
from flowctl.flv import TAG_AUDIO, TAG_VIDEO, FlvReader
from flowctl.live.remux.files import DiskRoom
from flowctl.live.remux.hls import AWAY_S, HlsSettings, HlsWriter, SegmentForm
from flowctl.live.remux.intake import MessageTaken, PublicationBegan, PublicationEnded
from flowctl.live.remux.writer import RecorderState
from flowctl.testing import ManualClock
from kit.sample import find_ffmpeg


class Writing:
    """A writer of HLS that is fed by hand; the first number is 1000."""

    def __init__(self, folder, *, app="live", stream="room", room=None, wall_s=1000.0, **settings):
        self.clock = ManualClock()
        self.folder = folder / app
        self.writer = HlsWriter(
            app,
            stream,
            HlsSettings(folder=folder, **{"segment_s": 1.0, "listed": 6} | settings),
            room=room,
            clock=self.clock,
            wall=lambda: wall_s,
        )

    def feed(self, tags):
        for tag in tags:
            self.writer.work([MessageTaken(tag.type_id, tag.timestamp, tag.payload)])

    def say(self, *items):
        self.writer.work(items)

    @property
    def text(self):
        return self.writer.playlist_path.read_text()

    @property
    def listed(self):
        return [line for line in self.text.splitlines() if not line.startswith("#")]

    @property
    def files(self):
        return sorted(path.name for path in self.folder.iterdir())

    def media(self):
        parts = [b""]
        for line in self.text.splitlines():
            if line == "#EXT-X-DISCONTINUITY" and parts[-1]:
                parts.append(b"")
            elif found := re.match(r'#EXT-X-MAP:URI="(.*)"', line):
                parts[-1] += (self.folder / found[1]).read_bytes()
            elif not line.startswith("#"):
                parts[-1] += (self.folder / line).read_bytes()
        return parts


@pytest.mark.parametrize(
    ("recipe", "form", "suffix"),
    [("plain", "auto", ".ts"), ("b_frames", "ts", ".ts"), ("b_frames", "fmp4", ".m4s"), ("hevc", "auto", ".m4s")],
)
def test_hls_when_decoded_has_every_frame(tmp_path, sample, recipe, form, suffix):
    path, tags = sample(recipe)
    writing = Writing(tmp_path, form=SegmentForm(form))
    writing.say(PublicationBegan())
    writing.feed(tags)
    writing.say(PublicationEnded("over"))
    assert len(writing.listed) == 3
    assert {Path(name).suffix for name in writing.listed} == {suffix}
    (media,) = writing.media()
    got, published = pictures_of(media), pictures_of(path)
    assert checksums(got) == checksums(published)
    steps = [b - a for frames in got.values() for (a, _), (b, _) in itertools.pairwise(frames)]
    assert max(steps) < 0.06  # times go on across segments
    assert "ENDLIST" not in writing.text  # the publisher may be back
    writing.clock.advance(AWAY_S)
    writing.say()
    assert writing.text.endswith("#EXT-X-ENDLIST\n")
    durations = [float(item) for item in re.findall(r"EXTINF:([\d.]+)", writing.text)]
    assert sum(durations) == pytest.approx(3.0, abs=0.1)


def test_hls_of_av1_when_decoded_has_every_frame(tmp_path):
    """Its decoder in FFmpeg has another name than its encoders: what is copied needs neither."""
    path = tmp_path / "av1.flv"
    source_of_it = ("-f", "lavfi", "-i", "testsrc2=s=160x96:r=25", "-t", "2", "-pix_fmt", "yuv420p")
    encode = (*source_of_it, "-c:v", "libsvtav1", "-preset", "12", "-g", "25")
    try:
        subprocess.run([str(find_ffmpeg()), "-v", "error", *encode, str(path)], check=True, capture_output=True)
    except (FlowctlError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this FFmpeg cannot make the sample: {error}")
    writing = Writing(tmp_path / "hls")
    writing.feed(FlvReader().feed(path.read_bytes()))
    writing.say(PublicationEnded("over"))
    assert len(writing.listed) == 2
    (media,) = writing.media()
    assert len(pictures_of(media)["video"]) == 50
    assert checksums(pictures_of(media)) == checksums(pictures_of(path))


def test_hevc_when_it_is_written_is_called_what_players_of_apple_take(tmp_path, sample):
    _, tags = sample("hevc")
    writing = Writing(tmp_path)
    writing.feed(tags)
    init = (writing.folder / "room-1000-init.mp4").read_bytes()
    assert (b"hvc1" in init, b"hev1" in init) == (True, False)


def test_hls_when_a_segment_is_fetched_alone_it_begins_with_a_key_frame(tmp_path, sample):
    _, tags = sample("b_frames")
    writing = Writing(tmp_path)
    writing.feed(tags)
    assert len(writing.listed) == 2
    for name in writing.listed:
        assert len(pictures_of((writing.folder / name).read_bytes())["video"]) == 30


def test_hls_when_it_goes_on_keeps_few_files_and_no_temporary_ones(tmp_path):
    writing = Writing(tmp_path, listed=3, form=SegmentForm.FMP4)
    tags = source(20)
    for begin in range(0, len(tags), 7):
        writing.feed(tags[begin : begin + 7])
        if writing.writer.playlist_path.exists():
            assert set(writing.listed) <= set(writing.files)
            assert len(writing.files) <= 2 * 3 + 2
            assert not [name for name in writing.files if name.endswith(".part")]
    assert len(writing.listed) == 3


def test_hls_when_the_publisher_restarts_says_so(tmp_path, sample):
    (first, tags), (second, others) = sample("plain"), sample("larger")
    writing = Writing(tmp_path)
    for part in (tags, others):
        writing.say(PublicationBegan())
        writing.feed(part)
    writing.say(PublicationEnded("over"))
    assert [checksums(pictures_of(part))["video"] for part in writing.media()] == [
        checksums(pictures_of(path))["video"] for path in (first, second)
    ]
    assert writing.text.count("#EXT-X-DISCONTINUITY\n") == 1


def test_hls_when_another_process_goes_on_with_it_does_not_end_for_players(tmp_path, sample):
    _, tags = sample("plain")
    first, second = Writing(tmp_path), Writing(tmp_path)
    numbers = []
    for writing in (first, second):
        writing.say(PublicationBegan())
        writing.feed(tags)
        writing.writer.goes_on = True
        writing.writer.stop(0.0)
        writing.writer._run()
        assert "ENDLIST" not in writing.text
        numbers += [int(re.search(r"-(\d+)\.", name)[1]) for name in writing.listed]
    assert len(numbers) == len(set(numbers)) == 6
    assert numbers == sorted(numbers)


def test_hls_when_the_publisher_is_back_soon_goes_on_in_the_same_playlist(tmp_path, sample):
    (_, tags), (_, others) = sample("plain"), sample("larger")
    writing = Writing(tmp_path)
    for part in (tags, others):
        writing.say(PublicationBegan())
        writing.feed(part)
        writing.say(PublicationEnded("over"))
        writing.clock.advance(AWAY_S - 1)
        writing.say()
        assert "ENDLIST" not in writing.text
    assert len(writing.listed) == 6
    writing.clock.advance(1)
    writing.say()
    assert writing.text.endswith("#EXT-X-ENDLIST\n")


def test_hls_when_codecs_change_and_change_back_names_files_that_are_there(tmp_path, sample):
    (_, hevc), (_, plain) = sample("hevc"), sample("plain")
    writing = Writing(tmp_path, listed=3)
    for part in (hevc, plain, plain, plain, hevc):
        writing.say(PublicationBegan())
        writing.feed(part)
        writing.say(PublicationEnded("over"))
        maps = re.findall(r'URI="(.*)"', writing.text)
        assert set(maps) <= set(writing.files)
    assert maps


def test_hls_when_the_clock_jumps_says_so_and_goes_on(tmp_path, sample):
    _, tags = sample("plain")
    writing = Writing(tmp_path)
    writing.feed(moved(tags, 100_000))
    writing.feed(moved([tag for tag in tags if tag.timestamp], 900_000))
    writing.say(PublicationEnded("over"))
    assert writing.text.count("#EXT-X-DISCONTINUITY\n") == 1
    assert max(float(item) for item in re.findall(r"EXTINF:([\d.]+)", writing.text)) < 1.2


def test_hls_when_it_starts_again_takes_no_old_name(tmp_path):
    first = Writing(tmp_path, wall_s=5000.0)
    first.feed(source(4))
    other = first.folder / "room-2.m3u8"
    other.write_text("of another stream")
    (first.folder / "room-9.ts.part").write_text("torn")
    second = Writing(tmp_path, wall_s=10.0)
    second.feed(source(4))
    numbers = [[int(re.search(r"-(\d+)", name)[1]) for name in writing] for writing in (first.listed, second.listed)]
    assert min(numbers[1]) >= 5003
    assert sorted([*second.listed, "room.m3u8", "room-2.m3u8"]) == second.files


def test_hls_when_another_process_writes_the_stream_is_refused(tmp_path):
    """Each would remove the files of the other; another stream of the folder, and a next run, are let in."""
    first, second = Writing(tmp_path), Writing(tmp_path)
    first.writer.claim()
    with pytest.raises(ConfigError, match=r"live/room\.m3u8 is being written by another process") as caught:
        second.writer.claim()
    assert "another folder" in caught.value.hint
    other = Writing(tmp_path, stream="other")
    other.writer.claim()
    for writing in (first, other):
        writing.writer.start()
        assert writing.writer.stop(20.0)
    second.writer.claim()
    second.writer.start()
    assert second.writer.stop(20.0)


def test_hls_when_the_disk_is_full_keeps_what_is_there_and_goes_on(tmp_path):
    free = [1000]
    writing = Writing(tmp_path, room=DiskRoom(tmp_path, 100, lambda _: (free[0], 1000)))
    tags = source(9)
    writing.feed([tag for tag in tags if tag.timestamp < 3500])
    before = writing.text
    free[0] = 1
    writing.feed([tag for tag in tags if 3500 <= tag.timestamp < 5500])
    assert writing.writer.statistics().state is RecorderState.NO_ROOM
    assert writing.text == before
    lost = writing.writer.statistics().lost_messages
    assert lost
    free[0] = 1000
    writing.clock.advance(10.0)
    writing.feed([tag for tag in tags if tag.timestamp >= 5500])
    assert writing.text.count("#EXT-X-DISCONTINUITY\n") == 1
    assert set(writing.listed) <= set(writing.files)
    assert writing.writer.statistics().lost_messages == lost


def test_hls_when_nothing_but_sound_comes_is_cut_by_time(tmp_path):
    writing = Writing(tmp_path)
    writing.feed([tag for tag in source(4) if tag.type_id != 9])
    assert len(writing.listed) == 3


def test_hls_when_the_stream_has_a_bad_name_stays_in_the_folder(tmp_path):
    writing = Writing(tmp_path, stream="../../a b")
    writing.feed(source(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live"]
    assert writing.listed[0] == "%252E.%252F..%252Fa%2520b-1000.ts"


@pytest.mark.parametrize("settings", [{"segment_s": 0.5}, {"segment_s": 31}, {"listed": 2}, {"listed": 101}])
def test_settings_when_out_of_range_are_refused(tmp_path, settings):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} is"):
        HlsSettings(folder=tmp_path, **{"listed": 6} | settings)


def test_hls_when_its_folder_is_removed_makes_it_again(tmp_path):
    writing = Writing(tmp_path)
    tags = source(6)
    writing.feed(tags[: len(tags) // 2])
    shutil.rmtree(writing.folder)
    writing.feed(tags[len(tags) // 2 :])
    assert writing.writer.statistics().lost_messages == 0
    assert writing.listed[-1] in writing.files


def test_hls_when_the_playlist_cannot_be_written_leaves_no_file_for_ever(tmp_path):
    writing = Writing(tmp_path, listed=3)
    tags = source(20)
    in_the_way = Path(f"{writing.writer.playlist_path}.part")
    for count, tag in enumerate(tags):
        writing.clock.advance(1.0)
        if count == len(tags) // 4:
            in_the_way.mkdir()
        elif count == len(tags) // 2:
            in_the_way.rmdir()
        writing.feed([tag])
    assert len(writing.files) == 1 + 3 + 3


def test_hls_when_a_link_lies_where_it_writes_does_not_write_through_it_and_goes_on(tmp_path):
    other = tmp_path / "authorized_keys"
    other.write_text("mine")
    writing = Writing(tmp_path / "hls")
    writing.folder.mkdir(parents=True)
    link = writing.folder / "room.m3u8.part"
    writing.feed(source(2))
    link.symlink_to(other)
    writing.feed(moved(source(2), 2000))
    assert other.read_text() == "mine"
    assert not link.is_symlink()
    writing.clock.advance(60.0)
    writing.feed(moved(source(4), 4000))
    assert len(writing.listed) > 3


def test_hls_when_messages_are_tiny_holds_no_more_of_them_than_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr("flowctl.live.remux.hls._MOST_BYTES", 100_000)
    writing = Writing(tmp_path)
    headers = [tag for tag in source(1)[:3] if tag.type_id == 8]
    writing.feed([*headers, *(headers[0]._replace(payload=b"\xaf\x01") for _ in range(2000))])
    assert len(writing.writer._units) <= 500


def test_hls_when_the_clock_goes_back_a_little_has_no_segment_of_negative_length(tmp_path):
    writing = Writing(tmp_path)
    tags = moved(source(4), 10_000)
    last_key = max(n for n, tag in enumerate(tags) if tag.type_id == 9 and tag.payload[0] >> 4 == 1)
    sound = next(tag for tag in tags if tag.type_id == 8 and tag.payload[1] == 1)
    writing.feed([*tags[: last_key + 1], sound._replace(timestamp=tags[last_key].timestamp - 2900)])
    writing.feed(moved(tags[3:], 400_000))
    lengths = [float(found) for found in re.findall(r"#EXTINF:(.*),", writing.text)]
    assert lengths
    assert min(lengths) > 0


@pytest.mark.parametrize("names", [("live", "\u76f4" * 40), ("a" * 240, "room"), ("live", "s" * 231)])
def test_hls_when_no_file_can_have_the_name_is_refused(tmp_path, names):
    """Such a stream is refused at once, and in words: there is nothing to wait for."""
    with pytest.raises(ConfigError, match="too long"):
        Writing(tmp_path, app=names[0], stream=names[1])


def test_hls_when_a_name_is_as_long_as_may_be_is_written(tmp_path):
    writing = Writing(tmp_path, app="a" * 230, stream="s" * 230, form=SegmentForm.FMP4)
    writing.feed(source(3))
    assert len(writing.listed) == 2


def test_parts_when_a_stream_is_written_with_low_latency_are_the_segments_in_pieces(tmp_path, sample):
    path, tags = sample("b_frames")
    writing = Writing(tmp_path, part_s=0.2)
    writing.feed(tags)
    parts = re.findall(r'#EXT-X-PART:DURATION=([\d.]+),URI="(.*?)"(,INDEPENDENT=YES)?', writing.text)
    assert [name for _, name, _ in parts] == [f"room-1000.{number}.m4s" for number in range(len(parts))]
    assert max(float(duration_s) for duration_s, _, _ in parts[:-1]) <= 0.2
    assert writing.text.endswith(f'#EXT-X-PRELOAD-HINT:TYPE=PART,URI="room-1000.{len(parts)}.m4s"\n')
    writing.say(PublicationEnded("over"))
    (media,) = writing.media()
    assert checksums(pictures_of(media)) == checksums(pictures_of(path))
    in_parts = b"".join((writing.folder / f"room-1000.{n}.m4s").read_bytes() for n in range(len(parts)))
    assert media.startswith((writing.folder / "room-1000-init.mp4").read_bytes() + in_parts)


@pytest.mark.parametrize("name", ["hls", "hls/live"])
def test_hls_when_a_link_takes_the_place_of_its_folder_writes_nothing_there(tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "live").mkdir(parents=True)
    writing = Writing(tmp_path / "hls")
    tags = source(8)
    writing.feed(tags[: len(tags) // 2])
    before = writing.files
    (tmp_path / name).rename(tmp_path / "moved")
    (tmp_path / name).symlink_to(elsewhere)
    writing.feed(tags[len(tags) // 2 :])
    assert writing.writer.statistics().state is RecorderState.NO_ROOM
    assert writing.writer.statistics().why.startswith(f"{tmp_path / name} is a link")
    assert [path for path in elsewhere.rglob("*") if path.is_file()] == []
    (tmp_path / name).unlink()
    (tmp_path / "moved").rename(tmp_path / name)
    writing.clock.advance(60.0)
    writing.feed(moved(tags, 8000))
    assert writing.writer.statistics().state is RecorderState.RECORDING
    assert set(writing.files) > set(before)


@pytest.mark.parametrize("pictures_end_ms", [0, 4000])
def test_hls_when_pictures_are_announced_and_stay_away_is_cut_at_sound(tmp_path, pictures_end_ms):
    """A camera that is off, or an encoder whose header of video is all that comes of it: listeners do not wait."""
    tags = source(20)
    gone = [tag for tag in tags if tag.type_id == TAG_VIDEO and tag.timestamp >= pictures_end_ms]
    kept = [tag for tag in tags if tag not in gone or tag.payload[1:2] == b"\0"]
    writing = Writing(tmp_path, listed=20)
    writing.feed(kept)
    writing.say(PublicationEnded("it ended"))
    lengths = [float(item) for item in re.findall(r"#EXTINF:([0-9.]+)", writing.text)]
    assert max(lengths) < 12
    assert lengths[-2] < 1.1


@pytest.mark.parametrize(("form", "part_s"), [(SegmentForm.TS, 0.0), (SegmentForm.FMP4, 0.0), (SegmentForm.FMP4, 0.3)])
def test_hls_when_sound_has_ended_announces_none_to_players_that_join(tmp_path, form, part_s):
    """They would wait for it; a pause of some seconds leaves the tracks as they are."""
    writing = Writing(tmp_path, listed=20, form=form, part_s=part_s)
    writing.feed([tag for tag in source(20) if tag.type_id != TAG_AUDIO or tag.timestamp < 4000])
    writing.say(PublicationEnded("it ended"))
    kinds = []
    for data in writing.media():
        with av.open(io.BytesIO(data)) as container:
            kinds.append({stream.type for stream in container.streams})
    assert kinds == [{"video", "audio"}, {"video"}]
    assert [text.count("#EXTINF") for text in writing.text.split("#EXT-X-DISCONTINUITY\n")] == [14, 6]
