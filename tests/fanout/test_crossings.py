"""Crossings: who is due when a log grows, against a dictionary; and that old places do not pile up."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.fanout.crossings import Crossings
from flowctl.core.flow.limits import OFF_MARK


class Unordered:
    """An item like a Sender: it can be hashed but not compared."""

    __slots__ = ()


class Mortal:
    """An item whose end can be seen."""


def test_forget_when_it_was_the_last_one_keeps_nobody_alive():
    crossings = Crossings()
    item = Mortal()
    gone = weakref.ref(item)
    for offset in (10, 20):
        crossings.watch(item, offset, offset)
    crossings.forget(item)
    del item
    assert (crossings.next_offset, crossings.next_sequence) == (OFF_MARK, OFF_MARK)
    assert gone() is None


def test_next_places_when_nobody_is_watched_are_never():
    crossings = Crossings()
    assert (crossings.next_offset, crossings.next_sequence) == (OFF_MARK, OFF_MARK)
    crossings.watch("item", 3, OFF_MARK)
    crossings.due(3, 0)
    assert (crossings.next_offset, crossings.next_sequence) == (OFF_MARK, OFF_MARK)


def test_watch_when_places_are_equal_never_compares_items():
    crossings, items = Crossings(), [Unordered() for _ in range(50)]
    for item in items:
        crossings.watch(item, 7, 7)
    assert set(crossings.due(7, 7)) == set(items)


def rising(step):
    return 10**6 + step


def falling(step):
    return 10**6 - step


def never(_step):
    return OFF_MARK


@pytest.mark.parametrize("offset", [rising, falling, never])
@pytest.mark.parametrize("sequence", [rising, falling])
def test_watch_when_repeated_for_ever_keeps_the_heaps_small(offset, sequence):
    crossings = Crossings()
    for step in range(10_000):
        crossings.watch(step % 10, offset(step), sequence(step))
    assert len(crossings) == 10
    assert max(len(crossings._by_offset), len(crossings._by_sequence)) <= 4 * 10 + 16
    assert sorted(crossings.due(0, 2 * 10**6)) == list(range(10))


places = st.one_of(st.integers(0, 60), st.just(OFF_MARK))
calls = st.one_of(
    st.tuples(st.just("watch"), st.integers(0, 5), places, places),
    st.tuples(st.just("forget"), st.integers(0, 5), st.just(0), st.just(0)),
    st.tuples(st.just("due"), st.just(0), st.integers(0, 60), st.integers(0, 60)),
)


@given(st.lists(calls, max_size=120))
@settings(max_examples=200, deadline=None)
def test_crossings_for_any_calls_do_what_a_dictionary_does(history):
    crossings, watched = Crossings(), {}
    for name, item, offset, sequence in history:
        if name == "watch":
            crossings.watch(item, offset, sequence)
            watched[item] = (offset, sequence)
            if min(offset, sequence) >= OFF_MARK:
                del watched[item]
        elif name == "forget":
            crossings.forget(item)
            watched.pop(item, None)
        else:
            expected = {key for key, place in watched.items() if place[0] <= offset or place[1] <= sequence}
            must_ask = offset >= crossings.next_offset or sequence >= crossings.next_sequence
            assert must_ask or not expected, "the places to ask at would have missed one"
            due = crossings.due(offset, sequence)
            assert len(due) == len(set(due))
            assert set(due) == expected
            watched = {key: place for key, place in watched.items() if key not in expected}
        assert len(crossings) == len(watched)
        nearest = [min((place[axis] for place in watched.values()), default=OFF_MARK) for axis in (0, 1)]
        assert crossings.next_offset <= nearest[0]
        assert crossings.next_sequence <= nearest[1]
        if name == "due":  # forgetting may leave a place that is asked at in vain, once
            assert [crossings.next_offset, crossings.next_sequence] == nearest
