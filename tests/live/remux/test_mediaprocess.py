"""The process that writes what settings say, with a test in the server's place: what it begins, and what waits."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from e2e_kit import wait_until

from flowctl.live.cluster.media.keeper import MediaKeeper, _Want
from flowctl.live.cluster.media.order import MediaProcessConfig, StreamOrder
from flowctl.live.cluster.media.watch import MediaWatch
from flowctl.live.cluster.workers import restarts
from flowctl.live.cluster.workers.restarts import WorkerPulse
from flowctl.live.config import LiveConfig
from flowctl.live.remux.files import lock_file
from flowctl.live.remux.mediaprocess import MediaProcess, WrittenStream
from flowctl.live.settings.media import MediaOptions, StreamPatterns
from flowctl.testing import ManualClock

HLS = {"hls": True, "hls_segment_s": 2.0, "hls_part_s": 0.5}


def config_of(folder, conn):
    return MediaProcessConfig(
        socket_fd=conn.detach(),
        options=MediaOptions(record_folder=folder / "recordings"),
        hls_folder=folder / "hls",
        hls_streams=StreamPatterns(("live/*",)),
        memory_bytes=1 << 30,
        log={},
    )


def said(name, **order):
    return {"stream": f"live/{name}", "path": "/nowhere", "order": order or None}


class Server:
    """The server's end of the socket of a process that runs on a thread."""

    def __init__(self, folder):
        self.conn, theirs = socket.socketpair()
        self.lines = self.conn.makefile("rb")
        self.thread = threading.Thread(target=MediaProcess(config_of(folder, theirs), time.monotonic).run)
        self.thread.start()

    def say(self, stream, **order):
        self._send(said(stream.removeprefix("live/"), **order))

    def figures(self):
        self._send({"ask": "figures"})
        return json.loads(self.lines.readline())

    def rows(self):
        rows = self.figures()["streams"]
        return [(row["stream"], row["kind"]) for row in rows if row["state"] != "not written"]

    def _send(self, said):
        self.conn.sendall(json.dumps(said).encode() + b"\n")

    def end(self):
        self.conn.shutdown(socket.SHUT_WR)
        self.thread.join(20)
        self.lines.close()
        self.conn.close()
        return not self.thread.is_alive()


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("av")
    server = Server(tmp_path)
    yield server
    assert server.end()


def test_process_when_another_one_still_writes_the_hls_of_a_stream_begins_when_it_has_ended(server, tmp_path):
    number = lock_file(tmp_path / "hls" / "live" / ".room.lock")
    server.say("live/room", record_format="flv", **HLS)
    assert server.rows() == [("live/room", "record")]
    os.close(number)
    wait_until(lambda: server.rows() == [("live/room", "record"), ("live/room", "hls")], "both are written")


def test_process_when_an_order_changes_leaves_what_is_as_it_was(server):
    server.say("live/a", record_format="flv", **HLS)
    server.say("live/b", record_format="mp4")
    assert server.rows() == [("live/a", "record"), ("live/a", "hls"), ("live/b", "record")]
    server.say("live/a", **HLS)  # its recording ends
    server.say("live/b", record_format="flv")  # another file
    assert ("live/a", "record") not in server.rows()
    wait_until(lambda: sorted(server.rows()) == [("live/a", "hls"), ("live/b", "record")], "the rest goes on")
    server.say("live/a")  # has gone: its publisher may be back
    assert ("live/a", "hls") in server.rows()


def test_process_when_names_are_published_one_after_the_other_writes_what_is_published_now(server, monkeypatch):
    monkeypatch.setattr("flowctl.live.remux.mediaprocess.MOST_WRITTEN", 3)
    for number in range(10):
        server.say(f"live/{number}", record_format="flv")
        server.say(f"live/{number}")  # gone at once; it may be back, and its file is kept open for a while
    server.say("live/show", record_format="flv")
    assert ("live/show", "record") in server.rows()
    assert len(server.rows()) <= 3
    for number in range(3):
        server.say(f"live/other{number}", record_format="flv")  # two of them have room
    assert {("live/show", "record"), ("live/other0", "record"), ("live/other1", "record")} == set(server.rows())


