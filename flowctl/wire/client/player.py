"""Plays an RTMP stream: counts what comes, finds what is missing, and can behave badly on purpose.

Theory of operation. Each message is classified and counted, video and audio are searched for gaps, and after a gap in
video the next picture has to be a key frame, or the viewer's picture would break. A `PlayProfile` says how to behave:

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
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.core.flow.counts import NO_COUNTS, Counts, Tally
from flowctl.core.flow.state import MessageClass
from flowctl.errors import ConfigError
from flowctl.flv import TAG_SCRIPT, FlvWriter
from flowctl.reasons import CloseReason
from flowctl.receiver import DEFAULT_CAPACITY_BYTES
from flowctl.wire.client.base import DEFAULT_CONFIG, RtmpClient, peer_gone
from flowctl.wire.client.gaps import GapFinder
from flowctl.wire.client.pace import MediaClock
from flowctl.wire.client.throttle import MAX_RATE, MIN_RATE, Constant, RatePace, read_size, receive_buffer
from flowctl.wire.media.stamp import read_stamp
from flowctl.wire.rtmp.events import ClientEvent, PlayStarted, StreamEnded
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.messages import EVENT_PING_REQUEST, UserControl, encode_control
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import RtmpUrl
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO, Message

_PROBE_S: Final = 0.1
"""How often a player that does not read asks whether its peer is still there."""

_PING_TICK_S: Final = 0.05
_NEVER: Final = float("inf")
_PICTURES: Final = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE})


MAX_PINGS_PER_S: Final = 100_000
_STALL_BUFFER_BYTES: Final = 64 * 1024
"""A stalled viewer shows when the buffers are full; with autotuning they may grow to 6 MiB before (tcp_rmem)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayProfile:
    """How a player behaves; times count from the first media message.

    Args:
        rate: bits per second it reads. None: as fast as it comes.
        resume_after_s: when rate and stall are lifted. None: they are not.
        pings_per_s: ping requests it sends per second, 0 to `MAX_PINGS_PER_S`.
        stay: whether to stay when the stream ends, for a publisher that may come back.
    """

    rate: int | None = None
    stall_after_s: float | None = None
    resume_after_s: float | None = None
    pings_per_s: int = 0
    stay: bool = False

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
        """Most bytes to read at once, for `start_client`: what a line delivers at once."""
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
    """A snapshot of a player.

    Args:
        playing: whether media has come and the connection is open.
        received: messages by class, bytes of their bodies.
        exact: whether the missing ones were counted by stamps; otherwise they were worked out from timestamps.
        broken_restarts: gaps in video after which something else than a key frame came first. Disposable frames may
            be left out without a key frame, so this is 0 for a source that has none.
        started_on_key: whether the first picture was a key frame. None: none came.
        first_frame_s: seconds from connecting to the first audio or video frame. None: none came.
        mean_delay_s: mean time from the publisher's stamp to here, of frames stamped after the play began: older ones
            come from the server's cache, and their age is no delay. None: there are none, or they have no stamps.
        media_s: media time from the first frame to the latest, by timestamps: more than `elapsed_s` by what the
            server's cache held.
        elapsed_s: seconds from the first media message to the last.
    """

    playing: bool = False
    received: Counts = NO_COUNTS
    wire_bytes: int = 0
    missing_video: int = 0
    missing_audio: int = 0
    exact: bool = False
    video_gaps: int = 0
    broken_restarts: int = 0
    started_on_key: bool | None = None
    first_frame_s: float | None = None
    mean_delay_s: float | None = None
    max_delay_s: float | None = None
    media_s: float = 0.0
    elapsed_s: float = 0.0
    stalled: bool = False
    pings_sent: int = 0
    written_tags: int = 0


@dataclass(slots=True)
class _Delay:
    """Times from stamp to arrival: their sum, number and largest, in seconds."""

    sum_s: float = 0.0
    count: int = 0
    max_s: float = field(default=-_NEVER)


