"""TLS under an attack: octets go through it as they are, and what is not read waits in the kernel."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass, field
from typing import Final

_PIECE_BYTES: Final = 16 * 1024 + 256
"""Bytes read from the kernel at a time: one record at most, so that an attacker that does not read has read no more."""


@dataclass(eq=False)
class Secrecy:
    """The TLS of one connection, as a client."""

    context: ssl.SSLContext
    host: str
    _came: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)
    _goes: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)
    _tls: ssl.SSLObject = field(init=False)

    def __post_init__(self) -> None:
        self._tls = self.context.wrap_bio(self._came, self._goes, server_hostname=self.host)

    async def shake_hands(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await loop.sock_sendall(sock, self._goes.read())
                await self._feed(loop, sock)
            else:
                await loop.sock_sendall(sock, self._goes.read())
                return

    def seal(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return octets as they go to the server."""
        if data:
            self._tls.write(data)
        return self._goes.read()

    async def receive(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, most_bytes: int) -> bytes:
        """Return what the server has sent, at least one octet; none at the end of its stream."""
        while True:
            try:
                return self._tls.read(most_bytes)
            except ssl.SSLWantReadError:
                await self._feed(loop, sock)
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return b""

    async def _feed(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        data = await loop.sock_recv(sock, _PIECE_BYTES)
        if data:
            self._came.write(data)
        else:
            self._came.write_eof()
