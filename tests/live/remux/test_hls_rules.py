"""HLS by the rules: each state of a playlist, and each file in it, looked at by a validator of our own."""

from __future__ import annotations

import io
import itertools
import random
import re
from unittest.mock import Mock

import av
import pytest
from hls_kit import ListingReader, Segment, Validator
from hypothesis import given, settings
from hypothesis import strategies as st
from remux_kit import moved, pictures_of, source

from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.live.remux.files import DiskRoom
from flowctl.live.remux.hls import AWAY_S, HlsSettings, HlsWriter, SegmentForm
from flowctl.live.remux.intake import MessageTaken, PublicationBegan, PublicationEnded, QueueCut
from flowctl.live.remux.waiting import parse_playlist
from flowctl.live.remux.writer import RecorderState
from flowctl.testing import ManualClock
from flowctl.wire.media.synthetic import SyntheticSource


class Watched:
    """A writer whose playlist is validated after each message that changed it."""

    def __init__(self, folder, *, room=None, odd=False, **options):
        self.clock = ManualClock()
        options = {"segment_s": 1.0, "listed": 4, "part_s": 0.2, "form": SegmentForm.FMP4} | options
        self.began = self.clock()
        written = HlsSettings(folder=folder, **options)
        self.writer = HlsWriter("live", "room", written, room=room, clock=self.clock, wall=self.wall)
        self.folder = folder / "live"
        self.validator = Validator(lambda name: (self.folder / name).read_bytes(), odd=odd)
        self.text = ""
        self.at_ms = 0
        self.set_by_s = 0.0  # what the time of day was set by

    def wall(self):
        return 1000.0 + self.set_by_s + self.clock() - self.began

    def feed(self, tags, *, kept_ms=0, speed=1.0):
        """Have tags come in their time, but those before `kept_ms` at once."""
        for tag in tags:
            if tag.timestamp >= kept_ms:
                self.clock.advance(max(tag.timestamp - self.at_ms, 0) / 1000 / speed)
            self.at_ms = tag.timestamp
            self.say(MessageTaken(tag.type_id, tag.timestamp, tag.payload))

    def say(self, *items):
        self.writer.work(items)
        path = self.writer.playlist_path
        if path.exists() and (text := path.read_text()) != self.text:
            self.text = text
            listing = self.validator.check(text)
            served = parse_playlist(text.encode())
            assert (served.hint, served.part_s, served.target_s) == (listing.hint, listing.part_s, listing.target_s)
            opened = listing.segments[-1] if not listing.segments[-1].name else Segment(listing.segments[-1].number + 1)
            assert (served.number, served.parts) == (opened.number, len(opened.parts))

    def newest_behind_s(self):
        """Return how long ago the newest segment ended by its date."""
        last = ListingReader(self.text).made.whole[-1]
        return self.wall() - last.began_at - last.duration_s

    def end(self):
        self.say(PublicationEnded("over"))
        self.clock.advance(AWAY_S)
        self.say()


@pytest.mark.parametrize("recipe", ["plain", "b_frames", "hevc", "silent"])
@pytest.mark.parametrize("part_s", [0.0, 0.2, 0.5])
def test_hls_when_it_is_written_keeps_the_rules(tmp_path, sample, recipe, part_s):
    _, tags = sample(recipe)
    watched = Watched(tmp_path, part_s=part_s)
    watched.feed(tags)
    watched.end()
    assert watched.validator.faults == []
    assert watched.writer.statistics().lost_messages == 0
    assert watched.validator.looked_at >= {0.0: 3, 0.2: 15, 0.5: 6}[part_s]


