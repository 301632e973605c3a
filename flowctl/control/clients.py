"""Who may speak to a server from elsewhere: a file of public keys, each with what it may do.

One client a line, ``KEY LEVEL [NAME]``; LEVEL is ``basic`` (look) or ``admin`` (change), ``#`` begins a comment::

    8f3b...64 hex digits...  admin   night shift
    0c11...                  basic   monitoring

The file is read again when it has changed and somebody connects: a key that is taken out is not let in again. Who is
connected stays so until the connection ends. While the file cannot be read nobody is let in.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final, NamedTuple

from flowctl.control.operations import Permission
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError
from flowctl.wire.zeromq.keytext import parse_key

MOST_BYTES: Final = 256 * 1024
"""Longest file: some thousand clients."""
_LEVELS: Final = {"basic": Permission.BASIC, "admin": Permission.ADMIN}
_HINT: Final = "one KEY LEVEL [NAME] a line; flowctl rpc keygen makes keys and shows the public one"


class Client(NamedTuple):
    """Who has a key, as the file says.

    Attributes:
        name: of him; empty: none is given.
    """

    permission: Permission
    name: str


class Clients:
    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._seen: tuple[int, int, int] | None = None
        self._clients: dict[bytes, Client] = {}
        self.read()

    def __len__(self) -> int:
        return len(self._clients)

    def find(self, pubkey: bytes) -> Client | None:
        """Return who has this key now. None: nobody who may come in."""
        self.read()
        return self._clients.get(pubkey)

    def read(self) -> None:
        try:
            self._read()
        except ConfigError:
            self._seen, self._clients = None, {}
            raise

    def _read(self) -> None:
        try:
            found = self.path.stat()
            look = found.st_mtime_ns, found.st_size, found.st_ino
            if look == self._seen:
                return
            if stat.S_IMODE(found.st_mode) & 0o022:
                raise ConfigError(f"others than its owner can write to {self.path}", hint=f"chmod 600 {self.path}")
            with self.path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            text = data.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the clients in {self.path}: {error}", hint=_HINT) from error
        if len(data) > MOST_BYTES:
            raise ConfigError(f"{self.path}: it has more than {MOST_BYTES} bytes", hint=_HINT)
        self._clients = parse_clients(text, str(self.path))
        self._seen = look


def parse_clients(text: str, where: str) -> dict[bytes, Client]:
    clients: dict[bytes, Client] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split(maxsplit=2)
        if not words:
            continue
        place = f"{where}, line {number}"
        key = parse_key(words[0], f"{place}: the key")
        level = words[1] if len(words) > 1 else ""
        if level not in _LEVELS:
            raise ConfigError(f"{place}: the level is {short(level)}, it must be basic or admin", hint=_HINT)
        if key in clients:
            raise ConfigError(f"{place}: this key is in the file twice", hint=_HINT)
        clients[key] = Client(_LEVELS[level], words[2].strip() if len(words) > 2 else "")
    return clients
