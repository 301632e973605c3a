"""Sizes, durations and rates as people write them: units, mistakes, and round trips through the text for people."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.text.printable import short
from flowctl.errors import ConfigError
from flowctl.units import (
    format_bit_rate,
    format_duration,
    format_size,
    parse_bit_rate,
    parse_count,
    parse_duration,
    parse_share,
    parse_size,
    write_duration,
    write_size,
)

PARSERS = {"size": parse_size, "duration": parse_duration, "rate": parse_bit_rate}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("64k", 65536),
        ("64K", 65536),
        ("64KiB", 65536),
        ("64kB", 64000),
        ("2MiB", 2 << 20),
        ("2 mib", 2 << 20),
        ("2MB", 2_000_000),
        ("1.5MB", 1_500_000),
        ("1.5GiB", 3 << 29),
        ("3g", 3 << 30),
        ("1GB", 10**9),
        ("  7 \t", 7),
    ],
)
def test_parse_size_when_unit_is_known_gives_bytes(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("8", 8.0),
        ("8s", 8.0),
        ("800ms", 0.8),
        ("250us", 0.00025),
        ("1.5s", 1.5),
        ("2min", 120.0),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("0", 0.0),
    ],
)
def test_parse_duration_when_unit_is_known_gives_seconds(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("800000", 800_000),
        ("200k", 200_000),
        ("2.5M", 2_500_000),
        ("2.5Mbit/s", 2_500_000),
        ("2.5 mbps", 2_500_000),
        ("1Gbit", 10**9),
        ("9bit/s", 9),
        ("9bps", 9),
    ],
)
def test_parse_bit_rate_when_unit_is_known_gives_bits_per_second(text, bits_per_s):
    assert parse_bit_rate(text) == bits_per_s


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize(
    "text",
    ["", " ", "MiB", "-1", "+1", "1,5", "1.", ".5", "1e3", "0x10", "nan", "inf", "1 2", "1k\n2", "\u0663", "9" * 400],
)
def test_parser_when_there_is_no_number_names_field_text_and_an_example(kind, text):
    with pytest.raises(ConfigError) as caught:
        PARSERS[kind](text, "some_field")
    assert str(caught.value).startswith("some_field: ")
    assert short(text) in str(caught.value)
    assert "like" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("size", "1s"),
        ("size", "1bit"),
        ("size", "1TiB"),
        ("duration", "1KiB"),
        ("duration", "1y"),
        ("duration", "1s/s"),
        ("rate", "1s"),
        ("rate", "1kB"),
        ("rate", "1bit/sbps"),
        ("rate", "1/s"),
    ],
)
def test_parser_when_unit_is_unknown_names_it_and_those_there_are(kind, text):
    with pytest.raises(ConfigError, match="unknown unit") as caught:
        PARSERS[kind](text, "some_field")
    assert str(caught.value).startswith("some_field: ")
    assert repr(text[1:].lower()) in str(caught.value)
    assert caught.value.hint.startswith("use ")


@given(st.sampled_from(list(PARSERS)), st.text(alphabet="0123456789. kKMGiBbBmsuhnpst/-\n\u0663", max_size=14))
@settings(max_examples=300, deadline=None)
def test_parser_for_any_text_gives_a_finite_value_or_a_config_error(kind, text):
    try:
        value = PARSERS[kind](text, "some_field")
    except ConfigError as caught:
        value, error = None, str(caught)
    if value is None:
        assert error.startswith("some_field: ")
    else:
        assert 0 <= value < float("inf")


@given(st.integers(0, 1 << 50))
@settings(max_examples=300, deadline=None)
def test_size_when_shown_and_read_again_is_about_the_same(size_bytes):
    shown = format_size(size_bytes)
    slack = 0 if size_bytes < 1000 else size_bytes * 0.051
    assert abs(parse_size(shown) - size_bytes) <= slack
    assert float(shown.split()[0]) < 1024 or shown.endswith("GiB")


@given(st.integers(0, 119_900))
@settings(max_examples=300, deadline=None)
def test_duration_when_shown_and_read_again_is_about_the_same(value_ms):
    again = parse_duration(format_duration(value_ms / 1000))
    assert abs(again - value_ms / 1000) <= (1e-9 if value_ms < 1000 else 0.0500001)


@given(st.integers(0, 10**12))
@settings(max_examples=300, deadline=None)
def test_bit_rate_when_shown_and_read_again_is_about_the_same(bits_per_s):
    again = parse_bit_rate(format_bit_rate(bits_per_s))
    slack = 0 if bits_per_s < 1000 else 500 if bits_per_s < 999_500 else 5_000
    assert abs(again - bits_per_s) <= slack


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (99.9 * 1024, "99.9 KiB"),
        (100 * 1024, "100 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (5000 * 1024**3, "5000.0 GiB"),
    ],
)
def test_format_size_when_near_a_unit_takes_the_one_that_reads_well(size_bytes, shown):
    assert format_size(size_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 ms"),
        (0.85, "850 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (8, "8.0 s"),
        (119.9, "119.9 s"),
        (119.96, "2 min 0 s"),
        (125, "2 min 5 s"),
        (179.6, "3 min 0 s"),
        (-125, "-2 min 5 s"),
    ],
)
def test_format_duration_when_near_a_unit_takes_the_one_that_reads_well(seconds, shown):
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("bits_per_s", "shown"),
    [
        (0, "0 bit/s"),
        (999, "999 bit/s"),
        (999.6, "1 kbit/s"),
        (64_000, "64 kbit/s"),
        (999_499, "999 kbit/s"),
        (999_500, "1.00 Mbit/s"),
        (2_500_000, "2.50 Mbit/s"),
    ],
)
def test_format_bit_rate_when_near_a_unit_takes_the_one_that_reads_well(bits_per_s, shown):
    assert format_bit_rate(bits_per_s) == shown


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5%", 0.005), ("0.01", 0.01), ("100%", 1.0), ("0", 0.0)])
def test_share_when_written_is_read(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "2", "101%", "-1%", "nan", "half"])
def test_share_when_no_share_is_refused(text):
    with pytest.raises(ConfigError, match="flights"):
        parse_share(text, "flights")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1, "1"), (1 << 20, "1MiB"), (1000, "1000"), (10 << 30, "10GiB")]
)
def test_size_when_written_reads_as_the_same(value, text):
    assert (write_size(value), parse_size(text)) == (text, value)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.04, "40ms"), (15.0, "15s"), (1.5, "1500ms"), (90.0, "90s")])
def test_duration_when_written_reads_as_the_same(value, text):
    assert (write_duration(value), parse_duration(text)) == (text, value)


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("2048", 2048), ("9" * 15, 10**15 - 1)])
def test_count_when_it_is_a_whole_number_is_read(text, expected):
    assert parse_count(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1k", " 1", "\u0663", "9" * 5000])
def test_count_when_it_is_none_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"messages is .* whole number") as caught:
        parse_count(text, "messages")
    assert len(str(caught.value)) < 120