def test_process_when_addresses_have_all_places_gives_one_to_an_address_that_has_none(server, monkeypatch):
    monkeypatch.setattr("flowctl.live.remux.mediaprocess.MOST_WRITTEN", 6)
    for number in range(8):
        server.say(f"live/{number}", record_format="flv", address=f"2001:db8:{number % 2}::{number}")
    assert len(server.rows()) == 6
    server.say("live/show", record_format="flv", address="192.0.2.1")
    wait_until(lambda: ("live/show", "record") in server.rows(), "it has a place")
    unwritten = server.figures()["unwritten"]
    (gave_way,) = unwritten.keys() - {"live/6", "live/7"}
    assert gave_way in {"live/4", "live/5"}  # the newest of one of those who have most
    assert all("address" in why["record"] for why in unwritten.values())
    for number in range(4):
        server.say(f"live/{number}")
    wait_until(lambda: server.figures()["unwritten"] == {}, "there is room for all")


def test_process_when_a_publisher_moves_to_another_address_has_its_place_there(server, monkeypatch):
    monkeypatch.setattr("flowctl.live.remux.mediaprocess.MOST_WRITTEN", 2)
    server.say("live/a", record_format="flv", address="192.0.2.1")
    server.say("live/b", record_format="flv", address="192.0.2.2")
    server.say("live/b", record_format="flv", address="192.0.2.1")
    server.say("live/c", record_format="flv", address="192.0.2.3")
    wait_until(lambda: ("live/c", "record") in server.rows(), "it has a place")
    assert server.figures()["unwritten"].keys() == {"live/b"}


SET = {"renditions": {"720": "720:1", "360": "360:1"}}


def variants(server):
    return sorted(row["rendition"] for row in server.figures()["streams"] if row["state"] != "not written")


def test_process_when_a_stream_is_a_set_writes_its_renditions_and_keeps_one_that_goes_for_a_while(server):
    server.say("live/show", record_format="flv", **HLS, **SET)
    assert sorted(server.rows()) == [("live/show", "hls")] * 2 + [("live/show", "record")]
    assert variants(server) == ["", "360", "720"]
    server.say("live/show", record_format="flv", **HLS, renditions={"720": "720:1"})
    assert variants(server) == ["", "360", "720"]  # its publisher may be back
    server.say("live/show", record_format="flv", **HLS, renditions={"720": "720:1", "360": "360:2"})
    assert variants(server) == ["", "360", "720"]


def test_process_when_a_stream_becomes_a_set_and_is_none_again_has_one_meaning_for_its_playlist_at_a_time(
    server, tmp_path
):
    server.say("live/show", **HLS)
    assert variants(server) == [""]
    server.say("live/show", **HLS, **SET)
    wait_until(lambda: variants(server) == ["360", "720"], "a set")
    server.say("live/show", **HLS)
    wait_until(lambda: variants(server) == [""], "a stream")
    assert server.figures()["unwritten"] == {}
    assert not list((tmp_path / "hls" / "live").glob("*.m3u8"))  # of nothing that came


def test_process_when_a_stream_moves_to_the_next_server_leaves_it_to_that_one_soon(server, tmp_path):
    server.say("live/room", record_format="flv", **HLS)
    wait_until(lambda: len(server.rows()) == 2, "both are written")
    server.say("live/room", moves=True)
    wait_until(lambda: not server.rows(), "neither is")

    def claimed():
        try:
            return lock_file(tmp_path / "hls" / "live" / ".room.lock")
        except BlockingIOError:
            return None

    os.close(wait_until(claimed, "the next server can write it", 5.0))  # long before it would be given up
    assert server.rows() == []


def test_keeper_when_words_of_two_workers_come_in_another_order_follows_the_later_publication():
    keeper, order = MediaKeeper(LiveConfig()), StreamOrder(record_format="flv")
    told = []
    keeper.start = lambda: None
    keeper.want("live/a", "second", order, 2.0)
    keeper.want("live/a", "first", order, 1.0)
    keeper.want("live/a", "first", None, 1.5)
    keeper.want("live/a", "second", None, 3.0)
    while not keeper._news.empty():
        told += [(want.path, want.order) for want in keeper._take(keeper._news.get())]
    assert told == [("second", order), ("second", None)]


