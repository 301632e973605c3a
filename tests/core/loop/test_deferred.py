"""Deferred jobs: rounds, revoking, and moving between processors, one rule at a time."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref

import pytest

from flowctl.core.loop.locks import OwnedLock
from flowctl.deferred import MAX_JOBS_PER_REGISTRATION, DeferredProcessor, Purpose, Registration
from flowctl.errors import ClosedError, LocalProtocolError


class Bench:
    def __init__(self) -> None:
        self.wakes = 0
        self.errors: list[tuple[str, Exception]] = []
        self.log: list[str] = []
        self.processor = DeferredProcessor(self.wake, lambda where, error: self.errors.append((where, error)))

    def wake(self) -> None:
        self.wakes += 1

    def registration(self) -> Registration:
        registration = Registration()
        registration.bind(self.processor)
        return registration

    def logging_job(self, registration: Registration, name: str):
        return registration.job(lambda: self.log.append(name), name)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def conserved(processor: DeferredProcessor) -> bool:
    s = processor.statistics()
    return s.scheduled + s.moved_in == s.run + s.revoked + s.moved_out + s.pending


# --- scheduling and rounds ---------------------------------------------------------------------------------------


def test_round_when_more_is_pending_than_it_may_run_leaves_the_rest_in_order(bench):
    registration = bench.registration()
    jobs = [bench.logging_job(registration, str(number)) for number in range(5)]
    for job in jobs:
        registration.schedule(job)
    wakes = bench.wakes
    assert True is bench.processor.run_round(2)
    assert bench.log == ["0", "1"]
    registration.schedule(jobs[0])
    assert True is bench.processor.run_round(2)
    assert False is bench.processor.run_round(2)
    assert bench.log == ["0", "1", "2", "3", "4", "0"]
    assert bench.wakes == wakes
    assert conserved(bench.processor)
    registration.schedule(jobs[1])
    assert bench.wakes == wakes + 1


def test_schedule_when_pending_is_idempotent_and_wakes_once(bench):
    registration = bench.registration()
    first, second = bench.logging_job(registration, "a"), bench.logging_job(registration, "b")
    assert [registration.schedule(j) for j in (first, first, second, first)] == [True, False, True, False]
    assert bench.wakes == 1
    bench.processor.run_round()
    assert bench.log == ["a", "b"]
    registration.schedule(first)
    assert bench.wakes == 2


def test_pending_when_callback_begins_is_false(bench):
    registration = bench.registration()
    seen = []
    job = registration.job(lambda: seen.append(job.pending))
    assert not job.pending
    registration.schedule(job)
    assert job.pending
    bench.processor.run_round()
    assert seen == [False]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_round_when_a_job_raises_what_is_no_exception_goes_on(bench, kind):
    registration = bench.registration()

    def interrupt() -> None:
        raise kind

    registration.schedule(registration.job(interrupt, "interrupt"))
    registration.schedule(bench.logging_job(registration, "after"))
    assert bench.processor.run_round() is False
    assert bench.log == ["after"]
    assert bench.processor.statistics().failed == 1
    assert [(where, type(error), type(error.__cause__)) for where, error in bench.errors] == [
        ("job 'interrupt'", LocalProtocolError, kind)
    ]
    registration.schedule(bench.logging_job(registration, "third"))
    assert bench.wakes == 2
    bench.processor.run_round()
    assert bench.log == ["after", "third"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_round_when_the_error_hook_raises_goes_on(kind, caplog):
    log = []

    def hook(where, error) -> None:
        raise kind("hook")

    processor = DeferredProcessor(lambda: None, hook)
    registration = Registration()
    registration.bind(processor)
    registration.schedule(registration.job(lambda: 1 // 0, "divide"))
    registration.schedule(registration.job(lambda: log.append("after")))
    assert processor.run_round() is False
    assert log == ["after"]
    assert "the error hook, told of job 'divide'" in caplog.text


def test_round_when_called_from_a_job_is_refused(bench):
    """A round inside a round would break the guard against saturation, so it is refused."""
    registration = bench.registration()
    registration.schedule(registration.job(bench.processor.run_round))
    bench.processor.run_round()
    assert [LocalProtocolError] == [type(error) for _, error in bench.errors]


def test_wake_when_it_fails_is_reported_and_tried_again(bench):
    calls = []

    def wake() -> None:
        calls.append(1)
        raise RuntimeError("closed")

    errors = []
    processor = DeferredProcessor(wake, lambda where, error: errors.append(where))
    registration = Registration()
    registration.bind(processor)
    first, second = registration.job(lambda: None), registration.job(lambda: None)
    assert registration.schedule(first)
    assert registration.schedule(second)
    assert 2 == len(calls) == len(errors)


def test_schedule_when_job_is_of_another_registration_is_refused(bench):
    mine, other = bench.registration(), bench.registration()
    job = bench.logging_job(other, "x")
    with pytest.raises(LocalProtocolError):
        mine.schedule(job)
    with pytest.raises(LocalProtocolError):
        mine.revoke(job)


def test_job_when_there_are_too_many_is_refused(bench):
    """A registration makes a bounded number of jobs: one per purpose, not one per use."""
    registration = bench.registration()
    for _ in range(MAX_JOBS_PER_REGISTRATION):
        registration.job(lambda: None)
    with pytest.raises(LocalProtocolError):
        registration.job(lambda: None)


def test_schedule_when_repeated_allocates_nothing(bench):
    registration = bench.registration()
    job = registration.job(lambda: None)

    def cycle(count: int) -> None:
        for _ in range(count):
            registration.schedule(job)
            bench.processor.run_round()

    cycle(100)
    gc.collect()
    before = sys.getallocatedblocks()
    cycle(10_000)
    gc.collect()
    # The counters became larger integers; a node kept per job would be ten thousand blocks.
    assert sys.getallocatedblocks() - before < 100


# --- revoke and release ------------------------------------------------------------------------------------------


def test_release_when_done_refuses_what_needs_a_registration(bench):
    registration = bench.registration()
    registration.release()
    for call in (
        lambda: registration.bind(bench.processor),
        lambda: registration.migrate(bench.processor),
        lambda: registration.job(lambda: None),
    ):
        with pytest.raises(ClosedError):
            call()


def test_release_when_done_frees_the_owner_without_the_collector(bench):
    """Releasing cuts the cycle owner, registration, job, owner, so that a closed connection's memory goes at once."""

    class Owner:
        def __init__(self) -> None:
            self.registration = bench.registration()
            self.job = self.registration.job(self.run)

        def run(self) -> None: ...

    owner = Owner()
    owner.registration.schedule(owner.job)
    owner.registration.release()
    reference = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert reference() is None
    finally:
        gc.enable()


