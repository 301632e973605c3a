"""A node: serves commands and requests, and sends them, over connections that either side may have opened.

Theory of operation. All state belongs to the thread of one poll group; what other threads ask for is handed to it. A
message is looked up in one table by its first frame. A request of ours waits in the table of the peer that was asked,
so what another peer says about it does not count; it leaves the table before its caller is told, once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from math import inf
from random import SystemRandom
from typing import Any, Final, Self, TypeAlias

import zmq

from flowctl.core.loop.faults import ErrorHook
from flowctl.core.text.fieldtypes import check_type
from flowctl.core.text.printable import short
from flowctl.errors import ClosedError, ConfigError, LocalProtocolError, RpcError, RpcTimeoutError
from flowctl.nodes.rpc import describe
from flowctl.nodes.rpc.access.access import Access, AuthLevel, PeerIdentity
from flowctl.nodes.rpc.access.admission import Allow, RpcAdmission
from flowctl.nodes.rpc.access.logins import LoginDesk, Logins, PasswordHash
from flowctl.nodes.rpc.access.rules import key_route, refusal_code
from flowctl.nodes.rpc.access.servicenodes import ServiceNodes, checked_keys
from flowctl.nodes.rpc.arguments import Arguments, Takes
from flowctl.nodes.rpc.commands import Category, Handler, HandlerKind, RpcCommand, access_of
from flowctl.nodes.rpc.incoming import Incoming
from flowctl.nodes.rpc.jobs.batch import Batch, NodeThread, TaggedThread
from flowctl.nodes.rpc.jobs.dispatcher import Dispatcher, JobStatistics
from flowctl.nodes.rpc.jobs.slots import DEFAULT_MAX_QUEUE
from flowctl.nodes.rpc.jobs.timers import TimerID
from flowctl.nodes.rpc.message import MOST_PARTS, SERVED, Part, RpcMessage, octets, parts_of
from flowctl.nodes.rpc.peers.dialled import Dialled
from flowctl.nodes.rpc.peers.listener import RpcListener
from flowctl.nodes.rpc.peers.peer import MAX_PART_BYTES, SERVICE_NODE, ConnectionID, PendingCall, PendingCalls, RpcPeer
from flowctl.nodes.rpc.peers.reach import ANY_WAY, CONNECT_KEEP_ALIVE_S, OutgoingConnections, Reach
from flowctl.nodes.rpc.serving import Serving
from flowctl.nodes.rpc.statistics import RpcStatistics
from flowctl.nodes.rpc.wire import frames as wire
from flowctl.nodes.rpc.wire.addresses import Address, AddressTransport
from flowctl.nodes.rpc.wire.tag import MOST_CREDIT, NUMBERS, make_tag, read_tag
from flowctl.pollgroup import LoopFactory, PollGroup
from flowctl.wire.zeromq.context import new_context, shared_context
from flowctl.wire.zeromq.curve import KeyPair, dial_curve, node_keys, serve_curve
from flowctl.wire.zeromq.endpoint import check_port
from flowctl.wire.zeromq.socket import notice_dead_peers
from flowctl.wire.zeromq.zap import ZapHandler, bind_zap, zap_domain

_log: Final = logging.getLogger("flowctl.rpc")

REQUEST_TIMEOUT_S: Final = 15.0
CONNECT_TIMEOUT_S: Final = 10.0
SN_CHECK_S: Final = 0.25
"""How often idle connections to service nodes are looked for: OxenMQ's CONN_CHECK_INTERVAL."""
DEAD_AFTER_S: Final = 30
"""When a peer counts as dead whose system does not answer: as long as the heartbeats of OxenMQ wait."""
HANDSHAKE_MS: Final = 10_000
RECONNECT_MS: Final = (250, 5_000)
LINGER_S: Final = 5.0
LATE_EVERY_S: Final = 10.0
"""Least time between two warnings of answers that come too late: a peer causes them."""
STREAM_CREDIT: Final = 32
"""Items of a stream that may be on their way: enough for a network of some milliseconds, little enough to hold."""
MOST_CALLS: Final = 100_000
"""Requests that wait for one peer; each is some 700 octets."""
_SELF: Final = Address(AddressTransport.INPROC, socket="flowctl-this-node")
"""Where a node listens for itself, in its own context of ZeroMQ: nobody else can connect to there."""
NO_CONNECTION: Final = wire.DISCONNECTED
NOT_ALLOWED: Final = b"CREDIT_EXCEEDED"
"""Code of a stream whose server has sent more than it may."""
STOP_GRACE_S: Final = 1.0
"""What a stop gets beyond its deadline, to close sockets and to say which handlers it leaves behind."""

Settle: TypeAlias = Callable[[bool, list[bytes]], object]
_Raw: TypeAlias = "zmq.Socket[bytes]"


