"""HTTP with TLS: the listener of `https` answers as that of `http` does."""

from __future__ import annotations

import socket

import httpx
import pytest
from certificate_kit import Pair
from loopback_kit import loopback

from flowctl.core.server.admission import AdmissionLimits
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.live.httpd.serving import serve_http
from flowctl.live.server import LiveServer

WAIT_S = 20
ASK = b"HEAD /live/nothing.txt HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def test_https_when_asked_answers_as_http_does(tmp_path):
    pair = Pair(tmp_path)
    secured = {"https": loopback(), "tls_certificate": pair.certificate, "tls_key": pair.key}
    server = LiveServer(LiveConfig(http=loopback(), **secured))
    plain, secure = serve_http(server)
    with server:
        with socket.create_connection(plain, WAIT_S) as sock:
            sock.sendall(ASK)
            expected = sock.recv(12)
        with pair.client().wrap_socket(socket.create_connection(secure, WAIT_S), server_hostname="localhost") as sock:
            sock.sendall(ASK)
            assert sock.recv(12) == expected
    assert expected == b"HTTP/1.1 404"


def test_client_when_its_address_has_too_many_connections_is_told_so_over_tls(tmp_path):
    pair = Pair(tmp_path)
    secured = {"https": loopback(), "tls_certificate": pair.certificate, "tls_key": pair.key}
    limits = AdmissionLimits(connections_per_address=1, new_per_address_and_s=0.0)
    server = LiveServer(LiveConfig(port=0, admission=limits, **secured))
    (address,) = serve_http(server)
    url = f"https://{loopback(address[1])}/a.txt"
    with server, httpx.Client(verify=pair.client(), timeout=WAIT_S) as first:
        assert first.get(url).status_code == 404
        refused = httpx.get(url, verify=pair.client(), timeout=WAIT_S)
    assert (refused.status_code, refused.text) == (429, "Too many connections. Try again later.\n")


def test_https_when_there_is_no_certificate_is_refused_with_what_is_missing():
    with pytest.raises(ConfigError, match="https: TLS needs a certificate") as caught:
        LiveServer(LiveConfig(https=loopback()))
    assert caught.value.hint == "name its files: tls_certificate and tls_key"
