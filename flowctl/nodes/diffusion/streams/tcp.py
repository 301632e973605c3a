"""Streams over TCP or Unix sockets, each with a `Connection`: its Sender bounds what waits for the peer.

Theory of operation. A session keeps what has come until somebody reads it; beyond `UNREAD_BYTES` it holds the
connection's input, so that a peer which sends faster than it is read is slowed down. Writing queues in the Sender, and
waits until all of it has been taken. How slow a peer may be is for the limits and times of its Sender.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from flowctl.connection import Connection, Session
from flowctl.core.flow.limits import NO_LIMITS, Limits
from flowctl.core.flow.state import MessageClass
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import BrokenError, ClosedError
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason

UNREAD_BYTES: Final = 256 * 1024
"""Octets that may wait to be read: as much as one read of a socket brings."""
_KEEP_ALIVE: Final = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 5),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 3),
)
"""A client may wait for new objects for ever, without a word. A server that is gone without one is found in 25 s."""
_UNREAD: Final = "diffusion reads later"


class StreamSession(Session):
    """A session that is a `Stream`: for `flowctl.Server`, or for a socket that is connected already.

    The loop of its poll group must be the one that diffusion runs on, and stay it: a server has one group for it.
    """

    __slots__ = ("_on_open", "_over", "_peer_ended", "_reader", "_unread")

    def __init__(self, on_open: Callable[[StreamSession], object] | None = None) -> None:
        self._on_open = on_open
        self._unread = bytearray()
        self._reader: asyncio.Future[None] | None = None  # waits for octets
        self._peer_ended = False
        self._over: tuple[CloseReason, str] | None = None

    def opened(self) -> None:
        if self._on_open is not None:
            self._on_open(self)

    def received(self, data: memoryview) -> None:
        self._unread += data
        if len(self._unread) >= UNREAD_BYTES:
            self.connection.receiver.pause(self, _UNREAD)
        self._wake()

    def peer_ended(self) -> bool:
        """Go on sending what the peer has asked for: who ends its stream may still read."""
        self._peer_ended = True
        self._wake()
        return True

    def closed(self, reason: CloseReason, details: str) -> None:
        self._over = (reason, details)
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def read(self) -> bytes:
        while not self._unread:
            if self._peer_ended:
                return b""
            if self._over is not None:
                reason, details = self._over
                if reason is CloseReason.PEER_CLOSED:
                    return b""
                raise BrokenError(f"connection ended: {reason.value}: {details}")
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        data = bytes(self._unread)
        self._unread.clear()
        if self._over is None and len(data) >= UNREAD_BYTES:
            self.connection.receiver.resume(self)
        return data

    async def write(self, data: bytes) -> None:
        """Queue octets in the Sender and wait until the peer's kernel has room for them; see `Stream`."""
        if self._over is not None:
            raise BrokenError(f"connection ended: {self._over[0].value}: {self._over[1]}")
        connection = self.connection
        if connection.sender.send(data, MessageClass.DATA, droppable=False).outcome is SendOutcome.CLOSED:
            raise BrokenError(f"{connection} takes nothing more")
        try:
            await connection.drained()
        except ClosedError as error:
            raise BrokenError(str(error)) from error

    def close(self, details: str = "") -> None:
        if self._over is None:
            self.connection.close_after_flush(details)


def open_stream(
    group: PollGroup, sock: socket.socket, *, limits: Limits = NO_LIMITS, settings: SenderSettings | None = None
) -> StreamSession:
    if sock.family != socket.AF_UNIX:
        for option, value in _KEEP_ALIVE:
            sock.setsockopt(*option, value)
    session = StreamSession()
    connection = Connection(sock, session, limits=limits, settings=settings, clock=group.clock)
    connection.live_on(group)
    return session


async def connect_stream(
    group: PollGroup,
    address: tuple[str, int] | str,
    *,
    limits: Limits = NO_LIMITS,
    settings: SenderSettings | None = None,
    wrap: Callable[[socket.socket], Awaitable[socket.socket]] | None = None,
) -> StreamSession:
    loop = asyncio.get_running_loop()
    places: list[tuple[socket.AddressFamily, Any]] = [(socket.AF_UNIX, address)]
    if not isinstance(address, str):
        infos = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        places = [(family, target) for family, _, _, _, target in infos]
    for left, (family, target) in zip(range(len(places) - 1, -1, -1), places, strict=True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, target)
            return open_stream(group, sock if wrap is None else await wrap(sock), limits=limits, settings=settings)
        except BaseException as error:
            sock.close()
            if not left or not isinstance(error, OSError):
                raise
    raise OSError(f"{address} has no address")
