"""The server's side of one RTMP connection as an event machine: octets and time in, events and octets out.

Theory of operation. `ServerSession.receive` runs the octets through its `Endpoint` (handshake, chunks), and then treats
each message by type. Audio and video of a stream that is being published are appended to the list of events as they
are: that is the hot path, one test and one append. Protocol control goes back to the `Endpoint`; a command is looked up
in a table (`ServerSession.rules`, and `COURTESIES` for those that only want an answer). What waits to be sent is
collected with `data_to_send`, always whole messages (after the handshake), so our caller may put media of its own
between any two results of it::

    events = session.receive(octets, now) while events or session.backlog:
        for event in events: ...          # on ConnectRequested: session.accept_connect(), and so on
        events = session.resume(now)      # what was held back until the answer, some at a time
    connection.send(session.data_to_send())

A request (connect, publish, play) is our caller's to decide, at once or after asking somebody: it becomes an event, and
the connection or the stream is in a deciding state. Until the answer, and while the caller says ``control_only``
because its output to this peer is overloaded, messages are held in order up to ``paused_input_bytes``; only protocol
control, closeStream and deleteStream pass. They come out of `resume`, or of the next `receive` or `tick` if nobody
calls it, at most `STEP_MESSAGES` a call: an aggregate holds thousands of messages in one, and a caller with other peers
to serve goes on with them later. Until `backlog` is False it should bring nothing new.

A peer at fault ends the session: the method raises, `data_to_send` holds a status that says why, and then the
connection is to be closed. What our caller may not do now (the tables of `states`), for example accept a stream that
the client has closed meanwhile, raises `LocalProtocolError`; nothing has been sent or changed then.

How real encoders go about it: OBS and FFmpeg send connect, releaseStream, FCPublish, createStream, publish and wait for
the reply to each but the second and third. Haivision checks the bandwidth before createStream and announces after it.
Flash publishes without announcing. All of them may stop by FCUnpublish, closeStream, deleteStream, in any order, and
Wirecast by publish(false). None of this needs a state of its own: only publish, play and what ends them have one.

Players: streams are live, so there is nothing to seek in, and a pause stops delivery without keeping anything: when the
player resumes it gets the stream as it is then. Who pauses or seeks without playing is ignored, since players close and
pause in any order when their user leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.adobe_auth import LoginResult
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.values import UNDEFINED
from flowctl.wire.rtmp.chunk.writer import ChunkWriter
from flowctl.wire.rtmp.endpoint import CONTROL_TYPES, NO_LIMIT, Endpoint
from flowctl.wire.rtmp.events import (
    ConnectRefused,
    HandshakeDone,
    MetadataReceived,
    PauseRequested,
    PlayRequested,
    PublishKind,
    PublishRequested,
    ReceiveAudio,
    ReceiveVideo,
    SeekRefused,
    ServerEvent,
    StreamClosed,
)
from flowctl.wire.rtmp.handshake import Handshake
from flowctl.wire.rtmp.messages import (
    EVENT_STREAM_BEGIN,
    EVENT_STREAM_EOF,
    Command,
    PeerBandwidth,
    decode_command,
    encode_control,
    split_aggregate,
)
from flowctl.wire.rtmp.server import replies
from flowctl.wire.rtmp.server.connect import read_connect
from flowctl.wire.rtmp.server.streams import PLAYER_STATES, PLAYING_STATES, HeldMessages, MessageStream, MessageStreams
from flowctl.wire.rtmp.session_config import WINDOW_ACK_SIZE_BYTES, ServerSessionConfig
from flowctl.wire.rtmp.states import (
    CONNECTION_TABLE,
    ConnectionInput,
    ConnectionState,
    StreamInput,
    StreamState,
    next_state,
)
from flowctl.wire.rtmp.url import DEFAULT_APP, ENCODED_CHARS, RtmpUrl, canonical
from flowctl.wire.rtmp.wire import (
    TYPE_AGGREGATE,
    TYPE_AUDIO,
    TYPE_COMMAND_AMF0,
    TYPE_COMMAND_AMF3,
    TYPE_DATA_AMF0,
    TYPE_DATA_AMF3,
    TYPE_SHARED_AMF0,
    TYPE_SHARED_AMF3,
    TYPE_VIDEO,
    Message,
)

_MEDIA: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO})
_COMMANDS: Final = frozenset({TYPE_COMMAND_AMF0, TYPE_COMMAND_AMF3})
_STREAM: Final = _MEDIA | {TYPE_DATA_AMF0, TYPE_DATA_AMF3, TYPE_AGGREGATE}
_SHARED: Final = frozenset({TYPE_SHARED_AMF0, TYPE_SHARED_AMF3})
_CLOSING: Final = frozenset({"closeStream", "deleteStream"})

_KINDS: Final[dict[str, PublishKind]] = {
    "live": "live",
    "record": "record",
    "append": "append",
    "appendWithGap": "append",
}

STEP_MESSAGES: Final = 64
"""Most messages, held back or from an aggregate, that one call treats: less than 1 ms of work."""

_NO_ADDRESS: Final = RtmpUrl()


class _Call(NamedTuple):
    command: Command
    stream_id: int
    now: float
    events: list[ServerEvent]

    def argument(self, index: int) -> Any:
        """Return argument `index` (from 0, after the command object). None: there is none, or it is undefined."""
        arguments = self.command.arguments
        value = arguments[index] if index < len(arguments) else None
        return None if value is UNDEFINED else value


class _Rule(NamedTuple):
    obey: Callable[[Any, _Call], None]
    argued: bool = True  # whether more of it is read than its name and transaction id


class ServerSession(Endpoint):
    """One RTMP connection, server side; not thread-safe, sans-I/O."""

    __slots__ = (
        "_connect_id",  # float: transaction id of the connect command
        "_deciding",  # bool: our caller owes an answer; what the peer sends meanwhile is held
        "_enhanced",  # bool: the client's connect has Enhanced RTMP members
        "_held",
        "_object_encoding",  # int: 0 or 3, as the client asked
        "_reconnects",  # bool: the client is to connect again, and is told once it is let in
        "_state",  # ConnectionState: assigned by _move_connection only
        "_streams",
        "_url",  # RtmpUrl: from connect
        "client_caps_ex",  # int: capsEx of the client, 0 before connect
        "client_codecs",  # frozenset[str]: of pictures, that the client says it decodes; empty before connect
        "input_paused",  # bool: set by the caller while it does not read; silence is then no fault of the peer's
        "piece_messages",  # int: messages completed by the last piece of input, whether they were events or not
    )

    _config: ServerSessionConfig

    def __init__(self, config: ServerSessionConfig, *, now: float, rng: random.Random | None = None) -> None:
        super().__init__(config, Handshake.server(rng, round(now * 1000)), ChunkWriter(full_headers=True), now)
        self._connect_id = 1.0
        self._deciding = False
        self._enhanced = False
        self._held = HeldMessages()
        self._object_encoding = 0
        self._reconnects = False
        self._state = ConnectionState.HANDSHAKE
        self._streams = MessageStreams()
        self._url = _NO_ADDRESS
        self.client_caps_ex = 0
        self.client_codecs: frozenset[str] = frozenset()
        self.input_paused = False
        self.piece_messages = 0

    # ------------------------------------------------------------------------------------------ statistics

    @property
    def state(self) -> ConnectionState:
        return self._state

    @property
    def closed(self) -> bool:
        """Whether an error has ended the session; only `data_to_send` is of use then."""
        return self._state is ConnectionState.CLOSED

    @property
    def deciding(self) -> bool:
        return self._deciding

    @property
    def url(self) -> RtmpUrl:
        return self._url

    @property
    def backlog(self) -> bool:
        """Whether `resume` has something to go on with: messages that were held back, or came in an aggregate."""
        return self._held.size_bytes > 0 and not (self._deciding or self.closed)

    @property
    def held_bytes(self) -> int:
        """Octets (with overhead) of messages held back by a decision or ``control_only``."""
        return self._held.size_bytes

    def stream_state(self, stream_id: int) -> StreamState | None:
        stream = self._streams.find(stream_id)
        return stream.state if stream is not None else None

    # -------------------------------------------------------------------------------------- octets and time

    def receive(self, data: bytes | memoryview, now: float, *, control_only: bool = False) -> list[ServerEvent]:
        self._check_open()
        events: list[ServerEvent] = []
        try:
            if self._handshake is not None:
                data = self._shake(data, events)
            messages = self._read(data, now)
            self.piece_messages = len(messages)
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
        """Look at the clock: limits of time, pings, and held messages that were not resumed."""
        if self.input_paused:
            self._excuse(now)  # what we do not read cannot be late
        events = self.resume(now)
        try:
            self._check_time(self._phase_limit(), now)
        except LimitExceededError as error:
            self._fail(error)
            raise
        return events

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` has something to do, in seconds; at once is `now`. None: never."""
        if self.closed:
            return None
        deadline = self._deadline(self._phase_limit(), now)
        return now if self.backlog else deadline

    def _phase_limit(self) -> tuple[str, float]:
        limits = self._config.limits
        if self._state is ConnectionState.HANDSHAKE:
            return "handshake_time_s", limits.handshake_time_s
        if self._state in (ConnectionState.CONNECTING, ConnectionState.REFUSED):
            # A refused peer is closed once it has read why; this ends one that never reads.
            return "first_command_s", limits.first_command_s
        if self._deciding or self._state is not ConnectionState.CONNECTED:
            return NO_LIMIT  # the time is our caller's
        if self._streams.awaiting or not self._streams.active:
            # Also for a connection that neither publishes nor plays: it is there for nothing.
            return "first_media_s", limits.first_media_s
        return NO_LIMIT

    # ------------------------------------------------------------------------------------------- messages

    def _shake(self, data: bytes | memoryview, events: list[ServerEvent]) -> bytes:
        following, style = self._receive_handshake(data)
        if style:
            self._move_connection(ConnectionInput.HANDSHAKE_DONE)
            events.append(HandshakeDone(style))
        return following

    def _check_unfinished(self) -> None:
        """Refuse a long message of a peer that does not publish; encoders may begin before they have the answer.

        Not in the chunk reader: a publish may be in the same piece as the first key frame, and is seen only now.
        """
        if not (self._streams.publishing or self._deciding):
            maximum = self._config.limits.unpublished_bytes
            raise LimitExceededError("unpublished_bytes", self._reader.unfinished_bytes, maximum)

    def _process(self, messages: list[Message], events: list[ServerEvent], now: float, *, control_only: bool) -> None:
        held = self._held
        if held.size_bytes and not control_only:
            self._release(events, now)
        remaining = iter(messages)
        if not (control_only or self._deciding or held.size_bytes):
            publishing = self._streams.publishing
            append = events.append
            for message in remaining:
                if message.type_id in _MEDIA and message.msid in publishing:
                    append(message)
                else:
                    self._handle(message, events, now)
                    if self.deciding or held.size_bytes:
                        break
                    publishing = self._streams.publishing
        # What follows a request waits for the answer, and what follows an aggregate for its parts.
        for message in remaining:
            self._hold(message, events, now, control_only=control_only)
        if held.size_bytes and not control_only and len(events) < STEP_MESSAGES:
            self._release(events, now)
        if self._streams.awaiting:
            self._note_media(events)

    def _note_media(self, events: list[ServerEvent]) -> None:
        """Strike publishers that have sent their first media off the list of those awaited."""
        for event in events:
            if isinstance(event, Message) and event.type_id in _MEDIA:
                self._streams.has_sent(event.msid)

    def _hold(self, message: Message, events: list[ServerEvent], now: float, *, control_only: bool) -> None:
        if message.type_id in CONTROL_TYPES:
            self._control(message, events, now, muted=control_only)
            return
        # Behind the parts of an aggregate the end of the stream has to wait as well, or they would be lost.
        passes = self._state is ConnectionState.CONNECTED and (control_only or self._deciding)
        if passes and message.type_id in _COMMANDS and commands.command_name(message) in _CLOSING:
            call = self._command_message(message, events, now)
            self._drop_held(self._closing_target(call))
            return
        self._held.append(message)
        limit, maximum = "paused_input_bytes", self._config.paused_input_bytes
        if not (self._streams.publishing or self._deciding) and self._config.limits.unpublished_bytes < maximum:
            limit, maximum = "unpublished_bytes", self._config.limits.unpublished_bytes
        if self._held.size_bytes > maximum:
            raise LimitExceededError(limit, self._held.size_bytes, maximum)

    def _release(self, events: list[ServerEvent], now: float) -> None:
        """Treat held messages, some at a time, until there are none or one of them asks our caller something."""
        held = self._held
        for _ in range(min(len(held), STEP_MESSAGES)):
            if self._deciding:
                break
            message = held.pop()
            waiting = len(held)
            self._handle(message, events, now)
            if len(held) > waiting:
                break  # the parts of an aggregate are next, and next time's work
        if self._streams.awaiting:
            self._note_media(events)

    def _drop_held(self, stream_id: int) -> None:
        """Forget held messages of a stream that was closed or refused: they have no receiver any more."""
        dropped = self._held.drop_stream(stream_id)
        if dropped:
            self._count("held-of-closed-stream", dropped)

    def _handle(self, message: Message, events: list[ServerEvent], now: float) -> None:
        type_id = message.type_id
        if type_id in CONTROL_TYPES:
            self._control(message, events, now, muted=False)
        elif type_id in _COMMANDS:
            self._command_message(message, events, now)
        elif self._state is ConnectionState.REFUSED:
            self._count_control(now)
            self._count("after-refusal")
        elif type_id in _STREAM:
            self._stream_message(message, events, now)
        else:
            # Nobody's; a flood of them is a fault, their presence is not.
            self._count_control(now)
            self._ignore(events, "shared-object" if type_id in _SHARED else "unknown-message-type", str(type_id))

    def _stream_message(self, message: Message, events: list[ServerEvent], now: float) -> None:
        if self._state is not ConnectionState.CONNECTED:
            raise RemoteProtocolError(f"message of type {message.type_id} before connect", code="unexpected-message")
        if message.msid not in self._streams.publishing:
            self._stray(message, events, now)
        elif message.type_id in _MEDIA:
            events.append(message)
        elif message.type_id == TYPE_AGGREGATE:
            self._held.put_first(split_aggregate(message, self._config.limits))
        else:
            metadata = commands.read_metadata(message, self._config.limits)
            events.append(message if metadata is None else MetadataReceived(message.msid, metadata))

    def _stray(self, message: Message, events: list[ServerEvent], now: float) -> None:
        stream = self._streams.find(message.msid)
        publishing = self._streams.publishing
        if stream is None and len(publishing) == 1:
            # Who publishes one stream and sends on another can only mean that one; SRS and nginx-rtmp do not even look.
            (msid,) = publishing
            self._count("media-on-other-stream")
            moved = Message(message.csid, message.timestamp, message.type_id, msid, message.payload)
            self._stream_message(moved, events, now)
            return
        if stream is None:
            self._count_control(now)
        else:
            # Encoders send on until they have read that they were refused. No rate: `first_media_s` ends it.
            self._move_stream(stream, StreamInput.MEDIA)
        self._ignore(events, "media-without-publish", str(message.type_id))

    # ---------------------------------------------------------------------------------------------- states

    def _move_connection(self, event: ConnectionInput) -> None:
        """Change the state of the connection; the only place that does."""
        following = next_state(CONNECTION_TABLE, self._state, event, "connection")
        if following is not self._state:
            self._state = following
            self._phase_changed()
        self._note_deciding()

    def _move_stream(self, stream: MessageStream, event: StreamInput) -> None:
        if self._streams.move(stream, event):
            self._phase_changed()
            self._note_deciding()

    def _note_deciding(self) -> None:
        self._deciding = self._state is ConnectionState.DECIDING or self._streams.deciding

    def _find_stream(self, stream_id: int) -> MessageStream:
        self._check_open()
        stream = self._streams.find(stream_id)
        if stream is None:
            raise LocalProtocolError(f"there is no message stream {stream_id}")
        return stream

    def _open_stream(self, stream_id: int) -> MessageStream:
        """Return a stream for a command of the peer; one that createStream never gave out is made on the spot."""
        return self._streams.open(stream_id, self._config.limits.message_streams)

    def _fail(self, error: RemoteProtocolError) -> None:
        """End the session and leave a message that says why, where the protocol has a place for one."""
        self._error = str(error)
        state = self._state
        self._move_connection(ConnectionInput.FAIL)
        try:
            self._explain(state, str(error))
        except LimitExceededError:
            # The peer reads nothing, so it will not read this either.
            self._count("unexplained")

    def _explain(self, state: ConnectionState, text: str) -> None:
        if state in (ConnectionState.CONNECTING, ConnectionState.DECIDING):
            self._send_rejection(commands.CONNECT_REJECTED, text)
        elif state is ConnectionState.CONNECTED:
            active = [stream for stream in self._streams if stream.state is not StreamState.IDLE]
            for stream in active:
                self._send(commands.on_status(stream.stream_id, "error", _failure_code(stream), text))
            if not active:
                self._send(commands.on_status(0, "error", commands.CALL_FAILED, text))

    # ---------------------------------------------------------------------------------------------- output

    def _send_rejection(self, code: str, description: str) -> None:
        """Send the ``_error`` that answers connect; the chunk size first, since descriptions get long."""
        self._send_chunk_size()
        self._send(replies.connect_error(self._connect_id, code, description))

    def _status(self, stream: MessageStream, code: str, description: str, level: str = "status") -> None:
        self._send(replies.status(stream.stream_id, code, replies.words(description), level))

    def _stream_event(self, event: int, stream: MessageStream) -> None:
        self._send(replies.stream_event(event, stream.stream_id))

    def _result(self, call: _Call, *values: Any) -> None:
        """Answer a call with ``_result``, if it awaits an answer: transaction id 0 says that it does not."""
        if call.command.transaction_id:
            self._send(commands.command("_result", call.command.transaction_id, *values))

    # ----------------------------------------------------------------------- what our caller answers: connect

    def accept_connect(self) -> None:
        """Let the client in: window, bandwidth, chunk size, then ``NetConnection.Connect.Success``.

        The order is that of SRS and gortmplib; the chunk size stands before the result because OBS breaks on a result
        in chunks of 128 octets.
        """
        self._move_connection(ConnectionInput.ACCEPT)
        self._announce_window(WINDOW_ACK_SIZE_BYTES)
        self._send(encode_control(PeerBandwidth(WINDOW_ACK_SIZE_BYTES)))
        self._send_chunk_size()
        caps_ex = self._config.caps_ex if self._enhanced else None
        self._send(replies.connect_result(self._connect_id, self._object_encoding, caps_ex))
        if self._reconnects:
            self.request_reconnect()

    def reject_connect(self, description: str, code: str = commands.CONNECT_REJECTED) -> None:
        """Turn the client away; close the connection once the reply has been flushed."""
        self._move_connection(ConnectionInput.REJECT)
        self._send_rejection(code, replies.words(description))

    def request_reconnect(self) -> bool:
        """Ask the client to connect again at its next key frame (Enhanced RTMP v2, "Reconnect Request").

        Returns:
            Whether it was asked: it understands that, and has been let in. One that has not is asked when it is.
        """
        self._check_open()
        self._reconnects = self._state is not ConnectionState.CONNECTED
        able = not self._reconnects and bool(self.client_caps_ex & commands.CAPS_RECONNECT)
        if able:
            self._send(commands.on_status(0, "status", commands.RECONNECT_REQUEST, "The server is going down."))
        return able

    # ----------------------------------------------------------------------- what our caller answers: publish

    def accept_publish(self, stream_id: int) -> None:
        stream = self._find_stream(stream_id)
        self._move_stream(stream, StreamInput.ACCEPT_PUBLISH)
        self._stream_event(EVENT_STREAM_BEGIN, stream)
        self._status(stream, commands.PUBLISH_START, "Started publishing stream.")

    def reject_publish(
        self, stream_id: int, code: str = commands.PUBLISH_BAD_NAME, description: str = "The stream is taken."
    ) -> None:
        """Refuse a publish, or take the stream away from a client that is publishing."""
        stream = self._find_stream(stream_id)
        self._move_stream(stream, StreamInput.REJECT_PUBLISH)
        self._drop_held(stream_id)
        self._status(stream, code, description, "error")

    # -------------------------------------------------------------------------- what our caller answers: play

    def accept_play(self, stream_id: int) -> None:
        """Let the client play: Stream Begin, ``NetStream.Play.Reset`` (if asked for) and ``NetStream.Play.Start``.

        There is no ``NetStream.Data.Start``: FFmpeg shows an extra data stream for it. A player that waits gets
        ``NetStream.Play.PublishNotify`` instead, having got the others when it began to wait.
        """
        stream = self._find_stream(stream_id)
        if stream.state is StreamState.WAITING:
            self.publish_notify(stream_id)
            return
        self._move_stream(stream, StreamInput.ACCEPT_PLAY)
        self._start_play(stream)

    def play_waiting(self, stream_id: int) -> None:
        """Let the client wait for a publisher; it is told that playing has started, as nginx-rtmp and SRS do it."""
        stream = self._find_stream(stream_id)
        self._move_stream(stream, StreamInput.WAIT_PLAY)
        self._start_play(stream)

    def _start_play(self, stream: MessageStream) -> None:
        self._stream_event(EVENT_STREAM_BEGIN, stream)
        if stream.reset:
            self._status(stream, commands.PLAY_RESET, "Playing and resetting stream.")
        self._status(stream, commands.PLAY_START, "Started playing stream.")
        if self._config.sample_access:
            self.send_data(stream.stream_id, "|RtmpSampleAccess", True, True)  # lets Flash read samples (SRS 49)

    def reject_play(
        self, stream_id: int, code: str = commands.PLAY_NOT_FOUND, description: str = "There is no such stream."
    ) -> None:
        """Refuse a play, or end one that waits or plays."""
        stream = self._find_stream(stream_id)
        self._move_stream(stream, StreamInput.REJECT_PLAY)
        self._status(stream, code, description, "error")

    def redirect_play(self, stream_id: int, url: RtmpUrl) -> None:
        """Send a player to another server; close the connection once the reply has been flushed.

        The words are those of SRS, which says `url` as ``redirect2``; Adobe's ``redirect`` is without the stream.
        """
        self._move_stream(self._find_stream(stream_id), StreamInput.REJECT_PLAY)
        path = f"{url.tc_url.rstrip('/')}/{url.stream}" + (f"?{url.raw_query}" if url.raw_query else "")
        ex = {"code": float(commands.REDIRECT), "redirect": url.tc_url, "redirect2": path}
        self._send(commands.on_status(0, "error", commands.CONNECT_REJECTED, "RTMP 302 Redirect", ex=ex))

    def publish_notify(self, stream_id: int, *, send: bool = True) -> None:
        self._move_stream(self._find_stream(stream_id), StreamInput.PUBLISH_NOTIFY)
        if send:
            self.repeat_notify(stream_id)

    def unpublish_notify(self, stream_id: int, *, send: bool = True) -> None:
        self._move_stream(self._find_stream(stream_id), StreamInput.UNPUBLISH_NOTIFY)
        if send:
            self.repeat_notify(stream_id)

    def repeat_notify(self, stream_id: int) -> None:
        """Tell a player again whether the stream is published: what a shared log had for it was lost."""
        stream = self._find_stream(stream_id)
        for message in commands.stream_notice(stream_id, published=stream.state is not StreamState.WAITING):
            self._send(message)

    def failure_status(self, stream_id: int, description: str) -> None:
        """Tell the client why its stream is about to end; the state does not change, so close or reject afterwards."""
        stream = self._find_stream(stream_id)
        self._status(stream, _failure_code(stream), description, "error")

    def send_data(self, stream_id: int, *values: Any) -> None:
        """Send a data message (AMF0) to a client that publishes and has asked for it."""
        stream = self._find_stream(stream_id)
        self._send(Message(commands.STREAM_CSID, 0, TYPE_DATA_AMF0, stream.stream_id, amf0.encode(*values)))

    # ------------------------------------------------------------------------------------ the peer's commands

    def _command_message(self, message: Message, events: list[ServerEvent], now: float) -> _Call:
        self._count_command(now)
        name = commands.command_name(message)
        if name and not self._rule(name).argued:  # of any length, and nothing of the rest is read
            message = commands.command_head(message)
        command = decode_command(message, self._config.limits)
        call = _Call(command, message.msid, now, events)
        connecting = command.name == "connect"
        self._move_connection(ConnectionInput.CONNECT if connecting else ConnectionInput.COMMAND)
        if self._state is ConnectionState.REFUSED:
            self._count("after-refusal")
        else:
            self._rule(command.name).obey(self, call)
        return call

    def _rule(self, name: str) -> _Rule:
        return self.rules.get(name, self.courtesy)

    def _obey_courtesy(self, call: _Call) -> None:
        """Answer a command that only wants an answer; one that we do not know too, and report it the first time.

        Unknown ones get an empty result because FFmpeg gives up on an ``_error``.
        """
        courtesy = replies.COURTESIES.get(call.command.name)
        if courtesy is None:
            self._ignore(call.events, "unknown-command", ascii(call.command.name[:64]))
            courtesy = replies.NOT_KNOWN
        self._result(call, None, courtesy.result)
        if courtesy.notify is not None:
            self._send(courtesy.notify)

    def _answered(self, _call: _Call) -> None:
        self._count("unasked-answer")

    def _connect(self, call: _Call) -> None:
        """Put a connect (section 7.2.1.1) to our caller; refuse it ourselves where it does not log in."""
        self._connect_id = call.command.transaction_id
        request = read_connect(call.command, self._config, call.now)
        if isinstance(request, LoginResult):
            # A step of Adobe authentication, or its end.
            self._send_rejection(commands.CONNECT_REJECTED, request.refusal)
            self._move_connection(ConnectionInput.REJECT)
            call.events.append(ConnectRefused(request.reason, request.user))
            return
        named = self._canonical(request.url)
        self._url = request.url  # as it was sent: what is decoded is all of a name, and once
        self.client_caps_ex = request.caps_ex
        self.client_codecs = request.video_codecs
        self._object_encoding = request.object_encoding
        self._enhanced = request.enhanced
        call.events.append(dataclasses.replace(request, url=named))

    def _create_stream(self, call: _Call) -> None:
        stream = self._open_stream(self._streams.free_id())
        self._send(commands.command("_result", call.command.transaction_id, None, float(stream.stream_id)))

    def _close_stream(self, call: _Call) -> None:
        """End what the stream is used for and keep its id; in no specification, but every Flash player sends it."""
        stream = self._streams.find(call.stream_id)
        if stream is not None:
            self._stop(call, stream, "closeStream")

    def _delete_stream(self, call: _Call) -> None:
        stream_id = self._closing_target(call)
        stream = self._streams.find(stream_id)
        if stream is None:
            self._ignore(call.events, "delete-of-no-stream", str(stream_id))
            return
        if stream.state is not StreamState.IDLE:
            call.events.append(StreamClosed(stream_id, "deleteStream"))
        self._move_stream(stream, StreamInput.DELETE)

    def _closing_target(self, call: _Call) -> int:
        if call.command.name == "closeStream":
            return call.stream_id
        return commands.whole(call.argument(0), call.stream_id)

    def _stop(self, call: _Call, stream: MessageStream, reason: str) -> None:
        before = stream.state
        self._move_stream(stream, StreamInput.CLOSE)
        if before is StreamState.IDLE:
            return
        call.events.append(StreamClosed(stream.stream_id, reason))
        if before is StreamState.PUBLISHING:
            self._status(stream, commands.UNPUBLISH_SUCCESS, "Stream is now unpublished.")
        elif before in PLAYING_STATES:
            self._status(stream, commands.PLAY_STOP, "Stopped playing stream.")

    def _named(self, call: _Call, stream: MessageStream, name: Any, code: str) -> RtmpUrl | None:
        """Return the address with the stream name of a publish or play; None when it was refused with `code`."""
        try:
            return self._address(name)
        except RemoteProtocolError as error:
            self._status(stream, code, str(error), "error")
            self._ignore(call.events, "bad-name", str(error))
            return None

    def _address(self, name: Any) -> RtmpUrl:
        # Null and undefined count as no name: then the address alone may say it (an empty stream key in OBS).
        if name is not None and not isinstance(name, str):
            raise RemoteProtocolError(f"stream name is no string but {type(name).__name__}", code="bad-name")
        most_chars = ENCODED_CHARS * self._config.name_max_chars
        return self._canonical(self._url.with_stream(name or "", name_max_chars=most_chars))

    def _canonical(self, url: RtmpUrl) -> RtmpUrl:
        return canonical(url, name_max_chars=self._config.name_max_chars)

    # --------------------------------------------------------------------------------- commands of publishers

    def _publish(self, call: _Call) -> None:
        """Put a publish (section 7.2.2.6) to our caller; a name that cannot be is refused here and may be retried."""
        stream = self._open_stream(call.stream_id)
        if call.argument(0) is False:
            # Wirecast says publish(false) to stop.
            self._stop(call, stream, "publish(false)")
            return
        url = self._named(call, stream, call.argument(0), commands.PUBLISH_BAD_NAME)
        if url is None:
            return
        self._move_stream(stream, StreamInput.PUBLISH)
        stream.path = commands.shared(url.path)
        word = call.argument(1)
        kind = _KINDS.get(word) if isinstance(word, str) else None
        if kind is None and word not in (None, ""):
            # gortmplib sends the application here; without a type, and so with a strange one, it is live.
            self._ignore(call.events, "publish-type", ascii(commands.text(word, 32)))
        call.events.append(
            PublishRequested(stream_id=stream.stream_id, name=url.stream, query=url.query, kind=kind or "live", url=url)
        )

    def _fc_unpublish(self, call: _Call) -> None:
        """End a publication by its name, so that the name is free at once; SRS takes it so too."""
        self._send(replies.UNPUBLISH_NOTIFICATION)
        self._result(call, None, UNDEFINED)
        name = commands.text(call.argument(0), self._config.name_max_chars).partition("?")[0].strip("/")
        with contextlib.suppress(RemoteProtocolError):
            name = self._canonical(RtmpUrl().with_stream(name)).path.removeprefix(f"{DEFAULT_APP}/")
        for stream in self._streams.publishing_as(name, self._canonical(self._url).app):
            self._stop(call, stream, "FCUnpublish")

    # ------------------------------------------------------------------------------------ commands of players

    def _play(self, call: _Call) -> None:
        """Play (section 7.2.2.1): name, start, duration, reset.

        The specification counts start and duration in seconds; librtmp and FFmpeg send milliseconds.
        """
        self._ask_to_play(
            call,
            call.argument(0),
            start_ms=commands.whole(call.argument(1), -2000),
            duration_ms=commands.whole(call.argument(2), -1),
            reset=commands.flag(call.argument(3), default=True),
        )

    def _play2(self, call: _Call) -> None:
        """Switch to another rendition (section 7.2.2.2): for a live stream the same as play of another name."""
        values = commands.properties(call.argument(0))
        self._ask_to_play(
            call,
            values.get("streamName"),
            start_ms=commands.whole(values.get("start"), -2000),
            duration_ms=commands.whole(values.get("len"), -1),
            reset=values.get("transition") == "reset",
        )

    def _ask_to_play(self, call: _Call, name: Any, *, start_ms: int, duration_ms: int, reset: bool) -> None:
        """Put the question to our caller; a stream that plays another name is closed first.

        One that plays this name goes on: closing it and joining again would be much work, for nothing that is seen.
        """
        stream = self._open_stream(call.stream_id)
        if name is False:
            # ActionScript's NetStream.play(false) stops, and Wirecast says it so.
            self._stop(call, stream, "play(false)")
            return
        url = self._named(call, stream, name, commands.PLAY_NOT_FOUND)
        if url is None:
            return
        before = stream.state
        if before in PLAYING_STATES and stream.path == url.path and not stream.paused:
            self._ignore(call.events, "play-again", "")
            self._status(stream, commands.PLAY_START, "Started playing stream.")
            return
        self._move_stream(stream, StreamInput.PLAY)
        if before in PLAYING_STATES:
            call.events.append(StreamClosed(stream.stream_id, call.command.name))
        stream.path = commands.shared(url.path)
        stream.reset = reset
        call.events.append(
            PlayRequested(
                stream_id=stream.stream_id,
                name=url.stream,
                query=url.query,
                start_ms=start_ms,
                duration_ms=None if duration_ms < 0 else duration_ms,
                reset=reset,
                url=url,
            )
        )

    def _playing(self, call: _Call) -> MessageStream | None:
        """Return the stream that a player's command is for; None (and counted) when it plays nothing."""
        stream = self._streams.find(call.stream_id)
        if stream is not None:
            self._move_stream(stream, StreamInput.CONTROL)
            if stream.state in PLAYING_STATES:
                return stream
        self._ignore(call.events, "command-without-play", call.command.name)
        return None

    def _pause(self, call: _Call) -> None:
        """Pause or resume (section 7.2.2.8), answered as SRS does: the status, and Stream EOF or Stream Begin."""
        stream = self._playing(call)
        if stream is None:
            return
        # Without a flag it toggles.
        stream.paused = commands.flag(call.argument(0), default=not stream.paused)
        event = PauseRequested(stream.stream_id, stream.paused)
        if stream.paused:
            self._status(stream, commands.PAUSE_NOTIFY, "Paused stream.")
            self._stream_event(EVENT_STREAM_EOF, stream)
        else:
            self._status(stream, commands.UNPAUSE_NOTIFY, "Unpaused stream.")
            self._stream_event(EVENT_STREAM_BEGIN, stream)
        call.events.append(event)

    def _seek(self, call: _Call) -> None:
        stream = self._playing(call)
        if stream is not None:
            self._status(stream, commands.SEEK_FAILED, "A live stream cannot be searched.", "error")
            call.events.append(SeekRefused(stream.stream_id))

    def _receive_media(self, call: _Call) -> None:
        stream = self._playing(call)
        if stream is None:
            return
        on = commands.flag(call.argument(0), default=True)
        if on:
            # The specification answers true with these two, and false with nothing.
            self._status(stream, commands.SEEK_NOTIFY, "Resumed at the live position.")
            self._status(stream, commands.PLAY_START, "Started playing stream.")
        switched = ReceiveAudio if call.command.name == "receiveAudio" else ReceiveVideo
        call.events.append(switched(stream.stream_id, on))

    rules: ClassVar[Mapping[str, _Rule]] = MappingProxyType(
        {
            "connect": _Rule(_connect),
            "createStream": _Rule(_create_stream, argued=False),
            "closeStream": _Rule(_close_stream, argued=False),
            "deleteStream": _Rule(_delete_stream),
            "publish": _Rule(_publish),
            "FCUnpublish": _Rule(_fc_unpublish),
            "play": _Rule(_play),
            "play2": _Rule(_play2),
            "pause": _Rule(_pause),
            "pauseRaw": _Rule(_pause),
            "seek": _Rule(_seek),
            "receiveAudio": _Rule(_receive_media),
            "receiveVideo": _Rule(_receive_media),
            "_result": _Rule(_answered, argued=False),
            "_error": _Rule(_answered, argued=False),
            "onStatus": _Rule(_answered, argued=False),
        }
    )
    """Rules of the commands that do more than ask for an answer, by their case-sensitive names on the wire."""

    courtesy: ClassVar[_Rule] = _Rule(_obey_courtesy, argued=False)
    """Rule of all other commands."""


def _failure_code(stream: MessageStream) -> str:
    return commands.PLAY_FAILED if stream.state in PLAYER_STATES else commands.STREAM_FAILED
