"""Cuts a stream into segments: in goes each message, out comes each segment that is complete (pure).

Where it is cut depends on the messages alone, so that everybody who sees them cuts at the same places, whenever he
began to look. A stream with video is cut before each key frame. Between key frames that are far apart it is cut before
a part becomes too large or too long: such a part is no beginning for a decoder, but an origin that dies in the middle
costs less. A stream without video is cut every 2 s of its own clock.

A publication has one timeline. A clock that jumps back begins another one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from flowctl.core.flow.state import VIDEO_CLASSES, MessageClass
from flowctl.live.cluster.segments.segment import (
    BODY_BYTES,
    FRAME_BYTES,
    HEADERS,
    MESSAGES,
    PART_BYTES,
    Frame,
    Header,
    Position,
    SegmentId,
    Sequel,
    following,
    object_of,
    segment_of,
)
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import TYPE_VIDEO, signed_difference

LEAST_MS: Final = 500
"""Period of the publisher's clock in which only the first key frame begins a segment: each object costs work."""
GRID_MS: Final = 2000
"""Length of segments without video: the usual time between key frames of encoders."""
PART_MS: Final = 5000
"""Longest part between key frames. A part is sent when it is complete, and edges give a source up that has brought
nothing for twice as long."""
BACK_MS: Final = 5000
"""Leap back of a clock that makes it another one. Audio and video of one publisher are less apart."""
TIMELINE_S: Final = 10
"""Unit of timelines: origins whose clocks and links differ by less usually agree on one."""
TIMELINE_DISTANCE: Final = 3
"""Least distance of the timelines of two publications: those of one are at most 1 apart, and the same stream may be
published again, octet for octet."""
_HEADERS_BYTES: Final = 262_144
"""Octets of headers that each segment repeats: a hundred times what encoders send; more stay messages only."""
_ROOM_BYTES: Final = 1024
"""Octets of a body kept free for counts and the sizes of headers."""


