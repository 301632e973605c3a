"""What a category asks of its callers, what a caller is, and whether a command may run."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from flowctl.core.loop.locks import OwnedLock
from flowctl.core.text.fieldtypes import check_type
from flowctl.errors import ConfigError
from flowctl.nodes.rpc.wire.frames import FORBIDDEN, FORBIDDEN_SN, NO_REPLY_TAG, NOT_A_SERVICE_NODE
from flowctl.wire.zmtp.keytext import KEY_BYTES

_KEY_ROUTE: Final = b"L"
"""First octet of a routing id that is a public key: ids that begin with a zero, as a key may, listeners give."""


class AuthLevel(enum.IntEnum):
    """How far a connection is trusted; each level includes those below it."""

    DENIED = -1  #: not at all: it is not let in
    NONE = 0
    BASIC = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Access:
    """What a category requires of its callers.

    Args:
        auth: least level of the connection.
        remote_sn: whether the caller must be an active service node.
        local_sn: whether this node must be one.

    Raises:
        ConfigError: `auth` is no level that a connection can have.
    """

    auth: AuthLevel = AuthLevel.NONE
    remote_sn: bool = False
    local_sn: bool = False

    def __post_init__(self) -> None:
        check_type("auth", self.auth, AuthLevel)
        if self.auth is AuthLevel.DENIED:
            raise ConfigError("auth is AuthLevel.DENIED, it must be NONE, BASIC or ADMIN")


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What is known of a peer from its connection, and not from what it says in messages."""

    pubkey: bytes = b""  #: x25519 key that it has proven to hold, 32 octets; empty: none
    auth: AuthLevel = AuthLevel.NONE
    address: str = ""  #: IP address; empty where there is none (ipc, inproc)


def refusal_code(
    access: Access, auth: AuthLevel, *, remote_sn: bool, local_sn: bool, is_request: bool, tag: bytes | None
) -> bytes | None:
    """Return the code with which a known command is refused; None: it may run.

    The order is that of OxenMQ: access level, the state of this node, the state of the caller, and then the tag.
    """
    if auth < access.auth:
        return FORBIDDEN
    if access.local_sn and not local_sn:
        return NOT_A_SERVICE_NODE
    if access.remote_sn and not remote_sn:
        return FORBIDDEN_SN
    if is_request and tag is None:
        return NO_REPLY_TAG
    return None


def key_route(pubkey: bytes) -> bytes:
    """Return the routing id with which a node dials that has this public key."""
    return _KEY_ROUTE + pubkey


def is_claimed(route: bytes, pubkey: bytes) -> bool:
    """Return whether a routing id claims a key other than the one that its connection has proven."""
    return bool(pubkey) and len(route) == KEY_BYTES + 1 and route[:1] == _KEY_ROUTE and route[1:] != pubkey


def checked_keys(pubkeys: Iterable[bytes], what: str) -> frozenset[bytes]:
    keys = frozenset(pubkeys)
    for key in keys:
        check_type(f"{what}: a public key", key, bytes)
        if len(key) != KEY_BYTES:
            raise ConfigError(f"{what}: a public key has {KEY_BYTES} bytes, one given has {len(key)}")
    return keys


class ServiceNodes:
    """The public keys of active service nodes, asked with each message: one that leaves loses its rights at once.

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
