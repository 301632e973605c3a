"""Several video tracks (Enhanced RTMP v2), published by FFmpeg: who joins late can decode all of them at once."""

from __future__ import annotations

import av
import pytest
from e2e_kit import PATIENCE_S, address_of, wait_for_end, wait_for_keys

from flowctl.core.flow.state import MessageClass
from flowctl.flv import TAG_AUDIO, TAG_VIDEO, FlvReader
from flowctl.wire.rtmp.media.media import inspect

TRACKS = (0, 1)
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


def test_late_viewer_of_two_tracks_has_both_from_the_first_key_frame_on(
    background, two_tracks, live, clients, programs
):
    server = live()
    timed = tuple(part for at in (0, 2) for part in ("-readrate", 2.0, *two_tracks[at : at + 2]))
    published = programs.start(*timed, *OUTPUT, address_of(server))
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
