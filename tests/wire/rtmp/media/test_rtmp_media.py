"""Classification of audio, video and data bodies: classic FLV, Enhanced RTMP v1 and v2, and what real clients send."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.values import EcmaArray
from flowctl.wire.rtmp.media.enhanced import MAX_MODIFIERS, MAX_TRACKS
from flowctl.wire.rtmp.media.media import inspect, named_tracks

AUDIO, VIDEO, DATA_AMF3, DATA = 8, 9, 15, 18

AVCC = bytes.fromhex("01640028ffe1000a67640028acd940780227010004 68ee3c80".replace(" ", ""))
HVCC = b"\x01" + bytes(22)
ASC = b"\x11\x90"


def nal(header: int, size: int = 40) -> bytes:
    return size.to_bytes(4, "big") + bytes((header,)) + b"\xaa" * (size - 1)


REFERENCE, NON_REFERENCE, IDR = nal(0x41), nal(0x01), nal(0x65)
HEVC_REFERENCE, HEVC_NON_REFERENCE, HEVC_IDR = nal(0x02), nal(0x00), nal(0x26)


def summary(type_id, body):
    info = inspect(type_id, body)
    return (info.message_class.name, info.codec, info.packet)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\x17\x00\x00\x00\x00" + AVCC, ("HEADER", "avc1", "sequence_header")),
        (b"\x27\x00\x00\x00\x00" + AVCC, ("HEADER", "avc1", "sequence_header")),
        (b"\x17\x01\x00\x00\x00" + IDR, ("KEY", "avc1", "coded")),
        (b"\x17\x01\x00\x00\x00" + REFERENCE, ("KEY", "avc1", "coded")),
        (b"\x47\x01\x00\x00\x00" + IDR, ("KEY", "avc1", "coded")),
        (b"\x27\x01\x00\x00\x00" + REFERENCE, ("INTER", "avc1", "coded")),
        (b"\x27\x01\x00\x00\x00" + NON_REFERENCE, ("DISPOSABLE", "avc1", "coded")),
        (b"\x27\x01\x00\x00\x00" + IDR, ("KEY", "avc1", "coded")),
        (b"\x37\x01\x00\x00\x00" + REFERENCE, ("DISPOSABLE", "avc1", "coded")),
        (b"\x67\x01\x00\x00\x00" + IDR, ("INTER", "avc1", "coded")),
        (b"\x17\x02\x00\x00\x00", ("DATA", "avc1", "sequence_end")),
        (b"\x17\x02", ("DATA", "avc1", "sequence_end")),
        (b"\x1c\x00\x00\x00\x00" + HVCC, ("HEADER", "hvc1", "sequence_header")),
        (b"\x1c\x01\x00\x00\x00" + HEVC_IDR, ("KEY", "hvc1", "coded")),
        (b"\x2c\x01\x00\x00\x00" + HEVC_REFERENCE, ("INTER", "hvc1", "coded")),
        (b"\x2c\x01\x00\x00\x00" + HEVC_NON_REFERENCE, ("DISPOSABLE", "hvc1", "coded")),
        (b"\x1d\x00\x00\x00\x00\x81\x08\x0c\x00", ("HEADER", "av01", "sequence_header")),
        (b"\x1d\x01\x00\x00\x00\x12\x00\x0a", ("KEY", "av01", "coded")),
        (b"\x2d\x01\x00\x00\x00\x12\x00\x32", ("INTER", "av01", "coded")),
        (b"\x12\x00\x00\x84\x00", ("KEY", "flv1", "coded")),
        (b"\x22\x00\x00\x84\x00", ("INTER", "flv1", "coded")),
        (b"\x32\x00\x00\x84\x00", ("DISPOSABLE", "flv1", "coded")),
        (b"\x14\x00\x00", ("KEY", "vp6f", "coded")),
        (b"\x1f\x00\x00", ("KEY", "flv-15", "coded")),
        (b"\x57\x00", ("DATA", "", "command")),
        (b"\x57\x01", ("DATA", "", "command")),
        (b"\x52\x00", ("DATA", "", "command")),
    ],
)
def test_classic_video(body, expected):
    assert summary(VIDEO, body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\xaf\x00" + ASC, ("HEADER", "mp4a", "sequence_header")),
        (b"\xaf\x01\x21\x00", ("AUDIO", "mp4a", "coded")),
        (b"\xaf\x01", ("AUDIO", "mp4a", "empty")),
        (b"\xaf\x02\x00", ("AUDIO", "mp4a", "unknown")),
        (b"\xaf\x04\x02\x02", ("AUDIO", "mp4a", "unknown")),
        (b"\xaf\x00\x11", ("AUDIO", "mp4a", "malformed")),
        (b"\xaf", ("AUDIO", "", "malformed")),
        (b"", ("AUDIO", "", "silence")),
        (b"\x2f\xff\xfb", ("AUDIO", ".mp3", "coded")),
        (b"\xef\xff\xfb", ("AUDIO", ".mp3", "coded")),
        (b"\xb6\x35", ("AUDIO", "speex", "coded")),
        (b"\xb6", ("AUDIO", "speex", "empty")),
        (b"\x62\x00", ("AUDIO", "nellymoser", "coded")),
        (b"\x72\x00", ("AUDIO", "pcm_alaw", "coded")),
        (b"\x82\x00", ("AUDIO", "pcm_mulaw", "coded")),
        (b"\x3f\x00", ("AUDIO", "pcm_le", "coded")),
        (b"\xc0\x00", ("AUDIO", "flv-12", "coded")),
    ],
)
def test_classic_audio(body, expected):
    assert summary(AUDIO, body) == expected


@pytest.mark.parametrize(
    ("octets", "expected"),
    [("00000a", 10), ("ffffde", -34), ("7fffff", 8388607), ("800000", -8388608), ("000000", 0)],
)
@pytest.mark.parametrize("head", ["2701", "2c01", "a1" + b"hvc1".hex(), "a1" + b"avc1".hex()])
def test_composition_time_is_signed(head, octets, expected):
    body = bytes.fromhex(head + octets) + REFERENCE
    assert inspect(VIDEO, body).composition_ms == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\x90hvc1" + HVCC, ("HEADER", "hvc1", "sequence_header")),
        (b"\x80hvc1" + HVCC, ("HEADER", "hvc1", "sequence_header")),
        (b"\x90av01\x81\x08\x0c\x00", ("HEADER", "av01", "sequence_header")),
        (b"\x95av01\x80\x04", ("HEADER", "av01", "mpeg2ts_sequence_header")),
        (b"\x91hvc1\x00\x00\x00" + HEVC_IDR, ("KEY", "hvc1", "coded")),
        (b"\x93hvc1" + HEVC_IDR, ("KEY", "hvc1", "coded")),
        (b"\xa1hvc1\x00\x00\x10" + HEVC_REFERENCE, ("INTER", "hvc1", "coded")),
        (b"\xa1hvc1\x00\x00\x10" + HEVC_NON_REFERENCE, ("DISPOSABLE", "hvc1", "coded")),
        (b"\xa3hvc1" + HEVC_NON_REFERENCE, ("DISPOSABLE", "hvc1", "coded")),
        (b"\x91avc1\x00\x00\x00" + IDR, ("KEY", "avc1", "coded")),
        (b"\xa3avc1" + NON_REFERENCE, ("DISPOSABLE", "avc1", "coded")),
        (b"\x91av01\x12\x00", ("KEY", "av01", "coded")),
        (b"\xa1av01\x12\x00", ("INTER", "av01", "coded")),
        (b"\xb1av01\x12\x00", ("DISPOSABLE", "av01", "coded")),
        (b"\x91vp09\x82", ("KEY", "vp09", "coded")),
        (b"\x91vp08\x10", ("KEY", "vp08", "coded")),
        (b"\x91xyz1\x10", ("KEY", "xyz1", "coded")),
        (b"\xa1\x00\x01\x02\x03\x10", ("INTER", "0x00010203", "coded")),
        (b"\x92hvc1", ("DATA", "hvc1", "sequence_end")),
        (b"\x94hvc1\x02\x00\x09colorInfo\x05", ("HEADER", "hvc1", "metadata")),
        (b"\xd4hvc1\x02\x00\x09colorInfo\x05", ("HEADER", "hvc1", "metadata")),
        (b"\xd1\x00", ("DATA", "", "command")),
        (b"\xd0\x01", ("DATA", "", "command")),
        (b"\x98hvc1\x00", ("INTER", "hvc1", "unknown")),
        (b"\x9fhvc1\x00", ("INTER", "hvc1", "unknown")),
    ],
)
def test_enhanced_video(body, expected):
    assert summary(VIDEO, body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\x83hvc1" + HEVC_IDR, "KEY"),
        (b"\x83hvc1" + HEVC_REFERENCE, "INTER"),
        (b"\x83hvc1" + HEVC_NON_REFERENCE, "DISPOSABLE"),
        (b"\x83avc1" + IDR, "KEY"),
        (b"\x83vp09\x82\x49", "KEY"),
        (b"\x83vp09\x86\x00", "INTER"),
        (b"\x83av01\x12\x00\x32\x01\x10", "KEY"),
        (b"\x83av01\x12\x00\x32\x01\x30", "INTER"),
        (b"\x83xyz1\x82\x49", "INTER"),
    ],
)
def test_unmarked_frames_are_looked_into(body, expected):
    assert inspect(VIDEO, body).message_class.name == expected


def test_coded_frames_x_has_composition_time_zero():
    assert inspect(VIDEO, b"\xa3hvc1" + HEVC_REFERENCE).composition_ms == 0
    assert inspect(VIDEO, b"\xa1av01\x12\x00").composition_ms is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\x90mp4a" + ASC, ("HEADER", "mp4a", "sequence_header")),
        (b"\x90Opus", ("HEADER", "Opus", "sequence_header")),
        (b"\x90ac-3", ("HEADER", "ac-3", "sequence_header")),
        (b"\x90fLaC" + b"fLaC" + bytes(38), ("HEADER", "fLaC", "sequence_header")),
        (b"\x90fLaC", ("AUDIO", "fLaC", "malformed")),
        (b"\x90mp4a\x11", ("AUDIO", "mp4a", "malformed")),
        (b"\x91mp4a\x21", ("AUDIO", "mp4a", "coded")),
        (b"\x91Opus\xfc", ("AUDIO", "Opus", "coded")),
        (b"\x91.mp3\xff", ("AUDIO", ".mp3", "coded")),
        (b"\x91ec-3\x0b", ("AUDIO", "ec-3", "coded")),
        (b"\x91Opus", ("AUDIO", "Opus", "empty")),
        (b"\x92Opus", ("AUDIO", "Opus", "sequence_end")),
        (b"\x94Opus\x01\x02\x00\x00\x00\x03", ("HEADER", "Opus", "channels")),
        (b"\x94Opus\x01", ("AUDIO", "Opus", "malformed")),
        (b"\x93Opus\x01", ("AUDIO", "Opus", "unknown")),
        (b"\x91Opu", ("AUDIO", "", "malformed")),
        (b"\x90", ("AUDIO", "", "malformed")),
    ],
)
def test_enhanced_audio(body, expected):
    assert summary(AUDIO, body) == expected


def mod_ex(data: bytes, next_type: int, modifier: int = 0) -> bytes:
    size = len(data) - 1
    head = bytes((size,)) if size < 255 else b"\xff" + size.to_bytes(2, "big")
    return head + data + bytes((modifier << 4 | next_type,))


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 65536])
def test_mod_ex_of_any_size_is_skipped(size):
    body = b"\x97" + mod_ex(b"\x55" * size, 1, modifier=3) + b"av01\x12\x00"
    assert summary(VIDEO, body) == ("KEY", "av01", "coded")


@pytest.mark.parametrize(("count", "packet"), [(MAX_MODIFIERS, "coded"), (MAX_MODIFIERS + 1, "malformed")])
def test_mod_ex_prefixes_are_limited(count, packet):
    body = b"\x97" + mod_ex(b"\x00", 7) * (count - 1) + mod_ex(b"\x00", 1) + b"av01\x12"
    assert inspect(VIDEO, body).packet == packet


def test_mod_ex_before_multitrack_and_command():
    tracks = b"\xa7" + mod_ex(b"\x00\x00\x07", 6) + b"\x01av01\x02\x12"
    info = inspect(VIDEO, tracks)
    assert (info.tracks, info.message_class) == ((2,), MessageClass.INTER)
    assert inspect(VIDEO, b"\xd7" + mod_ex(b"\x00", 1) + b"\x00").packet == "command"


def multitrack(form: int, packet_type: int, tracks: list[tuple[bytes, int, bytes]]) -> bytes:
    """Return what follows the first octet of a multitrack body; `tracks` are FourCC, id, data."""
    out = bytes((form << 4 | packet_type,))
    if form < 2:
        out += tracks[0][0]
    for fourcc, track, data in tracks:
        out += (fourcc if form == 2 else b"") + bytes((track,))
        out += (len(data).to_bytes(3, "big") if form else b"") + data
    return out


def test_multitrack_with_one_track():
    """Form 0 has no size: the data goes to the end. Ids other than 0 are told."""
    info = inspect(VIDEO, b"\x96" + multitrack(0, 1, [(b"avc1", 3, b"\x00\x00\x21" + IDR)]))
    assert (info.message_class, info.codec, info.tracks) == (MessageClass.KEY, "avc1", (3,))
    assert (info.packet, info.composition_ms, info.multitrack) == ("coded", 33, True)


def test_multitrack_with_many_tracks_of_one_codec():
    """Form 1 has one FourCC and sizes; the message is KEY because each track's data is."""
    tracks = [(b"av01", track, b"\x12\x00\xaa") for track in (0, 1, 2)]
    info = inspect(VIDEO, b"\x96" + multitrack(1, 1, tracks))
    assert (info.message_class, info.tracks, info.codecs) == (MessageClass.KEY, (0, 1, 2), ("av01",) * 3)


