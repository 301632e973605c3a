"""What a server session holds back, how often it answers, how long it waits, and what it says when it gives up."""

import dataclasses
import sys

import pytest
from rtmp_session_kit import DATA, ScriptedClient, ping, video

from flowctl.errors import ConfigError, LimitExceededError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.events import (
    Acknowledged,
    PauseRequested,
    Pong,
    PublishRequested,
    StreamClosed,
)
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.messages import (
    EVENT_PING_REQUEST,
    EVENT_PING_RESPONSE,
    EVENT_SET_BUFFER_LENGTH,
    Acknowledgement,
    PeerBandwidth,
    UserControl,
    WindowAckSize,
    encode_control,
)
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.rtmp.wire import Message

# -------------------------------------------------------------------------- holding back, control_only, resume


def test_texts_of_peers_are_shared_and_not_kept_for_ever(monkeypatch):
    """Equal names are one object, unequal ones are kept up to a number; interned, Python 3.12 would never free them."""
    interned, agents, names = [], [], []
    monkeypatch.setattr(sys, "intern", lambda text: interned.append(text) or text)
    for number in range(1500):
        client = ScriptedClient()
        agents.append(client.connect(flashVer=f"player {number // 2}").flash_ver)
        client.create_stream()
        (event,) = client.call("play", 3, None, f"room {number // 2}", stream_id=1)
        names.append(event.url.path)
    assert len(set(map(id, agents))) == 750
    assert (agents[-1], names[-1]) == ("player 749", "live/room 749")
    assert [text for text in interned if "room" in text or "player" in text] == []
    assert commands.shared(b"a name".decode()) is commands.shared(b"a name".decode())
    found = commands._shared.cache_info()
    assert found.currsize <= found.maxsize == 1024
    secret = b"token=canary".decode()
    assert commands.shared(secret) is secret
    assert commands.shared(b"token=canary".decode()) is not secret


def test_pipelined_messages_wait_for_the_answer(client):
    """A client that does not wait for the reply to publish loses nothing: its media comes after the accept."""
    client.connect()
    client.create_stream()
    messages = [video(0), video(40)]
    publish = commands.command("publish", 3, None, "room", stream_id=1)
    (event,) = client.send(publish, *messages)
    assert isinstance(event, PublishRequested)
    assert client.session.deciding
    assert client.session.resume(client.now) == []
    assert client.session.held_bytes > 0
    client.session.accept_publish(1)
    assert client.session.resume(client.now) == messages
    assert client.session.held_bytes == 0


def test_held_messages_come_with_the_next_input_or_tick_when_nobody_resumes():
    for call in ("receive", "tick"):
        client = ScriptedClient()
        client.connect()
        client.create_stream()
        client.send(commands.command("publish", 3, None, "room", stream_id=1), video(0))
        client.session.accept_publish(1)
        assert client.session.next_deadline(client.now) == client.now
        events = client.send(video(40)) if call == "receive" else client.session.tick(client.now)
        assert events[0] == video(0)


def test_held_media_of_a_refused_publisher_is_dropped(client):
    client.connect()
    client.create_stream()
    client.send(commands.command("publish", 3, None, "room", stream_id=1), *[video(at) for at in range(300)])
    client.session.reject_publish(1)
    assert client.session.resume(client.now) == []
    assert (client.session.held_bytes, client.session.counters) == (0, {"held-of-closed-stream": 300})


def test_control_only_obeys_control_and_holds_the_rest(client):
    """While our output is overloaded: acks, windows and closing pass, pings stay unanswered, commands wait."""
    client.play()
    pause = commands.command("pause", 4, None, True, 0.0, stream_id=1)
    acknowledgement = encode_control(Acknowledgement(5000))
    assert client.send(pause, ping(), acknowledgement, control_only=True) == [Acknowledged(5000)]
    assert client.session.data_to_send() == b""
    assert client.session.last_acknowledged_bytes == 5000
    assert client.session.resume(client.now) == [PauseRequested(1, True)]
    assert client.send(ping()) == []
    assert client.replies()[-1].event == EVENT_PING_RESPONSE


@pytest.mark.parametrize("name", ["closeStream", "deleteStream"])
def test_control_only_closes_streams_at_once(name):
    client = ScriptedClient()
    client.play()
    client.call("pause", 4, None, True, 0.0, stream_id=1, control_only=True)
    close = (None, 1.0) if name == "deleteStream" else (None,)
    stream_id = 0 if name == "deleteStream" else 1
    assert client.call(name, 0, *close, stream_id=stream_id, control_only=True) == [StreamClosed(1, name)]
    assert client.session.resume(client.now) == []


