"""The window: the last segments of each stream that a node has, bounded by octets and time; a pool for diffusion.

What a node has it offers, wherever it came from: cut here, or fetched. Which segments it lacks and wants is for its
owner to say (`SegmentPool.wants`): what nobody wants counts as here already, so that it is acknowledged and never
fetched.

Origins whose clocks differ have two names for one segment. Its owner knows that (`known_as`): it is kept and offered by
one of them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError, RemoteProtocolError
from flowctl.live.cluster.segments.segment import Segment, SegmentId, id_of, object_of
from flowctl.nodes.diffusion.pool.pool import PoolEntry

REMEMBERED: Final = 20_000
"""Ids of segments that are or were here: more than all peers may announce before they are acknowledged."""
_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowLimits:
    """How much is kept.

    Args:
        stream_s: how long a segment of a stream is kept, in seconds: a node that was away for less loses nothing.
    """

    stream_s: float = 60.0
    stream_bytes: int = 64 << 20
    total_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("stream_s", "stream_bytes", "total_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be more than 0")


@dataclass(frozen=True, slots=True)
class Kept:
    """A segment of the window; an entry of a pool."""

    ticket: int
    object_id: bytes
    id: SegmentId
    data: bytes
    at: float

    @property
    def size_bytes(self) -> int:
        """Size of the object."""
        return len(self.data)

    @property
    def topic(self) -> str:
        """The name of its stream."""
        return self.id.stream

    def read(self) -> bytes:
        """Return the object."""
        return self.data


class SegmentPool:
    """The window of a node; all methods belong to one thread, that of its loop.

    Attributes:
        evicted_count: segments that went to make room, or were too old.
    """

    def __init__(
        self,
        limits: WindowLimits,
        clock: Callable[[], float],
        *,
        wants: Callable[[SegmentId], bool] | None = None,
        known_as: Callable[[SegmentId], SegmentId] | None = None,
        on_segment: Callable[[Segment], None] | None = None,
    ) -> None:
        self._limits: Final = limits
        self._clock = clock
        self._wants = wants
        self._known_as = known_as
        self._on_segment = on_segment
        self._kept: dict[bytes, Kept] = {}
        self._tickets: list[int] = []  # in rising order, with those of evicted ones at the beginning
        self._by_ticket: OrderedDict[int, Kept] = OrderedDict()
        self._streams: dict[str, deque[Kept]] = {}
        self._stream_bytes: dict[str, int] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()  # that are here, or were
        self._names: OrderedDict[bytes, SegmentId | None] = OrderedDict()  # ids that were read. None: cannot be
        self._watchers: dict[object, Callable[[], object]] = {}
        self._last = 0
        self.size_bytes = 0
        self.evicted_count = 0

    def __len__(self) -> int:
        return len(self._kept)

    def name_of(self, object_id: bytes) -> SegmentId | None:
        if object_id in self._names:
            return self._names[object_id]
        try:
            name: SegmentId | None = SegmentId.decode(object_id)
        except RemoteProtocolError:
            name = None
        _remember(self._names, object_id, name)
        return name

    # -- for diffusion

    def object_id(self, data: bytes) -> bytes:
        """Return the id that an object says it has; `add_objects` looks whether that is true."""
        try:
            return id_of(data)
        except RemoteProtocolError as error:
            raise ValueError(str(error)) from error

    def has_object(self, object_id: bytes) -> bool:
        """Return whether a segment need not be fetched: it is or was here, or is not wanted."""
        if object_id in self._known:
            return True
        name = self.name_of(object_id)
        return name is None or self._wants is None or not self._wants(name)

    def has(self, name: SegmentId) -> bool:
        """Return whether a segment is here, or was."""
        return name.encode() in self._known

    async def add_objects(self, objects: Mapping[bytes, bytes]) -> Mapping[bytes, str]:
        """Keep segments that have come; return what is wrong with those that are none, by id.

        The loop has a turn after each: what is done with a segment may take its time.
        """
        rejected: dict[bytes, str] = {}
        for object_id, data in objects.items():
            try:
                segment = Segment.decode(data)
            except RemoteProtocolError as error:
                rejected[object_id] = str(error)
                continue
            name = segment.id if self._known_as is None else self._known_as(segment.id)
            if name != segment.id:
                _remember(self._known, object_id, None)
                data = object_of(name, memoryview(data)[-name.size_bytes :])  # noqa: PLW2901 - by its other name
            if self.put(name, data) and self._on_segment is not None:
                self._on_segment(segment)
            await asyncio.sleep(0)
        return rejected

    def objects_after(self, ticket: int, limit: int) -> Sequence[Kept]:
        """Return the first `limit` segments whose ticket is greater."""
        found: list[Kept] = []
        for index in range(bisect_right(self._tickets, ticket), len(self._tickets)):
            kept = self._by_ticket.get(self._tickets[index])
            if kept is not None:
                found.append(kept)
                if len(found) == limit:
                    break
        return found

    async def read_objects(self, entries: Sequence[PoolEntry]) -> list[bytes]:
        return [entry.read() for entry in entries]

    def watch(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` when segments were added, until what is returned is called."""
        key = object()
        self._watchers[key] = callback

        def unwatch() -> None:
            self._watchers.pop(key, None)

        return unwatch

    # -- for the node

    def put(self, name: SegmentId, data: bytes) -> bool:
        """Keep a segment; return False where it was here already."""
        object_id = name.encode()
        if object_id in self._kept:
            return False
        self._last += 1
        kept = Kept(self._last, object_id, name, data, self._clock())
        self._kept[object_id] = self._by_ticket[kept.ticket] = kept
        self._tickets.append(kept.ticket)
        self._streams.setdefault(name.stream, deque()).append(kept)
        self._stream_bytes[name.stream] = self._stream_bytes.get(name.stream, 0) + len(data)
        self.size_bytes += len(data)
        _remember(self._known, object_id, None)
        while self._stream_bytes[name.stream] > self._limits.stream_bytes and len(self._streams[name.stream]) > 1:
            self._evict(name.stream)
        self.expire()
        for callback in tuple(self._watchers.values()):
            callback()
        return True

    def of_stream(self, stream: str) -> list[Kept]:
        """Return the segments of a stream that are here, in the order in which they came."""
        return list(self._streams.get(stream, ()))

    def streams(self) -> list[str]:
        """Return the names of the streams of which something is here."""
        return list(self._streams)

    def expire(self) -> None:
        """Let go what is too old, or too much in all. What came first goes first, so no other is looked at."""
        limits, oldest = self._limits, self._clock() - self._limits.stream_s
        while self._by_ticket:
            first = next(iter(self._by_ticket.values()))
            if first.at >= oldest and (self.size_bytes <= limits.total_bytes or len(self._kept) == 1):
                return
            self._evict(first.id.stream)

    def _evict(self, stream: str) -> None:
        kept = self._streams[stream].popleft()
        del self._kept[kept.object_id], self._by_ticket[kept.ticket]
        self._stream_bytes[stream] -= kept.size_bytes
        self.size_bytes -= kept.size_bytes
        self.evicted_count += 1
        if not self._streams[stream]:
            del self._streams[stream], self._stream_bytes[stream]
        if len(self._tickets) > 2 * len(self._kept) + 64:
            self._tickets = list(self._by_ticket)


def _remember(table: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    table[key] = value
    if len(table) > REMEMBERED:
        table.popitem(last=False)
