"""A publisher of a load run: a synthetic stream or a file, sent in real time, each frame when it is due.

Theory of operation. `Timeline` says when each tag is due; one timer of the reactor sends what is. Synthetic frames are
stamped with their number and the wall clock as they go out. Frames of a file carry no stamp: the publisher announces
instead at which wall-clock time timestamp 0 was due, and viewers count from that, so a publisher that is late is part
of the delay they see. When the server does not take what is sent, the publisher waits and then catches up; it drops
nothing, and reports how late it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from flowctl.core.flow.state import MessageClass
from flowctl.errors import FlowctlError
from flowctl.flv import TAG_AUDIO, TAG_SCRIPT, TAG_VIDEO, FlvTag
from flowctl.load.peers.link import Link, Target
from flowctl.load.peers.reactor import Reactor
from flowctl.load.results.result import PeerEnd, PeerResult
from flowctl.wire.client.pace import TimedTag, Timeline
from flowctl.wire.media.stamp import Stamper
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.events import ClientEvent, PublishStarted, StreamEnded
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import RtmpUrl

_QUEUED_MAX_BYTES: Final = 1024 * 1024
_LOOK_AGAIN_S: Final = 0.02
_READ_MOST: Final = 64 * 1024


class Publisher(Link):
    """One connection that publishes until it is told to leave, or the source ends.

    Attributes:
        max_lag_s: how late a frame was sent at worst.
    """

    __slots__ = (
        "_next",
        "_on_start",
        "_source_error",
        "_stamper",
        "_start_at",
        "_tags",
        "max_lag_s",
        "publishing",
    )

    def __init__(
        self,
        reactor: Reactor,
        target: Target,
        url: RtmpUrl,
        result: PeerResult,
        *,
        source: Iterable[FlvTag],
        loop: bool,
        on_start: Callable[[int], None],
        config: ClientSessionConfig,
        began: float,
        on_end: Callable[[Any], None],
    ) -> None:
        asks = ClientSession.publish
        super().__init__(reactor, target, url, result, asks=asks, config=config, began=began, on_end=on_end)
        self._tags: Iterator[TimedTag] = iter(Timeline(source, loop=loop))
        self._next: TimedTag | None = None
        self._stamper = Stamper()
        self._on_start = on_start
        self._source_error = ""
        self._start_at = 0.0  # when the first tag is due
        self.max_lag_s = 0.0
        self.publishing = False

    def event(self, event: ClientEvent, now: float) -> None:
        """Begin when the server says so; end when it takes the stream away."""
        if isinstance(event, PublishStarted) and not self.publishing:
            self.publishing = True
            self._start_at = now
            self._take_next()
            origin_us = time.time_ns() // 1000
            first = self._first_media_timestamp()
            self._on_start(origin_us - first * 1000)
            self._pump(now)
        elif isinstance(event, StreamEnded):
            self.end(PeerEnd.SERVER_CLOSED, f"the server ended the stream: {event.reason}", now)

    def _first_media_timestamp(self) -> int:
        """Return the timestamp that is due at once; metadata before it has none of its own."""
        timed = self._next
        return 0 if timed is None or timed.tag.type_id == TAG_SCRIPT else timed.tag.timestamp

    def drained(self, now: float) -> None:
        """Go on where the server did not take more."""

    def _pump(self, now: float) -> None:
        """Send what is due, and see to it that it is called again."""
        session = self.session
        if self.ended or self._leaving is not None or not isinstance(session, ClientSession):
            return
        parts: list[bytes] = []
        size = 0
        while (timed := self._next) is not None:
            due_at = self._start_at + timed.due_ms / 1000
            if due_at > now or self.pending_bytes + size > _QUEUED_MAX_BYTES:
                break
            self.max_lag_s = max(self.max_lag_s, now - due_at)
            parts.append(self._octets(session, timed))
            size += len(parts[-1])
            self._take_next()
        self._put(b"".join(parts), now)
        if self.sock is None:
            return  # it broke
        if self._next is None:
            self.leave(PeerEnd.LEFT, self._source_error or "everything was sent", self.farewell(), now)
            return
        due_at = self._start_at + self._next.due_ms / 1000
        self._reactor.call_at(due_at if due_at > now else now + _LOOK_AGAIN_S, self._pump)

    def _take_next(self) -> None:
        """Get the next tag; a source that turns out to be broken ends there, and the row says why."""
        try:
            self._next = next(self._tags, None)
        except FlowctlError as error:
            self._next = None
            self._source_error = f"the source: {error}"

    def _put(self, octets: bytes, now: float) -> None:
        """Send; unlike what a viewer says, media waits as long as it has to."""
        self.result.wire_bytes += len(octets)
        if self.pending_bytes:
            self._out += octets
        else:
            self.send(octets, now)

    def _octets(self, session: ClientSession, timed: TimedTag) -> bytes:
        type_id, timestamp, payload = timed.tag
        payload = self._stamper.stamped(type_id, payload, time.time_ns() // 1000)
        result = self.result
        media = timed.message_class is not MessageClass.HEADER
        if type_id == TAG_VIDEO:
            result.video += media
            result.keys += timed.message_class is MessageClass.KEY
        elif type_id == TAG_AUDIO:
            result.audio += media
        else:
            result.data += 1
        return session.send_tag(type_id, timestamp, payload)

    def input(self, now: float) -> None:
        """Read what the server says; not counted: a publisher's octets are those it sent."""
        sent = self.result.wire_bytes
        self.read_session(now, _READ_MOST)
        self.result.wire_bytes = sent

    def farewell(self) -> list[bytes]:
        """Return what a publisher says before it leaves."""
        session = self.session
        if session is None or not session.stream_id:
            return []
        session.close_stream()
        return [session.data_to_send()]

    def depart(self, end: PeerEnd, details: str, now: float) -> None:
        """Leave in order."""
        self.leave(end, details, self.farewell(), now)

    def ending(self, now: float) -> None:
        """Say how late it was."""
        self.result.notes = f"largest lag {self.max_lag_s * 1000:.0f} ms"
