"""Jobs on real threads: what runs where, what is told, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import Future
from functools import partial
from math import inf

import pytest

from flowctl.errors import BusyError, ConfigError
from flowctl.nodes.rpc.jobs import dispatcher as dispatcher_module
from flowctl.nodes.rpc.jobs import workers as workers_module
from flowctl.nodes.rpc.jobs.batch import NODE_THREAD, Batch
from flowctl.nodes.rpc.jobs.dispatcher import Dispatcher
from flowctl.nodes.rpc.jobs.slots import SlotVerdict, WorkerJob
from flowctl.nodes.rpc.nodecalls import NodeCalls
from flowctl.pollgroup import PollGroup

WAIT_S = 20.0


class Bench:
    """A dispatcher on a group of its own, and the errors that were reported."""

    def __init__(self, group, general=2):
        self.group = group
        self.dispatcher = Dispatcher("test", general, NodeCalls(group))

    def start(self):
        self.dispatcher.start()
        return self

    def on(self, call):
        """Call on the node's thread and return what it returns."""
        done = Future()
        self.group.call_soon(lambda: done.set_result(call()))
        return done.result(WAIT_S)

    def command(self, lane, call, deadline=inf):
        """Submit a command; return the verdict and a future of its outcome: its value, or what it raised."""
        future = Future()

        def done(value, error):
            future.set_result(value if error is None else error)

        verdict = self.on(lambda: self.dispatcher.submit(WorkerJob(lane, call, done, deadline=deadline, name="a.b")))
        return verdict, future

    def close(self):
        """Close and wait until nothing runs."""
        closed = threading.Event()
        self.group.call_soon(self.dispatcher.close, closed.set)
        return closed


@pytest.fixture
def errors():
    return []


@pytest.fixture
def group(loop_factory, errors):
    group = PollGroup("jobs", loop_factory=loop_factory, on_error=lambda where, error: errors.append((where, error)))
    group.start()
    yield group
    group.stop()


@pytest.fixture
def bench(group):
    bench = Bench(group)
    yield bench
    if bench.dispatcher._closed is None:
        assert bench.close().wait(WAIT_S)
        assert bench.dispatcher.workers.join(WAIT_S)


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_worker_when_its_job_raises_anything_goes_on(bench, errors, raised):
    """Whatever a job raises is its own outcome; its thread does the next one, and others are told nothing (OX-59)."""
    lane = bench.dispatcher.slots.add_category("a")
    bench.dispatcher.slots.set_threads(general=1, batch=0, reply=0)
    bench.start()

    def fail():
        raise raised("no")

    outcome = bench.command(lane, fail)[1].result(WAIT_S)
    assert type(outcome) is raised
    assert bench.command(lane, lambda: "next")[1].result(WAIT_S) == "next"
    assert (bench.dispatcher.statistics().threads, errors) == (1, [])


def test_job_when_it_raises_and_nobody_wants_to_know_is_reported(bench, errors):
    """What a single job raises is contained and reported, SystemExit as well (OX-78)."""
    bench.start()
    done = threading.Event()

    def fail():
        raise SystemExit(3)

    bench.dispatcher.job(fail)
    batch = Batch()
    batch.add_job(lambda: 1)
    batch.completion(lambda _: done.set())
    bench.dispatcher.batch(batch)
    assert done.wait(WAIT_S)
    assert bench.close().wait(WAIT_S)
    assert ["SystemExit(3)" in str(error) for _, error in errors] == [True]


def test_outcome_when_its_taker_raises_costs_nobody_else(bench, errors):
    lane = bench.dispatcher.slots.add_category("a", max_queue=-1)
    bench.start()

    def fail(value, error):
        raise RuntimeError("taker")

    bench.on(lambda: [bench.dispatcher.submit(WorkerJob(lane, lambda: None, fail)) for _ in range(5)])
    assert bench.command(lane, lambda: 7)[1].result(WAIT_S) == 7
    assert bench.close().wait(WAIT_S)
    assert [str(error) for _, error in errors] == ["taker"] * 5


@pytest.mark.parametrize("where", ["worker", "node", "tagged"])
def test_completion_when_it_raises_is_reported_and_costs_nobody_else(bench, errors, where):
    thread = {"worker": None, "node": NODE_THREAD, "tagged": bench.dispatcher.add_tagged_thread("disk")}[where]
    bench.start()
    done = threading.Event()

    def fail(_):
        raise SystemExit("completion")

    for completion in (fail, lambda _: done.set()):
        batch = Batch()
        batch.add_job(lambda: None)
        batch.completion(completion, thread)
        bench.dispatcher.batch(batch)
    assert done.wait(WAIT_S)
    assert bench.close().wait(WAIT_S)
    assert ["completion" in f"{error.__cause__ or error}" for _, error in errors] == [True]


