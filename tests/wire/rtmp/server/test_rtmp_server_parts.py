"""What a server session is made of: held messages, message streams, and the table of its commands."""

from __future__ import annotations

import pytest

from flowctl.errors import LimitExceededError, RemoteProtocolError
from flowctl.wire.rtmp.server.replies import COURTESIES
from flowctl.wire.rtmp.server.session import ServerSession
from flowctl.wire.rtmp.server.streams import HeldMessages, MessageStreams
from flowctl.wire.rtmp.states import StreamInput, StreamState
from flowctl.wire.rtmp.wire import Message

OVERHEAD_BYTES = 96


def message(text: str, msid: int = 1) -> Message:
    return Message(6, 0, 9, msid, text.encode())


def drained(held: HeldMessages) -> str:
    return "".join(held.pop().payload.decode() for _ in range(len(held)))


def test_held_messages_when_taken_come_in_order_and_are_paid_back():
    held = HeldMessages()
    for text in "abc":
        held.append(message(text))
    assert held.size_bytes == 3 * (1 + OVERHEAD_BYTES)
    assert drained(held) == "abc"
    assert (len(held), held.size_bytes) == (0, 0)


def test_held_messages_when_some_are_put_first_come_before_the_others():
    held = HeldMessages()
    held.append(message("c"))
    held.put_first([message("a"), message("b")])
    assert held.size_bytes == 3 * (1 + OVERHEAD_BYTES)
    held.put_first([])
    assert drained(held) == "abc"


def test_held_messages_when_a_stream_is_dropped_keep_the_others():
    held = HeldMessages()
    for text, msid in (("a", 1), ("b", 2), ("c", 1), ("d", 3)):
        held.append(message(text, msid))
    assert held.drop_stream(1) == 2
    assert held.drop_stream(9) == 0
    assert held.size_bytes == 2 * (1 + OVERHEAD_BYTES)
    assert drained(held) == "bd"


def test_message_streams_when_opened_take_the_lowest_free_id_up_to_the_limit():
    streams = MessageStreams()
    for expected in (1, 2, 3):
        assert streams.open(streams.free_id(), 3).stream_id == expected
    with pytest.raises(LimitExceededError, match="message_streams"):
        streams.open(streams.free_id(), 3)
    second = streams.find(2)
    assert second is not None
    assert streams.move(second, StreamInput.DELETE)
    assert streams.find(2) is None
    assert streams.free_id() == 2


def test_message_streams_when_one_publishes_say_so_until_it_stops():
    streams = MessageStreams()
    stream = streams.open(1, 8)
    streams.move(stream, StreamInput.PUBLISH)
    assert (streams.deciding, streams.active) == (True, False)
    streams.move(stream, StreamInput.ACCEPT_PUBLISH)
    assert (streams.deciding, streams.active) == (False, True)
    assert (streams.publishing, streams.awaiting) == ({1}, {1})
    assert not streams.move(stream, StreamInput.MEDIA)
    streams.has_sent(1)
    assert (streams.publishing, streams.awaiting) == ({1}, set())
    streams.move(stream, StreamInput.CLOSE)
    assert (streams.publishing, streams.awaiting) == (set(), set())
    assert stream.state is StreamState.IDLE


def test_message_streams_when_the_peer_may_not_leave_the_state_as_it_was():
    streams = MessageStreams()
    stream = streams.open(1, 8)
    streams.move(stream, StreamInput.PLAY)
    with pytest.raises(RemoteProtocolError):
        streams.move(stream, StreamInput.PUBLISH)
    assert stream.state is StreamState.PLAY_DECIDING


@pytest.mark.parametrize(
    ("name", "found"),
    [("room", []), ("a/room", [1]), ("live/a/room", [1]), ("b/room", [2]), ("hall", [])],
)
def test_message_streams_when_two_publish_are_told_apart_by_name(name, found):
    streams = MessageStreams()
    for path in ("live/a/room", "live/b/room"):
        stream = streams.open(streams.free_id(), 8)
        stream.path = path
        streams.move(stream, StreamInput.PUBLISH)
        streams.move(stream, StreamInput.ACCEPT_PUBLISH)
    assert [stream.stream_id for stream in streams.publishing_as(name, "live")] == found


def test_commands_when_looked_up_stand_in_one_table_only():
    assert not ServerSession.rules.keys() & COURTESIES.keys()
