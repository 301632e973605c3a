"""ChunkReader: chunk headers, clocks, extended timestamps, and what real clients send."""

from __future__ import annotations

import random

import pytest
from chance_kit import seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from rtmp_chunk_peer import (
    ChunkPeer,
    basic,
    header0,
    header1,
    header2,
    interleave,
    pieces,
    random_messages,
    set_chunk_size,
)

from flowctl.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.writer import serialise
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.wire import Message

HEAD_BYTES = 16


def taken_at_headers(reader: ChunkReader, piece: bytes) -> list[Message]:
    """Feed `piece` with `feed_around`, pass over nothing and take what is completed at each header; return it all."""
    found = []

    def take(_view: memoryview, at: int, completed: list[Message]) -> int:
        found.extend(completed)
        completed.clear()
        return at

    found += reader.feed_around(piece, take)
    return found


def heads(messages: list[Message]) -> list[Message]:
    return [Message(m.csid, m.timestamp, m.type_id, m.msid, m.payload[:HEAD_BYTES]) for m in messages]


def read(data: bytes, **options) -> list[Message]:
    """Read `data` whole, one octet at a time, at random splits, and around headers; all must agree."""
    whole = ChunkReader(**options)
    expected = whole.feed(data)
    single = ChunkReader(**options)
    assert [message for octet in data for message in single.feed(bytes([octet]))] == expected
    for seed in seeds(5):
        split = ChunkReader(**options)
        stepped = ChunkReader(**options)
        headed = ChunkReader(**options, head_bytes=HEAD_BYTES)
        cut = list(pieces(data, random.Random(seed), 300))
        assert [message for piece in cut for message in split.feed(piece)] == expected
        assert [message for piece in cut for message in taken_at_headers(stepped, piece)] == expected
        assert heads([message for piece in cut for message in headed.feed(piece)]) == heads(expected)
        for reader in (split, stepped, headed):
            assert reader.bytes_received == len(data) == whole.bytes_received == single.bytes_received
        assert split.unfinished_bytes == stepped.unfinished_bytes == whole.unfinished_bytes >= headed.unfinished_bytes
    return expected


def fault(data: bytes, **options) -> RemoteProtocolError:
    """Return what reading `data` raises; whole, bytewise, split and stepped readers must raise the same."""
    found = []
    for cut in ([data], [bytes([octet]) for octet in data], list(pieces(data, random.Random(1), 40))):
        for feed in (ChunkReader.feed, taken_at_headers):
            reader = ChunkReader(**options)
            with pytest.raises(RemoteProtocolError) as caught:
                [feed(reader, piece) for piece in cut]
            found.append(caught.value)
            assert reader.failed
    assert {(error.code, str(error)) for error in found} == {(found[0].code, str(found[0]))}
    return found[0]


def stamps(messages: list[Message]) -> list[int]:
    return [message.timestamp for message in messages]


# ---------------------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize("csid", [2, 3, 63, 64, 319, 320, 65599])
def test_chunk_stream_id_is_read_in_each_of_the_three_forms(csid):
    data = header0(csid, 5, 300, 9) + b"a" * 128 + basic(3, csid) + b"b" * 128 + basic(3, csid) + b"c" * 44
    assert read(data) == [Message(csid, 5, 9, 1, b"a" * 128 + b"b" * 128 + b"c" * 44)]


def test_chunk_stream_id_is_the_same_in_the_two_octet_and_the_three_octet_form():
    long3, short3 = b"\xc1\0\0", b"\xc0\0"
    begin_short = header0(64, 0, 384, 9) + b"a" * 128 + long3 + b"b" * 128 + short3 + b"c" * 128
    begin_long = b"\1\0\0" + header0(4, 0, 384, 9)[1:] + b"a" * 128 + short3 + b"b" * 128 + long3 + b"c" * 128
    expected = [Message(64, 0, 9, 1, b"a" * 128 + b"b" * 128 + b"c" * 128)]
    assert read(begin_short) == expected
    assert read(begin_long) == expected


