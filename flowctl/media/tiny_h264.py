"""The smallest legal H.264 stream: a grey picture, then pictures that repeat it, at any size and frame rate.

How it works: an intra picture whose every macroblock predicts its mean from nothing and has no residual is grey and
costs one octet a macroblock; a predicted picture that skips every macroblock costs about ten octets. Everything around
them is real: parameter sets, slice headers with correct frame numbers and picture order counts, reference marks. A
decoder therefore decodes every picture, and a server that looks at NAL units sees what an encoder would send.

Frames get the size the source wants by a filler data NAL unit behind the slice, which decoders skip.

Source: Rec. ITU-T H.264 7.3 (syntax), 7.4 (semantics), 9.1 (codes); ISO/IEC 14496-15 5.3.3.1 (avcC).
"""

from __future__ import annotations

from typing import Final

from flowctl.errors import ConfigError
from flowctl.media.bits import BitWriter, escape

MAX_DIMENSION: Final = 4096  # level 5.1 allows pictures of 36,864 macroblocks, 4096 x 2304
MAX_MACROBLOCKS: Final = 36_864

NAL_SLICE: Final = 1
NAL_IDR: Final = 5
NAL_SEI: Final = 6
NAL_FILLER: Final = 12

_PROFILE: Final = 66  # Baseline: no B pictures, no arithmetic coding
_CONSTRAINTS: Final = 0xC0  # sets 0 and 1: Constrained Baseline, which everything can decode
_LEVEL_4: Final = (40, 20_000_000, 8_192)  # level_idc, bits per second, macroblocks a picture (table A-1)
_LEVEL_5_1: Final = 51
_FRAME_NUM_BITS: Final = 8
_ORDER_BITS: Final = 16
_GREY_MACROBLOCK: Final = 0x27  # 00100 I_16x16_2_0_0 (mean), 1 chroma mean, 1 same quantiser, 1 no coefficients


class TinyH264:
    """Parameter sets and pictures of one grey video.

    Args:
        width: pixels, even, 16 to 4096.
        height: pixels, even, 16 to 4096; at most 36,864 macroblocks together.
        fps: frames per second, told in the parameter sets.
        bit_rate: bits per second; decides the level that is announced, nothing else.

    Raises:
        ConfigError: a dimension is outside its range.
    """

    def __init__(self, width: int, height: int, fps: float, bit_rate: int) -> None:
        for field, value in (("width", width), ("height", height)):
            if value % 2 or not 16 <= value <= MAX_DIMENSION:
                raise ConfigError(f"{field} {value} is not an even number in 16..{MAX_DIMENSION}")
        columns, rows = (width + 15) // 16, (height + 15) // 16
        self.macroblocks = columns * rows
        """Macroblocks a picture; an intra picture has as many octets and a few more."""
        if self.macroblocks > MAX_MACROBLOCKS:
            raise ConfigError(f"{width}x{height} has {self.macroblocks} macroblocks, the limit is {MAX_MACROBLOCKS}")
        level, level_bit_rate, level_size = _LEVEL_4
        self._level = level if bit_rate <= level_bit_rate and self.macroblocks <= level_size else _LEVEL_5_1
        self.sps = self._make_sps(columns, rows, (columns * 16 - width) // 2, (rows * 16 - height) // 2, fps)
        """Sequence parameter set NAL unit."""
        self.pps = _make_pps()
        """Picture parameter set NAL unit."""
        self._grey = int.from_bytes(bytes((_GREY_MACROBLOCK,)) * self.macroblocks, "big")

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

    def intra_slice(self, idr_pic_id: int) -> bytes:
        """Return the slice NAL unit of an IDR picture.

        Args:
            idr_pic_id: 0 to 65535; consecutive IDR pictures must have different ones (7.4.3).
        """
        bits = BitWriter().ue(0).ue(7).ue(0)  # first macroblock, slice type "all slices are I", parameter set
        bits.u(0, _FRAME_NUM_BITS).ue(idr_pic_id).u(0, _ORDER_BITS)
        bits.u(0, 2)  # output earlier pictures, not a long-term reference
        bits.se(0)  # quantiser as in the parameter set
        bits.u(self._grey, 8 * self.macroblocks).stop()
        return b"\x65" + escape(bits.to_bytes())

    def repeat_slice(self, index: int, references_before: int, *, reference: bool) -> bytes:
        """Return the slice NAL unit of a picture that repeats the last reference picture.

        Args:
            index: pictures since the IDR picture, 1 or more.
            references_before: reference pictures among them, the IDR picture included: the frame number.
            reference: False makes it disposable (nal_ref_idc 0).
        """
        bits = BitWriter().ue(0).ue(5).ue(0)  # first macroblock, slice type "all slices are P", parameter set
        bits.u(references_before % (1 << _FRAME_NUM_BITS), _FRAME_NUM_BITS)
        bits.u(2 * index % (1 << _ORDER_BITS), _ORDER_BITS)
        bits.u(0, 2)  # number of references and their order as in the parameter set
        if reference:
            bits.u(0, 1)  # sliding window: the newest reference replaces the oldest
        bits.se(0).ue(self.macroblocks).stop()  # quantiser; skip every macroblock
        return (b"\x41" if reference else b"\x01") + escape(bits.to_bytes())

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
    bits.se(0).se(0).se(0)  # quantisers
    bits.u(0, 3)  # no deblocking control, no constrained intra prediction, no redundant pictures
    return b"\x68" + escape(bits.stop().to_bytes())


def filler(size: int) -> bytes:
    """Return a filler data NAL unit of `size` octets, 2 or more (7.3.2.7)."""
    return b"\x0c" + b"\xff" * (size - 2) + b"\x80"


def user_data(body: bytes) -> bytes:
    """Return a NAL unit with one unregistered user data message (Annex D.1.7).

    Args:
        body: 16 octets of identifier, then the data; at most 254 octets, with no two octets 0 in a row, so that nothing
            has to be escaped and every octet stays at its place.
    """
    return bytes((NAL_SEI, 5, len(body))) + body + b"\x80"
