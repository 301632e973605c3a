"""FLV reading and writing: any split, limits, errors with their position, and our files in FFmpeg and PyAV."""

from __future__ import annotations

import contextlib
import io
import subprocess

import av
import imageio_ffmpeg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl import flv
from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.flv import FlvReader, FlvTag, FlvWriter
from kit.sample import SampleRecipe, ensure_sample

TAGS = [
    FlvTag(18, 0, b"\x02\x00\x0aonMetaData\x08\x00\x00\x00\x00\x00\x00\x09"),
    FlvTag(9, 0, b"\x17\x00\x00\x00\x00\x01"),
    FlvTag(8, 0, b""),
    FlvTag(8, 0xFFFFFF, b"\xaf\x01" + b"a" * 300),
    FlvTag(9, 0x1000000, b"\x27\x01" + b"v" * 5000),
    FlvTag(9, 0xFFFFFFFF, b"\x27\x01"),
]


def stream(tags=TAGS, *, audio=True, video=True) -> bytes:
    return flv.header(audio, video) + b"".join(flv.tag(*tag) for tag in tags)


def read_in_pieces(data: bytes, sizes, **options) -> list[FlvTag]:
    reader, tags, at = FlvReader(**options), [], 0
    for size in sizes:
        tags += reader.feed(data[at : at + size])
        at += size
    tags += reader.feed(data[at:])
    reader.finish()
    return tags


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    recipe = SampleRecipe(seconds=1, width=160, height=90, gop_s=0.5, b_frames=2)
    return ensure_sample(tmp_path_factory.mktemp("flv"), recipe)


def test_header_is_nine_octets_and_the_back_pointer_of_no_tag():
    assert flv.header(audio=True, video=True) == bytes.fromhex("464c5601 05 00000009 00000000")
    assert flv.header(audio=True, video=False)[4] == 4
    assert flv.header(audio=False, video=True)[4] == 1


def test_tag_has_the_upper_eight_bits_of_the_timestamp_behind_the_lower():
    assert flv.tag(9, 0x12345678, b"ab") == bytes.fromhex("09 000002 345678 12 000000 6162 0000000d")


