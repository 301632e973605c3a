"""What one viewer got: frames, what is missing between them, whether pictures were decodable, and delays (pure).

Delay comes from the best of three sources. A stamped frame says when it was sent. Frames of our own publisher without
stamps were due at its origin plus their timestamp. Otherwise the frame that came soonest, of all viewers of a stream in
this process, stands for no delay. Frames that were published before the viewer asked to play are the server's cache:
they are counted, but have no delay. A delay is taken of pictures, and of sound where there are no pictures.

Who is left with the sound misses pictures that no later picture tells of: `ViewerMeasure.missed_at_end`.

A *freeze* is the time from one picture to the next. The cache comes at once, so it has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flowctl.load.peers.skim import AUDIO, VIDEO, Frame, Skimmed
from flowctl.load.results.histogram import DelayHistogram, bucket_of
from flowctl.load.results.result import PeerResult
from flowctl.wire.client.gaps import GapFinder
from flowctl.wire.client.pace import signed_difference

_MISSING_MAX: Final = 1_000_000  # as `flowctl.wire.client.gaps`: a publisher that begins again is no loss
_ORIGIN_MAX_US: Final = 120_000_000
STALL_S: Final = 1.0
FREEZE_S: Final = 0.2
"""So long without a new picture is seen as a standstill; webrtc-stats (W3C) counts from 150 ms above the usual."""
_FREEZE_US: Final = round(FREEZE_S * 1e6)

STAMP: Final = "stamp"
ORIGIN: Final = "publisher's clock"
FASTEST: Final = "fastest viewer"


class StreamClock:
    """What is known of one stream's time; shared by its viewers in a process.

    Attributes:
        origin_us: wall-clock time at which timestamp 0 was due. None: the publisher is not ours.
        source: where delays come from, of `STAMP`, `ORIGIN` and `FASTEST`; "" while none was measured.
        key_interval: of our own synthetic source: frames from key frame to key frame, 0 for unknown.
        disposable_every: of our own synthetic source: every n-th frame behind a key frame is disposable.
    """

    __slots__ = ("_first", "_least_us", "disposable_every", "key_interval", "origin_us", "source")

    def __init__(self, *, key_interval: int = 0, disposable_every: int = 0) -> None:
        self.origin_us: int | None = None
        self.source = ""
        self.key_interval = key_interval
        self.disposable_every = disposable_every
        self._first: int | None = None  # timestamp that the others are counted from
        self._least_us: int | None = None

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
        if self._least_us is None or since_us < self._least_us:
            self._least_us = since_us
        self.source = self.source or FASTEST
        due_us = now_us - (since_us - self._least_us)
        return since_us - self._least_us if due_us >= asked_us else None

    def needed(self, first: int, count: int) -> bool:
        """Return whether one of the `count` frames from number `first` on is one that others refer to."""
        every, interval = self.disposable_every, self.key_interval
        if not every or not interval or count > interval:
            return True
        places = ((first + step) % interval for step in range(count))
        return any(place == 0 or place % every for place in places)


class ViewerMeasure:
    """Counts what one connection receives.

    Attributes:
        asked_us: when it asked to play, by the wall clock.
        freezes: times that no picture came for `FREEZE_S` or longer.
        longest_freeze_us: the longest time from one picture to the next, microseconds.
        missing: frames missing so far, video and audio.
        frames: of video and audio so far.
    """

    __slots__ = (
        "_audio_gaps",
        "_clock",
        "_first_ms",
        "_next_audio",
        "_next_video",
        "_picture_ms",
        "_picture_us",
        "_recent",
        "_sound_ms",
        "_video_gaps",
        "asked_us",
        "audio",
        "broken_restarts",
        "data",
        "delays",
        "freezes",
        "gaps",
        "keys",
        "longest_freeze_us",
        "missing_audio",
        "missing_video",
        "started_on_key",
        "video",
    )

    def __init__(self, clock: StreamClock, recent: DelayHistogram | None) -> None:
        self._clock = clock
        self._recent = recent
        self._video_gaps: GapFinder | None = None  # made for streams without stamps
        self._audio_gaps: GapFinder | None = None
        self._next_video: int | None = None  # number that the next picture should have
        self._next_audio: int | None = None
        self._picture_us = 0  # when the last picture came; 0: none has
        self._first_ms: int | None = None  # timestamp of the first picture
        self._picture_ms = 0  # of the last one
        self._sound_ms: int | None = None  # of the last piece of sound
        self.asked_us = 0
        self.audio = 0
        self.broken_restarts = 0
        self.data = 0
        self.delays = DelayHistogram()
        self.freezes = 0
        self.gaps = 0
        self.keys = 0
        self.longest_freeze_us = 0
        self.missing_audio = 0
        self.missing_video = 0
        self.started_on_key: bool | None = None
        self.video = 0

    def anew(self) -> ViewerMeasure:
        """Return a measure of the same stream that has counted nothing: its viewer is not parsed from here on."""
        return ViewerMeasure(self._clock, None)

    @property
    def missing(self) -> int:
        """Frames missing so far, video and audio."""
        return self.missing_video + self.missing_audio

    @property
    def frames(self) -> int:
        """Frames received so far, video and audio."""
        return self.video + self.audio

    def take(self, items: Iterable[Skimmed], now_us: int) -> None:
        """Count media that came at `now_us`, microseconds of the wall clock."""
        pictures, picture_ms = self.video, 0
        for timestamp, frame in items:
            kind, key, number, sent_us, data = frame
            if kind == VIDEO:
                self.video += 1
                picture_ms = timestamp
                if number is None or number != self._next_video or key:
                    self._picture(timestamp, frame)
                if number is not None:
                    self._next_video = number + 1
            elif kind == AUDIO:
                self.audio += 1
                self._sound_ms = timestamp
                if number is None or number != self._next_audio:
                    self._sound(timestamp, number)
                if number is not None:
                    self._next_audio = number + 1
                if self.video:
                    continue
            else:
                self.data += data
                continue
            if sent_us:
                if sent_us < self.asked_us:
                    continue
                self._clock.source = STAMP
                delay_us: int | None = now_us - sent_us
            else:
                delay_us = self._clock.delay_us(timestamp, self.asked_us, now_us)
            if delay_us is not None:
                self._delay(delay_us)
        if self.video != pictures:
            self.waited_until(now_us)
            self._picture_us, self._picture_ms = now_us, picture_ms

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
        return missed if missed < _MISSING_MAX else 0

    def waited_until(self, now_us: int) -> None:
        """Note that no picture came from the last one until `now_us`."""
        if self._picture_us:
            waited_us = now_us - self._picture_us
            self.freezes += waited_us >= _FREEZE_US
            self.longest_freeze_us = max(self.longest_freeze_us, waited_us)

    def _delay(self, delay_us: int) -> None:
        bucket = bucket_of(delay_us)
        delays = self.delays
        delays.buckets[bucket] = delays.buckets.get(bucket, 0) + 1
        if delay_us > delays.max_us:  # noqa: PLR1730 - a third of the time of max(), for each frame and viewer
            delays.max_us = delay_us
        recent = self._recent
        if recent is not None:
            recent.buckets[bucket] = recent.buckets.get(bucket, 0) + 1
            if delay_us > recent.max_us:  # noqa: PLR1730 - as above
                recent.max_us = delay_us

    def _picture(self, timestamp: int, frame: Frame) -> None:
        """Take a picture that is not simply the next one: a key frame, one after a gap, one without a number."""
        if self.started_on_key is None:
            self.started_on_key = frame.key
            self._first_ms = timestamp
        self.keys += frame.key
        number = frame.number
        if number is None:
            if self._video_gaps is None:
                self._video_gaps = GapFinder()
            missing = self._video_gaps.frame(timestamp)
            needed = True
        else:
            missing = _missing(number, self._next_video)
            needed = bool(missing) and self._clock.needed(number - missing, missing)
        if missing:
            self.missing_video += missing
            self.gaps += 1
            # What comes after a gap must be a key frame, unless nobody refers to what is missing.
            self.broken_restarts += needed and not frame.key

    def _sound(self, timestamp: int, number: int | None) -> None:
        if number is None:
            if self._audio_gaps is None:
                self._audio_gaps = GapFinder()
            missing = self._audio_gaps.frame(timestamp)
        else:
            missing = _missing(number, self._next_audio)
        if missing:
            self.missing_audio += missing
            self.gaps += 1

    def write_to(self, result: PeerResult) -> None:
        """Put the figures into the row of the peer."""
        result.video, result.keys, result.audio, result.data = self.video, self.keys, self.audio, self.data
        result.missing_video, result.missing_audio = self.missing_video, self.missing_audio
        result.missed_at_end = self.missed_at_end
        result.gaps, result.broken_restarts = self.gaps, self.broken_restarts
        result.started_on_key = self.started_on_key
        result.freezes = self.freezes
        result.longest_freeze_s = self.longest_freeze_us / 1e6 if self._picture_us else None
        delays = self.delays
        result.delays = delays.count
        result.delay_p50_ms = delays.percentile_ms(0.50)
        result.delay_p95_ms = delays.percentile_ms(0.95)
        result.delay_p99_ms = delays.percentile_ms(0.99)
        result.delay_max_ms = delays.max_us / 1000 if result.delays else None


def _missing(number: int, expected: int | None) -> int:
    """Return how many frames lie between the one expected and this one; 0 where another publisher counts anew."""
    missing = 0 if expected is None else number - expected
    return missing if 0 <= missing <= _MISSING_MAX else 0
