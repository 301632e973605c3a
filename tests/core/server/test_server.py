"""The server on real sockets and both loops: who is let in, what is counted, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from connection_kit import WAIT_S, Noting, Reader, wait_until

from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.state import MessageClass
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server import server as server_module
from flowctl.core.server.admission import AdmissionLimits
from flowctl.core.server.bans import LIMITED_BURST, Ban, BanAction, BanList
from flowctl.core.server.server import Server
from flowctl.errors import ClosedError, LimitExceededError, LocalProtocolError
from flowctl.reasons import CloseReason

SMALL = SocketOptions(send_buffer_bytes=4096)
FREE = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0.0)


@pytest.fixture
def make(loop_factory):
    """Make servers of noting sessions; what their handlers raise is in `errors`, their sessions in `sessions`."""
    servers = []

    def build(factory=Noting, **options):
        sessions, errors = [], []

        def session():
            sessions.append(factory())
            return sessions[-1]

        options.setdefault("admission", FREE)
        server = Server(session, loop_factory=loop_factory, on_error=lambda *error: errors.append(error), **options)
        server.sessions, server.errors = sessions, errors
        servers.append(server)
        server.start()
        return server

    yield build
    for server in servers:
        assert server.stop()
        assert server.errors == []


def connect(server):
    sock = socket.create_connection(server.address, WAIT_S)
    sock.settimeout(WAIT_S)
    return sock


def is_refused(server) -> bool:
    """Return whether the server resets a new connection, or closes it."""
    try:
        with connect(server) as sock:
            return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_when_they_come_and_go_are_counted_once(make):
    server = make()
    socks = [connect(server) for _ in range(3)]
    wait_until(lambda: len(server.connections()) == 3)
    for connection in server.connections():
        connection.sender.send(b"hello", MessageClass.AUDIO)
    for sock in socks:
        assert sock.recv(5) == b"hello"
        sock.sendall(b"input")
    wait_until(lambda: all(session.got for session in server.sessions))
    before = server.statistics()
    for sock in socks:
        sock.close()
    wait_until(lambda: not server.connections())
    after = server.statistics()
    assert (before.connections, after.connections, after.accepted) == (3, 0, 3)
    assert after.closed == server.closed_by_reason == {CloseReason.PEER_CLOSED: 3}
    for figures in (before.totals, after.totals):
        assert figures.conserved
        assert figures.connections == 3
        assert figures.sent.of(MessageClass.AUDIO) == 3
        assert figures.bytes_in == 15


def test_stop_when_connections_are_open_sends_what_is_queued_and_ends_them_with_shutdown(make):
    server = make(group_count=2, options=SocketOptions(send_buffer_bytes=4096), limits=NO_LIMITS)
    readers = [Reader(connect(server)) for _ in range(6)]
    wait_until(lambda: len(server.connections()) == 6)
    for connection in server.connections():
        for _ in range(10):
            connection.sender.send(b"x" * 50_000)
    assert server.stop()
    assert [reader.wait() for reader in readers] == [b"x" * 500_000] * 6
    assert [session.ends for session in server.sessions] == [[(CloseReason.SHUTDOWN, "server stops")]] * 6
    assert server.stop()
    assert server.statistics().closed == {CloseReason.SHUTDOWN: 6}
    with pytest.raises(OSError, match="refused"):
        connect(server)


def test_stop_when_a_peer_does_not_read_ends_in_time_all_the_same(make):
    settings = SenderSettings(close_deadline_s=60.0)
    server = make(options=SocketOptions(send_buffer_bytes=4096), limits=NO_LIMITS, settings=settings)
    with connect(server):
        (connection,) = wait_until(server.connections)
        for _ in range(50):
            connection.sender.send(b"x" * 200_000)
        assert server.stop(0.3)
        assert server.sessions[0].ends == [(CloseReason.SHUTDOWN, "server stops")]


@pytest.mark.parametrize(("second_s", "at_most_s"), [(WAIT_S, WAIT_S), (0.2, 5.0)])
def test_stop_when_called_again_meanwhile_joins_the_first(make, second_s, at_most_s):
    server = make(options=SMALL)
    with connect(server) as peer:
        session = wait_until(lambda: server.sessions and server.sessions[0])
        wait_until(lambda: session.calls)
        data = b"x" * 3_000_000
        session.connection.sender.send(data)
        answers, got = [], bytearray()
        first = threading.Thread(target=lambda: answers.append(server.stop(4 * WAIT_S)))
        first.start()
        wait_until(lambda: server.stopping)
        second = threading.Thread(target=lambda: answers.append(server.stop(second_s)))
        began = time.monotonic()
        second.start()
        if second_s == WAIT_S:
            while chunk := peer.recv(65536):
                got += chunk
            assert bytes(got) == data
        for thread in (first, second):
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert time.monotonic() - began < at_most_s
        assert answers == [True, True]
        assert session.wait_end() == (CloseReason.SHUTDOWN, "server stops")


def test_stop_when_called_by_a_handler_says_so_instead_of_hanging(make):
    server = make()
    outcome = []

    def stop_from_inside():
        try:
            server.stop()
        except LocalProtocolError as error:
            outcome.append(str(error))

    with connect(server):
        (connection,) = wait_until(server.connections)
        connection.call_soon(stop_from_inside)
        wait_until(lambda: outcome)
    assert "on a thread of the server" in outcome[0]
    assert not server.stopping


def read_slowly(sock, got, pause_s):
    with contextlib.suppress(OSError):
        while chunk := sock.recv(16_384):
            got += chunk
            sock.sendall(b"ack")
            time.sleep(pause_s)


@pytest.mark.parametrize("finished", [False, True])
def test_stop_when_peers_read_and_acknowledge_resets_none(make, finished):
    data = b"x" * 400_000

    class Sending(Noting):
        def opened(self):
            self.send(data)
            if finished:
                self.close_after_flush("done")
            self._note("opened")

    server, readers = make(Sending), []
    for _ in range(5):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.settimeout(WAIT_S)
        sock.connect(server.address)
        reading = threading.Thread(target=read_slowly, args=(sock, got := bytearray(), 0.003), daemon=True)
        readers.append((sock, got, reading))
        readers[-1][2].start()
    wait_until(lambda: [session.calls[:1] for session in server.sessions] == [["opened"]] * len(readers))
    assert server.stop()
    for sock, _, reader in readers:
        reader.join(WAIT_S)
        sock.close()
    assert [len(got) for _, got, _ in readers] == [len(data)] * len(readers)


def test_stop_when_a_peer_reads_in_steps_waits_for_the_next(make):
    """The window of a slow reader opens by half its receive buffer at a time: for most of a second nothing moves."""
    server = make(options=SocketOptions(notsent_lowat_bytes=0))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.settimeout(WAIT_S)
        sock.connect(server.address)
        session = wait_until(lambda: server.sessions and server.sessions[0])
        session.send(b"x" * 60_000)
        session.close_after_flush("done")
        session.wait_end()
        got = bytearray()
        reading = threading.Thread(target=read_slowly, args=(sock, got, 0.6))
        reading.start()
        assert server.stop()
        reading.join(WAIT_S)
    assert len(got) == 60_000


def test_stop_when_called_in_a_forked_child_leaves_all_to_the_parent(make):
    """The child's threads are not there and its locks may be held for ever: it ends at once, and the parent goes on."""
    server = make(group_count=2)
    with connect(server) as peer:
        (connection,) = wait_until(server.connections)
        held, let_go = threading.Event(), threading.Event()

        def hold():
            with connection.sender._lock, server._lock:
                held.set()
                let_go.wait(WAIT_S)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(WAIT_S)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            os._exit(0 if server.stop() and server.groups.stop() and connection.core.host.sock.fileno() == -1 else 1)
        let_go.set()
        holder.join()
        assert os.waitpid(child, 0)[1] == 0
        peer.sendall(b"still here")
        wait_until(lambda: bytes(connection.session.got) == b"still here")
        assert not server.stopping


