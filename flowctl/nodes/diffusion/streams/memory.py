"""Streams within the process, for tests and for nodes that live together."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from flowctl.errors import BrokenError, ClosedError

CAPACITY_BYTES: Final = 64 * 1024
"""Octets by which a writer may be ahead of its reader."""


class _MemoryPipe:
    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.pieces: deque[bytes] = deque()
        self.size_bytes = 0
        self.ended = False  # by its writer
        self.deaf = False  # who reads has closed
        self._waiting: list[asyncio.Future[None]] = []

    def changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future


class MemoryStream:
    """One end of a pair; see `memory_pair`. A `Stream`."""

    def __init__(self, incoming: _MemoryPipe, outgoing: _MemoryPipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def read(self) -> bytes:
        way = self._incoming
        while not way.pieces:
            if way.deaf:
                raise ClosedError("the stream was closed by us")
            if way.ended:
                return b""
            await way.wait()
        data = way.pieces.popleft()
        way.size_bytes -= len(data)
        way.changed()
        return data

    async def write(self, data: bytes) -> None:
        way = self._outgoing
        view = memoryview(data)
        while view:
            if way.ended:
                raise ClosedError("the stream was closed by us")
            if way.deaf:
                raise BrokenError("the peer has closed the stream")
            room = way.capacity_bytes - way.size_bytes
            if room <= 0:
                await way.wait()
                continue
            way.pieces.append(bytes(view[:room]))
            way.size_bytes += len(way.pieces[-1])
            view = view[room:]
            way.changed()

    def close(self, details: str = "") -> None:
        del details
        self._outgoing.ended = True
        self._incoming.deaf = True
        self._incoming.pieces.clear()
        self._incoming.size_bytes = 0
        self._outgoing.changed()
        self._incoming.changed()


def memory_pair(capacity_bytes: int = CAPACITY_BYTES) -> tuple[MemoryStream, MemoryStream]:
    """Return two ends that are connected; what is written to one is read from the other."""
    there, back = _MemoryPipe(capacity_bytes), _MemoryPipe(capacity_bytes)
    return MemoryStream(back, there), MemoryStream(there, back)