def test_message_stream_id_is_little_endian():
    data = b"\4\0\0\1\0\0\1\x09\x01\x02\x03\x04x"
    assert read(data) == [Message(4, 1, 9, 0x04030201, b"x")]


def test_header_types_inherit_what_they_leave_out():
    data = (
        header0(4, 1000, 2, 8, 7)
        + b"ab"
        + header1(4, 20, 3, 9)
        + b"cde"
        + header2(4, 30)
        + b"fgh"
        + basic(3, 4)
        + b"ijk"
    )
    assert read(data) == [
        Message(4, 1000, 8, 7, b"ab"),
        Message(4, 1020, 9, 7, b"cde"),
        Message(4, 1050, 9, 7, b"fgh"),
        Message(4, 1080, 9, 7, b"ijk"),
    ]


def test_type_3_inside_a_message_does_not_add_the_delta_again():
    data = header0(4, 100, 1, 9) + b"x" + header1(4, 40, 200, 9) + b"y" * 128 + basic(3, 4) + b"y" * 72
    assert stamps(read(data)) == [100, 140]


def test_type_3_after_type_0_adds_the_type_0_timestamp_or_zero_as_configured():
    data = (
        header0(4, 16, 1, 8)
        + b"a"
        + basic(3, 4)
        + b"b"
        + basic(3, 4)
        + b"c"
        + header2(4, 5)
        + b"d"
        + basic(3, 4)
        + b"e"
    )
    assert stamps(read(data)) == [16, 32, 48, 53, 58]
    assert stamps(read(data, type3_after_type0="zero")) == [16, 16, 16, 21, 26]


def test_fresh_chunk_stream_may_begin_with_type_1_or_2():
    """A ping of librtmp begins with type 1 and FFmpeg over RTMPT with type 2: missing fields are zero."""
    assert read(header1(6, 10, 2, 4) + b"\0\7") == [Message(6, 10, 4, 0, b"\0\7")]
    assert read(header2(6, 10)) == [Message(6, 10, 0, 0, b"")]


def test_fresh_chunk_stream_may_not_begin_with_type_3():
    assert fault(basic(3, 6) + b"x").code == "chunk-no-header"


def test_type_1_header_that_repeats_the_message_continues_it():
    again = header1(4, 20, 300, 9)
    data = (
        header0(4, 100, 1, 9)
        + b"-"
        + again
        + b"a" * 128
        + again
        + b"b" * 128
        + again
        + b"c" * 44
        + basic(3, 4)
        + b"d" * 128
    )
    assert read(data) == [Message(4, 100, 9, 1, b"-"), Message(4, 120, 9, 1, b"a" * 128 + b"b" * 128 + b"c" * 44)]


def test_type_0_header_that_repeats_the_message_continues_it():
    again = header0(4, 20, 200, 9)
    assert read(again + b"a" * 128 + again + b"b" * 72) == [Message(4, 20, 9, 1, b"a" * 128 + b"b" * 72)]


@pytest.mark.parametrize(
    "header",
    [
        header1(4, 0, 201, 9),
        header1(4, 0, 199, 9),
        header1(4, 0, 0xFFFFFF, 9),
        header1(4, 0, 200, 8),
        header0(4, 21, 200, 9),
        header0(4, 20, 200, 9, 2),
        header0(4, 20, 100, 9),
    ],
)
def test_header_that_changes_the_message_in_progress_is_a_fault(header):
    """Another length inside a message (CVE-2016-10191), another type, stream or time: the reader gives up."""
    assert fault(header0(4, 20, 200, 9) + b"a" * 128 + header + b"b" * 200).code == "chunk-message-changed"


