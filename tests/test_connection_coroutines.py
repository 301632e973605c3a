"""Handlers of a session that are coroutines: input waits for them, one at a time."""

from __future__ import annotations

import asyncio
import threading

import pytest
from connection_kit import WAIT_S, failures, groups, link, wait_until

from flowctl.errors import LimitExceededError, RemoteProtocolError
from flowctl.reasons import CloseReason
from flowctl.session import Session
from flowctl.sockets import SocketOptions

__all__ = ["failures", "groups", "link"]  # fixtures

SMALL = SocketOptions(send_buffer_bytes=4096)


def ask(connection, function, *args):
    """Call `function` on the connection's thread and return its answer."""
    done, answers = threading.Event(), []
    assert connection.call_soon(lambda: (answers.append(function(*args)), done.set()))
    assert done.wait(WAIT_S)
    return answers[0]


class Slow(Session):
    """Takes input in a coroutine that waits to be let on."""

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


def test_received_when_a_coroutine_runs_input_waits_for_it(link):
    """Nothing is read meanwhile, so a slow handler slows its peer down; then everything comes, in order."""
    session = Slow()
    connection, peer = link(session)
    peer.sendall(b"first")
    wait_until(lambda: session.taken == [b"(opened)", b"first"])
    peer.sendall(b"second")
    for _ in range(20):
        ask(connection, lambda: None)
    assert session.taken == [b"(opened)", b"first"]
    assert connection.receiver.statistics().blocked
    ask(connection, session.gate.set)
    wait_until(lambda: session.taken == [b"(opened)", b"first", b"second"])
    peer.close()
    assert session.wait_end() == (CloseReason.PEER_CLOSED, "")


def test_received_when_input_is_resumed_or_triggered_runs_one_coroutine_at_a_time(link):
    """Whoever asks for input while a coroutine takes some, the next one begins only when it has ended."""
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
    """After `closed` nothing of the session runs any more."""
    session = Slow()
    connection, peer = link(session)
    peer.sendall(b"x")
    wait_until(lambda: b"x" in session.taken)
    connection.close(CloseReason.KICKED, "enough")
    assert session.wait_end() == (CloseReason.KICKED, "enough")
    wait_until(lambda: session.cancelled)
    assert not session.gate.is_set()
