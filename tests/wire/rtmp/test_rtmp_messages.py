"""RTMP messages as values: control, commands, data and aggregates, and what peers really send."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp import messages
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.amf.values import UNDEFINED, EcmaArray
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.messages import (
    Abort,
    Acknowledgement,
    Command,
    PeerBandwidth,
    SetChunkSize,
    UserControl,
    WindowAckSize,
    decode_message,
    encode_control,
    split_aggregate,
)
from flowctl.wire.rtmp.wire import Message

U32 = st.integers(0, 2**32 - 1)


def message(type_id: int, payload: bytes, timestamp: int = 0, msid: int = 0) -> Message:
    return Message(3, timestamp, type_id, msid, payload)


def refused(received: Message, limits: WireLimits | None = None) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_message(received, limits or WireLimits())
    return caught.value.code


# ------------------------------------------------------------------------------------------------- the message


def test_message_compares_by_value_and_shows_itself_in_short():
    assert Message(4, 1, 8, 1, b"ab") == Message(4, 1, 8, 1, b"ab")
    for other in (
        Message(5, 1, 8, 1, b"ab"),
        Message(4, 2, 8, 1, b"ab"),
        Message(4, 1, 9, 1, b"ab"),
        Message(4, 1, 8, 2, b"ab"),
        Message(4, 1, 8, 1, b"ac"),
    ):
        assert Message(4, 1, 8, 1, b"ab") != other
    assert Message(4, 1, 8, 1, b"ab") != "ab"
    assert repr(Message(4, 1, 8, 1, b"ab")) == "Message(csid=4, timestamp=1, type_id=8, msid=1, payload=2 bytes 6162)"
    assert len(repr(Message(4, 1, 8, 1, bytes(10_000)))) < 120
    with pytest.raises(TypeError):
        hash(Message(4, 1, 8, 1, b"ab"))


# ------------------------------------------------------------------------------------------------- control


@pytest.mark.parametrize(
    ("value", "type_id", "body"),
    [
        (SetChunkSize(4096), 1, "00001000"),
        (Abort(6), 2, "00000006"),
        (Acknowledgement(0x01020304), 3, "01020304"),
        (WindowAckSize(2_500_000), 5, "002625a0"),
        (PeerBandwidth(2_500_000, messages.LIMIT_DYNAMIC), 6, "002625a002"),
        (UserControl(messages.EVENT_STREAM_BEGIN, stream_id=1), 4, "000000000001"),
        (UserControl(messages.EVENT_STREAM_EOF, stream_id=1), 4, "000100000001"),
        (UserControl(messages.EVENT_STREAM_DRY, stream_id=1), 4, "000200000001"),
        (UserControl(messages.EVENT_SET_BUFFER_LENGTH, stream_id=1, buffer_ms=3000), 4, "00030000000100000bb8"),
        (UserControl(messages.EVENT_STREAM_IS_RECORDED, stream_id=1), 4, "000400000001"),
        (UserControl(messages.EVENT_PING_REQUEST, timestamp=0xA0B0C0D0), 4, "0006a0b0c0d0"),
        (UserControl(messages.EVENT_PING_RESPONSE, timestamp=0xA0B0C0D0), 4, "0007a0b0c0d0"),
        (UserControl(0x1A, raw=b"\1"), 4, "001a01"),
        (UserControl(0xFFFF), 4, "ffff"),
    ],
)
def test_control_message_is_written_and_read(value, type_id, body):
    encoded = encode_control(value)
    assert encoded == Message(2, 0, type_id, 0, bytes.fromhex(body))
    assert decode_message(encoded) == value


@pytest.mark.parametrize(
    ("type_id", "body"),
    [(type_id, "000000") for type_id in (1, 2, 3, 5, 6)]
    + [(4, ""), (4, "00"), (4, "0000"), (4, "0006"), (4, "0006000000"), (4, "000300000001"), (4, "0003000000010000")],
)
def test_control_message_with_a_short_body_is_refused(type_id, body):
    assert refused(message(type_id, bytes.fromhex(body))) == "control-body"


def test_control_message_with_a_long_body_is_read():
    assert decode_message(message(3, b"\0\0\0\7????")) == Acknowledgement(7)
    assert decode_message(message(4, b"\0\6\0\0\0\7????")) == UserControl(6, timestamp=7)


def test_peer_bandwidth_without_type_or_with_an_unknown_one_is_read():
    assert decode_message(message(6, b"\0\0\0\7")) == PeerBandwidth(7, messages.LIMIT_DYNAMIC)
    assert decode_message(message(6, b"\0\0\0\7\x63")) == PeerBandwidth(7, 0x63)


@pytest.mark.parametrize("value", [0, 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_absurd_control_values_are_read_as_they_are(value):
    """Windows of 0 and 1 and counters beyond what was sent: what they mean is decided elsewhere."""
    body = value.to_bytes(4, "big")
    assert decode_message(message(5, body)) == WindowAckSize(value)
    assert decode_message(message(3, body)) == Acknowledgement(value)
    assert decode_message(message(4, b"\0\6" + body)) == UserControl(6, timestamp=value)


@pytest.mark.parametrize(
    "value",
    [
        SetChunkSize(-1),
        Acknowledgement(2**32),
        PeerBandwidth(1, 256),
        UserControl(65536),
        UserControl(0, stream_id=-1),
        UserControl(3, buffer_ms=2**32),
    ],
)
def test_control_value_that_does_not_fit_is_refused(value):
    with pytest.raises(LocalProtocolError, match="out of range"):
        encode_control(value)


def test_acknowledgement_starts_again_before_it_passes_32_bits():
    """FMLE disconnects when the counter wraps at 2^32; it is reset at 0xF0000000."""
    assert Acknowledgement.of(0) == Acknowledgement(0)
    assert Acknowledgement.of(0xF0000000 - 1) == Acknowledgement(0xF0000000 - 1)
    assert Acknowledgement.of(0xF0000000) == Acknowledgement(0)
    assert Acknowledgement.of(2**40 + 5).sequence_number < 0xF0000000


# ------------------------------------------------------------------------------------------------- commands


def test_command_in_amf3_has_plain_values():
    """AMF3 values inside are unwrapped, so a Flash client's connect reads like any other."""
    connect = b"\x11\x0a\x0b\x01\x07app\x06\x09live\x1dobjectEncoding\x04\x03\x01"  # in AMF3
    body = amf0.encode("connect", 1.0) + connect
    expected = Command("connect", 1.0, {"app": "live", "objectEncoding": 3})
    assert decode_message(message(17, b"\0" + body)) == expected
    assert decode_message(message(17, body)) == expected, "the format byte may be missing"


