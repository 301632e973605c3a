"""A pool in memory, bounded by bytes and by number: the oldest object goes first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.nodes.diffusion.pool.pool import PoolEntry, check_own, sha256_of
from flowctl.nodes.diffusion.pool.shelf import Shelf

DEFAULT_MAX_BYTES: Final = 256 << 20
DEFAULT_MAX_OBJECTS: Final = 100_000


@dataclass(frozen=True, slots=True)
class StoredObject:
    ticket: int
    object_id: bytes
    data: bytes
    topic: str = ""

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self) -> bytes:
        return self.data


def accept_all(object_id: bytes, data: bytes) -> str | None:
    del object_id, data
    return None


class MemoryPool:
    def __init__(
        self,
        *,
        identify: Callable[[bytes], bytes] = sha256_of,
        validate: Callable[[bytes, bytes], str | None] = accept_all,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_objects: int = DEFAULT_MAX_OBJECTS,
    ) -> None:
        self._identify = identify
        self._validate = validate
        self._shelf: Final[Shelf[StoredObject]] = Shelf(max_bytes, max_objects)

    def __len__(self) -> int:
        return len(self._shelf)

    @property
    def size_bytes(self) -> int:
        return self._shelf.size_bytes

    def get(self, object_id: bytes) -> bytes | None:
        entry = self._shelf.get(object_id)
        return None if entry is None else entry.data

    def add(self, objects: Mapping[bytes, bytes]) -> dict[bytes, str]:
        """Add objects of this node's own, at once; return what `validate` finds wrong, by id."""
        check_own(objects, self._identify)
        return self._add(objects)

    def _add(self, objects: Mapping[bytes, bytes]) -> dict[bytes, str]:
        rejected: dict[bytes, str] = {}
        for object_id, data in objects.items():
            if self._shelf.knows(object_id):
                continue
            wrong = self._validate(object_id, data)
            if wrong is not None:
                rejected[object_id] = wrong
            elif self._shelf.make_room(object_id, len(data)):
                self._shelf.put(StoredObject(self._shelf.next_ticket, object_id, data))
        self._shelf.tell()
        return rejected

    async def add_objects(self, objects: Mapping[bytes, bytes]) -> Mapping[bytes, str]:
        """Add objects; see `ObjectPool`. The loop has a turn after each, for `validate` may take its time."""
        rejected: dict[bytes, str] = {}
        for object_id, data in objects.items():
            rejected |= self._add({object_id: data})
            await asyncio.sleep(0)
        return rejected

    def object_id(self, data: bytes) -> bytes:
        return self._identify(data)

    def has_object(self, object_id: bytes) -> bool:
        return self._shelf.knows(object_id)

    def objects_after(self, ticket: int, limit: int) -> Sequence[PoolEntry]:
        return self._shelf.after(ticket, limit)

    def watch(self, callback: Callable[[], object]) -> Callable[[], None]:
        return self._shelf.watch(callback)

    async def read_objects(self, entries: Sequence[PoolEntry]) -> list[bytes]:
        return [entry.read() for entry in entries]
