"""Encoding AMF3: what callers may hand over, what they may not, and what is written for it."""

import enum

import pytest

from flowctl.errors import LocalProtocolError
from flowctl.wire.rtmp.amf import amf0, amf3, limits
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.amf.values import (
    UNDEFINED,
    UNSUPPORTED,
    Amf3Array,
    Amf3Object,
    AvmPlus,
    Date,
    Dictionary,
    DoubleVector,
    EcmaArray,
    IntVector,
    ObjectVector,
    TypedObject,
    UintVector,
)


def test_writer_refers_to_strings_and_traits_and_never_to_objects():
    """Repeated names and classes cost one octet each, while a shared object is written out each time."""
    shared = Amf3Object("Class", ("name",), dynamic=False, properties={"name": "text"})
    data = amf3.encode([shared, shared])
    assert data.count(b"Class") == data.count(b"name") == data.count(b"text") == 1
    first, second = amf3.decode(data)[0].dense
    assert first == second == shared
    assert first is not second


class Level(enum.IntEnum):
    ONE = 1


def test_encode_takes_python_and_amf0_types_that_have_an_amf3_form():
    """Lists and dicts become arrays and objects, and AMF0's own classes their nearest AMF3 form."""
    values = [[1], (2,), {"a": 1}, EcmaArray({"a": 1}), TypedObject("T", {"a": 1}), AvmPlus(5), Level.ONE]
    assert amf3.decode(amf3.encode(*values, UNSUPPORTED, bytearray(b"a"))) == [
        Amf3Array([1]),
        Amf3Array([2]),
        Amf3Object(properties={"a": 1}),
        Amf3Array([], {"a": 1}),
        Amf3Object("T", ("a",), dynamic=False, properties={"a": 1}),
        5,
        1,
        UNDEFINED,
        b"a",
    ]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1: "a"},
        {"": 1},
        Amf3Array([], {"": 1}),
        Amf3Object("C", ("a",)),
        Amf3Object("C", (), dynamic=False, properties={"a": 1}),
        Amf3Object("C", ("a", "a"), properties={"a": 1}),
        Amf3Object(5),
        "\ud800",
        10**400,
        IntVector([1 << 31]),
        UintVector([-1]),
        DoubleVector(["a"]),
        Date("soon"),
    ],
    ids=repr,
)
def test_encode_refuses_what_has_no_amf3_form(value):
    """Each mistake of a caller is a LocalProtocolError, whatever Python raised inside."""
    with pytest.raises(LocalProtocolError):
        amf3.encode(value)


def test_encode_refuses_a_structure_that_contains_itself():
    """A cycle, and an endless row of wrappers, end with an error instead of a RecursionError."""
    value = {}
    value["self"] = Dictionary([(1, [ObjectVector([value])])])
    wrapped = None
    for _ in range(1000):
        wrapped = AvmPlus(wrapped)
    for endless in (value, wrapped):
        with pytest.raises(LocalProtocolError, match="contain itself"):
            amf3.encode(endless)
        with pytest.raises(LocalProtocolError, match="contain itself"):
            amf0.encode(endless)


def test_encode_writes_128_levels():
    """The deepest structure that may be configured for decoding can be encoded."""
    value = Amf3Object()
    for _ in range(127):
        value = Amf3Object(properties={"a": value})
    assert amf3.decode(amf3.encode(value), AmfLimits(depth=128)) == [value]
    with pytest.raises(LocalProtocolError):
        amf3.encode([value])


def test_encode_refuses_a_structure_that_unfolds_without_end(monkeypatch):
    """Shared parts are written out, and the number of values written is limited."""
    monkeypatch.setattr(limits, "MAX_ENCODED_NODES", 1000)
    value = [None, None]
    for _ in range(20):
        value = [value, value]
    with pytest.raises(LocalProtocolError, match="1000 values"):
        amf3.encode(value)
