"""A messenger on the caller's loop: ``async with``, awaited sends, coroutine handlers."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from flowctl.errors import BrokenError, ClosedError
from flowctl.nodes.messenger import outbound as outbound_module
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import Destination, ReceivedMessage
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.store import open_store
from flowctl.nodes.messenger.wire import ECHO

WAIT_S = 20.0


async def test_messenger_when_on_the_callers_loop_is_reached_by_each_way_with_the_same_answer(loop_factory, tmp_path):
    """TCP, ipc and inproc at once, from one client under its one name (ME-28)."""
    got = []
    async with Messenger(0, "server", ipc_dir=tmp_path) as server, Messenger(identity="client") as client:
        for endpoint in server.endpoints():
            connection = client.make_connection(Destination("server", endpoint))
            got.append((await client.request(connection, "same", remote_callback_id=ECHO)).message)
        assert got == [b"same"] * 3


async def test_send_when_the_window_is_used_up_waits_for_room(loop_factory):
    got: list[bytes] = []
    most = 0

    async def handler(_: Messenger, message: ReceivedMessage) -> None:
        await asyncio.sleep(0)
        got.append(message.message)

    async with (
        Messenger(identity="server") as server,
        Messenger(identity="client", settings=DeliverySettings(window=8)) as client,
    ):
        server.listen_for_connection(Destination.inproc("s", "window"), "server", handler)
        connection = client.make_connection(Destination.inproc("server", "window"))
        for number in range(80):
            await asyncio.wait_for(client.send(connection, b"%d" % number, ordered=True), WAIT_S)
            most = max(most, client.pending_count())
        await asyncio.wait_for(client.deliver(connection, "last", ordered=True), WAIT_S)
    assert most <= 8
    assert got == [*(b"%d" % number for number in range(80)), b"last"]


async def test_deliver_when_its_deadline_passes_raises_once(loop_factory):
    async with Messenger(identity="client") as client:
        connection = client.make_connection(Destination.inproc("nobody", "nobody"))
        with pytest.raises(BrokenError, match="not acknowledged: timeout"):
            await client.deliver(connection, "hello", deadline=0.02)
        assert client.pending_count() == 0


async def test_request_when_the_callbacks_are_used_up_waits_for_one(loop_factory, monkeypatch):
    monkeypatch.setattr(outbound_module, "MAX_CALLBACKS", 2)
    held: asyncio.Queue[ReceivedMessage] = asyncio.Queue()
    async with Messenger(identity="server") as server, Messenger(identity="client") as client:
        here = Destination.inproc("server", "callbacks")
        server.listen_for_connection(here, "server", lambda _, message: held.put_nowait(message))
        connection = client.make_connection(here)
        acks: asyncio.Queue[int] = asyncio.Queue()
        ask = partial(client.request, connection, "x", on_ack=lambda _, number: acks.put_nowait(number))
        requests = [asyncio.create_task(ask()) for _ in range(3)]
        first = [await asyncio.wait_for(held.get(), WAIT_S) for _ in range(2)]
        assert [await asyncio.wait_for(acks.get(), WAIT_S) for _ in range(2)] == [0, 1]
        for message in first:
            server.send_message(message.sender, "y", remote_callback_id=message.source_callback_id)
        last = await asyncio.wait_for(held.get(), WAIT_S)
        server.send_message(last.sender, "y", remote_callback_id=last.source_callback_id)
        answers = await asyncio.wait_for(asyncio.gather(*requests), WAIT_S)
        assert [answer.message for answer in answers] == [b"y"] * 3


async def test_listener_in_process_when_closed_leaves_its_name_at_once(loop_factory):
    for _ in range(50):
        async with Messenger(identity="server") as server:
            number = server.listen_for_connection(Destination.inproc("server", "again"), "server", None)
            assert server.endpoints(number) == ["inproc://again"]


async def test_request_when_its_connection_is_closed_after_the_acknowledgement_is_withdrawn(loop_factory):
    taken = asyncio.Event()
    async with Messenger(identity="server") as server, Messenger(identity="client") as client:
        here = Destination.inproc("server", "closed")
        server.listen_for_connection(here, "server", None)
        connection = client.make_connection(here)
        request = asyncio.create_task(client.request(connection, "x", on_ack=lambda *_: taken.set()))
        await asyncio.wait_for(taken.wait(), WAIT_S)
        client.close_connection(connection)
        with pytest.raises(BrokenError, match="not answered: withdrawn"):
            await asyncio.wait_for(request, WAIT_S)
        assert client.statistics().callbacks == 0


async def test_deliver_when_the_messenger_stops_ends_although_the_store_keeps_the_message(loop_factory, tmp_path):
    async with Messenger(identity="client", open_store=open_store(tmp_path / "outbox")) as client:
        connection = client.make_connection(Destination.inproc("nobody", "nobody"))
        delivery = asyncio.create_task(client.deliver(connection, "x"))
        await asyncio.sleep(0)  # it runs until it waits
        assert client.pending_count() == 1
    with pytest.raises(ClosedError, match="its store has the message"):
        await asyncio.wait_for(delivery, WAIT_S)


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "durable"])
async def test_ordered_messages_when_acknowledged_on_receipt_are_handled_in_turn(loop_factory, tmp_path, durable):
    events: list[bytes] = []
    ended = asyncio.Event()

    async def handler(_: Messenger, message: ReceivedMessage) -> None:
        events.append(b"+" + message.message)
        await asyncio.sleep(0.002)
        events.append(b"-" + message.message)
        if message.message == b"4":
            ended.set()
        if message.message == b"1":
            raise ValueError("it was acknowledged, and is not handled again")

    store = {"open_store": open_store(tmp_path / "store")} if durable else {}
    quiet = {"on_error": lambda where, error: None}
    async with (
        Messenger(identity="server", ack_on_receipt=True, **store, **quiet) as server,
        Messenger(identity="client") as client,
    ):
        here = Destination.inproc("server", "receipt")
        server.listen_for_connection(here, "server", handler)
        connection = client.make_connection(here)
        await asyncio.wait_for(client.deliver(connection, b"0"), WAIT_S)  # it knows the peer now
        for number in range(1, 4):
            client.send_message(connection, b"%d" % number, ordered=True)
        last = client.deliver(connection, b"4", ordered=True)
        await asyncio.wait_for(last, WAIT_S)
        await asyncio.wait_for(ended.wait(), WAIT_S)  # the handler runs on after the acknowledgement
        assert (client.pending_count(), server.statistics().repeated) == (0, 0)
    assert [event for event in events if event[1:] != b"0"] == [
        sign + b"%d" % number for number in range(1, 5) for sign in (b"+", b"-")
    ]
