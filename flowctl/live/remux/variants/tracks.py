"""What the beginning of a fragmented MP4 file says of its tracks, for players that choose by it (pure).

Sources: ISO/IEC 14496-12 (boxes), 14496-15 annex E (H.264, HEVC) and RFC 6381 for the names of codecs; the bindings of
AV1 and VP9 to ISO base media for theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

_BOX_BYTES: Final = 8
_WAY: Final = ("moov", "trak", "mdia", "minf", "stbl", "stsd")
"""Boxes from the file down to the sample entries, which name the codec of a track."""
_ENTRIES_AT: Final = 8  # in `stsd`: version and count stand before
_VIDEO_BYTES: Final = 78  # of an entry of pictures before its boxes (12.1.3)
_SIZE_AT: Final = 24
_AUDIO_BYTES: Final = 28  # of one of sound (12.2.3)
_MOST: Final = 16  # boxes or descriptors of a kind: what we write has one
_OTHERS: Final = {"Opus": "opus", "fLaC": "flac"}
_AAC: Final = 0x40  # in the descriptor of a decoder (ISO/IEC 14496-1): the audio of MPEG-4


class Tracks(NamedTuple):
    codecs: tuple[str, ...]  # as `EXT-X-STREAM-INF` has them
    size: tuple[int, int] | None  # width and height of the pictures. None: there are none.


def read_tracks(init: bytes) -> Tracks:
    """Return what an initialisation of ours says; ValueError: it is none."""
    codecs, size = [], None
    try:
        for kind, entry in _entries(init):
            if entry[_SIZE_AT + 4 : _SIZE_AT + 8] == b"\0H\0\0":  # 72 dpi, which all pictures have there
                size = int.from_bytes(entry[_SIZE_AT : _SIZE_AT + 2]), int.from_bytes(entry[_SIZE_AT + 2 :][:2])
                codecs.append(_codec(kind, dict(_boxes(entry[_VIDEO_BYTES:]))))
            else:
                codecs.append(_codec(kind, dict(_boxes(entry[_AUDIO_BYTES:]))))
    except IndexError as error:
        raise ValueError("an initialisation that is cut short") from error
    return Tracks(tuple(codecs), size)


def _boxes(data: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at + _BOX_BYTES <= len(data):
        size = max(int.from_bytes(data[at : at + 4]), _BOX_BYTES)
        yield data[at + 4 : at + 8].decode("latin-1"), data[at + _BOX_BYTES : at + size]
        at += size


def _entries(init: bytes) -> Iterator[tuple[str, bytes]]:
    found = [init]
    for name in _WAY:
        found = [body for data in found for kind, body in _boxes(data) if kind == name]
    for body in found[:_MOST]:
        yield from _boxes(body[_ENTRIES_AT:])


def _codec(kind: str, boxes: dict[str, bytes]) -> str:
    if "avcC" in boxes:
        return f"{kind}.{boxes['avcC'][1:4].hex()}"
    if "hvcC" in boxes:
        return f"{kind}.{_of_hevc(boxes['hvcC'])}"
    if "av1C" in boxes:
        _, first, second, *_ = boxes["av1C"]
        bits = 8 if not second & 0x40 else 12 if second & 0x20 else 10
        return f"{kind}.{first >> 5}.{first & 31:02}{'H' if second & 0x80 else 'M'}.{bits:02}"
    if "vpcC" in boxes:
        _, _, _, _, profile, level, depth, *_ = boxes["vpcC"]
        return f"{kind}.{profile:02}.{level:02}.{depth >> 4:02}"
    if "esds" in boxes:
        return f"{kind}.{_of_descriptors(boxes['esds'])}"
    return _OTHERS.get(kind, kind)


def _of_hevc(config: bytes) -> str:
    space, tier, profile = config[1] >> 6, config[1] >> 5 & 1, config[1] & 31
    compatible = int(f"{int.from_bytes(config[2:6]):032b}"[::-1], 2)
    constraints = config[6:12].rstrip(b"\0")
    words = [f"{' ABC'[space].strip()}{profile}", f"{compatible:X}", f"{'LH'[tier]}{config[12]}"]
    return ".".join([*words, *(f"{octet:X}" for octet in constraints)])


def _of_descriptors(data: bytes) -> str:
    """Return object type and, of MPEG-4 audio, its kind (ISO/IEC 14496-1 7.2.6, 14496-3 1.6.2.1)."""
    data, object_type = data[4:], 0
    for _ in range(_MOST):
        tag, at = data[0], 1
        while data[at] & 0x80:  # a length in groups of seven bits
            at += 1
        data = data[at + 1 :]
        if tag == 3:  # of a stream: its number, and flags
            data = data[3:]
        elif tag == 4:  # of a decoder
            object_type, data = data[0], data[13:]
            if object_type != _AAC:
                break
        elif tag == 5:  # what the decoder needs
            kind = data[0] >> 3
            return f"{object_type:x}.{kind if kind < 31 else 32 + ((data[0] & 7) << 3 | data[1] >> 5)}"
    return f"{object_type:X}"
