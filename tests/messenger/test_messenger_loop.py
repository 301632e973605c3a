"""A messenger on the caller's loop: ``async with``, awaited sends, coroutine handlers."""

from __future__ import annotations

import asyncio

import pytest

from flowctl.errors import BrokenError
from flowctl.messenger.delivery import DeliverySettings
from flowctl.messenger.message import Destination, Message
from flowctl.messenger.messenger import Messenger
from flowctl.messenger.wire import ECHO

WAIT_S = 20.0


def test_messenger_when_on_the_callers_loop_is_reached_by_each_way_with_the_same_answer(loop_factory, tmp_path):
    """TCP, ipc and inproc at once, from one client under its one name (ME-28)."""

    async def main() -> list[bytes]:
        got = []
        async with Messenger(0, "server", ipc_dir=tmp_path) as server, Messenger(identity="client") as client:
            for endpoint in server.endpoints():
                connection = client.make_connection(Destination("server", endpoint))
                got.append((await client.request(connection, "same", remote_callback_id=ECHO)).message)
            return got

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(main()) == [b"same"] * 3


def test_send_when_the_window_is_used_up_waits_for_room(loop_factory):
    """Ten times the window goes through, in order, with never more than the window under way."""

    async def main() -> list[bytes]:
        got: list[bytes] = []
        most = 0

        async def handler(_: Messenger, message: Message) -> None:
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
        return got

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(main()) == [*(b"%d" % number for number in range(80)), b"last"]


def test_deliver_when_its_deadline_passes_raises_once(loop_factory):
    """Nobody is there: the message is given up, and says why."""

    async def main() -> None:
        async with Messenger(identity="client") as client:
            connection = client.make_connection(Destination.inproc("nobody", "nobody"))
            with pytest.raises(BrokenError, match="not acknowledged: timeout"):
                await client.deliver(connection, "hello", deadline=0.02)
            assert client.pending_count() == 0

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
