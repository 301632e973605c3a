"""The window: the last segments of each stream that a node has, bounded by octets and time; a pool for diffusion.

What a node has it offers, wherever it came from: cut here, or fetched. Which segments it lacks and wants is for its
owner to say (`SegmentPool.wants`): what nobody wants counts as here already, so that it is acknowledged and never
fetched.

Origins whose clocks differ have two names for one segment. Its owner knows that (`known_as`): it is kept and offered by
one of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError, RemoteProtocolError
from flowctl.live.cluster.segments.segment import Segment, SegmentId, id_of, object_of
from flowctl.nodes.diffusion.pool.memory import StoredObject
from flowctl.nodes.diffusion.pool.pool import PoolEntry
from flowctl.nodes.diffusion.pool.shelf import Shelf

MOST_REMEMBERED: Final = 20_000
"""Ids that are remembered, of objects that were read or were here: more than all peers may announce at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowLimits:
    """Limits of what is kept."""

    #: how long a segment of a stream is kept, in seconds: a node that was away for less loses nothing
    stream_s: float = 60.0
    stream_bytes: int = 64 << 20
    total_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("stream_s", "stream_bytes", "total_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEntry(StoredObject):
    """A segment of the window; an entry of a pool, whose topic is the stream."""

    id: SegmentId
    at: float


class SegmentPool:
    """The window of a node; all methods belong to one thread, that of its loop."""

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
        self._shelf: Final[Shelf[WindowEntry]] = Shelf(limits.total_bytes, MOST_REMEMBERED)
        self.watch: Final = self._shelf.watch
        self.objects_after: Final = self._shelf.after
        self.streams: Final[dict[str, deque[WindowEntry]]] = {}  #: entries, by stream, in order of arrival
        self._stream_bytes: dict[str, int] = {}
        self._names: OrderedDict[bytes, SegmentId | None] = OrderedDict()  # ids that were read. None: cannot be

    def __len__(self) -> int:
        return len(self._shelf)

    @property
    def size_bytes(self) -> int:
        return self._shelf.size_bytes

    def name_of(self, object_id: bytes) -> SegmentId | None:
        if object_id in self._names:
            return self._names[object_id]
        try:
            name: SegmentId | None = SegmentId.decode(object_id)
        except RemoteProtocolError:
            name = None
        self._names[object_id] = name
        if len(self._names) > MOST_REMEMBERED:
            self._names.popitem(last=False)
        return name

    # -- for diffusion

    def object_id(self, data: bytes) -> bytes:
        """Return the id that an object says it has; `add_objects` looks whether that is true."""
        try:
            return id_of(data)
        except RemoteProtocolError as error:
            raise ValueError(str(error)) from error

    def has_object(self, object_id: bytes) -> bool:
        if self._shelf.knows(object_id):
            return True
        name = self.name_of(object_id)
        return name is None or self._wants is None or not self._wants(name)

    def has(self, name: SegmentId) -> bool:
        return self._shelf.knows(name.encode())

    async def add_objects(self, objects: Mapping[bytes, bytes]) -> Mapping[bytes, str]:
        """Keep segments that have come; return the faults of those that are malformed, by id.

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
                self._shelf.forget(object_id)
                data = object_of(name, memoryview(data)[-name.size_bytes :])  # noqa: PLW2901 - by its other name
            if self.put(name, data) and self._on_segment is not None:
                self._on_segment(segment)
            await asyncio.sleep(0)
        return rejected

    async def read_objects(self, entries: Sequence[PoolEntry]) -> list[bytes]:
        return [entry.read() for entry in entries]

    # -- for the node

    def put(self, name: SegmentId, data: bytes) -> bool:
        object_id, stream, shelf = name.encode(), name.stream, self._shelf
        if shelf.get(object_id) is not None:
            return False
        kept = WindowEntry(shelf.next_ticket, object_id, data, stream, id=name, at=self._clock())
        shelf.put(kept)
        self.streams.setdefault(stream, deque()).append(kept)
        self._stream_bytes[stream] = self._stream_bytes.get(stream, 0) + len(data)
        while self._stream_bytes[stream] > self._limits.stream_bytes and len(self.streams[stream]) > 1:
            self._evict(stream)
        self.expire()
        shelf.tell()
        return True

    def expire(self) -> None:
        """Let go what is too old, or too much in all. What came first goes first, so no other is looked at."""
        limits, oldest = self._limits, self._clock() - self._limits.stream_s
        while (first := next(iter(self._shelf), None)) is not None:
            if first.at >= oldest and (self.size_bytes <= limits.total_bytes or len(self) == 1):
                return
            self._evict(first.topic)

    def _evict(self, stream: str) -> None:
        kept = self.streams[stream].popleft()
        self._shelf.evict(kept)
        self._stream_bytes[stream] -= kept.size_bytes
        if not self.streams[stream]:
            del self.streams[stream], self._stream_bytes[stream]
