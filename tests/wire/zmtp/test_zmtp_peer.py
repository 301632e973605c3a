"""ZMTP without I/O: greeting, both handshakes, messages however they are cut, heartbeats, what breaks the protocol."""

from __future__ import annotations

import contextlib
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zmtp_kit import BEAT, DEALER, ROUTER, Side, key_pair, mechanisms, pair, talk

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.zmtp import frames as wire
from flowctl.wire.zmtp.mechanism import CurveClient, Null, RefusedError
from flowctl.wire.zmtp.peer import Heartbeat, ZmtpLimits

KINDS = pytest.mark.parametrize("kind", ["null", "curve"])
MESSAGES = [[b"a"], [b"", b"x" * 255, b""], [b"y" * 256], [b"part"] * 9, [os.urandom(70_000), b"end"]]


@KINDS
def test_sides_when_they_meet_know_what_each_says_and_its_key(kind):
    server_keys, client_keys = key_pair(), key_pair()
    seen = []

    def admit(key, said):
        seen.append((key, said))
        return {b"X-Level": b"2"}

    options = {} if kind == "null" else {"server_keys": server_keys, "client_keys": client_keys}
    listening, dialling = pair(kind, admit=admit, **options)
    keys = (b"", b"") if kind == "null" else (client_keys[0], server_keys[0])
    assert (listening.peer.mechanism.key, dialling.peer.mechanism.key) == keys
    assert listening.peer.mechanism.said == {b"socket-type": b"DEALER", b"identity": b"me"}
    assert dialling.peer.mechanism.said == {b"socket-type": b"ROUTER", b"x-level": b"2"}
    assert seen == [(keys[0], listening.peer.mechanism.said)]
    assert (listening.known, dialling.known, listening.peer.open, dialling.peer.open) == (1, 1, True, True)


@KINDS
def test_messages_when_cut_anywhere_come_as_they_were(kind):
    dice = random.Random(1)
    listening, dialling = (Side(item) for item in mechanisms(kind))
    for side in (listening, dialling):
        side.peer.begin()
    said = False
    while dialling.sent or listening.sent or not said:
        for one, other in ((dialling, listening), (listening, dialling)):
            octets = one.take()
            while octets:
                size = dice.choice((1, 2, 9, 63, 5000))
                other.give(octets[:size])
                octets = octets[size:]
        if dialling.peer.open and not said:
            said = True
            for frames in MESSAGES:
                dialling.say(*frames)
    assert listening.messages == MESSAGES
    assert listening.left == b""


@KINDS
def test_message_when_it_has_too_many_parts_is_thrown_away_and_counted(kind):
    listening, dialling = pair(kind, limits=ZmtpLimits(parts=3))
    dialling.say(*[b"x"] * 4)
    dialling.say(*[b"y"] * 3)
    talk(dialling, listening)
    assert listening.messages == [[b"y"] * 3]
    assert listening.peer.too_long_count == 1


@KINDS
def test_part_when_too_long_ends_the_connection_before_it_has_come(kind):
    listening, dialling = pair(kind, limits=ZmtpLimits(part_bytes=1000))
    dialling.say(b"x" * 1000)
    talk(dialling, listening)
    assert listening.messages == [[b"x" * 1000]]
    dialling.say(b"x" * 1001)
    with pytest.raises(LimitExceededError, match=r"part_bytes is 10(01|34)"):
        listening.give(dialling.take()[:20])


@KINDS
@pytest.mark.parametrize("told", [b"400", b""])
def test_peer_when_not_let_in_is_told_so_or_nothing(kind, told):
    def refuse(key, said):
        raise RefusedError(told)

    listening, dialling = (Side(item) for item in mechanisms(kind, admit=refuse))
    for side in (listening, dialling):
        side.peer.begin()
    with pytest.raises(RefusedError):
        talk(dialling, listening)
    if told:
        with pytest.raises(RemoteProtocolError, match=r"refuses us: .400"):
            dialling.give(listening.take())
        assert dialling.peer.refused == told
    else:
        assert listening.take() == b""
    assert not listening.peer.open
    assert not listening.known


@KINDS
def test_silence_when_a_peer_is_asked_and_answers_goes_on_and_ends_where_it_does_not(kind):
    listening, dialling = pair(kind, heartbeat=BEAT)
    listening.peer.asked_at = listening.peer.heard_at = 0.0
    assert listening.peer.look(10.0) == 15.0
    assert not listening.sent
    assert listening.peer.look(15.0) == 30.0
    asked = len(listening.sent)
    assert asked
    assert listening.peer.look(16.0) == 30.0
    assert len(listening.sent) == asked, "asked once"
    talk(listening, dialling, 16.5)
    assert dialling.peer.peer_ttl_s == 30.0
    assert listening.peer.look(17.0) == 30.0
    assert listening.peer.look(32.0) == 46.5
    with pytest.raises(RemoteProtocolError, match=r"said nothing for 30\.0 s"):
        listening.peer.look(46.5)


