"""HLS of a set: the same pictures at the same place in each variant, and a playlist of what each takes."""

from __future__ import annotations

import io
import re

import av
import pytest
from hls_kit import Validator

from flowctl.errors import ConfigError
from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.live.remux.dates import ProgramDates
from flowctl.live.remux.files import VARIANT
from flowctl.live.remux.hls import AWAY_S, HlsSettings
from flowctl.live.remux.intake import MessageTaken, PublicationBegan, PublicationEnded
from flowctl.live.remux.variants.variantset import VariantSet
from flowctl.live.remux.variants.writer import VariantWriter
from flowctl.testing import ManualClock
from flowctl.wire.media.synthetic import SyntheticSource

RATES = {"720": 400_000, "360": 100_000, "new": 200_000}
SEGMENT_S = 2.0


class Show:
    """A set whose writers are fed by hand; media comes in its time."""

    def __init__(self, folder, **settings):
        self.clock = ManualClock()
        self.began = self.clock()
        self.folder = folder / "live"
        self.settings = HlsSettings(folder=folder, **{"segment_s": SEGMENT_S, "listed": 6, "part_s": 0.5} | settings)
        self.set = VariantSet("live", "show", self.settings, self.clock)
        self.writers = {}
        self.at_ms = 0

    def add(self, *names):
        for name in names:
            clocks = {"clock": self.clock, "wall": lambda: 1000.0 + self.clock() - self.began}
            self.writers[name] = VariantWriter("live", "show", name, self.settings, self.set, **clocks)
            self.writers[name].claim()
            self.writers[name].work([PublicationBegan()])
        self.set.want(self.writers)

    def feed(self, **tags):
        """Have each variant get its tags, in the order of their times."""
        named = [(tag.timestamp, place, name[1:], tag) for name in tags for place, tag in enumerate(tags[name])]
        for timestamp, _, name, tag in sorted(named, key=lambda item: item[:2]):
            self.clock.advance(max(timestamp - self.at_ms, 0) / 1000)
            self.at_ms = timestamp
            self.writers[name].work([MessageTaken(tag.type_id, tag.timestamp, tag.payload)])

    def end(self, *names, over=True):
        if over:
            self.set.want(())
        for name in names:
            self.writers.pop(name)._finish_all()

    @property
    def text(self):
        path = self.folder / "show.m3u8"
        return path.read_text() if path.exists() else ""

    def bits(self, name):
        """Return peak and mean that the playlist has of a variant."""
        rest = r"[^\n]*\nshow%252b" + name + "\\."
        found = re.search(r"BANDWIDTH=(\d+),AVERAGE-BANDWIDTH=(\d+),[^\n]*" + rest, self.text)
        return tuple(map(int, found.groups()))

    def segments(self, name):
        """Return (number, date, length) of each whole segment that is listed."""
        text = (self.folder / f"show{VARIANT}{name}.m3u8").read_text()
        found = re.findall(r"DATE-TIME:(\S+)\n(?:#EXT-X-PART:.*\n)*#EXTINF:([\d.]+),\n.*-(\d+)\.m4s", text)
        return [(int(number), date, float(length)) for date, length, number in found]


def tags_of(name, seconds, *, from_s=0.0, **options):
    """Return tags up to a time, with a key frame each second; headers first, wherever they begin."""
    tags = []
    for tag in SyntheticSource(**{"video_bit_rate": RATES[name], "fps": 10, "key_interval_s": 1.0} | options):
        if tag.timestamp >= seconds * 1000:
            break
        tags.append(tag)
    headers = [tag for tag in tags[:4] if tag.timestamp == 0 and len(tag.payload) < 100]
    later = [tag for tag in tags if tag.timestamp >= from_s * 1000 and tag not in headers]
    return [*moved(headers, later[0].timestamp), *later]


def moved(tags, by_ms):
    return [tag._replace(timestamp=tag.timestamp + by_ms) for tag in tags]


@pytest.fixture
def show(tmp_path):
    return Show(tmp_path)


def test_variants_when_one_begins_later_have_the_same_segments_numbers_dates_and_times(show):
    """It begins with a key frame in the middle of a segment of the other one."""
    show.add("720", "360")
    show.feed(_720=tags_of("720", 11.0), _360=tags_of("360", 11.0, from_s=5.0))
    large, small = show.segments("720"), show.segments("360")
    assert [length for _, _, length in large] == [SEGMENT_S] * 5
    assert [length for _, _, length in small] == [1.0, SEGMENT_S, SEGMENT_S]
    assert small[1:] == large[-2:]
    assert small[0][0] == large[-3][0]
    times = {name: show.writers[name]._zero_ms for name in show.writers}
    assert times["720"] == times["360"]


