"""Turns of those that wait, against a model that has a list."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from flowctl.nodes.rpc.jobs.turns import MOST_IN_LINE, SenderTurns


@dataclass(eq=False)
class Item:
    """Something that waits."""

    sender: str | None
    number: int


def taken(turns: SenderTurns[Item]) -> list[Item]:
    found = []
    while (head := turns.head()) is not None:
        turns.remove(head)
        found.append(head)
    return found


def test_turns_when_nobody_sends_many_are_the_order_of_arrival():
    """Up to as many of each as have a place in the line, and with one sender always, nobody is overtaken."""
    for senders in ("ab" * MOST_IN_LINE, "aabcab", "a" * 100):
        items = [Item(sender, number) for number, sender in enumerate(senders)]
        turns: SenderTurns[Item] = SenderTurns()
        for item in items:
            turns.add(item)
        assert taken(turns) == items


def test_turns_when_one_sends_without_end_keep_another_waiting_for_a_few():
    """What comes behind a flood waits for those of it that are in the line, and each that follows likewise."""
    turns: SenderTurns[Item] = SenderTurns()
    for number in range(200):
        turns.add(Item("flood", number))
    for number in range(200, 203):
        turns.add(Item("other", number))
    order = [item.sender for item in taken(turns)]
    assert order[: MOST_IN_LINE + 3] == ["flood"] * MOST_IN_LINE + ["other"] * 3
    assert len(order) == 203


@given(
    st.lists(
        st.tuples(st.sampled_from("aaab"), st.sampled_from(["add", "add", "take", "withdraw"]), st.integers(0, 99))
    )
)
@example([("a", "add", 0)] * (MOST_IN_LINE + 5) + [("b", "add", 0), ("a", "withdraw", 3)] + [("b", "take", 0)] * 25)
def test_turns_when_anything_comes_and_goes_are_those_of_a_plain_list(steps):
    """The line is a list; what is beyond the few of a sender waits, and comes to its end as one of them leaves."""
    turns: SenderTurns[Item] = SenderTurns()
    line: list[Item] = []
    behind: list[Item] = []

    def leave(item: Item) -> None:
        turns.remove(item)
        if item in behind:
            behind.remove(item)
            return
        line.remove(item)
        following = next((other for other in behind if other.sender == item.sender), None)
        if following is not None:
            behind.remove(following)
            line.append(following)

    for number, (sender, what, which) in enumerate(steps):
        if what == "add":
            item = Item(sender, number)
            turns.add(item)
            mine = sum(other.sender == sender for other in line)
            (line if mine < MOST_IN_LINE else behind).append(item)
        elif what == "take" and line:
            leave(line[0])
        elif what == "withdraw" and (every := line + behind):
            leave(every[which % len(every)])
        assert turns.head() is (line[0] if line else None)
        assert len(turns) == len(line) + len(behind) == len(list(turns))
        assert all(item in turns for item in line + behind)


def test_share_when_some_wait_is_the_same_for_all():
    """A newcomer counts as one of those that share; the one that has most is named, and its newest."""
    turns: SenderTurns[Item] = SenderTurns()
    assert turns.above_share("a")
    for number in range(4):
        turns.add(Item("a", number))
    assert turns.above_share("a")
    assert not turns.above_share("b")
    assert turns.newest_of_most().number == 3
    turns.add(Item("b", 9))
    assert [turns.above_share(sender) for sender in "abc"] == [True, False, False]
