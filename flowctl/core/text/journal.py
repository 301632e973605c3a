"""The journal of systemd: an entry with fields for each line of the log, in the journal's own protocol.

A service whose standard error is the journal is told so by a variable of its environment (systemd.exec(5)). Then
``journalctl -u flowctl -p warning`` finds lines by their level, and ``journalctl FLOWCTL_STREAM=live/main`` by what
they are about. Source: https://systemd.io/JOURNAL_NATIVE_PROTOCOL/.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

SOCKET: Final = "/run/systemd/journal/socket"
_PRIORITIES: Final = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
"""Levels as syslog numbers them."""
_UNFIT: Final = re.compile(r"[^A-Z0-9_]")
_MOST_NAME_CHARS: Final = 64
"""Characters of a field's name; the journal drops what has more."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def leads_to_journal(descriptor: int) -> bool:
    """Return whether a descriptor is the stream to the journal that systemd gave to this service."""
    with contextlib.suppress(OSError):
        status = os.fstat(descriptor)
        return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
    return False


def journal_entry(message: str, level: str, fields: Mapping[str, Any]) -> bytes:
    """Return an entry as the journal reads it; fields are FLOWCTL_ and their name, in capitals."""
    entry = {"MESSAGE": message, "PRIORITY": str(_PRIORITIES.get(level, 6)), "SYSLOG_IDENTIFIER": "flowctl"}
    for name, value in fields.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        entry[f"FLOWCTL_{_UNFIT.sub('_', name.upper())}"[:_MOST_NAME_CHARS]] = text
    return b"".join(_field(name.encode(), text.encode("utf-8", "backslashreplace")) for name, text in entry.items())


def _field(name: bytes, value: bytes) -> bytes:
    if b"\n" not in value:
        return b"%b=%b\n" % (name, value)
    return b"%b\n%b%b\n" % (name, len(value).to_bytes(8, "little"), value)


class JournalTarget:
    """The target of a `LineWriter` whose lines are entries of the journal."""

    def __init__(self, path: str) -> None:
        self._path: Final = path
        self._sock: Final = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def write(self, lines: Sequence[bytes]) -> OSError | None:
        try:
            for line in filter(None, lines):
                self._send(line)
        except OSError as error:
            return error
        return None

    def look(self) -> None:
        """Do nothing: each entry looks the socket up."""

    def close(self) -> None:
        self._sock.close()

    def _send(self, entry: bytes) -> None:
        try:
            self._sock.sendto(entry, self._path)
        except OSError as error:
            if error.errno not in {errno.EMSGSIZE, errno.ENOBUFS}:
                raise
        else:
            return
        # What is too large for a datagram is handed over in memory that nobody can change any more.
        descriptor = os.memfd_create("flowctl-journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(entry)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            handed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))
            self._sock.sendmsg([], [handed], 0, self._path)
