"""Keys of waiting demands: whose turn is next, and for how long others may come before."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.errors import ConfigError
from flowctl.scheduler.policies.fairness import MOST_PRIORITY, Ageing, FirstComeFirstServed, WeightedFair


class Queue:
    """A queue as the scheduler has it: least key first, of equal keys the first that came."""

    def __init__(self, order) -> None:
        self.order = order
        self.heap = []
        self.numbers = count()

    def push(self, sender, priority=0, now=0.0) -> None:
        heappush(self.heap, (self.order.key(sender, priority, now), next(self.numbers), sender))

    def pop(self, sent=1):
        key, _, sender = heappop(self.heap)
        self.order.served(sender, key, sent)
        return sender


def test_first_come_first_served_when_priorities_differ_keeps_the_order_of_arrival():
    """Priority means nothing to the default."""
    queue = Queue(FirstComeFirstServed())
    for name, priority in (("a", 0), ("b", 9), ("c", -9)):
        queue.push(name, priority)
    assert [queue.pop() for _ in range(3)] == ["a", "b", "c"]


def test_ageing_when_two_wait_serves_the_higher_priority_within_its_worth_only():
    """A step of priority is worth its seconds of waiting, and no more."""
    queue = Queue(Ageing(step_s=2.0))
    queue.push("old", 0, now=0.0)
    queue.push("urgent, soon", 3, now=5.0)
    queue.push("urgent, late", 3, now=7.0)
    assert [queue.pop() for _ in range(3)] == ["urgent, soon", "old", "urgent, late"]


@given(st.lists(st.tuples(st.integers(-99, 99), st.floats(0.0, 5.0)), min_size=1, max_size=60))
def test_ageing_when_priorities_are_mixed_bounds_the_wait_behind_others(arrivals):
    """Nobody is passed by a demand that came later than the whole range of priorities is worth."""
    queue, now = Queue(Ageing(step_s=1.0)), 0.0
    for number, (priority, gap_s) in enumerate(arrivals):
        now += gap_s
        queue.push((number, now), priority, now)
    served = [queue.pop() for _ in arrivals]
    for place, (number, came) in enumerate(served):
        passed_by = [other for other in served[:place] if other[0] > number]
        assert all(at <= came + 2 * MOST_PRIORITY for _, at in passed_by)


def test_weighted_fair_when_one_class_floods_gives_each_its_share():
    """With weights 3 and 1 the turns go three to one, whatever waits in each class."""
    queue = Queue(WeightedFair(lambda sender: sender[0], {"big": 3.0, "small": 1.0}))
    for number in range(400):
        queue.push(("small", number))
    for number in range(100):
        queue.push(("big", number))
    first = [queue.pop()[0] for _ in range(100)]
    assert 73 <= first.count("big") <= 77


def test_weighted_fair_when_a_class_sends_more_per_turn_gets_fewer_turns():
    """A class is charged for messages, not for turns."""
    queue = Queue(WeightedFair(lambda sender: sender))
    messages = {"one": 0, "four": 0}
    queue.push("one")
    queue.push("four")
    for _ in range(100):
        sender = queue.heap[0][2]
        queue.pop(sent := 4 if sender == "four" else 1)
        messages[sender] += sent
        queue.push(sender)
    assert messages["four"] == pytest.approx(messages["one"], abs=5)


def test_weighted_fair_when_a_class_was_idle_has_saved_nothing():
    """A class that comes back shares from then on: it does not take all turns until it has caught up."""
    queue = Queue(WeightedFair(lambda sender: sender))
    for _ in range(100):
        queue.push("busy")
        queue.pop()
    for _ in range(10):
        queue.push("busy")
        queue.push("back")
    assert [queue.pop() for _ in range(10)].count("back") == 5


def test_weighted_fair_when_classes_have_endless_names_forgets_those_that_are_served():
    """Memory does not grow with the names of classes that were ever seen."""
    order = WeightedFair(lambda sender: sender)
    queue = Queue(order)
    for number in range(20_000):
        queue.push(number)
        queue.pop()
    assert len(order._next) <= 1024


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.lists(st.integers(1, 5), min_size=60, max_size=60))
def test_weighted_fair_when_classes_are_mixed_lets_no_demand_wait_for_ever(names, sizes):
    """While one demand waits, other classes are served a bounded number of messages."""
    queue = Queue(WeightedFair(lambda sender: sender, {"a": 1.0, "b": 2.0, "c": 4.0}))
    queue.push("a")
    waited = 0
    for name, size in zip(names, sizes, strict=False):
        queue.push(name)
        queue.push("c")
        if queue.pop(size) == "a":
            break
        waited += size
    assert waited <= 60


@pytest.mark.parametrize("make", [lambda: Ageing(0.0), lambda: WeightedFair(lambda sender: 0, {"a": 0.0})])
def test_orders_when_a_value_is_out_of_range_refuse(make):
    """A step or a weight of nothing would let demands wait for ever."""
    with pytest.raises(ConfigError, match="more than 0"):
        make()
