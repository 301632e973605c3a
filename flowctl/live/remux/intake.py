"""The queue between the thread that receives a stream and the one that writes it, with a limit in bytes.

The receiving thread never waits. Where the disk takes less than comes, the queue fills, and from then on everything is
left out until a key frame fits in again, or sound where there is no video: counted, and told to the writer at the
place where it is missing. Headers alone are kept, since what follows needs them. So a slow disk costs the recording a
part, and the server nothing: its connection is read as fast as before.

Where all streams of the process hold too much together (`flowctl.live.remux.shares`), the queues of one are cut: what
waits in them is let go, and nothing is accepted until they go on.
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
_BATCH_BYTES: Final = 1 << 20
"""Messages that are handed over at a time: what is being written is no second queue."""
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


_SLOW: Final = "the disk was too slow"


class MessagesLost(NamedTuple):
    """Messages were left out here, because the queue was full or cut."""

    message_count: int
    size_bytes: int
    why: str = _SLOW


class QueueCut(NamedTuple):
    """The stream has to let go of what is held of it."""

    why: str


Item: TypeAlias = MessageTaken | PublicationBegan | PublicationEnded | MessagesLost | QueueCut


class Intake:
    """The queue; a `Sink` of `flowctl.live.cluster.follow`."""

    __slots__ = (
        *("_closed", "_cut", "_headers", "_items", "_leaves_out", "_left_bytes", "_left_count", "_left_why"),
        *("_limit_bytes", "_lock", "_ready", "_size_bytes", "_video"),
    )

    def __init__(self, limit_bytes: int = QUEUE_BYTES) -> None:
        self._limit_bytes: Final = limit_bytes
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._items: deque[Item] = deque()  # guarded by _lock
        self._size_bytes = 0  # guarded by _lock
        self._leaves_out = False  # until something fits in again; guarded by _lock
        self._left_why = ""  # why it does; guarded by _lock
        self._cut = False  # nothing is accepted; guarded by _lock
        self._left_count = 0  # guarded by _lock
        self._left_bytes = 0  # guarded by _lock
        self._headers: KeptHeaders[MessageTaken] = KeptHeaders()  # since messages are left out; guarded by _lock
        self._video = False  # guarded by _lock; the publication has video
        self._closed = False  # guarded by _lock

    @property
    def size_bytes(self) -> int:
        """What waits. Any thread."""
        with self._lock:
            return self._size_bytes

    # -- the thread that receives

    def cut(self, why: str) -> None:
        """Let go of what waits, and accept nothing until `go_on`."""
        with self._lock:
            items, self._items, self._size_bytes = self._items, deque(), 0
            self._leaves_out, self._left_why, self._cut = True, why, True
            for item in items:
                if isinstance(item, MessageTaken):
                    self._leave_out_locked(item)
                    continue
                if isinstance(item, PublicationBegan):
                    self._headers = KeptHeaders()  # those are of another one
                self._items.append(item)
            self._items.append(QueueCut(why))
            self._ready.notify()

    def go_on(self) -> None:
        with self._lock:
            self._cut = False

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
            message = MessageTaken(type_id, timestamp, payload)
            if self._leaves_out:
                # Not at once where one message has room again: half of the queue, so that losses are few and whole.
                begin = MessageClass.KEY if self._video else MessageClass.AUDIO
                refused = self._cut or inspect(type_id, payload).message_class is not begin
                refused = refused or room < self._limit_bytes // 2
            else:
                refused = self._leaves_out = cost > room
                self._left_why = _SLOW
            if refused:
                self._leave_out_locked(message)
                return
            self._append_losses_locked()
            self._items.append(message)
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
            items: list[Item] = []
            batch_bytes = 0
            while self._items and batch_bytes < _BATCH_BYTES:
                item = self._items.popleft()
                items.append(item)
                batch_bytes += len(item.payload) + MESSAGE_BYTES if isinstance(item, MessageTaken) else 0
            self._size_bytes -= batch_bytes
            return items

    def _put(self, item: Item) -> None:
        """Append a word of the stream; there are few of them."""
        with self._lock:
            self._append_losses_locked()
            self._items.append(item)
            self._ready.notify()

    def _leave_out_locked(self, message: MessageTaken) -> None:
        info = inspect(message.type_id, message.payload)
        if info.message_class is MessageClass.HEADER:
            with suppress(LimitExceededError):
                self._headers.keep(info.sticky_key, len(message.payload), message)
            return
        self._left_count += 1
        self._left_bytes += len(message.payload)

    def _append_losses_locked(self) -> None:
        if not self._leaves_out:
            return
        if self._left_count:
            self._items.append(MessagesLost(self._left_count, self._left_bytes, self._left_why))
        self._left_count = self._left_bytes = 0
        self._items.extend(self._headers.values)
        self._size_bytes += sum(len(item.payload) + MESSAGE_BYTES for item in self._headers.values)
        self._headers = KeptHeaders()
        self._leaves_out = self._cut


BACKOFF: Final = Backoff(first_s=0.25, factor=2.0, most_s=10.0)
HOLD_S: Final = 10.0
"""Time that a stream whose server is lost may be away and still go on in the same file, if its clock does."""


def pull(url: RtmpUrl, sink: Sink, group: PollGroup) -> StreamFollower:
    """Return what plays `url` into `sink` on the thread of `group`; start it."""
    return StreamFollower(Source(url), sink, group, backoff=BACKOFF, hold_s=HOLD_S)
