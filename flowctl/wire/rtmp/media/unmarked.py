"""Whether an unmarked VP8, VP9 or AV1 frame is a key frame, read from the first bits of the frame.

Why: Enhanced RTMP has a frame type in front of every frame, but bluenviron/gortmplib, and so every stream forwarded by
MediaMTX, leaves it 0 (reserved) for FourCC codecs. Believing it would mean a stream without a single key frame, which
nobody could join. H.264 and HEVC are covered by `flowctl.wire.rtmp.media.nal`; this file is for the rest.

Every doubt is answered with False: the frame is then an ordinary one.
"""

from __future__ import annotations

from typing import Final

_MAX_OBUS: Final = 8  # looked at for the first frame: delimiter, sequence header, metadata and padding come before it
_MAX_SIZE_OCTETS: Final = 8  # leb128() reads at most 8 octets (AV1 4.10.5)

_OBU_FRAME_HEADER: Final = 3
_OBU_FRAME: Final = 6


def is_key_frame(codec: str, body: bytes | memoryview, start: int, end: int) -> bool:
    """Return whether the frame in ``body[start:end]``, at least one octet, is a key frame.

    Source: RFC 6386 9.1 (VP8); VP9 bitstream specification 6.2; AV1 bitstream specification 5.3, 5.9.2.
    """
    if codec == "av01":
        return _is_av1_key_frame(body, start, end)
    first = body[start]
    if codec == "vp08":
        return first & 1 == 0
    if codec != "vp09" or first >> 6 != 2:
        return False
    # Marker 10, two bits of profile; profile 3 has a reserved bit after it. Then show_existing_frame, which means that
    # there is no frame here, and frame_type: both have to be 0.
    two_bits = first >> 1 if first & 0x30 == 0x30 else first >> 2
    return two_bits & 3 == 0


def _is_av1_key_frame(body: bytes | memoryview, start: int, end: int) -> bool:
    """Find the first frame of the temporal unit and look at its first four bits."""
    at = start
    for _ in range(_MAX_OBUS):
        if at >= end:
            return False
        # Forbidden bit, type (4), extension flag, has-size flag, reserved bit.
        obu = body[at]
        at += 2 if obu & 4 else 1
        size = end - at
        if obu & 2:
            size, at = _read_leb128(body, at, end)
        if size < 0 or size > end - at:
            return False
        if obu >> 3 & 15 in (_OBU_FRAME_HEADER, _OBU_FRAME):
            # show_existing_frame 0, frame_type 00 (key frame), show_frame 1. A key frame that is not shown is no place
            # to start at: the pictures shown next may refer to earlier ones.
            return size > 0 and body[at] >> 4 == 1
        at += size
    return False


def _read_leb128(body: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the number at `at` and the offset behind it; the number is -1 when it does not end in time."""
    value = 0
    for place in range(min(_MAX_SIZE_OCTETS, end - at)):
        octet = body[at + place]
        value |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return (value, at + place + 1)
    return (-1, at)
