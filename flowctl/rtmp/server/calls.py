"""A command of the peer on its way through a server session, and what all commands are answered with.

`server_commands` and `server_play_commands` have one method per command; what several of them do is here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flowctl.errors import RemoteProtocolError
from flowctl.rtmp import commands
from flowctl.rtmp.amf.values import UNDEFINED
from flowctl.rtmp.events import ServerEvent, StreamClosed
from flowctl.rtmp.messages import Command
from flowctl.rtmp.server.core import PLAYING_STATES, MessageStream, ServerCore
from flowctl.rtmp.server.states import StreamInput, StreamState
from flowctl.rtmp.url import RtmpUrl


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


class ServerCalls(ServerCore):
    """What several commands do; not for use on its own."""

    __slots__ = ()

    def _result(self, call: Call, *values: Any) -> None:
        """Answer a call with ``_result``, if it awaits an answer: transaction id 0 says that it does not."""
        if call.command.transaction_id:
            self._send(commands.command("_result", call.command.transaction_id, *values))

    def _ignore(self, call: Call, what: str, detail: str) -> None:
        """Count something in a command that is not obeyed, and report it the first time."""
        event = self._control.ignore(what, detail)
        if event is not None:
            call.events.append(event)

    def _notify(self, name: str, code: str, description: str) -> None:
        """Send one of the onFC... calls of Flash Media Server, on the connection and not on a stream."""
        self._send(commands.command(name, 0, None, commands.status("status", code, description)))

    def _closing_target(self, call: Call) -> int:
        """Return the stream that a closeStream or deleteStream names."""
        if call.command.name == "closeStream":
            return call.stream_id
        return commands.whole(call.argument(0), call.stream_id)

    def _stop(self, call: Call, stream: MessageStream, reason: str) -> None:
        """End what a stream is used for and say so, at the peer's word."""
        before = stream.state
        self._move_stream(stream, StreamInput.CLOSE)
        if before is StreamState.IDLE:
            return
        call.events.append(StreamClosed(stream.stream_id, reason))
        if before is StreamState.PUBLISHING:
            self._status(stream, commands.UNPUBLISH_SUCCESS, "Stream is now unpublished.")
        elif before in PLAYING_STATES:
            self._status(stream, commands.PLAY_STOP, "Stopped playing stream.")

    def _named(self, call: Call, stream: MessageStream, name: Any, code: str) -> RtmpUrl | None:
        """Return the address with the stream name of a publish or play; None when it was refused with `code`."""
        try:
            return self._address(name)
        except RemoteProtocolError as error:
            self._status(stream, code, str(error), "error")
            self._ignore(call, "bad-name", str(error))
            return None

    def _address(self, name: Any) -> RtmpUrl:
        # Null and undefined count as no name: then the address alone may say it (an empty stream key in OBS).
        if name is not None and not isinstance(name, str):
            raise RemoteProtocolError(f"stream name is no string but {type(name).__name__}", code="bad-name")
        return self._url.with_stream(name or "", name_max_chars=self._config.name_max_chars)
