"""Recordings in fragmented MP4, read by time (ISO/IEC 14496-12).

How long one is, is told by its beginning and its last whole fragment. For a part by time the headers of its boxes are
gone through, two of a fragment; the times of some ten of them are read then. A fragment is a group of pictures, so each
is a place to begin with.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from flowctl.live.playback.flvfile import PART_BYTES, Stretch

_HEADER_BYTES: Final = 8
_MOST_BEGIN_BYTES: Final = 1 << 20
_STEP_BYTES: Final = 1 << 20
_MOST_BACK_BYTES: Final = 32 << 20
"""Octets from the end in which the last fragment is looked for: a group of pictures has 16 MiB at most, and one more
may be half written."""
_MOST_TRIES: Final = 64
_MOST_FRAGMENTS: Final = 200_000
"""Fragments of a file that is cut by time: four days of groups of two seconds."""
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


class Fragment(NamedTuple):
    """A fragment of a file."""

    at: int
    time_ms: int  # of its first frame


class Mp4File:
    """A file by its descriptor, which stays the caller's.

    Raises:
        ValueError, struct.error: it has no whole fragment, or its boxes are not valid.
    """

    step_ms: Final = 0  # the length of the last frame is known

    def __init__(self, number: int) -> None:
        self._number: Final = number
        size, at, begin = os.fstat(number).st_size, 0, -1
        self._places: Final[list[int]] = []  # of the headers of whole fragments
        while len(head := os.pread(number, _HEADER_BYTES, at)) == _HEADER_BYTES and len(self._places) < _MOST_FRAGMENTS:
            end, kind = at + int.from_bytes(head[:4], "big"), head[4:]
            if end < at + _HEADER_BYTES or end > size:
                break
            if kind == b"moof":
                begin = at
            elif kind == b"mdat" and begin >= 0:
                self._places.append(begin)
                self.end, begin = end, -1
            at = end
        if not self._places or self._places[0] > _MOST_BEGIN_BYTES:
            raise ValueError("it has no fragment")
        self.first: Final = self._places[0]
        self._init: Final = os.pread(number, self.first, 0)
        self._scales: Final = _time_scales(self._init)

    @property
    def kind(self) -> object:
        return self._init

    @property
    def length_ms(self) -> int:
        return self._end_ms(self._places[-1])

    def head(self, length_s: float, rest_bytes: int) -> bytes:
        del length_s, rest_bytes  # players add up fragments
        return self._init

    def cut_before(self, time_ms: int) -> Fragment | None:
        place = max(bisect_right(self._places, time_ms, key=self._begin_ms) - 1, 0)
        return Fragment(self._places[place], self._begin_ms(self._places[place]))

    def place_of(self, time_ms: int) -> int:
        place = bisect_left(self._places, time_ms, key=self._begin_ms)
        return self._places[place] if place < len(self._places) else self.end

    def time_before(self, at: int) -> int:
        return self._end_ms(self._places[max(bisect_left(self._places, at) - 1, 0)])

    def _begin_ms(self, at: int) -> int:
        times = _times_in(_header_at(self._number, at))
        return min(begin * 1000 // self._scales[track] for _, _, track, begin in times)

    def _end_ms(self, at: int) -> int:
        header = _header_at(self._number, at)[_HEADER_BYTES:]
        return max(end * 1000 // self._scales[track] for track, end in _ends_of(header))


def moved_fragments(number: int, place: Stretch, span_s: float, span_bytes: int) -> Iterator[bytes]:
    """Read a stretch of a file, in parts, with the times of a span."""
    del span_s, span_bytes
    scales = _time_scales(os.pread(number, _MOST_BEGIN_BYTES, 0))
    at = place.begin
    while at < place.end and len(head := os.pread(number, _HEADER_BYTES, at)) == _HEADER_BYTES:
        end = min(at + int.from_bytes(head[:4], "big"), place.end)
        if head[4:] == b"moof":
            data = bytearray(_header_at(number, at))
            for where, form, track, begin in _times_in(data):
                moved = begin + (place.at_ms - place.from_ms) * scales[track] // 1000
                struct.pack_into(form, data, where, max(moved, 0))
            yield bytes(data)
        else:
            for where in range(at, end, PART_BYTES):
                yield os.pread(number, min(PART_BYTES, end - where), where)
        if end <= at:
            return
        at = end


def _header_at(number: int, at: int) -> bytes:
    """Return the header of the fragment that begins at a place, which is a box."""
    size = int.from_bytes(os.pread(number, 4, at), "big")
    if not _HEADER_BYTES < size <= _MOST_BEGIN_BYTES:
        raise ValueError(f"the header of a fragment has {size} bytes")
    return os.pread(number, size, at)


def _times_in(header: bytes | bytearray) -> Iterator[tuple[int, str, int, int]]:
    """Yield of each track in the header of a fragment where its time is and in which form, its number, and the time."""
    at = _HEADER_BYTES
    while at + _HEADER_BYTES <= len(header):
        end = min(at + max(int.from_bytes(header[at : at + 4], "big"), _HEADER_BYTES), len(header))
        if header[at + 4 : at + 8] == b"traf":
            track, inside = 0, at + _HEADER_BYTES
            while inside + _HEADER_BYTES <= end:
                kind = header[inside + 4 : inside + 8]
                if kind == b"tfhd":
                    track = struct.unpack_from(">I", header, inside + 12)[0]
                elif kind == b"tfdt":
                    form = ">Q" if header[inside + 8] else ">I"
                    yield inside + 12, form, track, struct.unpack_from(form, header, inside + 12)[0]
                inside += max(int.from_bytes(header[inside : inside + 4], "big"), _HEADER_BYTES)
        at = end


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


def _box(data: bytes, kind: bytes) -> bytes:
    for inside in _boxes(data, kind):
        return inside
    raise ValueError(f"there is no {kind!r}")


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
        head, begin = _box(part, b"tfhd"), _box(part, b"tfdt")
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
