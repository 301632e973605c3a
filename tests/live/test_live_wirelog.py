"""A stream's log in RTMP chunks: every message stands alone, headers carry the time of what they go before."""

from __future__ import annotations

import pytest
from live_kit import AVC_HEADER, inter, key

from flowctl.flow import MessageClass
from flowctl.live.wirelog import WireLog
from flowctl.rtmp.chunk import ChunkReader
from flowctl.rtmp.limits import WireLimits
from flowctl.rtmp.wire import TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO
from flowctl.streamlog import CacheLimits


def make(msid=1, chunk_size=128):
    return WireLog("live/a", msid, chunk_size=chunk_size, cache=CacheLimits(), flush_interval_s=0.04)


def decode(*wires):
    return ChunkReader(WireLimits()).feed(b"".join(wires))


@pytest.mark.parametrize("timestamp", [0, 0xFFFFFE, 0xFFFFFF, 0x1000000, 0xFFFFFFFF])
@pytest.mark.parametrize("size", [1, 127, 128, 129, 5000])
def test_serialise_when_of_any_size_and_time_can_be_read_alone(timestamp, size):
    """A viewer can start at any message: nothing in it refers to one before it."""
    wire = make(msid=5).serialise(TYPE_VIDEO, timestamp, b"v" * size)
    (message,) = decode(wire)
    assert (TYPE_VIDEO, timestamp, 5, b"v" * size) == (
        message.type_id,
        message.timestamp,
        message.msid,
        bytes(message.payload),
    )


@pytest.mark.parametrize("timestamp", [10, 2**24 + 5])
def test_seed_when_from_another_id_changes_nothing_but_the_id(timestamp):
    """Times, types and bodies stay, in the entries and in the messages before the key frame."""
    usual, other = make(), make(msid=0xA1B2C3D4)
    headers = [(TYPE_DATA_AMF0, b"\x02\x00\x01m"), (TYPE_VIDEO, AVC_HEADER)]
    usual.append(TYPE_VIDEO, timestamp, key(b"k", 1000), MessageClass.KEY, 5.0, headers)
    usual.append(TYPE_VIDEO, timestamp + 40, inter(b"i", 300), MessageClass.INTER, 5.04, [])
    other.seed(usual)
    entry = other.log.cached
    messages = decode(*entry.gop.restart, entry.wire, entry.next.wire)
    assert {message.msid for message in messages} == {0xA1B2C3D4}
    assert [message.timestamp for message in messages] == [0, timestamp, timestamp, timestamp + 40]
    assert [bytes(message.payload) for message in messages[2:]] == [key(b"k", 1000), inter(b"i", 300)]
    assert (entry.enqueued_at, entry.next.enqueued_at) == (5.0, 5.04)


def test_seed_when_there_is_no_cache_leaves_the_log_empty():
    """Without a key frame there is nothing a viewer could start with."""
    usual, other = make(), make(msid=2)
    usual.append(TYPE_AUDIO, 0, b"\xaf\x01x", MessageClass.AUDIO, 0.0, [])
    other.seed(usual)
    assert other.log.tail.sequence == 0


def test_headers_when_before_a_key_frame_have_its_time_but_metadata_has_none():
    """FFmpeg opens a stray data stream for metadata with a time."""
    wires = make().headers([(TYPE_DATA_AMF0, b"\x02\x00\x01m"), (TYPE_VIDEO, AVC_HEADER)], 7000)
    assert [message.timestamp for message in decode(*wires)] == [0, 7000]


def test_end_when_appended_closes_the_cache_and_is_never_dropped():
    """The end is a control message of the log, behind everything else."""
    wire = make()
    wire.append(TYPE_VIDEO, 0, key(b"k"), MessageClass.KEY, 0.0, [])
    entry = wire.log.tail
    wire.end(40, 1.0)
    assert (entry.message_class, wire.log.cached) == (MessageClass.CONTROL, None)
    assert b"UnpublishNotify" in decode(entry.wire)[-1].payload
