"""Poll groups on both loops: their life, and the pollables on them."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from pollgroup_kit import WAIT_S, FakePollable, on_thread

from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.pollgroup import GroupState, PollGroup, default_loop_factory

# --- life --------------------------------------------------------------------------------------------------------


def test_start_when_new_runs_the_loop_on_a_thread_of_its_own(make_group):
    group = make_group("alpha")
    assert group.state is GroupState.RUNNING
    assert not group.in_thread()
    thread = on_thread(group, threading.current_thread)
    assert (thread.name, thread.daemon, thread.ident) == ("alpha", True, group.thread_id)
    assert on_thread(group, asyncio.get_running_loop) is group.loop


def test_start_when_called_twice_is_refused(group):
    with pytest.raises(LocalProtocolError):
        group.start()


def test_start_when_the_factory_fails_leaves_a_stopped_group():
    def fail():
        raise OSError("no descriptors left")

    group = PollGroup("g", loop_factory=fail)
    with pytest.raises(OSError, match="no descriptors left"):
        group.start()
    assert group.state is GroupState.STOPPED
    assert group.stop()


def test_default_loop_factory_when_uvloop_is_missing_gives_asyncio(monkeypatch):
    loop = default_loop_factory()
    loop.close()
    assert type(loop).__module__.startswith("uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = default_loop_factory()
    loop.close()
    assert type(loop).__module__.startswith("asyncio")


def test_calls_when_not_started_are_refused(make_group):
    group = make_group(start=False)
    pollable = FakePollable()
    for call in (
        lambda: group.loop,
        lambda: group.call_soon(print),
        lambda: group.add_pollable(pollable, pollable.registration),
        lambda: group.watch_input(0, print),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    assert group.stop()


def test_stop_when_running_closes_the_loop_and_refuses_work(make_group):
    group = make_group()
    assert group.stop(WAIT_S)
    assert group.state is GroupState.STOPPED
    assert group.loop.is_closed()
    pollable = FakePollable()
    with pytest.raises(ClosedError):
        group.call_soon(print)
    with pytest.raises(ClosedError):
        group.add_pollable(pollable, pollable.registration)
    assert pollable.registration.processor is None
    assert group.stop()


def test_stop_when_its_thread_has_ended_is_not_taken_for_another_one(make_group):
    """The system gives the number of a thread that has ended to the next one, and that may stop the group once more."""
    group, taken_for = make_group(), []
    assert group.stop(WAIT_S)
    for _ in range(20):
        thread = threading.Thread(target=lambda: taken_for.append(group.in_thread()))
        thread.start()
        thread.join(WAIT_S)
    assert taken_for == [False] * 20


def test_stop_when_pollables_are_attached_detaches_them_and_runs_their_last_jobs(make_group):
    group = make_group()
    pollables = [FakePollable() for _ in range(3)]
    ran = []
    for number, pollable in enumerate(pollables):
        job = pollable.registration.job(lambda number=number: ran.append(number))
        pollable.on_detached = lambda _, p=pollable, job=job: p.registration.schedule(job)
        group.add_pollable(pollable, pollable.registration)
    for pollable in pollables:
        assert pollable.attached_event.wait(WAIT_S)
    assert group.stop(WAIT_S)
    assert [pollable.log for pollable in pollables] == [[("attached", "g", True), ("detached", "g", True)]] * 3
    assert ran == [0, 1, 2]
    assert [pollable.registration.processor for pollable in pollables] == [None] * 3
    assert group.statistics().pollables == 0


def test_stop_when_called_in_a_forked_child_touches_nothing(group, monkeypatch):
    """The thread is the parent's, and so is all that its locks guard."""
    with monkeypatch.context() as patch, group._lock:
        patch.setattr("flowctl.pollgroup.os.getpid", lambda: 0)
        assert group.forked
        stopped = []
        child = threading.Thread(target=lambda: stopped.append(group.stop()))
        child.start()
        child.join(WAIT_S)
        assert stopped == [True]
    assert not group.forked
    assert group.state is GroupState.RUNNING


