"""Categories, commands and aliases as they are added, and the order in which commands are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from functools import partial, wraps

import pytest

from flowctl.errors import LocalProtocolError
from flowctl.nodes.rpc.access.access import Access, AuthLevel
from flowctl.nodes.rpc.commands import Category, HandlerKind, RpcCommand, access_of, kind_of
from flowctl.nodes.rpc.commands import described as described_as
from flowctl.nodes.rpc.jobs.slots import Slots
from flowctl.nodes.rpc.message import DeferredSend, RpcMessage, parts_of
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.peer import ConnectionID

WAIT_S = 20.0


def plain(message: RpcMessage) -> None:
    """Do nothing."""


async def coroutine(message: RpcMessage) -> None:
    """Do nothing."""


async def stream(message: RpcMessage) -> AsyncIterator[str]:
    yield "x"


class Callable:
    async def __call__(self, message: RpcMessage) -> None:
        """Do nothing."""

    async def method(self, message: RpcMessage) -> AsyncIterator[str]:
        yield "x"


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (plain, HandlerKind.PLAIN),
        (lambda message: None, HandlerKind.PLAIN),
        (len, HandlerKind.PLAIN),
        (coroutine, HandlerKind.COROUTINE),
        (partial(partial(coroutine)), HandlerKind.COROUTINE),
        (Callable(), HandlerKind.COROUTINE),
        (stream, HandlerKind.STREAM),
        (Callable().method, HandlerKind.STREAM),
    ],
    ids=["function", "lambda", "builtin", "coroutine", "partial", "object", "generator", "method"],
)
def test_kind_when_of_a_handler_says_where_it_runs(handler, kind):
    assert kind_of(handler) is kind


@pytest.mark.parametrize("given", [Access(AuthLevel.BASIC), AuthLevel.BASIC, "basic"])
def test_access_when_given_as_a_level_or_its_name_is_that_level(given):
    assert access_of(given) == Access(AuthLevel.BASIC)


@pytest.mark.parametrize("given", ["root", "", None, 1])
def test_access_when_there_is_no_such_level_is_refused(given):
    """A typing error must not open a category to everybody."""
    with pytest.raises(LocalProtocolError, match="access is"):
        access_of(given)


@pytest.fixture
def node() -> Iterator[RpcNode]:
    node = RpcNode()
    node.add_category("a")
    node.add_command("a", "b", plain)
    yield node
    node.stop()


NOBODY = ConnectionID(1 << 30)
MISTAKES = {
    "empty category": lambda node: node.add_category(""),
    "dot in a category": lambda node: node.add_category("b.c"),
    "long category": lambda node: node.add_category("x" * 51),
    "category with many bytes": lambda node: node.add_category("ä" * 26),
    "category twice": lambda node: node.add_category("a"),
    "long command": lambda node: node.add_command("a", "x" * 201, plain),
    "command twice": lambda node: node.add_request_command("a", "b", plain),
    "unknown category": lambda node: node.add_command("z", "b", plain),
    "alias without a dot": lambda node: node.add_command_alias("ab", "a.b"),
    "alias without a category": lambda node: node.add_command_alias(".b", "a.b"),
    "alias that is no text": lambda node: node.add_command_alias(None, "a.b"),
    "alias of what has no dot": lambda node: node.add_command_alias("a.x", "ab"),
    "long alias": lambda node: node.add_command_alias("a." + "x" * 250, "a.b"),
    "alias of the name of a command": lambda node: node.add_command_alias("a.b", "a.c"),
    "command of the name of an alias": lambda node: [
        node.add_command_alias("a.c", "a.b"),
        node.add_command("a", "c", plain),
    ],
    "alias of what every node has": lambda node: [node.add_command_alias("rpc.describe", "a.b"), node.start()],
    "alias twice": lambda node: [node.add_command_alias("c.d", "a.b") for _ in range(2)],
    "stream as a command": lambda node: node.add_command("a", "c", stream),
    "command sent without a dot": lambda node: [node.start(), node.send(NOBODY, "BYE")],
    "request without a dot": lambda node: [node.start(), node.request_future(NOBODY, "ab")],
    "parts in a list": lambda node: [node.start(), node.send(NOBODY, "a.b", [b"x"])],
    "no handler": lambda node: node.add_command("a", "c", None),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_node_when_set_up_wrongly_says_so_at_once(node, mistake):
    """What would never work is refused where it is written (OX-66)."""
    with pytest.raises(LocalProtocolError):
        mistake(node)


def test_names_when_of_the_greatest_length_are_taken(node):
    """50 octets for a category, 200 for a command, which may be empty or have dots (OX-66)."""
    node.add_category("x" * 50)
    node.add_command("x" * 50, "y" * 200, plain)
    for name in ("", "c.d", "."):
        node.add_command("a", name, plain)
    assert {"a.", "a.c.d", "a..", f"{'x' * 50}.{'y' * 200}"} <= node.statistics().called_count.keys()


LATE = {
    "category": lambda node: node.add_category("late"),
    "command": lambda node: node.add_command("a", "late", plain),
    "request": lambda node: node.add_request_command("a", "late", plain),
    "alias": lambda node: node.add_command_alias("x.late", "a.b"),
    "middleware": lambda node: node.add_middleware(lambda handler: handler),
    "threads": lambda node: node.set_general_threads(1),
    "batch threads": lambda node: node.set_batch_threads(1),
    "reply threads": lambda node: node.set_reply_threads(1),
    "tagged thread": lambda node: node.add_tagged_thread("late"),
    "start": lambda node: node.start(),
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE.keys())
def test_node_when_started_is_not_changed_any_more(node, late):
    """A node is set up wholly, then started (OX-66)."""
    node.start()
    with pytest.raises(LocalProtocolError, match="after start"):
        late(node)


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("ä", ["ä".encode()]),
        (b"", [b""]),
        (bytearray(b"x"), [b"x"]),
        (memoryview(b"x"), [b"x"]),
        ([], []),
        (["x", [b"y", ("z",)]], [b"x", b"y", b"z"]),
        ((part for part in "xy"), [b"x", b"y"]),
    ],
)
def test_parts_when_a_handler_returns_them_are_flattened(value, parts):
    assert parts_of(value) == parts


@pytest.mark.parametrize(
    "value",
    [5, {"a": 1}, [b"x", 5], object(), b"x" * ((1 << 20) + 1)],
    ids=["number", "dict", "in a list", "object", "too long"],
)
def test_parts_when_they_are_something_else_are_refused(value):
    with pytest.raises(LocalProtocolError, match="reply"):
        parts_of(value)


def test_connection_ids_when_of_service_nodes_are_equal_by_key():
    key = b"k" * 32
    by_key, other_route = ConnectionID(-1, b"", key, True), ConnectionID(3, b"r", key, True)
    assert by_key == other_route
    assert hash(by_key) == hash(other_route)
    assert ConnectionID(3, b"r", key) == ConnectionID(3, b"r", b"x" * 32)
    assert len({ConnectionID(3, b"r"), ConnectionID(3, b"s"), ConnectionID(4, b"r"), ConnectionID(3, b"r")}) == 3
    assert by_key != ConnectionID(-1, b"", key)


def test_deferred_answer_when_given_twice_is_refused(node):
    sent = []

    class Node:
        def send(self, conn: ConnectionID, command: str, *parts: object) -> None:
            sent.append((command, parts))

    class Peer:
        conn = ConnectionID(1)

    later = RpcMessage(Node(), Peer(), b"a.b", None, [], None).later()
    assert isinstance(later, DeferredSend)
    with pytest.raises(LocalProtocolError, match="takes a command"):
        later()
    with pytest.raises(LocalProtocolError, match="text or bytes"):
        later(5)
    later("their.pong", "x")
    with pytest.raises(LocalProtocolError, match="given already"):
        later("their.pong", "y")
    assert sent == [("their.pong", (b"x",))]


@pytest.fixture
def described(tmp_path) -> Iterator:
    """Return what `rpc.describe` says to callers of a level, and the server's statistics."""
    made: list[RpcNode] = []

    def describe(level: AuthLevel, *, category: str = "a") -> tuple[dict, RpcNode]:
        server, client = RpcNode(), RpcNode()
        made.extend((server, client))
        server.add_category(category)
        server.add_category("admin", AuthLevel.ADMIN)
        server.add_category("sn", Access(AuthLevel.NONE, remote_sn=True))
        server.add_request_command(category, "plain", plain)
        server.add_request_command(category, "stream", stream)
        server.add_command("admin", "do", coroutine)
        server.add_command("sn", "do", coroutine)
        server.add_command_alias("old.do", "admin.do")
        address = server.listen_plain(f"ipc://{tmp_path}/{level.name}", level)
        for item in (server, client):
            item.start()
        conn = client.connect_remote(address)
        [text] = client.request_future(conn, "rpc.describe").get(WAIT_S)
        return json.loads(text), server

    yield describe
    for item in made:
        item.stop()