def test_multitrack_with_many_codecs():
    body = multitrack(2, 0, [(b"hvc1", 0, HVCC), (b"avc1", 1, AVCC)])
    info = inspect(VIDEO, b"\x96" + body)
    assert (info.message_class, info.packet, info.codecs) == (
        MessageClass.HEADER,
        "sequence_header",
        ("hvc1", "avc1"),
    )
    assert inspect(AUDIO, b"\x95" + multitrack(2, 1, [(b"Opus", 0, b"\xfc"), (b"mp4a", 4, b"\x21")])).tracks == (0, 4)


def test_multitrack_is_disposable_only_when_every_track_is():
    both = [(b"avc1", 0, NON_REFERENCE), (b"avc1", 1, NON_REFERENCE)]
    one = [(b"avc1", 0, NON_REFERENCE), (b"avc1", 1, REFERENCE)]
    assert inspect(VIDEO, b"\xa6" + multitrack(1, 3, both)).message_class is MessageClass.DISPOSABLE
    assert inspect(VIDEO, b"\xa6" + multitrack(1, 3, one)).message_class is MessageClass.INTER


def test_multitrack_is_a_key_frame_when_its_lowest_track_is():
    """Players show track 0: a viewer can start where it can, whatever the others do."""
    slices = [IDR, b"\x00\x00\x00\x02\x41\x9a"]
    for order, expected in ((slices, MessageClass.KEY), (slices[::-1], MessageClass.INTER)):
        tracks = [(b"avc1", track, b"\x00\x00\x00" + data) for track, data in enumerate(order)]
        # Frame type 0: the slices tell which is one (gortmplib).
        assert inspect(VIDEO, b"\x86" + multitrack(1, 1, tracks)).message_class is expected
        assert inspect(VIDEO, b"\x86" + multitrack(1, 1, tracks[::-1])).message_class is expected


