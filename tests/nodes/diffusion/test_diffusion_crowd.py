"""Crowds in virtual time: slow, lying and leaving peers, and any interleaving of two nodes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from random import Random

import pytest
from chance_kit import seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from octets_kit import (
    DelayedStream,
    by_name,
    clock,
    hashed,
    link,
    named,
    pool_of,
    until,
    virtual,
)

from flowctl.errors import BrokenError, FlowctlError, RemoteProtocolError
from flowctl.nodes.diffusion.decision import CentralPlanner
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.leases import LeasePlanner
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.pool.memory import MemoryPool
from flowctl.nodes.diffusion.streams.memory import memory_pair


class Lying(MemoryPool):
    """A pool that announces what it has and sends something else of the same size."""

    async def read_objects(self, entries):
        return [bytes(entry.size_bytes) for entry in entries]


class Crowd:
    """One node that fetches from many, each behind a link of its own.

    Attributes:
        copies: how often each object was received.
        most_copies: the most copies of one object that were under way at once.
    """

    def __init__(self, seed, policy, planner):
        self.rng = Random(seed)
        self.pool = MemoryPool()
        self.diffusion = ObjectDiffusion(self.pool, policy=policy, planner=planner, clock=clock, rng=Random(seed + 1))
        self.nodes = []
        self.tasks = {}
        self.ends = {}
        self.most_copies = 0
        self.copies = Counter()
        state = self.diffusion._registry.state
        request, receive = state.on_request_objects, state.on_receive_objects

        def on_request_objects(peer, object_ids, **named):
            request(peer, object_ids, **named)
            for object_id in object_ids:
                waiting = [item for item in state.peers.values() if object_id in item.inflight]
                fresh = [
                    item for item in waiting if clock() - item.inflight[object_id].since < policy.inflight_timeout_s
                ]
                self.most_copies = max(self.most_copies, len(fresh))

        def on_receive_objects(peer, requested, objects, **named):
            receive(peer, requested, objects, **named)
            self.copies.update(object_id for object_id, _ in objects)

        state.on_request_objects, state.on_receive_objects = on_request_objects, on_receive_objects

    def join(self, name, pool, delay_s=0.01, bytes_per_s=0.0):
        node = ObjectDiffusion(pool, policy=self.diffusion.policy, clock=clock)
        self.nodes.append(node)
        mine, theirs = link(delay_s, bytes_per_s)
        served = asyncio.ensure_future(node.serve(theirs))
        served.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = asyncio.ensure_future(self._fetch(mine, name))
        self.tasks[name] = task
        return served

    async def _fetch(self, stream, name):
        try:
            await self.diffusion.fetch_from(stream, name)
            self.ends[name] = None
        except FlowctlError as error:
            self.ends[name] = error

    async def close(self):
        for node in self.nodes:
            await node.close(0)
        await self.diffusion.close(1)
        await asyncio.wait(self.tasks.values())
        state = self.diffusion._registry.state
        assert (state.peers, state.objects, state.inflight_count, state.held_bytes) == ({}, {}, 0, 0)
        assert self.diffusion._registry._apis == {}
        assert not self.diffusion._registry._received


@pytest.mark.parametrize("planner", [CentralPlanner(), LeasePlanner()], ids=["central", "leases"])
@pytest.mark.parametrize("seed", seeds(3))
@virtual
async def test_objects_of_honest_peers_when_others_are_slow_lie_or_leave_arrive_all(seed, planner):
    policy = Policy(target_object_redundancy=2, inflight_timeout_s=1.0, max_num_ids_req=50)
    crowd = Crowd(seed, policy, planner)
    objects = hashed(300, 2000)
    honest = {}
    for number in range(100):
        kind = crowd.rng.choices(["honest", "slow", "liar", "leaver"], [60, 15, 15, 10])[0]
        have = {key: objects[key] for key in sorted(crowd.rng.sample(sorted(objects), 150))}
        pool = pool_of({}) if kind != "liar" else Lying()
        pool.add(have)
        if kind == "honest":
            honest |= have
        rate = 3_000 if kind == "slow" else 1_000_000
        served = crowd.join((kind, number), pool, crowd.rng.uniform(0.001, 0.1), rate)
        if kind == "leaver":
            asyncio.get_running_loop().call_later(crowd.rng.uniform(0, 0.5), served.cancel)
    await asyncio.wait_for(until(crowd.pool, len(honest)), 60)
    assert all(crowd.pool.get(object_id) == data for object_id, data in honest.items())
    assert crowd.most_copies <= policy.target_object_redundancy
    await asyncio.sleep(15)
    lied = [error for (kind, _), error in crowd.ends.items() if kind == "liar"]
    assert all(isinstance(error, RemoteProtocolError) for error in lied)
    assert not [name for name, error in crowd.ends.items() if name[0] == "honest"]
    spare = sum(crowd.copies.values()) / len(crowd.copies)
    assert spare <= policy.target_object_redundancy + 0.5  # what was late came as well
    await crowd.close()


@virtual
async def test_objects_when_every_peer_fetches_from_others_reach_all_fifty():
    pools = [MemoryPool() for _ in range(50)]
    nodes = [
        ObjectDiffusion(pool, policy=Policy(target_object_redundancy=1), clock=clock, rng=Random(number))
        for number, pool in enumerate(pools)
    ]
    tasks = []
    for number in range(50):
        for step in (1, 7):
            mine, theirs = link(0.01, 1e6)
            tasks += [
                asyncio.ensure_future(nodes[(number + step) % 50].serve(theirs)),
                asyncio.ensure_future(nodes[number].fetch_from(mine, step)),
            ]
    objects = hashed(40, 5000)
    for number, (object_id, data) in enumerate(objects.items()):
        pools[number].add({object_id: data})
    for pool in pools:
        await until(pool, len(objects))
    received = sum(node.statistics().objects_received for node in nodes)
    assert received == 49 * len(objects)  # redundancy 1: each node fetched each object once
    for node in nodes:
        await node.close(0)
    await asyncio.gather(*tasks, return_exceptions=True)


@virtual
async def test_slow_peer_when_others_have_the_same_gets_less_work():
    policy = Policy(target_object_redundancy=1, inflight_timeout_s=0.5, max_num_objects_inflight_per_peer=4)
    crowd = Crowd(1, policy, CentralPlanner())
    objects = hashed(200, 10_000)
    for name, rate in (("slow", 50_000), ("fast", 1e6), ("other", 1e6)):
        crowd.join(name, pool_of(objects), 0.01, rate)
    await until(crowd.pool, len(objects))
    sent = [next(iter(node._outbound)).sent_count for node in crowd.nodes]
    assert sent[0] < 0.25 * min(sent[1:])
    await crowd.close()


@virtual
async def test_origin_when_it_dies_in_the_middle_costs_no_object():
    """One of two origins is lost with requests under way; the other is asked for all that it owed (OD-41)."""
    policy = Policy(target_object_redundancy=1, max_num_objects_inflight_per_peer=10)
    crowd = Crowd(1, policy, CentralPlanner())
    objects = hashed(100, 20_000)
    dies = crowd.join("dies", pool_of(objects), 0.01, 500_000)
    crowd.join("stays", pool_of(objects), 0.01, 500_000)
    await until(crowd.pool, 30)
    dies.cancel()
    await until(crowd.pool, len(objects))
    assert isinstance(crowd.ends["dies"], BrokenError)
    assert sum(crowd.copies.values()) == len(objects)
    await crowd.close()


class Stepped(DelayedStream):
    """A stream whose pieces are delivered when the test's scheduler says so, cut as it says."""

    def __init__(self, inner, steps):
        self.steps = steps
        super().__init__(inner)

    async def _carry(self):
        while True:
            _, data = await self._queue.get()
            if data is None:
                self._inner.close()
                return
            while data:
                wait, size = next(self.steps)
                await asyncio.sleep(wait)
                await self._pass_on(data[:size])
                data = data[size:]


