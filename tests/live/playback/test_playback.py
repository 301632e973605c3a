"""Recordings over HTTP: listed, given whole and by time, to those who may play their stream and nobody else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from connection_kit import WAIT_S
from http_kit import FREE, Client, wait_for
from loopback_kit import loopback
from playback_kit import BEGAN_S, FIRST, Recorder, frames, is_key, packets_of
from remux_kit import source, tags_of

from flowctl.core.loop.sockets import SocketOptions
from flowctl.flv import FlvReader
from flowctl.live.access.request import Refusal
from flowctl.live.config import LiveConfig
from flowctl.live.hooks import LiveHooks
from flowctl.live.playback import serving
from flowctl.live.remux.container import Mp4Form
from flowctl.live.settings.media import MediaOptions, StreamPatterns
from flowctl_servers.live import SERVER


def listed(web, query="", stream="live/room"):
    status, headers, body = web.get(f"/recordings/{stream}{query}")
    assert (status, headers["content-type"]) == (200, "application/json")
    return json.loads(body)


def read(data):
    reader = FlvReader(check_back_pointers=True)
    tags = reader.feed(data)
    reader.finish()
    return tags


def part(web, query):
    """Return the tags of a part by time, and the headers of its answer."""
    client = web.client()
    client.send(f"GET /recordings/live/room.flv?{query} HTTP/1.1\r\nHost: example.test\r\n\r\n")
    status, headers, body = client.answer()
    assert status == 200, body
    return read(body), headers


def test_list_when_asked_for_has_time_length_and_size_of_each_file(playback, folder):
    made = Recorder(folder, max_s=10).all(25)
    Recorder(folder, make_form=Mp4Form, began_s=BEGAN_S + 60).all(3)
    found = listed(playback())
    assert (found["stream"], found["next"]) == ("live/room", None)
    rows = found["recordings"]
    assert [row["start"] for row in rows][1:] == [f"2025-11-30T10:00:{second}.000Z" for second in (20, 10, "00")]
    assert [row["format"] for row in rows] == ["mp4", "flv", "flv", "flv"]
    assert rows[-1]["address"] == f"/recordings/live/room/{FIRST}"
    assert not any(row["being_written"] for row in rows)
    for row in rows:
        path = made.folder / row["file"]
        assert row["bytes"] == path.stat().st_size
        if row["format"] == "flv":
            assert row["duration_s"] == max(tag.timestamp for tag in tags_of(path)) / 1000
    assert rows[0]["duration_s"] == pytest.approx(3.0, abs=0.03)


def test_file_when_fetched_is_as_it_is_in_ranges_too(playback, folder):
    data = (Recorder(folder).all(3).folder / FIRST).read_bytes()
    web = playback()
    status, headers, body = web.get(f"/recordings/live/room/{FIRST}")
    assert (status, headers["content-type"], body) == (200, "video/x-flv", data)
    assert headers["cache-control"] == "max-age=3600"
    status, headers, body = web.get(f"/recordings/live/room/{FIRST}", "Range: bytes=1000-1999\r\n")
    assert (status, headers["content-range"], body) == (206, f"bytes 1000-1999/{len(data)}", data[1000:2000])
    status, headers, body = web.get(f"/recordings/live/room/{FIRST}", method="HEAD")
    assert (status, int(headers["content-length"])) == (200, len(data))


def test_part_by_time_when_fetched_begins_with_a_key_frame_and_goes_over_ends_of_files(playback, folder):
    made = Recorder(folder, max_s=5).all(12)
    files = [frames(tags_of(path)) for path in sorted(made.folder.iterdir())]
    every = [tag.payload for tags in files for tag in tags]
    tags, headers = part(playback(), "from=2025-11-30T10:00:03.500Z&to=2025-11-30T11:00:11%2B01:00")
    found = frames(tags)
    assert is_key(found[0])
    assert (found[0].timestamp, headers["recording-start"]) == (0, "2025-11-30T10:00:03.000Z")
    assert headers["recording-end"].startswith("2025-11-30T10:00:1")
    at = every.index(found[0].payload)
    assert [tag.payload for tag in found] == every[at : at + len(found)]
    assert len(every) - at - len(found) == len([tag for tag in files[-1] if tag.timestamp >= 1000])


def test_part_of_mp4_when_fetched_is_played_from_its_beginning(playback, folder):
    made = Recorder(folder, make_form=Mp4Form).all(8)
    (path,) = made.folder.iterdir()
    web = playback()
    (row,) = listed(web)["recordings"]
    status, headers, body = web.get(f"/recordings/live/room.mp4?from={row['start'][:17]}04Z", "Range: bytes=5-9\r\n")
    assert (status, headers["content-type"], headers["accept-ranges"]) == (200, "video/mp4", "none")
    found, every = packets_of(body), packets_of(path.read_bytes())
    assert 0 < len(found) < len(every)
    assert found[0][1] == 0
    assert [packet[2] for packet in found if packet[0] == "video"] == [
        packet[2] for packet in every if packet[0] == "video"
    ][-sum(packet[0] == "video" for packet in found) :]
    assert web.get(f"/recordings/live/room.flv?from={row['start']}")[0] == 404


def test_recording_when_it_is_being_written_is_played_up_to_its_last_message(playback, folder):
    made = Recorder(folder)
    made.feed(source(4))
    written = made.folder / f"{FIRST}.part"
    with written.open("ab") as file:
        file.write(b"\x09\x00\x10\x00")  # the beginning of another message
    web = playback()
    (row,) = listed(web)["recordings"]
    assert row["being_written"]
    assert row["duration_s"] == pytest.approx(4.0, abs=0.1)
    status, headers, body = web.get(row["address"])
    assert (status, headers["cache-control"]) == (200, "no-cache")
    assert len(body) == written.stat().st_size - 4
    assert frames(read(body))[-1] == frames(source(4))[-1]
    assert frames(part(web, "from=2025-11-30T10:00:02Z")[0])[-1].payload == frames(source(4))[-1].payload


def test_list_when_it_is_long_goes_on_behind_the_last_one(playback, folder):
    Recorder(folder, max_s=1).all(6)
    web = playback()
    found, query = [], "?limit=2&from=2025-11-30T10:00:01.5Z"
    more = ""
    while more is not None:
        said = listed(web, f"{query}&before={more}" if more else query)
        assert 1 <= len(said["recordings"]) <= 2
        found += [row["start"][17:19] for row in said["recordings"]]
        more = said["next"]
    assert found == ["05", "04", "03", "02", "01"]
    assert [row["start"][17:19] for row in listed(web, "?to=2025-11-30T10:00:02Z")["recordings"]] == ["01", "00"]
    assert listed(web, "?from=2026-01-01")["recordings"] == []


@pytest.mark.parametrize(
    "path",
    [
        *("live/room?from=yesterday", "live/room?to=1e999", "live/room?limit=0", "live/room?limit=1001"),
        *("live/room?limit=%D9%A1", "live/room?before=x.flv", f"live/room?{'a=1&' * 99}", "live/room.flv"),
        *("live/room.flv?from=2026-01-01&to=2025-01-01", "live/room?from=9999-12-31", "live/room?from=0001-01-01"),
    ],
)
def test_question_when_it_makes_no_sense_is_refused(playback, folder, path):
    assert playback().get(f"/recordings/{path}")[0] == 400


@pytest.mark.parametrize(
    "path",
    [
        *("live/none", "live/../live/room", "live/%2e%2e/%2e%2e/outside", "live/room%00", "live/room/extra"),
        *("live/linked", "..%2Flive/room"),
    ],
)
def test_names_when_they_lead_elsewhere_find_nothing(playback, folder, path):
    made = Recorder(folder).all(1)
    (folder / "live" / "linked").symlink_to(made.folder)
    web = playback()
    for target in (f"{path}/{FIRST}", f"{path}.flv?from=2025-11-30T10:00:00Z", path):
        status, _, body = web.get(f"/recordings/{target}")
        assert status in {400, 404} or json.loads(body)["recordings"] == []


@pytest.mark.parametrize("name", ["a b", "ä", "x%y", "a&b=c#d"])
def test_names_when_they_are_odd_are_found_by_the_address_that_a_list_tells(playback, folder, name):
    made = Recorder(folder, stream=name).all(1)
    web = playback()
    (row,) = listed(web, stream=quote(f"live/{name}"))["recordings"]
    (path,) = (folder / "live").rglob("*.flv")
    assert web.get(row["address"])[2] == path.read_bytes()
    assert made.recorder.statistics().files == 1


def test_names_when_they_are_long_and_differ_in_their_middle_have_recordings_of_their_own(playback, folder):
    ours, theirs = ("国" * 11 + letter + "国" * 12 for letter in "一二")
    Recorder(folder, stream=theirs).all(1)
    web = playback()
    assert listed(web, stream=quote(f"live/{ours}"))["recordings"] == []
    (row,) = listed(web, stream=quote(f"live/{theirs}"))["recordings"]
    assert web.get(row["address"])[0] == 200


class Asked(LiveHooks):
    """Lets those play who say the word, and writes down who was asked about."""

    def __init__(self) -> None:
        self.questions = []

    def may_play(self, request):
        self.questions.append(request.stream)
        return None if request.url.query.get("pass") == "yes" else Refusal("no")


def test_recordings_when_access_is_limited_are_for_those_who_may_play(playback, folder):
    Recorder(folder).all(2)
    hooks = Asked()
    web = playback(hooks=hooks)
    paths = ["/recordings/live/room?", f"/recordings/live/room/{FIRST}?", "/recordings/live/room.flv?from=2025-11-30&"]
    assert {web.get(f"{path}pass=no")[0] for path in paths} == {403}
    assert len(hooks.questions) == 3
    assert [web.get(f"{path}pass=yes")[0] for path in (*paths, "/recordings/live/room?from=2025-01-01&")] == [200] * 4
    assert hooks.questions == ["live/room"] * 4  # what is fetched with one proof is one play


def test_recordings_when_settings_do_not_give_them_are_not_there(playback, folder):
    Recorder(folder).all(1)
    (folder / "live").rename(folder / "other")
    web = playback(players_may_wait=False)
    for path in ("other/room", f"other/room/{FIRST}", "other/room.flv?from=2025-11-30"):
        assert web.get(f"/recordings/{path}")[0] == 404


def test_recordings_when_settings_change_are_given_or_not_at_once(folder):
    Recorder(folder).all(1)
    off = MediaOptions(record_folder=folder)
    config = LiveConfig(port=0, http=loopback(), control="off", media_here=False, admission=FREE, media=off)
    server = SERVER.build(config)
    server.start()
    try:
        (address,) = [item.address for item in server.listeners if item.name == "http"]
        for media, status in ((off, 404), (dataclasses.replace(off, record_play=StreamPatterns(("live/*",))), 200)) * 2:
            server.hub.configure(dataclasses.replace(config, media=media))
            with contextlib.closing(Client(address)) as client:
                assert client.get("/recordings/live/room")[0] == status
    finally:
        assert server.stop(2.0)


def test_streams_of_an_application_of_that_name_are_played_as_before(playback, folder):
    web = playback()
    publisher = web.publisher("recordings/room")
    publisher.group()
    client = web.client()
    assert client.get("/recordings/room.flv")[0] == 200
    assert len(client.tags(3)[1]) >= 3


def test_recordings_when_many_are_fetched_are_for_some_at_a_time(playback, folder, monkeypatch):
    monkeypatch.setattr(serving, "MOST_OPEN", 8)
    Recorder(folder).all(20, video_bit_rate=2_000_000)
    web = playback(socket_options=SocketOptions(send_buffer_bytes=4096))
    clients = [web.client() for _ in range(2)]
    for client, path in zip(clients, (f"room/{FIRST}", "room.flv?from=2025-11-30T10:00:01Z"), strict=True):
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.send(f"GET /recordings/live/{path} HTTP/1.1\r\nHost: h\r\n\r\n")
    wait_for(lambda: [item.sender.blocked for item in web.server.connections()] == [True, True])
    loads = [item.sender.statistics().load.size_bytes for item in web.server.connections()]
    assert max(loads) < 160 * 1024  # who does not read holds a part, not a file
    status, headers, _ = web.get(f"/recordings/live/room/{FIRST}")
    assert (status, headers["retry-after"]) == (503, "5")
    assert len(listed(web)["recordings"]) == 1
    clients[0].close()
    wait_for(lambda: web.get(f"/recordings/live/room/{FIRST}")[0] == 200)
    clients[1].close()
    wait_for(lambda: not opened(FIRST))


def opened(name):
    found = []
    for item in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(item.readlink())
    return [path for path in found if path.name == name]


def test_file_when_its_client_goes_before_anything_is_read_is_closed(playback, folder, monkeypatch):
    Recorder(folder).all(1)
    asked, really = [], serving._Worker.do

    def look_alone(worker, *job):
        asked.append(worker)
        if worker is asked[0]:
            really(worker, *job)

    monkeypatch.setattr(serving._Worker, "do", look_alone)
    playback().client().send(f"GET /recordings/live/room/{FIRST} HTTP/1.1\r\nHost: h\r\n\r\n")
    wait_for(lambda: len(asked) == 2)
    wait_for(lambda: not opened(FIRST))


def test_part_when_a_file_is_removed_while_it_is_sent_ends_the_connection(playback, folder):
    made = Recorder(folder, max_s=2).all(9, video_bit_rate=4_000_000)
    web = playback(socket_options=SocketOptions(send_buffer_bytes=65536))
    client = web.client()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.send("GET /recordings/live/room.flv?from=2025-11-30 HTTP/1.1\r\nHost: h\r\n\r\n")
    wait_for(lambda: any(item.sender.blocked for item in web.server.connections()))
    for path in sorted(made.folder.iterdir())[1:]:
        path.unlink()
    head, _, body = client.to_end().partition(b"\r\n\r\n")
    size = int(re.search(rb"Content-Length: (\d+)", head)[1])
    assert (made.folder / FIRST).stat().st_size <= len(body) < size


@pytest.mark.parametrize("path", [FIRST, ".flv?from=2025-11-30"])
def test_recordings_when_many_ask_at_the_same_time_are_for_some_alone(playback, folder, monkeypatch, path):
    """All have asked before the first of them is given anything."""
    monkeypatch.setattr(serving, "MOST_OPEN", 8)
    Recorder(folder).all(20, video_bit_rate=2_000_000)
    go_on, really = threading.Event(), serving._answered
    monkeypatch.setattr(serving, "_answered", lambda *given: (go_on.wait(WAIT_S), really(*given)))
    web = playback(socket_options=SocketOptions(send_buffer_bytes=4096))
    clients = [web.client() for _ in range(6)]
    for client in clients:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.send(f"GET /recordings/live/room{'/' * path.endswith('Z.flv')}{path} HTTP/1.1\r\nHost: h\r\n\r\n")
    wait_for(lambda: len(web.server.connections()) == 6)
    go_on.set()
    for client in clients:
        client.read()
    assert sorted(client.rest[9:12] for client in clients) == [b"200"] * 2 + [b"503"] * 4


class Conn:
    """A connection of an address, which has gone or not."""

    def __init__(self, address, *, gone=False) -> None:
        self.peer, self.ended = (address, 1), ("gone", "") if gone else None
        self.connection = self

    def call_soon(self, callback):
        callback()


def test_worker_when_one_address_asks_much_gives_others_their_turn():
    worker, began, go_on, done = serving._Worker(), threading.Event(), threading.Event(), []
    worker.do(Conn("192.0.2.1"), lambda: (began.set(), go_on.wait(WAIT_S)), bool)
    assert began.wait(WAIT_S)
    for _ in range(20):
        worker.do(Conn("192.0.2.1"), lambda: 1, done.append)
        worker.do(Conn("192.0.2.3", gone=True), lambda: 3, done.append)
    worker.do(Conn("192.0.2.2"), lambda: 2, done.append)
    go_on.set()
    wait_for(lambda: len(done) == 21)
    assert 2 in done[:2]
    assert 3 not in done


def test_worker_when_there_was_no_room_for_its_thread_works_later(monkeypatch):
    worker, done = serving._Worker(), threading.Event()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no thread")))
        with pytest.raises(RuntimeError):
            worker.do(Conn("192.0.2.1"), bool, bool)
    worker.do(Conn("192.0.2.1"), bool, lambda _: done.set())
    assert done.wait(WAIT_S)


def test_room_when_many_threads_ask_for_it_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "MOST_OPEN", 10_000)
    recordings, exchange = serving.Recordings(tmp_path, bool), Conn("192.0.2.1")
    recordings._looks.do = lambda _, look, then: then(look())

    def ask() -> None:
        bodies = []
        for _ in range(40):
            for _ in range(50):
                bodies.append(serving.FileBody(exchange, iter(()), 0))
                recordings._fetch(exchange, bool, lambda _: bodies[-1])
            bodies.clear()

    every_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor() as threads:
            for done in [threads.submit(ask) for _ in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(every_s)
    assert not recordings._bodies
