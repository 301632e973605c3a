"""Moving pollables between poll groups on both loops: order, one thread at a time, and what can go wrong."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pollgroup_kit import WAIT_S, FakePollable, on_thread

from flowctl.errors import ClosedError

if TYPE_CHECKING:
    from flowctl.pollgroup import PollGroup


def test_migrate_when_asked_moves_between_threads_in_order(make_group):
    first, second = make_group("first"), make_group("second")
    pollable = FakePollable()
    first.add_pollable(pollable, pollable.registration)
    done = threading.Event()
    jobs = [
        pollable.registration.job(lambda n=n: pollable.log.append((f"job {n}", "", second.in_thread())))
        for n in range(5)
    ]
    last = pollable.registration.job(done.set)

    def move_and_schedule() -> None:
        # In this order the loop comes to the move before it comes to the round of jobs: all of them are moved.
        assert first.migrate(pollable, second)
        for n in (3, 1, 4, 0, 2):
            pollable.registration.schedule(jobs[n])
        pollable.registration.schedule(last)

    assert pollable.attached_event.wait(WAIT_S)
    on_thread(first, lambda: None)
    on_thread(first, move_and_schedule)
    assert done.wait(WAIT_S)
    assert pollable.log == [
        ("attached", "first", True),
        ("detached", "first", True),
        ("attached", "second", True),
        *((f"job {n}", "", True) for n in (3, 1, 4, 0, 2)),
    ]
    assert pollable.registration.processor is second.processor
    assert (first.statistics().pollables, second.statistics().pollables) == (0, 1)


def test_migrate_when_jobs_are_scheduled_meanwhile_runs_each_on_one_thread(make_group):
    groups = [make_group("a"), make_group("b")]
    pollable = FakePollable()
    wrong: list[str] = []
    seen = [0]
    wanted = [0]
    present: list[PollGroup | None] = [None]
    moves = threading.Semaphore(0)

    def attached(group: PollGroup) -> None:
        present[0] = group
        moves.release()

    def detached(group: PollGroup) -> None:
        if present[0] is not group:
            wrong.append("detached by another group than attached")
        present[0] = None

    def run() -> None:
        if present[0] is None or not present[0].in_thread():
            wrong.append("a job ran outside the thread that the pollable is on")
        seen[0] = wanted[0]

    pollable.on_attached, pollable.on_detached = attached, detached
    job = pollable.registration.job(run)
    groups[0].add_pollable(pollable, pollable.registration)
    assert moves.acquire(timeout=WAIT_S)
    stopping = threading.Event()

    def scheduler() -> None:
        while not stopping.is_set():
            wanted[0] += 1
            pollable.registration.schedule(job)

    thread = threading.Thread(target=scheduler)
    thread.start()
    for number in range(100):
        assert groups[number % 2].migrate(pollable, groups[1 - number % 2])
        assert moves.acquire(timeout=WAIT_S)
    stopping.set()
    thread.join(WAIT_S)
    pollable.registration.schedule(job)
    on_thread(groups[0], lambda: None)
    on_thread(groups[0], lambda: None)
    assert wrong == []
    assert wanted == seen
    assert groups[0].statistics().pollables == 1


def test_migrate_when_the_other_group_has_stopped_stays(make_group, errors):
    first, second = make_group("first"), make_group("second")
    assert second.stop(WAIT_S)
    pollable = FakePollable()
    first.add_pollable(pollable, pollable.registration)
    assert first.migrate(pollable, second)
    on_thread(first, lambda: None)
    done = threading.Event()
    pollable.registration.schedule(pollable.registration.job(done.set))
    assert done.wait(WAIT_S)
    assert pollable.what() == ["attached"]
    assert [type(error) for _, error in errors] == [ClosedError]


def test_migrate_when_the_other_group_stops_in_between_comes_back(make_group, errors):
    first, second = make_group("first"), make_group("second")
    pollable = FakePollable()
    pollable.on_detached = lambda group: group is first and second.stop(WAIT_S)
    first.add_pollable(pollable, pollable.registration)
    assert pollable.attached_event.wait(WAIT_S)
    pollable.attached_event.clear()
    first.migrate(pollable, second)
    assert pollable.attached_event.wait(WAIT_S)
    done = threading.Event()
    pollable.registration.schedule(pollable.registration.job(done.set))
    assert done.wait(WAIT_S)
    assert pollable.what() == ["attached", "detached", "attached"]
    assert pollable.registration.processor is first.processor
    assert [type(error) for _, error in errors] == [ClosedError]
    assert first.statistics().pollables == 1


def test_migrate_when_detached_releases_the_registration_ends_there(make_group, errors):
    first, second = make_group("first"), make_group("second")
    pollable = FakePollable()
    pollable.on_detached = lambda group: pollable.registration.release()
    first.add_pollable(pollable, pollable.registration)
    assert first.migrate(pollable, second)
    assert pollable.detached_event.wait(WAIT_S)
    for group in (first, second):
        on_thread(group, lambda: None)
        assert group.statistics().pollables == 0
    assert pollable.what() == ["attached", "detached"]
    assert errors == []


def test_migrate_when_removed_before_its_turn_does_nothing(make_group):
    first, second = make_group("first"), make_group("second")
    pollable = FakePollable()
    first.add_pollable(pollable, pollable.registration)
    assert pollable.attached_event.wait(WAIT_S)

    def move_and_remove() -> None:
        assert first.migrate(pollable, second)
        assert first.remove_pollable(pollable)

    on_thread(first, move_and_remove)
    on_thread(first, lambda: None)
    on_thread(second, lambda: None)
    assert pollable.what() == ["attached", "detached"]
    assert first.migrate(pollable, second) is False


def test_migrate_when_called_inside_its_own_handler_waits_for_its_end(make_group):
    first, second = make_group("first"), make_group("second")
    pollable = FakePollable()
    pollable.on_detached = lambda group: pollable.log.append(("left handler" if not inside else "in handler",))
    inside = [1]

    def handler() -> None:
        assert first.migrate(pollable, second)
        time.sleep(0)  # gives the other thread its chance to be too early
        pollable.log.append(("end of handler",))
        inside.clear()

    first.add_pollable(pollable, pollable.registration)
    pollable.registration.schedule(pollable.registration.job(handler))
    while "attached" not in [entry[0] for entry in pollable.log[1:]]:
        on_thread(second, lambda: None)
    assert [entry[0] for entry in pollable.log] == [
        "attached",
        "end of handler",
        "detached",
        "left handler",
        "attached",
    ]
    assert first.migrate(pollable, first) is False
    assert second.migrate(pollable, second) is True
