"""Streams as FLV: tags for HTTP, bare or in chunks, and in WebSocket frames; each complete, and serialised once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from flowctl import flv
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import CacheLimits, Entry, StreamLog
from flowctl.live.httpd.exchange import HeaderFields
from flowctl.live.stream import StartPlace, Stream
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


_BOTH: Final = frozenset({"audio", "video"})
SETTLE_S: Final = 1.0
"""Time from the first frame of a stream in which it sends or names the other track. A header cannot be taken back:
mpegts.js waits for ever for a track that it tells of and that never comes, ExoPlayer ignores one that it does not."""
SILENT_S: Final = 20.0
"""Time after which a stream without a frame is announced with both: as long as `first_media_s` lets it be."""
_HELD: Final = CacheLimits()
"""What is held of a log meanwhile is no more than its GOP cache may hold by default."""
_LOOK_S, _LATER_LOOK_S, _LOOK_SHARE = 0.02, 0.2, 0.3
"""Time between two looks at first, at most, and as a share of the time since the publication began: tracks mostly show
themselves at once, and a crowd may wait for seconds."""
_PICTURES: Final = (MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE)
FLV_TYPE: Final = "video/x-flv"


@dataclass(slots=True)
class FlvPlay:
    wire_format: FlvTags
    accept_key: bytes  # the answer to the key of a WebSocket handshake; empty: it is plain HTTP
    gives_up_at: float
    reader: FrameReader | None = None  # of what a WebSocket player says
    taken: bool = False  # whether the kernel has the head of the response, so that answers to frames go behind it
    look_at: float | None = None  # when to look again what the stream shows. None: it need not be.
    # where it is to begin, with all that comes meanwhile, and since when. None: it has begun.
    held: tuple[StartPlace, float] | None = None
    give_up: Callable[[], None] | None = None  # what it has reserved of renditions

    def let_go(self) -> None:
        self.held = None  # it would hold all that comes from now on
        if self.give_up is not None:
            self.give_up()
            self.give_up = None

    def look_later(self, stream: Stream, now: float) -> None:
        since_s = now - (stream.published_at or 0.0)
        self.look_at = now + min(_LOOK_S + since_s * _LOOK_SHARE, _LATER_LOOK_S)

    def head(self, tracks: Collection[str], headers: HeaderFields) -> bytes:
        """Return all that goes before the first tag: the head of the response, and FLV's own.

        Players of HTTP/1.0 know no chunks: for them the body is as long as the connection lasts.
        """
        media = self.wire_format.wrapped(flv.header(audio="audio" in tracks, video="video" in tracks))
        if self.accept_key:
            extra = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            return switching_head(self.accept_key, extra) + media
        lines = [("Content-Type", FLV_TYPE), ("Cache-Control", "no-store"), ("Connection", "close"), *headers]
        if self.wire_format is CHUNKS:
            lines.append(("Transfer-Encoding", "chunked"))
        text = "".join(f"{name}: {value}\r\n" for name, value in lines)
        return f"HTTP/1.1 200 OK\r\n{text}\r\n".encode("latin-1") + media


def settled_tracks(stream: Stream, now: float, log: StreamLog, first: Entry) -> Collection[str]:
    """Return which of audio and video a player that begins at `first` is told of; empty: that cannot be said yet.

    Of a publication that has ended those that it has sent; empty: no frame has come.
    """
    tracks, began = stream.tracks(now)
    if log.ended:  # asked last: the tracks may be those of the next publication
        came = [after - before for after, before in zip(log.tail.counts, first.counts, strict=True)]
        found = {"audio": came[MessageClass.AUDIO], "video": sum(came[item] for item in _PICTURES)}
        return {kind for kind, count in found.items() if count}
    late = now - (stream.published_at or 0.0) >= SILENT_S if began is None else now - began >= SETTLE_S
    full = first.next is not None and _HELD.passed(first, log.tail, now)
    return (tracks or _BOTH) if late or full or len(tracks) > 1 else ()
