"""What a stream is to diffusion."""

from __future__ import annotations

from typing import Protocol


class PeerStream(Protocol):
    """Octets in order, both ways, to one peer. All methods belong to one thread, that of the loop."""

    async def read(self) -> bytes:
        """Wait for octets and return what has come, at most some hundred kilobytes; empty: the peer has ended."""

    async def write(self, data: bytes) -> None:
        """Send octets, and wait while the peer is slower than we are."""

    def close(self, details: str = "") -> None:
        """End the stream: what was written goes out first, nothing more is read. A second call has no effect."""