class RpcNode:
    """A node of RPC: server and client at once.

    Categories and commands are added first; then `start` runs it on a thread of its own, or ``async with`` on the
    loop of the caller, which spares every message the way between two threads. All methods may be called from any
    thread and from any callback unless they say otherwise.

    Args:
        name: of its thread, for logs.
        loop_factory: makes the loop of that thread. None: uvloop where it is installed.
        clock: monotonic seconds.
        on_error: told of every exception of a handler or callback. None: they are logged.
        keys: with which it listens and dials where that is encrypted. None: new ones.
        pubkey: instead of `keys`: the public key, 32 octets.
        privkey: the secret key that belongs to it.
        service_node: whether this is a service node, which has keys that others know it by.
        sn_lookup: returns the address of the service node with a public key, None or empty where it is not known. It
            runs on the node's thread and must not wait.

    Raises:
        ConfigError: the keys are not a pair, or a service node has none.
    """

    def __init__(
        self,
        *,
        keys: KeyPair | None = None,
        pubkey: bytes = b"",
        privkey: bytes = b"",
        service_node: bool = False,
        sn_lookup: Callable[[bytes], str | None] | None = None,
        name: str = "rpc",
        loop_factory: LoopFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_error: ErrorHook | None = None,
    ) -> None:
        #: Those with which it listens and dials.
        self.keys: Final = node_keys(keys, pubkey, privkey, known="a service node" if service_node else "")
        self._service_node: Final = service_node
        self._sn_lookup: Final = sn_lookup
        self._connections: Final = OutgoingConnections(self._sn_incoming, self._sn_address, self._sn_dial)
        self._sn_checking = False  # whether a timer for idle ones is set; node's thread
        self._name: Final = name
        self._on_error: Final = on_error
        self._clock: Final = clock
        self._group = PollGroup(name, loop_factory=loop_factory, clock=clock, on_error=on_error)
        self._started = False
        self._stopping = False
        self._context: Final = new_context()
        self._destroying: Final = threading.Lock()  # taken once, by the one that ends the context
        self._jobs: Final = Dispatcher(name, os.cpu_count() or 1)
        self._winding_up: asyncio.Task[None] | None = None  # on the node's thread
        # What has an outcome to tell and waits for the node's thread; any thread appends.
        self._undone: Final[dict[Callable[[], object], object]] = {}
        self._over = False  # nothing that is queued on the loop is sure to run
        # One for all that stop it: what another one queues when the loop has been stopped never runs.
        self._wound_up: Final[Future[None]] = Future()
        self._numbers: Final = count(SystemRandom().randrange(NUMBERS))
        self._ids: Final = count(1)
        self._categories: dict[str, Category] = {}
        self._commands: dict[bytes, RpcCommand] = {}
        self._aliases: dict[bytes, bytes] = {}
        self._own_category = False  # `rpc` was added by us
        self._middleware: list[Callable[[Handler], Handler]] = []
        self._bound: list[tuple[int, _Raw, str]] = []  # before the start
        self._zap: Final = bind_zap(self._context)
        self._service_nodes: Final = ServiceNodes()
        self._admission: Final = RpcAdmission(self._service_nodes, clock)
        # Only for the node's thread:
        self._zap_handler: ZapHandler | None = None
        self._logins: Final = Logins()
        self._login_desk: LoginDesk | None = None
        self._listeners: dict[int, RpcListener] = {}
        self._dialled: dict[int, Dialled] = {}
        self._lingering: dict[Address, float] = {}  # until when what was sent to there before may still be on its way
        self._listens_to_itself = False
        self._serving_here: Serving | None = None
        self._malformed_count = 0
        self._late_count = 0
        self._late_told_at = -inf
        self._asked_count = 0
        self._unsent_count = 0
        self._refused_counts: Counter[str] = Counter()

    # --- before start --------------------------------------------------------------------------------------------

    def add_category(
        self,
        name: str,
        access: Access | AuthLevel | str = AuthLevel.NONE,
        reserved_threads: int = 0,
        max_queue: int = DEFAULT_MAX_QUEUE,
    ) -> None:
        """Add a category of commands.

        Args:
            name: 1 to 50 octets without a dot.
            access: what its callers need; a level, or its name, is an `Access` of that level.
            reserved_threads: worker threads that are kept for it beside the general ones, 0 or more.
            max_queue: commands that may wait for a worker; 0: none, -1: any number.

        Raises:
            LocalProtocolError: the name is not allowed or taken, or the node was started.
            ConfigError: a number is out of range.
        """
        self._check_not_started("add_category")
        size = len(name.encode())
        if not name or "." in name or size > wire.MAX_CATEGORY_BYTES:
            raise LocalProtocolError(
                f"category {name!r}: a name has 1 to {wire.MAX_CATEGORY_BYTES} bytes (it has {size}) and no dot"
            )
        if name in self._categories:
            raise LocalProtocolError(f"category {name!r} was added before")
        needed = access_of(access)
        lane = self._jobs.slots.add_category(name, reserved_threads, max_queue)
        self._categories[name] = Category(name, needed, lane)

    def add_command(self, category: str, name: str, handler: Handler, *, takes: Takes | None = None) -> None:
        """Add a command: called with a `RpcMessage`; nothing is sent back but what it sends itself.

        Args:
            category: where it belongs.
            name: at most 200 octets.
            handler: a coroutine function runs on the node's loop, any other on a worker thread.
            takes: how many parts, a number or the least and the most. Or a dataclass or a model of Pydantic: then the
                one part is its JSON, which is checked, and `handler` is called with the message and the value. What
                does not fit is refused as ``WRONG_ARGUMENT``, with a text. None: the handler looks itself.

        Raises:
            LocalProtocolError: the category is not there, the name is too long or taken, `takes` is none of these, or
                the node was started.
        """
        self._add(category, name, handler, takes, is_request=False)

    def add_request_command(self, category: str, name: str, handler: Handler, *, takes: Takes | None = None) -> None:
        """Add a request command: what the handler returns is the reply; None: it answers itself, now or later.

        Raises:
            LocalProtocolError: see `add_command`.
        """
        self._add(category, name, handler, takes, is_request=True)

    def add_command_alias(self, alias: str, target: str) -> None:
        """Have ``category.command`` `alias` mean `target`, with its access. Aliases of aliases mean nothing.

        Raises:
            LocalProtocolError: `alias` has no dot, is an alias or a command already, or the node was started.
        """
        self._check_not_started("add_command_alias")
        source = alias.encode()
        if wire.split_name(source) is None:
            raise LocalProtocolError(f"alias {alias!r} must be category.command, at most {wire.MAX_NAME_BYTES} bytes")
        if source in self._aliases:
            raise LocalProtocolError(f"alias {alias!r} was added before")
        if source in self._commands:
            raise LocalProtocolError(f"alias {alias!r} is the name of a command, which it would hide")
        self._aliases[source] = target.encode()

    def _add(self, category: str, name: str, handler: Handler, takes: Takes | None, *, is_request: bool) -> None:
        self._check_not_started("add_command")
        owner = self._categories.get(category)
        if owner is None:
            raise LocalProtocolError(f"category {category!r} was not added", hint="call add_category() first")
        size = len(name.encode())
        if size > wire.MAX_COMMAND_BYTES:
            raise LocalProtocolError(f"command {name!r} has {size} bytes, at most {wire.MAX_COMMAND_BYTES} are allowed")
        full = f"{category}.{name}".encode()
        if full in self._commands:
            raise LocalProtocolError(f"command {full.decode()!r} was added before")
        if full in self._aliases:
            raise LocalProtocolError(f"command {full.decode()!r} is the name of an alias, which would hide it")
        if not callable(handler):
            raise LocalProtocolError(f"the handler of {full.decode()!r} cannot be called")
        shown = None
        if takes is not None:
            arguments = Arguments(full.decode(), takes)
            handler, shown = arguments.checked(handler), arguments.shown
        command = RpcCommand(owner, handler, is_request=is_request, takes=shown)
        if command.kind is HandlerKind.STREAM and not is_request:
            raise LocalProtocolError(f"{full.decode()!r} is a command: there is nobody to take what its handler yields")
        self._commands[full] = command

    def add_login(self, user: str, password: str | PasswordHash, level: AuthLevel) -> None:
        """Add a user who may log in: ``rpc.login`` with name and password gives that connection, and no other, a level.

        The password is kept as a hash with a salt (scrypt), and of each login only the outcome is told.

        Args:
            user: 1 to 128 octets.
            password: 1 to 1024 octets, hashed here, which takes as long as a login; or its hash.
            level: BASIC or ADMIN.

        Raises:
            ConfigError: one of them is not allowed, or the user was added before.
            LocalProtocolError: the node was started.
        """
        self._check_not_started("add_login")
        stored = password if isinstance(password, PasswordHash) else PasswordHash.of(password)
        self._logins.add(user, stored, level)
        if len(self._logins) == 1:
            if describe.CATEGORY not in self._categories:
                self.add_category(describe.CATEGORY)
                self._own_category = True
            self.add_request_command("rpc", "login", self._login)

    async def _login(self, message: RpcMessage) -> bytes | None:
        """Answer ``rpc.login`` [user, password] with the level that it gives."""
        peer, desk = message.peer, self._login_desk
        if len(message.data) != 2 or desk is None:
            self._refuse_login(message, b"it takes user and password")
            return None
        if not peer.conn.route:  # it comes again by itself, and then another may answer
            self._refuse_login(message, b"only those who have connected to this node may log in")
            return None
        told: asyncio.Future[AuthLevel | None] = self._group.loop.create_future()
        user, password = message.data
        connection = (peer.conn.id, peer.key)
        if not desk.login(connection, peer.identity.address, user, password, partial(_set_result, told)):
            self._refuse_login(message, b"too many tries, or too many at once")
            return None
        level = await told
        if level is None:
            self._refuse_login(message, b"wrong user or password")
            return None
        identity = peer.identity
        peer.identity = replace(identity, auth=max(identity.auth, level))
        return peer.identity.auth.name.lower().encode()

    def _refuse_login(self, message: RpcMessage, why: bytes) -> None:
        if message.tag is not None:
            self._send_to(message.peer, wire.failure(wire.FORBIDDEN, message.tag, why))

    def add_middleware(self, wrap: Callable[[Handler], Handler]) -> None:
        """Have every handler wrapped at the start; before start. The first that is added is the outermost.

        Args:
            wrap: given a handler, returns one that is called in its place, with the same `RpcMessage`, and returns what
                that is to return. A coroutine function for a coroutine function, and so on: what it returns decides
                where it runs. It sees what may run, and not what is refused.

        Raises:
            LocalProtocolError: the node was started.
        """
        self._check_not_started("add_middleware")
        self._middleware.append(wrap)

    def set_general_threads(self, count: int) -> None:
        """Set how many worker threads handlers share, 1 or more; before start. Else: one per core.

        Raises:
            LocalProtocolError: the node was started.
            ConfigError: out of range.
        """
        self._check_not_started("set_general_threads")
        self._jobs.slots.set_threads(general=count)

    def set_batch_threads(self, count: int) -> None:
        """Set how many threads are reserved for batch jobs and timers; -1: half of the general ones. Else as there."""
        self._check_not_started("set_batch_threads")
        self._jobs.slots.set_threads(batch=count)

    def set_reply_threads(self, count: int) -> None:
        """Set how many are reserved for callbacks of replies; -1: an eighth of the general ones. Else as there."""
        self._check_not_started("set_reply_threads")
        self._jobs.slots.set_threads(reply=count)

    def add_tagged_thread(self, name: str, start: Callable[[], object] | None = None) -> TaggedThread:
        """Add a thread of its own for jobs that must run one at a time, in order; before start.

        Args:
            name: not empty, and of no other tagged thread.
            start: called on the thread before any job.

        Returns:
            What `batch`, `job` and `add_timer` take as `thread`.

        Raises:
            LocalProtocolError: the node was started.
            ConfigError: the name is empty or taken, or there are too many.
        """
        self._check_not_started("add_tagged_thread")
        return self._jobs.add_tagged_thread(name, start)

    def _check_not_started(self, what: str) -> None:
        if self._started:
            raise LocalProtocolError(f"{what} after start", hint="set up a node wholly, then start it")

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the node on a thread of its own; returns when it runs.

        Raises:
            LocalProtocolError: it was started before.
        """
        self._check_not_started("start")
        self._prepare()
        self._group.start()
        self._group.call_soon(self._begin)

    async def __aenter__(self) -> Self:
        """Run the node on the running loop."""
        self._check_not_started("start")
        self._prepare()
        self._group = PollGroup.on_running_loop(self._name, clock=self._clock, on_error=self._on_error)
        self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop it."""
        await self._end_soon(LINGER_S)
        self._group.stop()
        self._fail_undone()
        self._jobs.join(0.0)
        await asyncio.to_thread(self._destroy)  # which waits for what lingers

    def stop(self, deadline_s: float = 5.0) -> bool:
        """End the node: handlers on the loop are cancelled, those on threads waited for, and nothing new starts.

        Requests that wait fail with ``SHUTTING_DOWN``; what was sent is flushed. A handler that has not ended in time
        is reported and left behind on its thread. Called from a handler or callback it only sets the end going;
        in a forked child it does nothing.

        Args:
            deadline_s: how long to wait at most.

        Returns:
            Whether all has ended.
        """
        if self._group.forked:
            return True  # the node is the parent's
        if self._group.in_thread() or self._jobs.in_worker():
            # What ends it has to wait for this very thread.
            threading.Thread(target=self.stop, args=(deadline_s,), name=f"{self._name} stop", daemon=True).start()
            return False
        if self._destroying.locked():
            return self._jobs.join(deadline_s)
        if not self._started:
            self._started = True
            for _, raw, _ in self._bound:
                raw.close(0)
            self._destroy()
            return True
        ends_at = time.monotonic() + deadline_s
        self._stopping = True  # from now on nothing more is asked, so that what is queued has an end
        with suppress(ClosedError):
            self._group.call_soon(self._end_soon, deadline_s)
            with suppress(TimeoutError):
                self._wound_up.result(deadline_s + STOP_GRACE_S)
        left_s = max(STOP_GRACE_S, ends_at - time.monotonic())
        ended = self._group.stop(left_s)
        if ended:
            self._fail_undone()
            self._destroy()
        return self._jobs.join(max(0.0, ends_at - time.monotonic())) and ended

    def _destroy(self) -> None:
        """End the context, once."""
        if self._destroying.acquire(blocking=False):
            self._context.destroy(linger=0)

    def _end_soon(self, deadline_s: float) -> asyncio.Task[None]:
        """Return the task that winds up, which the first call begins."""
        if self._winding_up is None:
            self._winding_up = self._group.loop.create_task(self._wind_up(deadline_s))
            self._winding_up.add_done_callback(lambda _: self._wound_up.set_result(None))
        return self._winding_up

    def _prepare(self) -> None:
        self._describe()
        for alias in self._aliases.keys() & self._commands.keys():  # one that every node has
            raise LocalProtocolError(f"alias {alias.decode()!r} is the name of a command, which it would hide")
        wrapped = dict(self._commands)
        for wrap in reversed(self._middleware):
            for name, command in wrapped.items():
                handler = wrap(command.handler)
                wrapped[name] = RpcCommand(
                    command.category, handler, is_request=command.is_request, takes=command.takes
                )
        self._commands.update(wrapped)
        self._started = True  # not where a middleware has raised
        # Looked up before any is entered: an alias of an alias means nothing, in whatever order they were added.
        targets = {alias: self._commands.get(target) for alias, target in self._aliases.items()}
        for alias, target in targets.items():
            if target is None:
                _log.warning("alias %s means %s, which is no command", alias.decode(), self._aliases[alias].decode())
            else:
                self._commands[alias] = target

    def _describe(self) -> None:
        """Add `rpc.describe`, unless the application has a category of that name."""
        if describe.CATEGORY not in self._categories:
            self._categories[describe.CATEGORY] = Category(
                describe.CATEGORY, Access(), self._jobs.slots.add_category(describe.CATEGORY, 0, 0)
            )
        elif not self._own_category:
            return

        async def what_you_may_call(message: RpcMessage) -> str:
            """Return the commands that you may call, as JSON."""
            mine = {name: item for name, item in self._commands.items() if not self._refused(item, message.peer, b"")}
            return describe.described(mine, self._aliases)

        category = self._categories[describe.CATEGORY]
        name = f"{describe.CATEGORY}.{describe.COMMAND}".encode()
        self._commands[name] = RpcCommand(category, what_you_may_call, is_request=True)

    def _begin(self) -> None:
        self._jobs.start(self._group)
        self._zap_handler = ZapHandler(self._group, self._zap, self._admission.decide)
        self._login_desk = LoginDesk(self._group, self._logins)
        self._serving_here = Serving(self._group, self._jobs, self._send_to)
        for bound in self._bound:
            self._open(*bound)
        self._bound.clear()

    async def _wind_up(self, deadline_s: float) -> None:
        self._stopping = True
        jobs_ended = self._group.loop.create_future()
        self._jobs.close(partial(_set_result, jobs_ended, None))
        self._serving.stop()
        await asyncio.wait([jobs_ended, *self._serving.tasks], timeout=deadline_s)
        if not jobs_ended.done():
            for left in self._jobs.unfinished():
                self._group.report(
                    "stop", LocalProtocolError(f"{left} has not ended within {deadline_s:g} s and is left behind")
                )
        for listener in list(self._listeners.values()):
            for peer in list(listener.routes.values()):
                if listener.is_inproc:
                    self._send_to(peer, [wire.BYE])
                self._forget(peer, wire.SHUTTING_DOWN)
            listener.close(LINGER_S)
        if self._zap_handler is not None:
            self._zap_handler.close()
        if self._login_desk is not None:
            self._login_desk.close()
        for dialled in list(self._dialled.values()):
            self._hang_up(dialled, "the node was stopped", code=wire.SHUTTING_DOWN, linger_s=LINGER_S)

    # --- listening and connecting --------------------------------------------------------------------------------

    def listen_plain(
        self,
        address: str,
        allow: AuthLevel | Allow = AuthLevel.NONE,
        on_bind: Callable[[bool], object] | None = None,
    ) -> str:
        """Listen without encryption, before or after start.

        Args:
            address: of ZeroMQ: ``tcp://127.0.0.1:5000`` (port ``*``: any), ``ipc://path``, ``inproc://name``.
            allow: what those who connect may call; or what decides it for each of them, given its address, its public
                key (empty: it has proven none), and whether that is an active service node. It runs on the node's
                thread and must not wait; None, `AuthLevel.DENIED` and exceptions deny.
            on_bind: told whether it could be bound; failure is then not raised.

        Returns:
            The address that was bound.

        Raises:
            ClosedError: the node was stopped.
            ConfigError: its port is out of range, or `allow` is none of these.
            OSError: it cannot be bound.
        """
        return self._listen(address, allow, on_bind, curve=False)

    def listen_curve(
        self,
        address: str,
        allow: AuthLevel | Allow = AuthLevel.NONE,
        on_bind: Callable[[bool], object] | None = None,
    ) -> str:
        """Listen for encrypted connections, before or after start; else as `listen_plain`.

        A peer has to know this node's public key (``node.keys.public``), and proves one of its own.
        """
        return self._listen(address, allow, on_bind, curve=True)

    def _listen(
        self, address: str, allow: AuthLevel | Allow, on_bind: Callable[[bool], object] | None, *, curve: bool
    ) -> str:
        check_port(address)
        number = next(self._ids)
        raw = self._new_socket(zmq.ROUTER, address)
        raw.set(zmq.ROUTER_HANDOVER, 1)
        raw.set(zmq.ROUTER_MANDATORY, 1)
        raw.set(zmq.ZAP_DOMAIN, zap_domain(number))
        if curve:
            serve_curve(raw, self.keys)
        # Before it is bound: the first connection may come before the next line. One item of a dict is set at once.
        try:
            self._admission.open(number, curve=curve, allow=allow)
        except ConfigError:
            raw.close(0)
            raise
        try:
            raw.bind(address)
        except zmq.ZMQError as error:
            self._admission.close(number)
            raw.close(0)
            if on_bind is not None:
                on_bind(False)
                return address
            raise OSError(error.errno, f"cannot listen on {short(address)}: {error.strerror}") from error
        bound = raw.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._started:
            self._do(self._open, number, raw, address)
        else:
            self._bound.append((number, raw, address))
        if on_bind is not None:
            on_bind(True)
        return bound

    def set_active_sns(self, pubkeys: Iterable[bytes]) -> None:
        """Replace the set of active service nodes, from the next message on; any thread, before and after start.

        Args:
            pubkeys: public keys of 32 octets.

        Raises:
            ConfigError: one of them is none; then nothing changes.
        """
        self._sn_removed(self._service_nodes.replace(checked_keys(pubkeys, "set_active_sns")))

    def update_active_sns(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Add service nodes to those that are active, and remove some; one that is in both is added.

        Raises:
            ConfigError: see `set_active_sns`.
        """
        keys = [checked_keys(pubkeys, "update_active_sns") for pubkeys in (added, removed)]
        self._sn_removed(self._service_nodes.update(*keys))

    def service_node(self, pubkey: bytes, reach: Reach = ANY_WAY) -> ConnectionID:
        """Return what names a service node by its public key, over a connection that is there or a new one.

        A new one is opened by the first message, and ends when nothing goes over it any more.

        Args:
            pubkey: 32 octets.
            reach: by which connections.

        Raises:
            ConfigError: it is no public key.
        """
        checked_keys([pubkey], "service_node")
        return ConnectionID(SERVICE_NODE, pubkey=pubkey, service_node=True, reach=reach)

    def _named(self, conn: ConnectionID | bytes) -> ConnectionID:
        return conn if isinstance(conn, ConnectionID) else self.service_node(conn)

    def connect_sn(self, pubkey: bytes, keep_alive_s: float = CONNECT_KEEP_ALIVE_S, hint: str = "") -> ConnectionID:
        """Open a connection to a service node, unless there is one; see `service_node`.

        Args:
            pubkey: 32 octets.
            keep_alive_s: how long it is kept when nothing goes over it, in seconds.
            hint: its address, instead of looking it up.

        Returns:
            What names it.
        """
        conn = self.service_node(pubkey, Reach(keep_alive_s=keep_alive_s, hint=hint))
        self._do(self._find, conn)
        return conn

    def _sn_removed(self, gone: frozenset[bytes]) -> None:
        """Close the connections that we opened to those who are no service nodes any more."""
        if gone and self._started:
            self._do(self._sn_close, lambda: self._connections.take(gone))

    def _sn_close(self, take: Callable[[], list[RpcPeer]]) -> None:
        for peer in take():
            dialled = self._dialled.get(peer.conn.id)
            if dialled is not None:
                self._hang_up(dialled, "not needed any more", code=wire.DISCONNECTED, linger_s=LINGER_S)

    def _sn_incoming(self, pubkey: bytes) -> RpcPeer | None:
        found = (listener.by_pubkey.get(pubkey) for listener in self._listeners.values())
        return next((peer for peer in found if peer is not None), None)

    def _sn_address(self, pubkey: bytes) -> str:
        if self._sn_lookup is None:
            return ""
        try:
            address = self._sn_lookup(pubkey) or ""
            check_type("the address that sn_lookup returned", address, str)
        except BaseException as error:  # noqa: BLE001  (a hook's fault is that the address is not known)
            self._group.report("looking up a service node", error)
            return ""
        return address

    def _sn_dial(self, pubkey: bytes, address: str) -> RpcPeer | None:
        try:
            to = Address.parse(address).with_pubkey(pubkey)
        except ConfigError as error:
            self._group.report("the address of a service node", error)
            return None
        conn = ConnectionID(next(self._ids), pubkey=pubkey, service_node=True)
        self._dial(conn, to, CONNECT_TIMEOUT_S, AuthLevel.NONE, False, _nothing, _nothing)
        dialled = self._dialled.get(conn.id)
        if dialled is None:
            return None
        if not self._sn_checking:
            self._sn_checking = True
            self._group.call_later(SN_CHECK_S, self._sn_check)
        return dialled.peer

    def _sn_check(self) -> None:
        """Close what was idle for too long; look again as long as there is one."""
        now = self._clock()
        for dialled in self._dialled.values():
            if dialled.heard:
                dialled.heard = False
                self._connections.active(dialled.peer.conn.pubkey, now)
        self._sn_close(partial(self._connections.take_idle, now))
        self._sn_checking = bool(len(self._connections)) and not self._stopping
        if self._sn_checking:
            self._group.call_later(SN_CHECK_S, self._sn_check)

    def connect_remote(
        self,
        address: str,
        on_connect: Callable[[ConnectionID], object] | None = None,
        on_failure: Callable[[ConnectionID, str], object] | None = None,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        auth: AuthLevel = AuthLevel.NONE,
        ephemeral_routing_id: bool = False,
    ) -> ConnectionID:
        """Connect to a listener.

        Args:
            address: where it listens, and where that is encrypted its key: ``tcp://host:port``, ``ipc://path``,
                ``inproc://name``, ``curve://host:port/KEY``, ``ipc+curve://path/KEY``.
            on_connect: called when it has answered. Neither this nor `on_failure`: wait for it.
            on_failure: called, with why, when it has not answered in time.
            timeout_s: how long to wait for its answer, in seconds.
            auth: what it may call here.
            ephemeral_routing_id: whether the listener is to know this connection by an id of ZeroMQ's own, and not by
                that of this node, of which it knows one connection: the last. A second connection to the same address
                has one of ZeroMQ's own anyway.

        Returns:
            The connection; with callbacks, one that is not yet there.

        Raises:
            ConfigError: the address is none.
            LocalProtocolError: asked to wait on the node's own thread.
            RpcError: it has not answered; only without callbacks.
        """
        _check_timeout(timeout_s)
        to = Address.parse(address)
        conn = ConnectionID(next(self._ids), pubkey=to.pubkey)
        dial = partial(self._dial, conn, to, timeout_s, auth, ephemeral_routing_id)
        if on_connect is not None or on_failure is not None:
            ready, failed = (partial(self._call_back, callback or _nothing) for callback in (on_connect, on_failure))
            self._do_or_fail(dial, ready, failed)
            return conn
        if self._group.in_thread():
            raise LocalProtocolError(
                "connect_remote() would wait on the node's own thread", hint="await connect(), or give callbacks"
            )
        done: Future[ConnectionID] = Future()
        self._do_or_fail(dial, done.set_result, partial(_refuse, done, address))
        return done.result()

    async def connect(
        self,
        address: str,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        auth: AuthLevel = AuthLevel.NONE,
        ephemeral_routing_id: bool = False,
    ) -> ConnectionID:
        """Connect to a listener; see `connect_remote`.

        Raises:
            ConfigError: the address is none.
            RpcError: it has not answered in time.
        """
        done: Future[ConnectionID] = Future()
        _check_timeout(timeout_s)
        to = Address.parse(address)
        conn = ConnectionID(next(self._ids), pubkey=to.pubkey)
        dial = partial(self._dial, conn, to, timeout_s, auth, ephemeral_routing_id)
        self._do_or_fail(dial, partial(_connected, done), partial(_refuse, done, address))
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            with suppress(ClosedError):
                self.disconnect(conn, 0.0)
            raise

    def connect_inproc(
        self,
        on_connect: Callable[[ConnectionID], object] | None = None,
        on_failure: Callable[[ConnectionID, str], object] | None = None,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        auth: AuthLevel = AuthLevel.ADMIN,
    ) -> ConnectionID:
        """Connect this node to itself, to call its own commands, at the level ADMIN; it need not listen anywhere.

        Args:
            on_connect: called when it is connected. What is sent before that is not lost.
            on_failure: called, with why, if the node was stopped first.
            timeout_s: for how long to try, in seconds.
            auth: what a handler may call back over it.

        Returns:
            The connection, at once and on any thread.
        """
        _check_timeout(timeout_s)
        conn = ConnectionID(next(self._ids))
        told = (partial(self._call_back, callback or _nothing) for callback in (on_connect, on_failure))
        self._do_or_fail(self._dial_self, conn, timeout_s, auth, *told)
        return conn

    def _dial_self(self, conn: ConnectionID, timeout_s: float, auth: AuthLevel, *told: Callable[..., object]) -> None:
        if not (self._listens_to_itself or self._stopping):
            self._listens_to_itself = True
            self._listen(_SELF.zmq_address, AuthLevel.ADMIN, None, curve=False)
        self._dial(conn, _SELF, timeout_s, auth, False, *told)

    def disconnect(self, conn: ConnectionID | bytes, linger_s: float = 1.0) -> None:
        """Close a connection; what was sent goes on being sent for `linger_s` seconds. Not there: nothing happens.

        Of a service node, that which we have opened, or else that which it has; the next message opens another.
        """
        self._do(self._disconnect, self._named(conn), linger_s)

    def _new_socket(self, kind: int, address: str) -> _Raw:
        if self._destroying.locked():
            raise ClosedError("the node was stopped")
        shared = _is_inproc(address) and address != _SELF.zmq_address
        raw = (shared_context() if shared else self._context).socket(kind)
        raw.set(zmq.IPV6, "[" in address)  # of IPv6, and only there: a name has one meaning everywhere else
        raw.set(zmq.MAXMSGSIZE, MAX_PART_BYTES)
        notice_dead_peers(raw, DEAD_AFTER_S)
        raw.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        return raw

    def _open(self, number: int, raw: _Raw, address: str) -> None:
        """Begin to receive from a socket that was bound."""
        if self._stopping:
            raw.close(0)
            return
        inproc = partial(self._admission.decide_inproc, number) if _is_inproc(address) else None
        self._listeners[number] = RpcListener(
            self._group,
            raw,
            number,
            admit_inproc=inproc,
            received=self._received,
            gone=self._lost,
            due=self._calls_due,
        )

    def _dial(
        self,
        conn: ConnectionID,
        address: Address,
        timeout_s: float,
        auth: AuthLevel,
        ephemeral: bool,  # noqa: FBT001  (given by position, to be called later)
        ready: Callable[[ConnectionID], object],
        failed: Callable[[ConnectionID, str], object],
    ) -> None:
        if self._stopping:
            failed(conn, "the node was stopped")
            return
        raw = self._new_socket(zmq.DEALER, address.zmq_address)
        if address.curve:
            dial_curve(raw, self.keys, address.pubkey)
        now = self._clock()
        self._lingering = {other: until for other, until in self._lingering.items() if until > now}
        # A route that is taken over ends the connection that has it, and what is on its way by that.
        taken = {*self._lingering, *(other.address for other in self._dialled.values())}
        if not (ephemeral or address in taken):
            raw.set(zmq.ROUTING_ID, key_route(self.keys.public))
        raw.set(zmq.RECONNECT_IVL, RECONNECT_MS[0])
        raw.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
        try:
            raw.connect(address.zmq_address)
        except zmq.ZMQError as error:
            raw.close(0)
            self._call(failed, conn, f"cannot connect to {address}: {error}")
            return
        dialled = self._dialled[conn.id] = Dialled(
            self._group,
            raw,
            conn,
            address,
            PeerIdentity(address.pubkey, auth),
            ready=ready,
            failed=failed,
            received=self._received,
            lost=self._lost,
            due=self._calls_due,
        )
        self._group.call_later(timeout_s, self._not_answered, dialled)

    def _not_answered(self, dialled: Dialled) -> None:
        if not dialled.ready:
            self._hang_up(dialled, "connection attempt timed out", code=wire.DISCONNECTED)

    def _hang_up(self, dialled: Dialled, why: str, *, code: bytes, linger_s: float = 0.0) -> None:
        """Close a connection that we opened; tell who waits for it, or because of it."""
        peer = dialled.peer
        if self._dialled.pop(peer.conn.id, None) is None:
            return
        if _is_inproc(dialled.address.zmq_address):
            self._send_to(peer, [wire.BYE])
        if linger_s:
            self._lingering[dialled.address] = self._clock() + linger_s
        failed = dialled.close(linger_s)
        self._forget(peer, code)
        if failed is not None:
            self._call(failed, peer.conn, why)

    def _lost(self, peer: RpcPeer) -> None:
        """Act on the end of a connection; one that we opened comes again."""
        if peer.conn.route:
            self._forget(peer, wire.DISCONNECTED)
        else:
            self._give_up(peer, wire.DISCONNECTED)

    def _disconnect(self, conn: ConnectionID, linger_s: float) -> None:
        peer = self._there(conn)
        dialled = None if peer is None else self._dialled.get(peer.conn.id)
        if dialled is not None:
            self._hang_up(dialled, "disconnected", code=wire.DISCONNECTED, linger_s=linger_s)
        elif peer is not None:
            with suppress(zmq.ZMQError):
                peer.send([wire.BYE])
            self._forget(peer, wire.DISCONNECTED)
        else:
            to = f"to service node {conn.pubkey.hex()}" if conn.id == SERVICE_NODE else conn.id
            _log.warning("disconnect: there is no connection %s", to)

    def _forget(self, peer: RpcPeer, code: bytes) -> None:
        """Drop a peer: its requests here are cancelled, ours to it fail."""
        peer.closed = True
        self._connections.forget(peer.conn.pubkey, peer)
        listener = self._listeners.get(peer.conn.id)
        if listener is not None:
            listener.forget(peer)
        self._give_up(peer, code)

    def _give_up(self, peer: RpcPeer, code: bytes) -> None:
        """Cancel what runs for a peer; requests to it fail."""
        if peer.identity.pubkey not in self._service_nodes:  # whose reply finds another connection
            for running in list(peer.running.values()):
                running.cancel()
        if peer.calls is not None:
            self._group.deadlines.remove(peer)
            peer.due = inf
            for call in peer.calls.take_all():
                self._call(call.settle, False, [code])

    def now(self) -> float:
        """Return seconds on the node's clock; any thread."""
        return self._clock()

    def name_of(self, peer: RpcPeer) -> ConnectionID:
        """Return what names a peer, as the service node that it may be at this moment; for `RpcMessage`."""
        conn = peer.conn
        return replace(conn, service_node=True) if conn.pubkey in self._service_nodes else conn

    def _find(self, conn: ConnectionID) -> RpcPeer | None:
        if conn.id == SERVICE_NODE:
            return self._connections.find(conn.pubkey, conn.reach, self._clock())
        peer = self._there(conn)
        if peer is None and (conn.service_node or (conn.route and conn.pubkey in self._service_nodes)):
            # Strong: by whatever connection there is, or a new one.
            peer = self._connections.find(conn.pubkey, ANY_WAY, self._clock())
        return peer

    def _there(self, conn: ConnectionID) -> RpcPeer | None:
        """Return who is meant, if there is such a connection; none is opened, and none stands for another."""
        if conn.id == SERVICE_NODE:
            peer = None if conn.reach.incoming else self._connections.get(conn.pubkey)
            return peer or (None if conn.reach.outgoing else self._sn_incoming(conn.pubkey))
        dialled = self._dialled.get(conn.id)
        if dialled is not None:
            return dialled.peer
        listener = self._listeners.get(conn.id)
        peer = None if listener is None else listener.routes.get(conn.route)
        if peer is not None and peer.conn.pubkey != conn.pubkey:
            peer = None  # another has taken the routing id since
        return peer

    # --- sending -------------------------------------------------------------------------------------------------

    def send(
        self,
        conn: ConnectionID | bytes,
        command: str,
        *parts: Part,
        queue_full: Callable[[], object] | None = None,
        queue_failure: Callable[[str], object] | None = None,
    ) -> None:
        """Send a command. What cannot be sent is dropped, and counted.

        Args:
            conn: to whom; the public key of a service node stands for `service_node` of it.
            command: ``category.command``.
            parts: text is sent as UTF-8.
            queue_full: called, on a worker thread, if too much waits for that peer already.
            queue_failure: called with why, on a worker thread, if it cannot be sent for another reason: there is no
                such connection.

        Raises:
            LocalProtocolError: a part is neither text nor octets, or too long, or the node was not started.
            ClosedError: the node was stopped.
        """
        to = self._named(conn)
        self._do(self._send, to, _checked(to, command, parts), queue_full, queue_failure)

    def request(
        self,
        conn: ConnectionID | bytes,
        command: str,
        *parts: Part,
        on_reply: Settle,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """Send a request.

        Args:
            conn: to whom; the public key of a service node stands for `service_node` of it.
            command: ``category.command``.
            parts: text is sent as UTF-8.
            on_reply: called once, on a worker thread, with True and the parts of the reply, or with False and the code
                of the failure (``b"TIMEOUT"``) and maybe a text.
            timeout_s: how long to wait for the reply, in seconds; the server is told. Asked by a handler, it is no
                longer than its own caller still waits, until that has its answer.

        Raises:
            LocalProtocolError: a part is neither text nor octets, or too long, or the node was not started.
            ClosedError: the node was stopped.
        """
        self._ask(self._named(conn), command, parts, partial(self._call_back, _served(on_reply)), timeout_s)

    def request_future(
        self, conn: ConnectionID | bytes, command: str, *parts: Part, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> RequestFuture:
        """Send a request; see `request`.

        Returns:
            What ``get()`` waits for, on another thread than the node's.
        """
        future = RequestFuture(self._group.in_thread)
        self._ask(self._named(conn), command, parts, partial(_settle, future, command), timeout_s)
        return future

    async def call(
        self, conn: ConnectionID | bytes, command: str, *parts: Part, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> list[bytes]:
        """Send a request and wait for its reply; on any loop. Cancelled, it has the server cancel its handler.

        Returns:
            The parts of the reply.

        Raises:
            RpcTimeoutError: the deadline passed.
            RpcError: it failed; its `code` says how.
        """
        to = self._named(conn)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[bool, list[bytes]]] = loop.create_future()
        here = self._group.in_thread()

        def settle(ok: bool, data: list[bytes]) -> None:  # noqa: FBT001  (see `Settle`)
            if here:
                if not future.done():
                    future.set_result((ok, data))
            else:
                with suppress(RuntimeError):  # the caller's loop is closed
                    loop.call_soon_threadsafe(_set_result, future, (ok, data))

        asked = self._ask(to, command, parts, settle, timeout_s)
        try:
            ok, data = await future
        except asyncio.CancelledError:
            with suppress(ClosedError):
                self._do(self._withdraw, asked)
            raise
        if ok:
            return data
        raise failure_of(command, data)

    async def stream(
        self,
        conn: ConnectionID | bytes,
        command: str,
        *parts: Part,
        timeout_s: float = inf,
        credit: int = STREAM_CREDIT,
    ) -> AsyncIterator[list[bytes]]:
        """Send a request whose handler yields; on any loop: ``async for parts in node.stream(...)``.

        No more items come than were allowed, so a slow taker costs the server nothing. Left early, it has the server
        end the handler (at once with `contextlib.aclosing`).

        Args:
            conn: to whom; the public key of a service node stands for `service_node` of it.
            command: ``category.command``.
            parts: text is sent as UTF-8.
            timeout_s: how long the whole stream may take, in seconds; infinite: any time.
            credit: items that may wait here, 1 to 255.

        Yields:
            The parts of each item. A reply of parts, by a handler that does not yield, is one item.

        Raises:
            LocalProtocolError: `credit` is out of range.
            RpcTimeoutError: the deadline passed.
            RpcError: it failed; its `code` says how. Items that came before were yielded.
        """
        if not 1 <= credit <= MOST_CREDIT:
            raise LocalProtocolError(f"credit is {credit}, it must be 1 to {MOST_CREDIT}")
        incoming = Incoming(asyncio.get_running_loop(), here=self._group.in_thread(), credit=credit)
        to = self._named(conn)
        asked = self._ask(to, command, parts, incoming.end, timeout_s, credit, incoming.put)
        taken = 0
        try:
            while (item := await incoming.take()) is not None:
                yield item
                taken += 1
                if 2 * taken >= credit and not incoming.ended:
                    self._do(self._give_credit, asked, taken, incoming)
                    taken = 0
        finally:
            if not incoming.ended:
                with suppress(ClosedError):
                    self._do(self._withdraw, asked)
        if incoming.failure is not None:
            raise failure_of(command, incoming.failure)

    def _ask(
        self,
        conn: ConnectionID,
        command: str,
        parts: tuple[Part, ...],
        settle: Settle,
        timeout_s: float,
        credit: int = 0,
        item: Callable[[list[bytes]], bool] | None = None,
    ) -> PendingCall:
        """Send a request, on whatever thread; of a handler, with at most the time that its own caller still waits."""
        _check_timeout(timeout_s)
        served = SERVED.get()
        if served is not None:
            timeout_s = min(timeout_s, served.left_s())
        tag = make_tag(next(self._numbers) % NUMBERS, timeout_s, credit)
        name, *checked = _checked(conn, command, parts)
        frames = [name, tag, *checked]
        call = PendingCall(tag, name, settle, item)
        self._do_or_fail(self._request, conn, frames, call, timeout_s)
        return call

    def send_reply(self, message: RpcMessage, parts: tuple[Part, ...]) -> None:
        """Answer a request, if it was not answered; for `RpcMessage`."""
        frames = [wire.REPLY, message.tag or b"", *parts_of(parts, message.peer.conn.most_part_bytes)]
        self._do(self._reply, message, frames)

    def _reply(self, message: RpcMessage, frames: list[bytes]) -> None:
        if message.answer_once():
            self._send_to(message.peer, frames)

    def _send(
        self,
        conn: ConnectionID,
        frames: list[bytes],
        queue_full: Callable[[], object] | None,
        queue_failure: Callable[[str], object] | None,
    ) -> None:
        peer = self._find(conn)
        problem = NO_CONNECTION if peer is None else self._try_to_send(peer, frames)
        if problem is wire.QUEUE_FULL and queue_full is not None:
            self._call_back(queue_full)
        elif problem is NO_CONNECTION and queue_failure is not None:
            self._call_back(queue_failure, "there is no such connection")

    def _send_to(self, peer: RpcPeer, frames: Sequence[bytes]) -> bool:
        """Send what nobody waits for; return whether it could be."""
        return self._try_to_send(peer, frames) is None

    def _try_to_send(self, peer: RpcPeer, frames: Sequence[bytes]) -> bytes | None:
        """Send a message; return the code for why it could not be, None if it could."""
        if peer.closed:
            # What was meant for a connection goes to no other one, but of a service node, which is known by its key.
            other = self._find(peer.conn) if peer.conn.pubkey in self._service_nodes else None
            return NO_CONNECTION if other is None or other.closed else self._try_to_send(other, frames)
        try:
            peer.send(frames)
        except zmq.Again:
            self._unsent_count += 1
            return wire.QUEUE_FULL
        except zmq.ZMQError:
            if peer.conn.route:
                self._forget(peer, wire.DISCONNECTED)
            return NO_CONNECTION
        return None

    def _request(self, conn: ConnectionID, frames: list[bytes], call: PendingCall, timeout_s: float) -> None:
        if self._stopping:
            self._call(call.settle, False, [wire.SHUTTING_DOWN])
            return
        peer = self._find(conn)
        if peer is None:
            # To a service node OxenMQ says TIMEOUT, at once.
            self._call(call.settle, False, [wire.TIMEOUT if conn.service_node else wire.DISCONNECTED])
            return
        calls = peer.calls
        if calls is None:
            calls = peer.calls = PendingCalls()
        if len(calls) >= MOST_CALLS:
            self._call(call.settle, False, [wire.QUEUE_FULL])
            return
        problem = self._try_to_send(peer, frames)
        if problem is not None:
            self._call(call.settle, False, [problem])
            return
        self._asked_count += 1
        deadline = self._clock() + timeout_s
        call.peer = peer
        calls.add(call.tag, call, deadline)
        if deadline < peer.due:
            peer.due = deadline
            self._group.deadlines.set(peer, deadline)

    def _withdraw(self, call: PendingCall) -> None:
        """Give up a request: have its handler cancelled."""
        peer = call.peer
        if peer is not None and peer.calls is not None and peer.calls.take(call.tag) is not None:
            self._send_to(peer, [wire.CANCEL, call.tag])

    def _give_credit(self, call: PendingCall, count: int, incoming: Incoming) -> None:
        """Let more items of a stream come."""
        peer = call.peer
        if peer is not None and peer.calls is not None and call.tag in peer.calls:
            incoming.allow(count)
            self._send_to(peer, [wire.CREDIT, call.tag, b"%d" % count])

    def _calls_due(self, peer: RpcPeer) -> None:
        calls = peer.calls
        peer.due = inf
        if calls is None:
            return
        for call in calls.take_due(self._clock()):
            self._call(call.settle, False, [wire.TIMEOUT])
        following = calls.next_deadline()
        if following is not None and not peer.closed:
            peer.due = min(peer.due, following)
            self._group.deadlines.set(peer, peer.due)

    @property
    def _serving(self) -> Serving:
        if self._serving_here is None:
            raise LocalProtocolError("the node was not started")
        return self._serving_here

    # --- receiving -----------------------------------------------------------------------------------------------

    def _received(self, peer: RpcPeer, frames: list[bytes], at: int) -> None:
        """Act on a message whose first frame is at `at`."""
        name = frames[at]
        command = self._commands.get(name)
        if command is None:
            self._received_other(peer, frames[at:])
            return
        tag: bytes | None = None
        rest = at + 1
        if command.is_request and len(frames) > rest:
            tag = frames[rest]
            rest += 1
        refused = self._refused(command, peer, tag)
        if refused is not None:
            self._refuse(peer, refused, name, tag)
            return
        deadline: float | None = None
        credit = 0
        if tag is not None:
            read = read_tag(tag)
            if read is not None:
                left_s, credit = read
                deadline = self._clock() + left_s
        command.count += 1
        self._serving.run(command, RpcMessage(self, peer, name, tag, frames[rest:], deadline), credit)

    def _refused(self, command: RpcCommand, peer: RpcPeer, tag: bytes | None) -> bytes | None:
        """Return the code with which the command of that peer is refused; None: it may run."""
        identity = peer.identity
        return refusal_code(
            command.category.access,
            identity.auth,
            remote_sn=identity.pubkey in self._service_nodes,
            local_sn=self._service_node,
            is_request=command.is_request,
            tag=tag,
        )

    def _refuse(self, peer: RpcPeer, code: bytes, name: bytes, tag: bytes | None) -> None:
        self._refused_counts[code.decode()] += 1
        self._send_to(peer, wire.refusal(code, name, tag))

    def _received_other(self, peer: RpcPeer, frames: list[bytes]) -> None:
        """Act on what is no command of ours."""
        name = frames[0]
        if name == wire.REPLY:
            self._received_reply(peer, frames)
        elif name == wire.HI:
            self._send_to(peer, [wire.HELLO])
        elif name == wire.HELLO:
            self._received_hello(peer)
        elif name == wire.BYE:
            dialled = self._dialled.get(peer.conn.id)
            if dialled is not None:
                self._hang_up(dialled, "the other end closed it", code=wire.DISCONNECTED)
            elif (listener := self._listeners.get(peer.conn.id)) is not None and listener.is_inproc:
                self._forget(peer, wire.DISCONNECTED)
        elif name == wire.UNKNOWN_COMMAND:
            self._received_unknown(peer, frames)
        elif name in {wire.ITEM, wire.CREDIT, wire.CANCEL}:
            self._received_stream(peer, frames)
        elif b"." not in name and (failed := wire.failed_request(frames)) is not None:
            self._received_failure(peer, *failed)
        elif name in {wire.FORBIDDEN, wire.FORBIDDEN_SN, wire.NOT_A_SERVICE_NODE, wire.NO_REPLY_TAG}:
            pass  # a command of ours was refused; nobody waits for it
        elif self._stopping:
            pass
        else:
            self._refuse(peer, wire.UNKNOWN_COMMAND, name, None)

    def _received_hello(self, peer: RpcPeer) -> None:
        dialled = self._dialled.get(peer.conn.id)
        ready = None if dialled is None else dialled.answered()
        if ready is not None:
            self._call(ready, peer.conn)

    def _received_reply(self, peer: RpcPeer, frames: list[bytes]) -> None:
        if len(frames) < 2:
            self._malformed_count += 1
            return
        call = None if peer.calls is None else peer.calls.take(frames[1])
        if call is None:
            self._note_late()
        else:
            self._call(call.settle, True, frames[2:])

    def _note_late(self) -> None:
        """Count an answer that nothing waits for, any more or at all; warn, but not of each of a flood."""
        self._late_count += 1
        now = self._clock()
        if now - self._late_told_at >= LATE_EVERY_S:
            self._late_told_at = now
            _log.warning("dropped an answer that no request waits for; %d so far", self._late_count)

    def _received_failure(self, peer: RpcPeer, code: bytes, tag: bytes, more: list[bytes]) -> None:
        call = None if peer.calls is None else peer.calls.take(tag)
        if call is None:
            self._note_late()
        else:
            self._call(call.settle, False, [code, *more])

    def _received_stream(self, peer: RpcPeer, frames: list[bytes]) -> None:
        """Act on an item, on credit for more, or on a caller that takes no more."""
        if len(frames) < 2:
            self._malformed_count += 1
        elif frames[0] == wire.CANCEL:
            self._serving.cancel(peer, frames[1])
        elif frames[0] == wire.CREDIT:
            count = wire.credit_of(frames)
            if count is None:
                self._malformed_count += 1
            else:
                self._serving.credit(peer, frames[1], count)
        else:
            call = None if peer.calls is None else peer.calls.get(frames[1])
            if call is None:
                self._note_late()
            elif call.item is None or not call.item(frames[2:]):
                self._malformed_count += 1
                self._received_failure(peer, NOT_ALLOWED, frames[1], [])
                self._send_to(peer, [wire.CANCEL, frames[1]])

    def _received_unknown(self, peer: RpcPeer, frames: list[bytes]) -> None:
        """Fail the oldest request with the command that the peer does not know: it does not say which."""
        calls = peer.calls
        if calls is None or len(frames) < 2:
            return
        call = calls.take_oldest(frames[1])
        if call is not None:
            self._call(call.settle, False, [wire.UNKNOWN_COMMAND])

    # --- jobs of the program -------------------------------------------------------------------------------------

    def batch(self, batch: Batch[Any]) -> None:
        """Run the jobs of a batch on worker threads and, once all have ended, its completion.

        Raises:
            LocalProtocolError: it has no jobs, or was submitted before.
            BusyError: more jobs are submitted than end.
            ClosedError: the node was stopped.
            ConfigError: a thread is another node's.
        """
        self._jobs.batch(batch)

    def job(self, call: Callable[[], object], thread: TaggedThread | None = None) -> None:
        """Run one job on a worker thread, or on `thread`; what it raises is reported. Raises as `batch`."""
        self._jobs.job(call, thread)

    def add_timer(
        self,
        call: Callable[[], object],
        interval_s: float,
        squelch: bool = True,  # noqa: FBT001, FBT002  (OxenMQ's third argument)
        thread: TaggedThread | NodeThread | None = None,
    ) -> TimerID:
        """Run a job again and again; what it raises is reported, and the timer goes on. Also before start.

        Args:
            call: the job.
            interval_s: seconds from one time to the next, a millisecond or more. What was missed is not made up for.
            squelch: pass over a time while the last job waits or runs.
            thread: a tagged thread, or `NODE_THREAD` for what is done in a moment. None: a worker, as a batch job.

        Returns:
            What `cancel_timer` takes.

        Raises:
            ConfigError: the interval is out of range, or the thread another node's.
            BusyError: there are too many timers.
            ClosedError: the node was stopped.
        """
        return self._jobs.add_timer(call, interval_s, squelch=squelch, thread=thread)

    def cancel_timer(self, timer_id: TimerID) -> bool:
        """End a timer: no job of it begins any more.

        Returns:
            True if it was there. False, and no effect, if it was cancelled before.
        """
        return self._jobs.cancel_timer(timer_id)

    def inject_task(self, category: str, command: str, remote: str, call: Callable[[], object]) -> None:
        """Run a task of the program's own as if it were a command: in the slots and the queue of a category.

        Where a command would be dropped it is, which is reported.

        Args:
            category: whose slots and queue it takes.
            command: what it is called in reports.
            remote: for whom it is done, for reports.
            call: the task. What it raises is reported.

        Raises:
            LocalProtocolError: the category is not there.
            BusyError: more jobs are submitted than end.
            ClosedError: the node was stopped.
        """
        owner = self._categories.get(category)
        if owner is None:
            raise LocalProtocolError(f"category {category!r} was not added", hint="call add_category() first")
        self._jobs.inject(owner.lane, call, f"{category}.{command} of {remote}")

    def statistics(self) -> RpcStatistics:
        """Return a frozen snapshot; from another thread than the node's, its figures may be a moment apart."""
        serving = self._serving_here
        listeners, dialled = list(self._listeners.values()), list(self._dialled.values())
        peers = [peer for listener in listeners for peer in list(listener.routes.values())]
        peers += [each.peer for each in dialled]
        odd = sum(listener.refused_count + listener.socket.too_long_count for listener in listeners)
        return RpcStatistics(
            incoming=sum(map(len, listeners)),
            outgoing=len(dialled),
            waiting=sum(len(peer.calls) for peer in peers if peer.calls is not None),
            running=0 if serving is None else len(serving.tasks),
            called_count={name.decode(): command.count for name, command in list(self._commands.items())},
            refused_count={
                **dict(self._refused_counts),
                "QUEUE_FULL": 0 if serving is None else serving.full_count,
                "WRONG_ARGUMENT": 0 if serving is None else serving.wrong_count,
            },
            failed_count=0 if serving is None else serving.failed_count,
            cancelled_count=0 if serving is None else serving.cancelled_count,
            asked_count=self._asked_count,
            late_count=self._late_count,
            malformed_count=self._malformed_count + odd,
            unsent_count=self._unsent_count,
            jobs=self._jobs.statistics(),
        )

    def job_statistics(self) -> JobStatistics:
        """Return figures of jobs, queues and threads of this moment."""
        return self._jobs.statistics()

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _do(self, what: Callable[..., object], *args: Any) -> None:
        """Do it on the node's thread: now if this is it, else soon and in the order of the calls."""
        if self._group.in_thread():
            what(*args)
        else:
            self._group.call_soon(what, *args)

    def _do_or_fail(self, what: Callable[..., object], *args: Any) -> None:
        """Do as `_do` what has an outcome to tell, on whatever thread if the node is stopped before it is done.

        What is queued on a loop that has been stopped never runs, and nothing says so: it is kept here until it has.
        """
        if self._group.in_thread():
            what(*args)
            return
        if self._stopping:
            raise ClosedError("the node was stopped")
        undone = partial(what, *args)
        self._undone[undone] = None
        try:
            self._group.call_soon(self._do_once, undone)
        except ClosedError:
            if self._undone.pop(undone, self) is None:
                raise
            return  # the one that has stopped the node has done it
        if self._over:
            self._fail_undone()

    def _do_once(self, undone: Callable[[], object]) -> None:
        if self._undone.pop(undone, self) is None:
            undone()

    def _fail_undone(self) -> None:
        """Do what the loop, which is over, has left: told that the node is stopped, each fails."""
        self._stopping = self._over = True
        for undone in list(self._undone):
            self._call(self._do_once, undone)

    def _call_back(self, callback: Callable[..., object], *args: Any) -> None:
        """Have a callback of the application run on a worker thread, as the callback of a reply."""
        self._jobs.reply(partial(callback, *args), getattr(callback, "__qualname__", "callback"))

    def _call(self, callback: Callable[..., object], *args: Any) -> None:
        """Call back; what it raises is reported."""
        try:
            callback(*args)
        except BaseException as error:  # noqa: BLE001  (a callback's fault must not cost others their messages)
            self._group.report(getattr(callback, "__qualname__", "callback"), error)


class RequestFuture(Future[list[bytes]]):
    """The outcome of a request, for other threads than the node's."""

    def __init__(self, in_node_thread: Callable[[], bool] = bool) -> None:
        super().__init__()
        self._in_node_thread = in_node_thread

    def get(self, timeout_s: float | None = None) -> list[bytes]:
        """Wait for the reply and return its parts."""
        if not self.done() and self._in_node_thread():
            raise LocalProtocolError("get() would wait on the node's own thread", hint="await call() there")
        return self.result(timeout_s)


def failure_of(command: str, data: Sequence[bytes]) -> RpcError:
    """Return the exception for what a request failed with: its code, and maybe a text."""
    code = data[0].decode(errors="replace")
    text = f": {data[1].decode(errors='replace')}" if len(data) > 1 else ""
    kind = RpcTimeoutError if data[0] == wire.TIMEOUT else RpcError
    return kind(f"request {command} failed with {code}{text}", code=code)


def _settle(future: RequestFuture, command: str, ok: bool, data: list[bytes]) -> None:  # noqa: FBT001  (see `Settle`)
    if not future.set_running_or_notify_cancel():
        return
    if ok:
        future.set_result(data)
    else:
        future.set_exception(failure_of(command, data))


def _served(callback: Settle) -> Settle:
    """Have a callback of a handler run for that one's caller too: what it asks in turn has no more time."""
    if SERVED.get() is None:
        return callback
    context = copy_context()
    return wraps(callback)(lambda ok, data: context.run(callback, ok, data))


def _set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _connected(done: Future[ConnectionID], conn: ConnectionID) -> None:
    if not done.cancelled():
        done.set_result(conn)


def _refuse(done: Future[ConnectionID], address: str, _: ConnectionID, why: str) -> None:
    if not done.cancelled():
        done.set_exception(RpcError(f"no connection to {address}: {why}", code="DISCONNECTED"))


def _checked(conn: ConnectionID, command: str, parts: tuple[Part, ...]) -> list[bytes]:
    """Return command and parts as they are sent; more than a node takes is refused here, where their sender is told."""
    if len(parts) > MOST_PARTS:
        raise LocalProtocolError(f"a message has {len(parts)} parts, at most {MOST_PARTS} are allowed")
    frames = [command.encode(), *map(octets, parts)]
    most = conn.most_part_bytes
    if max(map(len, frames)) > most:  # it would end the connection, and with it all other requests there
        number = next(number for number, frame in enumerate(frames) if len(frame) > most)
        what = f"part {number} of {short(command)}" if number else "the name of a command"
        raise LocalProtocolError(
            f"{what} has {len(frames[number])} bytes, the limit of this connection is {most}", hint="send it in pieces"
        )
    return frames


def _check_timeout(timeout_s: float) -> None:
    if not timeout_s >= 0:  # NaN is neither
        raise LocalProtocolError(f"timeout_s is {timeout_s}, it must be 0 or more")


def _is_inproc(address: str) -> bool:
    return address.startswith("inproc:")


def _nothing(*_: object) -> None:
    """Do nothing."""
