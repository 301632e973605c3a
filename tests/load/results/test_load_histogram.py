"""Delay histograms: how exact they are, and that merging is adding."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.histogram import MAX_US, DelayHistogram, bounds_of, bucket_of

DELAYS = st.lists(st.integers(0, MAX_US), min_size=1, max_size=300)


def histogram(values):
    made = DelayHistogram()
    for value in values:
        made.add(value)
    return made


@given(st.integers(0, MAX_US))
def test_bucket_when_any_value_is_counted_holds_it_and_is_narrow(value):
    low, high = bounds_of(bucket_of(value))
    assert low <= value < high
    assert high - low <= max(1, 0.02 * value)


@given(st.integers(0, MAX_US - 1))
def test_bucket_when_values_rise_never_falls(value):
    step = bucket_of(value + 1) - bucket_of(value)
    assert step in (0, 1)


@settings(max_examples=50)
@given(DELAYS, st.floats(0.01, 1.0))
def test_percentile_when_compared_with_the_values_is_within_two_percent(values, share):
    exact = sorted(values)[max(math.ceil(share * len(values)), 1) - 1] / 1000
    found = histogram(values).percentile_ms(share)
    assert abs(found - exact) <= max(0.02 * exact, 0.00101)


@settings(max_examples=50)
@given(DELAYS, DELAYS)
def test_merge_when_two_are_merged_equals_counting_all(first, second):
    merged = DelayHistogram.from_list(histogram(first).as_list())
    merged.merge(histogram(second))
    both = histogram(first + second)
    assert both.buckets == merged.buckets
    assert (both.max_us, both.count) == (merged.max_us, len(first) + len(second))


@settings(max_examples=50)
@given(DELAYS, st.integers(1, 50))
def test_sample_when_asked_for_is_sorted_bounded_and_keeps_the_median(values, most):
    made = histogram(values)
    sample = made.sample_ms(most)
    assert len(sample) == min(most, len(values))
    assert sorted(sample) == sample
    assert sample[-1] <= made.max_us / 1000 + 0.001


def test_percentile_when_nothing_was_counted_is_none():
    assert DelayHistogram().percentile_ms(0.99) is None
    assert DelayHistogram().sample_ms(10) == []


def test_bucket_when_clocks_differ_takes_negative_delays_as_none():
    assert bucket_of(-5) == 0
