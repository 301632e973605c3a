"""The admin surface with TLS: what its clients see, and what strangers cannot do before they have shaken hands."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time

import httpx
import pytest
import structlog
from certificate_kit import Pair, serial_of
from e2e_kit import open_live_server, wait_until
from key_update_kit import KeyUpdates
from loopback_kit import FAMILY, LOOPBACK, loopback, many_addresses

from flowctl.errors import ConfigError
from flowctl.live.admin import protocol
from flowctl.live.admin.listener import AdminListener, admin_of
from flowctl.live.config import LiveConfig

TOKEN = "k3tF2hD0mYw8cQz1"


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


@pytest.fixture
def admin(pair):
    """Return a function that starts a server with an admin surface that speaks TLS; it returns that and its address."""
    with contextlib.ExitStack() as stack:

        def start(**settings):
            files = {"tls_certificate": pair.certificate, "tls_key": pair.key}
            server = stack.enter_context(open_live_server(admin=f"tls://{loopback()}", **files, **settings))
            listener = admin_of(server)
            stack.callback(listener.stop, 5.0)
            listener.start()
            return listener, (LOOPBACK, int(listener.bound[0].rpartition(":")[2].strip("/")))

        yield start


def held_by(listener):
    return listener._server.server_state.connections


def ended(sock):
    """Return whether the other end has closed a connection."""
    try:
        return sock.recv(1000) == b""
    except ConnectionError:
        return True


def test_curl_with_the_authority_gets_all_and_without_it_nothing(admin, pair, tmp_path):
    curl = shutil.which("curl") or pytest.skip("curl is not here")
    (tmp_path / "tokens").write_text(f"{TOKEN} admin\n")
    listener, (_, port) = admin(admin_token_file=tmp_path / "tokens")
    assert listener.bound == [f"https://{loopback(port)}/"]

    def ask(path, *more):
        command = [curl, "-sS", "--max-time", "20", *more, f"https://{loopback(port)}{path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, done.stdout + done.stderr

    trusted = ("--cacert", str(pair.authority))
    bearer = ("-H", f"Authorization: Bearer {TOKEN}")
    assert ask("/healthz", *trusted) == (0, '{"status":"ok"}')
    assert "UNAUTHORIZED" in ask("/api/v1/stats", *trusted)[1]
    assert '"connections"' in ask("/api/v1/stats", *trusted, *bearer)[1]
    assert "flowctl_build_info" in ask("/metrics", *trusted, *bearer)[1]
    network = ("-H", "Content-Type: application/json", "-d", '{"network": "192.0.2.7"}')
    assert "192.0.2.7/32" in ask("/api/v1/ban", *trusted, *bearer, *network)[1]
    assert ask("/healthz")[0] == 60  # peer certificate cannot be authenticated with known CA certificates
    assert ask("/healthz", *trusted, "--tls-max", "1.1", "--ciphers", "DEFAULT@SECLEVEL=0")[0] == 35


@pytest.mark.parametrize("version", ["-tls1_2", "-tls1_3"])
def test_openssl_shakes_hands_and_renegotiates_nothing(admin, pair, version):
    openssl = shutil.which("openssl") or pytest.skip("openssl is not here")
    _, (_, port) = admin()
    command = [openssl, "s_client", "-connect", loopback(port), "-CAfile", str(pair.authority), version]
    head = f"GET /healthz HTTP/1.1\r\nHost: {loopback(port)}\r\nConnection: close\r\n\r\n".encode()
    done = subprocess.run([*command, "-ign_eof"], input=head, capture_output=True, timeout=30, check=False)
    assert b"Verify return code: 0 (ok)" in done.stdout
    assert b'{"status":"ok"}' in done.stdout
    if version == "-tls1_2":
        done = subprocess.run(command, input=b"R\n", capture_output=True, timeout=30, check=False)
        assert b"no renegotiation" in done.stderr


def test_events_and_large_answers_come_whole(admin, pair):
    listener, _ = admin()
    with httpx.Client(base_url=listener.bound[0], verify=pair.client(), timeout=20) as client:
        plain = client.get("/mpegts.js").content
        assert len(plain) > 100_000
        with client.stream("GET", "/api/v1/events") as response:
            assert next(response.iter_lines()) == "retry: 2000"
        assert client.get("/openapi.json").json()["info"]["title"] == "flowctl admin API"
    with open_live_server(admin=loopback()) as server:
        without = admin_of(server)
        without.start()
        assert httpx.get(f"{without.bound[0]}mpegts.js").content == plain
        without.stop(5.0)


def test_http_without_tls_is_told_that_this_port_speaks_it(admin):
    listener, _ = admin()
    said = httpx.get(listener.bound[0].replace("https", "http"))
    assert (said.status_code, said.text) == (400, "This port speaks TLS: https://.\n")


@many_addresses
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"A" * 200])
def test_strangers_who_do_not_shake_hands_are_few_and_keep_nobody_out(admin, pair, monkeypatch, sent):
    """They are counted and timed from their first packet on, as those who send no request are."""
    monkeypatch.setattr(protocol, "MOST_STRANGERS", 6)
    listener, address = admin()
    with contextlib.ExitStack() as stack:
        for number in range(1, 41):
            sock = stack.enter_context(socket.create_connection(address, 20, source_address=(f"127.0.9.{number}", 0)))
            sock.sendall(sent)
            if number == 20:
                assert httpx.get(f"{listener.bound[0]}healthz", verify=pair.client()).status_code == 200
        wait_until(lambda: len(held_by(listener)) == 6, "the newest")
        monkeypatch.setattr(protocol, "HEAD_S", 0.05)
        late = stack.enter_context(socket.create_connection(address, 20))
        late.sendall(sent)
        assert ended(late)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\x02\x01\x00",
        b"\x15\x03\x01\x00\x02\x02\x28",
        b"\x16\x03\x03\xff\xff" + bytes(5000),
        b"\x80\x2e\x01\x03\x01",
        bytes(5000),
        b"\xff" * 100,
    ],
)
def test_handshake_that_is_none_ends_the_connection_alone(admin, pair, sent):
    listener, address = admin()
    with socket.create_connection(address, 20) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(20)
        with contextlib.suppress(ConnectionError):
            while sock.recv(1000):
                pass
    assert httpx.get(f"{listener.bound[0]}healthz", verify=pair.client()).status_code == 200
    wait_until(lambda: not held_by(listener), "the end of all connections")


@pytest.mark.parametrize("answer", [False, True])
def test_new_keys_without_end_cost_a_piece_at_a_time_and_no_memory(admin, pair, monkeypatch, answer):
    """A peer that wants new keys for each of its own, and reads none, is cut; others are served meanwhile."""
    monkeypatch.setattr(protocol, "HEAD_S", 600.0)
    listener, address = admin()
    wait_until(lambda: listener._server.started, "the listener")
    listener._server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket(FAMILY) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(address)
        client = KeyUpdates(sock)
        sock.sendall(client.step())
        client.give(sock.recv(65536))
        sock.sendall(client.step())
        sock.setblocking(False)
        flood, most, cut, until = b"", 0, False, time.monotonic() + 30
        rounds = 80 if answer else 2
        while rounds and not cut:
            assert time.monotonic() < until
            if not flood:
                rounds, flood = rounds - 1, b"".join(client.update(answer=answer) for _ in range(5_000))
            try:
                flood = flood[sock.send(flood) :]
            except BlockingIOError:
                assert httpx.get(f"{listener.bound[0]}healthz", verify=pair.client()).status_code == 200
            except ConnectionError:
                cut = True
            with contextlib.suppress(RuntimeError):  # the set has changed meanwhile
                most = max([most, *(item.transport.get_write_buffer_size() for item in held_by(listener))])
    assert cut is answer
    assert most < 128 * 1024


def test_certificate_that_is_renewed_is_that_of_the_next_connection_and_one_that_is_wrong_changes_nothing(admin, pair):
    _, address = admin()

    def serial():
        with pair.client().wrap_socket(socket.create_connection(address, 20), server_hostname="localhost") as sock:
            return serial_of(sock)

    first = serial()
    second = pair.renew()
    assert (serial(), first != second) == (second, True)
    with structlog.testing.capture_logs() as lines:
        pair.key.write_bytes(pair.key.read_bytes()[:100])
        assert serial() == second
    said = {line["event"] for line in lines}  # by the server as well, which has looked meanwhile
    assert said == {"the new certificate is not valid, that of before stays in force"}
    assert serial() == second
    third = pair.renew()
    assert serial() == third


def test_surface_with_tls_and_without_a_certificate_refuses_to_start():
    with (
        pytest.raises(ConfigError, match="admin: TLS needs a certificate"),
        open_live_server(admin=f"tls://{loopback()}"),
    ):
        pass
    config = LiveConfig(admin="tls://0.0.0.0:0")
    with pytest.raises(ConfigError, match="anybody could operate the server"):
        AdminListener(config, lambda *_: b"")
