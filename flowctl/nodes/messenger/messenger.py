"""A messenger: messages with a callback each, to and from others, each applied once.

Theory of operation. All sockets, and what arrives, live on the thread of one poll group: its own after `start`, or the
caller's running loop with ``async with``. Here is who the peers are, and by which socket each is reached; what is sent
to them is `MessengerOutbound`'s, what comes from them `MessengerInbound`'s. Nothing of the user's runs under the lock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import Any, Final, Self, TypeVar

from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.flow.state import SendState, StateChange
from flowctl.core.loop.faults import ErrorHook
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outcomes.pending import Outcome
from flowctl.errors import BrokenError, BusyError, ClosedError, ConfigError, LocalProtocolError, RemoteProtocolError
from flowctl.nodes.messenger.arrivals import Arrivals, HeldRoom
from flowctl.nodes.messenger.delivery import DeliverySettings, Outgoing
from flowctl.nodes.messenger.inbound import MessengerInbound
from flowctl.nodes.messenger.message import Destination, Failure, Handler, Handlers, ReceivedMessage, To
from flowctl.nodes.messenger.outbound import MessengerOutbound, Ticket, settle
from flowctl.nodes.messenger.peer import MessengerConnection, MessengerPeer, MessengerSocket, row_of
from flowctl.nodes.messenger.store import MessageStore, OpenStore
from flowctl.nodes.messenger.storefile import ANNOUNCES, IDS, OLD, SEQUENCES, Effect, StoredMessage
from flowctl.nodes.messenger.wire import ACK, MAX_ID, MAX_IDENTITY_BYTES, NOOP, as_identity, parse_message
from flowctl.pollgroup import LoopFactory, PollGroup
from flowctl.wire.zmtp.keys import KeyPair
from flowctl.wire.zmtp.link import LinkOptions
from flowctl.wire.zmtp.mechanism import RefusedError
from flowctl.wire.zmtp.peer import ZmtpLimits

Callback = Callable[["Messenger", ReceivedMessage], object]
"""Handles a message; may be a coroutine function."""
FailureHandler = Callable[["Messenger", Failure], object]
"""Called with a message that was given up; may be a coroutine function."""
StateHandler = Callable[["Messenger", To, StateChange], object]
"""Called at each change of a peer's send state; may be a coroutine function."""

MOST_PAYLOAD_FRAMES: Final = 1000
"""Most further frames of a message."""
MAX_REMEMBERED: Final = 20_000
"""Peers that have left whose messages are remembered: some 40 MB. The earliest are forgotten first, on the disk too; a
message that one of them sends again afterwards is handled again."""
MAX_REMEMBERED_GAPS: Final = 1_000_000
"""Gaps in the numbers of these peers, some 100 MB; a peer that would exceed them is forgotten itself."""

