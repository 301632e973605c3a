"""The server's side of one RTMP connection as an event machine: octets and time in, events and octets out.

Theory of operation. `ServerSession.receive` runs the octets through the handshake, then through the chunk reader, and
then treats each message by type. Audio and video of a stream that is being published are appended to the list of events
as they are: that is the hot path, one test and one append. Protocol control goes to `ProtocolControl`, commands to the
methods of `ServerCommands`. What waits to be sent is collected with `data_to_send`, always whole messages (after the
handshake), so our caller may put media of its own between any two results of it::

    events = session.receive(octets, now)
    while events or session.backlog:
        for event in events: ...          # on ConnectRequested: session.accept_connect(), and so on
        events = session.resume(now)      # what was held back until the answer, some at a time
    connection.send(session.data_to_send())

A request (connect, publish, play) is our caller's to decide, at once or after asking somebody. Until then, and while
the caller says ``control_only`` because its output to this peer is overloaded, messages are held in order up to
``paused_input_bytes``; only protocol control, closeStream and deleteStream pass. They come out of `resume`, or of the
next `receive` or `tick` if nobody calls it, at most `STEP_MESSAGES` a call: an aggregate holds thousands of messages in
one, and a caller with other peers to serve goes on with them later. Until `backlog` is False it should bring nothing
new.

A peer at fault ends the session: the method raises, `data_to_send` holds a status that says why, and then the
connection is to be closed.
"""

from __future__ import annotations

import random
from typing import Final

from flowctl.errors import InternalError, LimitExceededError, RemoteProtocolError
from flowctl.rtmp import commands
from flowctl.rtmp.chunk.chunk import ChunkReader
from flowctl.rtmp.events import HandshakeDone, MetadataReceived, ServerEvent
from flowctl.rtmp.messages import Command, decode_message, split_aggregate
from flowctl.rtmp.server.calls import Call
from flowctl.rtmp.server.commands import ARGUED, ServerCommands
from flowctl.rtmp.server.core import held_size_bytes
from flowctl.rtmp.server.replies import ServerReplies
from flowctl.rtmp.server.states import ConnectionInput, ConnectionState, StreamInput, StreamState
from flowctl.rtmp.session_config import ServerSessionConfig
from flowctl.rtmp.url import RtmpUrl
from flowctl.rtmp.wire import (
    TYPE_AGGREGATE,
    TYPE_AUDIO,
    TYPE_COMMAND_AMF0,
    TYPE_COMMAND_AMF3,
    TYPE_DATA_AMF0,
    TYPE_DATA_AMF3,
    TYPE_PEER_BANDWIDTH,
    TYPE_SET_CHUNK_SIZE,
    TYPE_SHARED_AMF0,
    TYPE_SHARED_AMF3,
    TYPE_VIDEO,
    Message,
)

_MEDIA: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO})
_COMMANDS: Final = frozenset({TYPE_COMMAND_AMF0, TYPE_COMMAND_AMF3})
_DATA: Final = frozenset({TYPE_DATA_AMF0, TYPE_DATA_AMF3})
_STREAM: Final = _MEDIA | _DATA | {TYPE_AGGREGATE}
_SHARED: Final = frozenset({TYPE_SHARED_AMF0, TYPE_SHARED_AMF3})
_CLOSING: Final = frozenset({"closeStream", "deleteStream"})

STEP_MESSAGES: Final = 64
"""Messages that were held back, or came in an aggregate, and are treated in one call: less than 1 ms of work."""


