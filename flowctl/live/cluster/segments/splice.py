"""A splice: messages of one stream from any sources, in any mix, to each message once and in order (pure).

What comes frame by frame and what comes as segments stands at the same positions, for both were cut by the same rules
(`live.cluster.segments.cutter`). So a message has a place: the position of its part, and its number there. There is
one cursor, the place of the next message that goes out. What stands before it is a repetition. Where nothing stands at
it and something stands behind it, that is waited for, for a bounded time and a bounded number of octets; then the gap
is told, and it goes on with the next part that a decoder can start with.

The end of a publication is part of its last segment: behind it the next publication is no gap. An end is taken back
where a source has more: the encoder had lost one of its origins, and not the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from flowctl.live.cluster.segments.segment import FRAME_BYTES, Frame, Header, Position, Segment
from flowctl.wire.rtmp.wire import CLOCK_MASK


class PublicationStart(NamedTuple):
    """A publication begins, with a clock of its own."""

    timeline: int


class SplicedHeaders(NamedTuple):
    """The headers that a decoder needs from here on; it may know them already."""

    headers: tuple[Header, ...]


class Gap(NamedTuple):
    """Messages are missing and will not come."""

    position: Position
    message: int
    to: Position


Output = PublicationStart | SplicedHeaders | Frame | Gap


class _SplicedPart:
    """What has come of one segment."""

    __slots__ = ("frames", "headers", "last", "next", "whole")

    def __init__(self, headers: tuple[Header, ...]) -> None:
        self.headers = headers
        self.frames: list[Frame] = []
        self.whole = False  # it is complete, and something follows
        self.last = False  # it is complete, and the publication ends
        self.next: Position | None = None  # of a whole one: what follows

    def end(self, following: Position | None) -> None:
        self.whole, self.last, self.next = following is not None, following is None, following


_PART_COST_BYTES: Final = 64
"""Octets that an empty part counts for."""


class Splice:
    """Puts one stream together from its segments. Not locked: its owner has one thread at a time."""

    __slots__ = (
        *("_go_on_at", "_most_bytes", "_parts", "_since", "_timeline", "_wait_s"),
        *("cursor", "differing_count", "gap_count", "held_bytes", "repeated_count"),
    )

    def __init__(self, *, wait_s: float, most_bytes: int) -> None:
        self._wait_s = wait_s
        self._most_bytes = most_bytes
        self._parts: dict[Position, _SplicedPart] = {}
        self._go_on_at: Position | None = None  # where the next publication begins
        self._since: float | None = None  # something behind the cursor waits
        self._timeline: int | None = None  # of what went out last
        #: (position of the part, number of the message in it) that goes out next. None: nothing came yet.
        self.cursor: tuple[Position, int] | None = None
        self.repeated_count = 0  #: messages that came once more
        self.gap_count = 0
        #: segments that were not what had gone out of them before: a source changed the stream
        self.differing_count = 0
        self.held_bytes = 0  #: octets of messages that wait

    @property
    def ended(self) -> bool:
        """Whether all of a publication has gone out, and nothing of another one is there."""
        if self.cursor is None:
            return False
        position, index = self.cursor
        part = self._parts.get(position)
        return part is not None and part.last and index == len(part.frames)

    def start(self, position: Position) -> None:
        if self.cursor is None and self._timeline is None:
            self.cursor = position, 0

    def missing(self) -> tuple[Position, Position] | None:
        """Return the part that is waited for, and the first one behind it that is there. None: nothing waits."""
        if self.cursor is None or self._since is None:
            return None
        behind = self._first_behind()
        return None if behind is None else (self.cursor[0], behind)

    def beginning_with(self, frame: Frame) -> list[Position]:
        """Return the parts that are known, the one at the cursor too, whose first message is this one at any time."""
        return [
            position
            for position, part in self._parts.items()
            if part.frames and part.frames[0][::2] == (frame.type_id, frame.payload)
        ]

    # -- in

    def go_on_at(self, position: Position) -> None:
        """Set where the next publication begins; earlier parts of it are dropped."""
        self._go_on_at = position
        for place in [place for place in self._parts if place.timeline == position.timeline and place < position]:
            self._drop_part(place, 0)

    def is_past(self, position: Position) -> bool:
        """Return whether all of the part at `position` has gone out, or was given up."""
        begins = self._go_on_at
        before = begins is not None and position.timeline == begins.timeline and position < begins
        return before or (self.cursor is not None and position < self.cursor[0])

    def lacks(self, position: Position) -> bool:
        part = self._parts.get(position)
        return not self.is_past(position) and (part is None or not (part.whole or part.last))

    def add(self, position: Position, index: int, frame: Frame, headers: tuple[Header, ...]) -> bool:
        """Take a message as it comes; return False where the ones before it in its part are missing."""
        if self.is_past(position):
            self.repeated_count += 1
            return True
        part = self._part(position, headers)
        if index < len(part.frames):
            self.repeated_count += 1
            self.differing_count += part.frames[index] != frame
            return True
        if index > len(part.frames) or part.whole:
            return False
        part.frames.append(frame)
        part.last = False
        self.held_bytes += FRAME_BYTES + len(frame.payload)
        return True

    def end_part(self, position: Position, count: int, following: Position | None) -> None:
        part = self._parts.get(position)
        if part is not None and not part.whole and len(part.frames) == count:
            part.end(following)

    def add_segment(self, segment: Segment) -> None:
        position, frames = segment.id.position, segment.frames
        if self.is_past(position):
            self.repeated_count += len(frames)
            return
        part = self._part(position, segment.headers)
        if part.whole:
            self.repeated_count += len(frames)
            return
        there = len(part.frames)
        if segment.id.next is None and len(frames) < there:
            self.repeated_count += len(frames)  # it ended for this source only
            return
        if part.frames != list(frames[:there]):
            self._replace(position, part, frames)
        else:
            self.repeated_count += there
            self._extend(part, frames[there:])
        part.end(segment.id.next)

    def _replace(self, position: Position, part: _SplicedPart, frames: Sequence[Frame]) -> None:
        """Go on by time in a part that is not what came before: of two that disagree the whole one counts."""
        self.differing_count += 1
        gone = self.cursor[1] if self.cursor is not None and self.cursor[0] == position else 0
        out = part.frames[:gone]
        self._drop_frames(part.frames[gone:])
        last = max((frame.timestamp - position.start_ms & CLOCK_MASK for frame in out), default=-1)
        part.frames = out
        self._extend(part, [frame for frame in frames if frame.timestamp - position.start_ms & CLOCK_MASK > last])

    def _extend(self, part: _SplicedPart, frames: Sequence[Frame]) -> None:
        part.frames += frames
        self.held_bytes += sum(FRAME_BYTES + len(frame.payload) for frame in frames)

    def _drop_frames(self, frames: Sequence[Frame]) -> None:
        self.held_bytes -= sum(FRAME_BYTES + len(frame.payload) for frame in frames)

    def _part(self, position: Position, headers: tuple[Header, ...]) -> _SplicedPart:
        part = self._parts.get(position)
        if part is None:
            part = self._parts[position] = _SplicedPart(headers)
            self.held_bytes += _PART_COST_BYTES
        return part

    def rename(self, timeline: int, to: int, shift_ms: int) -> bool:
        """Learn that what stood at `timeline` stands at `to`, and `shift_ms` later there.

        Times that went out stay what they were; those that come are of the new timeline. Return whether that is the
        one of which something went out last.
        """

        def moved(position: Position) -> Position:
            if position.timeline != timeline:
                return position
            return Position(to, max(position.start_ms + shift_ms, 0), position.part)

        def shifted(frame: Frame) -> Frame:
            return frame._replace(timestamp=frame.timestamp + shift_ms & CLOCK_MASK)

        parts = sorted(self._parts.items())
        self._parts = {}
        for position, part in parts:
            place = moved(position)
            if position.timeline == timeline:
                part.frames = [shifted(frame) for frame in part.frames]
                part.next = None if part.next is None else moved(part.next)
            other = self._parts.get(place)
            if other is None or (part.whole and not other.whole) or len(part.frames) > len(other.frames):
                self._parts[place] = part
        if self.cursor is not None:
            self.cursor = moved(self.cursor[0]), self.cursor[1]
        went_out = self._timeline == timeline
        if went_out:
            self._timeline = to
        self._go_on_at = None if self._go_on_at is None else moved(self._go_on_at)
        gone = {} if self.cursor is None else {self.cursor[0]: self.cursor[1]}
        self.held_bytes = _PART_COST_BYTES * len(self._parts)
        for position, part in self._parts.items():
            self.held_bytes += sum(FRAME_BYTES + len(frame.payload) for frame in part.frames[gone.get(position, 0) :])
        return went_out

    # -- out

    def take_ready(self, now: float, *, hopeless: bool = False) -> list[Output]:
        out: list[Output] = []
        while self._advance(out) or self._give_up(now, out, hopeless=hopeless):
            hopeless = hopeless and not out
        return out

    def next_deadline(self) -> float | None:
        """Return when `take_ready` is to be called though nothing came, seconds. None: not before something comes."""
        return None if self._since is None else self._since + self._wait_s

    def _advance(self, out: list[Output]) -> bool:
        if self.cursor is None:
            first = self._first_behind()
            if first is None:
                return False
            self.cursor, self._since = (first, 0), None
            return True
        position, index = self.cursor
        part = self._parts.get(position)
        if part is None:
            return False
        if index == 0 and part.frames:
            if position.timeline != self._timeline:
                self._timeline = position.timeline
                out.append(PublicationStart(position.timeline))
            out.append(SplicedHeaders(part.headers))
        fresh = part.frames[index:]
        out.extend(fresh)
        self._drop_frames(fresh)
        self.cursor = position, index + len(fresh)
        behind = part.next if part.whole else self._next_publication() if part.last else None
        if behind is not None:
            self._go_to(behind)
            return True
        self._since = None if fresh else self._since
        return bool(fresh)

    def _next_publication(self) -> Position | None:
        """Return the earliest part of a later publication. None: there is none, or this one goes on."""
        behind = self._first_behind()
        if behind is None or self.cursor is None or behind.timeline == self.cursor[0].timeline:
            return None
        begins = self._go_on_at
        return begins if begins is not None and begins.timeline == behind.timeline else behind

    def _first_behind(self) -> Position | None:
        """Return the earliest part behind the cursor at which a decoder can start. None: there is none."""
        positions = [position for position in self._parts if self.cursor is None or position > self.cursor[0]]
        return min((position for position in positions if not position.part), default=min(positions, default=None))

    def _give_up(self, now: float, out: list[Output], *, hopeless: bool) -> bool:
        """Tell a gap and go on behind it, where it was waited for long enough; return whether it was."""
        if self.cursor is None:
            return False
        behind = self._first_behind()
        if behind is None:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        hopeless = hopeless and behind.timeline != self.cursor[0].timeline
        if not hopeless and now - self._since < self._wait_s and self.held_bytes <= self._most_bytes:
            return False
        out.append(Gap(*self.cursor, behind))
        self.gap_count += 1
        self._go_to(behind)
        return True

    def _go_to(self, behind: Position) -> None:
        before, self.cursor, self._since = self.cursor, (behind, 0), None
        for position in [position for position in self._parts if self.is_past(position)]:
            self._drop_part(position, before[1] if before is not None and before[0] == position else 0)

    def _drop_part(self, position: Position, gone: int) -> None:
        part = self._parts.pop(position)
        self.held_bytes -= _PART_COST_BYTES
        self._drop_frames(part.frames[gone:])
