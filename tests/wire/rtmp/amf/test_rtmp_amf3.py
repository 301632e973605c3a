"""AMF3: every marker, the three reference tables, limits, and hostile data."""

import math
import struct
from functools import partial

import amf_kit
import pytest
from amf_kit import check_any
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp.amf import amf0, amf3
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.amf.values import UNDEFINED, Date, Xml

# Wire form and value of each marker, written by hand from the specification.
FORMS = {
    "undefined": ("00", UNDEFINED),
    "null": ("01", None),
    "false": ("02", False),
    "true": ("03", True),
    "integer": ("04 05", 5),
    "integer of four bytes": ("04 a0808000", 1 << 27),
    "largest integer": ("04 bfffffff", (1 << 28) - 1),
    "smallest integer": ("04 c0808000", -(1 << 28)),
    "minus one": ("04 ffffffff", -1),
    "double": ("05 3fe0000000000000", 0.5),
    "infinity": ("05 7ff0000000000000", math.inf),
    "whole double": ("05 3ff0000000000000", 1.0),
    "string": ("06 07 616263", "abc"),
    "empty string": ("06 01", ""),
    "two-byte character": ("06 05 c3a9", "\u00e9"),
    "xml document": ("07 09 3c612f3e", Xml("<a/>")),
    "date": ("08 01 426e6ab1b5100000", Date(1045112400000.0)),
    "empty array": ("09 01 01", []),
    "dense array": ("09 05 01 04 01 03", [1, True]),
    "array with names": ("09 05 03 61 01 01 04 01 03", {"0": 1, "1": True, "a": None}),
    "anonymous object": ("0a 0b 01 03 61 01 01", {"a": None}),
    "sealed object": ("0a 23 03 43 03 61 03 62 04 01 04 02", {"a": 1, "b": 2}),
    "sealed and dynamic object": ("0a 1b 03 43 03 61 04 01 03 62 04 02 01", {"a": 1, "b": 2}),
    "xml": ("0b 09 3c612f3e", Xml("<a/>")),
    "byte array": ("0c 05 00ff", b"\x00\xff"),
    "vector of int": ("0d 05 01 00000001 ffffffff", [1, -1]),
    "vector of uint": ("0e 05 00 00000001 ffffffff", [1, 0xFFFFFFFF]),
    "vector of double": ("0f 03 00 3fe0000000000000", [0.5]),
    "vector of objects": ("10 05 01 03 43 01 04 01", [None, 1]),
    "dictionary": ("11 05 01 04 01 02 09 01 01 03", [[1, False], [[], True]]),
}
FORM = pytest.mark.parametrize(("form", "value"), FORMS.values(), ids=FORMS)

ARRAY_OF_ONE = b"\x09\x03\x01"
ANONYMOUS_A = b"\x0a\x0b\x01\x03a"  # an anonymous dynamic object, as far as the name of its first member


code_of = partial(amf_kit.code_of, amf3)


def u29(value):
    return bytes((value >> 22 | 0x80, value >> 15 & 0x7F | 0x80, value >> 8 & 0x7F | 0x80, value & 0xFF))


def inline(count):
    return u29(count << 1 | 1)


def text(value):
    raw = value.encode()
    return (inline(len(raw)) if raw else b"\x01") + raw


def array(*items, **named):
    members = b"".join(text(name) + item for name, item in named.items())
    return b"\x09" + inline(len(items)) + members + b"\x01" + b"".join(items)


def object_of(members, class_name=""):
    names = b"".join(map(text, members))
    return b"\x0a" + u29(len(members) << 4 | 0b011) + text(class_name) + names + b"".join(members.values())


def dictionary_of(items):
    return b"\x11" + inline(len(items)) + b"\x00" + b"".join(item * 2 for item in items)


def array_reference(index):
    return b"\x09" + u29(index << 1)


# --- every marker


@FORM
def test_decode_gives_the_value_when_given_each_marker(form, value):
    (decoded,) = amf3.decode(bytes.fromhex(form))
    assert value == decoded
    assert type(value) is type(decoded)


def test_externalizable_object_is_refused_by_name():
    with pytest.raises(RemoteProtocolError, match=r"'flex\.ArrayCollection'") as caught:
        amf3.decode(b"\x0a\x07\x29flex.ArrayCollection\x09\x01\x01")
    assert caught.value.code == "amf-externalizable"
    with pytest.raises(RemoteProtocolError, match="externalizable") as caught:
        amf3.decode(b"\x0a\x07" + u29(5000 << 1 | 1) + b"x" * 5000)
    assert len(str(caught.value)) < 200