class ServerSession(ServerCommands, ServerReplies):
    """One RTMP connection, server side; not thread-safe, sans-I/O.

    Args:
        config: settings, shared by all connections.
        now: seconds on any steady clock; when the connection was accepted.
        rng: source of the handshake's random octets, for tests. None: the system's.
    """

    __slots__ = (
        "_rate_count",  # int: commands in the second that began at _rate_since
        "_rate_since",  # float
        "_reader",
        "piece_messages",  # int: messages completed by the last piece of input, whether they were events or not
    )

    def __init__(self, config: ServerSessionConfig, *, now: float, rng: random.Random | None = None) -> None:
        super().__init__(config, now=now, rng=rng)
        self._rate_count = 0
        self._rate_since = now
        self.piece_messages = 0
        self._reader = ChunkReader(
            config.limits, type3_after_type0=config.type3_after_type0, extended_delta=config.extended_delta
        )

    # ------------------------------------------------------------------------------------------ statistics

    @property
    def state(self) -> ConnectionState:
        """How far the connection has come."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether an error has ended the session; only `data_to_send` is of use then."""
        return self._state is ConnectionState.CLOSED

    @property
    def deciding(self) -> bool:
        """Whether a request awaits our caller's answer; what the peer sends meanwhile is held."""
        return self._deciding

    @property
    def url(self) -> RtmpUrl:
        """The address that the client stated in connect; empty before."""
        return self._url

    @property
    def counters(self) -> dict[str, int]:
        """How often what was ignored, by name; a copy."""
        return self._control.counters

    @property
    def last_acknowledged_bytes(self) -> int:
        """Octets that the peer has acknowledged last, modulo 2^32, as it claims."""
        return self._control.last_acknowledged_bytes

    @property
    def bytes_received(self) -> int:
        """Octets received after the handshake."""
        return self._reader.bytes_received

    @property
    def backlog(self) -> bool:
        """Whether `resume` has something to go on with: messages that were held back, or came in an aggregate."""
        return self._held is not None and not (self._deciding or self.closed)

    @property
    def held_bytes(self) -> int:
        """Octets (with overhead) of messages held back by a decision or ``control_only``."""
        return self._held_bytes

    def stream_state(self, stream_id: int) -> StreamState | None:
        """Return what message stream `stream_id` is used for. None: there is none."""
        stream = self._stream(stream_id)
        return stream.state if stream is not None else None

    # -------------------------------------------------------------------------------------- octets and time

    def data_to_send(self) -> bytes:
        """Return and forget what waits to be sent: handshake octets, or whole messages."""
        out, self._out = self._out, None
        return b"" if out is None else bytes(out)

    def receive(self, data: bytes | memoryview, now: float, *, control_only: bool = False) -> list[ServerEvent]:
        """Take octets from the peer.

        Args:
            data: any number of octets; not kept.
            now: seconds on the clock of the constructor.
            control_only: True while our output to this peer is overloaded: only protocol control, closeStream and
                deleteStream are obeyed, pings are not answered (a pong cannot be dropped), the rest is held.

        Returns:
            What happened, in the order of the wire.

        Raises:
            RemoteProtocolError: the peer broke the protocol; the session has ended.
            LimitExceededError: the peer went over a limit; the session has ended.
            LocalProtocolError: the session had ended before.
        """
        self._check_open()
        self._control.last_input = now
        events: list[ServerEvent] = []
        try:
            if self._handshake is not None:
                data = self._shake(data, events)
            messages = self._reader.feed(data)
            self.piece_messages = len(messages)
            received = self._reader.bytes_received
            if received >= self._control.ack_due:
                self._control.acknowledge(received)
            self._process(messages, events, now, control_only=control_only)
            if self._reader.unfinished_bytes > self._config.limits.unpublished_bytes:
                self._check_unfinished()
        except RemoteProtocolError as error:
            self._fail(error)
            raise
        self._phase_start(now)
        return events

    def resume(self, now: float) -> list[ServerEvent]:
        """Deliver what was held back; call it after answering a request and when the output is no longer overloaded.

        Nothing comes while another request awaits its answer. Raises like `receive`.
        """
        self._check_open()
        events: list[ServerEvent] = []
        try:
            self._release(events, now)
        except RemoteProtocolError as error:
            self._fail(error)
            raise
        self._phase_start(now)
        return events

    def tick(self, now: float) -> list[ServerEvent]:
        """Look at the clock: limits of time, pings, and held messages that nobody resumed.

        Args:
            now: seconds.

        Returns:
            Held messages, if there were any to deliver.

        Raises:
            LimitExceededError: ``handshake_time_s``, ``first_command_s``, ``first_media_s`` or ``ping_silence_s``;
                the session has ended.
        """
        if self.input_paused:
            # What we do not read cannot be late.
            self._control.last_input = now
            self._phase_since = now
        events = self.resume(now)
        try:
            self._check_phase(now)
            if self._state is not ConnectionState.HANDSHAKE:
                self._control.tick(now)
        except LimitExceededError as error:
            self._fail(error)
            raise
        return events

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` has something to do, in seconds; at once is `now`. None: never."""
        if self._state is ConnectionState.CLOSED:
            return None
        start = self._phase_start(now)
        if self._held and not self._deciding:
            return now
        limit = self._phase_limit()
        times = [start + limit[1]] if limit is not None else []
        ping = self._control.next_deadline() if self._state is not ConnectionState.HANDSHAKE else None
        if ping is not None:
            times.append(ping)
        return min(times, default=None)

    # ------------------------------------------------------------------------------------------- messages

    def _check_unfinished(self) -> None:
        """Refuse a long message of a peer that does not publish; encoders may begin before they have the answer.

        Not in the chunk reader: a publish may be in the same piece as the first key frame, and is seen only now.
        """
        if not (self._publishing or self._deciding):
            maximum = self._config.limits.unpublished_bytes
            raise LimitExceededError("unpublished_bytes", self._reader.unfinished_bytes, maximum)

    def _shake(self, data: bytes | memoryview, events: list[ServerEvent]) -> bytes:
        """Run the handshake; return what follows it, b"" while it lasts."""
        handshake = self._handshake
        if handshake is None:
            raise InternalError("the handshake is over")
        self._queue(handshake.receive(data))
        if not handshake.done:
            return b""
        self._handshake = None
        self._move_connection(ConnectionInput.HANDSHAKE_DONE)
        events.append(HandshakeDone(handshake.style or "simple"))
        return handshake.leftover

    def _process(self, messages: list[Message], events: list[ServerEvent], now: float, *, control_only: bool) -> None:
        if self._held and not control_only:
            self._release(events, now)
        remaining = iter(messages)
        if not (control_only or self._deciding or self._held):
            publishing = self._publishing
            append = events.append
            for message in remaining:
                if message.type_id in _MEDIA and message.msid in publishing:
                    append(message)
                else:
                    self._handle(message, events, now)
                    if self.deciding or self.backlog:
                        break
                    publishing = self._publishing
        # What follows a request waits for the answer, and what follows an aggregate for its parts.
        for message in remaining:
            self._hold(message, events, now, control_only=control_only)
        if self._held and not control_only and len(events) < STEP_MESSAGES:
            self._release(events, now)
        if self._awaiting:
            self._note_media(events)

    def _note_media(self, events: list[ServerEvent]) -> None:
        """Strike publishers that have sent their first media off the list of those awaited."""
        for event in events:
            if isinstance(event, Message) and event.type_id in _MEDIA:
                self._awaiting -= {event.msid}

    def _hold(self, message: Message, events: list[ServerEvent], now: float, *, control_only: bool) -> None:
        if TYPE_SET_CHUNK_SIZE <= message.type_id <= TYPE_PEER_BANDWIDTH:
            self._control_message(message, events, now, muted=control_only)
            return
        # Behind the parts of an aggregate the end of the stream has to wait as well, or they would be lost.
        passes = self._state is ConnectionState.CONNECTED and (control_only or self._deciding)
        if passes and message.type_id in _COMMANDS and commands.command_name(message) in _CLOSING:
            call = self._command_message(message, events, now)
            self._drop_held(self._closing_target(call))
            return
        if self._held is None:
            self._held = []
        self._held.append(message)
        self._held_bytes += held_size_bytes(message)
        limit, maximum = "paused_input_bytes", self._config.paused_input_bytes
        if not (self._publishing or self._deciding) and self._config.limits.unpublished_bytes < maximum:
            limit, maximum = "unpublished_bytes", self._config.limits.unpublished_bytes
        if self._held_bytes > maximum:
            raise LimitExceededError(limit, self._held_bytes, maximum)

    def _release(self, events: list[ServerEvent], now: float) -> None:
        """Treat held messages, some at a time, until there are none or one of them asks our caller something."""
        held = self._take_held()
        done = 0
        # An aggregate puts its parts in their place, to be next.
        while done < min(len(held), STEP_MESSAGES) and not (self.deciding or self.backlog):
            message = held[done]
            done += 1
            self._held_bytes -= held_size_bytes(message)
            self._handle(message, events, now)
        self._held = [*self._take_held(), *held[done:]] or None
        if self._awaiting:
            self._note_media(events)

    def _take_held(self) -> list[Message]:
        held, self._held = self._held, None
        return held or []

    def _handle(self, message: Message, events: list[ServerEvent], now: float) -> None:
        """Treat one message that is not on the hot path."""
        type_id = message.type_id
        if TYPE_SET_CHUNK_SIZE <= type_id <= TYPE_PEER_BANDWIDTH:
            self._control_message(message, events, now, muted=False)
        elif type_id in _COMMANDS:
            self._command_message(message, events, now)
        elif self._state is ConnectionState.REFUSED:
            self._control.count_rate(now)
            self._control.count("after-refusal")
        elif type_id in _STREAM:
            self._stream_message(message, events, now)
        else:
            self._ignored(message, events, now)

    def _control_message(self, message: Message, events: list[ServerEvent], now: float, *, muted: bool) -> None:
        event = self._control.handle(message, self._reader.bytes_received, now, muted=muted)
        if event is not None:
            events.append(event)

    def _command_message(self, message: Message, events: list[ServerEvent], now: float) -> Call:
        self._count_command(now)
        name = commands.command_name(message)
        if name and name not in ARGUED:  # the others are of any length, and nothing of them is read
            message = commands.command_head(message)
        command = decode_message(message, self._config.limits)
        if not isinstance(command, Command):
            raise InternalError(f"a message of type {message.type_id} is no command")
        call = Call(command, message.msid, now, events)
        self._run(call)
        return call

    def _count_command(self, now: float) -> None:
        if now - self._rate_since >= 1.0:
            self._rate_since = now
            self._rate_count = 0
        self._rate_count += 1
        maximum = self._config.limits.commands_per_second
        if maximum and self._rate_count > maximum:
            raise LimitExceededError("commands_per_second", self._rate_count, maximum)

    def _stream_message(self, message: Message, events: list[ServerEvent], now: float) -> None:
        """Treat media, data or an aggregate that the hot path did not take."""
        if self._state is not ConnectionState.CONNECTED:
            raise RemoteProtocolError(f"message of type {message.type_id} before connect", code="unexpected-message")
        if message.msid not in self._publishing:
            self._stray(message, events, now)
        elif message.type_id in _MEDIA:
            events.append(message)
        elif message.type_id == TYPE_AGGREGATE:
            parts = split_aggregate(message, self._config.limits)
            self._held = [*parts, *self._take_held()] or None
            self._held_bytes += sum(map(held_size_bytes, parts))
        else:
            found = commands.read_metadata(message, self._config.limits)
            events.append(message if found is None else MetadataReceived(message.msid, found))

    def _stray(self, message: Message, events: list[ServerEvent], now: float) -> None:
        """Treat a message of a stream that is not being published."""
        stream = self._stream(message.msid)
        if stream is None and len(self._publishing) == 1:
            # Who publishes one stream and sends on another can only mean that one; SRS and nginx-rtmp do not even look.
            (msid,) = self._publishing
            self._control.count("media-on-other-stream")
            moved = Message(message.csid, message.timestamp, message.type_id, msid, message.payload)
            self._stream_message(moved, events, now)
            return
        if stream is None:
            self._control.count_rate(now)
        else:
            # Encoders send on until they have read that they were refused. No rate: `first_media_s` ends it.
            self._move_stream(stream, StreamInput.MEDIA)
        self._report(events, "media-without-publish", message.type_id)

    def _ignored(self, message: Message, events: list[ServerEvent], now: float) -> None:
        """Count a message that is nobody's; a flood of them is a fault, their presence is not."""
        self._control.count_rate(now)
        what = "shared-object" if message.type_id in _SHARED else "unknown-message-type"
        self._report(events, what, message.type_id)

    def _report(self, events: list[ServerEvent], what: str, type_id: int) -> None:
        event = self._control.ignore(what, str(type_id))
        if event is not None:
            events.append(event)
