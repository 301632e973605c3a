"""Several poll groups: placement, rebalancing that settles, and their common life."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pollgroup_kit import WAIT_S, FakePollable, on_thread

from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.pollgroup import GroupState
from flowctl.pollgroups import MAX_GROUPS, MOST_MOVES, PollGroups


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def make_groups(factory, errors, now):
    made: list[PollGroups] = []

    def make(count: int, **options) -> PollGroups:
        groups = PollGroups(count, loop_factory=factory, on_error=errors, clock=lambda: now[0], **options)
        made.append(groups)
        groups.start()
        return groups

    yield make
    for groups in made:
        assert groups.stop(WAIT_S)


def place_on(groups: PollGroups, number: int, pollable: FakePollable) -> FakePollable:
    groups.groups[number].add_pollable(pollable, pollable.registration)
    return pollable


def weights(groups: PollGroups) -> list[float]:
    """Return the weights when all moves queued so far have been carried out on both sides."""
    for _ in range(2):
        for group in groups.groups:
            on_thread(group, lambda: None)
    return [figures.weight for figures in groups.statistics()]


def test_start_when_called_starts_all_and_stop_ends_all(make_groups):
    groups = make_groups(3, name="edge")
    assert [group.name for group in groups.groups] == ["edge-0", "edge-1", "edge-2"]
    assert {group.state for group in groups.groups} == {GroupState.RUNNING}
    assert groups.stop(WAIT_S)
    assert {group.state for group in groups.groups} == {GroupState.STOPPED}
    with pytest.raises(ClosedError):
        groups.least_loaded()
    assert groups.rebalance() == []


def test_start_when_one_fails_stops_the_others(factory):
    calls = []

    def limited():
        calls.append(1)
        if len(calls) == 3:
            raise OSError("too many open files")
        return factory()

    groups = PollGroups(4, loop_factory=limited)
    with pytest.raises(OSError, match="too many"):
        groups.start()
    assert {group.state for group in groups.groups} == {GroupState.STOPPED}


def test_stop_when_one_hangs_says_so_and_stops_the_others(make_groups):
    groups = make_groups(3)
    entered, go_on = threading.Event(), threading.Event()
    groups.groups[0].call_soon(lambda: (entered.set(), go_on.wait(WAIT_S)))
    assert entered.wait(WAIT_S)
    assert groups.stop(0.05) is False
    assert groups.groups[0].state is GroupState.STOPPING
    go_on.set()
    assert groups.stop(WAIT_S) is True


def test_arguments_when_out_of_range_are_refused():
    for arguments in (
        {"count": 0},
        {"count": MAX_GROUPS + 1},
    ):
        with pytest.raises(LocalProtocolError):
            PollGroups(**arguments)


def test_place_when_a_burst_arrives_spreads_it_at_once(make_groups):
    """A thousand connections in one burst are spread evenly, though no thread has had time to feel them."""
    groups = make_groups(4)
    placed = [groups.place(pollable, pollable.registration) for pollable in (FakePollable() for _ in range(100))]
    assert [placed.count(group) for group in groups.groups] == [25] * 4


def test_place_when_one_weighs_more_puts_the_others_elsewhere(make_groups):
    groups = make_groups(2)
    heavy = FakePollable(10.0)
    first = groups.place(heavy, heavy.registration)
    light = [FakePollable() for _ in range(10)]
    assert {groups.place(pollable, pollable.registration) for pollable in light} == set(groups.groups) - {first}


def test_place_when_a_group_has_stopped_uses_the_others(make_groups):
    groups = make_groups(2)
    groups.groups[0].stop(WAIT_S)
    pollable = FakePollable()
    assert groups.place(pollable, pollable.registration) is groups.groups[1]


def test_least_loaded_when_weights_are_equal_is_the_least_busy(make_groups, now):
    groups = make_groups(2)

    def work() -> None:
        now[0] += 1.0  # the shared clock: this handler took a second

    on_thread(groups.groups[0], work)
    on_thread(groups.groups[0], lambda: None)
    assert groups.least_loaded() is groups.groups[1]


def test_rebalance_when_one_side_is_heavier_moves_until_level(make_groups, now):
    groups = make_groups(2)
    pollables = [place_on(groups, 0, FakePollable()) for _ in range(10)]
    now[0] += 60
    moves = groups.rebalance()
    assert weights(groups) == [5.0, 5.0]
    assert len(moves) == 5
    assert {(move.source, move.target, move.weight) for move in moves} == {(groups.groups[0], groups.groups[1], 1.0)}
    assert {id(move.pollable) for move in moves} <= {id(pollable) for pollable in pollables}
    assert sum(pollable.what() == ["attached", "detached", "attached"] for pollable in pollables) == 5


def test_rebalance_when_the_gap_is_small_leaves_it(make_groups, now):
    groups = make_groups(2)
    for number, count in enumerate((11, 9)):
        for _ in range(count):
            place_on(groups, number, FakePollable())
    now[0] += 60
    assert groups.rebalance() == []
    assert weights(groups) == [11.0, 9.0]


def test_rebalance_when_pollables_have_just_come_lets_them_dwell(make_groups, now):
    groups = make_groups(2)
    for _ in range(6):
        place_on(groups, 0, FakePollable())
    now[0] += 9
    assert groups.rebalance() == []
    now[0] += 1
    assert len(groups.rebalance()) == 3


def test_rebalance_when_a_heavy_and_light_ones_share_moves_what_fits(make_groups, now):
    """Of several pollables the one is moved whose weight is nearest to half of the gap."""
    groups = make_groups(2)
    heavy = place_on(groups, 0, FakePollable(50.0))
    middle = place_on(groups, 0, FakePollable(30.0))
    light = place_on(groups, 0, FakePollable(1.0))
    now[0] += 60
    assert [move.pollable for move in groups.rebalance()] == [heavy]
    assert weights(groups) == [31.0, 50.0]
    assert middle.what() == light.what() == ["attached"]


def test_rebalance_when_loads_change_asks_anew(make_groups, now):
    groups = make_groups(2)
    pollables = [place_on(groups, number % 2, FakePollable()) for number in range(8)]
    now[0] += 60
    assert groups.rebalance() == []
    pollables[0].load = lambda: 6.0
    assert groups.rebalance()
    assert weights(groups) == [7.0, 6.0]


def test_rebalance_when_moves_are_limited_makes_no_more(make_groups, now):
    groups = make_groups(2)
    for _ in range(2 * MOST_MOVES + 4):
        place_on(groups, 0, FakePollable())
    now[0] += 60
    assert len(groups.rebalance()) == MOST_MOVES


class PaperGroup:
    """A group on paper, for the arithmetic of rebalancing without threads."""

    state = GroupState.RUNNING

    def __init__(self) -> None:
        self.placements: list = []
        self.report = lambda where, error: None

    def pollables(self):
        return list(self.placements)

    def refresh_weight(self) -> float:
        return sum(placement.weight for placement in self.placements)

    def migrate(self, pollable, other) -> bool:
        placement = next(p for p in self.placements if p.pollable is pollable)
        self.placements.remove(placement)
        other.placements.append(placement)
        return True


class PaperPlacement:
    placed_at = 0.0

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.pollable = object()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.floats(0, 100), max_size=12), min_size=2, max_size=5))
def test_rebalance_when_loads_are_any_narrows_the_gap_and_settles(loads):
    groups = PollGroups(len(loads), clock=lambda: 1000.0)
    paper = tuple(PaperGroup() for _ in loads)
    object.__setattr__(groups, "groups", paper)
    for group, group_loads in zip(paper, loads, strict=True):
        group.placements = [PaperPlacement(load) for load in group_loads]
    total = sum(map(sum, loads))

    def gap() -> float:
        return max(g.refresh_weight() for g in paper) - min(g.refresh_weight() for g in paper)

    for _ in range(100):
        before = gap()
        moves = groups.rebalance()
        assert gap() <= before + 1e-6
        assert sum(g.refresh_weight() for g in paper) == pytest.approx(total)
        if not moves:
            break
    else:
        pytest.fail("it does not come to rest")
