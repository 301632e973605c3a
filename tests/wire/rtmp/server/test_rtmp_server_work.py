"""What a server session does not do, or not at once: aggregates in steps, plays of what plays, unread arguments."""

import pytest
from rtmp_session_kit import SPLITS, ScriptedClient

from flowctl.errors import LimitExceededError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.events import PlayRequested, StreamClosed
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.server.session import STEP_MESSAGES
from flowctl.wire.rtmp.wire import TYPE_AGGREGATE, TYPE_AUDIO, TYPE_COMMAND_AMF0, TYPE_DATA_AMF3, Message


def aggregate(count, first=0):
    parts = (
        b"\x08\x00\x00\x02" + bytes(7) + number.to_bytes(2, "big") + bytes(4) for number in range(first, first + count)
    )
    return Message(4, 0, TYPE_AGGREGATE, 1, b"".join(parts))


def numbers(events):
    return [int.from_bytes(event.payload, "big") for event in events if type(event) is Message]


def drain(client, events):
    found, counts = list(events), []
    while client.session.backlog:
        more = client.session.resume(client.now)
        counts.append(len(more))
        found += more
    return found, counts


@pytest.mark.parametrize("split", SPLITS)
def test_aggregate_when_long_comes_in_steps_and_in_order(split):
    client = ScriptedClient(split=split)
    client.publish()
    events = client.send(
        aggregate(1000),
        Message(4, 9, TYPE_AUDIO, 1, (1000).to_bytes(2, "big")),
        commands.command("deleteStream", 0, None, 1.0),
    )
    found, counts = drain(client, events)
    assert numbers(found) == list(range(1001))
    assert isinstance(found[-1], StreamClosed)
    assert not counts or max(counts) <= STEP_MESSAGES
    assert client.session.held_bytes == 0


def test_aggregates_when_they_follow_each_other_keep_the_order():
    client = ScriptedClient()
    client.publish()
    events = client.send(aggregate(100), aggregate(100, first=100), aggregate(1, first=200))
    found, _ = drain(client, events)
    assert numbers(found) == list(range(201))


def test_play_when_that_name_plays_already_is_answered_and_nothing_more():
    client = ScriptedClient()
    client.play("room")
    events = client.call("play", 0, None, "room", stream_id=1)
    assert [event for event in events if isinstance(event, StreamClosed | PlayRequested)] == []
    assert [code for _, code in client.statuses()] == [commands.PLAY_START]
    assert client.session.counters["play-again"] == 1
    events = client.call("play", 0, None, "hall", stream_id=1)
    assert [type(event) for event in events] == [StreamClosed, PlayRequested]


def test_play_of_the_same_name_in_another_folder_is_another_stream():
    """a/room and b/room are two streams: who changes from one to the other is asked for, and gets the other."""
    client = ScriptedClient()
    client.play("a/room")
    closed, asked = client.call("play", 0, None, "b/room", stream_id=1)
    assert (closed, asked.url.path) == (StreamClosed(1, "play"), "live/b/room")


def test_arguments_when_nobody_reads_them_are_not_decoded():
    """What stands behind the transaction id of such a command may be anything: it costs nothing, and is answered."""
    client = ScriptedClient()
    client.connect()
    client.replies()
    client.send(Message(3, 0, TYPE_COMMAND_AMF0, 0, amf0.encode("whatIsThis", 7.0) + b"\xee" * 60_000))
    client.send(Message(3, 0, TYPE_COMMAND_AMF0, 0, amf0.encode("createStream", 8.0) + b"\xee" * 60_000))
    answers = [(command.name, command.transaction_id) for command in client.replies()]
    assert answers == [("_result", 7.0), ("_result", 8.0)]


def test_command_head_when_there_is_no_transaction_id_is_the_name():
    message = Message(3, 0, TYPE_COMMAND_AMF0, 5, amf0.encode("name", "no number"))
    assert commands.command_head(message).payload == amf0.encode("name")
    assert commands.command_head(message).msid == 5


def test_metadata_when_it_has_to_be_written_anew_is_limited_in_values():
    """AMF3 in metadata is decoded and encoded, some microseconds a value: more than 1024 are refused."""

    def metadata(count):
        array = b"\x11\x09" + (0x8000 | (count << 1 | 1) >> 7 << 8 | (count << 1 | 1) & 0x7F).to_bytes(2, "big")
        return Message(
            5, 0, TYPE_DATA_AMF3, 1, b"\0" + amf0.encode("onMetaData") + array + b"\x01" + b"\x04\x05" * count
        )

    assert commands.read_metadata(metadata(commands.REWRITTEN_VALUES - 2), WireLimits()) is not None
    with pytest.raises(LimitExceededError, match="amf_nodes"):
        commands.read_metadata(metadata(commands.REWRITTEN_VALUES), WireLimits())


def test_metadata_when_references_make_it_larger_than_a_message_may_be_is_refused():
    def metadata(repeats):
        text = b"\x06\x87\xa9\x41" + b"x" * 60_000
        array = b"\x11\x09" + bytes([(repeats + 1) << 1 | 1]) + b"\x01" + text + b"\x06\x00" * repeats
        return Message(5, 0, TYPE_DATA_AMF3, 1, b"\0" + amf0.encode("onMetaData") + array)

    limits = WireLimits()
    found = commands.read_metadata(metadata(16), limits)
    assert found is not None
    assert limits.data_message_bytes - 60_000 < len(found.payload) <= limits.data_message_bytes
    with pytest.raises(LimitExceededError, match="data_message_bytes"):
        commands.read_metadata(metadata(17), limits)
