"""Recordings as FLV: the messages as they came, with times that begin at 0.

Metadata of a publisher say how long the film is that it sends, if anything. In a file ``duration`` and ``filesize`` are
those of the file, where metadata come again too: 0 while it is written, since players then look for the last tag. So is
what the header says of sound and picture; while it is written, that is what has come by the first piece, or is named in
the metadata.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Container, Sequence
from typing import Final

from flowctl.core.flow.state import MessageClass
from flowctl.flv import BACK_POINTER_BYTES, TAG_AUDIO, TAG_HEADER_BYTES, TAG_SCRIPT, TAG_VIDEO, header, tag
from flowctl.live.remux.course import Unit
from flowctl.wire.rtmp.media.media import inspect, named_tracks
from flowctl.wire.rtmp.wire import CLOCK_MASK

SUFFIX: Final = ".flv"
_FLAGS_AT: Final = 4
_FRONT_BYTES: Final = 13  # file header and the back pointer of no tag
_TYPES: Final = frozenset({TAG_AUDIO, TAG_VIDEO, TAG_SCRIPT})
_TYPE_OF: Final = {"audio": TAG_AUDIO, "video": TAG_VIDEO}
_READ_BYTES: Final = 1 << 20
_DURATION: Final = b"\0\x08duration\0"  # a name in AMF0, and the marker of the number behind it
_FILE_SIZE: Final = b"\0\x08filesize\0"
_NUMBER: Final = struct.Struct(">d")
_MOST_NUMBERS: Final = 10_000
"""Numbers of metadata that are set when a file is finished; those of an encoder that sends more, for hours, stay 0."""


def flv_of(headers: Sequence[tuple[int, bytes]], units: Sequence[Unit], base_ms: int) -> bytes:
    return (
        _front(types_of(headers, units))
        + b"".join(tag(type_id, 0, payload) for type_id, payload in headers)
        + tags_of(units, base_ms)
    )


def types_of(headers: Sequence[tuple[int, bytes]], units: Sequence[Unit]) -> set[int]:
    return {type_id for type_id, _ in headers} | {unit.type_id for unit in units}


def _front(types: Container[int]) -> bytes:
    return header(TAG_AUDIO in types, TAG_VIDEO in types)


def _flags(types: Container[int]) -> bytes:
    return _front(types)[_FLAGS_AT : _FLAGS_AT + 1]


def tags_of(units: Sequence[Unit], base_ms: int) -> bytes:
    return b"".join(tag(unit.type_id, max(unit.at_ms - base_ms, 0) & CLOCK_MASK, unit.payload) for unit in units)


class FlvForm:
    suffix: Final = SUFFIX
    by_groups: Final = False

    def __init__(self) -> None:
        self._base_ms: int | None = None
        self._size_bytes = 0
        self._types: set[int] = set()  # of tags in the file
        # Where metadata say how long the file is: players go by the first that say it, or by the last that came.
        self._numbers: dict[int, bytes] = {}

    def add(self, headers: Sequence[tuple[int, bytes]], units: Sequence[Unit]) -> bytes | None:
        begins = self._base_ms is None
        base_ms = units[0].at_ms if self._base_ms is None else self._base_ms
        self._base_ms = base_ms
        headers = headers if begins else ()
        self._types |= types_of(headers, units)
        data = bytearray(flv_of(headers, units, base_ms) if begins else tags_of(units, base_ms))
        if begins:
            scripts = [payload for type_id, payload in headers if type_id == TAG_SCRIPT]
            named = {_TYPE_OF[kind] for payload in scripts for kind in named_tracks(payload)}
            data[_FLAGS_AT : _FLAGS_AT + 1] = _flags(self._types | named)
        at = _FRONT_BYTES if begins else 0
        for type_id, payload in (*headers, *((unit.type_id, unit.payload) for unit in units)):
            for place, name in lengths_in(payload) if type_id == TAG_SCRIPT else ():
                _NUMBER.pack_into(data, at + TAG_HEADER_BYTES + place, 0.0)
                if len(self._numbers) < _MOST_NUMBERS:
                    self._numbers[self._size_bytes + at + TAG_HEADER_BYTES + place] = name
            at += TAG_HEADER_BYTES + len(payload) + BACK_POINTER_BYTES
        self._size_bytes += len(data)
        return bytes(data)

    def lengths(self, media_s: float, size_bytes: int) -> dict[int, bytes]:
        values = {_DURATION: media_s, _FILE_SIZE: size_bytes}
        # What the disk did not take is not in the file.
        told = {where: _NUMBER.pack(values[name]) for where, name in self._numbers.items() if where < size_bytes}
        return {_FLAGS_AT: _flags(self._types), **told}


def lengths_in(payload: bytes) -> list[tuple[int, bytes]]:
    """Return where metadata have the numbers that say how long a file is, and which; none of other script data."""
    if inspect(TAG_SCRIPT, payload).message_class is not MessageClass.HEADER:
        return []
    found = [(payload.find(name) + len(name), name) for name in (_DURATION, _FILE_SIZE)]
    return [(at, name) for at, name in found if len(name) <= at <= len(payload) - _NUMBER.size]


def told_lengths(type_id: int, payload: bytes, media_s: float, size_bytes: int) -> bytes:
    """Return a message whose metadata say how long a file is, as those of a file that is so long."""
    told = bytearray(payload)
    for at, name in lengths_in(payload) if type_id == TAG_SCRIPT else ():
        _NUMBER.pack_into(told, at, {_DURATION: media_s, _FILE_SIZE: size_bytes}[name])
    return bytes(told)


def whole_flv_bytes(number: int) -> int:
    """Return how many octets of a file are whole tags with their back pointers; 0 if none of them is media.

    What the file's header says of sound and picture is made to be what the tags say.
    """
    size = os.fstat(number).st_size
    if os.pread(number, 3, 0) not in (b"FLV", b""):
        raise ValueError("no FLV")
    at, window, begin = _FRONT_BYTES, b"", 0
    types: set[int] = set()
    step = TAG_HEADER_BYTES + BACK_POINTER_BYTES

    def read(where: int, count: int) -> bytes:
        nonlocal window, begin
        if not begin <= where <= begin + len(window) - count:
            window, begin = os.pread(number, _READ_BYTES, where), where
        return window[where - begin : where - begin + count]

    while at + step <= size:
        head = read(at, 4)
        body = int.from_bytes(head[1:], "big")
        end = at + step + body
        if head[0] not in _TYPES or end > size:
            break
        if struct.unpack(">I", read(end - BACK_POINTER_BYTES, BACK_POINTER_BYTES))[0] != TAG_HEADER_BYTES + body:
            break
        types.add(head[0])
        at = end
    if not types - {TAG_SCRIPT}:
        return 0
    os.pwrite(number, _flags(types), _FLAGS_AT)
    return at


MP4: Final = ".mp4"
_BOX_HEADER_BYTES: Final = 8
_BOXES: Final = frozenset({b"ftyp", b"moov", b"free", b"moof", b"mdat"})


def whole_bytes(number: int, suffix: str) -> int:
    """Return how many octets of a file are whole; 0 if it holds no media."""
    if suffix == SUFFIX:
        return whole_flv_bytes(number)
    if suffix == MP4:
        return whole_mp4_bytes(number)
    raise ValueError(f"{suffix!r} is no recording")


def whole_mp4_bytes(number: int) -> int:
    """Return how many octets of a file are its beginning and whole fragments; 0 if there is no fragment."""
    size = os.fstat(number).st_size
    if os.pread(number, 4, 4) not in {b"ftyp", b""}:
        raise ValueError("no MP4")
    at = whole = 0
    while at + _BOX_HEADER_BYTES <= size:
        head = os.pread(number, _BOX_HEADER_BYTES, at)
        end = at + int.from_bytes(head[:4], "big")
        kind = head[4:]
        if kind not in _BOXES or end < at + _BOX_HEADER_BYTES or end > size:
            break
        at = end
        if kind == b"mdat":
            whole = at
    return whole
