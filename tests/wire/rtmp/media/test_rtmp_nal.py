"""NAL unit headers: which pictures can be started at, which must be kept, which nobody needs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp.media.nal import AVC_VERDICTS, HEVC_VERDICTS, MAX_NAL_HEADERS, is_open, survey

AVC_SLICE, AVC_NON_REFERENCE, AVC_IDR, AVC_SEI, AVC_SPS, AVC_PPS, AVC_DELIMITER = (
    0x41,
    0x01,
    0x65,
    0x06,
    0x67,
    0x68,
    0x09,
)
HEVC_TRAIL_N, HEVC_TRAIL_R, HEVC_RASL_N, HEVC_IDR, HEVC_CRA, HEVC_VPS, HEVC_SEI = (
    value << 1 for value in (0, 1, 8, 19, 21, 32, 39)
)


def nal(header: int, size: int = 20) -> bytes:
    return size.to_bytes(4, "big") + bytes((header,)) + b"\xaa" * (size - 1)


def survey_avc(body: bytes) -> MessageClass | None:
    return survey(body, 0, len(body), AVC_VERDICTS)


def survey_hevc(body: bytes) -> MessageClass | None:
    return survey(body, 0, len(body), HEVC_VERDICTS)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ((AVC_SLICE,), MessageClass.INTER),
        ((AVC_NON_REFERENCE,), MessageClass.DISPOSABLE),
        ((AVC_NON_REFERENCE, AVC_NON_REFERENCE, AVC_NON_REFERENCE), MessageClass.DISPOSABLE),
        ((AVC_NON_REFERENCE, AVC_SLICE), MessageClass.INTER),
        ((AVC_DELIMITER, AVC_SEI, AVC_NON_REFERENCE), MessageClass.DISPOSABLE),
        ((AVC_NON_REFERENCE, 0x0C), MessageClass.DISPOSABLE),
        ((AVC_IDR,), MessageClass.KEY),
        ((AVC_DELIMITER, AVC_SPS, AVC_PPS, AVC_SEI, AVC_IDR), MessageClass.KEY),
        ((AVC_SPS, AVC_NON_REFERENCE), MessageClass.INTER),
        ((AVC_SPS, AVC_PPS), MessageClass.INTER),
        ((AVC_DELIMITER, AVC_SEI), None),
        ((), None),
        ((0x05,), MessageClass.INTER),
        ((0x81,), MessageClass.INTER),
        ((0x00,), MessageClass.INTER),
        ((0x0E, 0x14), MessageClass.DISPOSABLE),
        ((0x6E, 0x01), MessageClass.DISPOSABLE),
        ((0x01, 0x34), MessageClass.INTER),
    ],
)
def test_survey_of_avc(headers, expected):
    assert survey_avc(b"".join(map(nal, headers))) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ((HEVC_TRAIL_R,), MessageClass.INTER),
        ((HEVC_TRAIL_N,), MessageClass.DISPOSABLE),
        ((HEVC_RASL_N, HEVC_RASL_N), MessageClass.DISPOSABLE),
        ((HEVC_TRAIL_N, HEVC_TRAIL_R), MessageClass.INTER),
        ((HEVC_SEI, HEVC_TRAIL_N), MessageClass.DISPOSABLE),
        ((HEVC_IDR,), MessageClass.KEY),
        ((HEVC_CRA,), MessageClass.KEY),
        ((HEVC_VPS, HEVC_VPS + 2, HEVC_VPS + 4, HEVC_SEI, HEVC_IDR), MessageClass.KEY),
        ((HEVC_VPS, HEVC_TRAIL_N), MessageClass.INTER),
        ((HEVC_VPS + 2, HEVC_TRAIL_N), MessageClass.INTER),
        ((HEVC_VPS + 4, HEVC_TRAIL_N), MessageClass.INTER),
        ((HEVC_VPS + 6, HEVC_TRAIL_N), MessageClass.DISPOSABLE),
        ((22 << 1,), MessageClass.INTER),
        ((0x80,), MessageClass.INTER),
        ((HEVC_SEI,), None),
        ((62 << 1, HEVC_TRAIL_N), MessageClass.DISPOSABLE),
    ],
)
def test_survey_of_hevc(headers, expected):
    assert survey_hevc(b"".join(map(nal, headers))) == expected


@pytest.mark.parametrize("cut", range(1, 24))
def test_survey_is_inter_when_the_last_length_goes_beyond_the_body(cut):
    body = nal(AVC_NON_REFERENCE) + nal(AVC_NON_REFERENCE)
    assert survey_avc(body[:-cut]) == MessageClass.INTER


@pytest.mark.parametrize("length", [20 + 1, 0xFFFFFFFF, 0x7FFFFFFF])
@pytest.mark.parametrize("header", [AVC_NON_REFERENCE, AVC_IDR])
def test_survey_is_inter_when_the_length_is_beyond_the_body(length, header):
    assert survey_avc(length.to_bytes(4, "big") + nal(header)[4:]) == MessageClass.INTER


def test_survey_is_inter_when_octets_are_left_over():
    assert survey_avc((19).to_bytes(4, "big") + nal(AVC_NON_REFERENCE)[4:]) == MessageClass.INTER


def test_survey_skips_empty_nal_units():
    empty = bytes(4)
    assert survey_avc(empty + nal(AVC_NON_REFERENCE) + empty) == MessageClass.DISPOSABLE
    assert survey_avc(empty * 3) is None


@pytest.mark.parametrize(
    ("count", "expected"),
    [(MAX_NAL_HEADERS, MessageClass.DISPOSABLE), (MAX_NAL_HEADERS + 1, MessageClass.INTER)],
)
def test_survey_looks_at_a_bounded_number_of_nal_units(count, expected):
    assert survey_avc(nal(AVC_NON_REFERENCE, 1) * count) == expected


@pytest.mark.parametrize("width", [1, 2])
def test_survey_is_inter_when_length_fields_are_shorter(width):
    body = (30).to_bytes(width, "big") + bytes((AVC_NON_REFERENCE,)) + b"\xaa" * 29
    assert survey_avc(body) == MessageClass.INTER


def test_survey_is_inter_when_the_body_has_start_codes():
    assert survey_avc(b"\x00\x00\x00\x01" + bytes((AVC_NON_REFERENCE,)) + b"\xaa" * 40) == MessageClass.INTER


def test_survey_stays_within_its_range():
    body = b"\xff" * 7 + nal(AVC_NON_REFERENCE) + nal(AVC_SLICE)
    assert survey(body, 7, 7 + 24, AVC_VERDICTS) == MessageClass.DISPOSABLE
    assert survey(body, 7, len(body), AVC_VERDICTS) == MessageClass.INTER


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=500, deadline=None)
def test_survey_takes_any_octets(body, hevc):
    verdicts = HEVC_VERDICTS if hevc else AVC_VERDICTS
    expected = survey(body, 0, len(body), verdicts)
    assert expected in (None, MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE)
    assert survey(memoryview(body), 0, len(body), verdicts) == expected


@given(st.lists(st.integers(0, 255), max_size=MAX_NAL_HEADERS))
@settings(max_examples=300, deadline=None)
def test_survey_never_says_disposable_when_something_is_referred_to(headers):
    """DISPOSABLE implies that every H.264 NAL unit but prefix units has nal_ref_idc 0."""
    body = b"".join(map(nal, headers))
    if survey_avc(body) == MessageClass.DISPOSABLE:
        assert all(header & 0x60 == 0 for header in headers if header & 31 != 14)


@pytest.mark.parametrize(
    ("codec", "headers", "expected"),
    [
        ("avc1", (AVC_DELIMITER, AVC_SPS, AVC_PPS, AVC_IDR), False),
        ("avc1", (AVC_SEI, AVC_SLICE), True),
        ("avc1", (AVC_SEI,), False),
        ("hvc1", (HEVC_VPS, HEVC_SEI, HEVC_IDR), False),
        ("hvc1", (HEVC_SEI, HEVC_CRA), True),
        ("av01", (AVC_SLICE,), False),
        ("avc1", (AVC_SEI,) * MAX_NAL_HEADERS + (AVC_SLICE,), False),
    ],
)
def test_key_frame_when_it_is_no_idr_picture_opens_a_group_that_refers_back(codec, headers, expected):
    body = b"12345" + b"".join(map(nal, headers))
    assert is_open(codec, body, 5) is expected
    assert is_open(codec, body[:8], 5) is False
