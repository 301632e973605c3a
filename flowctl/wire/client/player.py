"""Plays an RTMP stream: counts what comes, finds what is missing, and can behave badly on purpose.

Theory of operation. Each message is classified and counted, and a `ViewerMeasure` finds what is missing and how late
frames came. A `PlayProfile` says how to behave:

- ``rate``: reads go at the pace of a line; when it allows nothing the Receiver is held until it does again. The
  receive buffer of the socket is made small before connecting (`player_sockets`), so that the sender feels the rate
  within a second and not after megabytes in two kernels.
- ``stall_after_s``: the Receiver is held for good. Nobody reads any more, so whether the peer is still there is asked
  of the kernel from time to time.
- ``resume_after_s``: rate and stall are lifted again.
- ``pings_per_s``: ping requests are sent at this rate, whether they are answered or not.

A player owns no thread and no timer of its own: thousands can share one poll group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from flowctl.core.flow.counts import NO_COUNTS, Counts, Tally
from flowctl.core.flow.histogram import DelayHistogram
from flowctl.core.flow.state import MessageClass
from flowctl.errors import ConfigError
from flowctl.flv import TAG_SCRIPT, FlvWriter
from flowctl.reasons import CloseReason
from flowctl.receiver import DEFAULT_CAPACITY_BYTES
from flowctl.wire.client.base import RtmpClient, peer_gone
from flowctl.wire.client.measure import OTHER, STAMP, StreamClock, ViewerMeasure, describe
from flowctl.wire.client.pace import MediaClock
from flowctl.wire.client.throttle import MAX_RATE, MIN_RATE, Constant, RatePace, read_size, receive_buffer
from flowctl.wire.rtmp.events import ClientEvent, PlayStarted, StreamEnded
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.messages import EVENT_PING_REQUEST, UserControl, encode_control
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO, Message

_PROBE_S: Final = 0.1
"""How often a player that does not read asks whether its peer is still there."""

_PING_TICK_S: Final = 0.05
_NEVER: Final = float("inf")
BEGINS_S: Final = 5.0
"""Least time for a stream to begin: its publisher may be starting, and some servers send nothing before a key frame."""


MAX_PINGS_PER_S: Final = 100_000
_STALL_BUFFER_BYTES: Final = 64 * 1024
"""Receive buffer of a viewer that stalls: the server sees it when buffers are full, and autotuning goes up to 6 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayProfile:
    """How a player behaves; times count from the first media message."""

    rate: int | None = None  # bits per second it reads. None: as fast as it comes.
    stall_after_s: float | None = None
    resume_after_s: float | None = None  # when rate and stall are lifted. None: they are not.
    pings_per_s: int = 0  # ping requests it sends per second, 0 to `MAX_PINGS_PER_S`
    stay: bool = False  # whether to stay when the stream ends, for a publisher that may come back

    def __post_init__(self) -> None:
        if self.rate is not None and not MIN_RATE <= self.rate <= MAX_RATE:
            raise ConfigError(f"rate is {self.rate} bit/s, it must be {MIN_RATE} to {MAX_RATE}")
        for name in ("stall_after_s", "resume_after_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} is {value}, it must be 0 or more seconds")
        if not 0 <= self.pings_per_s <= MAX_PINGS_PER_S:
            raise ConfigError(f"pings_per_s is {self.pings_per_s}, it must be 0 to {MAX_PINGS_PER_S}")

    @property
    def capacity_bytes(self) -> int:
        """Most bytes to read at once, for `start_client`: one packet or lump of the line."""
        return DEFAULT_CAPACITY_BYTES if self.rate is None else read_size(self.rate)

    @property
    def receive_buffer_bytes(self) -> int:
        """SO_RCVBUF for `start_client`, 0 for the kernel's choice; small for a viewer that is slow or stalls."""
        if self.rate is not None:
            return receive_buffer(self.rate)
        return 0 if self.stall_after_s is None else _STALL_BUFFER_BYTES


