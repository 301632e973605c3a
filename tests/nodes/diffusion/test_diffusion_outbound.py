"""The outbound side, served octets written from the specification."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest
from octets_kit import RawPeer, by_name, check_conversation, named, pool_of, virtual

from flowctl.errors import BrokenError, LimitExceededError, RemoteProtocolError
from flowctl.nodes.diffusion import errors as faults
from flowctl.nodes.diffusion import outbound as outbound_module
from flowctl.nodes.diffusion.errors import NoReplyError, RequestedTooManyBytesError
from flowctl.nodes.diffusion.outbound import Outbound
from flowctl.nodes.diffusion.pool.memory import MemoryPool, StoredObject
from flowctl.nodes.diffusion.streams.memory import memory_pair


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

    async def over(self, fault="", *words):
        """See that it ends in order, or by a fault with such words."""
        if not fault:
            assert await self.ends() is None
            return
        with pytest.raises(getattr(faults, fault), match=" ".join(words) or None) as caught:
            await self.ends()
        assert caught.type is getattr(faults, fault)

    def serves(self):
        assert not self.task.done()

    async def check(self, script):
        await check_conversation(
            self.peer,
            script,
            add=lambda *names: self.add(*(name.encode() for name in names)),
            leave=self.peer.stream.close,
            stop=self.outbound.stop,
            over=self.over,
            serves=self.serves,
        )


TWO_OPEN = """> 81 00  84 01 F5 00 02
        < 82 02 9F #a #b FF
"""
SCENARIOS = {
    "ids come with sizes, objects as asked for, the rest is waited for, and Done ends it (OD-06)": """
        > 81 00  84 01 F5 00 02
        < 82 02 9F #a #b FF
        > 82 03 9F 'a 'b FF  84 01 F4 01 04
        < 82 04 9F =a =b FF
        < 82 02 9F #c FF
        > 84 01 F4 01 01
        < 82 02 9F FF
        > 81 05
        end
        over""",
    "octets behind Done, where nobody may send": """
        > 81 00 81 05 81 05
        over RemoteProtocolError 2 bytes came in state Done""",
    "as many ids as may be open (OD-18)": """
        > 81 00  84 01 F5 00 02  84 01 F4 00 03
        < 82 02 9F #a #b FF 82 02 9F #c FF""",
    "objects in the order of their announcement (OD-22)": """
        > 81 00  84 01 F5 00 03
        < 82 02 9F #a #b #c FF
        > 82 03 9F 'c 'a 'b FF
        < 82 04 9F =a =b =c FF""",
    "an object for the second time in another request": f"""
        {TWO_OPEN}
        > 82 03 9F 'a FF 82 03 9F 'b 'a FF
        < 82 04 9F =a FF
        over RequestedDuplicateObjectError""",
    "an object whose id is acknowledged": f"""
        {TWO_OPEN}
        > 82 03 9F 'a FF  84 01 F4 01 01  82 03 9F 'a FF
        < 82 04 9F =a FF  82 02 9F #c FF
        over RequestedUnavailableObjectError""",
    "a client that leaves while it waits": """
        > 81 00  84 01 F5 00 03  84 01 F5 03 03
        < 82 02 9F #a #b #c FF
        -
        leave
        over""",
    "a stop while the client waits": """
        > 81 00  84 01 F5 00 03  84 01 F5 03 03
        < 82 02 9F #a #b #c FF
        -
        stop
        end
        over""",
    "a stop sends what was announced, and announces no more": """
        > 81 00  84 01 F5 00 01
        < 82 02 9F #a FF
        stop
        > 82 03 9F 'a FF  84 01 F4 00 01
        < 82 04 9F =a FF  82 02 9F FF
        > 84 01 F5 01 01
        end
        over""",
    "an end within a message": """
        > 81 00 84 01
        leave
        over BrokenError""",
    "an end between two messages": """
        > 81 00
        leave
        over""",
    "an end before the first word": """
        leave
        over""",
}
FULL = {  # of a pool for two objects, which has a and b
    "a blocking request is answered with the first new object, or with several (OD-23)": """
        > 81 00  84 01 F5 00 02  84 01 F5 02 05
        < 82 02 9F #a #b FF
        -
        add c
        < 82 02 9F #c FF
        > 84 01 F5 01 05
        -
        add d e
        < 82 02 9F #d #e FF""",
    "what was announced and has been evicted is sent all the same": """
        > 81 00  84 01 F5 00 02
        < 82 02 9F #a #b FF
        add c d
        > 82 03 9F 'a 'b FF
        < 82 04 9F =a =b FF""",
    "what is gone is sent to one that asks in time, who is not ended then": """
        > 81 00  84 01 F5 00 02
        < 82 02 9F #a #b FF
        add c d
        . 29
        > 82 03 9F 'a 'b FF
        < 82 04 9F =a =b FF
        . 60
        serves""",
}
FAULTS = [
    ("84 01 F4 03 01", "AckedTooManyObjectIdsError"),
    ("84 01 F5 03 01", "AckedTooManyObjectIdsError"),
    ("84 01 F4 01 05", "RequestedTooManyObjectIdsError 5 ids are asked for, .* limit of 5"),
    ("84 01 F5 02 06", "RequestedTooManyObjectIdsError 6 ids are asked for, .* limit of 5"),
    ("84 01 F5 02 00", "RequestedNothingError"),
    ("84 01 F4 00 00", "RequestedNothingError"),
    ("84 01 F5 01 01", "RequestBlockingError"),
    ("84 01 F4 02 01", "RequestNonBlockingError"),
    ("82 03 9F FF", "RequestedNothingError"),
    ("82 03 9F 'a 'a FF", "RequestedDuplicateObjectError"),
    ("82 03 9F 'a 'x FF", "RequestedUnavailableObjectError"),
    ("82 03 9F 'c FF", "RequestedUnavailableObjectError"),
    ("81 00", "RemoteProtocolError Init is not allowed|key 0"),
    ("82 02 9F FF", "RemoteProtocolError key 2"),
    ("82 03 80", "RemoteProtocolError indefinite"),
]


