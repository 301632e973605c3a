"""Decisions of object diffusion: who is asked for what."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import pytest
from diffusion_kit import asked, check_index, decide, ids, objects, peer, state_of
from hypothesis import given
from hypothesis import strategies as st

from core.diffusion import plain_decisions
from flowctl.nodes.diffusion.decision import DecisionContext, PeerDecision, bit_at, make_decisions
from flowctl.nodes.diffusion.policy import Policy


def decision(*wanted):
    return PeerDecision(objects_to_req_ids=frozenset(ids(*wanted)))


def test_make_decisions_when_nothing_is_known_asks_every_peer_for_ids():
    """A cold start gives every peer a request for ids (OD-34)."""
    fresh = PeerDecision(ids_to_req=10)
    assert {"A": fresh, "B": fresh} == decide({"A": peer(), "B": peer()})


def test_make_decisions_when_nothing_is_to_be_fetched_acknowledges_all_the_same():
    assert {"A": PeerDecision(ids_to_ack=2, ids_to_req=10)} == decide({"A": peer([1, 2])}, pool=[1, 2])


def test_make_decisions_when_a_prefix_is_done_acknowledges_it():
    """What is in the pool or on its way from this peer is acknowledged, up to the first that is not (OD-36)."""
    state = peer([1, 2, 3, 4], available=[1, 4], inflight=[3], owt=[2])
    assert decide({"A": state}, pool=[1])["A"] == PeerDecision(
        ids_to_ack=2, ids_to_req=10, can_pipeline_ids_req=True, objects_to_req_ids=frozenset(ids(4))
    )


def test_make_decisions_when_an_object_is_on_its_way_from_another_keeps_the_id():
    """What is on the way from another peer is not acknowledged: the pool may refuse it, and this one is asked next."""
    made = decide({"A": peer([1], available=[], owt=[1]), "B": peer([1])}, policy=Policy(target_object_redundancy=1))
    assert (made["A"].ids_to_ack, made["B"].ids_to_ack, objects(made["B"])) == (1, 0, [])


def test_make_decisions_when_an_object_was_refused_asks_the_others():
    """When the pool has refused an object and its peer is gone, the next round asks the others (OD-56)."""
    state = state_of(
        {"A": peer([1], available=[], owt=[1]), "B": peer([1]), "C": peer([1])}, Policy(target_object_redundancy=2)
    )
    state.on_pool_done("A", ids(1))
    state.unregister("A")
    assert asked(decide(state)) == {"B": [1], "C": [1]}


def test_make_decisions_when_the_window_is_nearly_full_asks_for_what_is_left():
    """Ids open and ids asked for together stay within the window (OD-37)."""
    made = decide({"A": peer([1, 2], ids_in_flight=2)}, policy=Policy(max_num_objects_outstanding=5))["A"]
    assert made.ids_to_req == 1


def test_make_decisions_when_the_window_is_full_asks_for_nothing():
    policy = Policy(max_num_objects_outstanding=4)
    made = decide({"A": peer([1, 2], available=[], inflight=[1, 2], ids_in_flight=2)}, policy=policy)["A"]
    assert (made.ids_to_req, made.ids_to_ack, made.is_empty) == (0, 0, True)


def test_make_decisions_when_the_window_has_shrunk_asks_for_nothing():
    made = decide({"A": peer([1, 2, 3], ids_in_flight=9)}, policy=Policy(max_num_objects_outstanding=2))["A"]
    assert made.ids_to_req == 0


def test_make_decisions_when_three_have_an_object_asks_as_many_as_wanted():
    made = decide({name: peer([1]) for name in "ABC"}, policy=Policy(target_object_redundancy=2))
    assert sorted(asked(made).values()) == [[1], [1]]


@pytest.mark.parametrize("under_way", [peer([1], available=[], inflight=[1]), peer([1], available=[], owt=[1])])
def test_make_decisions_when_enough_copies_are_under_way_asks_for_none(under_way):
    """A copy in flight or on its way from another peer counts (OD-40)."""
    assert asked(decide({"A": under_way, "B": peer([1])}, policy=Policy(target_object_redundancy=1))) == {}


def test_make_decisions_when_a_peer_has_left_asks_another():
    """What was in flight from a peer that is gone is asked for elsewhere (OD-41)."""
    state = state_of({"A": peer([1], available=[], inflight=[1]), "B": peer([1])}, Policy(target_object_redundancy=1))
    assert asked(decide(state)) == {}
    state.unregister("A")
    assert asked(decide(state)) == {"B": [1]}


def test_make_decisions_when_a_peer_reaches_its_limit_has_the_lowest_ids():
    """A peer is asked for as many objects as its limit allows, the lowest first (OD-42)."""
    policy = Policy(max_num_objects_inflight_per_peer=2)
    assert asked(decide({"A": peer([4, 3, 2, 1, 0])}, policy=policy)) == {"A": [0, 1]}


def test_make_decisions_when_the_total_is_reached_stops():
    """The total counts attributions, and the copies of an object come before the next object (OD-43)."""
    policy = Policy(max_num_objects_inflight_total=3, target_object_redundancy=2)
    made = decide({"A": peer([1, 2, 3]), "B": peer([1, 2, 3])}, policy=policy)
    assert Counter(itertools.chain(*asked(made).values())) == {1: 2, 2: 1}


def test_make_decisions_when_objects_are_in_flight_counts_them_for_their_peer():
    policy = Policy(max_num_objects_inflight_per_peer=3)
    made = decide({"A": peer([1, 2, 3, 4, 8, 9], available=[1, 2, 3, 4], inflight=[8, 9])}, policy=policy)
    assert asked(made) == {"A": [1]}


def test_make_decisions_when_the_seed_is_the_same_decides_the_same():
    """One context gives one decision, again and again and for an equal state (OD-46)."""
    policy = Policy(target_object_redundancy=2, max_num_objects_inflight_per_peer=7)

    def made(seed):
        return decide({name: peer(range(20)) for name in "ABCDEF"}, policy=policy, seed=seed)

    assert made(5) == made(5)
    assert len({str(asked(made(seed))) for seed in range(20)}) > 10


def test_make_decisions_when_providers_are_equal_chooses_each_a_third_of_the_time():
    """Over 1000 seeds each of three equal providers is chosen roughly as often (OD-46)."""
    state = state_of({name: peer([1]) for name in "ABC"}, Policy(target_object_redundancy=1))
    chosen = Counter(next(iter(asked(decide(state, seed=seed)))) for seed in range(1000))
    assert chosen.keys() == set("ABC")
    assert all(280 <= count <= 390 for count in chosen.values()), chosen


def test_make_decisions_when_a_peer_is_busy_leaves_it_alone():
    """A busy peer gets no decision, and what it has decided and not asked for counts as under way (OD-47)."""
    state = state_of({"A": peer([1, 2]), "B": peer([1, 2])}, Policy(target_object_redundancy=1))
    made = decide(state, busy={"A": decision(1)})
    assert "A" not in made
    assert asked(made) == {"B": [2]}
    assert asked(decide(state, busy={"A": decision(1, 2), "B": decision()})) == {}


def test_make_decisions_when_a_busy_peer_has_asked_already_counts_the_copy_once():
    policy = Policy(target_object_redundancy=2, max_num_objects_inflight_total=2)
    for busy in (peer([1], available=[], inflight=[1]), peer([1], available=[], owt=[1])):
        assert asked(decide({"A": busy, "B": peer([1])}, policy=policy, busy={"A": decision(1)})) == {"B": [1]}


def test_make_decisions_when_busy_peers_use_up_the_total_gives_nothing():
    peers = {"A": peer([1, 2], size=60), "B": peer([3], size=50)}
    by_number = Policy(max_num_objects_inflight_total=2)
    by_bytes = Policy(max_object_size_bytes=100, max_bytes_inflight_total=150)
    for policy in (by_number, by_bytes):
        assert asked(decide(state_of(peers, policy), busy={"A": decision(1, 2)})) == {}
        assert asked(decide(state_of(peers, policy), busy={"A": decision(1)})) == {"B": [3]}


def test_make_decisions_when_called_changes_nothing():
    """Deciding writes nothing: the state is the same to the octet (OD-48)."""
    state = state_of({"A": peer([1, 2, 3], inflight=[4], owt=[5]), "B": peer([1, 2])})
    busy = {"B": decision(1)}
    before = pickle.dumps((state.__dict__, busy))
    decide(state, pool=[2], busy=busy, now=99.0, last=["A"])
    assert pickle.dumps((state.__dict__, busy)) == before


def test_make_decisions_when_peers_have_unequal_work_asks_the_one_with_the_least():
    policy = Policy(target_object_redundancy=1)
    loaded = peer([1, 2, 3, 8, 9], available=[1, 2, 3], inflight=[8, 9])
    made = decide({"A": loaded, "B": peer([1, 2, 3])}, policy=policy)
    assert (len(objects(made["A"])), len(objects(made["B"]))) == (1, 2) or asked(made) == {"B": [1, 2, 3]}
    assert objects(made["B"])[:2] == [1, 2]
    spread = decide({name: peer(range(40)) for name in "ABCD"}, policy=policy)
    assert [len(objects(item)) for item in spread.values()] == [10] * 4


def test_make_decisions_when_the_rarest_come_first_fetches_what_few_have():
    peers = {"A": peer([1, 2]), "B": peer([1]), "C": peer([1])}
    limits = {"max_num_objects_inflight_total": 1, "target_object_redundancy": 1}
    assert list(asked(decide(peers, policy=Policy(**limits, rarest_first=True))).values()) == [[2]]
    assert list(asked(decide({k: peer([1, 2]) for k in "AB"}, policy=Policy(**limits))).values()) == [[1]]


def test_make_decisions_when_octets_are_limited_keeps_within_them():
    policy = Policy(max_object_size_bytes=10, max_bytes_inflight_per_peer=35)
    assert asked(decide({"A": peer(range(9), size=10)}, policy=policy)) == {"A": [0, 1, 2]}
    waiting = peer(range(9), available=range(2, 9), owt=[0], inflight=[1], size=10)
    assert asked(decide({"A": waiting}, policy=policy)) == {"A": [2]}
    total = Policy(max_object_size_bytes=10, max_bytes_inflight_per_peer=35, max_bytes_inflight_total=55)
    made = decide({"A": peer(range(9), size=10), "B": peer(range(10, 19), size=10)}, policy=total)
    assert sum(len(objects(item)) for item in made.values()) == 5


def test_make_decisions_when_a_large_object_does_not_fit_lets_no_smaller_one_pass():
    big = peer([1, 2, 9], available=[1, 2], inflight=[9], size=3)
    big.available[ids(1)[0]] = 10
    policy = Policy(max_object_size_bytes=10, max_bytes_inflight_per_peer=12)
    assert asked(decide({"A": big}, policy=policy)) == {}
    assert asked(decide({"A": peer([2])}, policy=policy)) == {"A": [2]}


def test_make_decisions_when_an_object_is_overdue_asks_another_peer():
    policy = Policy(target_object_redundancy=1, max_num_objects_inflight_total=1, inflight_timeout_s=2.0)
    state = state_of({"A": peer([1], available=[], inflight=[1], since=10.0), "B": peer([1])}, policy)
    assert asked(decide(state, now=11.9)) == {}
    assert asked(decide(state, now=12.0)) == {"B": [1]}
    never = state_of(
        {"A": peer([1], available=[], inflight=[1]), "B": peer([1])},
        Policy(target_object_redundancy=1, inflight_timeout_s=0.0),
    )
    assert asked(decide(never, now=1e9)) == {}


def test_make_decisions_when_a_peer_is_overdue_still_counts_its_objects_against_it():
    policy = Policy(max_num_objects_inflight_per_peer=2)
    late = peer([1, 2, 3, 4], available=[3, 4], inflight=[1, 2])
    assert asked(decide({"A": late}, policy=policy, now=99.0)) == {}
    assert asked(decide({"A": peer([2, 3, 4], available=[3, 4], inflight=[2])}, policy=policy, now=99.0)) == {"A": [3]}


def test_make_decisions_when_a_late_object_comes_after_all_is_acknowledged_and_not_asked_again():
    state = state_of({name: peer([1]) for name in "ABC"}, Policy(target_object_redundancy=1))
    state.on_request_objects("A", ids(1), now=0.0)
    assert len(asked(decide(state, now=5.0))) == 1
    state.on_request_objects("B", ids(1), now=5.0)
    state.on_receive_objects("A", ids(1), [(ids(1)[0], b"x")], now=5.1)
    assert (asked(decide(state, now=5.1)), decide(state, now=5.1)["A"].ids_to_ack) == ({}, 1)
    state.on_receive_objects("B", ids(1), [(ids(1)[0], b"x")], now=5.2)
    state.on_pool_done("A", ids(1))
    state.on_pool_done("B", ids(1))
    made = decide(state, pool=[1], now=5.3)
    assert (asked(made), [item.ids_to_ack for item in made.values()]) == ({}, [1, 1, 1])
    check_index(state)


def test_make_decisions_when_a_peer_was_late_asks_it_last():
    policy = Policy(target_object_redundancy=1)
    state = state_of({"A": peer([1, 2, 3]), "B": peer([1, 3, 4, 5, 6, 7])}, policy)
    state.on_request_objects("A", ids(1), now=0.0)
    state.on_receive_objects("A", ids(1), [(ids(1)[0], b"x")], now=3.0)
    assert asked(decide(state, pool=[1], now=3.0)) == {"A": [2], "B": [3, 4, 5, 6, 7]}
    overdue = {"A": peer([1, 2, 3, 9], available=[1, 2, 3], inflight=[9]), "B": peer([1, 3, 4])}
    assert asked(decide(overdue, policy=policy, now=3.0)) == {"A": [2], "B": [1, 3, 4]}
    named = {"A": peer([1, 2, 3]), "B": peer([1, 3, 4])}
    assert asked(decide(named, policy=policy, last=["A"])) == {"A": [2], "B": [1, 3, 4]}


def test_make_decisions_when_the_good_peers_are_full_asks_the_late_one():
    policy = Policy(target_object_redundancy=1, max_num_objects_inflight_per_peer=2)
    made = decide({"A": peer([1, 2, 3]), "B": peer([1, 2, 3])}, policy=policy, last=["B"])
    assert asked(made) == {"A": [1, 2], "B": [3]}


@given(st.sets(st.integers(0, 3000), min_size=1))
def test_bit_at_when_counted_from_the_lowest_finds_each(positions):
    bits = sum(1 << position for position in positions)
    assert [bit_at(bits, index) for index in range(len(positions))] == sorted(positions)


@st.composite
def contexts(draw):
    size = st.integers(1, 10) | st.none()
    peers = {}
    for name in range(draw(st.integers(1, 5))):
        item = peer(draw(st.permutations(range(8)))[: draw(st.integers(0, 8))], ids_in_flight=draw(st.integers(0, 9)))
        peers[name] = item
        item.available = {key: draw(size) for key in item.fifo}
    policy = Policy(
        max_num_objects_outstanding=draw(st.integers(1, 20)),
        max_num_ids_req=draw(st.integers(1, 10)),
        max_num_objects_inflight_per_peer=draw(st.integers(1, 6)),
        max_num_objects_inflight_total=draw(st.integers(1, 30)),
        target_object_redundancy=draw(st.integers(1, 4)),
        max_object_size_bytes=10,
        max_bytes_inflight_per_peer=draw(st.integers(10, 60)),
        max_bytes_inflight_total=draw(st.integers(10, 200)),
        inflight_timeout_s=draw(st.sampled_from([0.0, 2.0])),
        rarest_first=draw(st.booleans()),
    )
    state = state_of(peers, policy)
    busy = {}
    for name, item in peers.items():
        wanted = draw(st.lists(st.sampled_from(ids(*range(8))), unique=True)) if item.available else []
        for key in wanted:
            if key in item.available and len(item.inflight) < policy.max_num_objects_inflight_per_peer:
                room = policy.max_bytes_inflight_per_peer - item.inflight_bytes - item.owt_bytes
                if policy.room_for(item.available[key]) <= room:
                    state.on_request_objects(name, [key], now=len(item.inflight) / 2)
        for key in list(item.inflight):
            if draw(st.integers(0, 3)) == 0:
                entry = item.inflight[key]
                state.on_receive_objects(name, [key], [(key, bytes(entry.size_bytes))], now=draw(st.floats(1, 3)))
        if draw(st.integers(0, 3)) == 0:
            busy[name] = PeerDecision(objects_to_req_ids=frozenset(draw(st.lists(st.sampled_from(ids(*range(8)))))))
    pool = set(draw(st.lists(st.sampled_from(ids(*range(8))), max_size=4)))
    last = draw(st.lists(st.sampled_from(list(peers))))
    now = draw(st.floats(2, 6))
    seed = draw(st.integers(0, 9))
    return DecisionContext(state=state, has_object=pool.__contains__, busy=busy, last=last, now=now, seed=seed)


@given(contexts())
def test_make_decisions_when_compared_with_a_plain_model_decides_the_same(context):
    check_index(context.state)
    assert make_decisions(context) == plain_decisions(context)


@given(contexts())
def test_make_decisions_when_carried_out_exceeds_no_limit(context):
    state = context.state
    for name, item in make_decisions(context).items():
        if item.objects_to_req_ids:
            state.on_request_objects(name, item.objects_to_req_ids, now=context.now)
        if item.ids_to_req:
            state.on_request_ids(name, item.ids_to_ack, item.ids_to_req)
    check_index(state)
