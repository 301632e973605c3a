"""Turns of a listener: how many it accepts, behind what, and what it does without descriptors; nothing is real here."""

from __future__ import annotations

import errno
from collections import deque
from types import SimpleNamespace

import pytest
import structlog

from flowctl.core.server import listener as rules
from flowctl.core.server.listener import ACCEPTS_PER_TURN, LATE_S, LEAST_PER_TURN, PAUSE_S, RESETS_PER_TURN, Listener
from flowctl.testing import ManualClock

PEER = ("192.0.2.1", 1000)


class Arrived:
    """A connection that waits to be accepted."""

    def __init__(self, *, reset=False):
        self.reset, self.closed = reset, False

    def recv(self, *_):
        raise ConnectionResetError if self.reset else BlockingIOError

    def close(self):
        self.closed = True


class Queue(deque):
    """A listening socket: what waits there, and the fault that accepting meets."""

    fault = None

    def getsockname(self):
        return ("127.0.0.1", 1935)

    def fileno(self):
        return 7

    def accept(self):
        if self.fault is not None:
            raise self.fault
        if not self:
            raise BlockingIOError
        return self.popleft(), PEER


class Turns:
    """A listener with its group, the turns of which are run by hand, and its server, which lets in all."""

    def __init__(self):
        self.queue, self.clock, self.calls, self.jobs = Queue(), ManualClock(), deque(), 0
        self.came, self.faults, self.later, self.trusted = [], [], [], ()
        self.processor = SimpleNamespace(statistics=lambda: SimpleNamespace(pending=self.jobs))
        self.listener = Listener(self.queue, self, session_factory=None)
        self.listener.attached(self)

    def watch_input(self, _source, ready):
        self.ready = ready

    def unwatch_input(self, _source):
        self.ready = lambda: None

    def call_soon(self, call, *args):
        self.calls.append(lambda: call(*args))

    def call_later(self, delay_s, call, *args):
        assert delay_s == PAUSE_S
        self.later.append(lambda: call(*args))

    def report(self, *fault):
        self.faults.append(fault)

    def admit(self, _group, _listener, sock, _peer):
        self.came.append(sock)

    def refuse(self, *_):
        raise AssertionError

    def fill(self, count, *, reset=False):
        self.queue.extend(Arrived(reset=reset) for _ in range(count))

    def turn(self, took_s=0.0):
        """Let the loop have a turn in which the socket is ready; return how many were let in."""
        before = len(self.came)
        self.ready()
        for _ in range(len(self.calls)):
            self.calls.popleft()()
        self.clock.advance(took_s)
        return len(self.came) - before


@pytest.fixture
def turns():
    return Turns()


def test_turns_when_they_come_late_accept_half_as_many_down_to_the_least_and_grow_again(turns):
    turns.fill(2000)
    assert [turns.turn(2 * LATE_S) for _ in range(7)] == [ACCEPTS_PER_TURN, 32, 16, 8, LEAST_PER_TURN, 4, 4]
    turns.turn()
    assert [turns.turn() for _ in range(5)] == [8, 16, 32, ACCEPTS_PER_TURN, ACCEPTS_PER_TURN]


def test_turn_after_one_that_took_all_is_not_late(turns):
    """No connection came for a while: that says nothing of what others need."""
    turns.fill(3)
    turns.turn(60.0)
    turns.fill(100)
    assert turns.turn() == ACCEPTS_PER_TURN


def test_turn_waits_behind_ends_but_not_for_ever(turns):
    turns.fill(10)
    turns.jobs = 1
    assert [turns.turn() for _ in range(3)] == [0, 0, 0]
    turns.jobs = 0
    assert turns.turn() == 10
    turns.fill(10)
    turns.jobs = 1
    assert sum(turns.turn() for _ in range(20)) == 10


def test_connections_that_were_reset_before_they_are_accepted_reach_no_server(turns):
    """They are closed, a bounded number a turn, and take no place of who comes behind them."""
    turns.fill(2 * RESETS_PER_TURN, reset=True)
    turns.fill(20)
    gone = list(turns.queue)[: 2 * RESETS_PER_TURN]
    assert [turns.turn() for _ in range(3)] == [0, 0, 20]
    assert all(sock.closed for sock in gone)
    assert not any(sock.closed for sock in turns.came)
    assert turns.listener.resets == 2 * RESETS_PER_TURN


def test_listener_without_descriptors_says_so_in_one_line_and_that_it_is_over(turns):
    """At the limit each one that leaves lets one in: the line comes once a minute, however often it rests."""
    with structlog.testing.capture_logs() as logs:
        turns.fill(30)
        turns.queue.fault = OSError(errno.EMFILE, "Too many open files")
        for _ in range(30):
            turns.turn(PAUSE_S)
            turns.later.pop()()
        turns.queue.fault = None
        assert turns.turn() == 30
        turns.queue.fault = OSError(errno.EMFILE, "Too many open files")
        turns.turn(rules._TELL_EVERY_S)
        turns.later.pop()()
        turns.turn()
    assert [(line["log_level"], line["event"]) for line in logs] == [
        ("error", "no descriptor is left: connections wait"),
        ("info", "connections are accepted again"),
        ("error", "no descriptor is left: connections wait"),
    ]
    assert "LimitNOFILE" in logs[0]["hint"]
    assert logs[1]["after_s"] == pytest.approx(30 * PAUSE_S)
    assert turns.faults == []
    assert turns.listener.pauses == 2
