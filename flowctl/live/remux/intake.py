"""The queue between the thread that receives a stream and the one that writes it, with a limit in bytes.

The receiving thread never waits. Where the disk takes less than comes, the queue fills, and from then on everything is
left out until a key frame fits in again, or sound where there is no video: counted, and told to the writer at the
place where it is missing. Headers alone are kept, since what follows needs them. So a slow disk costs the recording a
part, and the server nothing: its connection is read as fast as before.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

from flowctl.core.flow.state import MessageClass
from flowctl.core.outcomes.backoff import Backoff
from flowctl.errors import LimitExceededError
from flowctl.live.cluster.follow import Sink, Source, StreamFollower
from flowctl.pollgroup import PollGroup
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.url import RtmpUrl
from flowctl.wire.rtmp.wire import TYPE_VIDEO
from flowctl.wire.streams.wirelog import KeptHeaders

QUEUE_BYTES: Final = 64 << 20
"""Messages of one stream that wait for the disk: 20 s at 25 Mbit/s."""
MESSAGE_BYTES: Final = 200
"""Memory charged for each message beside its payload: a million empty messages are no small queue."""


class MessageTaken(NamedTuple):
    type_id: int
    timestamp: int
    payload: bytes


class PublicationBegan(NamedTuple):
    """A publication begins, perhaps behind another one."""


_ENDS: Final = frozenset({"stream_eof", "NetStream.Play.UnpublishNotify"})
"""What servers say by RTMP when a publication has ended: for a log it is in words."""


class PublicationEnded(NamedTuple):
    why: str


class MessagesLost(NamedTuple):
    """Messages were left out here, because the queue was full."""

    message_count: int
    size_bytes: int


Item: TypeAlias = MessageTaken | PublicationBegan | PublicationEnded | MessagesLost


class Intake:
    """The queue; a `Sink` of `flowctl.live.cluster.follow`."""

    __slots__ = (
        "_closed",
        "_headers",
        "_items",
        "_left_bytes",
        "_left_count",
        "_limit_bytes",
        "_lock",
        "_ready",
        "_size_bytes",
        "_video",
    )

    def __init__(self, limit_bytes: int = QUEUE_BYTES) -> None:
        self._limit_bytes: Final = limit_bytes
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._items: deque[Item] = deque()  # guarded by _lock
        self._size_bytes = 0  # guarded by _lock
        self._left_count = 0  # guarded by _lock
        self._left_bytes = 0  # guarded by _lock
        self._headers: KeptHeaders[MessageTaken] = KeptHeaders()  # since messages are left out; guarded by _lock
        self._video = False  # guarded by _lock; the publication has video
        self._closed = False  # guarded by _lock

    # -- the thread that receives

    def begin(self, now: float) -> None:
        del now
        with self._lock:
            self._video = False
        self._put(PublicationBegan())

    def take(self, type_id: int, timestamp: int, payload: bytes, now: float) -> None:
        del now
        cost = len(payload) + MESSAGE_BYTES
        with self._lock:
            room = self._limit_bytes - self._size_bytes
            self._video = self._video or type_id == TYPE_VIDEO
            if self._left_count:
                info = inspect(type_id, payload)
                if info.message_class is MessageClass.HEADER:
                    with suppress(LimitExceededError):
                        self._headers.keep(info.sticky_key, len(payload), MessageTaken(type_id, timestamp, payload))
                    return
                # Not at once where one message has room again: half of the queue, so that losses are few and whole.
                cut = MessageClass.KEY if self._video else MessageClass.AUDIO
                refused = info.message_class is not cut or room < self._limit_bytes // 2
            else:
                refused = cost > room
            if refused:
                self._left_count += 1
                self._left_bytes += len(payload)
                return
            self._append_losses_locked()
            self._items.append(MessageTaken(type_id, timestamp, payload))
            self._size_bytes += cost
            self._ready.notify()

    def end(self, why: str) -> None:
        self._put(PublicationEnded("the stream ended" if why in _ENDS else why))

    def close(self) -> None:
        """Close the queue: no item follows. Any thread."""
        with self._lock:
            self._closed = True
            self._ready.notify()

    # -- the thread that writes

    def get(self, timeout_s: float) -> list[Item] | None:
        """Return the items that wait, or wait at most `timeout_s` for some. None: the queue is closed and empty."""
        with self._lock:
            if not self._items and not self._closed:
                self._ready.wait(timeout_s)
            if self._closed:
                self._append_losses_locked()
            if not self._items:
                return None if self._closed else []
            items = list(self._items)
            self._items.clear()
            self._size_bytes = 0
            return items

    def _put(self, item: Item) -> None:
        """Append a word of the stream; there are few of them."""
        with self._lock:
            self._append_losses_locked()
            self._items.append(item)
            self._ready.notify()

    def _append_losses_locked(self) -> None:
        if self._left_count:
            self._items.append(MessagesLost(self._left_count, self._left_bytes))
            self._left_count = self._left_bytes = 0
            self._items.extend(self._headers.values)
            self._size_bytes += self._headers.size_bytes
            self._headers = KeptHeaders()


BACKOFF: Final = Backoff(first_s=0.25, factor=2.0, most_s=10.0)
HOLD_S: Final = 10.0
"""Time that a stream whose server is lost may be away and still go on in the same file, if its clock does."""


def pull(url: RtmpUrl, sink: Sink, group: PollGroup) -> StreamFollower:
    """Return what plays `url` into `sink` on the thread of `group`; start it."""
    return StreamFollower(Source(url), sink, group, backoff=BACKOFF, hold_s=HOLD_S)
