"""What a node that listens sends and takes, octet for octet: raw sockets of pyzmq on the other side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import zmq

from flowctl.nodes.rpc.access.access import Access, AuthLevel
from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.wire.frames import make_tag

WAIT_S = 20.0
LONG = b"a." + b"x" * 250
"""One octet more than a command may have."""

LARGE_COUNT = 120
"""Items of half a MiB: several times what may wait for one peer, so that some moment of it finds the system full."""


@dataclass
class Point:
    x: int
    y: int


@dataclass
class Raw:
    """A DEALER that speaks for itself."""

    socket: zmq.Socket[bytes]

    def ask(self, *frames: bytes) -> list[bytes]:
        self.socket.send_multipart(frames)
        return self.receive()

    def receive(self) -> list[bytes]:
        assert self.socket.poll(WAIT_S * 1000), "nothing came"
        return self.socket.recv_multipart()


@pytest.fixture
def server(tmp_path) -> Iterator[tuple[RpcNode, str, list[Any], list[BaseException]]]:
    """A node with commands of all kinds, its address, what its commands were given, and what was raised."""
    raised: list[BaseException] = []
    node = RpcNode(on_error=lambda _, error: raised.append(error))
    seen: list[Any] = []

    async def echo(message: RpcMessage) -> list[bytes]:
        return message.data

    def echo_in_thread(message: RpcMessage) -> list[bytes]:
        return message.data

    async def fail(message: RpcMessage) -> None:
        raise ValueError("secret")

    def exits(message: RpcMessage) -> None:
        raise SystemExit("secret")

    async def none(message: RpcMessage) -> None:
        return None

    async def twice(message: RpcMessage) -> str:
        message.reply("one")
        message.reply("two")
        return "three"

    async def pong(message: RpcMessage) -> None:
        seen.append((message.command, message.data))
        message.back("their.pong", *message.data)

    async def stream(message: RpcMessage) -> AsyncIterator[list[bytes]]:
        for number in range(LARGE_COUNT if message.data == [b"large"] else 5):
            yield b"%03d" % number + b"x" * (1 << 19) if message.data == [b"large"] else message.data

    async def ask_back(message: RpcMessage) -> list[bytes]:
        return await node.call(message.conn, "their.question", "6 x 7")

    node.add_category("a")
    for name, handler in {
        "echo": echo,
        "thread": echo_in_thread,
        "fail": fail,
        "exits": exits,
        "none": none,
        "twice": twice,
    }.items():
        node.add_request_command("a", name, handler)
    node.add_request_command("a", "b.c", echo)
    node.add_request_command("a", "two", echo, takes=2)
    node.add_request_command("a", "point", lambda message, point: point, takes=Point)
    node.add_command("a", "quiet", lambda message, point: None, takes=Point)
    node.add_request_command("a", "ask", ask_back)
    node.add_request_command("a", "stream", stream)
    node.add_command("a", "pong", pong)
    node.add_category("basic", AuthLevel.BASIC)
    node.add_category("sn", Access(AuthLevel.NONE, remote_sn=True))
    node.add_category("local", Access(AuthLevel.NONE, remote_sn=True, local_sn=True))
    node.add_category("all", Access(AuthLevel.ADMIN, remote_sn=True, local_sn=True))
    for category in ("basic", "sn", "local", "all"):
        node.add_request_command(category, "ask", echo)
        node.add_command(category, "do", pong)
    node.add_command_alias("old.echo", "a.echo")
    node.add_command_alias("old.ask", "basic.ask")
    node.add_command_alias("older.echo", "old.echo")
    address = node.listen_plain(f"ipc://{tmp_path}/rpc")
    node.start()
    yield node, address, seen, raised
    node.stop()


@pytest.fixture
def connect(server, raw) -> Callable[..., Raw]:
    return lambda **options: Raw(raw(server[1], **options))


@pytest.fixture
def dealer(connect) -> Raw:
    return connect()


EXCHANGES = {
    "handshake": ([b"HI"], [b"HELLO"]),
    "request": ([b"a.echo", b"t", b"x"], [b"REPLY", b"t", b"x"]),
    "request on a thread": ([b"a.thread", b"t", b"x"], [b"REPLY", b"t", b"x"]),
    "parts": ([b"a.echo", b"\0\xff", b"", b"x", b""], [b"REPLY", b"\0\xff", b"", b"x", b""]),
    "no parts": ([b"a.echo", b"t"], [b"REPLY", b"t"]),
    "empty tag": ([b"a.echo", b"", b"x"], [b"REPLY", b"", b"x"]),
    "command": ([b"a.pong", b"x", b""], [b"their.pong", b"x", b""]),
    "a dot in a command": ([b"a.b.c", b"t", b"x"], [b"REPLY", b"t", b"x"]),
    "handler fails": ([b"a.fail", b"t"], [b"HANDLER_FAILED", b"REPLY", b"t"]),
    "handler on a thread fails": ([b"a.exits", b"t"], [b"HANDLER_FAILED", b"REPLY", b"t"]),
    "unknown request": ([b"a.who", b"t", b"x"], [b"UNKNOWNCOMMAND", b"a.who"]),
    "unknown category": ([b"z.echo", b"t"], [b"UNKNOWNCOMMAND", b"z.echo"]),
    "parts that are taken": ([b"a.two", b"t", b"x", b"y"], [b"REPLY", b"t", b"x", b"y"]),
    "parts that are not": (
        [b"a.two", b"t", b"x"],
        [b"WRONG_ARGUMENT", b"REPLY", b"t", b"a.two: it takes 2 parts, 1 came"],
    ),
    "a type": ([b"a.point", b"t", b'{"x": 1, "y": "2"}'], [b"REPLY", b"t", b'{"x":1,"y":2}']),
    "a type of which one is missing": (
        [b"a.point", b"t", b'{"x": 1}'],
        [b"WRONG_ARGUMENT", b"REPLY", b"t", b"a.point: y: Field required"],
    ),
    "no dot": ([b"echo", b"t"], [b"UNKNOWNCOMMAND", b"echo"]),
    "leading dot": ([b".echo", b"t"], [b"UNKNOWNCOMMAND", b".echo"]),
    "empty command": ([b"", b"t"], [b"UNKNOWNCOMMAND", b""]),
    "too long": ([LONG, b"t"], [b"UNKNOWNCOMMAND", LONG]),
    "no bytes of text": ([b"\xff.\xfe"], [b"UNKNOWNCOMMAND", b"\xff.\xfe"]),
    "forbidden request": ([b"basic.ask", b"t"], [b"FORBIDDEN", b"REPLY", b"t"]),
    "forbidden command": ([b"basic.do", b"t"], [b"FORBIDDEN", b"basic.do"]),
    "no service node calls": ([b"sn.ask", b"t"], [b"FORBIDDEN_SN", b"REPLY", b"t"]),
    "no service node commands": ([b"sn.do"], [b"FORBIDDEN_SN", b"sn.do"]),
    "this is no service node": ([b"local.ask", b"t"], [b"NOT_A_SERVICE_NODE", b"REPLY", b"t"]),
    "this is none, commanded": ([b"local.do"], [b"NOT_A_SERVICE_NODE", b"local.do"]),
    "level comes first": ([b"all.ask"], [b"FORBIDDEN", b"all.ask"]),
    "then the tag": ([b"local.ask"], [b"NOT_A_SERVICE_NODE", b"local.ask"]),
    "no tag": ([b"a.echo"], [b"NO_REPLY_TAG", b"a.echo"]),
    "alias": ([b"old.echo", b"t", b"x"], [b"REPLY", b"t", b"x"]),
    "alias of what is forbidden": ([b"old.ask", b"t"], [b"FORBIDDEN", b"REPLY", b"t"]),
    "alias without a tag": ([b"old.echo"], [b"NO_REPLY_TAG", b"old.echo"]),
    "alias of an alias": ([b"older.echo", b"t"], [b"UNKNOWNCOMMAND", b"older.echo"]),
}


@pytest.mark.parametrize(("sent", "answer"), EXCHANGES.values(), ids=EXCHANGES.keys())
def test_message_when_it_comes_is_answered_in_these_octets(dealer, sent, answer):
    """Handshake, replies and refusals are those of OxenMQ, the command as it was sent (OX-63, OX-64, OX-66, OX-67)."""
    assert dealer.ask(*sent) == answer


SILENT = {
    "reply to nothing": [b"REPLY", b"t", b"x"],
    "reply without a tag": [b"REPLY"],
    "hello": [b"HELLO"],
    "bye": [b"BYE"],
    "unknown": [b"UNKNOWNCOMMAND", b"a.b"],
    "unknown, and no more": [b"UNKNOWNCOMMAND"],
    "refused command": [b"FORBIDDEN", b"a.b"],
    "refused request": [b"FORBIDDEN_SN", b"REPLY", b"t"],
    "no tag": [b"NO_REPLY_TAG", b"a.b"],
    "failure of nothing": [b"SOME_CODE", b"REPLY", b"t", b"text"],
    "item of nothing": [b"ITEM", b"t", b"x"],
    "item": [b"ITEM"],
    "credit for nothing": [b"CREDIT", b"t", b"5"],
    "credit": [b"CREDIT", b"t"],
    "credit without end": [b"CREDIT", b"t", b"9" * 5000],
    "negative credit": [b"CREDIT", b"t", b"-1"],
    "cancel nothing": [b"CANCEL", b"t"],
    "cancel": [b"CANCEL"],
    "answers none": [b"a.none", b"t"],
    "command with a wrong argument": [b"a.quiet", b"{}"],
}


@pytest.mark.parametrize("sent", SILENT.values(), ids=SILENT.keys())
def test_message_when_it_asks_for_nothing_is_not_answered(dealer, sent):
    """What comes out of place is passed over: no answer to an answer, or two nodes would never stop."""
    dealer.socket.send_multipart(sent)
    assert dealer.ask(b"a.echo", b"t", b"next") == [b"REPLY", b"t", b"next"]


def test_reply_when_given_twice_goes_out_once(dealer):
    assert dealer.ask(b"a.twice", b"t") == [b"REPLY", b"t", b"one"]
    assert dealer.ask(b"a.echo", b"u") == [b"REPLY", b"u"]


def test_request_when_the_server_asks_back_runs_over_the_same_connection(dealer):
    question = dealer.ask(b"a.ask", b"mine")
    assert (question[0], len(question[1]), question[2]) == (b"their.question", 15, b"6 x 7")
    assert dealer.ask(b"REPLY", question[1], b"42", b"") == [b"REPLY", b"mine", b"42", b""]


def test_reply_when_from_another_connection_than_asked_does_not_count(dealer, server, connect):
    question = dealer.ask(b"a.ask", b"mine")
    thief = connect()
    thief.socket.send_multipart([b"REPLY", question[1], b"41"])
    assert thief.ask(b"HI") == [b"HELLO"]
    assert dealer.ask(b"REPLY", question[1], b"42") == [b"REPLY", b"mine", b"42"]


def test_commands_when_sent_in_a_row_are_handled_in_order(dealer, server):
    for number in range(50):
        dealer.socket.send_multipart([b"a.pong", b"%d" % number])
    assert [dealer.receive()[1] for _ in range(50)] == [b"%d" % number for number in range(50)]
    assert [data for _, data in server[2]] == [[b"%d" % number] for number in range(50)]


def test_message_when_larger_than_a_mebibyte_ends_its_connection(dealer, server, connect):
    """It never reaches a handler; others are not affected (OX-76)."""
    assert dealer.ask(b"HI") == [b"HELLO"]
    monitor = dealer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.socket.send_multipart([b"a.pong", b"x" * ((1 << 20) + 1)])
    assert monitor.poll(WAIT_S * 1000), "it was not disconnected"
    other = connect()
    assert other.ask(b"a.echo", b"t", b"x" * (1 << 20))[2] == b"x" * (1 << 20)
    assert server[2] == []
    dealer.socket.disable_monitor()
    monitor.close(0)


def test_disconnect_when_of_an_incoming_connection_says_bye(dealer, server):
    node = server[0]
    assert dealer.ask(b"HI") == [b"HELLO"]
    node.disconnect(node_peers(node)[0].conn)
    assert dealer.receive() == [b"BYE"]


def node_peers(node: RpcNode) -> list[Any]:
    return [peer for listener in node._reaching.listeners.values() for peer in listener.routes.values()]


def test_request_when_the_node_stops_is_told_so(dealer, server):
    dealer.ask(b"a.ask", b"mine")
    server[0].stop()
    frames = [dealer.receive() for _ in range(2)]  # what it asked back is withdrawn
    assert [b"SHUTTING_DOWN", b"REPLY", b"mine"] in frames


def test_connections_when_they_end_are_forgotten(server, connect):
    node = server[0]
    peers = [connect() for _ in range(5)]
    for peer in peers:
        assert peer.ask(b"HI") == [b"HELLO"]
    assert len(node_peers(node)) == 5
    for peer in peers:
        peer.socket.close(0)
    last = connect()  # its messages come after what the others' ends have caused, sooner or later
    while len(node_peers(node)) > 1:
        assert last.ask(b"HI") == [b"HELLO"]


def test_unread_replies_when_they_are_many_cost_bounded_memory(server, connect):
    node = server[0]
    deaf = connect(rcvhwm=1, rcvbuf=4096, sndhwm=0)
    for number in range(100):
        deaf.socket.send_multipart([b"a.echo", b"%d" % number, b"x" * (1 << 20)])
    other = connect()
    while not node.statistics().unsent_count:
        assert other.ask(b"a.echo", b"t", b"x") == [b"REPLY", b"t", b"x"]


WORDS = (
    *b"REPLY HI BYE HELLO ITEM CREDIT CANCEL FORBIDDEN UNKNOWNCOMMAND NO_REPLY_TAG".split(),
    *b"a.echo a.pong a.none a.thread a.stream a. . 5 -1".split(),
    *(b"", b"\0", b"\xff" * 15, make_tag(1, 0.0), make_tag(2, 1e9, 3), make_tag(3, 0.01, 255)),
)


def test_messages_when_of_any_frames_leave_the_node_at_work(server, connect):
    node, _, _, raised = server
    rng, chaos, other = Random(17), connect(), connect()
    for number in range(2000):
        chaos.socket.send_multipart([rng.choice(WORDS) for _ in range(rng.randrange(1, 6))])
        if number % 100 == 0:
            assert other.ask(b"a.echo", b"t", b"x") == [b"REPLY", b"t", b"x"]
    chaos.socket.send_multipart([b"a.echo", b"the last", b"x"])
    while chaos.receive()[:2] != [b"REPLY", b"the last"]:
        pass
    assert raised == []
    assert node.statistics().malformed_count > 0


def test_stream_when_its_caller_speaks_the_wire_comes_item_by_item(dealer):
    tag = make_tag(7, 20.0, 2)
    assert [dealer.ask(b"a.stream", tag, b"x"), dealer.receive()] == [[b"ITEM", tag, b"x"]] * 2
    assert dealer.ask(b"HI") == [b"HELLO"]  # nothing more came
    assert [dealer.ask(b"CREDIT", tag, b"3"), dealer.receive(), dealer.receive()] == [[b"ITEM", tag, b"x"]] * 3
    assert dealer.receive() == [b"REPLY", tag]
    assert dealer.ask(b"a.stream", b"foreign") == [
        *(b"HANDLER_FAILED", b"REPLY", b"foreign"),
        b"it streams: call it with stream()",
    ]


def test_stream_when_its_caller_does_not_read_stands_still_and_misses_nothing(server, connect):
    tag = make_tag(7, 20.0, 255)
    deaf, other = connect(rcvhwm=1, rcvbuf=4096), connect()
    deaf.socket.send_multipart([b"a.stream", tag, b"large"])
    while not server[0].statistics().unsent_count:
        assert other.ask(b"HI") == [b"HELLO"]
    items = [deaf.receive() for _ in range(LARGE_COUNT)]
    assert [item[:2] for item in items] == [[b"ITEM", tag]] * LARGE_COUNT
    assert [item[2][:3] for item in items] == [b"%03d" % number for number in range(LARGE_COUNT)]
    assert deaf.receive() == [b"REPLY", tag]
