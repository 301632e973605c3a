"""AMF3: every marker both ways, the three reference tables, limits, and hostile data."""

import math
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.amf import amf0, amf3
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.amf.values import (
    UNDEFINED,
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
)

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
    "string": ("06 07 616263", "abc"),
    "empty string": ("06 01", ""),
    "two-byte character": ("06 05 c3a9", "\u00e9"),
    "xml document": ("07 09 3c612f3e", Xml("<a/>")),
    "date": ("08 01 426e6ab1b5100000", Date(1045112400000.0)),
    "empty array": ("09 01 01", Amf3Array()),
    "array": ("09 05 03 61 01 01 04 01 03", Amf3Array([1, True], {"a": None})),
    "anonymous object": ("0a 0b 01 03 61 01 01", Amf3Object(properties={"a": None})),
    "sealed object": (
        "0a 23 03 43 03 61 03 62 04 01 04 02",
        Amf3Object("C", ("a", "b"), dynamic=False, properties={"a": 1, "b": 2}),
    ),
    "sealed and dynamic object": (
        "0a 1b 03 43 03 61 04 01 03 62 04 02 01",
        Amf3Object("C", ("a",), dynamic=True, properties={"a": 1, "b": 2}),
    ),
    "xml": ("0b 09 3c612f3e", Xml("<a/>", e4x=True)),
    "byte array": ("0c 05 00ff", b"\x00\xff"),
    "vector of int": ("0d 05 01 00000001 ffffffff", IntVector([1, -1], fixed=True)),
    "vector of uint": ("0e 05 00 00000001 ffffffff", UintVector([1, 0xFFFFFFFF])),
    "vector of double": ("0f 03 00 3fe0000000000000", DoubleVector([0.5])),
    "vector of objects": ("10 05 01 03 43 01 04 01", ObjectVector([None, 1], "C", fixed=True)),
    "dictionary": ("11 05 01 04 01 02 09 01 01 03", Dictionary([(1, False), (Amf3Array(), True)], weak_keys=True)),
}
FORM = pytest.mark.parametrize(("form", "value"), FORMS.values(), ids=FORMS)

ARRAY_OF_ONE = b"\x09\x03\x01"
ANONYMOUS_A = b"\x0a\x0b\x01\x03a"  # an anonymous dynamic object, as far as the name of its first member


def code_of(data, limits=None):
    """Return the code of the error that decoding `data` raises; None when it raises none."""
    try:
        amf3.decode(data) if limits is None else amf3.decode(data, limits)
    except RemoteProtocolError as error:
        return error.code
    return None


def array(*items):
    return b"\x09" + amf3.encode_u29(len(items) << 1 | 1) + b"\x01" + b"".join(items)


def array_reference(index):
    return b"\x09" + amf3.encode_u29(index << 1)


# --- every marker


@FORM
def test_decode_gives_the_value_when_given_each_marker(form, value):
    """Each marker of the specification decodes to its Python value, of exactly its type."""
    (decoded,) = amf3.decode(bytes.fromhex(form))
    assert value == decoded
    assert type(value) is type(decoded)


@FORM
def test_encode_gives_the_octets_when_given_each_value(form, value):
    assert bytes.fromhex(form) == amf3.encode(value)


@FORM
def test_decode_one_stops_behind_its_value_when_more_follows(form, value):
    data = bytes.fromhex(form)
    assert (value, 2 + len(data)) == amf3.decode_one(b"\x01\x01" + data + b"\x01", 2)


@FORM
def test_decode_is_truncated_when_a_value_is_cut_anywhere(form, value):
    """Every prefix of a value ends in amf-truncated, never in anything else."""
    data = bytes.fromhex(form)
    for stop in range(1, len(data)):
        assert code_of(data[:stop]) == "amf-truncated"
    with pytest.raises(RemoteProtocolError, match="ends inside"):
        amf3.decode_one(data, len(data))


