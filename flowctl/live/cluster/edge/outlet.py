"""What of a copied stream goes out to viewers: one publication after the other, with the headers that frames need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import structlog

from flowctl.core.flow.state import MessageClass
from flowctl.errors import BusyError, LimitExceededError
from flowctl.live.cluster.follow import Sink
from flowctl.live.cluster.segments.segment import Frame, Header
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import CLOCK_MASK

_log: Final = structlog.get_logger("flowctl.cluster")
REFUSED_S: Final = 1.0
"""Pause between two tries to publish a name that a publisher of this server has."""


@dataclass(slots=True)
class Outlet:
    """Publishes the frames of one stream."""

    stream: str
    sink: Sink
    #: headers of the part that goes out next; they go before its first frame where viewers have others
    due: tuple[Header, ...] = ()
    moved_ms: int = 0  #: added to times of the publication, which began to go out as another one
    begun: bool = False  #: whether it is published; without a free name it is not
    message_count: int = 0
    _refused_at: float = float("-inf")
    _headers: dict[object, Header] = field(default_factory=dict)

    def begin(self, now: float) -> None:
        if now - self._refused_at < REFUSED_S:
            return
        try:
            self.sink.begin(now)
        except (BusyError, LimitExceededError) as error:
            self._refused_at, self.begun = now, False
            _log.warning("stream not published", stream=self.stream, why=str(error), hint=error.hint)
            return
        self.begun = True
        self._headers.clear()

    def publish(self, frame: Frame, now: float) -> None:
        if not self.begun:
            self.begin(now)
            if not self.begun:
                return
        frame = frame._replace(timestamp=frame.timestamp + self.moved_ms & CLOCK_MASK) if self.moved_ms else frame
        due, self.due = self.due, ()
        for type_id, payload in due:
            key = inspect(type_id, payload).sticky_key
            if self._headers.get(key) != (type_id, payload):
                self._headers[key] = type_id, payload
                self.sink.take(type_id, frame.timestamp, payload, now)
        info = inspect(frame.type_id, frame.payload)
        if info.message_class is MessageClass.HEADER:
            self._headers[info.sticky_key] = frame.type_id, frame.payload
        self.message_count += 1
        self.sink.take(*frame, now)

    def end(self, why: str) -> None:
        begun, self.begun = self.begun, False
        if begun:
            self.sink.end(why)
