"""A response that is a stream: its head, and what has to be known before that can be sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowctl import flv
from flowctl.live.httpd.exchange import HeaderFields
from flowctl.live.httpd.formats import CHUNKS, FlvTags
from flowctl.live.httpd.websocket import WebSocketPeer
from flowctl.live.stream import Stream

SETTLE_S: Final = 1.0
"""How long a stream that has just begun may take to show both sound and picture. The header of FLV says which there
are, and mpegts.js waits for ever for one that was announced and does not come."""
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
