"""The seen-set: highest number and gaps below it, as intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.nodes.messenger.seen import NumberVerdict, SeenNumbers, WhenFull


def numbers_in(gaps: list[tuple[int, int]]) -> set[int]:
    return {number for first, last in gaps for number in range(first, last + 1)}


@pytest.mark.parametrize(
    ("numbers", "first_times", "highest", "complement"),
    [
        pytest.param([0, 1, 3, 2, 2, 3], "TTTTFF", 3, set(), id="ME-14"),
        pytest.param([2, 2, 2], "TFF", 2, {0, 1}, id="ME-16 repeated"),
        pytest.param([10, 9, 8, 7], "TTTT", 10, set(range(7)), id="ME-16 descending"),
        pytest.param([5, 3], "TT", 5, {0, 1, 2, 4}, id="ME-17"),
    ],
)
def test_numbers_when_out_of_order_are_each_new_once(numbers, first_times, highest, complement):
    """What is lower than the first number seen is new too, and nothing twice (ME-14, ME-16, ME-17)."""
    seen = SeenNumbers()
    assert "".join("FT"[seen.first_time(number)] for number in numbers) == first_times
    assert (seen.highest, numbers_in(seen.gaps)) == (highest, complement)


@given(st.lists(st.integers(0, 40), max_size=120), st.sampled_from(WhenFull))
def test_numbers_when_in_any_order_agree_with_a_plain_set(numbers, at_most):
    """The intervals say what a set of all numbers seen would say, and are as few as can be."""
    seen, model = SeenNumbers(at_most), set()
    for number in numbers:
        assert seen.judge(number) is (NumberVerdict.SEEN if number in model else NumberVerdict.NEW)
        assert seen.first_time(number) is (number not in model)
        model.add(number)
    assert seen.highest == max(model, default=-1)
    assert numbers_in(seen.gaps) == set(range(seen.highest + 1)) - model
    assert all(last + 1 < first for (_, last), (first, _) in zip(seen.gaps, seen.gaps[1:], strict=False))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=80))
def test_floor_when_raised_settles_all_below_it(steps):
    seen, model, floor = SeenNumbers(), set(), 0
    for is_floor, number in steps:
        if is_floor:
            seen.settle(number)
            floor = max(floor, number)
        else:
            assert seen.first_time(number) is (number >= floor and number not in model)
            model.add(number)
        done = model | set(range(floor))
        assert numbers_in(seen.gaps) == set(range(seen.highest + 1)) - done
        assert seen.highest == max(done, default=-1)


@given(st.lists(st.integers(0, 40)), st.integers(0, 45), st.integers(0, 30), st.sampled_from(WhenFull))
def test_numbers_when_forgotten_from_one_on_are_new_again(numbers, end, floor, at_most):
    seen = SeenNumbers(at_most)
    for number in numbers:
        seen.first_time(number)
    seen.settle(floor)
    seen.forget_from(end)
    done = {number for number in {*numbers, *range(floor)} if number < end}
    assert seen.highest == max(done, default=-1)
    assert numbers_in(seen.gaps) == set(range(seen.highest + 1)) - done
    for number in range(50):
        assert seen.first_time(number) is (number not in done)


def test_gaps_when_as_many_as_are_kept_refuse_what_would_open_another():
    seen = SeenNumbers(WhenFull.REFUSE, 2)
    assert [seen.first_time(number) for number in (1, 3)] == [True, True]
    assert seen.judge(5) is NumberVerdict.FULL
    assert seen.first_time(5) is False
    assert [seen.first_time(number) for number in (4, 0, 6)] == [True, True, True]
    assert seen.gaps == [(2, 2), (5, 5)]
    wide = SeenNumbers(WhenFull.REFUSE, 1)
    wide.first_time(10)
    assert (wide.judge(5), wide.judge(0), wide.judge(9)) == (NumberVerdict.FULL, NumberVerdict.NEW, NumberVerdict.NEW)


def test_gaps_when_as_many_as_are_kept_forget_the_lowest_and_say_so():
    seen = SeenNumbers(WhenFull.FORGET, 2)
    assert [seen.first_time(number) for number in (1, 3, 5)] == [True, True, True]
    assert seen.gaps == [(2, 2), (4, 4)]
    assert [seen.judge(number) for number in (0, 1, 2, 3)] == [
        NumberVerdict.OLD,
        NumberVerdict.SEEN,
        NumberVerdict.NEW,
        NumberVerdict.SEEN,
    ]
    assert seen.first_time(0) is False


def test_numbers_when_a_million_are_for_others_cost_one_gap():
    """A jump is one interval, not a million numbers (ME-22)."""
    seen = SeenNumbers(WhenFull.FORGET)
    assert seen.first_time(0)
    assert seen.first_time(1_000_001)
    assert seen.gaps == [(1, 1_000_000)]
    assert seen.first_time(2**64 - 1)
    assert len(seen.gaps) == 2


def test_runs_when_restored_are_what_was_seen():
    seen = SeenNumbers()
    seen.restore([(0, 4), (7, 9)])
    assert [seen.first_time(number) for number in (4, 5, 7, 10)] == [False, True, False, True]
    assert seen.gaps == [(6, 6)]
