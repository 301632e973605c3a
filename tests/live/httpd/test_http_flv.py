"""Streams over HTTP and WebSocket as FLV, on real sockets: what players are sent, when, and how it ends."""

from __future__ import annotations

import socket

import pytest
from http_kit import HOST, KEY, UPGRADE, Socket, wait_for
from live_kit import AAC_HEADER, AVC_HEADER, audio, inter, key, perform
from loopback_kit import LOOPBACK
from wsproto.events import AcceptConnection, CloseConnection, Ping, Pong

from flowctl import flv
from flowctl.core.loop.sockets import SocketOptions
from flowctl.flv import FlvReader
from flowctl.live.httpd.exchange import HttpLimits
from flowctl.live.httpd.formats import CHUNKS, FRAMES, TAGS
from flowctl.live.httpd.session import HttpSession
from flowctl.live.remux.serving import hls_handlers
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_DATA_AMF3, TYPE_VIDEO
from flowctl.wire.streams.wirelog import RtmpChunks


def test_stream_when_it_is_published_begins_with_headers_and_the_cached_key_frame(web):
    web = web()
    publisher = web.publisher()
    publisher.group(b"one")
    client = web.client()
    status, headers, _ = client.get()
    header, tags = client.tags(6)
    assert (status, headers["content-type"], headers["connection"]) == (200, "video/x-flv", "close")
    assert (header.audio, header.video) == (True, True)
    assert [tag.type_id for tag in tags] == [18, 9, 8, 9, 8, 9]
    assert [tag.payload for tag in tags[1:]] == [AVC_HEADER, AAC_HEADER, key(b"one"), audio(b"one"), inter(b"one")]


def test_stream_when_the_publisher_ends_ends_the_response_behind_the_last_tag(web):
    web = web()
    publisher = web.publisher()
    publisher.group(b"one")
    client = web.client()
    client.get()
    wait_for(web.viewers)
    publisher.group(b"two")
    publisher.end()
    reader = FlvReader(check_back_pointers=True)
    body, ended = client.body_to_end()
    assert ended
    tags = reader.feed(body)
    reader.finish()
    assert tags[-1].payload == inter(b"two")
    assert wait_for(web.ended)[-1].details == "the publisher has gone"


def test_stream_when_asked_for_by_http_1_0_comes_without_chunks(web):
    web = web()
    publisher = web.publisher()
    publisher.group(b"one")
    client = web.client()
    client.send("GET /live/room.flv HTTP/1.0\r\n\r\n")
    assert client.answer()[1].get("transfer-encoding") is None
    assert client.tags(4)[1][3].payload == key(b"one")
    publisher.end()
    client.to_end()
    assert wait_for(web.ended)[-1].details == "the publisher has gone"


def test_player_when_nobody_publishes_waits_and_is_served_when_somebody_does(web):
    """As players of RTMP; nothing is sent before, so that it may still be 404."""
    web = web()
    client = web.client()
    client.send(f"GET /live/room.flv HTTP/1.1\r\n{HOST}\r\n")
    wait_for(web.viewers)
    web.publisher().group(b"one")
    assert client.answer()[0] == 200
    assert client.tags(4)[1][3].payload == key(b"one")


def test_player_when_nobody_publishes_in_time_gets_404_and_may_ask_again(web):
    web = web(limits=HttpLimits(wait_s=0.05))
    client = web.client()
    status, _, body = client.get()
    assert (status, body) == (404, b"Nobody publishes this stream.\n")
    assert client.get("/other.txt")[0] == 404
    assert web.viewers() == []


def test_player_when_players_may_not_wait_gets_404_at_once(web):
    assert web(players_may_wait=False).get()[0] == 404


def test_head_when_of_a_stream_says_what_get_would(web):
    web = web()
    client = web.client()
    assert client.get(method="HEAD")[0] == 404
    web.publisher()
    status, headers, _ = client.get(method="HEAD")
    assert (status, headers["content-type"], web.viewers()) == (200, "video/x-flv", [])


def test_websocket_when_it_plays_gets_each_tag_in_a_frame_and_a_close_at_the_end(web):
    web = web()
    publisher = web.publisher()
    publisher.group(b"one", 70_000)
    player = Socket(web)
    player.until(AcceptConnection)
    header, tags = player.tags(6)
    assert (header.audio, header.video) == (True, True)
    assert tags[3].payload == key(b"one", 70_000)
    assert [viewer.protocol for viewer in web.viewers()] == ["ws-flv"]
    publisher.end()
    closed = player.until(CloseConnection)
    assert (closed.code, closed.reason) == (1000, "the publisher has gone")
    assert player.client.sock.recv(1) == b""


