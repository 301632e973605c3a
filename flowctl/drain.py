"""How fast a peer takes what it is given, and how far behind it is (pure).

Two figures, from samples that the caller takes. The *drain rate* is measured only while the kernel refuses, that is
while there is always something to take: at other times the rate is that of the stream and says nothing about the peer.
The *delay* is everything that waits, here and in the kernel, over the rate.

What the kernel holds (SIOCOUTQ) ends where the peer's kernel begins: what lies unread in its receive buffer, up to
megabytes of it, is acknowledged. A protocol whose application acknowledges (RTMP) tells of that too.

The kernel's own estimate, `tcpi_delivery_rate`, is of no use here: it is the speed at which a burst into the peer's
receive buffer was acknowledged. For a reader of 60 kB/s on loopback it said 2.5 MB/s to 13 GB/s, with `tcpi_rtt` at 20
to 35 ms whatever the reader did, while acknowledged bytes over time said 71 kB/s.
"""

from __future__ import annotations

from math import exp
from typing import Final

LEAST_SAMPLE_S: Final = 0.2
"""Samples closer together say more about the flush interval than about the link."""
_SMOOTHING: Final = 0.3
"""Weight of the newest rate: a change shows after three or four samples."""

_MEMORY_S: Final = 4.0
"""Time constant of the drain rate: receivers open their window in lumps of up to a second or two of a slow link."""
_LEAST_S: Final = 1.0
"""A drain rate is known after so much time with the kernel full."""
STALL_S: Final = 3.0
"""A peer that takes nothing for so long has no rate: it is stalled."""
_PAUSE_S: Final = 5.0
"""After a gap of this length what was measured before is forgotten: it was another link, or a pause."""

_ACKNOWLEDGEMENTS: Final = 3
"""So many acknowledgements of the application show that it sends them, and how far apart."""
_UNREAD_BYTES: Final = 16 * 1024 * 1024
"""No receive buffer is larger (Linux grows them to 6 MiB): an application that far behind has stopped acknowledging."""


class DrainMeter:
    """What a peer takes while there is always something to take. The sums fade, so that old times count less.

    There surely was between two samples if the kernel refused all the time, or if some of what the kernel held at the
    first is still not acknowledged at the second.

    Attributes:
        measured_at: when the rate was last measured, in seconds.
        sampled_at: when the last sample was taken.
    """

    __slots__ = ("_acknowledged", "_bytes", "_full", "_kernel", "_progress_at", "_seconds", "measured_at", "sampled_at")

    def __init__(self) -> None:
        self._acknowledged = 0
        self._full = False  # the kernel was full at the last sample
        self._kernel = 0  # what it held then
        self._progress_at = 0.0  # the last sample at which the peer had taken something
        self._bytes = self._seconds = 0.0
        self.measured_at = 0.0
        self.sampled_at = float("-inf")

    def sample(self, now: float, acknowledged_bytes: int, kernel_bytes: int, *, full: bool) -> None:
        """Take one sample.

        Args:
            now: time in seconds.
            acknowledged_bytes: what the peer has taken since the connection began.
            kernel_bytes: what the kernel holds.
            full: the kernel refuses now, and has refused ever since the last sample if it did then.
        """
        taken = acknowledged_bytes - self._acknowledged
        if not (self._full and full) and not taken < self._kernel:
            self._progress_at = now
        elif taken > 0:
            gap_s = now - self._progress_at
            if gap_s > _PAUSE_S:
                self._bytes = self._seconds = 0.0
            else:
                fade = exp(-gap_s / _MEMORY_S)
                self._bytes = self._bytes * fade + taken
                self._seconds = self._seconds * fade + gap_s
                self.measured_at = now
            self._progress_at = now
        self.sampled_at = now
        self._acknowledged, self._kernel, self._full = acknowledged_bytes, kernel_bytes, full

    def stalled(self, now: float) -> bool:
        """Return whether the peer has taken nothing for `STALL_S` although the kernel was full."""
        return self._full and now - self._progress_at >= STALL_S

    @property
    def rate(self) -> float | None:
        """Bytes per second while there is always something to take. None: not measured for long enough."""
        return self._bytes / self._seconds if self._seconds >= _LEAST_S else None


class DelayMeter:
    """Delay of one peer, from samples of what was written and what is left; pure but for the caller's figures."""

    __slots__ = ("_acknowledged", "_at", "_kernel", "_rate", "_read", "_reads", "_since", "_step", "_stopped_s")

    def __init__(self) -> None:
        self._at: float | None = None  # time of the last sample that counted
        self._kernel = 0  # what the kernels held at the last sample
        self._stopped_s = 0.0  # how long the peer had taken nothing then
        self._acknowledged = 0
        self._rate = 0.0  # bytes per second that the peer takes while there is something to take
        self._since: float | None = None  # since when it has taken nothing although there was something
        self._read = 0  # what the peer's application says that it has read
        self._reads = 0  # how often it has said so
        self._step = 0  # largest distance between two such reports

    def peer_acknowledged(self, total_bytes: int) -> None:
        """Take note that the peer's application has read `total_bytes` since the connection began."""
        step = total_bytes - self._read
        if step > 0:
            self._step = max(self._step, step if self._reads else 0)
            self._read = total_bytes
            self._reads += 1

    @property
    def told(self) -> bool:
        """Whether the peer's application has ever said what it has read."""
        return self._reads > 0

    def unread_bytes(self, written_bytes: int) -> int:
        """Return what the peer's application has surely not read of `written_bytes`; 0 where it does not say.

        It reports in steps, so that one step may have been read and not been reported.
        """
        if self._reads < _ACKNOWLEDGEMENTS:
            return 0
        unread = written_bytes - self._read - self._step
        return unread if 0 < unread <= _UNREAD_BYTES else 0

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
        if self._reads:
            kernel_bytes = max(kernel_bytes, self.unread_bytes(written_bytes))
        waiting = queued_bytes + kernel_bytes
        acknowledged = written_bytes - kernel_bytes
        last = self._at
        if last is None or now - last >= LEAST_SAMPLE_S:
            taken = acknowledged - self._acknowledged
            if last is not None and taken > 0:
                rate = taken / (now - last)
                self._rate = rate if not self._rate else self._rate + _SMOOTHING * (rate - self._rate)
            if taken > 0 or not waiting:
                self._since = None
            elif self._since is None:
                self._since = last if last is not None else now
            self._at, self._acknowledged = now, acknowledged
        self._kernel = kernel_bytes
        self._stopped_s = 0.0 if self._since is None else now - self._since
        return self.with_queue(queued_bytes)

    def with_queue(self, queued_bytes: int) -> float:
        """Return the delay in ms that the last sample would have found with `queued_bytes` in our own queue."""
        waiting = queued_bytes + self._kernel
        if not waiting:
            return 0.0
        return (waiting / self._rate + self._stopped_s if self._rate else self._stopped_s) * 1000
