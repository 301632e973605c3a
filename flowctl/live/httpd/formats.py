"""Streams as FLV: tags for HTTP, bare or in chunks, and in WebSocket frames; each complete, and serialised once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowctl import flv
from flowctl.live.httpd.exchange import HeaderFields
from flowctl.live.stream import Stream
from flowctl.wire.rtmp.wire import CLOCK_MASK, TYPE_DATA_AMF0, TYPE_DATA_AMF3
from flowctl.wire.streams.wirelog import WireFormat
from flowctl.wire.websocket.frames import LONG, SHORT, close_frame, frame
from flowctl.wire.websocket.handshake import switching_head
from flowctl.wire.websocket.reading import FrameReader

_MEDIA: Final = frozenset({flv.TAG_AUDIO, flv.TAG_VIDEO, flv.TAG_SCRIPT})
_AMF0_INSIDE: Final = b"\0"
"""First octet of an AMF3 data message whose values are AMF0, as those of Flash's encoders are; the rest is one."""

_GONE: Final = close_frame(1000, "the publisher has gone")
GOING_AWAY: Final = close_frame(1001, "the server stops")
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
        return slice({SHORT: 4, LONG: 10}.get(wire[1], 2), len(wire))

    def end(self, timestamp: int) -> bytes:
        """Return a close frame, which stands behind all that was published."""
        del timestamp
        return _GONE


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
    accept_key: bytes  # the answer to the key of a WebSocket handshake; empty: it is plain HTTP
    gives_up_at: float
    reader: FrameReader | None = None  # of what a WebSocket player says
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
        if self.accept_key:
            extra = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            return switching_head(self.accept_key, extra) + media
        lines = [("Content-Type", FLV_TYPE), ("Cache-Control", "no-store"), ("Connection", "close"), *headers]
        if self.wire_format is CHUNKS:
            lines.append(("Transfer-Encoding", "chunked"))
        text = "".join(f"{name}: {value}\r\n" for name, value in lines)
        return f"HTTP/1.1 200 OK\r\n{text}\r\n".encode("latin-1") + media


def _kinds(stream: Stream) -> set[str]:
    """Return which of audio and video the publisher has shown; both where it has shown none."""
    return {"audio", "video"} & set(stream.codecs) or {"audio", "video"}