def test_paused_input_is_bounded():
    client = ScriptedClient(ServerSessionConfig(paused_input_bytes=4096))
    client.publish()
    with pytest.raises(LimitExceededError) as caught:
        client.send(video(payload=bytes(5000)), control_only=True)
    assert (caught.value.limit, caught.value.maximum) == ("paused_input_bytes", 4096)


# --------------------------------------------------------------------------- acknowledgements, pings, rates


def test_acknowledgements_follow_the_peers_window(client):
    client.publish()
    client.send(encode_control(WindowAckSize(400_000)))
    start = client.session.bytes_received
    client.send(*[video(at, bytes(10_000)) for at in range(19)])
    assert client.replies() == []
    client.send(*[video(at, bytes(10_000)) for at in range(5)])
    (acknowledgement,) = client.replies()
    assert start + 200_000 <= acknowledgement.sequence_number <= client.session.bytes_received
    for window in (0, 1):
        client.send(encode_control(WindowAckSize(window)))
        client.replies()
        client.send(*[video(at, bytes(1000)) for at in range(130)])
        assert len(client.replies()) in (1, 2)


def test_acknowledged_counter_starts_anew_at_f0000000():
    """FMLE drops the connection when the counter passes 2^32."""
    client = ScriptedClient()
    client.publish()
    client.session._acknowledge(0xF0000000 + 5)
    assert client.replies() == [Acknowledgement(5)]


def test_missing_acknowledgements_and_peer_bandwidth_do_not_stall():
    client = ScriptedClient()
    client.play()
    client.send(*[encode_control(PeerBandwidth(100_000))] * 3)
    assert client.replies() == [WindowAckSize(100_000)]
    assert client.session.next_deadline(client.now) == 60.0


def test_pings_are_answered_once_per_interval():
    client = ScriptedClient()
    client.play()
    client.send(ping(1), ping(2), ping(3))
    assert client.replies() == [UserControl(EVENT_PING_RESPONSE, timestamp=1)]
    client.now = 1.0
    client.send(ping(4))
    assert client.replies() == [UserControl(EVENT_PING_RESPONSE, timestamp=4)]
    assert client.session.counters["ping-unanswered"] == 2


@pytest.mark.parametrize(
    "message",
    [ping(), encode_control(Acknowledgement(1)), Message(3, 0, 99, 0, b"x"), Message(3, 0, 19, 0, b"x")],
    ids=["ping", "acknowledgement", "unknown type", "shared object"],
)
def test_flood_of_control_messages_ends_the_session(message):
    client = ScriptedClient()
    client.play()
    for now in (1.0, 2.0):
        client.now = now
        client.send(*[message] * 200)
    with pytest.raises(LimitExceededError) as caught:
        client.send(message)
    assert (caught.value.limit, caught.value.value) == ("control_messages_per_second", 201)


def test_flood_of_commands_ends_the_session():
    client = ScriptedClient()
    client.connect()
    client.now = 5.0
    for number in range(50):
        client.call("_checkbw", number, None)
    with pytest.raises(LimitExceededError) as caught:
        client.call("_checkbw", 50, None)
    assert (caught.value.limit, caught.value.maximum) == ("commands_per_second", 50)
    status = client.replies()[-1]
    assert "commands_per_second" in status.arguments[0]["description"]


def test_message_streams_are_limited():
    client = ScriptedClient()
    client.connect()
    assert [client.create_stream() for _ in range(8)] == list(range(1, 9))
    client.call("deleteStream", 0, None, 3.0)
    assert client.create_stream() == 3
    with pytest.raises(LimitExceededError) as caught:
        client.call("createStream", 2, None)
    assert (caught.value.limit, caught.value.maximum) == ("message_streams", 8)


def test_buffer_length_is_taken(client):
    client.play()
    message = encode_control(UserControl(EVENT_SET_BUFFER_LENGTH, stream_id=1, buffer_ms=3000))
    assert (client.send(message), client.session.counters) == ([], {})


# -------------------------------------------------------------------------------------------------- time


def expect_timeout(client, limit, at):
    """Check that the session waits until `at` and then gives up over `limit`."""
    session = client.session
    assert session.next_deadline(client.now) == at
    assert session.tick(at - 0.001) == []
    with pytest.raises(LimitExceededError) as caught:
        session.tick(at)
    assert caught.value.limit == limit
    assert session.closed
    assert session.next_deadline(at) is None


def begun_handshake(client):
    client.octets(b"\3abc")


def connecting(client):
    client.shake()


def publishing_data(client):
    client.shake()
    client.publish()
    client.send(Message(4, 0, DATA, 1, b"\2\0\1x"))


def connected(client):
    client.shake()
    client.connect()


def refused(client):
    client.shake()
    client.call("connect", 1, {"app": "live"})
    client.session.reject_connect("no")


