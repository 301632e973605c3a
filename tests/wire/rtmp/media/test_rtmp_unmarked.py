"""Key frames of VP8, VP9 and AV1 that carry no mark."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.wire.rtmp.media.frames import is_key_frame


def obu(kind: int, payload: bytes, *, sized: bool = True, extended: bool = False) -> bytes:
    """Return an AV1 OBU; `payload` below 16 KiB."""
    head = bytes((kind << 3 | (4 if extended else 0) | (2 if sized else 0),)) + (b"\x00" if extended else b"")
    size = len(payload)
    length = bytes((size,)) if size < 128 else bytes((size & 0x7F | 0x80, size >> 7))
    return head + (length if sized else b"") + payload


DELIMITER, SEQUENCE, METADATA = obu(2, b""), obu(1, b"\x00" * 11), obu(5, b"\x01" * 200)
KEY, HIDDEN_KEY, INTER, SHOW_EXISTING = b"\x10\xaa", b"\x00\xaa", b"\x30\xaa", b"\x90\xaa"


@pytest.mark.parametrize(
    ("codec", "frame", "expected"),
    [
        ("vp08", b"\x10\x02\x00\x9d\x01\x2a", True),
        ("vp08", b"\x31\x04\x00", False),
        ("vp09", b"\x82\x49\x83\x42", True),  # profile 0 key frame
        ("vp09", b"\x86\x00", False),  # profile 0 inter frame
        ("vp09", b"\x88\x00", False),  # show_existing_frame
        ("vp09", b"\xb0\x49", True),  # profile 3 key frame
        ("vp09", b"\xb2\x49", False),  # profile 3 inter frame
        ("vp09", b"\x42\x49", False),  # wrong marker
        ("av01", DELIMITER + SEQUENCE + obu(6, KEY), True),
        ("av01", DELIMITER + SEQUENCE + METADATA + obu(3, KEY), True),
        ("av01", SEQUENCE + obu(6, KEY, sized=False), True),
        ("av01", DELIMITER + obu(6, KEY, extended=True), True),
        ("av01", DELIMITER + obu(6, INTER), False),
        ("av01", DELIMITER + SEQUENCE + obu(6, INTER), False),
        ("av01", DELIMITER + SEQUENCE + obu(6, HIDDEN_KEY), False),
        ("av01", DELIMITER + obu(3, SHOW_EXISTING), False),
        ("av01", DELIMITER, False),
        ("av01", obu(6, b""), False),
        ("av01", DELIMITER * 8 + obu(6, KEY), False),
        ("av01", b"\x32" + b"\xff" * 12, False),
        ("av01", b"\x32\x7f\x10", False),
        ("av01", b"\x36", False),
        ("h263", b"\x00\x00", False),
    ],
)
def test_unmarked_frame(codec, frame, expected):
    assert is_key_frame(codec, frame, 0, len(frame)) is expected
    assert is_key_frame(codec, b"\xff" + frame + b"\x12\x00", 1, 1 + len(frame)) is expected


@given(st.sampled_from(["vp08", "vp09", "av01"]), st.binary(min_size=1, max_size=64))
@settings(max_examples=500, deadline=None)
def test_unmarked_frame_takes_any_octets(codec, frame):
    assert is_key_frame(codec, memoryview(frame), 0, len(frame)) is is_key_frame(codec, frame, 0, len(frame))
