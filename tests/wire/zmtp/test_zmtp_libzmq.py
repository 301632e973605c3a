"""Our side of ZMTP over Connection and Sender, with sockets of the real libzmq at the other end, and with our own."""

from __future__ import annotations

import os
import socket

import pytest
import zmq
from connection_kit import wait_until
from zmq.utils.monitor import recv_monitor_message
from zmtp_kit import DEALER, ROUTER, admit_all, key_pair

from flowctl.connection import Connection
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.wire.zmtp import frames as wire
from flowctl.wire.zmtp.keytext import KeyEncoding, encode_key
from flowctl.wire.zmtp.mechanism import CurveClient, CurveServer, Null, RefusedError
from flowctl.wire.zmtp.peer import Heartbeat, ZmtpLimits
from flowctl.wire.zmtp.session import ZmtpSession

KINDS = pytest.mark.parametrize("kind", ["null", "curve"])
PLACES = pytest.mark.parametrize("place", ["tcp", "unix"])
SERVER, CLIENT = key_pair(), key_pair()
MESSAGES = [[b"a"], [b"x" * 255, b"", b"y" * 256], [os.urandom(900_000), b"end"], *([b"%d" % n] for n in range(500))]
TIMEOUT_MS = 5_000


@pytest.fixture
def group():
    failures = []
    made = PollGroup("zmtp", on_error=lambda where, error: failures.append((where, repr(error))))
    made.start()
    yield made
    made.stop()
    assert failures == []


@pytest.fixture
def raw_socket():
    """Return a function that makes sockets of libzmq."""
    context, made = zmq.Context(), []

    def make(kind):
        made.append(context.socket(kind))
        made[-1].set(zmq.RCVTIMEO, TIMEOUT_MS)
        return made[-1]

    yield make
    context.destroy(linger=0)


class Ours:
    """A session of ours on a group, and what it was told."""

    def __init__(self, mechanism, *, echo=False, heartbeat=None):
        self.got, self.known, self.end, self.echo = [], 0, None, echo
        self.session = ZmtpSession(
            mechanism, self._message, self._known, self._gone, limits=ZmtpLimits(), heartbeat=heartbeat
        )

    def live_on(self, group, sock):
        sock.setblocking(False)
        self.connection = Connection(sock, self.session, deferred=False, clock=group.clock)
        self.connection.live_on(group)
        return self

    def send(self, frames):
        self.connection.call_soon(self.session.send_message, frames)

    def _message(self, frames):
        self.got.append(frames)
        if self.echo:
            self.session.send_message(frames)

    def _known(self):
        self.known += 1

    def _gone(self, reason, details):
        self.end = reason, details


def listening(kind, admit=admit_all):
    return Null(ROUTER, admit) if kind == "null" else CurveServer(ROUTER, *SERVER, admit)


def dialling(kind, server=SERVER[0]):
    return Null(DEALER) if kind == "null" else CurveClient(DEALER, *CLIENT, server)


def with_keys(raw, kind, *, server):
    """Give a socket of libzmq the keys of its side."""
    if kind == "null":
        return
    public, secret = (encode_key(key, KeyEncoding.Z85).encode() for key in (SERVER if server else CLIENT))
    raw.set(zmq.CURVE_PUBLICKEY, public)
    raw.set(zmq.CURVE_SECRETKEY, secret)
    if server:
        raw.set(zmq.CURVE_SERVER, 1)
    else:
        raw.set(zmq.CURVE_SERVERKEY, encode_key(SERVER[0], KeyEncoding.Z85).encode())


def listener(place, folder):
    """Return a listening socket, and its address as libzmq writes it."""
    if place == "tcp":
        sock = socket.create_server(("127.0.0.1", 0))
        return sock, f"tcp://127.0.0.1:{sock.getsockname()[1]}"
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(folder / "socket"))
    sock.listen()
    return sock, f"ipc://{folder / 'socket'}"


def reached(address):
    """Return a socket connected to where one of libzmq listens."""
    if address.startswith("tcp"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address.removeprefix("ipc://"))
    return sock


@KINDS
@PLACES
def test_dealer_of_libzmq_when_it_dials_us_has_its_messages_answered(group, raw_socket, tmp_path, kind, place):
    sock, address = listener(place, tmp_path)
    raw = raw_socket(zmq.DEALER)
    with_keys(raw, kind, server=False)
    raw.connect(address)
    with sock:
        ours = Ours(listening(kind), echo=True).live_on(group, sock.accept()[0])
    for frames in MESSAGES:
        raw.send_multipart(frames)
    assert [raw.recv_multipart() for _ in MESSAGES] == MESSAGES
    assert ours.got == MESSAGES
    assert ours.session.zmtp.mechanism.key == (b"" if kind == "null" else CLIENT[0])
    raw.close(0)
    wait_until(lambda: ours.end is not None)


