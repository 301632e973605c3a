"""The synthetic source: times, sizes and classes of its frames, the stamp in them, and that decoders take them."""

from __future__ import annotations

import io
import itertools

import av
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.state import MessageClass
from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.flv import FlvWriter
from flowctl.wire.media.stamp import MAX_SEQUENCE, MAX_TIME_US, STAMPED_HEAD_BYTES, Stamper, has_slot
from flowctl.wire.media.synthetic import BACKGROUND, SyntheticSource, read_stamp, squares_at, stamp
from flowctl.wire.media.tiny_aac import padding
from flowctl.wire.media.tiny_h264 import BitWriter, TinyH264, escape
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.media.parameters import with_parameter_sets

AUDIO, VIDEO, SCRIPT = 8, 9, 18


def classes(source, duration_s):
    tags = [tag for tag in source.tags(duration_s) if tag.type_id == VIDEO][1:]
    return [inspect(VIDEO, tag.payload).message_class for tag in tags]


def as_file(source, duration_s) -> io.BytesIO:
    """Return an FLV file in memory."""
    target = io.BytesIO()
    writer = FlvWriter(target, audio=source.audio, video=source.video)
    for tag in source.tags(duration_s):
        writer.write(*tag)
    target.seek(0)
    return target


def decode(source, duration_s):
    video, audio = [], []
    with av.open(as_file(source, duration_s), format="flv") as container:
        for stream in container.streams:
            if stream.type in ("video", "audio"):
                stream.codec_context.options = {"err_detect": "explode"}
        for packet in container.demux():
            for frame in packet.decode() if packet.stream.type in ("video", "audio") else ():
                (video if packet.stream.type == "video" else audio).append(frame)
    return video, audio


def test_source_starts_with_metadata_and_headers():
    tags = list(itertools.islice(SyntheticSource(), 4))
    infos = [inspect(tag.type_id, tag.payload) for tag in tags]
    assert [(info.kind, info.packet) for info in infos] == [
        ("data", "metadata"),
        ("video", "sequence_header"),
        ("audio", "sequence_header"),
        ("video", "coded"),
    ]
    assert infos[3].message_class is MessageClass.KEY


def test_metadata_says_what_the_source_sends():
    name, values = amf0.decode(next(iter(SyntheticSource(fps=25, audio_bit_rate=64_000))).payload)
    assert (name, values["framerate"], values["audiodatarate"], values["width"]) == ("onMetaData", 25.0, 64.0, 640.0)
    _, silent = amf0.decode(next(iter(SyntheticSource(audio=False))).payload)
    assert not any(key.startswith("audio") for key in silent)


@pytest.mark.parametrize(("video", "audio", "types"), [(True, False, {VIDEO, SCRIPT}), (False, True, {AUDIO, SCRIPT})])
def test_source_with_one_track(video, audio, types):
    assert {tag.type_id for tag in SyntheticSource(video=video, audio=audio).tags(1)} == types


def test_equal_arguments_give_equal_tags_and_other_seeds_other_sizes():
    source = SyntheticSource(seed=3)
    first = list(itertools.islice(source, 200))
    assert list(itertools.islice(source, 200)) == first
    assert list(itertools.islice(SyntheticSource(seed=3), 200)) == first
    assert list(itertools.islice(SyntheticSource(seed=4), 200)) != first


@pytest.mark.parametrize("fps", [24, 25, 29.97, 30, 60])
def test_bit_rates_are_those_asked_for(fps):
    source = SyntheticSource(fps=fps, video_bit_rate=1_500_000, audio_bit_rate=128_000)
    seconds = 20 * source.key_interval_frames / fps
    sizes = {VIDEO: 0, AUDIO: 0}
    for tag in itertools.islice(source.tags(seconds), 3, None):
        sizes[tag.type_id] += len(tag.payload)
    assert sizes[VIDEO] * 8 / seconds == pytest.approx(1_500_000, rel=0.02)
    assert sizes[AUDIO] * 8 / seconds == pytest.approx(128_000, rel=0.02)


def test_key_frames_have_the_size_asked_for():
    source = SyntheticSource(key_frame_bytes=50_000, key_interval_s=1)
    keys = [tag for tag in source.tags(3.5) if inspect(tag.type_id, tag.payload).message_class is MessageClass.KEY]
    assert [len(tag.payload) for tag in keys] == [50_000] * 4
    frames = [len(tag.payload) for tag in SyntheticSource(key_frame_ratio=5, audio=False).tags(20)][2:]
    key_sizes, others = frames[::60], [size for index, size in enumerate(frames) if index % 60]
    assert sum(key_sizes) / len(key_sizes) / (sum(others) / len(others)) == pytest.approx(5, rel=0.02)


