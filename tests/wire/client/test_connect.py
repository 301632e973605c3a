"""Connecting: a server that does not listen yet is waited for, for some seconds, and where it is only starting."""

from __future__ import annotations

import contextlib
import socket
from types import SimpleNamespace

import pytest

from flowctl.errors import BrokenError
from flowctl.load.target import resolve
from flowctl.wire.client import connect
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import ClientRun, connect_socket, once_it_listens
from flowctl.wire.client.player import RtmpPlayer


@pytest.fixture
def starting(monkeypatch):
    """Return the address of a server that begins to listen once somebody says that it does not, and what is said."""
    said = []
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.bind(("127.0.0.1", 0))

        def begin(_text, **fields):
            said.append(fields["url"])
            sock.listen()

        monkeypatch.setattr(connect, "_log", SimpleNamespace(info=begin))
        yield f"rtmp://127.0.0.1:{sock.getsockname()[1]}/live/room", said


def test_client_when_its_server_is_only_starting_connects_and_says_once_that_it_waits(starting):
    address, said = starting
    url = parse_address(address)
    with ClientRun(lambda parameters, on_end: RtmpPlayer(url, parameters=parameters, on_end=on_end)) as run:
        run.start()
        assert run.client.sock is not None
    assert said == [address]


def test_load_when_its_server_is_only_starting_waits_too(starting):
    address, said = starting
    url, target = resolve(address, allow_remote=False)
    assert (target.address, said) == (("127.0.0.1", url.port), [address])


def test_connect_when_nobody_listens_in_time_gives_up(monkeypatch):
    monkeypatch.setattr(connect, "STARTING_S", 0.0)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = parse_address(f"rtmp://127.0.0.1:{sock.getsockname()[1]}/live/room")
        with pytest.raises(BrokenError, match="cannot connect to"):
            once_it_listens(lambda: connect_socket(url), url)
