"""The peers of a node: those that have connected to its listeners, and those that it has dialled.

Theory of operation. A peer is found by its `ConnectionID`; a service node by its key, whichever side dialled: over the
connections that it opened, then the one that we opened; else, unless told otherwise, it is looked up and dialled. A
connection that we opened so ends when nothing has gone over it for as long as it was to be kept. What is sent to a peer
that has gone reaches nobody, but for a service node. The end of a connection ends what waits because of it: requests of
the peer are cancelled, ours to it fail.

`listen`, `connect` and `forget_service_nodes` are for any thread, the rest for the node's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from secrets import token_hex
from typing import Final, NamedTuple, TypeAlias

from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.text.fieldtypes import check_type
from flowctl.core.text.printable import short
from flowctl.errors import ClosedError, ConfigError, LocalProtocolError
from flowctl.nodes.rpc.access.access import AuthLevel, PeerIdentity, ServiceNodes, key_route
from flowctl.nodes.rpc.access.admission import Allow, RpcAdmission
from flowctl.nodes.rpc.nodecalls import NodeCalls
from flowctl.nodes.rpc.peers.dialled import DialledConnection
from flowctl.nodes.rpc.peers.door import Door
from flowctl.nodes.rpc.peers.listener import DUPLICATE_HINT, LIFE_PROPERTY, RpcListener
from flowctl.nodes.rpc.peers.peer import (
    ANY_WAY,
    MAX_MESSAGE_BYTES,
    MAX_PART_BYTES,
    MOST_FRAMES,
    MOST_UNSENT_BYTES,
    SERVICE_NODE,
    ConnectionID,
    Reach,
    RpcPeer,
)
from flowctl.nodes.rpc.wire import frames as wire
from flowctl.nodes.rpc.wire.addresses import Address, AddressTransport
from flowctl.wire.zmtp.frames import IDENTITY, SOCKET_TYPE
from flowctl.wire.zmtp.inproc import SHARED_NAMES, Dial, InprocNames
from flowctl.wire.zmtp.keys import KeyPair
from flowctl.wire.zmtp.link import Link, LinkOptions
from flowctl.wire.zmtp.listen import ROUTER, BoundSocket, bind_socket
from flowctl.wire.zmtp.mechanism import CurveClient, Mechanism, Null, Properties
from flowctl.wire.zmtp.peer import ZmtpLimits

_log: Final = logging.getLogger("flowctl.rpc")

CONNECT_TIMEOUT_S: Final = 10.0
_LOOK_S: Final = 0.01
"""Time between two looks whether all that was sent at the end is on its way."""
SN_CHECK_S: Final = 0.25
"""Time between two searches for idle connections to service nodes: OxenMQ's CONN_CHECK_INTERVAL."""
LINGER_S: Final = 5.0
SELF_ADDRESS: Final = Address(AddressTransport.INPROC, socket="flowctl-this-node")
"""Address at which a node listens for itself, among names of its own: no other node can connect to it."""
DEAD_AFTER_S: Final = 30.0
"""Time without a word after which a peer counts as dead: as long as OxenMQ's heartbeats wait."""
PEER_LIMITS: Final = Limits(
    size=AxisLimits(soft=4 << 20, hard=16 << 20, name="size"),
    age_ms=AxisLimits(soft=10_000, hard=30_000, name="age_ms"),
    hard_policy=HardPolicy.HOLD,
)
"""What may wait for one peer, beyond what the system holds for it, before more is refused: longer than a request waits
for its answer nothing is of use."""
_MESSAGES: Final = ZmtpLimits(part_bytes=MAX_PART_BYTES, message_bytes=MAX_MESSAGE_BYTES, parts=MOST_FRAMES)
LOOK_BYTES: Final = 1 << 20
"""Bytes sent to peers that do not read at once, between two looks at what waits for all of them."""
MOST_LATEST: Final = 1024
"""Keys of messages that some may miss whose newest waits for one peer."""
MOST_WAITING_BYTES: Final = 256 << 20
"""Bytes that may wait for all peers of a node together; the peer for which most waits is cut first."""
NO_CONNECTION: Final = wire.DISCONNECTED

Ready: TypeAlias = Callable[[ConnectionID], object]
Failed: TypeAlias = Callable[[ConnectionID, str], object]


