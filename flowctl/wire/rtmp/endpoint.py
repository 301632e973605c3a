"""One end of an RTMP connection below its commands: handshake, chunks, protocol control, and the limits of time.

`ServerSession` and `ClientSession` are endpoints that know what commands mean.

Theory of operation. What was received goes to `_receive_handshake` until that returns what follows the handshake, then
to `_read`, which gives back messages; those of types 1 to 6 are for `_control`. What is to go out is given to `_send`
and collected with `data_to_send`, always whole messages. The clock is looked at in `_check_time`.

Nothing here ever waits for the peer: a missing acknowledgement tells of the peer's delay and is no reason to stop, and
Set Peer Bandwidth, which hardly anyone obeys, is answered and not obeyed. What a peer can make us send is bounded:
acknowledgements by octets received, pongs by time, and messages that ask for either by a rate that ends the session.
"""

from __future__ import annotations

from typing import Any, Final

from flowctl.errors import InternalError, LimitExceededError, LocalProtocolError
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.writer import ChunkWriter
from flowctl.wire.rtmp.events import Acknowledged, Ignored, Pong
from flowctl.wire.rtmp.handshake import Handshake
from flowctl.wire.rtmp.messages import (
    EVENT_PING_REQUEST,
    EVENT_PING_RESPONSE,
    EVENT_SET_BUFFER_LENGTH,
    STREAM_EVENTS,
    Acknowledgement,
    PeerBandwidth,
    UserControl,
    WindowAckSize,
    decode_message,
    encode_control,
)
from flowctl.wire.rtmp.session_config import WINDOW_ACK_SIZE_BYTES, ControlConfig
from flowctl.wire.rtmp.wire import TYPE_PEER_BANDWIDTH, TYPE_SET_CHUNK_SIZE, Message

_NEVER: Final = float("-inf")

CONTROL_TYPES: Final = range(TYPE_SET_CHUNK_SIZE, TYPE_PEER_BANDWIDTH + 1)
"""Message types of `Endpoint.control`."""

NO_LIMIT: Final = ("", 0.0)
"""The limit of a phase that may last for ever."""


