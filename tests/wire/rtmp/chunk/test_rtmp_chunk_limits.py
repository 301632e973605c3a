"""What a hostile or broken peer can make the chunk reader do: nothing beyond its limits, and memory follows octets."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest
from rtmp_chunk_peer import basic, header0, header1, set_chunk_size

from flowctl.errors import ConfigError, LimitExceededError, RemoteProtocolError
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.limits import WireLimits


def refused(data: bytes, limits: WireLimits | None = None) -> LimitExceededError:
    """Return the limit that reading `data` goes over, whole and one octet at a time."""
    limits = WireLimits() if limits is None else limits
    with pytest.raises(LimitExceededError) as whole:
        ChunkReader(limits).feed(data)
    single = ChunkReader(limits)
    with pytest.raises(LimitExceededError) as bytewise:
        list(map(single.feed, (bytes([octet]) for octet in data)))
    assert (bytewise.value.limit, bytewise.value.maximum) == (whole.value.limit, whole.value.maximum)
    return whole.value


def allocated_by(reader: ChunkReader, data: bytes, piece_bytes: int) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for at in range(0, len(data), piece_bytes):
            reader.feed(data[at : at + piece_bytes])
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------- chunk size


@pytest.mark.parametrize("size", [0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 20) + 1])
def test_huge_chunk_size_is_refused(size):
    """2147483647 has been sent by a server; nginx-rtmp allocated 2 GB for it."""
    error = refused(set_chunk_size(size))
    assert (error.limit, error.value, error.maximum) == ("chunk_size_max_bytes", size, 1 << 20)
    assert error.code == "limit:chunk_size_max_bytes"


def test_large_chunk_size_allocates_nothing():
    """Memory does not follow the value: 1 MiB chunks and a message of 9 MiB announced, 100 octets sent."""
    reader = ChunkReader()
    data = set_chunk_size(1 << 20) + header0(6, 0, 9 << 20, 9) + b"v" * 100
    assert allocated_by(reader, data, len(data)) < 5000
    assert reader.unfinished_bytes == 100


@pytest.mark.parametrize("size", [1, 2, 127])
def test_tiny_chunk_size_is_refused_unless_the_peer_is_trusted(size):
    error = refused(set_chunk_size(size))
    assert (error.limit, error.value, error.maximum) == ("chunk_size_min_bytes", size, 128)
    reader = ChunkReader(WireLimits(trusted=True))
    message = reader.feed(set_chunk_size(size) + header0(4, 0, 1, 8) + b"a")[1]
    assert message.payload == b"a"
    assert reader.chunk_size == size


@pytest.mark.parametrize("body", [b"", b"\0", b"\0\0", b"\0\0\0", b"\0\0\0\0", b"\1\0\0"])
@pytest.mark.parametrize("trusted", [False, True])
def test_set_chunk_size_of_zero_or_with_a_short_body_is_a_fault(body, trusted):
    """Chunks of no octets would never end; three octets are no number. Trust does not help."""
    reader = ChunkReader(WireLimits(trusted=trusted))
    with pytest.raises(RemoteProtocolError) as caught:
        reader.feed(header0(2, 0, len(body), 1, 0) + body)
    assert caught.value.code == "set-chunk-size"


def test_set_chunk_size_with_octets_after_its_value_is_taken():
    """More than four octets: the first four count."""
    reader = ChunkReader()
    reader.feed(header0(2, 0, 6, 1, 0) + b"\0\0\1\0??")
    assert reader.chunk_size == 256


def test_chunk_size_changed_inside_a_message_does_not_overrun_it():
    """A larger size in the middle ends with the message, not with the chunk size (nginx-rtmp 2021-05-24)."""
    reader = ChunkReader()
    data = (
        header0(6, 0, 300, 9) + b"v" * 128 + set_chunk_size(1 << 20) + b"\xc6" + b"v" * 172 + header0(4, 1, 1, 8) + b"a"
    )
    assert [len(message.payload) for message in reader.feed(data)] == [4, 300, 1]


# ------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("type_id", "limit", "maximum"),
    [(type_id, "control_message_bytes", 512) for type_id in range(1, 7)]
    + [(type_id, "command_message_bytes", 65536) for type_id in (0, 7, 16, 17, 19, 20, 21, 255)]
    + [(type_id, "data_message_bytes", 1 << 20) for type_id in (15, 18)]
    + [(type_id, "media_message_bytes", 10 << 20) for type_id in (8, 9, 22)],
)
def test_message_longer_than_its_limit_is_refused_at_its_header(type_id, limit, maximum):
    error = refused(header0(6, 0, maximum + 1, type_id))
    assert (error.limit, error.value, error.maximum) == (limit, maximum + 1, maximum)
    assert ChunkReader().feed(header0(6, 0, maximum, type_id) + b"x" * 128) == []


def test_message_of_16_mib_is_refused_also_by_a_type_1_header():
    assert refused(header0(6, 0, 1, 9) + b"v" + header1(6, 0, 0xFFFFFF, 9)).limit == "media_message_bytes"


def test_announced_length_allocates_nothing():
    """Ten messages of 10 MiB are announced and one octet of each is sent: memory follows the octets."""
    reader = ChunkReader()
    data = set_chunk_size(128) + b"".join(header0(csid, 0, 10 << 20, 9) + b"v" * 128 for csid in range(4, 14))
    assert allocated_by(reader, data, len(data)) < 20_000
    assert reader.unfinished_bytes == 1280


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 1000, 65536])
def test_memory_follows_the_octets_received_whatever_the_pieces(piece_bytes):
    payload = 20_000 if piece_bytes < 10 else 1_000_000
    data = set_chunk_size(1 << 20) + header0(6, 0, payload + 1, 9) + b"v" * payload
    readers = ChunkReader(), ChunkReader()  # what another thread allocates meanwhile counts too, but not each time
    assert min(allocated_by(reader, data, piece_bytes) for reader in readers) < payload * 1.2 + 5000
    assert [reader.unfinished_bytes for reader in readers] == [payload] * 2


def test_unfinished_message_does_not_keep_the_piece_of_input_alive():
    """One chunk of an unfinished message in each of 20 pieces of 60 kB that are otherwise complete messages."""
    reader = ChunkReader()
    filler = header0(4, 0, 60_000, 8) + b"\xc4".join(b"a" * min(128, 60_000 - at) for at in range(0, 60_000, 128))
    data = b"".join(filler + header0(csid, 0, 200, 9) + b"v" * 128 for csid in range(10, 30))
    assert allocated_by(reader, data, len(data) // 20) < 30_000
    assert reader.unfinished_bytes == 20 * 128


def test_finished_message_leaves_nothing_behind():
    reader = ChunkReader()
    data = set_chunk_size(60_000) + header0(6, 0, 1_000_000, 9)
    data += b"\xc6".join(b"v" * min(60_000, 1_000_000 - at) for at in range(0, 1_000_000, 60_000))
    assert allocated_by(reader, data, 65536) < 5000
    assert reader.unfinished_bytes == 0


# ------------------------------------------------------------------------------------------------- chunk streams


def test_more_chunk_streams_than_allowed_are_refused():
    begun = b"".join(header0(csid, 0, 200, 9) + b"v" * 128 for csid in range(10, 74))
    reader = ChunkReader()
    reader.feed(begun)
    assert (reader.chunk_streams, reader.unfinished_bytes) == (64, 64 * 128)
    error = refused(begun + header0(65599, 0, 200, 9))
    assert (error.limit, error.value, error.maximum) == ("chunk_streams", 65, 64)


def test_chunk_streams_in_use_are_not_counted_twice():
    reader = ChunkReader(WireLimits(chunk_streams=2))
    data = header0(4, 0, 1, 8) + b"a" + header0(6, 0, 1, 9) + b"v" + header0(4, 9, 1, 8) + b"b" + basic(3, 6) + b"w"
    assert [message.payload for message in reader.feed(data)] == [b"a", b"v", b"b", b"w"]


def test_unfinished_messages_together_are_limited():
    limits = WireLimits(unfinished_bytes=1000)
    data = b"".join(header0(csid, 0, 500, 9) + b"v" * 128 for csid in range(10, 18))
    error = refused(data, limits)
    assert (error.limit, error.maximum) == ("unfinished_bytes", 1000)
    reader = ChunkReader(limits)
    reader.feed(data[: 7 * (12 + 128)])
    assert reader.unfinished_bytes == 896


def test_unfinished_bytes_fall_when_a_message_ends():
    reader = ChunkReader(WireLimits(unfinished_bytes=1000))
    message = header0(6, 0, 900, 9) + b"\xc6".join(b"v" * min(128, 900 - at) for at in range(0, 900, 128))
    for _ in range(50):
        assert reader.feed(message[:500]) == []
        assert reader.unfinished_bytes == 500 - 12 - 3
        assert len(reader.feed(message[500:])) == 1
        assert reader.unfinished_bytes == 0


def test_failed_reader_holds_nothing():
    reader = ChunkReader()
    begun = set_chunk_size(1 << 20) + header0(6, 0, 2_000_000, 9) + b"v" * (1 << 20)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        reader.feed(begun)
        held = tracemalloc.get_traced_memory()[0] - before
        with contextlib.suppress(RemoteProtocolError):
            reader.feed(basic(3, 9))
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert reader.failed
    assert held > 1 << 20
    assert left < 10_000


# ------------------------------------------------------------------------------------------------- absurd values


# ------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk_size_min_bytes", 0),
        ("chunk_size_max_bytes", 127),
        ("chunk_size_max_bytes", 1 << 31),
        ("media_message_bytes", 511),
        ("media_message_bytes", 1 << 24),
        ("data_message_bytes", 0),
        ("command_message_bytes", 511),
        ("control_message_bytes", 9),
        ("chunk_streams", 0),
        ("chunk_streams", 65599),
        ("unfinished_bytes", 0),
        ("aggregate_messages", 0),
        ("message_streams", 0),
        ("commands_per_second", -1),
        ("handshake_time_s", -0.1),
        ("ping_timeout_s", float("nan")),
        ("ping_timeout_s", "30"),
        ("chunk_streams", 6.5),
        ("chunk_streams", True),
    ],
)
def test_limit_out_of_range_is_named(field, value):
    with pytest.raises(ConfigError, match=rf"{field} is {value!r}(, allowed is a | \(\w+\), it must be )"):
        WireLimits(**{field: value})


def test_times_and_rates_may_be_zero():
    limits = WireLimits(handshake_time_s=0, first_command_s=0, first_media_s=0, commands_per_second=0)
    assert limits.handshake_time_s == 0