def test_stop_when_never_started_frees_the_port(loop_factory):
    server = Server(Noting, loop_factory=loop_factory)
    assert server.stop()
    Server(Noting, port=server.address[1], loop_factory=loop_factory).stop()


def test_run_when_signalled_stops_and_puts_the_handlers_back(loop_factory):
    before = signal.getsignal(signal.SIGINT)
    server = Server(Noting, loop_factory=loop_factory)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    server.run()
    assert server.stopping
    assert signal.getsignal(signal.SIGINT) is before


def test_accept_when_the_address_is_full_refuses_and_recovers(make):
    refusals = []
    limits = AdmissionLimits(connections_per_address=2, new_per_address_and_s=0.0)
    server = make(admission=limits, on_refused=lambda peer, error: refusals.append((peer, error)))
    first, second = connect(server), connect(server)
    wait_until(lambda: len(server.connections()) == 2)
    assert is_refused(server)
    ((peer, error),) = wait_until(lambda: refusals, "the refusal")
    assert (peer[0], error.limit, error.value, error.maximum) == ("127.0.0.1", "connections_per_address", 3, 2)
    first.close()
    wait_until(lambda: len(server.connections()) == 1)
    third = connect(server)
    wait_until(lambda: len(server.connections()) == 2)
    assert server.statistics().refused == {"connections_per_address": 1}
    second.close()
    third.close()


