"""Listening sockets on one port, one for each worker: the kernel spreads new connections over them (SO_REUSEPORT).

The supervisor makes them and keeps them open, and each worker serves one. So a worker that dies takes no listening
socket with it: what waits there is served by its successor.
"""

from __future__ import annotations

import contextlib
import socket

from flowctl.core.server.listener import listen_hint, shown
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig

BACKLOG = 1024
"""Backlog of each worker's socket: that of a server alone."""


def listening_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Return `count` sockets that listen on the same address.

    The first is bound as if it were to be alone, so that a port that another server has is refused, also one of the
    same user that would share it: each would get half of the other's connections. It becomes one of a group after that.
    """
    found: list[socket.socket] = []
    where = shown(host, port)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        for number in range(count):
            sock = socket.socket(family, kind, protocol)
            found.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
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
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}", hint=listen_hint(error)) from error
    return found


def worker_sockets(options: LiveConfig, count: int) -> tuple[list[dict[str, list[socket.socket]]], int]:
    """Return the sockets of each of `count` workers, by their purpose, and the port of RTMP.

    A socket that was handed to this process is the same for all workers: they take turns at its one queue.
    """
    found: list[dict[str, list[socket.socket]]] = [{} for _ in range(count)]
    port = options.port
    try:
        for name, addresses in options.listening:
            handed = options.listen_fds.get(name, ())
            for descriptor in handed:
                sock = socket.socket(fileno=descriptor)
                for mine in found:
                    mine.setdefault(name, []).append(sock)
            for host, wanted in () if handed else addresses:
                made = listening_sockets(host, port if name == "rtmp" else wanted, count)
                if name == "rtmp":
                    port = made[0].getsockname()[1]
                for mine, sock in zip(found, made, strict=True):
                    mine.setdefault(name, []).append(sock)
    except BaseException:
        close_all([sock for mine in found for socks in mine.values() for sock in socks])
        raise
    return found, found[0]["rtmp"][0].getsockname()[1]


def close_all(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.close()
