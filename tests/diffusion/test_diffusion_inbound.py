"""The inbound side, served octets written from the specification."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from octets_kit import RawPeer, by_name, clock, converse, in_virtual_time, named, pool_of, until, virtual

from flowctl.errors import BrokenError, InternalError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.nodes.diffusion.decision import CentralPlanner, PeerDecision
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.errors import (
    NoReplyError,
    ObjectIdAlreadyKnownError,
    ObjectIdsNotRequestedError,
    ObjectInvalidError,
    ObjectMissingError,
    ObjectNotRequestedError,
    ObjectRejectedError,
    ObjectSizeWrongError,
)
from flowctl.nodes.diffusion.gate import RequestEnd
from flowctl.nodes.diffusion.inbound import Inbound
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.registry import DecisionStatus, Registry
from flowctl.nodes.diffusion.streams.memory import memory_pair

ID_A, ID_B, ID_C = "82 41 61 03", "82 41 62 03", "82 41 63 03"
OBJECT_A, OBJECT_B, OBJECT_C = "43 61 2F 00", "43 62 2F 00", "43 63 2F 00"
START = "81 00  84 01 F5 00 0A"


class Fetching:
    """A node that fetches, and the raw peers it fetches from."""

    def __init__(self, *names, policy=None, validate=None, **arguments):
        self.pool = pool_of(named(*names, size=3), identify=by_name, **({"validate": validate} if validate else {}))
        self.diffusion = ObjectDiffusion(self.pool, policy=policy, clock=clock, rng=Random(1), **arguments)
        self.tasks = {}

    async def announced(self, names="p", ids=ID_A):
        """Return peers by their names, that have announced an object."""
        peers = {name: self.peer(name) for name in names}
        for peer in peers.values():
            await peer.hears(START)
            await peer.says(f"82 02 9F {ids} FF")
        return peers

    def peer(self, name="p"):
        ours, theirs = memory_pair(4_000_000)
        self.tasks[name] = asyncio.ensure_future(self.diffusion.fetch_from(ours, name))
        return RawPeer(theirs)

    async def ends(self, name="p"):
        try:
            return await asyncio.wait_for(self.tasks[name], 1)
        finally:
            self.is_clean()

    def is_clean(self):
        """See that nothing is left of peers that are gone."""
        if all(task.done() for task in self.tasks.values()):
            state = self.diffusion._registry.state
            assert (state.peers, state.objects, state.inflight_count, state.held_bytes) == ({}, {}, 0, 0)
            assert self.diffusion._registry._apis == {}


ANNOUNCED = f"""
    < {START}
    > 82 02 9F {ID_A} {ID_B} FF
"""
ASKED = f"""{ANNOUNCED}
    < 82 03 9F 41 61 41 62 FF | 84 01 F4 00 0A
"""
EACH_ALONE = f"""
    < 82 03 9F 41 61 FF | 82 03 9F 41 62 FF | 84 01 F4 00 0A
    > 82 04 9F {OBJECT_A} FF | 82 04 9F {OBJECT_B} FF
