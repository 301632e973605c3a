"""What is known of every peer, and the changes of it (pure).

Theory of operation. A peer announces ids in an order, its *FIFO*; we acknowledge them in that order. An id of the FIFO
is *available* until we ask for the object; then it is *in flight*, and when the object came it is *on the way* to the
pool (owt) until the pool has taken or refused it. Available, in flight and on the way are disjoint. An id may leave the
FIFO while it is in flight: the pool got the object from another peer meanwhile, and an acknowledgement says only that
we need no more promises of it.

Each change checks everything first, so an error leaves the state as it was. A fault of the peer is an error of
`flowctl.nodes.diffusion.errors`; what its owner does wrong is a `LocalProtocolError`.

Beside the peers stands an index by object, kept with each change: who has it available, as one bit for each peer, and
how many copies are under way. With it a round of decisions costs what there is to decide, not peers times objects.

An object that comes late, after it was freed for another peer, is welcome all the same: it was asked for, so it goes to
the pool as any other, and that its peer was late is remembered as *penalty*, which time takes off again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from flowctl.errors import LimitExceededError, LocalProtocolError
from flowctl.nodes.diffusion.errors import (
    ObjectIdAlreadyKnownError,
    ObjectIdsNotRequestedError,
    ObjectMissingError,
    ObjectNotRequestedError,
    ObjectSizeWrongError,
)
from flowctl.nodes.diffusion.objects import HasObject, ObjectId, PeerId, short_id
from flowctl.nodes.diffusion.policy import Policy

_PENALTY_PER_S: Final = 0.1  # taken off each second, as the score of Cardano's TxSubmission V2
_PENALTY_MOST: Final = 60.0  # ten minutes of good behaviour make up for any past


class Inflight(NamedTuple):
    """An object that was asked for."""

    size_bytes: int  #: as announced, or what is kept free for an object of unknown size
    since: float  #: when it was asked for, in seconds on the caller's clock
    exact: bool = True  #: the size was announced, so the object must have it; False: it may be smaller


@dataclass(slots=True, eq=False, kw_only=True)
class PeerState:
    """What is known of one peer. Everybody may read; only `DecisionGlobalState` writes."""

    fifo: dict[ObjectId, None] = field(default_factory=dict)  #: ids announced and not acknowledged, in order (the keys)
    #: those of them that can be asked for, with the sizes announced; None: none was
    available: dict[ObjectId, int | None] = field(default_factory=dict)
    ids_in_flight: int = 0  #: ids asked for in requests that have no reply yet
    #: objects asked for and not received, the oldest first
    inflight: dict[ObjectId, Inflight] = field(default_factory=dict)
    owt: dict[ObjectId, bytes] = field(default_factory=dict)  #: objects received and on the way to the pool
    slot: int = field(default=-1, init=False)  #: the peer's bit in the index by object, as a number
    inflight_bytes: int = field(default=0, init=False)
    owt_bytes: int = field(default=0, init=False)
    penalty: float = field(default=0.0, init=False)  #: replies that came late, as of `penalty_at`; see `penalty_now`
    penalty_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.inflight_bytes = sum(item.size_bytes for item in self.inflight.values())
        self.owt_bytes = sum(map(len, self.owt.values()))

    def ackable(self, has_object: HasObject) -> int:
        """Return how many ids may be acknowledged: the longest prefix of the FIFO that is in the pool or on its way."""
        owt = self.owt
        needs_no_more = (lambda object_id: object_id in owt or has_object(object_id)) if owt else has_object
        return len(list(itertools.takewhile(needs_no_more, self.fifo)))

    def overdue(self, before: float) -> list[ObjectId]:
        ids = []
        for object_id, item in self.inflight.items():
            if item.since > before:
                break
            ids.append(object_id)
        return ids

    def penalty_now(self, now: float) -> float:
        """Return how late the peer has been of late: 0 for one that is on time, up to 60."""
        return max(0.0, self.penalty - (now - self.penalty_at) * _PENALTY_PER_S) if self.penalty else 0.0


@dataclass(slots=True, eq=False)
class KnownObject:
    """One object in the index."""

    since: float  #: when it was first announced, in seconds
    providers: int = 0  #: bit n is set when the peer of slot n has it available
    copies: int = 0  #: peers that it is in flight from, or that have it on the way to the pool


class DecisionGlobalState:
    """All peers, and the index by object."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.peers: dict[PeerId, PeerState] = {}
        self.objects: dict[ObjectId, KnownObject] = {}  #: what the peers have, by id; read only
        self.by_slot: list[PeerId | None] = []  #: the peer of each slot; None for a free one
        self.inflight_count = 0  #: objects in flight of all peers
        self.held_bytes = 0  #: octets in flight and on the way to the pool, of all peers
        self._free_slots: list[int] = []

    def register(self, peer: PeerId, state: PeerState | None = None, *, now: float = 0.0) -> PeerState:
        if peer in self.peers:
            raise LocalProtocolError(f"peer {peer!r} is registered already")
        state = PeerState() if state is None else state
        if self._free_slots:
            state.slot = heapq.heappop(self._free_slots)
            self.by_slot[state.slot] = peer
        else:
            state.slot = len(self.by_slot)
            self.by_slot.append(peer)
        self.peers[peer] = state
        for object_id in state.available:
            self._known(object_id, now).providers |= 1 << state.slot
        for object_id in itertools.chain(state.inflight, state.owt):
            self._known(object_id, now).copies += 1
        self.inflight_count += len(state.inflight)
        self.held_bytes += state.inflight_bytes + state.owt_bytes
        return state

    def unregister(self, peer: PeerId) -> None:
        """Forget a peer and all that it has under way, so that others are asked for it. One not entered: no effect."""
        state = self.peers.pop(peer, None)
        if state is None:
            return
        self.by_slot[state.slot] = None
        heapq.heappush(self._free_slots, state.slot)
        for object_id in state.available:
            self._unavailable(object_id, state.slot)
        for object_id in itertools.chain(state.inflight, state.owt):
            self._copy_gone(object_id)
        self.inflight_count -= len(state.inflight)
        self.held_bytes -= state.inflight_bytes + state.owt_bytes

    def on_request_ids(self, peer: PeerId, ack: int, req: int) -> None:
        state = self._state(peer)
        if ack < 0 or req < 0 or ack + req < 1:
            raise LocalProtocolError(f"a request for ids acknowledges {ack} and asks for {req}")
        if ack > len(state.fifo):
            raise LocalProtocolError(f"{ack} ids are acknowledged, {len(state.fifo)} are open")
        outstanding = len(state.fifo) - ack + state.ids_in_flight + req
        if req and outstanding > self.policy.max_num_objects_outstanding:
            raise LocalProtocolError(
                f"{outstanding} ids would be outstanding, max_num_objects_outstanding is "
                f"{self.policy.max_num_objects_outstanding}"
            )
        for object_id in list(itertools.islice(state.fifo, ack)):
            del state.fifo[object_id]
            if object_id in state.available:
                del state.available[object_id]
                self._unavailable(object_id, state.slot)
        state.ids_in_flight += req

    def on_receive_ids(
        self, peer: PeerId, requested: int, announced: Sequence[tuple[ObjectId, int | None]], *, now: float = 0.0
    ) -> None:
        """The reply to a request for ids came: they join the FIFO and are available.

        An id that the pool has is accepted as any other: it is never asked for, and acknowledged in its turn.
        """
        state = self._state(peer)
        if not 0 <= requested <= state.ids_in_flight:
            raise LocalProtocolError(f"a reply to a request for {requested} ids, {state.ids_in_flight} are in flight")
        if len(announced) > requested:
            raise ObjectIdsNotRequestedError(len(announced), requested)
        new: dict[ObjectId, int | None] = {}
        for object_id, size_bytes in announced:
            if not 1 <= len(object_id) <= self.policy.max_object_id_bytes:
                raise LimitExceededError("max_object_id_bytes", len(object_id), self.policy.max_object_id_bytes)
            if size_bytes is not None:
                self._check_size(size_bytes)
            if object_id in new or object_id in state.fifo or object_id in state.inflight or object_id in state.owt:
                raise ObjectIdAlreadyKnownError(object_id)
            new[object_id] = size_bytes
        state.ids_in_flight -= requested
        state.fifo |= dict.fromkeys(new)
        state.available |= new
        bit = 1 << state.slot
        for object_id in new:
            self._known(object_id, now).providers |= bit

    def on_request_objects(self, peer: PeerId, object_ids: Iterable[ObjectId], *, now: float = 0.0) -> None:
        state = self._state(peer)
        wanted: dict[ObjectId, Inflight] = {}
        for object_id in object_ids:
            if object_id not in state.available or object_id in wanted:
                raise LocalProtocolError(f"object {short_id(object_id)} is not available, or named twice")
            size_bytes = state.available[object_id]
            wanted[object_id] = Inflight(self.policy.room_for(size_bytes), now, exact=size_bytes is not None)
        if not wanted:
            raise LocalProtocolError("a request for objects names none")
        if len(state.inflight) + len(wanted) > self.policy.max_num_objects_inflight_per_peer:
            raise LocalProtocolError(
                f"{len(state.inflight) + len(wanted)} objects would be in flight, "
                f"max_num_objects_inflight_per_peer is {self.policy.max_num_objects_inflight_per_peer}"
            )
        size = sum(item.size_bytes for item in wanted.values())
        held = state.inflight_bytes + state.owt_bytes + size
        if held > self.policy.max_bytes_inflight_per_peer:
            raise LocalProtocolError(
                f"{held} bytes would be in flight, max_bytes_inflight_per_peer is "
                f"{self.policy.max_bytes_inflight_per_peer}"
            )
        bit = 1 << state.slot
        for object_id in wanted:
            del state.available[object_id]
            known = self.objects[object_id]
            known.providers &= ~bit
            known.copies += 1
        state.inflight |= wanted
        state.inflight_bytes += size
        self.inflight_count += len(wanted)
        self.held_bytes += size

    def on_receive_objects(
        self,
        peer: PeerId,
        requested: Iterable[ObjectId],
        objects: Sequence[tuple[ObjectId, bytes]],
        *,
        now: float = 0.0,
    ) -> None:
        """The reply to a request for objects came: they are in flight no longer, but on the way to the pool."""
        state = self._state(peer)
        wanted = dict.fromkeys(requested)
        for object_id in wanted:
            if object_id not in state.inflight:
                raise LocalProtocolError(f"object {short_id(object_id)} is not in flight")
        came: dict[ObjectId, bytes] = {}
        for object_id, data in objects:
            if object_id not in wanted or object_id in came:
                raise ObjectNotRequestedError(object_id)
            item = state.inflight[object_id]
            if item.exact and len(data) != item.size_bytes:
                raise ObjectSizeWrongError(object_id, len(data), item.size_bytes)
            self._check_size(len(data))
            came[object_id] = data
        for object_id in wanted:
            if object_id not in came:
                raise ObjectMissingError(object_id)
        timeout_s = self.policy.inflight_timeout_s
        late = False
        for object_id in wanted:
            item = state.inflight.pop(object_id)
            state.inflight_bytes -= item.size_bytes
            state.owt_bytes += len(came[object_id])
            self.held_bytes += len(came[object_id]) - item.size_bytes
            late = late or (timeout_s > 0 and now - item.since >= timeout_s)
        state.owt |= came
        self.inflight_count -= len(wanted)
        if late:
            # One for the reply, not one for each object: those asked for together are late together.
            state.penalty = min(_PENALTY_MOST, state.penalty_now(now) + 1)
            state.penalty_at = now

    def on_leave(self, peer: PeerId) -> None:
        """What is in flight from a peer will be ignored when it comes, so others may be asked for it.

        A peer that is gone is passed over.
        """
        state = self.peers.get(peer)
        if state is None:
            return
        for object_id in state.inflight:
            self._copy_gone(object_id)
        self.inflight_count -= len(state.inflight)
        self.held_bytes -= state.inflight_bytes
        state.inflight.clear()
        state.inflight_bytes = 0

    def on_pool_done(self, peer: PeerId, object_ids: Iterable[ObjectId]) -> None:
        """The pool has taken these objects of a peer, or refused them: they are on the way no longer.

        A peer that is gone, or an object that is not on the way, is passed over: the pool may take longer than the
        connection lasts.
        """
        state = self.peers.get(peer)
        if state is None:
            return
        for object_id in object_ids:
            data = state.owt.pop(object_id, None)
            if data is not None:
                state.owt_bytes -= len(data)
                self.held_bytes -= len(data)
                self._copy_gone(object_id)

    def next_timeout(self, now: float, timeout_s: float | None = None) -> float | None:
        """Return when the next object in flight is freed for another peer, in seconds; None: nothing is waited for.

        A round of decisions is due then, even if nothing else happens.
        """
        timeout_s = self.policy.inflight_timeout_s if timeout_s is None else timeout_s
        if not timeout_s:
            return None
        waiting = (
            next((item.since for item in state.inflight.values() if item.since > now - timeout_s), None)
            for state in self.peers.values()
        )
        return min((since + timeout_s for since in waiting if since is not None), default=None)

    def _state(self, peer: PeerId) -> PeerState:
        state = self.peers.get(peer)
        if state is None:
            raise LocalProtocolError(f"peer {peer!r} is not registered")
        return state

    def _check_size(self, size_bytes: int) -> None:
        if not 0 <= size_bytes <= self.policy.max_object_size_bytes:
            raise LimitExceededError("max_object_size_bytes", size_bytes, self.policy.max_object_size_bytes)

    def _known(self, object_id: ObjectId, now: float) -> KnownObject:
        entry = self.objects.get(object_id)
        if entry is None:
            entry = self.objects[object_id] = KnownObject(now)
        return entry

    def _unavailable(self, object_id: ObjectId, slot: int) -> None:
        entry = self.objects[object_id]
        entry.providers &= ~(1 << slot)
        if not (entry.providers or entry.copies):
            del self.objects[object_id]

    def _copy_gone(self, object_id: ObjectId) -> None:
        entry = self.objects[object_id]
        entry.copies -= 1
        if not (entry.providers or entry.copies):
            del self.objects[object_id]
