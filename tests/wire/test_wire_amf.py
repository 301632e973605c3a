"""AMF data recorded from other projects' tests and fuzz corpora, compared exactly with what they say it is."""

import json

import pytest
from vector_kit import tagged, vectors

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp.amf import amf0, amf3

DECODERS = {"amf0": amf0, "amf3": amf3}


def well_formed(vector):
    return "outcome" not in vector["expected"]


def read_plainly(value):
    """Return a recorded value as it is read: AMF3 keeps neither classes nor which kind of container it was."""
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind == "avmplus":
        return plain_amf3(value["v"])
    kept = {name: item for name, item in value.items() if name not in {"props", "items"}}
    if "props" in value:
        kept["props"] = [[name, read_plainly(item)] for name, item in value["props"]]
    if "items" in value:
        kept["items"] = [read_plainly(item) for item in value["items"]]
    return kept


def plain_amf3(value):
    """Return a recorded AMF3 value as the plain one that it is read to."""
    if not isinstance(value, dict):
        return value
    if value["$"] == "object":
        return {"$": "object", "props": [[name, plain_amf3(item)] for name, item in value["props"]]}
    if value["$"] == "array":
        dense = [plain_amf3(item) for item in value["dense"]]
        if not value["assoc"]:
            return {"$": "strict", "items": dense}
        members = {str(index): item for index, item in enumerate(dense)}
        members |= {name: plain_amf3(item) for name, item in value["assoc"]}
        return {"$": "object", "props": [list(member) for member in members.items()]}
    return value


def as_json(values):
    return json.dumps(values, sort_keys=True)


def decode_vector(vector):
    """Decode the input of `vector` by its kind: a whole sequence, or its first value alone."""
    codec, kind = vector["kind"].split("_")
    data = bytes.fromhex(vector["input_hex"])
    if kind == "sequence":
        return DECODERS[codec].decode(data)
    consumed = vector["expected"].get("consumed", len(data))
    return DECODERS[codec].decode(data[:consumed])[:1]


def outcome(decode, *arguments):
    try:
        return decode(*arguments), None
    except RemoteProtocolError as error:
        return None, error.code


AMF_KINDS = ("amf0_value", "amf0_sequence", "amf3_value", "amf3_sequence")


@pytest.mark.parametrize("vector", vectors(*AMF_KINDS))
def test_recorded_amf_has_its_recorded_outcome(vector):
    expected = vector["expected"]
    codec = vector["kind"].partition("_")[0]
    if "value" in expected or "values" in expected:
        values = expected["values"] if "values" in expected else [expected["value"]]
        expect = read_plainly if codec == "amf0" else plain_amf3
        assert as_json(list(map(expect, values))) == as_json([tagged(value, codec) for value in decode_vector(vector)])
        return
    values, code = outcome(decode_vector, vector)
    if not vector["input_hex"]:  # recorded of a decoder of one value: a sequence may be empty
        assert (values, code) == ([], None)
        return
    error = expected.get("error", expected.get("mini_result"))
    if error is not None:
        assert "amf-" + error.replace("_", "-") == code
    else:
        assert expected["outcome"] == "no_crash"
        assert code is None or code.startswith("amf-")


@pytest.mark.parametrize("vector", vectors(*AMF_KINDS, only=well_formed))
def test_recorded_amf_cut_anywhere_is_shorter_or_truncated(vector):
    codec = vector["kind"].partition("_")[0]
    data = bytes.fromhex(vector["input_hex"])
    whole = [as_json(tagged(value, codec)) for value in DECODERS[codec].decode(data)]
    for stop in range(len(data)):
        values, code = outcome(DECODERS[codec].decode, data[:stop])
        if values is None:
            assert code == "amf-truncated"
        else:
            assert whole[: len(values)] == [as_json(tagged(value, codec)) for value in values]
            assert len(values) < len(whole)


def without_references(vector):
    return well_formed(vector) and vector["id"] not in {"amf0-sile-ref-test", "amf0-sile-avmplus-object"}


@pytest.mark.parametrize("vector", vectors("amf0_value", "amf0_sequence", only=without_references))
def test_recorded_amf0_is_encoded_to_the_same_octets(vector):
    data = bytes.fromhex(vector["input_hex"])
    assert data == amf0.encode(*amf0.decode(data))


@pytest.mark.parametrize("vector", vectors("amf3_u29_list"))
def test_recorded_u29_list_is_decoded(vector):
    data = bytes.fromhex(vector["input_hex"])
    numbers = []
    offset = 0
    while offset < len(data):
        number, offset = amf3.read_u29(data, offset)
        numbers.append(number)
    assert vector["expected"]["values"] == numbers


@pytest.mark.parametrize("vector", vectors("amf3_value", only=lambda vector: "externalizable" in vector["id"]))
def test_recorded_externalizable_object_is_refused(vector):
    assert outcome(decode_vector, vector) == (None, "amf-externalizable")
