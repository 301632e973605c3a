"""What a category asks of its callers, and what a caller is (pure)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from flowctl.core.text.fieldtypes import check_type
from flowctl.errors import ConfigError


class AuthLevel(enum.IntEnum):
    """How far a connection is trusted; each level includes those below it."""

    DENIED = -1  #: not at all: it is not let in
    NONE = 0
    BASIC = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Access:
    """What a category asks of its callers.

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
    """What is known of the other end of a connection, from its connection and not from what it says in messages.

    Args:
        pubkey: x25519 key that it has proven to hold, 32 octets; empty: none.
        address: IP address, or empty where there is none (ipc, inproc).
    """

    pubkey: bytes = b""
    auth: AuthLevel = AuthLevel.NONE
    address: str = ""


NOBODY: Final = PeerIdentity()
"""A connection of which nothing is known."""
