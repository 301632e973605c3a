"""Deadlines: order, laziness, removal, bounds, and any sequence of calls against a dictionary."""

from __future__ import annotations

import math
import threading
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.loop.deadlines import AGAIN_S, MAX_PLACES_PER_RUN, Deadlines
from flowctl.errors import LocalProtocolError


class Owner:
    def __init__(self, name: str = "", action=None) -> None:
        self.name, self.action = name, action
        self.calls: list[float] = []

    def deadline_due(self, now: float) -> None:
        self.calls.append(now)
        if self.action is not None:
            self.action(now)


@pytest.fixture
def armed() -> list[float]:
    return []


@pytest.fixture
def deadlines(armed) -> Deadlines:
    return Deadlines(armed.append)


def test_run_due_when_time_has_come_calls_in_order(deadlines):
    log = []
    owners = [Owner(str(n), lambda now, n=n: log.append(n)) for n in range(4)]
    for owner, when in zip(owners, (3.0, 1.0, 2.0, 9.0), strict=True):
        deadlines.set(owner, when)
    assert deadlines.run_due(3.0) == 3
    assert log == [1, 2, 0]
    assert deadlines.count == 1
    assert min(entry.when for entry in deadlines._entries.values()) == 9.0


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_run_due_when_an_owner_or_the_hook_raises_calls_the_others(kind, caplog):
    armed, log = [], []

    def hook(where, error) -> None:
        log.append(where)
        raise kind("hook")

    def fail(now) -> None:
        raise kind("owner")

    deadlines = Deadlines(armed.append, hook)
    owners = [Owner(action=fail), Owner(action=lambda now: log.append("after")), Owner()]
    for owner, when in zip(owners, (1.0, 2.0, 9.0), strict=True):
        deadlines.set(owner, when)
    assert deadlines.run_due(2.0) == 2
    assert log == ["deadline of Owner", "after"]
    assert armed[-1] == 9.0


def test_set_when_moved_later_touches_neither_heap_nor_timer(deadlines, armed):
    """Moving a deadline on, the common case, leaves the heap and the timer as they are; it is called once, late."""
    owner = Owner()
    deadlines.set(owner, 1.0)
    for step in range(1000):
        deadlines.set(owner, 1.0 + step)
    assert armed == [1.0]
    assert len(deadlines._heap) == 1
    assert deadlines.run_due(1.0) == 0
    assert armed == [1.0, 1000.0]
    assert deadlines.run_due(1000.0) == 1
    assert owner.calls == [1000.0]


def test_set_when_moved_to_and_fro_keeps_the_heap_small(deadlines):
    owners = [Owner() for _ in range(100)]
    for step in range(20_000):
        deadlines.set(owners[step % 100], 1e6 - step if step % 3 else 2e6)
        assert len(deadlines._heap) <= 2 * deadlines.count + 65
    for owner in owners[1:]:
        deadlines.remove(owner)
        assert len(deadlines._heap) <= 2 * deadlines.count + 65
    for _ in range(1000):
        deadlines.set(owners[0], 7.0)
        deadlines.remove(owners[0])
        assert len(deadlines._heap) <= 2 * deadlines.count + 65


def test_set_when_called_in_its_own_run_waits_for_the_next(deadlines, armed):
    """And not at once: one that sets a time that has passed, again and again, would keep its thread busy for ever."""
    owner = Owner(action=lambda now: deadlines.set(owner, now))
    deadlines.set(owner, 1.0)
    assert deadlines.run_due(4.0) == 1
    assert armed[-1] == 4.0 + AGAIN_S
    assert deadlines.run_due(4.0) == 0
    assert deadlines.run_due(4.0 + AGAIN_S) == 1
    deadlines.set(owner, 4.0)
    assert armed[-1] == 4.0, "it is called no longer: something has come that it may do something about"


def test_remove_when_due_in_the_running_run_prevents_the_call(deadlines):
    """An owner may be closed by the one called before it, and is then not called any more."""
    victim = Owner()
    killer = Owner(action=lambda now: deadlines.remove(victim))
    deadlines.set(killer, 1.0)
    deadlines.set(victim, 2.0)
    assert deadlines.run_due(3.0) == 1
    assert victim.calls == []


def test_set_when_due_in_the_running_run_postpones_the_call(deadlines):
    other = Owner()
    first = Owner(action=lambda now: deadlines.set(other, 10.0))
    deadlines.set(first, 1.0)
    deadlines.set(other, 2.0)
    assert deadlines.run_due(3.0) == 1
    assert deadlines.run_due(10.0) == 1
    assert other.calls == [10.0]


def test_run_due_when_thousands_are_due_serves_them_in_portions(deadlines, armed):
    owners = [Owner() for _ in range(MAX_PLACES_PER_RUN + 10)]
    for owner in owners:
        deadlines.set(owner, 1.0)
    assert deadlines.run_due(1.0) == MAX_PLACES_PER_RUN
    assert armed[-1] == 1.0
    assert deadlines.run_due(1.0) == 10
    assert {len(owner.calls) for owner in owners} == {1}


def test_set_when_time_is_not_finite_is_refused(deadlines):
    """Infinity and not-a-number would sit in the heap for ever, or break its order."""
    for when in (math.inf, -math.inf, math.nan):
        with pytest.raises(LocalProtocolError):
            deadlines.set(Owner(), when)
    assert len(deadlines._heap) == 0


def test_set_when_called_on_another_thread_is_refused(deadlines):
    deadlines.thread_id = threading.get_ident() + 1
    for call in (lambda: deadlines.set(Owner(), 1.0), lambda: deadlines.remove(Owner())):
        with pytest.raises(LocalProtocolError):
            call()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 30)),
            st.tuples(st.just("remove"), st.integers(0, 5)),
            st.tuples(st.just("run"), st.integers(0, 5)),
        ),
        max_size=80,
    )
)
def test_calls_when_in_any_order_behave_like_a_dictionary(steps):
    timer: list[float] = []
    deadlines = Deadlines(timer.append)
    owners = [Owner() for _ in range(6)]
    wanted: dict[int, float] = {}
    now = 0.0
    for step in steps:
        if step[0] == "set":
            deadlines.set(owners[step[1]], now + step[2] - 3)
            wanted[step[1]] = now + step[2] - 3
        elif step[0] == "remove":
            assert deadlines.remove(owners[step[1]]) == (wanted.pop(step[1], None) is not None)
        else:
            now += step[1]
            due = {n for n, when in wanted.items() if when <= now}
            before = [len(owner.calls) for owner in owners]
            timer.clear()
            assert deadlines.run_due(now) == len(due)
            assert {n for n in range(6) if len(owners[n].calls) > before[n]} == due
            wanted = {n: when for n, when in wanted.items() if n not in due}
        assert deadlines.count == len(wanted)
        # The timer is never later than the earliest deadline: nothing is overslept.
        assert not wanted or (timer and timer[-1] <= min(wanted.values()))


def test_remove_when_the_place_is_still_in_the_heap_frees_the_owner():
    """A place that waits for a time far off, as those of pings do, keeps no connection that has gone alive."""
    deadlines = Deadlines(lambda when: None)
    owner = Owner()
    deadlines.set(owner, 1e6)
    assert deadlines.remove(owner)
    assert len(deadlines._heap) == 1
    gone = weakref.ref(owner)
    del owner
    assert gone() is None
    assert deadlines.run_due(2e6) == 0
