"""The flow core against a naive reading of its rule, over all short histories; edges, hysteresis, times, marks."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sender_kit import by_messages

from flowctl.core.flow.limits import NO_LIMITS, OFF_MARK, Axis, AxisLimits, HardPolicy, Limits
from flowctl.core.flow.state import EMPTY_LOAD, Cause, FlowCore, Load, SendState

READY, OVERLOADED, SOFT_LIMIT, HARD_LIMIT = SendState
DEPTH = 5
"""Length of the histories that are tried exhaustively: enough for up, down, up again, with a change of limits."""


def messages(count, age_ms=0.0):
    return Load(size_bytes=0, messages=count, age_ms=age_ms)


class Naive:
    """The rule as it is stated, written for reading: three axes looked at one by one, no tables and no shortcuts."""

    def __init__(self, limits):
        self.limits = limits
        self.blocked = False
        self.level = 0
        self.final = False
        self.state = READY
        self.edges = 0

    def axes(self, load):
        limits = self.limits
        return (
            (Axis.BYTES, load.size_bytes, limits.size),
            (Axis.MESSAGES, load.messages, limits.messages),
            (Axis.AGE, load.age_ms, limits.age_ms),
        )

    def see(self, cause, load, limits=None):
        """Take an input; return the new state if it is another one, else None."""
        if cause is Cause.WOULD_BLOCK:
            self.blocked = True
        if cause is Cause.DRAINED:
            self.blocked = False
        if limits is not None:
            self.limits = limits
            soft_on = any(axis.soft for _, _, axis in self.axes(load))
            if self.level == 2 and not self.final:
                self.level = 1 if soft_on else 0
            if self.level == 1 and not soft_on:
                self.level = 0
        if not self.final:
            self.level = self.new_level(load)
            self.final = self.level == 2 and self.limits.hard_policy is HardPolicy.CLOSE
        state = [OVERLOADED if self.blocked else READY, SOFT_LIMIT, HARD_LIMIT][self.level]
        if state is self.state:
            return None
        self.state = state
        self.edges += 1
        return state

    def new_level(self, load):
        axes = self.axes(load)
        if any(axis.hard and value >= axis.hard for _, value, axis in axes):
            return 2
        if self.level and any(axis.on and value > axis.low for _, value, axis in axes):
            return self.level
        return 1 if any(axis.soft and value >= axis.soft for _, value, axis in axes) else 0


def apply(core, cause, load, now, limits=None):
    if cause is Cause.LIMITS_SET:
        return core.limits_set(limits, load, now)
    if cause is Cause.DRAINED:
        return core.drained(now)
    method = {
        Cause.QUEUED: core.queued,
        Cause.SENT: core.sent,
        Cause.WOULD_BLOCK: core.blocked,
        Cause.DROPPED: core.dropped,
        Cause.TICK: core.ticked,
    }[cause]
    return method(load, now)


def check_edge(edge, core, naive, before, old_level, event, now):
    cause, load, _ = event
    new, old = naive.state, before.state
    assert core.state is new
    assert core.would_block is naive.blocked
    assert core.final is naive.final
    assert core.transitions == naive.edges
    if new is old:
        assert edge is None, f"an edge where the state stayed: {edge}"
        assert core.since == before.since
        return
    assert edge is not None, f"{old.name} became {new.name} without an edge"
    assert core.last_change is edge
    assert (edge.sequence, edge.old, edge.new, edge.cause, edge.at) == (naive.edges, old, new, cause, now)
    assert core.since == now
    assert (edge.axis is None) == (edge.value is None) == (edge.limit is None)
    if naive.level == old_level:
        assert edge.axis is None, "the EAGAIN bit alone decided"
    elif cause is not Cause.LIMITS_SET:
        assert edge.axis is not None
        value, axis = next((value, axis) for name, value, axis in naive.axes(load) if name is edge.axis)
        assert edge.value == value
        mark = (axis.low, axis.soft, axis.hard)[naive.level]
        assert edge.limit == mark
        assert value <= mark if naive.level == 0 else value >= mark
    elif new is SOFT_LIMIT:
        value, axis = next((value, axis) for name, value, axis in naive.axes(load) if name is edge.axis)
        assert (edge.value, edge.limit) == (value, axis.soft if axis.soft and value >= axis.soft else axis.low)


def explore(core, naive, events, depth, count=0):
    """Try every continuation of a history; returns how many inputs were tried."""
    for event in events:
        cause, load, limits = event
        next_core, next_naive = copy.copy(core), copy.copy(naive)
        next_core._time_in = list(core._time_in) if core._time_in else None  # a shallow copy shares this list
        now = float(DEPTH - depth + 1)
        next_naive.see(cause, load, limits)
        edge = apply(next_core, cause, load, now, limits)
        check_edge(edge, next_core, next_naive, core, naive.level, event, now)
        count += 1
        if depth > 1:
            count = explore(next_core, next_naive, events, depth - 1, count)
    return count


NARROW = Limits(size=AxisLimits(soft=100), messages=AxisLimits(soft=4, hard=6, low=2))
HELD = dataclasses.replace(NARROW, hard_policy=HardPolicy.HOLD)
WIDE = dataclasses.replace(HELD, size=AxisLimits(soft=300, hard=400), messages=AxisLimits())
HARD_ONLY = by_messages(0, 6, policy=HardPolicy.HOLD)
LOADS = (
    (Cause.DRAINED, EMPTY_LOAD, None),
    (Cause.WOULD_BLOCK, Load(10, 1), None),
    (Cause.SENT, Load(50, 2), None),  # both axes exactly at their low marks
    (Cause.SENT, Load(51, 2), None),  # one byte above: not low
    (Cause.QUEUED, Load(99, 3), None),  # just below both soft marks
    (Cause.QUEUED, Load(100, 3), None),  # exactly at the soft mark of one axis
    (Cause.TICK, Load(20, 6), None),  # exactly at the hard mark of the other
)


@pytest.mark.parametrize(
    ("limits", "others"),
    [
        pytest.param(NARROW, (), id="hard-is-final"),
        pytest.param(HELD, (), id="hard-is-held"),
        pytest.param(NO_LIMITS, (NARROW,), id="limits-come"),
        pytest.param(HELD, (WIDE, NO_LIMITS), id="limits-go"),
        pytest.param(HELD, (NARROW,), id="hold-becomes-final"),
        pytest.param(HELD, (HARD_ONLY,), id="soft-goes"),
        pytest.param(by_messages(0, 6, policy=HardPolicy.HOLD), (), id="hard-only"),
    ],
)
def test_core_over_all_short_histories_does_what_the_rule_says(limits, others):
    changes = [(Cause.LIMITS_SET, load, new) for new in others for load in (Load(10, 1), Load(60, 3))]
    events = (*LOADS, *changes[:3])
    tried = explore(FlowCore(limits, 0.0), Naive(limits), events, DEPTH)
    assert tried == sum(len(events) ** length for length in range(1, DEPTH + 1))


loads = st.builds(
    Load,
    size_bytes=st.integers(0, 60),
    messages=st.integers(0, 30),
    age_ms=st.sampled_from([0.0, 5.0, 9.9, 10.0, 50.0]),
)


@st.composite
def axis_limits(draw):
    low = draw(st.integers(0, 5))
    soft = draw(st.integers(low + 1, 20))
    return draw(st.sampled_from([AxisLimits(), AxisLimits(soft=soft, hard=draw(st.integers(soft, 50)), low=low)]))


all_limits = st.builds(
    Limits,
    size=axis_limits(),
    messages=axis_limits(),
    age_ms=axis_limits(),
    hard_policy=st.sampled_from(HardPolicy),
)
causes = st.sampled_from([cause for cause in Cause if cause is not Cause.LIMITS_SET])
steps = st.tuples(st.floats(0.0, 5.0), causes, loads)


@given(all_limits, st.lists(steps, max_size=40))
@settings(max_examples=200, deadline=None)
def test_core_over_random_histories_makes_one_edge_per_change_without_a_gap(limits, history):
    core, naive, edges, now = FlowCore(limits, 0.0), Naive(limits), [], 0.0
    for seconds, cause, load in history:
        now += seconds
        shown = EMPTY_LOAD if cause is Cause.DRAINED else load
        before, old_level = copy.copy(core), naive.level
        naive.see(cause, shown)
        edge = apply(core, cause, shown, now)
        check_edge(edge, core, naive, before, old_level, (cause, shown, None), now)
        edges += [edge] if edge else []
    assert [edge.sequence for edge in edges] == list(range(1, len(edges) + 1))
    assert [edge.old for edge in edges] == [READY, *(edge.new for edge in edges)][:-1]
    assert core.recoveries == sum(edge.new is READY for edge in edges)


@given(all_limits, st.lists(steps, max_size=40), st.floats(0.0, 5.0))
@settings(max_examples=100, deadline=None)
def test_time_in_states_over_random_histories_adds_up(limits, history, rest_s):
    core, now, expected = FlowCore(limits, 7.0), 7.0, [0.0, 0.0, 0.0, 0.0]
    for seconds, cause, load in history:
        expected[core.state] += seconds
        now += seconds
        apply(core, cause, load, now)
    expected[core.state] += rest_s
    assert core.time_in_states(now + rest_s) == pytest.approx(expected, abs=1e-9)
    assert core.time_in_states(now + rest_s) == core.time_in_states(now + rest_s)  # asking changes nothing


@given(all_limits, st.lists(steps, min_size=1, max_size=10), st.data())
@settings(max_examples=200, deadline=None)
def test_marks_above_when_load_stays_below_them_no_edge_comes(limits, history, data):
    core, load = FlowCore(limits, 0.0), EMPTY_LOAD
    for _, cause, shown in history:
        load = EMPTY_LOAD if cause is Cause.DRAINED else shown
        apply(core, cause, load, 1.0)
    marks = core.marks_above(load)
    values = (load.size_bytes, load.messages, load.age_ms)
    assert all(mark > value for mark, value in zip(marks, values, strict=True))
    grown = [
        data.draw(st.integers(int(value), min(mark - 1, 1000)) if mark > value + 1 else st.just(value))
        for value, mark in zip(values, marks, strict=True)
    ]
    grown[2] = max(grown[2], load.age_ms)
    assert copy.copy(core).queued(Load(*grown), 2.0) is None
    for index, mark in enumerate(marks):
        if mark < OFF_MARK:
            reached = list(values)
            reached[index] = mark
            edge = copy.deepcopy(core).queued(Load(*reached), 2.0)
            assert edge is not None
            assert edge.limit == mark


@given(all_limits, st.lists(steps, min_size=1, max_size=10), st.data())
@settings(max_examples=200, deadline=None)
def test_room_when_less_than_that_comes_no_edge_comes(limits, history, data):
    core, load = FlowCore(limits, 0.0), EMPTY_LOAD
    for _, cause, shown in history:
        load = EMPTY_LOAD if cause is Cause.DRAINED else shown
        apply(core, cause, load, 1.0)
    size_bytes, count = core.room(load)
    more = data.draw(st.integers(0, min(count - 1, 200)))
    more_bytes = data.draw(st.integers(0, min(size_bytes - 1, 2000))) + more * limits.overhead_bytes
    grown = Load(load.size_bytes + more_bytes, load.messages + more, load.age_ms)
    assert core.queued(grown, 2.0) is None


def test_marks_above_when_the_soft_mark_is_off_names_the_hard_one():
    core = FlowCore(Limits.parse("0,0", "1000,20"), 0.0)
    assert core.marks_above(EMPTY_LOAD) == (1000, 20, OFF_MARK)


def test_marks_above_when_level_is_reached_names_the_next_one():
    core = FlowCore(by_messages(4, 6, policy=HardPolicy.HOLD), 0.0)
    assert core.marks_above(EMPTY_LOAD) == (OFF_MARK, 4, OFF_MARK)
    core.queued(messages(4), 1.0)
    assert core.marks_above(messages(4)) == (OFF_MARK, 6, OFF_MARK)
    core.sent(messages(3), 1.0)
    assert core.marks_above(messages(3)) == (OFF_MARK, 6, OFF_MARK), "still SOFT_LIMIT: the soft mark makes no edge"
    core.queued(messages(6), 1.0)
    assert core.marks_above(messages(6)) == (OFF_MARK, OFF_MARK, OFF_MARK)


def test_core_when_new_is_ready_and_unannounced():
    core = FlowCore(NO_LIMITS, 5.0)
    assert (core.state, core.since, core.transitions, core.last_change) == (READY, 5.0, 0, None)
    assert core.drained(6.0) is None
    assert core.time_in_states(8.0) == (3.0, 0.0, 0.0, 0.0)


def test_hard_limit_when_held_and_made_final_closes_without_an_edge():
    core = FlowCore(by_messages(4, 6, policy=HardPolicy.HOLD), 0.0)
    core.queued(messages(6), 1.0)
    assert core.limits_set(by_messages(4, 6), messages(6), 2.0) is None
    assert core.final is True


def test_limits_set_when_live_are_in_force_at_once():
    core = FlowCore(NO_LIMITS, 0.0)
    assert core.queued(messages(1_000_000), 1.0) is None
    edge = core.limits_set(by_messages(4, 2_000_000), messages(1_000_000), 2.0)
    assert (edge.new, edge.cause, edge.axis, edge.limit) == (SOFT_LIMIT, Cause.LIMITS_SET, Axis.MESSAGES, 4)
    assert core.limits_set(by_messages(1_500_000, low=999_999), messages(1_000_000), 3.0) is None
    assert core.limits_set(by_messages(1_500_000, low=1_000_000), messages(1_000_000), 4.0).new is READY


def test_soft_limit_when_all_soft_marks_are_turned_off_is_left():
    core = FlowCore(by_messages(4, 20), 0.0)
    core.queued(messages(15), 1.0)
    edge = core.limits_set(by_messages(0, 20), messages(15), 2.0)
    assert (edge.old, edge.new, edge.cause) == (SOFT_LIMIT, READY, Cause.LIMITS_SET)
    assert (edge.axis, edge.value, edge.limit) == (None, None, None)
    assert core.slow_since is None
    assert core.queued(messages(20), 3.0).new is HARD_LIMIT


@pytest.mark.parametrize(("soft", "limit"), [pytest.param(8, 8, id="soft"), pytest.param(40, 5, id="low")])
def test_hard_limit_when_held_and_limits_widen_names_what_keeps_it_at_soft(soft, limit):
    core = FlowCore(by_messages(4, 6, policy=HardPolicy.HOLD), 0.0)
    core.queued(messages(9), 1.0)
    edge = core.limits_set(by_messages(soft, 100, low=5, policy=HardPolicy.HOLD), messages(9), 2.0)
    assert (edge.old, edge.new) == (HARD_LIMIT, SOFT_LIMIT)
    assert (edge.axis, edge.value, edge.limit) == (Axis.MESSAGES, 9.0, limit)


def test_slow_since_when_at_soft_or_hard_is_the_time_of_the_first():
    core = FlowCore(by_messages(4, 6, 2, HardPolicy.HOLD), 0.0)
    core.blocked(messages(1), 1.0)
    assert core.slow_since is None
    core.queued(messages(4), 2.0)
    core.queued(messages(6), 3.0)
    assert core.slow_since == 2.0
    core.sent(messages(2), 4.0)
    assert core.slow_since is None
