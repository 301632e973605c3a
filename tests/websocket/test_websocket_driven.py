"""Sessions in virtual time, by the test kit: silence, slow clients at their end, and input in any pieces."""

from __future__ import annotations

import asyncio
import inspect
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websocket_kit import BINARY, CLOSE, PING, PONG, TEXT, Talk, close_payload, handshake, masked

from flowctl import (
    CloseReason,
    ConfigError,
    DropDroppable,
    Limits,
    SendOutcome,
    Session,
    Topic,
    WebSocketSession,
)
from flowctl.testing import drive
from flowctl.wire.websocket.frames import close_frame, frame

PINGED = frame(b"", 0x80 | PING)


Alone = type("Alone", (Talk,), {"made": []})
METHODS, OWN_METHODS = (
    sorted({name for name, item in found if inspect.isfunction(item) and name.strip("_") == name})
    for found in ((vars(Session) | vars(WebSocketSession)).items(), vars(Session).items())
)


def opened(base=Alone, *, limits=None, **attributes):
    session = type("Driven", (base,), attributes)()
    peer = drive(session) if limits is None else drive(session, limits=limits)
    head = peer.receive(handshake())
    assert head.startswith(b"HTTP/1.1 101 ")
    assert head.endswith(b"\r\n\r\n")
    return peer, session


@pytest.mark.parametrize("name", ["__init__", *METHODS])
def test_methods_when_overridden_without_super_leave_handshake_pings_limits_and_close(name):
    quick = {"handshake_s": 7.0, "ping_interval_s": 20.0, "ping_timeout_s": 7.0, "max_message_bytes": 1000}
    silent = type("Silent", (WebSocketSession,), {**quick, name: lambda self, *args, **how: None})
    late = drive(silent())
    assert late.receive(b"GET / HTTP/1.1\r\nHo") + late.run(6.9) == b""
    assert late.run(0.2).startswith(b"HTTP/1.1 408 ")
    peers = [drive(silent(), limits=Limits.parse("1KiB,10,60s", "4KiB,20,120s")) for _ in range(4)]
    for peer in peers:
        assert peer.receive(handshake()).startswith(b"HTTP/1.1 101 ")
        assert peer.receive(masked(TEXT, "hi") + masked(PING, "x")) == frame(b"x", 0x80 | PONG)
    idle, leaving, loud, slow = peers
    assert idle.run(20.1) == PINGED
    assert idle.run(7.1) == close_frame(1011, "no answer to a ping")
    assert leaving.receive(masked(CLOSE, close_payload(4321))) == close_frame(4321)
    assert loud.receive(masked(TEXT, "x" * 1001)) == close_frame(1009, "the message is larger than 1000 bytes")
    slow.take(0)
    for _ in range(10):
        slow.connection.sender.send(frame(b"x" * 1000))
    slow.run(1.0)
    assert slow.take(None) == close_frame(1013, "too slow: more waits for you than the limit")
    reasons = ["HANDSHAKE_TIMEOUT", "IDLE", "PEER_CLOSED", "LIMIT_HIT", "HARD_LIMIT"]
    assert [peer.closed[0].name for peer in (late, *peers)] == reasons
    assert [failure for peer in (late, *peers) for failure in peer.failures] == []


@pytest.mark.parametrize("name", OWN_METHODS)
def test_methods_of_any_session_when_overridden_without_super_leave_limits_and_the_end(name):
    mute = type("Mute", (Session,), {name: lambda self, *args, **how: None})
    slow, leaving, ended = (drive(mute(), limits=Limits.parse("1KiB,10,60s", "4KiB,20,120s")) for _ in range(3))
    slow.take(0)
    for _ in range(10):
        slow.connection.sender.send(b"x" * 1000)
    leaving.receive(b"octets")
    leaving.end_input()
    ended.connection.sender.send(b"last")
    ended.connection.close_after_flush()
    assert ended.run() == b"last"
    reasons = [CloseReason.HARD_LIMIT, CloseReason.PEER_CLOSED, CloseReason.FINISHED]
    assert [(peer.run(1.0), peer.closed[0])[1] for peer in (slow, leaving, ended)] == reasons


