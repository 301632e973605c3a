"""The wire of a messenger: header, acknowledgements, extension, announcement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.errors import RemoteProtocolError
from flowctl.nodes.messenger.wire import (
    MAX_ID,
    MAX_NUMBER,
    MAX_RANGES,
    Extension,
    encode_ack,
    encode_acks,
    encode_announcement,
    encode_message,
    parse_acks,
    parse_announcement,
    parse_message,
)

IDS = st.integers(0, MAX_ID)


@pytest.mark.parametrize("body", [b"a-b-c", b"\x00-\xff-\x00", b"", b"-", b"7-0-2-"])
def test_body_when_it_holds_any_octets_is_all_after_the_third_dash(body):
    """The header ends at the third dash, whatever follows (ME-06)."""
    assert parse_message(b"1-2-3-" + body) == (1, 2, 3, body)


@given(IDS, IDS, IDS, st.binary(max_size=100))
def test_message_when_encoded_and_parsed_is_the_same(message_id, source, destination, body):
    frame = encode_message(message_id, source, destination, body)
    assert parse_message(frame) == (message_id, source, destination, body)


NO_HEADERS = b"x-1-2-3 1-2-3 - --- 1-2-x- 1--2- +1-2-3- 1_0-2-3- 0x1-2-3-".split()
TOO_LARGE = [b"%d-0-0-" % (MAX_ID + 1), b"0-%d-0-" % (MAX_ID + 1), b"0-0-%d-" % (MAX_ID + 1)]
NO_DIGITS = [b"", b" 1-2-3-", "²-0-0-".encode(), "\u0661-0-0-".encode()]


@pytest.mark.parametrize("frame", [*NO_HEADERS, *TOO_LARGE, *NO_DIGITS, b"0" * 10_000 + b"1-0-0-"])
def test_header_when_malformed_is_refused(frame):
    """Three plain decimal numbers of at most 2^64 - 1 are asked for, nothing that Python's int takes beside (ME-07)."""
    with pytest.raises(RemoteProtocolError, match="three ids") as caught:
        parse_message(frame)
    assert len(str(caught.value)) < 500


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(0, MAX_ID))
def test_acks_when_of_many_messages_name_exactly_those(ids, incarnation):
    (frame,) = encode_acks(incarnation, ids)
    ranges = parse_acks(parse_message(frame), incarnation)
    assert {number for first, last in ranges for number in range(first, last + 1)} == ids
    assert parse_acks(parse_message(frame), incarnation ^ 1) == []


def test_acks_when_of_very_many_ranges_are_several():
    ids = range(0, 2 * (MAX_RANGES + 1), 2)
    frames = encode_acks(7, ids)
    assert len(frames) == 2
    named = [number for frame in frames for number, _ in parse_acks(parse_message(frame), 7)]
    assert named == list(ids)


def test_ack_when_of_one_message_is_that_of_any_peer():
    assert encode_ack(41) == b"41-0-2-"
    assert parse_acks(parse_message(b"41-0-2-"), 5) == [(41, 41)]


@pytest.mark.parametrize("body", [b"x", b"5:", b"5:1", b"5:1-", b"5:1-2-3", b"5:1-2,", b":1-2", b"5:1-2," * 5000])
def test_acks_when_malformed_are_refused(body):
    with pytest.raises(RemoteProtocolError, match="acknowledgement"):
        parse_acks(parse_message(b"1-0-2-" + body), 5)


NUMBERS = st.integers(0, MAX_NUMBER)


@given(st.builds(Extension, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS))
def test_extension_when_encoded_and_decoded_is_the_same(extension):
    assert Extension.decode(extension.encode()) == extension


@pytest.mark.parametrize("place", range(5))
def test_extension_when_a_number_is_out_of_range_is_refused(place):
    numbers = [1, 1, 1, 1, 1]
    numbers[place] = MAX_NUMBER + 1
    with pytest.raises(RemoteProtocolError, match="2\\^63"):
        Extension.decode(Extension(*numbers).encode())


@given(st.binary(max_size=60))
def test_extension_when_a_frame_is_something_else_is_none(frame):
    assert Extension.decode(frame) is None


def test_announcement_when_understood_tells_the_incarnation():
    name, _, value = encode_announcement(0xABC).decode().partition(":")
    assert name.startswith("X-")
    assert parse_announcement(value) == 0xABC
    assert [parse_announcement(text) for text in (None, "", "1", "1:", "2:abc", "1:xyz", "1:" + "f" * 17)] == [None] * 7