def test_decode_is_empty_when_there_is_no_data():
    """No octets are a sequence of no values; an offset below 0 is a mistake of the caller."""
    assert amf3.decode(b"") == []
    for decode in (amf3.decode_one, amf3.decode_u29):
        with pytest.raises(LocalProtocolError):
            decode(b"\x01", -1)


@pytest.mark.parametrize("make", [bytearray, memoryview, lambda data: memoryview(b"x" + data + b"x")[1:-1]])
def test_decode_takes_every_kind_of_buffer(make):
    """Octets in a bytearray or memoryview, sliced ones too, decode as bytes do."""
    data = amf3.encode(*[value for _, value in FORMS.values()])
    assert [value for _, value in FORMS.values()] == amf3.decode(make(data))


@pytest.mark.parametrize("marker", [0x12, 0x30, 0x7B, 0x80, 0xFF])
def test_unknown_marker_is_refused(marker):
    """A marker beyond the specification is an error, alone and as a member."""
    assert code_of(bytes((marker, 1, 1, 1))) == "amf-unknown-marker"
    assert code_of(ANONYMOUS_A + bytes((marker, 1, 1, 1))) == "amf-unknown-marker"


def test_externalizable_object_is_refused_by_name():
    """A class that writes itself has no layout to read, so the error names it and nothing is guessed."""
    with pytest.raises(RemoteProtocolError, match=r"'flex\.ArrayCollection'") as caught:
        amf3.decode(b"\x0a\x07\x29flex.ArrayCollection\x09\x01\x01")
    assert caught.value.code == "amf-externalizable"
    with pytest.raises(RemoteProtocolError, match="externalizable") as caught:
        amf3.decode(b"\x0a\x07" + amf3.encode_u29(5000 << 1 | 1) + b"x" * 5000)
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
    """The edges of each length encode and decode as the specification's table says."""
    data = bytes.fromhex(form)
    assert data == amf3.encode_u29(value)
    assert (value, len(data)) == amf3.decode_u29(data)
    assert (value, len(data)) == amf3.decode_u29(memoryview(data))
    for stop in range(len(data)):
        with pytest.raises(RemoteProtocolError, match="ends inside"):
            amf3.decode_u29(data[:stop])


@pytest.mark.parametrize("value", [-1, 1 << 29])
def test_u29_refuses_what_29_bits_cannot_hold(value):
    """Encoding a number outside 0..2^29-1 is a mistake of the caller."""
    with pytest.raises(LocalProtocolError, match="29 bits"):
        amf3.encode_u29(value)


@given(st.integers(0, (1 << 29) - 1))
@settings(max_examples=200, deadline=None)
def test_u29_survives_encoding_and_decoding(value):
    """Every number of 29 bits comes back, from exactly its own octets."""
    data = amf3.encode_u29(value)
    assert (value, len(data)) == amf3.decode_u29(data + b"\xff")


@pytest.mark.parametrize("value", [1 << 28, -(1 << 28) - 1, 1 << 60])
def test_integer_becomes_a_double_when_29_bits_cannot_hold_it(value):
    """An int outside -2^28..2^28-1 is sent as a double, as ActionScript does."""
    (decoded,) = amf3.decode(amf3.encode(value))
    assert value == decoded
    assert type(decoded) is float


def test_double_keeps_every_value_when_encoded_and_decoded():
    """Infinities, negative zero and not-a-number survive, and a whole double stays a double."""
    values = amf3.decode(amf3.encode(math.inf, -math.inf, -0.0, math.nan, 1.0))
    assert values[:2] == [math.inf, -math.inf]
    assert math.copysign(1, values[2]) == -1
    assert math.isnan(values[3])
    assert type(values[4]) is float


# --- references


def test_string_reference_gives_the_string_wherever_it_first_occurred():
    """Values, member names, class names and type names share one table; the empty string is never in it."""
    data = bytes.fromhex("06 01 06 03 61 0a 0b 03 43 00 06 02 01 10 01 00 03 54 06 00 06 02 06 04")
    values = amf3.decode(data)
    assert values == ["", "a", Amf3Object("C", properties={"a": "C"}), ObjectVector([], "T"), "a", "C", "T"]


