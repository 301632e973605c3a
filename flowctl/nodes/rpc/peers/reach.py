"""How a service node is reached: over a connection that is there, or a new one; and when ours to it end.

A service node is meant by its key, whichever side dialled. What there is is used: connections that it opened, then the
one that we opened. Else, unless told otherwise, it is looked up and dialled. A connection that we opened so ends when
nothing has gone over it for as long as it was to be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Generic, Protocol, TypeVar

from flowctl.errors import ConfigError

SEND_KEEP_ALIVE_S: Final = 30.0
CONNECT_KEEP_ALIVE_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """By which connections a service node may be reached.

    Args:
        hint: address to dial instead of looking it up; of no effect where there is a connection.
        keep_alive_s: how long one that we open is kept when nothing goes over it; one that is there is kept for at
            least as long, never shorter.
    """

    optional: bool = False
    incoming: bool = False
    outgoing: bool = False
    hint: str = ""
    keep_alive_s: float = SEND_KEEP_ALIVE_S

    def __post_init__(self) -> None:
        if self.incoming and self.outgoing:
            raise ConfigError("a connection is incoming or outgoing, not both")
        if not self.keep_alive_s > 0:
            raise ConfigError(f"keep_alive_s is {self.keep_alive_s}, it must be more than 0")


ANY_WAY: Final = Reach()
"""Over what there is, or a new connection."""


class Reached(Protocol):
    """What is asked of a connection that we opened."""

    def is_awaited(self) -> bool:
        """Return whether something is to come over it."""


P = TypeVar("P", bound=Reached)


@dataclass(slots=True, eq=False)
class _Kept(Generic[P]):
    peer: P
    keep_alive_s: float
    active_at: float


class OutgoingConnections(Generic[P]):
    """Connections that we opened to service nodes, one to each (pure); for one thread."""

    __slots__ = ("_dial", "_incoming", "_kept", "_lookup")

    def __init__(
        self,
        incoming: Callable[[bytes], P | None],
        lookup: Callable[[bytes], str],
        dial: Callable[[bytes, str], P | None],
    ) -> None:
        self._incoming: Final = incoming
        self._lookup: Final = lookup
        self._dial: Final = dial
        self._kept: dict[bytes, _Kept[P]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, pubkey: bytes, reach: Reach, now: float) -> P | None:
        """Return a connection to the node with that key, a new one if need be. None: there is none, and cannot be."""
        if not reach.outgoing:
            peer = self._incoming(pubkey)
            if peer is not None:
                return peer
        kept = None if reach.incoming else self._kept.get(pubkey)
        if kept is not None:
            kept.keep_alive_s = max(kept.keep_alive_s, reach.keep_alive_s)
            kept.active_at = now
            return kept.peer
        if reach.optional or reach.incoming:
            return None
        address = reach.hint or self._lookup(pubkey)
        peer = self._dial(pubkey, address) if address else None
        if peer is not None:
            self._kept[pubkey] = _Kept(peer, reach.keep_alive_s, now)
        return peer

    def get(self, pubkey: bytes) -> P | None:
        """Return the connection that we opened to the node with that key; None: there is none."""
        kept = self._kept.get(pubkey)
        return None if kept is None else kept.peer

    def active(self, pubkey: bytes, now: float) -> None:
        """Note that something came over the connection that we opened to the node with that key."""
        kept = self._kept.get(pubkey)
        if kept is not None:
            kept.active_at = now

    def forget(self, pubkey: bytes, peer: P) -> None:
        """Drop a connection that has ended."""
        kept = self._kept.get(pubkey)
        if kept is not None and kept.peer is peer:
            del self._kept[pubkey]

    def take_idle(self, now: float) -> list[P]:
        """Remove and return those over which nothing has gone for as long as they were to be kept, and will come."""
        idle = [
            (pubkey, kept.peer)
            for pubkey, kept in self._kept.items()
            if now - kept.active_at >= kept.keep_alive_s and not kept.peer.is_awaited()
        ]
        for pubkey, _ in idle:
            del self._kept[pubkey]
        return [peer for _, peer in idle]

    def take(self, pubkeys: frozenset[bytes]) -> list[P]:
        """Remove and return those to the nodes with these keys."""
        return [self._kept.pop(pubkey).peer for pubkey in pubkeys & self._kept.keys()]

    def next_idle(self) -> float:
        """Return when `take_idle` may next have something, on the caller's clock; infinite: never."""
        return min((kept.active_at + kept.keep_alive_s for kept in self._kept.values()), default=inf)
