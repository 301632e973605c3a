"""Lines are a cost: each room has a budget of them, and grows only by a change of budget.toml that says why."""

from __future__ import annotations

import tomllib
from pathlib import Path

from count_house import lines_by_room

HOUSE = Path(__file__).parent
BUDGET = tomllib.loads((HOUSE / "budget.toml").read_text("utf-8"))
ROOM_TO_BREATHE = 25
"""Lines above its budget that a room may have, so that a mend needs no change of the budget."""


def test_rooms_when_counted_keep_to_their_budgets():
    rooms = lines_by_room("flowctl", "tests")
    over = {
        room: f"{count} lines, {BUDGET.get(room, 0)} in tests/house/budget.toml"
        for room, count in rooms.items()
        if count > BUDGET.get(room, 0) + ROOM_TO_BREATHE
    }
    assert over == {}, "make it smaller, or raise the budget and say why in the commit"


def test_budget_when_a_room_has_gone_or_shrunk_follows():
    rooms = lines_by_room("flowctl", "tests")
    loose = {room: lines for room, lines in BUDGET.items() if lines > rooms[room] * 1.05 + ROOM_TO_BREATHE}
    assert loose == {}, "lower it: python tests/house/count_house.py --budget"
