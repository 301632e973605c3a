"""Several poll groups as one: where a new connection goes, and when connections move.

Placement takes the group with the smallest weight, the sum of what its pollables say their load is. Weights, not the
measured busy fraction, because a burst of a thousand viewers arrives in less time than any average takes to notice;
between equal weights the measured fraction decides.

`PollGroups.rebalance` moves pollables from the heaviest group to the lightest. Three things keep it from flapping: it
begins only when the gap is more than `THRESHOLD` of the mean weight and then works it down to half of that; a move
must narrow the gap markedly; and a pollable stays for `DWELL_S` where it was put. One that is not ``movable()``, as a
connection with a coroutine running on its loop, stays altogether.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flowctl.core.loop.placement import is_movable
from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.pollgroup import GroupState, LoopFactory, Pollable, PollGroup, PollGroupStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowctl.core.loop.faults import ErrorHook
    from flowctl.core.loop.placement import Placement
    from flowctl.deferred import Registration

#: More threads than this never helped an interpreter; a larger number is a port or a size in the wrong place.
MAX_GROUPS: Final = 256

#: A quarter of the mean: with 1000 viewers a group that is 125 to either side of it. Below that the move costs more
#: (caches, two loop turns) than the difference.
THRESHOLD: Final = 0.25

#: Twice the smoothing time of the load figures, so that a move is seen in them before the next.
DWELL_S: Final = 10.0

#: In one rebalancing, so that its disturbance is bounded; the next is seconds away.
MOST_MOVES: Final = 16

#: A move of weight w turns a gap g into g - 2w. With w near g the groups would only exchange their roles, and rounding
#: could make that look like progress for ever; up to 0.9 g, the gap shrinks by a fifth at least, or is not overshot.
_MOST_OF_GAP: Final = 0.9

#: A thousandth of a connection is not worth moving.
_LEAST_WEIGHT: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A pollable that `PollGroups.rebalance` has sent from one group to another."""

    pollable: Pollable
    source: PollGroup
    target: PollGroup
    weight: float  #: its load, in ordinary connections


class PollGroups:
    """A fixed number of poll groups, named ``name-0``, ``name-1`` and so on.

    Args:
        count: of groups, 1 to `MAX_GROUPS`.
        name: what the groups' names begin with.
        loop_factory: see `PollGroup`.
        clock: see `PollGroup`; shared by all.
        on_error: see `PollGroup`.
    """

    __slots__ = ("_clock", "groups")

    def __init__(
        self,
        count: int,
        *,
        name: str = "flowctl",
        loop_factory: LoopFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_error: ErrorHook | None = None,
    ) -> None:
        if not 1 <= count <= MAX_GROUPS:
            raise LocalProtocolError(f"count is {count}; it must be 1 to {MAX_GROUPS}")
        self._clock: Final = clock
        #: The groups, in the order of their numbers; fixed.
        self.groups: Final = tuple(
            PollGroup(f"{name}-{number}", loop_factory=loop_factory, clock=clock, on_error=on_error)
            for number in range(count)
        )

    def start(self) -> None:
        """Start all groups; if one fails, stop those already started and raise what it raised."""
        try:
            for group in self.groups:
                group.start()
        except BaseException:
            self.stop()
            raise

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Stop all groups at the same time, see `PollGroup.stop`.

        Args:
            deadline_s: for all together, 0 or more.

        Returns:
            True if all have stopped.
        """
        # Real time, whatever clock the groups were given: it is threads that are waited for.
        until = time.monotonic() + deadline_s
        running = [group for group in self.groups if not group.stop(0)]
        stopped = [group.stop(max(0.0, until - time.monotonic())) for group in running]
        return all(stopped)

    def least_loaded(self) -> PollGroup:
        """Return the running group with the smallest weight, of equals the least busy; any thread.

        Raises:
            ClosedError: no group is running.
        """
        running = [group for group in self.groups if group.state is GroupState.RUNNING]
        if not running:
            raise ClosedError("no poll group is running")
        return min(running, key=_load_key)

    def place(self, pollable: Pollable, registration: Registration) -> PollGroup:
        """Add `pollable` to the least loaded group and return that; any thread. See `PollGroup.add_pollable`."""
        group = self.least_loaded()
        group.add_pollable(pollable, registration)
        return group

    def rebalance(self) -> list[Move]:
        """Ask all pollables for their load and move some from the heaviest group to the lightest; any thread.

        O(number of pollables): call it every few seconds, not per connection. The moves are queued on the groups
        when this returns, and carried out in their next turns.

        Returns:
            What was moved, in order; empty when the groups are balanced well enough.
        """
        weights = {group: group.refresh_weight() for group in self.groups if group.state is GroupState.RUNNING}
        moves: list[Move] = []
        if len(weights) < 2:
            return moves
        mean = sum(weights.values()) / len(weights)
        allowed_gap = THRESHOLD * mean
        moved: set[int] = set()
        while len(moves) < MOST_MOVES:
            source = max(weights, key=weights.__getitem__)
            target = min(weights, key=weights.__getitem__)
            gap = weights[source] - weights[target]
            if gap <= allowed_gap:
                break
            allowed_gap = THRESHOLD * mean / 2
            placement = self._best_to_move(source, gap, moved)
            if placement is None:
                break
            moved.add(id(placement.pollable))
            if not source.migrate(placement.pollable, target):
                continue  # it left while we were looking
            weights[source] -= placement.weight
            weights[target] += placement.weight
            moves.append(Move(pollable=placement.pollable, source=source, target=target, weight=placement.weight))
        return moves

    def statistics(self) -> list[PollGroupStatistics]:
        """Return a snapshot per group, in their order; any thread."""
        return [group.statistics() for group in self.groups]

    def _best_to_move(self, source: PollGroup, gap: float, moved: set[int]) -> Placement[Pollable] | None:
        """Return what closes `gap` best, that is, weighs nearest to half of it; None if nothing would narrow it."""
        settled_before = self._clock() - DWELL_S
        candidates = [
            placement
            for placement in source.pollables()
            if id(placement.pollable) not in moved
            and placement.placed_at <= settled_before
            and _LEAST_WEIGHT <= placement.weight <= _MOST_OF_GAP * gap
            and is_movable(placement.pollable, source.report)
        ]
        if not candidates:
            return None
        return min(candidates, key=lambda placement: abs(gap / 2 - placement.weight))


def _load_key(group: PollGroup) -> tuple[float, float]:
    figures = group.statistics()
    return figures.weight, figures.busy_fraction