def test_multitrack_header_with_one_truncated_configuration_is_no_header():
    body = multitrack(1, 0, [(b"hvc1", 0, HVCC), (b"hvc1", 1, HVCC[:-1])])
    info = inspect(VIDEO, b"\x96" + body)
    assert (info.message_class, info.packet) == (MessageClass.INTER, "malformed")


@pytest.mark.parametrize("kind", [VIDEO, AUDIO])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_multitrack_cut_anywhere_starts_nothing(kind, form):
    tracks = [(b"avc1", 0, AVCC), (b"avc1", 1, AVCC)][: 1 if form == 0 else 2]
    body = (b"\x96" if kind == VIDEO else b"\x95") + multitrack(form, 0, tracks)
    assert inspect(kind, body).message_class is MessageClass.HEADER
    whole_track = len(body) - len(AVCC) - (4 if form == 1 else 8)
    # With one track, every configuration of at least 7 octets looks whole: sizes are not told.
    least = 1 if kind == AUDIO else 7
    looks_whole = range(len(body) - len(AVCC) + least, len(body)) if form == 0 else [whole_track]
    for cut in range(len(body)):
        if cut not in looks_whole:
            assert inspect(kind, body[:cut]).message_class in (MessageClass.INTER, MessageClass.AUDIO)