def test_traits_reference_gives_the_class_with_new_values():
    """A second object of a class names its traits by index and brings its own values."""
    data = bytes.fromhex("0a 13 03 43 03 61 04 01") + bytes.fromhex("0a 01 04 02")
    first, second = amf3.decode(data)
    assert first == Amf3Object("C", ("a",), dynamic=False, properties={"a": 1})
    assert second == Amf3Object("C", ("a",), dynamic=False, properties={"a": 2})


def test_object_references_count_everything_complex_in_order():
    """The object table holds each kind of complex value by first octet, and no strings or numbers."""
    complex_values = [value for _, value in FORMS.values() if not isinstance(value, str | float | int | None)]
    complex_values = [value for value in complex_values if value is not UNDEFINED]
    data = amf3.encode(Amf3Array(["text", 1.0, 5, *complex_values]))
    (outer,) = amf3.decode(data)
    table = []
    for value in outer.dense[3:]:
        table.append(value)
        if isinstance(value, Dictionary):
            table.append(value.entries[1][0])
    references = b"".join(array_reference(1 + index) for index in range(len(table)))
    decoded = amf3.decode(data + references + array_reference(0))
    assert table == decoded[1:-1]
    assert decoded[-1] is decoded[0]
    assert decoded[1] is decoded[0].dense[3]


@pytest.mark.parametrize(
    "form", ["06 00", "06 02", "0a 01", "0a 05", "09 00", "0a 00", "08 00", "07 00", "0b 00", "0c 00", "11 fffffffe"]
)
def test_reference_is_refused_when_nothing_has_its_index(form):
    """An index beyond its table is an error, for strings, traits and objects."""
    assert code_of(bytes.fromhex(form)) == "amf-bad-reference"


@pytest.mark.parametrize(
    "form",
    [
        "09 03 01 09 00",
        "09 01 03 61 09 00 01",
        "0a 0b 01 03 61 0a 00",
        "0a 13 01 03 61 0a 00",
        "10 03 00 01 10 00",
        "11 03 00 11 00",
        "11 03 00 01 11 00",
    ],
)
def test_reference_is_refused_when_it_is_inside_what_it_refers_to(form):
    """A value that contains itself would hang whoever walks it, so it is not built."""
    assert code_of(bytes.fromhex(form)) == "amf-cyclic-reference"


def test_reference_counts_as_what_it_refers_to_when_nodes_are_counted():
    """Thirty arrays that each refer twice to the one before are 2^30 values to walk, and are refused for it."""
    bomb = array(array(b"\x01", b"\x01"), *(array(*[array_reference(index)] * 2) for index in range(1, 30)))
    assert len(bomb) < 400
    assert code_of(bomb) == "limit:amf_nodes"


def test_reference_counts_as_what_it_refers_to_when_levels_are_counted():
    """A chain of arrays, each holding a reference to the one before, is as deep as it will be walked."""
    chain = [array(b"\x01"), *(array(array_reference(index)) for index in range(1, 40))]
    assert code_of(array(*chain[:31])) is None
    assert code_of(array(*chain[:32])) == "limit:amf_depth"


@pytest.mark.parametrize(
    ("heavy", "light"),
    [("06", "06 00"), ("0c", "0c 00"), ("07", "07 00"), ("0b", "0b 00")],
    ids=["string", "byte array", "xml document", "xml"],
)
def test_reference_counts_as_what_it_refers_to_when_octets_are_counted(heavy, light):
    """Two octets of reference may not repeat a long text or ByteArray without end."""
    data = bytes.fromhex(heavy) + amf3.encode_u29(60000 << 1 | 1) + b"x" * 60000
    assert code_of(data + bytes.fromhex(light) * 17) is None
    assert code_of(data + bytes.fromhex(light) * 18) == "limit:amf_repeated_bytes"


