"""Messages of made-up streams, published and cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flowctl.live.cluster.segments.cutter import CutSegment, Cutter
from flowctl.live.cluster.segments.segment import Frame, SegmentId
from flowctl.wire.rtmp.media.media import inspect

VIDEO_HEADER = Frame(9, 0, b"\x17\x00\x00\x00\x00\x01\x64\x00\x1f\xff\xe1\x00\x01\x67\x01\x00\x01\x68")
AUDIO_HEADER = Frame(8, 0, b"\xaf\x00\x12\x10")
METADATA = Frame(18, 0, b"\x02\x00\x0aonMetaData\x08\x00\x00\x00\x00\x00\x00\x09")
HEADERS = (METADATA, VIDEO_HEADER, AUDIO_HEADER)


def key(timestamp: int, body: bytes = b"") -> Frame:
    return Frame(9, timestamp & 0xFFFFFFFF, b"\x17\x01\x00\x00\x00\x00\x00\x00\x02\x65" + (body or b"%d" % timestamp))


def inter(timestamp: int, body: bytes = b"") -> Frame:
    return Frame(9, timestamp & 0xFFFFFFFF, b"\x27\x01\x00\x00\x00\x00\x00\x00\x02\x41" + (body or b"%d" % timestamp))


def audio(timestamp: int) -> Frame:
    return Frame(8, timestamp & 0xFFFFFFFF, b"\xaf\x01%d" % timestamp)


def movie(seconds: int, *, gop_ms: int = 1000, start: int = 0, step_ms: int = 250) -> list[Frame]:
    found = []
    for at in range(0, seconds * 1000, step_ms):
        found.append(key(start + at) if at % gop_ms == 0 else inter(start + at))
        found.append(audio(start + at + 10))
    return found


class Written(NamedTuple):
    """A segment as an object."""

    id: SegmentId
    data: bytes


def cut(frames: Iterable[Frame], *, timeline: int = 3, stream: str = "live/cam", close: bool = True) -> list[Written]:
    cutter = Cutter(stream, timeline)
    found = [done for frame in frames for done in feed(cutter, frame)]
    return [Written(*item.write()) for item in found + (cutter.close() if close else [])]


def feed(cutter: Cutter, frame: Frame) -> list[CutSegment]:
    return cutter.add(*frame, inspect(frame.type_id, frame.payload).message_class)
