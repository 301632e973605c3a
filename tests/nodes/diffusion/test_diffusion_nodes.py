"""Whole nodes of object diffusion over streams that cut and delay as they like, in virtual time."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from diffusion_kit import check_index
from hypothesis import given, settings
from hypothesis import strategies as st
from octets_kit import clock, hashed, in_virtual_time, pool_of, until, virtual

from flowctl.errors import BrokenError, ClosedError, InternalError, LocalProtocolError
from flowctl.nodes.diffusion.decision import CentralPlanner
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.errors import DiffusionError
from flowctl.nodes.diffusion.leases import LeasePlanner
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.pool.memory import MemoryPool
from flowctl.nodes.diffusion.registry import Registry
from flowctl.nodes.diffusion.streams.memory import memory_pair
from flowctl.nodes.diffusion.wire.protocol import Announced

VALID, INVALID = b"+", b"-"


class Shaky:
    """A stream that hands out what has come in pieces of any size, each after a while."""

    def __init__(self, stream, rng, latency_s):
        self._stream = stream
        self._rng = rng
        self._latency_s = latency_s
        self._rest = b""

    async def read(self):
        data = self._rest or await self._stream.read()
        await asyncio.sleep(self._rng.choice([0, self._latency_s * self._rng.random()]))
        size = self._rng.choice([len(data), self._rng.randint(0, len(data))]) or len(data)
        self._rest = data[size:]
        return data[:size]

    async def write(self, data):
        await self._stream.write(data)

    def close(self, details=""):
        self._stream.close(details)


def number_of(data):
    """Return the id of an object: it says nothing of whether the object is valid."""
    return data[:2]


def judge(object_id, data):
    """Find invalid what does not end as it should."""
    return None if data.endswith(VALID) else "it ends wrongly"


def made(numbers, end=VALID):
    return {key: key + bytes(number * 7 % 38) + end for number in numbers for key in [number.to_bytes(2, "big")]}


class Watching:
    """A planner that looks at the state in each round."""

    def __init__(self, planner):
        self._planner = planner
        self.rounds = 0
        self.errors = []

    def note(self, *arguments):
        self.errors.append(arguments)

    def decide(self, context):
        self.rounds += 1
        check_index(context.state)
        policy, count, size_bytes = context.policy, 0, 0
        for item in context.state.peers.values():
            late = context.overdue(item)
            count += len(item.inflight) - len(late)
            size_bytes += item.inflight_bytes - sum(item.inflight[key].size_bytes for key in late)
            assert len(item.fifo) + item.ids_in_flight <= policy.max_num_objects_outstanding
            assert len(item.inflight) <= policy.max_num_objects_inflight_per_peer
            assert item.inflight_bytes + item.owt_bytes <= policy.max_bytes_inflight_per_peer
        assert count <= policy.max_num_objects_inflight_total
        assert size_bytes <= policy.max_bytes_inflight_total
        return self._planner.decide(context)

    def next_round_at(self, context):
        return self._planner.next_round_at(context)


KINDS = ("honest", "honest", "slow", "lies", "leaves")


@st.composite
def crowds(draw):
    numbers = st.sets(st.integers(0, 30))
    return draw(st.lists(st.tuples(st.sampled_from(KINDS), numbers, numbers), min_size=1, max_size=5))


@settings(deadline=None)
@given(crowds(), st.sampled_from([CentralPlanner(), LeasePlanner()]), st.booleans(), st.data())
def test_nodes_when_peers_are_of_any_kind_have_all_objects_of_honest_ones(crowd, planner, patient, data):
    policy = Policy(
        max_num_objects_outstanding=data.draw(st.integers(1, 20)),
        max_num_ids_req=data.draw(st.integers(1, 10)),
        max_num_objects_inflight_per_peer=data.draw(st.integers(1, 8)),
        max_num_objects_inflight_total=data.draw(st.integers(1, 20)),
        target_object_redundancy=data.draw(st.integers(1, 3)),
        max_object_size_bytes=60,
        max_bytes_inflight_per_peer=data.draw(st.integers(60, 300)),
        max_bytes_inflight_total=data.draw(st.integers(60, 600)),
        inflight_timeout_s=0.0 if patient else 0.5,
    )
    rng = Random(data.draw(st.integers(0, 1000)))
    expected = {
        key: octets for kind, now, later in crowd if kind in "honest slow" for key, octets in made(now | later).items()
    }
    watching = Watching(planner)
    ends = in_virtual_time(diffuse(crowd, policy, watching, rng, expected), limit_s=3000.0)
    assert watching.errors == []
    assert watching.rounds
    for (kind, *_), end in zip(crowd, ends, strict=True):
        allowed = {"lies": (DiffusionError, type(None)), "leaves": (BrokenError, type(None))}
        assert isinstance(end, allowed.get(kind, type(None))), (kind, end)


async def diffuse(crowd, policy, planner, rng, expected):
    """Fetch from a crowd until all that is expected is there; return how each peer ended."""
    loop = asyncio.get_running_loop()
    pool = MemoryPool(identify=number_of, validate=judge)
    node = ObjectDiffusion(pool, policy=policy, planner=planner, clock=loop.time, rng=rng, on_error=planner.note)
    servers, fetching, pools = [], [], []
    for number, (kind, now, _) in enumerate(crowd):
        pools.append(MemoryPool(identify=number_of))
        pools[-1].add(made(now, INVALID if kind == "lies" else VALID))
        server = ObjectDiffusion(pools[-1], policy=policy, clock=loop.time)
        there, here = memory_pair(rng.choice([7, 100, 10_000]))
        latency_s = 3.0 if kind == "slow" else 0.02
        servers.append(asyncio.ensure_future(server.serve(Shaky(there, rng, latency_s / 30))))
        fetching.append(asyncio.ensure_future(node.fetch_from(Shaky(here, rng, latency_s / 30), number)))
        if kind == "leaves":
            loop.call_later(rng.random(), there.close)
    await asyncio.sleep(0.3)
    for peer_pool, (kind, _, later) in zip(pools, crowd, strict=True):
        peer_pool.add(made(later, INVALID if kind == "lies" else VALID))
    await until_there(pool, expected)
    assert all(pool.get(key) in {octets, None} for key, octets in expected.items())
    statistics = node.statistics()
    if not policy.inflight_timeout_s and all(kind in "honest slow" for kind, *_ in crowd):
        assert statistics.objects_received <= policy.target_object_redundancy * len(expected)
    await node.close(grace_s=100.0)
    ends = await asyncio.gather(*fetching, return_exceptions=True)
    await asyncio.gather(*servers, return_exceptions=True)
    left = node.statistics()
    assert (left.peers, left.objects_known, left.objects_inflight, left.objects_to_pool) == (0, 0, 0, 0)
    return ends


async def until_there(pool, expected):
    grown = asyncio.Event()
    unwatch = pool.watch(grown.set)
    while not all(map(pool.has_object, expected)):
        grown.clear()
        await grown.wait()
    unwatch()


class _Stuck(MemoryPool):
    """A pool that takes nothing for now."""

    async def add_objects(self, objects):
        await asyncio.get_running_loop().create_future()


def test_objects_of_peers_that_are_gone_when_the_pool_is_slow_are_not_kept():
    """A peer that leaves takes what waits for the pool with it: coming again and again fills no memory."""

    async def run():
        registry = Registry(
            _Stuck(identify=number_of),
            policy=Policy(),
            planner=CentralPlanner(),
            clock=lambda: 0.0,
            rng=Random(1),
            on_error=print,
        )
        for _ in range(5):
            with registry.peer("a") as api:
                for key, data in made(range(3)).items():
                    api.on_request_ids(0, 1, blocking=True)
                    api.on_receive_ids(1, [Announced(key, len(data))])
                    api.on_request_objects([key])
                    api.on_receive_objects([key], [(key, data)])
                    await asyncio.sleep(0)
                assert registry.statistics().objects_to_pool == 3
        assert registry.statistics().objects_to_pool == 0
        return len(registry._received)

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize("fault", [ValueError("full"), asyncio.CancelledError()], ids=repr)
def test_objects_that_a_pool_has_failed_to_take_come_again(fault):
    """Whatever it raises, the objects of others are added after it, and those of this one are asked for elsewhere."""

    class Failing(MemoryPool):
        """Fails once."""

        failed = False

        async def add_objects(self, objects):
            if not self.failed:
                self.failed = True
                raise fault
            return await super().add_objects(objects)

    async def run():
        pool = Failing()
        source = ObjectDiffusion(pool_of(hashed(5)), clock=clock)
        node = ObjectDiffusion(pool, policy=Policy(target_object_redundancy=1), clock=clock)
        tasks = []
        for name in "ab":
            stream, ours = memory_pair()
            tasks.append(asyncio.ensure_future(source.serve(stream)))
            tasks.append(asyncio.ensure_future(node.fetch_from(ours, name)))
        await until(pool, 5)
        figures = node.statistics()
        await node.close()
        await source.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        return figures.objects_inflight, [type(end) for end in ends if end is not None]

    inflight_count, ends = in_virtual_time(run())
    assert inflight_count == 0
    assert ends.count(InternalError) == 1


@virtual
async def test_peer_when_its_name_is_taken_is_refused():
    origin, edge = pool_of(hashed(1)), MemoryPool()
    async with ObjectDiffusion(origin) as serving, ObjectDiffusion(edge) as fetching:
        server, client = memory_pair()
        served = asyncio.ensure_future(serving.serve(server))
        fetched = asyncio.ensure_future(fetching.fetch_from(client, "a"))
        await until(edge, 1)
        other, second = memory_pair()
        with pytest.raises(LocalProtocolError, match="registered"):
            await fetching.fetch_from(second, "a")
        assert await other.read() == b""
        origin.add(hashed(2))
        await until(edge, 2)
    await asyncio.gather(served, fetched)


@virtual
async def test_diffusion_when_closed_takes_no_more_peers():
    diffusion = ObjectDiffusion(MemoryPool(), policy=Policy())
    await diffusion.close()
    await diffusion.close()
    for begin in (diffusion.serve, lambda stream: diffusion.fetch_from(stream, "a")):
        ours, theirs = memory_pair()
        with pytest.raises(ClosedError):
            await begin(ours)
        assert await theirs.read() == b""
