"""Sockets that others connect to: bound as ZeroMQ names them, and accepted from."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mktemp
from typing import Final

from flowctl.core.server.listener import BACKLOG, Listener, Peer
from flowctl.core.server.proxyheader import TrustedProxies
from flowctl.core.text.addresses import LAST_PORT, join_host_port
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError, LimitExceededError, RemoteProtocolError
from flowctl.pollgroup import PollGroup
from flowctl.wire.zmtp.frames import IDENTITY, SOCKET_TYPE
from flowctl.wire.zmtp.link import ZmtpLink
from flowctl.wire.zmtp.mechanism import Properties

ROUTER: Final = {SOCKET_TYPE: b"ROUTER", IDENTITY: b""}
"""What a listener says of itself."""
MOST_LINKS: Final = 100_000
"""Connections of one listener; each takes some 5 kB. Further ones are closed."""
MOST_ROUTE_BYTES: Final = 255
"""Longest routing id (RFC 28)."""
_MAY_DIAL: Final = frozenset({b"DEALER", b"ROUTER", b"REQ"})


class BoundSocket:
    """A socket that listens, and where: closed, it leaves nothing behind."""

    def __init__(self, sock: socket.socket, endpoint: str, path: Path | None = None) -> None:
        self.sock: Final = sock
        self.endpoint: Final = endpoint
        self._path: Final = path
        self._inode: Final = 0 if path is None else path.stat().st_ino

    def close(self) -> None:
        self.sock.close()
        with suppress(OSError):
            if self._path is not None and self._path.stat().st_ino == self._inode:  # not another's by now
                self._path.unlink()


def bind_socket(endpoint: str) -> BoundSocket:
    """Bind a socket at an endpoint of ZeroMQ: ``tcp://127.0.0.1:5000``, ``tcp://*:*``, ``ipc://PATH``, ``ipc://*``.

    Raises:
        ConfigError: it is none.
        OSError: it cannot be bound.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "tcp":
        return _bind_tcp(endpoint, rest)
    if scheme == "ipc" and rest:
        return _bind_unix(rest)
    raise ConfigError(
        f"{short(endpoint)} is no address to listen at", hint="tcp://HOST:PORT, ipc://PATH, inproc://NAME"
    )


def _bind_tcp(endpoint: str, rest: str) -> BoundSocket:
    host, _, text = rest.rpartition(":")
    port = 0 if text == "*" else int(text) if text.isdecimal() and len(text) <= len(str(LAST_PORT)) else -1
    if not host or not 0 <= port <= LAST_PORT:
        raise ConfigError(
            f"{short(endpoint)}: port is {text[:20]}, it must be 0 to {LAST_PORT}", hint="0 or * is any that is free"
        )
    bare = "0.0.0.0" if host == "*" else host.removeprefix("[").removesuffix("]")  # noqa: S104  (as it was asked for)
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        place = socket.getaddrinfo(bare, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]
    except socket.gaierror as error:
        raise OSError(errno.EADDRNOTAVAIL, error.strerror) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        _listen(sock)
    except BaseException:
        sock.close()
        raise
    return BoundSocket(sock, f"tcp://{join_host_port(*sock.getsockname()[:2])}")


def _bind_unix(rest: str) -> BoundSocket:
    rest = mktemp(prefix="flowctl-") if rest == "*" else rest  # noqa: S306  (bound at once, which fails if it is there)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if rest.startswith("@"):
            sock.bind("\0" + rest[1:])
            _listen(sock)
            return BoundSocket(sock, f"ipc://{rest}")
        path = Path(rest)
        with _alone_in(path.parent):
            _make_way(path)
            sock.bind(rest)
            _listen(sock)
            return BoundSocket(sock, f"ipc://{rest}", path)
    except BaseException:
        sock.close()
        raise


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep others from taking what is bound here, and does not listen yet, for what one that was killed has left."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_way(path: Path) -> None:
    """Remove what a listener that was killed has left."""
    if path.is_socket():
        if _answers(str(path)):
            raise OSError(errno.EADDRINUSE, "somebody listens there")
        path.unlink(missing_ok=True)
    elif path.exists():
        raise OSError(errno.ENOTSOCK, "it is there and is no socket")


def _listen(sock: socket.socket) -> None:
    sock.listen(BACKLOG)
    sock.setblocking(False)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) not in {errno.ECONNREFUSED, errno.ENOENT}


class ZmtpListener:
    """Accepts connections of one socket; the group's thread.

    Args:
        make_link: makes what speaks on a connection; it says `left` at its end.

    Attributes:
        links: all connections, those in their handshake included.
    """

    trusted: Final = TrustedProxies()

    def __init__(self, group: PollGroup, bound: BoundSocket, make_link: Callable[[], ZmtpLink]) -> None:
        self.links: Final[set[ZmtpLink]] = set()
        self._group: Final = group
        self._bound: Final = bound
        self._make_link: Final = make_link
        self._listener: Final = Listener(bound.sock, self, make_link)
        group.add_pollable(self._listener, self._listener.registration)

    def close(self) -> None:
        """Accept no more; connections stay."""
        self._group.remove_pollable(self._listener)
        self._bound.close()

    def admit(self, group: PollGroup, listener: Listener, sock: socket.socket, peer: Peer) -> None:
        del listener, peer
        if len(self.links) >= MOST_LINKS:
            sock.close()
            return
        link = self._make_link()
        self.links.add(link)
        link.live_on(group, sock)

    def refuse(self, group: PollGroup, peer: Peer, refusal: LimitExceededError) -> None:
        """No proxy is trusted, so nothing is refused before it is admitted."""


def check_dialler(said: Properties) -> None:
    """See that a peer may speak with a ROUTER.

    Raises:
        RemoteProtocolError: its type does not go with that, or its routing id is too long.
    """
    if (kind := said.get(b"socket-type", b"")) not in _MAY_DIAL:
        raise RemoteProtocolError(f"a socket of type {kind[:20]!r} does not go with a ROUTER", code="zmtp-socket")
    if len(said.get(b"identity", b"")) > MOST_ROUTE_BYTES:
        raise RemoteProtocolError(f"a routing id has more than {MOST_ROUTE_BYTES} bytes", code="zmtp-identity")
