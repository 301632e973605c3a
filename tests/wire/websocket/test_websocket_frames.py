"""Frames of a server and the opening handshake, without sockets."""

from __future__ import annotations

import random

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, TextMessage
from wsproto.events import Request as WsRequest
from wsproto.extensions import PerMessageDeflate

from flowctl.errors import LocalProtocolError, RemoteProtocolError
from flowctl.wire.websocket.frames import BINARY, TEXT, close_frame, deflated_frame, frame, may_be_sent
from flowctl.wire.websocket.handshake import (
    HeadReader,
    accept_key,
    agrees_to_deflate,
    switching_head,
    wants_websocket,
    whole_answer,
)

HANDSHAKE = (
    (b"host", b"example.test"),
    (b"upgrade", b"websocket"),
    (b"connection", b"keep-alive, Upgrade"),
    (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ=="),
    (b"sec-websocket-version", b"13"),
)


def client(extensions=()):
    return Connection(ConnectionType.CLIENT, list(extensions))


def told(connection, wire):
    connection.receive_data(wire)
    return list(connection.events())


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 70_000])
def test_frames_when_read_by_another_implementation_are_the_message(size):
    octets = bytes(range(256)) * (size // 256 + 1)
    assert told(client(), frame(octets[:size], BINARY)) == [BytesMessage(data=octets[:size])]
    assert told(client(), frame(b"x" * size, TEXT)) == [TextMessage(data="x" * size)]


def test_deflated_frames_when_read_by_clients_that_came_at_other_times_are_the_same_message():
    """No window is kept: the same octets are right for a client that has seen all before, and for one that has not."""
    extension = PerMessageDeflate()
    extension.finalize("permessage-deflate; server_no_context_takeover; client_no_context_takeover")
    early = client([extension])
    for message in (b"abc " * 64, b"abc " * 127, b"abc " * 200, b"0123456789abcdefg" * 4096):
        wire = deflated_frame(frame(message, BINARY))
        assert len(wire) < len(message) / 4
        late_extension = PerMessageDeflate()
        late_extension.finalize("permessage-deflate; server_no_context_takeover")
        for connection in (early, client([late_extension])):
            pieces = [event.data for event in told(connection, wire)]
            assert b"".join(pieces) == message


def test_messages_when_deflating_is_not_worth_it_are_left_as_they_are():
    for message in (b"short", random.Random(1).randbytes(2000), random.Random(1).randbytes(70_000)):
        assert deflated_frame(frame(message, BINARY)) == frame(message, BINARY)


@pytest.mark.parametrize("reason", ["", "bye", "x" * 123, "ü" * 200, "a" + "😀" * 60, "\ud800 lone"])
def test_close_frames_when_the_reason_is_long_are_cut_between_characters(reason):
    wire = close_frame(4001, reason)
    assert len(wire) <= 127
    (event,) = told(client(), wire)
    assert isinstance(event, CloseConnection)
    assert event.code == 4001
    assert reason.encode(errors="replace").decode().startswith(event.reason)
    assert len(event.reason.encode()) > 119 or event.reason == reason.encode(errors="replace").decode()


def test_close_codes_when_they_may_be_sent_are_those_of_the_registry():
    may = {code for code in range(900, 5100) if may_be_sent(code)}
    assert may == {1000, 1001, 1002, 1003, *range(1007, 1015), *range(3000, 5000)}


def test_keys_when_they_are_of_the_rfc_are_answered_as_it_says():
    """RFC 6455 section 1.3."""
    assert accept_key(HANDSHAKE) == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        (b"connection", None, "400"),
        (b"connection", b"close", "400"),
        (b"sec-websocket-version", None, "400"),
        (b"sec-websocket-version", b"8", "426"),
        (b"sec-websocket-key", None, "400"),
        (b"sec-websocket-key", b"", "400"),
        (b"sec-websocket-key", b"c2hvcnQ=", "400"),
        (b"sec-websocket-key", b"not base64 at all!", "400"),
        (b"sec-websocket-key", "ключ".encode(), "400"),
    ],
)
def test_handshakes_when_something_is_missing_or_wrong_are_refused(name, value, code):
    headers = [(found, other) for found, other in HANDSHAKE if found != name]
    headers += [] if value is None else [(name, value)]
    with pytest.raises(RemoteProtocolError) as caught:
        accept_key(headers)
    assert caught.value.code == code


