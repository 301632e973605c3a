"""Several listeners of one server on real sockets: what is shared, what is each one's own, and what goes wrong."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time

import pytest
import structlog
from certificate_kit import Pair
from connection_kit import WAIT_S, Noting, wait_until

from flowctl.core.server import turning
from flowctl.core.server.admission import AdmissionLimits
from flowctl.core.server.bans import Ban, BanList
from flowctl.core.server.certificate import Certificate
from flowctl.core.server.listener import PAUSE_S, shown
from flowctl.core.server.server import Server
from flowctl.errors import ConfigError, LocalProtocolError

FREE = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0.0)


NONE_LEFT, AGAIN = "no descriptor is left: connections wait", "connections are accepted again"


class Greeting(Noting):
    word = b"plain"

    def opened(self):
        super().opened()
        self.send(self.word)


class Other(Greeting):
    word = b"other"


@pytest.fixture
def build(loop_factory):
    """Make servers that greet, not started; what is reported is in `errors`."""
    servers = []

    def made(**options):
        errors = []
        options.setdefault("admission", FREE)
        server = Server(Greeting, loop_factory=loop_factory, on_error=lambda *error: errors.append(error), **options)
        server.errors = errors
        servers.append(server)
        return server

    yield made
    for server in servers:
        assert server.stop()
        server.close_listeners()


@pytest.fixture
def logs():
    with structlog.testing.capture_logs() as logs:
        yield logs


def connect(address):
    sock = socket.create_connection(address, WAIT_S)
    sock.settimeout(WAIT_S)
    return sock


def refuses(address) -> bool:
    """Return whether nobody listens there; who waited in the queue of a listener that closes is reset."""
    try:
        connect(address).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    return False


def greeting(address) -> bytes:
    with connect(address) as sock:
        return sock.recv(5)


def test_listen_when_it_has_a_factory_of_its_own_serves_its_sessions(build):
    server = build(group_count=2)
    other = server.listen("127.0.0.1", 0, session_factory=Other, name="other")
    same = server.listen("127.0.0.1", 0)
    server.start()
    assert [greeting(address) for address in (server.address, other, same)] == [b"plain", b"other", b"plain"]
    assert server.statistics().accepted == 3
    assert server.stop()
    assert all(refuses(address) for address in (server.address, other, same))


def test_admission_when_there_are_several_listeners_counts_over_all(build):
    server = build(admission=AdmissionLimits(connections_per_address=1, new_per_address_and_s=0.0))
    other = server.listen("127.0.0.1", 0, session_factory=Other)
    server.start()
    with connect(server.address) as first:
        assert first.recv(5) == b"plain"
        with contextlib.suppress(ConnectionResetError), connect(other) as second:
            assert second.recv(5) == b""
        wait_until(lambda: server.admission.refused == {"connections_per_address": 1})


def test_stop_accepting_when_there_are_several_listeners_closes_all_and_leaves_who_is_in(build):
    server = build()
    other = server.listen("127.0.0.1", 0, session_factory=Other)
    server.start()
    with connect(other) as sock:
        assert sock.recv(5) == b"other"
        server.stop_accepting()
        wait_until(lambda: all(refuses(address) for address in (server.address, other)))
        server.connections()[0].sender.send(b"still")
        assert sock.recv(5) == b"still"


def test_accept_when_the_process_has_no_descriptor_left_rests_at_each_listener_and_recovers(build, logs):
    server = build()
    other = server.listen("127.0.0.1", 0, session_factory=Other)
    server.start()
    assert greeting(server.address) == b"plain"  # all that is made lazily has its descriptors
    clients = [socket.socket() for _ in range(2)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(clients[0].fileno())
    os.close(free)
    wait_until(lambda: not server.connections())
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(free, *(c.fileno() for c in clients)), hard))
    try:
        for client, address in zip(clients, (server.address, other), strict=True):
            client.settimeout(WAIT_S)
            client.connect(address)
        wait_until(lambda: [listener.pauses for listener in server.listeners] == [1, 1])
        time.sleep(2.5 * PAUSE_S)  # it tries again, and is silent
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [client.recv(5) for client in clients] == [b"plain", b"other"]
    wait_until(lambda: [line["event"] for line in logs].count(AGAIN) == 2)
    for client in clients:
        client.close()
    told = [(line["event"], line["listen"]) for line in logs if line["event"] in (NONE_LEFT, AGAIN)]
    places = [shown(*address) for address in (server.address, other)]
    assert sorted(told) == sorted((event, place) for event in (NONE_LEFT, AGAIN) for place in places)
    assert server.errors == []
    assert server.statistics().accept_pauses == 2


def test_connections_that_are_reset_at_once_are_no_connections(build):
    """Neither a session nor the rate of an address hears of them."""
    server = build()
    server.start()
    busy = threading.Event()
    server.groups.groups[0].call_soon(busy.wait, WAIT_S)
    for _ in range(50):
        with connect(server.address) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with connect(server.address) as sock:
        busy.set()
        assert sock.recv(5) == b"plain"
    statistics = server.statistics()
    assert (statistics.resets, statistics.accepted, statistics.refused) == (50, 1, {})


def test_trusted_proxy_when_at_a_second_listener_is_asked_for_its_header_too(build):
    server = build(trusted_proxies=["127.0.0.1"])
    other = server.listen("127.0.0.1", 0, session_factory=Other)
    server.start()
    with connect(other) as sock:
        sock.sendall(b"PROXY TCP4 192.0.2.9 127.0.0.1 1000 1935\r\n")
        assert sock.recv(5) == b"other"
        assert [connection.peer for connection in server.connections()] == [("192.0.2.9", 1000)]


def test_listen_when_the_port_is_in_use_names_the_listener(build):
    server = build()
    with pytest.raises(ConfigError) as caught:
        server.listen("127.0.0.1", server.address[1], name="https")
    assert str(caught.value) == f"cannot listen on 127.0.0.1:{server.address[1]} (https): Address already in use"
    assert caught.value.hint == "choose another port, or 0 for any"


def test_listen_when_the_address_is_not_of_this_machine_says_so(build):
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1:0 \(rtmps\): Cannot assign") as caught:
        build().listen("192.0.2.1", 0, name="rtmps")
    assert "address of this machine" in caught.value.hint


def test_listen_when_started_is_refused(build):
    server = build()
    server.start()
    with pytest.raises(LocalProtocolError, match="after the start"):
        server.listen("127.0.0.1", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_listen_when_all_of_ipv6_leaves_ipv4_to_others(build):
    """`::` takes IPv6 alone: the same port is free for `0.0.0.0`, whichever comes first."""
    for _ in range(10):
        server = build(host="::")
        port = server.address[1]
        with contextlib.suppress(ConfigError):  # another program has that port of IPv4
            assert server.listen("0.0.0.0", port, session_factory=Other) == ("0.0.0.0", port)
            break
    server.start()
    assert greeting(("::1", port)) == b"plain"
    assert greeting(("127.0.0.1", port)) == b"other"
    assert shown(*server.address) == f"[::]:{port}"


class Speaking(Noting):
    __refusals__ = (b"too many", b"banned")


@pytest.fixture
def full(loop_factory):
    """A server that lets in nobody else, and tells those whom it refuses."""
    limits = AdmissionLimits(connections=1, connections_per_address=0, new_per_address_and_s=0.0)
    server = Server(Speaking, loop_factory=loop_factory, admission=limits)
    server.start()
    with connect(server.address):
        wait_until(server.connections, "the one that it lets in")
        yield server
        assert server.stop()
    assert len(server.listeners[0].turned_away) == 0


def is_reset(address) -> bool:
    """Return whether a connection is ended without a word; it may be before connect() is done."""
    try:
        with connect(address) as sock:
            sock.sendall(b"GET")
            return sock.recv(100) == b""
    except (ConnectionResetError, BrokenPipeError):
        return True


def test_refused_when_it_asks_is_told_and_reads_all_of_it(full):
    """Also if it goes on sending: a reset would overtake the answer."""
    with connect(full.address) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        assert sock.recv(100) == b"too many"
        sock.sendall(b"x" * 10_000)
        assert sock.recv(100) == b""
    wait_until(lambda: not len(full.listeners[0].turned_away), "the end of its socket")


def test_refused_when_it_says_nothing_is_reset_soon(full, monkeypatch):
    monkeypatch.setattr(turning, "_ASKS_WITHIN_S", 0.05)
    with connect(full.address) as sock, pytest.raises(ConnectionResetError):
        sock.recv(100)


@pytest.mark.parametrize("own", [3, 8])
def test_refused_when_one_address_has_its_part_of_the_places_leaves_the_others(full, monkeypatch, own):
    """Or where it has none left to it: the oldest one of the address that has most is reset, and no other."""
    monkeypatch.setattr(turning, "_ASKS_WITHIN_S", 60.0)
    monkeypatch.setattr(turning, "MOST_TOLD", 8 if own == 8 else 4)
    if own == 3:  # addresses by the dozen, none of which has more than a part
        monkeypatch.setattr(turning, "_SHARES", 1)

    def come(host):
        sock = stack.enter_context(socket.create_connection(full.address, 20, source_address=(host, 0)))
        wait_until(lambda: sock.getsockname() in there(), f"{host} is there")
        return sock

    def there():
        found = set()
        for item in list(away._there):
            with contextlib.suppress(OSError):  # its thread has closed it meanwhile
                found.add(item.getpeername())
        return found

    away = full.listeners[0].turned_away
    with contextlib.ExitStack() as stack:
        honest = come("127.0.0.2")
        many = [come("127.0.0.3") for _ in range(own)]
        late = come("127.0.0.4")
        kept = 2  # a quarter of eight places, or what is left of four beside the two others
        assert len(away) == 2 + kept
        for sock in (honest, late, *many[-kept:]):
            sock.sendall(b"?")
            assert sock.recv(100) == b"too many"
        for sock in many[:-kept]:
            with pytest.raises(ConnectionResetError):
                sock.recv(100)


def test_rate_when_one_address_takes_its_part_leaves_the_others():
    rate = turning.SharedRate(8.0, 4.0)
    assert [rate.take("a", 1.0) for _ in range(4)] == [True, False, False, False]
    assert [rate.take("b", 1.0), rate.take("c", 1.0), rate.take("d", 1.0), rate.take("e", 1.0)] == [True] * 3 + [False]
    assert [rate.take("a", 1.5), rate.take("a", 1.5)] == [True, False]
    for number in range(turning._MOST_ADDRESSES * 2):
        rate.take(str(number), 2.0)
    assert len(rate._of) == turning._MOST_ADDRESSES


def test_refused_when_the_server_stops_meanwhile_are_closed(full):
    with connect(full.address) as sock:
        wait_until(lambda: len(full.listeners[0].turned_away) == 1, "it")
        assert full.stop()
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
        assert len(full.listeners[0].turned_away) == 0


def test_banned_when_one_comes_again_and_again_is_told_once(full):
    full.set_bans(BanList([Ban(cidr="127.0.0.1", expires=None)]))
    with connect(full.address) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        assert sock.recv(100) == b"banned"
    assert is_reset(full.address)  # and leaves words to others


@pytest.fixture
def secured(loop_factory, tmp_path):
    """A server with TLS that lets in nobody; with the certificate's authority."""
    pair = Pair(tmp_path)
    limits = AdmissionLimits(connections=1, connections_per_address=0, new_per_address_and_s=0.0)
    server = Server(Speaking, loop_factory=loop_factory, admission=limits)
    address = server.listen("127.0.0.1", 0, tls=Certificate(pair.certificate, pair.key))
    server.start()
    with connect(server.address):
        wait_until(server.connections, "the one that it lets in")
        yield server, address, pair.client()
        assert server.stop()
    assert len(server.listeners[1].turned_away) == 0


