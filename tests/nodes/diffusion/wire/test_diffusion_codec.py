"""The CBOR of the mini-protocol: exact octets, every split, and nothing but typed errors for junk."""

from __future__ import annotations

import tracemalloc

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.nodes.diffusion.wire.codec import MAX_ID_BYTES, MAX_ITEMS, MAX_OBJECT_BYTES, Decoder, encode, reply_bytes
from flowctl.nodes.diffusion.wire.protocol import (
    SIZE_LIMIT_BYTES,
    Announced,
    Done,
    Init,
    Prove,
    ReplyIds,
    ReplyObjects,
    RequestIds,
    RequestObjects,
    State,
    Subscribe,
    Tell,
)

EXACT = [
    (State.INIT, Init(), "81 00"),
    (State.IDLE, Done(), "81 05"),
    (State.IDLE, RequestIds(True, 2, 3), "84 01 F5 02 03"),
    (State.IDLE, RequestIds(False, 2, 3), "84 01 F4 02 03"),
    (State.IDS_NONBLOCKING, ReplyIds(()), "82 02 9F FF"),
    (State.IDS_BLOCKING, ReplyIds((Announced(b"a"), Announced(b"b", 300))), "82 02 9F 41 61 82 41 62 19 01 2C FF"),
    (State.IDLE, RequestObjects((b"a", b"bc")), "82 03 9F 41 61 42 62 63 FF"),
    (State.IDLE, Subscribe(True, b"*"), "83 06 F5 41 2A"),
    (State.IDS_BLOCKING, Subscribe(False, b"ab"), "83 06 F4 42 61 62"),
    (State.IDLE, Prove(b"x"), "82 07 41 78"),
    (State.IDS_BLOCKING, Tell(b"x"), "82 08 41 78"),
    (State.OBJECTS, ReplyObjects((b"", b"xyz")), "82 04 9F 40 43 78 79 7A FF"),
]


def decode_octets(octets, state):
    decoder = Decoder()
    for octet in octets:
        decoder.feed(bytes((octet,)))
        assert decoder.next(state) is None


def decode(octets, state):
    decoder = Decoder()
    decoder.feed(octets)
    return decoder.next(state)


@pytest.mark.parametrize(("state", "message", "octets"), EXACT)
def test_message_when_encoded_has_exactly_these_octets_and_is_read_back(state, message, octets):
    """Each message has one form on the wire (OD-06)."""
    assert bytes.fromhex(octets) == encode(message)
    assert message == decode(bytes.fromhex(octets), state)


def test_reply_of_ids_when_empty_is_for_requests_that_do_not_block():
    with pytest.raises(RemoteProtocolError, match="empty reply to a blocking request"):
        decode(bytes.fromhex("82029FFF"), State.IDS_BLOCKING)
    assert ReplyIds(()) == decode(bytes.fromhex("82029FFF"), State.IDS_NONBLOCKING)


