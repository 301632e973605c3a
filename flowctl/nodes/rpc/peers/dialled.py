"""A connection that we open: it reports the first answer, then each loss and each return of the listener."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flowctl.core.outcomes.backoff import Backoff, Redial
from flowctl.nodes.rpc.access.access import PeerIdentity
from flowctl.nodes.rpc.peers.peer import MOST_UNSENT_BYTES, ConnectionID, RpcPeer
from flowctl.nodes.rpc.wire.addresses import Address
from flowctl.nodes.rpc.wire.frames import HI
from flowctl.pollgroup import PollGroup
from flowctl.wire.zmtp.dial import ZmtpDialler
from flowctl.wire.zmtp.inproc import InprocNames
from flowctl.wire.zmtp.link import Link, LinkOptions
from flowctl.wire.zmtp.mechanism import Mechanism, Properties

_REDIAL_BACKOFF: Final = Backoff(first_s=0.25, most_s=5.0, jitter=0.5)
"""Pause before a connection that has ended, or that could not be made, is made again."""

_ANSWER_BACKOFF: Final = Backoff(first_s=4.0, most_s=60.0, jitter=0.5)
"""Time without an answer to HI after which a connection is made anew: another node with our keys may have taken its
route before it was heard, so that neither end has noticed. A listener that is busy may be the reason as well."""


class DialledConnection:
    """A connection to one listener, made again when it is lost; all methods on the node's thread.

    It says HI each time, so that the listener knows its route before anything else is sent.

    Args:
        own: what it says of itself.
        mechanism: makes what a connection of ZMTP begins with.
        names: where it dials within the process.
        ready: called with the connection when it is answered first.
        failed: called with the connection and why, if it never is.
        received: called with the peer and each message.
        lost: called with the peer when a connection has ended that is made again, and why it was cut if it was.
        over: called when nothing of it is left.
    """

    def __init__(
        self,
        group: PollGroup,
        conn: ConnectionID,
        address: Address,
        identity: PeerIdentity,
        *,
        own: Properties,
        options: LinkOptions,
        mechanism: Callable[[Properties], Mechanism],
        names: InprocNames,
        ready: Callable[[ConnectionID], object],
        failed: Callable[[ConnectionID, str], object],
        received: Callable[[RpcPeer, list[bytes]], object],
        lost: Callable[[RpcPeer, str], object],
        over: Callable[[DialledConnection], object],
    ) -> None:
        self.address: Final = address
        most_bytes = options.limits.size.hard or MOST_UNSENT_BYTES  # what a link takes at once
        self.peer: Final = RpcPeer(conn, identity, most_unsent_bytes=min(most_bytes, MOST_UNSENT_BYTES))
        self.heard = False  #: something came since it was set to False
        self.ready = False  #: it was answered
        self.lost = False  #: its connection has ended, and there is no other yet
        self._group: Final = group
        self._on_ready, self._on_failed = ready, failed
        self._received, self._on_lost, self._on_over = received, lost, over
        self._silences: Final = Redial(_ANSWER_BACKOFF, tries=1)
        self._answered = False  # something came since the last handshake
        self._closes_at: float | None = None  # it was closed: what was sent has time until then
        self._dialler: Final = ZmtpDialler(
            *(group, address.zmq_address, own, mechanism, options, names, _REDIAL_BACKOFF),
            message=self._message,
            up=self._up,
            down=self._down,
        )
        self._dialler.dial()

    def note_answered(self) -> Callable[[ConnectionID], object] | None:
        """Note that the listener has answered; return the callback to call, the first time."""
        self._dialler.redials.tries, self._silences.tries = 0, 1
        if self.ready:
            return None
        self.ready = True
        return self._on_ready

    def close(self, why: str, linger_s: float) -> Callable[[ConnectionID, str], object] | None:
        """End it, once what was sent is on its way or after that time; return what to call if it was never answered."""
        self._closes_at = self._group.now() + linger_s
        link = self.peer.link
        if link is None and linger_s and self.peer.unsent:
            self._group.call_later(linger_s, self._finish)
        else:
            self._dialler.close()
            if link is not None:
                link.end(why, linger_s)
            else:
                self._finish()
        return None if self.ready else self._on_failed

    def _message(self, frames: list[bytes]) -> None:
        if self.peer.closed:
            return  # behind its BYE
        self.heard = self._answered = True
        self._received(self.peer, frames)

    def _up(self, link: Link) -> None:
        self.lost = self._answered = False
        self._group.call_later(self._silences.delay_s(), self._heed_silence, link)
        link.send_message([HI])
        self.peer.link_up(link)
        if self._closes_at is not None:  # only what was sent before kept it
            self._dialler.close()
            link.end("closed", self._closes_at - self._group.now())

    def _down(self, why: str) -> None:
        was_up, self.peer.link = self.peer.link is not None, None
        if self._closes_at is not None and (was_up or self._group.now() >= self._closes_at):
            self._finish()
        elif was_up:
            self.lost = True
            self._on_lost(self.peer, why)

    def _heed_silence(self, link: Link) -> None:
        if not (self._answered or self.peer.link is not link or self._closes_at is not None):
            self._silences.begin()
            link.cut()

    def _finish(self) -> None:
        self._dialler.close()
        self.peer.unsent = None
        self._on_over(self)
