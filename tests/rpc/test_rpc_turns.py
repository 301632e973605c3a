"""Turns of those that wait, against a model that has a list."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from flowctl.rpc.jobs.turns import Turns


@dataclass(eq=False)
class Item:
    """Something that waits."""

    sender: str | None
    number: int


def test_turns_when_each_sender_has_one_are_the_order_of_arrival():
    """With a job of each, or with one sender, nobody is overtaken."""
    for senders in ("abc", "aaa"):
        items = [Item(sender, number) for number, sender in enumerate(senders)]
        turns: Turns[Item] = Turns()
        for item in items:
            turns.add(item)
        taken = []
        while (head := turns.head()) is not None:
            turns.remove(head)
            taken.append(head)
        assert taken == items


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["add", "take", "withdraw"]), st.integers(0, 9))))
def test_turns_when_anything_comes_and_goes_pass_by_nobody_twice(steps):
    """Nothing is lost or doubled, lines keep their order, and between two turns of a sender all others had one."""
    turns: Turns[Item] = Turns()
    waiting: list[Item] = []
    since: dict[str | None, set[str | None]] = {}  # senders that waited at a sender's turn, and had none since
    for number, (sender, what, which) in enumerate(steps):
        head = turns.head()
        if what == "add":
            waiting.append(Item(sender, number))
            turns.add(waiting[-1])
        elif what == "take" and head is not None:
            assert head is next(item for item in waiting if item.sender == head.sender)
            assert not since.get(head.sender)
            waiting.remove(head)
            turns.remove(head)
            for others in since.values():
                others.discard(head.sender)
            since[head.sender] = {item.sender for item in waiting} - {head.sender}
        elif what == "withdraw" and waiting:
            item = waiting[which % len(waiting)]
            is_head = item is head
            waiting.remove(item)
            turns.remove(item)
            still = {item.sender for item in waiting}
            for others in since.values():
                others.intersection_update(still)
                if is_head:
                    others.discard(item.sender)  # its turn has passed
            assert item not in turns
        assert len(turns) == len(waiting) == len(list(turns))
        assert all(item in turns for item in waiting)
        assert (turns.head() is None) == (not waiting)


def test_share_when_some_wait_is_the_same_for_all():
    """A newcomer counts as one of those that share; the one that has most is named, and its newest."""
    turns: Turns[Item] = Turns()
    assert turns.above_share("a")
    for number in range(4):
        turns.add(Item("a", number))
    assert turns.above_share("a")
    assert not turns.above_share("b")
    assert turns.newest_of_most().number == 3
    turns.add(Item("b", 9))
    assert [turns.above_share(sender) for sender in "abc"] == [True, False, False]
