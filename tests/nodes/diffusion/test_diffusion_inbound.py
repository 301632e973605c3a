"""The inbound side, served octets written from the specification."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

import pytest
from octets_kit import RawPeer, by_name, check_conversation, clock, named, octets_of, pool_of, until, virtual

from flowctl.errors import BrokenError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.nodes.diffusion.decision import CentralPlanner, PeerDecision
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.errors import (
    NoReplyError,
    ObjectIdsNotRequestedError,
    ObjectInvalidError,
    ObjectMissingError,
    ObjectNotRequestedError,
    ObjectRejectedError,
)
from flowctl.nodes.diffusion.gate import RequestEnd
from flowctl.nodes.diffusion.inbound import Inbound
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.registry import DecisionStatus, Registry
from flowctl.nodes.diffusion.streams.memory import memory_pair

START = "81 00  84 01 F5 00 0A"


class Fetching:
    """A node that fetches, and the raw peers it fetches from."""

    def __init__(self, *names, policy=None, validate=None, **arguments):
        self.pool = pool_of(named(*names, size=3), identify=by_name, **({"validate": validate} if validate else {}))
        self.diffusion = ObjectDiffusion(self.pool, policy=policy, clock=clock, rng=Random(1), **arguments)
        self.tasks = {}

    async def announced(self, names="p", ids="#a"):
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
    > 82 02 9F #a #b FF
"""
ASKED = f"""{ANNOUNCED}
    < 82 03 9F 41 61 41 62 FF | 84 01 F4 00 0A
"""
EACH_ALONE = """
    < 82 03 9F 41 61 FF | 82 03 9F 41 62 FF | 84 01 F4 00 0A
    > 82 04 9F =a FF | 82 04 9F =b FF
"""

EXCHANGES = {
    "cold start, objects before ids, then an acknowledgement (OD-34, OD-53)": (
        "",
        f"""{ASKED}
        > 82 04 9F =a =b FF | 82 02 9F FF
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
        > 82 02 9F #a 41 62 FF {EACH_ALONE}""",
    ),
    "the pool has an object: it is never fetched, and acknowledged in order (OD-27)": (
        "ac",
        f"""< {START}
        > 82 02 9F #a #b #c FF
        < 82 03 9F 41 62 FF | 84 01 F4 01 0A
        > 82 04 9F =b FF | 82 02 9F FF
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
        > 82 02 9F #a FF
        < 82 03 9F 41 61 FF | 84 01 F4 00 0A
        > 82 04 9F =a FF | 82 02 9F #b FF
        < 82 03 9F 41 62 FF | 84 01 F4 01 0A
        > 82 04 9F =b FF
        > 82 02 9F FF
        < 84 01 F5 01 0A""",
    ),
}


@pytest.mark.parametrize(("pool", "script"), EXCHANGES.values(), ids=EXCHANGES)
@virtual
async def test_exchange_when_played_has_these_octets(pool, script):
    node = Fetching(*(name.encode() for name in pool))
    peer = node.peer()
    await check_conversation(peer, script)
    sent = {name for name, data in ((b"a", "=a"), (b"b", "=b")) if data in script}
    await until(node.pool, len(pool) + len(sent))
    assert all(node.pool.get(name) == name + b"/\0" for name in sent)


@virtual
async def test_peer_when_it_ends_with_nothing_open_is_no_error():
    node = Fetching()
    peer = node.peer()
    await check_conversation(peer, f"{ASKED} > 82 04 9F =a =b FF | 82 02 9F FF\n < 84 01 F5 02 0A")
    peer.stream.close()
    assert await node.ends() is None


BEGUN = f"< {START}\n"
ONE_ASKED = f"""< {START}
    > 82 02 9F #a FF
    < 82 03 9F 41 61 FF
"""
TOO_MANY = " ".join(f"41 {number:02X}" for number in range(0x61, 0x6C))

