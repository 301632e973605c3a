"""Decisions of object diffusion: who is asked for what."""

from __future__ import annotations

from flowctl.diffusion.decision import DecisionContext, PeerDecision, make_decisions
from flowctl.diffusion.policy import Policy
from flowctl.diffusion.state import DecisionGlobalState, Inflight, PeerState


def ids(*numbers):
    """Return object ids that sort as the numbers do."""
    return [number.to_bytes(4, "big") for number in numbers]


def peer(fifo=(), available=None, inflight=(), owt=(), ids_in_flight=0, since=0.0, size=1):
    """Return a peer's state made of numbers; all of the FIFO is available unless said otherwise."""
    available = fifo if available is None else available
    return PeerState(
        fifo=dict.fromkeys(ids(*fifo)),
        available=dict.fromkeys(ids(*available), size),
        inflight={key: Inflight(size, since) for key in ids(*inflight)},
        owt={key: bytes(size) for key in ids(*owt)},
        ids_in_flight=ids_in_flight,
    )


def decide(peers, *, pool=(), policy=None, busy=None, last=(), now=0.0, seed=1):
    """Return the decisions for peers with the objects as numbers."""
    state = DecisionGlobalState(policy or Policy())
    for name, item in peers.items():
        state.register(name, item)
    has = set(ids(*pool)).__contains__
    return make_decisions(DecisionContext(state=state, has_object=has, busy=busy or {}, last=last, now=now, seed=seed))


def objects(decision):
    """Return the objects of a decision as a sorted list of numbers."""
    return sorted(int.from_bytes(key, "big") for key in decision.objects_to_req_ids)


def test_make_decisions_when_nothing_is_known_asks_every_peer_for_ids():
    """A cold start gives every peer a request for ids (OD-34)."""
    fresh = PeerDecision(ids_to_req=10)
    assert {"A": fresh, "B": fresh} == decide({"A": peer(), "B": peer()})


def test_make_decisions_when_a_prefix_is_done_acknowledges_it():
    """What is in the pool or on its way from this peer is acknowledged, up to the first that is not (OD-36)."""
    state = peer([1, 2, 3, 4], available=[1, 4], inflight=[3], owt=[2])
    made = decide({"A": state}, pool=[1])["A"]
    assert made == PeerDecision(
        ids_to_ack=2, ids_to_req=10, can_pipeline_ids_req=True, objects_to_req_ids=frozenset(ids(4))
    )


def test_make_decisions_when_the_window_is_nearly_full_asks_for_what_is_left():
    """Ids open and ids asked for together stay within the window (OD-37)."""
    made = decide({"A": peer([1, 2], ids_in_flight=2)}, policy=Policy(max_num_objects_outstanding=5))["A"]
    assert made.ids_to_req == 1


def test_make_decisions_when_the_window_is_full_asks_for_nothing():
    """With a full window and nothing to acknowledge there is nothing to send (OD-38)."""
    policy = Policy(max_num_objects_outstanding=4)
    made = decide({"A": peer([1, 2], available=[], inflight=[1, 2], ids_in_flight=2)}, policy=policy)["A"]
    assert (made.ids_to_req, made.ids_to_ack, made.is_empty) == (0, 0, True)


def test_make_decisions_when_three_have_an_object_asks_as_many_as_wanted():
    """As many peers are asked as copies are wanted (OD-39)."""
    made = decide({name: peer([1]) for name in "ABC"}, policy=Policy(target_object_redundancy=2))
    assert sorted(objects(item) for item in made.values()) == [[], [1], [1]]