class RtmpPlayer(RtmpClient):
    """Plays one stream on one connection."""

    __slots__ = (
        "_audio",
        "_delay",
        "_duration_s",
        "_first_at",
        "_joined_us",
        "_last_at",
        "_media_clock",
        "_needs_key",
        "_on_message",
        "_pace",
        "_ping_due",
        "_pings_sent",
        "_profile",
        "_stalled",
        "_stalled_at",
        "_tally",
        "_throttled_until",
        "_video",
        "_writer",
        "broken_restarts",
        "ended_by_server",
        "first_frame_s",
        "started_on_key",
        "write_error",
    )

    def __init__(
        self,
        url: RtmpUrl,
        profile: PlayProfile = HEALTHY,
        *,
        writer: FlvWriter | None = None,
        duration_s: float | None = None,
        config: ClientSessionConfig = DEFAULT_CONFIG,
        parameters: str = "",
        on_message: Callable[[Message, MessageClass], None] | None = None,
        on_end: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(url, config=config, parameters=parameters, on_end=on_end)
        self._protocol.play()
        self._profile: Final = profile
        self._writer = writer
        self._duration_s = duration_s
        self._on_message = on_message
        self._tally = Tally()
        self._video = GapFinder()
        self._audio = GapFinder()
        self._media_clock = MediaClock()
        self._delay = _Delay()
        self._joined_us = 0.0  # wall clock at which the play began; what is stamped earlier was cached by the server
        self._pace: RatePace | None = None  # None: not throttled (any more)
        self._throttled_until = _NEVER  # when the pace allows reading again; `_NEVER` while reading
        self._ping_due = _NEVER  # when the next pings are due
        self._pings_sent = 0
        self._first_at: float | None = None  # when the first media message came; everything counts from here
        self._last_at = 0.0
        self._stalled = False  # not reading on purpose
        self._stalled_at: float | None = None  # when it began, also after it was lifted
        self._needs_key = False  # pictures are missing and no key frame has come since
        self.broken_restarts = 0
        self.started_on_key: bool | None = None
        self.first_frame_s: float | None = None
        self.write_error: OSError | None = None  # why the writer took no more; told at the end
        self.ended_by_server = False  # the server said that the stream is over

    # -- any thread

    @property
    def stalled_at(self) -> float | None:
        """When the player stopped reading, on the connection's clock. None: it has not."""
        return self._stalled_at

    def statistics(self) -> PlayerStatistics:
        """Return a frozen snapshot. Figures of the connection's thread may be a step apart."""
        delay, first_at = self._delay, self._first_at
        return PlayerStatistics(
            playing=first_at is not None and self.end is None,
            received=self._tally.frozen(),
            wire_bytes=self._protocol.bytes_received,
            missing_video=self._video.missing,
            missing_audio=self._audio.missing,
            exact=self._video.stamped or self._audio.stamped,
            video_gaps=self._video.gaps,
            broken_restarts=self.broken_restarts,
            started_on_key=self.started_on_key,
            first_frame_s=self.first_frame_s,
            mean_delay_s=delay.sum_s / delay.count if delay.count else None,
            max_delay_s=delay.max_s if delay.count else None,
            media_s=self._media_clock.covered_ms / 1000,
            elapsed_s=0.0 if first_at is None else self._last_at - first_at,
            stalled=self._stalled,
            pings_sent=self._pings_sent,
            written_tags=0 if self._writer is None else self._writer.tags_written,
        )

    # -- the session

    def received(self, data: memoryview) -> None:
        """Take input; then rest if more was read than the rate allows."""
        super().received(data)
        pace = self._pace
        if pace is not None and self._leaving is None:
            now = self.connection.clock()
            pace.took(len(data), now)
            if not pace.allowance(now):
                self._throttled_until = pace.wake_at(now)
                self.connection.receiver.pause(pace, "read rate")
                self._plan(now)

    def event(self, event: ClientEvent, now: float) -> None:
        """Note when the play begins and ends."""
        if isinstance(event, PlayStarted):
            if self._first_at is None:
                self._joined_us = time.time() * 1e6
            if self._profile.pings_per_s and self._ping_due == _NEVER:
                self._ping_due = now
                self._plan(now)
        elif isinstance(event, StreamEnded):
            self.ended_by_server = True
            if not self._profile.stay:
                self.finish("the stream ended")

    def media(self, message: Message, now: float) -> None:
        """Count one message and look at it."""
        info = inspect(message.type_id, message.payload)
        message_class = info.message_class
        self._tally.add(message_class, len(message.payload))
        if self._first_at is None:
            self._begin(now)
        self._last_at = now
        if message_class in _PICTURES:
            self._picture(message, message_class, now)
        elif message_class is MessageClass.AUDIO:
            self._media_clock.frame(message.timestamp)
            self._audio.frame(message.timestamp, self._stamp(message))
            self._note_first(now)
        if self._on_message is not None and message.type_id in (TYPE_AUDIO, TYPE_VIDEO):
            self._on_message(message, message_class)
        if self._writer is not None:
            self._write(message)

    def due(self, now: float) -> None:
        """Do what the profile wants by now."""
        profile, first_at = self._profile, self._first_at
        pace = self._pace
        if pace is not None and now >= self._throttled_until:
            if pace.allowance(now):
                self._throttled_until = _NEVER
                self.connection.receiver.resume(pace)
            else:
                self._throttled_until = pace.wake_at(now)
        if first_at is not None:
            if profile.resume_after_s is not None and now >= first_at + profile.resume_after_s:
                self._lift()
            elif profile.stall_after_s is not None and now >= first_at + profile.stall_after_s:
                self._stall(now)
            if self._duration_s is not None and now >= first_at + self._duration_s:
                self.finish("played as long as was asked for")
                return
        if self._stalled and peer_gone(self.sock):
            self.connection.close(CloseReason.PEER_RESET, "the server ended the connection while it was not read")
            return
        if now >= self._ping_due:
            self._ping(now)
        self._plan(now)

    # -- inner steps

    def _begin(self, now: float) -> None:
        self._first_at = now
        if self._profile.rate is not None:
            self._pace = RatePace(Constant(self._profile.rate), now)
        self._plan(now)

    def _note_first(self, now: float) -> None:
        if self.first_frame_s is None:
            self.first_frame_s = now - self.connection.opened_at

    def _picture(self, message: Message, message_class: MessageClass, now: float) -> None:
        is_key = message_class is MessageClass.KEY
        if self.started_on_key is None:
            self.started_on_key = is_key
        self._note_first(now)
        self._media_clock.frame(message.timestamp)
        if self._video.frame(message.timestamp, self._stamp(message)):
            self._needs_key = True
        if self._needs_key:
            self._needs_key = False
            self.broken_restarts += not is_key

    def _stamp(self, message: Message) -> int | None:
        """Return the number of a stamped frame, and note its delay unless it is older than our play."""
        found = read_stamp(message.payload)
        if found is None:
            return None
        if found[1] >= self._joined_us:
            delay_s = time.time() - found[1] / 1e6
            delay = self._delay
            delay.sum_s += delay_s
            delay.count += 1
            delay.max_s = max(delay.max_s, delay_s)
        return found[0]

    def _write(self, message: Message) -> None:
        if self._writer is None or self.write_error is not None:
            return
        if message.type_id in (TYPE_AUDIO, TYPE_VIDEO, TYPE_DATA_AMF0):
            type_id = TAG_SCRIPT if message.type_id == TYPE_DATA_AMF0 else message.type_id
            try:
                self._writer.write(type_id, message.timestamp, message.payload)
            except OSError as error:
                # A full disk, or a program behind a pipe that has seen enough: no fault of ours or of the server's.
                self.write_error = error
                self.finish("what came could not be written")

    def _stall(self, now: float) -> None:
        if self._stalled_at is None:
            self._stalled = True
            self._stalled_at = now
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
        count = max(round(self._profile.pings_per_s * _PING_TICK_S), 1)
        ping = encode_control(UserControl(EVENT_PING_REQUEST, timestamp=round(now * 1000) & 0xFFFFFFFF))
        sender.send(b"".join(self._protocol.send_message(ping) for _ in range(count)), droppable=False)
        self._pings_sent += count

    def _plan(self, now: float) -> None:
        """Ask to be woken at the earliest time at which there is something to do."""
        profile, first_at = self._profile, self._first_at
        times = [self._throttled_until, self._ping_due]
        if first_at is not None:
            if profile.resume_after_s is not None and (self._stalled or self._pace is not None):
                times.append(first_at + profile.resume_after_s)
            if profile.stall_after_s is not None and self._stalled_at is None:
                times.append(first_at + profile.stall_after_s)
            if self._duration_s is not None:
                times.append(first_at + self._duration_s)
        if self._stalled:
            times.append(now + _PROBE_S)
        earliest = min(times)
        self.wake_at(earliest if earliest < _NEVER else None)