"""

EXCHANGES = {
    "cold start, objects before ids, then an acknowledgement (OD-34, OD-53)": (
        "",
        f"""{ASKED}
        > 82 04 9F {OBJECT_A} {OBJECT_B} FF | 82 02 9F FF
        < 84 01 F5 02 0A""",
    ),
    "no sizes are told: each object is fetched alone": (
        "",
        f"""< {START}
        > 82 02 9F 41 61 41 62 FF {EACH_ALONE}""",
    ),
    "one size is not told: a reply has room for one object": (
        "",
        f"""< {START}
        > 82 02 9F {ID_A} 41 62 FF {EACH_ALONE}""",
    ),
    "the pool has an object: it is never fetched, and acknowledged in order (OD-27)": (
        "ac",
        f"""< {START}
        > 82 02 9F {ID_A} {ID_B} {ID_C} FF
        < 82 03 9F 41 62 FF | 84 01 F4 01 0A
        > 82 04 9F {OBJECT_B} FF | 82 02 9F FF
        < 84 01 F5 02 0A""",
    ),
    "large objects: a reply has 256 KiB, or one object that is larger": (
        "",
        f"""< {START}
        > 82 02 9F 82 41 61 1A 00 01 86 A0 82 41 62 1A 00 01 86 A0 82 41 63 1A 00 01 86 A0 82 41 64 1A 00 1E 84 80 FF
        < 82 03 9F 41 61 41 62 FF | 82 03 9F 41 63 FF | 82 03 9F 41 64 FF | 84 01 F4 00 0A""",
    ),
    "replies after later decisions answer their own requests (OD-51)": (
        "",
        f"""< {START}
        > 82 02 9F {ID_A} FF
        < 82 03 9F 41 61 FF | 84 01 F4 00 0A
        > 82 04 9F {OBJECT_A} FF | 82 02 9F {ID_B} FF
        < 82 03 9F 41 62 FF | 84 01 F4 01 0A
        > 82 04 9F {OBJECT_B} FF
        > 82 02 9F FF
        < 84 01 F5 01 0A""",
    ),
}


@pytest.mark.parametrize(("pool", "script"), EXCHANGES.values(), ids=EXCHANGES)
@virtual
async def test_exchange_when_played_has_these_octets(pool, script):
    node = Fetching(*(name.encode() for name in pool))
    peer = node.peer()
    await converse(peer, script)
    sent = {name for name, data in ((b"a", OBJECT_A), (b"b", OBJECT_B)) if data in script}
    await until(node.pool, len(pool) + len(sent))
    assert all(node.pool.get(name) == name + b"/\0" for name in sent)


@virtual
async def test_peer_when_it_ends_with_nothing_open_is_no_error():
    node = Fetching()
    peer = node.peer()
    await converse(peer, f"{ASKED} > 82 04 9F {OBJECT_A} {OBJECT_B} FF | 82 02 9F FF\n < 84 01 F5 02 0A")
    peer.stream.close()
    assert await node.ends() is None


BEGUN = f"< {START}\n"
B_KNOWN = f"""{ANNOUNCED}
    < 82 03 9F 41 61 FF | 84 01 F4 00 0A
    > 82 04 9F {OBJECT_A} FF"""
ONE_ASKED = f"""< {START}
    > 82 02 9F {ID_A} FF
    < 82 03 9F 41 61 FF
