"""Encoding AMF0: what callers may hand over, what they may not, and what is written for it."""

import enum

import pytest

from flowctl.errors import LocalProtocolError
from flowctl.wire.rtmp.amf import amf0, limits
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.amf.values import Date, TypedObject


class Level(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


def test_encode_takes_python_types_that_have_an_amf0_form():
    assert amf0.decode(amf0.encode(7, Level.ONE, Text("a"), (1, None))) == [7.0, 1.0, "a", [1.0, None]]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        b"a",
        1j,
        {1, 2},
        {1: "a"},
        {"x" * 65536: 1},
        TypedObject("x" * 65536),
        TypedObject(5),
        "\ud800",
        {"\ud800": 1},
        10**400,
        Date(0.0, 40000),
        Date("soon"),
    ],
    ids=repr,
)
def test_encode_refuses_what_has_no_amf0_form(value):
    with pytest.raises(LocalProtocolError):
        amf0.encode(value)


def test_encode_refuses_a_structure_that_contains_itself():
    value = {}
    value["self"] = [value]
    with pytest.raises(LocalProtocolError, match="contain itself"):
        amf0.encode(value)


def test_encode_writes_128_levels():
    value = []
    for _ in range(127):
        value = [value]
    assert amf0.decode(amf0.encode(value), AmfLimits(depth=128)) == [value]
    with pytest.raises(LocalProtocolError):
        amf0.encode([value])


def test_encode_refuses_a_structure_that_unfolds_without_end(monkeypatch):
    monkeypatch.setattr(limits, "MAX_ENCODED_NODES", 1000)
    value = [None, None]
    for _ in range(20):
        value = [value, value]
    with pytest.raises(LocalProtocolError, match="1000 values"):
        amf0.encode(value)
