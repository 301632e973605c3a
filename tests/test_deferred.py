"""Deferred jobs: rounds, revoking, moving between processors, and exact accounting under real threads."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from flowctl.deferred import MAX_JOBS_PER_REGISTRATION, DeferredProcessor, Registration
from flowctl.errors import ClosedError, LocalProtocolError


class Bench:
    """A processor with what it called, and a log that jobs append to."""

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


def test_round_when_jobs_are_scheduled_runs_them_in_order(bench):
    """A round runs the pending jobs in the order of their scheduling and reports that none is left."""
    registrations = [bench.registration() for _ in range(3)]
    jobs = [(r, bench.logging_job(r, str(i))) for i, r in enumerate(registrations)]
    for registration, job in (jobs[1], jobs[0], jobs[2]):
        assert True is registration.schedule(job)
    assert False is bench.processor.run_round()
    assert ["1", "0", "2"] == bench.log


def test_schedule_when_pending_is_idempotent_and_wakes_once(bench):
    """A job that is pending is not scheduled a second time, and an idle processor is woken once for many jobs."""
    registration = bench.registration()
    first, second = bench.logging_job(registration, "a"), bench.logging_job(registration, "b")
    assert [True, False, True, False] == [registration.schedule(j) for j in (first, first, second, first)]
    assert 1 == bench.wakes
    bench.processor.run_round()
    assert ["a", "b"] == bench.log
    registration.schedule(first)
    assert 2 == bench.wakes


def test_pending_when_callback_begins_is_false(bench):
    """A job is pending from its scheduling until its callback begins."""
    registration = bench.registration()
    seen = []
    job = registration.job(lambda: seen.append(job.pending))
    assert not job.pending
    registration.schedule(job)
    assert job.pending
    bench.processor.run_round()
    assert [False] == seen


def test_job_when_it_schedules_itself_runs_in_the_next_round(bench):
    """A job rescheduled in its own run waits for the next round, and the round says that work is left."""
    registration = bench.registration()
    job = registration.job(lambda: (bench.log.append("x"), registration.schedule(job))[0])
    registration.schedule(job)
    assert True is bench.processor.run_round()
    assert ["x"] == bench.log
    assert 1 == bench.wakes


def test_job_when_it_returns_true_runs_again_until_it_does_not(bench):
    """Returning True asks for another round, one at a time; other truthy values do not."""
    registration = bench.registration()
    left = [True, True, "yes"]
    job = registration.job(lambda: left.pop(0))
    registration.schedule(job)
    assert [True, True, False] == [bench.processor.run_round() for _ in range(3)]
    assert [] == left


def test_job_when_scheduled_by_another_job_of_the_round_waits(bench):
    """What is scheduled during a round, by whichever job, belongs to the next one."""
    registration = bench.registration()
    late = bench.logging_job(registration, "late")
    early = registration.job(lambda: (bench.log.append("early"), registration.schedule(late))[0])
    registration.schedule(early)
    assert True is bench.processor.run_round()
    assert ["early"] == bench.log
    assert False is bench.processor.run_round()
    assert ["early", "late"] == bench.log


def test_round_when_a_job_raises_goes_on_and_reports(bench):
    """An exception of one job is reported with its name and costs the other jobs nothing."""
    registration = bench.registration()
    failing = registration.job(lambda: 1 // 0, "divide")
    after = bench.logging_job(registration, "after")
    registration.schedule(failing)
    registration.schedule(after)
    bench.processor.run_round()
    assert ["after"] == bench.log
    assert [("job 'divide'", ZeroDivisionError)] == [(where, type(error)) for where, error in bench.errors]
    assert 1 == bench.processor.statistics().failed
    assert conserved(bench.processor)


def test_round_when_interrupted_can_be_run_again(bench):
    """KeyboardInterrupt leaves the round, but neither loses the jobs behind it nor blocks the next round."""
    registration = bench.registration()

    def interrupt() -> None:
        raise KeyboardInterrupt

    registration.schedule(registration.job(interrupt))
    after = bench.logging_job(registration, "after")
    registration.schedule(after)
    with pytest.raises(KeyboardInterrupt):
        bench.processor.run_round()
    third = bench.logging_job(registration, "third")
    registration.schedule(third)
    assert 2 == bench.wakes
    bench.processor.run_round()
    assert ["after", "third"] == bench.log


def test_round_when_called_from_a_job_is_refused(bench):
    """A round inside a round would break the guard against saturation, so it is refused."""
    registration = bench.registration()
    registration.schedule(registration.job(bench.processor.run_round))
    bench.processor.run_round()
    assert [LocalProtocolError] == [type(error) for _, error in bench.errors]


def test_wake_when_it_fails_is_reported_and_tried_again(bench):
    """A wake that raises (a closed loop) does not fail who schedules, and the next schedule tries again."""
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
    """A job belongs to the registration that made it."""
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
    """Scheduling and running a job ten thousand times leaves the number of memory blocks where it was."""
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
    assert 100 > sys.getallocatedblocks() - before


# --- revoke and release ------------------------------------------------------------------------------------------


def test_revoke_when_pending_prevents_the_run(bench):
    """A revoked job does not run, wherever in the list it was; its neighbours do, in order."""
    registration = bench.registration()
    jobs = [bench.logging_job(registration, name) for name in "abcde"]
    for job in jobs:
        registration.schedule(job)
    assert [True, True, True] == [registration.revoke(jobs[i]) for i in (0, 2, 4)]
    assert False is registration.revoke(jobs[0])
    bench.processor.run_round()
    assert ["b", "d"] == bench.log
    assert conserved(bench.processor)


def test_revoke_when_taken_into_the_running_round_prevents_the_run(bench):
    """A job of the running round that has not begun can still be revoked."""
    registration = bench.registration()
    victim = bench.logging_job(registration, "victim")
    killer = registration.job(lambda: bench.log.append(f"killer {registration.revoke(victim)}"))
    registration.schedule(killer)
    registration.schedule(victim)
    assert False is bench.processor.run_round()
    assert ["killer True"] == bench.log


def test_revoke_when_running_cancels_the_request_for_another_round(bench):
    """Revoking a job during its run makes its True void."""
    registration = bench.registration()

    def run() -> bool:
        bench.log.append(f"run {registration.revoke(job)}")
        return True

    job = registration.job(run)
    registration.schedule(job)
    assert False is bench.processor.run_round()
    assert ["run False"] == bench.log
    registration.schedule(job)
    bench.processor.run_round()
    assert 2 == len(bench.log)


def test_release_when_jobs_are_pending_revokes_all(bench):
    """After a release nothing of the registration runs, other registrations do, and late calls are counted."""
    gone, stays = bench.registration(), bench.registration()
    jobs = [bench.logging_job(gone, name) for name in "ab"]
    for job in jobs:
        gone.schedule(job)
    stays.schedule(bench.logging_job(stays, "stays"))
    gone.release()
    gone.release()
    assert gone.released
    assert gone.processor is None
    bench.processor.run_round()
    assert ["stays"] == bench.log
    assert [False, False] == [gone.schedule(job) for job in jobs]
    assert 2 == gone.late_schedule_count
    assert conserved(bench.processor)


def test_release_when_called_from_its_own_job_stops_it(bench):
    """A job that releases its own registration and returns True is not run again."""
    registration = bench.registration()
    job = registration.job(lambda: registration.release() or True)
    registration.schedule(job)
    assert False is bench.processor.run_round()
    assert 0 == registration.late_schedule_count


def test_release_when_done_refuses_what_needs_a_registration(bench):
    """A released registration can neither be bound, nor moved, nor make jobs."""
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


def test_schedule_when_not_bound_is_kept_until_bind(bench):
    """Jobs scheduled before the registration is bound move to the processor in order and wake it once."""
    registration = Registration()
    jobs = {name: bench.logging_job(registration, name) for name in "abc"}
    assert [True, True, False, True] == [registration.schedule(jobs[name]) for name in "caab"]
    assert registration.revoke(jobs["a"])
    assert registration.schedule(jobs["a"])
    assert 0 == bench.wakes
    registration.bind(bench.processor)
    assert 1 == bench.wakes
    bench.processor.run_round()
    assert ["c", "b", "a"] == bench.log


def test_bind_when_bound_already_is_refused(bench):
    """A registration has one processor at a time."""
    registration = bench.registration()
    with pytest.raises(LocalProtocolError):
        registration.bind(bench.processor)


def test_bind_when_on_hold_keeps_jobs_until_activate(bench):
    """On hold the processor is known but no job runs; activate hands them over."""
    registration = Registration()
    job = bench.logging_job(registration, "a")
    registration.bind(bench.processor, hold=True)
    assert registration.processor is bench.processor
    registration.schedule(job)
    assert False is bench.processor.run_round()
    assert [] == bench.log
    registration.activate()
    registration.activate()
    bench.processor.run_round()
    assert ["a"] == bench.log


def test_unbind_when_jobs_are_pending_keeps_them_for_the_next_bind(bench):
    """Pending jobs survive being unbound, in order."""
    registration = bench.registration()
    for name in "ab":
        registration.schedule(bench.logging_job(registration, name))
    registration.unbind()
    assert registration.processor is None
    assert False is bench.processor.run_round()
    other = Bench()
    registration.bind(other.processor)
    other.processor.run_round()
    assert ["a", "b"] == bench.log
    assert conserved(bench.processor)
    assert conserved(other.processor)


def test_migrate_when_jobs_are_pending_moves_them_in_order(bench):
    """Pending jobs run once each, in order, on the new processor, behind what was pending there."""
    other = Bench()
    registration = bench.registration()
    resident = other.registration()
    resident.schedule(other.logging_job(resident, "resident"))
    jobs = {name: other.logging_job(registration, name) for name in "abc"}
    for name in "bca":
        registration.schedule(jobs[name])
    assert True is registration.migrate(other.processor)
    assert registration.processor is other.processor
    assert False is bench.processor.run_round()
    other.processor.run_round()
    assert ["resident", "b", "c", "a"] == other.log


def test_migrate_when_round_is_running_takes_along_what_has_not_begun(bench):
    """Another registration's job moves this one in the middle of a round: the rest of it runs elsewhere, once."""
    other = Bench()
    moving, staying = bench.registration(), bench.registration()
    a, b = bench.logging_job(moving, "a"), bench.logging_job(moving, "b")
    mover = staying.job(lambda: bench.log.append(f"moved {moving.migrate(other.processor)}"))
    for registration, job in ((moving, a), (staying, mover), (moving, b)):
        registration.schedule(job)
    moving.schedule(a)
    bench.processor.run_round()
    assert ["a", "moved True"] == bench.log
    other.processor.run_round()
    assert ["a", "moved True", "b"] == bench.log