def test_timers_of_the_application_when_it_sets_some_are_beside_those_of_the_protocol():
    called = []

    def timer(self, now):
        called.append(now)
        self.connection.set_timer(now + 7.0)

    peer, session = opened(
        accepted=lambda self: self.connection.set_timer(self.connection.now() + 7.0),
        timer=timer,
        ping_interval_s=20.0,
        ping_timeout_s=5.0,
    )
    assert peer.run(20.1) == PINGED
    assert len(called) == 2
    session.connection.set_timer(None)
    assert peer.run(5.1) == close_frame(1011, "no answer to a ping")
    assert len(called) == 2


def test_requests_when_opened_is_a_coroutine_wait_for_it_and_not_for_longer_than_a_handshake():
    async def opened(self):
        await asyncio.sleep(self.takes_s)

    slow = type("Slow", (Alone,), {"opened": opened, "handshake_s": 7.0})
    for takes_s, status in ((3.0, 101), (8.0, 503)):
        peer = drive(type("Taking", (slow,), {"takes_s": takes_s})())
        assert peer.receive(handshake()) + peer.run(2.9) == b""
        assert peer.run(4.2).startswith(b"HTTP/1.1 %d " % status)
        assert peer.failures == []


def test_clients_when_silent_are_pinged_after_the_interval_and_ended_after_the_timeout():
    peer, _ = opened(ping_interval_s=20.0, ping_timeout_s=7.0)
    assert peer.run(19.9) == b""
    assert peer.run(0.2) == PINGED
    assert peer.run(6.8) == b""
    assert peer.run(0.3) == close_frame(1011, "no answer to a ping")
    assert peer.closed[0] is CloseReason.IDLE


def test_clients_when_they_answer_or_speak_are_pinged_no_more_often_than_the_interval():
    """Ten minutes of a client that answers: one ping for each interval; anything it sends puts the next off."""
    peer, _ = opened(ping_interval_s=20.0, ping_timeout_s=20.0)
    pings = 0
    for _ in range(600):
        sent = peer.run(1.0)
        if sent:
            assert sent == PINGED
            pings += 1
            peer.receive(masked(PONG))
    assert 27 <= pings <= 30
    for _ in range(10):
        assert peer.run(15.0) == b""
        assert peer.receive(masked(TEXT, "x")) == frame(b"x", 0x80 | TEXT)
    assert peer.closed is None


def test_clients_when_pings_are_off_may_be_silent_for_ever():
    peer, _ = opened(ping_interval_s=0.0)
    assert peer.run(100_000.0) == b""
    peer, _ = opened(ping_interval_s=100.0, ping_timeout_s=0.0)
    assert set(re.findall(b"..", peer.run(10_000.0))) == {PINGED}
    assert peer.closed is None


def test_clients_when_they_take_nothing_are_not_ended_for_silence():
    """Their answer may wait behind what they are sent: for them there are the Sender's times."""
    peer, session = opened(ping_interval_s=1.0, ping_timeout_s=1.0)
    peer.take(0)
    session.send_message("x" * 1000)
    peer.run(10.0)
    assert peer.closed is None
    peer.take(None)
    peer.run(3.0)
    assert peer.closed[0] is CloseReason.IDLE


def test_clients_when_they_go_on_taking_what_they_are_sent_are_not_ended_for_silence():
    """A slow line with megabytes ahead of the ping brings the answer late; one that stands still is ended."""
    peer, session = opened(ping_interval_s=1.0, ping_timeout_s=2.0)
    peer.run(1.1)
    for _ in range(20):
        session.send_message("x")
        peer.run(1.0)
    assert peer.closed is None
    peer.run(4.5)
    assert peer.closed[0] is CloseReason.IDLE


def test_clients_when_a_handler_runs_and_no_answer_is_waited_for_are_pinged_at_the_interval():
    async def received_message(self, message):
        await asyncio.sleep(1000.0)

    peer, _ = opened(ping_interval_s=10.0, ping_timeout_s=0.0, received_message=received_message)
    peer.receive(masked(TEXT, "work"))
    assert peer.run(45.0) == 4 * PINGED
    assert peer.closed is None


def test_clients_when_a_handler_runs_long_are_not_ended_for_silence():
    """Their answer to a ping is behind the message that is handled, and not read before."""

    async def received_message(self, message):
        await asyncio.sleep(100.0)
        self.send_message("done")

    peer, _ = opened(ping_interval_s=1.0, ping_timeout_s=2.0, received_message=received_message)
    peer.receive(masked(TEXT, "work") + masked(PONG))
    assert peer.run(99.0) == PINGED
    assert peer.run(1.5) == frame(b"done", 0x80 | TEXT)
    assert peer.closed is None
    peer.run(5.0)
    assert peer.closed[0] is CloseReason.IDLE


