"""Connections on real sockets and both loops: input, output, timers, and the one end that each of them has."""

from __future__ import annotations

import random
import socket
import struct
import threading

import pytest
from connection_kit import WAIT_S, Noting, Reader, ask, wait_until

from flowctl.connection import Connection
from flowctl.core.connecting.core import INPUT_BYTES_PER_VIEWER_S, MAX_CALLS
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import SendState
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import LocalProtocolError, ReentryError
from flowctl.reasons import CloseReason
from flowctl.sender import Sender
from flowctl.testing import ManualClock

SMALL = SocketOptions(send_buffer_bytes=4096)


# -- input


def test_received_when_it_takes_whole_lines_is_offered_the_rest_again(link):
    session = Noting(lambda data: data.rfind(b"\n") + 1)
    _, peer = link(session)
    text = b"".join(b"line %d\n" % number for number in range(200))
    rng = random.Random(1)
    at = 0
    while at < len(text):
        step = rng.choice((1, 3, 50))
        peer.sendall(text[at : at + step])
        at += step
    wait_until(lambda: len(session.got) == len(text), "all input")
    assert bytes(session.got) == text
    assert len(session.threads) == 1


def test_received_when_it_never_takes_anything_ends_with_the_buffers_limit(link):
    session = Noting(lambda data: 0)
    _, peer = link(session, capacity_bytes=1000)
    peer.sendall(b"x" * 5000)
    assert session.wait_end() == (CloseReason.LIMIT_HIT, "input_buffer_bytes is 1000, the limit is 1000")


def test_received_when_a_plain_function_returns_a_coroutine_says_what_to_do(link, failures):
    async def later():
        raise AssertionError("never awaited")

    session = Noting(lambda data: later())
    session.received = lambda data: later()
    _, peer = link(session)
    peer.sendall(b"x")
    reason, details = session.wait_end()
    assert reason is CloseReason.INTERNAL
    assert "received() returned coroutine" in details
    failures.clear()


# -- the end


def test_end_when_the_peer_closes_is_told_once(link):
    session = Noting()
    connection, peer = link(session)
    peer.sendall(b"bye")
    peer.close()
    assert session.wait_end() == (CloseReason.PEER_CLOSED, "")
    connection.close(CloseReason.KICKED, "late")
    connection.close_after_flush("later")
    assert connection.call_soon(print) is False
    assert session.calls == ["opened", "received", "peer_ended", "closed"]
    assert connection.ended == (CloseReason.PEER_CLOSED, "")
    assert connection.sender.send(b"x").outcome is SendOutcome.CLOSED
    assert connection.sender.statistics().sends_after_close == 1


def test_end_when_the_peer_resets_is_peer_reset(link):
    session = Noting()
    _, peer = link(session, tcp=True)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    assert session.wait_end()[0] is CloseReason.PEER_RESET


def test_end_when_the_peer_half_closes_may_go_on_sending(link):
    session = Noting()
    session.stays = True
    connection, peer = link(session, tcp=True)
    peer.sendall(b"request")
    peer.shutdown(socket.SHUT_WR)
    wait_until(lambda: "peer_ended" in session.calls)
    assert connection.sender.send(b"answer").outcome is SendOutcome.ACCEPTED
    connection.close_after_flush("done")
    assert Reader(peer).wait() == b"answer"
    assert session.wait_end() == (CloseReason.FINISHED, "done")


