"""The two state machines of a server session as tables: one per connection, one per message stream.

Theory of operation. A state changes only by looking up (state, input) here. A missing pair is an error: of the peer
when the peer gave the input (a connect after a connect, a publish on a stream that is publishing), of our caller when
it did (an accept of something that nobody asked for). The diagrams of the documentation are drawn from these tables.
"""

from __future__ import annotations

import enum
from typing import Final

from flowctl.errors import LocalProtocolError, RemoteProtocolError


class ConnectionState(enum.Enum):
    HANDSHAKE = "handshake"
    CONNECTING = "connecting"  # the handshake is done, the connect command has not come
    DECIDING = "deciding"  # our caller was asked; what the peer sends meanwhile is held
    CONNECTED = "connected"
    REFUSED = "refused"  # the refusal waits to be flushed; whatever comes is ignored
    CLOSED = "closed"  # an error ended the session


class ConnectionInput(enum.Enum):
    """What can happen to a connection; the first three come from the peer."""

    HANDSHAKE_DONE = "handshake done"
    CONNECT = "connect"
    COMMAND = "command"  # any other command
    ACCEPT = "accept_connect"
    REJECT = "reject_connect"
    FAIL = "fail"


class StreamState(enum.Enum):
    IDLE = "idle"
    PUBLISH_DECIDING = "publish deciding"
    PUBLISHING = "publishing"
    PLAY_DECIDING = "play deciding"
    WAITING = "waiting"  # a player on a stream that nobody publishes (yet, or any more)
    PLAYING = "playing"
    DELETED = "deleted"


class StreamInput(enum.Enum):
    """What can happen to a message stream; the first six come from the peer."""

    PUBLISH = "publish"
    PLAY = "play"
    CONTROL = "play control"  # pause, seek, receiveAudio, receiveVideo
    MEDIA = "media"
    CLOSE = "closeStream"
    DELETE = "deleteStream"
    ACCEPT_PUBLISH = "accept_publish"
    REJECT_PUBLISH = "reject_publish"
    ACCEPT_PLAY = "accept_play"
    WAIT_PLAY = "play_waiting"
    REJECT_PLAY = "reject_play"
    PUBLISH_NOTIFY = "publish_notify"
    UNPUBLISH_NOTIFY = "unpublish_notify"


_C = ConnectionState
_CI = ConnectionInput
_S = StreamState
_SI = StreamInput

CONNECTION_TABLE: Final[dict[tuple[ConnectionState, ConnectionInput], ConnectionState]] = {
    (_C.HANDSHAKE, _CI.HANDSHAKE_DONE): _C.CONNECTING,
    (_C.CONNECTING, _CI.CONNECT): _C.DECIDING,
    (_C.DECIDING, _CI.ACCEPT): _C.CONNECTED,
    (_C.DECIDING, _CI.REJECT): _C.REFUSED,
    (_C.CONNECTED, _CI.COMMAND): _C.CONNECTED,
    (_C.REFUSED, _CI.COMMAND): _C.REFUSED,
    (_C.REFUSED, _CI.CONNECT): _C.REFUSED,
    **{(state, _CI.FAIL): _C.CLOSED for state in _C},
}

STREAM_TABLE: Final[dict[tuple[StreamState, StreamInput], StreamState]] = {
    (_S.IDLE, _SI.PUBLISH): _S.PUBLISH_DECIDING,
    (_S.PUBLISH_DECIDING, _SI.ACCEPT_PUBLISH): _S.PUBLISHING,
    (_S.PUBLISH_DECIDING, _SI.REJECT_PUBLISH): _S.IDLE,
    # Our caller may take a stream away from a publisher: replaced, kicked, or over a limit.
    (_S.PUBLISHING, _SI.REJECT_PUBLISH): _S.IDLE,
    (_S.PUBLISHING, _SI.MEDIA): _S.PUBLISHING,
    # Encoders send on until they have read that they were refused or stopped.
    (_S.IDLE, _SI.MEDIA): _S.IDLE,
    (_S.IDLE, _SI.PLAY): _S.PLAY_DECIDING,
    # A playlist: play on a stream that plays replaces what it plays.
    (_S.PLAYING, _SI.PLAY): _S.PLAY_DECIDING,
    (_S.WAITING, _SI.PLAY): _S.PLAY_DECIDING,
    (_S.PLAY_DECIDING, _SI.ACCEPT_PLAY): _S.PLAYING,
    (_S.PLAY_DECIDING, _SI.WAIT_PLAY): _S.WAITING,
    (_S.PLAY_DECIDING, _SI.REJECT_PLAY): _S.IDLE,
    (_S.WAITING, _SI.REJECT_PLAY): _S.IDLE,
    (_S.PLAYING, _SI.REJECT_PLAY): _S.IDLE,
    (_S.WAITING, _SI.ACCEPT_PLAY): _S.PLAYING,
    (_S.WAITING, _SI.PUBLISH_NOTIFY): _S.PLAYING,
    (_S.PLAYING, _SI.PUBLISH_NOTIFY): _S.PLAYING,
    (_S.PLAYING, _SI.UNPUBLISH_NOTIFY): _S.WAITING,
    (_S.WAITING, _SI.UNPUBLISH_NOTIFY): _S.WAITING,
    # On a stream that plays nothing these are ignored; a player may send them while it closes.
    **{(state, _SI.CONTROL): state for state in (_S.IDLE, _S.PUBLISHING, _S.PLAYING, _S.WAITING)},
    **{(state, _SI.CLOSE): _S.IDLE for state in _S if state is not _S.DELETED},
    **{(state, _SI.DELETE): _S.DELETED for state in _S if state is not _S.DELETED},
}

_PEER_INPUTS: Final = frozenset(
    {_CI.HANDSHAKE_DONE, _CI.CONNECT, _CI.COMMAND, _SI.PUBLISH, _SI.PLAY, _SI.CONTROL, _SI.MEDIA, _SI.CLOSE, _SI.DELETE}
)


def next_connection_state(state: ConnectionState, event: ConnectionInput) -> ConnectionState:
    following = CONNECTION_TABLE.get((state, event))
    if following is None:
        raise _refusal(event, f"connection is {state.value}")
    return following


def next_stream_state(state: StreamState, event: StreamInput, stream_id: int) -> StreamState:
    following = STREAM_TABLE.get((state, event))
    if following is None:
        raise _refusal(event, f"message stream {stream_id} is {state.value}")
    return following


def _refusal(event: ConnectionInput | StreamInput, situation: str) -> Exception:
    text = f"{event.value} is not allowed, the {situation}"
    if event in _PEER_INPUTS:
        return RemoteProtocolError(text, code="unexpected-command")
    return LocalProtocolError(text)
