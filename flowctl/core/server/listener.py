"""Listeners: the sockets on which a server accepts, each with what it serves there.

A listener is a pollable of its own: it accepts in turns, rests while the process has no descriptor left and goes on by
itself, and reads the headers of trusted proxies. What becomes of a connection is for its server to say.

A flood of connections must not stop the media of those that are open. A turn comes behind the ends that the loop has
found, accepts fewer where turns have come late, and costs a peer that has reset its connection by then a look and a
close: it is no connection yet.

A connection of a trusted proxy is, until it has named its peer, a socket and a few octets, with a limit on
their number, on the octets and on the time.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import structlog

from flowctl.connection import Session
from flowctl.core.loop.sockets import close_socket
from flowctl.core.server.admission import MORE_FILES, open_files
from flowctl.core.server.certificate import Certificate
from flowctl.core.server.proxyheader import HEADER_TIME_S, HeaderReader, ProxyHeaderError, TrustedProxies
from flowctl.core.server.turning import TurnedAway
from flowctl.core.text.addresses import LAST_PORT, join_host_port
from flowctl.deferred import Registration
from flowctl.errors import ConfigError, LimitExceededError
from flowctl.pollgroup import PollGroup

_log: Final = structlog.get_logger("flowctl.server")
ACCEPTS_PER_TURN: Final = 64
"""Connections accepted before others get their turn: a burst of joins must not stop the media of open connections."""
LEAST_PER_TURN: Final = 4
"""The same where turns come late: with one every 40 ms it is still 100 viewers a second."""
LATE_S: Final = 0.02
"""Time from a turn to the next one in which half as many are accepted: half of what a fan-out waits between flushes."""
RESETS_PER_TURN: Final = 256
"""Connections that their peer has reset already, beside those accepted in a turn: each takes some 20 us."""
_MOST_WAITS: Final = 8
"""Rounds of jobs, the ends of connections among them, that a turn waits for: there may always be some."""
BACKLOG: Final = 1024
PAUSE_S: Final = 0.1
"""Time for which accepting rests when the process has no descriptor left; the connections wait in the backlog."""
_TELL_EVERY_S: Final = 60.0
"""Least time between two lines that say so: at the limit each viewer that leaves makes room for one."""
MOST_WAITING: Final = 1024
"""Most connections that wait for their header: proxies send it at once, so these are an attack or a broken network."""
PROXY_HEADER: Final = "proxy_header"
"""Name under which connections with a wrong or missing header are counted, beside the names of limits. The number that
stands with it means nothing."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Peer = tuple[str, int]


class Host(Protocol):
    """What a listener asks of its server, on its own thread."""

    @property
    def trusted(self) -> TrustedProxies:
        """Addresses whose connections begin with a header that says which peer they speak for."""

    def admit(self, group: PollGroup, listener: Listener, sock: socket.socket, peer: Peer) -> None:
        """Serve or refuse a connection; `sock` is the server's from now on."""

    def refuse(self, group: PollGroup, peer: Peer, refusal: LimitExceededError) -> None:
        """Count a connection that did not come as far; its socket is closed."""