@pytest.mark.parametrize("part_s", [0.0, 0.5])
def test_hls_when_the_frame_rate_changes_has_pictures_without_gaps(tmp_path, sample, part_s):
    _, tags = sample("plain")
    pictures = [tag for tag in tags if tag.type_id == TAG_VIDEO and tag.payload[0] == 0x27 and tag.payload[1] == 1]
    left_out = {tag.timestamp for number, tag in enumerate(pictures) if number % 14 > 4 and number % 3}
    watched = Watched(tmp_path, part_s=part_s)
    watched.feed([tag for tag in tags if tag.type_id != TAG_VIDEO or tag.timestamp not in left_out])
    watched.end()
    assert len(left_out) > 10
    assert watched.validator.faults == []


def test_hls_when_there_is_no_sound_for_a_while_is_one_timeline(tmp_path, sample):
    _, tags = sample("plain")
    watched = Watched(tmp_path)
    watched.feed([tag for tag in tags if tag.type_id == TAG_VIDEO or not 700 <= tag.timestamp < 1900])
    watched.end()
    assert "DISCONTINUITY" not in watched.text


def test_hls_when_only_sound_comes_keeps_the_rules(tmp_path):
    watched = Watched(tmp_path)
    watched.feed([tag for tag in source(6) if tag.type_id != TAG_VIDEO])
    watched.end()
    assert watched.validator.faults == []
    assert watched.validator.looked_at >= 20


def test_hls_when_publishers_change_and_come_back_keeps_the_rules(tmp_path, sample):
    """Other codecs, other sizes, a clock that jumps, an end and a new beginning: all are told in the playlist."""
    (_, plain), (_, hevc), (_, larger) = sample("plain"), sample("hevc"), sample("larger")
    watched = Watched(tmp_path, listed=20)
    for tags in (plain, hevc, moved(larger, 900_000)):
        watched.say(PublicationBegan())
        watched.feed(tags)
    watched.end()
    assert watched.text.count("#EXT-X-DISCONTINUITY\n") == 2
    watched.say(PublicationBegan())
    watched.feed(moved(plain, 2_000_000))
    watched.end()
    assert watched.text.count("#EXT-X-DISCONTINUITY\n") == 1
    assert watched.validator.faults == []


def test_parts_when_the_disk_is_full_in_the_middle_of_a_segment_keep_the_rules(tmp_path):
    """What was listed of a segment stays, and becomes one: no number is used twice for other media."""
    free = [1000]
    watched = Watched(tmp_path, room=DiskRoom(tmp_path, 100, lambda _: (free[0], 1000)))
    tags = source(9)
    watched.feed([tag for tag in tags if tag.timestamp < 3500])
    before = watched.text
    free[0] = 1
    watched.feed([tag for tag in tags if 3500 <= tag.timestamp < 5500])
    assert watched.writer.statistics().lost_messages
    assert watched.text == before
    free[0] = 1000
    watched.clock.advance(10.0)
    watched.feed([tag for tag in tags if tag.timestamp >= 5500])
    watched.end()
    assert watched.text.count("#EXT-X-DISCONTINUITY\n") == 1
    assert watched.validator.faults == []


def test_parts_when_no_playlist_can_be_written_lose_nothing(tmp_path):
    watched = Watched(tmp_path)
    tags = source(8)
    in_the_way = watched.folder / "room.m3u8.part"
    watched.feed([tag for tag in tags if tag.timestamp < 3100])
    in_the_way.mkdir()
    watched.feed([tag for tag in tags if 3100 <= tag.timestamp < 3700])
    in_the_way.rmdir()
    watched.clock.advance(10.0)
    watched.feed([tag for tag in tags if tag.timestamp >= 3700])
    watched.end()
    assert watched.validator.faults == []


def test_pictures_when_they_are_far_apart_make_longer_parts_and_stay_allowed(tmp_path):
    """Two pictures a second, with no sound that could end a part: the target is what the parts are."""
    watched = Watched(tmp_path, part_s=0.2)
    watched.feed([tag for tag in source(6, fps=2) if tag.type_id == TAG_VIDEO])
    watched.end()
    assert watched.validator.faults == []


