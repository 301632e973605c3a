"""A publisher of a load run: a synthetic stream or a file, sent in real time, each frame when it is due.

Theory of operation. `Timeline` says when each tag is due; one timer of the reactor sends what is. Synthetic frames are
stamped with their number and the wall clock as they go out. Frames of a file carry no stamp: the publisher announces
instead at which wall-clock time timestamp 0 was due, and viewers count from that, so a publisher that is late is part
of the delay they see. When the server does not take what is sent, the publisher waits and then catches up; it drops
nothing, and reports how late it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from flowctl.core.flow.state import MessageClass
from flowctl.flv import TAG_AUDIO, TAG_SCRIPT, TAG_VIDEO
from flowctl.load.peers.link import PeerLink
from flowctl.load.results.result import PeerEnd
from flowctl.wire.client.pace import TagFeed, TimedTag
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.events import ClientEvent, PublishStarted, StreamEnded

_QUEUED_MAX_BYTES: Final = 1024 * 1024
_LOOK_AGAIN_S: Final = 0.02
_READ_MOST: Final = 64 * 1024


@dataclass(slots=True, kw_only=True, eq=False)
class LoadPublisher(PeerLink):
    """One connection that publishes until it is told to leave, or the source ends."""

    asks: Callable[[ClientSession], None] = ClientSession.publish
    feed: TagFeed
    on_start: Callable[[int], None]  # called with the wall-clock time in microseconds at which timestamp 0 was due
    publishing: bool = False

    def event(self, event: ClientEvent, now: float) -> None:
        """Begin when the server says so; end when it takes the stream away."""
        if isinstance(event, PublishStarted) and not self.publishing:
            self.publishing = True
            self.feed.begin(now)
            origin_us = time.time_ns() // 1000
            tag = None if self.feed.next is None else self.feed.next.tag
            # Metadata has no time of its own: what follows it is due at once.
            first = 0 if tag is None or tag.type_id == TAG_SCRIPT else tag.timestamp
            self.on_start(origin_us - first * 1000)
            self._pump(now)
        elif isinstance(event, StreamEnded):
            self.end(PeerEnd.SERVER_CLOSED, f"the server ended the stream: {event.reason}", now)

    def _pump(self, now: float) -> None:
        """Send the tags that are due, and schedule the next call."""
        session = self.session
        if self.ended or self.leaving is not None or not isinstance(session, ClientSession):
            return
        parts: list[bytes] = []
        size = 0
        feed = self.feed
        while feed.next is not None and feed.due_at(now) <= now and len(self.out) + size <= _QUEUED_MAX_BYTES:
            timed = feed.take(now, time.time_ns() // 1000)
            octets = session.send_tag(*timed.tag)
            self._count(timed)
            parts.append(octets)
            size += len(octets)
        self._put(b"".join(parts), now)
        if self.sock is None:
            return  # it broke
        if feed.next is None:
            self.leave(PeerEnd.LEFT, feed.why_over, self.farewell(), now)
            return
        due_at = feed.due_at(now)
        self.reactor.call_at(due_at if due_at > now else now + _LOOK_AGAIN_S, self._pump)

    def _put(self, octets: bytes, now: float) -> None:
        """Send; unlike what a viewer says, media waits as long as it has to."""
        self.result.wire_bytes += len(octets)
        if self.out:
            self.out += octets
        else:
            self.send(octets, now)

    def _count(self, timed: TimedTag) -> None:
        result, type_id = self.result, timed.tag.type_id
        media = timed.message_class is not MessageClass.HEADER
        if type_id == TAG_VIDEO:
            result.video += media
            result.keys += timed.message_class is MessageClass.KEY
        elif type_id == TAG_AUDIO:
            result.audio += media
        else:
            result.data += 1

    def input(self, now: float) -> None:
        """Read what the server says; not counted: a publisher's octets are those it sent."""
        sent = self.result.wire_bytes
        self.read_session(now, _READ_MOST)
        self.result.wire_bytes = sent

    def farewell(self) -> list[bytes]:
        session = self.session
        if session is None or not session.stream_id:
            return []
        session.close_stream()
        return [session.data_to_send()]

    def depart(self, end: PeerEnd, details: str, now: float) -> None:
        self.leave(end, details, self.farewell(), now)

    def ending(self, now: float) -> None:
        self.result.notes = f"largest lag {self.feed.max_lag_s * 1000:.0f} ms"