class Listener:
    """One listening socket of a server; a pollable."""

    def __init__(
        self,
        sock: socket.socket,
        host: Host,
        session_factory: Callable[[], Session],
        name: str = "",
        tls: Certificate | None = None,
        cost: float = 1.0,
        refusals: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        self.sock = sock
        self.session_factory: Final = session_factory
        self.name: Final = name
        self.tls: Final = tls
        self.cost: Final = cost
        self.address: Final[tuple[str, int]] = _name_of(sock.getsockname())
        self.registration: Final = Registration()
        self.pauses = 0  # times that accepting rested because the process had no descriptor left
        self.resets = 0  # connections that their peer had reset before they were accepted
        self._host: Final = host
        self._asked = False  # a turn is to come
        self._waits = 0  # rounds of jobs that it has waited for
        self._turn_at: float | None = None  # when the last one began. None: it took all that there was.
        self._most = ACCEPTS_PER_TURN  # to accept in a turn
        self._short_since: float | None = None  # no descriptor was left, and not all that waited has come since
        self._told_at = float("-inf")  # when that was said last
        self._told = False  # and its end is to be said
        self.proxied: Final = Proxied(self._admit, host.refuse)
        self.turned_away: Final = TurnedAway(refusals, tls)

    def load(self) -> float:
        """Weigh nothing, so that rebalancing leaves the listener where it is: moving it would gain nothing."""
        return 0.0

    def attached(self, group: PollGroup) -> None:
        group.watch_input(self.sock, partial(self._accept, group))

    def detached(self, group: PollGroup) -> None:
        self.proxied.close()
        self.turned_away.close(group)
        group.unwatch_input(self.sock)
        self.close()

    def close(self) -> None:
        self.sock.close()

    def _accept(self, group: PollGroup) -> None:
        """Have a turn, behind the ends that the loop finds beside what has come."""
        if not self._asked:
            self._asked, self._waits = True, 0
            group.call_soon(self._take_turn, group)

    def _take_turn(self, group: PollGroup) -> None:
        if self._waits < _MOST_WAITS and group.processor.statistics().pending:
            self._waits += 1
            group.call_soon(self._take_turn, group)
            return
        self._asked = False
        now = group.clock()
        late = self._turn_at is not None and now - self._turn_at > LATE_S
        self._most = max(self._most // 2, LEAST_PER_TURN) if late else min(self._most * 2, ACCEPTS_PER_TURN)
        self._turn_at = now if self._accept_some(group) else None

    def _accept_some(self, group: PollGroup) -> bool:
        """Accept as many as may be in one turn; return whether there may be more."""
        left, resets = self._most, RESETS_PER_TURN
        while left and resets:
            try:
                sock, address = self.sock.accept()
            except BlockingIOError:
                self._end_shortage(group)
                return False
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._rest(group, error)
                return False
            if _is_reset(sock):
                self.resets += 1
                resets -= 1
                sock.close()
                continue
            left -= 1
            peer = _name_of(address)
            if peer[0] in self._host.trusted:
                self.proxied.accept_connection(group, sock, peer)
            else:
                self._admit(group, sock, peer)
        return True

    def _admit(self, group: PollGroup, sock: socket.socket, peer: Peer) -> None:
        self._host.admit(group, self, sock, peer)

    def _rest(self, group: PollGroup, error: OSError) -> None:
        """Stop accepting for a while; that and its end are said once a minute at most."""
        now = group.clock()
        if self._short_since is None:
            self._short_since = now
            self.pauses += 1
        if not self._told and now - self._told_at >= _TELL_EVERY_S:
            self._told, self._told_at = True, now
            _log.error(
                "no descriptor is left: connections wait",
                listen=shown(*self.address, self.name),
                why=error.strerror,
                open_files=open_files(),
                hint=MORE_FILES,
            )
        group.unwatch_input(self.sock)
        group.call_later(PAUSE_S, self._resume, group)

    def _end_shortage(self, group: PollGroup) -> None:
        """Note that all that waited for a descriptor have been accepted."""
        if self._short_since is not None and self._told:
            after_s = round(group.clock() - self._short_since, 1)
            _log.info("connections are accepted again", listen=shown(*self.address, self.name), after_s=after_s)
            self._told = False
        self._short_since = None

    def _resume(self, group: PollGroup) -> None:
        if self.sock.fileno() >= 0:
            self.attached(group)


def _name_of(address: Any) -> Peer:
    """Return host and port; of a Unix socket its path."""
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else (str(address), 0)


def _is_reset(sock: socket.socket) -> bool:
    """Return whether the peer has reset a connection; what it has sent stays where it is."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


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


def shown(host: str, port: int, name: str = "") -> str:
    """Return an address, and what listens there."""
    text = join_host_port(host, port)
    return f"{text} ({name})" if name else text


def listening_socket(host: str, port: int, name: str = "") -> socket.socket:
    """Return a new listening socket; one of IPv6 takes IPv6 alone, so that ``[::]`` and ``0.0.0.0`` go together."""
    if not 0 <= port <= LAST_PORT:
        # getaddrinfo takes 70000, and means 4464.
        raise ConfigError(f"port is {port}, it must be 0 (any) to {LAST_PORT}")
    sock = _bound(host, port, shown(host, port, name))
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def check_host(host: str, port: int, name: str = "") -> None:
    """See whether a server could listen on an address of this machine; whether the port is in use does not matter."""
    _bound(host, 0, shown(host, port, name)).close()


def _bound(host: str, port: int, where: str) -> socket.socket:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror or error}", hint="give an address of this machine"
        ) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {where}: {error.strerror}", hint=listen_hint(error)) from error
    return sock


def listen_hint(error: OSError) -> str:
    """Return what may be done about an address that cannot be listened on."""
    return {
        errno.EADDRINUSE: "choose another port, or 0 for any",
        errno.EADDRNOTAVAIL: "give an address of this machine; 0.0.0.0 and [::] stand for all of them",
        errno.EACCES: "ports below 1024 need CAP_NET_BIND_SERVICE, or a socket from systemd",
    }.get(error.errno or 0, "check address and port")


def socket_of(descriptor: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=descriptor)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"listen_fd is {descriptor}, it must be a listening socket: {error.strerror}") from error
    if not listens:
        sock.detach()
        raise ConfigError(f"listen_fd is {descriptor}, a socket that does not listen")
    sock.setblocking(False)
    return sock
