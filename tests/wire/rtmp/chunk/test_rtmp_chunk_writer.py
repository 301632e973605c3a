"""ChunkWriter and serialise: exact octets, the shortest header that cannot be misunderstood, and round trips."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rtmp_chunk_peer import header0, pieces, random_messages

from flowctl.errors import LocalProtocolError
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.writer import ChunkWriter, serialise
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.wire import Message, basic_header


def read(data: bytes) -> list[Message]:
    return ChunkReader(WireLimits(trusted=True)).feed(data)


def header_types(writer: ChunkWriter, messages: list[Message]) -> list[int]:
    return [writer.write(message)[0] >> 6 for message in messages]


# ------------------------------------------------------------------------------------------------- basic header


@pytest.mark.parametrize(
    ("csid", "expected"),
    [(2, "82"), (63, "bf"), (64, "8000"), (319, "80ff"), (320, "810001"), (65599, "81ffff")],
)
def test_basic_header_has_the_shortest_form(csid, expected):
    assert basic_header(2, csid).hex() == expected


@pytest.mark.parametrize("csid", [-1, 0, 1, 65600])
def test_basic_header_of_an_impossible_chunk_stream_is_refused(csid):
    with pytest.raises(LocalProtocolError, match=f"csid is {csid}, allowed is 2 to 65599"):
        basic_header(0, csid)


# ------------------------------------------------------------------------------------------------- serialise


def test_serialise_writes_a_type_0_chunk():
    assert serialise(9, 1, 0x010203, b"abc", 6, 128) == b"\x06\1\2\3\0\0\3\x09\1\0\0\0abc"


def test_serialise_continues_with_type_3_chunks():
    assert serialise(9, 1, 0, b"abcdef", 6, 3) == b"\x06\0\0\0\0\0\6\x09\1\0\0\0abc\xc6def"
    assert serialise(9, 1, 0, b"abcdefg", 6, 3) == b"\x06\0\0\0\0\0\7\x09\1\0\0\0abc\xc6def\xc6g"


def test_serialise_repeats_the_extended_timestamp_in_type_3_chunks():
    """FFmpeg fails and GStreamer complains if it is left out or filled with zeros."""
    expected = b"\x06\xff\xff\xff\0\0\6\x09\1\0\0\0\1\0\0\0abc\xc6\1\0\0\0def"
    assert serialise(9, 1, 0x1000000, b"abcdef", 6, 3) == expected


@pytest.mark.parametrize(
    ("timestamp", "field"),
    [(0xFFFFFE, "fffffe"), (0xFFFFFF, "ffffff00ffffff"), (0x1000000, "ffffff01000000"), (2**32 - 1, "ffffffffffffff")],
)
def test_serialise_extends_timestamps_from_16777215_on(timestamp, field):
    """The border value itself needs the extended field, because its short form announces one."""
    octets = serialise(8, 1, timestamp, b"", 4, 128)
    assert octets[1:4].hex() + octets[12:].hex() == field


def test_serialise_wraps_the_clock():
    assert serialise(8, 1, 2**32 + 5, b"x", 4, 128) == serialise(8, 1, 5, b"x", 4, 128)


def test_serialise_without_payload_is_a_header():
    assert read(serialise(8, 1, 7, b"", 4, 128)) == [Message(4, 7, 8, 1, b"")]


def test_serialise_takes_a_view_of_a_larger_buffer():
    payload = bytes(range(256)) * 4
    assert serialise(9, 1, 0, memoryview(payload)[100:900], 6, 128) == serialise(9, 1, 0, payload[100:900], 6, 128)


@pytest.mark.parametrize(
    "arguments",
    [
        (256, 1, 0, b"", 4, 128),
        (-1, 1, 0, b"", 4, 128),
        (9, -1, 0, b"", 4, 128),
        (9, 2**32, 0, b"", 4, 128),
        (9, 1, 0, b"", 1, 128),
        (9, 1, 0, b"", 4, 0),
        (9, 1, 0, b"x", 4, -5),
        (9, 1, 0, bytes(1 << 24), 4, 128),
    ],
)
def test_serialise_refuses_what_a_header_cannot_say(arguments):
    with pytest.raises(LocalProtocolError):
        serialise(*arguments)


def test_longest_message_is_serialised_and_read():
    limits = WireLimits(media_message_bytes=(1 << 24) - 1)
    payload = random.Random(3).randbytes((1 << 24) - 1)
    reader = ChunkReader(limits)
    reader.feed(ChunkWriter().set_chunk_size(65536))
    assert reader.feed(serialise(9, 1, 0, payload, 6, 65536)) == [Message(6, 0, 9, 1, payload)]


@settings(max_examples=60, deadline=None)
@given(
    payload=st.binary(max_size=600),
    chunk_size=st.integers(1, 300),
    timestamp=st.one_of(st.integers(0, 2**32 - 1), st.integers(0xFFFFFD, 0x1000002), st.integers(2**32 - 3, 2**32 - 1)),
    csid=st.sampled_from([2, 63, 64, 319, 320, 65599]),
    type_id=st.sampled_from([8, 9, 18]),
    msid=st.sampled_from([0, 1, 2**32 - 1]),
)
def test_reader_returns_what_was_serialised(payload, chunk_size, timestamp, csid, type_id, msid):
    message = Message(csid, timestamp, type_id, msid, payload)
    data = ChunkWriter().set_chunk_size(chunk_size) + serialise(type_id, msid, timestamp, payload, csid, chunk_size)
    assert read(data)[1:] == [message]


# ------------------------------------------------------------------------------------------------- ChunkWriter


def test_writer_leaves_out_what_the_peer_can_infer():
    messages = [
        Message(4, 100, 8, 1, b"aa"),
        Message(4, 120, 8, 1, b"aa"),  # type 2 and not 3: there is no delta yet
        Message(4, 140, 8, 1, b"aa"),  # the same delta
        Message(4, 160, 8, 1, b"bb"),
        Message(4, 183, 8, 1, b"bb"),  # another delta
        Message(4, 206, 8, 1, b"bbb"),  # another length
        Message(4, 229, 9, 1, b"bbb"),  # another type
        Message(4, 252, 9, 1, b"bbb"),
        Message(4, 275, 9, 2, b"bbb"),  # another message stream
        Message(4, 275, 9, 2, b"bbb"),
        Message(4, 275, 9, 2, b"bbb"),
    ]
    assert header_types(ChunkWriter(), messages) == [0, 2, 3, 3, 2, 1, 1, 3, 0, 2, 3]
    writer = ChunkWriter()
    assert read(b"".join(map(writer.write, messages))) == messages


def test_writer_never_sends_type_3_right_after_type_0():
    messages = [Message(4, 16, 8, 1, b"a"), Message(4, 32, 8, 1, b"a"), Message(4, 48, 8, 1, b"a")]
    assert header_types(ChunkWriter(), messages) == [0, 2, 3]
    writer = ChunkWriter()
    data = b"".join(map(writer.write, messages))
    assert ChunkReader(type3_after_type0="delta").feed(data) == messages
    assert ChunkReader(type3_after_type0="zero").feed(data) == messages


def test_writer_sends_a_full_header_when_the_clock_goes_back_or_far_ahead():
    """No negative and no extended deltas: receivers read them in different ways."""
    messages = [
        Message(4, 1000, 8, 1, b"a"),
        Message(4, 990, 8, 1, b"a"),
        Message(4, 990 + 0xFFFFFE, 8, 1, b"a"),
        Message(4, 990 + 0xFFFFFE + 0xFFFFFF, 8, 1, b"a"),
    ]
    assert header_types(ChunkWriter(), messages) == [0, 0, 2, 0]
    for option in ("delta", "absolute"):
        writer = ChunkWriter()
        assert ChunkReader(extended_delta=option).feed(b"".join(map(writer.write, messages))) == messages


def test_writer_goes_on_with_deltas_when_the_clock_wraps():
    messages = [Message(4, 2**32 - 10, 8, 1, b"a"), Message(4, 10, 8, 1, b"a"), Message(4, 30, 8, 1, b"a")]
    assert header_types(ChunkWriter(), messages) == [0, 2, 3]
    writer = ChunkWriter()
    assert read(b"".join(map(writer.write, messages))) == messages


def test_writer_repeats_extended_timestamps_only_in_messages_opened_by_type_0():
    writer = ChunkWriter(3)
    assert writer.write(Message(4, 0x1000000, 8, 1, b"abcd")).endswith(b"\1\0\0\0abc\xc4\1\0\0\0d")
    assert writer.write(Message(4, 0x1000014, 8, 1, b"abcd")) == b"\x84\0\0\x14abc\xc4d"
    assert writer.write(Message(4, 0x1000028, 8, 1, b"abcd")) == b"\xc4abc\xc4d"


def test_writer_keeps_chunk_streams_apart():
    messages = [Message(csid, 20 * step, 8, 1, b"a") for step in range(4) for csid in (4, 6, 300, 1000)]
    assert header_types(ChunkWriter(), messages) == [0] * 4 + [2] * 4 + [3] * 8
    writer = ChunkWriter()
    assert read(b"".join(map(writer.write, messages))) == messages


def test_set_chunk_size_is_announced_in_the_old_size_and_used_afterwards():
    writer = ChunkWriter()
    assert writer.set_chunk_size(4096) == header0(2, 0, 4, 1, 0) + b"\0\0\x10\0"
    assert writer.chunk_size == 4096
    assert len(writer.write(Message(6, 0, 9, 1, bytes(4097)))) == 12 + 4097 + 1


@pytest.mark.parametrize("size", [0, -1, 2**31])
def test_impossible_chunk_size_is_refused_and_changes_nothing(size):
    writer = ChunkWriter()
    with pytest.raises(LocalProtocolError, match="chunk size"):
        writer.set_chunk_size(size)
    assert writer.chunk_size == 128
    with pytest.raises(LocalProtocolError, match="chunk size"):
        ChunkWriter(size)


@pytest.mark.parametrize(
    "wrong", [Message(4, 20, 300, 1, b"a"), Message(4, 20, 8, 1, bytes(1 << 24)), Message(4, 20, 8, -1, b"a")]
)
def test_message_that_was_refused_has_not_been_sent(wrong):
    writer = ChunkWriter()
    first, second = Message(4, 10, 8, 1, b"a"), Message(4, 30, 8, 1, b"b")
    data = writer.write(first)
    with pytest.raises(LocalProtocolError):
        writer.write(wrong)
    assert read(data + writer.write(second)) == [first, second]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.sampled_from([1, 2, 3, 127, 128, 129, 1000, 65536]), min_size=1, max_size=4),
    count=st.integers(1, 30),
)
def test_reader_returns_what_the_writer_wrote(seed, sizes, count):
    rng = random.Random(seed)
    messages = random_messages(rng, count, [2, 4, 64, 320, 65599], 800)
    writer, octets, expected = ChunkWriter(), [], []
    for message in messages:
        if rng.random() < 0.2:
            size = rng.choice(sizes)
            octets.append(writer.set_chunk_size(size))
            expected.append(Message(2, 0, 1, 0, size.to_bytes(4, "big")))
        octets.append(writer.write(message))
        expected.append(message)
    data = b"".join(octets)
    assert read(data) == expected
    for option in ("type3_after_type0", "extended_delta"):
        other = {"type3_after_type0": "zero", "extended_delta": "absolute"}[option]
        reader = ChunkReader(WireLimits(trusted=True), **{option: other})
        assert [message for piece in pieces(data, rng) for message in reader.feed(piece)] == expected