_PEERS_EXAMINED: Final = 64
"""Peers of a listener that are examined for one to forget; the next newcomer continues after them."""
_START_S: Final = 30.0
_LINE_DEAD_AFTER_S: Final = 10.0
"""Time without an answer of its system after which a peer counts as gone."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessengerStatistics:
    """One messenger at one moment."""

    peers: int  #: known, whether connected or not
    pending: int  #: messages that are unacknowledged
    pending_bytes: int  #: octets of unacknowledged messages
    callbacks: int  #: message-specific callbacks that wait for their response
    sent: int  #: messages handed to a connection, tries again included
    retries: int  #: attempts after the first
    acknowledged: int  #: messages whose acknowledgement came
    given_up: int  #: messages that got another outcome
    received: int  #: messages handled
    repeated: int  #: messages that had been handled before
    refused: int  #: messages not taken: too old, too many at once, of an earlier life of their sender
    malformed: int  #: messages that no peer should send, thrown away
    late: int  #: acknowledgements and responses that nothing waited for
    handler_errors: int  #: exceptions of handlers, contained
    duplicates: int  #: times that a second messenger was found under one identity: a peer's, or this one's own


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
        self._open_store: Final = open_store
        self._max_message_bytes: Final = max_message_bytes
        self._max_peers: Final = max_peers
        self._keys: Final = keys
        self._allow: Final = allow
        self._link_options: Final = link_options(max_message_bytes, self._settings.window)
        self._on_error: Final = on_error
        self._loop_factory: Final = loop_factory
        self._lock: Final = OwnedLock()  # a leaf: nothing of the user's, no socket and no store is touched under it
        self._handlers: Final = Handlers(self, self._running_group)
        self._outbound: Final = MessengerOutbound(
            self._lock,
            self._running_group,
            self._handlers,
            settings=self._settings,
            rng=rng or Random(),
            dead_letter=dead_letter,
            send_state_changed=send_state_changed,
        )
        self._inbound: Final = MessengerInbound(
            self,
            self._running_group,
            self._handlers,
            self._outbound,
            _submit=lambda to, message: self._outbound.submit(self._peer_of(to), message),
            _ack_on_receipt=ack_on_receipt,
            _max_message_bytes=max_message_bytes,
        )
        self._remembered_gap_count = 0  # guarded by _lock
        # Changed by the group's thread only; others read a reference:
        self._group: PollGroup | None = None
        self._own_group = False
        self._closed = False
        self._listeners: dict[int, MessengerSocket] = {}
        self._connections: dict[int, MessengerSocket] = {}
        self._listener_count = self._connection_count = self._peer_count = 0
        # The group's thread only:
        self._stored: dict[bytes, list[StoredMessage]] = {}
        self._runs: dict[bytes, dict[int, list[tuple[int, int]]]] = {}
        self._held_room: Final = HeldRoom()
        # Of peers gone, and their pubkeys:
        self._remembered: dict[bytes, tuple[Arrivals, bytes]] = {}  # guarded by _lock
        self._names: dict[bytes, bytes] = {}  # by public key: the identity that `allow` gave; no more than it names

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
        tasks = list(self._handlers.tasks)
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
        on_ack: Handler | None = None,
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
        if not isinstance(message, (str, bytes, bytearray, memoryview)):
            raise LocalProtocolError(f"a message is text or bytes, not {type(message).__name__}")
        body = message.encode() if isinstance(message, str) else bytes(message)
        frames = tuple(bytes(frame) for frame in payload)
        outgoing = Outgoing(0, 0, remote_callback_id, body, frames, ordered)
        if len(frames) > MOST_PAYLOAD_FRAMES:  # it would be thrown away where it comes
            raise LocalProtocolError(f"a message has {len(frames)} further frames, the most are {MOST_PAYLOAD_FRAMES}")
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
        ticket = None if callback is on_ack is on_failure is None else Ticket(on_ack, on_failure)
        outgoing.ticket = ticket
        return self._outbound.submit(self._peer_of(to), outgoing, callback, deadline, wait_s, effect)

    async def send(self, to: To, message: str | bytes, callback: Callback | None = None, **options: Any) -> int:
        """Send a message once there is room in the window to the peer; else as `send_message`; any loop."""
        with suppress(BusyError):
            return self.send_message(to, message, callback, **options)
        while True:
            room = self._outbound.wait_for_room()
            try:  # again, for there may have been room before we waited for it
                return self.send_message(to, message, callback, **options)
            except BusyError:
                await asyncio.wrap_future(room)
            finally:
                self._outbound.forget_room(room)

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
        self._outbound.note_delivering(done, begins=True)
        try:
            await self.send(
                to,
                message,
                on_ack=lambda _, message_id: settle(done, message_id),
                on_failure=lambda _, failure: _fail(done, failure),
                **options,
            )
            return await asyncio.wrap_future(done)
        finally:
            self._outbound.note_delivering(done, begins=False)

    async def request(self, to: To, message: str | bytes, **options: Any) -> ReceivedMessage:
        """Send a message and return the response; else as `deliver`."""
        done: Future[ReceivedMessage] = Future()
        await self.send(
            to,
            message,
            lambda _, response: settle(done, response),
            on_failure=lambda _, failure: _fail(done, failure),
            **options,
        )
        return await asyncio.wrap_future(done)

    # --- what it is ----------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """The number of this life of the messenger: another one at each start, also with a store."""
        return self._outbound.incarnation

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

    def connections(self) -> list[MessengerConnection]:
        """Return all peers of this moment, connected or not, and how it is with what is sent to each; any thread."""
        return [row_of(peer, self._lock) for peer in self._peers()]

    def why(self, to: To) -> str:
        """Return in a line how it is with what is sent to a peer: state, limits, since when, who is to blame.

        Any thread.

        Raises:
            LocalProtocolError: there is no such connection or listener.
        """
        return row_of(self._peer_of(to), self._lock).why

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

    def duplicate_count(self, router_id: int, identity: str | bytes) -> int:
        """Return how often it was found that two messengers come to a listener under one identity; any thread."""
        peer = self._listener(router_id).peers.get(as_identity(identity))
        return 0 if peer is None else peer.holder.count

    def taken_over(self, connection_id: int) -> bool:
        """Return whether another messenger of this identity is connected there, so that this one stays away."""
        connection = self._connections.get(connection_id)
        return connection is not None and connection.taken_over

    def statistics(self) -> MessengerStatistics:
        """Return a frozen snapshot; O(peers), any thread."""
        outbound, inbound = self._outbound, self._inbound
        with self._lock:
            peers = self._peers()
            return MessengerStatistics(
                peers=len(peers),
                pending=sum(len(peer.delivery) for peer in peers),
                pending_bytes=sum(peer.delivery.size_bytes for peer in peers),
                callbacks=outbound.callback_count,
                sent=outbound.sent_count,
                retries=sum(peer.delivery.retry_count for peer in peers),
                acknowledged=outbound.acknowledged_count,
                given_up=outbound.given_up_count,
                received=inbound.received_count,
                repeated=inbound.repeated_count,
                refused=inbound.refused_count,
                malformed=inbound.malformed_count,
                late=outbound.late_count + sum(peer.delivery.late_count for peer in peers),
                handler_errors=self._handlers.error_count,
                duplicates=outbound.duplicates.count,
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
            self._outbound.store = self._open_store(self._running_group().call_soon)
            self._load(self._outbound.store)
        self._outbound.start()
        if self._port is None:
            return
        endpoint = Destination.tcp("", self._host, self._port).endpoint
        self._listen(endpoint, self.identity, self._callback)
        # A socket each, so that one messenger can come by each way under its one name.
        self._listen(f"ipc://{self._ipc_dir}/flowctl-ipc-{self.port}", self.identity, self._callback, -1)
        self._listen(f"inproc://flowctl-inproc-{self.port}", self.identity, self._callback, -2)

    def _load(self, store: MessageStore) -> None:
        """Take over what an earlier life of this messenger left in its store."""
        for stored in store.pending():
            self._stored.setdefault(stored.peer, []).append(stored)
        for key, incarnation, first, last in store.seen():
            self._runs.setdefault(key, {}).setdefault(incarnation, []).append((first, last))
        for key in list(self._runs)[: -4 * MAX_REMEMBERED]:  # an entry for each of the four prefixes
            del self._runs[key]
            store.forget(key, None)

    def _close(self, deadline_s: float) -> None:
        """Close everything, also where it was opened in part only; the group's thread."""
        if self._closed:
            return
        self._closed = True
        self._outbound.stop()
        self._inbound.flush_acks()
        for task in list(self._handlers.tasks):
            task.cancel()
        for endpoint in (*self._listeners.values(), *self._connections.values()):
            endpoint.close()
            for peer in endpoint.peers.values():
                self._running_group().deadlines.remove(peer)
                self._outbound.withdraw_all(peer, Outcome.SHUTDOWN)
        self._outbound.end_waiting()
        if self._outbound.store is not None:
            self._outbound.store.close(deadline_s)

    # --- SocketOwner; the group's thread -------------------------------------------------------------------------

    def admit(self, key: bytes) -> None:
        """Let a newcomer in, or raise: one that is refused may be known later, so that it goes on trying."""
        if self._keys is None:
            return
        try:
            verdict = self._allow is None or _checked_verdict(self._allow(key))
        except BaseException as error:
            self._running_group().report("deciding on a new connection", error)
            raise RefusedError from error
        if not verdict:
            raise RefusedError
        if isinstance(verdict, str):
            self._names[key] = as_identity(verdict)
        else:
            self._names.pop(key, None)

    def may_enter(self, endpoint: MessengerSocket, route: bytes, key: bytes) -> bool:
        """Return whether the holder of a key may speak under an identity, which belongs to the first that did."""
        if self._keys is None:
            return True
        if self._names.get(key, route) != route:
            return False
        peer = endpoint.peers.get(route)
        if peer is not None and peer.pubkey:
            return peer.pubkey == key
        return not key or self._keys_of(endpoint, route) <= {key}  # without a key it is in this process

    def _keys_of(self, endpoint: MessengerSocket, route: bytes) -> set[bytes]:
        """Return the keys that have an identity, or claim it: by any way to the listener, and of a peer gone."""
        # Each way to listener 0 has its own socket; an identity is one and the same there.
        ways = [self._listeners[0], *self._ways()] if endpoint.number <= 0 and 0 in self._listeners else [endpoint]
        links = (way.link_to(route) for way in ways)
        keys = {link.key for link in links if link is not None}
        keys |= {way.peers[route].pubkey for way in ways if route in way.peers}
        with self._lock:
            keys |= {self._remembered[key][1] for way in ways if (key := way.key_of(route)) in self._remembered}
        return keys - {b""}

    def connected(self, endpoint: MessengerSocket, route: bytes) -> None:
        peer = endpoint.peers.get(route)
        if peer is None:
            return
        if self._outbound.learn_by_handshake(peer, connects=True) is not None:
            with self._lock:
                peer.delivery.connected_anew()
            self._outbound.retry_peer(peer)
            self._outbound.wake(peer)

    def refused(self) -> None:
        self._inbound.refused_count += 1

    def received(self, endpoint: MessengerSocket, route: bytes, frames: list[bytes]) -> None:
        if endpoint.is_router:
            self._router_received(endpoint, route, frames)
        else:
            self._dealer_received(endpoint, frames)

    # --- listeners and connections, inner steps; the group's thread ----------------------------------------------

    def _listen(self, address: str, identity: bytes, callback: Callback | None, number: int | None = None) -> int:
        self._outbound.check_running()
        if number is None:
            number = self._listener_count
            self._listener_count += 1
        namesakes = sum(found.identity == identity for found in self._listeners.values())
        endpoint = MessengerSocket(number, identity, callback, is_router=True, namesakes=namesakes)
        self._open_socket(endpoint, address)
        self._listeners[endpoint.number] = endpoint
        self._restore_peers(endpoint)
        return endpoint.number

    def _connect(self, destination: Destination, callback: Callback | None) -> int:
        self._outbound.check_running()
        address = destination.endpoint
        if bool(destination.pubkey) is (self._keys is None):
            missing = "no keys of its own" if self._keys is None else f"no key of {destination.name or address}"
            raise LocalProtocolError(f"cannot connect to {address}: the messenger has {missing}")
        for found in self._connections.values():
            if found.address == address:
                return found.number
        self._check_peer_count()
        endpoint = MessengerSocket(self._connection_count, self.identity, callback, is_router=False)
        self._open_socket(endpoint, address, destination.pubkey)
        self._connection_count += 1
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
        self._outbound.close_callbacks(endpoint)

    def _open_socket(self, endpoint: MessengerSocket, address: str, pubkey: bytes = b"") -> None:
        endpoint.prepare(self._running_group(), self, self._outbound.life)
        if endpoint.is_router:
            endpoint.bind(address, self._link_options, self._keys)
        else:
            endpoint.connect(address, self._link_options, self._keys, pubkey)

    def _add_peer(self, endpoint: MessengerSocket, route: bytes) -> MessengerPeer:
        key = endpoint.key_of(route)
        now = self._running_group().now()
        with self._lock:
            known_peer = endpoint.peers.get(route)
            if known_peer is not None:
                return known_peer
            stored = self._stored.pop(key, [])
            peer = MessengerPeer(
                self._outbound.peer_due,
                endpoint,
                route,
                self._outbound.new_delivery_locked(now),
                Arrivals(self._held_room),
            )
            self._outbound.restore_locked(peer, stored, now)
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
            wake = bool(stored) and self._outbound.queue_locked(peer)
        if wake:
            self._running_group().call_soon(self._outbound.pump)
        return peer

    def _restore_peers(self, endpoint: MessengerSocket) -> None:
        """Go on sending to the peers of a listener that an earlier life had messages for."""
        prefix = endpoint.key_of(b"")
        for key in [key for key in self._stored if key.startswith(prefix)]:
            self._add_peer(endpoint, key[len(prefix) :])

    def _forget_peer(self, peer: MessengerPeer) -> None:
        self._running_group().deadlines.remove(peer)
        self._outbound.withdraw_all(peer, Outcome.WITHDRAWN)
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
        if gone is not None and self._outbound.store is not None:
            for prefix in (SEQUENCES, IDS, OLD, ANNOUNCES):
                self._outbound.store.forget(prefix + gone, None)

    def _check_peer_count(self) -> None:
        """See that there is room for one peer more: one that came to a listener and is idle makes it."""
        if self._peer_count < self._max_peers:
            return
        spare: tuple[MessengerSocket, bytes] | None = None
        for endpoint in self._listeners.values():
            for route, peer in list(islice(endpoint.peers.items(), _PEERS_EXAMINED)):
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

    def _listener(self, router_id: int) -> MessengerSocket:
        endpoint = self._listeners.get(router_id)
        if endpoint is None:
            raise LocalProtocolError(f"there is no listener {router_id}")
        return endpoint

    def _peer_of(self, to: To) -> MessengerPeer:
        """Return who `to` is; any thread."""
        if isinstance(to, tuple):
            endpoint, route = self._listener(to[0]), as_identity(to[1])
            if to[0] == 0:  # it may have come by another way
                ways = [endpoint, *self._ways()]
                known = (way for way in ways if route in way.peers)
                endpoint = next((way for way in ways if way.link_to(route) is not None), next(known, endpoint))
            peer = endpoint.peers.get(route)
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

    # --- receiving; the group's thread ---------------------------------------------------------------------------

    def _router_received(self, endpoint: MessengerSocket, route: bytes, frames: list[bytes]) -> None:
        peer = endpoint.peers.get(route)
        shows_itself = frames == [b""] and peer is not None and bool(peer.announcement())
        if shows_itself:  # one that goes by ZeroMQ; the handshake has said it
            return
        if len(frames) < 2 or frames[0]:
            self._inbound.note_malformed(
                RemoteProtocolError(f"a message of {len(frames)} frames without an empty first one")
            )
            return
        link = endpoint.link_to(route)
        pubkey = b"" if link is None else link.key
        if peer is None:
            try:
                parse_message(frames[1])  # a peer that sends none is not remembered
                self._check_peer_count()
            except (RemoteProtocolError, BusyError) as error:
                self._inbound.note_malformed(error)
                return
            peer = self._add_peer(endpoint, route)
        if peer.pubkey not in {b"", pubkey}:  # it was known before, and forgotten
            self._inbound.refused_count += 1
            return
        peer.pubkey = pubkey
        self._inbound.received(peer, frames[1], frames[2:])

    def _dealer_received(self, endpoint: MessengerSocket, frames: list[bytes]) -> None:
        peer = endpoint.peers[b""]
        if len(frames) > 2 and not frames[1]:
            self._inbound.received(peer, frames[2], frames[3:])
        elif len(frames) > 1 and not frames[0]:  # a ROUTER that does not say who it is
            self._inbound.received(peer, frames[1], frames[2:])
        else:
            self._inbound.note_malformed(RemoteProtocolError(f"a message of {len(frames)} frames without an empty one"))