FAULTS = {  # what else may be wrong with ids and objects is for the state
    "more ids than asked for (OD-24)": (f"{BEGUN} > 82 02 9F {TOO_MANY} FF", ObjectIdsNotRequestedError),
    "no id in a reply that may block": (f"{BEGUN} > 82 02 9F FF", RemoteProtocolError),
    "objects for ids": (f"{BEGUN} > 82 04 9F FF", RemoteProtocolError),
    "done by the wrong side": (f"{BEGUN} > 81 05", RemoteProtocolError),
    "replies that nobody asked for": (f"{BEGUN} > " + "82 02 9F 'a FF " * 3, RemoteProtocolError),
    "one object is missing (OD-28)": (f"{ASKED} > 82 04 9F =a FF", ObjectMissingError),
    "no object at all": (f"{ASKED} > 82 04 9F =a 43 62 00 00 FF", ObjectInvalidError),
    "a reply much larger than announced, by its head": (f"{ONE_ASKED} > 82 04 9F 5A 00 20 00 00", LimitExceededError),
}


@pytest.mark.parametrize(("script", "fault"), FAULTS.values(), ids=FAULTS)
@virtual
async def test_reply_when_wrong_ends_the_peer_and_leaves_nothing(script, fault):
    node = Fetching()
    await check_conversation(node.peer(), script)
    with pytest.raises(fault) as caught:
        await node.ends()
    assert caught.type is fault
    assert len(node.pool) == 0


class Scripted:
    """An inbound peer whose decisions are written by a test, with a raw server."""

    def __init__(self, *names):
        self.pool = pool_of(named(*names, size=3), identify=by_name)
        self.registry = registry_of(self, self.pool)
        self.stack = contextlib.ExitStack()

    async def __aenter__(self):
        ours, theirs = memory_pair()
        self.peer = RawPeer(theirs)
        self.api = self.stack.enter_context(self.registry.peer("p"))
        self.inbound = Inbound(ours, self.api, self.registry, OpenGate())
        self.task = asyncio.ensure_future(self.inbound.run())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait([self.task])
        self.stack.close()
        await self.registry.close()

    def decide(self, context):
        return {}

    def next_round_at(self, context):
        return None

    def decides(self, *words):
        counts = {name: int(count) for name, _, count in (word.partition("=") for word in words) if count}
        wanted = frozenset(word.encode() for word in words if "=" not in word)
        req, ack = counts.get("req", 0), counts.get("ack", 0)
        self.api.offer(PeerDecision(ids_to_req=req, ids_to_ack=ack, objects_to_req_ids=wanted), clock())

    async def ended(self, objects):
        assert await self.task is None
        assert len(self.pool) == int(objects)


