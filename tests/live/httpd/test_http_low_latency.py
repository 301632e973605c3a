"""Low latency over HTTP: requests for what is not there yet wait for it, for a while, and for nothing else."""

from __future__ import annotations

import threading
import time

import pytest
from hls_kit import Validator
from http_kit import Web, wait_for

from flowctl.live.hooks import LiveHooks
from flowctl.live.remux import waiting
from flowctl.live.remux.hls import HlsSettings, HlsWriter
from flowctl.live.remux.intake import MessageTaken
from flowctl.live.remux.playlist import HlsPart, HlsSegment, Playlist
from flowctl.live.remux.serving import hls_handlers
from flowctl.live.remux.waiting import parse_playlist
from flowctl.wire.media.synthetic import SyntheticSource


class Growing:
    """A stream in a folder that grows by hand: segments of two parts, numbers from 100."""

    def __init__(self, folder):
        self.folder = folder / "live"
        self.folder.mkdir(parents=True)
        self.playlist = Playlist(100, 3, 1.0, 0.5)
        self.made = 0
        self.parts = ()
        self.playlist.next_part = self.name(0)
        for _ in range(3):
            self.add()

    @staticmethod
    def name(count):
        return f"room-100.{count}.m4s"

    def add(self):
        """Write one more part, and the segment with the second of each."""
        name = self.name(self.made)
        (self.folder / name).write_bytes(name.encode())
        self.parts = (*self.parts, HlsPart(name, 0.5, not self.parts))
        self.made += 1
        self.playlist.next_part = self.name(self.made)
        segment = HlsSegment(f"room-{self.playlist.next_number}.m4s", len(self.parts) * 0.5, "room-100-init.mp4")
        segment = HlsSegment(segment.name, segment.duration_s, segment.init, parts=self.parts)
        if len(self.parts) == 2:
            self.playlist.add(segment)
            self.parts = ()
        else:
            self.playlist.show(segment)
        self.write()

    def write(self):
        path = self.folder / "room.m3u8"
        part = path.with_suffix(".part")
        part.write_text(self.playlist.text())
        part.replace(path)


@pytest.fixture
def growing(tmp_path):
    return Growing(tmp_path / "hls")


@pytest.fixture
def hls(growing):
    made = Web(None, handlers=hls_handlers(growing.folder.parent))
    yield made
    made.stop()


class Asking:
    """A client that waits for its answer on a thread."""

    def __init__(self, web, path, headers=""):
        self.found = None
        self._client = web.client()
        self._thread = threading.Thread(target=self._ask, args=(path, headers), daemon=True)
        self._thread.start()

    def _ask(self, path, headers):
        self.found = self._client.get(path, headers)

    @property
    def answered(self):
        return self.found is not None

    def answer(self):
        self._thread.join(20.0)
        assert self.found is not None
        self._client.close()
        return self.found


def test_playlist_when_it_is_served_says_that_requests_may_wait(hls, growing):
    """A server of files cannot have requests wait, so what is in the folder does not say so."""
    assert "CAN-BLOCK-RELOAD" not in (growing.folder / "room.m3u8").read_text()
    text = hls.get("/live/room.m3u8")[2].decode()
    assert "#EXT-X-SERVER-CONTROL:CAN-BLOCK-RELOAD=YES,PART-HOLD-BACK=1.500\n" in text
    assert text.endswith('#EXT-X-PRELOAD-HINT:TYPE=PART,URI="room-100.3.m4s"\n')


def test_addresses_in_a_playlist_when_the_request_has_a_query_get_it_without_directives(hls):
    text = hls.get("/live/room.m3u8?token=x&_HLS_msn=101&_HLS_part=0&y=%22")[2].decode()
    plain = hls.get("/live/room.m3u8")[2].decode()
    uris = [line for line in text.splitlines() if not line.startswith("#")] + [
        line.split('URI="')[1].split('"')[0] for line in text.splitlines() if "URI=" in line
    ]
    assert len(uris) == 6
    assert all(uri.endswith("?token=x&y=%22") for uri in uris)
    assert text.replace("?token=x&y=%22", "") == plain


