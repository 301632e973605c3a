"""Octets that no well-behaved writer makes: headers that lie, values that are cut off, structures without a floor."""

from __future__ import annotations

from typing import Final

from flowctl.wire.rtmp.wire import TYPE_SET_CHUNK_SIZE, basic_header

CONNECT: Final = b"\x02\x00\x07connect\x00\x3f\xf0\x00\x00\x00\x00\x00\x00"
"""AMF0: the name ``connect`` and the transaction id 1, with which every connect begins."""
KEY_FRAME: Final = b"\x17\x01\x00\x00\x00"
"""Video header of an H.264 key frame (FLV 10.1 E.4.3)."""
INTER_FRAME: Final = b"\x27\x01\x00\x00\x00"
"""Video header of an H.264 frame that refers to others."""
_IDR: Final = 0x65
_SLICE: Final = 0x41
VIDEO_CONFIG: Final = bytes.fromhex(
    "1700000000 014d401fffe1000f674d401feca0280bfe5c0440000003 010004 68ef3c80".replace(" ", "")
)
"""A sequence header of H.264; nothing is ever decoded with it."""


def header(
    type_id: int, length: int, *, csid: int = 3, msid: int = 0, timestamp: int = 0, extended: int | None = None
) -> bytes:
    """Return the type 0 header of a message that announces `length` octets, whatever follows."""
    field = 0xFFFFFF if extended is not None else timestamp
    fields = field.to_bytes(3, "big") + length.to_bytes(3, "big") + bytes((type_id,)) + msid.to_bytes(4, "little")
    return basic_header(0, csid) + fields + (b"" if extended is None else extended.to_bytes(4, "big"))


def cut(type_id: int, body: bytes, *, csid: int = 3, msid: int = 0, chunk_size: int = 128) -> bytes:
    parts = [body[at : at + chunk_size] for at in range(0, len(body), chunk_size)] or [b""]
    return header(type_id, len(body), csid=csid, msid=msid) + basic_header(3, csid).join(parts)


def set_chunk_size(body: bytes) -> bytes:
    return cut(TYPE_SET_CHUNK_SIZE, body, csid=2)


def u29(value: int) -> bytes:
    """Return a number as AMF3's U29, always in four octets (AMF3 1.3.1), which readers take as well."""
    return bytes((0x80 | value >> 22, 0x80 | value >> 15 & 0x7F, 0x80 | value >> 8 & 0x7F, value & 0xFF))


def picture(size: int, mark: bytes = b"", *, key: bool = False) -> bytes:
    """Return the body of an H.264 frame: video header, length of the one NAL unit, its type, `mark`, filling."""
    unit = (bytes((_IDR if key else _SLICE,)) + mark).ljust(size - len(KEY_FRAME) - 4, b"\x55")
    return (KEY_FRAME if key else INTER_FRAME) + len(unit).to_bytes(4, "big") + unit


MARK_AT: Final = 10
"""Offset of the mark in a picture: behind video header, length and type."""