def test_end_when_many_threads_close_has_one_reason(link):
    session = Noting()
    connection, _ = link(session)
    reasons = [CloseReason.KICKED, CloseReason.BANNED, CloseReason.IDLE, CloseReason.SHUTDOWN]
    threads = [threading.Thread(target=connection.close, args=(item, item.value)) for item in reasons * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reason, details = session.wait_end()
    assert details == reason.value
    assert connection.ended == (reason, details)
    assert session.calls.count("closed") == 1


def test_close_after_flush_when_the_peer_reads_sends_everything_first(link):
    session = Noting()
    connection, peer = link(session, tcp=True, options=SMALL)
    data = [bytes([number % 256]) * 10_000 for number in range(100)]
    for item in data:
        connection.sender.send(item)
    connection.close_after_flush("goodbye", reason=CloseReason.KICKED)
    assert connection.sender.send(b"late").outcome is SendOutcome.CLOSED
    assert Reader(peer).wait() == b"".join(data)
    assert session.wait_end() == (CloseReason.KICKED, "goodbye")


def test_close_after_flush_when_the_peer_does_not_read_gives_up_and_resets(link):
    """After the deadline the connection is reset, so that the kernel does not keep its buffers."""
    session = Noting()
    settings = SenderSettings(close_deadline_s=0.05)
    connection, peer = link(session, tcp=True, options=SMALL, settings=settings)
    for _ in range(100):
        connection.sender.send(b"x" * 100_000)
    connection.close_after_flush("goodbye")
    reason, details = session.wait_end()
    assert reason is CloseReason.STUCK
    assert "0.05 s" in details
    assert isinstance(_end_of(peer), ConnectionResetError)


def test_deadline_when_another_thread_sets_it_has_the_sender_tick_on_its_own(link):
    """A tick sets what is still to come: so no time that another thread has found is kept anywhere else."""
    ticks = []

    class Ticking(Sender):
        __slots__ = ()

        def tick(self):
            ticks.append(threading.get_ident())
            super().tick()

    connection, _ = link(Noting(), make_sender=Ticking)
    connection.core.host.set_deadline(connection.now() + 1000)
    wait_until(lambda: ticks)
    assert ticks == [connection.group.thread_id]


def _end_of(peer):
    reader = Reader(peer)
    reader.wait()
    return reader.error


@pytest.mark.parametrize("reason", CloseReason)
def test_close_when_abortive_resets_and_otherwise_ends_in_order(link, reason):
    session = Noting()
    connection, peer = link(session, tcp=True)
    connection.close(reason, "")
    session.wait_end()
    assert isinstance(_end_of(peer), ConnectionResetError) is reason.abortive


def test_close_when_at_the_hard_limit_names_it(link):
    session = Noting()
    limits = Limits.parse("100KiB,0", "200KiB,0")
    connection, _ = link(session, tcp=True, options=SMALL, limits=limits)
    while connection.sender.send(b"x" * 50_000).outcome is not SendOutcome.CLOSED:
        pass
    reason, details = session.wait_end()
    assert reason is CloseReason.HARD_LIMIT
    assert "limit 200 KiB" in details
    assert [change.new for change in session.edges][-1] is SendState.HARD_LIMIT
    wait_until(lambda: session.entries[-1].kind is LedgerKind.CLOSE)


def test_abandon_when_no_group_is_left_closes_all_the_same():
    """A connection caught between two groups that stop is ended by whoever stops them."""
    from flowctl.connection import Connection

    ours, peer = socket.socketpair()
    session = Noting()
    connection = Connection(ours, session)
    connection.core.abandon("nobody left")
    assert session.ends == [(CloseReason.SHUTDOWN, "nobody left")]
    assert peer.recv(1) == b""
    peer.close()


# -- calls, timers, pauses


def test_timer_when_set_is_called_once_and_an_earlier_wish_is_replaced(link):
    session = Noting()
    connection, _ = link(session)
    ask(connection, lambda: (connection.set_timer(connection.now() + 1000), connection.set_timer(connection.now())))
    wait_until(lambda: "timer" in session.calls)
    ask(connection, lambda: (connection.set_timer(connection.now() + 0.001), connection.set_timer(None)))
    ask(connection, lambda: connection.set_timer(connection.now() + 1000))
    for _ in range(10):
        ask(connection, lambda: None)
    assert session.calls.count("timer") == 1


@pytest.mark.parametrize("turn_over", [False, True])
def test_timer_when_our_thread_was_late_comes_after_what_the_peer_has_sent(link, turn_over):
    """A session that is about to say that nothing has come is first given what has, even where others had its turn."""

    class Watchful(Noting):
        def received(self, data):
            self.calls.append(bytes(data))

    session = Watchful()
    connection, peer = link(session)

    def late():
        now = connection.now()
        connection.set_timer(now - 1)
        peer.sendall(b"here")
        if turn_over:
            connection.work.address.charge(1.0, now)
        connection.core.deadline_due(now)

    ask(connection, late)
    wait_until(lambda: "timer" in session.calls)
    assert session.calls[-2:] == [b"here", "timer"]


def test_calls_when_from_many_threads_run_on_the_connections_own_in_order(link):
    session = Noting()
    connection, _ = link(session)
    ran = []
    threads = [
        threading.Thread(
            target=lambda name=name: [
                wait_until(lambda number=number: connection.call_soon(ran.append, (name, number)))
                for number in range(100)
            ]
        )
        for name in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(ran) == 400)
    for name in range(4):
        assert [number for who, number in ran if who == name] == list(range(100))


def test_call_when_it_raises_ends_the_connection(link, failures):
    session = Noting()
    connection, _ = link(session)
    connection.call_soon(lambda: 1 / 0)
    assert session.wait_end()[0] is CloseReason.INTERNAL
    assert len(failures) == 1
    failures.clear()


def test_calls_when_many_wait_all_run_and_too_many_are_the_callers_fault(link, groups):
    """A neighbour's handler that blocks the thread costs a healthy peer nothing; who floods its calls is told."""
    session = Noting()
    connection, peer = link(session)
    gate, hanging = threading.Event(), threading.Event()
    groups[0].call_soon(lambda: (hanging.set(), gate.wait(WAIT_S)))
    assert hanging.wait(WAIT_S)
    ran = []
    assert all(connection.call_soon(ran.append, number) for number in range(MAX_CALLS))
    with pytest.raises(LocalProtocolError, match=f"{MAX_CALLS} calls wait"):
        connection.call_soon(print)
    gate.set()
    wait_until(lambda: len(ran) == MAX_CALLS)
    assert ran == list(range(MAX_CALLS))
    peer.sendall(b"still served")
    wait_until(lambda: bytes(session.got) == b"still served")


def test_pause_when_held_stops_input_and_stands_in_the_ledger(link):
    session = Noting()
    connection, peer = link(session)
    assert connection.pause_input("me", "tired")
    assert not connection.pause_input("me", "tired")
    for _ in range(3):
        ask(connection, lambda: None)
    peer.sendall(b"x")
    for _ in range(10):
        ask(connection, lambda: None)
    assert bytes(session.got) == b""
    assert connection.resume_input("me")
    assert not connection.resume_input("me")
    wait_until(lambda: bytes(session.got) == b"x")
    wait_until(lambda: len(session.entries) == 2)
    assert [(entry.kind, entry.why) for entry in session.entries] == [
        (LedgerKind.PAUSE, "input paused: tired"),
        (LedgerKind.RESUME, "input resumed: tired"),
    ]
    assert session.entries[1].duration_s >= 0
    assert connection.receiver.statistics().pauses == {"tired": 1}


def test_pause_when_from_the_state_handler_is_allowed_and_other_calls_are_refused(link, failures):
    refusals = []

    class Pausing(Noting):
        def send_state_changed(self, state, change) -> None:
            self.edges.append(change)
            self.connection.pause_input(self, "slow peer") if state else self.connection.resume_input(self)
            try:
                self.send(b"no")
            except ReentryError as error:
                refusals.append(error)

    session = Pausing()
    connection, peer = link(session, tcp=True, options=SMALL)
    for _ in range(200):
        connection.sender.send(b"x" * 5_000)
    wait_until(lambda: session.edges)
    reader = Reader(peer)
    wait_until(lambda: session.edges[-1].new is SendState.READY)
    wait_until(lambda: not connection.receiver.paused)
    assert len(refusals) == len(session.edges) >= 2
    connection.close_after_flush()
    assert reader.wait() == b"x" * 1_000_000


def test_pause_when_another_connections_state_handler_asks_stands_in_the_ledger(link, failures):
    """A proxy pauses its source when its sink is slow: at once, and noted on the source's own thread."""
    source, noting = link(Noting())[0], Noting()

    class Sink(Noting):
        def send_state_changed(self, state, change) -> None:
            source.pause_input(self, "slow sink") if state else source.resume_input(self)

    session = Sink()
    connection, peer = link(session, tcp=True, options=SMALL)
    noting = source.session
    connection.sender.send(b"x" * 3_000_000)
    wait_until(lambda: source.receiver.paused, "the pause")
    reader = Reader(peer)
    wait_until(lambda: len(noting.entries) == 2, "both entries")
    assert [entry.kind for entry in noting.entries] == [LedgerKind.PAUSE, LedgerKind.RESUME]
    connection.close_after_flush()
    assert len(reader.wait()) == 3_000_000


# -- threads and moving


def test_send_when_from_many_threads_keeps_each_ones_order(link):
    for deferred in (True, False):
        session = Noting()
        connection, peer = link(session, tcp=True, deferred=deferred, options=SMALL)
        reader = Reader(peer)

        def work(name, connection=connection):
            for number in range(300):
                connection.sender.send(b"%d:%06d" % (name, number) + b"." * 92)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        connection.close_after_flush()
        data = reader.wait()
        assert len(data) == 4 * 300 * 100
        messages = [data[at : at + 100] for at in range(0, len(data), 100)]
        for name in range(4):
            own = [int(message[2:8]) for message in messages if message.startswith(b"%d:" % name)]
            assert own == list(range(300))


def test_migrate_when_sending_and_receiving_loses_and_reorders_nothing(link, groups):
    session = Noting()
    connection, peer = link(session, tcp=True, options=SMALL)
    reader = Reader(peer)
    stop = threading.Event()

    def move():
        turn = 0
        while not stop.is_set():
            here, there = groups[turn % 2], groups[(turn + 1) % 2]
            if here.migrate(connection.core, there):
                turn += 1
                wait_until(lambda there=there: connection.group is there or stop.is_set())

    mover = threading.Thread(target=move)
    mover.start()
    ours = [b"%08d" % number + b"." * 192 for number in range(3000)]
    theirs = [b"%08d" % number for number in range(3000)]
    talker = threading.Thread(target=lambda: [peer.sendall(item) for item in theirs])
    talker.start()
    for item in ours:
        connection.sender.send(item)
    talker.join()
    wait_until(lambda: len(session.got) == 8 * 3000, "all input")
    wait_until(lambda: connection.sender.statistics().queued.total_messages == 0, "all output")
    stop.set()
    mover.join()
    connection.close_after_flush()
    assert reader.wait() == b"".join(ours)
    assert bytes(session.got) == b"".join(theirs)
    assert session.wait_end()[0] is CloseReason.FINISHED
    assert session.calls.count("opened") == 1


def test_migrate_when_another_thread_sends_on_the_way_leaves_the_socket_to_the_owner(groups):
    """Between two groups no thread is the owning one: EAGAIN that a send meets then is met again on the new thread."""
    gate, mine = threading.Event(), threading.get_ident()

    class Arriving(Connection):
        def want_writable(self, wanted):
            if threading.get_ident() == mine:
                gate.set()
                wait_until(lambda: self.group is groups[1])
            super().want_writable(wanted)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname(), WAIT_S)
        ours, _ = listener.accept()
    session, hanging = Noting(), threading.Event()
    connection = Arriving(ours, session, options=SMALL, limits=Limits.parse("10KiB,0", "0,0"))
    connection.live_on(groups[0])
    wait_until(lambda: session.calls)
    groups[1].call_soon(lambda: (hanging.set(), gate.wait(WAIT_S)))
    assert hanging.wait(WAIT_S)
    assert groups[0].migrate(connection.core, groups[1])
    wait_until(lambda: connection.group is None)
    data = [bytes([number]) * 20_000 for number in range(20)]
    for item in data:
        assert connection.sender.send(item).outcome is SendOutcome.ACCEPTED
    gate.set()
    connection.close_after_flush("all")
    assert Reader(peer).wait() == b"".join(data)
    assert session.wait_end() == (CloseReason.FINISHED, "all")