def test_connect_object_may_be_an_ecma_array_with_odd_members():
    value = EcmaArray({"app": "live", "swfUrl": None, "pageUrl": UNDEFINED})
    assert decode_message(message(20, amf0.encode("connect", 1.0, value))) == Command("connect", 1.0, value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("x",), 0.0),
        (("x", None), 0.0),
        (("x", "1"), 0.0),
        (("x", True), 0.0),
        (("x", UNDEFINED), 0.0),
        (("x", math.nan), 0.0),
        (("x", math.inf), 0.0),
        (("x", -3.5), -3.5),
        (("x", 4.0), 4.0),
    ],
)
def test_transaction_id_that_cannot_be_answered_is_0(values, expected):
    """Missing, null, or no finite number: the command is read, and gets no answer by number."""
    command = decode_message(message(20, amf0.encode(*values)))
    assert (command.transaction_id, command.object, command.arguments) == (expected, None, ())


@pytest.mark.parametrize("values", [(), (False,), (1.0, "connect"), ({"a": 1.0},), (None,)])
def test_command_that_does_not_begin_with_a_name_is_refused(values):
    assert refused(message(20, amf0.encode(*values))) == "command-name"


def test_command_that_is_cut_off_is_refused():
    """At every octet: the reader says so and nothing else happens."""
    body = amf0.encode("connect", 1.0, {"app": "live"})
    codes = {refused(message(20, body[:at])) for at in range(1, len(body)) if at not in (10, 19)}
    assert codes == {"amf-truncated"}


def test_command_is_held_to_the_amf_limits():
    limits = WireLimits(amf=AmfLimits(depth=3, nodes=10))
    deep = amf0.encode("x", 0.0, {"a": {"a": {"a": {"a": 1.0}}}})
    assert refused(message(20, deep), limits) == "limit:amf_depth"
    assert refused(message(20, amf0.encode("x", *([0.0] * 20))), limits) == "limit:amf_nodes"
    with pytest.raises(LimitExceededError):
        decode_message(message(20, b"\3\0\1a" * 20_000))


# ------------------------------------------------------------------------------------------------- data and others


@pytest.mark.parametrize("type_id", [0, 7, 8, 9, 15, 16, 18, 19, 21, 22, 255])
def test_message_that_is_not_for_us_is_returned_as_it_is(type_id):
    received = message(type_id, b"\xff\xff")
    assert decode_message(received) is received


@settings(max_examples=200, deadline=None)
@given(type_id=st.integers(0, 255), payload=st.binary(max_size=60))
def test_any_body_is_decoded_or_refused(type_id, payload):
    try:
        decode_message(message(type_id, payload))
    except RemoteProtocolError as error:
        assert error.code != "protocol"  # noqa: PT017 - both outcomes are right, and this one has a property


# ------------------------------------------------------------------------------------------------- aggregates


def part(type_id: int, timestamp: int, payload: bytes, back: bytes | None = None) -> bytes:
    head = bytes([type_id]) + len(payload).to_bytes(3, "big") + (timestamp & 0xFFFFFF).to_bytes(3, "big")
    body = head + bytes([timestamp >> 24]) + b"\0\0\0" + payload
    return body + (len(body).to_bytes(4, "big") if back is None else back)