def test_coroutines_when_run_beside_keep_no_message_waiting_and_end_with_the_connection():
    async def talk(session):
        while True:
            await asyncio.sleep(60.0)
            session.send_message("a word")

    def accepted(self):
        self.connection.run_coroutine(talk(self), "talk")

    peer, session = opened(accepted=accepted, ping_interval_s=0.0)
    assert peer.receive(masked(TEXT, "hi")) == frame(b"hi", 0x80 | TEXT)
    assert peer.run(121.0) == 2 * frame(b"a word", 0x80 | TEXT)
    assert not session.connection.core.movable()
    assert peer.receive(masked(CLOSE, close_payload(1000))) == close_frame(1000)
    assert peer.run(600.0) == b""
    assert peer.failures == []


def test_requests_when_they_or_the_decision_take_too_long_get_408_or_503():
    async def requested(self, request):
        await asyncio.sleep(3600.0)

    late = type("Late", (Alone,), {"handshake_s": 7.0, "requested": requested})
    for begun, status in ((b"GET / HTTP/1.1\r\nHo", 408), (handshake(), 503)):
        peer = drive(late())
        assert peer.receive(begun) == b""
        assert peer.run(6.9) == b""
        assert peer.run(0.2).startswith(b"HTTP/1.1 %d " % status)
        assert peer.closed[0] is CloseReason.HANDSHAKE_TIMEOUT
        assert peer.failures == []


@pytest.mark.parametrize("taken", [0, 1, 5, 999])
def test_slow_clients_when_cut_at_a_hard_limit_are_told_as_soon_as_they_take_something(taken):
    """The message of which they have some is finished, and nothing else but the close frame comes."""
    peer, session = opened(limits=Limits.parse("1KiB,10,60s", "4KiB,20,120s"))
    messages = [bytes([number]) * 1000 for number in range(10)]
    peer.take(taken)
    for message in messages:
        session.send_message(message)
    begun = peer.run()
    assert len(begun) == taken
    assert peer.closed[0] is CloseReason.HARD_LIMIT
    rest = peer.take(None)
    first = frame(messages[0], 0x80 | BINARY)
    told = close_frame(1013, "too slow: more waits for you than the limit")
    assert begun + rest == (first + told if taken else told)
    assert peer.run(60.0) == b""


def test_slow_clients_when_they_take_nothing_after_their_end_are_reset():
    peer, session = opened(limits=Limits.parse("1KiB,10,60s", "4KiB,20,120s"))
    peer.take(0)
    for _ in range(10):
        session.send_message(b"x" * 1000)
    peer.run(1.0)
    assert peer.closed[0] is CloseReason.HARD_LIMIT
    peer.run(4.0)
    assert peer.connection.core.host.sock.fileno() != -1
    peer.run(5.0)
    assert peer.connection.core.host.sock.fileno() == -1
    assert peer.failures == []


def test_followers_when_they_stop_reading_get_the_newest_of_each_key_when_they_go_on():
    topic = Topic(flush_interval_s=0.0)
    peer, _ = opened(accepted=lambda self: self.follow(topic), limits=Limits.parse("1KiB,10,60s", "4KiB,20,120s"))
    peer.take(0)
    for number in range(1000):
        topic.publish(f"a{number}", key="a")
        topic.publish(f"b{number}", key="b")
    peer.run(1.0)
    assert peer.closed is None
    assert peer.take(None) == frame(b"a999", 0x80 | TEXT) + frame(b"b999", 0x80 | TEXT)


@pytest.mark.parametrize("piece_bytes", [1, 2, 1 << 20])
def test_handlers_when_coroutines_are_called_one_after_the_other_in_any_pieces(piece_bytes):
    class Slow(Alone):
        async def received_message(self, message):
            await asyncio.sleep(1.0)
            self.send_message(message)

    peer, _ = opened(Slow)
    texts = [f"text {number}" for number in range(20)]
    wire = b"".join(masked(TEXT, text) for text in texts)
    assert peer.receive(wire, piece_bytes=piece_bytes) == b""
    assert peer.run(1.5) == frame(texts[0].encode(), 0x80 | TEXT)
    assert peer.run(30.0) == b"".join(frame(text.encode(), 0x80 | TEXT) for text in texts[1:])


