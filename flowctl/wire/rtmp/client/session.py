"""The client's side of one RTMP connection as an event machine: to publish or to play one stream.

Theory of operation. `connect` starts the handshake; `publish` or `play` says what the connection is for, before or
after it is up. From then on the session goes ahead by itself: connect, releaseStream, FCPublish, createStream, publish
or play, each when the reply to the one before has come, and says how far it is by events. Media comes as `Message`
(player) or goes out through `send_tag` (publisher), which returns octets::

    session = ClientSession(config, now=now)
    session.publish()
    session.connect("rtmp://host/live/room")
    ...  # session.data_to_send() to the socket, what it gives to session.receive(octets, now), until PublishStarted
    octets = session.send_tag(TYPE_VIDEO, timestamp, payload)

Say `play` before `connect`: a player's connect tells its decoders. For load tests the manners can be switched off: no
acknowledgements, no pongs (`ControlConfig`), and messages of any content (`send_message`).

Replies are taken by what is awaited, not only by their transaction id, because nginx-rtmp and SRS have answered with id
0; objects may be null or ECMA arrays. A status that the session has no use for becomes a `StatusReceived`.
"""

from __future__ import annotations

import random
from typing import Any, Final, Literal, NamedTuple

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.adobe_auth import client_parameters
from flowctl.wire.rtmp.chunk.writer import ChunkWriter
from flowctl.wire.rtmp.endpoint import CONTROL_TYPES, NO_LIMIT, Endpoint
from flowctl.wire.rtmp.events import (
    ClientEvent,
    HandshakeDone,
    PlayStarted,
    PublishKind,
    PublishStarted,
    ReconnectRequested,
    Rejected,
    StatusReceived,
    StreamEnded,
)
from flowctl.wire.rtmp.handshake import Handshake
from flowctl.wire.rtmp.messages import (
    EVENT_SET_BUFFER_LENGTH,
    EVENT_STREAM_EOF,
    Command,
    UserControl,
    decode_command,
    decode_message,
    encode_control,
    split_aggregate,
)
from flowctl.wire.rtmp.session_config import WINDOW_ACK_SIZE_BYTES, ClientSessionConfig
from flowctl.wire.rtmp.states import CLIENT_TABLE, ClientInput, ClientState, next_state
from flowctl.wire.rtmp.url import DEFAULT_APP, URL_MAX_CHARS, RtmpUrl, parse_url
from flowctl.wire.rtmp.wire import (
    TYPE_AGGREGATE,
    TYPE_AUDIO,
    TYPE_COMMAND_AMF0,
    TYPE_COMMAND_AMF3,
    TYPE_DATA_AMF0,
    TYPE_DATA_AMF3,
    TYPE_USER_CONTROL,
    TYPE_VIDEO,
    Message,
)

_VIDEO_FOURCCS: Final = ("av01", "vp09", "hvc1", "avc1")
_AUDIO_FOURCCS: Final = ("Opus", "fLaC", "ac-3", "ec-3", "mp4a", ".mp3")
"""Codecs announced in connect (Enhanced RTMP)."""
_CAPS_EX: Final = 15
"""Enhanced RTMP v2 capabilities announced: 1 reconnect, 2 multitrack, 4 ModEx, 8 nanoseconds."""
_CAN_ALL: Final = 7.0
"""Value of FourCcInfoMask: can decode, encode and forward (Enhanced RTMP v2)."""

# Bits of section 7.2.1.1 as FFmpeg sets them when it plays: every codec but the two reserved, and all of video.
_AUDIO_CODECS: Final = 4071.0
_VIDEO_CODECS: Final = 252.0
_CAPABILITIES: Final = 15.0