def test_describe_when_asked_says_what_the_caller_may_call(described):
    a_plain = {"name": "a.plain", "kind": "request", "access": "none", "summary": "Do nothing."}
    a_stream = {"name": "a.stream", "kind": "stream", "access": "none", "summary": ""}
    itself = {
        "name": "rpc.describe",
        "kind": "request",
        "access": "none",
        "summary": "Return the commands that you may call, as JSON.",
    }
    health = itself | {
        "name": "rpc.health",
        "summary": "Return whether the node, or a category of it, serves: SERVING, NOT_SERVING, SERVICE_UNKNOWN.",
    }
    admin = {"kind": "command", "access": "admin", "summary": "Do nothing."}
    told, server = described(AuthLevel.NONE)
    assert told == {"commands": [a_plain, a_stream, itself, health]}
    told, _ = described(AuthLevel.ADMIN)
    alias = {"name": "old.do", **admin, "alias_of": "admin.do"}
    assert told == {"commands": [a_plain, a_stream, {"name": "admin.do", **admin}, alias, itself, health]}
    assert server.statistics().called_count["rpc.describe"] == 1


def test_middleware_when_added_wraps_every_handler_the_first_outermost(tmp_path):
    server, client, calls = RpcNode(), RpcNode(), []

    def named(name):
        def wrap(handler):
            if kind_of(handler) is not HandlerKind.PLAIN:
                return handler

            @wraps(handler)
            def wrapped(message: RpcMessage):
                calls.append(f"{name} {message.command.decode()}")
                return [*handler(message), name]

            return wrapped

        return wrap

    server.add_category("a")
    server.add_request_command("a", "b", lambda message: ["x"])
    server.add_command_alias("old.b", "a.b")
    server.add_middleware(named("outer"))
    server.add_middleware(named("inner"))
    address = server.listen_plain(f"ipc://{tmp_path}/rpc")
    for item in (server, client):
        item.start()
    conn = client.connect_remote(address)
    assert client.request_future(conn, "old.b").get(WAIT_S) == [b"x", b"inner", b"outer"]
    assert calls == ["outer old.b", "inner old.b"]
    for item in (client, server):
        item.stop()


