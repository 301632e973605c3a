"""When the next frame of a source is due: media time against real time, loops with continuing timestamps (pure).

How it works: the source's clock is the 32-bit clock of RTMP and FLV, which wraps; the timeline adds up the differences
between media tags as signed numbers, so a wrap is no jump and a small step back (B-frames of some muxers) is one. At
the end of a round the timeline works out when the next frame of each track would have been due, and the next round
begins there; its tags get timestamps that go on accordingly. A source whose timestamps stand still or run backwards is
given a millisecond per frame in each round, so that a loop of it moves on in time and a duration comes to its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from flowctl.core.flow.state import MessageClass
from flowctl.errors import ConfigError, FlowctlError, LocalProtocolError
from flowctl.flv import TAG_SCRIPT, FlvTag
from flowctl.wire.media.stamp import Stamper
from flowctl.wire.rtmp.media.media import MediaInfo, inspect
from flowctl.wire.rtmp.wire import CLOCK_MASK, signed_difference

_NEW_CLOCK_MS: Final = -1000
"""Steps back by more than this are another publisher's clock; by less, tracks that are interleaved loosely."""


@dataclass(slots=True)
class MediaClock:
    """Adds up how much media time a row of timestamps covers."""

    covered_ms: int = 0  # time from the first timestamp to the latest one. A step back to another clock adds nothing.
    _before: int | None = None  # the last timestamp
    _at_ms: int = 0  # where it stands on the time line that begins with the first one

    def count_frame(self, timestamp: int) -> None:
        if self._before is not None:
            step_ms = signed_difference(timestamp, self._before)
            self._at_ms += step_ms if step_ms >= _NEW_CLOCK_MS else 0
            self.covered_ms = max(self.covered_ms, self._at_ms)
        self._before = timestamp


class TimedTag(NamedTuple):
    tag: FlvTag
    due_ms: int
    message_class: MessageClass
    info: MediaInfo


@dataclass(slots=True, kw_only=True, eq=False)
class Timeline:
    source: Iterable[FlvTag | None] = field(kw_only=False)  # None: the next one has not come yet
    loop: bool = False
    duration_s: float | None = None
    rounds: int = 0  # how often the source has begun
    _elapsed_ms: int = 0  # time of the last media tag
    _origin: int = 0  # timestamp of the very first media tag
    _tracks: dict[int, tuple[int, int]] = field(default_factory=dict)  # type -> elapsed of its last frame, step to it
    _headers: dict[object, bytes] = field(default_factory=dict)  # sticky key -> what was sent last: no round repeats it

    def __post_init__(self) -> None:
        if self.loop and isinstance(self.source, Iterator):
            raise ConfigError("this source can be iterated over only once, so it cannot loop")

    def __iter__(self) -> Iterator[TimedTag | None]:
        start_ms, end_ms = 0, math.inf if self.duration_s is None else self.duration_s * 1000
        while True:
            self.rounds += 1
            frames = 0
            latest_ms = start_ms
            for timed in self._round(start_ms):
                if timed is None:
                    yield None
                    continue
                if timed.due_ms >= end_ms:
                    return
                frames += timed.tag.type_id != TAG_SCRIPT
                latest_ms = max(latest_ms, timed.due_ms)
                yield timed
            if not self.loop or not frames:
                return
            following_ms = max((last + step for last, step in self._tracks.values()), default=latest_ms)
            # Timestamps that tell no step, or a wrong one, must neither go back nor make a loop an endless burst.
            start_ms = max(following_ms, latest_ms + 1, start_ms + frames)

    def _round(self, start_ms: int) -> Iterator[TimedTag | None]:
        """Iterate over the source once, its first media tag at `start_ms`."""
        before: int | None = None  # timestamp of the last media tag, on the source's clock
        for tag in self.source:
            if tag is None:
                yield None
                continue
            if tag.type_id == TAG_SCRIPT:
                # Metadata has timestamp 0 whatever the clock says, and once is enough: it describes the whole.
                if self.rounds == 1:
                    yield TimedTag(tag, self._elapsed_ms, MessageClass.HEADER, inspect(tag.type_id, tag.payload))
                continue
            if before is None:
                self._elapsed_ms = start_ms
                self._origin = tag.timestamp if self.rounds == 1 else self._origin
            else:
                self._elapsed_ms += signed_difference(tag.timestamp, before)
            before = tag.timestamp
            info = inspect(tag.type_id, tag.payload)
            key = info.sticky_key
            if key is not None and self._headers.get(key) == tag.payload:
                continue
            if key is not None:
                self._headers[key] = tag.payload
            elif self.loop and info.packet == "sequence_end":
                continue  # the end of a round is not the end of the track
            else:
                self._note_frame(tag.type_id)
            moved = FlvTag(tag.type_id, (self._origin + self._elapsed_ms) & CLOCK_MASK, tag.payload)
            yield TimedTag(moved, self._elapsed_ms, info.message_class, info)

    def _note_frame(self, type_id: int) -> None:
        last = self._tracks.get(type_id)
        step = 0 if last is None else max(self._elapsed_ms - last[0], 0)
        # A step of 0 (two tracks in one type, or a burst) says nothing about when the next one is due.
        self._tracks[type_id] = (self._elapsed_ms, step or (last[1] if last is not None else 0))


@dataclass(slots=True, kw_only=True, eq=False)
class TagFeed:
    """The tags of a timeline as a publisher sends them: which is next, when it is due, and its octets."""

    tags: Iterator[TimedTag | None]
    pace: float = 1.0  # media seconds per second, 0 for as fast as they are taken
    stamper: Stamper | None = None  # numbers synthetic frames as they are sent. None: they go as they are.
    next: TimedTag | None = None  # the tag to be sent. None: not begun, not there yet, or all were sent.
    over: bool = False  # whether the source has ended
    error: FlowctlError | None = None  # what the source broke with, which counts as its end. None: it has not.
    max_lag_s: float = 0.0  # how late a tag was sent at worst
    _began_at: float = 0.0

    def begin(self, now: float) -> None:
        """Get the first tag, which is due at `now`."""
        self._began_at = now
        self.advance()

    def due_at(self, now: float) -> float:
        """Return when the next tag is due: `now` where there is no pace, or no tag."""
        if not self.pace or self.next is None:
            return now
        return self._began_at + self.next.due_ms / 1000 / self.pace

    def take(self, now: float, wall_us: int) -> TimedTag:
        """Return the next tag, stamped; there is one."""
        timed = self.next
        if timed is None:
            raise LocalProtocolError("all tags were sent")
        self.max_lag_s = max(self.max_lag_s, now - self.due_at(now))
        self.advance()
        if self.stamper is None:
            return timed
        type_id, timestamp, payload = timed.tag
        return timed._replace(tag=FlvTag(type_id, timestamp, self.stamper.stamped(type_id, payload, wall_us)))

    @property
    def why_over(self) -> str:
        return "everything was sent" if self.error is None else f"the source: {self.error}"

    def advance(self) -> None:
        """Get the next tag, if there is one by now."""
        try:
            self.next = next(self.tags)
        except StopIteration:
            self.next, self.over = None, True
        except FlowctlError as error:
            self.next, self.over, self.error = None, True, error