def test_refused_when_it_speaks_tls_is_told_within_it_and_reads_all_of_it(secured):
    server, address, trust = secured
    with trust.wrap_socket(connect(address), server_hostname="localhost", suppress_ragged_eofs=False) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        assert sock.recv(100) == b"too many"
        sock.sendall(b"x" * 10_000)
        assert sock.recv(100) == b""  # its end is said by TLS
    wait_until(lambda: not len(server.listeners[1].turned_away), "the end of its socket")
    server.set_bans(BanList([Ban(cidr="127.0.0.1", expires=None)]))
    with trust.wrap_socket(connect(address), server_hostname="localhost") as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        assert sock.recv(100) == b"banned"


def test_refused_when_they_make_us_shake_hands_too_often_are_reset(secured):
    """Whether they shake hands or not: what others would have done is not known before."""
    server, address, trust = secured
    server.listeners[1].turned_away._handshakes = turning.SharedRate(0.0, 2.0 * turning._SHARES)
    for _ in range(2):
        with trust.wrap_socket(connect(address), server_hostname="localhost") as sock:
            sock.sendall(b"GET")
            assert sock.recv(100) == b"too many"
    assert is_reset(address)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x02\x01\x00"])
def test_refused_when_it_shakes_no_hands_is_reset_soon(secured, monkeypatch, sent):
    monkeypatch.setattr(turning, "_ASKS_WITHIN_S", 0.05)
    server, address, _ = secured
    with connect(address) as sock, contextlib.suppress(ConnectionResetError):
        sock.sendall(sent)
        while sock.recv(100):  # an alert of TLS, perhaps
            pass
    wait_until(lambda: not len(server.listeners[1].turned_away), "the end of its socket")
