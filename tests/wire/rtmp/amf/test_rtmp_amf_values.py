"""The Python values of AMF, the settings that limit them, and the form that drops AMF's own types."""

import copy
import pickle

import pytest

from flowctl.errors import ConfigError
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.amf.values import UNDEFINED, UNSUPPORTED, Date, EcmaArray, TypedObject, Xml, simplify


@pytest.mark.parametrize("value", [UNDEFINED, UNSUPPORTED])
def test_undefined_is_one_false_object_when_copied(value):
    assert not value
    assert repr(value) in {"UNDEFINED", "UNSUPPORTED"}
    assert copy.deepcopy(value) is value
    assert pickle.loads(pickle.dumps(value)) is value


def test_ecma_array_is_a_dict_that_keeps_its_announced_count():
    value = EcmaArray([("a", 1.0), ("b", 2.0)], 20)
    assert isinstance(value, dict)
    assert value == {"a": 1.0, "b": 2.0}
    assert value == EcmaArray(value)
    assert EcmaArray().count is None
    for twin in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(twin) is EcmaArray
        assert (value, 20) == (twin, twin.count)
    assert repr(value) == "EcmaArray({'a': 1.0, 'b': 2.0}, count=20)"


@pytest.mark.parametrize("name", ["depth", "nodes", "string_bytes", "repeated_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "9"])
def test_limits_refuse_a_value_that_is_no_positive_int(name, value):
    with pytest.raises(ConfigError, match=rf"AmfLimits\.{name} is .*, (allowed is an int of 1|it must be int)"):
        AmfLimits(**{name: value})


def test_limits_refuse_a_depth_that_could_exhaust_the_stack():
    assert AmfLimits(depth=128).depth == 128
    with pytest.raises(ConfigError, match=r"1\.\.128"):
        AmfLimits(depth=129)


def test_simplify_leaves_plain_containers():
    value = {"a": TypedObject("c", {"b": EcmaArray({"c": [EcmaArray(), b"x"]}, 7)}), "d": 1}
    simple = simplify(value)
    assert simple == {"a": {"b": {"c": [{}, UNSUPPORTED]}}, "d": 1}
    assert type(simple["a"]["b"]) is type(simple["a"]["b"]["c"][0]) is dict
    assert amf0.decode(amf0.encode(simple)) == [simple]


@pytest.mark.parametrize("value", [None, True, 1, 0.5, "a", UNDEFINED, UNSUPPORTED, Date(0.0), Xml("<a/>")])
def test_simplify_leaves_scalars_alone(value):
    assert simplify(value) is value
