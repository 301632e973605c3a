"""What the server of a client session may say: replies, status messages, stream events, media.

Replies are taken by what is awaited, not only by their transaction id, because nginx-rtmp and SRS have answered with id
0; objects may be null or ECMA arrays. A status that the session has no use for becomes a `StatusReceived`.
"""

from __future__ import annotations

from typing import Any, Final

from flowctl.errors import InternalError
from flowctl.rtmp import commands
from flowctl.rtmp.adobe_auth import client_parameters
from flowctl.rtmp.client.core import ClientCore
from flowctl.rtmp.client.states import ClientInput, ClientState
from flowctl.rtmp.events import (
    ClientEvent,
    Connected,
    PlayStarted,
    PublishStarted,
    ReconnectRequested,
    Rejected,
    StatusReceived,
    StreamCreated,
    StreamEnded,
)
from flowctl.rtmp.messages import EVENT_STREAM_EOF, Command, UserControl, decode_message, split_aggregate
from flowctl.rtmp.wire import (
    TYPE_AGGREGATE,
    TYPE_COMMAND_AMF0,
    TYPE_COMMAND_AMF3,
    TYPE_DATA_AMF0,
    TYPE_DATA_AMF3,
    TYPE_PEER_BANDWIDTH,
    TYPE_SET_CHUNK_SIZE,
    TYPE_USER_CONTROL,
    Message,
)

_DATA: Final = frozenset({TYPE_DATA_AMF0, TYPE_DATA_AMF3})
_COMMANDS: Final = frozenset({TYPE_COMMAND_AMF0, TYPE_COMMAND_AMF3})
_HARMLESS: Final = frozenset({commands.SEEK_FAILED, "NetStream.Pause.Failed"})
"""Errors of a request that leave the stream running."""

_ENDING: Final = frozenset(
    {commands.PLAY_UNPUBLISH_NOTIFY, commands.PLAY_STOP, commands.UNPUBLISH_SUCCESS, "NetStream.Play.Complete"}
)
"""Codes after which nothing more comes, until a publish notification."""

_RUNNING: Final = frozenset({ClientState.ASKING, ClientState.ACTIVE})
"""States in which a status may be about our stream."""

_DESCRIPTION_MAX_CHARS: Final = 1024
"""Limit on the server's words that are kept; a challenge of Adobe authentication is below 200."""