def test_class_that_declares_a_member_twice_is_refused():
    """Two sealed members of one name would make 2^n values of n nested objects when written out again."""
    assert code_of(bytes.fromhex("0a 23 03 43 03 61 03 61 01 01")) == "amf-bad-traits"
    assert code_of(bytes.fromhex("0a 23 03 43 03 61 02 01 01") * 2) == "amf-bad-traits"


# --- U29


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (0, "00"),
        (0x7F, "7f"),
        (0x80, "8100"),
        (0x3FFF, "ff7f"),
        (0x4000, "818000"),
        (0x1FFFFF, "ffff7f"),
        (0x200000, "80c08000"),
        (0x3FFFFF, "80ffffff"),
        (0x400000, "81808000"),
        (0x1FFFFFFF, "ffffffff"),
    ],
)
def test_u29_takes_one_to_four_octets(value, form):
    data = bytes.fromhex(form)
    assert (value, len(data)) == amf3.read_u29(data + b"\xff", 0)
    assert (value, 4) == amf3.read_u29(u29(value), 0) or value < 0x200000


# --- references


def test_string_reference_gives_the_string_wherever_it_first_occurred():
    data = bytes.fromhex("06 01 06 03 61 0a 0b 03 43 00 06 02 01 10 01 00 03 54 06 00 06 02 06 04")
    assert amf3.decode(data) == ["", "a", {"a": "C"}, [], "a", "C", "T"]


def test_traits_reference_gives_the_class_with_new_values():
    data = bytes.fromhex("0a 13 03 43 03 61 04 01") + bytes.fromhex("0a 01 04 02")
    assert amf3.decode(data) == [{"a": 1}, {"a": 2}]


def test_object_references_count_everything_complex_in_order():
    forms = [bytes.fromhex(form) for form, _ in FORMS.values()]
    others = (b"\x0a\x23", b"\x0a\x1b", b"\x10")  # they name classes, by a table of their own
    complex_values = [form for form in forms if form[0] > 6 and not form.startswith(others)]
    (outer, *found) = amf3.decode(
        array(b"\x05" + bytes(8), *complex_values) + b"".join(array_reference(1 + index) for index in range(13))
    )
    (entries,) = [value for value in outer if isinstance(value, list) and value[:1] == [[1, False]]]
    assert found == [*outer[1:], entries[1][0]]
    assert all(one is other for one, other in zip(found, outer[1:], strict=False))
    assert amf3.decode(array(array(b"\x01")) + array_reference(0))[0] == [[None]]


def test_reference_counts_as_what_it_refers_to_when_nodes_are_counted():
    bomb = array(array(b"\x01", b"\x01"), *(array(*[array_reference(index)] * 2) for index in range(1, 30)))
    assert len(bomb) < 500
    assert code_of(bomb) == "limit:amf_nodes"


def test_reference_counts_as_what_it_refers_to_when_levels_are_counted():
    chain = [array(b"\x01"), *(array(array_reference(index)) for index in range(1, 40))]
    assert code_of(array(*chain[:31])) is None
    assert code_of(array(*chain[:32])) == "limit:amf_depth"


@pytest.mark.parametrize(
    ("heavy", "light"),
    [("06", "06 00"), ("0c", "0c 00"), ("07", "07 00"), ("0b", "0b 00")],
    ids=["string", "byte array", "xml document", "xml"],
)
def test_reference_counts_as_what_it_refers_to_when_octets_are_counted(heavy, light):
    data = bytes.fromhex(heavy) + u29(60000 << 1 | 1) + b"x" * 60000
    assert code_of(data + bytes.fromhex(light) * 17) is None
    assert code_of(data + bytes.fromhex(light) * 18) == "limit:amf_repeated_bytes"


def test_traits_reference_counts_as_the_names_it_repeats():
    """Objects of one class may not repeat its long names without end: AMF0 writes them for each."""
    for name, sealed in (("x" * 60000, "a"), ("C", "x" * 60000)):
        first = object_of({sealed: b"\x01"}, name)
        assert code_of(first + b"\x0a\x01\x01" * 17) is None
        assert code_of(first + b"\x0a\x01\x01" * 18) == "limit:amf_repeated_bytes"


# --- limits


