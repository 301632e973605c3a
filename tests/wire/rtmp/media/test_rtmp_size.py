"""Sequence headers: which size the pictures behind them have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.media.tiny_h264 import BitWriter
from flowctl.wire.rtmp.media.size import read_size

X264 = {
    "baseline": (
        "17000000000142c028ffe1001a6742c028d900780227e5c044000003000400000300c83c60c92001000568cb83cb20",
        (1920, 1080),
    ),
    "fields": (
        "170000000001640028ffe1001a67640028acd94078044fde0220000003002000000643e2c5b2c001000668fba3cb22c0fdf8f800",
        (1920, 1080),
    ),
    "4:4:4": (
        "170000000001f4001effe1001b67f4001e919b281b07bc5f80880000030008000003019078b16cb001000668ebe3c44844fff8f800",
        (854, 480),
    ),
    "4:2:2": (
        "1700000000017a000dffe1001b677a000dbcd941519e222f011000000300100000030320f142996001000668ebe3cb22c0fef8f800",
        (322, 182),
    ),
    "grey": (
        "17000000000164000cffe100196764000cf36505067e37016c800000030080000019078a14cb01000668ebe3cb22c0fcf8f800",
        (320, 180),
    ),
}
"""Headers as x264 writes them, by the form of the pictures, and the size that they have."""


@pytest.mark.parametrize("name", X264)
def test_size_when_x264_wrote_the_header_is_that_of_the_pictures(name):
    header, size = X264[name]
    message = bytes.fromhex(header)
    assert read_size(message) == size
    assert read_size(message[:64]) == size
    assert read_size(b"\x90avc1" + message[5:]) == size


@pytest.mark.parametrize("size", [(640, 360), (854, 480), (1280, 720)])
def test_size_when_the_source_is_synthetic_is_that_of_the_source(size):
    _, header, _ = SyntheticSource(width=size[0], height=size[1]).headers()
    assert read_size(header.payload) == size


def test_size_when_matrices_and_steps_of_the_order_come_first_is_read_behind_them():
    bits = BitWriter().u(0x67, 8).u(100, 8).u(0, 16).ue(0).ue(1).ue(0).ue(0).u(0, 1).u(1, 1)
    bits.u(1, 1).se(0)  # the first matrix repeats one value, the second ends after two, the others are left out
    for _ in range(15):
        bits.se(0)
    bits.u(1, 1).se(4).se(-12).u(0, 6)
    bits.ue(4).ue(1).u(0, 1).se(-2).se(3).ue(2).se(1).se(-1)
    bits.ue(1).u(0, 1).ue(39).ue(22).u(1, 1).u(1, 1).u(1, 1).ue(0).ue(0).ue(0).ue(4)
    message = bytes(13) + bits.stop().to_bytes()
    assert read_size(message) == (640, 360)


@pytest.mark.parametrize("columns", [1 << 10, (1 << 200) - 2])
def test_size_when_no_level_has_pictures_so_large_is_none(columns):
    """A code may say any number; one of 60 digits went into the state and into the metadata of viewers."""
    bits = BitWriter().u(0x67, 8).u(66, 8).u(0, 16).ue(0).ue(0).ue(2).ue(1).u(0, 1).ue(columns).ue(0).u(1, 1).u(0, 2)
    assert read_size(bytes(13) + bits.stop().to_bytes()) is None


@given(st.binary(max_size=80), st.integers(0, 60))
def test_size_when_octets_are_any_or_few_is_none_or_a_pair(octets, kept):
    header = bytes.fromhex(X264["fields"][0])
    for message in (octets, header[:kept] + octets, header[:13] + octets):
        found = read_size(message)
        assert found is None or len(found) == 2
    assert read_size(header[: min(kept, 20)]) is None
