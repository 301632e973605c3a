"""What a peer may make of the records of TLS: a thread that many share works on one piece of them at a time."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import struct
import threading
import time

import pytest
from certificate_kit import Pair
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from flowctl.core.loop import tls
from flowctl.core.loop.tls import RECORD_BYTES, WRITE_BYTES
from flowctl.core.server.certificate import Certificate
from flowctl.errors import RemoteProtocolError

DATA, HANDSHAKE = 23, 22
NEW_KEYS, NEW_KEYS_WITH_ANSWER = b"\x18\x00\x00\x01\x00", b"\x18\x00\x00\x01\x01"
NUMBERED = b"".join(struct.pack("!I", number) for number in range(100_000))
TURN_S = 0.1
"""Most work for one piece; it takes 7 ms."""


class Records:
    """The records of a client of TLS 1.3, made by hand: those that no library sends too (RFC 8446, 5.2 and 7.1)."""

    def __init__(self, secret):
        self._use(secret)

    def _use(self, secret):
        self._secret, self._number = secret, 0
        self._key, self._iv = AESGCM(self._expand(b"key", 32)), int.from_bytes(self._expand(b"iv", 12))

    def _expand(self, label, size):
        label = b"tls13 " + label
        info = struct.pack("!HB", size, len(label)) + label + b"\0"
        return HKDFExpand(SHA384(), size, info).derive(self._secret)

    def record(self, kind, content=b""):
        header = struct.pack("!BHH", DATA, 0x0303, len(content) + 17)
        nonce = (self._iv ^ self._number).to_bytes(12)
        self._number += 1
        return header + self._key.encrypt(nonce, content + bytes([kind]), header)

    def new_keys(self, message):
        made = self.record(HANDSHAKE, message)
        self._use(self._expand(b"traffic upd", 48))
        return made


class Peer:
    """Both ends of a connection: `sock` is ours, `tls` and `records` the peer's; the handshake is done."""

    def __init__(self, tmp_path, context, authority):
        near, self.far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        self.sock = context.wrap(near)
        client = ssl.create_default_context(cafile=authority)
        client.keylog_filename = str(tmp_path / "keys")
        self.came, self.goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = client.wrap_bio(self.came, self.goes, server_hostname="localhost")
        for step in itertools.count():
            if self.sock.established:
                break
            assert step < 10
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
            self.far.sendall(self.goes.read())
            with contextlib.suppress(BlockingIOError):
                self.sock.recv_into(bytearray(1))
            self.take()
        lines = [line.split() for line in (tmp_path / "keys").read_text().splitlines()]
        self.records = Records(
            bytes.fromhex(next(line[2] for line in lines[::-1] if line[0] == "CLIENT_TRAFFIC_SECRET_0"))
        )

    def take(self):
        with contextlib.suppress(BlockingIOError):
            self.came.write(self.far.recv(1 << 20, socket.MSG_DONTWAIT))

    def read(self):
        self.take()
        return self.tls.read(1 << 20)

    def unread_bytes(self):
        with contextlib.suppress(BlockingIOError):
            return len(self.sock.recv(1 << 20, socket.MSG_PEEK))
        return 0

    def turn(self):
        """Let our end read once; return what it got. No turn may take more than a piece, nor long."""
        before, buffer, began = self.unread_bytes(), bytearray(65536), time.thread_time()
        try:
            return bytes(buffer[: self.sock.recv_into(buffer)])
        except BlockingIOError:
            return b""
        finally:
            assert time.thread_time() - began < TURN_S
            assert before - self.unread_bytes() < 2 * RECORD_BYTES


@pytest.fixture
def connect(tmp_path):
    pair = Pair(tmp_path)
    context = Certificate(pair.certificate, pair.key)
    with contextlib.ExitStack() as stack:

        def build():
            peer = Peer(tmp_path, context, pair.authority)
            stack.enter_context(peer.far)
            stack.enter_context(peer.sock)
            return peer

        yield build


def test_peer_when_it_sends_new_keys_without_end_has_one_piece_read_at_a_time(connect):
    """OpenSSL by itself would read on as long as they come, and keep the thread that all connections share."""
    peer = connect()
    flood = b"".join(peer.records.new_keys(NEW_KEYS) for _ in range(4000))
    peer.far.sendall(flood + peer.records.record(DATA, b"in the end"))
    turns = list(itertools.takewhile(lambda got: got != b"in the end", iter(peer.turn, None)))
    assert turns == [b""] * len(turns)
    assert len(turns) >= len(flood) // (RECORD_BYTES + 256)


