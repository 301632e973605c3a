"""Publishes an FLV source to an RTMP server, at its own pace, faster, or as fast as the connection takes it.

Theory of operation. A `Timeline` says when each tag is due. One pump, run by the connection's timer and by a job, puts
what is due into the log of the publication, which the connection follows as a viewer of a server does, and asks to be
woken for the next tag. So where the source is live (a target delay), what would reach the server too late is left out
by the rule of viewers, in whole groups or the rest of one, and the Sender tells of it as for any slow peer.

Without a target delay nothing is ever left out, since a test that is to say who lost a frame must not lose any at the
source. No more than `MAX_QUEUED_BYTES` waits then: the pump rests until the Sender has drained (its READY edge), and
the publisher falls behind real time, which `lag_s` tells, and catches up later as fast as the connection allows.

Synthetic frames are stamped when they are sent: with numbers that go on over loops, and with the wall clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final

from flowctl.core.fanout.following import FollowPlace
from flowctl.core.flow.counts import NO_COUNTS, Counts, Tally, total
from flowctl.core.flow.ledger import LedgerEntry
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import LIVE_POLICIES
from flowctl.core.flow.state import VIDEO_CLASSES, MessageClass, SendState, StateChange
from flowctl.core.outgoing.streamlog import CacheLimits
from flowctl.core.sending.episodes import LINE_SHORT, Episode
from flowctl.core.sending.settings import LIVE_RETURN_AFTER_S
from flowctl.deferred import Job
from flowctl.errors import ConfigError, FlowctlError, LimitExceededError
from flowctl.flv import FlvTag
from flowctl.reasons import DropReason
from flowctl.wire.client.base import RtmpClient
from flowctl.wire.client.pace import TagFeed, Timeline
from flowctl.wire.media.stamp import Stamper
from flowctl.wire.rtmp.commands import SET_DATA_FRAME
from flowctl.wire.rtmp.events import ClientEvent, PublishStarted, StreamEnded
from flowctl.wire.rtmp.wire import TYPE_DATA_AMF0
from flowctl.wire.streams.groups import GroupPlace, PictureGroups
from flowctl.wire.streams.wirelog import PublishChunks, WireLog

MAX_QUEUED_BYTES: Final = 1024 * 1024
"""Most octets that may wait in the Sender where nothing is left out: 3 s of a 2.5 Mbit/s stream, many times a key frame
of 10 Mbit/s."""
_LIVE_LIMITS: Final = Limits.parse("8MiB,0", "64MiB,0")
"""Where late pictures are left out, what waits is bounded by the target delay. These bound memory on a line that takes
only a trickle, so that not even a key frame gets through; one that takes nothing ends by `SenderSettings.stuck_s`."""

_TURN_TAGS: Final = 64
_TURN_BYTES: Final = 256 * 1024
"""Octets that one run of the pump sends before others on the thread get their turn (as `SenderSettings.turn_bytes`)."""

_LOOK_AGAIN_S: Final = 0.05
"""Longest rest of the pump while it waits for room, in case no edge of the Sender wakes it."""

_PIPE_LOOK_S: Final = 0.01
"""Time between two looks at a pipe in which there is nothing: a third of a picture's, and next to no work."""

MAX_PACE: Final = 10_000.0

