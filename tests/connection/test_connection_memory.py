"""What is over is free at once: no ended connection waits for the garbage collector."""

from __future__ import annotations

import gc
import socket
import threading
import weakref

import pytest
from connection_kit import WAIT_S, wait_until

from flowctl.connection import Connection, Session
from flowctl.core.fanout.following import Fanouts, FollowPlace
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.contract import SendOutcome
from flowctl.reasons import CloseReason
from flowctl.records.flight.recorded import RecordedSender
from flowctl.records.flight.tape import Identity, Tape
from flowctl.sender import Sender
from flowctl.testing import ManualHost, ScriptedTransport


class Watched(Connection):
    __slots__ = ("__weakref__",)


class WatchedSender(Sender):
    __slots__ = ("__weakref__",)


class Talking(Session):
    """Does a bit of everything that makes references."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def opened(self) -> None:
        self.connection.set_timer(self.connection.now() + 1000)

    def received(self, data) -> None:
        self.connection.pause_input(self, "busy")
        self.connection.resume_input(self)
        self.connection.call_soon(self.send, bytes(data))

    def closed(self, reason, details) -> None:
        self.over.set()


class Following(Talking):
    """Follows a log, and has left it to the connection to leave it."""

    def __init__(self, fanouts) -> None:
        super().__init__()
        self.fanouts = fanouts

    def opened(self) -> None:
        self.place = FollowPlace(self.connection, self.fanouts)


class Awaiting(Talking):
    """Is a coroutine throughout, and is cut off in the middle of it."""

    async def opened(self) -> None:
        self.send(b"x")

    async def received(self, data) -> None:
        self.send(bytes(3_000_000))
        await self.connection.drained()

    async def closed(self, reason, details) -> None:
        self.over.set()


@pytest.fixture
def no_collector():
    """Leave only reference counts, and nothing old to be found by accident."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", [Talking, Following, Awaiting])
@pytest.mark.parametrize("end", ["peer", "kicked", "finished"])
@pytest.mark.usefixtures("no_collector")
def test_connection_when_over_is_freed_without_the_collector(groups, failures, kind, end):
    log = StreamLog()
    ours, peer = socket.socketpair()
    session = Following(Fanouts(log)) if kind is Following else kind()
    connection = Watched(ours, session, make_sender=WatchedSender)
    over, refs = session.over, [weakref.ref(item) for item in (session, connection, connection.sender)]
    connection.live_on(groups[0])
    peer.settimeout(WAIT_S)
    peer.sendall(b"x")
    assert peer.recv(1) == b"x" or kind is Awaiting
    log.append(b"y", MessageClass.DATA, 0.0)
    if end == "kicked":
        connection.close(CloseReason.KICKED, "enough")
    elif end == "finished":
        session.send(b"bye")
        session.close()
    peer.close()
    del ours, session, connection
    assert over.wait(WAIT_S)
    wait_until(lambda: [ref() is None for ref in refs] == [True] * 3, "their memory")
    assert failures == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("recorded", [False, True])
def test_sender_when_over_and_let_go_is_freed_and_still_answers(recorded):
    host = ManualHost()
    make = RecordedSender if recorded else WatchedSender
    options = {"tape": Tape(lambda _row: True, Identity(conn_id=1, began_at_us=0))} if recorded else {}
    host.sender = sender = make(host, ScriptedTransport(), frontend=None, **options)
    sender.send(b"x")
    sender.set_limits(sender.limits)
    sender.close(CloseReason.KICKED, "enough")
    sender.let_go()
    host_gone, sender_gone = weakref.ref(host), weakref.ref(sender)
    host.group._calls.clear()  # what it has asked of its group
    del host
    assert host_gone() is None
    assert sender.send(b"x").outcome is SendOutcome.CLOSED
    assert sender.statistics().close_reason is CloseReason.KICKED
    assert "enough" in sender.why()
    for name in ("load", "account", "flush", "tick", "ledger", "sample_delay"):
        getattr(sender, name)()
    del sender
    assert sender_gone() is None


def test_sender_when_open_does_not_let_go():
    host = ManualHost()
    host.sender = sender = Sender(host, ScriptedTransport())
    sender.let_go()
    assert sender.host is host