def test_accept_when_all_places_were_taken_and_left_accepts_again(make):
    server = make(
        admission=AdmissionLimits(connections=30, connections_per_address=0, new_per_address_and_s=0.0), group_count=2
    )
    for _ in range(3):
        socks = [connect(server) for _ in range(30)]
        wait_until(lambda: len(server.connections()) == 30)
        assert is_refused(server)
        for number, sock in enumerate(socks):
            if number % 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            sock.close()
        wait_until(lambda: not server.connections() and not server.admission.connections)
    assert server.statistics().accepted == 90


@pytest.mark.parametrize("seen", [True, False])
def test_accept_when_peers_leave_before_they_are_served_loses_no_place(make, monkeypatch, seen):
    """Whether that is seen when they are accepted, or they leave a moment later."""
    if not seen:
        monkeypatch.setattr("flowctl.core.server.listener._is_reset", lambda _: False)
    counted = "resets" if seen else "accepted"
    server = make(admission=AdmissionLimits(connections_per_address=5, new_per_address_and_s=0.0))
    gate, hanging = threading.Event(), threading.Event()
    group = server.groups.groups[0]
    for turn in range(5):
        gate.clear()
        hanging.clear()
        group.call_soon(lambda: (hanging.set(), gate.wait(WAIT_S)))
        assert hanging.wait(WAIT_S)
        for _ in range(4):
            sock = connect(server)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            sock.close()
        gate.set()
        wait_until(lambda turn=turn: getattr(server.statistics(), counted) == 4 * (turn + 1), "accepting")
        wait_until(lambda: not server.admission.connections and not server.connections(), "their end")
    with connect(server):
        wait_until(lambda: len(server.connections()) == 1)


@pytest.mark.parametrize("failure", [RuntimeError, asyncio.CancelledError, SystemExit])
def test_bans_when_taken_end_open_connections_that_do_not_behave_and_no_others(make, failure):
    """Who behaves stays, also where a session cannot say, and nobody new comes in; a limit only slows newcomers."""

    def fail():
        raise failure("it does not know")

    server = make()
    with connect(server), connect(server), connect(server):
        wait_until(lambda: len(server.connections()) == 3)
        server.sessions[0].behaves = fail
        server.sessions[1].behaves = lambda: False
        assert server.set_bans(BanList([Ban(cidr="127.0.0.1", expires=None, action=BanAction.LIMIT)])) == 0
        for _ in range(3 * LIMITED_BURST):
            with contextlib.suppress(ConnectionResetError):  # a refusal may be here before connect() is done
                connect(server).close()
        wait_until(lambda: "limited" in server.statistics().refused)
        wait_until(lambda: len(server.connections()) == 3)
        assert server.set_bans(BanList([Ban(cidr="127.0.0.0/24", expires=None)])) == 1
        wait_until(lambda: server.closed_by_reason.get(CloseReason.BANNED) == 1)
        assert len(server.connections()) == 2
        assert is_refused(server)
        wait_until(lambda: server.errors)
        assert "behaves" in server.errors.pop()[0]


def fail_with(kind):
    raise kind("no session")


