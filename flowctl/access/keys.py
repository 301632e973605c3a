"""Stream keys: files with their hashes, and looking a key up in constant time.

A stored key is ``sha256:SALT:DIGEST``, both in hex. A fast hash is enough since a key has 16 characters or more and is
best made by `make_key`; a slow one would let strangers keep the server's cores busy with wrong keys. Each line of a
file may say behind the hash what the key is for: ``publish`` or ``play``, and a pattern of ``app/stream``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from flowctl.access.request import Kind
from flowctl.errors import ConfigError

LEAST_KEY_CHARS: Final = 16
"""Shorter keys can be found by trying, where somebody has the file."""
_SALT_BYTES: Final = 16
_KEY_BYTES: Final = 18
"""144 bits, 24 characters."""
_MOST_KEYS: Final = 1000
"""All of them are looked at for each that is tried: a millisecond."""
_MOST_KEY_CHARS: Final = 1024
_STORED: Final = re.compile(r"sha256:([0-9a-f]{8,64}):([0-9a-f]{64})")
_HINT: Final = "one sha256:SALT:DIGEST [publish|play] [app/stream] per line, as flowctl key make FILE adds them"


def make_key() -> str:
    """Return a new key, which nobody can guess and any address can hold."""
    return secrets.token_urlsafe(_KEY_BYTES)


def hash_key(key: str) -> str:
    """Return what is stored of a key.

    Raises:
        ConfigError: it is too short, or has a character that ends it in an address. The message does not show it.
    """
    if not LEAST_KEY_CHARS <= len(key) <= _MOST_KEY_CHARS:
        raise ConfigError(
            f"the key has {len(key)} characters, it must have {LEAST_KEY_CHARS} to {_MOST_KEY_CHARS}",
            hint="flowctl key make makes one that nobody can guess",
        )
    if not key.isprintable() or re.search(r"[\s&?#/=]", key.rstrip("=")):
        raise ConfigError("the key has a blank or one of &?#/=, it could not stand in an address")
    salt = secrets.token_bytes(_SALT_BYTES)
    return f"sha256:{salt.hex()}:{_digest(salt, key).hex()}"


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class StoredKey:
    """What is stored of a key, and what it is for.

    Args:
        salt: of its hash.
        digest: SHA-256 of salt and key.
        kind: ``"publish"`` or ``"play"``. None: both.
        streams: pattern of ``app/stream``.
    """

    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    kind: Kind | None = None
    streams: str = "*"


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The keys of a file.

    Args:
        path: of the file.
        keys: in its order.
    """

    path: str
    keys: tuple[StoredKey, ...]

    def __str__(self) -> str:
        return self.path

    def allows(self, tried: Iterable[str], kind: Kind, stream: str) -> bool:
        """Return whether one of the keys that were tried is one of these, for that; takes as long in any case."""
        found = False
        for key in tried:
            if not 0 < len(key) <= _MOST_KEY_CHARS:
                continue
            for stored in self.keys:
                same = hmac.compare_digest(_digest(stored.salt, key), stored.digest)
                found |= same and stored.kind in (None, kind) and fnmatchcase(stream, stored.streams)
        return found


def read_keys(path: Path) -> KeyFile:
    """Return the keys of a file: a stored one per line, ``#`` begins a comment line.

    Raises:
        ConfigError: the file cannot be read, has no keys or too many, or a line is none; the message shows no line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys file {path}: {error}", hint=_HINT) from error
    keys = [
        _stored(line.split(), path, number)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not 1 <= len(keys) <= _MOST_KEYS:
        raise ConfigError(f"{path} holds {len(keys)} keys, it must be 1 to {_MOST_KEYS}", hint=_HINT)
    return KeyFile(str(path), tuple(keys))


def _stored(words: list[str], path: Path, number: int) -> StoredKey:
    match, more = _STORED.fullmatch(words[0]), words[1:]
    kind: Kind | None = None
    if more and more[0] in ("publish", "play"):
        kind = "publish" if more.pop(0) == "publish" else "play"
    if match is None or len(more) > 1 or len(match[1]) % 2:
        raise ConfigError(f"{path}, line {number} is no stored key", hint=_HINT)
    return StoredKey(bytes.fromhex(match[1]), bytes.fromhex(match[2]), kind, more[0] if more else "*")
