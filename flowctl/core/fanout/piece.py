"""A piece of a stream log that is written to many viewers: its bytes, and for large ones a file with the same bytes.

`sendfile` from an anonymous memory file lets the kernel reference the file's pages in each viewer's send queue, where
`send` copies the bytes into each: less work from `FILE_BYTES` on (measured, see docs/benchmarks.md), and a piece that
a thousand viewers have not acknowledged yet is in memory once and not a thousand times.

What was handed to `sendfile` is referenced until the peer has acknowledged it, so such pages must never be written
again. Therefore each piece has a file of its own, which is filled once, never changed, and closed after its last
viewer: the kernel keeps the pages that are still on their way, and frees them with the last acknowledgement. A file
for the whole log would have to be cut and bounded, and reading it would save nothing: making this one costs a fifth of
one per cent of a round of a thousand viewers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any, Final

from flowctl.core.outgoing.streamlog import Entry

FILE_BYTES: Final = 24 * 1024
"""Least size for which `sendfile` is used. Below, filling the pipe inside of it costs more than copying."""

FILE_VIEWERS: Final = 64
"""Least number of viewers for which a file is made. Making one costs as much as two to four sends of its bytes, and a
sixth of a send is what it saves: for 20 viewers that is nothing."""

_NO_FILE: Final = -1
_HAS_FILES: Final = hasattr(os, "memfd_create") and hasattr(os, "sendfile")


class Piece:
    """The wire bytes from one entry of a log up to, not including, another one."""

    __slots__ = ("_descriptor", "data", "end", "start")

    def __init__(self, start: Entry, end: Entry) -> None:
        self._descriptor: int | None = None  # of the file; None: not asked for yet, -1: there is none
        self.start = start
        self.end = end
        self.data: Final = gather(start, end)  # may raise; `__del__` comes after that too, and needs the descriptor

    def descriptor(self) -> int:
        """Return the descriptor of a file with these bytes, made when first asked for; -1 if that does not work."""
        if self._descriptor is None:
            self._descriptor = _memory_file(self.data) if _HAS_FILES else _NO_FILE
        return self._descriptor

    def close(self) -> None:
        """Close the file; what the kernel still has to send of it stays until it is sent. Idempotent."""
        descriptor, self._descriptor = self._descriptor, _NO_FILE
        if descriptor is not None and descriptor != _NO_FILE:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _memory_file(data: bytes) -> int:
    """Return the descriptor of a new anonymous file with `data`; -1 where there are no descriptors or memory left."""
    try:
        descriptor = os.memfd_create("flowctl-piece")
    except OSError:
        return _NO_FILE
    try:
        if os.write(descriptor, data) == len(data):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return _NO_FILE


def socket_behind(send: Callable[[bytes], int]) -> socket.socket | None:
    """Return the socket whose plain `send` this is. None: the bytes must pass through something else first.

    That is the capability `sendfile` needs. A socket with TLS has a descriptor too, but its `send` is a function of
    its own that encrypts; the transports of tests have none.
    """
    if isinstance(send, BuiltinMethodType):
        owner: Any = send.__self__
        if isinstance(owner, socket.socket):
            return owner
    return None


def gather(start: Entry, end: Entry) -> bytes:
    """Return the wire bytes of the entries from `start` up to, not including, `end`."""
    parts: list[bytes] = []
    entry = start
    while entry is not end and entry.next is not None:
        parts.append(entry.wire)
        entry = entry.next
    return parts[0] if len(parts) == 1 else b"".join(parts)