def test_aggregate_is_split_and_its_timestamps_rebased():
    body = part(8, 500, b"a") + part(9, 510, b"vv") + part(18, 520, b"") + part(15, 530, b"d")
    assert split_aggregate(Message(6, 2000, 22, 3, body)) == [
        Message(6, 2000, 8, 3, b"a"),
        Message(6, 2010, 9, 3, b"vv"),
        Message(6, 2020, 18, 3, b""),
        Message(6, 2030, 15, 3, b"d"),
    ]


def test_aggregate_clock_has_32_bits_and_wraps():
    body = part(8, 0x01FFFFFF, b"a") + part(8, 0x02000009, b"b")
    assert [item.timestamp for item in split_aggregate(message(22, body, 0xFFFFFFFA))] == [0xFFFFFFFA, 4]


def test_aggregate_with_going_back_clock_keeps_the_distance():
    body = part(9, 100, b"v") + part(8, 93, b"a")
    assert [item.timestamp for item in split_aggregate(message(22, body, 1000))] == [1000, 993]


def test_aggregate_without_the_last_back_pointer_is_split():
    body = part(8, 0, b"a", b"????") + part(8, 20, b"b", b"")
    assert [item.payload for item in split_aggregate(message(22, body))] == [b"a", b"b"]


def test_empty_aggregate_holds_nothing():
    assert split_aggregate(message(22, b"")) == []


def test_aggregate_yields_only_audio_video_and_data():
    """Commands, control and aggregates inside would bypass what limits them; the first still sets the clock."""
    body = b"".join(part(type_id, 10 * type_id, b"x") for type_id in (1, 4, 8, 17, 19, 20, 22, 9, 0, 255))
    assert [(item.type_id, item.timestamp) for item in split_aggregate(message(22, body, 0))] == [(8, 70), (9, 80)]


def test_aggregate_that_ends_inside_a_message_is_refused():
    body = part(8, 0, b"abc") + part(9, 5, b"defg")
    whole = {0, 14, 15, 16, 17, 18, 33, 34, 35, 36, 37}
    for at in range(len(body)):
        if at in whole:
            split_aggregate(message(22, body[:at]))
        else:
            with pytest.raises(RemoteProtocolError) as caught:
                split_aggregate(message(22, body[:at]))
            assert caught.value.code == "aggregate-truncated"


def test_aggregate_of_too_many_messages_is_refused():
    body = part(8, 0, b"") * 4097
    assert len(split_aggregate(message(22, body[: 4096 * 15]))) == 4096
    with pytest.raises(LimitExceededError) as caught:
        split_aggregate(message(22, body))
    assert (caught.value.limit, caught.value.maximum) == ("aggregate_messages", 4096)
    with pytest.raises(LimitExceededError):
        split_aggregate(message(22, body[:30]), WireLimits(aggregate_messages=1))


@settings(max_examples=100, deadline=None)
@given(payload=st.binary(max_size=200), timestamp=U32)
def test_any_aggregate_is_split_or_refused(payload, timestamp):
    try:
        found = split_aggregate(message(22, payload, timestamp))
    except RemoteProtocolError:
        return
    assert sum(len(item.payload) + 11 for item in found) <= len(payload)


@pytest.mark.parametrize("wrap", [1 << 32, 0xF0000000])
def test_acknowledgement_when_its_count_has_started_again_tells_the_same_distance(wrap):
    """Librtmp and FFmpeg count modulo 2^32, nginx-rtmp and we modulo 0xF0000000; 50 GB pass both often."""
    for sent in range(0, 50_000_000_000, 999_983_641):
        for behind in (0, 1, 40_000, 100_000_000):
            read = max(sent - behind, 0)
            assert Acknowledgement(read % wrap).behind(sent) == sent - read


@pytest.mark.parametrize("wrap", [1 << 32, 0xF0000000])
@given(sent=st.integers(0, 10**12), more=st.integers(1, 16 * 1024 * 1024))
@settings(max_examples=200, deadline=None)
def test_acknowledgement_when_it_is_too_high_means_all(wrap, sent, more):
    if sent < 0xF0000000 <= sent + more:
        more = 0xF0000000 - sent  # before anybody can have started again, a small number is a small number
    assert Acknowledgement((sent + more) % wrap if sent >= 0xF0000000 else sent + more).behind(sent) == 0


def test_acknowledgement_when_it_is_absurd_is_never_less_than_nothing():
    for sent in (0, 1, 3073, 10**6, 2**31, 0xF0000000 - 1, 0xF0000000, 2**32 - 1, 2**32, 2**32 + 1, 10**11):
        for number in (0, 1, 10**6, 2**31 - 1, 2**31, 0xF0000000 - 1, 0xF0000000, 0xF0000001, 2**32 - 1):
            assert 0 <= Acknowledgement(number).behind(sent) <= sent


def test_acknowledgement_when_it_is_0_before_a_count_can_have_started_again_is_nothing():
    assert Acknowledgement(0).behind(3_000_000_000) == 3_000_000_000
