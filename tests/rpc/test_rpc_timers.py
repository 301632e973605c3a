"""Timers on a clock turned by hand."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.errors import BusyError, ConfigError
from flowctl.loop.deadlines import Deadlines
from flowctl.rpc.jobs import timers as timers_module
from flowctl.rpc.jobs.timers import Timers


class Clock:
    """Deadlines and timers; a job that was submitted ends when it is told to."""

    def __init__(self):
        self.errors = []
        self.deadlines = Deadlines(lambda when: None, lambda where, error: self.errors.append(error))
        self.timers = Timers(self.deadlines)
        self.now = 0.0
        self.submitted = []  # (when, timer), oldest first, that have not ended
        self.times = []
        self.room = True

    def submit(self, timer):
        if self.room:
            self.submitted.append(timer)
            self.times.append(round(self.now, 6))
        return self.room

    def add(self, interval_s, **options):
        return self.timers.add(self.submit, interval_s, self.now, **options)

    def turn(self, seconds, step=0.01):
        for _ in range(round(seconds / step)):
            self.now += step
            self.deadlines.run_due(self.now + 1e-9)

    def end_all(self):
        while self.submitted:
            self.submitted.pop().ended()


def test_timer_when_its_job_ends_in_time_is_due_once_per_interval():
    """A timer of 100 ms is due at 0.1, 0.2, 0.3 s and so on."""
    clock = Clock()
    clock.add(0.1)
    for _ in range(5):
        clock.turn(0.1)
        clock.end_all()
    assert clock.times == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_timer_when_squelched_is_passed_over_until_its_job_has_ended():
    """By default a timer does not submit a second job while the first waits or runs."""
    clock = Clock()
    timer_id = clock.add(0.1)
    clock.turn(0.55)
    assert clock.times == [0.1]
    clock.end_all()
    clock.turn(0.1)
    assert clock.times == [0.1, 0.6]
    assert clock.timers.cancel(timer_id).passed_over_count == 4


def test_timer_when_not_squelched_is_submitted_each_time():
    """With squelch off jobs may run side by side."""
    clock = Clock()
    clock.add(0.1, squelch=False)
    clock.turn(0.35)
    assert clock.times == [0.1, 0.2, 0.3]
    assert len(clock.submitted) == 3


def test_timer_when_the_machine_slept_is_due_once_and_goes_on_in_step():
    """What was missed is not made up for, and the times stay multiples of the interval."""
    clock = Clock()
    timer_id = clock.add(0.1, squelch=False)
    clock.turn(1.03, step=1.03)
    assert clock.times == [1.03]
    clock.turn(0.2)
    assert clock.times == [1.03, 1.1, 1.2]
    assert clock.timers.cancel(timer_id).passed_over_count == 9


def test_timer_when_there_is_no_room_for_its_job_goes_on():
    """A job that could not be queued does not squelch the timer for ever."""
    clock = Clock()
    clock.add(0.1)
    clock.room = False
    clock.turn(0.2)
    clock.room = True
    clock.turn(0.1)
    assert clock.times == [0.3]


def test_cancel_when_called_twice_or_for_nothing_has_no_effect():
    """A timer is cancelled once; again, or one that never was, is harmless (OX-79)."""
    clock = Clock()
    timer_id = clock.add(0.1)
    assert clock.timers.cancel(timer_id) is not None
    assert clock.timers.cancel(timer_id) is None
    assert clock.timers.cancel(timer_id + 1) is None
    clock.turn(0.5)
    assert (clock.times, clock.errors) == ([], [])


def test_cancel_when_the_job_runs_lets_it_end():
    """The job that was submitted ends as it does; no other follows."""
    clock = Clock()
    timer_id = clock.add(0.1)
    clock.turn(0.1)
    clock.timers.cancel(timer_id)
    clock.end_all()
    clock.turn(0.5)
    assert clock.times == [0.1]


def test_cancel_when_called_from_the_timer_itself_is_the_end():
    """A timer may be cancelled at the very moment at which it is due."""
    clock = Clock()
    times = []

    def cancel(_):
        times.append(clock.now)
        clock.timers.cancel(timer_id)
        return False

    timer_id = clock.timers.add(cancel, 0.1, clock.now)
    clock.turn(0.5)
    assert (len(times), len(clock.timers), clock.deadlines.count) == (1, 0, 0)


def test_cancel_when_done_leaves_nothing():
    """Neither the function nor a deadline of a cancelled timer is kept, even by one who kept the timer."""
    clock = Clock()

    class Keeper:
        def submit(self, timer):
            return True

    keeper = Keeper()
    timer_id = clock.timers.add(keeper.submit, 0.1, clock.now)
    clock.turn(0.1)
    gone = weakref.ref(keeper)
    del keeper
    timer = clock.timers.cancel(timer_id)
    gc.collect()
    assert gone() is None
    assert (timer.job, len(clock.timers), clock.deadlines.count) == (None, 0, 0)


def test_cancel_when_of_all_leaves_none():
    """At the end of a node all its timers end."""
    clock = Clock()
    for _ in range(5):
        clock.add(0.1)
    clock.timers.cancel_all()
    clock.turn(0.3)
    assert (len(clock.timers), clock.deadlines.count, clock.times) == (0, 0, [])


def test_timer_when_its_submitting_fails_goes_on():
    """An exception at one time is reported, and the next time comes (OX-79)."""
    clock = Clock()

    def fail(timer):
        timer.ended()
        clock.times.append(round(clock.now, 6))
        raise RuntimeError("no")

    clock.timers.add(fail, 0.1, clock.now)
    clock.turn(0.3)
    assert clock.times == [0.1, 0.2, 0.3]
    assert [str(error) for error in clock.errors] == ["no"] * 3


@pytest.mark.parametrize("interval_s", [0.0, -1.0, 0.0009, float("nan"), float("inf")])
def test_interval_when_out_of_range_is_refused(interval_s):
    """An interval is a number of a millisecond or more."""
    with pytest.raises(ConfigError, match="interval_s is"):
        Clock().add(interval_s)


def test_timers_when_too_many_are_refused(monkeypatch):
    """A program that adds timers and forgets them is told."""
    monkeypatch.setattr(timers_module, "MOST_TIMERS", 2)
    clock = Clock()
    clock.add(1.0)
    timer_id = clock.add(1.0)
    with pytest.raises(BusyError, match="2 timers"):
        clock.add(1.0)
    clock.timers.cancel(timer_id)
    assert clock.add(1.0) > timer_id


@given(st.lists(st.tuples(st.sampled_from(["add", "loose", "cancel", "turn", "end"]), st.integers(1, 20)), max_size=60))
def test_timers_when_used_in_any_order_keep_to_their_rule(steps):
    """Squelched timers have one job at most, cancelled ones get no new one, and deadlines are those of the living."""
    clock = Clock()
    living, squelched, jobs = {}, {}, {}

    def submitter(key):
        def submit(timer):
            assert key in living
            jobs.setdefault(key, []).append(timer)
            assert not squelched[key] or len(jobs[key]) == 1
            return True

        return submit

    for number, (what, amount) in enumerate(steps):
        if what in {"add", "loose"}:
            squelched[number] = what == "add"
            living[number] = clock.timers.add(submitter(number), amount / 10, clock.now, squelch=what == "add")
        elif what == "cancel" and living:
            clock.timers.cancel(living.pop(sorted(living)[amount % len(living)]))
        elif what == "end" and jobs:
            for timer in jobs.pop(sorted(jobs)[amount % len(jobs)]):
                timer.ended()
        elif what == "turn":
            clock.turn(amount / 10, step=0.05)
        assert clock.deadlines.count == len(clock.timers) == len(living)
    assert clock.errors == []
