"""A connection that we open: it reports the first answer, then each loss and each return of the listener."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass
from typing import Final

import zmq

from flowctl.core.outcomes.backoff import Backoff, Redial
from flowctl.nodes.rpc.access.access import PeerIdentity
from flowctl.nodes.rpc.peers.peer import ConnectionID, RpcPeer, SocketMonitor
from flowctl.nodes.rpc.wire.addresses import Address
from flowctl.nodes.rpc.wire.frames import HI
from flowctl.pollgroup import PollGroup
from flowctl.wire.zeromq.socket import ZmqSocket

_REDIAL_BACKOFF: Final = Backoff(first_s=0.25, most_s=5.0, jitter=0.0)
"""Pause before a connection that ZeroMQ has given up is connected again."""

_ANSWER_BACKOFF: Final = Backoff(first_s=4.0, most_s=60.0, jitter=0.5)
"""Time without an answer to HI after which a connection is made anew: another node with our keys may have taken its
route before it was heard, so that neither end has noticed. A listener that is busy may be the reason as well."""

_EVENTS: Final = (
    zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED
)


@dataclass(eq=False)
class DialledConnection:
    """A DEALER socket that dials one listener; all methods on the node's thread.

    ZeroMQ connects it again when its connection is lost, but not when the other end has broken the protocol, as with a
    message over the limit: then we do. It says HI each time, so that the listener knows its route before anything else
    is sent.
    """

    _group: PollGroup
    raw: InitVar[zmq.Socket[bytes]]
    conn: InitVar[ConnectionID]
    address: Address
    identity: InitVar[PeerIdentity]
    _ready: Callable[[ConnectionID], object]
    _failed: Callable[[ConnectionID, str], object]
    _received: Callable[[RpcPeer, list[bytes], int], object]
    _lost: Callable[[RpcPeer], object]
    heard: bool = False  #: something came since it was set to False
    ready: bool = False  #: it was answered
    lost: bool = False  #: its connection has ended, and there is no other yet
    _answered: bool = False  #: something came since the last handshake
    _handshake_count: int = 0  #: those that were awaited
    _comes_again: bool = True  #: ZeroMQ has tried to connect since the connection ended
    _not_reached: bool = False  #: ZeroMQ has told that it tries again, and not yet that it is connected

    def __post_init__(self, raw: zmq.Socket[bytes], conn: ConnectionID, identity: PeerIdentity) -> None:
        self._redials = Redial(_REDIAL_BACKOFF, tries=1)
        self._silences = Redial(_ANSWER_BACKOFF, tries=1)
        socket = ZmqSocket(self._group, raw, self._message)
        self.peer = RpcPeer(conn, socket, identity)
        self._monitor = SocketMonitor(self._group, raw, self._happened, _EVENTS)
        socket.start()
        self._said_hi = self._say_hi()
        self._await_answer()  # what happened before there was a monitor was told to nobody

    def note_answered(self) -> Callable[[ConnectionID], object] | None:
        """Note that the listener has answered; return the callbacks to call, the first time."""
        self._redials.tries = self._silences.tries = 1
        if self.ready:
            return None
        self.ready = True
        return self._ready

    def close(self, linger_s: float) -> Callable[[ConnectionID, str], object] | None:
        """Close the socket; return the callbacks to call, if it was never answered."""
        self._monitor.close()
        self.peer.socket.close(linger_s)
        return None if self.ready else self._failed

    def _message(self, frames: list[bytes]) -> None:
        if not self._answered:
            self._monitor.read_all()  # the handshake came before
        self.heard = self._answered = True
        self._received(self.peer, frames, 0)

    def _happened(self, event: int, value: int) -> None:
        self.lost = event != zmq.EVENT_HANDSHAKE_SUCCEEDED and (self.lost or event != zmq.EVENT_CONNECTED)
        if event == zmq.EVENT_CONNECTED:
            self._comes_again, self._not_reached = True, False
            self.peer.descriptor = value
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._comes_again = self._not_reached = True
        elif event == zmq.EVENT_DISCONNECTED:
            self._comes_again = False
            if self.ready:  # until then there is the deadline of the connect
                self._group.call_later(self._redials.delay_s(), self._redial)
            self.peer.descriptor = -1
            self._lost(self.peer)
        else:
            self._await_answer()
            if self.ready or not self._said_hi:
                self._said_hi = self._say_hi()

    def _await_answer(self) -> None:
        self._answered, self._handshake_count = False, self._handshake_count + 1
        self._group.call_later(self._silences.delay_s(), self._heed_silence, self._handshake_count)

    def _heed_silence(self, handshake: int) -> None:
        if self._answered or self.peer.socket.closed or handshake != self._handshake_count:
            return
        self._monitor.read_all()
        if not self._not_reached:  # otherwise ZeroMQ tries by itself, and what waits to be sent stays
            self._silences.begin()
            self._said_hi = False
            with suppress(zmq.ZMQError):
                self.peer.socket.raw.disconnect(self.address.zmq_address)
            self.peer.socket.look_for_messages()
            # Not at once: a ROUTER without handover would ignore a second connection of its route.
            self._group.call_later(_REDIAL_BACKOFF.first_s, self._dial_again)

    def _redial(self) -> None:
        """Connect again, if ZeroMQ does not: it tells of each try, and of none once it has given up."""
        self._monitor.read_all()
        socket = self.peer.socket
        if socket.closed or self._comes_again:
            return
        socket.look_for_messages()  # what follows reads its mailbox
        if int(socket.raw.get(zmq.EVENTS)) & zmq.POLLOUT:
            return
        self._redials.begin()
        self._dial_again()

    def _dial_again(self) -> None:
        socket = self.peer.socket
        if socket.closed:
            return
        self._comes_again = True
        to = self.address.zmq_address
        with suppress(zmq.ZMQError):
            socket.raw.disconnect(to)  # what is left of it
        socket.raw.connect(to)
        socket.look_for_messages()

    def _say_hi(self) -> bool:
        """Say HI; return whether it could be sent. A peer that denied us at once may have no connection now."""
        try:
            self.peer.socket.send([HI])
        except zmq.ZMQError:
            return False
        return True
