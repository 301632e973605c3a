"""What a peer that does not publish may make a server session hold: little, however much it announces or sends."""

from __future__ import annotations

import pytest
from rtmp_session_kit import ScriptedClient

from flowctl.errors import LimitExceededError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.events import PublishRequested
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.rtmp.wire import Message

PIECE = 4096
LIMITS = WireLimits(unpublished_bytes=16 * 1024)
KEY = Message(6, 0, 9, 1, b"\x17\x01\0\0\0" + b"k" * 100_000)


def pieces(data):
    return [data[at : at + PIECE] for at in range(0, len(data), PIECE)]


@pytest.fixture
def client():
    return ScriptedClient(ServerSessionConfig(limits=LIMITS), split=pieces)


def refused(client, *messages):
    """Send what goes too far; return what was held when it was noticed."""
    with pytest.raises(LimitExceededError) as caught:
        client.send(*messages)
    assert caught.value.limit == "unpublished_bytes"
    assert caught.value.maximum == LIMITS.unpublished_bytes
    return client.session._reader.unfinished_bytes


def test_long_message_when_nothing_was_asked_for_ends_the_session_early(client):
    assert refused(client, KEY) <= LIMITS.unpublished_bytes + PIECE
    (reply,) = client.replies()[-1:]
    assert "unpublished_bytes" in reply.arguments[0]["description"]


def test_long_message_when_connected_or_playing_ends_the_session_too(client):
    client.play()
    assert refused(client, KEY) <= LIMITS.unpublished_bytes + PIECE
    assert client.statuses() == [("error", commands.PLAY_FAILED)]


def test_many_short_beginnings_when_not_publishing_count_together(client):
    client.connect()
    last_chunk = 1 + 9000 % 128  # left out, so that the message stays unfinished at the end of a chunk
    first = client.writer.write(Message(6, 0, 9, 1, bytes(9000)))[:-last_chunk]
    client.octets(first)
    second = client.writer.write(Message(8, 0, 9, 1, bytes(9000)))[:-last_chunk]
    with pytest.raises(LimitExceededError, match="unpublished_bytes"):
        client.octets(second)


def test_long_message_when_publishing_passes(client):
    client.publish()
    (event,) = client.send(KEY)
    assert event == KEY


def test_long_message_when_sent_along_with_publish_waits_for_the_answer(client):
    client.connect()
    client.create_stream()
    publish = commands.command("publish", 3, None, "room", stream_id=1)
    client.split = lambda data: [data[:PIECE], *pieces(data[PIECE:])]
    (event,) = client.send(publish, KEY)
    assert isinstance(event, PublishRequested)
    client.session.accept_publish(1)
    assert client.session.resume(client.now) == [KEY]


def test_long_message_when_the_publish_was_refused_is_no_longer_taken(client):
    client.connect()
    client.create_stream()
    client.call("publish", 3, None, "room", stream_id=1)
    client.session.reject_publish(1)
    refused(client, KEY)


def test_short_messages_when_not_publishing_pass_however_many(client):
    client.connect()
    for number in range(20):
        client.send(Message(6, number, 9, 7, bytes(15_000)))
    assert not client.session.closed


def test_held_messages_when_not_publishing_are_held_to_the_same_limit(client):
    client.play()
    for number in range(7):
        client.send(Message(6, number, 9, 7, bytes(2000)), control_only=True)
    with pytest.raises(LimitExceededError) as caught:
        client.send(Message(6, 7, 9, 7, bytes(2500)), control_only=True)
    assert (caught.value.limit, caught.value.maximum) == ("unpublished_bytes", LIMITS.unpublished_bytes)
    publisher = ScriptedClient(ServerSessionConfig(limits=LIMITS), split=pieces)
    publisher.publish()
    for number in range(20):
        publisher.send(Message(6, number, 9, 1, bytes(2000)), control_only=True)
    assert publisher.session.held_bytes > 20 * 2000
