"""Connections that peers open to a listener of a node: who is let in, and becomes its peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flowctl.nodes.rpc.access.access import AuthLevel, PeerIdentity
from flowctl.nodes.rpc.access.admission import DENIED, RpcAdmission
from flowctl.nodes.rpc.peers.listener import LIFE_PROPERTY, RpcListener
from flowctl.nodes.rpc.peers.peer import RpcPeer
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.wire.zmtp.keys import KeyPair
from flowctl.wire.zmtp.link import LinkOptions, ZmtpLink, why_cut
from flowctl.wire.zmtp.listen import ROUTER, BoundSocket, ZmtpListener, check_dialler
from flowctl.wire.zmtp.mechanism import CurveServer, Null, Properties, RefusedError

_LIFE: Final = LIFE_PROPERTY.lower().encode()
_OUSTED: Final = "another connection has its routing id"


class Door:
    """Lets connections of one socket in, to be peers of its listener; the node's thread.

    Args:
        keys: of this node, where connections are encrypted. None: they are not.
        received: called with a peer and each of its messages.
        lost: called with a peer whose connection has ended, and why it was cut if it was.
    """

    def __init__(
        self,
        group: PollGroup,
        bound: BoundSocket,
        peers: RpcListener,
        admission: RpcAdmission,
        keys: KeyPair | None,
        options: LinkOptions,
        received: Callable[[RpcPeer, list[bytes]], object],
        lost: Callable[[RpcPeer, str], object],
    ) -> None:
        self.peers: Final = peers
        self.received: Final = received
        self.lost: Final = lost
        self.keys: Final = keys
        self.options: Final = options
        self._admission: Final = admission
        self._group: Final = group
        self.listener: Final = ZmtpListener(group, bound, lambda: Incoming(self))

    def close(self) -> None:
        """Accept no more, and end connections that are no peers."""
        self.listener.close()
        for link in list(self.listener.links):
            if isinstance(link, Incoming) and (link.peer is None or link.peer.closed):
                link.close("the node was stopped")

    def decide(self, address: str, key: bytes) -> AuthLevel:
        """Return the level of a new connection; a hook's fault lets nobody in."""
        try:
            return self._admission.decide(self.peers.number, address, key)
        except RefusedError:
            raise
        except BaseException as error:
            self._group.report("deciding on a new connection", error)
            raise RefusedError(DENIED) from error


class Incoming(ZmtpLink):
    """A connection that a peer has opened."""

    __slots__ = ("_door", "_level", "peer")

    def __init__(self, door: Door) -> None:
        self._door: Final = door
        self._level = AuthLevel.NONE
        self.peer: RpcPeer | None = None  # once it is known and was let in
        keys = door.keys
        super().__init__(
            door.options,
            Null(ROUTER, self._admit) if keys is None else CurveServer(ROUTER, keys.public, keys.secret, self._admit),
            self._message,
            self._known,
            self._ended,
        )

    def _admit(self, key: bytes, said: Properties) -> Properties:
        check_dialler(said)
        self._level = self._door.decide(self.connection.peer[0], key)
        return {}

    def _known(self) -> None:
        said, identity = self.said, PeerIdentity(self.key, self._level, self.connection.peer[0])
        life = said.get(_LIFE, b"").decode("ascii", "replace")
        self.peer = self._door.peers.enter(self, said.get(b"identity", b""), identity, life)

    def _message(self, frames: list[bytes]) -> None:
        peer, door = self.peer, self._door
        if peer is None:
            door.peers.refused_count += 1
        elif peer.closed:
            self.hold(_OUSTED)
        else:
            door.received(peer, frames)

    def _ended(self, reason: CloseReason, details: str) -> None:
        self._door.listener.links.discard(self)
        if self.peer is not None and not self.peer.closed:
            self._door.lost(self.peer, why_cut(reason, details))
