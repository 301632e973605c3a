"""The inbound peers of a node: their states, what is decided for each, and when.

Theory of operation. Each peer has a *decision channel*: COMPLETED (the last decision was carried out), UNREAD (there is
a new one) or ACTING (it is being carried out). A round of decisions covers all peers but those that are acting: theirs
stand, an unread one is replaced, and one with nothing to do is not written. A round comes soon after something changed,
or when time alone changes something; an idle node decides nothing. The registry alone writes the states, and adds to
the pool: one call after the other, in the order in which objects came.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from flowctl.core.loop.faults import ErrorHook, as_exception, report
from flowctl.errors import InternalError, LocalProtocolError
from flowctl.nodes.diffusion.decision import DecisionContext, Decisions, PeerDecision, Planner
from flowctl.nodes.diffusion.errors import ObjectRejectedError
from flowctl.nodes.diffusion.objects import ObjectId, PeerId
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.pool.pool import ObjectPool
from flowctl.nodes.diffusion.state import DecisionGlobalState, PeerState
from flowctl.nodes.diffusion.wire.protocol import Announced

MIN_INTERVAL_S: Final = 0.005
"""Least time between two rounds: the original sleeps for it before each round."""
_REST_FACTOR: Final = 4.0
RETRY_IDS_S: Final = 0.1
"""Pause before a peer that had fewer ids than it was asked for is asked again, unless there is something to
acknowledge: while objects are under way, it would be asked every few milliseconds. It is not asked either while its
answer is under way."""
_NOTHING: Final = PeerDecision()


class DecisionStatus(enum.Enum):
    """Where the decision of a peer is in its life."""

    COMPLETED = "completed"
    UNREAD = "unread"
    ACTING = "acting"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionStatistics:
    """The inbound side at one moment."""

    peers: int
    objects_known: int  #: that some peer has available or that are under way
    objects_inflight: int
    objects_to_pool: int  #: received and not taken by the pool yet
    rounds: int
    objects_received: int  #: objects received so far, each copy counted
    bytes_received: int
    objects_rejected: int  #: found invalid by the pool so far


class PeerStateAPI:
    """What an inbound peer may see and change of the registry; made by `Registry.peer`."""

    def __init__(self, registry: Registry, peer: PeerId, state: PeerState) -> None:
        self._registry = registry
        self._decision = _NOTHING
        self._reader: asyncio.Future[None] | None = None
        self._left = False  # it reads no more decisions
        self._blocked = False  # a request for ids waits for as long as the peer has none
        self._has_more = False  # its last reply had as many ids as it was asked for
        self._ask_again_at = 0.0  # before, ids are asked for only to acknowledge others
        self.held = False  #: its gate is closed: nothing is decided for it
        #: called with an error that was found after its reply was taken, and ends the peer
        self.on_fault: Callable[[Exception], object] | None = None
        self.peer: Final = peer
        self.state: Final = state
        self.status = DecisionStatus.COMPLETED

    # -- decisions

    async def read_decision(self) -> PeerDecision | None:
        """Wait for a decision and begin to act on it. None: the peer is to leave, or is registered no more."""
        if self.status is DecisionStatus.ACTING:
            raise LocalProtocolError(f"peer {self.peer!r} has not completed the decision before")
        while self.status is not DecisionStatus.UNREAD:
            if self._left:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._left:
            return None
        self.status = DecisionStatus.ACTING
        return self._decision

    def on_decision_completed(self) -> None:
        if self.status is not DecisionStatus.ACTING:
            raise LocalProtocolError(f"peer {self.peer!r} has no decision to complete")
        self.status = DecisionStatus.COMPLETED
        self._decision = _NOTHING
        self._registry.poke()

    @property
    def acting_on(self) -> PeerDecision | None:
        """The decision that counts as done while others are decided for. None: a new one can be made."""
        if self.status is DecisionStatus.ACTING:
            return self._decision
        return _NOTHING if self.held or self._left else None

    def offer(self, decision: PeerDecision, now: float) -> float | None:
        """Put a decision in place of an unread one; return when ids may be asked for that it leaves out, None: now."""
        wait_until = None
        if decision.ids_to_req:
            under_way = self._blocked or (self.state.ids_in_flight > 0 and not self._has_more)
            early = now < self._ask_again_at
            if self._blocked or (not decision.ids_to_ack and (under_way or early)):
                wait_until = self._ask_again_at if early and not under_way else None
                decision = replace(decision, ids_to_req=0, ids_to_ack=0)
        self._decision = decision
        if decision.is_empty:
            self.status = DecisionStatus.COMPLETED
        else:
            self.status = DecisionStatus.UNREAD
            self._wake()
        return wait_until

    def leave(self) -> None:
        """Let `read_decision` return None from now on; what is in flight is asked for elsewhere."""
        self._changed_state().on_leave(self.peer)
        self.stop()
        self._registry.poke()

    def stop(self) -> None:
        self._left = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- changes of the state, each a LocalProtocolError for a peer that is registered no more

    def _changed_state(self) -> DecisionGlobalState:
        """Return the state of all peers, if this one is in it: its name may be another's by now."""
        state = self._registry.state
        if state.peers.get(self.peer) is not self.state:
            raise LocalProtocolError(f"peer {self.peer!r} is not registered any more")
        return state

    def on_request_ids(self, ack: int, req: int, *, blocking: bool) -> None:
        self._changed_state().on_request_ids(self.peer, ack, req)
        self._blocked = blocking

    def on_receive_ids(self, requested: int, announced: Sequence[Announced]) -> None:
        registry = self._registry
        now = registry.clock()
        self._changed_state().on_receive_ids(self.peer, requested, announced, now=now)
        self._has_more = len(announced) == requested
        if not (self._has_more or self._blocked):
            self._ask_again_at = now + RETRY_IDS_S
        self._blocked = False
        if registry.on_announced is not None:
            registry.on_announced(self.peer, [item.object_id for item in announced])
        registry.poke()

    def on_request_objects(self, object_ids: Sequence[ObjectId]) -> None:
        self._changed_state().on_request_objects(self.peer, object_ids, now=self._registry.clock())

    def on_receive_objects(self, requested: Sequence[ObjectId], objects: Sequence[tuple[ObjectId, bytes]]) -> None:
        self._changed_state()
        self._registry.received(self, requested, objects)