@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        (lambda: fail_with(ValueError), "no session"),
        (lambda: fail_with(OSError), "OSError('no session')"),
        (lambda: fail_with(SystemExit), "SystemExit('no session')"),
        (lambda: None, "returned NoneType"),
    ],
)
def test_accept_when_the_session_cannot_be_made_costs_neither_socket_nor_place(make, fault, reported):
    broken = [True]

    def factory():
        if broken[0]:
            return fault()
        return Noting()

    server = make(factory, admission=AdmissionLimits(connections_per_address=1, new_per_address_and_s=0.0))
    for _ in range(3):
        assert is_refused(server)
    wait_until(lambda: len(server.errors) == 3, "the reports")
    assert all(reported in str(error) for _, error in server.errors)
    assert server.admission.connections == 0
    server.errors.clear()
    broken[0] = False
    with connect(server):
        wait_until(lambda: len(server.connections()) == 1)


def test_add_socket_when_connected_elsewhere_is_served_and_takes_no_place(make):
    server = make(admission=AdmissionLimits(connections_per_address=1, new_per_address_and_s=0.0))
    with connect(server), socket.create_server(("127.0.0.1", 0)) as listener:
        wait_until(lambda: len(server.connections()) == 1)
        out = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        session = Noting()
        connection = server.add_socket(out, session)
        far.sendall(b"hi")
        wait_until(lambda: bytes(session.got) == b"hi")
        connection.close_after_flush()
        session.wait_end()
        far.close()
        wait_until(lambda: len(server.connections()) == 1)
        assert server.admission.connections == 1
        assert is_refused(server)


def test_add_socket_when_admission_decides_counts_refuses_and_frees_the_place(make):
    """What was read before is the session's first input; limits and bans go by the peer that is named."""
    refusals = []
    server = make(
        host=None,
        admission=AdmissionLimits(connections_per_address=1, new_per_address_and_s=0.0),
        on_refused=lambda peer, error: refusals.append((peer, error.limit)),
    )
    assert (server.listeners, server.address) == ([], ("", 0))

    def add(address):
        ours, peer = socket.socketpair()
        peer.settimeout(WAIT_S)
        session = Noting()
        try:
            server.add_socket(ours, session, peer=(address, 7), first_input=b"first, ", admit=True)
        except LimitExceededError as error:
            assert ours.fileno() == -1
            peer.close()
            return error.limit
        peer.sendall(b"then")
        wait_until(lambda: bytes(session.got) == b"first, then")
        return session, peer

    session, peer = add("192.0.2.1")
    assert session.connection.peer == ("192.0.2.1", 7)
    assert add("192.0.2.1") == "connections_per_address"
    assert refusals == [(("192.0.2.1", 7), "connections_per_address")]
    server.set_bans(BanList([Ban(cidr="192.0.2.2", expires=None)]))
    assert add("192.0.2.2") == "banned"
    peer.close()
    session.wait_end()
    wait_until(lambda: server.admission.connections == 0)
    add("192.0.2.1")[1].close()
    statistics = server.statistics()
    assert (statistics.accepted, statistics.refused) == (2, {"connections_per_address": 1, "banned": 1})


def test_add_socket_when_stopped_closes_it(make):
    server = make()
    server.stop()
    for admit in (False, True):
        ours, peer = socket.socketpair()
        with pytest.raises(ClosedError):
            server.add_socket(ours, Noting(), admit=admit)
        assert ours.fileno() == -1
        peer.close()
    assert server.admission.connections == 0


def test_groups_when_several_share_the_connections(make):
    server = make(group_count=2)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(server)) for _ in range(10)]
        wait_until(lambda: len(server.sessions) == 10 and all("opened" in item.calls for item in server.sessions))
        counts = [sum(item.group is group for item in server.connections()) for group in server.groups.groups]
        assert sorted(counts) == [5, 5]
        for sock in socks:
            sock.sendall(b"x")
        wait_until(lambda: all(session.got for session in server.sessions))
        assert {len(session.threads) for session in server.sessions} == {1}


LINE = b"PROXY TCP4 192.0.2.7 127.0.0.1 4711 1935\r\n"