"""
TOO_MANY = " ".join(f"41 {number:02X}" for number in range(0x61, 0x6C))

FAULTS = {
    "more ids than asked for (OD-24)": (f"{BEGUN} > 82 02 9F {TOO_MANY} FF", ObjectIdsNotRequestedError),
    "an id twice in one reply (OD-26)": (f"{BEGUN} > 82 02 9F 41 61 41 61 FF", ObjectIdAlreadyKnownError),
    "no id in a reply that may block": (f"{BEGUN} > 82 02 9F FF", RemoteProtocolError),
    "objects for ids": (f"{BEGUN} > 82 04 9F FF", RemoteProtocolError),
    "done by the wrong side": (f"{BEGUN} > 81 05", RemoteProtocolError),
    "a list of a definite length": (f"{BEGUN} > 82 02 80", RemoteProtocolError),
    "replies that nobody asked for": (
        f"{BEGUN} > " + "82 02 9F 41 61 FF 82 02 9F 41 62 FF 82 02 9F 41 63 FF",
        RemoteProtocolError,
    ),
    "an id that is too long": (f"{BEGUN} > 82 02 9F 58 41 {'61 ' * 65} FF", LimitExceededError),
    "an object that is too large": (f"{BEGUN} > 82 02 9F 82 41 61 1A 00 1E 84 81 FF", LimitExceededError),
    "an id again that is open (OD-26)": (f"{B_KNOWN}\n > 82 02 9F 41 62 FF", ObjectIdAlreadyKnownError),
    "an id again whose object came (OD-26)": (f"{B_KNOWN} | 82 02 9F 41 61 FF", ObjectIdAlreadyKnownError),
    "one object is missing (OD-28)": (f"{ASKED} > 82 04 9F {OBJECT_A} FF", ObjectMissingError),
    "all objects are missing (OD-28)": (f"{ASKED} > 82 04 9F FF", ObjectMissingError),
    "an object too many (OD-28)": (
        f"{ASKED} > 82 04 9F {OBJECT_A} {OBJECT_B} {OBJECT_C} FF",
        ObjectNotRequestedError,
    ),
    "an object twice (OD-28)": (f"{ASKED} > 82 04 9F {OBJECT_A} {OBJECT_A} {OBJECT_B} FF", ObjectNotRequestedError),
    "an object of another size": (f"{ASKED} > 82 04 9F {OBJECT_A} 44 62 2F 00 00 FF", ObjectSizeWrongError),
    "no object at all": (f"{ASKED} > 82 04 9F {OBJECT_A} 43 62 00 00 FF", ObjectInvalidError),
    "a reply much larger than announced, by its head": (f"{ONE_ASKED} > 82 04 9F 5A 00 20 00 00", LimitExceededError),
}


@pytest.mark.parametrize(("script", "fault"), FAULTS.values(), ids=FAULTS)
@virtual
async def test_reply_when_wrong_ends_the_peer_and_leaves_nothing(script, fault):
    node = Fetching(*([b"b"] if script.startswith(B_KNOWN) else []))
    await converse(node.peer(), script)
    with pytest.raises(fault) as caught:
        await node.ends()
    assert caught.type is fault
    assert len(node.pool) == (2 if script.startswith(B_KNOWN) else 0)


class Scripted:
    """An inbound peer whose decisions are written by a test, with a raw server."""

    def __init__(self, stack, *names, policy=None):
        self.pool = pool_of(named(*names, size=3), identify=by_name)
        self.registry = Registry(
            self.pool,
            policy=policy or Policy(),
            planner=self,
            clock=clock,
            rng=Random(1),
            on_error=print,
        )
        ours, theirs = memory_pair()
        self.peer = RawPeer(theirs)
        self.api = stack.enter_context(self.registry.peer("p"))
        self.inbound = Inbound(ours, self.api, self.registry, OpenGate())
        self.task = asyncio.ensure_future(self.inbound.run())

    def decide(self, context):
        return {}

    def next_round_at(self, context):
        return None

    def decides(self, req=0, ack=0, objects=(), pipeline=False):
        self.api.offer(
            PeerDecision(
                ids_to_req=req, ids_to_ack=ack, can_pipeline_ids_req=pipeline, objects_to_req_ids=frozenset(objects)
            ),
            clock(),
        )


class OpenGate:
    def __init__(self):
        self.closed = False
        self.ends = []

    def begin(self, peer, object_ids, size_bytes, send):
        if self.closed:
            return None
        send()
        return lambda end: self.ends.append((object_ids, end))


def was_asked(peer):
    """Return whether a request for objects is on its way to a peer."""
    return b"\x82\x03" in b"".join(peer.stream._incoming.pieces)


async def hears_request(peer):
    """Read until a request for objects has come."""
    while b"\x82\x03" not in peer.heard:
        peer.heard += await peer.stream.read()


def scripted(play, *names):
    from contextlib import ExitStack

    async def run():
        with ExitStack() as stack:
            it = Scripted(stack, *names)
            try:
                await play(it)
            finally:
                it.task.cancel()
                await asyncio.wait([it.task])
        await it.registry.close()

    in_virtual_time(run())


def test_objects_of_two_requests_when_under_way_belong_to_their_own():
    """Replies for a and b come when the decision about b is the latest: both are right, in their order (OD-51)."""

    async def play(it):
        it.decides(req=10)
        await it.peer.hears(START)
        await it.peer.says(f"82 02 9F {ID_A} {ID_B} FF")
        await asyncio.sleep(1)
        it.decides(objects=[b"a"])
        await it.peer.hears("82 03 9F 41 61 FF")
        it.decides(objects=[b"b"])
        await it.peer.hears("82 03 9F 41 62 FF")
        await it.peer.says(f"82 04 9F {OBJECT_A} FF")
        await until(it.pool, 1)
        await it.peer.says(f"82 04 9F {OBJECT_B} FF")
        await until(it.pool, 2)
        assert not it.task.done()

    scripted(play)


def test_fifo_when_emptied_while_a_reply_of_ids_is_under_way_is_collected_first():
    """The reply could bring ids, so whether the next request blocks is decided after it (OD-52)."""

    async def play(it):
        it.decides(req=2)
        await it.peer.hears("81 00  84 01 F5 00 02")
        await it.peer.says(f"82 02 9F {ID_A} {ID_B} FF")
        await asyncio.sleep(1)
        it.decides(req=3, pipeline=True)
        await it.peer.hears("84 01 F4 00 03")
        it.decides(req=4, ack=2)
        await it.peer.hears_nothing()
        assert it.api.status is DecisionStatus.ACTING
        await it.peer.says("82 02 9F FF")
        await it.peer.hears("84 01 F5 02 04")
        await it.peer.says(f"82 02 9F {ID_C} FF")
        await asyncio.sleep(1)
        it.decides(req=1, pipeline=True)
        await it.peer.hears("84 01 F4 00 01")
        it.decides(req=1, ack=1)
        await it.peer.hears_nothing()
        await it.peer.says("82 02 9F 41 64 FF")
        await it.peer.hears("84 01 F4 01 01")  # d came meanwhile: it stays open, so the request does not block

    scripted(play, b"a", b"b", b"c")


def test_decision_when_acted_on_is_carried_out_in_the_order_of_the_protocol():
    """What has come is collected, then objects are requested, then ids, then the decision is complete (OD-53)."""

    async def play(it):
        it.decides(req=2)
        await it.peer.hears("81 00  84 01 F5 00 02")
        await it.peer.says(f"82 02 9F {ID_A} {ID_B} FF")
        await asyncio.sleep(1)
        steps = []
        for name in ("on_receive_objects", "on_request_objects", "on_request_ids", "on_decision_completed"):
            method = getattr(it.api, name)
            setattr(
                it.api,
                name,
                lambda *args, _name=name, _method=method, **named: (steps.append(_name), _method(*args, **named)),
            )
        it.decides(objects=[b"a"])
        await it.peer.hears("82 03 9F 41 61 FF")
        steps.clear()
        it.inbound._inbox.decoder.feed(bytes.fromhex(f"82 04 9F {OBJECT_A} FF"))  # has come, and nobody was told yet
        it.decides(req=1, ack=1, objects=[b"b"])
        await it.peer.hears("82 03 9F 41 62 FF  84 01 F4 01 01")
        assert steps == ["on_receive_objects", "on_request_objects", "on_request_ids", "on_decision_completed"]

    scripted(play)


def test_leaving_when_replies_are_under_way_ignores_them_and_then_says_done():
    """No decision is read any more, what comes is drained, and Done is the last word (OD-54)."""

    async def play(it):
        it.decides(req=2)
        await it.peer.hears("81 00  84 01 F5 00 02")
        await it.peer.says(f"82 02 9F {ID_A} {ID_B} FF")
        await asyncio.sleep(1)
        it.decides(objects=[b"a"], req=1, pipeline=True)
        await it.peer.hears("82 03 9F 41 61 FF  84 01 F4 00 01")
        it.inbound.leave()
        it.decides(objects=[b"b"])
        await it.peer.hears_nothing()
        await it.peer.says(f"82 04 9F {OBJECT_A} FF")
        await it.peer.hears_nothing()
        await it.peer.says("82 02 9F 41 63 FF")
        await it.peer.hears("81 05")
        await it.peer.hears_the_end()
        assert await it.task is None
        assert len(it.pool) == 0

    scripted(play)


def test_leaving_when_the_peer_waits_for_something_new_ends_at_once():
    """Nothing is under way then, and the peer may not be spoken to: the end of the stream is the end (OD-54)."""

    async def play(it):
        it.decides(req=2)
        await it.peer.hears("81 00  84 01 F5 00 02")
        it.inbound.leave()
        await it.peer.hears_the_end()
        assert await it.task is None

    scripted(play)


@virtual
async def test_decision_when_read_waits_is_marked_and_must_be_completed():
    """Reading waits for one, marks it, and a second reading before its completion is an error (OD-49)."""
    registry = Registry(
        pool_of({}), policy=Policy(), planner=ObjectDiffusion(pool_of({}))._registry._planner, clock=clock,
        rng=Random(1), on_error=print,
    )  # fmt: skip
    with registry.peer("p") as api:
        reading = asyncio.ensure_future(api.read_decision())
        await asyncio.sleep(0)
        assert not reading.done()
        with pytest.raises(LocalProtocolError):
            api.on_decision_completed()
        assert await reading == PeerDecision(ids_to_req=10)
        assert api.status is DecisionStatus.ACTING
        with pytest.raises(LocalProtocolError):
            await api.read_decision()
        api.on_request_ids(0, 10, blocking=True)
        api.on_decision_completed()
        assert api.status is DecisionStatus.COMPLETED
    await registry.close()


@virtual
async def test_decision_when_the_peer_is_registered_no_more_is_none_and_changes_are_refused():
    registry = Registry(
        pool_of({}), policy=Policy(), planner=CentralPlanner(), clock=clock, rng=Random(1), on_error=print
    )
    with registry.peer("p") as api:
        assert (await api.read_decision()).ids_to_req == 10
        api.on_decision_completed()
        api.on_request_ids(0, 10, blocking=True)
        waiting = asyncio.ensure_future(api.read_decision())
        await asyncio.sleep(1)
        assert not waiting.done()
    assert await waiting is None
    assert await api.read_decision() is None
    with registry.peer("p") as other:
        for change in (
            lambda: api.on_request_ids(0, 5, blocking=True),
            lambda: api.on_receive_ids(0, []),
            lambda: api.on_request_objects([b"a"]),
            lambda: api.on_receive_objects([], []),
            api.leave,
        ):
            with pytest.raises(LocalProtocolError, match="not registered any more"):
                change()
        assert (other.state.ids_in_flight, len(other.state.fifo)) == (0, 0)
    await registry.close()


async def two_that_have_one_object():
    """Return a node with redundancy 1 and its peers p, who was asked for the object, and q, who has it too."""
    node = Fetching(policy=Policy(target_object_redundancy=1, inflight_timeout_s=0))
    peers = [node.peer("p"), node.peer("q")]
    for peer, then in zip(peers, ("82 03 9F 41 61 FF", "84 01 F4 00 0A"), strict=True):
        await peer.hears(START)
        await peer.says(f"82 02 9F {ID_A} FF")
        await peer.hears(then)
    return node, *peers


def test_objects_of_a_peer_that_leaves_when_in_flight_are_asked_for_elsewhere_at_once():
    async def run():
        node, _, other = await two_that_have_one_object()
        node.diffusion.leave("p")
        await other.hears("82 03 9F 41 61 FF")
        assert node.diffusion.statistics().objects_inflight == 1
        for task in node.tasks.values():
            task.cancel()
        await asyncio.wait(node.tasks.values())
        node.is_clean()

    in_virtual_time(run(), 5)


def test_stream_when_it_ends_while_ids_are_open_is_broken_also_where_nothing_was_asked():
    async def run():
        node, _, other = await two_that_have_one_object()
        await other.says("82 02 9F FF")
        other.stream.close()
        with pytest.raises(BrokenError, match="in state Idle, 1 ids are open"):
            await node.ends("q")
        node.tasks["p"].cancel()

    in_virtual_time(run(), 5)


@virtual
async def test_request_when_its_reply_is_wrong_ends_as_lost_for_the_gate():
    gate = OpenGate()
    node = Fetching(gate=gate)
    peer = (await node.announced())["p"]
    await peer.hears("82 03 9F 41 61 FF")
    await peer.says(f"82 04 9F {OBJECT_B} FF")
    with pytest.raises(ObjectNotRequestedError):
        await node.ends()
    assert gate.ends == [((b"a",), RequestEnd.LOST)]


@virtual
async def test_decision_when_unread_is_replaced_and_when_acted_on_stays():
    """Rounds go over what nobody has read; what is being carried out is left alone (OD-47)."""
    made = []

    class Planner:
        def decide(self, context):
            made.append(dict(context.busy))
            return {
                peer: PeerDecision(ids_to_req=len(made)) for peer in context.state.peers if peer not in context.busy
            }

        def next_round_at(self, context):
            return None

    registry = Registry(pool_of({}), policy=Policy(), planner=Planner(), clock=clock, rng=Random(1), on_error=print)
    with registry.peer("p") as one, registry.peer("q") as other:
        await asyncio.sleep(1)
        registry.poke()
        await asyncio.sleep(1)
        first = await one.read_decision()
        registry.poke()
        await asyncio.sleep(1)
        assert first == PeerDecision(ids_to_req=2)
        assert one.acting_on == first
        assert made[-1] == {"p": first}
        assert await other.read_decision() == PeerDecision(ids_to_req=3)
    await registry.close()


@virtual
async def test_rounds_when_nothing_happens_do_not_come():
    node = Fetching()
    peers = [node.peer(number) for number in range(10)]
    for peer in peers:
        await peer.hears(START)
    await asyncio.sleep(1)
    rounds = node.diffusion.statistics().rounds
    assert rounds <= 3
    await asyncio.sleep(3600)
    assert node.diffusion.statistics().rounds == rounds


@virtual
async def test_ids_when_a_peer_has_no_new_ones_are_asked_for_again_after_a_while_only():
    node = Fetching(policy=Policy(target_object_redundancy=1))
    peers = (await node.announced("pq")).values()
    await asyncio.sleep(0.05)
    (waiting,) = (peer for peer in peers if not was_asked(peer))
    began, asked = clock(), 0
    while clock() - began < 1.0:
        await waiting.hears("84 01 F4 00 0A")
        await waiting.says("82 02 9F FF")
        asked += 1
    assert 9 <= asked <= 12


@pytest.mark.parametrize(("says", "state"), [("82 02 9F 82 41 61 03 FF", "Objects"), ("82 02 9F 41 61 FF", "Objects")])
@virtual
async def test_reply_when_it_takes_longer_than_ten_seconds_ends_the_peer(says, state):
    node = Fetching(policy=Policy(inflight_timeout_s=0))
    peer = node.peer()
    await peer.hears(START)
    await asyncio.sleep(100)
    await peer.says(says)
    began = clock()
    with pytest.raises(NoReplyError, match=f"10 s in state {state}"):
        await node.tasks["p"]
    assert 9.9 < clock() - began < 10.2


@virtual
async def test_object_when_its_peer_is_slow_is_asked_for_elsewhere():
    node = Fetching(policy=Policy(target_object_redundancy=1, inflight_timeout_s=1.0))
    peers = (await node.announced("pq")).values()
    await asyncio.sleep(0.5)
    asked = [peer for peer in peers if was_asked(peer)]
    assert len(asked) == 1
    await asyncio.sleep(1.0)
    assert all(was_asked(peer) for peer in peers)


@virtual
async def test_object_when_the_pool_rejects_it_ends_its_peer_and_another_is_asked():
    """Who sends an invalid object is disconnected; others that have the id are asked for it (OD-56)."""
    node = Fetching(
        policy=Policy(target_object_redundancy=1),
        validate=lambda object_id, data: "bad signature" if data.endswith(b"\1") else None,
    )
    peers = await node.announced("pq")
    await asyncio.sleep(0.05)
    liar = next(name for name, peer in peers.items() if was_asked(peer))
    (other,) = set(peers) - {liar}
    await peers[liar].hears("82 03 9F 41 61 FF")
    await peers[liar].says("82 04 9F 43 61 2F 01 FF")
    with pytest.raises(ObjectRejectedError, match="bad signature"):
        await node.ends(liar)
    await peers[other].hears("84 01 F4 00 0A")
    await peers[other].says("82 02 9F FF")
    await peers[other].hears("82 03 9F 41 61 FF")
    await peers[other].says(f"82 04 9F {OBJECT_A} FF")
    await until(node.pool, 1)
    assert node.diffusion.statistics().objects_rejected == 1


@virtual
async def test_objects_of_two_peers_when_they_come_at_once_are_added_one_after_the_other():
    """Calls of the pool never overlap, and nothing is on its way when they are over (OD-32, OD-33)."""
    node = Fetching(policy=Policy(target_object_redundancy=2))
    inside, most, add = 0, 0, node.pool.add_objects

    async def slow(objects):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.3)
        inside -= 1
        return await add(objects)

    node.pool.add_objects = slow
    peers = await node.announced("pq")
    for peer in peers.values():
        await hears_request(peer)
    for peer in peers.values():
        await peer.says(f"82 04 9F {OBJECT_A} FF")
    await asyncio.sleep(0.1)
    states = node.diffusion._registry.state.peers
    assert [set(state.owt) for state in states.values()] == [{b"a"}, {b"a"}]
    await asyncio.sleep(1)
    assert [set(state.owt) for state in states.values()] == [set(), set()]
    assert most == 1


@virtual
async def test_pool_when_it_fails_ends_the_peer_with_what_happened():
    node = Fetching()

    async def fail(objects):
        raise OSError("no such disk")

    node.pool.add_objects = fail
    peer = (await node.announced())["p"]
    await peer.hears("82 03 9F 41 61 FF")
    await peer.says(f"82 04 9F {OBJECT_A} FF")
    with pytest.raises(InternalError, match="no such disk"):
        await node.ends()


@virtual
async def test_peer_when_it_is_gone_or_cancelled_leaves_no_state():
    node = Fetching()
    for reply, rest, error in (("", "", None), (f"82 02 9F {ID_A} FF", "82 04 9F", BrokenError)):
        peer = node.peer()
        await peer.hears(START)
        await peer.says(reply)
        await asyncio.sleep(0.1)
        await peer.says(rest)
        await asyncio.sleep(0.1)
        peer.stream.close()
        if error is None:
            await node.ends()
        else:
            with pytest.raises(error):
                await node.ends()
    peer = (await node.announced())["p"]
    await asyncio.sleep(0.1)
    node.tasks["p"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await node.ends()


@virtual
async def test_gate_when_closed_lets_others_be_asked_and_is_tried_again_when_it_opens():
    gates = {"p": OpenGate(), "q": OpenGate()}
    gates["p"].closed = gates["q"].closed = True

    class Gate:
        def begin(self, peer, object_ids, size_bytes, send):
            return gates[peer].begin(peer, object_ids, size_bytes, send)

    node = Fetching(gate=Gate(), policy=Policy(target_object_redundancy=1))
    peers = await node.announced("pq")
    await asyncio.sleep(1)
    assert all(not was_asked(peer) for peer in peers.values())
    gates["q"].closed = False
    node.diffusion.gate_opened("q")
    await hears_request(peers["q"])
    peers["q"].stream.close()
    with pytest.raises(BrokenError):
        await node.ends("q")
    assert gates["q"].ends == [((b"a",), RequestEnd.LOST)]
    gates["p"].closed = False
    node.diffusion.gate_opened("p")
    await hears_request(peers["p"])
    await peers["p"].says(f"82 02 9F FF 82 04 9F {OBJECT_A} FF")
    await until(node.pool, 1)
    node.tasks["p"].cancel()
    await asyncio.wait([node.tasks["p"]])
    assert gates["p"].ends == [((b"a",), RequestEnd.REPLIED)]


@virtual
async def test_window_when_full_and_nothing_to_acknowledge_sends_nothing():
    """Two ids may be open, are, and cannot be fetched: no message is sent until that changes (OD-38)."""
    gate = OpenGate()
    gate.closed = True
    node = Fetching(gate=gate, policy=Policy(max_num_objects_outstanding=2))
    peer = node.peer()
    await peer.hears("81 00  84 01 F5 00 02")
    await peer.says(f"82 02 9F {ID_A} {ID_B} FF")
    await peer.hears_nothing()
    gate.closed = False
    node.diffusion.gate_opened("p")
    await peer.hears("82 03 9F 41 61 41 62 FF")
    await peer.says(f"82 04 9F {OBJECT_A} {OBJECT_B} FF")
    await peer.hears("84 01 F5 02 02")


@virtual
async def test_gate_when_it_opens_while_it_is_asked_is_asked_again():
    asked = []

    class Gate:
        def begin(self, peer, object_ids, size_bytes, send):
            asked.append(object_ids)
            if len(asked) == 1:
                node.diffusion.gate_opened(peer)
                return None
            send()
            return lambda end: None

    node = Fetching(gate=Gate())
    peer = (await node.announced())["p"]
    await peer.hears("84 01 F4 00 0A 82 03 9F 41 61 FF")
    assert asked == [(b"a",), (b"a",)]


@virtual
async def test_planner_when_it_raises_is_reported_and_the_next_round_goes_on():
    told = []
    node = Fetching(on_error=lambda where, error: told.append((where, str(error))))
    planner = node.diffusion._registry._planner

    class Fails:
        def decide(self, context):
            if not told:
                raise ZeroDivisionError("once")
            return planner.decide(context)

        def next_round_at(self, context):
            return None

    node.diffusion._registry._planner = Fails()
    peer = node.peer()
    await asyncio.sleep(1)
    node.diffusion._registry.poke()
    await peer.hears(START)
    assert told == [("planner", "once")]
