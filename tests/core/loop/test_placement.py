"""Placements: who lives on a poll group, and the sum of their loads."""

from __future__ import annotations

import pytest

from flowctl.core.loop.placement import Placement, Placements
from flowctl.deferred import Registration
from flowctl.errors import ClosedError, LocalProtocolError


class Weighs:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def load(self) -> float:
        return self.weight


def place(placements, weight):
    placement = Placement(Weighs(weight), Registration(), weight, 0.0)
    placements.enter(placement)
    return placement


def test_placements_when_entered_and_removed_count_and_weigh_what_is_there():
    placements = Placements("g")
    first, second = place(placements, 0.1), place(placements, 0.2)
    assert placements.figures() == (2, pytest.approx(0.3))
    assert placements.all() == [first, second]
    assert placements.remove(first) is True
    assert placements.remove(first) is False
    assert placements.remove(second) is True
    assert placements.figures() == (0, 0.0)
    assert (first.gone, placements.find(first.pollable)) == (True, None)


def test_placements_when_asked_for_loads_weigh_what_is_said_now():
    placements = Placements("g")
    placement = place(placements, 1.0)
    place(placements, 2.0)
    placement.pollable.weight = 5.0
    assert placements.figures() == (2, 3.0)
    assert placements.refresh_weight(print) == 7.0
    assert (placement.weight, placements.figures()) == (5.0, (2, 7.0))


def test_enter_when_there_already_or_closed_is_refused():
    placements = Placements("g")
    placement = place(placements, 1.0)
    with pytest.raises(LocalProtocolError, match="on poll group 'g' already"):
        placements.enter(Placement(placement.pollable, Registration(), 1.0, 0.0))
    assert placements.close() == [placement]
    assert (placement.gone, placements.figures()) == (True, (0, 0.0))
    with pytest.raises(ClosedError, match="'g' is stopping"):
        place(placements, 1.0)
