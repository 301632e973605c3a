"""A server asks for another one's place: what comes of it where it serves, where it does not, and where it is late."""

from __future__ import annotations

import socket
import tempfile
import threading
from pathlib import Path

import pytest

from flowctl.core.server import handover
from flowctl.core.server.handover import Heir, Successor
from flowctl.errors import FlowctlError

WAIT_S = 20


class Old:
    """A server with one socket, which lends two things, and notes what becomes of it all."""

    def __init__(self, listener, fails=None):
        self.notes, self.over, self.listener, self.fails = [], threading.Event(), listener, fails

    def hand_over(self, successor):
        self.heir = Heir(
            successor.path,
            [("rtmp", self.listener)],
            [self.lending("names"), self.lending("bans")],
            lambda: self.notes.append("gives way"),
            self.go_on,
        )

    def lending(self, what):
        def lend(path):
            if self.fails == f"lend {what}":
                raise FlowctlError(self.fails)
            self.notes.append(f"lends {what}")
            return take_back

        def take_back():
            self.notes.append(f"takes {what} back")
            if self.fails == f"take {what} back":
                raise FlowctlError(self.fails)

        return lend

    def go_on(self):
        self.notes.append("goes on")
        self.over.set()

    def went_on(self):
        assert self.over.wait(WAIT_S)
        return self.notes


@pytest.fixture
def successor():
    with tempfile.TemporaryDirectory(prefix="f-") as folder, Successor(Path(folder) / "successor.hand") as made:
        yield made


@pytest.fixture
def old():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Old(listener)
        yield made
        if hasattr(made, "heir"):
            made.heir.close()


LENT = ["lends names", "lends bans"]
BACK = ["takes bans back", "takes names back"]


def test_old_server_when_its_successor_serves_gives_way_and_keeps_nothing(successor, old):
    """The line stays until it has ended: the successor shares its streams as long."""
    old.hand_over(successor)
    (descriptor,) = successor.receive_sockets()["rtmp"]
    with socket.socket(fileno=descriptor) as sock:
        assert sock.getsockname() == old.listener.getsockname()
    assert old.heir.waited_for
    ended = threading.Thread(target=successor.wait_for_end)
    ended.start()
    successor.take_over()
    assert old.notes == [*LENT, "gives way"]
    assert not old.heir.waited_for
    assert ended.is_alive()
    old.heir.close()
    ended.join(WAIT_S)
    assert not ended.is_alive()
    assert old.notes == [*LENT, "gives way"]


@pytest.mark.parametrize("has_sockets", [True, False])
def test_old_server_when_its_successor_ends_before_it_serves_takes_all_back(successor, old, has_sockets):
    old.hand_over(successor)
    if has_sockets:
        successor.receive_sockets()
    successor.__exit__()
    assert old.went_on() == [*LENT, *BACK, "goes on"]
    assert not old.heir.waited_for


def test_old_server_when_something_cannot_be_taken_back_takes_the_rest(successor, old):
    old.fails = "take bans back"
    old.hand_over(successor)
    successor.receive_sockets()
    successor.__exit__()
    assert old.went_on() == [*LENT, *BACK, "goes on"]


def test_old_server_when_something_cannot_be_lent_is_no_worse_for_it(successor, old):
    old.fails = "lend bans"
    with pytest.raises(FlowctlError, match="lend bans"):
        old.hand_over(successor)
    assert old.notes == [LENT[0], BACK[1], "goes on"]
    successor.receive_sockets()
    successor.take_over()  # it is told nothing: for it the other one has ended, and it may serve


def test_successor_when_it_is_late_is_told_so_and_the_old_server_goes_on(successor, old, monkeypatch):
    monkeypatch.setattr(handover, "SERVE_WITHIN_S", 0.05)
    old.hand_over(successor)
    successor.receive_sockets()
    assert old.went_on() == [*LENT, *BACK, "goes on"]
    with pytest.raises(FlowctlError, match="the other one goes on"):
        successor.take_over()


def test_successor_when_the_old_server_ends_meanwhile_serves_all_the_same(successor, old):
    old.hand_over(successor)
    successor.receive_sockets()
    old.heir.close()
    successor.take_over()
    successor.wait_for_end()
    assert old.notes == LENT
