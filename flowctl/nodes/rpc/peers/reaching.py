"""The peers of a node: those that have connected to its listeners, and those that it has dialled.

Theory of operation. A peer is found by its `ConnectionID`; a service node by its key, whichever side dialled: over the
connections that it opened, then the one that we opened; else, unless told otherwise, it is looked up and dialled. A
connection that we opened so ends when nothing has gone over it for as long as it was to be kept. What is sent to a peer
that has gone reaches nobody, but for a service node. The end of a connection ends what waits because of it: requests of
the peer are cancelled, ours to it fail.

`listen`, `connect` and `forget_service_nodes` are for any thread, the rest for the node's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from secrets import token_hex
from typing import Final, TypeAlias

import zmq

from flowctl.core.text.fieldtypes import check_type
from flowctl.core.text.printable import short
from flowctl.errors import ClosedError, ConfigError, LocalProtocolError
from flowctl.nodes.rpc.access.access import AuthLevel, PeerIdentity, ServiceNodes, key_route
from flowctl.nodes.rpc.access.admission import Allow, RpcAdmission
from flowctl.nodes.rpc.nodecalls import NodeCalls
from flowctl.nodes.rpc.peers.dialled import DialledConnection
from flowctl.nodes.rpc.peers.listener import DUPLICATE_HINT, LIFE_PROPERTY, RpcListener
from flowctl.nodes.rpc.peers.peer import ANY_WAY, MAX_PART_BYTES, SERVICE_NODE, ConnectionID, Reach, RpcPeer
from flowctl.nodes.rpc.wire import frames as wire
from flowctl.nodes.rpc.wire.addresses import Address, AddressTransport
from flowctl.wire.zeromq.curve import KeyPair, dial_curve, serve_curve
from flowctl.wire.zeromq.endpoint import check_port
from flowctl.wire.zeromq.line import METADATA_OPTION
from flowctl.wire.zeromq.socket import new_context, notice_dead_peers, shared_context
from flowctl.wire.zeromq.zap import ZapHandler, ZapRefusal, ZapRequest, bind_zap, zap_domain

_log: Final = logging.getLogger("flowctl.rpc")

CONNECT_TIMEOUT_S: Final = 10.0
SN_CHECK_S: Final = 0.25
"""Time between two searches for idle connections to service nodes: OxenMQ's CONN_CHECK_INTERVAL."""
DEAD_AFTER_S: Final = 30
"""Time without an answer of its system after which a peer counts as dead: as long as OxenMQ's heartbeats wait."""
HANDSHAKE_MS: Final = 10_000
RECONNECT_MS: Final = (250, 5_000)
LINGER_S: Final = 5.0
SELF_ADDRESS: Final = Address(AddressTransport.INPROC, socket="flowctl-this-node")
"""Address at which a node listens for itself, in its own context of ZeroMQ: no other program can connect to it."""
NO_CONNECTION: Final = wire.DISCONNECTED

Ready: TypeAlias = Callable[[ConnectionID], object]
Failed: TypeAlias = Callable[[ConnectionID, str], object]
_Raw: TypeAlias = "zmq.Socket[bytes]"


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