@pytest.mark.parametrize("script", SCENARIOS.values(), ids=SCENARIOS)
@virtual
async def test_server_when_talked_to_answers_with_these_octets(script):
    served = Served(b"a", b"b", b"c", most=5)
    await served.check(script)
    if script.rstrip().endswith("over"):
        assert served.pool._shelf._watchers == {}


@pytest.mark.parametrize("script", FULL.values(), ids=FULL)
@virtual
async def test_server_of_a_full_pool_when_talked_to_answers_with_these_octets(script):
    await Served(pool=pool_of(named(b"a", b"b", size=3), identify=by_name, max_objects=2)).check(script)


@pytest.mark.parametrize(("octets", "fault"), FAULTS)
@virtual
async def test_server_when_a_request_breaks_a_rule_ends_with_the_fault(octets, fault):
    """Two ids are open and four may be: every fault has its name, and ends the stream (OD-17, OD-18, OD-19, OD-21)."""
    await Served(b"a", b"b", b"c", most=5).check(f"{TWO_OPEN}\n> {octets}\nover {fault}\nend")


@virtual
async def test_server_when_much_is_announced_and_not_fetched_keeps_a_bounded_part(monkeypatch):
    monkeypatch.setattr(outbound_module, "MOST_KEPT_BYTES", 5)
    await Served(b"a", b"b", b"c").check("""
        > 81 00  84 01 F5 00 03
        < 82 02 9F #a #b FF
        > 84 01 F4 00 01
        < 82 02 9F FF
        > 82 03 9F 'a FF  84 01 F4 00 01
        < 82 04 9F =a FF  82 02 9F #c FF""")


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
    await served.peer.hears("82 02 9F #a FF")


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
    await served.peer.hears("82 02 9F #a #b FF")
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
