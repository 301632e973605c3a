"""A server: accepts connections, places each on the least loaded poll group, and ends them all when it stops."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, Self

from flowctl.admission import Admission, AdmissionLimits
from flowctl.connection import Connection
from flowctl.deferred import Registration
from flowctl.errors import ClosedError, ConfigError, LimitExceededError, LocalProtocolError
from flowctl.limits import Limits
from flowctl.policy import DropPolicy
from flowctl.pollgroup import LoopFactory, PollGroup
from flowctl.pollgroups import PollGroups
from flowctl.reasons import CloseReason
from flowctl.sender_types import SenderSettings
from flowctl.session import Session
from flowctl.sockets import SocketOptions, close_socket, peer_name

DEFAULT_LIMITS: Final = Limits.parse("2MiB,2048,4s", "4MiB,4096,8s")
"""Limits of a server that is given none: at 2.5 Mbit/s about 6 s and 13 s of media, or 4 s and 8 s of age."""

_ACCEPTS_PER_TURN: Final = 64
"""Connections accepted before others get their turn: a burst of joins must not stop the media of those who are in."""
_BACKLOG: Final = 1024
_PAUSE_S: Final = 0.1
"""How long accepting rests when the process has no descriptor left; the connections wait in the backlog."""
_REBALANCE_S: Final = 10.0
"""How often connections are moved between threads whose loads have drifted apart."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

RefusalHook = Callable[[tuple[str, int], LimitExceededError], None]


