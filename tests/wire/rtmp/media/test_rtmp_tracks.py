"""Multitrack messages taken apart into plain ones, and put together: octets by hand, recorded ones, and real FFmpeg."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl import flv
from flowctl.core.flow.state import MessageClass
from flowctl.flv import FlvReader, FlvTag
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.media.enhanced import MAX_TRACKS
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.media.tracks import split_tracks, wrap_track

VECTORS = Path(__file__).resolve().parents[5] / "shared" / "vectors"
AUDIO, VIDEO, DATA = 8, 9, 18
AVCC = bytes.fromhex("01640028ffe1000467640028010002 68ee".replace(" ", ""))
HVCC = b"\x01" + bytes(22)
AV1C = bytes.fromhex("81080c00")
IDR = bytes.fromhex("000000026588")
SLICE = bytes.fromhex("00000002419a")


def split(type_id, text):
    """Return (track, body in hex) of each track in a body that is given in hex."""
    body = bytes.fromhex(text.replace(" ", ""))
    found = split_tracks(type_id, body)
    assert split_tracks(type_id, bytearray(body)) == found
    return [(track, payload.hex()) for track, payload in found]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # One track (form 0). 9 = extended, key frame; 6 = multitrack; then form and packet type, FourCC, id, data.
        (f"96 00 61766331 01 {AVCC.hex()}", [(1, "1700000000" + AVCC.hex())]),
        (f"96 01 61766331 02 000050 {IDR.hex()}", [(2, "1701000050" + IDR.hex())]),
        (f"a6 01 61766331 02 ffffd8 {SLICE.hex()}", [(2, "2701ffffd8" + SLICE.hex())]),  # shown 40 ms before
        (f"a6 03 61766331 02 {SLICE.hex()}", [(2, "2701000000" + SLICE.hex())]),  # CodedFramesX: no composition time
        (f"b6 03 61766331 02 {SLICE.hex()}", [(2, "3701000000" + SLICE.hex())]),  # disposable
        ("96 02 61766331 02", [(2, "1702000000")]),
        (f"96 00 68766331 01 {HVCC.hex()}", [(1, "9068766331" + HVCC.hex())]),
        ("96 01 68766331 01 000050 0000000226ff", [(1, "91687663310000500000000226ff")]),
        ("a6 03 68766331 01 0000000202ff", [(1, "a3687663310000000202ff")]),
        (f"96 00 61763031 09 {AV1C.hex()}", [(9, "9061763031" + AV1C.hex())]),
        ("96 05 61763031 09 80040c00", [(9, "956176303180040c00")]),  # MPEG2TSSequenceStart
        ("96 01 61763031 09 12000a", [(9, "916176303112000a")]),
        # Colour information. Its frame type has no meaning, but in a multitrack message 5 would be a command.
        ("96 04 68766331 09 020009636f6c6f72496e666f", [(9, "d468766331020009636f6c6f72496e666f")]),
        ("d468766331020009636f6c6f72496e666f", [(0, "d468766331020009636f6c6f72496e666f")]),
        ("96 01 fffefdfc 09 12000a", [(9, "91fffefdfc12000a")]),  # a codec that has no name
        # Many tracks of one codec (form 1): FourCC, then id, size, data of each.
        (
            f"96 11 61766331 00 000009 000050 {IDR.hex()} 02 000009 000050 {IDR.hex()}",
            [(0, "1701000050" + IDR.hex()), (2, "1701000050" + IDR.hex())],
        ),
        # Many codecs (form 2): FourCC, id, size, data of each.
        (
            f"96 20 61766331 00 {len(AVCC):06x} {AVCC.hex()} 68766331 01 {len(HVCC):06x} {HVCC.hex()}",
            [(0, "1700000000" + AVCC.hex()), (1, "9068766331" + HVCC.hex())],
        ),
        # ModEx: a nanosecond offset of 3 octets, then the next packet type; the clock of RTMP cannot say it.
        (f"97 02 0f4240 06 01 61766331 01 000050 {IDR.hex()}", [(1, "1701000050" + IDR.hex())]),
        (f"97 02 0f4240 01 61766331 000050 {IDR.hex()}", [(0, "1701000050" + IDR.hex())]),
        ("97 02 0f4240 07 00 aa 03 68766331 0000000226ff", [(0, "93687663310000000226ff")]),
        # Of one track, as it is or in its classic form.
        (f"90 61766331 {AVCC.hex()}", [(0, "1700000000" + AVCC.hex())]),
        (f"93 61766331 {IDR.hex()}", [(0, "1701000000" + IDR.hex())]),
        (f"1700000000{AVCC.hex()}", [(0, "1700000000" + AVCC.hex())]),
        ("9168766331000050 0000000226ff", [(0, "91687663310000500000000226ff")]),
        ("2200008400", [(0, "2200008400")]),
        ("57", [(0, "57")]),
        # gortmplib marks no frame: the mark is set by what the slices are.
        (f"86 03 61766331 02 {IDR.hex()}", [(2, "1701000000" + IDR.hex())]),
        (f"86 03 61766331 02 {SLICE.hex()}", [(2, "2701000000" + SLICE.hex())]),
        (f"80 68766331 {HVCC.hex()}", [(0, "9068766331" + HVCC.hex())]),
        # No player of one track could read it.
        ("96 04 61766331 01 020009636f6c6f72496e666f", []),
        ("d6 04 68766331 01 020009636f6c6f72496e666f", []),
        ("d0 00", []),
    ],
)
def test_video_is_taken_apart(body, expected):
    assert split(VIDEO, body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("95 00 6d703461 01 1190", [(1, "af001190")]),
        ("95 01 6d703461 01 dc004c", [(1, "af01dc004c")]),
        ("95 04 6d703461 01 0102 00000003", []),  # channel layout: AAC has its own
        ("95 02 6d703461 01", []),
        ("95 01 2e6d7033 01 fffb90", [(1, "2ffffb90")]),
        ("95 01 4f707573 03 fc11", [(3, "914f707573fc11")]),
        ("95 02 4f707573 03", [(3, "924f707573")]),
        ("95 04 4f707573 03 0102 00000003", [(3, "944f707573010200000003")]),
        (
            "95 21 6d703461 00 000002 dc00 4f707573 01 000003 fc1122",
            [(0, "af01dc00"), (1, "914f707573fc1122")],
        ),
        ("97 02 0f4240 05 01 6d703461 01 dc004c", [(1, "af01dc004c")]),
        ("91 6d703461 dc004c", [(0, "af01dc004c")]),
        ("91 4f707573 fc11", [(0, "914f707573fc11")]),
        ("af01dc004c", [(0, "af01dc004c")]),
        ("", [(0, "")]),  # a period of silence
    ],
)
def test_audio_is_taken_apart(body, expected):
    assert split(AUDIO, body) == expected


@pytest.mark.parametrize(
    ("type_id", "body"),
    [
        (VIDEO, "80"),
        (VIDEO, "96"),
        (VIDEO, "96 31 61763031 00 12"),  # form 3 does not exist
        (VIDEO, "96 06 61763031 00 12"),  # multitrack within multitrack
        (VIDEO, "96 07 61763031 00 12"),
        (VIDEO, "96 11 61766331 00 ffffff 12"),
        (VIDEO, "96 21 61763031 00 0000"),
        (VIDEO, f"96 00 61766331 01 {AVCC[:6].hex()}"),
        (VIDEO, "96 01 61766331 01 0000"),
        (VIDEO, "9e 61766331 12"),
        (VIDEO, "91 617633"),
        (VIDEO, "97 ff ff"),
        (AUDIO, "90"),
        (AUDIO, "95"),
        (AUDIO, "95 00 6d703461 01 11"),
        (AUDIO, "95 05 6d703461 01 11"),
        (AUDIO, "93 6d703461 01"),
    ],
)
def test_what_contradicts_itself_is_left_out(type_id, body):
    assert split(type_id, body) == []
    assert inspect(type_id, bytes.fromhex(body.replace(" ", ""))).packet in ("malformed", "unknown")


def test_one_broken_track_takes_no_other_with_it():
    """Where the lengths fit, each track is judged on its own."""
    body = f"96 20 61766331 00 000002 0164 68766331 01 {len(HVCC):06x} {HVCC.hex()}"
    assert split(VIDEO, body) == [(1, "9068766331" + HVCC.hex())]


def test_tracks_of_a_message_are_limited():
    def body(count):
        return "9611 61763031" + "".join(f"{track:02x} 000001 12" for track in range(count))

    assert [track for track, _ in split(VIDEO, body(MAX_TRACKS))] == list(range(MAX_TRACKS))
    assert split(VIDEO, body(MAX_TRACKS + 1)) == []


def test_what_is_plain_already_is_not_copied():
    for type_id, body in [
        (VIDEO, b"\x17\x01\0\0\0" + IDR),
        (VIDEO, b"\x91hvc1\0\0\0" + IDR),
        (VIDEO, b"\xa3av01\x12"),
        (AUDIO, b"\xaf\x01\xdc"),
        (AUDIO, b"\x91Opus\xfc"),
        (DATA, b"\x02\0\x0aonMetaData\x05"),
    ]:
        assert split_tracks(type_id, body)[0].payload is body


@pytest.mark.parametrize(
    ("type_id", "body", "expected"),
    [
        (VIDEO, "1700000000" + AVCC.hex(), "96 00 61766331 05" + AVCC.hex()),
        (VIDEO, "2701000050" + SLICE.hex(), "a6 01 61766331 05 000050" + SLICE.hex()),
        (VIDEO, "1702000000", "96 02 61766331 05"),
        (VIDEO, "1702", "96 02 61766331 05"),
        (VIDEO, "1c00000000" + HVCC.hex(), "96 00 68766331 05" + HVCC.hex()),
        (VIDEO, "1c01000050 0000000226ff", "96 01 68766331 05 000050 0000000226ff"),
        (VIDEO, "1d01000000 12000a", "96 01 61763031 05 12000a"),
        (VIDEO, "93 68766331 0000000226ff", "96 03 68766331 05 0000000226ff"),
        (VIDEO, "d4 68766331 0200", "96 04 68766331 05 0200"),
        (VIDEO, "97 02 0f4240 01 61763031 12000a", "96 01 61763031 05 12000a"),
        (AUDIO, "af001190", "95 00 6d703461 05 1190"),
        (AUDIO, "af01dc00", "95 01 6d703461 05 dc00"),
        (AUDIO, "2ffffb90", "95 01 2e6d7033 05 fffb90"),
        (AUDIO, "91 4f707573 fc11", "95 01 4f707573 05 fc11"),
    ],
)
def test_one_track_is_put_into_a_multitrack_message(type_id, body, expected):
    plain = bytes.fromhex(body)
    assert wrap_track(type_id, 5, plain) == bytes.fromhex(expected)
    assert wrap_track(type_id, 0, plain) is plain  # as OBS and FFmpeg send track 0


@pytest.mark.parametrize(
    ("type_id", "body"),
    [
        (VIDEO, ""),
        (VIDEO, "2200008400"),  # H.263 has no FourCC
        (VIDEO, "5700"),  # a command
        (VIDEO, "d0 00"),
        (VIDEO, "9600617663310101"),
        (VIDEO, "91 6176"),
        (VIDEO, "1703"),
        (AUDIO, "af"),
        (AUDIO, "af02"),
        (AUDIO, "7255"),  # G.711
        (AUDIO, "9500"),
        (DATA, "02000a6f6e4d65746144617461"),
    ],
)
def test_what_multitrack_cannot_say_is_refused(type_id, body):
    assert wrap_track(type_id, 1, bytes.fromhex(body)) is None


def test_recorded_messages_of_one_track_are_track_0_and_come_back_from_a_wrapped_one():
    if not VECTORS.is_dir():
        pytest.skip("no recorded messages here")
    vectors = json.loads((VECTORS / "rtmp_vectors.json").read_text())["vectors"]
    recorded = [bytes.fromhex(vector["input_hex"]) for vector in vectors if vector["kind"] == "ertmp_message"]
    messages = [m for octets in recorded for m in ChunkReader(WireLimits()).feed(octets) if m.type_id in (AUDIO, VIDEO)]
    assert len(messages) >= 5
    for message in messages:
        ((track, plain),) = split_tracks(message.type_id, message.payload)
        wrapped = wrap_track(message.type_id, 7, plain)
        assert track == 0
        assert split_tracks(message.type_id, wrapped) == [(7, plain)]
        assert inspect(message.type_id, plain)[1:4] == inspect(message.type_id, message.payload)[1:4]


@given(
    st.sampled_from([b"avc1", b"hvc1", b"av01", b"vp09", b"vvc1", b"mp4a", b".mp3", b"Opus", b"fLaC", b"ac-3"]),
    st.integers(0, 7),
    st.integers(0, 15),
    st.integers(0, 255),
    st.binary(min_size=1, max_size=40),
)
@settings(max_examples=500, deadline=None)
def test_plain_messages_survive_a_multitrack_one(fourcc, frame_type, packet_type, track, data):
    """What is split, wrapped as any track and split again is the same, and means the same."""
    video = fourcc in (b"avc1", b"hvc1", b"av01", b"vp09", b"vvc1")
    type_id = VIDEO if video else AUDIO
    body = bytes((0x80 | frame_type << 4 | packet_type if video else 0x90 | packet_type,)) + fourcc + data
    for _, plain in split_tracks(type_id, body):
        assert split_tracks(type_id, plain) == [(0, plain)]
        wrapped = wrap_track(type_id, track, plain)
        assert wrapped is not None
        assert split_tracks(type_id, wrapped) == [(track, plain)]
        assert inspect(type_id, plain).message_class is inspect(type_id, wrapped).message_class


def run_ffmpeg(*arguments):
    """Run the FFmpeg of the dev extra, which knows multitrack; an error or a warning fails the test."""
    program = os.environ.get("FLOWCTL_FFMPEG")
    if program is None:
        pytest.skip("no FFmpeg that knows multitrack")
    done = subprocess.run([program, "-v", *map(str, arguments)], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    return done.stdout.decode()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a file that FFmpeg wrote with three tracks of pictures and two of sound."""
    path = tmp_path_factory.mktemp("tracks") / "multitrack.flv"
    sizes = "[0:v]split=3[a][b][c];[b]scale=160:90[d];[c]scale=80:46[e]"
    sources = ["-f", "lavfi", "-i", "testsrc2=size=320x180:rate=25:d=2", "-f", "lavfi", "-i", "sine=d=2"]
    maps = ["-map", "[a]", "-map", "[d]", "-map", "[e]", "-map", "1:a", "-map", "1:a"]
    coding = ["-c:v", "libx264", "-g", "25", "-bf", "2", "-preset", "ultrafast", "-c:a", "aac", "-b:a:1", "32k"]
    # It warns that most demuxers know one track only.
    run_ffmpeg("error", *sources, "-filter_complex", sizes, *maps, *coding, "-f", "flv", path)
    return path


