"""The calendar of turns: who is due, when, and what is forgotten."""

from __future__ import annotations

import random
from math import inf

from chance_kit import seeds

from flowctl.core.fanout.calendar import SLOT_S, TurnCalendar


def test_items_when_their_time_has_come_are_taken_first_ones_first():
    calendar = TurnCalendar()
    calendar.put("later", 10.5)
    calendar.put("sooner", 10.0)
    assert (len(calendar), calendar.take_due(10.0)) == (2, [])
    assert 10.0 < calendar.next_at <= 10.0 + SLOT_S
    assert calendar.take_due(10.0 + SLOT_S) == ["sooner"]
    assert calendar.take_due(11.0) == ["later"]
    assert (len(calendar), calendar.next_at) == (0, inf)


def test_item_when_removed_is_not_due_and_may_be_put_again():
    calendar = TurnCalendar()
    calendar.put("one", 1.0)
    calendar.put("other", 1.0)
    calendar.remove("one")
    calendar.remove("one")
    assert calendar.take_due(2.0) == ["other"]
    calendar.put("one", 3.0)
    calendar.clear()
    assert (len(calendar), calendar.take_due(9.0)) == (0, [])


def test_items_over_a_long_random_life_are_due_once_and_never_early():
    for seed in seeds(20):
        chance = random.Random(seed)
        calendar, due_at, now = TurnCalendar(), {}, 100.0
        for _ in range(300):
            now += chance.random() * 0.05
            taken = calendar.take_due(now)
            for item in taken:
                assert due_at.pop(item) <= now
            assert all(at > now - SLOT_S for at in due_at.values())
            item = chance.randrange(30)
            if item in due_at:
                calendar.remove(item)
                del due_at[item]
            else:
                due_at[item] = now + chance.random()
                calendar.put(item, due_at[item])
            assert len(calendar) == len(due_at)
