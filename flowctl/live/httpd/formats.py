"""Streams as FLV: tags for HTTP, bare or in chunks, and in WebSocket frames; each complete, and serialised once."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from flowctl import flv
from flowctl.live.httpd.exchange import HeaderFields
from flowctl.live.httpd.websocket import WebSocketPeer
from flowctl.live.stream import Stream
from flowctl.live.wirelog import WireFormat
from flowctl.wire.rtmp.wire import CLOCK_MASK, TYPE_DATA_AMF0, TYPE_DATA_AMF3

_MEDIA: Final = frozenset({flv.TAG_AUDIO, flv.TAG_VIDEO, flv.TAG_SCRIPT})
_AMF0_INSIDE: Final = b"\0"
"""First octet of an AMF3 data message whose values are AMF0, as those of Flash's encoders are; the rest is one."""

_BINARY: Final = 0x82
_CLOSE: Final = 0x88
"""First octets of WebSocket frames that are whole messages (RFC 6455 section 5.2)."""
_SHORT: Final = 126
_LONG: Final = 127
"""Values of the length octet that announce a length of two and of eight octets behind it."""
_GONE: Final = struct.pack(">H", 1000) + b"the publisher has gone"


def frame(payload: bytes, first: int = _BINARY) -> bytes:
    """Return a WebSocket frame of a server, which is not masked, with `payload`."""
    size = len(payload)
    if size < _SHORT:
        return bytes((first, size)) + payload
    if size <= 0xFFFF:
        return struct.pack(">BBH", first, _SHORT, size) + payload
    return struct.pack(">BBQ", first, _LONG, size) + payload


GOING_AWAY: Final = frame(struct.pack(">H", 1001) + b"the server stops", _CLOSE)
"""Frame that tells a player that the server stops (RFC 6455 section 7.4.1): it may come again."""


class FlvTags(WireFormat):
    """FLV tags, each with the back pointer behind it; for HTTP/1.0.

    Timestamps are those of the stream; players go by differences. There is no word for the beginning of a stream, nor,
    here, for its end: the response ends.
    """

    name = "flv"
    ends = True

    def wrapped(self, data: bytes) -> bytes:
        """Return octets as they go behind the head of the response."""
        return data

    def unwrapped(self, wire: bytes) -> slice:
        """Return where in `wire` that is which `wrapped` was given."""
        return slice(0, len(wire))

    def serialise(self, type_id: int, timestamp: int, payload: bytes) -> bytes:
        if type_id == TYPE_DATA_AMF3 and payload[:1] == _AMF0_INSIDE:
            type_id, payload = TYPE_DATA_AMF0, payload[1:]
        return self.wrapped(flv.tag(type_id, timestamp & CLOCK_MASK, payload)) if type_id in _MEDIA else b""

    def deserialise(self, wire: bytes) -> tuple[int, int, bytes]:
        inside = self.unwrapped(wire)
        body = wire[inside.start + flv.TAG_HEADER_BYTES : inside.stop - flv.BACK_POINTER_BYTES]
        return wire[inside.start], self.time_of(wire), body

    def time_of(self, wire: bytes) -> int:
        at = self.unwrapped(wire).start
        return int.from_bytes(wire[at + 7 : at + 8] + wire[at + 4 : at + 7], "big")


class FlvChunks(FlvTags):
    """FLV tags, each in a chunk of HTTP/1.1 of its own: FFmpeg takes the end of a body without one for an error."""

    name = "http-flv"

    def wrapped(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    def unwrapped(self, wire: bytes) -> slice:
        return slice(wire.index(b"\n") + 1, len(wire) - 2)

    def end(self, timestamp: int) -> bytes:
        """Return the last chunk, which stands behind all that was published."""
        del timestamp
        return b"0\r\n\r\n"


class FlvFrames(FlvTags):
    """FLV tags, each in a binary WebSocket frame of its own."""

    name = "ws-flv"

    def wrapped(self, data: bytes) -> bytes:
        return frame(data)

    def unwrapped(self, wire: bytes) -> slice:
        return slice({_SHORT: 4, _LONG: 10}.get(wire[1], 2), len(wire))

    def end(self, timestamp: int) -> bytes:
        """Return a close frame, which stands behind all that was published."""
        del timestamp
        return frame(_GONE, _CLOSE)


TAGS: Final = FlvTags()
CHUNKS: Final = FlvChunks()
FRAMES: Final = FlvFrames()


SETTLE_S: Final = 1.0
"""Time in which a stream that has just begun shows both sound and picture. The header of FLV says which there are, and
mpegts.js waits for ever for one that was announced and does not come."""
FLV_TYPE: Final = "video/x-flv"


@dataclass(slots=True)
class FlvPlay:
    wire_format: FlvTags
    websocket: WebSocketPeer | None
    gives_up_at: float
    taken: bool = False  # whether the kernel has the head of the response, so that answers to frames go behind it
    look_at: float | None = None  # when to look again what the stream shows. None: it need not be.

    def settled(self, stream: Stream, now: float) -> bool:
        return len(_kinds(stream)) > 1 or now - (stream.published_at or 0.0) >= SETTLE_S

    def head(self, stream: Stream, headers: HeaderFields) -> bytes:
        """Return all that goes before the first tag: the head of the response, and FLV's own.

        Players of HTTP/1.0 know no chunks: for them the body is as long as the connection lasts.
        """
        kinds = _kinds(stream)
        media = self.wire_format.wrapped(flv.header(audio="audio" in kinds, video="video" in kinds))
        if self.websocket is not None:
            return self.websocket.accept(headers) + media
        lines = [("Content-Type", FLV_TYPE), ("Cache-Control", "no-store"), ("Connection", "close"), *headers]
        if self.wire_format is CHUNKS:
            lines.append(("Transfer-Encoding", "chunked"))
        text = "".join(f"{name}: {value}\r\n" for name, value in lines)
        return f"HTTP/1.1 200 OK\r\n{text}\r\n".encode("latin-1") + media


def _kinds(stream: Stream) -> set[str]:
    """Return which of audio and video the publisher has shown; both where it has shown none."""
    return {"audio", "video"} & set(stream.codecs) or {"audio", "video"}
