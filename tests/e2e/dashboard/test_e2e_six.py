"""Each protocol once over ::1; ``make ipv6`` runs the other tests of HTTP there too."""

from __future__ import annotations

import re
from types import SimpleNamespace
from urllib.parse import urljoin

import httpx
import pytest
from cli_kit import served
from dashboard_kit import Browser, why_not
from e2e_kit import NAME, Clients, wait_until
from e2e_programs import Programs, watch
from websockets.sync.client import connect

from flowctl.demo.processes import ServerProcesses
from flowctl.flv import TAG_AUDIO, TAG_VIDEO, FlvReader
from flowctl.live.access.keys import hash_key, make_key
from flowctl.wire.media.synthetic import SyntheticSource

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def shown(six, tmp_path_factory, sample, ffmpeg_path):
    """Return where a server that runs on ::1 is reached, while FFmpeg publishes a stream to it."""
    folder = tmp_path_factory.mktemp("six")
    listen = f"[{six}]:0"
    config = folder / "flowctl.toml"
    config.write_text(f'hls = "live/*"\nhls_folder = "hls"\nhttp = "{listen}"\nadmin = "{listen}"\n')
    with (
        served("live", "--host", six, "--control", "off", "--config", str(config)) as server,
        Programs(ffmpeg_path, folder) as programs,
    ):
        rtmp = f"{server.ready['url']}{NAME}"
        assert rtmp.startswith("rtmp://[::1]:")
        source = ("-re", "-stream_loop", -1, "-i", sample("plain"))
        programs.start(*source, "-c", "copy", "-f", "flv", "-flvflags", "no_duration_filesize", rtmp)
        with httpx.Client(timeout=PATIENCE_S) as http:
            (admin,) = [item for item in server.ready["control"] if item.startswith("http")]
            base = f"http://{server.ready['http'][0]}/{NAME}"
            wait_until(lambda: http.get(f"{base}.m3u8").status_code == 200, "a playlist", PATIENCE_S)
            yield SimpleNamespace(rtmp=rtmp, base=base, admin=admin, http=http, programs=programs, server=server)


@pytest.mark.parametrize("protocol", ["rtmp", "flv", "hls"])
def test_ffmpeg_when_it_plays_over_ipv6_has_pictures_and_sound(shown, tmp_path, protocol):
    url = {"rtmp": shown.rtmp, "flv": f"{shown.base}.flv", "hls": f"{shown.base}.m3u8"}[protocol]
    target = tmp_path / "played.mkv"
    played = shown.programs.start("-i", url, "-t", 1, "-c", "copy", "-y", target)
    assert played.wait() == 0, played.log
    found = watch(target)
    assert found.of("video")
    assert found.of("audio")


def test_low_latency_playlist_over_ipv6_waits_for_a_part_and_names_what_can_be_fetched(shown):
    url = f"{shown.base}.m3u8"
    first = shown.http.get(url).text
    number = int(re.search(r"#EXT-X-MEDIA-SEQUENCE:(\d+)", first)[1]) + first.count("#EXTINF")
    later = shown.http.get(url, params={"_HLS_msn": number + 1, "_HLS_part": 0})
    assert later.status_code == 200
    parts = re.findall(r'#EXT-X-PART:.*?URI="([^"]+)"', later.text)
    assert len(set(parts) - set(re.findall(r'URI="([^"]+)"', first))) > 0
    assert shown.http.get(urljoin(url, parts[-1])).content[4:8] in {b"styp", b"moof"}


def test_websocket_over_ipv6_carries_flv(shown):
    host = shown.base.removeprefix("http://").partition("/")[0]
    url = f"ws://{host}/{NAME}.flv"
    with connect(url, origin=f"http://{host}", open_timeout=PATIENCE_S, max_queue=None) as player:
        reader, tags = FlvReader(), []
        while len(tags) < 10:
            tags += reader.feed(player.recv(PATIENCE_S))
    assert {tag.type_id for tag in tags} >= {TAG_AUDIO, TAG_VIDEO}


def test_admin_surface_over_ipv6_answers_its_own_page_and_names_peers(shown):
    assert re.fullmatch(r"http://\[::1\]:\d+/", shown.admin)
    own = {"origin": shown.admin.removesuffix("/")}
    ask = f"{shown.admin}api/v1/streams"
    (stream,) = shown.http.get(ask, headers=own).json()["streams"]
    assert stream["publisher"].startswith("[::1]:")
    assert shown.http.get(ask, headers={"origin": "http://[::2]"}).status_code == 403
    assert "flowctl_" in shown.http.get(f"{shown.admin}metrics").text


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")
def test_dashboard_over_ipv6_shows_streams_and_says_where_pictures_can_be_seen(shown, tmp_path):
    """Its policy cannot name an address of IPv6 (CSP): by a name of the machine the picture is there."""
    browser = Browser(tmp_path)
    try:
        browser.open(shown.admin)
        browser.click("#streams button")
        browser.wait(lambda: "open it by a name" in browser.text("#picture-note"), "why there is no picture")
        assert browser.faults() == []
        browser.open(f"{shown.admin.replace('[::1]', 'localhost')}#watch={NAME}")
        browser.wait(lambda: browser.run("return document.querySelector('video').currentTime") > 0, "a picture")
        assert browser.faults() == []
    finally:
        browser.close()


def test_viewers_over_ipv6_when_there_is_an_edge_are_sent_to_its_address(six, programs, tmp_path):
    common, key = ("--host", six, "--http", f"[{six}]:0"), make_key()
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"{hash_key(key)} edge\n")
    with ServerProcesses(tmp_path) as nodes, Clients() as clients:
        sends = ("--origin", f"[{six}]:0", "--redirect", "http", "--keys-file", str(keys))
        origin = nodes.start("origin", "serve", "live", *sends, *common)
        place = f"{origin.ready['origin']}/{origin.port}?key={key}"
        edge = nodes.start("edge", "edge", place, "--public", six, *common)
        clients.publish(SimpleNamespace(address=(six, origin.port)), SyntheticSource())
        url, there = (f"http://{node.ready['http'][0]}/{NAME}.flv" for node in (origin, edge))
        sent = wait_until(lambda: httpx.head(url).headers.get("location"), "the edge known", PATIENCE_S)
        assert sent == there
        played = programs.start("-i", url, "-t", 1, "-c", "copy", "-f", "null", "-")
        assert played.wait() == 0, played.log
