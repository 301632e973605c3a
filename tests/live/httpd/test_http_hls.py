"""HLS over HTTP: the files of a folder that HLS has, whole or in part, to those who may play, and nothing else."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from hook_kit import HookServer
from http_kit import wait_for
from loopback_kit import NETWORK, loopback

from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.server.admission import AdmissionLimits
from flowctl.errors import FlowctlError
from flowctl.flv import FlvReader
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile, signed_query
from flowctl.live.hooks import LiveHooks
from flowctl.live.judging.penalties import Allowance, PenaltyLimits
from flowctl.live.remux.hls import HlsSettings, HlsWriter
from flowctl.live.remux.intake import MessageTaken, PublicationEnded
from flowctl.live.remux.serving import HlsFiles, hls_handlers
from kit.sample import SampleRecipe, ensure_sample, find_ffmpeg

SECRET = b"a secret of thirty-two or more bytes, for tests"
PLAYLIST = '#EXTM3U\n#EXT-X-MAP:URI="room-7-init.mp4"\n#EXTINF:4.000,\nroom-7.m4s\n'
SEGMENT = bytes(range(256)) * 4096  # four parts


@pytest.fixture
def folder(tmp_path):
    """A folder of HLS with one stream, and things around it that nobody may have."""
    hls = tmp_path / "hls"
    (hls / "live").mkdir(parents=True)
    (hls / "live" / "room.m3u8").write_text(PLAYLIST)
    (hls / "live" / "room-7.m4s").write_bytes(SEGMENT)
    (hls / "live" / "room-8.ts").write_bytes(b"ts")
    (hls / "live" / "room-7-init.mp4").write_bytes(b"init")
    (hls / "live" / "secret.txt").write_text("secret")
    (hls / "live" / "room-9.ts.part").write_text("secret")
    (hls / "live" / "room.mp4").write_text("secret")
    (tmp_path / "out-1.ts").write_text("secret")
    (hls / "live" / "link-1.ts").symlink_to(tmp_path / "out-1.ts")
    (hls / "linked").symlink_to(tmp_path)
    (hls / "live" / "dir-1.ts").mkdir()
    os.mkfifo(hls / "live" / "pipe-1.ts")
    return hls


@pytest.fixture
def hls(web, folder):
    return web(handlers=hls_handlers(folder))


SET = (
    '#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=9,CODECS="avc1.42c01e",RESOLUTION=16x9\nroom%252b720.m3u8\n'
    "#EXT-X-STREAM-INF:BANDWIDTH=8\nroom%252b360.m3u8\n"
)


def test_playlist_of_a_set_has_the_query_at_each_address_and_waits_for_nothing(hls, folder):
    (folder / "live" / "room.m3u8").write_text(SET)
    _, _, asked = hls.get("/live/room.m3u8?token=a&_HLS_msn=7&_HLS_part=1")
    assert asked.decode() == SET.replace(".m3u8", ".m3u8?token=a")


def test_variants_are_files_of_the_stream_whose_set_it_is(hls, folder):
    files = HlsFiles(folder)
    for name in ("room%2b720.m3u8", "room%2b720-7.m4s", "room%2b720-7.12.m4s", "room%2b720-7-init.mp4"):
        assert files.stream_of(f"/live/{name}") == "live/room"
        (folder / "live" / name).write_text("#EXTM3U\n")
        assert hls.get(f"/live/{name.replace('%', '%25')}")[0] == 200
    assert files.stream_of("/live/a%20b%2bc%5Fd.m3u8") == "live/a b"
    for name in ("%2b720.m3u8", "ro/om%2b720.m3u8", "room%2b7 20.m3u8", "room%252b720.m3u8"):
        assert files.stream_of(f"/live/{name}") in {None, "live/ro/om"}
    # A stream may be called like that, and is another one.
    assert files.stream_of("/live/room+720.m3u8") == "live/room+720"
    assert hls.get("/live/room%2b720.m3u8")[0] == 404


def test_files_of_hls_when_asked_for_are_given_with_type_and_age(hls):
    status, headers, body = hls.get("/live/room.m3u8")
    assert (status, body.decode()) == (200, PLAYLIST)
    assert headers["content-type"] == "application/vnd.apple.mpegurl"
    assert headers["cache-control"] == "no-cache"
    assert headers["access-control-allow-origin"] == "*"
    assert hls.get("/live/room.m3u8", f"If-None-Match: {headers['etag']}\r\n")[0] == 304
    status, headers, body = hls.get("/live/room-7.m4s")
    assert (status, body) == (200, SEGMENT)
    assert headers["content-type"] == "video/iso.segment"
    assert headers["cache-control"] == "max-age=3600"
    for condition in (f"If-None-Match: {headers['etag']}", f"If-Modified-Since: {headers['last-modified']}"):
        assert hls.get("/live/room-7.m4s", f"{condition}\r\n")[0] == 304
    assert hls.get("/live/room-8.ts")[1]["content-type"] == "video/mp2t"
    assert hls.get("/live/room-7-init.mp4")[2] == b"init"
    assert hls.get("/live/room-7.m4s", method="HEAD")[1]["content-length"] == str(len(SEGMENT))


def test_connection_when_several_files_are_fetched_stays_open(hls):
    client = hls.client()
    for _ in range(3):
        assert client.get("/live/room.m3u8")[2].decode() == PLAYLIST
        assert client.get("/live/room-7.m4s")[2] == SEGMENT
        assert client.get("/live/room-404.m4s")[0] == 404


@pytest.mark.parametrize(
    ("path", "headers"),
    [("room-7.m4s", "Range: bytes=0-261000\r\n"), ("room-7.m4s", ""), ("many.m3u8?q=" + "a" * 7000, "")],
)
def test_files_when_pipelined_and_not_read_wait_in_parts(web, folder, path, headers):
    (folder / "live" / "many.m3u8").write_text("#EXTM3U\n" + PLAYLIST.partition("\n")[2] * 100)
    hls = web(handlers=hls_handlers(folder), socket_options=SocketOptions(send_buffer_bytes=4096))
    client = hls.client()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.send(f"GET /live/{path} HTTP/1.1\r\nHost: h\r\n{headers}\r\n" * 15)
    (connection,) = wait_for(hls.server.connections)
    wait_for(lambda: connection.sender.blocked)
    time.sleep(0.2)  # for more of it
    assert connection.sender.statistics().load.size_bytes < 160 * 1024
    client.close()


@pytest.mark.parametrize(
    ("asked", "begin", "end"),
    [
        ("0-9", 0, 10),
        ("1000000-", 1_000_000, 1 << 20),
        ("-5", (1 << 20) - 5, 1 << 20),
        ("5-99999999", 5, 1 << 20),
        ("0-", 0, 1 << 20),
    ],
)
def test_part_of_a_segment_when_asked_for_is_that_part(hls, asked, begin, end):
    status, headers, body = hls.get("/live/room-7.m4s", f"Range: bytes={asked}\r\n")
    assert (status, body) == (206, SEGMENT[begin:end])
    assert headers["content-range"] == f"bytes {begin}-{end - 1}/{len(SEGMENT)}"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Range: bytes=1048576-\r\n", 416),
        ("Range: bytes=-0\r\n", 416),
        ("Range: bytes=9-1\r\n", 200),
        ("Range: bytes=0-1,5-6\r\n", 200),
        ("Range: pages=1-2\r\n", 200),
        ('Range: bytes=0-1\r\nIf-Range: "another"\r\n', 200),
    ],
)
def test_part_of_a_segment_when_it_is_none_is_all_or_refused(hls, headers, status):
    found, answer, body = hls.get("/live/room-7.m4s", headers)
    assert found == status
    assert (len(body) == len(SEGMENT)) == (status == 200)
    assert status == 200 or answer["content-range"] == f"bytes */{len(SEGMENT)}"


@pytest.mark.parametrize(
    "path",
    [
        "/live/secret.txt",
        "/live/room-9.ts.part",
        "/live/room.mp4",
        "/live/room.ts",
        "/live/link-1.ts",
        "/linked/out-1.ts",
        "/live/dir-1.ts",
        "/live/pipe-1.ts",
        "/../out-1.ts",
        "/live/../../out-1.ts",
        "/live/%2e%2e/%2e%2e/out-1.ts",
        "/live%2f..%2f..%2fout-1.ts",
        "/live/..%2f..%2fout-1.ts",
        "/%2e%2e/out-1.ts",
        "/live/room-7.m4s%00.ts",
        "//etc/x-1.ts",
        "/room-7.ts",
        "/live/" + "a" * 2000 + "-1.ts",
        "/live/.m3u8",
    ],
)
def test_anything_else_when_asked_for_is_not_there(hls, path):
    status, _, body = hls.get(path)
    assert status in {400, 404}
    assert b"secret" not in body


def test_streams_when_names_are_odd_are_found_as_they_were_written(tmp_path):
    """The names that a writer makes of a stream lead back to it, so that it is the stream that is asked about."""
    files = HlsFiles(tmp_path)
    assert files.stream_of("/live/inst/a b.m3u8") == "live/inst/a b"
    assert files.stream_of("/live/inst/a%20b-17.ts") == "live/inst/a b"
    assert files.stream_of("/live/room-2-3-init.mp4") == "live/room-2"
    assert files.stream_of("/live/room-2-3.ts") == "live/room-2"
    assert files.stream_of("/live/mp4:talk.mp4.m3u8") == "live/talk"
    assert files.stream_of("/live/mp4%3Atalk-2.ts") is None  # a file of no stream that can be asked about


@pytest.mark.parametrize("spelled", ["mp4:room", "room.flv", "_definst_/room"])
def test_playlist_when_its_stream_is_spelled_otherwise_is_the_streams(hls, spelled):
    assert hls.get(f"/live/{spelled}.m3u8")[::2] == hls.get("/live/room.m3u8")[::2]
    assert hls.get("/live/_definst_/room-7.m4s")[0] == 200


def test_access_when_it_is_limited_holds_for_every_file(web, folder):
    web = web(handlers=hls_handlers(folder), hooks=Refusing())
    for name in ("room.m3u8", "room-7.m4s", "room-7-init.mp4", "room-8.ts"):
        assert web.get(f"/live/{name}")[0] in {401, 403}
        assert web.get(f"/live/{name}?pass=yes")[0] == 200
    text = web.get("/live/room.m3u8?pass=yes&x=%22")[2].decode()
    assert text == PLAYLIST.replace("init.mp4", "init.mp4?pass=yes&x=%22").replace("7.m4s", "7.m4s?pass=yes&x=%22")


class Refusing(LiveHooks):
    """Lets those play who say the word."""

    def may_play(self, request):
        return None if request.stream == "live/room" and request.url.query.get("pass") == "yes" else "no"


def test_ffmpeg_when_it_plays_over_http_decodes_every_picture(web, tmp_path):
    """FFmpeg fetches playlist and segments that a writer made, and decodes every picture of the recording."""
    try:
        path = ensure_sample(
            tmp_path, SampleRecipe(seconds=3.0, gop_s=0.5, width=160, height=96, b_frames=2, profile="main")
        )
    except FlowctlError as error:
        pytest.skip(str(error))
    writer = HlsWriter("live", "a b", HlsSettings(folder=tmp_path / "hls", listed=6, segment_s=1.0))
    writer.work([MessageTaken(*tag) for tag in FlvReader().feed(path.read_bytes())])
    writer.work([PublicationEnded("over")])
    writer.start()
    assert writer.stop(20.0)  # which ends the playlist
    found = web(handlers=hls_handlers(tmp_path / "hls"))
    url = f"http://{loopback(found.address[1])}/live/a%20b.m3u8"
    assert pictures_by_ffmpeg(url) == pictures_by_ffmpeg(path)


def pictures_by_ffmpeg(source):
    """Return the checksum of each picture that FFmpeg decodes."""
    command = [str(find_ffmpeg()), "-v", "error", "-i", str(source), "-map", "0:v", "-fps_mode", "passthrough"]
    done = subprocess.run([*command, "-f", "framemd5", "-"], capture_output=True, text=True, check=True, timeout=20)
    assert done.stderr == ""
    return [line.split(",")[-1].strip() for line in done.stdout.splitlines() if not line.startswith("#")]


def test_descriptors_when_clients_go_in_the_middle_are_closed(hls):
    for _ in range(5):
        client = hls.client()
        client.send("GET /live/room-7.m4s HTTP/1.1\r\nHost: x\r\n\r\n")
        client.sock.recv(100)
        client.close()
    wait_for(lambda: not hls.server.connections())
    wait_for(lambda: not opened("room-7.m4s"))
    assert hls.get("/live/room-7.m4s")[2] == SEGMENT


def opened(name):
    found = []
    for item in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(item.readlink())
    return [path for path in found if path.name == name]


def test_viewers_of_hls_who_connect_for_each_file_are_not_punished(web, folder):
    few = PenaltyLimits(connections=Allowance(1, 1000))
    fast = AdmissionLimits(new_per_address_and_s=10_000.0, burst_per_address=1, connections_per_address=0)
    made = web(handlers=hls_handlers(folder), penalties=few, admission=fast)

    def fetch(path):
        for _ in range(51):  # so many bursts may come to nothing, and one more
            client = made.client()
            if path:
                client.get(path, "Connection: close\r\n")
            else:
                client.send(b"\x03no HTTP\r\n\r\n")
            client.to_end()
        wait_for(lambda: not made.server.connections())
        made.server.reload.run_job(lambda: None)
        return [ban.cidr for ban in made.server.admission.bans.bans]

    assert fetch("/live/room-8.ts") == []
    client = made.client()
    assert client.get("/live/room.m3u8")[0] == 200
    assert [item.session.behaves() for item in made.server.connections()] == [True]
    client.close()
    assert fetch("/live/none.m3u8") == []
    assert fetch(None) == [NETWORK]


def test_proxy_when_it_connects_for_each_file_is_refused_none(web, folder):
    """A plain proxy of many viewers is one address: what it is given takes nothing of the rate of its address."""
    few = AdmissionLimits(new_per_address_and_s=0.001, burst_per_address=1)
    made = web(handlers=hls_handlers(folder), admission=few)
    for _ in range(40):
        client = made.client()
        assert client.get("/live/room-8.ts", "Connection: close\r\n")[0] == 200
        client.to_end()
        wait_for(lambda: not made.server.connections())
    assert made.server.admission.refused == {}


def test_variants_when_a_token_is_for_the_stream_are_given_and_for_nobody_without_one(web, folder):
    access = StreamAccess(play_auth=(Proof.TOKEN,), token_secrets=SecretFile("secrets", (SECRET,)))
    found = web(handlers=hls_handlers(folder), access=access)
    query = signed_query(SECRET, "play", "live/room", int(time.time()) + 60)
    others = signed_query(SECRET, "play", "live/room_720", int(time.time()) + 60)
    for name in ("room%2b720.m3u8", "room%2b720-7.m4s"):
        (folder / "live" / name).write_text("#EXTM3U\n")
        asked = f"/live/{name.replace('%', '%25')}"
        assert found.get(f"{asked}?{query}")[0] == 200
        assert found.get(f"{asked}?{others}")[0] in {401, 403}
        assert found.get(asked)[0] in {401, 403}


def test_hls_when_a_token_expires_goes_on_for_who_was_let_in(web, folder):
    hook = HookServer()
    now = time.time()
    access = StreamAccess(
        play_auth=(Proof.TOKEN,),
        token_secrets=SecretFile("secrets", (SECRET,)),
        on_play=(hook.url("/play"),),
        on_end=(hook.url("/stop"),),
    )
    found = web(handlers=hls_handlers(folder), access=access)
    found.server.hub.gate._now = lambda: now
    query = signed_query(SECRET, "play", "live/room", int(now) + 60)
    sizes = [len(found.get(f"/live/room.m3u8?{query}")[2])]
    now += 3600
    for name in ("room-7-init.mp4", "room-7.m4s", "room.m3u8", "room-8.ts"):
        status, _, body = found.get(f"/live/{name}?{query}")
        assert status == 200
        sizes.append(len(body))
    assert found.get(f"/live/room.m3u8?{query}", "User-Agent: another\r\n")[0] == 401
    assert hook.actions() == ["on_play"]
    found.server.stop(5.0)
    assert hook.actions() == ["on_play", "on_stop", "on_close"]
    asked, told, closed = hook.bodies
    assert {**asked, "action": ""} == {**told, "action": "", "pageUrl": ""}
    assert closed["client_id"] == told["client_id"]
    assert sum(sizes) < closed["send_bytes"] < sum(sizes) + 5 * 1024  # with the heads of five answers
    hook.close()