def test_variants_when_key_frames_are_a_little_early_are_cut_there(show):
    show.add("720")
    show.feed(_720=[tag._replace(timestamp=max(tag.timestamp - 1, 0)) for tag in tags_of("720", 9.0)])
    assert [length for _, _, length in show.segments("720")] == [1.999, *[SEGMENT_S] * 3]


@pytest.mark.parametrize("late", [1, 3, -2, -4])
def test_variants_when_sound_comes_before_or_behind_the_key_frame_of_its_time_have_it_in_the_same_segment(
    tmp_path, late
):
    """Which comes first is not the same for each size of picture; `late`: sounds that the key frame comes too early."""
    show = Show(tmp_path, part_s=0.6)

    def sound(name, number):
        init, *_ = show.folder.glob(f"show{VARIANT}{name}-*-init.mp4")
        data = init.read_bytes() + (show.folder / f"show{VARIANT}{name}-{number}.m4s").read_bytes()
        with av.open(io.BytesIO(data)) as file:
            return [packet.pts for packet in file.demux(audio=0) if packet.pts is not None]

    tags = tags_of("360", 5.0)
    place = next(place for place, tag in enumerate(tags) if tag.type_id == TAG_VIDEO and tag.timestamp == 2000)
    sounds = [tag for tag in tags if tag.type_id == TAG_AUDIO]
    first = next(at for at, tag in enumerate(sounds) if tag.timestamp >= 2000)
    moved_ones = sounds[first - late : first] if late > 0 else sounds[first : first - late]
    others = [tag for tag in tags if tag not in moved_ones]
    at = others.index(tags[place])
    there = (
        [*others[: at + 1], *moved_ones, *others[at + 1 :]] if late > 0 else [*others[:at], *moved_ones, *others[at:]]
    )
    show.add("720", "360")
    published = {"720": tags, "360": there}
    for name, items in published.items():
        for tag in items:
            show.writers[name].work([MessageTaken(tag.type_id, tag.timestamp, tag.payload)])
    numbers = [number for number, *_ in show.segments("720")]
    assert len(numbers) == 2
    for number in numbers:
        assert sound("720", number) == sound("360", number)


def test_playlist_when_all_have_a_segment_names_them_with_what_they_take(show):
    show.add("720", "360")
    show.feed(_720=tags_of("720", 3.0))
    assert not show.text  # the other one is waited for
    show.feed(_720=tags_of("720", 7.0, from_s=3.0), _360=tags_of("360", 7.0, from_s=3.0))
    lines = show.text.splitlines()
    assert lines[:2] == ["#EXTM3U", "#EXT-X-VERSION:6"]  # a segment may begin without a key frame
    assert [line for line in lines if not line.startswith("#")] == ["show%252b360.m3u8", "show%252b720.m3u8"]
    assert all("FRAME-RATE=10.000" in line and 'CODECS="avc1.' in line for line in lines[2::2])
    for name, rate in list(RATES.items())[:2]:
        peak, mean = show.bits(name)
        segments = [(show.folder / f"show{VARIANT}{name}-{at}.m4s", length) for at, _, length in show.segments(name)]
        assert peak == pytest.approx(max(path.stat().st_size * 8 / length for path, length in segments), abs=1)
        assert rate < mean <= peak


def test_playlist_when_one_has_no_segment_for_long_names_the_others_and_it_when_it_has(show):
    show.add("720", "360")
    show.feed(_720=tags_of("720", 9.0))
    assert [line for line in show.text.splitlines() if not line.startswith("#")] == ["show%252b720.m3u8"]
    show.feed(_360=tags_of("360", 14.0, from_s=9.0))
    assert show.text.count("#EXT-X-STREAM-INF") == 2


def test_playlist_when_what_a_variant_takes_changes_by_a_tenth_is_written_again_and_not_before(show):
    show.add("360")
    show.feed(_360=tags_of("360", 21.0))
    first = show.text
    path = show.folder / "show.m3u8"
    written = path.stat().st_ino
    assert first
    show.feed(_360=moved(tags_of("360", 6.0)[4:], 21_000))
    assert path.stat().st_ino == written
    larger = [tag._replace(timestamp=tag.timestamp + 27_000) for tag in tags_of("720", 5.0)[4:]]
    show.feed(_360=larger)
    assert show.text != first
    assert show.bits("360")[0] > 2 * RATES["360"]