def test_websocket_when_it_pings_is_answered_and_when_it_closes_the_play_ends(web):
    web = web()
    web.publisher().group()
    player = Socket(web)
    player.until(AcceptConnection)
    player.send(Ping(payload=b"are you there"))
    assert player.until(Pong).payload == b"are you there"
    player.send(CloseConnection(code=1000, reason="enough"))
    assert player.until(CloseConnection).code == 1000
    assert wait_for(web.ended)[-1].details == "the player closed: 1000 enough"


@pytest.mark.parametrize(("headers", "status"), [("Sec-WebSocket-Version: 12\r\n", 426), ("", 400)])
def test_websocket_when_the_handshake_is_wrong_is_refused(web, headers, status):
    web = web()
    web.publisher()
    upgrade = UPGRADE.replace("Sec-WebSocket-Version: 13\r\n", "")
    found, answer, _ = web.get(headers=upgrade + headers)
    assert (found, answer["sec-websocket-version"]) == (status, "13")


@pytest.mark.parametrize(
    ("upgrade", "key", "version", "status"),
    [
        ("foo, WebSocket", KEY, "1.1", 101),
        ("websocket", KEY, "1.0", 200),
        ("websocket", "dGhlIHNhbXBsZQ==", "1.1", 400),
        ("websocket", "not base64", "1.1", 400),
        ("h2c", KEY, "1.1", 200),
    ],
)
def test_handshake_when_it_is_at_the_edge_is_taken_as_the_rfcs_say(web, upgrade, key, version, status):
    web = web()
    web.publisher().group()
    client = web.client()
    head = f"GET /live/room.flv HTTP/{version}\r\nHost: h\r\nConnection: keep-alive, Upgrade\r\nUpgrade: {upgrade}\r\n"
    client.send(head + f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n")
    assert client.answer()[0] == status


def test_viewers_when_over_both_protocols_follow_one_log_each(web):
    web = web()
    publisher = web.publisher()
    publisher.group(b"one")
    clients = [web.client() for _ in range(3)]
    for client in clients:
        client.get()
    Socket(web).until(AcceptConnection)
    names = sorted(wire.wire_format.name for wire in publisher.stream.wires)
    assert names == ["1", "http-flv", "ws-flv"]
    assert sorted(viewer.protocol for viewer in web.viewers()) == ["http-flv"] * 3 + ["ws-flv"]


@pytest.mark.parametrize("wire_format", [TAGS, CHUNKS, FRAMES, RtmpChunks(1, 128), RtmpChunks(5, 65536)])
@pytest.mark.parametrize("size", [1, 100, 111, 125, 126, 65_000, 70_000])
def test_formats_when_read_back_give_what_was_put_in(wire_format, size):
    for timestamp in (0, 0xFFFFFF, 0x1000000, 0xFFFFFFFF):
        message = (TYPE_VIDEO, timestamp, b"v" * size)
        wire = wire_format.serialise(*message)
        assert wire_format.deserialise(wire) == message
        assert wire_format.time_of(wire) == timestamp
        assert wire_format.deserialise(wire_format.retime(wire, 7, 7)) == (TYPE_VIDEO, 7, message[2])
        assert wire_format.is_media(wire)
        assert not wire_format.is_media(wire_format.serialise(TYPE_DATA_AMF0, timestamp, message[2]))


def test_formats_when_data_is_amf3_take_what_is_amf0_inside():
    assert TAGS.serialise(TYPE_DATA_AMF3, 5, b"\0\x02\0\x01x") == flv.tag(18, 5, b"\x02\0\x01x")
    assert TAGS.serialise(TYPE_DATA_AMF3, 5, b"\x06x") == b""


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda server: server.kick(lambda connection: True, "test"), CloseReason.KICKED),
        (lambda server: perform(server, "ban", {"network": LOOPBACK}), CloseReason.BANNED),
        (lambda server: server.stop(2.0), CloseReason.SHUTDOWN),
    ],
)
def test_viewer_when_ended_by_the_server_has_the_reason_that_one_of_rtmp_has(web, end, reason):
    web = web()
    web.publisher().group()
    web.get()
    wait_for(web.viewers)
    end(web.server)
    wait_for(web.ended)
    assert [item.reason for item in web.ended()] == [reason]
    assert wait_for(lambda: web.server.closed_by_reason) == {reason: 1}


