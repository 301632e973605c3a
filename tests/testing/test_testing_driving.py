"""The kit that drives a session: what it says is what a server would do, without socket, thread and sleep."""

from __future__ import annotations

import asyncio

import pytest

from flowctl import CloseReason, Limits, MessageClass, SendState, Session
from flowctl.errors import RemoteProtocolError
from flowctl.testing import drive


class Lines(Session):
    """Answers each line, says hello, and goodbye after a second of silence."""

    def opened(self):
        self.ended = None
        self.send(b"hello\n")
        self.connection.set_timer(self.connection.now() + 1.0)

    def received(self, data):
        lines, _, rest = bytes(data).rpartition(b"\n")
        for line in lines.split(b"\n") if lines else ():
            if line == b"bad":
                raise RemoteProtocolError("no", code="bad-line")
            self.send(line.upper() + b"\n")
        self.connection.set_timer(self.connection.now() + 1.0)
        return len(data) - len(rest)

    def timer(self, now):
        self.send(b"goodbye\n")
        self.close_after_flush("silence")

    def closed(self, reason, details):
        self.ended = reason, details


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_driven_session_reads_and_answers_in_any_pieces(piece):
    driven = drive(Lines())
    assert driven.sent() == b"hello\n"
    assert driven.receive(b"a\nbc\nd", piece_bytes=piece) == b"A\nBC\n"
    assert driven.receive(b"e\n") == b"DE\n"
    assert (driven.closed, driven.failures) == (None, [])


def test_driven_session_has_timers_on_the_clock_of_the_test():
    session = Lines()
    driven = drive(session)
    assert driven.run(0.5) == b"hello\n"
    assert driven.run(0.6) == b"goodbye\n"
    driven.run(60.0)
    assert driven.closed == session.ended == (CloseReason.FINISHED, "silence")


def test_driven_session_ends_as_the_peer_ends_it():
    for end, reason in (
        (lambda driven: driven.receive(b"bad\n"), CloseReason.PROTOCOL_ERROR),
        (lambda driven: driven.end_input(), CloseReason.PEER_CLOSED),
        (lambda driven: driven.break_off(), CloseReason.PEER_RESET),
    ):
        session = Lines()
        driven = drive(session)
        end(driven)
        assert driven.closed[0] is session.ended[0] is reason
        assert driven.failures == []


def test_driven_peer_that_stops_reading_brings_the_limits():
    driven = drive(Lines(), limits=Limits.parse("1KiB,1000"))
    driven.take(0)
    for _ in range(2):
        driven.session.send(b"x" * 600, MessageClass.DATA)
        driven.run()
    assert driven.connection.sender.state > SendState.OVERLOADED
    assert len(driven.take(700)) == 700
    assert len(driven.take(None)) == 500
    assert driven.connection.sender.state is SendState.READY


class Asking(Session):
    """Coroutine handlers that wait."""

    async def opened(self):
        await asyncio.sleep(2.0)
        self.send(b"ready\n")

    async def received(self, data):
        await asyncio.sleep(0)
        if bytes(data) == b"fail":
            raise ValueError("a mistake")
        self.send(bytes(data)[::-1])


def test_driven_coroutines_wait_on_the_clock_of_the_test():
    driven = drive(Asking())
    assert driven.receive(b"abc") == b""
    assert driven.run(1.9) == b""
    assert driven.run(0.2) == b"ready\ncba"


def test_driven_handler_that_raises_is_told():
    driven = drive(Asking())
    driven.run(2.1)
    driven.receive(b"fail")
    assert driven.closed[0] is CloseReason.INTERNAL
    assert [type(error) for _, error in driven.failures] == [ValueError]


def test_session_that_never_rests_is_found_out():
    class Restless(Session):
        def opened(self):
            self.again()

        def again(self):
            self.connection.call_soon(self.again)

    with pytest.raises(AssertionError, match="turns without an end"):
        drive(Restless())


def test_timer_when_it_asks_for_a_time_that_has_passed_keeps_no_thread_busy():
    class Late(Session):
        count = 0

        def timer(self, now: float) -> None:
            self.count += 1
            self.connection.set_timer(now - 1.0)

    session = Late()
    driven = drive(session)
    session.connection.set_timer(driven.clock() - 1.0)
    driven.run(1.0)
    assert 90 <= session.count <= 110
