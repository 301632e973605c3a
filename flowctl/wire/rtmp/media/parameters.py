"""Parameter sets of H.264 and HEVC, put in front of the key frame that needs them.

How it works: FLV and RTMP carry parameter sets in a sequence header, once. Some players take no other header later:
VLC 3 decodes what follows with the first one, and FFmpeg 5 that copies a stream to MP4 keeps the first one only. Every
decoder goes by parameter sets that stand in front of a picture in the same message, so `with_parameter_sets` copies
those of the sequence header there.

Octets are the peer's: what does not add up is left as it is.

Source: ISO/IEC 14496-15 5.3.3.1 (avcC), 8.3.3.1 (hvcC); Rec. ITU-T H.264 7.4.1.2.3 and H.265 7.4.2.4.4 (order of NAL
units).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from flowctl.wire.rtmp.media.frames import Body
from flowctl.wire.rtmp.media.nal import MAX_NAL_HEADERS
from flowctl.wire.rtmp.media.tracks import unwrap_track
from flowctl.wire.rtmp.wire import TYPE_VIDEO

_SETS: Final = {b"avc1": frozenset({7, 8}), b"hvc1": frozenset({32, 33, 34})}
"""Types of the NAL units that are parameter sets."""
_DELIMITERS: Final = {b"avc1": 9, b"hvc1": 35}
"""Type of the NAL unit that stands in front of everything else of a picture, where there is one."""
_USUAL_BYTES: Final = 512
_MOST_BYTES: Final = 4096
"""Parameter sets have 20 to 300 octets. What has far more is none, and would be sent with each key frame; more than the
usual is put in front of none that has less itself, or key frames of 20 octets would be sent on as 4 KB each."""
_read_u16: Final = struct.Struct(">H").unpack_from
_read_u32: Final = struct.Struct(">I").unpack_from


def with_parameter_sets(key_frame: bytes, sequence_header: bytes) -> bytes:
    """Return a key frame's message with the parameter sets of a sequence header in front of its picture.

    The same object comes back where there is nothing to add: the picture has parameter sets, or the messages are not of
    one track of H.264 or HEVC, or their lengths do not add up. Whether it is a key frame is the caller's to know.
    """
    frame, header = unwrap_track(TYPE_VIDEO, key_frame), unwrap_track(TYPE_VIDEO, sequence_header)
    if frame is None or header is None or frame[2] != header[2] or header[1] != 0 or frame[1] not in (1, 3):
        return key_frame
    codec, body = frame[2], frame[3]
    if codec not in _SETS:
        return key_frame
    start = len(key_frame) - len(body) + (3 if frame[1] == 1 else 0)  # behind the composition time
    at = _place(codec, key_frame, start)
    try:
        sets = b"".join(_avc_sets(header[3]) if codec == b"avc1" else _hevc_sets(header[3])) if at else b""
    except (IndexError, struct.error):
        return key_frame
    if not 0 < len(sets) <= min(_MOST_BYTES, max(_USUAL_BYTES, len(key_frame))):
        return key_frame
    return b"".join((memoryview(key_frame)[:at], sets, memoryview(key_frame)[at:]))


def _type_of(codec: bytes, first: int) -> int:
    return first & 31 if codec == b"avc1" else first >> 1 & 63


def _place(codec: bytes, message: bytes, position: int) -> int:
    """Return where parameter sets go into a picture's message; 0 where it has some, or is none."""
    found, delimiter = position, _DELIMITERS[codec]
    for _ in range(MAX_NAL_HEADERS):
        if position + 4 >= len(message):
            break
        after = position + 4 + _read_u32(message, position)[0]
        kind = _type_of(codec, message[position + 4])
        if after == position + 4 or after > len(message) or kind in _SETS[codec]:
            break
        if kind == delimiter:
            found = after
        elif 1 <= kind <= 5 if codec == b"avc1" else kind < 32:  # a slice
            return found
        position = after
    return 0


def _avc_sets(config: Body) -> Iterator[bytes]:
    """Yield the parameter sets of an avcC, each behind its length in four octets."""
    if config[4] & 3 != 3:
        return
    position = 5
    for mask in (31, 255):
        count, position = config[position] & mask, position + 1
        for _ in range(count):
            size = _read_u16(config, position)[0]
            yield _with_length(config, position + 2, size)
            position += 2 + size


def _hevc_sets(config: Body) -> Iterator[bytes]:
    """Yield the parameter sets of an hvcC, each behind its length in four octets."""
    if config[21] & 3 != 3:
        return
    position = 23
    for _ in range(config[22]):
        wanted, count = config[position] & 63 in _SETS[b"hvc1"], _read_u16(config, position + 1)[0]
        position += 3
        for _ in range(count):
            size = _read_u16(config, position)[0]
            if wanted:
                yield _with_length(config, position + 2, size)
            position += 2 + size


def _with_length(config: Body, start: int, size: int) -> bytes:
    if not 0 < size <= len(config) - start:
        raise IndexError("a parameter set is longer than its message")
    return size.to_bytes(4, "big") + bytes(config[start : start + size])