@KINDS
@PLACES
def test_router_of_libzmq_when_we_dial_it_knows_us_by_our_identity(group, raw_socket, tmp_path, kind, place):
    raw = raw_socket(zmq.ROUTER)
    with_keys(raw, kind, server=True)
    raw.bind("tcp://127.0.0.1:*" if place == "tcp" else f"ipc://{tmp_path}/socket")
    ours = Ours(dialling(kind)).live_on(group, reached(raw.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")))
    wait_until(lambda: ours.known)
    for frames in MESSAGES:
        ours.send(frames)
    for frames in MESSAGES:
        route, *got = raw.recv_multipart()
        assert (route, got) == (b"me", frames)
        raw.send_multipart([route, *frames])
    wait_until(lambda: len(ours.got) == len(MESSAGES))
    assert ours.got == MESSAGES


@KINDS
def test_sides_when_both_are_ours_exchange_all(group, kind):
    one, other = socket.socketpair()
    answering = Ours(listening(kind), echo=True).live_on(group, one)
    asking = Ours(dialling(kind)).live_on(group, other)
    wait_until(lambda: asking.known and answering.known)
    for frames in MESSAGES:
        asking.send(frames)
    wait_until(lambda: len(asking.got) == len(MESSAGES))
    assert asking.got == answering.got == MESSAGES


@KINDS
def test_messages_when_sent_while_input_is_handled_come_in_their_order_and_before_the_end(group, kind):
    one, other = socket.socketpair()
    answering, asking = Ours(listening(kind)), Ours(dialling(kind))

    def answer(frames):
        answering.session.send_message([b"first"])
        answering.session.send_message([b"may be dropped"], droppable=True)
        answering.session.send_message([b"last"])
        answering.session.close_after_flush("all was said")

    answering.session.zmtp._message = answer
    answering.live_on(group, one)
    asking.live_on(group, other)
    wait_until(lambda: asking.known and answering.known)
    asking.send([b"say"])
    wait_until(lambda: asking.end is not None)
    assert asking.got == [[b"first"], [b"may be dropped"], [b"last"]]
    assert asking.end[0] is CloseReason.PEER_CLOSED


def test_messages_when_many_come_at_once_leave_the_thread_to_others_and_stop_at_the_end(group):
    """30,000 empty ones in one piece of input: others have their turns, and after a close none is handed on."""
    one, other = socket.socketpair()
    turns, got = [], []
    ours = Ours(listening("null"))

    def take(frames):
        got.append(len(turns))
        if len(got) == 29_000:
            ours.connection.close(CloseReason.KICKED, "enough")

    ours.session.zmtp._message = take
    ours.live_on(group, one)

    def turn():
        turns.append(1)
        if ours.end is None:
            group.call_soon(turn)

    group.call_soon(turn)
    hello = wire.greeting(b"NULL", as_server=False) + wire.command(wire.READY, wire.properties(DEALER))
    other.sendall(hello + wire.frame(b"") * 30_000)
    wait_until(lambda: ours.end is not None)
    assert len(got) < 29_000 + 200
    assert len(set(got)) > 3, "others had turns between"
    other.close()


@KINDS
def test_dealer_of_libzmq_when_not_let_in_is_told_so(group, raw_socket, kind):
    def refuse(key, said):
        raise RefusedError(b"400")

    sock, address = listener("tcp", None)
    raw = raw_socket(zmq.DEALER)
    watching = raw.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    with_keys(raw, kind, server=False)
    raw.connect(address)
    with sock:
        ours = Ours(listening(kind, refuse)).live_on(group, sock.accept()[0])
    assert watching.poll(TIMEOUT_MS)
    assert recv_monitor_message(watching)["value"] == 400
    raw.disable_monitor()
    watching.close(0)
    wait_until(lambda: ours.end is not None)
    assert not ours.known


def test_dealer_of_libzmq_when_it_expects_another_key_does_not_get_in(group, raw_socket):
    sock, address = listener("tcp", None)
    raw = raw_socket(zmq.DEALER)
    with_keys(raw, "curve", server=False)
    raw.set(zmq.CURVE_SERVERKEY, encode_key(key_pair()[0], KeyEncoding.Z85).encode())
    raw.connect(address)
    with sock:
        ours = Ours(listening("curve")).live_on(group, sock.accept()[0])
        wait_until(lambda: ours.end is not None)
    assert "keys differ" in ours.end[1]
    assert not ours.known


@KINDS
def test_heartbeats_when_both_sides_ask_are_answered_by_both(group, raw_socket, kind):
    """Nothing is said for many times the silence after which either would end the connection."""
    raw = raw_socket(zmq.ROUTER)
    with_keys(raw, kind, server=True)
    raw.set(zmq.HEARTBEAT_IVL, 50)
    raw.set(zmq.HEARTBEAT_TIMEOUT, 2_000)
    raw.set(zmq.HEARTBEAT_TTL, 3_000)
    raw.bind("tcp://127.0.0.1:*")
    beat = Heartbeat(each_s=0.05, dead_s=2.0)
    address = raw.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    ours = Ours(dialling(kind), heartbeat=beat).live_on(group, reached(address))
    wait_until(lambda: ours.known)
    wait_until(lambda: ours.session.zmtp.peer_ttl_s == 3.0)
    heard = set()
    wait_until(lambda: heard.add(ours.session.zmtp.heard_at) or len(heard) > 20)
    ours.send([b"still here"])
    assert raw.recv_multipart() == [b"me", b"still here"]
    assert ours.end is None


def test_peer_when_it_is_silent_counts_as_dead(group):
    """Its process stands still: the system acknowledges, and nobody answers."""
    one, other = socket.socketpair()
    ours = Ours(listening("null"), heartbeat=Heartbeat(each_s=0.1, dead_s=0.3)).live_on(group, one)
    other.sendall(wire.greeting(b"NULL", as_server=False) + wire.command(wire.READY, wire.properties(DEALER)))
    wait_until(lambda: ours.end is not None)
    assert "said nothing" in ours.end[1]
    other.close()
