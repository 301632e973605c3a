"""Connections whose peers cause more work than their share: slowed, let go on, cut; and turns, with time by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flowctl.connection import Connection, Session
from flowctl.core.loop.work import ADDRESS_TURN_S, NO_WORK_LIMITS, PER_ADDRESS, PER_CONNECTION, TURN_S, WorkLimits
from flowctl.errors import RemoteProtocolError
from flowctl.reasons import CloseReason
from flowctl.receiver import InputResult, InputVerdict
from flowctl.testing import ManualClock
from flowctl.testing.driving import HandGroup, MemoryWire

LIMITS = WorkLimits()


class Costly(Session):
    """Takes `cost_s` of the thread for each piece of input, and notes all."""

    def __init__(self, clock, cost_s=0.0) -> None:
        self.clock, self.cost_s = clock, cost_s
        self.pieces, self.told, self.ends = [], [], []
        self.error = None

    def received(self, data):
        self.clock.advance(self.cost_s)
        self.pieces.append((self.clock(), bytes(data)))
        if self.error is not None:
            raise self.error

    def timer(self, now):
        self.clock.advance(self.cost_s)

    def work_exceeded(self, error, *, ends):
        self.told.append((error.limit, ends))

    def closed(self, reason, details):
        self.ends.append((reason, details))


class Thread:
    """A group turned by hand, and connections on it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.group = HandGroup(self.clock)

    def connect(self, cost_s=0.0, address="192.0.2.1", limits=LIMITS, session=None):
        session = session or Costly(self.clock, cost_s)
        wire = MemoryWire((address, 1000))
        connection = Connection(wire, session, clock=self.clock, work_limits=limits)
        self.group.add_pollable(connection.core, connection.core.host.registration)
        return connection, session, wire

    def feed(self, wires, seconds, data=b"x", gap_s=0.01):
        """Let input come all the time for some seconds."""
        end = self.clock() + seconds
        while self.clock() < end:
            for wire in wires:
                if not wire.up:
                    wire.up += data
            self.group.turn()
            self.group.run(gap_s)


@pytest.fixture
def thread():
    made = Thread()
    yield made
    assert made.group.failures == []


def test_connection_when_its_input_is_much_work_is_slowed_and_others_go_on(thread):
    busy, session, wire = thread.connect(0.02)
    _, neighbour, other = thread.connect(0.0001, "192.0.2.2")
    thread.feed([wire, other], 8.0)
    assert session.told == [(PER_CONNECTION, False)]
    assert busy.ended is None
    assert busy.receiver.statistics().pauses.keys() == {"work"}
    assert busy.work.work_s <= 0.25 * 8.0 + 1.5 + 0.03
    late = [at for at, _ in neighbour.pieces]
    assert max(after - before for before, after in pairwise(late)) < 0.05
    assert neighbour.told == []
    assert busy.work.work_s == pytest.approx(sum(0.02 for _ in session.pieces))
    thread.group.run(6.0)
    thread.group.turn()
    assert not busy.receiver.paused
    assert bytes(wire.up) == b""


def test_connection_when_it_stays_over_its_share_is_cut_with_limit_value_and_measure(thread):
    busy, session, wire = thread.connect(0.02)
    thread.feed([wire], 18.0)
    ((reason, details),) = session.ends
    assert reason is CloseReason.LIMIT_HIT
    assert PER_CONNECTION in details
    assert "allowed is 0.25" in details
    assert f"{busy.work.work_s:.3g} s of work" in details
    assert session.told == [(PER_CONNECTION, False), (PER_CONNECTION, True)]
    assert busy.ended == (reason, details)


def test_connection_when_nobody_limits_work_is_measured_only(thread):
    busy, session, wire = thread.connect(0.02, limits=NO_WORK_LIMITS)
    thread.feed([wire], 5.0)
    assert session.told == []
    assert not busy.receiver.statistics().pauses
    assert busy.work.work_s > 2.0


def test_connections_when_of_one_64_share_its_budget(thread):
    made = [thread.connect(0.01, f"2001:db8::{number}") for number in range(1, 11)]
    thread.feed([wire for _, _, wire in made], 8.0, gap_s=0.001)
    assert sum(connection.work.work_s for connection, _, _ in made) <= 0.5 * 8.0 + 3.0 + 0.1
    assert {limit for _, session, _ in made for limit, _ in session.told} == {PER_ADDRESS}


def test_timer_when_it_is_much_work_is_charged_as_well(thread):
    connection, session, _ = thread.connect(0.5)
    for _ in range(4):
        connection.set_timer(thread.clock())
        thread.group.run(0.01)
    assert connection.work.work_s == pytest.approx(2.0)
    assert session.told


def test_input_when_its_handler_raises_is_charged_all_the_same(thread):
    connection, session, wire = thread.connect(0.3)
    session.error = RemoteProtocolError("nonsense")
    wire.up += b"x"
    thread.group.turn()
    assert connection.work.work_s == pytest.approx(0.3)
    thread.group.turn()
    assert session.ends[0][0] is CloseReason.PROTOCOL_ERROR


class Sliced(Session):
    """Takes one octet at a time, 1 ms each, and gives the thread back when its turn is over."""

    def __init__(self, clock) -> None:
        self.clock, self.got, self.turns = clock, bytearray(), []

    def received(self, data):
        taken = 0
        while taken < len(data) and not self.connection.turn_over():
            self.got += data[taken : taken + 1]
            self.clock.advance(0.001)
            taken += 1
        self.turns.append(taken)
        if taken < len(data):
            self.connection.receiver.trigger_input()
            return InputResult(InputVerdict.BLOCK, taken)
        return None


def test_session_when_its_turn_is_over_gives_the_thread_back_and_goes_on_in_order(thread):
    _, session, wire = thread.connect(session=Sliced(thread.clock), limits=NO_WORK_LIMITS)
    _, neighbour, other = thread.connect(0.0, "192.0.2.2")
    data = bytes(range(64))
    wire.up += data
    for _ in range(40):
        other.up += b"y"
        thread.group.turn()
        thread.group.run()
    assert bytes(session.got) == data
    assert max(session.turns) <= TURN_S / 0.001 + 1
    assert len(neighbour.pieces) == 40


def test_session_when_one_piece_takes_too_long_gets_no_other_in_the_same_turn(thread):
    connection, session, wire = thread.connect(TURN_S, limits=NO_WORK_LIMITS)
    wire.up += bytes(200_000)  # several reads
    thread.group.turn()
    assert len(session.pieces) <= 2  # one from the descriptor, one from the job in the round behind it
    for _ in range(12):
        thread.group.turn()
        thread.group.run()
    assert sum(len(data) for _, data in session.pieces) == 200_000
    assert connection.ended is None


def test_connections_when_of_one_address_share_one_turn_of_the_loop(thread):
    made = [thread.connect(0.002, limits=NO_WORK_LIMITS) for _ in range(50)]
    for _, _, wire in made:
        wire.up += b"x"
    longest_s, served = 0.0, 0
    for _ in range(60):
        began = thread.clock()
        thread.group.turn()
        longest_s = max(longest_s, thread.clock() - began)
    served = sum(len(session.pieces) for _, session, _ in made)
    assert served == 50
    assert longest_s <= 2 * (ADDRESS_TURN_S + 0.002) + 1e-9  # descriptors, and the round of jobs behind them
