"""The echo server over real sockets: lines reach everybody, long lines and slow readers are cut, it stops cleanly."""

from __future__ import annotations

import socket
import threading

import pytest

from flowctl.core.flow.limits import Limits
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.server.program import ServeOptions
from flowctl.reasons import CloseReason
from flowctl_servers.echo import LINE_BYTES, SERVER

WAIT_S = 20


@pytest.fixture
def make_server(loop_factory):
    servers, errors = [], []

    def make(**options):
        server = SERVER.build(
            ServeOptions(loop_factory=loop_factory, on_error=lambda *error: errors.append(error), **options)
        )
        servers.append(server)
        return server

    yield make
    for server in servers:
        assert server.stop()
    assert errors == []


class Client:
    def __init__(self, server) -> None:
        self.socket = socket.create_connection(server.address, WAIT_S)
        self.lines = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        self.lines.close()
        self.socket.close()

    def say(self, line: bytes) -> None:
        self.socket.sendall(line)

    def hear(self, line: bytes) -> None:
        for heard in self.lines:
            if heard == line:
                return
        pytest.fail(f"the server closed the connection before {line!r} came")


def meet(*clients: Client) -> None:
    """Have everybody let in: who hears itself is in the room."""
    for number, client in enumerate(clients):
        client.say(b"here is %d\n" % number)
        client.hear(b"here is %d\n" % number)


def test_line_when_sent_reaches_everybody_in_the_room(make_server):
    with (server := make_server()), Client(server) as ann, Client(server) as bob:
        meet(ann, bob)
        ann.say(b"hel")
        ann.say(b"lo\n")
        ann.hear(b"hello\n")
        bob.hear(b"hello\n")


def test_reader_when_it_stops_is_cut_and_nobody_else_notices(make_server):
    limits = Limits.parse("64KiB,1000,150ms", "128KiB,2000,300ms")
    options = SocketOptions(send_buffer_bytes=16 * 1024, notsent_lowat_bytes=16 * 1024)
    line = b"x" * (LINE_BYTES - 1) + b"\n"
    with (
        (server := make_server(limits=limits, socket_options=options)),
        Client(server) as speaker,
        Client(server) as sleeper,
    ):
        meet(speaker, sleeper)
        for _ in range(100_000):
            speaker.say(line)
            assert speaker.lines.readline() in {line, b"here is 1\n"}
            if server.closed_by_reason:
                break
        assert server.closed_by_reason == {CloseReason.HARD_LIMIT: 1}
        speaker.say(b"still here\n")
        speaker.hear(b"still here\n")


def wait_until(happened) -> None:
    waiting = threading.Event()
    for _ in range(WAIT_S * 100):
        if happened():
            return
        waiting.wait(0.01)
    pytest.fail("it did not happen")