STEPS = st.lists(
    st.tuples(st.sampled_from([0, 0.0001, 0.001]), st.sampled_from([1, 2, 7, 60, 4000])), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(STEPS, min_size=4, max_size=4),
    limits=st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 6), st.integers(1, 2)),
    added_at_s=st.sampled_from([0, 0.01, 1]),
)
@virtual
async def test_two_nodes_when_their_octets_are_interleaved_in_any_way_exchange_all(steps, limits, added_at_s):
    objects = [hashed(12, 700, b"one"), hashed(7, 300, b"two"), hashed(3, 50, b"late")]
    pools = [pool_of(objects[0]), pool_of(objects[1])]
    policy = Policy(
        max_num_ids_req=limits[0],
        max_num_objects_outstanding=limits[1],
        max_num_objects_inflight_per_peer=limits[2],
        target_object_redundancy=limits[3],
    )
    nodes = [ObjectDiffusion(pool, policy=policy, clock=clock, rng=Random(1)) for pool in pools]
    tasks, moves = [], [itertools.cycle(item) for item in steps]
    for server, client in ((0, 1), (1, 0)):
        one, other = memory_pair(1000)
        tasks += [
            asyncio.ensure_future(nodes[server].serve(Stepped(one, moves.pop()))),
            asyncio.ensure_future(nodes[client].fetch_from(Stepped(other, moves.pop()), "peer")),
        ]
    await asyncio.sleep(added_at_s)
    pools[0].add(objects[2])
    for pool in pools:
        await until(pool, 22)
    for node in nodes:
        await node.close(50)
    assert await asyncio.gather(*tasks) == [None] * 4
    assert [node.statistics().objects_known for node in nodes] == [0, 0]


