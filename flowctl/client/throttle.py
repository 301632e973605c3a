"""A token bucket for reading: how many bytes may be read now, and when the next (pure)."""

from __future__ import annotations

from typing import Final

from flowctl.errors import ConfigError

BURST_S: Final = 0.05
"""Length of the burst that is allowed: what comes at 200 kbit/s in this time fits one segment of Ethernet."""

_LEAST_BURST_BYTES: Final = 512
MIN_RATE: Final = 1000
MAX_RATE: Final = 100_000_000_000
"""Bits per second: below, a handshake of 3 KiB alone takes half a minute; above, no machine gets there."""

_MAX_READ_BYTES: Final = 64 * 1024


class TokenBucket:
    """Bytes that may be read; may go below zero, since what was read cannot be given back.

    Args:
        rate: bits per second, `MIN_RATE` to `MAX_RATE`.
        now: time in seconds.

    Raises:
        ConfigError: the rate is out of range.
    """

    __slots__ = ("_at", "_burst_bytes", "_rate_bytes", "_tokens")

    def __init__(self, rate: int, now: float) -> None:
        if not MIN_RATE <= rate <= MAX_RATE:
            raise ConfigError(f"read rate is {rate} bit/s, it must be {MIN_RATE} to {MAX_RATE}")
        self._rate_bytes = rate / 8
        self._burst_bytes = max(self._rate_bytes * BURST_S, _LEAST_BURST_BYTES)
        self._tokens = self._burst_bytes
        self._at = now

    def take(self, size: int, now: float) -> float:
        """Note that `size` bytes were read; return the seconds until the next may be, 0 for at once."""
        self._tokens = min(self._tokens + (now - self._at) * self._rate_bytes, self._burst_bytes) - size
        self._at = now
        # Half a burst is waited for, so that a slow reader is not woken for each byte.
        return 0.0 if self._tokens > 0 else (self._burst_bytes / 2 - self._tokens) / self._rate_bytes


def read_size(rate: int) -> int:
    """Return how many bytes a reader of `rate` bits per second should take at once: at most two bursts."""
    return int(min(max(rate / 8 * BURST_S * 2, 2 * _LEAST_BURST_BYTES), _MAX_READ_BYTES))


def receive_buffer(rate: int) -> int:
    """Return the SO_RCVBUF with which `rate` bits per second shows at the sender within a second.

    The kernel doubles it, and what is in it is media that left the sender but was not read: a quarter of a second's
    worth, 4 KiB (less makes segments so small that the loopback path stalls) to 256 KiB.
    """
    return int(min(max(rate / 8 / 4, 4096), 256 * 1024))