def test_playlist_when_a_variant_goes_is_without_it_and_stays_when_the_set_ends(show):
    show.add("720", "360")
    show.feed(_720=tags_of("720", 5.0), _360=tags_of("360", 5.0))
    assert show.text.count("#EXT-X-STREAM-INF") == 2
    show.end("360", over=False)
    assert [line for line in show.text.splitlines() if not line.startswith("#")] == ["show%252b720.m3u8"]
    text = show.text
    show.end("720")
    assert show.text == text
    assert (show.folder / f"show{VARIANT}720.m3u8").read_text().endswith("#EXT-X-ENDLIST\n")


def test_playlist_when_the_set_ends_names_all_though_one_ends_behind_the_other(show):
    show.add("720", "360")
    show.feed(_720=tags_of("720", 5.0), _360=tags_of("360", 5.0))  # in the middle of a segment, which is written then
    show.end("720", "360")
    assert show.text.count("#EXT-X-STREAM-INF") == 2


def test_set_when_its_publisher_is_back_goes_on_in_the_same_numbers(show):
    show.add("720", "360")
    show.feed(_720=tags_of("720", 5.0), _360=tags_of("360", 5.0))
    for writer in show.writers.values():
        writer.work([PublicationEnded("gone")])
    show.clock.advance(AWAY_S / 2)
    for writer in show.writers.values():
        writer.work([PublicationBegan()])
    show.at_ms = 12_000
    show.feed(_720=moved(tags_of("720", 5.0), 12_000), _360=moved(tags_of("360", 5.0), 12_000))
    assert show.segments("720") == show.segments("360")
    assert len(show.segments("720")) == 5
    for name in show.writers:
        assert (show.folder / f"show{VARIANT}{name}.m3u8").read_text().count("#EXT-X-DISCONTINUITY\n") == 1


def test_discontinuities_when_one_publisher_restarts_or_a_rendition_comes_later_are_as_many_in_all(show):
    """Players that go to another variant take content with as many discontinuities before it for the same."""

    def count(name):
        text = (show.folder / f"show{VARIANT}{name}.m3u8").read_text()
        gone = re.search(r"DISCONTINUITY-SEQUENCE:(\d+)", text)
        return int(gone[1] if gone else 0) + text.count("#EXT-X-DISCONTINUITY\n")

    show.add("720", "360")
    show.feed(_720=tags_of("720", 5.0), _360=tags_of("360", 5.0))
    show.writers["360"].work([PublicationEnded("gone"), PublicationBegan()])
    show.feed(_720=tags_of("720", 11.0, from_s=5.0), _360=tags_of("360", 11.0, from_s=5.0))
    assert (count("720"), count("360")) == (1, 1)
    show.add("new")
    show.feed(**{f"_{name}": tags_of(name, 17.0, from_s=11.0) for name in ("720", "360", "new")})
    assert (count("720"), count("360"), count("new")) == (1, 1, 1)
    dates = [[date for _, date, _ in show.segments(name)[-2:]] for name in show.writers]
    assert dates == [dates[0]] * 3


def test_set_when_another_process_writes_it_is_refused_until_that_has_ended(show, tmp_path):
    show.add("720")
    other = Show(tmp_path)
    with pytest.raises(ConfigError, match="written by another process"):
        other.add("360")
    show.end("720")
    other.add("360")
    other.end("360")


def test_set_when_the_stream_had_a_playlist_of_its_own_removes_what_is_left_of_it(show):
    show.folder.mkdir()
    old = ("show.m3u8", "show-7.m4s", "show-7.3.m4s", "show-7-init.mp4")
    others = ("show2-7.m4s", "show.txt", "show%2b.m3u8")
    for name in (*old, *others):
        (show.folder / name).write_text("#EXTM3U\n")
    show.add("720")
    show.feed(_720=tags_of("720", 3.0))
    left = {path.name for path in show.folder.iterdir()}
    assert left.isdisjoint(old[1:])
    assert left.issuperset(others)
    assert "#EXT-X-STREAM-INF" in show.text


