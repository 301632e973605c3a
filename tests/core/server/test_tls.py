"""TLS on real sockets and both loops: media both ways, slow peers, ends, bad handshakes, and new certificates."""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import ssl
import struct
import subprocess
import threading

import pytest
from certificate_kit import Pair, key_pem, serial_of
from connection_kit import WAIT_S, Noting, ask, wait_until
from cryptography.hazmat.primitives.asymmetric import ec

from flowctl.connection import Session
from flowctl.core.fanout.following import Fanouts, FollowPlace
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.state import MessageClass
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.loop.tls import RECORD_BYTES, TlsSocket, with_tls
from flowctl.core.loop.work import HANDSHAKES_TURN_S, ThreadWork
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.contract import Standing
from flowctl.core.server.admission import AdmissionLimits
from flowctl.core.server.certificate import Certificate
from flowctl.core.server.server import Server
from flowctl.errors import ConfigError
from flowctl.reasons import CloseReason

FREE = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0.0)
NUMBERED = b"".join(struct.pack("!I", number) for number in range(500_000))
"""Two megabytes in which every place is different: what is lost, repeated or out of order shows."""


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


@pytest.fixture
def make(loop_factory, pair):
    """Make started servers with TLS at `server.secure`; their sessions in `sessions`, what is reported in `errors`."""
    servers = []

    def build(factory=Noting, **options):
        sessions, errors = [], []

        def session():
            sessions.append(factory())
            return sessions[-1]

        options = {"admission": FREE, "limits": NO_LIMITS, **options}
        server = Server(session, loop_factory=loop_factory, on_error=lambda *error: errors.append(error), **options)
        server.sessions, server.errors = sessions, errors
        server.tls = Certificate(pair.certificate, pair.key)
        server.secure = server.listen("127.0.0.1", 0, tls=server.tls)
        servers.append(server)
        server.start()
        return server

    yield build
    for server in servers:
        assert server.stop()
        assert server.errors == []


def connect(server, *, buffer=0):
    sock = socket.socket()
    if buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.settimeout(WAIT_S)
    sock.connect(server.secure)
    return sock


def secure(server, pair, **options):
    return pair.client().wrap_socket(connect(server, **options), server_hostname="localhost")


def read(sock, size):
    data = bytearray()
    while len(data) < size and (more := sock.recv(65536)):
        data += more
    return bytes(data)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_connection_when_it_speaks_tls_carries_both_ways_what_is_larger_than_any_buffer(make, pair, version):
    server = make()
    context = pair.client()
    context.maximum_version = version
    with context.wrap_socket(connect(server, buffer=4096), server_hostname="localhost") as sock:
        assert sock.version() == version.name.replace("v1_", "v1.")
        writer = threading.Thread(target=sock.sendall, args=(NUMBERED,))
        writer.start()
        wait_until(lambda: server.sessions and len(server.sessions[0].got) == len(NUMBERED))
        writer.join(WAIT_S)
        assert server.sessions[0].got == NUMBERED
        (connection,) = server.connections()
        for start in range(0, len(NUMBERED), 70_000):
            connection.sender.send(NUMBERED[start : start + 70_000])
        wait_until(lambda: connection.sender.blocked)
        assert read(sock, len(NUMBERED)) == NUMBERED
        wait_until(lambda: connection.sender.drained)


def test_output_when_a_record_was_taken_in_part_goes_out_before_anything_else_and_by_itself(make, pair):
    """What OpenSSL has begun goes to the end of it, even when nothing more is ever sent."""
    server = make(options=SocketOptions(send_buffer_bytes=4096))
    with secure(server, pair, buffer=4096) as sock:
        wait_until(server.connections)
        (connection,) = server.connections()
        sent = 0
        kept = 0
        for start in range(0, len(NUMBERED), 3_000):
            connection.sender.send(NUMBERED[start : start + 3_000])
            sent += 3_000
            kept = ask(connection, lambda: connection.core.tls.kept_bytes)
            if kept:
                break
        assert connection.core.host.kernel_bytes() > kept  # counted as what the kernel holds, with what it does hold
        assert read(sock, sent) == NUMBERED[:sent]
        wait_until(lambda: connection.core.tls.kept_bytes == 0)


