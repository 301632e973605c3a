"""Explaining a state: who is to blame, and the line that says so."""

from __future__ import annotations

import pytest

from flowctl.core.flow.limits import NO_LIMITS, AxisLimits, HardPolicy, Limits
from flowctl.core.flow.state import EMPTY_LOAD, FlowCore, Load
from flowctl.core.sending.explain import Blame, blame, explain
from flowctl.reasons import CloseReason

LIMITS = Limits(size=AxisLimits(soft=1000), messages=AxisLimits(soft=10), hard_policy=HardPolicy.HOLD)


def blocked(load, limits=LIMITS):
    """Return a core whose last write met EAGAIN."""
    core = FlowCore(limits, 0.0)
    core.blocked(load, 1.0)
    return core


def queued(load, limits=LIMITS):
    """Return a core whose queue the kernel has not refused."""
    core = FlowCore(limits, 0.0)
    core.queued(load, 1.0)
    return core


@pytest.mark.parametrize(
    ("core", "load", "largest_bytes", "stalled_s", "who"),
    [
        pytest.param(FlowCore(LIMITS, 0.0), EMPTY_LOAD, 0, 0.0, Blame.NOBODY, id="ready"),
        pytest.param(queued(Load(999, 9)), Load(999, 9, 9000.0), 0, 9.0, Blame.NOBODY, id="ready-and-late"),
        pytest.param(blocked(Load(10, 1)), Load(10, 1), 10, 0.1, Blame.VIEWER_LINK, id="eagain"),
        pytest.param(blocked(Load(1000, 9)), Load(1000, 9, 5000.0), 100, 5.0, Blame.VIEWER_LINK, id="stall-at-soft"),
        pytest.param(blocked(Load(1000, 1)), Load(1000, 1), 501, 0.9, Blame.PUBLISHER_BURST, id="one-huge-message"),
        pytest.param(blocked(Load(1000, 1)), Load(1000, 1), 500, 0.9, Blame.VIEWER_LINK, id="huge-but-half-of-soft"),
        pytest.param(blocked(Load(1000, 1)), Load(1000, 1), 501, 1.0, Blame.VIEWER_LINK, id="huge-but-stalled"),
        pytest.param(queued(Load(1000, 9)), Load(1000, 9, 250.0), 10, 0.0, Blame.PUBLISHER_BURST, id="not-offered-yet"),
        pytest.param(queued(Load(1000, 9)), Load(1000, 9, 251.0), 10, 0.0, Blame.SERVER_LOOP, id="not-offered-late"),
    ],
)
def test_blame_when_state_is_known_falls_on_who_caused_it(core, load, largest_bytes, stalled_s, who):
    assert blame(core, load, largest_bytes=largest_bytes, stalled_s=stalled_s) is who


def test_blame_when_axis_of_bytes_is_off_knows_no_oversized_message():
    assert (
        blame(blocked(Load(10, 1), NO_LIMITS), Load(10, 1), largest_bytes=1 << 40, stalled_s=0.0) is Blame.VIEWER_LINK
    )


def test_blame_when_new_limits_made_the_state_falls_on_policy():
    core = queued(Load(500, 5), NO_LIMITS)
    core.limits_set(Limits(messages=AxisLimits(soft=5)), Load(500, 5), 2.0)
    assert blame(core, Load(500, 5, 9000.0), largest_bytes=0, stalled_s=0.0) is Blame.POLICY
    core.sent(Load(100, 1), 3.0)
    assert blame(core, Load(100, 1), largest_bytes=0, stalled_s=0.0) is Blame.NOBODY


def test_blame_when_late_is_set_moves_the_line_between_burst_and_loop():
    core, load = queued(Load(1000, 9)), Load(1000, 9, 400.0)
    assert blame(core, load, largest_bytes=10, stalled_s=0.0, late_s=0.5) is Blame.PUBLISHER_BURST
    assert blame(core, load, largest_bytes=10, stalled_s=0.0, late_s=0.3) is Blame.SERVER_LOOP


def test_explain_when_ready_says_so_and_blames_nobody():
    assert explain(FlowCore(LIMITS, 0.0), EMPTY_LOAD, 8.0) == "READY for 8.0 s; nothing queued"


def test_explain_when_slow_has_axis_value_limit_since_when_and_blame():
    load = Load(2048, 9, 4500.0)
    line = explain(blocked(load), load, 3.5, largest_bytes=100, stalled_s=2.5)
    assert line == (
        "HARD_LIMIT for 2.5 s; blocked: 2.0 KiB, limit 2.0 KiB; queued 2.0 KiB in 9 messages, oldest 4.5 s; "
        "the kernel has taken nothing for 2.5 s; to blame: viewer link"
    )


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"joining": True}, "still taking the GOP cache"),
        ({"waiting_for_key": True}, "waiting for a key frame"),
        ({"largest_bytes": 501}, "the soft limit is below twice the largest message, 501 B"),
    ],
)
def test_explain_when_a_fact_holds_says_it_and_otherwise_not(facts, part):
    core = blocked(Load(10, 1))
    assert part in explain(core, Load(10, 1), 2.0, **facts).split("; ")
    assert part not in explain(core, Load(10, 1), 2.0, largest_bytes=500)


def test_explain_when_closed_gives_the_reason_alone():
    core = blocked(Load(2048, 9))
    closed = explain(core, EMPTY_LOAD, 9.0, stalled_s=3.0, close_reason=CloseReason.STUCK)
    assert closed == "closed: stuck"
    detailed = explain(core, EMPTY_LOAD, 9.0, close_reason=CloseReason.LIMIT_HIT, details="message_size_bytes")
    assert detailed == "closed: limit hit (message_size_bytes)"


@pytest.mark.parametrize("core", [FlowCore(NO_LIMITS, 0.0), blocked(Load(10, 1)), blocked(Load(5000, 99))])
def test_explain_when_asked_is_one_line(core):
    line = explain(core, Load(10, 1, 5.0), 2.0, largest_bytes=9999, joining=True, waiting_for_key=True, stalled_s=1.0)
    assert len(line.splitlines()) == 1
    assert line.startswith(core.state.name)
