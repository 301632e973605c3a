"""AMF0: every marker both ways, references, what disagreeing senders do, limits, and hostile data."""

import math
import struct
from functools import partial

import amf_kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import LimitExceededError
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.amf.values import (
    UNDEFINED,
    UNSUPPORTED,
    Date,
    EcmaArray,
    TypedObject,
    Xml,
)

# Wire form and value of each marker, written by hand from the specification.
FORMS = {
    "number": ("00 400c000000000000", 3.5),
    "true": ("01 01", True),
    "false": ("01 00", False),
    "string": ("02 0003 616263", "abc"),
    "empty string": ("02 0000", ""),
    "two-byte character": ("02 0002 c3a9", "\u00e9"),
    "empty object": ("03 000009", {}),
    "object": ("03 0001 61 05 0001 62 01 01 000009", {"a": None, "b": True}),
    "member of the empty name": ("03 0000 05 000009", {"": None}),
    "null": ("05", None),
    "undefined": ("06", UNDEFINED),
    "ecma array": ("08 00000001 0001 61 02 0000 000009", EcmaArray({"a": ""}, 1)),
    "strict array": ("0a 00000002 05 02 0001 61", [None, "a"]),
    "empty strict array": ("0a 00000000", []),
    "date": ("0b 426e6ab1b5100000 ffc4", Date(1045112400000.0, -60)),
    "unsupported": ("0d", UNSUPPORTED),
    "xml document": ("0f 00000004 3c612f3e", Xml("<a/>")),
    "typed object": ("10 0003 612e62 0001 63 05 000009", TypedObject("a.b", {"c": None})),
}
FORM = pytest.mark.parametrize(("form", "value"), FORMS.values(), ids=FORMS)


code_of = partial(amf_kit.code_of, amf0)


def strict_array(*items):
    return b"\x0a" + struct.pack(">I", len(items)) + b"".join(items)


def reference(index):
    return b"\x07" + struct.pack(">H", index)


# --- every marker


@FORM
def test_decode_gives_the_value_when_given_each_marker(form, value):
    (decoded,) = amf0.decode(bytes.fromhex(form))
    assert value == decoded
    assert type(value) is type(decoded)


@FORM
def test_encode_gives_the_octets_when_given_each_value(form, value):
    assert bytes.fromhex(form) == amf0.encode(value)


def test_number_keeps_every_double_when_encoded_and_decoded():
    values = amf0.decode(amf0.encode(math.inf, -math.inf, -0.0, math.nan, 5e-324))
    assert values[:2] == [math.inf, -math.inf]
    assert math.copysign(1, values[2]) == -1
    assert math.isnan(values[3])
    assert values[4] == 5e-324


def test_boolean_is_true_when_it_is_any_octet_but_zero():
    """AMF0 2.3: zero is false, everything else true."""
    assert amf0.decode(b"\x01\x02\x01\xff") == [True, True]


def test_string_becomes_long_when_beyond_65535_octets():
    assert amf0.encode("\u00e9" * 32767 + "a")[:3] == b"\x02\xff\xff"
    assert amf0.encode("\u00e9" * 32768)[:5] == b"\x0c\x00\x01\x00\x00"
    assert amf0.decode(amf0.encode("\u00e9" * 32768)) == ["\u00e9" * 32768]


# --- where senders disagree


@pytest.mark.parametrize("count", ["00000000", "00000001", "00000003", "ffffffff"])
def test_ecma_array_ends_at_its_end_marker_when_its_count_is_wrong(count):
    (value,) = amf0.decode(bytes.fromhex(f"08 {count} 0001 61 05 0001 62 05 000009"))
    assert value == {"a": None, "b": None}
    assert int(count, 16) == value.count
    assert amf0.encode(value)[1:5] == b"\x00\x00\x00\x02"


def test_later_member_wins_when_a_name_is_sent_twice():
    assert amf0.decode(bytes.fromhex("03 0001 61 05 0001 61 01 01 000009")) == [{"a": True}]


def test_object_end_is_refused_when_a_value_has_to_be_there():
    assert code_of(b"\x09") == "amf-unexpected-object-end"
    assert code_of(bytes.fromhex("03 0001 61 09")) == "amf-unexpected-object-end"
    assert code_of(bytes.fromhex("0a 00000001 09")) == "amf-unexpected-object-end"


@pytest.mark.parametrize("marker", [0x04, 0x0E])
def test_reserved_marker_is_refused(marker):
    assert code_of(bytes((marker, 0, 0, 0))) == "amf-reserved-marker"


def test_malformed_utf8_is_refused_when_its_replacement_is_too_long():
    """U+FFFD takes three octets, so 65535 bad octets would make a name and a string that nobody could send on."""
    assert code_of(b"\x03\xff\xff" + b"\xff" * 65535 + b"\x05\x00\x00\x09") == "limit:amf_string_bytes"
    assert code_of(b"\x02\xff\xff" + b"\xff" * 65535) == "limit:amf_string_bytes"


def test_xml_is_carried_and_never_parsed():
    text = '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/hostname">]><a>&b;</a>'
    assert amf0.decode(amf0.encode(Xml(text))) == [Xml(text)]


# --- references


def test_reference_gives_the_same_object_when_it_is_complete():
    first, again = amf0.decode(b"\x03\x00\x00\x09" + reference(0))
    assert first is again