class Reaching:
    """The peers of a node."""

    def __init__(
        self,
        calls: NodeCalls,
        keys: KeyPair,
        clock: Callable[[], float],
        sn_lookup: Callable[[bytes], str | None] | None,
        *,
        received: Callable[[RpcPeer, list[bytes], int], object],
    ) -> None:
        self._calls: Final = calls
        self._keys: Final = keys
        self._clock: Final = clock
        self._sn_lookup: Final = sn_lookup
        self._received: Final = received
        self._life: Final = f"{LIFE_PROPERTY}:{token_hex(8)}".encode()
        self._context: Final = new_context()
        self._destroying: Final = threading.Lock()  # taken once, by the one that ends the context
        self._ids: Final = count(1)
        self._zap: Final = bind_zap(self._context)
        self._zap_handler: ZapHandler | None = None
        self._bound: list[tuple[int, _Raw, str]] = []  # before the start
        self.service_nodes: Final = ServiceNodes()
        self.admission: Final = RpcAdmission(self.service_nodes, clock)
        self.listeners: Final[dict[int, RpcListener]] = {}
        self.dialled: Final[dict[int, DialledConnection]] = {}
        self.outgoing: Final = OutgoingConnections(self._sn_incoming, self._sn_address, self._sn_dial)
        self._sn_checking = False  # whether a timer for idle ones is set
        self._lingering: dict[Address, float] = {}  # until when what was sent to there before may still be on its way
        self._listens_to_itself = False
        self.unsent_count = 0  #: messages dropped since too much waited for their peer already
        self.duplicate_count = 0  #: times that another node with our keys took a connection of ours

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._zap_handler = ZapHandler(self._calls.group, self._zap, self._decide)
        for bound in self._bound:
            self._open(*bound)
        self._bound.clear()

    def stop(self) -> None:
        """Close all connections; what was sent goes on being sent for a while."""
        for listener in list(self.listeners.values()):
            for peer in list(listener.routes.values()):
                if listener.is_inproc:
                    self.send_to(peer, [wire.BYE])
                self.forget(peer, wire.SHUTTING_DOWN)
            listener.close(LINGER_S)
        if self._zap_handler is not None:
            self._zap_handler.close()
        for dialled in list(self.dialled.values()):
            self.hang_up(dialled, "the node was stopped", code=wire.SHUTTING_DOWN, linger_s=LINGER_S)

    @property
    def destroyed(self) -> bool:
        return self._destroying.locked()

    def destroy(self) -> None:
        """End the context, once, and sockets that were never used."""
        if self._destroying.acquire(blocking=False):
            for _, raw, _ in self._bound:
                raw.close(0)
            self._context.destroy(linger=0)

    # --- listening and connecting; any thread --------------------------------------------------------------------

    def listen(
        self, address: str, allow: AuthLevel | Allow, on_bind: Callable[[bool], object] | None, *, curve: bool
    ) -> str:
        """Bind a socket, and admit the peers that `allow` accepts; return the address that was bound."""
        check_port(address)
        number = next(self._ids)
        # Before it is bound: the first connection may come before the next line. One item of a dict is set at once.
        self.admission.open(number, curve=curve, allow=allow)
        raw = self._new_socket(zmq.ROUTER, address)
        raw.set(zmq.ROUTER_HANDOVER, 1)
        raw.set(zmq.ROUTER_MANDATORY, 1)
        raw.set(zmq.ZAP_DOMAIN, zap_domain(number))
        if curve:
            serve_curve(raw, self._keys)
        try:
            raw.bind(address)
        except zmq.ZMQError as error:
            self.admission.close(number)
            raw.close(0)
            if on_bind is not None:
                on_bind(False)
                return address
            raise OSError(error.errno, f"cannot listen on {short(address)}: {error.strerror}") from error
        bound = raw.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._calls.started:
            self._calls.do(self._open, number, raw, address)
        else:
            self._bound.append((number, raw, address))
        if on_bind is not None:
            on_bind(True)
        return bound

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
        peer = self._connected_peer(conn)
        if peer is None and (conn.service_node or (conn.route and conn.pubkey in self.service_nodes)):
            # Strong: by whatever connection there is, or a new one.
            peer = self.outgoing.find(conn.pubkey, ANY_WAY, self._clock())
        return peer

    def _connected_peer(self, conn: ConnectionID) -> RpcPeer | None:
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
        peer = self._connected_peer(conn)
        if peer is None:
            return conn.service_node  # it may be dialled
        dialled = self.dialled.get(peer.conn.id)
        if dialled is None:
            return not peer.closed
        return not dialled.lost and (dialled.ready or conn.service_node)  # of a service node it waits for the answer

    def send_to(self, peer: RpcPeer, frames: Sequence[bytes]) -> bool:
        """Send a message that has no answer; return whether it could be sent."""
        return self.try_to_send(peer, frames) is None

    def try_to_send(self, peer: RpcPeer, frames: Sequence[bytes]) -> bytes | None:
        """Send a message; return the code for why it could not be, None if it could."""
        if peer.closed:
            # What was meant for a connection goes to no other one, but of a service node, which is known by its key.
            other = self.find(peer.conn) if peer.conn.pubkey in self.service_nodes else None
            return NO_CONNECTION if other is None or other.closed else self.try_to_send(other, frames)
        try:
            peer.send(frames)
        except zmq.Again:
            self.unsent_count += 1
            return wire.QUEUE_FULL
        except zmq.ZMQError:
            if peer.conn.route:
                self.forget(peer, wire.DISCONNECTED)
            return NO_CONNECTION
        return None

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
            self._lingering[dialled.address] = (
                inf  # from now on with routing ids of ZeroMQ's own: there is room for both
            )
            self.hang_up(dialled, told, code=wire.DISCONNECTED)
        elif dialled is not None:
            self.hang_up(dialled, "the other end closed it", code=wire.DISCONNECTED)
        elif (listener := self.listeners.get(peer.conn.id)) is not None and listener.is_inproc:
            self.forget(peer, wire.DISCONNECTED)

    def hang_up(self, dialled: DialledConnection, why: str, *, code: bytes, linger_s: float = 0.0) -> None:
        """Close a connection that we opened, and report its end to all callers that wait for it."""
        peer = dialled.peer
        if self.dialled.pop(peer.conn.id, None) is None:
            return
        if _is_inproc(dialled.address.zmq_address):
            self.send_to(peer, [wire.BYE])
        if linger_s:
            until = self._lingering.get(dialled.address, 0.0)
            self._lingering[dialled.address] = max(until, self._clock() + linger_s)
        failed = dialled.close(linger_s)
        self.forget(peer, code)
        if failed is not None:
            self._calls.make(failed, peer.conn, why)

    def _not_answered(self, dialled: DialledConnection) -> None:
        if not dialled.ready:
            self.hang_up(dialled, "connection attempt timed out", code=wire.DISCONNECTED)

    def _lost(self, peer: RpcPeer) -> None:
        """Act on the end of a connection; one that we opened comes again."""
        if peer.conn.route:
            self.forget(peer, wire.DISCONNECTED)
        else:
            self._give_up(peer, wire.DISCONNECTED)

    def disconnect(self, conn: ConnectionID, linger_s: float) -> None:
        peer = self._connected_peer(conn)
        dialled = None if peer is None else self.dialled.get(peer.conn.id)
        if dialled is not None:
            self.hang_up(dialled, "disconnected", code=wire.DISCONNECTED, linger_s=linger_s)
        elif peer is not None:
            with suppress(zmq.ZMQError):
                peer.send([wire.BYE])
            self.forget(peer, wire.DISCONNECTED)
        else:
            to = f"to service node {conn.pubkey.hex()}" if conn.id == SERVICE_NODE else conn.id
            _log.warning("disconnect: there is no connection %s", to)

    def forget(self, peer: RpcPeer, code: bytes) -> None:
        """Drop a peer: its requests here are cancelled, ours to it fail."""
        peer.closed = True
        self.outgoing.forget(peer.conn.pubkey, peer)
        listener = self.listeners.get(peer.conn.id)
        if listener is not None:
            listener.forget(peer)
        self._give_up(peer, code)

    def _give_up(self, peer: RpcPeer, code: bytes) -> None:
        """Cancel what runs for a peer; requests to it fail."""
        if peer.identity.pubkey not in self.service_nodes:  # whose reply finds another connection
            for running in list(peer.running.values()):
                running.cancel()
        if peer.calls is not None:
            self._calls.group.deadlines.remove(peer.calls)
            peer.calls.due_at = inf
            for call in peer.calls.take_all():
                self._calls.make(call.settle, False, [code])

    # --- sockets -------------------------------------------------------------------------------------------------

    def _new_socket(self, kind: int, address: str) -> _Raw:
        if self._destroying.locked():
            raise ClosedError("the node was stopped")
        shared = _is_inproc(address) and address != SELF_ADDRESS.zmq_address
        raw = (shared_context() if shared else self._context).socket(kind)
        # Of a connection that is made anew, too: ZeroMQ would keep what waits for ever, and the end would wait for it.
        raw.set(zmq.LINGER, int(LINGER_S * 1000))
        raw.set(zmq.IPV6, "[" in address)  # of IPv6, and only there: a name has one meaning everywhere else
        raw.set(zmq.MAXMSGSIZE, MAX_PART_BYTES)
        notice_dead_peers(raw, DEAD_AFTER_S)
        raw.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        return raw

    def _open(self, number: int, raw: _Raw, address: str) -> None:
        if self._calls.stopping:
            raw.close(0)
            return
        inproc = partial(self.admission.decide_inproc, number) if _is_inproc(address) else None
        self.listeners[number] = RpcListener(
            *(self._calls.group, raw, number, inproc, self._received, self._lost),
            admitted_count=lambda: self.admission.admitted_count,
        )

    def _decide(self, request: ZapRequest) -> Mapping[str, str] | ZapRefusal:
        listener = self.listeners.get(request.listener)
        if listener is not None:
            listener.note_accepted()
        return self.admission.decide(request)

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
        raw = self._new_socket(zmq.DEALER, address.zmq_address)
        if address.pubkey:
            dial_curve(raw, self._keys, address.pubkey)
        now = self._clock()
        self._lingering = {other: until for other, until in self._lingering.items() if until > now}
        # A route that is taken over ends the connection that has it, and what is on its way by that.
        taken = {*self._lingering, *(other.address for other in self.dialled.values())}
        if not (ephemeral or address in taken):
            raw.set(zmq.ROUTING_ID, key_route(self._keys.public))
            with suppress(zmq.ZMQError):  # a libzmq without it
                raw.setsockopt(METADATA_OPTION, self._life)
        raw.set(zmq.RECONNECT_IVL, RECONNECT_MS[0])
        raw.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
        try:
            raw.connect(address.zmq_address)
        except zmq.ZMQError as error:
            raw.close(0)
            self._calls.make(failed, conn, f"cannot connect to {address}: {error}")
            return
        identity, group = PeerIdentity(address.pubkey, auth), self._calls.group
        told = ready, failed, self._received, self._lost
        dialled = self.dialled[conn.id] = DialledConnection(group, raw, conn, address, identity, *told)
        self._calls.group.call_later(timeout_s, self._not_answered, dialled)

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


def _is_inproc(address: str) -> bool:
    return address.startswith("inproc:")


def nothing(*_: object) -> None:
    """Do nothing."""