def test_peer_when_it_wants_new_keys_and_reads_none_is_read_no_more_once_answers_wait(connect):
    peer = connect()
    wanted = 0
    while not peer.sock.read_wants_write:
        wanted += peer.far.send(b"".join(peer.records.new_keys(NEW_KEYS_WITH_ANSWER) for _ in range(600)))
        assert peer.turn() == b""
        assert wanted < 20 * WRITE_BYTES
    assert peer.sock.kept_bytes < 2 * WRITE_BYTES + 2 * RECORD_BYTES
    peer.far.sendall(peer.records.record(DATA, b"let me in"))
    assert peer.turn() == b""
    assert peer.unread_bytes() > 0


def test_peer_when_it_sends_records_of_nothing_without_end_is_at_fault(connect):
    peer = connect()
    peer.far.sendall(b"".join(peer.records.record(DATA) for _ in range(4000)))
    with pytest.raises(RemoteProtocolError, match="TLS: record too small"):
        peer.turn()


def test_peer_when_its_records_are_tiny_is_read_in_pieces_and_loses_nothing(connect):
    peer = connect()
    data = NUMBERED[:4000]
    peer.far.sendall(b"".join(peer.records.record(DATA, data[index : index + 1]) for index in range(len(data))))
    got = b""
    while len(got) < len(data):
        part = peer.turn()
        assert 0 < len(part) < 1000
        got += part
    assert got == data


def test_output_of_64_kb_is_one_call_of_the_kernel_and_longer_output_is_kept_in_no_larger_pieces(connect, monkeypatch):
    peer = connect()
    sent = []

    def send(sock, data):
        sent.append(len(data))
        return len(data) if len(sent) < 3 else socket.socket.send(sock, data)

    monkeypatch.setattr(tls, "_send", send)
    assert peer.sock.send(NUMBERED[:WRITE_BYTES]) == WRITE_BYTES
    assert len(sent) == 1
    assert peer.sock.send(NUMBERED) < len(NUMBERED)
    assert WRITE_BYTES < max(sent) < WRITE_BYTES + 200
    assert 0 < peer.sock.kept_bytes < WRITE_BYTES + 200


def test_connections_of_a_thread_share_memory_for_what_is_encrypted_and_those_of_another_do_not(connect):
    one, other = connect(), connect()
    assert one.sock._records is other.sock._records
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(connect().sock._records))
    thread.start()
    thread.join()
    assert elsewhere[0] is not one.sock._records


def test_records_when_another_connection_comes_in_between_go_to_their_own_peer_in_order(connect):
    """As where a finalizer that sends runs between encrypting and sending, or an error has left some."""
    one, other = connect(), connect()
    records = one.sock._records
    with records.lock:
        one.sock._claim_locked(records)
        one.sock._tls.write(b"first ")
        assert other.sock.send(b"mine") == 4
        one.far.sendall(one.records.record(DATA, b"yours"))
        other.far.sendall(other.records.record(DATA, b"to the other"))
        assert other.turn() == b"to the other"
        assert one.turn() == b"yours"
        one.sock._claim_locked(records)
        one.sock._tls.write(b"second")
        assert other.sock.push()
    assert one.sock.push()
    assert other.read() == b"mine"
    assert one.read() + one.read() == b"first second"
    assert records.owner is None


def test_answer_when_another_connection_comes_in_before_it_is_sent_is_not_lost(connect, monkeypatch):
    """As where a finalizer that sends runs just after OpenSSL has read: what it answers is among the records."""
    other, flush, said = connect(), tls.TlsSocket._flush_locked, []

    def come_in(sock, records):
        if records.bio.pending and sock is not other.sock and not said:
            said.append(other.sock.send(b"mine"))
        flush(sock, records)

    monkeypatch.setattr(tls.TlsSocket, "_flush_locked", come_in)
    one = connect()
    assert said == [4]
    assert one.sock.send(b"yours") == 5
    assert one.read() == b"yours"
    assert other.read() == b"mine"
