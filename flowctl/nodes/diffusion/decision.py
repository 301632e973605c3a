"""Decisions: what each peer is to ask for next (pure).

Theory of operation. `make_decisions` reads the state and writes nothing; what it decides about ids, and in which order
it gives objects to peers, is in docs/diffusion.md. Copies under way are those in flight or on the way to the pool, and
those that busy peers have decided to ask for. An object in flight for longer than the timeout is neither a copy any
more, nor counted in the total; it still counts for the limits of its own peer, which gets less work for being slow.

Order is kept: where an object does not fit into the octets left for a peer, that peer gets nothing after it in this
round, and where the total does not have the room, the round ends. Large objects would otherwise wait for ever behind
small ones.

Sets of peers are integers with a bit for each peer, so that "who has it, has room and the least to do" is a few
operations for 1000 peers.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol, TypeAlias

from flowctl.errors import InternalError
from flowctl.nodes.diffusion.objects import HasObject, ObjectId, PeerId
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.state import DecisionGlobalState, PeerState

_LOAD_OF_LAST: Final = 1 << 32
"""Load added to a peer that is asked last: more than any count of objects in flight."""
_LATE_PENALTY: Final = 1.0
"""Penalty from which on a peer is asked last: one reply that came late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDecision:
    """What one peer is to do next, in this order: ask for objects, then acknowledge ids and ask for more."""

    ids_to_req: int = 0  #: ids to ask for; 0: no request for ids is sent, and nothing is acknowledged
    ids_to_ack: int = 0
    can_pipeline_ids_req: bool = False  #: some ids stay unacknowledged, so the request must not block; False: it must
    objects_to_req_ids: frozenset[ObjectId] = frozenset()

    @property
    def is_empty(self) -> bool:
        return not (self.ids_to_req or self.objects_to_req_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionContext:
    """All that a round of decisions depends on; the same context gives the same decisions."""

    state: DecisionGlobalState  #: the peers; it is read and never written
    has_object: HasObject
    #: peers that have read a decision and not completed it, with that decision. They get none, and what they decided
    #: counts as done.
    busy: Mapping[PeerId, PeerDecision] = field(default_factory=dict)
    #: peers that are asked only for what no other peer has: ejected for their failures, say
    last: Collection[PeerId] = ()
    now: float = 0.0
    seed: int = 0  #: seed of the choice between equal providers; another one each round
    #: in place of the policy's, where it is known what requests take. None: the policy's.
    inflight_timeout_s: float | None = None

    @property
    def policy(self) -> Policy:
        return self.state.policy

    @property
    def timeout_s(self) -> float:
        return self.policy.inflight_timeout_s if self.inflight_timeout_s is None else self.inflight_timeout_s

    def overdue(self, state: PeerState) -> list[ObjectId]:
        timeout_s = self.timeout_s
        return state.overdue(self.now - timeout_s) if timeout_s else []

    def is_last(self, peer: PeerId, state: PeerState) -> bool:
        """Return whether a peer is asked last: it is in `last`, has overdue objects, or was late lately."""
        return peer in self.last or state.penalty_now(self.now) >= _LATE_PENALTY or bool(self.overdue(state))


Decisions: TypeAlias = dict[PeerId, PeerDecision]
"""A decision for each peer that is not busy."""


class Planner(Protocol):
    """Makes decisions, within all limits and without changing anything."""

    def decide(self, context: DecisionContext) -> Decisions:
        """Return a decision for each peer that is not busy."""

    def next_round_at(self, context: DecisionContext) -> float | None:
        """Return when a round is due although nothing happens, in seconds; None: at no time."""


class CentralPlanner:
    def decide(self, context: DecisionContext) -> Decisions:
        return make_decisions(context)

    def next_round_at(self, context: DecisionContext) -> float | None:
        return context.state.next_timeout(context.now, context.timeout_s)


def make_decisions(context: DecisionContext) -> Decisions:
    accounts = PlannedCopies(context)
    for object_id in () if accounts.full else _in_order(accounts):
        if accounts.full:
            break
        accounts.give(object_id)
    return accounts.decisions()


def _in_order(accounts: PlannedCopies) -> list[ObjectId]:
    objects, has_object = accounts.context.state.objects, accounts.context.has_object
    ids = [
        object_id
        for object_id, known in objects.items()
        if known.providers & accounts.eligible and accounts.wanted(object_id) > 0 and not has_object(object_id)
    ]
    ids.sort()
    if accounts.policy.rarest_first:
        ids.sort(key=lambda object_id: objects[object_id].providers.bit_count())
    return ids


def ids_request(state: PeerState, has_object: HasObject, policy: Policy) -> tuple[int, int, bool]:
    """Return how many ids a peer is to acknowledge, how many to ask for, and whether that request may be pipelined."""
    ack = state.ackable(has_object)
    rest = len(state.fifo) - ack
    room = policy.max_num_objects_outstanding - rest - state.ids_in_flight
    return ack, max(0, min(room, policy.max_num_ids_req)), rest > 0


class PlannedCopies:
    """What is under way, with what this round has given out so far."""

    def __init__(self, context: DecisionContext) -> None:
        self.context = context
        self.policy = context.policy
        self.pending: dict[PeerId, PeerState] = {}  #: peers that get a decision, with their states
        self.eligible = 0  #: bits of the pending peers that can take more
        self._copies: dict[ObjectId, int] = {}  # to add to the state's: given or decided, less what has timed out
        self._count = context.state.inflight_count
        self._held_bytes = context.state.held_bytes
        self._rng = Random(context.seed)
        self._given: dict[int, list[ObjectId]] = {}  # by slot, as what follows
        self._room_bytes: dict[int, int] = {}
        self._load: dict[int, int] = {}
        self._peers_at: dict[int, int] = {}  # bits of the peers with a load
        self._loads: list[int] = []  # its keys, sorted
        for peer, state in context.state.peers.items():
            self._enter(peer, state)
        #: the total is used up, so nothing more can be given in this round
        self.full = self._count >= self.policy.max_num_objects_inflight_total

    def wanted(self, object_id: ObjectId) -> int:
        known = self.context.state.objects[object_id]
        return self.policy.target_object_redundancy - known.copies - self._copies.get(object_id, 0)

    def give(self, object_id: ObjectId) -> None:
        """Give an object to as many peers as copies are wanted, those with the least to do first."""
        providers = self.context.state.objects[object_id].providers
        left = self.wanted(object_id)
        while left > 0 and (able := providers & self.eligible) and not self.full:
            slot = self._least_loaded(able)
            providers &= ~(1 << slot)
            left -= self.take(slot, object_id)

    def take(self, slot: int, object_id: ObjectId) -> bool:
        """Give an object to one eligible peer that has it available, and return whether there was room for it.

        Where there is none, the peer, or with the total everybody, gets nothing more in this round.
        """
        size_bytes = self.policy.room_for(self.pending[self.context.state.by_slot[slot]].available[object_id])
        if size_bytes > self._room_bytes[slot]:
            self.eligible &= ~(1 << slot)
            return False
        if self._held_bytes + size_bytes > self.policy.max_bytes_inflight_total:
            self.full = True
            return False
        self._given.setdefault(slot, []).append(object_id)
        self._copies[object_id] = self._copies.get(object_id, 0) + 1
        self._room_bytes[slot] -= size_bytes
        self._held_bytes += size_bytes
        self._count += 1
        self.full = self._count >= self.policy.max_num_objects_inflight_total
        self._add_load(slot)
        return True

    def decisions(self) -> Decisions:
        made = {}
        for peer, state in self.pending.items():
            ack, req, pipelined = ids_request(state, self.context.has_object, self.policy)
            made[peer] = PeerDecision(
                ids_to_req=req,
                ids_to_ack=ack,
                can_pipeline_ids_req=pipelined,
                objects_to_req_ids=frozenset(self._given.get(state.slot, ())),
            )
        return made

    def _enter(self, peer: PeerId, state: PeerState) -> None:
        overdue = self.context.overdue(state)
        for object_id in overdue:
            self._copies[object_id] = self._copies.get(object_id, 0) - 1
            self._held_bytes -= state.inflight[object_id].size_bytes
        self._count -= len(overdue)
        decision = self.context.busy.get(peer)
        if decision is not None:
            self._count_decided(state, decision)
            return
        self.pending[peer] = state
        room = self.policy.max_num_objects_inflight_per_peer - len(state.inflight)
        if room > 0 and state.available:
            slot = state.slot
            self.eligible |= 1 << slot
            self._room_bytes[slot] = self.policy.max_bytes_inflight_per_peer - state.inflight_bytes - state.owt_bytes
            self._put_at(slot, len(state.inflight) + (_LOAD_OF_LAST if self.context.is_last(peer, state) else 0))

    def _count_decided(self, state: PeerState, decision: PeerDecision) -> None:
        for object_id in decision.objects_to_req_ids:
            if object_id in state.available:
                self._copies[object_id] = self._copies.get(object_id, 0) + 1
                self._held_bytes += self.policy.room_for(state.available[object_id])
                self._count += 1

    def _least_loaded(self, able: int) -> int:
        """Return the slot of the peer with the least to do among some; chance decides between equal ones."""
        for load in self._loads:
            if peers := able & self._peers_at[load]:
                count = peers.bit_count()
                return bit_at(peers, int(self._rng.random() * count) if count > 1 else 0)
        raise InternalError("an eligible peer has no load")  # each is put at one by _enter

    def _add_load(self, slot: int) -> None:
        load = self._load[slot]
        self._peers_at[load] &= ~(1 << slot)
        if not self._peers_at[load]:
            del self._peers_at[load]
            self._loads.remove(load)
        self._put_at(slot, load + 1)
        if (load + 1) % _LOAD_OF_LAST >= self.policy.max_num_objects_inflight_per_peer:
            self.eligible &= ~(1 << slot)

    def _put_at(self, slot: int, load: int) -> None:
        self._load[slot] = load
        if load not in self._peers_at:
            self._peers_at[load] = 0
            insort(self._loads, load)
        self._peers_at[load] |= 1 << slot


def bit_at(bits: int, index: int) -> int:
    """Return the position of the set bit number `index`, from the lowest, which is 0."""
    position = 0
    width = bits.bit_length()
    while width > 1:
        half = width >> 1
        low = bits & ((1 << half) - 1)
        count = low.bit_count()
        if index < count:
            bits, width = low, half
        else:
            index -= count
            position += half
            bits >>= half
            width -= half
    return position
