"""A server: accepts connections, places each on the least loaded poll group, and ends them all when it stops."""

from __future__ import annotations

import contextlib
import inspect
import math
import socket
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, ParamSpec, Self

from flowctl.connection import Connection, Session
from flowctl.core.connecting.core import ConnectionCore
from flowctl.core.flow.limits import DEFAULT_LIMITS, Limits
from flowctl.core.flow.policy import DropPolicy
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.loop.sockets import SocketOptions, drop_socket, peer_name
from flowctl.core.loop.work import NO_WORK_LIMITS, WorkLimits
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import BANNED, Admission, AdmissionLimits, ProvenNodes, describe_ban
from flowctl.core.server.bans import Ban, BanAction, BanList
from flowctl.core.server.certificate import Certificate
from flowctl.core.server.listener import Listener, listening_socket, socket_of
from flowctl.core.server.proxyheader import TrustedProxies
from flowctl.core.server.signals import EndSignals
from flowctl.core.server.totals import NO_FLOW, FlowTotals, totals_of
from flowctl.core.text.addresses import listen_hosts
from flowctl.core.text.fieldtypes import check_arguments, check_type
from flowctl.errors import ClosedError, ConfigError, LimitExceededError, LocalProtocolError
from flowctl.pollgroup import LoopFactory, PollGroup
from flowctl.pollgroups import MAX_GROUPS, PollGroups
from flowctl.reasons import CloseReason
from flowctl.sender import Sender

_P = ParamSpec("_P")

_REBALANCE_S: Final = 10.0
"""Time between two moves of connections from threads with more load to threads with less."""