def _connect_object(config: ClientSessionConfig, url: RtmpUrl, *, parameters: str, playing: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "app": ("" if url.app == DEFAULT_APP else url.app) + parameters,
        "type": "nonprivate",
        "flashVer": config.flash_version,
        "tcUrl": url.tc_url + parameters,
    }
    if playing:
        values |= {
            "fpad": False,
            "capabilities": _CAPABILITIES,
            "audioCodecs": _AUDIO_CODECS,
            "videoCodecs": _VIDEO_CODECS,
            "videoFunction": 1.0,
        }
    return values | {
        "objectEncoding": 0.0,
        "fourCcList": [*_VIDEO_FOURCCS, *_AUDIO_FOURCCS],
        "videoFourCcInfoMap": dict.fromkeys(_VIDEO_FOURCCS, _CAN_ALL),
        "audioFourCcInfoMap": dict.fromkeys(_AUDIO_FOURCCS, _CAN_ALL),
        "capsEx": float(_CAPS_EX if config.multitrack else _CAPS_EX & ~commands.CAPS_MULTITRACK),
    }


_MEDIA: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO})
_DATA: Final = frozenset({TYPE_DATA_AMF0, TYPE_DATA_AMF3})
_COMMANDS: Final = frozenset({TYPE_COMMAND_AMF0, TYPE_COMMAND_AMF3})

# Chunk streams of media: one each, so that audio can go between the chunks of a long video frame (section 5.3.1).
_CSIDS: Final = {TYPE_AUDIO: 4, TYPE_VIDEO: 6, TYPE_DATA_AMF0: 7}

_AWAITING_REPLY: Final = frozenset({ClientState.CONNECTING, ClientState.CREATING, ClientState.ASKING})

_RUNNING_STATES: Final = frozenset({ClientState.ASKING, ClientState.ACTIVE})
"""States in which a status may be about our stream."""

_REJECTABLE: Final = frozenset({ClientState.CONNECTING, ClientState.ASKING})
"""States in which a connection may be rejected: SRS, too, sends a player to another server only when it plays."""

_HARMLESS_CODES: Final = frozenset({commands.SEEK_FAILED, "NetStream.Pause.Failed"})
"""Codes of errors that leave the stream running."""

_ENDING_CODES: Final = frozenset(
    {commands.PLAY_UNPUBLISH_NOTIFY, commands.PLAY_STOP, commands.UNPUBLISH_SUCCESS, "NetStream.Play.Complete"}
)
"""Codes after which nothing more comes, until a publish notification."""

_DESCRIPTION_MAX_CHARS: Final = 1024
"""Most characters kept of the server's description; a challenge of Adobe authentication is below 200."""

_AWAITED_CALLS_MAX: Final = 64
"""Most commands that may await their reply at a time; a publisher sends five."""


class ClientCalls:
    """The commands that await a reply, by transaction id."""

    __slots__ = ("_last_id", "_names")

    def __init__(self) -> None:
        self._last_id = 0
        self._names: dict[int, str] = {}

    def open(self, name: str) -> int:
        self._last_id += 1
        self._names[self._last_id] = name
        if len(self._names) > _AWAITED_CALLS_MAX:
            # The oldest: servers leave FCPublish and the like unanswered.
            del self._names[next(iter(self._names))]
        return self._last_id

    def close(self, transaction_id: float) -> str:
        """Return the name of the command that a reply answers, "" for none of ours, and await it no longer."""
        return self._names.pop(int(transaction_id), "")


class _Purpose(NamedTuple):
    command: Literal["publish", "play"]
    name: str | None  # stream name with its query. None: that of the address.
    last: str | float  # the argument behind the name: the kind of a publish, the start of a play in ms


