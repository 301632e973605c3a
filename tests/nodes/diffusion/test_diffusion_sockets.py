"""Diffusion over TCP, and a peer on the other end of a socket that knows nothing but the specification's octets."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from octets_kit import RawPeer, by_name, hashed, on_each_loop, pool_of, until

from flowctl.core.flow.limits import Limits
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.server import Server
from flowctl.errors import BrokenError, FlowctlError
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.pool.memory import MemoryPool
from flowctl.nodes.diffusion.streams.tcp import StreamSession, connect_stream, open_stream

LIMIT_S = 20


class RawSocket:
    """A connected TCP socket, used by itself."""

    def __init__(self, sock):
        self._sock = sock
        sock.setblocking(False)

    async def read(self):
        return await asyncio.get_running_loop().sock_recv(self._sock, 65536)

    async def write(self, data):
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    def close(self, details=""):
        self._sock.close()


async def tcp(group, **arguments):
    """Return a stream of ours and the raw end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = await asyncio.get_running_loop().sock_accept(listener)
    return open_stream(group, ours, **arguments), RawSocket(theirs)


@on_each_loop
async def test_client_when_it_does_not_read_is_ended_by_the_times_of_its_sender(group):
    objects = {b"%d" % number: (b"%d/" % number).ljust(2_000_000) for number in range(8)}
    async with ObjectDiffusion(pool_of(objects, identify=by_name)) as node:
        stream, raw = await tcp(group, settings=SenderSettings(stuck_s=0.2), limits=Limits.parse("8MiB,0"))
        peer = RawPeer(raw)
        served = asyncio.ensure_future(node.serve(stream))
        await peer.says("81 00 84 01 F5 00 08")
        await peer.says("".join(f"82 03 9F 41 {0x30 + number:02X} FF" for number in range(8)))
        with pytest.raises(BrokenError):
            await served
        raw.close()


def test_nodes_when_served_by_a_server_fetch_all_and_leave_in_order(loop_factory):
    objects = hashed(40, 20_000)
    origin, ends, over = ObjectDiffusion(pool_of(objects)), [], threading.Event()

    def ended(task):
        ends.append(task.exception())
        if len(ends) == 3:
            over.set()

    def serve(session):
        asyncio.get_running_loop().create_task(origin.serve(session)).add_done_callback(ended)

    async def run(group):
        edges = [MemoryPool() for _ in range(3)]
        nodes = [ObjectDiffusion(pool) for pool in edges]
        tasks = []
        for node in nodes:
            stream = await connect_stream(group, server.address)
            tasks.append(asyncio.ensure_future(node.fetch_from(stream, "origin")))
        for pool in edges:
            await until(pool, len(objects))
        for node in nodes:
            await node.close()
        assert await asyncio.gather(*tasks) == [None] * 3

    with Server(lambda: StreamSession(serve), rebalance=False, loop_factory=loop_factory) as server:
        on_each_loop(run)(loop_factory=loop_factory)
        assert over.wait(LIMIT_S)
    assert ends == [None] * 3


@on_each_loop
async def test_fetching_when_the_origin_is_reset_is_broken(group):
    async with ObjectDiffusion(MemoryPool(identify=by_name)) as node:
        stream, raw = await tcp(group)
        peer = RawPeer(raw)
        fetched = asyncio.ensure_future(node.fetch_from(stream, "raw"))
        await peer.hears("81 00 84 01 F5 00 0A")
        await peer.says("82 02 9F 41 61 FF")
        await peer.hears("82 03 9F 41 61 FF")
        raw._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
        with pytest.raises(FlowctlError):
            await fetched
        assert node.statistics().peers == 0