def registry_of(planner, pool=None):
    return Registry(
        pool_of({}) if pool is None else pool,
        policy=Policy(),
        planner=planner,
        clock=clock,
        rng=Random(1),
        on_error=print,
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


SCRIPTED = {
    "replies that come under a later decision belong to their own requests (OD-51)": (
        "",
        """decide req=10
        < 81 00  84 01 F5 00 0A
        > 82 02 9F #a #b FF
        . 1
        decide a
        < 82 03 9F 'a FF
        decide b
        < 82 03 9F 'b FF
        > 82 04 9F =a FF
        pool 1
        > 82 04 9F =b FF
        pool 2""",
    ),
    "a reply of ids that is under way is collected before the FIFO is emptied: it decides who blocks (OD-52)": (
        "abc",
        """decide req=2
        < 81 00  84 01 F5 00 02
        > 82 02 9F #a #b FF
        . 1
        decide req=3
        < 84 01 F4 00 03
        decide req=4 ack=2
        -
        > 82 02 9F FF
        < 84 01 F5 02 04
        > 82 02 9F #c FF
        . 1
        decide req=1
        < 84 01 F4 00 01
        decide req=1 ack=1
        -
        > 82 02 9F 'd FF
        < 84 01 F4 01 01""",
    ),
    "one that leaves reads no decision, drains the replies that are under way, and says Done (OD-54)": (
        "",
        """decide req=2
        < 81 00  84 01 F5 00 02
        > 82 02 9F #a #b FF
        . 1
        decide req=1 a
        < 82 03 9F 'a FF  84 01 F4 00 01
        leave
        decide b
        -
        > 82 04 9F =a FF
        -
        > 82 02 9F 'c FF
        < 81 05
        end
        ended 0""",
    ),
    "one that leaves while the peer waits for something new ends the stream: it may not be spoken to (OD-54)": (
        "",
        """decide req=2
        < 81 00  84 01 F5 00 02
        leave
        end
        ended 0""",
    ),
}


@pytest.mark.parametrize(("pool", "script"), SCRIPTED.values(), ids=SCRIPTED)
@virtual
async def test_decisions_when_scripted_have_these_octets(pool, script):
    async with Scripted(*(name.encode() for name in pool)) as it:
        await check_conversation(
            it.peer, script, decide=it.decides, pool=lambda count: until(it.pool, int(count)), leave=it.inbound.leave,
            ended=it.ended,
        )  # fmt: skip


@virtual
async def test_decision_when_acted_on_is_carried_out_in_the_order_of_the_protocol():
    """What has come is collected, then objects are requested, then ids, then the decision is complete (OD-53)."""
    async with Scripted() as it:
        it.decides("req=2")
        await check_conversation(it.peer, "< 81 00  84 01 F5 00 02\n > 82 02 9F #a #b FF\n . 1")
        steps = []
        for name in ("on_receive_objects", "on_request_objects", "on_request_ids", "on_decision_completed"):
            method = getattr(it.api, name)
            setattr(
                it.api,
                name,
                lambda *args, _name=name, _method=method, **named: (steps.append(_name), _method(*args, **named)),
            )
        it.decides("a")
        await check_conversation(it.peer, "< 82 03 9F 'a FF")
        steps.clear()
        it.inbound._inbox.decoder.feed(bytes.fromhex(octets_of("82 04 9F =a FF")))  # has come, and nobody was told yet
        it.decides("req=1", "ack=1", "b")
        await check_conversation(it.peer, "< 82 03 9F 'b FF  84 01 F4 01 01")
        assert steps == ["on_receive_objects", "on_request_objects", "on_request_ids", "on_decision_completed"]


@virtual
async def test_decision_when_read_waits_is_marked_and_must_be_completed():
    """Reading waits for one, marks it, and a second reading before its completion is an error (OD-49)."""
    registry = registry_of(CentralPlanner())
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
    registry = registry_of(CentralPlanner())
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
        await peer.says("82 02 9F #a FF")
        await peer.hears(then)
    return node, *peers


@virtual
async def test_objects_of_a_peer_that_leaves_when_in_flight_are_asked_for_elsewhere_at_once():
    node, _, other = await two_that_have_one_object()
    node.diffusion.leave("p")
    await other.hears("82 03 9F 41 61 FF")
    assert node.diffusion.statistics().objects_inflight == 1
    for task in node.tasks.values():
        task.cancel()
    await asyncio.wait(node.tasks.values())
    node.is_clean()


@virtual
async def test_stream_when_it_ends_while_ids_are_open_is_broken_also_where_nothing_was_asked():
    node, _, other = await two_that_have_one_object()
    await other.says("82 02 9F FF")
    other.stream.close()
    with pytest.raises(BrokenError, match="in state Idle, 1 ids are open"):
        await node.ends("q")
    node.tasks["p"].cancel()


@virtual
async def test_request_when_its_reply_is_wrong_ends_as_lost_for_the_gate():
    gate = OpenGate()
    node = Fetching(gate=gate)
    peer = (await node.announced())["p"]
    await peer.hears("82 03 9F 41 61 FF")
    await peer.says("82 04 9F =b FF")
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

    registry = registry_of(Planner())
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


@virtual
async def test_reply_when_it_takes_longer_than_ten_seconds_ends_the_peer():
    node = Fetching(policy=Policy(inflight_timeout_s=0))
    peer = node.peer()
    await peer.hears(START)
    await asyncio.sleep(100)
    await peer.says("82 02 9F 'a FF")
    began = clock()
    with pytest.raises(NoReplyError, match="10 s in state Objects"):
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
    await peers[other].says("82 04 9F =a FF")
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
        await peer.says("82 04 9F =a FF")
    await asyncio.sleep(0.1)
    states = node.diffusion._registry.state.peers
    assert [set(state.owt) for state in states.values()] == [{b"a"}, {b"a"}]
    await asyncio.sleep(1)
    assert [set(state.owt) for state in states.values()] == [set(), set()]
    assert most == 1


@virtual
async def test_peer_when_it_is_gone_or_cancelled_leaves_no_state():
    node = Fetching()
    for reply, rest, error in (("", "", None), ("82 02 9F #a FF", "82 04 9F", BrokenError)):
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
    await peers["p"].says("82 02 9F FF 82 04 9F =a FF")
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
    await peer.says("82 02 9F #a #b FF")
    await peer.hears_nothing()
    gate.closed = False
    node.diffusion.gate_opened("p")
    await peer.hears("82 03 9F 41 61 41 62 FF")
    await peer.says("82 04 9F =a =b FF")
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