HEALTHY: Final = PlayProfile()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayerStatistics:
    playing: bool = False  # whether media has come and the connection is open
    received: Counts = NO_COUNTS  # messages by class, bytes of their bodies
    wire_bytes: int = 0
    missing_video: int = 0
    missing_audio: int = 0
    # whether the missing ones were counted by stamps; otherwise they were worked out from timestamps.
    exact: bool = False
    video_gaps: int = 0
    # gaps in video after which something else than a key frame came first. Disposable frames may be left out without a
    # key frame, so this is 0 for a source that has none.
    broken_restarts: int = 0
    started_on_key: bool | None = None  # whether the first picture was a key frame. None: none came.
    first_frame_s: float | None = None  # seconds from connecting to the first audio or video frame. None: none came.
    # mean time from the publisher's stamp to here, of frames stamped after the play began: older ones come from the
    # server's cache, and their age is no delay. None: there are none, or they have no stamps.
    mean_delay_s: float | None = None
    max_delay_s: float | None = None
    # media time from the first frame to the latest, by timestamps: more than `elapsed_s` by what the server's cache
    # held.
    media_s: float = 0.0
    elapsed_s: float = 0.0  # seconds from the first media message to the last
    stalled: bool = False
    pings_sent: int = 0
    written_tags: int = 0


