"""The other end of a connection: how it is reached, what waits because of it, and what happens to it."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from struct import Struct
from typing import Any, Final, Protocol

import zmq

from flowctl.core.outcomes.pending import Pending
from flowctl.errors import ConfigError
from flowctl.nodes.rpc.access.access import PeerIdentity
from flowctl.pollgroup import PollGroup
from flowctl.wire.zeromq.line import IdentityHolder
from flowctl.wire.zeromq.socket import ZmqSocket

LOOK_BYTES: Final = 1 << 20
"""Octets sent to a peer between two checks whether it reads: fewer mean more checks, of a microsecond or two."""
MOST_UNREAD_BYTES: Final = 16 << 20
"""Octets that may wait for one peer, beyond what the system holds for it."""

MAX_PART_BYTES: Final = 1 << 20
"""Size of one part of a message at most: a peer that sends more is disconnected, as by OxenMQ."""
CURVE_BYTES: Final = 33
"""Octets of a part that encryption adds: ``MESSAGE`` and its length, a nonce of 8, flags, an authenticator of 16."""

_EVENT: Final = Struct("=Hi")
_MONITORS: Final = count()

SERVICE_NODE: Final = -1
"""`ConnectionID.id` of a service node that is meant by its key, over any connection to it."""
SEND_KEEP_ALIVE_S: Final = 30.0
CONNECT_KEEP_ALIVE_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """By which connections a service node may be reached."""

    optional: bool = False
    incoming: bool = False
    outgoing: bool = False
    hint: str = ""  #: address to dial instead of looking it up; of no effect where there is a connection
    keep_alive_s: float = SEND_KEEP_ALIVE_S  #: how long one that we open is kept when nothing goes over it, or longer

    def __post_init__(self) -> None:
        if self.incoming and self.outgoing:
            raise ConfigError("a connection is incoming or outgoing, not both")
        if not self.keep_alive_s > 0:
            raise ConfigError(f"keep_alive_s is {self.keep_alive_s}, it must be more than 0")


ANY_WAY: Final = Reach()
"""Over an existing connection, or a new one."""


@dataclass(frozen=True, slots=True, eq=False)
class ConnectionID:
    """Names the other end of a connection; any thread may keep it and use it to send later.

    Two are equal if both name service nodes with the same key, or else if they are of one socket and route.

    Args:
        id: number of the socket in its node.
        route: of a connection that was accepted: its routing id. Empty where we dialled.
        pubkey: the key that the other end has proven, 32 octets; empty: none.
        service_node: whether it is meant as a service node, by its key.
        reach: by which connections, of a service node.
    """

    id: int
    route: bytes = b""
    pubkey: bytes = b""
    service_node: bool = False
    reach: Reach = ANY_WAY

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConnectionID):
            return NotImplemented
        if self.service_node and other.service_node:
            return self.pubkey == other.pubkey
        return (self.id, self.route, self.service_node) == (other.id, other.route, other.service_node)

    @property
    def most_part_bytes(self) -> int:
        """Octets that a part of a message to there may have; one that has more would cost the connection."""
        return MAX_PART_BYTES - CURVE_BYTES if self.pubkey else MAX_PART_BYTES

    def __hash__(self) -> int:
        return hash(self.pubkey) if self.service_node else hash((self.id, self.route))


@dataclass(slots=True, eq=False)
class PendingCall:
    tag: bytes
    command: bytes
    settle: Callable[[bool, list[bytes]], object]
    item: Callable[[list[bytes]], bool] | None = None
    peer: RpcPeer | None = None  #: who was asked: what follows goes there. None: not sent yet


class PendingCalls:
    """Requests of ours that wait for one peer: by tag and, oldest first, by command; for one thread.

    A node of OxenMQ that does not know a command says so without the tag, so such an answer is for the oldest request
    with that command. It may come for each of a hundred thousand, and for commands that nobody asked for: it is O(1).
    """

    __slots__ = ("_due", "_of_command", "_pending", "due_at")

    def __init__(self, due: Callable[[PendingCalls], None]) -> None:
        self._due: Final = due
        self._pending: Final[Pending[bytes, PendingCall]] = Pending()
        self._of_command: Final[dict[bytes, dict[bytes, None]]] = {}  # tags, oldest first; none empty
        #: When the group calls `deadline_due`; infinite: not at all.
        self.due_at = inf

    def deadline_due(self, now: float) -> None:
        self._due(self)

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, tag: bytes) -> bool:
        return tag in self._pending

    def add(self, tag: bytes, call: PendingCall, deadline: float) -> None:
        self._pending.add(tag, call, deadline)
        tags = self._of_command.get(call.command)
        if tags is None:
            self._of_command[call.command] = {tag: None}
        else:
            tags[tag] = None

    def get(self, tag: bytes) -> PendingCall | None:
        return self._pending.get(tag)

    def take(self, tag: bytes) -> PendingCall | None:
        """Remove and return a request; None: it is not here (any more)."""
        call = self._pending.take(tag)
        if call is not None:
            self._left(tag, call)
        return call

    def take_oldest(self, command: bytes) -> PendingCall | None:
        tags = self._of_command.get(command)
        return None if tags is None else self.take(next(iter(tags)))

    def take_due(self, now: float) -> list[PendingCall]:
        """Remove and return those whose deadline has passed, earliest first."""
        due = self._pending.take_due(now)
        for tag, call in due:
            self._left(tag, call)
        return [call for _, call in due]

    def take_all(self) -> list[PendingCall]:
        self._of_command.clear()
        return [call for _, call in self._pending.take_all()]

    def next_deadline(self) -> float | None:
        return self._pending.next_deadline()

    def _left(self, tag: bytes, call: PendingCall) -> None:
        tags = self._of_command[call.command]
        del tags[tag]
        if not tags:
            del self._of_command[call.command]


class Cancellable(Protocol):
    """A request of a peer that runs here."""

    def cancel(self) -> None: ...
    def add_credit(self, count: int) -> None: ...


@dataclass(slots=True, eq=False)
class RpcPeer:
    """The other end of one connection; all methods on the node's thread only."""

    conn: ConnectionID
    socket: ZmqSocket
    identity: PeerIdentity
    key: str | bytes = b""  #: the key under which its listener keeps it; for the listener only
    closed: bool = False  #: nothing can be sent to it any more
    descriptor: int = -1  #: descriptor of its connection; -1: there is none (inproc), or it is not known
    holder: IdentityHolder = field(default_factory=IdentityHolder)  #: of its routing id, one after the other
    calls: PendingCalls | None = None  #: our requests to it; None: there has been none
    #: What runs for it here and may be cancelled, by the tags of its requests.
    running: dict[object, Cancellable] = field(default_factory=dict)
    waiting_count: int = 0  #: coroutines that wait for it here, those of commands included
    waiting_bytes: int = 0  #: octets of the messages that those were given
    #: Whose turn it is to try again, of the streams to it that found too much waiting.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _unread_bytes: int = 0  #: sent since the system last took more

    def send(self, frames: Sequence[bytes]) -> None:
        self._unread_bytes += sum(map(len, frames))
        if self._unread_bytes > LOOK_BYTES:
            self._look()
        route = self.conn.route
        self.socket.send([route, *frames] if route else frames)

    def _look(self) -> None:
        """Check whether the peer reads.

        What waits for it at ZeroMQ is not told. But while the system takes more for its connection, nothing waits long:
        what counts is what was sent since that was last so.
        """
        if self.descriptor >= 0 and not takes_more(self.descriptor):
            if self._unread_bytes > MOST_UNREAD_BYTES:
                self._unread_bytes = MOST_UNREAD_BYTES
                raise zmq.Again
        else:
            self._unread_bytes = 0

    def is_awaited(self) -> bool:
        """Return whether it is to answer a request of ours, or we one of its."""
        return bool(self.calls) or bool(self.running)