@dataclass(slots=True, eq=False)
class _KeptConnection:
    peer: RpcPeer
    keep_alive_s: float
    active_at: float


@dataclass(eq=False)
class OutgoingConnections:
    """Connections that we opened to service nodes, one to each (pure); for one thread."""

    _incoming: Callable[[bytes], RpcPeer | None]
    _lookup: Callable[[bytes], str]
    _dial: Callable[[bytes, str], RpcPeer | None]
    _kept: dict[bytes, _KeptConnection] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, pubkey: bytes, reach: Reach, now: float) -> RpcPeer | None:
        """Return a connection to the node with that key, a new one if need be. None: there is none, and cannot be."""
        if not reach.outgoing:
            peer = self._incoming(pubkey)
            if peer is not None:
                return peer
        kept = None if reach.incoming else self._kept.get(pubkey)
        if kept is not None:
            kept.keep_alive_s = max(kept.keep_alive_s, reach.keep_alive_s)
            kept.active_at = now
            return kept.peer
        if reach.optional or reach.incoming:
            return None
        address = reach.hint or self._lookup(pubkey)
        peer = self._dial(pubkey, address) if address else None
        if peer is not None:
            self._kept[pubkey] = _KeptConnection(peer, reach.keep_alive_s, now)
        return peer

    def get(self, pubkey: bytes) -> RpcPeer | None:
        kept = self._kept.get(pubkey)
        return None if kept is None else kept.peer

    def active(self, pubkey: bytes, now: float) -> None:
        kept = self._kept.get(pubkey)
        if kept is not None:
            kept.active_at = now

    def forget(self, pubkey: bytes, peer: RpcPeer) -> None:
        kept = self._kept.get(pubkey)
        if kept is not None and kept.peer is peer:
            del self._kept[pubkey]

    def take_idle(self, now: float) -> list[RpcPeer]:
        """Remove and return those over which nothing has gone for as long as they were to be kept, and will come."""
        idle = [
            (pubkey, kept.peer)
            for pubkey, kept in self._kept.items()
            if now - kept.active_at >= kept.keep_alive_s and not kept.peer.is_awaited()
        ]
        for pubkey, _ in idle:
            del self._kept[pubkey]
        return [peer for _, peer in idle]

    def take(self, pubkeys: frozenset[bytes]) -> list[RpcPeer]:
        return [self._kept.pop(pubkey).peer for pubkey in pubkeys & self._kept.keys()]


class _Name(NamedTuple):
    """Where a node listens within the process."""

    names: InprocNames
    name: str
    accept: Callable[[Dial], object]


