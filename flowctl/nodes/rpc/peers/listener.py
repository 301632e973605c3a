"""A socket that others connect to, and who they are.

Theory of operation. Whose a message is says the connection that it came by, never its routing id: with handover, which
lets a peer that reconnects have its route back at once, anybody may take anybody's; that two nodes have one the life
shows that each of ours names when it connects (`wire.zeromq.line`). So each connection that is admitted
(`wire.zeromq.zap`) gets a number, which comes with each of its messages, and peers are kept by that number. Routes
serve for sending only, and belong to the connection that used them last; the one that had it before is gone.

That a connection has ended ZeroMQ tells by the number of its descriptor, which the first message has too. Connections
within the process (inproc) have neither number nor descriptor: there a route is as good as its peer, and they are
forgotten when something is sent to them in vain.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from math import inf
from typing import Any, Final

import zmq

from flowctl.errors import InternalError
from flowctl.nodes.rpc.access.access import AuthLevel, PeerIdentity, is_claimed
from flowctl.nodes.rpc.access.admission import AUTH_PROPERTY, CONNECTION_PROPERTY
from flowctl.nodes.rpc.peers.peer import ConnectionID, RpcPeer, SocketMonitor
from flowctl.nodes.rpc.wire.frames import BYE, TAKEN_OVER
from flowctl.pollgroup import PollGroup
from flowctl.wire.zeromq.line import DuplicateLog, IdentityHolder, PeerLine
from flowctl.wire.zeromq.socket import ZmqSocket
from flowctl.wire.zeromq.zap import plain_address

MOST_PEERS: Final = 100_000
"""Peers of one listener; each takes some 1000 octets here, and more in ZeroMQ. Messages of further ones are ignored."""

LIFE_PROPERTY: Final = "X-Flowctl-Life"
"""Property of the handshake of a node that dials under a routing id: says which node of that key it is."""
_MOST_LIFE_CHARS: Final = 64
"""Longest that is heeded: several are remembered for each routing id, and a property may be as long as a message."""
DUPLICATE_HINT: Final = "give each its own keys, or connect with ephemeral_routing_id; the one that came last goes on"

_MOST_CONTESTED: Final = 1024
"""Routing ids that are remembered since one node took them from another."""

_log: Final = logging.getLogger("flowctl.rpc")
_SOURCE: Final = int(zmq.SRCFD)
_LEVELS: Final = {level.name.lower(): level for level in AuthLevel}


def identity_of(frame: zmq.Frame) -> PeerIdentity:
    key = _noted(frame, "User-Id")
    return PeerIdentity(
        pubkey=bytes.fromhex(key) if key else b"",
        auth=_LEVELS.get(_noted(frame, AUTH_PROPERTY), AuthLevel.NONE),
        address=plain_address(_noted(frame, "Peer-Address")),
    )


@dataclass(eq=False)
class RpcListener:
    """A bound ROUTER; all methods on the node's thread."""

    _group: PollGroup
    raw: InitVar[zmq.Socket[bytes]]
    number: int
    _admit_inproc: Callable[[], AuthLevel | None] | None
    _received: Callable[[RpcPeer, list[bytes], int], object]
    _gone: Callable[[RpcPeer], object]
    routes: dict[bytes, RpcPeer] = field(default_factory=dict)
    by_pubkey: dict[bytes, RpcPeer] = field(default_factory=dict)  #: the newest connection of each key that lives
    #: Messages without frames, and of peers who are not let in, for whom there is no room, or who have taken a routing
    #: id that says another key than theirs.
    refused_count: int = 0
    duplicates: DuplicateLog = field(default_factory=DuplicateLog)  #: nodes that were found with one routing id
    _peers: dict[str | bytes, RpcPeer] = field(default_factory=dict)  #: by number of the connection, or by route
    _of_key: dict[bytes, dict[RpcPeer, None]] = field(default_factory=dict)  #: all of each key, oldest first
    _by_descriptor: dict[int, RpcPeer] = field(default_factory=dict)
    #: By descriptor: the last connection that can not have it, since it was let in before that was accepted. Infinite:
    #: its connection has ended.
    _not_of: dict[int, float] = field(default_factory=dict)
    #: Who has a routing id that was taken over: also while nobody has it, since one that was ousted comes again.
    _contested: OrderedDict[bytes, IdentityHolder] = field(default_factory=OrderedDict)
    admitted_count: Callable[[], int] = field(kw_only=True)  #: the number of the newest connection

    def __post_init__(self, raw: zmq.Socket[bytes]) -> None:
        #: Bound within the process, where no end of a connection is told: BYE says it.
        self.is_inproc = self._admit_inproc is not None
        self._address = raw.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.socket = ZmqSocket(self._group, raw, self._message)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED
        self._monitor = SocketMonitor(self._group, raw, self._happened, events)
        self.socket.start()

    def __len__(self) -> int:
        return len(self.routes)

    def forget(self, peer: RpcPeer) -> None:
        """Drop a peer; what it sends from now on comes from a new one."""
        if self.routes.get(peer.conn.route) is peer:
            del self.routes[peer.conn.route]
        self._forget_key(peer)
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]
        if self._by_descriptor.get(peer.descriptor) is peer:
            del self._by_descriptor[peer.descriptor]

    def _forget_key(self, peer: RpcPeer) -> None:
        """Have its key mean the newest of its other connections, if there is one."""
        of_key = self._of_key.get(peer.identity.pubkey)
        if of_key is None or of_key.pop(peer, of_key) is of_key:
            return
        if not of_key:
            del self._of_key[peer.identity.pubkey], self.by_pubkey[peer.identity.pubkey]
        elif self.by_pubkey[peer.identity.pubkey] is peer:
            self.by_pubkey[peer.identity.pubkey] = next(reversed(of_key))

    def note_accepted(self) -> None:
        """Note which descriptors have been accepted, before a further connection gets its number."""
        self._monitor.read_all()

    def close(self, linger_s: float) -> None:
        self._monitor.close()
        self.socket.close(linger_s)

    def _message(self, frames: list[bytes]) -> None:
        frame = self.socket.frame
        if frame is None or len(frames) < 2:
            self.refused_count += 1
            return
        key: Any = frame.get(CONNECTION_PROPERTY) if self._admit_inproc is None else frames[0]
        peer = self._peers.get(key)
        if peer is None:
            peer = self._accept(key, frames[0], frame)
            if peer is None:
                self.refused_count += 1
                return
        self._received(peer, frames, 1)

    def _accept(self, key: str | bytes, route: bytes, frame: zmq.Frame) -> RpcPeer | None:
        """Return the peer of a new connection; None: its messages are ignored."""
        before = self.routes.get(route)
        holder = (self._contested.get(route) or IdentityHolder()) if before is None else before.holder
        identity = self._identify(frame)
        is_thief = identity is not None and is_claimed(route, identity.pubkey)  # it has proven another key
        line = PeerLine.of(frame, self._address)
        self._monitor.read_all()  # what had this descriptor before is gone now
        if line is not None and not self._has(line.descriptor, key):
            line = None
        if not is_thief and not self._meet(holder, route, frame, line, key):
            return None
        if before is not None:
            self._gone(before)
        if identity is None or len(self.routes) >= MOST_PEERS:
            return None
        if is_thief:
            holder.bring_back()
            with suppress(zmq.ZMQError):
                self.socket.send([route, BYE])
            return None
        peer = RpcPeer(ConnectionID(self.number, route, identity.pubkey), self.socket, identity, key, holder=holder)
        with suppress(zmq.ZMQError):
            descriptor = frame.get(_SOURCE)
            if not isinstance(descriptor, int):
                raise InternalError("a descriptor that is no number")
            if not self._claim(descriptor, peer):
                peer.closed = True  # it has gone: what it sent is heard, and nothing is kept of it
                return peer
            peer.descriptor = descriptor
            self._by_descriptor[descriptor] = peer
        self._peers[key] = self.routes[route] = peer
        if identity.pubkey:
            self.by_pubkey[identity.pubkey] = peer
            self._of_key.setdefault(identity.pubkey, {})[peer] = None
        return peer

    def _meet(
        self, holder: IdentityHolder, route: bytes, frame: zmq.Frame, line: PeerLine | None, key: str | bytes
    ) -> bool:
        """Note who has a routing id; False: another node has, and the one that comes again is told to leave."""
        life = _noted(frame, LIFE_PROPERTY)
        life = life if len(life) <= _MOST_LIFE_CHARS else ""
        if life and line is not None and route.startswith(b"\0"):  # its route was taken before it was heard
            line.cut()  # so that it comes again, and is told
        if holder.came(life, line):
            if holder.is_contested:
                self._contested[route] = holder
                self._contested.move_to_end(route)
                if len(self._contested) > _MOST_CONTESTED:
                    self._contested.popitem(last=False)
            return True
        if holder.note_return(line, key):
            if told := self.duplicates.note(holder, self._group.now()):
                pubkey = _noted(frame, "User-Id") or route.hex()
                _log.warning("two nodes come with the key %s: %s; hint: %s", pubkey, told, DUPLICATE_HINT)
            with suppress(zmq.ZMQError):
                self.socket.send([route, BYE, TAKEN_OVER])
        return False

    def _claim(self, descriptor: int, peer: RpcPeer) -> bool:
        """Return whether a connection that is heard for the first time still has its descriptor."""
        if not self._has(descriptor, peer.key):
            return False
        other = self._by_descriptor.get(descriptor)
        if other is not None:
            self._gone(other)
        return True

    def _has(self, descriptor: int, key: str | bytes) -> bool:
        """Return whether a descriptor is still of the connection of that number, as far as events have been read.

        Its end may have been told before its first message was read; and another may have the descriptor since.
        """
        return int(key) > self._not_of.get(descriptor, 0)

    def _identify(self, frame: zmq.Frame) -> PeerIdentity | None:
        if self._admit_inproc is None:
            return identity_of(frame)
        level = self._admit_inproc()
        return None if level is None else PeerIdentity(auth=level)

    def _happened(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:  # a handshake that succeeded would not tell which descriptor
            self._not_of[descriptor] = self.admitted_count()
            return
        self._not_of[descriptor] = inf
        peer = self._by_descriptor.pop(descriptor, None)
        if peer is not None:
            self._gone(peer)


def _noted(frame: zmq.Frame, name: str) -> str:
    with suppress(zmq.ZMQError):
        return str(frame.get(name))
    return ""
