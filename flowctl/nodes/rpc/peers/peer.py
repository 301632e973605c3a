"""The other end of a connection: how it is reached, what waits because of it, and what happens to it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

from flowctl.core.flow.state import SendState
from flowctl.core.outcomes.pending import Pending
from flowctl.core.sending.contract import SendResult
from flowctl.errors import ConfigError
from flowctl.nodes.rpc.access.access import PeerIdentity
from flowctl.nodes.rpc.streams import Credit
from flowctl.sender import DROPPED
from flowctl.wire.zmtp.identity import IdentityHolder
from flowctl.wire.zmtp.mechanism import SEALED_BYTES

if TYPE_CHECKING:
    from flowctl.wire.zmtp.link import Link

MOST_UNSENT_BYTES: Final = 16 << 20
"""Bytes that may wait for a peer that is not connected."""
UNSENT_BYTES: Final = 200
"""What a message that waits takes beside its octets."""

MAX_PART_BYTES: Final = 1 << 20
"""Size of one part of a message at most: a peer that sends more is disconnected, as by OxenMQ."""
MAX_MESSAGE_BYTES: Final = 16 << 20
"""Size of all parts of a message at most."""
MOST_FRAMES: Final = 1024
"""Most parts of a message that comes; one of more is thrown away, and counted."""

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
        return MAX_PART_BYTES - SEALED_BYTES if self.pubkey else MAX_PART_BYTES

    def __hash__(self) -> int:
        return hash(self.pubkey) if self.service_node else hash((self.id, self.route))


@dataclass(slots=True, eq=False)
class PendingCall:
    tag: bytes
    command: bytes
    settle: Callable[[bool, list[bytes]], object]
    item: Callable[[list[bytes]], bool] | None = None
    room: Credit | None = None  #: for items that are streamed to its handler; None: there are none
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
    identity: PeerIdentity
    link: Link | None = None  #: the way to it; None: there is none yet, or again
    closed: bool = False  #: nothing can be sent to it any more
    holder: IdentityHolder | None = None  #: of its routing id, one after the other
    calls: PendingCalls | None = None  #: our requests to it; None: there has been none
    #: What runs for it here and may be cancelled, by the tags of its requests.
    running: dict[object, Cancellable] = field(default_factory=dict)
    waiting_count: int = 0  #: coroutines that wait for it here, those of commands included
    waiting_bytes: int = 0  #: octets of the messages that those were given
    #: The newest of each key of what it may miss, which waits until it has read what was sent before.
    latest: dict[bytes, list[bytes]] = field(default_factory=dict)
    latest_bytes: int = 0
    unsent: deque[list[bytes]] | None = None  #: what waits until there is a link; None: nothing
    unsent_bytes: int = 0
    owed: list[Sequence[bytes]] = field(default_factory=list)  #: what must not be missing, and found no room
    most_unsent_bytes: int = MOST_UNSENT_BYTES
    number: int = field(default_factory=count(1).__next__)  #: no other peer of the process has it
    _turn: asyncio.Lock | None = None

    @property
    def turn(self) -> asyncio.Lock:
        """Whose turn it is to wait for it, of the streams to it."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        return self._turn

    def send(self, frames: Sequence[bytes], *, droppable: bool = False) -> SendResult | None:
        """Send a message; return what became of it. None: it is on its way with others, or waits for a link."""
        if self.link is not None:
            return self.link.send_message(frames, droppable=droppable)
        size_bytes = sum(map(len, frames)) + UNSENT_BYTES
        if droppable or self.unsent_bytes + size_bytes > self.most_unsent_bytes:
            return DROPPED[SendState.HARD_LIMIT]
        self.unsent = deque() if self.unsent is None else self.unsent
        self.unsent.append(list(frames))
        self.unsent_bytes += size_bytes
        return None

    def link_up(self, link: Link) -> None:
        """Have a link from now on, and send what has waited for it."""
        self.link = link
        unsent, self.unsent, self.unsent_bytes = self.unsent, None, 0
        for frames in unsent or ():
            link.send_message(frames)

    @property
    def queued_bytes(self) -> int:
        """What waits here for it."""
        return self.latest_bytes + (self.unsent_bytes if self.link is None else self.link.waiting_bytes)

    def keep_latest(self, key: bytes, frames: list[bytes]) -> bool:
        """Keep a message in place of an earlier one of its key; return whether there was one."""
        before = self.take_latest(key) if key in self.latest else None
        self.latest[key] = frames
        self.latest_bytes += sum(map(len, frames))
        return before is not None

    def take_latest(self, key: bytes) -> list[bytes]:
        frames = self.latest.pop(key)
        self.latest_bytes -= sum(map(len, frames))
        return frames

    @property
    def is_reading(self) -> bool:
        """Whether all that was sent is on its way, or there is no link."""
        return self.link is None or self.link.drained

    async def reads(self) -> None:
        """Wait until it is so; of many that wait one is woken, and the next where that one has sent nothing."""
        while self.link is not None and not self.link.drained:
            async with self.turn:
                await self._drained()

    async def _drained(self) -> None:
        if self.link is None or self.link.drained:
            return
        loop = asyncio.get_running_loop()
        taken = loop.create_future()
        self.link.when_drained(lambda _: loop.call_soon_threadsafe(_set, taken))
        await taken

    def is_awaited(self) -> bool:
        """Return whether it is to answer a request of ours, or we one of its."""
        return bool(self.calls) or bool(self.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcConnection:
    """One connection at one moment."""

    conn: ConnectionID  #: what names it
    address: str  #: of the peer; empty: it is not connected at present
    state: SendState  #: how much it can take
    waiting_bytes: int  #: what waits here for the peer, beyond what the system holds for it
    asked: int  #: requests of ours that it has not answered
    running: int  #: requests of its that run or wait here
    latest: int  #: keys whose newest message waits for it, see `RpcNode.publish`
    why: str  #: how it is with what is sent to it, in a line


def row_of(peer: RpcPeer) -> RpcConnection:
    """Return how it is with a connection; any thread."""
    link = peer.link
    return RpcConnection(
        conn=peer.conn,
        address="" if link is None else link.address,
        state=SendState.READY if link is None else link.state,
        waiting_bytes=peer.queued_bytes,
        asked=0 if peer.calls is None else len(peer.calls),
        running=len(peer.running),
        latest=len(peer.latest),
        why="not connected, it is dialled again" if link is None else link.why(),
    )


ENCRYPTED: Final = ConnectionID(0, pubkey=bytes(32))
"""Names no connection, but has the limits of one that is encrypted."""


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
