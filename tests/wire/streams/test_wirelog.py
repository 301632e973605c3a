"""A stream's log in RTMP chunks: every message stands alone, headers are serialised once and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_kit import AVC_HEADER, inter, key

from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import CacheLimits
from flowctl.errors import LimitExceededError
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.writer import serialise
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO
from flowctl.wire.streams import wirelog
from flowctl.wire.streams.wirelog import HEADER_BYTES, HEADERS, HEADERS_BYTES, KeptHeaders, RtmpChunks, WireLog


def make(msid=1, chunk_size=128):
    return WireLog("live/a", RtmpChunks(msid, chunk_size), cache=CacheLimits(), flush_interval_s=0.04)


def header(wire, type_id, payload, timestamp, place=0):
    wire.append(type_id, timestamp, payload, MessageClass.HEADER, 0.0, header_key=(type_id, place))


def decode(*wires):
    return ChunkReader(WireLimits()).feed(b"".join(wires))


@pytest.mark.parametrize("timestamp", [10, 2**24 + 5])
def test_seed_when_from_another_id_changes_nothing_but_the_id(timestamp):
    usual, other = make(), make(msid=0xA1B2C3D4)
    header(usual, TYPE_DATA_AMF0, b"\x02\x00\x01m", timestamp)
    header(usual, TYPE_VIDEO, AVC_HEADER, timestamp)
    usual.append(TYPE_VIDEO, timestamp, key(b"k", 1000), MessageClass.KEY, 5.0)
    usual.append(TYPE_VIDEO, timestamp + 40, inter(b"i", 300), MessageClass.INTER, 5.04)
    other.seed(usual)
    entry = other.log.cached
    messages = decode(*entry.gop.restart, entry.wire, entry.next.wire)
    assert {message.msid for message in messages} == {0xA1B2C3D4}
    assert [message.timestamp for message in messages] == [0, timestamp, timestamp, timestamp + 40]
    assert [bytes(message.payload) for message in messages[2:]] == [key(b"k", 1000), inter(b"i", 300)]
    assert (entry.enqueued_at, entry.next.enqueued_at) == (5.0, 5.04)


def test_headers_when_one_comes_in_the_middle_of_a_group_are_the_newest_for_who_goes_on_there():
    wire = make()
    header(wire, TYPE_DATA_AMF0, b"\x02\x00\x01m", 0)
    wire.append(TYPE_VIDEO, 0, key(b"k"), MessageClass.KEY, 5.0)
    header(wire, TYPE_DATA_AMF0, b"\x02\x00\x01n", 0)
    assert [bytes(message.payload) for message in decode(*wire.log.headers)] == [b"\x02\x00\x01n"]
    assert [bytes(message.payload) for message in decode(*wire.log.cached.gop.restart)] == [b"\x02\x00\x01m"]
    wire.append(TYPE_VIDEO, 40, key(b"l"), MessageClass.KEY, 5.5)
    assert wire.log.headers == wire.log.cached.gop.restart
    wire.forget_headers()
    assert wire.log.headers == ()


def test_seed_when_pictures_are_leading_says_so_too():
    usual, other = make(), make(msid=2)
    usual.append(TYPE_VIDEO, 0, key(b"k"), MessageClass.KEY, 5.0)
    usual.append(TYPE_VIDEO, 40, inter(b"i"), MessageClass.INTER, 5.04, leading=True)
    usual.append(TYPE_VIDEO, 80, inter(b"i"), MessageClass.INTER, 5.08)
    other.seed(usual)
    entry = other.log.cached
    assert [entry.leading, entry.next.leading, entry.next.next.leading] == [False, True, False]


def test_seed_when_there_is_no_cache_leaves_the_log_empty():
    usual, other = make(), make(msid=2)
    usual.append(TYPE_AUDIO, 0, b"\xaf\x01x", MessageClass.AUDIO, 0.0)
    other.seed(usual)
    assert other.log.tail.sequence == 0


def test_headers_when_before_a_key_frame_are_those_that_were_published_but_metadata_has_no_time():
    """The octets of the log are kept, not made again; FFmpeg opens a stray data stream for metadata with a time."""
    wire = make()
    header(wire, TYPE_DATA_AMF0, b"\x02\x00\x01m", 7000)
    header(wire, TYPE_VIDEO, AVC_HEADER, 7000)
    published = wire.log.tail
    wire.append(TYPE_VIDEO, 9000, key(b"k"), MessageClass.KEY, 1.0)
    restart = published.gop.restart
    assert [message.timestamp for message in decode(*restart)] == [0, 7000]
    wire.append(TYPE_VIDEO, 9500, key(b"l"), MessageClass.KEY, 1.5)
    assert [id(octets) for octets in wire.log.gop.restart] == [id(octets) for octets in restart]


def test_key_frames_when_there_are_headers_copy_and_serialise_their_own_octets_only(monkeypatch):
    """However many headers there are, a key frame, a restart and a joiner cost what they cost without any."""
    made = []
    monkeypatch.setattr(wirelog, "serialise", lambda *args: made.append(len(args[3])) or serialise(*args))
    costs = []
    for count in (0, 1, 15):
        wire = make(chunk_size=65536)
        for track in range(count):
            header(wire, TYPE_VIDEO, b"h" * HEADER_BYTES, 0, track)
        made.clear()
        for number in range(100):
            wire.append(TYPE_VIDEO, number, key(b"k"), MessageClass.KEY, number / 1000)
            assert sum(map(len, wire.log.gop.restart)) >= count * HEADER_BYTES
        costs.append(list(made))
    assert costs[0] == costs[1] == costs[2] == [len(key(b"k"))] * 100


@given(
    st.lists(st.tuples(st.integers(0, 80), st.sampled_from([1, 4000, HEADER_BYTES, HEADER_BYTES + 1])), max_size=200)
)
def test_headers_when_of_any_number_and_size_stay_within_their_bounds(found):
    """What is over a bound is refused by name, and the header whose place it would take is forgotten all the same."""
    headers, model = KeptHeaders(), {}
    for place, size in found:
        model.pop(place, None)
        over = [
            ("header_bytes", size, HEADER_BYTES),
            ("headers_bytes", sum(model.values()) + size, HEADERS_BYTES),
            ("headers", len(model) + 1, HEADERS),
        ]
        expected = next((name for name, value, maximum in over if value > maximum), None)
        if expected is None:
            headers.keep(place, size, size)
            model[place] = size
        else:
            with pytest.raises(LimitExceededError) as caught:
                headers.keep(place, size, size)
            assert caught.value.limit == expected
        assert headers.values == tuple(model.values())
        assert headers.size_bytes == sum(model.values())


@given(
    type_id=st.sampled_from([TYPE_AUDIO, TYPE_VIDEO, TYPE_DATA_AMF0]),
    timestamp=st.sampled_from([0, 1, 0xFFFFFE, 0xFFFFFF, 0x1000000, 0xFFFFFFFF]),
    payload=st.binary(min_size=1, max_size=700),
    chunk_size=st.integers(1, 300),
)
def test_deserialise_when_of_any_message_gives_back_what_was_serialised(type_id, timestamp, payload, chunk_size):
    chunks = RtmpChunks(1, chunk_size)
    found = chunks.deserialise(chunks.serialise(type_id, timestamp, payload))
    assert found == (type_id, timestamp, payload)
