"""How far behind a peer is, as one number: what waits for it, here and in the kernel, over the rate at which it takes.

The kernel's share is what it was given and the peer has not acknowledged (SIOCOUTQ; man 7 tcp). What lies unread in
the peer's own receive buffer is acknowledged and cannot be seen from here.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
from typing import Final

_SIOCOUTQ: Final = 0x5411
"""Linux's number of the request, the same as TIOCOUTQ."""
_LEAST_SAMPLE_S: Final = 0.2
"""Samples closer together say more about the flush interval than about the link."""
_SMOOTHING: Final = 0.3
"""Weight of the newest rate: a change shows after three or four samples."""


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Return the bytes that the kernel holds of `sock`'s output: unsent, and sent but not acknowledged.

    0 where the socket is closed or the system cannot tell.
    """
    value = array.array("i", [0])
    with contextlib.suppress(OSError, ValueError):  # a closed socket has the descriptor -1
        fcntl.ioctl(sock.fileno(), _SIOCOUTQ, value)
    return value[0]


class DelayMeter:
    """Delay of one peer, from samples of what was written and what is left; pure but for the caller's figures."""

    __slots__ = ("_acknowledged", "_at", "_rate", "_since")

    def __init__(self) -> None:
        self._at: float | None = None  # time of the last sample that counted
        self._acknowledged = 0
        self._rate = 0.0  # bytes per second that the peer takes while there is something to take
        self._since: float | None = None  # since when it has taken nothing although there was something

    def sample(self, now: float, queued_bytes: int, written_bytes: int, kernel_bytes: int) -> float:
        """Take one sample and return the delay in ms.

        Args:
            now: time in seconds.
            queued_bytes: what waits in our own queue.
            written_bytes: what the kernel has taken since the connection began.
            kernel_bytes: what of it the peer has not acknowledged.

        Returns:
            0 for a peer for which nothing waits. For one that takes nothing, the delay that it had when it stopped
            and the time since.
        """
        waiting = queued_bytes + kernel_bytes
        acknowledged = written_bytes - kernel_bytes
        last = self._at
        if last is None or now - last >= _LEAST_SAMPLE_S:
            taken = acknowledged - self._acknowledged
            if last is not None and taken > 0:
                rate = taken / (now - last)
                self._rate = rate if not self._rate else self._rate + _SMOOTHING * (rate - self._rate)
            if taken > 0 or not waiting:
                self._since = None
            elif self._since is None:
                self._since = last if last is not None else now
            self._at, self._acknowledged = now, acknowledged
        if not waiting:
            return 0.0
        stopped_s = 0.0 if self._since is None else now - self._since
        return (waiting / self._rate + stopped_s if self._rate else stopped_s) * 1000
