"""When a worker is started again, and when it hangs: rules without processes."""

from __future__ import annotations

from random import Random

from flowctl.live.cluster.workers.restarts import BACKOFF, HUNG_S, START_S, STEADY_S, WorkerPulse, WorkerRestarts


def test_restarts_when_a_process_has_lived_are_at_once():
    restarts = WorkerRestarts(Random(1))
    for _ in range(5):
        restarts.pause_after(0.1)
    assert restarts.pause_after(STEADY_S) == 0.0
    assert restarts.pause_after(0.1) == 0.0  # the first of a new series may be chance


def test_restarts_when_processes_end_soon_wait_longer_each_time():
    restarts = WorkerRestarts(Random(1))
    waits = [restarts.pause_after(0.1) for _ in range(12)]
    assert waits[0] == 0.0
    assert all(BACKOFF.first_s * 0.8 <= wait <= BACKOFF.most_s for wait in waits[1:])
    assert all(wait >= BACKOFF.most_s * 0.8 for wait in waits[-4:])


def test_pulse_when_nothing_is_answered_says_that_it_hangs():
    pulse, now = WorkerPulse(0.0), 0.0
    while now < START_S - 1:  # a process that begins is given longer
        pulse.should_ask(now)
        assert not pulse.is_hung(now)
        now += 1.0
    assert pulse.is_hung(START_S)
    pulse.note_answer(now)
    assert not pulse.is_hung(now + HUNG_S - 1)
    for _ in range(20):
        now += 2.0
        pulse.should_ask(now)
    assert pulse.is_hung(now)


def test_pulse_when_the_machine_has_slept_does_not_say_that_it_hangs():
    """A clock that has jumped over the whole time with one question open is no proof."""
    pulse = WorkerPulse(0.0)
    pulse.note_answer(0.0)
    assert pulse.should_ask(10.0)
    assert not pulse.should_ask(10.5)
    assert not pulse.is_hung(10.0 + 10 * HUNG_S)
