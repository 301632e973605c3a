"""The WebSocket side of a player (RFC 6455, by wsproto): the handshake, and the frames that it sends.

What the player is sent comes from the stream's log, framed already; only answers to its own frames are made here.
"""

from __future__ import annotations

import base64
from typing import Final, NamedTuple

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import AcceptConnection, CloseConnection, Ping
from wsproto.utilities import RemoteProtocolError as WebSocketError

from flowctl.errors import RemoteProtocolError
from flowctl.live.httpd.exchange import HeaderFields, Request

_HANDSHAKE: Final = frozenset({b"connection", b"sec-websocket-key", b"sec-websocket-version"})
"""Request headers that decide whether the handshake is accepted. Neither subprotocols nor extensions are offered: what
is compressed for one player cannot be serialised once for all."""
VERSION: Final = "13"
_KEY_BYTES: Final = 16
"""Length of the decoded key; a handshake with another one is not valid (RFC 6455 section 4.2.1)."""


class ReceivedFrames(NamedTuple):
    """The result of a piece of a player's input."""

    reply: bytes
    frames: int  # that have come, whole or in part
    closed: str | None  # why the player wants to end. None: it does not.
    broken: bool  # whether what it sent is no WebSocket


class WebSocketPeer:
    """A player that asks for WebSocket frames."""

    __slots__ = ("_connection",)

    def __init__(self, request: Request) -> None:
        self._connection: Final = WSConnection(ConnectionType.SERVER)
        # The host is ours to look at, and none is as short as this one.
        headers = [(b"host", b"h"), *(item for item in request.headers if item[0] in _HANDSHAKE)]
        headers += [(b"upgrade", b"websocket")]  # among others that it may offer, and in any case
        try:
            _check_key(request.header("sec-websocket-key"))
            self._connection.initiate_upgrade_connection(headers, "/")
            next(self._connection.events())
        except (WebSocketError, ValueError) as error:
            other = request.header("sec-websocket-version") not in {"", VERSION}
            code = "websocket-version" if other else "websocket-handshake"
            raise RemoteProtocolError(f"no WebSocket handshake: {error}", code=code) from None

    def accept(self, headers: HeaderFields) -> bytes:
        extra = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        return self._connection.send(AcceptConnection(extra_headers=extra))

    def receive_frames(self, data: bytes) -> ReceivedFrames:
        """Answer the control frames of a piece of input; what a player sends beside them is dropped."""
        reply, frames = b"", 0
        self._connection.receive_data(data)
        for event in self._connection.events():
            frames += 1
            if isinstance(event, Ping):
                reply += self._connection.send(event.response())
            elif isinstance(event, CloseConnection):
                broken = self._connection.state is ConnectionState.OPEN
                why = f"{int(event.code)} {event.reason or ''}".strip()
                return ReceivedFrames(reply + self._connection.send(event.response()), frames, why, broken)
        return ReceivedFrames(reply, frames, None, broken=False)

    def ping(self) -> bytes:
        return self._connection.send(Ping())


def _check_key(text: str) -> None:
    if len(base64.b64decode(text, validate=True)) != _KEY_BYTES:
        raise ValueError(f"Sec-WebSocket-Key is not {_KEY_BYTES} bytes")
