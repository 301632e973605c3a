"""Viewers of a load run over HTTP and WebSocket: what they ask, the head of the answer, and the tags behind it."""

from __future__ import annotations

import pytest
from live_kit import AVC_HEADER, audio, inter, key
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, Ping, Pong

from flowctl import flv
from flowctl.errors import ConfigError, RemoteProtocolError
from flowctl.load.peers.http import FlvSkimmer, HttpSpeech
from flowctl.load.peers.skim import FrameBook
from flowctl.load.target import SCHEMES
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.measure import AUDIO, OTHER, VIDEO
from flowctl.wire.rtmp.events import HandshakeDone, Rejected

TAGS = [
    flv.tag(9, 0, AVC_HEADER),
    flv.tag(9, 5, key(b"k", 300)),
    flv.tag(8, 6, audio(b"a")),
    flv.tag(9, 0x1000005, inter(b"i")),
]
KINDS = [(0, OTHER), (5, VIDEO), (6, AUDIO), (0x1000005, VIDEO)]


def url(text):
    return parse_address(text, SCHEMES)


def test_request_when_of_either_scheme_names_stream_host_and_query():
    plain = HttpSpeech(url("http://[::1]:8080/live/room.flv?key=a")).data_to_send().decode()
    assert plain.startswith("GET /live/room.flv?key=a HTTP/1.0\r\nHost: [::1]:8080\r\n")
    assert "Upgrade: websocket" in HttpSpeech(url("ws://a.example/live/room.flv")).data_to_send().decode()


@pytest.mark.parametrize(("scheme", "status"), [("http", "200 OK"), ("ws", "101 Switching Protocols")])
def test_head_when_it_comes_in_pieces_ends_where_the_body_begins(scheme, status):
    head = f"HTTP/1.1 {status}\r\nServer: x\r\n\r\n".encode()
    for cut in range(1, len(head)):
        speech = HttpSpeech(url(f"{scheme}://a/live/room.flv"))
        assert speech.receive(memoryview(head[:cut]), 0.0) == []
        assert speech.receive(memoryview(head[cut:] + b"FLV"), 0.0) == [HandshakeDone("http")]
        assert (speech.head_bytes, speech.stream_id) == (len(head), 1)


def test_head_when_it_says_no_is_a_refusal_with_its_status():
    speech = HttpSpeech(url("http://a/live/room.flv"))
    (found,) = speech.receive(memoryview(b"HTTP/1.1 404 Not Found\r\n\r\n"), 0.0)
    assert isinstance(found, Rejected)
    assert (found.code, found.description) == ("HTTP 404", "Not Found")


def test_head_when_it_does_not_end_is_an_error():
    with pytest.raises(RemoteProtocolError, match="does not end"):
        HttpSpeech(url("http://a/live/room.flv")).receive(memoryview(b"x" * 20_000), 0.0)


@pytest.mark.parametrize("websocket", [False, True])
def test_skim_when_tags_are_cut_anywhere_finds_each_once(websocket):
    server = Connection(ConnectionType.SERVER)
    parts = [flv.header(audio=True, video=True), *TAGS]
    wire = b"".join(bytes(server.send(BytesMessage(data=part))) if websocket else part for part in parts)
    for size in (1, 7, 100, len(wire)):
        skimmer = FlvSkimmer(FrameBook(), websocket=websocket)
        found = []
        for at in range(0, len(wire), size):
            found += skimmer.skim(memoryview(wire)[at : at + size])
        assert [(timestamp, frame.kind) for timestamp, frame in found] == KINDS


def test_skim_when_the_server_pings_has_the_answer():
    skimmer, server = FlvSkimmer(FrameBook(), websocket=True), Connection(ConnectionType.SERVER)
    skimmer.skim(memoryview(bytes(server.send(Ping(payload=b"x")))))
    server.receive_data(skimmer.replies)
    assert list(server.events()) == [Pong(payload=b"x")]


def test_address_when_of_another_scheme_is_refused():
    with pytest.raises(ConfigError, match="'rtmpt' is not supported"):
        url("rtmpt://a/live/room.flv")