def write_flv(path, tags):
    path.write_bytes(flv.header(audio=True, video=True) + b"".join(flv.tag(*tag) for tag in tags))


def decoded(path, video=0, audio=0):
    """Return what FFmpeg decodes of a track of pictures and one of sound: times, sizes and hashes."""
    maps = ("-map", f"0:v:{video}", "-map", f"0:a:{audio}")
    return run_ffmpeg("warning", "-xerror", "-err_detect", "explode", "-i", path, *maps, "-f", "framemd5", "-")


def test_ffmpeg_decodes_each_track_of_its_own_file_alone(written, tmp_path):
    """The pictures, sound and times of a plain file are those of the track in the multitrack file."""
    tags = FlvReader().feed(written.read_bytes())
    assert {track for tag in tags for track, _ in split_tracks(tag.type_id, tag.payload)} == {0, 1, 2}
    path = tmp_path / "plain.flv"
    for video, audio in ((0, 0), (1, 1), (2, 1)):
        wanted = {VIDEO: video, AUDIO: audio}
        write_flv(
            path,
            [
                FlvTag(tag.type_id, tag.timestamp, plain)
                for tag in tags
                for track, plain in split_tracks(tag.type_id, tag.payload)
                if wanted.get(tag.type_id, -1) == track
            ],
        )
        assert decoded(path) == decoded(written, video, audio)


def test_ffmpeg_reads_the_tracks_that_were_put_together(written, tmp_path):
    """Plain streams wrapped by us are, for FFmpeg, the tracks that it wrote itself."""
    tags = [tag for tag in FlvReader().feed(written.read_bytes()) if tag.type_id != DATA]
    path = tmp_path / "wrapped.flv"
    plain = [(tag, track, body) for tag in tags for track, body in split_tracks(tag.type_id, tag.payload)]
    assert {inspect(tag.type_id, body).multitrack for tag, _, body in plain} == {False}
    wrapped = [FlvTag(tag.type_id, tag.timestamp, wrap_track(tag.type_id, track, body)) for tag, track, body in plain]
    write_flv(path, wrapped)
    for track in (0, 1):
        assert decoded(path, track, track) == decoded(written, track, track)
    keys = [track for tag, track, body in plain if inspect(tag.type_id, body).message_class is MessageClass.KEY]
    assert [keys.count(track) for track in (0, 1, 2)] == [2, 2, 2]
