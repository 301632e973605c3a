"""Fairness by class: whose turn is next, and for how long others may come before."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policies.fairness import WeightedFair


class Queue:
    """A queue as the scheduler has it: least key first, of equal keys the first that came."""

    def __init__(self, order) -> None:
        self.order = order
        self.heap = []
        self.numbers = count()

    def push(self, sender) -> None:
        number = next(self.numbers)
        heappush(self.heap, (self.order.place(sender, 0, number), number, sender))

    def pop(self, sent=1):
        place, _, sender = heappop(self.heap)
        self.order.served(sender, place, sent)
        return sender


def test_weighted_fair_when_one_class_floods_gives_each_its_share():
    queue = Queue(WeightedFair(lambda sender: sender[0], {"big": 3.0, "small": 1.0}))
    for number in range(400):
        queue.push(("small", number))
    for number in range(100):
        queue.push(("big", number))
    first = [queue.pop()[0] for _ in range(100)]
    assert 73 <= first.count("big") <= 77


def test_weighted_fair_when_a_class_sends_more_per_turn_gets_fewer_turns():
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
    queue = Queue(WeightedFair(lambda sender: sender))
    for _ in range(100):
        queue.push("busy")
        queue.pop()
    for _ in range(10):
        queue.push("busy")
        queue.push("back")
    assert [queue.pop() for _ in range(10)].count("back") == 5


def test_weighted_fair_when_classes_have_endless_names_forgets_those_that_are_served():
    order = WeightedFair(lambda sender: sender)
    queue = Queue(order)
    for number in range(20_000):
        queue.push(number)
        queue.pop()
    assert len(order._next) <= 1024


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.lists(st.integers(1, 5), min_size=60, max_size=60))
def test_weighted_fair_when_classes_are_mixed_lets_no_demand_wait_for_ever(names, sizes):
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


def test_weighted_fair_when_a_weight_is_nothing_refuses():
    with pytest.raises(ConfigError, match="weight of class 'a'"):
        WeightedFair(lambda sender: sender, {"a": 0.0})


def test_weighted_fair_when_others_wait_gives_one_message_at_a_time():
    order = WeightedFair(lambda sender: sender)
    assert (order.size(7, 1), order.size(7, 0)) == (1, 7)