@pytest.mark.parametrize(
    "body",
    [
        b"\x96",
        b"\x96\x31av01\x00\x12",
        b"\x96\x06av01\x00\x12",
        b"\x96\x07av01\x00\x12",
        b"\x96\x11av01",
        b"\x96\x11av01\x00\xff\xff\xff\x12",
        b"\x96\x21av01\x00\x00\x00\x01",
        b"\x97",
        b"\x97\xff\xff",
        b"\x97\x02\x00\x00\x00",
        b"\x91hvc",
        b"\x91hvc1\x00\x00",
    ],
)
def test_enhanced_video_that_contradicts_itself_is_malformed(body):
    info = inspect(VIDEO, body)
    assert (info.message_class, info.packet) == (MessageClass.INTER, "malformed")


@pytest.mark.parametrize(("count", "packet"), [(MAX_TRACKS, "coded"), (MAX_TRACKS + 1, "malformed")])
def test_multitrack_is_limited(count, packet):
    body = multitrack(1, 1, [(b"av01", track, b"\x12") for track in range(count)])
    assert inspect(VIDEO, b"\x96" + body).packet == packet


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", ("INTER", "", "empty")),
        (b"\x17", ("INTER", "", "malformed")),
        (b"\x17\x00", ("INTER", "avc1", "malformed")),
        (b"\x17\x01", ("INTER", "", "malformed")),
        (b"\x17\x01\x00\x00", ("INTER", "", "malformed")),
        (b"\x17\x03\x00\x00\x00\x00", ("INTER", "", "malformed")),
        (b"\x17\x00\x00\x00\x00", ("INTER", "avc1", "malformed")),
        (b"\x17\x00\x00\x00\x00" + AVCC[:6], ("INTER", "avc1", "malformed")),
        (b"\x1c\x00\x00\x00\x00" + HVCC[:-1], ("INTER", "hvc1", "malformed")),
        (b"\x17\x01\x00\x00\x00", ("INTER", "avc1", "empty")),
        (b"\x17\x01\x00\x00\x00" + bytes(8), ("INTER", "avc1", "coded")),
        (b"\x27\x01\x00\x00\x00\x00\x00\x00\xff\x01", ("INTER", "avc1", "coded")),
        (b"\x27\x01\x00\x00\x00" + NON_REFERENCE[:-1], ("INTER", "avc1", "coded")),
        (b"\x91hvc1\x00\x00\x00", ("INTER", "hvc1", "empty")),
        (b"\x90hvc1", ("INTER", "hvc1", "malformed")),
        (b"\x94hvc1", ("INTER", "hvc1", "malformed")),
    ],
)
def test_video_without_content_starts_nothing(body, expected):
    """No picture, no configuration, or lengths beyond the body: INTER, whatever the frame type says."""
    assert summary(VIDEO, body) == expected