class Registry:
    """All inbound peers of a node, on one loop."""

    def __init__(
        self,
        pool: ObjectPool,
        *,
        policy: Policy,
        planner: Planner,
        clock: Callable[[], float],
        rng: Random,
        on_error: ErrorHook,
        on_announced: Callable[[PeerId, Sequence[ObjectId]], object] | None = None,
    ) -> None:
        self.on_announced: Final = on_announced
        self.pool: Final = pool
        self.clock: Final = clock
        self.state: Final = DecisionGlobalState(policy)
        self.last: set[PeerId] = set()  #: peers that are asked only for what no other peer has
        self._planner = planner
        self._rng = rng
        self._on_error = on_error
        self._apis: dict[PeerId, PeerStateAPI] = {}
        self._timer: asyncio.TimerHandle | None = None  # for the next round
        self._due = 0.0  # when that is
        self._rested_at = 0.0  # earliest time of the next round
        self._received: deque[tuple[PeerStateAPI, dict[ObjectId, bytes]]] = deque()  # for the pool
        self._adding: asyncio.Task[None] | None = None
        self._rounds = 0
        self._received_count = 0
        self._received_bytes = 0
        self._rejected_count = 0

    # -- peers

    @contextmanager
    def peer(self, peer: PeerId) -> Iterator[PeerStateAPI]:
        """Register a peer; its state and its decision channel go together, however the block is left."""
        state = self.state.register(peer, now=self.clock())
        api = self._apis[peer] = PeerStateAPI(self, peer, state)
        self.poke()
        try:
            yield api
        finally:
            del self._apis[peer]
            self.state.unregister(peer)
            api.stop()
            self.last.discard(peer)
            # What a peer that is gone has sent counts for no limit any more, so it is not kept either. It comes from
            # others, if it is true.
            self._received = deque(item for item in self._received if item[0] is not api)
            self.poke()

    def release(self, peer: PeerId) -> None:
        api = self._apis.get(peer)
        if api is not None and api.held:
            api.held = False
            self.poke()

    # -- rounds

    def poke(self) -> None:
        self._poke_at(self.clock())

    def _poke_at(self, when: float) -> None:
        when = max(when, self._rested_at)
        if self._timer is not None:
            if self._due <= when:
                return
            self._timer.cancel()
        self._due = when
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - self.clock()), self._round)

    def _round(self) -> None:
        self._timer = None
        if not self._apis:
            return
        now = self.clock()
        self._rounds += 1
        context = DecisionContext(
            state=self.state,
            has_object=self.pool.has_object,
            busy={peer: acting for peer, api in self._apis.items() if (acting := api.acting_on) is not None},
            last=self.last,
            now=now,
            seed=self._rng.getrandbits(32),
        )
        decisions: Decisions = {}
        again_at: float | None = None
        try:
            decisions = self._planner.decide(context)
            again_at = self._planner.next_round_at(context)
        except Exception as error:  # noqa: BLE001 - a planner of the application: the next round may do better
            report(self._on_error, "planner", error)
        waits = [self._apis[peer].offer(decision, now) for peer, decision in decisions.items() if peer in self._apis]
        done = self.clock()
        self._rested_at = done + max(MIN_INTERVAL_S, _REST_FACTOR * (done - now))
        for when in (*waits, again_at):
            if when is not None:
                self._poke_at(when)

    # -- objects

    def received(
        self, api: PeerStateAPI, requested: Sequence[ObjectId], objects: Sequence[tuple[ObjectId, bytes]]
    ) -> None:
        self.state.on_receive_objects(api.peer, requested, objects, now=self.clock())
        self._received_count += len(objects)
        self._received_bytes += sum(len(data) for _, data in objects)
        self._received.append((api, dict(objects)))
        if self._adding is None:
            self._adding = asyncio.get_running_loop().create_task(self._add())
        self.poke()

    async def _add(self) -> None:
        try:
            while self._received:
                await self._add_of(*self._received.popleft())
        finally:
            self._adding = None

    async def _add_of(self, api: PeerStateAPI, objects: dict[ObjectId, bytes]) -> None:
        failure: Exception | None = None
        try:
            rejected = await self.pool.add_objects(objects)
        except (Exception, asyncio.CancelledError) as error:  # the pool is the application's: its fault stops no peer
            current = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
                raise
            failure = InternalError(f"the pool did not take {len(objects)} objects of peer {api.peer!r}: {error}")
            failure.__cause__ = as_exception(error)
            rejected = {}
        self._rejected_count += len(rejected)
        if self._apis.get(api.peer) is api:
            self.state.on_pool_done(api.peer, objects)
            for object_id, why in rejected.items():
                failure = ObjectRejectedError(object_id, why)
                break
            if failure is not None and api.on_fault is not None:
                api.on_fault(failure)
        self.poke()

    # -- the end

    async def close(self) -> None:
        if self._apis:
            raise LocalProtocolError(f"{len(self._apis)} peers are registered")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._received.clear()
        if self._adding is not None:
            await asyncio.wait([self._adding])  # a pool may be writing

    def statistics(self) -> DiffusionStatistics:
        return DiffusionStatistics(
            peers=len(self._apis),
            objects_known=len(self.state.objects),
            objects_inflight=self.state.inflight_count,
            objects_to_pool=sum(len(state.owt) for state in self.state.peers.values()),
            rounds=self._rounds,
            objects_received=self._received_count,
            bytes_received=self._received_bytes,
            objects_rejected=self._rejected_count,
        )
