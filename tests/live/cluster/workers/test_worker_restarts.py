"""When a worker is started again, and when it hangs: rules without processes."""

from __future__ import annotations

from random import Random

from flowctl.live.cluster.workers.restarts import HUNG_S, RESTARTS, START_S, STEADY_S, Restarts, WorkerPulse


def test_restarts_when_a_process_has_lived_are_at_once():
    restarts = Restarts(Random(1))
    for _ in range(5):
        restarts.ended(0.1)
    assert restarts.ended(STEADY_S) == 0.0
    assert restarts.ended(0.1) == 0.0  # the first of a new series may be chance


def test_restarts_when_processes_end_soon_wait_longer_each_time():
    restarts = Restarts(Random(1))
    waits = [restarts.ended(0.1) for _ in range(12)]
    assert waits[0] == 0.0
    assert all(RESTARTS.first_s * 0.8 <= wait <= RESTARTS.most_s for wait in waits[1:])
    assert all(wait >= RESTARTS.most_s * 0.8 for wait in waits[-4:])


def test_pulse_when_nothing_is_answered_says_that_it_hangs():
    pulse, now = WorkerPulse(0.0), 0.0
    while now < START_S - 1:  # a process that begins is given longer
        pulse.asks(now)
        assert not pulse.hangs(now)
        now += 1.0
    assert pulse.hangs(START_S)
    pulse.heard(now)
    assert not pulse.hangs(now + HUNG_S - 1)
    for _ in range(20):
        now += 2.0
        pulse.asks(now)
    assert pulse.hangs(now)


def test_pulse_when_the_machine_has_slept_does_not_say_that_it_hangs():
    """A clock that has jumped over the whole time with one question open is no proof."""
    pulse = WorkerPulse(0.0)
    pulse.heard(0.0)
    assert pulse.asks(10.0)
    assert not pulse.asks(10.5)
    assert not pulse.hangs(10.0 + 10 * HUNG_S)
