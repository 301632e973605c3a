"""What a node that dials sends and takes, octet for octet: a raw ROUTER of pyzmq on the other side."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import zmq
from connection_kit import wait_until
from zmq_kit import serve_curve

from flowctl.core.outcomes.backoff import Backoff
from flowctl.errors import LocalProtocolError, RpcError
from flowctl.nodes.rpc.message import RpcMessage, parts_of
from flowctl.nodes.rpc.node import RequestFuture, RpcNode
from flowctl.nodes.rpc.peers import dialled, reaching
from flowctl.nodes.rpc.peers.peer import MAX_PART_BYTES, ConnectionID
from flowctl.nodes.rpc.wire.frames import make_tag, read_tag
from flowctl.wire.zmtp.keys import KeyPair

WAIT_S = 20.0
QUICK = Backoff(first_s=0.05, most_s=0.1)


class RawListener:
    """A ROUTER that speaks for itself, and one node connected to it."""

    def __init__(self, router: zmq.Socket[bytes], node: RpcNode, address: str) -> None:
        self.router = router
        self.node = node
        connected: Future[ConnectionID] = Future()
        node.connect_remote(address, connected.set_result, lambda _, why: connected.set_exception(OSError(why)))
        self.route, *hello = self.receive()
        assert hello == [b"HI"]
        self.send(b"HELLO")
        self.conn = connected.result(WAIT_S)

    def receive(self) -> list[bytes]:
        assert self.router.poll(WAIT_S * 1000), "nothing came"
        return self.router.recv_multipart()

    def send(self, *frames: bytes) -> None:
        self.router.send_multipart([self.route, *frames])

    def asked(self, command: str, *parts: bytes, timeout_s: float = WAIT_S) -> tuple[RequestFuture, bytes]:
        """Have the node send a request; return its outcome to be, and its tag."""
        future = self.node.request_future(self.conn, command, *parts, timeout_s=timeout_s)
        _, name, tag, *rest = self.receive()
        assert (name, len(tag), rest) == (command.encode(), 15, list(parts))
        return future, tag


@pytest.fixture(params=["plain"])
def remote(request, tmp_path) -> Iterator[RawListener]:
    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.maxmsgsize = MAX_PART_BYTES  # as OxenMQ has it
    address = f"ipc://{tmp_path}/rpc"
    if request.param == "curve":
        serve_curve(router, keys := KeyPair.generate())
    router.bind(address)
    if request.param == "curve":
        address = f"ipc+curve://{tmp_path}/rpc/{keys.public.hex()}"
    node = RpcNode(on_error=lambda *_: None)

    async def echo(message: RpcMessage) -> list[bytes]:
        return message.data

    answered, tasks = asyncio.Event(), []

    async def go_on(message: RpcMessage) -> None:
        await answered.wait()
        node.request(message.conn, "x.later", on_reply=lambda ok, data: None)

    async def nested(message: RpcMessage) -> list[bytes]:
        tasks.append(asyncio.create_task(go_on(message)))
        reply = await node.call(message.conn, "x.y")
        asyncio.get_running_loop().call_later(0.01, answered.set)
        return reply

    def blocks(message: RpcMessage) -> None:
        message.reply(*node.request_future(message.conn, "x.y").get(WAIT_S))
        node.request(message.conn, "x.later", on_reply=lambda ok, data: None)

    def chains(message: RpcMessage) -> None:
        def first(ok: bool, data: list[bytes]) -> None:
            node.request(message.conn, "x.z", on_reply=lambda ok, data: None)

        message.later()
        node.request(message.conn, "x.y", on_reply=first)

    node.add_category("a")
    node.add_request_command("a", "chains", chains)
    node.add_request_command("a", "nested", nested)
    node.add_request_command("a", "blocks", blocks)
    node.add_request_command("a", "echo", echo)
    node.add_request_command("a", "more", lambda message: message.data[0] + b"x")
    node.start()
    yield RawListener(router, node, address)
    node.stop()
    context.destroy(linger=0)


def code_of(future: RequestFuture) -> str:
    with pytest.raises(RpcError) as raised:
        future.get(WAIT_S)
    return raised.value.code


@pytest.mark.parametrize("command", [b"a.nested", b"a.blocks"])
def test_request_when_a_handler_sends_it_has_the_time_that_its_caller_waits(remote, command):
    remote.send(command, make_tag(1, 5.0))
    _, name, tag = remote.receive()
    left_s, _ = read_tag(tag)
    assert (name, 0 < left_s <= 5.0) == (b"x.y", True)
    remote.send(b"REPLY", tag, b"ok")
    frames = [remote.receive()[1:] for _ in range(2)]
    assert [b"REPLY", make_tag(1, 5.0), b"ok"] in frames
    [later] = [frames for frames in frames if frames[0] == b"x.later"]
    assert read_tag(later[1])[0] == 15.0


def test_request_when_a_callback_of_a_handler_sends_it_has_the_time_that_its_caller_waits(remote):
    remote.send(b"a.chains", make_tag(1, 5.0))
    _, name, tag = remote.receive()
    remote.send(b"REPLY", tag, b"ok")
    _, then, second = remote.receive()
    assert (name, then, 0 < read_tag(second)[0] <= 5.0) == (b"x.y", b"x.z", True)


def test_request_when_its_handler_has_no_deadline_has_its_own(remote):
    remote.send(b"a.nested", b"a foreign tag")
    _, name, tag = remote.receive()
    assert (name, read_tag(tag)[0]) == (b"x.y", 15.0)


def test_command_when_sent_has_its_parts_after_its_name(remote):
    remote.node.send(remote.conn, "their.do", "ä", b"", b"\0")
    assert remote.receive()[1:] == [b"their.do", "ä".encode(), b"", b"\0"]


ANSWERS = {
    "no parts": ([b"REPLY", b"TAG"], []),
    "an empty part": ([b"REPLY", b"TAG", b""], [b""]),
    "parts": ([b"REPLY", b"TAG", b"x", b"", b"y" * 100_000], [b"x", b"", b"y" * 100_000]),
    "unknown": ([b"UNKNOWNCOMMAND", b"their.ask"], "UNKNOWNCOMMAND"),
    "forbidden": ([b"FORBIDDEN", b"REPLY", b"TAG"], "FORBIDDEN"),
    "no service node": ([b"FORBIDDEN_SN", b"REPLY", b"TAG"], "FORBIDDEN_SN"),
    "not one": ([b"NOT_A_SERVICE_NODE", b"REPLY", b"TAG"], "NOT_A_SERVICE_NODE"),
    "failed": ([b"HANDLER_FAILED", b"REPLY", b"TAG", b"why"], "HANDLER_FAILED"),
    "a code of theirs": ([b"OUT_OF_PAPER", b"REPLY", b"TAG"], "OUT_OF_PAPER"),
}


@pytest.mark.parametrize(("frames", "outcome"), ANSWERS.values(), ids=ANSWERS.keys())
def test_answer_when_it_comes_is_the_outcome_of_the_request(remote, frames, outcome):
    """Its parts, or the code of the failure, at once (OX-58)."""
    future, tag = remote.asked("their.ask", b"x")
    remote.send(*[tag if frame == b"TAG" else frame for frame in frames])
    assert (code_of(future) if isinstance(outcome, str) else future.get(WAIT_S)) == outcome


def test_unknown_command_when_told_ends_the_oldest_request_with_it(remote):
    first, _ = remote.asked("their.ask")
    other, other_tag = remote.asked("their.other")
    second, second_tag = remote.asked("their.ask")
    remote.send(b"UNKNOWNCOMMAND", b"their.none")
    remote.send(b"UNKNOWNCOMMAND", b"their.ask")
    assert code_of(first) == "UNKNOWNCOMMAND"
    remote.send(b"REPLY", other_tag, b"other")
    remote.send(b"REPLY", second_tag, b"second")
    assert (other.get(WAIT_S), second.get(WAIT_S)) == ([b"other"], [b"second"])


def test_reply_when_late_or_repeated_changes_nothing(remote, caplog):
    """The first outcome counts; the others are dropped and counted, with a warning now and then (OX-61)."""
    got: list[Any] = []
    told = threading.Event()
    remote.node.request(
        remote.conn, "their.ask", on_reply=lambda ok, data: (got.append((ok, data)), told.set()), timeout_s=0.02
    )
    tag = remote.receive()[2]
    assert told.wait(WAIT_S)
    remote.send(b"REPLY", tag, b"late")
    future, tag = remote.asked("their.ask")
    for answer in (b"first", b"second"):
        remote.send(b"REPLY", tag, answer)
    remote.send(b"REPLY", b"x" * 15, b"foreign")
    assert future.get(WAIT_S) == [b"first"]
    last, tag = remote.asked("their.ask")
    remote.send(b"REPLY", tag)
    assert last.get(WAIT_S) == []
    assert got == [(False, [b"TIMEOUT"])]
    assert remote.node.statistics().late_count == 3
    assert [item.message for item in caplog.records] == ["dropped an answer that no request waits for; 1 so far"]


def test_request_when_the_listener_asks_is_answered_by_the_one_who_dialled(remote):
    remote.send(b"a.echo", b"theirs", b"x", b"")
    assert remote.receive()[1:] == [b"REPLY", b"theirs", b"x", b""]
    remote.send(b"a.none", b"theirs")
    assert remote.receive()[1:] == [b"UNKNOWNCOMMAND", b"a.none"]


def test_bye_when_it_comes_closes_the_connection(remote):
    future, _ = remote.asked("their.ask")
    remote.send(b"BYE")
    assert code_of(future) == "DISCONNECTED"
    assert code_of(remote.node.request_future(remote.conn, "their.ask")) == "DISCONNECTED"


def test_message_when_its_parts_are_too_much_together_is_refused_to_its_sender(remote):
    """It would end the connection, and all that waits there; what a handler returns is held to the same."""
    waits, tag = remote.asked("x.y")
    with pytest.raises(LocalProtocolError, match=r"'x\.big' has 17000005 bytes in all, the limit is 16776192"):
        remote.node.send(remote.conn, "x.big", *[bytes(1_000_000)] * 17)
    with pytest.raises(LocalProtocolError, match="a reply has 17000000 bytes in all"):
        parts_of([bytes(1_000_000)] * 17)
    remote.send(b"REPLY", tag, b"late")
    assert waits.get(WAIT_S) == [b"late"]


def test_commands_when_they_come_behind_a_bye_are_not_run(remote):
    remote.send(b"BYE")
    for _ in range(100):
        remote.send(b"a.echo", b"tag")
    wait_until(lambda: not remote.node.connections(), "it is closed")
    assert remote.node.statistics().called_count["a.echo"] == 0


def test_connection_when_lost_fails_what_waits_and_comes_back(remote, tmp_path):
    future, _ = remote.asked("their.ask")
    address = remote.router.last_endpoint
    context = remote.router.context
    remote.router.close(0)
    assert code_of(future) == "DISCONNECTED"
    remote.router = context.socket(zmq.ROUTER)
    remote.router.bind(address)
    remote.route, *hello = remote.receive()
    assert hello == [b"HI"]
    future, tag = remote.asked("their.ask")
    remote.send(b"REPLY", tag, b"back")
    assert future.get(WAIT_S) == [b"back"]


@pytest.mark.parametrize(("remote", "most"), [("plain", 1 << 20), ("curve", (1 << 20) - 33)], indirect=["remote"])
def test_part_when_too_long_for_its_connection_is_refused_to_its_sender(remote, most):
    """It would end the connection, and all that waits there; the longest that the other end takes is sent."""
    waits, waiting_tag = remote.asked("x.y")
    for send in (remote.node.send, remote.node.request_future):
        with pytest.raises(LocalProtocolError, match=rf"part 2 of 'x.big' has {most + 1} bytes, the limit .* {most}"):
            send(remote.conn, "x.big", "x", bytes(most + 1))
    with pytest.raises(LocalProtocolError, match="the name of a command has"):
        remote.node.send(remote.conn, "x." + "y" * most)
    longest, tag = remote.asked("x.big", bytes(most))
    remote.send(b"REPLY", tag, bytes(most))
    assert longest.get(WAIT_S) == [bytes(most)]
    remote.send(b"a.echo", b"tag", bytes(most))  # what a handler returns is held to the same
    assert remote.receive()[1:] == [b"REPLY", b"tag", bytes(most)]
    remote.send(b"a.more", b"tag", bytes(most))
    assert remote.receive()[1:] == [b"HANDLER_FAILED", b"REPLY", b"tag"]
    remote.send(b"REPLY", waiting_tag, b"late")
    assert waits.get(WAIT_S) == [b"late"]


def test_connection_when_a_message_is_over_the_limit_fails_what_waits_and_comes_back(remote):
    for _ in range(2):
        future, _ = remote.asked("x.y")
        remote.send(b"x.big", bytes(MAX_PART_BYTES + 1))
        assert code_of(future) == "DISCONNECTED"
        remote.route, *hello = remote.receive()
        assert hello == [b"HI"]
        remote.send(b"HELLO")
        future, tag = remote.asked("x.y", b"again")
        remote.send(b"REPLY", tag, b"ok")
        assert future.get(WAIT_S) == [b"ok"]
        assert remote.node.statistics().outgoing == 1


def test_connection_when_hi_is_not_answered_is_made_anew(tmp_path, monkeypatch):
    """Another node may have taken its route before it was heard, so that neither end has noticed."""
    monkeypatch.setattr(dialled, "_ANSWER_BACKOFF", QUICK)
    node, connected = RpcNode(), Future()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/silent")
        node.start()
        node.connect_remote(f"ipc://{tmp_path}/silent", connected.set_result, lambda *_: None, timeout_s=WAIT_S)
        for count in range(1, 100):
            assert router.poll(WAIT_S * 1000), "nothing came"
            route, hello = router.recv_multipart()
            assert hello == b"HI"
            if count > 2:
                router.send_multipart([route, b"HELLO"])
                with suppress(TimeoutError):  # it was on its way while the next connection was made
                    connected.result(1)
                    break
        assert connected.done()
        node.stop()


def test_connection_when_hi_is_answered_stays(remote, monkeypatch):
    monkeypatch.setattr(dialled, "_ANSWER_BACKOFF", QUICK)
    server, passed = RpcNode(), threading.Event()
    address = server.listen_plain("tcp://127.0.0.1:*")
    server.start()
    connection = remote.node.connect_remote(address, timeout_s=WAIT_S)
    known = remote.node._reaching.dialled[connection.id]
    group = remote.node._calls.group
    group.call_soon(group.call_later, 3 * QUICK.most_s, passed.set)
    assert passed.wait(WAIT_S)
    assert known._silences.tries == 1
    server.stop()


@pytest.mark.parametrize("accepts", [False, True])
def test_node_when_who_it_dials_is_silent_stops(accepts, monkeypatch):
    """What waits for a connection that is made anew is not waited for: nobody is there, or one that says nothing."""
    monkeypatch.setattr(dialled, "_ANSWER_BACKOFF", Backoff(first_s=0.4, most_s=0.4))
    monkeypatch.setattr(reaching, "LINGER_S", 0.1)
    node, failed = RpcNode(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not accepts:
            listener.close()
        node.start()
        node.connect_remote(f"tcp://127.0.0.1:{port}", lambda _: None, lambda *_: failed.set(), timeout_s=0.9)
        assert failed.wait(WAIT_S)
        stops = threading.Thread(target=node.stop, daemon=True)
        stops.start()
        stops.join(WAIT_S)
        assert not stops.is_alive()


def test_connect_when_nobody_answers_times_out(tmp_path):
    """A listener that is not there, or that says nothing, is no connection (OX-68)."""
    node = RpcNode()
    node.start()
    failed: Future[str] = Future()
    conn = node.connect_remote(
        f"ipc://{tmp_path}/none", lambda _: None, lambda _, why: failed.set_result(why), timeout_s=0.02
    )
    assert failed.result(WAIT_S) == "connection attempt timed out"
    assert code_of(node.request_future(conn, "a.b")) == "DISCONNECTED"
    with pytest.raises(RpcError, match="timed out"):
        node.connect_remote(f"ipc://{tmp_path}/none", timeout_s=0.02)
    node.stop()


def test_disconnect_when_of_an_unknown_connection_does_nothing(remote, caplog):
    """Disconnecting twice is harmless and warned of, and what was sent before is delivered (OX-81)."""
    remote.node.send(remote.conn, "their.do", b"last")
    remote.node.disconnect(remote.conn)
    remote.node.disconnect(remote.conn)
    remote.node.disconnect(ConnectionID(12345, b"nobody"))
    done = threading.Event()
    remote.node._calls.group.call_soon(done.set)
    assert done.wait(WAIT_S)
    assert [item.message.split()[-1] for item in caplog.records] == [str(remote.conn.id), "12345"]
    assert remote.receive()[1:] == [b"their.do", b"last"]


def test_parts_when_neither_text_nor_octets_are_refused_before_anything_is_sent(remote):
    with pytest.raises(LocalProtocolError, match="text or bytes"):
        remote.node.send(remote.conn, "their.do", 5)
    future, tag = remote.asked("their.ask")
    remote.send(b"REPLY", tag)
    assert future.get(WAIT_S) == []


def test_stream_when_its_items_come_before_it_is_asked_for_are_malformed(remote):
    future, tag = remote.asked("their.ask")
    remote.send(b"ITEM", tag, b"x")
    assert code_of(future) == "CREDIT_EXCEEDED"
    assert remote.receive()[1:] == [b"CANCEL", tag]


WORDS = (
    *(b"REPLY", b"HI", b"HELLO", b"ITEM", b"CREDIT", b"CANCEL", b"FORBIDDEN", b"UNKNOWNCOMMAND", b"NO_REPLY_TAG"),
    *(b"a.echo", b"a.none", b"a.", b".", b"", b"\0", b"\xff" * 15, b"5", make_tag(2, 1e9, 3)),
)


def test_messages_when_of_any_frames_leave_the_connection_at_work(remote):
    rng = Random(5)
    for _ in range(1000):
        remote.send(*[rng.choice(WORDS) for _ in range(rng.randrange(1, 6))])
    future = remote.node.request_future(remote.conn, "their.ask")
    while (frames := remote.receive())[1] != b"their.ask":
        pass
    remote.send(b"REPLY", frames[2], b"x")
    assert future.get(WAIT_S) == [b"x"]


async def test_connect_when_given_up_leaves_no_connection(tmp_path, loop_factory):
    async with RpcNode() as node:
        task = asyncio.ensure_future(node.connect(f"ipc://{tmp_path}/none"))
        await asyncio.sleep(0)
        before = node.statistics().outgoing
        task.cancel()
        await asyncio.wait([task])
        assert (before, node.statistics().outgoing) == (1, 0)
