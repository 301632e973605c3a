"""What one connection can make a node keep or do: raw peers that stay within every limit."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial

import pytest
from zmq_kit import ask

from flowctl.nodes.rpc import serving
from flowctl.nodes.rpc.jobs.slots import MOST_WAITING_BYTES, Slots, SlotVerdict, WorkerJob
from flowctl.nodes.rpc.message import FRAME_BYTES, RpcMessage
from flowctl.nodes.rpc.wire.frames import make_tag

WAIT_MS = 20_000


@pytest.fixture
def listening(node, raw, tmp_path):
    """Return a function that starts a node with a category `a` of some handlers, and one that dials it by hand."""

    def start(**handlers):
        server = node()
        server.add_category("a")
        for name, handler in handlers.items():
            server.add_request_command("a", name, handler)
        address = server.listen_plain(f"ipc://{tmp_path}/rpc")
        server.start()
        return server, partial(raw, address)

    return start


async def hang(message: RpcMessage) -> None:
    await asyncio.sleep(WAIT_MS)


async def echo(message: RpcMessage) -> list[bytes]:
    return message.data


@pytest.mark.parametrize(("limit", "most"), [("MOST_RUNNING_BYTES", 100_000), ("MOST_RUNNING", 10)])
def test_requests_that_wait_when_many_or_of_large_tags_leave_half_to_others(listening, monkeypatch, limit, most):
    monkeypatch.setattr(serving, limit, most)
    node, dial = listening(hang=hang, echo=echo)
    flood = dial()
    for number in range(20):
        flood.send_multipart([b"a.hang", bytes(9_999) + bytes([number])])
    assert ask(flood, b"a.echo", b"t")[0] == b"QUEUE_FULL"  # the first of those that found no room
    other = dial()
    for number in range(2):
        other.send_multipart([b"a.hang", b"%d" % number])
    assert ask(other, b"a.echo", b"t", b"x") == [b"REPLY", b"t", b"x"]
    assert len(node._serving.tasks) == 5 + 2


def test_parts_when_they_are_empty_count_too():
    message = RpcMessage(None, None, b"a.b", b"tag", [b""] * 1000, None)  # type: ignore[arg-type]  # it is only weighed
    assert message.size_bytes == 1000 * FRAME_BYTES + 3


def test_streams_when_their_taker_never_reads_have_one_item_waiting(listening):
    made, tag = [0], make_tag(1, 1000.0, 255)

    async def items(message: RpcMessage) -> AsyncIterator[bytes]:
        while True:
            made[0] += 1
            yield bytes(500_000)

    node, dial = listening(items=items, echo=echo)
    deaf = dial(rcvhwm=1, rcvbuf=4096)
    for _ in range(200):
        deaf.send_multipart([b"a.items", tag])
    other = dial()
    while node.statistics().unsent_count < 200:  # until all of them wait
        assert ask(other, b"a.echo", b"t") == [b"REPLY", b"t"]
    ((deaf_peer, _),) = ([*item.routes.values()] for item in node._reaching.listeners.values())
    assert len(node._serving.tasks) == 200
    assert made[0] < 100
    assert deaf_peer.link.waiting_bytes < 2 * 500_000


def test_octets_that_wait_when_they_are_of_one_sender_leave_others_as_many():
    slots = Slots(general=1)
    lane = slots.add_category("a")

    def arrive(sender: str, size_bytes: int) -> SlotVerdict:
        return slots.arrived(WorkerJob(lane, bool, size_bytes=size_bytes, sender=sender), 0.0)

    assert arrive("first", 1) is SlotVerdict.START
    half = MOST_WAITING_BYTES // 2
    assert [arrive("large", half), arrive("large", half), arrive("large", 1)] == [
        SlotVerdict.WAIT,
        SlotVerdict.DROP,
        SlotVerdict.DROP,
    ]
    assert [arrive("small", 1000), arrive("small", half)] == [SlotVerdict.WAIT, SlotVerdict.DROP]
    assert len(slots.free_slot(lane, 0.0)) == 1
    assert arrive("large", half) is SlotVerdict.WAIT  # what has begun makes room


def test_connections_when_others_went_without_a_word_are_not_taken_for_them(listening, tmp_path):
    _, dial = listening(echo=echo)
    probes = [socket.socket(socket.AF_UNIX) for _ in range(16)]
    for probe in probes:
        probe.connect(f"{tmp_path}/rpc")
    for probe in probes:
        probe.shutdown(socket.SHUT_WR)
        while probe.recv(64):  # until the listener has closed it, too
            pass
    for probe in probes:
        probe.close()
    for number in range(6):  # their descriptors are those that were freed
        assert ask(dial(), b"a.echo", b"%d" % number) == [b"REPLY", b"%d" % number]
