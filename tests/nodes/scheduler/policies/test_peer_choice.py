"""Which peer: peak EWMA latencies, two choices, quantiles."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import peer_of

from flowctl.core.outcomes.pending import Outcome
from flowctl.nodes.scheduler.policies.choice import DECAY_S, FAILURE_S, PeakEwma, TwoChoices
from flowctl.nodes.scheduler.requests.hedging import LatencyQuantile


def test_latency_when_an_answer_is_slow_rises_at_once_and_falls_slowly():
    known = PeakEwma()
    for latency_s, now in ((0.1, 1.0), (2.0, 2.0), (0.1, 3.0)):
        known.observe(latency_s, now)
    assert 1.7 < known.average_s < 2.0
    assert known.fading_s(3.0) == pytest.approx(known.average_s)
    assert known.fading_s(3.0 + 3 * DECAY_S) < 0.1


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30), st.integers())
def test_two_choices_when_taken_to_the_end_give_each_peer_once(loads, seed):
    choice = TwoChoices(Random(seed))
    peers = [peer_of(number, in_flight=load) for number, load in enumerate(loads)]
    for peer in peers:
        choice.add(peer)
    taken = [choice.take() for _ in peers[: len(peers) // 2]]
    late = peer_of(99)
    choice.add(late)
    while (peer := choice.take()) is not None:
        taken.append(peer)
    assert sorted(peer.peer_id for peer in taken) == sorted([*range(len(peers)), 99])


def first_of(ended, loads, seeds=300) -> set[int]:
    found = set()
    for seed in range(seeds):
        choice = TwoChoices(Random(seed))
        for number, load in enumerate(loads):
            peer = peer_of(number, in_flight=load)
            for outcome, latency_s in ended[number]:
                choice.ended(peer, outcome, latency_s, 1.0)
            choice.add(peer)
        found.add(choice.take().peer_id)
    return found


def test_two_choices_when_one_of_four_is_slowest_never_begin_with_it():
    ended = [[(Outcome.RESPONSE, 0.1)]] * 3 + [[(Outcome.RESPONSE, 0.5)]]
    assert first_of(ended, [0, 0, 0, 0]) == {0, 1, 2}
    assert first_of(ended[2:], [9, 0]) == {1}, "ten times a tenth of a second is more than half a second"


def test_two_choices_when_a_peer_is_unknown_ask_it_once():
    ended = [[(Outcome.RESPONSE, 100.0)], []]
    assert first_of(ended, [0, 0]) == {1}
    assert first_of(ended, [0, 1]) == {0}


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.TIMEOUT])
def test_two_choices_when_a_peer_fails_fast_do_not_like_it_most(outcome):
    ended = [[(outcome, 0.001)], [(Outcome.RESPONSE, FAILURE_S / 2)]]
    assert first_of(ended, [0, 0]) == {1}


def test_quantile_when_latencies_are_known_is_right_to_a_bucket():
    found = LatencyQuantile(0.9)
    assert found.value_s() is None
    for number in range(1, 1001):
        found.observe(number / 1000)
    assert 0.88 <= found.value_s() <= 1.0


def test_quantile_when_latencies_change_follows():
    found = LatencyQuantile(0.5)
    for latency_s in [0.01] * 5000 + [1.0] * 5000:
        found.observe(latency_s)
    assert found.value_s() == pytest.approx(1.0, rel=0.1)


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 1e6), min_size=20, max_size=100))
def test_quantile_when_any_latencies_come_is_none_below_the_least(latencies):
    found = LatencyQuantile(0.95)
    for latency_s in latencies:
        found.observe(latency_s)
    assert 0 < found.value_s() <= 600
