"""Service nodes that reach each other by their keys, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import pytest

from flowctl.errors import RpcError
from flowctl.nodes.rpc.message import DeferredSend, RpcMessage
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.peer import ConnectionID, Reach
from flowctl.nodes.rpc.wire.addresses import Address
from flowctl.pollgroup import LoopFactory
from flowctl.wire.zmtp.keys import KeyPair

WAIT_S = 20.0


class Node:
    """A node that listens encrypted, keeps what `a.keep` is to answer, and looks others up among `known`."""

    def __init__(self, loop_factory: LoopFactory, known: dict[bytes, str]) -> None:
        self.looked_up: list[bytes] = []
        self.kept: SimpleQueue[DeferredSend] = SimpleQueue()
        self.got: SimpleQueue[list[bytes]] = SimpleQueue()
        self.conns: SimpleQueue[ConnectionID] = SimpleQueue()
        self.known = known

        def lookup(pubkey: bytes) -> str | None:
            self.looked_up.append(pubkey)
            return known.get(pubkey)

        self.rpc = RpcNode(
            keys=KeyPair.generate(), service_node=True, sn_lookup=lookup, loop_factory=loop_factory, on_error=print
        )
        self.key = self.rpc.keys.public

        async def keep(message: RpcMessage) -> None:
            self.kept.put(message.later())

        async def take(message: RpcMessage) -> None:
            self.got.put(message.data)

        async def who(message: RpcMessage) -> bytes:
            return message.peer.identity.pubkey

        async def count(message: RpcMessage) -> AsyncIterator[bytes]:
            for number in range(20):
                yield b"%d" % number

        async def conn(message: RpcMessage) -> bytes:
            self.conns.put(message.conn)
            return b""

        self.rpc.add_category("a")
        self.rpc.add_request_command("a", "conn", conn)
        self.rpc.add_request_command("a", "count", count)
        self.rpc.add_command("a", "keep", keep)
        self.rpc.add_command("a", "take", take)
        self.rpc.add_request_command("a", "who", who)
        self.address = self.rpc.listen_curve("tcp://127.0.0.1:*")
        self.rpc.start()


@pytest.fixture
def two(loop_factory: LoopFactory) -> Iterator[tuple[Node, Node]]:
    known: dict[bytes, str] = {}
    nodes = (Node(loop_factory, known), Node(loop_factory, known))
    known.update((node.key, node.address) for node in nodes)
    yield nodes
    for node in nodes:
        node.rpc.stop()


def wait_until(node: RpcNode, is_so: Callable[[], bool]) -> None:
    """Ask on the thread of `node`, again and again, until it is so."""
    for _ in range(100_000):
        asked: Future[bool] = Future()
        node._calls.group.call_soon(lambda to=asked: to.set_result(is_so()))
        if asked.result(WAIT_S):
            return
    raise AssertionError("it is never so")


def test_node_when_named_by_its_key_is_looked_up_once_and_knows_who_asks(two):
    ours, theirs = two
    conn = ours.rpc.service_node(theirs.key)
    assert [ours.rpc.request_future(conn, "a.who").get(WAIT_S) for _ in range(2)] == [[ours.key]] * 2
    ours.rpc.send(theirs.key, "a.take", "hello")  # the key alone means the same
    assert theirs.got.get(timeout=WAIT_S) == [b"hello"]
    assert ours.rpc.request_future(theirs.key, "a.who").get(WAIT_S) == [ours.key]
    assert ours.looked_up == [theirs.key]
    hinted = theirs.rpc.connect_sn(ours.key, hint=ours.address)  # there is one already, which they did not open
    assert theirs.rpc.request_future(hinted, "a.who").get(WAIT_S) == [theirs.key]
    assert theirs.looked_up == []


def test_request_when_nobody_knows_the_address_fails_at_once(two):
    """The code is that of the original; optional is not even looked up (OX-62, OX-71)."""
    ours, _ = two
    stranger = KeyPair.generate().public
    for reach in (Reach(), Reach(optional=True), Reach(incoming=True)):
        with pytest.raises(RpcError) as raised:
            ours.rpc.request_future(ours.rpc.service_node(stranger, reach), "a.who", timeout_s=3600).get(WAIT_S)
        assert raised.value.code == "TIMEOUT"
    assert ours.looked_up == [stranger]


@pytest.mark.parametrize("active", [True, False])
def test_answer_when_the_connection_is_gone_finds_a_service_node_and_no_other(two, active):
    """To an active service node it is strong: looked up, dialled, delivered; else it is dropped (OX-74)."""
    ours, theirs = two
    if active:
        ours.rpc.set_active_sns([theirs.key])
    conn = theirs.rpc.connect_remote(str(Address.parse(ours.address).with_pubkey(ours.key)))
    theirs.rpc.send(conn, "a.keep")
    answer = ours.kept.get(timeout=WAIT_S)
    theirs.rpc.disconnect(conn)
    wait_until(ours.rpc, lambda: all(not len(listener) for listener in ours.rpc._reaching.listeners.values()))
    answer("a.take", "strong")
    if active:
        assert theirs.got.get(timeout=WAIT_S) == [b"strong"]
    wait_until(ours.rpc, lambda: True)
    assert ours.looked_up == ([theirs.key] if active else [])


def test_connection_when_its_node_is_no_service_node_any_more_is_closed(two):
    """What we opened to it ends; the next message would open another."""
    ours, theirs = two
    ours.rpc.set_active_sns([theirs.key])
    ours.rpc.request_future(ours.rpc.service_node(theirs.key), "a.who").get(WAIT_S)
    ours.rpc.update_active_sns([], [theirs.key])
    wait_until(ours.rpc, lambda: not ours.rpc._reaching.dialled)
    wait_until(theirs.rpc, lambda: all(not len(listener) for listener in theirs.rpc._reaching.listeners.values()))
    assert len(ours.rpc._reaching.outgoing) == 0


def test_connection_when_disconnected_is_closed_at_both_ends(two):
    ours, theirs = two
    conn = ours.rpc.service_node(theirs.key)
    for _ in range(3):
        assert ours.rpc.request_future(conn, "a.who").get(WAIT_S) == [ours.key]
        ours.rpc.disconnect(conn)
        wait_until(ours.rpc, lambda: not ours.rpc._reaching.dialled)
        wait_until(theirs.rpc, lambda: not any(map(len, theirs.rpc._reaching.listeners.values())))
    ours.rpc.disconnect(theirs.key)
    wait_until(ours.rpc, lambda: not ours.rpc._reaching.dialled)
    ours.rpc.request_future(conn, "a.who").get(WAIT_S)
    theirs.rpc.disconnect(ours.key)  # the other way round: they have opened none, and have ours closed
    wait_until(ours.rpc, lambda: not ours.rpc._reaching.dialled)


def test_messages_when_disconnected_behind_them_come_though_a_connection_follows_at_once(two):
    """A connection that lingers keeps its route: the next one would end it there, and what is on its way (OX-81)."""
    ours, theirs = two
    sent = [[b"%d" % number, bytes(100_000)] for number in range(100)]
    for parts in sent:
        ours.rpc.send(theirs.key, "a.take", *parts)
    ours.rpc.disconnect(theirs.key, WAIT_S)
    assert ours.rpc.request_future(theirs.key, "a.who").get(WAIT_S) == [ours.key]
    assert [theirs.got.get(timeout=WAIT_S) for _ in sent] == sent


def test_message_when_of_an_active_service_node_names_it_by_its_key(two):
    ours, theirs = two
    conn = ours.rpc.service_node(theirs.key)
    ours.rpc.request_future(conn, "a.conn").get(WAIT_S)
    assert not theirs.conns.get(timeout=WAIT_S).service_node
    theirs.rpc.set_active_sns([ours.key])
    ours.rpc.request_future(conn, "a.conn").get(WAIT_S)
    named = theirs.conns.get(timeout=WAIT_S)
    assert named == theirs.rpc.service_node(ours.key)
    theirs.rpc.request_future(named, "a.conn").get(WAIT_S)  # over the connection that we have opened
    assert ours.conns.get(timeout=WAIT_S) == conn
    ours.rpc.disconnect(conn)
    wait_until(theirs.rpc, lambda: not any(map(len, theirs.rpc._reaching.listeners.values())))
    theirs.rpc.send(named, "a.take", "strong")
    assert ours.got.get(timeout=WAIT_S) == [b"strong"]


def test_stream_when_its_service_node_opens_a_connection_meanwhile_goes_on(two):
    a, b = two

    async def take() -> list[bytes]:
        items = []
        async for item in a.rpc.stream(a.rpc.service_node(b.key), "a.count", credit=2, timeout_s=WAIT_S):
            if not items:
                back = b.rpc.service_node(a.key, Reach(outgoing=True))
                assert await b.rpc.call(back, "a.who", timeout_s=WAIT_S) == [b.key]
            items += item
        return items

    assert asyncio.run(take()) == [b"%d" % number for number in range(20)]
