"""What an initialisation says of its tracks, for those of FFmpeg and of encoders that tests have no recording of."""

from __future__ import annotations

import pytest

from flowctl.live.remux.container import Mp4Form
from flowctl.live.remux.course import FileTimeline
from flowctl.live.remux.variants.tracks import read_tracks
from flowctl.wire.rtmp.media.size import read_size


def init_of(tags):
    timeline, units = FileTimeline(), []
    for tag in tags[:200]:
        unit = timeline.add_message(tag.type_id, tag.timestamp, tag.payload)
        if unit is not None:
            units.append(unit)
    return Mp4Form().add(timeline.headers, units)


def test_tracks_when_ffmpeg_encoded_them_have_the_names_of_their_codecs(sample):
    _, tags = sample("b_frames")
    header = next(tag.payload for tag in tags if tag.type_id == 9 and tag.payload[1] == 0)
    codecs, size = read_tracks(init_of(tags))
    assert codecs == (f"avc1.{header[6:9].hex()}", "mp4a.40.2")
    assert size == read_size(header) == (160, 96)


def test_tracks_when_pictures_are_hevc_say_profile_and_level(sample):
    _, tags = sample("hevc")
    codecs, size = read_tracks(init_of(tags))
    assert codecs[0].startswith("hvc1.1.6.L")
    assert size == (160, 96)


def box(kind, *bodies):
    data = b"".join(bodies)
    return (len(data) + 8).to_bytes(4) + kind.encode() + data


def moov(entry):
    data = box("stsd", bytes(8), entry)
    for kind in ("stbl", "minf", "mdia", "trak", "moov"):
        data = box(kind, data)
    return data


def picture(kind, config, body):
    return box(kind, bytes(24), (1920).to_bytes(2), (1080).to_bytes(2), b"\0H\0\0", bytes(46), box(config, body))


def sound(kind, *boxes):
    return box(kind, bytes(28), *boxes)


@pytest.mark.parametrize(
    ("entry", "codec"),
    [
        # The examples of ISO/IEC 14496-15 annex E, of the binding of AV1 (section 5), and of that of VP9.
        (picture("hvc1", "hvcC", bytes.fromhex("01 01 60000000 b00000000000 5d")), "hvc1.1.6.L93.B0"),
        (picture("hev1", "hvcC", bytes.fromhex("01 42 20000000 000000000000 78")), "hev1.A2.4.L120"),
        (picture("av01", "av1C", bytes.fromhex("81 04 0c 00")), "av01.0.04M.08"),
        (picture("av01", "av1C", bytes.fromhex("81 0d ce 00")), "av01.0.13H.10"),
        (picture("vp09", "vpcC", bytes.fromhex("01000000 02 0a a2 000000")), "vp09.02.10.10"),
        (
            sound("mp4a", box("esds", bytes.fromhex("00000000 0319000200 0411 6b 15000000 00000000 00000000"))),
            "mp4a.6B",
        ),
        (
            sound(
                "mp4a",
                box(
                    "esds",
                    bytes.fromhex(
                        "00000000 03808080250002 00 0480808017 40 15000000 00000000 00000000 0580808002 2b11"
                    ),
                ),
            ),
            "mp4a.40.5",
        ),
        (sound("Opus", box("dOps", bytes(11))), "opus"),
        (sound("ac-3", box("dac3", bytes(3))), "ac-3"),
    ],
)
def test_tracks_of_any_codec_have_its_name(entry, codec):
    tracks = read_tracks(moov(entry))
    assert tracks.codecs == (codec,)
    assert tracks.size == ((1920, 1080) if b"\0H\0\0" in entry else None)


def test_tracks_when_cut_short_are_none():
    whole = moov(picture("avc1", "avcC", bytes.fromhex("0142c01e")))
    assert read_tracks(whole).codecs == ("avc1.42c01e",)
    for length in range(len(whole)):
        try:
            codecs = read_tracks(whole[:length]).codecs
        except ValueError:
            continue
        assert len(codecs) < 2
