"""Which peer: peak EWMA latencies, two choices, quantiles."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.scheduler.policies.choice import two_choices
from flowctl.scheduler.policies.latency import DECAY_S, PeakEwma
from flowctl.scheduler.policies.quantile import LatencyQuantile


def test_latency_when_an_answer_is_slow_rises_at_once_and_falls_slowly():
    """A peak is the average at once; one fast answer does not make up for it."""
    peer = PeakEwma()
    for latency_s, now in ((0.1, 1.0), (2.0, 2.0), (0.1, 3.0)):
        peer.sent()
        peer.ended(latency_s, now)
    assert 1.7 < peer.average_s < 2.0
    assert peer.cost(3.0) == pytest.approx(peer.average_s)
    assert peer.cost(3.0 + 3 * DECAY_S) < 0.1


def test_latency_when_messages_are_in_flight_costs_as_many_times():
    """Two peers of the same latency differ by what they have to do already."""
    peer = PeakEwma()
    peer.sent()
    peer.ended(0.2, 1.0)
    peer.sent()
    peer.sent()
    assert peer.cost(1.0) == pytest.approx(0.6)
    peer.withdrawn()
    assert peer.cost(1.0) == pytest.approx(0.4)


def test_latency_when_nothing_is_known_is_asked_once():
    """An unknown peer is free while idle, and dearer than any other while its first message is under way."""
    fresh, slow = PeakEwma(), PeakEwma()
    slow.sent()
    slow.ended(1000.0, 0.0)
    assert fresh.cost(0.0) == 0
    fresh.sent()
    assert fresh.cost(0.0) > slow.cost(0.0)


@given(st.lists(st.floats(0.0, 10.0), max_size=30), st.integers())
def test_two_choices_when_drawn_to_the_end_names_each_once(costs, seed):
    """Whatever the costs, all are yielded, none twice."""
    drawn = list(two_choices(len(costs), costs.__getitem__, Random(seed)))
    assert sorted(drawn) == list(range(len(costs)))


def test_two_choices_when_one_of_many_is_dear_hardly_takes_it_first():
    """The dearest is first only if it was drawn twice, which cannot be: it never is, as long as there are two."""
    costs = [1.0] * 9 + [100.0]
    rng = Random(1)
    first = [next(two_choices(10, costs.__getitem__, rng)) for _ in range(500)]
    assert 9 not in first
    assert set(first) == set(range(9))


def test_two_choices_when_few_are_taken_of_many_looks_at_few():
    """The first of ten thousand costs two looks, not ten thousand."""
    looked = []
    taken = list(islice(two_choices(10_000, lambda number: looked.append(number) or 0.0, Random(1)), 3))
    assert len(taken) == 3
    assert len(looked) == 6


def test_quantile_when_latencies_are_known_is_right_to_a_bucket():
    """The quantile is found to within a bucket of 9 %, above."""
    found = LatencyQuantile(0.9)
    assert found.value_s() is None
    for number in range(1, 1001):
        found.observe(number / 1000)
    assert 0.88 <= found.value_s() <= 1.0


def test_quantile_when_latencies_change_follows():
    """What was long ago is forgotten by halves."""
    found = LatencyQuantile(0.5)
    for latency_s in [0.01] * 5000 + [1.0] * 5000:
        found.observe(latency_s)
    assert found.value_s() == pytest.approx(1.0, rel=0.1)


@given(st.lists(st.floats(0.0, 1e6), min_size=20, max_size=100))
def test_quantile_when_any_latencies_come_is_none_below_the_least(latencies):
    """Any latencies, none and days among them, give a value above zero that is not beyond the largest bucket."""
    found = LatencyQuantile(0.95)
    for latency_s in latencies:
        found.observe(latency_s)
    assert 0 < found.value_s() <= 600
