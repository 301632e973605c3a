"""Nodes that call each other over real sockets, on uvloop and asyncio."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

from flowctl.errors import ClosedError, LocalProtocolError, RpcError, RpcTimeoutError
from flowctl.nodes.rpc.access.access import AuthLevel
from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.peer import ConnectionID

WAIT_S = 20.0


async def echo(message: RpcMessage) -> list[bytes]:
    return message.data


def serve(node: RpcNode) -> RpcNode:
    """Add the commands that the tests call."""

    async def wait(message: RpcMessage) -> None:
        await asyncio.sleep(WAIT_S)

    async def fail(message: RpcMessage) -> None:
        raise ValueError("secret")

    node.add_category("a")
    node.add_request_command("a", "echo", echo)
    node.add_request_command("a", "wait", wait)
    node.add_request_command("a", "fail", fail)
    node.add_category("admin", AuthLevel.ADMIN)
    node.add_request_command("admin", "echo", echo)
    return node


@pytest.fixture
def pair(node, tmp_path):
    """Two nodes, the second connected to the first."""
    server, client = serve(node()), node()
    address = server.listen_plain(f"ipc://{tmp_path}/rpc")
    server.start()
    client.start()
    return server, client, client.connect_remote(address)


def test_request_when_answered_has_the_parts_that_the_handler_returned(pair):
    _, client, conn = pair
    assert client.request_future(conn, "a.echo", "x", b"", b"\x00y").get(WAIT_S) == [b"x", b"", b"\x00y"]


def test_request_when_the_connection_was_closed_fails_as_disconnected(pair):
    _, client, conn = pair
    pending = client.request_future(conn, "a.wait")
    client.disconnect(conn)
    for future in (pending, client.request_future(conn, "a.echo")):
        with pytest.raises(RpcError) as raised:
            future.get(WAIT_S)
        assert raised.value.code == "DISCONNECTED"


def test_request_when_the_server_stops_fails_as_shutting_down(pair):
    server, client, conn = pair
    pending = client.request_future(conn, "a.wait")
    client.request_future(conn, "a.echo").get(WAIT_S)  # so the other one has begun
    server.stop()
    with pytest.raises(RpcError) as raised:
        pending.get(WAIT_S)
    assert raised.value.code == "SHUTTING_DOWN"


@asynccontextmanager
async def connected(server: RpcNode, tmp_path: Path) -> AsyncIterator[tuple[RpcNode, ConnectionID]]:
    """Run a node and a client of it on this loop."""
    address = server.listen_plain(f"ipc://{tmp_path}/rpc")
    async with server, RpcNode(on_error=lambda *_: None) as client:
        yield client, await client.connect(address)


class Counting:
    """A stream without end that notes what it has made, and whether it was ended."""

    def __init__(self) -> None:
        self.made = 0
        self.ended = asyncio.Event()

    async def __call__(self, message: RpcMessage) -> AsyncIterator[str]:
        try:
            while True:
                self.made += 1
                yield str(self.made)
        finally:
            self.ended.set()


async def test_stream_when_its_taker_is_slow_stands_still_at_its_credit(tmp_path, loop_factory):
    server, numbers = RpcNode(), Counting()
    server.add_category("a")
    server.add_request_command("a", "numbers", numbers)
    server.add_request_command("a", "echo", echo)

    taken: list[bytes] = []
    async with connected(server, tmp_path) as (client, conn):
        async with aclosing(client.stream(conn, "a.numbers", credit=4)) as items:
            async for parts in items:
                taken += parts
                if len(taken) == 10:
                    for _ in range(5):
                        await client.call(conn, "a.echo", "x")
                    break
        made = numbers.made
        await numbers.ended.wait()
    assert taken == [b"%d" % number for number in range(1, 11)]
    assert made <= 10 + 4 + 1


async def test_stream_when_it_ends_or_fails_says_so_after_its_items(tmp_path, loop_factory):
    async def two(message: RpcMessage) -> AsyncIterator[list[bytes]]:
        yield [b"a", b""]
        yield [b"b"]
        if message.data:
            raise ValueError("secret")

    server = RpcNode(on_error=lambda *_: None)
    server.add_category("a")
    server.add_request_command("a", "two", two)
    server.add_request_command("a", "echo", echo)

    async with connected(server, tmp_path) as (client, conn):
        got: list[object] = [item async for item in client.stream(conn, "a.two", credit=1)]
        failing = aiter(client.stream(conn, "a.two", "fail"))
        got += [await anext(failing), await anext(failing)]
        with pytest.raises(RpcError) as raised:
            await anext(failing)
        got.append(raised.value.code)
        got.extend([item async for item in client.stream(conn, "a.echo", "x")])
        with pytest.raises(RpcError, match="stream"):
            await client.call(conn, "a.two")
    two_items = [[b"a", b""], [b"b"]]
    assert got == [*two_items, *two_items, "HANDLER_FAILED", [b"x"]]


@pytest.mark.parametrize("how", ["deadline", "withdrawn", "disconnected"])
async def test_handler_when_nobody_waits_any_more_is_cancelled(tmp_path, loop_factory, how):
    cancelled = asyncio.Event()

    async def wait(message: RpcMessage) -> None:
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            cancelled.set()

    server = RpcNode()
    server.add_category("a")
    server.add_request_command("a", "wait", wait)
    server.add_request_command("a", "echo", echo)

    async with connected(server, tmp_path) as (client, conn):
        task = asyncio.ensure_future(client.call(conn, "a.wait", timeout_s=0.05 if how == "deadline" else WAIT_S))
        await client.call(conn, "a.echo", "x")
        if how == "withdrawn":
            task.cancel()
        if how == "disconnected":
            client.disconnect(conn)
        await cancelled.wait()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is not None


def test_request_when_a_later_one_has_an_earlier_deadline_times_out_first(pair):
    _, client, conn = pair
    patient = client.request_future(conn, "a.wait")
    with pytest.raises(RpcTimeoutError):
        client.request_future(conn, "a.wait", timeout_s=0.05).get(WAIT_S)
    assert not patient.done()


def test_request_when_over_ipv6_is_answered(node):
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    server, client = serve(node()), node()
    address = server.listen_plain("tcp://[::1]:0")
    server.start()
    client.start()
    assert client.request_future(client.connect_remote(address), "a.echo", b"six").get() == [b"six"]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (RpcError("no file \udcff", code="NO_FILE"), "NO_FILE"),
        (RpcError("x", code="\udcff"), "?"),
        (RpcError("x", code="A" * (1 << 21)), "HANDLER_FAILED"),
        ([b""] * 2000, "HANDLER_FAILED"),
    ],
)
@pytest.mark.parametrize("plain", [False, True])
def test_request_when_its_outcome_cannot_be_sent_as_it_is_fails_at_once(node, tmp_path, answer, code, plain):
    server, client = node(), node()

    def handle(message: RpcMessage) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def handle_on_loop(message: RpcMessage) -> object:
        return handle(message)

    server.add_category("a")
    server.add_request_command("a", "do", handle if plain else handle_on_loop)
    address = server.listen_plain(f"ipc://{tmp_path}/rpc")
    server.start()
    client.start()
    with pytest.raises(RpcError) as raised:
        client.request_future(client.connect_remote(address), "a.do").get(WAIT_S)
    assert raised.value.code == code


def test_command_when_its_plain_handler_returns_a_coroutine_is_reported(loop_factory, tmp_path):
    """A lambda around a coroutine function would otherwise do nothing, and say nothing."""
    reported: Future[BaseException] = Future()
    node = RpcNode(loop_factory=loop_factory, on_error=lambda where, error: reported.set_result(error))
    node.add_category("a")
    node.add_command("a", "do", lambda message: echo(message))  # noqa: PLW0108  (a function that is no coroutine function)
    address = node.listen_plain(f"ipc://{tmp_path}/rpc")
    node.start()
    node.send(node.connect_remote(address), "a.do")
    assert "coroutine" in str(reported.result(WAIT_S))
    node.stop()


def test_parts_when_there_are_more_than_a_node_takes_are_refused_to_their_sender(pair):
    """They would be thrown away at the other end."""
    _, client, conn = pair
    with pytest.raises(LocalProtocolError, match="1001 parts"):
        client.request_future(conn, "a.echo", *[b""] * 1001)
    with pytest.raises(LocalProtocolError, match="1001 parts"):
        client.send(conn, "a.echo", *[b""] * 1001)


def test_requests_when_a_callback_of_one_exits_all_have_outcomes(pair):
    _, client, conn = pair
    futures = [client.request_future(conn, "a.wait") for _ in range(3)]
    futures[0].add_done_callback(lambda _: sys.exit(1))
    client.disconnect(conn)
    assert [type(future.exception(WAIT_S)) for future in futures] == [RpcError] * 3


@pytest.mark.parametrize("found", [b"tcp://127.0.0.1:1", 5, "nonsense", SystemExit(1), asyncio.CancelledError()])
def test_request_when_the_lookup_of_its_service_node_fails_oddly_fails_at_once(loop_factory, found):
    """Whatever a lookup returns or raises, the request has its outcome (OX-62)."""

    def lookup(pubkey: bytes) -> str | None:
        if isinstance(found, BaseException):
            raise found
        return found  # type: ignore[return-value]  # on purpose

    node = RpcNode(loop_factory=loop_factory, sn_lookup=lookup, on_error=lambda where, error: None)
    node.start()
    with pytest.raises(RpcTimeoutError):
        node.request_future(node.service_node(b"k" * 32), "a.b", timeout_s=10 * WAIT_S).get(WAIT_S)
    node.stop()


def test_node_when_a_middleware_raises_at_the_start_can_be_stopped(node):
    made = serve(node())
    made.add_middleware(lambda handler: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.start()
    assert (made.stop(), made.stop()) == (True, True)


def test_connect_when_its_timeout_is_no_number_is_an_error(node):
    """NaN would be a connection that is never told to have failed."""
    made = node()
    made.start()
    with pytest.raises(LocalProtocolError, match="timeout_s"):
        made.connect_remote("tcp://127.0.0.1:1", timeout_s=float("nan"))


def yields(message):
    yield "item"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda node: node.add_request_command("a", "yields", yields), "yields yields, and is a plain function"),
        (lambda node: node.add_service("a", node, object()), "service is .* it must be a class"),
        (lambda node: node.add_service("a", Protocol, Protocol), "implementation is the class Protocol"),
        (lambda node: node.send("tcp://127.0.0.1:1", "a.b"), "conn is .* it must be what connect\\(\\) has returned"),
        (lambda node: node.send(ConnectionID(1), "a.b"), "the node was not started"),
        (lambda node: node.request_future(ConnectionID(1), "a.b"), "the node was not started"),
    ],
)
def test_node_when_used_as_it_cannot_be_says_so(node, call, told):
    made = node()
    made.add_category("a")
    with pytest.raises(LocalProtocolError, match=told):
        call(made)


def test_node_when_it_was_stopped_says_so_of_either_kind(loop_factory):
    async def stop():
        async with RpcNode() as node:
            pass
        with pytest.raises(ClosedError, match="the node was stopped"):
            node.send(ConnectionID(1), "a.b")

    asyncio.run(stop())
    node = RpcNode(loop_factory=loop_factory)
    node.start()
    node.stop()
    with pytest.raises(ClosedError, match="the node was stopped"):
        node.send(ConnectionID(1), "a.b")
