"""Retry budgets and minute meters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policies.budget import RetryBudget
from flowctl.nodes.scheduler.policies.meters import BUCKET_S, BUCKETS, MinuteMeter


def test_budget_when_spent_allows_a_share_of_first_tries():
    budget = RetryBudget(share=0.2, least_per_s=0.0, most=10.0)
    assert [budget.take(0.0) for _ in range(11)] == [True] * 10 + [False]
    for _ in range(50):
        budget.first_try()
    assert [budget.take(0.0) for _ in range(11)].count(True) == pytest.approx(10, abs=1)
    assert budget.taken_count + budget.refused_count == 22


def test_budget_when_there_is_little_traffic_allows_some_per_second():
    budget = RetryBudget(share=0.0, least_per_s=2.0, most=1.0)
    assert [budget.take(now) for now in (0.0, 0.1, 0.6, 0.7, 1.2)] == [True, False, True, False, True]


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.just(None), st.floats(-5.0, 100.0)), max_size=200),
    st.floats(0.0, 1.0),
    st.floats(0.0, 50.0),
    st.floats(1.0, 20.0),
)
def test_budget_when_anything_happens_is_never_negative_nor_overdrawn(steps, share, least_per_s, most):
    budget = RetryBudget(share, least_per_s, most)
    firsts, times = 0, []
    for now in steps:
        if now is None:
            budget.first_try()
            firsts += 1
        else:
            budget.take(now)
            times.append(now)
        assert 0 <= budget.tokens <= most
    span_s = max(times) - times[0] if times else 0.0
    assert budget.taken_count <= most + firsts * share + span_s * least_per_s + 1e-6


@pytest.mark.parametrize("wrong", [{"share": 1.5}, {"least_per_s": -1.0}, {"most": 0.0}])
def test_budget_when_a_value_is_out_of_range_refuses(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RetryBudget(**wrong)


def test_meter_when_a_minute_passes_forgets():
    meter = MinuteMeter()
    meter.count(0.0, 100)
    meter.count(30.0, 10)
    assert meter.per_minute(59.9) == (2, 110)
    assert meter.per_minute(60.0) == (1, 10)
    assert meter.per_minute(1e9) == (0, 0)
    assert (meter.total_messages, meter.total_bytes) == (2, 110)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 400.0), st.integers(0, 1000)), max_size=80))
def test_meter_when_compared_with_a_list_agrees(events):
    meter = MinuteMeter()
    events = sorted(events)
    for now, size in events:
        meter.count(now, size)
    now = events[-1][0] if events else 0.0
    recent = [size for at, size in events if now // BUCKET_S - at // BUCKET_S < BUCKETS]
    assert meter.per_minute(now) == (len(recent), sum(recent))
