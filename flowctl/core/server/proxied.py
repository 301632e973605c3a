"""Connections of trusted proxies, on their way to admission: whom they speak for has to be read first.

Until then such a connection is a socket and a few octets, with a limit on their number, on the octets and on the time.
Everything here runs on the listener's thread.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from flowctl.core.loop.sockets import close_socket
from flowctl.core.server.proxyheader import HEADER_TIME_S, HeaderReader, ProxyHeaderError
from flowctl.errors import LimitExceededError
from flowctl.pollgroup import PollGroup

MOST_WAITING: Final = 1024
"""Connections whose header has not come: proxies send it at once, so these are an attack or a broken network."""
PROXY_HEADER: Final = "proxy_header"
"""Name under which those are counted whose header is wrong or missing; as that of a limit. The number that stands with
it means nothing."""

Peer = tuple[str, int]


class Proxied:
    def __init__(
        self,
        admit: Callable[[PollGroup, socket.socket, Peer], None],
        refuse: Callable[[PollGroup, Peer, LimitExceededError], None],
    ) -> None:
        self._admit = admit
        self._refuse = refuse
        self._waiting: dict[socket.socket, tuple[PollGroup, Any]] = {}  # with the timer of each

    def __len__(self) -> int:
        return len(self._waiting)

    def accept_connection(self, group: PollGroup, sock: socket.socket, peer: Peer) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._end(group, sock, peer, LimitExceededError("proxy_waiting", len(self._waiting) + 1, MOST_WAITING))
            return
        sock.setblocking(False)
        reader = HeaderReader()
        late = LimitExceededError("proxy_header_s", HEADER_TIME_S, HEADER_TIME_S, "no PROXY header came in time")
        self._waiting[sock] = group, group.call_later(HEADER_TIME_S, self._end, group, sock, peer, late)
        group.watch_input(sock, partial(self._readable, group, sock, peer, reader))

    def _readable(self, group: PollGroup, sock: socket.socket, peer: Peer, reader: HeaderReader) -> None:
        try:
            while reader.wanted:
                data = sock.recv(reader.wanted)
                if not data:
                    # Without an octet it was a look whether the port is open, as balancers take it all day.
                    error = _wrong("the proxy closed the connection within its header") if reader.begun else None
                    self._end(group, sock, peer, error)
                    return
                reader.read(data)
        except BlockingIOError:
            return
        except OSError:
            self._end(group, sock, peer, None)
            return
        except ProxyHeaderError as error:
            self._end(group, sock, peer, _wrong(str(error)))
            return
        self._forget(sock)
        address, port = reader.origin or peer
        self._admit(group, sock, (address, peer[1] if port is None else port))

    def _end(self, group: PollGroup, sock: socket.socket, peer: Peer, error: LimitExceededError | None) -> None:
        self._forget(sock)
        close_socket(sock, abortive=True)
        if error is not None:
            self._refuse(group, peer, error)

    def _forget(self, sock: socket.socket) -> None:
        waiting = self._waiting.pop(sock, None)
        if waiting is not None:
            group, timer = waiting
            timer.cancel()
            group.unwatch_input(sock)

    def close(self) -> None:
        for sock in list(self._waiting):
            self._forget(sock)
            with contextlib.suppress(OSError):
                sock.close()


def _wrong(message: str) -> LimitExceededError:
    return LimitExceededError(PROXY_HEADER, 1, 0, message)
