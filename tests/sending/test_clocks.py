"""The clocks of a Sender: what has taken too long, and when to look next."""

from __future__ import annotations

from math import inf

import pytest

from flowctl.core.sending.clocks import Clocks
from flowctl.core.sending.settings import SenderSettings
from flowctl.reasons import CloseReason

SETTINGS = SenderSettings(stuck_s=15, soft_too_long_s=60, close_deadline_s=5)


@pytest.mark.parametrize(
    ("clocks", "reason", "words"),
    [
        (Clocks(stuck_at=100.0), CloseReason.STUCK, "the kernel took nothing for 15.5 s, the limit is 15 s"),
        (
            Clocks(soft_at=100.0),
            CloseReason.SOFT_TOO_LONG,
            "at or above SOFT_LIMIT for 60.5 s, the limit is 60 s",
        ),
        (Clocks(closes_at=100.0), CloseReason.STUCK, "not everything was taken within 5 s after closing began"),
    ],
)
def test_overdue_when_a_clock_has_run_down_says_which_and_for_how_long(clocks, reason, words):
    assert clocks.next_at == 100.0
    assert clocks.overdue(99.999, SETTINGS, waits=True) is None
    assert clocks.overdue(100.0, SETTINGS, waits=True)[0] is reason
    assert clocks.overdue(100.5, SETTINGS, waits=True) == (reason, words)


def test_overdue_when_several_are_tells_the_close_before_the_stall_before_the_level():
    clocks = Clocks(closes_at=100.0, stuck_at=90.0, soft_at=80.0)
    assert "closing" in clocks.overdue(110.0, SETTINGS, waits=True)[1]
    assert "took nothing" in clocks.overdue(110.0, SETTINGS, waits=False)[1]
    assert "SOFT_LIMIT" in clocks._replace(stuck_at=inf).overdue(110.0, SETTINGS, waits=False)[1]
    assert Clocks(closes_at=100.0).overdue(110.0, SETTINGS, waits=False) is None


def test_overdue_when_only_looks_are_due_ends_nothing():
    clocks = Clocks(rises_at=5.0, looks_at=4.0, held_until=3.0, samples_at=2.0)
    assert clocks.overdue(1e6, SETTINGS, waits=True) is None
    assert clocks.next_at == 2.0


def test_next_at_when_nothing_runs_is_never():
    assert Clocks().next_at == inf