@pytest.mark.parametrize("octets", ["820280", "82028141 61", "820481 40", "820380"])
def test_list_when_of_definite_length_is_refused(octets):
    """Lists of ids and objects are of indefinite length, and no others are taken (OD-08)."""
    octets = bytes.fromhex(octets)
    state = {2: State.IDS_NONBLOCKING, 3: State.IDLE, 4: State.OBJECTS}[octets[1]]
    with pytest.raises(RemoteProtocolError, match="indefinite"):
        decode(octets, state)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize(
    ("key", "length"), [(0, 1), (1, 4), (2, 2), (3, 2), (4, 2), (5, 1), (6, 3), (7, 2), (6, 1), (1, 3), (0, 2)]
)
def test_message_when_not_allowed_in_the_state_is_refused_at_its_second_octet(state, key, length):
    """The error names state, key and length, and comes before the rest of the message (OD-09)."""
    allowed = {
        State.INIT: {(0, 1)},
        State.IDLE: {(1, 4), (3, 2), (5, 1), (6, 3), (7, 2)},
        State.IDS_BLOCKING: {(2, 2), (6, 3)},
        State.IDS_NONBLOCKING: {(2, 2)},
        State.OBJECTS: {(4, 2)},
        State.DONE: set(),
    }
    octets = bytes((0x80 | length, key))
    if (key, length) in allowed[state]:
        decode(octets, state)
        return
    with pytest.raises(RemoteProtocolError) as caught:
        decode(octets, state)
    expected = (
        "message_size_bytes"
        if state is State.DONE
        else f"state {state.value}: unexpected message with key {key} and length {length}"
    )
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("state", "octets"),
    [
        (State.IDLE, "84 01 F5 18 02 03"),  # a count that has a shorter form
        (State.IDLE, "84 01 F5 19 00 02 03"),
        (State.IDLE, "84 01 F5 1A 00 01 00 00 03"),  # a count of 17 bits
        (State.IDLE, "84 01 01 02 03"),  # no truth value
        (State.IDLE, "84 01 F5 F5 03"),  # a truth value for a count
        (State.IDLE, "84 01 F5 20 03"),  # a negative count
        (State.IDLE, "82 03 9F 40 FF"),  # an id of no length
        (State.IDLE, "82 03 9F 61 61 FF"),  # text
        (State.IDLE, "82 03 9F 5F 41 61 FF FF"),  # a byte string in pieces
        (State.IDLE, "82 03 9F 9F FF FF"),
        (State.IDLE, "82 03 9F C2 41 61 FF"),  # a tag
        (State.IDLE, "82 03 9F A0 FF"),  # a map
        (State.IDLE, "82 03 9F F6 FF"),
        (State.IDLE, "82 03 9F 81 81 81 41 61 FF"),  # too deep
        (State.IDLE, "9F 05 FF"),  # the message itself of indefinite length
        (State.IDLE, "98 01 05"),
        (State.IDLE, "81 18 05"),
        (State.IDLE, "FF"),
        (State.IDLE, "82 03 FF"),
        (State.IDS_NONBLOCKING, "82 02 9F 82 41 61 41 62 FF"),
        (State.IDS_NONBLOCKING, "82 02 9F 83 41 61 01 02 FF"),
        (State.IDS_NONBLOCKING, "82 02 9F 81 41 61 FF"),
        (State.IDS_NONBLOCKING, "82 02 9F 80 FF"),
        (State.IDS_NONBLOCKING, "82 02 9F 82 41 61 1A 05 00 00 00 FF"),  # an object no reply has room for
        (State.OBJECTS, "82 04 9F 01 FF"),
        (State.OBJECTS, "82 04 9F 5B 7F FF FF FF FF FF FF FF"),
        (State.OBJECTS, "82 04 9F 1C"),
    ],
)
def test_message_when_not_in_its_one_form_is_refused(state, octets):
    with pytest.raises(RemoteProtocolError):
        decode(bytes.fromhex(octets), state)
    with pytest.raises(RemoteProtocolError):
        decode_octets(bytes.fromhex(octets), state)


@pytest.mark.parametrize("state", [State.IDLE, State.OBJECTS])
def test_message_when_larger_than_the_state_allows_is_refused_by_its_head(state):
    key, limit = (3 if state is State.IDLE else 4), SIZE_LIMIT_BYTES[state]
    room = limit - 3 - 5 - 1  # beside the list's head, the object's, and the end of the list
    head = bytes((0x82, key, 0x9F))
    whole = head + b"\x5a" + room.to_bytes(4, "big")
    if state is State.OBJECTS:
        assert ReplyObjects((bytes(room),)) == decode(whole + bytes(room) + b"\xff", state)
    with pytest.raises(LimitExceededError, match=f"the limit is {limit:g}".replace("+", r"\+")):
        decode(head + b"\x5a" + (limit + 8).to_bytes(4, "big"), state)


def test_largest_object_when_alone_fits_into_a_reply():
    octets = encode(ReplyObjects((bytes(MAX_OBJECT_BYTES),)))
    assert len(octets) <= reply_bytes(1, MAX_OBJECT_BYTES) <= SIZE_LIMIT_BYTES[State.OBJECTS]
    assert ReplyObjects((bytes(MAX_OBJECT_BYTES),)) == decode(octets, State.OBJECTS)


def test_items_when_more_than_the_bound_are_refused():
    most = b"\x82\x02\x9f" + b"\x41a" * MAX_ITEMS
    assert len(decode(most + b"\xff", State.IDS_NONBLOCKING).announced) == MAX_ITEMS
    with pytest.raises(LimitExceededError, match="items"):
        decode(most + b"\x41a", State.IDS_NONBLOCKING)


@pytest.mark.parametrize(
    "message",
    [
        RequestIds(True, 65_536, 1),
        RequestIds(True, 0, -1),
        RequestObjects((b"",)),
        RequestObjects((bytes(MAX_ID_BYTES + 1),)),
        ReplyIds((Announced(b""),)),
        RequestObjects((b"a",) * (MAX_ITEMS + 1)),
    ],
)
def test_message_when_no_peer_would_take_it_is_not_encoded(message):
    with pytest.raises(LocalProtocolError):
        encode(message)


