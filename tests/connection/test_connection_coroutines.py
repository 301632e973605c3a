"""Handlers of a session that are coroutines: input waits for them, one at a time."""

from __future__ import annotations

import asyncio
import threading

import pytest
from connection_kit import WAIT_S, Noting, Reader, ask, wait_until

from flowctl.connection import Session
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import SendState
from flowctl.core.loop.sockets import SocketOptions
from flowctl.errors import ClosedError, LimitExceededError, RemoteProtocolError
from flowctl.reasons import CloseReason

SMALL = SocketOptions(send_buffer_bytes=4096)


class Slow(Session):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.taken, self.ends = [], []
        self.over = threading.Event()
        self.fault = None
        self.cancelled = False

    async def opened(self) -> None:
        await asyncio.sleep(0)
        self.taken.append(b"(opened)")

    async def received(self, data):
        self.taken.append(bytes(data))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.fault is not None:
            raise self.fault

    async def closed(self, reason, details) -> None:
        await asyncio.sleep(0)
        self.ends.append((reason, details))
        self.over.set()

    def wait_end(self):
        assert self.over.wait(WAIT_S)
        return self.ends[0]


def test_received_when_input_is_resumed_or_triggered_runs_one_coroutine_at_a_time(link):
    session = Slow()
    connection, peer = link(session)
    peer.sendall(b"first")
    wait_until(lambda: session.taken == [b"(opened)", b"first"])
    connection.pause_input("test", "test")
    connection.resume_input("test")
    connection.receiver.trigger_input()
    peer.sendall(b"second")
    for _ in range(20):
        ask(connection, lambda: None)
    assert session.taken == [b"(opened)", b"first"]
    ask(connection, session.gate.set)
    wait_until(lambda: session.taken == [b"(opened)", b"first", b"second"])
    assert not session.cancelled
    peer.close()
    assert session.wait_end() == (CloseReason.PEER_CLOSED, "")


@pytest.mark.parametrize(
    ("fault", "reason", "reported"),
    [
        (ValueError("oops"), CloseReason.INTERNAL, True),
        (FileNotFoundError(2, "no such file"), CloseReason.INTERNAL, True),
        (RemoteProtocolError("bad", code="x"), CloseReason.PROTOCOL_ERROR, False),
        (LimitExceededError("lines", 2, 1), CloseReason.LIMIT_HIT, False),
    ],
)
def test_received_when_its_coroutine_fails_closes_with_the_reason(link, failures, fault, reason, reported):
    """Our faults are INTERNAL and reported; the peer's are its own and are not."""
    session = Slow()
    connection, peer = link(session)
    session.fault = fault
    peer.sendall(b"x")
    wait_until(lambda: b"x" in session.taken)
    ask(connection, session.gate.set)
    assert session.wait_end()[0] is reason
    assert [error for _, error in failures] == ([fault] if reported else [])
    assert all("received of connection" in where for where, _ in failures)
    failures.clear()


def test_received_when_the_connection_ends_its_coroutine_is_cancelled(link):
    session = Slow()
    connection, peer = link(session)
    peer.sendall(b"x")
    wait_until(lambda: b"x" in session.taken)
    connection.close(CloseReason.KICKED, "enough")
    assert session.wait_end() == (CloseReason.KICKED, "enough")
    wait_until(lambda: session.cancelled)
    assert not session.gate.is_set()


# -- large answers


class Download(Noting):
    """Sends 6 MiB in parts once it is asked, and notes how each wait ended and how much waited."""

    part = bytes(48 * 1024)
    parts = 128

    def __init__(self) -> None:
        super().__init__()
        self.raised, self.waiting = [], []

    async def received(self, data) -> None:
        try:
            for _ in range(self.parts):
                self.send(self.part)
                self.waiting.append(self.connection.sender.load().size_bytes)
                await self.connection.drained()
        except BaseException as error:
            self.raised.append(error)
            raise
        self.close_after_flush("sent")


@pytest.mark.parametrize("deferred", [True, False])
def test_drained_when_a_large_answer_is_sent_in_parts_bounds_what_waits(link, deferred):
    session = Download()
    connection, peer = link(session, tcp=True, limits=Limits.parse("100000,0", "200000,0"), deferred=deferred)
    peer.sendall(b"x")
    reader = Reader(peer)
    assert len(reader.wait()) == len(session.part) * session.parts
    assert session.wait_end() == (CloseReason.FINISHED, "sent")
    assert max(session.waiting) < len(session.part) + 100
    assert {change.new for change in session.edges} <= {SendState.OVERLOADED, SendState.READY}
    assert connection.writable


def test_drained_when_the_connection_ends_raises_and_reports_nothing(link, failures):
    """A coroutine that waits for a peer who is thrown out gets a ClosedError, which is no fault of the session."""
    session = Download()
    connection, peer = link(session, tcp=True)
    peer.sendall(b"x")
    wait_until(lambda: connection.sender.blocked, "a peer that does not read")
    assert not connection.writable
    connection.close(CloseReason.KICKED, "enough")
    assert session.wait_end() == (CloseReason.KICKED, "enough")
    wait_until(lambda: session.raised)
    (error,) = session.raised
    assert isinstance(error, ClosedError)
    assert "kicked: enough" in str(error)
    assert failures == []


def test_drained_when_awaited_on_another_loop_ends_with_the_connection(link):
    connection, peer = link(Noting(), tcp=True)

    async def wait() -> None:
        connection.sender.send(bytes(8 << 20))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.drained(), 0.05)
        assert connection.sender._waiters is None, "who gave up is forgotten"
        asyncio.get_running_loop().call_later(0.01, connection.close, CloseReason.KICKED, "enough")
        with pytest.raises(ClosedError, match="kicked"):
            await asyncio.wait_for(connection.drained(), WAIT_S)
        with pytest.raises(ClosedError, match="kicked"):
            await asyncio.wait_for(connection.drained(), WAIT_S)

    asyncio.run(wait())
    peer.close()


def test_when_drained_calls_on_the_connections_thread_until_all_is_sent(link):
    class Pump(Noting):
        left, waiting = 60, 0

        def received(self, data) -> None:
            self.send_part()

        def send_part(self) -> None:
            self._note("part")
            self.left -= 1
            self.send(bytes(50_000))
            self.waiting = max(self.waiting, self.connection.sender.load().size_bytes)
            if self.left:
                self.connection.when_drained(self.send_part)
            else:
                self.connection.when_drained(self.close_after_flush, "sent")

    session = Pump()
    _, peer = link(session, tcp=True)
    peer.sendall(b"x")
    reader = Reader(peer)
    assert len(reader.wait()) == 60 * 50_000
    assert session.wait_end() == (CloseReason.FINISHED, "sent")
    assert session.waiting < 50_200
    assert len(session.threads) == 1


def test_rebalance_when_a_coroutine_runs_leaves_its_connection(link, groups):
    session = Slow()
    connection, peer = link(session)
    peer.sendall(b"first")
    wait_until(lambda: session.taken == [b"(opened)", b"first"])
    assert not connection.core.movable()
    assert groups[0].migrate(connection.core, groups[1])
    for _ in range(3):
        ask(connection, lambda: None)
    assert connection.group is groups[0]
    ask(connection, session.gate.set)
    wait_until(connection.core.movable)
    assert groups[0].migrate(connection.core, groups[1])
    wait_until(lambda: connection.group is groups[1])
    connection.close(CloseReason.KICKED, "bye")
    assert session.wait_end() == (CloseReason.KICKED, "bye")