def test_close_after_flush_when_a_record_is_kept_ends_with_all_of_it_and_close_notify(make, pair):
    server = make(options=SocketOptions(send_buffer_bytes=4096))
    context = pair.client()
    with context.wrap_socket(
        connect(server, buffer=4096), server_hostname="localhost", suppress_ragged_eofs=False
    ) as sock:
        wait_until(server.connections)
        (connection,) = server.connections()
        connection.sender.send(NUMBERED[:200_000])
        connection.close_after_flush("done")
        assert read(sock, 300_000) == NUMBERED[:200_000]
    wait_until(lambda: not server.connections())
    assert server.closed_by_reason == {CloseReason.FINISHED: 1}


def test_peer_when_it_says_close_notify_has_ended_its_stream_and_still_gets_what_is_sent(make, pair):
    def staying():
        session = Noting()
        session.stays = True
        return session

    server = make(staying)
    with secure(server, pair) as sock:
        sock.sendall(b"all that I say")
        with contextlib.suppress(ssl.SSLWantReadError):
            sock.settimeout(0)
            sock.unwrap()
        wait_until(lambda: "peer_ended" in server.sessions[0].calls)
        assert server.sessions[0].got == b"all that I say"
        server.connections()[0].sender.send(b"an answer")
        sock.settimeout(WAIT_S)
        with contextlib.suppress(ssl.SSLError):  # Python reads on only as far as it knows of no end of ours
            assert sock.recv(100) == b"an answer"


def test_input_when_it_lies_in_the_tls_object_is_not_forgotten_by_a_hold(make, pair, monkeypatch):
    """A record that was read in part goes on when the hold ends, though the descriptor is not readable."""
    record = NUMBERED[: RECORD_BYTES - 64]

    monkeypatch.setattr("flowctl.receiver.TURN_BUDGET_BYTES", 1000)

    class Blocking(Noting):
        def received(self, data):
            self.got += data
            if len(self.got) == 1000:
                self.connection.pause_input("test", "test")
            return len(data)

    server = make(Blocking)
    with secure(server, pair) as sock:
        sock.sendall(record)
        wait_until(lambda: server.sessions and len(server.sessions[0].got) == 1000)
        (connection,) = server.connections()
        wait_until(lambda: connection.receiver.paused)
        assert ask(connection, connection.core.tls.pending_input)
        assert not select.select([connection.core.host.sock], [], [], 0)[0]
        connection.resume_input("test")
        wait_until(lambda: server.sessions[0].got == record)


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (b"\x03" + bytes(1536), "plain RTMP"),
        (b"GET / HTTP/1.1\r\n\r\n", "plain HTTP"),
        (b"\x00\xff", "first byte 0x00"),
        (b"\x16\x03\x01\x02\x00garbage" + bytes(600), "TLS: "),
    ],
)
def test_handshake_when_it_is_none_ends_the_connection_and_says_what_came(make, first, says):
    server = make()
    with connect(server) as sock:
        sock.sendall(first)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1000):
                pass
    reason, details = wait_until(lambda: server.sessions and server.sessions[0]).wait_end()
    assert (reason, says in details) == (CloseReason.PROTOCOL_ERROR, True), details
    assert server.sessions[0].got == b""


def test_handshake_when_it_is_slow_ends_in_time_and_holds_nobody_up(make, pair, monkeypatch):
    monkeypatch.setattr("flowctl.core.connecting.secure.HANDSHAKE_S", 0.4)
    server = make()
    silent, half = connect(server), connect(server)
    half.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
    with secure(server, pair) as sock:
        sock.sendall(b"hello")
        wait_until(lambda: any(session.got == b"hello" for session in server.sessions))
        for slow in (silent, half):
            with contextlib.suppress(ConnectionResetError):
                assert slow.recv(10) == b""
            slow.close()
        wait_until(lambda: server.closed_by_reason == {CloseReason.HANDSHAKE_TIMEOUT: 2})
        assert len(server.connections()) == 1
    server.errors.clear()


