"""What an edge asks for twice: the decisions for a slow origin and a quick one, without sockets."""

from __future__ import annotations

import pytest

from flowctl.live.cluster.edge.planner import LATE_MOST, LATE_S, LATE_SHARE, EdgePlanner
from flowctl.nodes.diffusion.decision import DecisionContext
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.state import DecisionGlobalState

ALL_AT_ONCE = Policy(target_object_redundancy=1, max_num_ids_req=50, inflight_timeout_s=2.0)


class Node:
    """An edge that has asked a slow origin for segments at time 0, which a quick one has too."""

    def __init__(self, count=1, best_s=0.01, held=()):
        self.best_s = best_s
        self.held = held
        self.planner = EdgePlanner(lambda _, item: item not in self.held, lambda: False, lambda: self.best_s)
        self.state = DecisionGlobalState(ALL_AT_ONCE)
        self.ids = [number.to_bytes(4, "big") for number in range(count)]
        for peer in ("slow", "quick"):
            self.state.register(peer)
            self.state.on_request_ids(peer, 0, count)
            self.state.on_receive_ids(peer, count, [(item, 10) for item in self.ids])
        self.state.on_request_objects("slow", self.ids)

    def context(self, now):
        return DecisionContext(state=self.state, has_object=lambda _: False, now=now)

    def asked(self, now):
        return len(self.planner.decide(self.context(now))["quick"].objects_to_req_ids)


@pytest.mark.parametrize(
    ("best_s", "late_s"), [(0.01, 0.29), (0.1, 0.65), (1.0, ALL_AT_ONCE.inflight_timeout_s), (None, LATE_S)]
)
def test_segment_when_late_by_what_the_best_origin_takes_is_asked_for_elsewhere(best_s, late_s):
    node = Node(best_s=best_s)
    assert node.planner.next_round_at(node.context(0.0)) == pytest.approx(late_s)
    assert (node.asked(late_s - 0.01), node.asked(late_s + 0.01)) == (0, 1)


def test_segments_when_many_are_late_are_asked_for_again_within_a_budget():
    """A round that is decided again costs nothing; what came pays for more; the policy's own time needs no budget."""
    node = Node(count=LATE_MOST + 5)
    assert [node.asked(0.5) for _ in range(3)] == [LATE_MOST] * 3
    for _ in range(round(1 / LATE_SHARE) + 1):
        assert node.asked(0.5) == LATE_MOST
        node.planner.note_arrival()
    assert node.asked(0.5) == LATE_MOST + 1
    assert node.asked(ALL_AT_ONCE.inflight_timeout_s) == LATE_MOST + 5


def test_segments_when_held_are_not_asked_for_and_cost_no_budget():
    node = Node(count=LATE_MOST + 1)
    node.held = node.ids[:5]
    assert node.asked(0.5) == LATE_MOST + 1 - 5
    node.held = ()
    assert node.asked(0.5) == LATE_MOST
