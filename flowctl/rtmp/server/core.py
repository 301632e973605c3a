"""What the parts of a server session share: its states, its streams, and what waits to be sent.

`server_commands` (what the peer asks), `server_replies` (what our caller answers) and `server_session` (octets and
time) are layers of one object over this one; see `server_session` for how they work together.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Final

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.printable import printable
from flowctl.rtmp import commands
from flowctl.rtmp.chunk.chunk import serialise
from flowctl.rtmp.handshake.handshake import ServerHandshake
from flowctl.rtmp.messages import SetChunkSize, UserControl, encode_control
from flowctl.rtmp.protocol_control import ProtocolControl
from flowctl.rtmp.server.states import (
    ConnectionInput,
    ConnectionState,
    StreamInput,
    StreamState,
    next_connection_state,
    next_stream_state,
)
from flowctl.rtmp.session_config import ServerSessionConfig
from flowctl.rtmp.url import RtmpUrl
from flowctl.rtmp.wire import DEFAULT_CHUNK_SIZE, Message

PLAYING_STATES: Final = frozenset({StreamState.PLAYING, StreamState.WAITING})
"""States of a stream that plays; a player that waits for a publisher has been told that it plays."""

PLAYER_STATES: Final = frozenset({StreamState.PLAY_DECIDING, StreamState.PLAYING, StreamState.WAITING})
"""States of a stream that a player uses or asks for."""

# Frozen sets, replaced as a whole: nearly all connections are players, and an empty set of their own is 216 bytes.
_NONE: Final[frozenset[int]] = frozenset()

_DECIDING: Final = frozenset({StreamState.PUBLISH_DECIDING, StreamState.PLAY_DECIDING})
_ACTIVE: Final = frozenset({StreamState.PUBLISHING, StreamState.PLAYING, StreamState.WAITING})


_HELD_OVERHEAD_BYTES: Final = 96
"""Octets charged for a held message on top of its payload, as in a Sender's queue."""


_DESCRIPTION_CHARS: Final = 1024
"""Longest words for a client; FFmpeg and librtmp read 255 octets of them."""


def words(description: str) -> str:
    """Return what an application says to a client in a form that can be sent, and shown on a terminal."""
    return printable(description[:_DESCRIPTION_CHARS])


def held_size_bytes(message: Message) -> int:
    """Return what a held message counts against ``paused_input_bytes``."""
    return len(message.payload) + _HELD_OVERHEAD_BYTES


@lru_cache(256)
def _status_message(stream_id: int, level: str, code: str, description: str) -> Message:
    """Return an ``onStatus``, encoded once for all who are told the same: every viewer is told the same two."""
    return commands.on_status(stream_id, level, code, description)


class MessageStream:
    """One message stream of a connection (Adobe RTMP 1.0 section 7.2.1.3).

    Args:
        stream_id: message stream id.
    """

    __slots__ = (
        "path",  # str: what was requested last, see `RtmpUrl.path`; "" before any request
        "paused",  # bool: the player paused it
        "reset",  # bool: the play request wants NetStream.Play.Reset
        "state",  # StreamState: assigned by ServerCore.move_stream only
        "stream_id",
    )

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.state = StreamState.IDLE
        self.path = ""
        self.paused = False
        self.reset = True


