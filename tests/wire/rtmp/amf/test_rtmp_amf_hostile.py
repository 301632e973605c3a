"""What both AMF readers do alike: any buffer, what is cut or unknown, references, limits, and hostile data."""

import tracemalloc

import pytest
from amf_kit import check_any, code_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rtmp_amf0 import FORMS as FORMS0
from test_rtmp_amf3 import FORMS as FORMS3

from flowctl.errors import LimitExceededError
from flowctl.wire.rtmp.amf import amf0, amf3
from flowctl.wire.rtmp.amf.limits import AmfLimits

CODECS = {"amf0": (amf0, FORMS0, b"\x03\x00\x01a"), "amf3": (amf3, FORMS3, b"\x0a\x0b\x01\x03a")}
"""Each reader, a form of each marker, and an object as far as its first member's value."""
EACH = pytest.mark.parametrize(("codec", "forms", "member"), CODECS.values(), ids=CODECS)


def both(of_amf0, of_amf3):
    """Parametrize a test with forms in hex of either format."""
    cases = [pytest.param(amf0, form, id=f"amf0 {form}") for form in of_amf0]
    return pytest.mark.parametrize(
        ("codec", "form"), cases + [pytest.param(amf3, form, id=f"amf3 {form}") for form in of_amf3]
    )


@EACH
@pytest.mark.parametrize("make", [bytearray, memoryview, lambda data: memoryview(b"x" + data + b"x")[1:-1]])
def test_decode_takes_every_kind_of_buffer(codec, forms, member, make):
    del member
    data = bytes.fromhex(next(iter(forms.values()))[0])
    assert codec.decode(b"") == []
    assert repr(codec.decode(data)) == repr(codec.decode(make(data)))


@EACH
def test_decode_is_truncated_when_a_value_is_cut_anywhere(codec, forms, member):
    del member
    for form, _ in forms.values():
        data = bytes.fromhex(form)
        assert {code_of(codec, data[:stop]) for stop in range(1, len(data))} <= {"amf-truncated"}


@EACH
@pytest.mark.parametrize("marker", [0x12, 0x30, 0x7B, 0x80, 0xFF])
def test_unknown_marker_is_refused(codec, forms, member, marker):
    del forms
    assert code_of(codec, bytes((marker, 1, 1, 1))) == "amf-unknown-marker"
    assert code_of(codec, member + bytes((marker, 1, 1, 1))) == "amf-unknown-marker"


@both(
    ["02 0004 61ff6280", "0c 00000004 61ff6280"],
    ["06 09 61ff6280", "07 09 61ff6280", "0b 09 61ff6280"],
)
def test_malformed_utf8_is_replaced(codec, form):
    (value,) = codec.decode(bytes.fromhex(form))
    assert getattr(value, "text", value) == "a\ufffdb\ufffd"
    assert amf0.decode(amf0.encode(value)) == [value]


@both(
    ["07 0000", "03 000009 07 0001"],
    ["06 00", "06 02", "0a 01", "0a 05", "09 00", "0a 00", "08 00", "07 00", "0b 00", "0c 00", "11 fffffffe"],
)
def test_reference_is_refused_when_nothing_has_its_index(codec, form):
    assert code_of(codec, bytes.fromhex(form)) == "amf-bad-reference"


@both(
    ["03 0001 61 07 0000 000009", "0a 00000001 07 0000", "08 00000000 0001 61 070000"],
    [
        *("09 03 01 09 00", "09 01 03 61 09 00 01", "0a 0b 01 03 61 0a 00", "0a 13 01 03 61 0a 00"),
        *("10 03 00 01 10 00", "11 03 00 11 00", "11 03 00 01 11 00"),
    ],
)
def test_reference_is_refused_when_it_is_inside_what_it_refers_to(codec, form):
    """A value that contains itself would hang whoever walks it, so it is not built."""
    assert code_of(codec, bytes.fromhex(form)) == "amf-cyclic-reference"


@both(
    ["03 0001 61", "08 00000001 0001 61", "10 0001 63 0001 61", "0a 00000001"],
    ["09 03 01", "09 01 03 61", "0a 0b 01 03 61", "0a 13 01 03 61", "10 03 00 01"],
)
def test_depth_is_limited_when_containers_nest(codec, form):
    level = bytes.fromhex(form)
    assert code_of(codec, level * 32) == "amf-truncated"
    for levels in (33, 100_000):
        with pytest.raises(LimitExceededError) as caught:
            codec.decode(level * levels + b"\x01" * 64)
        assert (caught.value.limit, caught.value.value, caught.value.maximum) == ("amf_depth", 33, 32)
    assert code_of(codec, level * 128, AmfLimits(depth=128)) == "amf-truncated"
    assert code_of(codec, level * 129 + b"\x01" * 8, AmfLimits(depth=128)) == "limit:amf_depth"


@both(
    ["0a ffffffff", "0a 00001000 05", "0c ffffffff 61", "0f 7fffffff 61", "08 ffffffff", "02 ffff 61"],
    [
        *("06 ffffffff", "07 ffffffff", "0b ffffffff", "0c ffffffff", "09 ffffffff 01", "0d ffffffff 00"),
        *("0d 0b 00 00000000", "0e ffffffff 00", "0f ffffffff 00", "10 ffffffff 00 01", "11 ffffffff 00"),
        *("11 05 00 01 01", "0a fffffff3 01"),
    ],
)
def test_declared_size_allocates_nothing_when_the_data_is_missing(codec, form):
    data = bytes.fromhex(form)
    tracemalloc.start()
    try:
        assert code_of(codec, data) == "amf-truncated"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * 1024


@settings(max_examples=800, deadline=None)
@given(st.sampled_from([amf0, amf3]), st.binary(max_size=200), st.integers(0, 0x12))
def test_random_octets_end_in_values_or_a_remote_error(codec, data, marker):
    check_any(codec, bytes((marker,)) + data)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(list(CODECS.values())), st.data())
def test_damaged_data_ends_in_values_or_a_remote_error(case, data):
    codec, forms, member = case
    picked = data.draw(st.lists(st.sampled_from([form for form, _ in forms.values()]), min_size=1, max_size=6))
    octets = bytearray(member + b"".join(map(bytes.fromhex, picked)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(octets) - 1))
        octets[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        if not octets:
            return
    check_any(codec, octets)
