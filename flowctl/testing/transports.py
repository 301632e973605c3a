"""Peers for tests: one that follows a script, one with a link of a given rate."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

would_block: Final = "would_block"
"""Step of a script: the write meets EAGAIN."""

Step = int | str | OSError


class ScriptedTransport:
    """A transport that takes what its script says, one step per write.

    A number is the most bytes that the write takes, `would_block` is EAGAIN, an `OSError` is raised. After the end of
    the script everything is taken.

    Attributes:
        received: all bytes taken so far.
        writes: number of calls, those that failed included.
    """

    def __init__(self, script: Iterable[Step] = ()) -> None:
        self.script: deque[Step] = deque(script)
        self.received = bytearray()
        self.writes = 0

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        return self._take(b"".join(buffers))

    def send(self, data: bytes, /) -> int:
        return self._take(data)

    def _take(self, data: bytes) -> int:
        self.writes += 1
        step = self.script.popleft() if self.script else len(data)
        if isinstance(step, OSError):
            raise step
        if isinstance(step, str):
            raise BlockingIOError(errno.EAGAIN, "scripted")
        count = min(step, len(data))
        if count == 0:
            raise BlockingIOError(errno.EAGAIN, "scripted: 0 bytes")
        self.received += data[:count]
        return count


class ThrottledPeer:
    """A peer behind a kernel buffer and a link: takes bytes while the buffer has room, reads at a rate.

    Call `run` after the clock has moved; it reads what the link carried meanwhile and returns whether the socket
    would have become writable.

    Args:
        clock: the time.
        rate_bytes_per_s: speed of the link; 0 never reads.
        buffer_bytes: what the kernel buffers.
    """

    def __init__(self, clock: Callable[[], float], rate_bytes_per_s: float, buffer_bytes: int = 64 * 1024) -> None:
        self.clock = clock
        self.rate_bytes_per_s = rate_bytes_per_s
        self.buffer_bytes = buffer_bytes
        self.received = bytearray()
        self._buffered = bytearray()
        self._credit = 0.0
        self._last = clock()

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        return self.send(b"".join(buffers))

    def send(self, data: bytes, /) -> int:
        self.run()
        room = self.buffer_bytes - len(self._buffered)
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "the peer's buffer is full")
        self._buffered += data[:room]
        return min(room, len(data))

    @property
    def buffered_bytes(self) -> int:
        """What was taken and not read yet."""
        return len(self._buffered)

    def run(self) -> bool:
        """Let the link carry what it can in the time since the last call; return whether there is room."""
        now = self.clock()
        self._credit += (now - self._last) * self.rate_bytes_per_s
        self._last = now
        count = min(int(self._credit), len(self._buffered))
        self._credit = self._credit - count if self._buffered[count:] else 0.0
        self.received += self._buffered[:count]
        del self._buffered[:count]
        return len(self._buffered) < self.buffer_bytes
