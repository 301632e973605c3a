"""H01 to H08, with B34 among them: attacks on what is served over HTTP and WebSocket."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from typing import Final

from flowctl.core.text.addresses import join_host_port
from flowctl.load.hostile.base import ANY, ENDED, Attack, AttackForm, Run, Script, hostile
from flowctl.load.hostile.peer import Peer

_MIB: Final = 1 << 20
_SMALL_BUFFER: Final = 4096
_SLOW_S: Final = 0.25
"""Time between two octets of a slow sender: no limit on silence sees it."""
_SLOW_BYTES: Final = 250
_PATIENCE_S: Final = 65.0
"""Longest wait for the end of a connection: nginx waits 60 s for the headers of a request."""
_READER_S: Final = 95.0
_FLOOD_BYTES: Final = 64 * _MIB
"""Octets of a flood, more than any kernel keeps: a client that sends them all has been read by the server."""
_UPGRADE: Final = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
_PING: Final = b"\x89\x84\0\0\0\0ping"
_ENDLESS_FRAME: Final = b"\x82\xff" + (1 << 62).to_bytes(8, "big") + b"\0\0\0\0"
"""Head of a WebSocket frame of 4 EiB."""
_FRAGMENT: Final = b"\0\x81\0\0\0\0f"
_open_small: Final = partial(Attack.open, receive_buffer_bytes=_SMALL_BUFFER)


def _request(attack: Attack, path: str = "/flowctl", *, method: str = "GET", headers: bytes = b"") -> bytes:
    host = join_host_port(attack.context.host, attack.context.port)
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n".encode() + headers


def _with(headers: bytes, *, method: str = "GET") -> Callable[[Attack, Peer], bytes]:
    return lambda attack, _: _request(attack, method=method, headers=headers)


def _body(header: bytes) -> Callable[[Attack, Peer], bytes]:
    return _with(header + b"\r\n\r\n", method="POST")


def _stream_with_body(attack: Attack, _: Peer) -> bytes:
    return _request(attack, _stream(attack), headers=b"Transfer-Encoding: chunked\r\n\r\n")


def _stream(attack: Attack) -> str:
    return f"/{attack.context.app}/{attack.context.stream.removesuffix('.flv')}.flv"


async def _play(attack: Attack, headers: bytes = b"", **options: int) -> Peer:
    peer = await attack.open(**options)
    await peer.write(_request(attack, _stream(attack), headers=headers) + b"\r\n")
    await peer.read_some(1)
    return peer


def _websocket(octets: bytes, first: bytes = b"") -> Run:
    """Return a form that plays over WebSocket, sends octets without end, and reads no answer."""
    return Script(partial(_play, headers=_UPGRADE, receive_buffer_bytes=_SMALL_BUFFER), first, octets)


def _flood(octets: Callable[[Attack, Peer], bytes], piece: bytes) -> Run:
    return Script(Attack.open, octets, piece, most_bytes=_FLOOD_BYTES)


def _slowly(octets: bytes) -> Run:
    """Return a form that sends an octet at a time, always soon enough not to look silent."""

    async def run(attack: Attack) -> None:
        peer = await attack.open()
        for octet in itertools.chain(octets, itertools.cycle(b"X-Slow: loris\r\n")):
            await peer.write(bytes((octet,)))
            await asyncio.sleep(_SLOW_S)
            peer.check_open()

    return run


async def _slow_reader(attack: Attack) -> None:
    peer = await _play(attack, receive_buffer_bytes=_SMALL_BUFFER)
    while True:
        await peer.read_some(_SLOW_BYTES)
        peer.check_open()
        await asyncio.sleep(_SLOW_S)


PROFILES: Final = (
    hostile(
        "H01 http-half-close",
        "closes its sending half behind a request, in the middle of one, and while it plays",
        "The first half of B34: a reader that will never say anything again. Sound servers answer what came whole, and "
        "free what belongs to a player that has left.",
        AttackForm(name="request", run=Script(Attack.open, _with(b"\r\n"), half_close=True)),
        AttackForm(name="player", run=Script(_play, half_close=True)),
        AttackForm(name="head", run=Script(Attack.open, _with(b""), half_close=True), allowed=ENDED),
    ),
    hostile(
        "H02 http-body",
        "sends bodies that nobody asked for: in chunks without end, of 10 TB, and behind the GET of a stream",
        "The second half of B34. A body is of no use here, and one in chunks has no length. Sound servers read a "
        "little of it and refuse the rest.",
        AttackForm(
            name="chunks", run=_flood(_body(b"Transfer-Encoding: chunked"), b"1;x=y\r\nz\r\n" * 1000), allowed=ENDED
        ),
        AttackForm(name="announced", run=Script(Attack.open, _body(b"Content-Length: 10995116277760")), allowed=ENDED),
        AttackForm(name="of-get", run=_flood(_stream_with_body, b"4000\r\n" + b"b" * 0x4000 + b"\r\n"), allowed=ENDED),
    ),
    hostile(
        "H03 http-slowloris",
        "sends request line, headers or body a byte at a time, for ever",
        "A connection, and what the server keeps for it, is held at the cost of a byte now and then. Sound servers "
        "limit the time to the end of a request, not only silence.",
        AttackForm(name="line", run=_slowly(b"GET /" + b"a" * 4096), allowed=ENDED, needs_s=_PATIENCE_S),
        AttackForm(name="headers", run=_slowly(b"GET / HTTP/1.1\r\n"), allowed=ENDED, needs_s=_PATIENCE_S),
        AttackForm(
            name="body",
            run=Script(Attack.open, _body(b"Content-Length: 60000"), b"b", every_s=_SLOW_S),
            allowed=ENDED,
            needs_s=_PATIENCE_S,
        ),
    ),
    hostile(
        "H04 http-huge-head",
        "sends a path or a header of 1 MiB, 100,000 headers, and a header without end",
        "What is not complete has to be kept. Sound servers limit bytes and number of headers, and say which.",
        AttackForm(
            name="target",
            run=Script(Attack.open, lambda attack, _: _request(attack, "/" + "a" * _MIB) + b"\r\n"),
            allowed=ENDED,
        ),
        AttackForm(name="header", run=Script(Attack.open, _with(b"X: " + b"a" * _MIB + b"\r\n\r\n")), allowed=ENDED),
        AttackForm(name="count", run=Script(Attack.open, _with(b"X: y\r\n" * 100_000 + b"\r\n")), allowed=ENDED),
        AttackForm(name="endless", run=_flood(_with(b"X: "), b"a" * 65536), allowed=ENDED),
    ),
    hostile(
        "H05 http-pipeline",
        "sends requests without end, and reads no answer",
        "Each request makes an answer that waits. Sound servers look at no further request while answers wait.",
        AttackForm(
            name="",
            run=Script(_open_small, again=lambda attack, _: (_request(attack) + b"\r\n") * 500),
            allowed=ANY,
            reads=False,
        ),
    ),
    hostile(
        "H06 http-slow-reader",
        "plays over HTTP and reads 1 kB/s",
        "What it does not read waits in the server. Sound servers leave out what is late, and cut at a limit.",
        AttackForm(name="", run=_slow_reader, allowed=ENDED, needs_s=_READER_S, reads=False),
    ),
    hostile(
        "H07 websocket-flood",
        "plays over WebSocket, pings without end, and reads no answer",
        "Each ping makes a pong. Sound servers limit how many they look at, and how many answers wait.",
        AttackForm(name="", run=_websocket(_PING * 500), allowed=ANY, reads=False),
    ),
    hostile(
        "H08 websocket-message",
        "plays over WebSocket and sends a message without end: in fragments of a byte, and in a frame of 4 EiB",
        "A message is only complete at its end. Sound servers keep none of it that they have no use for.",
        AttackForm(
            name="fragments", run=_websocket(_FRAGMENT * 500, first=b"\x02\x81\0\0\0\0f"), allowed=ANY, reads=False
        ),
        AttackForm(
            name="frame",
            run=_websocket(b"x" * 65536, first=_ENDLESS_FRAME),
            allowed=ANY,
            reads=False,
        ),
    ),
)