def test_statistics_when_taken_count_what_has_happened(tmp_path):
    server, client = RpcNode(on_error=lambda *_: None), RpcNode()
    server.add_category("a")
    server.add_request_command("a", "b", lambda message: "x")
    server.add_category("admin", AuthLevel.ADMIN)
    server.add_request_command("admin", "b", coroutine)
    address = server.listen_plain(f"ipc://{tmp_path}/rpc")
    before = server.statistics()
    for item in (server, client):
        item.start()
    conn = client.connect_remote(address)
    for command in ("a.b", "a.b", "admin.b", "a.none"):
        client.request_future(conn, command).exception(WAIT_S)
    after, ours = server.statistics(), client.statistics()
    assert (before.incoming, before.called_count["a.b"]) == (0, 0)
    assert (after.incoming, after.called_count["a.b"], after.called_count["admin.b"]) == (1, 2, 0)
    assert (after.refused_count["FORBIDDEN"], after.refused_count["UNKNOWNCOMMAND"]) == (1, 1)
    assert (ours.outgoing, ours.asked_count, ours.waiting) == (1, 4, 0)
    for item in (client, server):
        item.stop()


def test_send_when_it_cannot_be_sent_tells_why(node):
    """There is no such connection: the callback for failures is called, the other not (OX-71)."""
    why: Future[str] = Future()
    node.start()
    node.send(ConnectionID(99), "a.b", queue_full=lambda: why.set_result("full"), queue_failure=why.set_result)
    assert why.result(WAIT_S) == "there is no such connection"


async def test_outcome_when_waited_for_on_the_nodes_own_thread_is_refused(tmp_path, loop_factory):
    async with RpcNode() as node:
        address = node.listen_plain(f"ipc://{tmp_path}/rpc")
        conn = await node.connect(address)
        future = node.request_future(conn, "rpc.describe")
        with pytest.raises(LocalProtocolError, match="own thread"):
            future.get()
        with pytest.raises(LocalProtocolError, match="own thread"):
            node.connect_remote(address)
        assert len(await asyncio.wrap_future(future)) == 1


def test_describe_when_there_are_many_commands_stays_below_the_limit_of_a_message():
    command = RpcCommand(Category("a", Access(), Slots().add_category("a")), plain, is_request=True)
    commands = {b"a.%05d" % number + b"x" * 200: command for number in range(5000)}
    text = described_as(commands, {})
    assert 800_000 < len(text) < 1 << 20
    assert json.loads(text)["commands"][0]["name"] == "a.00000" + "x" * 200