def test_handshakes_when_many_come_at_once_all_succeed_and_are_charged_to_their_peers(make, pair):
    server = make()
    context = pair.client()
    socks = [connect(server) for _ in range(30)]
    made = [context.wrap_socket(sock, server_hostname="localhost", do_handshake_on_connect=False) for sock in socks]
    for sock in made:
        with contextlib.suppress(ssl.SSLWantReadError):
            sock.settimeout(0)
            sock.do_handshake()
    for sock in made:
        sock.settimeout(WAIT_S)
        sock.do_handshake()
        sock.sendall(b"x")
    wait_until(lambda: [session.got for session in server.sessions] == [b"x"] * 30)
    assert all(connection.work.work_s > 0 for connection in server.connections())
    for sock in made:
        sock.close()


def test_handshakes_when_they_have_had_their_part_of_a_turn_wait_for_the_next():
    turns = []
    book = ThreadWork(turns.append)
    assert not book.handshakes_wait
    book.handshake(HANDSHAKES_TURN_S / 2)
    assert not book.handshakes_wait
    book.handshake(HANDSHAKES_TURN_S / 2)
    assert book.handshakes_wait
    (next_turn,) = turns
    next_turn()
    assert not book.handshakes_wait


def test_key_update_when_the_peer_wants_an_answer_goes_on_both_ways(make, pair):
    """TLS 1.3 lets a reader have to write: OpenSSL's own client asks for it with the command K."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not here")
    server = make()
    host, port = server.secure
    client = subprocess.Popen(
        [openssl, "s_client", "-connect", f"{host}:{port}", "-CAfile", pair.authority],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    def say(line):
        client.stdin.write(line)
        client.stdin.flush()

    def expect(wanted):
        while (line := client.stdout.readline()) != wanted:
            assert line

    try:
        say(b"before\n")
        wait_until(lambda: server.sessions and server.sessions[0].got == b"before\n")
        say(b"K\n")
        expect(b"KEYUPDATE\n")
        say(b"after\n")
        wait_until(lambda: server.sessions[0].got == b"before\nafter\n")
        server.connections()[0].sender.send(b"answer\n")
        expect(b"answer\n")
    finally:
        client.kill()
        client.communicate()


def test_reading_when_it_has_to_write_is_gone_on_with_when_the_socket_is_writable(make, pair, monkeypatch):
    server = make()
    with secure(server, pair) as sock:
        sock.sendall(b"one")
        wait_until(lambda: server.sessions and server.sessions[0].got == b"one")
        real, times = TlsSocket.recv_into, []

        def wanting(tls, buffer):
            if not times:
                times.append(1)
                tls.read_wants_write = True
                raise BlockingIOError
            return real(tls, buffer)

        monkeypatch.setattr(TlsSocket, "recv_into", wanting)
        sock.sendall(b"two")
        wait_until(lambda: server.sessions[0].got == b"onetwo")
        assert times
        assert not server.connections()[0].core.tls.read_wants_write


def test_follower_of_a_log_when_it_speaks_tls_is_in_the_cohort_and_gets_large_pieces_as_bytes(make, pair, monkeypatch):
    """The fast path of a fan-out works with TLS: where plain viewers get pages of a file, these get the same bytes."""
    monkeypatch.setattr("flowctl.core.fanout.fanout.FILE_VIEWERS", 1)
    server = make()
    frame = NUMBERED[:60_000]
    with secure(server, pair) as sock, socket.create_connection(server.address, WAIT_S) as plain:
        plain.settimeout(WAIT_S)
        wait_until(lambda: len(server.connections()) == 2)
        log = StreamLog()
        fanouts = Fanouts(log)
        for connection in server.connections():
            ask(connection, FollowPlace, connection, fanouts)
        for _ in range(3):
            ask(connection, log.append, frame, MessageClass.KEY, 0.0)
            for viewer in (sock, plain):
                assert read(viewer, len(frame)) == frame
        senders = [item.sender for item in server.connections()]
        wait_until(lambda: all(sender.statistics().bytes_sent == 3 * len(frame) for sender in senders))
        assert [sender.stands for sender in senders] == [Standing.COHORT] * 2


def test_certificate_when_its_files_change_is_shown_to_newcomers_and_open_connections_go_on(make, pair):
    server = make()
    before = serial_of(old := secure(server, pair))
    now = pair.renew()
    assert server.tls.reload_if_changed()
    assert not server.tls.reload_if_changed()
    with secure(server, pair) as new:
        assert serial_of(new) == now != before
    old.sendall(b"still here")
    wait_until(lambda: server.sessions[0].got == b"still here")
    server.connections()[0].sender.send(b"and you", MessageClass.CONTROL)
    assert old.recv(7) == b"and you"
    old.close()


@pytest.mark.parametrize("broken", ["certificate", "key", "other key", "missing", "open"])
def test_certificate_when_the_new_files_are_wrong_keeps_the_old_and_says_which_and_why_once(make, pair, broken):
    server = make()
    with secure(server, pair) as sock:
        before = serial_of(sock)
    match broken:
        case "certificate":
            pair.certificate.write_text("nothing")
            says = f"there is no certificate in {pair.certificate}"
        case "key":
            pair.key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
            says = str(pair.key)
        case "other key":
            pair.key.write_bytes(key_pem(ec.generate_private_key(ec.SECP256R1())))
            says = f"{pair.key} is not the key of {pair.certificate}"
        case "missing":
            pair.key.unlink()
            says = f"cannot read {pair.key}: No such file"
        case _:
            pair.renew()
            pair.key.chmod(0o644)
            says = f"{pair.key} has mode 0644"
    with pytest.raises(ConfigError) as caught:
        server.tls.reload_if_changed()
    assert says in str(caught.value)
    assert not server.tls.reload_if_changed()
    with secure(server, pair) as sock:
        assert serial_of(sock) == before


def test_certificate_when_the_key_has_a_pass_phrase_is_refused_without_asking(pair):
    pair.key.write_bytes(key_pem(ec.generate_private_key(ec.SECP256R1()), b"secret"))
    with pytest.raises(ConfigError, match="has a pass phrase"):
        Certificate(pair.certificate, pair.key)


def test_key_when_its_mode_is_mended_is_taken_again(pair):
    """Who forgot it and ran ``chmod 600`` is not told of it for good: nothing but the mode has changed."""
    certificate = Certificate(pair.certificate, pair.key)
    pair.key.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        certificate.reload_if_changed()
    pair.key.chmod(0o600)
    assert certificate.reload_if_changed()
    assert certificate.fault == ""


def test_old_versions_of_tls_when_a_client_knows_no_other_are_refused(make, pair):
    server = make()
    context = pair.client()
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with connect(server) as sock, pytest.raises(OSError, match=r"(?i)version|protocol|alert"):
        context.wrap_socket(sock, server_hostname="localhost")
    assert wait_until(lambda: server.sessions and server.sessions[0]).wait_end()[0] is CloseReason.PROTOCOL_ERROR


def test_handshake_when_the_client_does_not_trust_us_says_that_it_refused(make):
    server = make()
    with connect(server) as sock, pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(sock, server_hostname="localhost")
    end = wait_until(lambda: server.sessions and server.sessions[0]).wait_end()
    assert end == (CloseReason.PROTOCOL_ERROR, "tls-alert: the peer refused TLS: unknown ca")


def test_peer_when_it_renegotiates_is_refused_without_work(make, pair):
    server = make()
    openssl = shutil.which("openssl") or pytest.skip("openssl is not here")
    host, port = server.secure
    command = [openssl, "s_client", "-connect", f"{host}:{port}", "-CAfile", str(pair.authority), "-tls1_2"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as client:
        client.stdin.write(b"before\n")
        client.stdin.flush()
        wait_until(lambda: server.sessions and server.sessions[0].got == b"before\n")
        _, told = client.communicate(b"R\n", timeout=WAIT_S)
    assert b"no renegotiation" in told
    server.sessions[0].wait_end()
    assert server.sessions[0].got == b"before\n"


def test_peer_when_it_ends_tcp_without_close_notify_has_ended_its_stream(make, pair):
    """Half of the encoders leave so, and RTMP says itself where it ends."""
    server = make()
    with secure(server, pair) as sock:
        sock.sendall(b"all that I say")
        with socket.socket(fileno=sock.detach()) as raw:
            raw.shutdown(socket.SHUT_WR)
            session = wait_until(lambda: server.sessions and server.sessions[0])
            assert session.wait_end()[0] is CloseReason.PEER_CLOSED
    assert session.got == b"all that I say"
    assert "peer_ended" in session.calls


def test_proxy_header_when_before_tls_names_the_peer(make, pair):
    server = make(trusted_proxies=["127.0.0.1"])
    with connect(server) as raw:
        raw.sendall(b"PROXY TCP4 192.0.2.9 127.0.0.1 1000 1935\r\n")
        with pair.client().wrap_socket(raw, server_hostname="localhost") as sock:
            sock.sendall(b"hello")
            wait_until(lambda: server.sessions and server.sessions[0].got == b"hello")
            assert server.connections()[0].peer == ("192.0.2.9", 1000)


def test_migration_when_a_record_is_kept_goes_on_at_the_other_thread(make, pair):
    server = make(group_count=2, rebalance=False, options=SocketOptions(send_buffer_bytes=4096))
    with secure(server, pair, buffer=4096) as sock:
        wait_until(server.connections)
        (connection,) = server.connections()
        connection.sender.send(NUMBERED[:400_000])
        wait_until(lambda: connection.sender.blocked)
        one, two = server.groups.groups
        source, target = (one, two) if connection.group is one else (two, one)
        assert source.migrate(connection.core, target)
        wait_until(lambda: connection.group is target)
        assert read(sock, 400_000) == NUMBERED[:400_000]


def test_client_when_it_connects_with_tls_speaks_first_and_sends_what_waited(make, pair):
    class Client(Noting):
        def opened(self):
            super().opened()
            self.send(b"from the client")

    server = make()
    client = Client()
    connection = server.add_socket(with_tls(connect(server), pair.client(), host="localhost"), client)
    wait_until(lambda: server.sessions and server.sessions[0].got == b"from the client")
    other = next(item for item in server.connections() if item is not connection)
    other.sender.send(b"from the server")
    wait_until(lambda: client.got == b"from the server")


def test_client_when_the_certificate_is_not_to_be_trusted_ends_and_says_why(make):
    server = make()
    client = Noting()
    server.add_socket(with_tls(connect(server), ssl.create_default_context(), host="localhost"), client)
    reason, details = client.wait_end()
    assert reason is CloseReason.PROTOCOL_ERROR
    assert "tls-certificate: its certificate is not to be trusted: unable to get local issuer" in details


class _GreetsFirst(Session):
    """Waits until the peer has its greeting before it reads."""

    async def opened(self):
        self.send(b"first ")
        await self.connection.drained()
        self.send(b"second")


class _Holds(Session):
    """Holds input from the beginning."""

    def opened(self):
        self.connection.pause_input("test", "test")
        self.send(b"first second")


@pytest.mark.parametrize("session", [_GreetsFirst, _Holds])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_handshake_when_input_is_held_goes_on(make, pair, session, version):
    """What a hold may be waiting for cannot be sent before the handshake: it is done all the same."""
    server = make(session)
    context = pair.client()
    context.maximum_version = version
    with context.wrap_socket(connect(server), server_hostname="localhost") as peer:
        assert read(peer, 12) == b"first second"


class _Resumes(_Holds):
    """Lets input in when the peer has its greeting, and gives it back."""

    def opened(self):
        super().opened()
        self.connection.when_drained(self.connection.resume_input, "test")

    def received(self, data):
        self.send(bytes(data))


def test_input_when_it_came_with_the_end_of_the_handshake_and_was_held_is_not_forgotten(make, pair):
    """What TLS has of it already is read when input is let in: the descriptor tells of nothing."""
    server = make(_Resumes)
    came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = pair.client().wrap_bio(came, goes, server_hostname="localhost")
    with connect(server) as peer:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                peer.sendall(goes.read())
                came.write(peer.recv(65536))
        tls.write(b" third")
        peer.sendall(goes.read())
        got = b""
        while len(got) < 18:
            try:
                got += tls.read(100)
            except ssl.SSLWantReadError:
                data = peer.recv(65536)
                assert data
                came.write(data)
    assert got == b"first second third"


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05xxxxx"])
def test_handshake_when_input_is_held_and_the_peer_speaks_no_tls_ends_at_once(make, said):
    server = make(_Holds)
    with connect(server) as peer:
        peer.sendall(said)
        with contextlib.suppress(OSError):  # it was told already that this is no TLS
            peer.shutdown(socket.SHUT_WR)
        wait_until(lambda: server.statistics().closed)
    expected = CloseReason.PROTOCOL_ERROR if said else CloseReason.PEER_CLOSED
    assert server.statistics().closed == {expected: 1}