def test_frames_without_jitter_have_one_size():
    tags = list(SyntheticSource(size_jitter=0, audio=False).tags(2))[3:]
    assert len({len(tag.payload) for tag in tags}) == 1


@pytest.mark.parametrize(
    ("every", "pattern"), [(0, "KIIIIIIIII"), (1, "KDDDDDDDDD"), (2, "KIDIDIDIDI"), (3, "KIIDIIDIID")]
)
def test_disposable_frames_are_where_they_were_asked_for(every, pattern):
    source = SyntheticSource(fps=10, key_interval_s=1, disposable_every=every)
    letters = {MessageClass.KEY: "K", MessageClass.INTER: "I", MessageClass.DISPOSABLE: "D"}
    assert "".join(letters[found] for found in classes(source, 2)) == pattern * 2


def test_key_interval_of_less_than_a_frame_makes_every_frame_a_key_frame():
    source = SyntheticSource(key_interval_s=0, video_bit_rate=5_000_000)
    assert set(classes(source, 1)) == {MessageClass.KEY}


@pytest.mark.parametrize("start", [0, (1 << 24) - 500, (1 << 31) - 500, (1 << 32) - 500])
def test_timestamps_start_where_asked_and_wrap(start):
    tags = list(itertools.islice(SyntheticSource(start_timestamp=start).tags(2), 1, None))
    elapsed = [tag.timestamp - start & 0xFFFFFFFF for tag in tags]
    assert elapsed == sorted(elapsed)
    assert (elapsed[0], max(elapsed)) == (0, 1984)
    assert [tag.timestamp for tag in tags] == [(start + each) % (1 << 32) for each in elapsed]


def test_timestamps_do_not_drift():
    tags = [tag for tag in SyntheticSource(fps=29.97, sample_rate=44_100).tags(100) if tag.type_id != SCRIPT]
    video = [tag.timestamp for tag in tags if tag.type_id == VIDEO][1:]
    audio = [tag.timestamp for tag in tags if tag.type_id == AUDIO][1:]
    assert video == [round(index * 1000 / 29.97) for index in range(len(video))]
    assert audio == [round(index * 1024 * 1000 / 44_100) for index in range(len(audio))]


def test_frames_carry_their_number():
    counts = {VIDEO: 0, AUDIO: 0}
    for tag in SyntheticSource().tags(3):
        found = read_stamp(tag.payload)
        if inspect(tag.type_id, tag.payload).message_class is MessageClass.HEADER:
            assert found is None
        else:
            assert found == (counts[tag.type_id], 0)
            counts[tag.type_id] += 1
    assert counts == {VIDEO: 90, AUDIO: 141}


FRAMES = [tag.payload for tag in list(SyntheticSource().tags(0.2))[3:]]


@given(st.sampled_from(FRAMES), st.integers(0, MAX_SEQUENCE), st.integers(0, MAX_TIME_US))
@settings(max_examples=300, deadline=None)
def test_stamp_round_trip(payload, sequence, time_us):
    stamped = stamp(memoryview(payload), sequence, time_us)
    assert read_stamp(stamped) == read_stamp(memoryview(stamped)) == (sequence, time_us)
    assert len(stamped) == len(payload)
    type_id = VIDEO if payload[0] in (0x17, 0x27) else AUDIO
    assert inspect(type_id, stamped) == inspect(type_id, payload)


@pytest.mark.parametrize("size", [(640, 360), (1280, 720)])
def test_stamp_when_parameter_sets_are_put_in_front_of_a_key_frame_is_read_from_its_head(size):
    tags = SyntheticSource(width=size[0], height=size[1]).tags(0.1)
    header, key = [tag.payload for tag in tags if tag.type_id == VIDEO][:2]
    frame = with_parameter_sets(stamp(key, 7, 5_000_000), header)
    assert len(frame) > len(key)
    assert read_stamp(frame) == read_stamp(frame[:STAMPED_HEAD_BYTES]) == (7, 5_000_000)
    assert read_stamp(frame[:60]) is None


def test_stamper_when_tracks_alternate_counts_each_and_leaves_others_alone():
    stamper = Stamper()
    found = [read_stamp(stamper.stamped(track, FRAMES[0], 7)) for track in (VIDEO, AUDIO, VIDEO, VIDEO, AUDIO)]
    assert found == [(0, 7), (0, 7), (1, 7), (2, 7), (1, 7)]
    assert stamper.stamped(VIDEO, b"no slot", 7) == b"no slot"
    assert read_stamp(stamper.stamped(VIDEO, FRAMES[0], 8)) == (3, 8)


