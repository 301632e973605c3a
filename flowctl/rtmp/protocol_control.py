"""The protocol control that both ends of a session have in common: acknowledgements, windows, pings, and their rates.

Theory of operation. The session hands over every message of types 1 to 6, and asks once per read whether an
acknowledgement is due. Nothing here ever waits for the peer: a missing acknowledgement tells of the peer's delay and
is no reason to stop, and Set Peer Bandwidth, which hardly anyone obeys, is answered and not obeyed.

What a peer can make us send is bounded: acknowledgements by octets received, pongs by time, and the messages that ask
for either by a rate that ends the session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flowctl.errors import LimitExceededError
from flowctl.rtmp.events import Acknowledged, BufferLength, ControlEvent, Ignored, Pong
from flowctl.rtmp.messages import (
    EVENT_PING_REQUEST,
    EVENT_PING_RESPONSE,
    EVENT_SET_BUFFER_LENGTH,
    EVENT_STREAM_BEGIN,
    EVENT_STREAM_DRY,
    EVENT_STREAM_EOF,
    EVENT_STREAM_IS_RECORDED,
    Acknowledgement,
    PeerBandwidth,
    UserControl,
    WindowAckSize,
    decode_message,
    encode_control,
)
from flowctl.rtmp.session_config import ControlConfig
from flowctl.rtmp.wire import Message

_NEVER: Final = float("-inf")

STREAM_EVENTS: Final = frozenset({EVENT_STREAM_BEGIN, EVENT_STREAM_EOF, EVENT_STREAM_DRY, EVENT_STREAM_IS_RECORDED})
"""User control events by which a server tells of a stream."""


class ProtocolControl:
    """One connection's protocol control; sans-I/O, time is handed in.

    Args:
        config: limits and manners.
        send: takes a message that is to go to the peer.
        now: seconds; when the connection was made.
    """

    __slots__ = (
        "_ack_interval",  # int: octets between two acknowledgements of ours
        "_config",
        "_counters",  # dict[str, int] | None: what was ignored or odd, by name; None: nothing yet
        "_ping_at",  # float: when the outstanding ping was sent; meaningless while _ping_timestamp is None
        "_ping_timestamp",  # int | None: what the outstanding ping carries
        "_pong_at",  # float: when we last answered a ping
        "_rate_count",  # int: control messages in the second that began at _rate_since
        "_rate_since",  # float
        "_send",
        "_window_sent",  # int: the window we announced last, 0 for none
        "ack_due",  # int: octets received at which the next acknowledgement is due; read by the session's hot path
        "last_acknowledged_bytes",  # int: last sequence number the peer acknowledged; read by telemetry
        "last_input",  # float: when octets came last; written by the session
    )

    def __init__(self, config: ControlConfig, send: Callable[[Message], None], now: float) -> None:
        self._config = config
        self._counters: dict[str, int] | None = None
        self._send = send
        self._ack_interval = self._interval(config.window_ack_size_bytes)
        self._ping_at = now
        self._ping_timestamp: int | None = None
        self._pong_at = _NEVER
        self._rate_count = 0
        self._rate_since = now
        self._window_sent = 0
        self.ack_due = self._ack_interval
        self.last_acknowledged_bytes = 0
        self.last_input = now

    # ------------------------------------------------------------------------------------------ what we say

    def announce_window(self, size_bytes: int) -> None:
        """Send Window Acknowledgement Size, unless that is the last one sent."""
        if size_bytes != self._window_sent:
            self._window_sent = size_bytes
            self._send(encode_control(WindowAckSize(size_bytes)))

    def acknowledge(self, received_bytes: int) -> None:
        """Acknowledge `received_bytes`, the octets received in all. Called when they have reached `ack_due`."""
        self.ack_due = received_bytes + self._ack_interval
        if self._config.acknowledge:
            self._send(encode_control(Acknowledgement.of(received_bytes)))

    def _interval(self, window_bytes: int) -> int:
        # Half a window, as FFmpeg does, so that a peer which does wait for us never gets to the end of it.
        return max(window_bytes // 2, self._config.ack_floor_bytes)

    def ping(self, now: float) -> None:
        """Send a ping request; the answer becomes a `Pong` with the round trip time."""
        self._ping_timestamp = round(now * 1000) & 0xFFFFFFFF
        self._ping_at = now
        self._send(encode_control(UserControl(EVENT_PING_REQUEST, timestamp=self._ping_timestamp)))

    # ----------------------------------------------------------------------------------------- what we hear

    def handle(self, message: Message, received_bytes: int, now: float, *, muted: bool) -> ControlEvent | None:
        """Act on a message of types 1 to 6.

        Args:
            message: the message.
            received_bytes: octets received in all.
            now: seconds.
            muted: True leaves pings unanswered, because our output is overloaded and a pong cannot be dropped.

        Returns:
            What the caller is to know, or None.

        Raises:
            RemoteProtocolError: the body is too short or says nothing possible.
            LimitExceededError: ``control_messages_per_second``.
        """
        self.count_rate(now)
        value = decode_message(message, self._config.limits)
        if isinstance(value, Acknowledgement):
            self.last_acknowledged_bytes = value.sequence_number
            return Acknowledged(value.sequence_number)
        if isinstance(value, UserControl):
            return self._user_control(value, now, muted=muted)
        if isinstance(value, WindowAckSize):
            self._ack_interval = self._interval(value.size)
            self.ack_due = min(self.ack_due, received_bytes + self._ack_interval)
        elif isinstance(value, PeerBandwidth):
            # Section 5.4.5: answer with a window, if it differs from the last one sent.
            self.announce_window(max(value.size, 1))
        # Set Chunk Size and Abort are the chunk reader's, which has obeyed them.
        return None

    def _user_control(self, value: UserControl, now: float, *, muted: bool) -> ControlEvent | None:
        event = value.event
        if event == EVENT_PING_REQUEST:
            self._answer_ping(value.timestamp, now, muted=muted)
            return None
        if event == EVENT_PING_RESPONSE:
            return self._pong(value.timestamp, now)
        if event == EVENT_SET_BUFFER_LENGTH:
            return BufferLength(value.stream_id, value.buffer_ms)
        if event in STREAM_EVENTS:
            # The client's session reads these itself; a client that sends one to a server is odd, but harmless.
            self.count("stream-event")
            return None
        # Flash Media Server sends 31 and 32, which are documented nowhere.
        return self.ignore("user-control-event", str(event))

    def _answer_ping(self, timestamp: int, now: float, *, muted: bool) -> None:
        due = now - self._pong_at >= self._config.ping_answer_interval_s
        if muted or not due or not self._config.answer_pings:
            self.count("ping-unanswered")
            return
        self._pong_at = now
        self._send(encode_control(UserControl(EVENT_PING_RESPONSE, timestamp=timestamp)))

    def _pong(self, timestamp: int, now: float) -> Pong:
        if timestamp != self._ping_timestamp:
            return Pong(timestamp, None)
        self._ping_timestamp = None
        return Pong(timestamp, now - self._ping_at)

    # ----------------------------------------------------------------------------------- rates and counters

    def count_rate(self, now: float) -> None:
        """Count one message against ``control_messages_per_second``.

        Raises:
            LimitExceededError: there were more in the running second.
        """
        if now - self._rate_since >= 1.0:
            self._rate_since = now
            self._rate_count = 0
        self._rate_count += 1
        maximum = self._config.control_messages_per_second
        if maximum and self._rate_count > maximum:
            raise LimitExceededError("control_messages_per_second", self._rate_count, maximum)

    def count(self, name: str, times: int = 1) -> None:
        """Add `times` to counter `name`."""
        if self._counters is None:
            self._counters = {}
        self._counters[name] = self._counters.get(name, 0) + times

    @property
    def counters(self) -> dict[str, int]:
        """How often what was ignored or odd, by name; a copy."""
        return dict(self._counters or {})

    def ignore(self, what: str, detail: str) -> Ignored | None:
        """Count something that is ignored; return an event the first time.

        Args:
            what: name of the counter, one of a fixed set, never the peer's words.
            detail: what exactly, fit for a log.
        """
        self.count(what)
        return Ignored(what, detail) if self._counters is not None and self._counters[what] == 1 else None

    # -------------------------------------------------------------------------------------------- the clock

    def tick(self, now: float) -> None:
        """Ping a peer that has been silent, and give up on one that stays so.

        Raises:
            LimitExceededError: ``ping_silence_s``; no sign of life after a ping.
        """
        limits = self._config.limits
        if not limits.ping_after_s:
            return
        if self._awaits_sign():
            allowed = limits.ping_after_s + limits.ping_timeout_s
            if limits.ping_timeout_s and now - self._ping_at >= limits.ping_timeout_s:
                raise LimitExceededError("ping_silence_s", now - self.last_input, allowed)
        elif now - self.last_input >= limits.ping_after_s:
            self.ping(now)

    def next_deadline(self) -> float | None:
        """Return when `tick` has something to do. None: never."""
        limits = self._config.limits
        if not limits.ping_after_s:
            return None
        if not self._awaits_sign():
            return self.last_input + limits.ping_after_s
        return self._ping_at + limits.ping_timeout_s if limits.ping_timeout_s else None

    def _awaits_sign(self) -> bool:
        """Whether a ping is out and nothing at all has come since: any octet is a sign of life, not only a pong."""
        return self._ping_timestamp is not None and self.last_input <= self._ping_at
