"""Offsets between clocks, by what is delayed least."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from flowctl.core.outcomes.offsets import LeastOffset


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), min_size=1))
def test_least_offset_is_that_of_the_last_one_to_two_windows(steps):
    """Never of less than one, never of more than two and the longest time in which nothing came."""
    offset, now, came = LeastOffset(5), 0, []
    for step, value in steps:
        now += step
        came.append((now, value))
        offset.add(value, now)
        assert min(value for at, value in came if now - at < 14) <= offset.least
        assert offset.least <= min(value for at, value in came if now - at < 5)


def test_least_offset_after_a_silence_is_not_taken_from_what_comes_late():
    """What was held up for long comes all at once: what came before it tells how late it is."""
    offset = LeastOffset(5)
    offset.add(1, 0)
    offset.add(31, 30)
    assert offset.least == 1
    offset.add(31, 35)
    assert offset.least == 31
    offset.restart()
    assert offset.least == inf


def test_least_offset_when_the_clock_of_arrivals_is_set_back_does_not_wait_for_it():
    offset = LeastOffset(5)
    offset.add(1, 1000)
    for now in (10, 15, 20):
        offset.add(7, now)
    assert offset.least == 7