class Reaching:
    """The peers of a node."""

    def __init__(
        self,
        calls: NodeCalls,
        keys: KeyPair,
        clock: Callable[[], float],
        sn_lookup: Callable[[bytes], str | None] | None,
        *,
        received: Callable[[RpcPeer, list[bytes]], object],
        limits: Limits,
        most_waiting_bytes: int,
    ) -> None:
        self._calls: Final = calls
        self._keys: Final = keys
        self._clock: Final = clock
        self._sn_lookup: Final = sn_lookup
        self._received: Final = received
        self._options: Final = LinkOptions(limits=limits, messages=_MESSAGES, dead_after_s=DEAD_AFTER_S)
        self._most_waiting_bytes: Final = most_waiting_bytes
        self._life: Final = token_hex(8).encode()
        self._ids: Final = count(1)
        self._bound: dict[int, tuple[BoundSocket, bool]] = {}  # before the start, and whether it is encrypted
        self._own_names: Final = InprocNames()
        self._named: dict[int, _Name] = {}  # listeners within the process
        self.service_nodes: Final = ServiceNodes()
        self.admission: Final = RpcAdmission(self.service_nodes, clock)
        self.listeners: Final[dict[int, RpcListener]] = {}
        self._doors: Final[dict[int, Door]] = {}
        self.dialled: Final[dict[int, DialledConnection]] = {}
        self._leaving: Final[set[DialledConnection]] = set()  # closed, and not all that was sent is on its way
        self._behind: Final[set[RpcPeer]] = set()  # peers for which something waits
        self._unlooked_bytes = 0  # sent to those since they were looked at
        self._arriving: deque[tuple[int, Dial]] = deque()  # that dial within the process; any thread appends
        self.outgoing: Final = OutgoingConnections(self._sn_incoming, self._sn_address, self._sn_dial)
        self._sn_checking = False  # whether a timer for idle ones is set
        self._lingering: dict[Address, float] = {}  # until when what was sent to there before may still be on its way
        self._listens_to_itself = False
        self.closed = False  #: no listener and no connection is opened any more
        self.unsent_count = 0  #: messages dropped since too much waited for their peer already
        self.conflated_count = 0  #: messages in whose place a newer one is sent
        self.cut_count = 0  #: peers that were cut: they took nothing, said nothing, or had most of what waited
        self.duplicate_count = 0  #: times that another node with our keys took a connection of ours

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        bound, self._bound = self._bound, {}
        for number, how in bound.items():
            self._open(number, *how)
        self._accept_arriving()

    async def stop(self) -> None:
        """Close all connections; what was sent goes on being sent for a while."""
        for number in list(self.listeners):
            self._close_listener(number)
        for dialled in list(self.dialled.values()):
            self.hang_up(dialled, "the node was stopped", code=wire.SHUTTING_DOWN, linger_s=LINGER_S)
        ends_at = self._calls.group.now() + LINGER_S
        while self._is_leaving() and self._calls.group.now() < ends_at:  # noqa: ASYNC110  (once, for seconds at most)
            await asyncio.sleep(_LOOK_S)

    def _is_leaving(self) -> bool:
        return bool(self._leaving) or any(door.listener.links for door in self._doors.values())

    def close(self) -> None:
        """Close what was bound and never used; nothing is opened any more. Any thread."""
        self.closed = True
        while self._bound:
            _, (bound, _) = self._bound.popitem()
            bound.close()
        for number in list(self._named):
            self._unbind_name(number)
        self._pass_on()

    # --- listening and connecting; any thread --------------------------------------------------------------------

    def listen(
        self, address: str, allow: AuthLevel | Allow, on_bind: Callable[[bool], object] | None, *, curve: bool
    ) -> str:
        """Bind a socket, and admit the peers that `allow` accepts; return the address that was bound."""
        if self.closed:
            raise ClosedError("the node was stopped")
        number = next(self._ids)
        # Before it is bound: the first connection may come before the next line. One item of a dict is set at once.
        self.admission.open(number, curve=curve, allow=allow)
        try:
            endpoint = self._bind(number, address, curve=curve)
        except (OSError, ConfigError) as error:
            self.admission.close(number)
            if isinstance(error, ConfigError):
                raise
            if on_bind is not None:
                on_bind(False)
                return address
            raise OSError(error.errno, f"cannot listen on {short(address)}: {error.strerror}") from error
        if on_bind is not None:
            on_bind(True)
        return endpoint

    def _bind(self, number: int, address: str, *, curve: bool) -> str:
        scheme, _, name = address.partition("://")
        if scheme == AddressTransport.INPROC.value:
            names = self._own_names if name == SELF_ADDRESS.socket else SHARED_NAMES
            self._named[number] = _Name(names, name, partial(self._dialled_within, number))
            try:
                names.bind(name, self._named[number].accept)
            except OSError:
                del self._named[number]
                raise
            return address
        bound = bind_socket(address)
        if self._calls.started:
            self._calls.do(self._open, number, bound, curve)
        else:
            self._bound[number] = bound, curve
        return bound.endpoint

    def connect(
        self, to: Address, timeout_s: float, auth: AuthLevel, ready: Ready, failed: Failed, *, ephemeral: bool = False
    ) -> ConnectionID:
        """Have a listener dialled; the node's thread tells how that went."""
        check_timeout(timeout_s)
        conn = ConnectionID(next(self._ids), pubkey=to.pubkey)
        self._calls.do_or_fail(self._dial, conn, to, timeout_s, auth, ephemeral, ready, failed)
        return conn

    def forget_service_nodes(self, gone: frozenset[bytes]) -> None:
        """Close the connections that we opened to nodes that are no service nodes any more."""
        if gone and self._calls.started:
            self._calls.do(self._sn_close, lambda: self.outgoing.take(gone))

    # --- sending -------------------------------------------------------------------------------------------------

    def find(self, conn: ConnectionID) -> RpcPeer | None:
        """Return the peer, over a new connection if need be; None: there is no such connection."""
        if conn.id == SERVICE_NODE:
            return self.outgoing.find(conn.pubkey, conn.reach, self._clock())
        peer = self.connected_peer(conn)
        if peer is None and (conn.service_node or (conn.route and conn.pubkey in self.service_nodes)):
            # Strong: by whatever connection there is, or a new one.
            peer = self.outgoing.find(conn.pubkey, ANY_WAY, self._clock())
        return peer

    def connected_peer(self, conn: ConnectionID) -> RpcPeer | None:
        """Return the peer that is meant, if it is connected; no connection is opened, and none stands for another."""
        if conn.id == SERVICE_NODE:
            peer = None if conn.reach.incoming else self.outgoing.get(conn.pubkey)
            return peer or (None if conn.reach.outgoing else self._sn_incoming(conn.pubkey))
        dialled = self.dialled.get(conn.id)
        if dialled is not None:
            return dialled.peer
        listener = self.listeners.get(conn.id)
        peer = None if listener is None else listener.routes.get(conn.route)
        if peer is not None and peer.conn.pubkey != conn.pubkey:
            peer = None  # another has taken the routing id since
        return peer

    def is_open(self, conn: ConnectionID) -> bool:
        """Return whether what is sent there now goes out, and does not wait for a listener that is gone. Any thread."""
        peer = self.connected_peer(conn)
        if peer is None:
            return conn.service_node  # it may be dialled
        dialled = self.dialled.get(peer.conn.id)
        if dialled is None:
            return not peer.closed
        return not dialled.lost and (dialled.ready or conn.service_node)  # of a service node it waits for the answer

    def send_to(self, peer: RpcPeer, frames: Sequence[bytes]) -> bool:
        """Send a message that has no answer; return whether it could be sent."""
        return self.try_to_send(peer, frames) is None

    def send_surely(self, peer: RpcPeer, frames: Sequence[bytes]) -> None:
        """Send what must not be missing: now, or once the peer has taken what waits for it; never once it has gone.

        In the order of the calls: items of a stream are among it.
        """
        if peer.owed or not self.send_to(peer, frames):
            if peer.link is None or peer.closed:
                return
            peer.owed.append(frames)
            if len(peer.owed) == 1:
                peer.link.when_drained(lambda there: self._soon(self._send_owed, peer, there))

    def _send_owed(self, peer: RpcPeer, there: bool) -> None:  # noqa: FBT001  (as `when_drained` tells it)
        owed, peer.owed = peer.owed, []
        for frames in owed if there else ():
            self.send_surely(peer, frames)

    def _soon(self, call: Callable[..., object], *args: object) -> None:
        with suppress(ClosedError):
            self._calls.group.call_soon(call, *args)

    def try_to_send(self, peer: RpcPeer, frames: Sequence[bytes]) -> bytes | None:
        """Send a message; return the code for why it could not be, None if it could."""
        if peer.closed:
            # What was meant for a connection goes to no other one, but of a service node, which is known by its key.
            other = self.find(peer.conn) if peer.conn.pubkey in self.service_nodes else None
            return NO_CONNECTION if other is None or other.closed else self.try_to_send(other, frames)
        result = peer.send(frames)
        if result is None:
            return None
        if result.outcome is SendOutcome.CLOSED:
            return NO_CONNECTION
        if not peer.is_reading:  # also while it counts as READY: what it was sent last may be large
            self._note_behind(peer, sum(map(len, frames)))
        if result.outcome is SendOutcome.ACCEPTED:
            return None
        self.unsent_count += 1
        return wire.QUEUE_FULL

    def publish(self, conns: Sequence[ConnectionID], key: bytes | None, frames: list[bytes]) -> None:
        """Send a message that some may miss; see `RpcNode.publish`."""
        size_bytes = sum(map(len, frames))
        for conn in conns:
            peer = self.connected_peer(conn)
            link = None if peer is None else peer.link
            if peer is None or link is None:
                self.unsent_count += 1
            elif link.drained and not peer.latest:
                self.try_to_send(peer, frames)
            elif key is None or not self._has_room(peer, key, size_bytes):
                self.unsent_count += 1
            else:
                if not peer.latest:
                    self._send_latest_later(peer, link)
                self.conflated_count += peer.keep_latest(key, frames)
                self._note_behind(peer, size_bytes)

    def _has_room(self, peer: RpcPeer, key: bytes, size_bytes: int) -> bool:
        """Return whether a message that some may miss can be kept for a peer."""
        few = key in peer.latest or len(peer.latest) < MOST_LATEST
        before_bytes = sum(map(len, peer.latest.get(key, ())))
        return few and peer.latest_bytes - before_bytes + size_bytes <= MOST_UNSENT_BYTES

    def _send_latest_later(self, peer: RpcPeer, link: Link) -> None:
        link.when_drained(lambda taken: self._calls.group.call_soon(self._send_latest, peer) if taken else None)

    def _send_latest(self, peer: RpcPeer) -> None:
        while peer.latest and peer.link is not None and not peer.closed:
            if not peer.is_reading:
                self._send_latest_later(peer, peer.link)
                return
            self.try_to_send(peer, peer.take_latest(next(iter(peer.latest))))

    # --- what waits for all peers together -----------------------------------------------------------------------

    def _note_behind(self, peer: RpcPeer, size_bytes: int) -> None:
        """Note that something waits for a peer; now and then look at what waits for all of them."""
        self._behind.add(peer)
        self._unlooked_bytes += size_bytes
        if self._unlooked_bytes >= LOOK_BYTES:
            self._unlooked_bytes = 0
            self._look_at_all()

    def _look_at_all(self) -> None:
        waiting = {
            peer: size_bytes
            for peer in self._behind
            if not peer.closed and peer.link is not None and (size_bytes := peer.queued_bytes)
        }
        self._behind.intersection_update(waiting)
        total_bytes = sum(waiting.values())
        while total_bytes > self._most_waiting_bytes:
            peer = max(waiting, key=waiting.__getitem__)
            size_bytes = waiting.pop(peer)
            self._cut(
                peer,
                f"{size_bytes} of the {total_bytes} bytes that wait for peers waited for this one, which does not read",
            )
            total_bytes -= size_bytes

    def _cut(self, peer: RpcPeer, why: str) -> None:
        link = peer.link
        if link is None:
            return
        self.cut_count += 1
        self._behind.discard(peer)
        _log.warning("peer %s is cut: %s; %s", link.address, why, link.why())
        link.end(why)
        if peer.conn.route:
            self.forget(peer, wire.DISCONNECTED, why)
        else:
            self._give_up(peer, wire.DISCONNECTED, why)

    # --- the ends of connections ---------------------------------------------------------------------------------

    def received_hello(self, peer: RpcPeer) -> None:
        dialled = self.dialled.get(peer.conn.id)
        ready = None if dialled is None else dialled.note_answered()
        if ready is not None:
            self._calls.make(ready, peer.conn)

    def received_bye(self, peer: RpcPeer, *, taken_over: bool = False) -> None:
        dialled = self.dialled.get(peer.conn.id)
        if dialled is not None and taken_over:
            told = "another node with the keys of this one has connected there"
            self.duplicate_count += 1
            _log.error("the connection to %s ends: %s; hint: %s", dialled.address, told, DUPLICATE_HINT)
            # From now on with routing ids that the listener gives: there is room for both.
            self._lingering[dialled.address] = inf
            self.hang_up(dialled, told, code=wire.DISCONNECTED)
        elif dialled is not None:
            self.hang_up(dialled, "the other end closed it", code=wire.DISCONNECTED)

    def hang_up(self, dialled: DialledConnection, why: str, *, code: bytes, linger_s: float = 0.0) -> None:
        """Close a connection that we opened, and report its end to all callers that wait for it."""
        peer = dialled.peer
        if self.dialled.pop(peer.conn.id, None) is None:
            return
        if linger_s:
            until = self._lingering.get(dialled.address, 0.0)
            self._lingering[dialled.address] = max(until, self._clock() + linger_s)
        self._leaving.add(dialled)
        failed = dialled.close(why, linger_s)
        self.forget(peer, code)
        if failed is not None:
            self._calls.make(failed, peer.conn, why)

    def _not_answered(self, dialled: DialledConnection) -> None:
        if not dialled.ready:
            self.hang_up(dialled, "connection attempt timed out", code=wire.DISCONNECTED)

    def _lost(self, peer: RpcPeer, why: str = "") -> None:
        """Act on the end of a connection, with why it was cut if it was; one that we opened comes again."""
        if peer.closed:
            return
        if why:
            self.cut_count += 1
            _log.warning("peer %s is cut: %s", peer.identity.address or peer.conn.id, why)
        if peer.conn.route:
            self.forget(peer, wire.DISCONNECTED, why)
        else:
            self._give_up(peer, wire.DISCONNECTED, why)

    def disconnect(self, conn: ConnectionID, linger_s: float) -> None:
        peer = self.connected_peer(conn)
        dialled = None if peer is None else self.dialled.get(peer.conn.id)
        if dialled is not None:
            self.hang_up(dialled, "disconnected", code=wire.DISCONNECTED, linger_s=linger_s)
        elif peer is not None:
            self._let_go(peer, "disconnected", linger_s, wire.DISCONNECTED)
        else:
            to = f"to service node {conn.pubkey.hex()}" if conn.id == SERVICE_NODE else conn.id
            _log.warning("disconnect: there is no connection %s", to)

    def _let_go(self, peer: RpcPeer, why: str, linger_s: float, code: bytes) -> None:
        """Tell a peer that has connected to leave, and end its connection."""
        peer.send([wire.BYE])
        if peer.link is not None:
            peer.link.end(why, linger_s)
        self.forget(peer, code)

    def forget(self, peer: RpcPeer, code: bytes, why: str = "") -> None:
        """Drop a peer: its requests here are cancelled, ours to it fail."""
        peer.closed = True
        self.outgoing.forget(peer.conn.pubkey, peer)
        listener = self.listeners.get(peer.conn.id)
        if listener is not None:
            listener.forget(peer)
        self._behind.discard(peer)
        self._give_up(peer, code, why)

    def _give_up(self, peer: RpcPeer, code: bytes, why: str = "") -> None:
        """Cancel what runs for a peer; requests to it fail."""
        peer.latest.clear()
        peer.latest_bytes = 0
        if peer.identity.pubkey not in self.service_nodes:  # whose reply finds another connection
            for running in list(peer.running.values()):
                running.cancel()
        if peer.calls is not None:
            self._calls.group.deadlines.remove(peer.calls)
            peer.calls.due_at = inf
            for call in peer.calls.take_all():
                self._calls.make(call.settle, False, [code, why.encode()] if why else [code])

    # --- listeners and dialling ----------------------------------------------------------------------------------

    def _open(self, number: int, bound: BoundSocket, curve: bool) -> None:  # noqa: FBT001  (given by position)
        if self._calls.stopping:
            bound.close()
            return
        peers = self._listener(number)
        keys = self._keys if curve else None
        told = self._received, self._lost
        self._doors[number] = Door(self._calls.group, bound, peers, self.admission, keys, self._options, *told)

    def _listener(self, number: int) -> RpcListener:
        listener = self.listeners.get(number)
        if listener is None:
            listener = self.listeners[number] = RpcListener(number, self._lost, self._calls.group.now)
        return listener

    def _close_listener(self, number: int) -> None:
        if (door := self._doors.get(number)) is not None:
            door.close()
        self._unbind_name(number)
        for peer in list(self.listeners[number].routes.values()):
            if peer.link is not None:
                peer.link.end("the node was stopped", LINGER_S)
            self.forget(peer, wire.SHUTTING_DOWN)

    def _unbind_name(self, number: int) -> None:
        if (bound := self._named.get(number)) is not None:
            bound.names.unbind(bound.name, bound.accept)

    def _dialled_within(self, number: int, dial: Dial) -> None:
        """Take one of this process that dials; any thread."""
        self._arriving.append((number, dial))
        if self._calls.started:
            try:
                self._calls.do(self._accept_arriving)
            except ClosedError:
                self._pass_on()

    def _pass_on(self) -> None:
        """Leave those that dial to the next that listens there; any thread."""
        while self._arriving:
            number, dial = self._arriving.popleft()
            self._unbind_name(number)
            self._named[number].names.dial(self._named[number].name, dial)

    def _accept_arriving(self) -> None:
        if self._calls.stopping:
            self._pass_on()
        while self._arriving:
            self._accept_within(*self._arriving.popleft())

    def _accept_within(self, number: int, dial: Dial) -> None:
        level = self.admission.decide_inproc(number)
        if level is None:
            return  # it hears nothing
        end = dial.accept(self._calls.group, ROUTER)
        peer = self._listener(number).enter(end, b"", PeerIdentity(auth=level))
        if peer is not None:
            end.message, end.gone = partial(self._received, peer), partial(self._lost, peer)

    def _dial(
        self,
        conn: ConnectionID,
        address: Address,
        timeout_s: float,
        auth: AuthLevel,
        ephemeral: bool,  # noqa: FBT001  (given by position, to be called later)
        ready: Ready,
        failed: Failed,
    ) -> None:
        if self._calls.stopping:
            failed(conn, "the node was stopped")
            return
        if address is SELF_ADDRESS and not self._listens_to_itself:
            self._listens_to_itself = True
            self.listen(SELF_ADDRESS.zmq_address, AuthLevel.ADMIN, None, curve=False)
        now = self._clock()
        self._lingering = {other: until for other, until in self._lingering.items() if until > now}
        # A route that is taken over ends the connection that has it, and what is on its way by that.
        taken = {*self._lingering, *(other.address for other in self.dialled.values())}
        own = {SOCKET_TYPE: b"DEALER", IDENTITY: b""}
        if not (ephemeral or address in taken):
            own |= {IDENTITY: key_route(self._keys.public), LIFE_PROPERTY.encode(): self._life}

        def mechanism(own: Properties) -> Mechanism:
            keys = self._keys
            return CurveClient(own, keys.public, keys.secret, address.pubkey) if address.pubkey else Null(own)

        self.dialled[conn.id] = DialledConnection(
            *(self._calls.group, conn, address, PeerIdentity(address.pubkey, auth)),
            own=own,
            options=self._options,
            mechanism=mechanism,
            names=self._own_names if address is SELF_ADDRESS else SHARED_NAMES,
            ready=ready,
            failed=failed,
            received=self._received,
            lost=self._lost,
            over=self._leaving.discard,
        )
        self._calls.group.call_later(timeout_s, self._not_answered, self.dialled[conn.id])

    # --- service nodes -------------------------------------------------------------------------------------------

    def _sn_close(self, take: Callable[[], list[RpcPeer]]) -> None:
        for peer in take():
            dialled = self.dialled.get(peer.conn.id)
            if dialled is not None:
                self.hang_up(dialled, "not needed any more", code=wire.DISCONNECTED, linger_s=LINGER_S)

    def _sn_incoming(self, pubkey: bytes) -> RpcPeer | None:
        peers = (listener.by_pubkey.get(pubkey) for listener in self.listeners.values())
        return next((peer for peer in peers if peer is not None), None)

    def _sn_address(self, pubkey: bytes) -> str:
        if self._sn_lookup is None:
            return ""
        try:
            address = self._sn_lookup(pubkey) or ""
            check_type("the address that sn_lookup returned", address, str)
        except BaseException as error:  # noqa: BLE001  (a hook's fault is that the address is not known)
            self._calls.group.report("looking up a service node", error)
            return ""
        return address

    def _sn_dial(self, pubkey: bytes, address: str) -> RpcPeer | None:
        try:
            to = Address.parse(address).with_pubkey(pubkey)
        except ConfigError as error:
            self._calls.group.report("the address of a service node", error)
            return None
        conn = ConnectionID(next(self._ids), pubkey=pubkey, service_node=True)
        self._dial(conn, to, CONNECT_TIMEOUT_S, AuthLevel.NONE, False, nothing, nothing)
        dialled = self.dialled.get(conn.id)
        if dialled is None:
            return None
        if not self._sn_checking:
            self._sn_checking = True
            self._calls.group.call_later(SN_CHECK_S, self._sn_check)
        return dialled.peer

    def _sn_check(self) -> None:
        """Close what was idle for too long; look again as long as there is one."""
        now = self._clock()
        for dialled in self.dialled.values():
            if dialled.heard:
                dialled.heard = False
                self.outgoing.active(dialled.peer.conn.pubkey, now)
        self._sn_close(partial(self.outgoing.take_idle, now))
        self._sn_checking = bool(len(self.outgoing)) and not self._calls.stopping
        if self._sn_checking:
            self._calls.group.call_later(SN_CHECK_S, self._sn_check)


def check_timeout(timeout_s: float) -> None:
    if not timeout_s >= 0:  # NaN is neither
        raise LocalProtocolError(f"timeout_s is {timeout_s}, it must be 0 or more")


def nothing(*_: object) -> None:
    """Do nothing."""
