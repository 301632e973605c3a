"""Plays over HTTP and WebSocket: what `ClientSession` and `Skimmer` are for RTMP, as far as a load run needs.

The response's head is read here; what comes behind it is FLV, in WebSocket frames or bare, whose tags are looked into
through the same `FrameBook` as messages of RTMP.
"""

from __future__ import annotations

import base64
import os
from typing import Final

from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping

from flowctl.core.text.addresses import join_host_port
from flowctl.errors import RemoteProtocolError
from flowctl.flv import FlvReader
from flowctl.load.peers.skim import FrameBook
from flowctl.wire.client.measure import Skimmed
from flowctl.wire.rtmp.events import ClientEvent, HandshakeDone, Rejected
from flowctl.wire.rtmp.url import DEFAULT_APP, RtmpUrl
from flowctl.wire.rtmp.wire import Message

WEBSOCKET_SCHEMES: Final = frozenset({"ws", "wss"})
HTTP_SCHEMES: Final = frozenset({"http", "https"}) | WEBSOCKET_SCHEMES
_HEAD_MOST_BYTES: Final = 16 * 1024
_AGENT: Final = "flowctl-load"


def path_of(url: RtmpUrl) -> str:
    """Return path and query of an address, as they go into a request."""
    name = url.stream if url.app == DEFAULT_APP else url.path
    return f"/{name}?{url.raw_query}" if url.raw_query else f"/{name}"


class HttpSpeech:
    """Asks for a stream, and reads the head of the answer.

    Attributes:
        head_bytes: octets of the head of the answer. None: it has not come whole.
        stream_id: 1 as soon as the stream is granted. None: it is not.
    """

    def __init__(self, url: RtmpUrl) -> None:
        self._websocket: Final = url.scheme in WEBSOCKET_SCHEMES
        self._head = bytearray()
        self.head_bytes: int | None = None
        self.stream_id: int | None = None
        version = "1.1" if self._websocket else "1.0"  # of which the body comes bare
        host = join_host_port(url.host, url.port)
        lines = [f"GET {path_of(url)} HTTP/{version}", f"Host: {host}", f"User-Agent: {_AGENT}"]
        if self._websocket:
            lines += ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
            lines += [f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}"]
        self._out = ("\r\n".join(lines) + "\r\n\r\n").encode()

    def data_to_send(self) -> bytes:
        """Return the octets to send."""
        out, self._out = self._out, b""
        return out

    def receive(self, octets: memoryview, now: float) -> list[ClientEvent | Message]:
        """Read the head of the answer and nothing behind it."""
        del now
        if self.head_bytes is not None:
            return []
        before = len(self._head)
        self._head += octets[:_HEAD_MOST_BYTES]
        end = self._head.find(b"\r\n\r\n", max(before - 3, 0))
        if end < 0:
            if len(self._head) >= _HEAD_MOST_BYTES:
                raise RemoteProtocolError("the head of the answer does not end", code="http-head")
            return []
        self.head_bytes = end + 4
        words = bytes(self._head[:end]).split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        self._head.clear()
        status = words[1] if len(words) > 1 and words[0].startswith("HTTP/1.") else ""
        if status != ("101" if self._websocket else "200"):
            return [Rejected(what="play", code=f"HTTP {status}", description=" ".join(words[2:]))]
        self.stream_id = 1
        return [HandshakeDone("http")]

    def close_stream(self) -> None:
        """Say farewell where the protocol has a word for it."""
        if self._websocket:
            self._out = Connection(ConnectionType.CLIENT).send(CloseConnection(code=1000))


class FlvSkimmer:
    """Reads what is behind the head of the answer; hand it everything with `skim`.

    Attributes:
        control: always empty: there is nothing that is no media.
    """

    __slots__ = ("_book", "_frames", "_reader", "control", "replies")

    def __init__(self, book: FrameBook, *, websocket: bool) -> None:
        self._book = book
        self._reader = FlvReader()
        self._frames = Connection(ConnectionType.CLIENT) if websocket else None
        self.control: list[Message] = []
        self.replies = b""

    def skim(self, octets: memoryview) -> list[Skimmed]:
        """Return what `octets` complete."""
        data: bytes | memoryview = octets
        if self._frames is not None:
            data = self._unframed(self._frames, bytes(octets))
        return [(tag.timestamp, self._book.of(tag.type_id, tag.payload)) for tag in self._reader.feed(data)]

    def _unframed(self, frames: Connection, octets: bytes) -> bytes:
        frames.receive_data(octets)
        pieces = []
        for event in frames.events():
            if isinstance(event, BytesMessage):
                pieces.append(bytes(event.data))
            elif isinstance(event, Ping):
                self.replies += frames.send(event.response())
            elif isinstance(event, CloseConnection) and event.code != 1000:
                raise RemoteProtocolError(f"WebSocket closed: {event.code} {event.reason}", code="websocket")
        return b"".join(pieces)