_DRAIN_LOOK_S: Final = 0.005
"""Time between two looks at what the peers of a stopping server have taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStatistics:
    """A snapshot of a server.

    Args:
        connections: open now.
        accepted: accepted so far.
        refused: turned away so far, by name of the limit.
        accept_pauses: times that accepting rested because the process had no descriptor left.
        resets: connections that their peer had reset before they were accepted; they count nowhere else.
        closed: connections ended so far, by reason.
        totals: what all connections were sent and spared, those that have gone included.
        work_s: time that their input has taken of the threads, in seconds, those that have gone included.
        slowed: times that one of them took more than `WorkLimits` allow and was slowed down.
    """

    connections: int
    accepted: int
    refused: dict[str, int] = field(default_factory=dict)
    accept_pauses: int = 0
    resets: int = 0
    closed: dict[CloseReason, int] = field(default_factory=dict)
    totals: FlowTotals = NO_FLOW
    work_s: float = 0.0
    slowed: int = 0


RefusalHook = Callable[[tuple[str, int], LimitExceededError], None]


class Server:
    """Serves sessions, on one address or, see `listen`, on several.

    Args:
        session_factory: makes the session of a new connection; called on the connection's thread-to-be's behalf, on
            the listener's thread.
        host: address to listen on, or several with commas between. None: on none, sockets come by `add_socket`.
        port: port; 0 lets the system choose one, see `address`.
        limits: of every Sender. None: `DEFAULT_LIMITS`.
        policy: of every Sender. None: drop nothing.
        settings: of every Sender.
        deferred: of every Sender.
        options: set on every socket.
        admission: limits on new connections.
        group_count: number of poll groups, that is of threads.
        loop_factory: makes their loops. None: uvloop where it can be had.
        on_error: told of every exception of a handler.
        on_refused: told of every connection that was refused, with peer and limit.
        make_sender: see `Connection`.
        work_limits: how much of its thread a peer may take. None: work is measured, and no peer is slowed.
        trusted_proxies: addresses and networks of proxies. What connects from there has to say first whom it speaks
            for, by the PROXY protocol (v1 or v2) or go-oryx's prefix; that is the peer's address from then on.
        rebalance: whether connections are moved between threads whose loads have drifted apart, every 10 s. One with a
            coroutine running never is; turn it off where sessions keep things that belong to a thread's loop.
        listen_fd: descriptor of a socket that listens already, which the server closes in the end; host and port do not
            count then. None: it makes its own.
        listen_fds: the same by name, for `listen_all`.
        name: what its own listener is for, in messages and in `listen_fds`.
        tls: what connects to its own listener speaks TLS with this certificate. None: it is plain.
        nodes: see `Admission`. None: there are none.

    Raises:
        ConfigError: the address cannot be used, or a trusted proxy is none.
    """

    def __init__(
        self,
        session_factory: Callable[[], Session],
        host: str | None = "127.0.0.1",
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
        make_sender: Callable[..., Sender] = Sender,
        work_limits: WorkLimits | None = None,
        trusted_proxies: Iterable[str] = (),
        rebalance: bool = True,
        listen_fd: int | None = None,
        listen_fds: Mapping[str, tuple[int, ...]] | None = None,
        name: str = "",
        tls: Certificate | None = None,
        nodes: ProvenNodes | None = None,
    ) -> None:
        check_arguments("Server", Server.__init__, locals())
        if not 1 <= group_count <= MAX_GROUPS:
            raise ConfigError(f"Server: group_count is {group_count}, it must be 1 to {MAX_GROUPS}")
        if policy is not None and (isinstance(policy, type) or not hasattr(policy, "decide")):
            raise ConfigError(
                f"Server: policy is {policy!r}, it must be an object with decide and thin, or None",
                hint="for example LivePolicy()",
            )
        self._rebalances: Final = rebalance
        self._trusted: Final = TrustedProxies(trusted_proxies)
        self._make_sender = make_sender
        self._work_limits = work_limits or NO_WORK_LIMITS
        self._factory = session_factory
        self._limits = DEFAULT_LIMITS if limits is None else limits
        self._policy = policy
        self._settings = settings
        self._deferred = deferred
        self._options = options or SocketOptions()
        self.clock: Final = clock
        self._on_refused = on_refused
        self.admission: Final = Admission(admission or AdmissionLimits(), trusted=self._trusted, nodes=nodes)
        self.groups: Final = PollGroups(group_count, loop_factory=loop_factory, on_error=on_error, clock=clock)
        self._lock = OwnedLock()
        self._connections: dict[int, Connection] = {}  # by number; guarded by _lock
        self._past = NO_FLOW  # of the connections that have gone; guarded by _lock
        self._past_work_s = 0.0  # guarded by _lock
        self._past_slowed = 0  # guarded by _lock
        self._closed: dict[CloseReason, int] = {}  # connections that have gone, by reason; guarded by _lock
        self._stopping = threading.Event()
        self._drained = threading.Event()  # the first caller of stop has waited for what was queued
        self._winding_up = False  # somebody does all the rest; guarded by _lock
        self._ended = threading.Event()  # and has done it
        # The earliest that any of them wants: for what is queued to go out, and for what has gone out to arrive.
        self._drain_until = self._arrive_until = math.inf  # guarded by _lock
        self.on_stopped: Callable[[], None] | None = None  # called when `stop` has ended it, on the thread that did
        self.accepted_count = 0  # changed under _lock
        # One bound method each for all connections:
        self._on_closed: Final = self._gone
        self._on_released: Final = self._released
        self.listeners: Final[list[Listener]] = []
        self._started = False
        self._listen_fds: Final = {**(listen_fds or {}), **({} if listen_fd is None else {name: (listen_fd,)})}
        self.address: Final = ("", 0) if host is None else self._listen_first(name, listen_hosts(host), port, tls)

    # -- life

    def listen(
        self,
        host: str,
        port: int,
        *,
        session_factory: Callable[[], Session] | None = None,
        name: str = "",
        tls: Certificate | None = None,
        listen_fd: int | None = None,
        cost: float = 1.0,
    ) -> tuple[str, int]:
        """Listen on one more address, with the same admission, limits and end. Before `start`.

        Args:
            host: address; one of IPv6 takes IPv6 alone, so that ``::`` and ``0.0.0.0`` go together.
            port: 0 lets the system choose one.
            session_factory: makes the sessions of what connects there. None: that of the server.
            name: what it is for, in messages.
            tls: what connects there speaks TLS with this certificate. None: it is plain.
            listen_fd: descriptor of a socket that listens already, which the server closes in the end. None: it makes
                its own.
            cost: of a connection there, see `Admission.enter`.

        Returns:
            Address and port, the one chosen where it was 0.

        Raises:
            ConfigError: the address cannot be used.
            LocalProtocolError: the server was started.
        """
        if self._started:
            raise LocalProtocolError("Server.listen() was called after the start", hint="call it before start()")
        sock = listening_socket(host, port, name) if listen_fd is None else socket_of(listen_fd)
        factory = session_factory or self._factory
        listener = Listener(sock, self, factory, name, tls, cost, getattr(factory, "__refusals__", (b"", b"")))
        self.listeners.append(listener)
        return listener.address

    def listen_all(
        self,
        name: str,
        addresses: Iterable[tuple[str, int]],
        *,
        session_factory: Callable[[], Session] | None = None,
        tls: Certificate | None = None,
        cost: float = 1.0,
    ) -> list[tuple[str, int]]:
        """Listen on the sockets that were handed to the server for `name`; if there are none, on `addresses`.

        Args:
            name: ``rtmps``, for example.
            addresses: (host, port) of each.
            session_factory: see `listen`.
            tls: see `listen`.
            cost: see `listen`.

        Returns:
            The addresses; none where there is neither.

        Raises:
            ConfigError: an address cannot be used.
            LocalProtocolError: the server was started.
        """
        handed = self._listen_fds.get(name, ())
        listen = partial(self.listen, session_factory=session_factory, name=name, tls=tls, cost=cost)
        if handed:
            return [listen("", 0, listen_fd=descriptor) for descriptor in handed]
        return [listen(host, port) for host, port in addresses]

    def _listen_first(self, name: str, hosts: tuple[str, ...], port: int, tls: Certificate | None) -> tuple[str, int]:
        """Listen where the server itself does, on the same port of each host; return the first address."""
        try:
            first = self.listen_all(name, [(hosts[0], port)], tls=tls)[0]
            if name not in self._listen_fds:
                self.listen_all(name, [(host, first[1]) for host in hosts[1:]], tls=tls)
        except BaseException:
            self.close_listeners()
            raise
        return first

    def close_listeners(self) -> None:
        """Close the sockets of a server that is not to be started; idempotent."""
        for listener in self.listeners:
            listener.close()

    def start(self) -> None:
        """Start the poll groups and accept connections; returns at once."""
        self._start_groups()
        self._start_accepting()

    def _start_groups(self) -> None:
        self._started = True
        self.groups.start()

    def _start_accepting(self) -> None:
        group = self.groups.groups[0]
        for listener in self.listeners:
            group.add_pollable(listener, listener.registration)
        if self._rebalances and len(self.groups.groups) > 1:
            group.call_soon(group.call_later, _REBALANCE_S, self._rebalance, group)

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Accept no more, end all connections with reason SHUTDOWN, stop the groups; idempotent. Any other thread.

        A call while another stops the server joins it: both wait, and the earlier of the two deadlines counts. In a
        forked child it closes the child's copies of the sockets: the server is the parent's, and goes on there.

        Args:
            deadline_s: how long to wait, 0 or more. What is queued is given half of it to go out; what has gone out
                by then, a quarter more to arrive.

        Returns:
            Whether all threads have ended.

        Raises:
            LocalProtocolError: called from a handler: its thread would wait for itself.
        """
        if self.groups.groups[0].forked:
            self._leave_to_parent()
            return True
        if any(group.in_thread() for group in self.groups.groups):
            raise LocalProtocolError(
                "Server.stop() was called on a thread of the server", hint="call it from another thread"
            )
        until = time.monotonic() + deadline_s
        with self._lock:
            first = not self._stopping.is_set()
            self._stopping.set()
            self._drain_until = min(self._drain_until, until - deadline_s / 2)
            self._arrive_until = min(self._arrive_until, until - deadline_s / 4)
        if first:
            try:
                self._before_stop(deadline_s)
                self.stop_accepting()
                self._drain()
            finally:
                self._drained.set()
        else:
            self._drained.wait(deadline_s)
        stopped = bool(self.groups.stop(max(0.0, until - time.monotonic())))
        self.close_listeners()
        if stopped:
            for connection in self.connections():  # on the way between two groups when both stopped
                connection.core.abandon("server stops")
        with self._lock:
            first, self._winding_up = not self._winding_up, True
        if first:
            try:
                self._after_stop(deadline_s)
            finally:
                self._ended.set()
                if self.on_stopped is not None:
                    self.on_stopped()
        else:
            self._ended.wait(max(0.0, until - time.monotonic()))
        return stopped

    def stop_accepting(self) -> None:
        """Take no new connections any more; those that are open go on. Any thread; idempotent."""
        for listener in self.listeners:
            with contextlib.suppress(ClosedError, LocalProtocolError):
                self.groups.groups[0].remove_pollable(listener)

    def _leave_to_parent(self) -> None:
        """Close this process's copies of all sockets, in a forked child.

        What it keeps, the kernel neither resets nor ends for the parent. No lock is taken: a thread of the parent may
        have held it at the fork.
        """
        for listener in self.listeners:
            drop_socket(listener.sock)
        for connection in list(self._connections.values()):
            drop_socket(connection.core.host.sock)

    def _before_stop(self, deadline_s: float) -> None:
        """Do what comes before the drain; for servers that have more to end. By the first call of `stop` only."""

    def _after_stop(self, deadline_s: float) -> None:
        """Do what comes after the threads have ended, or were given up; once."""

    def _drain(self) -> None:
        """Have every connection send what is queued and close; end those that have not at `_drain_until`.

        What their kernels hold then is waited for until `_arrive_until`: a group that stops closes the sockets, and a
        peer that says another word to a closed one is reset.
        """
        # Those that had ended before are on their groups alone.
        on_groups = [placement.pollable for group in self.groups.groups for placement in group.pollables()]
        asked = {one for one in on_groups if isinstance(one, ConnectionCore) and one.ending is not None}
        while True:
            for connection in self.connections():
                if connection.core not in asked:  # one may have been accepted just now
                    asked.add(connection.core)
                    connection.close_after_flush("server stops", reason=CloseReason.SHUTDOWN)
            # The kernel of one that lingers must have all that it is sent, or ours would be closed too early for it.
            left = any(not core.delivered for core in asked)
            with self._lock:
                drain_until, arrive_until = self._drain_until, self._arrive_until
            now = time.monotonic()
            if not left or now >= drain_until:
                for connection in self.connections():
                    connection.close(CloseReason.SHUTDOWN, "server stops")
            if not left or now >= arrive_until:
                return
            time.sleep(_DRAIN_LOOK_S)

    def run(self) -> None:
        """Start, serve until SIGINT or SIGTERM, or until another thread has stopped it, and stop. Main thread."""
        try:
            with EndSignals() as ended:  # outside of it, a second signal ends a stop that takes too long
                self.on_stopped = ended.end
                self.start()
                ended.wait()
        finally:
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

    @property
    def nodes(self) -> ProvenNodes:
        """Addresses of our other nodes, to which no limit per address and no penalty applies."""
        return self.admission.nodes

    @property
    def trusted_proxies(self) -> Container[str]:
        """Addresses that first say which peer they speak for."""
        return self._trusted

    # -- connections

    def connections(self) -> list[Connection]:
        """Return the open connections, oldest first. Any thread."""
        with self._lock:
            return list(self._connections.values())

    # -- what may be changed while it runs

    @property
    def limits(self) -> Limits:
        """Limits of new connections. Any thread."""
        return self._limits

    def set_limits(self, limits: Limits, settings: SenderSettings | None = None) -> None:
        """Give the Senders of all connections other limits, open ones at once. Any thread.

        Args:
            limits: for new connections and open ones. A session that set its Sender's limits itself loses them.
            settings: likewise; see `Sender.set_settings` for what stays as it was made with. None: as before.
        """
        check_type("limits", limits, Limits)
        check_type("settings", settings, SenderSettings, type(None))
        if settings is not None:
            self._settings = settings
        self._limits = limits
        for connection in self.connections():
            self._put_limits(connection, limits, settings)

    def _put_limits(self, connection: Connection, limits: Limits, settings: SenderSettings | None) -> None:
        """Put limits, and times where there are other ones, in force for an open connection."""
        connection.sender.set_limits(limits)
        if settings is not None:
            connection.sender.set_settings(settings)

    def set_bans(self, bans: BanList) -> int:
        """Keep out or limit the networks that `bans` names. Any thread.

        Open connections of banned addresses end with reason BANNED, but for those that behave (`Session.behaves`):
        others may share the address, and what breaks a limit is ended for that. A limit ends no connection.

        Args:
            bans: replaces the list of before.

        Returns:
            The number of connections that were ended.
        """
        self.admission.bans = bans
        return sum(self._end_if_banned(connection) for connection in self.connections())

    def _end_if_banned(self, connection: Connection, *, new: bool = False) -> bool:
        ban = self.admission.ban_of(connection.peer[0])
        if ban is None or ban.action is not BanAction.BAN or connection.ended is not None:
            return False
        if not new and self._behaves(connection):
            return False
        connection.close(CloseReason.BANNED, describe_ban(ban))
        self._banned(connection, ban)
        return True

    def _behaves(self, connection: Connection) -> bool:
        try:
            return connection.session.behaves()
        except BaseException as error:  # noqa: BLE001 - code of the application: one session's fault is not the list's
            self.groups.groups[0].report(f"behaves of {connection}", error)
            return True

    def _banned(self, connection: Connection, ban: Ban) -> None:
        """Note that a ban ends an open connection; for servers that keep records. Any thread."""

    def add_socket(
        self,
        sock: socket.socket,
        session: Session,
        *,
        peer: tuple[str, int] | None = None,
        first_input: bytes = b"",
        admit: bool = False,
    ) -> Connection:
        """Serve a connected socket that was not accepted here, for example one that connected out. Any thread.

        `sock` belongs to the server from now on, also if this fails.

        Args:
            sock: connected stream socket.
            session: the application's end of it.
            peer: address and port of the other end. None: ask the socket.
            first_input: what was read from it already.
            admit: whether bans and limits of admission decide on it, as on one that was accepted here.

        Raises:
            ClosedError: the server is stopping.
            LimitExceededError: admission refused it; `on_refused` was told, on this thread.
        """
        if not admit:
            return self._serve(sock, session, peer=peer, first_input=first_input)
        peer = peer or peer_name(sock)
        try:
            self._enter(self.groups.groups[0], peer)
        except LimitExceededError:
            sock.close()
            raise
        try:
            return self._serve(sock, session, peer=peer, on_released=self._on_released, first_input=first_input)
        except BaseException:
            self.admission.leave(peer[0])
            raise

    def _enter(self, group: PollGroup, peer: tuple[str, int], cost: float = 1.0) -> None:
        """Let a connection in and count it, or tell that it was refused."""
        try:
            self.admission.enter(peer[0], self.clock(), cost)
        except LimitExceededError as error:
            self._tell_refusal(group, peer, error)
            raise
        with self._lock:
            self.accepted_count += 1

    def _serve(
        self,
        sock: socket.socket,
        session: Session,
        *,
        peer: tuple[str, int] | None,
        on_released: Callable[[Connection], None] | None = None,
        first_input: bytes = b"",
    ) -> Connection:
        limits, bans = self._limits, self.admission.bans
        try:
            connection = Connection(
                sock,
                session,
                limits=limits,
                policy=self._policy,
                settings=self._settings,
                deferred=self._deferred,
                options=self._options,
                clock=self.clock,
                peer=peer,
                on_closed=self._on_closed,
                on_released=on_released,
                make_sender=self._make_sender,
                work_limits=self._work_limits,
                first_input=first_input,
            )
            with self._lock:
                self._connections[connection.number] = connection
            try:
                self.groups.place(connection.core, connection.core.host.registration)
            except BaseException:
                with self._lock:
                    self._connections.pop(connection.number, None)
                raise
        except BaseException:
            sock.close()
            raise
        # Who changed them meanwhile may have gone through the connections before this one was among them.
        try:
            if self._limits is not limits:
                self._put_limits(connection, self._limits, self._settings)
            if self.admission.bans is not bans:
                self._end_if_banned(connection, new=True)
        except BaseException as error:  # noqa: BLE001 - it is being served: its end is what gives its place back
            self.groups.groups[0].report(f"changed settings of {connection}", error)
        return connection

    def _gone(self, connection: Connection) -> None:
        figures = totals_of(connection.sender.statistics(), connection.receiver.statistics())
        reason = connection.ended[0] if connection.ended is not None else CloseReason.INTERNAL
        if connection.session.gives_back:
            self.admission.give_back(connection.peer[0], connection.session.gives_back)
        with self._lock:
            self._connections.pop(connection.number, None)
            self._closed[reason] = self._closed.get(reason, 0) + 1
            self._past += figures
            self._past_work_s += connection.work.work_s
            self._past_slowed += connection.work.slowed_count

    def _released(self, connection: Connection) -> None:
        """Free the place of an accepted connection whose socket is closed."""
        self.admission.leave(connection.peer[0])

    @property
    def closed_by_reason(self) -> dict[CloseReason, int]:
        """Connections ended so far, by reason. Any thread."""
        with self._lock:
            return dict(self._closed)

    def statistics(self) -> ServerStatistics:
        """Return figures of the whole process. Any thread; O(connections), but no lock is held for so long."""
        with self._lock:
            connections, totals, closed = list(self._connections.values()), self._past, dict(self._closed)
            work_s, slowed = self._past_work_s, self._past_slowed
        for connection in connections:
            totals += totals_of(connection.sender.statistics(), connection.receiver.statistics())
        return ServerStatistics(
            connections=len(connections),
            accepted=self.accepted_count,
            refused=self.admission.refused,
            accept_pauses=sum(listener.pauses for listener in self.listeners),
            resets=sum(listener.resets for listener in self.listeners),
            closed=closed,
            totals=totals,
            work_s=work_s + sum(connection.work.work_s for connection in connections),
            slowed=slowed + sum(connection.work.slowed_count for connection in connections),
        )

    # -- what the listeners ask

    @property
    def trusted(self) -> TrustedProxies:
        """Addresses whose connections begin with a header that says which peer they speak for."""
        return self._trusted

    def _rebalance(self, group: PollGroup) -> None:
        """Even out the threads now and then: viewers leave as they like, and placement only looks at newcomers."""
        if not self.stopping:
            group.call_later(_REBALANCE_S, self._rebalance, group)
            self.groups.rebalance()

    def _tell_refusal(self, group: PollGroup, peer: tuple[str, int], refusal: LimitExceededError) -> None:
        if self._on_refused is None:
            return
        try:
            self._on_refused(peer, refusal)
        except BaseException as error:  # noqa: BLE001 - those who connected behind this one are not to wait for it
            group.report("on_refused", error)

    def refuse(self, group: PollGroup, peer: tuple[str, int], refusal: LimitExceededError) -> None:
        """Count and report a connection that did not come as far as admission."""
        self.admission.refuse(refusal.limit)
        self._tell_refusal(group, peer, refusal)

    def admit(self, group: PollGroup, listener: Listener, sock: socket.socket, peer: tuple[str, int]) -> None:
        """Serve a connection that has come, or refuse it; called by its listener."""
        try:
            self._enter(group, peer, listener.cost)
        except LimitExceededError as refusal:
            listener.turned_away.turn_away(group, sock, peer[0], banned=refusal.limit == BANNED)
            return
        try:
            if listener.tls is not None:
                sock = listener.tls.wrap(sock)
            session = _made(listener.session_factory)
            (session.__protocol__ or session).__accepted_at__(listener.address)
            self._serve(sock, session, peer=peer, on_released=self._on_released)
        except BaseException as error:  # noqa: BLE001 - a fault of the factory must cost neither the socket nor the place
            sock.close()
            self.admission.leave(peer[0])
            # The server stops, or the peer has gone so early that its options fail: no fault to report.
            if not isinstance(error, (ClosedError, OSError)):
                group.report("session of a new connection", error)


def _made(factory: Callable[[], Session]) -> Session:
    try:
        session = factory()
    except (OSError, ClosedError) as error:  # of the application's doing: neither the socket's nor the server's
        raise LocalProtocolError(f"the session factory failed: {error!r}") from error
    if not isinstance(session, Session):
        raise LocalProtocolError(
            f"the session factory returned {type(session).__name__}, it must return a Session",
            hint="return a new object of a class derived from flowctl.Session",
        )
    return session


def _runs(make: Callable[_P, Server]) -> Callable[_P, None]:
    """Return a function that runs what `make` makes; type checkers and `help` know its arguments."""

    def serve(*args: _P.args, **settings: _P.kwargs) -> None:
        """Serve until SIGINT or SIGTERM; arguments as for `Server`. Main thread."""
        make(*args, **settings).run()

    signature = inspect.signature(make).replace(return_annotation=None)
    serve.__signature__ = signature  # type: ignore[attr-defined]  # any function may have one
    return serve


serve: Final = _runs(Server)
