"""The lines of the demonstration: what passes as it is, slowly, or changed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from flowctl.demo.line import ProxyLine

BODY = bytes(range(256)) * 400


@contextlib.contextmanager
def serving(body):
    """Give the port of a server that sends `body` to whoever comes."""

    def serve():
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.sendall(body)
                sock.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
    thread.join(20)


def fetch(port, size):
    with socket.create_connection(("127.0.0.1", port), 20) as sock:
        found = b""
        while len(found) < size and (data := sock.recv(65536)):
            found += data
        return found


@pytest.mark.parametrize("settings", [{}, {"rate": 1e9}])
def test_line_when_honest_carries_all_as_it_is(settings):
    with serving(BODY) as port, ProxyLine(port, **settings) as line:
        assert fetch(line.port, len(BODY)) == BODY
        deadline = time.monotonic() + 20
        while not line.hung_up and time.monotonic() < deadline:
            threading.Event().wait(0.005)
        assert (line.carried_bytes, line.lies_told, line.hung_up) == (len(BODY), 0, 1)


def test_line_when_it_lies_changes_octets_of_large_pieces_only():
    with serving(BODY) as port, ProxyLine(port, lies=True) as line:
        found = fetch(line.port, len(BODY))
        assert len(found) == len(BODY)
        changed = sum(one != two for one, two in zip(found, BODY, strict=True))
        assert 1 <= changed == line.lies_told
    with serving(b"short") as port, ProxyLine(port, lies=True) as line:
        assert fetch(line.port, 5) == b"short"


def test_line_when_slow_takes_its_time():
    with serving(BODY) as port, ProxyLine(port, rate=len(BODY) * 10) as line:
        begun = time.monotonic()
        assert fetch(line.port, len(BODY)) == BODY
        assert time.monotonic() - begun >= 0.08