class Server:
    """Serves sessions of one kind on one address.

    Args:
        session_factory: makes the session of a new connection; called on the connection's thread-to-be's behalf, on
            the listener's thread.
        host: address to listen on.
        port: port; 0 lets the system choose one, see `address`.
        limits: of every Sender. None: `DEFAULT_LIMITS`.
        policy: of every Sender. None: drop nothing.
        settings: of every Sender.
        deferred: of every Sender.
        options: set on every socket.
        admission: who may connect.
        group_count: number of poll groups, that is of threads.
        loop_factory: makes their loops. None: uvloop where it can be had.
        on_error: told of every exception of a handler.
        on_refused: told of every connection that was refused, with peer and limit.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self,
        session_factory: Callable[[], Session],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: Limits | None = None,
        policy: DropPolicy | None = None,
        settings: SenderSettings | None = None,
        deferred: bool = True,
        options: SocketOptions | None = None,
        admission: AdmissionLimits | None = None,
        group_count: int = 1,
        loop_factory: LoopFactory | None = None,
        on_error: Callable[[str, Exception], None] | None = None,
        on_refused: RefusalHook | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._factory = session_factory
        self._limits = DEFAULT_LIMITS if limits is None else limits
        self._policy = policy
        self._settings = settings
        self._deferred = deferred
        self._options = options or SocketOptions()
        self.clock: Final = clock
        self._on_refused = on_refused
        self.admission: Final = Admission(admission or AdmissionLimits())
        self.groups: Final = PollGroups(group_count, loop_factory=loop_factory, on_error=on_error, clock=clock)
        self._registration = Registration()
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}  # by number; guarded by _lock
        self._stopping = threading.Event()
        self._rebalancing = False  # the listener's thread
        self.accepted_count = 0
        self.closed_by_reason: dict[CloseReason, int] = {}  # guarded by _lock
        self._listener = _listen(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    # -- life

    def start(self) -> None:
        """Start the poll groups and accept connections; returns at once."""
        self.groups.start()
        self.groups.groups[0].add_pollable(self, self._registration)

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Accept no more, end all connections with reason SHUTDOWN, stop the groups; idempotent.

        Args:
            deadline_s: how long to wait, 0 or more. What is queued is given half of it to go out.

        Returns:
            Whether all threads have ended.
        """
        if not self._stopping.is_set():
            self._stopping.set()
            with contextlib.suppress(ClosedError, LocalProtocolError):
                self.groups.groups[0].remove_pollable(self)
            for connection in self.connections():
                connection.close_after_flush("server stops", reason=CloseReason.SHUTDOWN)
            end = time.monotonic() + deadline_s / 2
            while self.connections() and time.monotonic() < end:
                time.sleep(0.01)
            for connection in self.connections():
                connection.close(CloseReason.SHUTDOWN, "server stops")
        stopped = self.groups.stop(deadline_s / 2)
        self._listener.close()
        return bool(stopped)

    def run(self) -> None:
        """Start, serve until SIGINT or SIGTERM, and stop. Main thread."""
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        self.start()
        ended.wait()
        self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    # -- connections

    def connections(self) -> list[Connection]:
        """Return the open connections, oldest first. Any thread."""
        with self._lock:
            return list(self._connections.values())

    def add_socket(self, sock: socket.socket, session: Session) -> Connection:
        """Serve a connected socket that was not accepted here, for example one that connected out. Any thread.

        Raises:
            ClosedError: the server is stopping.
        """
        connection = Connection(
            sock,
            session,
            limits=self._limits,
            policy=self._policy,
            settings=self._settings,
            deferred=self._deferred,
            options=self._options,
            clock=self.clock,
            on_closed=self._forget,
        )
        with self._lock:
            self._connections[connection.number] = connection
        try:
            self.groups.place(connection, connection.registration)
        except BaseException:
            with self._lock:
                del self._connections[connection.number]
            sock.close()
            raise
        return connection

    def _forget(self, connection: Connection) -> None:
        reason = connection.ended[0] if connection.ended is not None else CloseReason.INTERNAL
        with self._lock:
            known = self._connections.pop(connection.number, None)
            self.closed_by_reason[reason] = self.closed_by_reason.get(reason, 0) + 1
        if known is None:
            return
        group = self.groups.groups[0]
        if group.in_thread():
            self.admission.leave(connection.peer[0])
        else:
            with contextlib.suppress(ClosedError):
                group.call_soon(self.admission.leave, connection.peer[0])

    # -- the listener: a pollable

    def load(self) -> float:
        """Weigh nothing, so that rebalancing leaves the listener where it is: admission belongs to that thread."""
        return 0.0

    def attached(self, group: PollGroup) -> None:
        """Begin to accept; called by the group."""
        group.watch_input(self._listener.fileno(), lambda: self._accept(group))
        if len(self.groups.groups) > 1 and not self._rebalancing:
            self._rebalancing = True
            group.call_later(_REBALANCE_S, self._rebalance, group)

    def detached(self, group: PollGroup) -> None:
        """Stop accepting; called by the group."""
        group.unwatch_input(self._listener.fileno())
        self._listener.close()

    def _accept(self, group: PollGroup) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    group.report("accept", error)
                    group.unwatch_input(self._listener.fileno())
                    group.call_later(_PAUSE_S, self._resume, group)
                return
            self._admit(sock)

    def _rebalance(self, group: PollGroup) -> None:
        """Even out the threads now and then: viewers leave as they like, and placement only looks at newcomers."""
        if not self.stopping:
            self.groups.rebalance()
            group.call_later(_REBALANCE_S, self._rebalance, group)

    def _resume(self, group: PollGroup) -> None:
        if not self._stopping.is_set() and self._listener.fileno() >= 0:
            self.attached(group)

    def _admit(self, sock: socket.socket) -> None:
        peer = peer_name(sock)
        try:
            self.admission.enter(peer[0], self.clock())
        except LimitExceededError as error:
            close_socket(sock, abortive=True)
            if self._on_refused is not None:
                self._on_refused(peer, error)
            return
        self.accepted_count += 1
        try:
            self.add_socket(sock, self._factory())
        except ClosedError:
            self.admission.leave(peer[0])


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: the address does not resolve, is in use, or may not be used.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", hint="give an address of this machine") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        hint = "choose another port, or 0 for any" if error.errno == errno.EADDRINUSE else "check address and port"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
    return listener


def serve(session_factory: Callable[[], Session], host: str = "127.0.0.1", port: int = 0, **settings: object) -> None:
    """Serve until SIGINT or SIGTERM; arguments as for `Server`. Main thread."""
    Server(session_factory, host, port, **settings).run()  # type: ignore[arg-type]  # the names are checked by Server