def test_peer_when_it_listens_only_and_has_said_how_long_is_asked_and_stays():
    """It hears something all the time, and says PING at its own pace; the other side asks at its."""
    long, short = Heartbeat(each_s=15.0, dead_s=30.0), Heartbeat(each_s=5.0, dead_s=10.0)
    listening, dialling = (Side(item, None, beat) for item, beat in zip(mechanisms("null"), (long, short), strict=True))
    for side in (listening, dialling):
        side.peer.begin()
    talk(dialling, listening)
    due = {listening: 0.0, dialling: 0.0}
    for step in range(200):
        now = step * 0.5
        listening.say(b"news")
        due = {side: side.peer.look(now) if now >= at else at for side, at in due.items()}
        talk(listening, dialling, now)
    assert len(dialling.messages) == 200


def test_message_when_its_parts_are_too_much_together_or_never_end_ends_the_connection():
    listening, dialling = pair("null", limits=ZmtpLimits(message_bytes=1000))
    dialling.say(b"x" * 400, b"y" * 600)
    talk(dialling, listening)
    dialling.say(b"x" * 400, b"y" * 601)
    with pytest.raises(LimitExceededError, match="message_bytes is 1001"):
        talk(dialling, listening)
    listening, dialling = pair("null", limits=ZmtpLimits(parts=3))
    for _ in range(48):
        listening.give(wire.frame(b"z" * 1000, wire.MORE))
    with pytest.raises(LimitExceededError, match="parts is 49"):
        listening.give(wire.frame(b"z" * 1000, wire.MORE))
    assert sum(map(len, listening.peer._parts)) <= 1000


def test_message_when_said_before_the_handshake_is_an_error_of_ours():
    for side in map(Side, mechanisms("curve")):
        with pytest.raises(LocalProtocolError, match="before the handshake"):
            side.peer.octets_of([b"x"])


def test_connection_when_replayed_whole_opens_nothing():
    """Whoever recorded all that a peer has said has neither its keys nor its nonces."""
    server_keys = key_pair()
    listening, dialling = (Side(item) for item in mechanisms("curve", server_keys=server_keys))
    for side in (listening, dialling):
        side.peer.begin()
    recorded = []
    while dialling.sent or listening.sent:
        recorded.append(dialling.take())
        listening.give(recorded[-1])
        dialling.give(listening.take())
    dialling.say(b"pay 100")
    recorded.append(dialling.take())
    again = Side(mechanisms("curve", server_keys=server_keys)[0])
    again.peer.begin()
    with pytest.raises(RemoteProtocolError, match="cookie"):
        again.give(b"".join(recorded))
    assert not again.known
    assert again.messages == []


@pytest.mark.parametrize("low", [bytes(32), bytes([1]) + bytes(31)])
def test_key_when_anybody_would_know_what_it_agrees_on_is_refused(low):
    with pytest.raises(RemoteProtocolError, match="a key that is none"):
        CurveClient(DEALER, *key_pair(), low)


def test_ping_when_it_has_a_context_is_answered_with_it():
    listening, _ = pair("null")
    listening.give(wire.command(wire.PING, b"\x00\x64" + b"context"))
    assert listening.take() == wire.command(wire.PONG, b"context")
    listening.give(wire.command(wire.PONG) + wire.command(b"SUBSCRIBE", b"topic"))
    assert listening.take() == b""
    with pytest.raises(RemoteProtocolError):
        listening.give(wire.command(wire.PING, bytes(19)))


WRONG = {
    "no zmtp": b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
    "an old version": wire.greeting(b"NULL", as_server=False).replace(b"\x7f\x03\x01", b"\x7f\x01\x00"),
    "another mechanism": wire.greeting(b"PLAIN", as_server=False),
    "a message at once": wire.greeting(b"NULL", as_server=False) + wire.frame(b"x"),
    "no name": wire.greeting(b"NULL", as_server=False) + wire.frame(b"", wire.COMMAND),
    "another command": wire.greeting(b"NULL", as_server=False) + wire.command(b"HELLO"),
    "half a property": wire.greeting(b"NULL", as_server=False) + wire.command(wire.READY, b"\x03abc\0\0\0\x09x"),
    "property without a name": wire.greeting(b"NULL", as_server=False) + wire.command(wire.READY, bytes(5)),
    "a long handshake": wire.greeting(b"NULL", as_server=False) + wire.command(wire.READY, bytes(9000)),
    "reserved flags": wire.greeting(b"NULL", as_server=False) + b"\x08\x00",
    "a command in parts": wire.greeting(b"NULL", as_server=False) + b"\x05\x00",
}