@given(st.integers(0, MAX_SEQUENCE), st.integers(0, MAX_TIME_US))
@settings(max_examples=200, deadline=None)
def test_stamp_never_looks_like_a_start_code(sequence, time_us):
    key_frame = FRAMES[0]
    slot = stamp(key_frame, sequence, time_us)[9 : 9 + int.from_bytes(key_frame[5:9], "big")]
    assert escape(slot) == slot


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_read_stamp_takes_any_octets(payload):
    assert read_stamp(payload) is None
    assert not has_slot(payload)


@pytest.mark.parametrize("cut", [0, 10, 20, 30, 41])
def test_read_stamp_of_a_cut_frame_is_none(cut):
    assert read_stamp(FRAMES[0][:cut]) is None


@pytest.mark.parametrize(
    ("payload", "sequence", "time_us"),
    [(b"\x17\x00", 0, 0), (FRAMES[0], -1, 0), (FRAMES[0], 1 << 32, 0), (FRAMES[0], 0, -1), (FRAMES[0], 0, 1 << 63)],
)
def test_stamp_refuses_what_does_not_fit(payload, sequence, time_us):
    with pytest.raises(LocalProtocolError):
        stamp(payload, sequence, time_us)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disposable_every": 1},
        {"disposable_every": 3, "fps": 25, "width": 320, "height": 180},
        {"width": 1920, "height": 1080, "video_bit_rate": 6_000_000},
        {"key_interval_s": 0, "width": 64, "height": 48, "audio": False},
        {"key_interval_s": 20, "fps": 60, "width": 32, "height": 32, "video_bit_rate": 400_000},
        {"sample_rate": 44_100, "audio_bit_rate": 400_000, "video": False},
        {"sample_rate": 22_050, "audio_bit_rate": 16_000, "video": False},
    ],
)
def test_decoders_take_every_frame(options):
    source = SyntheticSource(**options)
    seconds = 6 if options.get("key_interval_s") == 20 else 2.5
    tags = list(source.tags(seconds))
    video, audio = decode(source, seconds)
    assert len(video) == max(0, sum(tag.type_id == VIDEO for tag in tags) - 1)
    assert len(audio) == max(0, sum(tag.type_id == AUDIO for tag in tags) - 1)
    if video:
        assert (video[0].width, video[0].height) == (source.width, source.height)
        for frame in (video[0], video[-1]):
            assert set(bytes(frame.planes[0])[: source.width]) == {128 + 14 * BACKGROUND}
    if audio:
        assert (audio[-1].sample_rate, audio[-1].layout.name) == (source.sample_rate, "stereo")
        assert not audio[-1].to_ndarray().any()


class BitReader:
    """Reads the fields of a slice header."""

    def __init__(self, nal: bytes) -> None:
        self.text = "".join(f"{octet:08b}" for octet in nal[1:].replace(b"\0\0\3", b"\0\0"))
        self.at = 0

    def u(self, bits: int) -> int:
        self.at += bits
        return int(self.text[self.at - bits : self.at], 2)

    def ue(self) -> int:
        zeros = self.text.index("1", self.at) - self.at
        self.at += zeros
        return self.u(zeros + 1) - 1


def slice_headers(source, duration_s):
    found = []
    for tag in [tag for tag in source.tags(duration_s) if tag.type_id == VIDEO][1:]:
        at = 5
        while tag.payload[at + 4] & 31 not in (1, 5):
            at += 4 + int.from_bytes(tag.payload[at : at + 4], "big")
        bits = BitReader(tag.payload[at + 4 : at + 4 + int.from_bytes(tag.payload[at : at + 4], "big")])
        assert [bits.ue(), bits.ue() % 5, bits.ue()] in ([0, 2, 0], [0, 0, 0])
        header = tag.payload[at + 4]
        is_idr = header & 31 == 5
        found.append((is_idr, header & 0x60 != 0, bits.u(8), bits.ue() if is_idr else None, bits.u(16)))
    return found


@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_slice_headers_number_the_frames_as_the_standard_asks(every):
    """Frame numbers count reference pictures since the IDR picture, ids of IDR pictures alternate, order rises by 2."""
    source = SyntheticSource(fps=60, key_interval_s=5, disposable_every=every, audio=False, width=64, height=48)
    references = order = 0
    idr_ids = []
    for is_idr, is_reference, frame_num, idr_id, picture_order in slice_headers(source, 16):
        if is_idr:
            references = order = 0
            idr_ids.append(idr_id)
        assert (frame_num, picture_order) == (references % 256, order)
        references += is_reference
        order += 2
    assert idr_ids == [0, 1, 0, 1]