def test_bodies_of_two_octets_are_never_headers():
    bodies = [b"", *(bytes((first,)) for first in range(256))]
    bodies += [bytes((first, second)) for first in range(256) for second in range(256)]
    for body in bodies:
        assert inspect(AUDIO, body).message_class is MessageClass.AUDIO
        info = inspect(VIDEO, body)
        assert info.message_class is not MessageClass.HEADER
        if info.message_class is MessageClass.KEY:
            assert len(body) == 2
            assert info.codec not in ("avc1", "hvc1", "av01", "")


ON_METADATA = amf0.encode("onMetaData", EcmaArray({"width": 640.0, "keyframes": [1.0, 2.0]}))
SET_DATA_FRAME = amf0.encode("@setDataFrame", "onMetaData", {"width": 640.0})


@pytest.mark.parametrize(
    ("type_id", "body", "expected"),
    [
        (DATA, ON_METADATA, "metadata"),
        (DATA, SET_DATA_FRAME, "metadata"),
        (DATA, b"\x00" + ON_METADATA, "metadata"),
        (DATA_AMF3, b"\x00" + ON_METADATA, "metadata"),
        (DATA_AMF3, b"\x00" + SET_DATA_FRAME, "metadata"),
        (DATA_AMF3, ON_METADATA, "metadata"),
        (DATA_AMF3, b"\x00\x11\x06\x15onMetaData\x09\x01\x01", "metadata"),
        (DATA_AMF3, b"\x06\x1b@setDataFrame\x06\x15onMetaData\x0a\x0b\x01\x01", "metadata"),
        (DATA_AMF3, b"\x06\x15onMetaData", "data"),
        (DATA, amf0.encode("onMetaData"), "data"),
        (DATA, amf0.encode("@setDataFrame"), "data"),
        (DATA, amf0.encode("@clearDataFrame", "onMetaData"), "data"),
        (DATA, amf0.encode("onCuePoint", {"name": "x"}), "data"),
        (DATA, amf0.encode("onMetaDatum", {"name": "x"}), "data"),
        (DATA, amf0.encode("|RtmpSampleAccess", True, True), "data"),
        (DATA, b"\x00\x01\x02\x03", "data"),
        (DATA, amf0.encode([1.0, 2.0]), "data"),
        (DATA, amf0.encode({"onMetaData": 1.0}), "data"),
        (DATA, amf0.encode(1.0), "data"),
        (DATA, b"", "data"),
        (DATA, b"\x02", "data"),
        (20, amf0.encode("connect"), "data"),
    ],
)
def test_data_messages(type_id, body, expected):
    info = inspect(type_id, body)
    assert (info.kind, info.packet) == ("data", expected)
    assert info.message_class is (MessageClass.HEADER if expected == "metadata" else MessageClass.DATA)


