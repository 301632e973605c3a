"""Connections to the admin surface that send no request, or too many of them: closed, and others are served."""

from __future__ import annotations

import contextlib
import socket

import httpx
import pytest
from e2e_kit import open_live_server, wait_until

from flowctl.admin import protocol
from flowctl.admin.listener import admin_of


@pytest.fixture
def admin():
    """Return a function that starts a server with an admin surface, which tells its address."""
    with contextlib.ExitStack() as stack:

        def start():
            server = stack.enter_context(open_live_server(admin="127.0.0.1:0"))
            listener = admin_of(server)
            stack.callback(listener.stop, 5.0)
            listener.start()
            port = int(listener.bound[0].rpartition(":")[2].strip("/"))
            return listener.bound[0], ("127.0.0.1", port)

        yield start


def closed(sock):
    """Return whether the other end has closed a connection."""
    try:
        return sock.recv(1000) == b""
    except ConnectionError:
        return True


def test_head_when_it_never_comes_whole_is_given_up(admin, monkeypatch):
    """One that sends nothing, and one that sends a line of its head and no more, are closed in time."""
    monkeypatch.setattr(protocol, "HEAD_S", 0.05)
    base, address = admin()
    with contextlib.ExitStack() as stack:
        silent, slow = (stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(2))
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        assert closed(silent)
        assert closed(slow)
    assert httpx.get(f"{base}healthz").status_code == 200


def test_connections_when_there_are_too_many_are_closed_at_once(admin, monkeypatch):
    """One more than there may be is closed; when one has left there is room again."""
    monkeypatch.setattr(protocol, "MOST_CONNECTIONS", 3)
    base, address = admin()
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(3)]
        for sock in held:  # each is known to the server when it has been answered
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        assert closed(stack.enter_context(socket.create_connection(address, timeout=20)))
        held[0].close()

        def served():
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{base}healthz").status_code == 200

        wait_until(served, "room for another")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: example.com\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        b"POST /api/v1/kick HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1e3\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /%2e%2e/%2e%2e/listener.py HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
)
def test_head_when_it_is_malformed_or_leaves_the_folder_is_refused(admin, head):
    """Wrong heads and paths that lead elsewhere are answered with a status of 400 or more, or cut."""
    base, address = admin()
    with socket.create_connection(address, timeout=20) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(head)
        try:
            said = sock.recv(1000)
        except ConnectionError:
            said = b""
    assert said == b"" or int(said.split()[1]) >= 400
    assert httpx.get(f"{base}healthz").status_code == 200


def test_connections_of_one_address_leave_room_for_others(admin, monkeypatch):
    """Who holds as many as one address may have, and asks for nothing that takes a token, keeps nobody else out."""
    monkeypatch.setattr(protocol, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(protocol, "MOST_PER_ADDRESS", 2)
    base, address = admin()
    with contextlib.ExitStack() as stack:

        def connected():
            return stack.enter_context(socket.create_connection(address, 20, source_address=("127.0.9.1", 0)))

        for sock in (connected(), connected()):
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        assert closed(connected())
        assert httpx.get(f"{base}healthz").status_code == 200