def timeline_at(wall_s: float, timestamp: int, before: int | None) -> int:
    """Return the timeline of a publication: when its clock stood at 0, in units of `TIMELINE_S`.

    Origins of one encoder find the same one, or one next to it.
    """
    timeline = max(int(wall_s - timestamp / 1000) // TIMELINE_S, 0)
    return timeline if before is None else max(timeline, before + TIMELINE_DISTANCE)


class CutSegment(NamedTuple):
    """A complete segment that is not encoded yet: encoding takes a while, and may be done elsewhere."""

    stream: str
    position: Position
    headers: tuple[Header, ...]  #: what a decoder has to know first
    frames: list[Frame]
    then: Sequel
    next_ms: int  #: see `SegmentId`

    @property
    def next(self) -> Position | None:
        return following(self.position, self.then, self.next_ms)

    def write(self) -> tuple[SegmentId, bytes]:
        name, body = segment_of(self.stream, self.position, self.headers, self.frames, self.then, self.next_ms)
        return name, object_of(name, body)


class Cutter:
    """Cuts one publication. Not locked: its owner has one thread at a time."""

    __slots__ = (
        *("_bytes", "_headers", "_key", "_last_ms", "_opening", "_part_from_ms", "_stream", "_video", "_video_frame"),
        *("frames", "position", "refused", "timeline"),
    )

    def __init__(self, stream: str, timeline: int) -> None:
        self._stream = stream
        self._headers: dict[object, Header] = {}  # as known now, by sticky key
        self._opening: tuple[Header, ...] = ()  # as known when the open segment began
        self._last_ms: int | None = None  # the publisher's clock, without its wraps
        self._part_from_ms = 0
        self._bytes = 0
        self._video = False  # the publication has video
        self._video_frame = False  # the open segment has a picture
        self.timeline = timeline  #: of the publication; it grows by `TIMELINE_DISTANCE` where its clock jumps back
        self.position: Position | None = None  #: where the open segment begins. None: none is open.
        self.frames: list[Frame] = []
        self.refused = 0  #: messages that no segment can hold, since they are too large

    @property
    def headers(self) -> tuple[Header, ...]:
        """The headers that a decoder needs at the beginning of the open segment."""
        return self._opening

    @property
    def known_headers(self) -> tuple[Header, ...]:
        """The headers that a decoder needs that begins now."""
        return tuple(self._headers.values())

    @property
    def has_video(self) -> bool:
        return self._video

    def add(self, type_id: int, timestamp: int, payload: bytes, message_class: MessageClass) -> list[CutSegment]:
        frame = Frame(type_id, timestamp, payload)
        if message_class is MessageClass.HEADER:
            self._video = self._video or type_id == TYPE_VIDEO
            self._keep(frame)
            if self.position is not None:
                self._append(frame)
            return []
        now_ms, done = self._unwrap(timestamp), []
        if now_ms is None:
            done = self.close()
            self.timeline, self._last_ms = self.timeline + TIMELINE_DISTANCE, timestamp
            now_ms = timestamp
        video = message_class in VIDEO_CLASSES
        self._video = self._video or video
        done += self._cut_before(now_ms, len(payload), key=message_class is MessageClass.KEY)
        if self.position is None:
            self._open(Position(self.timeline, now_ms, 0), now_ms)
        self._append(frame)
        self._video_frame = self._video_frame or video
        return done

    def close(self) -> list[CutSegment]:
        return self._complete(Sequel.END)

    def _unwrap(self, timestamp: int) -> int | None:
        """Return a time without wraps; None: the clock has jumped back."""
        last = self._last_ms
        if last is None:
            self._last_ms = timestamp
            return timestamp
        step = signed_difference(timestamp, last)
        if step < -BACK_MS:
            return None
        self._last_ms = max(last, last + step)
        return max(last + step, 0)  # sound may begin a little before the picture at 0

    def _cut_before(self, now_ms: int, size_bytes: int, *, key: bool) -> list[CutSegment]:
        position = self.position
        if position is None:
            return []
        start_ms = position.start_ms
        if key:  # what comes before the first picture is a segment of its own
            cut = not self._video_frame or now_ms // LEAST_MS > start_ms // LEAST_MS
        else:
            cut = not self._video and now_ms // GRID_MS > start_ms // GRID_MS
        # A key frame at the time of the beginning belongs to it: positions have to grow.
        if cut and now_ms > start_ms:
            done = self._complete(Sequel.KEY, now_ms)
            self._open(Position(self.timeline, now_ms, 0), now_ms)
            return done
        # Headers are no places to cut at; some more have room.
        full = self._bytes + FRAME_BYTES + size_bytes > PART_BYTES or len(self.frames) >= MESSAGES - HEADERS
        if (full or now_ms - self._part_from_ms >= PART_MS) and position.part < 0xFFFF:
            done = self._complete(Sequel.PART)
            self._open(position._replace(part=position.part + 1), now_ms)
            return done
        return []

    def _open(self, position: Position, now_ms: int) -> None:
        self.position, self._part_from_ms = position, now_ms
        self._opening = tuple(self._headers.values())
        self._bytes = 0
        self._video_frame = False

    def _append(self, frame: Frame) -> None:
        if self._bytes + FRAME_BYTES + len(frame.payload) > BODY_BYTES - _HEADERS_BYTES - _ROOM_BYTES:
            self.refused += 1
            return
        self.frames.append(frame)
        self._bytes += FRAME_BYTES + len(frame.payload)

    def _keep(self, frame: Frame) -> None:
        key = inspect(frame.type_id, frame.payload).sticky_key
        self._headers.pop(key, None)
        kept_bytes = sum(len(payload) for _, payload in self._headers.values())
        if len(self._headers) < HEADERS and kept_bytes + len(frame.payload) <= _HEADERS_BYTES:
            self._headers[key] = (frame.type_id, frame.payload)

    def _complete(self, then: Sequel, next_ms: int = 0) -> list[CutSegment]:
        position, frames = self.position, self.frames
        self.position, self.frames = None, []
        if position is None or not frames:
            return []
        return [CutSegment(self._stream, position, self._opening, frames, then, next_ms)]
