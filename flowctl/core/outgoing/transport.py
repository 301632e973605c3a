"""What a Sender writes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Transport(Protocol):
    """Where a Sender writes: a non-blocking socket, or something that acts like one."""

    def send(self, data: bytes, /) -> int:
        """Write as much of `data` as goes at once; otherwise as `sendmsg`."""

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Write as much of `buffers` as goes at once and return the number of bytes.

        Raises:
            BlockingIOError: nothing can be written now; `ssl.SSLWantWriteError` and `ssl.SSLWantReadError` are as good.
            OSError: the connection is gone.
        """
