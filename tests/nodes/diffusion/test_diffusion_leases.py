"""Leases: peers that claim objects for themselves."""

from __future__ import annotations

import itertools

import pytest
from diffusion_kit import asked, check_index, decide, ids, objects, peer, state_of
from hypothesis import given
from test_diffusion_decisions import contexts

from flowctl.errors import ConfigError
from flowctl.nodes.diffusion.decision import CentralPlanner, DecisionContext, PeerDecision, make_decisions
from flowctl.nodes.diffusion.leases import LeasePlanner
from flowctl.nodes.diffusion.policy import Policy

ONE_COPY = Policy(target_object_redundancy=1)


def claim(peers, **options):
    return decide(peers, planner=LeasePlanner().decide, **options)


def late_peer(state, name, number, came_at):
    state.on_request_objects(name, ids(number), now=0.0)
    state.on_receive_objects(name, ids(number), [(ids(number)[0], b"x")], now=came_at)


def test_claims_when_nothing_is_known_ask_every_peer_for_ids():
    """A cold start gives every peer a request for ids with leases too (OD-34)."""
    assert dict.fromkeys("AB", PeerDecision(ids_to_req=10)) == claim({"A": peer(), "B": peer()})


def test_claims_when_two_have_the_same_are_as_many_as_copies_are_wanted():
    made = asked(claim({name: peer([1, 2]) for name in "ABC"}, policy=Policy(target_object_redundancy=2)))
    assert sorted(itertools.chain(*made.values())) == [1, 1, 2, 2]
    assert asked(claim({"A": peer([1], available=[], inflight=[1]), "B": peer([1])}, policy=ONE_COPY)) == {}


def test_claims_when_a_peer_has_many_are_a_few_and_the_oldest():
    made = claim({"A": peer(range(20, 0, -1))})
    assert objects(made["A"]) == list(range(13, 21))


def test_claims_when_a_lease_is_overdue_leave_room_for_another():
    state = state_of({"A": peer([1], available=[], inflight=[1]), "B": peer([1])}, ONE_COPY)
    assert [asked(claim(state, now=now)) for now in (1.9, 2.0)] == [{}, {"B": [1]}]


def test_claims_when_a_peer_was_late_wait_for_its_delay():
    planner = LeasePlanner(claim_delay_s=0.1)
    state = state_of({"A": peer([1]), "B": peer()}, ONE_COPY)
    late_peer(state, "A", 1, came_at=9.0)
    state.on_request_ids("A", 0, 5)
    state.on_receive_ids("A", 5, [(ids(2)[0], 1)], now=9.0)
    context = DecisionContext(state=state, has_object=lambda _: False, now=9.0)
    assert asked(planner.decide(context)) == {}
    assert planner.next_round_at(context) == pytest.approx(9.1)
    assert asked(claim(state, now=9.1)) == {"A": [2]}


def test_claims_when_a_peer_is_said_to_be_last_wait_longest():
    state = state_of({"A": peer([1])}, ONE_COPY)
    assert [asked(claim(state, now=now, last=["A"])) for now in (0.49, 0.5)] == [{}, {"A": [1]}]


def test_next_round_when_nothing_is_under_way_is_at_no_time():
    for planner in (LeasePlanner(), CentralPlanner()):
        state = state_of({"A": peer([1, 2])}, ONE_COPY)
        context = DecisionContext(state=state, has_object=lambda _: False)
        assert planner.next_round_at(context) is None
        state.on_request_objects("A", ids(1), now=0.0)
        assert planner.next_round_at(context) == 2.0


@pytest.mark.parametrize("settings", [{"most_claims": 0}, {"claim_delay_s": -0.1}, {"claim_delay_s": 11.0}])
def test_lease_planner_when_a_value_is_out_of_range_names_it(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        LeasePlanner(**settings)


@given(contexts())
def test_claims_when_carried_out_exceed_no_limit(context):
    state, policy = context.state, context.policy
    made = LeasePlanner().decide(context)
    central = make_decisions(context)
    assert made == LeasePlanner().decide(context)
    assert made.keys() == central.keys()
    before = {key: known.copies for key, known in state.objects.items()}
    overdue = [key for item in state.peers.values() for key in context.overdue(item)]
    for name, item in made.items():
        assert (item.ids_to_ack, item.ids_to_req) == (central[name].ids_to_ack, central[name].ids_to_req)
        if item.objects_to_req_ids:
            state.on_request_objects(name, item.objects_to_req_ids, now=context.now)
    assert all(
        known.copies - overdue.count(key) <= policy.target_object_redundancy
        for key, known in state.objects.items()
        if known.copies > before[key]
    )
    check_index(state)
