"""Which nodes are active service nodes at present, by their public keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flowctl.core.loop.locks import OwnedLock
from flowctl.core.text.fieldtypes import check_type
from flowctl.errors import ConfigError
from flowctl.wire.zeromq.keytext import KEY_BYTES


def checked_keys(pubkeys: Iterable[bytes], what: str) -> frozenset[bytes]:
    """Return the public keys as a set."""
    found = frozenset(pubkeys)
    for key in found:
        check_type(f"{what}: a public key", key, bytes)
        if len(key) != KEY_BYTES:
            raise ConfigError(f"{what}: a public key has {KEY_BYTES} bytes, one given has {len(key)}")
    return found


class ServiceNodes:
    """The set of active service nodes. Asked with each message, so a node that leaves it loses its rights at once.

    Any thread. The set is replaced as a whole, so asking needs no lock.
    """

    __slots__ = ("_lock", "active")

    def __init__(self) -> None:
        self._lock: Final = OwnedLock()  # of changes; a leaf
        self.active: frozenset[bytes] = frozenset()

    def __contains__(self, pubkey: bytes) -> bool:
        return pubkey in self.active

    def replace(self, pubkeys: frozenset[bytes]) -> frozenset[bytes]:
        """Make these the active ones; return those that were and are no longer."""
        with self._lock:
            gone = self.active - pubkeys
            self.active = pubkeys
            return gone

    def update(self, added: frozenset[bytes], removed: frozenset[bytes]) -> frozenset[bytes]:
        """Add and remove some; a key that is in both is added. Return those that were active and are no longer."""
        with self._lock:
            return self.replace((self.active - removed) | added)
