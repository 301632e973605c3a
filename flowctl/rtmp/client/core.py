"""What the parts of a client session share: state, the commands that await a reply, and what waits to be sent.

`client_replies` (what the server says) and `client_session` (what our caller wants, octets and time) are layers of one
object over this one; see `client_session` for how they work together.
"""

from __future__ import annotations

import random
from typing import Any, Final, Literal

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.rtmp import commands
from flowctl.rtmp.chunk.chunk import ChunkReader, ChunkWriter
from flowctl.rtmp.client import commands as client_commands
from flowctl.rtmp.client.states import ClientInput, ClientState, next_client_state
from flowctl.rtmp.handshake.handshake import ClientHandshake
from flowctl.rtmp.messages import EVENT_SET_BUFFER_LENGTH, UserControl, encode_control
from flowctl.rtmp.protocol_control import ProtocolControl
from flowctl.rtmp.session_config import ClientSessionConfig
from flowctl.rtmp.url import RtmpUrl
from flowctl.rtmp.wire import Message

_AWAITING_REPLY: Final = frozenset({ClientState.CONNECTING, ClientState.CREATING, ClientState.ASKING})

_REPLIES_MAX: Final = 64
"""Commands whose reply is awaited; a publisher sends five."""


class ClientCore:
    """State and output of a client session; not for use on its own.

    Args:
        config: settings.
        now: seconds; when the connection was made.
        rng: source of the handshake's random octets. None: the system's.
    """

    __slots__ = (
        "_app",  # str | None: overrides the application of _url
        "_config",
        "_control",
        "_ended",  # bool: StreamEnded was reported and nothing has started since
        "_error",  # str: why the session ended, "" while it has not
        "_handshake",  # ClientHandshake | None: None when done
        "_kind",  # str: publishing type
        "_last_id",  # int: transaction id of the last command that awaits a reply
        "_name",  # str | None: stream name with its query; None: that of _url
        "_out",  # bytearray: what waits to be sent
        "_parameters",  # str: what Adobe authentication appends
        "_purpose",  # Literal["publish", "play"] | None: None until our caller says
        "_reader",
        "_replies",  # dict[int, str]: transaction id -> command that awaits a reply
        "_since",  # float | None: when _state was entered; None: at the next call with a time
        "_start_ms",  # int: of play
        "_state",  # ClientState: assigned by _move only
        "_stream_id",  # int: 0 while there is none
        "_url",
        "_writer",
    )

    def __init__(self, config: ClientSessionConfig, *, now: float = 0.0, rng: random.Random | None = None) -> None:
        self._app: str | None = None
        self._config = config
        self._control = ProtocolControl(config, self._send, now)
        self._ended = False
        self._error = ""
        self._handshake: ClientHandshake | None = ClientHandshake(config.handshake, rng, round(now * 1000))
        self._kind: str = "live"
        self._last_id = 0
        self._name: str | None = None
        self._out = bytearray()
        self._parameters = ""
        self._purpose: Literal["publish", "play"] | None = None
        self._reader = ChunkReader(
            config.limits, type3_after_type0=config.type3_after_type0, extended_delta=config.extended_delta
        )
        self._replies: dict[int, str] = {}
        self._since: float | None = now
        self._start_ms = -2000
        self._state = ClientState.NEW
        self._stream_id = 0
        self._url = RtmpUrl()
        self._writer = ChunkWriter()

    # ----------------------------------------------------------------------------------------------- output

    def _send(self, message: Message) -> None:
        """Queue a message; raises `LimitExceededError` when nobody collects what is queued."""
        self._out += self._writer.write(message)
        if len(self._out) > self._config.pending_output_bytes:
            raise LimitExceededError("pending_output_bytes", len(self._out), self._config.pending_output_bytes)

    def _next_id(self, name: str) -> int:
        """Return a new transaction id and remember that the reply to command `name` is awaited."""
        self._last_id += 1
        self._replies[self._last_id] = name
        if len(self._replies) > _REPLIES_MAX:
            # The oldest: servers leave FCPublish and the like unanswered.
            del self._replies[next(iter(self._replies))]
        return self._last_id

    def _call(self, name: str, *values: Any) -> None:
        """Send a command on the connection."""
        self._send(commands.command(name, self._next_id(name), *values))

    # ------------------------------------------------------------------------------------------------ state

    def _move(self, event: ClientInput) -> None:
        """Change the state; the only place that does.

        Raises:
            LocalProtocolError: our caller may not do this now.
            RemoteProtocolError: code ``unexpected-reply``; the server may not say this now.
        """
        following = next_client_state(self._state, event)
        if following is not self._state:
            self._state = following
            self._since = None

    def _check_open(self) -> None:
        if self._state is ClientState.CLOSED:
            raise LocalProtocolError(f"the session has ended: {self._error}")
        if self._state is ClientState.NEW:
            raise LocalProtocolError("connect was not called")

    def _fail(self, error: RemoteProtocolError) -> None:
        """End the session; a client explains nothing to a server, which would not read it."""
        self._error = str(error)
        self._move(ClientInput.FAIL)

    def _phase_start(self, now: float) -> float:
        """Return when the present state was entered, or make it `now` where no time was known then."""
        if self._since is None:
            self._since = now
        return self._since

    def _phase_limit(self) -> tuple[str, float] | None:
        """Return the name and the value (s) of the limit on the present state; None: it has none."""
        if self._state is ClientState.HANDSHAKE:
            name, allowed = "handshake_time_s", self._config.limits.handshake_time_s
        elif self._state in _AWAITING_REPLY and not (self._state is ClientState.ASKING and self._purpose == "play"):
            name, allowed = "reply_time_s", self._config.reply_time_s
        else:
            return None
        return (name, allowed) if allowed else None

    def _check_phase(self, now: float) -> None:
        """Raise `LimitExceededError` when the present state has lasted too long."""
        limit = self._phase_limit()
        start = self._phase_start(now)
        if limit is not None and now - start >= limit[1]:
            raise LimitExceededError(limit[0], now - start, limit[1])

    # ------------------------------------------------------------------------------------------- going ahead

    def _stream_name(self) -> str:
        """Return the stream name with its query, as publish and play send it (FFmpeg, OBS)."""
        if self._name is not None:
            return self._name
        return f"{self._url.stream}?{self._url.raw_query}" if self._url.raw_query else self._url.stream

    def _send_connect(self) -> None:
        """Announce our chunk size and connect, once the handshake is done."""
        # Before connect, as OBS does it, so that the long connect is not cut into chunks of 128 octets.
        self._out += self._writer.set_chunk_size(self._config.out_chunk_size)
        values = client_commands.connect_object(
            self._config, self._url, parameters=self._parameters, app=self._app, playing=self._purpose == "play"
        )
        self._call("connect", values)

    def _create_stream(self) -> None:
        """Ask for a message stream, once the connection is up and our caller has said what for."""
        if self._state is not ClientState.CONNECTED or self._purpose is None:
            return
        self._move(ClientInput.ASK)
        if self._purpose == "publish" and self._config.release_stream:
            self._call("releaseStream", None, self._stream_name())
            self._call("FCPublish", None, self._stream_name())
        self._call("createStream", None)

    def _ask_server(self, stream_id: int) -> None:
        """Send publish or play on the message stream that the server gave us."""
        self._stream_id = stream_id
        self._ended = False
        name = self._purpose or ""
        last: str | float = self._kind
        if name == "play":
            buffer = UserControl(EVENT_SET_BUFFER_LENGTH, stream_id=stream_id, buffer_ms=self._config.buffer_ms)
            self._send(encode_control(buffer))
            last = float(self._start_ms)
        arguments = (None, self._stream_name(), last)
        self._send(commands.command(name, self._next_id(name), *arguments, stream_id=stream_id))
