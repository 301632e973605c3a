"""How a client reads as if it were behind a thin line: evenly, a packet or a few milliseconds' worth at a time (pure).

A line carries bytes at its rate while there is something to carry. What it could have carried while nothing came is
lost; what it could have carried while something waited is not, even where the reader was woken late: it comes in one
lump then, as large as the clock was late.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final, Protocol

MIN_RATE: Final = 1000
MAX_RATE: Final = 100_000_000_000
"""Bounds on a rate, bits per second: at less, a handshake takes half a minute; no machine gets above."""

SLOW_SEGMENT_BYTES: Final = 1400
"""Segment size of a client with a small receive buffer: that of an Ethernet path.

The loopback interface has segments of 64 KiB. With a receive buffer smaller than that, the sender may not fill one
and falls back to probing the window, with pauses that grow from 0.2 s: a slow reader would look like a stalled one.
"""

LUMP_S: Final = 0.005
"""Time whose octets one read takes on a fast line; a slow line delivers whole packets. Less than 5 ms would cost a
wake-up of the loop for each few hundred bytes."""

LOOK_S: Final = 0.05
"""Longest time between two looks at a rate that changes, however long the wait at its present value would be."""
_LEAST_WAIT_S: Final = 0.001
"""Shortest wait: timers are no more exact than this."""

_MAX_READ_BYTES: Final = 64 * 1024
_LEAST_BUFFER_BYTES: Final = 3000
"""Smallest receive buffer, two packets: a sender that can never fill one would probe the window instead."""
_MAX_BUFFER_BYTES: Final = 256 * 1024
_BUFFER_S: Final = 0.01


class Rate(Protocol):
    """A rate that depends on the time since reading began."""

    look_s: float  # longest time for which the rate of a moment may be used

    def rate_at(self, elapsed_s: float) -> float:
        """Return bits per second, 0 or more."""
        ...

    def carried_bits(self, elapsed_s: float) -> float:
        """Return the bits that a line of this rate can carry from the beginning to `elapsed_s`."""
        ...


@dataclass(slots=True)
class Constant:
    rate: float
    look_s: float = float("inf")

    def rate_at(self, elapsed_s: float) -> float:
        return self.rate

    def carried_bits(self, elapsed_s: float) -> float:
        return self.rate * elapsed_s


@dataclass(slots=True, eq=False)
class RatePace:
    """A token bucket that a line fills."""

    rate: Rate
    began: float
    _carried: float = 0.0  # bits, at the last look
    _tokens: float = 0.0  # bytes that may be read; below 0 what was read too much
    _idle_at: float | None = None  # when the last read left tokens over; None: it took what there were

    def __post_init__(self) -> None:
        self._idle_at = self.began

    def _fill(self, now: float) -> float:
        """Add what the line has carried since the last look; return bytes per second at present."""
        elapsed_s = now - self.began
        carried = self.rate.carried_bits(elapsed_s)
        self._tokens += (carried - self._carried) / 8
        self._carried = carried
        rate_bytes = self.rate.rate_at(elapsed_s) / 8
        # The sender needs a moment to fill a small receive buffer again: a line is idle only when that is over.
        if self._idle_at is not None and now - self._idle_at > LUMP_S:
            self._tokens = min(self._tokens, _lump_bytes(rate_bytes))
        return rate_bytes

    def allowance(self, now: float) -> int:
        """Return how many bytes may be read now, 0 while the bucket is in debt."""
        self._fill(now)
        return max(int(self._tokens), 0)

    def carried_bytes(self, now: float) -> float:
        """Return what the line could carry since reading began."""
        return self.rate.carried_bits(now - self.began) / 8

    def note_read(self, count: int, now: float) -> None:
        """Take `count` bytes out of the bucket, 0 where there was nothing to read.

        It may fall into debt, since what was read cannot be given back.
        """
        self._tokens -= count
        self._idle_at = now if self._tokens >= 1 else None

    def wake_at(self, now: float) -> float:
        """Return when the next lump is there, or sooner, to look at a rate that changes."""
        rate_bytes = self._fill(now)
        wait_s = (_lump_bytes(rate_bytes) - self._tokens) / rate_bytes if rate_bytes > 0 else LOOK_S
        return now + min(max(wait_s, _LEAST_WAIT_S), self.rate.look_s)


def _lump_bytes(rate_bytes: float) -> float:
    return max(rate_bytes * LUMP_S, SLOW_SEGMENT_BYTES)


def read_size(rate: int) -> int:
    """Return how many bytes a reader of `rate` bits per second should take at once."""
    return int(min(_lump_bytes(rate / 8), _MAX_READ_BYTES))


def receive_buffer(rate: int) -> int:
    """Return the SO_RCVBUF of a reader behind a line of `rate` bits per second: 3000 bytes, or 10 ms of it, to 256 KiB.

    On a real line what waits is in the queue before the line, where the sender's kernel counts it as not acknowledged.
    What waits in a receive buffer is acknowledged and hidden from the sender, so there must be next to nothing. More is
    not needed either: the sender on the same machine fills it again at once.

    It is also what makes a reader even. What comes over loopback comes in packets as large as the window, whose memory
    counts until all of it is read; then the window opens by nearly the whole buffer. With a quarter of a second's
    worth, which the kernel doubles, the sender of an even reader of 160 kB/s saw 58 kB go at once, and nothing for
    470 ms; with two packets it sees 2.8 kB each 17 ms.
    """
    return int(min(max(rate / 8 * _BUFFER_S, _LEAST_BUFFER_BYTES), _MAX_BUFFER_BYTES))


def shrink_receive_buffer(sock: socket.socket, size_bytes: int) -> None:
    """Give a socket that is not connected yet a small receive buffer, and segments that fit into it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, min(SLOW_SEGMENT_BYTES, max(size_bytes // 2, 536)))
