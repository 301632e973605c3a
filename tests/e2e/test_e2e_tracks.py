"""Several video tracks (Enhanced RTMP v2) and sets of renditions, published by FFmpeg and played by its libraries."""

from __future__ import annotations

import signal
import time
from itertools import pairwise

import av
import pytest
from e2e_kit import PATIENCE_S, address_of, wait_for_end, wait_for_keys, wait_until

from flowctl.core.flow.state import MessageClass
from flowctl.flv import TAG_AUDIO, TAG_VIDEO, FlvReader
from flowctl.live.settings.renditions import RenditionNames
from flowctl.wire.rtmp.media.media import inspect

TRACKS = (0, 1)
SUFFIXES = ("_270", "_180")
ENCODER = ("-c:v", "libx264", "-preset", "ultrafast", "-tune", "zerolatency", "-g", "25", "-sc_threshold", "0")
SECONDS = 60  # at most: a busy machine needs longer to show what the line carries
OUTPUT = ("-map", "0:v", "-map", "1:v", "-map", "0:a", "-c", "copy", "-f", "flv", "-flvflags", "no_duration_filesize")


@pytest.fixture
def two_tracks(programs, sample, tmp_path):
    """Return the inputs of FFmpeg; skip where it writes one track only."""
    inputs = ("-i", sample("plain"), "-i", sample("other"))
    path = tmp_path / "tracks.flv"
    status = programs.start(*inputs, *OUTPUT, "-t", "0.5", path).wait()
    found = {inspect(tag.type_id, tag.payload).tracks for tag in FlvReader().feed(path.read_bytes())}
    if status or not {(track,) for track in TRACKS} <= found:
        pytest.skip("this FFmpeg does not write several video tracks")
    return inputs


def decode_tracks(url):
    """Return how many pictures of each height there were; a decoding error raises."""
    pictures = {}
    with av.open(url, timeout=(PATIENCE_S, PATIENCE_S)) as container:
        for packet in container.demux():
            stream = packet.stream
            if stream.type != "video" or not packet.size:
                continue
            stream.codec_context.options = {"err_detect": "explode"}
            for frame in packet.decode():
                pictures[frame.height] = pictures.get(frame.height, 0) + 1
    return pictures


def publish_tracks(programs, two_tracks, server):
    timed = tuple(part for at in (0, 2) for part in ("-readrate", 2.0, *two_tracks[at : at + 2]))
    return programs.start(*timed, *OUTPUT, address_of(server))


def test_viewer_of_two_tracks_that_knows_none_has_one_of_them(background, two_tracks, live, programs):
    """FFmpeg's libraries announce no tracks: they get the one that fits, and decode it without an error."""
    server = live()
    published = publish_tracks(programs, two_tracks, server)
    wait_for_keys(server, 3)
    whole = background.submit(decode_tracks, address_of(server))
    second = background.submit(decode_tracks, f"{address_of(server)}?track=1")
    assert published.wait() == 0
    pictures = whole.result(PATIENCE_S)
    assert set(pictures) <= {180, 270}
    assert sum(pictures.values()) > 10
    assert [*second.result(PATIENCE_S)] == [270]


def test_late_viewer_of_two_tracks_has_both_from_the_first_key_frame_on(
    background, two_tracks, live, clients, programs
):
    server = live(renditions=RenditionNames(tracks=False))
    published = publish_tracks(programs, two_tracks, server)
    wait_for_keys(server, 3)
    watched = background.submit(decode_tracks, address_of(server))
    ours = clients.play(server)
    assert published.wait() == 0
    wait_for_end(ours)

    media = [item for item in ours.messages if item[0] in (TAG_AUDIO, TAG_VIDEO)]
    infos = [inspect(type_id, payload) for type_id, _, payload in media]
    start = next(at for at, info in enumerate(infos) if info.message_class is not MessageClass.HEADER)
    headers = {(info.kind, info.tracks) for info in infos[:start]}
    assert headers == {("video", (0,)), ("video", (1,)), ("audio", (0,))}
    assert (infos[start].message_class, infos[start].tracks) == (MessageClass.KEY, (0,))
    for track in TRACKS:
        mine = [info for info in infos[start:] if info.kind == "video" and info.tracks == (track,)]
        assert mine[0].message_class is MessageClass.KEY
    pictures = watched.result(PATIENCE_S)
    assert set(pictures) == {180, 270}
    assert min(pictures.values()) > 10


def encode(programs, server):
    """Have one FFmpeg publish 25 pictures a second in two sizes, with a key frame each second."""
    source = ("-re", "-f", "lavfi", "-i", "testsrc2=size=480x270:rate=25", "-f", "lavfi", "-i", "sine=440")
    outputs: list[object] = []
    for suffix, rate in zip(SUFFIXES, ("600k", "200k"), strict=True):
        size = ("-vf", f"scale=-2:{suffix[1:]}", "-b:v", rate, "-maxrate", rate, "-bufsize", rate)
        outputs += ["-map", "0:v", "-map", "1:a", *size, *ENCODER, "-c:a", "aac", "-t", str(SECONDS)]
        outputs += ["-f", "flv", address_of(server, "live/show" + suffix)]
    return programs.start(*source, *outputs)


def decode(url):
    """Return the height of each picture in turn, and the gaps between sounds in seconds; an error raises."""
    heights, sounds = [], []
    with av.open(url, timeout=(PATIENCE_S, PATIENCE_S)) as container:
        for packet in container.demux():
            if not packet.size:
                continue
            if packet.stream.type == "audio":
                sounds.append(float(packet.pts * packet.time_base))
            else:
                packet.stream.codec_context.options = {"err_detect": "explode"}
                heights += [frame.height for frame in packet.decode()]
    return heights, [round(after - before, 3) for before, after in pairwise(sounds)]


def test_player_of_a_set_goes_on_in_the_larger_rendition_without_an_error_or_a_gap(background, live, programs):
    server = live(renditions=RenditionNames(suffixes=SUFFIXES))
    published = encode(programs, server)
    wait_for_keys(server, 2, "live/show")
    played = background.submit(decode, address_of(server, "live/show"))
    (viewer,) = wait_until(lambda: [item for item in server.connections() if item.place is not None], "the viewer")
    wait_until(lambda: viewer.place.rendition == "270", "the change to the larger one", SECONDS)
    time.sleep(2)  # of pictures in it
    published.process.send_signal(signal.SIGINT)  # FFmpeg ends both outputs in order, in one instant
    published.wait()
    heights, gaps = played.result(PATIENCE_S)
    assert (heights[0], heights[-1], {*heights}) == (180, 270, {180, 270})
    assert heights.count(270) > 25
    assert max(gaps) < 0.05
