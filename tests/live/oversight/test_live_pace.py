"""What observers may use of the processor: a share of what the whole process uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.live.oversight.pace import CpuShare


@pytest.mark.parametrize(
    ("calls", "last", "rest_s"),
    [
        pytest.param([(0.005, 0.2, 1.0)] * 9, (0.005, 0.2, 1.0), 0.0, id="kept"),
        pytest.param([], (0.05, 0.2, 1.0), (0.05 - 0.006) / 0.006, id="overdrawn"),
        pytest.param([], (0.0015, 0.003, 1.0), 0.0, id="the least of an idle process"),
        pytest.param([(0.002, 0.2, 1.0)] * 10, (0.02, 0.2, 1.0), 0.0, id="a file after ten seconds of less"),
    ],
)
def test_cpu_share_when_asked_rests_until_what_was_used_is_earned(calls, last, rest_s):
    cpu_share = CpuShare(share=0.03, least=0.002, credit_s=20.0)
    for call in calls:
        assert cpu_share.rest_s(*call) == 0.0
    assert cpu_share.rest_s(*last) == pytest.approx(rest_s)


@given(st.lists(st.floats(0.0, 0.2), min_size=5, max_size=60), st.floats(0.1, 2.0))
def test_cpu_share_when_obeyed_keeps_the_share_over_time(costs, busy):
    """Whatever rounds cost: what is used is the share of the process, the last round and the credit aside."""
    share, credit_s = 0.03, 20.0
    cpu_share = CpuShare(share=share, least=0.0001, credit_s=credit_s)
    used = process = wait = 0.0
    for cost in costs:
        wall = max(1.0, wait)
        used += cost
        process += wall * busy
        wait = cpu_share.rest_s(cost, wall * busy, wall)
        assert wait <= 30.0
        if wait < 30.0:
            assert used - wait * busy * share <= process * share + credit_s * busy * share + 1e-9
        else:
            break  # so much at a time is more than any bound on silence can pay off
