"""What a live connection does with a message stream: it publishes, or it plays."""

from __future__ import annotations

from flowctl.live.hooks import LiveRequest
from flowctl.live.oversight.signals import Subscription
from flowctl.live.stream import Stream
from flowctl.live.wirelog import WireLog
from flowctl.server.totals import FlowTotals


class Publishing:
    """A message stream on which the peer publishes.

    Attributes:
        stream_id: message stream id.
        stream: the stream; its `publisher` is somebody else while this one is on standby or was replaced.
        began_at: time in seconds.
        messages: messages received.
        discarded: of those, not passed on because another publisher counts.
        media_at: when its last audio or video message came. None: none has come.
        look_at: when it is looked at whether it has fallen silent. None: it may be.
        limits_told: limits on what is kept of its headers that were logged already.
        signal: tells it how its viewers are doing. None: it has not asked for it.
        request: what it asked for. None: no hook wants to know.
    """

    __slots__ = (
        *("began_at", "discarded", "limits_told", "look_at", "media_at"),
        *("messages", "request", "signal", "stream", "stream_id"),
    )

    def __init__(self, stream_id: int, stream: Stream, now: float) -> None:
        self.stream_id = stream_id
        self.stream = stream
        self.began_at = now
        self.messages = 0
        self.discarded = 0
        self.media_at: float | None = None
        self.look_at: float | None = None
        self.limits_told: frozenset[str] = frozenset()
        self.signal: Subscription | None = None
        self.request: LiveRequest | None = None


class Playing:
    """The message stream on which the peer plays; one per connection.

    Attributes:
        stream_id: message stream id.
        stream: the stream.
        wire: its log for that message stream id.
        began_at: time in seconds.
        before: the connection's figures when it began.
        waits_until: when waiting for a publisher is given up. None: it is published, or the wait has no limit.
        paused: at the player's word.
        audio: whether the player wants audio.
        video: whether the player wants video.
    """

    __slots__ = ("audio", "before", "began_at", "paused", "stream", "stream_id", "video", "waits_until", "wire")

    def __init__(self, stream_id: int, stream: Stream, wire: WireLog, before: FlowTotals, now: float) -> None:
        self.stream_id = stream_id
        self.stream = stream
        self.wire = wire
        self.before = before
        self.began_at = now
        self.waits_until: float | None = None
        self.paused = False
        self.audio = True
        self.video = True