def test_references_count_objects_arrays_and_typed_objects_in_order():
    inner = bytes.fromhex("08 00000000 000009") + bytes.fromhex("03 000009") + bytes.fromhex("10 0001 61 000009")
    scalars = amf0.encode("text", 1.0, True, None, Date(0.0), Xml(""))
    data = b"\x0a\x00\x00\x00\x09" + scalars + inner + b"".join(reference(index) for index in (1, 2, 3, 0))
    values = amf0.decode(data)
    assert [EcmaArray(), {}, TypedObject("a")] == values[1:4]
    assert values[1] is values[0][6]
    assert values[2] is values[0][7]
    assert values[3] is values[0][8]
    assert values[4] is values[0]


def test_reference_counts_as_what_it_refers_to_when_nodes_are_counted():
    bomb = strict_array(strict_array(b"\x05", b"\x05"), *(strict_array(*[reference(i)] * 2) for i in range(1, 30)))
    assert len(bomb) < 400
    assert code_of(bomb) == "limit:amf_nodes"
    small = strict_array(strict_array(b"\x05", b"\x05"), *(strict_array(*[reference(i)] * 2) for i in range(1, 3)))
    # 1 root, 3 members, and below them 2, 2 + 4, 2 + 12 with each reference at full price
    nodes = 1 + 3 + 2 + (2 + 2 * 2) + (2 + 2 * 6)
    assert code_of(small, AmfLimits(nodes=nodes)) is None
    assert code_of(small, AmfLimits(nodes=nodes - 1)) == "limit:amf_nodes"


def test_reference_counts_as_what_it_refers_to_when_levels_are_counted():
    chain = [strict_array(b"\x05"), *(strict_array(reference(index)) for index in range(1, 40))]
    assert code_of(strict_array(*chain[:31])) is None
    assert code_of(strict_array(*chain[:32])) == "limit:amf_depth"


def test_reference_counts_as_what_it_refers_to_when_octets_are_counted():
    heavy = strict_array(amf0.encode("x" * 60000))
    assert code_of(strict_array(heavy, *[reference(1)] * 17)) is None
    assert code_of(strict_array(heavy, *[reference(1)] * 18)) == "limit:amf_repeated_bytes"


def test_avm_plus_values_share_their_tables_within_a_message():
    values = amf0.decode(bytes.fromhex("11 06 07 616263") + bytes.fromhex("11 06 00"))
    assert values == ["abc", "abc"]
    assert code_of(bytes.fromhex("11 06 00")) == "amf-bad-reference"


def test_avm_plus_errors_are_the_same_errors():
    assert code_of(b"\x11") == "amf-truncated"
    assert code_of(b"\x11\x7b") == "amf-unknown-marker"
    assert code_of(bytes.fromhex("11 0a 07 03 61")) == "amf-externalizable"
    assert code_of(b"\x03" + b"\x00\x01a\x11" + b"\x09\x03\x01" * 40) == "limit:amf_depth"


# --- limits


def test_nodes_are_limited_when_values_are_many():
    limits = AmfLimits(nodes=10)
    for data in (
        amf0.encode(*[None] * 10),
        amf0.encode([None] * 9),
        amf0.encode(dict.fromkeys("abcdefghi", 1.0)),
        amf0.encode(EcmaArray(dict.fromkeys("abcd")), TypedObject("t", dict.fromkeys("abcd"))),
    ):
        assert code_of(data, limits) is None
        assert code_of(data + b"\x05", limits) == "limit:amf_nodes"
    same_name = b"\x03" + b"\x00\x01a\x05" * 10 + b"\x00\x00\x09"
    assert code_of(same_name, limits) == "limit:amf_nodes"


@pytest.mark.parametrize(
    "value", ["x" * 20, {"x" * 20: None}, TypedObject("x" * 20), Xml("x" * 20)], ids=lambda value: type(value).__name__
)
def test_string_bytes_are_limited_in_strings_names_and_xml(value):
    assert code_of(amf0.encode(value), AmfLimits(string_bytes=20)) is None
    assert code_of(amf0.encode(value), AmfLimits(string_bytes=19)) == "limit:amf_string_bytes"


def test_long_string_is_limited_to_64_kib_by_default():
    assert code_of(amf0.encode("x" * 65536)) is None
    assert code_of(amf0.encode("x" * 65537)) == "limit:amf_string_bytes"


def test_node_limit_comes_before_the_array_when_a_true_count_is_over_it():
    with pytest.raises(LimitExceededError) as caught:
        amf0.decode(strict_array(*[b"\x05"] * 5000))
    assert (caught.value.limit, caught.value.value) == ("amf_nodes", 5001)


# --- properties

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.sampled_from([UNDEFINED, UNSUPPORTED]),
    st.builds(Date, st.floats(allow_nan=False), st.integers(-32768, 32767)),
    st.builds(Xml, st.text(max_size=20)),
)
trees = st.recursive(
    scalars,
    lambda children: st.one_of(
        st.lists(children, max_size=5),
        st.dictionaries(st.text(max_size=8), children, max_size=5),
        st.dictionaries(st.text(max_size=8), children, max_size=5).map(EcmaArray),
        st.builds(TypedObject, st.text(max_size=8), st.dictionaries(st.text(max_size=8), children, max_size=3)),
    ),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(trees, max_size=4))
def test_any_values_survive_encoding_and_decoding(values):
    data = amf0.encode(*values)
    decoded = amf0.decode(data)
    assert values == decoded
    assert data == amf0.encode(*decoded)
