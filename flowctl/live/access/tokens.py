"""Signed tokens in addresses: ``app/stream?expires=1798758000&token=...``, made by a holder of the secret, for a while.

What is signed (HMAC-SHA256, RFC 2104) are lines: the version of this, what is allowed (``publish`` or ``play``), the
name of the stream, when it expires (seconds since 1970), and the address or network that it is bound to, an empty line
where there is none. The token is the digest in base64 for addresses (RFC 4648 section 5), without its padding.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from flowctl.core.text.private import check_private
from flowctl.core.text.watchfile import WatchedFile
from flowctl.errors import ConfigError
from flowctl.live.access.request import NOT_GENUINE, RequestKind

_VERSION: Final = "flowctl-token-1"
LEAST_SECRET_BYTES: Final = 16
_MOST_SECRETS: Final = 16
_MOST_BYTES: Final = 64 * 1024
_MOST_EXPIRES_CHARS: Final = 12
_HINT: Final = "flowctl key secret FILE makes one"


def sign(secret: bytes, kind: RequestKind, stream: str, expires: int, address: str = "") -> str:
    text = "\n".join((_VERSION, kind, stream, str(expires), address))
    digest = hmac.digest(secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def signed_query(secret: bytes, kind: RequestKind, stream: str, expires: int, address: str = "") -> str:
    bound = f"&address={address}" if address else ""
    return f"expires={expires}{bound}&token={sign(secret, kind, stream, expires, address)}"


@dataclass(slots=True)
class SecretFile:
    """The secrets of a file, which follow it; two of the same path are the same.

    What any of them has signed is good, so that one can be replaced by another in peace.
    """

    path: str
    secrets: tuple[bytes, ...] = field(default=(), repr=False, compare=False)
    file: WatchedFile | None = field(default=None, repr=False, compare=False)  # None: these secrets are of no file

    def __str__(self) -> str:
        return self.path

    def read(self, text: str, _: str) -> None:
        """Put in force what the file says."""
        self.secrets = _secrets_of(text, Path(self.path))

    def fault(
        self, query: Mapping[str, str], kind: RequestKind, stream: str, address: str, now_s: float, leeway_s: float
    ) -> str | None:
        """Return what is wrong with the token in a query, without a secret. None: it allows `kind` on the stream."""
        token, expires, bound = query.get("token", ""), query.get("expires", ""), query.get("address", "")
        if not (token and expires.isascii() and expires.isdecimal() and len(expires) <= _MOST_EXPIRES_CHARS):
            return "A signed token is needed."
        good = False
        for secret in self.secrets:
            expected = sign(secret, kind, stream, int(expires), bound)
            good |= hmac.compare_digest(expected.encode(), token.encode("utf-8", "surrogatepass"))
        if not good or str(int(expires)) != expires:
            return NOT_GENUINE
        if now_s > int(expires) + leeway_s:
            return "The token has expired."
        if bound and not _within(address, bound):
            return "The token is one for another address."
        return None


def _within(address: str, bound: str) -> bool:
    try:
        peer, network = ipaddress.ip_address(address.partition("%")[0]), ipaddress.ip_network(bound, strict=False)
    except ValueError:
        return False
    if isinstance(peer, ipaddress.IPv6Address) and peer.ipv4_mapped is not None and network.version == 4:
        return peer.ipv4_mapped in network
    return peer in network


def read_secrets(path: Path) -> SecretFile:
    """Return the secrets of a file, one per line; ``#`` begins a comment line."""
    found = SecretFile(str(path))
    found.file = watch_private(path, found.read, "secrets")
    return found


def _secrets_of(text: str, path: Path) -> tuple[bytes, ...]:
    check_private(path)
    lines = text.splitlines()
    secrets = [
        line.strip().encode("utf-8", "surrogateescape")
        for line in lines
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not 1 <= len(secrets) <= _MOST_SECRETS:
        raise ConfigError(f"{path} holds {len(secrets)} secrets, it must be 1 to {_MOST_SECRETS}", hint=_HINT)
    for secret in secrets:
        if len(secret) < LEAST_SECRET_BYTES:
            raise ConfigError(
                f"{path}: a secret has {len(secret)} bytes, the least is {LEAST_SECRET_BYTES}", hint=_HINT
            )
    return tuple(secrets)


def watch_private(path: Path, take: Callable[[str, str], None], what: str) -> WatchedFile:
    """Return a file that is there, and that `take` is given whenever it has changed; that is to check who may use it.

    Octets that are no UTF-8 come as ``surrogateescape`` has them.
    """
    file = WatchedFile(path, take, _MOST_BYTES, whole_lines=True, errors="surrogateescape")
    if not file.read():
        raise ConfigError(f"cannot read the file of {what} {path}: there is no such file", hint=_HINT)
    return file
