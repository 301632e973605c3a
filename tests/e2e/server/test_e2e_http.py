"""FFmpeg publishes over RTMP; FFmpeg and PyAV play over HTTP: every packet comes out as it went in."""

from __future__ import annotations

import pytest
from e2e_kit import NAME, wait_for_keys, wait_for_viewers
from e2e_programs import watch

from flowctl.live.httpd.serving import listen_http
from flowctl.live.server import LiveServer

CASES = {
    "h264_aac": ("plain", ()),
    "hevc": ("hevc", ()),
    "audio_only": ("plain", ("-vn",)),
    "video_only": ("plain", ("-an",)),
}


@pytest.fixture
def web(live):
    addresses = []

    def make(*arguments, **options):
        server = LiveServer(*arguments, **options)
        addresses.append(listen_http(server, "127.0.0.1", 0))
        return server

    server = live(make=make)
    return server, f"http://127.0.0.1:{addresses[0][1]}/{NAME}.flv"


@pytest.mark.parametrize("case", CASES)
def test_players_over_http_when_they_waited_for_it_get_what_ffmpeg_published(
    case, background, web, programs, sample, tmp_path
):
    name, options = CASES[case]
    (server, url), source = web, sample(name)
    target = tmp_path / "recorded.flv"
    recorded = programs.start("-i", url, "-c", "copy", "-copyts", "-f", "flv", "-y", target)
    watched = background.submit(watch, url)
    wait_for_viewers(server, 2)
    published = programs.publish(server, source, *options, rate=4.0)
    assert (published.wait(), published.log) == (0, "")
    assert recorded.wait() == 0
    missing = {"-vn": "video", "-an": "audio"}.get(options[0] if options else "")
    sent, received, copied = watch(source), watched.result(20), watch(target)
    for kind in ("video", "audio"):
        expected = [] if kind == missing else sent.of(kind)
        assert expected == received.of(kind) == copied.of(kind)


def test_late_player_over_http_decodes_from_its_first_packet(background, web, programs, sample):
    (server, url), source = web, sample("plain")
    published = programs.publish(server, source, rate=2.0)
    wait_for_keys(server, 3)
    watched = background.submit(watch, url)
    assert published.wait() == 0
    sent, received = watch(source), watched.result(20)
    count = len(received.of("video"))
    assert 0 < count < len(sent.of("video"))
    assert received.of("video") == sent.of("video")[-count:]