_NO_CACHE: Final = CacheLimits(size_bytes=0)
"""Nobody comes later to a publication of ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublisherStatistics:
    publishing: bool = False
    sent: Counts = NO_COUNTS  # tags of the source, less those of the next two, by class; bytes of their bodies
    left_out: Counts = NO_COUNTS  # what would have come too late, and what was refused for that; bytes on the wire
    unsent: Counts = NO_COUNTS  # what waited when the connection ended
    bytes_queued: int = 0
    states_s: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # time in the states of the Sender
    max_delay_s: float = 0.0  # largest delay of an episode in which something was left out
    rounds: int = 0
    media_s: float = 0.0  # media time from the first tag to the last one sent
    lag_s: float = 0.0  # how far behind its time the next tag is; 0 where there is no pace
    max_lag_s: float = 0.0
    waits: int = 0
    waited_s: float = 0.0

    @property
    def hint(self) -> str:
        """What to do about what was left out; empty: nothing was."""
        return LINE_SHORT.hint if self.left_out.total_messages else ""

    @property
    def picture_share(self) -> float:
        """Share of the pictures so far that were not left out, 0 to 1."""
        lost, kept = (sum(counts.messages[item] for item in VIDEO_CLASSES) for counts in (self.left_out, self.sent))
        return kept / (kept + lost) if lost else 1.0


@dataclass(slots=True, eq=False, repr=False)
class RtmpPublisher(RtmpClient):
    """Publishes one source on one connection; closes it when the source ends."""

    source: Iterable[FlvTag | None]  # None: the next one has not come yet
    _: KW_ONLY
    pace: float = 1.0  # media seconds per second, 0 for as fast as it is taken
    loop: bool = False
    duration_s: float | None = None  # ends after so much media time. None: with the source.
    # How late pictures may reach the server before they are left out, in ms, as in `Limits`. 0: all are sent.
    target_delay_ms: int | None = 0
    stamped: bool = False  # the frames are stamped already, and go as they are
    # returns when the first tag is due, given the time at which the server agreed. None: then.
    begins: Callable[[float], float] | None = None
    on_sent: Callable[[FlvTag, MessageClass], None] | None = None
    _timeline: Timeline = field(init=False)
    _feed: TagFeed = field(init=False)
    _wire: WireLog | None = None  # the log of the publication. None: the server has not let us in.
    _groups: PictureGroups = field(default_factory=PictureGroups)
    _episode: Episode | None = None  # of a line that is too short. None: it never was.
    _max_delay_ms: float = 0.0
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
        if self._live and not self.pace:
            raise ConfigError("a source without pace has no target delay", hint="what is not live is sent whole")
        self._timeline = Timeline(self.source, loop=self.loop, duration_s=self.duration_s)
        stamper = None if self.stamped else Stamper()
        self._feed = TagFeed(tags=iter(self._timeline), pace=self.pace, stamper=stamper)

    # -- any thread

    @property
    def source_error(self) -> FlowctlError | None:
        """What went wrong with the source, which counts as its end. None: nothing."""
        return self._feed.error

    @property
    def _live(self) -> bool:
        return self.target_delay_ms != 0

    def _not_sent(self, *, at_end: bool = False) -> Counts:
        """Return the frames that were left out, or that waited at the end; headers are counted for each repetition."""
        dropped = self.connection.sender.statistics().dropped
        lost = total(counts for reason, counts in dropped.items() if (reason is DropReason.CLOSED) is at_end)
        first = MessageClass.KEY
        return Counts(*((0,) * first + row[first:] for row in (lost.messages, lost.sizes_bytes)))

    def statistics(self) -> PublisherStatistics:
        if self._job is None:
            return PublisherStatistics()
        connection = self.connection
        now, sender = connection.now(), connection.sender
        left_out, unsent = self._not_sent(), self._not_sent(at_end=True)
        since = self._waiting_since
        lag_s = max(now - self._feed.due_at(now), 0.0) if self.end is None else 0.0
        return PublisherStatistics(
            publishing=self._started_at is not None and self.end is None,
            sent=self._tally.frozen() - left_out - unsent,
            left_out=left_out,
            unsent=unsent,
            bytes_queued=sender.load().size_bytes,
            states_s=sender.statistics().time_in_states_s,
            max_delay_s=self._max_delay_ms / 1000,
            rounds=self._timeline.rounds,
            media_s=self._sent_ms / 1000,
            lag_s=lag_s,
            max_lag_s=max(self._feed.max_lag_s, lag_s),
            waits=self._waits,
            waited_s=self._waited_s + (now - since if since is not None else 0.0),
        )

    # -- the session

    def opened(self) -> None:
        self._job = self.connection.core.host.registration.job(self._pump, "publisher")
        RtmpClient.opened(self)

    def event(self, event: ClientEvent, now: float) -> None:
        if isinstance(event, PublishStarted) and self._started_at is None:
            self._started_at = now if self.begins is None else self.begins(now)
            self._feed.begin(self._started_at)
            self._follow_log()
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
            self.connection.core.host.registration.schedule(self._job)

    def ledger_entry(self, entry: LedgerEntry) -> None:
        self._max_delay_ms = max(self._max_delay_ms, entry.delay_max_ms)
        if self._live:
            if self._episode is None:
                fields = {"url": str(self.url)}
                self._episode = Episode(fields, self.connection.why, self._not_sent, LINE_SHORT)
            self._episode.note_entry(entry, closed=self.connection.sender.closed)

    def send_last(self, data: bytes) -> None:
        """Put the end of the stream behind all that was published."""
        if self._wire is None:
            RtmpClient.send_last(self, data)
        else:
            self._wire.log.append(data, MessageClass.CONTROL, self.connection.now())

    def _follow_log(self) -> None:
        """Follow the log of the publication, as a viewer who comes before it begins."""
        chunks = PublishChunks(self._protocol.stream_id, self.config.out_chunk_size)
        self._wire = WireLog("publication", chunks, cache=_NO_CACHE, flush_interval_s=0.0)
        if self._live:
            sender = self.connection.sender
            sender.set_settings(replace(sender.settings, return_after_s=LIVE_RETURN_AFTER_S))
            sender.set_limits(replace(_LIVE_LIMITS, target_delay_ms=self.target_delay_ms))
            sender.set_policy(LIVE_POLICIES["all-or-cut"])
        FollowPlace(self.connection, self._wire.fanouts, start=self._wire.log.tail)

    # -- the pump

    def _pump(self) -> None:
        """Send the tags that are due, as far as there is room, and schedule the next run."""
        if self._wire is None or self._leaving is not None or self.connection.sender.closed:
            return
        now = self.connection.now()
        if self._episode is not None:
            self._episode.check(now)
        budget = _TURN_BYTES
        for _ in range(_TURN_TAGS):
            if self._feed.next is None and not self._feed.over:
                self._feed.advance()
            if self._feed.next is None:
                if self._feed.over:
                    self.finish(self._feed.why_over)
                else:
                    self.wake_at(now + _PIPE_LOOK_S)
                return
            due_at = self._feed.due_at(now)
            if due_at > now:
                self.wake_at(due_at)
                return
            if not (self._live or self._has_room(now)):
                self.wake_at(now + _LOOK_AGAIN_S)
                return
            budget -= self._send(self._wire, now)
            if budget <= 0:
                break
        if self._job is not None:
            self.connection.core.host.registration.schedule(self._job)  # more is due, but others have their turn first

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

    def _send(self, wire: WireLog, now: float) -> int:
        (tag, self._sent_ms, message_class, info) = self._feed.take(now, time.time_ns() // 1000)
        type_id, timestamp, payload = tag
        place = self._groups.place(info, timestamp, payload, now)
        if type_id == TYPE_DATA_AMF0:
            # A file holds onMetaData bare; a server wants it wrapped, as OBS and FFmpeg send it.
            payload = SET_DATA_FRAME + payload.removeprefix(SET_DATA_FRAME)
            place = GroupPlace(MessageClass.CONTROL if info.sticky_key is None else MessageClass.HEADER)
        with contextlib.suppress(LimitExceededError):  # a header that is too long to be repeated is sent all the same
            wire.append(type_id, timestamp, payload, now=now, header_key=info.sticky_key, **place._asdict())
        self._tally.add(place.message_class, len(tag.payload))
        if self.on_sent is not None:
            self.on_sent(tag, message_class)
        return len(payload)