@pytest.mark.parametrize(
    ("reach", "limit", "at"),
    [
        (begun_handshake, "handshake_time_s", 5.0),
        (connecting, "first_command_s", 12.0),
        (connected, "first_media_s", 22.0),
        (publishing_data, "first_media_s", 22.0),
        (refused, "first_command_s", 12.0),
    ],
)
def test_peer_that_stays_in_a_phase_is_cut(reach, limit, at):
    client = ScriptedClient(handshake=False)
    client.now = 2.0
    reach(client)
    client.session.next_deadline(2.0)
    expect_timeout(client, limit, at)


def test_time_of_the_caller_is_not_counted():
    client = ScriptedClient()
    client.call("connect", 1, {"app": "live"})
    assert client.session.next_deadline(0.0) == 60.0
    assert client.session.tick(50.0) == []


def test_media_and_play_end_the_waiting():
    publisher = ScriptedClient()
    publisher.publish()
    publisher.send(video())
    assert publisher.session.next_deadline(0.0) == 60.0
    player = ScriptedClient()
    player.play()
    assert player.session.next_deadline(0.0) == 60.0


def test_silent_peer_is_pinged_and_then_cut():
    client = ScriptedClient()
    client.play()
    client.session.tick(60.0)
    (request,) = client.replies()
    assert request.event == EVENT_PING_REQUEST
    client.now = 60.0  # by the clock of the loop, which is read once a turn: only the pong tells
    pong = encode_control(UserControl(EVENT_PING_RESPONSE, timestamp=request.timestamp))
    assert client.send(pong) == [Pong(request.timestamp)]
    assert client.session.next_deadline(60.0) == 120.0
    client.session.tick(120.0)
    expect_timeout(client, "ping_silence_s", 150.0)


def test_any_octet_saves_a_pinged_peer():
    client = ScriptedClient()
    client.play()
    client.session.tick(60.0)
    client.now = 70.0
    client.send(encode_control(Acknowledgement(1)))
    assert client.session.next_deadline(70.0) == 130.0
    assert client.session.tick(129.0) == []
    client.replies()
    client.session.tick(130.0)
    assert [reply.event for reply in client.replies()] == [EVENT_PING_REQUEST]


def test_pong_to_no_ping_is_taken():
    client = ScriptedClient()
    client.play()
    pong = encode_control(UserControl(EVENT_PING_RESPONSE, timestamp=5))
    assert client.send(pong) == [Pong(5)]


def test_silence_is_excused_while_we_do_not_read():
    client = ScriptedClient()
    client.publish()
    client.session.input_paused = True
    for now in (30.0, 200.0):
        assert client.session.tick(now) == []
    client.session.input_paused = False
    expect_timeout(client, "first_media_s", 220.0)


def test_limits_of_zero_are_off():
    limits = WireLimits(handshake_time_s=0, first_command_s=0, first_media_s=0, ping_after_s=0, commands_per_second=0)
    config = ServerSessionConfig(limits=limits, control_messages_per_second=0)
    client = ScriptedClient(config, handshake=False)
    assert client.session.next_deadline(0.0) is None
    client.shake()
    client.connect()
    for number in range(100):
        client.call("_checkbw", number, None)
        client.replies()
    client.send(*[ping()] * 500)
    assert client.session.tick(1e6) == []


# -------------------------------------------------------------------------------------------------- output


def test_output_that_nobody_collects_is_bounded():
    client = ScriptedClient(ServerSessionConfig(pending_output_bytes=4096))
    client.play()
    pauses = [commands.command("pause", number, None, True, 0.0, stream_id=1) for number in range(40)]
    with pytest.raises(LimitExceededError) as caught:
        client.send(*pauses)
    assert caught.value.limit == "pending_output_bytes"


def test_output_is_whole_messages_with_full_headers(client):
    client.play()
    for _ in range(3):
        client.call("pause", 4, None, True, 0.0, stream_id=1)
        octets = client.session.data_to_send()
        assert len(ChunkReader(WireLimits(), type3_after_type0="zero").feed(octets)) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("out_chunk_size", 127),
        ("name_max_chars", 0),
        ("paused_input_bytes", 0),
        ("control_messages_per_second", -1),
        ("ping_answer_interval_s", float("nan")),
        ("credentials", {"": "x"}),
        ("credentials", {"bob": ""}),
        ("credentials", {"a&b": "x"}),
    ],
)
def test_configuration_names_the_field_that_is_wrong(field, value):
    with pytest.raises(ConfigError, match=field if field != "credentials" else "user"):
        ServerSessionConfig(**{field: value})


def test_configuration_shows_no_credentials():
    config = ServerSessionConfig(credentials={"bob": "hunter2"})
    assert "hunter2" not in repr(config)
    assert dataclasses.replace(config, sample_access=True).authenticator is not None