class ClientSession(Endpoint):
    """One RTMP connection, client side; not thread-safe, sans-I/O."""

    __slots__ = (
        "_calls",
        "_ended",  # bool: StreamEnded was reported and nothing has started since
        "_parameters",  # str: what Adobe authentication appends
        "_purpose",  # _Purpose | None: None until our caller says
        "_state",  # ClientState: assigned by _move only
        "_stream_id",  # int: 0 while there is none
        "_url",
    )

    _config: ClientSessionConfig

    def __init__(self, config: ClientSessionConfig, *, now: float = 0.0, rng: random.Random | None = None) -> None:
        shake = Handshake.client(config.handshake, rng, round(now * 1000))
        super().__init__(config, shake, ChunkWriter(), now)
        self._calls = ClientCalls()
        self._ended = False
        self._parameters = ""
        self._purpose: _Purpose | None = None
        self._state = ClientState.NEW
        self._stream_id = 0
        self._url = RtmpUrl()

    # -------------------------------------------------------------------------------------------- intents

    def connect(self, url: RtmpUrl | str, *, parameters: str = "") -> None:
        self._url = parse_url(url) if isinstance(url, str) else url
        self._move(ClientInput.CONNECT)
        self._parameters = parameters
        if self._handshake is not None:
            self._queue(self._handshake.start())

    def publish(self, name: str | None = None, kind: PublishKind = "live") -> None:
        self._ask(_Purpose("publish", name, kind))

    def play(self, name: str | None = None, *, start_ms: int = -2000) -> None:
        self._ask(_Purpose("play", name, float(start_ms)))

    def close_stream(self) -> None:
        """Stop publishing or playing; the connection stays and may be asked for another stream."""
        self._move(ClientInput.CLOSE)
        if self._publishes:
            self._call("FCUnpublish", None, self._stream_name())
        self._forget_stream()

    def _ask(self, purpose: _Purpose) -> None:
        if self._purpose is not None or self._state in (ClientState.REJECTED, ClientState.CLOSED):
            present = None if self._purpose is None else self._purpose.command
            raise LocalProtocolError(f"cannot {purpose.command}: the session is {self._state.value}, for {present}")
        self._purpose = purpose
        self._create_stream()

    # ------------------------------------------------------------------------------------------ statistics

    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def stream_id(self) -> int:
        """Message stream id that the server gave us, 0 for none."""
        return self._stream_id

    @property
    def url(self) -> RtmpUrl:
        return self._url

    # ----------------------------------------------------------------------------------------------- output

    def send_tag(self, type_id: int, timestamp: int, payload: bytes) -> bytes:
        """Return a tag of an FLV file (audio, video or script data) for the socket; `timestamp` in ms.

        A file holds ``onMetaData`` bare; a server wants it wrapped, as OBS and FFmpeg send it.
        """
        if type_id == TYPE_DATA_AMF0 and not payload.startswith(commands.SET_DATA_FRAME):
            payload = commands.SET_DATA_FRAME + payload
        return self._media(type_id, timestamp, payload)

    def send_message(self, message: Message) -> bytes:
        """Return any message for the socket, whatever the state; for tests and load tests.

        What waited to be sent stands before it, since a Set Chunk Size might be in there.
        """
        if self._handshake is not None:
            raise LocalProtocolError("the handshake is not done")
        return self._behind_waiting(message)

    def _media(self, type_id: int, timestamp: int, payload: bytes) -> bytes:
        if self._state is not ClientState.ACTIVE or not self._publishes:
            raise LocalProtocolError(f"not publishing, the session is {self._state.value}")
        return self._behind_waiting(Message(_CSIDS[type_id], timestamp, type_id, self._stream_id, payload))

    def _behind_waiting(self, message: Message) -> bytes:
        octets = self._writer.write(message)
        return self.data_to_send() + octets

    # --------------------------------------------------------------------------------------- octets and time

    def receive(self, data: bytes | memoryview, now: float) -> list[ClientEvent]:
        self._check_open()
        events: list[ClientEvent] = []
        try:
            if self._handshake is not None:
                data = self._shake(data, events)
            append = events.append
            for message in self._read(data, now):
                if message.type_id in _MEDIA:
                    append(message)
                else:
                    self._handle(message, events, now)
        except RemoteProtocolError as error:
            self._fail(error)
            raise
        self._phase_start(now)
        return events

    def tick(self, now: float) -> list[ClientEvent]:
        self._check_open()
        try:
            self._check_time(self._phase_limit(), now)
        except LimitExceededError as error:
            self._fail(error)
            raise
        return []

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` has something to do, in seconds, at the earliest `now`. None: never."""
        if self._state is ClientState.CLOSED:
            return None
        return self._deadline(self._phase_limit(), now)

    def _phase_limit(self) -> tuple[str, float]:
        if self._state is ClientState.HANDSHAKE:
            return "handshake_time_s", self._config.limits.handshake_time_s
        # A player may wait for a publisher as long as it likes.
        if self._state in _AWAITING_REPLY and (self._state is not ClientState.ASKING or self._publishes):
            return "reply_time_s", self._config.reply_time_s
        return NO_LIMIT

    def _shake(self, data: bytes | memoryview, events: list[ClientEvent]) -> bytes:
        following, style = self._receive_handshake(data)
        if style:
            self._move(ClientInput.HANDSHAKE_DONE)
            events.append(HandshakeDone(style))
            self._send_connect()
        return following

    # ------------------------------------------------------------------------------------------------ state

    def _move(self, event: ClientInput) -> None:
        """Change the state; the only place that does."""
        following = next_state(CLIENT_TABLE, self._state, event, "session")
        if following is not self._state:
            self._state = following
            self._phase_changed()

    def _check_open(self) -> None:
        super()._check_open()
        if self._state is ClientState.NEW:
            raise LocalProtocolError("connect was not called")

    def _fail(self, error: RemoteProtocolError) -> None:
        """End the session; a client explains nothing to a server, which would not read it."""
        self._error = str(error)
        self._move(ClientInput.FAIL)

    @property
    def _publishes(self) -> bool:
        return self._purpose is not None and self._purpose.command == "publish"

    # ------------------------------------------------------------------------------------------- going ahead

    def _call(self, name: str, *values: Any) -> None:
        self._send(commands.command(name, self._calls.open(name), *values))

    def _stream_name(self) -> str:
        """Return the stream name with its query, as publish and play send it (FFmpeg, OBS)."""
        if self._purpose is not None and self._purpose.name is not None:
            return self._purpose.name
        return f"{self._url.stream}?{self._url.raw_query}" if self._url.raw_query else self._url.stream

    def _send_connect(self) -> None:
        # Before connect, as OBS does it, so that the long connect is not cut into chunks of 128 octets.
        self._send_chunk_size()
        playing = self._purpose is not None and not self._publishes
        values = _connect_object(self._config, self._url, parameters=self._parameters, playing=playing)
        self._call("connect", values)

    def _create_stream(self) -> None:
        """Ask for a message stream, when the connection is up and our caller wants to publish or play."""
        if self._state is not ClientState.CONNECTED or self._purpose is None:
            return
        self._move(ClientInput.ASK)
        if self._publishes:
            self._call("releaseStream", None, self._stream_name())
            self._call("FCPublish", None, self._stream_name())
        self._call("createStream", None)

    def _ask_server(self, purpose: _Purpose, stream_id: int) -> None:
        self._stream_id = stream_id
        self._ended = False
        name, send = purpose.command, self._send
        if name == "play":
            buffer = UserControl(EVENT_SET_BUFFER_LENGTH, stream_id=stream_id, buffer_ms=self._config.buffer_ms)
            send(encode_control(buffer))
        arguments = (None, self._stream_name(), purpose.last)
        send(commands.command(name, self._calls.open(name), *arguments, stream_id=stream_id))

    def _forget_stream(self) -> None:
        """Give the message stream back, so that our caller may ask for another one."""
        self._purpose = None
        if self._stream_id:
            self._call("deleteStream", None, float(self._stream_id))
        self._stream_id = 0

    # ------------------------------------------------------------------------------------ the server's messages

    def _handle(self, message: Message, events: list[ClientEvent], now: float) -> None:
        type_id = message.type_id
        if type_id in CONTROL_TYPES:
            self._control(message, events, now)
            if type_id == TYPE_USER_CONTROL:
                self._stream_event(message, events)
        elif type_id in _COMMANDS:
            self._count_control(now)
            self._command(message, events)
        elif type_id in _DATA:
            events.append(self._data(message))
        elif type_id == TYPE_AGGREGATE:
            events += map(self._data, split_aggregate(message, self._config.limits))
        else:
            self._count_control(now)
            self._ignore(events, "unknown-message-type", str(type_id))

    def _data(self, message: Message) -> Message:
        """Return metadata that came as AMF3 as files and players have them; everything else is as it came."""
        made = commands.read_metadata(message, self._config.limits) if message.type_id == TYPE_DATA_AMF3 else None
        return made or message

    def _stream_event(self, message: Message, events: list[ClientEvent]) -> None:
        """Handle a Stream EOF; a status says all that the other stream events say."""
        value = decode_message(message, self._config.limits)
        if isinstance(value, UserControl) and value.event == EVENT_STREAM_EOF and value.stream_id == self._stream_id:
            self._end(events, "stream_eof")

    def _command(self, message: Message, events: list[ClientEvent]) -> None:
        command = decode_command(message, self._config.limits)
        if command.name == "_result":
            self._on_result(command, events)
        elif command.name == "_error":
            self._on_error(command, events)
        elif command.name == "onStatus":
            self._on_status(command, message.msid, events)
        else:
            # onFCPublish, onBWDone and the like are for Flash; what asks for an answer gets an empty one.
            self._ignore(events, "server-command", ascii(command.name[:64]))
            if command.transaction_id:
                self._send(commands.command("_result", command.transaction_id, None, None))

    # --------------------------------------------------------------------------------------------- replies

    def _awaited(self, command: Command) -> str:
        """Return the name of the command that `command` answers, "" for none.

        By its transaction id; where that is of no command of ours (0 is common), by what the session waits for.
        """
        name = self._calls.close(command.transaction_id)
        if not name and self._state is ClientState.CONNECTING:
            return "connect"
        if not name and self._state is ClientState.CREATING and command.arguments:
            # Id 0 and a number: that is no answer to releaseStream or FCPublish.
            return "createStream" if isinstance(command.arguments[0], float) else ""
        return name

    def _on_result(self, command: Command, events: list[ClientEvent]) -> None:
        """Go ahead after a reply to connect or createStream; publish and play are answered by a status instead."""
        name = self._awaited(command)
        if name == "connect" and self._state is ClientState.CONNECTING:
            self._connected(command, events)
        elif name == "createStream":
            self._created(command, events)
        else:
            self._count("result-of-no-use")

    def _connected(self, command: Command, events: list[ClientEvent]) -> None:
        information = commands.first_properties(list(command.arguments))
        if commands.text(information.get("level")) == "error":
            # A refusal dressed as a result.
            self._refused("connect", information, events)
            return
        self._move(ClientInput.ACCEPTED)
        self._announce_window(WINDOW_ACK_SIZE_BYTES)
        self._create_stream()

    def _created(self, command: Command, events: list[ClientEvent]) -> None:
        stream_id = commands.whole(command.arguments[0] if command.arguments else None, -1)
        if self._state is not ClientState.CREATING or self._purpose is None:
            # Our caller has closed the stream before it was there.
            self._count("late-stream")
            if 0 <= stream_id <= 0xFFFFFFFF:
                self._call("deleteStream", None, float(stream_id))
        elif 0 <= stream_id <= 0xFFFFFFFF:
            self._move(ClientInput.STREAM_CREATED)
            self._ask_server(self._purpose, stream_id)
        else:
            self._refused("createStream", {"description": "the reply has no stream id"}, events)

    def _on_error(self, command: Command, events: list[ClientEvent]) -> None:
        """Handle an ``_error``: the refusal of what the session waits for, or of something unimportant."""
        name = self._awaited(command)
        # The object stands in the place of either.
        information = commands.first_properties([*command.arguments, command.object])
        awaited = (
            (name == "connect" and self._state is ClientState.CONNECTING)
            or (name == "createStream" and self._state is ClientState.CREATING)
            or (name in ("publish", "play") and self._state in _RUNNING_STATES)
        )
        if awaited:
            self._refused(name, information, events)
        else:
            # releaseStream and FCPublish fail on many servers, and nothing depends on them (FFmpeg ignores it too).
            self._count("error-of-no-use")

    def _refused(self, what: str, information: dict[str, Any], events: list[ClientEvent]) -> None:
        """Report that `what` was refused, with what to try next if the server asks for authentication."""
        code = commands.text(information.get("code"))
        description = commands.text(information.get("description"), _DESCRIPTION_MAX_CHARS)
        retry = None
        if what == "connect":
            self._move(ClientInput.REJECTED)
            retry = client_parameters(description, self._url.user, self._url.password)
            if retry is not None and _auth_step(retry) <= _auth_step(self._parameters):
                # No step ahead: wrong credentials, or a server that would have us try for ever.
                retry = None
        else:
            self._move(ClientInput.REFUSED)
            self._forget_stream()
        redirect = _redirect_of(information, self._url)
        events.append(
            Rejected(what=what, code=code, description=description, retry_parameters=retry, redirect=redirect)
        )

    # ---------------------------------------------------------------------------------------------- status

    def _on_status(self, command: Command, stream_id: int, events: list[ClientEvent]) -> None:
        """Handle a status by its code; the level decides only where the code is not known.

        The message stream id is not looked at to tell connection from stream: servers put statuses on either.
        """
        information = commands.first_properties([*command.arguments, command.object])
        code = commands.text(information.get("code"))
        level = commands.text(information.get("level"))
        description = commands.text(information.get("description"), _DESCRIPTION_MAX_CHARS)
        if code == commands.RECONNECT_REQUEST:
            where = commands.text(information.get("tcUrl"), 8192) or None
            events.append(ReconnectRequested(where, description))
            return
        if code == commands.CONNECT_REJECTED and self._state in _REJECTABLE:
            self._refused("connect" if self._state is ClientState.CONNECTING else "play", information, events)
            return
        if self._state is ClientState.ASKING and self._starts(code):
            self._move(ClientInput.STARTED)
            started = PublishStarted if self._publishes else PlayStarted
            events.append(started(self._stream_id))
            return
        if self._state is ClientState.ASKING and level == "error":
            self._refused("publish" if self._publishes else "play", information, events)
            return
        events.append(StatusReceived(stream_id, level, code, description))
        if self._state is ClientState.ACTIVE:
            self._running_status(code, level, events)

    def _starts(self, code: str) -> bool:
        return code == (commands.PUBLISH_START if self._publishes else commands.PLAY_START)

    def _running_status(self, code: str, level: str, events: list[ClientEvent]) -> None:
        if self._starts(code) or code == commands.PLAY_PUBLISH_NOTIFY:
            self._move(ClientInput.STARTED)
            self._ended = False
        elif level == "error" and code not in _HARMLESS_CODES:
            self._end(events, code)
            self._move(ClientInput.REFUSED)
            self._forget_stream()
        elif code in _ENDING_CODES:
            self._end(events, code)

    def _end(self, events: list[ClientEvent], reason: str) -> None:
        """Report the end of the stream once: servers say it by Stream EOF, by a status, or by both."""
        if not self._ended and self._state in _RUNNING_STATES:
            self._ended = True
            events.append(StreamEnded(self._stream_id, reason))


def _auth_step(parameters: str) -> int:
    """Return how far Adobe authentication has come: 0 nothing said, 1 the user, 2 the answer."""
    return ("authmod=" in parameters) + ("&response=" in parameters)


def _redirect_of(information: dict[str, Any], url: RtmpUrl) -> str | None:
    """Return where a refusal sends us: SRS names the stream in ``redirect2``, Adobe's ``redirect`` has none."""
    ex = information.get("ex")
    if not isinstance(ex, dict) or commands.whole(ex.get("code"), 0) != commands.REDIRECT:
        return None
    whole = commands.text(ex.get("redirect2"), URL_MAX_CHARS)
    base = commands.text(ex.get("redirect"), URL_MAX_CHARS).rstrip("/")
    query = f"?{url.raw_query}" if url.raw_query else ""
    return whole or (f"{base}/{url.stream}{query}" if base else None)
