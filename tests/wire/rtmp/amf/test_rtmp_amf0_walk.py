"""The walk over AMF0 values agrees with the decoder on what is whole, and makes nothing of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import LimitExceededError, RemoteProtocolError
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.amf0 import walk
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.amf.values import Date, EcmaArray, TypedObject, Xml

LIMITS = AmfLimits()
SHARED = [1.0]
SAMPLES = [
    amf0.encode(),
    amf0.encode(1.0, True, "text", None, {}, [], EcmaArray(), "x" * 70_000),
    amf0.encode({"a": [1.0, 2.0], "b": {"c": [1.0, "x", 2.0, []]}, "": 1.0}),
    amf0.encode(EcmaArray({"times": [0.0] * 100}), TypedObject("t", {"d": Date(1.0, 60)}), Xml("<a/>")),
]


def outcome(function, *arguments):
    try:
        return "unclear" if function(*arguments) is False else "whole"
    except RemoteProtocolError as error:
        return error.code


@pytest.mark.parametrize("data", SAMPLES)
def test_walk_accepts_what_was_encoded_and_nothing_that_is_cut_off(data):
    limits = AmfLimits(string_bytes=1 << 20)
    assert outcome(walk, data, limits) == "whole"
    for size in range(0, len(data), 1 + len(data) // 500):
        assert outcome(walk, data[:size], limits) == outcome(amf0.decode, data[:size], limits)


@pytest.mark.parametrize("data", [b"\x11\x04\x01", amf0.encode(SHARED, SHARED) + b"\x07\0\0", b"\x04", b"\x7f"])
def test_walk_leaves_references_amf3_and_unknown_markers_to_the_decoder(data):
    assert walk(data, LIMITS) is False


def test_walk_counts_as_the_decoder_does():
    data = amf0.encode([1.0] * 10, {"a": [[], "x"]}, EcmaArray({"b": 1.0}))
    for nodes in range(1, 20):
        limits = AmfLimits(nodes=nodes)
        assert outcome(walk, data, limits) == outcome(amf0.decode, data, limits)
    for depth in range(1, 5):
        limits = AmfLimits(depth=depth)
        assert outcome(walk, data, limits) == outcome(amf0.decode, data, limits)
    with pytest.raises(LimitExceededError) as caught:
        walk(amf0.encode([1.0] * 10), AmfLimits(nodes=5))
    assert (caught.value.limit, caught.value.value, caught.value.maximum) == ("amf_nodes", 11, 5)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60))
def test_walk_agrees_with_the_decoder_on_any_octets(data):
    found = outcome(walk, data, LIMITS)
    if found != "unclear":
        decoded = outcome(amf0.decode, data, LIMITS)
        assert found == decoded or "amf-truncated" in {found, decoded}
        assert (found == "whole") == (decoded == "whole")
