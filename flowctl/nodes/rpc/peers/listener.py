"""Who has connected to a listener, and by which routing id.

Theory of operation. Whose a message is says the connection that it came by: key and routing id are known from its
handshake. A routing id belongs to the connection that named it last, so that a peer that reconnects has its route back
at once, and the one that had it before is gone here. Its connection is ended only where the peer has named its life:
then it comes again, and can be told that there are two of its key. Others would take the route back, in turns for ever:
they are read no more, as ZeroMQ leaves them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from flowctl.nodes.rpc.access.access import PeerIdentity, is_claimed
from flowctl.nodes.rpc.peers.peer import ConnectionID, RpcPeer
from flowctl.nodes.rpc.wire.frames import BYE, TAKEN_OVER
from flowctl.wire.zmtp.identity import DuplicateLog, IdentityHolder
from flowctl.wire.zmtp.link import Link

LIFE_PROPERTY: Final = "X-Flowctl-Life"
"""Property of the handshake of a node that dials under a routing id: says which node of that key it is."""
MOST_LIFE_CHARS: Final = 64
"""Longest that is heeded: several are remembered for each routing id."""
DUPLICATE_HINT: Final = "give each its own keys, or connect with ephemeral_routing_id; the one that came last goes on"

_MOST_CONTESTED: Final = 1024
"""Routing ids that are remembered since one node took them from another."""

_log: Final = logging.getLogger("flowctl.rpc")


class RpcListener:
    """The peers of one listener; all methods on the node's thread.

    Args:
        number: of the listener, in its node.
        gone: called with a peer whose route another one has.
        now: returns the time in seconds.
    """

    def __init__(self, number: int, gone: Callable[[RpcPeer], object], now: Callable[[], float]) -> None:
        self.number: Final = number
        self._gone: Final = gone
        self._now: Final = now
        self._route_number = 0
        self.routes: Final[dict[bytes, RpcPeer]] = {}
        self.by_pubkey: Final[dict[bytes, RpcPeer]] = {}  #: the newest connection of each key that lives
        self._of_key: Final[dict[bytes, dict[RpcPeer, None]]] = {}  # all of each key, oldest first
        #: Messages of peers who are not let in, for whom there is no room, or who name a routing id of another's key.
        self.refused_count = 0
        self.duplicates: Final = DuplicateLog()  #: nodes that were found with one routing id
        # Who has a routing id that was taken over: also while nobody has it, since one that was ousted comes again.
        self._contested: Final[OrderedDict[bytes, IdentityHolder]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.routes)

    def enter(self, link: Link, route: bytes, identity: PeerIdentity, life: str = "") -> RpcPeer | None:
        """Return the peer of a new connection. None: it is told to leave, and its messages are ignored."""
        if not route or route.startswith(b"\0"):  # those are ours to give
            self._route_number += 1
            route = b"\0" + self._route_number.to_bytes(8, "big")
        if is_claimed(route, identity.pubkey):  # it has proven another key
            link.send_message([BYE])
            return None
        before = self.routes.get(route)
        holder = (self._contested.get(route) if before is None else before.holder) or IdentityHolder()
        if not self._meet(holder, link, route, identity, life):
            return None
        if before is not None:
            self._gone(before)
        peer = RpcPeer(ConnectionID(self.number, route, identity.pubkey), identity, link, holder=holder)
        self.routes[route] = peer
        if identity.pubkey:
            self.by_pubkey[identity.pubkey] = peer
            self._of_key.setdefault(identity.pubkey, {})[peer] = None
        return peer

    def forget(self, peer: RpcPeer) -> None:
        """Drop a peer, and have its key mean the newest of its other connections, if there is one."""
        if self.routes.get(peer.conn.route) is peer:
            del self.routes[peer.conn.route]
        of_key = self._of_key.get(peer.identity.pubkey)
        if of_key is None or of_key.pop(peer, of_key) is of_key:
            return
        if not of_key:
            del self._of_key[peer.identity.pubkey], self.by_pubkey[peer.identity.pubkey]
        elif self.by_pubkey[peer.identity.pubkey] is peer:
            self.by_pubkey[peer.identity.pubkey] = next(reversed(of_key))

    def _meet(self, holder: IdentityHolder, link: Link, route: bytes, identity: PeerIdentity, life: str) -> bool:
        """Note who has a routing id; False: another node has, and the one that comes again is told to leave."""
        life = life if len(life) <= MOST_LIFE_CHARS else ""
        if holder.came(life, link):
            if holder.is_contested:
                self._contested[route] = holder
                self._contested.move_to_end(route)
                if len(self._contested) > _MOST_CONTESTED:
                    self._contested.popitem(last=False)
            return True
        if holder.note_return(link) and (told := self.duplicates.note(holder, self._now())):
            key = identity.pubkey.hex() or route.hex()
            _log.warning("two nodes come with the key %s: %s; hint: %s", key, told, DUPLICATE_HINT)
        link.send_message([BYE, TAKEN_OVER])
        return False
