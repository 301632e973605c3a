"""What is whole of a recording that nobody finished, by its format."""

from __future__ import annotations

import os
from typing import Final

from flowctl.live.remux.flvform import SUFFIX as FLV
from flowctl.live.remux.flvform import whole_flv_bytes

MP4: Final = ".mp4"
_BOX_HEADER_BYTES: Final = 8
_BOXES: Final = frozenset({b"ftyp", b"moov", b"free", b"moof", b"mdat"})


def whole_bytes(number: int, suffix: str) -> int:
    """Return how many octets of a file are whole; 0 if it holds no media."""
    if suffix == FLV:
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
