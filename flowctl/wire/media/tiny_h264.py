"""The smallest legal H.264 stream that shows something: pictures of flat squares, a macroblock each, at any size.

How it works: a macroblock is predicted from its neighbour and, where it differs, has one coefficient, its mean. So a
picture costs an octet a macroblock, and a predicted picture, which skips what has not changed, some ten octets and
four for each square that has. The quantiser is the coarsest, so that one step of the coefficient is 14 of brightness,
exactly, and nothing is filtered: what a decoder shows is known to the bit. Everything around is real: parameter sets,
slice headers with correct frame numbers and picture order counts, reference marks. A decoder therefore decodes every
picture, and a server that looks at NAL units sees what an encoder would send.

Frames get the size the source wants by a filler data NAL unit behind the slice, which decoders skip.

Source: Rec. ITU-T H.264 7.3 (syntax), 7.4 (semantics), 9.1 (codes); ISO/IEC 14496-15 5.3.3.1 (avcC).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from flowctl.errors import ConfigError

_START_CODE_LIKE = re.compile(rb"\x00\x00(?=[\x00-\x03])")


class BitWriter:
    """Collects bits into one growing integer, which for headers is both short and fast.

    Not meant for long streams: appending n bits costs time proportional to what is there already.
    """

    __slots__ = ("_bits", "_value")

    def __init__(self) -> None:
        self._value = 0
        self._bits = 0

    def u(self, value: int, bits: int) -> BitWriter:
        """Append `value` as an unsigned field of `bits` bits; returns self. The caller makes sure that it fits."""
        self._value = self._value << bits | value
        self._bits += bits
        return self

    def ue(self, value: int) -> BitWriter:
        """Append `value`, 0 or more, as an unsigned Exp-Golomb code (H.264 9.1); returns self."""
        code = value + 1
        return self.u(code, 2 * code.bit_length() - 1)

    def se(self, value: int) -> BitWriter:
        """Append `value` as a signed Exp-Golomb code (H.264 9.1.1); returns self."""
        return self.ue(2 * value - 1 if value > 0 else -2 * value)

    def append(self, other: BitWriter) -> BitWriter:
        return self.u(other._value, other._bits)

    def align(self) -> BitWriter:
        return self.u(0, -self._bits % 8)

    def stop(self) -> BitWriter:
        """Append the stop bit 1 and fill the octet with zeros (H.264 7.3.2.11, rbsp_trailing_bits); returns self."""
        return self.u(1, 1).align()

    def to_bytes(self) -> bytes:
        filling = -self._bits % 8
        return (self._value << filling).to_bytes((self._bits + filling) // 8, "big")


def escape(rbsp: bytes) -> bytes:
    """Return `rbsp` with an octet 3 wherever three octets would look like a start code (H.264 7.4.1.1).

    Required in length-prefixed streams as well: decoders remove the octets whatever the framing is.
    """
    return _START_CODE_LIKE.sub(b"\x00\x00\x03", rbsp)


MAX_DIMENSION: Final = 4096  # level 5.1 allows pictures of 36,864 macroblocks, 4096 x 2304
MAX_MACROBLOCKS: Final = 36_864

NAL_SEI: Final = 6

_PROFILE: Final = 66  # Baseline: no B pictures, no arithmetic coding
_CONSTRAINTS: Final = 0xC0  # sets 0 and 1: Constrained Baseline, which everything can decode
_LEVEL_4: Final = (40, 20_000_000, 8_192)  # level_idc, bits per second, macroblocks a picture (table A-1)
_LEVEL_5_1: Final = 51
_FRAME_NUM_BITS: Final = 8
_ORDER_BITS: Final = 16
_QUANTISER: Final = 51  # the coarsest: a coefficient of 1 is 14 of brightness
GREY: Final = 0
"""The square of middle brightness, 128; others are steps of 14 above or below."""
STEPS: Final = 8
"""How far a square may be from grey, in steps: 16 to 240 of brightness. Two squares differ by 16 steps at most."""
SQUARE_BITS: Final = 56
"""Most bits of a changed square: run of skipped ones (19), type and modes (9), coefficient (28)."""
Squares = Mapping[int, int]
"""A picture: the steps of squares, by their number, row by row; all others are those of the background."""


def _coefficient(steps: int) -> tuple[int, int]:
    """Return value and number of bits of a macroblock's only coefficient (9.2): count, level, no zeros before it."""
    if steps == 0:
        return 1, 1
    if abs(steps) == 1:
        return (0b0101 if steps > 0 else 0b0111), 4
    code = (2 * steps - 2 if steps > 0 else -2 * steps - 1) - 2
    if code < 14:
        return 0b000101 << code + 2 | 0b11, 6 + code + 2
    return (0b000101 << 15 | 1) << 5 | (code - 14) << 1 | 1, 26