class Endpoint:
    """One end of one connection, of which `ServerSession` and `ClientSession` derive; sans-I/O, time is handed in."""

    __slots__ = (
        "_ack_due",  # int: octets received at which the next acknowledgement is due
        "_ack_interval",  # int: octets between two acknowledgements of ours
        "_command_count",  # int: commands in the second that began at _second
        "_config",
        "_control_count",  # int: control messages in the same second
        "_counters",  # dict[str, int] | None: what was ignored or odd, by name; None: nothing yet
        "_error",  # str: why the session ended, "" while it has not
        "_handshake",  # Handshake | None: None when done
        "_last_input",  # float: when octets came last
        "_out",  # bytearray | None: what waits to be sent; None for nothing
        "_phase_since",  # float | None: start of the phase whose time is limited; None: at the next call with a time
        "_ping_at",  # float: when the outstanding ping was sent; meaningless while _ping_timestamp is None
        "_ping_timestamp",  # int | None: what the outstanding ping carries
        "_pong_at",  # float: when we last answered a ping
        "_reader",
        "_second",  # float: when the second began in which rates are counted
        "_window_sent",  # int: the window we announced last, 0 for none
        "_writer",
        "command_total",  # int: commands of the connection, for accounts; any thread may read it
        "control_total",  # int: control messages, likewise
        "last_acknowledged_bytes",  # int: last sequence number the peer acknowledged; read by telemetry
    )

    def __init__(self, config: ControlConfig, handshake: Handshake, writer: ChunkWriter, now: float) -> None:
        self._config = config
        self.command_total = 0
        self.control_total = 0
        self._command_count = 0
        self._control_count = 0
        self._counters: dict[str, int] | None = None
        self._error = ""
        self._ack_interval = self._interval(WINDOW_ACK_SIZE_BYTES)
        self._ack_due = self._ack_interval
        self._out: bytearray | None = None
        self._phase_since: float | None = now
        self._ping_at = now
        self._ping_timestamp: int | None = None
        self._pong_at = _NEVER
        self._second = now
        self._window_sent = 0
        self._handshake: Handshake | None = handshake
        self.last_acknowledged_bytes = 0
        self._last_input = now
        self._reader: ChunkReader = ChunkReader(
            config.limits, type3_after_type0=config.type3_after_type0, extended_delta=config.extended_delta
        )
        self._writer = writer

    # ------------------------------------------------------------------------------------------------ octets

    @property
    def bytes_received(self) -> int:
        """Octets received after the handshake."""
        return self._reader.bytes_received

    def _check_open(self) -> None:
        if self._error:
            raise LocalProtocolError(f"the session has ended: {self._error}")

    def _receive_handshake(self, data: bytes | memoryview) -> tuple[bytes, str]:
        handshake = self._handshake
        if handshake is None:
            raise InternalError("the handshake is over")
        self._queue(handshake.receive(data))
        if not handshake.done:
            return b"", ""
        self._handshake = None
        return handshake.leftover, handshake.style or "simple"

    def _read(self, data: bytes | memoryview, now: float) -> list[Message]:
        """Return the messages that `data`, octets after the handshake, completes; acknowledge if it is time."""
        self._last_input = now
        reader = self._reader
        messages = reader.feed(data)
        if reader.bytes_received >= self._ack_due:
            self._acknowledge(reader.bytes_received)
        return messages

    def _send(self, message: Message) -> None:
        size = self._queue(self._writer.write(message))
        if size > self._config.pending_output_bytes:
            raise LimitExceededError("pending_output_bytes", size, self._config.pending_output_bytes)

    def _send_chunk_size(self) -> None:
        """Announce our chunk size, once, before the first long message: OBS breaks on one in small chunks (SRS 454)."""
        if self._writer.chunk_size != self._config.out_chunk_size:
            self._queue(self._writer.set_chunk_size(self._config.out_chunk_size))

    def data_to_send(self) -> bytes:
        """Return and forget what waits to be sent: handshake octets, or whole messages."""
        out, self._out = self._out, None
        return b"" if out is None else bytes(out)

    def _queue(self, octets: bytes) -> int:
        """Put whole messages, or octets of the handshake, behind what waits to be sent; return how much that is now."""
        if self._out is None:
            self._out = bytearray(octets)
        else:
            self._out += octets
        return len(self._out)

    # ------------------------------------------------------------------------------------------ what we say

    def _announce_window(self, size_bytes: int) -> None:
        """Send Window Acknowledgement Size, unless that is the last one sent."""
        if size_bytes != self._window_sent:
            self._window_sent = size_bytes
            self._send(encode_control(WindowAckSize(size_bytes)))

    def _acknowledge(self, received_bytes: int) -> None:
        self._ack_due = received_bytes + self._ack_interval
        if self._config.acknowledge:
            self._send(encode_control(Acknowledgement.of(received_bytes)))

    def _interval(self, window_bytes: int) -> int:
        # Half a window, as FFmpeg does, so that a peer which does wait for us never gets to the end of it.
        return max(window_bytes // 2, self._config.ack_floor_bytes)

    def _ping(self, now: float) -> None:
        self._ping_timestamp = round(now * 1000) & 0xFFFFFFFF
        self._ping_at = now
        self._send(encode_control(UserControl(EVENT_PING_REQUEST, timestamp=self._ping_timestamp)))

    # ----------------------------------------------------------------------------------------- what we hear

    def _control(self, message: Message, events: list[Any], now: float, *, muted: bool = False) -> None:
        """Act on a message of types 1 to 6."""
        self._count_control(now)
        value = decode_message(message, self._config.limits)
        if isinstance(value, Acknowledgement):
            self.last_acknowledged_bytes = value.sequence_number
            events.append(Acknowledged(value.sequence_number))
        elif isinstance(value, UserControl):
            self._user_control(value, events, now, muted=muted)
        elif isinstance(value, WindowAckSize):
            self._ack_interval = self._interval(value.size)
            self._ack_due = min(self._ack_due, self._reader.bytes_received + self._ack_interval)
        elif isinstance(value, PeerBandwidth):
            # Section 5.4.5: answer with a window, if it differs from the last one sent.
            self._announce_window(max(value.size, 1))
        # Set Chunk Size and Abort are the chunk reader's, which has obeyed them.

    def _user_control(self, value: UserControl, events: list[Any], now: float, *, muted: bool) -> None:
        event = value.event
        if event == EVENT_PING_REQUEST:
            self._answer_ping(value.timestamp, now, muted=muted)
        elif event == EVENT_PING_RESPONSE:
            if value.timestamp == self._ping_timestamp:
                self._ping_timestamp = None
            events.append(Pong(value.timestamp))
        elif event in STREAM_EVENTS:
            # The client's session reads these itself; a client that sends one to a server is odd, but harmless.
            self._count("stream-event")
        elif event != EVENT_SET_BUFFER_LENGTH:  # in which rtmpdump says ten hours: no promise, and nothing to go by
            # Flash Media Server sends 31 and 32, which are documented nowhere.
            self._ignore(events, "user-control-event", str(event))

    def _answer_ping(self, timestamp: int, now: float, *, muted: bool) -> None:
        due = now - self._pong_at >= self._config.ping_answer_interval_s
        if muted or not due or not self._config.answer_pings:
            self._count("ping-unanswered")
            return
        self._pong_at = now
        self._send(encode_control(UserControl(EVENT_PING_RESPONSE, timestamp=timestamp)))

    # ----------------------------------------------------------------------------------- rates and counters

    def _count_control(self, now: float) -> None:
        self._turn_second(now)
        self._control_count += 1
        self.control_total += 1
        maximum = self._config.control_messages_per_second
        if maximum and self._control_count > maximum:
            raise LimitExceededError("control_messages_per_second", self._control_count, maximum)

    def _count_command(self, now: float) -> None:
        self._turn_second(now)
        self._command_count += 1
        self.command_total += 1
        maximum = self._config.limits.commands_per_second
        if maximum and self._command_count > maximum:
            raise LimitExceededError("commands_per_second", self._command_count, maximum)

    def _turn_second(self, now: float) -> None:
        if now - self._second >= 1.0:
            self._second = now
            self._control_count = self._command_count = 0

    def _count(self, name: str, times: int = 1) -> None:
        if self._counters is None:
            self._counters = {}
        self._counters[name] = self._counters.get(name, 0) + times

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._counters or {})

    def _ignore(self, events: list[Any], what: str, detail: str) -> None:
        """Count something that is not obeyed or of no use, and report it the first time."""
        self._count(what)
        if self._counters is not None and self._counters[what] == 1:
            events.append(Ignored(what, detail))

    # -------------------------------------------------------------------------------------------- the clock

    def _phase_changed(self) -> None:
        """Begin a new phase at the next call that brings a time: our caller's answers carry none."""
        self._phase_since = None

    def _phase_start(self, now: float) -> float:
        """Return when the present phase began, which may be with this call."""
        if self._phase_since is None:
            self._phase_since = now
        return self._phase_since

    def _excuse(self, now: float) -> None:
        """Do not count silence up to `now` against the peer."""
        self._last_input = now
        self._phase_since = now

    def ping_waits(self, now: float) -> None:
        """Count the time for an answer from `now` on: the ping still waits here, behind a large message."""
        if self._awaits_sign():
            self._ping_at = now

    def _check_time(self, limit: tuple[str, float], now: float) -> None:
        """Hold the peer to the limit on the present phase; ping one that is silent, and give up if it stays so."""
        name, allowed = limit
        lasted = now - self._phase_start(now)
        if allowed and lasted >= allowed:
            raise LimitExceededError(name, lasted, allowed)
        limits = self._config.limits
        if self._handshake is not None or not limits.ping_after_s:
            return
        if self._awaits_sign():
            allowed = limits.ping_after_s + limits.ping_timeout_s
            if limits.ping_timeout_s and now - self._ping_at >= limits.ping_timeout_s:
                raise LimitExceededError("ping_silence_s", now - self._last_input, allowed)
        elif now - self._last_input >= limits.ping_after_s:
            self._ping(now)

    def _deadline(self, limit: tuple[str, float], now: float) -> float | None:
        """Return when `tick` has something to do, at the earliest `now`. None: never."""
        start = self._phase_start(now)
        times = [start + limit[1]] if limit[1] else []
        limits = self._config.limits
        if self._handshake is None and limits.ping_after_s:
            if not self._awaits_sign():
                times.append(self._last_input + limits.ping_after_s)
            elif limits.ping_timeout_s:
                times.append(self._ping_at + limits.ping_timeout_s)
        return max(min(times), now) if times else None

    def _awaits_sign(self) -> bool:
        """Whether a ping is out and nothing at all has come since: any octet is a sign of life, not only a pong."""
        return self._ping_timestamp is not None and self._last_input <= self._ping_at