def test_nodes_are_limited_when_values_are_many():
    limits, null = AmfLimits(nodes=10), b"\x01"
    for data in (
        array(*[null] * 9),
        array(*[null] * 5, **dict.fromkeys("abcd", null)),
        object_of(dict.fromkeys("abcdefghi", null)),
        bytes.fromhex("0a 0b 01") + b"".join(text(name) + null for name in "abcdefghi") + b"\x01",
        b"\x0d" + inline(9) + bytes(1 + 9 * 4),
        b"\x10" + inline(9) + b"\x00\x01" + null * 9,
    ):
        assert code_of(data, limits) is None
        assert code_of(data + null, limits) == "limit:amf_nodes"
    assert code_of(b"\x11" + inline(3) + b"\x00" + null * 6, limits) is None
    assert code_of(b"\x11" + inline(3) + b"\x00" + null * 7, limits) == "limit:amf_nodes"


def test_dictionary_counts_as_the_list_of_pairs_that_it_is_sent_on_as():
    """Each pair is a value and a level of its own, also where it is referred to: our limits hold again in AMF0."""
    level = b"\x11\x03\x00\x01"
    (value,) = amf3.decode(level * 16 + b"\x01")
    assert amf0.decode(amf0.encode(value)) == [value]
    assert code_of(level * 17 + b"\x01") == "limit:amf_depth"
    assert code_of(array(level * 15 + b"\x01", array(b"\x11\x02"))) is None
    assert code_of(array(level * 15 + b"\x01", array(array(b"\x11\x02")))) == "limit:amf_depth"
    assert code_of(b"\x11" + inline(0) + b"\x00") is None
    assert code_of(b"\x11" + inline(1000) + b"\x00" + b"\x01" * 2000 + b"\x11\x00") == "limit:amf_nodes"


def test_sealed_names_are_limited_before_they_are_read():
    data = b"\x0a" + u29(5000 << 4 | 0b0011) + b"\x01" * 20000
    assert code_of(data) == "limit:amf_nodes"


@pytest.mark.parametrize(
    "data",
    [
        b"\x06" + text("x" * 20),
        array(**{"x" * 20: b"\x01"}),
        object_of({}, "x" * 20),
        object_of({"x" * 20: b"\x01"}),
        b"\x07" + text("x" * 20),
        b"\x0b" + text("x" * 20),
        b"\x0c" + text("x" * 20),
        b"\x10\x01\x00" + text("x" * 20),
    ],
    ids=["string", "name", "class", "sealed", "xml document", "xml", "bytes", "type"],
)
def test_string_bytes_are_limited_wherever_a_length_is_declared(data):
    assert code_of(data, AmfLimits(string_bytes=20)) is None
    assert code_of(data, AmfLimits(string_bytes=19)) == "limit:amf_string_bytes"


def test_name_is_limited_to_what_amf0_can_write_when_it_is_a_reference():
    value = b"\x06" + text("x" * 65536)
    assert code_of(value) is None
    assert code_of(value + bytes.fromhex("0a 0b 01 00 01 01")) == "limit:amf_string_bytes"


def test_malformed_utf8_is_refused_when_its_replacement_is_too_long():
    data = b"\x06" + u29(7 << 1 | 1) + b"\xff" * 7
    assert code_of(data, AmfLimits(string_bytes=21)) is None
    assert code_of(data, AmfLimits(string_bytes=20)) == "limit:amf_string_bytes"


# --- properties

LEAVES = [bytes.fromhex(form) for form, _ in FORMS.values()]
trees = st.recursive(
    st.one_of(
        st.sampled_from(LEAVES),
        st.builds(lambda value: b"\x06" + text(value), st.text(max_size=12)),
        st.builds(lambda value: b"\x05" + struct.pack(">d", value), st.floats()),
    ),
    lambda children: st.one_of(
        st.builds(lambda items: array(*items), st.lists(children, max_size=4)),
        st.builds(lambda members: array(**members), st.dictionaries(st.text("abc", min_size=1), children, max_size=3)),
        st.builds(object_of, st.dictionaries(st.text(min_size=1, max_size=8), children, max_size=4)),
        st.builds(dictionary_of, st.lists(children, max_size=2)),
    ),
    max_leaves=16,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(trees, min_size=1, max_size=3))
def test_any_values_are_refused_or_can_be_sent_on_as_amf0(values):
    check_any(amf3, b"".join(values) + array_reference(0))
