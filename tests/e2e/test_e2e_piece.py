"""Large pieces over real sockets: by file where the transport allows it, as bytes elsewhere, and exact to the byte."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import threading

import pytest
from flow_kit import Published

from flowctl.core.fanout.cohort import Piece, Squad
from flowctl.core.outgoing.outbox import write_one
from flowctl.testing import ManualGroup

SIZE = 200_000


class Wrapper:
    """A transport around a socket that has no descriptor to offer and sees the bytes."""

    def __init__(self, sock):
        self.sock = sock
        self.seen = 0

    def send(self, data):
        count = self.sock.send(data)
        self.seen += count
        return count


class Member:
    """As much of a Sender as a squad looks at."""

    def __init__(self, transport):
        self.transport_send = transport.send


@pytest.fixture(name="piece")
def fixture_piece():
    published = Published(ManualGroup())
    start = published.log.tail
    published.script("KI", SIZE // 2)
    piece = Piece(start, published.log.tail)
    yield piece
    piece.close()


def tcp_pair():
    """Return two ends of a connection over loopback; the first does not block, the second gives up after a while."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    ours.setblocking(False)
    theirs.settimeout(10)
    return ours, theirs


def squad_of(piece, *transports):
    squad = Squad(0, piece.start)
    for transport in transports:
        squad.members.append(Member(transport))
        squad.sends.append(transport.send)
    return squad


def read(sock, size):
    data = bytearray()
    while len(data) < size:
        more = sock.recv(min(65536, size - len(data)))
        assert more, "the stream ended too early"
        data += more
    return bytes(data)


def tls_pair(ours, theirs):
    """Return both ends of a connection with TLS around them; without a certificate: only the bytes matter here."""
    contexts = [ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)]
    for context in contexts:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")
    ours.settimeout(10)
    theirs.settimeout(10)
    done = []
    client = threading.Thread(target=lambda: done.append(contexts[1].wrap_socket(theirs)))
    client.start()
    server = contexts[0].wrap_socket(ours, server_side=True)
    client.join(10)
    return server, done[0]


def write_all(piece, sock, size):
    """Write what a member that took `size` bytes has still to get, as its Sender would."""
    sock.setblocking(True)
    sock.sendall(piece.data[size:])


def test_piece_when_some_transports_must_see_the_bytes_reaches_all(piece, monkeypatch):
    files = []
    monkeypatch.setattr(os, "sendfile", lambda *args, kept=os.sendfile: (files.append(args[0]), kept(*args))[1])
    pairs = [tcp_pair() for _ in range(3)]
    wrapper = Wrapper(pairs[1][0])
    squad = squad_of(piece, pairs[0][0], wrapper, pairs[2][0])
    slow = {squad.members.index(member): count for member, count, failure in squad.write(piece, as_file=True)}
    for index, (ours, theirs) in enumerate(pairs):
        taken = slow.get(index, SIZE)
        reader = threading.Thread(target=write_all, args=(piece, ours, taken))
        reader.start()
        assert hashlib.sha256(read(theirs, SIZE)).digest() == hashlib.sha256(piece.data).digest()
        reader.join(10)
    assert files == [pairs[0][0].fileno(), pairs[2][0].fileno()]
    assert 0 < wrapper.seen <= SIZE
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_piece_when_a_peer_does_not_read_says_how_much_was_taken(piece):
    """A stalled peer takes a part, then nothing; what it then gets is what was sent, though the file is closed."""
    ours, theirs = tcp_pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    squad = squad_of(piece, ours)
    (first,) = squad.write(piece, as_file=True)
    assert 0 < first[1] < SIZE
    assert first[2] is None
    total = first[1]
    for _ in range(1000):
        slow = squad.write(piece, as_file=True)
        assert slow, "it cannot take all of it again"
        if not slow[0][1]:
            break
        total += slow[0][1]
    else:
        pytest.fail("the kernel never refused")
    piece.close()
    assert read(theirs, first[1]) == piece.data[: first[1]]
    read(theirs, total - first[1])
    theirs.close()
    ours.close()


def test_piece_when_the_peer_has_gone_reports_the_error(piece):
    broken, healthy = tcp_pair(), tcp_pair()
    broken[0].close()
    squad = squad_of(piece, broken[0], healthy[0])
    slow = squad.write(piece, as_file=True)
    assert [(squad.members.index(member), type(failure)) for member, _, failure in slow if failure] == [(0, OSError)]
    assert read(healthy[1], 10_000) == piece.data[:10_000]
    for sock in (broken[1], *healthy):
        sock.close()


def test_piece_when_a_member_with_tls_does_not_read_is_slow_and_not_broken(piece):
    """A TLS socket that would block says so in its own way: the member is written to again later, and gets all."""
    server, reader = tls_pair(*(end for end in socket.socketpair()))
    server.setblocking(False)
    squad = squad_of(piece, server)
    for _ in range(1000):
        slow = squad.write(piece, as_file=True)
        if slow:
            break
    ((_, taken, failure),) = slow
    assert failure is None
    assert taken < SIZE
    assert write_one(server, piece.data)[1:] == (True, None)
    assert read(reader, taken or SIZE) == piece.data[: taken or SIZE]
    reader.close()
    server.close()