class ServerCore:
    """State, streams and output of a server session; not for use on its own.

    Args:
        config: settings, shared by all connections.
        now: seconds; when the connection was accepted.
        rng: source of the handshake's random octets. None: the system's.
    """

    __slots__ = (
        "_awaiting",  # frozenset[int]: publishing streams that have not sent media yet
        "_config",
        "_connect_id",  # float: transaction id of the connect command
        "_control",
        "_deciding",  # bool: our caller owes an answer; what the peer sends meanwhile is held
        "_enhanced",  # bool: the client's connect has Enhanced RTMP members
        "_error",  # str: why the session ended, "" while it has not
        "_handshake",  # ServerHandshake | None: None when done
        "_held",  # list[Message] | None: kept back, in order; None for nothing
        "_held_bytes",  # int: payload and overhead of _held
        "_object_encoding",  # int: 0 or 3, as the client asked
        "_out",  # bytearray | None: replies not collected yet, whole messages; None for none
        "_out_chunk_size",  # int: what the peer knows
        "_phase_since",  # float | None: start of the phase whose time is limited; None: at the next call with a time
        "_publishing",  # frozenset[int]: streams in PUBLISHING, for the hot path
        "_state",  # ConnectionState: assigned by move_connection only
        "_streams",  # tuple[MessageStream, ...]: nearly always one, for which a dict is 170 octets more
        "_url",  # RtmpUrl: from connect
        "client_caps_ex",  # int: capsEx of the client, 0 before connect
        "input_paused",  # bool: set by the caller while it does not read; silence is then no fault of the peer's
    )

    def __init__(self, config: ServerSessionConfig, *, now: float, rng: random.Random | None = None) -> None:
        self._awaiting = _NONE
        self._config = config
        self._connect_id = 1.0
        self._control = ProtocolControl(config, self._send, now)
        self._deciding = False
        self._enhanced = False
        self._error = ""
        self._handshake: ServerHandshake | None = ServerHandshake(rng, round(now * 1000))
        self._held: list[Message] | None = None
        self._held_bytes = 0
        self._object_encoding = 0
        self._out: bytearray | None = None
        self._out_chunk_size = DEFAULT_CHUNK_SIZE
        self._phase_since: float | None = now
        self._publishing = _NONE
        self._state = ConnectionState.HANDSHAKE
        self._streams: tuple[MessageStream, ...] = ()
        self._url = RtmpUrl()
        self.client_caps_ex = 0
        self.input_paused = False

    # ---------------------------------------------------------------------------------------------- output

    def _send(self, message: Message) -> None:
        """Queue a message with a full header, so that it may stand anywhere between other whole messages.

        Media of a shared log goes out on the same connection; a header that leaves something out would refer to
        whatever stands before it.
        """
        octets = serialise(
            message.type_id, message.msid, message.timestamp, message.payload, message.csid, self._out_chunk_size
        )
        size = self._queue(octets)
        if size > self._config.pending_output_bytes:
            raise LimitExceededError("pending_output_bytes", size, self._config.pending_output_bytes)

    def _queue(self, octets: bytes) -> int:
        """Put `octets` behind what waits to be sent; return how much that is now."""
        if self._out is None:
            self._out = bytearray(octets)
        else:
            self._out += octets
        return len(self._out)

    def _send_chunk_size(self) -> None:
        """Announce our chunk size before the first long message: OBS breaks on a long one in small chunks (SRS 454)."""
        if self._out_chunk_size != self._config.out_chunk_size:
            self._send(encode_control(SetChunkSize(self._config.out_chunk_size)))
            self._out_chunk_size = self._config.out_chunk_size

    def _status(self, stream: MessageStream, code: str, description: str, level: str = "status") -> None:
        self._send(_status_message(stream.stream_id, level, code, words(description)))

    def _user_control(self, event: int, stream: MessageStream) -> None:
        self._send(encode_control(UserControl(event, stream_id=stream.stream_id)))

    # ---------------------------------------------------------------------------------------------- states

    def _check_open(self) -> None:
        if self._state is ConnectionState.CLOSED:
            raise LocalProtocolError(f"the session has ended: {self._error}")

    def _move_connection(self, event: ConnectionInput) -> None:
        """Change the state of the connection; the only place that does.

        Raises:
            RemoteProtocolError: code ``unexpected-command``; the peer may not do this now.
            LocalProtocolError: our caller may not do this now.
        """
        following = next_connection_state(self._state, event)
        if following is not self._state:
            self._state = following
            self._phase_since = None
        self._deciding = self._any_undecided()

    def _move_stream(self, stream: MessageStream, event: StreamInput) -> None:
        """Change the state of a stream; the only place that does. Raises like `_move_connection`."""
        before = stream.state
        stream.state = next_stream_state(before, event, stream.stream_id)
        if stream.state is before:
            return
        if stream.state is StreamState.DELETED:
            self._streams = tuple(other for other in self._streams if other is not stream)
        if stream.state is StreamState.PUBLISHING:
            self._publishing |= {stream.stream_id}
            self._awaiting |= {stream.stream_id}
        elif before is StreamState.PUBLISHING:  # otherwise it is in neither, and what is left would be a set of its own
            self._publishing = (self._publishing - {stream.stream_id}) or _NONE
            self._awaiting = (self._awaiting - {stream.stream_id}) or _NONE
        stream.paused = False
        self._phase_since = None
        self._deciding = self._any_undecided()

    def _any_undecided(self) -> bool:
        return self._state is ConnectionState.DECIDING or any(stream.state in _DECIDING for stream in self._streams)

    def _find_stream(self, stream_id: int) -> MessageStream:
        """Return a stream for a call of our caller.

        Raises:
            LocalProtocolError: there is no such stream, or the session has ended.
        """
        self._check_open()
        stream = self._stream(stream_id)
        if stream is None:
            raise LocalProtocolError(f"there is no message stream {stream_id}")
        return stream

    def _open_stream(self, stream_id: int) -> MessageStream:
        """Return a stream for a command of the peer; one that createStream never gave out is made on the spot.

        Raises:
            LimitExceededError: ``message_streams``.
        """
        stream = self._stream(stream_id)
        if stream is None:
            maximum = self._config.limits.message_streams
            if len(self._streams) >= maximum:
                raise LimitExceededError("message_streams", len(self._streams) + 1, maximum)
            stream = MessageStream(stream_id)
            self._streams = (*self._streams, stream)
        return stream

    def _stream(self, stream_id: int) -> MessageStream | None:
        return next((stream for stream in self._streams if stream.stream_id == stream_id), None)

    def _drop_held(self, stream_id: int) -> None:
        """Forget held messages of a stream that was closed or refused: nobody is left to take them."""
        held = self._held or []
        kept = [message for message in held if message.msid != stream_id]
        if len(kept) < len(held):
            self._control.count("held-of-closed-stream", len(held) - len(kept))
            self._held = kept or None
            self._held_bytes = sum(map(held_size_bytes, kept))

    # ------------------------------------------------------------------------------------------------ time

    def _phase_limit(self) -> tuple[str, float] | None:
        """Return the name and the value (s) of the limit on the present phase; None: this phase has none."""
        limits = self._config.limits
        if self._state is ConnectionState.HANDSHAKE:
            name, allowed = "handshake_time_s", limits.handshake_time_s
        elif self._state in (ConnectionState.CONNECTING, ConnectionState.REFUSED):
            # A refused peer is closed once it has read why; this ends one that never reads.
            name, allowed = "first_command_s", limits.first_command_s
        elif self._deciding or self._state is not ConnectionState.CONNECTED:
            return None  # the time is our caller's
        elif self._awaiting or not any(stream.state in _ACTIVE for stream in self._streams):
            # Also for a connection that neither publishes nor plays: it is there for nothing.
            name, allowed = "first_media_s", limits.first_media_s
        else:
            return None
        return (name, allowed) if allowed else None

    def _phase_start(self, now: float) -> float:
        """Return when the present phase began; our caller's answers carry no time, so it may begin with this call."""
        if self._phase_since is None:
            self._phase_since = now
        return self._phase_since

    def _check_phase(self, now: float) -> None:
        """Raise `LimitExceededError` when the present phase has lasted too long."""
        limit = self._phase_limit()
        start = self._phase_start(now)
        if limit is not None and now - start >= limit[1]:
            raise LimitExceededError(limit[0], now - start, limit[1])

    # ------------------------------------------------------------------------------------------- the end

    def _fail(self, error: RemoteProtocolError) -> None:
        """End the session and leave a message that says why, where the protocol has a place for one."""
        self._error = str(error)
        state = self._state
        self._move_connection(ConnectionInput.FAIL)
        try:
            self._explain(state, str(error))
        except LimitExceededError:
            # The peer reads nothing, so it will not read this either.
            self._control.count("unexplained")

    def _explain(self, state: ConnectionState, text: str) -> None:
        """Say why: as a refusal of connect, as a status of each stream in use, or as one of the connection."""
        if state in (ConnectionState.CONNECTING, ConnectionState.DECIDING):
            self._send_rejection(text, commands.CONNECT_REJECTED)
        elif state is ConnectionState.CONNECTED:
            active = [stream for stream in self._streams if stream.state is not StreamState.IDLE]
            for stream in active:
                code = commands.PLAY_FAILED if stream.state in PLAYER_STATES else commands.STREAM_FAILED
                self._send(commands.on_status(stream.stream_id, "error", code, text))
            if not active:
                self._send(commands.on_status(0, "error", commands.CALL_FAILED, text))

    def _send_rejection(self, description: str, code: str) -> None:
        """Send the ``_error`` that answers connect; the chunk size first, since descriptions get long."""
        self._send_chunk_size()
        rejection = commands.status("error", code, description)
        self._send(commands.command("_error", self._connect_id, None, rejection))
