"""The state machines of the sessions as tables: a server's connection, its message streams, and a client.

Theory of operation. A state changes only by looking up (state, input) here. A missing pair is an error: of the peer
when the peer gave the input (a connect after a connect, a publish on a stream that is publishing), of our caller when
it did (an accept of something that nobody asked for). A client session has one message stream, which is what publishers
and players need. The diagrams of the documentation are drawn from these tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, TypeVar

from flowctl.errors import LocalProtocolError, RemoteProtocolError

_StateT = TypeVar("_StateT", bound=enum.Enum)
_InputT = TypeVar("_InputT", bound=enum.Enum)


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
    WAITING = "waiting"  # a player on a stream without a publisher (yet, or any more)
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


class ClientState(enum.Enum):
    NEW = "new"
    HANDSHAKE = "handshake"
    CONNECTING = "connecting"
    CONNECTED = "connected"  # no stream asked for yet, or the last one is over
    CREATING = "creating"  # createStream is out
    ASKING = "asking"  # publish or play is out
    ACTIVE = "active"  # publishing or playing
    REJECTED = "rejected"  # the server refused our connect
    CLOSED = "closed"  # an error ended the session


class ClientInput(enum.Enum):
    """What can happen to a client; the first three come from our caller."""

    CONNECT = "connect"
    ASK = "publish or play"
    CLOSE = "close_stream"
    HANDSHAKE_DONE = "handshake done"
    ACCEPTED = "connect accepted"
    REJECTED = "connect refused"
    STREAM_CREATED = "stream created"
    STARTED = "started"
    REFUSED = "refused"  # createStream, publish or play was, or a running stream was taken away
    FAIL = "fail"


_C = ConnectionState
_CI = ConnectionInput
_S = StreamState
_SI = StreamInput
_K = ClientState
_KI = ClientInput

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

CLIENT_TABLE: Final[dict[tuple[ClientState, ClientInput], ClientState]] = {
    (_K.NEW, _KI.CONNECT): _K.HANDSHAKE,
    (_K.HANDSHAKE, _KI.HANDSHAKE_DONE): _K.CONNECTING,
    (_K.CONNECTING, _KI.ACCEPTED): _K.CONNECTED,
    (_K.CONNECTING, _KI.REJECTED): _K.REJECTED,
    (_K.CONNECTED, _KI.ASK): _K.CREATING,
    (_K.CREATING, _KI.STREAM_CREATED): _K.ASKING,
    (_K.ASKING, _KI.STARTED): _K.ACTIVE,
    # Servers repeat it, and send Play.Start again after receiveAudio(true).
    (_K.ACTIVE, _KI.STARTED): _K.ACTIVE,
    **{(state, _KI.REFUSED): _K.CONNECTED for state in (_K.CREATING, _K.ASKING, _K.ACTIVE)},
    **{(state, _KI.CLOSE): _K.CONNECTED for state in (_K.CREATING, _K.ASKING, _K.ACTIVE)},
    **{(state, _KI.FAIL): _K.CLOSED for state in _K},
}

_FROM_PEER: Final[dict[enum.Enum, str]] = {
    **dict.fromkeys((_CI.HANDSHAKE_DONE, _CI.CONNECT, _CI.COMMAND), "unexpected-command"),
    **dict.fromkeys((_SI.PUBLISH, _SI.PLAY, _SI.CONTROL, _SI.MEDIA, _SI.CLOSE, _SI.DELETE), "unexpected-command"),
    **dict.fromkeys(set(_KI) - {_KI.CONNECT, _KI.ASK, _KI.CLOSE}, "unexpected-reply"),
}
"""Inputs that the peer gives, and the code of its fault where it gives one that may not be."""


def next_state(table: Mapping[tuple[_StateT, _InputT], _StateT], state: _StateT, event: _InputT, what: str) -> _StateT:
    """Return the state of `what` that follows."""
    following = table.get((state, event))
    if following is not None:
        return following
    text = f"{event.value} is not allowed, the {what} is {state.value}"
    code = _FROM_PEER.get(event)
    raise LocalProtocolError(text) if code is None else RemoteProtocolError(text, code=code)
