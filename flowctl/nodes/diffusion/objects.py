"""Words of object diffusion (pure): what an object's id is, and what names a peer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, TypeAlias

ObjectId: TypeAlias = bytes
"""Names one object in all pools. Octets, so that ids have one order everywhere: lower ones are fetched first."""
PeerId: TypeAlias = Hashable
"""Names one connection: not an address, which may connect twice."""
HasObject: TypeAlias = Callable[[ObjectId], bool]
"""Tells whether an object is in our pool; called often, so it must be as cheap as a look into a set."""

MAX_U16: Final = 65_535
"""Largest count that a message of the protocol can carry."""


def short_id(object_id: ObjectId) -> str:
    """Return an id as text for an error or a log: at most 16 digits, whatever the peer sent."""
    text = object_id[:8].hex()
    return f"{text}..." if len(object_id) > 8 else text or "(empty)"