def check_identity(identity: str | bytes) -> bytes:
    octets = as_identity(identity)
    if not 0 < len(octets) <= MAX_IDENTITY_BYTES:
        raise ConfigError(f"an identity has 1 to {MAX_IDENTITY_BYTES} bytes, not {len(octets)}")
    if octets.startswith(b"\0"):
        raise ConfigError("an identity does not begin with a NUL")
    return octets


def _checked_verdict(verdict: object) -> bool | str:
    if verdict and verdict is not True and not isinstance(verdict, str):
        kind = type(verdict).__name__
        raise LocalProtocolError(f"allow() returned {kind}, it must return True, a name, or False to deny")
    return verdict if isinstance(verdict, str) else bool(verdict)


def link_options(max_message_bytes: int, window: int) -> LinkOptions:
    """Return what may wait for a peer, and what it may send."""
    soft, count = max(4 << 20, max_message_bytes), 2 * window + 1000  # messages and acknowledgements
    limits = Limits(
        size=AxisLimits(soft=soft, hard=2 * soft, name="size"),
        messages=AxisLimits(soft=count, hard=2 * count, name="messages"),
        hard_policy=HardPolicy.HOLD,
    )
    # One that is too large as a whole is refused by itself.
    messages = ZmtpLimits(part_bytes=max_message_bytes + 100, message_bytes=2 * max_message_bytes + (1 << 20))
    return LinkOptions(limits=limits, messages=messages, line_dead_after_s=_LINE_DEAD_AFTER_S)


def _shown(identity: bytes) -> str:
    return identity[:32].decode("ascii", "backslashreplace")


def _fail(future: Future[Any], failure: Failure) -> None:
    if future.set_running_or_notify_cancel():
        what = "answered" if failure.acknowledged else "acknowledged"
        future.set_exception(BrokenError(f"message {failure.message_id} was not {what}: {failure.outcome.value}"))
