"""Whose a published name is, so that an encoder that lost its connection gets its name back, and nobody else (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from flowctl.wire.rtmp.url import is_secret


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a published name is, as far as a server can tell.

    Args:
        address: from which it is published; of IPv6 the /64, whose hosts change theirs as they like.
        key: digest of the secrets in the stream's query; empty without any.
    """

    address: str
    user: str | None = None
    key: bytes = b""

    @classmethod
    def of(cls, address: str, user: str | None, query: Mapping[str, str]) -> Self:
        secrets = sorted((name, value) for name, value in query.items() if value and is_secret(name))
        return cls(address, user, hashlib.sha256(repr(secrets).encode()).digest() if secrets else b"")

    def same(self, other: Owner) -> bool:
        """Return whether `other` is this one: the same user where they log in, else the same key or the same address.

        Who gave a key is known by it alone: an address is shared with everybody behind the same router.
        """
        if self.user is not None or other.user is not None:
            return self.user == other.user
        return self.key == other.key if self.key else self.address == other.address