def test_stop_when_called_on_its_own_thread_does_not_wait(group):
    assert on_thread(group, group.stop) is False
    assert group.stop(WAIT_S)


def test_stop_when_a_handler_hangs_gives_up_at_the_deadline(make_group):
    group = make_group()
    entered, go_on = threading.Event(), threading.Event()
    group.call_soon(lambda: (entered.set(), go_on.wait(WAIT_S)))
    assert entered.wait(WAIT_S)
    assert group.stop(0.01) is False
    assert group.state is GroupState.STOPPING
    go_on.set()
    assert group.stop(WAIT_S) is True


def test_stop_when_a_job_never_ends_asking_ends_anyway(make_group):
    group = make_group()
    pollable = FakePollable()
    pollable.registration.schedule(pollable.registration.job(lambda: True))
    group.add_pollable(pollable, pollable.registration)
    assert pollable.attached_event.wait(WAIT_S)
    assert group.stop(WAIT_S)


def test_stop_when_tasks_are_left_cancels_them(make_group):
    group = make_group()
    cleaned = threading.Event()

    async def task() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0)
            cleaned.set()

    tasks = []
    on_thread(group, lambda: tasks.append(group.loop.create_task(task())))
    on_thread(group, lambda: None)
    assert group.stop(WAIT_S)
    assert cleaned.is_set()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_thread_when_handlers_and_tasks_raise_what_ends_loops_goes_on(make_group, errors, kind):
    group = make_group()
    pollable, after = FakePollable(), threading.Event()
    pollable.on_attached = lambda _: (_ for _ in ()).throw(kind())

    async def task() -> None:
        raise kind

    async def ended() -> None:
        await asyncio.wait([group.loop.create_task(task())])

    def fail() -> None:
        raise kind

    tasks = []
    group.add_pollable(pollable, pollable.registration)
    group.call_soon(lambda: tasks.append(group.loop.create_task(ended())))
    group.call_soon(fail)
    group.call_soon(lambda: group.call_later(0.01, after.set))
    assert after.wait(WAIT_S)
    assert group.state is GroupState.RUNNING
    on_thread(group, lambda: None)
    assert group.stop(WAIT_S)
    assert {(where.partition(": ")[0], type(error.__cause__)) for where, error in errors} == {("g", kind)}
    # A task that is cancelled has ended as tasks may; of another the loop may tell once more that it was not awaited.
    assert len(errors) == 2 if kind is asyncio.CancelledError else len(errors) >= 3


def test_thread_when_a_handler_stops_the_loop_runs_on(make_group):
    group = make_group()
    on_thread(group, group.loop.stop)
    on_thread(group, lambda: None)
    assert group.state is GroupState.RUNNING
    assert group.stop(WAIT_S)


def test_on_running_loop_when_used_lives_on_the_callers_loop(factory):
    async def main() -> None:
        group = PollGroup.on_running_loop("here")
        assert group.in_thread()
        assert group.loop is asyncio.get_running_loop()
        pollable = FakePollable()
        ran = []
        job = pollable.registration.job(lambda: ran.append(1))
        group.add_pollable(pollable, pollable.registration)
        assert pollable.what() == []
        pollable.registration.schedule(job)
        for _ in range(3):
            await asyncio.sleep(0)
        assert pollable.what() == ["attached"]
        assert ran == [1]
        assert group.stop() is True
        assert pollable.what() == ["attached", "detached"]
        await asyncio.sleep(0)

    loop = factory()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_on_running_loop_when_stopped_from_a_handler_ends_after_it(factory):
    """Inside a handler the pollables cannot be detached under its feet, so stop waits for the next turn."""

    async def main() -> None:
        group = PollGroup.on_running_loop("here")
        pollable = FakePollable()
        group.add_pollable(pollable, pollable.registration)
        outcome = []
        group.call_soon(lambda: outcome.append((group.stop(), pollable.what())))
        for _ in range(4):
            await asyncio.sleep(0)
        assert outcome == [(False, ["attached"])]
        assert pollable.what() == ["attached", "detached"]
        assert group.state is GroupState.STOPPED

    loop = factory()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_on_running_loop_when_stopped_from_another_thread_waits_for_it(factory):
    async def main() -> None:
        group = PollGroup.on_running_loop("here")
        assert await asyncio.get_running_loop().run_in_executor(None, group.stop, WAIT_S) is True
        assert group.state is GroupState.STOPPED

    loop = factory()
    try:
        loop.run_until_complete(main())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