def test_parts_when_pictures_stop_go_on_with_sound(tmp_path, sample):
    _, tags = sample("b_frames")
    watched = Watched(tmp_path, listed=20)
    watched.feed([tag for tag in tags if tag.type_id != TAG_VIDEO or not 1100 < tag.timestamp < 2400])
    watched.end()
    durations = [float(found) for found in re.findall(r"#EXT-X-PART:DURATION=([\d.]+)", watched.text)]
    assert len(durations) >= 14
    assert max(durations) <= 0.25
    assert watched.writer.statistics().lost_messages == 0
    assert watched.text.count("#EXT-X-MAP") == 1


def test_times_of_day_when_a_stream_is_written_are_those_at_which_it_came(tmp_path):
    """A part that came late, as the first ones do which a server has kept, does not move the time of all others."""
    watched = Watched(tmp_path, segment_s=1.0)
    watched.feed(source(6), kept_ms=1900)
    listing = ListingReader(watched.text).made
    starts = [segment.began_at for segment in listing.segments]
    assert starts == pytest.approx([999.1, 1000.1, 1001.1, 1002.1, 1003.1], abs=0.05)
    assert watched.validator.faults == []


@pytest.mark.parametrize("part_s", [0.0, 0.2])
@pytest.mark.parametrize("speed", [0.9, 0.999, 1.0001])
def test_times_of_day_when_the_clock_of_the_publisher_is_slow_or_fast_follow_without_a_break(tmp_path, part_s, speed):
    watched = Watched(tmp_path, part_s=part_s)
    watched.feed(source(60.1), speed=speed)
    assert -0.01 <= watched.newest_behind_s() < 0.9
    assert "DISCONTINUITY" not in watched.text
    assert watched.validator.faults == []


@pytest.mark.parametrize("part_s", [0.0, 0.2])
@pytest.mark.parametrize("by_s", [4.0, 0.5])
def test_times_of_day_when_the_clock_of_the_publisher_stops_for_a_while_follow(tmp_path, part_s, by_s):
    """A gap that is too large for small steps is told as a discontinuity, once."""
    watched = Watched(tmp_path, part_s=part_s, listed=30)
    tags = source(27.1)
    watched.feed([tag for tag in tags if tag.timestamp <= 12_300])
    watched.clock.advance(by_s)
    watched.feed([tag for tag in tags if tag.timestamp > 12_300])
    assert 0 <= watched.newest_behind_s() < 0.3
    assert watched.text.count("#EXT-X-DISCONTINUITY\n") == (by_s > 1)
    assert watched.validator.faults == []


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_times_of_day_when_our_clock_is_set_follow_in_the_next_segment(tmp_path, by_s):
    watched = Watched(tmp_path, listed=30)
    tags = source(15.1)
    watched.feed([tag for tag in tags if tag.timestamp <= 12_300])
    watched.set_by_s = by_s
    watched.feed([tag for tag in tags if tag.timestamp > 12_300])
    assert 0 <= watched.newest_behind_s() < 0.3
    assert watched.text.count("#EXT-X-DISCONTINUITY\n") == 1
    assert watched.validator.faults == []


