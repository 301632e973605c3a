"""Fetching from many peers, some of them slow, lying, stalled or leaving: what arrives, and at which cost."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from diffusion_kit import check_index, ids
from diffusion_simulation import Remote, Simulation
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.nodes.diffusion.decision import CentralPlanner
from flowctl.nodes.diffusion.leases import LeasePlanner
from flowctl.nodes.diffusion.policy import Policy

PLANNERS = (CentralPlanner(), LeasePlanner())


def expected(remotes):
    return {key: data for remote in remotes if remote.is_honest for key, data in remote.offers.items()}


def check_all_arrived(simulation):
    """See that what must arrive has, that nothing invalid has, and that no state is left when all peers are gone."""
    remotes = simulation.remotes.values()
    valid = {key: data for remote in remotes if not remote.lies for key, data in remote.offers.items()}
    assert expected(remotes).keys() <= simulation.pool.keys()
    assert all(valid[key] == data for key, data in simulation.pool.items())
    check_index(simulation.state)
    for remote in remotes:
        if remote.is_honest:
            item = simulation.state.peers[remote.name]
            assert (item.fifo, item.available, item.inflight, item.owt) == ({}, {}, {}, {}), "not all is acknowledged"
    simulation.end()
    assert (simulation.state.peers, simulation.state.objects) == ({}, {})
    assert (simulation.state.inflight_count, simulation.state.held_bytes) == (0, 0)


@st.composite
def remotes(draw, *, honest=False):
    made = []
    for number in range(draw(st.integers(1, 6))):
        keys = draw(st.lists(st.sampled_from(ids(*range(12))), unique=True))
        more = draw(st.sets(st.sampled_from(ids(*range(10, 15))))) - set(keys)
        kind = "honest" if honest else draw(st.sampled_from(["honest", "slow", "lies", "stalls", "leaves"]))
        made.append(
            Remote(
                f"peer {number}",
                {key: key * 2 for key in keys} if kind != "lies" else {key: bytes(5) for key in keys},
                latency_s=5.0 if kind == "slow" else draw(st.floats(0.001, 0.5)),
                lies=kind == "lies",
                stalls=kind == "stalls",
                leaves_at=draw(st.floats(0, 3)) if kind == "leaves" else None,
                busy_s=draw(st.sampled_from([0.0, 0.05])),
                more={key: key * 2 for key in more} if kind != "lies" else {},
            )
        )
    return made


def limits(draw, **more):
    return Policy(
        max_num_objects_outstanding=draw(st.integers(1, 9)),
        max_num_ids_req=draw(st.integers(1, 9)),
        max_num_objects_inflight_per_peer=draw(st.integers(1, 4)),
        max_num_objects_inflight_total=draw(st.integers(1, 12)),
        target_object_redundancy=draw(st.integers(1, 3)),
        max_object_size_bytes=10,
        max_bytes_inflight_per_peer=draw(st.integers(10, 40)),
        max_bytes_inflight_total=draw(st.integers(10, 100)),
        rarest_first=draw(st.booleans()),
        **more,
    )


@settings(deadline=None)
@given(st.data())
def test_simulation_when_peers_are_of_any_kind_brings_all_objects_of_honest_ones(data):
    """All objects of honest peers arrive, copies asked for are those wanted and those given up, no limit is exceeded.

    A copy is given up when it is overdue or when its peer goes with it, each copy once.
    """
    peers = data.draw(remotes())
    planner = data.draw(st.sampled_from(PLANNERS))
    simulation = Simulation(peers, limits(data.draw), planner, data.draw(st.integers(0, 9)))
    simulation.run(until_s=2000.0)
    check_all_arrived(simulation)


@settings(deadline=None)
@given(st.data())
def test_simulation_when_all_are_honest_and_nothing_times_out_fetches_no_more_copies_than_wanted(data):
    peers = data.draw(remotes(honest=True))
    policy = limits(data.draw, inflight_timeout_s=0.0)
    simulation = Simulation(peers, policy, data.draw(st.sampled_from(PLANNERS)), 1)
    simulation.run(until_s=2000.0)
    assert simulation.received.keys() == expected(peers).keys()
    assert simulation.received == simulation.requests
    assert max(simulation.received.values(), default=0) <= policy.target_object_redundancy
    check_all_arrived(simulation)


@pytest.mark.parametrize("planner", PLANNERS, ids=["central", "leases"])
def test_simulation_when_there_are_many_peers_gives_slow_ones_less(planner):
    rng = Random(4)
    keys = ids(*range(300))
    made = []
    for number in range(40):
        kind = ("fast", "fast", "fast", "slow", "lies", "stalls", "leaves", "fast")[number % 8]
        offers = {key: key if kind != "lies" else b"liar" for key in rng.sample(keys, 150)}
        latency_s = 0.5 if kind == "slow" else 0.05
        leaves_at = rng.random() if kind == "leaves" else None
        made.append(
            Remote(f"{kind} {number}", offers, latency_s, kind == "lies", kind == "stalls", leaves_at, busy_s=0.01)
        )
    policy = Policy(target_object_redundancy=1, max_num_objects_inflight_per_peer=10)
    simulation = Simulation(made, policy, planner, 7)
    simulation.run(until_s=300.0)
    by_kind = Counter()
    for name, count in simulation.delivered.items():
        by_kind[name.split()[0]] += count
    assert by_kind["slow"] / 5 < by_kind["fast"] / 20 / 3
    assert sum(simulation.received.values()) < 1.5 * len(keys)
    check_all_arrived(simulation)
