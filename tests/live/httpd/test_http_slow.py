"""Players over HTTP that read slowly, or make the server work, on real sockets: held as those of RTMP are."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest
from http_kit import HOST, UPGRADE, Client, wait_for
from live_kit import key

from flowctl.core.flow.limits import AxisLimits, Limits
from flowctl.core.flow.state import SendState
from flowctl.core.loop.sockets import SocketOptions
from flowctl.live.httpd.exchange import HttpLimits
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.websocket.frames import frame

PLAIN = f"GET /live/room.flv HTTP/1.1\r\n{HOST}\r\n"
SOCKET = f"GET /live/room.flv HTTP/1.1\r\n{HOST}{UPGRADE}\r\n"
TIGHT = Limits(size=AxisLimits(low=20_000, soft=100_000, hard=40_000_000))
SMALL = SocketOptions(send_buffer_bytes=16_384)


def masked(first: int, payload: bytes = b"") -> bytes:
    return bytes((first, 0x80 | len(payload))) + b"\0\0\0\0" + payload


def player(web, octets=SOCKET) -> Client:
    """Return a client that plays."""
    client = web.client()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.send(octets)
    client.answer()
    return client


@pytest.mark.parametrize("octets", [PLAIN, SOCKET])
def test_player_when_it_does_not_read_is_at_its_soft_limit_with_a_reason(web, octets):
    web = web(socket_options=SMALL, limits_of=TIGHT)
    publisher = web.publisher()
    publisher.group()
    client = player(web, octets)
    (before,) = wait_for(web.viewers)
    assert before.connection.sender.state is SendState.READY
    for _ in range(4):
        publisher.group(b"x", 60_000)
    wait_for(lambda: web.viewers()[0].connection.sender.state >= SendState.SOFT_LIMIT)
    wait_for(lambda: web.viewers()[0].connection.receiver.statistics().pauses == {"soft limit": 1})
    assert "KiB" in web.viewers()[0].connection.why()
    publisher.group(b"y", 60_000)
    publisher.group(b"z", 60_000)
    wait_for(lambda: web.server.statistics().totals.dropped_messages)
    assert web.server.statistics().totals.conserved
    client.sock.settimeout(0.02)

    def is_back() -> bool:
        with contextlib.suppress(TimeoutError):
            client.read()
        return web.viewers()[0].connection.sender.state is SendState.READY

    wait_for(is_back)
    figures = web.server.statistics().totals
    assert figures.conserved
    assert figures.recoveries == 1


def test_frames_when_there_are_too_many_slow_the_player_down_alone(web):
    web = web(limits=HttpLimits(frames_per_second=20.0))
    publisher = web.publisher()
    publisher.group()
    player(web).send(masked(0x89, b"p") * 200)
    wait_for(lambda: web.server.hub.limits_hit == {"frames_per_second": 1})
    other = web.client()
    assert other.get()[0] == 200
    assert other.tags(6)[1][3].payload == key()
    assert len(web.viewers()) == 2


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (b"\x89\x01x", 1002),  # not masked
        (masked(0x83), 1002),  # no such opcode
        (masked(0x09, b"part of a ping"), 1002),
        (masked(0xC2, b"compressed"), 1002),
        (masked(0x81, b"\xff\xfe"), 1007),
        (masked(0x88, b"\x00"), 1002),
        (b"\x89\xfe\x00\x80" + b"\0" * 132, 1002),  # a long ping
    ],
)
def test_frames_when_they_are_wrong_end_the_connection_with_their_code(web, octets, code):
    web = web()
    web.publisher().group()
    client = player(web)
    client.send(octets)
    found = client.to_end()
    assert struct.pack(">H", code) in found[found.rindex(b"\x88") :]
    assert wait_for(web.ended)[-1].reason.value == "protocol error"


def test_messages_when_in_fragments_are_let_pass_and_pings_between_them_answered(web):
    web = web()
    web.publisher().group()
    client = player(web)
    client.send(masked(0x02, b"a" * 100) + masked(0x00, b"b" * 100) + masked(0x89, b"still") + masked(0x80, b"end"))
    while frame(b"still", 0x8A) not in client.rest:
        assert client.read()
    assert len(web.viewers()) == 1


def test_requests_when_pipelined_without_reading_wait_in_the_client(web):
    """Answers of a client that does not read are not heaped up: its next requests are left where they are."""
    web = web(socket_options=SMALL, limits=HttpLimits(requests=1_000_000))
    client = web.client()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.sock.settimeout(0.3)
    sent, asked = 0, f"GET /nothing HTTP/1.1\r\n{HOST}\r\n".encode() * 100
    with contextlib.suppress(TimeoutError):
        while sent < 20_000_000:
            sent += client.sock.send(asked)
    (connection,) = web.server.connections()
    assert connection.sender.statistics().load.size_bytes < 16 * 1024
    assert sent < 20_000_000


def test_silent_player_of_websocket_when_it_does_not_answer_a_ping_is_ended(web):
    web = web(rtmp=ServerSessionConfig(limits=WireLimits(ping_after_s=0.05, ping_timeout_s=0.1)))
    web.publisher().group()
    assert frame(b"", 0x89) in player(web).to_end()
    assert wait_for(web.ended)[-1].reason.value == "idle"
