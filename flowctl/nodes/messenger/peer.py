"""The other ends of a messenger: where it listens and connects, and each peer as it is reached through one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EADDRINUSE
from typing import Final, Protocol

from flowctl.core.flow.state import SendState
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outcomes.backoff import Backoff
from flowctl.core.sending.contract import SendOutcome
from flowctl.errors import BusyError, ClosedError, LocalProtocolError
from flowctl.nodes.messenger.arrivals import Arrivals
from flowctl.nodes.messenger.delivery import Delivery
from flowctl.nodes.messenger.message import To
from flowctl.nodes.messenger.wire import (
    ANNOUNCEMENT,
    EARLIER,
    Life,
    encode_announcement,
    encode_earlier,
    parse_announcement,
    parse_earlier,
)
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.wire.zmtp.dial import ZmtpDialler
from flowctl.wire.zmtp.frames import IDENTITY, SOCKET_TYPE
from flowctl.wire.zmtp.identity import IdentityHolder
from flowctl.wire.zmtp.inproc import SHARED_NAMES, Dial, DirectEnd
from flowctl.wire.zmtp.keys import KeyPair
from flowctl.wire.zmtp.link import Link, LinkOptions, ZmtpLink, why_cut
from flowctl.wire.zmtp.listen import ZmtpListener, bind_socket, check_dialler
from flowctl.wire.zmtp.mechanism import CurveClient, CurveServer, Mechanism, Null, Properties

_log: Final = logging.getLogger("flowctl.messenger")

_REDIAL_BACKOFF: Final = Backoff(first_s=0.05, most_s=0.5, jitter=0.5)
SILENCE_S: Final = 10.0
"""Time without a word of a listener that messages are sent to, after which the connection is made anew: another
messenger may have taken its identity before it was heard, so that neither end has noticed. The reason may be a slow
handler as well, so this is twice as long each time."""
_MOST_SILENCES: Final = 5
_ANNOUNCEMENT: Final = ANNOUNCEMENT.lower().encode()
_EARLIER: Final = EARLIER.lower().encode()


@dataclass(slots=True, eq=False)
class MessengerPeer:
    """One messenger at the other end of a connection, or one that came to a listener."""

    _due: Callable[[MessengerPeer, float], None]
    endpoint: MessengerSocket
    route: bytes  #: by which a listener knows it; of a connection empty
    delivery: Delivery  #: under the messenger's lock
    arrivals: Arrivals  #: the loop's thread only
    key: bytes = field(init=False)  #: as the store names it; the same in each life of this messenger
    to: To = field(init=False)
    envelope: list[bytes] = field(init=False)
    announced: int = 0  #: its incarnation; 0: it understands no extension, or has not said so yet
    holder: IdentityHolder = field(default_factory=IdentityHolder)  #: of its identity
    acks: list[tuple[int, int]] = field(default_factory=list)  #: to send in this turn: incarnation, id of the message
    unheard_since: float | None = None  #: when something was sent to it first after it was heard last
    silences: int = 0  #: times that this lasted too long since
    handling_count: int = 0  #: coroutines of handlers that run for its messages
    handling_bytes: int = 0
    echo_count: int = 0  #: unacknowledged echoes that it has asked for
    pubkey: bytes = b""  #: public key that it came with first; empty: not known, or it has none
    awaited: Link | None = None  #: it is sent to again when what waits in this connection has gone
    queued: bool = False  #: in the list of peers to send to; under the messenger's lock
    releasing: bool = False  #: messages that waited for another are being handled
    timer_at: float | None = None  #: when it looks after its messages next; None: never

    def __post_init__(self) -> None:
        endpoint = self.endpoint
        self.key = endpoint.key_of(self.route)
        self.to = (endpoint.number, self.route) if endpoint.is_router else endpoint.number
        self.envelope = [endpoint.identity, b""] if endpoint.is_router else [b""]

    @property
    def link(self) -> Link | None:
        """The way to it; None: there is none at present."""
        return self.endpoint.link_to(self.route)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message; False: there is no connection, or too much waits for it."""
        link = self.link
        if link is None:
            return False
        result = link.send_message([*self.envelope, *frames])
        return result is None or result.outcome is SendOutcome.ACCEPTED

    def announcement(self) -> int:
        """Return the incarnation that it announced when it connected; 0: it announced none."""
        link = self.link
        return 0 if link is None else announced_by(link)

    def earlier(self) -> Mapping[int, int]:
        """Return what it says of its lives before (`Life.earlier`)."""
        link = self.link
        return {} if link is None else parse_earlier(link.said.get(_EARLIER, b"").decode("ascii", "replace"))

    def is_too_silent(self, now: float) -> bool:
        """Return whether to connect anew, since the listener says nothing; a raw peer need not say anything."""
        endpoint, since = self.endpoint, self.unheard_since
        may_be_silent = endpoint.is_router or endpoint.taken_over or self.delivery.announced is False
        if since is None or may_be_silent or now - since < SILENCE_S * 2 ** min(self.silences, _MOST_SILENCES):
            return False
        self.unheard_since, self.silences = None, self.silences + 1
        return not endpoint.address.startswith("inproc:")

    def deadline_due(self, now: float) -> None:
        self.timer_at = None
        self._due(self, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessengerConnection:
    """One peer of a messenger at one moment."""

    to: To  #: what names it
    address: str  #: of the peer; empty: it is not connected at present
    state: SendState  #: how much it can take: of its credit, not of its connection alone
    pending: int  #: messages that it has not acknowledged
    pending_bytes: int  #: bytes of them, with what each costs beside its own
    oldest_s: float  #: time for which the oldest of them waits, in seconds
    waiting_bytes: int  #: what waits for it in its connection, beyond what the system holds
    why: str  #: how it is with what is sent to it, in a line


def row_of(peer: MessengerPeer, lock: OwnedLock) -> MessengerConnection:
    """Return how it is with a peer; any thread, which does not hold the messenger's `lock`: Senders take their own."""
    link, delivery = peer.link, peer.delivery
    with lock:
        state = delivery.state
        pending_bytes, pending, age_ms = delivery.load(peer.endpoint.now())
    if link is not None:
        why = link.why()
    elif peer.endpoint.taken_over:
        why = "another messenger of this identity is connected there, and this one stays away"
    else:
        why = "not connected, it is dialled again" if not peer.endpoint.is_router else "not connected"
    if pending:
        oldest = f"the oldest for {age_ms / 1000:.1f} s"
        why += f"; {pending} messages of {pending_bytes} bytes are not acknowledged, {oldest}"
    return MessengerConnection(
        to=peer.to,
        address="" if link is None else link.address,
        state=state,
        pending=pending,
        pending_bytes=pending_bytes,
        oldest_s=age_ms / 1000,
        waiting_bytes=0 if link is None else link.waiting_bytes,
        why=why,
    )


class SocketOwner(Protocol):
    """What a socket tells its messenger, and asks it; on the group's thread."""

    def may_enter(self, endpoint: MessengerSocket, route: bytes, key: bytes) -> bool:
        """Return whether a connection may speak under an identity, as far as its key says."""

    def connected(self, endpoint: MessengerSocket, route: bytes) -> None:
        """Learn that there is a link to a peer, or to the listener."""

    def received(self, endpoint: MessengerSocket, route: bytes, frames: list[bytes]) -> None:
        """Take a message."""

    def refused(self) -> None:
        """Count a message of one that may not speak."""

    def admit(self, key: bytes) -> None:
        """Raise `RefusedError` where the holder of a key may not come in."""


@dataclass(eq=False)
class MessengerSocket:
    """A place where a messenger listens, or one connection of it."""

    number: int  #: of the listener, or of the connection
    identity: bytes  #: what a listener calls itself
    callback: Callable[..., object] | None  #: the server-loop callback
    is_router: bool = field(kw_only=True)
    namesakes: int = field(default=0, kw_only=True)  #: earlier listeners of the same identity
    peers: dict[bytes, MessengerPeer] = field(default_factory=dict)  #: by routing id; of a connection the one has b""
    address: str = ""  #: what it is bound or connected to
    taken_over: bool = False  #: another messenger of this identity is connected there, and this one stays away
    closed: bool = False
    own: dict[bytes, bytes] = field(init=False)  #: what it says of itself
    _group: PollGroup = field(init=False)
    _owner: SocketOwner = field(init=False)
    _within: dict[DirectEnd, None] = field(default_factory=dict)  # connections to this listener within the process
    _routes: dict[bytes, Link] = field(default_factory=dict)  # of a listener: the link of each identity
    _route_number: int = 0  # of the last that had none
    _listener: ZmtpListener | None = None
    _dialler: ZmtpDialler | None = None

    def now(self) -> float:
        """Return the time on the clock of deliveries, in seconds; any thread."""
        return self._group.now()

    def key_of(self, route: bytes) -> bytes:
        if self.is_router:
            return b"r%d.%d:%b%b" % (self.namesakes, len(self.identity), self.identity, route)
        return b"c" + self.address.encode()

    def link_to(self, route: bytes) -> Link | None:
        if self.is_router:
            return self._routes.get(route)
        return None if self._dialler is None else self._dialler.link

    def prepare(self, group: PollGroup, owner: SocketOwner, life: Life) -> None:
        """Before it listens or connects."""
        self._group, self._owner = group, owner
        kind, name = (b"ROUTER", b"") if self.is_router else (b"DEALER", self.identity)
        self.own = {SOCKET_TYPE: kind, IDENTITY: name, **said_of(life)}

    def bind(self, address: str, options: LinkOptions, keys: KeyPair | None) -> None:
        """Listen at `address`; TCP with port 0 or ``*`` gets a free one."""
        scheme, _, name = address.partition("://")
        try:
            if scheme == "inproc":
                SHARED_NAMES.bind(name, self._dialled_within)
                self.address = address
                return
            bound = bind_socket(address)
        except OSError as error:
            kind = BusyError if error.errno == EADDRINUSE else LocalProtocolError
            raise kind(f"cannot listen on {address}: {error.strerror}") from error
        self.address = bound.endpoint
        self._listener = ZmtpListener(self._group, bound, lambda: MessengerLink(self, self._owner, options, keys))

    def connect(self, address: str, options: LinkOptions, keys: KeyPair | None, pubkey: bytes) -> None:
        self.address = address

        def mechanism(own: Properties) -> Mechanism:
            return Null(own) if keys is None else CurveClient(own, keys.public, keys.secret, pubkey)

        self._dialler = ZmtpDialler(
            *(self._group, address, self.own, mechanism, options, SHARED_NAMES, _REDIAL_BACKOFF),
            message=lambda frames: self._owner.received(self, b"", frames),
            up=self._up,
            down=self._down,
        )
        self._dialler.dial()

    def stay_away(self) -> None:
        """Leave the listener to another messenger of this identity."""
        self.taken_over = True
        if self._dialler is not None:
            self._dialler.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End the connection; it is made anew."""
        link = self.link_to(b"")
        if link is not None:
            link.cut()

    def close(self) -> None:
        self.closed = True
        if self._dialler is not None:
            self._dialler.close()
            if self._dialler.link is not None:
                self._dialler.link.end("closed")
        elif self._listener is not None:
            self._listener.close()
            for link in list(self._listener.links):
                link.end("the messenger was stopped")
        else:
            SHARED_NAMES.unbind(self._name, self._dialled_within)
            for end in list(self._within):
                end.end("the messenger was stopped")

    # --- links ---------------------------------------------------------------------------------------------------

    def enter(self, link: Link) -> bytes | None:
        """Note a connection to this listener, and return its route. None: it may not speak under its identity."""
        route = link.said.get(IDENTITY.lower(), b"")
        if not route or route.startswith(b"\0"):  # those are ours to give
            self._route_number += 1
            route = b"\0" + self._route_number.to_bytes(8, "big")
        if not self._owner.may_enter(self, route, link.key):
            return None
        before = self._routes.get(route)
        self._routes[route] = link
        if before is not None and announced_by(before) == announced_by(link) != 0:
            before.end("it has connected again")
        self._owner.connected(self, route)
        return route

    def forget_link(self, link: ZmtpLink) -> None:
        if self._listener is not None:
            self._listener.links.discard(link)

    def leave(self, link: Link, route: bytes) -> None:
        if self._routes.get(route) is link:
            del self._routes[route]

    def take(self, link: Link, route: bytes | None, frames: list[bytes]) -> None:
        """Take a message of a connection to this listener.

        One that may not speak ends, and may come again. One whose identity another has taken is heard no more: a
        messenger's ends, so that it comes again, and is told; a raw peer would take over from its successor, and so on
        for ever.
        """
        if route is not None and self._routes.get(route) is link:
            self._owner.received(self, route, frames)
            return
        self._owner.refused()
        if route is None or announced_by(link):
            link.cut()
        else:
            link.hold("another connection has its identity")

    def _up(self, link: Link) -> None:
        if self._dialler is not None:
            self._dialler.redials.tries = 0
        self._owner.connected(self, b"")

    def _down(self, why: str) -> None:
        if why:
            _log.warning("the connection to %s is cut: %s", self.address, why)

    @property
    def _name(self) -> str:
        return self.address.partition("://")[2]

    def _dialled_within(self, dial: Dial) -> None:
        """Take one of this process that dials; any thread."""
        try:
            self._group.call_soon(self._accept_within, dial)
        except ClosedError:
            SHARED_NAMES.unbind(self._name, self._dialled_within)
            SHARED_NAMES.dial(self._name, dial)

    def _accept_within(self, dial: Dial) -> None:
        if self.closed:
            SHARED_NAMES.dial(self._name, dial)  # of the next that listens there
            return
        end = dial.accept(self._group, self.own)
        self._within[end] = None
        route = self.enter(end)
        end.message = lambda frames: self.take(end, route, frames)
        end.gone = lambda: self._leave_within(end, route)

    def _leave_within(self, end: DirectEnd, route: bytes | None) -> None:
        self._within.pop(end, None)
        if route is not None:
            self.leave(end, route)


class MessengerLink(ZmtpLink):
    """A connection that a peer has opened."""

    __slots__ = ("_endpoint", "_owner", "_route")

    def __init__(
        self, endpoint: MessengerSocket, owner: SocketOwner, options: LinkOptions, keys: KeyPair | None
    ) -> None:
        self._endpoint: Final = endpoint
        self._owner: Final = owner
        self._route: bytes | None = None
        own, admit = endpoint.own, self._admit
        super().__init__(
            options,
            Null(own, admit) if keys is None else CurveServer(own, keys.public, keys.secret, admit),
            self._message,
            self._known,
            self._ended,
        )

    def _admit(self, key: bytes, said: Properties) -> Properties:
        check_dialler(said)
        self._owner.admit(key)
        return {}

    def _known(self) -> None:
        self._route = self._endpoint.enter(self)

    def _message(self, frames: list[bytes]) -> None:
        self._endpoint.take(self, self._route, frames)

    def _ended(self, reason: CloseReason, details: str) -> None:
        why = why_cut(reason, details)
        if why:
            _log.warning("a connection of %s to %s is cut: %s", self.address, self._endpoint.address, why)
        self._endpoint.forget_link(self)
        if self._route is not None:
            self._endpoint.leave(self, self._route)


def announced_by(link: Link) -> int:
    """Return the incarnation that the other end of a link announced; 0: none."""
    return parse_announcement(link.said.get(_ANNOUNCEMENT, b"").decode("ascii", "replace")) or 0


def said_of(life: Life) -> dict[bytes, bytes]:
    """Return what a life says of itself in the handshake."""
    said = [encode_announcement(life.incarnation)] + ([encode_earlier(life.earlier)] if life.earlier else [])
    return {name: value for name, _, value in (item.partition(b":") for item in said)}