def test_traits_reference_counts_as_the_names_it_repeats():
    """Objects of one class may not repeat its long names without end: AMF0 writes them for each."""
    for name, sealed in (("x" * 60000, "a"), ("C", "x" * 60000)):
        first = amf3.encode(Amf3Object(name, (sealed,), dynamic=False, properties={sealed: None}))
        assert code_of(first + b"\x0a\x01\x01" * 17) is None
        assert code_of(first + b"\x0a\x01\x01" * 18) == "limit:amf_repeated_bytes"


# --- limits


@pytest.mark.parametrize(
    "level",
    [ARRAY_OF_ONE, b"\x09\x01\x03a", ANONYMOUS_A, b"\x0a\x13\x01\x03a", b"\x10\x03\x00\x01", b"\x11\x03\x00\x01"],
    ids=["dense", "associative", "dynamic", "sealed", "vector", "dictionary"],
)
def test_depth_is_limited_when_containers_nest(level):
    """Thirty-two levels pass by default and one more does not, nor do 10^5; 128 may be configured."""
    assert code_of(level * 32) == "amf-truncated"
    for levels in (33, 100_000):
        with pytest.raises(LimitExceededError) as caught:
            amf3.decode(level * levels + b"\x01" * 64)
        assert (caught.value.limit, caught.value.value, caught.value.maximum) == ("amf_depth", 33, 32)
    assert code_of(level * 128, AmfLimits(depth=128)) == "amf-truncated"
    assert code_of(level * 129 + b"\x01" * 8, AmfLimits(depth=128)) == "limit:amf_depth"


def test_nodes_are_limited_when_values_are_many():
    """All values of a message count, in every container, and no more than the limit pass."""
    limits = AmfLimits(nodes=10)
    members = dict.fromkeys("abcdefghi")
    for value in (
        [None] * 9,
        Amf3Array([None] * 5, dict.fromkeys("abcd")),
        members,
        TypedObject("T", members),
        IntVector([0] * 9),
        ObjectVector([None] * 9),
        EcmaArray(members),
    ):
        assert code_of(amf3.encode(value), limits) is None
        assert code_of(amf3.encode(value, None), limits) == "limit:amf_nodes"
    assert code_of(amf3.encode(Dictionary([(1, 2)] * 4), None), limits) is None
    assert code_of(amf3.encode(Dictionary([(1, 2)] * 5)), limits) == "limit:amf_nodes"


def test_sealed_names_are_limited_before_they_are_read():
    """A class of more members than values may follow is refused at its count."""
    data = b"\x0a" + amf3.encode_u29(5000 << 4 | 0b0011) + b"\x01" * 20000
    assert code_of(data) == "limit:amf_nodes"


