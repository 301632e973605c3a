"""A ZeroMQ socket on a poll group: real sockets over inproc and ipc, on uvloop and asyncio."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import zmq

from flowctl.pollgroup import LoopFactory, PollGroup
from flowctl.wire.zeromq.socket import MESSAGES_PER_TURN, MOST_FRAMES, ZmqSocket, new_context, notice_dead_peers

WAIT_S = 20.0
ASKED = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)


@pytest.fixture
def group(loop_factory: LoopFactory) -> Iterator[PollGroup]:
    group = PollGroup("zeromq", loop_factory=loop_factory)
    group.start()
    yield group
    group.stop()


@pytest.fixture
def sockets() -> Iterator[Callable[[int], zmq.Socket[bytes]]]:
    context = new_context()
    made: list[zmq.Socket[bytes]] = []

    def make(kind: int) -> zmq.Socket[bytes]:
        made.append(context.socket(kind))
        return made[-1]

    yield make
    for item in made:
        item.close(linger=0)
    context.term()


def on(group: PollGroup, call: Callable[[], object]) -> None:
    done: Future[object] = Future()
    group.call_soon(lambda: done.set_result(call()))
    done.result(WAIT_S)


def test_messages_when_more_than_a_turn_allows_arrive_all_and_in_order(group, sockets):
    router = sockets(zmq.ROUTER)
    router.bind("inproc://many")
    count, got, done = 3 * MESSAGES_PER_TURN + 7, [], threading.Event()

    def received(frames: list[bytes]) -> None:
        got.append(frames[1])
        if len(got) == count:
            done.set()

    dealer = sockets(zmq.DEALER)
    dealer.connect("inproc://many")
    for number in range(count):
        dealer.send(b"%d" % number)
    reader = ZmqSocket(group, router, received)
    on(group, reader.start)
    assert done.wait(WAIT_S)
    assert got == [b"%d" % number for number in range(count)]
    on(group, reader.close)


def test_answers_when_each_waits_for_the_one_before_never_stall(group, sockets):
    """A send reads the mailbox of its socket: the look after it finds what came meanwhile."""
    router, dealer = sockets(zmq.ROUTER), sockets(zmq.DEALER)
    router.bind("inproc://ping")
    dealer.connect("inproc://ping")
    count, done, left = 2000, threading.Event(), [2000]

    def pinged(frames: list[bytes]) -> None:
        server.send(frames)

    def ponged(frames: list[bytes]) -> None:
        left[0] -= 1
        if left[0]:
            client.send([b"%d" % left[0]])
        else:
            done.set()

    server, client = ZmqSocket(group, router, pinged), ZmqSocket(group, dealer, ponged)
    on(group, server.start)
    on(group, client.start)
    on(group, lambda: client.send([b"%d" % count]))
    assert done.wait(WAIT_S)
    for item in (server, client):
        on(group, item.close)


def test_message_when_a_send_that_failed_has_read_the_mailbox_is_received(group, sockets):
    """A send to nobody reads the mailbox before it fails: what it found there is handed on all the same."""
    router, dealer = sockets(zmq.ROUTER), sockets(zmq.DEALER)
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.bind("inproc://nobody")
    dealer.connect("inproc://nobody")
    first, second = threading.Event(), threading.Event()
    reader = ZmqSocket(group, router, lambda frames: (second if first.is_set() else first).set())
    on(group, reader.start)
    dealer.send(b"first")
    assert first.wait(WAIT_S)

    def fail() -> None:
        dealer.send(b"second")
        assert select.select([router.get(zmq.FD)], [], [], WAIT_S)[0]
        with pytest.raises(zmq.ZMQError):
            reader.send([b"nobody", b"x"])

    for _ in range(5):  # a mailbox is looked into now and then only
        second.clear()
        on(group, fail)
        assert second.wait(WAIT_S)
    on(group, reader.close)


def test_message_when_a_handler_raises_costs_only_itself(sockets, loop_factory):
    errors: list[Exception] = []
    group = PollGroup("zeromq", loop_factory=loop_factory, on_error=lambda _, error: errors.append(error))
    group.start()
    pull, push = sockets(zmq.PULL), sockets(zmq.PUSH)
    pull.bind("inproc://raises")
    push.connect("inproc://raises")
    done = threading.Event()

    def received(frames: list[bytes]) -> None:
        if frames == [b"bad"]:
            raise ValueError("bad message")
        done.set()

    reader = ZmqSocket(group, pull, received)
    on(group, reader.start)
    push.send(b"bad")
    push.send(b"good")
    assert done.wait(WAIT_S)
    assert [str(error) for error in errors] == ["bad message"]
    on(group, reader.close)
    group.stop()


def test_message_when_of_too_many_frames_is_thrown_away_and_counted(group, sockets):
    pull, push = sockets(zmq.PULL), sockets(zmq.PUSH)
    pull.bind("inproc://frames")
    push.connect("inproc://frames")
    got, done = [], threading.Event()

    def received(frames: list[bytes]) -> None:
        got.append(len(frames))
        if frames[0] == b"end":
            done.set()

    reader = ZmqSocket(group, pull, received)
    on(group, reader.start)
    push.send_multipart([b"x"] * MOST_FRAMES)
    push.send_multipart([b"x"] * (MOST_FRAMES + 1))
    push.send(b"end")
    assert done.wait(WAIT_S)
    assert (got, reader.too_long_count) == ([MOST_FRAMES, 1], 1)
    on(group, reader.close)


def test_metadata_when_a_message_is_handed_on_come_with_it(group, sockets, tmp_path):
    router, dealer = sockets(zmq.ROUTER), sockets(zmq.DEALER)
    router.bind(f"ipc://{tmp_path}/s")
    dealer.routing_id = b"me"
    dealer.connect(f"ipc://{tmp_path}/s")
    got, done = [], threading.Event()

    def received(frames: list[bytes]) -> None:
        assert reader.frame is not None
        got.append((frames, reader.frame.get("Socket-Type")))
        done.set()

    reader = ZmqSocket(group, router, received)
    on(group, reader.start)
    dealer.send_multipart([b"one", b"two"])
    assert done.wait(WAIT_S)
    assert got == [([b"me", b"one", b"two"], "DEALER")]
    on(group, reader.close)
    assert reader.frame is None


def test_peer_when_another_one_floods_is_heard_after_few_of_its_messages(group, sockets):
    """Who had nothing to say is heard within one look, though hundreds of another one's messages wait to be read."""
    router, flood, other = sockets(zmq.ROUTER), sockets(zmq.DEALER), sockets(zmq.DEALER)
    router.bind("inproc://flood")
    for item, name in ((flood, b"flood"), (other, b"other")):
        item.routing_id = name
        item.connect("inproc://flood")
    other.send(b"hello")
    assert router.recv_multipart() == [b"other", b"hello"]
    for _ in range(600):
        flood.send(b"more")
    between: list[int] = []
    got, done = [], threading.Event()

    def received(frames: list[bytes]) -> None:
        got.append(frames[0])
        if frames[0] == b"other":
            between.append(len(got) - got.index(b"sent") - 2)
            done.set()
        elif len(got) == 200:
            other.send(b"a word")
            got.append(b"sent")

    reader = ZmqSocket(group, router, received)
    on(group, reader.start)
    assert done.wait(WAIT_S)
    assert between[0] <= 16
    on(group, reader.close)


