"""Streams: in memory, and over connections on both loops."""

from __future__ import annotations

import asyncio
import socket

import pytest
from octets_kit import on_each_loop, virtual

from flowctl.errors import BrokenError, ClosedError
from flowctl.nodes.diffusion.streams.memory import memory_pair
from flowctl.nodes.diffusion.streams.tcp import UNREAD_BYTES, connect_stream, open_stream

LIMIT_S = 20


async def read_all(stream):
    data = b""
    while piece := await stream.read():
        data += piece
    return data


async def memory_streams(group):
    return memory_pair(1000)


async def socket_streams(group):
    ours, theirs = socket.socketpair()
    return open_stream(group, ours), open_stream(group, theirs)


@pytest.mark.parametrize("pair", [memory_streams, socket_streams])
@on_each_loop
async def test_octets_when_more_than_anybody_buffers_arrive_all_and_in_order(group, pair):
    left, right = await pair(group)
    there, back = bytes(range(256)) * 8000, bytes(reversed(range(256))) * 8000

    async def say(stream, data):
        for start in range(0, len(data), 300_000):
            await stream.write(data[start : start + 300_000])

    heard: dict[str, bytes] = {}

    async def hear(name, stream, size):
        data = b""
        while len(data) < size:
            data += await stream.read()
        heard[name] = data

    await asyncio.gather(
        say(left, there), say(right, back), hear("right", right, len(there)), hear("left", left, len(back))
    )
    left.close("done")
    assert await right.read() == b""
    right.close()
    assert heard == {"right": there, "left": back}


@pytest.mark.parametrize("pair", [memory_streams, socket_streams])
@on_each_loop
async def test_stream_when_its_peer_has_closed_ends_and_takes_nothing(group, pair):
    left, right = await pair(group)
    right.close()
    right.close()
    assert await left.read() == b""

    async def write_on():
        for _ in range(100):
            await left.write(bytes(100_000))

    with pytest.raises(BrokenError):
        await write_on()
    left.close()


@virtual
async def test_stream_when_closed_by_us_refuses_what_is_asked_of_it():
    left, _ = memory_pair()
    left.close()
    with pytest.raises(ClosedError):
        await left.write(b"x")
    with pytest.raises(ClosedError):
        await left.read()


@on_each_loop
async def test_session_when_nobody_reads_holds_the_input(group):
    ours, theirs = socket.socketpair()
    stream = open_stream(group, ours)
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    writing = asyncio.ensure_future(loop.sock_sendall(theirs, bytes(8_000_000)))
    while len(stream._unread) < UNREAD_BYTES:  # noqa: ASYNC110 - the product tells nobody that input has come
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not stream.connection.receiver.reading
    assert UNREAD_BYTES <= len(stream._unread) <= 3 * UNREAD_BYTES
    assert not writing.done()
    size = 0
    while size < 8_000_000:
        size += len(await stream.read())
    await writing
    stream.close()
    theirs.close()


@on_each_loop
async def test_connect_when_nobody_listens_raises(group, tmp_path):
    with pytest.raises(OSError, match="No such file"):
        await connect_stream(group, str(tmp_path / "nobody"))


@on_each_loop
async def test_connect_when_a_host_has_several_addresses_tries_each(group, monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    _, port = listener.getsockname()
    nobody = socket.create_server(("127.0.0.1", 0))
    places = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", nobody.getsockname()),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
    ]
    nobody.close()  # its port refuses from now on

    async def addresses(*args, **options):
        return places

    loop = asyncio.get_running_loop()
    looked_up = type("Loop", (), {"getaddrinfo": staticmethod(addresses), "sock_connect": loop.sock_connect})
    monkeypatch.setattr("flowctl.nodes.diffusion.streams.tcp.asyncio.get_running_loop", lambda: looked_up)
    stream = await connect_stream(group, ("origin", port))
    monkeypatch.undo()
    listener.settimeout(LIMIT_S)
    accepted, _ = listener.accept()
    assert accepted.getsockname() == ("127.0.0.1", port)
    accepted.close()
    stream.close()
    listener.close()