def test_migrate_when_called_from_its_own_job_waits_for_its_end(bench):
    """A registration never runs on two threads: the move is made when the running job ends, before its next job."""
    other = Bench()
    registration = bench.registration()

    def first() -> bool:
        bench.log.append(f"first {registration.migrate(other.processor)}")
        assert registration.processor is bench.processor
        assert False is other.processor.run_round()
        return True

    jobs = [registration.job(first), bench.logging_job(registration, "second")]
    for job in jobs:
        registration.schedule(job)
    assert False is bench.processor.run_round()
    assert ["first False"] == bench.log
    assert registration.processor is other.processor
    assert 1 == other.wakes
    registration.revoke(jobs[0])
    other.processor.run_round()
    assert ["first False", "second"] == bench.log


def test_migrate_when_the_running_job_raises_is_still_carried_out(bench):
    """A failure of the job that the move waited for does not lose the move, an interrupt neither."""
    for kind in (ValueError, KeyboardInterrupt):
        other = Bench()
        registration = bench.registration()

        def fail(kind=kind, registration=registration, other=other) -> None:
            registration.migrate(other.processor)
            raise kind

        registration.schedule(registration.job(fail))
        try:
            bench.processor.run_round()
        except KeyboardInterrupt:
            pass
        assert registration.processor is other.processor


