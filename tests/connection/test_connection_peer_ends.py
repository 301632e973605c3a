"""How a socket ends: what was sent last arrives, and a peer that has left is noticed although nothing of it is read."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time

import pytest
from connection_kit import WAIT_S, Noting, Reader, wait_until

from flowctl import Limits
from flowctl.core.connecting import core as core_module
from flowctl.core.connecting import host as host_module
from flowctl.core.flow.state import MessageClass
from flowctl.core.loop import lingering as _lingering
from flowctl.core.loop.lingering import LINGER_BYTES
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.loop.work import Overrun
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.server import Server
from flowctl.errors import ClosedError, LimitExceededError, RemoteProtocolError
from flowctl.reasons import CloseReason
from flowctl.receiver import InputResult, InputVerdict


def reset(peer) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


class Talker(threading.Thread):
    """Sends until it cannot any more or is told to stop."""

    def __init__(self, sock) -> None:
        super().__init__(daemon=True)
        self.sock, self.sent_bytes, self.stopping, self.error = sock, 0, threading.Event(), None
        self.start()

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.sent_bytes += self.sock.send(b"x" * 1000)
                self.stopping.wait(0.001)
        except OSError as error:
            self.error = error

    def stop(self) -> None:
        self.stopping.set()
        self.join(WAIT_S)


# -- our end: lingering


def test_close_after_flush_when_the_peer_goes_on_sending_delivers_everything(link):
    session, released = Noting(), threading.Event()
    connection, peer = link(
        session,
        tcp=True,
        options=SocketOptions(send_buffer_bytes=1024 * 1024, notsent_lowat_bytes=0),
        on_released=lambda _: released.set(),
    )
    wait_until(lambda: session.calls)
    data = bytes(range(250)) * 1600
    connection.sender.send(data)
    connection.close_after_flush("done")
    assert session.wait_end() == (CloseReason.FINISHED, "done")
    talker, got = Talker(peer), bytearray()
    while chunk := peer.recv(4000):
        got += chunk
        if len(got) < 100_000:
            talker.stopping.wait(0.005)
    assert bytes(got) == data
    assert not released.is_set()
    assert not talker.stopping.is_set()
    talker.stop()
    assert talker.error is None
    peer.close()
    assert released.wait(WAIT_S)
    assert connection.core.host.sock.fileno() == -1
    assert session.calls.count("closed") == 1


@pytest.mark.parametrize("reason", [reason for reason in CloseReason if not reason.abortive])
def test_close_when_the_peer_is_about_to_send_lets_it_read_why(link, reason):
    session = Noting()
    connection, peer = link(session, tcp=True)
    wait_until(lambda: session.calls)
    connection.sender.send(b"refused: wrong password", MessageClass.CONTROL)
    wait_until(lambda: not connection.sender.statistics().load.messages)
    connection.close(reason, "")
    session.wait_end()
    for _ in range(20):
        peer.sendall(b"one more command")
    assert Reader(peer).wait() == b"refused: wrong password"
    wait_until(lambda: connection.core.host.sock.fileno() == -1)


def test_close_when_input_was_wrong_and_more_of_it_comes_delivers_the_answer(link):
    class Strict(Noting):
        def received(self, data):
            self.send(b"error: no", MessageClass.CONTROL)
            raise RemoteProtocolError("no", code="bad")

    session = Strict()
    _, peer = link(session, tcp=True)
    for _ in range(50):
        peer.sendall(b"x" * 10_000)
    reader = Reader(peer)
    assert reader.wait() == b"error: no"
    assert reader.error is None
    assert session.wait_end() == (CloseReason.PROTOCOL_ERROR, "bad: no")


def test_linger_when_the_peer_sends_without_end_costs_a_bounded_amount(link, groups, monkeypatch):
    monkeypatch.setattr(_lingering, "LINGER_QUIET_S", 0.2)
    session, released = Noting(), threading.Event()
    connection, peer = link(session, tcp=True, on_released=lambda _: released.set())
    wait_until(lambda: session.calls)
    connection.close(CloseReason.KICKED, "")
    session.wait_end()
    peer.settimeout(1)
    sent = 0
    try:
        while not released.is_set():
            sent += peer.send(b"x" * 100_000)
    except OSError:
        pass
    assert released.wait(WAIT_S)
    assert sent > LINGER_BYTES
    assert groups[0].statistics().watched == 0
    assert groups[0].statistics().deadlines == 0


def test_linger_when_nothing_moves_closes_and_resets_who_does_not_read(link, monkeypatch):
    """A peer that neither reads nor ends does not keep the kernel's memory."""
    monkeypatch.setattr(_lingering, "LINGER_QUIET_S", 0.1)
    session = Noting()
    connection, peer = link(session, tcp=True, options=SocketOptions(send_buffer_bytes=1024 * 1024))
    wait_until(lambda: session.calls)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    while not connection.sender.blocked:
        connection.sender.send(b"x" * 50_000)
    connection.close(CloseReason.KICKED, "")
    wait_until(lambda: connection.core.host.sock.fileno() == -1)
    reader = Reader(peer)
    reader.wait()
    assert isinstance(reader.error, ConnectionResetError)


