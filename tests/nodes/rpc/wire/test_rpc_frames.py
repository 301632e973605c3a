"""Frames and tags: round trips, and whatever else may come."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.nodes.rpc.wire import frames as wire
from flowctl.nodes.rpc.wire.frames import LONGEST_MS, MOST_TAG_CREDIT, NUMBER_MODULUS, TAG_BYTES, make_tag, read_tag


@given(
    number=st.integers(0, NUMBER_MODULUS - 1),
    left_s=st.floats(0, 4_000_000),
    credit=st.integers(0, MOST_TAG_CREDIT),
)
def test_tag_when_read_says_what_it_was_made_with(number, left_s, credit):
    tag = make_tag(number, left_s, credit)
    assert len(tag) == TAG_BYTES
    read = read_tag(tag)
    assert read is not None
    assert read[1] == credit
    assert 0 <= left_s - read[0] < 0.002


def test_tag_when_there_is_no_deadline_has_the_longest():
    assert [read_tag(make_tag(0, left_s)) for left_s in (inf, 1e300)] == [(LONGEST_MS / 1000, 0)] * 2


def test_tag_when_of_another_request_is_another():
    assert len({make_tag(number, 15.0) for number in range(1000)}) == 1000


@given(st.binary(max_size=32))
def test_tag_when_foreign_says_nothing(octets):
    assert read_tag(octets) is None or octets == make_tag(
        int.from_bytes(octets[:6], "big"), int.from_bytes(octets[7:11], "big") / 1000, octets[6]
    )


@given(st.integers(0, NUMBER_MODULUS - 1), st.integers(0, TAG_BYTES * 8 - 1))
def test_tag_when_one_bit_is_flipped_is_foreign(number, bit):
    tag = bytearray(make_tag(number, 15.0, 7))
    tag[bit // 8] ^= 1 << bit % 8
    assert read_tag(bytes(tag)) is None


@given(code=st.binary(min_size=1).filter(lambda octets: b"." not in octets), tag=st.binary(), text=st.binary())
def test_failure_when_read_is_what_was_made(code, tag, text):
    assert wire.failed_request(wire.failure(code, tag, text)) == (code, tag, [text] if text else [])


@given(st.lists(st.binary(max_size=8), max_size=5))
def test_frames_when_they_are_anything_are_read_without_an_exception(frames):
    read = wire.failed_request(frames)
    assert read is None or frames[1] == wire.REPLY
    credit = wire.credit_of(frames)
    assert credit is None or 0 < credit <= wire.MOST_CREDIT


@pytest.mark.parametrize(
    ("octets", "count"),
    [(b"1", 1), (b"1048576", 1 << 20), (b"1048577", None), (b"0", None), (b"-1", None), (b"", None), (b"9" * 9, None)],
)
def test_credit_when_read_is_a_number_within_bounds(octets, count):
    assert wire.credit_of([wire.CREDIT, b"t", octets]) == count
