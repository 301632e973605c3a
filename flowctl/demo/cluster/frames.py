"""What one encoder publishes to several origins, what a viewer got of it, and the two held against each other.

A synthetic source stamps each frame with its number and with the time at which it is due, not with that at which some
publisher sends it, so that origins get equal frames and cut equal segments. What was produced is remembered by number
and checksum, and so is what came: lost, doubled, disordered, changed; how late it was.

A viewer is judged from its first frame on: what was published before is not its own. The time to *recover* from an
event is the time until it has a frame that was published after it, beyond its usual delay; or, where later frames are
later than the latest of the seconds before the event, the time until the last of these has come.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from flowctl.core.flow.state import MessageClass
from flowctl.flv import FlvTag
from flowctl.pollgroup import PollGroup
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import start_client
from flowctl.wire.client.player import PlayProfile, RtmpPlayer
from flowctl.wire.client.publisher import RtmpPublisher
from flowctl.wire.media.stamp import has_slot, read_stamp, stamp
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.wire import Message

_AUDIO_BIT_RATE: Final = 96_000
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
        self.checksums: dict[FrameKey, int] = {}  # checksums of the frames that were made, by type and number

    @property
    def last(self) -> dict[int, int]:
        # Keys are in the order of their numbers, so the last of each type stays; a list, since it grows meanwhile.
        return dict(list(self.checksums))

    @property
    def begun_us(self) -> int | None:
        """When the first frame was due, in microseconds since 1970. None: no publisher has begun."""
        with self._lock:
            return self._begun_us

    def __iter__(self) -> Iterator[FlvTag]:
        numbers: dict[int, int] = {}
        for tag in self._source.tags(self._duration_s):
            begun_us = self.begun_us
            if begun_us is None:
                return  # no publisher has begun
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
        source = SyntheticSource(
            video_bit_rate=bit_rate - _AUDIO_BIT_RATE, audio_bit_rate=_AUDIO_BIT_RATE, key_interval_s=key_interval_s
        )
        self.frames: Final = DueFrames(source, duration_s)
        self._group = group
        self._publishers = [
            RtmpPublisher(parse_address(url), self.frames, stamped=True, begins=self.frames.begin) for url in urls
        ]

    def start(self, after_first: Callable[[], object] = lambda: None) -> None:
        """Start all publishers; call `after_first` between the first and the others, which then catch up."""
        first, *others = self._publishers
        start_client(self._group, first)
        after_first()
        for publisher in others:
            start_client(self._group, publisher)

    @property
    def finished(self) -> bool:
        """Whether every publisher has ended, by having sent all or by losing its server."""
        return all(publisher.end is not None for publisher in self._publishers)

    @property
    def sent_all(self) -> int:
        return sum(publisher.end is not None and publisher.end.as_wanted for publisher in self._publishers)


class SeenFrame(NamedTuple):
    """One frame that came."""

    type_id: int
    number: int
    checksum: int
    timestamp: int
    due_us: int
    came_us: int


class FrameViewer:
    """Plays a stream and keeps its frames."""

    def __init__(self, label: str, url: str) -> None:
        self.label: Final = label
        self.seen: Final[list[SeenFrame]] = []
        self._player = RtmpPlayer(parse_address(url), PlayProfile(stay=True), on_message=self._note_frame)

    def start(self, group: PollGroup) -> None:
        start_client(group, self._player)

    def _note_frame(self, message: Message, message_class: MessageClass) -> None:
        del message_class
        stamp = read_stamp(message.payload)
        if stamp is not None:
            number, due_us = stamp
            came_us = time.time_ns() // 1000
            checksum = zlib.crc32(message.payload)
            self.seen.append(SeenFrame(message.type_id, number, checksum, message.timestamp, due_us, came_us))

    @property
    def cut(self) -> str:
        """Why its connection ended. Empty: it has not."""
        end = self._player.end
        return "" if end is None else str(end)

    def has(self, type_id: int, number: int) -> bool:
        return any(item.type_id == type_id and item.number == number for item in self.seen[-_TAIL_FRAMES:])


_TAIL_FRAMES: Final = 200
"""Frames among which the last one of a stream is searched."""


_USUAL_US: Final = 5_000_000
"""Time before an event that says what is usual."""
_SLACK_US: Final = 100_000
"""Delay above the largest before an event with which a viewer still counts as recovered."""
_APART_US: Final = 2_000_000
_BEGINNING_US: Final = 2_000_000
"""Time of a viewer's begin that is left out of delays: frames from the server's cache are older than late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewerVerdict:
    """One viewer, at a server."""

    node: str = ""
    label: str
    frames: int
    lost: int  # frames published after its first one that it never got
    doubled: int
    disordered: int  # frames that came behind a later one of their track
    changed: int  # frames with other octets than were published
    delay_p50_ms: float | None  # from when a frame was due to when it came, median. None: too short a play.
    delay_p99_ms: float | None
    longest_pause_s: float
    recovered_s: float | None

    @property
    def whole(self) -> bool:
        return self.frames > 0 and not (self.lost or self.doubled or self.disordered or self.changed)


