"""How well media comes in from one publisher: what came, how evenly, and where it stopped (pure).

A few additions per message, whether anything is recorded or not. Time stamps are the publisher's own, before a stream
that goes on after another publisher shifts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from flowctl.core.flow.state import VIDEO_CLASSES, MessageClass
from flowctl.wire.rtmp.wire import CLOCK_HALF, CLOCK_MASK, signed_difference

GAP_S: Final = 1.0
"""Least time without media that is a gap: players buffer about a second, so viewers see it."""
_JITTER_DIVISOR: Final = 16
"""Divisor of each difference before it enters the jitter: RFC 3550, 6.4.1."""
_JUMP_MS: Final = 10_000
"""Largest step of time stamps that counts for jitter: a larger one begins another timeline."""
_KEY: Final = MessageClass.KEY
_AUDIO: Final = MessageClass.AUDIO


@dataclass(slots=True, eq=False)
class Ingest:
    """Figures of one publisher, over all that it has published on its connection."""

    size_bytes: int = 0
    pictures: int = 0  # messages of them that hold pictures; of several tracks, of all
    key_frames: int = 0
    audio: int = 0
    _media_at: float | None = None  # when the last message came. None: none has, or the publication is over
    _gap_count: int = 0
    _gap_s: float = 0.0
    _gap_max_s: float = 0.0
    _key_at_ms: int | None = None  # time stamp of the last key frame
    _key_count: int = 0
    _key_sum_ms: int = 0
    _key_max_ms: int = 0
    _last: tuple[float, int] | None = None  # (arrival, time stamp) of the last picture, or sound if none came
    _jitter_ms: float = 0.0
    _jitter_ms_s: float = 0.0
    _jitter_s: float = 0.0

    def count_message(self, message_class: MessageClass, timestamp_ms: int, size_bytes: int, now: float) -> None:
        self.size_bytes += size_bytes
        if self._media_at is not None and now - self._media_at > GAP_S:
            self._gap(now - self._media_at)
        self._media_at = now
        if message_class in VIDEO_CLASSES:
            if not self.pictures:
                self._last = None  # sound went before
            self.pictures += 1
            if message_class is _KEY:
                self._key(timestamp_ms)
        elif message_class is not _AUDIO:
            return
        else:
            self.audio += 1
            if self.pictures:
                return
        last, self._last = self._last, (now, timestamp_ms)
        if last is None:
            return
        took_s = now - last[0]
        # `signed_difference` without the call, per message.
        media_ms = (timestamp_ms - last[1] + CLOCK_HALF & CLOCK_MASK) - CLOCK_HALF
        if abs(media_ms) <= _JUMP_MS:
            self._jitter_ms += (abs(took_s * 1000 - media_ms) - self._jitter_ms) / _JITTER_DIVISOR
            self._jitter_ms_s += self._jitter_ms * took_s
            self._jitter_s += took_s

    def _gap(self, length_s: float) -> None:
        self._gap_count += 1
        self._gap_s += length_s
        self._gap_max_s = max(self._gap_max_s, length_s)

    def _key(self, timestamp_ms: int) -> None:
        self.key_frames += 1
        before, self._key_at_ms = self._key_at_ms, timestamp_ms
        apart_ms = 0 if before is None else signed_difference(timestamp_ms, before)
        if apart_ms > 0:  # tracks have theirs at one time
            self._key_count += 1
            self._key_sum_ms += apart_ms
            self._key_max_ms = max(self._key_max_ms, apart_ms)

    def pause(self, now: float) -> None:
        """A publication is over: until the next one begins nothing has to come."""
        if self._media_at is not None and now - self._media_at > GAP_S:
            self._gap(now - self._media_at)
        self._media_at = self._last = self._key_at_ms = None

    def columns(self, now: float) -> dict[str, Any]:
        """Return the columns of `flow_closes`, by name; a gap that goes on at `now`, in seconds, counts. Any thread."""
        media_at = self._media_at
        open_s = 0.0 if media_at is None or now - media_at <= GAP_S else now - media_at
        return {
            "ingest_bytes": self.size_bytes,
            "ingest_pictures": self.pictures,
            "ingest_key_frames": self.key_frames,
            "ingest_audio": self.audio,
            "key_interval_ms": self._key_sum_ms / self._key_count if self._key_count else None,
            "key_interval_max_ms": float(self._key_max_ms) if self._key_count else None,
            "gap_count": self._gap_count + (open_s > 0),
            "gap_ms": (self._gap_s + open_s) * 1000,
            "gap_max_ms": max(self._gap_max_s, open_s) * 1000,
            "jitter_ms": self._jitter_ms_s / self._jitter_s if self._jitter_s else None,
        }
