"""Width and height of H.264 pictures, read from the sequence header of a stream, or from its first octets.

Source: ISO/IEC 14496-15 5.3.3.1 (avcC); Rec. ITU-T H.264 7.3.2.1.1 (sequence parameter set), 9.1 (codes).
"""

from __future__ import annotations

from typing import Final

from flowctl.wire.rtmp.media.frames import Body

_BEFORE_CONFIG: Final = 5  # octets of a video message before avcC: classic FLV and Enhanced RTMP alike
_BEFORE_SET: Final = 8  # octets of avcC before its first parameter set
_READ_BYTES: Final = 256  # octets looked at: scaling matrices make the longest parameter sets
_MOST_LENGTH: Final = 1 << 14  # width and height of the highest level are below
_HIGH_PROFILES: Final = frozenset({44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244})
"""Profiles whose parameter sets say the form of the colours."""


class _Bits:
    """Reads fields one after the other; raises ValueError where there are no more octets."""

    def __init__(self, octets: bytes) -> None:
        self._text = "".join(f"{octet:08b}" for octet in octets)
        self._at = 0

    def u(self, bits: int) -> int:
        start, self._at = self._at, self._at + bits
        if self._at > len(self._text):
            raise ValueError("no more bytes")
        return int(self._text[start : self._at], 2)

    def ue(self) -> int:
        zeros = self._text.index("1", self._at) - self._at
        self._at += zeros
        return self.u(zeros + 1) - 1

    def se(self) -> int:
        code = self.ue()
        return (code + 1) // 2 if code & 1 else -(code // 2)


def read_size(message: Body) -> tuple[int, int] | None:
    """Return width and height that an H.264 sequence header says. None: it says none, or has no room for them."""
    parameter_set = bytes(message[_BEFORE_CONFIG + _BEFORE_SET : _READ_BYTES]).replace(b"\0\0\3", b"\0\0")
    try:
        size = _read_parameter_set(_Bits(parameter_set))
    except ValueError:
        return None
    return size if size is not None and all(0 < length <= _MOST_LENGTH for length in size) else None


def _read_parameter_set(bits: _Bits) -> tuple[int, int] | None:
    if bits.u(8) & 31 != 7:
        return None
    profile = bits.u(8)
    bits.u(16)  # constraints, level
    bits.ue()  # its number
    colours = bits.ue() if profile in _HIGH_PROFILES else 1
    if profile in _HIGH_PROFILES:
        separate = bits.u(1) if colours == 3 else 0
        colours = 0 if separate else colours
        bits.ue()  # depth of brightness
        bits.ue()  # depth of colours
        bits.u(1)
        if bits.u(1):
            _skip_scaling(bits, 12 if colours == 3 or separate else 8)
    bits.ue()  # length of frame numbers
    order = bits.ue()
    if order == 0:
        bits.ue()
    elif order == 1:
        bits.u(1)
        for _ in range(2):
            bits.se()
        for _ in range(bits.ue()):
            bits.se()
    bits.ue()  # reference frames
    bits.u(1)
    columns, rows = bits.ue() + 1, bits.ue() + 1
    fields = 1 - bits.u(1)
    bits.u(1 + fields)
    left, right, top, bottom = (bits.ue() for _ in range(4)) if bits.u(1) else (0, 0, 0, 0)
    across, down = (2 if colours in (1, 2) else 1), (2 if colours == 1 else 1) * (1 + fields)
    return columns * 16 - across * (left + right), rows * 16 * (1 + fields) - down * (top + bottom)


def _skip_scaling(bits: _Bits, lists: int) -> None:
    for number in range(lists):
        last = following = 8
        for _ in range((16 if number < 6 else 64) * bits.u(1)):
            following = (last + bits.se()) % 256 if following else 0
            last = following or last
