"""Nodes of object diffusion, joined by streams: in memory, and over TCP on both loops."""

from __future__ import annotations

import asyncio
import socket

import pytest
from octets_kit import on_loop

from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.leases import LeasePlanner
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.pool.memory import MemoryPool
from flowctl.nodes.diffusion.pool.pool import sha256_of
from flowctl.nodes.diffusion.streams.memory import memory_pair
from flowctl.nodes.diffusion.streams.tcp import connect_stream, open_stream

LIMIT_S = 20


def some_objects(count, size=100, salt=b""):
    return {sha256_of(data): data for number in range(count) for data in [b"%d%s/" % (number, salt) * (size // 4)]}


async def until(pool, count):
    grown = asyncio.Event()
    unwatch = pool.watch(grown.set)
    while len(pool) < count:
        grown.clear()
        await grown.wait()
    unwatch()


def pool_of(objects):
    pool = MemoryPool()
    pool.add(objects)
    return pool


async def tcp_pair(group):
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    theirs = await connect_stream(group, listener.getsockname())
    ours, _ = await loop.sock_accept(listener)
    listener.close()
    return open_stream(group, ours), theirs


@pytest.mark.parametrize("kind", ["memory", "tcp"])
@pytest.mark.parametrize("planner", [None, LeasePlanner()], ids=["central", "leases"])
def test_objects_of_a_peer_when_fetched_arrive_all_and_so_do_new_ones(loop_factory, kind, planner):
    async def run(group):
        objects = some_objects(60, 30_000)
        origin, edge = pool_of(objects), MemoryPool()
        server, client = await tcp_pair(group) if kind == "tcp" else memory_pair()
        async with ObjectDiffusion(origin) as serving, ObjectDiffusion(edge, planner=planner) as fetching:
            served = asyncio.ensure_future(serving.serve(server))
            fetched = asyncio.ensure_future(fetching.fetch_from(client, "origin"))
            await until(edge, len(objects))
            late = some_objects(3, salt=b"late")
            origin.add(late)
            await until(edge, len(objects) + 3)
            assert all(edge.get(object_id) == data for object_id, data in (objects | late).items())
        assert await asyncio.gather(served, fetched) == [None, None]
        assert fetching.statistics().peers == 0
        assert fetching.statistics().objects_received == len(objects) + 3

    on_loop(loop_factory, run)


def test_peer_when_its_name_is_taken_is_refused():
    async def run():
        origin, edge = pool_of(some_objects(1)), MemoryPool()
        async with ObjectDiffusion(origin) as serving, ObjectDiffusion(edge) as fetching:
            server, client = memory_pair()
            served = asyncio.ensure_future(serving.serve(server))
            fetched = asyncio.ensure_future(fetching.fetch_from(client, "a"))
            await until(edge, 1)
            other, second = memory_pair()
            with pytest.raises(LocalProtocolError, match="registered"):
                await fetching.fetch_from(second, "a")
            assert await other.read() == b""
            origin.add(some_objects(2))
            await until(edge, 2)
        await asyncio.gather(served, fetched)

    asyncio.run(run())


def test_diffusion_when_closed_takes_no_more_peers():
    async def run():
        diffusion = ObjectDiffusion(MemoryPool(), policy=Policy())
        await diffusion.close()
        await diffusion.close()
        for begin in (diffusion.serve, lambda stream: diffusion.fetch_from(stream, "a")):
            ours, theirs = memory_pair()
            with pytest.raises(ClosedError):
                await begin(ours)
            assert await theirs.read() == b""

    asyncio.run(run())
