"""A live session that tells the recorder what happens to it.

A class of its own, so that a server without records has none of this: not a test, not a byte per connection. Every
method does what `LiveSession` does and puts a record beside it; nothing in here decides anything.
"""

from __future__ import annotations

from typing import Any, Final

from flowctl.errors import LimitExceededError
from flowctl.flow.ledger import LedgerEntry, LedgerKind
from flowctl.flow.policy import DropPolicy
from flowctl.flow.state import SendState
from flowctl.live.config import LiveConfig
from flowctl.live.hub import Hub
from flowctl.live.records.flights import name_flight
from flowctl.live.records.sampler import Sampler
from flowctl.live.roles import Playing
from flowctl.live.session import LiveSession
from flowctl.log import redact_text
from flowctl.reasons import CloseReason
from flowctl.rtmp import events as rtmp_events
from flowctl.rtmp.server.states import StreamState
from flowctl.rtmp.url import DEFAULT_APP
from flowctl.telemetry.events import ConnectionEvents, Events, Sight
from flowctl.telemetry.schema import EventName, Role

CONTROL_LANE: Final = "control_lane"
"""Name under which records know the limits on what waits in the control lane of a Sender: `control_bytes` and
`control_messages` of its settings. Who goes over them makes us answer, and does not read the answers."""
_RATE_LIMIT: Final = "messages_per_second"


