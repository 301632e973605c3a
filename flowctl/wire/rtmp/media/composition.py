"""Composition times: how long after it is decoded a picture is shown, and messages with another such time (pure).

Source: Adobe FLV 10.1, E.4.3.1 (AVCVIDEOPACKET); Enhanced RTMP v2, "Enhanced Video" (CodedFrames, CodedFramesX).
"""

from __future__ import annotations

from typing import Final

from flowctl.wire.rtmp.media.frames import MediaInfo

_ENHANCED: Final = 0x80
_LATEST_MS: Final = 0x7FFFFF  # that FLV can say
_COMPOSED: Final = frozenset({"avc1", "hvc1", "vvc1"})  # in Enhanced RTMP: those whose pictures have such a time
_CODED: Final = 1
_CODED_X: Final = 3
"""Packet types of Enhanced RTMP: a picture with its composition time, and one without, whose composition time is 0."""


def is_composed(payload: bytes, info: MediaInfo) -> bool:
    """Return whether a message is a picture that says when it is shown, or could."""
    if info.kind != "video" or info.packet != "coded" or info.multitrack:
        return False
    return info.codec in _COMPOSED if payload[0] & _ENHANCED else info.composition_ms is not None


def with_composition(payload: bytes, info: MediaInfo, composition_ms: int) -> bytes | None:
    """Return a picture's message with another composition time. None: it has none, or stands behind a prefix."""
    if not is_composed(payload, info):
        return None
    time = min(max(composition_ms, 0), _LATEST_MS).to_bytes(3, "big")
    if not payload[0] & _ENHANCED:
        return payload[:2] + time + payload[5:]
    if payload[0] & 15 == _CODED:
        return payload[:5] + time + payload[8:]
    if payload[0] & 15 == _CODED_X:
        return bytes((payload[0] & 0xF0 | _CODED,)) + payload[1:5] + time + payload[5:]
    return None
