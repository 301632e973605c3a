"""The other ends of a messenger: its sockets, and each peer as it is reached through one of them."""

from __future__ import annotations

import socket as sockets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Final

import zmq

from flowctl.errors import BusyError, LocalProtocolError
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
from flowctl.wire.zeromq.line import METADATA_OPTION, PeerLine
from flowctl.wire.zeromq.socket import ZmqSocket, notice_dead_peers
from flowctl.wire.zmtp.identity import IdentityHolder

_INPROC: Final[dict[tuple[int, str], Life]] = {}
"""Life of each listener of this process, by context and endpoint: within a process no handshake could say it."""
_INPROC_DIALLED: Final[dict[tuple[int, str, bytes], Life]] = {}
"""Life of each messenger that has connected within this process; the identity is part of the key."""

_RECONNECT_MS: Final = 50
"""Pause of ZeroMQ before it connects again; it doubles up to `_RECONNECT_MOST_MS`."""
_RECONNECT_MOST_MS: Final = 2000
SILENCE_S: Final = 10.0
"""Time without a word of a listener that messages are sent to, after which the connection is made anew: another
messenger may have taken its identity before it was heard, so that neither end has noticed. The reason may be a slow
handler as well, so this is twice as long each time."""
_MOST_SILENCES: Final = 5
DIAL_AGAIN_S: Final = 0.25
_DEAD_AFTER_S: Final = 10
"""Time without an answer of its system after which a peer counts as gone."""


@dataclass(slots=True, eq=False)
class MessengerPeer:
    """One messenger at the other end of a connection, or one that came to a listener."""

    _due: Callable[[MessengerPeer, float], None]
    endpoint: MessengerSocket
    route: InitVar[bytes]
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
    pubkey: str = ""  #: public key that it came with first, hex, as ZeroMQ has it; "": not known, or it has none
    queued: bool = False  #: in the list of peers to send to; under the messenger's lock
    releasing: bool = False  #: messages that waited for another are being handled
    timer_at: float | None = None  #: when it looks after its messages next; None: never

    def __post_init__(self, route: bytes) -> None:
        endpoint = self.endpoint
        self.key = endpoint.key_of(route)
        self.to = (endpoint.number, route) if endpoint.is_router else endpoint.number
        self.envelope = [route, endpoint.identity, b""] if endpoint.is_router else [b""]

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


