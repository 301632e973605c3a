"""Stream keys: files with their hashes, and looking a key up in a time that does not grow with the file.

A stored key is ``sha256:SALT:DIGEST``, both in hex. A fast hash is enough since a key has 16 characters or more and is
best made by `make_key`; a slow one would let strangers keep the server's cores busy with wrong keys. The keys of a file
share their salt, or a few, so that one that is tried is hashed once for each salt and looked up, however many there
are. Each line of a file may say behind the hash what the key is for: ``publish``, ``play`` or ``edge``, and a
pattern of ``app/stream``.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from flowctl.core.text.watchfile import WatchedFile
from flowctl.errors import ConfigError
from flowctl.live.access.request import RequestKind, Use

LEAST_KEY_CHARS: Final = 16
"""Shortest key, characters: a shorter one can be guessed by trial where somebody has the file."""
_SALT_BYTES: Final = 16
_KEY_BYTES: Final = 18
"""144 bits, 24 characters."""
_MOST_KEYS: Final = 1000
_MOST_BYTES: Final = 1 << 20
_MOST_SALTS: Final = 32
"""Most salts of one file: a key that is tried is hashed with each, a microsecond; files put together have a few."""
_MOST_KEY_CHARS: Final = 1024
_STORED: Final = re.compile(r"sha256:([0-9a-f]{8,64}):([0-9a-f]{64})")
USES: Final[tuple[Use, ...]] = ("publish", "play", "edge")
_HINT: Final = "one sha256:SALT:DIGEST [publish|play|edge] [app/stream] per line, as flowctl key make FILE adds them"


def make_key() -> str:
    """Return a new key, which cannot be guessed and which any address can hold."""
    return secrets.token_urlsafe(_KEY_BYTES)


def hash_key(key: str, salt: bytes | None = None) -> str:
    if not LEAST_KEY_CHARS <= len(key) <= _MOST_KEY_CHARS:
        raise ConfigError(
            f"the key has {len(key)} characters, it must have {LEAST_KEY_CHARS} to {_MOST_KEY_CHARS}",
            hint="flowctl key make makes one that nobody can guess",
        )
    if not key.isprintable() or re.search(r"[\s&?#/=]", key.rstrip("=")):
        raise ConfigError("the key has a blank or one of &?#/=, it could not stand in an address")
    salt = salt or secrets.token_bytes(_SALT_BYTES)
    return f"sha256:{salt.hex()}:{_digest(salt, key).hex()}"


def salt_of(text: str) -> bytes | None:
    """Return the salt that the next key of a file gets: that of its first. None: it has no key."""
    found = next((match for line in text.splitlines() if (match := _STORED.match(line.strip()))), None)
    return None if found is None or len(found[1]) % 2 else bytes.fromhex(found[1])


def without_key(text: str, key: str) -> str:
    """Return the lines of a file but for those of a key."""

    def is_of_it(line: str) -> bool:
        match = _STORED.match(line.strip())
        return match is not None and len(match[1]) % 2 == 0 and _digest(bytes.fromhex(match[1]), key).hex() == match[2]

    return "".join(line for line in text.splitlines(keepends=True) if not is_of_it(line))


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as its file has it: hashed, with what it allows."""

    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    # ``"publish"``, ``"play"``, or ``"edge"``, which is to play as well. None: to publish and to play.
    kind: Use | None = None
    streams: str = "*"

    def is_for(self, kind: RequestKind | Use, stream: str) -> bool:
        kinds = {None: ("publish", "play"), "edge": ("edge", "play")}.get(self.kind, (self.kind,))
        return kind in kinds and fnmatchcase(stream, self.streams)


@dataclass(slots=True)
class KeyFile:
    """The keys of a file, which follow it while the server runs; two of the same path are the same."""

    path: str
    keys: tuple[StoredKey, ...] = field(default=(), compare=False)
    file: WatchedFile | None = field(default=None, repr=False, compare=False)  # None: these keys are of no file
    _found: dict[bytes, dict[bytes, list[StoredKey]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._put_in_force(self.keys)

    def read(self, text: str, _: str) -> None:
        """Put in force what the file says."""
        self._put_in_force(_keys_of(text, self.path))

    def _put_in_force(self, keys: tuple[StoredKey, ...]) -> None:
        """Replace all keys at once: any thread may look one up meanwhile."""
        found: dict[bytes, dict[bytes, list[StoredKey]]] = {}
        for stored in keys:
            found.setdefault(stored.salt, {}).setdefault(stored.digest, []).append(stored)
        self.keys, self._found = keys, found

    def __str__(self) -> str:
        return self.path

    def allows(self, tried: Iterable[str], kind: RequestKind | Use, stream: str) -> bool:
        """Return whether one of the keys that were tried is one of these, for that.

        How long it takes tells at most how a hash begins that has a salt, which nobody outside can know.
        """
        return any(stored.is_for(kind, stream) for stored in self._stored(tried))

    def uses(self, tried: Iterable[str]) -> set[Use | None]:
        """Return what the keys that were tried are for, of whatever streams; empty: none of them is one of these."""
        return {stored.kind for stored in self._stored(tried)}

    def _stored(self, tried: Iterable[str]) -> Iterator[StoredKey]:
        for key in set(tried):
            if 0 < len(key) <= _MOST_KEY_CHARS:
                for salt, keys in self._found.items():
                    yield from keys.get(_digest(salt, key), ())


def read_keys(path: Path) -> KeyFile:
    """Return the keys of a file; none where it is not there yet, or has only comments."""
    found = KeyFile(str(path))
    found.file = WatchedFile(path, found.read, _MOST_BYTES, whole_lines=True)
    found.file.read()
    return found


def _keys_of(text: str, path: str) -> tuple[StoredKey, ...]:
    keys = tuple(
        _stored(line.split(), path, number)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    )
    if len(keys) > _MOST_KEYS:
        raise ConfigError(f"{path} holds {len(keys)} keys, it may hold {_MOST_KEYS}", hint=_HINT)
    salts = len({stored.salt for stored in keys})
    if salts > _MOST_SALTS:
        raise ConfigError(
            f"the keys of {path} have {salts} salts, they may have {_MOST_SALTS}: each is a hash for each try",
            hint="flowctl key make FILE and flowctl key hash FILE give keys the salt that the file has",
        )
    return keys


def _stored(words: list[str], path: str, number: int) -> StoredKey:
    match, more = _STORED.fullmatch(words[0]), words[1:]
    kind: Use | None = next((use for use in USES if more[:1] == [use]), None)
    if kind is not None:
        del more[0]
    if match is None or len(more) > 1 or len(match[1]) % 2:
        raise ConfigError(f"{path}, line {number} is no stored key", hint=_HINT)
    return StoredKey(bytes.fromhex(match[1]), bytes.fromhex(match[2]), kind, more[0] if more else "*")
