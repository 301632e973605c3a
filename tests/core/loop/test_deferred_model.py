"""Deferred jobs: any sequence of calls, also from inside running jobs, against a model made of plain lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from flowctl.deferred import DeferredProcessor, Registration
from flowctl.errors import ClosedError, LocalProtocolError


def conserved(processor: DeferredProcessor) -> bool:
    s = processor.statistics()
    return s.scheduled + s.moved_in == s.run + s.revoked + s.moved_out + s.pending


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