def test_migrate_when_replaced_by_a_later_one_goes_to_the_later(bench):
    """Of several moves asked for during one run, the last counts; back to the present processor is no move."""
    first, second = Bench(), Bench()
    registration = bench.registration()
    targets = [first.processor, second.processor]
    job = registration.job(lambda: [registration.migrate(t) for t in targets] and None)
    registration.schedule(job)
    bench.processor.run_round()
    assert registration.processor is second.processor
    targets[:] = [first.processor, second.processor]
    registration.schedule(job)
    second.processor.run_round()
    assert registration.processor is second.processor
    assert True is registration.migrate(second.processor)


def test_migrate_when_on_hold_keeps_jobs_until_activate(bench):
    """A move with hold gives the new thread the time to greet the connection before its jobs run."""
    other = Bench()
    registration = bench.registration()
    registration.schedule(bench.logging_job(registration, "a"))
    registration.migrate(other.processor, hold=True)
    assert False is other.processor.run_round()
    registration.activate()
    other.processor.run_round()
    assert ["a"] == bench.log


def test_migrate_when_another_thread_runs_a_job_waits_for_it():
    """A move asked for while a job runs on its thread is made by that thread when the job has ended."""
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
    assert [] == here.log
    there.processor.run_round()
    assert ["second"] == here.log