@pytest.mark.parametrize(
    ("type_id", "body", "expected"),
    [
        (VIDEO, b"\x17\x00\x00\x00\x00" + AVCC, ("video", "sequence_header", (0,))),
        (VIDEO, b"\x90hvc1" + HVCC, ("video", "sequence_header", (0,))),
        (VIDEO, b"\x95av01\x80\x04", ("video", "sequence_header", (0,))),
        (VIDEO, b"\x94hvc1\x02", ("video", "metadata", (0,))),
        (
            VIDEO,
            b"\x96" + multitrack(1, 0, [(b"avc1", 1, AVCC), (b"avc1", 2, AVCC)]),
            ("video", "sequence_header", (1, 2)),
        ),
        (AUDIO, b"\xaf\x00" + ASC, ("audio", "sequence_header", (0,))),
        (AUDIO, b"\x94Opus\x01\x02", ("audio", "channels", (0,))),
        (DATA, ON_METADATA, ("data", "metadata", (0,))),
        (VIDEO, b"\x17\x01\x00\x00\x00" + IDR, None),
        (VIDEO, b"\x17\x02\x00\x00\x00", None),
    ],
)
def test_sticky_key(type_id, body, expected):
    """Headers that replace each other have equal keys: the codec is no part of it, the tracks are."""
    assert inspect(type_id, body).sticky_key == expected


