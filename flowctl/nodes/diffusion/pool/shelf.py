"""The order of a pool: entries by id and by ticket, the oldest evicted first, the evicted remembered for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from flowctl.errors import ConfigError
from flowctl.nodes.diffusion.pool.pool import ZERO_TICKET, PoolEntry

E = TypeVar("E", bound=PoolEntry)


class Shelf(Generic[E]):
    """Entries in the order of their tickets, bounded."""

    def __init__(self, max_bytes: int, max_objects: int, on_evicted: Callable[[E], object] | None = None) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_objects", max_objects)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, it must be 1 or more")
        self.max_bytes: Final = max_bytes
        self.max_objects: Final = max_objects
        self._on_evicted = on_evicted
        self._by_id: dict[bytes, E] = {}
        # Ordered: the first of a plain dict is looked for among all that have gone.
        self._by_ticket: OrderedDict[int, E] = OrderedDict()  # in rising order
        self._gone: OrderedDict[bytes, None] = OrderedDict()  # ids of evicted ones, oldest first
        self._last = ZERO_TICKET
        self._watchers: dict[object, Callable[[], object]] = {}
        self._grown = False  # since `tell`
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[E]:
        return iter(self._by_ticket.values())

    def knows(self, object_id: bytes) -> bool:
        return object_id in self._by_id or object_id in self._gone

    def get(self, object_id: bytes) -> E | None:
        return self._by_id.get(object_id)

    @property
    def next_ticket(self) -> int:
        return self._last + 1

    def make_room(self, object_id: bytes, size_bytes: int) -> bool:
        """Evict until an object of this size fits. False: it never would, and counts as evicted."""
        if size_bytes > self.max_bytes:
            self.forget(object_id)
            return False
        while self._by_ticket and (
            self.size_bytes + size_bytes > self.max_bytes or len(self._by_ticket) >= self.max_objects
        ):
            self.evict()
        return True

    def free(self, size_bytes: int) -> None:
        """Evict the oldest entries until so many octets are free, at least one entry."""
        while self._by_ticket and size_bytes > 0:
            size_bytes -= max(1, self.evict().size_bytes)

    def put(self, entry: E) -> None:
        self._last = max(self._last, entry.ticket)
        self._by_id[entry.object_id] = self._by_ticket[entry.ticket] = entry
        self._gone.pop(entry.object_id, None)
        self.size_bytes += entry.size_bytes
        self._grown = True

    def evict(self, entry: E | None = None) -> E:
        """Remove and return an entry; None: the oldest."""
        entry = next(iter(self)) if entry is None else entry
        del self._by_id[entry.object_id], self._by_ticket[entry.ticket]
        self.size_bytes -= entry.size_bytes
        if self._on_evicted is not None:
            self._on_evicted(entry)
        self.forget(entry.object_id)
        return entry

    def forget(self, object_id: bytes) -> None:
        """Note that the object is not here and not wanted either."""
        self._gone[object_id] = None
        if len(self._gone) > self.max_objects:
            self._gone.popitem(last=False)

    def after(self, ticket: int, limit: int) -> list[E]:
        if ticket >= self._last or not self._by_ticket:
            return []
        found: list[E] = []
        # Mostly the oldest go, so there are few gaps: of damaged files, and where a stream has a bound of its own.
        for number in range(max(ticket + 1, next(iter(self._by_ticket))), self._last + 1):
            if len(found) == limit:
                break
            entry = self._by_ticket.get(number)
            if entry is not None:
                found.append(entry)
        return found

    def watch(self, callback: Callable[[], object]) -> Callable[[], None]:
        key = object()
        self._watchers[key] = callback

        def unwatch() -> None:
            self._watchers.pop(key, None)

        return unwatch

    def tell(self) -> None:
        if self._grown:
            self._grown = False
            for callback in list(self._watchers.values()):
                callback()