WORDS = st.sampled_from(
    [
        "81 00",
        "81 05",
        "84 01 F5 00 03",
        "84 01 F4 00 03",
        "84 01 F4 01 02",
        "84 01 F5 03 03",
        "82 02 9F FF",
        "82 02 9F 82 41 61 03 FF",
        "82 02 9F 41 62 41 63 FF",
        "82 03 9F 41 61 FF",
        "82 03 9F 41 62 41 63 FF",
        "82 04 9F 43 61 2F 00 FF",
        "82 04 9F 43 62 2F 00 43 63 2F 00 FF",
        "82 04 9F 41 00 FF",
        "82",
        "FF",
    ]
)


@settings(deadline=None, max_examples=150)
@given(words=st.lists(WORDS, max_size=12), step_s=st.sampled_from([0, 0.01, 0.2]), fetches=st.booleans())
@virtual
async def test_node_when_its_peer_says_anything_ends_in_order_or_with_a_typed_error(words, step_s, fetches):
    node = ObjectDiffusion(pool_of(named(b"a", b"b", b"c", size=3), identify=by_name), clock=clock, rng=Random(1))
    if fetches:
        node.pool._shelf.free(9)
        node.pool._shelf._gone.clear()
    ours, theirs = memory_pair()
    task = asyncio.ensure_future(node.fetch_from(ours, "p") if fetches else node.serve(ours))
    with contextlib.suppress(BrokenError):
        for word in ([] if fetches else ["81 00"]) + words:
            await theirs.write(bytes.fromhex(word))
            await asyncio.sleep(step_s)
    await asyncio.sleep(0.05)
    theirs.close()
    with contextlib.suppress(RemoteProtocolError, BrokenError):
        await asyncio.wait_for(task, 30)
    state = node._registry.state
    assert (state.peers, state.objects, state.inflight_count, state.held_bytes) == ({}, {}, 0, 0)
    await node.close()
    assert node.pool._shelf._watchers == {}