def test_repeated_sequence_header_gives_an_equal_answer():
    body = b"\x17\x00\x00\x00\x00" + AVCC
    assert inspect(VIDEO, body) == inspect(VIDEO, bytes(bytearray(body)))


@given(st.sampled_from([AUDIO, VIDEO, DATA_AMF3, DATA]), st.binary(max_size=120))
@settings(max_examples=1500, deadline=None)
def test_any_octets_are_classified(type_id, body):
    info = inspect(type_id, body)
    assert info.kind == {AUDIO: "audio", VIDEO: "video"}.get(type_id, "data")
    assert inspect(type_id, memoryview(body)) == info


@st.composite
def enhanced_bodies(draw):
    """Bodies that begin like enhanced ones, so that the octets behind are reached."""
    video = draw(st.booleans())
    first = draw(st.integers(8, 15)) << 4 if video else 0x90
    packet_type = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7]))
    out = bytes((first | packet_type,))
    for _ in range(draw(st.integers(0, 3)) if packet_type == 7 else 0):
        out += mod_ex(draw(st.binary(min_size=1, max_size=5)), draw(st.integers(0, 7)), draw(st.integers(0, 1)))
    out += draw(st.sampled_from([b"", b"\x01", b"\x10", b"\x11", b"\x20", b"\x21", b"\x23"]))
    out += draw(st.sampled_from([b"", b"hvc1", b"avc1", b"av01", b"vp09", b"Opus"]))
    return (VIDEO if video else AUDIO, out + draw(st.binary(max_size=60)))


@given(enhanced_bodies())
@settings(max_examples=1000, deadline=None)
def test_any_enhanced_octets_are_classified(case):
    type_id, body = case
    info = inspect(type_id, body)
    assert info == inspect(type_id, memoryview(body))
    assert len(info.tracks) <= max(1, len(body))


@given(
    st.sampled_from([1, 2]),
    st.lists(
        st.tuples(
            st.sampled_from([b"avc1", b"hvc1", b"av01"]), st.integers(0, 255), st.binary(min_size=4, max_size=30)
        ),
        min_size=1,
        max_size=6,
    ),
)
@settings(max_examples=200, deadline=None)
def test_multitrack_round_trip(form, tracks):
    info = inspect(VIDEO, b"\xa6" + multitrack(form, 1, tracks))
    expected = [track[0] if form == 2 else tracks[0][0] for track in tracks]
    assert info.tracks == tuple(track for _, track, _ in tracks)
    assert info.codecs == tuple(fourcc.decode() for fourcc in expected)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"videocodecid": 7.0, "width": 640.0, "audiocodecid": 10.0}, {"audio", "video"}),
        ({"videocodecid": "avc1", "audiocodecid": ""}, {"video"}),
        ({"audiocodecid": 0.0, "hasVideo": False, "hasAudio": True}, {"audio"}),
        ({"videocodecid": None, "title": "audiocodecid"}, set()),
        ({"width": 640.0}, set()),
    ],
)
def test_metadata_when_it_names_codecs_names_tracks(values, named):
    for body in (amf0.encode("onMetaData", values), amf0.encode("@setDataFrame", "onMetaData", EcmaArray(values))):
        assert named_tracks(body) == named
        for end in range(len(body)):
            assert named_tracks(body[:end]) <= named