def test_keeper_when_a_stream_is_not_written_tells_it_until_it_is():
    told = []
    keeper = MediaKeeper(LiveConfig(), lambda *said: told.append(said))
    keeper._take(_Want("live/a", "here", StreamOrder(record_format="flv")))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for unwritten in ({"live/a": {"record": "full"}, "live/gone": {"hls": "full"}}, {}, {}):
            said = {"streams": [], "totals": {}, "unwritten": unwritten}
            theirs.sendall(json.dumps(said).encode() + b"\n")
        theirs.shutdown(socket.SHUT_WR)
        keeper._listen(ours, WorkerPulse(0.0), threading.Event())
    assert told == [("live/a", "here", {"record": "full"}), ("live/a", "here", {})]


def test_watch_when_the_publisher_may_be_back_keeps_the_address_whose_place_it_has():
    publisher, told = SimpleNamespace(peer=("192.0.2.1", 7)), []
    stream = SimpleNamespace(ended=False, publisher=publisher)
    options = MediaOptions(record=StreamPatterns(("live/*",)))
    hub = SimpleNamespace(find_stream=lambda _: stream, config=LiveConfig(media=options), leaving=False, published=())
    group = SimpleNamespace(call_soon=lambda look, name: look(name))
    server = SimpleNamespace(hub=hub, groups=SimpleNamespace(groups=[group]))
    MediaWatch(server, lambda _, order: told.append(order.address), copies=True)
    for stream.publisher in (publisher, None, publisher, SimpleNamespace(peer=("follows x", 0))):
        hub.published[0]("live/a")
    assert told == ["192.0.2.1", ""]


def test_watch_when_a_stream_is_a_set_tells_of_the_renditions_that_can_be_watched():
    stream, told = SimpleNamespace(ended=False, publisher=SimpleNamespace(peer=("192.0.2.1", 7))), []
    facts = [SimpleNamespace(name=name, key=f"{name}:1", joined=False) for name in ("720", "360")]
    found = SimpleNamespace(ladder=False, sound_alone=False, renditions=lambda: facts)
    options = MediaOptions(hls=StreamPatterns(("live/*",)))
    hub = SimpleNamespace(
        find_stream=lambda _: stream,
        config=LiveConfig(media=options),
        leaving=False,
        published=(),
        renditions=SimpleNamespace(find=lambda _: found),
    )
    server = SimpleNamespace(
        hub=hub, groups=SimpleNamespace(groups=[SimpleNamespace(call_soon=lambda look, *of: look(*of))])
    )
    MediaWatch(server, lambda _, order: told.append((order.hls, order.renditions)), copies=True)
    hub.published[0]("live/show")  # there is no picture yet
    for fact in facts:
        fact.joined = True
        hub.published[0]("live/show")
    found.sound_alone = True
    hub.published[0]("live/show")
    found.sound_alone, found.ladder = False, True
    hub.published[0]("live/show")
    assert told == [(True, {"720": "720:1"}), (True, {"720": "720:1", "360": "360:1"}), (True, {})]


def test_watch_when_a_stream_was_at_another_worker_between_two_looks_tells_of_it_again():
    """The other one has said in between that it has it, and then that it has gone."""
    one, two = (SimpleNamespace(peer=("192.0.2.1", port)) for port in (1, 2))
    stream, told = SimpleNamespace(ended=False, publisher=one), []
    options = MediaOptions(record=StreamPatterns(("live/*",)))
    hub = SimpleNamespace(find_stream=lambda _: stream, config=LiveConfig(media=options), leaving=False, published=())
    group = SimpleNamespace(call_soon=lambda look, name: look(name))
    server = SimpleNamespace(hub=hub, groups=SimpleNamespace(groups=[group]))
    MediaWatch(server, lambda _, order: told.append(order is not None), copies=False)
    for publisher in (one, one, None, two, two, None):
        stream.publisher = publisher
        hub.published[0]("live/a")
    assert told == [True, True]
    stream.ended = True
    hub.published[0]("live/a")
    assert told == [True, True, False]


