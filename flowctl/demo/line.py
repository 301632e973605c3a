"""A line of a demonstration, in front of a server: as it is, slow, or one that changes what passes.

What a server sends through such a line comes late, or with a changed octet in the middle of each large piece:
that makes a slow origin, and one that lies, of any server, without one line of it being another. It has a thread of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Final, Self

from flowctl.wire.client.throttle import shrink_receive_buffer

_READ_BYTES: Final = 64 * 1024
_LARGE_BYTES: Final = 4096
"""Least length of a piece in which an octet is changed: shorter ones may be framing only, which is not changed."""
_READY_S: Final = 5.0
_LEAST_PAUSE_S: Final = 0.01


class ProxyLine:
    """Listens on a port of loopback, and connects each client with another one; a context."""

    def __init__(
        self,
        target_port: int,
        *,
        rate: float | None = None,
        lies: bool = False,
        buffer_bytes: int | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._host, self._target_port = host, target_port
        self.rate = rate  # octets a second; None: as fast as it goes; others may change it
        self._lies = lies
        self._buffer_bytes = buffer_bytes
        self._free_at = 0.0  # when the line has carried what it was given
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._ways: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="demo-line", daemon=True)
        self.port = 0
        self.carried_bytes = 0
        self.lies_told = 0  # pieces that were changed so far
        self.hung_up = 0  # connections that their clients ended

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(_READY_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, self._host, 0))
        self.port = int(server.sockets[0].getsockname()[1])
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for way in self._ways:
            way.cancel()
        self._loop.run_until_complete(
            asyncio.gather(*self._ways, *asyncio.all_tasks(self._loop), return_exceptions=True)
        )
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            from_server, to_server = await asyncio.open_connection(sock=await self._connected(), limit=_LARGE_BYTES)
            with contextlib.closing(to_server):
                ways = {
                    asyncio.create_task(self._carry(reader, to_server)): "came",
                    asyncio.create_task(self._carry_back(from_server, writer)): "server",
                }
                self._ways |= set(ways)
                done, rest = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                self.hung_up += any(ways[task] == "came" for task in done)
                for task in rest:
                    task.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                self._ways -= set(ways)

    async def _connected(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        sock.setblocking(False)
        if self._buffer_bytes is not None:
            shrink_receive_buffer(sock, self._buffer_bytes)
        try:
            await self._loop.sock_connect(sock, (self._host, self._target_port))
        except BaseException:
            sock.close()
            raise
        return sock

    @staticmethod
    async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()

    async def _carry_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES if self.rate is None else _LARGE_BYTES):
            if self.rate is not None:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + len(data) / self.rate
                if self._free_at - now > _LEAST_PAUSE_S:
                    await asyncio.sleep(self._free_at - now)
            if self._lies and len(data) >= _LARGE_BYTES:
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
                self.lies_told += 1
            self.carried_bytes += len(data)
            writer.write(data)
            await writer.drain()