@dataclass(eq=False)
class MessengerSocket:
    """A socket of a messenger: a ROUTER that listens, or the DEALER of one connection."""

    number: int  #: of the listener, or of the connection
    identity: bytes  #: what a listener calls itself
    callback: Callable[..., object] | None  #: the server-loop callback
    is_router: bool = field(kw_only=True)
    namesakes: int = field(default=0, kw_only=True)  #: earlier listeners of the same identity
    peers: dict[bytes, MessengerPeer] = field(default_factory=dict)  #: by routing id; of a DEALER the one peer has b""
    address: str = ""  #: what it is bound or connected to
    taken_over: bool = False  #: another messenger of this identity is connected there, and this one stays away
    takes_over: bool = (
        False  #: another one of this process was connected so, and was not closed; its connection has ended
    )
    socket: ZmqSocket = field(init=False)
    _context_id: int = 0
    _file: Path | None = None

    def key_of(self, route: bytes) -> bytes:
        if self.is_router:
            return b"r%d.%d:%b%b" % (self.namesakes, len(self.identity), self.identity, route)
        return b"c" + self.address.encode()

    def bind(self, raw: zmq.Socket[bytes], address: str, life: Life) -> None:
        """Bind to `address`; TCP with port 0 or ``*`` gets a free one."""
        raw.set(zmq.IPV6, "[" in address)
        raw.set(zmq.ROUTER_MANDATORY, 1)
        raw.set(zmq.ROUTER_HANDOVER, 1)  # a peer that was cut off comes back before its end is noticed
        scheme, _, name = address.partition("://")
        if scheme == "ipc":
            remove_stale(Path(name))
        try:
            raw.bind(address)
        except zmq.ZMQError as error:
            kind = BusyError if error.errno == zmq.EADDRINUSE else LocalProtocolError
            raise kind(f"cannot listen on {address}: {error.strerror}") from error
        self.address = raw.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if scheme == "ipc":
            self._file = Path(name)
        elif scheme == "inproc":
            self._context_id = id(raw.context)
            _INPROC[self._context_id, self.address] = life

    def connect(self, raw: zmq.Socket[bytes], address: str, life: Life) -> None:
        raw.set(zmq.ROUTING_ID, self.identity)
        raw.set(zmq.IPV6, "[" in address)
        raw.set(zmq.IMMEDIATE, 1)  # messages wait with us, not in a queue that is lost with its connection
        raw.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        raw.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS)
        try:
            raw.connect(address)
        except zmq.ZMQError as error:
            raise LocalProtocolError(f"cannot connect to {address}: {error.strerror}") from error
        self.address = address
        self._context_id = id(raw.context)
        if address.startswith("inproc:"):
            before = _INPROC_DIALLED.get((self._context_id, address, self.identity), life)
            _INPROC_DIALLED[self._context_id, address, self.identity] = life
            self.takes_over = before.incarnation != life.incarnation

    def show_itself(self, *, understood: bool) -> None:
        """Have each further connection say that it is there, if the listener understands that."""
        self.socket.raw.set(zmq.PROBE_ROUTER, understood)

    def dial_again(self) -> None:
        if not (self.socket.closed or self.taken_over):
            self.socket.raw.connect(self.address)
            self.socket.look_for_messages()

    def stay_away(self) -> None:
        """Leave the listener to another messenger of this identity."""
        self.taken_over = True
        self.hang_up()

    def hang_up(self) -> None:
        with suppress(zmq.ZMQError):
            self.socket.raw.disconnect(self.address)
        self.socket.look_for_messages()

    def announced_within(self) -> int:
        """Return the incarnation of the listener of this process that this DEALER is connected to; 0: none is known."""
        life = None if self.is_router else _INPROC.get((self._context_id, self.address))
        return 0 if life is None else life.incarnation

    def left_over(self) -> bool:
        """Return whether the present message, of a route that begins with NUL, is of a connection that has a successor.

        ZeroMQ gives a route of chance to a peer that has no identity, but also to a connection whose identity another
        one has taken: what was not read of it yet then seems to come from somebody new, and would be applied again
        when its sender tries again. The handshake still says what it called itself. A messenger comes again, and then
        it is told; a raw peer would take over from its successor, and so on for ever.
        """
        frame = self.socket.frame
        try:
            if frame is None or not frame.get("Identity"):
                return False
        except zmq.ZMQError:  # it had no handshake: it is in this process
            return False
        line = PeerLine.of(frame, self.address) if self.announcement(b"") else None
        if line is not None:
            line.cut()
        return True

    def sender_pubkey(self) -> str:
        """Return the public key that the connection of the present message has proven to hold, hex; "": it has none."""
        frame = self.socket.frame
        try:
            return "" if frame is None else str(frame.get("User-Id"))
        except zmq.ZMQError:  # it is in this process
            return ""

    def announcement(self, route: bytes) -> int | None:
        """Return the incarnation that the sender of the present message, which came by `route`, announced."""
        frame = self.socket.frame
        if frame is None:
            return None
        try:
            return parse_announcement(str(frame.get(ANNOUNCEMENT))) or 0
        except zmq.ZMQError:
            try:
                frame.get("Socket-Type")
            except zmq.ZMQError:
                life = self._life_within(route)
                return None if life is None else life.incarnation
            return 0

    def earlier(self, route: bytes, incarnation: int) -> Mapping[int, int]:
        """Return what the sender of the present message says of the lives before `incarnation` (`Life.earlier`)."""
        frame = self.socket.frame
        try:
            return {} if frame is None else parse_earlier(str(frame.get(EARLIER)))
        except zmq.ZMQError:  # it named none, or is in this process
            life = self._life_within(route)
            return {} if life is None or life.incarnation != incarnation else life.earlier

    def _life_within(self, route: bytes) -> Life | None:
        """Return the life of a peer in this process. None: there is none, or it is elsewhere."""
        if self.is_router:
            return _INPROC_DIALLED.get((self._context_id, self.address, route))
        return _INPROC.get((self._context_id, self.address))

    def close(self) -> None:
        if self.is_router:
            if _INPROC.pop((self._context_id, self.address), None) is not None:
                with suppress(zmq.ZMQError):
                    self.socket.raw.unbind(self.address)  # closing frees the name some time later
        else:
            _INPROC_DIALLED.pop((self._context_id, self.address, self.identity), None)
        self.socket.close()
        if self._file is not None:
            with suppress(OSError):  # ZeroMQ removes it too
                self._file.unlink()


def prepare(raw: zmq.Socket[bytes], life: Life, queue_count: int, max_message_bytes: int) -> None:
    raw.set(zmq.LINGER, 0)
    raw.set(zmq.SNDHWM, queue_count)
    raw.set(zmq.RCVHWM, queue_count)
    raw.set(zmq.MAXMSGSIZE, max_message_bytes)
    notice_dead_peers(raw, _DEAD_AFTER_S)
    with suppress(zmq.ZMQError):  # a libzmq without it: peers are talked to as if they knew no extension
        raw.setsockopt(METADATA_OPTION, encode_announcement(life.incarnation))
        if life.earlier:
            raw.setsockopt(METADATA_OPTION, encode_earlier(life.earlier))


def remove_stale(path: Path) -> None:
    """Remove the file of a listener that is gone."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise LocalProtocolError(f"{path} is there and is no socket", hint="give another path")
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise BusyError(f"{path} cannot be listened on: {error.strerror or error}") from error
    raise BusyError(f"somebody listens on {path}")
