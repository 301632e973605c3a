"""What the peer of a server session may ask: one method per command, replies as Flash-era clients expect them.

Commands whose outcome is our caller's to decide become an event and put the stream (or the connection) into a deciding
state; everything else is answered here. Commands that only old encoders send and nobody waits for (releaseStream,
_checkbw) get an empty result; unknown ones too, because FFmpeg gives up on an ``_error``.

How real encoders go about it: OBS and FFmpeg send connect, releaseStream, FCPublish, createStream, publish and wait for
the reply to each but the second and third. Haivision checks the bandwidth before createStream and announces after it.
Flash publishes without announcing. All of them may stop by FCUnpublish, closeStream, deleteStream, in any order, and
Wirecast by publish(false). None of this needs a state of its own: only publish, play and what ends them have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Final

from flowctl.errors import RemoteProtocolError
from flowctl.rtmp import commands
from flowctl.rtmp.adobe_auth import split_answer
from flowctl.rtmp.amf.values import UNDEFINED
from flowctl.rtmp.events import (
    ConnectRefused,
    ConnectRequested,
    PublishKind,
    PublishRequested,
    StreamClosed,
)
from flowctl.rtmp.server.calls import Call
from flowctl.rtmp.server.play_commands import PlayCommands
from flowctl.rtmp.server.states import ConnectionInput, ConnectionState, StreamInput, StreamState
from flowctl.rtmp.url import RtmpUrl, from_connect, unquote

_KINDS: Final[dict[str, PublishKind]] = {
    "live": "live",
    "record": "record",
    "append": "append",
    "appendWithGap": "append",
}

ARGUED: Final = frozenset(
    {"connect", "deleteStream", "publish", "FCUnpublish", "play", "play2", "pause", "pauseRaw", "seek"}
    | {"receiveAudio", "receiveVideo"}
)
"""Commands of which more is read than name and transaction id."""

_SHARED_ADDRESSES: Final = 256
_SHARED_CHARS: Final = 256
"""How many addresses of connect commands are kept to be shared, and how long each may be."""
_OWN_MARKS: Final = ("?", "@", "vhost...")
"""What an address contains that has a query or credentials ("app...vhost...name" is an old spelling of a query)."""


@lru_cache(_SHARED_ADDRESSES)
def _shared_address(tc_url: str, app: str, name_max_chars: int) -> RtmpUrl:
    return from_connect(tc_url or None, app or None, name_max_chars=name_max_chars)


def _connect_address(tc_url: str, app: str, name_max_chars: int) -> RtmpUrl:
    """Return the address that a connect states: the same object, parsed once, for all who come to the same address.

    One with a query or with credentials is its peer's own, and must not outlive the connection.
    """
    text = tc_url + app
    if len(text) > _SHARED_CHARS or any(mark in text for mark in _OWN_MARKS):
        return from_connect(tc_url or None, app or None, name_max_chars=name_max_chars)
    return _shared_address(tc_url, app, name_max_chars)


class ServerCommands(PlayCommands):
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
            handler = self.handlers.get(name)
            if handler is None:
                self._unknown(call)
            else:
                handler(self, call)

    # --------------------------------------------------------------------------------------------- connect

    def _connect(self, call: Call) -> None:
        """Read connect (section 7.2.1.1), authenticate if there are credentials, and put the question to our caller.

        Members of the command object are all optional and of any type: what is missing or odd counts as not said.

        Raises:
            RemoteProtocolError: code ``bad-connect`` (no command object), ``bad-url`` or ``bad-name``.
        """
        self._connect_id = call.command.transaction_id
        # The object has been seen as an ECMA array, and behind a null in its place.
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
        self._url = _connect_address(tc_url, app, self._config.name_max_chars)
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
                flash_ver=commands.shared(commands.text(commands.member(values, "flashVer"))),
                object_encoding=self._object_encoding,
                page_url=commands.text(commands.member(values, "pageUrl"), 2048),
                user=user,
                fourcc_list=codecs,
                caps_ex=self.client_caps_ex,
                raw=values,
            )
        )

    def _refuse(self, call: Call, description: str, reason: str, user: str) -> None:
        """Refuse a connect ourselves: a step of Adobe authentication, or its end."""
        self._send_rejection(description, commands.CONNECT_REJECTED)
        self._move_connection(ConnectionInput.REJECT)
        call.events.append(ConnectRefused(reason, user))

    # ------------------------------------------------------------------------------------- message streams

    def _create_stream(self, call: Call) -> None:
        """Give out a message stream (section 7.2.1.3)."""
        # The lowest free id, so the first one is 1, which some clients take for granted.
        taken = {stream.stream_id for stream in self._streams}
        stream_id = next(number for number in range(1, len(taken) + 2) if number not in taken)
        self._open_stream(stream_id)
        self._send(commands.command("_result", call.command.transaction_id, None, float(stream_id)))

    def _close_stream(self, call: Call) -> None:
        """End what the stream is used for and keep its id; in no specification, but every Flash player sends it."""
        stream = self._stream(call.stream_id)
        if stream is not None:
            self._stop(call, stream, "closeStream")

    def _delete_stream(self, call: Call) -> None:
        """Take a message stream back (section 7.2.2.3, which has no reply)."""
        stream_id = self._closing_target(call)
        stream = self._stream(stream_id)
        if stream is None:
            self._ignore(call, "delete-of-no-stream", str(stream_id))
            return
        if stream.state is not StreamState.IDLE:
            call.events.append(StreamClosed(stream_id, "deleteStream"))
        self._move_stream(stream, StreamInput.DELETE)

    # --------------------------------------------------------------------------------------------- publish

    def _publish(self, call: Call) -> None:
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
            self._ignore(call, "publish-type", ascii(commands.text(word, 32)))
        call.events.append(
            PublishRequested(stream_id=stream.stream_id, name=url.stream, query=url.query, kind=kind or "live", url=url)
        )

    def _release_stream(self, call: Call) -> None:
        """Answer an encoder that wants the name freed of its own last session; whose it is, publish decides."""
        self._result(call, None, UNDEFINED)

    def _fc_publish(self, call: Call) -> None:
        """Answer the announcement of a publish; Flash Media Live Encoder waits for the notification."""
        self._result(call, None, UNDEFINED)
        self._notify("onFCPublish", commands.PUBLISH_START, "Started publishing stream.")

    def _fc_unpublish(self, call: Call) -> None:
        """End a publication by its name, so that the name is free at once; SRS takes it so too."""
        self._notify("onFCUnpublish", commands.UNPUBLISH_SUCCESS, "Stopped publishing stream.")
        self._result(call, None, UNDEFINED)
        publishing = [stream for stream in self._streams if stream.stream_id in self._publishing]
        if len(publishing) > 1:  # with one there is no doubt, whatever name the encoder gives
            name = commands.text(call.argument(0), self._config.name_max_chars).partition("?")[0].strip("/")
            publishing = [stream for stream in publishing if f"/{stream.path}".endswith(f"/{name}")]
        if len(publishing) > 1:  # a/room and b/room both end in what was named
            publishing = [stream for stream in publishing if stream.path == f"{self._url.app}/{name}"]
        for stream in publishing:
            self._stop(call, stream, "FCUnpublish")

    # ------------------------------------------------------------------------------------------------ rest

    def _stream_length(self, call: Call) -> None:
        """Say that a stream is 0 s long, which means live; FFmpeg asks before it plays."""
        self._result(call, None, 0.0)

    def _empty_result(self, call: Call) -> None:
        """Answer what only wants an answer (_checkbw)."""
        self._result(call, None, None)

    def _answered(self, _call: Call) -> None:
        """Count an answer; we ask nothing that has one."""
        self._control.count("unasked-answer")

    def _unknown(self, call: Call) -> None:
        """Answer a command that we do not know with nothing, and report it the first time."""
        self._ignore(call, "unknown-command", ascii(call.command.name[:64]))
        self._result(call, None, None)

    handlers: ClassVar[Mapping[str, Callable[[Any, Call], None]]] = MappingProxyType(
        {
            **PlayCommands.play_handlers,
            "createStream": _create_stream,
            "closeStream": _close_stream,
            "deleteStream": _delete_stream,
            "publish": _publish,
            "releaseStream": _release_stream,
            "FCPublish": _fc_publish,
            "FCUnpublish": _fc_unpublish,
            "getStreamLength": _stream_length,
            "_checkbw": _empty_result,
            "checkBandwidth": _empty_result,
            "_result": _answered,
            "_error": _answered,
            "onStatus": _answered,
        }
    )
    """The method of each command but connect, by its name on the wire, which is case-sensitive."""