def test_migrate_when_a_call_waits_takes_it_along(link, groups):
    session = Noting()
    connection, _ = link(session)
    ran = []
    for number in range(50):
        connection.call_soon(lambda number=number: ran.append(number))
        if number % 10 == 5:
            group = connection.group
            if group is not None:
                group.migrate(connection.core, groups[0] if group is groups[1] else groups[1])
    wait_until(lambda: len(ran) == 50)
    assert ran == list(range(50))


def test_attached_when_the_buffer_does_not_fit_ends_the_connection(link, failures):
    session = Noting()
    connection, peer = link(session, capacity_bytes=1 << 24)
    assert session.wait_end()[0] is CloseReason.INTERNAL
    assert peer.recv(1) == b""
    assert connection.core.host.sock.fileno() == -1
    assert any("attaching" in where for where, _ in failures)
    failures.clear()


def test_describe_when_asked_names_number_and_peer(link):
    connection, peer = link(Noting(), tcp=True)
    port = peer.getsockname()[1]
    assert str(connection) == f"connection {connection.number} (127.0.0.1:{port})"


def test_load_when_the_peer_sends_much_is_that_of_several_viewers(link):
    """A viewer weighs 1, a publisher more by the mean rate at which it sends, so that threads get equal work."""
    clock = ManualClock(100.0)
    connection, peer = link(Noting(), clock=clock)
    assert connection.core.load() == 1.0
    peer.sendall(bytes(10 * INPUT_BYTES_PER_VIEWER_S))
    wait_until(lambda: connection.receiver.bytes_in == 10 * INPUT_BYTES_PER_VIEWER_S)
    assert connection.core.load() == 11.0
    clock.advance(5.0)
    assert connection.core.load() == 3.0


def test_pause_when_control_is_granted_and_not_looked_at_keeps_the_peer(link):
    session = Noting()
    connection, peer = link(session, tcp=True, capacity_bytes=2000)
    wait_until(lambda: session.calls)
    connection.pause_input("test", "test", control_bytes=1 << 20)
    data = bytes(range(200)) * 100
    peer.sendall(data)
    wait_until(lambda: connection.receiver.statistics().kept_bytes == 2000, "a full buffer")
    for _ in range(20):
        ask(connection, lambda: None)
    assert connection.ended is None
    assert bytes(session.got) == b""
    connection.resume_input("test")
    wait_until(lambda: bytes(session.got) == data)


def test_session_close_when_called_is_now_and_after_flush_is_later(link):
    for name, reason in (("close", CloseReason.KICKED), ("close_after_flush", CloseReason.FINISHED)):
        session = Noting()
        connection, peer = link(session, tcp=True, options=SMALL)
        wait_until(lambda session=session: session.calls)
        connection.sender.send(b"x" * 5_000_000)
        getattr(session, name)("bye")
        data = Reader(peer).wait()
        assert (len(data) == 5_000_000) is (name == "close_after_flush")
        assert session.wait_end() == (reason, "bye")
