"""What one viewer got: frames, what is missing between them, whether pictures were decodable, and delays (pure).

Delay comes from the best of three sources. A stamped frame says when it was sent. Frames of our own publisher without
stamps were due at its origin plus their timestamp. Otherwise the frame that came soonest of late, of all viewers of a
stream in this process, stands for no delay; of late, so that a publisher's clock which is slow, or stops for a while,
is followed. Frames that were published before the viewer asked to play are the server's cache: they are counted, but
have no delay. A delay is taken of pictures, and of sound where there are no pictures.

Who is left with the sound misses pictures that no later picture tells of: `ViewerMeasure.missed_at_end`.

A *freeze* is the time from one picture to the next. The cache comes at once, so it has none.

A *rendition* is told by the size of the pictures, which their sequence header says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from flowctl.core.flow.histogram import DelayHistogram, bucket_of
from flowctl.core.flow.state import MessageClass
from flowctl.core.outcomes.offsets import LeastOffset
from flowctl.wire.media.stamp import read_stamp
from flowctl.wire.rtmp.media.media import MediaInfo
from flowctl.wire.rtmp.media.size import read_size
from flowctl.wire.rtmp.wire import signed_difference

_GAP_STEP_RATIO: Final = 1.5
"""Ratio to the usual step above which a step hides a frame. Rounding to ms makes 33 and 34 of one frame rate, and 21
and 22 ms of AAC at 48 kHz, far from 1.5."""

MAX_MISSING: Final = 1_000_000
"""Most frames that one gap counts for: a publisher that comes back with another clock has not lost millions."""


@dataclass(slots=True)
class GapFinder:
    """Counts the frames of one track that are missing between those that came, from their timestamps alone.

    A step longer than one and a half usual ones hides frames. The usual step is the mean of the short ones so far, so
    it is exact for a constant frame rate, however milliseconds were rounded; else the count is an estimate.
    """

    _timestamp: int | None = None  # timestamp of the last frame
    _steps: int = 0  # steps that count as usual
    _steps_ms: int = 0

    def missing_before(self, timestamp: int) -> int:
        """Count one frame; return how many are missing just before it."""
        before, self._timestamp = self._timestamp, timestamp
        step_ms = 0 if before is None else signed_difference(timestamp, before)
        if step_ms <= 0:
            return 0
        if self._steps and step_ms > _GAP_STEP_RATIO * self._steps_ms / self._steps:
            return min(round(step_ms * self._steps / self._steps_ms) - 1, MAX_MISSING)
        self._steps += 1
        self._steps_ms += step_ms
        return 0


_ORIGIN_MAX_US: Final = 120_000_000
_WINDOW_US: Final = 30_000_000
"""Half of the time in which the frame that came soonest counts: a delay that all viewers have for longer is not told
from a clock that stopped. Crystals drift by 6 ms in it."""
STALL_S: Final = 1.0
FREEZE_S: Final = 0.2
"""Time without a new picture that counts as a freeze; webrtc-stats (W3C) counts from 150 ms above the usual time."""
_FREEZE_US: Final = round(FREEZE_S * 1e6)

STAMP: Final = "stamp"
ORIGIN: Final = "publisher's clock"
FASTEST: Final = "fastest viewer"


VIDEO: Final = 0
AUDIO: Final = 1
OTHER: Final = 2
"""Kinds of `MediaFrame`: a picture, sound, and what is neither: codec configuration, metadata, data."""


class MediaFrame(NamedTuple):
    kind: int
    key: bool
    number: int | None
    sent_us: int  # time of its stamp, microseconds since 1970; 0 where it has none
    data: bool
    rendition: str = ""  # of a sequence header: width and height of the pictures from here on, as ``1280x720``


Skimmed: TypeAlias = tuple[int, MediaFrame]
"""Timestamp in ms, and the frame that came with it."""


def describe(info: MediaInfo, head: bytes) -> MediaFrame:
    if info.kind == "data" or info.message_class is MessageClass.HEADER or info.message_class is MessageClass.DATA:
        size = read_size(head) if info.kind == "video" and info.packet == "sequence_header" else None
        return MediaFrame(OTHER, False, None, 0, info.kind == "data", "{}x{}".format(*size) if size else "")
    number, sent_us = read_stamp(head) or (None, 0)
    if info.kind == "audio":
        return MediaFrame(AUDIO, False, number, sent_us, False)
    return MediaFrame(VIDEO, info.message_class is MessageClass.KEY, number, sent_us, False)


@dataclass(slots=True, kw_only=True)
class StreamClock:
    """The clock of one stream, as far as it is known; shared by its viewers in a process."""

    key_interval: int = 0  # frames of our own synthetic source from key frame to key frame, 0 for unknown
    disposable_every: int = 0  # our own synthetic source has a disposable frame every n-th behind a key frame
    origin_us: int | None = None  # wall-clock time at which timestamp 0 was due. None: the publisher is not ours.
    source: str = ""  # where delays come from, of `STAMP`, `ORIGIN` and `FASTEST`; "" while none was measured
    _first: int | None = None  # timestamp that the others are counted from
    _soonest: LeastOffset = field(default_factory=lambda: LeastOffset(_WINDOW_US))

    def delay_us(self, timestamp: int, asked_us: int, now_us: int) -> int | None:
        """Return the delay of a frame without a stamp. None: it is from before `asked_us`."""
        origin = self.origin_us
        if origin is not None:
            due_us = origin + timestamp * 1000
            delay_us = now_us - due_us
            # A server that writes timestamps of its own, as SRS can, makes nonsense of our clock.
            if -_ORIGIN_MAX_US < delay_us < _ORIGIN_MAX_US:
                self.source = ORIGIN
                return delay_us if due_us >= asked_us else None
        if self._first is None:
            self._first = timestamp
        since_us = now_us - signed_difference(timestamp, self._first) * 1000
        self._soonest.add(since_us, now_us)
        self.source = self.source or FASTEST
        delay_us = since_us - int(self._soonest.least)
        return delay_us if now_us - delay_us >= asked_us else None

    def any_needed(self, first: int, count: int) -> bool:
        """Return whether one of the `count` frames from number `first` on is one that others refer to."""
        every, interval = self.disposable_every, self.key_interval
        if not every or not interval or count > interval:
            return True
        places = ((first + step) % interval for step in range(count))
        return any(place == 0 or place % every for place in places)


@dataclass(slots=True)
class ViewerMeasure:
    """Counts what one connection receives."""

    clock: StreamClock
    recent: DelayHistogram | None = None  # delays of the present second, shared with others. None: not wanted.
    asked_us: int = 0  # when it asked to play, by the wall clock
    video: int = 0
    audio: int = 0
    data: int = 0
    keys: int = 0
    missing_video: int = 0
    missing_audio: int = 0
    video_gaps: int = 0
    audio_gaps: int = 0
    broken_restarts: int = 0  # gaps in video after which something else than a key frame came first
    started_on_key: bool | None = None  # whether the first picture was a key frame. None: none came.
    freezes: int = 0  # times that no picture came for `FREEZE_S` or longer
    longest_freeze_us: int = 0  # the longest time from one picture to the next, microseconds
    delays: DelayHistogram = field(default_factory=DelayHistogram)
    picture_us: int = 0  # when the last picture came; 0: none has
    rendition: str = ""  # which it is in. "": its sequence header says no size.
    rendition_us: dict[str, int] = field(default_factory=dict)  # time in each, up to `_rendition_since_us`
    switches: int = 0  # from one rendition to another
    _rendition_since_us: int = 0
    _video_steps: GapFinder | None = None  # made for streams without stamps
    _audio_steps: GapFinder | None = None
    _next_video: int | None = None  # number that the next picture should have
    _next_audio: int | None = None
    _first_ms: int | None = None  # timestamp of the first picture
    _picture_ms: int = 0  # timestamp of the last picture
    _sound_ms: int | None = None  # timestamp of the last piece of sound

    def fresh_copy(self) -> ViewerMeasure:
        """Return a measure of the same stream that has counted nothing: its viewer is not parsed from here on."""
        return ViewerMeasure(self.clock)

    @property
    def missing(self) -> int:
        return self.missing_video + self.missing_audio

    @property
    def gaps(self) -> int:
        return self.video_gaps + self.audio_gaps

    @property
    def exact(self) -> bool:
        """Whether the missing ones were counted by numbers; otherwise they were worked out from timestamps."""
        return self._next_video is not None or self._next_audio is not None

    @property
    def frames(self) -> int:
        return self.video + self.audio

    def count_media(self, items: Iterable[Skimmed], now_us: int) -> None:
        """Count media that came at `now_us`, microseconds of the wall clock."""
        pictures, picture_ms = self.video, 0
        for timestamp, frame in items:
            kind, key, number, sent_us, _, _ = frame
            if kind == VIDEO:
                self.video += 1
                picture_ms = timestamp
                if number is None or number != self._next_video or key:
                    self._count_picture(timestamp, frame)
                if number is not None:
                    self._next_video = number + 1
            elif kind == AUDIO:
                self.audio += 1
                self._sound_ms = timestamp
                if number is None or number != self._next_audio:
                    self._count_sound(timestamp, number)
                if number is not None:
                    self._next_audio = number + 1
                if self.video:
                    continue
            else:
                self._count_other(frame, now_us)
                continue
            if sent_us:
                if sent_us < self.asked_us:
                    continue
                self.clock.source = STAMP
                delay_us: int | None = now_us - sent_us
            else:
                delay_us = self.clock.delay_us(timestamp, self.asked_us, now_us)
            if delay_us is not None:
                self._count_delay(delay_us)
        if self.video != pictures:
            self.note_wait(now_us)
            self.picture_us, self._picture_ms = now_us, picture_ms

    @property
    def missed_at_end(self) -> int:
        """Pictures that sound without pictures stands for, a second or more of it since the last picture; estimated.

        Messages come in the order of the stream, so none of these will come. Of a viewer that is left with the sound,
        they are missing as much as those between two pictures.
        """
        if self._first_ms is None or self._sound_ms is None:
            return 0
        behind_ms = signed_difference(self._sound_ms, self._picture_ms)
        span_ms, steps = signed_difference(self._picture_ms, self._first_ms), self.video + self.missing_video - 1
        if behind_ms < STALL_S * 1000 or span_ms <= 0:
            return 0
        missed = int(behind_ms * steps / span_ms)
        return missed if missed < MAX_MISSING else 0

    def note_wait(self, now_us: int) -> None:
        """Note that no picture came from the last one until `now_us`."""
        if self.picture_us:
            waited_us = now_us - self.picture_us
            self.freezes += waited_us >= _FREEZE_US
            self.longest_freeze_us = max(self.longest_freeze_us, waited_us)

    def note_rendition(self, rendition: str, now_us: int) -> None:
        """Note which rendition it is in from `now_us` on; the same one, that the time until then counts."""
        before = self.rendition
        if before:
            self.rendition_us[before] = self.rendition_us.get(before, 0) + now_us - self._rendition_since_us
            self.switches += rendition != before
        self.rendition, self._rendition_since_us = rendition, now_us

    def _count_other(self, frame: MediaFrame, now_us: int) -> None:
        self.data += frame.data
        if frame.rendition:
            self.note_rendition(frame.rendition, now_us)

    def _count_delay(self, delay_us: int) -> None:
        # Once for each frame and viewer: a loop over both, a method of theirs, or max() cost a tenth of it.
        bucket = bucket_of(delay_us)
        delays, recent = self.delays, self.recent
        delays.buckets[bucket] = delays.buckets.get(bucket, 0) + 1
        if delay_us > delays.max_us:  # noqa: PLR1730 - see above
            delays.max_us = delay_us
        if recent is not None:
            recent.buckets[bucket] = recent.buckets.get(bucket, 0) + 1
            if delay_us > recent.max_us:  # noqa: PLR1730 - see above
                recent.max_us = delay_us

    def _count_picture(self, timestamp: int, frame: MediaFrame) -> None:
        """Count a picture that is not simply the next one: a key frame, one after a gap, one without a number."""
        if self.started_on_key is None:
            self.started_on_key = frame.key
            self._first_ms = timestamp
        self.keys += frame.key
        number = frame.number
        if number is None:
            self._video_steps = self._video_steps or GapFinder()
            missing, needed = self._video_steps.missing_before(timestamp), True
        else:
            missing = _missing(number, self._next_video)
            needed = bool(missing) and self.clock.any_needed(number - missing, missing)
        if missing:
            self.missing_video += missing
            self.video_gaps += 1
            # What comes after a gap must be a key frame, unless no frame refers to what is missing.
            self.broken_restarts += needed and not frame.key

    def _count_sound(self, timestamp: int, number: int | None) -> None:
        if number is None:
            self._audio_steps = self._audio_steps or GapFinder()
            missing = self._audio_steps.missing_before(timestamp)
        else:
            missing = _missing(number, self._next_audio)
        if missing:
            self.missing_audio += missing
            self.audio_gaps += 1


def _missing(number: int, expected: int | None) -> int:
    """Return how many frames lie between the one expected and this one; 0 where another publisher counts anew."""
    missing = 0 if expected is None else number - expected
    return missing if 0 <= missing <= MAX_MISSING else 0
