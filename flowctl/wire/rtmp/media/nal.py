"""Whether a picture is a key frame, needed by later pictures, or disposable, read from NAL unit headers alone.

How it works: H.264 and HEVC pictures travel in FLV and RTMP as NAL units, each preceded by its length (ISO/IEC
14496-15, unlike the start codes of Annex B). The first octet of a NAL unit says what it is and, for a slice, whether
any other picture may refer to it. `survey` hops from header to header and stops at the first one that settles the
question, which with one slice a picture is the first or second. It looks at no slice data.

Every doubt ends in INTER: a wrong DISPOSABLE would tear a hole into the pictures that follow, a wrong INTER only keeps
one frame too many. Doubts are lengths that do not add up to the body, more NAL units than `MAX_NAL_HEADERS`, and length
fields that are not four octets wide (the width is told in the sequence header, which this stateless code does not see;
encoders use four, and with two or one the lengths do not add up).
"""

from __future__ import annotations

import struct
from typing import Final

from flowctl.core.flow.state import MessageClass

MAX_NAL_HEADERS: Final = 32
"""NAL units looked at in one message. Hardware encoders cut a picture into 4 to 16 slices, x264's Blu-ray setting into
4; a hostile body of one-octet NAL units would otherwise cost two million steps per 10 MiB message."""

# What one NAL unit header says about its picture. The first three are bits that the walk collects; the last three end
# it at once.
_IGNORED: Final = 0  # delimiters, supplemental information, filler: goes with its picture, decides nothing
_NON_REFERENCE: Final = 1  # a slice no other picture refers to
_PARAMETERS: Final = 2  # a parameter set: later pictures need it, but a slice may still follow
_REFERENCE: Final = 4  # a slice that other pictures refer to
_RANDOM_ACCESS: Final = 5  # a slice of an intra picture at which decoding can start
_ILLEGAL: Final = 6  # a header the standard forbids: the lengths are probably wrong

# The answer by the bits collected when the walk reaches the end.
_AT_END: Final = (None, MessageClass.DISPOSABLE, MessageClass.INTER, MessageClass.INTER)
_AT_ONCE: Final = {
    _REFERENCE: MessageClass.INTER,
    _RANDOM_ACCESS: MessageClass.KEY,
    _ILLEGAL: MessageClass.INTER,
}
_INTER: Final = MessageClass.INTER
_HEVC_CRA: Final = 21
_read_length: Final = struct.Struct(">I").unpack_from


def _avc_verdict(header: int) -> int:
    """Return the verdict on the first octet of an H.264 NAL unit: forbidden bit, nal_ref_idc (2), nal_unit_type (5)."""
    nal_ref_idc, nal_unit_type = header >> 5 & 3, header & 31
    if header & 0x80 or nal_unit_type == 0:
        return _ILLEGAL
    if nal_unit_type == 5:
        # H.264 7.4.1: nal_ref_idc shall not be 0 for an IDR picture.
        return _RANDOM_ACCESS if nal_ref_idc else _ILLEGAL
    if nal_unit_type < 5 or nal_unit_type in (19, 20, 21):
        return _REFERENCE if nal_ref_idc else _NON_REFERENCE
    # What is neither a slice nor zero-weight must be kept: 7, 8, 13 and 15 are the parameter sets. Type 14 prefixes a
    # slice and repeats its nal_ref_idc, so the slice itself decides.
    return _PARAMETERS if nal_ref_idc and nal_unit_type != 14 else _IGNORED


def _hevc_verdict(header: int) -> int:
    """Return the verdict on the first octet of an HEVC NAL unit: forbidden bit, nal_unit_type (6), layer id (1)."""
    nal_unit_type = header >> 1 & 63
    if header & 0x80:
        return _ILLEGAL
    if nal_unit_type < 16:
        # H.265 table 7-1: below 16 the even types are the sub-layer non-reference pictures (TRAIL_N, TSA_N, STSA_N,
        # RADL_N, RASL_N and the reserved ones). A picture of a higher temporal sub-layer could still refer to them;
        # encoders put non-reference pictures into the highest sub-layer, so this is taken as "nobody needs it".
        return _REFERENCE if nal_unit_type & 1 else _NON_REFERENCE
    if nal_unit_type < 22:
        return _RANDOM_ACCESS  # BLA, IDR and CRA
    if nal_unit_type < 32:
        return _REFERENCE  # reserved slice types
    return _PARAMETERS if nal_unit_type < 35 else _IGNORED


AVC_VERDICTS: Final = bytes(_avc_verdict(header) for header in range(256))
"""Verdict on a unit, by the first octet of an H.264 NAL unit (Rec. ITU-T H.264, 7.3.1 and table 7-1)."""

HEVC_VERDICTS: Final = bytes(_hevc_verdict(header) for header in range(256))
"""Verdict on a unit, by the first octet of an HEVC NAL unit (Rec. ITU-T H.265, 7.3.1.2 and table 7-1)."""


def survey(body: bytes | memoryview, position: int, end: int, verdicts: bytes) -> MessageClass | None:
    """Return what the NAL units from `position` to `end` of `body` are to a drop policy."""
    seen = _IGNORED
    for _ in range(MAX_NAL_HEADERS):
        left = end - position - 4
        if left < 0:
            return _AT_END[seen] if left == -4 else _INTER
        length: int = _read_length(body, position)[0]
        if length > left:
            return _INTER
        if length:
            verdict = verdicts[body[position + 4]]
            if verdict >= _REFERENCE:
                return _AT_ONCE[verdict]
            seen |= verdict
        # A length of 0 is an empty NAL unit, as DJI drones send them (bluenviron/mediamtx #928): skipped.
        position += 4 + length
    return _AT_END[seen] if position == end else _INTER


def is_open(codec: str, body: bytes | memoryview, position: int) -> bool:
    """Return whether the key frame that begins at `position` is no IDR picture: a recovery point, or CRA with HEVC.

    Pictures that follow it and are shown before it may then refer to ones before it.
    """
    if codec not in ("avc1", "hvc1"):
        return False
    for _ in range(MAX_NAL_HEADERS):
        if position + 4 >= len(body):
            return False
        header = body[position + 4]
        if codec == "avc1" and 1 <= header & 31 <= 5:
            return header & 31 != 5
        if codec == "hvc1" and header >> 1 & 63 < 32:
            return header >> 1 & 63 == _HEVC_CRA
        position += 4 + _read_length(body, position)[0]
    return False