class ClientReplies(ClientCore):
    """The server's messages; not for use on its own."""

    __slots__ = ()

    def _handle(self, message: Message, events: list[ClientEvent], now: float) -> None:
        """Treat one message that is no audio and no video.

        Raises:
            RemoteProtocolError: it breaks the protocol.
            LimitExceededError: there are too many of its kind, or its values are too many or too deep.
        """
        type_id = message.type_id
        if TYPE_SET_CHUNK_SIZE <= type_id <= TYPE_PEER_BANDWIDTH:
            event = self._control.handle(message, self._reader.bytes_received, now, muted=False)
            if event is not None:
                events.append(event)
            elif type_id == TYPE_USER_CONTROL:
                self._stream_event(message, events)
        elif type_id in _COMMANDS:
            self._control.count_rate(now)
            self._command(message, events)
        elif type_id in _DATA:
            events.append(message)
        elif type_id == TYPE_AGGREGATE:
            events += split_aggregate(message, self._config.limits)
        else:
            self._control.count_rate(now)
            ignored = self._control.ignore("unknown-message-type", str(type_id))
            if ignored is not None:
                events.append(ignored)

    def _stream_event(self, message: Message, events: list[ClientEvent]) -> None:
        """Take a Stream EOF; the other stream events say nothing that a status does not say as well."""
        value = decode_message(message, self._config.limits)
        if isinstance(value, UserControl) and value.event == EVENT_STREAM_EOF and value.stream_id == self._stream_id:
            self._end(events, "stream_eof")

    def _command(self, message: Message, events: list[ClientEvent]) -> None:
        """Take a reply, a status, or a call of the server."""
        command = decode_message(message, self._config.limits)
        if not isinstance(command, Command):
            raise InternalError(f"a message of type {message.type_id} is no command")
        if command.name == "_result":
            self._on_result(command, events)
        elif command.name == "_error":
            self._on_error(command, events)
        elif command.name == "onStatus":
            self._on_status(command, message.msid, events)
        else:
            # onFCPublish, onBWDone and the like are for Flash; what asks for an answer gets an empty one.
            ignored = self._control.ignore("server-command", ascii(command.name[:64]))
            if ignored is not None:
                events.append(ignored)
            if command.transaction_id:
                self._send(commands.command("_result", command.transaction_id, None, None))

    # --------------------------------------------------------------------------------------------- replies

    def _awaited(self, command: Command) -> str:
        """Return the name of the command that `command` answers, "" for none.

        By its transaction id; where that is of no command of ours (0 is common), by what the session waits for.
        """
        name = self._replies.pop(int(command.transaction_id), "")
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
            self._control.count("result-of-no-use")

    def _connected(self, command: Command, events: list[ClientEvent]) -> None:
        """Take the reply to connect: properties and information, either of which may be null."""
        information = commands.first_properties(list(command.arguments))
        if commands.text(information.get("level")) == "error":
            # A refusal dressed as a result.
            self._refused("connect", information, events)
            return
        self._move(ClientInput.ACCEPTED)
        caps_ex = commands.whole(commands.member(information, "capsEx"), 0) & 0xFFFFFFFF
        properties = commands.properties(command.object)
        events.append(Connected(properties=properties, information=information, caps_ex=caps_ex))
        self._control.announce_window(self._config.window_ack_size_bytes)
        self._create_stream()

    def _created(self, command: Command, events: list[ClientEvent]) -> None:
        """Take the reply to createStream, and ask for what the stream is for."""
        stream_id = commands.whole(command.arguments[0] if command.arguments else None, -1)
        if self._state is not ClientState.CREATING:
            # Our caller has closed the stream before it was there.
            self._control.count("late-stream")
            if 0 <= stream_id <= 0xFFFFFFFF:
                self._call("deleteStream", None, float(stream_id))
        elif 0 <= stream_id <= 0xFFFFFFFF:
            self._move(ClientInput.STREAM_CREATED)
            events.append(StreamCreated(stream_id))
            self._ask_server(stream_id)
        else:
            self._refused("createStream", {"description": "the reply has no stream id"}, events)

    def _on_error(self, command: Command, events: list[ClientEvent]) -> None:
        """Take an ``_error``: the refusal of what the session waits for, or of something that nothing depends on."""
        name = self._awaited(command)
        # The object stands in the place of either.
        information = commands.first_properties([*command.arguments, command.object])
        awaited = (
            (name == "connect" and self._state is ClientState.CONNECTING)
            or (name == "createStream" and self._state is ClientState.CREATING)
            or (name in ("publish", "play") and self._state in _RUNNING)
        )
        if awaited:
            self._refused(name, information, events)
        else:
            # releaseStream and FCPublish fail on many servers, and nothing depends on them (FFmpeg ignores it too).
            self._control.count("error-of-no-use")

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
        events.append(Rejected(what=what, code=code, description=description, retry_parameters=retry))

    def _forget_stream(self) -> None:
        """Give the message stream back, so that our caller may ask for another one."""
        if self._stream_id:
            self._call("deleteStream", None, float(self._stream_id))
        self._stream_id = 0
        self._purpose = None

    # ---------------------------------------------------------------------------------------------- status

    def _on_status(self, command: Command, stream_id: int, events: list[ClientEvent]) -> None:
        """Take a status by its code; the level decides only where the code says nothing.

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
        if code == commands.CONNECT_REJECTED and self._state is ClientState.CONNECTING:
            self._refused("connect", information, events)
            return
        if self._state is ClientState.ASKING and self._starts(code):
            self._move(ClientInput.STARTED)
            started = PublishStarted if self._purpose == "publish" else PlayStarted
            events.append(started(self._stream_id))
            return
        if self._state is ClientState.ASKING and level == "error":
            self._refused(self._purpose or "", information, events)
            return
        events.append(StatusReceived(stream_id, level, code, description))
        if self._state is ClientState.ACTIVE:
            self._running_status(code, level, events)

    def _starts(self, code: str) -> bool:
        """Return whether `code` is the one that the session's purpose waits for."""
        return code == (commands.PUBLISH_START if self._purpose == "publish" else commands.PLAY_START)

    def _running_status(self, code: str, level: str, events: list[ClientEvent]) -> None:
        """Take a status while the stream runs: it went on, was taken away, or is over for now."""
        if self._starts(code) or code == commands.PLAY_PUBLISH_NOTIFY:
            self._move(ClientInput.STARTED)
            self._ended = False
        elif level == "error" and code not in _HARMLESS:
            self._end(events, code)
            self._move(ClientInput.REFUSED)
            self._forget_stream()
        elif code in _ENDING:
            self._end(events, code)

    def _end(self, events: list[ClientEvent], reason: str) -> None:
        """Report the end of the stream once: servers say it by Stream EOF, by a status, or by both."""
        if not self._ended and self._state in _RUNNING:
            self._ended = True
            events.append(StreamEnded(self._stream_id, reason))


def _auth_step(parameters: str) -> int:
    """Return how far Adobe authentication has come: 0 nothing said, 1 the user, 2 the answer."""
    return ("authmod=" in parameters) + ("&response=" in parameters)