def test_completion_when_for_the_nodes_own_thread_runs_there(bench):
    bench.start()
    got = Future()
    batch = Batch()
    batch.add_job(lambda: 1)
    batch.completion(lambda _: got.set_result(threading.get_ident()), NODE_THREAD)
    bench.dispatcher.batch(batch)
    assert got.result(WAIT_S) == bench.group.thread_id


def test_batch_when_larger_than_a_turn_is_run_wholly_and_in_order(bench):
    bench.dispatcher.slots.set_threads(general=1, batch=0, reply=0)
    bench.start()
    order, done = [], threading.Event()
    count = 2 * dispatcher_module.JOBS_PER_TURN + 3
    batch = Batch()
    for number in range(count):
        batch.add_job(lambda number=number: order.append(number))
    bench.dispatcher.batch(batch)
    bench.dispatcher.job(lambda: (order.append("last"), done.set()))
    assert done.wait(WAIT_S)
    assert order == [*range(count), "last"]


def test_jobs_when_submitted_from_many_threads_run_each_once(bench):
    bench.start()
    seen, done = [], threading.Event()

    def submit(base):
        for number in range(200):
            bench.dispatcher.job(lambda number=number: seen.append(base + number))

    threads = [threading.Thread(target=submit, args=(1000 * base,)) for base in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    batch = Batch()
    batch.add_job(lambda: None)
    batch.completion(lambda _: done.set())
    bench.dispatcher.batch(batch)
    assert done.wait(WAIT_S)
    assert bench.close().wait(WAIT_S)
    assert sorted(seen) == [1000 * base + number for base in range(8) for number in range(200)]


def test_tagged_thread_when_it_has_jobs_runs_them_alone_and_in_order(bench):
    order = []
    disk = bench.dispatcher.add_tagged_thread("disk", lambda: order.append(("start", threading.get_ident())))
    got = Future()
    batch = Batch()
    for number in range(20):
        batch.add_job(lambda number=number: order.append((number, threading.get_ident())), disk)
    batch.completion(lambda _: got.set_result(threading.get_ident()), disk)
    bench.dispatcher.batch(batch)  # before the start: it begins with it
    bench.start()
    thread = got.result(WAIT_S)
    assert order == [("start", thread), *((number, thread) for number in range(20))]
    assert bench.dispatcher.statistics().threads == 1


def test_tagged_thread_when_its_start_function_fails_works_all_the_same(bench, errors):
    def fail():
        raise OSError("no disk")

    disk = bench.dispatcher.add_tagged_thread("disk", fail)
    bench.start()
    done = threading.Event()
    bench.dispatcher.job(done.set, disk)
    assert done.wait(WAIT_S)
    assert [str(error) for _, error in errors] == ["no disk"]


def test_tagged_thread_when_of_another_node_or_too_late_is_refused(bench):
    other = Dispatcher("other", 1, NodeCalls(bench.group)).add_tagged_thread("disk")
    bench.dispatcher.add_tagged_thread("disk")
    for name in ("disk", ""):
        with pytest.raises(ConfigError, match="name is"):
            bench.dispatcher.add_tagged_thread(name)
    bench.start()
    with pytest.raises(ConfigError, match="another node's"):
        bench.dispatcher.job(lambda: None, other)
    with pytest.raises(ConfigError, match="another node's"):
        bench.dispatcher.add_timer(lambda: None, 1.0, thread=other)


@pytest.mark.parametrize("where", ["worker", "node", "tagged"])
def test_timer_when_its_job_raises_goes_on(bench, errors, where):
    """A job that raises is reported, and the next time comes, wherever it runs (OX-79)."""
    thread = {"worker": None, "node": NODE_THREAD, "tagged": bench.dispatcher.add_tagged_thread("disk")}[where]
    times, thrice = [], threading.Event()

    def fail():
        times.append(threading.get_ident())
        if len(times) == 3:
            thrice.set()
        raise ValueError("timer")

    timer = bench.dispatcher.add_timer(fail, 0.002, thread=thread)  # before the start: it begins with it
    bench.start()
    assert thrice.wait(WAIT_S)
    assert (times[0] == bench.group.thread_id) == (where == "node")
    assert bench.dispatcher.cancel_timer(timer) is True
    assert bench.dispatcher.cancel_timer(timer) is False
    assert bench.close().wait(WAIT_S)
    assert {str(error) for _, error in errors} == {"timer"}


def test_timer_when_cancelled_leaves_nothing(bench):
    bench.start()

    class Keeper:
        def __init__(self):
            self.ran = threading.Event()

        def job(self):
            self.ran.set()

    keeper = Keeper()
    timer = bench.dispatcher.add_timer(keeper.job, 0.002)
    assert keeper.ran.wait(WAIT_S)
    bench.dispatcher.cancel_timer(timer)
    ended = Future()
    bench.dispatcher.job(lambda: ended.set_result(None))
    ended.result(WAIT_S)
    bench.on(lambda: None)
    gone = weakref.ref(keeper)
    del keeper
    gc.collect()
    assert gone() is None
    assert bench.on(lambda: (bench.group.deadlines.count, bench.dispatcher.statistics().timers)) == (0, 0)


def test_worker_when_idle_keeps_nothing_of_its_last_job(bench):
    lane = bench.dispatcher.slots.add_category("a")
    bench.start()

    class Payload:
        pass

    payload = Payload()
    gone = weakref.ref(payload)
    bench.command(lane, lambda kept=payload: kept is None)[1].result(WAIT_S)
    del payload
    ended = Future()
    bench.dispatcher.job(lambda: ended.set_result(None))
    ended.result(WAIT_S)
    for _ in range(1000):
        gc.collect()
        if gone() is None:
            break
    assert gone() is None


def test_jobs_when_too_many_are_submitted_are_refused(bench, monkeypatch):
    monkeypatch.setattr(dispatcher_module, "MOST_JOBS", 3)
    batch = Batch()
    for _ in range(3):
        batch.add_job(lambda: None)
    done = threading.Event()
    batch.completion(lambda _: done.set())
    bench.dispatcher.batch(batch)
    with pytest.raises(BusyError, match="3 jobs have not ended"):
        bench.dispatcher.job(lambda: None)
    bench.start()
    assert done.wait(WAIT_S)
    bench.dispatcher.job(lambda: None)


def test_timers_when_too_many_are_refused(bench, monkeypatch):
    monkeypatch.setattr(dispatcher_module, "MOST_TIMERS", 2)
    timers = [bench.dispatcher.add_timer(lambda: None, 60.0) for _ in range(2)]
    with pytest.raises(BusyError, match="2 timers"):
        bench.dispatcher.add_timer(lambda: None, 60.0)
    bench.dispatcher.cancel_timer(timers[0])
    assert bench.dispatcher.add_timer(lambda: None, 60.0) not in timers


def test_job_when_it_ends_after_the_loop_has_gone_harms_nobody(loop_factory, errors):
    group = PollGroup("gone", loop_factory=loop_factory, on_error=lambda where, error: errors.append((where, error)))
    group.start()
    bench = Bench(group).start()
    let_go, began = threading.Event(), threading.Event()
    bench.dispatcher.job(lambda: (began.set(), let_go.wait(WAIT_S)))
    assert began.wait(WAIT_S)
    bench.close()
    bench.on(lambda: None)
    assert group.stop()
    let_go.set()
    assert bench.dispatcher.workers.join(WAIT_S)
    assert errors == []


def test_worker_when_the_system_gives_no_thread_fails_its_job_or_leaves_it_to_others(bench, errors, monkeypatch):
    lane = bench.dispatcher.slots.add_category("a")
    bench.start()

    def refuse(self):
        raise RuntimeError("can't start new thread")

    real = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert str(bench.command(lane, lambda: 1)[1].result(WAIT_S)) == "can't start new thread"
    monkeypatch.setattr(threading.Thread, "start", real)
    let_go = threading.Event()
    _, first = bench.command(lane, lambda: let_go.wait(WAIT_S))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    _, second = bench.command(lane, lambda: 2)
    let_go.set()
    assert (first.result(WAIT_S), second.result(WAIT_S)) == (True, 2)
    assert [str(error) for _, error in errors] == ["can't start new thread"] * 2


def run_while_the_node_is_busy(bench, monkeypatch, burst_s, general=1, most_threads=2, submitted=None):
    """Submit ten jobs on the node's thread, which does nothing else until workers are idle; return what ran by then."""
    bench.dispatcher.slots.set_threads(general=general, batch=0, reply=0)
    monkeypatch.setattr(workers_module, "BURST_S", burst_s)
    start = threading.Thread.start

    def start_some(thread):
        if len(bench.dispatcher.workers) > most_threads:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    lane = bench.dispatcher.slots.add_category("a")
    bench.start()
    ran, begins = [], threading.Event()

    def run(number):
        assert begins.wait(WAIT_S)
        ran.append(number)

    def work():
        for number in range(10):
            bench.dispatcher.submit(WorkerJob(lane, partial(run, number)))
        if submitted is not None:
            submitted()
        begins.set()
        outcomes = bench.dispatcher.workers._mailbox
        until(lambda: sum(not following for *_, following in list(outcomes)) == general)
        return list(ran)

    by_then = bench.on(work)
    until(lambda: len(ran) == 10)
    return by_then, ran


def until(is_so):
    ends_at = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


def test_worker_when_jobs_wait_goes_on_by_itself(bench, monkeypatch):
    """A hand-over by the node's thread for each costs more than a short job."""
    by_then, _ = run_while_the_node_is_busy(bench, monkeypatch, 3600.0)
    assert by_then == list(range(10))


def test_worker_when_outcomes_have_waited_leaves_the_interpreter_to_the_node(bench, monkeypatch):
    by_then, ran = run_while_the_node_is_busy(bench, monkeypatch, 0.0)
    assert (by_then, ran) == ([0, 1], list(range(10)))


def test_worker_when_a_job_waits_for_another_thread_runs_it_before_later_ones(bench, monkeypatch):
    """A thread that gets no processor, or never came to be, keeps nothing of what has a slot already."""
    by_then, _ = run_while_the_node_is_busy(bench, monkeypatch, 3600.0, general=2, most_threads=1)
    assert by_then == list(range(10))


def test_workers_when_they_are_to_finish_do_first_what_has_a_slot(bench, monkeypatch):
    finish = bench.dispatcher.workers.finish
    _, ran = run_while_the_node_is_busy(bench, monkeypatch, 3600.0, general=2, most_threads=1, submitted=finish)
    assert ran == list(range(10))


def test_close_when_two_slots_were_passed_on_runs_both_jobs(bench):
    """One goes to the worker that has passed them on, the other one by the node's thread, after threads have ended."""
    bench.dispatcher.slots.set_threads(general=1, batch=0, reply=0)
    own, other = bench.dispatcher.slots.add_category("own", 1), bench.dispatcher.slots.add_category("other")
    bench.start()
    begins, told, closed = threading.Event(), [], threading.Event()

    def job(lane, name):
        return WorkerJob(lane, lambda: begins.wait(WAIT_S), lambda value, error: told.append((name, error)), name=name)

    def work():
        dispatcher = bench.dispatcher
        for lane, name in ((own, "first"), (other, "second"), (own, "third")):
            dispatcher.submit(job(lane, name))
        begins.set()
        until(lambda: [len(following) for *_, following in list(dispatcher.workers._mailbox)] == [2, 0])
        dispatcher.close(closed.set)
        until(lambda: not dispatcher.workers.unfinished())  # all threads have ended

    bench.on(work)
    assert closed.wait(WAIT_S)
    assert sorted(told) == [("first", None), ("second", None), ("third", None)]


def test_reply_when_the_node_stops_is_told_all_the_same(bench, errors):
    bench.dispatcher.slots.set_threads(general=1, batch=0, reply=0)
    bench.start()
    let_go, told = threading.Event(), []

    def fail():
        told.append("failed")
        raise ValueError("callback")

    bench.on(lambda: bench.dispatcher.reply(lambda: let_go.wait(WAIT_S) and told.append("ran")))
    bench.on(lambda: bench.dispatcher.reply(lambda: told.append("waited")))
    bench.on(lambda: bench.dispatcher.reply(fail))
    closed = bench.close()
    bench.on(lambda: bench.dispatcher.reply(lambda: told.append("late")))
    let_go.set()
    assert closed.wait(WAIT_S)
    assert told == ["waited", "failed", "late", "ran"]
    assert [str(error) for _, error in errors] == ["callback"]


def test_queue_when_full_for_long_is_reported_once_in_a_while(bench, errors, monkeypatch):
    lane = bench.dispatcher.slots.add_category("a", max_queue=0)
    bench.dispatcher.slots.set_threads(general=1)
    bench.start()
    let_go = threading.Event()
    _, first = bench.command(lane, lambda: let_go.wait(WAIT_S))
    assert {bench.command(lane, lambda: None)[0] for _ in range(50)} == {SlotVerdict.DROP}
    assert [str(error) for _, error in errors] == ["0 commands of 'a' wait, 0 may: others are dropped"]
    monkeypatch.setattr(dispatcher_module, "FULL_REPORT_S", 0.0)
    bench.command(lane, lambda: None)
    assert len(errors) == 2
    let_go.set()
    assert first.result(WAIT_S) is True
