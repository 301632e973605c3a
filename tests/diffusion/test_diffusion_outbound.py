"""The outbound side, served octets written from the specification."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest
from octets_kit import RawPeer, by_name, named, pool_of, virtual

from flowctl.errors import BrokenError, LimitExceededError, RemoteProtocolError
from flowctl.nodes.diffusion import outbound as outbound_module
from flowctl.nodes.diffusion.errors import (
    AckedTooManyObjectIdsError,
    NoReplyError,
    RequestBlockingError,
    RequestedDuplicateObjectError,
    RequestedNothingError,
    RequestedTooManyBytesError,
    RequestedTooManyObjectIdsError,
    RequestedUnavailableObjectError,
    RequestNonBlockingError,
)
from flowctl.nodes.diffusion.outbound import Outbound
from flowctl.nodes.diffusion.pool.memory import MemoryPool, StoredObject
from flowctl.nodes.diffusion.streams.memory import memory_pair

ID_A, ID_B, ID_C = "82 41 61 03", "82 41 62 03", "82 41 63 03"
OBJECT_A, OBJECT_B, OBJECT_C = "43 61 2F 00", "43 62 2F 00", "43 63 2F 00"


class Served:
    """A server of objects a, b, c (3 octets each) and the peer that asks it."""

    def __init__(self, *names, most=100, pool=None, guard=None, walking=None):
        self.pool = pool_of(named(*names, size=3), identify=by_name) if pool is None else pool
        ours, theirs = memory_pair()
        self.peer = RawPeer(theirs)
        self.outbound = Outbound(ours, self.pool, max_outstanding=most, guard=guard, walking=walking)
        self.task = asyncio.ensure_future(self.outbound.run())

    def add(self, *names):
        self.pool.add(named(*names, size=3))

    async def ends(self):
        return await asyncio.wait_for(self.task, 1)


@virtual
async def test_server_when_asked_in_order_sends_what_it_has():
    """Ids come with sizes, objects as asked for, the rest is waited for, and Done ends it (OD-06)."""
    served = Served(b"a", b"b", b"c")
    peer = served.peer
    await peer.says("81 00  84 01 F5 00 02")
    await peer.hears(f"82 02 9F {ID_A} {ID_B} FF")
    await peer.says("82 03 9F 41 61 41 62 FF  84 01 F4 01 09")
    await peer.hears(f"82 04 9F {OBJECT_A} {OBJECT_B} FF")
    await peer.hears(f"82 02 9F {ID_C} FF")
    await peer.says("84 01 F4 01 01")
    await peer.hears("82 02 9F FF")
    await peer.says("81 05")
    await peer.hears_the_end()
    assert await served.ends() is None
    assert (served.outbound.announced_count, served.outbound.sent_count, served.outbound.sent_bytes) == (3, 2, 6)


@pytest.mark.parametrize(
    ("octets", "fault"),
    [
        ("84 01 F4 03 01", AckedTooManyObjectIdsError),
        ("84 01 F5 03 01", AckedTooManyObjectIdsError),
        ("84 01 F4 01 05", RequestedTooManyObjectIdsError),
        ("84 01 F5 02 06", RequestedTooManyObjectIdsError),
        ("84 01 F5 02 00", RequestedNothingError),
        ("84 01 F4 00 00", RequestedNothingError),
        ("84 01 F5 01 01", RequestBlockingError),
        ("84 01 F4 02 01", RequestNonBlockingError),
        ("82 03 9F FF", RequestedNothingError),
        ("82 03 9F 41 61 41 61 FF", RequestedDuplicateObjectError),
        ("82 03 9F 41 61 41 78 FF", RequestedUnavailableObjectError),
        ("82 03 9F 41 63 FF", RequestedUnavailableObjectError),
        ("81 00", RemoteProtocolError),
        ("82 02 9F FF", RemoteProtocolError),
        ("82 03 80", RemoteProtocolError),
    ],
)
@virtual
async def test_server_when_a_request_breaks_a_rule_ends_with_the_fault(octets, fault):
    """Two ids are open and four may be: every fault has its name, and ends the stream (OD-17, OD-18, OD-19, OD-21)."""
    served = Served(b"a", b"b", b"c", most=5)
    await served.peer.says("81 00  84 01 F5 00 02")
    await served.peer.hears(f"82 02 9F {ID_A} {ID_B} FF")
    await served.peer.says(octets)
    with pytest.raises(fault) as caught:
        await served.ends()
    assert caught.type is fault
    if fault is RequestedTooManyObjectIdsError:
        caught.match(f"{int(octets[-2:])} ids are asked for, .* limit of 5")
    await served.peer.hears_the_end()


@virtual
async def test_server_when_octets_follow_done_says_that_nobody_may_send():
    served = Served(b"a")
    await served.peer.says("81 00 81 05 81 05")
    with pytest.raises(RemoteProtocolError, match="2 bytes came in state Done"):
        await served.ends()


@virtual
async def test_server_when_the_window_is_exactly_full_serves():
    """As many ids as may be open can be: the limit is refused only when it is exceeded (OD-18)."""
    served = Served(b"a", b"b", b"c", most=3)
    await served.peer.says("81 00  84 01 F5 00 01  84 01 F4 00 02")
    await served.peer.hears(f"82 02 9F {ID_A} FF 82 02 9F {ID_B} {ID_C} FF")


@virtual
async def test_server_when_objects_are_asked_for_in_any_order_sends_them_in_its_own():
    """Objects come in the order of their announcement (OD-22)."""
    served = Served(b"a", b"b", b"c")
    await served.peer.says("81 00  84 01 F5 00 03")
    await served.peer.hears(f"82 02 9F {ID_A} {ID_B} {ID_C} FF")
    await served.peer.says("82 03 9F 41 63 41 61 41 62 FF")
    await served.peer.hears(f"82 04 9F {OBJECT_A} {OBJECT_B} {OBJECT_C} FF")


@virtual
async def test_server_when_an_object_is_asked_for_in_two_requests_refuses_the_second():
    for second, fault in (
        ("82 03 9F 41 62 41 61 FF", RequestedDuplicateObjectError),
        ("84 01 F4 01 01 82 03 9F 41 61 FF", RequestedUnavailableObjectError),
    ):
        served = Served(b"a", b"b")
        await served.peer.says("81 00  84 01 F5 00 02  82 03 9F 41 61 FF" + second)
        await served.peer.hears(f"82 02 9F {ID_A} {ID_B} FF 82 04 9F {OBJECT_A} FF")
        with pytest.raises(fault):
            await served.ends()


@virtual
async def test_blocking_request_when_there_is_nothing_waits_for_the_first_new_object():
    """It is answered with the first new object, and with several where several came at once (OD-23)."""
    served = Served()
    await served.peer.says("81 00  84 01 F5 00 09")
    await served.peer.hears_nothing()
    served.add(b"a")
    await served.peer.hears(f"82 02 9F {ID_A} FF")
    await served.peer.says("84 01 F5 01 09")
    await served.peer.hears_nothing()
    served.add(b"b", b"c")
    await served.peer.hears(f"82 02 9F {ID_B} {ID_C} FF")


@virtual
async def test_blocking_request_when_the_new_object_is_evicted_at_once_waits_again():
    """Woken for an object that is not there any more, the server goes on waiting (OD-23)."""
    pool = pool_of({}, identify=by_name, max_bytes=3)
    served = Served(pool=pool)
    await served.peer.says("81 00  84 01 F5 00 09")
    await served.peer.hears_nothing()
    pool._shelf.put(type("Gone", (), {"ticket": 1, "object_id": b"x", "size_bytes": 3})())
    pool._shelf.evict()
    pool._shelf.tell()
    await served.peer.hears_nothing()
    served.add(b"a")
    await served.peer.hears(f"82 02 9F {ID_A} FF")


@virtual
async def test_server_when_its_client_leaves_or_it_is_stopped_while_blocked_ends_in_order():
    left, stopped = Served(), Served()
    for served in (left, stopped):
        await served.peer.says("81 00  84 01 F5 00 09")
        await served.peer.hears_nothing()
    left.peer.stream.close()
    assert await left.ends() is None
    stopped.outbound.stop()
    assert await stopped.ends() is None
    await stopped.peer.hears_the_end()
    assert left.pool._shelf._watchers == {}


@virtual
async def test_server_when_stopped_sends_what_it_has_announced_and_announces_no_more():
    served = Served(b"a", b"b")
    await served.peer.says("81 00  84 01 F5 00 01")
    await served.peer.hears(f"82 02 9F {ID_A} FF")
    served.outbound.stop()
    await served.peer.says("82 03 9F 41 61 FF  84 01 F4 00 01")
    await served.peer.hears(f"82 04 9F {OBJECT_A} FF  82 02 9F FF")
    await served.peer.says("84 01 F5 01 01")
    await served.peer.hears_the_end()
    assert await served.ends() is None


@virtual
async def test_server_when_its_peer_ends_within_a_message_is_broken():
    for octets, broken in (("81 00 84 01", True), ("81 00", False), ("", False)):
        served = Served()
        await served.peer.says(octets)
        served.peer.stream.close()
        if broken:
            with pytest.raises(BrokenError):
                await served.ends()
        else:
            assert await served.ends() is None


@virtual
async def test_announced_object_when_evicted_meanwhile_is_sent_all_the_same():
    pool = pool_of(named(b"a", size=3), identify=by_name, max_bytes=3)
    served = Served(pool=pool)
    await served.peer.says("81 00  84 01 F5 00 09")
    await served.peer.hears(f"82 02 9F {ID_A} FF")
    served.add(b"b")
    assert pool.get(b"a") is None
    await served.peer.says("82 03 9F 41 61 FF")
    await served.peer.hears(f"82 04 9F {OBJECT_A} FF")


@virtual
async def test_server_when_much_is_announced_and_not_fetched_keeps_a_bounded_part(monkeypatch):
    monkeypatch.setattr(outbound_module, "MOST_KEPT_BYTES", 5)
    served = Served(b"a", b"b", b"c")
    await served.peer.says("81 00  84 01 F5 00 03")
    await served.peer.hears(f"82 02 9F {ID_A} {ID_B} FF")
    await served.peer.says("84 01 F4 00 01")
    await served.peer.hears("82 02 9F FF")
    await served.peer.says("82 03 9F 41 61 FF  84 01 F4 00 01")
    await served.peer.hears(f"82 04 9F {OBJECT_A} FF  82 02 9F {ID_C} FF")


@virtual
async def test_server_when_more_is_asked_for_than_a_reply_holds_names_the_limit():
    big = named(b"a", b"b", b"c", size=1_000_000)
    served = Served(pool=pool_of(big, identify=by_name))
    await served.peer.says("81 00  84 01 F5 00 03 82 03 9F 41 61 41 62 FF")
    size = 0
    while size < 2_000_000:
        size += len(await served.peer.stream.read())
    second = Served(pool=served.pool)
    await second.peer.says("81 00  84 01 F5 00 03 82 03 9F 41 61 41 62 41 63 FF")
    with pytest.raises(RequestedTooManyBytesError, match="the limit is 2500000"):
        await second.ends()


@virtual
async def test_client_that_pipelines_without_reading_is_slowed_down():
    served = Served(b"a", b"b")
    await served.peer.says("81 00  84 01 F5 00 02")
    flood = asyncio.ensure_future(served.peer.stream.write(bytes.fromhex("84 01 F4 00 01") * 200_000))
    await asyncio.sleep(5)
    assert not flood.done()
    assert served.outbound._inbox.decoder.buffered_bytes <= outbound_module.MOST_INPUT_BYTES + 65_536
    flood.cancel()


@pytest.mark.parametrize("keeps_asking", [False, True])
@virtual
async def test_peer_when_it_never_asks_for_what_is_gone_is_ended(keeps_asking):
    """What it was told of is kept a while longer than in the pool; else idle peers would keep any number of bytes."""
    served = Served(pool=pool_of(named(b"a", b"b", size=3), identify=by_name, max_objects=2))
    await served.peer.says("81 00  84 01 F5 00 02")
    await served.peer.hears(f"82 02 9F {ID_A} {ID_B} FF")
    await asyncio.sleep(2 * outbound_module.KEPT_FOR_S)
    assert not served.task.done()  # the pool has them
    served.add(b"c")
    for _ in range(10 if keeps_asking else 0):
        with contextlib.suppress(BrokenError):
            await served.peer.says("84 01 F4 00 01")
        await asyncio.sleep(0.1)
    with pytest.raises(LimitExceededError, match="neither asked for nor acknowledged"):
        await asyncio.wait_for(served.task, 10)


@virtual
async def test_peer_when_it_asks_in_time_for_what_is_gone_gets_it():
    served = Served(pool=pool_of(named(b"a", b"b", size=3), identify=by_name, max_objects=2))
    await served.peer.says("81 00  84 01 F5 00 02")
    await served.peer.hears(f"82 02 9F {ID_A} {ID_B} FF")
    served.add(b"c", b"d")
    await asyncio.sleep(outbound_module.KEPT_FOR_S - 1)
    await served.peer.says("82 03 9F 41 61 41 62 FF")
    await served.peer.hears(f"82 04 9F {OBJECT_A} {OBJECT_B} FF")
    await asyncio.sleep(2 * outbound_module.KEPT_FOR_S)
    assert not served.task.done()


@virtual
async def test_client_when_it_says_nothing_is_ended():
    """A place is not kept for ever for what connects and never begins."""
    served = Served(b"a")
    with pytest.raises(NoReplyError, match="nothing within 10 s in state Init"):
        await asyncio.wait_for(served.task, 11)


class Lettered(MemoryPool):
    """Objects whose topic is the first letter of their name."""

    def objects_after(self, ticket, limit):
        return [Entry(item, item.object_id[:1].decode()) for item in super().objects_after(ticket, limit)]


@dataclasses.dataclass
class Entry:
    """An entry with a topic."""

    stored: StoredObject
    topic: str

    def __getattr__(self, name):
        return getattr(self.stored, name)


def lettered(*names):
    pool = Lettered(identify=by_name)
    pool.add(named(*names, size=4))
    return pool


def name_of(text):
    return f"82 42 {text.encode().hex(' ')} 04"


@virtual
async def test_client_when_it_subscribes_is_told_of_that_and_of_what_was_passed():
    """Also while the server waits for something new; a topic that is wanted again goes on where it was left."""
    served = Served(pool=lettered(b"a1", b"b1"))
    peer = served.peer
    await peer.says("81 00  83 06 F4 41 2A  83 06 F5 41 61  84 01 F5 00 09")  # nothing but a
    await peer.hears(f"82 02 9F {name_of('a1')} FF")
    await peer.says("84 01 F5 01 09")
    await peer.hears_nothing()
    await peer.says("83 06 F5 41 62")  # b, too
    await peer.hears(f"82 02 9F {name_of('b1')} FF")
    await peer.says("83 06 F4 41 61  84 01 F4 00 09")  # a no more
    await peer.hears("82 02 9F FF")
    served.pool.add(named(b"a2", b"b2", size=4))
    await peer.says("84 01 F4 00 09")
    await peer.hears(f"82 02 9F {name_of('b2')} FF")
    await peer.says("83 06 F5 43 5B 61 5D  84 01 F4 00 09")  # a again, as a pattern
    await peer.hears(f"82 02 9F {name_of('a2')} FF")
    assert (served.outbound._topics, list(served.outbound._patterns)) == ({"b"}, ["[a]"])
    await peer.says("82 03 9F 42 61 32 42 62 31 FF")
    await peer.hears("82 04 9F 44 62 31 2F 00 44 61 32 2F 00 FF")  # in the order of announcement (OD-22)


@virtual
async def test_topic_when_its_name_has_wild_letters_is_no_pattern():
    """Viewers ask for any names, and few patterns are allowed."""
    served = Served(pool=lettered(b"a1"))
    await served.peer.says("81 00  83 06 F5 48 78 5B 2A 5D 5B 3F 5D 62  84 01 F5 00 09")
    await served.peer.hears_nothing()
    assert (served.outbound._topics, served.outbound._patterns) == ({"x*?b"}, {})


@pytest.mark.parametrize("pattern", [False, True])
@virtual
async def test_client_when_it_wants_more_topics_than_it_may_is_ended(monkeypatch, pattern):
    monkeypatch.setattr(outbound_module, "MOST_PATTERNS" if pattern else "MOST_TOPICS", 2)
    served = Served(b"a")
    await served.peer.says("81 00" + "".join(f"83 06 F5 42 6{n} {'2A' if pattern else '61'}" for n in (1, 2, 2, 3)))
    with pytest.raises(LimitExceededError, match="topics"):
        await served.ends()


@virtual
async def test_pattern_when_it_has_many_wild_letters_ends_its_client():
    """To read one of 500 stars takes 50 ms, and 64 clients may bring 64 each."""
    served = Served(b"a")
    await served.peer.says("81 00  83 06 F5 49" + " 2A" * 9)
    with pytest.raises(LimitExceededError, match="9 of"):
        await served.ends()


@virtual
async def test_clients_when_they_change_what_they_want_go_through_the_pool_one_by_one():
    turn = asyncio.Lock()
    await turn.acquire()
    served = Served(pool=lettered(b"a1", b"b1"), walking=turn)
    await served.peer.says("81 00  83 06 F5 41 61  84 01 F5 00 09")
    await served.peer.hears(f"82 02 9F {name_of('a1')} FF")
    await served.peer.says("83 06 F5 41 62  84 01 F4 00 09")  # b, too, of which something was passed
    await served.peer.hears_nothing()
    turn.release()
    await served.peer.hears(f"82 02 9F {name_of('b1')} FF")


@pytest.mark.parametrize("word", ["83 06 F4 41 61", "82 07 41 61"], ids=["unsubscribe", "prove"])
@virtual
async def test_client_when_it_says_much_that_needs_no_answer_rests(word, monkeypatch):
    """After some each takes its time: 40,000 of them held all others for seconds."""
    monkeypatch.setattr(outbound_module, "MOST_TOPICS", 100)
    served = Served(b"a")
    began = asyncio.get_running_loop().time()
    await served.peer.says("81 00" + word * 300 + "81 05")
    await served.task
    assert asyncio.get_running_loop().time() - began > 1.9


@virtual
async def test_server_when_there_are_ever_new_topics_forgets_the_old_ones(monkeypatch):
    """A client that never changes what it wants is told of streams for months."""
    monkeypatch.setattr(outbound_module, "_TOPICS_KNOWN", 2)
    served = Served(pool=lettered(b"a1", b"b1", b"c1", b"d1", b"e1"))
    await served.peer.says("81 00  84 01 F5 00 09")
    await served.peer.hears("82 02 9F" + "".join(f" {name_of(f'{name}1')}" for name in "abcde") + " FF")
    assert (len(served.outbound._told), len(served.outbound._wanted)) == (1, 1)


class Doorman:
    """Lets those who prove it have what begins with b."""

    def __init__(self):
        self.proven = False

    def prove(self, proof):
        if proof != b"key":
            raise RemoteProtocolError("wrong key")
        self.proven = True

    def allows(self, topic):
        return self.proven or topic == "a"


@virtual
async def test_client_when_it_proves_who_it_is_may_have_more():
    served = Served(pool=lettered(b"a1", b"b1"), guard=Doorman())
    await served.peer.says("81 00  84 01 F5 00 09")
    await served.peer.hears(f"82 02 9F {name_of('a1')} FF")
    await served.peer.says("82 07 43 6B 65 79  84 01 F4 00 09")
    await served.peer.hears(f"82 02 9F {name_of('b1')} FF")
    await served.peer.says("82 07 41 6B")
    with pytest.raises(RemoteProtocolError, match="wrong key"):
        await served.ends()