def _macroblock(prediction: int, steps: int, *, inter: bool) -> tuple[int, int]:
    """Return value and number of bits of a macroblock: type with its prediction, chroma mean, same quantiser, mean."""
    value = prediction + (6 if inter else 1) + 1  # as an unsigned code, which begins with zeros
    bits = 2 * value.bit_length() - 1
    mean, mean_bits = _coefficient(steps)
    return (value << 2 | 0b11) << mean_bits | mean, bits + 2 + mean_bits


_FROM_ABOVE, _FROM_LEFT, _FROM_NOTHING = 0, 1, 2  # Intra_16x16_Vertical, _Horizontal, _DC (table 8-4)
_CODES: Final = {
    (inter, prediction, steps): _macroblock(prediction, steps, inter=inter)
    for inter in (False, True)
    for prediction in (_FROM_ABOVE, _FROM_LEFT, _FROM_NOTHING)
    for steps in range(-2 * STEPS, 2 * STEPS + 1)
}


class TinyH264:
    """Parameter sets and pictures of one video."""

    def __init__(self, width: int, height: int, fps: float, bit_rate: int, background: int = GREY) -> None:
        for field, value in (("width", width), ("height", height)):
            if value % 2 or not 16 <= value <= MAX_DIMENSION:
                raise ConfigError(f"{field} {value} is not an even number in 16..{MAX_DIMENSION}")
        columns, rows = (width + 15) // 16, (height + 15) // 16
        self.columns, self.rows = columns, rows
        """Squares of a picture, across and down."""
        self._background = background
        self.macroblocks = columns * rows
        """Squares a picture; an intra picture of one brightness has as many octets and a few more."""
        if self.macroblocks > MAX_MACROBLOCKS:
            raise ConfigError(f"{width}x{height} has {self.macroblocks} macroblocks, the limit is {MAX_MACROBLOCKS}")
        level, level_bit_rate, level_size = _LEVEL_4
        self._level = level if bit_rate <= level_bit_rate and self.macroblocks <= level_size else _LEVEL_5_1
        self._plain_row = self._row(1, {})
        self.sps = self._make_sps(columns, rows, (columns * 16 - width) // 2, (rows * 16 - height) // 2, fps)
        """Sequence parameter set NAL unit."""
        self.pps = _make_pps()
        """Picture parameter set NAL unit."""

    def config(self) -> bytes:
        """Return the AVCDecoderConfigurationRecord (avcC) with lengths of 4 octets and both parameter sets.

        Shape: 1, profile, constraints, level, 0xFC | 3, 0xE0 | 1, length (2 octets), SPS, 1, length (2), PPS.
        """
        return b"".join(
            (
                bytes((1, _PROFILE, _CONSTRAINTS, self._level, 0xFC | 3, 0xE0 | 1)),
                len(self.sps).to_bytes(2, "big"),
                self.sps,
                b"\x01",
                len(self.pps).to_bytes(2, "big"),
                self.pps,
            )
        )

    def intra_slice(self, idr_pic_id: int, squares: Squares = MappingProxyType({})) -> bytes:
        """Return the slice NAL unit of an IDR picture."""
        bits = BitWriter().ue(0).ue(7).ue(0)  # first macroblock, slice type "all slices are I", parameter set
        bits.u(0, _FRAME_NUM_BITS).ue(idr_pic_id).u(0, _ORDER_BITS)
        bits.u(0, 2)  # output earlier pictures, not a long-term reference
        bits.se(0).ue(1)  # quantiser as in the parameter set, no deblocking
        drawn = {number // self.columns for number in squares}
        for row in range(self.rows):
            bits.append(self._row(row, squares) if row == 0 or drawn & {row - 1, row} else self._plain_row)
        return b"\x65" + escape(bits.stop().to_bytes())

    def predicted_slice(
        self, index: int, references_before: int, before: Squares, squares: Squares, *, reference: bool
    ) -> bytes:
        """Return the slice NAL unit of a picture that shows what has changed since the last reference picture."""
        bits = BitWriter().ue(0).ue(5).ue(0)  # first macroblock, slice type "all slices are P", parameter set
        bits.u(references_before % (1 << _FRAME_NUM_BITS), _FRAME_NUM_BITS)
        bits.u(2 * index % (1 << _ORDER_BITS), _ORDER_BITS)
        bits.u(0, 2)  # number of references and their order as in the parameter set
        if reference:
            bits.u(0, 1)  # sliding window: the newest reference replaces the oldest
        bits.se(0).ue(1)  # quantiser as in the parameter set, no deblocking
        at = 0
        changed = {number for number, _ in before.items() ^ squares.items()} if before is not squares else ()
        for number in sorted(changed):
            bits.ue(number - at).u(*self._square(number, squares, inter=True))  # so many are skipped before it
            at = number + 1
        if at < self.macroblocks:
            bits.ue(self.macroblocks - at)
        return (b"\x41" if reference else b"\x01") + escape(bits.stop().to_bytes())

    def _row(self, row: int, squares: Squares) -> BitWriter:
        """Return a row of an IDR picture; by itself, for appending to a picture takes longer the more it has."""
        bits = BitWriter()
        for number in range(row * self.columns, (row + 1) * self.columns):
            bits.u(*self._square(number, squares, inter=False))
        return bits

    def _square(self, number: int, squares: Squares, *, inter: bool) -> tuple[int, int]:
        """Return value and number of bits of one macroblock, predicted from the left, or from above at the edge."""
        steps = squares.get(number, self._background)
        if number % self.columns:
            return _CODES[inter, _FROM_LEFT, steps - squares.get(number - 1, self._background)]
        if number:
            return _CODES[inter, _FROM_ABOVE, steps - squares.get(number - self.columns, self._background)]
        return _CODES[inter, _FROM_NOTHING, steps - GREY]

    def _make_sps(self, columns: int, rows: int, crop_right: int, crop_bottom: int, fps: float) -> bytes:
        bits = BitWriter().u(_PROFILE, 8).u(_CONSTRAINTS, 8).u(self._level, 8).ue(0)
        bits.ue(_FRAME_NUM_BITS - 4)
        # Order type 0: type 2 forbids two non-reference pictures in a row (7.4.2.1.1), which a source may ask for.
        bits.ue(0).ue(_ORDER_BITS - 4)
        bits.ue(1).u(0, 1)  # one reference picture, no gaps in frame numbers
        bits.ue(columns - 1).ue(rows - 1).u(1, 1).u(1, 1)  # frames only, direct_8x8_inference
        if crop_right or crop_bottom:
            bits.u(1, 1).ue(0).ue(crop_right).ue(0).ue(crop_bottom)  # in units of two pixels for 4:2:0
        else:
            bits.u(0, 1)
        bits.u(1, 1)  # usability information follows
        bits.u(1, 1).u(1, 8)  # square pixels
        bits.u(0, 3)  # no overscan, signal type, chroma location
        # Ticks are fields, so the scale is twice the frame rate.
        bits.u(1, 1).u(1000, 32).u(round(2000 * fps), 32).u(1, 1)
        bits.u(0, 3)  # no hypothetical decoder parameters for NAL or VCL, no picture structure
        # Bitstream restriction: no reordering, so that decoders hand out each picture at once.
        bits.u(1, 1).u(1, 1).ue(0).ue(0).ue(10).ue(10).ue(0).ue(1)
        return b"\x67" + escape(bits.stop().to_bytes())


def _make_pps() -> bytes:
    bits = BitWriter().ue(0).ue(0)
    bits.u(0, 2)  # variable-length coding, no bottom field order
    bits.ue(0).ue(0).ue(0)  # one slice group, one reference in either list
    bits.u(0, 3)  # no weighted prediction
    bits.se(_QUANTISER - 26).se(0).se(0)  # quantisers
    bits.u(0b100, 3)  # deblocking is controlled by slices, no constrained intra prediction, no redundant pictures
    return b"\x68" + escape(bits.stop().to_bytes())


def filler(size: int) -> bytes:
    """Return a filler data NAL unit of `size` octets, 2 or more (7.3.2.7)."""
    return b"\x0c" + b"\xff" * (size - 2) + b"\x80"


def user_data(body: bytes) -> bytes:
    """Return a NAL unit with one unregistered user data message (Annex D.1.7)."""
    return bytes((NAL_SEI, 5, len(body))) + body + b"\x80"