# --- bind, hold, migrate -----------------------------------------------------------------------------------------


def test_migrate_when_the_running_job_raises_is_still_carried_out(bench):
    for kind in (ValueError, KeyboardInterrupt, SystemExit):
        other = Bench()
        registration = bench.registration()

        def fail(kind=kind, registration=registration, other=other) -> None:
            registration.migrate(other.processor)
            raise kind

        registration.schedule(registration.job(fail))
        bench.processor.run_round()
        assert registration.processor is other.processor


def test_migrate_when_another_thread_runs_a_job_waits_for_it():
    here, there = Bench(), Bench()
    registration = here.registration()
    entered, go_on = threading.Event(), threading.Event()
    job = registration.job(lambda: (entered.set(), go_on.wait(10))[0])
    second = here.logging_job(registration, "second")
    registration.schedule(job)
    registration.schedule(second)
    thread = threading.Thread(target=here.processor.run_round)
    thread.start()
    assert entered.wait(10)
    assert False is registration.migrate(there.processor)
    assert False is there.processor.run_round()
    go_on.set()
    thread.join(10)
    assert here.log == []
    there.processor.run_round()
    assert here.log == ["second"]


def test_run_soon_when_called_again_uses_the_job_of_that_purpose(bench):
    registration, rare = bench.registration(), Purpose("rare")
    assert registration.run_soon(lambda: bench.log.append("one"), rare) is True
    assert registration.run_soon(lambda: bench.log.append("two"), rare) is False
    assert registration.run_soon(lambda: bench.log.append("other"), Purpose("rare")) is True
    bench.processor.run_round()
    assert registration.run_soon(lambda: bench.log.append("three"), rare) is True
    bench.processor.run_round()
    assert bench.log == ["one", "other", "one"], "the callback given first stays"
    registration.release()
    assert registration.run_soon(lambda: bench.log.append("late"), Purpose("late")) is False
    bench.processor.run_round()
    assert (registration.late_schedule_count, len(bench.log)) == (1, 3)
    assert conserved(bench.processor)


def test_run_soon_when_an_application_has_a_job_of_that_name_runs_its_own(bench):
    """A job is found by its purpose, an object; what others call theirs does not matter, nor how many they have."""
    registration, close = bench.registration(), Purpose("close")
    mine = [bench.logging_job(registration, "close") for _ in range(MAX_JOBS_PER_REGISTRATION)]
    assert registration.run_soon(lambda: bench.log.append("flowctl's"), close) is True
    registration.schedule(mine[0])
    bench.processor.run_round()
    assert bench.log == ["flowctl's", "close"]


def test_registrations_when_they_share_a_lock_with_their_owner_work_alike(bench):
    lock = OwnedLock()
    registration = Registration(lock)
    registration.bind(bench.processor)
    with lock:
        registration.schedule(bench.logging_job(registration, "a"))
    bench.processor.run_round()
    assert bench.log == ["a"]