# --- pollables ---------------------------------------------------------------------------------------------------


def test_add_pollable_when_jobs_are_pending_runs_them_after_attached(group):
    """The registration is bound at once, attached runs on the thread, and jobs scheduled before run after it."""
    pollable = FakePollable()
    done = threading.Event()
    job = pollable.registration.job(lambda: pollable.log.append("job") or done.set())
    pollable.registration.schedule(job)
    group.add_pollable(pollable, pollable.registration)
    assert pollable.registration.processor is group.processor
    assert done.wait(WAIT_S)
    assert pollable.log == [("attached", "g", True), "job"]


def test_add_pollable_when_its_registration_is_bound_elsewhere_leaves_no_trace(make_group):
    first, second = make_group("first"), make_group("second")
    pollable = FakePollable()
    first.add_pollable(pollable, pollable.registration)
    assert pollable.attached_event.wait(WAIT_S)
    with pytest.raises(LocalProtocolError):
        second.add_pollable(pollable, pollable.registration)
    assert second.statistics().pollables == 0
    assert second.statistics().weight == 0
    on_thread(second, lambda: None)
    assert pollable.what() == ["attached"]


def test_add_pollable_when_attached_raises_is_reported_and_undone(group, errors):
    pollable = FakePollable()
    pollable.on_attached = lambda _: 1 // 0
    job = pollable.registration.job(lambda: None)
    pollable.registration.schedule(job)
    group.add_pollable(pollable, pollable.registration)
    assert pollable.detached_event.wait(WAIT_S)
    on_thread(group, lambda: None)
    assert group.statistics().pollables == 0
    assert pollable.registration.processor is None
    assert job.pending
    assert [type(error) for _, error in errors] == [ZeroDivisionError]
    assert group.statistics().errors == 1


def test_remove_pollable_when_called_on_the_thread_is_done_at_once(group):
    pollable = FakePollable()
    group.add_pollable(pollable, pollable.registration)

    def remove():
        return group.remove_pollable(pollable), pollable.what(), pollable.registration.processor

    assert on_thread(group, remove) == (True, ["attached", "detached"], None)
    assert on_thread(group, remove)[0] is False


def test_remove_pollable_when_called_from_another_thread_is_done_on_the_thread(group):
    pollable = FakePollable()
    group.add_pollable(pollable, pollable.registration)
    assert group.remove_pollable(pollable)
    assert group.statistics().pollables == 0
    assert pollable.detached_event.wait(WAIT_S)
    assert pollable.log[-1] == ("detached", "g", True)


def test_remove_pollable_when_not_attached_yet_skips_attached(group):
    pollable = FakePollable()

    def add_and_remove() -> None:
        group.add_pollable(pollable, pollable.registration)
        group.remove_pollable(pollable)

    on_thread(group, add_and_remove)
    on_thread(group, lambda: None)
    assert pollable.what() == ["detached"]
    assert pollable.registration.processor is None


def test_weight_when_pollables_say_their_load_is_its_sum(group, errors):
    pollables = [FakePollable(w) for w in (None, 2.5, float("nan"), -1.0)]
    failing = FakePollable()
    failing.load = lambda: 1 // 0
    for pollable in (*pollables, failing):
        group.add_pollable(pollable, pollable.registration)
    assert group.statistics().weight == 6.5
    assert [type(error) for _, error in errors] == [ZeroDivisionError]
    pollables[0].load = lambda: 10.0
    assert group.refresh_weight() == 15.5
    for pollable in (*pollables, failing):
        group.remove_pollable(pollable)
    assert group.statistics().weight == 0.0