@pytest.mark.parametrize("timestamp", [0, 1, 0xFFFFFF, 0x1000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_timestamps_survive_at_the_edges_of_their_fields(timestamp):
    assert FlvReader().feed(stream([FlvTag(8, timestamp, b"x")])) == [FlvTag(8, timestamp, b"x")]


@pytest.mark.parametrize(
    ("type_id", "timestamp", "size"), [(0, 0, 0), (15, 0, 0), (41, 0, 0), (9, -1, 0), (9, 1 << 32, 0), (9, 0, 1 << 24)]
)
def test_tag_refuses_what_does_not_fit(type_id, timestamp, size):
    with pytest.raises(LocalProtocolError):
        flv.tag(type_id, timestamp, bytes(size))


def test_reader_gives_the_tags_that_were_written():
    reader = FlvReader(check_back_pointers=True)
    assert reader.header is None
    assert reader.feed(stream(video=False)) == TAGS
    assert reader.header == flv.FlvHeader(version=1, audio=True, video=False, data_offset=9)
    assert reader.back_pointer_errors == 0
    reader.finish()


def test_reader_hands_out_a_tag_without_waiting_for_its_back_pointer():
    reader = FlvReader()
    assert reader.feed(stream(TAGS[:2])[:-4]) == TAGS[:2]
    reader.finish()


def test_reader_takes_views_and_does_not_keep_them():
    buffer = bytearray(stream())
    tags = FlvReader().feed(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert tags == TAGS


@pytest.mark.parametrize("extra", [1, 7, 4087])
def test_reader_skips_a_longer_header(extra):
    data = b"FLV\x01\x05" + (9 + extra).to_bytes(4, "big") + b"\xee" * extra + stream()[9:]
    assert read_in_pieces(data, []) == TAGS
    assert read_in_pieces(data, [1] * (extra + 40)) == TAGS


def test_reader_leaves_out_tags_of_unknown_type():
    unknown = bytes.fromhex("0f 000003 000000 00 000000 616263 0000000e")
    reader = FlvReader()
    assert reader.feed(flv.header(audio=True, video=True) + unknown + flv.tag(8, 5, b"x")) == [FlvTag(8, 5, b"x")]


@pytest.mark.parametrize("pointer", [0, 1, 0xFFFFFFFF])
def test_wrong_back_pointer_is_counted_by_default_and_refused_when_checked(pointer):
    """Live servers write 0 there; players do not look, so the default only counts."""
    data = stream(TAGS[:1])[:-4] + pointer.to_bytes(4, "big") + flv.tag(*TAGS[1])
    reader = FlvReader()
    assert reader.feed(data) == TAGS[:2]
    assert reader.back_pointer_errors == 1
    strict = FlvReader(check_back_pointers=True)
    assert strict.feed(data) == TAGS[:1]
    with pytest.raises(RemoteProtocolError, match=rf"\(at byte {13 + 11 + len(TAGS[0].payload)}\)") as caught:
        strict.feed(b"")
    assert caught.value.code == "flv-out-of-step"


@pytest.mark.parametrize(
    ("data", "code", "position"),
    [
        (b"FLX\x01\x05\x00\x00\x00\x09", "flv-signature", 0),
        (b"FLV\x02\x05\x00\x00\x00\x09", "flv-version", 3),
        (b"FLV\x01\x05\x00\x00\x00\x08", "flv-out-of-step", 5),
        (flv.header(audio=True, video=True) + b"\x29" + bytes(10), "flv-encrypted", 13),
        (flv.header(audio=True, video=True) + b"\x88" + bytes(10), "flv-out-of-step", 13),
        (
            flv.header(audio=True, video=True) + bytes.fromhex("00000000000000 000000 00 00000000"),
            "flv-out-of-step",
            24,
        ),
    ],
)
def test_reader_says_what_is_wrong_and_where(data, code, position):
    whole, single = FlvReader(), FlvReader()

    def feed_single():
        for octet in data:
            single.feed(bytes((octet,)))

    for reader, feed in ((whole, lambda: whole.feed(data)), (single, feed_single)):
        with pytest.raises(RemoteProtocolError, match=rf"\(at byte {position}\)") as caught:
            feed()
        assert caught.value.code == code
        assert not reader._buffer
        with pytest.raises(RemoteProtocolError):
            reader.feed(stream())
        with pytest.raises(RemoteProtocolError):
            reader.finish()


def test_error_does_not_take_the_tags_before_it():
    reader = FlvReader()
    assert reader.feed(stream() + b"\xff" * 11) == TAGS
    with pytest.raises(RemoteProtocolError, match=f"at byte {len(stream())}"):
        reader.finish()


def test_tag_larger_than_the_limit_is_refused_before_it_is_received(monkeypatch):
    monkeypatch.setattr(flv, "MAX_TAG_BYTES", 100)
    reader = FlvReader()
    assert reader.feed(stream([FlvTag(9, 0, bytes(100))])) == [FlvTag(9, 0, bytes(100))]
    with pytest.raises(LimitExceededError) as caught:
        reader.feed(flv.tag(9, 0, bytes(101))[:11])
    assert (caught.value.limit, caught.value.value, caught.value.maximum) == ("flv_tag_bytes", 101, 100)


def test_memory_follows_what_was_received_and_is_limited(monkeypatch):
    monkeypatch.setattr(flv, "MAX_UNFINISHED_BYTES", 1000)
    reader = FlvReader()
    reader.feed(flv.header(audio=True, video=True) + flv.tag(9, 0, bytes(5000))[:500])
    assert len(reader._buffer) == 500
    reader.feed(bytes(500))
    with pytest.raises(LimitExceededError) as caught:
        reader.feed(b"\x00")
    assert (caught.value.limit, caught.value.maximum) == ("flv_unfinished_bytes", 1000)


def test_huge_data_offset_is_refused():
    """A header that asks to skip 4 GiB would mean silence for hours."""
    with pytest.raises(LimitExceededError) as caught:
        FlvReader().feed(b"FLV\x01\x05\xff\xff\xff\xff")
    assert caught.value.limit == "flv_data_offset_bytes"


@pytest.mark.parametrize("cut", [0, 1, 8, 13 + 1, 13 + 11, 13 + 12])
def test_finish_tells_a_stream_that_ends_inside(cut):
    reader = FlvReader()
    reader.feed(stream()[:cut])
    with pytest.raises(RemoteProtocolError) as caught:
        reader.finish()
    assert caught.value.code == "flv-truncated"


@pytest.mark.parametrize("cut", [9, 11, 13])
def test_finish_accepts_an_end_between_tags(cut):
    reader = FlvReader()
    tags = reader.feed(stream()[:cut])
    reader.finish()
    assert tags == []


class Target:
    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)


def test_writer_writes_the_header_with_the_first_tag():
    target = Target()
    writer = FlvWriter(target, audio=False)
    assert target.calls == []
    for tag in TAGS:
        writer.write(*tag)
    assert b"".join(target.calls) == stream(audio=False)
    assert len(target.calls) == writer.tags_written == len(TAGS)


@pytest.mark.parametrize("kept", [(8, 18), (9,), (8, 9), ()])
def test_writer_when_the_header_is_corrected_announces_what_was_written(kept):
    file = io.BytesIO(b"before")
    file.seek(0, 2)
    writer = FlvWriter(file)
    tags = [tag for tag in TAGS if tag.type_id in kept]
    for tag in tags:
        writer.write(*tag)
    writer.correct_header(file)
    data = file.getvalue().removeprefix(b"before")
    assert file.tell() == len(data) + 6
    reader = FlvReader(check_back_pointers=True)
    assert reader.feed(data) == tags
    assert not tags or (reader.header.audio, reader.header.video) == (8 in kept, 9 in kept)


def test_writer_writes_nothing_when_the_tag_is_wrong():
    target = Target()
    writer = FlvWriter(target)
    with pytest.raises(LocalProtocolError):
        writer.write(9, -1, b"")
    assert (target.calls, writer.tags_written) == ([], 0)


tags_strategy = st.lists(
    st.builds(FlvTag, st.sampled_from([8, 9, 18]), st.integers(0, 0xFFFFFFFF), st.binary(max_size=80)), max_size=8
)


@given(tags_strategy, st.lists(st.integers(0, 40), max_size=30))
@settings(max_examples=300, deadline=None)
def test_round_trip(tags, sizes):
    assert read_in_pieces(stream(tags), sizes, check_back_pointers=True) == tags


@given(st.binary(max_size=200), st.lists(st.integers(0, 40), max_size=20), st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_octets_give_tags_or_a_protocol_error_independent_of_the_split(garbage, sizes, strict):
    data = stream(TAGS[:2]) + garbage
    outcomes = []
    for pieces in ([], sizes):
        reader, tags, at, error = FlvReader(check_back_pointers=strict), [], 0, None
        try:
            for size in [*pieces, len(data)]:
                tags += reader.feed(data[at : at + size])
                at += size
            reader.finish()
        except RemoteProtocolError as caught:
            error = str(caught)
        outcomes.append((tags, error))
    assert outcomes[0] == outcomes[1]


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_octets_from_the_start(data):
    reader = FlvReader()
    is_header = data[:4] == b"FLV\x01" and len(data) >= 9
    with contextlib.suppress(RemoteProtocolError) if is_header else pytest.raises(RemoteProtocolError, match="at byte"):
        reader.feed(data)
        reader.finish()


def packets(source) -> list[tuple[str, int | None, int | None, bool, bytes]]:
    with av.open(source, format="flv") as container:
        return [
            (packet.stream.type, packet.dts, packet.pts, packet.is_keyframe, bytes(packet))
            for packet in container.demux()
            if packet.size
        ]


def test_real_recording_is_read_whole_with_matching_back_pointers(sample):
    data = sample.read_bytes()
    reader = FlvReader(check_back_pointers=True)
    tags = reader.feed(data)
    reader.finish()
    assert reader._consumed == len(data)
    assert {tag.type_id for tag in tags} == {8, 9, 18}


def test_remuxed_recording_has_the_same_packets_for_pyav(sample):
    target = io.BytesIO()
    writer = FlvWriter(target)
    for tag in FlvReader().feed(sample.read_bytes()):
        writer.write(*tag)
    expected = packets(str(sample))
    assert len(expected) > 60
    target.seek(0)
    assert packets(target) == expected


def test_ffmpeg_decodes_the_remuxed_recording_without_complaint(sample, tmp_path):
    path = tmp_path / "remuxed.flv"
    with path.open("wb") as file:
        writer = FlvWriter(file)
        for tag in FlvReader().feed(sample.read_bytes()):
            writer.write(*tag)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "warning", "-xerror", "-err_detect", "explode", "-i", str(path)]
    done = subprocess.run([*command, "-f", "null", "-"], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("offset", [0xFFFFFF - 400, 0x1000000, 0x7FFFFFFF - 2000])
def test_pyav_reads_extended_timestamps(sample, offset):
    target = io.BytesIO()
    writer = FlvWriter(target)
    for tag in FlvReader().feed(sample.read_bytes()):
        writer.write(tag.type_id, tag.timestamp + (offset if tag.type_id != 18 else 0), tag.payload)
    expected = [(kind, dts + offset, pts + offset, key, data) for kind, dts, pts, key, data in packets(str(sample))]
    target.seek(0)
    assert packets(target) == expected
