"""What the peer of a server session may ask: one method per command, replies as Flash-era clients expect them.

Commands whose outcome is our caller's to decide become an event and put the stream (or the connection) into a deciding
state; everything else is answered here. Commands that only old encoders send and nobody waits for (releaseStream,
_checkbw) get an empty result; unknown ones too, because FFmpeg gives up on an ``_error``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

from flowctl.errors import RemoteProtocolError
from flowctl.rtmp import commands
from flowctl.rtmp.adobe_auth import split_answer
from flowctl.rtmp.events import (
    ConnectRefused,
    ConnectRequested,
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
from flowctl.rtmp.messages import EVENT_STREAM_BEGIN, EVENT_STREAM_EOF, Command
from flowctl.rtmp.server_core import MessageStream, ServerCore
from flowctl.rtmp.server_states import ConnectionInput, ConnectionState, StreamInput, StreamState
from flowctl.rtmp.url import RtmpUrl, from_connect, unquote
from flowctl.rtmp.values import UNDEFINED

_KINDS: Final[dict[str, PublishKind]] = {
    "live": "live",
    "record": "record",
    "append": "append",
    "appendWithGap": "append",
}
_PLAYING: Final = frozenset({StreamState.PLAYING, StreamState.WAITING})


class Call(NamedTuple):
    """A command and where it came from.

    Args:
        command: the command.
        stream_id: message stream it came on.
        now: seconds.
        events: where its events go.
    """

    command: Command
    stream_id: int
    now: float
    events: list[ServerEvent]

    def argument(self, index: int) -> Any:
        """Return argument `index` (from 0, after the command object). None: there is none, or it is undefined."""
        arguments = self.command.arguments
        value = arguments[index] if index < len(arguments) else None
        return None if value is UNDEFINED else value


class ServerCommands(ServerCore):
    """The peer's commands; not for use on its own."""

    __slots__ = ()

    def _run(self, call: Call) -> None:
        """Obey one command.

        Raises:
            RemoteProtocolError: code ``unexpected-command`` and others; ends the session.
            LimitExceededError: ``message_streams``; ends the session.
        """
        name = call.command.name
        connecting = name == "connect"
        self._move_connection(ConnectionInput.CONNECT if connecting else ConnectionInput.COMMAND)
        if self._state is ConnectionState.REFUSED:
            self._control.count("after-refusal")
        elif connecting:
            self._connect(call)
        else:
            handler = self._HANDLERS.get(name)
            if handler is None:
                self._unknown(call)
            else:
                handler(self, call)

    def _result(self, call: Call, *values: Any) -> None:
        # Transaction id 0 says that no answer is awaited.
        if call.command.transaction_id:
            self._send(commands.command("_result", call.command.transaction_id, *values))

    def _ignore(self, call: Call, what: str, detail: str) -> None:
        event = self._control.ignore(what, detail)
        if event is not None:
            call.events.append(event)

    # --------------------------------------------------------------------------------------------- connect

    def _connect(self, call: Call) -> None:
        self._connect_id = call.command.transaction_id
        values = commands.first_properties([call.command.object, *call.command.arguments])
        if not values:
            raise RemoteProtocolError("connect has no command object", code="bad-connect")
        tc_url, answer = split_answer(unquote(commands.text(commands.member(values, "tcUrl"), 65536)))
        app, app_answer = split_answer(unquote(commands.text(commands.member(values, "app"), 65536)))
        user = None
        if self._config.authenticator is not None:
            verdict = self._config.authenticator.check(answer or app_answer, call.now)
            if not verdict.accepted:
                self._refuse(call, verdict.refusal, verdict.reason, verdict.user)
                return
            user = verdict.user
        self._url = from_connect(tc_url or None, app or None, name_max_chars=self._config.name_max_chars)
        self.client_caps_ex = int(commands.number(commands.member(values, "capsEx"), 0)) & 0xFFFFFFFF
        # Anything but exactly 3 (null, undefined and missing occur) means AMF0, which all of them read.
        self._object_encoding = 3 if commands.member(values, "objectEncoding") == 3 else 0
        codecs = commands.fourcc_list(values)
        self._enhanced = bool(codecs or self.client_caps_ex)
        name, _, instance = self._url.app.partition("/")
        call.events.append(
            ConnectRequested(
                app=name,
                instance=instance,
                query=self._url.query,
                tc_url=tc_url,
                url=self._url,
                flash_ver=commands.text(commands.member(values, "flashVer")),
                object_encoding=self._object_encoding,
                page_url=commands.text(commands.member(values, "pageUrl"), 2048),
                user=user,
                fourcc_list=codecs,
                caps_ex=self.client_caps_ex,
                raw=values,
            )
        )

    def _refuse(self, call: Call, description: str, reason: str, user: str) -> None:
        self._send_rejection(description, commands.CONNECT_REJECTED)
        self._move_connection(ConnectionInput.REJECT)
        call.events.append(ConnectRefused(reason, user))

    # ------------------------------------------------------------------------------------- message streams

    def _create_stream(self, call: Call) -> None:
        # The lowest free id, so the first one is 1, which some clients take for granted.
        stream_id = next(number for number in range(1, len(self._streams) + 2) if number not in self._streams)
        self._open_stream(stream_id)
        self._send(commands.command("_result", call.command.transaction_id, None, float(stream_id)))

    def _close_stream(self, call: Call) -> None:
        stream = self._streams.get(call.stream_id)
        if stream is not None:
            self._stop(call, stream, "closeStream")

    def _closing_target(self, call: Call) -> int:
        """Return the stream that a closeStream or deleteStream names."""
        return (
            call.stream_id if call.command.name == "closeStream" else commands.whole(call.argument(0), call.stream_id)
        )

    def _delete_stream(self, call: Call) -> None:
        stream_id = self._closing_target(call)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._ignore(call, "delete-of-no-stream", str(stream_id))
            return
        if stream.state is not StreamState.IDLE:
            call.events.append(StreamClosed(stream_id, "deleteStream"))
        # No reply: section 7.2.2.3.
        self._move_stream(stream, StreamInput.DELETE)

    def _stop(self, call: Call, stream: MessageStream, reason: str) -> None:
        """End what a stream is used for and say so, at the peer's word."""
        before = stream.state
        self._move_stream(stream, StreamInput.CLOSE)
        if before is StreamState.IDLE:
            return
        call.events.append(StreamClosed(stream.stream_id, reason))
        if before is StreamState.PUBLISHING:
            self._status(stream, commands.UNPUBLISH_SUCCESS, "Stream is now unpublished.")
        elif before in _PLAYING:
            self._status(stream, commands.PLAY_STOP, "Stopped playing stream.")

    # --------------------------------------------------------------------------------------------- publish

    def _publish(self, call: Call) -> None:
        stream = self._open_stream(call.stream_id)
        if call.argument(0) is False:
            # Wirecast says publish(false) to stop.
            self._stop(call, stream, "publish(false)")
            return
        url = self._named(call, stream, call.argument(0), commands.PUBLISH_BAD_NAME)
        if url is None:
            return
        self._move_stream(stream, StreamInput.PUBLISH)
        stream.name = url.stream
        word = call.argument(1)
        kind = _KINDS.get(word) if isinstance(word, str) else None
        if kind is None and word not in (None, ""):
            # gortmplib sends the application here; without a type, and so with a strange one, it is live.
            self._ignore(call, "publish-type", type(word).__name__)
        call.events.append(
            PublishRequested(stream_id=stream.stream_id, name=url.stream, query=url.query, kind=kind or "live", url=url)
        )

    def _named(self, call: Call, stream: MessageStream, name: Any, code: str) -> RtmpUrl | None:
        """Return the address with the stream name of a publish or play; None when it was refused with `code`."""
        try:
            return self._address(name)
        except RemoteProtocolError as error:
            self._status(stream, code, str(error), "error")
            self._ignore(call, "bad-name", str(error))
            return None

    def _address(self, name: Any) -> RtmpUrl:
        if name is not None and not isinstance(name, str):
            raise RemoteProtocolError(f"stream name is no string but {type(name).__name__}", code="bad-name")
        return self._url.with_stream(name or "", name_max_chars=self._config.name_max_chars)

    def _release_stream(self, call: Call) -> None:
        self._result(call, None, UNDEFINED)

    def _fc_publish(self, call: Call) -> None:
        self._result(call, None, UNDEFINED)
        # Flash Media Live Encoder waits for it before it publishes.
        self._notify("onFCPublish", commands.PUBLISH_START, "Started publishing stream.")

    def _fc_unpublish(self, call: Call) -> None:
        self._notify("onFCUnpublish", commands.UNPUBLISH_SUCCESS, "Stopped publishing stream.")
        self._result(call, None, UNDEFINED)
        publishing = [self._streams[stream_id] for stream_id in sorted(self._publishing)]
        name = commands.text(call.argument(0)).partition("?")[0].rpartition("/")[2]
        for stream in publishing:
            if stream.name == name or len(publishing) == 1:
                self._stop(call, stream, "FCUnpublish")

    def _notify(self, name: str, code: str, description: str) -> None:
        self._send(commands.command(name, 0, None, commands.status("status", code, description)))

    # ------------------------------------------------------------------------------------------------ play

    def _play(self, call: Call) -> None:
        self._ask_to_play(
            call,
            call.argument(0),
            start_ms=commands.whole(call.argument(1), -2000),
            duration_ms=commands.whole(call.argument(2), -1),
            reset=commands.flag(call.argument(3), default=True),
        )

    def _play2(self, call: Call) -> None:
        """Switch to another rendition (section 7.2.2.2): for a live stream the same as play of another name."""
        values = commands.properties(call.argument(0))
        self._ask_to_play(
            call,
            values.get("streamName"),
            start_ms=commands.whole(values.get("start"), -2000),
            duration_ms=commands.whole(values.get("len"), -1),
            reset=values.get("transition") == "reset",
        )

    def _ask_to_play(self, call: Call, name: Any, *, start_ms: int, duration_ms: int, reset: bool) -> None:
        stream = self._open_stream(call.stream_id)
        if name is False:
            self._stop(call, stream, "play(false)")
            return
        url = self._named(call, stream, name, commands.PLAY_NOT_FOUND)
        if url is None:
            return
        before = stream.state
        self._move_stream(stream, StreamInput.PLAY)
        if before in _PLAYING:
            call.events.append(StreamClosed(stream.stream_id, call.command.name))
        stream.name = url.stream
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

    def _playing(self, call: Call) -> MessageStream | None:
        """Return the stream that a player's command is for; None (and counted) when it plays nothing."""
        stream = self._streams.get(call.stream_id)
        if stream is not None:
            self._move_stream(stream, StreamInput.CONTROL)
            if stream.state in _PLAYING:
                return stream
        self._ignore(call, "command-without-play", call.command.name)
        return None

    def _pause(self, call: Call) -> None:
        stream = self._playing(call)
        if stream is None:
            return
        stream.paused = commands.flag(call.argument(0), default=not stream.paused)
        event = PauseRequested(stream.stream_id, stream.paused, commands.whole(call.argument(1), 0))
        if stream.paused:
            self._status(stream, commands.PAUSE_NOTIFY, "Paused stream.")
            self._user_control(EVENT_STREAM_EOF, stream)
        else:
            self._status(stream, commands.UNPAUSE_NOTIFY, "Unpaused stream.")
            self._user_control(EVENT_STREAM_BEGIN, stream)
        call.events.append(event)

    def _seek(self, call: Call) -> None:
        stream = self._playing(call)
        if stream is not None:
            self._status(stream, commands.SEEK_FAILED, "A live stream cannot be searched.", "error")
            call.events.append(SeekRefused(stream.stream_id, commands.whole(call.argument(0), 0)))

    def _receive_audio(self, call: Call) -> None:
        stream = self._playing(call)
        if stream is not None:
            call.events.append(ReceiveAudio(stream.stream_id, self._wanted(call, stream)))

    def _receive_video(self, call: Call) -> None:
        stream = self._playing(call)
        if stream is not None:
            call.events.append(ReceiveVideo(stream.stream_id, self._wanted(call, stream)))

    def _wanted(self, call: Call, stream: MessageStream) -> bool:
        wanted = commands.flag(call.argument(0), default=True)
        if wanted:
            # Section 7.2.2.4: these two answer a receiveAudio(true); false is answered by nothing.
            self._status(stream, commands.SEEK_NOTIFY, "Resumed at the live position.")
            self._status(stream, commands.PLAY_START, "Started playing stream.")
        return wanted

    def _fc_subscribe(self, call: Call) -> None:
        self._result(call, None, UNDEFINED)
        self._notify("onFCSubscribe", commands.PLAY_START, "Started playing stream.")

    def _fc_unsubscribe(self, call: Call) -> None:
        self._result(call, None, UNDEFINED)
        self._notify("onFCUnsubscribe", commands.PLAY_STOP, "Stopped playing stream.")

    # ------------------------------------------------------------------------------------------------ rest

    def _stream_length(self, call: Call) -> None:
        # Seconds; live streams have none. FFmpeg asks before it plays.
        self._result(call, None, 0.0)

    def _empty_result(self, call: Call) -> None:
        self._result(call, None, None)

    def _answered(self, _call: Call) -> None:
        self._control.count("unasked-answer")

    def _unknown(self, call: Call) -> None:
        self._ignore(call, "unknown-command", ascii(call.command.name[:64]))
        self._result(call, None, None)

    _HANDLERS: ClassVar[Mapping[str, Callable[[Any, Call], None]]] = MappingProxyType(
        {
            "createStream": _create_stream,
            "closeStream": _close_stream,
            "deleteStream": _delete_stream,
            "publish": _publish,
            "releaseStream": _release_stream,
            "FCPublish": _fc_publish,
            "FCUnpublish": _fc_unpublish,
            "play": _play,
            "play2": _play2,
            "pause": _pause,
            "pauseRaw": _pause,
            "seek": _seek,
            "receiveAudio": _receive_audio,
            "receiveVideo": _receive_video,
            "FCSubscribe": _fc_subscribe,
            "FCUnsubscribe": _fc_unsubscribe,
            "getStreamLength": _stream_length,
            "_checkbw": _empty_result,
            "checkBandwidth": _empty_result,
            "_result": _answered,
            "_error": _answered,
            "onStatus": _answered,
        }
    )
