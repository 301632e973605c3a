"""One origin of an edge: when it is tried again."""

from __future__ import annotations

import asyncio
import time
from random import Random

from flowctl.live.cluster.edge.gate import SchedulerGate
from flowctl.live.cluster.edge.upstream import STALL_BACKOFF, OriginAddress, Upstream, UpstreamState
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.pool.memory import MemoryPool
from flowctl.nodes.diffusion.streams.memory import memory_pair
from flowctl.nodes.diffusion.wire import protocol
from flowctl.nodes.diffusion.wire.codec import encode
from flowctl.nodes.diffusion.wire.protocol import Announced, ReplyIds


def test_origin_when_it_does_not_answer_in_time_is_tried_again_soon_and_not_banned(monkeypatch):
    """It, or the way to it, stood still: as a liar all behind that way would be left out for a minute."""
    monkeypatch.setitem(protocol.TIME_LIMIT_S, protocol.State.OBJECTS, 0.05)

    async def run():
        gate = SchedulerGate(time.monotonic, Random(1))
        served = []

        async def announce_and_fall_silent(stream):
            heard = b""
            while len(heard) < 7:  # Init, and a request for ids
                heard += await stream.read()
            await stream.write(encode(ReplyIds((Announced(bytes(32), 3),))))

        async def connect(address):
            ours, theirs = memory_pair()
            served.append(asyncio.ensure_future(announce_and_fall_silent(theirs)))
            return ours

        async with ObjectDiffusion(MemoryPool(), gate=gate) as diffusion:
            upstream = Upstream(OriginAddress("origin"), connect, diffusion, gate, time.monotonic, Random(1), id)
            waits = [await upstream._fetch_once() for _ in range(3)]
            found = upstream.statistics()
            assert (found.state, found.faults, found.connections) == (UpstreamState.RESTING.value, 0, 3)
            assert "no reply within" in found.why
            assert all(wait <= STALL_BACKOFF.first_s * 2**number for number, wait in enumerate(waits)), waits
        gate.stop()

    asyncio.run(asyncio.wait_for(run(), 20))