def test_close_after_flush_when_the_peer_is_silent_for_a_while_gives_it_until_the_deadline(link, groups, monkeypatch):
    """What the kernel has taken is not reset before the deadline of the farewell: who is told FINISHED gets it all."""
    monkeypatch.setattr(_lingering, "LINGER_QUIET_S", 0.02)
    session = Noting()
    connection, peer = link(
        session, tcp=True, options=SocketOptions(send_buffer_bytes=1024 * 1024, notsent_lowat_bytes=0)
    )
    wait_until(lambda: session.calls)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    data = bytes(range(250)) * 240
    connection.sender.send(data)
    connection.close_after_flush("done")
    assert session.wait_end() == (CloseReason.FINISHED, "done")
    for _ in range(10):  # as many looks at a peer of which nothing moves
        groups[0].call_soon((looked := threading.Event()).set)
        assert looked.wait(WAIT_S)
        threading.Event().wait(0.03)
    assert not connection.core.delivered
    assert Reader(peer).wait() == data


def test_close_after_flush_when_the_peer_reads_in_steps_delivers_everything_after_the_deadline_too(link, monkeypatch):
    """A slow reader's window opens by half its receive buffer at a time: between two steps nothing moves."""
    monkeypatch.setattr(_lingering, "LINGER_QUIET_S", 0.02)
    session = Noting()
    connection, peer = link(
        session,
        tcp=True,
        options=SocketOptions(send_buffer_bytes=1024 * 1024, notsent_lowat_bytes=0),
        settings=SenderSettings(close_deadline_s=1.0),
    )
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    peer.settimeout(WAIT_S)
    data, got = bytes(range(250)) * 400, b""
    connection.sender.send(data)
    connection.close_after_flush("done")
    assert session.wait_end() == (CloseReason.FINISHED, "done")
    while chunk := peer.recv(8192):
        got += chunk
        time.sleep(0.2)
    assert got == data


def test_delivered_when_the_end_is_under_way_waits_for_what_the_kernel_holds(link):
    """Between the first step of the end and the last nothing is delivered yet: `stop` would close the socket."""

    class Looking(Noting):
        def ledger_entry(self, entry):
            self.calls.append(self.connection.core.delivered)

    session = Looking()
    connection, peer = link(
        session, tcp=True, options=SocketOptions(send_buffer_bytes=1024 * 1024, notsent_lowat_bytes=0)
    )
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sender.send(b"x" * 60_000)
    connection.close_after_flush("done")
    session.wait_end()
    assert True not in session.calls
    assert not connection.core.delivered
    assert len(Reader(peer).wait()) == 60_000
    wait_until(lambda: connection.core.delivered)