@pytest.mark.parametrize("header", [LINE, b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\2\7\x7f\0\0\1\x12\x67\7\x8f"])
def test_trusted_proxy_when_it_says_whom_it_speaks_for_is_taken_at_its_word(make, header):
    server = make(
        trusted_proxies=["127.0.0.0/8"], admission=AdmissionLimits(connections_per_address=1, new_per_address_and_s=0)
    )
    with connect(server) as sock:
        for octet in header:
            sock.sendall(bytes([octet]))
        sock.sendall(b"hello")
        wait_until(lambda: server.sessions and server.sessions[0].got == b"hello")
        assert [connection.peer for connection in server.connections()] == [("192.0.2.7", 4711)]
        with connect(server) as other:  # the same address behind the proxy
            other.sendall(header)
            with contextlib.suppress(ConnectionResetError):
                assert other.recv(1) == b""
        with connect(server) as other:
            other.sendall(header.replace(b".7 ", b".8 ").replace(b"\2\7\x7f", b"\2\x08\x7f"))
            wait_until(lambda: len(server.connections()) == 2)
    assert server.admission.refused == {"connections_per_address": 1}
    wait_until(lambda: not server.connections())
    assert server.admission.connections == 0


def test_trusted_proxy_when_it_says_nothing_of_the_kind_is_refused_by_name(make):
    """RTMP without a header, TLS, HTTP, a header that is cut off; a look whether the port is open is nobody's fault."""
    told = []
    server = make(
        trusted_proxies=["127.0.0.1"], on_refused=lambda peer, error: told.append((peer[0], error.limit, str(error)))
    )
    for data in (b"\3" + bytes(1536), b"\x16\3\1", b"GET / HTTP/1.1\r\n", b"PROXY TCP4 192.0.2.7"):
        with connect(server) as sock, contextlib.suppress(OSError):  # it may be refused at the first octet
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
    connect(server).close()
    wait_until(lambda: len(told) == 4)
    assert {item[:2] for item in told} == {("127.0.0.1", "proxy_header")}
    assert "sent no PROXY header" in told[0][2]
    assert server.admission.refused == {"proxy_header": 4}
    assert server.sessions == []


def test_trusted_proxy_when_its_header_does_not_come_is_refused_in_time(make, monkeypatch):
    monkeypatch.setattr("flowctl.core.server.listener.HEADER_TIME_S", 0.05)
    server = make(trusted_proxies=["127.0.0.1"])
    with connect(server) as one, connect(server) as two:
        for sock, part in ((one, LINE[:9]), (two, b"")):
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                sock.sendall(part)
                assert sock.recv(1) == b""
    wait_until(lambda: server.admission.refused == {"proxy_header_s": 2})


def test_trusted_proxy_when_too_many_headers_are_waited_for_is_refused(make, monkeypatch):
    monkeypatch.setattr("flowctl.core.server.listener.HEADER_TIME_S", 60)
    monkeypatch.setattr("flowctl.core.server.listener.MOST_WAITING", 2)
    server = make(trusted_proxies=["127.0.0.1"])
    with connect(server) as one, connect(server) as two:
        wait_until(lambda: len(server.listeners[0].proxied) == 2)
        with contextlib.suppress(ConnectionResetError), connect(server) as three:  # perhaps before connect() is done
            assert three.recv(1) == b""
        wait_until(lambda: server.admission.refused == {"proxy_waiting": 1})
        assert server.stop()
        for sock in (one, two):
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""


def test_proxy_header_when_from_anybody_else_is_input_like_any_other(make):
    server = make(trusted_proxies=["192.0.2.1"])
    with connect(server) as sock:
        sock.sendall(LINE)
        wait_until(lambda: server.sessions and server.sessions[0].got == LINE)
        assert server.connections()[0].peer[0] == "127.0.0.1"


@pytest.mark.parametrize("wanted", [True, False])
def test_rebalance_when_switched_off_never_happens(monkeypatch, wanted):
    monkeypatch.setattr(server_module, "_REBALANCE_S", 0.01)
    asked = threading.Event()
    monkeypatch.setattr(server_module.PollGroups, "rebalance", lambda groups: asked.set())
    with Server(Noting, group_count=2, rebalance=wanted):
        assert asked.wait(WAIT_S if wanted else 0.2) is wanted