def test_interleaved_chunk_streams_are_put_together_separately():
    data = (
        header0(6, 0, 500, 9) + b"v" * 128 + header0(4, 3, 200, 8) + b"a" * 128 + basic(3, 6) + b"v" * 128
        + basic(3, 4) + b"a" * 72 + basic(3, 6) + b"v" * 128 + header1(4, 20, 1, 8) + b"z" + basic(3, 6) + b"v" * 116
    )  # fmt: skip
    assert read(data) == [Message(4, 3, 8, 1, b"a" * 200), Message(4, 23, 8, 1, b"z"), Message(6, 0, 9, 1, b"v" * 500)]


def test_payload_that_looks_like_headers_stays_payload():
    payload = b"\xc4" * 5000
    data = header0(4, 0, 5000, 9) + b"\xc4".join(payload[at : at + 128] for at in range(0, 5000, 128))
    assert read(data) == [Message(4, 0, 9, 1, payload)]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_feed_copies_whatever_kind_of_buffer_it_is_given(kind):
    data = header0(4, 0, 300, 9) + b"a" * 128 + b"\xc4" + b"b" * 100
    reader = ChunkReader()
    buffer = bytearray(data)
    assert reader.feed(kind(buffer)) == []
    buffer[:] = b"\xff" * (len(buffer) + 50)
    assert reader.feed(b"b" * 28 + b"\xc4" + b"c" * 44) == [Message(4, 0, 9, 1, b"a" * 128 + b"b" * 128 + b"c" * 44)]


def test_feed_of_nothing_changes_nothing():
    reader = ChunkReader()
    data = header0(64, 0, 3, 9) + b"abc"
    messages = []
    for octet in data:
        messages += reader.feed(b"") + reader.feed(bytes([octet]))
    assert messages == [Message(64, 0, 9, 1, b"abc")]


# ---------------------------------------------------------------------------------------------------- clocks


def test_extended_timestamp_is_used_although_it_is_small():
    assert read(b"\4\xff\xff\xff\0\0\1\x09\1\0\0\0\0\0\0\x10x") == [Message(4, 16, 9, 1, b"x")]


