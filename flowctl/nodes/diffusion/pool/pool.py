"""What a pool of objects is to diffusion: one interface for both sides.

The inbound side asks which objects are here and adds those that have come; the outbound side goes through them by
ticket. Tickets are numbers that rise with each object added; they mean nothing to other nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from flowctl.errors import ConfigError
from flowctl.nodes.diffusion.objects import short_id

ZERO_TICKET = 0
"""Ticket below that of the first object."""


class PoolEntry(Protocol):
    """One object of a pool. While its entry is held it can be read, also after the pool has evicted it."""

    @property
    def ticket(self) -> int:
        """Its number, greater than those of all that came before it."""

    @property
    def object_id(self) -> bytes:
        """Its id."""

    @property
    def size_bytes(self) -> int:
        """Its size."""

    @property
    def topic(self) -> str:
        """What clients subscribe to, such as the stream that it is of; empty where a pool has no topics."""

    def read(self) -> bytes:
        """Return the object; may wait for a disk.

        Raises:
            StoreError: it cannot be read (any more).
        """


class ObjectPool(Protocol):
    """Objects by id. All methods belong to one thread, that of the loop."""

    def object_id(self, data: bytes) -> bytes:
        """Return the id of an object that has come."""

    def has_object(self, object_id: bytes) -> bool:
        """Return whether the object need not be fetched: it is here, or it was and has been evicted. Called often."""

    async def add_objects(self, objects: Mapping[bytes, bytes]) -> Mapping[bytes, str]:
        """Add objects, by id; those that are here already are passed by. Two calls never overlap."""

    def objects_after(self, ticket: int, limit: int) -> Sequence[PoolEntry]:
        """Return the first `limit` objects whose ticket is greater, in order; empty: there is none."""

    async def read_objects(self, entries: Sequence[PoolEntry]) -> list[bytes]:
        """Return the objects of entries, in their order."""

    def watch(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` soon after objects were added, until what is returned is called."""


def check_own(objects: Mapping[bytes, bytes], identify: Callable[[bytes], bytes]) -> None:
    """Check objects of this node's own before a pool takes them: peers disconnect a node that announced others."""
    for object_id, data in objects.items():
        if not isinstance(data, bytes):
            raise ConfigError(f"an object is a {type(data).__name__}, it must be bytes")
        if identify(data) != object_id:
            raise ConfigError(f"an object has not the id {short_id(object_id)}", hint="object_id(data) says which")


def sha256_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