@pytest.mark.parametrize("octets", WRONG.values(), ids=WRONG.keys())
def test_input_when_it_breaks_the_protocol_is_an_error_that_says_so(octets):
    listening = Side(Null(ROUTER, lambda key, said: {}))
    with pytest.raises(RemoteProtocolError) as caught:
        listening.give(octets)
    assert caught.value.code.startswith(("zmtp-", "limit:"))
    assert len(str(caught.value)) < 200
    assert not listening.known


def test_ready_when_said_twice_breaks_the_protocol():
    listening, _ = pair("null")
    listening.give(wire.command(wire.READY))  # after the handshake it is a command like others
    assert listening.known == 1


def tampered(kind):
    """Yield a pair, and octets of the one that dials, in which one bit of its last frame was changed."""
    listening, dialling = pair("curve")
    dialling.say(b"secret")
    octets = bytearray(dialling.take())
    if kind == "box":
        octets[-1] ^= 1
    elif kind == "nonce":
        octets[2 + 8 + 7] ^= 1
    elif kind == "flags":
        octets[0] |= wire.MORE
    elif kind == "plain":
        octets = bytearray(wire.frame(b"secret" * 20))
    return listening, bytes(octets)


@pytest.mark.parametrize("kind", ["box", "nonce", "flags", "plain"])
def test_frame_when_changed_on_its_way_ends_the_connection(kind):
    listening, octets = tampered(kind)
    with pytest.raises(RemoteProtocolError):
        listening.give(octets)
    assert listening.messages == []


def test_frame_when_sent_again_by_another_is_not_taken_twice():
    listening, dialling = pair("curve")
    dialling.say(b"pay")
    octets = dialling.take()
    listening.give(octets)
    with pytest.raises(RemoteProtocolError, match="nonce"):
        listening.give(octets)
    assert listening.messages == [[b"pay"]]


def test_peer_when_it_expects_another_key_ends_the_handshake():
    listening, dialling = (Side(item) for item in mechanisms("curve", server_key=key_pair()[0]))
    for side in (listening, dialling):
        side.peer.begin()
    with pytest.raises(RemoteProtocolError, match="keys differ"):
        talk(dialling, listening)


def test_peer_when_it_claims_the_key_of_another_is_not_believed():
    server_keys, (victim, _), (_, own_secret) = key_pair(), key_pair(), key_pair()
    listening, _ = mechanisms("curve", server_keys=server_keys)
    listening, dialling = Side(listening), Side(CurveClient(DEALER, victim, own_secret, server_keys[0]))
    for side in (listening, dialling):
        side.peer.begin()
    with pytest.raises(RemoteProtocolError):
        talk(dialling, listening)
    assert not listening.known


def test_cookie_when_it_is_of_another_connection_is_refused():
    """What one connection was welcomed with does not open another one."""
    server_keys = key_pair()
    listening, other = (Side(mechanisms("curve", server_keys=server_keys)[0]) for _ in range(2))
    dialling = Side(CurveClient(DEALER, *key_pair(), server_keys[0]))
    for side in (listening, other, dialling):
        side.peer.begin()
    dialling.give(listening.take())
    hello = dialling.take()
    listening.give(hello)
    dialling.give(listening.take())
    initiate = dialling.take()
    other.give(wire.greeting(b"CURVE", as_server=False))
    with pytest.raises(RemoteProtocolError):
        other.give(initiate)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.booleans(), st.sampled_from(["null", "curve"]))
def test_input_when_random_is_taken_or_refused_and_nothing_else(octets, greeted, kind):
    listening = Side(mechanisms(kind)[0])
    start = wire.greeting(kind.upper().encode(), as_server=False) if greeted else b""
    with contextlib.suppress(RemoteProtocolError):
        listening.give(start + octets)
    assert kind == "null" or not listening.known


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=6), max_size=8), st.data())
def test_messages_when_any_are_said_come_in_their_order(messages, data):
    listening, dialling = pair("null")
    for frames in messages:
        dialling.say(*frames)
    octets = dialling.take()
    while octets:
        size = data.draw(st.integers(1, len(octets)))
        listening.give(octets[:size])
        octets = octets[size:]
    assert listening.messages == messages
