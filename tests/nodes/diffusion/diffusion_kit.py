"""States and decisions of object diffusion written with numbers for objects."""

from __future__ import annotations

from flowctl.nodes.diffusion.decision import DecisionContext, make_decisions
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.state import DecisionGlobalState, Inflight, PeerState


def ids(*numbers):
    return [number.to_bytes(4, "big") for number in numbers]


def numbers(object_ids):
    return [int.from_bytes(key, "big") for key in object_ids]


def peer(fifo=(), available=None, inflight=(), owt=(), ids_in_flight=0, since=0.0, size=1):
    """Return a peer's state; all of the FIFO is available unless said otherwise."""
    return PeerState(
        fifo=dict.fromkeys(ids(*fifo)),
        available=dict.fromkeys(ids(*(fifo if available is None else available)), size),
        inflight={key: Inflight(size, since) for key in ids(*inflight)},
        owt={key: bytes(size) for key in ids(*owt)},
        ids_in_flight=ids_in_flight,
    )


def state_of(peers, policy=None):
    state = DecisionGlobalState(policy or Policy())
    for name, item in peers.items():
        state.register(name, item)
    return state


def decide(peers, *, pool=(), policy=None, busy=None, last=(), now=0.0, seed=1, planner=make_decisions):
    state = peers if isinstance(peers, DecisionGlobalState) else state_of(peers, policy)
    has = set(ids(*pool)).__contains__
    return planner(DecisionContext(state=state, has_object=has, busy=busy or {}, last=last, now=now, seed=seed))


def objects(decision):
    return numbers(sorted(decision.objects_to_req_ids))


def asked(decisions):
    return {name: objects(item) for name, item in decisions.items() if item.objects_to_req_ids}


def check_index(state):
    """See that the index and the totals say what the peers say, and that the sets of a peer are disjoint."""
    providers, copies = {}, {}
    for item in state.peers.values():
        assert item.available.keys() <= item.fifo.keys()
        assert not item.available.keys() & (item.inflight.keys() | item.owt.keys())
        assert not item.inflight.keys() & item.owt.keys()
        assert item.inflight_bytes == sum(entry.size_bytes for entry in item.inflight.values())
        assert item.owt_bytes == sum(map(len, item.owt.values()))
        for key in item.available:
            providers[key] = providers.get(key, 0) | 1 << item.slot
        for key in [*item.inflight, *item.owt]:
            copies[key] = copies.get(key, 0) + 1
    assert {key: (known.providers, known.copies) for key, known in state.objects.items()} == {
        key: (providers.get(key, 0), copies.get(key, 0)) for key in providers.keys() | copies.keys()
    }
    assert state.inflight_count == sum(len(item.inflight) for item in state.peers.values())
    assert state.held_bytes == sum(item.inflight_bytes + item.owt_bytes for item in state.peers.values())