@pytest.mark.parametrize("half_closed", [True, False])
def test_linger_when_words_wait_behind_a_message_in_flight_has_both_arrive(link, monkeypatch, half_closed):
    """A peer that ends its own half may read on; and what our kernel has not got yet is not delivered."""
    for module in (_lingering, host_module):
        monkeypatch.setattr(module, "unacknowledged_bytes", lambda _: 0)
    monkeypatch.setattr(_lingering, "LINGER_QUIET_S", WAIT_S)

    class Telling(Noting):
        def last_words(self, reason, details):
            return b"why"

    session = Telling()
    connection, peer = link(session, tcp=True, options=SocketOptions(send_buffer_bytes=4096))
    connection.sender.set_limits(Limits())
    connection.sender.send(b"x" * 4_000_000)
    connection.close(CloseReason.KICKED, "enough")
    session.wait_end()
    if half_closed:
        peer.shutdown(socket.SHUT_WR)
    assert not connection.core.delivered
    data = Reader(peer).wait()
    assert (len(data), data[-4:]) == (4_000_003, b"xwhy")
    wait_until(lambda: connection.core.delivered)


def test_linger_when_the_socket_cannot_be_watched_any_more_closes_at_once(link, groups, failures, monkeypatch):
    """The kernel bounds how many sockets are watched; for that, neither `closed` nor the socket may be forgotten."""

    def refuse(*_):
        raise ClosedError("no space left for another watch")

    monkeypatch.setattr("flowctl.core.connecting.core.Lingering", refuse)
    session = Noting()
    connection, peer = link(session, tcp=True)
    wait_until(lambda: "opened" in session.calls)
    connection.close(CloseReason.KICKED, "enough")
    assert peer.recv(1) == b""
    assert session.over.wait(WAIT_S)
    wait_until(lambda: groups[0].statistics().pollables == 0)
    assert len(session.ends) == 1
    assert "lingering" in failures.pop()[0]


def test_stop_when_connections_linger_keeps_its_deadline(link, groups):
    released, sessions = [], [Noting() for _ in range(3)]
    linked = [link(session, tcp=True, on_released=released.append) for session in sessions]
    wait_until(lambda: all(session.calls for session in sessions))
    for connection, _ in linked:
        connection.close(CloseReason.KICKED, "")
    for session in sessions:
        session.wait_end()
    assert released == []
    assert groups[0].stop(WAIT_S)
    assert set(released) == {connection for connection, _ in linked}
    assert {connection.core.host.sock.fileno() for connection, _ in linked} == {-1}
    assert [session.calls.count("closed") for session in sessions] == [1, 1, 1]


def test_admission_when_a_connection_lingers_counts_it(loop_factory):
    """What an attacker leaves behind lingering is counted against its address like what is open."""
    server = Server(Noting, loop_factory=loop_factory)
    server.start()
    try:
        with socket.create_connection(server.address, WAIT_S) as peer:
            connection = wait_until(server.connections)[0]
            connection.close(CloseReason.KICKED, "")
            wait_until(lambda: server.closed_by_reason == {CloseReason.KICKED: 1})
            assert server.connections() == []
            assert server.admission.connections == 1
            assert peer.recv(1) == b""
        wait_until(lambda: server.admission.connections == 0)
    finally:
        assert server.stop()


# -- the peer's end, while nothing of it is read


def test_peer_when_half_closed_and_then_reset_is_noticed(link):
    session = Noting()
    session.stays = True
    connection, peer = link(session, tcp=True)
    peer.shutdown(socket.SHUT_WR)
    wait_until(lambda: "peer_ended" in session.calls)
    assert connection.ended is None
    reset(peer)
    assert session.wait_end()[0] is CloseReason.PEER_RESET


