"""How connections over WebSocket end: whatever the reason, the client is told by a code, and in no other frame."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest
from connection_kit import WAIT_S, ask, wait_until
from loopback_kit import NETWORK
from websocket_kit import BINARY, CLOSE, PING, PONG, TEXT, RawClient, Served, Talk, close_payload, handshake, masked

from flowctl import (
    Ban,
    BanList,
    CloseReason,
    Limits,
    LocalProtocolError,
    SenderSettings,
    SendOutcome,
    SocketOptions,
    Topic,
)
from flowctl.core.loop import lingering

NARROW = {"receive_bytes": 4096}
SMALL = Limits.parse("64KiB,100,60s", "256KiB,400,120s")


@pytest.fixture
def patient(monkeypatch):
    """A socket lingers for as long as a slow machine takes to begin to read."""
    monkeypatch.setattr(lingering, "LINGER_QUIET_S", 10.0)


def settled(connection):
    return connection.sender.blocked or connection.sender.drained or connection.ended


def whole_messages(client):
    """Return the payloads of the messages that come, and the close frame behind them."""
    payloads = []
    while True:
        first, payload = client.read_frame()
        if first == 0x80 | CLOSE:
            assert client.read_to_end() == b""
            return payloads, (int.from_bytes(payload[:2], "big"), payload[2:].decode())
        assert first in {0x80 | TEXT, 0x80 | BINARY}, hex(first)
        payloads.append(payload)


def test_clients_when_gone_before_the_answer_are_not_accepted():
    """A server that hands a socket over has read the request; what the client did since shows as it is written to."""
    topic = Topic()

    class Async(Talk):
        async def accepted(self):
            self.is_open.set()
            self.follow(topic)

    with Served(Async) as served:
        ours, theirs = socket.socketpair()
        theirs.close()
        session = served.factory()
        served.server.add_socket(ours, session, first_input=handshake())
        assert session.wait_end()[0] is CloseReason.PEER_RESET
        served.open()[0].sock.close()  # by then all that was begun for the other has been done
        assert not session.is_open.is_set()
        assert served.errors == []


@pytest.mark.parametrize("follows", [True, False])
def test_slow_clients_when_cut_at_a_hard_limit_get_the_rest_of_a_message_and_are_told_why(patient, follows):
    """Nothing is in the middle of the message that was half written, and what was queued behind it is not sent."""
    topic = Topic()
    with Served(server={"limits": SMALL}) as served:
        client, session = served.open(**NARROW)
        with client:
            if follows:
                ask(session.connection, session.follow, topic)
            sent, number = [], 0
            while session.connection.ended is None:
                payload = struct.pack(">I", number) * 5000
                sent.append(payload)
                (topic.publish if follows else session.send_message)(payload)
                number += 1
                assert number < 5000, "no limit was reached"
                if number % 8 == 0:
                    wait_until(lambda: settled(session.connection))
            assert session.wait_end()[0] is CloseReason.HARD_LIMIT
            payloads, end = whole_messages(client)
            assert end == (1013, "too slow: more waits for you than the limit")
            assert payloads == sent[: len(payloads)]
            assert 0 < len(payloads) < len(sent)
        wait_until(lambda: session.connection.core.host.sock.fileno() == -1)


def test_slow_clients_when_they_take_nothing_are_reset_after_the_lingering_time(monkeypatch):
    monkeypatch.setattr(lingering, "LINGER_QUIET_S", 0.05)
    with Served(server={"limits": SMALL, "settings": SenderSettings(stuck_s=0.1, close_deadline_s=0.1)}) as served:
        client, session = served.open(**NARROW)
        with client:
            while session.send_message(b"x" * 50_000).outcome is not SendOutcome.CLOSED:
                wait_until(lambda: settled(session.connection))
                if session.connection.sender.blocked:
                    break
            assert session.wait_end()[0] is CloseReason.STUCK
            wait_until(lambda: session.connection.core.host.sock.fileno() == -1)
            with pytest.raises(ConnectionResetError):
                client.read_to_end()


@pytest.mark.parametrize("later", [False, True])
def test_handlers_when_they_fail_end_their_client_with_1011_and_tell_no_secret(later):
    async def fail_later(self, message):
        await asyncio.sleep(0)
        raise ValueError("secret")

    def fail(self, message):
        raise ValueError("secret")

    with Served(received_message=fail_later if later else fail) as served:
        client, session = served.open()
        client.send(TEXT, "x")
        assert client.read_close() == (1011, "internal error")
        assert session.wait_end()[0] is CloseReason.INTERNAL
        assert len(served.errors) == 1
        client.sock.close()


def test_clients_when_accepted_fails_are_told_behind_the_answer():
    def accepted(self):
        raise ValueError("secret")

    with Served(accepted=accepted) as served, RawClient(served.address) as client:
        assert client.read_head() == 101
        assert client.read_close() == (1011, "internal error")


@pytest.mark.parametrize(
    ("end", "told", "reason"),
    [
        (lambda one: one.close_with(4002, "full"), (4002, "full"), CloseReason.FINISHED),
        (lambda one: one.close_with(), (1000, ""), CloseReason.FINISHED),
        (lambda one: one.close_with(1008, "no", at_once=True), (1008, "no"), CloseReason.KICKED),
        (lambda one: one.close_after_flush("internal note"), (1000, ""), CloseReason.FINISHED),
        (lambda one: one.close("10.0.0.1 is kicked"), (1008, "ended by the server"), CloseReason.KICKED),
    ],
)
def test_sessions_when_the_application_ends_them_tell_their_client(end, told, reason):
    with Served() as served:
        client, session = served.open()
        with client:
            end(session)
            assert client.read_close() == told
            assert session.wait_end()[0] is reason


def test_close_with_when_behind_what_is_queued_comes_after_all_of_it(patient):
    """Own messages, then the topic up to this moment, then the close frame."""
    topic = Topic()
    with Served(
        server={"limits": Limits.parse("1GB,100000", "2GB,200000"), "settings": SenderSettings(close_deadline_s=60.0)}
    ) as served:
        client, session = served.open(**NARROW)
        with client:
            ask(session.connection, session.follow, topic)
            published = [bytes([number]) * 100_000 for number in range(80)]
            for payload in published:
                topic.publish(payload)
            wait_until(lambda: session.connection.sender.blocked)
            session.close_with(4000, "done")
            assert session.send_message("late").outcome is SendOutcome.CLOSED
            payloads, end = whole_messages(client)
            assert payloads == published
            assert end == (4000, "done")
            assert session.wait_end()[0] is CloseReason.FINISHED
    assert topic.statistics().followers == 0


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 2000, 2999, 5000])
def test_close_with_when_no_frame_can_carry_the_code_says_so(code):
    with Served() as served:
        client, session = served.open()
        with client, pytest.raises(LocalProtocolError):
            session.close_with(code)
        assert session.connection.ended is None or session.wait_end()


def test_clients_when_they_close_get_what_they_asked_for_before_and_the_same_code():
    with Served() as served:
        client, session = served.open()
        with client:
            close = masked(CLOSE, close_payload(4321, "enough"))
            client.sock.sendall(masked(TEXT, "echo") + close + masked(TEXT, "behind"))
            assert client.read_text() == "echo"
            assert client.read_close() == (4321, "")
        assert session.wait_end() == (CloseReason.PEER_CLOSED, "the client closed: 4321 enough")
        assert session.got == ["echo"]


@pytest.mark.parametrize(
    ("wire", "code", "reason"),
    [
        (masked(TEXT, "x", rsv=4), 1002, CloseReason.PROTOCOL_ERROR),
        (masked(0, "x"), 1002, CloseReason.PROTOCOL_ERROR),
        (masked(TEXT, "x", mask=False), 1002, CloseReason.PROTOCOL_ERROR),
        (masked(TEXT, b"\xff\xff"), 1007, CloseReason.PROTOCOL_ERROR),
        (masked(BINARY, b"x" * 2001), 1009, CloseReason.LIMIT_HIT),
        (masked(BINARY, b"x" * 2000, fin=False) + masked(0, b"x"), 1009, CloseReason.LIMIT_HIT),
    ],
)
def test_clients_when_they_break_a_rule_are_told_which_behind_the_answers_before(wire, code, reason):
    with Served(max_message_bytes=2000) as served:
        client, session = served.open()
        with client:
            client.sock.sendall(masked(TEXT, "good") + wire + masked(PING, b"not answered"))
            assert client.read_text() == "good"
            found, words = client.read_close()
            assert (found, bool(words)) == (code, True)
            assert session.wait_end()[0] is reason
        assert not served.errors


def test_server_when_it_stops_tells_its_clients_behind_what_is_queued():
    with Served() as served:
        client, session = served.open()
        with client:
            session.send_message("last")
            stopping = threading.Thread(target=served.server.stop, args=(WAIT_S,))
            stopping.start()
            assert client.read_text() == "last"
            assert client.read_close() == (1001, "the server stops")
            client.sock.close()
            stopping.join(WAIT_S)
            assert session.wait_end()[0] is CloseReason.SHUTDOWN


def test_banned_clients_when_open_are_reset_without_a_word():
    with Served(behaves=lambda self: False) as served:
        client, session = served.open()
        with client:
            assert served.server.set_bans(BanList([Ban(cidr=NETWORK, expires=None)])) == 1
            assert session.wait_end()[0] is CloseReason.BANNED
            with pytest.raises(ConnectionResetError):
                client.read_to_end()


def test_pings_are_answered_with_their_payload_in_order():
    with Served() as served:
        client, _ = served.open()
        with client:
            payloads = [b"", b"x" * 125, *(b"%d" % number for number in range(200))]
            client.sock.sendall(b"".join(masked(PING, payload) for payload in payloads))
            assert [client.read_frame() for _ in payloads] == [(0x80 | PONG, payload) for payload in payloads]


def test_floods_of_pings_when_their_answers_are_not_read_end_at_the_limit_of_the_control_lane(monkeypatch):
    """The client never reads; what waits for it is bounded."""
    monkeypatch.setattr(lingering, "LINGER_QUIET_S", 0.05)
    narrow = {
        "settings": SenderSettings(control_messages=50, stuck_s=0.0, close_deadline_s=0.1),
        "options": SocketOptions(send_buffer_bytes=4096),
    }
    with Served(server=narrow) as served:
        client, session = served.open(**NARROW)
        with client:
            pings = masked(PING, b"x" * 125) * 500

            def flood():
                try:
                    while True:
                        client.sock.sendall(pings)
                except OSError:
                    return

            flooding = threading.Thread(target=flood)
            flooding.start()
            assert session.wait_end()[0] is CloseReason.LIMIT_HIT
            flooding.join(WAIT_S)
            assert not flooding.is_alive()


def test_silent_clients_are_pinged_and_ended_when_no_answer_comes():
    with Served(ping_interval_s=0.05, ping_timeout_s=0.05) as served:
        client, session = served.open()
        with client:
            assert client.read_frame() == (0x80 | PING, b"")
            assert client.read_close() == (1011, "no answer to a ping")
        reason, details = session.wait_end()
        assert reason is CloseReason.IDLE
        assert "0.05 s" in details


def test_silent_clients_that_answer_are_pinged_for_as_long_as_they_are_there():
    """Each answer is given when its ping has come, so that the time for it is not a matter of the machine."""
    with Served(ping_interval_s=0.02, ping_timeout_s=WAIT_S) as served:
        client, session = served.open()
        with client:
            for _ in range(5):
                assert client.read_frame() == (0x80 | PING, b"")
                client.send(PONG)
            assert session.connection.ended is None
            client.send(TEXT, "still here")
            while (frame := client.read_frame()) == (0x80 | PING, b""):
                client.send(PONG)
            assert frame == (0x80 | TEXT, b"still here")
