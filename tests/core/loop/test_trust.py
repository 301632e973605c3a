"""TLS of clients: servers that are trusted, and what is said of those that are not."""

from __future__ import annotations

import asyncio
import contextlib
import random
import select
import socket
import ssl
import threading

import pytest
from certificate_kit import Pair

from flowctl.core.loop.tls import with_tls
from flowctl.core.loop.trust import client_context, secured, secured_later, step_of_handshake, trust
from flowctl.errors import ConfigError, RemoteProtocolError


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.delenv("FLOWCTL_TLS_INSECURE", raising=False)
    made = Pair(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
    return made


class Far:
    """A server that speaks TLS once, or does something else with its connection, and echoes what comes."""

    def __init__(self, pair, manner=None, **options):
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pair.certificate, pair.key)
        for name, value in options.items():
            setattr(self._context, name, value)
        self.asked = None
        self._context.sni_callback = self._note_name
        self._manner = manner
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    def _note_name(self, _sock, name, _context):
        self.asked = name

    def _serve(self):
        sock, _ = self._listener.accept()
        with sock, contextlib.suppress(OSError):
            if self._manner is not None:
                self._manner(sock)
                return
            with self._context.wrap_socket(sock, server_side=True) as far:
                while data := far.recv(100):
                    far.sendall(data)

    def __enter__(self):
        self._thread.start()
        return self

    def connect(self):
        return socket.create_connection(self._listener.getsockname())

    def __exit__(self, *_):
        self._thread.join(10)
        self._listener.close()


def test_handshake_when_the_server_is_trusted_is_done_and_asks_for_it_by_name(pair):
    with Far(pair) as far, secured(far.connect(), "localhost") as near:
        assert (near.established, far.asked) == (True, "localhost")
        near.setblocking(True)
        assert near.send(b"hello") == 5


def test_handshake_on_a_loop_when_the_server_is_trusted_is_done(pair):
    async def shake(sock):
        return await secured_later(sock, "localhost", client_context())

    with Far(pair) as far, asyncio.run(shake(far.connect())) as near:
        assert near.established


@pytest.mark.parametrize(
    ("host", "days", "said", "hint"),
    [
        ("127.0.0.2", 2, "not trust .*IP address mismatch", "a name or address that is in its certificate"),
        ("other.example", 2, "not trust .*Hostname mismatch", "a name that is in its certificate"),
        ("localhost", -0.1, "not trust .*expired", "renewed"),
    ],
)
def test_handshake_when_we_refuse_the_certificate_says_so_and_what_to_do(pair, host, days, said, hint):
    pair.renew(days=days)
    with Far(pair) as far, pytest.raises(RemoteProtocolError, match=said) as caught:
        secured(far.connect(), host)
    assert (hint in caught.value.hint, caught.value.code) == (True, "tls-certificate")


def test_handshake_when_the_authority_is_unknown_names_the_option(pair, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with Far(pair) as far, pytest.raises(RemoteProtocolError, match="not trust") as caught:
        secured(far.connect(), "localhost")
    assert "--ca-file" in caught.value.hint
    trust(authorities=pair.authority)
    with Far(pair) as far, secured(far.connect(), "localhost") as near:
        assert near.established


def test_handshake_when_nothing_is_verified_is_done_and_loudly_told(pair, monkeypatch, caplog):
    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setenv("FLOWCTL_TLS_INSECURE", "")
    trust(insecure=True)
    assert [(line.levelname, "not verified" in line.message) for line in caplog.records] == [("WARNING", True)]
    with Far(pair) as far, secured(far.connect(), "other.example") as near:
        assert near.established


def test_handshake_when_the_server_refuses_names_its_alert(pair):
    options = {"maximum_version": ssl.TLSVersion.TLSv1_2, "verify_mode": ssl.CERT_REQUIRED}
    with Far(pair, **options) as far, pytest.raises(RemoteProtocolError, match="the server refused TLS: ") as caught:
        secured(far.connect(), "localhost")
    assert caught.value.code == "tls-alert"


@pytest.mark.parametrize(
    ("manner", "said"),
    [
        (lambda sock: sock.recv(10_000), "left within"),
        (lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "the server (speaks|broke)"),
        (lambda sock: sock.recv(10_000) and sock.recv(1), "within 0.2 s"),
    ],
)
def test_handshake_when_the_other_end_speaks_no_tls_asks_for_the_port(pair, manner, said):
    with Far(pair, manner) as far, pytest.raises(RemoteProtocolError, match=said) as caught:
        secured(far.connect(), "localhost", timeout_s=0.2)
    assert "port" in caught.value.hint


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_handshake_when_the_servers_octets_are_damaged_ends_in_words_or_waits(pair, version):
    """Whatever a server answers: an error of the protocol, or nothing yet; never another error, and never trust."""
    context, rng, errors = client_context(), random.Random(28), 0
    for _ in range(150):
        far_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        far_context.load_cert_chain(pair.certificate, pair.key)
        far_context.maximum_version = version
        near_end, far_end = socket.socketpair()
        came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        far = far_context.wrap_bio(came, goes, server_side=True)
        with with_tls(near_end, context, host="localhost") as near, far_end:
            assert step_of_handshake(near) == select.POLLIN
            came.write(far_end.recv(10_000))
            with pytest.raises(ssl.SSLWantReadError):
                far.do_handshake()
            flight = bytearray(goes.read())
            at = rng.randrange(len(flight))
            match rng.randrange(3):
                case 0:
                    flight[at] ^= 1 << rng.randrange(8)
                case 1:
                    del flight[at : at + rng.randrange(1, 40)]
                case _:
                    flight[at:at] = rng.randbytes(rng.randrange(1, 40))
            far_end.sendall(flight)
            try:
                while step_of_handshake(near) == select.POLLOUT:
                    pass
            except RemoteProtocolError as error:
                errors += bool(str(error))
            assert not near.established
    assert errors > 100


def test_authorities_when_the_file_is_none_are_refused_at_once(pair, tmp_path, monkeypatch):
    for path in (tmp_path / "nothing", tmp_path):
        monkeypatch.setenv("SSL_CERT_FILE", "")
        with pytest.raises(ConfigError, match="cannot use the authorities"):
            trust(authorities=path)
