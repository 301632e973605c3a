"""One encoder that publishes to several origins: the same octets at the same times of the stream to each.

A synthetic source stamps each frame with its number and with the time at which it is due, not with that at which some
publisher sends it, so that origins get equal frames and cut equal segments. What was produced is remembered by number
and checksum: it is what viewers' frames are held against.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from typing import Final

from flowctl.flv import FlvTag
from flowctl.pollgroup import PollGroup
from flowctl.wire.client.connect import parse_address, start_client
from flowctl.wire.client.publisher import RtmpPublisher
from flowctl.wire.media.stamp import has_slot, stamp
from flowctl.wire.media.synthetic import SyntheticSource

FrameKey = tuple[int, int]
"""RTMP message type, and number of the frame in its track."""


class DueFrames:
    """A synthetic source whose frames say when they are due; every iteration gives the same octets. Thread-safe."""

    def __init__(self, source: SyntheticSource, duration_s: float) -> None:
        self._source = source
        self._duration_s = duration_s
        self._lock = threading.Lock()
        self._begun_us: int | None = None  # guarded by _lock
        self._begun_at = 0.0  # guarded by _lock
        self.checksums: dict[FrameKey, int] = {}  # of what was produced, by type and number

    @property
    def last(self) -> dict[int, int]:
        # Keys are in the order of their numbers, so the last of each type stays; a list, since it grows meanwhile.
        return dict(list(self.checksums))

    @property
    def begun_us(self) -> int | None:
        """When the first frame was due, in microseconds since 1970. None: nobody has asked for any."""
        with self._lock:
            return self._begun_us

    def __iter__(self) -> Iterator[FlvTag]:
        numbers: dict[int, int] = {}
        for tag in self._source.tags(self._duration_s):
            begun_us = self.begun_us
            if begun_us is None:
                return  # nobody has begun
            if not has_slot(tag.payload):
                yield tag
                continue
            number = numbers.get(tag.type_id, 0)
            numbers[tag.type_id] = number + 1
            payload = stamp(tag.payload, number, begun_us + tag.timestamp * 1000)
            self.checksums[tag.type_id, number] = zlib.crc32(payload)
            yield FlvTag(tag.type_id, tag.timestamp, payload)

    def begin(self, now: float) -> float:
        """Begin, with the first publisher that is let in; return when that was, on the clock of `now`.

        One that is let in later is behind at once, and catches up: all send the same frames at the same times.
        """
        with self._lock:
            if self._begun_us is None:
                self._begun_us, self._begun_at = time.time_ns() // 1000, now
            return self._begun_at


class Encoder:
    """Publishes one stream to several servers."""

    def __init__(
        self, group: PollGroup, urls: list[str], *, bit_rate: int, duration_s: float, key_interval_s: float = 1.0
    ) -> None:
        source = SyntheticSource(video_bit_rate=bit_rate - _AUDIO, audio_bit_rate=_AUDIO, key_interval_s=key_interval_s)
        self.frames: Final = DueFrames(source, duration_s)
        self._group = group
        self._publishers = [
            RtmpPublisher(parse_address(url), self.frames, stamped=True, begins=self.frames.begin) for url in urls
        ]

    def start(self, head_start_s: float = 0.0) -> None:
        for number, publisher in enumerate(self._publishers):
            start_client(self._group, publisher)
            if number == 0 and head_start_s:
                time.sleep(head_start_s)

    @property
    def finished(self) -> bool:
        """Whether every publisher has ended, by having sent all or by losing its server."""
        return all(publisher.end is not None for publisher in self._publishers)

    @property
    def sent_all(self) -> int:
        return sum(publisher.end is not None and publisher.end.as_wanted for publisher in self._publishers)


_AUDIO: Final = 96_000
