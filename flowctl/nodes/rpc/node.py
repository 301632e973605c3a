"""A node: serves commands and requests, and sends them, over connections that either side may have opened.

Theory of operation. All state belongs to the thread of one poll group; what other threads ask for is handed to it. A
message is looked up in one table by its first frame. A request of ours waits in the table of the peer that was asked,
so what another peer says about it does not count; it leaves the table before its caller is told, once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial, wraps
from math import inf
from typing import Any, Final, Self, TypeVar, cast, overload

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import SendState
from flowctl.core.loop.faults import ErrorHook
from flowctl.core.text.fieldtypes import check_type
from flowctl.core.text.printable import short
from flowctl.errors import ClosedError, LocalProtocolError, RpcError
from flowctl.nodes.rpc.access.access import Access, AuthLevel, checked_keys, refusal_code
from flowctl.nodes.rpc.access.admission import Allow
from flowctl.nodes.rpc.access.logins import LoginDesk, Logins, PasswordHash
from flowctl.nodes.rpc.arguments import Arguments, Takes
from flowctl.nodes.rpc.asking import Asking, RequestFuture, RpcCall, Settle, checked_frames, failure_of
from flowctl.nodes.rpc.calling import Caller, Calling, check_credit, set_result
from flowctl.nodes.rpc.commands import Category, Handler, HandlerKind, RpcCommand, access_of, check_name, described
from flowctl.nodes.rpc.jobs.batch import Batch, NodeThread, TaggedThread
from flowctl.nodes.rpc.jobs.dispatcher import Dispatcher, JobStatistics, TimerID
from flowctl.nodes.rpc.jobs.slots import DEFAULT_MAX_QUEUE
from flowctl.nodes.rpc.message import SERVED_MESSAGE, Part, RpcMessage, own_metadata, parts_of
from flowctl.nodes.rpc.nodecalls import NodeCalls
from flowctl.nodes.rpc.peers.peer import (
    ANY_WAY,
    CONNECT_KEEP_ALIVE_S,
    ENCRYPTED,
    SERVICE_NODE,
    ConnectionID,
    Reach,
    RpcConnection,
    RpcPeer,
    row_of,
)
from flowctl.nodes.rpc.peers.reaching import (
    CONNECT_TIMEOUT_S,
    LINGER_S,
    MOST_WAITING_BYTES,
    PEER_LIMITS,
    SELF_ADDRESS,
    Failed,
    Reaching,
    Ready,
)
from flowctl.nodes.rpc.pool import CHANNELS, RpcPool
from flowctl.nodes.rpc.services import WRONG_REPLY, Form, methods_of, stub_of
from flowctl.nodes.rpc.serving import Serving
from flowctl.nodes.rpc.streams import STREAM_CREDIT
from flowctl.nodes.rpc.wire import frames as wire
from flowctl.nodes.rpc.wire.addresses import Address
from flowctl.pollgroup import LoopFactory, PollGroup
from flowctl.wire.zmtp.keys import KeyPair, node_keys

_S = TypeVar("_S")
_log: Final = logging.getLogger("flowctl.rpc")

REQUEST_TIMEOUT_S: Final = 15.0
STOP_GRACE_S: Final = 1.0
"""Time beyond its deadline in which a stop closes sockets and names the handlers that it leaves behind."""
_OWN_CATEGORY: Final = "rpc"
"""Category of `rpc.describe`, `rpc.health` and `rpc.login`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcStatistics:
    """A node at one moment; counts are since the start."""

    incoming: int  #: peers that have connected to us
    outgoing: int  #: connections that we have opened
    waiting: int  #: requests of ours without an outcome
    running: int  #: coroutines of handlers that wait
    called_count: Mapping[str, int]  #: times that each command ran or was queued
    refused_count: Mapping[str, int]  #: commands and requests of others that were refused, by code
    failed_count: int  #: handlers that raised
    cancelled_count: int  #: handlers cancelled since their answer was not wanted any more
    asked_count: int  #: requests that we have sent
    late_count: int  #: replies and failures to what waits no more
    malformed_count: int  #: messages that were none, or too long, or out of place
    cut_count: int  #: peers that were cut since most of what waited in the node waited for them
    conflated_count: int  #: messages of `publish` in whose place a newer one was sent
    unsent_count: int  #: times that a message found too much waiting for its peer: it was dropped, or put off
    duplicates: int  #: times that a second node was found with one key: a peer's, or this one's own
    jobs: JobStatistics  #: worker threads and their queues


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
        limits: of what may wait for one peer.
        most_waiting_bytes: what may wait for all peers together: the one for which most waits is cut first.

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
        limits: Limits = PEER_LIMITS,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
    ) -> None:
        #: Those with which it listens and dials.
        self.keys: Final = node_keys(keys, pubkey, privkey, known="a service node" if service_node else "")
        self._service_node: Final = service_node
        self._name: Final = name
        self._on_error: Final = on_error
        self._clock: Final = clock
        self._calls: Final = NodeCalls(PollGroup(name, loop_factory=loop_factory, clock=clock, on_error=on_error))
        self._jobs: Final = Dispatcher(name, os.cpu_count() or 1, self._calls)
        self._reaching: Final = Reaching(
            self._calls,
            self.keys,
            clock,
            sn_lookup,
            received=self._received,
            limits=limits,
            most_waiting_bytes=most_waiting_bytes,
        )
        self._asking: Final = Asking(self._calls, self._reaching, self._jobs, clock)
        self._calling: Final = Calling(self._calls, self._asking)
        self._serving: Final = Serving(self._calls, self._jobs, self._reaching)
        self._winding_up: asyncio.Task[None] | None = None  # on the node's thread
        # One for all that stop it: what another one queues when the loop has been stopped never runs.
        self._wound_up: Final[Future[None]] = Future()
        self._categories: dict[str, Category] = {}
        self._commands: dict[bytes, RpcCommand] = {}
        self._aliases: dict[bytes, bytes] = {}
        self._own_category = False  # `rpc` was added by us
        self._not_serving: frozenset[str] = frozenset()  # categories; "": the node
        self._middleware: list[Callable[[Handler], Handler]] = []
        # Only for the node's thread:
        self._logins: Final = Logins()
        self._login_desk: LoginDesk | None = None
        self._malformed_count = 0
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

    def add_service(self, category: str, service: type[_S], implementation: _S) -> None:
        """Add a request command for each method of a service.

        Args:
            category: where they belong.
            service: a class, such as a Protocol, whose methods take one value or none and say with types what they take
                and answer; what is an `AsyncIterator` there is streamed. Names that begin with ``_`` are left out.
            implementation: an object with these methods: coroutines and asynchronous generators run on the node's loop,
                plain functions on worker threads. What its types do not allow is refused as ``WRONG_ARGUMENT``.

        Raises:
            LocalProtocolError: see `add_command`; or a method has no types, takes several values, or answers once
                where its service says many times.
        """
        if not inspect.isclass(service):
            raise LocalProtocolError(f"service is {short(service)}, it must be a class")
        if inspect.isclass(implementation):
            raise LocalProtocolError(
                f"implementation is the class {implementation.__name__}, it must be an object of it"
            )
        made = [(method, method.handler(implementation)) for method in methods_of(service)]  # all of them or none
        for method, handler in made:
            self._add(category, method.name, handler, None, is_request=True, shown=method.shown)

    def add_command_alias(self, alias: str, target: str) -> None:
        """Have ``category.command`` `alias` mean `target`, with its access. Aliases of aliases mean nothing.

        Raises:
            LocalProtocolError: a name is not ``category.command``, `alias` is an alias or a command already, or the
                node was started.
        """
        self._check_not_started("add_command_alias")
        check_name("alias", alias)
        check_name("the target of an alias,", target)
        source = alias.encode()
        if len(source) > wire.MAX_NAME_BYTES:
            raise LocalProtocolError(
                f"alias {short(alias)} has {len(source)} bytes, the limit is {wire.MAX_NAME_BYTES}"
            )
        if source in self._aliases:
            raise LocalProtocolError(f"alias {alias!r} was added before")
        if source in self._commands:
            raise LocalProtocolError(f"alias {alias!r} is the name of a command, which it would hide")
        self._aliases[source] = target.encode()

    def _add(
        self,
        category: str,
        name: str,
        handler: Handler,
        takes: Takes | None,
        *,
        is_request: bool,
        shown: dict[str, Any] | None = None,
    ) -> None:
        self._check_not_started("add_command")
        owner = self._categories.get(category)
        if owner is None:
            raise LocalProtocolError(f"category {category!r} was not added", hint="call add_category() first")
        check_type("name", name, str)
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
            if _OWN_CATEGORY not in self._categories:
                self.add_category(_OWN_CATEGORY)
                self._own_category = True
            self.add_request_command(_OWN_CATEGORY, "login", self._login)

    async def _login(self, message: RpcMessage) -> bytes | None:
        """Answer ``rpc.login`` [user, password] with the level that it gives."""
        peer, desk = message.peer, self._login_desk
        if len(message.data) != 2 or desk is None:
            self._refuse_login(message, b"it takes user and password")
            return None
        if not peer.conn.route:  # it comes again by itself, and then another may answer
            self._refuse_login(message, b"only those who have connected to this node may log in")
            return None
        told: asyncio.Future[AuthLevel | None] = self._calls.group.loop.create_future()
        user, password = message.data
        if not desk.login(peer.number, peer.identity.address, user, password, partial(set_result, told)):
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
            self._reaching.send_to(message.peer, wire.failure(wire.FORBIDDEN, message.tag, why))

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

    def add_caller_middleware(self, wrap: Callable[[Caller], Caller]) -> None:
        """Have something done around every call and stream of this node: the first that is added is the outermost.

        Not around `request` and `request_future`, which have no place to wait.

        Args:
            wrap: given what makes a call, returns one that is called in its place, with the same `RpcCall`, which it
                may change, and returns what that returns: a coroutine function of a coroutine function, an
                asynchronous generator of one.

        Raises:
            LocalProtocolError: the node was started, or it made one of another kind.
        """
        self._check_not_started("add_caller_middleware")
        self._calling.add_middleware(wrap)

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
        if self._calls.started:
            raise LocalProtocolError(f"{what} after start", hint="set up a node wholly, then start it")

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the node on a thread of its own; returns when it runs.

        Raises:
            LocalProtocolError: it was started before.
        """
        self._check_not_started("start")
        self._prepare()
        self._calls.group.start()
        self._calls.group.call_soon(self._begin)

    async def __aenter__(self) -> Self:
        self._check_not_started("start")
        self._prepare()
        self._calls.group = PollGroup.on_running_loop(self._name, clock=self._clock, on_error=self._on_error)
        self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end_soon(LINGER_S)
        self._calls.group.stop()
        self._calls.fail_undone()
        self._jobs.workers.join(0.0)
        self._reaching.close()

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
        if self._calls.group.forked:
            return True  # the node is the parent's
        if self._calls.group.in_thread() or self._jobs.workers.in_worker():
            # What ends it has to wait for this very thread.
            threading.Thread(target=self.stop, args=(deadline_s,), name=f"{self._name} stop", daemon=True).start()
            return False
        if self._reaching.closed:
            return self._jobs.workers.join(deadline_s)
        if not self._calls.started:
            self._calls.started = True
            self._reaching.close()
            return True
        ends_at = time.monotonic() + deadline_s
        self._calls.stopping = True  # from now on nothing more is asked, so that what is queued has an end
        with suppress(ClosedError):
            self._calls.group.call_soon(self._end_soon, deadline_s)
            with suppress(TimeoutError):
                self._wound_up.result(deadline_s + LINGER_S + STOP_GRACE_S)
        left_s = max(STOP_GRACE_S, ends_at - time.monotonic())
        ended = self._calls.group.stop(left_s)
        if ended:
            self._calls.fail_undone()
            self._reaching.close()
        return self._jobs.workers.join(max(0.0, ends_at - time.monotonic())) and ended

    def _end_soon(self, deadline_s: float) -> asyncio.Task[None]:
        """Return the task that winds up, which the first call begins."""
        if self._winding_up is None:
            self._winding_up = self._calls.group.loop.create_task(self._wind_up(deadline_s))
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
        self._calls.started = True  # not where a middleware has raised
        # Looked up before any is entered: an alias of an alias means nothing, in whatever order they were added.
        targets = {alias: self._commands.get(target) for alias, target in self._aliases.items()}
        for alias, target in targets.items():
            if target is None:
                _log.warning("alias %s means %s, which is no command", alias.decode(), self._aliases[alias].decode())
            else:
                self._commands[alias] = target

    def set_serving(self, *, serving: bool, category: str = "") -> None:
        """Say whether the node serves, or a category of it: what `rpc.health` tells balancers. Any thread.

        Args:
            serving: False where callers had better go elsewhere, as before a restart; nothing is refused for that.
            category: empty: the whole node.

        Raises:
            LocalProtocolError: there is no such category.
        """
        if category and category not in self._categories:
            raise LocalProtocolError(f"category {category!r} was not added", hint="call add_category() first")
        self._not_serving = self._not_serving - {category} if serving else self._not_serving | {category}

    def _describe(self) -> None:
        """Add `rpc.describe` and `rpc.health`, unless the application has a category of that name."""
        if _OWN_CATEGORY not in self._categories:
            lane = self._jobs.slots.add_category(_OWN_CATEGORY, 0, 0)
            self._categories[_OWN_CATEGORY] = Category(_OWN_CATEGORY, Access(), lane)
        elif not self._own_category:
            return

        async def what_you_may_call(message: RpcMessage) -> str:
            """Return the commands that you may call, as JSON."""
            mine = {name: item for name, item in self._commands.items() if not self._refused(item, message.peer, b"")}
            return described(mine, self._aliases)

        category = self._categories[_OWN_CATEGORY]

        async def health(message: RpcMessage) -> str:
            """Return whether the node, or a category of it, serves: SERVING, NOT_SERVING, SERVICE_UNKNOWN."""
            name = message.data[0].decode(errors="replace") if message.data else ""
            if name and name not in self._categories:
                return "SERVICE_UNKNOWN"
            return "NOT_SERVING" if self._not_serving & {"", name} else "SERVING"

        self._commands[b"rpc.describe"] = RpcCommand(category, what_you_may_call, is_request=True)
        self._commands[b"rpc.health"] = RpcCommand(category, health, is_request=True)

    def _begin(self) -> None:
        self._jobs.start()
        self._login_desk = LoginDesk(self._calls.group, self._logins)
        self._reaching.start()

    async def _wind_up(self, deadline_s: float) -> None:
        self._calls.stopping = True
        jobs_ended = self._calls.group.loop.create_future()
        self._jobs.close(partial(set_result, jobs_ended, None))
        self._serving.stop()
        await asyncio.wait([jobs_ended, *self._serving.tasks], timeout=deadline_s)
        if not jobs_ended.done():
            for left in self._jobs.workers.unfinished():
                self._calls.group.report(
                    "stop", LocalProtocolError(f"{left} has not ended within {deadline_s:g} s and is left behind")
                )
        await self._reaching.stop()
        if self._login_desk is not None:
            self._login_desk.close()

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
        return self._reaching.listen(address, allow, on_bind, curve=False)

    def listen_curve(
        self,
        address: str,
        allow: AuthLevel | Allow = AuthLevel.NONE,
        on_bind: Callable[[bool], object] | None = None,
    ) -> str:
        """Listen for encrypted connections, before or after start; else as `listen_plain`.

        A peer has to know this node's public key (``node.keys.public``), and proves one of its own.
        """
        return self._reaching.listen(address, allow, on_bind, curve=True)

    def set_active_sns(self, pubkeys: Iterable[bytes]) -> None:
        """Replace the set of active service nodes, from the next message on; any thread, before and after start.

        Args:
            pubkeys: public keys of 32 octets.

        Raises:
            ConfigError: one of them is none; then nothing changes.
        """
        gone = self._reaching.service_nodes.replace(checked_keys(pubkeys, "set_active_sns"))
        self._reaching.forget_service_nodes(gone)

    def update_active_sns(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Add service nodes to those that are active, and remove some; one that is in both is added.

        Raises:
            ConfigError: see `set_active_sns`.
        """
        keys = [checked_keys(pubkeys, "update_active_sns") for pubkeys in (added, removed)]
        self._reaching.forget_service_nodes(self._reaching.service_nodes.update(*keys))

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

    def _named(self, conn: Any) -> ConnectionID:
        if isinstance(conn, ConnectionID):
            return conn
        if not isinstance(conn, bytes):
            told = f"conn is {short(conn)}, it must be what connect() has returned, or the key of a service node"
            raise LocalProtocolError(told, hint="conn = await node.connect(address)")
        return self.service_node(conn)

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
        self._calls.do(self._reaching.find, conn)
        return conn

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
            ephemeral_routing_id: whether the listener is to know this connection by an id that it gives, and not by
                that of this node, of which it knows one connection: the last. A second connection to the same address
                has such a one anyway.

        Returns:
            The connection; with callbacks, one that is not yet there.

        Raises:
            ConfigError: the address is none.
            LocalProtocolError: asked to wait on the node's own thread.
            RpcError: it has not answered; only without callbacks.
        """
        to = Address.parse(address)
        if on_connect is not None or on_failure is not None:
            callbacks = self._called_back(on_connect, on_failure)
            return self._reaching.connect(to, timeout_s, auth, *callbacks, ephemeral=ephemeral_routing_id)
        if self._calls.group.in_thread():
            raise LocalProtocolError(
                "connect_remote() would wait on the node's own thread", hint="await connect(), or give callbacks"
            )
        done: Future[ConnectionID] = Future()
        self._reaching.connect(to, timeout_s, auth, *_connect_callbacks(done, address), ephemeral=ephemeral_routing_id)
        return done.result()

    def _called_back(self, *callbacks: Callable[..., object] | None) -> Iterable[Callable[..., object]]:
        return (partial(self._asking.call_back, callback or (lambda *_: None)) for callback in callbacks)

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
        told, to = _connect_callbacks(done, address), Address.parse(address)
        conn = self._reaching.connect(to, timeout_s, auth, *told, ephemeral=ephemeral_routing_id)
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
        return self._reaching.connect(SELF_ADDRESS, timeout_s, auth, *self._called_back(on_connect, on_failure))

    def disconnect(self, conn: ConnectionID | bytes, linger_s: float = 1.0) -> None:
        """Close a connection; what was sent goes on being sent for `linger_s` seconds. Not there: nothing happens.

        Of a service node, that which we have opened, or else that which it has; the next message opens another.
        """
        self._calls.do(self._reaching.disconnect, self._named(conn), linger_s)

    def now(self) -> float:
        """Return seconds on the node's clock; any thread."""
        return self._clock()

    def items_of(self, message: RpcMessage, credit: int) -> AsyncIterator[list[bytes]]:
        """Return what the caller of a request streams; for `RpcMessage`."""
        check_credit(credit)
        return self._serving.items_of(message, credit)

    def name_of(self, peer: RpcPeer) -> ConnectionID:
        """Return what names a peer, as the service node that it may be at this moment; for `RpcMessage`."""
        conn = peer.conn
        return replace(conn, service_node=True) if conn.pubkey in self._reaching.service_nodes else conn

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
        conn = self._named(conn)
        self._calls.do(self._asking.send, conn, checked_frames(conn, command, parts), queue_full, queue_failure)

    def publish(
        self, conns: ConnectionID | Iterable[ConnectionID | bytes], command: str, *parts: Part, key: str | None = None
    ) -> None:
        """Send a command that some may miss: to one for which something waits already it is not queued behind that.

        Args:
            conns: to whom; who is not connected is passed over.
            command: ``category.command``.
            parts: text is sent as UTF-8.
            key: what it tells of: the newest of each key is kept, and sent once the peer has read what was sent
                before. None: such a peer misses it.

        Raises:
            LocalProtocolError: a part is neither text nor octets, or too long, or the node was not started.
            ClosedError: the node was stopped.
        """
        several = [conns] if isinstance(conns, ConnectionID) else [self._named(conn) for conn in conns]
        # Held to what any connection takes: the same octets go to all.
        frames = checked_frames(ENCRYPTED, command, parts)
        self._calls.do(self._reaching.publish, several, None if key is None else key.encode(), frames)

    def request(
        self,
        conn: ConnectionID | bytes,
        command: str,
        *parts: Part,
        on_reply: Settle,
        timeout_s: float = REQUEST_TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
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
            metadata: what travels beside the parts, texts by name; 8 KiB at most.

        Raises:
            LocalProtocolError: a part is neither text nor octets, or too long, or the node was not started.
            ClosedError: the node was stopped.
        """
        settle = partial(self._asking.call_back, _with_served(on_reply))
        self._asking.ask(self._call_of(conn, command, parts, timeout_s, metadata), settle)

    def request_future(
        self,
        conn: ConnectionID | bytes,
        command: str,
        *parts: Part,
        timeout_s: float = REQUEST_TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
    ) -> RequestFuture:
        """Send a request; see `request`.

        Returns:
            What ``get()`` waits for, on another thread than the node's.
        """
        future = RequestFuture(self._calls.group.in_thread)
        call = self._call_of(conn, command, parts, timeout_s, metadata)
        self._asking.ask(call, partial(_settle, future, command))
        return future

    def _call_of(
        self,
        conn: ConnectionID | bytes,
        command: str,
        parts: tuple[Part, ...],
        timeout_s: float,
        metadata: Mapping[str, str] | None,
        items: AsyncIterable[Any] | None = None,
        credit: int = 0,
    ) -> RpcCall:
        return RpcCall(
            command=command,
            parts=parts,
            conn=self._named(conn),
            timeout_s=timeout_s,
            metadata=own_metadata(metadata),
            items=items,
            credit=credit,
        )

    @overload
    async def call(
        self,
        conn: ConnectionID | bytes,
        command: str,
        *parts: Part,
        timeout_s: float = ...,
        metadata: Mapping[str, str] | None = ...,
        items: AsyncIterable[Any] | None = ...,
    ) -> list[bytes]: ...
    @overload
    async def call(
        self,
        conn: ConnectionID | bytes,
        command: str,
        *parts: Part,
        returns: type[_S],
        timeout_s: float = ...,
        metadata: Mapping[str, str] | None = ...,
        items: AsyncIterable[Any] | None = ...,
    ) -> _S: ...
    async def call(
        self,
        conn: ConnectionID | bytes,
        command: str,
        *parts: Part,
        returns: Any = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
        items: AsyncIterable[Any] | None = None,
    ) -> Any:
        """Send a request and wait for its reply; on any loop. Cancelled, it has the server cancel its handler.

        Args:
            conn: to whom; the public key of a service node stands for `service_node` of it.
            command: ``category.command``.
            parts: text is sent as UTF-8, a dataclass or a model of Pydantic as JSON.
            returns: the type of the one part of the reply: `str`, or one that Pydantic reads from JSON. None: the parts
                are returned as they came.
            timeout_s: how long to wait for the reply, in seconds.
            metadata: what travels beside the parts, texts by name; 8 KiB at most.
            items: what is streamed to the handler, each a part or a list of parts, as it takes them
                (`RpcMessage.items`); ended when the call ends. What it raises ends the call.

        Returns:
            The parts of the reply; or the value that `returns` says.

        Raises:
            RpcTimeoutError: the deadline passed.
            RpcError: it failed; its `code` says how, ``WRONG_REPLY`` that it is not what `returns` says.
        """
        form = None if returns is None else Form(returns)
        data = await self._calling.call(self._call_of(conn, command, parts, timeout_s, metadata, items))
        return data if form is None else form.value(data, f"the reply to {command}", WRONG_REPLY)

    async def stream(
        self,
        conn: ConnectionID | bytes,
        command: str,
        *parts: Part,
        timeout_s: float = inf,
        credit: int = STREAM_CREDIT,
        metadata: Mapping[str, str] | None = None,
        items: AsyncIterable[Any] | None = None,
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
            metadata: as of `call`.
            items: as of `call`: then items go both ways.

        Yields:
            The parts of each item. A reply of parts, by a handler that does not yield, is one item.

        Raises:
            LocalProtocolError: `credit` is out of range.
            RpcTimeoutError: the deadline passed.
            RpcError: it failed; its `code` says how. Items that came before were yielded.
        """
        check_credit(credit)
        call = self._call_of(conn, command, parts, timeout_s, metadata, items, credit)
        async with aclosing(self._calling.stream(call)) as answers:
            async for answer in answers:
                yield answer

    def service(
        self,
        service: type[_S],
        conn: ConnectionID | bytes,
        category: str,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
    ) -> _S:
        """Return a stub of a service: each method asks `conn`, and returns, or yields, what it answers.

        Args:
            service: as of `add_service`.
            conn: whom; the public key of a service node stands for `service_node` of it.
            category: of its commands there.
            timeout_s: of each call, in seconds; streams may take any time.
            metadata: of each call.

        Raises:
            LocalProtocolError: see `add_service`.
        """
        call = partial(self.call, conn, timeout_s=timeout_s, metadata=metadata)
        stub = stub_of(service, category, call, partial(self.stream, conn, metadata=metadata))
        return cast("_S", stub)

    def pool(self, *conns: ConnectionID, channels: int = CHANNELS, timeout_s: float = REQUEST_TIMEOUT_S) -> RpcPool:
        """Return several servers of the same commands as one: each call goes to one that has room. Once started.

        Args:
            conns: who they are; more may be added, and taken out, later.
            channels: calls that each may have to work on at a time, 1 or more.
            timeout_s: of each call, in seconds, with the wait for a server.
        """
        withdraw = partial(self._calls.do, self._asking.withdraw)
        pool = RpcPool(
            *(self._asking.ask, withdraw, self._reaching.is_open, self.call, self.stream, self._calling.wrapped),
            now=self._clock,
            timeout_s=timeout_s,
        )
        if self._calls.started:
            pool.scheduler.run_on(self._calls.group)
        for conn in conns:
            pool.add(conn, channels)
        return pool

    def send_reply(self, message: RpcMessage, parts: tuple[Part, ...]) -> None:
        """Answer a request, if it was not answered; for `RpcMessage`."""
        frames = [wire.REPLY, message.tag or b"", *parts_of(parts, message.peer.conn.most_part_bytes)]
        self._calls.do(self._reply, message, frames)

    def _reply(self, message: RpcMessage, frames: list[bytes]) -> None:
        if message.answer_once():
            self._reaching.send_to(message.peer, frames)

    # --- receiving -----------------------------------------------------------------------------------------------

    def _received(self, peer: RpcPeer, frames: list[bytes]) -> None:
        name = frames[0]
        command = self._commands.get(name)
        if command is None:
            self._received_other(peer, frames)
            return
        tag: bytes | None = None
        rest = 1
        if command.is_request and len(frames) > rest:
            tag = frames[rest]
            rest += 1
            if (
                peer.link is not None and peer.link.state is SendState.HARD_LIMIT
            ):  # its answer could not be sent: it is not begun
                self._reaching.unsent_count += 1
                return
        refused = self._refused(command, peer, tag)
        if refused is not None:
            self._refuse(peer, refused, name, tag)
            return
        deadline: float | None = None
        credit, metadata = 0, b""
        if tag is not None:
            read = wire.read_tag(tag)
            if read is not None:
                left_s, credit = read
                deadline = self._clock() + left_s
                tag, metadata = tag[: wire.TAG_BYTES], tag[wire.TAG_BYTES :]
        command.count += 1
        self._serving.run(command, RpcMessage(self, peer, name, tag, frames[rest:], deadline, metadata), credit)

    def _refused(self, command: RpcCommand, peer: RpcPeer, tag: bytes | None) -> bytes | None:
        identity = peer.identity
        return refusal_code(
            command.category.access,
            identity.auth,
            remote_sn=identity.pubkey in self._reaching.service_nodes,
            local_sn=self._service_node,
            is_request=command.is_request,
            tag=tag,
        )

    def _refuse(self, peer: RpcPeer, code: bytes, name: bytes, tag: bytes | None) -> None:
        self._refused_counts[code.decode()] += 1
        self._reaching.send_to(peer, wire.refusal(code, name, tag))

    def _received_other(self, peer: RpcPeer, frames: list[bytes]) -> None:
        name = frames[0]
        if name == wire.REPLY:
            self._asking.received_reply(peer, frames)
        elif name == wire.HI:
            self._reaching.send_to(peer, [wire.HELLO])
        elif name == wire.HELLO:
            self._reaching.received_hello(peer)
        elif name == wire.BYE:
            self._reaching.received_bye(peer, taken_over=frames[1:2] == [wire.TAKEN_OVER])
        elif name == wire.UNKNOWN_COMMAND:
            self._asking.received_unknown(peer, frames)
        elif name in wire.STREAM_WORDS:
            self._received_stream(peer, frames)
        elif b"." not in name and (failed := wire.failed_request(frames)) is not None:
            self._asking.received_failure(peer, *failed)
        elif name in {wire.FORBIDDEN, wire.FORBIDDEN_SN, wire.NOT_A_SERVICE_NODE, wire.NO_REPLY_TAG}:
            pass  # a command of ours was refused; no caller waits for it
        elif self._calls.stopping:
            pass
        else:
            self._refuse(peer, wire.UNKNOWN_COMMAND, name, None)

    def _received_stream(self, peer: RpcPeer, frames: list[bytes]) -> None:
        if len(frames) < 2:
            self._malformed_count += 1
            return
        if frames[0] == wire.ITEM:
            self._asking.received_item(peer, frames)
            return
        if frames[0] == wire.UP_CREDIT:
            self._asking.received_credit(peer, frames)
            return
        running = peer.running.get(frames[1])
        if frames[0] == wire.CANCEL:
            if running is not None:
                running.cancel()
            return
        if frames[0] != wire.CREDIT:
            self._serving.received_item(running, frames)
            return
        count = wire.credit_of(frames)
        if count is None:
            self._malformed_count += 1
        elif running is not None:
            running.add_credit(count)

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
        serving, reaching, asking = self._serving, self._reaching, self._asking
        listeners, dialled = list(reaching.listeners.values()), list(reaching.dialled.values())
        peers = [peer for listener in listeners for peer in list(listener.routes.values())]
        peers += [each.peer for each in dialled]
        odd = sum(listener.refused_count for listener in listeners)
        odd += sum(peer.link.odd_count for peer in peers if peer.link is not None)
        return RpcStatistics(
            incoming=sum(map(len, listeners)),
            outgoing=len(dialled),
            waiting=sum(len(peer.calls) for peer in peers if peer.calls is not None),
            running=len(serving.tasks),
            called_count={name.decode(): command.count for name, command in list(self._commands.items())},
            refused_count={
                **dict(self._refused_counts),
                "QUEUE_FULL": serving.full_count,
                "WRONG_ARGUMENT": serving.wrong_count,
            },
            failed_count=serving.failed_count,
            cancelled_count=serving.cancelled_count,
            asked_count=asking.asked_count,
            late_count=asking.late_count,
            malformed_count=self._malformed_count + asking.malformed_count + odd,
            cut_count=reaching.cut_count,
            conflated_count=reaching.conflated_count,
            unsent_count=reaching.unsent_count,
            duplicates=reaching.duplicate_count + sum(listener.duplicates.count for listener in listeners),
            jobs=self._jobs.statistics(),
        )

    def connections(self) -> list[RpcConnection]:
        """Return all connections of this moment, and how it is with what is sent to each; any thread."""
        reaching = self._reaching
        peers = [peer for listener in list(reaching.listeners.values()) for peer in list(listener.routes.values())]
        return [row_of(peer) for peer in [*peers, *(each.peer for each in list(reaching.dialled.values()))]]

    def why(self, conn: ConnectionID | bytes) -> str:
        """Return in a line how it is with what is sent there: state, limits, since when, who is to blame; any thread.

        Raises:
            ClosedError: there is no such connection.
        """
        peer = self._reaching.connected_peer(self._named(conn))
        if peer is None:
            raise ClosedError("there is no such connection")
        return row_of(peer).why

    def job_statistics(self) -> JobStatistics:
        """Return figures of jobs, queues and threads of this moment."""
        return self._jobs.statistics()


def _connect_callbacks(done: Future[ConnectionID], address: str) -> tuple[Ready, Failed]:
    """Return the callback for the outcome of a connect whose caller waits for it, or has given it up."""

    def ready(conn: ConnectionID) -> None:
        if not done.cancelled():
            done.set_result(conn)

    def failed(_: ConnectionID, why: str) -> None:
        if not done.cancelled():
            done.set_exception(RpcError(f"no connection to {address}: {why}", code="DISCONNECTED"))

    return ready, failed


def _settle(future: RequestFuture, command: str, ok: bool, data: list[bytes]) -> None:  # noqa: FBT001  (see `Settle`)
    if not future.set_running_or_notify_cancel():
        return
    if ok:
        future.set_result(data)
    else:
        future.set_exception(failure_of(command, data))


def _with_served(callback: Settle) -> Settle:
    """Have a callback of a handler run for that one's caller too: what it asks in turn has no more time."""
    if SERVED_MESSAGE.get() is None:
        return callback
    context = copy_context()
    return wraps(callback)(lambda ok, data: context.run(callback, ok, data))