def takes_more(descriptor: int) -> bool:
    """Return whether the system accepts more octets for a connection. A closed descriptor accepts anything."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


class SocketMonitor:
    """Reports the events of a socket, in their order; on the group's thread.

    ZeroMQ writes an event before anything that follows from it: before the number of a descriptor is free for another
    connection, the end of the one that had it can be read here.
    """

    def __init__(
        self, group: PollGroup, raw: zmq.Socket[bytes], happened: Callable[[int, int], object], events: int
    ) -> None:
        self._happened: Final = happened
        self._watched: Final = raw
        address = f"inproc://flowctl-monitor-{next(_MONITORS)}"
        raw.monitor(address, events)
        end: zmq.Socket[bytes] = raw.context.socket(zmq.PAIR)
        # No limit: ZeroMQ waits where the queue of events is full, and nothing of the whole context is read or written
        # meanwhile. A crowd that comes and goes while a handler holds up the loop would stop all others.
        end.set(zmq.RCVHWM, 0)
        end.connect(address)
        self._socket: Final = ZmqSocket(group, end, self._received)
        self._socket.start()

    def read_all(self) -> None:
        """Tell of all that has happened until now."""
        raw = self._socket.raw
        get: Callable[[int], Any] = raw.get
        while not self._socket.closed and get(zmq.EVENTS) & zmq.POLLIN:
            self._received(raw.recv_multipart(zmq.NOBLOCK))
        if not self._socket.closed:
            self._socket.look_for_messages()

    def close(self) -> None:
        if not self._socket.closed:
            self._watched.disable_monitor()
            self._socket.close()

    def _received(self, frames: list[bytes]) -> None:
        event, value = _EVENT.unpack(frames[0])
        self._happened(event, value)