def test_request_for_what_is_there_when_it_comes_is_answered_at_once(hls):
    plain = hls.get("/live/room.m3u8")[2]
    for query in ("_HLS_msn=100", "_HLS_msn=101&_HLS_part=0", "_HLS_msn=100&_HLS_part=1", "_HLS_msn=7&_HLS_part=1"):
        status, headers, body = hls.get(f"/live/room.m3u8?{query}")
        assert (status, body, headers["cache-control"]) == (200, plain, "max-age=1")
        assert hls.get(f"/live/room.m3u8?{query}", f"If-None-Match: {headers['etag']}\r\n")[0] == 304


@pytest.mark.parametrize(
    ("query", "parts"),
    [
        ("_HLS_msn=101&_HLS_part=1", 1),
        ("_HLS_msn=101", 1),
        ("_HLS_msn=101&_HLS_part=2", 2),  # there will be no third one, so it is the first of the next segment
        ("_HLS_msn=102&_HLS_part=0", 2),
        ("_HLS_msn=102", 3),
    ],
)
def test_request_for_a_playlist_when_it_is_not_there_yet_waits(hls, growing, query, parts):
    asking = Asking(hls, f"/live/room.m3u8?{query}")
    for _ in range(parts):
        time.sleep(0.1)
        assert not asking.answered
        growing.add()
    status, _, body = asking.answer()
    assert status == 200
    assert body.decode().endswith(f'URI="{growing.name(growing.made)}"\n')


def test_request_for_the_next_part_when_it_is_not_there_yet_waits(hls, growing):
    asking = Asking(hls, "/live/room-100.3.m4s")
    time.sleep(0.1)
    assert not asking.answered
    growing.add()
    status, headers, body = asking.answer()
    assert (status, body, headers["content-type"]) == (200, b"room-100.3.m4s", "video/iso.segment")
    assert hls.get("/live/room-100.5.m4s")[0] == 404  # it is not the next one


def test_request_for_what_will_not_come_soon_is_refused_at_once(hls):
    for query in (
        *("_HLS_part=1", "_HLS_msn=103", "_HLS_msn=9999999999999999999", "_HLS_msn=-1", "_HLS_msn=x", "_HLS_msn="),
        *("_HLS_msn=101&_HLS_part=x", "_HLS_msn=101&_HLS_part=7", "_HLS_msn=102&_HLS_part=99", "_HLS_msn=%31"),
        f"_HLS_msn={'9' * 5000}",
    ):
        assert hls.get(f"/live/room.m3u8?{query}")[0] == 400


@pytest.mark.parametrize("name", ["room-100.4.m4s", "room.m3u8?_HLS_msn=103", "no-such.m3u8"])
def test_error_when_something_is_asked_for_too_early_is_kept_by_no_cache(hls, name):
    """One client that asks for the part after the next would have it missing for all behind the same cache."""
    status, headers, _ = hls.get(f"/live/{name}")
    assert (status >= 400, headers["cache-control"]) == (True, "no-store")


def test_requests_when_the_stream_ends_are_answered_with_its_end(hls, growing):
    playlist = Asking(hls, "/live/room.m3u8?_HLS_msn=101&_HLS_part=1")
    part = Asking(hls, "/live/room-100.3.m4s")
    time.sleep(0.1)
    growing.playlist.ended = True
    growing.write()
    status, _, body = playlist.answer()
    assert (status, body.decode().endswith("#EXT-X-ENDLIST\n")) == (200, True)
    assert part.answer()[0] == 404
    assert hls.get("/live/room.m3u8?_HLS_msn=105")[0] == 200


def test_requests_when_nothing_comes_end_with_an_error(hls, growing, monkeypatch):
    monkeypatch.setattr(waiting, "AWAY_S", 0.1)
    monkeypatch.setattr(waiting, "_WAIT_TARGETS", 0.1)
    assert hls.get("/live/room.m3u8?_HLS_msn=101&_HLS_part=1")[0] == 503
    assert hls.get("/live/room-100.3.m4s")[0] == 404
    growing.add()
    assert hls.get("/live/room.m3u8?_HLS_msn=101&_HLS_part=1")[0] == 200


def test_requests_when_the_playlist_goes_or_is_none_are_answered(hls, growing):
    path, none = growing.folder / "room.m3u8", growing.folder / "none"
    none.write_bytes(b'#EXT-X-PRELOAD-HINT:TYPE=PART,URI="\xff"')
    for change in (path.unlink, lambda: none.replace(path)):  # whole: one that is half written may say anything
        asking = Asking(hls, "/live/room.m3u8?_HLS_msn=101&_HLS_part=1")
        time.sleep(0.1)
        assert not asking.answered
        change()
        assert asking.answer()[0] == 503
        assert hls.get("/live/room.m3u8")[0] == 404
        growing.write()
        time.sleep(0.1)