def test_totals_when_the_disk_is_slow_to_finish_a_stream_never_go_back(server, monkeypatch):
    """They are counters: one that goes back counts as begun anew, and what it has counted twice."""
    row, finish, finishes = WrittenStream.row, WrittenStream.finish, threading.Event()
    monkeypatch.setattr(WrittenStream, "row", lambda stream: row(stream) | {"written_bytes": 1000})
    monkeypatch.setattr(WrittenStream, "finish", lambda stream, s: (finishes.wait(20), finish(stream, s)))
    for name in ("live/a", "live/b"):
        server.say(name, record_format="flv")
    assert server.figures()["totals"]["record"]["written_bytes"] == 2000
    server.say("live/a", hls=False)
    assert server.rows() == [("live/b", "record")]
    assert server.figures()["totals"]["record"]["written_bytes"] == 2000
    finishes.set()
    time.sleep(0.1)
    assert server.figures()["totals"]["record"]["written_bytes"] == 2000


def test_keeper_when_its_process_hangs_kills_it_and_tells_the_next_one_all_again(tmp_path, monkeypatch):
    monkeypatch.setattr("flowctl.live.cluster.media.keeper.ASKED_EVERY_S", 0.1)
    monkeypatch.setattr(restarts, "ASKED_EVERY_S", 0.1)
    keeper = MediaKeeper(LiveConfig(media=MediaOptions(record_folder=tmp_path / "recordings")))
    keeper.want("live/room", "/nowhere", StreamOrder(record_format="flv"))
    try:
        wait_until(lambda: keeper.figures()["streams"], "it writes")
        first = keeper.figures()["pid"]
        monkeypatch.setattr(restarts, "HUNG_S", 0.5)
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: keeper.figures()["starts"] == 2, "another one")
        monkeypatch.setattr(restarts, "HUNG_S", 30.0)
        wait_until(lambda: keeper.figures()["streams"], "it writes the same")
        assert keeper.figures()["streams"][0]["stream"] == "live/room"
        assert keeper.figures()["pid"] != first
        keeper.gone("/nowhere")  # what served the stream has ended
        keeper.want("live/room", "/elsewhere", StreamOrder(record_format="flv"))
        keeper.want("live/room", "/nowhere", None)  # said too late
        wait_until(keeper._news.empty, "all of that is taken")
        assert keeper._wanted["live/room"].path == "/elsewhere"
    finally:
        keeper.stop()
    assert keeper.figures()["state"] == "ended"


def test_process_when_streams_of_an_address_take_its_time_ends_them_tells_why_and_goes_on_with_them(
    tmp_path, monkeypatch
):
    """What threads take is what the test says, on a clock that it turns; all else is the process itself."""
    ours, theirs = socket.socketpair()
    clock, spent = ManualClock(), {}
    monkeypatch.setattr(WrittenStream, "charged_s", property(lambda stream: spent.get(stream.key[0], 0.0)))
    monkeypatch.setattr("flowctl.live.remux.mediaprocess._MOST_SHARE", 0.5)
    process = MediaProcess(config_of(tmp_path, theirs), clock)
    process._group.start()

    def turn(seconds, **shares):
        for _ in range(seconds):
            clock.advance(1.0)
            for name, share in shares.items():
                spent[f"live/{name}"] = spent.get(f"live/{name}", 0.0) + share
            process._look()

    def unwritten():
        return process._figures()["unwritten"]

    try:
        for name, address in (("a", "192.0.2.1"), ("b", "192.0.2.1"), ("show", "203.0.113.1")):
            process._take(said(name, record_format="flv", address=address))
        turn(20, a=0.3, b=0.4, show=0.05)
        assert unwritten().keys() == {"live/b"}
        assert "of it those of its address" in unwritten()["live/b"]["record"]
        process._take(said("c", record_format="flv", address="192.0.2.1"))  # of the same address
        turn(20, a=0.3, show=0.05)
        assert unwritten().keys() == {"live/b", "live/c"}
        process._take(said("a"))  # it has gone
        wait_until(lambda: turn(5) or not unwritten(), "both are written")
    finally:
        for key in list(process._written):
            process._end(key)
        process._group.stop(20)
        for thread, _ in process._finishing.values():
            thread.join(20)
        process._conn.close()
        ours.close()