def test_timestamps_around_the_24_bit_border_are_exact():
    for timestamp in (0xFFFFFE, 0xFFFFFF, 0x1000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
        assert stamps(read(header0(4, timestamp, 1, 9) + b"x")) == [timestamp]


def test_clock_wraps_at_32_bits_without_a_jump():
    data = header0(4, 0xFFFFFFF0, 1, 9) + b"a" + header1(4, 0x20, 1, 9) + b"b" + basic(3, 4) + b"c"
    assert stamps(read(data)) == [0xFFFFFFF0, 0x10, 0x30]


def test_negative_delta_moves_the_clock_back():
    data = header0(4, 1000, 1, 9) + b"a" + header1(4, 0xFFFFFFF6, 1, 8) + b"b" + header1(4, 20, 1, 9) + b"c"
    assert stamps(read(data)) == [1000, 990, 1010]


def test_extended_delta_is_a_delta_or_absolute_as_configured():
    data = header0(4, 11000, 1, 9) + b"a" + header1(4, 0x1000000, 1, 9) + b"b"
    assert stamps(read(data)) == [11000, 11000 + 0x1000000]
    assert stamps(read(data, extended_delta="absolute")) == [11000, 0x1000000]


def test_absolute_extended_timestamp_gives_the_delta_of_a_following_type_3():
    data = (
        header0(4, 0x1000000 - 40, 1, 9) + b"a" + header1(4, 0x1000000, 1, 9) + b"b" + basic(3, 4) + b"\1\0\0\0" + b"c"
    )
    expected = [0x1000000 - 40, 0x1000000, 0x1000000 + 40]
    assert stamps(read(data, extended_delta="absolute")[:3]) == expected


def test_extended_flag_ends_with_the_next_small_header():
    """A small delta after an extended timestamp: type 3 chunks have no extended timestamp any more."""
    data = (
        header0(4, 0x1000000, 200, 9) + b"a" * 128 + basic(3, 4) + b"\1\0\0\0" + b"a" * 72
        + header1(4, 20, 200, 9) + b"b" * 128 + basic(3, 4) + b"b" * 72
        + header0(4, 5, 200, 9) + b"c" * 128 + basic(3, 4) + b"c" * 72
    )  # fmt: skip
    messages = read(data)
    assert stamps(messages) == [0x1000000, 0x1000014, 5]
    assert [message.payload for message in messages] == [b"a" * 200, b"b" * 200, b"c" * 200]


@pytest.mark.parametrize("type3", [b"\xc4\1\2\3\4", b"\xc4", b"\xc4\0\0\0\0"], ids=["repeated", "absent", "zero"])
def test_extended_timestamp_in_type_3_is_taken_in_all_three_ways(type3):
    """Repeated (FFmpeg, FMLE), left out (librtmp), four zero octets (gortmplib): each is recognised by itself."""
    payload = bytes(range(1, 251)) * 4
    data = header0(4, 0x01020304, 1000, 9) + type3.join(payload[at : at + 128] for at in range(0, 1000, 128))
    assert read(data + header0(2, 0, 4, 3, 0) + b"ackn") == [
        Message(4, 0x01020304, 9, 1, payload),
        Message(2, 0, 3, 0, b"ackn"),
    ]


def test_extended_timestamp_repeated_as_the_absolute_time_of_a_delta_is_recognised():
    data = header0(4, 5, 1, 9) + b"-" + header1(4, 0x1000000, 200, 9) + b"a" * 128 + b"\xc4\1\0\0\5" + b"a" * 72
    assert read(data)[1] == Message(4, 0x1000005, 9, 1, b"a" * 200)


def test_extended_timestamp_decision_is_remembered_for_the_chunk_stream():
    stamp = b"\1\2\3\4"
    absent = header0(4, 0x01020304, 384, 9) + b"a" * 128 + b"\xc4" + b"b" * 128 + b"\xc4" + stamp + b"c" * 124
    assert read(absent)[0].payload == b"a" * 128 + b"b" * 128 + stamp + b"c" * 124
    repeated = header0(4, 0x01020304, 384, 9) + b"a" * 128 + b"\xc4" + stamp + b"b" * 128 + b"\xc4????" + b"c" * 128
    assert read(repeated)[0].payload == b"a" * 128 + b"b" * 128 + b"c" * 128


def test_extended_timestamp_decision_is_made_for_each_chunk_stream_separately():
    data = (
        header0(4, 0x1000000, 200, 8) + b"a" * 128 + b"\xc4\1\0\0\0" + b"a" * 72
        + header0(6, 0x1000000, 200, 9) + b"v" * 128 + b"\xc6" + b"v" * 72
    )  # fmt: skip
    assert [message.payload for message in read(data)] == [b"a" * 200, b"v" * 200]


def test_payload_that_begins_like_the_extended_timestamp_is_payload():
    """Three octets alike and the fourth not: the three are given back to the payload, wherever the piece ends."""
    data = header0(4, 0x01020304, 132, 9) + b"a" * 128 + b"\xc4" + b"\1\2\3!"
    assert read(data) == [Message(4, 0x01020304, 9, 1, b"a" * 128 + b"\1\2\3!")]


def test_left_out_extended_timestamp_does_not_delay_the_message():
    """A sender that leaves it out and waits for our answer gets one: the first octet that differs decides."""
    data = header0(4, 0x01020304, 129, 20) + b"a" * 128 + b"\xc4!"
    assert len(read(data)) == 1


# ---------------------------------------------------------------------------------------- messages to the reader


def test_set_chunk_size_applies_from_the_next_chunk():
    """It comes before connect (OBS) and is returned like any message."""
    data = set_chunk_size(4096) + header0(3, 0, 417, 20, 0) + b"c" * 417
    assert read(data) == [Message(2, 0, 1, 0, b"\0\0\x10\0"), Message(3, 0, 20, 0, b"c" * 417)]


@pytest.mark.parametrize("size", [65537, 100_000, 1 << 20])
def test_set_chunk_size_above_65536_is_taken(size):
    data = set_chunk_size(size) + header0(6, 0, size + 1, 9) + b"v" * size + b"\xc6v"
    reader = ChunkReader()
    assert reader.feed(data)[1] == Message(6, 0, 9, 1, b"v" * (size + 1))
    assert reader.chunk_size == size


def test_set_chunk_size_inside_a_message_of_another_chunk_stream_applies_to_its_next_chunk():
    data = (
        header0(6, 0, 1000, 9) + b"v" * 128 + set_chunk_size(500) + b"\xc6" + b"v" * 500
        + set_chunk_size(150) + b"\xc6" + b"v" * 150 + b"\xc6" + b"v" * 150 + b"\xc6" + b"v" * 72
    )  # fmt: skip
    assert read(data)[-1] == Message(6, 0, 9, 1, b"v" * 1000)


@pytest.mark.parametrize("csid", [3, 4, 5, 6, 320])
def test_control_messages_are_taken_on_any_chunk_stream(csid):
    reader = ChunkReader()
    reader.feed(set_chunk_size(200, csid))
    assert reader.chunk_size == 200


def test_abort_discards_the_message_in_progress():
    abort = header0(2, 0, 4, 2, 0) + b"\0\0\0\6"
    data = header0(6, 10, 300, 9) + b"v" * 128 + abort + header1(6, 20, 200, 9) + b"w" * 128 + b"\xc6" + b"w" * 72
    assert read(data) == [Message(2, 0, 2, 0, b"\0\0\0\6"), Message(6, 30, 9, 1, b"w" * 200)]
    reader = ChunkReader()
    reader.feed(header0(6, 10, 300, 9) + b"v" * 128)
    assert reader.unfinished_bytes == 128
    reader.feed(abort)
    assert reader.unfinished_bytes == 0


def test_abort_of_a_chunk_stream_without_a_message_in_progress_is_ignored():
    known = header0(6, 0, 1, 9) + b"v" + header0(2, 0, 4, 2, 0) + b"\0\0\0\6"
    assert len(read(known + header0(2, 0, 4, 2, 0) + b"\0\0\0\x63" + basic(3, 6) + b"w")) == 4


@pytest.mark.parametrize("body", [b"", b"\0", b"\0\0\0"])
def test_abort_with_a_short_body_is_a_fault(body):
    assert fault(header0(2, 0, len(body), 2, 0) + body).code == "abort"


def test_message_without_payload_is_returned():
    data = header0(4, 7, 0, 9) + basic(3, 4) + header1(4, 1, 2, 9) + b"ab" + header1(4, 1, 0, 8)
    assert read(data) == [
        Message(4, 7, 9, 1, b""),
        Message(4, 14, 9, 1, b""),
        Message(4, 15, 9, 1, b"ab"),
        Message(4, 16, 8, 1, b""),
    ]


# ---------------------------------------------------------------------------------------------------- faults


def test_failed_reader_refuses_more_and_keeps_what_came_before():
    reader = ChunkReader()
    with pytest.raises(RemoteProtocolError):
        reader.feed(header0(4, 0, 1, 9) + b"x" + header0(6, 0, 200, 9) + b"y" * 128 + basic(3, 9))
    assert reader.completed_before_fault == (Message(4, 0, 9, 1, b"x"),)
    assert (reader.failed, reader.unfinished_bytes) == (True, 0)
    with pytest.raises(LocalProtocolError, match="failed"):
        reader.feed(b"")


def test_options_name_what_is_allowed():
    with pytest.raises(ConfigError, match="type3_after_type0 is 'one'"):
        ChunkReader(type3_after_type0="one")
    with pytest.raises(ConfigError, match="extended_delta is 'relative'"):
        ChunkReader(extended_delta="relative")


def test_feed_around_when_a_message_is_passed_over_reads_the_others():
    reader = ChunkReader()
    first = header0(6, 100, 3, 9) + b"abc"
    passed = header1(6, 40, 2, 9) + b"de"

    def pass_second(_view: memoryview, at: int, _completed: list[Message]) -> int:
        if at != len(first):
            return at
        stream = reader.chunk_stream(6)
        stream.timestamp, stream.length = 140, 2
        return at + len(passed)

    octets = first + passed + header2(6, 5) + b"fg"
    assert reader.feed_around(octets, pass_second) == [Message(6, 100, 9, 1, b"abc"), Message(6, 145, 9, 1, b"fg")]
    assert reader.bytes_received == len(octets)


def test_feed_around_when_a_media_message_is_cut_keeps_its_head():
    reader = ChunkReader(head_bytes=HEAD_BYTES)
    octets = header0(6, 0, 100, 9) + bytes(range(100))
    cut = [octets[:20], octets[20:60], octets[60:]]
    held = []
    for piece in cut:
        messages = taken_at_headers(reader, piece)
        held.append(reader.unfinished_bytes)
    assert held == [8, HEAD_BYTES, 0]
    assert messages == [Message(6, 0, 9, 1, bytes(range(HEAD_BYTES)))]


# ---------------------------------------------------------------------------------------------------- properties

END = Message(2, 0, 3, 0, b"ackn")

CSIDS = st.lists(st.sampled_from([3, 4, 5, 6, 63, 64, 65, 319, 320, 65599]), min_size=1, max_size=4, unique=True)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    csids=CSIDS,
    sizes=st.lists(st.sampled_from([128, 129, 200, 255, 256, 1000, 4096]), max_size=4),
    repeat_header=st.booleans(),
)
def test_reader_returns_what_any_peer_sent_in_any_mix(seed, csids, sizes, repeat_header):
    rng = random.Random(seed)
    peer = ChunkPeer(rng, repeat_header=repeat_header)
    data, expected = interleave(peer, random_messages(rng, 12, csids), sizes)
    # The last message must not depend on whether it ends like an extended timestamp.
    expected.append(END)
    data += peer.write(END)
    assert ChunkReader().feed(data) == expected
    split, messages = ChunkReader(), []
    for piece in pieces(data, rng, rng.choice([1, 5, 50, 500])):
        messages += split.feed(piece)
    assert messages == expected
    assert split.unfinished_bytes == 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 40))
