"""A messenger: messages with a callback each, to and from others, each applied once.

Theory of operation. All sockets, and what arrives, live on the thread of one poll group: its own after `start`, or the
caller's running loop with ``async with``. What is to be sent is under one lock, so that any thread may send: it takes
its number and its credit at once, and waits for the group's thread, which sends in rounds (`_pump`).

A message that arrives is first told from those that arrived before (`nodes.messenger.arrivals`). Then, if it is new:

1. the message-specific callback that it names is called, which happens once;
2. the server-loop callback of the listener, or of the connection, is called; one to `ECHO` is sent back;
3. where there is a store, "seen" and the effects of the handlers become durable, together;
4. it is acknowledged: all of a turn of the loop together, to peers that understand that.

A handler that raises is reported, and its message counts as not received: the sender tries again. Nothing of the
user's runs under the lock.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from secrets import randbits
from typing import Any, Final, Self, TypeVar

import zmq

from flowctl.core.flow.state import SendState, StateChange
from flowctl.core.loop.faults import ErrorHook
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outcomes.outcome import Outcome
from flowctl.core.outcomes.pending import Pending
from flowctl.errors import BrokenError, BusyError, ClosedError, ConfigError, LocalProtocolError, RemoteProtocolError
from flowctl.nodes.messenger.arrivals import Arrivals, Arrived, Fate, HeldRoom
from flowctl.nodes.messenger.delivery import Delivery, DeliverySettings, Outgoing
from flowctl.nodes.messenger.durability import (
    ANNOUNCES,
    IDS,
    OLD,
    SEQUENCES,
    DurableStore,
    Effect,
    OpenStore,
    StoredMessage,
)
from flowctl.nodes.messenger.message import AckHandler, Destination, Failure, ReceivedMessage, To
from flowctl.nodes.messenger.peer import MessengerPeer, MessengerSocket, prepare
from flowctl.nodes.messenger.record import decode_record, encode_record
from flowctl.nodes.messenger.wire import (
    ACK,
    ECHO,
    FIRST_CALLBACK,
    MAX_ID,
    MAX_IDENTITY_BYTES,
    NOOP,
    Extension,
    Header,
    as_identity,
    encode_ack,
    encode_acks,
    encode_message,
    parse_acks,
    parse_message,
)
from flowctl.pollgroup import LoopFactory, PollGroup
from flowctl.wire.zeromq.context import MAX_SOCKETS, new_context
from flowctl.wire.zeromq.curve import KeyPair, dial_curve, serve_curve
from flowctl.wire.zeromq.socket import ZmqSocket
from flowctl.wire.zeromq.zap import ZapHandler, ZapRefusal, ZapRequest, bind_zap, zap_domain

Callback = Callable[["Messenger", ReceivedMessage], object]
"""Handles a message; may be a coroutine function."""
FailureHandler = Callable[["Messenger", Failure], object]
"""Told of a message that was given up; may be a coroutine function."""
StateHandler = Callable[["Messenger", To, StateChange], object]
"""Told of each edge of the state of what is under way to a peer; may be a coroutine function."""

MAX_CALLBACKS: Final = 65_536
"""Message-specific callbacks that wait for their response."""
CALLBACK_S: Final = 3600.0
"""After so long without a response, and without a deadline of its own, a callback is given up."""
MAX_HANDLING: Final = 1024
"""Coroutines of handlers at a time; a message that finds so many is not taken, and comes again."""
MAX_HANDLING_BYTES: Final = 256 << 20
"""Octets of their messages. Of both one peer gets no more than is left to all others: half, if it is alone."""
MAX_ECHO_BYTES: Final = 256 << 20
"""Octets of echoes that are unacknowledged, with what each costs beside its own: who asks for echoes and acknowledges
none must not keep the application from sending."""
MAX_REMEMBERED: Final = 20_000
"""Peers that are gone of which we know what they sent: some 40 MB. Those that went first are forgotten, on the disk
too; what one of them sends again after that is handled again."""
MAX_REMEMBERED_GAPS: Final = 1_000_000
"""Gaps in what they sent, some 100 MB; one that would make them more is forgotten itself."""
MAX_PENDING_BYTES: Final = 1 << 30
"""Octets that are unacknowledged, to all peers together."""

_ECHO_COST_BYTES: Final = 1024
"""What an echo costs beside its octets: it may have none."""
_LOOKED_AT: Final = 64
"""Peers of a listener that are looked at for one that can be forgotten; when the next one comes, those after them."""
_BATCH: Final = 64
"""Messages that are sent between two looks at the lock."""
_BATCHES: Final = 16
"""Batches to one peer before others get their turn."""
_MALFORMED_EVERY_S: Final = 1.0
"""Malformed input is counted always and reported once in that time: a flood must not fill the log."""
_START_S: Final = 30.0

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Ticket:
    """What is called for one message."""

    on_ack: AckHandler | None
    on_failure: FailureHandler | None
    callback_id: int = 0


@dataclass(slots=True, eq=False)
class _EchoTicket:
    """Marks a message that a peer has asked for itself."""

    peer: MessengerPeer
    cost_bytes: int


@dataclass(slots=True, eq=False)
class _Waiting:
    """A message-specific callback that waits for its response."""

    peer: MessengerPeer
    message: Outgoing
    callback: Callback
    on_failure: FailureHandler | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessengerStatistics:
    """One messenger at one moment."""

    peers: int  #: known, whether connected or not
    pending: int  #: messages that are unacknowledged
    pending_bytes: int  #: octets of them
    callbacks: int  #: message-specific callbacks that wait for their response
    sent: int  #: messages handed to ZeroMQ, tries again included
    retries: int  #: of them, tries again
    acknowledged: int  #: messages whose acknowledgement came
    given_up: int  #: messages that got another outcome
    received: int  #: messages handled
    repeated: int  #: messages that had been handled before
    refused: int  #: messages not taken: too old, too many at once, of an earlier life of their sender
    malformed: int  #: messages that no peer should send, thrown away
    late: int  #: acknowledgements and responses that nothing waited for
    handler_errors: int  #: exceptions of handlers, contained


class Messenger:
    """Sends messages to other messengers, and hands on what comes from them.

    Args:
        port: where it listens by itself: ``tcp://{host}:{port}``, ``ipc://{ipc_dir}/flowctl-ipc-{port}`` and
            ``inproc://flowctl-inproc-{port}``, as listener 0. 0: any free TCP port. None: it does not.
        identity: what it is called; 1 to 255 octets, unique among all that talk to the same listeners.
        host: address for TCP.
        ipc_dir: folder of the Unix socket.
        callback: server-loop callback of listener 0.
        settings: window and retries of what is sent.
        ack_on_receipt: acknowledge before the handler runs instead of after: a crash between loses the message. Ordered
            ones of a peer that understands no extension then begin in order, and may overlap.
        dead_letter: told of each message that was given up without being acknowledged.
        send_state_changed: told of each edge of a peer's state.
        open_store: opens the store in which messages and what was seen outlive the process. None: they do not.
        max_message_bytes: largest message, all frames together.
        max_peers: peers that are known at a time, over all listeners.
        context: of ZeroMQ. None: that of the process, `zmq.Context.instance()`; those who talk over inproc share one.
            With `keys` it has one of its own.
        keys: its key pair of CURVE: all that goes over tcp and ipc is encrypted, and both sides know whom they talk to.
            None: nothing is.
        allow: given the public key of a newcomer to a listener, returns whether it may come in; for `keys`. A name
            instead of True: it may, and speaks under that identity alone. None: all may that know the listener's key,
            and the identity of a peer belongs to the key that came with it first.
        on_error: told of every exception of a handler. None: they are logged.
        loop_factory: of `start`: makes the loop. None: uvloop where it is installed.
        rng: for the jitter of retries.

    Attributes:
        identity: see above.
        incarnation: of this life of it, or of its store.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        port: int | None = None,
        identity: str | bytes = b"",
        *,
        host: str = "127.0.0.1",
        ipc_dir: str | os.PathLike[str] = ".",
        callback: Callback | None = None,
        settings: DeliverySettings | None = None,
        ack_on_receipt: bool = False,
        dead_letter: FailureHandler | None = None,
        send_state_changed: StateHandler | None = None,
        open_store: OpenStore | None = None,
        max_message_bytes: int = 16 << 20,
        max_peers: int = 10_000,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        keys: KeyPair | None = None,
        allow: Callable[[bytes], bool | str] | None = None,
        on_error: ErrorHook | None = None,
        loop_factory: LoopFactory | None = None,
        rng: Random | None = None,
    ) -> None:
        self.identity: Final = check_identity(identity)
        if port is not None and not 0 <= port <= 65535:
            raise ConfigError(f"port is {port}, it must be 0 to 65535, or None")
        for name, value in (("max_message_bytes", max_message_bytes), ("max_peers", max_peers)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, it must be 1 or more")
        self._port: Final = port
        self._host: Final = host
        self._ipc_dir: Final = os.fspath(ipc_dir)
        self._callback: Final = callback
        self._settings: Final = settings or DeliverySettings()
        self._ack_on_receipt: Final = ack_on_receipt
        self._dead_letter: Final = dead_letter
        self._send_state_changed: Final = send_state_changed
        self._open_store: Final = open_store
        self._max_message_bytes: Final = max_message_bytes
        self._max_peers: Final = max_peers
        if keys is not None and context is not None:
            raise ConfigError("a messenger with keys has a context of its own", hint="leave out context")
        self._keys: Final = keys
        self._allow: Final = allow
        self._zap: ZapHandler | None = None
        self._context: Final = context or (_process_context() if keys is None else new_context())
        self._on_error: Final = on_error
        self._loop_factory: Final = loop_factory
        self._rng: Final = rng or Random()
        self.incarnation = randbits(62) + 1
        self._lock: Final = OwnedLock()  # a leaf: nothing of the user's, no socket and no store is touched under it
        self._room: Final = threading.Condition(self._lock)  # type: ignore[arg-type]  # it is an RLock
        self._room_waits: list[Future[None]] = []  # guarded by _lock
        self._delivering: set[Future[int]] = set()  # guarded by _lock
        self._running = False  # guarded by _lock
        self._next_id = 0  # guarded by _lock
        self._next_callback = FIRST_CALLBACK  # guarded by _lock
        self._callbacks: Pending[int, _Waiting] = Pending()  # guarded by _lock
        self._pending_bytes = self._remembered_gap_count = 0  # guarded by _lock
        self._to_send: list[MessengerPeer] = []  # guarded by _lock
        self._to_keep: deque[tuple[MessengerPeer, Outgoing, Effect | None]] = deque()  # guarded by _lock
        self._pump_queued = False  # guarded by _lock
        # Changed by the group's thread only; others read a reference:
        self._group: PollGroup | None = None
        self._own_group = False
        self._store: DurableStore | None = None
        self._listeners: dict[int, MessengerSocket] = {}
        self._connections: dict[int, MessengerSocket] = {}
        self._listener_count = self._connection_count = self._peer_count = 0
        # The group's thread only:
        self._peers_to_acknowledge: list[MessengerPeer] = []
        self._stored: dict[bytes, list[StoredMessage]] = {}
        self._runs: dict[bytes, dict[int, list[tuple[int, int]]]] = {}
        self._held_room: Final = HeldRoom()
        self._remembered: dict[bytes, tuple[Arrivals, str]] = {}  # of peers gone, and their pubkeys  # guarded by _lock
        self._names: dict[str, bytes] = {}  # by public key, hex: the identity that `allow` gave; no more than it names
        self._tasks: set[asyncio.Task[None]] = set()
        self._callbacks_timer_at: float | None = None
        self._malformed_at = -_MALFORMED_EVERY_S
        self._echo_bytes = self._handling_bytes = self._malformed = self._sent = self._acknowledged = self._given_up = 0
        self._received_count = self._repeated = self._refused = self._late = self._handler_errors = 0

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start on a thread of its own, and return when it listens.

        Raises:
            BusyError: its address is in use.
            LocalProtocolError: it was started before, or cannot listen.
        """
        self._check_new()
        group = PollGroup(
            f"messenger-{_shown(self.identity)}", loop_factory=self._loop_factory, on_error=self._on_error
        )
        group.start()
        self._group, self._own_group = group, True
        try:
            self._on_thread(self._open)
        except BaseException:
            self.stop()
            raise

    def stop(self, deadline_s: float = 5.0) -> None:
        """Stop: close all sockets; what waits for an outcome gets SHUTDOWN, but for what a store keeps. Idempotent.

        Args:
            deadline_s: how long to wait for the store and the thread.
        """
        group = self._group
        if group is None or group.forked:  # then it is the parent's
            return
        with suppress(ClosedError):
            self._on_thread(partial(self._close, deadline_s))
        if self._own_group:
            group.stop(deadline_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        """Start on the running loop."""
        self._check_new()
        self._group = PollGroup.on_running_loop(f"messenger-{_shown(self.identity)}", on_error=self._on_error)
        try:
            self._open()
        except BaseException:
            self._close(0.0)
            self._group.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop, and let handlers that still run be cancelled."""
        tasks = list(self._tasks)
        self.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- listeners and connections -------------------------------------------------------------------------------

    def listen_for_connection(
        self, destination: Destination, identity: str | bytes, callback: Callback | None = None
    ) -> int:
        """Listen at one more place, and return when it does.

        Args:
            destination: where.
            identity: what the listener calls itself; 1 to 255 octets.
            callback: its server-loop callback, called for each new message that comes there, acknowledgements aside.

        Returns:
            The number of the listener.

        Raises:
            BusyError: somebody listens there.
            ConfigError: the identity is out of range.
            LocalProtocolError: one cannot listen there, or the messenger does not run.
        """
        name = check_identity(identity)
        return self._on_thread(partial(self._listen, destination.endpoint, name, callback))

    def make_connection(self, destination: Destination, callback: Callback | None = None) -> int:
        """Connect to a messenger, which need not be there yet: what is sent waits for it.

        Args:
            destination: where it listens. One that there is a connection to already: that one is returned.
            callback: called for each new message that comes back, acknowledgements aside.

        Returns:
            The number of the connection.

        Raises:
            LocalProtocolError: the destination is none, or the messenger does not run.
        """
        return self._on_thread(partial(self._connect, destination, callback))

    def close_connection(self, connection_id: int) -> None:
        """Close a connection; what is unacknowledged, or not answered, gets WITHDRAWN.

        Raises:
            LocalProtocolError: there is none of that number.
        """
        self._on_thread(partial(self._disconnect, connection_id))

    def endpoints(self, router_id: int = 0) -> list[str]:
        """Return where a listener listens, with the port that it was given; of listener 0 all three places.

        Raises:
            LocalProtocolError: there is none of that number.
        """
        first = self._listener(router_id)
        more = self._ways() if router_id == 0 else []
        return [first.address, *(endpoint.address for endpoint in more)]

    # --- sending -------------------------------------------------------------------------------------------------

    def send_message(
        self,
        to: To,
        message: str | bytes,
        callback: Callback | None = None,
        remote_callback_id: int = NOOP,
        deadline: float | None = None,
        payload: Iterable[bytes] = (),
        *,
        ordered: bool = False,
        on_ack: AckHandler | None = None,
        on_failure: FailureHandler | None = None,
        wait_s: float | None = None,
        effect: Effect | None = None,
    ) -> int:
        """Send a message, and return at once; any thread, any callback.

        Args:
            to: the number of a connection, or (number of a listener, identity of a peer that came to it).
            message: text (UTF-8) or octets.
            callback: called with the response, once. None: none is wanted.
            remote_callback_id: callback of the peer that it is for: `NOOP`, `ECHO`, or what the peer said.
            deadline: seconds from now after which it is given up, if it is not acknowledged then or, with a callback,
                not answered. None: it is given up after its attempts, and a callback after `CALLBACK_S`.
            payload: further frames.
            ordered: handle it after all ordered messages that were sent to this peer before.
            on_ack: called once it is acknowledged, with the messenger and the id.
            on_failure: told if it gets another outcome; for one message either this is called, once, or (with a
                callback) the callback, or neither.
            wait_s: for how long to wait where the window to this peer is used up; not on the messenger's own thread.
                None: not at all.
            effect: run in the transaction that puts the message into the outbox: both are kept, or neither.

        Returns:
            The message's id.

        Raises:
            BusyError: the window to this peer is used up, or there are too many callbacks or octets.
            ClosedError: the messenger was stopped.
            LocalProtocolError: there is no such connection or listener, or an argument is out of range.
        """
        body = message.encode() if isinstance(message, str) else bytes(message)
        frames = tuple(bytes(frame) for frame in payload)
        outgoing = Outgoing(0, 0, remote_callback_id, body, frames, ordered)
        if outgoing.size_bytes > self._max_message_bytes:
            raise LocalProtocolError(
                f"a message of {outgoing.size_bytes} bytes is larger than max_message_bytes ({self._max_message_bytes})"
            )
        if not 0 <= remote_callback_id <= MAX_ID or remote_callback_id == ACK:
            raise LocalProtocolError(f"remote_callback_id is {remote_callback_id}, it must be 0 to 2^64 - 1 and not 2")
        if deadline is not None and not deadline > 0:
            raise LocalProtocolError(f"deadline is {deadline} seconds from now, it must be more than 0")
        if effect is not None and self._open_store is None:
            raise LocalProtocolError("the messenger has no store for the effect", hint="open it with open_store")
        if wait_s is not None and self._running_group().in_thread():
            raise LocalProtocolError("wait_s would block the messenger's own thread", hint="use `await send(...)`")
        ticket = None if callback is on_ack is on_failure is None else _Ticket(on_ack, on_failure)
        outgoing.ticket = ticket
        return self._submit(to, outgoing, callback, deadline, wait_s, effect)

    async def send(self, to: To, message: str | bytes, callback: Callback | None = None, **options: Any) -> int:
        """Send a message once there is room in the window to the peer; else as `send_message`; any loop."""
        with suppress(BusyError):
            return self.send_message(to, message, callback, **options)
        while True:
            room: Future[None] = Future()
            with self._lock:
                self._room_waits.append(room)
            try:  # again, for there may have been room before we waited for it
                return self.send_message(to, message, callback, **options)
            except BusyError:
                await asyncio.wrap_future(room)
            finally:
                with self._lock:
                    if room in self._room_waits:
                        self._room_waits.remove(room)

    async def deliver(self, to: To, message: str | bytes, **options: Any) -> int:
        """Send a message and wait until it is acknowledged; any loop.

        Args:
            to: as of `send_message`, and so is what follows, but for the handlers.
            message: as of `send_message`.
            options: as of `send_message`.

        Raises:
            BrokenError: it was given up; says why.
            ClosedError: the messenger was stopped; a store has the message still.
        """
        done: Future[int] = Future()
        with self._lock:
            self._delivering.add(done)
        try:
            await self.send(
                to,
                message,
                on_ack=lambda _, message_id: _settle(done, message_id),
                on_failure=lambda _, failure: _fail(done, failure),
                **options,
            )
            return await asyncio.wrap_future(done)
        finally:
            with self._lock:
                self._delivering.discard(done)

    async def request(self, to: To, message: str | bytes, **options: Any) -> ReceivedMessage:
        """Send a message and return the response; else as `deliver`."""
        done: Future[ReceivedMessage] = Future()
        await self.send(
            to,
            message,
            lambda _, response: _settle(done, response),
            on_failure=lambda _, failure: _fail(done, failure),
            **options,
        )
        return await asyncio.wrap_future(done)

    # --- what it is ----------------------------------------------------------------------------------------------

    @property
    def port(self) -> int | None:
        """The TCP port of listener 0; None: it has none."""
        if self._port is None or 0 not in self._listeners:
            return self._port
        return int(self._listeners[0].address.rpartition(":")[2])

    def send_state(self, to: To) -> SendState:
        """Return how much a peer can take; any thread.

        Raises:
            LocalProtocolError: there is no such connection or listener.
        """
        peer = self._peer_of(to)
        with self._lock:
            return peer.delivery.state

    def pending_count(self, to: To | None = None) -> int:
        """Return how many messages are unacknowledged; any thread.

        Args:
            to: only by this peer. None: by all.

        Raises:
            LocalProtocolError: there is no such connection or listener.
        """
        peers = None if to is None else [self._peer_of(to)]
        with self._lock:
            return sum(len(peer.delivery) for peer in peers or self._peers())

    def statistics(self) -> MessengerStatistics:
        """Return a frozen snapshot; O(peers), any thread."""
        with self._lock:
            peers = self._peers()
            return MessengerStatistics(
                peers=len(peers),
                pending=sum(len(peer.delivery) for peer in peers),
                pending_bytes=sum(peer.delivery.size_bytes for peer in peers),
                callbacks=len(self._callbacks),
                sent=self._sent,
                retries=sum(peer.delivery.retry_count for peer in peers),
                acknowledged=self._acknowledged,
                given_up=self._given_up,
                received=self._received_count,
                repeated=self._repeated,
                refused=self._refused,
                malformed=self._malformed,
                late=self._late + sum(peer.delivery.late_count for peer in peers),
                handler_errors=self._handler_errors,
            )

    # --- life, inner steps ---------------------------------------------------------------------------------------

    def _check_new(self) -> None:
        if self._group is not None:
            raise LocalProtocolError("a messenger is started once", hint="make another one")

    def _running_group(self) -> PollGroup:
        if self._group is None:
            raise LocalProtocolError("the messenger was not started", hint="start(), or async with")
        return self._group

    def _on_thread(self, call: Callable[[], T]) -> T:
        """Run `call` on the group's thread and return what it returns."""
        group = self._running_group()
        if group.in_thread():
            return call()
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001  (it is the caller's, on his thread)
                done.set_exception(error)

        group.call_soon(run)
        return done.result(_START_S)

    def _open(self) -> None:
        """Open the store and listen; the group's thread."""
        if self._open_store is not None:
            self._load(self._open_store(self._running_group().call_soon))
        if self._keys is not None:
            self._zap = ZapHandler(self._running_group(), bind_zap(self._context), self._admit)
        with self._lock:
            self._running = True
        if self._port is None:
            return
        endpoint = Destination.tcp("", self._host, self._port).endpoint
        self._listen(endpoint, self.identity, self._callback)
        # A socket each, so that one messenger can come by each way under its one name.
        self._listen(f"ipc://{self._ipc_dir}/flowctl-ipc-{self.port}", self.identity, self._callback, -1)
        self._listen(f"inproc://flowctl-inproc-{self.port}", self.identity, self._callback, -2)

    def _load(self, store: DurableStore) -> None:
        """Take over what an earlier life of this messenger left in its store."""
        self._store = store
        self.incarnation = store.incarnation
        for stored in store.pending():
            self._stored.setdefault(stored.peer, []).append(stored)
        for key, incarnation, first, last in store.seen():
            self._runs.setdefault(key, {}).setdefault(incarnation, []).append((first, last))
        for key in list(self._runs)[: -4 * MAX_REMEMBERED]:  # an entry for each of the four prefixes
            del self._runs[key]
            store.forget(key, None)
        with self._lock:
            self._next_id = store.next_message_id()
            # Callbacks do not outlive the process: responses to those of an earlier life must not meet ours.
            self._next_callback = (randbits(31) << 32) + FIRST_CALLBACK

    def _close(self, deadline_s: float) -> None:
        """Close everything; the group's thread."""
        with self._lock:
            if not self._running:
                return
            self._running = False
            self._room.notify_all()
            to_keep, self._to_keep = self._to_keep, deque()
        for peer, message, effect in to_keep:  # sent a moment ago: that was a promise
            self._keep(peer, message, effect)
        self._flush_acks()
        for task in list(self._tasks):
            task.cancel()
        endpoints = [*self._listeners.values(), *self._connections.values()]
        for endpoint in endpoints:
            endpoint.close()
            for peer in endpoint.peers.values():
                self._running_group().deadlines.remove(peer)
                self._withdraw_all(peer, Outcome.SHUTDOWN)
        self._running_group().deadlines.remove(self)
        with self._lock:
            waiting = self._callbacks.take_all()
        for _, item in waiting:
            failure = Failure(item.message.message_id, item.peer.to, Outcome.SHUTDOWN, item.message.settled)
            self._tell_failure(item.on_failure, failure)
        self._tell_room()
        with self._lock:
            kept, self._delivering = self._delivering, set()
        for future in kept:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(ClosedError("the messenger was stopped; its store has the message still"))
        if self._zap is not None:
            self._zap.close()
            self._context.destroy(linger=0)
        if self._store is not None:
            self._store.close(deadline_s)

    def _admit(self, request: ZapRequest) -> Mapping[str, str] | ZapRefusal:
        """Decide on a newcomer; one that is refused may be known later, so that it goes on trying."""
        verdict = self._allow is None or self._allow(request.pubkey)
        if not verdict:
            return ZapRefusal.TRY_LATER
        if isinstance(verdict, str):
            self._names[request.pubkey.hex()] = as_identity(verdict)
        else:
            self._names.pop(request.pubkey.hex(), None)
        return {}

    # --- listeners and connections, inner steps; the group's thread ----------------------------------------------

    def _listen(self, address: str, identity: bytes, callback: Callback | None, number: int | None = None) -> int:
        self._check_running()
        if number is None:
            number = self._listener_count
            self._listener_count += 1
        namesakes = sum(found.identity == identity for found in self._listeners.values())
        endpoint = MessengerSocket(number, identity, callback, is_router=True, namesakes=namesakes)
        raw = self._new_socket(zmq.ROUTER)
        if self._keys is not None:
            serve_curve(raw, self._keys)
            raw.set(zmq.ZAP_DOMAIN, zap_domain(endpoint.number))
        try:
            endpoint.bind(raw, address, self.incarnation)
        except BaseException:
            raw.close(linger=0)
            raise
        self._open_socket(endpoint, raw)
        self._listeners[endpoint.number] = endpoint
        self._restore_peers(endpoint)
        return endpoint.number

    def _connect(self, destination: Destination, callback: Callback | None) -> int:
        self._check_running()
        address, keys = destination.endpoint, self._keys
        if bool(destination.pubkey) is (keys is None):
            missing = "no keys of its own" if keys is None else f"no key of {destination.name or address}"
            raise LocalProtocolError(f"cannot connect to {address}: the messenger has {missing}")
        for found in self._connections.values():
            if found.address == address:
                return found.number
        self._check_peer_count()
        endpoint = MessengerSocket(self._connection_count, self.identity, callback, is_router=False)
        raw = self._new_socket(zmq.DEALER)
        if keys is not None:
            dial_curve(raw, keys, destination.pubkey)
        try:
            endpoint.connect(raw, address, self.incarnation)
        except BaseException:
            raw.close(linger=0)
            raise
        self._connection_count += 1
        self._open_socket(endpoint, raw)
        self._add_peer(endpoint, b"")
        self._connections[endpoint.number] = endpoint
        return endpoint.number

    def _disconnect(self, number: int) -> None:
        endpoint = self._connections.pop(number, None)
        if endpoint is None:
            raise LocalProtocolError(f"there is no connection {number}")
        endpoint.close()
        for peer in endpoint.peers.values():
            self._forget_peer(peer)
        with self._lock:  # those whose message is acknowledged; the others have just had their outcome
            waiting = self._callbacks.take_where(lambda _, item: item.peer.endpoint is endpoint)
        for _, item in waiting:
            self._unanswered(item, Outcome.WITHDRAWN)

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        raw = self._context.socket(kind)
        queue_count = 2 * self._settings.window + 1000  # messages and acknowledgements
        prepare(raw, self.incarnation, queue_count, self._max_message_bytes + 100)
        return raw

    def _open_socket(self, endpoint: MessengerSocket, raw: zmq.Socket[bytes]) -> None:
        received = self._router_received if endpoint.is_router else self._dealer_received
        endpoint.socket = ZmqSocket(
            self._running_group(),
            raw,
            partial(received, endpoint),
            writable=None if endpoint.is_router else partial(self._heard, endpoint),
        )
        endpoint.socket.start()

    def _add_peer(self, endpoint: MessengerSocket, route: bytes) -> MessengerPeer:
        """Know one peer more; any thread."""
        key = endpoint.key_of(route)
        now = self._running_group().now()
        with self._lock:
            found = endpoint.peers.get(route)
            if found is not None:
                return found
            stored = self._stored.pop(key, [])
            # More than any number that a message to this peer has had, also if it was known before and forgotten.
            durable = self._store is not None
            delivery = Delivery(self._settings, self._rng, now, self._next_id + 1, durable=durable)
            peer = MessengerPeer(self, endpoint, route, delivery, self._held_room)
            for item in stored:
                message, after, deadline_at = decode_record(item.message_id, item.record)
                if deadline_at is not None:
                    message.deadline = now + max(0.0, deadline_at - time.time())
                peer.delivery.restore(message, item.sequence, after, now)
                self._pending_bytes += message.size_bytes
            peer.delivery.announced = ANNOUNCES + key in self._runs or None
            ids = self._runs.pop(IDS + key, {})
            sequences = self._runs.pop(SEQUENCES + key, {})
            old = self._runs.pop(OLD + key, {})
            for incarnation in {**ids, **sequences}:
                old_below = max((last + 1 for _, last in old.get(incarnation, [])), default=0)
                peer.arrivals.restore(incarnation, ids.get(incarnation, []), sequences.get(incarnation, []), old_below)
            remembered = self._remembered.pop(key, None)
            if remembered is not None:
                peer.arrivals, peer.pubkey = remembered
                self._remembered_gap_count -= peer.arrivals.gap_count
            endpoint.peers[route] = peer
            self._peer_count += 1
            wake = bool(stored) and self._queue_locked(peer)
        if wake:
            self._running_group().call_soon(self._pump)
        return peer

    def _restore_peers(self, endpoint: MessengerSocket) -> None:
        """Go on sending to the peers of a listener that an earlier life had messages for."""
        prefix = endpoint.key_of(b"")
        for key in [key for key in self._stored if key.startswith(prefix)]:
            self._add_peer(endpoint, key[len(prefix) :])

    def _forget_peer(self, peer: MessengerPeer) -> None:
        self._running_group().deadlines.remove(peer)
        self._withdraw_all(peer, Outcome.WITHDRAWN)
        self._peer_count -= 1
        peer.arrivals.drop_held()
        gap_count = peer.arrivals.gap_count
        gone: bytes | None = None
        with self._lock:
            if gap_count and self._remembered_gap_count + gap_count > MAX_REMEMBERED_GAPS:
                gone = peer.key
            else:
                self._remembered[peer.key] = peer.arrivals, peer.pubkey
                self._remembered_gap_count += gap_count
                if len(self._remembered) > MAX_REMEMBERED:
                    gone = next(iter(self._remembered))
                    self._remembered_gap_count -= self._remembered.pop(gone)[0].gap_count
        if gone is not None and self._store is not None:
            for prefix in (SEQUENCES, IDS, OLD, ANNOUNCES):
                self._store.forget(prefix + gone, None)

    def _check_peer_count(self) -> None:
        """See that there is room for one peer more: one that came to a listener and is idle makes it."""
        if self._peer_count < self._max_peers:
            return
        spare: tuple[MessengerSocket, bytes] | None = None
        for endpoint in self._listeners.values():
            for route, peer in list(islice(endpoint.peers.items(), _LOOKED_AT)):
                if peer.arrivals.idle and not len(peer.delivery):
                    self._make_room(endpoint, route)
                    return
                if spare is None and not peer.arrivals.is_handling and len(peer.delivery) == peer.echo_count:
                    spare = endpoint, route  # what it has here comes again, or is an echo of its own
                with self._lock:  # next time others are looked at first
                    endpoint.peers[route] = endpoint.peers.pop(route)
        if spare is not None:
            self._make_room(*spare)
            return
        raise BusyError(f"there are {self._peer_count} peers, which is max_peers, and all are busy")

    def _make_room(self, endpoint: MessengerSocket, route: bytes) -> None:
        with self._lock:
            peer = endpoint.peers.pop(route)
        self._forget_peer(peer)

    def _check_running(self) -> None:
        with self._lock:
            self._check_running_locked()

    def _check_running_locked(self) -> None:
        self._lock.assert_owned()
        if not self._running:
            self._running_group()
            raise ClosedError("the messenger was stopped")

    def _listener(self, router_id: int) -> MessengerSocket:
        endpoint = self._listeners.get(router_id)
        if endpoint is None:
            raise LocalProtocolError(f"there is no listener {router_id}")
        return endpoint

    def _peer_of(self, to: To) -> MessengerPeer:
        """Return who `to` is; any thread."""
        if isinstance(to, tuple):
            endpoint, route = self._listener(to[0]), as_identity(to[1])
            peer = endpoint.peers.get(route)
            if peer is None and to[0] == 0:  # it may have come by another way
                peer = next((way.peers[route] for way in self._ways() if route in way.peers), None)
            if peer is None:
                if not 0 < len(route) <= MAX_IDENTITY_BYTES:
                    raise LocalProtocolError(f"an identity has 1 to {MAX_IDENTITY_BYTES} bytes, not {len(route)}")
                self._on_thread(self._check_peer_count)
                peer = self._add_peer(endpoint, route)
            return peer
        connection = self._connections.get(to)
        if connection is None:
            raise LocalProtocolError(f"there is no connection {to}")
        return connection.peers[b""]

    def _ways(self) -> list[MessengerSocket]:
        """Return what belongs to listener 0 beside its TCP socket."""
        return [self._listeners[number] for number in (-1, -2) if number in self._listeners]

    def _peers(self) -> list[MessengerPeer]:
        endpoints = [*self._listeners.values(), *self._connections.values()]
        return [peer for endpoint in endpoints for peer in list(endpoint.peers.values())]

    # --- sending, inner steps ------------------------------------------------------------------------------------

    def _submit(
        self,
        to: To,
        message: Outgoing,
        callback: Callback | None = None,
        deadline: float | None = None,
        wait_s: float | None = None,
        effect: Effect | None = None,
    ) -> int:
        """Give a message its number and its credit; any thread."""
        group = self._running_group()
        peer = self._peer_of(to)
        with self._lock:
            if wait_s is not None:
                self._room.wait_for(lambda: not self._is_full_locked(peer, message), wait_s)
            self._check_running_locked()
            now = group.now()
            if self._pending_bytes + message.size_bytes > MAX_PENDING_BYTES:
                raise BusyError(f"{self._pending_bytes} bytes are unacknowledged, the most are {MAX_PENDING_BYTES}")
            if callback is not None and len(self._callbacks) >= MAX_CALLBACKS:
                raise BusyError(f"{MAX_CALLBACKS} callbacks wait for their response")
            message.message_id = self._next_id
            message.target = peer.announced
            if deadline is not None:
                message.deadline = now + deadline
            peer.delivery.submit(message, now)
            self._next_id = (self._next_id + 1) & MAX_ID
            self._pending_bytes += message.size_bytes
            if callback is not None:
                self._register_locked(peer, message, callback, now + (CALLBACK_S if deadline is None else deadline))
            if self._store is not None:
                self._to_keep.append((peer, message, effect))
            wake = self._queue_locked(peer)
        if wake:
            group.call_soon(self._pump)
        return message.message_id

    def _is_full_locked(self, peer: MessengerPeer, message: Outgoing) -> bool:
        self._lock.assert_owned()
        return self._running and peer.delivery.full(message.size_bytes)

    def _register_locked(self, peer: MessengerPeer, message: Outgoing, callback: Callback, due: float) -> None:
        """Enter a message-specific callback under the next free id."""
        self._lock.assert_owned()
        number = self._next_callback
        while number in self._callbacks:
            number = FIRST_CALLBACK if number == MAX_ID else number + 1
        self._next_callback = FIRST_CALLBACK if number == MAX_ID else number + 1
        message.source_callback = number
        ticket = message.ticket
        on_failure = None
        if isinstance(ticket, _Ticket):
            ticket.callback_id, on_failure = number, ticket.on_failure
        self._callbacks.add(number, _Waiting(peer, message, callback, on_failure), due)

    def _queue_locked(self, peer: MessengerPeer) -> bool:
        """Have something sent to `peer` soon; True: the pump is to be called."""
        self._lock.assert_owned()
        if not peer.queued:
            peer.queued = True
            self._to_send.append(peer)
        queued, self._pump_queued = self._pump_queued, True
        return not queued

    def _wake(self, peer: MessengerPeer) -> None:
        with self._lock:
            wake = self._queue_locked(peer)
        if wake:
            self._running_group().call_soon(self._pump)

    def _pump(self) -> None:
        """Send what is ready, to each peer in turn."""
        with self._lock:
            self._pump_queued = False
            if not self._running:
                return
            peers, self._to_send = self._to_send, []
            for peer in peers:
                peer.queued = False
            to_keep, self._to_keep = self._to_keep, deque()
            callbacks_due = self._callbacks.next_deadline()
        for peer, message, effect in to_keep:
            self._keep(peer, message, effect)
        for peer in peers:
            self._send_to(peer)
        if callbacks_due is not None and (self._callbacks_timer_at is None or callbacks_due < self._callbacks_timer_at):
            self._callbacks_timer_at = callbacks_due
            self._running_group().deadlines.set(self, callbacks_due)

    def _keep(self, peer: MessengerPeer, message: Outgoing, effect: Effect | None, *, again: bool = False) -> None:
        """Put a message into the outbox, and let it go once it is there; `again`: it is, and may go in any case."""
        store = self._store
        if store is None:
            return
        deadline_at = None
        if message.deadline is not None:
            deadline_at = time.time() + message.deadline - self._running_group().now()

        def kept(error: Exception | None) -> None:
            if error is not None and not again:
                self._running_group().report("the outbox of a messenger", error)
                self._give_up(peer, message, Outcome.REJECTED)
                return
            with self._lock:
                peer.delivery.release(message)
            self._wake(peer)

        record = encode_record(message, deadline_at)
        store.add(message.message_id, peer.key, message.sequence, record, kept, effect)

    def _send_to(self, peer: MessengerPeer) -> None:
        """Hand to ZeroMQ what is ready for one peer."""
        now = self._running_group().now()
        delivery, reachable = peer.delivery, not peer.endpoint.socket.closed
        if not delivery.announced and (incarnation := peer.endpoint.announced_within()):
            self._learn(peer, incarnation)
        for _ in range(_BATCHES):
            with self._lock:
                batch = delivery.take(now, _BATCH)
                floor, decided = delivery.floor, delivery.take_decided()
            for message in decided:
                self._keep(peer, message, None, again=True)
            if not batch:
                break
            count = self._hand_over(peer, batch, floor) if reachable else 0
            self._sent += count
            with self._lock:
                delivery.handed(batch[:count], now)
                if count < len(batch):
                    reachable = False
                    delivery.refused(batch[count:], now)
        else:
            self._wake(peer)
        self._look_after(peer)

    def _hand_over(self, peer: MessengerPeer, batch: Sequence[Outgoing], floor: int) -> int:
        """Send messages until ZeroMQ refuses one; return how many it took."""
        send, envelope = peer.endpoint.socket.send, peer.envelope
        incarnation = self.incarnation
        for index, message in enumerate(batch):
            frame = encode_message(
                message.message_id, message.source_callback, message.destination_callback, message.body
            )
            if not message.plain:
                extension = Extension(incarnation, message.sequence, floor, message.after, message.target)
                frames = [*envelope, frame, extension.encode(), *message.payload]
            elif message.payload:
                frames = [*envelope, frame, *message.payload]
            else:
                frames = [*envelope, frame]
            try:
                send(frames)
            except zmq.ZMQError:  # nobody is there, or the queue is full: it is tried again
                return index
        return len(batch)

    def _look_after(self, peer: MessengerPeer) -> None:
        """Set the time of the next attempt, and announce what became of the state."""
        with self._lock:
            due = peer.delivery.next_deadline()
            edges = peer.delivery.take_edges()
        if due is not None and (peer.timer_at is None or due < peer.timer_at):
            peer.timer_at = due
            self._running_group().deadlines.set(peer, due)
        handler = self._send_state_changed
        for edge in edges if handler is not None else ():
            self._call("send_state_changed", handler or _ignore, peer.to, edge)

    def peer_due(self, peer: MessengerPeer, now: float) -> None:
        """Try again what is due, and give up what has no more time or attempts; called by the peer's timer."""
        with self._lock:
            given_up = peer.delivery.due(now)
        for message, outcome in given_up:
            self._given_up_with(peer, message, outcome)
        self._send_to(peer)

    def deadline_due(self, now: float) -> None:
        """Give up callbacks that waited too long for their response; called by the messenger's timer."""
        self._callbacks_timer_at = None
        with self._lock:
            due = self._callbacks.take_due(now)
            next_due = self._callbacks.next_deadline()
        for _, item in due:
            with self._lock:
                withdrawn = item.peer.delivery.withdraw(item.message, now)
            if withdrawn:
                self._given_up_with(item.peer, item.message, Outcome.TIMEOUT)
            else:
                self._unanswered(item, Outcome.TIMEOUT)
        if next_due is not None:
            self._callbacks_timer_at = next_due
            self._running_group().deadlines.set(self, next_due)

    def _unanswered(self, item: _Waiting, outcome: Outcome) -> None:
        """Tell of a message that was acknowledged, and whose callback gets no response any more."""
        self._given_up += 1
        self._tell_failure(item.on_failure, Failure(item.message.message_id, item.peer.to, outcome, True))
        self._tell_room()

    def _give_up(self, peer: MessengerPeer, message: Outgoing, outcome: Outcome) -> None:
        with self._lock:
            withdrawn = peer.delivery.withdraw(message, self._running_group().now())
        if withdrawn:
            self._given_up_with(peer, message, outcome)

    def _withdraw_all(self, peer: MessengerPeer, outcome: Outcome) -> None:
        with self._lock:
            messages = list(peer.delivery)
        if outcome is Outcome.SHUTDOWN and self._store is not None:
            return  # the store has them
        for message in messages:
            self._give_up(peer, message, outcome)

    def _given_up_with(self, peer: MessengerPeer, message: Outgoing, outcome: Outcome) -> None:
        """Tell of a message that has left the delivery without an acknowledgement."""
        self._given_up += 1
        self._freed(message)
        failure = Failure(message.message_id, peer.to, outcome, False, message.body, message.payload)
        ticket = message.ticket
        if isinstance(ticket, _Ticket):
            if ticket.callback_id:
                with self._lock:
                    if ticket.callback_id in self._callbacks:
                        self._callbacks.take(ticket.callback_id)
            self._tell_failure(ticket.on_failure, failure)
        if outcome is not Outcome.SHUTDOWN:
            self._tell_failure(self._dead_letter, failure)

    def _tell_failure(self, handler: FailureHandler | None, failure: Failure) -> None:
        if handler is not None:
            self._call("a failure handler", handler, failure)

    def _freed(self, message: Outgoing) -> None:
        """A message has its outcome: its room is free."""
        if self._store is not None:
            self._store.remove(message.message_id)
        if isinstance(message.ticket, _EchoTicket):
            self._echo_bytes -= message.ticket.cost_bytes
            message.ticket.peer.echo_count -= 1
        with self._lock:
            self._pending_bytes -= message.size_bytes
        self._tell_room()

    def _tell_room(self) -> None:
        """Have those who wait for room try again."""
        with self._lock:
            self._room.notify_all()
            rooms, self._room_waits = self._room_waits, []
        for room in rooms:
            _settle(room, None)

    def _heard(self, endpoint: MessengerSocket) -> None:
        """The connection of a DEALER has room again."""
        for peer in endpoint.peers.values():
            self._heard_from(peer)

    def _heard_from(self, peer: MessengerPeer) -> None:
        with self._lock:
            ready = peer.delivery.heard() and self._queue_locked(peer)
        if ready:
            self._running_group().call_soon(self._pump)

    # --- receiving; the group's thread ---------------------------------------------------------------------------

    def _router_received(self, endpoint: MessengerSocket, frames: list[bytes]) -> None:
        if len(frames) < 3 or frames[1]:
            self._note_malformed(RemoteProtocolError(f"a message of {len(frames)} frames without an empty second one"))
            return
        pubkey = "" if self._keys is None else endpoint.sender_pubkey()
        peer = endpoint.peers.get(frames[0])
        if self._keys is not None and not self._may_speak(endpoint, peer, frames[0], pubkey):
            self._refused += 1
            return
        if peer is None:
            if frames[0].startswith(b"\0") and endpoint.left_over():
                self._refused += 1
                return
            try:
                parse_message(frames[2])  # who sends none makes us know nobody
                self._check_peer_count()
            except (RemoteProtocolError, BusyError) as error:
                self._note_malformed(error)
                return
            peer = self._add_peer(endpoint, frames[0])
            if peer.pubkey not in {"", pubkey}:  # it was known before, and forgotten
                self._refused += 1
                return
        peer.pubkey = pubkey
        self._received(peer, frames[2], frames[3:])

    def _may_speak(self, endpoint: MessengerSocket, peer: MessengerPeer | None, route: bytes, pubkey: str) -> bool:
        """Return whether the holder of a key, as ZeroMQ has it, may speak under an identity.

        ZeroMQ gives the route of an identity to the connection that last took it; only the key says whose it is.
        """
        if self._names.get(pubkey, route) != route:
            return False
        if peer is not None and peer.pubkey:
            return peer.pubkey == pubkey
        if not pubkey:  # it is in this process
            return True
        # Each way to listener 0 has its own socket; an identity is one and the same there.
        ways = [self._listeners[0], *self._ways()] if endpoint.number <= 0 else []
        return all(way.peers[route].pubkey in {"", pubkey} for way in ways if route in way.peers)

    def _dealer_received(self, endpoint: MessengerSocket, frames: list[bytes]) -> None:
        peer = endpoint.peers[b""]
        if len(frames) > 2 and not frames[1]:
            self._received(peer, frames[2], frames[3:])
        elif len(frames) > 1 and not frames[0]:  # a ROUTER that does not say who it is
            self._received(peer, frames[1], frames[2:])
        else:
            self._note_malformed(RemoteProtocolError(f"a message of {len(frames)} frames without an empty one"))

    def _received(self, peer: MessengerPeer, frame: bytes, rest: list[bytes]) -> None:
        try:
            header = parse_message(frame)
            if header.destination_callback == ACK:
                self._take_ack(peer, header)
            else:
                self._take_message(peer, header, rest)
        except RemoteProtocolError as error:
            self._note_malformed(error)

    def _note_malformed(self, error: Exception) -> None:
        """Count what no peer should send; report it, but not each of a flood."""
        self._malformed += 1
        now = self._running_group().now()
        if now - self._malformed_at >= _MALFORMED_EVERY_S:
            self._malformed_at = now
            self._running_group().report(f"input of a messenger ({self._malformed} malformed so far)", error)

    def _take_ack(self, peer: MessengerPeer, header: Header) -> None:
        now = self._running_group().now()
        self._learn_by_handshake(peer)
        ranges = parse_acks(header, self.incarnation)
        with self._lock:
            messages = peer.delivery.acknowledged_ranges(ranges, now)
        self._settled(peer, messages)

    def _settled(self, peer: MessengerPeer, messages: list[Outgoing]) -> None:
        """Messages were acknowledged."""
        self._acknowledged += len(messages)
        for message in messages:
            self._freed(message)
            ticket = message.ticket
            if isinstance(ticket, _Ticket) and ticket.on_ack is not None:
                self._call("an acknowledgement handler", ticket.on_ack, message.message_id)
        if peer.delivery.is_ready:
            self._wake(peer)
        if peer.delivery.has_edges:
            self._look_after(peer)
        self._heard_from(peer)

    def _learn_by_handshake(self, peer: MessengerPeer) -> int:
        """Look at what the peer announced when it connected; return its incarnation, 0: it announced none."""
        incarnation = peer.endpoint.announcement(peer.envelope[0])
        if incarnation is None:  # left over by one that has closed: it is as it was
            return peer.arrivals.incarnation or 0
        if incarnation != peer.announced or peer.delivery.announced is None:
            self._learn(peer, incarnation)
        return incarnation

    def _learn(self, peer: MessengerPeer, incarnation: int) -> None:
        """Note that a peer announced the extension, or that it does not any more (0)."""
        peer.announced = incarnation
        with self._lock:
            peer.delivery.announced = bool(incarnation)
        if incarnation and self._store is not None:
            self._store.mark(ANNOUNCES + peer.key, 0, 0, _ignore)

    def _take_message(self, peer: MessengerPeer, header: Header, rest: list[bytes]) -> None:
        size_bytes = len(header.body) + sum(map(len, rest))
        if size_bytes > self._max_message_bytes + 100:
            raise RemoteProtocolError(f"a message of {size_bytes} bytes, the most are {self._max_message_bytes}")
        extension = Extension.decode(rest[0]) if rest else None
        if extension is not None and extension.incarnation != peer.announced:
            known = peer.endpoint.announcement(peer.envelope[0])
            if known is not None and known != extension.incarnation:
                extension = None  # payload that looks like it: the sender announced something else
            else:
                self._learn(peer, extension.incarnation)
        if extension is None:
            incarnation = self._learn_by_handshake(peer)
        else:
            incarnation, rest = extension.incarnation, rest[1:]
        effects: list[Effect] | None = None if self._store is None or self._ack_on_receipt else []
        route = peer.envelope[0] if peer.endpoint.is_router else b""
        message = ReceivedMessage(
            header.message_id,
            header.source_callback,
            header.destination_callback,
            route,
            header.body,
            tuple(rest),
            peer.to,
            effects,
        )
        arrived = Arrived(incarnation, header.message_id, extension, size_bytes, message)
        self._judge(peer, arrived)
        self._heard_from(peer)

    def _judge(self, peer: MessengerPeer, arrived: Arrived) -> None:
        arrivals = peer.arrivals
        before = arrivals.incarnation, arrivals.floor
        fate = arrivals.arrive(arrived)
        if self._store is not None and (arrivals.incarnation, arrivals.floor) != before:
            self._keep_floor(peer, before[0])
        if fate is Fate.HANDLE:
            self._handle(peer, arrived)
        elif fate is Fate.AGAIN:
            self._repeated += 1
            self._acknowledge(peer, arrived)
        elif fate is not Fate.WAIT:
            self._refused += 1
        self._handle_released(peer)

    def _keep_floor(self, peer: MessengerPeer, incarnation: int | None) -> None:
        """Have the store forget an earlier life of a peer, and close the gaps that will never be filled."""
        store, arrivals = self._store, peer.arrivals
        if store is None or not arrivals.incarnation:
            return
        if incarnation not in {None, arrivals.incarnation}:
            store.forget(SEQUENCES + peer.key, arrivals.incarnation)
            store.forget(IDS + peer.key, arrivals.incarnation)
            store.forget(OLD + peer.key, arrivals.incarnation)
        if arrivals.floor > 1 and arrivals.gap_closed():
            store.mark_run(SEQUENCES + peer.key, arrivals.incarnation, 0, arrivals.floor - 1, _ignore)

    def _handle_released(self, peer: MessengerPeer) -> None:
        """Handle what waited for a message that was handled; one that this lets go is next in this same loop."""
        if peer.releasing:
            return
        peer.releasing = True
        try:
            while released := peer.arrivals.take_released():
                for arrived in released:
                    self._handle(peer, arrived)
        finally:
            peer.releasing = False

    def _handle(self, peer: MessengerPeer, arrived: Arrived) -> None:
        """Do what a new message asks for."""
        message = arrived.item
        if not isinstance(message, ReceivedMessage):
            return
        number = message.destination_callback_id
        if self._handles_too_much(peer) or (
            number == ECHO
            and (peer.delivery.full(arrived.size_bytes) or self._echo_bytes + arrived.size_bytes > MAX_ECHO_BYTES)
        ):
            self._refused += 1
            peer.arrivals.failed(arrived)
            return
        steps: list[tuple[Callback, bool]] = []
        if number >= FIRST_CALLBACK:
            found = self._take_callback(peer, number, arrived.extension)
            if found is not None:
                steps.append((found, False))
        if peer.endpoint.callback is not None:
            steps.append((peer.endpoint.callback, True))
        if number == ECHO:
            steps.append((partial(self._echo, peer), True))  # at last: if a handler fails, all of this comes again
        if self._ack_on_receipt:
            self._take_receipt(peer, arrived)
        self._run(peer, arrived, message, steps)

    def _handles_too_much(self, peer: MessengerPeer) -> bool:
        """Return whether nothing of a peer can be handled now: too much is, for all or for it."""
        return (
            peer.handling_count >= MAX_HANDLING - len(self._tasks)
            or peer.handling_bytes >= MAX_HANDLING_BYTES - self._handling_bytes
        )

    def _wait_for(
        self,
        peer: MessengerPeer,
        message: ReceivedMessage,
        work: Coroutine[Any, Any, None],
        waits_for: Awaitable[object],
    ) -> None:
        """Run what goes on with the handlers of a message, and count it while it runs."""
        size_bytes = len(message.message) + sum(map(len, message.payload))
        peer.handling_count += 1
        peer.handling_bytes += size_bytes
        self._handling_bytes += size_bytes

        def ended(_: asyncio.Task[None]) -> None:
            peer.handling_count -= 1
            peer.handling_bytes -= size_bytes
            self._handling_bytes -= size_bytes

        self._spawn(work, waits_for).add_done_callback(ended)

    def _echo(self, peer: MessengerPeer, _: Messenger, message: ReceivedMessage) -> None:
        """Send a message back the way it came."""
        answer = Outgoing(0, 0, message.source_callback_id, message.message, message.payload)
        if answer.destination_callback == ACK:
            answer.destination_callback = NOOP
        answer.ticket = _EchoTicket(peer, answer.size_bytes + _ECHO_COST_BYTES)
        self._submit(message.sender, answer)
        self._echo_bytes += answer.size_bytes + _ECHO_COST_BYTES
        peer.echo_count += 1

    def _take_callback(self, peer: MessengerPeer, number: int, extension: Extension | None) -> Callback | None:
        """Return the message-specific callback of a response, called once. None: there is none, or it is not his."""
        with self._lock:
            item = self._callbacks.get(number)
            foreign = item is not None and item.peer.to != peer.to
            if item is None or foreign or (extension and extension.target not in {0, self.incarnation}):
                self._late += 1
                return None
            self._callbacks.take(number)
            messages = []
            if not item.message.settled:  # the response says what an acknowledgement would
                number = item.message.message_id
                messages = peer.delivery.acknowledged(number, number, self._running_group().now())
        self._settled(peer, messages)
        self._tell_room()
        return item.callback

    def _run(
        self,
        peer: MessengerPeer,
        arrived: Arrived,
        message: ReceivedMessage,
        steps: list[tuple[Callback, bool]],
        first: int = 0,
    ) -> None:
        """Call the handlers of a message one after the other; the one that waits goes on as a task."""
        for index in range(first, len(steps)):
            handler, decides = steps[index]
            try:
                result = handler(self, message)
            except BaseException as error:  # noqa: BLE001  (a handler's fault is its message's)
                if self._handler_failed(peer, arrived, error, decides=decides):
                    return
                continue
            if inspect.isawaitable(result):
                self._wait_for(peer, message, self._go_on(peer, arrived, message, steps, index, result), result)
                return
        self._received_count += 1
        self._applied(peer, arrived)

    async def _go_on(
        self,
        peer: MessengerPeer,
        arrived: Arrived,
        message: ReceivedMessage,
        steps: list[tuple[Callback, bool]],
        index: int,
        result: Awaitable[object],
    ) -> None:
        """Wait for a handler, then go on with the others."""
        try:
            await result
        except BaseException as error:  # noqa: BLE001  (the same)
            if self._handler_failed(peer, arrived, error, decides=steps[index][1]):
                return
        self._run(peer, arrived, message, steps, index + 1)

    def _handler_failed(self, peer: MessengerPeer, arrived: Arrived, error: BaseException, *, decides: bool) -> bool:
        """Report what a handler raised; True: the message counts as not received, unless that was acknowledged."""
        self._handler_errors += 1
        if not (isinstance(error, asyncio.CancelledError) and not self._is_running()):
            self._running_group().report("a handler of a messenger", error)
        if decides and self._ack_on_receipt:
            self._seen(peer, arrived)
        elif decides:
            peer.arrivals.failed(arrived)
        return decides

    def _is_running(self) -> bool:
        with self._lock:
            return self._running

    def _applied(self, peer: MessengerPeer, arrived: Arrived) -> None:
        """The handlers of a message have run: make that durable, then acknowledge it, unless both was done before."""
        store = self._store
        if store is None or self._ack_on_receipt:
            self._seen(peer, arrived)
            return
        message = arrived.item
        effects = message.effects if isinstance(message, ReceivedMessage) else None

        def effect(connection: Any) -> None:
            for item in effects or ():
                item(connection)

        def marked(error: Exception | None) -> None:
            if error is None:
                self._seen(peer, arrived)
            else:
                self._handler_failed(peer, arrived, error, decides=True)

        prefix = IDS if arrived.extension is None else SEQUENCES
        if arrived.number >> 63 or not self._is_running():  # no store keeps such numbers; no sender of ours has them
            peer.arrivals.failed(arrived)
            return
        store.mark(prefix + peer.key, arrived.incarnation, arrived.number, marked, effect if effects else None)

    def _take_receipt(self, peer: MessengerPeer, arrived: Arrived) -> None:
        """Acknowledge a message before its handlers run; it counts as handled, for those in order behind it, after."""
        store = self._store
        if store is None:
            self._acknowledge(peer, arrived)
        elif self._is_running() and not arrived.number >> 63:
            prefix = IDS if arrived.extension is None else SEQUENCES

            def marked(error: Exception | None) -> None:
                if error is None:
                    self._acknowledge(peer, arrived)
                else:
                    self._running_group().report("the store of a messenger", error)

            store.mark(prefix + peer.key, arrived.incarnation, arrived.number, marked)

    def _seen(self, peer: MessengerPeer, arrived: Arrived) -> None:
        old_below = peer.arrivals.old_below
        if peer.arrivals.applied(arrived):
            if not self._ack_on_receipt:
                self._acknowledge(peer, arrived)
            if self._store is not None and peer.arrivals.old_below > old_below:
                for prefix in (IDS, OLD):  # one row in place of many, and what it stands for
                    self._store.mark_run(
                        prefix + peer.key, arrived.incarnation, 0, peer.arrivals.old_below - 1, _ignore
                    )
        self._handle_released(peer)

    def _acknowledge(self, peer: MessengerPeer, arrived: Arrived) -> None:
        """Acknowledge a message at the end of this turn."""
        if not peer.acks:
            if not self._peers_to_acknowledge:
                self._running_group().call_soon(self._flush_acks)
            self._peers_to_acknowledge.append(peer)
        peer.acks.append(arrived.message_id)

    def _flush_acks(self) -> None:
        """Send the acknowledgements of a turn; what does not get through is asked for again by its sender."""
        peers, self._peers_to_acknowledge = self._peers_to_acknowledge, []
        for peer in peers:
            ids, peer.acks = peer.acks, []
            incarnation = peer.arrivals.incarnation
            frames = encode_acks(incarnation, ids) if incarnation else [encode_ack(number) for number in ids]
            with suppress(zmq.ZMQError):
                for frame in frames:
                    peer.endpoint.socket.send([*peer.envelope, frame])

    # --- the user's code -----------------------------------------------------------------------------------------

    def _call(self, what: str, handler: Callable[..., object], *args: object) -> None:
        """Call a handler that decides nothing."""
        try:
            result = handler(self, *args)
        except BaseException as error:  # noqa: BLE001  (a handler's fault is its own)
            self._handler_errors += 1
            self._running_group().report(what, error)
            return
        if inspect.isawaitable(result):
            self._spawn(self._finish(what, result), result)

    async def _finish(self, what: str, result: Awaitable[object]) -> None:
        try:
            await result
        except BaseException as error:  # noqa: BLE001  (a handler's fault is its own)
            self._handler_errors += 1
            self._running_group().report(what, error)

    def _spawn(self, work: Coroutine[Any, Any, None], waits_for: object) -> asyncio.Task[None]:
        task = self._running_group().loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if inspect.iscoroutine(waits_for):  # a task that is cancelled before it begins would never look at it
            task.add_done_callback(lambda _: waits_for.close())
        return task


def check_identity(identity: str | bytes) -> bytes:
    """Return an identity as octets."""
    octets = as_identity(identity)
    if not 0 < len(octets) <= MAX_IDENTITY_BYTES:
        raise ConfigError(f"an identity has 1 to {MAX_IDENTITY_BYTES} bytes, not {len(octets)}")
    if octets.startswith(b"\0"):
        raise ConfigError("an identity does not begin with a NUL")
    return octets


def _process_context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with suppress(zmq.ZMQError):
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def _ignore(_: Exception | None) -> None:
    """Be told of what changes nothing if it fails."""


def _shown(identity: bytes) -> str:
    return identity[:32].decode("ascii", "backslashreplace")


def _settle(future: Future[T], value: T) -> None:
    """Give a future its value, unless somebody has given it up meanwhile."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def _fail(future: Future[Any], failure: Failure) -> None:
    if future.set_running_or_notify_cancel():
        what = "answered" if failure.acknowledged else "acknowledged"
        future.set_exception(BrokenError(f"message {failure.message_id} was not {what}: {failure.outcome.value}"))
