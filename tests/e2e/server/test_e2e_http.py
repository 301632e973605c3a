"""FFmpeg publishes over RTMP; FFmpeg and PyAV play over HTTP: every packet comes out as it went in."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest
from e2e_kit import NAME, PATIENCE_S, frames_of, wait_for_keys, wait_for_viewers, wait_until
from e2e_programs import watch
from loopback_kit import FAMILY, LOOPBACK, loopback

from flowctl.flv import TAG_VIDEO, FlvReader
from flowctl.live.httpd.serving import listen_http
from flowctl.live.server import LiveServer
from flowctl.wire.media.synthetic import SyntheticSource

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
        addresses.append(listen_http(server, LOOPBACK, 0))
        return server

    server = live(make=make)
    return server, f"http://{loopback(addresses[0][1])}/{NAME}.flv"


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


def test_slow_player_over_http_when_the_publisher_goes_gets_all_of_it_and_the_end(web, clients):
    server, url = web
    with socket.socket(FAMILY) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE_S)
        sock.connect((LOOPBACK, urlsplit(url).port))
        sock.sendall(f"GET /{NAME}.flv HTTP/1.0\r\n\r\n".encode())
        wait_for_viewers(server, 1)
        publisher = clients.publish(server, SyntheticSource(video_bit_rate=20_000_000, fps=50))
        wait_until(lambda: len(publisher.messages) > 25, "more than a socket holds")
        clients.group.call_soon(publisher.publisher.finish, "enough")
        wait_until(lambda: not server.hub.is_published(NAME), "its end")
        came = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")[2]
    got = frames_of([tuple(tag) for tag in FlvReader().feed(came)], TAG_VIDEO)
    assert [payload for _, payload in got] == [payload for _, payload in frames_of(publisher.messages, TAG_VIDEO)]
    assert len(got) > 8
