"""Key pairs of CURVE: made, checked, and kept in files that only their owner can read.

A file has the form of ZeroMQ's own certificates (`zmq.auth`, czmq), so that each reads those of the other::

    curve
        public-key = "<40 letters of Z85>"
        secret-key = "<40 letters of Z85>"
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import nacl.bindings as sodium

from flowctl.core.text.printable import short
from flowctl.core.text.private import check_private
from flowctl.core.text.userfiles import text_of
from flowctl.errors import ConfigError
from flowctl.wire.zmtp.keytext import KEY_BYTES, KeyEncoding, decode_key, encode_key

_MOST_FILE_BYTES: Final = 4096
"""Largest file with keys: it may hold comments, and metadata of other programs."""
_OWNER_ONLY: Final = 0o600
_FILE: Final = """\
#   ZeroMQ CURVE **Secret** Certificate
#   DO NOT PROVIDE THIS FILE TO OTHER USERS nor change its permissions.

metadata
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and the secret key that it belongs to, 32 octets each; never shows the secret one.

    Raises:
        ConfigError: a key has another length, or they do not belong together.
    """

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for name, key in (("public", self.public), ("secret", self.secret)):
            if not isinstance(key, bytes):
                raise ConfigError(f"the {name} key is of type {type(key).__name__}, it must be {KEY_BYTES} bytes")
            if len(key) != KEY_BYTES:
                raise ConfigError(f"the {name} key has {len(key)} bytes, it must have {KEY_BYTES}")
        if public_of(self.secret) != self.public:
            raise ConfigError("the public key does not belong to the secret key")

    def __repr__(self) -> str:
        return f"KeyPair({self.public.hex()})"

    @classmethod
    def generate(cls) -> Self:
        """Return a new key pair."""
        return cls(*sodium.crypto_box_keypair())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the keys in a file.

        Raises:
            ConfigError: there is no such file, or one with no keys; or others than its owner can read it.
        """
        try:
            check_private(path)
            with path.open("rb") as file:
                text = file.read(_MOST_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(
                f"cannot read the keys in {short(str(path))}: {error.strerror}",
                hint="make some with `flowctl rpc keygen FILE`, or name the file where they are",
            ) from error
        keys = _keys_in(text_of(text, "replace")) if len(text) <= _MOST_FILE_BYTES else None
        if keys is None:
            raise ConfigError(
                f"{short(str(path))} has no public and secret key of CURVE in it",
                hint="make one with `flowctl rpc keygen`",
            )
        return cls(*keys)

    def write(self, path: Path) -> None:
        """Write the keys to a new file that only its owner can read (mode 0600).

        Raises:
            ConfigError: it is there already, or cannot be made. A key that is overwritten is gone.
        """
        text = _FILE.format(
            public=encode_key(self.public, KeyEncoding.Z85), secret=encode_key(self.secret, KeyEncoding.Z85)
        )
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _OWNER_ONLY)
        except OSError as error:
            raise _not_written(path, error) from error
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                os.fchmod(file.fileno(), _OWNER_ONLY)  # whatever the umask
                file.write(text)
        except OSError as error:
            path.unlink(missing_ok=True)  # half a key would stand in the way of a whole one
            raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> ConfigError:
    if error.errno == errno.EEXIST:
        hint = "a key that is overwritten is gone: name a new file, or move that one away"
    elif error.errno in {errno.ENOSPC, errno.EDQUOT}:
        hint = "make room on its disk, or name another place"
    else:
        hint = "name a file in a folder that is there, and that you may write to"
    return ConfigError(f"cannot write keys to {short(str(path))}: {error.strerror}", hint=hint)


def node_keys(keys: KeyPair | None, public: bytes, secret: bytes, *, known: str = "") -> KeyPair:
    """Return the keys of a node, from a pair or from its halves; new ones where none are given."""
    if keys is not None:
        if public or secret:
            raise ConfigError("keys are given twice, as a pair and by themselves")
        return keys
    if bool(public) != bool(secret):
        raise ConfigError("only one key is given, a public key and its secret key are needed, or none")
    if public:
        return KeyPair(public, secret)
    if known:
        raise ConfigError(
            f"{known} needs keys that others know it by", hint="KeyPair.read(path), or `flowctl rpc keygen`"
        )
    return KeyPair.generate()


def public_of(secret: bytes) -> bytes:
    """Return the public key of a secret one of 32 octets."""
    return bytes(sodium.crypto_scalarmult_base(secret))


def _keys_in(text: str) -> tuple[bytes, bytes] | None:
    keys: dict[str, bytes] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        key = decode_key(value.strip(" \t'\""), KeyEncoding.Z85) if equals else None
        if key is not None:
            keys.setdefault(name.strip(), key)
    try:
        return keys["public-key"], keys["secret-key"]
    except KeyError:
        return None
