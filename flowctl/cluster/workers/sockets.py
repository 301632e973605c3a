"""Listening sockets on one port, one for each worker: the kernel spreads new connections over them (SO_REUSEPORT).

The supervisor makes them and keeps them open, and each worker serves one. So a worker that dies takes no listening
socket with it: what waits there is served by its successor.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from flowctl.errors import ConfigError

BACKLOG = 1024
"""As that of a server alone, for each worker."""


def listening_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Return `count` sockets that listen on the same address.

    The first is bound as if it were to be alone, so that a port that another server has is refused, also one of the
    same user that would share it: each would get half of the other's connections. It becomes one of a group after that.

    Args:
        host: address to listen on.
        port: port; 0 lets the system choose one.
        count: of sockets, 1 or more.

    Raises:
        ConfigError: the address does not resolve, is in use, or may not be used.
    """
    found: list[socket.socket] = []
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        for number in range(count):
            sock = socket.socket(family, kind, protocol)
            found.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if number == 0:
                sock.bind(address)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                address = sock.getsockname()
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                sock.bind(address)
            sock.listen(BACKLOG)
            sock.setblocking(False)
    except OSError as error:
        close_all(found)
        hint = {errno.EADDRINUSE: "choose another port, or 0 for any"}.get(error.errno or 0, "check address and port")
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", hint=hint) from error
    return found


def close_all(sockets: list[socket.socket]) -> None:
    """Close sockets; harmless where they are closed."""
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.close()
