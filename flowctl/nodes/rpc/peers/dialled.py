"""A connection that we open: it reports the first answer, then each loss and each return of the listener."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

from flowctl.core.flow.limits import Limits
from flowctl.core.outcomes.backoff import Backoff, Redial
from flowctl.nodes.rpc.access.access import PeerIdentity
from flowctl.nodes.rpc.nodecalls import NodeCalls
from flowctl.nodes.rpc.peers.inproc import Dial, DirectEnd, InprocNames
from flowctl.nodes.rpc.peers.link import DEAD_AFTER_S, Link, RpcSession
from flowctl.nodes.rpc.peers.peer import ConnectionID, RpcPeer
from flowctl.nodes.rpc.wire.addresses import Address, AddressTransport
from flowctl.nodes.rpc.wire.frames import HI
from flowctl.reasons import CloseReason
from flowctl.wire.zmtp.mechanism import Mechanism

_REDIAL_BACKOFF: Final = Backoff(first_s=0.25, most_s=5.0, jitter=0.0)
"""Pause before a connection that has ended, or that could not be made, is made again."""

_ANSWER_BACKOFF: Final = Backoff(first_s=4.0, most_s=60.0, jitter=0.5)
"""Time without an answer to HI after which a connection is made anew: another node with our keys may have taken its
route before it was heard, so that neither end has noticed. A listener that is busy may be the reason as well."""


class DialledConnection:
    """A connection to one listener, made again when it is lost; all methods on the node's thread.

    It says HI each time, so that the listener knows its route before anything else is sent.

    Args:
        mechanism: makes what a connection of ZMTP begins with.
        names: where it dials within the process.
        ready: called with the connection when it is answered first.
        failed: called with the connection and why, if it never is.
        received: called with the peer and each message.
        lost: called with the peer when a connection has ended that is made again.
        over: called when nothing of it is left.
    """

    def __init__(
        self,
        calls: NodeCalls,
        conn: ConnectionID,
        address: Address,
        identity: PeerIdentity,
        *,
        limits: Limits,
        mechanism: Callable[[], Mechanism],
        names: InprocNames,
        ready: Callable[[ConnectionID], object],
        failed: Callable[[ConnectionID, str], object],
        received: Callable[[RpcPeer, list[bytes]], object],
        lost: Callable[[RpcPeer], object],
        over: Callable[[DialledConnection], object],
    ) -> None:
        self.address: Final = address
        self.peer: Final = RpcPeer(conn, identity)
        self.heard = False  #: something came since it was set to False
        self.ready = False  #: it was answered
        self.lost = False  #: its connection has ended, and there is no other yet
        self._calls: Final = calls
        self._limits: Final = limits
        self._mechanism: Final = mechanism
        self._names: Final = names
        self._on_ready, self._on_failed = ready, failed
        self._received, self._on_lost, self._on_over = received, lost, over
        self._redials: Final = Redial(_REDIAL_BACKOFF)
        self._silences: Final = Redial(_ANSWER_BACKOFF, tries=1)
        self._answered = False  # something came since the last handshake
        self._closes_at: float | None = None  # it was closed; infinite past: at once
        self._task: asyncio.Task[None] | None = None  # that connects
        self._dialling: RpcSession | Dial | None = None  # what is on its way to be a link
        self._dial()

    def note_answered(self) -> Callable[[ConnectionID], object] | None:
        """Note that the listener has answered; return the callback to call, the first time."""
        self._redials.tries, self._silences.tries = 0, 1
        if self.ready:
            return None
        self.ready = True
        return self._on_ready

    def close(self, why: str, linger_s: float) -> Callable[[ConnectionID, str], object] | None:
        """End it, once what was sent is on its way or after that time; return what to call if it was never answered."""
        now = self._calls.group.now()
        self._closes_at = now + linger_s
        if self.peer.link is not None:
            self.peer.link.end(why, linger_s)
            if isinstance(self.peer.link, DirectEnd):
                self._finish()
        elif linger_s and self.peer.unsent:
            self._calls.group.call_later(linger_s, self._finish)
        else:
            self._finish()
        return None if self.ready else self._on_failed

    # --- connecting ----------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        if self._closing():
            self._finish()
            return
        self._redials.begin()
        if self.address.transport is AddressTransport.INPROC:
            self._dialling = Dial(self._calls, self._linked_directly)
            self._names.dial(self.address.socket, self._dialling)
        else:
            self._task = self._calls.group.loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(DEAD_AFTER_S):
                sock = await _connected(self.address)
        except (OSError, TimeoutError):
            self._dial_later()
            return
        self._dialling = session = RpcSession(self._mechanism(), self._message, self._known, self._ended)
        session.live_on(self._calls.group, sock, self._limits)

    def _dial_later(self) -> None:
        self._task = self._dialling = None
        self._calls.group.call_later(self._redials.delay_s(), self._dial)

    def _linked_directly(self, end: DirectEnd) -> None:
        if self._closing():
            end.end("")
            return
        end.message, end.gone = self._message, self._gone
        self._linked(end)

    def _known(self) -> None:
        if isinstance(self._dialling, RpcSession):
            self._linked(self._dialling)

    def _linked(self, link: Link) -> None:
        self.lost = self._answered = False
        self._dialling = None
        self._calls.group.call_later(self._silences.delay_s(), self._heed_silence, link)
        link.send_message([HI])
        self.peer.link_up(link)
        if self._closes_at is not None:  # only what was sent before kept it
            link.end("closed", max(self._closes_at - self._calls.group.now(), 0.0))

    # --- what comes ----------------------------------------------------------------------------------------------

    def _message(self, frames: list[bytes]) -> None:
        self.heard = self._answered = True
        self._received(self.peer, frames)

    def _ended(self, reason: CloseReason, details: str) -> None:
        del reason, details
        self._gone()

    def _gone(self) -> None:
        was_up, self.peer.link = self.peer.link is not None, None
        if self._closes_at is not None and (was_up or self._closing()):
            self._finish()
            return
        if was_up:
            self.lost = True
            self._on_lost(self.peer)
        self._dial_later()

    def _heed_silence(self, link: Link) -> None:
        if self._answered or self.peer.link is not link or self._closes_at is not None:
            return
        self._silences.begin()
        link.cut()

    # --- the end -------------------------------------------------------------------------------------------------

    def _closing(self) -> bool:
        """Return whether there is no time left to make a connection."""
        return self._closes_at is not None and (not self.peer.unsent or self._calls.group.now() >= self._closes_at)

    def _finish(self) -> None:
        self._closes_at = float("-inf")
        self.peer.unsent = None
        if self._task is not None:
            self._task.cancel()
        if isinstance(self._dialling, RpcSession):
            self._dialling.close("given up")
        elif self._dialling is not None:
            self._names.withdraw(self.address.socket, self._dialling)
        self._task = self._dialling = None
        self._on_over(self)


async def _connected(address: Address) -> socket.socket:
    """Return a socket that is connected.

    Raises:
        OSError: it cannot be.
    """
    loop = asyncio.get_running_loop()
    places: list[tuple[int, Any]]
    if address.transport is AddressTransport.IPC:
        path = address.socket
        places = [(socket.AF_UNIX, "\0" + path[1:] if path.startswith("@") else path)]
    else:
        family = socket.AF_INET6 if address.host.startswith("[") else socket.AF_INET  # a name is one of IPv4
        host = address.host.removeprefix("[").removesuffix("]")
        infos = await loop.getaddrinfo(host, address.port, family=family, type=socket.SOCK_STREAM)
        places = [(info[0], info[4]) for info in infos]
    error: OSError | None = None
    for kind, place in places:
        sock = socket.socket(kind, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, place)
        except BaseException as fault:
            sock.close()
            if not isinstance(fault, OSError):
                raise
            error = fault
        else:
            return sock
    raise error or OSError(f"{address} has no address")