def judge(
    label: str,
    seen: Sequence[SeenFrame],
    published: Mapping[FrameKey, int],
    event_us: int | None = None,
    *,
    node: str = "",
) -> ViewerVerdict:
    counts = Counter((item.type_id, item.number) for item in seen)
    first: dict[int, int] = {}
    latest: dict[int, int] = {}
    disordered = 0
    for item in seen:
        first.setdefault(item.type_id, item.number)
        disordered += item.number < latest.get(item.type_id, -1)
        latest[item.type_id] = max(item.number, latest.get(item.type_id, -1))
    due = [key for key in published if key[0] in first and key[1] >= first[key[0]]]
    delays = sorted(delay_us for _, delay_us in delays_of(seen))
    return ViewerVerdict(
        node=node,
        label=label,
        frames=len(counts),
        # A track of which nothing came at all is lost from its begin.
        lost=sum(key not in counts for key in due) + sum(bool(seen) and key[0] not in first for key in published),
        doubled=sum(count - 1 for count in counts.values()),
        disordered=disordered,
        changed=sum(published.get((item.type_id, item.number)) != item.checksum for item in seen),
        delay_p50_ms=_quantile(delays, 0.5),
        delay_p99_ms=_quantile(delays, 0.99),
        longest_pause_s=_longest_pause_s(seen, event_us),
        recovered_s=None if event_us is None else recovered_s(seen, event_us),
    )


def delays_of(seen: Sequence[SeenFrame]) -> list[tuple[int, int]]:
    """Return (when it came, delay) of each frame in microseconds, without those of the viewer's begin."""
    begun_us = seen[0].came_us if seen else 0
    return [(item.came_us, item.came_us - item.due_us) for item in seen if item.came_us >= begun_us + _BEGINNING_US]


def _quantile(ordered: Sequence[int], share: float) -> float | None:
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] / 1000, 1) if ordered else None


def _longest_pause_s(seen: Sequence[SeenFrame], event_us: int | None) -> float:
    times = [item.came_us for item in seen]
    pauses = [
        later - max(sooner, event_us or 0)
        for sooner, later in itertools.pairwise(times)
        if event_us is None or later >= event_us
    ]
    return round(max(pauses, default=0) / 1e6, 3)


def recovered_s(seen: Sequence[SeenFrame], event_us: int) -> float:
    """Return how long after an event frames came as before."""
    delays = delays_of(seen)
    before = sorted(delay_us for came_us, delay_us in delays if event_us - _USUAL_US <= came_us < event_us) or [0]
    late_us = event_us
    for came_us, delay_us in delays:
        # What is late seconds after all was well again is of something else.
        if delay_us > before[-1] + _SLACK_US and late_us <= came_us <= late_us + _APART_US:
            late_us = came_us
    first_us = min((item.came_us for item in seen if item.due_us >= event_us), default=event_us)
    beyond_us = first_us - event_us - before[len(before) // 2]
    return round(max(late_us - event_us, beyond_us, 0) / 1e6, 3)


def delay_line(seen: Iterable[SeenFrame], begun_us: int, step_s: float = 0.2) -> list[tuple[float, float]]:
    """Return (seconds since `begun_us`, largest delay in ms) for each step in which a frame came."""
    most: dict[int, int] = {}
    for came_us, delay_us in delays_of(list(seen)):
        step = int((came_us - begun_us) / 1e6 / step_s)
        most[step] = max(most.get(step, 0), delay_us)
    return [(round(step * step_s, 3), delay_us / 1000) for step, delay_us in sorted(most.items())]
