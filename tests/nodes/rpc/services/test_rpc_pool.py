"""Several servers as one: who is asked, and what becomes of a call when its server is full, slow, stopped or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Protocol

import pytest

from flowctl.errors import ClosedError, LocalProtocolError, RpcError, RpcTimeoutError
from flowctl.nodes.rpc.node import RpcNode


class Name(Protocol):
    async def name(self) -> str: ...
    async def wait(self, what: str) -> str: ...
    def names(self) -> AsyncIterator[str]: ...


class Named:
    """A server that knows its name, and how many of its calls run."""

    def __init__(self, name):
        self.is_called, self.running, self.most, self.cancelled = name, 0, 0, 0
        self.go_on = asyncio.Event()

    async def name(self):
        return self.is_called

    async def wait(self, what):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return f"{self.is_called} {what}"

    async def names(self):
        for _ in range(2):
            yield self.is_called


class Servers:
    """Servers of their own nodes, a caller, and a pool of all of them."""

    def __init__(self, stack, count):
        self.stack, self.count = stack, count
        self.named, self.nodes, self.conns = [], [], []

    async def start(self, **options):
        self.caller = await self.stack.enter_async_context(RpcNode())
        for number in range(self.count):
            node, named = RpcNode(), Named(f"server {number}")
            node.add_category("a")
            node.add_service("a", Name, named)
            address = node.listen_plain("tcp://127.0.0.1:*")
            self.nodes.append(await self.stack.enter_async_context(node))
            self.named.append(named)
            self.conns.append(await self.caller.connect(address))
        self.pool = self.caller.pool(*self.conns, **options)
        self.stack.callback(self.pool.close)
        return self


def with_servers(count, play, **options):
    async def run():
        async with AsyncExitStack() as stack:
            return await play(await Servers(stack, count).start(**options))

    return asyncio.run(asyncio.wait_for(run(), 30.0))


async def until(condition):
    while not condition():  # noqa: ASYNC110  (what is waited for happens on other nodes)
        await asyncio.sleep(0.005)


def test_calls_when_many_are_made_go_to_all_servers_and_none_has_more_than_its_channels():
    async def play(servers):
        stub = servers.pool.service(Name, "a")
        calls = [asyncio.ensure_future(stub.wait(str(number))) for number in range(12)]
        await until(lambda: sum(named.running for named in servers.named) == 6)
        assert [named.running for named in servers.named] == [2, 2, 2]
        for named in servers.named:
            named.go_on.set()
        found = await asyncio.gather(*calls)
        assert [item.rpartition(" ")[2] for item in found] == [str(number) for number in range(12)]
        assert [named.most for named in servers.named] == [2, 2, 2]
        assert sum(servers.pool.asked_counts.values()) == 12

    with_servers(3, play, channels=2)


def test_calls_when_one_server_stands_still_are_answered_by_the_others():
    async def play(servers):
        stub = servers.pool.service(Name, "a")
        stuck = [asyncio.ensure_future(stub.wait("x")) for _ in range(3)]
        await until(lambda: sum(named.running for named in servers.named) == 3)
        servers.named[0].go_on.set()
        await until(lambda: servers.named[0].running == 0)
        assert {await stub.name() for _ in range(20)} == {"server 0"}
        for named in servers.named:
            named.go_on.set()
        await asyncio.gather(*stuck)

    with_servers(3, play, channels=1)


@pytest.mark.parametrize("repeatable", [False, True])
def test_call_when_the_connection_of_its_server_breaks_is_repeated_only_where_that_does_no_harm(repeatable):
    async def play(servers):
        stub = servers.pool.service(Name, "a", repeatable=repeatable)
        call = asyncio.ensure_future(stub.wait("x"))
        await until(lambda: sum(named.running for named in servers.named) == 1)
        [first] = [number for number, named in enumerate(servers.named) if named.running]
        servers.named[1 - first].go_on.set()
        servers.caller.disconnect(servers.conns[first])
        if repeatable:
            assert await call == f"server {1 - first} x"
            return
        with pytest.raises(RpcError, match="DISCONNECTED"):
            await call
        assert servers.named[1 - first].most == 0

    with_servers(2, play)


def test_call_when_a_server_stops_goes_to_another():
    async def play(servers):
        stub = servers.pool.service(Name, "a")
        await asyncio.to_thread(servers.nodes[0].stop)
        await until(lambda: not servers.pool.is_open(servers.conns[0]))
        assert {await stub.name() for _ in range(10)} == {"server 1"}
        await asyncio.to_thread(servers.nodes[1].stop)
        await until(lambda: not servers.pool.is_open(servers.conns[1]))
        with pytest.raises(RpcError, match="DISCONNECTED"):
            await stub.name()

    with_servers(2, play)


def test_call_when_its_handler_had_begun_and_its_node_stops_is_not_made_again():
    async def play(servers):
        stub = servers.pool.service(Name, "a")
        call = asyncio.ensure_future(stub.wait("x"))
        await until(lambda: sum(named.running for named in servers.named) == 1)
        [first] = [number for number, named in enumerate(servers.named) if named.running]
        await asyncio.to_thread(servers.nodes[first].stop)
        with pytest.raises(RpcError, match="SHUTTING_DOWN"):
            await call
        assert servers.named[1 - first].most == 0

    with_servers(2, play)


def test_call_when_it_cannot_be_sent_by_anybody_says_why_and_blames_no_server():
    async def play(servers):
        for command, part in (("no-dot", "x"), ("a.wait", 5), ("a.wait", "x" * (1 << 20) + "x")):
            with pytest.raises(LocalProtocolError):
                await servers.pool.call(command, part)
        asked = set()
        while len(asked) < 2:
            asked.add(await servers.pool.call("a.name", returns=str))
        with pytest.raises(LocalProtocolError, match="timeout_s"):
            await servers.pool.call("a.name", timeout_s=-1)

    with_servers(2, play)


def test_streams_when_a_server_is_gone_go_to_those_that_are_there():
    async def play(servers):
        servers.caller.disconnect(servers.conns[0])
        await until(lambda: not servers.pool.is_open(servers.conns[0]))
        stub = servers.pool.service(Name, "a")
        for _ in range(4):
            assert [name async for name in stub.names()] == ["server 1"] * 2

    with_servers(2, play)


def test_pool_when_closed_has_its_servers_cancel_what_they_do():
    async def play(servers):
        call = asyncio.ensure_future(servers.pool.call("a.wait", "x"))
        await until(lambda: servers.named[0].running == 1)
        servers.pool.close()
        with pytest.raises(ClosedError):
            await call
        await until(lambda: servers.named[0].cancelled == 1)
        with pytest.raises(ClosedError):
            await anext(servers.pool.stream("a.names"))

    with_servers(1, play)


def test_call_when_all_servers_have_too_much_waits_for_one_until_its_time_is_up():
    async def play(servers):
        stub = servers.pool.service(Name, "a")
        calls = [asyncio.ensure_future(stub.wait("x")) for _ in range(2)]
        await until(lambda: sum(named.running for named in servers.named) == 2)
        with pytest.raises(RpcTimeoutError, match="none of 2 servers"):
            await servers.pool.call("a.name", returns=str, timeout_s=0.1)
        late = asyncio.ensure_future(servers.pool.call("a.name", returns=str))
        servers.named[1].go_on.set()
        assert await late == "server 1"
        servers.named[0].go_on.set()
        await asyncio.gather(*calls)

    with_servers(2, play, channels=1)


def test_call_when_cancelled_is_cancelled_at_its_server_whose_channel_is_free_then():
    async def play(servers):
        stub = servers.pool.service(Name, "a")
        call = asyncio.ensure_future(stub.wait("x"))
        await until(lambda: servers.named[0].running == 1)
        call.cancel()
        await until(lambda: servers.named[0].cancelled == 1)
        assert await stub.name() == "server 0"

    with_servers(1, play, channels=1)


def test_call_when_its_handler_fails_is_not_made_again():
    async def play(servers):
        with pytest.raises(RpcError, match="UNKNOWNCOMMAND"):
            await servers.pool.call("a.other")
        assert sum(servers.pool.asked_counts.values()) == 1

    with_servers(2, play)


def test_streams_when_several_are_open_are_spread():
    async def play(servers):
        stub = servers.pool.service(Name, "a")
        open_streams = [stub.names() for _ in range(2)]
        firsts = {await anext(stream) for stream in open_streams}
        assert firsts == {"server 0", "server 1"}
        assert [await anext(stream) for stream in open_streams]
        for stream in open_streams:
            await stream.aclose()

    with_servers(2, play)


def test_pool_when_servers_come_and_go_asks_those_that_are_there():
    async def play(servers):
        pool = servers.pool
        pool.remove(servers.conns[0])
        assert {await pool.call("a.name", returns=str) for _ in range(5)} == {"server 1"}
        pool.add(servers.conns[0])
        pool.remove(servers.conns[1])
        assert {await pool.call("a.name", returns=str) for _ in range(5)} == {"server 0"}
        with pytest.raises(LocalProtocolError, match="channels is 0"):
            pool.add(servers.conns[1], 0)
        pool.remove(servers.conns[0])
        with pytest.raises(RpcTimeoutError):
            await pool.call("a.name", timeout_s=0.05)
        with pytest.raises(RpcError, match="DISCONNECTED"):
            await anext(pool.stream("a.names"))
        pool.close()
        with pytest.raises(ClosedError):
            await pool.call("a.name")

    with_servers(2, play)
