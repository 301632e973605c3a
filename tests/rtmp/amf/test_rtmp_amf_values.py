"""The Python values of AMF, the settings that limit them, and the form that drops AMF's own types."""

import copy
import pickle

import pytest

from flowctl.errors import ConfigError
from flowctl.wire.rtmp.amf import amf0, amf3
from flowctl.wire.rtmp.amf.limits import DEFAULT_LIMITS, AmfLimits
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
    Xml,
    simplify,
)


@pytest.mark.parametrize("value", [UNDEFINED, UNSUPPORTED])
def test_undefined_is_one_false_object_when_copied(value):
    """Both empty values are false, have a short name, and are the same object after copy and pickle."""
    assert not value
    assert repr(value) in {"UNDEFINED", "UNSUPPORTED"}
    assert copy.deepcopy(value) is value
    assert pickle.loads(pickle.dumps(value)) is value


def test_ecma_array_is_a_dict_that_keeps_its_announced_count():
    """Readers may treat an ECMA array as an object; its count survives copying and is not compared."""
    value = EcmaArray([("a", 1.0), ("b", 2.0)], 20)
    assert isinstance(value, dict)
    assert value == {"a": 1.0, "b": 2.0}
    assert value == EcmaArray(value)
    assert EcmaArray().count is None
    for twin in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(twin) is EcmaArray
        assert (value, 20) == (twin, twin.count)
    assert repr(value) == "EcmaArray({'a': 1.0, 'b': 2.0}, count=20)"


def test_limits_default_to_what_the_documentation_says():
    """Depth 32, 4096 values, 64 KiB a string, 1 MiB through references."""
    assert AmfLimits(depth=32, nodes=4096, string_bytes=65536, repeated_bytes=1 << 20) == DEFAULT_LIMITS


@pytest.mark.parametrize("name", ["depth", "nodes", "string_bytes", "repeated_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "9"])
def test_limits_refuse_a_value_that_is_no_positive_int(name, value):
    """The error names the field, the value and what is allowed; 0 does not mean off here."""
    with pytest.raises(ConfigError, match=rf"AmfLimits\.{name} is .*, (allowed is an int of 1|it must be int)"):
        AmfLimits(**{name: value})


def test_limits_refuse_a_depth_that_could_exhaust_the_stack():
    """128 levels are the most; both codecs recurse that deep at most."""
    assert AmfLimits(depth=128).depth == 128
    with pytest.raises(ConfigError, match=r"1\.\.128"):
        AmfLimits(depth=129)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (AvmPlus(AvmPlus(1)), 1),
        (TypedObject("c", {"a": AvmPlus(None)}), {"a": None}),
        (EcmaArray({"a": [EcmaArray()]}, 7), {"a": [{}]}),
        (Amf3Object("c", ("a",), dynamic=False, properties={"a": Amf3Array([1])}), {"a": [1]}),
        (Amf3Array([1, Amf3Array()]), [1, []]),
        (Amf3Array([1, 2], {"a": Amf3Object()}), {"0": 1, "1": 2, "a": {}}),
        (IntVector([1]), [1]),
        (UintVector([1]), [1]),
        (DoubleVector([1.0]), [1.0]),
        (ObjectVector([Amf3Object()]), [{}]),
        (Dictionary([(Amf3Object(), Amf3Array())]), [[{}, []]]),
    ],
    ids=repr,
)
def test_simplify_leaves_plain_containers(value, expected):
    """Class and AMF3 wrappers go at every level, and only plain dicts and lists remain."""
    simple = simplify(value)
    assert expected == simple
    assert type(expected) is type(simple)
    assert amf0.decode(amf0.encode(simple))


@pytest.mark.parametrize("value", [None, True, 1, 0.5, "a", b"a", UNDEFINED, UNSUPPORTED, Date(0.0), Xml("<a/>")])
def test_simplify_leaves_scalars_alone(value):
    """What holds no other value is returned as it is."""
    assert simplify(value) is value


def test_simplify_makes_an_amf3_command_read_like_an_amf0_command():
    """The same connect object is the same dict, whichever format a client sent it in."""
    connect = {"app": "live", "tcUrl": "rtmp://host/live", "fpad": False, "objectEncoding": 3.0, "list": ["a"]}
    in_amf0 = amf0.decode(amf0.encode("connect", 1.0, connect))
    in_amf3 = amf0.decode(amf0.encode("connect", 1.0, AvmPlus(connect)))
    assert isinstance(in_amf3[2], AvmPlus)
    assert in_amf0 == [simplify(value) for value in in_amf3]
    assert [simplify(value) for value in amf3.decode(amf3.encode(connect))] == [connect]