@pytest.mark.parametrize(
    "value",
    [
        "x" * 20,
        {"x" * 20: None},
        Amf3Object("x" * 20),
        TypedObject("c", {"x" * 20: 1}),
        Xml("x" * 20),
        b"x" * 20,
        ObjectVector([], "x" * 20),
        EcmaArray({"x" * 20: 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_string_bytes_are_limited_wherever_a_length_is_declared(value):
    """Strings, names, XML and ByteArrays are as long as the limit allows, and no longer."""
    assert code_of(amf3.encode(value), AmfLimits(string_bytes=20)) is None
    assert code_of(amf3.encode(value), AmfLimits(string_bytes=19)) == "limit:amf_string_bytes"


def test_name_is_limited_to_what_amf0_can_write_when_it_is_a_reference():
    """A text of 65536 octets may be a value but no name, also when the name only refers to it."""
    text = "x" * 65536
    assert code_of(amf3.encode(text)) is None
    assert code_of(amf3.encode(text, {text: 1})) == "limit:amf_string_bytes"


@pytest.mark.parametrize(
    "form",
    [
        "06 ffffffff",
        "07 ffffffff",
        "0b ffffffff",
        "0c ffffffff",
        "09 ffffffff 01",
        "0d ffffffff 00",
        "0d 0b 00 00000000",
        "0e ffffffff 00",
        "0f ffffffff 00",
        "10 ffffffff 00 01",
        "11 ffffffff 00",
        "11 05 00 01 01",
        "0a fffffff3 01",
    ],
)
def test_declared_size_allocates_nothing_when_the_data_is_missing(form):
    """A count or length beyond the data is truncation, found before anything is allocated for it."""
    data = bytes.fromhex(form)
    tracemalloc.start()
    try:
        assert code_of(data) == "amf-truncated"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * 1024


@pytest.mark.parametrize("form", ["06 09 61ff6280", "07 09 61ff6280", "0b 09 61ff6280"])
def test_malformed_utf8_is_replaced(form):
    """Malformed octets become U+FFFD, and the result can be encoded again."""
    (value,) = amf3.decode(bytes.fromhex(form))
    assert getattr(value, "text", value) == "a\ufffdb\ufffd"
    assert amf3.decode(amf3.encode(value)) == [value]


def test_malformed_utf8_is_refused_when_its_replacement_is_too_long():
    """U+FFFD takes three octets; the limit holds for the text that comes out too."""
    data = b"\x06" + amf3.encode_u29(7 << 1 | 1) + b"\xff" * 7
    assert code_of(data, AmfLimits(string_bytes=21)) is None
    assert code_of(data, AmfLimits(string_bytes=20)) == "limit:amf_string_bytes"


# --- properties

names = st.text(min_size=1, max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.just(UNDEFINED),
    st.integers(-(1 << 28), (1 << 28) - 1),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    st.binary(max_size=12),
    st.builds(Date, st.floats(allow_nan=False)),
    st.builds(Xml, st.text(max_size=12), st.booleans()),
    st.builds(IntVector, st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=3), st.booleans()),
    st.builds(UintVector, st.lists(st.integers(0, (1 << 32) - 1), max_size=3), st.booleans()),
    st.builds(DoubleVector, st.lists(st.floats(allow_nan=False), max_size=3), st.booleans()),
)


@st.composite
def objects(draw, children):
    """Draw an object with some members sealed, dynamic where it has others."""
    members = draw(st.dictionaries(names, children, max_size=4))
    sealed = tuple(members)[: draw(st.integers(0, len(members)))]
    dynamic = len(sealed) < len(members) or draw(st.booleans())
    return Amf3Object(draw(st.text(max_size=5)), sealed, dynamic, members)


trees = st.recursive(
    scalars,
    lambda children: st.one_of(
        st.builds(Amf3Array, st.lists(children, max_size=4), st.dictionaries(names, children, max_size=3)),
        objects(children),
        st.builds(ObjectVector, st.lists(children, max_size=4), st.text(max_size=5), st.booleans()),
        st.builds(Dictionary, st.lists(st.tuples(children, children), max_size=3), st.booleans()),
    ),
    max_leaves=16,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(trees, max_size=3))
def test_any_values_survive_encoding_and_decoding(values):
    """decode(encode(x)) is x, and encoding that again gives the same octets; so too within AMF0."""
    data = amf3.encode(*values)
    decoded = amf3.decode(data)
    assert values == decoded
    assert data == amf3.encode(*decoded)
    wrapped = [AvmPlus(value) for value in values]
    assert wrapped == amf0.decode(amf0.encode(*wrapped))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 0x12))
def test_random_octets_end_in_values_or_a_remote_error(data, marker):
    """Whatever arrives, nothing but RemoteProtocolError comes out, and what decodes can be encoded."""
    try:
        values = amf3.decode(bytes((marker,)) + data)
    except RemoteProtocolError:
        return
    again = amf3.encode(*values)
    assert again == amf3.encode(*amf3.decode(again))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_data_ends_in_values_or_a_remote_error(data):
    """The same with octets of valid data changed, removed and repeated, which gets deeper into the decoder."""
    octets = bytearray(amf3.encode(*data.draw(st.lists(trees, min_size=1, max_size=3))) + array_reference(0))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(octets) - 1))
        octets[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        if not octets:
            return
    try:
        values = amf3.decode(octets)
    except RemoteProtocolError:
        return
    assert isinstance(amf3.encode(*values), bytes)
    assert isinstance(amf0.encode(*values), bytes)
