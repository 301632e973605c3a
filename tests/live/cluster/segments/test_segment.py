"""Octets of segments: one way to write each, and nothing else is read."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.live.cluster.segments.segment import (
    BODY_BYTES,
    ID_BYTES,
    MESSAGES,
    Frame,
    Position,
    Segment,
    SegmentId,
    Sequel,
    decode_body,
    encode_body,
    id_of,
    object_of,
    segment_of,
)

TYPES = st.sampled_from([8, 9, 15, 18])
FRAMES = st.lists(st.builds(Frame, TYPES, st.integers(0, 0xFFFFFFFF), st.binary(max_size=40)), min_size=1, max_size=8)
HEADERS = st.lists(st.tuples(TYPES, st.binary(max_size=20)), max_size=4, unique=True)
STARTS = st.integers(0, 1 << 40)


def made(start_ms: int = 7000, then: Sequel = Sequel.KEY, next_ms: int = 9000) -> tuple[SegmentId, bytes]:
    frames = [Frame(9, start_ms, b"key"), Frame(8, start_ms + 20, b"sound")]
    return segment_of("live/cam", Position(5, start_ms, 0), [(9, b"config")], frames, then, next_ms)


@settings(deadline=None)
@given(HEADERS, FRAMES, STARTS)
def test_body_when_written_and_read_is_what_it_was(headers, frames, start):
    at = start & 0xFFFFFFFF
    assert decode_body(encode_body(headers, frames, at), at) == (tuple(headers), tuple(frames))


@settings(deadline=None)
@given(HEADERS, FRAMES, st.integers(0, 0xFFFFFFFF))
def test_body_when_the_stream_is_moved_in_time_has_the_same_octets(headers, frames, shift):
    moved = [frame._replace(timestamp=frame.timestamp + shift & 0xFFFFFFFF) for frame in frames]
    assert encode_body(headers, moved, shift) == encode_body(headers, frames, 0)


@settings(deadline=None)
@given(HEADERS, FRAMES, st.data())
def test_body_when_cut_short_or_longer_is_refused(headers, frames, data):
    body = encode_body(headers, frames, 0)
    for wrong in (body[: data.draw(st.integers(0, len(body) - 1))], body + b"\0"):
        with pytest.raises(RemoteProtocolError):
            decode_body(wrong, 0)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_body_when_octets_are_any_is_refused_or_written_the_same_way(octets):
    try:
        headers, frames = decode_body(octets, 0)
    except RemoteProtocolError:
        return
    assert encode_body(headers, frames, 0) == octets


@pytest.mark.parametrize(
    "body",
    [
        b"\x02\0\0\0\0\0\1\x09\0\0\0\0\0\0\0\0",  # another version
        b"\x01\0\0\0\0\0\0",  # no messages
        b"\x01\0\0\0\1\0\0",  # too many messages
        b"\x01\0\x41",  # too many headers
        b"\x01\0\0\0\0\0\1\x14\0\0\0\0\0\0\0\0",  # a command
        b"\x01\0\2\x09\0\0\0\0\x09\0\0\0\0\0\0\0\1\x09\0\0\0\0\0\0\0\0",  # a header twice
        b"\x01\0\0\0\0\0\1\x09\0\0\0\0\xff\xff\xff\xff",  # a length without end
        bytes(BODY_BYTES + 1),
    ],
)
def test_body_when_it_breaks_a_rule_is_refused(body):
    with pytest.raises(RemoteProtocolError) as raised:
        decode_body(body, 0)
    assert raised.value.code == "segment"


@pytest.mark.parametrize(("then", "next_ms"), [(Sequel.KEY, 9000), (Sequel.PART, 0), (Sequel.END, 0)])
def test_id_when_written_and_read_is_what_it_was(then, next_ms):
    name, _ = made(then=then, next_ms=next_ms)
    assert SegmentId.decode(name.encode()) == name
    assert (
        name.next
        == {
            Sequel.KEY: Position(5, 9000, 0),
            Sequel.PART: Position(5, 7000, 1),
            Sequel.END: None,
        }[then]
    )
    assert len(name.encode()) <= ID_BYTES


@settings(deadline=None)
@given(st.binary(max_size=120))
def test_id_when_octets_are_any_is_refused_or_written_the_same_way(octets):
    try:
        name = SegmentId.decode(octets)
    except RemoteProtocolError:
        return
    assert name.encode() == octets


@pytest.mark.parametrize(
    "change",
    [
        {"next_ms": 7000},
        {"then": Sequel.END},
        {"count": 0},
        {"count": MESSAGES + 1},
        {"size_bytes": BODY_BYTES + 1},
        {"stream": "live/.."},
        {"stream": "live/\x1b[2J"},
        {"stream": "live//cam"},
        {"stream": "live/cam?token=1"},
    ],
)
def test_id_when_it_contradicts_itself_is_refused(change):
    name, _ = made()
    with pytest.raises(RemoteProtocolError):
        SegmentId.decode(dataclasses.replace(name, **change).encode())


def test_id_when_the_name_is_too_long_cannot_be_written():
    with pytest.raises(LocalProtocolError):
        dataclasses.replace(made()[0], stream="live/" + "x" * 251).encode()


def test_ids_when_sorted_as_octets_are_sorted_by_time():
    """Whoever fetches in the order of ids fetches the earliest segment first."""
    names = [
        dataclasses.replace(made()[0], position=place, next_ms=1 << 50)
        for place in (Position(5, 900, 0), Position(5, 900, 1), Position(5, 66_000, 0), Position(6, 0, 0))
    ]
    assert sorted(name.encode() for name in reversed(names)) == [name.encode() for name in names]


def test_segment_when_the_body_is_another_one_is_a_lie():
    name, body = made()
    assert id_of(object_of(name, body)) == name.encode()
    assert Segment.decode(object_of(name, body)).frames[0] == Frame(9, 7000, b"key")
    for wrong in (body[:-1] + b"!", body + b"!", b""):
        with pytest.raises(RemoteProtocolError) as raised:
            Segment.decode(object_of(name, wrong))
        assert raised.value.code == "segment-hash"


def test_segment_when_the_id_counts_wrong_is_refused():
    name, body = made()
    with pytest.raises(RemoteProtocolError):
        Segment.decode(object_of(dataclasses.replace(name, count=3), body))


@pytest.mark.parametrize("octets", [b"", b"\0", b"\0\0body", b"\0\xffshort", b"\xff\xff" + bytes(99_999)])
def test_object_when_it_has_no_id_is_refused(octets):
    with pytest.raises(RemoteProtocolError):
        id_of(octets)


def test_body_when_larger_than_an_object_may_be_is_refused():
    with pytest.raises(LimitExceededError) as raised:
        encode_body([], [Frame(9, 0, bytes(BODY_BYTES))], 0)
    assert raised.value.limit == "segment_bytes"