def test_decoders_do_not_miss_disposable_frames():
    """Without its disposable frames a stream decodes as well: frame numbers have no holes."""
    source = SyntheticSource(disposable_every=2, audio=False, width=64, height=48)
    target = io.BytesIO()
    writer = FlvWriter(target, audio=False)
    kept = 0
    for tag in source.tags(3):
        if inspect(tag.type_id, tag.payload).message_class is not MessageClass.DISPOSABLE:
            writer.write(*tag)
            kept += 1
    target.seek(0)
    with av.open(target, format="flv") as container:
        container.streams.video[0].codec_context.options = {"err_detect": "explode"}
        assert len(list(container.decode(video=0))) == kept - 2


@pytest.mark.parametrize(
    "options",
    [
        {"video": False, "audio": False},
        {"fps": 0},
        {"fps": 241},
        {"key_interval_s": -1},
        {"key_frame_ratio": 0.5},
        {"disposable_every": -1},
        {"size_jitter": 1},
        {"start_timestamp": 1 << 32},
        {"start_timestamp": -1},
        {"video_bit_rate": 10_000},
        {"key_frame_bytes": 100},
        {"key_frame_bytes": 10_000_000},
        {"audio_bit_rate": 1000},
        {"audio_bit_rate": 10_000_000},
        {"sample_rate": 1234},
        {"width": 15},
        {"width": 641},
        {"height": 5000},
        {"width": 4096, "height": 4096},
    ],
)
def test_source_refuses_what_it_cannot_make(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}|4096x4096|video_bit_rate"):
        SyntheticSource(**options)


def test_padding_of_audio_frames_has_the_size_asked_for():
    assert [len(padding(size)) for size in range(1600)] == [0, 0, *range(2, 1600)]


@given(st.lists(st.integers(0, 100_000), max_size=20))
@settings(max_examples=100, deadline=None)
def test_exp_golomb_codes_are_decodable(values):
    """A reader made after H.264 9.1 gets the numbers back."""
    bits = BitWriter()
    for value in values:
        bits.ue(value)
    text = "".join(f"{octet:08b}" for octet in bits.stop().to_bytes())
    at, found = 0, []
    for _ in values:
        zeros = text.index("1", at) - at
        found.append(int(text[at + zeros : at + 2 * zeros + 1], 2) - 1)
        at += 2 * zeros + 1
    assert found == values


@given(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 4, 255]), max_size=40).map(bytes))
@settings(max_examples=300, deadline=None)
def test_escape_hides_start_codes_and_can_be_undone(rbsp):
    escaped = escape(rbsp)
    assert not any(code in escaped for code in (b"\0\0\0", b"\0\0\1", b"\0\0\2"))
    out, zeros = bytearray(), 0
    for octet in escaped:
        if zeros >= 2 and octet == 3:
            zeros = 0
            continue
        out.append(octet)
        zeros = zeros + 1 if octet == 0 else 0
    assert bytes(out) == rbsp


def shown(frame):
    """Return the brightness in the middle of each square of a decoded frame, and check that squares are flat."""
    planes = frame.to_ndarray(format="yuv420p")[: frame.height]
    rows, columns = -(-frame.height // 16), -(-frame.width // 16)
    found = []
    for row, column in itertools.product(range(rows), range(columns)):
        square = planes[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16]
        assert square.min() == square.max()
        found.append((int(square[0, 0]) - 128) // 14)
    return found


@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_picture_when_decoded_is_a_clock_and_a_square_that_walks(every):
    source = SyntheticSource(audio=False, fps=25, key_interval_s=1.0, disposable_every=every)
    frames, _ = decode(source, 3.0)
    assert len(frames) == 75
    for index, frame in enumerate(frames):
        expected = squares_at(index / 25, 40, 23)
        assert shown(frame) == [expected.get(number, BACKGROUND) for number in range(40 * 23)]


def test_picture_when_its_rate_has_no_room_is_plain():
    source = SyntheticSource(audio=False, video_bit_rate=100_000)
    frames, _ = decode(source, 0.5)
    assert {value for frame in frames for value in shown(frame)} == {BACKGROUND}


@pytest.mark.parametrize("difference", range(-16, 17))
def test_square_when_decoded_has_its_brightness(difference):
    first, second = -(difference // 2), difference - difference // 2
    codec = TinyH264(32, 32, 25, 1_000_000)
    decoder = av.CodecContext.create("h264", "r")
    decoder.options = {"err_detect": "explode"}
    slices = [
        codec.intra_slice(0, {0: first, 1: second, 3: first}),
        codec.predicted_slice(1, 1, {0: first, 1: second, 3: first}, {1: first, 2: second, 3: second}, reference=True),
    ]
    frames = []
    for nals in ((codec.sps, codec.pps, slices[0]), (slices[1],)):
        frames += decoder.decode(av.Packet(b"".join(b"\x00\x00\x00\x01" + nal for nal in nals)))
    frames += decoder.decode(None)
    assert [shown(frame) for frame in frames] == [[first, second, 0, first], [0, first, second, second]]