def test_handshakes_when_a_key_comes_twice_are_refused():
    with pytest.raises(RemoteProtocolError):
        accept_key([*HANDSHAKE, HANDSHAKE[3]])


def test_requests_when_they_ask_for_websocket_say_so_in_a_list():
    assert wants_websocket([(b"upgrade", b"h2c, WebSocket")], "1.1")
    assert not wants_websocket([(b"upgrade", b"websocket")], b"1.0")
    assert not wants_websocket([(b"upgrade", b"h2c")], "1.1")


@pytest.mark.parametrize(
    ("offer", "agrees"),
    [
        ("permessage-deflate", True),
        ("permessage-deflate; client_max_window_bits", True),
        ('permessage-deflate; client_max_window_bits="10"; server_no_context_takeover', True),
        ("permessage-deflate; server_max_window_bits=15", True),
        ("permessage-deflate; server_max_window_bits=10", False),
        ("permessage-deflate; server_max_window_bits=10, permessage-deflate", True),
        ("permessage-deflate; server_max_window_bits", False),
        ("permessage-deflate; client_max_window_bits=7", False),
        ("permessage-deflate; client_no_context_takeover=1", False),
        ("permessage-deflate; client_no_context_takeover; client_no_context_takeover", False),
        ("permessage-deflate; what", False),
        ("x-webkit-deflate-frame, permessage-deflate; client_max_window_bits", True),
        ("x-webkit-deflate-frame", False),
        ("", False),
        (";;=,", False),
    ],
)
def test_offers_to_deflate_when_they_fit_what_is_deflated_once_are_agreed_to(offer, agrees):
    assert agrees_to_deflate([(b"sec-websocket-extensions", offer.encode())]) is agrees


def test_answers_when_read_by_another_implementation_accept():
    peer = WSConnection(ConnectionType.CLIENT)
    extension = PerMessageDeflate()
    request = WsRequest(host="example.test", target="/", subprotocols=["b", "a"], extensions=[extension])
    reader = HeadReader(16_384)
    head = reader.feed(peer.send(request) + b"frames behind")
    assert reader.rest_bytes == len(b"frames behind")
    assert agrees_to_deflate(head.headers)
    peer.receive_data(switching_head(accept_key(head.headers), [(b"X-A", b"1")], subprotocol="a", deflates=True))
    (event,) = peer.events()
    assert isinstance(event, AcceptConnection)
    assert (event.subprotocol, list(event.extra_headers)) == ("a", [(b"x-a", b"1")])
    assert extension.server_no_context_takeover
    assert extension.client_no_context_takeover


def test_answers_when_a_header_has_a_line_break_are_not_made():
    for text in (b"a\r\nSet-Cookie: b", b"a\nb", b"a\0"):
        with pytest.raises(LocalProtocolError):
            whole_answer(404, b"", [(b"X", text)])
        with pytest.raises(LocalProtocolError):
            switching_head(b"key", [(text, b"x")])
    assert whole_answer(299, b"body").startswith(b"HTTP/1.1 299 ")


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_heads_when_they_come_in_pieces_are_the_same_request(size):
    wire = b"GET /a?b=c HTTP/1.1\r\nHost: h\r\nX-Y: z\r\n\r\n"
    reader, request = HeadReader(16_384), None
    for at in range(0, len(wire), size):
        assert request is None
        request = reader.feed(wire[at : at + size])
    assert (request.method, request.target, dict(request.headers)) == (b"GET", b"/a?b=c", {b"host": b"h", b"x-y": b"z"})


def test_heads_when_they_are_too_long_or_none_are_refused_with_a_status():
    reader = HeadReader(1024)
    assert reader.feed(b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 900) is None
    with pytest.raises(RemoteProtocolError) as caught:
        reader.feed(b"y" * 200)
    assert caught.value.code == "431"
    with pytest.raises(RemoteProtocolError) as caught:
        HeadReader(1024).feed(b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\r\n\r\n")
    assert caught.value.code == "400"
