"""Publishes an FLV source to an RTMP server, at its own pace, faster, or as fast as the connection takes it.

Theory of operation. A `Timeline` says when each tag is due. One pump, run by the connection's timer and by a job,
sends what is due and then asks to be woken for the next tag. It never queues more than `MAX_QUEUED_BYTES`: when that
much waits because the kernel takes no more, the pump rests until the Sender has drained (its READY edge), and the
publisher falls behind real time, which `lag_s` tells. Afterwards it catches up as fast as the connection allows; it
drops nothing, since a test that is to say who lost a frame must not lose any at the source.

Synthetic frames are stamped when they are sent: with numbers that go on over loops, and with the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from flowctl.core.flow.counts import NO_COUNTS, Counts, Tally
from flowctl.core.flow.state import MessageClass, SendState, StateChange
from flowctl.deferred import Job
from flowctl.errors import ConfigError, FlowctlError
from flowctl.flv import FlvTag
from flowctl.wire.client.base import RtmpClient
from flowctl.wire.client.pace import TagFeed, Timeline
from flowctl.wire.media.stamp import Stamper
from flowctl.wire.rtmp.events import ClientEvent, PublishStarted, StreamEnded

MAX_QUEUED_BYTES: Final = 1024 * 1024
"""Most octets that may wait in the Sender: 3 s of a 2.5 Mbit/s stream, many times a key frame of 10 Mbit/s."""

_TURN_TAGS: Final = 64
_TURN_BYTES: Final = 256 * 1024
"""Octets that one run of the pump sends before others on the thread get their turn (as `SenderSettings.turn_bytes`)."""

_LOOK_AGAIN_S: Final = 0.05
"""Longest rest of the pump while it waits for room, in case no edge of the Sender wakes it."""

MAX_PACE: Final = 10_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PublisherStatistics:
    publishing: bool = False
    sent: Counts = NO_COUNTS  # tags given to the Sender, by class, bytes of their bodies
    bytes_queued: int = 0
    rounds: int = 0
    media_s: float = 0.0  # media time from the first tag to the last one sent
    lag_s: float = 0.0  # how far behind its time the next tag is; 0 where there is no pace
    max_lag_s: float = 0.0
    waits: int = 0
    waited_s: float = 0.0


@dataclass(slots=True, eq=False, repr=False)
class RtmpPublisher(RtmpClient):
    """Publishes one source on one connection; closes it when the source ends."""

    source: Iterable[FlvTag]
    _: KW_ONLY
    pace: float = 1.0  # media seconds per second, 0 for as fast as it is taken
    loop: bool = False
    duration_s: float | None = None  # ends after so much media time. None: with the source.
    stamped: bool = False  # the frames are stamped already, and go as they are
    # returns when the first tag is due, given the time at which the server agreed. None: then.
    begins: Callable[[float], float] | None = None
    on_sent: Callable[[FlvTag, MessageClass], None] | None = None
    _timeline: Timeline = field(init=False)
    _feed: TagFeed = field(init=False)
    _job: Job | None = None  # runs the pump; made when the connection is there
    _sent_ms: int = 0  # media time of the last tag sent
    _started_at: float | None = None  # when the first tag was due; None: not publishing
    _waiting_since: float | None = None  # since when there is no room
    _tally: Tally = field(default_factory=Tally)
    _waits: int = 0
    _waited_s: float = 0.0

    def __post_init__(self) -> None:
        RtmpClient.__post_init__(self)
        self._protocol.publish()
        if not 0 <= self.pace <= MAX_PACE:
            raise ConfigError(f"pace is {self.pace}, it must be 0 (unpaced) to {MAX_PACE:g}")
        self._timeline = Timeline(self.source, loop=self.loop, duration_s=self.duration_s)
        stamper = None if self.stamped else Stamper()
        self._feed = TagFeed(tags=iter(self._timeline), pace=self.pace, stamper=stamper)

    # -- any thread

    @property
    def source_error(self) -> FlowctlError | None:
        """What went wrong with the source, which counts as its end. None: nothing."""
        return self._feed.error

    def statistics(self) -> PublisherStatistics:
        opened = self._job is not None
        now = self.connection.clock() if opened else 0.0
        since = self._waiting_since
        lag_s = max(now - self._feed.due_at(now), 0.0) if self.end is None else 0.0
        return PublisherStatistics(
            publishing=self._started_at is not None and self.end is None,
            sent=self._tally.frozen(),
            bytes_queued=self.connection.sender.load().size_bytes if opened else 0,
            rounds=self._timeline.rounds,
            media_s=self._sent_ms / 1000,
            lag_s=lag_s,
            max_lag_s=max(self._feed.max_lag_s, lag_s),
            waits=self._waits,
            waited_s=self._waited_s + (now - since if since is not None else 0.0),
        )

    # -- the session

    def opened(self) -> None:
        self._job = self.connection.registration.job(self._pump, "publisher")
        RtmpClient.opened(self)

    def event(self, event: ClientEvent, now: float) -> None:
        if isinstance(event, PublishStarted) and self._started_at is None:
            self._started_at = now if self.begins is None else self.begins(now)
            self._feed.begin(self._started_at)
            self._pump()
        elif isinstance(event, StreamEnded):
            self.connection.close_after_flush(f"the server ended the stream: {event.reason}")

    def due(self, now: float) -> None:
        del now
        self._pump()

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Go on when the Sender has drained; under its lock, so only a job is scheduled."""
        del change
        if state is SendState.READY and self._job is not None:
            self.connection.registration.schedule(self._job)

    # -- the pump

    def _pump(self) -> None:
        """Send the tags that are due, as far as there is room, and schedule the next run."""
        if self._started_at is None or self._leaving is not None or self.connection.sender.closed:
            return
        now = self.connection.clock()
        budget = _TURN_BYTES
        for _ in range(_TURN_TAGS):
            if self._feed.next is None:
                self.finish(self._feed.why_over)
                return
            due_at = self._feed.due_at(now)
            if due_at > now:
                self.wake_at(due_at)
                return
            if not self._has_room(now):
                self.wake_at(now + _LOOK_AGAIN_S)
                return
            budget -= self._send(now)
            if budget <= 0:
                break
        if self._job is not None:
            self.connection.registration.schedule(self._job)  # more is due, but others have their turn first

    def _has_room(self, now: float) -> bool:
        if self.connection.sender.load().size_bytes < MAX_QUEUED_BYTES:
            if self._waiting_since is not None:
                self._waited_s += now - self._waiting_since
                self._waiting_since = None
            return True
        if self._waiting_since is None:
            self._waiting_since = now
            self._waits += 1
        return False

    def _send(self, now: float) -> int:
        (tag, self._sent_ms, message_class), octets = self._feed.send(self._protocol, now, time.time_ns() // 1000)
        self.connection.sender.send(octets, message_class, droppable=False)
        self._tally.add(message_class, len(tag.payload))
        if self.on_sent is not None:
            self.on_sent(tag, message_class)
        return len(octets)
