"""What observers may use of the processor: a share of what the whole process uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.live.oversight.pace import CpuShare


def test_cpu_share_when_kept_lets_rounds_come_as_they_are_due():
    cpu_share = CpuShare(share=0.03, least=0.002, credit_s=20.0)
    assert [cpu_share.rest_s(0.005, 0.2, 1.0) for _ in range(10)] == [0.0] * 10


def test_cpu_share_when_overdrawn_rests_until_it_is_earned():
    cpu_share = CpuShare(share=0.03, least=0.002, credit_s=20.0)
    assert cpu_share.rest_s(0.05, 0.2, 1.0) == pytest.approx((0.05 - 0.006) / 0.006)


def test_cpu_share_when_the_process_is_idle_is_the_least():
    cpu_share = CpuShare(share=0.03, least=0.002, credit_s=20.0)
    assert cpu_share.rest_s(0.0015, 0.003, 1.0) == 0.0


def test_cpu_share_when_a_lump_comes_is_paid_from_what_was_saved():
    """A file after ten seconds of less than the share costs no rest."""
    cpu_share = CpuShare(share=0.03, least=0.002, credit_s=20.0)
    for _ in range(10):
        cpu_share.rest_s(0.002, 0.2, 1.0)
    assert cpu_share.rest_s(0.02, 0.2, 1.0) == 0.0


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