def test_times_of_day_when_media_comes_faster_than_it_plays_have_few_breaks(tmp_path):
    """A film that is sent as fast as it goes: it was not filmed when it came, so its dates go on."""
    watched = Watched(tmp_path, listed=90)
    watched.feed(source(90), speed=3.0)
    assert watched.text.count("#EXT-X-DISCONTINUITY\n") <= 2
    assert watched.validator.faults == []


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.sampled_from(["more", "restart", "jump", "full", "room"]), st.integers(100, 1500)),
        max_size=6,
    )
)
def test_hls_whatever_happens_keeps_the_rules(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("hls")
    free, at, base = [1000], 0, 0
    watched = Watched(folder, listed=3, room=DiskRoom(folder, 100, lambda _: (free[0], 1000)))
    tags = source(20)
    headers = [tag for tag in tags[:5] if tag.type_id in {8, 9} and tag.payload[1:2] == b"\0"]
    for event, spent_ms in events:
        if event in {"full", "room"}:
            free[0] = 1 if event == "full" else 1000
        elif event == "restart":
            watched.say(PublicationEnded("over"), PublicationBegan())
            watched.feed(moved(headers, base + at))
        elif event == "jump":
            base += 30_000
        watched.feed(moved([tag for tag in tags if at <= tag.timestamp < at + spent_ms], base))
        at += spent_ms
    watched.end()
    assert watched.validator.faults == []


def test_parts_when_a_track_shows_itself_late_keep_the_rules(tmp_path, sample):
    """Sound that has no header, as MP3, is known when it comes: what is before it is of other tracks."""
    _, tags = sample("b_frames")
    watched = Watched(tmp_path, listed=20)
    headers = [tag for tag in tags if tag.type_id == 8 and tag.payload[1:2] == b"\0"]
    watched.feed([tag for tag in tags if tag.type_id == TAG_VIDEO and tag.timestamp < 1500])
    watched.feed(moved(headers, 1500))
    watched.feed([tag for tag in tags if tag.timestamp >= 1500 and tag not in headers])
    watched.end()
    assert watched.text.count("#EXT-X-MAP") == 2
    assert watched.text.count("#EXT-X-DISCONTINUITY\n") == 1
    assert watched.validator.faults == []
    assert watched.writer.statistics().lost_messages == 0


def tracks_in(folder, text):
    """Return the kinds of tracks of the files between two discontinuities, each once, one after another."""
    found, init = [set()], b""
    for line in text.splitlines():
        if line == "#EXT-X-DISCONTINUITY":
            found.append(set())
        elif line.startswith("#EXT-X-MAP"):
            init = (folder / line.split('"')[1]).read_bytes()
        elif not line.startswith("#"):
            with av.open(io.BytesIO(init + (folder / line).read_bytes())) as file:
                found[-1].add("".join(sorted(stream.type[0] for stream in file.streams)))
    return found


MP3 = b"\x2f\xff\xfb\x90\x64" + bytes(413)  # a frame of silence: 128 kbit/s, 44.1 kHz
FORMS = [(SegmentForm.TS, 0.0), (SegmentForm.FMP4, 0.0), (SegmentForm.FMP4, 0.2)]


@pytest.mark.parametrize(("form", "part_s"), FORMS)
@pytest.mark.parametrize("late", [TAG_AUDIO, TAG_VIDEO])
@pytest.mark.parametrize("after_ms", [0, 300])
def test_hls_when_sound_or_picture_begins_late_says_so(tmp_path, sample, form, part_s, late, after_ms):
    """Players take up other tracks at a discontinuity alone (RFC 8216, 4.3.2.3), with a map of them."""
    _, tags = sample("plain")
    begin_ms = next(tag.timestamp for tag in tags if tag.payload[:2] == b"\x17\1" and tag.timestamp > 900) + after_ms
    watched = Watched(tmp_path, listed=20, form=form, part_s=part_s)
    headers = [tag for tag in tags if tag.type_id == late and tag.payload[1:2] == b"\0"]
    watched.feed([tag for tag in tags if tag.type_id != late and tag.timestamp < begin_ms])
    watched.feed(moved(headers, begin_ms))
    watched.feed([tag for tag in tags if tag.timestamp >= begin_ms and tag not in headers])
    watched.end()
    first = "a" if late == TAG_VIDEO else "v"
    assert tracks_in(watched.folder, watched.text) == [{first}, {"av"}]
    assert watched.validator.faults == []
    assert watched.writer.statistics().lost_messages == 0


@pytest.mark.parametrize(("form", "part_s"), FORMS)
@pytest.mark.parametrize("late", [TAG_AUDIO, TAG_VIDEO])
def test_hls_when_what_is_announced_comes_late_names_no_track_before(tmp_path, sample, form, part_s, late):
    """Without low latency sound waits for pictures that are announced: a segment begins with one."""
    _, tags = sample("plain")
    watched = Watched(tmp_path, listed=20, form=form, part_s=part_s)
    watched.feed([tag for tag in tags if tag.type_id != late or tag.payload[1:2] == b"\0" or tag.timestamp >= 1300])
    watched.end()
    first = [{"v"}] if late == TAG_AUDIO else [{"a"}] if part_s else []
    assert tracks_in(watched.folder, watched.text) == [*first, {"av"}]
    assert watched.validator.faults == []
    assert watched.writer.statistics().lost_messages == 0


@pytest.mark.parametrize(("form", "part_s"), FORMS)
def test_hls_when_sound_pauses_in_its_tracks_has_one_map(tmp_path, sample, form, part_s):
    """Also sound without a header, as MP3, of which nothing is in a segment of the pause."""
    _, tags = sample("plain")
    mp3 = [tag._replace(payload=MP3) if tag.type_id == TAG_AUDIO else tag for tag in tags]
    watched = Watched(tmp_path, listed=20, form=form, part_s=part_s)
    watched.feed([tag for tag in mp3 if tag.type_id != TAG_AUDIO or not 900 <= tag.timestamp < 2200])
    watched.end()
    assert tracks_in(watched.folder, watched.text) == [{"av"}]


@pytest.mark.parametrize("part_s", [0.0, 0.2])
def test_hls_when_the_next_publisher_has_sound_alone_knows_no_picture_of_the_first(tmp_path, sample, part_s):
    _, tags = sample("plain")
    watched = Watched(tmp_path, listed=20, part_s=part_s)
    watched.feed(tags)
    watched.say(PublicationBegan())
    watched.feed([tag for tag in tags if tag.type_id != TAG_VIDEO])
    watched.end()
    assert tracks_in(watched.folder, watched.text) == [{"av"}, {"a"}]
    assert watched.writer.statistics().lost_messages == 0


@pytest.mark.parametrize("part_s", [0.0, 0.2])
def test_hls_when_it_is_cut_holds_nothing_and_goes_on_behind_a_break(tmp_path, part_s):
    watched = Watched(tmp_path, part_s=part_s, form=SegmentForm.AUTO)
    tags = list(SyntheticSource(video_bit_rate=100_000, key_interval_s=1.0, fps=25).tags(30))
    third = len(tags) // 3
    watched.feed(tags[:third])
    assert sum(watched.writer.held_bytes) > 0
    watched.say(QueueCut("too much is held"))
    assert watched.writer.held_bytes == (0, 0)
    assert watched.writer.statistics().state is RecorderState.NO_ROOM
    watched.feed(tags[third:])
    assert watched.writer.statistics().state is RecorderState.RECORDING
    watched.say(PublicationEnded("over"))
    assert "#EXT-X-DISCONTINUITY" in watched.text


def test_hls_when_it_is_cut_and_cannot_be_written_holds_nothing_and_leaves_no_parts(tmp_path, monkeypatch):
    watched = Watched(tmp_path)
    tags = list(SyntheticSource(video_bit_rate=100_000, key_interval_s=1.0, fps=25).tags(30))
    watched.feed(tags[:150])
    with monkeypatch.context() as patch:
        patch.setattr(watched.writer, "_replace", Mock(side_effect=OSError("no disk")))
        watched.say(QueueCut("too much is held"))
    assert watched.writer.held_bytes == (0, 0)
    watched.feed(tags[150:])
    listed = set(re.findall(r'URI="([^"]+)"|^([^#\n]+)', watched.text, re.MULTILINE))
    there = {path.name for path in watched.folder.iterdir() if path.name.endswith(".m4s")}
    assert {one or other for one, other in listed} - there <= {watched.writer._playlist.next_part, "room-1000-init.mp4"}
    whole = [name for name in there if re.fullmatch(r"room-\d+\.m4s", name)]
    assert len(there) <= 4 * 2 * 7 + len(whole)  # parts of what is listed, and as many that were


PARTS_S = [0.0, 0.2, 0.5]


def stream(seconds, **options):
    return source(seconds, **{"fps": 25} | options)


def frames(tags):
    return [tag for tag in tags if tag.type_id in {TAG_AUDIO, TAG_VIDEO} and tag.payload[1:2] != b"\0"]


def headers(tags):
    return [tag for tag in tags if tag not in frames(tags)]


def kinds(tags, *type_ids):
    return [tag for tag in tags if tag.type_id in type_ids]


def hole(at_ms, by_ms, tags=None):
    """The clock goes on by more than a frame at once, in the middle of a group."""
    tags = tags or stream(20)
    return [tag._replace(timestamp=tag.timestamp + by_ms * (tag.timestamp > at_ms)) for tag in tags]


def returned(at_ms, by_ms, **options):
    """The encoder is killed and back, with a key frame, and the server has its clock go on."""
    tags = stream(20, **options)
    first = [tag for tag in tags if tag.timestamp <= at_ms]
    return first + moved(frames(tags)[:-1], at_ms + by_ms)


def groups(*lengths_s):
    """Key frames by choice of the encoder."""
    made, at_ms = headers(stream(1)), 0
    for length_s in lengths_s:
        made += moved(frames(stream(length_s, key_interval_s=60)), at_ms)
        at_ms += round(length_s * 1000)
    return made


def chosen(seed, least_s, most_s):
    random_ = random.Random(seed)
    return groups(*(round(random_.uniform(least_s, most_s) * 25) / 25 for _ in range(8)))


def uneven(seed, least_ms, most_ms, *kept, each=1):
    """Pictures at any distance: each of them, or one of so many."""
    random_ = random.Random(seed)
    tags, at_ms, made = stream(30), 0, []
    for tag in kinds(frames(tags), TAG_VIDEO)[::each]:
        made.append(tag._replace(timestamp=at_ms))
        at_ms += random_.randint(least_ms, most_ms)
    made += kinds(frames(tags), *kept)
    last_ms = min(at_ms, 25_000)
    return headers(tags) + [tag for tag in sorted(made, key=lambda tag: tag.timestamp) if tag.timestamp < last_ms]


def silent(tags):
    return [tag for tag in tags if tag.type_id != TAG_AUDIO]


ODD = {
    "a hole of 0.6 s": lambda: hole(9300, 600),
    "a hole of 0.6 s without sound": lambda: hole(9300, 600, silent(stream(20))),
    "a hole of 1.5 s": lambda: hole(9300, 1500),
    "a hole of 3 s": lambda: hole(9300, 3000),
    "holes of all lengths": lambda: hole(5100, 250, hole(7300, 2500, hole(9700, 800, hole(13_200, 9000)))),
    "a hole in the first segment": lambda: hole(700, 600),
    "back within the grace": lambda: returned(9300, 2700),
    "back with other key frames": lambda: returned(9300, 2700, key_interval_s=5.0),
    "key frames by choice": lambda: chosen(1, 0.3, 12.0),
    "key frames by choice, often": lambda: chosen(2, 0.3, 3.0),
    "key frames by choice, and far apart later": lambda: groups(2, 9, 3.32, 12, 0.52, 0.52, 7),
    "key frames each 2.4 s": lambda: stream(20, key_interval_s=2.4),
    "key frames each 4 s": lambda: stream(24, key_interval_s=4.0),
    "key frames each 10 s": lambda: stream(40, key_interval_s=10.0),
    "key frames that stop": lambda: groups(1, 1, 1, 1, 20, 1, 1, 1),
    "no key frame but the first": lambda: stream(80, key_interval_s=1000.0, fps=10),
    "5 pictures a second": lambda: stream(20, fps=5),
    "5 pictures a second without sound": lambda: silent(stream(20, fps=5)),
    "pictures at 5 to 60 a second": lambda: uneven(1, 16, 200, TAG_AUDIO),
    "pictures at 5 to 60 a second without sound": lambda: uneven(2, 16, 200),
    "a picture each 2 s": lambda: uneven(3, 2000, 2000, TAG_AUDIO, each=25),
    "a picture each 2 s or so": lambda: uneven(3, 1950, 2050, TAG_AUDIO, each=25),
    "a picture each 2 s without sound": lambda: uneven(3, 2000, 2000, each=25),
    "a picture each 2 s or so, without sound": lambda: uneven(3, 1950, 2050, each=25),
    "a picture each 2 s, of few groups": lambda: uneven(3, 1950, 2050, TAG_AUDIO, each=9),
    "pictures that get few": lambda: silent(stream(8)) + moved(silent(frames(stream(30, fps=1))), 8000),
    "sound alone": lambda: kinds(stream(20), TAG_AUDIO),
    "sound that comes late": lambda: [tag for tag in stream(20) if tag.type_id != TAG_AUDIO or tag.timestamp > 3300],
    "a picture that comes late": lambda: [
        tag for tag in stream(20) if tag in headers(stream(1)) or tag.type_id != TAG_VIDEO or tag.timestamp > 990
    ],
    "a clock that begins anew": lambda: stream(9.3) + stream(9.3),
    "a clock that goes back a little": lambda: stream(9.3) + moved(frames(stream(9.3)), 8800),
    "a clock that begins anew, in other headers": lambda: stream(9.3) + moved(stream(9.3), 9000),
    "a clock that goes on by hours": lambda: stream(9.3) + moved(stream(9.3), 7_200_000),
}


@pytest.mark.parametrize("part_s", PARTS_S)
@pytest.mark.parametrize("name", ODD)
def test_targets_when_a_stream_is_odd_never_change(tmp_path, name, part_s):
    watched = Watched(tmp_path, segment_s=2.0, listed=6, part_s=part_s, odd=True)
    watched.feed(ODD[name]())
    watched.end()
    assert watched.validator.faults == []
    assert "#EXTINF" in watched.text
    assert watched.writer.statistics().lost_messages == 0


@pytest.mark.parametrize("part_s", PARTS_S)
@pytest.mark.parametrize(("by_ms", "dated"), [(600, False), (3000, True)])
def test_hls_when_the_clock_has_a_hole_plays_on_and_dates_what_is_missing(tmp_path, part_s, by_ms, dated):
    """No frame is lost, and none of a group has to do without those before it: there is no discontinuity."""
    watched = Watched(tmp_path, segment_s=2.0, listed=20, part_s=part_s, odd=True)
    tags = hole(9300, by_ms)
    watched.feed(tags)
    watched.end()
    whole = ListingReader(watched.text).made.whole
    data = b"".join((watched.folder / name).read_bytes() for name in (whole[0].init, *(item.name for item in whole)))
    times = [time for time, _ in pictures_of(data)["video"]]
    assert len(times) == len(kinds(frames(tags), TAG_VIDEO))
    assert max(after - time for time, after in itertools.pairwise(times)) < 0.1
    assert "DISCONTINUITY" not in watched.text
    gaps_s = [after.began_at - one.began_at - one.duration_s for one, after in itertools.pairwise(whole)]
    assert max(gaps_s) == pytest.approx(by_ms / 1000 if dated else 0, abs=0.05)


def test_hls_when_key_frames_come_late_begins_with_each_that_comes(tmp_path):
    watched = Watched(tmp_path, segment_s=2.0, listed=30, odd=True)
    watched.feed(groups(2, 7, 2.4, 5, 2))
    watched.end()
    keys_s, begin_s = [0.0], 0.0
    for segment in ListingReader(watched.text).made.whole:
        begin_s += segment.duration_s
        keys_s.append(round(begin_s, 1))
    assert set(keys_s) >= {0.0, 2.0, 9.0, 11.4, 16.4}