def test_reader_returns_what_was_sent_in_tiny_chunks(seed, size):
    rng = random.Random(seed)
    peer = ChunkPeer(rng)
    messages = random_messages(rng, 5, [4, 70, 400], 400)
    data, expected = interleave(peer, messages, [size])
    reader = ChunkReader(WireLimits(trusted=True))
    received = []
    for piece in pieces(data + peer.write(END), rng, 100):
        received += reader.feed(piece)
    assert received == [*expected, END]


def test_reader_follows_a_stream_across_both_borders_of_the_clock():
    """A day-long run in steps of a second: past 4.66 h, and past 49.7 days, without a jump and without memory."""
    reader = ChunkReader()
    peer = ChunkPeer(random.Random(7), "repeated")
    for start in (0xFFFFFF - 50_000, 2**32 - 50_000):
        for step in range(100):
            message = Message(6, (start + step * 1000) & 0xFFFFFFFF, 9, 1, b"v" * 300)
            assert reader.feed(peer.write(message)) == [message]
            assert reader.unfinished_bytes == 0


def test_feed_when_a_peer_uses_many_chunk_streams_keeps_them_apart():
    numbers = range(3, 33)
    first = [serialise(8, 1, 1000 + csid, b"%d" % csid, csid, 128) for csid in numbers]
    reader = ChunkReader()
    for csid, message in zip(numbers, reader.feed(b"".join(first)), strict=True):
        assert (message.csid, message.timestamp) == (csid, 1000 + csid)
    type2 = [bytes((0x80 | csid, 0, 0, csid)) + b"%d" % csid for csid in numbers]
    for csid, message in zip(numbers, reader.feed(b"".join(type2)), strict=True):
        assert (message.csid, message.timestamp, message.payload) == (csid, 1000 + 2 * csid, b"%d" % csid)
    assert reader.chunk_streams == len(numbers)