class RecordedSession(LiveSession):
    """A live session with records. Arguments as of `LiveSession`.

    Args:
        events: of the server.
        sampler: samples its connection. None: there are no samples.
    """

    __slots__ = ("_ended_at", "_events", "_sampler", "_started", "_told", "record")

    def __init__(
        self, hub: Hub, config: LiveConfig, policy: DropPolicy, now: float, *, events: Events, sampler: Sampler | None
    ) -> None:
        super().__init__(hub, config, policy, now)
        self._events = events
        self._sampler = sampler
        self._told: LimitExceededError | None = None  # the last limit that was recorded; it comes by more than one way
        self._started = False  # it has been given media
        self._ended_at: float | None = None  # when its Sender ended
        self.record: ConnectionEvents | None = None  # made when it is opened; read by the sampler's thread

    # -- life

    def opened(self) -> None:
        """Record that the connection is there."""
        self._begin()
        super().opened()

    def _begin(self) -> ConnectionEvents:
        record = self.record
        if record is None:  # a connection that ended before its thread had it is opened by its end
            connection = self.connection
            record = self._events.connection(connection.number, connection.peer, connection.opened_at)
            record.opened()
            self.record = record
        return record

    def closed(self, reason: CloseReason, details: str) -> None:
        """Record the end, with the totals."""
        record = self._begin()
        connection = self.connection
        now = connection.now() if self._ended_at is None else self._ended_at
        if reason is CloseReason.LIMIT_HIT and self._limit_hit is None:
            # Of all limits this one is the Sender's: the wire session knows nothing of it.
            self._limit_hit = CONTROL_LANE
            record.limit_hit(now, CONTROL_LANE, None, None)
        super().closed(reason, details)
        statistics = connection.sender.statistics()
        record.closed(
            now,
            reason,
            redact_text(details),
            accepted=statistics.accepted,
            sent=statistics.sent,
            dropped=statistics.dropped,
            sent_bytes=statistics.bytes_sent,
            states_s=statistics.time_in_states_s,
            limit=self._limit_hit,
            agent=self.user_agent,
        )
        if self._sampler is not None:
            self._sampler.ended(connection, record, statistics, now)

    # -- input

    def _take(self, *arguments: Any, **keywords: Any) -> int:
        try:
            return super()._take(*arguments, **keywords)
        except LimitExceededError as error:
            self._tell_limit(error)
            raise

    def timer(self, now: float) -> None:
        """Do what `LiveSession` does, and record a limit in time that was hit."""
        try:
            super().timer(now)
        except LimitExceededError as error:
            self._tell_limit(error)
            raise

    def _tell_limit(self, error: LimitExceededError) -> None:
        if error is not self._told:
            self._told = error
            self._begin().limit_hit(self.connection.now(), error.limit, error.value, error.maximum)

    def _refused(self, what: str, stream: str, error: LimitExceededError) -> None:
        self._tell_limit(error)
        super()._refused(what, stream, error)

    def _rate_exceeded(self, messages: int, maximum: float) -> None:
        super()._rate_exceeded(messages, maximum)
        self._begin().limit_hit(self.connection.now(), _RATE_LIMIT, messages, maximum)

    def work_exceeded(self, error: LimitExceededError, *, ends: bool) -> None:
        """Do what `LiveSession` does, and record that the limit was hit."""
        super().work_exceeded(error, ends=ends)
        self._tell_limit(error)

    def _treat(self, event: rtmp_events.ServerEvent, now: float) -> None:
        record = self._begin()
        self._tell_command(record, event, now)
        if isinstance(event, rtmp_events.PublishRequested | rtmp_events.PlayRequested):
            name_flight(self.connection.sender, record.who)
        super()._treat(event, now)

    def _start_publishing(self, event: rtmp_events.PublishRequested, now: float) -> None:
        super()._start_publishing(event, now)
        publishing = (self._publishing or {}).get(event.stream_id)
        if publishing is not None:
            standby = publishing.stream.publisher is not self
            self._begin().publish_started(now, event.url.path, {"standby": True} if standby else {})

    def _start_playing(self, event: rtmp_events.PlayRequested, now: float) -> None:
        super()._start_playing(event, now)
        if self._playing is not None:
            self._tell_start(self._playing)

    def _tell_command(self, record: ConnectionEvents, event: rtmp_events.ServerEvent, now: float) -> None:
        """Record a command of the peer, and whose stream it is about from now on."""
        match event:
            case rtmp_events.HandshakeDone():
                record.handshake_done(now, event.style)
            case rtmp_events.ConnectRequested():
                record.connected(now, redact_text(event.flash_ver), app_named=event.url.app != DEFAULT_APP)
            case rtmp_events.ConnectRefused():
                record.command(now, "connect", {"refused": event.reason})
            case rtmp_events.PublishRequested():
                record.names(Role.PUBLISH, event.url.path)
                record.command(now, "publish")
            case rtmp_events.PlayRequested():
                record.names(Role.PLAY, event.url.path)
                record.command(now, "play")
            case rtmp_events.PauseRequested():
                record.command(now, "pause" if event.pause else "unpause")
            case rtmp_events.SeekRefused():
                record.command(now, "seek")
            case rtmp_events.ReceiveAudio():
                record.command(now, "receiveAudio")
            case rtmp_events.ReceiveVideo():
                record.command(now, "receiveVideo")
            case rtmp_events.StreamClosed():
                record.command(now, event.reason)
            case rtmp_events.Ignored():  # once per kind and connection
                record.command(now, "ignored", {"what": event.what})
            case _:
                pass

    def _note_begin(self, playing: Playing) -> None:
        super()._note_begin(playing)
        self._tell_start(playing)

    def _tell_start(self, playing: Playing) -> None:
        """Record that a player is given media, the first time: one that waits for a publisher is not given any yet."""
        if not self._started and self._rtmp.stream_state(playing.stream_id) is StreamState.PLAYING:
            self._started = True
            self._begin().play_started(self.connection.now(), playing.stream.name)

    # -- flow control

    def ledger_entry(self, entry: LedgerEntry) -> None:
        """Record what the Sender did, with how it stands now."""
        if entry.kind is LedgerKind.CLOSE:
            self._ended_at = entry.at
        else:
            self._begin().ledger_entry(entry, self._sight())
        super().ledger_entry(entry)

    def _sight(self) -> Sight:
        sender = self.connection.sender
        glance, load = sender.glance(), sender.load()
        return Sight(load.size_bytes, load.messages, load.age_ms, glance.bytes_sent, glance.delay_ms)

    def tell_sample(self, at: float, sight: Sight, kernel: tuple[int, int], state: SendState) -> None:
        """Record how a viewer in trouble stands. The sampler's thread."""
        if self.record is not None:
            rtt_us, unsent_bytes = kernel
            self.record.put(
                at, EventName.SAMPLE, state_to=state.name, sight=sight, rtt_us=rtt_us, unsent_bytes=unsent_bytes
            )