def test_send_when_the_queue_is_full_raises_again_and_keeps_nothing(group, sockets):
    push = sockets(zmq.PUSH)
    push.sndhwm = 3
    pull = sockets(zmq.PULL)
    pull.rcvhwm = 1
    pull.bind("inproc://full")
    push.connect("inproc://full")
    writer = ZmqSocket(group, push, lambda frames: None)
    sent: list[int] = []

    def fill() -> None:
        for number in range(100):
            writer.send([b"a", b"%d" % number])
            sent.append(number)

    with pytest.raises(zmq.Again):
        on_raising(group, fill)
    assert [pull.recv_multipart() for _ in sent] == [[b"a", b"%d" % number] for number in sent]
    with pytest.raises(zmq.Again):
        pull.recv(zmq.NOBLOCK)
    on(group, writer.close)


def on_raising(group: PollGroup, call: Callable[[], object]) -> None:
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except zmq.ZMQError as error:
            done.set_exception(error)

    group.call_soon(run)
    done.result(WAIT_S)


def test_connection_when_its_other_end_may_die_is_asked_for_life_by_the_system(sockets):
    """At the end that accepted it and at the other; heartbeats of ZeroMQ, which can kill us, are none."""
    router, dealer = sockets(zmq.ROUTER), sockets(zmq.DEALER)
    for item in (router, dealer):
        notice_dead_peers(item, 30)
        assert item.get(zmq.HEARTBEAT_IVL) == 0
    monitors = [router.get_monitor_socket(zmq.EVENT_ACCEPTED), dealer.get_monitor_socket(zmq.EVENT_CONNECTED)]
    dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    dealer.send(b"")
    router.recv_multipart()
    for monitor in monitors:
        descriptor = int.from_bytes(monitor.recv_multipart()[0][2:], sys.byteorder)
        with socket.socket(fileno=os.dup(descriptor)) as line:
            found = [line.getsockopt(socket.IPPROTO_TCP, item) for item in ASKED]
            assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert found == [15, 5, 3, 30_000]
        monitor.close(linger=0)