ids = st.binary(min_size=1, max_size=MAX_ID_BYTES)
counts = st.integers(0, 65_535)
announced = st.builds(Announced, ids, st.none() | st.integers(0, MAX_OBJECT_BYTES))
SAID = st.one_of(
    st.tuples(st.just(State.INIT), st.just(Init())),
    st.tuples(st.just(State.IDLE), st.builds(RequestIds, st.booleans(), counts, counts)),
    st.tuples(st.just(State.IDLE), st.builds(RequestObjects, st.lists(ids, max_size=4).map(tuple))),
    st.tuples(st.just(State.IDLE), st.just(Done())),
    st.tuples(st.sampled_from([State.IDLE, State.IDS_BLOCKING]), st.builds(Subscribe, st.booleans(), ids)),
    st.tuples(st.just(State.IDLE), st.builds(Prove, ids)),
    st.tuples(st.sampled_from([State.IDLE, State.IDS_BLOCKING]), st.builds(Tell, ids)),
    st.tuples(st.just(State.IDS_BLOCKING), st.builds(ReplyIds, st.lists(announced, min_size=1, max_size=4).map(tuple))),
    st.tuples(st.just(State.IDS_NONBLOCKING), st.builds(ReplyIds, st.lists(announced, max_size=4).map(tuple))),
    st.tuples(
        st.just(State.OBJECTS), st.builds(ReplyObjects, st.lists(st.binary(max_size=300), max_size=4).map(tuple))
    ),
)


@settings(deadline=None, max_examples=80)
@given(said=st.lists(SAID, min_size=1, max_size=3))
def test_messages_when_cut_at_any_place_are_the_same(said):
    octets = b"".join(encode(message) for _, message in said)
    for cut in range(len(octets) + 1):
        decoder, found = Decoder(), []
        for piece in (octets[:cut], octets[cut:]):
            decoder.feed(piece)
            while len(found) < len(said) and (message := decoder.next(said[len(found)][0])) is not None:
                found.append(message)
        assert [message for _, message in said] == found
        assert decoder.buffered_bytes == 0
    decoder, found = Decoder(), []
    for octet in octets:
        decoder.feed(bytes((octet,)))
        message = decoder.next(said[len(found)][0])
        found += [] if message is None else [message]
    assert [message for _, message in said] == found


@settings(deadline=None, max_examples=80)
@given(said=SAID)
def test_message_when_read_by_another_library_is_what_was_said(said):
    value = cbor2.loads(encode(said[1]))
    kinds = [Init, RequestIds, ReplyIds, RequestObjects, ReplyObjects, Done, Subscribe, Prove, Tell]
    assert value[0] == kinds.index(type(said[1]))


JUNK = st.one_of(
    st.binary(max_size=200),
    st.tuples(SAID, st.integers(0, 400), st.integers(0, 255)).map(
        lambda case: (
            (octets := bytearray(encode(case[0][1])))
            and (octets.__setitem__(case[1] % len(octets), case[2]) or bytes(octets))
        )
    ),
    st.lists(
        st.sampled_from([b"\x82", b"\x84", b"\x9f", b"\xff", b"\x41a", b"\x01", b"\x02", b"\x03", b"\x04", b"\xf5"]),
        max_size=40,
    ).map(b"".join),
)


@settings(deadline=None, max_examples=400)
@given(octets=JUNK, state=st.sampled_from(list(State)), size=st.integers(1, 50))
def test_junk_when_read_gives_messages_or_the_typed_error(octets, state, size):
    decoder, read, fed = Decoder(), 0, 0
    try:
        for start in range(0, len(octets), size):
            decoder.feed(octets[start : start + size])
            fed += len(octets[start : start + size])
            while (message := decoder.next(state)) is not None:
                encoded = encode(message)
                assert octets[read : read + len(encoded)] == encoded
                read += len(encoded)
    except RemoteProtocolError:
        return
    assert decoder.buffered_bytes == fed - read


def test_flood_when_of_promises_keeps_no_memory():
    decoders = [Decoder() for _ in range(200)]
    tracemalloc.start()
    for decoder in decoders:
        decoder.feed(b"\x82\x04\x9f\x5a\x00\x26\x00\x00")
        assert decoder.next(State.OBJECTS) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    decoder = Decoder()
    for _ in range(20):
        decoder.feed(b"\x84\x01\xf4\x00\x01" * 1000)
        while decoder.next(State.IDLE) is not None:
            pass
    assert len(decoder._buffer) == 0
