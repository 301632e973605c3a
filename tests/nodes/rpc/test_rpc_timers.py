"""Timers on a clock turned by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.core.loop.deadlines import Deadlines
from flowctl.errors import ConfigError
from flowctl.nodes.rpc.jobs.dispatcher import Timer


class Clock:
    """Deadlines and the jobs that timers have submitted; these end when they are told to."""

    def __init__(self):
        self.errors = []
        self.deadlines = Deadlines(lambda when: None, lambda where, error: self.errors.append(error))
        self.now = 0.0
        self.submitted = []  # jobs that have not ended
        self.times = []
        self.room = True

    def submit(self, timer):
        if self.room:
            self.submitted.append(timer)
            self.times.append(round(self.now, 6))
        return self.room

    def add(self, interval_s, *, job=lambda: None, squelch=True, submit=None):
        timer = Timer(job, interval_s, squelch=squelch, submit=submit or self.submit)
        timer.begin(self.deadlines, self.now)
        return timer

    def turn(self, seconds, step=0.01):
        for _ in range(round(seconds / step)):
            self.now += step
            self.deadlines.run_due(self.now + 1e-9)

    def end_all(self):
        while self.submitted:
            timer = self.submitted.pop()
            timer.run()
            timer.ended()


def test_timer_when_its_job_ends_in_time_is_due_once_per_interval():
    clock = Clock()
    clock.add(0.1)
    for _ in range(5):
        clock.turn(0.1)
        clock.end_all()
    assert clock.times == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_timer_when_squelched_is_passed_over_until_its_job_has_ended():
    clock = Clock()
    clock.add(0.1)
    clock.turn(0.55)
    assert clock.times == [0.1]
    clock.end_all()
    clock.turn(0.1)
    assert clock.times == [0.1, 0.6]


def test_timer_when_not_squelched_is_submitted_each_time():
    clock = Clock()
    clock.add(0.1, squelch=False)
    clock.turn(0.35)
    assert clock.times == [0.1, 0.2, 0.3]
    assert len(clock.submitted) == 3


def test_timer_when_the_machine_slept_is_due_once_and_goes_on_in_step():
    clock = Clock()
    clock.add(0.1, squelch=False)
    clock.turn(1.03, step=1.03)
    assert clock.times == [1.03]
    clock.turn(0.2)
    assert clock.times == [1.03, 1.1, 1.2]


def test_timer_when_there_is_no_room_for_its_job_goes_on():
    clock = Clock()
    clock.add(0.1)
    clock.room = False
    clock.turn(0.2)
    clock.room = True
    clock.turn(0.1)
    assert clock.times == [0.3]


def test_cancel_when_the_job_waits_has_it_do_nothing():
    clock = Clock()
    ran = []
    timer = clock.add(0.1, job=lambda: ran.append(clock.now))
    clock.turn(0.1)
    timer.cancel()
    clock.end_all()
    clock.turn(0.5)
    assert (ran, clock.times) == ([], [0.1])


def test_cancel_when_the_timer_has_not_begun_keeps_it_from_beginning():
    clock = Clock()
    timer = Timer(lambda: None, 0.1, squelch=True, submit=clock.submit)
    timer.cancel()
    timer.begin(clock.deadlines, clock.now)
    timer.end()
    assert clock.deadlines.count == 0


def test_cancel_when_called_at_its_very_time_is_the_end():
    clock = Clock()
    times = []

    def submit(timer):
        times.append(clock.now)
        timer.cancel()
        timer.end()
        return False

    clock.add(0.1, submit=submit)
    clock.turn(0.5)
    assert (len(times), clock.deadlines.count) == (1, 0)


def test_timer_when_its_submitting_fails_goes_on():
    """An exception at one time is reported, and the next time comes (OX-79)."""
    clock = Clock()

    def fail(timer):
        timer.ended()
        clock.times.append(round(clock.now, 6))
        raise RuntimeError("no")

    clock.add(0.1, submit=fail)
    clock.turn(0.3)
    assert clock.times == [0.1, 0.2, 0.3]
    assert [str(error) for error in clock.errors] == ["no"] * 3


@pytest.mark.parametrize("interval_s", [0.0, -1.0, 0.0009, float("nan"), float("inf"), 4e7])
def test_interval_when_out_of_range_is_refused(interval_s):
    with pytest.raises(ConfigError, match="interval_s is"):
        Clock().add(interval_s)


@given(st.lists(st.tuples(st.sampled_from(["add", "loose", "cancel", "turn", "end"]), st.integers(1, 20)), max_size=60))
def test_timers_when_used_in_any_order_keep_to_their_rule(steps):
    clock = Clock()
    living, jobs = [], []

    def submit(timer):
        assert timer in living
        jobs.append(timer)
        assert timer not in squelched or jobs.count(timer) == 1
        return True

    squelched = []
    for what, amount in steps:
        if what in {"add", "loose"}:
            living.append(clock.add(amount / 10, squelch=what == "add", submit=submit))
            if what == "add":
                squelched.append(living[-1])
        elif what == "cancel" and living:
            timer = living.pop(amount % len(living))
            timer.cancel()
            timer.end()
        elif what == "end" and jobs:
            jobs.pop(amount % len(jobs)).ended()
        elif what == "turn":
            clock.turn(amount / 10, step=0.05)
        assert clock.deadlines.count == len(living)
    assert clock.errors == []
