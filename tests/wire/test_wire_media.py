"""Recorded audio, video and data messages of other implementations, as their own tests expect them to be read."""

from __future__ import annotations

import pytest
from vector_kit import vectors

from flowctl.core.flow.state import MessageClass
from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.media.media import inspect

MEDIA_TYPES = (8, 9)
CLASSIC_CODECS = {("audio", 10): "mp4a", ("video", 7): "avc1"}
PACKETS = {"sequence_start": "sequence_header", "coded_frames": "coded", "metadata": "metadata"}


def is_media(vector):
    return vector["expected"]["type"] in MEDIA_TYPES


def read_messages(vector):
    return ChunkReader(WireLimits(trusted=True)).feed(bytes.fromhex(vector["input_hex"]))


@pytest.mark.parametrize("vector", vectors("message", "ertmp_message", only=is_media))
def test_recorded_message_is_classified_as_its_origin_reads_it(vector):
    expected, body = vector["expected"], vector["expected"]["body"]
    (message,) = read_messages(vector)
    info = inspect(message.type_id, message.payload)
    assert info.kind == body["name"]
    if body["enhanced"]:
        assert info.codec == body["fourcc"]
        assert info.packet == PACKETS[body["packet_type"]]
    else:
        assert info.codec == CLASSIC_CODECS[body["name"], body.get("codec_id", body.get("format"))]
        assert info.packet == "coded"
    if "cts" in body:
        assert info.composition_ms == body["cts"]
    assert expected["type"] == message.type_id


@pytest.mark.parametrize("vector", vectors("message", "ertmp_message", only=is_media))
def test_recorded_message_has_the_class_of_its_marks(vector):
    body = vector["expected"]["body"]
    (message,) = read_messages(vector)
    if body.get("packet_type") in ("sequence_start", "metadata"):
        expected = MessageClass.HEADER
    elif body["name"] == "audio":
        expected = MessageClass.AUDIO
    else:
        expected = MessageClass.KEY if body["frame_type"] == 1 else MessageClass.INTER
    assert inspect(message.type_id, message.payload).message_class is expected


@pytest.mark.parametrize("vector", vectors("message", "ertmp_message", only=is_media))
def test_recorded_header_cut_anywhere_is_never_a_key_frame(vector):
    (message,) = read_messages(vector)
    whole = inspect(message.type_id, message.payload)
    for cut in range(len(message.payload)):
        part = inspect(message.type_id, message.payload[:cut])
        if whole.message_class is MessageClass.HEADER:
            assert part.message_class in (MessageClass.HEADER, MessageClass.INTER, MessageClass.AUDIO)
        else:
            assert part.message_class is not MessageClass.HEADER


@pytest.mark.parametrize("vector", vectors("chunk_stream"))
def test_recorded_chunk_streams_are_classified(vector):
    reader, messages = ChunkReader(WireLimits(trusted=True)), []
    try:
        for octet in bytes.fromhex(vector["input_hex"]):
            messages += reader.feed(bytes((octet,)))
    except RemoteProtocolError:
        # Hostile streams: how they are refused is tested with the chunk reader.
        pass
    kinds = {8: "audio", 9: "video"}
    for message in messages:
        assert inspect(message.type_id, message.payload).kind == kinds.get(message.type_id, "data")


@pytest.mark.parametrize("vector", vectors("amf0_sequence", "amf0_value", "amf3_value", "chunk_stream"))
def test_recorded_octets_of_any_kind_are_classified_as_bodies(vector):
    octets = bytes.fromhex(vector["input_hex"])
    for type_id, kind in ((8, "audio"), (9, "video"), (18, "data")):
        for start in range(min(len(octets), 64)):
            assert inspect(type_id, octets[start:]).kind == kind
