"""Leases: the other way to decide, in which each peer helps itself (pure).

Theory of operation. Peers claim in a random order, each the oldest of its FIFO that it may, and a few at a time: a peer
that delivers fast comes back soon and claims more, so work goes where it is done. Beside `make_decisions` nothing is
compared over all peers: a round costs less, and work is spread less evenly when a crowd of objects comes at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError
from flowctl.nodes.diffusion.decision import DecisionContext, Decisions, PlannedCopies
from flowctl.nodes.diffusion.objects import ObjectId, PeerId
from flowctl.nodes.diffusion.state import PeerState

_MOST_PENALTY: Final = 10.0
"""Largest penalty that lengthens the delay; a peer that is overdue or asked last always has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePlanner:
    """Lets each peer claim objects for itself. A `Planner`."""

    most_claims: int = 8  #: objects that a peer claims in one round, 1 or more
    #: how long a peer waits before it claims a new object, in seconds for each point of its penalty up to 10; 0 to 10.
    #: Ten times this is best below the in-flight timeout.
    claim_delay_s: float = 0.05

    def __post_init__(self) -> None:
        check_fields(self)
        if self.most_claims < 1:
            raise ConfigError(f"most_claims is {self.most_claims}, it must be 1 or more")
        if not 0 <= self.claim_delay_s <= 10:
            raise ConfigError(f"claim_delay_s is {self.claim_delay_s}, it must be 0 to 10")

    def decide(self, context: DecisionContext) -> Decisions:
        accounts = PlannedCopies(context)
        objects, has_object = context.state.objects, context.has_object
        free = {key for key in objects if accounts.wanted(key) > 0 and not has_object(key)}
        peers = list(accounts.pending)
        Random(context.seed).shuffle(peers)
        for peer in peers if free else ():
            state = accounts.pending[peer]
            before = context.now - self._delay_s(context, peer, state)
            claims = 0
            for key in _claimable(accounts, state, free):
                if objects[key].since <= before:
                    claims += accounts.take(state.slot, key)
                    if accounts.wanted(key) <= 0:
                        free.discard(key)
                    if claims == self.most_claims:
                        break
        return accounts.decisions()

    def next_round_at(self, context: DecisionContext) -> float | None:
        times_due = [context.state.next_timeout(context.now)]
        for peer, state in context.state.peers.items():
            delay_s = self._delay_s(context, peer, state)
            if delay_s:
                times = (context.state.objects[key].since + delay_s for key in state.available)
                times_due.append(min((when for when in times if when > context.now), default=None))
        return min((when for when in times_due if when is not None), default=None)

    def _delay_s(self, context: DecisionContext, peer: PeerId, state: PeerState) -> float:
        held_back = peer in context.last or context.overdue(state)
        points = _MOST_PENALTY if held_back else state.penalty_now(context.now)
        return min(points, _MOST_PENALTY) * self.claim_delay_s


def _claimable(accounts: PlannedCopies, state: PeerState, free: set[ObjectId]) -> Iterator[ObjectId]:
    bit = 1 << state.slot
    for key in state.available:
        if accounts.full or not accounts.eligible & bit:
            return
        if key in free:
            yield key