@dataclass(slots=True, eq=False, repr=False)
class RtmpPlayer(RtmpClient):
    profile: PlayProfile = HEALTHY
    _: KW_ONLY
    writer: FlvWriter | None = None
    # leaves so long after the first message; with none, that long or `BEGINS_S` after the play began. None: stays.
    duration_s: float | None = None
    on_message: Callable[[Message, MessageClass], None] | None = None  # called with each audio and video message
    measure: ViewerMeasure = field(default_factory=lambda: ViewerMeasure(StreamClock()))  # what it has received
    first_frame_s: float | None = None
    # when it stopped reading, on the connection's clock; also after that was lifted. None: it has not.
    stalled_at: float | None = None
    write_error: OSError | None = None  # why the writer took no more. None: it takes all.
    ended_by_server: bool = False  # the server said that the stream is over
    _tally: Tally = field(default_factory=Tally)
    _media_clock: MediaClock = field(default_factory=MediaClock)
    _pace: RatePace | None = None  # None: not throttled (any more)
    _throttled_until: float = _NEVER  # when the pace allows reading again; `_NEVER` while reading
    _ping_due: float = _NEVER  # when the next pings are due
    _pings_sent: int = 0
    _asked_at: float | None = None  # when the server agreed to the play
    _first_at: float | None = None  # when the first media message came; everything counts from here
    _last_at: float = 0.0
    _stalled: bool = False  # not reading on purpose

    def __post_init__(self) -> None:
        RtmpClient.__post_init__(self)
        self._protocol.play()

    # -- any thread

    def statistics(self) -> PlayerStatistics:
        measure, first_at = self.measure, self._first_at
        delays = measure.delays if measure.clock.source == STAMP else DelayHistogram()
        return PlayerStatistics(
            playing=first_at is not None and self.end is None,
            received=self._tally.frozen(),
            wire_bytes=self._protocol.bytes_received,
            missing_video=measure.missing_video,
            missing_audio=measure.missing_audio,
            exact=measure.exact,
            video_gaps=measure.video_gaps,
            broken_restarts=measure.broken_restarts,
            started_on_key=measure.started_on_key,
            first_frame_s=self.first_frame_s,
            mean_delay_s=None if (mean_ms := delays.mean_ms) is None else mean_ms / 1000,
            max_delay_s=delays.max_us / 1e6 if delays.buckets else None,
            media_s=self._media_clock.covered_ms / 1000,
            elapsed_s=0.0 if first_at is None else self._last_at - first_at,
            stalled=self._stalled,
            pings_sent=self._pings_sent,
            written_tags=0 if self.writer is None else self.writer.tags_written,
        )

    @property
    def nothing_came(self) -> bool:
        """Whether the server agreed to the play, and no sound or picture came; data of the server's own is neither."""
        return self._asked_at is not None and not any(self._tally[MessageClass.HEADER : MessageClass.DATA])

    # -- the session

    def received(self, data: memoryview) -> None:
        RtmpClient.received(self, data)
        pace = self._pace
        if pace is not None and self._leaving is None:
            now = self.connection.now()
            pace.allowance(now)  # what it could have carried while nothing came is lost: seen before the read ends that
            pace.note_read(len(data), now)
            if not pace.allowance(now):
                self._throttled_until = pace.wake_at(now)
                self.connection.receiver.pause(pace, "read rate")
                self._plan(now)

    def event(self, event: ClientEvent, now: float) -> None:
        if isinstance(event, PlayStarted):
            if self._first_at is None:
                self.measure.asked_us = time.time_ns() // 1000
                self._asked_at = now
                self._plan(now)
            if self.profile.pings_per_s and self._ping_due == _NEVER:
                self._ping_due = now
                self._plan(now)
        elif isinstance(event, StreamEnded):
            self.ended_by_server = True
            if not self.profile.stay:
                self.finish("the stream ended")

    def media(self, message: Message, now: float) -> None:
        info = inspect(message.type_id, message.payload)
        message_class = info.message_class
        self._tally.add(message_class, len(message.payload))
        if self._first_at is None:
            self._begin(now)
        self._last_at = now
        frame = describe(info, message.payload)
        if frame.kind != OTHER:
            self._media_clock.count_frame(message.timestamp)
            if self.first_frame_s is None:
                self.first_frame_s = now - self.connection.opened_at
        self.measure.count_media([(message.timestamp, frame)], time.time_ns() // 1000)
        if self.on_message is not None and message.type_id in (TYPE_AUDIO, TYPE_VIDEO):
            self.on_message(message, message_class)
        if self.writer is not None:
            self._write(message)

    def due(self, now: float) -> None:
        profile, first_at = self.profile, self._first_at
        pace = self._pace
        if pace is not None and now >= self._throttled_until:
            if pace.allowance(now):
                self._throttled_until = _NEVER
                pace.note_read(0, now)  # from now on the line is idle, unless something waits
                self.connection.receiver.resume(pace)
            else:
                self._throttled_until = pace.wake_at(now)
        if first_at is not None:
            if profile.resume_after_s is not None and now >= first_at + profile.resume_after_s:
                self._lift()
            elif profile.stall_after_s is not None and now >= first_at + profile.stall_after_s:
                self._stall(now)
        if now >= self._ends_at:
            self.finish("nothing came" if self.nothing_came else "played as long as was asked for")
            return
        if self._stalled and peer_gone(self.sock):
            self.connection.close(CloseReason.PEER_RESET, "the server ended the connection while it was not read")
            return
        if now >= self._ping_due:
            self._ping(now)
        self._plan(now)

    # -- inner steps

    @property
    def _ends_at(self) -> float:
        if self.duration_s is None:
            return _NEVER
        if self._first_at is not None:
            return self._first_at + self.duration_s
        return _NEVER if self._asked_at is None else self._asked_at + max(self.duration_s, BEGINS_S)

    def _begin(self, now: float) -> None:
        self._first_at = now
        if self.profile.rate is not None:
            self._pace = RatePace(Constant(self.profile.rate), now)
        self._plan(now)

    def _write(self, message: Message) -> None:
        if self.writer is None or self.write_error is not None:
            return
        if message.type_id in (TYPE_AUDIO, TYPE_VIDEO, TYPE_DATA_AMF0):
            type_id = TAG_SCRIPT if message.type_id == TYPE_DATA_AMF0 else message.type_id
            try:
                self.writer.write(type_id, message.timestamp, message.payload)
            except OSError as error:
                # A full disk, or a program behind a pipe that has seen enough: no fault of ours or of the server's.
                self.write_error = error
                self.finish("what came could not be written")

    def _stall(self, now: float) -> None:
        if self.stalled_at is None:
            self._stalled = True
            self.stalled_at = now
            self.connection.receiver.pause(self, "stalled on purpose")

    def _lift(self) -> None:
        """Lift rate and stall; the socket's buffer stays as small as it is."""
        if self._stalled:
            self._stalled = False
            self.connection.receiver.resume(self)
        pace, self._pace = self._pace, None
        if pace is not None:
            self._throttled_until = _NEVER
            self.connection.receiver.resume(pace)

    def _ping(self, now: float) -> None:
        """Send the pings that are due, in one message of ours, unless the last ones have not gone out yet."""
        self._ping_due = now + _PING_TICK_S
        sender = self.connection.sender
        if sender.blocked or sender.closed:
            return  # the server does not take them; to queue them would only fill our own memory
        count = max(round(self.profile.pings_per_s * _PING_TICK_S), 1)
        ping = encode_control(UserControl(EVENT_PING_REQUEST, timestamp=round(now * 1000) & 0xFFFFFFFF))
        sender.send(b"".join(self._protocol.send_message(ping) for _ in range(count)), droppable=False)
        self._pings_sent += count

    def _plan(self, now: float) -> None:
        """Ask to be woken at the earliest time at which there is something to do."""
        profile, first_at = self.profile, self._first_at
        times = [self._throttled_until, self._ping_due, self._ends_at]
        if first_at is not None:
            if profile.resume_after_s is not None and (self._stalled or self._pace is not None):
                times.append(first_at + profile.resume_after_s)
            if profile.stall_after_s is not None and self.stalled_at is None:
                times.append(first_at + profile.stall_after_s)
        if self._stalled:
            times.append(now + _PROBE_S)
        earliest = min(times)
        self.wake_at(earliest if earliest < _NEVER else None)