def test_kick_when_a_websocket_player_is_there_tells_it_why(web):
    web = web()
    web.publisher().group()
    player = Socket(web)
    player.tags(1)
    assert len(web.server.kick(lambda _: True, "too loud")) == 1
    closed = player.until(CloseConnection)
    assert (closed.code, closed.reason) == (1008, "kicked by an operator: too loud")


def test_stop_when_a_websocket_player_is_there_tells_it_with_1001_behind_a_whole_frame(web):
    web = web()
    publisher = web.publisher()
    publisher.group(b"one")
    player = Socket(web)
    player.tags(6)
    publisher.group(b"two", 100_000)
    assert web.server.stop(2.0)
    closed = player.until(CloseConnection)
    assert (closed.code, closed.reason) == (1001, "the server stops")
    assert player.client.to_end() == b""


def test_response_that_has_not_begun_when_its_publisher_goes_costs_no_turn_of_the_loop(web, monkeypatch):
    calls = []
    timer = HttpSession.timer
    monkeypatch.setattr(HttpSession, "timer", lambda self, now: (calls.append(now), timer(self, now)))
    web = web()
    publisher = web.publisher(headers=False)
    publisher.send(TYPE_AUDIO, AAC_HEADER)
    web.client().send(f"GET /live/room.flv HTTP/1.1\r\n{HOST}\r\n")
    (session,) = wait_for(lambda: [c.session for c in web.server.connections() if c.session.role == "viewer"])
    wait_for(lambda: session.connection.sender.state is not None and calls)
    publisher.end()
    other = web.client()
    for _ in range(100):
        other.get("/nothing")
    before = len(calls)
    for _ in range(100):
        other.get("/nothing")
    assert len(calls) - before < 20


@pytest.mark.parametrize("headers", ["", UPGRADE])
def test_player_that_leaves_while_it_waits_is_gone_at_once(web, headers):
    """Its connection would count for its address, and its stream be kept, for as long as it might have waited."""
    made = web()
    client = made.client()
    client.send(f"GET /live/none.flv HTTP/1.1\r\n{HOST}{headers}\r\n")
    wait_for(made.viewers)
    client.close()
    wait_for(lambda: not made.server.connections())
    assert not made.viewers()


@pytest.mark.parametrize("path", ["chunks", "frames"])
def test_slow_viewer_when_the_name_is_taken_again_gets_nothing_behind_the_end(web, path):
    web = web(socket_options=SocketOptions(send_buffer_bytes=65_536))
    publisher = web.publisher()
    publisher.group(b"one")
    player = web.client() if path == "chunks" else Socket(web)
    client = player if path == "chunks" else player.client
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    if path == "chunks":
        client.get()
    else:
        player.until(AcceptConnection)
    wait_for(web.viewers)
    publisher.group(b"two", 400_000)
    publisher.end()
    web.publisher().group(b"new", 1000)
    raw = client.to_end()
    assert raw.endswith(b"\r\n0\r\n\r\n" if path == "chunks" else b"the publisher has gone")
    assert b"new" not in raw.removesuffix(b"the publisher has gone")


def test_player_that_waits_when_a_publication_ends_before_it_begins_is_served_by_the_next(web):
    web = web()
    first = web.publisher(headers=False)
    first.send(TYPE_AUDIO, AAC_HEADER)
    client = web.client()
    client.send(f"GET /live/room.flv HTTP/1.1\r\n{HOST}\r\n")
    wait_for(lambda: [c for c in web.server.connections() if c.session.role == "viewer"])
    first.end()
    web.publisher().group(b"next")
    assert client.answer()[0] == 200
    assert client.tags(4)[1][-1].payload in (key(b"next"), audio(b"next"), inter(b"next"))


def test_server_when_it_listens_on_ipv6_serves_all_that_it_does_on_ipv4(web, six, tmp_path):
    """FLV, WebSocket and HLS, asked for with a Host in brackets; and peers are named as people write them."""
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "room.m3u8").write_text("#EXTM3U\n")
    server = web(host=six, handlers=hls_handlers(tmp_path))
    publisher = server.publisher()
    publisher.group(b"1")
    client, player = server.client(), Socket(server)
    client.host = f"Host: [{six}]:{server.address[1]}\r\n"
    assert client.get()[0] == 200
    player.until(AcceptConnection)
    publisher.group(b"2")
    assert client.tags(5)[1][:5] == player.tags(5)[1][:5]  # both have begun with the first group
    assert server.get("/live/room.m3u8")[0] == 200
    connection = server.server.connections()[0]
    assert str(connection).endswith(f"([::1]:{connection.peer[1]})")
