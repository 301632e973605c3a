"""Recorded chunk streams, messages and handshakes of other projects, read with ours.

The vectors name the project and file each was taken from. They are data beside the checkout, not part of it; without
them every test here is skipped, visibly.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random

import pytest
from chance_kit import seeds
from vector_kit import tagged, vectors

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp import messages
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.writer import serialise
from flowctl.wire.rtmp.handshake import CLIENT_KEY, Handshake, find_digest
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.wire import Message, basic_header

EVENTS = {
    "stream_begin": messages.EVENT_STREAM_BEGIN,
    "set_buffer_length": messages.EVENT_SET_BUFFER_LENGTH,
    "ping_request": messages.EVENT_PING_REQUEST,
}


def ends_as(outcome):
    return lambda vector: vector["expected"].get("outcome") == outcome


def pieces(data: bytes) -> list[list[bytes]]:
    """Return `data` cut in several ways: whole, into single octets, and at random."""
    cuts = [[data], [bytes([octet]) for octet in data]]
    for seed in seeds(10):
        rng = random.Random(seed)
        borders = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.randint(1, 20)))})
        cuts.append([data[start:end] for start, end in itertools.pairwise(borders)])
    return cuts


def read(data: bytes, **options) -> list[Message]:
    """Read `data` cut in every way, which must make no difference."""
    results = []
    for cut in pieces(data):
        reader = ChunkReader(**options)
        results.append([message for piece in cut for message in reader.feed(piece)])
    assert all(result == results[0] for result in results)
    return results[0]


def values_of(command: messages.Command) -> list[object]:
    return [
        command.name,
        command.transaction_id,
        *(tagged(value, "amf0") for value in (command.object, *command.arguments)),
    ]


@pytest.mark.parametrize("vector", vectors("chunk_stream", only=ends_as(None)))
def test_recorded_chunk_stream_gives_the_recorded_messages(vector):
    expected = vector["expected"]
    found = read(bytes.fromhex(vector["input_hex"]))
    assert len(found) == len(expected["messages"])
    for message, wanted in zip(found, expected["messages"], strict=True):
        assert (message.csid, message.timestamp, message.type_id) == (
            wanted["csid"],
            wanted["timestamp"],
            wanted["type"],
        )
        assert (message.msid, len(message.payload)) == (wanted["msid"], wanted["length"])
        if "payload_hex" in wanted:
            assert message.payload.hex() == wanted["payload_hex"]
        if "payload_sha256" in wanted:
            assert hashlib.sha256(message.payload).hexdigest() == wanted["payload_sha256"]
    if "first_body" in expected:
        assert values_of(messages.decode_message(found[0])) == expected["first_body"]["values"]


@pytest.mark.parametrize("vector", vectors("chunk_stream", only=ends_as(None)))
def test_recorded_chunk_stream_read_with_a_zero_delta_gives_the_other_times(vector):
    expected = vector["expected"]
    wanted = expected.get("alt_timestamps", [message["timestamp"] for message in expected["messages"]])
    found = read(bytes.fromhex(vector["input_hex"]), type3_after_type0="zero")
    assert [message.timestamp for message in found] == wanted


@pytest.mark.parametrize("vector", vectors("chunk_stream", only=ends_as(None)))
def test_recorded_messages_survive_being_sent_on(vector):
    for message in ChunkReader().feed(bytes.fromhex(vector["input_hex"])):
        octets = serialise(message.type_id, message.msid, message.timestamp, message.payload, message.csid, 128)
        assert read(octets) == [message]


@pytest.mark.parametrize("vector", vectors("chunk_basic_header", only=ends_as(None)))
def test_recorded_basic_header_is_read_and_written(vector):
    header, expected = bytes.fromhex(vector["input_hex"]), vector["expected"]
    assert len(header) == expected["header_len"]
    assert basic_header(expected["fmt"], expected["csid"]) == header
    fields = {0: bytes(11), 1: bytes(7), 2: bytes(3)}[expected["fmt"]]
    (message,) = read(header + fields)
    assert message.csid == expected["csid"]


@pytest.mark.parametrize("vector", vectors("chunk_message_header", only=ends_as(None)))
def test_recorded_message_header_is_read(vector):
    header, expected = bytes.fromhex(vector["input_hex"]), vector["expected"]
    assert len(header) == expected["header_len"]
    payload = bytes(range(expected["length"]))
    (message,) = read(basic_header(expected["fmt"], 4) + header + payload)
    timestamp = expected.get("timestamp", expected.get("delta"))
    assert message == Message(4, timestamp, expected["type"], expected.get("msid", 0), payload)


@pytest.mark.parametrize("vector", vectors("message", "ertmp_message", only=ends_as(None)))
def test_recorded_message_is_read_and_decoded(vector):
    expected = vector["expected"]
    (message,) = read(bytes.fromhex(vector["input_hex"]))
    assert (message.csid, message.timestamp) == (expected["csid"], expected["timestamp"])
    assert (message.type_id, message.msid) == (expected["type"], expected["msid"])
    body, decoded = expected["body"], messages.decode_message(message)
    if body["name"] == "command":
        assert values_of(decoded) == body["values"]
    elif body["name"] == "user_control":
        event = messages.UserControl(
            EVENTS[body["event"]],
            stream_id=body.get("stream_id", 0),
            buffer_ms=body.get("buffer_ms", 0),
            timestamp=body.get("timestamp", 0),
        )
        assert decoded == event
        assert messages.encode_control(event).payload == message.payload
    else:
        assert decoded is message
        assert message.payload.hex().endswith(body.get("data_hex", ""))


@pytest.mark.parametrize("vector", vectors("handshake_packet1", only=ends_as(None)))
def test_recorded_handshake_is_recognised(vector):
    """C0 and C1 of a Flash player: its digest is found where it was found before, and answered."""
    data, expected = bytes.fromhex(vector["input_hex"]), vector["expected"]
    c1, digest = data[1:], expected["digest"]
    assert int.from_bytes(c1[:4], "big") == expected["time"]
    assert c1[4:8].hex() == expected["peer_version_hex"]
    assert find_digest(c1, CLIENT_KEY) == (digest["schema"], digest["offset"], bytes.fromhex(digest["digest_hex"]))
    for cut in pieces(data):
        server = Handshake.server(random.Random(1))
        assert len(b"".join(map(server.receive, cut))) == 3073
        assert server.style == "digest"


@pytest.mark.parametrize("vector", vectors("chunk_stream", only=ends_as("no_crash")))
def test_recorded_crashing_input_is_taken_or_refused(vector):
    """Inputs that crashed another reader: ours returns messages or a protocol error, the same for every cut."""
    data = bytes.fromhex(vector["input_hex"])
    results = []
    for cut in pieces(data):
        # Other readers have no limit on unknown types, so what they say of an input was found without one.
        reader, found, code = ChunkReader(WireLimits(command_message_bytes=0xFFFFFF)), [], None
        try:
            for piece in cut:
                found += reader.feed(piece)
        except RemoteProtocolError as error:
            found += reader.completed_before_fault
            code = error.code
        results.append((found, code))
    assert all(result == results[0] for result in results)
    found, code = results[0]
    for message in found:
        # Refusing the body is right as well; anything else fails the test.
        with contextlib.suppress(RemoteProtocolError):
            messages.decode_message(message)
    recorded = vector["expected"]["mini_result"]
    assert code == {"no_previous_chunk": "chunk-no-header"}.get(recorded)
    assert found or not recorded.startswith(("value", "body:"))
