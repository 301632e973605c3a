"""What a round of decisions of object diffusion costs, as peers and objects grow.

Run ``python bench diffusion``. Beside it stands the plainest thing that decides the same: for each object ask each
peer, with nothing kept between rounds. Both are given the same state and the same seed, and make the same decisions.
``pairs`` counts what peers have available, which is what there is to choose from; ``given_out`` what a round gives
out, with all copies. But for the first case the totals are so high that every object is given out. ``leases_ms`` is the
other planner, in which each peer claims at most 8 objects. The least processor
time of several rounds counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from random import Random
from typing import Any, Final

from flowctl.nodes.diffusion.decision import DecisionContext, Decisions, PeerDecision, make_decisions
from flowctl.nodes.diffusion.leases import LeasePlanner
from flowctl.nodes.diffusion.objects import ObjectId, PeerId
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.state import DecisionGlobalState, PeerState
from kit.tables import table

SIZES: Final = ((10, 50), (100, 500), (1000, 5000))
QUICK: Final[dict[str, Any]] = {"sizes": SIZES[:2], "repeat": 2}
_MOST_PLAIN: Final = 60_000_000
"""Peers times peers times objects beyond which the plain way is not asked: it would take minutes."""


def plain_decisions(context: DecisionContext) -> Decisions:
    """Decide as `make_decisions` does, in the plainest way: everything is looked up where it is needed."""
    policy, state = context.policy, context.state
    fresh_after = context.now - policy.inflight_timeout_s if policy.inflight_timeout_s else float("-inf")
    pending = sorted((peer for peer in state.peers if peer not in context.busy), key=lambda peer: _slot(context, peer))
    given: dict[PeerId, list[ObjectId]] = {peer: [] for peer in pending}

    def wait(peer: PeerId) -> list[ObjectId]:
        """Return what is given to a pending peer, or what a busy one has decided and not asked for."""
        if peer in given:
            return given[peer]
        return [key for key in context.busy[peer].objects_to_req_ids if key in state.peers[peer].available]

    def fresh(peer: PeerId) -> list[ObjectId]:
        """Return what is in flight from a peer and in time."""
        return [key for key, item in state.peers[peer].inflight.items() if item.since > fresh_after]

    def copies(object_id: ObjectId) -> int:
        return sum(
            (object_id in item.inflight and item.inflight[object_id].since > fresh_after)
            or object_id in item.owt
            or object_id in wait(peer)
            for peer, item in state.peers.items()
        )

    def held(peer: PeerId, *, all_inflight: bool) -> int:
        item = state.peers[peer]
        sizes = [item.inflight[key].size_bytes for key in (item.inflight if all_inflight else fresh(peer))]
        return sum(sizes) + sum(map(len, item.owt.values())) + sum(_size(context, peer, key) for key in wait(peer))

    def load(peer: PeerId) -> tuple[bool, int]:
        item = state.peers[peer]
        late = peer in context.last or len(fresh(peer)) < len(item.inflight) or item.penalty_now(context.now) >= 1
        return late, len(item.inflight) + len(given[peer])

    wanted = {key for peer in pending for key in state.peers[peer].available if not context.has_object(key)}
    order = sorted(wanted)
    if policy.rarest_first:
        order.sort(key=lambda key: sum(key in item.available for item in state.peers.values()))
    rng = Random(context.seed)
    able = set(pending)
    for key in order:
        providers = [peer for peer in pending if key in state.peers[peer].available]
        while copies(key) < policy.target_object_redundancy:
            under_way = sum(len(fresh(peer)) + len(wait(peer)) for peer in state.peers)
            if under_way >= policy.max_num_objects_inflight_total:
                return _decided(context, given)
            ready = [
                peer for peer in providers if peer in able and load(peer)[1] < policy.max_num_objects_inflight_per_peer
            ]
            if not ready:
                break
            least = min(map(load, ready))
            ready = [peer for peer in ready if load(peer) == least]
            peer = ready[int(rng.random() * len(ready)) if len(ready) > 1 else 0]
            providers.remove(peer)
            size_bytes = _size(context, peer, key)
            if held(peer, all_inflight=True) + size_bytes > policy.max_bytes_inflight_per_peer:
                able.remove(peer)
            elif (
                sum(held(other, all_inflight=False) for other in state.peers) + size_bytes
                > policy.max_bytes_inflight_total
            ):
                return _decided(context, given)
            else:
                given[peer].append(key)
    return _decided(context, given)


def _slot(context: DecisionContext, peer: PeerId) -> int:
    return context.state.peers[peer].slot


def _size(context: DecisionContext, peer: PeerId, key: ObjectId) -> int:
    size_bytes = context.state.peers[peer].available[key]
    return context.policy.max_object_size_bytes if size_bytes is None else size_bytes


def _decided(context: DecisionContext, given: dict[PeerId, list[ObjectId]]) -> Decisions:
    """Return the decisions: what was given, and what is said about ids."""
    made: Decisions = {}
    for peer, keys in given.items():
        item = context.state.peers[peer]
        fifo = list(item.fifo)
        ack = 0
        while ack < len(fifo) and (context.has_object(fifo[ack]) or fifo[ack] in item.owt):
            ack += 1
        room = context.policy.max_num_objects_outstanding - (len(fifo) - ack) - item.ids_in_flight
        made[peer] = PeerDecision(
            ids_to_ack=ack,
            ids_to_req=max(0, min(room, context.policy.max_num_ids_req)),
            can_pipeline_ids_req=ack < len(fifo),
            objects_to_req_ids=frozenset(keys),
        )
    return made


def state_of(peers: int, announced: Callable[[Random, int], list[int]], policy: Policy) -> DecisionGlobalState:
    """Return a state in which each peer has announced some objects, and nothing is under way."""
    rng = Random(1)
    state = DecisionGlobalState(policy)
    for number in range(peers):
        keys = [key.to_bytes(32, "big") for key in announced(rng, number)]
        sizes: dict[ObjectId, int | None] = dict.fromkeys(keys, 1000)
        state.register(number, PeerState(fifo=dict.fromkeys(keys), available=sizes))
    return state


def cases(peers: int, objects: int) -> dict[str, tuple[DecisionGlobalState, bool]]:
    """Return states by name, and whether the pool has all objects there."""
    unlimited: dict[str, Any] = {"max_num_objects_inflight_total": 1 << 20, "max_bytes_inflight_total": 1 << 34}
    wide = Policy(max_num_objects_outstanding=max(100, objects), **unlimited)

    def some(rng: Random, _: int) -> list[int]:
        return sorted(rng.sample(range(objects), min(100, objects)))

    def own(_: Random, number: int) -> list[int]:
        return list(range(number * 100, number * 100 + 100))

    return {
        "100 each, default limits": (state_of(peers, some, Policy()), False),
        "100 each": (state_of(peers, some, Policy(**unlimited)), False),
        "100 of its own each": (state_of(peers, own, Policy(**unlimited)), False),
        "all have all": (state_of(peers, lambda *_: list(range(objects)), wide), False),
        "all have all, in the pool": (state_of(peers, lambda *_: list(range(objects)), wide), True),
    }


def round_ms(planner: Callable[[DecisionContext], Decisions], context: DecisionContext, repeat: int) -> float:
    """Return the least processor time of a round, in milliseconds."""
    least = float("inf")
    for _ in range(repeat):
        began = time.thread_time()
        planner(context)
        least = min(least, time.thread_time() - began)
    return least * 1000


def run(sizes: tuple[tuple[int, int], ...] = SIZES, repeat: int = 9) -> list[dict[str, Any]]:
    """Measure rounds of each size."""
    rows = []
    for peers, objects in sizes:
        for case, (state, has_all) in cases(peers, objects).items():
            pool = frozenset(state.objects if has_all else ())
            context = DecisionContext(state=state, has_object=pool.__contains__)
            ours = round_ms(make_decisions, context, repeat)
            plain = None
            if peers * peers * len(state.objects) <= _MOST_PLAIN:
                plain = round_ms(plain_decisions, context, 1)
            rows.append(
                {
                    "case": case,
                    "peers": peers,
                    "objects": len(state.objects),
                    "pairs": sum(len(item.available) for item in state.peers.values()),
                    "given_out": sum(len(item.objects_to_req_ids) for item in make_decisions(context).values()),
                    "round_ms": round(ours, 2),
                    "leases_ms": round(round_ms(LeasePlanner().decide, context, repeat), 2),
                    "plain_ms": None if plain is None else round(plain, 1),
                    "times": None if plain is None else round(plain / ours, 1),
                }
            )
    return rows


def main() -> None:
    """Measure with the sizes asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, help="default: 10, 100, 1000")
    parser.add_argument("--objects", type=int, default=5000)
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    sizes = SIZES if arguments.peers is None else ((arguments.peers, arguments.objects),)
    print(table(run(sizes, arguments.repeat)))


if __name__ == "__main__":
    main()
