"""Sockets that others connect to: bound as ZeroMQ names them, accepted from, and whom they let in."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mktemp
from typing import Final

from flowctl.core.flow.limits import Limits
from flowctl.core.server.listener import BACKLOG, Listener, Peer
from flowctl.core.server.proxyheader import TrustedProxies
from flowctl.core.text.addresses import LAST_PORT, join_host_port
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError, LimitExceededError, RemoteProtocolError
from flowctl.nodes.rpc.access.access import AuthLevel, PeerIdentity
from flowctl.nodes.rpc.access.admission import DENIED, RpcAdmission
from flowctl.nodes.rpc.peers.link import RpcSession
from flowctl.nodes.rpc.peers.listener import LIFE_PROPERTY, MOST_PEERS, MOST_ROUTE_BYTES, RpcListener
from flowctl.nodes.rpc.peers.peer import RpcPeer
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.wire.zeromq.curve import KeyPair
from flowctl.wire.zmtp.frames import IDENTITY, SOCKET_TYPE
from flowctl.wire.zmtp.mechanism import CurveServer, Null, Properties, RefusedError

_OWN: Final = {SOCKET_TYPE: b"ROUTER", IDENTITY: b""}
_MAY_DIAL: Final = frozenset({b"DEALER", b"ROUTER", b"REQ"})
_LIFE: Final = LIFE_PROPERTY.lower().encode()
_OUSTED: Final = "another connection has its routing id"


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
        if path.is_socket() and not _answers(rest):  # what one that was killed has left
            path.unlink(missing_ok=True)
        sock.bind(rest)
        _listen(sock)
        return BoundSocket(sock, f"ipc://{rest}", path)
    except BaseException:
        sock.close()
        raise


def _listen(sock: socket.socket) -> None:
    sock.listen(BACKLOG)
    sock.setblocking(False)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) not in {errno.ECONNREFUSED, errno.ENOENT}


class Door:
    """Lets connections of one socket in, to be peers of its listener; the node's thread.

    Args:
        keys: of this node, where connections are encrypted. None: they are not.
        received: called with a peer and each of its messages.
        lost: called with a peer whose connection has ended.
    """

    trusted: Final = TrustedProxies()

    def __init__(
        self,
        group: PollGroup,
        bound: BoundSocket,
        peers: RpcListener,
        admission: RpcAdmission,
        keys: KeyPair | None,
        limits: Limits,
        received: Callable[[RpcPeer, list[bytes]], object],
        lost: Callable[[RpcPeer], object],
    ) -> None:
        self.peers: Final = peers
        self.admission: Final = admission
        self.received: Final = received
        self.lost: Final = lost
        self.keys: Final = keys
        self.sessions: Final[set[Incoming]] = set()
        self._group: Final = group
        self._bound: Final = bound
        self._limits: Final = limits
        self._listener: Final = Listener(bound.sock, self, lambda: Incoming(self), "rpc")
        group.add_pollable(self._listener, self._listener.registration)

    def close(self) -> None:
        """Accept no more, and end connections that are no peers."""
        self._group.remove_pollable(self._listener)
        self._bound.close()
        for session in list(self.sessions):
            if session.peer is None or session.peer.closed:
                session.close("the node was stopped")

    def admit(self, group: PollGroup, listener: Listener, sock: socket.socket, peer: Peer) -> None:
        del listener, peer
        if len(self.sessions) >= MOST_PEERS:
            sock.close()
            return
        session = Incoming(self)
        self.sessions.add(session)
        session.live_on(group, sock, self._limits)

    def decide(self, address: str, key: bytes) -> AuthLevel:
        """Return the level of a new connection; a hook's fault lets nobody in."""
        try:
            return self.admission.decide(self.peers.number, address, key)
        except RefusedError:
            raise
        except BaseException as error:
            self._group.report("deciding on a new connection", error)
            raise RefusedError(DENIED) from error

    def refuse(self, group: PollGroup, peer: Peer, refusal: LimitExceededError) -> None:
        """No proxy is trusted, so nothing is refused before it is admitted."""


class Incoming(RpcSession):
    """A connection that a peer has opened."""

    __slots__ = ("_door", "_level", "peer")

    def __init__(self, door: Door) -> None:
        self._door: Final = door
        self._level = AuthLevel.NONE
        self.peer: RpcPeer | None = None  # once it is known and was let in
        keys = door.keys
        super().__init__(
            Null(_OWN, self._admit) if keys is None else CurveServer(_OWN, keys.public, keys.secret, self._admit),
            self._message,
            self._known,
            self._ended,
        )

    def _admit(self, key: bytes, said: Properties) -> Properties:
        if (kind := said.get(b"socket-type", b"")) not in _MAY_DIAL:
            raise RemoteProtocolError(f"a socket of type {kind[:20]!r} does not go with a ROUTER", code="zmtp-socket")
        if len(said.get(b"identity", b"")) > MOST_ROUTE_BYTES:
            raise RemoteProtocolError(f"a routing id has more than {MOST_ROUTE_BYTES} bytes", code="zmtp-identity")
        self._level = self._door.decide(self.connection.peer[0], key)
        return {}

    def _known(self) -> None:
        said = self.zmtp.mechanism.said
        identity = PeerIdentity(self.zmtp.mechanism.key, self._level, self.connection.peer[0])
        life = said.get(_LIFE, b"").decode("ascii", "replace")
        self.peer = self._door.peers.enter(self, said.get(b"identity", b""), identity, life)

    def _message(self, frames: list[bytes]) -> None:
        peer, door = self.peer, self._door
        if peer is None:
            door.peers.refused_count += 1
        elif peer.closed:
            self.connection.receiver.pause(self, _OUSTED)
        else:
            door.received(peer, frames)

    def _ended(self, reason: CloseReason, details: str) -> None:
        del reason, details
        self._door.sessions.discard(self)
        if self.peer is not None and not self.peer.closed:
            self._door.lost(self.peer)
