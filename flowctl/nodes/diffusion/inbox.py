"""A stream to a peer, and what has come from it: the reading half of a conversation, on either side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from flowctl.nodes.diffusion.wire.codec import Decoder


class PeerStream(Protocol):
    """Octets in order, both ways, to one peer. All methods belong to one thread, that of the loop."""

    async def read(self) -> bytes:
        """Wait for octets and return what has come, at most some hundred kilobytes; empty: the peer has ended."""

    async def write(self, data: bytes) -> None:
        """Send octets, and wait while the peer is slower than we are."""

    def close(self, details: str = "") -> None:
        """End the stream: what was written goes out first, nothing more is read. A second call has no effect."""


class Inbox:
    """Reads a stream to its end, ahead of those that want messages by no more than a limit.

    It reads also while nothing is expected: so the end of a peer is noticed that one waits for without a time limit.
    """

    def __init__(self, stream: PeerStream, most_bytes: int, told: Callable[[], object]) -> None:
        self._stream = stream
        self._most_bytes = most_bytes
        self._told = told
        self._used = asyncio.Event()
        self.decoder = Decoder()
        self.ended = False
        self.failure: Exception | None = None  #: why reading ended otherwise

    async def run(self) -> None:
        try:
            while data := await self._stream.read():
                self.decoder.feed(data)
                self._told()
                while self.decoder.buffered_bytes > self._most_bytes:
                    self._used.clear()
                    await self._used.wait()
            self.ended = True
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the conversation, which tells it
            self.failure = error
        self._told()

    def used(self) -> None:
        self._used.set()
