"""How long a recording in fragmented MP4 is, by its beginning and its last whole fragment (ISO/IEC 14496-12)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Final

_HEADER_BYTES: Final = 8
_MOST_BEGIN_BYTES: Final = 1 << 20
_STEP_BYTES: Final = 1 << 20
_MOST_BACK_BYTES: Final = 32 << 20
"""Octets from the end in which the last fragment is looked for: a group of pictures has 16 MiB at most, and one more
may be half written."""
_MOST_TRIES: Final = 64
_DEFAULT_DURATION: Final = 0x8
_OWN_DURATION: Final = 0x100
_TFHD_FIELDS: Final = ((0x1, 8), (0x2, 4))
"""What stands before the usual duration of a sample in ``tfhd``, by flag, and its size."""
_TRUN_FIELDS: Final = ((0x1, 4), (0x4, 4))
_SAMPLE_FIELDS: Final = (0x100, 0x200, 0x400, 0x800)


def mp4_length_s(number: int) -> float | None:
    """Return the end of the latest frame of a file; None: it has no whole fragment.

    Raises:
        ValueError, struct.error: its boxes are not valid.
    """
    scales = _time_scales(os.pread(number, _MOST_BEGIN_BYTES, 0))
    fragment = _last_fragment(number, os.fstat(number).st_size)
    ends = [end / scales[track] for track, end in _ends_of(fragment) if scales.get(track)]
    return max(ends, default=None)


def _boxes(data: bytes, *wanted: bytes) -> Iterator[bytes]:
    """Yield what is in the boxes at the end of a path of kinds."""
    at = 0
    while at + _HEADER_BYTES <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size < _HEADER_BYTES:
            raise ValueError(f"a box of {size} bytes")
        if data[at + 4 : at + _HEADER_BYTES] == wanted[0]:
            inside = data[at + _HEADER_BYTES : at + size]
            if wanted[1:]:
                yield from _boxes(inside, *wanted[1:])
            else:
                yield inside
        at += size


def _time_scales(data: bytes) -> dict[int, int]:
    """Return the ticks per second of each track, by its number."""
    found = {}
    for track in _boxes(data, b"moov", b"trak"):
        for head, media in zip(_boxes(track, b"tkhd"), _boxes(track, b"mdia", b"mdhd"), strict=True):
            number = struct.unpack_from(">I", head, 20 if head[0] else 12)[0]
            found[number] = struct.unpack_from(">I", media, 20 if media[0] else 12)[0]
    return found


def _last_fragment(number: int, size: int) -> bytes:
    """Return the header of the last fragment whose frames are all there; empty: there is none."""
    tries, end = 0, size
    while end > 0 and size - end < _MOST_BACK_BYTES:
        begin = max(end - _STEP_BYTES, 0)
        piece = os.pread(number, min(end + 3, size) - begin, begin)
        at = len(piece)
        while (at := piece.rfind(b"moof", 0, at)) >= 4 and tries < _MOST_TRIES:
            tries += 1
            where = begin + at - 4
            length = int.from_bytes(piece[at - 4 : at], "big")
            behind = os.pread(number, _HEADER_BYTES, where + length)
            whole = where + length + int.from_bytes(behind[:4], "big") <= size
            if _HEADER_BYTES < length <= _MOST_BEGIN_BYTES and behind[4:] == b"mdat" and whole:
                return os.pread(number, length - _HEADER_BYTES, where + _HEADER_BYTES)
        end = begin + _HEADER_BYTES if begin else 0
    return b""


def _ends_of(fragment: bytes) -> Iterator[tuple[int, int]]:
    """Yield each track and the time at which its part of a fragment ends, in ticks."""
    for part in _boxes(fragment, b"traf"):
        head, begin = next(_boxes(part, b"tfhd")), next(_boxes(part, b"tfdt"))
        flags, track = struct.unpack_from(">II", head)
        flags &= 0xFFFFFF
        at = 8 + sum(size for flag, size in _TFHD_FIELDS if flags & flag)
        usual = struct.unpack_from(">I", head, at)[0] if flags & _DEFAULT_DURATION else 0
        end: int = struct.unpack_from(">Q" if begin[0] else ">I", begin, 4)[0]
        for run in _boxes(part, b"trun"):
            flags, count = struct.unpack_from(">II", run)
            flags &= 0xFFFFFF
            if not flags & _OWN_DURATION:
                end += usual * count
                continue
            step = 4 * sum(bool(flags & flag) for flag in _SAMPLE_FIELDS)
            first = 8 + sum(size for flag, size in _TRUN_FIELDS if flags & flag)
            end += sum(struct.unpack_from(">I", run, first + step * item)[0] for item in range(count))
        yield track, end
