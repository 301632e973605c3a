"""Which origin an edge asks for which segment: as diffusion decides, without what is held, and twice for what is late.

An origin that stands still or is slow would cost viewers the seconds after which diffusion asks another one. A node
knows better how long requests take: what takes four times as long as the best origin is late, and another one is asked
too. That is done for few segments of those that come. Where everything becomes late, asking again makes it later.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from flowctl.nodes.diffusion.decision import DecisionContext, Decisions, make_decisions
from flowctl.nodes.diffusion.objects import ObjectId, PeerId
from flowctl.nodes.scheduler.policies.budget import RetryBudget

LATE_S: Final = 0.6
"""Time after which a request is late while no origin has answered yet (as in the leases of TxSubmission V2)."""
_LATE_LEAST_S: Final = 0.25
_LATE_FACTOR: Final = 4.0
"""Multiple of the best origin's time after which a request is late: segments differ, and machines may be busy."""
LATE_SHARE: Final = 0.1
LATE_MOST: Final = 10
"""Late segments that may be asked for twice at once; in the long run, `LATE_SHARE` of those that come may."""
_MOST_PAID: Final = 1000
"""Late segments that are remembered as paid for: far more than are under way."""
_AGAIN_S: Final = 0.1


def late_after_s(best_s: float | None) -> float:
    return LATE_S if best_s is None else _LATE_LEAST_S + _LATE_FACTOR * best_s


class EdgePlanner:
    """Asks a second origin for segments that are late, within a budget; else a `CentralPlanner`."""

    def __init__(
        self, ready: Callable[[PeerId, ObjectId], bool], busy: Callable[[], bool], best_s: Callable[[], float | None]
    ) -> None:
        self._ready = ready
        self._busy = busy
        self._best_s = best_s
        self._budget = RetryBudget(share=LATE_SHARE, least_per_s=0.0, most=LATE_MOST)
        self._paid: OrderedDict[tuple[ObjectId, int], None] = OrderedDict()

    def note_arrival(self) -> None:
        """Note that a segment has come: it pays for a part of one that may be asked for twice."""
        self._budget.first_try()

    def decide(self, context: DecisionContext) -> Decisions:
        hastily = self._hastily(context)
        decisions = make_decisions(hastily)
        late = self._late(context, hastily)
        for peer, decision in decisions.items():
            ready = frozenset(
                item
                for item in decision.objects_to_req_ids
                if self._ready(peer, item) and (item not in late or self._pays(item, late[item], context.now))
            )
            if len(ready) != len(decision.objects_to_req_ids):
                decisions[peer] = replace(decision, objects_to_req_ids=ready)
        return decisions

    def next_round_at(self, context: DecisionContext) -> float | None:
        due = context.state.next_timeout(context.now, self._late_s(context))
        soon = context.now + _AGAIN_S if self._busy() else None
        return min((when for when in (due, soon) if when is not None), default=None)

    def _hastily(self, context: DecisionContext) -> DecisionContext:
        """Return the context with the time after which requests are late, where that is less."""
        return replace(context, inflight_timeout_s=self._late_s(context))

    def _late_s(self, context: DecisionContext) -> float:
        return min(late_after_s(self._best_s()), context.policy.inflight_timeout_s)

    @staticmethod
    def _late(context: DecisionContext, hastily: DecisionContext) -> Counter[ObjectId]:
        """Return the objects that are late and not overdue yet, with how many peers are late with each."""
        late: Counter[ObjectId] = Counter()
        for state in context.state.peers.values():
            late.update(hastily.overdue(state)[len(context.overdue(state)) :])  # both begin with the oldest
        return late

    def _pays(self, object_id: ObjectId, late_count: int, now: float) -> bool:
        """Return whether an object that this many peers are late with may be asked for again; it is paid for once."""
        key = object_id, late_count
        if key in self._paid:
            return True
        if not self._budget.take(now):
            return False
        self._paid[key] = None
        if len(self._paid) > _MOST_PAID:
            self._paid.popitem(last=False)
        return True