@pytest.mark.parametrize("control_bytes", [0, 10])
def test_peer_when_it_resets_while_its_input_is_held_ends_the_connection(link, control_bytes):
    session = Noting(lambda data: 0)
    connection, peer = link(session, tcp=True)
    wait_until(lambda: session.calls)
    connection.pause_input("test", "test", control_bytes=control_bytes)
    peer.sendall(b"work " * 10_000)
    wait_until(lambda: connection.receiver.paused)
    reset(peer)
    assert session.wait_end()[0] is CloseReason.PEER_RESET


def test_peer_when_it_resets_while_a_coroutine_runs_ends_the_connection(link):
    cancelled = threading.Event()

    class Slow(Noting):
        async def received(self, data) -> None:
            self._note("received")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

    session = Slow()
    _, peer = link(session, tcp=True)
    peer.sendall(b"question")
    wait_until(lambda: "received" in session.calls)
    reset(peer)
    assert session.wait_end()[0] is CloseReason.PEER_RESET
    assert cancelled.wait(WAIT_S)


def test_peer_when_it_leaves_while_its_input_is_held_ends_soon(link, monkeypatch):
    """What is let in slowly is not worked on for long after a peer that has gone."""
    monkeypatch.setattr(core_module, "HELD_END_S", 0.1)
    session = Noting()
    connection, peer = link(session, tcp=True)
    wait_until(lambda: session.calls)
    connection.pause_input("test", "test")
    peer.sendall(b"work " * 10_000)
    peer.close()
    reason, details = session.wait_end()
    assert reason is CloseReason.PEER_CLOSED
    assert details == "it left while its input was held"


def test_peer_when_it_leaves_while_it_is_slowed_ends_though_holds_come_and_go(link, monkeypatch):
    """Who sends more than it may and leaves is not worked for: what it has left in our kernel is thrown away."""
    monkeypatch.setattr(core_module, "_SLOWED_END_S", 0.05)

    class Slowing(Noting):
        taken = 0

        def received(self, data):
            self.taken += 1
            now = self.connection.now()
            error = LimitExceededError("messages_per_second", 2, 1)
            self.connection.core.slow(Overrun(error, now + 0.001, begins=False, ends=False), "test")
            self.connection.receiver.trigger_input()
            return InputResult(InputVerdict.BLOCK, 1)

    session = Slowing()
    _, peer = link(session, tcp=True)
    peer.sendall(b"work " * 4_000)
    peer.close()
    assert session.wait_end() == (CloseReason.PEER_CLOSED, "it left while its input was slowed")
    assert session.taken < 20_000


@pytest.mark.realtime  # its sends must not be further apart than the time that ends the connection
def test_peer_when_it_half_closes_while_its_input_is_held_is_answered(link, monkeypatch):
    """A peer that takes what it is sent has not left: its request is answered when it is let in."""
    monkeypatch.setattr(core_module, "HELD_END_S", 0.05)
    session = Noting()
    session.stays = True
    connection, peer = link(session, tcp=True)
    wait_until(lambda: session.calls)
    connection.pause_input("test", "test")
    peer.sendall(b"request")
    peer.shutdown(socket.SHUT_WR)
    for _ in range(30):
        connection.sender.send(b"still busy")
        threading.Event().wait(0.01)
    connection.resume_input("test")
    wait_until(lambda: "peer_ended" in session.calls)
    assert bytes(session.got) == b"request"
    connection.sender.send(b"answer")
    connection.close_after_flush("done")
    assert Reader(peer).wait() == b"still busy" * 30 + b"answer"


def test_peer_when_it_half_closes_while_a_coroutine_works_for_it_is_answered(link, monkeypatch):
    monkeypatch.setattr(core_module, "HELD_END_S", 0.02)

    class Slow(Noting):
        async def received(self, data) -> None:
            await asyncio.sleep(0.2)
            self.send(b"answer to " + data)

    session = Slow()
    session.stays = True
    connection, peer = link(session, tcp=True)
    peer.sendall(b"question")
    peer.shutdown(socket.SHUT_WR)
    wait_until(lambda: "peer_ended" in session.calls)
    connection.close_after_flush("done")
    assert Reader(peer).wait() == b"answer to question"