def test_playlist_without_parts_when_asked_for_ahead_is_answered_at_once(hls, growing):
    """It does not say that requests may wait, so what is asked for has no meaning."""
    playlist = Playlist(100, 3, 1.0)
    playlist.add(HlsSegment("plain-100.ts", 1.0))
    (growing.folder / "plain.m3u8").write_text(playlist.text())
    status, _, body = hls.get("/live/plain.m3u8?_HLS_msn=101")
    assert (status, body.decode()) == (200, playlist.text())


def test_requests_when_many_wait_cost_one_look_and_one_reading(hls, growing, monkeypatch):
    """A playlist is read once for each change, however many wait for it; where nothing waits, nothing is looked at."""
    read = []
    monkeypatch.setattr(waiting, "parse_playlist", lambda text: read.append(text) or parse_playlist(text))
    clients = [hls.client() for _ in range(40)]
    for client in clients:
        client.send("GET /live/room.m3u8?_HLS_msn=101&_HLS_part=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    wait_for(lambda: sum(connection.session._exchange is not None for connection in hls.server.connections()) == 40)
    time.sleep(0.1)
    growing.add()
    bodies = {client.answer()[2] for client in clients}
    assert len(bodies) == 1
    assert len(read) == 2
    for client in clients:
        client.close()
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "flowctl-hls"])


def test_hooks_when_a_player_waits_for_each_part_are_asked_once(web, growing):
    hooks = Counting()
    made = web(handlers=hls_handlers(growing.folder.parent), hooks=hooks)
    client = made.client()
    for number in range(3):
        client.get(f"/live/room.m3u8?pass=yes&_HLS_msn=100&_HLS_part={number % 2}", "User-Agent: a\r\n")
    assert [request.url.raw_query for request in hooks.asked] == ["pass=yes"]


def test_player_when_it_asks_ahead_gets_each_part_once_and_in_order(web, tmp_path):
    """A writer in another thread, and a player that asks for the next part, and then for the next list, each time."""
    settings = HlsSettings(folder=tmp_path / "hls", listed=3, segment_s=1.0, part_s=0.2)
    at_s = [0.0]  # media come faster than they are shown, so the time of day goes with them
    writer = HlsWriter("live", "room", settings, wall=lambda: 1000.0 + at_s[0])
    client = web(handlers=hls_handlers(tmp_path / "hls")).client()
    over = threading.Event()

    def publish():
        for tag in SyntheticSource(video_bit_rate=100_000, fps=25, key_interval_s=1.0):
            if over.wait(0.002):
                return
            at_s[0] = tag.timestamp / 1000
            writer.work([MessageTaken(tag.type_id, tag.timestamp, tag.payload)])

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        wait_for(writer.playlist_path.exists)
        validator = Validator(lambda name: client.get(f"/live/{name}")[2])
        listing = validator.check(client.get("/live/room.m3u8")[2].decode())
        parts = []
        while len(parts) < 20:
            parts.append(client.get(f"/live/{listing.hint}")[2])
            opened = listing.segments[-1]
            number, part = (opened.number + 1, 0) if opened.name else (opened.number, len(opened.parts))
            status, _, body = client.get(f"/live/room.m3u8?_HLS_msn={number}&_HLS_part={part}")
            assert status == 200
            listing = validator.check(body.decode())
    finally:
        over.set()
        thread.join(20)
    assert validator.faults == []
    assert validator.looked_at >= 20
    assert len(set(parts)) == 20
    assert all(part[4:8] == b"moof" for part in parts)


class Counting(LiveHooks):
    """Lets all play, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def may_play(self, request):
        self.asked.append(request)


def test_client_when_it_goes_while_it_waits_leaves_nothing(hls):
    client = hls.client()
    client.send("GET /live/room.m3u8?_HLS_msn=101&_HLS_part=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    wait_for(lambda: [item for item in hls.server.connections() if item.session._exchange is not None])
    time.sleep(0.1)
    for connection in hls.server.connections():
        connection.close()
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "flowctl-hls"])
    client.close()