def test_variants_when_all_publishers_have_a_hole_in_their_clock_begin_anew_at_one_place(show):
    """Taken out of the clock of each by itself it would be longer in one than in another."""
    show.add("720", "360")
    tags = {name: tags_of(name, 11.0) for name in ("720", "360")}
    behind = {"720": 3300, "360": 3500}  # the last that comes before the hole
    show.feed(
        **{
            f"_{name}": [tag for tag in tags[name] if not behind[name] < tag.timestamp < 4600 or len(tag.payload) < 100]
            for name in tags
        }
    )
    texts = {name: (show.folder / f"show{VARIANT}{name}.m3u8").read_text() for name in tags}
    assert {text.count("#EXT-X-DISCONTINUITY\n") for text in texts.values()} == {1}
    assert {re.search("TARGETDURATION:(.*)", text)[1] for text in texts.values()} == {"2"}
    large, small = (show.segments(name) for name in ("720", "360"))
    assert [item[:2] for item in large[-3:]] == [item[:2] for item in small[-3:]]


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        ({"_720": {"key_interval_s": 2.0}, "_360": {"key_interval_s": 4.0}}, (2, 0.1)),
        ({"_720": {"fps": 5, "audio": False}, "_360": {"fps": 30, "audio": False}}, (2, 0.22)),
    ],
)
def test_target_durations_when_key_frames_or_pictures_are_not_alike_are_those_of_the_first_in_all(
    tmp_path, options, targets
):
    """RFC 8216, 6.2.4: all playlists of a multivariant one have the same."""
    show = Show(tmp_path, part_s=0.1)
    validators = {name[1:]: Validator(lambda file: (show.folder / file).read_bytes(), odd=True) for name in options}
    show.add(*validators)
    for from_s in range(12):
        show.feed(**{name: tags_of(name[1:], from_s + 1, from_s=from_s, **its) for name, its in options.items()})
        for name, validator in validators.items():
            path = show.folder / f"show{VARIANT}{name}.m3u8"
            listing = validator.check(path.read_text()) if path.exists() else None
            assert listing is None or (listing.target_s, listing.part_s) == targets
    assert [validator.faults for validator in validators.values()] == [[], []]
    assert all(validator.looked_at for validator in validators.values())


def test_dates_when_a_server_sends_what_it_has_kept_in_one_go_are_mended_alike(show):
    """What came late at first is dated earlier; the variant that is behind has the dates of the other one."""
    show.add("720", "360")
    named = [
        (tag.timestamp + late, name, tag) for name, late in (("720", 0), ("360", 200)) for tag in tags_of(name, 7.0)
    ]
    show.at_ms = 1500
    for at_ms, name, tag in sorted(named, key=lambda item: item[0]):
        if tag.timestamp >= 1500:
            show.clock.advance(max(at_ms - show.at_ms, 0) / 1000)
            show.at_ms = at_ms
        show.writers[name].work([MessageTaken(tag.type_id, tag.timestamp, tag.payload)])
    assert show.segments("720") == show.segments("360")
    assert show.segments("720")[0][1] == "1970-01-01T00:16:38.507Z"


def test_dates_when_those_of_others_were_taken_are_not_mended_by_the_steps_since_then():
    dates = ProgramDates(lambda at_ms, due: due if at_ms else 1000.0)
    for at_ms in (0, 1000):
        dates.note_unit(at_ms, 0.2 + at_ms / 1000, 1000.2 + at_ms / 1000)
    assert dates.begin_segment(0, apart=False) == (1000.0, False)
    dates.end_segment(1.0)
    assert dates.begin_segment(1000, apart=False) == (1001.125, False)
    assert dates.mend() == 0.0


def test_dates_when_the_clock_of_the_publisher_begins_anew_are_those_of_today(show):
    """Not those that the same place on the clock had before."""
    show.add("720", "360")
    show.feed(_720=tags_of("720", 9.0), _360=tags_of("360", 9.0))
    for writer in show.writers.values():
        writer.work([PublicationEnded("gone"), PublicationBegan()])
    show.at_ms = 0
    show.feed(_720=tags_of("720", 5.0), _360=tags_of("360", 5.0))
    assert show.segments("720") == show.segments("360")
    dates = [date for _, date, _ in show.segments("720")]
    assert dates == sorted(dates)
    assert dates[-1] > "1970-01-01T00:16:50"


def test_variants_when_one_hears_later_of_another_clock_of_the_publisher_are_on_one_timeline(show):
    """What it writes until then is far away from where the other one is."""
    show.add("720", "360")
    before = {name: moved(tags_of(name, 9.0), 100_000) for name in show.writers}
    show.feed(_720=before["720"][:-20], _360=before["360"][:-40])
    show.writers["720"].work([PublicationBegan()])
    show.at_ms = 0
    show.feed(_720=tags_of("720", 3.0))
    show.at_ms = before["360"][-1].timestamp
    show.feed(_360=before["360"][-40:])
    show.writers["360"].work([PublicationBegan()])
    show.feed(_360=tags_of("360", 3.0))
    assert show.writers["720"]._zero_ms == show.writers["360"]._zero_ms


def test_variants_when_a_clock_goes_back_a_little_have_no_segment_of_nothing(show):
    show.add("720")
    show.feed(_720=tags_of("720", 5.0))
    show.feed(_720=moved(tags_of("720", 10.0, from_s=5.0), -3000))
    assert min(length for _, _, length in show.segments("720")) >= 1.0