def test_messages_when_the_policy_drops_for_a_slow_client_are_left_out_whole():
    """At the soft limit what may be dropped is refused; what may not arrives, and all that arrives is whole frames."""
    limits = Limits.parse("2KiB,100,60s", "64KiB,1000,120s")
    session = Alone()
    peer = drive(session, limits=limits, policy=DropDroppable())
    peer.receive(handshake())
    peer.take(10)
    outcomes = [session.send_message(f"{number:03}" * 100).outcome for number in range(50)]
    kept = session.send_message("kept", droppable=False)
    assert (SendOutcome.DROPPED in outcomes, kept.outcome) == (True, SendOutcome.ACCEPTED)
    frames = split(peer.run(1.0) + peer.take(None))
    assert frames[-1] == frame(b"kept", 0x80 | TEXT)
    assert len(frames) < 50
    assert peer.closed is None


@pytest.mark.parametrize("name", ["origins", "subprotocols"])
def test_sessions_when_a_list_is_one_text_are_refused(name):
    """Of ``origins = "https://example.com"`` any part of the text would do."""
    with pytest.raises(ConfigError, match=name):
        opened(**{name: "https://example.com"})


def split(wire):
    """Return the frames of a server's octets, none of which is longer than 64 KiB."""
    frames = []
    while wire:
        size = wire[1] + 2 if wire[1] < 126 else int.from_bytes(wire[2:4], "big") + 4
        frames.append(wire[:size])
        wire = wire[size:]
    return frames


message = st.one_of(st.text(max_size=300), st.binary(max_size=300))
pings = st.lists(st.binary(max_size=125), max_size=2)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_messages_when_cut_anywhere_with_pings_between_are_echoed_whole(data):
    """Fragments, pieces of input and pings in any order: the echo is the messages, and the pongs are the pings."""
    peer, _ = opened()
    wire, texts, pinged = b"", [], []
    for text in data.draw(st.lists(message, max_size=4)):
        payload = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        cuts = sorted(data.draw(st.lists(st.integers(0, len(payload)), max_size=3)))
        parts = [payload[start:end] for start, end in zip([0, *cuts], [*cuts, len(payload)], strict=True)]
        for at, part in enumerate(parts):
            opcode = 0 if at else TEXT if isinstance(text, str) else BINARY
            wire += masked(opcode, part, fin=at == len(parts) - 1)
            for ping in data.draw(pings) if at < len(parts) - 1 else ():
                wire += masked(PING, ping)
                pinged.append(frame(ping, 0x80 | PONG))
        texts.append(frame(payload, 0x80 | (TEXT if isinstance(text, str) else BINARY)))
    wire += masked(CLOSE, close_payload(1000))
    got = b""
    while wire:
        size = data.draw(st.integers(1, len(wire)))
        got += peer.receive(wire[:size])
        wire = wire[size:]
    frames = split(got)
    assert frames[-1] == close_frame(1000)
    assert [one for one in frames if one[0] in {0x81, 0x82}] == texts
    assert [one for one in frames if one[0] == 0x8A] == pinged
    assert len(frames) == len(texts) + len(pinged) + 1
    assert peer.closed[0] is CloseReason.PEER_CLOSED
    assert peer.failures == []


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=600), st.integers(1, 64))
def test_octets_when_they_are_anything_end_in_a_close_frame_or_wait_for_more(octets, piece_bytes):
    """Nothing that a client sends is a failure of ours, and the last that it gets is whole."""
    peer, _ = opened()
    got = peer.receive(octets, piece_bytes=piece_bytes)
    assert peer.failures == []
    assert (peer.closed is not None) == any(one[0] == 0x80 | CLOSE for one in split(got)[-1:])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 64))
def test_octets_when_they_come_instead_of_a_request_are_answered_or_wait_for_more(octets, piece_bytes):
    peer = drive(Alone())
    got = peer.receive(octets, piece_bytes=piece_bytes)
    assert peer.failures == []
    assert (peer.closed is None) == (got == b"")
    assert got == b"" or got.startswith(b"HTTP/1.1 4")