# --- any sequence of calls against a model -----------------------------------------------------------------------


class Model:
    """What one registration should have pending and where, kept in the plainest way."""

    def __init__(self) -> None:
        self.processor: int | None = None
        self.kept: list[str] = []  # pending while unbound or on hold
        self.held = True
        self.released = False


class DeferredMachine(RuleBasedStateMachine):
    """Random calls, also from inside running jobs, against lists of names."""

    registrations = Bundle("registrations")

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.processors = [DeferredProcessor(lambda: None, self.failed) for _ in range(2)]
        self.queues: list[list[str]] = [[], []]
        self.models: dict[Registration, Model] = {}
        self.jobs: dict[str, tuple[Registration, object]] = {}
        self.again: set[str] = set()
        self.revoked_in_run: set[str] = set()
        self.in_run: dict[str, list] = {}
        self.running: str | None = None
        self.target: tuple[int, bool] | None = None
        self.accepted = self.revoked = 0

    def failed(self, where: str, error: Exception) -> None:
        raise AssertionError(where) from error

    @rule(target=registrations)
    def new(self):
        registration = Registration()
        self.models[registration] = Model()
        for letter in "abc":
            name = f"{len(self.models)}{letter}"
            self.jobs[name] = (registration, registration.job(lambda name=name: self.job_runs(name), name))
        return registration

    def job_runs(self, name: str) -> bool:
        self.ran.append(name)
        self.running = name
        self.revoked_in_run.discard(name)
        for action in self.in_run.pop(name, []):
            action()
        return name in self.again

    def names(self, registration: Registration) -> list[str]:
        return [name for name, (owner, _) in self.jobs.items() if owner is registration]

    def queue_of(self, model: Model) -> list[str]:
        return model.kept if model.held or model.processor is None else self.queues[model.processor]

    def is_running(self, registration: Registration) -> bool:
        return self.running is not None and self.jobs[self.running][0] is registration

    # The calls, each with its effect on the model.

    def do_schedule(self, registration, letter):
        name = self.names(registration)[letter]
        model = self.models[registration]
        queue = self.queue_of(model)
        expected = not model.released and name not in queue
        if expected:
            queue.append(name)
            self.accepted += 1
        assert expected == registration.schedule(self.jobs[name][1])

    def do_revoke(self, registration, letter):
        name = self.names(registration)[letter]
        queue = self.queue_of(self.models[registration])
        expected = name in queue
        if expected:
            queue.remove(name)
            self.revoked += 1
        self.revoked_in_run.add(name)
        assert expected == registration.revoke(self.jobs[name][1])

    def do_release(self, registration):
        model = self.models[registration]
        names = self.names(registration)
        for queue in (model.kept, *self.queues):
            self.revoked += sum(name in names for name in queue)
            queue[:] = [name for name in queue if name not in names]
        model.released, model.processor, model.held = True, None, True
        if self.is_running(registration):
            self.target = None
        registration.release()

    def take_back(self, registration):
        model = self.models[registration]
        if model.processor is not None and not model.held:
            queue, names = self.queues[model.processor], self.names(registration)
            model.kept = [name for name in queue if name in names]
            queue[:] = [name for name in queue if name not in names]
        model.held = True

    def settle(self, registration, number, hold):
        model = self.models[registration]
        if model.processor == number and not hold and not model.held:
            return
        self.take_back(registration)
        model.processor, model.held = number, hold
        if not hold:
            self.queues[number] += model.kept
            model.kept = []

    def do_migrate(self, registration, number, hold):
        model = self.models[registration]
        if model.released:
            with pytest.raises(ClosedError):
                registration.migrate(self.processors[number])
            return
        waits = self.is_running(registration) and model.processor is not None
        if waits:
            self.target = (number, hold)
        else:
            self.settle(registration, number, hold)
        assert (not waits) == registration.migrate(self.processors[number], hold=hold)

    def do_activate(self, registration):
        model = self.models[registration]
        if model.processor is not None and model.held:
            model.held = False
            self.queues[model.processor] += model.kept
            model.kept = []
        registration.activate()

    calls = st.one_of(
        st.tuples(st.just("do_schedule"), st.integers(0, 2)),
        st.tuples(st.just("do_schedule"), st.integers(0, 2)),
        st.tuples(st.just("do_revoke"), st.integers(0, 2)),
        st.tuples(st.just("do_migrate"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("do_activate")),
    )

    @rule(registration=registrations, call=calls)
    def outside(self, registration, call):
        getattr(self, call[0])(registration, *call[1:])

    @rule(registration=registrations, number=st.integers(0, 1), hold=st.booleans())
    def bind(self, registration, number, hold):
        model = self.models[registration]
        if model.released or model.processor is not None:
            with pytest.raises((ClosedError, LocalProtocolError)):
                registration.bind(self.processors[number])
            return
        self.settle(registration, number, hold)
        registration.bind(self.processors[number], hold=hold)

    @rule(registration=registrations)
    def unbind(self, registration):
        self.take_back(registration)
        self.models[registration].processor = None
        registration.unbind()

    @rule(registration=consumes(registrations))
    def release(self, registration):
        self.do_release(registration)

    @rule(
        number=st.integers(0, 1),
        inner=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3), calls), max_size=6),
        again=st.sets(st.integers(0, 11), max_size=3),
        released=st.none() | st.tuples(st.integers(0, 11), st.integers(0, 3)),
    )
    def run_round(self, number, inner, again, released):
        """Run a round whose jobs make further calls, and work out what should have run by the model."""
        names = sorted(self.jobs)
        owners = list(self.models)
        if not names:
            assert False is self.processors[number].run_round()
            return
        self.again = {names[i % len(names)] for i in again}
        self.in_run = {}
        for who, owner, call in inner:
            registration = owners[owner % len(owners)]
            if not self.models[registration].released:
                self.in_run.setdefault(names[who % len(names)], []).append(
                    lambda r=registration, c=call: getattr(self, c[0])(r, *c[1:])
                )
        if released is not None:
            registration = owners[released[1] % len(owners)]
            self.in_run.setdefault(names[released[0] % len(names)], []).append(lambda: self.do_release(registration))
        # The model follows the real round through job_runs: before each job it pops the head of its own queue.
        batch = list(self.queues[number])
        model_ran: list[str] = []
        original = self.job_runs

        def follow(name: str) -> bool:
            self.finish_previous()
            while batch and batch[0] not in self.queues[number]:
                batch.pop(0)  # revoked or moved away since the round began
            model_ran.append(batch.pop(0))
            self.queues[number].remove(model_ran[-1])
            return original(name)

        self.ran = []
        self.job_runs = follow
        try:
            left = self.processors[number].run_round()
        finally:
            self.job_runs = original
        self.finish_previous()
        # A job revoked and scheduled again during the round is in the queue, but no longer of this batch.
        assert model_ran == self.ran
        assert bool(self.queues[number]) == left
        self.in_run = {}

    def finish_previous(self):
        """Do to the model what the processor does when a job has ended: run it again if asked, then move."""
        name, self.running = self.running, None
        if name is None:
            return
        registration = self.jobs[name][0]
        model = self.models[registration]
        queue = self.queue_of(model)
        if name in self.again and name not in self.revoked_in_run and name not in queue and not model.released:
            queue.append(name)
            self.accepted += 1
        if self.target is not None:
            target, self.target = self.target, None
            self.settle(registration, *target)

    @invariant()
    def pending_is_what_the_model_says(self):
        pending = {name for queue in self.queues for name in queue}
        pending |= {name for model in self.models.values() for name in model.kept}
        assert pending == {name for name, (_, job) in self.jobs.items() if job.pending}
        for number, processor in enumerate(self.processors):
            assert len(self.queues[number]) == processor.statistics().pending
            assert conserved(processor)


DeferredMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestDeferredMachine = DeferredMachine.TestCase


# --- real threads ------------------------------------------------------------------------------------------------


class Worker(threading.Thread):
    """A thread that runs rounds when woken, as a loop does."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.woken = threading.Event()
        self.stopping = False
        self.errors: list[Exception] = []
        self.processor = DeferredProcessor(self.woken.set, lambda where, error: self.errors.append(error))

    def run(self) -> None:
        while not self.stopping:
            if not self.woken.wait(10):
                return
            self.woken.clear()
            while self.processor.run_round():
                pass


def test_threads_when_they_hammer_lose_and_repeat_nothing():
    """Every accepted scheduling is run or revoked exactly once, never on two threads, and misses no update.

    Threads schedule and revoke the jobs of a few registrations as fast as they can while another moves the
    registrations between two processors that run on threads of their own.
    """
    steps, schedulers, jobs_each = 4_000, 3, 3
    workers = [Worker(), Worker()]
    registrations = [Registration() for _ in range(4)]
    wanted: dict[object, int] = {}
    seen: dict[object, int] = {}
    runs: dict[object, int] = {}
    again_left: dict[object, int] = {}
    again_given: dict[object, int] = {}
    inside = [threading.Lock() for _ in registrations]
    overlaps: list[int] = []
    all_jobs = []

    def make(number: int) -> None:
        def callback() -> bool:
            if not inside[number].acquire(blocking=False):
                overlaps.append(number)
                return False
            try:
                seen[job] = wanted[job]
                runs[job] += 1
                if again_left[job]:
                    again_left[job] -= 1
                    again_given[job] += 1
                    return True
                return False
            finally:
                inside[number].release()

        job = registrations[number].job(callback)
        wanted[job] = runs[job] = seen[job] = again_given[job] = 0
        again_left[job] = 50
        all_jobs.append((registrations[number], job))

    for number in range(len(registrations)):
        for _ in range(jobs_each):
            make(number)
    for number, registration in enumerate(registrations):
        registration.bind(workers[number % 2].processor)
    accepted, revoked = [0] * schedulers, [0] * schedulers
    locks = {job: threading.Lock() for _, job in all_jobs}

    def hammer(which: int) -> None:
        rng = random.Random(which)
        for _ in range(steps):
            registration, job = rng.choice(all_jobs)
            if rng.random() < 0.15:
                revoked[which] += registration.revoke(job)
            else:
                with locks[job]:
                    wanted[job] += 1
                accepted[which] += registration.schedule(job)

    moving = threading.Event()

    def move() -> None:
        rng = random.Random(99)
        while not moving.is_set():
            rng.choice(registrations).migrate(rng.choice(workers).processor)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=hammer, args=(which,)) for which in range(schedulers)]
        mover = threading.Thread(target=move)
        for thread in (*workers, mover, *threads):
            thread.start()
        for thread in threads:
            thread.join(60)
        moving.set()
        mover.join(60)
        # From here on nothing is revoked: after one more scheduling each job must have seen its last update.
        for registration, job in all_jobs:
            accepted[0] += registration.schedule(job)
        flushed = [threading.Event() for _ in workers]
        enders = []
        for worker, event in zip(workers, flushed, strict=True):
            ender = Registration()
            rounds = iter(range(200))  # more rounds than a job may still ask for
            ender_job = ender.job(lambda rounds=rounds, event=event: next(rounds, None) is not None or event.set())
            ender.bind(worker.processor)
            enders.append(ender)
            ender.schedule(ender_job)
        assert all(event.wait(60) for event in flushed)
    finally:
        sys.setswitchinterval(switch)
        for worker in workers:
            worker.stopping = True
            worker.woken.set()
            worker.join(10)
    assert [[], []] == [worker.errors for worker in workers]
    assert [] == overlaps
    assert [] == [job for _, job in all_jobs if job.pending]
    assert wanted == seen
    # A True given in a run is one more scheduling, unless it was revoked or the job was scheduled again meanwhile.
    ran = sum(runs.values())
    assert sum(accepted) <= ran + sum(revoked) <= sum(accepted) + sum(again_given.values())
    totals = [worker.processor.statistics() for worker in workers]
    assert all(conserved(worker.processor) for worker in workers)
    enders_run = 2 * 201
    assert ran + enders_run == sum(t.run for t in totals)
    assert sum(t.scheduled + t.moved_in for t in totals) == sum(t.run + t.revoked + t.moved_out for t in totals)
    assert sum(t.moved_in for t in totals) == sum(t.moved_out for t in totals)
    assert sum(revoked) == sum(t.revoked for t in totals)
