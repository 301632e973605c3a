"""The state machine of a client session as a table.

Theory of operation. As in `wire.rtmp.server.states`: a state changes only by looking up (state, input) here, and a
missing pair is an error of the side that gave the input. One client session has one message stream, which is what
publishers and players need; more streams are more sessions.
"""

from __future__ import annotations

import enum
from typing import Final

from flowctl.errors import LocalProtocolError, RemoteProtocolError


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


_C = ClientState
_I = ClientInput

CLIENT_TABLE: Final[dict[tuple[ClientState, ClientInput], ClientState]] = {
    (_C.NEW, _I.CONNECT): _C.HANDSHAKE,
    (_C.HANDSHAKE, _I.HANDSHAKE_DONE): _C.CONNECTING,
    (_C.CONNECTING, _I.ACCEPTED): _C.CONNECTED,
    (_C.CONNECTING, _I.REJECTED): _C.REJECTED,
    (_C.CONNECTED, _I.ASK): _C.CREATING,
    (_C.CREATING, _I.STREAM_CREATED): _C.ASKING,
    (_C.ASKING, _I.STARTED): _C.ACTIVE,
    # Servers repeat it, and send Play.Start again after receiveAudio(true).
    (_C.ACTIVE, _I.STARTED): _C.ACTIVE,
    **{(state, _I.REFUSED): _C.CONNECTED for state in (_C.CREATING, _C.ASKING, _C.ACTIVE)},
    **{(state, _I.CLOSE): _C.CONNECTED for state in (_C.CREATING, _C.ASKING, _C.ACTIVE)},
    **{(state, _I.FAIL): _C.CLOSED for state in _C},
}

_CALLER_INPUTS: Final = frozenset({_I.CONNECT, _I.ASK, _I.CLOSE})


def next_client_state(state: ClientState, event: ClientInput) -> ClientState:
    following = CLIENT_TABLE.get((state, event))
    if following is not None:
        return following
    text = f"{event.value} is not allowed, the session is {state.value}"
    if event in _CALLER_INPUTS:
        raise LocalProtocolError(text)
    raise RemoteProtocolError(text, code="unexpected-reply")
