"""A live source without camera and encoder: H.264 and AAC frames of chosen sizes at chosen times, each stamped.

How it works: the frames are legal (a clock and a walking square, or one plain brightness where the rate has no room
for more, and silence; see `flowctl.wire.media.tiny_h264` and `tiny_aac`), made as large as the wanted bit rate asks by
parts that decoders skip. Sizes follow a simple encoder: key frames are a given number of times larger than the others,
which vary by a seeded random share. Equal arguments give equal octets.

Bit rates count message bodies, that is what a server has to carry, not the headers around them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from flowctl.errors import ConfigError
from flowctl.flv import TAG_AUDIO, TAG_SCRIPT, TAG_VIDEO, FlvTag
from flowctl.wire.media.stamp import AUDIO_SLOT, VIDEO_SLOT, read_stamp, stamp
from flowctl.wire.media.tiny_aac import FRAME_SAMPLES, MAX_FRAME_BYTES, SILENCE, audio_specific_config, padding
from flowctl.wire.media.tiny_h264 import SQUARE_BITS, Squares, TinyH264, filler
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.values import AmfValue, EcmaArray
from flowctl.wire.rtmp.wire import CLOCK_MASK

BACKGROUND: Final = -5
"""Brightness of the background, in steps of `flowctl.wire.media.tiny_h264`: dark."""
_INK: Final = 7
_WALKER: Final = 3
_GLYPHS: Final = {
    "0": "### #.# #.# #.# ###",
    "1": ".#. ##. .#. .#. ###",
    "2": "### ..# ### #.. ###",
    "3": "### ..# .## ..# ###",
    "4": "#.# #.# ### ..# ..#",
    "5": "### #.. ### ..# ###",
    "6": "### #.. ### #.# ###",
    "7": "### ..# ..# .#. .#.",
    "8": "### #.# ### #.# ###",
    "9": "### #.# ### ..# ###",
    ":": "... .#. ... .#. ...",
    ".": "... ... ... ... .#.",
}
"""Rows of each character, three squares wide."""
_HEIGHT: Final = 5
_MARGIN: Final = 2
LEAST_COLUMNS: Final = 4 * len("00:00.0") + _MARGIN
LEAST_ROWS: Final = _HEIGHT + 2 * _MARGIN
"""Fewest rows of squares of a picture with a clock: smaller pictures have no room for it."""
MOST_CHANGED: Final = 2 * 3 * _HEIGHT * len("00:00.0") + 2
"""Most squares that differ between any two pictures."""


def squares_at(time_s: float, columns: int, rows: int) -> dict[int, int]:
    """Return the picture of a moment of the stream: the steps of the squares that are not of the background.

    It changes ten times a second; in between the same object is returned, which is not to be changed.
    """
    return _picture(int(time_s * 10 + 1e-6), columns, rows)


@lru_cache(maxsize=8)
def _picture(tenths: int, columns: int, rows: int) -> dict[int, int]:
    seconds, tenth = divmod(tenths, 10)
    minutes, seconds = divmod(seconds, 60)
    text = f"{minutes % 100:02}:{seconds:02}.{tenth}"
    left, top = (columns - 4 * len(text) + 1) // 2, (rows - _HEIGHT) // 2
    squares = {
        (top + down) * columns + left + 4 * place + across: _INK
        for place, character in enumerate(text)
        for down, row in enumerate(_GLYPHS[character].split())
        for across, ink in enumerate(row)
        if ink == "#"
    }
    squares[(rows - 1) * columns + tenths % columns] = _WALKER
    return squares


__all__ = ["SyntheticSource", "read_stamp", "stamp"]

MAX_FRAME_SIZE_BYTES: Final = 8 * 1024 * 1024  # below the 10 MiB that a server takes as one media message

_VIDEO_HEADER_BYTES: Final = 5
_LENGTH_BYTES: Final = 4
_MIN_FILLER_BYTES: Final = _LENGTH_BYTES + 2
_SLOT_NAL: Final = len(VIDEO_SLOT).to_bytes(_LENGTH_BYTES, "big") + VIDEO_SLOT
_AUDIO_HEADER: Final = b"\xaf\x01"  # AAC, "44 kHz 16 bit stereo" whatever the truth (FLV 10.1 E.4.2.1), raw frame
_FIXED_VIDEO_BYTES: Final = _VIDEO_HEADER_BYTES + len(_SLOT_NAL) + _LENGTH_BYTES
_PLAIN: Final[Squares] = {}
_SLICE_HEADER_BYTES: Final = 24  # more than any slice header here has, escapes included
_FIXED_AUDIO_BYTES: Final = len(_AUDIO_HEADER) + len(AUDIO_SLOT) + len(SILENCE)


@dataclass(frozen=True, kw_only=True)
class SyntheticSource:
    """Iterates endlessly over `FlvTag`: onMetaData, sequence headers, then frames in decoding order.

    Every frame carries its number (video and audio counted apart, from 0) and the time 0; a publisher puts the real
    time in with `stamp` when it sends the frame. Two iterations over one source give the same tags.
    """

    video_bit_rate: int = 2_500_000  # bits per second of the video bodies
    fps: float = 30.0  # frames per second, 1 to 240, fractions allowed
    key_interval_s: float = 2.0  # seconds from key frame to key frame, rounded to whole frames, at least one frame
    key_frame_bytes: int | None = None  # body size of key frames; None takes `key_frame_ratio`
    # how many times larger than the others key frames are, 1 to 1000. x264 on moving pictures makes them 5 to 10 times
    # larger.
    key_frame_ratio: float = 8.0
    # every n-th frame behind a key frame is disposable (nal_ref_idc 0); 0 is none, 1 all of them.
    disposable_every: int = 0
    size_jitter: float = 0.2  # largest random deviation of the other frames from their mean size, a share of 0 to 0.9
    audio_bit_rate: int = 128_000  # bits per second of the audio bodies
    sample_rate: int = 48_000  # audio samples per second; a frame has 1024 of them
    video: bool = True  # whether there is video
    audio: bool = True  # whether there is audio
    seed: int = 0  # seed of the random frame sizes
    start_timestamp: int = 0  # timestamp of the first frames in milliseconds, 0 to 2^32 - 1; timestamps wrap at 2^32
    width: int = 640  # pixels, even. The picture has few pixels by default, so that small bit rates stay possible.
    height: int = 360  # pixels, even

    _codec: TinyH264 = field(init=False, repr=False, compare=False)
    _sizes: tuple[int, float] = field(init=False, repr=False, compare=False)  # key frame, mean of the others
    _has_clock: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.video or self.audio):
            raise ConfigError("video and audio are both off: nothing to send")
        _check("fps", self.fps, 1, 240)
        _check("key_interval_s", self.key_interval_s, 0, 86_400)
        _check("key_frame_ratio", self.key_frame_ratio, 1, 1000)
        _check("disposable_every", self.disposable_every, 0, 1_000_000)
        _check("size_jitter", self.size_jitter, 0, 0.9)
        _check("start_timestamp", self.start_timestamp, 0, CLOCK_MASK)
        codec = TinyH264(self.width, self.height, self.fps, self.video_bit_rate, BACKGROUND)
        object.__setattr__(self, "_codec", codec)
        object.__setattr__(self, "_sizes", self._frame_sizes() if self.video else (0, 0.0))
        object.__setattr__(self, "_has_clock", self.video and self._has_room_for_a_clock())
        audio_specific_config(self.sample_rate)
        lowest, highest = (
            size * 8 * self.sample_rate / FRAME_SAMPLES
            for size in (_FIXED_AUDIO_BYTES, len(_AUDIO_HEADER) + MAX_FRAME_BYTES)
        )
        if self.audio:
            _check("audio_bit_rate", self.audio_bit_rate, lowest, highest)

    @property
    def key_interval_frames(self) -> int:
        return max(1, round(self.fps * self.key_interval_s))

    def __iter__(self) -> Iterator[FlvTag]:
        return self.tags()

    def tags(self, duration_s: float | None = None) -> Iterator[FlvTag]:
        yield from self.headers()
        rng = random.Random(self.seed)
        end_ms = float("inf") if duration_s is None else duration_s * 1000
        video_index = audio_index = 0
        while True:
            video_ms = video_index * 1000 / self.fps if self.video else float("inf")
            audio_ms = audio_index * 1000 * FRAME_SAMPLES / self.sample_rate if self.audio else float("inf")
            if min(video_ms, audio_ms) >= end_ms:
                return
            # Video first at equal times: a viewer that starts at a key frame then also gets the audio of its time.
            if video_ms <= audio_ms:
                yield FlvTag(TAG_VIDEO, self._clock(video_ms), self._video_frame(video_index, rng))
                video_index += 1
            else:
                yield FlvTag(TAG_AUDIO, self._clock(audio_ms), self._audio_frame(audio_index))
                audio_index += 1

    def headers(self) -> list[FlvTag]:
        """Return onMetaData at time 0, and the sequence headers of the tracks there are at the start timestamp."""
        # At another time than 0 FFmpeg takes the metadata for a subtitle and opens a track for it.
        tags = [FlvTag(TAG_SCRIPT, 0, self._metadata())]
        if self.video:
            config = b"\x17\x00\x00\x00\x00" + self._codec.config()
            tags.append(FlvTag(TAG_VIDEO, self.start_timestamp, config))
        if self.audio:
            config = b"\xaf\x00" + audio_specific_config(self.sample_rate)
            tags.append(FlvTag(TAG_AUDIO, self.start_timestamp, config))
        return tags

    def _clock(self, elapsed_ms: float) -> int:
        return self.start_timestamp + round(elapsed_ms) & CLOCK_MASK

    def _metadata(self) -> bytes:
        values: dict[str, AmfValue] = {"encoder": "flowctl synthetic source"}
        if self.video:
            values |= {
                "width": float(self.width),
                "height": float(self.height),
                "framerate": float(self.fps),
                "videocodecid": 7.0,
                "videodatarate": self.video_bit_rate / 1000,
            }
        if self.audio:
            values |= {
                "audiocodecid": 10.0,
                "audiodatarate": self.audio_bit_rate / 1000,
                "audiosamplerate": float(self.sample_rate),
                "audiosamplesize": 16.0,
                "stereo": True,
            }
        return amf0.encode("onMetaData", EcmaArray(values))

    def _frame_sizes(self) -> tuple[int, float]:
        """Return the size of key frames and the mean size of the others, both bodies in bytes."""
        frames = self.key_interval_frames
        interval_bytes = self.video_bit_rate / 8 * frames / self.fps
        if self.key_frame_bytes is not None:
            key = float(self.key_frame_bytes)
        else:
            key = interval_bytes * self.key_frame_ratio / (self.key_frame_ratio + frames - 1)
        other = (interval_bytes - key) / (frames - 1) if frames > 1 else 0.0
        least_other = (_FIXED_VIDEO_BYTES + _SLICE_HEADER_BYTES) / (1 - self.size_jitter)
        # Escapes cannot occur in a picture of one brightness, whose octets are never 0 in any alignment.
        least_key = _FIXED_VIDEO_BYTES + _SLICE_HEADER_BYTES + self._codec.macroblocks
        if frames > 1 and other < least_other:
            raise ConfigError(
                f"video_bit_rate {self.video_bit_rate} leaves {other:.0f} bytes a frame, {least_other:.0f} are needed",
                hint="raise video_bit_rate, or lower fps or key_frame_bytes",
            )
        _check("key_frame_bytes", key, least_key, MAX_FRAME_SIZE_BYTES)
        return (round(key), other)

    def _has_room_for_a_clock(self) -> bool:
        """Return whether every frame has room for the largest change, with an escape for every two octets."""
        key, other = self._sizes
        change = _FIXED_VIDEO_BYTES + _SLICE_HEADER_BYTES + MOST_CHANGED * SQUARE_BITS // 8 * 3 // 2
        others = other * (1 - self.size_jitter) if self.key_interval_frames > 1 else change
        codec = self._codec
        fits = codec.columns >= LEAST_COLUMNS and codec.rows >= LEAST_ROWS
        return fits and others >= change and key >= change + codec.macroblocks

    def _squares(self, index: int) -> Squares:
        return squares_at(index / self.fps, self._codec.columns, self._codec.rows) if self._has_clock else _PLAIN

    def _video_frame(self, index: int, rng: random.Random) -> bytes:
        place = index % self.key_interval_frames
        key_size, other_size = self._sizes
        if place == 0:
            # Consecutive IDR pictures need different ids; two alternate.
            head, size = b"\x17\x01\x00\x00\x00", key_size
            slice_nal = self._codec.intra_slice(index // self.key_interval_frames % 2, self._squares(index))
        else:
            every = self.disposable_every
            disposables_before = (place - 1) // every if every else 0
            head = b"\x27\x01\x00\x00\x00"
            size = round(other_size * (1 + self.size_jitter * rng.uniform(-1, 1)))
            # The picture before it that others refer to: frames behind a key frame are disposable each `every`-th.
            back = 1 if not every or place == 1 or (place - 1) % every else 2
            before = index - (place if every == 1 else back)
            slice_nal = self._codec.predicted_slice(
                place,
                place - disposables_before,
                self._squares(before),
                self._squares(index),
                reference=not every or place % every != 0,
            )
        parts = [head, _SLOT_NAL, len(slice_nal).to_bytes(_LENGTH_BYTES, "big"), slice_nal]
        left = size - _FIXED_VIDEO_BYTES - len(slice_nal)
        if left >= _MIN_FILLER_BYTES:
            parts += ((left - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big"), filler(left - _LENGTH_BYTES))
        return stamp(b"".join(parts), index & CLOCK_MASK, 0)

    def _audio_frame(self, index: int) -> bytes:
        exact = self.audio_bit_rate / 8 * FRAME_SAMPLES / self.sample_rate
        # The fractions add up, so that 128 kbit/s is 128 kbit/s although a frame would have 341.33 octets.
        size = int((index + 1) * exact) - int(index * exact)
        payload = b"".join((_AUDIO_HEADER, AUDIO_SLOT, padding(size - _FIXED_AUDIO_BYTES), SILENCE))
        return stamp(payload, index & CLOCK_MASK, 0)


def _check(name: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise ConfigError(f"{name} {value:g} is not in {lowest:g}..{highest:g}")
