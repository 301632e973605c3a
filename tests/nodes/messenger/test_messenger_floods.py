"""What one peer can make a messenger keep or refuse: raw peers that stay within every limit, under many names."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from queue import Queue

import pytest
import zmq
from connection_kit import wait_until

from flowctl.core.flow.state import SendState
from flowctl.core.outcomes.backoff import Backoff
from flowctl.nodes.messenger.arrivals import (
    HELD_COST_BYTES,
    MAX_HELD_BYTES,
    Arrivals,
    ArrivalVerdict,
    Arrived,
    HeldRoom,
)
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import Destination, ReceivedMessage
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.wire import ACK, ECHO, Extension, encode_message

WAIT_S = 20.0
SLOW = Backoff(first_s=30.0, most_s=30.0)


@pytest.fixture
def server(make, address) -> Callable[..., Messenger]:
    """Start a messenger that listens at `address`."""

    def start(callback, **options) -> Messenger:
        messenger = make("server", **options)
        messenger.listen_for_connection(Destination("server", address), "server", callback)
        return messenger

    return start


@pytest.fixture
def dial(raw, address) -> Callable[..., zmq.Socket[bytes]]:
    return partial(raw, zmq.DEALER, connect=address)


def say(dealer: zmq.Socket[bytes], number: int, body: bytes, *, to: int = 0, payload: tuple[bytes, ...] = ()) -> None:
    dealer.send_multipart([b"", encode_message(number, 0, to, body), *payload])


def is_acknowledged(dealer: zmq.Socket[bytes]) -> bool:
    """Tell whether the next thing that it hears is an acknowledgement."""
    return f"-{ACK}-".encode() in dealer.recv_multipart()[-1]


@pytest.mark.parametrize(("limit", "most"), [("MAX_HANDLING", 8), ("MAX_HANDLING_BYTES", 8 * len(b"hang"))])
def test_handlers_when_those_of_one_peer_wait_leave_places_to_others(server, dial, monkeypatch, limit, most):
    monkeypatch.setattr(f"flowctl.nodes.messenger.inbound.{limit}", most)

    async def handler(_: Messenger, message: ReceivedMessage) -> None:
        if message.message == b"hang":
            await asyncio.sleep(WAIT_S)

    messenger = server(handler)
    flood = dial(b"flood")
    for number in range(20):
        say(flood, number, b"hang")
    say(flood, 20, b"", to=ACK)
    other = dial(b"other")
    say(other, 0, b"quick")
    assert is_acknowledged(other)
    assert messenger.statistics().refused >= 16 - 4


def test_newcomers_when_all_places_are_of_those_that_wait_for_ever_are_let_in(server, dial):
    got = Queue()
    messenger = server(lambda _, message: got.put(message.message), max_peers=4)
    for number in range(2):
        held = dial(b"held%d" % number, incarnation=7)
        say(held, 0, b"later", payload=(Extension(7, 9, 1, 8).encode(),))
        say(held, 1, b"now", payload=(Extension(7, 1, 1, 0).encode(),))
        assert got.get(timeout=WAIT_S) == b"now"
    for number in range(2):
        deaf = dial(b"deaf%d" % number)
        say(deaf, 0, b"echo", to=ECHO)
        assert got.get(timeout=WAIT_S) == b"echo"
        assert deaf.recv_multipart()
    assert messenger.statistics().peers == 4
    for number in range(4):
        honest = dial(b"honest%d" % number)
        say(honest, 0, b"hello")
        assert got.get(timeout=WAIT_S) == b"hello"
        assert is_acknowledged(honest)
    assert messenger.statistics().peers == 4


def test_echoes_when_nobody_acknowledges_them_leave_the_room_to_the_application(server, dial, monkeypatch):
    monkeypatch.setattr("flowctl.nodes.messenger.inbound.MAX_ECHO_BYTES", 10_000)
    monkeypatch.setattr("flowctl.nodes.messenger.outbound.MAX_PENDING_BYTES", 10_000)
    messenger = server(None)
    for name in range(4):
        deaf = dial(b"deaf%d" % name)
        for number in range(4):
            say(deaf, number, bytes(1000), to=ECHO)
        say(deaf, 4, b"end")
        while deaf.recv_multipart()[-1] != b"4-0-2-":
            pass
    assert messenger.statistics().refused >= 11
    assert messenger.statistics().pending_bytes <= 5000
    assert messenger.send_message((0, b"deaf0"), bytes(4000)) >= 0


def test_messages_when_their_peer_speaks_and_does_not_read_wait_and_use_no_attempts_up(server, dial):
    """What finds no room in its connection was not tried, and goes when there is some."""
    failed = Queue()
    messenger = server(None, max_message_bytes=2_000_000)
    deaf = dial(b"deaf")
    say(deaf, 0, b"hello")
    assert is_acknowledged(deaf)
    for _ in range(60):
        messenger.send_message((0, b"deaf"), bytes(1_000_000), on_failure=lambda _, failure: failed.put(failure))
    wait_until(lambda: messenger.send_state((0, b"deaf")) is not SendState.READY, "there is no room")
    wait_until(lambda: messenger.connections()[0].waiting_bytes > 0, "the system holds all it may")
    (row,) = messenger.connections()
    assert (row.to, row.state, row.pending) == ((0, b"deaf"), messenger.send_state((0, b"deaf")), 60)
    assert row.pending_bytes > 60_000_000 > row.waiting_bytes > 0
    for why in (row.why, messenger.why(row.to)):
        assert re.search("^[A-Z_]+ for .*; 60 messages of [0-9]+ bytes are not acknowledged, the oldest for", why)
    for number in range(1, 50):
        say(deaf, number, b"still here")
    wait_until(lambda: messenger.statistics().received == 50, "it is heard")
    numbers = set()
    while len(numbers) < 60:
        body = deaf.recv_multipart()[-1]
        if len(body) > 1_000_000:
            numbers.add(body.partition(b"-")[0])
            deaf.send_multipart([b"", body.partition(b"-")[0] + b"-0-2-"])
    wait_until(lambda: messenger.pending_count((0, b"deaf")) == 0, "all are acknowledged")
    assert (messenger.statistics().sent, messenger.statistics().retries, failed.qsize()) == (60, 0, 0)


def test_messages_when_a_connection_that_was_full_is_replaced_go_by_the_new_one_at_once(server, dial):
    messenger = server(None, max_message_bytes=1 << 20)
    deaf = dial(b"raw")
    say(deaf, 0, b"hello")
    assert is_acknowledged(deaf)
    for _ in range(60):
        messenger.send_message((0, b"raw"), bytes(1_000_000))
    wait_until(lambda: messenger.send_state((0, b"raw")) is not SendState.READY, "there is no room")
    newer = dial(b"raw")
    numbers = set()
    while len(numbers) < 60:
        body = newer.recv_multipart()[-1]
        if len(body) > 1_000_000:
            numbers.add(body.partition(b"-")[0])
            newer.send_multipart([b"", body.partition(b"-")[0] + b"-0-2-"])
    wait_until(lambda: messenger.pending_count((0, b"raw")) == 0, "all are acknowledged")


def test_ordered_messages_when_their_connection_is_cut_again_and_again_go_on_from_the_first_that_is_missing(
    server, make, address
):
    """Later ones alone would be refused where the first is missing; none waits for the time of its next attempt."""
    got = []
    server(lambda _, message: got.append(message.message[:3]))
    client = make("client", settings=DeliverySettings(retry=SLOW, max_attempts=None))
    connection = client.make_connection(Destination("server", address))
    for number in range(60):
        client.send_message(connection, b"%03d" % number + bytes(500_000), ordered=True)
        if number % 10 == 9:
            client._on_thread(client._connections[connection].hang_up)
    wait_until(lambda: len(got) == 60, "all have come")
    assert got == [b"%03d" % number for number in range(60)]


def test_held_messages_when_a_peer_has_many_names_are_bounded_over_all():
    room = HeldRoom()
    total = room.left_bytes

    def hold(arrivals: Arrivals, number: int, size_bytes: int) -> ArrivalVerdict:
        extension = Extension(1, number + 1, 1, number)
        return arrivals.arrive(Arrived(1, number, extension, size_bytes, None))

    size_bytes = MAX_HELD_BYTES - HELD_COST_BYTES
    peers = [Arrivals(room) for _ in range(40)]
    fates = [hold(peer, 10, size_bytes) for peer in peers]
    assert fates == [ArrivalVerdict.WAIT] * 16 + [ArrivalVerdict.FULL] * 24
    assert room.left_bytes == 0
    peers[0].drop_held()
    assert hold(peers[20], 10, 1000) is ArrivalVerdict.WAIT
    for peer in peers:
        peer.drop_held()
    assert room.left_bytes == total


def test_peers_that_are_gone_when_they_left_too_many_gaps_are_forgotten(server, dial, monkeypatch):
    monkeypatch.setattr("flowctl.nodes.messenger.messenger.MAX_REMEMBERED_GAPS", 4)
    got = Queue()
    messenger = server(lambda _, message: got.put((message.routing_id, message.id)), max_peers=1)
    for name, numbers in ((b"few", (0, 2)), (b"many", (0, 2, 4, 6, 8, 10)), (b"last", (0,))):
        dealer = dial(name)
        for number in numbers:
            say(dealer, number, b"")
            assert got.get(timeout=WAIT_S) == (name, number)
            assert is_acknowledged(dealer)
    few = dial(b"few")
    say(few, 2, b"")
    assert is_acknowledged(few)  # known still: it is not handled again
    many = dial(b"many")
    say(many, 10, b"")
    assert got.get(timeout=WAIT_S) == (b"many", 10)
    assert messenger.statistics().repeated == 1


def octets_dealer(port: int) -> socket.socket:
    """Shake hands as a DEALER that is called ``me`` (ZMTP 3.0, NULL): a connection that can be reset."""
    line = socket.create_connection(("127.0.0.1", port), WAIT_S)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x02me"
    line.sendall(b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(52, b"\0"))
    line.settimeout(None)  # with a timeout, Python's recv does not wait for all
    assert len(line.recv(64, socket.MSG_WAITALL)) == 64, "no greeting"
    line.settimeout(WAIT_S)
    line.sendall(bytes([4, len(ready)]) + ready)
    return line


def say_octets(line: socket.socket, number: int) -> None:
    """Send a message, and wait for its acknowledgement."""
    body = b"%d-0-0-" % number
    line.sendall(b"\1\0\0" + bytes([len(body)]) + body)
    came = b""
    while b"%d-0-%d-" % (number, ACK) not in came:
        piece = line.recv(4096)
        assert piece, "the process has ended"
        came += piece


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
LISTENS = """
import sys, time
from flowctl.nodes.messenger.messenger import Messenger
with Messenger(0, "us") as us:
    print(us.port, flush=True)
    sys.stdin.readline()
    time.sleep(6)
print("lives")
"""


def test_peer_when_reset_after_another_has_taken_its_name_does_not_end_our_process():
    with subprocess.Popen([sys.executable, "-c", LISTENS], **PIPES, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        first = octets_dealer(port)
        say_octets(first, 1)
        second = octets_dealer(port)
        say_octets(second, 2)
        first.sendall(b"\1\0\0\x073-0-0-x")
        second.settimeout(0.1)
        with pytest.raises(TimeoutError):
            second.recv(1)
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        first.close()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.read() == "lives\n"
        second.close()
    assert process.returncode == 0
