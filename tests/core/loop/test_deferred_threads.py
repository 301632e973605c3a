"""Deferred jobs under real threads: exact accounting while jobs are scheduled, revoked and moved at once."""

from __future__ import annotations

import random
import sys
import threading

import pytest

from flowctl.deferred import DeferredProcessor, Registration

STEPS = 20_000
SCHEDULERS = 3
REGISTRATIONS = 4
JOBS_EACH = 3
WAIT_S = 60


class Worker(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.woken = threading.Event()
        self.stopping = False
        self.errors: list[Exception] = []
        self.processor = DeferredProcessor(self.woken.set, lambda where, error: self.errors.append(error))

    def run(self) -> None:
        while not self.stopping:
            if not self.woken.wait(WAIT_S):
                return
            self.woken.clear()
            while self.processor.run_round():
                pass

    def drain(self) -> int:
        """Wait until as many further rounds were run as a job may still ask for; return the jobs this took."""
        done = threading.Event()
        rounds = iter(range(200))
        registration = Registration()
        job = registration.job(lambda: next(rounds, None) is not None or done.set())
        registration.bind(self.processor)
        registration.schedule(job)
        assert done.wait(WAIT_S)
        return 201

    def end(self) -> None:
        self.stopping = True
        self.woken.set()
        self.join(WAIT_S)


class Tracked:
    """A job that keeps accounts, and notices when its registration runs on two threads at once."""

    def __init__(self, registration: Registration, inside: threading.Lock) -> None:
        self.registration = registration
        self.inside = inside
        self.lock = threading.Lock()  # for `wanted`, which several threads raise
        self.wanted = 0  # raised before each scheduling
        self.seen = 0  # `wanted` at the last run
        self.runs = 0
        self.again_left = 50  # how many times it still asks for another round
        self.again_given = 0
        self.overlaps = 0
        self.job = registration.job(self.run)

    def run(self) -> bool:
        if not self.inside.acquire(blocking=False):
            self.overlaps += 1
            return False
        try:
            self.seen = self.wanted
            self.runs += 1
            if not self.again_left:
                return False
            self.again_left -= 1
            self.again_given += 1
            return True
        finally:
            self.inside.release()

    def schedule(self) -> bool:
        with self.lock:
            self.wanted += 1
        return self.registration.schedule(self.job)


class Hammer(threading.Thread):
    """Schedules and revokes jobs at random, as fast as it can."""

    def __init__(self, jobs: list[Tracked], seed: int) -> None:
        super().__init__(daemon=True)
        self.jobs, self.rng = jobs, random.Random(seed)
        self.accepted = self.revoked = 0

    def run(self) -> None:
        for _ in range(STEPS):
            tracked = self.rng.choice(self.jobs)
            if self.rng.random() < 0.15:
                self.revoked += tracked.registration.revoke(tracked.job)
            else:
                self.accepted += tracked.schedule()


class Mover(threading.Thread):
    def __init__(self, registrations: list[Registration], workers: list[Worker]) -> None:
        super().__init__(daemon=True)
        self.registrations, self.workers = registrations, workers
        self.rng = random.Random(99)
        self.stopping = False
        self.done = self.waiting = 0

    def run(self) -> None:
        while not self.stopping:
            moved = self.rng.choice(self.registrations).migrate(self.rng.choice(self.workers).processor)
            self.done += moved
            self.waiting += not moved


@pytest.fixture
def frequent_switches():
    """Let threads take turns a thousand times as often as usual, so that races have their chance."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_when_they_hammer_lose_and_repeat_nothing(frequent_switches):
    """Every accepted scheduling is run or revoked exactly once, on one thread at a time, and misses no update.

    Threads schedule and revoke the jobs of a few registrations as fast as they can, while another moves the
    registrations between two processors that run on threads of their own.
    """
    workers = [Worker(), Worker()]
    registrations = [Registration() for _ in range(REGISTRATIONS)]
    jobs: list[Tracked] = []
    for number, registration in enumerate(registrations):
        inside = threading.Lock()
        jobs += [Tracked(registration, inside) for _ in range(JOBS_EACH)]
        registration.bind(workers[number % 2].processor)
    hammers = [Hammer(jobs, seed) for seed in range(SCHEDULERS)]
    mover = Mover(registrations, workers)
    try:
        for thread in (*workers, mover, *hammers):
            thread.start()
        for thread in hammers:
            thread.join(WAIT_S)
        mover.stopping = True
        mover.join(WAIT_S)
        # From here on nothing is revoked, so after one more scheduling each job must see its last update.
        accepted = sum(hammer.accepted for hammer in hammers) + sum(tracked.schedule() for tracked in jobs)
        drained = sum(worker.drain() for worker in workers)
    finally:
        for worker in workers:
            worker.end()
    revoked = sum(hammer.revoked for hammer in hammers)
    runs = sum(tracked.runs for tracked in jobs)
    again = sum(tracked.again_given for tracked in jobs)
    assert [worker.errors for worker in workers] == [[], []]
    assert [tracked.overlaps for tracked in jobs] == [0] * len(jobs)
    assert not any(tracked.job.pending for tracked in jobs)
    assert [tracked.wanted for tracked in jobs] == [tracked.seen for tracked in jobs]
    # A True given in a run is one more scheduling, unless the job was revoked, or scheduled by others, meanwhile.
    assert accepted <= runs + revoked <= accepted + again
    totals = [worker.processor.statistics() for worker in workers]
    for total in totals:
        assert total.scheduled + total.moved_in == total.run + total.revoked + total.moved_out + total.pending
    assert sum(total.run for total in totals) == runs + drained
    assert sum(total.revoked for total in totals) == revoked
    assert sum(total.moved_in for total in totals) == sum(total.moved_out for total in totals)
    # The accounts close exactly: what the processors took in is what was accepted plus what jobs asked for again.
    assert sum(total.scheduled for total in totals) == runs + drained + revoked
    assert mover.done > 0


def test_threads_when_one_moves_keep_the_order_of_each_scheduler(frequent_switches):
    """Jobs scheduled one after the other by one thread run in that order, however often they are moved between.

    The scheduler waits for nothing but the last job of each series, so most of a series is pending during moves.
    """
    workers = [Worker(), Worker()]
    registration = Registration()
    log: list[int] = []
    finished = threading.Event()
    jobs = [registration.job(lambda number=number: log.append(number)) for number in range(16)]
    last = registration.job(finished.set)
    registration.bind(workers[0].processor)
    mover = Mover([registration], workers)
    try:
        for thread in (*workers, mover):
            thread.start()
        for series in range(150):
            order = random.Random(series).sample(range(len(jobs)), len(jobs))
            for number in order:
                assert registration.schedule(jobs[number])
            registration.schedule(last)
            assert finished.wait(WAIT_S)
            finished.clear()
            assert order == log
            log.clear()
    finally:
        mover.stopping = True
        mover.join(WAIT_S)
        for worker in workers:
            worker.end()
    assert mover.done > 0
