"""Nodes that call each other over real sockets, on uvloop and asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from flowctl.errors import LocalProtocolError, RpcError, RpcTimeoutError
from flowctl.pollgroup import LoopFactory
from flowctl.rpc.access.access import AuthLevel
from flowctl.rpc.message import Message
from flowctl.rpc.node import RpcNode

WAIT_S = 20.0


@pytest.fixture
def node(loop_factory: LoopFactory) -> Iterator[Callable[[], RpcNode]]:
    """Make nodes; they are stopped at the end."""
    made: list[RpcNode] = []

    def make() -> RpcNode:
        made.append(RpcNode(loop_factory=loop_factory, on_error=lambda where, error: None))
        return made[-1]

    yield make
    for item in made:
        item.stop()


def serve(node: RpcNode) -> RpcNode:
    """Add the commands that the tests call."""

    async def echo(message: Message) -> list[bytes]:
        return message.data

    async def wait(message: Message) -> None:
        await asyncio.sleep(WAIT_S)

    async def fail(message: Message) -> None:
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
    """Parts arrive as they were, empty ones included."""
    _, client, conn = pair
    assert client.request_future(conn, "a.echo", "x", b"", b"\x00y").get(WAIT_S) == [b"x", b"", b"\x00y"]


def test_request_when_the_command_is_unknown_fails_at_once(pair):
    """The caller is told, not left to its timeout (OX-58)."""
    _, client, conn = pair
    got, done = [], threading.Event()
    client.request(conn, "a.none", on_reply=lambda *outcome: (got.append(outcome), done.set()))
    assert done.wait(WAIT_S)
    assert got == [(False, [b"UNKNOWNCOMMAND"])]


def test_request_when_the_handler_raises_fails_at_once_and_others_go_on(pair):
    """The caller learns that it failed, and nothing of the exception (OX-59)."""
    _, client, conn = pair
    with pytest.raises(RpcError) as raised:
        client.request_future(conn, "a.fail").get(WAIT_S)
    assert (raised.value.code, "secret" in str(raised.value)) == ("HANDLER_FAILED", False)
    assert client.request_future(conn, "a.echo", "x").get(WAIT_S) == [b"x"]


def test_request_when_it_needs_a_higher_level_is_forbidden(pair):
    """A refusal is an outcome of its own."""
    _, client, conn = pair
    with pytest.raises(RpcError) as raised:
        client.request_future(conn, "admin.echo").get(WAIT_S)
    assert raised.value.code == "FORBIDDEN"


def test_request_when_its_deadline_passes_times_out(pair):
    """The exception is a TimeoutError."""
    _, client, conn = pair
    with pytest.raises(RpcTimeoutError):
        client.request_future(conn, "a.wait", timeout_s=0.05).get(WAIT_S)


def test_request_when_the_connection_was_closed_fails_as_disconnected(pair):
    """Pending requests fail with the connection, later ones at once."""
    _, client, conn = pair
    pending = client.request_future(conn, "a.wait")
    client.disconnect(conn)
    for future in (pending, client.request_future(conn, "a.echo")):
        with pytest.raises(RpcError) as raised:
            future.get(WAIT_S)
        assert raised.value.code == "DISCONNECTED"


def test_request_when_the_server_stops_fails_as_shutting_down(pair):
    """A handler that is cancelled by the end of its node says so."""
    server, client, conn = pair
    pending = client.request_future(conn, "a.wait")
    client.request_future(conn, "a.echo").get(WAIT_S)  # so the other one has begun
    server.stop()
    with pytest.raises(RpcError) as raised:
        pending.get(WAIT_S)
    assert raised.value.code == "SHUTTING_DOWN"


def test_node_when_started_takes_no_commands_any_more(node):
    """A node is set up wholly, then started (OX-66)."""
    item = node()
    item.add_category("a")
    item.start()
    with pytest.raises(LocalProtocolError, match="after start"):
        item.add_category("b")


def test_call_when_on_the_loop_of_the_caller_needs_no_thread(tmp_path, loop_factory):
    """`async with` runs a node on the running loop; both ends may share it."""

    async def main() -> list[bytes]:
        server = serve(RpcNode())
        address = server.listen_plain(f"ipc://{tmp_path}/rpc")
        async with server, RpcNode() as client:
            conn = await client.connect(address)
            return await client.call(conn, "a.echo", "x")

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(main()) == [b"x"]
